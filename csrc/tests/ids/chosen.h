/* chosen.h: ids that someone has chosen to collide: the hash is known, and has
 * an inverse. */
#ifndef PERSIA_TESTS_IDS_CHOSEN_H
#define PERSIA_TESTS_IDS_CHOSEN_H

#include "ids/ids.h"

static inline uint64_t unshift(uint64_t x, int by)
{
    uint64_t y = x;

    for (int done = by; done < 64; done += by)
        y = x ^ (y >> by);
    return y;
}

/* The inverse of an odd factor modulo 2^64, by Newton's iteration. */
static inline uint64_t inverse(uint64_t odd)
{
    uint64_t x = odd;

    for (int i = 0; i < 6; i++)
        x *= 2 - odd * x;
    return x;
}

static inline uint64_t unhash(uint64_t h)
{
    h = unshift(h, 31) * inverse(0x94D049BB133111EBu);
    h = unshift(h, 27) * inverse(0xBF58476D1CE4E5B9u);
    return unshift(h, 30) - 0x9E3779B97F4A7C15u;
}

enum chosen {
    CHOSEN_TOP,    /* one position, tag and stripe: hashes differ in bits
                      15..0 alone */
    CHOSEN_BOTTOM, /* one tag, stripe and slot: hashes differ in the top half
                      alone */
    CHOSEN_KINDS
};

static inline uint64_t chosen_id(enum chosen kind, uint32_t i)
{
    return kind == CHOSEN_TOP ? unhash(0xFEDCBA9876540000u | (i & 0xFFFF))
                              : unhash((uint64_t)i << 32 | 0x76543210u);
}

#endif
