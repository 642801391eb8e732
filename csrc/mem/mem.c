/* mem.c: arenas, reused buffers, limits.
 *
 * An arena is one private mapping, whole and of one kind (a single entry in
 * the kernel's list of mappings), because mremap() moves only such.
 * Forked children see zeros there: their table calls fail anyway, and a fork
 * neither copies the page tables of a large table nor makes the parent copy
 * pages afterwards.
 */
#include "mem/mem.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

#define PAGE ((size_t)4096)
#define HUGE ((size_t)2 << 20)
/* From this size on new pages are huge: one that is touched but hardly used
 * is then at most 12 % of the arena. */
#define HUGE_AHEAD (8 * HUGE)
/* Below that, ranges that are full are made huge afterwards. */
#define HUGE_AFTER HUGE
/* A collapse that took longer is the last one of its arena. */
#define COLLAPSE_NS 20000000u
#define NO_MORE SIZE_MAX

int mem_charge(mem_limit *limit, uint64_t bytes)
{
    if (!limit)
        return PERSIA_OK;
    uint64_t used = atomic_load_explicit(&limit->used, memory_order_relaxed);
    do {
        if (limit->maximum && (bytes > limit->maximum ||
                               used > limit->maximum - bytes))
            return err_set(PERSIA_ELIMIT,
                           "memory limit: %llu bytes are in use, %llu more "
                           "would pass the maximum of %llu; raise the limit "
                           "or bound the tables (capacity, eviction)",
                           (unsigned long long)used,
                           (unsigned long long)bytes,
                           (unsigned long long)limit->maximum);
    } while (!atomic_compare_exchange_weak_explicit(
        &limit->used, &used, used + bytes, memory_order_relaxed,
        memory_order_relaxed));
    return PERSIA_OK;
}

void mem_release(mem_limit *limit, uint64_t bytes)
{
    if (limit)
        atomic_fetch_sub_explicit(&limit->used, bytes, memory_order_relaxed);
}

/* ---- arenas ---- */

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) & ~(unit - 1);
}

/* Address space aligned to huge pages; NULL if there is none left. */
static char *reserve(size_t bytes)
{
    char *p = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t head = round_up((uintptr_t)p, HUGE) - (uintptr_t)p;
    if (head)
        munmap(p, head);
    munmap(p + head + bytes, HUGE - head);
    return p + head;
}

/* Moves to a larger reserve; the kernel moves page tables, not bytes. */
static int arena_reserve(mem_arena *a, size_t bytes)
{
    size_t want = round_up(bytes + a->lead, HUGE);
    if (a->reserved > want / 2)
        want = 2 * a->reserved;
    char *p = want >= bytes ? reserve(want) : NULL;
    if (!p)
        goto fail;
    if (!a->base) {
        madvise(p, want, MADV_WIPEONFORK);
    } else if (mremap(a->base - a->lead, a->reserved, want,
                      MREMAP_MAYMOVE | MREMAP_FIXED, p) == MAP_FAILED) {
        int saved = errno;
        munmap(p, want);
        errno = saved;
        goto fail;
    }
    a->base = p + a->lead;
    a->reserved = want;
    return PERSIA_OK;
fail:
    return err_set(PERSIA_ENOMEM,
                   "out of memory: %zu bytes of address space for table "
                   "rows: %s",
                   want, strerror(errno));
}

/* Makes at most one full range of small pages huge; here and in ahead_from
 * bytes are counted from the first of the mapping. */
static void arena_collapse(mem_arena *a)
{
    size_t used = a->size + a->lead;
    if (a->collapsed == NO_MORE || used < HUGE_AFTER)
        return;
    size_t end = used & ~(HUGE - 1);
    if (a->ahead_from && end > a->ahead_from)
        end = a->ahead_from;
    if (a->collapsed >= end)
        return;
    uint64_t start = clock_ns();
    if (madvise(a->base - a->lead + a->collapsed, HUGE, MADV_COLLAPSE) ||
        clock_ns() - start > COLLAPSE_NS)
        a->collapsed = NO_MORE;
    else
        a->collapsed += HUGE;
}

void mem_arena_init(mem_arena *a, mem_limit *limit, size_t lead)
{
    *a = (mem_arena){.limit = limit, .lead = lead % HUGE / 64 * 64};
}

int mem_arena_grow(mem_arena *a, size_t bytes)
{
    if (bytes <= a->size)
        return PERSIA_OK;
    if (bytes > SIZE_MAX / 4)
        return err_set(PERSIA_ENOMEM, "out of memory: %zu bytes of rows",
                       bytes);
    size_t size = round_up(bytes, PAGE);
    int code = mem_charge(a->limit, size - a->size);
    if (code != PERSIA_OK)
        return code;
    if (size + a->lead > a->reserved) {
        code = arena_reserve(a, size);
        if (code != PERSIA_OK) {
            mem_release(a->limit, size - a->size);
            return code;
        }
    }
    if (size >= HUGE_AHEAD && !a->ahead_from) {
        /* Ranges touched so far keep their small pages until collapsed (by
         * us or by the kernel's khugepaged). */
        madvise(a->base - a->lead, a->reserved, MADV_HUGEPAGE);
        a->ahead_from = round_up(a->size + a->lead + 1, HUGE);
    }
    arena_collapse(a);
    a->size = size;
    return PERSIA_OK;
}

void mem_arena_free(mem_arena *a)
{
    if (a->base)
        munmap(a->base - a->lead, a->reserved);
    mem_release(a->limit, a->size);
    mem_arena_init(a, a->limit, a->lead);
}

/* ---- buffers ---- */

int mem_buffer_need(mem_buffer *b, size_t bytes)
{
    if (bytes <= b->size)
        return PERSIA_OK;
    size_t size = b->size + b->size / 2;
    if (size < bytes)
        size = bytes;
    size_t unit = size < 4 * HUGE ? 64 : HUGE;
    if (size > SIZE_MAX / 4)
        return err_set(PERSIA_ENOMEM, "out of memory: a buffer of %zu bytes",
                       bytes);
    size = round_up(size, unit);
    mem_buffer_free(b);
    b->data = aligned_alloc(unit, size);
    if (!b->data)
        return err_set(PERSIA_ENOMEM, "out of memory: a buffer of %zu bytes",
                       size);
    if (unit == HUGE)
        madvise(b->data, size, MADV_HUGEPAGE);
    b->size = size;
    return PERSIA_OK;
}

void mem_buffer_free(mem_buffer *b)
{
    free(b->data);
    *b = (mem_buffer){0};
}
