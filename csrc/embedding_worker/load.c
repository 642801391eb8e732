/* load.c: for how long ranks waited for loaders, and loaders for ranks.  The
 * number of loaders and of trainers follows from it (docs/howto/scaling.md).
 */
#include "embedding_worker/private.h"

/* A loader has this many batches open and must wait for ranks.  It may have
 * some more on their way, or at other workers. */
enum { OPEN_MANY = WIRE_BATCHES_MAX - WIRE_BATCHES_MAX / 8 };

static int load_is_blocked(const embedding_worker *s)
{
    const worker_stream *t = s->streams;
    if (s->submits)
        return 1;
    while (t && (!stream_is_there(t) ||
                 window_top(&t->came) < t->settled + OPEN_MANY))
        t = t->next;
    return t != NULL;
}

static void load_turn(uint64_t *since, uint64_t *total, int is)
{
    if (is == (*since != 0))
        return;
    const uint64_t now = persia_clock_ns();
    if (!is)
        *total += now - *since;
    *since = is ? now : 0;
}

void load_note(embedding_worker *s)
{
    load_turn(&s->starved, &s->stats.starved_ns, s->takes && !s->queue);
    load_turn(&s->blocked, &s->stats.blocked_ns, load_is_blocked(s));
}

void load_count(const embedding_worker *s, uint64_t now,
                embedding_worker_stats *out)
{
    if (s->starved && now > s->starved)
        out->starved_ns += now - s->starved;
    if (s->blocked && now > s->blocked)
        out->blocked_ns += now - s->blocked;
}
