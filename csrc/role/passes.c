/* passes.c: see rank.h.
 *
 * Workers count epochs each for itself, and a worker that was started again
 * begins with 1.  What they have in common is a loader's own count, which
 * answers carry.  So a rank learns from the first answer of a worker which
 * pass it speaks of.
 *
 * Pass 1 of a rank is the earliest epoch that a worker has.  One that was
 * started again may be in a later epoch than the others, so the first answer
 * does not decide: until the rank has a batch, it asks each worker before it
 * waits at one whose epoch it knows.
 */
#include <stdlib.h>

#include "role/rank.h"

/* Away for so long that its batches are at other workers. */
static int is_given_up(const role_rank *r, const role_link *l)
{
    const uint64_t away = atomic_load(&l->away);
    return away && persia_clock_ns() - away >= r->c.move_ns;
}

int pass_is_over(const role_rank *r, uint64_t pass)
{
    size_t ended = 0, gone = 0;
    for (size_t i = 0; i < r->c.links_n; i++) {
        if (r->at[i].ended >= pass)
            ended++;
        else
            gone += (size_t)is_given_up(r, &r->c.links[i]);
    }
    return ended && ended + gone == r->c.links_n;
}

/* Whether the rank has no batch yet, and is to ask `other` before it waits at
 * `l`.  The lock is held. */
static int is_asked_first(const role_rank *r, const role_link *other,
                          const role_link *l)
{
    const at_link *at = &r->at[l - r->c.links];
    return !r->begun && at->checked == atomic_load(&l->boot) &&
           r->at[other - r->c.links].asked != atomic_load(&other->boot);
}

size_t *pass_home(const role_rank *r, uint64_t place)
{
    return &r->homes[(place - 1) % r->c.links_n];
}

role_link *pass_link(const role_taken *t, int *over)
{
    role_rank *r = t->r;
    role_link *found = NULL;
    pthread_mutex_lock(&r->lock);
    const uint64_t first = t->place ? *pass_home(r, t->place) + t->tries
                                    : t->number - 1 + r->c.rank;
    for (size_t i = 0; i < r->c.links_n; i++) {
        const size_t at = (first + i) % r->c.links_n;
        role_link *l = &r->c.links[at];
        if (r->at[at].ended < t->pass && !link_is_away(l) &&
            (!found || is_asked_first(r, l, found)))
            found = l;
    }
    *over = pass_is_over(r, t->pass);
    pthread_mutex_unlock(&r->lock);
    return found;
}

void pass_again(const role_taken *t)
{
    role_rank *r = t->r;
    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < r->c.links_n; i++)
        if (r->at[i].ended == t->pass && !link_is_away(&r->c.links[i]))
            r->at[i].ended--;
    pthread_mutex_unlock(&r->lock);
}

/* The lock is held.  How many passes the answer is ahead of its Take. */
static int64_t shift_of(role_rank *r, const role_taken *t, const at_link *at)
{
    rank_stream *k = r->streams;
    while (k && k->name != t->m.stream)
        k = k->next;
    if (k)
        return at->checked == t->boot
                   ? 0
                   : (int64_t)t->m.epoch - k->offset - (int64_t)t->pass;
    if (!(k = malloc(sizeof *k)))
        return 0;
    *k = (rank_stream){r->streams, t->m.stream,
                       (int64_t)t->m.epoch - (int64_t)t->pass};
    r->streams = k;
    return 0;
}

/* The lock is held.  The open pass is an epoch that is so much earlier than
 * those that other workers have told of: there it has ended. */
static void begin_earlier(role_rank *r, const role_taken *t, int64_t by)
{
    const uint64_t ended = t->pass + (uint64_t)by - 1;
    for (rank_stream *k = r->streams; k; k = k->next)
        k->offset -= by;
    for (size_t i = 0; i < r->c.links_n; i++) {
        at_link *at = &r->at[i];
        if (&r->c.links[i] == t->from || !at->checked ||
            at->checked != at->boot)
            continue;
        at->first += by;
        if (at->ended < ended)
            at->ended = ended;
    }
}

int pass_learn(role_taken *t)
{
    role_rank *r = t->r;
    at_link *at = &r->at[t->from - r->c.links];
    int64_t shift = 0;
    pthread_mutex_lock(&r->lock);
    at->asked = t->boot;
    if (t->m.stream) {
        shift = shift_of(r, t, at);
        if (shift < 0 && !r->begun) {
            begin_earlier(r, t, -shift);
            shift = 0;
        }
        at->first += shift;
        at->checked = t->boot;
    }
    if (shift > 0 && at->ended < t->pass)
        at->ended = t->pass + (uint64_t)shift - 1;
    else if (!shift && t->m.status == TAKE_END)
        at->ended = t->pass;
    if (shift <= 0 && t->m.status == TAKE_BATCH)
        r->begun = t->pass;
    pthread_mutex_unlock(&r->lock);
    return shift <= 0;
}

/* ---- batches in hand ---- */

void pass_hold(role_taken *t)
{
    role_rank *r = t->r;
    pthread_mutex_lock(&r->lock);
    t->held_next = r->held;
    r->held = t;
    t->is_held = 1;
    pthread_mutex_unlock(&r->lock);
}

void pass_drop(role_taken *t)
{
    role_rank *r = t->r;
    pthread_mutex_lock(&r->lock);
    if (t->is_held) {
        role_taken **at = &r->held;
        while (*at != t)
            at = &(*at)->held_next;
        *at = t->held_next;
        t->is_held = 0;
    }
    pthread_mutex_unlock(&r->lock);
}

wire_batch_name *pass_held(role_rank *r, const role_link *l, size_t *n)
{
    const uint64_t boot = atomic_load(&l->boot);
    wire_batch_name *out = NULL;
    size_t most = 0;
    *n = 0;
    pthread_mutex_lock(&r->lock);
    for (const role_taken *t = r->held; t; t = t->held_next)
        most += t->from != l || t->boot != boot;
    if (most)
        out = calloc(most, sizeof *out);
    for (const role_taken *t = r->held; t && out; t = t->held_next)
        if ((t->from != l || t->boot != boot) && *n < WIRE_HELD_MAX)
            out[(*n)++] = (wire_batch_name){t->m.stream, t->m.number};
    pthread_mutex_unlock(&r->lock);
    return out;
}
