/* stalls: which slots of a full server are refused, and the states of each.
 * Time is the test's own. */
#include "help.h"

#include <sched.h>
#include <stdatomic.h>

#ifdef PERSIA_TESTS_GRPC
#include "rpc/stalls.h"

enum { SLOTS = 3 };

static _Atomic(uint64_t) now = 1000000000;

static uint64_t now_is(void *ctx)
{
    (void)ctx;
    return atomic_load(&now);
}

/* A timer that waits sees the time again soon. */
static int wait_a_little(void *ctx, pthread_cond_t *c, pthread_mutex_t *lock,
                         uint64_t until)
{
    (void)ctx;
    (void)c;
    (void)until;
    pthread_mutex_unlock(lock);
    sched_yield();
    pthread_mutex_lock(lock);
    return 0;
}

static _Atomic(int) refused[SLOTS];

static void refuse(void *ctx, size_t slot)
{
    (void)ctx;
    atomic_fetch_add(&refused[slot], 1);
}

static int setup(void **state)
{
    static persia_system system;
    (void)state;
    system = *persia_system_get();
    system.now = now_is;
    system.wait = wait_a_little;
    persia_system_install(&system);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    persia_system_install(NULL);
    return 0;
}

static void answer_and_free(stalls *w, size_t slot, grpc_call *call)
{
    (void)stalls_answers(w, slot, call);
    stalls_answered(w, slot);
    stalls_freed(w, slot);
}

/* One that answers unread, and one that has read, are not refused, however
 * long they take. */
static void only_what_reads_is_refused(void **state)
{
    (void)state;
    grpc_call *call = (grpc_call *)state; /* it is not looked into */
    stalls *w;
    assert_int_equal(stalls_watch(SLOTS, 0, refuse, NULL, &w), PERSIA_OK);
    assert_false(stalls_answers(w, 0, call)); /* the handler never had it */
    stalls_reads(w, 1, call);
    stalls_reads(w, 2, call);
    assert_true(stalls_came(w, 2));
    atomic_fetch_add(&now, (uint64_t)(STALLS_MS + 1) * 1000000);
    while (!atomic_load(&refused[1]))
        sched_yield();
    assert_false(stalls_came(w, 1)); /* in any order with its answer */
    stalls_answered(w, 1);
    assert_false(stalls_came(w, 1));
    stalls_freed(w, 1);
    assert_true(stalls_answers(w, 2, call));
    stalls_answered(w, 2);
    stalls_freed(w, 2);
    stalls_answered(w, 0);
    stalls_freed(w, 0);
    answer_and_free(w, 1, call); /* the slot is good for the next call */
    stalls_free(w);
    assert_int_equal(refused[0] + refused[2], 0);
    assert_int_equal(refused[1], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(only_what_reads_is_refused, setup,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
int main(void)
{
    return 0;
}
#endif
