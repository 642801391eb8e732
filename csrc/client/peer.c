/* peer.c: see peer.h. */
#include "client/peer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

struct peer {
    rpc_channel *channel;
    const char *address;
    pthread_mutex_t lock; /* guards: */
    int closed;
    peer_call *first, **last; /* that wait, all of one deadline */
    size_t bytes;             /* of their messages */
};

/* ---- replies ---- */

typedef struct peer_bytes {
    _Atomic(uint32_t) users;
    rpc_reply bytes;
} peer_bytes;

static void bytes_drop(peer_bytes *b)
{
    if (atomic_fetch_sub(&b->users, 1) != 1)
        return;
    persia_rpc_reply_free(&b->bytes);
    free(b);
}

void peer_reply_free(peer_reply *r)
{
    if (r->of)
        bytes_drop(r->of);
    *r = (peer_reply){0};
}

/* Takes the bytes over; `users` hold them. */
static peer_bytes *bytes_keep(rpc_reply *reply, uint32_t users)
{
    peer_bytes *b = malloc(sizeof *b);
    if (!b) {
        persia_rpc_reply_free(reply);
        (void)persia_err_set(PERSIA_ENOMEM, "no memory for a reply");
        return NULL;
    }
    atomic_init(&b->users, users);
    b->bytes = *reply;
    return b;
}

static void call_fail(peer_call *c, int rc, const char *text)
{
    peer_reply none = {0};
    persia_wire_out_free(&c->out);
    c->done(c, persia_err_set(rc, "%s", text), &none);
}

/* ---- one call ---- */

static void peer_alone_done(void *ctx, int rc, rpc_reply *reply)
{
    peer_call *c = ctx;
    peer_reply out = {0};
    if (!rc) {
        out = (peer_reply){reply->data, reply->n, bytes_keep(reply, 1)};
        rc = out.of ? PERSIA_OK : PERSIA_ENOMEM;
    }
    c->done(c, rc, &out);
}

void peer_send(peer *p, peer_call *c)
{
    peer_reply none = {0};
    int rc = persia_rpc_start(p->channel, c->method, &c->out,
                              persia_deadline_left(c->deadline),
                              peer_alone_done, c);
    if (rc)
        c->done(c, rc, &none);
}

/* ---- several ---- */

/* Calls that were sent together. */
typedef struct batch {
    peer *p;
    size_t n;
    peer_call *calls[];
} batch;

static void batch_fail(batch *b, int rc, const char *text)
{
    for (size_t i = 0; i < b->n; i++)
        call_fail(b->calls[i], rc, text);
}

/* One result to its call. */
static void peer_give(const batch *b, size_t i, const wire_result *m,
                      peer_bytes *bytes)
{
    peer_call *c = b->calls[i];
    if (m->error[0]) {
        char text[WIRE_TEXT_MAX + 300];
        snprintf(text, sizeof text, "%s: %s",
                 persia_rpc_channel_address(b->p->channel), m->text);
        bytes_drop(bytes);
        call_fail(c, persia_err_code(m->error), text);
        return;
    }
    peer_reply out = {m->n ? (const void *)m->message : "", m->n, bytes};
    c->done(c, PERSIA_OK, &out);
}

static int peer_read_results(const batch *b, peer_bytes *bytes,
                             wire_memory *memory, wire_many_reply *out)
{
    int rc = persia_wire_get_many_reply(bytes->bytes.data, bytes->bytes.n,
                                        memory, out);
    if (!rc && out->results_n != b->n)
        rc = persia_err_set(PERSIA_EPROTOCOL, "%s answers %zu of %zu calls",
                            persia_rpc_channel_address(b->p->channel),
                            out->results_n, b->n);
    return rc;
}

static void batch_answered(batch *b, rpc_reply *reply)
{
    wire_memory memory;
    wire_many_reply m;
    peer_bytes *bytes = bytes_keep(reply, (uint32_t)b->n + 1);
    persia_wire_memory_init(&memory);
    int rc = bytes ? peer_read_results(b, bytes, &memory, &m) : PERSIA_ENOMEM;
    if (rc) {
        char text[512];
        snprintf(text, sizeof text, "%s", persia_err_text());
        batch_fail(b, rc, text);
        if (bytes)
            atomic_store(&bytes->users, 1);
    }
    for (size_t i = 0; i < b->n && !rc; i++)
        peer_give(b, i, &m.results[i], bytes);
    persia_wire_memory_free(&memory);
    if (bytes)
        bytes_drop(bytes);
}

static void batch_done(void *ctx, int rc, rpc_reply *reply)
{
    batch *b = ctx;
    if (rc) {
        char text[1024];
        snprintf(text, sizeof text, "%s", persia_err_text());
        batch_fail(b, rc, text);
    } else {
        batch_answered(b, reply);
    }
    free(b);
}

static int batch_put(batch *b, wire_out *o)
{
    int rc = PERSIA_OK;
    for (size_t i = 0; i < b->n && !rc; i++) {
        peer_call *c = b->calls[i];
        const wire_part m = {.shard = c->shard, .method = c->method};
        rc = persia_wire_put_part(o, &m, &c->out);
    }
    return rc;
}

static void batch_send(batch *b)
{
    wire_out o;
    persia_wire_out_init(&o);
    int rc = batch_put(b, &o);
    if (rc)
        persia_wire_out_free(&o);
    else
        rc = persia_rpc_start(b->p->channel, WIRE_MANY, &o,
                              persia_deadline_left(b->calls[0]->deadline),
                              batch_done, b);
    if (!rc)
        return;
    char text[512];
    snprintf(text, sizeof text, "%s", persia_err_text());
    batch_fail(b, rc, text);
    free(b);
}

/* Sends calls that are not queued any more. */
static void peer_send_all(peer *p, peer_call *first)
{
    size_t n = 0;
    for (const peer_call *c = first; c; c = c->next)
        n++;
    batch *b = n ? malloc(sizeof *b + n * sizeof(peer_call *)) : NULL;
    if (b) {
        *b = (batch){.p = p};
        for (peer_call *c = first; c; c = c->next)
            b->calls[b->n++] = c;
        batch_send(b);
        return;
    }
    while (first) {
        peer_call *c = first;
        first = c->next;
        call_fail(c, PERSIA_ENOMEM, "no memory for a request");
    }
}

static peer_call *peer_take_locked(peer *p)
{
    peer_call *first = p->first;
    p->first = NULL;
    p->last = &p->first;
    p->bytes = 0;
    return first;
}

void peer_queue(peer *p, peer_call *c, uint64_t most)
{
    peer_call *before = NULL;
    c->next = NULL;
    pthread_mutex_lock(&p->lock);
    const int closed = p->closed;
    if (p->first && (p->first->deadline != c->deadline ||
                     p->bytes + c->out.bytes > most))
        before = peer_take_locked(p);
    if (!closed) {
        p->bytes += c->out.bytes;
        *p->last = c;
        p->last = &c->next;
    }
    pthread_mutex_unlock(&p->lock);
    peer_send_all(p, before);
    if (closed)
        call_fail(c, PERSIA_ECLOSED, "the channel was closed");
}

void peer_flush(peer *p)
{
    pthread_mutex_lock(&p->lock);
    peer_call *first = peer_take_locked(p);
    pthread_mutex_unlock(&p->lock);
    peer_send_all(p, first);
}

/* ---- its life ---- */

int peer_open(rpc_channel *channel, const char *address, peer **out)
{
    peer *p = calloc(1, sizeof *p);
    *out = p;
    if (!p) {
        persia_rpc_channel_close(channel);
        return persia_err_set(PERSIA_ENOMEM, "no memory for a server");
    }
    p->channel = channel;
    p->last = &p->first;
    p->address = address;
    pthread_mutex_init(&p->lock, NULL);
    return PERSIA_OK;
}

const char *peer_address(const peer *p)
{
    return p->address;
}

void peer_close(peer *p)
{
    pthread_mutex_lock(&p->lock);
    const int closed = p->closed;
    p->closed = 1;
    peer_call *first = peer_take_locked(p);
    pthread_mutex_unlock(&p->lock);
    peer_send_all(p, first);
    if (!closed)
        persia_rpc_channel_close(p->channel);
}

void peer_drop(peer *p)
{
    peer_close(p);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
