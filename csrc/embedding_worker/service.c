/* service.c: the life of an embedding worker; requests in, answers out; its
 * timer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"

#define TICK_NS ((uint64_t)250000000)

const rpc_methods persia_worker_methods = {WORKER_SERVICE, persia_worker_paths,
                                           WORKER_METHODS_N, 0};

/* ---- answers ------------------------------------------------------------ */

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

static uint64_t boot_now(embedding_worker *s)
{
    service_enter(s);
    const uint64_t boot = s->boot;
    service_leave(s);
    return boot;
}

static uint64_t servers_of(embedding_worker *s)
{
    service_enter(s);
    const uint64_t servers = s->servers;
    service_leave(s);
    return servers;
}

static int put_hello(const asking *a, wire_out *o)
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

static int put(asking *a, wire_out *o)
{
    embedding_worker *s = a->s;
    const batcher_counts *c = &a->counts;
    wire_worker_stats_reply stats = {0};
    switch (a->call->method) {
    case WORKER_HELLO:
        return put_hello(a, o);
    case WORKER_DECLARE:
        return persia_wire_put_plan_reply(
            o, &(wire_plan_reply){.created = a->status});
    case WORKER_SUBMIT:
    case WORKER_HEARTBEAT:
        return persia_wire_put_submit_reply(
            o, &(wire_submit_reply){a->status, a->done, a->done_n, a->first,
                                    a->failed, a->failed_n,
                                    servers_of(s)});
    case WORKER_TAKE:
        a->taken.status = a->status;
        a->taken.epoch = a->epoch;
        a->taken.loaders = a->parts;
        a->taken.loaders_n = a->parts_n;
        a->taken.job = a->job_id;
        a->taken.failed = a->job_failed;
        a->taken.silent = a->loaders_silent;
        a->taken.first = a->loaders_first;
        a->taken.servers = servers_of(s);
        return persia_wire_put_take_reply(o, &a->taken);
    case WORKER_RETURN:
        return persia_wire_put_return_reply(
            o, &(wire_return_reply){.status = a->status,
                                    .created = c->created,
                                    .refused = c->refused,
                                    .evicted = c->evicted,
                                    .nonfinite = c->nonfinite,
                                    .touched = c->touched,
                                    .servers = servers_of(s)});
    case WORKER_SUMS:
        return persia_wire_put_sums_reply(o, &a->summed);
    default:
        persia_embedding_worker_get_stats(s, &stats.stats);
        stats.boot = boot_now(s);
        return persia_wire_put_worker_stats_reply(o, &stats);
    }
}

void asking_answer(asking *a, int rc)
{
    rpc_call *call = a->call;
    wire_out o;
    persia_wire_out_init(&o);
    if (!rc)
        rc = put(a, &o);
    if (rc) {
        char text[512];
        snprintf(text, sizeof text, "%s", persia_err_text());
        persia_wire_out_free(&o);
        asking_free(a);
        call->fail(call, rc, text);
        return;
    }
    call->reply(call, &o, asking_sent, a);
}

/* ---- requests ----------------------------------------------------------- */

#define DECODE(message, to)                                                   \
    persia_wire_get_##message(call->request, call->request_n, &a->memory, to)

static int decode(asking *a)
{
    const rpc_call *call = a->call;
    switch (call->method) {
    case WORKER_HELLO:
        return DECODE(hello, &a->m.hello);
    case WORKER_DECLARE:
        return DECODE(plan, &a->m.plan);
    case WORKER_SUBMIT:
        return offer_make(call->request, call->request_n, &a->o);
    case WORKER_TAKE:
        return DECODE(take, &a->m.take);
    case WORKER_RETURN:
    case WORKER_SUMS:
        return DECODE(return, &a->m.back);
    case WORKER_STATS:
        return DECODE(stats, &a->m.stats);
    case WORKER_HEARTBEAT:
        return DECODE(heartbeat, &a->m.beat);
    default:
        return persia_err_set(PERSIA_EPROTOCOL, "there is no method %u",
                              call->method);
    }
}

static int check_hello(const embedding_worker *s, const wire_hello *m)
{
    const char *own = s->config.servers.name_space;
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

/* Of which life of this worker the caller is; 0: any. */
static uint64_t boot_of(const asking *a)
{
    switch (a->call->method) {
    case WORKER_DECLARE:
        return a->m.plan.caller.boot;
    case WORKER_SUBMIT:
        return a->o->m.caller.boot;
    case WORKER_TAKE:
        return a->m.take.caller.boot;
    case WORKER_HEARTBEAT:
        return a->m.beat.caller.boot;
    default:
        return 0;
    }
}

static void dispatch(asking *a)
{
    switch (a->call->method) {
    case WORKER_HELLO:
        service_hello(a);
        break;
    case WORKER_DECLARE:
        service_declare(a);
        break;
    case WORKER_SUBMIT:
        service_submit(a);
        break;
    case WORKER_HEARTBEAT:
        service_heartbeat(a);
        break;
    case WORKER_TAKE:
        service_take(a);
        break;
    case WORKER_RETURN:
        service_return(a);
        break;
    case WORKER_SUMS:
        service_sums(a);
        break;
    default:
        break;
    }
}

/* Requests of another life of this worker must say Hello again. */
static int begin(asking *a)
{
    embedding_worker *s = a->s;
    const uint64_t boot = boot_of(a);
    int rc = PERSIA_OK;
    service_enter(s);
    if (s->closed)
        rc = persia_err_set(PERSIA_EUNAVAILABLE, "the worker is stopping");
    else if (boot && boot != s->boot)
        rc = persia_err_set(PERSIA_ESTALE,
                            "the worker was started again, or the servers "
                            "have other rows now");
    else
        dispatch(a);
    service_leave(s);
    return rc;
}

static void refuse(rpc_call *call, int rc)
{
    char text[512];
    snprintf(text, sizeof text, "%s", persia_err_text());
    call->fail(call, rc, text);
}

void persia_embedding_worker_handle(void *service, rpc_call *call)
{
    embedding_worker *s = service;
    wire_memory memory;
    persia_wire_memory_init(&memory);
    asking *a = persia_wire_memory_take(&memory, sizeof *a);
    int rc = a ? PERSIA_OK : PERSIA_ENOMEM;
    if (a)
        *a = (asking){.s = s, .call = call, .memory = memory};
    if (!rc)
        rc = decode(a);
    if (!rc && call->method == WORKER_HELLO)
        rc = check_hello(s, &a->m.hello);
    if (!rc && call->method == WORKER_STATS)
        asking_answer(a, PERSIA_OK);
    else if (!rc)
        rc = begin(a);
    if (!rc)
        return;
    if (a && a->o)
        offer_free(s, a->o);
    memory = a ? a->memory : memory;
    persia_wire_memory_free(&memory);
    refuse(call, rc);
}

/* ---- life --------------------------------------------------------------- */

static void *timer_main(void *arg)
{
    embedding_worker *s = arg;
    service_enter(s);
    while (!s->closed) {
        service_tick(s);
        service_leave(s);
        service_enter(s);
        if (!s->closed)
            persia_cond_wait_until(&s->wake, &s->lock,
                                   persia_clock_ns() + TICK_NS);
    }
    service_leave(s);
    return NULL;
}

static int start(embedding_worker *s)
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
        rc = persia_thread_start(&s->timer, timer_main, s, "persia-worker");
    s->timer_runs = !rc;
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
    persia_cond_init(&s->wake);
    window_init(&s->leases, s->ring, WORKER_LEASES / 64);
    int rc = start(s);
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
    pthread_cond_signal(&s->wake);
    service_match(s);
    service_leave(s);
}

/* It looks at the servers again and again. */
uint64_t persia_embedding_worker_held(embedding_worker *s)
{
    return persia_client_held(s->look);
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

static void free_all(embedding_worker *s)
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
    if (s->timer_runs)
        persia_thread_join(s->timer);
    persia_sched_destroy(s->waiting);
    persia_sched_destroy(s->jobs);
    free_all(s);
    persia_client_destroy(s->look);
    pthread_cond_destroy(&s->wake);
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
