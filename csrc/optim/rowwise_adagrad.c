/* rowwise_adagrad.c: Adagrad with one accumulator a row, the sum of the mean
 * squared gradient (fbgemm, torchrec). */
#include "optim/kernel.h"

INLINE_HOT void rowwise_row(const optim_plan *p, float *restrict w,
                            float *restrict s, float *restrict b,
                            const float *restrict g, uint32_t dim)
{
    float squares = *s + sum_squares(g, dim) / (float)dim;
    float factor = p->args.lr / (sqrtf(squares) + p->args.eps);

    (void)b;
    *s = squares;
    subtract(w, g, factor, dim);
}

PERSIA_OPTIM(rowwise_adagrad, rowwise_row, .check = optim_eps_check,
             .fields = { { .name = "sum", .width = PER_ROW,
                           .not_negative = 1, .from_option = 1 } })
