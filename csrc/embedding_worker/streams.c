/* streams.c: loaders.  The lock is held in all of it. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"

enum { NEVER = STREAM_STATES };

static const unsigned char next[STREAM_STATES][STREAM_EVENTS] = {
    [STREAM_THERE] = {STREAM_THERE, STREAM_GONE, STREAM_LEFT, NEVER,
                      STREAM_OLD},
    [STREAM_GONE] = {STREAM_THERE, NEVER, NEVER, STREAM_LEFT, STREAM_OLD},
    [STREAM_LEFT] = {STREAM_THERE, NEVER, NEVER, NEVER, STREAM_OLD},
    [STREAM_OLD] = {NEVER, NEVER, NEVER, NEVER, NEVER},
};

void stream_event(worker_stream *t, enum stream_event event)
{
    const enum stream_state to = next[t->state][event];
    assert((int)to != NEVER);
    t->state = to;
}

/* ---- streams ---- */

void stream_free(worker_stream *t)
{
    assert(!t->offers && !t->settling);
    persia_batcher_destroy(t->w);
    persia_client_destroy(t->c);
    pthread_mutex_destroy(&t->opening);
    free(t->tables);
    free(t->failed);
    free(t);
}

static void stream_job(void *stream)
{
    stream_free(stream);
}

void stream_drop(embedding_worker *s, worker_stream *t)
{
    if (persia_sched_submit(s->jobs, stream_job, t))
        stream_free(t);
}

static void streams_windows_init(embedding_worker *s, worker_stream *t)
{
    memset(t->rings, 0, sizeof t->rings);
    window_init(&t->came, t->rings[0], WORKER_WINDOW / 64);
    window_init(&t->done, t->rings[1], WORKER_WINDOW / 64);
    t->settled = 0;
    t->memory = ++s->memories;
}

/* Ends the stream without batches that was used longest ago. */
static int stream_expire(embedding_worker *s)
{
    worker_stream **oldest = NULL;
    for (worker_stream **at = &s->streams; *at; at = &(*at)->next)
        if (!(*at)->offers && (!oldest || (*at)->used < (*oldest)->used))
            oldest = at;
    if (!oldest)
        return persia_err_set(PERSIA_ELIMIT,
                              "%d data loaders have batches here, at most so "
                              "many are taken",
                              WORKER_STREAMS);
    worker_stream *gone = *oldest;
    *oldest = gone->next;
    s->stats.streams--;
    stream_drop(s, gone);
    return PERSIA_OK;
}

/* A new loader takes the place of one that is gone. */
static void streams_replace_gone(embedding_worker *s, const worker_job *j)
{
    worker_stream *oldest = NULL;
    for (worker_stream *t = s->streams; t; t = t->next)
        if (t->job == j && t->state == STREAM_GONE && !t->shared &&
            (!oldest || t->used < oldest->used))
            oldest = t;
    if (oldest)
        stream_event(oldest, STREAM_REPLACE);
}

worker_stream *stream_named(const embedding_worker *s, uint64_t name)
{
    worker_stream *t = s->streams;
    while (t && t->name != name)
        t = t->next;
    return t;
}

/* A loader is of another job now. */
static void stream_move(embedding_worker *s, worker_stream *t, worker_job *j)
{
    t->job = NULL; /* those of the job are the others */
    job_join(s, j, t);
    t->first = j->counts ? epoch_first(s, j) : 0;
}

static int find_job(embedding_worker *s, uint64_t id, worker_job **out)
{
    *out = job_find(s, id);
    return *out ? PERSIA_OK : PERSIA_ENOMEM;
}

int stream_find(embedding_worker *s, uint64_t name, uint64_t job,
                worker_stream **out)
{
    worker_job *j;
    worker_stream *t = *out = stream_named(s, name);
    int rc = find_job(s, job, &j);
    if (t && !rc && t->job != j && !t->offers)
        stream_move(s, t, j);
    if (t || rc)
        return rc;
    rc = s->stats.streams >= WORKER_STREAMS ? stream_expire(s) : PERSIA_OK;
    if (rc)
        return rc;
    if (!(t = calloc(1, sizeof *t)))
        return persia_err_set(PERSIA_ENOMEM, "no memory for a data loader");
    streams_replace_gone(s, j);
    job_join(s, j, t);
    t->name = name;
    t->used = persia_clock_ns();
    streams_windows_init(s, t);
    pthread_mutex_init(&t->opening, NULL);
    worker_stream **end = &s->streams;
    while (*end)
        end = &(*end)->next;
    *end = t;
    if (j->counts)
        t->first = epoch_first(s, j);
    s->stats.streams++;
    *out = t;
    return PERSIA_OK;
}

void stream_end(embedding_worker *s, worker_stream *t)
{
    worker_stream **at = &s->streams;
    while (*at && *at != t)
        at = &(*at)->next;
    assert(*at == t);
    (void)PERSIA_HOLDS(s->stats.streams);
    *at = t->next;
    s->stats.streams--;
    /* Jobs may have some of its batches, and end them. */
    stream_event(t, STREAM_END);
    t->next = s->old;
    s->old = t;
    offer *lists[] = {s->queue, s->leased};
    for (size_t i = 0; i < 2; i++)
        for (offer *o = lists[i], *next; o; o = next) {
            next = o->next;
            if (o->stream == t && o->state != OFFER_LOOKING &&
                o->state != OFFER_RETURNING)
                offer_end(s, o);
        }
}

void stream_hear(worker_stream *t, uint64_t settled)
{
    t->used = persia_clock_ns();
    stream_event(t, STREAM_HEAR);
    if (settled > t->settled) {
        t->settled = settled;
        window_settle(&t->came, t->settled);
        window_settle(&t->done, t->settled);
        window_advance(&t->done);
    }
}

/* Whether others may have what was last heard of then. */
static int streams_is_late(const embedding_worker *s, uint64_t heard)
{
    return persia_clock_ns() - heard > s->config.silence_ns / 3;
}

static void streams_came_again(worker_stream *t, offer *o)
{
    for (; o; o = o->next)
        if (o->stream == t)
            (void)window_add(&t->came, o->m.number);
}

/* It knows from the servers what is done.  What the one before held for done
 * may be lost since, and its epochs are not those of this one. */
static void streams_take_over(embedding_worker *s, worker_stream *t,
                              uint64_t client, uint64_t settled)
{
    t->former = t->client;
    t->client = client;
    t->own = t->ends_n = 0;
    t->waits = 0;
    streams_windows_init(s, t);
    stream_hear(t, settled);
    streams_came_again(t, s->queue);
    streams_came_again(t, s->leased);
}

int stream_is_of(embedding_worker *s, worker_stream *t, uint64_t client,
                 uint64_t settled)
{
    if (!t->client)
        t->client = client;
    if (t->client != client &&
        (client != t->former || streams_is_late(s, t->beaten)))
        streams_take_over(s, t, client, settled);
    return t->client == client;
}

static void streams_learn_done(worker_stream *t, const wire_heartbeat *m)
{
    stream_hear(t, m->settled);
    for (uint64_t i = 0; i < WIRE_BATCHES_MAX; i++) {
        if (!(m->window[i / 64] >> i % 64 & 1))
            continue;
        (void)window_add(&t->came, m->settled + 1 + i);
        (void)window_add(&t->done, m->settled + 1 + i);
    }
    window_advance(&t->done);
}

void stream_learn(embedding_worker *s, worker_stream *t,
                  const wire_heartbeat *m)
{
    const uint64_t own = m->epoch ? m->epoch : 1;
    if (!stream_is_of(s, t, m->caller.client, m->settled))
        return;
    t->beaten = persia_clock_ns();
    streams_learn_done(t, m);
    if (m->first)
        t->first = m->first;
    if (own < t->own)
        return; /* a later one arrived before it */
    t->own = own;
    t->ends_n = m->ends_n;
    if (m->ends_n)
        memcpy(t->ends, m->ends, m->ends_n * sizeof *t->ends);
    t->waits = (int)m->waits;
    if (m->leaves)
        stream_event(t, STREAM_LEAVE);
    t->shared |= (int)m->shared;
}

/* What another loader that asks for it gets.  Where a checkpoint was loaded,
 * servers may lack batches that were done: the loader that had them does not
 * send them again, but one that takes its place does. */
static uint32_t streams_claim_status(const embedding_worker *s,
                                     const worker_stream *t,
                                     const wire_heartbeat *m)
{
    const uint64_t end = t->ends_n ? t->ends[t->ends_n - 1] : t->settled;
    const int there = t->state != STREAM_LEFT && !streams_is_late(s, t->used);
    if (t->own > m->claims && end <= t->done.watermark &&
        (there || end <= m->settled))
        return SUBMIT_ENDED;
    return there ? SUBMIT_HELD : SUBMIT_QUEUED;
}

int stream_claim(embedding_worker *s, const wire_heartbeat *m,
                 uint32_t *status)
{
    worker_stream *t = stream_named(s, m->stream);
    /* After a begin others have had no time yet to say what they have. */
    const int early = s->began != s->born && !streams_is_late(s, s->began);
    *status = t && t->client != m->caller.client
                  ? streams_claim_status(s, t, m)
              : !t && early ? SUBMIT_HELD
                            : SUBMIT_QUEUED;
    int rc = *status == SUBMIT_QUEUED
                 ? stream_find(s, m->stream, m->job, &t)
                 : PERSIA_OK;
    if (!rc && *status == SUBMIT_QUEUED) {
        if (t->client && t->client != m->caller.client)
            streams_take_over(s, t, m->caller.client, 0);
        t->client = m->caller.client;
        t->beaten = persia_clock_ns();
        streams_learn_done(t, m);
        t->shared = 1;
    }
    return rc;
}

void streams_tick(embedding_worker *s, uint64_t now)
{
    for (worker_stream *t = s->streams; t; t = t->next)
        if (t->state == STREAM_THERE && now > t->used &&
            now - t->used > s->config.silence_ns)
            stream_event(t, STREAM_SILENT);
}
