/* reserve.h: what new rows need, taken before they are made (private).
 *
 * A call that cannot be applied as a whole is refused before the first row
 * changes.  So a call that may make rows claims as much as it may need, in all
 * tables at once: of their capacities, and of the memory limit, which the
 * tables of a store share.  Far from the limits, as nearly always, claims
 * stand side by side, under shared locks.  A call near a limit waits until it
 * is alone, and counts the rows that are really new, and the pages of the
 * index that these widen.
 *
 * Of the memory limit a claim announces what its own rows take.  What they
 * make the pages widen that are there belongs to the table: it is announced
 * once for all claims in flight, for the rows there and all that these may
 * make, as any of them may be the one that widens a page.
 *
 * The same for the process's memory: address space for the rows' slots and for
 * pages of the index is reserved for as many rows as there may be; as it is
 * cheap, and what is not used serves the next call, this takes a few counters.
 * A call that gets none waits until it is alone, and reserves for the rows
 * that are really new.  Making rows then allocates nothing.
 */
#ifndef PERSIA_TABLE_RESERVE_H
#define PERSIA_TABLE_RESERVE_H

#include "table/stripe.h"

typedef struct reserve_claim {
    table *t;
    size_t job;     /* for the caller */
    size_t most;    /* rows that may be made */
    size_t rows;    /* that will be made: to be counted near a limit */
    uint64_t an_id; /* of one of these */
    uint64_t growth; /* with `rows`: bytes that pages of the index take more */
    /* [stripes] rows that may be made in each, counted again with `rows`;
     * then the slots reserved there and not used yet. */
    size_t *slots;
    /* Slots that may still be opened, of all stripes together: their memory
     * was announced.  Further rows of a table that evicts take slots of
     * others. */
    _Atomic(size_t) *opens;
    uint64_t index; /* bytes reserved for the index */
    int reserved;   /* whether `slots` are reserved */
} reserve_claim;

typedef struct reservation {
    reserve_claim *claims; /* [n] by the addresses of their tables */
    size_t n;
    mem_limit *limit;      /* of all tables; NULL: none */
    uint64_t announced;    /* bytes, without table.growth */
    int alone;             /* the locks are held exclusively */
} reservation;

/* PERSIA_EARG if the tables have different memory limits. */
int reservation_make(reservation *r, reserve_claim *claims, size_t n);
/* Counts the rows of a claim that are really new: `rows`, `slots`, `an_id`,
 * `growth`. */
typedef int (*reserve_count_fn)(reserve_claim *claim, void *ctx);
/* Takes it: PERSIA_ECAPACITY, PERSIA_ELIMIT or PERSIA_ENOMEM if the rows do
 * not fit, and nothing is taken; otherwise reservation_leave() must follow. */
int reservation_take(reservation *r, reserve_count_fn count, void *ctx);
void reservation_leave(reservation *r);
/* For a reserve_count_fn: counts the rows of n places that have none.  One may
 * be given more than once; sorts them. */
void reserve_count(reserve_claim *claim, uint64_t *places, size_t n);
/* Adds the table's name and a remedy to an error for want of memory. */
int reserve_no_memory(const table *t);

#endif
