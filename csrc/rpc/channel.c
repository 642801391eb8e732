/* channel.c: what is the same for all kinds of channels; waiting calls. */
#include "rpc/channel.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { TEXT_BYTES = 1024 };

/* A waiting thread looks for signals this often. */

/* Handlers of this process keep the deadline themselves; one that is this
 * late is not waited for. */
static const uint64_t LATE_NS = 1000000000;

const char *method_name(const rpc_channel *c, uint32_t method)
{
    if (method >= c->methods->n)
        return "?";
    return strrchr(c->methods->paths[method], '/') + 1;
}

int rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
              uint64_t timeout_ns, rpc_callback callback, void *ctx)
{
    int code = fork_check("a channel");
    if (code == PERSIA_OK && method >= c->methods->n)
        code = err_set(PERSIA_EARG, "there is no method %u", method);
    if (code == PERSIA_OK && timeout_ns == 0)
        code = err_set(PERSIA_ETIMEOUT, "server %s: no time left for %s",
                       c->address, method_name(c, method));
    if (code != PERSIA_OK) {
        wire_out_free(o);
        return code;
    }
    return c->kind->start(c, method, o, timeout_ns, callback, ctx);
}

/* ---- waiting ---- */

typedef struct waiter {
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t answered;
    int done;
    int rc;
    rpc_reply reply;
    char text[TEXT_BYTES]; /* of an error */
} waiter;

static void waiter_answer(void *ctx, int rc, rpc_reply *reply)
{
    waiter *w = ctx;
    pthread_mutex_lock(&w->lock);
    w->rc = rc;
    w->reply = *reply;
    if (rc != PERSIA_OK)
        snprintf(w->text, sizeof w->text, "%s", err_text());
    w->done = 1;
    pthread_cond_signal(&w->answered);
    pthread_mutex_unlock(&w->lock);
}

int rpc_wait(rpc_channel *c, uint32_t method, wire_out *o,
             uint64_t timeout_ns, rpc_reply *reply)
{
    waiter w = {.lock = PTHREAD_MUTEX_INITIALIZER};
    cond_init(&w.answered);
    *reply = (rpc_reply){0};

    uint64_t now = clock_ns();
    uint64_t late = timeout_ns > UINT64_MAX - now - LATE_NS
                        ? UINT64_MAX
                        : now + timeout_ns + LATE_NS;
    int stopped = PERSIA_OK;
    int code = rpc_start(c, method, o, timeout_ns, waiter_answer, &w);
    if (code != PERSIA_OK)
        goto out;
    pthread_mutex_lock(&w.lock);
    while (!w.done) {
        if (stopped != PERSIA_OK) { /* it was cancelled */
            pthread_cond_wait(&w.answered, &w.lock);
            continue;
        }
        stopped = cond_wait_poll(&w.answered, &w.lock, late);
        if (stopped == PERSIA_OK && !w.done && clock_ns() > late)
            stopped = PERSIA_ETIMEOUT;
        if (stopped == PERSIA_OK)
            continue;
        pthread_mutex_unlock(&w.lock);
        c->kind->cancel(c, &w);
        pthread_mutex_lock(&w.lock);
    }
    pthread_mutex_unlock(&w.lock);
    code = w.rc;
    if (stopped == PERSIA_EINTR) {
        /* Even if an answer came: the interrupt was taken. */
        rpc_reply_free(&w.reply);
        code = err_set(stopped, "interrupted while waiting for server %s",
                       c->address);
    } else if (code != PERSIA_OK) {
        (void)err_set(code, "%s", w.text);
    } else {
        *reply = w.reply;
    }
out:
    pthread_cond_destroy(&w.answered);
    pthread_mutex_destroy(&w.lock);
    return code;
}

void rpc_channel_close(rpc_channel *c)
{
    /* In a forked child there is nobody to wait for: leave everything. */
    if (c && fork_check("a channel") == PERSIA_OK)
        c->kind->close(c);
}

const char *rpc_channel_address(const rpc_channel *c)
{
    return c->address;
}
