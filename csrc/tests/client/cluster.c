#include "cluster.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Atomic(int) cluster_answering;

/* A client's way to a node. */
typedef struct way {
    shard_ref ref; /* first */
    node *at;
    struct way *next;
    shard_ref *shard;      /* in the node's present life */
    _Atomic(int) active;   /* calls that a thread works on */
    _Atomic(int) closed;
} way;

/* A call, on its way there, or, where its answer is lost, back. */
typedef struct order {
    way *by;
    uint32_t method;
    const void *arguments;
    uint64_t deadline;
    shard_done done;
    void *ctx;
} order;

static void refuse(const order *o, int code, const char *text)
{
    shard_reply none = {0};
    o->done(o->ctx, persia_err_set(code, "%s", text), &none);
}

static void lose_answer(void *ctx, int rc, shard_reply *reply)
{
    order *o = ctx;
    (void)rc;
    persia_shard_release(reply);
    refuse(o, PERSIA_EUNAVAILABLE, "the answer was lost");
    free(o);
}

static int take(_Atomic(int) *n)
{
    int had = atomic_load(n);
    while (had > 0 && !atomic_compare_exchange_weak(n, &had, had - 1))
        ;
    return had > 0;
}

static void answer_stale(const order *o)
{
    const wire_push_reply m = {.status = PUSH_STALE_LINEAGE};
    shard_reply reply = {.message = &m};
    o->done(o->ctx, PERSIA_OK, &reply);
}

static void note_patience(node *at, const order *o)
{
    uint64_t now = persia_clock_ns(), had = at->patience[o->method];
    uint64_t left = o->deadline > now ? o->deadline - now : 0;
    while (had < left && !atomic_compare_exchange_weak(
                             &at->patience[o->method], &had, left))
        ;
}

static void pass_on(const order *o)
{
    node *at = o->by->at;
    pthread_rwlock_rdlock(&at->lock);
    shard_begin(o->by->shard, o->method, o->arguments, o->deadline, o->done,
                o->ctx);
    pthread_rwlock_unlock(&at->lock);
}

static void pass_on_and_lose(const order *o)
{
    order *back = malloc(sizeof *back), there = *o;
    assert_non_null(back);
    *back = *o;
    there.done = lose_answer;
    there.ctx = back;
    pass_on(&there);
}

static void serve(const order *o)
{
    node *at = o->by->at;
    const uint32_t method = o->method;
    atomic_fetch_add(&at->waiting, 1);
    while ((atomic_load(&at->held) >> method & 1) &&
           !atomic_load(&at->down) && !atomic_load(&o->by->closed))
        sched_yield();
    atomic_fetch_sub(&at->waiting, 1);
    if (atomic_load(&o->by->closed)) {
        refuse(o, PERSIA_ECLOSED, "the way was closed");
        return;
    }
    at->calls[method]++;
    note_patience(at, o);
    if (atomic_load(&at->down)) {
        refuse(o, PERSIA_EUNAVAILABLE, "no connection");
        return;
    }
    if (atomic_load(&at->recovers) && method != WIRE_STATS) {
        refuse(o, PERSIA_EUNAVAILABLE, "the server recovers");
        return;
    }
    if (method == WIRE_HELLO && take(&at->full)) {
        refuse(o, PERSIA_EUNAVAILABLE, "the disk does not take the log");
        return;
    }
    if (take(&at->garbage)) {
        refuse(o, PERSIA_EPROTOCOL, "the answer is no message");
        return;
    }
    if (method == WIRE_PUSH && take(&at->stale)) {
        answer_stale(o);
        return;
    }
    uint64_t chance = id_hash(at->turn++);
    int lose = (int)(chance >> 8 & 255) < atomic_load(&at->lose);
    if (lose && (chance & 1))
        refuse(o, PERSIA_EUNAVAILABLE, "the request was lost");
    else if (lose || (method == WIRE_PUSH && atomic_load(&at->mute)))
        pass_on_and_lose(o);
    else
        pass_on(o);
}

static void *serve_main(void *arg)
{
    order o = *(order *)arg;
    node *at = o.by->at;
    free(arg);
    serve(&o);
    atomic_fetch_sub(&o.by->active, 1);
    atomic_fetch_sub(&at->active, 1);
    atomic_fetch_sub(&cluster_answering, 1);
    return NULL;
}

static void way_call(shard_ref *to, uint32_t method, const void *arguments,
                     uint64_t deadline, shard_done done, void *ctx)
{
    way *w = (way *)to;
    pthread_t thread;
    order *o = malloc(sizeof *o);
    assert_non_null(o);
    *o = (order){w, method, arguments, deadline, done, ctx};
    atomic_fetch_add(&cluster_answering, 1);
    atomic_fetch_add(&w->at->active, 1);
    atomic_fetch_add(&w->active, 1);
    assert_int_equal(pthread_create(&thread, NULL, serve_main, o), 0);
    pthread_detach(thread);
}

#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    static void way_##name(shard_ref *to,                                     \
                           const OP_ARGS(name, message, args) * a,            \
                           uint64_t deadline, shard_done done, void *ctx)     \
    {                                                                         \
        way_call(to, WIRE_##upper, a, deadline, done, ctx);                   \
    }
SHARD_OPS(SHARD_OP)
#undef SHARD_OP

static void way_close(shard_ref *to)
{
    way *w = (way *)to;
    node *at = w->at;
    atomic_store(&w->closed, 1);
    while (atomic_load(&w->active))
        sched_yield();
    pthread_rwlock_wrlock(&at->lock);
    struct way **link = &at->ways;
    while (*link != w)
        link = &(*link)->next;
    *link = w->next;
    w->shard->ops->close(w->shard); /* ends its calls that wait there */
    pthread_rwlock_unlock(&at->lock);
    free(w);
}

static const shard_ops way_ops = {
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    .name = way_##name,
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    .close = way_close,
};

static void way_lead(way *w)
{
    shard *s = persia_service_shard(w->at->service);
    assert_int_equal(persia_shard_direct(s, &w->shard), PERSIA_OK);
}

static shard_ref *way_to(node *at, const char *address)
{
    way *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->ref = (shard_ref){.ops = &way_ops, .address = address,
                         .message_limit = at->config.message_limit};
    w->at = at;
    pthread_rwlock_wrlock(&at->lock);
    way_lead(w);
    w->next = at->ways;
    at->ways = w;
    pthread_rwlock_unlock(&at->lock);
    return &w->ref;
}

static void node_start(node *at)
{
    tables_config config = {.threads = 2};
    assert_int_equal(persia_tables_create(&config, &at->p), PERSIA_OK);
    assert_int_equal(persia_service_create(at->p, &at->config, &at->service),
                     PERSIA_OK);
    for (way *w = at->ways; w; w = w->next)
        way_lead(w);
}

void cluster_make(cluster *c, uint32_t shards)
{
    memset(c, 0, sizeof *c);
    c->n = shards;
    for (uint32_t i = 0; i < shards; i++) {
        node *at = &c->nodes[i];
        at->config = (service_config){.name_space = "test", .shard = i,
                                      .shards = shards,
                                      .message_limit = 64 << 20};
        pthread_rwlock_init(&at->lock, NULL);
        node_start(at);
        snprintf(c->names[i], sizeof c->names[i], "ps%u:8888", i);
        c->addresses[i] = c->names[i];
    }
}

static void node_stop(node *at)
{
    pthread_rwlock_wrlock(&at->lock);
    /* As a server does: parked calls fail, then all are through. */
    for (way *w = at->ways; w; w = w->next) {
        persia_shard_refuse(w->shard, PERSIA_EUNAVAILABLE,
                            "the server is stopping");
        w->shard->ops->close(w->shard);
    }
    persia_service_destroy(at->service);
    persia_tables_destroy(at->p);
    at->service = NULL;
    pthread_rwlock_unlock(&at->lock);
}

void cluster_free(cluster *c)
{
    for (uint32_t i = 0; i < c->n; i++) {
        node *at = &c->nodes[i];
        at->held = 0;
        while (atomic_load(&at->active))
            sched_yield();
        node_stop(at);
        pthread_rwlock_destroy(&at->lock);
    }
}

void cluster_restart(cluster *c, uint32_t shard)
{
    node *at = &c->nodes[shard];
    atomic_store(&at->down, 1);
    while (atomic_load(&at->active))
        sched_yield();
    node_stop(at);
    node_start(at);
    atomic_store(&at->down, 0);
}

client_config cluster_config(cluster *c)
{
    return (client_config){.threads = 2,
                           .addresses = c->addresses,
                           .addresses_n = c->n,
                           .name_space = "test",
                           .rank = 0,
                           .world = 1,
                           .stream = 77,
                           .timeout_ns = 20000000000u,
                           .message_limit = 64 << 20,
                           .dtype = WIRE_FP32};
}

int cluster_open(cluster *c, const client_config *config,
                 const uint32_t *order, size_t n, ps_client **out)
{
    shard_ref *refs[2 * NODES_MAX];
    const char *addresses[2 * NODES_MAX];
    client_config mine = *config;
    for (size_t i = 0; i < n; i++) {
        refs[i] = way_to(&c->nodes[order[i]], c->addresses[order[i]]);
        addresses[i] = c->addresses[order[i]];
    }
    mine.addresses = addresses;
    mine.addresses_n = n;
    return client_over(&mine, refs, out);
}

ps_client *cluster_client(cluster *c, const client_config *config)
{
    uint32_t order[NODES_MAX];
    ps_client *out;
    for (uint32_t i = 0; i < c->n; i++)
        order[i] = i;
    int rc = cluster_open(c, config, order, c->n, &out);
    if (rc)
        fail_msg("%s: %s", persia_err_name(rc), persia_err_text());
    return out;
}

uint64_t cluster_calls(const cluster *c, uint32_t method)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < c->n; i++)
        n += c->nodes[i].calls[method];
    return n;
}
