/* passes.c: see private.h.
 *
 * A pass of a rank is an epoch of the loaders; the first one is what the first
 * worker says that knows.  The pass is over when all workers that are there
 * have ended the epoch, and each batch of it is done, or a worker has given it
 * to a rank.  What a worker said counts until it is started again, so nothing
 * need be known of how long one is away: the batches of one that died are
 * missing until their loader has sent them to another.  One that was started
 * when the loaders had left knows of no end: it is enough that it has nothing
 * and that another one has ended the epoch.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "rank/private.h"

/* ---- the end of an epoch ---- */

/* Whether what a link answered at the end of the epoch is of the worker that
 * was there last. */
static int passes_has_ended(const rank_taker *r, size_t i)
{
    return r->at[i].ended &&
           r->at[i].ended == atomic_load(&r->c.links[i].boot);
}

/* Whether it had nothing the last time, and says what it knows of batches. */
static int passes_is_idle(const rank_taker *r, size_t i)
{
    return r->at[i].idle &&
           r->at[i].idle == atomic_load(&r->c.links[i].boot);
}

static int passes_is_held(const rank_taker *r, uint64_t stream,
                          uint64_t number)
{
    const rank_taken *t = r->held;
    while (t && (t->m.stream != stream || t->m.number != number))
        t = t->held_next;
    return t != NULL;
}

/* Whether a batch is done, or a rank has it. */
static int passes_is_had(const rank_taker *r, uint64_t stream, uint64_t number)
{
    for (size_t i = 0; i < r->c.links_n; i++) {
        const at_link *at = &r->at[i];
        const int knows = passes_has_ended(r, i) || passes_is_idle(r, i);
        for (size_t k = 0; k < at->parts_n && knows; k++) {
            const wire_loader_part *p = &at->parts[k];
            const uint64_t bit = number - p->settled - 1;
            if (p->stream == stream &&
                (number <= p->settled ||
                 (bit < WIRE_BATCHES_MAX &&
                  p->window[bit / 64] >> bit % 64 & 1)))
                return 1;
        }
    }
    return passes_is_held(r, stream, number);
}

/* The name of a batch that is not; or 0. */
static wire_batch_name passes_missing(const rank_taker *r)
{
    for (size_t i = 0; i < r->c.links_n; i++)
        for (size_t k = 0; k < r->at[i].parts_n && passes_has_ended(r, i);
             k++) {
            const wire_loader_part *p = &r->at[i].parts[k];
            for (uint64_t n = p->settled + 1; n <= p->last; n++)
                if (!passes_is_had(r, p->stream, n))
                    return (wire_batch_name){p->stream, n};
        }
    return (wire_batch_name){0};
}

/* Whether a batch that the loop has left is on its way back, or will be: a
 * pass that follows has it. */
static int passes_is_leaving(const rank_taker *r)
{
    int is = r->backs != 0;
    for (const rank_taken *t = r->takes; t; t = t->takes_next)
        is |= t->generation != r->generation && t->state != TAKING_QUEUED &&
              t->state != TAKING_SETTLED;
    for (const rank_taken *t = r->held; t; t = t->held_next)
        is |= t->generation != r->generation &&
              (t->held == HELD_HERE || t->held == HELD_UNUSED);
    return is;
}

/* Whether a loop has had it. */
static int held_is_used(enum held_state state)
{
    return state != HELD_NONE && state != HELD_HERE && state != HELD_UNUSED;
}

/* The lock is held. */
static int pass_is_over(const rank_taker *r)
{
    size_t n = 0;
    if (passes_is_leaving(r))
        return 0;
    for (size_t i = 0; i < r->c.links_n; i++) {
        const worker_link *l = &r->c.links[i];
        if (passes_has_ended(r, i))
            n++;
        else if (!link_is_away(l) && !passes_is_idle(r, i))
            return 0;
    }
    return n && !passes_missing(r).number;
}

static void passes_forget(at_link *at)
{
    at->ended = at->idle = 0;
    at->parts_n = 0;
}

enum held_state pass_give_back(rank_taken *t)
{
    rank_taker *r = t->r;
    pthread_mutex_lock(&r->lock);
    const enum held_state was = t->held;
    r->backs += (unsigned)held_has_lease(was);
    pass_held_event_locked(t, HELD_DROP);
    pthread_mutex_unlock(&r->lock);
    return was;
}

void pass_gave_back(rank_taker *r)
{
    pthread_mutex_lock(&r->lock);
    assert(r->backs);
    r->backs--;
    r->backs_ended++;
    for (size_t i = 0; i < r->c.links_n; i++)
        passes_forget(&r->at[i]);
    pthread_mutex_unlock(&r->lock);
}

int pass_end(rank_taker *r)
{
    int over = r->over && !r->again;
    r->again = 0;
    for (const rank_taken *t = r->held; t; t = t->held_next)
        over &= t->generation != r->generation || held_is_used(t->held);
    for (size_t i = 0; i < r->c.links_n; i++)
        passes_forget(&r->at[i]);
    r->missing_since = 0;
    r->epoch += (uint64_t)over;
    r->over = 0;
    return over;
}

/* The lock is held. */
static int passes_ask_all_again(rank_taker *r, wire_batch_name lost)
{
    const uint64_t now = persia_clock_ns();
    int rc = PERSIA_OK;
    for (size_t i = 0; i < r->c.links_n; i++)
        if (!link_is_away(&r->c.links[i]))
            passes_forget(&r->at[i]);
    if (!lost.number)
        r->missing_since = 0;
    else if (!r->missing_since || lost.stream != r->missing.stream ||
             lost.number != r->missing.number)
        r->missing_since = now; /* where others are made, it may be, too */
    r->missing = lost;
    if (lost.number && now - r->missing_since >= r->c.timeout_ns) {
        r->missing_since = 0;
        rc = persia_err_set(PERSIA_EUNAVAILABLE,
                            "batch %llu of a data loader is at no embedding "
                            "worker that can be reached, and the loader has "
                            "not sent it again; look at both",
                            (unsigned long long)lost.number);
    }
    return rc;
}

int pass_again(rank_taker *r)
{
    pthread_mutex_lock(&r->lock);
    int rc = passes_ask_all_again(r, passes_missing(r));
    pthread_mutex_unlock(&r->lock);
    return rc;
}

int pass_look_again(rank_taken *t)
{
    rank_taker *r = t->r;
    int rc = PERSIA_OK;
    pthread_mutex_lock(&r->lock);
    const wire_batch_name lost = passes_missing(r);
    if (lost.number && t->generation == r->generation)
        rc = passes_ask_all_again(r, lost);
    pthread_mutex_unlock(&r->lock);
    return rc;
}

/* ---- which worker ---- */

size_t *pass_home(const rank_taker *r, uint64_t place)
{
    return &r->homes[(place - 1) % r->c.links_n];
}

/* The lock is held.  *others: it is not the one whose turn it is. */
static worker_link *link_of(const rank_taken *t, int *others)
{
    const rank_taker *r = t->r;
    const uint64_t first =
        t->place ? *pass_home(r, t->place) : t->number - 1 + r->c.rank;
    size_t n = 0;
    for (size_t i = 0; i < r->c.links_n; i++)
        n += !passes_has_ended(r, i) && !link_is_away(&r->c.links[i]);
    size_t left = n ? t->tries % n : 0;
    *others = left != 0;
    for (size_t i = 0; i < r->c.links_n; i++) {
        const size_t at = (first + i) % r->c.links_n;
        if (passes_has_ended(r, at) || link_is_away(&r->c.links[at]))
            continue;
        if (!left--)
            return &r->c.links[at];
    }
    return NULL;
}

worker_link *pass_link(rank_taken *t, int *over)
{
    rank_taker *r = t->r;
    pthread_mutex_lock(&r->lock);
    taking_event(t, TAKING_ASK);
    *over = r->over || pass_is_over(r);
    worker_link *l = *over ? NULL : link_of(t, &t->look);
    if (l && t->place)
        t->look = l != &r->c.links[*pass_home(r, t->place)];
    pthread_mutex_unlock(&r->lock);
    return l;
}

/* ---- what an answer says ---- */

static int passes_keep_parts(at_link *at, const wire_take_reply *m)
{
    wire_loader_part *more =
        realloc(at->parts, (m->loaders_n + 1) * sizeof *more);
    if (!more)
        return PERSIA_ENOMEM;
    if (m->loaders_n)
        memcpy(more, m->loaders, m->loaders_n * sizeof *more);
    at->parts = more;
    at->parts_n = m->loaders_n;
    return PERSIA_OK;
}

/* The loaders are of another job than it knew: a pass that has not begun is of
 * that one. */
static void passes_change_job(rank_taker *r, uint64_t job)
{
    r->job = job;
    r->epoch = r->first = r->begun = 0;
    r->place = r->used = (uint64_t)r->c.rank + 1;
    for (size_t i = 0; i < r->c.links_n; i++)
        passes_forget(&r->at[i]);
}

/* Takes in which job an answer is of.  Whether that is the rank's. */
static int passes_learn_job(const rank_taken *t)
{
    rank_taker *r = t->r;
    const wire_take_reply *m = &t->m;
    const int asked = t->job == r->job || (!t->job && m->job == r->job);
    if (t->generation != r->generation || !asked)
        return 0;
    if (m->job && m->job != r->job && !r->c.job &&
        (!r->epoch || r->begun != r->epoch))
        passes_change_job(r, m->job);
    if (m->job && m->job != r->job)
        return 0;
    r->first = m->first ? m->first : r->first;
    return 1;
}

/* Batches of the job that have no update. */
static void passes_learn_failed(const rank_taken *t, at_link *at)
{
    const uint64_t known = at->failed_boot == t->boot ? at->failed : 0;
    if (t->m.failed > known)
        atomic_fetch_add(&t->r->failed_n, t->m.failed - known);
    at->failed = t->m.failed > known ? t->m.failed : known;
    at->failed_boot = t->boot;
}

/* Loaders that a worker does not wait for at the end of an epoch. */
static void passes_learn_silent(rank_taker *r, const wire_take_reply *m)
{
    if (r->silent_epoch != m->epoch || m->silent > r->silent)
        r->silent = m->silent;
    r->silent_epoch = m->epoch;
}

int pass_learn(rank_taken *t)
{
    rank_taker *r = t->r;
    at_link *at = &r->at[t->from - r->c.links];
    pthread_mutex_lock(&r->lock);
    int own = passes_learn_job(t);
    passes_learn_failed(t, at);
    if (own && !r->epoch)
        r->epoch = t->m.epoch;
    own = own && t->m.epoch <= r->epoch;
    const int is_last = own && t->m.epoch == r->epoch &&
                        t->backs_ended == r->backs_ended;
    at->idle = own && t->m.status == TAKE_IDLE ? t->boot : 0;
    if (is_last && (t->m.status == TAKE_END || at->idle) &&
        !passes_keep_parts(at, &t->m) && !at->idle)
        at->ended = t->boot;
    if (own && t->m.status == TAKE_END)
        passes_learn_silent(r, &t->m);
    if (own && t->m.status == TAKE_BATCH) {
        r->begun = r->epoch;
        r->missing_since = 0;
    }
    if (t->m.status == TAKE_IDLE || !r->epoch || t->place)
        t->tries++;
    else
        t->tries = 0;
    pthread_mutex_unlock(&r->lock);
    return own;
}

/* ---- batches that the rank holds ---- */

enum { NEVER = HELD_STATES };

static const unsigned char next[HELD_STATES][HELD_EVENTS] = {
    [HELD_NONE] = {HELD_HERE, HELD_NONE, HELD_NONE, NEVER, HELD_NONE,
                   HELD_NONE},
    [HELD_HERE] = {NEVER, HELD_USED, HELD_SKIPPED, HELD_UNUSED, HELD_RETURNED,
                   HELD_NONE},
    [HELD_USED] = {NEVER, HELD_USED, HELD_SKIPPED, HELD_UNDONE, HELD_RETURNED,
                   HELD_NONE},
    [HELD_SKIPPED] = {NEVER, HELD_SKIPPED, HELD_SKIPPED, NEVER, HELD_RETURNED,
                      HELD_NONE},
    [HELD_UNUSED] = {NEVER, HELD_UNDONE, HELD_UNUSED, NEVER, HELD_RETURNED,
                     HELD_NONE},
    [HELD_UNDONE] = {NEVER, HELD_UNDONE, HELD_UNDONE, NEVER, HELD_RETURNED,
                     HELD_NONE},
    [HELD_RETURNED] = {NEVER, HELD_RETURNED, HELD_RETURNED, NEVER,
                       HELD_RETURNED, HELD_NONE},
};

int held_has_lease(enum held_state state)
{
    return state != HELD_NONE && state != HELD_RETURNED;
}

/* Where t is in the list of those that are held; or its end. */
static rank_taken **passes_held_place(rank_taken *t)
{
    rank_taken **at = &t->r->held;
    while (*at && *at != t)
        at = &(*at)->held_next;
    return at;
}

void pass_held_event_locked(rank_taken *t, enum held_event event)
{
    const enum held_state was = t->held, to = next[was][event];
    assert((int)to != NEVER);
    t->held = to;
    if (was == HELD_NONE && to != HELD_NONE) {
        t->held_next = t->r->held;
        t->r->held = t;
    }
    if (was != HELD_NONE && to == HELD_NONE) {
        rank_taken **at = passes_held_place(t);
        assert(*at == t);
        *at = t->held_next;
    }
}

void pass_held_event(rank_taken *t, enum held_event event)
{
    pthread_mutex_lock(&t->r->lock);
    pass_held_event_locked(t, event);
    pthread_mutex_unlock(&t->r->lock);
}

int pass_hold(rank_taken *t)
{
    pthread_mutex_lock(&t->r->lock);
    const int is_only = !passes_is_held(t->r, t->m.stream, t->m.number);
    pass_held_event_locked(t, HELD_HOLD);
    pthread_mutex_unlock(&t->r->lock);
    return is_only;
}

void pass_move(rank_taken *t, rank_taken *u)
{
    assert(t->held == HELD_HERE && u->held == HELD_NONE);
    link_answer_free(&u->answer);
    u->answer = t->answer;
    u->m = t->m;
    u->from = t->from;
    u->boot = t->boot;
    u->lineage = t->lineage;
    t->answer = (link_answer){0};
    persia_wire_memory_init(&t->answer.memory);
    pass_held_event_locked(t, HELD_DROP);
    pass_held_event_locked(u, HELD_HOLD);
}

wire_batch_name *pass_held(const rank_taker *r, size_t *n)
{
    wire_batch_name *out = NULL;
    size_t most = 0;
    *n = 0;
    for (const rank_taken *t = r->held; t; t = t->held_next)
        most++;
    if (most)
        out = calloc(most, sizeof *out);
    for (const rank_taken *t = r->held; t && out; t = t->held_next)
        if (*n < WIRE_HELD_MAX)
            out[(*n)++] = (wire_batch_name){t->m.stream, t->m.number};
    return out;
}
