/* pool: against plain loops in the order that the header states. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pool/pool.h"

static uint32_t random_state = 1;

static uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static float random_float(void)
{
    return (float)(int)(random_u32() % 20001) / 5000 - 2;
}

/* ---- offsets ---- */

static void test_check(void **state)
{
    (void)state;
    assert_int_equal(persia_pool_check("f", 3, (int64_t[]){5, 5, 7, 9}, 5, 9),
                     PERSIA_OK);
    assert_int_equal(persia_pool_check("f", 0, (int64_t[]){0}, 0, 0),
                     PERSIA_OK);
    static const int64_t bad[][4] = {{1, 2, 3, 4},
                                     {0, 3, 2, 4},
                                     {0, -1, 2, 4},
                                     {0, 5, 5, 5},
                                     {0, 1, 2, 3},
                                     {INT64_MIN, 0, 0, 4},
                                     {0, INT64_MAX, INT64_MIN, 4}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(persia_pool_check("user_id", 3, bad[i], 0, 4),
                         PERSIA_EOFFSETS);
        assert_non_null(strstr(persia_err_text(), "user_id"));
    }
}

/* ---- kernels ---- */

enum { BAGS_MAX = 40, IDS_MAX = 400, DIM_MAX = 100 };

typedef struct jagged {
    size_t bags, n;
    int64_t offsets[BAGS_MAX + 1];
    float weights[IDS_MAX];
    float rows[IDS_MAX * DIM_MAX];
    uint32_t dim;
} jagged;

static jagged *random_jagged(uint32_t dim)
{
    jagged *j = calloc(1, sizeof *j);
    assert_non_null(j);
    j->dim = dim;
    j->bags = random_u32() % BAGS_MAX;
    j->offsets[0] = (int64_t)(random_u32() % 5); /* need not be 0 */
    for (size_t b = 0; b < j->bags; b++) {
        size_t n = random_u32() % 3 ? random_u32() % 3 : random_u32() % 10;
        j->offsets[b + 1] = j->offsets[b] + (int64_t)n;
        j->n += n;
    }
    for (size_t i = 0; i < j->n; i++)
        j->weights[i] = random_float();
    for (size_t i = 0; i < j->n * dim; i++)
        j->rows[i] = random_float();
    return j;
}

static float naive_scale(uint32_t kind, size_t n, const float *w)
{
    float scale = w ? *w : 1;
    if (kind == POOL_MEAN)
        return scale / (float)n;
    if (kind == POOL_SQRTN)
        return scale / (float)sqrt((double)n);
    return scale;
}

static void naive_forward(const jagged *j, uint32_t kind, const float *weights,
                          float *out, size_t stride)
{
    size_t i = 0;
    if (kind == POOL_NONE) {
        for (; i < j->n; i++)
            for (uint32_t d = 0; d < j->dim; d++)
                out[i * stride + d] = j->rows[i * j->dim + d] *
                                      (weights ? weights[i] : 1);
        return;
    }
    for (size_t b = 0; b < j->bags; b++) {
        size_t n = (size_t)(j->offsets[b + 1] - j->offsets[b]);
        for (uint32_t d = 0; d < j->dim; d++)
            out[b * stride + d] = 0;
        for (size_t k = 0; k < n; k++, i++) {
            volatile float s =
                naive_scale(kind, n, weights ? weights + i : NULL);
            for (uint32_t d = 0; d < j->dim; d++) {
                volatile float product = s * j->rows[i * j->dim + d];
                if (k == 0)
                    out[b * stride + d] = product;
                else
                    out[b * stride + d] += product;
            }
        }
    }
}

static void test_forward_has_the_stated_bits(void **state)
{
    (void)state;
    static const uint32_t dims[] = {1,  2,  3,  4,  7,  8,  9, 12,
                                    16, 17, 24, 32, 40, 64, 65, DIM_MAX};
    enum { OUT = IDS_MAX * (DIM_MAX + 3) };
    static float out[OUT], expected[OUT];
    for (int round = 0; round < 30; round++)
        for (size_t k = 0; k < sizeof dims / sizeof *dims; k++) {
            jagged *j = random_jagged(dims[k]);
            for (uint32_t kind = 0; kind < POOL_KINDS; kind++)
                for (size_t gap = 0; gap < 6; gap += 3) {
                    const float *w = random_u32() % 2 ? j->weights : NULL;
                    memset(out, 0x55, sizeof out);
                    memset(expected, 0x55, sizeof expected);
                    naive_forward(j, kind, w, expected, j->dim + gap);
                    persia_pool_forward(kind, j->bags, j->offsets, w, j->rows,
                                        j->dim, out, j->dim + gap);
                    assert_memory_equal(out, expected, sizeof out);
                }
            free(j);
        }
}

static void test_single_ids_are_copied(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 1, 2};
    float rows[2 * 16], out[2 * 16];
    for (int i = 0; i < 32; i++)
        rows[i] = i % 2 ? -0.0f : 1e-42f; /* signs and denormals stay */
    rows[3] = INFINITY;
    for (uint32_t kind = 0; kind < POOL_KINDS; kind++) {
        persia_pool_forward(kind, 2, offsets, NULL, rows, 16, out, 16);
        assert_memory_equal(out, rows, sizeof rows);
    }
}

static void test_expand_agrees_with_forward(void **state)
{
    (void)state;
    static uint32_t bag[IDS_MAX];
    static float scale[IDS_MAX];
    for (int round = 0; round < 200; round++) {
        jagged *j = random_jagged(1);
        for (uint32_t kind = 0; kind < POOL_KINDS; kind++) {
            const float *w = random_u32() % 2 ? j->weights : NULL;
            persia_pool_expand(kind, j->bags, j->offsets, w, bag, NULL);
            persia_pool_expand(kind, j->bags, j->offsets, w, NULL, scale);
            size_t i = 0;
            for (size_t b = 0; b < j->bags; b++) {
                size_t n = (size_t)(j->offsets[b + 1] - j->offsets[b]);
                for (size_t k = 0; k < n; k++, i++) {
                    assert_int_equal(bag[i], kind == POOL_NONE ? i : b);
                    float s = naive_scale(kind, n, w ? w + i : NULL);
                    assert_memory_equal(&scale[i], &s, sizeof s);
                }
            }
        }
        free(j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check),
        cmocka_unit_test(test_forward_has_the_stated_bits),
        cmocka_unit_test(test_single_ids_are_copied),
        cmocka_unit_test(test_expand_agrees_with_forward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
