/* watch.h: which slots of a stripe changed, and which ids left it, for each
 * of its readers (private).
 *
 * A part of a watch belongs to a stripe and is guarded by its lock.  Where
 * there is no memory for what changed, all rows count as changed: a reader
 * then forgets the ids of the stripe and gets all of its rows.  So a push
 * never fails for a reader.
 */
#ifndef PERSIA_TABLE_WATCH_H
#define PERSIA_TABLE_WATCH_H

#include "table/stripe.h"

typedef struct id_list {
    uint64_t *ids; /* [n] */
    size_t n, room;
} id_list;

struct stripe_watch {
    struct stripe_watch *next; /* that of another watch */
    uint64_t *changed;         /* [words] a bit a slot */
    uint32_t words, at;        /* at: of them that this round has read */
    uint32_t marked;           /* bits that are set */
    uint32_t from;  /* the slots from here on count as changed, too */
    int reset;      /* the reader is yet to forget the ids of the stripe */
    id_list gone;
};

/* All rows of the stripe count as changed, for all of its readers. */
void watch_reset_locked(stripe *s);
/* A slot changes, or an id leaves. */
void watch_mark_locked(const table *t, stripe *s, uint32_t slot);
void watch_gone_locked(const table *t, stripe *s, uint64_t id);

/* Notes the ids that persia_table_erase() is given: room for them in each
 * watch of the table, then the ids, with the gate held shared. */
int watch_erase_begin(table *t, size_t n);
void watch_erase_end(table *t, size_t n, const uint64_t *ids);

#endif
