#include "help.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000,
                                 .tv_nsec = ms % 1000 * 1000000},
              NULL);
}

/* ---- messages ---- */

unsigned char pattern(uint64_t seed, size_t i)
{
    uint64_t x = (seed + i / 8 + 1) * 0x9E3779B97F4A7C15u;
    return (unsigned char)(x >> (8 * (i % 8)));
}

unsigned char *pattern_make(uint64_t seed, size_t n)
{
    unsigned char *data = malloc(n + 1);
    assert_non_null(data);
    for (size_t i = 0; i < n; i++)
        data[i] = pattern(seed, i);
    return data;
}

size_t pattern_differs(uint64_t seed, const void *data, size_t n)
{
    const unsigned char *d = data;
    size_t i = 0;
    while (i < n && d[i] == pattern(seed, i))
        i++;
    return i;
}

wire_out message_of(const void *data, size_t n, size_t pieces)
{
    wire_out o;
    persia_wire_out_init(&o);
    /* As wire's encoders make them; persia_wire_out_free() frees it. */
    o.spans = calloc(pieces + 1, sizeof *o.spans);
    assert_non_null(o.spans);
    o.spans_room = pieces + 1;
    size_t at = 0;
    for (size_t i = 0; i < pieces && n; i++) {
        size_t end = i + 1 == pieces ? n : n * (i + 1) / pieces;
        if (end == at)
            continue;
        o.spans[o.spans_n++] = (wire_span){(const char *)data + at, end - at};
        at = end;
    }
    o.bytes = n;
    return o;
}

/* ---- the server's side ---- */

static void reply_freed(void *owner)
{
    deck *d = owner;
    pthread_mutex_lock(&d->lock);
    d->replies_freed++;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

static void *deck_main(void *arg)
{
    deck *d = arg;
    pthread_mutex_lock(&d->lock);
    while (!d->stop || d->late_n) {
        if (!d->late_n) {
            pthread_cond_wait(&d->changed, &d->lock);
            continue;
        }
        rpc_call *call = d->late[--d->late_n];
        pthread_mutex_unlock(&d->lock);
        /* The request may go with the call: gRPC has its own copy. */
        unsigned char *copy = malloc(call->request_n + 1);
        memcpy(copy, call->request, call->request_n);
        wire_out o = message_of(copy, call->request_n, 3);
        call->reply(call, &o, free, copy);
        pthread_mutex_lock(&d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

void deck_start(deck *d)
{
    *d = (deck){.lock = PTHREAD_MUTEX_INITIALIZER,
                .changed = PTHREAD_COND_INITIALIZER};
    assert_int_equal(persia_sched_create(2, &d->s), PERSIA_OK);
    assert_int_equal(pthread_create(&d->thread, NULL, deck_main, d), 0);
}

void deck_stop(deck *d)
{
    pthread_mutex_lock(&d->lock);
    d->stop = 1;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    pthread_join(d->thread, NULL);
    persia_sched_destroy(d->s);
}

void deck_wait_parked(deck *d, unsigned n)
{
    pthread_mutex_lock(&d->lock);
    while (d->parked_n < n)
        pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

static void reply_request(rpc_call *call, deck *d)
{
    unsigned char *copy = malloc(call->request_n + 1);
    memcpy(copy, call->request, call->request_n);
    wire_out o = message_of(copy, call->request_n, 1);
    (void)d;
    call->reply(call, &o, free, copy);
}

void deck_release(deck *d)
{
    pthread_mutex_lock(&d->lock);
    while (d->parked_n) {
        rpc_call *call = d->parked[--d->parked_n];
        pthread_mutex_unlock(&d->lock);
        reply_request(call, d);
        pthread_mutex_lock(&d->lock);
    }
    pthread_mutex_unlock(&d->lock);
}

static void reply_text(rpc_call *call, const char *text, deck *d)
{
    wire_out o = message_of(text, strlen(text), 1);
    call->reply(call, &o, reply_freed, d);
}

static void fail_as_told(rpc_call *call)
{
    uint32_t code;
    char text[4096] = "";
    memcpy(&code, call->request, sizeof code);
    size_t n = call->request_n - sizeof code;
    if (n >= sizeof text)
        n = sizeof text - 1;
    memcpy(text, (const char *)call->request + sizeof code, n);
    (call->fail)(call, (int)code, text);
}

static void reply_bytes(rpc_call *call)
{
    uint64_t n;
    memcpy(&n, call->request, sizeof n);
    unsigned char *data = pattern_make(n, n);
    wire_out o = message_of(data, n, 1);
    call->reply(call, &o, free, data);
}

static void reply_deadline(rpc_call *call)
{
    uint64_t *ms = malloc(sizeof *ms);
    uint64_t now = persia_clock_ns();
    *ms = call->deadline > now ? (call->deadline - now) / 1000000 : 0;
    wire_out o = message_of(ms, sizeof *ms, 1);
    call->reply(call, &o, free, ms);
}

void deck_handle(void *ctx, rpc_call *call)
{
    deck *d = ctx;
    pthread_mutex_lock(&d->lock);
    d->requests++;
    int aligned = (uintptr_t)call->request % 64 == 0;
    switch (aligned ? call->method : (uint32_t)WIRE_METHODS_N) {
    case WIRE_PULL:
        d->late[d->late_n++] = call;
        pthread_cond_broadcast(&d->changed);
        pthread_mutex_unlock(&d->lock);
        return;
    case WIRE_PUSH:
        d->parked[d->parked_n++] = call;
        pthread_cond_broadcast(&d->changed);
        pthread_mutex_unlock(&d->lock);
        return;
    default:
        break;
    }
    pthread_mutex_unlock(&d->lock);
    switch (aligned ? call->method : (uint32_t)WIRE_METHODS_N) {
    case WIRE_HELLO:
        reply_request(call, d);
        return;
    case WIRE_LEAVE:
        fail_as_told(call);
        return;
    case WIRE_STATS:
    case WIRE_SNAPSHOT:
        reply_text(call, call->who->roles & RPC_ADMIN ? "admin" : "user", d);
        return;
    case WIRE_DECLARE:
        reply_bytes(call);
        return;
    case WIRE_RESTORE:
        reply_deadline(call);
        return;
    default:
        (call->fail)(call, PERSIA_EINTERNAL, "the request is not aligned");
    }
}

static const uint32_t roles[WIRE_METHODS_N] = {
    [WIRE_HELLO] = RPC_ALL,     [WIRE_DECLARE] = RPC_TRAIN,
    [WIRE_PULL] = RPC_TRAIN,    [WIRE_PUSH] = RPC_TRAIN,
    [WIRE_LEAVE] = RPC_TRAIN,   [WIRE_STATS] = RPC_ALL,
    [WIRE_SNAPSHOT] = RPC_ADMIN, [WIRE_RESTORE] = RPC_ADMIN,
};

const rpc_methods test_methods = {WIRE_SERVICE, persia_wire_paths,
                                  WIRE_METHODS_N, 1u << WIRE_SNAPSHOT, roles};

rpc_server_config server_config_of(deck *d)
{
    return (rpc_server_config){.address = "127.0.0.1:0",
                               .threads = 2,
                               .message_limit = 64 << 20,
                               .calls_max = 64,
                               .s = d->s,
                               .methods = &test_methods,
                               .handler = deck_handle,
                               .ctx = d};
}

rpc_server *server_of(deck *d)
{
    rpc_server_config config = server_config_of(d);
    rpc_server *s;
    if (persia_rpc_server_start(&config, &s) != PERSIA_OK)
        fail_msg("%s", persia_err_text());
    assert_true(persia_rpc_server_port(s) > 0);
    return s;
}

/* ---- the client's side ---- */

rpc_channel *channel_with(int port, const rpc_security *security)
{
    char address[64];
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    rpc_channel_config config = {.address = address,
                                 .message_limit = 64 << 20,
                                 .keepalive_ns = 5 * SECOND,
                                 .methods = &test_methods};
    if (security)
        config.security = *security;
    rpc_channel *c;
    if (persia_rpc_channel_open(&config, &c) != PERSIA_OK)
        fail_msg("%s", persia_err_text());
    assert_string_equal(persia_rpc_channel_address(c), address);
    return c;
}

rpc_channel *channel_to(int port)
{
    return channel_with(port, NULL);
}

typedef struct waiter {
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t answered;
    int done, code;
    rpc_reply reply;
    char text[1024]; /* of an error */
} waiter;

static void waiter_answer(void *ctx, int code, rpc_reply *reply)
{
    waiter *w = ctx;
    pthread_mutex_lock(&w->lock);
    w->code = code;
    w->reply = *reply;
    if (code != PERSIA_OK)
        snprintf(w->text, sizeof w->text, "%s", persia_err_text());
    w->done = 1;
    pthread_cond_signal(&w->answered);
    pthread_mutex_unlock(&w->lock);
}

int rpc_wait(rpc_channel *c, uint32_t method, wire_out *o,
             uint64_t timeout_ns, rpc_reply *reply)
{
    waiter w = {.lock = PTHREAD_MUTEX_INITIALIZER,
                .answered = PTHREAD_COND_INITIALIZER};
    *reply = (rpc_reply){0};
    int code = persia_rpc_start(c, method, o, timeout_ns, waiter_answer, &w);
    if (code != PERSIA_OK)
        return code;
    pthread_mutex_lock(&w.lock);
    while (!w.done)
        pthread_cond_wait(&w.answered, &w.lock);
    pthread_mutex_unlock(&w.lock);
    *reply = w.reply;
    return w.code != PERSIA_OK ? persia_err_set(w.code, "%s", w.text)
                               : PERSIA_OK;
}

void echo(rpc_channel *c, uint32_t method, uint64_t seed, size_t n)
{
    unsigned char *data = pattern_make(seed, n);
    wire_out o = message_of(data, n, n > 100000 ? 7 : 2);
    rpc_reply reply;
    if (rpc_wait(c, method, &o, 60 * SECOND, &reply) != PERSIA_OK)
        fail_msg("%s", persia_err_text());
    assert_null(o.spans);
    assert_int_equal(reply.n, n);
    assert_int_equal((uintptr_t)reply.data % 64, 0);
    assert_int_equal(pattern_differs(seed, reply.data, n), n);
    persia_rpc_reply_free(&reply);
    assert_null(reply.data);
    free(data);
}

int call_with(rpc_channel *c, uint32_t method, const void *data, size_t n,
              uint64_t timeout_ns)
{
    wire_out o = message_of(data, n, 1);
    rpc_reply reply;
    int code = rpc_wait(c, method, &o, timeout_ns, &reply);
    persia_rpc_reply_free(&reply);
    return code;
}

int call_leave_with(rpc_channel *c, int code, const char *text)
{
    char data[8192];
    uint32_t number = (uint32_t)code;
    size_t n = strlen(text);
    memcpy(data, &number, sizeof number);
    memcpy(data + sizeof number, text, n);
    return call_with(c, WIRE_LEAVE, data, sizeof number + n, 30 * SECOND);
}
