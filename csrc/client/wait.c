/* wait.c: a call of one shard, by its method's number, and waiting for it. */
#include <stdlib.h>
#include <string.h>

#include "client/private.h"

void shard_queue(shard_ref *to, uint32_t method, const void *arguments,
                 uint64_t deadline, shard_done done, void *ctx)
{
    switch (method) {
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    case WIRE_##upper:                                                        \
        to->ops->name(to, arguments, deadline, done, ctx);                    \
        break;
        SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    }
}

void shard_flush(shard_ref *to)
{
    if (to->ops->flush)
        to->ops->flush(to);
}

void shard_begin(shard_ref *to, uint32_t method, const void *arguments,
                 uint64_t deadline, shard_done done, void *ctx)
{
    shard_queue(to, method, arguments, deadline, done, ctx);
    shard_flush(to);
}

/* A call that is waited for.  A thread that is interrupted leaves it
 * behind. */
typedef struct waiting {
    uint32_t method;
    errand errand; /* its lock guards all below */
    err_kept error;
    shard_reply reply;
    _Alignas(max_align_t) unsigned char arguments[];
} waiting;

static void waiting_free(waiting *w)
{
    if (w->reply.release)
        w->reply.release(&w->reply);
    persia_errand_free(&w->errand);
    free(w);
}

static void wait_copy_release(shard_reply *reply)
{
    free(reply->owner);
}

/* A reply that ends with done() is copied. */
static int wait_keep(uint32_t method, const shard_reply *reply,
                     shard_reply *out)
{
    *out = *reply;
    if (reply->release)
        return PERSIA_OK;
    const size_t bytes = shard_reply_bytes(method);
    void *copy = malloc(bytes);
    if (!copy)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a reply");
    memcpy(copy, reply->message, bytes);
    *out = (shard_reply){copy, wait_copy_release, copy};
    return PERSIA_OK;
}

static void waiting_done(void *ctx, int rc, shard_reply *reply)
{
    waiting *w = ctx;
    shard_reply kept = {0};
    if (!rc)
        rc = wait_keep(w->method, reply, &kept);
    pthread_mutex_lock(&w->errand.lock);
    persia_err_keep(&w->error, rc);
    w->reply = kept;
    if (persia_errand_land(&w->errand))
        waiting_free(w);
}

/* Waits until it is done, late or interrupted. */
static int wait_done(waiting *w, const char *address, uint64_t deadline,
                     shard_reply *reply)
{
    const uint64_t late = persia_deadline_leave(deadline);
    pthread_mutex_lock(&w->errand.lock);
    int rc = persia_errand_wait(&w->errand, late, 1);
    if (rc == PERSIA_ETIMEOUT)
        (void)persia_err_set(rc, "server %s did not answer within the "
                             "deadline", address);
    else if (rc)
        (void)persia_err_set(rc, "interrupted while waiting for server %s",
                             address);
    else if (!(rc = persia_err_again(&w->error))) {
        *reply = w->reply;
        w->reply = (shard_reply){0};
    }
    pthread_mutex_unlock(&w->errand.lock);
    return rc;
}

int persia_shard_wait(shard_ref *to, uint32_t method, const void *arguments,
                      uint64_t deadline, shard_reply *reply)
{
    static const size_t sizes[WIRE_METHODS_N] = {
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    [WIRE_##upper] = sizeof(OP_ARGS(name, message, args)),
        SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    };
    waiting *w = calloc(1, sizeof *w + sizes[method]);
    *reply = (shard_reply){0};
    if (!w)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a request");
    persia_errand_init(&w->errand);
    w->method = method;
    memcpy(w->arguments, arguments, sizes[method]);
    persia_errand_start(&w->errand);
    shard_begin(to, method, w->arguments, deadline, waiting_done, w);
    int rc = wait_done(w, to->address, deadline, reply);
    if (persia_errand_leave(&w->errand))
        waiting_free(w);
    return rc;
}

void persia_shard_release(shard_reply *reply)
{
    if (reply->release)
        reply->release(reply);
    *reply = (shard_reply){0};
}
