/* hash.c: persia_value_hash(), XXH64 of any length. */
#include "data/hash.h"

#include "data/data.h"

static uint64_t hash_merge(uint64_t h, uint64_t lane)
{
    return (h ^ xxh_round(0, lane)) * XXH_P1 + XXH_P4;
}

uint64_t persia_value_hash(const void *bytes, size_t n, uint64_t salt)
{
    const unsigned char *p = bytes;
    if (n < 32)
        return xxh_short(p, n, salt);
    uint64_t a = salt + XXH_P1 + XXH_P2, b = salt + XXH_P2, c = salt,
             d = salt - XXH_P1;
    size_t left = n;
    for (; left >= 32; left -= 32, p += 32) {
        a = xxh_round(a, load64(p));
        b = xxh_round(b, load64(p + 8));
        c = xxh_round(c, load64(p + 16));
        d = xxh_round(d, load64(p + 24));
    }
    uint64_t h = rotate_left(a, 1) + rotate_left(b, 7) + rotate_left(c, 12) +
                 rotate_left(d, 18);
    h = hash_merge(hash_merge(hash_merge(hash_merge(h, a), b), c), d);
    return xxh_tail(h + n, p, left);
}
