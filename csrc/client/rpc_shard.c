/* rpc_shard.c: the body of a shard_ref behind messages: a call's struct leaves
 * as a message to its server, and the reply's message is read into a struct.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/peers.h"
#include "client/private.h"

/* A shard is asked for at `home`, where it was first, or `away`, where it has
 * moved.  A server that has it no more says where it is; where one cannot be
 * reached the other one is asked, for it may know more.  Both may have ended
 * before this client heard where the shard went: so another server is asked
 * after each failure, all in turn. */
typedef struct rpc_shard {
    shard_ref ref; /* first */
    peers *peers;
    peer *home;
    _Atomic(peer *) away; /* or NULL */
    _Atomic(int) is_away;
    _Atomic(peer *) asked; /* of the others the last; or NULL */
    /* Its server has several, or it has moved: calls name it.  Else its
     * Hello alone, for another one may be there when the server was started
     * again. */
    _Atomic(int) named;
    _Atomic(uint32_t) no; /* its number; UINT32_MAX: not known yet */
    char *address;
} rpc_shard;

/* ---- methods ---- */

#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
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
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    [WIRE_##upper] = {put_##name, get_##name, sizeof(wire_##reply)},
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
};

size_t shard_reply_bytes(uint32_t method)
{
    return methods[method].reply_size;
}

/* ---- calls ---- */

enum { HOPS = 4 }; /* of a call, from server to server */

/* A call, and then what its reply points into. */
typedef struct calling {
    peer_call call; /* first */
    rpc_shard *to;
    const void *arguments;
    int away;      /* it was sent there */
    peer *other;   /* or to this one, which may have the shard by now */
    unsigned hops;
    err_kept *why; /* it was; NULL: it was not */
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
    free(c->why);
    free(c);
}

static void rpc_shard_release(shard_reply *reply)
{
    calling_free(reply->owner);
}

/* The call has no answer but rc and persia_err_text(). */
static void rpc_shard_fail(calling *c, int rc)
{
    shard_reply none = {0};
    c->done(c->ctx, rc, &none);
    calling_free(c);
}

/* ---- where it is ---- */

/* Where the shard is for this client: its server has answered. */
static void rpc_shard_settle(rpc_shard *to, peer *there)
{
    atomic_store(&to->named, 1);
    if (there != to->home)
        atomic_store(&to->away, there);
    atomic_store(&to->is_away, there != to->home);
}

/* A shard has moved, as this thread's error says: "shard 3 has moved to
 * ps1:8888".  It may be another one than this, which was not named. */
static int rpc_shard_follow(rpc_shard *to)
{
    const char *text = persia_err_text(), *space = strrchr(text, ' ');
    const char *which = strstr(text, "shard ");
    const uint32_t number =
        which ? (uint32_t)strtoul(which + strlen("shard "), NULL, 10)
              : UINT32_MAX;
    uint32_t no = UINT32_MAX;
    char address[WIRE_NAME];
    peer *there;
    snprintf(address, sizeof address, "%s", space ? space + 1 : text);
    (void)atomic_compare_exchange_strong(&to->no, &no, number);
    if (no != UINT32_MAX && no != number && !atomic_exchange(&to->named, 1))
        return PERSIA_OK;
    int rc = peers_find(to->peers, address, &there);
    if (rc)
        return rc;
    rpc_shard_settle(to, there);
    return PERSIA_OK;
}

static int rpc_shard_send(calling *c);

/* Whether another server is asked for a shard whose own gave no answer. */
static int rpc_shard_asks_another(calling *c, int rc)
{
    rpc_shard *to = c->to;
    peer *away = atomic_load(&to->away), *other = atomic_load(&to->asked);
    if (rc != PERSIA_EUNAVAILABLE || c->why ||
        atomic_load(&to->no) == UINT32_MAX)
        return 0;
    other = peers_behind(to->peers, other ? other : to->home);
    for (int i = 0; i < 2 && (other == to->home || other == away); i++)
        other = peers_behind(to->peers, other);
    if (other == to->home || other == away ||
        !(c->why = malloc(sizeof *c->why)))
        return 0;
    atomic_store(&to->asked, other);
    persia_err_keep(c->why, rc);
    c->other = other;
    if (!rpc_shard_send(c))
        return 1;
    (void)persia_err_again(c->why);
    return 0;
}

/* Whether the call is sent once more, to where the shard is now.  Else *rc is
 * why it has failed. */
static int rpc_shard_is_sent_again(calling *c, int *rc)
{
    rpc_shard *to = c->to;
    int was = c->away;
    if (c->other && *rc == PERSIA_EUNAVAILABLE)
        *rc = persia_err_again(c->why);
    else if (*rc == PERSIA_EUNAVAILABLE && atomic_load(&to->away))
        (void)atomic_compare_exchange_strong(&to->is_away, &was, !was);
    if (rpc_shard_asks_another(c, *rc))
        return 1;
    if (*rc != PERSIA_EMOVED)
        return 0;
    c->other = NULL;
    err_kept moved;
    persia_err_keep(&moved, PERSIA_EUNAVAILABLE);
    if (c->hops++ >= HOPS)
        *rc = persia_err_again(&moved); /* it moves on and on */
    else if (!(*rc = rpc_shard_follow(to)))
        *rc = rpc_shard_send(c);
    return !*rc;
}

/* ---- sending ---- */

static void rpc_shard_answered(peer_call *call, int rc, peer_reply *bytes)
{
    calling *c = (calling *)call;
    rpc_shard *to = c->to;
    if (rc && rpc_shard_is_sent_again(c, &rc))
        return;
    if (rc) {
        rpc_shard_fail(c, rc);
        return;
    }
    if (c->other)
        rpc_shard_settle(to, c->other);
    c->bytes = *bytes;
    to->ref.bytes_in += bytes->n;
    rc = methods[c->call.method].get(&c->bytes, &c->memory, c->message);
    if (rc) {
        char text[256];
        snprintf(text, sizeof text, "%s", persia_err_text());
        rpc_shard_fail(
            c, persia_err_set(PERSIA_EPROTOCOL, "%s: %s", to->address, text));
        return;
    }
    if (c->call.method == WIRE_HELLO) {
        const wire_hello_reply *m = (const void *)c->message;
        to->ref.message_limit = m->message_limit;
        if (!atomic_load(&to->named))
            atomic_store(&to->no, m->shard);
        if (m->here_n)
            atomic_store(&to->named, 1);
    }
    shard_reply reply = {c->message, rpc_shard_release, c};
    c->done(c->ctx, PERSIA_OK, &reply);
}

int shard_check_size(const shard_ref *to, size_t bytes)
{
    return persia_wire_check_size(to->address, "a request", bytes,
                                  to->message_limit);
}

/* After an error the call is still the caller's. */
static int rpc_shard_send(calling *c)
{
    rpc_shard *to = c->to;
    shard_ref *ref = &to->ref;
    c->call.shard = atomic_load(&to->no);
    persia_wire_out_init(&c->call.out);
    int rc = methods[c->call.method].put(&c->call.out, c->arguments);
    if (!rc)
        rc = shard_check_size(ref, c->call.out.bytes);
    if (rc) {
        persia_wire_out_free(&c->call.out);
        return rc;
    }
    ref->bytes_out += c->call.out.bytes;
    c->away = atomic_load(&to->is_away);
    peer *there = c->away ? atomic_load(&to->away) : to->home;
    if (c->other)
        there = c->other;
    const int named = c->other || atomic_load(&to->named);
    if (!named &&
        (c->call.method != WIRE_HELLO || c->call.shard == UINT32_MAX)) {
        peer_send(there, &c->call);
        return PERSIA_OK;
    }
    /* Then c may be freed. */
    const int at_once = !named || c->hops > 0 || c->other;
    peer_queue(there, &c->call, persia_wire_fit(ref->message_limit, 1));
    if (at_once)
        peer_flush(there);
    return PERSIA_OK;
}

static void rpc_shard_begin(shard_ref *ref, uint32_t method,
                            const void *arguments, uint64_t deadline,
                            shard_done done, void *ctx)
{
    rpc_shard *to = (rpc_shard *)ref;
    calling *c = malloc(sizeof *c + methods[method].reply_size);
    if (!c) {
        shard_reply none = {0};
        done(ctx, persia_err_set(PERSIA_ENOMEM, "no memory for a request"),
             &none);
        return;
    }
    *c = (calling){.call = {.method = method,
                            .deadline = deadline,
                            .done = rpc_shard_answered},
                   .to = to,
                   .arguments = arguments,
                   .done = done,
                   .ctx = ctx};
    persia_wire_memory_init(&c->memory);
    int rc = rpc_shard_send(c);
    if (rc)
        rpc_shard_fail(c, rc);
}

static void rpc_shard_flush(shard_ref *ref)
{
    const rpc_shard *s = (rpc_shard *)ref;
    if (atomic_load(&s->away))
        peers_flush(s->peers);
    else if (atomic_load(&s->named))
        peer_flush(s->home);
}

#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    static void begin_##name(shard_ref *to,                                   \
                             const OP_ARGS(name, message, args) * a,          \
                             uint64_t deadline, shard_done done, void *ctx)   \
    {                                                                         \
        rpc_shard_begin(to, WIRE_##upper, a, deadline, done, ctx);            \
    }
SHARD_OPS(SHARD_OP)
#undef SHARD_OP

/* ---- its life ---- */

static void rpc_shard_close(shard_ref *ref)
{
    rpc_shard *s = (rpc_shard *)ref;
    if (persia_fork_check("a server"))
        return;
    peers_close(s->peers);
    peers_drop(s->peers);
    free(s->address);
    free(s);
}

static const shard_ops ops = {
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    .name = begin_##name,
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
        .flush = rpc_shard_flush,
    .close = rpc_shard_close,
};

/* `of` is taken over, also on failure. */
static int rpc_shard_make(peers *of, const char *address, shard_ref **out)
{
    rpc_shard *s = calloc(1, sizeof *s);
    char *text = strdup(address);
    *out = NULL;
    int rc = s && text ? peers_find(of, address, &s->home)
                       : persia_err_set(PERSIA_ENOMEM,
                                        "no memory for a server");
    if (rc) {
        free(s);
        free(text);
        peers_drop(of);
        return rc;
    }
    s->ref = (shard_ref){.ops = &ops, .address = text};
    atomic_init(&s->no, UINT32_MAX);
    s->peers = of;
    s->address = text;
    *out = &s->ref;
    return PERSIA_OK;
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
    atomic_store(&s->no, shard);
    atomic_store(&s->named, 1);
    return PERSIA_OK;
}

const char *persia_shard_address(const shard_ref *ref)
{
    const rpc_shard *s = (const rpc_shard *)ref;
    if (ref->ops != &ops)
        return ref->address;
    return peer_address(atomic_load(&s->is_away) ? atomic_load(&s->away)
                                                 : s->home);
}

int persia_shard_beside(shard_ref *ref, uint32_t shard, shard_ref **out)
{
    const rpc_shard *s = rpc_shard_of(ref);
    *out = NULL;
    int rc =
        s ? rpc_shard_make(peers_get(s->peers), persia_shard_address(ref), out)
          : PERSIA_EARG;
    return rc ? rc : persia_shard_name(*out, shard);
}

int persia_shard_connect(const rpc_channel_config *config,
                         const shard_ref *with, shard_ref **out)
{
    peers *of;
    *out = NULL;
    if (with && with->ops == &ops)
        return rpc_shard_make(peers_get(((const rpc_shard *)with)->peers),
                              config->address, out);
    int rc = peers_open(config, &of);
    return rc ? rc : rpc_shard_make(of, config->address, out);
}
