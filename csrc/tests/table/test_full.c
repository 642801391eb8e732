/* What a push refuses, and what it lets go: capacity, eviction, admission,
 * non-finite gradients, memory limits, arguments.  A refused push changes
 * nothing: tables are compared bit for bit. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"
#include "tests/table/help.h"

enum { DIM = 3 };

static float ones[70000 * DIM];

/* ---- capacity, raise ---- */

static void test_capacity_raise(void **state)
{
    const uint32_t stripes[] = { 0, 1, 16 };
    sched *s = pool_of(2);
    optim_args a = args_of(OPTIM_ADAGRAD);
    uint64_t ids[300];
    (void)state;
    for (int k = 0; k < 3; k++) {
        table_config c = config_of(DIM, OPTIM_ADAGRAD);
        push_job job;
        picture p;
        c.capacity = 100;
        c.stripes = stripes[k];
        table *t = table_of(&c);
        ids_fill(ids, 0, 300);
        push_one(s, t, &a, 60, ids, ones, 0);
        /* duplicates count once, old ids not at all */
        for (int i = 0; i < 300; i++)
            ids[i] = (uint64_t)i % 100;
        job = push_one(s, t, &a, 300, ids, ones, 0);
        assert_int_equal(job.created, 40);
        assert_int_equal(job.touched, 100);
        assert_int_equal(stats_of(t).rows, 100);
        push_one(s, t, &a, 300, ids, ones, 0);
        /* one too many */
        ids[150] = 1000;
        p = picture_of(t);
        assert_int_equal(push_try(s, t, &a, 300, ids, ones, 0, &job),
                         PERSIA_ECAPACITY);
        assert_non_null(strstr(persia_err_text(), "table test"));
        assert_non_null(strstr(persia_err_text(), "100 rows"));
        assert_non_null(strstr(persia_err_text(), "id 1000"));
        unchanged(t, &p);
        /* set is refused the same way */
        p = picture_of(t);
        assert_int_equal(persia_table_set(t, 300, ids, ones, NULL),
                         PERSIA_ECAPACITY);
        assert_non_null(strstr(persia_err_text(), "table test"));
        unchanged(t, &p);
        assert_int_equal(persia_table_clear(t), PERSIA_OK);
        ids[150] = 0;
        push_one(s, t, &a, 300, ids, ones, 0);
        persia_table_destroy(t);
    }
    persia_sched_destroy(s);
}

/* The table that is full is not the first of the push. */
static void test_one_full_table_refuses_the_whole_push(void **state)
{
    enum { T = 4 };
    sched *s = pool_of(2);
    optim_args a = args_of(OPTIM_SGD);
    push_job jobs[T];
    push_part part;
    uint64_t ids[60];
    picture p[T];
    table *t[T];
    (void)state;
    ids_fill(ids, 7, 60);
    for (int i = 0; i < T; i++) {
        table_config c = config_of(DIM, OPTIM_SGD);
        c.name[0] = (char)('A' + i);
        c.capacity = i == 2 ? 50 : 0;
        t[i] = table_of(&c);
        push_one(s, t[i], &a, 30, ids, ones, 0);
        jobs[i] = (push_job){
            .t = t[i], .parts = &part, .parts_n = 1, .optim = &a
        };
        p[i] = picture_of(t[i]);
    }
    part = (push_part){
        .n = 60, .ids = ids, .grad = ones, .stride = DIM, .bags = 60
    };
    assert_int_equal(persia_table_push(s, jobs, T), PERSIA_ECAPACITY);
    assert_non_null(strstr(persia_err_text(), "table Cest"));
    for (int i = 0; i < T; i++)
        unchanged(t[i], &p[i]);
    part.n = part.bags = 50;
    assert_int_equal(persia_table_push(s, jobs, T), PERSIA_OK);
    for (int i = 0; i < T; i++) {
        assert_int_equal(stats_of(t[i]).rows, 50);
        persia_table_destroy(t[i]);
    }
    persia_sched_destroy(s);
}

/* Pushes that run at once, none of which is near the capacity alone: of
 * each, all ids have rows, or none has. */
typedef struct racer {
    pthread_t thread;
    table *t;
    sched *s;
    uint64_t from;
    int refused;
    uint64_t lost; /* ids refused in silence */
} racer;

enum { RACE_IDS = 2000 };

static void *race(void *arg)
{
    racer *r = arg;
    optim_args a = args_of(OPTIM_SGD);
    uint64_t *ids = malloc(RACE_IDS * sizeof *ids);
    push_job job;

    ids_fill(ids, r->from, RACE_IDS);
    r->refused = push_try(r->s, r->t, &a, RACE_IDS, ids, ones, 0, &job);
    r->lost = job.refused;
    free(ids);
    return NULL;
}

static void test_capacity_holds_among_pushes(void **state)
{
    enum { THREADS = 4 };
    const int rounds = SANITIZED ? 10 : 50;
    (void)state;
    for (int round = 0; round < rounds; round++) {
        const int evict = round % 2;
        table_config c = config_of(1, OPTIM_SGD);
        racer r[THREADS];
        uint64_t fit = 0;
        c.stripes = 4;
        c.capacity = RACE_IDS * 5 / 2;
        c.full = evict ? FULL_EVICT_LRU : FULL_RAISE;
        table *t = table_of(&c);
        for (uint64_t i = 0; i < THREADS; i++) {
            r[i] = (racer){ .t = t, .s = pool_of(1), .from = i * RACE_IDS };
            pthread_create(&r[i].thread, NULL, race, &r[i]);
        }
        for (int i = 0; i < THREADS; i++)
            pthread_join(r[i].thread, NULL);
        for (int i = 0; i < THREADS; i++) {
            size_t have = 0;
            for (uint64_t k = 0; k < RACE_IDS; k++)
                have += (size_t)has_row(t, r[i].from + k);
            persia_sched_destroy(r[i].s);
            if (evict)
                continue;
            if (have != (r[i].refused ? 0 : RACE_IDS) || r[i].lost)
                fail_msg("a push that gave %d made %zu rows, lost %llu",
                         r[i].refused, have, (unsigned long long)r[i].lost);
            fit += !r[i].refused;
        }
        if (stats_of(t).rows > c.capacity)
            fail_msg("%llu rows of %llu",
                     (unsigned long long)stats_of(t).rows,
                     (unsigned long long)c.capacity);
        if (!evict)
            assert_int_equal(fit, 2);
        persia_table_destroy(t);
    }
}

/* ---- capacity, evict ---- */

/* What a model knows of the rows of a table: the push that touched each last;
 * 0: no row. */
typedef struct model {
    uint32_t universe, capacity;
    uint32_t *touched; /* [universe] */
    uint8_t *seen;     /* [universe] of the push that is checked */
    uint64_t evicted, young; /* of them, with too many older ones left */
} model;

/* Rows that push `step` neither evicted nor touched, from the oldest on, of
 * each push: how many are older than those of it. */
static void count_older(const model *m, const uint8_t *found, uint32_t step,
                        uint32_t *older)
{
    memset(older, 0, (step + 2) * sizeof *older);
    for (uint32_t i = 0; i < m->universe; i++)
        if (m->touched[i] && !m->seen[i] && found[i])
            older[m->touched[i] + 1]++;
    for (uint32_t k = 1; k <= step; k++)
        older[k] += older[k - 1];
}

/* Of a table of one window all rows that went must have been the oldest. */
static void model_compare(model *m, const uint8_t *found, uint32_t step,
                          uint32_t old)
{
    uint32_t *older = malloc((step + 2) * sizeof *older);

    count_older(m, found, step, older);
    for (uint32_t i = 0; i < m->universe; i++) {
        const uint32_t was = m->touched[i];
        if (m->seen[i] && was && !found[i])
            fail_msg("step %u: id %u of this push lost its row", step, i);
        if (!m->seen[i] && !was)
            assert_false(found[i]);
        if (!m->seen[i] && was && !found[i]) {
            if (m->capacity <= 64 && older[was])
                fail_msg("step %u: a row of push %u went, %u older ones stay",
                         step, was, older[was]);
            m->evicted++;
            m->young += older[was] > old / 4;
        }
        m->touched[i] = !found[i] ? 0 : m->seen[i] ? step : was;
    }
    free(older);
}

static void evict_step(model *m, sched *s, table *t, uint32_t step,
                       uint32_t n, const uint64_t *ids, const uint64_t *all)
{
    optim_args a = args_of(OPTIM_ADAGRAD);
    uint32_t rows = 0, fresh = 0, old = 0;
    float *vectors = malloc(m->universe * sizeof *vectors);
    uint8_t *found = malloc(m->universe);
    const uint64_t looked = stats_of(t).candidates;

    memset(m->seen, 0, m->universe);
    for (uint32_t i = 0; i < n; i++)
        m->seen[ids[i]] = 1;
    for (uint32_t i = 0; i < m->universe; i++) {
        rows += m->touched[i] != 0;
        fresh += m->seen[i] && !m->touched[i];
        old += m->seen[i] && m->touched[i];
    }
    push_job job = push_one(s, t, &a, n, ids, ones, 0);
    assert_int_equal(
        persia_table_get(t, m->universe, all, vectors, NULL, found), 0);
    uint32_t room = m->capacity - old, made = fresh < room ? fresh : room;
    uint32_t gone = rows + made > m->capacity ? rows + made - m->capacity : 0;
    assert_int_equal(job.created, made);
    assert_int_equal(job.refused, fresh - made);
    assert_int_equal(job.evicted, gone);
    assert_int_equal(job.touched, old + made);
    assert_true(stats_of(t).candidates - looked <=
                64 * (job.evicted + job.refused));
    model_compare(m, found, step, rows - old);
    assert_int_equal(stats_of(t).evicted, m->evicted);
    assert_int_equal(stats_of(t).rows, rows + made - gone);
    free(vectors);
    free(found);
}

static void evict_schedule(uint32_t capacity, uint32_t universe,
                           uint32_t batch, unsigned steps, uint64_t seed)
{
    sched *s = pool_of(2);
    table_config c = config_of(1, OPTIM_ADAGRAD);
    model m = { universe, capacity, calloc(universe, sizeof *m.touched),
                malloc(universe), 0, 0 };
    uint64_t *ids = malloc(batch * sizeof *ids);
    uint64_t *all = malloc(universe * sizeof *all);
    rng r = { seed };

    c.capacity = capacity;
    c.full = FULL_EVICT_LRU;
    table *t = table_of(&c);
    ids_fill(all, 0, universe);
    for (uint32_t step = 1; step <= steps; step++) {
        const uint32_t n = (uint32_t)rng_below(&r, batch) + 1;
        for (uint32_t i = 0; i < n; i++)
            ids[i] = rng_below(&r, universe);
        evict_step(&m, s, t, step, n, ids, all);
    }
    assert_true(m.evicted > 0);
    if (m.young > m.evicted / 10)
        fail_msg("of %llu rows that went %llu were not of the oldest quarter",
                 (unsigned long long)m.evicted, (unsigned long long)m.young);
    persia_table_destroy(t);
    persia_sched_destroy(s);
    free(m.touched);
    free(m.seen);
    free(ids);
    free(all);
}

/* Of rows that may go the oldest goes: exactly where one window holds all of
 * them, else one of the oldest quarter, nearly always. */
static void test_the_oldest_go(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= (SANITIZED ? 1 : 3); seed++) {
        evict_schedule(1, 5, 4, 200, seed);
        evict_schedule(10, 40, 8, 300, seed);
        evict_schedule(50, 100, 120, 200, seed); /* more than fit */
        evict_schedule(1000, 3000, 700, 60, seed);
        evict_schedule(5000, 20000, 6000, 15, seed);
        evict_schedule(5000, 20000, 100, SANITIZED ? 200 : 400, seed);
    }
}

/* State of a row that is hit by each push lasts, however full the table. */
static void test_hot_rows_keep_their_state(void **state)
{
    sched *s = pool_of(1);
    table_config c = config_of(1, OPTIM_ADAGRAD);
    optim_args a = args_of(OPTIM_ADAGRAD);
    uint64_t ids[101];
    float v, accumulator;
    (void)state;
    c.capacity = 100;
    c.full = FULL_EVICT_LRU;
    table *t = table_of(&c);
    for (uint64_t step = 0; step < 50; step++) {
        ids_fill(ids, 1000 + step * 100, 99);
        ids[99] = 5; /* is last, is found late */
        push_one(s, t, &a, 100, ids, ones, 0);
    }
    assert_int_equal(persia_table_get(t, 1, ids + 99, &v, &accumulator, NULL),
                     0);
    assert_true(accumulator == 50);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

static void test_a_large_table_evicts_too(void **state)
{
    enum { CAPACITY = 70000, PIECE = 10000 };
    static uint64_t ids[PIECE];
    sched *s = pool_of(2);
    table_config c = config_of(1, OPTIM_SGD);
    optim_args a = args_of(OPTIM_SGD);
    (void)state;
    c.capacity = CAPACITY;
    c.full = FULL_EVICT_LRU;
    table *t = table_of(&c);
    for (uint64_t step = 0; step < 12; step++) {
        ids_fill(ids, step * PIECE, PIECE);
        push_one(s, t, &a, PIECE, ids, ones, 0);
        assert_true(stats_of(t).rows <= CAPACITY);
        assert_int_equal(stats_of(t).rows + stats_of(t).evicted,
                         (step + 1) * PIECE);
    }
    /* by stripe, so nearly the oldest: the last 5 of 7 pushes are whole */
    for (uint64_t id = 0; id < 12 * PIECE; id += 37)
        if (id < 4 * PIECE)
            assert_false(has_row(t, id));
        else if (id >= 7 * PIECE)
            assert_true(has_row(t, id));
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* Rows put by hand or restored make room for themselves as well. */
static void test_set_and_restore_evict(void **state)
{
    sched *s = pool_of(1);
    table_config c = config_of(1, OPTIM_SGD);
    optim_args a = args_of(OPTIM_SGD);
    uint64_t ids[250];
    uint32_t clocks[250];
    (void)state;
    c.capacity = 100;
    c.full = FULL_EVICT_LRU;
    table *t = table_of(&c);
    ids_fill(ids, 0, 250);
    push_one(s, t, &a, 100, ids, ones, 0);
    /* all rows are of the last push: one of them goes */
    if (persia_table_set(t, 10, ids + 200, ones, NULL))
        fail_msg("%s", persia_err_text());
    assert_int_equal(stats_of(t).rows, 100);
    for (uint64_t i = 200; i < 210; i++)
        assert_true(has_row(t, i));
    assert_int_equal(stats_of(t).evicted, 10);
    persia_table_destroy(t);
    t = table_of(&c);
    for (uint32_t i = 0; i < 250; i++)
        clocks[i] = 1 + i / 10 * 7 % 25; /* ten rows of each push 1 .. 25 */
    persia_table_set_clock(t, 25);
    if (persia_table_restore(t, 250, ids, ones, NULL, clocks, NULL))
        fail_msg("%s", persia_err_text());
    assert_int_equal(stats_of(t).rows, 100);
    persia_table_destroy(t);
    /* rows of later pushes (another thread's, or a clock not yet set) are
     * young, not 2^32 pushes old */
    c.capacity = 60;
    t = table_of(&c);
    for (uint32_t i = 0; i < 60; i++)
        clocks[i] = i < 30 ? 20 : 1;
    persia_table_set_clock(t, 10);
    assert_int_equal(persia_table_restore(t, 60, ids, ones, NULL, clocks,
                                          NULL), 0);
    push_one(s, t, &a, 30, ids + 60, ones, 0);
    for (uint64_t i = 0; i < 90; i++)
        assert_int_equal(has_row(t, i), i < 30 || i >= 60);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* Plans of whom to evict do not outlive the rows. */
static void test_clear_forgets_whom_to_evict(void **state)
{
    sched *s = pool_of(1);
    table_config c = config_of(1, OPTIM_SGD);
    optim_args a = args_of(OPTIM_SGD);
    uint64_t ids[40];
    uint32_t clocks[40];
    (void)state;
    c.capacity = 40;
    c.full = FULL_EVICT_LRU;
    table *t = table_of(&c);
    for (uint64_t i = 0; i <= 40; i++) /* the last one evicts id 0 */
        push_one(s, t, &a, 1, &i, ones, 0);
    assert_false(has_row(t, 0));
    assert_int_equal(persia_table_clear(t), PERSIA_OK);
    ids_fill(ids, 100, 40);
    for (uint32_t i = 0; i < 40; i++) /* most as they were, but one older */
        clocks[i] = i == 39 ? 1 : i + 1 + (i == 0);
    assert_int_equal(persia_table_restore(t, 40, ids, ones, NULL, clocks,
                                          NULL), 0);
    push_one(s, t, &a, 1, ids, ones, 0);
    for (uint64_t i = 200; i < 202; i++)
        push_one(s, t, &a, 1, &i, ones, 0);
    assert_false(has_row(t, 139)); /* of push 1 */
    assert_false(has_row(t, 101)); /* of push 2 */
    for (uint64_t i = 100; i < 139; i++)
        assert_int_equal(has_row(t, i), i != 101);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* ---- admission ---- */

static void test_admission(void **state)
{
    enum { N = 20000 };
    static uint64_t ids[N];
    static uint8_t first[N];
    const float p[] = { 0, 0.05f, 0.5f, 0.95f, 1 };
    sched *s = pool_of(2);
    optim_args a = args_of(OPTIM_SGD);
    (void)state;
    ids_fill(ids, 0, N);
    for (int k = 0; k < 5; k++) {
        table_config c = config_of(DIM, OPTIM_SGD);
        double want = N * (double)p[k], sd = sqrt(want * (1 - (double)p[k]));
        int same = 1;
        push_job job;
        c.admission = p[k];
        for (int again = 0; again < 4; again++) {
            c.stripes = again == 1 ? 64 : 0;
            table *t = table_of(&c);
            job = push_one(s, t, &a, N, ids, ones, again == 3 ? 78 : 77);
            assert_true(fabs((double)job.created - want) <= 5 * sd);
            assert_int_equal(job.created + job.refused, N);
            assert_int_equal(job.touched, job.created);
            assert_int_equal(stats_of(t).refused, job.refused);
            for (size_t i = 0; i < N; i++) {
                uint8_t has = (uint8_t)has_row(t, ids[i]);
                if (again == 0)
                    first[i] = has;
                else if (again < 3) /* the same batch: the same ids */
                    assert_int_equal(has, first[i]);
                else
                    same &= has == first[i];
            }
            /* rows that are there need no admission */
            job = push_one(s, t, &a, N, ids, ones, 77 + (uint64_t)again);
            assert_int_equal(job.touched + job.refused, N);
            persia_table_destroy(t);
        }
        assert_int_equal(same, p[k] <= 0 || p[k] >= 1);
    }
    persia_sched_destroy(s);
}

/* Of a full table: only ids that would be admitted count. */
static void test_admission_and_capacity(void **state)
{
    sched *s = pool_of(1);
    table_config c = config_of(DIM, OPTIM_SGD);
    optim_args a = args_of(OPTIM_SGD);
    uint64_t ids[1000];
    push_job job;
    (void)state;
    ids_fill(ids, 0, 1000);
    c.admission = 0.1f;
    table *t = table_of(&c);
    job = push_one(s, t, &a, 1000, ids, ones, 4);
    persia_table_destroy(t);
    c.capacity = job.created;
    t = table_of(&c);
    assert_int_equal(push_one(s, t, &a, 1000, ids, ones, 4).created,
                     c.capacity);
    persia_table_destroy(t);
    c.capacity--;
    t = table_of(&c);
    assert_int_equal(push_try(s, t, &a, 1000, ids, ones, 4, &job),
                     PERSIA_ECAPACITY);
    assert_int_equal(stats_of(t).rows, 0);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* ---- non-finite gradients ---- */

static void test_nonfinite_raise(void **state)
{
    enum { N = 9000 };
    static float grad[N * DIM], scale[N];
    static uint64_t ids[N];
    static uint32_t bag[N];
    const float bad[] = { NAN, -NAN, INFINITY, -INFINITY };
    sched *s = pool_of(2);
    optim_args a = args_of(OPTIM_ADAM);
    table_config c = config_of(DIM, OPTIM_ADAM);
    table *t = table_of(&c), *u;
    rng r = { 3 };
    (void)state;
    snprintf(c.name, sizeof c.name, "other");
    u = table_of(&c);
    ids_fill(ids, 0, N);
    push_one(s, t, &a, N / 2, ids, grad, 0);
    push_one(s, u, &a, N / 2, ids, grad, 0);
    for (int step = 0; step < 40; step++) {
        const int scaled = step % 3 == 0, bagged = step % 2;
        size_t at = rng_below(&r, N);
        picture p = picture_of(t), q = picture_of(u);
        push_part good = { .n = 100, .ids = ids, .grad = ones,
                           .stride = DIM, .bags = 100 };
        push_part parts[2] = {
            good,
            { .n = N, .ids = ids, .grad = grad, .scale = scale, .stride = DIM,
              .bag = bagged ? bag : NULL, .bags = N }
        };
        push_job jobs[2] = {
            { .t = t, .parts = &good, .parts_n = 1, .optim = &a },
            { .t = u, .parts = parts, .parts_n = 2, .optim = &a }
        };
        for (size_t i = 0; i < N; i++) {
            bag[i] = (uint32_t)(N - 1 - i);
            scale[i] = 1;
        }
        memset(grad, 0, sizeof grad);
        if (scaled)
            scale[at] = bad[step % 4];
        else
            grad[(bagged ? N - 1 - at : at) * DIM + step % DIM] =
                bad[step % 4];
        assert_int_equal(persia_table_push(s, jobs, 2), PERSIA_ENONFINITE);
        char want[40];
        snprintf(want, sizeof want, "id %zu ", at);
        if (!strstr(persia_err_text(), want) ||
            !strstr(persia_err_text(), "table other"))
            fail_msg("not named: %s", persia_err_text());
        unchanged(t, &p);
        unchanged(u, &q);
    }
    persia_table_destroy(t);
    persia_table_destroy(u);
    persia_sched_destroy(s);
}

/* Finite gradients whose sum is not: never in silence, never in a row. */
static void test_overflow_of_a_sum(void **state)
{
    const uint64_t ids[] = { 1, 1, 2 };
    const float grad[] = { 3e38f, 3e38f, 1 };
    sched *s = pool_of(1);
    table_config c = config_of(1, OPTIM_SGD);
    optim_args a = args_of(OPTIM_SGD);
    push_job job;
    float out[3];
    (void)state;
    for (uint32_t policy = 0; policy < 2; policy++) {
        c.nonfinite = policy;
        table *t = table_of(&c);
        int rc = push_try(s, t, &a, 3, ids, grad, 0, &job);
        assert_int_equal(persia_table_get(t, 3, ids, out, NULL, NULL), 0);
        assert_true(isfinite(out[0]) && isfinite(out[2]));
        assert_true(rc == PERSIA_ENONFINITE || job.nonfinite == 1);
        persia_table_destroy(t);
    }
    persia_sched_destroy(s);
}

static void test_nonfinite_skip(void **state)
{
    enum { N = 5000 };
    static float grad[N * DIM], out[N * DIM], was[N * DIM];
    static uint64_t ids[N];
    static uint8_t found[N];
    sched *s = pool_of(2);
    optim_args a = args_of(OPTIM_ADAGRAD);
    table_config c = config_of(DIM, OPTIM_ADAGRAD);
    push_job job;
    (void)state;
    c.nonfinite = NONFINITE_SKIP;
    table *t = table_of(&c);
    for (size_t i = 0; i < N; i++) { /* each id twice */
        ids[i] = i / 2;
        for (size_t j = 0; j < DIM; j++)
            grad[i * DIM + j] = 1;
        if (i % 10 == 1)
            grad[i * DIM + i % DIM] = i % 20 == 1 ? NAN : -INFINITY;
    }
    for (uint64_t step = 1; step <= 2; step++) {
        assert_int_equal(persia_table_get(t, N, ids, was, NULL, NULL), 0);
        job = push_one(s, t, &a, N, ids, grad, 0);
        assert_int_equal(job.nonfinite, N / 10);
        assert_int_equal(job.touched, N / 2 - N / 10);
        assert_int_equal(job.created, step == 1 ? N / 2 - N / 10 : 0);
        assert_int_equal(stats_of(t).nonfinite, step * N / 10);
        assert_int_equal(persia_table_get(t, N, ids, out, NULL, found), 0);
        for (size_t i = 0; i < N; i++) {
            assert_int_equal(found[i], i / 2 % 5 != 0);
            if (i / 2 % 5)
                assert_true(out[i * DIM] < was[i * DIM]);
            else
                assert_memory_equal(out + i * DIM, was + i * DIM, 4 * DIM);
        }
    }
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* ---- arguments ---- */

static void test_arguments(void **state)
{
    sched *s = pool_of(2);
    table_config c = config_of(DIM, OPTIM_SGD);
    table *t = table_of(&c), *u;
    optim_args sgd = args_of(OPTIM_SGD), adam = args_of(OPTIM_ADAM);
    uint64_t ids[100];
    push_job job;
    picture p;
    (void)state;
    snprintf(c.name, sizeof c.name, "other");
    u = table_of(&c);
    ids_fill(ids, 0, 100);
    push_one(s, t, &sgd, 50, ids, ones, 0);
    p = picture_of(t);
    assert_int_equal(push_try(s, t, &adam, 100, ids, ones, 0, &job),
                     PERSIA_EMISMATCH);
    assert_non_null(strstr(persia_err_text(), "test"));
    assert_non_null(strstr(persia_err_text(), "sgd"));
    assert_non_null(strstr(persia_err_text(), "adam"));
    sgd.momentum = 0.5f;
    assert_int_equal(push_try(s, t, &sgd, 100, ids, ones, 0, &job),
                     PERSIA_EMISMATCH);
    assert_non_null(strstr(persia_err_text(), "momentum"));
    sgd.momentum = 0;
    sgd.lr = NAN;
    assert_int_equal(push_try(s, t, &sgd, 100, ids, ones, 0, &job),
                     PERSIA_EARG);
    sgd.lr = 1;
    push_part part = {
        .n = 100, .ids = ids, .grad = ones, .stride = DIM, .bags = 100
    };
    push_job twice[3] = {
        { .t = t, .parts = &part, .parts_n = 1, .optim = &sgd },
        { .t = u, .parts = &part, .parts_n = 1, .optim = &sgd },
        { .t = t, .parts = &part, .parts_n = 1, .optim = &sgd }
    };
    assert_int_equal(persia_table_push(s, twice, 3), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "twice"));
    twice[1].optim = &adam; /* the second of two is wrong */
    assert_int_equal(persia_table_push(s, twice, 2), PERSIA_EMISMATCH);
    assert_int_equal(stats_of(u).rows, 0);
    /* gradients that are not there */
    uint32_t bag[100] = { 0 };
    twice[1].optim = &sgd;
    bag[99] = 10;
    part.bag = bag;
    part.bags = 10;
    assert_int_equal(persia_table_push(s, twice, 2), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "test"));
    part.bag = NULL;
    assert_int_equal(persia_table_push(s, twice, 2), PERSIA_EARG);
    unchanged(t, &p);
    assert_int_equal(stats_of(u).pushes, 0);
    assert_int_equal(persia_table_push(s, twice, 0), PERSIA_OK);
    persia_table_destroy(t);
    persia_table_destroy(u);
    persia_sched_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_capacity_raise),
        cmocka_unit_test(test_one_full_table_refuses_the_whole_push),
        cmocka_unit_test(test_capacity_holds_among_pushes),
        cmocka_unit_test(test_the_oldest_go),
        cmocka_unit_test(test_hot_rows_keep_their_state),
        cmocka_unit_test(test_a_large_table_evicts_too),
        cmocka_unit_test(test_set_and_restore_evict),
        cmocka_unit_test(test_clear_forgets_whom_to_evict),
        cmocka_unit_test(test_admission),
        cmocka_unit_test(test_admission_and_capacity),
        cmocka_unit_test(test_nonfinite_raise),
        cmocka_unit_test(test_overflow_of_a_sum),
        cmocka_unit_test(test_nonfinite_skip),
        cmocka_unit_test(test_arguments),
    };
    for (size_t i = 0; i < sizeof ones / sizeof ones[0]; i++)
        ones[i] = 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
