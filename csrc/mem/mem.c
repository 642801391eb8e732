/* mem.c: arenas, reused buffers, limits.
 *
 * An arena is one private mapping, whole and of one kind (a single entry in
 * the kernel's list of mappings), because mremap() moves only such.
 * Forked children see zeros there: their table calls fail anyway, and a fork
 * neither copies the page tables of a large table nor makes the parent copy
 * pages afterwards.
 */
#include "mem/mem.h"
#include "mem/huge.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define PAGE ((size_t)4096)
/* An arena that grows by small steps is touched by these, from the size on
 * where they are at most 6 % of it: half the time of a fault for each page. */
#define STEP ((size_t)64 << 10)
#define STEPS_FROM (16 * STEP)
/* Where full ranges cannot be made huge, pages are huge when touched, from
 * this size on: one that is hardly used is then at most 12 % of the arena. */
#define HUGE_AHEAD (8 * HUGE)

void persia_mem_limit_init(mem_limit *limit, uint64_t maximum)
{
    *limit = (mem_limit){.maximum = maximum};
    persia_fair_lock_init(&limit->lock);
}

void persia_mem_limit_free(mem_limit *limit)
{
    pthread_rwlock_destroy(&limit->lock);
}

/* Whether so many bytes more are within the maximum. */
static int limit_has(const mem_limit *limit, uint64_t promised, uint64_t bytes)
{
    return !limit->maximum || (promised <= limit->maximum &&
                               bytes <= limit->maximum - promised);
}

/* Adds to what is promised, if it fits. */
static int limit_promise(mem_limit *limit, uint64_t bytes)
{
    uint64_t had = atomic_load_explicit(&limit->promised,
                                        memory_order_relaxed);

    do {
        if (!limit_has(limit, had, bytes))
            return 0;
    } while (!atomic_compare_exchange_weak_explicit(
        &limit->promised, &had, had + bytes, memory_order_relaxed,
        memory_order_relaxed));
    return 1;
}

int persia_mem_charge(mem_limit *limit, uint64_t bytes)
{
    if (!limit)
        return PERSIA_OK;
    if (!limit_promise(limit, bytes))
        return persia_err_set(
            PERSIA_ELIMIT,
            "memory limit: %llu bytes are in use, or needed by updates in "
            "flight, and %llu more would pass the maximum of %llu; raise the "
            "limit or bound the tables (capacity, eviction)",
            (unsigned long long)atomic_load(&limit->promised),
            (unsigned long long)bytes, (unsigned long long)limit->maximum);
    atomic_fetch_add_explicit(&limit->used, bytes, memory_order_relaxed);
    return PERSIA_OK;
}

int persia_mem_announce(mem_limit *limit, uint64_t bytes)
{
    const uint64_t had = atomic_fetch_add_explicit(&limit->promised, bytes,
                                                   memory_order_relaxed);

    return limit_has(limit, had, bytes);
}

int persia_mem_announce_again(mem_limit *limit, uint64_t from, uint64_t to)
{
    if (to > from)
        return limit_promise(limit, to - from);
    persia_mem_withdraw(limit, from - to);
    return 1;
}

void persia_mem_withdraw(mem_limit *limit, uint64_t bytes)
{
    const uint64_t had = atomic_fetch_sub_explicit(&limit->promised, bytes,
                                                   memory_order_relaxed);
    (void)PERSIA_HOLDS(had >= bytes); /* it was announced, or charged */
}

void persia_mem_charge_announced(mem_limit *limit, uint64_t bytes)
{
    if (!limit)
        return;
    const uint64_t before = atomic_fetch_add_explicit(&limit->used, bytes,
                                                      memory_order_relaxed);
    atomic_fetch_add_explicit(&limit->promised, bytes, memory_order_relaxed);
    /* Otherwise the limit is passed, and the next charges are refused. */
    (void)PERSIA_HOLDS(!limit->maximum || before + bytes <= limit->maximum);
}

void persia_mem_release(mem_limit *limit, uint64_t bytes)
{
    if (!limit)
        return;
    const uint64_t before = atomic_fetch_sub_explicit(&limit->used, bytes,
                                                      memory_order_relaxed);
    (void)PERSIA_HOLDS(before >= bytes);
    persia_mem_withdraw(limit, bytes);
}

/* ---- arenas ---- */

static size_t mem_round_up(size_t n, size_t unit)
{
    return (n + unit - 1) & ~(unit - 1);
}

/* Address space aligned to huge pages; NULL if there is none left. */
static char *mem_reserve(size_t bytes)
{
    char *p = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t head = mem_round_up((uintptr_t)p, HUGE) - (uintptr_t)p;
    if (head)
        munmap(p, head);
    munmap(p + head + bytes, HUGE - head);
    return p + head;
}

/* Moves to a larger reserve; the kernel moves page tables, not bytes. */
static int arena_reserve(mem_arena *a, size_t bytes)
{
    const size_t least = mem_round_up(bytes + a->lead, HUGE);
    size_t want = a->reserved > least / 2 ? 2 * a->reserved : least;
    char *p = mem_reserve(want);
    if (!p) {
        want = least;
        p = mem_reserve(want);
    }
    if (!p)
        goto fail;
    if (!a->base) {
        madvise(p, want, MADV_WIPEONFORK);
    } else {
        char *was = a->base - a->lead, *left = huge_forget(was, a->reserved);
        if (left)
            a->handed = (size_t)(left - was);
        if (mremap(was, a->reserved, want, MREMAP_MAYMOVE | MREMAP_FIXED,
                   p) == MAP_FAILED) {
            int saved = errno;
            munmap(p, want);
            errno = saved;
            goto fail;
        }
    }
    a->base = p + a->lead;
    a->reserved = want;
    return PERSIA_OK;
fail:
    return persia_err_set(PERSIA_ENOMEM, "out of memory: %zu MiB for rows: %s",
                          want >> 20, strerror(errno));
}

/* Hands on what is full, and the last 2 MiB as soon as what is unused there is
 * at most a sixteenth of the arena; by `apart`, down to half of that. */
static void arena_huge(mem_arena *a)
{
    const size_t spare =
        a->size / 2048 * (128 - a->apart / (HUGE / 64));
    const size_t end = a->size + a->lead;
    while (a->handed < end && huge_pays(end - a->handed, spare) &&
           huge_later(a->base - a->lead + a->handed))
        a->handed += HUGE;
}

/* Touches the pages behind `from`, where the arena grows from there by a small
 * step. */
static void arena_touch(mem_arena *a, size_t from)
{
    const size_t end = a->size + a->lead;

    if (a->touched < from)
        a->touched = from;
    if (end <= a->touched || a->size < STEPS_FROM)
        return;
    if (end <= a->touched + STEP && a->touched + STEP <= a->reserved) {
        size_t start = a->touched & ~(PAGE - 1);
        madvise(a->base - a->lead + start, STEP, MADV_POPULATE_WRITE);
        a->touched = start + STEP;
    }
}

void persia_mem_arena_init(mem_arena *a, mem_limit *limit, size_t apart)
{
    *a = (mem_arena){.limit = limit, .apart = apart % HUGE};
    if (!huge_can())
        a->lead = a->apart / 64 * 64;
}

size_t persia_mem_arena_room(const mem_arena *a)
{
    return a->reserved ? (a->reserved - a->lead) & ~(PAGE - 1) : 0;
}

int persia_mem_arena_reserve(mem_arena *a, size_t bytes)
{
    huge_start();
    if (bytes <= persia_mem_arena_room(a))
        return PERSIA_OK;
    if (bytes > SIZE_MAX / 4)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: %zu bytes of rows", bytes);
    return arena_reserve(a, mem_round_up(bytes, PAGE));
}

void persia_mem_arena_grow(mem_arena *a, size_t bytes)
{
    if (bytes <= a->size)
        return;
    const size_t size = mem_round_up(bytes, PAGE), from = a->size + a->lead;
    assert(size <= persia_mem_arena_room(a));
    persia_mem_charge_announced(a->limit, size - a->size);
    if (!huge_can() && size >= HUGE_AHEAD && a->size < HUGE_AHEAD)
        madvise(a->base - a->lead, a->reserved, MADV_HUGEPAGE);
    a->size = size;
    arena_touch(a, from);
    arena_huge(a);
}

void persia_mem_arena_free(mem_arena *a)
{
    if (a->base) {
        huge_forget(a->base - a->lead, a->reserved);
        munmap(a->base - a->lead, a->reserved);
    }
    persia_mem_release(a->limit, a->size);
    persia_mem_arena_init(a, a->limit, a->apart);
}

/* ---- buffers ---- */

int persia_mem_buffer_need(mem_buffer *b, size_t bytes)
{
    if (bytes <= b->size)
        return PERSIA_OK;
    size_t size = b->size + b->size / 2;
    if (size < bytes)
        size = bytes;
    size_t unit = size < 4 * HUGE ? 64 : HUGE;
    if (size > SIZE_MAX / 4)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: a buffer of %zu bytes", bytes);
    size = mem_round_up(size, unit);
    persia_mem_buffer_free(b);
    b->data = aligned_alloc(unit, size);
    if (!b->data)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: a buffer of %zu bytes", size);
    if (unit == HUGE)
        madvise(b->data, size, MADV_HUGEPAGE);
    b->size = size;
    return PERSIA_OK;
}

void persia_mem_buffer_free(mem_buffer *b)
{
    free(b->data);
    *b = (mem_buffer){0};
}

/* ---- pages ---- */

int persia_mem_pages_take(size_t bytes, void **out)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *out = p == MAP_FAILED ? NULL : p;
    return *out ? PERSIA_OK
                : persia_err_set(PERSIA_ENOMEM,
                                 "out of memory: %zu bytes for a "
                                 "moment",
                                 bytes);
}

void persia_mem_pages_give(void *pages, size_t bytes)
{
    if (pages)
        munmap(pages, bytes);
}
