/* index_pool.c: the memory of batch indexes, and those that wait for a
 * backward. */
#include <assert.h>
#include <stdlib.h>

#include "ids/ids.h"

void persia_index_pool_init(index_pool *p, size_t most)
{
    *p = (index_pool){.most = most, .key = persia_ids_key()};
    pthread_mutex_init(&p->lock, NULL);
}

static size_t bytes_of(const batch_index *x)
{
    return sizeof *x + x->memory.size + x->table_memory.size +
           x->hint_memory.size;
}

/* Charges what the index has by now; the lock is held. */
static void charge(index_pool *p, batch_index *x)
{
    size_t bytes = bytes_of(x);
    p->bytes += bytes - x->charged;
    x->charged = bytes;
}

/* The lock is held. */
static void destroy(index_pool *p, batch_index *x)
{
    assert(p->bytes >= x->charged && !atomic_load(&x->references));
    p->bytes -= x->charged;
    persia_mem_buffer_free(&x->memory);
    persia_mem_buffer_free(&x->table_memory);
    persia_mem_buffer_free(&x->hint_memory);
    free(x);
}

/* The last reference has gone; the lock is held. */
static void retire(index_pool *p, batch_index *x)
{
    if (x->source)
        x->drop(x->source);
    x->source = NULL;
    assert(p->live);
    p->live--;
    x->next = p->free;
    p->free = x;
}

static void unref(index_pool *p, batch_index *x)
{
    charge(p, x);
    if (atomic_fetch_sub(&x->references, 1) == 1)
        retire(p, x);
}

/* Takes what waits in a slot; the lock is held. */
static batch_index *empty(index_pool *p, uint64_t ticket)
{
    batch_index *x = p->waits[ticket % INDEX_POOL_WAITS].index;
    p->waits[ticket % INDEX_POOL_WAITS].index = NULL;
    return x;
}

/* Frees until the bound is kept, if it can be; the lock is held. */
static void shrink(index_pool *p)
{
    while (p->bytes > p->most) {
        if (p->free) {
            batch_index *x = p->free;
            p->free = x->next;
            destroy(p, x);
            continue;
        }
        if (p->oldest > p->newest)
            return;
        batch_index *x = empty(p, p->oldest++);
        if (x)
            unref(p, x);
    }
}

batch_index *persia_index_pool_new(index_pool *p)
{
    pthread_mutex_lock(&p->lock);
    batch_index *x = p->free;
    if (x)
        p->free = x->next;
    p->live++;
    pthread_mutex_unlock(&p->lock);
    if (!x && (x = calloc(1, sizeof *x)))
        x->pool = p, x->key = p->key;
    if (x) {
        atomic_store(&x->references, 1);
        return x;
    }
    pthread_mutex_lock(&p->lock);
    p->live--;
    pthread_mutex_unlock(&p->lock);
    persia_err_set(PERSIA_ENOMEM, "no memory for the index of a batch");
    return NULL;
}

batch_index *persia_batch_index_get(batch_index *x)
{
    const unsigned before = atomic_fetch_add(&x->references, 1);
    assert(before);
    (void)before;
    return x;
}

void persia_batch_index_put(batch_index *x)
{
    if (!x)
        return;
    index_pool *p = x->pool;
    pthread_mutex_lock(&p->lock);
    unref(p, x);
    shrink(p);
    pthread_mutex_unlock(&p->lock);
}

void persia_index_pool_wait(index_pool *p, uint64_t ticket, batch_index *x)
{
    pthread_mutex_lock(&p->lock);
    batch_index *before = empty(p, ticket);
    if (before)
        unref(p, before);
    p->waits[ticket % INDEX_POOL_WAITS].ticket = ticket;
    p->waits[ticket % INDEX_POOL_WAITS].index = x;
    if (ticket > p->newest)
        p->newest = ticket;
    if (p->oldest + INDEX_POOL_WAITS <= p->newest)
        p->oldest = p->newest + 1 - INDEX_POOL_WAITS;
    charge(p, x);
    shrink(p);
    pthread_mutex_unlock(&p->lock);
}

batch_index *persia_index_pool_take(index_pool *p, uint64_t ticket)
{
    batch_index *x = NULL;
    pthread_mutex_lock(&p->lock);
    if (p->waits[ticket % INDEX_POOL_WAITS].ticket == ticket)
        x = empty(p, ticket);
    pthread_mutex_unlock(&p->lock);
    return x;
}

void persia_index_pool_forget(index_pool *p)
{
    pthread_mutex_lock(&p->lock);
    for (uint64_t i = 0; i < INDEX_POOL_WAITS; i++) {
        batch_index *x = empty(p, i);
        if (x)
            unref(p, x);
    }
    shrink(p);
    pthread_mutex_unlock(&p->lock);
}

void persia_index_pool_free(index_pool *p)
{
    persia_index_pool_forget(p);
    assert(p->live == 0);
    while (p->free) {
        batch_index *x = p->free;
        p->free = x->next;
        destroy(p, x);
    }
    pthread_mutex_destroy(&p->lock);
}
