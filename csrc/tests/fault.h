/* fault.h: memory that runs out.  Each attempt to get some fails in turn: it
 * alone, or with all later ones.  tests.cmake lets the linker wrap the
 * functions for a test that includes this. */
#ifndef PERSIA_TESTS_FAULT_H
#define PERSIA_TESTS_FAULT_H

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

static atomic_uint fault_attempts; /* since fault_begin() */
static atomic_uint fault_at;       /* the attempt that fails; 0: none does */
static atomic_int fault_for_good;  /* and all later ones */
static _Thread_local int fault_spares; /* this thread's attempts succeed */

static void fault_begin(unsigned at, int good)
{
    atomic_store(&fault_attempts, 0);
    atomic_store(&fault_for_good, good);
    atomic_store(&fault_at, at);
}

/* Whether an attempt failed. */
static int fault_end(void)
{
    return atomic_exchange(&fault_at, 0) <= atomic_load(&fault_attempts);
}

static int fault_fails(void)
{
    const unsigned at = fault_spares ? 0 : atomic_load(&fault_at);
    const unsigned n = at ? atomic_fetch_add(&fault_attempts, 1) + 1 : 0;

    if (!at || !(n == at || (n > at && atomic_load(&fault_for_good))))
        return 0;
    errno = ENOMEM;
    return 1;
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes)
{
    return fault_fails() ? NULL : __real_malloc(bytes);
}

void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes)
{
    return fault_fails() ? NULL : __real_calloc(n, bytes);
}

void *__real_realloc(void *p, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes)
{
    return fault_fails() ? NULL : __real_realloc(p, bytes);
}

void *__real_aligned_alloc(size_t unit, size_t bytes);
void *__wrap_aligned_alloc(size_t unit, size_t bytes);
void *__wrap_aligned_alloc(size_t unit, size_t bytes)
{
    return fault_fails() ? NULL : __real_aligned_alloc(unit, bytes);
}

void *__real_mmap(void *at, size_t bytes, int prot, int flags, int fd,
                  off_t from);
void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd,
                  off_t from);
void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd,
                  off_t from)
{
    return fault_fails() ? MAP_FAILED
                         : __real_mmap(at, bytes, prot, flags, fd, from);
}

void *__real_mremap(void *at, size_t was, size_t bytes, int flags, void *to);
void *__wrap_mremap(void *at, size_t was, size_t bytes, int flags, void *to);
void *__wrap_mremap(void *at, size_t was, size_t bytes, int flags, void *to)
{
    return fault_fails() ? MAP_FAILED
                         : __real_mremap(at, was, bytes, flags, to);
}

#endif
