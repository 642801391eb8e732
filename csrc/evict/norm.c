/* norm.c: the rows with the smallest vectors. */
#include "evict/policies.h"

static int norm_make(const table_spec *spec, evictor *e)
{
    (void)spec;
    e->reads_norm = 1;
    return PERSIA_OK;
}

static void norm_score(const evictor *e, uint32_t now, const evict_rows *rows,
                       float *out)
{
    (void)e;
    (void)now;
    for (size_t i = 0; i < rows->n; i++)
        out[i] = -rows->norm[i];
}

const evict_policy policy_evict_norm = { .make = norm_make,
                                         .score = norm_score };
