/* adam.c: Adam and AdamW by the formulas of torch.optim: they differ in their
 * weight decay alone. */
#include "optim/kernel.h"

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

#define ADAM_FIELDS { { .name = "exp_avg" },                                  \
                      { .name = "exp_avg_sq", .not_negative = 1 } }

PERSIA_OPTIM(adam, adam_row, .check = optim_moments_check,
             .prepare = optim_moments_prepare, .fields = ADAM_FIELDS)
PERSIA_OPTIM(adamw, adam_row, .check = optim_moments_check,
             .prepare = optim_moments_prepare, .fields = ADAM_FIELDS,
             .decoupled = 1)
