/* adagrad.c: the formula of torch.optim.Adagrad. */
#include "optim/kernel.h"

INLINE_HOT void adagrad_row(const optim_plan *p, float *restrict w,
                            float *restrict s, float *restrict b,
                            const float *restrict g, uint32_t dim)
{
    const float lr = p->args.lr, eps = p->args.eps;

    (void)b;
    EACH_COLUMN (j, dim) {
        s[j] += g[j] * g[j];
        w[j] -= lr * g[j] / (sqrtf(s[j]) + eps);
    }
}

PERSIA_OPTIM(adagrad, adagrad_row, .check = optim_eps_check,
             .fields = { { .name = "sum", .not_negative = 1,
                           .from_option = 1 } })
