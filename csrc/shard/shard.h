/* shard.h: a shard of the parameter server.
 *
 *   ops.h      one shard, wherever it is: the calls
 *   tables.h   named tables that share threads and a memory limit
 *   ledger.h   which updates of each stream were applied
 *   gaps.h     which of them were skipped
 *   acks.h     which of them a client knows as applied
 *   sync.h     the parts of one step of all ranks
 *   numbers.h  a window of numbers, of the size that travels
 *
 * A shard is its tables and all that decides what may change them: every
 * call goes through a shard_ref, those of messages, too.
 *
 *   ledger   per stream a watermark and a window of numbers: an update is
 *            applied once, whatever is sent again.  A stream is opened by
 *            the Hello that claims it; of more than 65,536 the one used
 *            longest ago expires, for good.  A push in a stream that its
 *            sender has not opened here is refused (PERSIA_ESTALE): it says
 *            Hello and sees what the ledger still knows.  So is one of an
 *            owner that has a later one (PERSIA_ECLOSED): its process was
 *            replaced.
 *   sync     parts of one step wait until all ranks but those that have
 *            left sent theirs, are added in the order of the ranks and
 *            applied once (the counts are in the answer to the first part);
 *            pulls behind an update wait, too, and no thread is held.  At a
 *            call's deadline it fails and names the missing ranks; then the
 *            step's parts are dropped.
 *
 * It opens no file but through its shard_env.  All functions may be called
 * from any thread.
 */
#ifndef PERSIA_SHARD_H
#define PERSIA_SHARD_H

#include "ckpt/ckpt.h"
#include "log/log.h"
#include "shard/acks.h"
#include "shard/gaps.h"
#include "shard/ledger.h"
#include "shard/numbers.h"
#include "shard/ops.h"
#include "shard/sync.h"
#include "shard/tables.h"

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct shard shard;

/* What a shard uses of the process around it. */
typedef struct shard_env {
    void *ctx;
    /* persia_shard_tick() is wanted at this time already.  Takes only locks
     * that are not held around calls of the shard.  NULL: persia_shard_tick()
     * is not called; a pull that would have to wait fails with
     * PERSIA_EUNAVAILABLE, and a part of a step waits until the others arrive.
     */
    void (*wake)(void *ctx, uint64_t at);
    /* Of snapshots and restores; find NULL: they fail with PERSIA_EARG. */
    ckpt_places files;
    /* A thread of a snapshot or restore has ended; no call of the shard may be
     * made then.  Or NULL. */
    void (*ended)(void *ctx);
} shard_env;

typedef struct shard_config {
    char name_space[WIRE_NAME];
    uint32_t shard, shards; /* 0 of 1: embedded */
    uint64_t boot;          /* random, not 0 */
    uint64_t lineage;       /* of the rows; random, not 0 */
    uint64_t message_limit; /* bytes of a packed answer, at least 4096 */
    shard_env env;
    /* Or NULL.  It is being read, and must outlive the shard.  Such a shard
     * recovers until persia_shard_ready(). */
    updates_log *log;
} shard_config;

/* The tables must outlive the shard. */
PERSIA_API int persia_shard_create(tables *tables, const shard_config *config,
                                   shard **out);
/* When all its refs are closed, and persia_shard_end_jobs() has returned 0. */
PERSIA_API void persia_shard_destroy(shard *s);
PERSIA_API tables *persia_shard_tables(const shard *s);
/* Its rows for a checkpoint, the last ones: when they were written, in
 * seconds since 1970 (0: never), and how long that took.  1 if a client has
 * one written now, until the whole job's is there. */
PERSIA_API int persia_shard_snapshot(shard *s, uint64_t *seconds,
                                     uint64_t *ns);
/* Its number, and of how many. */
PERSIA_API uint32_t persia_shard_no(const shard *s);
PERSIA_API uint32_t persia_shard_count(const shard *s);
/* Its Hello says that these shards [n] can be asked for at its address (none:
 * itself); beside: another one there says the memory in its Stats. */
PERSIA_API int persia_shard_set_here(shard *s, const uint64_t *here, size_t n,
                                     int beside);
PERSIA_API uint64_t persia_shard_boot(const shard *s);

/* The direct body: calls run on the caller's thread, without encoding and
 * copies.  Each ref ends its own calls in close(), which frees it. */
PERSIA_API int persia_shard_direct(shard *s, shard_ref **out);
/* Calls of this direct ref that wait fail, and those that would wait from now
 * on.  The text lasts. */
PERSIA_API void persia_shard_refuse(shard_ref *direct, int code,
                                    const char *text);
/* Applies the records of the log from `from` on, the position of the cut that
 * the rows are from; then records are appended.  The shard is called through
 * `direct` alone until persia_shard_ready(): Stats shows the progress. */
PERSIA_API int persia_shard_replay(shard *s, shard_ref *direct, uint64_t from,
                                   log_found *found);
PERSIA_API void persia_shard_ready(shard *s);
/* PERSIA_EUNAVAILABLE until then. */
int persia_shard_check_ready(const shard *s);
/* So many calls may wait at once (0: any number): pulls that wait leave half
 * of them, and one for each rank of steps, to updates; more ranks than that
 * cannot train in step. */
PERSIA_API void persia_shard_set_calls(shard *s, uint32_t calls);
/* Fails what has waited too long; the time at which to call it again, or
 * UINT64_MAX. */
PERSIA_API uint64_t persia_shard_tick(shard *s, uint64_t now);

/* ---- for those who answer instead of the shard -------------------------- */

/* A reply with a message of so many bytes, zeroed, in memory of its own; so is
 * what it points to: *memory. */
int persia_shard_reply_make(size_t bytes, shard_reply *out,
                            wire_memory **memory);
/* PERSIA_ESTALE unless the caller means this life of the shard. */
int persia_shard_check_boot(const shard *s, const wire_caller *caller);
/* PERSIA_ELIMIT if a message of so many bytes would be too large. */
int persia_shard_check_bytes(const shard *s, const char *what, uint64_t bytes);
/* One more request failed: for Stats. */
void persia_shard_count_failed(shard *s);

/* ---- moves -------------------------------------------------------------- */

enum shard_hold {
    SHARD_FREE,    /* it changes as ever */
    SHARD_CLOSING, /* updates of several batches that have begun are ended;
                      whatever else would change it is refused */
    SHARD_HELD     /* nothing changes it */
};
/* PERSIA_EUNAVAILABLE while other rows are being restored; SHARD_CLOSING also
 * while a client writes a checkpoint, and none begins then. */
PERSIA_API int persia_shard_hold(shard *s, enum shard_hold to);
/* How many updates of several batches have begun. */
PERSIA_API uint32_t persia_shard_begun(shard *s);
/* A shard on its way to another server, part by part, while updates
 * continue: see copy.c.  One thread does all of it.  The next part; *rows: in
 * it; *ended: there is none, the round has ended.  last: the shard was held
 * between two rounds, and what lies beside its rows follows them. */
PERSIA_API int persia_shard_copy_begin(shard *s);
PERSIA_API int persia_shard_copy_next(shard *s, int last, uint64_t *rows,
                                      int *ended);
/* Puts the part into a message, for as long as it is the last one made. */
PERSIA_API void persia_shard_copy_put(const shard *s, wire_move *out);
/* Rows that have changed since they were in a part, about. */
PERSIA_API uint64_t persia_shard_copy_left(const shard *s);
PERSIA_API void persia_shard_copy_end(shard *s);
/* Takes a part, into a shard that only the caller knows.  After an error some
 * of it may have been taken. */
PERSIA_API int persia_shard_arrive(shard *s, const wire_move *m);
/* What travels with a shard beside its rows and ledgers: ranks that take no
 * part in its steps, updates of several batches that have ended.  *out [n]:
 * the caller's, by free(). */
PERSIA_API int persia_shard_steps(shard *s, uint64_t **out, size_t *n);
PERSIA_API int persia_shard_set_steps(shard *s, const uint64_t *from,
                                      size_t n);
/* Another boot, while no call can reach it. */
PERSIA_API int persia_shard_reborn(shard *s);

/* ---- snapshots and restores --------------------------------------------- */

/* Drops a snapshot: its client may not end it any more. */
PERSIA_API void persia_shard_drop_snapshot(shard *s);
/* None begins any more, those that there are are dropped.  How many threads
 * still run: they use the shard and its tables. */
PERSIA_API uint32_t persia_shard_end_jobs(shard *s);

/* Threads of snapshots and restores that have ended. */
typedef struct job_ends {
    pthread_mutex_t lock; /* guards: */
    uint64_t n;
    pthread_cond_t more;
} job_ends;
PERSIA_API void persia_job_ends_init(job_ends *e);
PERSIA_API void persia_job_ends_free(job_ends *e);
/* One more: for shard_env.ended(). */
PERSIA_API void persia_job_ends_add(job_ends *e);
/* Ends the jobs of the shard and waits for their threads; 1 if one hangs in a
 * file: the shard, its tables and `e` must stay until the process ends. */
PERSIA_API int persia_job_ends_wait(job_ends *e, shard *s);

#ifdef __cplusplus
}
#endif
#endif
