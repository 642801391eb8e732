/* calls.c: requests to calls of the shard, their answers to replies. */
#include "server/private.h"

#include <stdio.h>
#include <string.h>

#include "trace/trace.h"

/* A request that is not answered.  It lies in its own memory. */
typedef struct request {
    ps_service *s;
    rpc_call *call;
    wire_memory memory;
    uint64_t began;
    enum rpc_reason why; /* it is denied */
    union {
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    wire_##message name;
        SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    } m;
    shard_pull pull;
    shard_push push;
    shard_reply reply; /* until it is sent */
} request;

static void calls_answered(void *ctx, int rc, shard_reply *reply);

/* ---- methods ------------------------------------------------------------ */

/* Of a push, for the log. */
static void calls_keep_raw(request *r)
{
    r->push.raw = r->call->request;
    r->push.raw_n = r->call->request_n;
}

static int request_deny(request *r, enum rpc_reason why, const char *what)
{
    r->why = why;
    return persia_rpc_deny(r->call, why, what);
}

/* Whether the caller may use the table; without a table it may. */
static int request_check_table(request *r, uint32_t no)
{
    const table *t = persia_tables_table(persia_shard_tables(r->s->shard), no);
    const char *name = t ? persia_table_get_config(t)->name : NULL;
    if (!name || persia_rpc_tables(r->call->who, name))
        return PERSIA_OK;
    return request_deny(r, RPC_TABLE, name);
}

static int request_check_tables(request *r)
{
    int rc = PERSIA_OK;
    switch (r->call->method) {
    case WIRE_DECLARE:
        if (!persia_rpc_tables(r->call->who, r->m.declare.table.name))
            rc = request_deny(r, RPC_TABLE, r->m.declare.table.name);
        return rc;
    case WIRE_PULL:
        for (size_t i = 0; i < r->m.pull.tables_n && !rc; i++)
            rc = request_check_table(r, r->m.pull.tables[i].no);
        return rc;
    case WIRE_PUSH:
        for (size_t i = 0; i < r->m.push.tables_n && !rc; i++)
            rc = request_check_table(r, r->m.push.tables[i].grads.no);
        return rc;
    case WIRE_GET_ROWS:
        return request_check_table(r, r->m.get_rows.no);
    case WIRE_CHANGES:
        return request_check_table(r, r->m.changes.no);
    default:
        return PERSIA_OK;
    }
}

static int request_check_there(request *r, const char *name)
{
    const tables *p = persia_shard_tables(r->s->shard);
    for (uint32_t no = 0; no < persia_tables_tables(p); no++)
        if (!strcmp(
                persia_table_get_config(persia_tables_table(p, no))->name,
                name))
            return PERSIA_OK;
    return request_deny(r, RPC_ROLE, "a new table");
}

/* A call may ask for more than its method needs: only the role train makes
 * tables and has a stream. */
static int request_check(request *r)
{
    const rpc_who *who = r->call->who;
    const int trains = (who->roles & RPC_TRAIN) != 0;
    int rc = PERSIA_OK;
    if (r->call->method == WIRE_HELLO && !trains &&
        (r->m.hello.stream || r->m.hello.restore))
        rc = request_deny(r, RPC_ROLE, "a stream");
    else if (r->call->method == WIRE_DECLARE && !trains)
        rc = request_check_there(r, r->m.declare.table.name);
    return rc || !who->tables ? rc : request_check_tables(r);
}

/* The arguments of a call: the message, or a struct around it. */
#define ARGS_PLAIN(r, name) (&(r)->m.name)
#define ARGS_JOBS(r, name)                                                    \
    ((r)->name = (shard_##name){.m = &(r)->m.name}, calls_keep_raw(r),        \
     &(r)->name)

#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    static int start_##name(request *r)                                       \
    {                                                                         \
        int rc = persia_wire_get_##message(                                   \
            r->call->request, r->call->request_n, &r->memory, &r->m.name);    \
        if (!rc)                                                              \
            rc = request_check(r);                                            \
        if (!rc)                                                              \
            r->s->ref->ops->name(r->s->ref, ARGS_##args(r, name),             \
                                 r->call->deadline, calls_answered, r);       \
        return rc;                                                            \
    }                                                                         \
    static int put_##name(wire_out *o, const void *m)                         \
    {                                                                         \
        return persia_wire_put_##reply(o, m);                                 \
    }                                                                         \
    static const wire_caller *calls_caller_##name(const request *r)           \
    {                                                                         \
        return &r->m.name.caller;                                             \
    }
SHARD_OPS(SHARD_OP)
#undef SHARD_OP

static const struct {
    /* Decodes and calls; after an error the request is still the caller's. */
    int (*start)(request *r);
    int (*put)(wire_out *o, const void *reply);
    const wire_caller *(*caller)(const request *r);
    int flags;
} methods[WIRE_METHODS_N] = { /* Many is a host's */
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    [WIRE_##upper] = {start_##name, put_##name, calls_caller_##name, flags},
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
};

/* ---- lines of the log --------------------------------------------------- */

enum { PEER = 128, LINE_MORE = 4 /* fields */ };

static const char *calls_peer_of(rpc_call *call, char *out)
{
    snprintf(out, PEER, "this process");
    if (call->peer)
        call->peer(call, out, PEER);
    return out;
}

void persia_service_denied(void *service, const char *method, const char *peer,
                           const char *name, const char *reason)
{
    ps_service *s = service;
    service_wake(s, persia_lines_denied(&s->lines, method, peer, name,
                                        reason));
}

/* A call that the gate of its server has let in. */
static void calls_line_denied(ps_service *s, rpc_call *call,
                              enum rpc_reason why)
{
    char peer[PEER];
    persia_service_denied(s, persia_wire_paths[call->method],
                          calls_peer_of(call, peer),
                          call->who ? call->who->name : "",
                          persia_rpc_reasons[why]);
}

/* A line that begins with who asked. */
static void calls_line_of(const request *r, enum line_kind kind,
                          uint64_t client, const line_field *more, size_t n)
{
    ps_service *s = r->s;
    char peer[PEER];
    line_field fields[3 + LINE_MORE] = {
        {.name = "peer", .text = calls_peer_of(r->call, peer)}};
    size_t k = 1;
    assert(n <= LINE_MORE);
    if (r->call->who->name[0])
        fields[k++] = (line_field){.name = "name", .text = r->call->who->name};
    fields[k++] = (line_field){.name = "client", .number = client, .hex = 1};
    memcpy(fields + k, more, n * sizeof *more);
    service_wake(s, persia_lines_write(&s->lines, kind, fields, k + n));
}

static void calls_line_rows(const request *r)
{
    const wire_rows *m = &r->m.put_rows;
    const table *t =
        persia_tables_table(persia_shard_tables(r->s->shard), m->no);
    const enum line_kind kind = m->drop    ? LINE_DROPPED
                                : m->erase ? LINE_ERASED
                                : m->clear ? LINE_CLEARED
                                           : LINE_SET;
    if (!t)
        return;
    const line_field more[] = {
        {.name = "table", .text = persia_table_get_config(t)->name},
        {.name = "ids", .number = m->n}};
    calls_line_of(r, kind, m->caller.client, more,
                  kind == LINE_ERASED || kind == LINE_SET ? 2 : 1);
}

/* At its end: what it wrote is whole, or it failed. */
static void calls_line_snapshot(const request *r,
                                const wire_snapshot_reply *reply)
{
    const wire_snapshot *m = &r->m.snapshot;
    const line_field more[] = {
        {.name = "root", .text = m->root},
        {.name = "folder", .text = m->folder},
        {.name = "rows", .number = reply->rows_written}};
    if (reply->whole || reply->failed)
        calls_line_of(r, reply->whole ? LINE_WRITTEN : LINE_NOT_WRITTEN,
                      m->caller.client, more, 3);
}

static void calls_line_restore(const request *r,
                               const wire_restore_reply *reply)
{
    const wire_restore *m = &r->m.restore;
    const line_field more[] = {
        {.name = "root", .text = m->root},
        {.name = "folder", .text = m->folder},
        {.name = "lineage", .number = m->lineage, .hex = 1},
        {.name = "rows", .number = reply->rows}};
    if (m->verb == RESTORE_COMMIT && reply->done)
        calls_line_of(r, LINE_RESTORED, m->caller.client, more, 4);
}

static void calls_line_hello(const request *r, const wire_hello_reply *reply)
{
    const wire_hello *m = &r->m.hello;
    const line_field more[] = {
        {.name = "rank", .number = m->rank},
        {.name = "stream", .number = m->stream, .hex = 1},
        {.name = "incarnation", .number = m->caller.incarnation}};
    if (reply->taken)
        calls_line_of(r, LINE_TAKEOVER, m->caller.client, more, 3);
}

/* What a call has changed for others than its client. */
static void calls_line_change(const request *r, const void *reply)
{
    if (r->call->method == WIRE_PUT_ROWS)
        calls_line_rows(r);
    else if (r->call->method == WIRE_RESTORE)
        calls_line_restore(r, reply);
    else if (r->call->method == WIRE_SNAPSHOT)
        calls_line_snapshot(r, reply);
    else if (r->call->method == WIRE_HELLO)
        calls_line_hello(r, reply);
}

/* ---- traces, and calls that took long ----------------------------------- */

static void calls_note_slow(const request *r)
{
    slow_calls *s = &r->s->slow;
    const uint64_t ns = persia_clock_ns() - r->began;
    if (!s->over_ns || ns <= s->over_ns)
        return;
    wire_slow_call c = {.method = r->call->method,
                        .ns = ns,
                        .at = persia_clock_seconds(),
                        .bytes = r->call->request_n};
    char peer[PEER];
    snprintf(c.peer, sizeof c.peer, "%s", calls_peer_of(r->call, peer));
    c.client = methods[r->call->method].caller(r)->client;
    slow_note(s, &c);
}

/* The statistics with those calls. */
static int calls_put_slow(request *r, wire_out *o, const void *reply)
{
    wire_stats_reply m = *(const wire_stats_reply *)reply;
    int rc = slow_list(&r->s->slow, &r->memory, &m.slow, &m.slow_n);
    return rc ? rc : persia_wire_put_stats_reply(o, &m);
}

/* What a client asked for a batch that is traced. */
static void calls_trace(const request *r, int rc, size_t bytes)
{
    trace_span t = {0};
    if (r->call->method == WIRE_PULL) {
        const wire_pull *m = &r->m.pull;
        persia_trace_below(&t, TRACE_PULL, &m->trace, r->began);
        for (size_t i = 0; i < m->tables_n; i++)
            t.rows += m->tables[i].n;
        t.bytes = bytes;
    } else if (r->call->method == WIRE_PUSH) {
        const wire_push *m = &r->m.push;
        persia_trace_below(&t, TRACE_PUSH, &m->trace, r->began);
        for (size_t i = 0; i < m->tables_n; i++)
            t.rows += m->tables[i].grads.n;
        t.bytes = r->call->request_n;
        t.stream = m->stream;
        t.number = m->number;
    }
    t.shard = persia_shard_no(r->s->shard);
    persia_trace_end(&t, rc);
}

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

static void calls_fail(ps_service *s, rpc_call *call, int rc)
{
    err_kept error;
    persia_err_keep(&error, rc);
    persia_shard_count_failed(s->shard);
    call->fail(call, rc, error.text);
}

static void calls_answered(void *ctx, int rc, shard_reply *reply)
{
    request *r = ctx;
    ps_service *s = r->s;
    rpc_call *call = r->call;
    wire_out o;
    persia_wire_out_init(&o);
    r->reply = *reply;
    if (!rc)
        calls_line_change(r, reply->message);
    if (!rc && call->method == WIRE_STATS && r->m.stats.slow)
        rc = calls_put_slow(r, &o, reply->message);
    else if (!rc)
        rc = methods[call->method].put(&o, reply->message);
    if (!rc)
        rc = persia_shard_check_bytes(s->shard, "an answer", o.bytes);
    calls_trace(r, rc, o.bytes);
    calls_note_slow(r);
    if (rc) {
        persia_wire_out_free(&o);
        request_free(r);
        calls_fail(s, call, rc);
    } else if (r->reply.release) {
        call->reply(call, &o, request_sent, r);
    } else {
        request_free(r);
        call->reply(call, &o, NULL, NULL);
    }
}

/* ---- requests ----------------------------------------------------------- */

static int check_call(ps_service *s, rpc_call *call)
{
    const uint32_t method = call->method;
    const int flags = method < WIRE_METHODS_N ? methods[method].flags : 0;
    if (atomic_load(&s->closed) && !(flags & OP_STAYS))
        return persia_err_set(PERSIA_EUNAVAILABLE, "the server is stopping");
    if (method >= WIRE_METHODS_N || !methods[method].start)
        return persia_err_set(PERSIA_EPROTOCOL, "there is no method %u",
                              method);
    const int rc = persia_rpc_may(&persia_shard_methods, call);
    return rc || method == WIRE_STATS ? rc
                                      : persia_shard_check_ready(s->shard);
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
        r->began = persia_clock_ns();
        r->why = RPC_ROLE;
        r->reply.release = NULL;
        rc = methods[call->method].start(r);
    }
    if (!rc)
        return;
    if (rc == PERSIA_EDENIED)
        calls_line_denied(s, call, r ? r->why : RPC_ROLE);
    if (r)
        request_free(r);
    calls_fail(s, call, rc);
}
