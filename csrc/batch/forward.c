/* forward.c: ids of a batch to its embeddings. */
#include <string.h>

#include "batch/taken.h"
#include "pool/pool.h"

enum { BAGS_A_CHUNK = 512 };

/* One pooled feature: its rows lie in scratch until they are summed. */
typedef struct pooled {
    const slice *s;
    const float *rows;
} pooled;

typedef struct pooling {
    const id_batch *b;
    const pooled *features;
    size_t chunks; /* a feature */
    float *out;
    size_t stride;
} pooling;

static int forward_pool_chunk(void *ctx, size_t index)
{
    const pooling *c = ctx;
    const pooled *p = &c->features[index / c->chunks];
    const slice *s = p->s;
    size_t bag = index % c->chunks * BAGS_A_CHUNK;
    size_t bags = c->b->bags - bag;
    if (bags > BAGS_A_CHUNK)
        bags = BAGS_A_CHUNK;
    float *out = c->out + s->f->column + bag * c->stride;
    const float *weights = c->b->weights;
    int64_t ones[BAGS_A_CHUNK + 1];
    const int64_t *offsets = ones;
    size_t first = bag; /* of this chunk among the feature's ids */
    if (s->offsets) {
        offsets = s->offsets + bag;
        first = (size_t)(offsets[0] - s->offsets[0]);
    } else {
        for (size_t i = 0; i <= bags; i++)
            ones[i] = (int64_t)i;
    }
    persia_pool_forward(s->f->want.pooling, bags, offsets,
                        weights ? weights + s->first + first : NULL,
                        p->rows + first * s->f->dim, s->f->dim, out,
                        c->stride);
    return PERSIA_OK;
}

static int is_pooled(const plan *p, const slice *s)
{
    return p->kind == PLAN_BAGS && (s->offsets || s->weighted);
}

/* Sums the pooled features; `features` has room for all of the plan's. */
static int forward_pool_all(batcher *w, const plan *p, const id_batch *b,
                            const slice *slices, const float *rows,
                            pooled *features, float *out, size_t stride)
{
    size_t n = 0;
    for (uint32_t i = 0; i < p->n; i++) {
        const slice *s = &slices[i];
        if (!is_pooled(p, s))
            continue;
        features[n++] = (pooled){s, rows};
        rows += s->n * s->f->dim;
    }
    if (n == 0 || b->bags == 0)
        return PERSIA_OK;
    pooling c = {b, features, (b->bags + BAGS_A_CHUNK - 1) / BAGS_A_CHUNK,
                 out, stride};
    return persia_sched_for_rows(persia_client_sched(w->c), n * c.chunks, b->n,
                                 forward_pool_chunk, &c);
}

/* Where the rows are: of shards, or (source) of a batch whose ids are
 * elsewhere. */
typedef struct rows_from {
    uint64_t after;
    batch_index **index;
    batcher_source *source;
} rows_from;

static int forward_forward(batcher *w, const plan *p, const id_batch *b,
                           const rows_from *from, scratch *tmp, float *out,
                           size_t stride, uint32_t *rows)
{
    int rc = persia_mem_buffer_need(&tmp->slices,
                                    p->n * (sizeof(slice) + sizeof(pooled)));
    if (!rc)
        rc = persia_mem_buffer_need(
            &tmp->jobs, p->n * (sizeof(pull_job) + sizeof(uint32_t)));
    if (rc)
        return rc;
    slice *slices = tmp->slices.data;
    rc = batch_slice(w, p, b, slices);
    if (rc)
        return rc;
    if (from->source)
        taken_cut(w, p, from->source, slices);

    size_t floats = 0; /* of rows that are pooled */
    for (uint32_t i = 0; i < p->n; i++)
        if (is_pooled(p, &slices[i]))
            floats += slices[i].n * slices[i].f->dim;
    rc = persia_mem_buffer_need(&tmp->rows, floats * sizeof(float));
    if (rc)
        return rc;
    if (p->kind == PLAN_ROWS && p->gaps)
        for (size_t i = 0; i < b->n; i++)
            memset(out + i * stride, 0, p->width * sizeof(float));

    pull_job *jobs = tmp->jobs.data;
    uint32_t *tables = (uint32_t *)(jobs + p->n);
    size_t jobs_n = 0;
    float *packed = tmp->rows.data;
    for (uint32_t i = 0; i < p->n; i++) {
        const slice *s = &slices[i];
        pull_job *job = &jobs[jobs_n];
        tables[jobs_n] = s->f->want.table;
        *job = (pull_job){.n = s->n,
                          .ids = (const uint64_t *)b->values + s->first,
                          .rows = rows ? rows + s->first : NULL};
        if (is_pooled(p, s)) {
            job->out = packed;
            job->stride = s->f->dim;
            packed += s->n * s->f->dim;
        } else if (p->kind == PLAN_BAGS) {
            job->out = out + s->f->column;
            job->stride = stride;
        } else {
            job->out = out + s->first * stride;
            job->stride = stride;
        }
        jobs_n += s->n > 0;
    }
    rc = from->source
             ? taken_pull(w, from->source, tables, jobs, jobs_n)
             : persia_client_pull_indexed(w->c, from->after, b->trace, tables,
                                          jobs, jobs_n, from->index);
    if (rc)
        return rc;
    return forward_pool_all(w, p, b, slices, tmp->rows.data,
                            (pooled *)(slices + p->n), out, stride);
}

int persia_batcher_forward(batcher *w, uint32_t no, const id_batch *batch,
                           uint64_t after, float *out, size_t stride,
                           uint32_t *rows, batch_index **index)
{
    const plan *p = batcher_plan_get(w, no);
    if (!p)
        return PERSIA_EARG;
    if (index)
        *index = NULL;
    scratch *tmp = scratch_take(w);
    if (!tmp)
        return PERSIA_ENOMEM;
    if (index && !persia_client_is_embedded(w->c))
        rows = NULL;
    const rows_from from = {.after = after, .index = index};
    int rc = forward_forward(w, p, batch, &from, tmp, out, stride, rows);
    scratch_give(w, tmp);
    if (rc && index) {
        persia_batch_index_put(*index);
        *index = NULL;
    }
    return rc;
}

int persia_batcher_read(batcher *w, uint32_t no, batch_index *index,
                        const id_batch *batch, float *out, size_t stride)
{
    const plan *p = batcher_plan_get(w, no);
    const rows_from from = {.source = index->source};
    if (!p)
        return PERSIA_EARG;
    if (batch->bags != from.source->samples)
        return persia_err_set(PERSIA_ESHAPE,
                              "%zu samples, but the embedding worker has "
                              "looked up %zu",
                              batch->bags, from.source->samples);
    scratch *tmp = scratch_take(w);
    int rc = tmp ? forward_forward(w, p, batch, &from, tmp, out, stride, NULL)
                 : PERSIA_ENOMEM;
    scratch_give(w, tmp);
    return rc ? rc : taken_read(w, from.source, p, out, stride);
}
