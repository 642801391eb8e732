/* kernels.c: one step of an optimizer on a run of rows.
 *
 * A kernel exists for each (algorithm, dtype, dim or any, plain or extras);
 * persia_optim_prepare() chooses it once a push, so row loops do not branch on
 * any of these.  Extras are what is rarely on: gradient scale, weight decay
 * and the three clips.  Sums over a row run in 16 fixed partial sums, so that
 * every instruction set gives the same bits.
 */
#include "optim/optim.h"

#include "simd/simd.h"

#include <math.h>
#include <string.h>

enum { DIM_MAX = 4096 };

/* Columns of a row are independent and its arrays do not overlap. */
#ifdef __clang__
#define EACH_COLUMN(j, dim) for (uint32_t j = 0; j < (dim); j++)
#else
#define EACH_COLUMN(j, dim)                                                   \
    _Pragma("GCC ivdep") for (uint32_t j = 0; j < (dim); j++)
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

INLINE_HOT void sgd_row(const optim_plan *p, float *restrict w,
                           const float *restrict g, uint32_t dim)
{
    subtract(w, g, p->args.lr, dim);
}

INLINE_HOT void momentum_row(const optim_plan *p, float *restrict w,
                                float *restrict s, const float *restrict g,
                                uint32_t dim)
{
    const float lr = p->args.lr, momentum = p->args.momentum;

    EACH_COLUMN (j, dim) {
        s[j] = momentum * s[j] + g[j];
        w[j] -= lr * s[j];
    }
}

INLINE_HOT void adagrad_row(const optim_plan *p, float *restrict w,
                               float *restrict s, const float *restrict g,
                               uint32_t dim)
{
    const float lr = p->args.lr, eps = p->args.eps;

    EACH_COLUMN (j, dim) {
        s[j] += g[j] * g[j];
        w[j] -= lr * g[j] / (sqrtf(s[j]) + eps);
    }
}

INLINE_HOT void rowwise_row(const optim_plan *p, float *restrict w,
                               float *restrict s, const float *restrict g,
                               uint32_t dim)
{
    float squares = *s + sum_squares(g, dim) / (float)dim;
    float factor = p->args.lr / (sqrtf(squares) + p->args.eps);

    *s = squares;
    subtract(w, g, factor, dim);
}

INLINE_HOT void adam_row(const optim_plan *p, float *restrict w,
                            float *restrict m, float *restrict v,
                            const float *restrict g, uint32_t dim)
{
    const float b1 = 1 - p->args.beta1, b2 = p->args.beta2, c2 = 1 - b2;
    const float size = p->step_size, root = p->bias2_sqrt;
    const float eps = p->args.eps;

    EACH_COLUMN (j, dim) {
        m[j] += (g[j] - m[j]) * b1;
        v[j] = v[j] * b2 + c2 * g[j] * g[j];
        w[j] -= size * m[j] / (sqrtf(v[j]) / root + eps);
    }
}

/* Adds the fp32 noise below bf16's last bit, then cuts: the expectation of
 * the result is the value. */
INLINE_HOT void narrow_stochastic(const optim_plan *p, uint64_t id,
                                     const float *restrict w,
                                     uint16_t *restrict to, uint32_t dim)
{
    const uint32_t key[2] = {
        p->noise_key[0] ^ (uint32_t)p->noise_draw,
        p->noise_key[1] ^ (uint32_t)(p->noise_draw >> 32)
    };

    for (uint32_t j = 0; j < dim; j += 8) {
        const uint32_t counter[4] = { (uint32_t)id, (uint32_t)(id >> 32), j,
                                      0x726F756Eu /* apart from init */ };
        uint32_t bits[4];
        uint16_t noise[8];
        philox4x32(counter, key, bits);
        memcpy(noise, bits, sizeof noise);
        for (uint32_t k = 0; k < 8 && j + k < dim; k++) {
            uint32_t u;
            memcpy(&u, &w[j + k], 4);
            to[j + k] = (uint16_t)((u + noise[k]) >> 16);
        }
    }
}

/* One algorithm on one row; `kind` and `momentum` are constants where this
 * is inlined. */
INLINE_HOT void step_row(const optim_plan *p, uint32_t kind, int momentum,
                            float *restrict w, float *restrict s,
                            const float *restrict g, uint32_t dim)
{
    switch (kind) {
    case OPTIM_SGD:
        if (momentum)
            momentum_row(p, w, s, g, dim);
        else
            sgd_row(p, w, g, dim);
        break;
    case OPTIM_ADAGRAD:
        adagrad_row(p, w, s, g, dim);
        break;
    case OPTIM_ROWWISE_ADAGRAD:
        rowwise_row(p, w, s, g, dim);
        break;
    default:
        adam_row(p, w, s, s + dim, g, dim);
    }
}

INLINE_HOT void extras_before(const optim_plan *p, uint32_t kind,
                                 float *restrict w, float *restrict g,
                                 uint32_t dim)
{
    const optim_args *a = &p->args;

    row_scale(g, dim, a->grad_scale);
    if (a->max_grad_norm > 0)
        row_clip(g, dim, a->max_grad_norm);
    if (kind == OPTIM_ADAMW)
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

INLINE_HOT void run(const optim_plan *p, size_t n, char *const *rows,
                       const float *const *grads, uint32_t kind, int momentum,
                       uint32_t dtype, int extras, uint32_t dim)
{
    float wide[DIM_MAX], clipped[DIM_MAX];

    for (size_t i = 0; i < n; i++) {
        char *row = rows[i];
        const float *g = grads[i];
        float *state = (float *)(void *)(row + p->state);
        float *w = (float *)(void *)(row + p->vector);
        uint16_t *narrow = (uint16_t *)(void *)(row + p->vector);

        if (dtype == VECTOR_BF16) {
            EACH_COLUMN (j, dim)
                wide[j] = bf16_widen(narrow[j]);
            w = wide;
        }
        if (extras) {
            memcpy(clipped, g, dim * sizeof *g);
            extras_before(p, kind, w, clipped, dim);
            g = clipped;
        }
        step_row(p, kind, momentum, w, state, g, dim);
        if (extras)
            extras_after(p, w, dim);
        if (dtype == VECTOR_BF16) {
            uint64_t id;
            memcpy(&id, row, sizeof id);
            narrow_stochastic(p, id, w, narrow, dim);
        }
    }
}

#define KERNEL(name, kind, momentum, dtype, extras, width)                    \
    HOT static void name(const optim_plan *p, size_t n, char *const *rows,    \
                         const float *const *grads)                           \
    {                                                                         \
        run(p, n, rows, grads, kind, momentum, dtype, extras, width);         \
    }
#define KERNELS(name, kind, momentum)                                         \
    KERNEL(name##_16, kind, momentum, VECTOR_FP32, 0, 16)                     \
    KERNEL(name##_64, kind, momentum, VECTOR_FP32, 0, 64)                     \
    KERNEL(name##_any, kind, momentum, VECTOR_FP32, 0, p->dim)                \
    KERNEL(name##_extras, kind, momentum, VECTOR_FP32, 1, p->dim)             \
    KERNEL(name##_bf16_16, kind, momentum, VECTOR_BF16, 0, 16)                \
    KERNEL(name##_bf16, kind, momentum, VECTOR_BF16, 0, p->dim)               \
    KERNEL(name##_bf16_extras, kind, momentum, VECTOR_BF16, 1, p->dim)

KERNELS(sgd, OPTIM_SGD, 0)
KERNELS(momentum, OPTIM_SGD, 1)
KERNELS(adagrad, OPTIM_ADAGRAD, 0)
KERNELS(rowwise, OPTIM_ROWWISE_ADAGRAD, 0)
KERNELS(adam, OPTIM_ADAM, 0)
/* AdamW without extras is Adam: only its weight decay differs. */
KERNEL(adamw_extras, OPTIM_ADAMW, 0, VECTOR_FP32, 1, p->dim)
KERNEL(adamw_bf16_extras, OPTIM_ADAMW, 0, VECTOR_BF16, 1, p->dim)

struct kernel_set {
    optim_kernel fp32_16, fp32_64, fp32, fp32_extras;
    optim_kernel bf16_16, bf16, bf16_extras;
};

#define KERNEL_SET(name)                                                      \
    { name##_16, name##_64, name##_any, name##_extras,                        \
      name##_bf16_16, name##_bf16, name##_bf16_extras }

static struct kernel_set kernel_set_of(uint32_t kind, int momentum)
{
    switch (kind) {
    case OPTIM_SGD:
        return momentum ? (struct kernel_set)KERNEL_SET(momentum)
                        : (struct kernel_set)KERNEL_SET(sgd);
    case OPTIM_ADAGRAD:
        return (struct kernel_set)KERNEL_SET(adagrad);
    case OPTIM_ROWWISE_ADAGRAD:
        return (struct kernel_set)KERNEL_SET(rowwise);
    case OPTIM_ADAM:
        return (struct kernel_set)KERNEL_SET(adam);
    default: {
        struct kernel_set set = KERNEL_SET(adam);
        set.fp32_extras = adamw_extras;
        set.bf16_extras = adamw_bf16_extras;
        return set;
    }
    }
}

void persia_optim_prepare(optim_plan *plan, const optim_args *args,
                          uint32_t dtype, int momentum)
{
    const struct kernel_set set = kernel_set_of(args->kind, momentum);
    const int extras = args->weight_decay != 0 || args->max_norm != 0 ||
                       args->max_grad_norm != 0 || args->weight_bound != 0 ||
                       args->grad_scale != 1;
    const uint32_t dim = plan->dim;

    plan->args = *args;
    if (args->kind == OPTIM_ADAM || args->kind == OPTIM_ADAMW) {
        double t = (double)args->step;
        plan->step_size =
            (float)((double)args->lr / (1 - pow((double)args->beta1, t)));
        plan->bias2_sqrt = (float)sqrt(1 - pow((double)args->beta2, t));
    }
    if (dtype == VECTOR_BF16)
        plan->kernel = extras ? set.bf16_extras
                              : dim == 16 ? set.bf16_16 : set.bf16;
    else
        plan->kernel = extras      ? set.fp32_extras
                       : dim == 16 ? set.fp32_16
                       : dim == 64 ? set.fp32_64
                                   : set.fp32;
}
