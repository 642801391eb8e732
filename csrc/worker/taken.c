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

static int check_batch(const plan *p, const worker_source *s, size_t bags)
{
    if (p->kind != PLAN_BAGS)
        return persia_err_set(PERSIA_EARG,
                              "feature %s is a sequence: embedding workers "
                              "pool all features; use an "
                              "EmbeddingBagCollection",
                              p->features[0].want.name);
    if (bags != s->samples)
        return persia_err_set(PERSIA_ESHAPE,
                              "%zu samples, but the embedding worker has "
                              "looked up %zu",
                              bags, s->samples);
    return PERSIA_OK;
}

int persia_worker_read(worker *w, uint32_t no, batch_index *index, size_t bags,
                       float *out, size_t stride)
{
    const plan *p = worker_plan_get(w, no);
    if (!p)
        return PERSIA_EARG;
    worker_source *s = index->source;
    int rc = check_batch(p, s, bags);
    for (uint32_t i = 0; i < p->n && !rc; i++) {
        const taken_feature f = feature_of(w, &p->features[i]);
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

/* All are of one batch; *features, *floats: of all together. */
static int check_grads(worker *w, const worker_grad *grads, size_t n,
                       size_t *features, size_t *floats)
{
    int rc = PERSIA_OK;
    *features = *floats = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        const worker_grad *g = &grads[i];
        if (!taken_is(g) || g->index->source != grads[0].index->source)
            return persia_err_set(
                PERSIA_EARG,
                "an update of several batches, and embedding workers have "
                "their ids: make one update a batch");
        const plan *p = worker_plan_get(w, g->plan);
        rc = p ? check_batch(p, g->index->source, g->batch.bags)
               : PERSIA_EARG;
        if (rc)
            return rc;
        *features += p->n;
        *floats += p->width * g->batch.bags;
    }
    return rc;
}

static void add_all(worker *w, const worker_grad *grads, size_t n,
                    taken_grad *all, size_t *all_n, float *room)
{
    for (size_t i = 0; i < n; i++) {
        const plan *p = worker_plan_get(w, grads[i].plan);
        for (uint32_t k = 0; k < p->n; k++) {
            const planned *f = &p->features[k];
            const taken_feature feature = feature_of(w, f);
            if (f->want.trainable)
                add(all, all_n, &feature, &grads[i], f->column, &room);
        }
    }
}

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
    taken_update u = {.grads = all, .optim = optim, .optim_n = optim_n,
                      .c = w->c};
    if (!all || !room) {
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
        goto done;
    }
    add_all(w, grads, n, all, &u.n, room);
    u.t = update->number ? persia_client_t_of(w->c, update) : 0;
    worker_source *s = grads[0].index->source;
    rc = s->push(s, &u, counts);
done:
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
            if (f->want.trainable && f->want.table < finite_n &&
                !persia_rows_finite(g->grad + f->column, g->batch.bags, f->dim,
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
