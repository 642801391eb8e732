/* evict.h: which rows of a table go.
 *
 * A table evicts by a hand that moves over its slots and takes a window of at
 * most EVICT_WINDOW rows at a time; of these the ones with the highest scores
 * go.  A policy is the score, and a field of each row if it needs one: a C
 * file with an evict_policy, named in `enum Full` of persia.proto.
 */
#ifndef PERSIA_EVICT_H
#define PERSIA_EVICT_H

#include "base/base.h"
#include "spec/spec.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { EVICT_WINDOW = 64 };

/* What a policy sees of n <= EVICT_WINDOW rows, in the order of their
 * slots. */
typedef struct evict_rows {
    size_t n;
    /* Pushes of the table since the last that touched the row; below 0 for a
     * push that began later. */
    float age[EVICT_WINDOW];
    float norm[EVICT_WINDOW]; /* L2, of the vector; set for `reads_norm` */
    union {                   /* the policy's field of the row */
        float count[EVICT_WINDOW];
        uint32_t seen[EVICT_WINDOW];
        uint32_t field[EVICT_WINDOW];
    };
} evict_rows;

/* A field of a row: 4 bytes, a column of that name in checkpoints. */
typedef struct evict_field {
    const char *name;
    int is_float;
} evict_field;
/* Every field that a policy has: [EVICT_FIELDS]. */
enum { EVICT_FIELDS = 2 };
extern PERSIA_API const evict_field persia_evict_fields[EVICT_FIELDS];

/* Scores of rows->n rows: those with the highest go.  NaN: goes last. */
typedef void (*evict_score_fn)(void *ctx, const evict_rows *rows, float *out);

/* An expression in postfix order; see score.c. */
enum { EVICT_OPS = 64, EVICT_STACK = 16 };
typedef struct evict_op {
    uint32_t code;
    float number;
} evict_op;

typedef struct evict_policy evict_policy;

/* A policy with the options of a table. */
typedef struct evictor {
    const evict_policy *policy; /* NULL: a full table refuses new rows */
    const evict_field *field;   /* NULL: rows have none */
    int reads_norm, reads_time;
    int expires; /* rows of score 1 and more go below the capacity, too */
    float updates, seconds;
    evict_score_fn fn; /* of the user */
    void *fn_ctx;
    evict_op op[EVICT_OPS];
    uint32_t ops;
} evictor;

struct evict_policy {
    /* Takes its options; PERSIA_EARG for what it cannot do.  NULL: none. */
    int (*make)(const table_spec *spec, evictor *e);
    /* The fields of rows that a push touches, n <= EVICT_WINDOW; those of new
     * rows are 0.  `now`: seconds, for `reads_time`. */
    void (*touch)(const evictor *e, uint32_t now, size_t n, const float *age,
                  uint32_t *field);
    void (*score)(const evictor *e, uint32_t now, const evict_rows *rows,
                  float *out);
};

/* The policy of a table; `fn` scores where the spec has no expression, or
 * NULL.  PERSIA_EARG. */
PERSIA_API int persia_evict_make(const table_spec *spec, evict_score_fn fn,
                                 void *fn_ctx, evictor *out);
/* Compiles an expression; PERSIA_EARG says what is wrong and where. */
PERSIA_API int persia_evict_compile(const char *text, evictor *out);

#ifdef __cplusplus
}
#endif
#endif
