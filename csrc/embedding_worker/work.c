/* work.c: what jobs do: tables at the servers, lookups, updates. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"
#include "pool/pool.h"

_Static_assert(POOL_SUM == (int)WORKER_POOL_SUM &&
                   POOL_MEAN == (int)WORKER_POOL_MEAN &&
                   POOL_SQRTN == (int)WORKER_POOL_SQRTN,
               "the message has the numbers of the room");

/* ---- Declare ---- */

static int work_declare_tables(ps_client *c, const wire_plan *plan,
                               uint32_t *numbers)
{
    int rc = PERSIA_OK, created;
    for (size_t i = 0; i < plan->tables_n && !rc; i++) {
        table_config config;
        uint32_t no;
        persia_table_config_init(&config);
        config.spec = plan->tables[i];
        config.capacity = config.spec.capacity;
        rc = persia_client_declare(c, &config, &no, &created);
        if (numbers)
            numbers[i] = no;
    }
    return rc;
}

void work_declare(void *ctx)
{
    asking *a = ctx;
    embedding_worker *s = a->s;
    const wire_plan *m = &a->m.plan;
    pthread_mutex_lock(&s->declaring);
    int rc = work_declare_tables(s->look, m, NULL);
    service_enter(s);
    if (!rc)
        rc = rank_declare(s, m, &a->status);
    service_match(s);
    service_leave(s);
    pthread_mutex_unlock(&s->declaring);
    asking_answer(a, rc);
}

/* Whether servers may be there again, and of one restore: the batch is not
 * the cause. */
static int work_may_pass(int rc)
{
    return persia_retry(RETRY_OFFER, rc) != RETRY_NEVER;
}

/* ---- lookups ---- */

int stream_open(embedding_worker *s, worker_stream *t)
{
    const wire_plan *plan = &t->job->plan->plan;
    int rc = PERSIA_OK;
    pthread_mutex_lock(&t->opening);
    client_config config = s->config.servers;
    config.stream = t->name;
    config.shared = 1;
    if (!t->c)
        rc = persia_client_create(&config, &t->c);
    if (!rc && !t->w)
        rc = persia_batcher_create(t->c, &t->w);
    if (!rc && !t->tables) {
        t->tables = calloc(plan->tables_n + 1, sizeof *t->tables);
        if (!t->tables)
            rc = persia_err_set(PERSIA_ENOMEM, "no memory for tables");
    }
    if (!rc && !t->open)
        rc = work_declare_tables(t->c, plan, t->tables);
    t->open |= !rc;
    assert(!t->open || (t->c && t->w && t->tables));
    pthread_mutex_unlock(&t->opening);
    return rc;
}

/* A plan of some of the features that are pooled here (NULL: of all) for the
 * batch's keys; their columns follow one another. */
static int plan_of(const offer *o, const uint8_t *wanted, uint32_t *out)
{
    const wire_plan *plan = &offer_plan(o)->plan;
    plan_feature *features = calloc(plan->features_n, sizeof *features);
    uint32_t n = 0;
    if (!features)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a plan");
    for (size_t i = 0; i < plan->features_n; i++) {
        const wire_plan_feature *f = &plan->features[i];
        if (f->rows || (wanted && !wanted[i]))
            continue;
        plan_feature *to = &features[n++];
        memcpy(to->name, f->name, sizeof to->name);
        to->key = (uint32_t)offer_feature(o, f->name);
        to->table = o->stream->tables[f->table];
        to->pooling = f->pooling;
        to->trainable = f->trainable;
    }
    int rc = persia_batcher_plan(o->stream->w, PLAN_BAGS,
                                 (uint32_t)o->m.features_n, features, n, out);
    free(features);
    return rc;
}

static id_batch batch_of(const offer *o)
{
    return (id_batch){.n = o->m.ids.n,
                      .bags = o->m.samples,
                      .values = (const int64_t *)o->m.ids.ids,
                      .offsets = (const int64_t *)o->m.offsets.offsets};
}

/* Columns of all pooled features before one. */
static size_t work_column_of(const wire_plan *plan, size_t feature)
{
    size_t column = 0;
    for (size_t i = 0; i < feature; i++)
        if (!plan->features[i].rows)
            column += plan->tables[plan->features[i].table].dim;
    return column;
}

/* Between fp32 here and what a Take is answered with. */
typedef struct packing {
    const worker_plan *plan;
    const float *pooled, *rows;  /* [samples, width]; [n, row_width] */
    size_t width, row_width;
    const row_ids *ids;
    const wire_take_reply *m;
} packing;

static int work_pack(void *ctx, size_t i)
{
    const packing *p = ctx;
    const wire_take_reply *m = p->m;
    const int pooled = i < m->values_n;
    const size_t at = pooled ? i : i - m->values_n;
    const wire_values *v = pooled ? &m->values[at] : &m->rows[at];
    const float *from =
        pooled ? p->pooled + work_column_of(&p->plan->plan, v->no)
               : p->rows + (size_t)p->ids->offsets[at] * p->row_width;
    persia_wire_narrow(m->dtype, v->n, v->dim, from,
                       pooled ? p->width : p->row_width,
                       (void *)(uintptr_t)v->values,
                       (float *)(uintptr_t)v->scales);
    return PERSIA_OK;
}

static int work_list_values(asking *a)
{
    const offer *o = a->o;
    const wire_plan *plan = &offer_plan(o)->plan;
    const row_plan *rows = &offer_plan(o)->rows;
    wire_take_reply *m = &a->taken;
    m->values = persia_wire_memory_take(&a->memory,
                                        plan->features_n * sizeof *m->values);
    m->rows = persia_wire_memory_take(&a->memory,
                                      plan->tables_n * sizeof *m->rows);
    if (!m->values || !m->rows)
        return PERSIA_ENOMEM;
    for (size_t i = 0; i < plan->features_n; i++)
        if (!plan->features[i].rows)
            m->values[m->values_n++] = (wire_values){
                .no = (uint32_t)i,
                .dim = plan->tables[plan->features[i].table].dim,
                .n = o->m.samples};
    for (uint32_t t = 0; t < rows->tables_n; t++)
        m->rows[m->rows_n++] = (wire_values){
            .no = rows->table[t],
            .dim = plan->tables[rows->table[t]].dim,
            .n = (size_t)(o->rows.offsets[t + 1] - o->rows.offsets[t])};
    return PERSIA_OK;
}

static void work_give_memory(wire_values *v, uint32_t dtype, char **at)
{
    v->values = mem_carve(at, v->n * v->dim * wire_dtype_bytes(dtype));
    if (dtype == WIRE_FP16)
        v->scales = mem_carve(at, v->n * sizeof(float));
}

/* The answer's values, one feature after the other, then the rows. */
static int work_pack_all(asking *a, const float *pooled, const float *rows)
{
    const offer *o = a->o;
    const worker_plan *plan = offer_plan(o);
    wire_take_reply *m = &a->taken;
    size_t bytes = 64, n = 0;
    *m = (wire_take_reply){.lease = o->lease,
                           .stream = o->m.stream,
                           .number = o->m.number,
                           .samples = o->m.samples,
                           .dtype = a->m.take.dtype,
                           .tensors = o->m.tensors,
                           .tensors_n = o->m.tensors_n,
                           .ids = {a->places.n, a->places.places,
                                   a->places.weights},
                           .offsets = {a->places.offsets_n,
                                       a->places.offsets}};
    int rc = work_list_values(a);
    if (rc)
        return rc;
    for (size_t i = 0; i < m->values_n + m->rows_n; i++) {
        const wire_values *v =
            i < m->values_n ? &m->values[i] : &m->rows[i - m->values_n];
        bytes += v->n * (v->dim * wire_dtype_bytes(m->dtype) + sizeof(float)) +
                 (size_t)64 * 2;
        n += v->n;
    }
    a->floats = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!a->floats)
        return persia_err_set(PERSIA_ENOMEM, "no memory for embeddings");
    char *at = a->floats;
    for (size_t i = 0; i < m->values_n; i++)
        work_give_memory(&m->values[i], m->dtype, &at);
    for (size_t i = 0; i < m->rows_n; i++)
        work_give_memory(&m->rows[i], m->dtype, &at);
    packing p = {plan,
                 pooled,
                 rows,
                 work_column_of(&plan->plan, plan->plan.features_n),
                 row_plan_width(plan),
                 &o->rows,
                 m};
    return persia_sched_for_rows(persia_client_sched(o->stream->c),
                                 m->values_n + m->rows_n, n, work_pack, &p);
}

/* A call of the stream ended with rc: whether servers have other rows than it
 * knew, so that it has ended.  An update that they dropped may end without an
 * error, for only one call gets that. */
static int work_is_replaced(embedding_worker *s, const worker_stream *t,
                            int rc)
{
    if (rc && rc != PERSIA_EREPLACED && rc != PERSIA_EINCOMPLETE &&
        rc != PERSIA_EMISMATCH)
        return 0;
    service_enter(s);
    const int same = !rc && persia_client_restore(t->c) == s->lineage;
    service_leave(s);
    if (same)
        return 0;
    /* A rank that has it may know better: it asks again. */
    (void)(rc == PERSIA_EINCOMPLETE ? lineage_look(s) : lineage_settle(s));
    service_enter(s);
    const int old = t->state == STREAM_OLD;
    service_leave(s);
    return old;
}

/* persia_batcher_forward(), once more where servers lost updates. */
static int work_forward(asking *a, uint32_t plan, id_batch *b, float *out,
                        size_t width, batch_index **index)
{
    const offer *o = a->o;
    b->trace = &a->trace.at;
    int rc = persia_batcher_forward(o->stream->w, plan, b, 0, out, width, NULL,
                                    index);
    if (client_is_loss(rc)) { /* ranks and loaders find out what is lost */
        (void)work_is_replaced(a->s, o->stream, rc);
        rc = persia_batcher_forward(o->stream->w, plan, b, 0, out, width, NULL,
                                    index);
    }
    return rc;
}

static int work_make_plans(offer *o, row_places *places)
{
    const worker_plan *plan = offer_plan(o);
    int rc = PERSIA_OK;
    if (work_column_of(&plan->plan, plan->plan.features_n))
        rc = plan_of(o, NULL, &o->plan);
    row_ids_free(&o->rows);
    if (!rc && plan->rows.tables_n)
        rc = row_ids_find(plan, o, &o->rows, places);
    if (!rc && plan->rows.tables_n)
        rc = row_ids_plan(plan, o, &o->rows.plan);
    o->planned = !rc;
    return rc;
}

/* What is pooled here; *out is the caller's. */
static int work_look_up_pooled(asking *a, float **out)
{
    const offer *o = a->o;
    const wire_plan *plan = &offer_plan(o)->plan;
    const size_t width = work_column_of(plan, plan->features_n);
    id_batch b = batch_of(o);
    *out = NULL;
    if (!width)
        return PERSIA_OK;
    if (!(*out = malloc(b.bags * width * sizeof **out)))
        return persia_err_set(PERSIA_ENOMEM, "no memory for embeddings");
    return work_forward(a, o->plan, &b, *out, width, &a->o->index);
}

/* The distinct rows of the other tables. */
static int work_look_up_rows(asking *a, float **out)
{
    offer *o = a->o;
    const worker_plan *plan = offer_plan(o);
    const size_t width = row_plan_width(plan);
    *out = NULL;
    if (!width)
        return PERSIA_OK;
    id_batch b = row_ids_batch(plan, &o->rows);
    *out = malloc((b.n * width + 1) * sizeof **out);
    if (!*out)
        return persia_err_set(PERSIA_ENOMEM, "no memory for embeddings");
    return b.n ? work_forward(a, o->rows.plan, &b, *out, width, &o->rows.index)
               : PERSIA_OK;
}

/* An answer that ranks would refuse: the batch is too large. */
static int work_check_answer(const asking *a)
{
    wire_out o;
    persia_wire_out_init(&o);
    int rc = persia_wire_put_take_reply(&o, &a->taken);
    if (!rc)
        rc = persia_wire_check_size("this embedding worker", "a batch",
                                    o.bytes, a->s->config.message_limit);
    persia_wire_out_free(&o);
    return rc;
}

/* *bad: the error is about the batch. */
static int work_look_up(asking *a, int *bad)
{
    offer *o = a->o;
    float *pooled = NULL, *rows = NULL;
    int have = 0;
    int rc = offer_check(o, offer_plan(o));
    *bad = rc != PERSIA_OK;
    if (!rc)
        rc = stream_open(a->s, o->stream);
    if (!rc)
        rc = ledger_has_offer(a->s, o, &have);
    a->status = have ? TAKE_EMPTY : TAKE_BATCH;
    if (rc || have)
        return rc;
    persia_batch_index_put(o->index); /* it is looked up again */
    o->index = NULL;
    rc = work_make_plans(o, &a->places);
    if (!rc)
        rc = work_look_up_pooled(a, &pooled);
    if (!rc)
        rc = work_look_up_rows(a, &rows);
    if (!rc)
        rc = work_pack_all(a, pooled, rows);
    free(pooled);
    free(rows);
    if (!rc) {
        rc = work_check_answer(a);
        *bad = rc == PERSIA_ELIMIT;
    }
    return rc;
}

/* Its lookup has ended with rc.  The lock is held. */
static void work_end_lookup(asking *a, int rc, int bad, const char *text)
{
    embedding_worker *s = a->s;
    offer *o = a->o;
    if (bad) {
        offer_fail(s, o, rc, text);
    } else if (rc) {
        offer_again(s, o, !work_may_pass(rc));
    } else if (a->status == TAKE_BATCH) {
        a->status = offer_found(s, o) ? TAKE_BATCH : TAKE_EMPTY;
    } else {
        s->stats.had++;
        offer_end(s, o);
    }
}

/* A job of a batch begins. */
static void work_trace(asking *a, enum trace_kind kind)
{
    const offer *o = a->o;
    persia_trace_begin(&a->trace, kind, o->m.stream, o->m.number);
    a->trace.attempt = offer_attempt(o);
    a->trace.rows = o->m.ids.n;
}

void work_take(void *ctx)
{
    asking *a = ctx;
    embedding_worker *s = a->s;
    offer *o = a->o;
    err_kept error;
    work_trace(a, TRACE_LOOKUP);
    int bad, rc = work_look_up(a, &bad);
    persia_err_keep(&error, rc);
    persia_trace_end(&a->trace, rc);
    if (rc && work_is_replaced(s, o->stream, rc))
        rc = PERSIA_EUNAVAILABLE; /* its loader sends it again */
    service_enter(s);
    work_end_lookup(a, rc, bad, error.text);
    if (bad) { /* the loader's error: the rank asks for another one */
        rc = PERSIA_OK;
        a->status = TAKE_EMPTY;
    }
    if (rc || a->status == TAKE_EMPTY) {
        a->o = NULL;
        a->taken = (wire_take_reply){0};
        offer_release(s, o);
    }
    service_match(s);
    service_leave(s);
    asking_answer(a, rc ? persia_err_set(rc, "%s", error.text) : PERSIA_OK);
}

/* ---- updates ---- */

/* Which features and tables have gradients. */
typedef struct returned {
    uint8_t *pooled; /* [features] */
    uint8_t *rows;   /* [tables] */
    size_t width;    /* of the pooled ones as they go to the worker */
    int all;         /* the pooled ones are those of the lookup */
    row_ids ids;     /* those of `rows`, if they are not those of the lookup */
    float *floats;
} returned;

static int work_check_pooled(const offer *o, const wire_return *m, returned *r)
{
    const wire_plan *plan = &offer_plan(o)->plan;
    for (size_t i = 0; i < m->grads_n; i++) {
        const wire_values *g = &m->grads[i];
        const wire_plan_feature *f =
            g->no < plan->features_n ? &plan->features[g->no] : NULL;
        if (!f || f->rows || r->pooled[g->no] || g->n != o->m.samples ||
            g->dim != plan->tables[f->table].dim)
            return persia_err_set(PERSIA_ESHAPE,
                                  "the gradient of feature %s is not that of "
                                  "its embeddings",
                                  f ? f->name : "?");
        r->pooled[g->no] = 1;
    }
    r->all = 1;
    for (size_t i = 0; i < plan->features_n; i++) {
        const wire_plan_feature *f = &plan->features[i];
        if (f->rows)
            continue;
        r->all &= r->pooled[i] || !f->trainable;
        r->width += r->pooled[i] ? plan->tables[f->table].dim : 0;
    }
    if (r->all)
        r->width = work_column_of(plan, plan->features_n);
    return PERSIA_OK;
}

/* The rows of a table, or tables_n. */
static uint32_t rows_of(const row_plan *r, uint32_t table)
{
    uint32_t t = 0;
    while (t < r->tables_n && r->table[t] != table)
        t++;
    return t;
}

static int work_check_rows(const offer *o, const wire_return *m, returned *r)
{
    const worker_plan *p = offer_plan(o);
    for (size_t i = 0; i < m->rows_n; i++) {
        const wire_values *g = &m->rows[i];
        const uint32_t t = rows_of(&p->rows, g->no);
        int good = t < p->rows.tables_n && o->rows.ids && !r->rows[t] &&
                   g->dim == p->plan.tables[g->no].dim;
        const size_t n =
            good ? (size_t)(o->rows.offsets[t + 1] - o->rows.offsets[t]) : 0;
        good = good && (g->rows ? g->n <= n : g->n == n);
        for (size_t k = 0; good && g->rows && k < g->n; k++)
            good = g->rows[k] < n;
        if (!good)
            return persia_err_set(PERSIA_ESHAPE,
                                  "the gradients of table %u are not those of "
                                  "its rows",
                                  g->no);
        r->rows[t] = 1;
    }
    return PERSIA_OK;
}

/* The gradients as the output of the plan has them. */
static void work_widen_pooled(const worker_plan *p, const wire_return *m,
                              const returned *r, size_t rows)
{
    const wire_plan *plan = &p->plan;
    for (size_t i = 0; i < m->grads_n; i++) {
        const wire_values *g = &m->grads[i];
        size_t column = 0;
        for (uint32_t k = 0; k < g->no; k++)
            if (!plan->features[k].rows && (r->all || r->pooled[k]))
                column += plan->tables[plan->features[k].table].dim;
        persia_wire_widen(m->dtype, rows, g->dim, g->values, g->scales,
                          r->floats + column, r->width);
    }
}

/* The gradients of a table's rows, by its place among such tables; or NULL. */
static const wire_values *rows_in(const worker_plan *p, const wire_return *m,
                                  uint32_t t)
{
    size_t i = 0;
    while (i < m->rows_n && m->rows[i].no != p->rows.table[t])
        i++;
    return i < m->rows_n ? &m->rows[i] : NULL;
}

/* The ids of the rows that have gradients: a batch of its own, unless all
 * have. */
static int find_rows(const offer *o, const wire_return *m, returned *r,
                     const row_ids **out)
{
    const worker_plan *p = offer_plan(o);
    const uint32_t tables = p->rows.tables_n;
    size_t n = 0;
    int all = 1;
    for (uint32_t t = 0; t < tables; t++) {
        const wire_values *g = rows_in(p, m, t);
        all &= g && !g->rows;
        n += g ? g->n : 0;
    }
    *out = all ? &o->rows : &r->ids;
    if (all)
        return PERSIA_OK;
    r->ids = (row_ids){.ids = malloc((n + 1) * sizeof *r->ids.ids),
                       .offsets = calloc(tables + (size_t)1,
                                         sizeof *r->ids.offsets),
                       .plan = o->rows.plan};
    if (!r->ids.ids || !r->ids.offsets)
        return persia_err_set(PERSIA_ENOMEM, "no memory for ids");
    n = 0;
    for (uint32_t t = 0; t < tables; t++) {
        const wire_values *g = rows_in(p, m, t);
        const uint64_t *from = o->rows.ids + o->rows.offsets[t];
        for (size_t k = 0; g && k < g->n; k++)
            r->ids.ids[n++] = from[g->rows ? g->rows[k] : k];
        r->ids.offsets[t + 1] = (int64_t)n;
    }
    return PERSIA_OK;
}

static void widen_rows(const worker_plan *p, const wire_return *m,
                       const row_ids *ids, size_t width, float *to)
{
    for (uint32_t t = 0; t < p->rows.tables_n; t++) {
        const wire_values *g = rows_in(p, m, t);
        if (g)
            persia_wire_widen(m->dtype, g->n, g->dim, g->values, g->scales,
                              to + (size_t)ids->offsets[t] * width, width);
    }
}

static int work_push(asking *a, const batcher_grad *g, size_t n)
{
    const offer *o = a->o;
    const wire_return *m = &a->m.back;
    const wire_plan *plan = &offer_plan(o)->plan;
    const uint32_t tables = persia_client_tables(o->stream->c);
    if (m->hypers_n != plan->tables_n)
        return persia_err_set(PERSIA_EARG,
                              "hyper-parameters of %zu tables, but there are "
                              "%zu",
                              m->hypers_n, plan->tables_n);
    optim_args *optim = calloc(tables + (size_t)1, sizeof *optim);
    if (!optim)
        return persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    for (size_t i = 0; i < plan->tables_n; i++)
        optim[o->stream->tables[i]].hyper = m->hypers[i];
    const client_update update = {.number = o->m.number,
                                  .step = m->step,
                                  .part = m->part,
                                  .parts = m->parts,
                                  .group = m->group,
                                  .maker = m->maker,
                                  .through = o->m.settled,
                                  .t = m->t,
                                  .trace = a->trace.at};
    int rc = persia_batcher_backward(o->stream->w, g, n, &update, optim,
                                     tables, &a->counts);
    free(optim);
    return rc;
}

/* For a batch that was looked up elsewhere: its rows have the same places
 * here. */
static int plan_again(embedding_worker *s, offer *o)
{
    row_places places = {0};
    int rc = offer_check(o, offer_plan(o));
    if (!rc)
        rc = stream_open(s, o->stream);
    if (!rc)
        rc = work_make_plans(o, &places);
    row_places_free(&places);
    return rc;
}

/* The gradients as the worker takes them: up to two. */
static int make_grads(asking *a, returned *r, batcher_grad *out, size_t *n)
{
    offer *o = a->o;
    const worker_plan *plan = offer_plan(o);
    const wire_return *m = &a->m.back;
    const row_ids *ids = NULL;
    const size_t row_width = row_plan_width(plan);
    batcher_grad *g = out;
    *n = 0;
    int rc = o->planned ? PERSIA_OK : plan_again(a->s, o);
    if (!rc)
        rc = work_check_pooled(o, m, r);
    if (!rc)
        rc = work_check_rows(o, m, r);
    if (!rc && m->rows_n)
        rc = find_rows(o, m, r, &ids);
    if (rc)
        return rc;
    const size_t pooled = o->m.samples * r->width;
    const size_t rows =
        ids ? (size_t)ids->offsets[plan->rows.tables_n] * row_width : 0;
    r->floats = calloc(pooled + rows + 1, sizeof *r->floats);
    if (!r->floats)
        return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    if (m->grads_n) {
        work_widen_pooled(plan, m, r, o->m.samples);
        *g = (batcher_grad){.plan = o->plan,
                            .batch = batch_of(o),
                            .index = r->all ? o->index : NULL,
                            .grad = r->floats,
                            .stride = r->width};
        if (!r->all) /* the index is of all features */
            rc = plan_of(o, r->pooled, &g->plan);
        g++;
    }
    if (ids) {
        widen_rows(plan, m, ids, row_width, r->floats + pooled);
        *g++ = (batcher_grad){.plan = ids->plan,
                              .batch = row_ids_batch(plan, ids),
                              .index = ids->index,
                              .grad = r->floats + pooled,
                              .stride = row_width};
    }
    *n = (size_t)(g - out);
    return rc;
}

static int work_put_sums(asking *a, const batcher_grad *g, size_t n)
{
    const worker_stream *t = a->o->stream;
    const wire_plan *plan = &t->job->plan->plan;
    int finite;
    int rc = persia_batcher_sums(t->w, g, n, &a->sums, &a->sums_n, &finite);
    a->summed.tables =
        persia_wire_memory_take(&a->memory,
                                a->sums_n * sizeof *a->summed.tables);
    if (rc || !a->summed.tables)
        return rc ? rc : PERSIA_ENOMEM;
    a->summed.finite = (uint32_t)finite;
    a->summed.tables_n = a->sums_n;
    for (size_t i = 0; i < a->sums_n; i++) {
        const client_sum *from = &a->sums[i];
        uint32_t no = 0;
        while (no < plan->tables_n && t->tables[no] != from->table)
            no++;
        a->summed.tables[i] = (wire_table_sum){
            no, from->dim, from->n, from->ids, from->grads};
    }
    return PERSIA_OK;
}

/* Gives the gradients of a request to `use`. */
static int with_grads(asking *a,
                      int (*use)(asking *a, const batcher_grad *g, size_t n))
{
    const wire_plan *plan = &offer_plan(a->o)->plan;
    batcher_grad grads[2];
    size_t n = 0;
    returned r = {.pooled = calloc(plan->features_n + 1, 1),
                  .rows = calloc(plan->tables_n + 1, 1)};
    int rc = r.pooled && r.rows
                 ? make_grads(a, &r, grads, &n)
                 : persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    if (!rc)
        rc = use(a, grads, n);
    free(r.floats);
    free(r.ids.ids);
    free(r.ids.offsets);
    free(r.pooled);
    free(r.rows);
    return rc;
}

/* Its update has ended with rc: it is done only if it is at all servers, or if
 * it can never be.  Else the rank sends these gradients again, or other ones
 * are made.  The lock is held. */
static void work_end_update(embedding_worker *s, offer *o, int rc,
                            const char *text)
{
    if (work_may_pass(rc)) {
        (void)offer_found(s, o);
    } else if (rc == PERSIA_ENONFINITE) {
        offer_fail(s, o, rc, text);
    } else if (rc) {
        /* Another rank's end is not the batch's fault. */
        offer_again(s, o, rc != PERSIA_ECLOSED);
    } else {
        s->stats.trained++;
        offer_end(s, o);
    }
}

void work_return(void *ctx)
{
    asking *a = ctx;
    embedding_worker *s = a->s;
    offer *o = a->o;
    err_kept error;
    work_trace(a, TRACE_APPLY);
    int rc = with_grads(a, work_push);
    persia_err_keep(&error, rc);
    persia_trace_end(&a->trace, rc);
    const int gone = work_is_replaced(s, o->stream, rc);
    if (gone ||
        client_is_loss(rc)) /* of earlier updates: see work_forward() */
        rc = PERSIA_OK;
    if (!rc && !gone) /* see compare(); without memory ranks must do */
        (void)persia_client_witness(s->look, o->m.stream, o->m.number);
    service_enter(s);
    if (gone) {
        s->stats.late++;
        offer_end(s, o);
    } else {
        work_end_update(s, o, rc, error.text);
    }
    a->o = NULL;
    offer_release(s, o);
    service_match(s);
    service_leave(s);
    a->status = gone ? RETURNED_GONE : RETURNED_DONE;
    asking_answer(a, rc ? persia_err_set(rc, "%s", error.text) : PERSIA_OK);
}

void work_sums(void *ctx)
{
    asking *a = ctx;
    embedding_worker *s = a->s;
    err_kept error;
    int rc = with_grads(a, work_put_sums);
    persia_err_keep(&error, rc);
    service_enter(s);
    (void)offer_found(s, a->o);
    offer_release(s, a->o);
    a->o = NULL;
    service_match(s);
    service_leave(s);
    asking_answer(a, rc ? persia_err_set(rc, "%s", error.text) : PERSIA_OK);
}
