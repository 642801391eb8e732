/* streams.c: loaders and their epochs.  The lock is held in all of it.
 *
 * An epoch is over when so many loaders have ended it as the configuration
 * says.  A loader that is silent for too long is gone: it counts as having
 * ended all epochs, until it is heard of again or another takes its place.
 *
 * Each side counts epochs from 1.  A loader that is heard of for the first
 * time is in the first epoch here that is not over.
 */
#include <stdlib.h>

#include "role/private.h"

/* ---- epochs ---- */

int epoch_is_over(const role_service *s, uint64_t epoch, int begun)
{
    uint64_t n = epoch <= s->epochs ? s->ended[epoch - 1] : 0;
    if (epoch <= s->over)
        return 1;
    for (const role_stream *t = s->streams; t; t = t->next)
        n += t->gone && t->epoch <= epoch;
    /* Loaders that ended before this worker was started again. */
    if (begun && s->streams_ever < s->config.loaders &&
        persia_clock_ns() - s->born > s->config.silence_ns)
        n += s->config.loaders - s->streams_ever;
    return n >= s->config.loaders;
}

uint64_t epoch_first(const role_service *s)
{
    uint64_t epoch = s->over + 1;
    while (epoch <= s->epochs && s->ended[epoch - 1] >= s->config.loaders)
        epoch++;
    return epoch;
}

uint64_t stream_epoch(const role_stream *t, uint64_t epoch)
{
    const int64_t own = (int64_t)(epoch ? epoch : 1) - t->ahead;
    return own > 0 ? (uint64_t)own : 1;
}

int stream_advance(role_service *s, role_stream *t, uint64_t epoch)
{
    const uint64_t to = stream_epoch(t, epoch);
    if (to <= t->epoch)
        return PERSIA_OK;
    if (to > ROLE_EPOCHS)
        return persia_err_set(PERSIA_EARG,
                              "epoch %llu: a loader may have %d",
                              (unsigned long long)epoch, ROLE_EPOCHS);
    if (to > s->epochs + 1) {
        uint64_t *more = realloc(s->ended, (to - 1) * sizeof *more);
        if (!more)
            return persia_err_set(PERSIA_ENOMEM, "no memory for an epoch");
        for (uint64_t e = s->epochs; e < to - 1; e++)
            more[e] = 0;
        s->ended = more;
        s->epochs = to - 1;
    }
    for (; t->epoch < to; t->epoch++)
        s->ended[t->epoch - 1]++;
    return PERSIA_OK;
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
    if (persia_sched_submit(s->jobs, stream_job, gone))
        stream_free(gone);
    return PERSIA_OK;
}

/* A new loader takes the place of one that is gone. */
static void replace_gone(role_service *s)
{
    role_stream *oldest = NULL;
    for (role_stream *t = s->streams; t; t = t->next)
        if (t->gone && (!oldest || t->used < oldest->used))
            oldest = t;
    if (oldest) {
        oldest->gone = 0;
        oldest->left = 1;
    }
}

int stream_find(role_service *s, uint64_t name, uint64_t epoch,
                role_stream **out)
{
    role_stream *t = s->streams;
    while (t && t->name != name)
        t = t->next;
    *out = t;
    if (t)
        return PERSIA_OK;
    int rc = s->stats.streams >= ROLE_STREAMS ? stream_expire(s) : PERSIA_OK;
    if (rc)
        return rc;
    if (epoch > INT64_MAX / 2)
        return persia_err_set(PERSIA_EARG, "epoch %llu is none",
                              (unsigned long long)epoch);
    if (!(t = calloc(1, sizeof *t)))
        return persia_err_set(PERSIA_ENOMEM, "no memory for a data loader");
    replace_gone(s);
    t->name = name;
    t->epoch = epoch_first(s);
    t->ahead = (int64_t)(epoch ? epoch : 1) - (int64_t)t->epoch;
    t->used = persia_clock_ns();
    window_init(&t->came, t->rings[0], ROLE_WINDOW / 64);
    window_init(&t->done, t->rings[1], ROLE_WINDOW / 64);
    pthread_mutex_init(&t->opening, NULL);
    t->next = s->streams;
    s->streams = t;
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
    }
}

const role_stream *stream_last(const role_service *s, int left)
{
    const role_stream *last = NULL;
    for (const role_stream *t = s->streams; t; t = t->next)
        if ((left || !t->left) &&
            (!last || t->left < last->left ||
             (t->left == last->left && t->epoch < last->epoch)))
            last = t;
    return last;
}

void streams_tick(role_service *s, uint64_t now)
{
    for (role_stream *t = s->streams; t; t = t->next)
        t->gone |= !t->left && now > t->used &&
                   now - t->used > s->config.silence_ns;
}
