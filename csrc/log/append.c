/* append.c: records to files; the thread that syncs. */
#include "log/private.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "ckpt/ckpt.h"

enum { SYNC_BYTES = 4 << 20 };
#define SYNC_NS ((uint64_t)2000000)
#define TURN_NS ((uint64_t)5000000000)

static const char zeros[UNIT];

/* ---- turns -------------------------------------------------------------- */

/* A disk that hangs holds one thread for as long, each other one for TURN_NS
 * at first, and later ones not at all. */
int turn_take_locked(updates_log *l)
{
    const uint64_t began = persia_clock_ns();
    while (l->writing) {
        const uint64_t at = atomic_load(&l->writing_since);
        const uint64_t since = at < began ? at : began;
        if (persia_clock_ns() - since >= TURN_NS)
            return persia_err_set(PERSIA_EUNAVAILABLE,
                                  "the disk has not taken the log for %d s: "
                                  "updates wait",
                                  (int)(TURN_NS / 1000000000));
        (void)persia_cond_wait_until(&l->change, &l->lock, since + TURN_NS);
    }
    l->writing = 1;
    atomic_store(&l->writing_since, persia_clock_ns());
    return PERSIA_OK;
}

void turn_give_locked(updates_log *l)
{
    assert(l->writing);
    l->writing = 0;
    atomic_store(&l->writing_since, 0);
    pthread_cond_broadcast(&l->change);
}

/* ---- syncing ------------------------------------------------------------ */

static void append_fail_locked(updates_log *l, int code)
{
    snprintf(l->text, sizeof l->text,
             "the log could not be synced (%s): what it was given may be "
             "lost, so updates wait until the server has written all its "
             "rows",
             strerror(code));
    if (l->state == LOG_OPEN)
        log_move_locked(l, LOG_FAILED);
}

/* With the lock, which is free while the disk syncs. */
static void append_sync_locked(updates_log *l)
{
    assert(!l->syncing);
    const uint64_t target = l->end;
    l->wanted_at = PERSIA_FOREVER;
    l->syncing = 1;
    atomic_store(&l->syncing_since, persia_clock_ns());
    const int file = l->file;
    pthread_mutex_unlock(&l->lock);
    int rc = l->disk->sync(l->disk, file);
    pthread_mutex_lock(&l->lock);
    l->syncing = 0;
    atomic_store(&l->syncing_since, 0);
    if (rc)
        append_fail_locked(l, rc);
    else if (target > l->synced)
        l->synced = target;
    pthread_cond_broadcast(&l->change);
}

/* ---- segments ----------------------------------------------------------- */

/* What there is lasts, before it has no open file any more; answers that wait
 * for it are the thread's. */
static int segment_end_locked(updates_log *l)
{
    while (l->syncing)
        persia_cond_wait(&l->change, &l->lock);
    if (l->file < 0 || l->config.level != LOG_DISK || l->state == LOG_FAILED)
        return PERSIA_OK;
    append_sync_locked(l);
    l->wanted_at = 0;
    pthread_cond_broadcast(&l->change);
    return l->state == LOG_FAILED
               ? persia_err_set(PERSIA_EUNAVAILABLE, "%s", l->text)
               : PERSIA_OK;
}

/* A file of this name: the spare one, or ("") a new one. */
static int segment_open(const updates_log *l, const char *spare,
                        const char *name, int *file)
{
    if (*spare && !l->disk->rename(l->disk, spare, name))
        return l->disk->open(l->disk, name, 0, file);
    return l->disk->open(l->disk, name, 1, file);
}

/* Without the lock.  again: there is an empty one of this name, which the one
 * before it names. */
static int segment_make(const updates_log *l, const char *spare,
                        const char *name, int again, int *file)
{
    segment_head head;
    segment_head_make(l, l->end, &head);
    const wire_span spans[] = {{&head, sizeof head}, {zeros, RECORD_BYTES}};
    int rc = segment_open(l, spare, name, file);
    if (rc)
        return rc;
    rc = l->disk->write(l->disk, *file, 0, spans, 2);
    if (!rc && l->config.level == LOG_DISK)
        rc = l->disk->sync(l->disk, *file);
    if (!rc && l->config.level == LOG_DISK)
        rc = l->disk->sync_folder(l->disk);
    if (rc)
        l->disk->close(l->disk, *file);
    if (rc && !again)
        (void)l->disk->remove(l->disk, name);
    return rc;
}

/* The segment that ends says so; where that is not written, it will not be
 * noticed if the next one gets lost. */
static void segment_name_next(const updates_log *l, const record_head *next)
{
    const wire_span span = {next, sizeof *next};
    if (l->file >= 0)
        (void)l->disk->write(l->disk, l->file, l->at, &span, 1);
}

int segment_begin_locked(updates_log *l)
{
    char name[SEGMENT_NAME], spare[SEGMENT_NAME] = "";
    int file;
    int rc = segment_end_locked(l);
    if (rc)
        return rc;
    segment_name(l->end, name);
    const int again = l->segments_n &&
                      l->firsts[l->segments_n - 1] == l->end;
    if (!again && (rc = segments_reserve(l)))
        return rc;
    if (l->spares_n)
        spare_name(l->spares[--l->spares_n], spare);
    const record_head next = record_head_next(l);
    pthread_mutex_unlock(&l->lock);
    rc = segment_make(l, spare, name, again, &file);
    if (!rc && !again)
        segment_name_next(l, &next);
    pthread_mutex_lock(&l->lock);
    if (rc)
        return log_io_error("making", name, rc);
    while (l->syncing)
        persia_cond_wait(&l->change, &l->lock);
    if (!again)
        l->firsts[l->segments_n++] = l->end;
    l->disk->close(l->disk, l->file);
    l->file = file;
    l->at = HEAD_BYTES;
    return PERSIA_OK;
}

/* ---- appending ---------------------------------------------------------- */

/* A record as spans: its head, its sizes, its parts with padding. */
typedef struct record_spans {
    record_head head;
    uint64_t *sizes;  /* [parts + 1] */
    wire_span *spans; /* [4 + 2 * parts] and zeros behind it */
    size_t n;
    uint64_t bytes; /* of all */
} record_spans;

static void spans_add(record_spans *r, const void *data, uint64_t bytes)
{
    const uint64_t padding = round_up(bytes) - bytes;
    if (bytes)
        r->spans[r->n++] = (wire_span){data, bytes};
    if (padding)
        r->spans[r->n++] = (wire_span){zeros, padding};
    r->bytes += bytes + padding;
}

/* The body, and its checksum: without the lock. */
static int record_body(record_spans *r, wire_memory *memory,
                       enum log_type type, const wire_span *parts, size_t n)
{
    uint32_t crc = 0;
    r->n = 1; /* the head is sealed later */
    r->bytes = 0;
    r->sizes = persia_wire_memory_take(memory, (n + 1) * sizeof *r->sizes);
    r->spans = persia_wire_memory_take(memory,
                                       (4 + 2 * n) * sizeof *r->spans);
    if (!r->sizes || !r->spans)
        return PERSIA_ENOMEM;
    r->sizes[0] = n;
    for (size_t i = 0; i < n; i++)
        r->sizes[1 + i] = parts[i].n;
    spans_add(r, r->sizes, (n + 1) * sizeof *r->sizes);
    for (size_t i = 0; i < n; i++)
        spans_add(r, parts[i].data, parts[i].n);
    for (size_t i = 1; i < r->n; i++)
        crc = persia_crc32c(crc, r->spans[i].data, r->spans[i].n);
    r->head = (record_head){.bytes = r->bytes,
                            .body_crc = crc,
                            .seconds = (uint32_t)persia_clock_seconds(),
                            .type = type};
    r->bytes += RECORD_BYTES;
    return PERSIA_OK;
}

/* A server that begins or restores writes whose its rows are: refused, it
 * would never write the rows that make the log short. */
static int append_refuse_locked(updates_log *l, enum log_type type)
{
    if (l->state == LOG_FAILED)
        return persia_err_set(PERSIA_EUNAVAILABLE, "%s", l->text);
    if (type == LOG_IDENTITY || log_length_locked(l) <= 2 * l->config.limit)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "the log has twice its limit: updates wait until "
                          "the server has written its rows");
}

static int append_write_locked(updates_log *l, record_spans *r)
{
    const uint64_t used = l->at - HEAD_BYTES;
    int rc = PERSIA_OK;
    if (used && used + r->bytes > l->config.segment)
        rc = segment_begin_locked(l);
    if (rc)
        return persia_err_set(PERSIA_EUNAVAILABLE, "%s", persia_err_text());
    r->head.id = l->id;
    r->head.position = l->end;
    r->head.synced = l->synced;
    record_head_seal(&r->head);
    r->spans[0] = (wire_span){&r->head, RECORD_BYTES};
    r->spans[r->n] = (wire_span){zeros, RECORD_BYTES};
    pthread_mutex_unlock(&l->lock);
    rc = l->disk->write(l->disk, l->file, l->at, r->spans, r->n + 1);
    pthread_mutex_lock(&l->lock);
    if (!rc)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "the disk does not take the log: %s; updates wait",
                          strerror(rc));
}

static int append_locked(updates_log *l, record_spans *r, uint64_t *end)
{
    assert(l->state != LOG_READING);
    int rc = turn_take_locked(l);
    if (!rc) {
        rc = append_refuse_locked(l, (enum log_type)r->head.type);
        if (!rc)
            rc = append_write_locked(l, r);
        if (!rc) {
            l->at += r->bytes;
            l->end += r->bytes;
        }
        turn_give_locked(l);
    }
    if (rc) {
        l->refused++;
        return rc;
    }
    *end = r->head.position + r->bytes;
    l->records++;
    l->bytes += r->bytes;
    if (!l->thread_runs)
        return PERSIA_OK;
    const uint64_t due = l->end - l->synced >= SYNC_BYTES
                             ? 0
                             : persia_clock_ns() + SYNC_NS;
    if (due < l->wanted_at) {
        l->wanted_at = due;
        pthread_cond_broadcast(&l->change);
    }
    return PERSIA_OK;
}

int persia_log_append(updates_log *l, enum log_type type,
                      const wire_span *parts, size_t n, uint64_t *end)
{
    wire_memory memory;
    record_spans r;
    if (n > LOG_PARTS)
        return persia_err_set(PERSIA_ELIMIT, "a record of %zu parts", n);
    persia_wire_memory_init(&memory);
    int rc = record_body(&r, &memory, type, parts, n);
    if (!rc) {
        pthread_mutex_lock(&l->lock);
        rc = append_locked(l, &r, end);
        pthread_mutex_unlock(&l->lock);
    }
    persia_wire_memory_free(&memory);
    return rc;
}

/* ---- the thread that syncs ---------------------------------------------- */

static void *append_sync_main(void *ctx)
{
    updates_log *l = ctx;
    pthread_mutex_lock(&l->lock);
    while (!l->stop) {
        if (l->wanted_at > persia_clock_ns()) {
            persia_cond_wait_until(&l->change, &l->lock, l->wanted_at);
            continue;
        }
        if (l->state == LOG_OPEN)
            append_sync_locked(l);
        else
            l->wanted_at = PERSIA_FOREVER;
        pthread_mutex_unlock(&l->lock);
        if (l->on_sync)
            l->on_sync(l->on_sync_ctx);
        pthread_mutex_lock(&l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

int sync_start(updates_log *l)
{
    int rc =
        persia_thread_start(&l->thread, append_sync_main, l, "persia-log");
    l->thread_runs = !rc;
    return rc;
}

void persia_log_stop(updates_log *l)
{
    if (!l->thread_runs)
        return;
    pthread_mutex_lock(&l->lock);
    l->stop = 1;
    pthread_cond_broadcast(&l->change);
    pthread_mutex_unlock(&l->lock);
    persia_thread_join(l->thread);
    l->thread_runs = 0;
}
