/* work.c: what jobs do: tables at the servers, lookups, updates. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool/pool.h"
#include "role/private.h"

_Static_assert(POOL_SUM == (int)ROLE_POOL_SUM &&
                   POOL_MEAN == (int)ROLE_POOL_MEAN &&
                   POOL_SQRTN == (int)ROLE_POOL_SQRTN,
               "the message has the numbers of the room");

/* ---- Declare ---- */

static int same_plan(const wire_plan *a, const wire_plan *b)
{
    if (a->features_n != b->features_n || a->tables_n != b->tables_n ||
        memcmp(a->features, b->features,
               a->features_n * sizeof *a->features))
        return persia_err_set(PERSIA_EMISMATCH,
                              "the ranks of this worker look up other "
                              "features; models of other features need "
                              "workers of their own");
    for (size_t i = 0; i < a->tables_n; i++)
        if (memcmp(&a->tables[i], &b->tables[i], sizeof *a->tables))
            return persia_err_set(PERSIA_EMISMATCH,
                                  "table %s: another rank of this worker has "
                                  "declared it otherwise",
                                  b->tables[i].name);
    return PERSIA_OK;
}

static int declare_tables(ps_client *c, const wire_plan *plan,
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

static int copy_plan(role_service *s, const wire_plan *m)
{
    wire_plan *p = &s->plan;
    const size_t tables = m->tables_n * sizeof *m->tables;
    const size_t features = m->features_n * sizeof *m->features;
    p->tables = persia_wire_memory_take(&s->plan_memory, tables);
    p->features = persia_wire_memory_take(&s->plan_memory, features);
    if (!p->tables || !p->features)
        return PERSIA_ENOMEM;
    memcpy(p->tables, m->tables, tables);
    memcpy(p->features, m->features, features);
    p->tables_n = m->tables_n;
    p->features_n = m->features_n;
    return row_plan_make(p, &s->plan_memory, &s->rows);
}

void work_declare(void *ctx)
{
    asking *a = ctx;
    role_service *s = a->s;
    const wire_plan *m = &a->m.plan;
    pthread_mutex_lock(&s->declaring);
    int rc = PERSIA_OK, created = !atomic_load(&s->declared);
    if (created) {
        rc = declare_tables(s->look, m, NULL);
        service_enter(s);
        if (!rc)
            rc = copy_plan(s, m);
        atomic_store(&s->declared, !rc);
        service_match(s);
        service_leave(s);
    } else {
        rc = same_plan(&s->plan, m);
    }
    pthread_mutex_unlock(&s->declaring);
    a->status = (uint32_t)created;
    asking_answer(a, rc);
}

/* Whether servers may be there again: the batch is not the cause. */
static int may_pass(int rc)
{
    return rc == PERSIA_EUNAVAILABLE || rc == PERSIA_ETIMEOUT ||
           rc == PERSIA_ENOMEM;
}

/* ---- lookups ---- */

static int stream_open(role_service *s, role_stream *t)
{
    int rc = PERSIA_OK;
    pthread_mutex_lock(&t->opening);
    client_config config = s->config.servers;
    config.stream = t->name;
    config.shared = 1;
    if (!t->open && !t->c)
        rc = persia_client_create(&config, &t->c);
    if (!rc && !t->w)
        rc = persia_worker_create(t->c, &t->w);
    if (!rc && !t->tables) {
        t->tables = calloc(s->plan.tables_n + 1, sizeof *t->tables);
        if (!t->tables)
            rc = persia_err_set(PERSIA_ENOMEM, "no memory for tables");
    }
    if (!rc && !t->open)
        rc = declare_tables(t->c, &s->plan, t->tables);
    t->open |= !rc;
    pthread_mutex_unlock(&t->opening);
    return rc;
}

/* A plan of some of the features that are pooled here (NULL: of all) for the
 * batch's keys; their columns follow one another. */
static int plan_of(const role_service *s, const offer *o,
                   const uint8_t *wanted, uint32_t *out)
{
    const wire_plan *plan = &s->plan;
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
    int rc = persia_worker_plan(o->stream->w, PLAN_BAGS,
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
static size_t column_of(const wire_plan *plan, size_t feature)
{
    size_t column = 0;
    for (size_t i = 0; i < feature; i++)
        if (!plan->features[i].rows)
            column += plan->tables[plan->features[i].table].dim;
    return column;
}

/* Between fp32 here and what a Take is answered with. */
typedef struct packing {
    const role_service *s;
    const float *pooled, *rows;  /* [samples, width]; [n, row_width] */
    size_t width, row_width;
    const row_ids *ids;
    const wire_take_reply *m;
} packing;

static int pack(void *ctx, size_t i)
{
    const packing *p = ctx;
    const wire_take_reply *m = p->m;
    const int pooled = i < m->values_n;
    const size_t at = pooled ? i : i - m->values_n;
    const wire_values *v = pooled ? &m->values[at] : &m->rows[at];
    const float *from =
        pooled ? p->pooled + column_of(&p->s->plan, v->no)
               : p->rows + (size_t)p->ids->offsets[at] * p->row_width;
    persia_wire_narrow(m->dtype, v->n, v->dim, from,
                       pooled ? p->width : p->row_width,
                       (void *)(uintptr_t)v->values,
                       (float *)(uintptr_t)v->scales);
    return PERSIA_OK;
}

static int list_values(asking *a)
{
    const role_service *s = a->s;
    const offer *o = a->o;
    const wire_plan *plan = &s->plan;
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
    for (uint32_t t = 0; t < s->rows.tables_n; t++)
        m->rows[m->rows_n++] = (wire_values){
            .no = s->rows.table[t],
            .dim = plan->tables[s->rows.table[t]].dim,
            .n = (size_t)(o->rows.offsets[t + 1] - o->rows.offsets[t])};
    return PERSIA_OK;
}

static void give_memory(wire_values *v, uint32_t dtype, char **at)
{
    v->values = mem_carve(at, v->n * v->dim * wire_dtype_bytes(dtype));
    if (dtype == WIRE_FP16)
        v->scales = mem_carve(at, v->n * sizeof(float));
}

/* The answer's values, one feature after the other, then the rows. */
static int pack_all(asking *a, const float *pooled, const float *rows)
{
    const role_service *s = a->s;
    const offer *o = a->o;
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
    int rc = list_values(a);
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
        give_memory(&m->values[i], m->dtype, &at);
    for (size_t i = 0; i < m->rows_n; i++)
        give_memory(&m->rows[i], m->dtype, &at);
    packing p = {s, pooled, rows, column_of(&s->plan, s->plan.features_n),
                 row_plan_width(s), &o->rows, m};
    return persia_sched_for_rows(persia_client_sched(o->stream->c),
                                 m->values_n + m->rows_n, n, pack, &p);
}

/* The next Return reports updates that servers lost, with this thread's
 * text. */
static void keep_loss(role_service *s, role_stream *t, int rc,
                      const char *text)
{
    service_enter(s);
    t->lost = rc;
    snprintf(t->lost_text, sizeof t->lost_text, "%s", text);
    service_leave(s);
}

/* A call of the stream ended with rc: whether servers have other rows than it
 * knew, so that it has ended.  An update that they dropped may end without an
 * error, for only one call gets that. */
static int is_replaced(role_service *s, const role_stream *t, int rc)
{
    if (rc && rc != PERSIA_EREPLACED && rc != PERSIA_EINCOMPLETE &&
        rc != PERSIA_EMISMATCH)
        return 0;
    service_enter(s);
    const int same = !rc && persia_client_restore(t->c) == s->lineage;
    service_leave(s);
    if (same)
        return 0;
    (void)lineage_settle(s);
    service_enter(s);
    const int old = t->old;
    service_leave(s);
    return old;
}

/* persia_worker_forward(), once more where servers lost updates. */
static int forward(asking *a, uint32_t plan, const id_batch *b, float *out,
                   size_t width, batch_index **index)
{
    const offer *o = a->o;
    int rc = persia_worker_forward(o->stream->w, plan, b, 0, out, width, NULL,
                                   index);
    if (client_is_loss(rc)) {
        char text[512];
        snprintf(text, sizeof text, "%s", persia_err_text());
        if (!is_replaced(a->s, o->stream, rc))
            keep_loss(a->s, o->stream, rc, text);
        rc = persia_worker_forward(o->stream->w, plan, b, 0, out, width, NULL,
                                   index);
    }
    return rc;
}

static int make_plans(const role_service *s, offer *o, row_places *places)
{
    int rc = PERSIA_OK;
    if (column_of(&s->plan, s->plan.features_n))
        rc = plan_of(s, o, NULL, &o->plan);
    row_ids_free(&o->rows);
    if (!rc && s->rows.tables_n)
        rc = row_ids_find(s, o, &o->rows, places);
    if (!rc && s->rows.tables_n)
        rc = row_ids_plan(s, o, &o->rows.plan);
    o->planned = !rc;
    return rc;
}

/* What is pooled here; *out is the caller's. */
static int look_up_pooled(asking *a, float **out)
{
    const role_service *s = a->s;
    const offer *o = a->o;
    const size_t width = column_of(&s->plan, s->plan.features_n);
    const id_batch b = batch_of(o);
    *out = NULL;
    if (!width)
        return PERSIA_OK;
    if (!(*out = malloc(b.bags * width * sizeof **out)))
        return persia_err_set(PERSIA_ENOMEM, "no memory for embeddings");
    return forward(a, o->plan, &b, *out, width, &a->o->index);
}

/* The distinct rows of the other tables. */
static int look_up_rows(asking *a, float **out)
{
    const role_service *s = a->s;
    offer *o = a->o;
    const size_t width = row_plan_width(s);
    *out = NULL;
    if (!width)
        return PERSIA_OK;
    const id_batch b = row_ids_batch(s, &o->rows);
    *out = malloc((b.n * width + 1) * sizeof **out);
    if (!*out)
        return persia_err_set(PERSIA_ENOMEM, "no memory for embeddings");
    return b.n ? forward(a, o->rows.plan, &b, *out, width, &o->rows.index)
               : PERSIA_OK;
}

static int look_up(asking *a)
{
    const role_service *s = a->s;
    offer *o = a->o;
    float *pooled = NULL, *rows = NULL;
    int have = 0;
    int rc = offer_check(o, &s->plan);
    if (!rc)
        rc = stream_open(a->s, o->stream);
    if (!rc)
        rc = ledger_has_offer(a->s, o, &have);
    a->status = have ? TAKE_EMPTY : TAKE_BATCH;
    if (rc || have)
        return rc;
    persia_batch_index_put(o->index); /* it is looked up again */
    o->index = NULL;
    rc = make_plans(s, o, &a->places);
    if (!rc)
        rc = look_up_pooled(a, &pooled);
    if (!rc)
        rc = look_up_rows(a, &rows);
    if (!rc)
        rc = pack_all(a, pooled, rows);
    free(pooled);
    free(rows);
    return rc;
}

void work_take(void *ctx)
{
    asking *a = ctx;
    role_service *s = a->s;
    offer *o = a->o;
    char text[512];
    int rc = look_up(a);
    snprintf(text, sizeof text, "%s", rc ? persia_err_text() : "");
    if (rc && is_replaced(s, o->stream, rc))
        rc = PERSIA_EUNAVAILABLE; /* its loader sends it again */
    service_enter(s);
    if (!rc && a->status == TAKE_BATCH) {
        a->status = offer_found(s, o) ? TAKE_BATCH : TAKE_EMPTY;
    } else if (may_pass(rc)) {
        offer_again(s, o, 0);
    } else {
        s->stats.failed += rc != PERSIA_OK;
        s->stats.had += rc == PERSIA_OK;
        offer_end(s, o);
    }
    if (rc || a->status == TAKE_EMPTY) {
        a->o = NULL;
        offer_release(s, o);
    }
    service_match(s);
    service_leave(s);
    asking_answer(a, rc ? persia_err_set(rc, "%s", text) : PERSIA_OK);
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

static int check_pooled(const role_service *s, const offer *o,
                        const wire_return *m, returned *r)
{
    const wire_plan *plan = &s->plan;
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
        r->width = column_of(plan, plan->features_n);
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

static int check_rows(const role_service *s, const offer *o,
                      const wire_return *m, returned *r)
{
    for (size_t i = 0; i < m->rows_n; i++) {
        const wire_values *g = &m->rows[i];
        const uint32_t t = rows_of(&s->rows, g->no);
        int good = t < s->rows.tables_n && o->rows.ids && !r->rows[t] &&
                   g->dim == s->plan.tables[g->no].dim;
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
static void widen_pooled(const role_service *s, const wire_return *m,
                         const returned *r, size_t rows)
{
    const wire_plan *plan = &s->plan;
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
static const wire_values *rows_in(const role_service *s, const wire_return *m,
                                  uint32_t t)
{
    size_t i = 0;
    while (i < m->rows_n && m->rows[i].no != s->rows.table[t])
        i++;
    return i < m->rows_n ? &m->rows[i] : NULL;
}

/* The ids of the rows that have gradients: a batch of its own, unless all
 * have. */
static int find_rows(const role_service *s, const offer *o,
                     const wire_return *m, returned *r, const row_ids **out)
{
    const uint32_t tables = s->rows.tables_n;
    size_t n = 0;
    int all = 1;
    for (uint32_t t = 0; t < tables; t++) {
        const wire_values *g = rows_in(s, m, t);
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
        const wire_values *g = rows_in(s, m, t);
        const uint64_t *from = o->rows.ids + o->rows.offsets[t];
        for (size_t k = 0; g && k < g->n; k++)
            r->ids.ids[n++] = from[g->rows ? g->rows[k] : k];
        r->ids.offsets[t + 1] = (int64_t)n;
    }
    return PERSIA_OK;
}

static void widen_rows(const role_service *s, const wire_return *m,
                       const row_ids *ids, size_t width, float *to)
{
    for (uint32_t t = 0; t < s->rows.tables_n; t++) {
        const wire_values *g = rows_in(s, m, t);
        if (g)
            persia_wire_widen(m->dtype, g->n, g->dim, g->values, g->scales,
                              to + (size_t)ids->offsets[t] * width, width);
    }
}

static int push(asking *a, const worker_grad *g, size_t n)
{
    const role_service *s = a->s;
    const offer *o = a->o;
    const wire_return *m = &a->m.back;
    const uint32_t tables = persia_client_tables(o->stream->c);
    if (m->hypers_n != s->plan.tables_n)
        return persia_err_set(PERSIA_EARG,
                              "hyper-parameters of %zu tables, but there are "
                              "%zu",
                              m->hypers_n, s->plan.tables_n);
    optim_args *optim = calloc(tables + (size_t)1, sizeof *optim);
    if (!optim)
        return persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    for (size_t i = 0; i < s->plan.tables_n; i++)
        optim[o->stream->tables[i]].hyper = m->hypers[i];
    const client_update update = {.number = o->m.number,
                                  .step = m->step,
                                  .part = m->part,
                                  .parts = m->parts,
                                  .group = m->group,
                                  .through = o->m.settled,
                                  .t = m->t};
    int rc = persia_worker_backward(o->stream->w, g, n, &update, optim, tables,
                                    &a->counts);
    free(optim);
    return rc;
}

/* For a batch that was looked up elsewhere: its rows have the same places
 * here. */
static int plan_again(role_service *s, offer *o)
{
    row_places places = {0};
    int rc = offer_check(o, &s->plan);
    if (!rc)
        rc = stream_open(s, o->stream);
    if (!rc)
        rc = make_plans(s, o, &places);
    row_places_free(&places);
    return rc;
}

/* The gradients as the worker takes them: up to two. */
static int make_grads(asking *a, returned *r, worker_grad *out, size_t *n)
{
    const role_service *s = a->s;
    offer *o = a->o;
    const wire_return *m = &a->m.back;
    const row_ids *ids = NULL;
    const size_t row_width = row_plan_width(s);
    worker_grad *g = out;
    *n = 0;
    int rc = o->planned ? PERSIA_OK : plan_again(a->s, o);
    if (!rc)
        rc = check_pooled(s, o, m, r);
    if (!rc)
        rc = check_rows(s, o, m, r);
    if (!rc && m->rows_n)
        rc = find_rows(s, o, m, r, &ids);
    if (rc)
        return rc;
    const size_t pooled = o->m.samples * r->width;
    const size_t rows =
        ids ? (size_t)ids->offsets[s->rows.tables_n] * row_width : 0;
    r->floats = calloc(pooled + rows + 1, sizeof *r->floats);
    if (!r->floats)
        return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    if (m->grads_n) {
        widen_pooled(s, m, r, o->m.samples);
        *g = (worker_grad){.plan = o->plan,
                           .batch = batch_of(o),
                           .index = r->all ? o->index : NULL,
                           .grad = r->floats,
                           .stride = r->width};
        if (!r->all) /* the index is of all features */
            rc = plan_of(s, o, r->pooled, &g->plan);
        g++;
    }
    if (ids) {
        widen_rows(s, m, ids, row_width, r->floats + pooled);
        *g++ = (worker_grad){.plan = ids->plan,
                             .batch = row_ids_batch(s, ids),
                             .index = ids->index,
                             .grad = r->floats + pooled,
                             .stride = row_width};
    }
    *n = (size_t)(g - out);
    return rc;
}

static int put_sums(asking *a, const worker_grad *g, size_t n)
{
    const role_service *s = a->s;
    const role_stream *t = a->o->stream;
    int finite;
    int rc = persia_worker_sums(t->w, g, n, &a->sums, &a->sums_n, &finite);
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
        while (no < s->plan.tables_n && t->tables[no] != from->table)
            no++;
        a->summed.tables[i] = (wire_table_sum){
            no, from->dim, from->n, from->ids, from->grads};
    }
    return PERSIA_OK;
}

/* Gives the gradients of a request to `use`. */
static int with_grads(asking *a,
                      int (*use)(asking *a, const worker_grad *g, size_t n))
{
    const role_service *s = a->s;
    worker_grad grads[2];
    size_t n = 0;
    returned r = {.pooled = calloc(s->plan.features_n + 1, 1),
                  .rows = calloc(s->plan.tables_n + 1, 1)};
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

void work_return(void *ctx)
{
    asking *a = ctx;
    role_service *s = a->s;
    offer *o = a->o;
    char text[512];
    int rc = with_grads(a, push);
    snprintf(text, sizeof text, "%s", rc ? persia_err_text() : "");
    const int gone = is_replaced(s, o->stream, rc);
    rc = gone ? PERSIA_OK : rc;
    service_enter(s);
    if (may_pass(rc)) {
        (void)offer_found(s, o);
    } else {
        if (!rc && o->stream->lost) {
            rc = o->stream->lost;
            snprintf(text, sizeof text, "%s", o->stream->lost_text);
            o->stream->lost = 0;
        }
        s->stats.trained += !gone && (!rc || client_is_loss(rc));
        s->stats.late += (uint64_t)gone;
        s->stats.failed += rc && !client_is_loss(rc);
        offer_end(s, o);
    }
    a->o = NULL;
    offer_release(s, o);
    service_match(s);
    service_leave(s);
    a->status = gone ? RETURNED_GONE : RETURNED_DONE;
    asking_answer(a, rc ? persia_err_set(rc, "%s", text) : PERSIA_OK);
}

void work_sums(void *ctx)
{
    asking *a = ctx;
    role_service *s = a->s;
    char text[512];
    int rc = with_grads(a, put_sums);
    snprintf(text, sizeof text, "%s", rc ? persia_err_text() : "");
    service_enter(s);
    (void)offer_found(s, a->o);
    offer_release(s, a->o);
    a->o = NULL;
    service_match(s);
    service_leave(s);
    asking_answer(a, rc ? persia_err_set(rc, "%s", text) : PERSIA_OK);
}
