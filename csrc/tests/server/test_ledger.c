/* Ledgers: exactly once, whatever order, whatever is sent again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "shard/ledger.h"
#include "tests/server/help.h"

static ledger *make(uint32_t streams)
{
    ledger *l;
    assert_int_equal(ledger_create(streams, &l), PERSIA_OK);
    return l;
}

static wire_ledger entry(ledger *l, uint64_t stream)
{
    wire_ledger e;
    int taken;
    assert_int_equal(ledger_open(l, stream, 0, &taken, &e), PERSIA_OK);
    assert_false(taken);
    assert_int_equal(e.stream, stream);
    return e;
}

static int in_window(const wire_ledger *e, uint64_t number)
{
    uint64_t bit = number - e->watermark - 1;
    return number > e->watermark && bit < LEDGER_WINDOW &&
           (e->window[bit / 64] >> (bit % 64) & 1);
}

static enum ledger_state begin(ledger *l, uint64_t stream, uint64_t number)
{
    ledger_key key = {stream, number, 0, 0};
    enum ledger_state state;
    assert_int_equal(ledger_begin(l, &key, NULL, &state), PERSIA_OK);
    return state;
}

/* Applies an update, or says why not. */
static enum ledger_state apply(ledger *l, const ledger_key *key)
{
    enum ledger_state state;
    assert_int_equal(ledger_begin(l, key, NULL, &state), PERSIA_OK);
    if (state != LEDGER_NEW)
        return state;
    assert_int_equal(ledger_check(l, key), LEDGER_NEW);
    ledger_commit(l, key);
    assert_null(ledger_end(l, key));
    return state;
}

static void numbers_in_order(void **state)
{
    (void)state;
    ledger *l = make(4);
    (void)entry(l, 7);
    for (uint64_t i = 1; i <= 3 * LEDGER_WINDOW; i++) {
        assert_int_equal(apply(l, &(ledger_key){7, i, 0, 0}), LEDGER_NEW);
        assert_int_equal(apply(l, &(ledger_key){7, i, 0, 0}), LEDGER_DONE);
    }
    wire_ledger e = entry(l, 7);
    assert_int_equal(e.watermark, 3 * LEDGER_WINDOW);
    for (int i = 0; i < WIRE_WINDOW_WORDS; i++)
        assert_int_equal(e.window[i], 0);
    assert_int_equal(begin(l, 7, 0), LEDGER_DONE);
    ledger_destroy(l);
}

static void the_window_has_an_edge(void **state)
{
    (void)state;
    ledger *l = make(4);
    (void)entry(l, 7);
    assert_int_equal(apply(l, &(ledger_key){7, LEDGER_WINDOW + 1, 0, 0}),
                     LEDGER_BEYOND);
    assert_int_equal(apply(l, &(ledger_key){7, LEDGER_WINDOW, 0, 0}),
                     LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){7, LEDGER_WINDOW, 0, 0}),
                     LEDGER_DONE);
    assert_int_equal(apply(l, &(ledger_key){7, UINT64_MAX, 0, 0}),
                     LEDGER_BEYOND);
    assert_int_equal(apply(l, &(ledger_key){7, 1, 0, 0}), LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){7, LEDGER_WINDOW + 1, 0, 0}),
                     LEDGER_NEW);
    wire_ledger e = entry(l, 7);
    assert_int_equal(e.watermark, 1);
    assert_true(in_window(&e, LEDGER_WINDOW));
    assert_true(in_window(&e, LEDGER_WINDOW + 1));
    assert_false(in_window(&e, 2));
    for (uint64_t i = 2; i < LEDGER_WINDOW; i++)
        assert_int_equal(apply(l, &(ledger_key){7, i, 0, 0}), LEDGER_NEW);
    assert_int_equal(entry(l, 7).watermark, LEDGER_WINDOW + 1);
    ledger_destroy(l);
}

static void settled_numbers_leave_no_gap(void **state)
{
    (void)state;
    ledger *l = make(4);
    (void)entry(l, 7);
    assert_int_equal(apply(l, &(ledger_key){7, 5, 0, 0}), LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){7, 6, 3, 0}), LEDGER_NEW);
    wire_ledger e = entry(l, 7);
    assert_int_equal(e.watermark, 3);
    assert_int_equal(e.skipped, 3);
    assert_true(in_window(&e, 5) && in_window(&e, 6));
    assert_int_equal(apply(l, &(ledger_key){7, 2, 0, 0}), LEDGER_DONE);
    assert_int_equal(apply(l, &(ledger_key){7, 7, 4, 0}), LEDGER_NEW);
    assert_int_equal(entry(l, 7).watermark, 7);
    assert_int_equal(entry(l, 7).skipped, 4);
    assert_int_equal(apply(l, &(ledger_key){7, 9, 0, 0}), LEDGER_NEW);
    /* far beyond the window, as after a server that lost its updates */
    ledger_key far = {7, 1000001, 1000000, 0};
    assert_int_equal(apply(l, &(ledger_key){7, 1000001, 0, 0}), LEDGER_BEYOND);
    assert_int_equal(apply(l, &(ledger_key){7, 1000001, 900000, 0}),
                     LEDGER_BEYOND);
    assert_int_equal(apply(l, &far), LEDGER_NEW);
    assert_int_equal(entry(l, 7).watermark, 1000001);
    /* but 5, 6, 7, 9 and itself */
    assert_int_equal(entry(l, 7).skipped, 1000001 - 5);
    /* settled while it is under way, and applied after all */
    ledger_key late = {7, 1000002, 1000001, 0};
    enum ledger_state s;
    assert_int_equal(ledger_begin(l, &late, NULL, &s), PERSIA_OK);
    assert_int_equal(apply(l, &(ledger_key){7, 1000003, 1000002, 0}),
                     LEDGER_NEW);
    assert_int_equal(entry(l, 7).skipped, 1000001 - 4);
    ledger_commit(l, &late);
    assert_null(ledger_end(l, &late));
    assert_int_equal(entry(l, 7).watermark, 1000003);
    assert_int_equal(entry(l, 7).skipped, 1000001 - 5);
    /* a number that is not applied does not settle anything */
    ledger_key not_applied = {7, 1000100, 1000099, 0};
    assert_int_equal(ledger_begin(l, &not_applied, NULL, &s), PERSIA_OK);
    assert_null(ledger_end(l, &not_applied));
    assert_int_equal(entry(l, 7).watermark, 1000003);
    ledger_destroy(l);
}

/* Against a set of numbers, in random order with gaps and copies. */
static void random_numbers_against_a_set(void **state)
{
    enum { N = 20000, STREAMS = 3 };
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        rng r = {seed};
        ledger *l = make(STREAMS);
        uint8_t *applied = calloc(STREAMS * (size_t)N, 1);
        uint64_t low[STREAMS] = {0}; /* the model's watermark */
        for (uint64_t s = 0; s < STREAMS; s++)
            (void)entry(l, s + 1);
        for (int i = 0; i < 60000; i++) {
            uint64_t s = rng_below(&r, STREAMS);
            uint8_t *mine = applied + s * N;
            uint64_t reach = rng_below(&r, 8) ? 20 : 2 * LEDGER_WINDOW;
            uint64_t number = low[s] + rng_below(&r, reach);
            if (number >= N)
                continue;
            if (rng_below(&r, 4) == 0) /* close the first gap */
                number = low[s] + 1;
            if (number >= N)
                continue;
            ledger_key key = {s + 1, number, 0, 0};
            enum ledger_state want = number <= low[s] || mine[number]
                                         ? LEDGER_DONE
                                     : number - low[s] > LEDGER_WINDOW
                                         ? LEDGER_BEYOND
                                         : LEDGER_NEW;
            assert_int_equal(apply(l, &key), want);
            if (want == LEDGER_NEW)
                mine[number] = 1;
            while (low[s] + 1 < N && mine[low[s] + 1])
                low[s]++;
        }
        /* what a snapshot takes, and a restore gives back */
        wire_ledger *all;
        size_t n;
        assert_int_equal(ledger_copy(l, &all, &n), PERSIA_OK);
        ledger *second = make(STREAMS);
        assert_int_equal(ledger_fill(second, all, n), PERSIA_OK);
        for (uint64_t s = 0; s < STREAMS; s++) {
            wire_ledger a = entry(l, s + 1), b = entry(second, s + 1);
            assert_int_equal(a.watermark, low[s]);
            assert_memory_equal(&a, &b, sizeof a);
            for (uint64_t i = low[s] + 1; i < N; i++)
                assert_int_equal(in_window(&a, i), applied[s * N + i]);
        }
        free(all);
        ledger_destroy(second);
        free(applied);
        ledger_destroy(l);
    }
}

static enum ledger_state apply_of(ledger *l, uint64_t client, uint64_t number)
{
    return apply(l, &(ledger_key){7, number, 0, client});
}

static int open_of(ledger *l, uint64_t client, wire_ledger *e)
{
    int taken;
    int rc = ledger_open(l, 7, client, &taken, e);
    return rc ? -rc : taken;
}

/* Updates of a process that was killed do not take the numbers of the next
 * one; who only looks displaces nobody. */
static void a_stream_has_one_owner(void **state)
{
    (void)state;
    enum { OLD = 1, NEXT, THIRD, LOOKS };
    ledger *l = make(4);
    ledger_key late = {7, 2, 0, OLD};
    enum ledger_state s;
    wire_ledger e;
    assert_int_equal(apply_of(l, OLD, 1), LEDGER_UNKNOWN);
    assert_int_equal(open_of(l, OLD, &e), 0);
    assert_int_equal(apply_of(l, OLD, 1), LEDGER_NEW);
    /* one is under way: it counts for the next owner, and is applied */
    assert_int_equal(ledger_begin(l, &late, NULL, &s), PERSIA_OK);
    assert_int_equal(open_of(l, OLD, &e), 0);
    assert_false(in_window(&e, 2));
    assert_int_equal(open_of(l, NEXT, &e), 1);
    assert_int_equal(e.watermark, 1);
    assert_true(in_window(&e, 2));
    assert_int_equal(ledger_check(l, &late), LEDGER_NEW);
    ledger_commit(l, &late);
    assert_null(ledger_end(l, &late));
    /* the others come too late */
    assert_int_equal(apply_of(l, OLD, 2), LEDGER_DONE);
    assert_int_equal(apply_of(l, OLD, 3), LEDGER_TAKEN);
    assert_int_equal(apply_of(l, OLD, 2 * LEDGER_WINDOW), LEDGER_TAKEN);
    assert_int_equal(apply_of(l, NEXT, 3), LEDGER_NEW);
    assert_int_equal(open_of(l, OLD, &e), -PERSIA_ECLOSED);
    assert_int_equal(open_of(l, NEXT, &e), 0);
    assert_int_equal(open_of(l, LOOKS, &e), 1);
    assert_int_equal(apply_of(l, NEXT, 4), LEDGER_TAKEN);
    assert_int_equal(open_of(l, NEXT, &e), 1);
    assert_int_equal(apply_of(l, NEXT, 4), LEDGER_NEW);
    assert_int_equal(open_of(l, LOOKS, &e), -PERSIA_ECLOSED);
    assert_int_equal(open_of(l, THIRD, &e), 1);
    assert_int_equal(e.watermark, 4);
    assert_int_equal(apply_of(l, THIRD, 5), LEDGER_NEW);
    assert_int_equal(apply_of(l, NEXT, 6), LEDGER_TAKEN);
    ledger_destroy(l);
}

typedef struct copy {
    ledger_waiter waiter;
    int no;
} copy;

static void copies_wait_for_the_first(void **state)
{
    (void)state;
    ledger *l = make(4);
    ledger_key key = {7, 1, 0, 0};
    copy a = {.no = 1}, b = {.no = 2};
    enum ledger_state s;
    (void)entry(l, 7);
    assert_int_equal(begin(l, 7, 1), LEDGER_NEW);
    assert_int_equal(ledger_begin(l, &key, &a.waiter, &s), PERSIA_OK);
    assert_int_equal(s, LEDGER_BUSY);
    assert_int_equal(ledger_look(l, &key, &b.waiter), LEDGER_BUSY);
    assert_int_equal(ledger_check(l, &key), LEDGER_NEW);
    ledger_commit(l, &key);
    /* applied, but not answered: only its answer says whether it failed */
    assert_int_equal(ledger_look(l, &key, NULL), LEDGER_BUSY);
    copy *first = (copy *)ledger_end(l, &key);
    assert_int_equal(ledger_look(l, &key, NULL), LEDGER_DONE);
    assert_ptr_equal(first, &a);
    assert_ptr_equal(first->waiter.next, &b.waiter);
    assert_null(b.waiter.next);
    /* one that failed may come again */
    assert_int_equal(begin(l, 7, 2), LEDGER_NEW);
    assert_null(ledger_end(l, &(ledger_key){7, 2, 0, 0}));
    assert_int_equal(begin(l, 7, 2), LEDGER_NEW);
    assert_null(ledger_end(l, &(ledger_key){7, 2, 0, 0}));
    ledger_destroy(l);
}

static void streams_expire_the_oldest_first(void **state)
{
    (void)state;
    ledger *l = make(3);
    assert_int_equal(begin(l, 1, 1), LEDGER_UNKNOWN);
    for (uint64_t s = 1; s <= 3; s++) {
        (void)entry(l, s);
        assert_int_equal(apply(l, &(ledger_key){s, 1, 0, 0}), LEDGER_NEW);
    }
    assert_int_equal(apply(l, &(ledger_key){1, 1, 0, 0}), LEDGER_DONE);
    (void)entry(l, 4);
    assert_int_equal(begin(l, 2, 2), LEDGER_UNKNOWN);
    assert_int_equal(apply(l, &(ledger_key){1, 1, 0, 0}), LEDGER_DONE);
    /* one with an update under way stays, though it is the oldest */
    assert_int_equal(begin(l, 3, 2), LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){1, 2, 0, 0}), LEDGER_NEW);
    (void)entry(l, 4);
    (void)entry(l, 5);
    ledger_commit(l, &(ledger_key){3, 2, 0, 0});
    assert_null(ledger_end(l, &(ledger_key){3, 2, 0, 0}));
    assert_int_equal(entry(l, 3).watermark, 2);
    assert_int_equal(begin(l, 1, 3), LEDGER_UNKNOWN);
    assert_int_equal(begin(l, 4, 1), LEDGER_NEW);
    assert_int_equal(begin(l, 5, 1), LEDGER_NEW);
    assert_int_equal(begin(l, 3, 3), LEDGER_NEW);
    wire_ledger e;
    int taken;
    assert_int_equal(ledger_open(l, 6, 0, &taken, &e), PERSIA_ELIMIT);
    ledger_destroy(l);
}

static void many_streams(void **state)
{
    enum { N = 5000 };
    (void)state;
    ledger *l = make(N);
    for (uint64_t s = 1; s <= N; s++) {
        (void)entry(l, s * 0x1000000000);
        for (uint64_t i = 1; i <= s % 5; i++)
            (void)apply(l, &(ledger_key){s * 0x1000000000, i, 0, 0});
    }
    wire_ledger *all;
    size_t n;
    assert_int_equal(ledger_copy(l, &all, &n), PERSIA_OK);
    assert_int_equal(n, N - N / 5); /* those that applied something */
    for (uint64_t s = 1; s <= N; s++)
        assert_int_equal(entry(l, s * 0x1000000000).watermark, s % 5);
    ledger *second = make(N), *third = make(N);
    all[1].stream = all[0].stream;
    assert_int_equal(ledger_fill(second, all, n), PERSIA_EARG);
    assert_int_equal(ledger_fill(third, all, 1), PERSIA_OK);
    _Atomic(uint64_t) lineage = 1;
    ledger_exchange(l, third, &lineage, 2);
    assert_int_equal(lineage, 2);
    assert_int_equal(entry(l, all[0].stream).watermark, all[0].watermark);
    assert_int_equal(begin(l, all[2].stream, 1), LEDGER_UNKNOWN);
    assert_int_equal(begin(third, all[2].stream, 1), LEDGER_DONE);
    ledger_destroy(second);
    ledger_destroy(third);
    free(all);
    ledger_destroy(l);
}

/* Threads send the same numbers: each is applied once. */
enum { RACERS = 4, RACE = 6000 };
typedef struct race {
    ledger *l;
    atomic_int applied[RACE + 1];
    atomic_int seed;
} race;

static void *run_race(void *arg)
{
    race *r = arg;
    rng g = {(uint64_t)atomic_fetch_add(&r->seed, 1) * 1000000};
    for (uint64_t i = 1; i <= RACE;) {
        ledger_key key = {1, i, 0, 0};
        enum ledger_state state;
        if (ledger_begin(r->l, &key, NULL, &state))
            return arg;
        if (state == LEDGER_NEW) {
            if (ledger_check(r->l, &key) != LEDGER_NEW)
                return arg;
            if (rng_below(&g, 4)) {
                ledger_commit(r->l, &key);
                atomic_fetch_add(&r->applied[i], 1);
            }
            (void)ledger_end(r->l, &key);
        } else if (state == LEDGER_DONE) {
            i++;
        } else if (state != LEDGER_BUSY) {
            return arg;
        }
    }
    return NULL;
}

static void threads_apply_each_once(void **state)
{
    (void)state;
    race *r = calloc(1, sizeof *r);
    pthread_t threads[RACERS];
    r->l = make(2);
    (void)entry(r->l, 1);
    for (int i = 0; i < RACERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_race, r), 0);
    for (int i = 0; i < RACERS; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    for (int i = 1; i <= RACE; i++)
        assert_int_equal(atomic_load(&r->applied[i]), 1);
    assert_int_equal(entry(r->l, 1).watermark, RACE);
    ledger_destroy(r->l);
    free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_in_order),
        cmocka_unit_test(the_window_has_an_edge),
        cmocka_unit_test(settled_numbers_leave_no_gap),
        cmocka_unit_test(random_numbers_against_a_set),
        cmocka_unit_test(a_stream_has_one_owner),
        cmocka_unit_test(copies_wait_for_the_first),
        cmocka_unit_test(streams_expire_the_oldest_first),
        cmocka_unit_test(many_streams),
        cmocka_unit_test(threads_apply_each_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
