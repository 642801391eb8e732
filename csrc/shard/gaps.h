/* gaps.h: the last numbers of a stream that its window has skipped, as
 * ranges.
 *
 * A window only counts what it skips.  Others must know which numbers these
 * are: they lost those that had been acknowledged to them.  A list of gaps is
 * that of a wire_ledger: first, last, first, last, in order; then zeros.
 * Where there are too many the two that are closest become one, and the
 * numbers between them are taken for skipped, too.
 */
#ifndef PERSIA_SHARD_GAPS_H
#define PERSIA_SHARD_GAPS_H

#include "base/base.h"
#include "wire/wire.h"

/* Before window_settle(w, number): adds what that skips. */
void gaps_settle(uint64_t *gaps, const window *w, uint64_t number);
/* The number has arrived after all. */
void gaps_fill(uint64_t *gaps, uint64_t number);
/* All of another list. */
void gaps_join(uint64_t *gaps, const uint64_t *more);
int gaps_have(const uint64_t *gaps, uint64_t number);
/* Whether a ledger has not applied a number, nor will: it is skipped, or the
 * number is not there yet. */
int ledger_lacks(const wire_ledger *l, uint64_t number);
/* Whether it has settled the number: applied, or skipped. */
int ledger_lists(const wire_ledger *l, uint64_t number);
/* Adds what the ledger has settled. */
void ledger_add_to(window *w, const wire_ledger *l);

#endif
