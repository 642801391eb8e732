/* pool.c: pooling kernels.
 *
 * Each output element is a chain of products and sums in the order of ids,
 * so vector width changes no bit.  Widths that are common keep the bag in
 * registers.
 */
#include "pool/pool.h"

#include "simd/simd.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Eight floats at any address. */
typedef float vec8 __attribute__((vector_size(32)));

/* As a macro because passing vectors by value depends on -march. */
#define LOAD(v, p) memcpy(&(v), (p), sizeof(vec8))
#define STORE(p, v) memcpy((p), &(v), sizeof(vec8))

int persia_pool_check(const char *feature, size_t bags, const int64_t *offsets,
                      int64_t first, int64_t last)
{
    if (offsets[0] != first)
        return persia_err_set(
            PERSIA_EOFFSETS,
            "feature %s: its offsets start at %lld, expected %lld", feature,
            (long long)offsets[0], (long long)first);
    for (size_t b = 0; b < bags; b++)
        if (offsets[b + 1] < offsets[b])
            return persia_err_set(
                PERSIA_EOFFSETS,
                "feature %s: offsets fall from %lld to %lld at "
                "bag %zu; they must never fall",
                feature, (long long)offsets[b], (long long)offsets[b + 1], b);
    if (offsets[bags] != last)
        return persia_err_set(
            PERSIA_EOFFSETS,
            "feature %s: its offsets end at %lld, expected %lld, "
            "as many as there are ids",
            feature, (long long)offsets[bags], (long long)last);
    return PERSIA_OK;
}

/* What the weights of a bag of n ids are divided by. */
INLINE float pool_bag_divisor(uint32_t kind, int64_t n)
{
    if (kind == POOL_MEAN)
        return (float)n;
    if (kind == POOL_SQRTN)
        return sqrtf((float)n);
    return 1;
}

void persia_pool_expand(uint32_t kind, size_t bags, const int64_t *offsets,
                        const float *weights, uint32_t *bag, float *scale)
{
    int64_t first = offsets[0];
    if (kind == POOL_NONE) {
        size_t n = (size_t)(offsets[bags] - first);
        for (size_t i = 0; bag && i < n; i++)
            bag[i] = (uint32_t)i;
        for (size_t i = 0; scale && i < n; i++)
            scale[i] = weights ? weights[i] : 1;
        return;
    }
    for (size_t b = 0; b < bags; b++) {
        int64_t at = offsets[b] - first, end = offsets[b + 1] - first;
        for (int64_t i = at; bag && i < end; i++)
            bag[i] = (uint32_t)b;
        if (!scale)
            continue;
        float divisor = pool_bag_divisor(kind, end - at);
        for (int64_t i = at; i < end; i++)
            scale[i] = (weights ? weights[i] : 1) / divisor;
    }
}

/* One bag of n >= 1 rows. `dim` is a constant multiple of 8, at most 64. */
INLINE void pool_bag_fixed(int64_t n, const float *weights, float divisor,
                           const float *rows, uint32_t dim, float *out)
{
    vec8 acc[8], v;
    float scale = (weights ? weights[0] : 1) / divisor;
#pragma GCC unroll 8
    for (uint32_t k = 0; k < dim / 8; k++) {
        LOAD(v, rows + 8 * k);
        acc[k] = v * scale;
    }
    for (int64_t i = 1; i < n; i++) {
        rows += dim;
        if (weights)
            scale = weights[i] / divisor;
#pragma GCC unroll 8
        for (uint32_t k = 0; k < dim / 8; k++) {
            LOAD(v, rows + 8 * k);
            acc[k] = acc[k] + v * scale;
        }
    }
#pragma GCC unroll 8
    for (uint32_t k = 0; k < dim / 8; k++)
        STORE(out + 8 * k, acc[k]);
}

/* The same for any dim; the bag stays in the output, which is in cache. */
INLINE void pool_bag_any(int64_t n, const float *weights, float divisor,
                         const float *restrict rows, uint32_t dim,
                         float *restrict out)
{
    float scale = (weights ? weights[0] : 1) / divisor;
    for (uint32_t d = 0; d < dim; d++)
        out[d] = rows[d] * scale;
    for (int64_t i = 1; i < n; i++) {
        rows += dim;
        if (weights)
            scale = weights[i] / divisor;
        for (uint32_t d = 0; d < dim; d++)
            out[d] = out[d] + rows[d] * scale;
    }
}

/* `dim` and `fixed` are constants where fixed is 1. */
INLINE void pool_forward_dim(uint32_t kind, size_t bags,
                             const int64_t *offsets, const float *weights,
                             const float *rows, uint32_t dim, int fixed,
                             float *out, size_t out_stride)
{
    int64_t first = offsets[0];
    for (size_t b = 0; b < bags; b++, out += out_stride) {
        int64_t at = offsets[b] - first, n = offsets[b + 1] - offsets[b];
        const float *w = weights ? weights + at : NULL;
        const float *r = rows + (size_t)at * dim;
        float divisor = pool_bag_divisor(kind, n);
        if (n == 0)
            memset(out, 0, dim * sizeof *out);
        else if (fixed)
            pool_bag_fixed(n, w, divisor, r, dim, out);
        else
            pool_bag_any(n, w, divisor, r, dim, out);
    }
}

/* POOL_NONE: every row for itself. */
INLINE void pool_forward_rows(size_t n, const float *weights,
                              const float *restrict rows, uint32_t dim,
                              float *restrict out, size_t out_stride)
{
    if (!weights && out_stride == dim) {
        memcpy(out, rows, n * dim * sizeof *out);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const float scale = weights ? weights[i] : 1;
        for (uint32_t d = 0; d < dim; d++)
            out[i * out_stride + d] = rows[i * dim + d] * scale;
    }
}

HOT void persia_pool_forward(uint32_t kind, size_t bags,
                             const int64_t *offsets, const float *weights,
                             const float *rows, uint32_t dim, float *out,
                             size_t out_stride)
{
    if (kind == POOL_NONE) {
        pool_forward_rows((size_t)(offsets[bags] - offsets[0]), weights, rows,
                          dim, out, out_stride);
        return;
    }
#define FIXED(d)                                                              \
    case d:                                                                   \
        pool_forward_dim(kind, bags, offsets, weights, rows, d, 1, out,       \
                         out_stride);                                         \
        return;
    switch (dim) {
        FIXED(8)
        FIXED(16)
        FIXED(32)
        FIXED(64)
    default:
        pool_forward_dim(kind, bags, offsets, weights, rows, dim, 0, out,
                         out_stride);
    }
#undef FIXED
}
