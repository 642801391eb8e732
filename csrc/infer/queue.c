/* queue.c: requests that wait for a thread. */
#include "infer/infer.h"

#include <stdlib.h>
#include <string.h>

#define SERVICE "inference.GRPCInferenceService"

static const char *const paths[INFER_METHODS] = {
    [INFER_SERVER_LIVE] = "/" SERVICE "/ServerLive",
    [INFER_SERVER_READY] = "/" SERVICE "/ServerReady",
    [INFER_MODEL_READY] = "/" SERVICE "/ModelReady",
    [INFER_SERVER_METADATA] = "/" SERVICE "/ServerMetadata",
    [INFER_MODEL_METADATA] = "/" SERVICE "/ModelMetadata",
    [INFER_MODEL_CONFIG] = "/" SERVICE "/ModelConfig",
    [INFER_MODEL_STATISTICS] = "/" SERVICE "/ModelStatistics",
    [INFER_MODEL_INFER] = "/" SERVICE "/ModelInfer",
    [INFER_INDEX] = "/" SERVICE "/RepositoryIndex",
    [INFER_LOAD] = "/" SERVICE "/RepositoryModelLoad",
    [INFER_UNLOAD] = "/" SERVICE "/RepositoryModelUnload",
};

static const uint32_t roles[INFER_METHODS] = {
    [INFER_SERVER_LIVE] = RPC_ALL,
    [INFER_SERVER_READY] = RPC_ALL,
    [INFER_MODEL_READY] = RPC_ALL,
    [INFER_SERVER_METADATA] = RPC_SERVE,
    [INFER_MODEL_METADATA] = RPC_SERVE,
    [INFER_MODEL_CONFIG] = RPC_SERVE,
    [INFER_MODEL_STATISTICS] = RPC_SERVE,
    [INFER_MODEL_INFER] = RPC_SERVE,
    [INFER_INDEX] = RPC_SERVE,
    [INFER_LOAD] = RPC_ADMIN,
    [INFER_UNLOAD] = RPC_ADMIN,
};

const rpc_methods persia_infer_methods = {SERVICE, paths, INFER_METHODS, 0,
                                          roles};

typedef struct infer_line {
    infer_item *first, **last;
    pthread_cond_t changed;
} infer_line;

struct infer_queue {
    uint64_t room, timeout_ns;
    pthread_mutex_t lock; /* guards what follows */
    infer_line requests, others;
    uint64_t samples; /* of the requests */
    uint64_t refused[PERSIA_ERROR_COUNT];
    int closed;
};

void persia_infer_item_free(infer_item *item)
{
    persia_infer_free(&item->request);
    free(item);
}

static void line_init(infer_line *l)
{
    l->first = NULL;
    l->last = &l->first;
    persia_cond_init(&l->changed);
}

int persia_infer_queue_create(uint64_t room, uint64_t timeout_ns,
                              infer_queue **out)
{
    infer_queue *q = calloc(1, sizeof *q);
    *out = q;
    if (!q)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a queue");
    q->room = room;
    q->timeout_ns = timeout_ns;
    pthread_mutex_init(&q->lock, NULL);
    line_init(&q->requests);
    line_init(&q->others);
    return PERSIA_OK;
}

void persia_infer_queue_free(infer_queue *q)
{
    if (!q)
        return;
    pthread_cond_destroy(&q->requests.changed);
    pthread_cond_destroy(&q->others.changed);
    pthread_mutex_destroy(&q->lock);
    free(q);
}

/* ---- in ----------------------------------------------------------------- */

static int queue_put_locked(infer_queue *q, infer_line *l, infer_item *item)
{
    if (q->closed)
        return persia_err_set(PERSIA_ECLOSED, "the server ends");
    /* One that is larger than the queue may wait alone. */
    if (l->first && q->samples + item->samples > q->room)
        return persia_err_set(PERSIA_ELIMIT,
                              "%llu samples wait, and the queue has room for "
                              "%llu: send less, or add servers",
                              (unsigned long long)q->samples,
                              (unsigned long long)q->room);
    q->samples += item->samples;
    item->next = NULL;
    *l->last = item;
    l->last = &item->next;
    pthread_cond_signal(&l->changed);
    return PERSIA_OK;
}

int persia_infer_put(infer_queue *q, infer_item *item)
{
    item->samples = 1;
    for (size_t i = 0; i < item->request.inputs_n; i++) {
        const uint64_t n = (uint64_t)item->request.inputs[i].shape[0];
        item->samples = n > item->samples ? n : item->samples;
    }
    pthread_mutex_lock(&q->lock);
    const int code = queue_put_locked(q, &q->requests, item);
    pthread_mutex_unlock(&q->lock);
    return code;
}

static int queue_put_other(infer_queue *q, infer_item *item)
{
    pthread_mutex_lock(&q->lock);
    const int code = queue_put_locked(q, &q->others, item);
    pthread_mutex_unlock(&q->lock);
    return code;
}

/* The caller's deadline counts in any case. */
static void queue_limit(infer_item *item, uint64_t deadline)
{
    const uint64_t us = item->request.timeout_us;
    if (us < INT64_MAX / 1000)
        item->until = item->began + us * 1000;
    if (deadline < item->until)
        item->until = deadline;
}

void persia_infer_handle(void *ctx, rpc_call *call)
{
    infer_queue *q = ctx;
    infer_item *item = calloc(1, sizeof *item);
    int code = item ? PERSIA_OK
                    : persia_err_set(PERSIA_ENOMEM, "no memory for a request");
    if (item) {
        item->call = call;
        item->began = persia_clock_ns();
        item->until = item->began + q->timeout_ns;
        if (call->method != INFER_MODEL_INFER)
            code = queue_put_other(q, item);
        else if (!(code = persia_infer_decode(call->request, call->request_n,
                                              &item->request))) {
            queue_limit(item, call->deadline);
            code = persia_infer_put(q, item);
        }
    }
    if (!code)
        return;
    if (item)
        persia_infer_item_free(item);
    pthread_mutex_lock(&q->lock);
    q->refused[code]++;
    pthread_mutex_unlock(&q->lock);
    call->fail(call, code, persia_err_text());
}

/* ---- out ---------------------------------------------------------------- */

static infer_item *queue_wait_locked(infer_queue *q, infer_line *l)
{
    while (!l->first && !q->closed)
        persia_cond_wait(&l->changed, &q->lock);
    return l->first;
}

static void line_cut_locked(infer_line *l, infer_item *last)
{
    l->first = last->next;
    if (!l->first)
        l->last = &l->first;
    last->next = NULL;
}

infer_item *persia_infer_take(infer_queue *q, uint64_t samples)
{
    pthread_mutex_lock(&q->lock);
    infer_item *first = queue_wait_locked(q, &q->requests), *last = first;
    if (first) {
        uint64_t sum = first->samples;
        for (; last->next && sum + last->next->samples <= samples;
             last = last->next)
            sum += last->next->samples;
        q->samples -= sum;
        line_cut_locked(&q->requests, last);
    }
    pthread_mutex_unlock(&q->lock);
    return first;
}

infer_item *persia_infer_take_other(infer_queue *q)
{
    pthread_mutex_lock(&q->lock);
    infer_item *first = queue_wait_locked(q, &q->others);
    if (first)
        line_cut_locked(&q->others, first);
    pthread_mutex_unlock(&q->lock);
    return first;
}

uint64_t persia_infer_waiting(infer_queue *q)
{
    pthread_mutex_lock(&q->lock);
    const uint64_t n = q->samples;
    pthread_mutex_unlock(&q->lock);
    return n;
}

void persia_infer_refused(infer_queue *q, uint64_t *out)
{
    pthread_mutex_lock(&q->lock);
    memcpy(out, q->refused, sizeof q->refused);
    pthread_mutex_unlock(&q->lock);
}

void persia_infer_close(infer_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->closed = 1;
    pthread_cond_broadcast(&q->requests.changed);
    pthread_cond_broadcast(&q->others.changed);
    pthread_mutex_unlock(&q->lock);
}
