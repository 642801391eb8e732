/* Admission after several sightings, against counts kept by hand. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "ids/ids.h"
#include "tests/table/help.h"

enum { DIM = 1, MANY = 20000 };
static const float ones[MANY];

static table_config config_after(uint32_t sightings, uint64_t kept)
{
    table_config c = config_of(DIM, OPTIM_SGD);

    c.admit = ADMIT_SIGHTINGS;
    c.sightings = sightings;
    c.sightings_kept = kept;
    return c;
}

static push_job push_ids(sched *s, table *t, size_t n, const uint64_t *ids)
{
    optim_args a = args_of(OPTIM_SGD);

    return push_one(s, t, &a, n, ids, ones, 0);
}

/* Random batches of ids, some of them twice: the n-th push that has the id
 * makes its row. */
static void test_the_nth_push_makes_a_row(void **state)
{
    enum { IDS = 3000, BATCH = 700, STEPS = 40 };
    sched *s = pool_of(2);
    (void)state;
    for (uint32_t after = 2; after <= 5; after++) {
        table_config c = config_after(after, 1 << 20);
        static uint64_t ids[BATCH];
        uint32_t seen[IDS] = { 0 }, last[IDS] = { 0 };
        rng r = { after };
        c.stripes = after == 3 ? 1 : 8;
        table *t = table_of(&c);
        for (uint32_t step = 1; step <= STEPS; step++) {
            uint64_t created = 0, refused = 0;
            for (size_t i = 0; i < BATCH; i++) {
                const uint64_t id = rng_below(&r, IDS);
                ids[i] = id;
                if (last[id] == step)
                    continue;
                last[id] = step;
                seen[id]++;
                created += seen[id] == after;
                refused += seen[id] < after;
            }
            push_job job = push_ids(s, t, BATCH, ids);
            assert_int_equal(job.created, created);
            assert_int_equal(job.refused, refused);
        }
        for (uint64_t id = 0; id < IDS; id++)
            assert_int_equal(has_row(t, id), seen[id] >= after);
        persia_table_destroy(t);
    }
    persia_sched_destroy(s);
}

/* An update that is refused counts for nothing, and near a limit only the
 * rows that are really made count. */
static void test_near_a_capacity(void **state)
{
    sched *s = pool_of(1);
    optim_args a = args_of(OPTIM_SGD);
    table_config c = config_after(2, 1 << 20);
    uint64_t ids[200];
    push_job job;
    (void)state;
    c.capacity = 100;
    table *t = table_of(&c);
    ids_fill(ids, 0, 200);
    for (uint64_t first = 0; first < 2000; first += 200) {
        ids_fill(ids, first, 200); /* none gets a row */
        assert_int_equal(push_ids(s, t, 200, ids).refused, 200);
    }
    ids_fill(ids, 0, 200);
    assert_int_equal(push_try(s, t, &a, 101, ids, ones, 0, &job),
                     PERSIA_ECAPACITY);
    assert_int_equal(push_ids(s, t, 100, ids + 50).created, 100);
    for (uint64_t id = 0; id < 200; id++)
        assert_int_equal(has_row(t, id), id >= 50 && id < 150);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* Of more ids than it remembers it forgets the oldest; its size stays, and
 * counts in the limit. */
static void test_the_filter_is_bounded(void **state)
{
    enum { KEPT = 1 << 16 };
    static uint64_t ids[MANY];
    sched *s = pool_of(1);
    mem_limit limit;
    table_config c = config_after(2, KEPT);
    table *t;
    (void)state;
    persia_mem_limit_init(&limit, 3 << 20);
    c.limit = &limit;
    t = table_of(&c);
    const uint64_t bytes = stats_of(t).bytes;
    assert_in_range(bytes, KEPT * 4, KEPT * 4 + 4096);
    assert_in_range(atomic_load(&limit.used), KEPT * 4, KEPT * 4 + 4096);
    for (uint64_t first = 0; first < 50 * MANY; first += MANY) {
        ids_fill(ids, first, MANY);
        /* 24 bits that are alike, in the same line: nearly never */
        assert_true(push_ids(s, t, MANY, ids).created <= 3);
    }
    ids_fill(ids, 49 * MANY, MANY);
    assert_true(push_ids(s, t, MANY, ids).created > MANY * 99 / 100);
    ids_fill(ids, 0, MANY);
    assert_true(push_ids(s, t, MANY, ids).created <= 3);
    assert_int_equal(persia_table_clear(t), PERSIA_OK);
    assert_int_equal(stats_of(t).bytes, bytes);
    ids_fill(ids, 0, MANY);
    assert_int_equal(push_ids(s, t, MANY, ids).created, 0);
    persia_table_destroy(t);
    c.sightings_kept = 1 << 20; /* 4 MiB */
    assert_int_equal(persia_table_create(&c, &t), PERSIA_ELIMIT);
    assert_int_equal(atomic_load(&limit.used), 0);
    persia_mem_limit_free(&limit);
    persia_sched_destroy(s);
}

/* A cut has them as they were; tables of a part of the slots take theirs. */
static void test_sightings_of_a_cut(void **state)
{
    enum { N = 5000, PARTS = 3 };
    static uint64_t ids[N];
    static uint32_t words[1 << 18];
    sched *s = pool_of(1);
    table_config c = config_after(3, 1 << 18);
    table *t = table_of(&c), *part[PARTS];
    table_cut *cut;
    uint32_t created = 0;
    (void)state;
    ids_fill(ids, 0, N);
    push_ids(s, t, N, ids);
    push_ids(s, t, N / 2, ids);
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    push_ids(s, t, N, ids); /* after the moment */
    assert_int_equal(persia_table_sightings(&c), (1 << 18) / IDS_SLOTS);
    for (uint32_t from = 0, n = 1; from < IDS_SLOTS; from += n, n *= 3) {
        n = n < IDS_SLOTS - from ? n : IDS_SLOTS - from;
        assert_int_equal(persia_table_cut_sightings(
                             cut, from, n, words + from * (1 << 18) /
                                                       IDS_SLOTS),
                         PERSIA_OK);
        push_ids(s, t, N / 2, ids + N / 2); /* also while it is read */
        if (n == 9)
            assert_int_equal(persia_table_clear(t), PERSIA_OK);
    }
    for (uint32_t i = 0; i < PARTS; i++) {
        c.first_slot = shard_slot(i, PARTS);
        c.slots = shard_slot(i + 1, PARTS) - c.first_slot;
        part[i] = table_of(&c);
        persia_table_restore_sightings(part[i], 0, IDS_SLOTS, words);
    }
    persia_table_cut_stop(cut);
    assert_int_equal(persia_table_cut_sightings(cut, 0, 1, words),
                     PERSIA_EINTR);
    persia_table_cut_end(cut);
    assert_int_equal(persia_table_clear(t), PERSIA_OK);
    push_ids(s, t, N, ids);
    push_ids(s, t, N, ids);
    for (uint64_t id = 0; id < N; id++) {
        table *own = part[hash_shard(id_hash(id), PARTS)];
        created += (uint32_t)push_ids(s, own, 1, &id).created;
        assert_int_equal(has_row(own, id), id < N / 2);
    }
    assert_int_equal(created, N / 2);
    for (uint32_t i = 0; i < PARTS; i++)
        persia_table_destroy(part[i]);
    /* and an exchange */
    c.first_slot = c.slots = 0;
    part[0] = table_of(&c);
    assert_int_equal(persia_table_exchange(part[0], t), PERSIA_OK);
    assert_int_equal(push_ids(s, part[0], N, ids).created, N);
    persia_table_destroy(part[0]);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* Bytes of this process in memory. */
static size_t resident(void)
{
    unsigned long size = 0, pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    char line[256];

    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    fclose(f);
    char *end;
    size = strtoul(line, &end, 10);
    pages = strtoul(end, NULL, 10);
    assert_true(size > 0 && pages > 0);
    return pages * 4096;
}

/* A cut of a large filter touches none of it. */
static void test_a_cut_copies_no_filter(void **state)
{
    enum { KEPT = 1 << 25, BYTES = KEPT * 4, N = 1000 };
    static uint64_t ids[N];
    sched *s = pool_of(1);
    table_config c = config_after(2, KEPT);
    table *t = table_of(&c);
    table_cut *cut;
    (void)state;
    /* Some systems make any page huge, unasked. */
    assert_int_equal(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
    ids_fill(ids, 0, N);
    push_ids(s, t, N, ids);
    const size_t before = resident();
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    push_ids(s, t, N, ids);
    ids_fill(ids, N, N);
    push_ids(s, t, N, ids);
    assert_true(resident() < before + BYTES / 4);
    persia_table_cut_end(cut);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

static void test_options(void **state)
{
    static const uint64_t wrong[][2] = {
        { 0, 100 }, { 1, 100 }, { 256, 100 }, { 2, 0 },
        { 2, ((uint64_t)1 << 36) + 1 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        table_config c = config_after((uint32_t)wrong[i][0], wrong[i][1]);
        table *t;
        assert_int_equal(persia_table_create(&c, &t), PERSIA_EARG);
        assert_non_null(strstr(persia_err_text(), "table test"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_nth_push_makes_a_row),
        cmocka_unit_test(test_near_a_capacity),
        cmocka_unit_test(test_the_filter_is_bounded),
        cmocka_unit_test(test_sightings_of_a_cut),
        cmocka_unit_test(test_a_cut_copies_no_filter),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
