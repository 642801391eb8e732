/* The kernels of a device, on the host, against room pool and, for the sums
 * of gradients, against its scales added in the order of the ids. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"
#include "simd/simd.h"

static uint32_t random_state = 7;

static uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static float random_float(void)
{
    return (float)(int)(random_u32() % 20001) / 5000 - 2;
}

static const cuda_device *host(void)
{
    const cuda_device *d;
    assert_int_equal(persia_cuda_open("host", &d), PERSIA_OK);
    return d;
}

/* ---- a batch ---- */

enum { FEATURES = 3, BAGS_MAX = 40, IDS_MAX = 2000, ROWS_MAX = 60, DIM = 80 };

typedef struct batch {
    cuda_feature features[FEATURES];
    size_t bags, ids, rows;
    uint32_t width, columns;
    int32_t offsets[FEATURES * BAGS_MAX + 1];
    int32_t inverse[IDS_MAX], bag[IDS_MAX];
    float weights[IDS_MAX];
    int64_t order[IDS_MAX];
    int32_t starts[ROWS_MAX + 1];
    float table[ROWS_MAX * DIM];
    int bagged, weighted;
} batch;

/* Rows of a feature are its own, as its table's are: dims differ. */
static batch *random_batch(int bagged, int weighted)
{
    static const int32_t dims[] = {1, 3, 8, 16, 17, 32, 64, 80};
    batch *b = calloc(1, sizeof *b);
    assert_non_null(b);
    b->bags = 1 + random_u32() % BAGS_MAX;
    b->bagged = bagged;
    b->weighted = weighted;
    for (int f = 0; f < FEATURES; f++) {
        int32_t dim = dims[random_u32() % 8];
        size_t own = 1 + random_u32() % (ROWS_MAX / FEATURES);
        b->features[f] = (cuda_feature){(int32_t)(random_u32() % 3), dim,
                                        (int32_t)b->columns};
        b->columns += (uint32_t)dim;
        b->width = b->width < (uint32_t)dim ? (uint32_t)dim : b->width;
        for (size_t x = 0; x < b->bags; x++) {
            size_t n = !bagged ? 1 : random_u32() % 3 ? random_u32() % 3
                                                      : random_u32() % 12;
            size_t at = (size_t)f * b->bags + x;
            for (size_t i = 0; i < n; i++) {
                b->bag[b->ids] = (int32_t)at;
                b->weights[b->ids] = random_float();
                b->inverse[b->ids++] = (int32_t)(b->rows + random_u32() % own);
            }
            b->offsets[at + 1] = (int32_t)b->ids;
        }
        b->rows += own;
    }
    for (size_t i = 0; i < b->rows * b->width; i++)
        b->table[i] = random_float();
    size_t at = 0;
    for (size_t r = 0; r < b->rows; r++) {
        for (size_t i = 0; i < b->ids; i++)
            if (b->inverse[i] == (int32_t)r)
                b->order[at++] = (int64_t)i;
        b->starts[r + 1] = (int32_t)at;
    }
    return b;
}

static cuda_bags bags_of(const batch *b)
{
    return (cuda_bags){.features = b->features,
                       .features_n = FEATURES,
                       .bags = b->bags,
                       .offsets = b->bagged ? b->offsets : NULL,
                       .weights = b->weighted ? b->weights : NULL};
}

static uint16_t narrow(uint32_t dtype, float x)
{
    return dtype == CUDA_F16 ? fp16_narrow(x) : bf16_narrow(x);
}

static float widen(uint32_t dtype, uint16_t x)
{
    return dtype == CUDA_F16 ? fp16_widen(x) : bf16_widen(x);
}

static float rounded(uint32_t dtype, float x)
{
    return dtype == CUDA_F32 ? x : widen(dtype, narrow(dtype, x));
}

/* Room pool's values of a feature, of these rows in this dtype. */
static void pool_of(const batch *b, int f, uint32_t dtype, float *out)
{
    const cuda_feature *it = &b->features[f];
    const size_t first = (size_t)b->offsets[(size_t)f * b->bags];
    const size_t last = (size_t)b->offsets[(size_t)(f + 1) * b->bags];
    const uint32_t dim = (uint32_t)it->dim;
    int64_t offsets[BAGS_MAX + 1];
    float *rows = malloc((last - first + 1) * dim * sizeof *rows);
    assert_non_null(rows);
    for (size_t x = 0; x <= b->bags; x++)
        offsets[x] = b->offsets[(size_t)f * b->bags + x];
    for (size_t i = first; i < last; i++)
        for (uint32_t j = 0; j < dim; j++)
            rows[(i - first) * dim + j] = rounded(
                dtype, b->table[(size_t)b->inverse[i] * b->width + j]);
    persia_pool_forward((uint32_t)it->pooling, b->bags, offsets,
                        b->weighted ? b->weights + first : NULL, rows, dim,
                        out, dim);
    free(rows);
}

static void check_pool(const batch *b, uint32_t dtype, uint32_t out_dtype)
{
    float values[BAGS_MAX * FEATURES * DIM] = {0}, want[BAGS_MAX * DIM];
    uint16_t half[ROWS_MAX * DIM];
    for (size_t i = 0; i < b->rows * b->width; i++)
        half[i] = narrow(dtype, b->table[i]);
    const cuda_pool a = {.of = bags_of(b),
                         .rows = dtype == CUDA_F32 ? (const void *)b->table
                                                   : half,
                         .rows_dtype = dtype,
                         .row_stride = b->width,
                         .inverse = b->inverse,
                         .out = values,
                         .out_dtype = out_dtype,
                         .out_stride = b->columns,
                         .width = b->width};
    assert_int_equal(host()->pool(NULL, &a), 0);
    for (int f = 0; f < FEATURES; f++) {
        const uint32_t dim = (uint32_t)b->features[f].dim;
        pool_of(b, f, dtype, want);
        for (size_t x = 0; x < b->bags; x++)
            for (uint32_t j = 0; j < dim; j++) {
                size_t at = x * b->columns + (size_t)b->features[f].column + j;
                float got = out_dtype == CUDA_F32
                                ? values[at]
                                : widen(out_dtype, ((uint16_t *)values)[at]);
                float wanted = rounded(out_dtype, want[x * dim + j]);
                assert_memory_equal(&got, &wanted, sizeof got);
            }
    }
}

static void test_pool_has_the_bits_of_room_pool(void **state)
{
    (void)state;
    for (int round = 0; round < 60; round++) {
        batch *b = random_batch(round & 1, round >> 1 & 1);
        check_pool(b, CUDA_F32, CUDA_F32);
        check_pool(b, CUDA_F16, CUDA_F32);
        check_pool(b, CUDA_BF16, CUDA_BF16);
        free(b);
    }
}

/* What a push adds up: scale * gradient, in the order of the ids. */
static void sum_of(const batch *b, uint32_t dtype, const float *grad,
                   float *out)
{
    int seen[ROWS_MAX] = {0};
    memset(out, 0, b->rows * b->width * sizeof *out);
    for (int f = 0; f < FEATURES; f++) {
        const size_t first = (size_t)b->offsets[(size_t)f * b->bags];
        const size_t n = (size_t)b->offsets[(size_t)(f + 1) * b->bags] - first;
        int64_t offsets[BAGS_MAX + 1];
        uint32_t bag[IDS_MAX];
        float scale[IDS_MAX];
        for (size_t x = 0; x <= b->bags; x++)
            offsets[x] = b->offsets[(size_t)f * b->bags + x];
        persia_pool_expand((uint32_t)b->features[f].pooling, b->bags, offsets,
                           b->weighted ? b->weights + first : NULL, bag,
                           scale);
        for (size_t i = 0; i < n; i++) {
            float g[DIM];
            const size_t r = (size_t)b->inverse[first + i];
            const uint32_t dim = (uint32_t)b->features[f].dim;
            for (uint32_t j = 0; j < dim; j++)
                g[j] = rounded(dtype, grad[bag[i] * b->columns +
                                           (size_t)b->features[f].column + j]);
            floats_add(out + r * b->width, g, scale[i], !seen[r]++, dim);
        }
    }
}

static void check_sum(const batch *b, uint32_t dtype, uint32_t out_dtype)
{
    float grad[BAGS_MAX * FEATURES * DIM], sums[ROWS_MAX * DIM];
    float want[ROWS_MAX * DIM];
    uint16_t half[BAGS_MAX * FEATURES * DIM];
    for (size_t i = 0; i < b->bags * b->columns; i++) {
        grad[i] = random_float();
        half[i] = narrow(dtype, grad[i]);
    }
    const cuda_sum a = {.of = bags_of(b),
                        .grad = dtype == CUDA_F32 ? (const void *)grad : half,
                        .grad_dtype = dtype,
                        .grad_stride = b->columns,
                        .order = b->order,
                        .starts = b->starts,
                        .bag = b->bagged ? b->bag : NULL,
                        .out = sums,
                        .out_dtype = out_dtype,
                        .out_stride = b->width,
                        .rows = b->rows,
                        .width = b->width};
    assert_int_equal(host()->sum(NULL, &a), 0);
    sum_of(b, dtype, grad, want);
    for (size_t i = 0; i < b->rows * b->width; i++) {
        float got = out_dtype == CUDA_F32
                        ? sums[i]
                        : widen(out_dtype, ((uint16_t *)sums)[i]);
        float wanted = rounded(out_dtype, want[i]);
        assert_memory_equal(&got, &wanted, sizeof got);
    }
}

static void test_sums_have_the_bits_of_a_push(void **state)
{
    (void)state;
    for (int round = 0; round < 60; round++) {
        batch *b = random_batch(round & 1, round >> 1 & 1);
        check_sum(b, CUDA_F32, CUDA_F32);
        check_sum(b, CUDA_F16, CUDA_F32);
        check_sum(b, CUDA_BF16, CUDA_BF16);
        free(b);
    }
}

/* POOL_NONE: each id is a bag of one feature. */
static void test_rows_are_gathered(void **state)
{
    (void)state;
    enum { N = 50, D = 5 };
    const cuda_feature f = {POOL_NONE, D, 0};
    float rows[7 * D], out[N * D];
    int32_t inverse[N];
    for (size_t i = 0; i < 7 * D; i++)
        rows[i] = random_float();
    for (size_t i = 0; i < N; i++)
        inverse[i] = (int32_t)(random_u32() % 7);
    const cuda_pool a = {.of = {.features = &f, .features_n = 1, .bags = N},
                         .rows = rows,
                         .row_stride = D,
                         .inverse = inverse,
                         .out = out,
                         .out_stride = D,
                         .width = D};
    assert_int_equal(host()->pool(NULL, &a), 0);
    for (size_t i = 0; i < N; i++)
        assert_memory_equal(out + i * D, rows + inverse[i] * D, sizeof *out);
}

/* ---- dtypes ---- */

static void convert(uint32_t from_dtype, const void *from, uint32_t to_dtype,
                    void *to, size_t n)
{
    const cuda_convert a = {from, to, from_dtype, to_dtype, n};
    assert_int_equal(host()->convert(NULL, &a), 0);
}

/* The standard's binary16 is the compiler's where it has the type; bf16 is
 * the upper half of fp32. */
static void test_each_16_bit_value_survives(void **state)
{
    (void)state;
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    for (uint32_t i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    for (uint32_t dtype = CUDA_F16; dtype <= CUDA_BF16; dtype++) {
        convert(dtype, all, CUDA_F32, wide, 65536);
        convert(CUDA_F32, wide, dtype, back, 65536);
        for (uint32_t i = 0; i < 65536; i++) {
            if (!isnan(wide[i]))
                assert_int_equal(back[i], all[i]);
            else
                assert_true(isnan(widen(dtype, back[i])));
#ifdef __FLT16_MAX__
            _Float16 half;
            memcpy(&half, &all[i], sizeof half);
            if (dtype == CUDA_F16 && !isnan(wide[i]))
                assert_true((float)half == wide[i]);
#endif
        }
    }
}

static void test_narrowing_rounds_to_the_nearest(void **state)
{
    (void)state;
    for (int i = 0; i < 100000; i++) {
        uint32_t bits = random_u32() << 16 ^ random_u32();
        float x;
        uint16_t bf16, fp16;
        memcpy(&x, &bits, sizeof x);
        if (isnan(x))
            continue;
        convert(CUDA_F32, &x, CUDA_BF16, &bf16, 1);
        convert(CUDA_F32, &x, CUDA_F16, &fp16, 1);
        double below, above; /* its neighbours in bf16, as doubles */
        uint32_t cut = bits & 0xFFFF0000u, next = cut + 0x10000u;
        float low, high;
        memcpy(&low, &cut, sizeof low);
        memcpy(&high, &next, sizeof high);
        below = fabs((double)x - (double)low);
        above = fabs((double)high - (double)x);
        if (!isinf(high) && !isnan(high) && below != above)
            assert_int_equal(bf16, (below < above ? cut : next) >> 16);
#ifdef __FLT16_MAX__
        _Float16 half = (_Float16)x;
        uint16_t want;
        memcpy(&want, &half, sizeof want);
        assert_int_equal(fp16, want);
#endif
    }
}

/* ---- what travels ---- */

static void test_the_way_of_fewer_bytes(void **state)
{
    (void)state;
    /* One id a bag, dim 16, half of the ids distinct: 64 + 8 < 128. */
    assert_int_equal(persia_cuda_rows_travel(16000, 8000, 1000, 0, 4), 1);
    /* All distinct: the places are added. */
    assert_int_equal(persia_cuda_rows_travel(16000, 16000, 1000, 0, 4), 0);
    /* Pooled values of 16 bits, rows of 32. */
    assert_int_equal(persia_cuda_rows_travel(16000, 8000, 1000, 0, 2), 0);
    /* Ten ids a bag, few distinct: offsets travel, too. */
    assert_int_equal(persia_cuda_rows_travel(16000, 1600, 10000, 1000, 4), 1);
    assert_int_equal(persia_cuda_rows_travel(16000, 11000, 10000, 1000, 4), 0);
    assert_int_equal(persia_cuda_rows_travel(0, 0, 0, 0, 4), 0);
}

static void test_a_device_that_is_not_there(void **state)
{
    (void)state;
    const cuda_device *d;
    assert_int_equal(persia_cuda_open("abacus", &d), PERSIA_EUNAVAILABLE);
    if (persia_cuda_open("cuda", &d) == PERSIA_OK)
        assert_string_equal(d->mem.name, "cuda");
    else
        assert_true(strlen(persia_err_text()) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pool_has_the_bits_of_room_pool),
        cmocka_unit_test(test_sums_have_the_bits_of_a_push),
        cmocka_unit_test(test_rows_are_gathered),
        cmocka_unit_test(test_each_16_bit_value_survives),
        cmocka_unit_test(test_narrowing_rounds_to_the_nearest),
        cmocka_unit_test(test_the_way_of_fewer_bytes),
        cmocka_unit_test(test_a_device_that_is_not_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
