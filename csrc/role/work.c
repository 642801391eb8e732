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
    return PERSIA_OK;
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
        if (!rc)
            s->plan.features_n = m->features_n;
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

/* ---- what servers have ---- */

/* Whether servers may be there again: the batch is not the cause. */
static int may_pass(int rc)
{
    return rc == PERSIA_EUNAVAILABLE || rc == PERSIA_ETIMEOUT ||
           rc == PERSIA_ENOMEM;
}

/* The ledger of a stream at one server. */
static int ask_server(role_service *s, uint32_t shard, uint64_t stream,
                      wire_ledger *out)
{
    wire_hello m = {.caller = {.client = s->boot},
                    .version = WIRE_VERSION,
                    .version_min = WIRE_VERSION_MIN,
                    .world = 1,
                    .stream = stream};
    shard_reply reply;
    memcpy(m.name_space, s->config.servers.name_space, sizeof m.name_space);
    int rc = persia_client_call(s->look, shard, WIRE_HELLO, &m, &reply);
    if (rc)
        return rc;
    *out = ((const wire_hello_reply *)reply.message)->ledger;
    persia_shard_release(&reply);
    return PERSIA_OK;
}

static int is_in_ledger(const wire_ledger *l, uint64_t number)
{
    const uint64_t bit = number - l->watermark - 1;
    return number <= l->watermark ||
           (bit < 64 * WIRE_WINDOW_MAX && l->window[bit / 64] >> bit % 64 & 1);
}

/* What all servers have of a stream. */
static int ask_servers(role_service *s, uint64_t stream, wire_ledger *out)
{
    int rc = ask_server(s, 0, stream, out);
    for (uint32_t i = 1; i < persia_client_shards(s->look) && !rc; i++) {
        wire_ledger own, both = {.stream = stream};
        rc = ask_server(s, i, stream, &own);
        if (rc)
            break;
        both.watermark = own.watermark < out->watermark ? own.watermark
                                                        : out->watermark;
        for (uint64_t bit = 0; bit < 64 * WIRE_WINDOW_MAX; bit++) {
            const uint64_t number = both.watermark + 1 + bit;
            if (is_in_ledger(&own, number) && is_in_ledger(out, number))
                both.window[bit / 64] |= (uint64_t)1 << bit % 64;
        }
        *out = both;
    }
    return rc;
}

void work_hello(void *ctx)
{
    asking *a = ctx;
    a->ledger = persia_wire_memory_take(&a->memory, sizeof *a->ledger);
    asking_answer(a, a->ledger ? ask_servers(a->s, a->m.hello.stream,
                                             a->ledger)
                               : PERSIA_ENOMEM);
}

void work_unknown(void *ctx)
{
    asking *a = ctx;
    const wire_return *m = &a->m.back;
    wire_ledger ledger;
    int rc = ask_servers(a->s, m->stream, &ledger);
    a->status = !rc && is_in_ledger(&ledger, m->number) ? RETURNED_BEFORE
                                                      : RETURNED_WAIT;
    asking_answer(a, rc);
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

/* A plan of some of the features (NULL: of all) for the batch's keys; their
 * columns follow one another. */
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
        if (wanted && !wanted[i])
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

/* Columns of all features before one. */
static size_t column_of(const wire_plan *plan, size_t feature)
{
    size_t column = 0;
    for (size_t i = 0; i < feature; i++)
        column += plan->tables[plan->features[i].table].dim;
    return column;
}

/* Between [samples, width] of a batch and its packed features. */
typedef struct packing {
    const wire_plan *plan;
    float *rows;
    size_t samples, width;
    uint32_t dtype;
    char *packed; /* see put_take() */
} packing;

/* Bytes of a feature, packed. */
static size_t packed_bytes(const packing *p, size_t feature)
{
    const uint32_t dim = p->plan->tables[p->plan->features[feature].table].dim;
    size_t bytes = (p->samples * dim * wire_dtype_bytes(p->dtype) + 63) &
                   ~(size_t)63;
    if (p->dtype == WIRE_FP16)
        bytes += (p->samples * sizeof(float) + 63) & ~(size_t)63;
    return bytes;
}

static int pack(void *ctx, size_t i)
{
    const packing *p = ctx;
    const uint32_t dim = p->plan->tables[p->plan->features[i].table].dim;
    char *at = p->packed;
    for (size_t k = 0; k < i; k++)
        at += packed_bytes(p, k);
    void *values =
        mem_carve(&at, p->samples * dim * wire_dtype_bytes(p->dtype));
    float *scales = p->dtype == WIRE_FP16
                        ? mem_carve(&at, p->samples * sizeof(float))
                        : NULL;
    persia_wire_narrow(p->dtype, p->samples, dim,
                       p->rows + column_of(p->plan, i), p->width, values,
                       scales);
    return PERSIA_OK;
}

/* The answer's values, one feature after the other. */
static int pack_all(asking *a, float *rows, size_t width)
{
    const offer *o = a->o;
    packing p = {.plan = &a->s->plan, .rows = rows, .samples = o->m.samples,
                 .width = width, .dtype = a->m.take.dtype};
    size_t bytes = 64;
    for (size_t i = 0; i < p.plan->features_n; i++)
        bytes += packed_bytes(&p, i);
    a->floats = aligned_alloc(64, bytes);
    if (!a->floats)
        return persia_err_set(PERSIA_ENOMEM, "no memory for embeddings");
    p.packed = (char *)a->floats;
    return persia_sched_for_rows(persia_client_sched(o->stream->c),
                                 p.plan->features_n,
                                 o->m.samples * p.plan->features_n, pack, &p);
}

/* The next Return tells of updates that servers lost, with this thread's
 * text. */
static void keep_loss(role_service *s, role_stream *t, int rc)
{
    service_enter(s);
    t->lost = rc;
    snprintf(t->lost_text, sizeof t->lost_text, "%s", persia_err_text());
    service_leave(s);
}

/* Whether no rank needs it: a loader sends again what it does not know to be
 * trained. */
static int servers_have(role_service *s, const offer *o, int *have)
{
    wire_ledger ledger;
    *have = persia_client_has(o->stream->c, o->m.number);
    int rc = PERSIA_OK;
    if (!*have && o->m.attempt > 1 &&
        !(rc = ask_servers(s, o->m.stream, &ledger)))
        *have = is_in_ledger(&ledger, o->m.number);
    return rc;
}

static int look_up(asking *a)
{
    const role_service *s = a->s;
    offer *o = a->o;
    int have = 0;
    const size_t width = column_of(&s->plan, s->plan.features_n);
    const id_batch b = batch_of(o);
    float *rows = NULL;
    int rc = offer_check(o, &s->plan);
    if (!rc)
        rc = stream_open(a->s, o->stream);
    if (!rc)
        rc = servers_have(a->s, o, &have);
    a->status = have ? TAKE_EMPTY : TAKE_BATCH;
    if (have)
        return rc;
    if (!rc)
        rc = plan_of(s, o, NULL, &o->plan);
    o->planned = !rc;
    if (!rc && !(rows = malloc(b.bags * width * sizeof *rows)))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for embeddings");
    batch_index *before = o->index;
    o->index = NULL;
    if (!rc) {
        persia_batch_index_put(before); /* it is looked up anew */
        rc = persia_worker_forward(o->stream->w, o->plan, &b, 0, rows, width,
                                   NULL, &o->index);
    }
    if (client_is_loss(rc)) {
        keep_loss(a->s, o->stream, rc);
        rc = persia_worker_forward(o->stream->w, o->plan, &b, 0, rows, width,
                                   NULL, &o->index);
    }
    if (!rc)
        rc = pack_all(a, rows, width);
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
    service_enter(s);
    if (!rc && a->status == TAKE_BATCH) {
        offer_event(o, OFFER_FOUND);
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

static int check_return(const role_service *s, const offer *o,
                        const wire_return *m, uint8_t *wanted, size_t *width,
                        int *all)
{
    const wire_plan *plan = &s->plan;
    *width = 0;
    if (m->hypers_n != plan->tables_n)
        return persia_err_set(PERSIA_EARG,
                              "hyper-parameters of %zu tables, but there are "
                              "%zu",
                              m->hypers_n, plan->tables_n);
    for (size_t i = 0; i < m->grads_n; i++) {
        const wire_values *g = &m->grads[i];
        const wire_plan_feature *f =
            g->no < plan->features_n ? &plan->features[g->no] : NULL;
        if (!f || wanted[g->no] || g->n != o->m.samples ||
            g->dim != plan->tables[f->table].dim)
            return persia_err_set(PERSIA_ESHAPE,
                                  "the gradient of feature %s is not that of "
                                  "its embeddings",
                                  f ? f->name : "?");
        wanted[g->no] = 1;
    }
    *all = 1;
    for (size_t i = 0; i < plan->features_n; i++) {
        const wire_plan_feature *f = &plan->features[i];
        *all &= wanted[i] || !f->trainable;
        *width += wanted[i] ? plan->tables[f->table].dim : 0;
    }
    if (*all)
        *width = column_of(plan, plan->features_n);
    return PERSIA_OK;
}

/* The gradients as the output of the plan has them. */
static void widen_all(const role_service *s, const wire_return *m, size_t rows,
                      const uint8_t *wanted, int all, size_t width, float *to)
{
    const wire_plan *plan = &s->plan;
    for (size_t i = 0; i < m->grads_n; i++) {
        const wire_values *g = &m->grads[i];
        size_t column = 0;
        for (uint32_t k = 0; k < g->no; k++)
            if (all || wanted[k])
                column += plan->tables[plan->features[k].table].dim;
        persia_wire_widen(m->dtype, rows, g->dim, g->values, g->scales,
                          to + column, width);
    }
}

static int push(asking *a, const worker_grad *g, size_t n)
{
    const role_service *s = a->s;
    const offer *o = a->o;
    const wire_return *m = &a->m.back;
    const uint32_t tables = persia_client_tables(o->stream->c);
    optim_args *optim = calloc(tables + (size_t)1, sizeof *optim);
    if (!optim)
        return persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    for (size_t i = 0; i < s->plan.tables_n; i++)
        optim[o->stream->tables[i]].hyper = m->hypers[i];
    const client_update update = {.number = o->m.number,
                                  .parts = 1,
                                  .through = o->m.settled,
                                  .t = m->t};
    int rc = persia_worker_backward(o->stream->w, g, n, &update, optim, tables,
                                    &a->counts);
    free(optim);
    return rc;
}

/* For a batch that was looked up elsewhere. */
static int make_plan(role_service *s, offer *o)
{
    int rc = offer_check(o, &s->plan);
    if (!rc)
        rc = stream_open(s, o->stream);
    if (!rc)
        rc = plan_of(s, o, NULL, &o->plan);
    o->planned = !rc;
    return rc;
}

static int apply(asking *a)
{
    const role_service *s = a->s;
    offer *o = a->o;
    const wire_return *m = &a->m.back;
    size_t width;
    int all = 0;
    uint8_t *wanted = calloc(s->plan.features_n, 1);
    int rc = wanted ? check_return(s, o, m, wanted, &width, &all)
                    : persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    if (!rc && !o->planned)
        rc = make_plan(a->s, o);
    if (rc)
        goto done;
    worker_grad g = {.plan = o->plan, .batch = batch_of(o), .index = o->index,
                     .stride = width};
    if (!all) { /* the index is of all features */
        g.index = NULL;
        rc = m->grads_n ? plan_of(s, o, wanted, &g.plan) : PERSIA_OK;
    }
    a->floats = calloc(o->m.samples * width + 1, sizeof(float));
    if (!rc && !a->floats)
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    if (rc)
        goto done;
    g.grad = a->floats;
    widen_all(s, m, o->m.samples, wanted, all, width, a->floats);
    rc = push(a, &g, m->grads_n != 0);
done:
    free(wanted);
    return rc;
}

void work_return(void *ctx)
{
    asking *a = ctx;
    role_service *s = a->s;
    offer *o = a->o;
    char text[512];
    int rc = apply(a);
    snprintf(text, sizeof text, "%s", rc ? persia_err_text() : "");
    service_enter(s);
    if (may_pass(rc)) {
        offer_event(o, OFFER_FOUND);
    } else {
        if (!rc && o->stream->lost) {
            rc = o->stream->lost;
            snprintf(text, sizeof text, "%s", o->stream->lost_text);
            o->stream->lost = 0;
        }
        s->stats.trained += !rc || client_is_loss(rc);
        s->stats.failed += rc && !client_is_loss(rc);
        offer_end(s, o);
    }
    a->o = NULL;
    offer_release(s, o);
    service_match(s);
    service_leave(s);
    a->status = RETURNED_DONE;
    asking_answer(a, rc ? persia_err_set(rc, "%s", text) : PERSIA_OK);
}
