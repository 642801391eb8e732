/* room.h: room for new rows, taken before they are made (private).
 *
 * A call that cannot be applied as a whole is refused before the first row
 * changes.  So who may make rows claims room for as many as there may be, in
 * all tables at once: in their capacities, and in the memory limit, which the
 * tables of a store share.  Far from the limits, as nearly always, claims
 * stand side by side, under shared locks.  Who comes near one waits until it
 * is alone, counts the rows that are really new, and knows.
 */
#ifndef PERSIA_TABLE_ROOM_H
#define PERSIA_TABLE_ROOM_H

#include "table/stripe.h"

typedef struct room_claim {
    table *t;
    size_t job;     /* for the caller */
    size_t most;    /* rows that may be made */
    size_t rows;    /* that will be made: to be counted near a limit */
    uint64_t an_id; /* of one of these */
} room_claim;

typedef struct room {
    room_claim *claims; /* [n] by the addresses of their tables */
    size_t n;
    mem_limit *limit;   /* of all tables; NULL: none */
    uint64_t announced; /* bytes */
} room;

/* PERSIA_EARG if the tables have different memory limits. */
int room_make(room *r, room_claim *claims, size_t n);
/* Takes it; whether it is near a limit: then the claims' rows must be counted
 * (they are 0 so far) and room_check() decides.  room_leave() comes after. */
int room_take(room *r);
/* PERSIA_ECAPACITY or PERSIA_ELIMIT if they do not fit. */
int room_check(const room *r);
void room_leave(room *r);

#endif
