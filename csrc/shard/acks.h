/* acks.h: numbers of a stream that were acknowledged to a client, which
 * compares them with what servers have.
 *
 * A bit each, from `base` on.  The last 134 million are kept.
 */
#ifndef PERSIA_SHARD_ACKS_H
#define PERSIA_SHARD_ACKS_H

#include "wire/wire.h"

typedef struct acks {
    uint64_t base;  /* a multiple of 64 */
    uint64_t *bits; /* [words] */
    size_t words;
} acks;

void acks_free(acks *a);
int acks_add(acks *a, uint64_t number);
/* Instead of what was in: what this ledger has, its last million at most. */
int acks_read(acks *a, const wire_ledger *from);
/* The same numbers; none: *out is to be freed, too. */
int acks_copy(const acks *from, acks *out);
/* The same shape without numbers. */
int acks_like(const acks *from, acks *out);
/* Adds to lost, which is acks_like(a), what the ledger lacks. */
void acks_lacking(const acks *a, const wire_ledger *l, acks *lost);
int acks_have(const acks *a, uint64_t number);
/* Adds to `counted` those of lost that are in a; *n: how many were new. */
int acks_count(const acks *a, const acks *lost, acks *counted, uint64_t *n);

#endif
