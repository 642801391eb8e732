/* ftrl.c: FTRL-proximal (McMahan et al., Ad Click Prediction, 2013).
 *
 * z is lr times that of the paper.  With a constant lr these are the same
 * weights; under a schedule weights do not jump with lr, and lr may be 0. */
#include "optim/kernel.h"

#include <float.h>

INLINE_HOT void ftrl_row(const optim_plan *p, float *restrict w,
                         float *restrict z, float *restrict n,
                         const float *restrict g, uint32_t dim)
{
    const float lr = p->args.lr, l1 = lr * p->args.l1, l2 = lr * p->args.l2;
    const float beta = p->args.beta;

    EACH_COLUMN (j, dim) {
        const float sum = n[j] + g[j] * g[j];
        const float squares = sum < FLT_MAX ? sum : FLT_MAX;
        const float root = sqrtf(squares);
        const float sigma = root - sqrtf(n[j]); /* times lr */
        const float to = z[j] + (lr * g[j] - sigma * w[j]);
        const float rest = to > l1 ? l1 - to : to < -l1 ? -l1 - to : 0;
        n[j] = squares;
        z[j] = to;
        w[j] = rest / (beta + root + l2);
    }
}

static int ftrl_check(const optim_args *a)
{
    int rc;

    /* A column that never had a gradient divides by beta alone. */
    if ((rc = optim_range("beta", a->beta, FLT_MIN, OPTIM_MOST)) ||
        (rc = optim_range("l1", a->l1, 0, OPTIM_MOST)))
        return rc;
    return optim_range("l2", a->l2, 0, OPTIM_MOST);
}

PERSIA_OPTIM(ftrl, ftrl_row, .check = ftrl_check,
             .fields = { { .name = "z" },
                         { .name = "n", .not_negative = 1,
                           .from_option = 1 } })
