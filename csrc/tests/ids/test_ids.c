/* ids: the hash against published values and its inverse, and the split of
 * a chunk against a naive stable partition. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "tests/ids/chosen.h"

/* The first outputs of the reference splitmix64 (Vigna) from state 0; its
 * k-th output mixes the state k * increment. */
static void test_hash_is_splitmix64(void **state)
{
    static const uint64_t known[] = {
        0xE220A8397B1DCDAFu, 0x6E789E6AA1B965F4u, 0x06C45D188009454Fu,
        0xF88BB8A8724C81ECu, 0x1B39896A51A8749Bu
    };
    (void)state;
    for (uint64_t k = 0; k < sizeof known / sizeof known[0]; k++)
        assert_true(id_hash(k * 0x9E3779B97F4A7C15u) == known[k]);
}

static void test_hash_is_bijective(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 100000; i++) {
        uint64_t id = i < 50000 ? i : UINT64_MAX - i * i * i;
        if (unhash(id_hash(id)) != id || id_hash(unhash(id)) != id)
            fail_msg("id %llu does not come back", (unsigned long long)id);
    }
}

static void test_bits_have_their_places(void **state)
{
    (void)state;
    assert_int_equal(hash_tag(0x123456789ABCDEF0u), 0x9A);
    assert_int_equal(hash_tag(0xFFFFFFFF00FFFFFFu), 1); /* 0: empty */
    assert_int_equal(hash_stripe(0x123456789ABCDEF0u, 255), 0xBC);
    assert_int_equal(hash_stripe(0x123456789ABCDEF0u, 15), 0xC);
    assert_int_equal(hash_stripe(0x123456789ABCDEF0u, 0), 0);
}

/* Sequential ids, and ids that share their low or high half, spread. */
static void test_stripes_and_tags_are_even(void **state)
{
    enum { N = 1 << 16, CELLS = 256 };
    static uint32_t stripes[CELLS], tags[CELLS];
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        double chi_stripe = 0, chi_tag = 0;
        memset(stripes, 0, sizeof stripes);
        memset(tags, 0, sizeof tags);
        for (uint64_t i = 0; i < N; i++) {
            uint64_t id = kind == 0   ? i
                          : kind == 1 ? i << 32
                          : kind == 2 ? i << 48
                                      : i * 0x0001000100010001u;
            stripes[hash_stripe(id_hash(id), CELLS - 1)]++;
            tags[id_hash(id) >> 24 & 255]++;
        }
        for (int c = 0; c < CELLS; c++) {
            double mean = (double)N / CELLS;
            chi_stripe += (stripes[c] - mean) * (stripes[c] - mean) / mean;
            chi_tag += (tags[c] - mean) * (tags[c] - mean) / mean;
        }
        /* chi squared, 255 degrees of freedom: 6 sigma are 390 */
        if (chi_stripe > 390 || chi_tag > 390)
            fail_msg("kind %d: chi squared %g and %g", kind, chi_stripe,
                     chi_tag);
    }
}

static void split_against_naive(const uint64_t *ids, size_t n,
                                uint32_t stripes)
{
    static uint64_t hash[IDS_CHUNK + 1];
    static uint16_t order[IDS_CHUNK + 1], start[IDS_STRIPES_MAX + 2];
    size_t at = 0;

    memset(order, 0xAB, sizeof order);
    memset(hash, 0xAB, sizeof hash);
    memset(start, 0xAB, sizeof start);
    const uint64_t key = persia_ids_key();
    persia_ids_split_chunk(ids, n, key, stripes, hash, order, start);
    for (uint32_t s = 0; s < stripes; s++) {
        assert_int_equal(start[s], at);
        for (size_t i = 0; i < n; i++) {
            if ((id_hash(ids[i]) >> 16 & (stripes - 1)) != s)
                continue;
            assert_int_equal(order[at], i);
            assert_true(hash[at] == id_place(ids[i], key));
            at++;
        }
    }
    assert_int_equal(at, n);
    assert_int_equal(start[stripes], n);
    assert_int_equal(start[stripes + 1], 0xABAB); /* nothing behind */
    assert_int_equal(order[n], 0xABAB);
    assert_true(hash[n] == 0xABABABABABABABABu);
}

static void test_split_is_a_stable_partition(void **state)
{
    static const size_t sizes[] = { 0, 1, 2, 17, 255, 1000, IDS_CHUNK };
    static uint64_t ids[IDS_CHUNK];
    (void)state;
    for (uint32_t stripes = 1; stripes <= IDS_STRIPES_MAX; stripes *= 2)
        for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
            for (size_t i = 0; i < sizes[k]; i++) /* with many equal ids */
                ids[i] = id_hash(i * stripes) % (sizes[k] / 3 + 1);
            split_against_naive(ids, sizes[k], stripes);
        }
    for (size_t i = 0; i < IDS_CHUNK; i++) /* all in one stripe */
        ids[i] = UINT64_MAX;
    split_against_naive(ids, IDS_CHUNK, 256);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash_is_splitmix64),
        cmocka_unit_test(test_hash_is_bijective),
        cmocka_unit_test(test_bits_have_their_places),
        cmocka_unit_test(test_stripes_and_tags_are_even),
        cmocka_unit_test(test_split_is_a_stable_partition),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
