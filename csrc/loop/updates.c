/* updates.c: see updates.h.
 *
 * One lock guards the queue.  An update runs without it; when it has ended
 * it waits in `ended` for a thread of the user.
 */
#include "loop/updates.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "loop/batches.h"
#include "loop/prefetch.h"
#include "trace/trace.h"

struct updates {
    loop *s;
    ps_client *c;
    sched *jobs;
    size_t most;  /* constant */
    int named;    /* constant: updates have numbers */
    pthread_mutex_t lock;  /* guards all below */
    pthread_cond_t moved;  /* an update ended */
    update *first, **last; /* that wait */
    update *running;
    update *ended;
    size_t left;   /* waiting or in flight */
    int part_runs; /* a part of a step is in flight */
    int closing;
    client_update name; /* of the last one that was added */
    int counted;   /* its number is no place any more */
    int strict;    /* one without a place is refused */
    /* The first of its kind since it was raised; lost: PERSIA_ELOST, which
     * reports earlier ones. */
    err_kept error, lost;
    loop_counts counts;
};

/* next[state][event]; 0 stands for a blank, for no event leads to NEW. */
static const unsigned char next[UPDATE_STATES][UPDATE_EVENTS] = {
    [UPDATE_NEW] = {[UPDATE_ADD] = UPDATE_QUEUED,
                    [UPDATE_BEGIN] = UPDATE_RUNNING},
    [UPDATE_QUEUED] = {[UPDATE_BEGIN] = UPDATE_RUNNING,
                       [UPDATE_FAIL] = UPDATE_FAILED},
    [UPDATE_RUNNING] = {[UPDATE_APPLY] = UPDATE_APPLIED,
                        [UPDATE_FAIL] = UPDATE_FAILED},
};

/* The only place that changes an update's state; the lock is held, unless
 * the update is of this thread alone. */
static void update_event(update *one, enum update_event event)
{
    enum update_state to = next[one->state][event];
    assert(to != UPDATE_NEW);
    one->state = to;
}

int updates_create(loop *s, ps_client *c, unsigned threads, size_t most,
                   updates **out)
{
    updates *u = calloc(1, sizeof *u);
    *out = u;
    if (!u)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    u->s = s;
    u->c = c;
    u->most = most;
    u->named = !persia_client_is_embedded(c);
    u->name = (client_update){.parts = 1};
    u->last = &u->first;
    pthread_mutex_init(&u->lock, NULL);
    persia_cond_init(&u->moved);
    return persia_sched_create_background(1, threads, &u->jobs);
}

static void update_free(update *one)
{
    loop_release_grads(one->grads, one->n);
    free(one->own);
    free(one);
}

void updates_tidy(updates *u)
{
    pthread_mutex_lock(&u->lock);
    update *one = u->ended;
    u->ended = NULL;
    pthread_mutex_unlock(&u->lock);
    while (one) {
        update *next = one->next;
        update_free(one);
        one = next;
    }
}

void updates_close(updates *u)
{
    pthread_mutex_lock(&u->lock);
    u->closing = 1;
    pthread_mutex_unlock(&u->lock);
}

void updates_destroy(updates *u)
{
    if (!u)
        return;
    updates_close(u);
    persia_sched_destroy(u->jobs);
    assert(!u->first && !u->running && !u->left);
    updates_tidy(u);
    pthread_cond_destroy(&u->moved);
    pthread_mutex_destroy(&u->lock);
    free(u);
}

int updates_make(updates *u, loop_grad *grads, size_t n,
                 const optim_args *optim, uint32_t optim_n, update **out)
{
    *out = NULL;
    update *one = calloc(1, sizeof *one);
    optim_args *args = malloc((optim_n + 1) * sizeof *args);
    int rc = one && args
                 ? PERSIA_OK
                 : persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    for (size_t i = 0; i < n && !rc; i++)
        rc = loop_copy_ids(u->s, &grads[i]);
    if (rc) {
        free(one);
        free(args);
        return rc;
    }
    if (optim_n)
        memcpy(args, optim, optim_n * sizeof *args);
    *one = (update){.grads = grads, .n = n, .optim = args, .optim_n = optim_n,
                    .own = args};
    *out = one;
    return PERSIA_OK;
}

/* An update has run, or will not; the lock is held.  PERSIA_ELOST is about
 * earlier ones. */
static void updates_end(updates *u, update *one, int code)
{
    int applied = code == PERSIA_OK || client_is_loss(code);
    update_event(one, applied ? UPDATE_APPLY : UPDATE_FAIL);
    u->counts.applied += one->state == UPDATE_APPLIED;
    u->counts.failed += one->state == UPDATE_FAILED;
}

/* Keeps this thread's error unless there is one; the lock is held. */
static void loop_updates_keep(updates *u, int code)
{
    err_kept *k = client_is_loss(code) ? &u->lost : &u->error;
    if (!k->code)
        persia_err_keep(k, code);
}

/* The error to raise next, once; the lock is held. */
static err_kept next_kept(updates *u)
{
    err_kept *k = u->error.code ? &u->error : &u->lost, next = *k;
    k->code = PERSIA_OK;
    return next;
}

/* Takes the next one, unless it is a part of a step and the part before it
 * is in flight: shards take them in order.  It stays queued if it is to be
 * dropped. */
static update *updates_take(updates *u)
{
    pthread_mutex_lock(&u->lock);
    update *one = u->first;
    int is_part = one && one->name.parts > 1;
    if (is_part && u->part_runs)
        one = NULL;
    if (one) {
        u->first = one->next;
        if (!u->first)
            u->last = &u->first;
        u->part_runs |= is_part;
        if (!u->closing || !(u->error.code || u->lost.code))
            update_event(one, UPDATE_BEGIN);
        one->next = u->running;
        u->running = one;
    }
    pthread_mutex_unlock(&u->lock);
    return one;
}

static int updates_refuse(updates *u, const update *one)
{
    (void)persia_client_skip(u->c, &one->name);
    return persia_err_set(
        PERSIA_EARG, "after load(resume=\"continue\") an update is "
                     "known by the place of its batch in a persia.DataLoader: "
                     "train inside of its loop, with at most one update a "
                     "batch and one batch an update, or load with "
                     "resume=\"rollback\"");
}

/* The look-ahead is given the end of an update. */
static void updates_report(updates *u, const update *one)
{
    prefetch *p = loop_prefetch(u->s);
    if (one->n)
        prefetch_updated(p, one->grads, one->n, one->state == UPDATE_APPLIED);
    else
        prefetch_paid(p);
}

/* Spans of an update whose batch no embedding worker had. */
static int updates_run_traced(updates *u, update *one,
                              const batch_times *looked)
{
    const uint64_t stream = persia_client_maker(u->c).stream;
    const uint64_t number = one->name.number;
    trace_span whole, lookup, train, apply;
    persia_trace_begin(&whole, TRACE_BATCH, stream, number);
    persia_trace_begin(&apply, TRACE_APPLY, stream, number);
    one->name.trace = apply.at;
    const int rc = loop_run(u->s, one);
    persia_trace_end(&apply, rc);
    if (looked->asked && whole.began) {
        persia_trace_begin(&lookup, TRACE_LOOKUP, stream, number);
        persia_trace_begin(&train, TRACE_TRAIN, stream, number);
        whole.began = lookup.began = looked->asked;
        lookup.ended = train.began = looked->found;
        train.ended = apply.began;
        persia_trace_end(&lookup, PERSIA_OK);
        persia_trace_end(&train, PERSIA_OK);
    }
    persia_trace_end(&whole, rc);
    return rc;
}

static int updates_run(updates *u, update *one)
{
    if (one->state == UPDATE_QUEUED)
        return PERSIA_ECLOSED;
    if (one->refused)
        return updates_refuse(u, one);
    batch_times looked;
    if (!u->named ||
        prefetch_sending(loop_prefetch(u->s), one->grads, one->n,
                         one->name.number, &looked))
        return loop_run(u->s, one);
    return updates_run_traced(u, one, &looked);
}

/* The lock is held. */
static void updates_stop_running(updates *u, const update *one)
{
    update **at = &u->running;
    while (*at && *at != one)
        at = &(*at)->next;
    assert(*at == one);
    *at = one->next;
}

/* A background job: all updates that it finds.  Jobs that meet a part while
 * another one is in flight do not wait, whatever is behind it; so no job ends
 * while there is something to take. */
static void update_job(void *ctx)
{
    updates *u = ctx;
    for (update *one; (one = updates_take(u));) {
        int rc = updates_run(u, one);
        /* The error is kept before the look-ahead gets it: the loop that waits
         * for this update must find it. */
        pthread_mutex_lock(&u->lock);
        updates_end(u, one, rc);
        if (rc)
            loop_updates_keep(u, rc);
        pthread_mutex_unlock(&u->lock);
        updates_report(u, one);

        pthread_mutex_lock(&u->lock);
        assert(u->left && (one->name.parts < 2 || u->part_runs));
        if (one->name.parts > 1)
            u->part_runs = 0;
        updates_stop_running(u, one);
        one->next = u->ended;
        u->ended = one;
        u->left--;
        pthread_cond_broadcast(&u->moved);
        pthread_mutex_unlock(&u->lock);
    }
}

/* All numbers up to this one are through, or passed over; the lock is held. */
static uint64_t updates_through(const updates *u)
{
    uint64_t oldest = u->first ? u->first->name.number : u->name.number + 1;
    for (const update *one = u->running; one; one = one->next)
        if (one->name.number < oldest)
            oldest = one->name.number;
    return oldest - 1;
}

/* The rows are not those that the places so far are about; the lock is
 * held. */
static int updates_is_moved(const updates *u)
{
    return persia_client_restored_number(u->c) >
           u->name.number;
}

static int updates_has_place(const updates *u, const update *one)
{
    return !u->counted && !updates_is_moved(u) && one->place > u->name.number;
}

/* The lock is held.  PERSIA_EINTR: it has a name all the same. */
static int updates_name(updates *u, update *one)
{
    int rc = PERSIA_OK;
    while (!rc && updates_has_place(u, one) &&
           one->place > updates_through(u) + CLIENT_SPAN && u->left)
        rc = persia_cond_wait_poll(&u->moved, &u->lock, UINT64_MAX);
    if (updates_has_place(u, one)) {
        u->name.number = one->place;
    } else {
        if (updates_is_moved(u))
            u->name.number = persia_client_restored_number(u->c);
        u->name.number++;
        u->counted = 1;
        one->refused = u->strict;
    }
    u->name.step += u->name.parts > 1;
    u->name.through = u->left ? updates_through(u) : u->name.number - 1;
    one->name = u->name;
    return rc;
}

int updates_add(updates *u, update *one, int tell)
{
    err_kept earlier = {0};
    pthread_mutex_lock(&u->lock);
    /* Not the error of this update, were it fast. */
    if (tell)
        earlier = next_kept(u);
    int rc = u->named ? updates_name(u, one) : PERSIA_OK;
    update_event(one, UPDATE_ADD);
    one->next = NULL;
    *u->last = one;
    u->last = &one->next;
    u->left++;
    pthread_mutex_unlock(&u->lock);
    if (persia_sched_submit(u->jobs, update_job, u))
        update_job(u); /* there is no memory for a job */
    int late = updates_wait(u, u->most, 0);
    rc = rc ? rc : late;
    if (!earlier.code)
        return rc;
    (void)persia_err_again(&earlier);
    if (!rc)
        return earlier.code;
    pthread_mutex_lock(&u->lock);
    loop_updates_keep(u, earlier.code);
    pthread_mutex_unlock(&u->lock);
    return rc;
}

void updates_renumber(updates *u, uint64_t last, int strict)
{
    pthread_mutex_lock(&u->lock);
    u->name.number = last;
    u->counted = 0;
    u->strict = strict;
    pthread_mutex_unlock(&u->lock);
}

int updates_have_places(updates *u)
{
    pthread_mutex_lock(&u->lock);
    int have = u->named && !u->counted && !updates_is_moved(u);
    pthread_mutex_unlock(&u->lock);
    return have;
}

void updates_sync(updates *u, uint64_t last, uint32_t part, uint32_t parts)
{
    pthread_mutex_lock(&u->lock);
    u->name.step = last;
    u->name.part = part;
    u->name.parts = parts ? parts : 1;
    pthread_mutex_unlock(&u->lock);
}

int updates_are_parts(updates *u)
{
    pthread_mutex_lock(&u->lock);
    int are = u->name.parts > 1;
    pthread_mutex_unlock(&u->lock);
    return are;
}

int updates_wait(updates *u, size_t most, uint64_t timeout_ns)
{
    const uint64_t until = timeout_ns ? persia_deadline(timeout_ns)
                                      : PERSIA_FOREVER;
    int rc = PERSIA_OK;
    pthread_mutex_lock(&u->lock);
    while (!rc && u->left > most) {
        if (persia_clock_ns() >= until)
            rc = persia_err_set(PERSIA_ETIMEOUT,
                                "%zu updates are not applied after %.1f s",
                                u->left, (double)timeout_ns / 1e9);
        else
            rc = persia_cond_wait_poll(&u->moved, &u->lock, until);
    }
    pthread_mutex_unlock(&u->lock);
    updates_tidy(u);
    return rc;
}

void updates_keep(updates *u, int code)
{
    pthread_mutex_lock(&u->lock);
    loop_updates_keep(u, code);
    pthread_mutex_unlock(&u->lock);
}

int updates_error(updates *u)
{
    pthread_mutex_lock(&u->lock);
    err_kept next = next_kept(u);
    pthread_mutex_unlock(&u->lock);
    return persia_err_again(&next);
}

void updates_drop_errors(updates *u)
{
    pthread_mutex_lock(&u->lock);
    u->error.code = u->lost.code = PERSIA_OK;
    pthread_mutex_unlock(&u->lock);
}

int updates_now(updates *u, update *one)
{
    update_event(one, UPDATE_BEGIN);
    int rc = loop_run(u->s, one);
    pthread_mutex_lock(&u->lock);
    updates_end(u, one, rc);
    pthread_mutex_unlock(&u->lock);
    updates_report(u, one);
    return rc;
}

void updates_get_counts(updates *u, loop_counts *out)
{
    pthread_mutex_lock(&u->lock);
    *out = u->counts;
    out->pending = u->left;
    pthread_mutex_unlock(&u->lock);
}
