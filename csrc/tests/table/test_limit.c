/* Tables at their memory limit: whatever runs beside a push, it is applied or
 * refused by name, and no more than the maximum is in use. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"
#include "tests/table/help.h"

enum { DIM = 2, MOST = 4096 };

static float ones[MOST * DIM];

static table_config bounded(mem_limit *limit, uint32_t stripes,
                            uint64_t capacity, uint32_t full)
{
    table_config c = config_of(DIM, OPTIM_SGD);

    c.stripes = stripes;
    c.capacity = capacity;
    c.full = full;
    c.limit = limit;
    return c;
}

/* Applied, or refused as a whole by the limit.  Whether it was applied. */
static int push_at_limit(sched *s, table *t, size_t n, const uint64_t *ids)
{
    const optim_args a = args_of(OPTIM_SGD);
    const mem_limit *limit = persia_table_get_config(t)->limit;
    push_job job;
    const uint64_t rows = stats_of(t).rows;
    const int rc = push_try(s, t, &a, n, ids, ones, 0, &job);

    assert_true(rc == PERSIA_OK || rc == PERSIA_ELIMIT);
    assert_true(!limit->maximum || limit->used <= limit->maximum);
    if (rc)
        assert_int_equal(stats_of(t).rows, rows);
    return !rc;
}

/* Nothing is announced when nothing is in flight. */
static void check_quiet(const mem_limit *limit)
{
    assert_true(limit->promised == limit->used);
}

/* The next ids behind *from that lie in one stripe of 8, and in one eighth of
 * its index; ANY: wherever they lie. */
enum { ANY = 8, KEY = 0x12345 };
static void ids_of(uint64_t *from, uint32_t stripe, uint32_t eighth, size_t n,
                   uint64_t *ids)
{
    for (size_t i = 0; i < n; ++*from)
        if ((stripe == ANY || hash_stripe(id_hash(*from), 7) == stripe) &&
            (eighth == ANY || id_place(*from, KEY) >> 61 == eighth))
            ids[i++] = *from;
}

/* Ids take the places of others, in other pages of the index, which widen. */
static void test_eviction_widens_pages(void **state)
{
    enum { CAPACITY = 40000, TURNS = 20 };
    static uint64_t ids[MOST], known[MOST];
    const uint64_t slack[] = { 0, 1, 500, 5000, 30000, 3000000 };
    (void)state;
    for (size_t k = 0; k < sizeof slack / sizeof *slack; k++) {
        sched *s = pool_of(2);
        mem_limit limit;
        uint64_t from = 0;
        int applied = 0;
        persia_mem_limit_init(&limit, 0);
        table_config c = bounded(&limit, 1, CAPACITY, FULL_EVICT_LRU);
        c.hash_key = KEY;
        table *t = table_of(&c);
        while (from < 2 * CAPACITY) {
            ids_of(&from, ANY, ANY, MOST, known);
            (void)push_at_limit(s, t, MOST, known);
        }
        limit.maximum = limit.used + slack[k];
        for (int i = 0; i < TURNS; i++) {
            ids_of(&from, ANY, 3, MOST, ids);
            applied += push_at_limit(s, t, MOST, ids);
        }
        assert_true(slack[k] > 30000 ? applied == TURNS : applied < TURNS);
        assert_int_equal(persia_table_set(t, MOST, ids, ones, NULL),
                         applied == TURNS ? PERSIA_OK : PERSIA_ELIMIT);
        if (!applied) /* rows that are there learn on */
            assert_true(push_at_limit(s, t, MOST, known));
        check_quiet(&limit);
        persia_table_destroy(t);
        assert_true(limit.used == 0 && limit.promised == 0);
        persia_sched_destroy(s);
    }
}

/* Rows expire in one stripe, and then some are made in another one. */
static void test_expiry_makes_no_room_elsewhere(void **state)
{
    enum { STRIPES = 8, ROWS = 2000, CAPACITY = STRIPES * ROWS, LIFE = 10 };
    static uint64_t old[STRIPES][ROWS], new[2][ROWS], both[2 * ROWS];
    (void)state;
    for (uint64_t slack = 0; slack < 200000; slack = 3 * slack + 4096) {
        sched *s = pool_of(1); /* stripe by stripe */
        mem_limit limit;
        uint64_t from = 0;
        persia_mem_limit_init(&limit, 0);
        table_config c = bounded(&limit, STRIPES, CAPACITY, FULL_EVICT_TTL);
        c.evict_updates = LIFE;
        c.hash_key = KEY;
        table *t = table_of(&c);
        for (uint32_t i = 0; i < STRIPES; i++) {
            ids_of(&from, i, ANY, ROWS, old[i]);
            assert_true(push_at_limit(s, t, ROWS, old[i]));
        }
        for (uint32_t i = 0; i < 2; i++)
            ids_of(&from, i, ANY, ROWS, new[i]);
        for (int i = 0; i < 2 * LIFE; i++) /* all others grow old */
            assert_true(push_at_limit(s, t, ROWS, old[1]));
        assert_int_equal(stats_of(t).rows, CAPACITY);
        limit.maximum = limit.used + slack;
        memcpy(both, new[0], 200 * sizeof *both);
        memcpy(both + 200, new[1], 1000 * sizeof *both);
        (void)push_at_limit(s, t, 1200, both);
        assert_true(stats_of(t).rows <= CAPACITY);
        check_quiet(&limit);
        persia_table_destroy(t);
        assert_true(limit.used == 0 && limit.promised == 0);
        persia_sched_destroy(s);
    }
}

/* ---- many at once ---- */

enum { TABLES = 4 };

typedef struct crowd {
    table *t[TABLES];
    table_config config[TABLES];
    mem_limit *limit;
    uint64_t seed;
    int steps;
    _Atomic(int) *snapshots; /* one at a time */
    int applied, refused;
} crowd;

static void ids_random(rng *r, size_t n, uint64_t *ids)
{
    uint64_t from = 2000000 + rng_below(r, 1 << 30);
    const uint64_t range = rng_below(r, 2) ? 5000 : 1000000;

    if (rng_below(r, 3) == 0) { /* in a page of the index, or in a stripe */
        const uint32_t at = (uint32_t)rng_below(r, 2);
        ids_of(&from, at ? ANY : 1, at ? 5 : ANY, n, ids);
        return;
    }
    for (size_t i = 0; i < n; i++)
        ids[i] = rng_below(r, range);
}

static void note(crowd *c, int rc)
{
    if (rc && rc != PERSIA_ELIMIT && rc != PERSIA_ECAPACITY)
        fail_msg("error %d: %s", rc, persia_err_text());
    assert_true(c->limit->used <= c->limit->maximum);
    c->applied += !rc;
    c->refused += rc != 0;
}

static void push_some(crowd *c, rng *r, sched *s)
{
    const optim_args a = args_of(OPTIM_SGD);
    static _Thread_local uint64_t ids[TABLES][MOST];
    push_part part[TABLES];
    push_job jobs[TABLES];
    size_t n = 0;

    for (size_t i = 0; i < TABLES; i++) {
        if (rng_below(r, 2))
            continue;
        const size_t m = 1 + rng_below(r, MOST);
        ids_random(r, m, ids[i]);
        part[n] = (push_part){ .n = m, .ids = ids[i], .grad = ones,
                               .stride = DIM, .bags = m };
        jobs[n] = (push_job){ .t = c->t[i], .parts = &part[n], .parts_n = 1,
                              .optim = &a, .draw = rng_next(r) };
        n++;
    }
    note(c, persia_table_push(s, jobs, n));
}

static void snapshot_some(crowd *c, rng *r, sched *s)
{
    table_cut *cut[TABLES];
    int rc, rows = 0;
    size_t n;

    if (atomic_exchange(c->snapshots, 1))
        return;
    rc = persia_table_cut_begin(c->t, TABLES, cut);
    if (rc != PERSIA_OK) {
        note(c, rc);
        atomic_store(c->snapshots, 0);
        return;
    }
    for (int i = 0; i < TABLES; i++) {
        do {
            rc = persia_table_cut_next(cut[i], 1 + rng_below(r, 3000), NULL,
                                       NULL, NULL, NULL, NULL, &n);
            rows += (int)n;
            if (rng_below(r, 4) == 0)
                push_some(c, r, s);
        } while (!rc && n && rng_below(r, 50));
        if (rc)
            note(c, rc);
        persia_table_cut_end(cut[i]);
    }
    atomic_store(c->snapshots, 0);
}

/* As a restore does: rows are read beside those in use, then exchanged. */
static void restore_some(crowd *c, rng *r)
{
    const size_t i = rng_below(r, TABLES), n = 1 + rng_below(r, MOST);
    static _Thread_local uint64_t ids[MOST];
    static uint32_t clocks[MOST];
    table *staged;
    int rc = persia_table_create(&c->config[i], &staged);

    if (rc) {
        note(c, rc);
        return;
    }
    ids_random(r, n, ids);
    rc = persia_table_restore(staged, n, ids, ones, NULL, clocks, NULL);
    note(c, rc);
    if (!rc) {
        rc = persia_table_exchange(c->t[i], staged);
        assert_true(rc == PERSIA_OK || rc == PERSIA_EUNAVAILABLE);
    }
    persia_table_destroy(staged);
}

static void *crowd_run(void *arg)
{
    crowd *c = arg;
    rng r = { c->seed };
    sched *s = pool_of(2);
    static _Thread_local uint64_t ids[MOST];
    uint64_t erased;

    for (int step = 0; step < c->steps; step++) {
        table *t = c->t[rng_below(&r, TABLES)];
        const size_t n = 1 + rng_below(&r, MOST);
        ids_random(&r, n, ids);
        switch (rng_below(&r, 20)) {
        case 0:
            snapshot_some(c, &r, s);
            break;
        case 1:
            restore_some(c, &r);
            break;
        case 2:
            if (rng_below(&r, 3) == 0)
                assert_int_equal(persia_table_clear(t), PERSIA_OK);
            break;
        case 3:
        case 4:
        case 5:
            assert_int_equal(persia_table_erase(t, n, ids, &erased),
                             PERSIA_OK);
            break;
        case 6:
        case 7:
            note(c, persia_table_set(t, n, ids, ones, NULL));
            break;
        default:
            push_some(c, &r, s);
        }
    }
    persia_sched_destroy(s);
    return NULL;
}

/* Tables of one limit, filled; then it is what they use and a little. */
static void crowd_make(crowd *c, mem_limit *limit, uint64_t slack)
{
    static uint64_t ids[MOST];
    const uint32_t stripes[TABLES] = { 1, 8, 4, 2 };
    const uint64_t capacity[TABLES] = { 30000, 20000, 0, 15000 };
    const uint32_t full[TABLES] = { FULL_EVICT_LRU, FULL_EVICT_TTL,
                                    FULL_RAISE, FULL_RAISE };
    sched *s = pool_of(2);
    rng r = { slack };
    optim_args a = args_of(OPTIM_SGD);
    push_job job;

    c->limit = limit;
    for (int i = 0; i < TABLES; i++) {
        c->config[i] = bounded(limit, stripes[i], capacity[i], full[i]);
        c->config[i].hash_key = KEY;
        c->config[i].name[0] = (char)('A' + i);
        c->config[i].evict_updates = full[i] == FULL_EVICT_TTL ? 40 : 0;
        if (i == 2) { /* its filter is copied by a cut */
            c->config[i].admit = ADMIT_SIGHTINGS;
            c->config[i].sightings = 2;
            c->config[i].sightings_kept = 10000;
        }
        c->t[i] = table_of(&c->config[i]);
        for (int k = 0; k < 20; k++) {
            ids_random(&r, MOST, ids);
            (void)push_try(s, c->t[i], &a, MOST, ids, ones, 0, &job);
        }
    }
    limit->maximum = limit->used + slack;
    persia_sched_destroy(s);
}

static void crowd_check(crowd *c)
{
    uint64_t bytes = 0;

    check_quiet(c->limit);
    for (int i = 0; i < TABLES; i++)
        bytes += stats_of(c->t[i]).bytes;
    assert_true(bytes == c->limit->used);
    for (int i = 0; i < TABLES; i++)
        persia_table_destroy(c->t[i]);
    assert_true(c->limit->used == 0 && c->limit->promised == 0);
    persia_mem_limit_free(c->limit);
}

/* Whatever happens, alone or on three threads. */
static void random_calls(unsigned threads, uint64_t seeds, int steps)
{
    const uint64_t slack[] = { 0, 4096, 20000, 100000, 1000000 };

    for (uint64_t seed = 0; seed < seeds; seed++) {
        mem_limit limit;
        _Atomic(int) snapshots = 0;
        crowd all = { 0 }, c[3];
        pthread_t thread[3];
        int applied = 0, refused = 0;
        persia_mem_limit_init(&limit, 0);
        crowd_make(&all, &limit, slack[seed % 5]);
        for (unsigned k = 0; k < threads; k++) {
            c[k] = all;
            c[k].seed = 1000 * seed + k;
            c[k].steps = steps;
            c[k].snapshots = &snapshots;
            assert_int_equal(
                pthread_create(&thread[k], NULL, crowd_run, &c[k]), 0);
        }
        for (unsigned k = 0; k < threads; k++) {
            pthread_join(thread[k], NULL);
            applied += c[k].applied;
            refused += c[k].refused;
        }
        assert_true(applied > 0 && refused > 0);
        crowd_check(&all);
    }
}

static void test_random_calls(void **state)
{
    (void)state;
    random_calls(1, 5, 150);
}

static void test_random_calls_at_once(void **state)
{
    (void)state;
    random_calls(3, 5, 100);
}

/* ---- the limit itself ---- */

static void *announce_and_charge(void *arg)
{
    mem_limit *limit = arg;

    for (int i = 0; i < 200000; i++) {
        if (persia_mem_announce(limit, 60)) { /* then it can be charged */
            persia_mem_charge_announced(limit, 60);
            assert_true(limit->used <= limit->maximum);
            persia_mem_release(limit, 60);
        }
        persia_mem_withdraw(limit, 60);
    }
    return NULL;
}

static void test_charges_beside_what_was_announced(void **state)
{
    mem_limit limit;
    pthread_t thread[2];
    (void)state;
    persia_mem_limit_init(&limit, 200);
    for (int i = 0; i < 2; i++)
        pthread_create(&thread[i], NULL, announce_and_charge, &limit);
    for (int i = 0; i < 200000; i++)
        if (!persia_mem_charge(&limit, 70))
            persia_mem_release(&limit, 70);
    for (int i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
    assert_true(limit.used == 0 && limit.promised == 0);
    persia_mem_limit_free(&limit);
}

int main(void)
{
    for (size_t i = 0; i < sizeof ones / sizeof *ones; i++)
        ones[i] = 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_eviction_widens_pages),
        cmocka_unit_test(test_expiry_makes_no_room_elsewhere),
        cmocka_unit_test(test_random_calls),
        cmocka_unit_test(test_random_calls_at_once),
        cmocka_unit_test(test_charges_beside_what_was_announced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
