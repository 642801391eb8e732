/* The same bits for any number of threads and stripes, with hints and
 * without. */
#include <stdlib.h>
#include <string.h>

#include "tests/table/help.h"

enum { N = 9000, BAGS = 700, WIDE = 64 };

typedef struct load {
    uint64_t ids[N];
    uint32_t bag[N], hint[N];
    float scale[N], grad[N * WIDE];
} load;

/* Some pushes of two tables at once, Zipf-like ids, all of it from a seed. */
static void train(sched *s, table **t, const load *l, int hinted)
{
    static float out[N * WIDE];
    static uint32_t hints[N];

    for (uint64_t step = 0; step < 4; step++) {
        push_job jobs[2];
        push_part parts[2][3];
        optim_args a[2];
        for (int k = 0; k < 2; k++) {
            const uint32_t dim = persia_table_get_config(t[k])->dim;
            pull_job pull = { t[k], N, l->ids, out, dim, hints };
            assert_int_equal(persia_table_pull(s, &pull, 1), PERSIA_OK);
            parts[k][0] = (push_part){ .n = N - step * 100,
                                       .ids = l->ids + step * 100,
                                       .rows = hinted ? hints : NULL,
                                       .bag = l->bag,
                                       .scale = l->scale,
                                       .grad = l->grad,
                                       .stride = dim,
                                       .bags = BAGS };
            parts[k][1] = (push_part){ .n = 0 };
            parts[k][2] = (push_part){ .n = 5000,
                                       .ids = l->ids + 77 * step,
                                       .grad = l->grad,
                                       .stride = dim,
                                       .bags = 5000 };
            a[k] = args_of(persia_table_get_config(t[k])->optimizer);
            a[k].step = step + 1;
            if (step == 2)
                a[k].weight_decay = a[k].max_grad_norm = a[k].max_norm = 0.5f;
            jobs[k] = (push_job){ .t = t[k],
                                  .parts = parts[k],
                                  .parts_n = 3,
                                  .optim = &a[k],
                                  .draw = step };
        }
        if (persia_table_push(s, jobs, 2))
            fail_msg("%s", persia_err_text());
    }
}

static void make(table **t, uint32_t kind, uint32_t stripes, float admission)
{
    for (uint32_t k = 0; k < 2; k++) {
        table_config c = config_of(k ? 64 : 17, kind);
        c.dtype = k;
        c.stripes = stripes;
        c.admission = admission;
        c.name[0] = (char)('a' + k);
        t[k] = table_of(&c);
    }
}

static void test_same_bits(void **state)
{
    static const unsigned threads[] = { 1, 2, 4 };
    static const uint32_t stripes[] = { 1, 4, 16, 64 };
    load *l = malloc(sizeof *l);
    rng r = { 9 };
    (void)state;
    assert_non_null(l);
    for (size_t i = 0; i < N; i++) {
        uint64_t top = (uint64_t)1 << rng_below(&r, 14);
        l->ids[i] = rng_below(&r, top);
        l->bag[i] = (uint32_t)rng_below(&r, BAGS);
        l->scale[i] = rng_float(&r);
    }
    for (size_t i = 0; i < N * WIDE; i++)
        l->grad[i] = rng_float(&r) * (i % 3 ? 1 : 1e-3f);
    for (uint32_t kind = 0; kind < OPTIM_KINDS; kind++) {
        dump first[2] = { { 0 } };
        for (size_t j = 0; j < 3; j += 1 + SANITIZED)
            for (size_t k = 0; k < 4; k += 1 + 2 * SANITIZED) {
                sched *s = pool_of(threads[j]);
                table *t[2];
                make(t, kind, stripes[k], kind % 2 ? 1 : 0.7f);
                train(s, t, l, (int)(j + k) % 2);
                for (int i = 0; i < 2; i++) {
                    dump d = dump_table(t[i]);
                    if (first[i].n) {
                        dump_equal(&first[i], &d, persia_optim_name(kind));
                        dump_free(&d);
                    } else {
                        first[i] = d;
                    }
                    persia_table_destroy(t[i]);
                }
                persia_sched_destroy(s);
            }
        for (int i = 0; i < 2; i++) {
            assert_true(first[i].n > 1000);
            dump_free(&first[i]);
        }
    }
    free(l);
}

/* Some pushes of distinct ids, of which the second half is new each time. */
static void push_distinct(sched *s, table *t, const load *l, int distinct,
                          int hinted)
{
    static float out[N * WIDE];
    static uint32_t hints[N];
    const uint32_t dim = persia_table_get_config(t)->dim;

    for (uint64_t step = 0; step < 3; step++) {
        const uint64_t *ids = l->ids + step * 1000;
        pull_job pull = { t, 2000, ids, out, dim, hints };
        assert_int_equal(persia_table_pull(s, &pull, 1), PERSIA_OK);
        push_part part = { .n = 2000, .ids = ids,
                           .rows = hinted ? hints : NULL,
                           .scale = step == 2 ? l->scale : NULL,
                           .grad = l->grad, .stride = dim, .bags = 2000 };
        optim_args a = args_of(persia_table_get_config(t)->optimizer);
        a.step = step + 1;
        push_job job = { .t = t, .parts = &part, .parts_n = 1, .optim = &a,
                         .draw = step, .distinct = distinct };
        assert_int_equal(persia_table_push(s, &job, 1), PERSIA_OK);
        assert_int_equal(job.touched + job.refused, 2000);
    }
}

static void test_distinct_ids(void **state)
{
    load *l = malloc(sizeof *l);
    rng r = { 10 };
    (void)state;
    assert_non_null(l);
    for (size_t i = 0; i < N; i++) {
        l->ids[i] = i * 7919;
        l->scale[i] = rng_float(&r);
    }
    for (size_t i = 0; i < N * WIDE; i++)
        l->grad[i] = rng_float(&r);
    sched *s = pool_of(2);
    for (uint32_t kind = 0; kind < OPTIM_KINDS; kind++) {
        dump first[2] = { { 0 } };
        for (int turn = 0; turn < 3; turn++) { /* no; yes; yes with hints */
            table *t[2];
            make(t, kind, 4, kind % 2 ? 1 : 0.7f);
            for (int i = 0; i < 2; i++) {
                push_distinct(s, t[i], l, turn > 0, turn == 2);
                dump d = dump_table(t[i]);
                if (turn) {
                    dump_equal(&first[i], &d, persia_optim_name(kind));
                    dump_free(&d);
                } else {
                    first[i] = d;
                }
                persia_table_destroy(t[i]);
            }
        }
        for (int i = 0; i < 2; i++)
            dump_free(&first[i]);
    }
    persia_sched_destroy(s);
    free(l);
}

/* Ids that are said to be distinct and are not: one row each all the same. */
static void test_ids_that_are_not_distinct(void **state)
{
    static uint64_t ids[N];
    static float grad[N * 16];
    sched *s = pool_of(2);
    table_config c = config_of(16, OPTIM_SGD);
    table *t = table_of(&c);
    table_stats stats;
    (void)state;
    for (size_t i = 0; i < N; i++)
        ids[i] = i % 100;
    push_part part = { .n = N, .ids = ids, .grad = grad, .stride = 16,
                       .bags = N };
    optim_args a = args_of(OPTIM_SGD);
    push_job job = { .t = t, .parts = &part, .parts_n = 1, .optim = &a,
                     .distinct = 1 };
    assert_int_equal(persia_table_push(s, &job, 1), PERSIA_OK);
    persia_table_get_stats(t, &stats);
    assert_int_equal(stats.rows, 100);
    assert_int_equal(job.created, 100);
    assert_int_equal(job.touched, N);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* A table of each policy, whose results depend on which row is made first. */
static table_config config_by_order(int kind)
{
    table_config c = config_of(4, OPTIM_ADAGRAD);
    static const uint32_t full[] = { FULL_RAISE, FULL_EVICT_LRU,
                                     FULL_EVICT_LFU, FULL_EVICT_NORM };
    c.stripes = 4;
    if (kind < 4) {
        c.full = full[kind];
        c.capacity = kind ? 3000 : 0;
        return c;
    }
    c.admit = ADMIT_SIGHTINGS;
    c.sightings = 2;
    c.sightings_kept = 1 << 16;
    return c;
}

/* Places are by a random key: nothing that is computed depends on it. */
static void test_keys_change_nothing(void **state)
{
    enum { IDS = 2000, PUSHES = 12, KEYS = 3 };
    static uint64_t ids[IDS];
    static float grad[IDS * 4];
    sched *s = pool_of(1);
    (void)state;
    for (size_t i = 0; i < IDS * 4; i++)
        grad[i] = (float)(i % 23) * 0.1f - 1;
    for (int kind = 0; kind < 5; kind++) {
        const optim_args a = args_of(OPTIM_ADAGRAD);
        dump rows[KEYS];
        for (int key = 0; key < KEYS; key++) {
            table_config c = config_by_order(kind);
            c.hash_key = key ? persia_ids_key() : 1;
            table *t = table_of(&c);
            rng r = { 5 };
            for (uint64_t k = 0; k < PUSHES; k++) {
                for (size_t i = 0; i < IDS; i++)
                    ids[i] = rng_below(&r, 1000 * (k + 1));
                (void)push_one(s, t, &a, IDS, ids, grad, k);
            }
            rows[key] = dump_table(t);
            assert_true(rows[key].n > 1000);
            if (key)
                dump_equal(&rows[key], &rows[0], "another key");
            persia_table_destroy(t);
        }
        for (int key = 0; key < KEYS; key++)
            dump_free(&rows[key]);
    }
    persia_sched_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_keys_change_nothing),
        cmocka_unit_test(test_distinct_ids),
        cmocka_unit_test(test_ids_that_are_not_distinct),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
