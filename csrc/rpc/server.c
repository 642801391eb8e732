/* server.c: requests over gRPC, to a handler.
 *
 * A slot takes one call after the other: it waits for a call, reads the
 * request, is in the hands of the handler, and sends the answer.  stalls.h has
 * the table of its states.  There are calls_max slots; gRPC lets further calls
 * wait, unread.  A call without the right token is refused before the request
 * is read.  The health service has slots of its own, so that a full server
 * still says that it lives.  Requests that do not arrive keep no slot which
 * others wait for.
 */
#include "rpc/connections.h"
#include "rpc/core.h"
#include "rpc/stalls.h"

#include <assert.h>
#include <grpc/support/alloc.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEALTH_SLOTS = 16,
    HEALTH_REQUEST_MAX = 4096,     /* bytes */
    TEXT_MAX = 1000,               /* bytes of an error's text */
    HANDSHAKE_MS = 10000,          /* for a connection to say what it is */
    IDLE_MS = 600000,              /* of a connection without calls */
    PING_MS = 60000,               /* clients that vanished are found out */
    PING_TIMEOUT_MS = 20000,
    /* Clients ask every 10 s whether we live.  A client that asks so many
     * times sooner than this after the last time is closed. */
    PINGED_MS = 1000,
    PINGED_STRIKES = 10
};

/* That clients have for taking their last answers when a server stops. */
static const uint64_t ANSWERS_NS = 1000000000;

static const char HEALTH_PATH[] = "/grpc.health.v1.Health/Check";

typedef struct slot slot;

struct rpc_server {
    grpc_server *server;
    rpc_pollers pollers;
    rpc_gate *gate;
    rpc_renewed *certificates;
    const rpc_methods *methods;
    char unknown[160]; /* what a call of another method is answered */
    rpc_handler handler;
    void (*denied_call)(void *ctx, const char *method, const char *peer,
                        const char *name, const char *reason);
    void *denied_ctx;
    void *ctx;
    uint64_t message_limit;
    sched *joins;
    int port;
    connections *connections;
    rpc_times times;
    void *health_method; /* gRPC's handle */
    atomic_int serving;

    slot *slots; /* [slots_n], health's first */
    size_t slots_n;
    stalls *stalls;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t changed;
    size_t live; /* slots that gRPC or a handler has, and their threads
                    that are inside gRPC */
    size_t admitted; /* requests that the handler has, or will, and has not
                        answered */
    int is_down; /* gRPC has said so */
    rpc_tag down;
};

struct slot {
    rpc_call call; /* first: the handler's pointer is ours */
    rpc_tag tag;
    rpc_tag refused; /* of a refusal while `tag` reads */
    rpc_sent sent;
    rpc_server *server;
    int health;  /* one of the health service's */
    rpc_pass pass;

    uint64_t began, started; /* it arrived; the handler has it */
    grpc_call *grpc;
    grpc_call_details details;
    grpc_metadata_array metadata;
    gpr_timespec deadline;
    grpc_byte_buffer *request, *reply;
    void *memory; /* of the joined request */
    int cancelled;
    void (*done)(void *owner);
    void *owner;
};

static void slot_wait(slot *l);

static slot *slot_of_tag(rpc_tag *tag)
{
    return (slot *)((char *)tag - offsetof(slot, tag));
}

static size_t slot_number(const slot *l)
{
    return (size_t)(l - l->server->slots);
}

/* ---- the end of a call ---- */

static void server_live_add(rpc_server *s)
{
    pthread_mutex_lock(&s->lock);
    s->live++;
    pthread_mutex_unlock(&s->lock);
}

static void server_live_drop(rpc_server *s)
{
    pthread_mutex_lock(&s->lock);
    assert(s->live);
    if (--s->live == 0)
        pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void slot_admit(slot *l)
{
    pthread_mutex_lock(&l->server->lock);
    l->server->admitted++;
    pthread_mutex_unlock(&l->server->lock);
}

static void slot_dismiss(slot *l)
{
    pthread_mutex_lock(&l->server->lock);
    assert(l->server->admitted);
    if (--l->server->admitted == 0)
        pthread_cond_broadcast(&l->server->changed);
    pthread_mutex_unlock(&l->server->lock);
}

/* gRPC needs nothing of the answer any more. */
static void slot_ended(rpc_sent *sent)
{
    slot *l = (slot *)((char *)sent - offsetof(slot, sent));
    rpc_server *s = l->server;
    persia_wire_out_free(&l->sent.out);
    if (l->done)
        l->done(l->owner);
    persia_mem_pool_give(l->memory);
    persia_rpc_gate_leave(&l->pass);
    /* While this thread is inside gRPC another one may see the slot's end,
     * and the server must not be freed before this one is out. */
    server_live_add(s);
    stalls_freed(s->stalls, slot_number(l));
    slot_wait(l);
    server_live_drop(s);
}

static void slot_leave(slot *l)
{
    grpc_metadata_array_destroy(&l->metadata);
    if (!l->health)
        grpc_call_details_destroy(&l->details);
}

static void slot_gone(slot *l)
{
    stalls_answered(l->server->stalls, slot_number(l));
    grpc_byte_buffer_destroy(l->reply);
    slot_leave(l);
    /* What a cancelled call did not send it holds until it is gone. */
    grpc_call_unref(l->grpc);
    sent_drop(&l->sent);
}

static void slot_answered(rpc_tag *tag, int ok)
{
    (void)ok; /* the client may be gone */
    slot_gone(slot_of_tag(tag));
}

static void slot_refused(rpc_tag *tag, int ok)
{
    (void)ok;
    slot_gone((slot *)((char *)tag - offsetof(slot, refused)));
}

/* What gRPC does not take, which is a bug of ours, it does not give back: the
 * tag ends here, as that of a call whose client has gone. */
static void tag_refused(rpc_tag *tag, const char *what, grpc_call_error error)
{
    fprintf(stderr, "persia: bug in room rpc: %s: %s\n", what,
            grpc_call_error_to_string(error));
    tag->done(tag, 0);
}

/* Sends what is in l->reply and the status. */
static void slot_send_as(slot *l, rpc_tag *tag,
                         void (*answered)(rpc_tag *tag, int ok),
                         grpc_status_code status, const char *name,
                         const char *text)
{
    grpc_op ops[4];
    size_t n = 0;
    memset(ops, 0, sizeof ops);
    grpc_metadata trailing[2];
    memset(trailing, 0, sizeof trailing);
    char wait[16];
    grpc_slice details = grpc_empty_slice();
    ops[n++].op = GRPC_OP_SEND_INITIAL_METADATA;
    if (l->reply) {
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n++].data.send_message.send_message = l->reply;
    }
    ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[n].data.send_status_from_server.status = status;
    if (status != GRPC_STATUS_OK) {
        size_t bytes = strnlen(text, TEXT_MAX);
        details = grpc_slice_from_copied_buffer(text, bytes);
        ops[n].data.send_status_from_server.status_details = &details;
    }
    if (name) {
        trailing[0].key = grpc_slice_from_static_string(ERROR_KEY);
        trailing[0].value = grpc_slice_from_static_string(name);
        ops[n].data.send_status_from_server.trailing_metadata_count = 1;
        ops[n].data.send_status_from_server.trailing_metadata = trailing;
    }
    if (name && l->pass.wait_ms) {
        snprintf(wait, sizeof wait, "%u", l->pass.wait_ms);
        trailing[1].key = grpc_slice_from_static_string(WAIT_KEY);
        trailing[1].value = grpc_slice_from_copied_string(wait);
        ops[n].data.send_status_from_server.trailing_metadata_count = 2;
    }
    n++;
    ops[n].op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    ops[n++].data.recv_close_on_server.cancelled = &l->cancelled;
    grpc_call *grpc = l->grpc;
    tag_give(tag, answered);
    grpc_call_error error_code =
        grpc_call_start_batch(grpc, ops, n, tag, NULL);
    if (error_code != GRPC_CALL_OK)
        tag_refused(tag, "an answer", error_code);
    grpc_slice_unref(details);
    grpc_slice_unref(trailing[1].value);
}

static void slot_send(slot *l, grpc_status_code status, const char *name,
                      const char *text)
{
    int handled = stalls_answers(l->server->stalls, slot_number(l), l->grpc);
    if (handled && !l->health) {
        persia_rpc_count(&l->call,
                         l->reply ? grpc_byte_buffer_length(l->reply) : 0);
        times_count_call(&l->server->times, l->began, l->started);
        slot_dismiss(l); /* an answer that is being sent is not waited for */
    }
    slot_send_as(l, &l->tag, slot_answered, status, name, text);
}

/* An answer without a message; name: of the code, or NULL for foreign ones. */
static void slot_refuse(slot *l, grpc_status_code status, const char *name,
                        const char *text)
{
    atomic_init(&l->sent.users, 1);
    l->sent.ended = slot_ended;
    slot_send(l, status, name, text);
}

static void slot_fail(rpc_call *call, int code, const char *text)
{
    if (code <= PERSIA_OK || code >= PERSIA_ERROR_COUNT)
        code = PERSIA_EINTERNAL;
    slot_refuse((slot *)call, status_of_code(code), persia_err_name(code),
                text && *text ? text : persia_err_message(code));
}

static void slot_reply(rpc_call *call, wire_out *o, void (*done)(void *owner),
                       void *owner)
{
    slot *l = (slot *)call;
    l->done = done;
    l->owner = owner;
    int code = persia_wire_check_size("this server", "an answer", o->bytes,
                                      l->server->message_limit);
    if (code)
        persia_wire_out_free(o);
    else
        code = sent_start(&l->sent, o, slot_ended, &l->reply);
    if (code != PERSIA_OK) {
        slot_fail(call, code, persia_err_text());
        return;
    }
    slot_send(l, GRPC_STATUS_OK, NULL, NULL);
}

static void slot_peer(rpc_call *call, char *out, size_t room)
{
    char *peer = grpc_call_get_peer(((slot *)call)->grpc);
    snprintf(out, room, "%s", peer);
    gpr_free(peer);
}

/* The value of a key of the metadata, or NULL. */
static const grpc_slice *slot_metadata(const slot *l, const char *key)
{
    const grpc_metadata_array *m = &l->metadata;
    size_t i = 0;
    while (i < m->count && grpc_slice_str_cmp(m->metadata[i].key, key) != 0)
        i++;
    return i < m->count ? &m->metadata[i].value : NULL;
}

static void slot_header(rpc_call *call, const char *key, char *out,
                        size_t room)
{
    const grpc_slice *value = slot_metadata((slot *)call, key);
    snprintf(out, room, "%.*s", value ? (int)GRPC_SLICE_LENGTH(*value) : 0,
             value ? (const char *)GRPC_SLICE_START_PTR(*value) : "");
}

/* A call that the gate has not let in. */
static void slot_deny(slot *l, int rc)
{
    rpc_server *s = l->server;
    const rpc_pass *p = &l->pass;
    char peer[128], text[TEXT_MAX];
    snprintf(text, sizeof text, "%s", persia_err_text());
    slot_peer(&l->call, peer, sizeof peer);
    if (s->denied_call)
        s->denied_call(s->denied_ctx, s->methods->paths[l->call.method], peer,
                       p->who ? p->who->name : "",
                       persia_rpc_reasons[p->why]);
    slot_refuse(l, p->who ? status_of_code(rc) : GRPC_STATUS_UNAUTHENTICATED,
                persia_err_name(rc), text);
}

/* Whether a call is let in. */
static int slot_enter(slot *l)
{
    const rpc_peer peer = {core_has_name, l->grpc};
    const grpc_slice *value = slot_metadata(l, "authorization");
    int rc = persia_rpc_gate_enter(
        l->server->gate, l->call.method,
        value ? (const char *)GRPC_SLICE_START_PTR(*value) : NULL,
        value ? GRPC_SLICE_LENGTH(*value) : 0, &peer, &l->pass);
    l->call.who = l->pass.who;
    return rc;
}

/* For stalls_watch(): a refusal ends the reading, too, as gRPC closes the
 * stream with it.  To cancel the call would not tell the client why. */
static void slot_stalled(void *ctx, size_t number)
{
    rpc_server *s = ctx;
    slot *l = &s->slots[number];
    char text[80];
    snprintf(text, sizeof text,
             "the server is full and the request did not arrive within %d s",
             (l->health ? STALLS_HEALTH_MS : STALLS_MS) / 1000);
    slot_send_as(l, &l->refused, slot_refused, GRPC_STATUS_UNAVAILABLE,
                 l->health ? NULL : persia_err_name(PERSIA_EUNAVAILABLE),
                 text);
}

/* ---- health ---- */

/* Whether the request, a HealthCheckRequest, is about `service`. */
static int server_health_asks(const unsigned char *data, size_t n,
                              const char *service)
{
    size_t length = strlen(service);
    if (!length)
        return n == 0 || (n == 2 && data[0] == 0x0a && data[1] == 0);
    return n == length + 2 && data[0] == 0x0a && data[1] == length &&
           memcmp(data + 2, service, length) == 0;
}

static void server_health_answer(slot *l)
{
    static const unsigned char states[2][2] = {{8, 2}, {8, 1}};
    const unsigned char *data = l->memory;
    if (!server_health_asks(data, l->call.request_n, "") &&
        !server_health_asks(data, l->call.request_n,
                            l->server->methods->service)) {
        slot_refuse(l, GRPC_STATUS_NOT_FOUND, NULL, "no such service");
        return;
    }
    grpc_slice state = grpc_slice_from_static_buffer(
        states[atomic_load(&l->server->serving) != 0], 2);
    l->reply = grpc_raw_byte_buffer_create(&state, 1);
    slot_refuse(l, GRPC_STATUS_OK, NULL, NULL);
}

/* ---- the beginning of a call ---- */

static void slot_read(rpc_tag *tag, int ok)
{
    slot *l = slot_of_tag(tag);
    if (!stalls_came(l->server->stalls, slot_number(l))) {
        grpc_byte_buffer_destroy(l->request);
        sent_drop(&l->sent);
        return;
    }
    if (!l->health)
        slot_admit(l);
    if (!ok || !l->request) {
        /* It was cancelled, or gRPC refused the message: none reads this
         * but clients that sent none. */
        slot_refuse(l, GRPC_STATUS_INVALID_ARGUMENT,
                    persia_err_name(PERSIA_EPROTOCOL), "no message");
        return;
    }
    int code;
    if (l->health &&
        grpc_byte_buffer_length(l->request) > HEALTH_REQUEST_MAX)
        code = persia_err_set(PERSIA_ELIMIT, "too long a name of a service");
    else
        code = received_join(l->request, l->server->joins, &l->memory,
                             &l->call.request_n);
    grpc_byte_buffer_destroy(l->request);
    l->request = NULL;
    l->call.request = l->memory;
    if (code != PERSIA_OK)
        slot_fail(&l->call, code, persia_err_text());
    else if (l->health)
        server_health_answer(l);
    else {
        l->started = persia_clock_ns();
        l->server->handler(l->server->ctx, &l->call);
    }
    /* From here on the slot may be another call's. */
}

/* The number of the method, or methods->n. */
static uint32_t method_of(const rpc_methods *methods, grpc_slice path)
{
    uint32_t i = 0;
    while (i < methods->n && grpc_slice_str_cmp(path, methods->paths[i]) != 0)
        i++;
    return i;
}

static uint64_t server_deadline_of(gpr_timespec deadline)
{
    /* The clock of later cores is 5 s before ours: only differences serve. */
    gpr_timespec to_go = gpr_time_sub(
        gpr_convert_clock_type(deadline, GPR_CLOCK_MONOTONIC),
        gpr_now(GPR_CLOCK_MONOTONIC));
    if (to_go.tv_sec >= INT64_MAX / 1000000000 / 2) /* or infinity */
        return PERSIA_FOREVER;
    return persia_deadline_answer(
        to_go.tv_sec < 0 ? 0
                         : (uint64_t)to_go.tv_sec * 1000000000 +
                               (uint64_t)to_go.tv_nsec);
}

/* A call arrived (ok), or the server goes down. */
static void slot_taken(rpc_tag *tag, int ok)
{
    slot *l = slot_of_tag(tag);
    rpc_server *s = l->server;
    if (!ok) {
        slot_leave(l);
        server_live_drop(s);
        return;
    }
    int known = 1, rc = PERSIA_OK;
    if (!l->health) {
        l->call.method = method_of(s->methods, l->details.method);
        known = l->call.method != s->methods->n;
        rc = known ? slot_enter(l) : PERSIA_OK;
    }
    /* A refusal while it reads: the answer and the reading end in any order,
     * and the slot is another call's after both. */
    atomic_init(&l->sent.users, 2);
    l->sent.ended = slot_ended;
    if (!known) {
        slot_refuse(l, GRPC_STATUS_UNIMPLEMENTED, NULL,
                    s->unknown);
        return;
    }
    if (rc) {
        slot_deny(l, rc);
        return;
    }
    if (!l->health) {
        l->call.began = l->began = persia_clock_ns();
        l->call.deadline = server_deadline_of(l->details.deadline);
    }
    stalls_reads(s->stalls, slot_number(l), l->grpc);
    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &l->request;
    grpc_call *grpc = l->grpc;
    tag_give(&l->tag, slot_read);
    grpc_call_error error =
        grpc_call_start_batch(grpc, &op, 1, &l->tag, NULL);
    if (error != GRPC_CALL_OK)
        tag_refused(&l->tag, "reading a request", error);
}

/* Waits for the next call.  After the server went down gRPC answers at once
 * that there is none. */
static void slot_wait(slot *l)
{
    rpc_server *s = l->server;
    *l = (slot){.server = s, .health = l->health};
    l->call.reply = slot_reply;
    l->call.fail = slot_fail;
    l->call.peer = slot_peer;
    l->call.header = slot_header;
    l->call.times = &s->times;
    l->call.denied = persia_rpc_gate_denied(s->gate);
    grpc_metadata_array_init(&l->metadata);
    if (!l->health)
        grpc_call_details_init(&l->details);
    grpc_completion_queue *q = s->pollers.queue;
    grpc_call_error error;
    int health = l->health;
    tag_give(&l->tag, slot_taken);
    if (health)
        error = grpc_server_request_registered_call(
            s->server, s->health_method, &l->grpc, &l->deadline, &l->metadata,
            NULL, q, q, &l->tag);
    else
        error = grpc_server_request_call(s->server, &l->grpc, &l->details,
                                         &l->metadata, q, q, &l->tag);
    if (error != GRPC_CALL_OK)
        tag_refused(&l->tag, "waiting for a call", error);
}

/* ---- life ---- */

static void server_is_down(rpc_tag *tag, int ok)
{
    (void)ok;
    rpc_server *s =
        (rpc_server *)((char *)tag - offsetof(rpc_server, down));
    pthread_mutex_lock(&s->lock);
    s->is_down = 1;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void server_free(rpc_server *s)
{
    pollers_stop(&s->pollers);
    if (s->server)
        grpc_server_destroy(s->server);
    renewed_free(s->certificates);
    persia_rpc_gate_close(s->gate);
    stalls_free(s->stalls);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s->slots);
    free(s->times.methods);
    free(s);
}

static grpc_server *server_create(const rpc_server_config *config)
{
    rpc_args a = {.n = 0};
    args_messages(&a, config->message_limit);
    core_server_args(&a);
    args_integer(&a, GRPC_ARG_ALLOW_REUSEPORT, config->shared != 0);
    args_integer(&a, GRPC_ARG_MAX_CONCURRENT_STREAMS,
                 config->calls_max > INT_MAX ? INT_MAX
                                             : (int)config->calls_max);
    args_integer(&a, GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, HANDSHAKE_MS);
    args_integer(&a, GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                 config->idle_ms ? (int)config->idle_ms : IDLE_MS);
    args_integer(&a, GRPC_ARG_KEEPALIVE_TIME_MS, PING_MS);
    args_integer(&a, GRPC_ARG_KEEPALIVE_TIMEOUT_MS, PING_TIMEOUT_MS);
    args_integer(&a, GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    args_integer(&a, GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                 PINGED_MS);
    args_integer(&a, GRPC_ARG_HTTP2_MAX_PING_STRIKES, PINGED_STRIKES);
    grpc_channel_args args = {a.n, a.list};
    return grpc_server_create(&args, NULL);
}

static int server_listen(rpc_server *s, const rpc_server_config *config)
{
    grpc_server_credentials *credentials = NULL;
    int code = server_credentials(&config->security, &s->certificates,
                                  &credentials);
    if (code)
        return code;
    if (!credentials)
        return persia_err_set(PERSIA_EARG,
                              "serving at %s: the certificates cannot be used",
                              config->address);
    s->port =
        grpc_server_add_http2_port(s->server, config->address, credentials);
    grpc_server_credentials_release(credentials);
    if (s->port <= 0)
        return persia_err_set(
            PERSIA_EUNAVAILABLE,
            "cannot listen on %s: the port is taken, or the "
            "address is not this machine's%s",
            config->address,
            config->security.cert
                ? ", or the certificate and key cannot be used"
                : "");
    return PERSIA_OK;
}

static int server_check(const rpc_server_config *config)
{
    rpc_address address;
    int code = persia_fork_check("a server");
    if (code == PERSIA_OK)
        code = address_parse(config->address, &address);
    if (code == PERSIA_OK)
        code = security_check(&config->security, &address, config->address,
                              1);
    if (code == PERSIA_OK &&
        (config->threads == 0 || config->threads > 1024 ||
         config->calls_max == 0 || config->calls_max > 65536))
        code = persia_err_set(
            PERSIA_EARG,
            "serving at %s: %u threads, at most %u calls: give 1 "
            "to 1024 threads, 1 to 65536 calls",
            config->address, config->threads, config->calls_max);
    return code;
}

/* All that takes no thread and no port. */
static int server_make(const rpc_server_config *config, rpc_server **out)
{
    rpc_server *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(PERSIA_ENOMEM, "out of memory: a server");
    pthread_mutex_init(&s->lock, NULL);
    persia_cond_init(&s->changed);
    s->methods = config->methods;
    snprintf(s->unknown, sizeof s->unknown,
             "this server has %s and grpc.health.v1.Health/Check",
             s->methods->service);
    s->handler = config->handler;
    s->denied_call = config->denied;
    s->denied_ctx = config->denied_ctx;
    s->ctx = config->ctx;
    s->message_limit = config->message_limit;
    s->joins = config->s;
    s->slots_n = (size_t)config->calls_max + HEALTH_SLOTS;
    s->slots = calloc(s->slots_n, sizeof *s->slots);
    s->times.n = s->methods->n;
    s->times.methods = calloc(s->times.n, sizeof *s->times.methods);
    if (!s->slots || !s->times.methods) {
        server_free(s);
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: a server of %u calls",
                              config->calls_max);
    }
    *out = s;
    return PERSIA_OK;
}

/* Threads, port, and what watches over both. */
static int server_open(rpc_server *s, const rpc_server_config *config,
                       uint32_t connections_max)
{
    int code = persia_rpc_gate_open(&config->security, s->methods, &s->gate);
    if (code == PERSIA_OK)
        code = pollers_start(&s->pollers, config->threads, config->prompt,
                             "persia-rpc-srv");
    if (code != PERSIA_OK)
        return code;
    s->server = server_create(config);
    grpc_server_register_completion_queue(s->server, s->pollers.queue, NULL);
    s->health_method = grpc_server_register_method(
        s->server, HEALTH_PATH, NULL, GRPC_SRM_PAYLOAD_NONE, 0);
    code = server_listen(s, config);
    if (code == PERSIA_OK)
        code = connections_guard(s->port, connections_max, &s->connections);
    if (code == PERSIA_OK)
        code = stalls_watch(s->slots_n, HEALTH_SLOTS, slot_stalled, s,
                            &s->stalls);
    return code;
}

int persia_rpc_server_start(const rpc_server_config *config, rpc_server **out)
{
    rpc_server *s = NULL;
    *out = NULL;
    int code = server_check(config);
    if (code == PERSIA_OK)
        code = server_make(config, &s);
    if (code != PERSIA_OK)
        return code;
    uint32_t connections_max = core_connections_max();
    if (config->connections_max && config->connections_max < connections_max)
        connections_max = config->connections_max;
    code = runtime_enter();
    if (code != PERSIA_OK) {
        server_free(s);
        return code;
    }
    code = server_open(s, config, connections_max);
    if (code != PERSIA_OK) {
        persia_rpc_server_stop(s, 0);
        return code;
    }
    grpc_server_start(s->server);
    s->live = s->slots_n;
    for (size_t i = 0; i < s->slots_n; i++) {
        s->slots[i].server = s;
        s->slots[i].health = i < HEALTH_SLOTS;
        slot_wait(&s->slots[i]);
    }
    *out = s;
    return PERSIA_OK;
}

int persia_rpc_server_port(const rpc_server *s)
{
    return s->port;
}

rpc_counts persia_rpc_server_counts(const rpc_server *s)
{
    rpc_counts n;
    connections_count(s->connections, &n.open, &n.refused);
    return n;
}

const rpc_denied *persia_rpc_server_denied(const rpc_server *s)
{
    return persia_rpc_gate_denied(s->gate);
}

const rpc_times *persia_rpc_server_times(const rpc_server *s)
{
    return &s->times;
}

void persia_rpc_server_health(rpc_server *s, int serving)
{
    atomic_store(&s->serving, serving);
}

/* Waits until gRPC is down and no slot is live, at most until `until`;
 * whether that is so. */
static int server_wait(rpc_server *s, uint64_t until)
{
    pthread_mutex_lock(&s->lock);
    int late = 0;
    while ((!s->is_down || s->live) && !late)
        late = persia_cond_wait_until(&s->changed, &s->lock, until) != 0;
    int over = s->is_down && !s->live;
    pthread_mutex_unlock(&s->lock);
    return over;
}

/* Waits until the handler has answered all that it has. */
static void server_admitted_wait(rpc_server *s, uint64_t until)
{
    pthread_mutex_lock(&s->lock);
    int late = 0;
    while (s->admitted && !late)
        late = persia_cond_wait_until(&s->changed, &s->lock, until) != 0;
    pthread_mutex_unlock(&s->lock);
}

void persia_rpc_server_stop(rpc_server *s, uint64_t grace_ns)
{
    if (!s || persia_fork_check("a server") != PERSIA_OK)
        return;
    persia_rpc_server_health(s, 0);
    connections_free(s->connections);
    stalls_stop(s->stalls); /* what follows ends all calls */
    if (s->server) {
        uint64_t now = persia_clock_ns();
        uint64_t never = INT64_MAX;
        tag_give(&s->down, server_is_down);
        grpc_server_shutdown_and_notify(s->server, s->pollers.queue,
                                        &s->down);
        uint64_t until = grace_ns > never - now ? never : now + grace_ns;
        server_admitted_wait(s, until);
        /* Left are answers that are being sent, requests that were not whole
         * and connections that are idle: they wait for their clients. */
        now = persia_clock_ns();
        if (until > now + ANSWERS_NS)
            until = now + ANSWERS_NS;
        if (!server_wait(s, until)) {
            grpc_server_cancel_all_calls(s->server);
            (void)server_wait(s, never);
        }
    }
    server_free(s);
    runtime_leave();
}
