/* hand.h: the hand that moves over a stripe's slots and evicts (private).
 *
 * Of the rows of a window of slots one in HAND_PART is evicted, those with the
 * highest scores: they are listed, and removed one by one as rows need a
 * place.
 * One that was touched meanwhile stays.
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

/* Takes the next row out, which frees its slot; none that was touched at
 * `spare`.  Looks at EVICT_WINDOW slots for each call of a push at most, where
 * earlier calls may have left some.  PERSIA_ECAPACITY: there was none. */
int hand_evict_locked(table *t, struct stripe *s, uint32_t clock,
                      uint32_t spare);
/* Of a table whose rows expire: called before each new row.  Takes out the
 * expired ones of a window at every HAND_EXPIRE-th; how many. */
uint32_t hand_expire_locked(table *t, struct stripe *s, uint32_t clock,
                            uint32_t spare);
/* Fields of the rows that are touched, n <= EVICT_WINDOW; age: pushes since
 * they were last. */
void hand_touch_locked(const table *t, const struct stripe *s, size_t n,
                       const float *age, char *const *rows);
/* Reads the clock for the calls that follow, if the policy needs it. */
void hand_look_locked(const table *t, struct stripe *s);

#endif
