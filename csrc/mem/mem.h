/* mem.h: address ranges that grow in place, buffers that are reused, limits.
 *
 * arena: one growable range of zeroed memory for fixed-size rows.  Growth
 * never copies: the range is reserved ahead and pages appear when touched
 * (a full reserve is moved by the kernel's page tables, mremap).  Pages have
 * 4 KiB when they are touched; each full 2 MiB become one page afterwards, in
 * the background (huge.h), so that a table of few rows stays small and a
 * table of many misses the TLB rarely.
 */
#ifndef PERSIA_MEM_H
#define PERSIA_MEM_H

#include "base/base.h"
#include "mem/gather.h"

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes in use against a maximum; shared by all arenas and index pages of a
 * store.  Made by persia_mem_limit_init(). */
typedef struct mem_limit {
    _Atomic(uint64_t) used; /* bytes */
    uint64_t maximum;       /* bytes; 0: no limit */
    /* Lets a caller make sure, before it starts, that all its charges will
     * fit; see table/reserve.h.  To charge and to release takes no lock. */
    pthread_rwlock_t lock;
    /* Bytes in use, and those that calls have announced, together: one number,
     * so that of two that do not fit together one sees the other.  What is
     * announced stays in it while it is charged, until it is withdrawn.  So
     * it is at least what is in use or may still be charged. */
    _Atomic(uint64_t) promised;
} mem_limit;

/* maximum: bytes; 0: no limit. */
PERSIA_API void persia_mem_limit_init(mem_limit *limit, uint64_t maximum);
PERSIA_API void persia_mem_limit_free(mem_limit *limit);
/* PERSIA_ELIMIT when the maximum would be passed, or bytes that other calls
 * have announced would be used; then nothing is charged.  A NULL limit charges
 * nothing. */
PERSIA_API int persia_mem_charge(mem_limit *limit, uint64_t bytes);
PERSIA_API void persia_mem_release(mem_limit *limit, uint64_t bytes);
/* Announces charges; whether they fit beside all that others may charge.  They
 * are to be withdrawn in either case. */
PERSIA_API int persia_mem_announce(mem_limit *limit, uint64_t bytes);
/* Announces `to` in the place of `from` bytes, if that is less, or fits. */
PERSIA_API int persia_mem_announce_again(mem_limit *limit, uint64_t from,
                                         uint64_t to);
PERSIA_API void persia_mem_withdraw(mem_limit *limit, uint64_t bytes);
/* Charges what the caller has announced, so that it fits. */
PERSIA_API void persia_mem_charge_announced(mem_limit *limit, uint64_t bytes);

typedef struct mem_arena {
    char *base;      /* may change in persia_mem_arena_reserve() */
    size_t size;     /* bytes that may be used */
    size_t reserved; /* bytes of address space, `lead` included */
    size_t lead;     /* bytes before base that are not used */
    mem_limit *limit;
    /* private: */
    size_t apart;   /* as given, below 2 MiB */
    size_t handed;  /* bytes of the mapping given to huge_later() */
    size_t touched; /* bytes of the mapping that were touched ahead */
} mem_arena;

/* apart: below 2 MiB.  Arenas that grow alike have their pages joined, or wait
 * for new ones, not all at once if it differs.  Where the kernel joins no
 * pages it is where in its first 2 MiB the arena begins. */
PERSIA_API void persia_mem_arena_init(mem_arena *a, mem_limit *limit,
                                      size_t apart);
/* Takes address space for `bytes`.  Only `base` may change; nothing is
 * charged, no page is touched. */
PERSIA_API int persia_mem_arena_reserve(mem_arena *a, size_t bytes);
/* The size up to which the arena may grow. */
PERSIA_API size_t persia_mem_arena_room(const mem_arena *a);
/* Makes at least `bytes` usable (zero-filled where new), within the room;
 * allocates nothing and cannot fail.  The size is charged to the limit in
 * whole pages of 4 KiB, as announced.  Takes microseconds, or, once in 64 KiB,
 * those of touching them ahead. */
PERSIA_API void persia_mem_arena_grow(mem_arena *a, size_t bytes);
PERSIA_API void persia_mem_arena_free(mem_arena *a);

/* blocks: blocks of any size that never move, taken and given back all the
 * time: the pages of an index.  They are carved from regions that grow from 64
 * KiB to 64 MiB, or more where more is reserved, in 2 MiB pages once they are
 * large; neighbours that were given back are joined and taken again, best fit
 * first.
 *
 * Address space is reserved before blocks are taken.  Then one free block is
 * as large as all that is reserved, and three times the blocks in use on top:
 * in the place of each of them, blocks of three times its size can be taken.
 * So none that is taken fails, however the rest is cut up. */
typedef struct mem_blocks {
    pthread_mutex_t lock;     /* guards all below */
    struct mem_region *regions; /* newest first */
    struct mem_block *free;   /* blocks given back, in no order */
    uint64_t bytes;           /* in use, headers included */
    uint64_t reserved;        /* bytes, by all who reserved some */
    uint64_t open;            /* the largest free block has them at least */
    mem_limit *limit;
} mem_blocks;

PERSIA_API void persia_mem_blocks_init(mem_blocks *b, mem_limit *limit);
/* All blocks at once. */
PERSIA_API void persia_mem_blocks_free(mem_blocks *b);
PERSIA_API uint64_t persia_mem_blocks_bytes(mem_blocks *b);
/* Reserves `bytes`: those of the blocks to be taken, 192 more for each, except
 * for blocks that replace one as above. */
PERSIA_API int persia_mem_blocks_reserve(mem_blocks *b, uint64_t bytes);
PERSIA_API void persia_mem_blocks_unreserve(mem_blocks *b, uint64_t bytes);
/* A block of what is reserved, aligned to 64 bytes; its contents are
 * undefined.  Allocates nothing and cannot fail; charges the limit, as
 * announced. */
PERSIA_API void *persia_mem_blocks_take(mem_blocks *b, size_t bytes);
PERSIA_API void persia_mem_blocks_give(mem_blocks *b, void *block);
/* Gives the pages of free blocks back to the system; the address space stays.
 */
PERSIA_API void persia_mem_blocks_trim(mem_blocks *b);

/* A buffer that only grows; contents are lost when it does.  For scratch
 * that is used again and again by one thread.  Aligned to 64 bytes. */
typedef struct mem_buffer {
    void *data;
    size_t size; /* bytes */
} mem_buffer;
PERSIA_API int persia_mem_buffer_need(mem_buffer *b, size_t bytes);
PERSIA_API void persia_mem_buffer_free(mem_buffer *b);
/* The next `bytes` of a block of which *at is left; what follows is aligned
 * to 64 bytes as the block is. */
static inline void *mem_carve(char **at, size_t bytes)
{
    void *p = *at;
    *at += (bytes + 63) / 64 * 64;
    return p;
}

/* ---- pools ----
 *
 * Blocks of any size that are given back on any thread and used again.  Fresh
 * memory of some MiB is mapped, and its pages are cleared, each time.  A block
 * is taken again by who fills at least half of it. */
typedef struct mem_pool {
    _Atomic(size_t) users; /* its owner, and each block that is taken */
    pthread_mutex_t lock;  /* guards all below */
    struct pool_block *kept; /* the one that was given last first */
    size_t kept_n, kept_bytes;
    size_t most, most_bytes; /* that are kept */
} mem_pool;
/* One for as long as the process, which is not destroyed. */
#define MEM_POOL(bytes, blocks)                                               \
    {.users = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .most = (blocks),         \
     .most_bytes = (bytes)}
PERSIA_API int persia_mem_pool_create(size_t bytes, size_t blocks,
                                      mem_pool **out);
/* Blocks that are taken stay until they are given back. */
PERSIA_API void persia_mem_pool_destroy(mem_pool *p);
/* Aligned to 64 bytes, not cleared. */
PERSIA_API int persia_mem_pool_take(mem_pool *p, size_t bytes, void **out);
/* NULL is fine. */
PERSIA_API void persia_mem_pool_give(void *block);

/* Pages of the system's, for some megabytes that are needed for a moment, on
 * whichever thread.  A process that serves tells malloc to keep what is freed,
 * in every arena that was ever asked for it; these go back. */
PERSIA_API int persia_mem_pages_take(size_t bytes, void **out);
PERSIA_API void persia_mem_pages_give(void *pages, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
