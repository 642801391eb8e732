/* rank.c: a rank takes batches from workers, and returns their gradients.
 *
 * Take k is of worker (k - 1 + rank) mod K, or of the next one that is there:
 * with one loader, which sends its batches to the workers in turn, one rank
 * gets them in their order.  passes.c: which pass that is.
 *
 * In steps of all ranks a Take names the place of its batch.  It goes to the
 * worker where the loader sends that place, and waits there; then it looks at
 * the others.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "rank/private.h"

#define AGAIN_NS ((uint64_t)10000000)
#define MISSING_NS ((uint64_t)50000000)
#define RPC_NS ((uint64_t)30 * 1000000000)

/* ---- plans ---- */

static void rank_plan_put(rank_plan *p)
{
    if (!p || atomic_fetch_sub(&p->references, 1) != 1)
        return;
    persia_wire_memory_free(&p->memory);
    free(p);
}

/* NULL: no memory. */
static rank_plan *rank_plan_make(const wire_plan *from)
{
    const size_t tables = from->tables_n * sizeof *from->tables;
    const size_t features = from->features_n * sizeof *from->features;
    rank_plan *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    atomic_init(&p->references, 1);
    persia_wire_memory_init(&p->memory);
    p->wire.tables = persia_wire_memory_take(&p->memory, tables);
    p->wire.features = persia_wire_memory_take(&p->memory, features);
    if (!p->wire.tables || !p->wire.features) {
        rank_plan_put(p);
        return NULL;
    }
    if (tables)
        memcpy(p->wire.tables, from->tables, tables);
    if (features)
        memcpy(p->wire.features, from->features, features);
    p->wire.tables_n = from->tables_n;
    p->wire.features_n = from->features_n;
    return p;
}

static rank_plan *rank_plan_now(rank_taker *r)
{
    pthread_mutex_lock(&r->lock);
    rank_plan *p = r->plan;
    atomic_fetch_add(&p->references, 1);
    pthread_mutex_unlock(&r->lock);
    return p;
}

/* ---- life ---- */

static void rank_free(rank_taker *r)
{
    assert(!r->held && !r->takes && !r->backs);
    for (size_t i = 0; i < r->c.links_n && r->at; i++)
        free(r->at[i].parts);
    if (r->c.links)
        worker_client_close(&r->c);
    rank_plan_put(r->plan);
    pthread_cond_destroy(&r->turned);
    pthread_mutex_destroy(&r->lock);
    persia_turn_free(&r->in_order);
    free(r->homes);
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
    rank_taker *r = ctx;
    if (atomic_fetch_sub(&r->references, 1) == 1 &&
        persia_thread_start(NULL, rank_end, r, "persia-rank"))
        return; /* there is no memory for a thread: nor is this freed */
}

/* Other rows: loaders may send any place of the epoch again. */
static int rank_meet(void *owner, worker_link *l, const wire_hello_reply *m)
{
    rank_taker *r = owner;
    if (!atomic_load(&l->boot) || m->lineage == atomic_load(&l->lineage))
        return PERSIA_OK;
    pthread_mutex_lock(&r->lock);
    r->place = r->used = (uint64_t)r->c.rank + 1;
    pthread_mutex_unlock(&r->lock);
    return PERSIA_OK;
}

static void rank_introduce(void *owner, wire_hello *m)
{
    rank_taker *r = owner;
    pthread_mutex_lock(&r->lock);
    m->held = pass_held(r, &m->held_n);
    m->epoch = r->epoch;
    m->place = r->ordered ? r->place : 0;
    pthread_mutex_unlock(&r->lock);
}

/* Workers wait for what each rank says of a batch that was sent again, also
 * for a rank that is between two passes. */
static void rank_tick(void *owner)
{
    rank_taker *r = owner;
    pthread_mutex_lock(&r->lock);
    const int takes = r->takes != NULL; /* they say it */
    pthread_mutex_unlock(&r->lock);
    for (size_t i = 0; i < r->c.links_n && !takes; i++)
        if (!link_is_away(&r->c.links[i]))
            (void)link_hello(&r->c, &r->c.links[i]);
}

int persia_rank_open(const worker_client_config *config, rank_taker **out)
{
    *out = NULL;
    rank_taker *r = calloc(1, sizeof *r);
    if (!r)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a rank");
    atomic_init(&r->references, 1);
    r->dtype = config->dtype;
    r->generation = 1;
    r->job = config->job;
    r->place = r->used = (uint64_t)config->rank + 1;
    pthread_mutex_init(&r->lock, NULL);
    persia_turn_init(&r->in_order);
    persia_cond_init(&r->turned);
    int rc = worker_client_open(config, &r->c);
    if (!rc && (!(r->at = calloc(WORKER_LINKS_MAX, sizeof *r->at)) ||
                !(r->homes = calloc(WORKER_LINKS_MAX, sizeof *r->homes)) ||
                !(r->plan = rank_plan_make(&(wire_plan){0}))))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for a rank");
    for (size_t i = 0; i < WORKER_LINKS_MAX && !rc; i++)
        r->homes[i] = i;
    if (!rc)
        r->c.introduce = rank_introduce;
    if (!rc)
        rc = worker_client_start(&r->c, rank_tick, rank_meet, r);
    if (rc) {
        rank_free(r);
        return rc;
    }
    *out = r;
    return PERSIA_OK;
}

int persia_rank_list(rank_taker *r, const worker_client_config *config)
{
    return worker_client_list(&r->c, config);
}

void persia_rank_close(rank_taker *r)
{
    persia_rank_cancel(r);
    rank_put(r);
}

/* A loop that ended in the middle of its pass: a batch that it had, and sends
 * no gradients of, is not done.  The lock is held. */
static void rank_leave_early(rank_taker *r)
{
    for (rank_taken *t = r->held; t; t = t->held_next) {
        if (t->generation != r->generation ||
            (t->held != HELD_HERE && t->held != HELD_USED))
            continue;
        pass_held_event_locked(t, HELD_LEAVE);
        if (t->place && t->place < r->used)
            r->used = t->place;
    }
}

void persia_rank_cancel(rank_taker *r)
{
    pthread_mutex_lock(&r->lock);
    if (pass_end(r))
        r->used = (uint64_t)r->c.rank + 1;
    else
        rank_leave_early(r);
    r->place = r->used;
    r->generation++;
    pthread_cond_broadcast(&r->turned);
    pthread_mutex_unlock(&r->lock);
}

void persia_rank_again(rank_taker *r)
{
    pthread_mutex_lock(&r->lock);
    r->again = 1;
    pthread_mutex_unlock(&r->lock);
}

void persia_rank_order(rank_taker *r, int ordered)
{
    pthread_mutex_lock(&r->lock);
    r->ordered = ordered;
    pthread_mutex_unlock(&r->lock);
}

void persia_rank_get_counts(rank_taker *r, rank_counts *out)
{
    *out = (rank_counts){.late = atomic_load(&r->late_n),
                         .failed = atomic_load(&r->failed_n),
                         .given_up = atomic_load(&r->given_up_n)};
    pthread_mutex_lock(&r->lock);
    const uint64_t first = r->first ? r->first : 1;
    out->epochs = r->epoch > first ? r->epoch - first : 0;
    out->silent = r->silent;
    pthread_mutex_unlock(&r->lock);
    out->away = link_count_away(&r->c);
}

static int rank_is_cancelled(const rank_taken *t)
{
    pthread_mutex_lock(&t->r->lock);
    int is = t->generation != t->r->generation;
    pthread_mutex_unlock(&t->r->lock);
    return is;
}

/* ---- Declare ---- */

static int rank_declare_at(rank_taker *r, worker_link *l, const rank_plan *p)
{
    const uint64_t until = persia_deadline(r->c.timeout_ns);
    int rc;
    do {
        wire_plan m = p->wire;
        link_answer answer;
        wire_out o;
        m.caller = link_caller(&r->c, l);
        persia_wire_out_init(&o);
        rc = persia_wire_put_plan(&o, &m);
        if (rc) {
            persia_wire_out_free(&o);
            return rc;
        }
        rc = link_call(&r->c, l, WORKER_DECLARE, &o, 0, r->c.timeout_ns,
                       &answer);
        link_answer_free(&answer);
    } while (rc && !link_failed(&r->c, l, rc) &&
             !(rc = link_retry(&r->c, l, rc, until)));
    return rc;
}

int rank_prepare(rank_taker *r, worker_link *l)
{
    at_link *at = &r->at[l - r->c.links];
    pthread_mutex_lock(&r->lock);
    int knows = at->boot == atomic_load(&l->boot);
    pthread_mutex_unlock(&r->lock);
    if (knows)
        return PERSIA_OK;
    rank_plan *p = rank_plan_now(r);
    int rc = rank_declare_at(r, l, p);
    pthread_mutex_lock(&r->lock);
    if (!rc && p == r->plan) /* else it may know that or the later one */
        at->boot = atomic_load(&l->boot);
    pthread_mutex_unlock(&r->lock);
    rank_plan_put(p);
    return rc;
}

void rank_unprepare(rank_taker *r, const worker_link *l, int rc)
{
    if (rc != PERSIA_ESTALE)
        return;
    pthread_mutex_lock(&r->lock);
    r->at[l - r->c.links].boot = 0;
    pthread_mutex_unlock(&r->lock);
}

/* At all workers that are there; one at least. */
static int rank_declare_all(rank_taker *r, const rank_plan *p)
{
    size_t there = 0;
    int rc = PERSIA_OK;
    for (size_t i = 0; i < r->c.links_n; i++) {
        worker_link *l = &r->c.links[i];
        if (link_is_away(l) && (there || i + 1 < r->c.links_n))
            continue; /* it gets it when it is back */
        rc = rank_declare_at(r, l, p);
        if (rc && !link_is_away(l))
            return rc;
        there += !rc;
    }
    return there ? PERSIA_OK : rc;
}

int persia_rank_declare(rank_taker *r, const wire_plan *plan)
{
    rank_plan *p = rank_plan_make(plan);
    if (!p)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a plan");
    pthread_mutex_lock(&r->lock);
    rank_plan *before = r->plan;
    r->plan = p;
    pthread_mutex_unlock(&r->lock);
    rank_plan_put(before);
    p = rank_plan_now(r);
    int rc = rank_declare_all(r, p);
    rank_plan_put(p);
    return rc;
}

/* ---- Take ---- */

int persia_rank_next(rank_taker *r, rank_taken **out)
{
    rank_taken *t = calloc(1, sizeof *t);
    *out = t;
    if (!t)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a batch");
    atomic_init(&t->references, 1);
    atomic_fetch_add(&r->references, 1);
    t->r = r;
    t->source = rank_source;
    persia_wire_memory_init(&t->answer.memory);
    pthread_mutex_lock(&r->lock);
    t->number = ++r->number;
    t->generation = r->generation;
    pthread_mutex_unlock(&r->lock);
    t->plan = rank_plan_now(r);
    return PERSIA_OK;
}

/* Whether values are those of a place in the plan. */
static int check_values(const rank_taken *t, const wire_values *v,
                        uint32_t table, size_t n)
{
    return v->n == n && v->dim == t->plan->wire.tables[table].dim && v->values;
}

/* Whether offsets are of so many keys. */
static int rank_check_offsets(const wire_take_reply *m, size_t keys)
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

/* Whether no more is said of loaders than they may have at once. */
static int rank_check_loaders(const wire_take_reply *m)
{
    size_t i = 0;
    while (i < m->loaders_n &&
           (m->loaders[i].last <= m->loaders[i].settled ||
            m->loaders[i].last - m->loaders[i].settled <= WIRE_BATCHES_MAX))
        i++;
    return i == m->loaders_n;
}

/* Whether the reply is what was declared. */
static int rank_check_reply(const rank_taken *t)
{
    const wire_plan *p = &t->plan->wire;
    const wire_take_reply *m = &t->m;
    if (rank_check_loaders(m) &&
        (m->status == TAKE_EMPTY || m->status == TAKE_END ||
         m->status == TAKE_IDLE || (m->status == TAKE_DONE && t->place)))
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
            keys += (size_t)rank_key_is_new(p, i);
            good = rank_rows(t, p->tables[f->table].name) != NULL;
            continue;
        }
        const wire_values *v = &m->values[pooled];
        good = pooled < m->values_n && v->no == i &&
               check_values(t, v, f->table, m->samples);
        pooled++;
    }
    good = good && pooled == m->values_n && rank_check_offsets(m, keys);
    return good ? PERSIA_OK
                : persia_err_set(PERSIA_EPROTOCOL,
                                 "%s: its answer to a Take is none",
                                 t->from->address);
}

static int rank_ask(rank_taken *t)
{
    rank_taker *r = t->r;
    int rc = rank_prepare(r, t->from);
    if (rc)
        return rc;
    wire_take m = {.caller = link_caller(&r->c, t->from),
                   .rank = r->c.rank,
                   .number = t->number,
                   .look = (uint32_t)t->look,
                   .place = t->place,
                   .dtype = r->dtype};
    wire_out o;
    pthread_mutex_lock(&r->lock);
    assert(t->state == TAKING_ASKS && t->held == HELD_NONE);
    m.held = pass_held(r, &m.held_n);
    m.job = t->job = r->job;
    t->backs_ended = r->backs_ended;
    m.oldest = order_oldest(r, m.held_n);
    m.epoch = r->epoch;
    m.begun = r->epoch && r->begun == r->epoch;
    pthread_mutex_unlock(&r->lock);
    t->boot = m.caller.boot;
    t->lineage = m.caller.lineage;
    persia_wire_out_init(&o);
    rc = persia_wire_put_take(&o, &m);
    free(m.held);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    link_answer_free(&t->answer);
    t->asked = persia_trace_now();
    rc = link_call(&r->c, t->from, WORKER_TAKE, &o, 0, RPC_NS, &t->answer);
    if (!rc)
        rc = persia_wire_get_take_reply(t->answer.bytes.data,
                                        t->answer.bytes.n, &t->answer.memory,
                                        &t->m);
    return rc;
}

static int rank_closed(void)
{
    return persia_err_set(PERSIA_ECLOSED,
                          "this pass of the data loader has ended");
}

static void rank_gave_back(void *ctx)
{
    pass_gave_back(ctx);
    rank_put(ctx);
}

/* Ends the lease, if it has one, without gradients.  is_over: the loop has
 * done with a batch that it had. */
static void rank_give_back(rank_taken *t, int is_over)
{
    const enum held_state was = pass_give_back(t);
    if (!held_has_lease(was))
        return;
    const int done = is_over && (was == HELD_USED || was == HELD_SKIPPED);
    wire_return m = rank_return(t, done ? RETURN_SKIPPED : RETURN_UNUSED);
    wire_out o;
    persia_wire_out_init(&o);
    if (persia_wire_put_return(&o, &m)) {
        persia_wire_out_free(&o);
        pass_gave_back(t->r);
        return;
    }
    atomic_fetch_add(&t->r->references, 1);
    link_send(t->from, WORKER_RETURN, &o, RPC_NS, rank_gave_back, t->r);
}

/* An answer that is none: the loop that declared it otherwise has ended, or
 * the worker is wrong.  The rank does not keep its lease. */
static int rank_refuse(rank_taken *t, int rc)
{
    err_kept error;
    persia_err_keep(&error, rc);
    if (t->m.status == TAKE_BATCH) {
        (void)pass_hold(t);
        persia_taken_give_back(t);
    }
    return persia_err_again(&error);
}

/* Whether a batch that arrived is that of this Take, whose pass may have ended
 * meanwhile.  By place: then the next Take is of the next place. */
static int rank_accept(rank_taken *t, int own)
{
    rank_taker *r = t->r;
    if (!t->place)
        return own;
    pthread_mutex_lock(&r->lock);
    own = own && t->generation == r->generation;
    if (own) {
        r->place = t->place + r->c.world;
        *pass_home(r, t->place) = (size_t)(t->from - r->c.links);
    }
    pthread_mutex_unlock(&r->lock);
    return own;
}

/* The batch of this place needs no training. */
static void rank_pass_over(rank_taken *t)
{
    rank_taker *r = t->r;
    pthread_mutex_lock(&r->lock);
    if (t->generation == r->generation)
        r->place = t->place + r->c.world;
    pthread_mutex_unlock(&r->lock);
    t->tries = 0;
}

/* The place that is next. */
static void rank_choose_place(rank_taken *t)
{
    rank_taker *r = t->r;
    pthread_mutex_lock(&r->lock);
    t->place = r->ordered ? r->place : 0;
    pthread_mutex_unlock(&r->lock);
}

/* No worker that is there has more: others may get what it had. */
static int rank_take_again(rank_taker *r)
{
    int rc = pass_again(r);
    if (!rc && !link_is_any_there(&r->c))
        rc = persia_err_set(PERSIA_EUNAVAILABLE,
                            "%s cannot be reached, nor another embedding "
                            "worker",
                            r->c.links[0].address);
    return rc ? rc : persia_pause_poll(MISSING_NS);
}

/* Whether the answer is about other rows than those of the rank: the worker or
 * the rank has yet to see that a checkpoint was loaded. */
static int rank_is_of_other_rows(const rank_taken *t)
{
    return t->m.status != TAKE_BATCH &&
           t->lineage != persia_client_restore(t->c);
}

/* One Take; *taken: its answer is for order_settle(). */
static int rank_take_once(rank_taken *t, int *taken)
{
    int over;
    rank_choose_place(t);
    t->from = pass_link(t, &over);
    if (!t->from && over) {
        t->m = (wire_take_reply){.status = TAKE_END};
        *taken = 1;
        return PERSIA_OK;
    }
    int rc = t->from ? rank_ask(t) : rank_take_again(t->r);
    if (!t->from) { /* a later Take may hold a batch: see order.c */
        t->m = (wire_take_reply){.status = TAKE_IDLE};
        *taken = !rc;
        return rc;
    }
    rank_unprepare(t->r, t->from, rc);
    if (rc)
        return link_failed(&t->r->c, t->from, rc) ? PERSIA_OK : rc;
    if ((rc = rank_check_reply(t)))
        return rank_refuse(t, rc);
    if (rank_is_of_other_rows(t)) {
        rc = persia_client_look(t->c);
        return rc ? rc : persia_pause_poll(MISSING_NS);
    }
    int got = 0;
    const int own = pass_learn(t);
    const int none = t->m.status == TAKE_IDLE ||
                     (t->place && t->m.status == TAKE_EMPTY);
    if (own && none && (rc = pass_look_again(t))) {
        t->from = NULL;
        return rc;
    }
    if (t->m.status == TAKE_BATCH) {
        /* A Hello that says a later place lists it. */
        const int is_only = pass_hold(t);
        got = is_only && rank_accept(t, own);
        if (!got)
            persia_taken_give_back(t);
        persia_trace_part(TRACE_TAKE, t->m.stream, t->m.number, t->asked, 0,
                          got ? PERSIA_OK : PERSIA_ECLOSED);
    }
    *taken = got || t->m.status == TAKE_IDLE ||
             (t->m.status == TAKE_EMPTY && !t->place);
    if (t->m.status == TAKE_DONE)
        rank_pass_over(t);
    else if (t->m.status == TAKE_EMPTY)
        persia_pause(AGAIN_NS);
    return PERSIA_OK;
}

/* Until it is there, or the pass has ended. */
static int rank_take(rank_taken *t)
{
    rank_taker *r = t->r;
    uint64_t until = persia_deadline(r->c.timeout_ns);
    for (;;) {
        int taken = 0;
        if (rank_is_cancelled(t))
            return rank_closed();
        int rc = rank_take_once(t, &taken);
        if (taken && order_settle(t))
            return PERSIA_OK;
        if (!rc)
            until = persia_deadline(r->c.timeout_ns);
        if (rc && !t->from && link_is_any_there(&r->c))
            return rc;
        worker_link *l = t->from ? t->from : &r->c.links[0];
        if (rc && (rc = rank_retry(t, l, rc, until)))
            return rc;
    }
}

/* Takes by place follow one another: a later one asks for a later batch. */
static int rank_take_in_order(rank_taken *t)
{
    rank_taker *r = t->r;
    pthread_mutex_lock(&r->lock);
    const int ordered = r->ordered;
    pthread_mutex_unlock(&r->lock);
    int rc = ordered ? persia_turn_take(&r->in_order) : PERSIA_OK;
    if (!rc) {
        order_enter(t); /* it has left where it reported a loss before */
        rc = rank_take(t);
        if (ordered)
            persia_turn_give(&r->in_order);
    }
    order_leave(t);
    return rc;
}

/* ---- the end of a batch ---- */

static void rank_rank_drop(void *source)
{
    persia_taken_put(source);
}

void persia_taken_give_back(rank_taken *t)
{
    rank_give_back(t, 0);
}

void persia_taken_put(rank_taken *t)
{
    if (atomic_fetch_sub(&t->references, 1) != 1)
        return;
    assert(t->state == TAKING_MADE || t->state == TAKING_LEFT);
    rank_give_back(t, 1);
    link_answer_free(&t->answer);
    rank_plan_put(t->plan);
    rank_put(t->r);
    free(t);
}

void persia_taken_use(rank_taken *t)
{
    rank_taker *r = t->r;
    t->used = persia_trace_now();
    pthread_mutex_lock(&r->lock);
    pass_held_event_locked(t, HELD_USE);
    if (t->place && t->generation == r->generation)
        r->used = t->place + r->c.world;
    pthread_mutex_unlock(&r->lock);
}

void persia_taken_skip(rank_taken *t)
{
    pass_held_event(t, HELD_SKIP);
}

const wire_take_reply *persia_taken_reply(const rank_taken *t)
{
    return &t->m;
}

size_t persia_taken_places(const rank_taken *t, int64_t *places,
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

void *persia_taken_bytes(rank_taken *t, size_t *n)
{
    *n = t->answer.bytes.n;
    return t->answer.bytes.data;
}

/* ---- as a lookup of a store ---- */

static int rank_run_lookup(void *owner)
{
    rank_taken *t = owner;
    int rc = rank_take_in_order(t);
    if (rc || t->m.status != TAKE_BATCH)
        return rc;
    t->source.samples = t->m.samples;
    t->index = persia_index_pool_new(persia_client_indexes(t->c));
    if (!t->index)
        return PERSIA_ENOMEM;
    atomic_fetch_add(&t->references, 1);
    t->index->drop = rank_rank_drop;
    t->index->source = t;
    return PERSIA_OK;
}

static void rank_release_lookup(void *owner)
{
    rank_taken *t = owner;
    batch_index *index = t->index;
    t->index = NULL;
    order_leave(t);
    persia_batch_index_put(index);
    persia_taken_put(t);
}

int persia_taken_lookup(rank_taken *t, loop *s, ps_client *c,
                        uint64_t batch)
{
    const loop_lookup l = {.take = rank_run_lookup,
                           .index = &t->index,
                           .owner = t,
                           .release = rank_release_lookup};
    t->c = c;
    atomic_fetch_add(&t->references, 1);
    order_enter(t);
    int rc = persia_loop_batch_lookup(s, batch, &l);
    if (rc) {
        order_leave(t);
        persia_taken_put(t);
    }
    return rc;
}
