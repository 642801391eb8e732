/* sightings.c: an id gets a row at its n-th update.
 *
 * The filter keeps 24 bits of the hash and a count for each id seen: a word,
 * in the line that other bits of the hash choose.  A line has the newest
 * first; a new one takes the place of the oldest.
 */
#include "admit/admit.h"

#include <string.h>

enum { COUNT_BITS = 8, COUNT_MOST = (1 << COUNT_BITS) - 1 };

static int sightings_make(const table_spec *spec, admitter *a)
{
    const uint64_t kept = spec->sightings_kept;

    if (spec->sightings < 2 || spec->sightings > COUNT_MOST)
        return persia_err_set(PERSIA_EARG,
                              "admission: after %u sightings, it must be "
                              "within 2 .. 255",
                              spec->sightings);
    if (!kept || kept > (uint64_t)1 << 36)
        return persia_err_set(PERSIA_EARG,
                              "admission: sightings of %llu ids, it must be "
                              "within 1 .. 2^36",
                              (unsigned long long)kept);
    a->sightings = spec->sightings;
    a->lines = 1;
    while ((uint64_t)a->lines * ADMIT_LINE * IDS_SLOTS < kept)
        a->lines *= 2;
    return PERSIA_OK;
}

static uint32_t *sightings_line_of(const admitter *a, uint64_t hash)
{
    return a->filter + admit_slot(a, hash) * admit_words(a) +
           admit_line(a, hash) * (size_t)ADMIT_LINE;
}

static uint32_t sightings_print_of(uint64_t hash)
{
    return (uint32_t)(hash >> 40) << COUNT_BITS;
}

/* Its place in a line; ADMIT_LINE: none. */
static uint32_t sightings_line_find(const uint32_t *line, uint32_t print)
{
    uint32_t k = 0;

    while (k < ADMIT_LINE &&
           ((line[k] & ~(uint32_t)COUNT_MOST) != print || !line[k]))
        k++;
    return k;
}

static void sightings_admit(const admitter *a, uint64_t draw, size_t n,
                            const uint64_t *hash, uint8_t *mask)
{
    (void)draw;
    for (size_t i = 0; i < n; i++)
        __builtin_prefetch(sightings_line_of(a, hash[i]), 1);
    for (size_t i = 0; i < n; i++) {
        const uint32_t *line = sightings_line_of(a, hash[i]);
        const uint32_t k =
            sightings_line_find(line, sightings_print_of(hash[i]));
        const uint32_t seen = k < ADMIT_LINE ? line[k] & COUNT_MOST : 0;
        mask[i] = seen + 1 >= a->sightings;
    }
}

static void sightings_refuse(const admitter *a, size_t n, const uint64_t *hash)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t *line = sightings_line_of(a, hash[i]),
                 word = sightings_print_of(hash[i]);
        uint32_t k = sightings_line_find(line, word);
        if (k < ADMIT_LINE)
            word = line[k] + ((line[k] & COUNT_MOST) < COUNT_MOST);
        else
            word++, k--;
        memmove(line + 1, line, k * sizeof *line);
        line[0] = word;
    }
}

const admit_policy policy_sightings = { .make = sightings_make,
                                        .admit = sightings_admit,
                                        .refuse = sightings_refuse };
