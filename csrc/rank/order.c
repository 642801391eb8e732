/* order.c: the Takes of a rank get batches in their order.
 *
 * The loop has the batch of one Take after that of the one before.  So a batch
 * that arrived for a later one is of no use while an earlier one waits for a
 * worker that has none: its loader may wait for just that batch.  Then the
 * earlier one gets it, and the later one asks again.
 */
#include <stdlib.h>

#include "rank/private.h"

#define IDLE_NS ((uint64_t)20000000)
#define LOOK_NS ((uint64_t)50000000) /* at what is cancelled */

void order_enter(rank_taken *t)
{
    rank_taker *r = t->r;
    pthread_mutex_lock(&r->lock);
    if (!t->turn)
        t->turn = ++r->turns;
    if (!t->is_listed) {
        rank_taken **at = &r->takes;
        while (*at && (*at)->turn < t->turn)
            at = &(*at)->takes_next;
        t->takes_next = *at;
        *at = t;
        t->is_listed = 1;
    }
    pthread_mutex_unlock(&r->lock);
}

void order_leave(rank_taken *t)
{
    rank_taker *r = t->r;
    pthread_mutex_lock(&r->lock);
    if (t->is_listed) {
        rank_taken **at = &r->takes;
        while (*at != t)
            at = &(*at)->takes_next;
        *at = t->takes_next;
        t->is_listed = 0;
        pthread_cond_broadcast(&r->turned);
    }
    pthread_mutex_unlock(&r->lock);
}

/* The lock is held in all below. */

static void turn(rank_taken *t, enum take_state state)
{
    t->state = state;
    pthread_cond_broadcast(&t->r->turned);
}

static void wait_until(rank_taker *r, uint64_t until)
{
    persia_cond_wait_until(&r->turned, &r->lock, until);
}

static int is_cancelled(const rank_taken *t)
{
    return t->generation != t->r->generation;
}

/* The batch of t is that of u from now on, which waits for those before it. */
static void give(rank_taken *t, rank_taken *u)
{
    rank_taker *r = t->r;
    rank_taken **at = &r->held;
    while (*at != t)
        at = &(*at)->held_next;
    *at = u;
    u->held_next = t->held_next;
    u->is_held = 1;
    t->is_held = 0;
    link_answer_free(&u->answer);
    u->answer = t->answer;
    u->m = t->m;
    u->from = t->from;
    u->boot = t->boot;
    u->lineage = t->lineage;
    t->answer = (link_answer){0};
    persia_wire_memory_init(&t->answer.memory);
    t->number = ++r->number; /* a request with the old one has this batch */
    t->tries = 0;
    atomic_store(&t->has_lease, 0);
    atomic_store(&u->has_lease, 1);
    turn(u, TAKE_HOLDS);
    turn(t, TAKE_ASKS);
}

static int settle_batch(rank_taken *t)
{
    rank_taker *r = t->r;
    turn(t, TAKE_HOLDS);
    while (!is_cancelled(t)) {
        rank_taken *u = r->takes;
        int before = 0;
        while (u != t && u->state != TAKE_WANTS && u->state != TAKE_AT_END) {
            before |= !is_cancelled(u);
            u = u->takes_next;
        }
        if (u != t) {
            give(t, u);
            return 0;
        }
        if (!before)
            break;
        wait_until(r, persia_clock_ns() + LOOK_NS);
    }
    turn(t, TAKE_IS_DONE);
    return 1;
}

/* Whether all Takes that were sent are at the end, and no batch can arrive. */
static int all_at_end(const rank_taker *r)
{
    const rank_taken *t = r->takes;
    while (t && (is_cancelled(t) || t->state == TAKE_IS_NEW ||
                 t->state == TAKE_AT_END))
        t = t->takes_next;
    return !t;
}

static int settle_end(rank_taken *t)
{
    rank_taker *r = t->r;
    turn(t, TAKE_AT_END);
    while (t->state == TAKE_AT_END && !is_cancelled(t)) {
        if (r->over || all_at_end(r)) {
            r->over = 1;
            break;
        }
        wait_until(r, persia_clock_ns() + LOOK_NS);
    }
    if (t->state == TAKE_HOLDS)
        return settle_batch(t);
    turn(t, TAKE_IS_DONE);
    return 1;
}

/* For a moment: then it asks again.  The worker may have had nothing only
 * because its loader is slow: then the moment is for a batch that a later Take
 * holds. */
static int settle_idle(rank_taken *t)
{
    const uint64_t until = persia_clock_ns() + IDLE_NS;
    const rank_taken *u = t->takes_next;
    while (u && u->state != TAKE_HOLDS)
        u = u->takes_next;
    if (!u && t->m.status != TAKE_IDLE)
        return 0;
    turn(t, TAKE_WANTS);
    while (t->state == TAKE_WANTS && persia_clock_ns() < until &&
           !is_cancelled(t))
        wait_until(t->r, until);
    if (t->state == TAKE_HOLDS)
        return settle_batch(t);
    turn(t, TAKE_ASKS);
    return 0;
}

int order_settle(rank_taken *t)
{
    pthread_mutex_lock(&t->r->lock);
    int done = t->m.status == TAKE_BATCH ? settle_batch(t)
               : t->m.status == TAKE_END ? settle_end(t)
                                         : settle_idle(t);
    pthread_mutex_unlock(&t->r->lock);
    return done;
}
