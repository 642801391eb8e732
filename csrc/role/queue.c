/* queue.c: what the service knows of ranks, and which Take gets which batch.
 * The lock is held in all of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
        else if (persia_sched_submit(a->waits ? s->waiting : s->jobs, a->job,
                                     a))
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

/* ---- Submit ---- */

/* What the loader need not keep any more, behind what it knows. */
static int list_done(asking *a, const role_stream *t, uint64_t settled)
{
    a->done_n = 0;
    a->first = t->first;
    a->done = persia_wire_memory_take(&a->memory,
                                      WIRE_BATCHES_MAX * sizeof *a->done);
    if (!a->done)
        return PERSIA_ENOMEM;
    for (uint64_t i = 1; i <= WIRE_BATCHES_MAX; i++)
        if (window_has(&t->done, settled + i))
            a->done[a->done_n++] = settled + i;
    return PERSIA_OK;
}

static void submit_done(asking *a, role_stream *t, uint32_t status)
{
    int rc = list_done(a, t, a->o->m.settled);
    if (!a->o->stream) /* it is not in the queue */
        offer_free(a->s, a->o);
    a->o = NULL;
    if (rc)
        ready_error(a, rc);
    else
        ready_status(a, status);
}

/* Also where nothing else that ranks may ask for is in the queue: what is of
 * later epochs leaves it only when this one has been there. */
static int has_room(const role_service *s, const role_stream *t,
                    const offer *o)
{
    const uint64_t epoch = stream_epoch(t, o->m.epoch);
    const offer *first = s->queue;
    if (!s->stats.bytes ||
        s->stats.bytes + o->bytes_n <= s->config.queue_limit)
        return 1;
    while (first && offer_epoch(first) > epoch)
        first = first->next;
    return epoch && s->queue && !first;
}

static void enqueue(role_service *s, role_stream *t, offer *o)
{
    (void)window_add(&t->came, o->m.number);
    o->stream = t;
    t->offers++;
    o->since = persia_clock_ns();
    o->seq = ++s->seq;
    offers_insert(&s->queue, o);
    s->stats.bytes += o->bytes_n;
    s->stats.queued++;
    s->stats.submitted++;
    s->stats.resent += o->m.attempt > 1;
}

/* Takes a batch into the queue; 0: there is no room. */
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
    if (stream_is_of(s, t, o->m.caller.client, o->m.settled))
        stream_hear(t, o->m.settled);
    t->waits &= o->m.attempt > 1;
    t->first = o->m.first ? o->m.first : t->first;
    if (o->m.number > t->settled + WIRE_BATCHES_MAX)
        return 0;
    if (window_has(&t->came, o->m.number)) {
        submit_done(a, t, SUBMIT_QUEUED);
        return 1;
    }
    rc = offer_check(o, &s->plan);
    if (rc) {
        ready_error(a, rc);
        return 1;
    }
    if (!has_room(s, t, o))
        return 0;
    enqueue(s, t, o);
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

void service_heartbeat(asking *a)
{
    role_service *s = a->s;
    const wire_heartbeat *m = &a->m.beat;
    uint32_t status = SUBMIT_QUEUED;
    role_stream *t;
    int rc = m->claims ? stream_claim(s, m, &status)
                       : stream_find(s, m->stream, &t);
    if (!rc && !m->claims) {
        stream_learn(s, t, m);
        rc = list_done(a, t, m->settled);
    }
    if (rc)
        ready_error(a, rc);
    else
        ready_status(a, status);
    service_match(s);
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

void service_declare(asking *a)
{
    a->job = work_declare;
    ready(a);
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
            offer_again(s, o, 1);
        else
            o->expires = 0;
    }
}

static int rank_hello(role_service *s, const wire_hello *m)
{
    role_known_rank *r = rank_find(s, m->rank);
    s->world = m->world;
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
    r->heard = r->held_n = 0;
    return PERSIA_OK;
}

void service_hello(asking *a)
{
    const wire_hello *m = &a->m.hello;
    int rc = m->world ? rank_hello(a->s, m) : PERSIA_OK;
    if (!m->world && m->stream)
        a->job = work_hello;
    if (rc)
        ready_error(a, rc);
    else
        ready(a);
    service_match(a->s);
}

/* What the rank holds now. */
static void rank_hear(role_known_rank *r, const wire_take *m)
{
    const size_t bytes = m->held_n * sizeof *m->held;
    wire_batch_name *held = bytes ? malloc(bytes) : NULL;
    if (bytes && !held)
        return; /* the time of a lease must do */
    if (bytes)
        memcpy(held, m->held, bytes);
    free(r->held);
    r->held = held;
    r->held_n = m->held_n;
    r->heard = persia_clock_ns();
}

int rank_has(const role_known_rank *r, const offer *o)
{
    size_t i = 0;
    while (i < r->held_n && (r->held[i].stream != o->m.stream ||
                             r->held[i].number != o->m.number))
        i++;
    return i < r->held_n;
}

int is_withheld(const role_service *s, const offer *o, uint64_t now)
{
    uint32_t without = 0;
    if (o->m.attempt < 2 || now - o->since >= s->config.lease_ns)
        return 0;
    for (const role_known_rank *r = s->ranks; r; r = r->next)
        without += r->rank < s->world && r->heard > o->since &&
                   !rank_has(r, o);
    return without < s->world;
}

/* ---- Take ---- */

/* The epoch that is asked for; 0: it is not known.  *sure: see
 * epoch_next(). */
static uint64_t epoch_of(const role_service *s, const wire_take *m, int *sure)
{
    *sure = 1;
    return m->epoch ? m->epoch : epoch_next(s, sure);
}

/* A job has the batch, for a Take or a Return. */
static void lease_to(asking *a, offer *o, uint32_t rank, uint64_t request)
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
    o->rank = rank;
    o->request = request;
    o->expires = persia_clock_ns() + s->config.lease_ns;
    o->users++;
    a->o = o;
    ready(a);
}

static void lease(asking *a, offer *o)
{
    a->s->stats.taken++;
    a->job = work_take;
    a->epoch = offer_epoch(o);
    lease_to(a, o, a->m.take.rank, a->m.take.number);
    offer_event(o, OFFER_TAKE);
}

/* A batch of this epoch, or nothing of it. */
static void take_nothing(asking *a, uint32_t status, uint64_t epoch)
{
    a->epoch = epoch;
    ready_status(a, status);
}

static void take_end(asking *a, uint64_t epoch)
{
    role_service *s = a->s;
    a->parts = persia_wire_memory_take(&a->memory,
                                       WIRE_LOADERS_MAX * sizeof *a->parts);
    if (!a->parts) {
        ready_error(a, PERSIA_ENOMEM);
        return;
    }
    a->parts_n = epoch_parts(s, epoch, rank_find(s, a->m.take.rank), a->parts);
    epochs_count(s, epoch);
    take_nothing(a, TAKE_END, epoch);
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

static void look_for_place(const role_service *s, const wire_take *m,
                           uint64_t epoch, offer *list, places *out)
{
    for (offer *o = list; o; o = o->next) {
        if (o->stream->old || offer_epoch(o) != epoch)
            continue;
        out->unplaced |= !o->m.place;
        out->later |= o->m.place > m->place && s->world &&
                      (o->m.place - m->place) % s->world == 0;
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

/* Only this rank would take them, and it asks for a later one.  Of what was
 * sent again servers are asked first. */
static void give_up_earlier(role_service *s, const wire_take *m,
                            uint64_t epoch)
{
    for (offer *o = s->queue, *next; o; o = next) {
        next = o->next;
        if (offer_epoch(o) > epoch ||
            (offer_epoch(o) == epoch && o->m.place >= m->place))
            continue;
        if (!s->world || !o->m.place ||
            (o->m.place - 1) % s->world != m->rank ||
            (o->m.attempt > 1 && !o->settled))
            continue;
        s->stats.given_up++;
        offer_end(s, o);
    }
}

static int check_places(const role_service *s, const places *p)
{
    if (s->config.loaders > 1)
        return persia_err_set(PERSIA_EARG,
                              "steps of all ranks (staleness=0) take the "
                              "batches of one data loader, and this worker "
                              "is of %u: start it with --loaders 1, or use a "
                              "staleness of 1 or more",
                              s->config.loaders);
    if (p->unplaced)
        return persia_err_set(PERSIA_EARG,
                              "steps of all ranks (staleness=0) need the "
                              "place of each batch, and the data loader does "
                              "not send it: see SubmitRequest.place");
    return PERSIA_OK;
}

/* The batch of a place is of one rank: no other one may have it. */
static int take_place(asking *a)
{
    role_service *s = a->s;
    const wire_take *m = &a->m.take;
    int sure;
    const uint64_t epoch = epoch_of(s, m, &sure);
    places p = {0};
    if (!epoch && !m->look)
        return 0;
    give_up_earlier(s, m, epoch);
    look_for_place(s, m, epoch, s->queue, &p);
    look_for_place(s, m, epoch, s->leased, &p);
    if (check_places(s, &p))
        ready_error(a, PERSIA_EARG);
    else if (p.queued && atomic_load(&s->declared) &&
             !rank_has(rank_find(s, m->rank), p.queued))
        lease(a, p.queued);
    else if (!p.queued && !p.leased && p.is_done)
        take_nothing(a, TAKE_DONE, epoch);
    else if (sure && !p.queued && !p.leased && !p.later &&
             epoch_is_over(s, epoch, (int)m->begun))
        take_end(a, epoch);
    else if (m->look || (sure && !m->epoch))
        take_nothing(a, TAKE_EMPTY, sure ? epoch : 0);
    else
        return 0;
    return 1;
}

/* 0: it has to wait. */
static int take_enter(asking *a)
{
    role_service *s = a->s;
    const wire_take *m = &a->m.take;
    const role_known_rank *r = rank_find(s, m->rank);
    const uint64_t now = persia_clock_ns();
    int sure, left = 0;
    if (m->place)
        return take_place(a);
    const uint64_t epoch = epoch_of(s, m, &sure);
    const int idle = epoch_is_idle(s, 1), waits = epoch_is_idle(s, 0);
    offer *o = atomic_load(&s->declared) ? s->queue : NULL;
    while (o && (offer_epoch(o) > epoch || is_withheld(s, o, now))) {
        left |= offer_epoch(o) <= epoch && !rank_has(r, o);
        o = o->next;
    }
    if (o && (idle || !m->look || !m->epoch))
        lease(a, o);
    else if (!o && epoch && sure && !left &&
             epoch_is_over(s, epoch, (int)m->begun))
        take_end(a, epoch);
    else if (m->look || (!o && waits))
        take_nothing(a, !o && idle ? TAKE_IDLE : TAKE_EMPTY, sure ? epoch : 0);
    else if (epoch && sure && !m->epoch)
        take_nothing(a, TAKE_EMPTY, epoch);
    else
        return 0;
    return 1;
}

void service_take(asking *a)
{
    role_service *s = a->s;
    const wire_take *m = &a->m.take;
    role_known_rank *r = rank_find(s, m->rank);
    offer *o = s->leased;
    if (r && r->client == m->caller.client)
        rank_hear(r, m);
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
        take_nothing(a, TAKE_EMPTY, m->epoch); /* its Return has not ended */
    else
        wait_in(&s->takes, a);
    if (r && r->client == m->caller.client)
        epochs_count(s, m->epoch ? m->epoch - 1 : 0);
    service_match(s);
}

/* ---- Return ---- */

/* Whether it is of the rank's present process. */
static int is_of_rank(role_service *s, const wire_return *m)
{
    const role_known_rank *r = rank_find(s, m->rank);
    return r && r->client == m->caller.client;
}

static offer *leased(role_service *s, const wire_return *m)
{
    offer *o = s->leased;
    while (o && o->lease != m->lease)
        o = o->next;
    return m->caller.boot == s->boot && o && o->rank == m->rank ? o : NULL;
}

/* The batch by its name, in one of the lists. */
static offer *named(offer *o, const wire_return *m)
{
    while (o && (o->stream->old || o->m.stream != m->stream ||
                 o->m.number != m->number))
        o = o->next;
    return o;
}

/* The batch of gradients whose lease is of another worker, or of an earlier
 * process of this one: it was sent again, and is not offered yet. */
static offer *returned(role_service *s, const wire_return *m)
{
    if (m->reason != RETURN_TRAINED || !atomic_load(&s->declared) ||
        m->caller.lineage != s->lineage)
        return NULL;
    offer *o = named(s->leased, m); /* its Return has failed before */
    if (o && (o->rank != m->rank || o->request))
        o = NULL;
    return o ? o : named(s->queue, m);
}

static int is_done(const role_service *s, const wire_return *m)
{
    const role_stream *t = stream_named(s, m->stream);
    return t && window_has(&t->done, m->number);
}

/* There is no such lease, nor is the batch in the queue. */
static void returned_late(asking *a)
{
    role_service *s = a->s;
    const wire_return *m = &a->m.back;
    const int own = m->caller.boot == s->boot;
    if (own && m->lease > s->leases.watermark &&
        window_has(&s->leases, m->lease)) {
        ready_status(a, RETURNED_BEFORE);
    } else if (own || m->caller.lineage != s->lineage ||
               m->reason != RETURN_TRAINED || !m->stream ||
               !is_of_rank(s, m) || is_done(s, m) || named(s->leased, m)) {
        s->stats.late += m->reason == RETURN_TRAINED;
        ready_status(a, RETURNED_GONE);
    } else {
        a->job = work_unknown;
        ready(a);
    }
}

static void return_to(asking *a, offer *o)
{
    role_service *s = a->s;
    const wire_return *m = &a->m.back;
    if (o->state != OFFER_LEASED && o->state != OFFER_QUEUED) {
        ready_error(a, persia_err_set(PERSIA_EUNAVAILABLE,
                                      "an earlier Return of this batch has "
                                      "not ended"));
    } else if (m->reason == RETURN_TRAINED) {
        a->job = work_return;
        a->waits = m->parts > 1;
        lease_to(a, o, m->rank, o->state == OFFER_LEASED ? o->request : 0);
        offer_event(o, OFFER_RETURN);
    } else if (m->reason == RETURN_SKIPPED) {
        a->job = work_skip;
        lease_to(a, o, m->rank, o->request);
        offer_event(o, OFFER_RETURN);
    } else {
        offer_again(s, o, 0);
        ready_status(a, RETURNED_DONE);
    }
}

void service_return(asking *a)
{
    role_service *s = a->s;
    const wire_return *m = &a->m.back;
    offer *o = is_of_rank(s, m) ? leased(s, m) : NULL;
    if (!o && is_of_rank(s, m))
        o = returned(s, m);
    if (!o && m->stream && m->reason == RETURN_TRAINED &&
        !rank_find(s, m->rank))
        ready_error(a, persia_err_set(PERSIA_ESTALE,
                                      "rank %u has not said Hello", m->rank));
    else if (!o)
        returned_late(a);
    else
        return_to(a, o);
    service_match(s);
}

void service_sums(asking *a)
{
    const wire_return *m = &a->m.back;
    offer *o = is_of_rank(a->s, m) ? leased(a->s, m) : NULL;
    a->summed.gone = !o;
    if (o && o->state != OFFER_LEASED) {
        ready_error(a, persia_err_set(PERSIA_EUNAVAILABLE,
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
    ready(a);
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
    int sure;
    const uint64_t epoch = epoch_of(a->s, &a->m.take, &sure);
    take_nothing(a, epoch_is_idle(a->s, 1) ? TAKE_IDLE : TAKE_EMPTY,
                 sure ? epoch : 0);
}

void service_match(role_service *s)
{
    const uint64_t now = persia_clock_ns();
    while (match_list(s, &s->submits, now, submit_enter, submit_full) |
           match_list(s, &s->takes, now, take_enter, take_empty))
        ;
}

void waits_end(role_service *s)
{
    asking **lists[] = {&s->submits, &s->takes};
    for (size_t i = 0; i < 2; i++) {
        asking *a = *lists[i], *next;
        *lists[i] = NULL;
        for (; a; a = next) {
            next = a->next;
            ready_error(a, persia_err_set(PERSIA_ESTALE,
                                          "the servers have other rows now"));
        }
    }
}

void service_tick(role_service *s)
{
    const uint64_t now = persia_clock_ns();
    for (offer *o = s->leased, *next; o; o = next) {
        next = o->next;
        if (o->state == OFFER_LEASED && o->expires <= now)
            offer_again(s, o, 1);
    }
    streams_tick(s, now);
    lineage_tick(s, now);
    ledger_settle(s);
    service_match(s);
}
