/* base: messages per thread, error names, interrupts, fork, philox,
 * floats. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "simd/simd.h"

static void *other_thread(void *arg)
{
    char *text = arg;
    snprintf(text, 64, "[%s]", persia_err_text());
    persia_err_set(PERSIA_EARG, "of the other thread");
    return NULL;
}

static void test_text_is_kept_per_thread(void **state)
{
    (void)state;
    char seen[64];
    assert_int_equal(persia_err_set(PERSIA_EIO, "file %s: %d", "a", 7),
                     PERSIA_EIO);
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, other_thread, seen), 0);
    pthread_join(t, NULL);
    assert_string_equal(seen, "[]");
    assert_string_equal(persia_err_text(), "file a: 7");
}

static void test_text_may_quote_itself_and_is_cut(void **state)
{
    (void)state;
    persia_err_set(PERSIA_EIO, "inner");
    persia_err_set(PERSIA_EIO, "outer: %s", persia_err_text());
    assert_string_equal(persia_err_text(), "outer: inner");
    char big[5000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = 0;
    persia_err_set(PERSIA_EIO, "%s", big);
    size_t n = strlen(persia_err_text());
    assert_true(n >= 255 && n < sizeof big);
    assert_memory_equal(persia_err_text(), big, n);
}

static void test_an_error_is_kept_over_others(void **state)
{
    (void)state;
    err_kept error, none;
    persia_err_set(PERSIA_EIO, "the first");
    persia_err_keep(&error, PERSIA_EIO);
    persia_err_keep(&none, PERSIA_OK);
    persia_err_set(PERSIA_EARG, "the second");
    assert_string_equal(none.text, "");
    assert_int_equal(persia_err_again(&none), PERSIA_OK);
    assert_string_equal(persia_err_text(), "the second");
    assert_int_equal(persia_err_again(&error), PERSIA_EIO);
    assert_string_equal(persia_err_text(), "the first");
}

static void test_a_pause_doubles_up_to_a_limit(void **state)
{
    (void)state;
    const uint64_t ms = 1000000, most = 70 * ms;
    for (unsigned tries = 1; tries < 100; tries++) {
        uint64_t whole = tries < 4 ? 10 * ms << (tries - 1) : most;
        for (uint64_t client = 0; client < 40; client++)
            assert_in_range(persia_backoff_ns(tries, most, client), whole / 2,
                            whole - 1);
    }
}

static uint64_t count_to_three(void *ctx)
{
    _Atomic(int) *n = ctx;
    return ++*n < 3 ? persia_clock_ns() : PERSIA_FOREVER;
}

static void wait_for(const _Atomic(int) *n, int value)
{
    while (*n < value)
        persia_pause(1000);
}

static void test_a_timer_ticks_when_it_is_due_or_woken(void **state)
{
    (void)state;
    _Atomic(int) n = 0;
    persia_timer t;
    persia_timer_init(&t);
    persia_timer_wake(&t, 0); /* before it runs: it begins with a tick */
    assert_int_equal(persia_timer_start(&t, count_to_three, &n, "test"), 0);
    wait_for(&n, 3);
    persia_timer_wake(&t, 0);
    wait_for(&n, 4);
    persia_timer_stop(&t);
    persia_timer_wake(&t, 0);
    persia_timer_stop(&t);
    assert_int_equal(n, 4);
    persia_timer_free(&t);
}

static void test_a_pause_is_interrupted(void **state)
{
    (void)state;
    interrupt_flag flag = {.stop = 1};
    persia_interrupt_watch(&flag);
    assert_int_equal(persia_pause_poll(3600 * (uint64_t)1000000000),
                     PERSIA_EINTR);
    persia_interrupt_watch(NULL);
    assert_int_equal(persia_pause_poll(1000), PERSIA_OK);
}

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(persia_err_name(PERSIA_OK), "Ok");
    assert_string_equal(persia_err_name(PERSIA_EOFFSETS), "OffsetsError");
    assert_string_equal(persia_err_name(-1), "InternalError");
    assert_string_equal(persia_err_name(PERSIA_ERROR_COUNT), "InternalError");
    for (int code = 0; code < PERSIA_ERROR_COUNT; code++) {
        assert_true(strlen(persia_err_message(code)) > 0);
        for (int other = 0; other < code; other++)
            assert_string_not_equal(persia_err_name(code),
                                    persia_err_name(other));
    }
}

static int always_interrupted(void)
{
    return PERSIA_EINTR;
}

static void test_interrupt_callback(void **state)
{
    (void)state;
    assert_int_equal(persia_interrupt_poll(), PERSIA_OK);
    persia_interrupt_install(always_interrupted);
    assert_int_equal(persia_interrupt_poll(), PERSIA_EINTR);
    persia_interrupt_install(NULL);
    assert_int_equal(persia_interrupt_poll(), PERSIA_OK);
}

static void *poll_unwatched(void *arg)
{
    static char found;
    (void)arg;
    return persia_interrupt_poll() ? &found : NULL;
}

static void test_a_watched_thread_is_told_to_stop(void **state)
{
    (void)state;
    interrupt_flag flag = {0};
    pthread_t other;
    void *failed;
    persia_interrupt_install(NULL);
    persia_interrupt_watch(&flag);
    assert_int_equal(persia_interrupt_poll(), PERSIA_OK);
    assert_int_equal(flag.polls, 1);
    __atomic_store_n(&flag.stop, 1, __ATOMIC_RELEASE);
    assert_int_equal(persia_interrupt_poll(), PERSIA_EINTR);
    assert_int_equal(pthread_create(&other, NULL, poll_unwatched, NULL), 0);
    pthread_join(other, &failed);
    assert_null(failed);
    assert_int_equal(flag.polls, 2);
    persia_interrupt_watch(NULL);
    assert_int_equal(persia_interrupt_poll(), PERSIA_OK);
    assert_int_equal(flag.polls, 2);
}

static void test_fork_is_noticed_in_the_child_only(void **state)
{
    (void)state;
    pid_t child = fork();
    if (child == 0)
        _exit(persia_fork_check("a store") == PERSIA_EFORK &&
                      strstr(persia_err_text(), "a store")
                  ? 0
                  : 1);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(persia_fork_check("a store"), PERSIA_OK);
}

static void test_clock_counts_nanoseconds(void **state)
{
    (void)state;
    uint64_t before = persia_clock_ns();
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    uint64_t took = persia_clock_ns() - before;
    assert_true(took >= 20000000u && took < 20000000000u);
}

/* Known answers of the Random123 distribution (kat_vectors, philox4x32 10). */
static void test_philox_known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0},
         {0, 0},
         {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t out[4];
        philox4x32(known[i].counter, known[i].key, out);
        assert_memory_equal(out, known[i].out, sizeof out);
    }
}

static void spoil(float *at, int how)
{
    static const float all[] = {NAN, -NAN, INFINITY, -INFINITY};
    *at = all[how % 4];
}

/* Finite floats whose exponents are next to those of NaN and Inf. */
static void fill_finite(float *x, size_t n)
{
    static const float all[] = {FLT_MAX, -FLT_MAX, 0, -0.0f, FLT_MIN, 1};
    for (size_t i = 0; i < n; i++)
        x[i] = all[i % 6];
}

static void test_floats_are_finite_or_not(void **state)
{
    (void)state;
    enum { MOST = 70 };
    float x[MOST + 2];
    for (size_t n = 0; n <= MOST; n++) {
        fill_finite(x, MOST + 2);
        spoil(x, 0);
        spoil(x + n + 1, 2); /* what is around does not count */
        assert_true(persia_floats_finite(x + 1, n));
        for (size_t i = 0; i < n; i++) {
            float was = x[i + 1];
            spoil(x + i + 1, (int)i);
            assert_false(persia_floats_finite(x + 1, n));
            x[i + 1] = was;
        }
    }
}

static void test_rows_are_finite_or_not(void **state)
{
    (void)state;
    enum { ROWS = 60, DIM = 40, GAP = 3 };
    static float x[ROWS * (DIM + GAP)];
    for (size_t dim = 1; dim <= DIM; dim++)
        for (size_t gap = 0; gap <= GAP; gap += GAP) {
            const size_t stride = dim + gap;
            fill_finite(x, ROWS * stride);
            for (size_t i = 0; i < ROWS; i++)
                for (size_t j = dim; j < stride; j++)
                    spoil(x + i * stride + j, (int)j);
            assert_true(persia_rows_finite(x, ROWS, dim, stride));
            for (size_t i = 0; i < ROWS; i += 59)
                for (size_t j = 0; j < dim; j++) {
                    float was = x[i * stride + j];
                    spoil(x + i * stride + j, (int)j);
                    assert_false(persia_rows_finite(x, ROWS, dim, stride));
                    x[i * stride + j] = was;
                }
        }
}

/* A server answers first, then the request ends, then its caller leaves; and
 * no time is beyond PERSIA_FOREVER. */
static void test_the_sides_of_a_call_give_up_in_order(void **state)
{
    (void)state;
    const uint64_t ms = 1000000, times[] = {0, 1, 9, 20 * ms, 1000 * ms,
                                            3600 * 1000 * ms};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        const uint64_t before = persia_clock_ns();
        const uint64_t answer = persia_deadline_answer(times[i]);
        const uint64_t end = persia_deadline(times[i]);
        const uint64_t left = persia_deadline_left(end);
        assert_true(answer >= before && answer <= end);
        assert_true(answer >= before + times[i] - times[i] / 10);
        assert_true(left >= 1 && left <= times[i] + (times[i] == 0));
        assert_true(persia_deadline_leave(end) > end);
    }
    assert_true(persia_deadline(PERSIA_FOREVER) == PERSIA_FOREVER);
    assert_true(persia_deadline(PERSIA_FOREVER - 1) == PERSIA_FOREVER);
    assert_true(persia_deadline_leave(PERSIA_FOREVER) == PERSIA_FOREVER);
    assert_true(persia_deadline_later(PERSIA_FOREVER - 2, 1) ==
                PERSIA_FOREVER - 1);
    assert_true(persia_deadline_left(0) == 1);
}

/* As of sched_getattr(2); runtime: of a turn, 0 where the kernel has one rule
 * for all threads. */
struct attributes {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
    uint32_t least, most;
};

static void *prompt_thread(void *arg)
{
    struct attributes *seen = arg;
    assert_int_equal(setpriority(PRIO_PROCESS, 0, 3), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(
            syscall(SYS_sched_getattr, 0, &seen[i], sizeof seen[i], 0), 0);
        persia_thread_prompt();
    }
    return NULL;
}

static void test_a_prompt_thread_has_shorter_turns(void **state)
{
    struct attributes seen[2];
    pthread_t t;
    (void)state;
    assert_int_equal(pthread_create(&t, NULL, prompt_thread, seen), 0);
    pthread_join(t, NULL);
    assert_int_equal(seen[1].nice, 3);
    assert_int_equal(seen[1].policy, seen[0].policy);
    assert_int_equal(seen[1].runtime, seen[0].runtime ? 100000 : 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_floats_are_finite_or_not),
        cmocka_unit_test(test_rows_are_finite_or_not),
        cmocka_unit_test(test_text_is_kept_per_thread),
        cmocka_unit_test(test_text_may_quote_itself_and_is_cut),
        cmocka_unit_test(test_an_error_is_kept_over_others),
        cmocka_unit_test(test_a_pause_doubles_up_to_a_limit),
        cmocka_unit_test(test_a_timer_ticks_when_it_is_due_or_woken),
        cmocka_unit_test(test_a_pause_is_interrupted),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_interrupt_callback),
        cmocka_unit_test(test_a_watched_thread_is_told_to_stop),
        cmocka_unit_test(test_fork_is_noticed_in_the_child_only),
        cmocka_unit_test(test_clock_counts_nanoseconds),
        cmocka_unit_test(test_the_sides_of_a_call_give_up_in_order),
        cmocka_unit_test(test_a_prompt_thread_has_shorter_turns),
        cmocka_unit_test(test_philox_known_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
