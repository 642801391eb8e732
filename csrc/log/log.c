/* log.c: the life of a log, its states, and what it lets go of. */
#include "log/private.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- states ------------------------------------------------------------- */

/* The table of log.h: bit `to` of moves[from]. */
static const unsigned moves[LOG_STATES] = {
    [LOG_READING] = 1 << LOG_OPEN,
    [LOG_OPEN] = 1 << LOG_FAILED,
    [LOG_FAILED] = 1 << LOG_OPEN,
};

void log_move_locked(updates_log *l, enum log_state to)
{
    assert(moves[l->state] >> to & 1);
    l->state = to;
}

int log_io_error(const char *what, const char *name, int code)
{
    return persia_err_set(PERSIA_EIO, "%s %s of the log failed: %s", what,
                          name, strerror(code));
}

/* ---- segments ----------------------------------------------------------- */

int segments_reserve(updates_log *l)
{
    if (l->segments_n < l->segments_room)
        return PERSIA_OK;
    const size_t room = l->segments_room * 2 + 16;
    uint64_t *grown = realloc(l->firsts, room * sizeof *grown);
    if (!grown)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a log");
    l->firsts = grown;
    l->segments_room = room;
    return PERSIA_OK;
}

static int found_file(void *ctx, const char *name)
{
    updates_log *l = ctx;
    uint64_t first;
    if (spare_parse(name, &first) && l->spares_n < SPARES)
        l->spares[l->spares_n++] = first;
    if (!segment_parse(name, &first))
        return PERSIA_OK;
    int rc = segments_reserve(l);
    if (!rc)
        l->firsts[l->segments_n++] = first;
    return rc;
}

static int log_by_position(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The segments that there are, in order. */
static int segments_find(updates_log *l)
{
    int rc = l->disk->list(l->disk, found_file, l);
    if (rc == PERSIA_ENOMEM)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a log");
    if (rc)
        return log_io_error("reading the folder", "", rc);
    if (l->segments_n)
        qsort(l->firsts, l->segments_n, sizeof *l->firsts, log_by_position);
    return PERSIA_OK;
}

static int head_damaged(const char *name)
{
    return persia_err_set(PERSIA_ECORRUPT,
                          "the log is damaged: %s, offset 0: this is no head "
                          "of a segment",
                          name);
}

/* The head of the first segment.  *holds: it is whole; a crash may have left a
 * single one without, in which there is no record then. */
static int first_head(updates_log *l, segment_head *h, int *holds)
{
    char name[SEGMENT_NAME];
    size_t got;
    uint64_t size = 0;
    int file;
    segment_name(l->firsts[0], name);
    int rc = l->disk->open(l->disk, name, 0, &file);
    if (rc)
        return log_io_error("opening", name, rc);
    rc = l->disk->read(l->disk, file, 0, h, sizeof *h, &got);
    if (!rc)
        rc = l->disk->size(l->disk, file, &size);
    l->disk->close(l->disk, file);
    if (rc)
        return log_io_error("reading", name, rc);
    *holds = got == sizeof *h && segment_head_holds(h, l->firsts[0]);
    return *holds || (l->segments_n == 1 &&
                      (size <= EMPTY_BYTES ||
                       segment_head_is_old(h, l->firsts[0])))
               ? PERSIA_OK
               : head_damaged(name);
}

/* Whose the log is. */
static int owner_check(updates_log *l)
{
    segment_head h;
    int holds = 0;
    if (!l->segments_n)
        return PERSIA_OK;
    int rc = first_head(l, &h, &holds);
    if (rc)
        return rc;
    if (!holds)
        return PERSIA_OK;
    l->id = h.id;
    const log_owner *o = &l->config.owner;
    if (!strcmp(h.name_space, o->name_space) && h.shard == o->shard &&
        h.shards == o->shards)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EMISMATCH,
                          "the log is of shard %u of %u of namespace '%s', "
                          "this is shard %u of %u of '%s': give it a log of "
                          "its own",
                          h.shard, h.shards, h.name_space, o->shard,
                          o->shards, o->name_space);
}

/* ---- life --------------------------------------------------------------- */

static int log_make(log_disk *disk, updates_log **out)
{
    updates_log *l = calloc(1, sizeof *l);
    *out = NULL;
    if (!l)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a log");
    l->disk = disk;
    l->file = -1;
    l->wanted_at = PERSIA_FOREVER;
    l->state = LOG_READING;
    pthread_mutex_init(&l->lock, NULL);
    persia_cond_init(&l->change);
    boot_of_machine(l->boot);
    *out = l;
    return PERSIA_OK;
}

static void log_free(updates_log *l)
{
    pthread_cond_destroy(&l->change);
    pthread_mutex_destroy(&l->lock);
    free(l->firsts);
    free(l);
}

int persia_log_open(log_disk *disk, const log_config *config,
                    updates_log **out)
{
    int rc = log_make(disk, out);
    updates_log *l = *out;
    if (rc)
        return rc;
    l->config = *config;
    rc = persia_random_id(&l->id);
    if (!rc)
        rc = segments_find(l);
    if (!rc)
        rc = owner_check(l);
    if (!rc)
        return PERSIA_OK;
    log_free(l);
    *out = NULL;
    return rc;
}

int persia_log_look(log_disk *disk, updates_log **out, log_owner *owner)
{
    segment_head h = {.id = 0};
    int holds = 0;
    int rc = log_make(disk, out);
    updates_log *l = *out;
    if (rc)
        return rc;
    rc = segments_find(l);
    if (!rc && !l->segments_n)
        rc = persia_err_set(PERSIA_EARG, "there is no log in this folder");
    if (!rc)
        rc = first_head(l, &h, &holds);
    if (!rc && holds) {
        l->id = h.id;
        *owner = (log_owner){.shard = h.shard, .shards = h.shards};
        memcpy(owner->name_space, h.name_space, sizeof owner->name_space);
        l->config.owner = *owner;
    } else if (!rc) {
        rc = persia_err_set(PERSIA_EARG, "the log has no record yet");
    }
    if (!rc)
        return PERSIA_OK;
    log_free(l);
    *out = NULL;
    return rc;
}

void persia_log_on_sync(updates_log *l, void (*fn)(void *ctx), void *ctx)
{
    l->on_sync = fn;
    l->on_sync_ctx = ctx;
}

/* Cuts off what lies behind the end in the last segment that is kept: its
 * records, or that another segment follows. */
static int segment_resume(updates_log *l, uint64_t first)
{
    char name[SEGMENT_NAME];
    segment_name(first, name);
    int rc = l->disk->open(l->disk, name, 0, &l->file);
    if (rc)
        return log_io_error("opening", name, rc);
    l->at = HEAD_BYTES + l->end - first;
    rc = l->disk->cut(l->disk, l->file, l->at);
    if (rc)
        return log_io_error("cutting the torn tail off", name, rc);
    /* What was read is there; whether the disk has it is not known. */
    if (l->config.level == LOG_DISK)
        rc = l->disk->sync(l->disk, l->file);
    return rc ? log_io_error("syncing", name, rc) : PERSIA_OK;
}

/* Removes all segments but so many. */
static int segments_trim(updates_log *l, size_t kept)
{
    for (size_t i = kept; i < l->segments_n; i++) {
        char name[SEGMENT_NAME];
        segment_name(l->firsts[i], name);
        int rc = l->disk->remove(l->disk, name);
        if (rc)
            return log_io_error("removing", name, rc);
    }
    l->segments_n = kept;
    return PERSIA_OK;
}

int persia_log_begin(updates_log *l, const log_found *found)
{
    pthread_mutex_lock(&l->lock);
    l->end = found->end;
    l->cut = found->first;
    size_t kept = 0; /* those behind the end have no record */
    while (!found->behind && kept < l->segments_n && l->firsts[kept] < l->end)
        kept++;
    int rc = turn_take_locked(l); /* at once: no other thread is there */
    if (!rc && kept)
        rc = segment_resume(l, l->firsts[kept - 1]);
    if (!rc)
        rc = segments_trim(l, kept);
    if (!rc && !kept)
        rc = segment_begin_locked(l);
    l->synced = l->config.level == LOG_DISK ? l->end : 0;
    if (!rc)
        log_move_locked(l, LOG_OPEN);
    turn_give_locked(l);
    pthread_mutex_unlock(&l->lock);
    return rc || l->config.level != LOG_DISK ? rc : sync_start(l);
}

void persia_log_close(updates_log *l)
{
    if (!l)
        return;
    persia_log_stop(l);
    l->disk->close(l->disk, l->file);
    l->disk->free(l->disk);
    log_free(l);
}

/* ---- questions ---------------------------------------------------------- */

int persia_log_syncs(const updates_log *l)
{
    return l->config.level == LOG_DISK;
}

static int log_failure_locked(const updates_log *l)
{
    return persia_err_set(PERSIA_EUNAVAILABLE, "%s", l->text);
}

uint64_t persia_log_first(const updates_log *l)
{
    return l->segments_n ? l->firsts[0] : 0;
}

int persia_log_check(updates_log *l)
{
    pthread_mutex_lock(&l->lock);
    int rc = l->state == LOG_FAILED ? log_failure_locked(l) : PERSIA_OK;
    pthread_mutex_unlock(&l->lock);
    return rc;
}

int persia_log_synced(updates_log *l, uint64_t end, int *rc)
{
    pthread_mutex_lock(&l->lock);
    const int is = l->synced >= end;
    *rc = !is && l->state == LOG_FAILED ? log_failure_locked(l) : PERSIA_OK;
    pthread_mutex_unlock(&l->lock);
    return is;
}

int persia_log_wait(updates_log *l, uint64_t end)
{
    pthread_mutex_lock(&l->lock);
    while (l->synced < end && l->state == LOG_OPEN && l->thread_runs)
        persia_cond_wait(&l->change, &l->lock);
    int rc = l->synced < end && l->state == LOG_FAILED ? log_failure_locked(l)
                                                       : PERSIA_OK;
    pthread_mutex_unlock(&l->lock);
    return rc;
}

uint64_t persia_log_end(updates_log *l)
{
    pthread_mutex_lock(&l->lock);
    const uint64_t end = l->end;
    pthread_mutex_unlock(&l->lock);
    return end;
}

uint64_t persia_log_waits(const updates_log *l)
{
    const uint64_t now = persia_clock_ns();
    const uint64_t writes = atomic_load(&l->writing_since);
    const uint64_t syncs = atomic_load(&l->syncing_since);
    const uint64_t since = writes && (!syncs || writes < syncs) ? writes
                                                                : syncs;
    return since && since < now ? now - since : 0;
}

log_counts persia_log_count(updates_log *l)
{
    pthread_mutex_lock(&l->lock);
    const log_counts n = {.end = l->end,
                          .synced = l->synced,
                          .cut = l->cut,
                          .records = l->records,
                          .bytes = l->bytes,
                          .refused = l->refused,
                          .failed = l->state == LOG_FAILED};
    pthread_mutex_unlock(&l->lock);
    return n;
}

/* ---- cuts --------------------------------------------------------------- */

int persia_log_wants_cut(updates_log *l)
{
    pthread_mutex_lock(&l->lock);
    const int wants = l->cut < l->wanted || l->state == LOG_FAILED ||
                      log_length_locked(l) > l->config.limit;
    pthread_mutex_unlock(&l->lock);
    return wants;
}

void persia_log_want_cut(updates_log *l, uint64_t position)
{
    pthread_mutex_lock(&l->lock);
    if (position > l->wanted)
        l->wanted = position;
    pthread_mutex_unlock(&l->lock);
}

void persia_log_discount(updates_log *l, uint64_t position)
{
    pthread_mutex_lock(&l->lock);
    l->discount = position;
    pthread_mutex_unlock(&l->lock);
}

/* How many spare segments a log needs at most: as many as lie between two
 * cuts. */
static size_t log_spares_most(const updates_log *l)
{
    const uint64_t n = l->config.limit / l->config.segment + 1;
    return n < SPARES ? (size_t)n : SPARES;
}

void persia_log_forget(updates_log *l, uint64_t position)
{
    int rc = 0;
    pthread_mutex_lock(&l->lock);
    l->forgotten = position;
    while (l->spares_n && !rc) { /* one that stays is written over */
        char name[SEGMENT_NAME];
        spare_name(l->spares[l->spares_n - 1], name);
        rc = l->disk->remove(l->disk, name);
        l->spares_n -= !rc;
    }
    pthread_mutex_unlock(&l->lock);
}

/* Removes a segment, or keeps it as a spare one. */
static int segment_retire_locked(updates_log *l, uint64_t first)
{
    char name[SEGMENT_NAME], kept[SEGMENT_NAME];
    segment_name(first, name);
    spare_name(first, kept);
    const int keeps = first >= l->forgotten &&
                      l->spares_n < log_spares_most(l);
    int rc = keeps ? l->disk->rename(l->disk, name, kept)
                   : l->disk->remove(l->disk, name);
    if (rc)
        return log_io_error("removing", name, rc);
    if (keeps)
        l->spares[l->spares_n++] = first;
    return PERSIA_OK;
}

/* Ends segments whose records all lie before the cut.  The last one stays: it
 * has the end. */
static int segments_release_locked(updates_log *l)
{
    size_t gone = 0;
    int rc = PERSIA_OK;
    while (gone + 1 < l->segments_n && l->firsts[gone + 1] <= l->cut && !rc) {
        rc = segment_retire_locked(l, l->firsts[gone]);
        gone += !rc;
    }
    l->segments_n -= gone;
    memmove(l->firsts, l->firsts + gone, l->segments_n * sizeof *l->firsts);
    return rc;
}

/* A new segment, if the cut has all that there is: of a record that is being
 * written that is not known yet. */
static int log_heal_locked(updates_log *l, uint64_t position)
{
    int rc = turn_take_locked(l);
    if (rc)
        return rc;
    if (position == l->end && !(rc = segment_begin_locked(l))) {
        log_move_locked(l, LOG_OPEN);
        l->synced = l->end;
    }
    turn_give_locked(l);
    return rc;
}

int persia_log_release(updates_log *l, uint64_t position)
{
    pthread_mutex_lock(&l->lock);
    int rc = l->state == LOG_FAILED ? log_heal_locked(l, position) : PERSIA_OK;
    if (position > l->cut)
        l->cut = position;
    if (!rc)
        rc = segments_release_locked(l);
    pthread_mutex_unlock(&l->lock);
    return rc;
}
