/* lru.c: the rows that no push has touched for longest. */
#include "evict/policies.h"

#include <string.h>

static void lru_score(const evict_rows *rows, float *out)
{
    memcpy(out, rows->column[EVICT_AGE], rows->n * sizeof *out);
}

const evict_policy evict_lru = { .score = lru_score };
