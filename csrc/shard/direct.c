/* direct.c: the shard of this process, called without messages. */
#include "shard/private.h"

#include <stdlib.h>
#include <string.h>

/* ---- answers ------------------------------------------------------------ */

static void direct_drop_user(direct *d)
{
    if (atomic_fetch_sub(&d->users, 1) != 1)
        return;
    pthread_mutex_lock(&d->lock);
    d->ended = 1;
    pthread_cond_signal(&d->end);
    pthread_mutex_unlock(&d->lock);
}

void call_end(const shard_call *c, int rc, shard_reply *reply)
{
    direct *from = c->from;
    c->done(c->ctx, rc, reply);
    direct_drop_user(from);
}

void call_fail(const shard_call *c, int code, const char *text)
{
    shard_reply none = {.message = NULL};
    call_end(c, persia_err_set(code, "%s", text), &none);
}

void call_reply(const shard_call *c, int rc, const void *message)
{
    shard_reply reply = {.message = rc ? NULL : message};
    call_end(c, rc, &reply);
}

void call_own(const shard_call *c, int rc, shard_reply *reply)
{
    if (rc && reply->release)
        reply->release(reply);
    if (rc)
        *reply = (shard_reply){.message = NULL};
    call_end(c, rc, reply);
}

static void direct_own_release(shard_reply *reply)
{
    wire_memory memory = *(wire_memory *)reply->owner; /* it lies in it */
    persia_wire_memory_free(&memory);
}

int persia_shard_reply_make(size_t bytes, shard_reply *out,
                            wire_memory **memory)
{
    wire_memory m;
    persia_wire_memory_init(&m);
    wire_memory *own = persia_wire_memory_take(&m, sizeof *own);
    void *message = own ? persia_wire_memory_take(&m, bytes) : NULL;
    *memory = own;
    *out = (shard_reply){message, direct_own_release, own};
    if (message) {
        memset(message, 0, bytes);
        *own = m;
        return PERSIA_OK;
    }
    persia_wire_memory_free(&m);
    *out = (shard_reply){.message = NULL};
    return PERSIA_ENOMEM;
}

int answer_make(answer **out)
{
    wire_memory memory;
    persia_wire_memory_init(&memory);
    answer *a = persia_wire_memory_take(&memory, sizeof *a);
    *out = a;
    if (!a)
        return PERSIA_ENOMEM;
    *a = (answer){.memory = memory};
    return PERSIA_OK;
}

static void answer_free(answer *a)
{
    if (!a)
        return;
    wire_memory memory = a->memory; /* it lies in it */
    persia_mem_pool_give(a->bulk);
    persia_wire_memory_free(&memory);
}

static void answer_release(shard_reply *reply)
{
    answer_free(reply->owner);
}

void answer_give(const shard_call *c, int rc, answer *a)
{
    shard_reply reply = {.message = NULL};
    if (rc)
        answer_free(a);
    else
        reply = (shard_reply){&a->m, answer_release, a};
    call_end(c, rc, &reply);
}

/* ---- the table of the body ---------------------------------------------- */

shard_call direct_call_begin(shard_ref *to, uint64_t deadline,
                             shard_done done, void *ctx)
{
    direct *d = (direct *)to;
    atomic_fetch_add(&d->users, 1);
    return (shard_call){d, deadline, done, ctx};
}

#define DIRECT_AT_ONCE(name, asked, answered, args)                           \
    static void direct_##name(shard_ref *to, const wire_##asked *m,           \
                              uint64_t deadline, shard_done done, void *ctx)  \
    {                                                                         \
        const shard_call c = direct_call_begin(to, deadline, done, ctx);      \
        wire_##answered *out = NULL;                                          \
        wire_memory *memory;                                                  \
        shard_reply reply;                                                    \
        int rc = persia_shard_reply_make(sizeof *out, &reply, &memory);       \
        if (!rc)                                                              \
            rc = name##_answer(c.from->s, m, memory,                          \
                               (void *)(uintptr_t)reply.message);             \
        call_own(&c, rc, &reply);                                             \
    }
#define DIRECT_BY_ITSELF(name, message, reply, args)                          \
    static void direct_##name(shard_ref *to,                                  \
                              const OP_ARGS(name, message, args) * a,         \
                              uint64_t deadline, shard_done done, void *ctx)  \
    {                                                                         \
        const shard_call c = direct_call_begin(to, deadline, done, ctx);      \
        name##_run(c.from->s, &c, a);                                         \
    }
#define METHOD(upper, name, message, reply, args, answers, flags, who)        \
    DIRECT_##answers(name, message, reply, args)
SHARD_OPS(METHOD)
#undef METHOD

static void direct_close(shard_ref *to)
{
    direct *d = (direct *)to;
    persia_shard_refuse(to, PERSIA_ECLOSED, "the store was closed");
    direct_drop_user(d);
    pthread_mutex_lock(&d->lock);
    while (!d->ended)
        persia_cond_wait(&d->end, &d->lock);
    pthread_mutex_unlock(&d->lock);
    pthread_cond_destroy(&d->end);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static const shard_ops direct_ops = {
#define METHOD(upper, name, message, reply, args, answers, flags, who)        \
    .name = direct_##name,
    SHARD_OPS(METHOD)
#undef METHOD
    .close = direct_close};

int persia_shard_direct(shard *s, shard_ref **out)
{
    direct *d = calloc(1, sizeof *d);
    *out = NULL;
    if (!d)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a way to a shard");
    d->ref = (shard_ref){.ops = &direct_ops, .address = "this process",
                         .direct = 1};
    d->s = s;
    atomic_init(&d->users, 1);
    pthread_mutex_init(&d->lock, NULL);
    persia_cond_init(&d->end);
    *out = &d->ref;
    return PERSIA_OK;
}
