#include "rpc/stalls.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

#include "rpc/core.h"

enum { LOOK_MS = 250 }; /* between two looks for them */

typedef struct watched {
    enum slot_state state;
    grpc_call *call; /* NULL: the slot does not wait for its client */
    uint64_t until; /* persia_clock_ns() up to which it may */
} watched;

/* A slot that waited too long. */
typedef struct late {
    size_t slot;
    grpc_call *call; /* a reference: to be cancelled; NULL: to be refused */
} late;

/* The slots of health, or all others. */
typedef struct kind {
    size_t begin, end;
    uint64_t request_ns, answer_ns; /* patience */
    size_t refusals_min; /* in one look */
    /* The lock guards these: */
    size_t free; /* slots that are idle */
    size_t came; /* requests, since the last look */
    size_t refusals; /* in the next look, at most; the thread's own */
} kind;

struct stalls {
    void (*refuse)(void *ctx, size_t slot);
    void *ctx;
    kind health, other;
    late *late; /* [slots_n] the thread's own: what a look found */
    persia_timer timer;

    pthread_mutex_t lock; /* guards what follows */
    watched *slots; /* [slots_n] */
};

static kind *kind_of(stalls *w, size_t slot)
{
    return slot < w->health.end ? &w->health : &w->other;
}

/* ---- the state of a slot ------------------------------------------------ */

enum { NEVER = SLOT_STATES };

static const unsigned char next[SLOT_STATES][SLOT_EVENTS] = {
    [SLOT_IDLE] = {SLOT_READING, NEVER, NEVER, SLOT_ANSWERING, NEVER, NEVER},
    [SLOT_READING] = {NEVER, SLOT_HANDLED, SLOT_REFUSED, NEVER, NEVER, NEVER},
    [SLOT_HANDLED] = {NEVER, NEVER, NEVER, SLOT_ANSWERING, NEVER, NEVER},
    [SLOT_ANSWERING] = {NEVER, NEVER, NEVER, NEVER, SLOT_SENT, NEVER},
    [SLOT_SENT] = {NEVER, NEVER, NEVER, NEVER, NEVER, SLOT_IDLE},
    [SLOT_REFUSED] = {NEVER, SLOT_REFUSED, NEVER, NEVER, SLOT_DISMISSED,
                      NEVER},
    [SLOT_DISMISSED] = {NEVER, SLOT_DISMISSED, NEVER, NEVER, NEVER,
                        SLOT_IDLE},
};

/* The only place that changes a slot's state.  The lock is held. */
static void slot_event(stalls *w, size_t slot, enum slot_event event)
{
    watched *one = &w->slots[slot];
    kind *k = kind_of(w, slot);
    const enum slot_state was = one->state, to = next[was][event];
    assert((int)to != NEVER);
    one->state = to;
    k->free -= was == SLOT_IDLE;
    k->free += to == SLOT_IDLE;
    assert(k->free <= k->end - k->begin);
}

void stalls_reads(stalls *w, size_t slot, grpc_call *call)
{
    const uint64_t until = persia_clock_ns() + kind_of(w, slot)->request_ns;
    pthread_mutex_lock(&w->lock);
    slot_event(w, slot, SLOT_READ);
    w->slots[slot].call = call;
    w->slots[slot].until = until;
    pthread_mutex_unlock(&w->lock);
}

int stalls_came(stalls *w, size_t slot)
{
    pthread_mutex_lock(&w->lock);
    slot_event(w, slot, SLOT_CAME);
    const int handled = w->slots[slot].state == SLOT_HANDLED;
    if (handled) {
        w->slots[slot].call = NULL;
        kind_of(w, slot)->came++;
    }
    pthread_mutex_unlock(&w->lock);
    return handled;
}

int stalls_answers(stalls *w, size_t slot, grpc_call *call)
{
    const uint64_t until = persia_clock_ns() + kind_of(w, slot)->answer_ns;
    pthread_mutex_lock(&w->lock);
    const int handled = w->slots[slot].state == SLOT_HANDLED;
    slot_event(w, slot, SLOT_ANSWER);
    w->slots[slot].call = call;
    w->slots[slot].until = until;
    pthread_mutex_unlock(&w->lock);
    return handled;
}

void stalls_answered(stalls *w, size_t slot)
{
    pthread_mutex_lock(&w->lock);
    slot_event(w, slot, SLOT_SEND);
    w->slots[slot].call = NULL;
    pthread_mutex_unlock(&w->lock);
}

void stalls_freed(stalls *w, size_t slot)
{
    pthread_mutex_lock(&w->lock);
    assert(!w->slots[slot].call);
    slot_event(w, slot, SLOT_FREE);
    pthread_mutex_unlock(&w->lock);
}

/* ---- the thread --------------------------------------------------------- */

/* Notes those of a kind from w->late[n] on; returns the next n.  Under the
 * lock. */
static size_t stalls_look(stalls *w, kind *k, uint64_t now, size_t n)
{
    size_t refused = 0;
    /* Many large requests at once are slow for each other: while some arrive,
     * few are refused, or all would begin again and again. */
    if (k->free || k->came)
        k->refusals = k->refusals_min;
    k->came = 0;
    if (k->free)
        return n;
    for (size_t i = k->begin; i < k->end; i++) {
        watched *one = &w->slots[i];
        if (!one->call || now < one->until)
            continue;
        if (one->state != SLOT_READING) {
            grpc_call_ref(one->call);
            w->late[n++] = (late){i, one->call};
        } else if (refused < k->refusals) {
            refused++;
            slot_event(w, i, SLOT_REFUSE);
            one->until = now + k->request_ns;
            w->late[n++] = (late){i, NULL};
        }
    }
    if (refused && k->refusals < k->end - k->begin)
        k->refusals *= 2;
    return n;
}

static void stalls_send_away(stalls *w, const late *l)
{
    if (!l->call) {
        w->refuse(w->ctx, l->slot);
        return;
    }
    grpc_call_cancel(l->call, NULL);
    grpc_call_unref(l->call);
}

static uint64_t stalls_tick(void *ctx)
{
    stalls *w = ctx;
    const uint64_t now = persia_clock_ns();
    pthread_mutex_lock(&w->lock);
    size_t n =
        stalls_look(w, &w->other, now, stalls_look(w, &w->health, now, 0));
    pthread_mutex_unlock(&w->lock);
    for (size_t i = 0; i < n; i++)
        stalls_send_away(w, &w->late[i]);
    return persia_clock_ns() + (uint64_t)LOOK_MS * 1000000u;
}

/* ---- life --------------------------------------------------------------- */

static void kind_init(kind *k, size_t begin, size_t end, uint64_t request_ms,
                      uint64_t answer_ms, size_t refusals_min)
{
    k->begin = begin;
    k->end = end;
    k->request_ns = request_ms * 1000000u;
    k->answer_ns = answer_ms * 1000000u;
    k->refusals_min = k->refusals = refusals_min;
    k->free = end - begin;
}

int stalls_watch(size_t slots_n, size_t health_n,
                 void (*refuse)(void *ctx, size_t slot), void *ctx,
                 stalls **out)
{
    *out = NULL;
    stalls *w = calloc(1, sizeof *w);
    if (!w)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: a server's slots");
    pthread_mutex_init(&w->lock, NULL);
    persia_timer_init(&w->timer);
    w->refuse = refuse;
    w->ctx = ctx;
    /* No request of health is large. */
    kind_init(&w->health, 0, health_n, STALLS_HEALTH_MS, STALLS_HEALTH_MS,
              health_n);
    kind_init(&w->other, health_n, slots_n, STALLS_MS, STALLS_ANSWER_MS, 1);
    w->slots = calloc(slots_n, sizeof *w->slots);
    w->late = calloc(slots_n, sizeof *w->late);
    int code = PERSIA_OK;
    if (!w->slots || !w->late)
        code = persia_err_set(PERSIA_ENOMEM,
                              "out of memory: a server of %zu slots", slots_n);
    if (code == PERSIA_OK)
        code = persia_timer_start(&w->timer, stalls_tick, w,
                                  "persia-rpc-late");
    if (code != PERSIA_OK) {
        stalls_free(w);
        return code;
    }
    *out = w;
    return PERSIA_OK;
}

void stalls_stop(stalls *w)
{
    if (w)
        persia_timer_stop(&w->timer);
}

void stalls_free(stalls *w)
{
    if (!w)
        return;
    persia_timer_free(&w->timer);
    pthread_mutex_destroy(&w->lock);
    free(w->slots);
    free(w->late);
    free(w);
}
