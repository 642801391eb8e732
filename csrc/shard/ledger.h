/* ledger.h: which updates of each stream were applied (private).
 *
 * A stream numbers its updates 1, 2, 3, ...  The ledger keeps a watermark (all
 * numbers up to it are through) and a window of LEDGER_WINDOW numbers behind
 * it.  An update goes through four calls:
 *
 *   ledger_begin    may it be applied?  From then on it is in flight: a
 *                   second copy of it waits for the answer to the first
 *   ledger_check    once more, with the shard's gate held
 *   ledger_commit   it was applied; still with the gate held, so that a cut
 *                   sees its rows and this entry, or neither
 *   ledger_end      it is not in flight any more, applied or failed; hands
 *                   out the copies that waited
 *
 * Streams are opened by name.  When there are too many, the one used longest
 * ago expires; updates of a stream that is not open are refused.  Which were
 * applied in an expired one the ledger does not know, so its owner cannot open
 * it again.
 *
 * A stream belongs to the greatest (incarnation, client) that has opened it,
 * and only its owner's updates are applied, or said to have been: the same
 * number of an older owner is another update.  A new owner of a stream takes a
 * higher incarnation than any server has; one that opens it again repeats its
 * own, and is refused if there is a later one.
 *
 * An update that is in the ledger may have been refused: by this shard alone,
 * or after a part of it was applied.  A copy of it gets the same error.  The
 * last LEDGER_REFUSALS errors are kept; for older numbers of a stream the
 * answer is that the outcome is not known any more, never that they were
 * applied.  A ledger that was read from a checkpoint has no refusals, and a
 * stream has none when another owner opens it.
 *
 * Any thread may call; one lock, held for microseconds.
 */
#ifndef PERSIA_SHARD_LEDGER_H
#define PERSIA_SHARD_LEDGER_H

#include <stdatomic.h>

#include "wire/wire.h"

enum {
    LEDGER_WINDOW = 64 * WIRE_WINDOW_WORDS, /* numbers */
    LEDGER_STREAMS = 65536,
    LEDGER_REFUSALS = 64
};

typedef struct ledger ledger;

/* Whose a stream is; incarnations begin at 1. */
typedef struct ledger_owner {
    uint64_t incarnation, client;
} ledger_owner;

/* The name of an update; `settled` as in wire_push, below number; its
 * sender. */
typedef struct ledger_key {
    uint64_t stream, number, settled;
    ledger_owner owner;
    uint64_t part_of; /* the step or the update of several batches that it is a
                         part of; or 0 */
} ledger_key;

/* A copy that waits: the first field of what its owner keeps. */
typedef struct ledger_waiter {
    struct ledger_waiter *next;
} ledger_waiter;

/* What became of an update in flight.  The events, and the state that each
 * leads to (a blank: it cannot occur there):
 *
 *             BEGIN  COMMIT     REFUSE   END
 *  NONE       BEGUN
 *  BEGUN             COMMITTED           NONE
 *  COMMITTED                    REFUSED  NONE
 *  REFUSED                               NONE
 */
enum flight_state {
    FLIGHT_NONE,      /* it is not the ledger's */
    FLIGHT_BEGUN,     /* copies of it wait */
    FLIGHT_COMMITTED, /* the ledger has its number: it is not applied again */
    FLIGHT_REFUSED,   /* ..., and the error that copies get */
    FLIGHT_STATES
};
enum flight_event {
    FLIGHT_BEGIN, /* the functions of these names */
    FLIGHT_COMMIT,
    FLIGHT_REFUSE,
    FLIGHT_END,
    FLIGHT_EVENTS
};

/* An update in flight: memory of the caller's, from ledger_begin() to
 * ledger_end(). */
typedef struct ledger_flight {
    struct ledger_flight *next;
    enum flight_state state; /* the caller may read it */
    uint64_t stream, number, part_of;
    ledger_owner owner;
    ledger_waiter *first, **last;
} ledger_flight;

enum ledger_state {
    LEDGER_NEW,    /* not applied */
    LEDGER_DONE,   /* applied, or settled, before */
    LEDGER_BUSY,   /* another copy is in flight */
    LEDGER_ELSEWHERE, /* as a part of another step, whose answer is not that of
                         this one: send it again when that is through */
    LEDGER_BEYOND, /* of the window: send it again when others are through */
    LEDGER_ABSURD, /* `settled` is more than WIRE_LEAP ahead */
    LEDGER_UNKNOWN, /* the stream is not open, or not by this owner yet */
    LEDGER_TAKEN    /* by a later owner */
};

/* At most `streams` (>= 1) are open. */
int ledger_create(uint32_t streams, ledger **out);
void ledger_destroy(ledger *l);
/* The most streams that the search for one passes; for tests. */
uint32_t ledger_longest(ledger *l);

/* Opens a stream for an owner, and copies its entry; what others have in
 * flight counts as applied.  *taken: it was another owner's before.
 * PERSIA_ECLOSED when there is a later one, or the stream has expired;
 * PERSIA_EARG when the incarnation is more than WIRE_LEAP ahead. */
int ledger_open(ledger *l, uint64_t stream, ledger_owner owner, int *taken,
                wire_ledger *out);
/* Copies the entry of a stream, of any owner; without one it is empty, and
 * its incarnation one that a new owner must exceed. */
void ledger_read(ledger *l, uint64_t stream, wire_ledger *out);
/* Whether the stream has a later owner than this one. */
int ledger_is_older(ledger *l, uint64_t stream, ledger_owner owner);

/* Whether an update was applied, or settled; 0 where the stream is not open.
 */
int ledger_has(ledger *l, uint64_t stream, uint64_t number);

/* In LEDGER_BUSY the waiter (NULL: none) is kept until ledger_end(). */
enum ledger_state ledger_look(ledger *l, const ledger_key *key,
                              ledger_waiter *waiter);
/* The same, and in LEDGER_NEW it is in flight. */
enum ledger_state ledger_begin(ledger *l, const ledger_key *key,
                               ledger_flight *flight, ledger_waiter *waiter);
/* For the copy that is in flight: never LEDGER_BUSY or LEDGER_ELSEWHERE. */
enum ledger_state ledger_check(ledger *l, const ledger_key *key);
/* After a ledger_check() that said LEDGER_NEW.  An update of a log that is
 * replayed is not in flight. */
void ledger_commit(ledger *l, const ledger_key *key);
/* After ledger_commit(): the update was refused. */
void ledger_refuse(ledger *l, const ledger_key *key, int code,
                   const char *text);
/* Of an update that is in: PERSIA_OK where it was applied; else its code, and
 * its text in text[room]; PERSIA_ETIMEOUT where that was forgotten. */
int ledger_refusal(ledger *l, const ledger_key *key, char *text, size_t room);
/* The refusals that are kept, the oldest first: that of place `i` below
 * LEDGER_REFUSALS, with its owner.  0: there is none. */
int ledger_refusal_at(ledger *l, uint32_t i, ledger_key *key, err_kept *why);
/* The copies that waited, in order. */
ledger_waiter *ledger_end(ledger *l, const ledger_key *key);

/* Memory for the streams that there are, and some more, its pages touched: so
 * a copy with the gate held takes no longer than it must.  *out is NULL or of
 * an earlier call; the caller frees it. */
int ledger_room(ledger *l, wire_ledger **out, size_t *room);
/* All streams in which something was applied, for a snapshot; takes more room
 * where it must. */
int ledger_copy(ledger *l, wire_ledger **out, size_t *room, size_t *n);
/* The reverse, into a new ledger. */
int ledger_fill(ledger *l, const wire_ledger *from, size_t n);
/* Exchanges the streams of two ledgers, of which only the caller knows the
 * second; with the gate held exclusively.  Owners stay.  *lineage becomes `to`
 * in the same moment: a client that knows it must not find the old streams. */
void ledger_exchange(ledger *l, ledger *other, _Atomic(uint64_t) *lineage,
                     uint64_t to);

#endif
