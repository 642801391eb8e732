#include "loop/batches.h"

#include <assert.h>
#include <stdlib.h>

/* ---- the state of a batch ---- */

/* next[state][event]; 0 stands for a blank, for no event leads to FILLING. */
static const unsigned char next[BATCH_STATES][BATCH_EVENTS] = {
    [BATCH_FILLING] = {[BATCH_FILL] = BATCH_QUEUED, [BATCH_END] = BATCH_DONE},
    [BATCH_QUEUED] = {[BATCH_ALLOW] = BATCH_AHEAD,
                      [BATCH_ASK] = BATCH_ASKED,
                      [BATCH_END] = BATCH_DONE},
    [BATCH_AHEAD] = {[BATCH_ASK] = BATCH_OUT, [BATCH_END] = BATCH_DONE},
    [BATCH_ASKED] = {[BATCH_ALLOW] = BATCH_OUT, [BATCH_END] = BATCH_DONE},
    [BATCH_OUT] = {[BATCH_TO_READ] = BATCH_READ,
                   [BATCH_TO_OUT] = BATCH_OUT,
                   [BATCH_TO_PENDING] = BATCH_PENDING,
                   [BATCH_TO_UPDATE] = BATCH_UPDATING,
                   [BATCH_END] = BATCH_DONE},
    [BATCH_READ] = {[BATCH_TO_READ] = BATCH_READ,
                    [BATCH_TO_OUT] = BATCH_OUT,
                    [BATCH_END] = BATCH_DONE},
    [BATCH_PENDING] = {[BATCH_TO_OUT] = BATCH_OUT,
                       [BATCH_TO_PENDING] = BATCH_PENDING,
                       [BATCH_TO_UPDATE] = BATCH_UPDATING,
                       [BATCH_END] = BATCH_DONE},
    [BATCH_UPDATING] = {[BATCH_TO_OUT] = BATCH_OUT,
                        [BATCH_TO_PENDING] = BATCH_PENDING,
                        [BATCH_TO_UPDATE] = BATCH_UPDATING,
                        [BATCH_END] = BATCH_DONE},
};

void batch_event(batch *b, enum batch_event event)
{
    enum batch_state to = next[b->state][event];
    assert(to != BATCH_FILLING);
    b->state = to;
}

/* The same: no event leads to the first state. */
static const unsigned char lookup_next[LOOKUP_STATES][LOOKUP_EVENTS] = {
    [LOOKUP_WAITS] = {[LOOKUP_RUN] = LOOKUP_RUNS,
                      [LOOKUP_DROP] = LOOKUP_TAKEN},
    [LOOKUP_RUNS] = {[LOOKUP_TAKE] = LOOKUP_TAKEN,
                     [LOOKUP_DROP] = LOOKUP_TAKEN},
};

void lookup_event(lookup *l, enum lookup_event event)
{
    const enum lookup_state to = lookup_next[l->state][event];
    assert(to != LOOKUP_WAITS);
    l->state = to;
}

static const unsigned char grad_next[GRAD_STATES][GRAD_EVENTS] = {
    [GRAD_OUT] = {GRAD_PENDING, GRAD_UPDATING, GRAD_APPLIED, GRAD_FAILED,
                  GRAD_DISCARDED, GRAD_REFUSED},
    [GRAD_PENDING] = {GRAD_OUT, GRAD_UPDATING, GRAD_APPLIED, GRAD_FAILED,
                      GRAD_DISCARDED, GRAD_OUT},
    [GRAD_UPDATING] = {GRAD_OUT, GRAD_OUT, GRAD_APPLIED, GRAD_FAILED,
                       GRAD_DISCARDED, GRAD_OUT},
};

void forward_event(forward *f, enum grad_event event)
{
    const enum grad_state to = grad_next[f->state][event];
    assert(to != GRAD_OUT);
    f->state = to;
    if (event == GRAD_UPDATE)
        f->update = 0;
}

int batch_is_taken(const batch *b)
{
    return b->state == BATCH_OUT || b->state == BATCH_READ ||
           b->state == BATCH_PENDING || b->state == BATCH_UPDATING;
}

int batch_may_run(const batch *b)
{
    return b->state == BATCH_AHEAD || batch_is_taken(b);
}

void batch_add_forward(batch *b, uint64_t ticket)
{
    for (size_t i = 0; i < b->forwards_n; i++)
        if (b->forwards[i].ticket == ticket)
            return; /* computed again by a checkpoint */
    if (b->forwards_n == b->forwards_room) {
        size_t room = b->forwards_room ? 2 * b->forwards_room : 4;
        forward *more = realloc(b->forwards, room * sizeof *more);
        if (!more)
            return; /* then it does not count: as ids that were not ours */
        b->forwards = more;
        b->forwards_room = room;
    }
    b->forwards[b->forwards_n++] = (forward){.ticket = ticket};
}

/* What the gradients of its forwards make of the batch. */
static enum batch_event event_of(const batch *b)
{
    enum batch_event event = BATCH_END;
    for (size_t i = 0; i < b->forwards_n; i++) {
        enum grad_state state = b->forwards[i].state;
        if (state == GRAD_UPDATING)
            return BATCH_TO_UPDATE;
        if (state == GRAD_OUT)
            event = BATCH_TO_OUT;
        else if (state == GRAD_PENDING && event == BATCH_END)
            event = BATCH_TO_PENDING;
    }
    return event;
}

void batch_follow(batches *all, batch *b)
{
    enum batch_event event = event_of(b);
    /* A pass that was closed waits for its updates alone. */
    if (event == BATCH_END || (!b->pass->number && event != BATCH_TO_UPDATE))
        batch_end(all, b);
    else
        batch_event(b, event);
}

/* Whether an update has some of its gradients, so that the other ranks need
 * no empty part. */
static int batches_was_updated(const batch *b)
{
    for (size_t i = 0; i < b->forwards_n; i++)
        if (b->forwards[i].state == GRAD_UPDATING ||
            b->forwards[i].state == GRAD_APPLIED ||
            b->forwards[i].state == GRAD_FAILED)
            return 1;
    return 0;
}

void batch_end(batches *all, batch *b)
{
    if (b->state == BATCH_DONE)
        return;
    int handed = b->state == BATCH_ASKED || batch_is_taken(b);
    batch_event(b, BATCH_END);
    all->owed += b->pass->number && b->pass->sync == 2 && handed &&
                 !b->is_end && !batches_was_updated(b);
}

int batch_was_dropped(const batch *b)
{
    for (size_t i = 0; i < b->forwards_n; i++)
        if (b->forwards[i].state == GRAD_FAILED ||
            b->forwards[i].state == GRAD_DISCARDED)
            return 1;
    return 0;
}

forward *batches_find(const batches *all, uint64_t ticket, batch **of)
{
    for (batch *b = all->taken; b; b = b->next)
        for (size_t i = 0; i < b->forwards_n && b->state != BATCH_DONE; i++)
            if (b->forwards[i].ticket == ticket) {
                *of = b;
                return &b->forwards[i];
            }
    return NULL;
}

/* The place of the last batch, if one loop alone trains. */
static uint64_t batches_last_place(const batches *all)
{
    unsigned n = 0;
    for (const pass *t = all->passes; t; t = t->next)
        n += t->number && t->trains;
    return n == 1 ? all->places : 0;
}

forward *batches_adopt(const batches *all, uint64_t ticket, batch **of)
{
    const uint64_t place = batches_last_place(all);
    batch *b = place ? all->taken : NULL;
    while (b && b->place != place)
        b = b->next;
    if (!b || ticket <= b->tickets || !batch_is_taken(b) ||
        b->state == BATCH_READ)
        return NULL;
    batch_add_forward(b, ticket);
    return batches_find(all, ticket, of);
}

uint64_t batches_place(const batches *all, const loop_grad *grads, size_t n)
{
    uint64_t place = 0;
    int found = 0;
    if (n == 0)
        return all->places;
    for (size_t i = 0; i < n; i++) {
        batch *b;
        if (!batches_find(all, grads[i].ticket, &b))
            continue;
        if (found && b->place != place)
            return 0;
        place = b->place;
        found = 1;
    }
    return found ? place : batches_last_place(all);
}

void batch_append(batch **list, batch *b)
{
    while (*list)
        list = &(*list)->next;
    b->next = NULL;
    *list = b;
}

void batch_remove(batch **list, batch *b)
{
    while (*list && *list != b)
        list = &(*list)->next;
    assert(*list == b);
    *list = b->next;
}

/* ---- what makes lookups wait ---- */

/* The one update that was sent with all gradients that may change; 0 if there
 * is none. */
static uint64_t batches_sent_in(const batch *b)
{
    uint64_t update = 0;
    for (size_t i = 0; i < b->forwards_n; i++) {
        const forward *f = &b->forwards[i];
        if (f->state > GRAD_UPDATING)
            continue;
        if (f->state != GRAD_UPDATING || !f->update ||
            (update && f->update != update))
            return 0;
        update = f->update;
    }
    return update;
}

/* Batches that were, or will be, taken before one. */
typedef struct census {
    uint64_t open;   /* whose gradients are not applied */
    int pending;     /* others wait for store.optimizer.step() */
    uint64_t after;  /* ... are all in this update, which the lookups can wait
                        for at the shards; 0: there is none */
    uint64_t behind; /* ... so many */
    uint64_t step;   /* the last step that was counted */
} census;

/* An update in flight: a step of several backwards counts once. */
static void count_update(census *c, const batch *x, int may_follow)
{
    int counted = x->step && x->step == c->step;
    uint64_t update = may_follow ? batches_sent_in(x) : 0;
    c->step = x->step;
    if (update && (!c->after || c->after == update)) {
        c->after = update;
        c->behind += !counted;
    } else {
        c->open += !counted;
    }
}

/* Counts x for the lookups of b.  What another pass has out when the loop
 * asks for b is of the same step: no backward was between them, and a plain
 * loop would read the same rows. */
static void batches_count(census *c, const batch *x, const batch *b)
{
    const int own = x->pass == b->pass, asked = b->state == BATCH_ASKED;
    switch (x->state) {
    case BATCH_DONE:
        break;
    case BATCH_READ: /* the other ranks wait for its empty part */
        c->open += own && x->pass->sync;
        break;
    case BATCH_PENDING:
        c->pending = 1;
        break;
    case BATCH_UPDATING:
        /* What is elsewhere knows nothing of updates of this store. */
        count_update(c, x, !b->pass->staleness && !b->pass->takes);
        break;
    default:
        c->open += own || !asked;
    }
}

static census count_before(const batches *all, const batch *b)
{
    census c = {0};
    for (const batch *x = all->taken; x && x != b; x = x->next)
        batches_count(&c, x, b);
    if (b->state == BATCH_ASKED)
        return c;
    for (const batch *x = b->pass->queue; x != b; x = x->next)
        batches_count(&c, x, b);
    return c;
}

enum batch_wait batches_why_wait(const batches *all, const batch *b)
{
    const pass *t = b->pass;
    const int asked = b->state == BATCH_ASKED;
    if (b->state == BATCH_FILLING)
        return BATCH_IS_FILLED;
    /* In steps: how many optimizer steps are before it is not known. */
    if (!asked && (t->sync == 1 || t->here))
        return BATCH_NOT_ASKED;
    if (t->sync && all->owed + all->paying)
        return BATCH_AWAITS_PART;
    census c = count_before(all, b);
    /* Pending gradients may be the last of their step; when the loop asks,
     * they are not. */
    uint64_t n = c.open + (uint64_t)(c.pending && !asked);
    return n > t->staleness ? BATCH_BOUND : BATCH_MAY_START;
}

void batches_start(const batches *all, batch *b)
{
    census c = count_before(all, b);
    b->after = c.after;
    b->seen = all->trained + c.behind;
    b->began = all->clock;
    b->strays = all->strays;
    batch_event(b, BATCH_ALLOW);
}

/* Batches other than b that are taken, with an update that is not through or
 * that ended after `since`. */
static uint64_t batches_updated_since(const batches *all, const batch *b,
                                      uint64_t since)
{
    census c = {0};
    for (const batch *x = all->taken; x; x = x->next) {
        if (x == b)
            continue;
        if (x->state == BATCH_UPDATING)
            count_update(&c, x, 0);
        else if (x->state != BATCH_DONE)
            c.open += x->trained > since;
    }
    return c.open;
}

uint64_t batches_missed(const batches *all, const batch *b)
{
    uint64_t n = all->trained + batches_updated_since(all, b, b->began);
    return n > b->seen ? n - b->seen : 0; /* less: an update failed */
}

uint64_t batches_missed_now(const batches *all, const batch *b)
{
    return batches_updated_since(all, b, all->clock);
}

int batches_missed_strays(const batches *all, const batch *b)
{
    return !b->pass->staleness && b->strays != all->strays;
}

int batches_update_before(const batches *all, const batch *b)
{
    for (const batch *x = all->taken; x && x != b; x = x->next)
        if (x->state == BATCH_UPDATING)
            return 1;
    return 0;
}
