/* forwards.c: forwards and the lookups of their batches: which of them they
 * take, and how stale it is. */
#include <assert.h>

#include "client/client.h"
#include "loop/prefetch_private.h"

void persia_loop_batch_bind(loop *s, uint64_t number, uint64_t ticket)
{
    prefetch *p = loop_prefetch(s);
    if (!number || prefetch_is_idle(p))
        return;
    pthread_mutex_lock(&p->lock);
    batch *b = prefetch_find(p, number);
    if (b && batch_is_taken(b) && ticket) {
        batch_add_forward(b, ticket);
        if (b->forwards_n)
            batch_follow(&p->all, b);
    } else if (b && b->state == BATCH_OUT && !b->forwards_n) {
        batch_event(b, BATCH_TO_READ);
    }
    prefetch_leave(p);
}

/* The lookup of b for this plan that was not taken, unless it misses updates
 * that the bound does not allow: then it is dropped. */
static lookup *forwards_take(prefetch *p, batch *b, uint32_t plan)
{
    lookup *l = batch_may_run(b) ? b->lookups : NULL;
    while (l && (l->want.take || l->want.plan != plan ||
                 l->state == LOOKUP_TAKEN))
        l = l->next;
    if (l && (batches_missed(&p->all, b) > b->pass->staleness ||
              batches_missed_strays(&p->all, b))) {
        lookup_event(l, LOOKUP_DROP);
        l = NULL;
    }
    return l;
}

/* A forward of b looks up, or takes a lookup: how stale that is. */
static void forwards_note_staleness(prefetch *p, batch *b, uint64_t missed)
{
    const uint64_t top = LOOP_STALENESS_BUCKETS - 1;
    if (b->staleness >= 0)
        return;
    b->staleness = (int64_t)missed;
    p->stats.staleness[missed < top ? missed : top]++;
}

static void forwards_note_waited(prefetch *p, uint64_t since)
{
    p->stats.waited_ns += persia_clock_ns() - since;
}

/* The lock is left meanwhile. */
static int forwards_wait_for(prefetch *p, lookup *l)
{
    const uint64_t since = persia_clock_ns();
    pthread_mutex_unlock(&p->lock);
    int rc = persia_future_wait(l->done, 0);
    pthread_mutex_lock(&p->lock);
    forwards_note_waited(p, since);
    return rc;
}

/* A forward of b looks up itself: when the updates of other batches are
 * applied, except as many as it may miss. */
static int forwards_wait_for_updates(prefetch *p, batch *b)
{
    const uint64_t since = persia_clock_ns();
    int rc = PERSIA_OK;
    while (!rc && batches_missed_now(&p->all, b) > b->pass->staleness)
        rc = persia_cond_wait_poll(&p->moved, &p->lock, UINT64_MAX);
    forwards_note_waited(p, since);
    return rc;
}

int persia_loop_batch_take(loop *s, uint64_t number, uint32_t plan,
                           void **owner)
{
    *owner = NULL;
    prefetch *p = loop_prefetch(s);
    if (prefetch_is_idle(p))
        return PERSIA_OK;
    int rc = PERSIA_OK;
    pthread_mutex_lock(&p->lock);
    batch *b = number ? prefetch_find(p, number) : NULL;
    if (b && b->pass->takes) { /* see persia_loop_read() */
        prefetch_leave(p);
        return PERSIA_OK;
    }
    lookup *l = b ? forwards_take(p, b, plan) : NULL;
    if (b)
        b->users++;
    if (l) {
        forwards_note_staleness(p, b, batches_missed(&p->all, b));
        if (l->state == LOOKUP_WAITS)
            prefetch_run(p, b, l);
        rc = forwards_wait_for(p, l);
        if (rc == PERSIA_OK && l->state == LOOKUP_TAKEN)
            l = NULL; /* by another thread meanwhile */
    } else if (b) {
        rc = forwards_wait_for_updates(p, b);
        forwards_note_staleness(p, b, batches_missed_now(&p->all, b));
    }
    assert(!b || b->users);
    if (b)
        b->users--;
    if (l && rc == PERSIA_OK) {
        lookup_event(l, LOOKUP_TAKE);
        *owner = l->want.owner;
        l->want.owner = NULL;
    }
    p->stats.prefetched += (uint64_t)(l && !rc);
    p->stats.not_prefetched += (uint64_t)!l;
    pthread_cond_broadcast(&p->moved); /* for persia_loop_pass_close() */
    prefetch_end(p);
    return rc;
}

/* There is no batch: updates are numbered as if the loop had not asked. */
static void forwards_note_end(prefetch *p, batch *b)
{
    b->is_end = 1;
    p->all.places -= b->place && b->place == p->all.places;
    b->place = 0;
}

int prefetch_taken(prefetch *p, uint64_t number, int reads,
                   batch_index **index)
{
    *index = NULL;
    if (!number || prefetch_is_idle(p))
        return PERSIA_OK;
    int rc = PERSIA_OK;
    pthread_mutex_lock(&p->lock);
    batch *b = prefetch_find(p, number);
    lookup *l = b && batch_may_run(b) ? b->lookups : NULL;
    while (l && !l->want.take)
        l = l->next;
    if (l) {
        b->users++;
        if (reads)
            forwards_note_staleness(p, b, batches_missed(&p->all, b));
        if (l->state == LOOKUP_WAITS)
            prefetch_run(p, b, l);
        rc = forwards_wait_for(p, l);
        if (!rc && *l->want.index)
            *index = persia_batch_index_get(*l->want.index);
        if (!rc && !*l->want.index)
            forwards_note_end(p, b);
        assert(b->users);
        b->users--;
        p->stats.prefetched += (uint64_t)reads;
        pthread_cond_broadcast(&p->moved);
    }
    prefetch_end(p);
    return rc;
}

int persia_loop_batch_wait(loop *s, uint64_t number)
{
    batch_index *index;
    int rc = prefetch_taken(loop_prefetch(s), number, 0, &index);
    persia_batch_index_put(index);
    return rc;
}

void persia_loop_get_prefetch_stats(loop *s, loop_prefetch_stats *out)
{
    prefetch *p = loop_prefetch(s);
    pthread_mutex_lock(&p->lock);
    *out = p->stats;
    prefetch_leave(p);
}
