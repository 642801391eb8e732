#include "base/base.h"

#include <string.h>

HOT int floats_finite(const float *x, size_t n)
{
    uint32_t bad = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bad |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    return !bad;
}

HOT int rows_finite(const float *x, size_t n, size_t dim, size_t stride)
{
    enum { AHEAD = 48 }; /* rows; such strides are nothing the CPU follows */
    uint32_t most[16] = {0};

    for (size_t i = 0; i < n; i++) {
        const float *row = x + i * stride;
        uint32_t bits[16];
        size_t j = 0;
        if (i + AHEAD < n)
            for (size_t k = 0; k < dim; k += 16)
                __builtin_prefetch(row + AHEAD * stride + k);
        for (; j + 16 <= dim; j += 16) {
            memcpy(bits, row + j, sizeof bits);
            for (uint32_t k = 0; k < 16; k++) {
                bits[k] &= 0x7FFFFFFFu;
                most[k] = bits[k] > most[k] ? bits[k] : most[k];
            }
        }
        for (uint32_t k = 0; j + k < dim; k++) {
            memcpy(bits, row + j + k, sizeof bits[0]);
            bits[0] &= 0x7FFFFFFFu;
            most[k] = bits[0] > most[k] ? bits[0] : most[k];
        }
    }
    for (uint32_t k = 0; k < 16; k++)
        if (most[k] >= 0x7F800000u)
            return 0;
    return 1;
}
