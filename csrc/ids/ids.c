#include "ids/ids.h"

#include "simd/simd.h"

#include <string.h>

uint64_t persia_ids_key(void)
{
    uint64_t key;

    if (persia_random_id(&key)) /* no system that runs refuses it */
        key = id_hash(persia_clock_ns());
    return key | 1;
}

HOT static void ids_hash_all(const uint64_t *restrict ids, size_t n,
                             uint64_t key, uint64_t *restrict hash)
{
    for (size_t i = 0; i < n; i++)
        hash[i] = id_place(ids[i], key);
}

void persia_ids_split_chunk(const uint64_t *ids, size_t n, uint64_t key,
                            uint32_t stripes, uint64_t *hash, uint16_t *order,
                            uint16_t *start)
{
    uint64_t unordered[IDS_CHUNK];
    uint16_t next[IDS_STRIPES_MAX];
    const uint32_t mask = stripes - 1;

    ids_hash_all(ids, n, key, unordered);
    memset(start, 0, (stripes + 1) * sizeof start[0]);
    for (size_t i = 0; i < n; i++)
        start[hash_stripe(unordered[i], mask) + 1]++;
    for (uint32_t s = 0; s < stripes; s++) {
        next[s] = start[s];
        start[s + 1] = (uint16_t)(start[s + 1] + start[s]);
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t to = next[hash_stripe(unordered[i], mask)]++;
        hash[to] = unordered[i];
        order[to] = (uint16_t)i;
    }
}
