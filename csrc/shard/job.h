/* job.h: the rows of a shard on their way out and in, while training runs.
 *
 * A snapshot is a cut that is written to files.  A restore is files that are
 * checked and read into tables beside those in use (staged), then exchanged
 * with them.  Where the memory limit has no room for both, the files are
 * checked alone; the commit then empties the tables before it reads
 * (`in_place`), and the shard refuses its rows until they are exchanged: with
 * PERSIA_EUNAVAILABLE while they are read, and if that fails with
 * PERSIA_EINCOMPLETE, until another restore brings rows.
 * Both are one object, in one state at a time:
 *
 *   STARTING   its files are being opened; a snapshot has no cut yet
 *   RUNNING    rows are written, or read and checked
 *   DONE       all files are written, or all tables are staged or exchanged
 *   REPLACING  tables are emptied, and rows read, after the commit
 *   FAILED     after an error, or without progress for as long as its
 *              patience: the files hang
 *   DROPPED    it was ended, committed, replaced, or not asked about for
 *              10 minutes; requests do not find it any more
 *
 *   from \ to   RUNNING  DONE  REPLACING  FAILED  DROPPED
 *   STARTING       x                         x       x
 *   RUNNING                x                 x       x
 *   DONE                          x                  x
 *   REPLACING              x                 x       x
 *   FAILED                                           x
 *
 * A job has a thread of its own, which alone waits for files, and which ends
 * before the job is DONE, or FAILED by its own error.  Requests are answered
 * at once; that of an end says whether such a thread still runs.  A job that
 * has failed or was dropped keeps nothing of a cut, although its thread may
 * hang in a file for long: then it costs the thread, and the memory of what
 * was staged.
 *
 * There is at most one job of a kind, and one that is STARTING.  Any thread
 * may call; one lock, held around cuts and exchanges, never around files
 * (private).
 */
#ifndef PERSIA_SHARD_JOB_H
#define PERSIA_SHARD_JOB_H

#include "shard/shard.h"

#include <pthread.h>
#include <stdatomic.h>

enum job_kind { JOB_SNAPSHOT, JOB_RESTORE, JOB_KINDS };
/* Each kind has the job of its number, and JOB_KINDS further one that takes
 * its place when its files are open: wrong files end no other job. */
enum { JOB_SLOTS = 2 * JOB_KINDS, JOB_THREADS = 8 };

enum job_state {
    JOB_STARTING,
    JOB_RUNNING,
    JOB_DONE,
    JOB_REPLACING,
    JOB_FAILED,
    JOB_DROPPED,
    JOB_STATES
};

/* What belongs to a cut of the rows. */
typedef struct job_moment {
    uint64_t restore, updates, step, t, log;
    wire_ledger *ledgers; /* the job's, by free() */
    size_t ledgers_room, ledgers_n;
} job_moment;

typedef struct job job;

/* Of a shard. */
typedef struct jobs {
    pthread_mutex_t lock; /* guards: */
    job *of[JOB_SLOTS];   /* NULL: none */
    /* Those whose thread runs, dropped or not: more hang. */
    job *running[JOB_THREADS];
    int closed;
    /* The last snapshot for a checkpoint of the job that is whole: */
    uint64_t seconds, ns; /* since 1970, and how long it took; or 0 */
} jobs;

/* Fields without a comment belong to the job's thread until it is DONE, then
 * they do not change.  Its place does not change at all. */
struct job {
    shard *s;
    enum job_kind kind;
    char root[WIRE_NAME], folder[WIRE_NAME]; /* as it was begun, and: */
    char proof[sizeof ((wire_snapshot *)0)->proof];
    uint64_t patience, lineage;
    ckpt_io *io;
    interrupt_flag flag;
    _Atomic(uint64_t) rows; /* through */
    int result; /* of its thread */
    /* Guarded by the shard's jobs.lock: */
    uint32_t refs;
    enum job_state state;
    int code;
    char text[512]; /* of code */
    uint64_t polls, moved; /* flag.polls, and when it changed last */
    uint64_t began, asked;
    /* A snapshot's from RUNNING on, a restore's from the beginning: */
    uint32_t tables_n;
    uint64_t *pushes; /* [tables_n]; UINT64_MAX: the table stays */
    job_moment moment;
    /* A snapshot's: */
    table_cut **cuts;      /* [tables_n] stopped under the lock */
    table_config *configs; /* [tables_n] */
    wire_file *files;
    size_t files_n;
    /* A restore's: */
    table **staged; /* [tables_n] */
    ledger *ledger;
    ckpt_file *sources; /* table by table */
    size_t *first;      /* [tables_n + 1] sources of each */
    uint64_t *here;     /* [tables_n] rows of this shard in them */
    int in_place;       /* there is no room for rows beside those in use */
    int exchanged;      /* the rows are in use */
    wire_memory memory; /* of the request, for the log: */
    wire_span request;  /* empty: there is no log */
};

/* ---- job.c -------------------------------------------------------------- */

void jobs_init(jobs *j);
void jobs_free(jobs *j);
/* Fails what makes no progress and drops what was not asked about; the time
 * at which to call it again, or UINT64_MAX. */
uint64_t jobs_tick(shard *s, uint64_t now);
/* Whether there is a restore. */
int jobs_restores(shard *s);
/* Whether a client has a checkpoint written. */
int jobs_saves(shard *s);
/* Rows that the restore which runs has read; 0: none runs. */
uint64_t jobs_restored(shard *s);
/* A job of a message that begins one; *out is to be put even after an error,
 * if it is there. */
int job_make(shard *s, enum job_kind kind, const char *root,
             const char *folder, const char *proof, uint64_t deadline,
             job **out);
/* Ends a reference, without the lock: the last one frees, which may take a
 * while.  NULL: nothing. */
void job_put(job *n);

/* ---- job_snapshot.c, job_restore.c -------------------------------------- */

int snapshot_make(shard *s, const wire_snapshot *m, uint64_t deadline,
                  job **out);
int snapshot_cut(job *n); /* with the lock */
int snapshot_write(job *n, sched *threads);
void snapshot_free(job *n);

int restore_make(shard *s, const wire_restore *m, uint64_t deadline,
                 job **out);
/* Checks the files, and stages the rows or notes that it must be in place. */
int restore_stage(job *n, sched *threads);
/* Exchanges rows and what belongs to them, between two updates. */
int restore_commit(job *n);
/* In place of restore_commit(): the rows that are there are refused from now
 * on; then, on the job's thread, restore_replace() empties the tables and
 * stages, and restore_commit() follows. */
int restore_refuse_rows(job *n);
int restore_replace(job *n, sched *threads);
/* Neither follows: the job fails, or is dropped. */
void restore_stop(shard *s);
void restore_free(job *n);

#endif
