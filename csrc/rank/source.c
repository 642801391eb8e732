/* source.c: a batch that a rank has taken: where forwards read, and where
 * gradients go. */
#include <stdlib.h>
#include <string.h>

#include "rank/private.h"

#define WAIT_NS ((uint64_t)100000000)

int rank_key_is_new(const wire_plan *p, size_t feature)
{
    for (size_t i = 0; i < feature; i++)
        if (p->features[i].rows &&
            !strcmp(p->features[i].name, p->features[feature].name))
            return 0;
    return 1;
}

const wire_values *rank_rows(const rank_taken *t, const char *table)
{
    for (size_t i = 0; i < t->m.rows_n; i++)
        if (!strcmp(t->plan->wire.tables[t->m.rows[i].no].name, table))
            return &t->m.rows[i];
    return NULL;
}

static int count_rows(const batcher_source *source, const char *table,
                      size_t *n)
{
    const wire_values *v = rank_rows((const rank_taken *)source, table);
    *n = v ? v->n : 0;
    return v != NULL;
}

static int source_gather_rows(batcher_source *source, const char *table,
                              const int64_t *places, size_t n, float *out,
                              size_t stride)
{
    const rank_taken *t = (rank_taken *)source;
    const wire_values *v = rank_rows(t, table);
    if (!v)
        return persia_err_set(PERSIA_EFEATURE,
                              "table %s: the embedding workers do not send "
                              "its rows to this model",
                              table);
    const size_t row = v->dim * wire_dtype_bytes(t->m.dtype);
    for (size_t i = 0; i < n; i++) {
        const size_t at = (size_t)places[i];
        if (places[i] < 0 || at >= v->n)
            return persia_err_set(PERSIA_EPROTOCOL,
                                  "table %s: there is no row %lld of %zu",
                                  table, (long long)places[i], v->n);
        persia_wire_widen(t->m.dtype, 1, v->dim,
                          (const char *)v->values + at * row,
                          v->scales ? v->scales + at : NULL, out + i * stride,
                          stride);
    }
    return PERSIA_OK;
}

/* The place of a feature in the plan, or features_n. */
static size_t source_place_of(const wire_plan *p, const taken_feature *f)
{
    size_t i = 0;
    while (i < p->features_n &&
           (p->features[i].rows || strcmp(p->features[i].name, f->name) ||
            strcmp(p->tables[p->features[i].table].name, f->table) ||
            p->features[i].pooling != f->pooling))
        i++;
    return i;
}

static int read_feature(batcher_source *source, const taken_feature *f,
                        float *out, size_t stride)
{
    const rank_taken *t = (rank_taken *)source;
    const size_t i = source_place_of(&t->plan->wire, f);
    if (i == t->plan->wire.features_n)
        return persia_err_set(PERSIA_EFEATURE,
                              "feature %s of table %s: the embedding workers "
                              "do not look it up for this model",
                              f->name, f->table);
    const wire_values *v = t->m.values;
    while (v->no != i) /* see rank_check_reply() */
        v++;
    persia_wire_widen(t->m.dtype, v->n, v->dim, v->values, v->scales, out,
                      stride);
    return PERSIA_OK;
}

/* The hyper-parameters by table of the plan; NULL: no memory. */
static optim_hyper *hypers_of(const wire_plan *p, const taken_update *u)
{
    optim_hyper *out = calloc(p->tables_n + 1, sizeof *out);
    for (size_t i = 0; out && i < p->tables_n; i++)
        for (uint32_t k = 0; k < u->optim_n; k++)
            if (!strcmp(persia_client_table(u->c, k)->name,
                        p->tables[i].name))
                out[i] = u->optim[k].hyper;
    return out;
}

/* Narrows gradients into memory from *at on. */
static void source_put_grads(wire_values *v, uint32_t dtype,
                             const float *grads, char **at)
{
    void *values = mem_carve(at, v->n * v->dim * wire_dtype_bytes(dtype));
    float *scales = dtype == WIRE_FP16 ? mem_carve(at, v->n * sizeof *scales)
                                       : NULL;
    persia_wire_narrow(dtype, v->n, v->dim, grads, v->dim, values, scales);
    v->values = values;
    v->scales = scales;
}

static size_t source_bytes_of_grads(size_t n, uint32_t dim, uint32_t dtype)
{
    return n * (dim * wire_dtype_bytes(dtype) + sizeof(float)) +
           (size_t)64 * 2;
}

/* The place of a table in the plan. */
static uint32_t source_place_of_table(const wire_plan *p, const char *name)
{
    uint32_t i = 0;
    while (strcmp(p->tables[i].name, name))
        i++;
    return i;
}

/* The gradients as they leave; *memory: theirs, to be freed. */
static int source_make_grads(const rank_taken *t, const taken_update *u,
                             wire_return *m, void **memory)
{
    const wire_plan *p = &t->plan->wire;
    const size_t n = t->m.samples;
    size_t bytes = (u->n + u->rows_n) * sizeof *m->grads + (size_t)64 * 3;
    for (size_t i = 0; i < u->n; i++)
        bytes += source_bytes_of_grads(n, u->grads[i].feature.dim, m->dtype);
    for (size_t i = 0; i < u->rows_n; i++)
        bytes += source_bytes_of_grads(u->rows[i].n, u->rows[i].dim, m->dtype);
    char *at = *memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!at)
        return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    m->grads = mem_carve(&at, u->n * sizeof *m->grads);
    m->grads_n = u->n;
    m->rows = mem_carve(&at, u->rows_n * sizeof *m->rows);
    m->rows_n = u->rows_n;
    for (size_t i = 0; i < u->n; i++) {
        const taken_feature *f = &u->grads[i].feature;
        wire_values *v = &m->grads[i];
        *v = (wire_values){
            .no = (uint32_t)source_place_of(p, f), .dim = f->dim, .n = n};
        if (v->no == p->features_n)
            return persia_err_set(PERSIA_EFEATURE, "feature %s is not looked "
                                  "up by the embedding workers", f->name);
        source_put_grads(v, m->dtype, u->grads[i].grad, &at);
    }
    for (size_t i = 0; i < u->rows_n; i++) {
        const taken_rows *from = &u->rows[i];
        wire_values *v = &m->rows[i];
        *v = (wire_values){.no = source_place_of_table(p, from->table),
                           .dim = from->dim,
                           .n = from->n,
                           .rows = from->places};
        source_put_grads(v, m->dtype, from->grads, &at);
    }
    return PERSIA_OK;
}

/* Once, to this worker. */
static int return_to(rank_taken *t, worker_link *l, wire_return *m,
                     wire_return_reply *reply)
{
    rank_taker *r = t->r;
    link_answer answer;
    wire_out o;
    int rc = l == t->from && t->boot == atomic_load(&l->boot)
                 ? PERSIA_OK
                 : rank_prepare(r, l);
    if (rc)
        return rc;
    persia_wire_out_init(&o);
    rc = persia_wire_put_return(&o, m);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    rc = link_call(&r->c, l, WORKER_RETURN, &o, 0, r->c.timeout_ns, &answer);
    rank_unprepare(r, l, rc);
    if (!rc)
        rc = persia_wire_get_return_reply(answer.bytes.data, answer.bytes.n,
                                          &answer.memory, reply);
    link_answer_free(&answer);
    return rc;
}

/* The next worker that is there, or this one. */
static worker_link *next_link(rank_taker *r, worker_link *l)
{
    for (size_t i = 1; i < r->c.links_n; i++) {
        worker_link *other =
            &r->c.links[((size_t)(l - r->c.links) + i) % r->c.links_n];
        if (!link_is_away(other))
            return other;
    }
    return l;
}

int rank_retry(const rank_taken *t, worker_link *l, int rc, uint64_t until)
{
    err_kept error;
    const worker_client *c = &t->r->c;
    if (rc != PERSIA_EINCOMPLETE)
        return link_retry(c, l, rc, until);
    persia_err_keep(&error, PERSIA_EUNAVAILABLE);
    rc = persia_client_look(t->c);
    if (!rc) /* the worker has waited, too */
        rc = link_retry(c, l, persia_err_again(&error),
                        persia_deadline_later(until, c->timeout_ns));
    return rc;
}

/* To the worker of its lease; where that is away, or has lost it, to whichever
 * gets the batch from its loader. */
static int send_return(rank_taken *t, wire_return *m,
                       wire_return_reply *reply)
{
    rank_taker *r = t->r;
    const uint64_t until = persia_deadline(r->c.timeout_ns);
    worker_link *l = t->from;
    for (;;) {
        int rc = return_to(t, l, m, reply);
        if (!rc && reply->status != RETURNED_WAIT)
            return PERSIA_OK;
        if (!rc && persia_clock_ns() >= until) {
            atomic_fetch_add(&r->given_up_n, 1);
            reply->status = RETURNED_GONE;
            return PERSIA_OK;
        }
        if (!rc)
            rc = persia_pause_poll(WAIT_NS);
        else if (link_failed(&r->c, l, rc) && next_link(r, l) != l)
            rc = PERSIA_OK;
        else
            rc = rank_retry(t, l, rc, until);
        if (rc)
            return rc;
        if (link_is_away(l) || reply->status == RETURNED_WAIT)
            l = next_link(r, l);
    }
}

/* What gradients of a batch sum up to, from the worker of its lease. */
static int source_ask_for_sums(rank_taken *t, const wire_return *m,
                               link_answer *answer)
{
    rank_taker *r = t->r;
    const uint64_t until = persia_deadline(r->c.timeout_ns);
    int rc;
    do {
        wire_out o;
        persia_wire_out_init(&o);
        rc = persia_wire_put_return(&o, m);
        if (rc) {
            persia_wire_out_free(&o);
            return rc;
        }
        rc = link_call(&r->c, t->from, WORKER_SUMS, &o, 1, r->c.timeout_ns,
                       answer);
        if (rc)
            link_answer_free(answer);
    } while (rc && !(rc = rank_retry(t, t->from, rc, until)));
    return rc;
}

wire_return rank_return(const rank_taken *t, uint32_t reason)
{
    return (wire_return){.caller = {.client = t->r->c.client,
                                    .boot = t->boot,
                                    .lineage = t->lineage},
                         .stream = t->m.stream,
                         .number = t->m.number,
                         .rank = t->r->c.rank,
                         .lease = t->m.lease,
                         .parts = 1,
                         .reason = reason,
                         .dtype = t->r->dtype};
}

/* The batch is at all servers now.  If one of them was started again, it may
 * lack others.  A server that cannot be reached is asked later. */
static int source_note_trained(const rank_taken *t, const taken_update *u,
                               uint64_t servers)
{
    int rc = persia_client_witness(u->c, t->m.stream, t->m.number);
    const uint64_t known =
        servers ? atomic_exchange(&t->r->servers, servers) : 0;
    if (!rc && known && known != servers)
        rc = persia_client_look_once(u->c);
    return rc == PERSIA_ENOMEM || client_is_loss(rc) ? rc : PERSIA_OK;
}

static int source_push(batcher_source *source, const taken_update *u,
                       batcher_counts *counts, int *passed)
{
    rank_taken *t = (rank_taken *)source;
    wire_return m = rank_return(t, RETURN_TRAINED);
    wire_return_reply reply = {0};
    void *memory = NULL;
    optim_hyper *hypers = hypers_of(&t->plan->wire, u);
    m.t = u->name->t;
    m.step = u->name->step;
    m.part = u->name->part;
    m.parts = u->name->parts;
    m.group = u->name->group;
    m.maker = persia_client_maker(u->c);
    m.hypers = hypers;
    m.hypers_n = t->plan->wire.tables_n;
    int rc = hypers ? source_make_grads(t, u, &m, &memory)
                    : persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    persia_trace_part(TRACE_TRAIN, m.stream, m.number, t->used, 0, rc);
    const uint64_t began = persia_trace_now();
    if (!rc) {
        pass_held_event(t, HELD_RETURN);
        rc = send_return(t, &m, &reply);
        pass_held_event(t, HELD_DROP);
    }
    persia_trace_part(TRACE_RETURN, m.stream, m.number, began, 0, rc);
    free(memory);
    free(hypers);
    const int late = !rc && reply.status == RETURNED_GONE;
    /* What servers had before may be of another rank, without the others of
     * this update. */
    *passed = late || (!rc && m.group && reply.status == RETURNED_BEFORE);
    if (late)
        atomic_fetch_add(&t->r->late_n, 1);
    else if (!rc)
        rc = source_note_trained(t, u, reply.servers);
    *counts = (batcher_counts){0};
    UPDATE_COUNTS_ADD(counts, &reply);
    return rc;
}

/* The sums of one table, as the store knows it. */
static int copy_sum(const wire_plan *p, const taken_update *u,
                    const wire_table_sum *from, client_sum *to)
{
    if (from->no >= p->tables_n || from->dim != p->tables[from->no].dim ||
        (from->n && !from->grads))
        return persia_err_set(PERSIA_EPROTOCOL, "sums of no table");
    uint32_t table = 0;
    while (strcmp(persia_client_table(u->c, table)->name,
                  p->tables[from->no].name))
        table++;
    const size_t ids = from->n * sizeof *to->ids;
    const size_t grads = from->n * from->dim * sizeof *to->grads;
    *to = (client_sum){.table = table,
                       .dim = from->dim,
                       .n = from->n,
                       .ids = malloc(ids + 1),
                       .grads = malloc(grads + 1)};
    if (!to->ids || !to->grads)
        return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    if (from->n) {
        memcpy(to->ids, from->ids, ids);
        memcpy(to->grads, from->grads, grads);
    }
    return PERSIA_OK;
}

static int ask_sums(batcher_source *source, const taken_update *u,
                    client_sum **out, size_t *n, int *finite)
{
    rank_taken *t = (rank_taken *)source;
    wire_return m = rank_return(t, RETURN_TRAINED);
    wire_sums_reply reply;
    link_answer answer;
    void *memory = NULL;
    m.parts = 1;
    int rc = source_make_grads(t, u, &m, &memory);
    if (!rc)
        rc = source_ask_for_sums(t, &m, &answer);
    free(memory);
    if (rc)
        return rc;
    rc = persia_wire_get_sums_reply(answer.bytes.data, answer.bytes.n,
                                    &answer.memory, &reply);
    client_sum *more =
        rc ? NULL : realloc(*out, (*n + reply.tables_n + 1) * sizeof *more);
    if (more) {
        *out = more;
        *finite &= reply.gone || reply.finite;
    } else if (!rc) {
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
    }
    for (size_t i = 0; !rc && i < reply.tables_n; i++)
        rc = copy_sum(&t->plan->wire, u, &reply.tables[i], &(*out)[(*n)++]);
    link_answer_free(&answer);
    return rc;
}

const batcher_source rank_source = {.rows = count_rows,
                                    .read = read_feature,
                                    .gather = source_gather_rows,
                                    .push = source_push,
                                    .sums = ask_sums};
