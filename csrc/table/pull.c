/* pull.c: reads rows.  Work is split into chunks of ids.  For a chunk all
 * stripes are locked (shared, in order, for some 50 us): ids are then taken in
 * their order, and their rows are written in it.  Blocks of ids go through
 * three stages, each a block behind the one before, so that memory answers
 * while other ids are worked on:
 *
 *   1. fetch the bucket      2. match tags, fetch the row      3. copy
 *
 * A few per cent of ids are not settled by their home bucket (another id has
 * the same tag, or the bucket was full): they are done last, also in stages.
 */
#include "table/stripe.h"

#include <string.h>

enum {
    CHUNK = TABLE_PULL_CHUNK,
    BLOCK = 32,
    RING = 4 /* a power of two above 2 */
};

/* What lookups need of a stripe, side by side, while it is locked. */
typedef struct stripe_view {
    const page_ref *directory;
    const char *base;
    uint32_t shift; /* 63 - depth of the directory */
} stripe_view;

typedef struct pull_block {
    uint64_t hash[BLOCK];
    const bucket *home[BLOCK];
    const char *row[BLOCK]; /* likely; NULL: no entry has its tag */
    uint32_t slot[BLOCK];
} pull_block;

/* Ids of a chunk that take a search. */
typedef struct pull_late {
    size_t n;
    uint16_t at[CHUNK];
    uint64_t hash[CHUNK];
} pull_late;

/* A chunk of a job; its stripes are locked. */
typedef struct pull_chunk {
    table *t;
    const uint64_t *ids;
    size_t n;
    float *out;
    size_t stride;  /* floats */
    uint32_t *rows; /* NULL: not wanted */
    const stripe_view *view;
} pull_chunk;

INLINE_HOT void pull_stage_bucket(const pull_chunk *c, size_t at, size_t n,
                                  uint32_t mask, pull_block *b)
{
    const uint64_t key = c->t->config.hash_key;

    for (size_t i = 0; i < n; i++) {
        uint64_t hash = id_place(c->ids[at + i], key);
        const stripe_view *v = &c->view[hash_stripe(hash, mask)];
        const page_ref *ref = &v->directory[(hash >> 1) >> v->shift];
        const bucket *home =
            &ref->page->bucket[page_home(hash, ref->depth, ref->buckets)];
        __builtin_prefetch(home);
        b->hash[i] = hash;
        b->home[i] = home;
    }
}

INLINE_HOT void pull_stage_row(const pull_chunk *c, size_t at, size_t n,
                               uint32_t mask, size_t stride, size_t bytes,
                               uint32_t dim, pull_block *b)
{
    for (size_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < dim; j += 16)
            __builtin_prefetch(c->out + (at + i) * c->stride + j, 1);
        uint64_t hash = b->hash[i];
        uint32_t match = bucket_match(b->home[i], hash_tag(hash));
        const char *row = NULL;
        if (match) {
            uint32_t slot = b->home[i]->slot[__builtin_ctz(match)];
            row = c->view[hash_stripe(hash, mask)].base + slot * stride;
            b->slot[i] = slot;
            row_prefetch(row, bytes);
        }
        b->row[i] = row;
    }
}

static const stripe *stripe_of(const table *t, uint64_t hash)
{
    return &t->stripe[hash_stripe(hash, t->stripes - 1)];
}

static void pull_read_missing(const pull_chunk *c, size_t at)
{
    const table_config *config = &c->t->config;
    float *to = c->out + at * c->stride;

    if (config->missing == MISSING_INIT)
        row_init_vector(c->t, c->ids[at], to);
    else
        memset(to, 0, config->dim * sizeof *to);
    if (c->rows)
        c->rows[at] = ROW_NONE;
}

/* Returns how many ids had no row for sure; those in doubt go to `late`,
 * the bucket behind their home being fetched. */
INLINE_HOT size_t pull_stage_copy(const pull_chunk *c, size_t at, size_t n,
                                  const pull_block *b, uint32_t dtype,
                                  uint32_t dim, pull_late *late)
{
    size_t missed = 0;

    for (size_t i = 0; i < n; i++) {
        const char *row = b->row[i];
        if (__builtin_expect(row && row_id(row) == c->ids[at + i], 1)) {
            vector_read(row + ROW_VECTOR, c->out + (at + i) * c->stride,
                        dtype, dim);
            if (c->rows)
                c->rows[at + i] = b->slot[i];
        } else if (row || b->home[i]->passed) {
            __builtin_prefetch(b->home[i] + 1);
            late->at[late->n] = (uint16_t)(at + i);
            late->hash[late->n++] = b->hash[i];
        } else {
            pull_read_missing(c, at + i);
            missed++;
        }
    }
    return missed;
}

static size_t pull_late_ids(const pull_chunk *c, const pull_late *late)
{
    size_t missed = 0;

    for (size_t i = 0; i < late->n; i++)
        stripe_fetch_candidates(c->t, stripe_of(c->t, late->hash[i]),
                                late->hash[i],
                                ROW_VECTOR + c->t->vector_bytes);
    for (size_t i = 0; i < late->n; i++) {
        const stripe *s = stripe_of(c->t, late->hash[i]);
        size_t at = late->at[i];
        int64_t slot = row_index_find(&s->index, stripe_rows(c->t, s),
                                      late->hash[i], c->ids[at]);
        if (slot < 0) {
            pull_read_missing(c, at);
            missed++;
            continue;
        }
        row_load_vector(c->t, stripe_row(c->t, s, (uint32_t)slot),
                        c->out + at * c->stride);
        if (c->rows)
            c->rows[at] = (uint32_t)slot;
    }
    return missed;
}

INLINE_HOT size_t pull_blocks(const pull_chunk *c, uint32_t dtype,
                              uint32_t dim)
{
    pull_block ring[RING];
    const uint32_t mask = c->t->stripes - 1;
    const size_t stride = c->t->stride;
    const size_t bytes = ROW_VECTOR + vector_size(dtype, dim);
    pull_late late;
    size_t missed = 0;

    late.n = 0;
    for (size_t at = 0; at < c->n + 2 * BLOCK; at += BLOCK) {
        size_t turn = at / BLOCK;
        if (at < c->n)
            pull_stage_bucket(c, at, c->n - at < BLOCK ? c->n - at : BLOCK,
                              mask, &ring[turn % RING]);
        if (turn >= 1 && at - BLOCK < c->n) {
            size_t left = c->n - (at - BLOCK);
            pull_stage_row(c, at - BLOCK, left < BLOCK ? left : BLOCK, mask,
                           stride, bytes, dim, &ring[(turn - 1) % RING]);
        }
        if (turn >= 2) {
            size_t left = c->n - (at - 2 * BLOCK);
            missed +=
                pull_stage_copy(c, at - 2 * BLOCK, left < BLOCK ? left : BLOCK,
                                &ring[(turn - 2) % RING], dtype, dim, &late);
        }
    }
    return missed + pull_late_ids(c, &late);
}

typedef size_t (*pull_fn)(const pull_chunk *c);

#define PULL(name, dtype, dim)                                                \
    HOT static size_t name(const pull_chunk *c)                               \
    {                                                                         \
        return pull_blocks(c, dtype, dim);                                    \
    }
PULL(pull_fp32_16, VECTOR_FP32, 16)
PULL(pull_fp32_64, VECTOR_FP32, 64)
PULL(pull_fp32_any, VECTOR_FP32, c->t->config.dim)
PULL(pull_bf16_16, VECTOR_BF16, 16)
PULL(pull_bf16_any, VECTOR_BF16, c->t->config.dim)
PULL(pull_int8_16, VECTOR_INT8, 16)
PULL(pull_int8_any, VECTOR_INT8, c->t->config.dim)

static pull_fn pull_of(const table_config *c)
{
    if (c->dtype == VECTOR_BF16)
        return c->dim == 16 ? pull_bf16_16 : pull_bf16_any;
    if (c->dtype == VECTOR_INT8)
        return c->dim == 16 ? pull_int8_16 : pull_int8_any;
    return c->dim == 16   ? pull_fp32_16
           : c->dim == 64 ? pull_fp32_64
                          : pull_fp32_any;
}

static void stripes_lock(table *t, stripe_view *view)
{
    for (uint32_t i = 0; i < t->stripes; i++) {
        stripe *s = &t->stripe[i];
        pthread_rwlock_rdlock(&s->lock);
        view[i] = (stripe_view){ s->index.directory, s->arena.base,
                                 63 - s->index.depth };
    }
}

static void stripes_unlock(table *t)
{
    for (uint32_t i = t->stripes; i-- > 0;)
        pthread_rwlock_unlock(&t->stripe[i].lock);
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
    stripe_view view[IDS_STRIPES_MAX];
    const size_t j = sched_range(plan->first_chunk, plan->jobs_n, chunk);

    const pull_job *job = &plan->jobs[j];
    table *t = job->t;
    size_t first = (chunk - plan->first_chunk[j]) * CHUNK;
    size_t n = job->n - first < CHUNK ? job->n - first : CHUNK;

    const pull_chunk c = {
        t, job->ids + first, n, job->out + first * job->stride, job->stride,
        job->rows ? job->rows + first : NULL, view
    };
    stripes_lock(t, view);
    size_t missed = pull_of(&t->config)(&c);
    stripes_unlock(t);
    atomic_fetch_add_explicit(&t->pulled, n, memory_order_relaxed);
    if (missed)
        atomic_fetch_add_explicit(&t->missed, missed, memory_order_relaxed);
    return PERSIA_OK;
}

int persia_table_pull(sched *s, pull_job *jobs, size_t jobs_n)
{
    pull_plan plan = { jobs, NULL, jobs_n };
    size_t chunks = 0, rows = 0;
    void *scratch;
    int rc = persia_fork_check("table_pull");

    if (rc)
        return rc;
    rc = scratch_need(SCRATCH_PLAN, (jobs_n + 1) * sizeof(size_t), &scratch);
    if (rc)
        return rc;
    plan.first_chunk = scratch;
    for (size_t j = 0; j < jobs_n; j++) {
        plan.first_chunk[j] = chunks;
        chunks += (jobs[j].n + CHUNK - 1) / CHUNK;
        rows += jobs[j].n;
    }
    plan.first_chunk[jobs_n] = chunks;
    return persia_sched_for_rows(s, chunks, rows, pull_one, &plan);
}
