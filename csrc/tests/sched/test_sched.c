/* sched: every index once, errors, several callers, jobs, futures. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sched/sched.h"

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000,
                                 .tv_nsec = ms % 1000 * 1000000},
              NULL);
}

static sched *pool_of(unsigned threads)
{
    sched *s;
    assert_int_equal(persia_sched_create(threads, &s), PERSIA_OK);
    assert_int_equal(persia_sched_threads(s), threads);
    return s;
}

static void test_bad_arguments(void **state)
{
    (void)state;
    sched *s = (sched *)1;
    assert_int_equal(persia_sched_create(0, &s), PERSIA_EARG);
    assert_null(s);
    assert_int_equal(persia_sched_create(1000000, &s), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "1000000"));
    persia_sched_destroy(NULL);
}

/* ---- loops ---- */

enum { COUNTS = 1000 };

static int count_one(void *ctx, size_t i)
{
    /* Not atomic on purpose: each index must have one visitor, and the
     * caller must see the visit without further locking (TSan judges). */
    ((int *)ctx)[i]++;
    return PERSIA_OK;
}

typedef struct whose {
    pthread_t caller;
    atomic_int others;
} whose;

static int note_thread(void *ctx, size_t i)
{
    (void)i;
    whose *w = ctx;
    if (!pthread_equal(pthread_self(), w->caller))
        atomic_fetch_add(&w->others, 1);
    sleep_ms(1); /* long enough for another thread to take part */
    return PERSIA_OK;
}

static void test_few_rows_run_on_the_caller(void **state)
{
    (void)state;
    sched *s = pool_of(4);
    whose w = {.caller = pthread_self()};
    assert_int_equal(persia_sched_for_rows(s, 64, SCHED_ROWS_ALONE - 1,
                                           note_thread, &w), PERSIA_OK);
    assert_int_equal(w.others, 0);
    for (int k = 0; k < 100 && !w.others; k++) /* they may be slow to wake */
        assert_int_equal(persia_sched_for_rows(s, 64, SCHED_ROWS_ALONE,
                                               note_thread, &w), PERSIA_OK);
    assert_true(w.others > 0);
    int count[COUNTS] = {0};
    assert_int_equal(persia_sched_for_rows(s, COUNTS, 1, count_one, count),
                     PERSIA_OK);
    for (int i = 0; i < COUNTS; i++)
        assert_int_equal(count[i], 1);
    persia_sched_destroy(s);
}

static void test_each_index_once(void **state)
{
    (void)state;
    for (unsigned threads = 1; threads <= 5; threads++) {
        sched *s = pool_of(threads);
        for (size_t n = 0; n < 40; n++) {
            int counts[40] = {0};
            assert_int_equal(persia_sched_for(s, n, count_one, counts),
                             PERSIA_OK);
            for (size_t i = 0; i < 40; i++)
                assert_int_equal(counts[i], i < n);
        }
        persia_sched_destroy(s);
    }
}

typedef struct meeting {
    atomic_int here;
    int wanted;
} meeting;

/* Returns only when `wanted` threads are inside at once. */
static int meet(void *ctx, size_t i)
{
    (void)i;
    meeting *m = ctx;
    atomic_fetch_add(&m->here, 1);
    for (int ms = 0; atomic_load(&m->here) < m->wanted; ms++) {
        if (ms > 20000)
            return persia_err_set(PERSIA_ETIMEOUT, "nobody came");
        sleep_ms(1);
    }
    return PERSIA_OK;
}

static void test_all_threads_take_part(void **state)
{
    (void)state;
    sched *s = pool_of(4);
    for (int round = 0; round < 20; round++) {
        meeting m = {.wanted = 4};
        assert_int_equal(persia_sched_for(s, 4, meet, &m), PERSIA_OK);
    }
    persia_sched_destroy(s);
}

static int fail_from_seven(void *ctx, size_t i)
{
    atomic_fetch_add((atomic_int *)ctx, 1);
    if (i < 7)
        return PERSIA_OK;
    return persia_err_set(i == 7 ? PERSIA_EDATA : PERSIA_EIO, "index %zu", i);
}

static void test_lowest_error_wins_and_all_indices_run(void **state)
{
    (void)state;
    for (unsigned threads = 1; threads <= 4; threads++) {
        sched *s = pool_of(threads);
        for (int round = 0; round < 50; round++) {
            atomic_int ran = 0;
            assert_int_equal(persia_sched_for(s, 64, fail_from_seven, &ran),
                             PERSIA_EDATA);
            assert_string_equal(persia_err_text(), "index 7");
            assert_int_equal(atomic_load(&ran), 64);
        }
        persia_sched_destroy(s);
    }
}

static void *call_loops(void *arg)
{
    sched *s = arg;
    int counts[COUNTS] = {0};
    intptr_t bad = 0;
    for (int round = 0; round < 200; round++)
        bad += persia_sched_for(s, (size_t)(round * 5), count_one, counts) !=
               0;
    for (int i = 0; i < COUNTS; i++) {
        int loops = 0;
        for (int round = 0; round < 200; round++)
            loops += i < round * 5;
        bad += counts[i] != loops;
    }
    return (void *)bad;
}

static void test_several_callers(void **state)
{
    (void)state;
    sched *s = pool_of(3);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, call_loops, s), 0);
    for (int i = 0; i < 4; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        assert_int_equal((intptr_t)bad, 0);
    }
    persia_sched_destroy(s);
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static int sleep_if_first(void *ctx, size_t i)
{
    (void)ctx;
    if (i == 0)
        sleep_ms(300);
    return PERSIA_OK;
}

static void test_nobody_spins(void **state)
{
    (void)state;
    sched *s = pool_of(4);
    double before = cpu_seconds();
    assert_int_equal(persia_sched_for(s, 8, sleep_if_first, NULL), PERSIA_OK);
    sleep_ms(200);
    assert_true(cpu_seconds() - before < 0.15);
    persia_sched_destroy(s);
}

/* A team as a host would lend it: threads that are made for each loop. */
static atomic_int team_runs;

static unsigned team_size(void)
{
    return 3;
}

typedef struct team_call {
    void (*body)(void *ctx);
    void *ctx;
} team_call;

static void *team_thread(void *arg)
{
    team_call *call = arg;
    call->body(call->ctx);
    return NULL;
}

static void team_run(unsigned n, void (*body)(void *ctx), void *ctx)
{
    pthread_t threads[2];
    team_call call = {body, ctx};
    assert_in_range(n, 1, 3);
    for (unsigned i = 0; i + 1 < n; i++)
        pthread_create(&threads[i], NULL, team_thread, &call);
    body(ctx);
    for (unsigned i = 0; i + 1 < n; i++)
        pthread_join(threads[i], NULL);
    atomic_fetch_add(&team_runs, 1);
}

static void job_with_a_loop(void *ctx)
{
    int counts[10] = {0};
    persia_sched_for(ctx, 10, count_one, counts);
}

static void test_a_team_runs_loops_of_the_users_threads(void **state)
{
    (void)state;
    static const sched_team team = {team_size, team_run};
    persia_sched_team_install(&team);
    sched *small = pool_of(3), *large = pool_of(4), *one = pool_of(1);
    int counts[40] = {0};
    atomic_int ran = 0;
    assert_int_equal(persia_sched_for(small, 40, count_one, counts),
                     PERSIA_OK);
    for (int i = 0; i < 40; i++)
        assert_int_equal(counts[i], 1);
    assert_int_equal(persia_sched_for(small, 64, fail_from_seven, &ran),
                     PERSIA_EDATA);
    assert_string_equal(persia_err_text(), "index 7");
    assert_int_equal(atomic_load(&team_runs), 2);
    meeting all = {.wanted = 3};
    assert_int_equal(persia_sched_for(small, 3, meet, &all), PERSIA_OK);
    assert_int_equal(atomic_load(&team_runs), 3);
    /* A larger pool than the team, a pool of one, a background job: not. */
    meeting more = {.wanted = 4};
    assert_int_equal(persia_sched_for(large, 4, meet, &more), PERSIA_OK);
    assert_int_equal(persia_sched_for(one, 40, count_one, counts), PERSIA_OK);
    assert_int_equal(persia_sched_submit(small, job_with_a_loop, small),
                     PERSIA_OK);
    persia_sched_destroy(small);
    assert_int_equal(atomic_load(&team_runs), 3);
    persia_sched_team_install(NULL);
    assert_int_equal(persia_sched_for(large, 40, count_one, counts),
                     PERSIA_OK);
    assert_int_equal(atomic_load(&team_runs), 3);
    persia_sched_destroy(large);
    persia_sched_destroy(one);
}

/* ---- jobs ---- */

typedef struct log {
    sched *s;
    int order[200];
    atomic_int n;
} job_log;

typedef struct numbered {
    job_log *log;
    int number;
} numbered;

static void note(void *ctx)
{
    numbered *j = ctx;
    int counts[10] = {0};
    persia_sched_for(j->log->s, 10, count_one,
                     counts); /* jobs may run loops */
    int at = atomic_load(&j->log->n);
    j->log->order[at] = counts[9] ? j->number : -1;
    atomic_store(&j->log->n, at + 1);
}

static void test_jobs_run_in_order_and_destroy_waits(void **state)
{
    (void)state;
    sched *s = pool_of(2);
    job_log log = {.s = s};
    numbered jobs[200];
    for (int i = 0; i < 200; i++) {
        jobs[i] = (numbered){&log, i};
        assert_int_equal(persia_sched_submit(s, note, &jobs[i]), PERSIA_OK);
    }
    persia_sched_destroy(s);
    assert_int_equal(atomic_load(&log.n), 200);
    for (int i = 0; i < 200; i++)
        assert_int_equal(log.order[i], i);
}

/* Jobs that end only when four of them run at once, and how many did. */
typedef struct gathering {
    atomic_int inside, most, met;
} gathering;

static void gather(void *ctx)
{
    gathering *m = ctx;
    int now = atomic_fetch_add(&m->inside, 1) + 1;
    int most = atomic_load(&m->most);
    while (now > most && !atomic_compare_exchange_weak(&m->most, &most, now))
        continue;
    for (int i = 0; i < 20000 && atomic_load(&m->most) < 4; i++)
        sleep_ms(1);
    sleep_ms(1);
    atomic_fetch_add(&m->met, atomic_load(&m->most) >= 4);
    atomic_fetch_sub(&m->inside, 1);
}

static void test_background_threads_run_side_by_side(void **state)
{
    (void)state;
    sched *s;
    assert_int_equal(persia_sched_create_background(1, 0, &s), PERSIA_EARG);
    assert_int_equal(persia_sched_create_background(1, 4, &s), PERSIA_OK);
    gathering m = {0};
    for (int i = 0; i < 40; i++)
        assert_int_equal(persia_sched_submit(s, gather, &m), PERSIA_OK);
    persia_sched_destroy(s);
    assert_int_equal(atomic_load(&m.met), 40);
    assert_int_equal(atomic_load(&m.most), 4);
}

static void test_forked_child_gets_an_error(void **state)
{
    (void)state;
    sched *s = pool_of(2);
    pid_t child = fork();
    if (child == 0) {
        int counts[4] = {0};
        int ok = persia_sched_for(s, 4, count_one, counts) == PERSIA_EFORK &&
                 persia_sched_submit(s, note, NULL) == PERSIA_EFORK;
        persia_sched_destroy(s); /* returns at once */
        _exit(ok ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    persia_sched_destroy(s);
}

static volatile sig_atomic_t signalled;
static pthread_t signalled_thread;

static void on_signal(int number)
{
    (void)number;
    signalled = 1;
    signalled_thread = pthread_self();
}

static void test_signals_reach_the_users_thread(void **state)
{
    (void)state;
    sched *s = pool_of(8);
    struct sigaction action = {.sa_handler = on_signal}, before;
    sigaction(SIGUSR1, &action, &before);
    for (int i = 0; i < 20; i++) {
        signalled = 0;
        kill(getpid(), SIGUSR1);
        for (int ms = 0; !signalled && ms < 5000; ms++)
            sleep_ms(1);
        assert_true(signalled);
        assert_true(pthread_equal(signalled_thread, pthread_self()));
    }
    sigaction(SIGUSR1, &before, NULL);
    persia_sched_destroy(s);
}

/* ---- futures ---- */

static void complete_soon(void *ctx)
{
    sleep_ms(20);
    persia_future_complete(ctx, PERSIA_OK);
}

static void fail_soon(void *ctx)
{
    sleep_ms(20);
    persia_future_complete(ctx, persia_err_set(PERSIA_EDATA, "line 3 is bad"));
}

static void test_future_carries_result_and_text(void **state)
{
    (void)state;
    sched *s = pool_of(1);
    future *f;
    assert_int_equal(persia_future_create(&f), PERSIA_OK);
    assert_false(persia_future_done(f));
    persia_sched_submit(s, complete_soon, f);
    assert_int_equal(persia_future_wait(f, 0), PERSIA_OK);
    assert_true(persia_future_done(f));
    persia_future_destroy(f);

    assert_int_equal(persia_future_create(&f), PERSIA_OK);
    persia_sched_submit(s, fail_soon, f);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(persia_future_wait(f, 0), PERSIA_EDATA);
        assert_string_equal(persia_err_text(), "line 3 is bad");
        persia_err_set(PERSIA_EIO, "something else");
    }
    persia_future_destroy(f);
    persia_sched_destroy(s);
}

static void test_future_timeout(void **state)
{
    (void)state;
    future *f;
    assert_int_equal(persia_future_create(&f), PERSIA_OK);
    uint64_t before = persia_clock_ns();
    assert_int_equal(persia_future_wait(f, 130000000u), PERSIA_ETIMEOUT);
    uint64_t took = persia_clock_ns() - before;
    assert_true(took >= 130000000u && took < 5000000000u);
    persia_future_complete(f, PERSIA_OK);
    assert_int_equal(persia_future_wait(f, 1), PERSIA_OK);
    persia_future_destroy(f);
}

static atomic_int polls;

static int interrupt_third(void)
{
    return atomic_fetch_add(&polls, 1) == 2 ? PERSIA_EINTR : PERSIA_OK;
}

static void test_future_wait_can_be_interrupted(void **state)
{
    (void)state;
    future *f;
    assert_int_equal(persia_future_create(&f), PERSIA_OK);
    atomic_store(&polls, 0);
    persia_interrupt_install(interrupt_third);
    uint64_t before = persia_clock_ns();
    assert_int_equal(persia_future_wait(f, 0), PERSIA_EINTR);
    assert_true(persia_clock_ns() - before < 3000000000u);
    persia_interrupt_install(NULL);
    persia_future_complete(f, PERSIA_OK);
    assert_int_equal(persia_future_wait(f, 0), PERSIA_OK);
    persia_future_destroy(f);
}

static void wait_in_a_job(void *ctx)
{
    future **f = ctx; /* what it waits for, and what it completes */
    persia_future_complete(f[1], persia_future_wait(f[0], 0));
}

static void test_jobs_can_be_interrupted(void **state)
{
    (void)state;
    sched *s;
    future *f[2];
    assert_int_equal(persia_sched_create(1, &s), PERSIA_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(persia_future_create(&f[i]), PERSIA_OK);
    assert_int_equal(persia_sched_submit(s, wait_in_a_job, f), PERSIA_OK);
    persia_sched_interrupt(s);
    assert_int_equal(persia_future_wait(f[1], 0), PERSIA_EINTR);
    persia_sched_destroy(s);
    for (int i = 0; i < 2; i++)
        persia_future_destroy(f[i]);
}

static void *wait_for(void *f)
{
    return (void *)(intptr_t)persia_future_wait(f, 0);
}

static void test_future_wakes_all_waiters(void **state)
{
    (void)state;
    for (int round = 0; round < 50; round++) {
        future *f;
        assert_int_equal(persia_future_create(&f), PERSIA_OK);
        pthread_t threads[3];
        for (int i = 0; i < 3; i++)
            pthread_create(&threads[i], NULL, wait_for, f);
        persia_future_complete(f, persia_err_set(PERSIA_ECLOSED, "closed"));
        for (int i = 0; i < 3; i++) {
            void *result;
            pthread_join(threads[i], &result);
            assert_int_equal((intptr_t)result, PERSIA_ECLOSED);
        }
        persia_future_destroy(f);
    }
}

/* A part lands before its caller leaves, or after; each time the memory is
 * freed once, by the last of both. */
typedef struct trip {
    errand errand;
    atomic_int go, freed;
    int value;
} trip;

static void *fly(void *ctx)
{
    trip *t = ctx;
    while (!atomic_load(&t->go))
        sleep_ms(0);
    pthread_mutex_lock(&t->errand.lock);
    t->value++;
    if (persia_errand_land(&t->errand))
        atomic_fetch_add(&t->freed, 1);
    return NULL;
}

static void test_an_errand_is_freed_by_the_last(void **state)
{
    (void)state;
    enum { PARTS = 3 };
    for (int early = 0; early < 2; early++) {
        trip t = {.go = !early};
        pthread_t threads[PARTS];
        persia_errand_init(&t.errand);
        for (int i = 0; i < PARTS; i++) {
            pthread_mutex_lock(&t.errand.lock);
            persia_errand_start(&t.errand);
            pthread_mutex_unlock(&t.errand.lock);
            pthread_create(&threads[i], NULL, fly, &t);
        }
        pthread_mutex_lock(&t.errand.lock);
        assert_int_equal(persia_errand_wait(&t.errand, early ? 0 : UINT64_MAX,
                                            0),
                         early ? PERSIA_ETIMEOUT : PERSIA_OK);
        assert_int_equal(t.value, early ? 0 : PARTS);
        pthread_mutex_unlock(&t.errand.lock);
        const int own = persia_errand_leave(&t.errand);
        assert_int_equal(own, !early);
        atomic_store(&t.go, 1);
        for (int i = 0; i < PARTS; i++)
            pthread_join(threads[i], NULL);
        assert_int_equal(t.freed + own, 1);
        assert_int_equal(t.value, PARTS);
        persia_errand_free(&t.errand);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_arguments),
        cmocka_unit_test(test_few_rows_run_on_the_caller),
        cmocka_unit_test(test_each_index_once),
        cmocka_unit_test(test_all_threads_take_part),
        cmocka_unit_test(test_lowest_error_wins_and_all_indices_run),
        cmocka_unit_test(test_several_callers),
        cmocka_unit_test(test_nobody_spins),
        cmocka_unit_test(test_a_team_runs_loops_of_the_users_threads),
        cmocka_unit_test(test_jobs_run_in_order_and_destroy_waits),
        cmocka_unit_test(test_background_threads_run_side_by_side),
        cmocka_unit_test(test_forked_child_gets_an_error),
        cmocka_unit_test(test_signals_reach_the_users_thread),
        cmocka_unit_test(test_future_carries_result_and_text),
        cmocka_unit_test(test_future_timeout),
        cmocka_unit_test(test_future_wait_can_be_interrupted),
        cmocka_unit_test(test_jobs_can_be_interrupted),
        cmocka_unit_test(test_future_wakes_all_waiters),
        cmocka_unit_test(test_an_errand_is_freed_by_the_last),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
