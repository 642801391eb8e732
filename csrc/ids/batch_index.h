/* batch_index.h: the distinct ids of a batch, by table and shard, and where
 * each id of the batch is among them.
 *
 * A lookup makes the index once; its update sums gradients by it.  The ids are
 * given as segments, each of one *unit* (a table of the batch).  They are
 * split by hash into *cells*: each shard has `subs` of them, so that several
 * threads work on one table.  Within a cell distinct ids keep the order of
 * their first occurrence; cells follow one another, so the distinct ids of a
 * (unit, shard) lie side by side.  Nothing depends on the number of threads.
 *
 * An index is shared by reference and does not change once it is shared.
 */
#ifndef PERSIA_IDS_BATCH_INDEX_H
#define PERSIA_IDS_BATCH_INDEX_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"
#include "mem/mem.h"
#include "sched/sched.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct index_segment {
    uint32_t unit; /* never falls from segment to segment */
    uint32_t job;  /* the caller's number of it */
    size_t n;
    const uint64_t *ids; /* [n]; read by persia_batch_index_make() alone */
} index_segment;

/* The first occurrence of an id in its cell. */
#define INDEX_FIRST 0x80000000u

/* Up to IDS_CHUNK ids of a segment, ordered by cell; within a cell in the
 * order of the segment. */
typedef struct index_chunk {
    uint32_t unit;
    size_t segment;
    size_t first, n;  /* in the segment */
    uint16_t *order;  /* [n] positions in the chunk */
    uint16_t *start;  /* [cells + 1] where each cell begins in order */
    uint32_t *place;  /* [n] by order: place among the cell's distinct ids,
                         with INDEX_FIRST */
} index_chunk;

typedef struct index_pool index_pool;

typedef struct batch_index {
    sched *s;
    uint64_t key;          /* of hash tables, see ids.h; odd */
    uint32_t shards, subs; /* subs: a power of two */
    uint32_t cells;        /* shards * subs */
    uint32_t units;
    index_segment *segments; /* [segments_n] */
    size_t segments_n;
    uint32_t *tables;        /* [units] their numbers */
    size_t ids_n;            /* of all segments */
    index_chunk *chunks;
    size_t chunks_n;
    size_t *first_chunk; /* [units + 1] */
    size_t *base;        /* [units * cells + 1]: distinct ids before each
                            (unit, cell); the last is their number */
    uint64_t *ids;       /* [base[units * cells]] distinct */
    uint32_t *hints;     /* [the same] row numbers, or NULL */
    /* private: */
    size_t *region;      /* [units * cells + 1]: ids before each */
    size_t *table_at;    /* [units * cells]: of a large cell's hash table */
    uint64_t *found;     /* [ids_n] distinct ids, at their cell's region */
    uint32_t *entries;   /* of hash tables */
    mem_buffer memory, table_memory, hint_memory;
    void *source; /* of a batch whose ids are elsewhere; else NULL */
    void (*drop)(void *source);
    index_pool *pool;
    struct batch_index *next; /* free, under the pool's lock */
    size_t charged;           /* bytes, under the pool's lock */
    atomic_uint references;
} batch_index;

/* What is indexed. */
typedef struct index_batch {
    const index_segment *segments;
    size_t segments_n;
    const uint32_t *tables; /* [units] their numbers */
    uint32_t units;
} index_batch;

/* Of an index that only the caller has, and whose key is set. */
PERSIA_API int persia_batch_index_make(batch_index *x, sched *s,
                                       uint32_t shards, const index_batch *b);
/* Memory for hints, each UINT32_MAX at first: no row is known. */
PERSIA_API int persia_batch_index_hint(batch_index *x);

/* Distinct ids of a unit at a shard: [from, to). */
static inline size_t index_from(const batch_index *x, uint32_t unit,
                                uint32_t shard)
{
    return x->base[(size_t)unit * x->cells + (size_t)shard * x->subs];
}
static inline size_t index_to(const batch_index *x, uint32_t unit,
                              uint32_t shard)
{
    return index_from(x, unit, shard + 1);
}
static inline size_t index_distinct(const batch_index *x)
{
    return x->base[(size_t)x->units * x->cells];
}

/* ---- pool ----
 *
 * All indexes of a store, and those that wait for the backward of their
 * forward, by its ticket.  Memory of an index without references is used for
 * the next one.  What waits and what is free is given up, oldest first, where
 * all indexes together have more than the pool's bytes: a backward that does
 * not find its index groups its ids again.  Indexes that a lookup or an
 * update holds are counted, too, and bounded by the number of those. */
enum { INDEX_POOL_WAITS = 1024 };

struct index_pool {
    uint64_t key;         /* of the indexes */
    pthread_mutex_t lock; /* guards all below */
    size_t most;          /* bytes */
    size_t bytes;         /* of all indexes */
    size_t live;          /* indexes with references */
    batch_index *free;
    struct {
        uint64_t ticket;
        batch_index *index; /* NULL: none */
    } waits[INDEX_POOL_WAITS]; /* by ticket modulo their number */
    uint64_t oldest;      /* no ticket before it waits, except late ones */
    uint64_t newest;
};

PERSIA_API void persia_index_pool_init(index_pool *p, size_t most);
/* No index has a reference but those that wait. */
PERSIA_API void persia_index_pool_free(index_pool *p);
/* An index with one reference, or NULL with the error set.  Its source, if it
 * gets one, is dropped with the last reference, under the pool's lock. */
PERSIA_API batch_index *persia_index_pool_new(index_pool *p);
PERSIA_API batch_index *persia_batch_index_get(batch_index *x);
/* Gives back a reference, on any thread; NULL: nothing. */
PERSIA_API void persia_batch_index_put(batch_index *x);

/* Takes over a reference until persia_index_pool_take() asks for it. */
PERSIA_API void persia_index_pool_wait(index_pool *p, uint64_t ticket,
                                       batch_index *x);
/* The index of a ticket and its reference, once; NULL: there is none. */
PERSIA_API batch_index *persia_index_pool_take(index_pool *p, uint64_t ticket);
/* Gives up all that wait. */
PERSIA_API void persia_index_pool_forget(index_pool *p);

#ifdef __cplusplus
}
#endif
#endif
