/* blocks.c: a small allocator with boundary tags.
 *
 *   region   [ mem_region 64 B | block | block | ... ]
 *   block    [ mem_block 64 B | payload ]      sizes are multiples of 64
 *
 * Invariants: the blocks of a region fill it; no two neighbours are free
 * (persia_mem_blocks_give joins them); a block knows the size of the one
 * before; `open` is at most the size of the largest free block, and at least
 * what is reserved and was not taken yet.
 */
#include "mem/mem.h"
#include "mem/huge.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#define REGION_FIRST ((size_t)64 << 10)
#define REGION_MAX ((size_t)64 << 20)
/* Where full ranges cannot be made huge, a region from this size on has huge
 * pages from the start: at most one is hardly used. */
#define REGION_HUGE ((size_t)8 << 20)

typedef struct mem_region {
    struct mem_region *next;
    size_t bytes;
    size_t handed; /* bytes given to huge_later() */
    char unused[40];
} mem_region;

typedef struct mem_block {
    size_t bytes;   /* with this header */
    size_t before;  /* bytes of the block before it; 0: it is the first */
    uint32_t used;
    uint32_t last;  /* of its region */
    struct mem_block *next, *previous; /* in the free list */
    char unused[24];
} mem_block;

_Static_assert(sizeof(mem_region) == 64 && sizeof(mem_block) == 64,
               "payloads must stay aligned to cache lines");

void persia_mem_blocks_init(mem_blocks *b, mem_limit *limit)
{
    memset(b, 0, sizeof *b);
    pthread_mutex_init(&b->lock, NULL);
    b->limit = limit;
}

void persia_mem_blocks_free(mem_blocks *b)
{
    for (mem_region *r = b->regions; r;) {
        mem_region *next = r->next;
        huge_forget((char *)r, r->bytes);
        munmap(r, r->bytes);
        r = next;
    }
    persia_mem_release(b->limit, b->bytes);
    pthread_mutex_destroy(&b->lock);
}

uint64_t persia_mem_blocks_bytes(mem_blocks *b)
{
    pthread_mutex_lock(&b->lock);
    uint64_t bytes = b->bytes;
    pthread_mutex_unlock(&b->lock);
    return bytes;
}

static mem_block *block_after(mem_block *k)
{
    return k->last ? NULL : (mem_block *)(void *)((char *)k + k->bytes);
}

static void blocks_free_insert(mem_blocks *b, mem_block *k)
{
    k->used = 0;
    k->previous = NULL;
    k->next = b->free;
    if (b->free)
        b->free->previous = k;
    b->free = k;
}

static void blocks_free_remove(mem_blocks *b, mem_block *k)
{
    if (k->previous)
        k->previous->next = k->next;
    else
        b->free = k->next;
    if (k->next)
        k->next->previous = k->previous;
}

/* Makes [k, k + its bytes + those of the next] one block. */
static void block_join(mem_block *k, const mem_block *next)
{
    mem_block *after;

    assert((const char *)k + k->bytes == (const char *)next && !k->last);
    k->bytes += next->bytes;
    k->last = next->last;
    after = block_after(k);
    if (after)
        after->before = k->bytes;
}

/* Cuts what k has beyond `bytes` off into a free block. */
static void block_cut(mem_blocks *b, mem_block *k, size_t bytes)
{
    mem_block *rest, *after;

    if (k->bytes < bytes + 2 * sizeof *k)
        return;
    assert(bytes % 64 == 0);
    rest = (mem_block *)(void *)((char *)k + bytes);
    rest->bytes = k->bytes - bytes;
    rest->before = bytes;
    rest->last = k->last;
    k->bytes = bytes;
    k->last = 0;
    after = block_after(rest);
    if (after)
        after->before = rest->bytes;
    blocks_free_insert(b, rest);
}

/* An aligned mapping, so that its pages can be huge. */
static char *blocks_map_aligned(size_t bytes)
{
    char *p = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t head;

    if (p == MAP_FAILED)
        return NULL;
    head = (HUGE - (uintptr_t)p % HUGE) % HUGE;
    if (head)
        munmap(p, head);
    munmap(p + head + bytes, HUGE - head);
    return p + head;
}

/* Hands on what was used at least once: up to the end of k, for blocks are
 * cut off the front.  The last 2 MiB, once what is unused there is at most an
 * sixteenth of all blocks. */
static void region_huge(const mem_blocks *b, const mem_block *k)
{
    const char *end = (const char *)k + k->bytes;
    mem_region *r = b->regions;

    while ((const char *)k < (char *)r || end > (char *)r + r->bytes)
        r = r->next;
    const size_t used = (size_t)(end - (char *)r);
    while (r->handed < used && r->handed + HUGE <= r->bytes &&
           huge_pays(used - r->handed, b->bytes / 16) &&
           huge_later((char *)r + r->handed))
        r->handed += HUGE;
}

static int region_add(mem_blocks *b, size_t need)
{
    mem_region *old = b->regions, *r;
    const size_t least = (need + sizeof *r + REGION_FIRST - 1) /
                         REGION_FIRST * REGION_FIRST;
    size_t bytes = old ? 2 * old->bytes : REGION_FIRST;
    mem_block *k;

    if (bytes > REGION_MAX)
        bytes = REGION_MAX;
    while (bytes < least)
        bytes *= 2;
    r = (mem_region *)(void *)blocks_map_aligned(bytes);
    if (!r && least < bytes) {
        bytes = least;
        r = (mem_region *)(void *)blocks_map_aligned(bytes);
    }
    if (!r)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: %zu KiB for an index: "
                              "%s",
                              bytes >> 10, strerror(errno));
    if (bytes >= REGION_HUGE && !huge_can())
        madvise(r, bytes, MADV_HUGEPAGE);
    r->next = old;
    r->bytes = bytes;
    r->handed = 0;
    b->regions = r;
    k = (mem_block *)(void *)(r + 1);
    k->bytes = bytes - sizeof *r;
    k->before = 0;
    k->last = 1;
    blocks_free_insert(b, k);
    if (k->bytes > b->open)
        b->open = k->bytes;
    return PERSIA_OK;
}

static uint64_t blocks_free_largest(const mem_blocks *b)
{
    uint64_t most = 0;

    for (const mem_block *k = b->free; k; k = k->next)
        most = k->bytes > most ? k->bytes : most;
    return most;
}

/* Whatever is taken, whatever block it is cut off, the largest one loses no
 * more than that: so it serves all who reserved if it has their bytes in
 * sum. */
int persia_mem_blocks_reserve(mem_blocks *b, uint64_t bytes)
{
    int rc = PERSIA_OK;

    huge_start();
    if (bytes > SIZE_MAX / 8)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: %llu bytes of index",
                              (unsigned long long)bytes);
    pthread_mutex_lock(&b->lock);
    const uint64_t all = 3 * b->bytes + b->reserved + bytes;
    if (b->open < all)
        b->open = blocks_free_largest(b);
    if (b->open < all)
        rc = region_add(b, all);
    if (!rc)
        b->reserved += bytes;
    pthread_mutex_unlock(&b->lock);
    return rc;
}

void persia_mem_blocks_unreserve(mem_blocks *b, uint64_t bytes)
{
    pthread_mutex_lock(&b->lock);
    assert(b->reserved >= bytes);
    b->reserved -= bytes;
    pthread_mutex_unlock(&b->lock);
    huge_start();
}

static mem_block *blocks_best_fit(const mem_blocks *b, size_t bytes)
{
    mem_block *best = NULL;

    for (mem_block *k = b->free; k; k = k->next)
        if (k->bytes >= bytes && (!best || k->bytes < best->bytes))
            best = k;
    return best;
}

void *persia_mem_blocks_take(mem_blocks *b, size_t payload)
{
    size_t bytes = (payload + sizeof(mem_block) + 63) / 64 * 64;

    pthread_mutex_lock(&b->lock);
    mem_block *k = blocks_best_fit(b, bytes);
    if (!PERSIA_HOLDS(k != NULL) && !region_add(b, bytes)) /* was reserved */
        k = blocks_best_fit(b, bytes);
    assert(k);
    if (k->bytes < bytes + 2 * sizeof *k)
        bytes = k->bytes; /* too little to cut off */
    persia_mem_charge_announced(b->limit, bytes);
    blocks_free_remove(b, k);
    block_cut(b, k, bytes);
    k->used = 1;
    b->bytes += k->bytes;
    b->open -= k->bytes < b->open ? k->bytes : b->open;
    region_huge(b, k);
    pthread_mutex_unlock(&b->lock);
    return k + 1;
}

void persia_mem_blocks_give(mem_blocks *b, void *block)
{
    mem_block *k = (mem_block *)block - 1, *near;

    pthread_mutex_lock(&b->lock);
    assert(k->used && k->bytes <= b->bytes && k->bytes % 64 == 0);
    b->bytes -= k->bytes;
    persia_mem_release(b->limit, k->bytes);
    near = block_after(k);
    if (near && !near->used) {
        blocks_free_remove(b, near);
        block_join(k, near);
    }
    if (k->before) {
        near = (mem_block *)(void *)((char *)k - k->before);
        if (!near->used) {
            blocks_free_remove(b, near);
            block_join(near, k);
            k = near;
        }
    }
    blocks_free_insert(b, k);
    pthread_mutex_unlock(&b->lock);
}

/* What of a free block is whole pages, behind its header. */
static void block_trim(mem_block *k)
{
    const uintptr_t page = 4096;
    const uintptr_t begin = ((uintptr_t)(k + 1) + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)k + k->bytes) & ~(page - 1);

    if (begin < end)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
}

void persia_mem_blocks_trim(mem_blocks *b)
{
    pthread_mutex_lock(&b->lock);
    for (mem_region *r = b->regions; r; r = r->next) {
        const mem_block *k = (mem_block *)(void *)(r + 1);
        huge_forget((char *)r, r->bytes);
        if (!k->used && k->last)
            r->handed = 0; /* it fills from the front again */
    }
    for (mem_block *k = b->free; k; k = k->next)
        block_trim(k);
    pthread_mutex_unlock(&b->lock);
}
