/* queue.c: which Take gets which batch; Return.
 * The lock is held in all of it. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"

/* ---- answers ---- */

void service_enter(embedding_worker *s)
{
    pthread_mutex_lock(&s->lock);
}

void service_leave(embedding_worker *s)
{
    asking *a = s->ready;
    s->ready = NULL;
    load_note(s);
    pthread_mutex_unlock(&s->lock);
    while (a) {
        asking *next = a->next;
        if (!a->job)
            asking_answer(a, persia_err_again(&a->error));
        else if (persia_sched_submit(a->waits ? s->waiting : s->jobs, a->job,
                                     a))
            a->job(a); /* there is no memory for a job */
        a = next;
    }
}

static void queue_ready(asking *a)
{
    asking **end = &a->s->ready;
    while (*end)
        end = &(*end)->next;
    a->next = NULL;
    *end = a;
}

/* With this thread's text. */
static void queue_ready_error(asking *a, int rc)
{
    persia_err_keep(&a->error, rc);
    queue_ready(a);
}

static void queue_ready_status(asking *a, uint32_t status)
{
    a->status = status;
    queue_ready(a);
}

static int queue_stopping(void)
{
    return persia_err_set(PERSIA_EUNAVAILABLE, "the worker is stopping");
}

static void queue_wait_in(asking **list, asking *a)
{
    while (*list)
        list = &(*list)->next;
    a->next = NULL;
    a->until = persia_clock_ns() + WORKER_WAIT_NS;
    *list = a;
}

/* ---- Submit ---- */

/* Those of the done batches that have no update. */
static int queue_list_failed(asking *a, const worker_stream *t,
                             uint64_t settled)
{
    const size_t n = t->failed_n < WORKER_FAILED ? t->failed_n : WORKER_FAILED;
    a->failed_n = 0;
    if (!n)
        return PERSIA_OK;
    a->failed = persia_wire_memory_take(&a->memory, n * sizeof *a->failed);
    if (!a->failed)
        return PERSIA_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        const worker_failure *f = &t->failed[i];
        if (f->number <= settled || f->number > settled + WIRE_BATCHES_MAX)
            continue;
        wire_failed_batch *to = &a->failed[a->failed_n++];
        *to = (wire_failed_batch){.number = f->number};
        snprintf(to->error, sizeof to->error, "%s", persia_err_name(f->code));
        snprintf(to->text, sizeof to->text, "%s", f->text);
    }
    return PERSIA_OK;
}

/* What the loader need not keep any more, behind what it knows. */
static int queue_list_done(asking *a, const worker_stream *t, uint64_t settled)
{
    a->done_n = 0;
    a->first = t->first;
    a->stream_memory = t->memory;
    a->done = persia_wire_memory_take(&a->memory,
                                      WIRE_BATCHES_MAX * sizeof *a->done);
    if (!a->done)
        return PERSIA_ENOMEM;
    for (uint64_t i = 1; i <= WIRE_BATCHES_MAX; i++)
        if (window_has(&t->done, settled + i))
            a->done[a->done_n++] = settled + i;
    return queue_list_failed(a, t, settled);
}

static void queue_submit_done(asking *a, worker_stream *t, uint32_t status)
{
    int rc = queue_list_done(a, t, a->o->m.settled);
    if (!a->o->stream) /* it is not in the queue */
        offer_free(a->s, a->o);
    a->o = NULL;
    if (rc)
        queue_ready_error(a, rc);
    else
        queue_ready_status(a, status);
}

static int queue_fits(const embedding_worker *s, const offer *o)
{
    return !s->stats.bytes ||
           s->stats.bytes + o->bytes_n <= s->config.queue_limit;
}

/* Also where nothing else that ranks of its job may ask for is in the queue:
 * what is of later epochs, or of other jobs, leaves it only when this one has
 * been there. */
static int queue_has_room(embedding_worker *s, const worker_stream *t,
                          const offer *o)
{
    const uint64_t epoch = stream_epoch(t, o->m.epoch);
    if (queue_fits(s, o) || (jobs_drop(s) && queue_fits(s, o)))
        return 1;
    const offer *first = s->queue;
    while (first && (first->stream->job != t->job ||
                     offer_epoch(first) > epoch))
        first = first->next;
    return epoch && s->queue && !first;
}

static void queue_enqueue(embedding_worker *s, worker_stream *t, offer *o)
{
    assert(!o->stream && o->state == OFFER_QUEUED && t->state != STREAM_OLD);
    (void)window_add(&t->came, o->m.number);
    o->stream = t;
    t->offers++;
    o->since = o->waits = persia_clock_ns();
    o->doubted = o->m.attempt > 1 ? o->since : 0;
    o->seq = ++s->seq;
    offers_insert(&s->queue, o);
    s->stats.bytes += o->bytes_n;
    s->stats.queued++;
    s->stats.submitted++;
    s->stats.resent += o->m.attempt > 1;
}

/* Takes a batch into the queue; 0: there is no room. */
static int queue_submit_enter(asking *a)
{
    embedding_worker *s = a->s;
    offer *o = a->o;
    worker_stream *t;
    int rc = stream_find(s, o->m.stream, o->m.job, &t);
    if (rc) {
        queue_ready_error(a, rc);
        return 1;
    }
    if (stream_is_of(s, t, o->m.caller.client, o->m.settled))
        stream_hear(t, o->m.settled);
    t->waits &= o->m.attempt > 1;
    t->first = o->m.first ? o->m.first : t->first;
    if (o->m.number > t->settled + WIRE_BATCHES_MAX)
        return 0;
    if (window_has(&t->came, o->m.number)) {
        queue_submit_done(a, t, SUBMIT_QUEUED);
        return 1;
    }
    if (s->leaving)
        return 0;
    job_expect(s, t->job);
    rc = offer_check(o, t->job->plan);
    if (rc) {
        queue_ready_error(a, rc);
        return 1;
    }
    if (!queue_has_room(s, t, o))
        return 0;
    queue_enqueue(s, t, o);
    queue_submit_done(a, t, SUBMIT_QUEUED);
    return 1;
}

static void queue_submit_full(asking *a)
{
    worker_stream *t;
    int rc = stream_find(a->s, a->o->m.stream, a->o->m.job, &t);
    if (rc)
        queue_ready_error(a, rc);
    else
        queue_submit_done(a, t, SUBMIT_FULL);
}

void service_heartbeat(asking *a)
{
    embedding_worker *s = a->s;
    const wire_heartbeat *m = &a->m.beat;
    uint32_t status = SUBMIT_QUEUED;
    worker_stream *t;
    int rc = m->claims ? stream_claim(s, m, &status)
                       : stream_find(s, m->stream, m->job, &t);
    if (!rc && !m->claims) {
        stream_learn(s, t, m);
        rc = queue_list_done(a, t, m->settled);
    }
    if (rc)
        queue_ready_error(a, rc);
    else
        queue_ready_status(a, status);
    service_match(s);
}

void service_submit(asking *a)
{
    embedding_worker *s = a->s;
    if (a->o->bytes_n > s->config.queue_limit)
        queue_ready_error(
            a, persia_err_set(
                   PERSIA_ELIMIT,
                   "a batch of %zu bytes is over the worker's queue "
                   "of %llu bytes; make it smaller, or the queue "
                   "larger",
                   a->o->bytes_n, (unsigned long long)s->config.queue_limit));
    else
        queue_wait_in(&s->submits, a);
    service_match(s);
}

void service_declare(asking *a)
{
    a->job = work_declare;
    queue_ready(a);
}

/* ---- ranks ---- */

void service_hello(asking *a)
{
    const wire_hello *m = &a->m.hello;
    int rc = m->world ? rank_hello(a->s, m) : PERSIA_OK;
    worker_rank *r = rank_find(a->s, m->caller.client);
    if (r)
        rank_continues(r, m);
    if (!m->world && m->stream)
        a->job = work_hello;
    if (rc)
        queue_ready_error(a, rc);
    else
        queue_ready(a);
    service_match(a->s);
}

/* ---- Take ---- */

/* The epoch that is asked for; 0: it is not known.  *sure: see
 * epoch_next(). */
static uint64_t queue_epoch_of(const embedding_worker *s, const worker_rank *r,
                               const wire_take *m, int *sure)
{
    const worker_job *j = r->job;
    *sure = 1;
    if (m->epoch && (!m->job || m->job == j->id))
        return m->epoch;
    const uint64_t next = epoch_next(s, j, sure), now = rank_epoch(s, r);
    if (!now || (next && next < now))
        return next;
    *sure = 1; /* the others are there: it may be at its end */
    return now;
}

/* Whether the rank may have a batch whose lease is over. */
static int queue_may_have(const worker_rank *r, const offer *o)
{
    return rank_has(r, o) || (o->expired && o->client == r->client &&
                              r->heard <= o->expired);
}

/* A job has the batch, for a Take or a Return. */
static void queue_lease_to(asking *a, offer *o, uint64_t client,
                           uint64_t request)
{
    embedding_worker *s = a->s;
    assert(o->state == OFFER_QUEUED || o->state == OFFER_LEASED);
    if (o->state == OFFER_QUEUED) {
        offers_remove(&s->queue, o);
        offers_insert(&s->leased, o);
        s->stats.queued--;
        s->stats.leased++;
        o->lease = ++s->lease;
        if (o->lease > WORKER_LEASES)
            window_settle(&s->leases, o->lease - WORKER_LEASES);
    }
    o->client = client;
    o->expired = 0;
    o->request = request;
    o->expires = persia_clock_ns() + s->config.lease_ns;
    o->users++;
    a->o = o;
    queue_ready(a);
}

static void queue_lease(asking *a, offer *o)
{
    o->takes++;
    if (o->state == OFFER_QUEUED)
        persia_trace_part(TRACE_QUEUE, o->m.stream, o->m.number, o->waits,
                          offer_attempt(o), PERSIA_OK);
    a->s->stats.taken++;
    a->job = work_take;
    a->epoch = offer_epoch(o);
    queue_lease_to(a, o, a->m.take.caller.client, a->m.take.number);
    offer_event(o, OFFER_TAKE);
}

/* A batch of this epoch, or nothing of it. */
static void queue_take_nothing(asking *a, uint32_t status, uint64_t epoch)
{
    a->epoch = epoch;
    queue_ready_status(a, status);
}

/* With what is known of the batches of the epoch: see pass_is_over(). */
static void queue_take_none(asking *a, const worker_job *j, uint32_t status,
                            uint64_t epoch)
{
    embedding_worker *s = a->s;
    a->parts = persia_wire_memory_take(&a->memory,
                                       WIRE_LOADERS_MAX * sizeof *a->parts);
    if (!a->parts) {
        queue_ready_error(a, PERSIA_ENOMEM);
        return;
    }
    if (epoch)
        a->parts_n = epoch_parts(s, j, epoch, &a->m.take, a->parts);
    queue_take_nothing(a, status, epoch);
}

static void queue_take_end(asking *a, worker_job *j, uint64_t epoch)
{
    epochs_count(a->s, j, epoch);
    a->loaders_silent = epoch_silent(a->s, j, epoch);
    queue_take_none(a, j, TAKE_END, epoch);
}

/* ---- Take by place ---- */

/* What is here of the batches that a Take by place may ask for. */
typedef struct places {
    offer *queued; /* the one that it asks for */
    int leased;    /* that one is leased */
    int later;     /* there are such that it is to ask for later */
    int unplaced;  /* loaders do not say their places */
    int is_done;   /* the one that it asks for */
} places;

static void look_for_place(const worker_job *j, const wire_take *m,
                           uint64_t epoch, offer *list, places *out)
{
    for (offer *o = list; o; o = o->next) {
        if (o->stream->state == STREAM_OLD || o->stream->job != j ||
            offer_epoch(o) != epoch)
            continue;
        out->unplaced |= !o->m.place;
        out->later |= o->m.place > m->place && j->world &&
                      (o->m.place - m->place) % j->world == 0;
        /* Numbers of an epoch follow one another. */
        out->is_done |= window_has(&o->stream->done,
                                   o->m.number - o->m.place + m->place);
        if (o->m.place != m->place)
            continue;
        if (o->state == OFFER_QUEUED)
            out->queued = o;
        else
            out->leased = 1;
    }
}

/* They were given up, or another worker had them.  Servers know. */
static void queue_give_up_earlier(embedding_worker *s, const worker_job *j,
                                  const wire_take *m, uint64_t epoch)
{
    for (offer *o = s->queue, *next; o; o = next) {
        next = o->next;
        if (o->stream->job != j || !is_passed(s, o, m, epoch))
            continue;
        if (!o->passed) {
            o->doubted = persia_clock_ns();
            o->settled = 0;
            o->passed = 1;
        }
        if (!o->settled)
            continue;
        s->stats.given_up++;
        offer_fail(s, o, PERSIA_ELOST,
                   "its rank passed it over in a step of all ranks: it is not "
                   "trained");
    }
}

static int queue_check_loaders(const embedding_worker *s)
{
    return s->config.loaders == 1
               ? PERSIA_OK
               : persia_err_set(PERSIA_EARG,
                                "steps of all ranks (staleness=0) take the "
                                "batches of one data loader, and this worker "
                                "is of %u: start it with --loaders 1, or use "
                                "a staleness of 1 or more",
                                s->config.loaders);
}

static int queue_check_placed(const places *p)
{
    return p->unplaced
               ? persia_err_set(PERSIA_EARG,
                                "steps of all ranks (staleness=0) need the "
                                "place of each batch, and the data loader "
                                "does not send it: see SubmitRequest.place")
               : PERSIA_OK;
}

/* The batch of a place is of one rank: no other one may have it. */
static int take_place(asking *a, const worker_rank *r, worker_job *j)
{
    embedding_worker *s = a->s;
    const wire_take *m = &a->m.take;
    int sure;
    const uint64_t epoch = queue_epoch_of(s, r, m, &sure);
    places p = {0};
    if (!epoch && !m->look)
        return 0;
    queue_give_up_earlier(s, j, m, epoch);
    look_for_place(j, m, epoch, s->queue, &p);
    look_for_place(j, m, epoch, s->leased, &p);
    if (queue_check_placed(&p))
        queue_ready_error(a, PERSIA_EARG);
    else if (p.queued && !queue_may_have(r, p.queued))
        queue_lease(a, p.queued);
    else if (!p.queued && !p.leased && p.is_done)
        queue_take_nothing(a, TAKE_DONE, epoch);
    else if (sure && !p.queued && !p.leased && !p.later &&
             epoch_is_over(s, j, epoch, (int)m->begun))
        queue_take_end(a, j, epoch);
    else if (m->look || (sure && !m->epoch))
        queue_take_nothing(a, TAKE_EMPTY, sure ? epoch : 0);
    else
        return 0;
    return 1;
}

/* 0: it has to wait. */
static int queue_take_any(asking *a, const worker_rank *r, worker_job *j)
{
    embedding_worker *s = a->s;
    const wire_take *m = &a->m.take;
    const uint64_t now = persia_clock_ns();
    int sure, left = 0;
    const uint64_t epoch = queue_epoch_of(s, r, m, &sure);
    const int idle = epoch_is_idle(s, j, 1), waits = epoch_is_idle(s, j, 0);
    offer *o = s->queue;
    while (o && (o->stream->job != j || offer_epoch(o) > epoch ||
                 queue_may_have(r, o) || is_withheld(s, o, now))) {
        left |= o->stream->job == j && offer_epoch(o) <= epoch &&
                !job_has(s, r, o);
        o = o->next;
    }
    if (o && (idle || !m->look || !m->epoch))
        queue_lease(a, o);
    else if (!o && epoch && sure && !left &&
             epoch_is_over(s, j, epoch, (int)m->begun))
        queue_take_end(a, j, epoch);
    else if (!o && idle && (m->look || waits))
        queue_take_none(a, j, TAKE_IDLE, sure ? epoch : 0);
    else if (m->look || (!o && waits))
        queue_take_nothing(a, TAKE_EMPTY, sure ? epoch : 0);
    else if (epoch && sure && !m->epoch)
        queue_take_nothing(a, TAKE_EMPTY, epoch);
    else
        return 0;
    return 1;
}

static void queue_take_note(asking *a, const worker_job *j)
{
    a->job_id = j->id;
    a->job_failed = j->failed;
    a->loaders_first = epoch_of_loaders(a->s, j);
}

/* What the rank takes batches of.  0: it has to wait, or has an error. */
static int take_job(asking *a, worker_rank **r, worker_job **j, int *rc)
{
    const wire_take *m = &a->m.take;
    *r = rank_find(a->s, m->caller.client);
    *j = NULL;
    *rc = *r ? job_of_rank(a->s, *r, m->job, (int)m->begun, j)
             : rank_check(a->s, m->caller.client);
    if (!*j)
        return 0;
    const uint64_t epoch =
        !m->job || m->job == (*j)->id ? m->epoch : 0;
    epochs_count(a->s, *j, epoch ? epoch - 1 : 0);
    if (epoch)
        (*r)->epoch = epoch;
    queue_take_note(a, *j);
    return 1;
}

static int queue_take_enter(asking *a)
{
    worker_rank *r;
    worker_job *j;
    int rc;
    const int found = take_job(a, &r, &j, &rc);
    if (rc)
        queue_ready_error(a, rc);
    else if (!found && a->m.take.look)
        queue_take_nothing(a, TAKE_EMPTY, 0);
    if (!found)
        return rc || a->m.take.look;
    return a->m.take.place ? take_place(a, r, j) : queue_take_any(a, r, j);
}

void service_take(asking *a)
{
    embedding_worker *s = a->s;
    const wire_take *m = &a->m.take;
    worker_rank *r = rank_find(s, m->caller.client);
    int rc = rank_check(s, m->caller.client);
    if (!rc && m->place)
        rc = queue_check_loaders(s);
    offer *o = s->leased;
    if (r)
        rank_asks(s, r, m);
    while (o && (o->client != m->caller.client || o->request != m->number))
        o = o->next;
    if (o)
        queue_take_note(a, o->stream->job);
    if (rc)
        queue_ready_error(a, rc);
    else if (o && o->state == OFFER_LEASED)
        queue_lease(a, o);
    else if (o)
        queue_take_nothing(a, TAKE_EMPTY,
                           m->epoch); /* its Return has not ended */
    else
        queue_wait_in(&s->takes, a);
    service_match(s);
}

/* ---- Return ---- */

/* Whether it is of a rank's present process. */
static int queue_is_of_rank(const embedding_worker *s, const wire_return *m)
{
    return rank_find(s, m->caller.client) != NULL;
}

static offer *queue_leased(embedding_worker *s, const wire_return *m)
{
    offer *o = s->leased;
    while (o && o->lease != m->lease)
        o = o->next;
    return m->caller.boot == s->boot && o && o->client == m->caller.client
               ? o
               : NULL;
}

/* The batch by its name, in one of the lists. */
static offer *queue_named(offer *o, const wire_return *m)
{
    while (o && (o->stream->state == STREAM_OLD || o->m.stream != m->stream ||
                 o->m.number != m->number))
        o = o->next;
    return o;
}

/* The batch of gradients whose lease is of another worker, or of an earlier
 * process of this one: it was sent again, and is not offered yet. */
static offer *queue_returned(embedding_worker *s, const wire_return *m)
{
    worker_rank *r = rank_find(s, m->caller.client);
    worker_job *j = NULL;
    if (m->reason == RETURN_UNUSED || m->caller.lineage != s->lineage)
        return NULL;
    offer *o = queue_named(s->leased, m); /* its Return has failed before */
    if (o)
        return o->client == m->caller.client && !o->request ? o : NULL;
    o = queue_named(s->queue, m);
    if (!o || !r || job_of_rank(s, r, o->stream->job->id, 1, &j))
        return NULL;
    o = queue_named(s->queue, m); /* it may be none for this model */
    return o && o->stream->job == j ? o : NULL;
}

static int queue_is_done(const embedding_worker *s, const wire_return *m)
{
    const worker_stream *t = stream_named(s, m->stream);
    return t && window_has(&t->done, m->number);
}

/* There is no such lease, nor is the batch in the queue. */
static void returned_late(asking *a)
{
    embedding_worker *s = a->s;
    const wire_return *m = &a->m.back;
    const int own = m->caller.boot == s->boot;
    if (own && m->lease > s->leases.watermark &&
        window_has(&s->leases, m->lease)) {
        queue_ready_status(a, RETURNED_BEFORE);
    } else if (own || m->caller.lineage != s->lineage ||
               m->reason != RETURN_TRAINED || !m->stream ||
               !queue_is_of_rank(s, m) || queue_is_done(s, m) ||
               queue_named(s->leased, m)) {
        s->stats.late += m->reason == RETURN_TRAINED;
        queue_ready_status(a, RETURNED_GONE);
    } else {
        a->job = work_unknown;
        queue_ready(a);
    }
}

static void queue_return_to(asking *a, offer *o)
{
    embedding_worker *s = a->s;
    const wire_return *m = &a->m.back;
    if (o->state != OFFER_LEASED && o->state != OFFER_QUEUED) {
        queue_ready_error(a,
                          persia_err_set(PERSIA_EUNAVAILABLE,
                                         "an earlier Return of this batch has "
                                         "not ended"));
    } else if (m->reason == RETURN_TRAINED) {
        a->job = work_return;
        a->waits = m->parts > 1;
        queue_lease_to(a, o, m->caller.client,
                       o->state == OFFER_LEASED ? o->request : 0);
        offer_event(o, OFFER_RETURN);
    } else if (m->reason == RETURN_SKIPPED) {
        a->job = work_skip;
        queue_lease_to(a, o, m->caller.client, o->request);
        offer_event(o, OFFER_RETURN);
    } else {
        offer_again(s, o, 0);
        queue_ready_status(a, RETURNED_DONE);
    }
}

void service_return(asking *a)
{
    embedding_worker *s = a->s;
    const wire_return *m = &a->m.back;
    offer *o = queue_is_of_rank(s, m) ? queue_leased(s, m) : NULL;
    if (!o && queue_is_of_rank(s, m))
        o = queue_returned(s, m);
    if (!o && m->stream && m->reason == RETURN_TRAINED &&
        !queue_is_of_rank(s, m) && !rank_is_replaced(s, m->caller.client))
        queue_ready_error(a, rank_check(s, m->caller.client));
    else if (!o)
        returned_late(a);
    else
        queue_return_to(a, o);
    service_match(s);
}

void service_sums(asking *a)
{
    const wire_return *m = &a->m.back;
    offer *o = queue_is_of_rank(a->s, m) ? queue_leased(a->s, m) : NULL;
    a->summed.gone = !o;
    if (o && o->state != OFFER_LEASED) {
        queue_ready_error(
            a, persia_err_set(PERSIA_EUNAVAILABLE,
                              "an earlier request of this batch has "
                              "not ended"));
        return;
    }
    if (o) {
        offer_event(o, OFFER_RETURN);
        o->users++;
        a->o = o;
        a->job = work_sums;
    }
    queue_ready(a);
}

/* ---- what waits ---- */

/* Goes through a list once: `enter` answers, or it waits on; `late` when it
 * has waited long enough.  Whether one was answered by enter. */
static int queue_match_list(embedding_worker *s, asking **list, uint64_t now,
                            int (*enter)(asking *a), void (*late)(asking *a))
{
    int moved = 0;
    while (*list) {
        asking *a = *list, *next = a->next;
        int entered = !s->closed && enter(a);
        if (s->closed)
            queue_ready_error(a, queue_stopping());
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

static void queue_take_empty(asking *a)
{
    worker_rank *r;
    worker_job *j;
    int sure = 0, rc;
    if (!take_job(a, &r, &j, &rc)) {
        queue_take_nothing(a, TAKE_EMPTY, 0);
        return;
    }
    const uint64_t epoch = queue_epoch_of(a->s, r, &a->m.take, &sure);
    if (epoch_is_idle(a->s, j, 1))
        queue_take_none(a, j, TAKE_IDLE, sure ? epoch : 0);
    else
        queue_take_nothing(a, TAKE_EMPTY, sure ? epoch : 0);
}

void service_match(embedding_worker *s)
{
    const uint64_t now = persia_clock_ns();
    while (queue_match_list(s, &s->submits, now, queue_submit_enter,
                            queue_submit_full) |
           queue_match_list(s, &s->takes, now, queue_take_enter,
                            queue_take_empty))
        ;
}

void waits_end(embedding_worker *s)
{
    asking **lists[] = {&s->submits, &s->takes};
    for (size_t i = 0; i < 2; i++) {
        asking *a = *lists[i], *next;
        *lists[i] = NULL;
        for (; a; a = next) {
            next = a->next;
            queue_ready_error(
                a, persia_err_set(PERSIA_ESTALE,
                                  "the servers have other rows now"));
        }
    }
}

void service_tick(embedding_worker *s)
{
    const uint64_t now = persia_clock_ns();
    for (offer *o = s->leased, *next; o; o = next) {
        next = o->next;
        if (o->state == OFFER_LEASED && o->expires <= now) {
            o->expired = now;
            offer_again(s, o, rank_find(s, o->client) != NULL);
        }
    }
    streams_tick(s, now);
    worker_jobs_tick(s, now);
    lineage_tick(s, now);
    ledger_settle(s);
    service_match(s);
}
