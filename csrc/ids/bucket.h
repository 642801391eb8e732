/* bucket.h: a cache line of a hash index: twelve entries, of each a tag and a
 * row number. */
#ifndef PERSIA_IDS_BUCKET_H
#define PERSIA_IDS_BUCKET_H

#include "base/base.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { BUCKET_ENTRIES = 12 };

typedef struct bucket {
    uint8_t tag[BUCKET_ENTRIES]; /* hash_tag(); 0: no entry */
    uint8_t passed; /* entries that wanted it and lie in a later one; it
                       stays at 255 */
    uint8_t unused[3];
    uint32_t slot[BUCKET_ENTRIES];
} bucket;

/* Bit i is set where entry i has this tag. */
static inline uint32_t bucket_match(const bucket *b, uint8_t tag)
{
#ifdef __SSE2__
    __m128i tags = _mm_load_si128((const __m128i *)(const void *)b);
    __m128i same = _mm_cmpeq_epi8(tags, _mm_set1_epi8((char)tag));
    return (uint32_t)_mm_movemask_epi8(same) & 0xFFFu;
#else
    uint32_t mask = 0;
    for (uint32_t i = 0; i < BUCKET_ENTRIES; i++)
        mask |= (uint32_t)(b->tag[i] == tag) << i;
    return mask;
#endif
}

#endif
