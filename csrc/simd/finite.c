#include "simd/simd.h"

#include <string.h>

/* Bits of floats, side by side. */
typedef uint32_t lanes __attribute__((vector_size(64)));
enum { LANES = 16 };

#define EXPONENT 0x7F800000u /* all of it is set in NaN and Inf alone: */
#define LOWEST 0x00800000u   /* with this added it reaches the sign */
#define SIGN 0x80000000u

/* Sets the sign of each lane whose float is NaN or Inf. */
INLINE_HOT void lanes_look(lanes *bad, const float *x)
{
    lanes bits;
    memcpy(&bits, x, sizeof bits);
    *bad |= (bits & EXPONENT) + LOWEST;
}

INLINE_HOT uint32_t finite_float_bad(const float *x)
{
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    return (bits & EXPONENT) + LOWEST;
}

INLINE_HOT int finite_none_bad(const lanes *bad, uint32_t more)
{
    for (size_t k = 0; k < LANES; k++)
        more |= (*bad)[k];
    return !(more & SIGN);
}

HOT int persia_floats_finite(const float *x, size_t n)
{
    lanes bad[2] = {{0}, {0}};
    uint32_t rest = 0;
    size_t i = 0;

    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        lanes_look(&bad[0], x + i);
        lanes_look(&bad[1], x + i + LANES);
    }
    for (; i + LANES <= n; i += LANES)
        lanes_look(&bad[0], x + i);
    for (; i < n; i++)
        rest |= finite_float_bad(x + i);
    bad[0] |= bad[1];
    return finite_none_bad(&bad[0], rest);
}

HOT int persia_rows_finite(const float *x, size_t n, size_t dim, size_t stride)
{
    enum { AHEAD = 48 }; /* rows; such strides are nothing the CPU follows */
    lanes bad = {0};
    uint32_t rest = 0;

    if (stride == dim)
        return persia_floats_finite(x, n * dim);
    for (size_t i = 0; i < n; i++) {
        const float *row = x + i * stride;
        size_t j = 0;
        if (i + AHEAD < n)
            for (size_t k = 0; k < dim; k += LANES)
                __builtin_prefetch(row + AHEAD * stride + k);
        for (; j + LANES <= dim; j += LANES)
            lanes_look(&bad, row + j);
        if (j < dim && j) /* the last ones, some of them again */
            lanes_look(&bad, row + dim - LANES);
        for (; j < dim && dim < LANES; j++)
            rest |= finite_float_bad(row + j);
    }
    return finite_none_bad(&bad, rest);
}
