/* host_device.c: the host as a device. */
#include "mem/device.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct host_work {
    struct host_work *next;
    void (*fn)(const void *args);
    _Alignas(16) char args[MEM_HOST_ARGS_MAX];
} host_work;

typedef struct host_stream {
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t more;
    host_work *first, **last;
    int ends;
    pthread_t thread;
} host_stream;

typedef struct host_event {
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t moved;
    uint64_t recorded, done; /* records so far; those whose work is done */
} host_event;

int persia_mem_device_check(const mem_device *d, int code, const char *what)
{
    if (!code)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EINTERNAL, "%s device: %s failed: %s",
                          d->name, what, d->text(code));
}

/* A call that has not entered the device fails, as it may on a real one. */
static _Thread_local int entered;

static const char *host_text(int code)
{
    return code == ENOMEM  ? "out of memory"
           : code == EPERM ? "the thread has not entered the device"
                           : "no thread could be started";
}

static int host_count(int *out)
{
    *out = 1;
    return 0;
}

static int host_context(int index, void **out)
{
    (void)index;
    *out = NULL;
    return 0;
}

static int host_enter(void *context)
{
    (void)context;
    entered++;
    return 0;
}

static void host_leave(int code)
{
    if (!code)
        entered--;
}

static int host_pin(size_t bytes, void **out)
{
    *out = NULL;
    if (entered < 1)
        return EPERM;
    *out = aligned_alloc(64, (bytes + 64) / 64 * 64);
    return *out ? 0 : ENOMEM;
}

/* ---- streams ---- */

static void *stream_main(void *ctx)
{
    host_stream *s = ctx;
    pthread_mutex_lock(&s->lock);
    while (s->first || !s->ends) {
        host_work *w = s->first;
        if (!w) {
            pthread_cond_wait(&s->more, &s->lock);
            continue;
        }
        s->first = w->next;
        if (!s->first)
            s->last = &s->first;
        pthread_mutex_unlock(&s->lock);
        w->fn(w->args);
        free(w);
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static int host_stream_make(void **out)
{
    if (entered < 1)
        return EPERM;
    host_stream *s = calloc(1, sizeof *s);
    if (!s)
        return ENOMEM;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->more, NULL);
    s->last = &s->first;
    if (persia_thread_start(&s->thread, stream_main, s, "persia-stream")) {
        pthread_cond_destroy(&s->more);
        pthread_mutex_destroy(&s->lock);
        free(s);
        return EAGAIN;
    }
    *out = s;
    return 0;
}

static void host_stream_free(void *stream)
{
    host_stream *s = stream;
    pthread_mutex_lock(&s->lock);
    s->ends = 1;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->more);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

int persia_mem_host_run(void *stream, void (*fn)(const void *args),
                        const void *args, size_t bytes)
{
    host_stream *s = stream;
    assert(bytes <= MEM_HOST_ARGS_MAX);
    if (!s) {
        fn(args);
        return 0;
    }
    host_work *w = malloc(sizeof *w);
    if (!w)
        return ENOMEM;
    w->next = NULL;
    w->fn = fn;
    memcpy(w->args, args, bytes);
    pthread_mutex_lock(&s->lock);
    *s->last = w;
    s->last = &w->next;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

typedef struct host_copy {
    void *to;
    const void *from;
    size_t bytes;
} host_copy;

static void run_copy(const void *args)
{
    const host_copy *c = args;
    if (c->bytes)
        memcpy(c->to, c->from, c->bytes);
}

static int host_copy_to(void *stream, void *to, const void *from,
                        size_t bytes)
{
    const host_copy c = {to, from, bytes};
    return entered > 0 ? persia_mem_host_run(stream, run_copy, &c, sizeof c)
                       : EPERM;
}

/* ---- events ---- */

static int host_event_make(void **out)
{
    host_event *e = entered > 0 ? calloc(1, sizeof *e) : NULL;
    *out = e;
    if (!e)
        return entered > 0 ? ENOMEM : EPERM;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->moved, NULL);
    return 0;
}

static void host_event_free(void *event)
{
    host_event *e = event;
    if (!e)
        return;
    pthread_cond_destroy(&e->moved);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

typedef struct event_work {
    host_event *e;
    uint64_t number;
} event_work;

static void host_device_run_record(const void *args)
{
    const event_work *w = args;
    pthread_mutex_lock(&w->e->lock);
    if (w->e->done < w->number)
        w->e->done = w->number;
    pthread_cond_broadcast(&w->e->moved);
    pthread_mutex_unlock(&w->e->lock);
}

static void host_device_run_await(const void *args)
{
    const event_work *w = args;
    pthread_mutex_lock(&w->e->lock);
    while (w->e->done < w->number)
        pthread_cond_wait(&w->e->moved, &w->e->lock);
    pthread_mutex_unlock(&w->e->lock);
}

static event_work host_device_last_record(host_event *e, int more)
{
    pthread_mutex_lock(&e->lock);
    e->recorded += (uint64_t)more;
    const event_work w = {e, e->recorded};
    pthread_mutex_unlock(&e->lock);
    return w;
}

static int host_event_record(void *event, void *stream)
{
    if (entered < 1)
        return EPERM;
    const event_work w = host_device_last_record(event, 1);
    return persia_mem_host_run(stream, host_device_run_record, &w, sizeof w);
}

static int host_event_await(void *event, void *stream)
{
    if (entered < 1)
        return EPERM;
    const event_work w = host_device_last_record(event, 0);
    return persia_mem_host_run(stream, host_device_run_await, &w, sizeof w);
}

static int host_event_done(void *event, int *done)
{
    host_event *e = event;
    if (entered < 1)
        return EPERM;
    pthread_mutex_lock(&e->lock);
    *done = e->done == e->recorded;
    pthread_mutex_unlock(&e->lock);
    return 0;
}

static int host_event_wait(void *event)
{
    if (entered < 1)
        return EPERM;
    const event_work w = host_device_last_record(event, 0);
    host_device_run_await(&w);
    return 0;
}

const mem_device *persia_mem_host_device(void)
{
    static const mem_device host = {
        .name = "host",
        .text = host_text,
        .count = host_count,
        .context = host_context,
        .enter = host_enter,
        .leave = host_leave,
        .pin = host_pin,
        .unpin = free,
        .stream_make = host_stream_make,
        .stream_free = host_stream_free,
        .copy = host_copy_to,
        .event_make = host_event_make,
        .event_free = host_event_free,
        .event_record = host_event_record,
        .event_await = host_event_await,
        .event_done = host_event_done,
        .event_wait = host_event_wait,
    };
    return &host;
}
