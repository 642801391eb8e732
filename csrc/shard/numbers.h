/* numbers.h: which updates of a stream have arrived: a window of the size that
 * travels in a wire_ledger (private).
 */
#ifndef PERSIA_SHARD_NUMBERS_H
#define PERSIA_SHARD_NUMBERS_H

#include "wire/wire.h"

enum { NUMBERS_WINDOW = 64 * WIRE_WINDOW_WORDS };

/* Its window is used through window_*(); a copy is made by window_copy(). */
typedef struct numbers_set {
    window w;
    uint64_t ring[WIRE_WINDOW_WORDS];
} numbers_set;

/* All numbers up to the watermark. */
void numbers_init(numbers_set *n, uint64_t watermark);
/* window_add(), window_settle(), and what is in moves the watermark. */
void numbers_add(numbers_set *n, uint64_t number);
void numbers_settle(numbers_set *n, uint64_t number);

void numbers_from_wire(numbers_set *n, const wire_ledger *from);
/* Watermark, skipped and window alone. */
void numbers_to_wire(const numbers_set *n, wire_ledger *to);
/* The largest number. */
uint64_t numbers_wire_top(const wire_ledger *from);

#endif
