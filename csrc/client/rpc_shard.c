/* rpc_shard.c: the body of a shard_ref behind messages: a call's struct leaves
 * as a message to its server, and the reply's message is read into a struct.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/peer.h"
#include "client/private.h"

typedef struct rpc_shard {
    shard_ref ref; /* first */
    peer *peer;
    int named; /* its server has several; this one's number: */
    uint32_t no;
    char *address;
} rpc_shard;

/* ---- methods ---- */

#define SHARD_OP(upper, name, message, reply, args, answers, flags)           \
    static int put_##name(wire_out *o, const void *a)                         \
    {                                                                         \
        return persia_wire_put_##message(o, OP_MESSAGE(name, args, a));       \
    }                                                                         \
    static int get_##name(const peer_reply *from, wire_memory *memory,        \
                          void *out)                                          \
    {                                                                         \
        return persia_wire_get_##reply(from->data, from->n, memory, out);     \
    }
SHARD_OPS(SHARD_OP)
#undef SHARD_OP

static const struct {
    int (*put)(wire_out *o, const void *arguments);
    int (*get)(const peer_reply *from, wire_memory *memory, void *out);
    size_t reply_size; /* of the struct */
} methods[WIRE_METHODS_N] = {
#define SHARD_OP(upper, name, message, reply, args, answers, flags)           \
    [WIRE_##upper] = {put_##name, get_##name, sizeof(wire_##reply)},
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
};

size_t shard_reply_bytes(uint32_t method)
{
    return methods[method].reply_size;
}

/* ---- calls ---- */

/* A call, and then what its reply points into. */
typedef struct calling {
    peer_call call; /* first */
    rpc_shard *to;
    shard_done done;
    void *ctx;
    peer_reply bytes;
    wire_memory memory;
    _Alignas(max_align_t) unsigned char message[];
} calling;

static void calling_free(calling *c)
{
    peer_reply_free(&c->bytes);
    persia_wire_memory_free(&c->memory);
    free(c);
}

static void release(shard_reply *reply)
{
    calling_free(reply->owner);
}

/* The call has no answer but rc and persia_err_text(). */
static void fail(calling *c, int rc)
{
    shard_reply none = {0};
    c->done(c->ctx, rc, &none);
    calling_free(c);
}

static void answered(peer_call *call, int rc, peer_reply *bytes)
{
    calling *c = (calling *)call;
    rpc_shard *to = c->to;
    if (rc) {
        fail(c, rc);
        return;
    }
    c->bytes = *bytes;
    to->ref.bytes_in += bytes->n;
    rc = methods[c->call.method].get(&c->bytes, &c->memory, c->message);
    if (rc) {
        char text[256];
        snprintf(text, sizeof text, "%s", persia_err_text());
        fail(c, persia_err_set(PERSIA_EPROTOCOL, "%s: %s", to->address, text));
        return;
    }
    if (c->call.method == WIRE_HELLO)
        to->ref.message_limit =
            ((const wire_hello_reply *)(const void *)c->message)
                ->message_limit;
    shard_reply reply = {c->message, release, c};
    c->done(c->ctx, PERSIA_OK, &reply);
}

int shard_check_size(const shard_ref *to, size_t bytes)
{
    const uint64_t limit = to->message_limit;
    if (!limit || bytes <= limit)
        return PERSIA_OK;
    return persia_err_set(
        PERSIA_ELIMIT,
        "%s: a request of %zu bytes is over the server's limit of "
        "%llu; make the batch smaller or the limit larger",
        to->address, bytes, (unsigned long long)limit);
}

static void begin(shard_ref *ref, uint32_t method, const void *arguments,
                  uint64_t deadline, shard_done done, void *ctx)
{
    rpc_shard *to = (rpc_shard *)ref;
    calling *c = malloc(sizeof *c + methods[method].reply_size);
    if (!c) {
        shard_reply none = {0};
        done(ctx, persia_err_set(PERSIA_ENOMEM, "no memory for a request"),
             &none);
        return;
    }
    *c = (calling){.call = {.shard = to->no, .method = method,
                            .deadline = deadline, .done = answered},
                   .to = to, .done = done, .ctx = ctx};
    persia_wire_memory_init(&c->memory);
    persia_wire_out_init(&c->call.out);
    int rc = methods[method].put(&c->call.out, arguments);
    if (!rc)
        rc = shard_check_size(ref, c->call.out.bytes);
    if (rc) {
        persia_wire_out_free(&c->call.out);
        fail(c, rc);
        return;
    }
    ref->bytes_out += c->call.out.bytes;
    if (to->named)
        peer_queue(to->peer, &c->call, ref->message_limit / 2);
    else
        peer_send(to->peer, &c->call);
}

static void flush(shard_ref *ref)
{
    const rpc_shard *s = (rpc_shard *)ref;
    if (s->named)
        peer_flush(s->peer);
}

#define SHARD_OP(upper, name, message, reply, args, answers, flags)           \
    static void begin_##name(shard_ref *to,                                   \
                             const OP_ARGS(name, message, args) * a,          \
                             uint64_t deadline, shard_done done, void *ctx)   \
    {                                                                         \
        begin(to, WIRE_##upper, a, deadline, done, ctx);                      \
    }
SHARD_OPS(SHARD_OP)
#undef SHARD_OP

/* ---- its life ---- */

static void close_(shard_ref *ref)
{
    rpc_shard *s = (rpc_shard *)ref;
    if (persia_fork_check("a server"))
        return;
    peer_close(s->peer);
    peer_drop(s->peer);
    free(s->address);
    free(s);
}

static const shard_ops ops = {
#define SHARD_OP(upper, name, message, reply, args, answers, flags)           \
    .name = begin_##name,
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    .flush = flush,
    .close = close_,
};

/* The peer is taken over, also on failure. */
static int make(peer *of, const char *address, shard_ref **out)
{
    rpc_shard *s = calloc(1, sizeof *s);
    char *text = strdup(address);
    if (!s || !text) {
        free(s);
        free(text);
        peer_drop(of);
        return persia_err_set(PERSIA_ENOMEM, "no memory for a server");
    }
    s->ref = (shard_ref){.ops = &ops, .address = text};
    s->peer = of;
    s->address = text;
    *out = &s->ref;
    return PERSIA_OK;
}

int persia_shard_over(rpc_channel *channel, const char *address,
                      shard_ref **out)
{
    peer *of;
    *out = NULL;
    int rc = peer_open(channel, &of);
    return rc ? rc : make(of, address, out);
}

static rpc_shard *rpc_shard_of(shard_ref *ref)
{
    if (ref->ops == &ops)
        return (rpc_shard *)ref;
    (void)persia_err_set(PERSIA_EARG, "%s is no server with several shards",
                         ref->address);
    return NULL;
}

int persia_shard_name(shard_ref *ref, uint32_t shard)
{
    rpc_shard *s = rpc_shard_of(ref);
    if (!s)
        return PERSIA_EARG;
    s->named = 1;
    s->no = shard;
    return PERSIA_OK;
}

int persia_shard_beside(shard_ref *ref, uint32_t shard, shard_ref **out)
{
    const rpc_shard *s = rpc_shard_of(ref);
    *out = NULL;
    int rc = s ? make(peer_get(s->peer), s->address, out) : PERSIA_EARG;
    return rc ? rc : persia_shard_name(*out, shard);
}

int persia_shard_connect(const rpc_channel_config *config, shard_ref **out)
{
    rpc_channel *channel;
    *out = NULL;
    int rc = persia_rpc_channel_open(config, &channel);
    return rc ? rc : persia_shard_over(channel, config->address, out);
}
