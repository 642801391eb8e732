/* queue.c: what the service knows of loaders and ranks, and which Take gets
 * which batch.  The lock is held in all of it. */
#include <stdio.h>
#include <stdlib.h>

#include "role/private.h"

/* ---- answers ---- */

void service_enter(role_service *s)
{
    pthread_mutex_lock(&s->lock);
}

void service_leave(role_service *s)
{
    asking *a = s->ready;
    s->ready = NULL;
    pthread_mutex_unlock(&s->lock);
    while (a) {
        asking *next = a->next;
        if (!a->job)
            asking_answer(a, a->rc ? persia_err_set(a->rc, "%s", a->text)
                                   : PERSIA_OK);
        else if (persia_sched_submit(s->jobs, a->job, a))
            a->job(a); /* there is no memory for a job */
        a = next;
    }
}

static void ready(asking *a)
{
    asking **end = &a->s->ready;
    while (*end)
        end = &(*end)->next;
    a->next = NULL;
    *end = a;
}

/* With this thread's text. */
static void ready_error(asking *a, int rc)
{
    a->rc = rc;
    snprintf(a->text, sizeof a->text, "%s", persia_err_text());
    ready(a);
}

static void ready_status(asking *a, uint32_t status)
{
    a->status = status;
    ready(a);
}

static int stopping(void)
{
    return persia_err_set(PERSIA_EUNAVAILABLE, "the worker is stopping");
}

static void wait_in(asking **list, asking *a)
{
    while (*list)
        list = &(*list)->next;
    a->next = NULL;
    a->until = persia_clock_ns() + ROLE_WAIT_NS;
    *list = a;
}

/* ---- epochs ---- */

static int epoch_is_over(const role_service *s, uint64_t epoch)
{
    return epoch <= s->epochs && s->ended[epoch - 1] >= s->config.loaders;
}

static uint64_t epoch_from(const role_service *s, uint64_t epoch)
{
    while (epoch_is_over(s, epoch))
        epoch++;
    return epoch;
}

static int epoch_end(role_service *s, role_stream *t)
{
    if (t->epoch > s->epochs) {
        uint64_t *more = realloc(s->ended, t->epoch * sizeof *more);
        if (!more)
            return persia_err_set(PERSIA_ENOMEM, "no memory for an epoch");
        for (uint64_t e = s->epochs; e < t->epoch; e++)
            more[e] = 0;
        s->ended = more;
        s->epochs = t->epoch;
    }
    s->ended[t->epoch - 1]++;
    t->epoch = epoch_from(s, t->epoch + 1);
    return PERSIA_OK;
}

/* ---- streams ---- */

void stream_free(role_stream *t)
{
    persia_worker_destroy(t->w);
    persia_client_destroy(t->c);
    pthread_mutex_destroy(&t->opening);
    free(t->tables);
    free(t);
}

static void stream_job(void *stream)
{
    stream_free(stream);
}

/* Ends the stream without batches that was used longest ago. */
static int stream_expire(role_service *s)
{
    role_stream **oldest = NULL;
    for (role_stream **at = &s->streams; *at; at = &(*at)->next)
        if (!(*at)->offers && (!oldest || (*at)->used < (*oldest)->used))
            oldest = at;
    if (!oldest)
        return persia_err_set(PERSIA_ELIMIT,
                              "%d data loaders have batches here, at most so "
                              "many are taken",
                              ROLE_STREAMS);
    role_stream *gone = *oldest;
    *oldest = gone->next;
    s->stats.streams--;
    if (persia_sched_submit(s->jobs, stream_job, gone))
        stream_free(gone);
    return PERSIA_OK;
}

static int stream_find(role_service *s, uint64_t name, role_stream **out)
{
    role_stream *t = s->streams;
    while (t && t->name != name)
        t = t->next;
    *out = t;
    if (t)
        return PERSIA_OK;
    int rc = s->stats.streams >= ROLE_STREAMS ? stream_expire(s) : PERSIA_OK;
    if (rc)
        return rc;
    if (!(t = calloc(1, sizeof *t)))
        return persia_err_set(PERSIA_ENOMEM, "no memory for a data loader");
    t->name = name;
    t->epoch = epoch_from(s, 1);
    window_init(&t->came, t->rings[0], ROLE_WINDOW / 64);
    window_init(&t->done, t->rings[1], ROLE_WINDOW / 64);
    pthread_mutex_init(&t->opening, NULL);
    t->next = s->streams;
    s->streams = t;
    s->stats.streams++;
    *out = t;
    return PERSIA_OK;
}

/* ---- Submit ---- */

/* What the loader need not keep any more. */
static int list_done(asking *a, const role_stream *t)
{
    const uint64_t first = t->settled + 1;
    a->done_n = 0;
    a->done = persia_wire_memory_take(&a->memory,
                                      WIRE_BATCHES_MAX * sizeof *a->done);
    if (!a->done)
        return PERSIA_ENOMEM;
    for (uint64_t n = first; n < first + WIRE_BATCHES_MAX; n++)
        if (window_has(&t->done, n))
            a->done[a->done_n++] = n;
    return PERSIA_OK;
}

static void submit_done(asking *a, role_stream *t, uint32_t status)
{
    int rc = list_done(a, t);
    if (a->o)
        offer_free(a->s, a->o);
    a->o = NULL;
    if (rc)
        ready_error(a, rc);
    else
        ready_status(a, status);
}

static int has_room(const role_service *s, const offer *o)
{
    return !s->stats.bytes ||
           s->stats.bytes + o->bytes_n <= s->config.queue_limit;
}

/* Takes a batch into the queue, or the end of an epoch; 0: there is no
 * room. */
static int submit_enter(asking *a)
{
    role_service *s = a->s;
    offer *o = a->o;
    role_stream *t;
    int rc = stream_find(s, o->m.stream, &t);
    if (rc) {
        ready_error(a, rc);
        return 1;
    }
    t->used = persia_clock_ns();
    if (o->m.settled > t->settled) {
        t->settled = o->m.settled;
        window_settle(&t->came, t->settled);
        window_settle(&t->done, t->settled);
    }
    if (o->m.number > t->settled + WIRE_BATCHES_MAX)
        return 0;
    if (window_has(&t->came, o->m.number)) {
        submit_done(a, t, SUBMIT_QUEUED);
        return 1;
    }
    rc = o->m.end ? epoch_end(s, t) : offer_check(o, &s->plan);
    if (rc) {
        ready_error(a, rc);
        return 1;
    }
    if (!o->m.end && !has_room(s, o))
        return 0;
    (void)window_add(&t->came, o->m.number);
    if (o->m.end) {
        (void)window_add(&t->done, o->m.number);
    } else {
        o->stream = t;
        t->offers++;
        o->epoch = t->epoch;
        o->seq = ++s->seq;
        offers_insert(&s->queue, o);
        s->stats.bytes += o->bytes_n;
        s->stats.queued++;
        s->stats.submitted++;
        a->o = NULL;
    }
    submit_done(a, t, SUBMIT_QUEUED);
    return 1;
}

static void submit_full(asking *a)
{
    role_stream *t;
    int rc = stream_find(a->s, a->o->m.stream, &t);
    if (rc)
        ready_error(a, rc);
    else
        submit_done(a, t, SUBMIT_FULL);
}

void service_submit(asking *a)
{
    role_service *s = a->s;
    if (a->o->bytes_n > s->config.queue_limit)
        ready_error(a, persia_err_set(
                           PERSIA_ELIMIT,
                           "a batch of %zu bytes is over the worker's queue "
                           "of %llu bytes; make it smaller, or the queue "
                           "larger",
                           a->o->bytes_n,
                           (unsigned long long)s->config.queue_limit));
    else
        wait_in(&s->submits, a);
    service_match(s);
}

/* ---- ranks ---- */

static role_known_rank *rank_find(role_service *s, uint32_t rank)
{
    role_known_rank *r = s->ranks;
    while (r && r->rank != rank)
        r = r->next;
    return r;
}

/* What an earlier process of the rank had is offered again. */
static void rank_forget(role_service *s, uint32_t rank)
{
    for (offer *o = s->leased, *next; o; o = next) {
        next = o->next;
        if (o->rank != rank)
            continue;
        if (o->state == OFFER_LEASED)
            offer_again(s, o);
        else
            o->expires = 0;
    }
}

static int rank_hello(role_service *s, const wire_hello *m)
{
    role_known_rank *r = rank_find(s, m->rank);
    if (r && r->client == m->caller.client)
        return PERSIA_OK;
    if (r) {
        rank_forget(s, m->rank);
    } else {
        if (!(r = calloc(1, sizeof *r)))
            return persia_err_set(PERSIA_ENOMEM, "no memory for a rank");
        r->next = s->ranks;
        s->ranks = r;
        s->stats.ranks++;
    }
    r->rank = m->rank;
    r->client = m->caller.client;
    r->epoch = epoch_from(s, 1);
    for (const offer *o = s->queue; o; o = o->next)
        if (o->epoch < r->epoch)
            r->epoch = o->epoch;
    return PERSIA_OK;
}

void service_hello(asking *a)
{
    int rc = a->m.hello.world ? rank_hello(a->s, &a->m.hello) : PERSIA_OK;
    if (rc)
        ready_error(a, rc);
    else
        ready(a);
    service_match(a->s);
}

/* ---- Take ---- */

static void lease(asking *a, offer *o)
{
    role_service *s = a->s;
    if (o->state == OFFER_QUEUED) {
        offers_remove(&s->queue, o);
        offers_insert(&s->leased, o);
        s->stats.queued--;
        s->stats.leased++;
        o->lease = ++s->lease;
        if (o->lease > ROLE_LEASES)
            window_settle(&s->leases, o->lease - ROLE_LEASES);
    }
    offer_event(o, OFFER_TAKE);
    s->stats.taken++;
    o->rank = a->m.take.rank;
    o->request = a->m.take.number;
    o->expires = persia_clock_ns() + s->config.lease_ns;
    o->users++;
    a->o = o;
    a->job = work_take;
    ready(a);
}

static uint64_t epoch_of(role_service *s, const wire_take *m)
{
    const role_known_rank *r = rank_find(s, m->rank);
    return (r ? r->epoch : 1) + m->pass - 1;
}

/* 0: it has to wait. */
static int take_enter(asking *a)
{
    role_service *s = a->s;
    const uint64_t epoch = epoch_of(s, &a->m.take);
    offer *o = atomic_load(&s->declared) ? s->queue : NULL;
    while (o && o->epoch != epoch)
        o = o->next;
    if (o)
        lease(a, o);
    else if (epoch_is_over(s, epoch))
        ready_status(a, TAKE_END);
    else
        return 0;
    return 1;
}

void service_take(asking *a)
{
    role_service *s = a->s;
    const wire_take *m = &a->m.take;
    const role_known_rank *r = rank_find(s, m->rank);
    offer *o = s->leased;
    while (o && (o->rank != m->rank || o->request != m->number))
        o = o->next;
    if (!r)
        ready_error(a, persia_err_set(PERSIA_ESTALE,
                                      "rank %u has not said Hello", m->rank));
    else if (r->client != m->caller.client)
        ready_error(a, persia_err_set(PERSIA_ECLOSED,
                                      "another process takes the batches of "
                                      "rank %u now",
                                      m->rank));
    else if (o && o->state == OFFER_LEASED)
        lease(a, o);
    else if (o)
        ready_status(a, TAKE_EMPTY); /* its Return has not ended */
    else
        wait_in(&s->takes, a);
    service_match(s);
}

/* ---- Return ---- */

static offer *leased(role_service *s, const wire_return *m)
{
    const role_known_rank *r = rank_find(s, m->rank);
    offer *o = s->leased;
    while (o && o->lease != m->lease)
        o = o->next;
    return r && r->client == m->caller.client && m->caller.boot == s->boot &&
                   o && o->rank == m->rank
               ? o
               : NULL;
}

/* The lease has ended: with these gradients, or without. */
static void returned_late(asking *a)
{
    role_service *s = a->s;
    const wire_return *m = &a->m.back;
    int before = m->caller.boot == s->boot &&
                 m->lease > s->leases.watermark &&
                 window_has(&s->leases, m->lease);
    s->stats.late += !before && m->reason == RETURN_TRAINED;
    ready_status(a, before ? RETURNED_BEFORE : RETURNED_GONE);
}

void service_return(asking *a)
{
    role_service *s = a->s;
    const wire_return *m = &a->m.back;
    offer *o = leased(s, m);
    if (!o) {
        returned_late(a);
    } else if (o->state != OFFER_LEASED) {
        ready_error(a, persia_err_set(PERSIA_EUNAVAILABLE,
                                      "an earlier Return of this batch has "
                                      "not ended"));
    } else if (m->reason == RETURN_TRAINED) {
        offer_event(o, OFFER_RETURN);
        o->users++;
        a->o = o;
        a->job = work_return;
        ready(a);
    } else {
        if (m->reason == RETURN_SKIPPED) {
            s->stats.skipped++;
            offer_end(s, o);
        } else {
            offer_again(s, o);
        }
        ready_status(a, RETURNED_DONE);
    }
    service_match(s);
}

/* ---- what waits ---- */

/* Goes through a list once: `enter` answers, or it waits on; `late` when it
 * has waited long enough.  Whether one was answered by enter. */
static int match_list(role_service *s, asking **list, uint64_t now,
                      int (*enter)(asking *a), void (*late)(asking *a))
{
    int moved = 0;
    while (*list) {
        asking *a = *list, *next = a->next;
        int entered = !s->closed && enter(a);
        if (s->closed)
            ready_error(a, stopping());
        else if (!entered && now >= a->until)
            late(a);
        else if (!entered) {
            list = &a->next;
            continue;
        }
        moved |= entered;
        *list = next;
    }
    return moved;
}

static void take_empty(asking *a)
{
    ready_status(a, TAKE_EMPTY);
}

void service_match(role_service *s)
{
    const uint64_t now = persia_clock_ns();
    while (match_list(s, &s->submits, now, submit_enter, submit_full) |
           match_list(s, &s->takes, now, take_enter, take_empty))
        ;
}

void service_tick(role_service *s)
{
    const uint64_t now = persia_clock_ns();
    for (offer *o = s->leased, *next; o; o = next) {
        next = o->next;
        if (o->state == OFFER_LEASED && o->expires <= now)
            offer_again(s, o);
    }
    service_match(s);
}
