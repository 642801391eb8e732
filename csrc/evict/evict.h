/* evict.h: which rows of a full table go.
 *
 * A table evicts by a hand that moves over its slots.  It takes a window of
 * at most EVICT_WINDOW slots at a time; of the rows there those with the
 * highest scores go.  A policy is a score: one C file with an evict_policy.
 */
#ifndef PERSIA_EVICT_H
#define PERSIA_EVICT_H

#include "base/base.h"
#include "spec/spec.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { EVICT_WINDOW = 64 };

/* What a score sees of a row. */
enum evict_column {
    EVICT_AGE, /* pushes of the table since the one that touched it last */
    EVICT_COLUMNS
};

/* Values of n <= EVICT_WINDOW rows in the order of their slots. */
typedef struct evict_rows {
    size_t n;
    float column[EVICT_COLUMNS][EVICT_WINDOW];
} evict_rows;

typedef struct evict_policy {
    void (*score)(const evict_rows *rows, float *out); /* [rows->n] */
} evict_policy;

/* Of a kind of `enum table_full`; NULL: a full table keeps its rows. */
PERSIA_API const evict_policy *persia_evict_policy(uint32_t full);

#ifdef __cplusplus
}
#endif
#endif
