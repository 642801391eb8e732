/* client.c: a channel to a server over gRPC. */
#include "rpc/core.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEXT_BYTES = 1024,
    BACKOFF_MS = 100,      /* after the first failed connection */
    BACKOFF_MAX_MS = 1000, /* a server that starts again is soon found */
    CONNECT_MS = 5000,     /* one attempt to connect */
    RESOLVE_MS = 1000,     /* at least, between questions to the DNS */
    CONNECTS = 3           /* looks at a peer that is lost */
};

typedef struct client_call client_call;

/* gRPC's channel with one version of the identity.  The first call after a
 * renewal makes another way, and this one ends with its last call. */
typedef struct client_way {
    grpc_channel *channel;
    uint64_t version;     /* of the identity */
    grpc_slice tokens[2]; /* "Bearer ...", or empty; [1]: administration's */
    size_t users; /* its calls, and the channel; guarded by that one's lock */
    void *handles[]; /* [methods->n] gRPC's, of the methods */
} client_way;

struct rpc_channel {
    char *address; /* as it was given */
    const rpc_methods *methods;
    uint64_t message_limit, keepalive_ns;
    grpc_completion_queue *queue;
    identity *identity;
    pthread_mutex_t lock; /* guards what follows, and the calls' links */
    pthread_cond_t idle;  /* calls became empty */
    client_way *way;      /* of calls that begin */
    client_call *calls;   /* until their callback has returned */
    int closed;
    unsigned connects;    /* looks that may connect it again */
    rpc_channel *next, **link; /* guarded by the lock of `channels` */
};

/* Those of this process that stay open. */
static struct {
    pthread_mutex_t lock; /* guards: */
    rpc_channel *first;
    size_t n;
} channels = {.lock = PTHREAD_MUTEX_INITIALIZER};

struct client_call {
    rpc_tag tag; /* first */
    rpc_sent sent;
    rpc_channel *channel;
    client_way *way; /* NULL: it has none yet */
    uint32_t method;
    uint64_t timeout_ns;
    rpc_callback callback;
    void *ctx;

    grpc_call *call;
    grpc_byte_buffer *request, *reply;
    grpc_metadata_array initial, trailing;
    grpc_status_code status;
    grpc_slice details;

    /* What the callback gets. */
    int rc;
    rpc_reply answer;
    char *text; /* of an error */

    client_call *next, **link; /* guarded by the channel's lock */
};

/* "Pull"; "?" for a number that is none. */
static const char *method_name(const rpc_channel *c, uint32_t method)
{
    if (method >= c->methods->n)
        return "?";
    return strrchr(c->methods->paths[method], '/') + 1;
}

static int client_is_administration(const rpc_channel *c, uint32_t method)
{
    return c->methods->admin >> method & 1;
}

/* The token that a call shows; empty: none. */
static grpc_slice client_token_of(const client_call *l)
{
    int admin = client_is_administration(l->channel, l->method);
    grpc_slice token = l->way->tokens[admin];
    return GRPC_SLICE_LENGTH(token) ? token : l->way->tokens[!admin];
}

/* ---- ways ---- */

static void way_free(client_way *w)
{
    if (!w)
        return;
    if (w->channel)
        grpc_channel_destroy(w->channel);
    grpc_slice_unref(w->tokens[0]);
    grpc_slice_unref(w->tokens[1]);
    free(w);
}

/* Returns the way if this was its last user, or NULL. */
static client_way *way_leave_locked(client_way *w)
{
    return w && --w->users == 0 ? w : NULL;
}

static int client_milliseconds(uint64_t ns)
{
    uint64_t ms = ns / 1000000;
    return ms > INT_MAX ? INT_MAX : ms < 1 ? 1 : (int)ms;
}

/* The identity's lock is held. */
static int way_connect(client_way *w, const rpc_channel *c,
                       const rpc_security *s)
{
    rpc_args a = {.n = 0};
    args_messages(&a, c->message_limit);
    args_integer(&a, GRPC_ARG_ENABLE_RETRIES, 0);
    args_integer(&a, GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    args_integer(&a, GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_MS);
    args_integer(&a, GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MAX_MS);
    args_integer(&a, GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_MS);
    args_integer(&a, GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, RESOLVE_MS);
    /* The address is where the bytes go: no proxy, no rules from the DNS. */
    args_integer(&a, GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    args_integer(&a, GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
    if (c->keepalive_ns) {
        int ms = client_milliseconds(c->keepalive_ns);
        args_integer(&a, GRPC_ARG_KEEPALIVE_TIME_MS, ms);
        args_integer(&a, GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ms);
        args_integer(&a, GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
        args_integer(&a, GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    }
    if (s->ca && s->server_name)
        args_string(&a, GRPC_SSL_TARGET_NAME_OVERRIDE_ARG, s->server_name);

    grpc_channel_credentials *credentials = client_credentials(s);
    if (!credentials)
        return persia_err_set(PERSIA_EARG,
                              "server %s: the certificates cannot be used",
                              c->address);
    /* A scheme of its own: "dns:1" would be one too. */
    char target[RPC_ADDRESS + 8];
    snprintf(target, sizeof target, "dns:///%s", c->address);
    grpc_channel_args args = {a.n, a.list};
    w->channel = grpc_channel_create(target, credentials, &args);
    grpc_channel_credentials_release(credentials);
    return PERSIA_OK;
}

/* To the server as the identity is now. */
static int way_open(rpc_channel *c, client_way **out)
{
    client_way *w = calloc(1, sizeof *w + c->methods->n * sizeof(void *));
    *out = NULL;
    if (!w)
        return persia_err_set(PERSIA_ENOMEM, "out of memory: a channel");
    w->users = 1;
    pthread_rwlock_rdlock(&c->identity->lock);
    w->version = atomic_load(&c->identity->version);
    w->tokens[0] = token_header(c->identity->texts.token);
    w->tokens[1] = token_header(c->identity->texts.admin_token);
    int code = way_connect(w, c, &c->identity->texts);
    pthread_rwlock_unlock(&c->identity->lock);
    if (code != PERSIA_OK) {
        way_free(w);
        return code;
    }
    for (uint32_t i = 0; i < c->methods->n; i++)
        w->handles[i] = grpc_channel_register_call(
            w->channel, c->methods->paths[i], NULL, NULL);
    *out = w;
    return PERSIA_OK;
}

/* Makes another way if the identity was renewed; after an error the old one
 * stays.  Returns the one to free, or NULL. */
static client_way *way_renew_locked(rpc_channel *c)
{
    client_way *old = c->way, *w;
    const uint64_t version = atomic_load(&c->identity->version);
    if (old->version == version)
        return NULL;
    if (way_open(c, &w) != PERSIA_OK) {
        old->version = version;
        return NULL;
    }
    c->way = w;
    return way_leave_locked(old);
}

/* ---- one call ---- */

static void call_unlink(client_call *l)
{
    rpc_channel *c = l->channel;
    pthread_mutex_lock(&c->lock);
    *l->link = l->next;
    if (l->next)
        l->next->link = l->link;
    client_way *old = way_leave_locked(l->way);
    if (!c->calls)
        pthread_cond_broadcast(&c->idle);
    pthread_mutex_unlock(&c->lock);
    way_free(old);
}

/* Gives back what is gRPC's. */
static void call_leave(client_call *l)
{
    rpc_channel *c = l->channel;
    pthread_mutex_lock(&c->lock);
    grpc_call *call = l->call;
    l->call = NULL; /* it cannot be cancelled any more */
    pthread_mutex_unlock(&c->lock);
    grpc_metadata_array_destroy(&l->initial);
    grpc_metadata_array_destroy(&l->trailing);
    grpc_slice_unref(l->details);
    grpc_byte_buffer_destroy(l->request);
    if (call)
        grpc_call_unref(call);
}

static void call_free(client_call *l)
{
    persia_wire_out_free(&l->sent.out);
    free(l->text);
    free(l);
}

/* The answer is there and gRPC has let go of the request. */
static void call_ended(rpc_sent *sent)
{
    client_call *l =
        (client_call *)((char *)sent - offsetof(client_call, sent));
    if (l->rc != PERSIA_OK)
        (void)persia_err_set(l->rc, "%s",
                             l->text ? l->text : persia_err_message(l->rc));
    l->callback(l->ctx, l->rc, &l->answer);
    call_unlink(l);
    call_free(l);
}

/* The text of a status that is not of our server. */
static void client_tell_status(client_call *l, const char *details)
{
    const char *address = l->channel->address;
    const char *method = method_name(l->channel, l->method);
    char text[TEXT_BYTES];
    switch (l->rc) {
    case PERSIA_ETIMEOUT:
        snprintf(text, sizeof text,
                 "server %s did not answer %s within %.3g s", address, method,
                 (double)l->timeout_ns * 1e-9);
        break;
    case PERSIA_ECLOSED:
        snprintf(text, sizeof text, "the channel to server %s was closed",
                 address);
        break;
    case PERSIA_EUNAVAILABLE:
        snprintf(text, sizeof text, "server %s cannot be reached (%s): %s%s",
                 address, method, details,
                 core_hint(details));
        break;
    default:
        snprintf(text, sizeof text, "server %s, %s: %s", address, method,
                 details);
    }
    l->text = strdup(text);
}

static void call_judge(client_call *l)
{
    int sent;
    l->rc = status_to_code(l->status, &l->trailing, &sent);
    if (l->status == GRPC_STATUS_CANCELLED && !sent) {
        pthread_mutex_lock(&l->channel->lock);
        if (l->channel->closed)
            l->rc = PERSIA_ECLOSED;
        pthread_mutex_unlock(&l->channel->lock);
    }
    if (l->rc != PERSIA_OK) {
        char *details = slice_text(l->details);
        const char *text = details ? details : "";
        /* No use in trying again. */
        if (l->rc == PERSIA_EUNAVAILABLE && !sent &&
            core_refuses_certificate(text))
            l->rc = PERSIA_EDENIED;
        size_t room = strlen(l->channel->address) + strlen(text) + 3;
        if (!sent)
            client_tell_status(l, text);
        else if ((l->text = malloc(room)))
            snprintf(l->text, room, "%s: %s", l->channel->address, text);
        free(details);
        return;
    }
    if (!l->reply) {
        l->rc = PERSIA_EPROTOCOL;
        client_tell_status(l, "the answer holds no message");
        return;
    }
    l->rc = received_join(l->reply, NULL, &l->answer.memory, &l->answer.n);
    l->answer.data = l->answer.memory;
    if (l->rc != PERSIA_OK)
        client_tell_status(l, persia_err_text());
}

static void call_done(rpc_tag *tag, int ok)
{
    (void)ok; /* the status tells */
    client_call *l = (client_call *)tag;
    call_judge(l);
    grpc_byte_buffer_destroy(l->reply);
    l->reply = NULL;
    /* What a cancelled call did not send it holds until it is gone. */
    call_leave(l);
    sent_drop(&l->sent);
}

static gpr_timespec client_deadline_after(uint64_t timeout_ns)
{
    gpr_timespec now = gpr_now(GPR_CLOCK_MONOTONIC);
    if (timeout_ns > INT64_MAX)
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    return gpr_time_add(
        now, gpr_time_from_nanos((int64_t)timeout_ns, GPR_TIMESPAN));
}

static grpc_call_error call_start(client_call *l)
{
    grpc_metadata token;
    memset(&token, 0, sizeof token);
    token.key = grpc_slice_from_static_string("authorization");
    token.value = client_token_of(l);
    grpc_op ops[6];
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    if (GRPC_SLICE_LENGTH(token.value)) {
        ops[0].data.send_initial_metadata.count = 1;
        ops[0].data.send_initial_metadata.metadata = &token;
    }
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = l->request;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &l->initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = &l->reply;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.trailing_metadata = &l->trailing;
    ops[5].data.recv_status_on_client.status = &l->status;
    ops[5].data.recv_status_on_client.status_details = &l->details;
    grpc_call *call = l->call; /* l may be gone before start_batch returns */
    tag_give(&l->tag, call_done);
    return grpc_call_start_batch(call, ops, 6, &l->tag, NULL);
}

static int client_check_start(const rpc_channel *c, uint32_t method,
                              uint64_t timeout_ns)
{
    int code = persia_fork_check("a channel");
    if (code == PERSIA_OK && method >= c->methods->n)
        code = persia_err_set(PERSIA_EARG, "there is no method %u", method);
    if (code == PERSIA_OK && timeout_ns == 0)
        code = persia_err_set(PERSIA_ETIMEOUT,
                              "server %s: no time left for %s", c->address,
                              method_name(c, method));
    return code;
}

/* Makes the gRPC call and links it to its channel. */
static int call_link(client_call *l)
{
    rpc_channel *c = l->channel;
    client_way *old = NULL;
    int code = PERSIA_OK;
    /* The thread that closes must find the call, or the call finds it
     * closed. */
    pthread_mutex_lock(&c->lock);
    if (c->closed) {
        code = persia_err_set(
            PERSIA_ECLOSED, "the channel to server %s was closed", c->address);
    } else {
        old = way_renew_locked(c);
        l->way = c->way;
        l->way->users++;
        l->call = grpc_channel_create_registered_call(
            l->way->channel, NULL, GRPC_PROPAGATE_DEFAULTS, c->queue,
            l->way->handles[l->method], client_deadline_after(l->timeout_ns),
            NULL);
        l->next = c->calls;
        l->link = &c->calls;
        if (c->calls)
            c->calls->link = &l->next;
        c->calls = l;
    }
    pthread_mutex_unlock(&c->lock);
    way_free(old);
    return code;
}

int persia_rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
                     uint64_t timeout_ns, rpc_callback callback, void *ctx)
{
    size_t n = o->bytes;
    int code = client_check_start(c, method, timeout_ns);
    if (code != PERSIA_OK) {
        persia_wire_out_free(o);
        return code;
    }
    client_call *l = n > INT_MAX ? NULL : calloc(1, sizeof *l);
    if (!l) {
        persia_wire_out_free(o);
        return n > INT_MAX
                   ? persia_err_set(
                         PERSIA_ELIMIT,
                         "server %s, %s: a request of %zu bytes: no "
                         "message can be larger than 2 GiB",
                         c->address, method_name(c, method), n)
                   : persia_err_set(PERSIA_ENOMEM, "out of memory: a call");
    }
    l->channel = c;
    l->method = method;
    l->timeout_ns = timeout_ns;
    l->callback = callback;
    l->ctx = ctx;
    l->details = grpc_empty_slice();
    grpc_metadata_array_init(&l->initial);
    grpc_metadata_array_init(&l->trailing);
    code = sent_start(&l->sent, o, call_ended, &l->request);
    if (code == PERSIA_OK)
        code = call_link(l);
    if (code != PERSIA_OK) {
        call_leave(l);
        call_free(l);
        return code;
    }
    grpc_call_error error = call_start(l);
    if (error == GRPC_CALL_OK)
        return PERSIA_OK;
    call_leave(l);
    call_unlink(l);
    call_free(l);
    return persia_err_set(PERSIA_EINTERNAL,
                          "server %s, %s: the call cannot start: "
                          "%s",
                          c->address, method_name(c, method),
                          grpc_call_error_to_string(error));
}

/* ---- channels that stay open ---- */

static void channel_list(rpc_channel *c)
{
    if (!c->keepalive_ns)
        return;
    pthread_mutex_lock(&channels.lock);
    c->next = channels.first;
    c->link = &channels.first;
    if (c->next)
        c->next->link = &c->next;
    channels.first = c;
    channels.n++;
    pthread_mutex_unlock(&channels.lock);
}

static void channel_unlist(rpc_channel *c)
{
    if (!c->link)
        return;
    pthread_mutex_lock(&channels.lock);
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    channels.n--;
    pthread_mutex_unlock(&channels.lock);
}

static void channel_look(rpc_channel *c, rpc_connection *out)
{
    *out = (rpc_connection){.service = c->methods->service};
    snprintf(out->address, sizeof out->address, "%s", c->address);
    pthread_mutex_lock(&c->lock);
    out->connected =
        grpc_channel_check_connectivity_state(
            c->way->channel, c->connects > 0) == GRPC_CHANNEL_READY;
    if (out->connected)
        c->connects = CONNECTS;
    else if (c->connects)
        c->connects--;
    pthread_mutex_unlock(&c->lock);
}

int persia_rpc_peers(rpc_connection **out, size_t *n)
{
    *out = NULL;
    *n = 0;
    int code = persia_fork_check("a channel");
    if (code != PERSIA_OK)
        return code;
    pthread_mutex_lock(&channels.lock);
    *out = calloc(channels.n + 1, sizeof **out);
    for (rpc_channel *c = channels.first; *out && c; c = c->next)
        channel_look(c, &(*out)[(*n)++]);
    pthread_mutex_unlock(&channels.lock);
    return *out ? PERSIA_OK
                : persia_err_set(PERSIA_ENOMEM, "out of memory: peers");
}

/* ---- the channel ---- */

static void channel_free(rpc_channel *c)
{
    way_free(c->way);
    identity_close(c->identity);
    pthread_cond_destroy(&c->idle);
    pthread_mutex_destroy(&c->lock);
    free(c->address);
    free(c);
}

void persia_rpc_channel_close(rpc_channel *c)
{
    /* In a forked child there is no thread to wait for: leave everything. */
    if (!c || persia_fork_check("a channel") != PERSIA_OK)
        return;
    channel_unlist(c);
    pthread_mutex_lock(&c->lock);
    c->closed = 1;
    for (client_call *l = c->calls; l; l = l->next)
        if (l->call)
            grpc_call_cancel(l->call, NULL);
    while (c->calls)
        pthread_cond_wait(&c->idle, &c->lock);
    pthread_mutex_unlock(&c->lock);
    channel_free(c);
    runtime_leave_client();
}

const char *persia_rpc_channel_address(const rpc_channel *c)
{
    return c->address;
}

/* Everything but the threads. */
static int channel_make(const rpc_channel_config *config, rpc_channel **out)
{
    rpc_channel *c = calloc(1, sizeof *c);
    char *text = strdup(config->address);
    if (!c || !text) {
        free(c);
        free(text);
        return persia_err_set(PERSIA_ENOMEM, "out of memory: a channel");
    }
    c->address = text;
    c->methods = config->methods;
    c->message_limit = config->message_limit;
    c->keepalive_ns = config->keepalive_ns;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->idle, NULL);
    int code = identity_open(&config->security, &c->identity);
    if (code != PERSIA_OK)
        channel_free(c);
    else
        *out = c;
    return code;
}

int persia_rpc_channel_open(const rpc_channel_config *config,
                            rpc_channel **out)
{
    *out = NULL;
    rpc_address address;
    rpc_channel *c = NULL;
    int code = persia_fork_check("a channel");
    if (code == PERSIA_OK)
        code = address_parse(config->address, &address);
    if (code == PERSIA_OK && !address.port)
        code = persia_err_set(PERSIA_EARG,
                              "address \"%s\": no server has port 0",
                              config->address);
    if (code == PERSIA_OK)
        code = security_check(&config->security, &address, config->address,
                              0);
    if (code == PERSIA_OK)
        code = channel_make(config, &c);
    if (code != PERSIA_OK)
        return code;
    code = runtime_enter_client(&c->queue);
    if (code != PERSIA_OK) {
        channel_free(c);
        return code;
    }
    code = way_open(c, &c->way);
    if (code != PERSIA_OK) {
        channel_free(c);
        runtime_leave_client();
        return code;
    }
    channel_list(c);
    *out = c;
    return PERSIA_OK;
}
