/* group.h: the distinct ids of a batch, by table and shard (private
 * to ps).
 *
 * The ids of a call come as segments, each of one *unit* (a table of the
 * call).  They are split by hash into *cells*: each shard has `subs` of them,
 * so that several threads work on one table.  Within a cell distinct ids keep
 * the order of their first occurrence; cells follow one another, so the
 * distinct ids of a (unit, shard) lie side by side.  Nothing depends on the
 * number of threads.
 */
#ifndef PERSIA_CLIENT_GROUP_H
#define PERSIA_CLIENT_GROUP_H

#include "ids/ids.h"
#include "mem/mem.h"
#include "sched/sched.h"

typedef struct group_segment {
    uint32_t unit; /* never falls from segment to segment */
    size_t n;
    const uint64_t *ids; /* [n] */
} group_segment;

/* The first occurrence of an id in its cell. */
#define GROUP_FIRST 0x80000000u

/* Up to IDS_CHUNK ids of a segment, ordered by cell; within a cell as they
 * came. */
typedef struct group_chunk {
    uint32_t unit;
    size_t segment;
    size_t first, n;  /* in the segment */
    uint16_t *order;  /* [n] positions in the chunk */
    uint16_t *start;  /* [cells + 1] where each cell begins in order */
    uint32_t *place;  /* [n] by order: place among the cell's distinct ids,
                         with GROUP_FIRST */
} group_chunk;

typedef struct group {
    sched *s;
    uint32_t shards, subs; /* subs: a power of two */
    uint32_t cells;        /* shards * subs */
    uint32_t units;
    /* Made by group_make(): */
    group_segment *segments; /* [segments_n] a copy */
    size_t segments_n;
    uint32_t *tables;        /* [units] a copy */
    size_t ids_n; /* of all segments */
    group_chunk *chunks;
    size_t chunks_n;
    size_t *first_chunk; /* [units + 1] */
    size_t *base;        /* [units * cells + 1]: distinct ids before each
                            (unit, cell); the last is their number */
    uint64_t *ids;       /* [base[units * cells]] distinct */
    /* private: */
    size_t *region;      /* [units * cells + 1]: ids before each */
    size_t *table_at;    /* [units * cells]: of a large cell's hash table */
    uint64_t *found;     /* [ids_n] distinct ids, at their cell's region */
    uint32_t *entries;   /* of hash tables */
    mem_buffer memory, table_memory;
} group;

/* What is grouped. */
typedef struct group_batch {
    const group_segment *segments;
    size_t segments_n;
    const uint32_t *tables; /* [units] their numbers */
    uint32_t units;
} group_batch;

/* Memory is kept for the next batch. */
int group_make(group *g, sched *s, uint32_t shards, const group_batch *b);
/* Whether g, which was made, is what group_make() would make of b: then it
 * is b's from now on, and else as before. */
int group_fits(group *g, const group_batch *b);
void group_free(group *g);

/* Distinct ids of a unit at a shard: [from, to). */
static inline size_t group_from(const group *g, uint32_t unit, uint32_t shard)
{
    return g->base[(size_t)unit * g->cells + (size_t)shard * g->subs];
}
static inline size_t group_to(const group *g, uint32_t unit, uint32_t shard)
{
    return group_from(g, unit, shard + 1);
}
static inline size_t group_distinct(const group *g)
{
    return g->base[(size_t)g->units * g->cells];
}

#endif
