/* prefetch.c: lookups of the next batches, under a bound on their staleness.
 *
 * One lock guards everything here; lookups run without it.  The memory of a
 * lookup belongs to its batch's `owner`, which is released without the lock
 * and only on threads of the user: it may be a Python tensor.
 */
#include "store/prefetch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "client/client.h"
#include "store/batches.h"

struct ahead {
    store *s;
    sched *pool; /* of the jobs */
    _Atomic(unsigned) streams_n; /* written under the lock */
    pthread_mutex_t lock; /* guards all below and all streams */
    pthread_cond_t moved; /* a lookup or an update ended */
    stream *streams;
    uint64_t numbers;  /* the last one given to a stream */
    unsigned owed;     /* empty parts of steps that nobody has sent */
    unsigned paying;   /* ... that are under way */
    lookup *garbage;   /* owners to be released without the lock */
    store_prefetch_stats stats;
};

/* ---- life ---- */

int prefetch_create(store *s, unsigned threads, ahead **out)
{
    ahead *a = calloc(1, sizeof *a);
    *out = a;
    if (!a)
        return err_set(PERSIA_ENOMEM, "no memory for a store");
    a->s = s;
    pthread_mutex_init(&a->lock, NULL);
    cond_init(&a->moved);
    return sched_create_background(1, threads, &a->pool);
}

/* Ends a call: leaves the lock and releases what it threw away. */
static void leave(ahead *a)
{
    lookup *l = a->garbage;
    a->garbage = NULL;
    pthread_mutex_unlock(&a->lock);
    while (l) {
        lookup *next = l->next;
        if (l->want.owner)
            l->want.release(l->want.owner);
        future_destroy(l->done);
        free(l);
        l = next;
    }
}

static void batch_free(ahead *a, batch *b)
{
    while (b->lookups) {
        lookup *l = b->lookups;
        b->lookups = l->next;
        l->next = a->garbage;
        a->garbage = l;
    }
    free(b->forwards);
    free(b);
}

/* Frees closed batches and streams that nobody uses; only on threads of the
 * user. */
static void sweep(ahead *a)
{
    for (stream **of = &a->streams; *of;) {
        stream *t = *of;
        for (batch **at = &t->batches; *at;) {
            batch *b = *at;
            if (b->closed && b->users == 0) {
                *at = b->next;
                batch_free(a, b);
            } else {
                at = &b->next;
            }
        }
        if (t->number || t->batches || t->waiters) {
            of = &t->next;
        } else {
            *of = t->next;
            free(t);
            atomic_fetch_sub(&a->streams_n, 1);
        }
    }
}

static void end_of_call(ahead *a)
{
    sweep(a);
    leave(a);
}

static stream *find_stream(ahead *a, uint64_t number)
{
    for (stream *t = a->streams; t; t = t->next)
        if (number && t->number == number)
            return t;
    return NULL;
}

/* A batch that is open, and its stream (`in` may be NULL). */
static batch *find_batch(ahead *a, uint64_t number, stream **in)
{
    for (stream *t = a->streams; t; t = t->next)
        for (batch *b = t->batches; b; b = b->next)
            if (b->number == number && !b->closed) {
                if (in)
                    *in = t;
                return b;
            }
    return NULL;
}

/* ---- lookups ---- */

static int look_up(store *s, const store_lookup *l, uint64_t after)
{
    return worker_forward(store_worker(s), l->plan, &l->batch, after, l->out,
                          l->stride, l->rows, l->index);
}

/* Runs a lookup that waits; the lock is left meanwhile. */
static void run(ahead *a, batch *b, lookup *l)
{
    const uint64_t after = b->after;
    l->at = STARTED;
    b->users++;
    pthread_mutex_unlock(&a->lock);
    int rc = look_up(a->s, &l->want, after);
    if (rc == PERSIA_ELOST) { /* it may be that nobody wants this lookup */
        store_keep_error(a->s, rc);
        rc = look_up(a->s, &l->want, after);
    }
    future_complete(l->done, rc);
    pthread_mutex_lock(&a->lock);
    b->users--;
    pthread_cond_broadcast(&a->moved);
}

static lookup *waiting(batch *b)
{
    lookup *l = b->started && !b->closed ? b->lookups : NULL;
    while (l && l->at != WAITING)
        l = l->next;
    return l;
}

/* A background job: everything that may run and does not yet. */
static void lookup_job(void *ctx)
{
    ahead *a = ctx;
    pthread_mutex_lock(&a->lock);
    for (stream *t = a->streams; t;) {
        batch *b = t->batches;
        while (b && !waiting(b))
            b = b->next;
        if (b) {
            run(a, b, waiting(b));
            t = a->streams; /* all may have changed */
        } else {
            t = t->next;
        }
    }
    pthread_mutex_unlock(&a->lock);
}

/* ---- permits ---- */

/* Starts what may start, in order; the loop waits for `asked` (or NULL). */
static void advance(ahead *a, stream *t, const batch *asked)
{
    if (t->sync && a->owed + a->paying)
        return; /* the step that these belong to is not applied */
    for (batch *b = t->batches; b; b = b->next) {
        if (b->started || b->closed)
            continue;
        /* In steps: who knows how many optimizer steps are to come? */
        if ((t->sync == 1 || t->here) && b != asked)
            return;
        earlier e = stream_look_before(t, b);
        uint64_t n = e.open + (e.held && b != asked);
        if (!b->ready || n > t->staleness)
            return;
        b->started = 1;
        b->after = e.after;
        if (!b->lookups)
            continue;
        uint64_t top = STORE_STALENESS_BUCKETS - 1;
        a->stats.staleness[n < top ? n : top]++;
        /* Without memory for a job the forward itself looks up. */
        for (lookup *l = b->lookups; l && !t->here; l = l->next)
            sched_submit(a->pool, lookup_job, a);
    }
}

/* A batch is not open any more.  On threads of the user store_pay() must
 * follow, without the lock. */
static void batch_close(ahead *a, const stream *t, batch *b)
{
    if (b->closed)
        return;
    b->closed = 1;
    a->owed += t->number && t->sync == 2 && b->handed && !b->updated;
}

static void advance_all(ahead *a)
{
    for (stream *t = a->streams; t; t = t->next)
        advance(a, t, NULL);
}

/* The gradients of b's forwards that are still out are refused from now on;
 * b is closed unless other gradients of it wait.  1 if it is closed. */
static int refuse(ahead *a, const stream *t, batch *b)
{
    int waits = 0;
    for (size_t i = 0; i < b->forwards_n; i++) {
        forward *f = &b->forwards[i];
        if (f->at == OUT)
            f->at = store_refuse(a->s, f->ticket) ? ENDED : HELD;
        waits |= f->at != ENDED;
    }
    if (!waits)
        batch_close(a, t, b);
    return !waits;
}

/* A forward that still counts, by its ticket, and its batch. */
static forward *find_forward(ahead *a, uint64_t ticket, stream **in,
                             batch **of)
{
    for (stream *t = a->streams; t; t = t->next)
        for (batch *b = t->batches; b; b = b->next)
            for (size_t i = 0; i < b->forwards_n && !b->closed; i++)
                if (b->forwards[i].ticket == ticket) {
                    *in = t;
                    *of = b;
                    return &b->forwards[i];
                }
    return NULL;
}

static int nobody_looks_ahead(ahead *a)
{
    return atomic_load_explicit(&a->streams_n, memory_order_acquire) == 0;
}

void prefetch_pending(ahead *a, uint64_t ticket)
{
    if (nobody_looks_ahead(a))
        return;
    pthread_mutex_lock(&a->lock);
    stream *t;
    batch *b;
    forward *f = find_forward(a, ticket, &t, &b);
    if (f && f->at == OUT)
        f->at = HELD;
    advance_all(a);
    end_of_call(a);
}

void prefetch_applying(ahead *a, const store_grad *held, size_t n,
                    uint64_t number)
{
    if (nobody_looks_ahead(a))
        return;
    pthread_mutex_lock(&a->lock);
    for (size_t i = 0; i < n; i++) {
        stream *t;
        batch *b;
        forward *f = find_forward(a, held[i].ticket, &t, &b);
        if (f) {
            f->at = APPLYING;
            f->update = number;
            b->updated = 1;
        }
    }
    if (number)
        advance_all(a);
    pthread_mutex_unlock(&a->lock);
}

int prefetch_allows(ahead *a, const store_grad *held, size_t n)
{
    if (nobody_looks_ahead(a))
        return 0;
    int all = 1;
    stream *t;
    pthread_mutex_lock(&a->lock);
    for (t = a->streams; t; t = t->next)
        all &= !t->number || (t->staleness > 0 && !t->here);
    for (size_t i = 0; i < n && all; i++) {
        batch *b;
        all = find_forward(a, held[i].ticket, &t, &b) != NULL;
    }
    pthread_mutex_unlock(&a->lock);
    return all;
}

void prefetch_tidy(ahead *a)
{
    if (nobody_looks_ahead(a))
        return;
    pthread_mutex_lock(&a->lock);
    end_of_call(a);
}

void prefetch_ended(ahead *a, const store_grad *held, size_t n, int applied)
{
    if (nobody_looks_ahead(a))
        return;
    pthread_mutex_lock(&a->lock);
    for (size_t i = 0; i < n; i++) {
        stream *t;
        batch *b;
        forward *f = find_forward(a, held[i].ticket, &t, &b);
        if (!f)
            continue;
        f->at = ENDED;
        b->dropped |= !applied;
        int all = 1;
        for (size_t k = 0; k < b->forwards_n; k++)
            all &= b->forwards[k].at == ENDED;
        if (all)
            batch_close(a, t, b);
        a->stats.dropped += (uint64_t)(all && b->dropped);
    }
    pthread_cond_broadcast(&a->moved);
    advance_all(a);
    pthread_mutex_unlock(&a->lock);
}

void prefetch_forget(ahead *a)
{
    pthread_mutex_lock(&a->lock);
    for (stream *t = a->streams; t; t = t->next)
        for (batch *b = t->batches; b; b = b->next) {
            for (lookup *l = b->lookups; l; l = l->next)
                if (l->at == STARTED)
                    l->at = TAKEN; /* by nobody */
            b->after = 0;
            if (b->forwards_n && !b->closed)
                refuse(a, t, b);
        }
    advance_all(a);
    end_of_call(a);
}

/* ---- steps of all ranks ---- */

static int ended(void)
{
    return err_set(PERSIA_ECLOSED, "this pass of the data loader has ended");
}

int store_pass_sync(store *s, uint64_t number, int by_batch)
{
    ahead *a = store_prefetch(s);
    pthread_mutex_lock(&a->lock);
    stream *t = find_stream(a, number);
    if (t)
        t->sync = by_batch ? 2 : 1;
    pthread_mutex_unlock(&a->lock);
    return t ? PERSIA_OK : ended();
}

void prefetch_owe(ahead *a)
{
    pthread_mutex_lock(&a->lock);
    a->owed++;
    pthread_mutex_unlock(&a->lock);
}

unsigned prefetch_owed(ahead *a)
{
    pthread_mutex_lock(&a->lock);
    unsigned n = a->owed;
    a->paying += n;
    a->owed = 0;
    pthread_mutex_unlock(&a->lock);
    return n;
}

void prefetch_paid(ahead *a)
{
    pthread_mutex_lock(&a->lock);
    a->paying--;
    pthread_cond_broadcast(&a->moved);
    advance_all(a);
    pthread_mutex_unlock(&a->lock);
}

/* ---- streams ---- */

int store_pass_open(store *s, uint64_t staleness, int here, uint64_t *number)
{
    ahead *a = store_prefetch(s);
    int rc = store_settle(s);
    if (rc)
        return rc;
    stream *t = calloc(1, sizeof *t);
    if (!t)
        return err_set(PERSIA_ENOMEM, "no memory for a data loader");
    pthread_mutex_lock(&a->lock);
    t->staleness = staleness;
    t->here = here && !client_is_remote(store_client(s));
    *number = t->number = ++a->numbers;
    t->next = a->streams;
    a->streams = t;
    atomic_fetch_add(&a->streams_n, 1);
    leave(a);
    return PERSIA_OK;
}

static int in_use(const stream *t)
{
    for (const batch *b = t->batches; b; b = b->next)
        if (b->users)
            return 1;
    return 0;
}

/* What is used is freed later; the lock is held. */
static void close_stream(stream *t)
{
    t->number = 0;
    for (batch *b = t->batches; b; b = b->next)
        b->closed = 1;
}

void store_pass_close(store *s, uint64_t number)
{
    ahead *a = store_prefetch(s);
    pthread_mutex_lock(&a->lock);
    stream *t = find_stream(a, number);
    if (t) {
        close_stream(t);
        t->waiters++; /* nobody frees it meanwhile */
        /* Lookups in this process end soon; others may wait for a server. */
        while (!client_is_remote(store_client(s)) && in_use(t))
            pthread_cond_wait(&a->moved, &a->lock);
        t->waiters--;
    }
    end_of_call(a);
}

void prefetch_destroy(ahead *a)
{
    if (!a)
        return;
    pthread_mutex_lock(&a->lock);
    for (stream *t = a->streams; t; t = t->next)
        close_stream(t);
    pthread_mutex_unlock(&a->lock);
    sched_destroy(a->pool); /* its jobs find nothing any more */
    pthread_mutex_lock(&a->lock);
    end_of_call(a);
    pthread_cond_destroy(&a->moved);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

uint64_t store_batch_number(void)
{
    static _Atomic(uint64_t) last;
    return atomic_fetch_add(&last, 1) + 1;
}

int store_batch_add(store *s, uint64_t in, uint64_t number)
{
    ahead *a = store_prefetch(s);
    batch *b = calloc(1, sizeof *b);
    if (!b)
        return err_set(PERSIA_ENOMEM, "no memory to look ahead");
    pthread_mutex_lock(&a->lock);
    stream *t = find_stream(a, in);
    if (t) {
        b->number = number;
        batch **end = &t->batches;
        while (*end)
            end = &(*end)->next;
        *end = b;
    }
    end_of_call(a);
    if (t)
        return PERSIA_OK;
    free(b);
    return ended();
}

int store_batch_lookup(store *s, uint64_t number, const store_lookup *want)
{
    ahead *a = store_prefetch(s);
    lookup *l = calloc(1, sizeof *l);
    if (!l)
        return err_set(PERSIA_ENOMEM, "no memory to look ahead");
    int rc = future_create(&l->done);
    if (rc)
        goto fail;
    l->want = *want;
    pthread_mutex_lock(&a->lock);
    batch *b = find_batch(a, number, NULL);
    if (b && !b->ready) {
        lookup **end = &b->lookups;
        while (*end)
            end = &(*end)->next;
        *end = l;
    } else {
        rc = ended();
    }
    leave(a);
    if (rc == PERSIA_OK)
        return PERSIA_OK;
    future_destroy(l->done);
fail:
    free(l);
    return rc;
}

void store_batch_ready(store *s, uint64_t number)
{
    ahead *a = store_prefetch(s);
    pthread_mutex_lock(&a->lock);
    stream *t;
    batch *b = find_batch(a, number, &t);
    if (b) {
        b->ready = 1;
        advance(a, t, NULL);
    }
    leave(a);
}

/* ---- the loop ---- */

/* Earlier batches that were only read are done when the loop goes on. */
static void close_read(ahead *a, stream *t, const batch *last)
{
    for (batch *b = t->batches; b != last; b = b->next)
        if (!b->closed && b->forwards_n == 0 && (b->reading || b->read)) {
            batch_close(a, t, b);
            a->stats.read++;
        }
}

/* Makes room for `last`: 1 if a batch was given up, 0 if one must wait for
 * an update that is being applied. */
static int make_room(ahead *a, stream *t, const batch *last)
{
    if (t->sync && a->owed + a->paying)
        return 0;
    for (batch *b = t->batches; b != last; b = b->next)
        if (!b->closed && batch_is_applying(b))
            return 0;
    for (batch *b = t->batches; b != last; b = b->next) {
        if (b->closed || b->reading || batch_is_held(b))
            continue;
        int some = 0; /* gradients came already */
        for (size_t i = 0; i < b->forwards_n; i++)
            some |= b->forwards[i].at != OUT;
        if (refuse(a, t, b) && !some)
            a->stats.abandoned++;
        return 1;
    }
    return 0;
}

int store_batch_next(store *s, uint64_t number, int reading)
{
    ahead *a = store_prefetch(s);
    int rc = store_error(s);
    if (rc)
        return rc;
    pthread_mutex_lock(&a->lock);
    stream *t;
    batch *b = find_batch(a, number, &t);
    if (b && !b->handed) {
        b->handed = 1;
        b->reading = reading;
        a->stats.batches++;
        close_read(a, t, b);
        advance(a, t, b);
        a->stats.waited += (uint64_t)(!b->started || stream_is_behind(t, b));
    }
    while (rc == PERSIA_OK && b && (!b->started || stream_is_behind(t, b))) {
        int room = !b->started && make_room(a, t, b);
        if (a->owed) {
            pthread_mutex_unlock(&a->lock);
            rc = store_pay(s);
            pthread_mutex_lock(&a->lock);
        } else if (!room) {
            rc = cond_wait_poll(&a->moved, &a->lock, UINT64_MAX);
        }
        b = find_batch(a, number, &t); /* the stream may have been closed */
        if (b)
            advance(a, t, b);
    }
    if (b)
        advance(a, t, NULL); /* with b handed out, others may follow */
    else if (rc == PERSIA_OK)
        rc = ended();
    end_of_call(a);
    if (!rc)
        rc = store_pay(s);
    return rc ? rc : store_error(s); /* of an update that it waited for */
}

void store_batch_skip(store *s, uint64_t number)
{
    ahead *a = store_prefetch(s);
    pthread_mutex_lock(&a->lock);
    stream *t;
    batch *b = find_batch(a, number, &t);
    if (b) {
        refuse(a, t, b);
        a->stats.skipped++;
        advance(a, t, NULL);
    }
    end_of_call(a);
    store_pay(s);
}

/* ---- forwards ---- */

void store_batch_bind(store *s, uint64_t number, uint64_t ticket)
{
    ahead *a = store_prefetch(s);
    if (!number || nobody_looks_ahead(a))
        return;
    pthread_mutex_lock(&a->lock);
    batch *b = find_batch(a, number, NULL);
    if (b && ticket)
        batch_add_forward(b, ticket);
    else if (b)
        b->read = 1;
    leave(a);
}

int store_batch_take(store *s, uint64_t number, uint32_t plan, void **owner)
{
    *owner = NULL;
    ahead *a = store_prefetch(s);
    if (nobody_looks_ahead(a))
        return PERSIA_OK;
    int rc = PERSIA_OK;
    pthread_mutex_lock(&a->lock);
    batch *b = number ? find_batch(a, number, NULL) : NULL;
    lookup *l = b && b->started ? b->lookups : NULL;
    while (l && (l->want.plan != plan || l->at == TAKEN))
        l = l->next;
    if (l) {
        b->users++;
        if (l->at == WAITING)
            run(a, b, l);
        pthread_mutex_unlock(&a->lock);
        rc = future_wait(l->done, 0);
        pthread_mutex_lock(&a->lock);
        b->users--;
        if (rc == PERSIA_OK && l->at == TAKEN)
            l = NULL; /* by another thread meanwhile */
    }
    if (l && rc == PERSIA_OK) {
        l->at = TAKEN;
        *owner = l->want.owner;
        l->want.owner = NULL;
    }
    a->stats.prefetched += (uint64_t)(l && !rc);
    a->stats.not_prefetched += (uint64_t)!l;
    pthread_cond_broadcast(&a->moved); /* for close_stream() */
    end_of_call(a);
    return rc;
}

void store_get_prefetch_stats(store *s, store_prefetch_stats *out)
{
    ahead *a = store_prefetch(s);
    pthread_mutex_lock(&a->lock);
    *out = a->stats;
    leave(a);
}
