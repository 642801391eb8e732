/* taken.c: see taken.h. */
#include "worker/taken.h"

#include <stdlib.h>
#include <string.h>

#include "simd/simd.h"

int taken_is(const worker_grad *g)
{
    return g->index && g->index->source;
}

static taken_feature feature_of(const worker *w, const planned *f)
{
    return (taken_feature){.name = f->want.name,
                           .table =
                               persia_client_table(w->c, f->want.table)->name,
                           .pooling = f->want.pooling,
                           .dim = f->dim};
}

static const char *table_of(const worker *w, uint32_t no)
{
    return persia_client_table(w->c, no)->name;
}

/* Whether its features are pooled elsewhere. */
static int is_pooled(const worker *w, const worker_source *s, uint32_t table)
{
    size_t n;
    return !s->rows(s, table_of(w, table), &n);
}

void taken_cut(const worker *w, const plan *p, const worker_source *s,
               slice *slices)
{
    for (uint32_t i = 0; i < p->n; i++)
        if (is_pooled(w, s, p->features[i].want.table))
            slices[i] = (slice){.f = &p->features[i]};
}

int taken_pull(worker *w, worker_source *s, const uint32_t *tables,
               const pull_job *jobs, size_t jobs_n)
{
    int rc = PERSIA_OK;
    for (size_t i = 0; i < jobs_n && !rc; i++)
        rc = s->gather(s, table_of(w, tables[i]),
                       (const int64_t *)jobs[i].ids, jobs[i].n, jobs[i].out,
                       jobs[i].stride);
    return rc;
}

int taken_read(worker *w, worker_source *s, const plan *p, float *out,
               size_t stride)
{
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < p->n && p->kind == PLAN_BAGS && !rc; i++) {
        const taken_feature f = feature_of(w, &p->features[i]);
        if (is_pooled(w, s, p->features[i].want.table))
            rc = s->read(s, &f, out + p->features[i].column, stride);
    }
    return rc;
}

/* Adds the gradient of one feature: a feature of several forwards has the sum
 * of theirs. */
static void add(taken_grad *all, size_t *n, const taken_feature *f,
                const worker_grad *g, uint32_t column, float **room)
{
    size_t at = 0;
    const size_t bags = g->batch.bags, dim = f->dim;
    while (at < *n && (strcmp(all[at].feature.name, f->name) ||
                       strcmp(all[at].feature.table, f->table) ||
                       all[at].feature.pooling != f->pooling))
        at++;
    float *to = *room;
    if (at == *n) {
        all[(*n)++] = (taken_grad){*f, to};
        *room += bags * dim;
        for (size_t b = 0; b < bags; b++)
            memcpy(to + b * dim, g->grad + b * g->stride + column,
                   dim * sizeof *to);
        return;
    }
    to = (float *)(uintptr_t)all[at].grad;
    for (size_t b = 0; b < bags; b++)
        for (size_t i = 0; i < dim; i++)
            to[b * dim + i] += g->grad[b * g->stride + column + i];
}

/* *features, *floats: of all together. */
static int check_grads(worker *w, const worker_grad *grads, size_t n,
                       size_t *features, size_t *floats)
{
    *features = *floats = 0;
    for (size_t i = 0; i < n; i++) {
        const worker_grad *g = &grads[i];
        if (!taken_is(g))
            return persia_err_set(
                PERSIA_EARG,
                "an update of batches of which embedding workers have the "
                "ids, and of others: make an update of each");
        const plan *p = worker_plan_get(w, g->plan);
        if (!p)
            return PERSIA_EARG;
        *features += p->n;
        *floats += p->width * g->batch.bags;
    }
    return PERSIA_OK;
}

static void add_all(worker *w, const worker_grad *grads, size_t n,
                    taken_grad *all, size_t *all_n, float *room)
{
    for (size_t i = 0; i < n; i++) {
        const plan *p = worker_plan_get(w, grads[i].plan);
        for (uint32_t k = 0; k < p->n && p->kind == PLAN_BAGS; k++) {
            const planned *f = &p->features[k];
            const taken_feature feature = feature_of(w, f);
            if (f->want.trainable &&
                is_pooled(w, grads[i].index->source, f->want.table))
                add(all, all_n, &feature, &grads[i], f->column, &room);
        }
    }
}

/* ---- gradients of rows ---- */

/* Adds those of a part to the sums of its rows, in the order of its ids.
 * place: [rows] where the sum of each is, from 1; 0: nowhere yet. */
HOT static int sum_part(const push_part *part, size_t rows, uint32_t dim,
                        uint32_t *place, taken_rows *out)
{
    for (size_t i = 0; i < part->n; i++) {
        const uint64_t row = part->ids[i];
        if (row >= rows)
            return persia_err_set(PERSIA_EARG, "there is no row %llu of %zu",
                                  (unsigned long long)row, rows);
        const int first = !place[row];
        if (first) {
            out->places[out->n] = (uint32_t)row;
            place[row] = (uint32_t)++out->n;
        }
        floats_add(out->grads + (size_t)(place[row] - 1) * dim,
                   part->grad + (part->bag ? part->bag[i] : i) * part->stride,
                   part->scale ? part->scale[i] : 1, first, dim);
    }
    return PERSIA_OK;
}

static int sum_job(const push_job *job, size_t rows, taken_rows *out)
{
    uint32_t *place = calloc(rows + 1, sizeof *place);
    out->places = malloc((rows + 1) * sizeof *out->places);
    out->grads = malloc((rows * out->dim + 1) * sizeof *out->grads);
    int rc = place && out->places && out->grads
                 ? PERSIA_OK
                 : persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    for (size_t i = 0; i < job->parts_n && !rc; i++)
        rc = sum_part(&job->parts[i], rows, out->dim, place, out);
    free(place);
    return rc;
}

static void free_rows(taken_rows *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        free(rows[i].places);
        free(rows[i].grads);
    }
    free(rows);
}

/* The gradients of the rows of all tables that have some; *out to be freed by
 * free_rows(). */
static int sum_rows(worker *w, const worker_grad *grads, size_t n,
                    taken_rows **out, size_t *out_n)
{
    const worker_source *s = grads[0].index->source;
    push_job *jobs;
    uint32_t *tables;
    size_t jobs_n = 0;
    *out_n = 0;
    *out = NULL;
    scratch *tmp = scratch_take(w);
    if (!tmp)
        return PERSIA_ENOMEM;
    int rc = worker_push_jobs(w, grads, n, tmp, &jobs, &tables, &jobs_n);
    if (!rc && !(*out = calloc(jobs_n + 1, sizeof **out)))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    for (size_t i = 0; i < jobs_n && !rc; i++) {
        taken_rows *to = &(*out)[*out_n];
        size_t rows;
        *to = (taken_rows){.table = table_of(w, tables[i]),
                           .dim = persia_client_table(w->c, tables[i])->dim};
        ++*out_n;
        rc = s->rows(s, to->table, &rows)
                 ? sum_job(&jobs[i], rows, to)
                 : persia_err_set(PERSIA_EFEATURE,
                                  "table %s: the embedding workers do not "
                                  "send its rows",
                                  to->table);
    }
    scratch_give(w, tmp);
    return rc;
}

/* ---- updates ---- */

int taken_backward(worker *w, const worker_grad *grads, size_t n,
                   const client_update *update, const optim_args *optim,
                   uint32_t optim_n, worker_counts *counts)
{
    size_t features, floats;
    int rc = check_grads(w, grads, n, &features, &floats);
    if (!rc && update->parts > 1)
        rc = persia_err_set(PERSIA_EARG,
                            "staleness=0 over several ranks does not work "
                            "with embedding workers: use staleness=1 or more");
    if (rc)
        return rc;
    taken_grad *all = malloc(features * sizeof *all);
    float *room = malloc(floats * sizeof *room + 1);
    taken_rows *rows = NULL;
    taken_update u = {.grads = all, .optim = optim, .optim_n = optim_n,
                      .c = w->c};
    if (!all || !room) {
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
        goto done;
    }
    add_all(w, grads, n, all, &u.n, room);
    rc = sum_rows(w, grads, n, &rows, &u.rows_n);
    if (rc)
        goto done;
    u.rows = rows;
    u.t = update->number ? persia_client_t_of(w->c, update) : 0;
    worker_source *s = grads[0].index->source;
    rc = s->push(s, &u, counts);
done:
    free_rows(rows, u.rows_n);
    free(room);
    free(all);
    return rc;
}

int taken_finite(worker *w, const worker_grad *grads, size_t n,
                 uint8_t *finite, uint32_t finite_n)
{
    size_t features, floats;
    int rc = check_grads(w, grads, n, &features, &floats);
    for (size_t i = 0; i < n && !rc; i++) {
        const worker_grad *g = &grads[i];
        const plan *p = worker_plan_get(w, g->plan);
        for (uint32_t k = 0; k < p->n; k++) {
            const planned *f = &p->features[k];
            const int bags = p->kind == PLAN_BAGS;
            if (f->want.trainable && f->want.table < finite_n &&
                !persia_rows_finite(g->grad + (bags ? f->column : 0),
                                    bags ? g->batch.bags : g->batch.n, f->dim,
                                    g->stride))
                finite[f->want.table] = 0;
        }
    }
    return rc;
}

int taken_check_sums(const worker_grad *grads, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (taken_is(&grads[i]))
            return persia_err_set(
                PERSIA_EARG,
                "clip_grad_norm_ needs the ids of a batch, and embedding "
                "workers have them: clip rows with max_grad_norm= of the "
                "optimizer");
    return PERSIA_OK;
}
