/* backward.c: gradients of outputs to pushes, one a table. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "batch/plan.h"
#include "batch/taken.h"
#include "pool/pool.h"
#include "simd/simd.h"

/* What one feature of one gradient becomes: a part of its table's push. */
typedef struct piece {
    slice s;
    const batcher_grad *g;
    const float *grad; /* of its first bag, or its first id */
    uint32_t kind;     /* of the plan */
    uint32_t job;      /* of the forward */
    int finite;        /* 1: g was swept, it holds no NaN and no Inf */
    uint32_t *bag;     /* where to put them; NULL: not needed */
    float *scale;
    push_part part;
} piece;

/* All pieces of some gradients, sorted by table (those of one table in the
 * order of the gradients), and where each table's begin. */
typedef struct pieces {
    piece *all;
    size_t n;
    size_t expanded; /* bag numbers and scales to compute */
    uint32_t tables;
    size_t *starts; /* [tables + 1] */
} pieces;

static int backward_by_table(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    uint32_t i = x->s.f->want.table, j = y->s.f->want.table;
    if (i != j)
        return i < j ? -1 : 1;
    if (x->g != y->g)
        return x->g < y->g ? -1 : 1;
    return x->s.f < y->s.f ? -1 : x->s.f > y->s.f;
}

/* Fills in a piece's bag numbers, scales and part. */
static int piece_expand(void *ctx, size_t i)
{
    piece *p = (piece *)ctx + i;
    const slice *s = &p->s;
    const id_batch *b = &p->g->batch;
    if (p->scale && !s->offsets)
        memcpy(p->scale, b->weights + s->first, s->n * sizeof(float));
    else if (p->bag || p->scale)
        persia_pool_expand(s->f->want.pooling, b->bags, s->offsets,
                           b->weights ? b->weights + s->first : NULL, p->bag,
                           p->scale);
    p->part = (push_part){.n = s->n,
                          .ids = (const uint64_t *)b->values + s->first,
                          .rows = p->g->rows ? p->g->rows + s->first : NULL,
                          .index = p->g->index,
                          .job = p->job,
                          .bag = p->bag,
                          .scale = p->scale,
                          .grad = p->grad,
                          .stride = p->g->stride,
                          .bags = p->bag ? b->bags : s->n,
                          .finite = p->finite};
    return PERSIA_OK;
}

/* How many bag numbers and scales a piece needs. */
static void piece_needs(const piece *p, size_t *bags, size_t *scales)
{
    const slice *s = &p->s;
    int bagged = p->kind == PLAN_BAGS && s->offsets;
    int scaled = p->kind == PLAN_BAGS &&
                 (s->weighted ||
                  (bagged && s->f->want.pooling != POOL_SUM));
    *bags = bagged ? s->n : 0;
    *scales = scaled ? s->n : 0;
}

/* Memory for the pieces of all gradients, none of them yet. */
static int pieces_make(batcher *w, const batcher_grad *grads, size_t n,
                       scratch *tmp, pieces *out)
{
    size_t most = 0, slices = 0;
    for (size_t i = 0; i < n; i++) {
        const plan *p = batcher_plan_get(w, grads[i].plan);
        if (!p)
            return PERSIA_EARG;
        most += p->n;
        slices = p->n > slices ? p->n : slices;
    }
    uint32_t tables = persia_client_tables(w->c);
    int rc = persia_mem_buffer_need(&tmp->slices, slices * sizeof(slice));
    if (!rc)
        rc = persia_mem_buffer_need(
            &tmp->rows, most * sizeof(piece) + (tables + 1) * sizeof(size_t));
    if (rc)
        return rc;
    *out = (pieces){.tables = tables, .starts = tmp->rows.data};
    out->all = (piece *)(out->starts + tables + 1);
    return PERSIA_OK;
}

/* Adds those of one gradient. */
static int pieces_add(batcher *w, const batcher_grad *g, slice *cut,
                      pieces *out)
{
    const plan *p = batcher_plan_get(w, g->plan);
    int rc = batch_slice(w, p, &g->batch, cut);
    uint32_t job = 0;
    if (!rc && taken_is(g))
        taken_cut(w, p, g->index->source, cut);
    for (uint32_t k = 0; k < p->n && !rc; k++) {
        job += k && cut[k - 1].n > 0;
        if (cut[k].n == 0 || !cut[k].f->want.trainable)
            continue;
        size_t at = p->kind == PLAN_BAGS ? cut[k].f->column
                                         : cut[k].first * g->stride;
        out->all[out->n++] = (piece){.s = cut[k],
                                     .g = g,
                                     .kind = p->kind,
                                     .job = job,
                                     .grad = g->grad + at};
    }
    return rc;
}

/* By table, those of table t from starts[t] on. */
static void pieces_sort(pieces *out)
{
    size_t at = 0;
    qsort(out->all, out->n, sizeof(piece), backward_by_table);
    for (uint32_t t = 0; t <= out->tables; t++) {
        while (at < out->n && out->all[at].s.f->want.table < t)
            at++;
        out->starts[t] = at;
    }
}

/* Memory for the bag numbers and scales of all pieces. */
static int pieces_give(pieces *out, scratch *tmp)
{
    size_t bags = 0, scales = 0, more_bags, more_scales;
    for (size_t i = 0; i < out->n; i++) {
        piece_needs(&out->all[i], &more_bags, &more_scales);
        bags += more_bags;
        scales += more_scales;
    }
    int rc = persia_mem_buffer_need(&tmp->bags,
                                    (bags + scales + 1) * sizeof(uint32_t));
    if (rc)
        return rc;
    out->expanded = bags + scales;
    uint32_t *bag = tmp->bags.data;
    float *scale = (float *)bag + bags;
    for (size_t i = 0; i < out->n; i++) {
        piece *it = &out->all[i];
        piece_needs(it, &more_bags, &more_scales);
        it->bag = more_bags ? bag : NULL;
        it->scale = more_scales ? scale : NULL;
        bag += more_bags;
        scale += more_scales;
    }
    return PERSIA_OK;
}

static int backward_collect(batcher *w, const batcher_grad *grads, size_t n,
                            scratch *tmp, pieces *out)
{
    int rc = pieces_make(w, grads, n, tmp, out);
    for (size_t i = 0; i < n && !rc; i++)
        rc = pieces_add(w, &grads[i], tmp->slices.data, out);
    if (rc)
        return rc;
    pieces_sort(out);
    return pieces_give(out, tmp);
}

/* One push job a table that has pieces, and the numbers of the tables. */
static int build_jobs(batcher *w, const pieces *all, scratch *tmp,
                      push_job **out, uint32_t **out_tables, size_t *n)
{
    *n = 0;
    *out = NULL;
    *out_tables = NULL;
    int rc = persia_mem_buffer_need(
        &tmp->jobs, all->tables * (sizeof(push_job) + sizeof(uint32_t)) +
                        all->n * sizeof(push_part));
    if (rc || all->n == 0)
        return rc;
    push_job *jobs = tmp->jobs.data;
    push_part *parts = (push_part *)(jobs + all->tables);
    uint32_t *tables = (uint32_t *)(parts + all->n);
    *out = jobs;
    *out_tables = tables;
    if (all->expanded)
        persia_sched_for(persia_client_sched(w->c), all->n, piece_expand,
                         all->all);
    else
        for (size_t i = 0; i < all->n; i++)
            piece_expand(all->all, i);
    for (size_t i = 0; i < all->n; i++)
        parts[i] = all->all[i].part;
    for (uint32_t t = 0; t < all->tables; t++) {
        size_t first = all->starts[t], count = all->starts[t + 1] - first;
        if (!count)
            continue;
        tables[*n] = t;
        jobs[(*n)++] = (push_job){.parts = parts + first,
                                  .parts_n = count};
    }
    return PERSIA_OK;
}

int batcher_push_jobs(batcher *w, const batcher_grad *grads, size_t n,
                      scratch *tmp, push_job **jobs, uint32_t **tables,
                      size_t *jobs_n)
{
    pieces all;
    int rc = backward_collect(w, grads, n, tmp, &all);
    return rc ? rc : build_jobs(w, &all, tmp, jobs, tables, jobs_n);
}

/* A gradient in the order of memory, in pieces of about SWEEP floats: much
 * faster than a table's columns, which lie far apart. */
enum { SWEEP = 65536 };
typedef struct sweep {
    const float *grad;
    size_t rows, width, stride;
    size_t rows_a_piece;
    _Atomic int bad;
} sweep;

static int sweep_piece(void *ctx, size_t i)
{
    sweep *s = ctx;
    size_t first = i * s->rows_a_piece, n = s->rows - first;
    size_t dim = s->width;
    if (n > s->rows_a_piece)
        n = s->rows_a_piece;
    if (s->stride == s->width) { /* then it is one row */
        dim *= n;
        n = 1;
    }
    if (!persia_rows_finite(s->grad + first * s->stride, n, dim, s->stride))
        atomic_store_explicit(&s->bad, 1, memory_order_relaxed);
    return PERSIA_OK;
}

/* Marks the pieces of gradients without NaN and Inf; the table looks at the
 * others closely, and names the id. */
static int sweep_grads(batcher *w, const batcher_grad *grads, size_t n,
                       const pieces *all)
{
    for (size_t i = 0; i < n; i++) {
        const batcher_grad *g = &grads[i];
        const plan *p = batcher_plan_get(w, g->plan);
        if (p->kind != PLAN_BAGS || g->batch.weights)
            continue;
        sweep s = {.grad = g->grad, .rows = g->batch.bags,
                   .width = p->width, .stride = g->stride,
                   .rows_a_piece = p->width < SWEEP ? SWEEP / p->width : 1};
        int rc = persia_sched_for_rows(
            persia_client_sched(w->c),
            (s.rows + s.rows_a_piece - 1) / s.rows_a_piece, s.rows,
            sweep_piece, &s);
        if (rc)
            return rc;
        for (size_t k = 0; k < all->n && !s.bad; k++)
            if (all->all[k].g == g)
                all->all[k].finite = 1;
    }
    return PERSIA_OK;
}

/* *sent: the update was given to the client. */
static int backward_backward(batcher *w, const batcher_grad *grads, size_t n,
                             scratch *tmp, const client_update *update,
                             const optim_args *optim, uint32_t optim_n,
                             batcher_counts *counts, int *sent)
{
    pieces all;
    push_job *jobs;
    uint32_t *tables;
    size_t jobs_n;
    int rc = backward_collect(w, grads, n, tmp, &all);
    if (!rc)
        rc = sweep_grads(w, grads, n, &all);
    if (!rc)
        rc = build_jobs(w, &all, tmp, &jobs, &tables, &jobs_n);
    if (rc)
        return rc;
    if (jobs_n && optim_n < all.tables)
        return persia_err_set(
            PERSIA_EARG, "optimizer settings for %u tables, but there are %u",
            optim_n, all.tables);
    optim_args *args = malloc((jobs_n ? jobs_n : 1) * sizeof *args);
    if (!args)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu tables",
                              jobs_n);
    for (size_t i = 0; i < jobs_n && !rc; i++) {
        args[i] = optim[tables[i]];
        args[i].step = 1; /* the shards know better */
        jobs[i].optim = &args[i];
        rc = persia_table_check_optim(persia_client_table(w->c, tables[i]),
                                      &args[i]);
    }
    *sent = !rc;
    if (!rc)
        rc = persia_client_push(w->c, update, tables, jobs, jobs_n);
    for (size_t i = 0; i < jobs_n; i++)
        UPDATE_COUNTS_ADD(counts, &jobs[i]);
    free(args);
    return rc;
}

int persia_batcher_backward(batcher *w, const batcher_grad *grads, size_t n,
                            const client_update *update,
                            const optim_args *optim, uint32_t optim_n,
                            batcher_counts *counts)
{
    *counts = (batcher_counts){0};
    if (taken_any(grads, n))
        return taken_backward(w, grads, n, update, optim, optim_n, counts);
    int sent = 0, rc = PERSIA_ENOMEM;
    scratch *tmp = scratch_take(w);
    if (tmp)
        rc = backward_backward(w, grads, n, tmp, update, optim, optim_n,
                               counts, &sent);
    scratch_give(w, tmp);
    if (rc && !sent && update) { /* others may wait for it */
        err_kept error;
        persia_err_keep(&error, rc);
        (void)persia_client_skip(w->c, update);
        return persia_err_again(&error);
    }
    return rc;
}

typedef struct checking {
    const piece *all;
    uint8_t *finite; /* [pieces] */
} checking;

static int piece_finite(void *ctx, size_t i)
{
    const checking *c = ctx;
    const piece *p = &c->all[i];
    size_t n = p->kind == PLAN_BAGS ? p->g->batch.bags : p->s.n;
    c->finite[i] = (uint8_t)persia_rows_finite(p->grad, n, p->s.f->dim,
                                               p->g->stride);
    return PERSIA_OK;
}

int persia_batcher_finite(batcher *w, const batcher_grad *grads, size_t n,
                          uint8_t *finite, uint32_t finite_n)
{
    if (taken_any(grads, n))
        return taken_finite(w, grads, n, finite, finite_n);
    scratch *tmp = scratch_take(w);
    if (!tmp)
        return PERSIA_ENOMEM;
    pieces all;
    int rc = backward_collect(w, grads, n, tmp, &all);
    if (!rc)
        rc = persia_mem_buffer_need(&tmp->jobs, all.n);
    if (!rc && all.n) {
        checking c = {all.all, tmp->jobs.data};
        rc = persia_sched_for(persia_client_sched(w->c), all.n, piece_finite,
                              &c);
        for (size_t i = 0; i < all.n && !rc; i++) {
            uint32_t t = all.all[i].s.f->want.table;
            if (t < finite_n && !c.finite[i])
                finite[t] = 0;
        }
    }
    scratch_give(w, tmp);
    return rc;
}

void persia_batcher_sums_free(batcher_sum *sums, size_t n)
{
    persia_client_sums_free(sums, n);
    free(sums);
}

int persia_batcher_sums(batcher *w, const batcher_grad *grads, size_t n,
                        batcher_sum **out, size_t *out_n, int *finite)
{
    *out = NULL;
    *out_n = 0;
    *finite = 1;
    if (taken_any(grads, n))
        return taken_sums(w, grads, n, out, out_n, finite);
    scratch *tmp = scratch_take(w);
    if (!tmp)
        return PERSIA_ENOMEM;
    push_job *jobs;
    uint32_t *tables;
    size_t jobs_n = 0;
    int rc = batcher_push_jobs(w, grads, n, tmp, &jobs, &tables, &jobs_n);
    batcher_sum *sums = calloc(jobs_n + 1, sizeof *sums);
    if (!rc && !sums)
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for %zu tables", jobs_n);
    if (!rc)
        rc = persia_client_sums(w->c, tables, jobs, jobs_n, sums, finite);
    scratch_give(w, tmp);
    if (rc && sums)
        persia_batcher_sums_free(sums, jobs_n);
    if (rc)
        return rc;
    *out = sums;
    *out_n = jobs_n;
    return PERSIA_OK;
}
