/* pull.c: reads rows.  Work is split into chunks of ids; a chunk is ordered
 * by stripe, and a stripe's lock is taken (shared) once for its run.  In a
 * run, blocks of ids go through three stages, each a block behind the one
 * before, so that memory answers while other ids are worked on:
 *
 *   1. fetch the bucket      2. match tags, fetch the row      3. copy
 */
#include "table/stripe.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 32, STAGES = 4 };

/* Copies vectors of n rows (NULL: skip) to out[order[i] * stride]. */
typedef void (*gather_fn)(const char *const *rows, const uint16_t *order,
                          size_t n, uint32_t dim, float *out, size_t stride);

INLINE_HOT void gather_fp32(const char *const *rows, const uint16_t *order,
                               size_t n, uint32_t dim, float *out,
                               size_t stride)
{
    for (size_t i = 0; i < n; i++)
        if (rows[i])
            memcpy(out + order[i] * stride, rows[i] + ROW_VECTOR,
                   dim * sizeof(float));
}

INLINE_HOT void gather_bf16(const char *const *rows, const uint16_t *order,
                               size_t n, uint32_t dim, float *out,
                               size_t stride)
{
    for (size_t i = 0; i < n; i++) {
        float *restrict to = out + order[i] * stride;
        if (!rows[i])
            continue;
        for (uint32_t j = 0; j < dim; j++) {
            uint16_t bits;
            memcpy(&bits, rows[i] + ROW_VECTOR + 2 * j, sizeof bits);
            to[j] = bf16_widen(bits);
        }
    }
}

#define GATHER(name, body, width)                                             \
    HOT static void name(const char *const *rows, const uint16_t *order,      \
                         size_t n, uint32_t dim, float *out, size_t stride)   \
    {                                                                         \
        (void)dim;                                                            \
        body(rows, order, n, width, out, stride);                             \
    }
GATHER(gather_fp32_16, gather_fp32, 16)
GATHER(gather_fp32_64, gather_fp32, 64)
GATHER(gather_fp32_any, gather_fp32, dim)
GATHER(gather_bf16_16, gather_bf16, 16)
GATHER(gather_bf16_any, gather_bf16, dim)

static gather_fn gather_of(const table_config *c)
{
    if (c->dtype == VECTOR_BF16)
        return c->dim == 16 ? gather_bf16_16 : gather_bf16_any;
    return c->dim == 16   ? gather_fp32_16
           : c->dim == 64 ? gather_fp32_64
                          : gather_fp32_any;
}

/* One run: ids of one stripe in one chunk. */
typedef struct pull_run {
    const pull_job *job;
    size_t first; /* of the chunk in the job */
    const uint64_t *hash;
    const uint16_t *order;
    size_t n;
    gather_fn gather;
} pull_run;

static void read_missing(const table *t, uint64_t id, float *out)
{
    if (t->config.missing == MISSING_INIT)
        row_init_vector(t, id, out);
    else
        memset(out, 0, t->config.dim * sizeof *out);
}

static size_t pull_block(const table *t, const stripe *s, const pull_run *r,
                         size_t at, size_t n, int64_t *slots)
{
    const uint64_t *ids = r->job->ids + r->first;
    float *out = r->job->out + r->first * r->job->stride;
    const char *rows[BLOCK];
    size_t missed = 0;

    for (size_t i = 0; i < n; i++) {
        uint64_t id = ids[r->order[at + i]];
        int64_t slot = slots[i];
        const char *row = NULL;
        if (slot >= 0)
            row = stripe_row(t, s, (uint32_t)slot);
        if (slot == SLOT_SEARCH || (row && row_id(row) != id)) {
            slot = row_index_find(&s->index, stripe_rows(t, s),
                                  r->hash[at + i], id);
            row = slot < 0 ? NULL : stripe_row(t, s, (uint32_t)slot);
        }
        if (!row) {
            read_missing(t, id, out + r->order[at + i] * r->job->stride);
            missed++;
        }
        if (r->job->rows)
            r->job->rows[r->first + r->order[at + i]] =
                row ? (uint32_t)slot : ROW_NONE;
        rows[i] = row;
    }
    r->gather(rows, r->order + at, n, t->config.dim, out, r->job->stride);
    return missed;
}

static void pull_stripe(const table *t, stripe *s, const pull_run *r)
{
    const bucket *home[STAGES][BLOCK];
    int64_t slots[STAGES][BLOCK];
    const size_t blocks = (r->n + BLOCK - 1) / BLOCK;
    size_t missed = 0;

    pthread_rwlock_rdlock(&s->lock);
    for (size_t b = 0; b < blocks + 2; b++) {
        if (b < blocks) {
            size_t at = b * BLOCK, n = r->n - at < BLOCK ? r->n - at : BLOCK;
            for (size_t i = 0; i < n; i++) {
                const bucket *h = row_index_home(&s->index, r->hash[at + i]);
                __builtin_prefetch(h);
                home[b % STAGES][i] = h;
            }
        }
        if (b >= 1 && b - 1 < blocks) {
            size_t k = b - 1, at = k * BLOCK;
            size_t n = r->n - at < BLOCK ? r->n - at : BLOCK;
            for (size_t i = 0; i < n; i++) {
                int64_t slot =
                    bucket_likely(home[k % STAGES][i], r->hash[at + i]);
                slots[k % STAGES][i] = slot;
                if (slot >= 0)
                    row_prefetch(stripe_row(t, s, (uint32_t)slot),
                                 ROW_VECTOR + t->vector_bytes);
            }
        }
        if (b >= 2) {
            size_t k = b - 2, at = k * BLOCK;
            size_t n = r->n - at < BLOCK ? r->n - at : BLOCK;
            missed += pull_block(t, s, r, at, n, slots[k % STAGES]);
        }
    }
    pthread_rwlock_unlock(&s->lock);
    atomic_fetch_add_explicit(&s->pulled, r->n, memory_order_relaxed);
    if (missed)
        atomic_fetch_add_explicit(&s->missed, missed, memory_order_relaxed);
}

/* Chunks of all jobs, numbered through. */
typedef struct pull_plan {
    const pull_job *jobs;
    size_t *first_chunk; /* [jobs_n + 1] */
    size_t jobs_n;
} pull_plan;

static int pull_chunk(void *ctx, size_t chunk)
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
    for (uint32_t i = 0; i < t->stripes; i++) {
        pull_run run = { job, first, hash + start[i], order + start[i],
                         (size_t)(start[i + 1] - start[i]),
                         gather_of(&t->config) };
        if (run.n)
            pull_stripe(t, &t->stripe[i], &run);
    }
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
    return sched_for(s, chunks, pull_chunk, &plan);
}
