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

typedef struct order {
    node *at;
    rpc_call *call;
} order;

/* A call whose answer is lost. */
typedef struct lost {
    rpc_call call;
    rpc_call *outer;
} lost;

static void lost_end(rpc_call *call)
{
    lost *l = (lost *)call;
    (l->outer->fail)(l->outer, PERSIA_EUNAVAILABLE, "the answer was lost");
    free(l);
}

static void lost_reply(rpc_call *call, wire_out *o, void (*done)(void *),
                       void *owner)
{
    wire_out_free(o);
    if (done)
        done(owner);
    lost_end(call);
}

static void lost_fail(rpc_call *call, int code, const char *text)
{
    (void)code;
    (void)text;
    lost_end(call);
}

static int take(_Atomic(int) *n)
{
    int had = atomic_load(n);
    while (had > 0 && !atomic_compare_exchange_weak(n, &had, had - 1))
        ;
    return had > 0;
}

static void answer_garbage(rpc_call *call)
{
    wire_out o;
    wire_out_init(&o);
    wire_pull m = {.dtype = WIRE_BF16};
    assert_int_equal(wire_put_pull(&o, &m), PERSIA_OK);
    call->reply(call, &o, NULL, NULL);
}

static void answer_stale(rpc_call *call)
{
    wire_out o;
    wire_out_init(&o);
    wire_push_reply m = {.status = PUSH_STALE_LINEAGE};
    assert_int_equal(wire_put_push_reply(&o, &m), PERSIA_OK);
    call->reply(call, &o, NULL, NULL);
}

static void note_patience(node *at, const rpc_call *call)
{
    uint64_t now = clock_ns(), had = at->patience[call->method];
    uint64_t left = call->deadline > now ? call->deadline - now : 0;
    while (had < left && !atomic_compare_exchange_weak(
                             &at->patience[call->method], &had, left))
        ;
}

static void serve(node *at, rpc_call *call)
{
    uint32_t method = call->method;
    atomic_fetch_add(&at->waiting, 1);
    while ((atomic_load(&at->held) >> method & 1) && !atomic_load(&at->down))
        sched_yield();
    atomic_fetch_sub(&at->waiting, 1);
    at->calls[method]++;
    note_patience(at, call);
    if (atomic_load(&at->down)) {
        (call->fail)(call, PERSIA_EUNAVAILABLE, "no connection");
        return;
    }
    if (take(&at->garbage)) {
        answer_garbage(call);
        return;
    }
    if (method == WIRE_PUSH && take(&at->stale)) {
        answer_stale(call);
        return;
    }
    uint64_t chance = id_hash(at->turn++);
    int lose = (int)(chance >> 8 & 255) < atomic_load(&at->lose);
    if (lose && (chance & 1)) {
        (call->fail)(call, PERSIA_EUNAVAILABLE, "the request was lost");
        return;
    }
    if (lose || (method == WIRE_PUSH && atomic_load(&at->mute))) {
        lost *l = malloc(sizeof *l);
        assert_non_null(l);
        *l = (lost){*call, call};
        l->call.reply = lost_reply;
        l->call.fail = lost_fail;
        call = &l->call;
    }
    pthread_rwlock_rdlock(&at->lock);
    service_handle(at->service, call);
    pthread_rwlock_unlock(&at->lock);
}

static void *serve_main(void *arg)
{
    order o = *(order *)arg;
    free(arg);
    serve(o.at, o.call);
    atomic_fetch_sub(&o.at->active, 1);
    return NULL;
}

static void node_handle(void *ctx, rpc_call *call)
{
    node *at = ctx;
    pthread_t thread;
    order *o = malloc(sizeof *o);
    assert_non_null(o);
    *o = (order){at, call};
    atomic_fetch_add(&at->active, 1);
    assert_int_equal(pthread_create(&thread, NULL, serve_main, o), 0);
    pthread_detach(thread);
}

static void node_start(node *at)
{
    ps_config config = {.threads = 2};
    assert_int_equal(ps_create(&config, &at->p), PERSIA_OK);
    assert_int_equal(service_create(at->p, &at->config, &at->service),
                     PERSIA_OK);
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
    /* As a server does: parked calls fail, then all are through. */
    service_close(at->service);
    pthread_rwlock_wrlock(&at->lock);
    service_destroy(at->service);
    ps_destroy(at->p);
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
        rpc_channel *channel;
        assert_int_equal(rpc_channel_local(&service_methods, node_handle,
                                           &c->nodes[order[i]], &channel),
                         PERSIA_OK);
        assert_int_equal(shard_over(channel, c->addresses[order[i]],
                                    &refs[i]), PERSIA_OK);
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
        fail_msg("%s: %s", err_name(rc), err_text());
    return out;
}

uint64_t cluster_calls(const cluster *c, uint32_t method)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < c->n; i++)
        n += c->nodes[i].calls[method];
    return n;
}
