/* filter.h: the filter of admission, as it was at the moment of a cut
 * (private).
 *
 * A line is put aside before it changes, if it was not read yet: so a cut of a
 * filter of gigabytes takes no longer than one of rows.
 */
#ifndef PERSIA_TABLE_FILTER_H
#define PERSIA_TABLE_FILTER_H

#include "table/stripe.h"

typedef struct filter_cut {
    /* Lines as they were, in the places that they have in the filter; NULL:
     * there is no filter.  Its pages appear as lines are put aside. */
    uint32_t *aside;
    uint64_t *copied; /* [stripes][words] a bit a line: it was put aside */
    size_t words;
    size_t charged;   /* bytes */
    /* Slots whose lines were read, from the first on; by the stripe's lock. */
    uint32_t read[IDS_STRIPES_MAX];
} filter_cut;

/* With the gate held exclusively, as filter_cut_end(). */
int filter_cut_begin(const table *t, filter_cut *c);
void filter_cut_end(const table *t, filter_cut *c);
/* Copies n slots from the first that was not read; the stripes' locks are
 * taken one after the other. */
void filter_cut_read(table *t, filter_cut *c, uint32_t from, uint32_t n,
                     uint32_t *out);
/* Before the line of a hash changes, and before all of a stripe do. */
void filter_touch_locked(const table *t, filter_cut *c, uint64_t hash);
void filter_clear_locked(const table *t, filter_cut *c, uint32_t stripe);

#endif
