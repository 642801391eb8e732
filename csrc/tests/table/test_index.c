/* index: insert, find, remove and growth against a plain array; hashes made
 * to collide.  The only test of the table that looks inside. */
#include <stdlib.h>
#include <string.h>

#include "table/index.h"
#include "tests/ids/chosen.h"
#include "tests/table/help.h"

/* Rows are ids alone; slot i belongs to id i of the array. */
typedef struct world {
    mem_limit limit;
    mem_blocks blocks;
    row_index index;
    uint64_t *ids; /* [n] */
    uint8_t *in;   /* [n] whether it is in the index */
    size_t n;
    uint64_t key;
    int deepens;   /* the directory, as rows are added */
} world;

static row_store rows_of(const world *w)
{
    return (row_store){ (const char *)w->ids, sizeof w->ids[0] };
}

static world *world_make(size_t n)
{
    world *w = calloc(1, sizeof *w);

    assert_non_null(w);
    persia_mem_blocks_init(&w->blocks, &w->limit);
    w->key = persia_ids_key();
    assert_int_equal(row_index_init(&w->index, &w->blocks, w->key), PERSIA_OK);
    w->n = n;
    w->deepens = 1;
    w->ids = calloc(n, sizeof *w->ids);
    w->in = calloc(n, 1);
    assert_true(w->ids && w->in);
    return w;
}

static void world_free(world *w)
{
    row_index_free(&w->index);
    persia_mem_blocks_free(&w->blocks);
    assert_int_equal(w->limit.used, 0);
    free(w->ids);
    free(w->in);
    free(w);
}

static void insert(world *w, size_t i)
{
    uint64_t hash = id_place(w->ids[i], w->key);

    if (persia_mem_blocks_reserve(&w->blocks, row_index_bytes(1)))
        fail_msg("%s", persia_err_text());
    if (w->deepens)
        row_index_deepen(&w->index, i + 1);
    row_index_insert(&w->index, rows_of(w), hash, (uint32_t)i);
    persia_mem_blocks_unreserve(&w->blocks, row_index_bytes(1));
    w->in[i] = 1;
}

static void drop(world *w, size_t i)
{
    row_index_remove(&w->index, id_place(w->ids[i], w->key), (uint32_t)i);
    w->in[i] = 0;
}

static void check(const world *w, size_t i)
{
    uint64_t id = w->ids[i], hash = id_place(id, w->key);
    int64_t slot = row_index_find(&w->index, rows_of(w), hash, id);
    int64_t likely = bucket_likely(row_index_home(&w->index, hash), hash);

    if (slot != (w->in[i] ? (int64_t)i : SLOT_NONE))
        fail_msg("id %llu: slot %lld instead of %lld", (unsigned long long)id,
                 (long long)slot, w->in[i] ? (long long)i : -1);
    if (w->in[i] && likely == SLOT_NONE)
        fail_msg("id %llu: its bucket says it is not there",
                 (unsigned long long)id);
}

static void check_all(const world *w)
{
    for (size_t i = 0; i < w->n; i++)
        check(w, i);
}

static size_t rows_in(const world *w)
{
    size_t n = 0;

    for (size_t i = 0; i < w->n; i++)
        n += w->in[i];
    return n;
}

/* What pages say of themselves agrees with what is in them. */
static void check_pages(const world *w)
{
    const row_index *ix = &w->index;
    size_t total = 0;

    for (size_t i = 0; i < (size_t)1 << ix->depth;) {
        const page_ref *ref = &ix->directory[i];
        const page *p = ref->page;
        uint32_t rows = 0;
        assert_true(p->depth <= ix->depth && p->rows < p->grow_at + 1);
        for (uint32_t b = 0; b < p->buckets; b++)
            rows += (uint32_t)__builtin_popcount(
                ~bucket_match(&p->bucket[b], 0) & 0xFFF);
        assert_int_equal(rows, p->rows);
        for (size_t k = 0; k < (size_t)1 << (ix->depth - p->depth); k++) {
            assert_ptr_equal(ref[k].page, p);
            assert_int_equal(ref[k].buckets, p->buckets);
            assert_int_equal(ref[k].depth, p->depth);
        }
        i += (size_t)1 << (ix->depth - p->depth);
        total += rows;
    }
    assert_int_equal(total, rows_in(w));
}

/* Fills with ids of several shapes; every one is found at every size. */
static void test_growth(void **state)
{
    (void)state;
    for (int shape = 0; shape < 4; shape++) {
        const size_t n = SANITIZED ? 60000 : 150000;
        world *w = world_make(n);
        size_t next_check = 1;
        for (size_t i = 0; i < n; i++) {
            uint64_t k = i;
            w->ids[i] = shape == 0   ? k
                        : shape == 1 ? k << 40 | 5
                        : shape == 2 ? UINT64_MAX - k
                                     : id_hash(k * k + 1);
            insert(w, i);
            if (i + 1 == next_check) {
                for (size_t j = 0; j <= i; j++)
                    check(w, j);
                next_check = next_check * 3 / 2 + 1;
            }
        }
        check_all(w);
        check_pages(w);
        for (uint64_t k = 0; k < 10000; k++) { /* ids that are not there */
            uint64_t id = id_hash(k) ^ 0xDEADBEEF00000000u;
            assert_int_equal(row_index_find(&w->index, rows_of(w),
                                            id_place(id, w->key), id),
                             SLOT_NONE);
        }
        world_free(w);
    }
}

/* Buckets that a search for an entry looks at. */
static uint32_t probes_of(const world *w, size_t i)
{
    const uint64_t hash = id_place(w->ids[i], w->key);
    const page_ref *ref = row_index_page(&w->index, hash);
    uint32_t at = page_home(hash, ref->depth, ref->buckets);

    for (uint32_t n = 1; n <= ref->buckets; n++) {
        const bucket *b = &ref->page->bucket[at];
        for (uint32_t k = 0; k < BUCKET_ENTRIES; k++)
            if (b->tag[k] && b->slot[k] == i)
                return n;
        at = at + 1 == ref->buckets ? 0 : at + 1;
    }
    fail_msg("entry %zu is not there", i);
    return 0;
}

/* Whatever ids are chosen with the hash known and not the key. */
static void test_chosen_ids(void **state)
{
    enum { N = 40000 };
    (void)state;
    for (int kind = 0; kind < CHOSEN_KINDS; kind++) {
        world *w = world_make(N);
        uint64_t probes = 0;
        uint32_t largest = 0;
        for (uint32_t i = 0; i < N; i++) {
            w->ids[i] = chosen_id(kind, i);
            insert(w, i);
        }
        check_all(w);
        check_pages(w);
        for (size_t i = 0; i < N; i++) {
            const uint64_t hash = id_place(w->ids[i], w->key);
            const page *p = row_index_page(&w->index, hash)->page;
            largest = p->rows > largest ? p->rows : largest;
            probes += probes_of(w, i);
        }
        assert_in_range(probes, N, 8 * N); /* random ids: 1.1 N */
        assert_in_range(largest, 1, N);
        assert_in_range(w->index.depth, 0, 4);
        world_free(w);
    }
}

/* Bytes a row stay within what load 0.55 .. 0.70 and slack allow, at every
 * size from 20,000 on. */
static void test_bytes_a_row(void **state)
{
    const size_t n = SANITIZED ? 100000 : 500000;
    world *w = world_make(n);
    double worst = 0;
    (void)state;
    for (size_t i = 0; i < n; i++) {
        w->ids[i] = i;
        insert(w, i);
        if (i > 20000 && i % 1000 == 0) {
            double each = (double)persia_mem_blocks_bytes(&w->blocks) /
                          (double)i;
            worst = each > worst ? each : worst;
        }
    }
    /* 64 / 12 bytes an entry: 7.6 at load 0.70, 9.7 at 0.55 */
    if (worst > 10)
        fail_msg("%g bytes a row", worst);
    world_free(w);
}

static void test_random_inserts_and_removes(void **state)
{
    const size_t n = 40000;
    rng r = { 1 };
    (void)state;
    for (int round = 0; round < 3; round++) {
        world *w = world_make(n);
        const unsigned steps = 200000;
        for (size_t i = 0; i < n; i++)
            w->ids[i] = rng_next(&r);
        for (unsigned step = 0; step < steps; step++) {
            /* grows, then shrinks, then grows, around these parts */
            size_t range = step % 100000 < 50000 ? n : n / 20 + 1;
            size_t i = rng_below(&r, range);
            if (!w->in[i])
                insert(w, i);
            else
                drop(w, i);
            check(w, i);
            check(w, rng_below(&r, n));
        }
        check_all(w);
        check_pages(w);
        for (size_t i = 0; i < n; i++)
            if (w->in[i])
                drop(w, i);
        check_all(w);
        check_pages(w);
        world_free(w);
    }
}

/* Many ids that want one bucket: counters of passed entries saturate. */
static void test_one_bucket_wanted_by_all(void **state)
{
    enum { N = 1500 };
    world *w = world_make(N);
    rng r = { 2 };
    (void)state;
    for (uint64_t i = 0; i < N; i++) /* equal bits 63..12, so equal tags */
        w->ids[i] = id_of_hash(0xABCDEF0123456000u | i);
    for (size_t i = 0; i < N; i++) {
        insert(w, i);
        if (i % 100 == 0)
            check_all(w);
    }
    check_pages(w);
    for (int step = 0; step < 5000; step++) {
        size_t i = rng_below(&r, N);
        if (w->in[i])
            drop(w, i);
        else
            insert(w, i);
        check(w, i);
    }
    check_all(w);
    for (size_t i = 0; i < N; i++)
        if (!w->in[i])
            insert(w, i);
    for (size_t i = 0; i < N; i++) { /* the last ones are found to the end */
        drop(w, i);
        check(w, N - 1);
        check(w, i + (N - i) / 2);
    }
    check_all(w);
    for (size_t i = 0; i < N; i++)
        insert(w, i);
    check_all(w);
    check_pages(w);
    world_free(w);
}

/* Ids of equal top bits fill one page: it splits in vain, yet memory and
 * time stay in bounds. */
static void test_equal_top_bits(void **state)
{
    const size_t n = SANITIZED ? 30000 : 100000;
    (void)state;
    for (unsigned top = 8; top <= 40; top += 8) {
        world *w = world_make(n);
        const size_t all = top > 24 ? 4000 : n; /* n^2 probes there */
        for (uint64_t i = 0; i < n; i++) /* distinct: the factor is odd */
            w->ids[i] =
                id_of_hash(i * 0x9E3779B97F4A7C15u & UINT64_MAX >> top);
        for (size_t i = 0; i < all; i++)
            insert(w, i);
        check_all(w);
        check_pages(w);
        assert_true(persia_mem_blocks_bytes(&w->blocks) < 16 * n + 100000);
        assert_true(w->index.depth <= 24);
        world_free(w);
    }
}

/* A reservation for many entries serves them all: pages grow and split, none
 * of them fails; without a deeper directory they only grow. */
static void test_one_reservation(void **state)
{
    const size_t n = SANITIZED ? 30000 : 80000;
    (void)state;
    for (size_t from = 0; from < n; from = from * 5 / 2 + 9) {
        world *w = world_make(n);
        w->deepens = from % 2;
        for (size_t i = 0; i < n; i++)
            w->ids[i] = i * 7919;
        for (size_t i = 0; i < from; i++)
            insert(w, i);
        const uint64_t bytes = row_index_bytes(n - from);
        assert_int_equal(persia_mem_blocks_reserve(&w->blocks, bytes),
                         PERSIA_OK);
        const void *region = w->blocks.regions;
        if (w->deepens)
            row_index_deepen(&w->index, n);
        for (size_t i = from; i < n; i++) {
            row_index_insert(&w->index, rows_of(w),
                             id_place(w->ids[i], w->key), (uint32_t)i);
            w->in[i] = 1;
        }
        assert_ptr_equal(w->blocks.regions, region); /* no other mapping */
        persia_mem_blocks_unreserve(&w->blocks, bytes);
        check_all(w);
        check_pages(w);
        world_free(w);
    }
}

/* A cleared index is as new, whatever it held. */
static void test_clear(void **state)
{
    const size_t n = 40000;
    world *w = world_make(n);
    (void)state;
    for (int turn = 0; turn < 3; turn++) {
        for (size_t i = 0; i < n; i++) {
            w->ids[i] = i * 7919;
            insert(w, i);
        }
        check_pages(w);
        row_index_clear(&w->index);
        memset(w->in, 0, n);
        check_all(w);
        check_pages(w);
        assert_true(w->limit.used < 1000);
    }
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_growth),
        cmocka_unit_test(test_chosen_ids),
        cmocka_unit_test(test_bytes_a_row),
        cmocka_unit_test(test_random_inserts_and_removes),
        cmocka_unit_test(test_one_bucket_wanted_by_all),
        cmocka_unit_test(test_equal_top_bits),
        cmocka_unit_test(test_one_reservation),
        cmocka_unit_test(test_clear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
