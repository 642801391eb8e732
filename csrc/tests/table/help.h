/* help.h: what the tests of the table share. */
#ifndef PERSIA_TESTS_TABLE_HELP_H
#define PERSIA_TESTS_TABLE_HELP_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "table/table.h"

/* Sizes shrink where a sanitizer makes everything ten times slower. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

typedef struct rng {
    uint64_t state;
} rng;
uint64_t rng_next(rng *r);
uint64_t rng_below(rng *r, uint64_t n);
float rng_float(rng *r); /* [-1, 1) */

/* The id whose hash is this. */
uint64_t id_of_hash(uint64_t hash);

/* Default configuration with the given name, dim, optimizer. */
table_config config_of(uint32_t dim, uint32_t optimizer);
table *table_of(const table_config *config);
sched *pool_of(unsigned threads);

/* Usual hyper-parameters, lr 0.1. */
/* Any vector that a table of this dtype keeps as it is. */
void kept_vector(rng *r, uint32_t dtype, uint32_t dim, float *out);
optim_args args_of(uint32_t kind);

/* One part, dense gradients [n, dim]; fails the test on an error. */
push_job push_one(sched *s, table *t, const optim_args *args, size_t n,
                  const uint64_t *ids, const float *grad, uint64_t draw);
/* The same, but hands the error back. */
int push_try(sched *s, table *t, const optim_args *args, size_t n,
             const uint64_t *ids, const float *grad, uint64_t draw,
             push_job *out);
/* Vectors of n ids, packed. */
void pull_one(sched *s, table *t, size_t n, const uint64_t *ids, float *out);

table_stats stats_of(const table *t);
int has_row(table *t, uint64_t id);

/* All rows of a table as a cut gives them, by ascending id. */
typedef struct dump {
    size_t n, room;
    uint32_t dim, state_floats;
    size_t vector_bytes;
    uint64_t clock;
    uint64_t *ids;
    char *vectors;
    float *state;
    uint32_t *clocks, *fields; /* fields: 0 where rows have none */
} dump;
dump dump_table(table *t);
/* What is left of a cut that has begun, `room` rows a call, then its end;
 * each id occurs once. */
dump dump_cut(table *t, table_cut *cut, size_t room);
void dump_free(dump *d);
/* Fails the test where two dumps differ in a bit. */
void dump_equal(const dump *a, const dump *b, const char *what);

/* from, from + 1, ... */
void ids_fill(uint64_t *ids, uint64_t from, size_t n);

/* Everything of a table that a refused push must leave. */
typedef struct picture {
    dump rows;
    table_stats stats;
} picture;
picture picture_of(table *t);
/* It is as it was; frees the picture. */
void unchanged(table *t, picture *p);

#endif
