/* pool.h: jagged rows to pooled bags, and what each id's gradient is.
 *
 * A feature is n ids in `bags` bags, ids of bag b at offsets[b]..offsets[b+1).
 * Pooling with scales s_i:  out[b] = sum_i s_i * row_i, in the order of ids.
 *   SUM: s_i = w_i;  MEAN: w_i / (number of ids);  SQRTN: w_i / sqrt(number);
 *   NONE: no bags, every id is a row of the output, scaled by w_i.
 * Without weights w_i = 1.
 * An empty bag is zeros.  The gradient of row_i is s_i * gradient of its bag.
 */
#ifndef PERSIA_POOL_H
#define PERSIA_POOL_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum pool_kind { POOL_SUM, POOL_MEAN, POOL_SQRTN, POOL_NONE, POOL_KINDS };

/* offsets: [bags + 1], int64.  PERSIA_EOFFSETS unless they start at `first`,
 * never fall, and end at `last`.  The text names `feature`. */
PERSIA_API int persia_pool_check(const char *feature, size_t bags,
                                 const int64_t *offsets, int64_t first,
                                 int64_t last);

/* Writes bag numbers [n] and scales [n] for the backward (either may be
 * NULL).  offsets are relative to offsets[0]. */
PERSIA_API void persia_pool_expand(uint32_t kind, size_t bags,
                                   const int64_t *offsets,
                                   const float *weights, uint32_t *bag,
                                   float *scale);

/* out[b * out_stride .. + dim) = pooled bag b; rows [n, dim] packed.  With
 * NONE out has a row for each id. */
PERSIA_API void persia_pool_forward(uint32_t kind, size_t bags,
                                    const int64_t *offsets,
                                    const float *weights, const float *rows,
                                    uint32_t dim, float *out,
                                    size_t out_stride);

#ifdef __cplusplus
}
#endif
#endif
