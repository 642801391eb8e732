/* link.c: see link.h. */
#include "cuda/link.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"
#include "simd/simd.h"

struct device_link {
    const cuda_device *d;
    int index;
    void *context;
    void *in, *out;             /* streams of copies there and back */
    pthread_mutex_t lock;       /* guards all below */
    link_buffer *first, **last; /* given back, oldest first */
    link_buffer *kept;          /* by their numbers */
    uint64_t numbers;           /* the last one */
    uint64_t takes;             /* so far */
    size_t buffers, bytes;      /* all that are pinned */
};

/* All links of the process. */
static struct {
    pthread_mutex_t lock; /* guards all below */
    device_link links[LINKS_MAX];
    uint32_t n;
} registry = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int link_check(const device_link *l, int code, const char *what)
{
    return persia_mem_device_check(&l->d->mem, code, what);
}

/* ---- links ---- */

static int link_make(const cuda_device *d, int index, void *in, void *out,
                     device_link *l)
{
    *l = (device_link){.d = d, .index = index, .in = in, .out = out};
    int code = d->mem.context(index, &l->context);
    if (code)
        return link_check(l, code, "opening it");
    const int entered = d->mem.enter(l->context);
    code = entered;
    if (!code && !in)
        code = d->mem.stream_make(&l->in);
    if (!code && !out)
        code = d->mem.stream_make(&l->out);
    if (code && !in && l->in)
        d->mem.stream_free(l->in);
    d->mem.leave(entered);
    if (code)
        return link_check(l, code, "making a stream");
    pthread_mutex_init(&l->lock, NULL);
    l->last = &l->first;
    return PERSIA_OK;
}

int persia_link_open(const char *device, int index, void *in, void *out,
                     uint32_t *number)
{
    const cuda_device *d;
    int rc = persia_fork_check("a device");
    if (!rc)
        rc = persia_cuda_open(device, &d);
    if (rc)
        return rc;
    pthread_mutex_lock(&registry.lock);
    uint32_t i = 0;
    while (i < registry.n && (registry.links[i].d != d ||
                              registry.links[i].index != index))
        i++;
    if (i == LINKS_MAX)
        rc = persia_err_set(PERSIA_ELIMIT, "more than %d devices", LINKS_MAX);
    else if (i == registry.n)
        rc = link_make(d, index, in, out, &registry.links[i]);
    if (!rc && i == registry.n)
        registry.n++;
    pthread_mutex_unlock(&registry.lock);
    *number = i;
    return rc;
}

device_link *persia_link_get(uint32_t number)
{
    pthread_mutex_lock(&registry.lock);
    device_link *l = number < registry.n ? &registry.links[number] : NULL;
    pthread_mutex_unlock(&registry.lock);
    if (!l)
        persia_err_set(PERSIA_EARG, "there is no link %u to a device", number);
    return l;
}

const cuda_device *persia_link_device(const device_link *l)
{
    return l->d;
}

/* ---- buffers ---- */

static void buffer_free(link_buffer *b)
{
    const mem_device *m = &b->link->d->mem;
    const int entered = m->enter(b->link->context);
    if (b->event)
        m->event_wait(b->event);
    m->unpin(b->data);
    m->event_free(b->event);
    m->event_free(b->ready);
    m->leave(entered);
    free(b);
}

/* Sizes are a power of two or half-way to the next: batches of nearly one
 * size share their buffers. */
static size_t link_rounded(size_t bytes)
{
    size_t room = 4096;
    while (room < bytes && room + room / 2 < bytes)
        room *= 2;
    return room < bytes ? room + room / 2 : room;
}

static int buffer_make(device_link *l, size_t room, link_buffer **out)
{
    const mem_device *m = &l->d->mem;
    link_buffer *b = calloc(1, sizeof *b);
    if (!b)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a buffer");
    b->link = l;
    b->room = room;
    const int entered = m->enter(l->context);
    int code = entered ? entered : m->pin(room, &b->data);
    if (!code)
        code = m->event_make(&b->event);
    if (!code)
        code = m->event_make(&b->ready);
    m->leave(entered);
    if (code) {
        buffer_free(b);
        return link_check(l, code, "pinning a buffer");
    }
    pthread_mutex_lock(&l->lock);
    l->buffers++;
    l->bytes += room;
    pthread_mutex_unlock(&l->lock);
    *out = b;
    return PERSIA_OK;
}

/* Whether a free buffer has this room, and its copy is done. */
static int link_fits(const device_link *l, const link_buffer *b, size_t room)
{
    int done = 0;
    return b->room == room && !l->d->mem.event_done(b->event, &done) && done;
}

int persia_link_take(device_link *l, size_t bytes, link_buffer **out)
{
    const size_t room = link_rounded(bytes);
    link_buffer *b = NULL;
    const int entered = l->d->mem.enter(l->context);
    pthread_mutex_lock(&l->lock);
    l->takes++;
    link_buffer **at = &l->first;
    while (*at && !link_fits(l, *at, room))
        at = &(*at)->next;
    if (*at) {
        b = *at;
        *at = b->next;
        if (!*at)
            l->last = at;
    }
    pthread_mutex_unlock(&l->lock);
    l->d->mem.leave(entered);
    if (!b)
        return buffer_make(l, room, out);
    *out = b;
    return PERSIA_OK;
}

void persia_link_give(link_buffer *b)
{
    if (!b)
        return;
    device_link *l = b->link;
    pthread_mutex_lock(&l->lock);
    b->next = NULL;
    b->given = l->takes;
    *l->last = b;
    l->last = &b->next;
    link_buffer *idle = l->first;
    if (l->takes - idle->given > LINK_IDLE_TAKES) { /* so it is not b */
        l->first = idle->next;
        l->buffers--;
        l->bytes -= idle->room;
    } else {
        idle = NULL;
    }
    pthread_mutex_unlock(&l->lock);
    if (idle)
        buffer_free(idle);
}

uint64_t persia_link_keep(link_buffer *b)
{
    device_link *l = b->link;
    pthread_mutex_lock(&l->lock);
    const uint64_t number = b->number = ++l->numbers;
    b->next = l->kept;
    l->kept = b;
    pthread_mutex_unlock(&l->lock);
    return number;
}

link_buffer *persia_link_kept(device_link *l, uint64_t number)
{
    pthread_mutex_lock(&l->lock);
    link_buffer **at = &l->kept;
    while (*at && (*at)->number != number)
        at = &(*at)->next;
    link_buffer *b = *at;
    if (b)
        *at = b->next;
    pthread_mutex_unlock(&l->lock);
    return b;
}

void persia_link_pinned(device_link *l, size_t *buffers, size_t *bytes)
{
    pthread_mutex_lock(&l->lock);
    *buffers = l->buffers;
    *bytes = l->bytes;
    pthread_mutex_unlock(&l->lock);
}

/* ---- copies ---- */

/* What is read lies at or behind what is written, and is read before. */
HOT static void link_narrow(void *data, size_t n, uint32_t dtype)
{
    for (size_t i = 0; i < n; i++) {
        float value;
        memcpy(&value, (char *)data + i * sizeof value, sizeof value);
        const uint16_t half = dtype == CUDA_F16 ? fp16_narrow(value)
                                                : bf16_narrow(value);
        memcpy((char *)data + i * sizeof half, &half, sizeof half);
    }
}

/* From the end: what is read lies before what is written. */
HOT static void link_widen(void *data, size_t n, uint32_t dtype)
{
    for (size_t i = n; i-- > 0;) {
        uint16_t half;
        memcpy(&half, (char *)data + i * sizeof half, sizeof half);
        const float value = dtype == CUDA_F16 ? fp16_widen(half)
                                              : bf16_widen(half);
        memcpy((char *)data + i * sizeof value, &value, sizeof value);
    }
}

int persia_link_send(link_buffer *b, void *to, size_t n, uint32_t dtype)
{
    const device_link *l = b->link;
    const mem_device *m = &l->d->mem;
    if (dtype != CUDA_F32)
        link_narrow(b->data, n, dtype);
    const int entered = m->enter(l->context);
    int code = entered;
    if (!code)
        code = m->copy(l->in, to, b->data, n * cuda_dtype_bytes(dtype));
    if (!code)
        code = m->event_record(b->event, l->in);
    m->leave(entered);
    return link_check(l, code, "a copy to the device");
}

int persia_link_await(link_buffer *b, void *stream)
{
    const device_link *l = b->link;
    const int entered = l->d->mem.enter(l->context);
    const int code = entered ? entered
                             : l->d->mem.event_await(b->event, stream);
    l->d->mem.leave(entered);
    return link_check(l, code, "waiting for a copy");
}

int persia_link_fetch(link_buffer *b, const void *from, size_t n,
                      uint32_t dtype, void *stream)
{
    const device_link *l = b->link;
    const mem_device *m = &l->d->mem;
    const int entered = m->enter(l->context);
    int code = entered ? entered : m->event_record(b->ready, stream);
    if (!code)
        code = m->event_await(b->ready, l->out);
    if (!code)
        code = m->copy(l->out, b->data, from, n * cuda_dtype_bytes(dtype));
    if (!code)
        code = m->event_record(b->event, l->out);
    m->leave(entered);
    b->dtype = dtype;
    b->n = n;
    return link_check(l, code, "a copy from the device");
}

int persia_link_wait(link_buffer *b)
{
    const device_link *l = b->link;
    const int entered = l->d->mem.enter(l->context);
    const int code = entered ? entered : l->d->mem.event_wait(b->event);
    l->d->mem.leave(entered);
    return link_check(l, code, "a copy");
}

int persia_link_floats(link_buffer *b, const float **out)
{
    int rc = persia_link_wait(b);
    if (!rc && b->dtype != CUDA_F32) {
        link_widen(b->data, b->n, b->dtype);
        b->dtype = CUDA_F32;
    }
    *out = b->data;
    return rc;
}
