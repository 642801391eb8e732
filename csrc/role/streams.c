/* streams.c: loaders and their epochs.  The lock is held in all of it.
 *
 * Workers and ranks count the same epochs, from 1.  Each loader counts its own
 * and says what the others call its first one.  It learns that from the first
 * worker that knows: one that was started again does when a rank has asked it
 * for an epoch.  Heartbeats say all that is to be known of a loader, and the
 * last one counts: one is enough for a worker that was started again.
 *
 *   who      keeps, of (loader, epoch)            tells
 *   loader   the number of the epoch's last       workers: that, and what is
 *            batch; which batches are done, and   done
 *            which worker has each other one
 *   worker   what the loader has said; which      ranks, when so many loaders
 *            batches it had itself                have ended the epoch: both
 *   rank     what each worker answered last, by   workers: the epoch it is in
 *            its boot
 *
 * An epoch is over for a rank when all workers that are there have nothing of
 * it, and each batch up to the loaders' last ones is done, or one of them has
 * given it to a rank: see passes.c.  Batches of a worker that died are not
 * there until their loader has sent them to another one.
 *
 * A loader that is silent for too long is gone: it counts as having ended all
 * epochs, and its batches are not waited for, until it is heard of again or
 * another takes its place.  What loaders share is another matter: a stream
 * that was claimed is waited for as long as a loader is there to claim it.
 */
#include <stdlib.h>
#include <string.h>

#include "role/private.h"

/* ---- epochs ---- */

uint64_t stream_epoch(const role_stream *t, uint64_t own)
{
    return t->first ? t->first + (own ? own : 1) - 1 : 0;
}

/* That of its next batch; 0: it is not known. */
static uint64_t epoch_now(const role_stream *t)
{
    return t->own ? stream_epoch(t, t->own) : 0;
}

/* Loaders that have ended it. */
static uint64_t ended(const role_service *s, uint64_t epoch)
{
    uint64_t n = 0;
    for (const role_stream *t = s->streams; t; t = t->next)
        n += epoch_now(t) > epoch;
    return n;
}

/* Whether a loader is there that claims what no other one has. */
static int one_shares(const role_service *s)
{
    const role_stream *t = s->streams;
    while (t && (!t->shared || t->gone || t->left))
        t = t->next;
    return t != NULL;
}

/* Whether it counts as having ended all epochs. */
static int is_given_up(const role_service *s, const role_stream *t)
{
    return t->gone && !(t->shared && one_shares(s));
}

/* So many loaders are known, and all that are left have ended it. */
static int all_ended(const role_service *s, uint64_t epoch)
{
    const role_stream *t = s->streams;
    while (t && (is_given_up(s, t) || t->left || epoch_now(t) > epoch))
        t = t->next;
    return !t && s->streams_ever >= s->config.loaders;
}

int epoch_is_over(const role_service *s, uint64_t epoch, int begun)
{
    uint64_t n = ended(s, epoch);
    for (const role_stream *t = s->streams; t; t = t->next)
        n += is_given_up(s, t) && epoch_now(t) <= epoch;
    /* Loaders that ended before this worker was started again. */
    if (begun && s->streams_ever < s->config.loaders && !one_shares(s) &&
        persia_clock_ns() - s->began > s->config.silence_ns)
        n += s->config.loaders - s->streams_ever;
    return n >= s->config.loaders ||
           ((begun || epoch <= s->over) && all_ended(s, epoch));
}

uint64_t epoch_first(const role_service *s)
{
    uint64_t first = s->over + 1;
    for (const role_stream *t = s->streams; t; t = t->next) {
        const uint64_t epoch = epoch_now(t);
        if (epoch > first && ended(s, epoch - 1) >= s->config.loaders)
            first = epoch;
    }
    return first;
}

void epochs_count(role_service *s, uint64_t over)
{
    s->counts = 1;
    s->over = over > s->over ? over : s->over;
    for (role_stream *t = s->streams; t; t = t->next)
        if (!t->first)
            t->first = epoch_first(s);
}

/* The last batch of an epoch that the loader has ended, or one before it that
 * is settled as well. */
static uint64_t last_of(const role_stream *t, uint64_t epoch)
{
    const uint64_t later = epoch_now(t) - 1 - epoch;
    return later < t->ends_n ? t->ends[t->ends_n - 1 - later] : 0;
}

/* The epoch of its first batch that is not done. */
static uint64_t epoch_left(const role_stream *t)
{
    uint64_t epoch = epoch_now(t) - t->ends_n;
    if (!t->done.watermark)
        return t->first;
    while (epoch < epoch_now(t) && last_of(t, epoch) <= t->done.watermark)
        epoch++;
    return epoch;
}

static int is_there(const role_stream *t)
{
    return epoch_now(t) && !t->gone && !t->left;
}

/* Whether a rank without an epoch is to take this one even if nothing of it is
 * to be had: it continues, or ranks hold its batches.  Else it may be that all
 * of it is done, and the loader does not know that yet. */
static int is_sure(const role_service *s, uint64_t epoch)
{
    for (const role_stream *t = s->streams; t; t = t->next)
        if (is_there(t) && !t->done.watermark && t->first == epoch)
            return 1;
    for (const offer *o = s->leased; o; o = o->next)
        if (!o->stream->old && offer_epoch(o) <= epoch)
            return 1;
    return !epoch_is_over(s, epoch, 0);
}

uint64_t epoch_next(const role_service *s, int *sure)
{
    uint64_t epoch = UINT64_MAX;
    for (const role_stream *t = s->streams; t; t = t->next)
        if (is_there(t) && epoch_left(t) < epoch)
            epoch = epoch_left(t);
    if (epoch <= s->over)
        epoch = s->over + 1;
    for (const offer *o = s->queue; o; o = o->next)
        epoch = offer_epoch(o) < epoch ? offer_epoch(o) : epoch;
    if (epoch == UINT64_MAX)
        epoch = 0;
    *sure = epoch && is_sure(s, epoch);
    return epoch;
}

int epoch_is_idle(const role_service *s, int none)
{
    for (const role_stream *t = s->streams; t; t = t->next) {
        if (t->waits && is_there(t))
            return 1;
        none &= t->gone || t->left;
    }
    return none;
}

static void part_of(const role_service *s, const role_stream *t,
                    uint64_t epoch, const role_known_rank *r,
                    wire_loader_part *out)
{
    *out = (wire_loader_part){.stream = t->name,
                              .settled = t->done.watermark,
                              .last = last_of(t, epoch)};
    for (uint64_t i = 0; i < WIRE_BATCHES_MAX; i++)
        if (window_has(&t->came, out->settled + 1 + i))
            out->window[i / 64] |= (uint64_t)1 << i % 64;
    for (const offer *o = s->queue; o; o = o->next) {
        const uint64_t i = o->m.number - out->settled - 1;
        if (o->stream == t && i < WIRE_BATCHES_MAX && !rank_has(r, o))
            out->window[i / 64] &= ~((uint64_t)1 << i % 64);
    }
}

size_t epoch_parts(const role_service *s, uint64_t epoch,
                   const role_known_rank *r, wire_loader_part *out)
{
    size_t n = 0;
    for (const role_stream *t = s->streams; t && n < WIRE_LOADERS_MAX;
         t = t->next)
        if (is_there(t) && epoch_now(t) > epoch)
            part_of(s, t, epoch, r, &out[n++]);
    return n;
}

/* ---- streams ---- */

void stream_free(role_stream *t)
{
    persia_worker_destroy(t->w);
    persia_client_destroy(t->c);
    pthread_mutex_destroy(&t->opening);
    free(t->tables);
    free(t);
}

static void stream_job(void *stream)
{
    stream_free(stream);
}

void stream_drop(role_service *s, role_stream *t)
{
    if (persia_sched_submit(s->jobs, stream_job, t))
        stream_free(t);
}

static void windows_init(role_stream *t)
{
    memset(t->rings, 0, sizeof t->rings);
    window_init(&t->came, t->rings[0], ROLE_WINDOW / 64);
    window_init(&t->done, t->rings[1], ROLE_WINDOW / 64);
    t->settled = 0;
}

/* Ends the stream without batches that was used longest ago. */
static int stream_expire(role_service *s)
{
    role_stream **oldest = NULL;
    for (role_stream **at = &s->streams; *at; at = &(*at)->next)
        if (!(*at)->offers && (!oldest || (*at)->used < (*oldest)->used))
            oldest = at;
    if (!oldest)
        return persia_err_set(PERSIA_ELIMIT,
                              "%d data loaders have batches here, at most so "
                              "many are taken",
                              ROLE_STREAMS);
    role_stream *gone = *oldest;
    *oldest = gone->next;
    s->stats.streams--;
    stream_drop(s, gone);
    return PERSIA_OK;
}

/* A new loader takes the place of one that is gone. */
static void replace_gone(role_service *s)
{
    role_stream *oldest = NULL;
    for (role_stream *t = s->streams; t; t = t->next)
        if (t->gone && !t->shared && (!oldest || t->used < oldest->used))
            oldest = t;
    if (oldest) {
        oldest->gone = 0;
        oldest->left = 1;
    }
}

role_stream *stream_named(const role_service *s, uint64_t name)
{
    role_stream *t = s->streams;
    while (t && t->name != name)
        t = t->next;
    return t;
}

int stream_find(role_service *s, uint64_t name, role_stream **out)
{
    role_stream *t = *out = stream_named(s, name);
    if (t)
        return PERSIA_OK;
    int rc = s->stats.streams >= ROLE_STREAMS ? stream_expire(s) : PERSIA_OK;
    if (rc)
        return rc;
    if (!(t = calloc(1, sizeof *t)))
        return persia_err_set(PERSIA_ENOMEM, "no memory for a data loader");
    replace_gone(s);
    t->name = name;
    t->used = persia_clock_ns();
    windows_init(t);
    pthread_mutex_init(&t->opening, NULL);
    role_stream **end = &s->streams;
    while (*end)
        end = &(*end)->next;
    *end = t;
    if (s->counts)
        t->first = epoch_first(s);
    s->streams_ever++;
    s->stats.streams++;
    *out = t;
    return PERSIA_OK;
}

void stream_hear(role_stream *t, uint64_t settled)
{
    t->used = persia_clock_ns();
    t->gone = 0;
    t->left = 0;
    if (settled > t->settled) {
        t->settled = settled;
        window_settle(&t->came, t->settled);
        window_settle(&t->done, t->settled);
        window_advance(&t->done);
    }
}

/* Whether others may have what was last heard of then. */
static int is_late(const role_service *s, uint64_t heard)
{
    return persia_clock_ns() - heard > s->config.silence_ns / 3;
}

static void came_again(role_stream *t, offer *o)
{
    for (; o; o = o->next)
        if (o->stream == t)
            (void)window_add(&t->came, o->m.number);
}

/* It knows from the servers what is done.  What the one before held for done
 * may be lost since. */
static void take_over(role_service *s, role_stream *t, uint64_t client,
                      uint64_t settled)
{
    t->former = t->client;
    t->client = client;
    windows_init(t);
    stream_hear(t, settled);
    came_again(t, s->queue);
    came_again(t, s->leased);
}

int stream_is_of(role_service *s, role_stream *t, uint64_t client,
                 uint64_t settled)
{
    if (!t->client)
        t->client = client;
    if (t->client != client &&
        (client != t->former || is_late(s, t->beaten)))
        take_over(s, t, client, settled);
    return t->client == client;
}

static void learn_done(role_stream *t, const wire_heartbeat *m)
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

void stream_learn(role_service *s, role_stream *t, const wire_heartbeat *m)
{
    const uint64_t own = m->epoch ? m->epoch : 1;
    const uint64_t known = t->client == m->caller.client ? t->own : 0;
    if (!stream_is_of(s, t, m->caller.client, m->settled))
        return;
    t->beaten = persia_clock_ns();
    learn_done(t, m);
    if (m->first)
        t->first = m->first;
    if (own < known)
        return; /* a later one arrived before it */
    t->own = own;
    t->ends_n = m->ends_n;
    if (m->ends_n)
        memcpy(t->ends, m->ends, m->ends_n * sizeof *t->ends);
    t->waits = (int)m->waits;
    t->left = (int)m->leaves;
    t->shared |= (int)m->shared;
}

/* What another loader that asks for it gets. */
static uint32_t claim_status(const role_service *s, const role_stream *t,
                             const wire_heartbeat *m)
{
    const uint64_t end = t->ends_n ? t->ends[t->ends_n - 1] : t->settled;
    if (t->own > m->claims && end <= t->done.watermark && end <= m->settled)
        return SUBMIT_ENDED;
    return !t->left && !is_late(s, t->used) ? SUBMIT_HELD : SUBMIT_QUEUED;
}

int stream_claim(role_service *s, const wire_heartbeat *m, uint32_t *status)
{
    role_stream *t = stream_named(s, m->stream);
    /* After a begin others have had no time yet to say what they have. */
    const int early = s->began != s->born && !is_late(s, s->began);
    *status = t && t->client != m->caller.client ? claim_status(s, t, m)
              : !t && early                      ? SUBMIT_HELD
                                                 : SUBMIT_QUEUED;
    int rc = *status == SUBMIT_QUEUED ? stream_find(s, m->stream, &t)
                                      : PERSIA_OK;
    if (!rc && *status == SUBMIT_QUEUED) {
        if (t->client && t->client != m->caller.client)
            take_over(s, t, m->caller.client, 0);
        t->client = m->caller.client;
        t->beaten = persia_clock_ns();
        learn_done(t, m);
        t->shared = 1;
    }
    return rc;
}

void streams_tick(role_service *s, uint64_t now)
{
    for (role_stream *t = s->streams; t; t = t->next)
        t->gone |= !t->left && now > t->used &&
                   now - t->used > s->config.silence_ns;
}
