/* order.c: the Takes of a rank get batches in their order.
 *
 * The loop has the batch of one Take after that of the one before.  So a batch
 * that arrived for a later one is of no use while an earlier one waits for a
 * worker that has none: its loader may wait for just that batch.  Then the
 * earlier one gets it, and the later one asks again.
 */
#include <assert.h>
#include <stdlib.h>

#include "rank/private.h"

#define IDLE_NS ((uint64_t)20000000)
#define LOOK_NS ((uint64_t)50000000) /* at what is cancelled */

enum { NEVER = TAKING_STATES };

static const unsigned char next[TAKING_STATES][TAKING_EVENTS] = {
    [TAKING_MADE] = {TAKING_QUEUED, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER,
                     NEVER, NEVER},
    [TAKING_QUEUED] = {NEVER, TAKING_ASKS, NEVER, NEVER, NEVER, NEVER, NEVER,
                       NEVER, TAKING_LEFT},
    [TAKING_ASKS] = {NEVER, TAKING_ASKS, TAKING_HOLDS, TAKING_WANTS,
                     TAKING_ENDS, NEVER, NEVER, NEVER, TAKING_LEFT},
    [TAKING_HOLDS] = {NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, TAKING_ASKS,
                      TAKING_SETTLED, NEVER},
    [TAKING_WANTS] = {NEVER, TAKING_ASKS, NEVER, NEVER, NEVER, TAKING_HOLDS,
                      NEVER, NEVER, NEVER},
    [TAKING_ENDS] = {NEVER, NEVER, NEVER, NEVER, NEVER, TAKING_HOLDS, NEVER,
                     TAKING_SETTLED, NEVER},
    [TAKING_SETTLED] = {NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER,
                        NEVER, TAKING_LEFT},
    [TAKING_LEFT] = {TAKING_QUEUED, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER,
                     NEVER, TAKING_LEFT},
};

static void order_list(rank_taken *t)
{
    rank_taken **at = &t->r->takes;
    if (!t->turn)
        t->turn = ++t->r->turns;
    while (*at && (*at)->turn < t->turn)
        at = &(*at)->takes_next;
    t->takes_next = *at;
    *at = t;
}

static void order_unlist(rank_taken *t)
{
    rank_taken **at = &t->r->takes;
    while (*at && *at != t)
        at = &(*at)->takes_next;
    assert(*at == t);
    *at = t->takes_next;
}

static int order_is_listed(enum taking_state state)
{
    return state != TAKING_MADE && state != TAKING_LEFT;
}

void taking_event(rank_taken *t, enum taking_event event)
{
    const enum taking_state to = next[t->state][event];
    assert((int)to != NEVER);
    if (order_is_listed(to) && !order_is_listed(t->state))
        order_list(t);
    if (!order_is_listed(to) && order_is_listed(t->state))
        order_unlist(t);
    t->state = to;
    pthread_cond_broadcast(&t->r->turned);
}

void order_enter(rank_taken *t)
{
    pthread_mutex_lock(&t->r->lock);
    if (t->state == TAKING_LEFT) /* none waits for its number any more */
        t->number = ++t->r->number;
    if (!order_is_listed(t->state))
        taking_event(t, TAKING_ENTER);
    pthread_mutex_unlock(&t->r->lock);
}

void order_leave(rank_taken *t)
{
    pthread_mutex_lock(&t->r->lock);
    taking_event(t, TAKING_LEAVE);
    pthread_mutex_unlock(&t->r->lock);
}

/* The lock is held in all below. */

uint64_t order_oldest(const rank_taker *r, size_t listed)
{
    uint64_t oldest = r->number + 1;
    size_t held = 0;
    for (const rank_taken *t = r->held; t; t = t->held_next)
        held++;
    for (const rank_taken *t = r->takes; t; t = t->takes_next)
        oldest = t->number < oldest ? t->number : oldest;
    return r->backs || listed < held ? 0 : oldest;
}

static void order_wait_until(rank_taker *r, uint64_t until)
{
    persia_cond_wait_until(&r->turned, &r->lock, until);
}

static int order_is_cancelled(const rank_taken *t)
{
    return t->generation != t->r->generation;
}

/* An earlier Take gets the batch of t, and then waits for those before it. */
static void order_give(rank_taken *t, rank_taken *u)
{
    pass_move(t, u);
    t->number = ++t->r->number; /* a request with the old one has this batch */
    t->tries = 0;
    taking_event(u, TAKING_GIVE);
    taking_event(t, TAKING_LOSE);
}

static int order_settle_batch(rank_taken *t)
{
    rank_taker *r = t->r;
    while (!order_is_cancelled(t)) {
        rank_taken *u = r->takes;
        int before = 0;
        assert(u && t->state == TAKING_HOLDS);
        while (u != t && u->state != TAKING_WANTS && u->state != TAKING_ENDS) {
            before |= !order_is_cancelled(u);
            u = u->takes_next;
        }
        if (u != t) {
            order_give(t, u);
            return 0;
        }
        if (!before)
            break;
        order_wait_until(r, persia_clock_ns() + LOOK_NS);
    }
    taking_event(t, TAKING_SETTLE);
    return 1;
}

/* Whether all Takes that were sent are at the end, and no batch can arrive. */
static int order_all_at_end(const rank_taker *r)
{
    const rank_taken *t = r->takes;
    while (t && (order_is_cancelled(t) || t->state == TAKING_QUEUED ||
                 t->state == TAKING_ENDS))
        t = t->takes_next;
    return !t;
}

static int order_settle_end(rank_taken *t)
{
    rank_taker *r = t->r;
    taking_event(t, TAKING_END);
    while (t->state == TAKING_ENDS && !order_is_cancelled(t)) {
        if (r->over || order_all_at_end(r)) {
            r->over = 1;
            break;
        }
        order_wait_until(r, persia_clock_ns() + LOOK_NS);
    }
    if (t->state == TAKING_HOLDS)
        return order_settle_batch(t);
    taking_event(t, TAKING_SETTLE);
    return 1;
}

/* For a moment: then it asks again.  The worker may have had nothing only
 * because its loader is slow: then the moment is for a batch that a later Take
 * holds. */
static int order_settle_idle(rank_taken *t)
{
    const uint64_t until = persia_clock_ns() + IDLE_NS;
    const rank_taken *u = t->takes_next;
    while (u && u->state != TAKING_HOLDS)
        u = u->takes_next;
    if (!u && t->m.status != TAKE_IDLE)
        return 0;
    taking_event(t, TAKING_WANT);
    while (t->state == TAKING_WANTS && persia_clock_ns() < until &&
           !order_is_cancelled(t))
        order_wait_until(t->r, until);
    if (t->state == TAKING_HOLDS)
        return order_settle_batch(t);
    taking_event(t, TAKING_ASK);
    return 0;
}

int order_settle(rank_taken *t)
{
    pthread_mutex_lock(&t->r->lock);
    if (t->m.status == TAKE_BATCH)
        taking_event(t, TAKING_FIND);
    int done = t->m.status == TAKE_BATCH ? order_settle_batch(t)
               : t->m.status == TAKE_END ? order_settle_end(t)
                                         : order_settle_idle(t);
    pthread_mutex_unlock(&t->r->lock);
    return done;
}
