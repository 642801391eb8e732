/* prefetch.c: lookups of the next batches, under a bound on their staleness.
 *
 * One lock guards everything here; lookups run without it.  The memory of a
 * lookup belongs to its batch's `owner`, which is released without the lock
 * and only on threads of the user: it may be a Python tensor.  What a `take`
 * gives is not, and a worker waits for it: its last user releases it.
 */
#include "loop/prefetch_private.h"

#include <assert.h>
#include <stdlib.h>

#include "client/client.h"
#include "trace/trace.h"

/* ---- life ---- */

int prefetch_create(loop *s, unsigned threads, prefetch **out)
{
    prefetch *p = calloc(1, sizeof *p);
    *out = p;
    if (!p)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    p->s = s;
    pthread_mutex_init(&p->lock, NULL);
    persia_cond_init(&p->moved);
    return persia_sched_create_background(1, threads, &p->jobs);
}

/* Ends a call: leaves the lock and releases what it threw away. */
void prefetch_leave(prefetch *p)
{
    lookup *l = p->garbage;
    p->garbage = NULL;
    pthread_mutex_unlock(&p->lock);
    while (l) {
        lookup *next = l->next;
        if (l->want.owner)
            l->want.release(l->want.owner);
        persia_future_destroy(l->done);
        free(l);
        l = next;
    }
}

static void batch_free(prefetch *p, batch *b)
{
    assert(b->state == BATCH_DONE && !b->users && b->pass->batches);
    while (b->lookups) {
        lookup *l = b->lookups;
        b->lookups = l->next;
        l->next = p->garbage;
        p->garbage = l;
    }
    b->pass->batches--;
    free(b->forwards);
    free(b);
}

static void sweep_batches(prefetch *p, batch **at)
{
    while (*at) {
        batch *b = *at;
        if (b->state == BATCH_DONE && b->users == 0) {
            *at = b->next;
            batch_free(p, b);
        } else {
            at = &b->next;
        }
    }
}

/* Frees batches and passes that ended and that nothing uses; only on threads
 * of the user. */
static void prefetch_sweep(prefetch *p)
{
    sweep_batches(p, &p->all.taken);
    for (pass **at = &p->all.passes; *at;) {
        pass *t = *at;
        sweep_batches(p, &t->queue);
        if (t->number || t->batches || t->waiters) {
            at = &t->next;
        } else {
            assert(!t->queue);
            *at = t->next;
            free(t);
            atomic_fetch_sub(&p->passes, 1);
        }
    }
}

void prefetch_end(prefetch *p)
{
    prefetch_sweep(p);
    prefetch_leave(p);
}

static pass *find_pass(prefetch *p, uint64_t number)
{
    pass *t = number ? p->all.passes : NULL;
    while (t && t->number != number)
        t = t->next;
    return t;
}

static batch *prefetch_find_in(batch *list, uint64_t number)
{
    while (list && (list->number != number || list->state == BATCH_DONE))
        list = list->next;
    return list;
}

/* A batch that has not ended. */
batch *prefetch_find(prefetch *p, uint64_t number)
{
    batch *b = prefetch_find_in(p->all.taken, number);
    for (pass *t = p->all.passes; t && !b; t = t->next)
        b = prefetch_find_in(t->queue, number);
    return b;
}

int prefetch_is_idle(prefetch *p)
{
    return atomic_load_explicit(&p->passes, memory_order_acquire) == 0;
}

/* ---- lookups ---- */

/* A take that ends after its batch: no call of the user may follow. */
static void prefetch_release_late(prefetch *p, batch *b, lookup *l)
{
    void *owner = l->want.owner;
    void (*release)(void *) = l->want.release;
    if (!l->want.take || !owner || b->state != BATCH_DONE || b->users)
        return;
    l->want.owner = NULL;
    pthread_mutex_unlock(&p->lock); /* b and l may be freed now */
    release(owner);
    pthread_mutex_lock(&p->lock);
}

/* Runs a lookup that waits; the lock is left meanwhile. */
void prefetch_run(prefetch *p, batch *b, lookup *l)
{
    const uint64_t after = b->after, asked = persia_trace_now();
    lookup_event(l, LOOKUP_RUN);
    b->users++;
    pthread_mutex_unlock(&p->lock);
    int rc = loop_look_up(p->s, &l->want, after);
    if (client_is_loss(rc)) { /* it may be that no caller wants this lookup */
        loop_keep_error(p->s, rc);
        rc = loop_look_up(p->s, &l->want, after);
    }
    pthread_mutex_lock(&p->lock);
    assert(b->users && l->state != LOOKUP_WAITS);
    if (asked) {
        b->times.asked = b->times.asked ? b->times.asked : asked;
        b->times.found = persia_clock_ns();
    }
    b->users--; /* before the loop can end the batch */
    persia_future_complete(l->done, rc);
    pthread_cond_broadcast(&p->moved);
    prefetch_release_late(p, b, l);
}

static lookup *prefetch_waiting(batch *b)
{
    lookup *l = batch_may_run(b) ? b->lookups : NULL;
    while (l && l->state != LOOKUP_WAITS)
        l = l->next;
    return l;
}

static batch *prefetch_with_lookup(prefetch *p)
{
    for (batch *b = p->all.taken; b; b = b->next)
        if (prefetch_waiting(b))
            return b;
    for (pass *t = p->all.passes; t; t = t->next)
        for (batch *b = t->queue; b; b = b->next)
            if (prefetch_waiting(b))
                return b;
    return NULL;
}

/* A background job: everything that may run and does not yet. */
static void lookup_job(void *ctx)
{
    prefetch *p = ctx;
    pthread_mutex_lock(&p->lock);
    for (batch *b; (b = prefetch_with_lookup(p));)
        prefetch_run(p, b, prefetch_waiting(b));
    pthread_mutex_unlock(&p->lock);
}

/* ---- permits ---- */

static void prefetch_start(prefetch *p, batch *b)
{
    batches_start(&p->all, b);
    p->stats.started += b->lookups != NULL;
    /* Without memory for a job the forward itself looks up. */
    for (lookup *l = b->lookups; l && !b->pass->here; l = l->next)
        persia_sched_submit(p->jobs, lookup_job, p);
}

/* Starts what may start, of each pass in order. */
static void prefetch_advance(prefetch *p)
{
    for (batch *b = p->all.taken; b; b = b->next)
        if (b->state == BATCH_ASKED &&
            batches_why_wait(&p->all, b) == BATCH_MAY_START)
            prefetch_start(p, b);
    for (pass *t = p->all.passes; t; t = t->next)
        for (batch *b = t->queue; b; b = b->next) {
            if (b->state == BATCH_AHEAD || b->state == BATCH_DONE)
                continue;
            if (batches_why_wait(&p->all, b) != BATCH_MAY_START)
                break;
            prefetch_start(p, b);
        }
    pthread_cond_broadcast(&p->moved);
}

/* The gradients of b's forwards that are still out are refused from now on;
 * b ends unless other gradients of it wait.  1 if it has ended. */
static int prefetch_refuse(prefetch *p, batch *b)
{
    for (size_t i = 0; i < b->forwards_n; i++) {
        forward *f = &b->forwards[i];
        if (f->state == GRAD_OUT)
            forward_event(f, loop_refuse(p->s, f->ticket) ? GRAD_REFUSE
                                                          : GRAD_PEND);
    }
    if (b->forwards_n)
        batch_follow(&p->all, b);
    else
        batch_end(&p->all, b);
    return b->state == BATCH_DONE;
}

void prefetch_pending(prefetch *p, uint64_t ticket)
{
    if (prefetch_is_idle(p))
        return;
    pthread_mutex_lock(&p->lock);
    batch *b;
    forward *f = batches_find(&p->all, ticket, &b);
    if (!f)
        f = batches_adopt(&p->all, ticket, &b);
    if (f && f->state == GRAD_OUT) {
        forward_event(f, GRAD_PEND);
        batch_follow(&p->all, b);
    }
    prefetch_advance(p);
    prefetch_end(p);
}

uint64_t prefetch_place(prefetch *p, const loop_grad *grads, size_t n)
{
    if (n && prefetch_is_idle(p))
        return 0;
    pthread_mutex_lock(&p->lock);
    uint64_t place = batches_place(&p->all, grads, n);
    pthread_mutex_unlock(&p->lock);
    return place;
}

void prefetch_renumber(prefetch *p, uint64_t last)
{
    pthread_mutex_lock(&p->lock);
    p->all.places = last;
    pthread_mutex_unlock(&p->lock);
}

void prefetch_updating(prefetch *p, const loop_grad *grads, size_t n,
                       int step)
{
    if (prefetch_is_idle(p))
        return;
    pthread_mutex_lock(&p->lock);
    p->all.steps += step != 0;
    for (size_t i = 0; i < n; i++) {
        batch *b;
        forward *f = batches_find(&p->all, grads[i].ticket, &b);
        if (!f)
            continue;
        forward_event(f, GRAD_UPDATE);
        b->step = step ? p->all.steps : 0;
        batch_follow(&p->all, b);
    }
    pthread_mutex_unlock(&p->lock);
}

int prefetch_sending(prefetch *p, const loop_grad *grads, size_t n,
                     uint64_t number, batch_times *times)
{
    int taken = 0;
    *times = (batch_times){0};
    if (prefetch_is_idle(p))
        return 0;
    pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < n; i++) {
        batch *b;
        forward *f = batches_find(&p->all, grads[i].ticket, &b);
        if (!f)
            continue;
        f->update = number;
        taken |= b->pass->takes;
        *times = b->times;
    }
    prefetch_advance(p);
    pthread_mutex_unlock(&p->lock);
    return taken;
}

int prefetch_allows(prefetch *p, const loop_grad *grads, size_t n)
{
    if (prefetch_is_idle(p))
        return 0;
    int all = 1;
    pthread_mutex_lock(&p->lock);
    for (const pass *t = p->all.passes; t; t = t->next)
        all &= !t->number || (t->staleness > 0 && !t->here);
    for (size_t i = 0; i < n && all; i++) {
        batch *b;
        all = batches_find(&p->all, grads[i].ticket, &b) != NULL;
    }
    pthread_mutex_unlock(&p->lock);
    return all;
}

void prefetch_tidy(prefetch *p)
{
    if (prefetch_is_idle(p))
        return;
    pthread_mutex_lock(&p->lock);
    prefetch_end(p);
}

/* Nothing more becomes of these gradients. */
static void prefetch_settle(prefetch *p, const loop_grad *grads, size_t n,
                            enum grad_event event)
{
    if (prefetch_is_idle(p))
        return;
    pthread_mutex_lock(&p->lock);
    uint64_t step = 0;
    p->all.clock += event == GRAD_APPLY;
    for (size_t i = 0; i < n; i++) {
        batch *b;
        forward *f = batches_find(&p->all, grads[i].ticket, &b);
        if (!f) {
            p->all.strays += event != GRAD_DISCARD;
            continue;
        }
        forward_event(f, event);
        if (event == GRAD_APPLY)
            b->trained = p->all.clock;
        batch_follow(&p->all, b);
        if (b->state != BATCH_DONE)
            continue;
        p->stats.dropped += (uint64_t)batch_was_dropped(b);
        if (b->trained && (!b->step || b->step != step))
            p->all.trained++;
        step = b->step;
    }
    prefetch_advance(p);
    pthread_mutex_unlock(&p->lock);
}

void prefetch_updated(prefetch *p, const loop_grad *grads, size_t n,
                      int applied)
{
    prefetch_settle(p, grads, n, applied ? GRAD_APPLY : GRAD_FAIL);
}

void prefetch_discarded(prefetch *p, const loop_grad *grads, size_t n)
{
    prefetch_settle(p, grads, n, GRAD_DISCARD);
}

static void loop_prefetch_forget(prefetch *p, batch *list)
{
    for (batch *b = list; b; b = b->next) {
        for (lookup *l = b->lookups; l; l = l->next)
            if (l->state == LOOKUP_RUNS)
                lookup_event(l, LOOKUP_DROP);
        b->after = 0;
        if (b->forwards_n && b->state != BATCH_DONE)
            prefetch_refuse(p, b);
    }
}

void prefetch_forget(prefetch *p)
{
    pthread_mutex_lock(&p->lock);
    loop_prefetch_forget(p, p->all.taken);
    for (pass *t = p->all.passes; t; t = t->next)
        loop_prefetch_forget(p, t->queue);
    prefetch_advance(p);
    prefetch_end(p);
}

/* ---- steps of all ranks ---- */

static int prefetch_ended(void)
{
    return persia_err_set(PERSIA_ECLOSED,
                          "this pass of the data loader has ended");
}

int persia_loop_pass_sync(loop *s, uint64_t number, int by_batch)
{
    prefetch *p = loop_prefetch(s);
    pthread_mutex_lock(&p->lock);
    pass *t = find_pass(p, number);
    if (t)
        t->sync = by_batch ? 2 : 1;
    pthread_mutex_unlock(&p->lock);
    return t ? PERSIA_OK : prefetch_ended();
}

void prefetch_owe(prefetch *p)
{
    pthread_mutex_lock(&p->lock);
    p->all.owed++;
    pthread_mutex_unlock(&p->lock);
}

unsigned prefetch_owed(prefetch *p)
{
    pthread_mutex_lock(&p->lock);
    unsigned n = p->all.owed;
    p->all.paying += n;
    p->all.owed = 0;
    pthread_mutex_unlock(&p->lock);
    return n;
}

void prefetch_paid(prefetch *p)
{
    pthread_mutex_lock(&p->lock);
    assert(p->all.paying);
    p->all.paying--;
    prefetch_advance(p);
    pthread_mutex_unlock(&p->lock);
}

/* ---- passes ---- */

int persia_loop_pass_open(loop *s, uint64_t staleness, int here,
                          uint64_t *number)
{
    prefetch *p = loop_prefetch(s);
    int rc = persia_loop_settle(s);
    if (rc)
        return rc;
    pass *t = calloc(1, sizeof *t);
    if (!t)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a data loader");
    pthread_mutex_lock(&p->lock);
    t->staleness = staleness;
    t->here = here && persia_loop_is_embedded(s);
    *number = t->number = ++p->numbers;
    t->next = p->all.passes;
    p->all.passes = t;
    atomic_fetch_add(&p->passes, 1);
    prefetch_leave(p);
    return PERSIA_OK;
}

static int prefetch_in_use(const prefetch *p, const pass *t)
{
    for (const batch *b = t->queue; b; b = b->next)
        if (b->users)
            return 1;
    for (const batch *b = p->all.taken; b; b = b->next)
        if (b->pass == t && b->users)
            return 1;
    return 0;
}

/* Its updates still count until they are through; the lock is held. */
static void close_pass(prefetch *p, pass *t)
{
    t->number = 0;
    for (batch *b = t->queue; b; b = b->next)
        batch_end(&p->all, b);
    for (batch *b = p->all.taken; b; b = b->next)
        if (b->pass == t && b->state != BATCH_UPDATING)
            batch_end(&p->all, b);
}

void persia_loop_pass_close(loop *s, uint64_t number)
{
    prefetch *p = loop_prefetch(s);
    pthread_mutex_lock(&p->lock);
    pass *t = find_pass(p, number);
    if (t) {
        close_pass(p, t);
        prefetch_advance(p);
        t->waiters++; /* it is not freed meanwhile */
        /* Lookups in this process end soon; others may wait for a server. */
        while (persia_loop_is_embedded(s) && prefetch_in_use(p, t))
            persia_cond_wait(&p->moved, &p->lock);
        assert(t->waiters && !t->number);
        t->waiters--;
    }
    prefetch_end(p);
}

void prefetch_destroy(prefetch *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    for (pass *t = p->all.passes; t; t = t->next)
        close_pass(p, t);
    for (batch *b = p->all.taken; b; b = b->next)
        batch_end(&p->all, b);
    pthread_mutex_unlock(&p->lock);
    persia_sched_destroy(p->jobs); /* its jobs find nothing any more */
    pthread_mutex_lock(&p->lock);
    prefetch_end(p);
    assert(!p->all.taken && !p->all.passes);
    pthread_cond_destroy(&p->moved);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

uint64_t persia_loop_batch_number(void)
{
    static _Atomic(uint64_t) last;
    return atomic_fetch_add(&last, 1) + 1;
}

int persia_loop_batch_add(loop *s, uint64_t in, uint64_t number)
{
    prefetch *p = loop_prefetch(s);
    batch *b = calloc(1, sizeof *b);
    if (!b)
        return persia_err_set(PERSIA_ENOMEM, "no memory to look ahead");
    pthread_mutex_lock(&p->lock);
    pass *t = find_pass(p, in);
    if (t) {
        b->number = number;
        b->pass = t;
        b->staleness = -1;
        t->batches++;
        batch_append(&t->queue, b);
    }
    prefetch_end(p);
    if (t)
        return PERSIA_OK;
    free(b);
    return prefetch_ended();
}

int persia_loop_batch_lookup(loop *s, uint64_t number,
                             const loop_lookup *want)
{
    prefetch *p = loop_prefetch(s);
    lookup *l = calloc(1, sizeof *l);
    if (!l)
        return persia_err_set(PERSIA_ENOMEM, "no memory to look ahead");
    int rc = persia_future_create(&l->done);
    if (rc)
        goto fail;
    l->want = *want;
    pthread_mutex_lock(&p->lock);
    batch *b = prefetch_find(p, number);
    if (b && b->state == BATCH_FILLING) {
        lookup **end = &b->lookups;
        while (*end)
            end = &(*end)->next;
        *end = l;
        b->pass->takes |= want->take != NULL;
    } else {
        rc = prefetch_ended();
    }
    prefetch_leave(p);
    if (rc == PERSIA_OK)
        return PERSIA_OK;
    persia_future_destroy(l->done);
fail:
    free(l);
    return rc;
}

void persia_loop_batch_ready(loop *s, uint64_t number)
{
    prefetch *p = loop_prefetch(s);
    pthread_mutex_lock(&p->lock);
    batch *b = prefetch_find(p, number);
    if (b && b->state == BATCH_FILLING) {
        batch_event(b, BATCH_FILL);
        prefetch_advance(p);
    }
    prefetch_leave(p);
}

/* ---- the loop ---- */

/* The loop asks for b: earlier batches of the pass that were only read are
 * done. */
static void prefetch_ask(prefetch *p, batch *b)
{
    for (batch *x = p->all.taken; x; x = x->next)
        if (x->pass == b->pass && x->state == BATCH_READ) {
            batch_end(&p->all, x);
            p->stats.read++;
        }
    batch_event(b, BATCH_ASK);
    batch_remove(&b->pass->queue, b);
    batch_append(&p->all.taken, b);
    p->stats.batches++;
    prefetch_advance(p);
}

/* Whether the loop must wait for b: for its lookups to be allowed, and in a
 * synchronous pass for the updates before it, too. */
static int prefetch_must_wait(const prefetch *p, const batch *b)
{
    return b->state == BATCH_ASKED ||
           (!b->pass->staleness && batches_update_before(&p->all, b));
}

/* Makes room for a batch that the loop waits for: 1 if one before it was
 * given up, 0 if it must wait for an update that is being applied. */
static int prefetch_make_room(prefetch *p, const batch *b)
{
    if (b->state != BATCH_ASKED || batches_update_before(&p->all, b) ||
        (b->pass->sync && p->all.owed + p->all.paying))
        return 0;
    for (batch *x = p->all.taken; x != b; x = x->next) {
        if (x->pass != b->pass ||
            (x->state != BATCH_OUT && x->state != BATCH_ASKED))
            continue;
        int some = 0; /* gradients are there already */
        for (size_t i = 0; i < x->forwards_n; i++)
            some |= x->forwards[i].state != GRAD_OUT;
        if (prefetch_refuse(p, x) && !some)
            p->stats.abandoned++;
        return 1;
    }
    return 0;
}

/* The loop has the batch, which it may have ended meanwhile. */
static void prefetch_give_place(prefetch *p, uint64_t number)
{
    const uint64_t tickets = loop_last_ticket(p->s);
    pthread_mutex_lock(&p->lock);
    batch *b = prefetch_find(p, number);
    p->all.places++;
    if (b) {
        b->place = p->all.places;
        b->tickets = tickets;
    }
    pthread_mutex_unlock(&p->lock);
}

int persia_loop_batch_next(loop *s, uint64_t number, int reading)
{
    prefetch *p = loop_prefetch(s);
    const uint64_t since = persia_clock_ns();
    int rc = persia_loop_error(s), trains = 0;
    if (rc)
        return rc;
    pthread_mutex_lock(&p->lock);
    batch *b = prefetch_find(p, number);
    if (b && (b->state == BATCH_QUEUED || b->state == BATCH_AHEAD)) {
        prefetch_ask(p, b);
        p->stats.waited += (uint64_t)prefetch_must_wait(p, b);
    }
    while (rc == PERSIA_OK && b && prefetch_must_wait(p, b)) {
        int room = prefetch_make_room(p, b);
        if (p->all.owed) {
            pthread_mutex_unlock(&p->lock);
            rc = loop_pay(s);
            pthread_mutex_lock(&p->lock);
        } else if (!room) {
            rc = persia_cond_wait_poll(&p->moved, &p->lock, UINT64_MAX);
        }
        prefetch_advance(p);
        b = prefetch_find(p, number); /* its pass may have been closed */
    }
    p->stats.waited_ns += persia_clock_ns() - since;
    if (!b && rc == PERSIA_OK)
        rc = prefetch_ended();
    if (b && rc == PERSIA_OK && reading && !b->forwards_n)
        batch_event(b, BATCH_TO_READ);
    if (b && rc == PERSIA_OK)
        trains = b->pass->trains |= !reading;
    prefetch_advance(p); /* with b handed out, others may follow */
    prefetch_end(p);
    if (!rc)
        rc = loop_pay(s);
    if (!rc)
        rc = persia_loop_error(s); /* of an update that it waited for */
    if (!rc && trains) /* what was paid is of batches before it */
        prefetch_give_place(p, number);
    return rc;
}

void persia_loop_batch_skip(loop *s, uint64_t number)
{
    prefetch *p = loop_prefetch(s);
    pthread_mutex_lock(&p->lock);
    batch *b = prefetch_find(p, number);
    if (b) {
        prefetch_refuse(p, b);
        p->stats.skipped++;
        prefetch_advance(p);
    }
    prefetch_end(p);
    loop_pay(s);
}
