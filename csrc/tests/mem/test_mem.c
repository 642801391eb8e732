/* mem: limits, arenas that grow in place, buffers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mem/huge.h"
#include "mem/mem.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

static const size_t MIB = (size_t)1 << 20;

/* ---- limits ---- */

static void test_limit_is_exact(void **state)
{
    (void)state;
    mem_limit limit = {.maximum = 100};
    assert_int_equal(persia_mem_charge(&limit, 60), PERSIA_OK);
    assert_int_equal(persia_mem_charge(&limit, 41), PERSIA_ELIMIT);
    assert_non_null(strstr(persia_err_text(), "60"));
    assert_int_equal(persia_mem_charge(&limit, UINT64_MAX), PERSIA_ELIMIT);
    assert_int_equal(persia_mem_charge(&limit, 40), PERSIA_OK);
    persia_mem_release(&limit, 100);
    assert_int_equal(atomic_load(&limit.used), 0);
    assert_int_equal(persia_mem_charge(NULL, UINT64_MAX), PERSIA_OK);
    persia_mem_release(NULL, 1);
    mem_limit none = {0};
    assert_int_equal(persia_mem_charge(&none, (uint64_t)1 << 60), PERSIA_OK);
}

static void *charge_many(void *arg)
{
    mem_limit *limit = arg;
    intptr_t charged = 0;
    for (int i = 0; i < 20000; i++)
        if (persia_mem_charge(limit, 3) == PERSIA_OK) {
            charged++;
            if (i % 2) {
                persia_mem_release(limit, 3);
                charged--;
            }
        }
    return (void *)charged;
}

static void test_limit_holds_among_threads(void **state)
{
    (void)state;
    mem_limit limit = {.maximum = 60000};
    pthread_t threads[4];
    uint64_t charged = 0;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, charge_many, &limit);
    for (int i = 0; i < 4; i++) {
        void *n;
        pthread_join(threads[i], &n);
        charged += (uint64_t)(intptr_t)n;
    }
    assert_int_equal(atomic_load(&limit.used), 3 * charged);
    assert_true(3 * charged <= limit.maximum);
}

/* ---- arenas ---- */

/* A word whose value tells where it lies. */
static uint64_t word_at(size_t i)
{
    return (uint64_t)i * 0x9E3779B97F4A7C15u + 1;
}

/* Reserves, then grows. */
static int arena_grow(mem_arena *a, size_t bytes)
{
    int rc = persia_mem_arena_reserve(a, bytes);

    if (!rc)
        persia_mem_arena_grow(a, bytes);
    return rc;
}

static void test_arena_keeps_bytes_and_grows_zeroed(void **state)
{
    (void)state;
    mem_limit limit = {0};
    mem_arena a;
    persia_mem_arena_init(&a, &limit, 0);
    size_t words = 0;
    /* Past 2 MiB pages afterwards (4 MiB) and ahead (40 MiB), in steps that
     * fit nothing. */
    for (size_t bytes = 8; bytes < 90 * MIB; bytes += bytes / 3 + 1000) {
        assert_int_equal(arena_grow(&a, bytes), PERSIA_OK);
        assert_true(a.size >= bytes && a.reserved >= a.size);
        assert_int_equal(atomic_load(&limit.used), a.size);
        uint64_t *p = (uint64_t *)a.base;
        for (size_t i = 0; i < words; i += 509)
            assert_int_equal(p[i], word_at(i));
        for (; words < a.size / 8; words++) {
            if (p[words])
                fail_msg("word %zu is not zero", words);
            p[words] = word_at(words);
        }
    }
    uint64_t *p = (uint64_t *)a.base;
    for (size_t i = 0; i < words; i++)
        if (p[i] != word_at(i))
            fail_msg("word %zu changed", i);
    persia_mem_arena_free(&a);
    assert_int_equal(atomic_load(&limit.used), 0);
    assert_null(a.base);
    assert_int_equal(arena_grow(&a, 10), PERSIA_OK); /* as new */
    assert_int_equal(a.base[0], 0);
    persia_mem_arena_free(&a);
}

/* Small steps, so that full ranges are made huge one by one. */
static void test_arena_in_small_steps(void **state)
{
    (void)state;
    mem_arena a;
    persia_mem_arena_init(&a, NULL, MIB + 64);
    for (size_t bytes = 0; bytes < 48 * MIB; bytes += MIB / 4) {
        assert_int_equal(arena_grow(&a, bytes + MIB / 4), PERSIA_OK);
        memset(a.base + bytes, (int)(bytes / (MIB / 4)) & 0xff, MIB / 4);
    }
    for (size_t bytes = 0; bytes < 48 * MIB; bytes += 4001)
        assert_int_equal((unsigned char)a.base[bytes],
                         bytes / (MIB / 4) & 0xff);
    persia_mem_arena_free(&a);
}

/* Tests that count pages: some systems make any page huge, unasked. */
static int small_pages(void **state)
{
    (void)state;
    return prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
}

static int any_pages(void **state)
{
    (void)state;
    return prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
}

static size_t resident_pages(const mem_arena *a)
{
    static unsigned char page[16384];
    size_t n = 0;
    const size_t bytes = a->reserved - a->lead;
    assert_true(bytes <= sizeof page * 4096);
    assert_int_equal(mincore(a->base, bytes, page), 0);
    for (size_t i = 0; i < bytes / 4096; i++)
        n += page[i] & 1;
    return n;
}

static void test_small_arenas_stay_small(void **state)
{
    (void)state;
    mem_arena a;
    persia_mem_arena_init(&a, NULL, 0);
    assert_int_equal(arena_grow(&a, 5000), PERSIA_OK);
    assert_int_equal(resident_pages(&a), 0);
    memset(a.base, 1, 5000);
    assert_int_equal(resident_pages(&a), 2);
    persia_mem_arena_free(&a);
}

/* Ranges that the kernel was asked to make huge, and whether it says that no
 * huge page is left.  Whether it has one depends on the machine, so what it
 * answers is not tested. */
static atomic_size_t ranges_asked;
static atomic_int huge_pages_are_out;

int __real_madvise(void *at, size_t bytes, int advice);
int __wrap_madvise(void *at, size_t bytes, int advice);
int __wrap_madvise(void *at, size_t bytes, int advice)
{
    if (advice != MADV_COLLAPSE || !bytes)
        return __real_madvise(at, bytes, advice);
    atomic_fetch_add(&ranges_asked, bytes == HUGE && !((uintptr_t)at % HUGE));
    if (atomic_load(&huge_pages_are_out)) {
        errno = ENOMEM;
        return -1;
    }
    __real_madvise(at, bytes, advice);
    return 0;
}

/* An arena of 33 MiB that grew by pages and has what was written there.  It is
 * touched in small pages, and at most a sixteenth of it ahead. */
static void grow_by_pages(void)
{
    mem_arena a;
    persia_mem_arena_init(&a, NULL, MIB);
    for (size_t bytes = 0; bytes < 33 * MIB; bytes += 4096) {
        assert_int_equal(arena_grow(&a, bytes + 4096), PERSIA_OK);
        a.base[bytes] = (char)(bytes / 4096);
        if (bytes % (MIB / 4) == 0) {
            const size_t ahead = bytes / 16 < MIB ? bytes / 16 : MIB;
            assert_true(resident_pages(&a) <= (bytes + ahead) / 4096 + 17);
        }
    }
    huge_wait();
    for (size_t bytes = 0; bytes < 33 * MIB; bytes += 4096)
        assert_int_equal(a.base[bytes], (char)(bytes / 4096));
    persia_mem_arena_free(&a);
}

/* A growing arena waits for no huge page: its pages are joined behind it. */
static void test_full_ranges_become_huge_behind(void **state)
{
    (void)state;
    if (!huge_can())
        skip();
    atomic_store(&ranges_asked, 0);
    grow_by_pages();
    assert_true(atomic_load(&ranges_asked) >= 15);
}

static void test_ranges_stay_small_where_no_huge_page_is_left(void **state)
{
    (void)state;
    if (!huge_can())
        skip();
    atomic_store(&ranges_asked, 0);
    atomic_store(&huge_pages_are_out, 1);
    grow_by_pages();
    atomic_store(&huge_pages_are_out, 0);
    assert_true(atomic_load(&ranges_asked) >= 1);
}

/* Arenas that grow, move and go away while their ranges are worked on. */
static void *arenas_come_and_go(void *arg)
{
    for (size_t turn = 0; turn < 20; turn++) {
        mem_arena a;
        persia_mem_arena_init(&a, NULL, (size_t)(uintptr_t)arg * MIB);
        for (size_t bytes = 0; bytes < (turn + 1) * MIB; bytes += 65536) {
            if (arena_grow(&a, bytes + 65536))
                return NULL;
            memset(a.base + bytes, (int)turn, 65536);
        }
        for (size_t i = 0; i < (turn + 1) * MIB; i += 4096)
            if (a.base[i] != (char)turn)
                return NULL;
        persia_mem_arena_free(&a);
    }
    return arg;
}

static void test_arenas_move_and_go_while_pages_are_made(void **state)
{
    (void)state;
    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, arenas_come_and_go,
                       (void *)(i + 1));
    for (uintptr_t i = 0; i < 2; i++) {
        void *done;
        pthread_join(threads[i], &done);
        assert_ptr_equal(done, (void *)(i + 1));
    }
    mem_blocks b; /* the same with blocks */
    persia_mem_blocks_init(&b, NULL);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(persia_mem_blocks_reserve(&b, 200200), PERSIA_OK);
        memset(persia_mem_blocks_take(&b, 200000), i, 200000);
        persia_mem_blocks_unreserve(&b, 200200);
    }
    persia_mem_blocks_free(&b);
    huge_wait();
}

/* What is reserved is there, after every block in use was replaced by one of
 * twice its size, however those given back lie. */
static void test_blocks_replace_each_other(void **state)
{
    enum { N = 300, NEW = 50 };
    unsigned char *block[N];
    size_t size[N];
    mem_limit limit = {0};
    mem_blocks b;
    (void)state;
    for (size_t round = 0; round < 20; round++) {
        persia_mem_blocks_init(&b, &limit);
        for (size_t i = 0; i < N; i++) {
            size[i] = 64 + i * round * 37 % 9000;
            assert_int_equal(persia_mem_blocks_reserve(&b, size[i] + 192),
                             PERSIA_OK);
            block[i] = persia_mem_blocks_take(&b, size[i]);
            memset(block[i], (int)i, size[i]);
            persia_mem_blocks_unreserve(&b, size[i] + 192);
        }
        assert_int_equal(persia_mem_blocks_reserve(&b, NEW * 5192), PERSIA_OK);
        for (size_t k = 0; k < N; k++) {
            const size_t i = k * 7 % N, wide = size[i] * 2;
            unsigned char *to = persia_mem_blocks_take(&b, wide);
            assert_int_equal((uintptr_t)to % 64, 0);
            memcpy(to, block[i], size[i]);
            persia_mem_blocks_give(&b, block[i]);
            block[i] = to;
            if (k % (N / NEW) == 0)
                memset(persia_mem_blocks_take(&b, 5000), 0xEE, 5000);
        }
        persia_mem_blocks_unreserve(&b, NEW * 5192);
        for (size_t i = 0; i < N; i++)
            for (size_t j = 0; j < size[i]; j++)
                assert_int_equal(block[i][j], (unsigned char)i);
        assert_int_equal(persia_mem_blocks_bytes(&b),
                         atomic_load(&limit.used));
        persia_mem_blocks_free(&b);
        assert_int_equal(atomic_load(&limit.used), 0);
    }
}

/* Pages of [at, at + bytes) that are in memory. */
static size_t resident(const char *at, size_t bytes)
{
    static unsigned char in[8192];
    const size_t pages = bytes / 4096;
    size_t n = 0;
    char *from = (char *)(((uintptr_t)at + 4095) & ~(uintptr_t)4095);
    assert_true(pages <= sizeof in);
    assert_int_equal(mincore(from, (pages - 1) * 4096, in), 0);
    for (size_t i = 0; i + 1 < pages; i++)
        n += in[i] & 1;
    return n;
}

/* What was given back is the system's again; what is in use stays. */
static void test_blocks_are_trimmed(void **state)
{
    enum { N = 6 };
    (void)state;
    mem_blocks b;
    char *block[N];
    persia_mem_blocks_init(&b, NULL);
    for (int turn = 0; turn < 2; turn++) {
        assert_int_equal(persia_mem_blocks_reserve(&b, N * (2 * MIB + 192)),
                         PERSIA_OK);
        for (int i = 0; i < N; i++) {
            block[i] = persia_mem_blocks_take(&b, 2 * MIB);
            memset(block[i], 1 + i, 2 * MIB);
        }
        persia_mem_blocks_unreserve(&b, N * (2 * MIB + 192));
        for (int i = 0; i < N - 1; i++)
            persia_mem_blocks_give(&b, block[i]);
        persia_mem_blocks_trim(&b);
        size_t left = 0;
        for (int i = 0; i < N - 1; i++)
            left += resident(block[i], 2 * MIB);
        assert_true(left <= N); /* headers of free blocks */
        for (size_t i = 0; i < 2 * MIB; i++)
            assert_int_equal(block[N - 1][i], N);
        persia_mem_blocks_give(&b, block[N - 1]);
    }
    persia_mem_blocks_free(&b);
}

static void test_arena_without_address_space_is_unchanged(void **state)
{
    (void)state;
    mem_limit limit = {0};
    mem_arena a;
    persia_mem_arena_init(&a, &limit, 0);
    assert_int_equal(arena_grow(&a, 5000), PERSIA_OK);
    a.base[4999] = 7;
    mem_arena copy = a;
    assert_int_equal(arena_grow(&a, (size_t)1 << 50), PERSIA_ENOMEM);
    assert_true(strlen(persia_err_text()) > 0);
    assert_int_equal(arena_grow(&a, SIZE_MAX), PERSIA_ENOMEM);
    assert_memory_equal(&a, &copy, sizeof a);
    assert_int_equal(a.base[4999], 7);
    assert_int_equal(atomic_load(&limit.used), a.size);
    persia_mem_arena_free(&a);
}

static void test_forked_child_neither_copies_nor_crashes(void **state)
{
    (void)state;
    mem_arena a;
    persia_mem_arena_init(&a, NULL, 0);
    assert_int_equal(arena_grow(&a, 3 * MIB), PERSIA_OK);
    memset(a.base, 5, 3 * MIB);
    pid_t child = fork();
    if (child == 0) {
        int zero = a.base[MIB] == 0;
        persia_mem_arena_free(&a);
        _exit(zero ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(a.base[MIB], 5);
    persia_mem_arena_free(&a);
}

/* ---- buffers ---- */

static void test_buffer(void **state)
{
    (void)state;
    mem_buffer b = {0};
    unsigned grown = 0;
    for (size_t bytes = 1; bytes < 40 * MIB; bytes += bytes / 8 + 1) {
        void *before = b.data;
        size_t size = b.size;
        assert_int_equal(persia_mem_buffer_need(&b, bytes), PERSIA_OK);
        assert_true(b.size >= bytes);
        assert_int_equal((uintptr_t)b.data % 64, 0);
        memset(b.data, 1, b.size);
        if (b.size == size)
            assert_ptr_equal(b.data, before);
        else
            grown++;
    }
    assert_true(grown < 60); /* by half each time */
    size_t size = b.size;
    assert_int_equal(persia_mem_buffer_need(&b, 5), PERSIA_OK);
    assert_int_equal(b.size, size);
    persia_mem_buffer_free(&b);
    assert_null(b.data);
    assert_int_equal(persia_mem_buffer_need(&b, SIZE_MAX - 5), PERSIA_ENOMEM);
    persia_mem_buffer_free(&b);
}

static void *taken(mem_pool *p, size_t bytes)
{
    void *block;
    assert_int_equal(persia_mem_pool_take(p, bytes, &block), PERSIA_OK);
    assert_int_equal((uintptr_t)block % 64, 0);
    memset(block, 1, bytes);
    return block;
}

#if defined(__SANITIZE_ADDRESS__)
enum { KEEPS = 0 };
#else
enum { KEEPS = 1 };
#endif

static void test_blocks_are_used_again(void **state)
{
    enum { MOST = 1 << 20, BLOCKS = 3 };
    (void)state;
    mem_pool *p;
    assert_int_equal(persia_mem_pool_create(MOST, BLOCKS, &p), PERSIA_OK);
    void *one = taken(p, 300000), *two;
    persia_mem_pool_give(one);
    two = taken(p, 290000);
    assert_true((two == one) == KEEPS); /* about the same size */
    persia_mem_pool_give(two);
    two = taken(p, 40000); /* it would be a waste */
    assert_ptr_equal(p->kept, KEEPS ? (char *)one - 64 : NULL);
    persia_mem_pool_give(two);
    assert_int_equal(p->kept_n, 2 * KEEPS);
    /* The ones that have waited longest go; small ones are not kept. */
    void *blocks[8];
    for (size_t i = 0; i < 8; i++)
        blocks[i] = taken(p, i ? i * 50000 : 100);
    for (size_t i = 8; i-- > 0;) {
        persia_mem_pool_give(blocks[i]);
        assert_true(p->kept_n <= BLOCKS && p->kept_bytes <= MOST);
    }
    assert_int_equal(p->kept_n, BLOCKS * KEEPS);
    assert_true(persia_mem_pool_take(p, SIZE_MAX / 2, &one) == PERSIA_ENOMEM);
    one = taken(p, 2 * MOST);
    two = taken(p, 0);
    persia_mem_pool_destroy(p); /* before the last ones are given back */
    persia_mem_pool_give(one);
    persia_mem_pool_give(NULL);
    persia_mem_pool_give(two);
}

#define counts_pages(test)                                                    \
    cmocka_unit_test_setup_teardown(test, small_pages, any_pages)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_are_used_again),
        cmocka_unit_test(test_limit_is_exact),
        cmocka_unit_test(test_limit_holds_among_threads),
        cmocka_unit_test(test_arena_keeps_bytes_and_grows_zeroed),
        cmocka_unit_test(test_arena_in_small_steps),
        counts_pages(test_small_arenas_stay_small),
        counts_pages(test_full_ranges_become_huge_behind),
        counts_pages(test_ranges_stay_small_where_no_huge_page_is_left),
        cmocka_unit_test(test_arenas_move_and_go_while_pages_are_made),
        cmocka_unit_test(test_blocks_replace_each_other),
        counts_pages(test_blocks_are_trimmed),
        cmocka_unit_test(test_arena_without_address_space_is_unchanged),
        cmocka_unit_test(test_forked_child_neither_copies_nor_crashes),
        cmocka_unit_test(test_buffer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
