/* rowwise_adam.c: Adam with one second moment a row, of the mean squared
 * gradient, and decoupled weight decay (fbgemm, torchrec:
 * PARTIAL_ROWWISE_ADAM). */
#include "optim/kernel.h"

INLINE_HOT void rowwise_adam_row(const optim_plan *p, float *restrict w,
                                 float *restrict m, float *restrict v,
                                 const float *restrict g, uint32_t dim)
{
    const float b1 = 1 - p->args.beta1, b2 = p->args.beta2, c2 = 1 - b2;
    const float second = *v * b2 + c2 * (sum_squares(g, dim) / (float)dim);
    const float factor =
        p->step_size / (sqrtf(second) / p->bias2_sqrt + p->args.eps);

    *v = second;
    EACH_COLUMN (j, dim) {
        m[j] += (g[j] - m[j]) * b1;
        w[j] -= factor * m[j];
    }
}

PERSIA_OPTIM(rowwise_adam, rowwise_adam_row, .check = optim_moments_check,
             .prepare = optim_moments_prepare,
             .fields = { { .name = "exp_avg" },
                         { .name = "exp_avg_sq", .width = PER_ROW,
                           .not_negative = 1 } },
             .decoupled = 1)
