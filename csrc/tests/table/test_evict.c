/* Policies of eviction, in tables of one window: there the row with the
 * highest score goes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/table/help.h"

static const float ones[4096] = { 1 };

/* By score: the row with the fewest updates goes. */
static table *table_with(uint32_t full, uint64_t capacity)
{
    table_config c = config_of(1, OPTIM_SGD);

    snprintf(c.evict_score, sizeof c.evict_score, "-count");
    c.full = full;
    c.capacity = capacity;
    return table_of(&c);
}

static push_job push_ids(sched *s, table *t, size_t n, const uint64_t *ids)
{
    optim_args a = args_of(OPTIM_SGD);

    return push_one(s, t, &a, n, ids, ones, 0);
}

static void push_id(sched *s, table *t, uint64_t id, int times)
{
    for (int i = 0; i < times; i++)
        push_ids(s, t, 1, &id);
}

static void test_lfu(void **state)
{
    sched *s = pool_of(1);
    table *t = table_with(FULL_EVICT_LFU, 4);
    (void)state;
    push_id(s, t, 1, 5);
    push_id(s, t, 2, 2);
    push_id(s, t, 3, 3);
    push_id(s, t, 4, 4);
    push_id(s, t, 5, 6); /* instead of 2, the rarest */
    assert_false(has_row(t, 2));
    push_id(s, t, 6, 1); /* instead of 3 */
    push_id(s, t, 7, 1); /* of 6, though that is the youngest */
    assert_false(has_row(t, 3));
    assert_false(has_row(t, 6));
    for (uint64_t id = 1; id <= 7; id++)
        assert_int_equal(has_row(t, id),
                         id == 1 || id == 4 || id == 5 || id == 7);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* Clocks of rows have 32 bits: a row that nothing touched for more than half
 * of them is the oldest, not the newest. */
static void test_lru_of_very_old_rows(void **state)
{
    static const uint64_t far[] = { 1000, UINT64_C(1) << 31,
                                    (UINT64_C(1) << 31) + 1000,
                                    (UINT64_C(1) << 32) - (1 << 21) };
    sched *s = pool_of(1);
    (void)state;
    for (size_t i = 0; i < sizeof far / sizeof *far; i++) {
        table *t = table_with(FULL_EVICT_LRU, 3);
        push_id(s, t, 1, 1);
        persia_table_set_clock(t, far[i]);
        push_id(s, t, 2, 1);
        push_id(s, t, 3, 1);
        push_id(s, t, 4, 1);
        for (uint64_t id = 1; id <= 4; id++)
            assert_int_equal(has_row(t, id), id != 1);
        persia_table_destroy(t);
    }
    persia_sched_destroy(s);
}

/* With a half-life old updates count less. */
static void test_lfu_decays(void **state)
{
    sched *s = pool_of(1);
    (void)state;
    for (int decays = 0; decays < 2; decays++) {
        table_config c = config_of(1, OPTIM_SGD);
        c.full = FULL_EVICT_LFU;
        c.capacity = 2;
        c.evict_updates = decays ? 10 : 0;
        table *t = table_of(&c);
        push_id(s, t, 1, 20);
        push_id(s, t, 2, 1);
        for (uint64_t id = 100; id < 160; id++) /* takes the place of 2 */
            push_id(s, t, id, 1);
        push_id(s, t, 3, 2);
        push_id(s, t, 4, 1);
        /* 20 updates, 60 pushes ago: below one of the last push or not */
        assert_int_equal(has_row(t, 1), !decays);
        persia_table_destroy(t);
    }
    persia_sched_destroy(s);
}

static void test_norm(void **state)
{
    sched *s = pool_of(1);
    table *t = table_with(FULL_EVICT_NORM, 4);
    const uint64_t ids[] = { 1, 2, 3, 4 };
    const float values[] = { 3, -1, 2, -4 };
    (void)state;
    assert_int_equal(persia_table_set(t, 4, ids, values, NULL), PERSIA_OK);
    push_id(s, t, 5, 1);
    assert_false(has_row(t, 2));
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

static uint64_t test_clock(void *ctx)
{
    return *(uint64_t *)ctx;
}

/* Rows go below the capacity, too, and no call looks at more slots than 64
 * for 16 new rows. */
static void test_ttl(void **state)
{
    enum { N = 1000, LIFE = 5 };
    sched *s = pool_of(1);
    uint64_t seconds = 1000, ids[N];
    persia_system system = *persia_system_get();
    (void)state;
    system.ctx = &seconds;
    system.seconds = test_clock;
    persia_system_install(&system);
    for (int by_clock = 0; by_clock < 2; by_clock++) {
        table_config c = config_of(1, OPTIM_SGD);
        c.full = FULL_EVICT_TTL;
        c.evict_updates = by_clock ? 0 : LIFE;
        c.evict_seconds = by_clock ? LIFE * 10 : 0;
        table *t = table_of(&c);
        for (uint64_t step = 0; step < 60; step++, seconds += 10) {
            ids_fill(ids, step * N, N);
            ids[N - 1] = 7; /* is touched by each push, and stays */
            push_job job = push_ids(s, t, N, ids);
            if (job.created != N - 1 || job.refused)
                fail_msg("%llu created", (unsigned long long)job.created);
            for (uint64_t k = 0; k < N && k <= step * N; k += 99)
                assert_true(has_row(t, (step - (step > 3 ? 3 : step)) * N +
                                           k % (N - 1)));
        }
        table_stats stats = stats_of(t);
        assert_true(has_row(t, 7));
        assert_int_equal(stats.rows + stats.evicted, stats.created);
        /* LIFE pushes of N rows live; a third more wait for the hand */
        assert_in_range(stats.rows, LIFE * (N - 1), (LIFE + 3) * N);
        assert_true(stats.candidates <= 4 * stats.created);
        persia_table_destroy(t);
    }
    persia_sched_destroy(s);
    persia_system_install(NULL);
}

/* At capacity the row with the least time left goes. */
static void test_ttl_at_capacity(void **state)
{
    sched *s = pool_of(1);
    table_config c = config_of(1, OPTIM_SGD);
    (void)state;
    c.full = FULL_EVICT_TTL;
    c.capacity = 3;
    c.evict_updates = 1000;
    table *t = table_of(&c);
    for (uint64_t id = 1; id <= 3; id++)
        push_id(s, t, id, 1);
    push_id(s, t, 1, 1);
    push_id(s, t, 4, 1);
    for (uint64_t id = 1; id <= 4; id++)
        assert_int_equal(has_row(t, id), id != 2);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* Odd counts first, then the smallest norm. */
static void my_score(void *ctx, const evict_rows *rows, float *out)
{
    *(int *)ctx += 1;
    for (size_t i = 0; i < rows->n; i++)
        out[i] = ((int)rows->count[i] % 2 ? 1000.0f : 0) - rows->norm[i];
}

static void test_a_function(void **state)
{
    sched *s = pool_of(1);
    table_config c = config_of(1, OPTIM_SGD);
    const uint64_t ids[] = { 1, 2, 3, 4 };
    const float values[] = { 30, 10, 20, 40 };
    int calls = 0;
    (void)state;
    c.full = FULL_EVICT_SCORE;
    c.capacity = 4;
    c.score = my_score;
    c.score_ctx = &calls;
    table *t = table_of(&c);
    assert_int_equal(persia_table_set(t, 4, ids, values, NULL), PERSIA_OK);
    push_id(s, t, 2, 1); /* its count is even */
    push_id(s, t, 5, 1);
    assert_false(has_row(t, 3));
    assert_int_equal(calls, 1);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

static void test_an_expression(void **state)
{
    static const struct {
        const char *score;
        uint64_t goes;
    } cases[] = {
        { "age", 2 },
        { "-age", 3 },
        { "norm", 1 },
        { " 2*norm - 1.5e1 * count", 1 },
        { "count", 3 },
        { "-(count)", 2 },
        { "max(count, age) / 3", 2 },
        { "min(norm, 25) + sqrt(count) * 0.001", 1 },
        { "0 / 0 * age + 1", 1 }, /* NaN, all alike: the first slot */
        { "1 - -norm", 1 },
        { "20 / (norm - 20) - 1e9 * (count - 1)", 2 }, /* infinite for 2 */
    };
    sched *s = pool_of(1);
    const uint64_t ids[] = { 1, 2, 3 };
    const float values[] = { 30, 20, 10 };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        table_config c = config_of(1, OPTIM_SGD);
        optim_args a = args_of(OPTIM_SGD);
        c.full = FULL_EVICT_SCORE;
        c.capacity = 3;
        snprintf(c.evict_score, sizeof c.evict_score, "%s", cases[k].score);
        table *t = table_of(&c);
        a.lr = 0;
        for (int i = 0; i < 3; i++) /* then ages 3, 5, 1 and counts 2, 1, 3 */
            assert_int_equal(
                persia_table_set(t, 1, ids + i, values + i, NULL), PERSIA_OK);
        push_one(s, t, &a, 1, ids, ones, 0);
        for (int i = 0; i < 2; i++)
            push_one(s, t, &a, 1, ids + 2, ones, 0);
        push_id(s, t, 4, 1);
        for (uint64_t id = 1; id <= 3; id++)
            if (has_row(t, id) != (id != cases[k].goes))
                fail_msg("'%s': id %llu", cases[k].score,
                         (unsigned long long)id);
        persia_table_destroy(t);
    }
    persia_sched_destroy(s);
}

static void test_wrong_expressions(void **state)
{
    static const struct {
        const char *score, *says;
    } cases[] = {
        { "", "column 1:" },          { "age +", "column 6:" },
        { "ages", "column 1:" },      { "age age", "column 5:" },
        { "(age", "column 5: a ')'" }, { "min(age)", "column 8: a ','" },
        { "age ** 2", "column 6:" },  { "1.2.3", "column 4:" },
        { "1e", "column 3:" },        { "1e99", "column 5:" },
        { ".", "column 1:" },         { "sqrt age", "column 6: a '('" },
        { "age)", "column 4:" },      { "\xff", "column 1:" },
    };
    evictor out;
    char deep[200];
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        assert_int_equal(persia_evict_compile(cases[k].score, &out),
                         PERSIA_EARG);
        if (!strstr(persia_err_text(), cases[k].says))
            fail_msg("'%s': %s", cases[k].score, persia_err_text());
    }
    memset(deep, '(', 150);
    deep[150] = 0;
    assert_int_equal(persia_evict_compile(deep, &out), PERSIA_EARG);
    memset(deep, '-', 150);
    assert_int_equal(persia_evict_compile(deep, &out), PERSIA_EARG);
    for (int i = 0; i < 99; i++)
        memcpy(deep + 2 * i, "1+", 3);
    deep[197] = 0;
    assert_int_equal(persia_evict_compile(deep, &out), PERSIA_EARG);
}

/* Fields of rows are in a cut and are restored; a table that has none of them
 * in its files begins with rows touched once. */
static void test_fields_are_saved(void **state)
{
    sched *s = pool_of(1);
    table *t = table_with(FULL_EVICT_SCORE, 10), *u, *plain;
    (void)state;
    for (uint64_t id = 1; id <= 10; id++)
        push_id(s, t, id, 11 - (int)id);
    dump d = dump_table(t);
    float count;
    for (size_t i = 0; i < d.n; i++) {
        memcpy(&count, &d.fields[i], sizeof count);
        assert_true(count == (float)(11 - d.ids[i]));
    }
    for (int kept = 0; kept < 2; kept++) {
        u = table_with(FULL_EVICT_SCORE, 10);
        assert_int_equal(persia_table_restore(u, d.n, d.ids, d.vectors,
                                              d.state, d.clocks,
                                              kept ? d.fields : NULL), 0);
        persia_table_set_clock(u, d.clock);
        dump e = dump_table(u);
        if (kept)
            dump_equal(&d, &e, "restored");
        memcpy(&count, &e.fields[3], sizeof count);
        assert_true(count == (kept ? 7 : 1));
        push_id(s, u, 99, 1);
        if (kept)
            assert_false(has_row(u, 10));
        dump_free(&e);
        persia_table_destroy(u);
    }
    plain = table_with(FULL_EVICT_LRU, 10);
    assert_int_equal(stats_of(t).row_bytes, stats_of(plain).row_bytes + 4);
    persia_table_destroy(plain);
    dump_free(&d);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lfu),
        cmocka_unit_test(test_lru_of_very_old_rows),
        cmocka_unit_test(test_lfu_decays),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_ttl),
        cmocka_unit_test(test_ttl_at_capacity),
        cmocka_unit_test(test_a_function),
        cmocka_unit_test(test_an_expression),
        cmocka_unit_test(test_wrong_expressions),
        cmocka_unit_test(test_fields_are_saved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
