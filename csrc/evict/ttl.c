/* ttl.c: rows that no push has touched for a number of updates, or seconds.
 * They go below the capacity, too; at it, those that are nearest to it. */
#include "evict/policies.h"

static int ttl_make(const table_spec *spec, evictor *e)
{
    if (!spec->evict_updates == !spec->evict_seconds)
        return persia_err_set(PERSIA_EARG, "eviction: a TTL is a number of "
                                           "updates, or of seconds");
    e->updates = (float)spec->evict_updates;
    e->seconds = (float)spec->evict_seconds;
    e->reads_time = e->seconds > 0;
    e->field = e->reads_time ? evict_field_seen : NULL;
    e->expires = 1;
    return PERSIA_OK;
}

static void ttl_touch(const evictor *e, uint32_t now, size_t n,
                      const float *age, uint32_t *field)
{
    (void)e;
    (void)age;
    for (size_t i = 0; i < n; i++)
        field[i] = now;
}

static void ttl_score(const evictor *e, uint32_t now, const evict_rows *rows,
                      float *out)
{
    for (size_t i = 0; i < rows->n; i++)
        out[i] = e->reads_time
                     ? (float)(int32_t)(now - rows->seen[i]) / e->seconds
                     : rows->age[i] / e->updates;
}

const evict_policy policy_evict_ttl = { .make = ttl_make,
                                        .touch = ttl_touch,
                                        .score = ttl_score };
