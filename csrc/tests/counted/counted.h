/* counted.h: the cases of the counted gate.
 *
 * Each case is a function counted_<name>() that does one thing with what was
 * made before; the instruction counter counts from its entry to its end
 * (tests/counted/gate.py gives it the pattern counted_*).  It runs on one
 * thread and without a warm-up beyond that of its preparation, so that the
 * same build gives the same count.
 */
#ifndef PERSIA_TESTS_COUNTED_H
#define PERSIA_TESTS_COUNTED_H

#include <stddef.h>
#include <stdint.h>

/* Seen by the counter under this very name. */
#define COUNTED __attribute__((noinline, noclone, externally_visible))

/* Ends the program with the message of the last error. */
void check_ok(int code);
/* n ids below `most`, a few of them often: the same on each machine. */
void some_ids(uint64_t *ids, size_t n, uint64_t most);

/* Whole steps of an embedded store (steps.c). */
void steps_all(void);

#endif
