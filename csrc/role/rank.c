/* rank.c: a rank takes batches from workers, and returns their gradients.
 *
 * Take k is of worker (k - 1 + rank) mod K, or of the next one that is there:
 * with one loader, which sends its batches to the workers in turn, one rank
 * gets them in their order.  passes.c: which pass that is.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "role/rank.h"

#define AGAIN_NS ((uint64_t)10000000)
#define WAIT_NS ((uint64_t)100000000)
#define RPC_NS ((uint64_t)30 * 1000000000)

/* ---- life ---- */

static void rank_free(role_rank *r)
{
    if (r->c.links)
        role_client_close(&r->c);
    while (r->streams) {
        rank_stream *k = r->streams;
        r->streams = k->next;
        free(k);
    }
    persia_wire_memory_free(&r->plan_memory);
    pthread_mutex_destroy(&r->lock);
    free(r->at);
    free(r);
}

static void *rank_end(void *ctx)
{
    rank_free(ctx);
    return NULL;
}

/* Channels may not be closed by a callback of theirs. */
static void rank_put(void *ctx)
{
    role_rank *r = ctx;
    if (atomic_fetch_sub(&r->references, 1) == 1 &&
        persia_thread_start(NULL, rank_end, r, "persia-role"))
        return; /* there is no memory for a thread: nor is this freed */
}

int persia_rank_open(const role_client_config *config, role_rank **out)
{
    *out = NULL;
    role_rank *r = calloc(1, sizeof *r);
    if (!r)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a rank");
    atomic_init(&r->references, 1);
    r->dtype = config->dtype;
    r->lost = config->lost;
    r->generation = r->pass = 1;
    persia_wire_memory_init(&r->plan_memory);
    pthread_mutex_init(&r->lock, NULL);
    int rc = role_client_open(config, &r->c);
    if (!rc && !(r->at = calloc(r->c.links_n, sizeof *r->at)))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for a rank");
    if (!rc)
        rc = role_client_start(&r->c, NULL, NULL);
    if (rc) {
        rank_free(r);
        return rc;
    }
    *out = r;
    return PERSIA_OK;
}

void persia_rank_close(role_rank *r)
{
    persia_rank_cancel(r);
    rank_put(r);
}

void persia_rank_cancel(role_rank *r)
{
    pthread_mutex_lock(&r->lock);
    r->pass += (uint64_t)pass_is_over(r, r->pass);
    r->generation++;
    pthread_mutex_unlock(&r->lock);
}

void persia_rank_get_counts(role_rank *r, rank_counts *out)
{
    *out = (rank_counts){.late = atomic_load(&r->late_n),
                         .lost = atomic_load(&r->lost_n),
                         .given_up = atomic_load(&r->given_up_n)};
    for (size_t i = 0; i < r->c.links_n; i++)
        out->away += (uint64_t)link_is_away(&r->c.links[i]);
}

static int is_cancelled(const role_taken *t)
{
    pthread_mutex_lock(&t->r->lock);
    int is = t->generation != t->r->generation;
    pthread_mutex_unlock(&t->r->lock);
    return is;
}

/* ---- Declare ---- */

static int declare_at(role_rank *r, role_link *l)
{
    const uint64_t until = persia_clock_ns() + r->c.timeout_ns;
    int rc;
    do {
        wire_plan m = r->plan;
        link_answer answer;
        wire_out o;
        m.caller = link_caller(&r->c, l);
        persia_wire_out_init(&o);
        rc = persia_wire_put_plan(&o, &m);
        if (rc) {
            persia_wire_out_free(&o);
            return rc;
        }
        rc = link_call(&r->c, l, ROLE_DECLARE, &o, 0, r->c.timeout_ns,
                       &answer);
        link_answer_free(&answer);
    } while (rc && !link_failed(&r->c, l, rc) &&
             !(rc = link_retry(&r->c, l, rc, until)));
    return rc;
}

/* The lock is held. */
static uint64_t pass_at(const at_link *at, uint64_t own_pass)
{
    const int64_t pass = (int64_t)own_pass - at->first + 1;
    return pass > 0 ? (uint64_t)pass : 1;
}

int rank_prepare(role_rank *r, role_link *l, uint64_t own_pass,
                 uint64_t *pass)
{
    at_link *at = &r->at[l - r->c.links];
    pthread_mutex_lock(&r->lock);
    int knows = at->boot == atomic_load(&l->boot);
    *pass = pass_at(at, own_pass);
    pthread_mutex_unlock(&r->lock);
    if (knows)
        return PERSIA_OK;
    int rc = declare_at(r, l);
    pthread_mutex_lock(&r->lock);
    const uint64_t boot = atomic_load(&l->boot);
    if (!rc && at->boot != boot) {
        at->boot = boot;
        at->first = (int64_t)own_pass; /* for now: see pass_learn() */
    }
    *pass = pass_at(at, own_pass);
    pthread_mutex_unlock(&r->lock);
    return rc;
}

int persia_rank_declare(role_rank *r, const wire_plan *plan)
{
    const size_t tables = plan->tables_n * sizeof *plan->tables;
    const size_t features = plan->features_n * sizeof *plan->features;
    wire_plan *p = &r->plan;
    p->tables = persia_wire_memory_take(&r->plan_memory, tables);
    p->features = persia_wire_memory_take(&r->plan_memory, features);
    if (!p->tables || !p->features)
        return PERSIA_ENOMEM;
    memcpy(p->tables, plan->tables, tables);
    memcpy(p->features, plan->features, features);
    p->tables_n = plan->tables_n;
    p->features_n = plan->features_n;
    size_t there = 0;
    int rc = PERSIA_OK;
    for (size_t i = 0; i < r->c.links_n; i++) {
        role_link *l = &r->c.links[i];
        if (link_is_away(l) && (there || i + 1 < r->c.links_n))
            continue; /* it hears of it when it is back */
        rc = declare_at(r, l);
        if (rc && !link_is_away(l))
            return rc;
        there += !rc;
    }
    return there ? PERSIA_OK : rc;
}

/* ---- the source of an index ---- */

/* Whether the features of the plan before one whose rows travel have another
 * name. */
static int is_new_key(const wire_plan *p, size_t feature)
{
    for (size_t i = 0; i < feature; i++)
        if (p->features[i].rows &&
            !strcmp(p->features[i].name, p->features[feature].name))
            return 0;
    return 1;
}

/* The rows of a table, or NULL: its features are pooled by the worker. */
static const wire_values *rows_of(const role_taken *t, const char *table)
{
    for (size_t i = 0; i < t->m.rows_n; i++)
        if (!strcmp(t->r->plan.tables[t->m.rows[i].no].name, table))
            return &t->m.rows[i];
    return NULL;
}

static int count_rows(const worker_source *source, const char *table,
                      size_t *n)
{
    const wire_values *v = rows_of((const role_taken *)source, table);
    *n = v ? v->n : 0;
    return v != NULL;
}

static int gather_rows(worker_source *source, const char *table,
                       const int64_t *places, size_t n, float *out,
                       size_t stride)
{
    const role_taken *t = (role_taken *)source;
    const wire_values *v = rows_of(t, table);
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
static size_t place_of(const role_rank *r, const taken_feature *f)
{
    const wire_plan *p = &r->plan;
    size_t i = 0;
    while (i < p->features_n &&
           (p->features[i].rows || strcmp(p->features[i].name, f->name) ||
            strcmp(p->tables[p->features[i].table].name, f->table) ||
            p->features[i].pooling != f->pooling))
        i++;
    return i;
}

static int read_feature(worker_source *source, const taken_feature *f,
                        float *out, size_t stride)
{
    const role_taken *t = (role_taken *)source;
    const size_t i = place_of(t->r, f);
    if (i == t->r->plan.features_n)
        return persia_err_set(PERSIA_EFEATURE,
                              "feature %s of table %s: the embedding workers "
                              "do not look it up for this model",
                              f->name, f->table);
    const wire_values *v = t->m.values;
    while (v->no != i) /* see check_reply() */
        v++;
    persia_wire_widen(t->m.dtype, v->n, v->dim, v->values, v->scales, out,
                      stride);
    return PERSIA_OK;
}

/* The hyper-parameters by table of the plan; NULL: no memory. */
static optim_hyper *hypers_of(const role_rank *r, const taken_update *u)
{
    optim_hyper *out = calloc(r->plan.tables_n + 1, sizeof *out);
    for (size_t i = 0; out && i < r->plan.tables_n; i++)
        for (uint32_t k = 0; k < u->optim_n; k++)
            if (!strcmp(persia_client_table(u->c, k)->name,
                        r->plan.tables[i].name))
                out[i] = u->optim[k].hyper;
    return out;
}

/* Narrows gradients into memory from *at on. */
static void put_grads(wire_values *v, uint32_t dtype, const float *grads,
                      char **at)
{
    void *values = mem_carve(at, v->n * v->dim * wire_dtype_bytes(dtype));
    float *scales = dtype == WIRE_FP16 ? mem_carve(at, v->n * sizeof *scales)
                                       : NULL;
    persia_wire_narrow(dtype, v->n, v->dim, grads, v->dim, values, scales);
    v->values = values;
    v->scales = scales;
}

static size_t bytes_of_grads(size_t n, uint32_t dim, uint32_t dtype)
{
    return n * (dim * wire_dtype_bytes(dtype) + sizeof(float)) +
           (size_t)64 * 2;
}

/* The place of a table in the plan. */
static uint32_t place_of_table(const role_rank *r, const char *name)
{
    uint32_t i = 0;
    while (strcmp(r->plan.tables[i].name, name))
        i++;
    return i;
}

/* The gradients as they leave; *memory: theirs, to be freed. */
static int make_grads(const role_taken *t, const taken_update *u,
                      wire_return *m, void **memory)
{
    const size_t n = t->m.samples;
    size_t bytes = (u->n + u->rows_n) * sizeof *m->grads + (size_t)64 * 3;
    for (size_t i = 0; i < u->n; i++)
        bytes += bytes_of_grads(n, u->grads[i].feature.dim, m->dtype);
    for (size_t i = 0; i < u->rows_n; i++)
        bytes += bytes_of_grads(u->rows[i].n, u->rows[i].dim, m->dtype);
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
            .no = (uint32_t)place_of(t->r, f), .dim = f->dim, .n = n};
        if (v->no == t->r->plan.features_n)
            return persia_err_set(PERSIA_EFEATURE, "feature %s is not looked "
                                  "up by the embedding workers", f->name);
        put_grads(v, m->dtype, u->grads[i].grad, &at);
    }
    for (size_t i = 0; i < u->rows_n; i++) {
        const taken_rows *from = &u->rows[i];
        wire_values *v = &m->rows[i];
        *v = (wire_values){.no = place_of_table(t->r, from->table),
                           .dim = from->dim,
                           .n = from->n,
                           .rows = from->places};
        put_grads(v, m->dtype, from->grads, &at);
    }
    return PERSIA_OK;
}

/* Once, to this worker. */
static int return_to(role_taken *t, role_link *l, wire_return *m,
                     wire_return_reply *reply)
{
    role_rank *r = t->r;
    uint64_t pass;
    link_answer answer;
    wire_out o;
    int rc = l == t->from && t->boot == atomic_load(&l->boot)
                 ? PERSIA_OK
                 : rank_prepare(r, l, t->pass, &pass);
    if (rc)
        return rc;
    persia_wire_out_init(&o);
    rc = persia_wire_put_return(&o, m);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    rc = link_call(&r->c, l, ROLE_RETURN, &o, 0, r->c.timeout_ns, &answer);
    if (!rc)
        rc = persia_wire_get_return_reply(answer.bytes.data, answer.bytes.n,
                                          &answer.memory, reply);
    link_answer_free(&answer);
    return rc;
}

/* The next worker that is there, or this one. */
static role_link *next_link(role_rank *r, role_link *l)
{
    for (size_t i = 1; i < r->c.links_n; i++) {
        role_link *other =
            &r->c.links[((size_t)(l - r->c.links) + i) % r->c.links_n];
        if (!link_is_away(other))
            return other;
    }
    return l;
}

/* To the worker of its lease; where that is away, or has lost it, to whichever
 * gets the batch from its loader. */
static int send_return(role_taken *t, wire_return *m,
                       wire_return_reply *reply)
{
    role_rank *r = t->r;
    const uint64_t until = persia_clock_ns() + r->c.timeout_ns;
    role_link *l = t->from;
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
            rc = link_pause(WAIT_NS);
        else if (link_failed(&r->c, l, rc) && next_link(r, l) != l)
            rc = PERSIA_OK;
        else
            rc = link_retry(&r->c, l, rc, until);
        if (rc)
            return rc;
        if (link_is_away(l) || reply->status == RETURNED_WAIT)
            l = next_link(r, l);
    }
}

static wire_return return_of(const role_taken *t, uint32_t reason)
{
    return (wire_return){.caller = {.client = t->r->c.client,
                                    .boot = t->boot},
                         .stream = t->m.stream,
                         .number = t->m.number,
                         .rank = t->r->c.rank,
                         .lease = t->m.lease,
                         .reason = reason,
                         .dtype = t->r->dtype};
}

static int push(worker_source *source, const taken_update *u,
                worker_counts *counts)
{
    role_taken *t = (role_taken *)source;
    wire_return m = return_of(t, RETURN_TRAINED);
    wire_return_reply reply = {0};
    void *memory = NULL;
    optim_hyper *hypers = hypers_of(t->r, u);
    m.t = u->t;
    m.hypers = hypers;
    m.hypers_n = t->r->plan.tables_n;
    int rc = hypers ? make_grads(t, u, &m, &memory)
                    : persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    if (!rc) {
        atomic_store(&t->has_lease, 0);
        rc = send_return(t, &m, &reply);
        pass_drop(t);
    }
    free(memory);
    free(hypers);
    if (!rc && reply.status == RETURNED_GONE)
        atomic_fetch_add(&t->r->late_n, 1);
    if (client_is_loss(rc)) /* of earlier updates: this one is applied */
        atomic_fetch_add(&t->r->lost_n, 1);
    if (client_is_loss(rc) && t->r->lost == LOST_CONTINUE)
        rc = PERSIA_OK;
    *counts = (worker_counts){reply.created, reply.refused, reply.evicted,
                              reply.nonfinite, reply.touched};
    return rc;
}

/* ---- Take ---- */

int persia_rank_next(role_rank *r, role_taken **out)
{
    role_taken *t = calloc(1, sizeof *t);
    *out = t;
    if (!t)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a batch");
    atomic_init(&t->references, 1);
    atomic_fetch_add(&r->references, 1);
    t->r = r;
    t->source = (worker_source){.rows = count_rows,
                                .read = read_feature,
                                .gather = gather_rows,
                                .push = push};
    persia_wire_memory_init(&t->answer.memory);
    pthread_mutex_lock(&r->lock);
    t->number = ++r->number;
    t->generation = r->generation;
    t->pass = r->pass;
    pthread_mutex_unlock(&r->lock);
    return PERSIA_OK;
}

/* Whether values are those of a place in the plan. */
static int check_values(const role_taken *t, const wire_values *v,
                        uint32_t table, size_t n)
{
    return v->n == n && v->dim == t->r->plan.tables[table].dim && v->values;
}

/* Whether offsets are of so many keys. */
static int check_offsets(const wire_take_reply *m, size_t keys)
{
    const size_t bags = keys * m->samples;
    const uint32_t *offsets = m->offsets.offsets;
    if (!m->offsets.n)
        return m->ids.n == bags;
    int good = m->offsets.n == bags + 1 && offsets[0] == 0 &&
               offsets[bags] == m->ids.n;
    for (size_t i = 0; good && i < bags; i++)
        good = offsets[i] <= offsets[i + 1];
    return good;
}

/* Whether the reply is what was declared. */
static int check_reply(const role_taken *t)
{
    const wire_plan *p = &t->r->plan;
    const wire_take_reply *m = &t->m;
    if (m->status == TAKE_EMPTY || m->status == TAKE_END)
        return PERSIA_OK;
    size_t pooled = 0, keys = 0;
    int good = m->status == TAKE_BATCH;
    for (size_t i = 0; good && i < m->rows_n; i++)
        good = m->rows[i].no < p->tables_n &&
               (!m->rows[i].n || check_values(t, &m->rows[i], m->rows[i].no,
                                              m->rows[i].n));
    for (size_t i = 0; good && i < p->features_n; i++) {
        const wire_plan_feature *f = &p->features[i];
        if (f->rows) {
            keys += (size_t)is_new_key(p, i);
            good = rows_of(t, p->tables[f->table].name) != NULL;
            continue;
        }
        const wire_values *v = &m->values[pooled];
        good = pooled < m->values_n && v->no == i &&
               check_values(t, v, f->table, m->samples);
        pooled++;
    }
    good = good && pooled == m->values_n && check_offsets(m, keys);
    return good ? PERSIA_OK
                : persia_err_set(PERSIA_EPROTOCOL,
                                 "%s: its answer to a Take is none",
                                 t->from->address);
}

static int ask(role_taken *t)
{
    role_rank *r = t->r;
    uint64_t pass;
    int rc = rank_prepare(r, t->from, t->pass, &pass);
    if (rc)
        return rc;
    wire_take m = {.caller = link_caller(&r->c, t->from),
                   .rank = r->c.rank,
                   .pass = pass,
                   .number = t->number,
                   .dtype = r->dtype};
    wire_out o;
    m.held = pass_held(r, t->from, &m.held_n);
    pthread_mutex_lock(&r->lock);
    m.begun = r->begun == t->pass;
    pthread_mutex_unlock(&r->lock);
    t->boot = m.caller.boot;
    persia_wire_out_init(&o);
    rc = persia_wire_put_take(&o, &m);
    free(m.held);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    link_answer_free(&t->answer);
    rc = link_call(&r->c, t->from, ROLE_TAKE, &o, 0, RPC_NS, &t->answer);
    if (!rc)
        rc = persia_wire_get_take_reply(t->answer.bytes.data,
                                        t->answer.bytes.n, &t->answer.memory,
                                        &t->m);
    return rc ? rc : check_reply(t);
}

static int closed(void)
{
    return persia_err_set(PERSIA_ECLOSED,
                          "this pass of the data loader has ended");
}

static void pause_a_little(void)
{
    const struct timespec pause = {.tv_nsec = (long)AGAIN_NS};
    nanosleep(&pause, NULL);
}

/* Ends the lease without gradients. */
static void give_back(role_taken *t, uint32_t reason)
{
    wire_return m = return_of(t, reason);
    wire_out o;
    persia_wire_out_init(&o);
    if (persia_wire_put_return(&o, &m)) {
        persia_wire_out_free(&o);
        return;
    }
    atomic_fetch_add(&t->r->references, 1);
    link_send(t->from, ROLE_RETURN, &o, RPC_NS, rank_put, t->r);
}

/* One Take; *taken: the batch, or the end of the pass, is there. */
static int take_once(role_taken *t, int *taken)
{
    int over;
    t->from = pass_link(t, &over);
    if (!t->from && over) {
        t->m = (wire_take_reply){.status = TAKE_END};
        *taken = 1;
        return PERSIA_OK;
    }
    if (!t->from) { /* workers are away: others may get what they had */
        pass_again(t);
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "%s cannot be reached, nor another embedding "
                              "worker",
                              t->r->c.links[0].address);
    }
    int rc = ask(t);
    if (rc)
        return link_failed(&t->r->c, t->from, rc) ? PERSIA_OK : rc;
    const int own = pass_learn(t);
    if (t->m.status == TAKE_BATCH && !own)
        give_back(t, RETURN_UNUSED);
    else if (t->m.status == TAKE_BATCH)
        *taken = 1;
    else if (t->m.status == TAKE_EMPTY)
        pause_a_little();
    return PERSIA_OK;
}

/* Whether a worker is there. */
static int is_any_there(const role_rank *r)
{
    size_t i = 0;
    while (i < r->c.links_n && link_is_away(&r->c.links[i]))
        i++;
    return i < r->c.links_n;
}

/* Until it is there, or the pass has ended. */
static int take(role_taken *t)
{
    role_rank *r = t->r;
    uint64_t until = persia_clock_ns() + r->c.timeout_ns;
    for (int taken = 0; !taken;) {
        if (is_cancelled(t))
            return closed();
        int rc = take_once(t, &taken);
        if (!rc || (!t->from && is_any_there(r)))
            until = persia_clock_ns() + r->c.timeout_ns;
        role_link *l = t->from ? t->from : &r->c.links[0];
        if (rc && (rc = link_retry(&r->c, l, rc, until)))
            return rc;
    }
    return PERSIA_OK;
}

/* ---- the end of a batch ---- */

static void drop(void *source)
{
    persia_taken_put(source);
}

void persia_taken_put(role_taken *t)
{
    if (atomic_fetch_sub(&t->references, 1) != 1)
        return;
    if (atomic_load(&t->has_lease))
        give_back(t, atomic_load(&t->used) ? RETURN_SKIPPED : RETURN_UNUSED);
    pass_drop(t);
    link_answer_free(&t->answer);
    rank_put(t->r);
    free(t);
}

void persia_taken_use(role_taken *t)
{
    atomic_store(&t->used, 1);
}

const wire_take_reply *persia_taken_reply(const role_taken *t)
{
    return &t->m;
}

size_t persia_taken_places(const role_taken *t, int64_t *places,
                           int64_t *offsets)
{
    const wire_take_reply *m = &t->m;
    for (size_t i = 0; places && i < m->ids.n; i++)
        places[i] = m->ids.places[i];
    const size_t bags = m->offsets.n ? m->offsets.n - 1 : m->ids.n;
    for (size_t i = 0; offsets && i <= bags; i++)
        offsets[i] = m->offsets.n ? m->offsets.offsets[i] : (int64_t)i;
    return m->ids.n;
}

void *persia_taken_bytes(role_taken *t, size_t *n)
{
    *n = t->answer.bytes.n;
    return t->answer.bytes.data;
}

/* ---- as a lookup of a store ---- */

static int run_lookup(void *owner)
{
    role_taken *t = owner;
    int rc = take(t);
    if (rc || t->m.status != TAKE_BATCH)
        return rc;
    atomic_store(&t->has_lease, 1);
    pass_hold(t);
    t->source.samples = t->m.samples;
    t->index = persia_index_pool_new(t->pool);
    if (!t->index)
        return PERSIA_ENOMEM;
    atomic_fetch_add(&t->references, 1);
    t->index->drop = drop;
    t->index->source = t;
    return PERSIA_OK;
}

static void release_lookup(void *owner)
{
    role_taken *t = owner;
    batch_index *index = t->index;
    t->index = NULL;
    persia_batch_index_put(index);
    persia_taken_put(t);
}

int persia_taken_lookup(role_taken *t, store *s, index_pool *pool,
                        uint64_t batch)
{
    const store_lookup l = {.take = run_lookup,
                            .index = &t->index,
                            .owner = t,
                            .release = release_lookup};
    t->pool = pool;
    atomic_fetch_add(&t->references, 1);
    int rc = persia_store_batch_lookup(s, batch, &l);
    if (rc)
        persia_taken_put(t);
    return rc;
}
