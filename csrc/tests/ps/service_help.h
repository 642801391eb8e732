/* service_help.h: what the tests of the service share. */
#ifndef PERSIA_TESTS_PS_SERVICE_HELP_H
#define PERSIA_TESTS_PS_SERVICE_HELP_H

#include "base/base.h"

typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t rng_next(rng *r)
{
    const uint32_t counter[4] = {(uint32_t)r->state,
                                 (uint32_t)(r->state >> 32), 3, 3};
    const uint32_t key[2] = {4, 5};
    uint32_t out[4];
    r->state++;
    philox4x32(counter, key, out);
    return ((uint64_t)out[1] << 32) | out[0];
}

static inline uint64_t rng_below(rng *r, uint64_t n)
{
    return rng_next(r) % n;
}

static inline float rng_float(rng *r) /* [-1, 1) */
{
    return (float)(int32_t)(uint32_t)rng_next(r) * 0x1p-31f;
}

#endif
