/* sgd.c: the formula of torch.optim.SGD; with momentum rows keep a buffer. */
#include "optim/kernel.h"

INLINE_HOT void sgd_row(const optim_plan *p, float *restrict w,
                        float *restrict a, float *restrict b,
                        const float *restrict g, uint32_t dim)
{
    (void)a, (void)b;
    subtract(w, g, p->args.lr, dim);
}

INLINE_HOT void sgd_momentum_row(const optim_plan *p, float *restrict w,
                                 float *restrict s, float *restrict b,
                                 const float *restrict g, uint32_t dim)
{
    const float lr = p->args.lr, momentum = p->args.momentum;

    (void)b;
    EACH_COLUMN (j, dim) {
        s[j] = momentum * s[j] + g[j];
        w[j] -= lr * s[j];
    }
}

PERSIA_OPTIM(momentum, sgd_momentum_row, .fields = {{.name = "momentum"}})
PERSIA_OPTIM(sgd, sgd_row, .with_momentum = &algorithm_momentum)
