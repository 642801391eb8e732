/* pull.c: reads rows.  Work is split into chunks of ids; a chunk is ordered
 * by stripe.  Blocks of ids go through three stages, each a block behind the
 * one before, so that memory answers while other ids are worked on:
 *
 *   1. fetch the bucket      2. match tags, fetch the row      3. copy
 *
 * A stripe's lock is held (shared) from its first block's first stage to its
 * last block's third, so up to three of them at a time, taken in order.
 */
#include "table/stripe.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 32, STAGES = 4 /* a power of two above 2 */ };

/* A chunk of a job's ids, ordered by stripe. */
typedef struct pull_chunk {
    const pull_job *job;
    size_t first;          /* of the chunk in the job */
    const uint64_t *hash;  /* these three as of ids_split_chunk() */
    const uint16_t *order;
    const uint16_t *start;
} pull_chunk;

/* Up to BLOCK ids of one stripe, on their way through the stages. */
typedef struct pull_block {
    stripe *s;
    uint32_t at, n; /* in the chunk's order */
    int last;       /* of its stripe */
    const bucket *home[BLOCK];
    int64_t slot[BLOCK];
} pull_block;

/* The next block in the order of stripes; takes a stripe's lock with its
 * first block.  0 at the end. */
static inline int block_next(table *t, const pull_chunk *c, uint32_t *stripe,
                             uint32_t *at, pull_block *b)
{
    while (*stripe < t->stripes && *at == c->start[*stripe + 1])
        ++*stripe;
    if (*stripe == t->stripes)
        return 0;
    uint32_t end = c->start[*stripe + 1];
    b->s = &t->stripe[*stripe];
    b->at = *at;
    b->n = end - *at < BLOCK ? end - *at : BLOCK;
    if (*at == c->start[*stripe])
        pthread_rwlock_rdlock(&b->s->lock);
    *at += b->n;
    b->last = *at == end;
    return 1;
}

INLINE_HOT void stage_bucket(const pull_chunk *c, pull_block *b)
{
    const row_index *ix = &b->s->index;

    for (uint32_t i = 0; i < b->n; i++) {
        const bucket *home = row_index_home(ix, c->hash[b->at + i]);
        __builtin_prefetch(home);
        b->home[i] = home;
    }
}

INLINE_HOT void stage_row(const pull_chunk *c, pull_block *b, size_t stride,
                          size_t bytes)
{
    const char *base = b->s->arena.base;

    for (uint32_t i = 0; i < b->n; i++) {
        int64_t slot = bucket_likely(b->home[i], c->hash[b->at + i]);
        b->slot[i] = slot;
        if (slot >= 0)
            row_prefetch(base + (size_t)slot * stride, bytes);
    }
}

INLINE_HOT void vector_read(const char *row, float *restrict to,
                            uint32_t dtype, uint32_t dim)
{
    if (dtype == VECTOR_FP32) {
        memcpy(to, row + ROW_VECTOR, dim * sizeof *to);
        return;
    }
    for (uint32_t j = 0; j < dim; j++) {
        uint16_t bits;
        memcpy(&bits, row + ROW_VECTOR + 2 * j, sizeof bits);
        to[j] = bf16_widen(bits);
    }
}

/* What the guess of the home bucket did not settle: the slot, or SLOT_NONE
 * with the value of a missing row written. */
static __attribute__((noinline)) int64_t
pull_search(const table *t, const stripe *s, uint64_t hash, uint64_t id,
            float *out)
{
    int64_t slot = row_index_find(&s->index, stripe_rows(t, s), hash, id);

    if (slot >= 0)
        row_load_vector(t, stripe_row(t, s, (uint32_t)slot), out);
    else if (t->config.missing == MISSING_INIT)
        row_init_vector(t, id, out);
    else
        memset(out, 0, t->config.dim * sizeof *out);
    return slot;
}

/* Returns how many ids had no row. */
INLINE_HOT uint64_t stage_copy(const table *t, const pull_chunk *c,
                               const pull_block *b, uint32_t dtype,
                               uint32_t dim)
{
    const pull_job *job = c->job;
    const uint64_t *ids = job->ids + c->first;
    const char *base = b->s->arena.base;
    const size_t stride = t->stride;
    uint64_t missed = 0;

    for (uint32_t i = 0; i < b->n; i++) {
        uint32_t at = c->order[b->at + i];
        float *to = job->out + (c->first + at) * job->stride;
        int64_t slot = b->slot[i];
        const char *row = base + (size_t)slot * stride;
        if (__builtin_expect(slot >= 0 && row_id(row) == ids[at], 1)) {
            vector_read(row, to, dtype, dim);
        } else {
            slot = pull_search(t, b->s, c->hash[b->at + i], ids[at], to);
            missed += slot < 0;
        }
        if (job->rows)
            job->rows[c->first + at] = (uint32_t)slot; /* -1: ROW_NONE */
    }
    return missed;
}

INLINE_HOT void pull_blocks(table *t, const pull_chunk *c, uint32_t dtype,
                            uint32_t dim)
{
    pull_block ring[STAGES];
    const size_t bytes = ROW_VECTOR + dim * (dtype == VECTOR_BF16 ? 2 : 4);
    uint32_t stripe = 0, at = 0;
    uint64_t missed = 0;
    size_t made = 0, end = SIZE_MAX;

    for (size_t turn = 0; turn < end; turn++) {
        pull_block *first = &ring[turn % STAGES];
        if (end == SIZE_MAX) {
            if (block_next(t, c, &stripe, &at, first)) {
                stage_bucket(c, first);
                made++;
            } else {
                end = made + 2;
            }
        }
        if (turn >= 1 && turn - 1 < made)
            stage_row(c, &ring[(turn - 1) % STAGES], t->stride, bytes);
        if (turn >= 2 && turn - 2 < made) {
            pull_block *b = &ring[(turn - 2) % STAGES];
            missed += stage_copy(t, c, b, dtype, dim);
            if (b->last) {
                uint32_t n = b->at + b->n - c->start[b->s - t->stripe];
                pthread_rwlock_unlock(&b->s->lock);
                atomic_fetch_add_explicit(&b->s->pulled, n,
                                          memory_order_relaxed);
                if (missed)
                    atomic_fetch_add_explicit(&b->s->missed, missed,
                                              memory_order_relaxed);
                missed = 0;
            }
        }
    }
}

typedef void (*pull_fn)(table *t, const pull_chunk *c);

#define PULL(name, dtype, dim)                                                \
    HOT static void name(table *t, const pull_chunk *c)                       \
    {                                                                         \
        pull_blocks(t, c, dtype, dim);                                        \
    }
PULL(pull_fp32_16, VECTOR_FP32, 16)
PULL(pull_fp32_64, VECTOR_FP32, 64)
PULL(pull_fp32_any, VECTOR_FP32, t->config.dim)
PULL(pull_bf16_16, VECTOR_BF16, 16)
PULL(pull_bf16_any, VECTOR_BF16, t->config.dim)

static pull_fn pull_of(const table_config *c)
{
    if (c->dtype == VECTOR_BF16)
        return c->dim == 16 ? pull_bf16_16 : pull_bf16_any;
    return c->dim == 16   ? pull_fp32_16
           : c->dim == 64 ? pull_fp32_64
                          : pull_fp32_any;
}

/* Chunks of all jobs, numbered through. */
typedef struct pull_plan {
    const pull_job *jobs;
    size_t *first_chunk; /* [jobs_n + 1] */
    size_t jobs_n;
} pull_plan;

static int pull_one(void *ctx, size_t chunk)
{
    const pull_plan *plan = ctx;
    uint64_t hash[IDS_CHUNK];
    uint16_t order[IDS_CHUNK], start[IDS_STRIPES_MAX + 1];
    size_t low = 0, high = plan->jobs_n;

    while (high - low > 1) { /* the job of this chunk */
        size_t mid = (low + high) / 2;
        if (plan->first_chunk[mid] <= chunk)
            low = mid;
        else
            high = mid;
    }
    const pull_job *job = &plan->jobs[low];
    table *t = job->t;
    size_t first = (chunk - plan->first_chunk[low]) * IDS_CHUNK;
    size_t n = job->n - first < IDS_CHUNK ? job->n - first : IDS_CHUNK;

    ids_split_chunk(job->ids + first, n, t->stripes, hash, order, start);
    const pull_chunk c = { job, first, hash, order, start };
    pull_of(&t->config)(t, &c);
    return PERSIA_OK;
}

int table_pull(sched *s, pull_job *jobs, size_t jobs_n)
{
    pull_plan plan = { jobs, NULL, jobs_n };
    size_t chunks = 0;
    void *scratch;
    int rc = fork_check("table_pull");

    if (rc)
        return rc;
    rc = scratch_need(SCRATCH_PLAN, (jobs_n + 1) * sizeof(size_t), &scratch);
    if (rc)
        return rc;
    plan.first_chunk = scratch;
    for (size_t j = 0; j < jobs_n; j++) {
        plan.first_chunk[j] = chunks;
        chunks += (jobs[j].n + IDS_CHUNK - 1) / IDS_CHUNK;
    }
    plan.first_chunk[jobs_n] = chunks;
    return sched_for(s, chunks, pull_one, &plan);
}
