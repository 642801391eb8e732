/* optim.h: sparse optimizers that update one row at a time.
 *
 * They are lazy: a row changes only when it has a gradient.  Weight decay is
 * coupled (added to the gradient) or decoupled, and touches touched rows only.
 * Hyper-parameters travel with each push, so learning-rate schedulers work.
 * Each optimizer has a file of its own, which declares what a row keeps.
 */
#ifndef PERSIA_OPTIM_H
#define PERSIA_OPTIM_H

#include "base/base.h"
#include "simd/simd.h"
#include "spec/spec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Hyper-parameters of one push, each also by its name alone. */
typedef struct optim_args {
    union {
        optim_hyper hyper;
        struct {
            OPTIM_HYPER_MEMBERS
        };
    };
    uint64_t step; /* t of Adam's bias correction, from 1 */
} optim_args;

/* "sgd", "adagrad" and so on; NULL if no kind. */
PERSIA_API const char *persia_optim_name(uint32_t kind);
/* Floats of state a row; `momentum`: whether SGD keeps a buffer. */
PERSIA_API uint32_t persia_optim_state_floats(uint32_t kind, uint32_t dim,
                                              int momentum);
/* The state of a new row; `option` is the table's state_init. */
PERSIA_API void persia_optim_state_init(uint32_t kind, uint32_t dim,
                                        int momentum, float option,
                                        float *state);
/* The first field that is not finite, or negative where a root is taken of
 * it; NULL: a row's state may be such. */
PERSIA_API const char *persia_optim_state_misfit(uint32_t kind, uint32_t dim,
                                                 int momentum,
                                                 const float *state);
/* PERSIA_EARG when a hyper-parameter is out of its range (or not finite). */
PERSIA_API int persia_optim_check(const optim_args *args);

/* How one push updates rows; made once a push by persia_optim_prepare().  A
 * row is given by the address of its id; the vector lies `vector` bytes behind
 * it, the state `state` bytes. */
typedef struct optim_plan optim_plan;
typedef void (*optim_kernel)(const optim_plan *plan, size_t n,
                             char *const *rows, const float *const *grads);
struct optim_plan {
    optim_args args;
    uint32_t dim;
    uint32_t vector, state;  /* offsets in a row, bytes */
    float step_size;         /* Adam: lr / (1 - beta1^t) */
    float bias2_sqrt;        /* Adam: sqrt(1 - beta2^t) */
    uint32_t noise_key[2];   /* stochastic rounding: the table's */
    uint64_t noise_draw;     /* and the push's key of draws */
    optim_kernel kernel;     /* rows [n]; grads [n] of dim each */
};
/* plan->dim, vector, state, noise_* are set by the caller before. */
PERSIA_API void persia_optim_prepare(optim_plan *plan, const optim_args *args,
                                     uint32_t dtype, int momentum);

/* fp32 to bf16 bits, to nearest (ties to even). */
static inline uint16_t bf16_nearest(float value)
{
    union { float f; uint32_t u; } x = { value };
    return (uint16_t)((x.u + 0x7FFFu + ((x.u >> 16) & 1)) >> 16);
}

/* A vector in a row: fp32; bf16; or int8, -127 .. 127 times an fp32 scale that
 * lies before them.  A scale has 17 significant bits, so products are exact:
 * elements that an update does not change stay, as long as the scale does. */
static inline uint32_t vector_size(uint32_t dtype, uint32_t dim)
{
    return dtype == VECTOR_FP32   ? dim * 4
           : dtype == VECTOR_BF16 ? dim * 2
                                  : dim + 4;
}
/* For a row whose largest element is `most`, finite; 0 if that is tiny. */
static inline float int8_scale(float most)
{
    union { float f; uint32_t u; } x = { most / 127 };
    x.u = (x.u + 0x7F) & ~0x7Fu;
    return most < 2e-36f ? 0 : x.f;
}

#ifdef __cplusplus
}
#endif
#endif
