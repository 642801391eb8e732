#include "shard/sync.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire/wire.h"

enum { NEVER = SYNC_STATES };

static const unsigned char next[SYNC_STATES][SYNC_EVENTS] = {
    [SYNC_IDLE] = {SYNC_COLLECTING, NEVER, NEVER, SYNC_IDLE},
    [SYNC_COLLECTING] = {NEVER, SYNC_APPLYING, SYNC_IDLE, NEVER},
    [SYNC_APPLYING] = {SYNC_AHEAD, NEVER, NEVER, SYNC_IDLE},
    [SYNC_AHEAD] = {NEVER, NEVER, SYNC_APPLYING, SYNC_COLLECTING},
};

/* The only place that changes the state of the steps. */
static void sync_event(sync_steps *s, enum sync_event event)
{
    const enum sync_state to = next[s->state][event];
    assert((int)to != NEVER);
    s->state = to;
}

void sync_init(sync_steps *s)
{
    memset(s, 0, sizeof *s);
}

void sync_free(sync_steps *s)
{
    free(s->part);
    s->part = NULL;
}

/* Whether the rank was passed in a step that waits for others. */
static int sync_is_early(const sync_steps *s, uint64_t step, uint32_t rank,
                         uint32_t parts)
{
    const uint64_t passed = s->passed[rank];
    if (passed <= s->step || passed >= step)
        return 0;
    for (uint32_t i = 0; i < parts; i++)
        if (s->passed[i] < passed && !s->left[i])
            return 1;
    return 0;
}

/* A step that is over, a rank that is none. */
static int sync_refuse(const sync_steps *s, uint64_t step, uint32_t rank,
                       uint32_t parts)
{
    const unsigned long long number = step;
    uint64_t last = s->applying > s->step ? s->applying : s->step;
    if (parts < 1 || parts > SYNC_RANKS || rank >= parts)
        return persia_err_set(PERSIA_EARG,
                              "part %u of %u of step %llu: there are 1 "
                              "to %d parts, numbered from 0",
                              rank, parts, number, SYNC_RANKS);
    if (s->left[rank])
        return persia_err_set(PERSIA_EARG,
                              "rank %u has left the steps of this job: "
                              "it must join again before it sends step %llu",
                              rank, number);
    if (step <= last)
        return persia_err_set(
            PERSIA_EARG,
            "rank %u sends step %llu, but step %llu "
            "was applied already: it must join again to learn "
            "where the job is",
            rank, number, (unsigned long long)last);
    if (wire_leaps(last, step))
        return persia_err_set(PERSIA_EARG,
                              "rank %u sends step %llu, and step %llu was "
                              "applied last: no server misses so many",
                              rank, number, (unsigned long long)last);
    return PERSIA_OK;
}

/* Another step is not over. */
static int sync_refuse_yet(const sync_steps *s, uint64_t step, uint32_t rank,
                           uint32_t parts)
{
    if (s->pending != step && sync_is_early(s, step, rank, parts))
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "step %llu waits for other ranks yet",
                              (unsigned long long)s->passed[rank]);
    if (s->pending && s->pending != step)
        return persia_err_set(PERSIA_EARG,
                              "rank %u sends step %llu, while the "
                              "other ranks send step %llu",
                              rank, (unsigned long long)step,
                              (unsigned long long)s->pending);
    if (s->pending && s->parts != parts)
        return persia_err_set(PERSIA_EARG,
                              "rank %u sends a part of %u, the other "
                              "ranks of %u",
                              rank, parts, s->parts);
    return PERSIA_OK;
}

/* A part of this step may be added. */
static int sync_collect(sync_steps *s, uint64_t step, uint32_t rank,
                        uint32_t parts)
{
    int rc = sync_refuse_yet(s, step, rank, parts);
    if (rc || s->pending)
        return rc;
    s->part = calloc(parts, sizeof *s->part);
    if (!s->part)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for the %u parts of a step", parts);
    sync_event(s, SYNC_COLLECT);
    s->pending = step;
    s->parts = parts;
    return PERSIA_OK;
}

int sync_add(sync_steps *s, uint64_t step, uint32_t rank, uint32_t parts,
             void *part, void **replaced)
{
    *replaced = NULL;
    int rc = sync_refuse(s, step, rank, parts);
    if (!rc)
        rc = sync_collect(s, step, rank, parts);
    if (rc)
        return rc;
    *replaced = s->part[rank];
    s->part[rank] = part;
    s->passed[rank] = 0;
    s->n += *replaced == NULL;
    return PERSIA_OK;
}

void sync_pass(sync_steps *s, uint64_t step, uint32_t rank, uint32_t parts)
{
    if (sync_refuse(s, step, rank, parts))
        return;
    (void)sync_collect(s, step, rank, parts);
    if (step > s->passed[rank])
        s->passed[rank] = step;
}

/* Whether the pending step waits for this rank. */
static int sync_lacks(const sync_steps *s, uint32_t rank)
{
    return !s->part[rank] && !s->left[rank] && s->passed[rank] < s->pending;
}

/* Ranks that are ahead of others were passed. */
static void **sync_infer_passed(sync_steps *s, uint64_t step, uint32_t rank,
                                uint32_t *n)
{
    if (step > s->pending) {
        s->passed[rank] = step - 1;
        return NULL;
    }
    for (uint32_t i = 0; i < s->parts; i++)
        if (s->part[i])
            s->passed[i] = s->pending - 1;
    return sync_take(s, 0, n);
}

void **sync_infer(sync_steps *s, uint64_t step, uint32_t rank, uint32_t parts,
                  uint32_t *n)
{
    const uint64_t missed = step < s->pending ? step : s->pending;
    *n = 0;
    if (s->has_applied || !s->pending || step == s->pending ||
        parts != s->parts || rank >= parts || s->part[rank] ||
        s->passed[rank] >= s->pending || s->left[rank] ||
        wire_leaps(missed, step) || wire_leaps(missed, s->pending))
        return NULL;
    if (s->has_log)
        return sync_infer_passed(s, step, rank, n);
    if (missed > s->missed)
        s->missed = missed;
    if (missed > s->step)
        s->step = missed;
    return step > missed ? sync_take(s, 0, n) : NULL;
}

int sync_complete(const sync_steps *s)
{
    if (s->state != SYNC_COLLECTING)
        return 0;
    for (uint32_t i = 0; i < s->parts; i++)
        if (sync_lacks(s, i))
            return 0;
    return 1;
}

void **sync_take(sync_steps *s, int apply, uint32_t *n)
{
    void **all = s->part;
    *n = 0;
    for (uint32_t i = 0; i < s->parts; i++)
        if (all[i])
            all[(*n)++] = all[i];
    assert(*n == s->n);
    if (s->pending || apply)
        sync_event(s, apply ? SYNC_TAKE : SYNC_DROP);
    if (apply)
        s->applying = s->pending;
    s->part = NULL;
    s->parts = s->n = 0;
    s->pending = 0;
    return all;
}

void sync_applied(sync_steps *s, uint64_t step)
{
    sync_failed(s);
    s->has_applied = 1;
    if (step > s->step)
        s->step = step;
}

void sync_begin(sync_steps *s)
{
    s->has_log = 1;
    s->has_applied = 0;
}

void sync_failed(sync_steps *s)
{
    sync_event(s, SYNC_END);
    s->applying = 0;
}

void sync_set_step(sync_steps *s, uint64_t step)
{
    s->step = step;
    s->missed = 0;
    memset(s->passed, 0, sizeof s->passed);
}

void **sync_take_one(sync_steps *s, uint32_t rank, uint32_t *n)
{
    *n = 0;
    if (rank >= s->parts || !s->part[rank])
        return NULL;
    if (s->n == 1)
        return sync_take(s, 0, n);
    void **one = malloc(sizeof *one);
    if (!one) /* rather all of them than one that is void */
        return sync_take(s, 0, n);
    *one = s->part[rank];
    s->part[rank] = NULL;
    s->n--;
    *n = 1;
    return one;
}

static void set_left(sync_steps *s, uint32_t rank, int left)
{
    s->left_n += (uint32_t)left - s->left[rank];
    s->left[rank] = (uint8_t)left;
}

void **sync_move(sync_steps *s, uint32_t rank, uint32_t world, int joins,
                 uint64_t step, uint32_t *n)
{
    set_left(s, rank, !joins);
    s->told[rank] = 1;
    s->passed[rank] = 0; /* another process, whose batches are others */
    if (joins && step > s->step && s->has_log)
        s->passed[rank] = step;
    else if (joins && step > s->step)
        s->step = s->missed = step;
    if (joins && s->pending &&
        (s->pending <= s->step || s->parts != world))
        return sync_take(s, 0, n);
    return sync_take_one(s, rank, n);
}

enum sync_heed sync_heed(sync_steps *s, uint32_t rank, const sync_mover *by)
{
    const int same = by->move && s->client[rank] == by->client;
    /* A copy, or of an earlier life: parts arrived after it. */
    const int again =
        same && by->joins &&
        (!s->told[rank] || (by->move == s->move[rank] && !s->left[rank]));
    if (same && by->move < s->move[rank])
        return SYNC_LATE;
    if (!by->joins && s->told[rank] && s->stream[rank] != by->stream)
        return SYNC_LATE;
    s->stream[rank] = by->stream;
    s->client[rank] = by->client;
    s->move[rank] = by->move;
    if (!again)
        return SYNC_MOVES;
    s->told[rank] = 1;
    set_left(s, rank, 0);
    return SYNC_AGAIN;
}

void sync_note_client(sync_steps *s, uint32_t rank, uint64_t client)
{
    if (rank < SYNC_RANKS && !s->told[rank])
        s->client[rank] = client;
}

int sync_is_other(const sync_steps *s, uint32_t rank, uint64_t stream)
{
    return rank < SYNC_RANKS && s->told[rank] && s->stream[rank] &&
           s->stream[rank] != stream;
}

void sync_hear(sync_steps *s, uint32_t rank)
{
    int is_here = rank < s->parts && s->part[rank];
    if (!s->told[rank] && !is_here)
        set_left(s, rank, 1);
}

uint32_t sync_list_left(const sync_steps *s, uint32_t world, uint64_t *out,
                        uint32_t room)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < world && i < SYNC_RANKS && n < room; i++)
        if (s->left[i])
            out[n++] = i;
    return n;
}

void sync_missing(const sync_steps *s, char *out, size_t room)
{
    enum { NAMED = 8 };
    uint32_t missing = 0, named = 0;
    size_t at;
    for (uint32_t i = 0; i < s->parts; i++)
        missing += (uint32_t)sync_lacks(s, i);
    at = (size_t)snprintf(out, room, missing == 1 ? "rank" : "ranks");
    for (uint32_t i = 0; i < s->parts && named < NAMED && at < room; i++)
        if (sync_lacks(s, i))
            at += (size_t)snprintf(out + at, room - at, "%s %u",
                                   named++ ? "," : "", i);
    if (missing > named && at < room)
        snprintf(out + at, room - at, " and %u more", missing - named);
}
