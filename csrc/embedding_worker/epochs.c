/* epochs.c: epochs of the loaders of a job.  The lock is held in all of it.
 *
 * Workers and ranks of a job count the same epochs, from 1.  Each loader
 * counts its own and says what the others call its first one.  It learns that
 * from the first worker that knows: one that was started again does when a
 * rank has asked it for an epoch.  Heartbeats say all that is to be known of a
 * loader, and the last one counts: one is enough for a worker that was started
 * again.
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
 *
 * Loaders that begin when all before them have left begin behind their epochs:
 * ranks learn with which epoch, and count from there.
 */
#include "embedding_worker/private.h"

/* The first one of a job in a list of streams. */
static worker_stream *of_job(worker_stream *t, const worker_job *j)
{
    while (t && t->job != j)
        t = t->next;
    return t;
}

uint64_t stream_epoch(const worker_stream *t, uint64_t own)
{
    return t->first ? t->first + (own ? own : 1) - 1 : 0;
}

uint64_t stream_epoch_now(const worker_stream *t)
{
    return t->own ? stream_epoch(t, t->own) : 0;
}

/* Loaders that have ended it. */
static uint64_t epochs_ended(const embedding_worker *s, const worker_job *j,
                             uint64_t epoch)
{
    uint64_t n = 0;
    for (const worker_stream *t = of_job(s->streams, j); t;
         t = of_job(t->next, j))
        n += stream_epoch_now(t) > epoch;
    return n;
}

/* Whether a loader is there that claims what no other one has. */
static int epochs_one_shares(const embedding_worker *s, const worker_job *j)
{
    const worker_stream *t = of_job(s->streams, j);
    while (t && (!t->shared || t->state != STREAM_THERE))
        t = of_job(t->next, j);
    return t != NULL;
}

/* Whether it counts as having ended all epochs. */
static int epochs_is_given_up(const embedding_worker *s,
                              const worker_stream *t)
{
    return t->state == STREAM_GONE &&
           !(t->shared && epochs_one_shares(s, t->job));
}

uint64_t epoch_silent(const embedding_worker *s, const worker_job *j,
                      uint64_t epoch)
{
    uint64_t n = 0;
    for (const worker_stream *t = of_job(s->streams, j); t;
         t = of_job(t->next, j))
        n += epochs_is_given_up(s, t) && stream_epoch_now(t) <= epoch;
    return n;
}

/* So many loaders are known, and all that are left have ended it. */
static int epochs_all_ended(const embedding_worker *s, const worker_job *j,
                            uint64_t epoch)
{
    const worker_stream *t = of_job(s->streams, j);
    while (t && (epochs_is_given_up(s, t) || t->state == STREAM_LEFT ||
                 stream_epoch_now(t) > epoch))
        t = of_job(t->next, j);
    return !t && j->streams_ever >= s->config.loaders;
}

int epoch_is_over(const embedding_worker *s, const worker_job *j,
                  uint64_t epoch, int begun)
{
    uint64_t n = epochs_ended(s, j, epoch) + epoch_silent(s, j, epoch);
    /* Loaders that ended before this worker was started again, or before the
     * ranks were. */
    if ((begun || n) && j->streams_ever < s->config.loaders &&
        !epochs_one_shares(s, j) &&
        persia_clock_ns() - j->began > s->config.silence_ns)
        n += s->config.loaders - j->streams_ever;
    return n >= s->config.loaders ||
           ((begun || epoch <= j->over) && epochs_all_ended(s, j, epoch));
}

uint64_t epoch_first(const embedding_worker *s, const worker_job *j)
{
    uint64_t first = j->over + 1;
    for (const worker_stream *t = of_job(s->streams, j); t;
         t = of_job(t->next, j)) {
        const uint64_t epoch = stream_epoch_now(t);
        if (epoch > first &&
            epochs_ended(s, j, epoch - 1) >= s->config.loaders)
            first = epoch;
    }
    return first;
}

void epochs_count(embedding_worker *s, worker_job *j, uint64_t over)
{
    j->counts = 1;
    j->over = over > j->over ? over : j->over;
    for (worker_stream *t = of_job(s->streams, j); t; t = of_job(t->next, j))
        if (!t->first)
            t->first = epoch_first(s, j);
}

uint64_t epoch_of_loaders(const embedding_worker *s, const worker_job *j)
{
    uint64_t first = 0;
    for (const worker_stream *t = of_job(s->streams, j); t;
         t = of_job(t->next, j))
        if (stream_is_there(t) && (!first || t->first < first))
            first = t->first;
    return first;
}

/* The last batch of an epoch that the loader has ended, or one before it that
 * is settled as well. */
static uint64_t epochs_last_of(const worker_stream *t, uint64_t epoch)
{
    const uint64_t later = stream_epoch_now(t) - 1 - epoch;
    return later < t->ends_n ? t->ends[t->ends_n - 1 - later] : 0;
}

/* The epoch of its first batch that is not done. */
static uint64_t epoch_left(const worker_stream *t)
{
    uint64_t epoch = stream_epoch_now(t) - t->ends_n;
    if (!t->done.watermark)
        return t->first;
    while (epoch < stream_epoch_now(t) &&
           epochs_last_of(t, epoch) <= t->done.watermark)
        epoch++;
    return epoch;
}

int stream_is_there(const worker_stream *t)
{
    return stream_epoch_now(t) && t->state == STREAM_THERE;
}

/* Whether a rank without an epoch is to take this one even if nothing of it is
 * to be had: it continues, or ranks hold its batches.  Else it may be that all
 * of it is done, and the loader does not know that yet. */
static int epochs_is_sure(const embedding_worker *s, const worker_job *j,
                          uint64_t epoch)
{
    for (const worker_stream *t = of_job(s->streams, j); t;
         t = of_job(t->next, j))
        if (stream_is_there(t) && !t->done.watermark && t->first == epoch)
            return 1;
    for (const offer *o = s->leased; o; o = o->next)
        if (o->stream->state != STREAM_OLD && o->stream->job == j &&
            offer_epoch(o) <= epoch)
            return 1;
    return !epoch_is_over(s, j, epoch, 0);
}

uint64_t epoch_next(const embedding_worker *s, const worker_job *j, int *sure)
{
    uint64_t epoch = UINT64_MAX;
    for (const worker_stream *t = of_job(s->streams, j); t;
         t = of_job(t->next, j))
        if (stream_is_there(t) && epoch_left(t) < epoch)
            epoch = epoch_left(t);
    for (const worker_rank *r = s->ranks; r; r = r->next)
        if (r->job == j && epoch < r->epoch)
            epoch = r->epoch; /* of those that are there */
    for (const offer *o = s->queue; o; o = o->next)
        if (o->stream->job == j && offer_epoch(o) < epoch)
            epoch = offer_epoch(o);
    for (const offer *o = s->leased; o; o = o->next) /* others are in it */
        if (o->stream->state != STREAM_OLD && o->stream->job == j &&
            offer_epoch(o) < epoch)
            epoch = offer_epoch(o);
    if (epoch == UINT64_MAX)
        epoch = 0;
    *sure = epoch && epochs_is_sure(s, j, epoch);
    return epoch;
}

int epoch_is_idle(const embedding_worker *s, const worker_job *j, int none)
{
    for (const worker_stream *t = of_job(s->streams, j); t;
         t = of_job(t->next, j)) {
        if (t->waits && stream_is_there(t))
            return 1;
        none &= t->state != STREAM_THERE;
    }
    return none;
}

/* Whether the rank whose Take got it is there, and has it: its process may
 * have died, or not have had the answer. */
static int epochs_has_taker(const embedding_worker *s, const worker_rank *asks,
                            const offer *o)
{
    return o->client == asks->client ? rank_has(asks, o)
                                     : rank_find(s, o->client) != NULL;
}

/* Whether it is a batch of the steps of all ranks, of another one's. */
static int epochs_is_of_other(const worker_rank *asks, const offer *o)
{
    return o->m.place && (o->m.place - 1) % asks->world != asks->rank;
}

static void part_of(const embedding_worker *s, const worker_stream *t,
                    uint64_t epoch, const wire_take *m,
                    wire_loader_part *out)
{
    const worker_rank *r = rank_find(s, m->caller.client);
    *out = (wire_loader_part){.stream = t->name,
                              .settled = t->done.watermark,
                              .last = epochs_last_of(t, epoch)};
    for (uint64_t i = 0; i < WIRE_BATCHES_MAX; i++)
        if (window_has(&t->came, out->settled + 1 + i))
            out->window[i / 64] |= (uint64_t)1 << i % 64;
    const offer *lists[] = {s->queue, s->leased};
    for (size_t k = 0; k < 2; k++)
        for (const offer *o = lists[k]; o; o = o->next) {
            const uint64_t i = o->m.number - out->settled - 1;
            const int had =
                (k ? epochs_has_taker(s, r, o) : job_has(s, r, o)) ||
                (m->place && epochs_is_of_other(r, o));
            if (o->stream == t && i < WIRE_BATCHES_MAX && !had)
                out->window[i / 64] &= ~((uint64_t)1 << i % 64);
        }
}

size_t epoch_parts(const embedding_worker *s, const worker_job *j,
                   uint64_t epoch, const wire_take *m, wire_loader_part *out)
{
    size_t n = 0;
    for (const worker_stream *t = of_job(s->streams, j);
         t && n < WIRE_LOADERS_MAX; t = of_job(t->next, j))
        if (stream_is_there(t) && stream_epoch_now(t) > epoch)
            part_of(s, t, epoch, m, &out[n++]);
    return n;
}

