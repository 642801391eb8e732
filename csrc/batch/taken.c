/* taken.c: see taken.h. */
#include "batch/taken.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"

#include "simd/simd.h"

int taken_is(const batcher_grad *g)
{
    return g->index && g->index->source;
}

int taken_any(const batcher_grad *grads, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (taken_is(&grads[i]))
            return 1;
    return 0;
}

static taken_feature feature_of(const batcher *w, const planned *f)
{
    return (taken_feature){.name = f->want.name,
                           .table =
                               persia_client_table(w->c, f->want.table)->name,
                           .pooling = f->want.pooling,
                           .dim = f->dim};
}

static const char *taken_table_of(const batcher *w, uint32_t no)
{
    return persia_client_table(w->c, no)->name;
}

/* Whether its features are pooled elsewhere. */
static int taken_is_pooled(const batcher *w, const batcher_source *s,
                           uint32_t table)
{
    size_t n;
    return !s->rows(s, taken_table_of(w, table), &n);
}

void taken_cut(const batcher *w, const plan *p, const batcher_source *s,
               slice *slices)
{
    for (uint32_t i = 0; i < p->n; i++)
        if (taken_is_pooled(w, s, p->features[i].want.table))
            slices[i] = (slice){.f = &p->features[i]};
}

int taken_pull(batcher *w, batcher_source *s, const uint32_t *tables,
               const pull_job *jobs, size_t jobs_n)
{
    int rc = PERSIA_OK;
    for (size_t i = 0; i < jobs_n && !rc; i++)
        rc = s->gather(s, taken_table_of(w, tables[i]),
                       (const int64_t *)jobs[i].ids, jobs[i].n, jobs[i].out,
                       jobs[i].stride);
    return rc;
}

int taken_read(batcher *w, batcher_source *s, const plan *p, float *out,
               size_t stride)
{
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < p->n && p->kind == PLAN_BAGS && !rc; i++) {
        const taken_feature f = feature_of(w, &p->features[i]);
        if (taken_is_pooled(w, s, p->features[i].want.table))
            rc = s->read(s, &f, out + p->features[i].column, stride);
    }
    return rc;
}

/* Adds the gradient of one feature: a feature of several forwards has the sum
 * of theirs. */
static void taken_add(taken_grad *all, size_t *n, const taken_feature *f,
                      const batcher_grad *g, uint32_t column, float **room)
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
static int check_grads(batcher *w, const batcher_grad *grads, size_t n,
                       size_t *features, size_t *floats)
{
    *features = *floats = 0;
    for (size_t i = 0; i < n; i++) {
        const batcher_grad *g = &grads[i];
        const plan *p = batcher_plan_get(w, g->plan);
        if (!p)
            return PERSIA_EARG;
        *features += p->n;
        *floats += p->width * g->batch.bags;
    }
    return PERSIA_OK;
}

static void taken_add_all(batcher *w, const batcher_grad *grads, size_t n,
                          taken_grad *all, size_t *all_n, float *room)
{
    for (size_t i = 0; i < n; i++) {
        const plan *p = batcher_plan_get(w, grads[i].plan);
        for (uint32_t k = 0; k < p->n && p->kind == PLAN_BAGS; k++) {
            const planned *f = &p->features[k];
            const taken_feature feature = feature_of(w, f);
            if (f->want.trainable &&
                taken_is_pooled(w, grads[i].index->source, f->want.table))
                taken_add(all, all_n, &feature, &grads[i], f->column, &room);
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
        push_part_sum(part, i, out->grads + (size_t)(place[row] - 1) * dim,
                      first, dim);
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
static int sum_rows(batcher *w, const batcher_grad *grads, size_t n,
                    taken_rows **out, size_t *out_n)
{
    const batcher_source *s = grads[0].index->source;
    push_job *jobs;
    uint32_t *tables;
    size_t jobs_n = 0;
    *out_n = 0;
    *out = NULL;
    scratch *tmp = scratch_take(w);
    if (!tmp)
        return PERSIA_ENOMEM;
    int rc = batcher_push_jobs(w, grads, n, tmp, &jobs, &tables, &jobs_n);
    if (!rc && !(*out = calloc(jobs_n + 1, sizeof **out)))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    for (size_t i = 0; i < jobs_n && !rc; i++) {
        taken_rows *to = &(*out)[*out_n];
        size_t rows;
        *to = (taken_rows){.table = taken_table_of(w, tables[i]),
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

enum { BATCHES_MAX = 256 }; /* of one update */

/* How often servers learn again that no part has to be waited for. */
#define PASS_NS ((uint64_t)1000000000)

/* The batches of one update. */
typedef struct together {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    size_t left; /* that have not ended */
} together;

/* The gradients of one batch. */
typedef struct one_batch {
    batcher *w;
    batcher_source *source;
    batcher_grad *grads; /* [n] */
    size_t n;
    client_update name;
    const optim_args *optim;
    uint32_t optim_n;
    batcher_counts counts;
    together *together; /* NULL: it is the only batch */
    pthread_t thread;
    int started;
    err_kept error; /* or its code is PERSIA_OK */
} one_batch;

/* What is made of them; freed by taken_free_update(). */
typedef struct made {
    taken_grad *all;
    taken_rows *rows;
    float *room;
    taken_update u;
} made;

static void taken_free_update(made *m)
{
    free_rows(m->rows, m->u.rows_n);
    free(m->room);
    free(m->all);
}

static int taken_make_update(one_batch *b, made *m)
{
    size_t features, floats;
    *m = (made){.u = {.name = &b->name,
                      .optim = b->optim,
                      .optim_n = b->optim_n,
                      .c = b->w->c}};
    int rc = check_grads(b->w, b->grads, b->n, &features, &floats);
    if (rc)
        return rc;
    m->all = malloc(features * sizeof *m->all);
    m->room = malloc(floats * sizeof *m->room + 1);
    if (!m->all || !m->room)
        return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    taken_add_all(b->w, b->grads, b->n, m->all, &m->u.n, m->room);
    rc = sum_rows(b->w, b->grads, b->n, &m->rows, &m->u.rows_n);
    m->u.grads = m->all;
    m->u.rows = m->rows;
    return rc;
}

/* The others do not wait for the part of this batch.  An error: they do, and
 * its rank must not go a step ahead.  Where a server has applied the step, it
 * needs no part. */
static int taken_pass(const one_batch *b)
{
    int rc = PERSIA_OK;
    if (b->name.group)
        (void)persia_client_pass(b->w->c, &b->name);
    else if (b->name.parts > 1)
        rc = persia_client_skip(b->w->c, &b->name);
    return persia_retry(RETRY_CALL, rc) == RETRY_LATER ? rc : PERSIA_OK;
}

/* Waits until all batches of the update have ended.  A server that was started
 * again does not have the part of this one, which no worker sends any more. */
static void taken_wait_for_others(const one_batch *b, int is_there)
{
    together *all = b->together;
    pthread_mutex_lock(&all->lock);
    if (!--all->left)
        pthread_cond_broadcast(&all->ended);
    while (all->left) {
        const uint64_t until = persia_clock_ns() + PASS_NS;
        persia_cond_wait_until(&all->ended, &all->lock, until);
        if (!all->left || !is_there || persia_clock_ns() < until)
            continue;
        pthread_mutex_unlock(&all->lock);
        (void)taken_pass(b);
        pthread_mutex_lock(&all->lock);
    }
    pthread_mutex_unlock(&all->lock);
}

static void *push_one(void *ctx)
{
    one_batch *b = ctx;
    made m;
    int passed = 0;
    int rc = taken_make_update(b, &m);
    if (!rc)
        rc = b->source->push(b->source, &m.u, &b->counts, &passed);
    persia_err_keep(&b->error, rc);
    const int failed = passed || (rc && !client_is_loss(rc));
    if (failed && (rc = taken_pass(b)) && !b->error.code)
        persia_err_keep(&b->error, rc);
    if (b->together)
        taken_wait_for_others(b, !failed);
    taken_free_update(&m);
    return NULL;
}

static void free_batches(one_batch *batches, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(batches[i].grads);
    free(batches);
}

/* Sorts gradients by batch, in the order of their first ones. */
static int taken_split(batcher *w, const batcher_grad *grads, size_t n,
                       one_batch **out, size_t *out_n)
{
    one_batch *all = calloc(n, sizeof *all);
    *out = all;
    *out_n = 0;
    if (!all)
        return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    for (size_t i = 0; i < n; i++) {
        if (!taken_is(&grads[i]))
            return persia_err_set(
                PERSIA_EARG,
                "an update of batches of which embedding workers have the "
                "ids, and of others: make an update of each");
        one_batch *b = all;
        while (b < all + *out_n && b->source != grads[i].index->source)
            b++;
        if (b == all + *out_n) {
            *b = (one_batch){.w = w, .source = grads[i].index->source,
                             .grads = malloc(n * sizeof *grads)};
            ++*out_n;
        }
        if (!b->grads)
            return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
        b->grads[b->n++] = grads[i];
    }
    return *out_n <= BATCHES_MAX
               ? PERSIA_OK
               : persia_err_set(PERSIA_ELIMIT,
                                "an update of %zu batches, at most %d",
                                *out_n, BATCHES_MAX);
}

/* All of an update of several batches would be refused for this, but each
 * worker sees its own alone. */
static int taken_check_finite(batcher *w, const batcher_grad *grads, size_t n)
{
    const uint32_t tables = persia_client_tables(w->c);
    uint8_t *finite = malloc(tables + (size_t)1);
    if (!finite)
        return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    memset(finite, 1, tables);
    int rc = taken_finite(w, grads, n, finite, tables);
    for (uint32_t t = 0; t < tables && !rc; t++)
        if (!finite[t] &&
            persia_client_table(w->c, t)->nonfinite == NONFINITE_RAISE)
            rc = persia_err_set(PERSIA_ENONFINITE,
                                "table %s: the gradient of an id is NaN or "
                                "Inf; nothing was applied. Find its source, "
                                "or let such rows be skipped and counted: "
                                "nonfinite=\"skip\"",
                                taken_table_of(w, t));
    free(finite);
    return rc;
}

/* A number for the update of several batches that no other one has. */
static uint64_t group_of(batcher *w, uint64_t number)
{
    return id_hash(persia_client_caller(w->c, 0).client ^ id_hash(number)) | 1;
}

/* One update, whose parts leave side by side: each is there when all are. */
static int push_batches(batcher *w, one_batch *all, size_t n,
                        const client_update *update, const optim_args *optim,
                        uint32_t optim_n)
{
    const uint64_t t =
        update->number ? persia_client_t_of(w->c, update) : 0;
    together others = {.left = n};
    pthread_mutex_init(&others.lock, NULL);
    persia_cond_init(&others.ended);
    for (size_t i = 0; i < n; i++) {
        all[i].name = *update;
        all[i].name.t = t;
        all[i].optim = optim;
        all[i].optim_n = optim_n;
        if (n == 1)
            continue;
        all[i].name.part = (uint32_t)i;
        all[i].name.parts = (uint32_t)n;
        all[i].name.group = group_of(w, update->number);
        all[i].together = &others;
    }
    for (size_t i = 1; i < n; i++) {
        const int rc = persia_thread_start(&all[i].thread, push_one, &all[i],
                                           "persia-push");
        all[i].started = !rc;
        persia_err_keep(&all[i].error, rc);
        if (rc) {
            (void)taken_pass(&all[i]);
            pthread_mutex_lock(&others.lock);
            others.left--;
            pthread_mutex_unlock(&others.lock);
        }
    }
    push_one(&all[0]);
    for (size_t i = 1; i < n; i++)
        if (all[i].started)
            persia_thread_join(all[i].thread);
    pthread_cond_destroy(&others.ended);
    pthread_mutex_destroy(&others.lock);
    for (size_t i = 0; i < n; i++)
        if (all[i].error.code)
            return persia_err_again(&all[i].error);
    return PERSIA_OK;
}

int taken_backward(batcher *w, const batcher_grad *grads, size_t n,
                   const client_update *update, const optim_args *optim,
                   uint32_t optim_n, batcher_counts *counts)
{
    one_batch *all;
    size_t batches;
    int rc = taken_split(w, grads, n, &all, &batches);
    if (!rc && batches > 1)
        rc = taken_check_finite(w, grads, n);
    if (!rc && batches > 1 && update->parts > 1)
        rc = persia_err_set(PERSIA_EARG,
                            "staleness=0 over several ranks, and an update of "
                            "%zu batches of embedding workers: each update "
                            "has to be of one batch",
                            batches);
    if (rc)
        (void)persia_client_skip(w->c, update);
    else
        rc = push_batches(w, all, batches, update, optim, optim_n);
    for (size_t i = 0; i < batches; i++)
        UPDATE_COUNTS_ADD(counts, &all[i].counts);
    free_batches(all, batches);
    return rc;
}

int taken_sums(batcher *w, const batcher_grad *grads, size_t n,
               batcher_sum **out, size_t *out_n, int *finite)
{
    one_batch *all;
    size_t batches;
    int rc = taken_split(w, grads, n, &all, &batches);
    for (size_t i = 0; i < batches && !rc; i++) {
        made m;
        rc = taken_make_update(&all[i], &m);
        if (!rc)
            rc = all[i].source->sums(all[i].source, &m.u, out, out_n, finite);
        taken_free_update(&m);
    }
    free_batches(all, batches);
    if (rc) {
        persia_batcher_sums_free(*out, *out_n);
        *out = NULL;
        *out_n = 0;
    }
    return rc;
}

int taken_finite(batcher *w, const batcher_grad *grads, size_t n,
                 uint8_t *finite, uint32_t finite_n)
{
    for (size_t i = 0; i < n; i++) {
        const batcher_grad *g = &grads[i];
        const plan *p = batcher_plan_get(w, g->plan);
        if (!p)
            return PERSIA_EARG;
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
    return PERSIA_OK;
}
