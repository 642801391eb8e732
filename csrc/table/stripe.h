/* stripe.h: one lockable part of a table: rows, index, free slots, cut
 * (private).
 *
 * Invariants, under the stripe's lock:
 *   1. slot < used; a slot is live iff its clock is not 0;
 *   2. a slot is in the index iff it is live; free slots are chained by the
 *      first four bytes of their id;
 *   3. rows = live slots.
 *
 * Functions that assume the lock say so by their name's end: _locked.
 */
#ifndef PERSIA_TABLE_STRIPE_H
#define PERSIA_TABLE_STRIPE_H

#include "simd/simd.h"
#include "table/hand.h"
#include "table/index.h"
#include "table/table.h"

#include <pthread.h>
#include <stdatomic.h>

enum { ROW_CLOCK = 8, ROW_VECTOR = 12 }; /* offsets in a row, bytes */

typedef struct stripe_cut {
    uint32_t mark;    /* slots used at the moment of the cut; 0: no cut */
    uint32_t cursor;  /* slots below it were handed out */
    uint64_t *copied; /* a bit a slot: its old row was put aside */
    mem_arena aside;  /* rows put aside; address space for `mark` of them */
    uint32_t aside_n, aside_done;
    uint32_t aside_charged; /* rows */
    int failed;       /* why rows could not be put aside; then mark is 0 */
} stripe_cut;

/* What a call that makes rows may take: see reserve_claim. */
typedef struct stripe_room {
    size_t *slots;          /* of the stripe */
    _Atomic(size_t) *opens; /* of all */
} stripe_room;

typedef struct stripe_watch stripe_watch;

typedef struct stripe {
    _Alignas(64) pthread_rwlock_t lock; /* guards all but expected */
    uint32_t noted; /* a cut or a watch notes changes of slots below it */
    uint64_t expected; /* of the table's: see persia_table_expect() */
    stripe_watch *watches; /* watch.h; they stay where all from index on is
                              exchanged */
    row_index index;
    mem_arena arena;
    uint32_t used;      /* slots ever used */
    uint32_t free_head; /* ROW_NONE: no free slot */
    uint32_t rows;
    uint32_t uncounted; /* rows that the table's count lacks; see
                           stripe_count_locked() */
    stripe_cut cut;
    hand hand;          /* of a table that evicts */
} stripe;

struct table {
    table_config config;
    evictor evict;         /* its options */
    admitter admit;        /* its filter: a line by its stripe's lock */
    uint32_t field;        /* offset of evict.field in a row; 0: none */
    uint32_t stripes;      /* power of two */
    uint32_t vector_bytes;
    uint32_t state_offset; /* in a row, bytes */
    uint32_t state_floats;
    float *state_start;    /* [state_floats] of a new row */
    size_t stride;         /* bytes */
    uint32_t init_key[2];  /* philox key of (seed, name) */
    uint32_t noise_key[2];
    pthread_rwlock_t gate; /* pushes hold it shared, a cut exclusively */
    /* Of a table with a capacity, see reserve.h: held shared while rows are
     * made far from it, exclusively by a call near it, which counts. */
    pthread_rwlock_t full_lock;
    _Atomic uint64_t pending; /* that holders of the shared lock may make */
    _Atomic uint64_t rows;    /* at most capacity, at any time; without one
                                 behind by what stripes have not counted */
    _Atomic uint64_t pushes;
    _Atomic uint64_t pulled, missed;
    _Atomic uint64_t created, evicted, refused, nonfinite;
    _Atomic uint64_t candidates; /* slots that hands looked at */
    /* Of a table with a memory limit, see reserve.h: */
    pthread_mutex_t growth_lock; /* guards: */
    uint64_t making;  /* rows that claims in flight may make */
    uint64_t growth;  /* bytes announced for pages that widen */
    _Atomic(int) shallow; /* a directory had no memory: pages are large */
    uint32_t now;          /* persia_table_set_now(); no other thread has the
                              table then */
    uint64_t expected;     /* rows; written while no other thread knows it */
    int filling;           /* the same: see persia_table_set_filling() */
    table_cut *cut;        /* guarded by gate, held exclusively */
    table_watch *watches;  /* likewise */
    mem_blocks blocks;     /* the stripes' index pages */
    /* [stripes] slots that a stripe has room for, except those that are
     * reserved: see reserve.h.  A stripe's grows under its lock, or all change
     * under the gate, held exclusively. */
    _Atomic(int64_t) *left;
    stripe stripe[];
};

/* Rows that it may have; 0: any number. */
static inline uint64_t table_capacity(const table *t)
{
    return t->filling ? 0 : t->config.capacity;
}
static inline row_store stripe_rows(const table *t, const stripe *s)
{
    return (row_store){ s->arena.base, t->stride };
}
static inline char *stripe_row(const table *t, const stripe *s, uint32_t slot)
{
    return s->arena.base + (size_t)slot * t->stride;
}
/* The state of a new row. */
static inline void row_init_state(const table *t, void *state)
{
    __builtin_memcpy(state, t->state_start, t->state_floats * sizeof(float));
}
static inline uint32_t row_clock(const char *row)
{
    uint32_t clock;
    __builtin_memcpy(&clock, row + ROW_CLOCK, sizeof clock);
    return clock;
}
static inline uint32_t row_field(const table *t, const char *row)
{
    uint32_t field;
    __builtin_memcpy(&field, row + t->field, sizeof field);
    return field;
}
static inline void row_set_field(const table *t, char *row, uint32_t field)
{
    __builtin_memcpy(row + t->field, &field, sizeof field);
}
static inline void row_set_clock(char *row, uint32_t clock)
{
    __builtin_memcpy(row + ROW_CLOCK, &clock, sizeof clock);
}
/* The push counter as rows keep it: never 0. */
static inline uint32_t clock_short(uint64_t pushes)
{
    return (uint32_t)pushes ? (uint32_t)pushes : UINT32_MAX;
}
/* Pushes since the row was touched; below 0 for a push that began later, of
 * which few run at once.  A row untouched for nearly 2^32 pushes, when its
 * clock has turned round, counts as new. */
static inline float row_age(uint32_t clock, uint32_t touched)
{
    enum { LATER = 1 << 20 };
    return (float)((int64_t)(uint32_t)(clock - touched + LATER) - LATER);
}
/* Every cache line of the row's first bytes: a row may begin anywhere in a
 * line, so its last byte may be in one more line than its size suggests. */
static inline void row_prefetch(const char *row, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(row + at);
    __builtin_prefetch(row + bytes - 1);
}

/* A row's vector as fp32. */
INLINE_HOT void vector_read(const char *from, float *restrict to,
                            uint32_t dtype, uint32_t dim)
{
    float scale;

    if (dtype == VECTOR_FP32) {
        __builtin_memcpy(to, from, dim * sizeof *to);
        return;
    }
    if (dtype == VECTOR_BF16) {
        for (uint32_t j = 0; j < dim; j++) {
            uint16_t bits;
            __builtin_memcpy(&bits, from + 2 * j, sizeof bits);
            to[j] = bf16_widen(bits);
        }
        return;
    }
    __builtin_memcpy(&scale, from, sizeof scale);
    for (uint32_t j = 0; j < dim; j++)
        to[j] = scale * (float)(int8_t)from[4 + j];
}

int stripe_init(table *t, stripe *s);
void stripe_free(stripe *s);

/* Adds a row for an id that has none: initial vector and state, the clock
 * given, its field 0.  It may evict rows (*evicted: how many), at capacity, or
 * where there is no room for another slot, one at least, never one touched at
 * `spare` (0: any); PERSIA_ECAPACITY when it finds none, its only error:
 * memory was reserved (reserve.h). */
int stripe_add_locked(table *t, stripe *s, uint64_t hash, uint64_t id,
                      uint32_t clock, uint32_t spare, const stripe_room *room,
                      uint32_t *slot, uint32_t *evicted);
/* Takes a row out; leaves t->rows to the caller. */
void stripe_release_locked(const table *t, stripe *s, uint32_t slot);
/* Counts the rows added: must be called before the lock is given back.  A
 * table without a capacity is counted only here: one write that the stripes
 * share for each row took a tenth of the time of making it. */
void stripe_count_locked(table *t, stripe *s);
/* Must be called before a live row changes, or is made: a cut may need the old
 * one, a watch its slot.  Beyond the memory limit the cut fails, not its
 * caller. */
void stripe_touch_slow(const table *t, stripe *s, uint32_t slot);
static inline void stripe_touch_locked(const table *t, stripe *s,
                                       uint32_t slot)
{
    if (__builtin_expect(slot < s->noted, 0))
        stripe_touch_slow(t, s, slot);
}
/* After a cut or a watch has begun or ended. */
static inline void stripe_note_locked(stripe *s)
{
    s->noted = s->watches ? UINT32_MAX : s->cut.mark;
}
void stripe_cut_end(const table *t, stripe *s);
/* The same for lines of the filter of admission (cut.c): those of these hashes
 * change. */
void cut_touch_lines_locked(const table *t, size_t n, const uint64_t *hash);
/* All of a stripe become 0. */
void cut_clear_lines_locked(const table *t, uint32_t stripe);
/* Reserves room for `rows` slots more: their address space, and, as far as
 * there is memory, what the stripe needs to be fast with so many. */
int stripe_reserve(table *t, uint32_t stripe, size_t rows);
/* Fetches the first `bytes` of each row that may be the one of this hash, in
 * its home bucket and the next. */
void stripe_fetch_candidates(const table *t, const stripe *s, uint64_t hash,
                             size_t bytes);
/* Removes all rows. */
void stripe_clear_locked(table *t, stripe *s);

/* Initial values (init.c). */
void row_init_vector(const table *t, uint64_t id, float *out);
void row_init_keys(table *t);
/* Writes fp32 values as the table's dtype, to nearest. */
void row_store_vector(const table *t, const float *values, char *row);
void row_load_vector(const table *t, const char *row, float *out);

/* Scratch of the calling thread, reused by its next call; `which` tells
 * buffers that live at the same time apart (scratch.c). */
enum scratch_kind {
    SCRATCH_PLAN, SCRATCH_SPLIT, SCRATCH_GROUPS, SCRATCH_KINDS
};
int scratch_need(enum scratch_kind which, size_t bytes, void **out);

#endif
