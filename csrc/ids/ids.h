/* ids.h: hashing of ids, and the split of a batch into stripes.
 *
 * One 64-bit hash serves all purposes; which bits do what is fixed here:
 *
 *   bits 63..32  position: directory page, bucket in the page
 *   bits 31..24  tag in the bucket (0 is mapped to 1: 0 means empty)
 *   bits 23..16  stripe
 *   bits 15..4   slot: what a shard has, apart from the others, so that pages
 *                fill alike for any number of shards
 *
 * Everybody can compute id_hash(), and so choose ids that collide.  Hence
 * position and tag are those of id_place(), which a secret key decides.
 * Slot and stripe decide who works,
 * not how much there is to do; they are the same in each process, as files,
 * the filters of admission (admit.h) and the order of eviction depend on them.
 * Nothing that is computed depends on position or tag.
 */
#ifndef PERSIA_IDS_H
#define PERSIA_IDS_H

#include "base/base.h"
#include "ids/batch_index.h"
#include "ids/bucket.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { IDS_CHUNK = 4096, IDS_STRIPES_MAX = 256 };

/* A bijective mix (the finaliser of splitmix64 with its increment, so that
 * id 0 does not hash to 0). */
static inline uint64_t id_hash(uint64_t id)
{
    uint64_t h = id + 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

/* The hash with position and tag by a key, which is odd.  The top bits of a
 * product with a random odd factor collide, for two given numbers, with a
 * chance of at most 2 in their range (multiply-shift hashing is universal:
 * Dietzfelbinger et al. 1997).  One product maps an arithmetic series to one,
 * which a few factors in a hundred bunch together; the product before breaks
 * it. */
static inline uint64_t id_place(uint64_t id, uint64_t key)
{
    const uint64_t hash = id_hash(id), known = 0xFFFFFF;
    uint64_t place = hash * key;
    place = (place ^ (place >> 32)) * (id_hash(key) | 1);
    return (place & ~known) | (hash & known);
}

/* A random key. */
PERSIA_API uint64_t persia_ids_key(void);

/* Where a place begins to look in a hash table of so many entries. */
static inline uint32_t place_home(uint64_t place, uint64_t entries)
{
    return (uint32_t)(((place >> 32) * entries) >> 32);
}

static inline uint8_t hash_tag(uint64_t hash)
{
    uint8_t tag = (uint8_t)(hash >> 24);
    return tag ? tag : 1;
}

static inline uint32_t hash_stripe(uint64_t hash, uint32_t stripe_mask)
{
    return (uint32_t)(hash >> 16) & stripe_mask;
}

enum { IDS_SLOTS = 4096, IDS_SHARDS_MAX = IDS_SLOTS };

static inline uint32_t hash_slot(uint64_t hash)
{
    return (uint32_t)(hash >> 4) & (IDS_SLOTS - 1);
}

/* The shard, of `shards`, that has a slot, if no slot has moved. */
static inline uint32_t slot_shard(uint32_t slot, uint32_t shards)
{
    return slot * shards / IDS_SLOTS;
}

/* Its first slot; that of the shard behind it ends its slots. */
static inline uint32_t shard_slot(uint32_t shard, uint32_t shards)
{
    return (shard * IDS_SLOTS + shards - 1) / shards;
}

static inline uint32_t hash_shard(uint64_t hash, uint32_t shards)
{
    return slot_shard(hash_slot(hash), shards);
}

/* Orders a chunk of n <= IDS_CHUNK ids by stripe (their count a power of two
 * up to IDS_STRIPES_MAX).  Equal stripes keep the order of the ids, so sums
 * over a stripe's ids are sums in sample order.
 *   hash  [n]            places by `key`, ordered by stripe
 *   order [n]            position in the chunk of each
 *   start [stripes + 1]  first of each stripe's run */
PERSIA_API void persia_ids_split_chunk(const uint64_t *ids, size_t n,
                                       uint64_t key, uint32_t stripes,
                                       uint64_t *hash, uint16_t *order,
                                       uint16_t *start);

#ifdef __cplusplus
}
#endif
#endif
