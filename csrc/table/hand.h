/* hand.h: the place of a new row, and the hand that moves over a stripe's
 * slots and evicts (private).
 *
 * While the table is below its capacity, and its memory has room for a slot
 * more, no row is evicted.  Else one is.  Of the rows of a window of slots one
 * in HAND_PART is evicted, those with the highest scores: they are listed, and
 * removed one by one as rows need a place.  One that was touched meanwhile
 * stays.  The score is the policy's (evict/).
 */
#ifndef PERSIA_TABLE_HAND_H
#define PERSIA_TABLE_HAND_H

#include "evict/evict.h"
#include "table/table.h"

enum {
    HAND_PART = 8,
    HAND_LIST = EVICT_WINDOW / HAND_PART,
    HAND_EXPIRE = 16
};

struct stripe;
struct stripe_room;

/* A row to evict, if this still is its clock. */
typedef struct victim {
    uint32_t clock;
    uint32_t slot;
} victim;

/* Guarded by the stripe's lock. */
typedef struct hand {
    uint32_t at;      /* the first slot of the next window */
    uint32_t n, next; /* victims listed, and tried */
    uint32_t clock;   /* of the push that asked last */
    uint32_t made;    /* rows since it looked for expired ones */
    uint32_t now;     /* seconds, of hand_look_locked() */
    uint64_t credit;  /* slots that it may still look at in this push */
    victim list[HAND_LIST];
} hand;

/* Counts one row more.  Its slot is a free one, one of the room's, or that of
 * a row that it evicts: none that was touched at `spare`.  *evicted: the rows
 * that are gone, with those that have expired.  PERSIA_ECAPACITY: there is no
 * place. */
int hand_place_locked(table *t, struct stripe *s, uint32_t clock,
                      uint32_t spare, const struct stripe_room *room,
                      uint32_t *evicted);
/* The row that was counted last is not made. */
void hand_unplace_locked(table *t, struct stripe *s);
/* Fields of the rows that are touched, n <= EVICT_WINDOW; age: pushes since
 * they were last. */
void hand_touch_locked(const table *t, const struct stripe *s, size_t n,
                       const float *age, char *const *rows);
/* Reads the clock for the calls that follow, if the policy needs it. */
void hand_look_locked(const table *t, struct stripe *s);

#endif
