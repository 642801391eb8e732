/* admit.h: which ids get a row.
 *
 * A policy sees the ids of a push that have none, a block at a time, by their
 * hashes.  It is a C file with an admit_policy, named in `enum Admit` of
 * persia.proto.  One may keep what it has seen in a filter of a bounded size:
 * words of each slot of ids (ids.h), so that they can move with the slot.
 */
#ifndef PERSIA_ADMIT_H
#define PERSIA_ADMIT_H

#include "ids/ids.h"
#include "spec/spec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A policy with the options of a table. */
typedef struct admitter admitter;

typedef struct admit_policy {
    /* Takes its options; PERSIA_EARG for what it cannot do. */
    int (*make)(const table_spec *spec, admitter *a);
    /* mask[i]: whether the id of hash[i] gets a row in a push of this key of
     * draws.  Changes nothing. */
    void (*admit)(const admitter *a, uint64_t draw, size_t n,
                  const uint64_t *hash, uint8_t *mask);
    /* Ids of a push that got none; NULL: it forgets them. */
    void (*refuse)(const admitter *a, size_t n, const uint64_t *hash);
} admit_policy;

struct admitter {
    const admit_policy *policy;
    int all; /* every id is admitted */
    float probability;
    uint64_t key; /* of the table's draws */
    uint32_t sightings;
    /* The filter: lines of ADMIT_LINE words, [slots][lines].  The stripe bits
     * of a hash are the lowest of its line's number in a slot, so a table of
     * at most `lines` stripes guards each line by a stripe's lock. */
    uint32_t lines; /* a power of two; 0: no filter */
    uint32_t first, slots;
    uint32_t *filter;
};
enum { ADMIT_LINE = 16 };

/* `first`, `slots`: of the ids that the table has.  The filter is to be put
 * into `out` by the caller. */
PERSIA_API int persia_admit_make(const table_spec *spec, uint32_t first,
                                 uint32_t slots, admitter *out);
/* Words of a slot. */
static inline size_t admit_words(const admitter *a)
{
    return (size_t)a->lines * ADMIT_LINE;
}
/* Where the line of a hash is: its slot, from the first on, and its number
 * there. */
static inline uint32_t admit_slot(const admitter *a, uint64_t hash)
{
    return (hash_slot(hash) - a->first) % a->slots;
}
static inline uint32_t admit_line(const admitter *a, uint64_t hash)
{
    return (uint32_t)(hash >> 16) & (a->lines - 1);
}
static inline size_t admit_bytes(const admitter *a)
{
    return a->slots * admit_words(a) * sizeof(uint32_t);
}

#ifdef __cplusplus
}
#endif
#endif
