/* optim: every kernel against formulas in double precision; ranges of
 * hyper-parameters; stochastic rounding. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "optim/optim.h"
#include "tests/optim/optim_model.h"

enum { DIM_MAX = 4096, ROWS = 7 };

static uint64_t seed;

static uint32_t any32(void)
{
    const uint32_t counter[4] = { (uint32_t)seed, (uint32_t)(seed >> 32), 0,
                                  0 };
    const uint32_t key[2] = { 1, 2 };
    uint32_t out[4];

    seed++;
    philox4x32(counter, key, out);
    return out[0];
}

static float any_float(void) /* [-1, 1) */
{
    return (float)(int32_t)any32() * 0x1p-31f;
}

static optim_args args_of(uint32_t kind, float momentum)
{
    return (optim_args){ .kind = kind,
                         .lr = 0.3f,
                         .eps = 0.05f, /* large: its place shows */
                         .beta1 = 0.8f,
                         .beta2 = 0.95f,
                         .beta = 0.6f,
                         .l1 = 0.15f,
                         .l2 = 0.4f,
                         .momentum = momentum,
                         .step = 1,
                         .grad_scale = 1 };
}

/* Rows as a table lays them out: id, clock, vector, state. */
typedef struct rows {
    uint32_t dim, dtype, state_floats;
    size_t state_at, stride;
    char *bytes; /* exactly as long as needed: ASan sees one byte more */
    char *row[ROWS];
} rows;

static void rows_make(rows *r, uint32_t kind, int momentum, uint32_t dtype,
                      uint32_t dim)
{
    size_t vector = vector_size(dtype, dim);

    r->dim = dim;
    r->dtype = dtype;
    r->state_floats = persia_optim_state_floats(kind, dim, momentum);
    r->state_at = (12 + vector + 3) / 4 * 4;
    r->stride = r->state_at + 4 * r->state_floats;
    r->bytes = calloc(ROWS, r->stride);
    assert_non_null(r->bytes);
    for (int i = 0; i < ROWS; i++) {
        uint64_t id = ((uint64_t)any32() << 32) | any32();
        r->row[i] = r->bytes + (size_t)i * r->stride;
        memcpy(r->row[i], &id, sizeof id);
    }
}

static float vector_get(const rows *r, int i, uint32_t j)
{
    const char *at = r->row[i] + 12;
    uint16_t bits;
    float x;

    if (r->dtype == VECTOR_FP32) {
        memcpy(&x, at + 4 * j, 4);
        return x;
    }
    if (r->dtype == VECTOR_INT8) {
        memcpy(&x, at, 4);
        return x * (float)(int8_t)at[4 + j];
    }
    memcpy(&bits, at + 2 * j, 2);
    return bf16_widen(bits);
}

/* x within [-1, 1] */
static void vector_set(rows *r, int i, uint32_t j, float x)
{
    const float scale = int8_scale(1);
    char *at = r->row[i] + 12;
    uint16_t bits = bf16_nearest(x);

    if (r->dtype == VECTOR_INT8) {
        memcpy(at, &scale, 4);
        at[4 + j] = (char)(int)rintf(x / scale);
    } else if (r->dtype == VECTOR_FP32)
        memcpy(at + 4 * j, &x, 4);
    else
        memcpy(at + 2 * j, &bits, 2);
}

static float state_get(const rows *r, int i, uint32_t j)
{
    float x;

    memcpy(&x, r->row[i] + r->state_at + 4 * j, 4);
    return x;
}

static optim_plan plan_of(const rows *r, const optim_args *args, int momentum,
                          uint64_t clock)
{
    optim_plan plan = { .dim = r->dim,
                        .vector = 12,
                        .state = (uint32_t)r->state_at,
                        .noise_key = { 77, 88 },
                        .noise_draw = clock };

    persia_optim_prepare(&plan, args, r->dtype, momentum);
    return plan;
}

/* bf16: neighbours of `want` on both sides. */
static int bf16_close(float got, double want, double scale)
{
    double ulp = ldexp(1, ilogb(fmax(fabs(want), 1e-30)) - 7);

    return fabs((double)got - want) <= ulp + 3e-6 * fabs(scale);
}

/* int8: neighbours, a scale away at most, of which the row's largest element
 * is 127. */
static int int8_close(const rows *r, int i, float got, double want,
                      const double *w, double scale)
{
    double most = 0;
    float by;

    for (uint32_t j = 0; j < r->dim; j++)
        most = fmax(most, fabs(w[j]));
    memcpy(&by, r->row[i] + 12, 4);
    return fabs((double)by * 127 - most) <= 2e-5 * (most + scale) &&
           fabs((double)got - want) <= (double)by + 3e-6 * scale;
}

static void check_row(const rows *r, int i, const double *w, const double *s,
                      const double *scale, const char *what)
{
    for (uint32_t j = 0; j < r->dim; j++) {
        float got = vector_get(r, i, j);
        int ok = r->dtype == VECTOR_FP32
                     ? model_close((double)got, w[j], scale[j])
                 : r->dtype == VECTOR_BF16
                     ? bf16_close(got, w[j], scale[j])
                     : int8_close(r, i, got, w[j], w, scale[j]);
        if (!ok)
            fail_msg("%s, dtype %u, dim %u: column %u is %.9g, not %.9g",
                     what, r->dtype, r->dim, j, (double)got, w[j]);
    }
    for (uint32_t j = 0; j < r->state_floats; j++)
        if (!model_close((double)state_get(r, i, j), s[j], 0.1))
            fail_msg("%s, dtype %u, dim %u: state %u is %.9g, not %.9g", what,
                     r->dtype, r->dim, j, (double)state_get(r, i, j), s[j]);
}

/* Some steps on a run of rows; each compared with a step of the model from
 * the same numbers. */
/* Runs a plan's kernel on packed gradients [n, dim]. */
static void kernel_run(const optim_plan *plan, size_t n, char *const *row,
                       const float *packed)
{
    const float *grads[256];

    assert_true(n <= 256);
    for (size_t i = 0; i < n; i++)
        grads[i] = packed + i * plan->dim;
    plan->kernel(plan, n, row, grads);
}

static void steps_against_model(optim_args a, int momentum, uint32_t dtype,
                                uint32_t dim, const char *what)
{
    static double w[DIM_MAX], s[2 * DIM_MAX], g[DIM_MAX], scale[DIM_MAX];
    float *grads = malloc(ROWS * dim * sizeof *grads);
    rows r, before;

    assert_non_null(grads);
    assert_int_equal(persia_optim_check(&a), PERSIA_OK);
    rows_make(&r, a.kind, momentum, dtype, dim);
    for (int i = 0; i < ROWS; i++)
        for (uint32_t j = 0; j < dim; j++)
            vector_set(&r, i, j, any_float());
    before = r;
    before.bytes = malloc(ROWS * r.stride);
    for (int step = 0; step < 4; step++, a.step++) {
        const int n = step == 0 ? ROWS : 1 + (int)(any32() % ROWS);
        optim_plan plan = plan_of(&r, &a, momentum, (uint64_t)step);
        memcpy(before.bytes, r.bytes, ROWS * r.stride);
        for (int i = 0; i < ROWS; i++)
            before.row[i] = before.bytes + (size_t)i * r.stride;
        for (uint32_t j = 0; j < (uint32_t)n * dim; j++)
            grads[j] = j % 11 == 5 ? 0 : any_float() * (step == 2 ? 8 : 1);
        kernel_run(&plan, (size_t)n, r.row, grads);
        for (int i = 0; i < n; i++) {
            for (uint32_t j = 0; j < dim; j++) {
                w[j] = (double)vector_get(&before, i, j);
                g[j] = (double)grads[(uint32_t)i * dim + j];
                scale[j] = fabs(w[j]) + 0.3;
            }
            for (uint32_t j = 0; j < r.state_floats; j++)
                s[j] = (double)state_get(&before, i, j);
            model_step(&a, momentum, dim, w, s, g);
            check_row(&r, i, w, s, scale, what);
            assert_memory_equal(r.row[i], before.row[i], 12);
        }
        assert_memory_equal(r.bytes + (size_t)n * r.stride,
                            before.bytes + (size_t)n * r.stride,
                            (size_t)(ROWS - n) * r.stride);
    }
    free(before.bytes);
    free(r.bytes);
    free(grads);
}

static const uint32_t dims[] = { 1, 3, 8, 16, 17, 64, 100 };
enum { DIMS = sizeof dims / sizeof dims[0] };

static void all_dims(optim_args a, int momentum, const char *what)
{
    for (uint32_t dtype = 0; dtype < VECTOR_DTYPES; dtype++)
        for (int d = 0; d < DIMS; d++)
            steps_against_model(a, momentum, dtype, dims[d], what);
}

static void test_plain_kernels(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < OPTIM_KINDS; kind++)
        all_dims(args_of(kind, 0), 0, persia_optim_name(kind));
    all_dims(args_of(OPTIM_SGD, 0.7f), 1, "momentum");
    /* a table with momentum, a push without */
    all_dims(args_of(OPTIM_SGD, 0), 1, "momentum 0");
    steps_against_model(args_of(OPTIM_ADAM, 0), 0, VECTOR_FP32, DIM_MAX,
                        "adam");
    steps_against_model(args_of(OPTIM_ADAM, 0), 0, VECTOR_BF16, DIM_MAX,
                        "adam");
}

static void test_every_extra(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind <= OPTIM_KINDS; kind++) {
        const int momentum = kind == OPTIM_KINDS; /* once more: SGD with it */
        const optim_args plain = args_of(momentum ? OPTIM_SGD : kind,
                                         momentum ? 0.6f : 0);
        optim_args a = plain;
        a.grad_scale = -0.25f;
        all_dims(a, momentum, "grad_scale");
        a = plain;
        a.weight_decay = 0.2f;
        all_dims(a, momentum, "weight_decay");
        a = plain;
        a.max_grad_norm = 0.9f;
        all_dims(a, momentum, "max_grad_norm");
        a = plain;
        a.max_norm = 0.8f;
        all_dims(a, momentum, "max_norm");
        a = plain;
        a.weight_bound = 0.4f;
        all_dims(a, momentum, "weight_bound");
        a.grad_scale = 3;
        a.weight_decay = 0.1f;
        a.max_grad_norm = 1.1f;
        a.max_norm = 1.3f;
        all_dims(a, momentum, "all extras");
    }
}

/* A kernel of a fixed width gives what the one of any width gives. */
static void test_neutral_extras_change_no_bit(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < OPTIM_KINDS; kind++)
        for (int d = 0; d < DIMS; d++)
            for (uint32_t dtype = 0; dtype < VECTOR_DTYPES; dtype++) {
                optim_args a = args_of(kind, 0), b = a;
                float grads[ROWS * 100];
                rows x, y;
                optim_plan p, q;
                b.max_norm = b.weight_bound = b.max_grad_norm = 1e20f;
                seed = 42;
                rows_make(&x, kind, 0, dtype, dims[d]);
                seed = 42;
                rows_make(&y, kind, 0, dtype, dims[d]);
                p = plan_of(&x, &a, 0, 5);
                q = plan_of(&y, &b, 0, 5);
                assert_ptr_not_equal(p.kernel, q.kernel);
                for (uint32_t j = 0; j < ROWS * dims[d]; j++)
                    grads[j] = any_float();
                kernel_run(&p, ROWS, x.row, grads);
                kernel_run(&q, ROWS, y.row, grads);
                assert_memory_equal(x.bytes, y.bytes, ROWS * x.stride);
                free(x.bytes);
                free(y.bytes);
            }
}

/* Steps far out: powers of beta have long vanished. */
static void test_adam_of_late_steps(void **state)
{
    static const uint64_t late[] = { 2, 1000, 4000000000u,
                                     UINT64_MAX - 9 };
    (void)state;
    for (int i = 0; i < 4; i++) {
        optim_args a = args_of(OPTIM_ADAM, 0);
        a.step = late[i];
        a.beta1 = i & 1 ? 0.9f : 0;
        a.beta2 = 0.9999f;
        a.lr = 1e-3f;
        steps_against_model(a, 0, VECTOR_FP32, 17, "late");
    }
}

static void test_huge_gradients_leave_rows_finite(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < OPTIM_KINDS; kind++) {
        optim_args a = args_of(kind, 0);
        float g[16];
        optim_plan p;
        rows r;
        if (kind == OPTIM_SGD)
            a.max_grad_norm = 1;
        rows_make(&r, kind, 0, VECTOR_FP32, 16);
        p = plan_of(&r, &a, 0, 1);
        for (int j = 0; j < 16; j++)
            g[j] = j % 2 ? 3e38f : -1e30f;
        kernel_run(&p, 1, r.row, g);
        for (uint32_t j = 0; j < 16; j++)
            if (!isfinite(vector_get(&r, 0, j)))
                fail_msg("%s makes %g", persia_optim_name(kind),
                         (double)vector_get(&r, 0, j));
        free(r.bytes);
    }
}

/* ---- hyper-parameters ---- */

static void refused(optim_args a, const char *named)
{
    assert_int_equal(persia_optim_check(&a), PERSIA_EARG);
    if (!strstr(persia_err_text(), named))
        fail_msg("the error does not name %s: %s", named, persia_err_text());
}

static void test_ranges(void **state)
{
    (void)state;
    const float bad[] = { NAN, INFINITY, -INFINITY, -1e-6f, 2e30f };
    for (uint32_t kind = 0; kind < OPTIM_KINDS; kind++) {
        optim_args a = args_of(kind, 0);
        assert_int_equal(persia_optim_check(&a), PERSIA_OK);
        for (int i = 0; i < 5; i++) {
            a = args_of(kind, 0), a.lr = bad[i], refused(a, "lr");
            a = args_of(kind, 0), a.eps = bad[i], refused(a, "eps");
            a = args_of(kind, 0), a.momentum = bad[i], refused(a, "momentum");
            a = args_of(kind, 0), a.weight_decay = bad[i];
            refused(a, "weight_decay");
            a = args_of(kind, 0), a.max_norm = bad[i], refused(a, "max_norm");
            a = args_of(kind, 0), a.max_grad_norm = bad[i];
            refused(a, "max_grad_norm");
            a = args_of(kind, 0), a.weight_bound = bad[i];
            refused(a, "weight_bound");
            if (i != 3) /* negative scales are well */
                a = args_of(kind, 0), a.grad_scale = bad[i],
                refused(a, "grad_scale");
        }
        a = args_of(kind, 0), a.grad_scale = -3, a.lr = 0;
        assert_int_equal(persia_optim_check(&a), PERSIA_OK);
    }
    for (uint32_t kind = OPTIM_ADAGRAD; kind <= OPTIM_ROWWISE_ADAM; kind++) {
        optim_args a = args_of(kind, 0); /* 0 / 0 where no gradient was */
        a.eps = 0, refused(a, "eps");
        a.eps = 1e-42f, refused(a, "eps");
    }
    for (uint32_t kind = OPTIM_ADAM; kind <= OPTIM_ROWWISE_ADAM; kind++) {
        optim_args a = args_of(kind, 0);
        a.step = 0, refused(a, "step");
        a = args_of(kind, 0), a.beta1 = 1, refused(a, "beta1");
        a = args_of(kind, 0), a.beta1 = -0.1f, refused(a, "beta1");
        a = args_of(kind, 0), a.beta2 = 1, refused(a, "beta2");
        a = args_of(kind, 0), a.beta2 = NAN, refused(a, "beta2");
        a = args_of(kind, 0), a.beta1 = a.beta2 = 0;
        assert_int_equal(persia_optim_check(&a), PERSIA_OK);
    }
    optim_args f = args_of(OPTIM_FTRL, 0);
    f.beta = 0, refused(f, "beta");
    f = args_of(OPTIM_FTRL, 0), f.l1 = -1, refused(f, "l1");
    f = args_of(OPTIM_FTRL, 0), f.l2 = NAN, refused(f, "l2");
    optim_args a = args_of(OPTIM_SGD, 0); /* others do not look at them */
    a.beta1 = a.beta2 = a.beta = NAN, a.step = 0, a.eps = 0;
    assert_int_equal(persia_optim_check(&a), PERSIA_OK);
    a.kind = OPTIM_KINDS, refused(a, "algorithm");
    a.kind = UINT32_MAX, refused(a, "algorithm");
}

static void test_names_and_sizes(void **state)
{
    (void)state;
    assert_string_equal(persia_optim_name(OPTIM_ROWWISE_ADAGRAD),
                        "rowwise_adagrad");
    assert_string_equal(persia_optim_name(OPTIM_ADAMW), "adamw");
    assert_null(persia_optim_name(OPTIM_KINDS));
    assert_int_equal(persia_optim_state_floats(OPTIM_SGD, 5, 0), 0);
    assert_int_equal(persia_optim_state_floats(OPTIM_SGD, 5, 1), 5);
    assert_int_equal(persia_optim_state_floats(OPTIM_ADAGRAD, 5, 0), 5);
    assert_int_equal(persia_optim_state_floats(OPTIM_ROWWISE_ADAGRAD, 5, 0),
                     1);
    assert_int_equal(persia_optim_state_floats(OPTIM_ADAM, 5, 0), 10);
    assert_int_equal(persia_optim_state_floats(OPTIM_ADAMW, 4096, 0), 8192);
    assert_int_equal(persia_optim_state_floats(OPTIM_ROWWISE_ADAM, 5, 0), 6);
}

/* ---- bf16 ---- */

static void test_narrowing_to_nearest_even(void **state)
{
    (void)state;
    /* every bf16 number stays, and halves go to the even neighbour */
    for (uint32_t bits = 0; bits < 0x7F80; bits++) {
        float x = bf16_widen((uint16_t)bits), y = bf16_widen(
            (uint16_t)(bits + 1));
        assert_int_equal(bf16_nearest(x), bits);
        assert_int_equal(bf16_nearest(-x), bits | 0x8000);
        if (bits + 1 < 0x7F80) {
            float half = (float)(((double)x + (double)y) / 2);
            assert_int_equal(bf16_nearest(half), (bits + 1) & ~1u);
            assert_int_equal(bf16_nearest(nextafterf(half, 0)), bits);
            assert_int_equal(bf16_nearest(nextafterf(half, y)), bits + 1);
        }
    }
}

/* One row of 16 ones steps by -tiny (SGD); how many columns went up. */
static unsigned ups(uint64_t id, uint64_t clock, float sign, float step,
                    unsigned *column)
{
    float g[17];
    optim_args a = args_of(OPTIM_SGD, 0);
    unsigned up = 0;
    optim_plan p;
    rows r;

    a.lr = 1;
    rows_make(&r, OPTIM_SGD, 0, VECTOR_BF16, 17);
    memcpy(r.row[0], &id, sizeof id);
    for (uint32_t j = 0; j < 17; j++) {
        vector_set(&r, 0, j, sign);
        g[j] = -sign * step;
    }
    p = plan_of(&r, &a, 0, clock);
    kernel_run(&p, 1, r.row, g);
    for (uint32_t j = 0; j < 17; j++) {
        float got = vector_get(&r, 0, j);
        assert_true(got == sign || got == sign * 1.0078125f);
        up += got != sign;
        column[j] += got != sign;
    }
    free(r.bytes);
    return up;
}

/* An eighth of the distance between two bf16 numbers goes up in an eighth
 * of the cases: for each column, over clocks, over ids, for both signs. */
static void test_stochastic_rounding_is_unbiased(void **state)
{
    enum { N = 20000 };
    const double p = 1.0 / 8, sigma = sqrt(N * p * (1 - p));
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        unsigned column[17] = { 0 };
        uint64_t total = 0;
        double spread = 0;
        for (uint64_t i = 0; i < N; i++) {
            unsigned up = ups(kind & 1 ? 5 : i << 32, kind & 1 ? i : 9,
                              kind & 2 ? -1 : 1, 0x1p-10f, column);
            total += up;
            spread += (up - 17 * p) * (up - 17 * p);
        }
        for (int j = 0; j < 17; j++)
            if (fabs(column[j] - N * p) > 5 * sigma)
                fail_msg("kind %d, column %d: %u ups of %d", kind, j,
                         column[j], N);
        assert_true(fabs((double)total - 17 * N * p) < 5 * sigma * sqrt(17));
        /* columns are independent: the variance of a row's sum is 17 times
         * that of one column (relative error of it: sqrt(2 / N)) */
        assert_true(fabs(spread / N / (17 * p * (1 - p)) - 1) < 0.06);
    }
}

static void test_stochastic_rounding_is_deterministic(void **state)
{
    unsigned a[17] = { 0 }, b[17] = { 0 }, c[17] = { 0 }, d[17] = { 0 };
    (void)state;
    for (uint64_t i = 0; i < 50; i++) {
        ups(3, i, 1, 0x1p-8f, a);
        ups(3, i, 1, 0x1p-8f, b);
        ups(4, i, 1, 0x1p-8f, c);
        ups(3, i + ((uint64_t)1 << 32), 1, 0x1p-8f, d);
    }
    assert_memory_equal(a, b, sizeof a);
    assert_memory_not_equal(a, c, sizeof a);
    assert_memory_not_equal(a, d, sizeof a); /* all 64 bits of the clock */
}

/* Many small steps arrive where to-nearest would never move. */
static void test_small_steps_add_up(void **state)
{
    enum { STEPS = 4000 };
    optim_args a = args_of(OPTIM_SGD, 0);
    float g[64];
    double mean = 0;
    rows r;
    (void)state;
    rows_make(&r, OPTIM_SGD, 0, VECTOR_BF16, 64);
    a.lr = 1;
    for (uint32_t j = 0; j < 64; j++) {
        vector_set(&r, 0, j, 1);
        g[j] = -1e-4f; /* bf16 keeps 1 + 1e-4 as 1 */
    }
    for (uint64_t i = 0; i < STEPS; i++) {
        optim_plan p = plan_of(&r, &a, 0, i);
        kernel_run(&p, 1, r.row, g);
    }
    for (uint32_t j = 0; j < 64; j++)
        mean += (double)vector_get(&r, 0, j) / 64;
    /* variance of a step: about 1e-4 * 2^-7; of the mean of 64: / 64 */
    assert_true(fabs(mean - 1.4) < 5 * sqrt(STEPS * 1e-4 * 0x1p-7 / 64));
    free(r.bytes);
}

/* ---- int8 ---- */

/* A row that is read and stored again keeps its scale: 127 of them are exact,
 * and make the same one. */
static void test_scales_are_kept(void **state)
{
    (void)state;
    for (int i = 0; i < 100000; i++) {
        const float x = ldexpf(any_float(), (int)(any32() % 200) - 100);
        const float scale = int8_scale(fabsf(x));
        assert_true(scale * 127 >= fabsf(x));
        assert_true(scale * 127 <= fabsf(x) * (1 + 0x1p-15f));
        assert_true(int8_scale(scale * 127) == scale);
        assert_true((double)scale * 127 == (double)(scale * 127));
    }
    assert_true(int8_scale(0) == 0 && int8_scale(1e-38f) == 0);
    assert_true(isfinite(int8_scale(FLT_MAX)));
}

/* Steps of an eighth of the scale move an eighth of the columns; the largest
 * element, and with it the scale, stays. */
static void test_int8_rounding_is_unbiased(void **state)
{
    enum { N = 20000, DIM = 17 };
    const double p = 1.0 / 8, sigma = sqrt(N * p * (1 - p));
    const float scale = int8_scale(1);
    unsigned column[DIM] = { 0 };
    optim_args a = args_of(OPTIM_SGD, 0);
    float g[DIM] = { 0 };
    rows r;
    (void)state;
    a.lr = 1;
    rows_make(&r, OPTIM_SGD, 0, VECTOR_INT8, DIM);
    for (uint32_t j = 1; j < DIM; j++)
        g[j] = j % 2 ? scale / 8 : -scale / 8;
    for (uint64_t i = 0; i < N; i++) {
        for (uint32_t j = 0; j < DIM; j++)
            vector_set(&r, 0, j, j == 0 ? 127 * scale : (float)j * scale);
        optim_plan plan = plan_of(&r, &a, 0, i);
        kernel_run(&plan, 1, r.row, g);
        assert_true(vector_get(&r, 0, 0) == 127 * scale);
        for (uint32_t j = 1; j < DIM; j++) {
            const float got = vector_get(&r, 0, j), was = (float)j * scale;
            const float to = was + (j % 2 ? -scale : scale);
            assert_true(got == was || fabsf(got - to) < scale / 99);
            column[j] += got != was;
        }
    }
    for (uint32_t j = 1; j < DIM; j++)
        if (fabs(column[j] - N * p) > 5 * sigma)
            fail_msg("column %u: %u moves of %d", j, column[j], N);
    free(r.bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_kernels),
        cmocka_unit_test(test_every_extra),
        cmocka_unit_test(test_neutral_extras_change_no_bit),
        cmocka_unit_test(test_adam_of_late_steps),
        cmocka_unit_test(test_huge_gradients_leave_rows_finite),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_names_and_sizes),
        cmocka_unit_test(test_narrowing_to_nearest_even),
        cmocka_unit_test(test_stochastic_rounding_is_unbiased),
        cmocka_unit_test(test_stochastic_rounding_is_deterministic),
        cmocka_unit_test(test_small_steps_add_up),
        cmocka_unit_test(test_scales_are_kept),
        cmocka_unit_test(test_int8_rounding_is_unbiased),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
