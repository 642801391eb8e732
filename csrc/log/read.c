/* read.c: files to records; where the log ends.
 *
 * Bytes that are read may be anything: what a crash left, or a disk.  Nothing
 * is believed before its checksum is.
 */
#include "log/private.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/ckpt.h"

enum { LOOK_BYTES = 1 << 20 }; /* that are searched at once */

/* The segment that is read, and where. */
typedef struct reading {
    updates_log *l;
    log_read_fn fn;
    void *ctx;
    log_progress *progress;
    log_found *found;
    size_t segment; /* its number */
    char name[SEGMENT_NAME];
    int file;
    uint64_t size;  /* bytes of the file */
    uint64_t at;    /* in it */
    int is_clean;   /* no record was begun at the end of those that hold */
    int follows;    /* the segment before says that there is this one */
    segment_head head;
    char *body;     /* [room] aligned to UNIT */
    size_t room;
    wire_span parts[LOG_PARTS];
} reading;

static int read_at(reading *r, uint64_t at, void *to, size_t n, size_t *got)
{
    int rc = r->l->disk->read(r->l->disk, r->file, at, to, n, got);
    return rc ? log_io_error("reading", r->name, rc) : PERSIA_OK;
}

static int read_damaged(const reading *r, const char *what)
{
    return persia_err_set(
        PERSIA_ECORRUPT,
        "the log is damaged: %s, offset %" PRIu64 ": %s",
        r->name, r->at, what);
}

/* ---- segments ----------------------------------------------------------- */

static int segment_open(reading *r, size_t no)
{
    segment_name(r->l->firsts[no], r->name);
    r->segment = no;
    r->at = HEAD_BYTES;
    int rc = r->l->disk->open(r->l->disk, r->name, 0, &r->file);
    if (rc) {
        r->file = -1;
        return log_io_error("opening", r->name, rc);
    }
    rc = r->l->disk->size(r->l->disk, r->file, &r->size);
    return rc ? log_io_error("the size of", r->name, rc) : PERSIA_OK;
}

static void segment_close(reading *r)
{
    r->l->disk->close(r->l->disk, r->file);
    r->file = -1;
}

/* *holds: the head is whole, and this log's. */
static int segment_read_head(reading *r, int *holds)
{
    size_t got;
    int rc = read_at(r, 0, &r->head, sizeof r->head, &got);
    *holds = !rc && got == sizeof r->head &&
             segment_head_holds(&r->head, r->l->firsts[r->segment]);
    if (!rc && *holds && r->head.id != r->l->id)
        return persia_err_set(PERSIA_EMISMATCH,
                              "%s is of another log than the segments before "
                              "it",
                              r->name);
    return rc;
}

/* ---- records ------------------------------------------------------------ */

static int read_body_room(reading *r, uint64_t bytes)
{
    if (bytes <= r->room)
        return PERSIA_OK;
    free(r->body);
    r->body = aligned_alloc(UNIT, bytes);
    r->room = r->body ? bytes : 0;
    return r->body ? PERSIA_OK
                   : persia_err_set(PERSIA_ENOMEM, "no memory for a record of "
                                    "%" PRIu64 " bytes", bytes);
}

/* The parts of a body; 0: it is not one. */
static int read_parts_of_body(reading *r, uint64_t bytes, size_t *n)
{
    const uint64_t *sizes = (const uint64_t *)(const void *)r->body;
    if (bytes < UNIT || sizes[0] > LOG_PARTS)
        return 0;
    *n = sizes[0];
    uint64_t at = round_up((*n + 1) * sizeof *sizes);
    if (at > bytes)
        return 0;
    for (size_t i = 0; i < *n; i++) {
        const uint64_t size = sizes[1 + i];
        if (size > bytes || at + round_up(size) > bytes)
            return 0;
        r->parts[i] = (wire_span){r->body + at, size};
        at += round_up(size);
    }
    return at == bytes;
}

/* Whether nothing was written at r->at. */
static int record_is_none(const record_head *h, size_t got)
{
    static const record_head none;
    return got == 0 || (got == sizeof *h && !memcmp(h, &none, sizeof none));
}

/* It was made since the machine was started: no power cut followed. */
static int read_is_of_boot(const reading *r)
{
    return *r->l->boot && !strcmp(r->head.boot, r->l->boot);
}

/* The record at r->at of the next position: *holds, with its head. */
static int record_read(reading *r, record_head *h, size_t *n, int *holds)
{
    size_t got;
    *holds = 0;
    int rc = read_at(r, r->at, h, sizeof *h, &got);
    r->is_clean = record_is_none(h, rc ? 1 : got);
    if (rc || got < sizeof *h ||
        !record_head_holds(h, r->l->id, r->found->end) ||
        h->bytes > r->size - r->at - RECORD_BYTES)
        return rc;
    if (!h->bytes) {
        r->is_clean = 1;
        r->follows = read_is_of_boot(r) || h->synced >= h->position;
        return PERSIA_OK;
    }
    rc = read_body_room(r, h->bytes);
    if (!rc)
        rc = read_at(r, r->at + RECORD_BYTES, r->body, h->bytes, &got);
    *holds = !rc && got == h->bytes &&
             persia_crc32c(0, r->body, h->bytes) == h->body_crc &&
             read_parts_of_body(r, h->bytes, n);
    return rc;
}

static int record_give(reading *r, const record_head *h, size_t n,
                       uint64_t from)
{
    const uint64_t bytes = RECORD_BYTES + h->bytes;
    const log_record record = {.type = h->type,
                               .seconds = h->seconds,
                               .position = h->position,
                               .end = h->position + bytes,
                               .synced = h->synced,
                               .file = r->name,
                               .offset = r->at,
                               .parts = r->parts,
                               .n = n};
    if (h->position < from && record.end > from)
        return read_damaged(r,
                            "a cut of the rows was taken within this record");
    int rc = PERSIA_OK;
    if (h->position >= from) {
        rc = persia_interrupt_poll();
        if (!rc)
            rc = r->fn(r->ctx, &record);
        r->found->records++;
        if (r->progress)
            __atomic_store_n(&r->progress->done, record.end - from,
                             __ATOMIC_RELAXED);
    }
    r->found->end = record.end;
    r->at += bytes;
    return rc;
}

/* ---- the end ------------------------------------------------------------ */

/* Whether a valid head lies in this segment from r->at on, of any position
 * that its place has, that shows that the record before r->at is missing. */
static int segment_shows(reading *r, uint64_t bad, int *shows)
{
    char *look = malloc(LOOK_BYTES);
    const int same_boot = read_is_of_boot(r);
    int rc = look ? PERSIA_OK
                  : persia_err_set(PERSIA_ENOMEM, "no memory for a log");
    for (uint64_t at = r->at; !rc && !*shows && at < r->size;
         at += LOOK_BYTES) {
        size_t got;
        rc = read_at(r, at, look, LOOK_BYTES, &got);
        for (size_t i = 0; !rc && i + RECORD_BYTES <= got && !*shows;
             i += UNIT) {
            record_head h;
            memcpy(&h, look + i, sizeof h);
            const uint64_t position = r->head.first + at + i - HEAD_BYTES;
            *shows = position > bad &&
                     record_head_holds(&h, r->l->id, position) &&
                     (same_boot || h.synced > bad);
        }
    }
    free(look);
    return rc;
}

/* The same, of a segment whose head may not hold: records follow one that was
 * written. */
static int read_judge_segment(reading *r, uint64_t bad, int *shows)
{
    const uint64_t first = r->l->firsts[r->segment];
    if (segment_head_holds(&r->head, first))
        return segment_shows(r, bad, shows);
    *shows = r->size > EMPTY_BYTES && !segment_head_is_old(&r->head, first);
    return PERSIA_OK;
}

static int read_misses(const reading *r)
{
    char next[SEGMENT_NAME];
    segment_name(r->found->end, next);
    return persia_err_set(PERSIA_ECORRUPT,
                          "the log is damaged: %s is missing or has no head, "
                          "and the segment before it says that it follows",
                          next);
}

/* Something does not hold at r->at.  A tail that a crash tore, or damage: an
 * error, with this segment open. */
static int read_judge_end(reading *r)
{
    const uint64_t bad = r->found->end, at = r->at;
    const size_t segment = r->segment;
    int shows = 0, holds;
    if (r->follows)
        return read_misses(r);
    int rc = read_judge_segment(r, bad, &shows);
    r->found->torn = r->size > at && !r->is_clean ? r->size - at : 0;
    for (size_t no = segment + 1; no < r->l->segments_n && !rc && !shows;
         no++) {
        segment_close(r);
        rc = segment_open(r, no);
        if (!rc)
            rc = segment_read_head(r, &holds);
        if (!rc)
            rc = read_judge_segment(r, bad, &shows);
    }
    if (rc || !shows)
        return rc;
    segment_name(r->l->firsts[segment], r->name);
    r->at = at;
    return read_damaged(
        r, "a record is not what was written, and there are later "
           "ones");
}

/* ---- all of it ---------------------------------------------------------- */

/* Records of a segment up to where one does not hold; *ends: the log does. */
static int records_read(reading *r, uint64_t from, int *ends)
{
    int rc = PERSIA_OK, holds = 1;
    const size_t next = r->segment + 1;
    r->follows = 0;
    while (!rc && holds) {
        record_head h;
        size_t n;
        rc = record_read(r, &h, &n, &holds);
        if (!rc && holds)
            rc = record_give(r, &h, n, from);
    }
    *ends = !holds && !(next < r->l->segments_n &&
                        r->l->firsts[next] == r->found->end);
    return rc;
}

static int read_all(reading *r, size_t first, uint64_t from)
{
    const updates_log *l = r->l;
    int rc = PERSIA_OK, ends = 0;
    for (size_t no = first; no < l->segments_n && !rc && !ends; no++) {
        int holds = 0;
        rc = segment_open(r, no);
        if (!rc)
            rc = segment_read_head(r, &holds);
        if (!rc && holds && l->firsts[no] == r->found->end)
            rc = records_read(r, from, &ends);
        else if (!rc) {
            r->is_clean = segment_head_is_old(&r->head, l->firsts[no]);
            ends = 1;
        }
        if (!rc && ends)
            rc = read_judge_end(r);
        segment_close(r);
        r->found->segments++;
    }
    return rc;
}

/* The segment that has the position; the last one if none has. */
static size_t segment_of(const updates_log *l, uint64_t position)
{
    size_t no = 0;
    while (no + 1 < l->segments_n && l->firsts[no + 1] <= position)
        no++;
    return no;
}

/* The bytes that are to be read, about. */
static int read_measure(reading *r, uint64_t from)
{
    const size_t last = r->l->segments_n - 1;
    int rc = segment_open(r, last);
    const uint64_t end = r->l->firsts[last] +
                         (rc || r->size < HEAD_BYTES ? 0
                                                     : r->size - HEAD_BYTES);
    segment_close(r);
    if (!rc && r->progress)
        __atomic_store_n(&r->progress->total, end > from ? end - from : 0,
                         __ATOMIC_RELAXED);
    return rc;
}

int persia_log_read(updates_log *l, uint64_t from, log_read_fn fn, void *ctx,
                    log_progress *progress, log_found *found)
{
    *found = (log_found){.first = from, .end = from};
    if (!l->segments_n)
        return PERSIA_OK;
    if (l->firsts[0] > from)
        return persia_err_set(PERSIA_ECORRUPT,
                              "the log begins at position %" PRIu64
                              ", what lies between it and the rows at %" PRIu64
                              " is missing",
                              l->firsts[0], from);
    reading *r = calloc(1, sizeof *r);
    if (!r)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a log");
    *r = (reading){.l = l, .fn = fn, .ctx = ctx, .progress = progress,
                   .found = found, .file = -1};
    const size_t first = segment_of(l, from);
    found->end = l->firsts[first];
    int rc = read_measure(r, from);
    if (!rc)
        rc = read_all(r, first, from);
    if (!rc && found->end < from) { /* the rows have all that it had */
        found->end = from;
        found->behind = 1;
    }
    free(r->body);
    free(r);
    return rc;
}
