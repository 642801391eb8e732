/* kernel.h: what an optimizer is made of (private).
 *
 * An optimizer is one C file: a row function, the fields that a row keeps for
 * it, and PERSIA_OPTIM(), which makes its kernels.  A kernel exists for each
 * (dtype, dim or any, plain or extras); persia_optim_prepare() chooses one
 * a push, so loops over rows do not branch on any of these.  Extras are what
 * is rarely on: gradient scale, weight decay and the three clips.  Sums over
 * a row run in 16 fixed partial sums, so that every instruction set gives the
 * same bits.
 */
#ifndef PERSIA_OPTIM_KERNEL_H
#define PERSIA_OPTIM_KERNEL_H

#include "optim/optim.h"

#include "simd/simd.h"

#include <math.h>
#include <string.h>

enum { DIM_MAX = 4096, FIELDS_MAX = 2 };

enum optim_width { PER_ELEMENT, PER_ROW };

/* Floats that a row keeps behind its vector. */
typedef struct optim_field {
    const char *name;
    enum optim_width width;
    int not_negative; /* a root is taken of it */
    int from_option;  /* new rows: the table's state_init; otherwise 0 */
} optim_field;

typedef struct optim_algorithm optim_algorithm;
typedef struct optim_traits {
    optim_field fields[FIELDS_MAX]; /* up to the first without a name */
    int decoupled; /* weight decay shrinks the row; otherwise it is added to
                      the gradient */
    int (*check)(const optim_args *args);  /* its hyper-parameters; or NULL */
    void (*prepare)(optim_plan *plan);     /* once a push; or NULL */
    const optim_algorithm *with_momentum;  /* of tables with this option */
} optim_traits;

/* Kernels of a dtype: dim 16, 64, any; any with extras. */
enum optim_variant { DIM_16, DIM_64, DIM_ANY, EXTRAS, VARIANTS };

struct optim_algorithm {
    const optim_traits *traits;
    optim_kernel kernels[VECTOR_DTYPES][VARIANTS];
};

/* One step on one row: its vector w, its fields a and b, its gradient g. */
typedef void (*optim_row)(const optim_plan *p, float *restrict w,
                          float *restrict a, float *restrict b,
                          const float *restrict g, uint32_t dim);

#define OPTIM_MOST 1e30f /* of hyper-parameters */

/* PERSIA_EARG unless `value` is within [low, high]. */
int optim_range(const char *what, float value, float low, float high);
/* Of optimizers that divide by eps alone where no gradient was: above 0. */
int optim_eps_check(const optim_args *args);
/* Of those with moments: betas, and the step of the bias correction. */
int optim_moments_check(const optim_args *args);
void optim_moments_prepare(optim_plan *plan);

/* Columns of a row are independent and its arrays do not overlap.  A bound on
 * unrolling, for without one GCC unrolls 16 columns before it would make
 * vectors of them. */
#ifdef __clang__
#define EACH_COLUMN(j, dim) for (uint32_t j = 0; j < (dim); j++)
#else
#define EACH_COLUMN(j, dim)                                                   \
    _Pragma("GCC ivdep") _Pragma("GCC unroll 8")                              \
    for (uint32_t j = 0; j < (dim); j++)
#endif

/* Sixteen columns at a time, by the compiler's vector types: it lowers them
 * to what the instruction set has, with the same bits. */
typedef float lanes16 __attribute__((vector_size(64)));
typedef float lanes8 __attribute__((vector_size(32)));
typedef float lanes4 __attribute__((vector_size(16)));

INLINE_HOT float sum_squares(const float *restrict x, uint32_t dim)
{
    lanes16 sum = { 0 }, piece;
    lanes8 eight[2];
    lanes4 four[2];
    uint32_t j = 0;

    for (; j + 16 <= dim; j += 16) {
        memcpy(&piece, x + j, sizeof piece);
        sum += piece * piece;
    }
    if (j < dim) {
        piece = (lanes16){ 0 };
        memcpy(&piece, x + j, (dim - j) * sizeof *x);
        sum += piece * piece;
    }
    memcpy(eight, &sum, sizeof sum);
    eight[0] += eight[1];
    memcpy(four, eight, sizeof eight[0]);
    four[0] += four[1];
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

/* w -= factor * g */
INLINE_HOT void subtract(float *restrict w, const float *restrict g,
                         float factor, uint32_t dim)
{
    uint32_t j = 0;

    for (; j + 16 <= dim; j += 16) {
        lanes16 a, b;
        memcpy(&a, w + j, sizeof a);
        memcpy(&b, g + j, sizeof b);
        a -= factor * b;
        memcpy(w + j, &a, sizeof a);
    }
    for (; j < dim; j++)
        w[j] -= factor * g[j];
}

INLINE_HOT void row_scale(float *restrict x, uint32_t dim, float factor)
{
    EACH_COLUMN (j, dim)
        x[j] *= factor;
}

/* Shrinks x to an L2 norm of at most `norm`. */
INLINE_HOT void row_clip(float *restrict x, uint32_t dim, float norm)
{
    float squares = sum_squares(x, dim);

    if (squares > norm * norm)
        row_scale(x, dim, norm / sqrtf(squares));
}

/* ---- vectors that are kept narrow, rounded stochastically: the expectation
 * of the result is the value ---- */

/* Sixteen random bits for each of the columns j .. j + 7. */
INLINE_HOT void row_noise(const optim_plan *p, uint64_t id, uint32_t j,
                          uint16_t noise[8])
{
    const uint32_t key[2] = {
        p->noise_key[0] ^ (uint32_t)p->noise_draw,
        p->noise_key[1] ^ (uint32_t)(p->noise_draw >> 32)
    };
    const uint32_t counter[4] = { (uint32_t)id, (uint32_t)(id >> 32), j,
                                  0x726F756Eu /* apart from init */ };
    uint32_t bits[4];

    philox4x32(counter, key, bits);
    memcpy(noise, bits, sizeof bits);
}

/* Adds the noise below bf16's last bit, then cuts. */
INLINE_HOT void narrow_bf16(const optim_plan *p, uint64_t id,
                            const float *restrict w, uint16_t *restrict to,
                            uint32_t dim)
{
    for (uint32_t j = 0; j < dim; j += 8) {
        uint16_t noise[8];
        row_noise(p, id, j, noise);
        for (uint32_t k = 0; k < 8 && j + k < dim; k++) {
            uint32_t u;
            memcpy(&u, &w[j + k], 4);
            to[j + k] = (uint16_t)((u + noise[k]) >> 16);
        }
    }
}

/* The largest absolute value, by the floats' bits; finite. */
INLINE_HOT float row_most(const float *restrict x, uint32_t dim)
{
    union { uint32_t u; float f; } most = { 0 };

    EACH_COLUMN (j, dim) {
        uint32_t u;
        memcpy(&u, &x[j], 4);
        u &= 0x7FFFFFFFu;
        most.u = u > most.u ? u : most.u;
    }
    most.u = most.u < 0x7F7FFFFFu ? most.u : 0x7F7FFFFFu;
    return most.f;
}

/* Adds noise in [0, 1) to multiples of the scale, then cuts. */
INLINE_HOT void narrow_int8(const optim_plan *p, uint64_t id,
                            const float *restrict w, char *restrict to,
                            uint32_t dim)
{
    const float scale = int8_scale(row_most(w, dim));
    const float unit = scale > 0 ? scale : 1;

    memcpy(to, &scale, sizeof scale);
    for (uint32_t j = 0; j < dim; j += 8) {
        uint16_t noise[8];
        row_noise(p, id, j, noise);
        for (uint32_t k = 0; k < 8 && j + k < dim; k++) {
            float x = w[j + k] / unit + ((float)noise[k] * 0x1p-16f + 128);
            x = x < 255 ? x : 255; /* 127, were it not for rounding */
            x = x > 1 ? x : 1;
            to[4 + j + k] = (char)((int)x - 128);
        }
    }
}

INLINE_HOT void widen(const char *row, uint32_t dtype, float *restrict to,
                      uint32_t dim)
{
    const uint16_t *halves = (const uint16_t *)(const void *)row;
    const int8_t *bytes = (const int8_t *)row + 4;
    float scale;

    if (dtype == VECTOR_BF16) {
        EACH_COLUMN (j, dim)
            to[j] = bf16_widen(halves[j]);
        return;
    }
    memcpy(&scale, row, sizeof scale);
    EACH_COLUMN (j, dim)
        to[j] = scale * (float)bytes[j];
}

INLINE_HOT void extras_before(const optim_plan *p, int decoupled,
                              float *restrict w, float *restrict g,
                              uint32_t dim)
{
    const optim_args *a = &p->args;

    row_scale(g, dim, a->grad_scale);
    if (a->max_grad_norm > 0)
        row_clip(g, dim, a->max_grad_norm);
    if (decoupled)
        row_scale(w, dim, 1 - a->lr * a->weight_decay);
    else
        EACH_COLUMN (j, dim)
            g[j] += a->weight_decay * w[j];
}

INLINE_HOT void extras_after(const optim_plan *p, float *restrict w,
                             uint32_t dim)
{
    const float bound = p->args.weight_bound;

    if (p->args.max_norm > 0)
        row_clip(w, dim, p->args.max_norm);
    if (bound > 0)
        EACH_COLUMN (j, dim)
            w[j] = w[j] > bound ? bound : w[j] < -bound ? -bound : w[j];
}

INLINE_HOT uint64_t row_id_of(const char *row)
{
    uint64_t id;

    memcpy(&id, row, sizeof id);
    return id;
}

/* A run of rows; all but the first four are constants where this is
 * inlined, save perhaps dim. */
INLINE_HOT void run(const optim_plan *p, size_t n, char *const *rows,
                    const float *const *grads, optim_row step,
                    const optim_traits *traits, uint32_t dtype, int extras,
                    uint32_t dim)
{
    const uint32_t second = traits->fields[0].width == PER_ROW ? 1 : dim;
    float wide[DIM_MAX], clipped[DIM_MAX];

    for (size_t i = 0; i < n; i++) {
        char *row = rows[i], *vector = row + p->vector;
        const float *g = grads[i];
        float *state = (float *)(void *)(row + p->state);
        float *w = (float *)(void *)vector;

        if (dtype != VECTOR_FP32) {
            widen(vector, dtype, wide, dim);
            w = wide;
        }
        if (extras) {
            memcpy(clipped, g, dim * sizeof *g);
            extras_before(p, traits->decoupled, w, clipped, dim);
            g = clipped;
        }
        step(p, w, state, state + second, g, dim);
        if (extras)
            extras_after(p, w, dim);
        if (dtype == VECTOR_BF16)
            narrow_bf16(p, row_id_of(row), w, (uint16_t *)(void *)vector, dim);
        else if (dtype == VECTOR_INT8)
            narrow_int8(p, row_id_of(row), w, vector, dim);
    }
}

#define OPTIM_KERNEL(name, step, traits, dtype, extras, width)                \
    HOT static void name(const optim_plan *p, size_t n, char *const *rows,    \
                         const float *const *grads)                           \
    {                                                                         \
        run(p, n, rows, grads, step, &traits, dtype, extras, width);          \
    }

#define OPTIM_KERNELS(name, step, traits, dtype)                              \
    OPTIM_KERNEL(name##_16, step, traits, dtype, 0, 16)                       \
    OPTIM_KERNEL(name##_64, step, traits, dtype, 0, 64)                       \
    OPTIM_KERNEL(name##_any, step, traits, dtype, 0, p->dim)                  \
    OPTIM_KERNEL(name##_extras, step, traits, dtype, 1, p->dim)

#define OPTIM_LIST(name) { name##_16, name##_64, name##_any, name##_extras }

/* algorithm_<name>, by its row function; then its traits, as designated
 * initialisers. */
#define PERSIA_OPTIM(name, step, ...)                                         \
    static const optim_traits name##_traits = { __VA_ARGS__ };                \
    OPTIM_KERNELS(name##_fp32, step, name##_traits, VECTOR_FP32)              \
    OPTIM_KERNELS(name##_bf16, step, name##_traits, VECTOR_BF16)              \
    OPTIM_KERNELS(name##_int8, step, name##_traits, VECTOR_INT8)              \
    const optim_algorithm algorithm_##name = {                                \
        &name##_traits,                                                       \
        { [VECTOR_FP32] = OPTIM_LIST(name##_fp32),                            \
          [VECTOR_BF16] = OPTIM_LIST(name##_bf16),                            \
          [VECTOR_INT8] = OPTIM_LIST(name##_int8) }                           \
    };

#endif
