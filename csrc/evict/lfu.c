/* lfu.c: the rows with the fewest updates.  A count halves in `updates` pushes
 * of the table without one. */
#include "evict/policies.h"

#include <string.h>

/* count * 2^(-age / half_life), by straight lines between whole powers: the
 * same bits everywhere. */
static float lfu_decayed(float count, float age, float half_life)
{
    const float halves = half_life > 0 && age > 0 ? age / half_life : 0;

    if (halves >= 100)
        return 0;
    const uint32_t whole = (uint32_t)halves, bits = (127 - whole) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return count * power * (1 - (halves - (float)whole) / 2);
}

static int lfu_make(const table_spec *spec, evictor *e)
{
    e->updates = (float)spec->evict_updates;
    e->field = evict_field_count;
    return PERSIA_OK;
}

static void lfu_touch(const evictor *e, uint32_t now, size_t n,
                      const float *age, uint32_t *field)
{
    float count[EVICT_WINDOW];

    (void)now;
    memcpy(count, field, n * sizeof *count);
    for (size_t i = 0; i < n; i++)
        count[i] = lfu_decayed(count[i], age[i], e->updates) + 1;
    memcpy(field, count, n * sizeof *count);
}

static void lfu_score(const evictor *e, uint32_t now, const evict_rows *rows,
                      float *out)
{
    (void)now;
    for (size_t i = 0; i < rows->n; i++)
        out[i] = -lfu_decayed(rows->count[i], rows->age[i], e->updates);
}

const evict_policy policy_evict_lfu = { .make = lfu_make,
                                        .touch = lfu_touch,
                                        .score = lfu_score };
