/* pool.c: blocks that are used again. */
#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "mem/mem.h"

enum {
    ALIGN = 64,
    KEEP_FROM = 32 << 10, /* bytes: smaller blocks are malloc's business */
    HUGE_PAGE = 2 << 20
};

/* Lies before the data. */
typedef struct pool_block {
    _Alignas(ALIGN) mem_pool *pool;
    struct pool_block *next; /* kept, under the pool's lock */
    size_t size;             /* bytes of data */
} pool_block;

int persia_mem_pool_create(size_t bytes, size_t blocks, mem_pool **out)
{
    mem_pool *p = *out = malloc(sizeof *p);
    if (!p)
        return persia_err_set(PERSIA_ENOMEM, "out of memory: a pool");
    *p = (mem_pool)MEM_POOL(bytes, blocks);
    pthread_mutex_init(&p->lock, NULL);
    return PERSIA_OK;
}

static void pool_free_list(pool_block *b)
{
    while (b) {
        pool_block *next = b->next;
        free(b);
        b = next;
    }
}

/* The last user frees it. */
static void pool_leave(mem_pool *p)
{
    if (atomic_fetch_sub(&p->users, 1) > 1)
        return;
    assert(!p->kept);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

void persia_mem_pool_destroy(mem_pool *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    pool_block *kept = p->kept;
    p->kept = NULL;
    p->kept_bytes = p->kept_n = p->most_bytes = 0;
    pthread_mutex_unlock(&p->lock);
    pool_free_list(kept);
    pool_leave(p);
}

/* The smallest kept block that holds n bytes and is not much too large; of
 * several the one that was given last: it may still be in the cache. */
static pool_block *pool_find(mem_pool *p, size_t n)
{
    pool_block **best = NULL, *found = NULL;
    pthread_mutex_lock(&p->lock);
    for (pool_block **at = &p->kept; *at; at = &(*at)->next)
        if ((*at)->size >= n && (*at)->size / 2 <= n &&
            (!best || (*at)->size < (*best)->size))
            best = at;
    if (best) {
        found = *best;
        *best = found->next;
        p->kept_n--;
        p->kept_bytes -= found->size;
    }
    pthread_mutex_unlock(&p->lock);
    return found;
}

static pool_block *pool_make(size_t n)
{
    if (n > SIZE_MAX / 4)
        return NULL;
    /* Some room, so that the next, slightly larger use fits too. */
    const size_t room = n < KEEP_FROM ? n : n + n / 8;
    const size_t unit = room < 4 * (size_t)HUGE_PAGE ? ALIGN : HUGE_PAGE;
    const size_t all = (sizeof(pool_block) + room + unit - 1) / unit * unit;
    pool_block *b = aligned_alloc(unit, all);
    if (!b)
        return NULL;
    if (unit == HUGE_PAGE)
        madvise(b, all, MADV_HUGEPAGE);
    b->size = all - sizeof *b;
    return b;
}

int persia_mem_pool_take(mem_pool *p, size_t bytes, void **out)
{
    pool_block *b = bytes < KEEP_FROM ? NULL : pool_find(p, bytes);
    *out = NULL;
    if (!b && !(b = pool_make(bytes)))
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: a block of %zu bytes", bytes);
    b->pool = p;
    atomic_fetch_add_explicit(&p->users, 1, memory_order_relaxed);
    *out = b + 1;
    return PERSIA_OK;
}

/* Keeps a block; those that have waited longest and are too many are the
 * caller's.  The lock is held. */
static pool_block *pool_keep_locked(mem_pool *p, pool_block *b)
{
    pool_block **at = &p->kept, *old;
    b->next = p->kept;
    p->kept = b;
    p->kept_n++;
    p->kept_bytes += b->size;
    if (p->kept_n <= p->most && p->kept_bytes <= p->most_bytes)
        return NULL;
    size_t n = 0, bytes = 0;
    while (*at && n < p->most && bytes + (*at)->size <= p->most_bytes) {
        n++;
        bytes += (*at)->size;
        at = &(*at)->next;
    }
    p->kept_n = n;
    p->kept_bytes = bytes;
    old = *at;
    *at = NULL;
    return old;
}

/* ASan then sees the use of a block that was given back. */
static int pool_keeps(const pool_block *b)
{
#if defined(__SANITIZE_ADDRESS__)
    (void)b;
    return 0;
#else
    return b->size >= KEEP_FROM;
#endif
}

void persia_mem_pool_give(void *block)
{
    if (!block)
        return;
    pool_block *b = (pool_block *)block - 1;
    mem_pool *p = b->pool;
    b->next = NULL;
    if (pool_keeps(b)) {
        pthread_mutex_lock(&p->lock);
        b = pool_keep_locked(p, b);
        pthread_mutex_unlock(&p->lock);
    }
    pool_free_list(b);
    pool_leave(p);
}
