/* log.h: what a shard was asked to change, in files, before it changes it.
 *
 * A log is one row of records.  A record's *position* is the number of bytes
 * of all records before it.  Records lie in segments, files log-<position of
 * the first>, and none lies in two.  The body of a record is `parts`, which
 * are messages of wire.h as they arrived.
 *
 *   process   a record was given to the system before its change begins: it
 *             survives the process
 *   disk      it was synced, too, before the change is acknowledged: it
 *             survives the machine.  One thread syncs for all that wait
 *
 * States of a log:
 *
 *   READING   from the opening on: records are read, in order
 *   OPEN      records are appended
 *   FAILED    a sync failed: what was written may be lost, so no record is
 *             appended, and none counts as synced, until a cut of the rows
 *             is on disk (persia_log_release())
 *
 *   from \ to   OPEN   FAILED
 *   READING       x
 *   OPEN                  x
 *   FAILED        x
 *
 * Segments that a cut made needless are used again, as spare-<position>: to
 * write where a file has pages costs a third.  Behind the last record lies a
 * head of zeros, and behind that whatever the segment had before.  Where there
 * is a next segment, the head says so: it has no body, and the position where
 * that one begins.
 *
 * The end.  A record is valid if its checksums are and if it lies at the
 * position it names.  The first that is not is the torn tail of a crash, and
 * is cut off, unless a valid one behind it says that what was before had been
 * synced, or was written in the same boot of the machine: then the middle is
 * damaged (PERSIA_ECORRUPT, with file and offset).  The same decides whether a
 * next segment that is not there is missing.  That records are missing at the
 * end of the last one nothing shows.
 *
 * Any thread may append; one lock, held while a record is written.
 */
#ifndef PERSIA_LOG_H
#define PERSIA_LOG_H

#include "log/disk.h"

#ifdef __cplusplus
extern "C" {
#endif

enum log_level { LOG_PROCESS = 1, LOG_DISK };

enum log_type {
    LOG_IDENTITY = 1, /* lineage and restore of the rows from here on */
    LOG_TABLE,        /* a table was declared */
    LOG_CLAIM,        /* a stream was opened by an owner */
    LOG_PUSH,         /* an update: all parts that were applied as one */
    LOG_ROWS,         /* rows were set, erased, cleared, or dropped */
    LOG_RESTORE,      /* other rows are in the place of all */
    LOG_REFUSAL,      /* an update that this shard alone refused: its parts
                         without ids, and why */
    LOG_ARRIVAL,      /* a part of a shard that comes from another server */
    LOG_TYPES
};
/* "update", "rows", ...; "unknown" for a number that is no type. */
PERSIA_API const char *persia_log_type_name(uint32_t type);

enum { LOG_NAME = 256, LOG_PARTS = 4096 };

/* What a log is of. */
typedef struct log_owner {
    char name_space[LOG_NAME];
    uint32_t shard, shards;
} log_owner;

typedef struct log_config {
    log_owner owner;
    enum log_level level;
    uint64_t segment; /* bytes of a file, about */
    uint64_t limit;   /* bytes behind the last cut: beyond it a cut of the rows
                         is wanted, at twice as many nothing is appended */
} log_config;

typedef struct log_record {
    enum log_type type;
    uint32_t seconds;  /* since 1970, when it was appended */
    uint64_t position, end;
    uint64_t synced;   /* the position up to which all was synced then */
    const char *file;  /* the segment, and where in it: */
    uint64_t offset;
    const wire_span *parts; /* [n] each aligned to 64 bytes */
    size_t n;
} log_record;

/* What reading has found. */
typedef struct log_found {
    uint64_t first;   /* position of the first record that there is */
    uint64_t end;     /* behind the last one */
    uint64_t segments, records;
    uint64_t torn;    /* bytes of a torn tail, and what lies behind */
    int behind;       /* it ended before the position that was asked for */
} log_found;

typedef struct updates_log updates_log;

/* ---- reading ------------------------------------------------------------ */

/* A log that is only looked at: persia_log_read() and persia_log_close().
 * *owner: whose it is, of its first segment; PERSIA_EARG if there is none. */
PERSIA_API int persia_log_look(log_disk *disk, updates_log **out,
                               log_owner *owner);
/* The position of the first record that there is. */
PERSIA_API uint64_t persia_log_first(const updates_log *l);
/* fn(ctx, record) for each record from a position on, which is one of a
 * record, or the end.  With an error of fn's reading ends.  *total and *done,
 * which other threads may read: bytes.  NULL: not wanted. */
typedef int (*log_read_fn)(void *ctx, const log_record *record);
typedef struct log_progress {
    uint64_t total, done; /* by __atomic_*_n */
} log_progress;
PERSIA_API int persia_log_read(updates_log *l, uint64_t from, log_read_fn fn,
                               void *ctx, log_progress *progress,
                               log_found *found);

/* ---- writing ------------------------------------------------------------ */

/* READING.  The disk is the log's, and freed with it; after an error it is
 * the caller's. */
PERSIA_API int persia_log_open(log_disk *disk, const log_config *config,
                               updates_log **out);
/* OPEN, behind what was read; the rest of the files is cut off. */
PERSIA_API int persia_log_begin(updates_log *l, const log_found *found);
/* No call may follow. */
PERSIA_API void persia_log_close(updates_log *l);

/* Of LOG_DISK: fn(ctx) on the log's thread after each sync, or after one has
 * failed.  Before persia_log_begin(); until persia_log_stop() returns. */
PERSIA_API void persia_log_on_sync(updates_log *l, void (*fn)(void *ctx),
                                   void *ctx);
/* Ends that thread; nothing is appended afterwards. */
PERSIA_API void persia_log_stop(updates_log *l);
/* Whether answers have to wait for persia_log_synced(). */
PERSIA_API int persia_log_syncs(const updates_log *l);

/* Appends a record; *end is the position behind it.  PERSIA_EUNAVAILABLE when
 * the disk does not take it, when a sync has failed, or beyond the limit:
 * nothing was appended, and it may be tried again. */
PERSIA_API int persia_log_append(updates_log *l, enum log_type type,
                                 const wire_span *parts, size_t n,
                                 uint64_t *end);
/* Whether all up to `end` is synced: 1, or 0: not yet.  Of a log that has
 * FAILED: PERSIA_EUNAVAILABLE in *rc, with its text. */
PERSIA_API int persia_log_synced(updates_log *l, uint64_t end, int *rc);
/* Returns when that is so, or with that error. */
PERSIA_API int persia_log_wait(updates_log *l, uint64_t end);
/* PERSIA_EUNAVAILABLE if it has FAILED. */
PERSIA_API int persia_log_check(updates_log *l);
/* The position behind the last record. */
PERSIA_API uint64_t persia_log_end(updates_log *l);

/* Whether the owner is to write a cut of the rows: the log is long, or has
 * FAILED, or one at or behind a position was wanted. */
PERSIA_API int persia_log_wants_cut(updates_log *l);
PERSIA_API void persia_log_want_cut(updates_log *l, uint64_t position);
/* What lies before the position does not count towards the limit. */
PERSIA_API void persia_log_discount(updates_log *l, uint64_t position);
/* A cut of the rows at that position is on disk: what lies before is removed.
 * A log that has FAILED is OPEN again, in a new segment, if the cut was taken
 * behind all that it had. */
PERSIA_API int persia_log_release(updates_log *l, uint64_t position);

/* No file has what lies before that position longer than the log needs it:
 * instead of being used again it is removed. */
PERSIA_API void persia_log_forget(updates_log *l, uint64_t position);

/* So long has the disk not returned from a call, in ns; 0: none waits. */
PERSIA_API uint64_t persia_log_waits(const updates_log *l);

typedef struct log_counts {
    uint64_t end, synced, cut; /* positions */
    uint64_t records, bytes;   /* that were appended in this life */
    uint64_t refused;          /* records that were not appended */
    int failed;
} log_counts;
PERSIA_API log_counts persia_log_count(updates_log *l);

#ifdef __cplusplus
}
#endif
#endif
