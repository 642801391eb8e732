/* window.h: which of the numbers 1, 2, 3, ... have arrived, where they arrive
 * nearly in order.
 *
 * All numbers up to the watermark are through: they are in, or they were
 * skipped.  Of the numbers behind it, a ring of bits holds those that are
 * in; it reaches as far as it has bits.  The caller gives the ring and locks.
 * A window is copied by window_copy() alone: an assignment shares the ring.
 */
#ifndef PERSIA_BASE_WINDOW_H
#define PERSIA_BASE_WINDOW_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct window {
    uint64_t watermark;
    uint64_t skipped; /* numbers up to the watermark that were not in */
    uint64_t *ring;   /* [words]: bit n % (64 * words), of n behind the
                         watermark; the others are 0 */
    size_t words;     /* a power of two */
} window;

enum window_added {
    WINDOW_ADDED,
    WINDOW_HAD,   /* it was in, or it is not behind the watermark */
    WINDOW_BEYOND /* too far behind the watermark: it is left out */
};

/* An empty window; clears the ring. */
void window_init(window *w, uint64_t *ring, size_t words);
/* Both have as many words. */
void window_copy(window *to, const window *from);

/* Numbers up to the watermark are in. */
int window_has(const window *w, uint64_t number);
enum window_added window_add(window *w, uint64_t number);
/* Moves the watermark to this number, unless it is there; what was not in is
 * skipped. */
void window_settle(window *w, uint64_t number);
/* Moves the watermark over the numbers that are in. */
void window_advance(window *w);

/* The largest number that is in, or the watermark. */
uint64_t window_top(const window *w);
/* How many numbers behind the watermark are in. */
uint64_t window_count(const window *w);
/* How many numbers of `mine` are not in `theirs`; skipped ones are in. */
uint64_t window_missing(const window *mine, const window *theirs);

/* The bits in the order of the numbers: bit i is watermark + 1 + i. */
void window_to_bits(const window *w, uint64_t *bits);
void window_from_bits(window *w, uint64_t watermark, uint64_t skipped,
                      const uint64_t *bits);

#ifdef __cplusplus
}
#endif
#endif
