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

#include "ids/ids.h"
#include "shard/ledger.h"
#include "tests/ids/chosen.h"
#include "tests/server/help.h"

#define ME {1, 1}

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
    assert_int_equal(
        ledger_open(l, stream, (ledger_owner)ME, &taken, &e), PERSIA_OK);
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

static ledger_flight flights[64]; /* of updates that stay in flight */
static size_t flights_n;

static enum ledger_state begin_key(ledger *l, const ledger_key *key)
{
    if (flights_n == sizeof flights / sizeof *flights)
        fail_msg("too many updates under way");
    enum ledger_state state = ledger_begin(l, key, &flights[flights_n], NULL);
    flights_n += state == LEDGER_NEW;
    return state;
}

static enum ledger_state begin_as(ledger *l, uint64_t stream, uint64_t number,
                                  uint64_t incarnation)
{
    ledger_key key = {stream, number, 0, {incarnation, 1}, 0};
    return begin_key(l, &key);
}

static enum ledger_state begin(ledger *l, uint64_t stream, uint64_t number)
{
    return begin_as(l, stream, number, 1);
}

/* Applies an update, or says why not. */
static enum ledger_state apply(ledger *l, const ledger_key *key)
{
    ledger_flight flight;
    enum ledger_state state = ledger_begin(l, key, &flight, NULL);
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
        assert_int_equal(apply(l, &(ledger_key){7, i, 0, ME, 0}), LEDGER_NEW);
        assert_int_equal(apply(l, &(ledger_key){7, i, 0, ME, 0}), LEDGER_DONE);
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
    assert_int_equal(apply(l, &(ledger_key){7, LEDGER_WINDOW + 1, 0, ME, 0}),
                     LEDGER_BEYOND);
    assert_int_equal(apply(l, &(ledger_key){7, LEDGER_WINDOW, 0, ME, 0}),
                     LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){7, LEDGER_WINDOW, 0, ME, 0}),
                     LEDGER_DONE);
    assert_int_equal(apply(l, &(ledger_key){7, UINT64_MAX, 0, ME, 0}),
                     LEDGER_BEYOND);
    assert_int_equal(apply(l, &(ledger_key){7, 1, 0, ME, 0}), LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){7, LEDGER_WINDOW + 1, 0, ME, 0}),
                     LEDGER_NEW);
    wire_ledger e = entry(l, 7);
    assert_int_equal(e.watermark, 1);
    assert_true(in_window(&e, LEDGER_WINDOW));
    assert_true(in_window(&e, LEDGER_WINDOW + 1));
    assert_false(in_window(&e, 2));
    for (uint64_t i = 2; i < LEDGER_WINDOW; i++)
        assert_int_equal(apply(l, &(ledger_key){7, i, 0, ME, 0}), LEDGER_NEW);
    assert_int_equal(entry(l, 7).watermark, LEDGER_WINDOW + 1);
    ledger_destroy(l);
}

static void settled_numbers_leave_no_gap(void **state)
{
    (void)state;
    ledger *l = make(4);
    (void)entry(l, 7);
    assert_int_equal(apply(l, &(ledger_key){7, 5, 0, ME, 0}), LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){7, 6, 3, ME, 0}), LEDGER_NEW);
    wire_ledger e = entry(l, 7);
    assert_int_equal(e.watermark, 3);
    assert_int_equal(e.skipped, 3);
    assert_true(in_window(&e, 5) && in_window(&e, 6));
    assert_int_equal(apply(l, &(ledger_key){7, 2, 0, ME, 0}), LEDGER_DONE);
    assert_int_equal(apply(l, &(ledger_key){7, 7, 4, ME, 0}), LEDGER_NEW);
    assert_int_equal(entry(l, 7).watermark, 7);
    assert_int_equal(entry(l, 7).skipped, 4);
    assert_int_equal(apply(l, &(ledger_key){7, 9, 0, ME, 0}), LEDGER_NEW);
    /* far beyond the window, as after a server that lost its updates */
    ledger_key far = {7, 1000001, 1000000, ME, 0};
    assert_int_equal(apply(l, &(ledger_key){7, 1000001, 0, ME, 0}),
                     LEDGER_BEYOND);
    assert_int_equal(apply(l, &(ledger_key){7, 1000001, 900000, ME, 0}),
                     LEDGER_BEYOND);
    assert_int_equal(apply(l, &far), LEDGER_NEW);
    assert_int_equal(entry(l, 7).watermark, 1000001);
    /* but 5, 6, 7, 9 and itself */
    assert_int_equal(entry(l, 7).skipped, 1000001 - 5);
    /* settled while it is in flight, and applied after all */
    ledger_key late = {7, 1000002, 1000001, ME, 0};
    assert_int_equal(begin_key(l, &late), LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){7, 1000003, 1000002, ME, 0}),
                     LEDGER_NEW);
    assert_int_equal(entry(l, 7).skipped, 1000001 - 4);
    ledger_commit(l, &late);
    assert_null(ledger_end(l, &late));
    assert_int_equal(entry(l, 7).watermark, 1000003);
    assert_int_equal(entry(l, 7).skipped, 1000001 - 5);
    /* a number that is not applied does not settle anything */
    ledger_key not_applied = {7, 1000100, 1000099, ME, 0};
    assert_int_equal(begin_key(l, &not_applied), LEDGER_NEW);
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
            ledger_key key = {s + 1, number, 0, ME, 0};
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
        wire_ledger *all = NULL;
        size_t room = 0, n;
        assert_int_equal(ledger_copy(l, &all, &room, &n), PERSIA_OK);
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

/* Owners of stream 7, in their order. */
enum { OLD, NEXT, THIRD, OWNERS };
static const ledger_owner owners[OWNERS] = {{1, 99}, {2, 5}, {2, 6}};

static enum ledger_state apply_of(ledger *l, int who, uint64_t number)
{
    return apply(l, &(ledger_key){7, number, 0, owners[who], 0});
}

/* Whether another owner had it; or the error, below 0. */
static int open_of(ledger *l, int who, wire_ledger *e)
{
    int taken;
    int rc = ledger_open(l, 7, owners[who], &taken, e);
    return rc ? -rc : taken;
}

/* Updates of a process that was killed do not take the numbers of the next
 * one. */
static void a_stream_has_one_owner(void **state)
{
    (void)state;
    ledger *l = make(4);
    ledger_key late = {7, 2, 0, owners[OLD], 0};
    wire_ledger e;
    assert_int_equal(apply_of(l, OLD, 1), LEDGER_UNKNOWN);
    assert_int_equal(open_of(l, OLD, &e), 0);
    assert_int_equal(apply_of(l, OLD, 1), LEDGER_NEW);
    /* one is in flight: it counts for the next owner, and is applied */
    assert_int_equal(begin_key(l, &late), LEDGER_NEW);
    assert_int_equal(open_of(l, OLD, &e), 0);
    assert_false(in_window(&e, 2));
    assert_int_equal(open_of(l, NEXT, &e), 1);
    assert_int_equal(e.watermark, 1);
    assert_true(in_window(&e, 2));
    assert_int_equal(ledger_check(l, &late), LEDGER_NEW);
    ledger_commit(l, &late);
    assert_null(ledger_end(l, &late));
    assert_int_equal(apply_of(l, NEXT, 2), LEDGER_DONE);
    assert_int_equal(apply_of(l, NEXT, 3), LEDGER_NEW);
    /* an older owner learns nothing, whatever the number */
    assert_int_equal(apply_of(l, OLD, 1), LEDGER_TAKEN);
    assert_int_equal(apply_of(l, OLD, 3), LEDGER_TAKEN);
    assert_int_equal(apply_of(l, OLD, 4), LEDGER_TAKEN);
    assert_int_equal(apply_of(l, OLD, 2 * LEDGER_WINDOW), LEDGER_TAKEN);
    assert_int_equal(open_of(l, OLD, &e), -PERSIA_ECLOSED);
    ledger_destroy(l);
}

/* Of two that opened at once the greater client wins; one of two generations
 * ago does not return, and one that only looks takes nothing. */
static void a_zombie_never_takes_a_stream_back(void **state)
{
    (void)state;
    ledger *l = make(4);
    wire_ledger e;
    assert_int_equal(open_of(l, OLD, &e), 0);
    assert_int_equal(apply_of(l, OLD, 1), LEDGER_NEW);
    assert_int_equal(open_of(l, NEXT, &e), 1);
    assert_int_equal(apply_of(l, NEXT, 2), LEDGER_NEW);
    assert_int_equal(apply_of(l, THIRD, 3), LEDGER_UNKNOWN);
    assert_int_equal(open_of(l, THIRD, &e), 1);
    for (int who = OLD; who < THIRD; who++) {
        assert_int_equal(open_of(l, who, &e), -PERSIA_ECLOSED);
        assert_int_equal(apply_of(l, who, 3), LEDGER_TAKEN);
        assert_true(ledger_is_older(l, 7, owners[who]));
    }
    assert_false(ledger_is_older(l, 7, owners[THIRD]));
    ledger_read(l, 7, &e);
    assert_int_equal(e.incarnation, 2);
    assert_int_equal(e.watermark, 2);
    assert_int_equal(open_of(l, THIRD, &e), 0);
    assert_int_equal(apply_of(l, THIRD, 3), LEDGER_NEW);
    ledger_destroy(l);
}

/* Restored rows have older owners, or without the stream at all. */
static void owners_outlive_a_restore(void **state)
{
    (void)state;
    ledger *l = make(4), *restored = make(4);
    wire_ledger old = {.stream = 7, .watermark = 1, .incarnation = 1}, e;
    _Atomic(uint64_t) lineage;
    atomic_init(&lineage, 1);
    assert_int_equal(open_of(l, NEXT, &e), 0);
    (void)entry(l, 8);
    assert_int_equal(apply_of(l, NEXT, 1), LEDGER_NEW);
    assert_int_equal(apply_of(l, NEXT, 2), LEDGER_NEW);
    assert_int_equal(ledger_fill(restored, &old, 1), PERSIA_OK);
    ledger_exchange(l, restored, &lineage, 2);
    ledger_destroy(restored);
    assert_int_equal(open_of(l, OLD, &e), -PERSIA_ECLOSED);
    assert_int_equal(apply_of(l, OLD, 2), LEDGER_TAKEN);
    assert_int_equal(open_of(l, NEXT, &e), 0);
    assert_int_equal(e.watermark, 1);
    assert_int_equal(apply_of(l, NEXT, 2), LEDGER_NEW);
    assert_int_equal(begin(l, 8, 1), LEDGER_NEW);
    /* a server that was started again has the incarnation of its snapshot */
    restored = make(4);
    old.incarnation = 2;
    assert_int_equal(ledger_fill(restored, &old, 1), PERSIA_OK);
    assert_int_equal(open_of(restored, OLD, &e), -PERSIA_ECLOSED);
    assert_int_equal(apply_of(restored, NEXT, 2), LEDGER_UNKNOWN);
    assert_int_equal(open_of(restored, NEXT, &e), 0);
    assert_int_equal(apply_of(restored, NEXT, 2), LEDGER_NEW);
    ledger_destroy(restored);
    ledger_destroy(l);
}

/* Of two processes of one incarnation, which is the later one is known where
 * the shard has moved, too. */
static void owners_move_with_their_shard(void **state)
{
    (void)state;
    ledger *l = make(4), *moved = make(4);
    wire_ledger e, *all = NULL;
    size_t room = 0, n;
    assert_int_equal(open_of(l, NEXT, &e), 0);
    assert_int_equal(open_of(l, THIRD, &e), 1);
    assert_int_equal(apply_of(l, THIRD, 1), LEDGER_NEW);
    assert_int_equal(ledger_copy(l, &all, &room, &n), PERSIA_OK);
    assert_int_equal(ledger_fill(moved, all, n), PERSIA_OK);
    assert_int_equal(open_of(moved, NEXT, &e), -PERSIA_ECLOSED);
    assert_int_equal(open_of(moved, THIRD, &e), 0);
    assert_int_equal(e.watermark, 1);
    free(all);
    ledger_destroy(moved);
    ledger_destroy(l);
}

/* What was applied in a stream that expired is unknown: its owner does not
 * open it again, so that nothing is applied twice. */
static void an_expired_stream_is_not_opened_again(void **state)
{
    (void)state;
    ledger *l = make(1);
    wire_ledger e;
    int taken;
    (void)entry(l, 1);
    assert_int_equal(apply(l, &(ledger_key){1, 1, 0, ME, 0}), LEDGER_NEW);
    ledger_read(l, 2, &e);
    assert_int_equal(e.incarnation, 0);
    (void)entry(l, 2);
    assert_int_equal(begin(l, 1, 1), LEDGER_UNKNOWN);
    assert_int_equal(ledger_open(l, 1, (ledger_owner)ME, &taken, &e),
                     PERSIA_ECLOSED);
    assert_int_equal(begin(l, 1, 1), LEDGER_UNKNOWN);
    ledger_read(l, 1, &e); /* a new owner exceeds that */
    assert_int_equal(e.incarnation, 1);
    assert_int_equal(ledger_open(l, 1, owners[NEXT], &taken, &e), PERSIA_OK);
    assert_int_equal(e.watermark, 0);
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
    ledger_key key = {7, 1, 0, ME, 0};
    copy a = {.no = 1}, b = {.no = 2};
    ledger_flight flight;
    (void)entry(l, 7);
    assert_int_equal(begin(l, 7, 1), LEDGER_NEW);
    assert_int_equal(ledger_begin(l, &key, &flight, &a.waiter), LEDGER_BUSY);
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
    /* a part of another step does not wait for this one's answer */
    key = (ledger_key){7, 3, 0, ME, 5};
    assert_int_equal(ledger_begin(l, &key, &flight, NULL), LEDGER_NEW);
    assert_int_equal(ledger_look(l, &key, &a.waiter), LEDGER_BUSY);
    key.part_of = 6;
    assert_int_equal(ledger_look(l, &key, &b.waiter), LEDGER_ELSEWHERE);
    assert_int_equal(ledger_begin(l, &key, &flight, NULL), LEDGER_ELSEWHERE);
    assert_ptr_equal(ledger_end(l, &key), &a);
    assert_null(a.waiter.next);
    /* one that failed may be sent again */
    assert_int_equal(begin(l, 7, 2), LEDGER_NEW);
    assert_null(ledger_end(l, &(ledger_key){7, 2, 0, ME, 0}));
    assert_int_equal(begin(l, 7, 2), LEDGER_NEW);
    assert_null(ledger_end(l, &(ledger_key){7, 2, 0, ME, 0}));
    ledger_destroy(l);
}

/* Opens it for an owner that no server knows of yet. */
static void open_anew(ledger *l, uint64_t stream, uint64_t incarnation)
{
    wire_ledger e;
    int taken;
    const ledger_owner owner = {incarnation, 1};
    assert_int_equal(ledger_open(l, stream, owner, &taken, &e), PERSIA_OK);
}

static void streams_expire_the_oldest_first(void **state)
{
    (void)state;
    ledger *l = make(3);
    assert_int_equal(begin(l, 1, 1), LEDGER_UNKNOWN);
    for (uint64_t s = 1; s <= 3; s++) {
        (void)entry(l, s);
        assert_int_equal(apply(l, &(ledger_key){s, 1, 0, ME, 0}), LEDGER_NEW);
    }
    assert_int_equal(apply(l, &(ledger_key){1, 1, 0, ME, 0}), LEDGER_DONE);
    (void)entry(l, 4);
    assert_int_equal(begin(l, 2, 2), LEDGER_UNKNOWN);
    assert_int_equal(apply(l, &(ledger_key){1, 1, 0, ME, 0}), LEDGER_DONE);
    /* one with an update in flight stays, though it is the oldest */
    assert_int_equal(begin(l, 3, 2), LEDGER_NEW);
    assert_int_equal(apply(l, &(ledger_key){1, 2, 0, ME, 0}), LEDGER_NEW);
    (void)entry(l, 4);
    open_anew(l, 5, 2);
    ledger_commit(l, &(ledger_key){3, 2, 0, ME, 0});
    assert_null(ledger_end(l, &(ledger_key){3, 2, 0, ME, 0}));
    assert_int_equal(entry(l, 3).watermark, 2);
    assert_int_equal(begin(l, 1, 3), LEDGER_UNKNOWN);
    assert_int_equal(begin(l, 4, 1), LEDGER_NEW);
    assert_int_equal(begin_as(l, 5, 1, 2), LEDGER_NEW);
    assert_int_equal(begin(l, 3, 3), LEDGER_NEW);
    wire_ledger e;
    int taken;
    assert_int_equal(ledger_open(l, 6, owners[THIRD], &taken, &e),
                     PERSIA_ELIMIT);
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
            (void)apply(l, &(ledger_key){s * 0x1000000000, i, 0, ME, 0});
    }
    wire_ledger *all = NULL;
    size_t room = 0, n;
    assert_int_equal(ledger_room(l, &all, &room), PERSIA_OK);
    const wire_ledger *const taken = all;
    assert_int_equal(ledger_copy(l, &all, &room, &n), PERSIA_OK);
    assert_ptr_equal(all, taken); /* nothing is allocated for it */
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
    assert_int_equal(entry(l, all[2].stream).watermark, 0);
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
        ledger_key key = {1, i, 0, ME, 0};
        ledger_flight flight;
        enum ledger_state state = ledger_begin(r->l, &key, &flight, NULL);
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

/* Clients choose names of streams. */
static void names_that_were_chosen_do_not_collide(void **state)
{
    enum { N = 4096, CHAIN = 32 };
    (void)state;
    for (int kind = 0; kind < CHOSEN_KINDS; kind++) {
        ledger *l = make(N), *other = make(N);
        _Atomic(uint64_t) lineage = 1;
        for (uint32_t i = 0; i < N; i++)
            (void)entry(l, chosen_id(kind, i));
        assert_true(ledger_longest(l) < CHAIN);
        ledger_exchange(l, other, &lineage, 2);
        assert_true(ledger_longest(l) < CHAIN);
        for (uint32_t i = 0; i < N; i++) /* they have kept their owners */
            assert_true(ledger_is_older(l, chosen_id(kind, i),
                                        (ledger_owner){0, 1}));
        ledger_destroy(other);
        ledger_destroy(l);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_in_order),
        cmocka_unit_test(the_window_has_an_edge),
        cmocka_unit_test(settled_numbers_leave_no_gap),
        cmocka_unit_test(random_numbers_against_a_set),
        cmocka_unit_test(a_stream_has_one_owner),
        cmocka_unit_test(a_zombie_never_takes_a_stream_back),
        cmocka_unit_test(owners_outlive_a_restore),
        cmocka_unit_test(owners_move_with_their_shard),
        cmocka_unit_test(an_expired_stream_is_not_opened_again),
        cmocka_unit_test(copies_wait_for_the_first),
        cmocka_unit_test(streams_expire_the_oldest_first),
        cmocka_unit_test(many_streams),
        cmocka_unit_test(names_that_were_chosen_do_not_collide),
        cmocka_unit_test(threads_apply_each_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
