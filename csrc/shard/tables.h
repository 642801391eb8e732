/* tables.h: the tables of a shard, by name; they share threads, a memory
 * limit and a count of updates.  Shards of one process may share the first
 * two, too.
 *
 * Its callers use jobs of ids, rows and gradients only, so a shard in another
 * process is another body behind the same calls.
 *
 * All functions may be called from any thread; persia_tables_destroy() must be
 * last.
 */
#ifndef PERSIA_SHARD_TABLES_H
#define PERSIA_SHARD_TABLES_H

#include "table/table.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TABLES_MAX = 4096 };

typedef struct tables tables;

typedef struct tables_config {
    unsigned threads;      /* of loops, the caller included; at least 1 */
    uint64_t memory_limit; /* bytes of all tables; 0: no limit */
    uint32_t beside;       /* shards that will be beside this one */
} tables_config;

PERSIA_API int persia_tables_create(const tables_config *config, tables **out);
/* Tables of another shard of this process, which share the threads and the
 * memory limit of these. */
PERSIA_API int persia_tables_beside(tables *p, tables **out);
/* Its rows' bytes go back to the limit, and to the system. */
PERSIA_API void persia_tables_destroy(tables *p);

/* Makes a table, or finds the one of that name (*created is 0 then).
 * PERSIA_EMISMATCH, naming the field, if its configuration differs.  The
 * caller leaves config->limit NULL: the shard's own is used. */
PERSIA_API int persia_tables_declare(tables *p, const table_config *config,
                                     uint32_t *no, int *created);
/* Tables are numbered from 0 in the order of their declaration. */
PERSIA_API uint32_t persia_tables_tables(const tables *p);
/* NULL if there is no such table. */
PERSIA_API table *persia_tables_table(const tables *p, uint32_t no);
/* Removes a table's rows and frees its name.  Its number stays its own: who
 * still knows it does not reach the next table of that name.  To be called by
 * persia_tables_between()'s fn. */
PERSIA_API int persia_tables_drop(tables *p, uint32_t no);
PERSIA_API int persia_tables_dropped(const tables *p, uint32_t no);
PERSIA_API sched *persia_tables_sched(const tables *p);
PERSIA_API const mem_limit *persia_tables_limit(const tables *p);

/* persia_table_pull() on the shard's threads. */
PERSIA_API int persia_tables_pull(tables *p, pull_job *jobs, size_t jobs_n);

/* What is kept beside the rows about an update: whatever runs between two
 * updates sees the update and its note, or neither. */
typedef struct tables_note {
    /* Before the push, which does not run if this is an error. */
    int (*before)(void *ctx);
    /* After all was reserved, before the first row changes; an error refuses
     * the push as a whole.  NULL: nothing. */
    int (*ready)(void *ctx);
    /* After it: all was applied (rc is PERSIA_OK), or memory gave out when
     * some of it was; that counts as an update, too.  Not called when the
     * push was refused as a whole. */
    void (*after)(void *ctx, int rc);
    void *ctx;
    int skips; /* it counts as no update */
} tables_note;
/* persia_table_push() likewise; one that succeeds counts as one update.  note:
 * or NULL. */
PERSIA_API int persia_tables_push_noted(tables *p, push_job *jobs,
                                        size_t jobs_n,
                                        const tables_note *note);
/* Runs fn(ctx) as an update: what runs between two updates is before it or
 * after it.  Its result is returned. */
PERSIA_API int persia_tables_change(tables *p, int (*fn)(void *ctx),
                                    void *ctx);
/* Runs fn(ctx) between two updates: none is in flight meanwhile.  Its result
 * is returned. */
PERSIA_API int persia_tables_between(tables *p, int (*fn)(void *ctx),
                                     void *ctx);

/* Updates applied so far.  Set when a checkpoint is loaded; may be called by
 * persia_tables_between()'s fn. */
PERSIA_API uint64_t persia_tables_updates(const tables *p);
PERSIA_API void persia_tables_set_updates(tables *p, uint64_t updates);

/* The highest t (Adam's step, and the key of an update's draws) of an update
 * applied.  persia_tables_note_t(): one of this t is applied.
 * persia_tables_set_t(): as persia_tables_set_updates(). */
PERSIA_API uint64_t persia_tables_t(const tables *p);
PERSIA_API void persia_tables_note_t(tables *p, uint64_t t);
PERSIA_API void persia_tables_set_t(tables *p, uint64_t t);

/* The time of updates for policies that look at it, in seconds; 0: that of
 * the machine. */
PERSIA_API void persia_tables_set_now(tables *p, uint32_t seconds);

#ifdef __cplusplus
}
#endif
#endif
