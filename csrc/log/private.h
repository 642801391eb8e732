/* private.h: what the parts of a log share (private).
 *
 *   log.c      life, states, release
 *   append.c   records to files; the thread that syncs
 *   format.c   heads of segments and records
 *   read.c     files to records; where the log ends
 *   disk.c     a folder of the file system
 */
#ifndef PERSIA_LOG_PRIVATE_H
#define PERSIA_LOG_PRIVATE_H

#include "log/log.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    UNIT = 64,          /* bytes that all in a segment is aligned to */
    HEAD_BYTES = 512,   /* of a segment */
    RECORD_BYTES = 64,  /* of a record's head */
    EMPTY_BYTES = HEAD_BYTES + RECORD_BYTES, /* of a segment as it is made */
    BOOT_BYTES = 40,    /* of the machine's boot id, with 0 */
    SEGMENT_NAME = 32,
    SPARES = 16
};

static inline uint64_t round_up(uint64_t bytes)
{
    return (bytes + UNIT - 1) / UNIT * UNIT;
}

/* The first bytes of a segment, as they lie in the file. */
typedef struct segment_head {
    char magic[8];
    uint32_t version;
    uint32_t crc;   /* of all, this field being 0 */
    uint64_t id;    /* of the log, random */
    uint64_t first; /* position of its first record */
    uint32_t shard, shards;
    char boot[BOOT_BYTES]; /* of the machine when it was made */
    char name_space[LOG_NAME];
    char zero[HEAD_BYTES - 40 - BOOT_BYTES - LOG_NAME];
} segment_head;
_Static_assert(sizeof(segment_head) == HEAD_BYTES, "as it lies in the file");

typedef struct record_head {
    uint32_t magic;
    uint32_t crc;      /* of the head, this field being 0 */
    uint64_t id;       /* of the log */
    uint64_t position; /* of the record */
    uint64_t synced;   /* up to where all was synced when it was written */
    uint64_t bytes;    /* of the body, a multiple of UNIT */
    uint32_t body_crc;
    uint32_t seconds;
    uint32_t type;
    char zero[RECORD_BYTES - 52];
} record_head;
_Static_assert(sizeof(record_head) == RECORD_BYTES, "as it lies in the file");

enum log_state { LOG_READING, LOG_OPEN, LOG_FAILED, LOG_STATES };

struct updates_log {
    log_disk *disk;
    log_config config;
    uint64_t id;
    char boot[BOOT_BYTES];
    void (*on_sync)(void *ctx);
    void *on_sync_ctx;

    pthread_mutex_t lock; /* guards: */
    enum log_state state;
    char text[512];    /* why it has FAILED */
    uint64_t *firsts;  /* [segments_n] positions, ascending */
    size_t segments_n, segments_room;
    uint64_t spares[SPARES]; /* [spares_n] by the positions in their names */
    size_t spares_n;
    uint64_t forgotten; /* segments that begin before it are not kept */
    int file;          /* of the last segment; -1: none */
    uint64_t at;       /* in that file, where the next record begins */
    uint64_t end, synced, cut;
    uint64_t records, bytes, refused;
    uint64_t wanted_at; /* a sync is due at this time; UINT64_MAX: none */
    int syncing;        /* the thread syncs `file` without the lock */
    int writing;        /* one thread writes `file` without it, or makes the
                           next: only that one changes file, at and end */
    /* When each of them began, for any thread; 0: it is not so. */
    _Atomic(uint64_t) syncing_since, writing_since;
    uint64_t wanted;    /* a cut is, at this position or behind */
    uint64_t discount;  /* bytes before it do not count towards the limit */
    int stop;
    pthread_cond_t change; /* of all that the thread or a segment waits for */
    pthread_t thread;
    int thread_runs;
};

/* ---- format.c ----------------------------------------------------------- */

void segment_name(uint64_t first, char out[SEGMENT_NAME]);
void spare_name(uint64_t first, char out[SEGMENT_NAME]);
/* The reverse; 0: it is no segment's, or no spare one's. */
int segment_parse(const char *name, uint64_t *first);
int spare_parse(const char *name, uint64_t *first);
void segment_head_make(const updates_log *l, uint64_t first,
                       segment_head *out);
/* Whether the bytes are the head of the segment of that position. */
int segment_head_holds(const segment_head *h, uint64_t first);
/* Whether they are that of another one: a spare one got its name, and no head
 * yet, so it has no record. */
int segment_head_is_old(const segment_head *h, uint64_t first);
void record_head_seal(record_head *h);
/* Whether the bytes are the head of a record of the log at that position. */
int record_head_holds(const record_head *h, uint64_t id, uint64_t position);
/* Behind the last record of a segment: another one follows. */
record_head record_head_next(const updates_log *l);
/* The boot id of this machine; "" where it has none. */
void boot_of_machine(char out[BOOT_BYTES]);

/* ---- log.c -------------------------------------------------------------- */

/* PERSIA_EIO, of an errno and a segment. */
int log_io_error(const char *what, const char *name, int code);
/* Moves the log; with the lock. */
void log_move_locked(updates_log *l, enum log_state to);
/* Bytes that count towards the limit; with the lock. */
static inline uint64_t log_length_locked(const updates_log *l)
{
    const uint64_t from = l->cut > l->discount ? l->cut : l->discount;
    return l->end > from ? l->end - from : 0;
}
/* Room for one more segment in the list. */
int segments_reserve(updates_log *l);

/* ---- append.c ----------------------------------------------------------- */

/* A new segment at l->end, by the thread that writes. */
int segment_begin_locked(updates_log *l);
/* Becomes the thread that writes.  PERSIA_EUNAVAILABLE if another one has been
 * that for long: the disk hangs, and shall have no further thread. */
int turn_take_locked(updates_log *l);
void turn_give_locked(updates_log *l);
int sync_start(updates_log *l);

#endif
