/* room.h: room for new rows, taken before they are made (private).
 *
 * A call that cannot be applied as a whole is refused before the first row
 * changes.  So who may make rows claims room for as many as there may be, in
 * all tables at once: in their capacities, and in the memory limit, which the
 * tables of a store share.  Far from the limits, as nearly always, claims
 * stand side by side, under shared locks.  Who comes near one waits until it
 * is alone, counts the rows that are really new, and knows.
 *
 * The same for the process's memory: address space for the rows' slots and
 * for pages of the index is held for as many rows as there may be; as it is
 * cheap, and what is held but not used serves the next call, this takes a few
 * counters.  Who gets none waits until it is alone, and holds it for the rows
 * that are really new.
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
    /* [stripes] rows that may be made in each, to be counted anew with
     * `rows`; then the slots held there and not used yet. */
    size_t *held;
    uint64_t index; /* bytes held for the index */
    int holds;      /* whether `held` are slots */
} room_claim;

typedef struct room {
    room_claim *claims; /* [n] by the addresses of their tables */
    size_t n;
    mem_limit *limit;   /* of all tables; NULL: none */
    uint64_t announced; /* bytes */
} room;

/* PERSIA_EARG if the tables have different memory limits. */
int room_make(room *r, room_claim *claims, size_t n);
/* Counts the rows of a claim that are really new: `rows`, `held`, `an_id`. */
typedef int (*room_count_fn)(room_claim *claim, void *ctx);
/* Takes it: PERSIA_ECAPACITY, PERSIA_ELIMIT or PERSIA_ENOMEM if the rows do
 * not fit, and nothing is taken; otherwise room_leave() comes after. */
int room_take(room *r, room_count_fn count, void *ctx);
void room_leave(room *r);
/* Adds the table's name and a remedy to an error for want of memory. */
int room_no_memory(const table *t);

#endif
