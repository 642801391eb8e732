/* kernels.h: what one thread of a device computes (private): one element of
 * the result.  The host compiles the same functions, for tests. */
#ifndef PERSIA_CUDA_KERNELS_H
#define PERSIA_CUDA_KERNELS_H

#include <math.h>

#include "cuda/cuda.h"
#include "simd/simd.h"

#ifdef __CUDACC__
#define KERNEL static __host__ __device__ __forceinline__
#else
#define KERNEL static inline
#endif

KERNEL float kernel_load(const void *from, uint32_t dtype, size_t i)
{
    if (dtype == CUDA_F32)
        return ((const float *)from)[i];
    const uint16_t half = ((const uint16_t *)from)[i];
    return dtype == CUDA_F16 ? fp16_widen(half) : bf16_widen(half);
}

KERNEL void kernel_store(void *to, uint32_t dtype, size_t i, float value)
{
    if (dtype == CUDA_F32)
        ((float *)to)[i] = value;
    else
        ((uint16_t *)to)[i] = dtype == CUDA_F16 ? fp16_narrow(value)
                                                : bf16_narrow(value);
}

/* The ids of bag x: [*from, *to). */
KERNEL void kernel_bag(const cuda_bags *of, size_t x, size_t *from, size_t *to)
{
    *from = of->offsets ? (size_t)of->offsets[x] : x;
    *to = of->offsets ? (size_t)of->offsets[x + 1] : x + 1;
}

/* What the weights of a bag of n ids are divided by. */
KERNEL float kernel_divisor(int32_t pooling, size_t n)
{
    if (pooling == POOL_MEAN)
        return (float)n;
    if (pooling == POOL_SQRTN)
        return sqrtf((float)n);
    return 1;
}

/* Element j of bag x. */
KERNEL void kernel_pool(const cuda_pool *a, size_t x, uint32_t j)
{
    const cuda_feature f = a->of.features[x / a->of.bags];
    size_t from, to;
    float sum = 0;
    if (j >= (uint32_t)f.dim)
        return;
    kernel_bag(&a->of, x, &from, &to);
    const float divisor = kernel_divisor(f.pooling, to - from);
    for (size_t i = from; i < to; i++) {
        const float weight = a->of.weights ? a->of.weights[i] : 1;
        const float scale = weight / divisor;
        const float value = kernel_load(a->rows, a->rows_dtype,
                                        (size_t)a->inverse[i] * a->row_stride +
                                            j);
        sum = i == from ? value * scale : sum + value * scale;
    }
    kernel_store(a->out, a->out_dtype,
                 x % a->of.bags * a->out_stride + (size_t)f.column + j, sum);
}

/* Element j of the sum of row r's gradients. */
KERNEL void kernel_sum(const cuda_sum *a, size_t r, uint32_t j)
{
    float sum = 0;
    for (int32_t k = a->starts[r]; k < a->starts[r + 1]; k++) {
        const size_t i = (size_t)a->order[k];
        const size_t x = a->bag ? (size_t)a->bag[i] : i;
        const cuda_feature f = a->of.features[x / a->of.bags];
        size_t from, to;
        if (j >= (uint32_t)f.dim)
            break;
        kernel_bag(&a->of, x, &from, &to);
        const float weight = a->of.weights ? a->of.weights[i] : 1;
        const float scale = weight / kernel_divisor(f.pooling, to - from);
        const float value =
            kernel_load(a->grad, a->grad_dtype,
                        x % a->of.bags * a->grad_stride + (size_t)f.column +
                            j);
        sum = k == a->starts[r] ? scale * value : sum + scale * value;
    }
    kernel_store(a->out, a->out_dtype, r * a->out_stride + j, sum);
}

KERNEL void kernel_convert(const cuda_convert *a, size_t i)
{
    kernel_store(a->to, a->to_dtype, i,
                 kernel_load(a->from, a->from_dtype, i));
}

#endif
