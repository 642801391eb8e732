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

static size_t index_pool_bytes_of(const batch_index *x)
{
    return sizeof *x + x->memory.size + x->table_memory.size +
           x->hint_memory.size;
}

/* Charges what the index has by now; the lock is held. */
static void index_pool_charge(index_pool *p, batch_index *x)
{
    size_t bytes = index_pool_bytes_of(x);
    p->bytes += bytes - x->charged;
    x->charged = bytes;
}

/* The lock is held. */
static void index_pool_destroy(index_pool *p, batch_index *x)
{
    assert(p->bytes >= x->charged && !atomic_load(&x->references));
    p->bytes -= x->charged;
    persia_mem_buffer_free(&x->memory);
    persia_mem_buffer_free(&x->table_memory);
    persia_mem_buffer_free(&x->hint_memory);
    free(x);
}

/* The last reference has gone; the lock is held. */
static void index_pool_retire(index_pool *p, batch_index *x)
{
    if (x->source)
        x->drop(x->source);
    x->source = NULL;
    assert(p->live);
    p->live--;
    x->next = p->free;
    p->free = x;
}

static void index_pool_unref(index_pool *p, batch_index *x)
{
    index_pool_charge(p, x);
    if (atomic_fetch_sub(&x->references, 1) == 1)
        index_pool_retire(p, x);
}

/* Takes what waits in a slot; the lock is held. */
static batch_index *index_pool_empty(index_pool *p, uint64_t ticket)
{
    batch_index *x = p->waits[ticket % INDEX_POOL_WAITS].index;
    p->waits[ticket % INDEX_POOL_WAITS].index = NULL;
    return x;
}

/* Frees until the bound is kept, if it can be; the lock is held. */
static void index_pool_shrink(index_pool *p)
{
    while (p->bytes > p->most) {
        if (p->free) {
            batch_index *x = p->free;
            p->free = x->next;
            index_pool_destroy(p, x);
            continue;
        }
        if (p->oldest > p->newest)
            return;
        batch_index *x = index_pool_empty(p, p->oldest++);
        if (x)
            index_pool_unref(p, x);
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
    index_pool_unref(p, x);
    index_pool_shrink(p);
    pthread_mutex_unlock(&p->lock);
}

void persia_index_pool_wait(index_pool *p, uint64_t ticket, batch_index *x)
{
    pthread_mutex_lock(&p->lock);
    batch_index *before = index_pool_empty(p, ticket);
    if (before)
        index_pool_unref(p, before);
    p->waits[ticket % INDEX_POOL_WAITS].ticket = ticket;
    p->waits[ticket % INDEX_POOL_WAITS].index = x;
    if (ticket > p->newest)
        p->newest = ticket;
    if (p->oldest + INDEX_POOL_WAITS <= p->newest)
        p->oldest = p->newest + 1 - INDEX_POOL_WAITS;
    index_pool_charge(p, x);
    index_pool_shrink(p);
    pthread_mutex_unlock(&p->lock);
}

batch_index *persia_index_pool_take(index_pool *p, uint64_t ticket)
{
    batch_index *x = NULL;
    pthread_mutex_lock(&p->lock);
    if (p->waits[ticket % INDEX_POOL_WAITS].ticket == ticket)
        x = index_pool_empty(p, ticket);
    pthread_mutex_unlock(&p->lock);
    return x;
}

void persia_index_pool_forget(index_pool *p)
{
    pthread_mutex_lock(&p->lock);
    for (uint64_t i = 0; i < INDEX_POOL_WAITS; i++) {
        batch_index *x = index_pool_empty(p, i);
        if (x)
            index_pool_unref(p, x);
    }
    index_pool_shrink(p);
    pthread_mutex_unlock(&p->lock);
}

void persia_index_pool_free(index_pool *p)
{
    persia_index_pool_forget(p);
    assert(p->live == 0);
    while (p->free) {
        batch_index *x = p->free;
        p->free = x->next;
        index_pool_destroy(p, x);
    }
    pthread_mutex_destroy(&p->lock);
}
