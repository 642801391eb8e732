/* exchange.c: all rows of a table replaced in one step. */
#include "table/watch.h"

#include <assert.h>
#include <string.h>

/* Everything of a stripe but its lock and its watches: rows, index, lists. */
static void stripe_exchange_locked(stripe *a, stripe *b)
{
    enum { FROM = offsetof(stripe, index), BYTES = sizeof(stripe) - FROM };
    mem_blocks *blocks_a = a->index.blocks, *blocks_b = b->index.blocks;
    char was[BYTES];

    memcpy(was, (char *)a + FROM, BYTES);
    memcpy((char *)a + FROM, (char *)b + FROM, BYTES);
    memcpy((char *)b + FROM, was, BYTES);
    a->index.blocks = blocks_a; /* the blocks change hands too, below */
    b->index.blocks = blocks_b;
}

/* What the blocks hold, not which table they belong to. */
static void blocks_exchange(mem_blocks *a, mem_blocks *b)
{
    pthread_mutex_lock(&a->lock);
    mem_blocks was = *a;
    a->regions = b->regions;
    a->free = b->free;
    a->bytes = b->bytes;
    a->open = b->open;
    b->regions = was.regions;
    b->free = was.free;
    b->bytes = was.bytes;
    b->open = was.open;
    pthread_mutex_unlock(&a->lock);
}

int persia_table_exchange(table *t, table *other)
{
    int rc = persia_fork_check("table_exchange");

    if (rc)
        return rc;
    if (t->stripes != other->stripes || t->stride != other->stride ||
        t->state_offset != other->state_offset ||
        t->config.limit != other->config.limit ||
        t->config.hash_key != other->config.hash_key)
        return persia_err_set(PERSIA_EARG,
                              "table %s: its rows differ in shape from "
                              "those of the other table",
                              t->config.name);
    pthread_rwlock_wrlock(&t->gate); /* no index changes now */
    if (t->cut || other->cut)
        rc = persia_err_set(PERSIA_EUNAVAILABLE,
                            "table %s: a snapshot has not ended; "
                            "wait for its end",
                            t->config.name);
    assert(!t->making && !other->making);
    for (uint32_t i = 0; i < t->stripes && !rc; i++) {
        pthread_rwlock_wrlock(&t->stripe[i].lock);
        stripe_exchange_locked(&t->stripe[i], &other->stripe[i]);
        watch_reset_locked(&t->stripe[i]);
        pthread_rwlock_unlock(&t->stripe[i].lock);
        int64_t left = atomic_load(&other->left[i]);
        atomic_store(&other->left[i], atomic_exchange(&t->left[i], left));
    }
    if (!rc) {
        blocks_exchange(&t->blocks, &other->blocks);
        uint32_t *filter = t->admit.filter;
        t->admit.filter = other->admit.filter;
        other->admit.filter = filter;
        uint64_t rows = atomic_load(&other->rows);
        atomic_store(&other->rows, atomic_exchange(&t->rows, rows));
        /* What found no room there is lost here; a second exchange takes it
         * back. */
        uint64_t evicted = atomic_load(&other->evicted);
        atomic_fetch_add(&t->evicted, evicted);
        atomic_store(&other->evicted, 0 - evicted);
    }
    pthread_rwlock_unlock(&t->gate);
    return rc;
}
