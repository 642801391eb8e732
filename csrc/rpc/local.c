/* local.c: a channel to a handler of this process.
 *
 * The request is copied into one piece and handed to the handler on the
 * caller's thread; the answer goes to the callback on the thread that gives
 * it.  A call belongs to two: the handler, until it answers, and the channel,
 * until the callback was called; the last one frees it.
 */
#include "rpc/channel.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct local_call local_call;

typedef struct local_channel {
    rpc_channel base;
    rpc_handler handler;
    void *handler_ctx;
    pthread_mutex_t lock; /* guards what follows, and the calls' links */
    pthread_cond_t idle;  /* busy became 0 */
    local_call *calls;    /* whose callback is still to come */
    unsigned busy;        /* callbacks that run, calls that start */
    unsigned users;       /* the owner and each call not answered yet */
    int closed;
} local_channel;

struct local_call {
    rpc_call call; /* first: the handler's pointer is ours */
    local_channel *channel;
    void *request;
    rpc_callback callback;
    void *ctx;
    /* Guarded by the channel's lock. */
    int listed; /* the callback is still to come */
    local_call *next, **link;
};

/* Drops `users` and unlocks; the last one frees. */
static void channel_drop(local_channel *c, unsigned users)
{
    c->users -= users;
    int last = !c->users;
    pthread_mutex_unlock(&c->lock);
    if (!last)
        return;
    pthread_cond_destroy(&c->idle);
    pthread_mutex_destroy(&c->lock);
    free(c->base.address);
    free(c);
}

/* Under the lock.  Whoever gets 1 must call the callback. */
static int call_claim(local_call *l)
{
    if (!l->listed)
        return 0;
    l->listed = 0;
    *l->link = l->next;
    if (l->next)
        l->next->link = l->link;
    l->channel->busy++;
    return 1;
}

/* Under the lock. */
static void busy_done(local_channel *c)
{
    if (--c->busy == 0)
        pthread_cond_broadcast(&c->idle);
}

/* Gives the answer, whose text is err_text(), and ends the call. */
static void call_end(local_call *l, int rc, rpc_reply *reply)
{
    local_channel *c = l->channel;
    pthread_mutex_lock(&c->lock);
    int claimed = call_claim(l);
    pthread_mutex_unlock(&c->lock);
    bytes_give(l->request);
    if (claimed)
        l->callback(l->ctx, rc, reply);
    else
        rpc_reply_free(reply);
    free(l);
    pthread_mutex_lock(&c->lock);
    if (claimed)
        busy_done(c);
    channel_drop(c, 1);
}

static void local_reply(rpc_call *call, wire_out *o, void (*done)(void *owner),
                        void *owner)
{
    rpc_reply reply = {.n = o->bytes};
    int rc = PERSIA_OK;
    reply.data = reply.memory = bytes_take(o->bytes);
    if (reply.data)
        wire_out_copy(o, reply.data);
    else
        rc = PERSIA_ENOMEM;
    wire_out_free(o);
    if (done)
        done(owner);
    if (rc != PERSIA_OK) {
        reply.n = 0;
        (void)err_set(rc, "out of memory: a reply");
    }
    call_end((local_call *)call, rc, &reply);
}

static void local_fail(rpc_call *call, int code, const char *text)
{
    rpc_reply none = {0};
    if (code <= PERSIA_OK || code >= PERSIA_ERROR_COUNT)
        code = PERSIA_EINTERNAL;
    (void)err_set(code, "%s", text ? text : err_message(code));
    call_end((local_call *)call, code, &none);
}

static int local_start(rpc_channel *base, uint32_t method, wire_out *o,
                       uint64_t timeout_ns, rpc_callback callback, void *ctx)
{
    local_channel *c = (local_channel *)base;
    local_call *l = calloc(1, sizeof *l);
    void *request = bytes_take(o->bytes);
    size_t n = o->bytes;
    if (!l || !request) {
        wire_out_free(o);
        bytes_give(request);
        free(l);
        return err_set(PERSIA_ENOMEM, "out of memory: a request of %zu bytes",
                       n);
    }
    wire_out_copy(o, request);
    wire_out_free(o);
    uint64_t now = clock_ns();
    *l = (local_call){
        .call = {.method = method,
                 .request = request,
                 .request_n = n,
                 .deadline = timeout_ns > UINT64_MAX - now ? UINT64_MAX
                                                           : now + timeout_ns,
                 .admin = 1,
                 .local = 1,
                 .reply = local_reply,
                 .fail = local_fail},
        .channel = c,
        .request = request,
        .callback = callback,
        .ctx = ctx,
        .listed = 1,
    };
    pthread_mutex_lock(&c->lock);
    if (c->closed) {
        pthread_mutex_unlock(&c->lock);
        bytes_give(request);
        free(l);
        return err_set(PERSIA_ECLOSED, "the channel was closed");
    }
    l->next = c->calls;
    l->link = &c->calls;
    if (c->calls)
        c->calls->link = &l->next;
    c->calls = l;
    c->users += 2; /* the call, and this function */
    c->busy++;
    pthread_mutex_unlock(&c->lock);

    c->handler(c->handler_ctx, &l->call);

    pthread_mutex_lock(&c->lock);
    busy_done(c);
    channel_drop(c, 1);
    return PERSIA_OK;
}

/* Ends, with the error, the calls of ctx (NULL: all): their callbacks come
 * now, the handlers answer into the void.  Under the lock. */
static void end_calls(local_channel *c, void *ctx, int code, const char *text)
{
    for (local_call *l = c->calls, *next; l; l = next) {
        next = l->next;
        if (ctx && l->ctx != ctx)
            continue;
        (void)call_claim(l);
        rpc_callback callback = l->callback;
        void *call_ctx = l->ctx;
        /* From here on l is the handler's: it may be gone any moment. */
        pthread_mutex_unlock(&c->lock);
        rpc_reply none = {0};
        (void)err_set(code, "%s", text);
        callback(call_ctx, code, &none);
        pthread_mutex_lock(&c->lock);
        busy_done(c);
        next = c->calls; /* the list may have changed */
    }
}

static void local_cancel(rpc_channel *base, void *ctx)
{
    local_channel *c = (local_channel *)base;
    pthread_mutex_lock(&c->lock);
    end_calls(c, ctx, PERSIA_ETIMEOUT, "no answer within the deadline");
    pthread_mutex_unlock(&c->lock);
}

static void local_close(rpc_channel *base)
{
    local_channel *c = (local_channel *)base;
    pthread_mutex_lock(&c->lock);
    c->closed = 1;
    end_calls(c, NULL, PERSIA_ECLOSED, "the channel was closed");
    while (c->busy)
        pthread_cond_wait(&c->idle, &c->lock);
    channel_drop(c, 1);
}

static const channel_kind local_kind = {local_start, local_cancel,
                                        local_close};

int rpc_channel_local(const rpc_methods *methods, rpc_handler handler,
                      void *ctx, rpc_channel **out)
{
    *out = NULL;
    int code = fork_check("a channel");
    if (code != PERSIA_OK)
        return code;
    local_channel *c = calloc(1, sizeof *c);
    char *address = strdup("this process");
    if (!c || !address) {
        free(c);
        free(address);
        return err_set(PERSIA_ENOMEM, "out of memory: a channel");
    }
    c->base = (rpc_channel){&local_kind, address, methods};
    c->handler = handler;
    c->handler_ctx = ctx;
    c->users = 1;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->idle, NULL);
    *out = &c->base;
    return PERSIA_OK;
}
