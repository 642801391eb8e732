/* Memory limits: of one table, of several in one push, of pushes side by
 * side. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/table/help.h"

enum { DIM = 3 };

static float ones[70000 * DIM];

static void test_memory_limit(void **state)
{
    enum { PIECE = 500 };
    const uint32_t stripes[] = { 0, 1, 64 };
    static uint64_t ids[PIECE];
    sched *s = pool_of(2);
    optim_args a = args_of(OPTIM_ADAM);
    (void)state;
    for (int k = 0; k < 3; k++)
        for (uint64_t maximum = 1 << 20; maximum <= 4 << 20; maximum *= 4) {
            table_config c = config_of(16, OPTIM_ADAM);
            mem_limit limit;
            persia_mem_limit_init(&limit, maximum);
            uint64_t from = 0;
            push_job job;
            picture p;
            c.stripes = stripes[k];
            c.limit = &limit;
            table *t = table_of(&c);
            for (;;) {
                ids_fill(ids, from, PIECE);
                p = picture_of(t);
                if (push_try(s, t, &a, PIECE, ids, ones, 0, &job))
                    break;
                dump_free(&p.rows);
                from += PIECE;
                assert_true(limit.used <= maximum);
            }
            assert_non_null(strstr(persia_err_text(), "test"));
            assert_non_null(strstr(persia_err_text(), "limit"));
            unchanged(t, &p);
            /* most of the memory is put to use */
            if (limit.used < maximum / 2)
                fail_msg("%u stripes: refused at %llu of %llu bytes",
                         stripes[k], (unsigned long long)limit.used,
                         (unsigned long long)maximum);
            /* old rows learn on */
            ids_fill(ids, 0, PIECE);
            if (from)
                assert_int_equal(
                    push_one(s, t, &a, PIECE, ids, ones, 0).touched, PIECE);
            persia_table_destroy(t);
            assert_int_equal(limit.used, 0);
        }
    persia_sched_destroy(s);
}

/* Tables of one limit: a push into all of them fits as a whole. */
static void test_memory_limit_of_several_tables(void **state)
{
    enum { T = 4, PIECE = 9000 };
    const uint32_t stripes[] = { 1, 16 };
    static uint64_t ids[PIECE];
    sched *s = pool_of(2);
    optim_args a = args_of(OPTIM_ADAM);
    (void)state;
    for (int k = 0; k < 2; k++)
        for (int times = 0; times < 20; times++) {
            mem_limit limit;
            persia_mem_limit_init(&limit, (4 << 20) + 30000 * times);
            push_part part = { .n = PIECE, .ids = ids, .grad = ones,
                               .stride = DIM, .bags = PIECE };
            push_job jobs[T];
            picture p[T];
            table *t[T];
            uint64_t from = 0;
            int rc;
            for (int i = 0; i < T; i++) {
                table_config c = config_of(DIM, OPTIM_ADAM);
                c.name[0] = (char)('A' + i);
                c.stripes = stripes[k];
                c.limit = &limit;
                t[i] = table_of(&c);
                jobs[i] = (push_job){ .t = t[i], .parts = &part,
                                      .parts_n = 1, .optim = &a };
            }
            do {
                for (int i = 0; from && i < T; i++)
                    dump_free(&p[i].rows);
                for (int i = 0; i < T; i++)
                    p[i] = picture_of(t[i]);
                ids_fill(ids, from, PIECE);
                rc = persia_table_push(s, jobs, T);
                from += PIECE;
            } while (!rc);
            assert_int_equal(rc, PERSIA_ELIMIT);
            assert_non_null(strstr(persia_err_text(), "nothing was applied"));
            for (int i = 0; i < T; i++)
                unchanged(t[i], &p[i]);
            assert_true(limit.used > limit.maximum / 4);
            ids_fill(ids, 0, PIECE); /* they are all there */
            if (from > PIECE)
                assert_int_equal(persia_table_push(s, jobs, T), PERSIA_OK);
            for (int i = 0; i < T; i++)
                persia_table_destroy(t[i]);
            assert_int_equal(limit.used, 0);
        }
    persia_sched_destroy(s);
}

/* Two threads fill a table each, with one limit for both. */
typedef struct filler {
    table *t;
    pthread_barrier_t *round;
    int halves; /* pushes that were applied in part */
} filler;

static void *fill(void *arg)
{
    enum { PIECE = 60000, ROUNDS = 2 };
    filler *f = arg;
    optim_args a = args_of(OPTIM_ADAM);
    sched *s = pool_of(1);
    push_job job;
    uint64_t *ids = malloc(PIECE * sizeof *ids);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        ids_fill(ids, i * PIECE, PIECE);
        uint64_t before = stats_of(f->t).rows;
        pthread_barrier_wait(f->round);
        int rc = push_try(s, f->t, &a, PIECE, ids, ones, 0, &job);
        f->halves += stats_of(f->t).rows != before + (rc ? 0 : PIECE);
    }
    free(ids);
    persia_sched_destroy(s);
    return NULL;
}

static void test_memory_limit_of_two_threads(void **state)
{
    (void)state;
    for (uint64_t times = 0; times < 20; times++) {
        mem_limit limit;
        persia_mem_limit_init(&limit, (6 << 20) + times * 200000);
        pthread_barrier_t round;
        pthread_t threads[2];
        filler f[2];
        pthread_barrier_init(&round, NULL, 2);
        for (int i = 0; i < 2; i++) {
            table_config c = config_of(DIM, OPTIM_ADAM);
            c.limit = &limit;
            f[i] = (filler){ .t = table_of(&c), .round = &round };
        }
        for (int i = 0; i < 2; i++)
            pthread_create(&threads[i], NULL, fill, &f[i]);
        for (int i = 0; i < 2; i++)
            pthread_join(threads[i], NULL);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(f[i].halves, 0);
            persia_table_destroy(f[i].t);
        }
        assert_int_equal(limit.used, 0);
        pthread_barrier_destroy(&round);
    }
}

/* Rows that take the place of evicted ones need no memory. */
static void test_eviction_at_the_memory_limit(void **state)
{
    enum { PIECE = 500, CAPACITY = 20 * PIECE };
    static uint64_t ids[PIECE];
    sched *s = pool_of(2);
    optim_args a = args_of(OPTIM_ADAM);
    table_config c = config_of(16, OPTIM_ADAM);
    mem_limit limit;
    persia_mem_limit_init(&limit, 0);
    (void)state;
    c.capacity = CAPACITY;
    c.full = FULL_EVICT_LRU;
    c.limit = &limit;
    table *t = table_of(&c);
    for (uint64_t i = 0; i < 100; i++) {
        ids_fill(ids, i * PIECE, PIECE);
        push_one(s, t, &a, PIECE, ids, ones, 0);
        if (i == 20) /* full, and hardly a page more */
            limit.maximum = limit.used + 100000;
    }
    assert_int_equal(stats_of(t).rows, CAPACITY);
    assert_int_equal(stats_of(t).evicted, 80 * PIECE);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* persia_table_set beyond the limit writes nothing. */
static void test_set_at_the_memory_limit(void **state)
{
    enum { N = 20000 };
    static uint64_t ids[N];
    table_config c = config_of(3, OPTIM_ADAM);
    mem_limit limit;
    persia_mem_limit_init(&limit, 1 << 20);
    picture p;
    (void)state;
    c.limit = &limit;
    table *t = table_of(&c);
    ids_fill(ids, 0, N);
    assert_int_equal(persia_table_set(t, 1000, ids, ones, NULL), PERSIA_OK);
    p = picture_of(t);
    assert_int_equal(persia_table_set(t, N, ids, ones, NULL), PERSIA_ELIMIT);
    unchanged(t, &p);
    persia_table_destroy(t);
    assert_int_equal(limit.used, 0);
}

/* Restores n rows in pieces; the bytes that they take, or 0 if they pass the
 * limit. */
static uint64_t restored(table_config c, uint64_t maximum, size_t n)
{
    enum { PIECE = 4096 };
    static uint64_t ids[PIECE];
    static uint32_t clocks[PIECE];
    mem_limit limit;
    uint64_t used = 0;
    int rc = PERSIA_OK;

    persia_mem_limit_init(&limit, maximum);
    c.limit = &limit;
    table *t = table_of(&c);
    for (size_t from = 0; from < n && !rc; from += PIECE) {
        const size_t m = n - from < PIECE ? n - from : PIECE;
        ids_fill(ids, from, m);
        rc = persia_table_restore(t, m, ids, ones, NULL, clocks, NULL);
    }
    assert_true(rc == PERSIA_OK || rc == PERSIA_ELIMIT);
    if (!rc)
        used = limit.used;
    persia_table_destroy(t);
    return used;
}

/* What rows are said to take at most: they fit, and it is not much more. */
static void test_what_a_restore_is_said_to_take(void **state)
{
    const size_t rows[] = { 1, 7, 50, 1000, 9000, 70000 };
    const uint32_t stripes[] = { 1, 8 }, dims[] = { 1, 16 };
    (void)state;
    for (size_t k = 0; k < 24; k++) {
        const size_t n = rows[k / 4];
        table_config c = config_of(dims[k % 2], OPTIM_SGD);
        c.stripes = stripes[k / 2 % 2];
        table *t = table_of(&c);
        const uint64_t said = persia_table_restore_bytes(t, n);
        persia_table_destroy(t);
        const uint64_t used = restored(c, said, n);
        const uint64_t pages = 2 * c.stripes * (uint64_t)4608;
        if (!used || said > used + used / 2 + pages)
            fail_msg("%zu rows of dim %u in %u stripes take %llu bytes (0: "
                     "refused), said were %llu",
                     n, c.dim, c.stripes, (unsigned long long)used,
                     (unsigned long long)said);
    }
}

/* A call that waits to be alone with the limit. */
typedef struct alone {
    const table_config *config;
    table *t;
    int clears;
} alone;

static void *alone_run(void *arg)
{
    alone *a = arg;

    if (a->clears)
        assert_int_equal(persia_table_clear(a->t), PERSIA_OK);
    else
        assert_int_equal(persia_table_create(a->config, &a->t), PERSIA_OK);
    return NULL;
}

/* A thread that makes or clears a table waits for the pushes that have begun,
 * not for those that follow, however they overlap. */
static void test_pushes_let_others_be_alone(void **state)
{
    table_config c = config_of(DIM, OPTIM_ADAM);
    mem_limit limit;
    (void)state;
    persia_mem_limit_init(&limit, 1 << 30);
    c.limit = &limit;
    alone a = { .config = &c };
    for (; a.clears < 2; a.clears++) {
        const uint64_t until = persia_clock_ns() + 60000000000u;
        pthread_t thread;
        pthread_rwlock_rdlock(&limit.lock); /* a push that has begun */
        pthread_create(&thread, NULL, alone_run, &a);
        while (!pthread_rwlock_tryrdlock(&limit.lock)) { /* the next one */
            pthread_rwlock_unlock(&limit.lock);
            assert_true(persia_clock_ns() < until);
        }
        pthread_rwlock_unlock(&limit.lock);
        pthread_join(thread, NULL);
    }
    persia_table_destroy(a.t);
    persia_mem_limit_free(&limit);
}

int main(void)
{
    for (size_t i = 0; i < sizeof ones / sizeof *ones; i++)
        ones[i] = 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_limit),
        cmocka_unit_test(test_memory_limit_of_several_tables),
        cmocka_unit_test(test_memory_limit_of_two_threads),
        cmocka_unit_test(test_eviction_at_the_memory_limit),
        cmocka_unit_test(test_set_at_the_memory_limit),
        cmocka_unit_test(test_what_a_restore_is_said_to_take),
        cmocka_unit_test(test_pushes_let_others_be_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
