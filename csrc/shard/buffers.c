#include "shard/buffers.h"

#include <pthread.h>
#include <stdlib.h>

struct buffers {
    uint64_t keep;
    pthread_mutex_t lock; /* guards all below */
    buffer *kept;         /* given back last first */
    uint64_t kept_bytes, bytes;
    uint64_t used; /* buffers in use */
    int destroyed;
};

int buffers_create(uint64_t keep, buffers **out)
{
    buffers *b = calloc(1, sizeof *b);
    *out = b;
    if (!b)
        return persia_err_set(PERSIA_ENOMEM, "no memory for buffers");
    b->keep = keep;
    pthread_mutex_init(&b->lock, NULL);
    return PERSIA_OK;
}

static void buffers_free_list(buffer *list)
{
    while (list) {
        buffer *one = list;
        list = one->next;
        free(one->data);
        free(one);
    }
}

static void buffers_free_all(buffers *b)
{
    buffers_free_list(b->kept);
    pthread_mutex_destroy(&b->lock);
    free(b);
}

void buffers_destroy(buffers *b)
{
    if (!b)
        return;
    pthread_mutex_lock(&b->lock);
    b->destroyed = 1;
    int last = b->used == 0;
    pthread_mutex_unlock(&b->lock);
    if (last)
        buffers_free_all(b);
}

/* Sizes in steps of an eighth, so that replies of about the same size find
 * each other's buffers. */
static size_t buffers_round_size(size_t bytes)
{
    size_t step = 4096;
    while (step * 16 <= bytes)
        step *= 2;
    return (bytes + step - 1) / step * step;
}

int buffers_take(buffers *b, size_t bytes, buffer **out)
{
    size_t size;
    buffer **best = NULL, *one = NULL;
    *out = NULL;
    if (bytes > SIZE_MAX / 4)
        return persia_err_set(PERSIA_ELIMIT, "a reply of %zu bytes", bytes);
    size = buffers_round_size(bytes ? bytes : 1);
    pthread_mutex_lock(&b->lock);
    for (buffer **at = &b->kept; *at; at = &(*at)->next)
        if ((*at)->size >= size && (*at)->size / 2 <= size &&
            (!best || (*at)->size < (*best)->size))
            best = at;
    if (best) {
        one = *best;
        *best = one->next;
        b->kept_bytes -= one->size;
        b->used++;
    }
    pthread_mutex_unlock(&b->lock);
    if (!one) {
        one = malloc(sizeof *one);
        void *data = aligned_alloc(64, size);
        if (!one || !data) {
            free(one);
            free(data);
            return persia_err_set(PERSIA_ENOMEM,
                                  "no memory for a reply of %zu "
                                  "bytes",
                                  bytes);
        }
        *one = (buffer){.data = data, .size = size, .owner = b};
        pthread_mutex_lock(&b->lock);
        b->used++;
        b->bytes += size;
        pthread_mutex_unlock(&b->lock);
    }
    *out = one;
    return PERSIA_OK;
}

void buffer_give(buffer *one)
{
    if (!one)
        return;
    buffers *b = one->owner;
    buffer *drop = NULL;
    pthread_mutex_lock(&b->lock);
    one->next = b->kept;
    b->kept = one;
    b->kept_bytes += one->size;
    b->used--;
    if (b->kept_bytes > b->keep) { /* the ones that wait longest go */
        uint64_t left = 0;
        buffer **at = &b->kept;
        while (*at && left + (*at)->size <= b->keep) {
            left += (*at)->size;
            at = &(*at)->next;
        }
        drop = *at;
        *at = NULL;
        b->bytes -= b->kept_bytes - left;
        b->kept_bytes = left;
    }
    int last = b->destroyed && b->used == 0;
    pthread_mutex_unlock(&b->lock);
    buffers_free_list(drop);
    if (last)
        buffers_free_all(b);
}

uint64_t buffers_bytes(buffers *b)
{
    pthread_mutex_lock(&b->lock);
    uint64_t bytes = b->bytes;
    pthread_mutex_unlock(&b->lock);
    return bytes;
}
