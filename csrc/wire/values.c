/* values.c: fp32 rows to wire values and back. */
#include "wire/wire.h"

#include "simd/simd.h"

#include <float.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "bulk data leave as they lie in memory: little-endian");

/* max |row| / 32768, but at least the smallest normal number, by which one
 * can divide; 1 for a row with NaN or Inf, which stay what they are. */
INLINE_HOT float row_scale(const float *row, uint32_t dim)
{
    uint32_t most = 0;
    for (uint32_t j = 0; j < dim; j++) {
        const uint32_t bits = float_bits(row[j]) & 0x7FFFFFFFu;
        most = bits > most ? bits : most;
    }
    if (most >= 0x7F800000u)
        return 1;
    const float scale = bits_float(most) * 0x1p-15f;
    return scale < FLT_MIN ? FLT_MIN : scale;
}

/* Rows too short for a loop of vectors: their dim is known to the compiler,
 * which works on several at once. */
#define EACH_DIM(call_)                                                       \
    switch (dim) {                                                            \
    case 4: call_(4); break;                                                  \
    case 8: call_(8); break;                                                  \
    default: call_(dim);                                                      \
    }

INLINE_HOT void values_narrow_rows(size_t n, uint32_t dim,
                                   const float *restrict from, size_t stride,
                                   uint16_t *restrict to,
                                   float *restrict scales)
{
    for (size_t i = 0; i < n; i++, from += stride, to += dim) {
        const float scale = row_scale(from, dim);
        scales[i] = scale;
        for (uint32_t j = 0; j < dim; j++)
            to[j] = fp16_narrow(from[j] / scale);
    }
}

HOT static void values_narrow_fp16(size_t n, uint32_t dim, const float *from,
                                   size_t stride, uint16_t *to, float *scales){
#define CALL(d) values_narrow_rows(n, d, from, stride, to, scales)
    EACH_DIM(CALL)
#undef CALL
}

INLINE_HOT void values_widen_rows(size_t n, uint32_t dim,
                                  const uint16_t *restrict from,
                                  const float *restrict scales,
                                  float *restrict to, size_t stride)
{
    for (size_t i = 0; i < n; i++, from += dim, to += stride) {
        const float scale = scales[i];
        for (uint32_t j = 0; j < dim; j++)
            to[j] = scale * fp16_widen(from[j]);
    }
}

HOT static void values_widen_fp16(size_t n, uint32_t dim, const uint16_t *from,
                                  const float *scales, float *to,
                                  size_t stride){
#define CALL(d) values_widen_rows(n, d, from, scales, to, stride)
    EACH_DIM(CALL)
#undef CALL
}

HOT static void values_narrow_bf16(size_t n, uint32_t dim,
                                   const float *restrict from, size_t stride,
                                   uint16_t *restrict to)
{
    for (size_t i = 0; i < n; i++, from += stride, to += dim)
        for (uint32_t j = 0; j < dim; j++)
            to[j] = bf16_narrow(from[j]);
}

HOT static void values_widen_bf16(size_t n, uint32_t dim,
                                  const uint16_t *restrict from,
                                  float *restrict to, size_t stride)
{
    for (size_t i = 0; i < n; i++, from += dim, to += stride)
        for (uint32_t j = 0; j < dim; j++)
            to[j] = bf16_widen(from[j]);
}

static void values_copy_rows(size_t n, uint32_t dim, const float *from,
                             size_t from_stride, float *to, size_t to_stride)
{
    if (from_stride == dim && to_stride == dim) {
        if (n)
            memcpy(to, from, n * dim * sizeof *to);
        return;
    }
    for (size_t i = 0; i < n; i++)
        memcpy(to + i * to_stride, from + i * from_stride,
               dim * sizeof *to);
}

void persia_wire_narrow(uint32_t dtype, size_t n, uint32_t dim,
                        const float *from, size_t stride, void *to,
                        float *scales)
{
    if (dtype == WIRE_FP32)
        values_copy_rows(n, dim, from, stride, to, dim);
    else if (dtype == WIRE_FP16)
        values_narrow_fp16(n, dim, from, stride, to, scales);
    else
        values_narrow_bf16(n, dim, from, stride, to);
}

void persia_wire_widen(uint32_t dtype, size_t n, uint32_t dim,
                       const void *from, const float *scales, float *to,
                       size_t stride)
{
    if (dtype == WIRE_FP32)
        values_copy_rows(n, dim, from, dim, to, stride);
    else if (dtype == WIRE_FP16)
        values_widen_fp16(n, dim, from, scales, to, stride);
    else
        values_widen_bf16(n, dim, from, to, stride);
}
