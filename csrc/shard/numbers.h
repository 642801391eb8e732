/* numbers.h: a set of numbers 1, 2, 3, ... that come nearly in order, held as
 * a wire_ledger: all up to the watermark but for those that were skipped, and
 * a window of bits behind it (private).
 */
#ifndef PERSIA_SHARD_NUMBERS_H
#define PERSIA_SHARD_NUMBERS_H

#include "wire/wire.h"

enum { NUMBERS_WINDOW = 64 * WIRE_WINDOW_WORDS };

int numbers_has(const wire_ledger *l, uint64_t number);
/* 0 where the number is too far behind the watermark; then it is left out. */
int numbers_add(wire_ledger *l, uint64_t number);
/* Skips the numbers up to this one that are not in. */
void numbers_settle(wire_ledger *l, uint64_t number);
/* The largest number. */
uint64_t numbers_top(const wire_ledger *l);
/* How many numbers of `mine` are not in `theirs`; skipped ones are in. */
uint64_t numbers_missing(const wire_ledger *mine, const wire_ledger *theirs);

#endif
