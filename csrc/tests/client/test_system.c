/* client and server under a system of the test's: minutes pass in its time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <time.h>

#include "counting.h"
#include "recovers.h"

#define MINUTE (60 * SECOND)

/* A wait with an end moves the clock there, and lets others run. */
static struct {
    _Atomic(uint64_t) now;
    _Atomic(uint64_t) waits, threads, joined;
    _Atomic(uint64_t) next; /* random number */
    void (*at_wait)(uint64_t waits);
} simulated;

static uint64_t sim_now(void *ctx)
{
    (void)ctx;
    return atomic_load(&simulated.now);
}

static int sim_wait(void *ctx, pthread_cond_t *c, pthread_mutex_t *lock,
                    uint64_t until)
{
    (void)ctx;
    if (until == PERSIA_FOREVER)
        return pthread_cond_wait(c, lock);
    const uint64_t waits = atomic_fetch_add(&simulated.waits, 1) + 1;
    if (simulated.at_wait)
        simulated.at_wait(waits);
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    do { /* for threads that answer */
        t.tv_nsec += 100000;
        t.tv_sec += t.tv_nsec / 1000000000;
        t.tv_nsec %= 1000000000;
        if (!pthread_cond_timedwait(c, lock, &t))
            return 0;
    } while (atomic_load(&cluster_answering));
    uint64_t now = atomic_load(&simulated.now);
    while (now < until &&
           !atomic_compare_exchange_weak(&simulated.now, &now, until))
        ;
    return 1;
}

static int sim_start(void *ctx, pthread_t *out, void *(*run)(void *arg),
                     void *arg, const char *name, int detached)
{
    (void)ctx;
    (void)name;
    atomic_fetch_add(&simulated.threads, 1);
    int failed = pthread_create(out, NULL, run, arg);
    if (!failed && detached)
        pthread_detach(*out);
    return failed;
}

static void sim_join(void *ctx, pthread_t thread)
{
    (void)ctx;
    atomic_fetch_add(&simulated.joined, 1);
    pthread_join(thread, NULL);
}

static int sim_random(void *ctx, void *out, size_t n)
{
    (void)ctx;
    assert_int_equal(n, sizeof(uint64_t));
    *(uint64_t *)out = atomic_fetch_add(&simulated.next, 1) + 1000;
    return 0;
}

static int setup(void **state)
{
    static persia_system system;
    (void)state;
    system = *persia_system_get();
    system.now = sim_now;
    system.wait = sim_wait;
    system.start = sim_start;
    system.join = sim_join;
    system.random = sim_random;
    simulated.now = MINUTE;
    simulated.waits = simulated.threads = simulated.joined = 0;
    simulated.next = 0;
    simulated.at_wait = NULL;
    persia_system_install(&system);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    persia_system_install(NULL);
    return 0;
}

/* Its deadline is of the simulated time. */
static void a_server_that_stays_away_costs_no_time(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, 4 * MINUTE, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    const uint64_t begin = persia_clock_ns();
    atomic_store(&c.nodes[1].down, 1);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_EUNAVAILABLE);
    assert_true(persia_clock_ns() - begin >= 3 * MINUTE);
    atomic_store(&c.nodes[1].down, 0);
    assert_true(counts_of(remote).retries > 0);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* Its disk is full when it starts again: lookups wait for that. */
static void a_server_that_refuses_a_greeting_is_asked_again(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 1, 4 * MINUTE, LOST_CONTINUE);
    uint32_t no = declare_counting(remote);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    cluster_restart(&c, 0);
    atomic_store(&c.nodes[0].full, 20);
    read_counts(remote, no, got);
    assert_true(got[0] == 0);
    assert_int_equal(atomic_load(&c.nodes[0].full), 0);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static cluster *away;
static uint64_t begins, stands; /* when a recovery does, for good */

/* It takes ten minutes. */
static void recover_slowly(uint64_t waits)
{
    node *n = &away->nodes[0];
    const uint64_t now = atomic_load(&simulated.now);
    const int ends = now - begins >= 10 * MINUTE;
    (void)waits;
    service_recovers(n->service, !ends, now < stands ? now : stands);
    atomic_store(&n->recovers, !ends);
}

static void a_server_that_recovers_is_waited_for(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 1, 4 * MINUTE, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    begins = persia_clock_ns();
    away = &c;
    stands = UINT64_MAX;
    simulated.at_wait = recover_slowly;
    recover_slowly(0);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_true(persia_clock_ns() - begins >= 10 * MINUTE);
    simulated.at_wait = NULL;
    read_counts(remote, no, got);
    for (int i = 0; i < IDS; i++)
        assert_int_equal((int)got[i], 1);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* Its folder hangs, say. */
static void a_recovery_without_progress_is_not_waited_for(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 1, MINUTE, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    begins = persia_clock_ns();
    away = &c;
    stands = begins + MINUTE / 2;
    simulated.at_wait = recover_slowly;
    recover_slowly(0);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_EUNAVAILABLE);
    assert_true(persia_clock_ns() - begins < 5 * MINUTE);
    simulated.at_wait = NULL;
    atomic_store(&c.nodes[0].recovers, 0);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void return_after_many_waits(uint64_t waits)
{
    if (waits == 200)
        atomic_store(&away->nodes[0].down, 0);
}

static void a_server_that_returns_is_tried_again(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 1, 4 * MINUTE, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    away = &c;
    atomic_store(&c.nodes[0].down, 1);
    atomic_store(&simulated.waits, 0);
    simulated.at_wait = return_after_many_waits;
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_true(simulated.waits >= 200);
    read_counts(remote, no, got);
    for (size_t i = 0; i < IDS; i++)
        assert_true(got[i] == 1);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* A flush of a trainer of embedding workers asks servers at any time. */
static void a_look_waits_for_a_server(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, 4 * MINUTE, LOST_RAISE);
    away = &c;
    atomic_store(&c.nodes[0].down, 1);
    atomic_store(&simulated.waits, 0);
    simulated.at_wait = return_after_many_waits;
    assert_int_equal(persia_client_look(remote), PERSIA_OK);
    assert_true(simulated.waits >= 200);
    begins = persia_clock_ns();
    stands = UINT64_MAX;
    simulated.at_wait = recover_slowly;
    recover_slowly(0);
    assert_int_equal(persia_client_look(remote), PERSIA_OK);
    assert_true(persia_clock_ns() - begins >= 10 * MINUTE);
    simulated.at_wait = NULL;
    atomic_store(&c.nodes[1].down, 1);
    begins = persia_clock_ns();
    assert_int_equal(persia_client_look(remote), PERSIA_EUNAVAILABLE);
    assert_true(persia_clock_ns() - begins >= 3 * MINUTE);
    atomic_store(&c.nodes[1].down, 0);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* The server's timer ends a pull that waits for an update that never
 * arrives. */
static void a_parked_pull_ends_at_its_deadline(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 1, 2 * MINUTE, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    const uint64_t begin = persia_clock_ns(), id = 1;
    float out[DIM];
    pull_job pull = {.n = 1, .ids = &id, .out = out, .stride = DIM};
    assert_int_equal(persia_client_pull(remote, 7, &no, &pull, 1),
                     PERSIA_EUNAVAILABLE);
    assert_true(persia_clock_ns() - begin >= MINUTE);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void threads_and_random_numbers_are_those_of_the_system(void **state)
{
    (void)state;
    uint64_t boot[2];
    for (int i = 0; i < 2; i++) {
        simulated.next = 0;
        tables *p;
        ps_service *s;
        const service_config config = {.shards = 1, .message_limit = 1 << 20};
        assert_int_equal(
            persia_tables_create(&(tables_config){.threads = 1}, &p),
            PERSIA_OK);
        assert_int_equal(persia_service_create(p, &config, &s), PERSIA_OK);
        boot[i] = simulated.next;
        assert_int_equal(persia_service_destroy(s), 0);
        persia_tables_destroy(p);
    }
    assert_true(boot[0] > 0);
    assert_int_equal(boot[0], boot[1]);
    assert_true(simulated.threads > 0);
    assert_int_equal(simulated.threads, simulated.joined);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_server_that_stays_away_costs_no_time,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(
            a_server_that_refuses_a_greeting_is_asked_again, setup, teardown),
        cmocka_unit_test_setup_teardown(a_server_that_recovers_is_waited_for,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(
            a_recovery_without_progress_is_not_waited_for, setup, teardown),
        cmocka_unit_test_setup_teardown(a_server_that_returns_is_tried_again,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(a_look_waits_for_a_server, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(a_parked_pull_ends_at_its_deadline,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(
            threads_and_random_numbers_are_those_of_the_system, setup,
            teardown),
    };
    return cmocka_run_group_tests_name("client: a system of its own", tests,
                                       NULL, NULL);
}
