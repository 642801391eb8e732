/* batch_index against plain loops; index_pool: who frees what, and when. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "tests/ids/chosen.h"

enum { UNITS = 3, SEGMENTS = UNITS + 1, MOST = 9000 };

typedef struct batch {
    index_segment segments[SEGMENTS];
    uint32_t tables[UNITS];
    uint64_t ids[SEGMENTS][MOST];
    index_batch b;
} batch;

/* Two features of the first table, one of the others. */
static void make(batch *x, uint64_t seed, uint64_t vocabulary)
{
    static const size_t sizes[SEGMENTS] = {MOST, 5, 0, 4097};
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        for (size_t k = 0; k < sizes[i]; k++)
            x->ids[i][k] = id_hash(seed + k) % vocabulary;
        x->segments[i] = (index_segment){i ? i - 1 : 0, 7 * i, sizes[i],
                                         x->ids[i]};
    }
    for (uint32_t u = 0; u < UNITS; u++)
        x->tables[u] = 10 + u;
    x->b = (index_batch){x->segments, SEGMENTS, x->tables, UNITS};
}

/* Each id of the batch is at its place, and each distinct id is there once,
 * at its shard, and its first occurrence is marked. */
static void check_index(const batch_index *x, const batch *b)
{
    size_t n = index_distinct(x);
    uint8_t *first = calloc(n + 1, 1);
    size_t seen = 0;
    for (size_t i = 0; i < x->chunks_n; i++) {
        const index_chunk *c = &x->chunks[i];
        seen += c->n;
        for (uint32_t cell = 0; cell < x->cells; cell++) {
            size_t base = x->base[(size_t)c->unit * x->cells + cell];
            for (uint32_t k = c->start[cell]; k < c->start[cell + 1]; k++) {
                size_t at = base + (c->place[k] & ~INDEX_FIRST);
                uint64_t id = b->ids[c->segment][c->first + c->order[k]];
                assert_int_equal(x->ids[at], id);
                assert_int_equal(cell / x->subs,
                                 hash_shard(id_hash(id), x->shards));
                assert_int_equal(first[at], !(c->place[k] & INDEX_FIRST));
                first[at] = 1;
            }
        }
    }
    assert_int_equal(seen, x->ids_n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(first[i], 1);
    for (size_t i = 0; i < x->segments_n; i++)
        assert_int_equal(x->segments[i].job, 7 * i);
    free(first);
}

static void each_id_has_its_place(void **state)
{
    (void)state;
    static batch b;
    index_pool pool;
    sched *s;
    persia_index_pool_init(&pool, 1 << 30);
    assert_int_equal(persia_sched_create(3, &s), PERSIA_OK);
    for (uint32_t shards = 1; shards < 70; shards *= 4) {
        for (uint64_t vocabulary = 1; vocabulary < 1000000;
             vocabulary *= 900) {
            batch_index *x = persia_index_pool_new(&pool);
            make(&b, shards, vocabulary);
            assert_int_equal(persia_batch_index_make(x, s, shards, &b.b),
                             PERSIA_OK);
            check_index(x, &b);
            assert_null(x->hints);
            assert_int_equal(persia_batch_index_hint(x), PERSIA_OK);
            for (size_t i = 0; i < index_distinct(x); i++)
                assert_int_equal(x->hints[i], UINT32_MAX);
            persia_batch_index_put(x);
        }
    }
    persia_index_pool_free(&pool);
    persia_sched_destroy(s);
}

/* Places that searches look at in the hash tables of large cells. */
static uint64_t probes_of(const batch_index *x, size_t *entries)
{
    uint64_t probes = 0;
    for (size_t cell = 0; cell < (size_t)x->units * x->cells; cell++) {
        const size_t n = x->region[cell + 1] - x->region[cell];
        const uint32_t *entry = x->entries + x->table_at[cell];
        size_t room = 16;
        while (room < 2 * n)
            room *= 2;
        for (size_t at = 0; room > 8192 && at < room; at++) {
            if (!entry[at])
                continue;
            const uint64_t id = x->found[x->region[cell] + entry[at] - 1];
            const size_t home = place_home(id_place(id, x->key), room);
            probes += 1 + (at + room - home) % room;
            ++*entries;
        }
    }
    return probes;
}

/* With the hash known and not the key. */
static void ids_that_were_chosen_to_collide(void **state)
{
    enum { N = 40000 };
    static uint64_t ids[N];
    (void)state;
    index_pool pool;
    sched *s;
    persia_index_pool_init(&pool, 1 << 30);
    assert_int_equal(persia_sched_create(1, &s), PERSIA_OK);
    for (int kind = 0; kind < CHOSEN_KINDS; kind++) {
        const uint32_t table = 0;
        const index_segment segment = {.n = N, .ids = ids};
        const index_batch b = {&segment, 1, &table, 1};
        batch_index *x = persia_index_pool_new(&pool);
        size_t entries = 0;
        for (uint32_t i = 0; i < N; i++)
            ids[i] = chosen_id(kind, i);
        assert_int_equal(persia_batch_index_make(x, s, 1, &b), PERSIA_OK);
        assert_int_equal(index_distinct(x), N);
        const uint64_t probes = probes_of(x, &entries);
        assert_true(entries == N); /* all are in one large cell */
        assert_in_range(probes, N, 16 * N); /* random ids: 1.3 N */
        persia_batch_index_put(x);
    }
    persia_index_pool_free(&pool);
    persia_sched_destroy(s);
}

static void threads_and_keys_change_nothing(void **state)
{
    (void)state;
    static batch b;
    index_pool pool;
    batch_index *x[2];
    sched *s[2];
    persia_index_pool_init(&pool, 1 << 30);
    make(&b, 1, 5000);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(persia_sched_create(1 + 3 * (unsigned)i, &s[i]),
                         PERSIA_OK);
        x[i] = persia_index_pool_new(&pool);
        x[i]->key = persia_ids_key();
        assert_int_equal(persia_batch_index_make(x[i], s[i], 3, &b.b),
                         PERSIA_OK);
    }
    assert_int_equal(index_distinct(x[0]), index_distinct(x[1]));
    assert_memory_equal(x[0]->ids, x[1]->ids,
                        index_distinct(x[0]) * sizeof(uint64_t));
    for (int i = 0; i < 2; i++) {
        persia_batch_index_put(x[i]);
        persia_sched_destroy(s[i]);
    }
    persia_index_pool_free(&pool);
}

/* ---- pool ---- */

static sched *one_thread;

static batch_index *indexed(index_pool *pool, uint64_t seed)
{
    static batch b;
    batch_index *x = persia_index_pool_new(pool);
    make(&b, seed, 5000);
    assert_int_equal(persia_batch_index_make(x, one_thread, 2, &b.b),
                     PERSIA_OK);
    return x;
}

static int pool_setup(void **state)
{
    (void)state;
    return persia_sched_create(1, &one_thread);
}

static int pool_teardown(void **state)
{
    (void)state;
    persia_sched_destroy(one_thread);
    return 0;
}

static void an_index_waits_for_its_ticket_once(void **state)
{
    (void)state;
    index_pool pool;
    persia_index_pool_init(&pool, 1 << 30);
    batch_index *x = indexed(&pool, 1);
    persia_index_pool_wait(&pool, 5, x);
    assert_null(persia_index_pool_take(&pool, 4));
    assert_null(persia_index_pool_take(&pool, 5 + INDEX_POOL_WAITS));
    assert_ptr_equal(persia_index_pool_take(&pool, 5), x);
    assert_null(persia_index_pool_take(&pool, 5)); /* a second backward */
    batch_index *of_update = persia_batch_index_get(x);
    persia_batch_index_put(x);
    assert_int_equal(pool.live, 1);
    persia_batch_index_put(of_update);
    assert_int_equal(pool.live, 0);
    assert_ptr_equal(indexed(&pool, 2), x); /* its memory is used again */
    persia_batch_index_put(x);
    persia_batch_index_put(NULL);
    persia_index_pool_free(&pool);
}

static void forwards_without_backward_go(void **state)
{
    (void)state;
    index_pool pool;
    persia_index_pool_init(&pool, 1 << 20);
    for (uint64_t t = 1; t <= 3 * INDEX_POOL_WAITS; t++)
        persia_index_pool_wait(&pool, t, indexed(&pool, t));
    assert_true(pool.bytes <= pool.most);
    assert_true(pool.live >= 1);
    assert_null(persia_index_pool_take(&pool, 2 * INDEX_POOL_WAITS));
    batch_index *x = persia_index_pool_take(&pool, 3 * INDEX_POOL_WAITS);
    assert_non_null(x); /* the newest stays */
    persia_index_pool_forget(&pool);
    assert_int_equal(pool.live, 1);
    persia_batch_index_put(x);
    persia_index_pool_free(&pool);
}

static void the_bound_counts_what_updates_hold(void **state)
{
    (void)state;
    enum { N = 8 };
    index_pool pool;
    batch_index *held[N];
    persia_index_pool_init(&pool, 1);
    for (int i = 0; i < N; i++) {
        held[i] = indexed(&pool, (uint64_t)i);
        persia_index_pool_wait(&pool, (uint64_t)i + 1,
                               persia_batch_index_get(held[i]));
        assert_null(persia_index_pool_take(&pool, (uint64_t)i + 1));
    }
    assert_int_equal(pool.live, N);
    assert_true(pool.bytes > N * MOST * sizeof(uint64_t));
    for (int i = 0; i < N; i++)
        persia_batch_index_put(held[i]);
    assert_int_equal(pool.live, 0);
    assert_int_equal(pool.bytes, 0);
    persia_index_pool_free(&pool);
}

static void a_ticket_that_comes_late_keeps_its_index(void **state)
{
    (void)state;
    index_pool pool;
    persia_index_pool_init(&pool, 1 << 30);
    persia_index_pool_wait(&pool, 9, indexed(&pool, 9));
    persia_index_pool_wait(&pool, 8, indexed(&pool, 8));
    batch_index *x = persia_index_pool_take(&pool, 8);
    assert_non_null(x);
    persia_batch_index_put(x);
    /* One of the same slot takes its place. */
    persia_index_pool_wait(&pool, 9 + INDEX_POOL_WAITS, indexed(&pool, 1));
    assert_null(persia_index_pool_take(&pool, 9));
    assert_int_equal(pool.live, 1);
    persia_index_pool_free(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_id_has_its_place),
        cmocka_unit_test(threads_and_keys_change_nothing),
        cmocka_unit_test(ids_that_were_chosen_to_collide),
        cmocka_unit_test(an_index_waits_for_its_ticket_once),
        cmocka_unit_test(forwards_without_backward_go),
        cmocka_unit_test(the_bound_counts_what_updates_hold),
        cmocka_unit_test(a_ticket_that_comes_late_keeps_its_index),
    };
    return cmocka_run_group_tests(tests, pool_setup, pool_teardown);
}
