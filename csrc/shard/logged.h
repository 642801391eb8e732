/* logged.h: what a shard writes into its log (private).
 *
 * Each function appends a record, before what it is about changes anything;
 * an error refuses that.  Without a log they do nothing.
 *
 *   updates        with the tables' gate held, between two cuts; all that can
 *                  fail has been done
 *   rows, tables   with that gate held; row writes exclusively, so that none
 *                  changes places with an update of the same row
 *   claims         without the gate: to open a stream twice changes nothing
 *   restores       with the gate held exclusively
 *
 * Where a log syncs, answers wait for it: late answers.
 */
#ifndef PERSIA_SHARD_LOGGED_H
#define PERSIA_SHARD_LOGGED_H

#include "log/log.h"
#include "wire/wire.h"

struct push_call;
struct shard;

/* All parts of an update that is applied as one.  refused: why this shard
 * alone does so without its ids; or NULL. *end: see persia_log_append(). */
int logged_push(struct shard *s, struct push_call *const *parts, uint32_t n,
                const err_kept *refused, uint64_t *end);
/* The refusals that the ledger keeps, again: a cut has none, so they go behind
 * it.  As well as may be: a log that takes nothing needs the cut the more. */
void logged_refusals(struct shard *s);
/* Why, as its record says. */
int logged_refusal(const wire_span *raw, err_kept *out);
int logged_rows(struct shard *s, const wire_rows *m);
/* A part of a shard that arrives, but its tables. */
int logged_arrival(struct shard *s, const wire_move *m);
/* Where rows were taken away: the log keeps no file of what lies before the
 * position, behind their record. */
void logged_forget(struct shard *s, const wire_rows *m, uint64_t position);
/* Of all tables that the log does not have yet; with the lock of Declare. */
int logged_tables(struct shard *s);
int logged_claim(struct shard *s, const wire_hello *m);
/* Of the rows as they are: lineage and restore. */
int logged_identity(struct shard *s);
/* The request, in `memory`, until rows are exchanged; then its record. */
int logged_restore_keep(struct shard *s, const wire_restore *m,
                        wire_memory *memory, wire_span *out);
int logged_restore(struct shard *s, const wire_span *request);
/* Until all that was appended is synced, where answers have to wait. */
int logged_wait(struct shard *s);

/* The answer to the parts of an update, until it is synced. */
typedef struct late_answer {
    struct late_answer *next;
    uint64_t end;
    err_kept why;
    wire_push_reply reply; /* of the first part */
    uint32_t n;
    struct push_call *parts[]; /* [n] */
} late_answer;

/* Memory for one, before the update; NULL in *out where answers need not
 * wait. */
int late_make(struct shard *s, struct push_call *const *parts, uint32_t n,
              late_answer **out);
/* Keeps it until its record is synced. */
void late_keep(struct shard *s, late_answer *a);
/* Answers those that need not wait any more: of persia_log_on_sync(). */
void late_synced(void *shard);

#endif
