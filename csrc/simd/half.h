/* half.h: fp32 and its 16-bit formats, as arithmetic on bits: every
 * instruction set vectorises it to the same result, and a GPU computes it,
 * whatever a processor does about subnormal numbers. */
#ifndef PERSIA_SIMD_HALF_H
#define PERSIA_SIMD_HALF_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define HALF_INLINE static __host__ __device__ __forceinline__
#else
#define HALF_INLINE static inline __attribute__((always_inline))
#endif

HALF_INLINE uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

HALF_INLINE float bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To nearest, ties to even: adding a number of the right size makes the
 * hardware round where binary16 ends.  NaN becomes the quiet one. */
HALF_INLINE uint16_t fp16_narrow(float value)
{
    const uint32_t bits = float_bits(value), sign = bits & 0x80000000u;
    const uint32_t twice = bits << 1;
    /* From 2^16 on to Inf; the multiplication undoes itself below. */
    float base = bits_float(bits ^ sign) * 0x1p112f * 0x1p-110f;
    uint32_t bias = twice & 0xFF000000u;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    base += bits_float((bias >> 1) + 0x07800000u);
    const uint32_t rounded = float_bits(base);
    const uint32_t half = ((rounded >> 13) & 0x7C00u) + (rounded & 0xFFFu);
    return (uint16_t)(sign >> 16 | (twice > 0xFF000000u ? 0x7E00u : half));
}

HALF_INLINE float fp16_widen(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16, sign = bits & 0x80000000u;
    const uint32_t twice = bits << 1;
    const float normal =
        bits_float((twice >> 4) + (0xE0u << 23)) * 0x1p-112f;
    const float subnormal =
        bits_float((twice >> 17) | (126u << 23)) - 0.5f;
    return bits_float(sign | (twice < (1u << 27) ? float_bits(subnormal)
                                                 : float_bits(normal)));
}

HALF_INLINE uint16_t bf16_narrow(float value)
{
    const uint32_t bits = float_bits(value);
    const uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits << 1) > 0xFF000000u ? (bits >> 16 | 0x40u)
                                                : nearest);
}

HALF_INLINE float bf16_widen(uint16_t half)
{
    return bits_float((uint32_t)half << 16);
}

#endif
