/* hash.h: XXH64 (Yann Collet's algorithm, written from its specification),
 * inlined where short values are hashed. */
#ifndef PERSIA_DATA_HASH_H
#define PERSIA_DATA_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XXH_P1 0x9E3779B185EBCA87u
#define XXH_P2 0xC2B2AE3D27D4EB4Fu
#define XXH_P3 0x165667B19E3779F9u
#define XXH_P4 0x85EBCA77C2B2AE63u
#define XXH_P5 0x27D4EB2F165667C5u

static inline uint64_t rotate_left(uint64_t x, int bits)
{
    return (x << bits) | (x >> (64 - bits));
}

/* The specification reads little-endian words. */
static inline uint64_t load64(const unsigned char *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

static inline uint32_t load32(const unsigned char *p)
{
    uint32_t x;
    memcpy(&x, p, sizeof x);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap32(x);
#endif
    return x;
}

static inline uint64_t xxh_round(uint64_t lane, uint64_t word)
{
    return rotate_left(lane + word * XXH_P2, 31) * XXH_P1;
}

/* Mixes the last n < 32 bytes into h, and finishes. */
static inline uint64_t xxh_tail(uint64_t h, const unsigned char *p, size_t n)
{
    for (; n >= 8; n -= 8, p += 8)
        h = rotate_left(h ^ xxh_round(0, load64(p)), 27) * XXH_P1 + XXH_P4;
    if (n >= 4) {
        h = rotate_left(h ^ load32(p) * XXH_P1, 23) * XXH_P2 + XXH_P3;
        n -= 4;
        p += 4;
    }
    for (; n; n--, p++)
        h = rotate_left(h ^ *p * XXH_P5, 11) * XXH_P1;
    h = (h ^ (h >> 33)) * XXH_P2;
    h = (h ^ (h >> 29)) * XXH_P3;
    return h ^ (h >> 32);
}

/* XXH64 of n < 32 bytes. */
static inline uint64_t xxh_short(const unsigned char *p, size_t n,
                                 uint64_t seed)
{
    return xxh_tail(seed + XXH_P5 + n, p, n);
}

#endif
