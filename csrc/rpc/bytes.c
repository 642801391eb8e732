/* bytes.c: memory of contiguous messages.
 *
 * Each batch has messages of some MiB.  Fresh memory of that size is mapped
 * and its pages are cleared each time, so pieces that were given back are
 * kept, up to a limit, and taken again by messages that fill at least half of
 * them.
 */
#include "rpc/channel.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    ALIGN = 64,
    POOL_FROM = 32 << 10, /* bytes: smaller pieces are malloc's business */
    POOL_PIECES = 32,
    HUGE_PAGE = 2 << 20
};

/* Bytes that are kept.  None under ASan, which then sees the use of a message
 * that was given back. */
#if defined(__SANITIZE_ADDRESS__)
static const size_t POOL_BYTES = 0;
#else
static const size_t POOL_BYTES = (size_t)192 << 20;
#endif

/* Lies before the data. */
typedef struct piece {
    _Alignas(ALIGN) size_t size; /* bytes of data */
} piece;

static struct {
    pthread_mutex_t lock; /* guards what follows */
    piece *kept[POOL_PIECES]; /* in the order in which they were given back */
    unsigned kept_n;
    size_t bytes; /* of all kept */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static piece *bytes_pool_remove(unsigned i)
{
    piece *p = pool.kept[i];
    pool.kept_n--;
    memmove(pool.kept + i, pool.kept + i + 1,
            (pool.kept_n - i) * sizeof *pool.kept);
    pool.bytes -= p->size;
    return p;
}

/* The smallest piece that holds n bytes and is not much too large; of several
 * the one that was given back last: it may still be in the cache. */
static piece *bytes_pool_take(size_t n)
{
    piece *found = NULL;
    pthread_mutex_lock(&pool.lock);
    unsigned best = POOL_PIECES;
    for (unsigned i = 0; i < pool.kept_n; i++) {
        size_t size = pool.kept[i]->size;
        if (size >= n && size / 2 <= n &&
            (best == POOL_PIECES || size <= pool.kept[best]->size))
            best = i;
    }
    if (best < POOL_PIECES)
        found = bytes_pool_remove(best);
    pthread_mutex_unlock(&pool.lock);
    return found;
}

void *bytes_take(size_t n)
{
    piece *p;
    if (n >= POOL_FROM && (p = bytes_pool_take(n)))
        return p + 1;
    if (n > SIZE_MAX / 2)
        goto fail;
    /* Some room, so that the next, slightly larger message fits too. */
    size_t room = n < POOL_FROM ? n : n + n / 8;
    size_t unit = room < 4 * (size_t)HUGE_PAGE ? ALIGN : HUGE_PAGE;
    size_t all = (sizeof(piece) + room + unit - 1) / unit * unit;
    p = aligned_alloc(unit, all);
    if (!p)
        goto fail;
    if (unit == HUGE_PAGE)
        madvise(p, all, MADV_HUGEPAGE);
    p->size = all - sizeof(piece);
    return p + 1;
fail:
    (void)persia_err_set(PERSIA_ENOMEM,
                         "out of memory: a message of %zu bytes", n);
    return NULL;
}

void bytes_give(void *data)
{
    if (!data)
        return;
    piece *p = (piece *)data - 1;
    if (p->size < POOL_FROM || p->size > POOL_BYTES) {
        free(p);
        return;
    }
    piece *old[POOL_PIECES];
    unsigned old_n = 0;
    pthread_mutex_lock(&pool.lock);
    while (pool.kept_n == POOL_PIECES || pool.bytes + p->size > POOL_BYTES)
        old[old_n++] = bytes_pool_remove(0);
    pool.kept[pool.kept_n++] = p;
    pool.bytes += p->size;
    pthread_mutex_unlock(&pool.lock);
    while (old_n)
        free(old[--old_n]);
}

void persia_rpc_reply_free(rpc_reply *r)
{
    bytes_give(r->memory);
    *r = (rpc_reply){0};
}
