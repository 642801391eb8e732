/* calls.c: requests to calls of the shard, their answers to replies. */
#include "server/private.h"

#include <stdio.h>

/* A request in hand.  It lies in its own memory. */
typedef struct request {
    ps_service *s;
    rpc_call *call;
    wire_memory memory;
    union {
        wire_hello hello;
        wire_declare declare;
        wire_pull pull;
        wire_push push;
        wire_leave leave;
        wire_rows rows;
        wire_snapshot snapshot;
        wire_restore restore;
        wire_stats stats;
    } m;
    shard_pull pull;
    shard_push push;
    shard_reply reply; /* until it is sent */
} request;

static void answered(void *ctx, int rc, shard_reply *reply);

/* ---- methods ------------------------------------------------------------ */

typedef struct method {
    const char *name;
    /* Decodes and calls; after an error the request is still the caller's. */
    int (*start)(request *r);
    int (*put)(wire_out *o, const void *reply);
    int stays; /* a server that stops may still write its rows */
} method;

#define DECODE(message)                                                       \
    persia_wire_get_##message(r->call->request, r->call->request_n,           \
                              &r->memory, &r->m.message)

#define START(op, message)                                                    \
    static int start_##op(request *r)                                         \
    {                                                                         \
        int rc = DECODE(message);                                             \
        if (!rc)                                                              \
            r->s->ref->ops->op(r->s->ref, &r->m.message, r->call->deadline,   \
                               answered, r);                                  \
        return rc;                                                            \
    }
START(hello, hello)
START(declare, declare)
START(leave, leave)
START(get_rows, rows)
START(put_rows, rows)
START(snapshot, snapshot)
START(restore, restore)
START(stats, stats)

static int start_pull(request *r)
{
    int rc = DECODE(pull);
    r->pull = (shard_pull){.m = &r->m.pull};
    if (!rc)
        r->s->ref->ops->pull(r->s->ref, &r->pull, r->call->deadline,
                             answered, r);
    return rc;
}

static int start_push(request *r)
{
    int rc = DECODE(push);
    r->push = (shard_push){.m = &r->m.push};
    if (!rc)
        r->s->ref->ops->push(r->s->ref, &r->push, r->call->deadline,
                             answered, r);
    return rc;
}

#define PUT(message)                                                          \
    static int put_##message(wire_out *o, const void *m)                      \
    {                                                                         \
        return persia_wire_put_##message(o, m);                               \
    }
PUT(hello_reply)
PUT(declare_reply)
PUT(pull_reply)
PUT(push_reply)
PUT(leave_reply)
PUT(rows)
PUT(snapshot_reply)
PUT(restore_reply)
PUT(stats_reply)

static const method methods[WIRE_METHODS_N] = {
    [WIRE_HELLO] = {"Hello", start_hello, put_hello_reply, 1},
    [WIRE_DECLARE] = {"Declare", start_declare, put_declare_reply, 0},
    [WIRE_PULL] = {"Pull", start_pull, put_pull_reply, 0},
    [WIRE_PUSH] = {"Push", start_push, put_push_reply, 0},
    [WIRE_LEAVE] = {"Leave", start_leave, put_leave_reply, 0},
    [WIRE_GET_ROWS] = {"GetRows", start_get_rows, put_rows, 0},
    [WIRE_PUT_ROWS] = {"PutRows", start_put_rows, put_rows, 0},
    [WIRE_SNAPSHOT] = {"Snapshot", start_snapshot, put_snapshot_reply, 1},
    [WIRE_RESTORE] = {"Restore", start_restore, put_restore_reply, 0},
    [WIRE_STATS] = {"Stats", start_stats, put_stats_reply, 1},
};

const rpc_methods persia_service_methods = {
    WIRE_SERVICE, persia_wire_paths, WIRE_METHODS_N,
    1u << WIRE_GET_ROWS | 1u << WIRE_PUT_ROWS | 1u << WIRE_SNAPSHOT |
        1u << WIRE_RESTORE};
_Static_assert(WIRE_METHODS_N <= 32, "a bit a method");

/* ---- answers ------------------------------------------------------------ */

static void request_free(request *r)
{
    wire_memory memory = r->memory; /* it lies in it */
    if (r->reply.release)
        r->reply.release(&r->reply);
    persia_wire_memory_free(&memory);
}

static void request_sent(void *owner)
{
    request_free(owner);
}

static void fail(ps_service *s, rpc_call *call, int rc)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", persia_err_text());
    shard_count_failed(s->shard);
    call->fail(call, rc, text);
}

static void answered(void *ctx, int rc, shard_reply *reply)
{
    request *r = ctx;
    ps_service *s = r->s;
    rpc_call *call = r->call;
    wire_out o;
    persia_wire_out_init(&o);
    r->reply = *reply;
    if (!rc)
        rc = methods[call->method].put(&o, reply->message);
    if (!rc)
        rc = shard_check_bytes(s->shard, "an answer", o.bytes);
    if (rc) {
        persia_wire_out_free(&o);
        request_free(r);
        fail(s, call, rc);
    } else if (r->reply.release) {
        call->reply(call, &o, request_sent, r);
    } else {
        request_free(r);
        call->reply(call, &o, NULL, NULL);
    }
}

/* ---- requests ----------------------------------------------------------- */

static int check_call(const ps_service *s, const rpc_call *call)
{
    const method *m = &methods[call->method];
    if (atomic_load(&s->closed) &&
        (call->method >= WIRE_METHODS_N || !m->stays))
        return persia_err_set(PERSIA_EUNAVAILABLE, "the server is stopping");
    if (call->method >= WIRE_METHODS_N)
        return persia_err_set(PERSIA_EPROTOCOL, "there is no method %u",
                              call->method);
    if (persia_service_methods.admin >> call->method & 1 && !call->admin)
        return persia_err_set(PERSIA_EDENIED,
                              "%s is administration: it needs the "
                              "administration token",
                              m->name);
    return PERSIA_OK;
}

void persia_service_handle(void *service, rpc_call *call)
{
    ps_service *s = service;
    wire_memory memory;
    request *r = NULL;
    persia_wire_memory_init(&memory);
    int rc = check_call(s, call);
    if (!rc && !(r = persia_wire_memory_take(&memory, sizeof *r)))
        rc = PERSIA_ENOMEM;
    if (!rc) {
        r->s = s;
        r->call = call;
        r->memory = memory;
        r->reply.release = NULL;
        rc = methods[call->method].start(r);
    }
    if (!rc)
        return;
    if (r)
        request_free(r);
    fail(s, call, rc);
}
