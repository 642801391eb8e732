/* service.c: the life of an embedding worker; requests in, answers out; its
 * timer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"

#define TICK_NS ((uint64_t)250000000)
#define QUIET_NS ((uint64_t)10 * 1000000000) /* of ranks: see leave */

static const uint32_t roles[WORKER_METHODS_N] = {
    [WORKER_HELLO] = RPC_ALL, /* of a rank: see asking_check_hello() */
    [WORKER_DECLARE] = RPC_TRAIN,
    [WORKER_SUBMIT] = RPC_FEED,
    [WORKER_TAKE] = RPC_TRAIN,
    [WORKER_RETURN] = RPC_TRAIN,
    [WORKER_SUMS] = RPC_TRAIN,
    [WORKER_STATS] = RPC_ALL,
    [WORKER_HEARTBEAT] = RPC_FEED,
};

const rpc_methods persia_worker_methods = {WORKER_SERVICE, persia_worker_paths,
                                           WORKER_METHODS_N, 0, roles};

/* ---- replies ------------------------------------------------------------ */

static void asking_free(asking *a)
{
    wire_memory memory = a->memory; /* it lies in it */
    embedding_worker *s = a->s;
    if (a->o && !a->o->stream) { /* it has not entered the queue */
        offer_free(s, a->o);
    } else if (a->o) {
        service_enter(s);
        offer_release(s, a->o);
        service_match(s);
        service_leave(s);
    }
    free(a->floats);
    row_places_free(&a->places);
    if (a->sums)
        persia_batcher_sums_free(a->sums, a->sums_n);
    persia_wire_memory_free(&memory);
}

static void asking_sent(void *owner)
{
    asking_free(owner);
}

static uint64_t service_boot_now(embedding_worker *s)
{
    service_enter(s);
    const uint64_t boot = s->boot;
    service_leave(s);
    return boot;
}

static uint64_t service_servers_of(embedding_worker *s)
{
    service_enter(s);
    const uint64_t servers = s->servers;
    service_leave(s);
    return servers;
}

static int service_put_hello(asking *a, wire_out *o)
{
    embedding_worker *s = a->s;
    wire_hello_reply m = {.version = WIRE_VERSION,
                          .version_min = WIRE_VERSION_MIN,
                          .features = WIRE_FEATURES,
                          .shards = 1,
                          .message_limit = s->config.message_limit};
    memcpy(m.name_space, s->config.servers.name_space, sizeof m.name_space);
    if (a->ledger)
        m.ledger = *a->ledger;
    service_enter(s);
    const worker_stream *t = stream_named(s, a->m.hello.stream);
    const worker_job *j = job_named(s, a->m.hello.job);
    m.boot = s->boot;
    m.lineage = a->ledger ? a->lineage : s->lineage;
    m.first = t && t->job == j ? t->first : 0;
    m.epoch = j && j->counts ? epoch_first(s, j) : 0;
    service_leave(s);
    return persia_wire_put_hello_reply(o, &m);
}

static int service_put_declare(asking *a, wire_out *o)
{
    return persia_wire_put_plan_reply(
        o, &(wire_plan_reply){.created = a->status});
}

static int service_put_submit(asking *a, wire_out *o)
{
    wire_submit_reply m = {.status = a->status,
                           .done = a->done,
                           .done_n = a->done_n,
                           .first = a->first,
                           .memory = a->stream_memory,
                           .failed = a->failed,
                           .failed_n = a->failed_n};
    service_enter(a->s);
    m.servers = a->s->servers;
    m.leaving = (uint32_t)a->s->leaving;
    service_leave(a->s);
    return persia_wire_put_submit_reply(o, &m);
}

static int service_put_take(asking *a, wire_out *o)
{
    a->taken.status = a->status;
    a->taken.epoch = a->epoch;
    a->taken.loaders = a->parts;
    a->taken.loaders_n = a->parts_n;
    a->taken.job = a->job_id;
    a->taken.failed = a->job_failed;
    a->taken.silent = a->loaders_silent;
    a->taken.first = a->loaders_first;
    a->taken.servers = service_servers_of(a->s);
    return persia_wire_put_take_reply(o, &a->taken);
}

static int service_put_return(asking *a, wire_out *o)
{
    wire_return_reply m = {.status = a->status,
                           .servers = service_servers_of(a->s)};
    UPDATE_COUNTS_ADD(&m, &a->counts);
    return persia_wire_put_return_reply(o, &m);
}

static int service_put_sums(asking *a, wire_out *o)
{
    return persia_wire_put_sums_reply(o, &a->summed);
}

static int service_put_stats(asking *a, wire_out *o)
{
    wire_worker_stats_reply m = {.boot = service_boot_now(a->s)};
    persia_embedding_worker_get_stats(a->s, &m.stats);
    return persia_wire_put_worker_stats_reply(o, &m);
}

/* ---- methods ------------------------------------------------------------ */

/* Most methods: X(as in WORKER_METHODS, name, its message, where that is in
 * asking.m). */
#define WORKER_OPS(X)                                                         \
    X(HELLO, hello, hello, hello)                                             \
    X(DECLARE, declare, plan, plan)                                           \
    X(TAKE, take, take, take)                                                 \
    X(RETURN, return, return, back)                                           \
    X(SUMS, sums, return, back)                                               \
    X(STATS, stats, stats, stats)                                             \
    X(HEARTBEAT, heartbeat, heartbeat, beat)

#define WORKER_OP(upper, name, message, member)                               \
    static int service_decode_##name(asking *a)                               \
    {                                                                         \
        return persia_wire_get_##message(                                     \
            a->call->request, a->call->request_n, &a->memory, &a->m.member);  \
    }                                                                         \
    static const wire_caller *caller_##name(const asking *a)                  \
    {                                                                         \
        return &a->m.member.caller;                                           \
    }
WORKER_OPS(WORKER_OP)
#undef WORKER_OP

static int service_decode_submit(asking *a)
{
    return offer_make(a->call->request, a->call->request_n, &a->o);
}

static const wire_caller *caller_submit(const asking *a)
{
    return &a->o->m.caller;
}

enum {
    ASKS_THIS_LIFE = 1, /* of another life of the worker: it is refused */
    ASKS_ALWAYS = 2     /* also one that stops answers, and at once */
};

static const struct {
    int (*decode)(asking *a);
    const wire_caller *(*caller)(const asking *a);
    void (*begin)(asking *a); /* the lock is held */
    int (*put)(asking *a, wire_out *o);
    int flags;
} methods[WORKER_METHODS_N] = {
#define ASKED(upper, name, begin, put, flags)                                 \
    [WORKER_##upper] = {service_decode_##name, caller_##name, begin, put,     \
                        flags}
    ASKED(HELLO, hello, service_hello, service_put_hello, 0),
    ASKED(DECLARE, declare, service_declare, service_put_declare,
          ASKS_THIS_LIFE),
    ASKED(SUBMIT, submit, service_submit, service_put_submit, ASKS_THIS_LIFE),
    ASKED(TAKE, take, service_take, service_put_take, ASKS_THIS_LIFE),
    ASKED(RETURN, return, service_return, service_put_return, 0),
    ASKED(SUMS, sums, service_sums, service_put_sums, 0),
    ASKED(STATS, stats, NULL, service_put_stats, ASKS_ALWAYS),
    ASKED(HEARTBEAT, heartbeat, service_heartbeat, service_put_submit,
          ASKS_THIS_LIFE),
#undef ASKED
};

/* ---- answers ------------------------------------------------------------ */

void asking_answer(asking *a, int rc)
{
    rpc_call *call = a->call;
    wire_out o;
    persia_wire_out_init(&o);
    if (!rc)
        rc = methods[call->method].put(a, &o);
    if (rc) {
        err_kept error;
        persia_err_keep(&error, rc);
        persia_wire_out_free(&o);
        asking_free(a);
        call->fail(call, rc, error.text);
        return;
    }
    call->reply(call, &o, asking_sent, a);
}

/* ---- requests ----------------------------------------------------------- */

static int asking_check_hello(const asking *a)
{
    const wire_hello *m = &a->m.hello;
    const char *own = a->s->config.servers.name_space;
    const uint32_t owner = m->world ? RPC_TRAIN : RPC_FEED;
    if (m->stream && !(a->call->who && a->call->who->roles & owner))
        return persia_rpc_deny(a->call, RPC_ROLE, "a stream");
    if (!wire_versions_meet(m->version_min, m->version))
        return persia_err_set(
            PERSIA_EMISMATCH,
            "the client speaks versions %u to %u of the protocol, the worker "
            "%d to %d: install the same persia on both",
            m->version_min ? m->version_min : m->version, m->version,
            WIRE_VERSION_MIN, WIRE_VERSION);
    if (strcmp(m->name_space, own) != 0)
        return persia_err_set(PERSIA_EMISMATCH,
                              "the client asks for namespace '%s', the worker "
                              "is of namespace '%s'",
                              m->name_space, own);
    return PERSIA_OK;
}

/* Requests of another life of this worker must say Hello again. */
static int service_begin(asking *a)
{
    embedding_worker *s = a->s;
    const uint32_t method = a->call->method;
    const uint64_t boot = methods[method].flags & ASKS_THIS_LIFE
                              ? methods[method].caller(a)->boot
                              : 0; /* or of a caller that knows none */
    int rc = PERSIA_OK;
    service_enter(s);
    if (s->closed)
        rc = persia_err_set(PERSIA_EUNAVAILABLE, "the worker is stopping");
    else if (boot && boot != s->boot)
        rc = persia_err_set(PERSIA_ESTALE,
                            "the worker was started again, or the servers "
                            "have other rows now");
    else
        methods[method].begin(a);
    service_leave(s);
    return rc;
}

static int service_take_in(asking *a)
{
    int rc = methods[a->call->method].decode(a);
    if (!rc && a->call->method == WORKER_HELLO)
        rc = asking_check_hello(a);
    if (!rc && methods[a->call->method].flags & ASKS_ALWAYS)
        asking_answer(a, PERSIA_OK);
    else if (!rc)
        rc = service_begin(a);
    return rc;
}

void persia_embedding_worker_handle(void *service, rpc_call *call)
{
    wire_memory memory;
    err_kept error;
    asking *a = NULL;
    persia_wire_memory_init(&memory);
    int rc = call->method < WORKER_METHODS_N
                 ? PERSIA_OK
                 : persia_err_set(PERSIA_EPROTOCOL, "there is no method %u",
                                  call->method);
    if (!rc && !(a = persia_wire_memory_take(&memory, sizeof *a)))
        rc = PERSIA_ENOMEM;
    if (!rc) {
        *a = (asking){.s = service, .call = call, .memory = memory};
        rc = service_take_in(a);
    }
    if (!rc)
        return;
    persia_err_keep(&error, rc);
    if (a && a->o)
        offer_free(service, a->o);
    memory = a ? a->memory : memory;
    persia_wire_memory_free(&memory);
    call->fail(call, rc, error.text);
}

/* ---- life --------------------------------------------------------------- */

static uint64_t embedding_worker_service_tick(void *service)
{
    embedding_worker *s = service;
    service_enter(s);
    const int closed = s->closed;
    if (!closed)
        service_tick(s);
    service_leave(s);
    return closed ? PERSIA_FOREVER : persia_clock_ns() + TICK_NS;
}

static int embedding_worker_service_start(embedding_worker *s)
{
    client_config look = s->config.servers;
    look.stream = 0;
    look.lost = LOST_CONTINUE; /* it pushes nothing */
    int rc = persia_client_create(&look, &s->look);
    if (!rc)
        rc = persia_sched_create_background(1, s->config.jobs, &s->jobs);
    if (!rc)
        rc = persia_sched_create_background(1, WORKER_WAITING, &s->waiting);
    if (!rc)
        rc = persia_random_id(&s->boot);
    if (!rc)
        s->lineage = persia_client_restore(s->look);
    if (!rc)
        rc = persia_timer_start(&s->timer, embedding_worker_service_tick, s,
                                "persia-worker");
    return rc;
}

int persia_embedding_worker_create(const embedding_worker_config *config,
                                   embedding_worker **out)
{
    embedding_worker *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a worker");
    s->config = *config;
    s->born = s->began = persia_clock_ns();
    s->stats.bytes_limit = config->queue_limit;
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->declaring, NULL);
    pthread_mutex_init(&s->looking, NULL);
    persia_timer_init(&s->timer);
    window_init(&s->leases, s->ring, WORKER_LEASES / 64);
    int rc = embedding_worker_service_start(s);
    if (rc) {
        persia_embedding_worker_destroy(s);
        return rc;
    }
    *out = s;
    return PERSIA_OK;
}

void persia_embedding_worker_close(embedding_worker *s)
{
    service_enter(s);
    s->closed = 1;
    service_match(s);
    service_leave(s);
}

uint64_t persia_embedding_worker_leave(embedding_worker *s)
{
    service_enter(s);
    s->leaving = 1;
    uint64_t left = s->stats.queued + s->stats.leased;
    const worker_rank *r = s->ranks;
    while (r && persia_clock_ns() - r->heard > QUIET_NS)
        r = r->next;
    if (!r)
        left = 0;
    service_leave(s);
    return left;
}

void persia_embedding_worker_interrupt(embedding_worker *s)
{
    persia_sched_interrupt(s->jobs);
    persia_sched_interrupt(s->waiting);
}

static void free_streams(worker_stream *t)
{
    while (t) {
        worker_stream *next = t->next;
        stream_free(t);
        t = next;
    }
}

static void service_free_all(embedding_worker *s)
{
    while (s->queue) {
        offer *o = s->queue;
        s->queue = o->next;
        offer_free(s, o);
    }
    while (s->leased) {
        offer *o = s->leased;
        s->leased = o->next;
        persia_batch_index_put(o->index);
        row_ids_free(&o->rows);
        offer_free(s, o);
    }
    free_streams(s->streams);
    free_streams(s->old);
    worker_jobs_free(s);
    while (s->ranks) {
        worker_rank *r = s->ranks;
        s->ranks = r->next;
        free(r->held);
        free(r);
    }
}

void persia_embedding_worker_destroy(embedding_worker *s)
{
    if (!s)
        return;
    persia_embedding_worker_close(s);
    persia_timer_stop(&s->timer);
    persia_sched_destroy(s->waiting);
    persia_sched_destroy(s->jobs);
    service_free_all(s);
    persia_client_destroy(s->look);
    persia_timer_free(&s->timer);
    pthread_mutex_destroy(&s->declaring);
    pthread_mutex_destroy(&s->looking);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void persia_embedding_worker_get_stats(embedding_worker *s,
                                       embedding_worker_stats *out)
{
    service_enter(s);
    const uint64_t now = persia_clock_ns();
    uint64_t since = now;
    *out = s->stats;
    for (const worker_stream *t = s->streams; t; t = t->next)
        out->loaders_gone += t->state == STREAM_GONE;
    for (const offer *o = s->queue; o; o = o->next) {
        out->withheld += (uint64_t)is_withheld(s, o, now);
        since = o->since < since ? o->since : since;
    }
    for (const offer *o = s->leased; o; o = o->next) {
        out->looking += o->state == OFFER_LOOKING;
        out->returning += o->state == OFFER_RETURNING;
        since = o->since < since ? o->since : since;
    }
    load_count(s, now, out);
    service_leave(s);
    out->oldest_ns = now - since;
    out->uptime_ns = now - s->born;
}
