/* list.h: what a struct of lists.h is made of, as data. */
#ifndef PERSIA_SPEC_LIST_H
#define PERSIA_SPEC_LIST_H

#include "base/base.h"

enum spec_kind {
    SPEC_U32,
    SPEC_BOOL, /* uint32_t, 0 or 1 */
    SPEC_ENUM, /* uint32_t, of `names` */
    SPEC_U64,
    SPEC_FLOAT,
    SPEC_NAME /* char[limit] */
};

typedef struct spec_field {
    const char *name;
    const char *config; /* what a config calls it */
    enum spec_kind kind;
    size_t offset;
    uint32_t limit;     /* U32, BOOL, ENUM: largest value; NAME: bytes */
    const char *const *names; /* ENUM: [limit + 1] */
    int largest; /* of several counters the largest counts, not their sum */
    int empty;   /* NAME: it may be empty */
} spec_field;

typedef struct spec_list {
    const spec_field *fields;
    size_t n;
} spec_list;

#endif
