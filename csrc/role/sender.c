/* sender.c: a data loader sends batches to workers in turn, and keeps each
 * until it is done.  A worker that was started again gets its own once more;
 * those of one that is away for long go to the others.  A thread does that,
 * and tells workers that the loader is alive. */
#include <stdlib.h>
#include <string.h>

#include "role/link.h"
#include "role/private.h"

#define BEAT_NS ((uint64_t)5 * 1000000000)

/* A batch that may have to be sent again: all before it are not done. */
typedef struct kept {
    struct kept *next;
    uint64_t number;
    size_t at; /* link that has it */
    void *bytes;
    size_t bytes_n;
} kept;

struct role_sender {
    role_client c;
    uint64_t stream;
    _Atomic(uint64_t) *boots; /* [links] of the worker that has what is
                                 kept; the thread sets them */
    uint64_t *untold; /* [links] boot of one that runs since the beginning and
                         may not know epoch 1; guarded by lock */
    pthread_mutex_t sending; /* one batch of the caller's at a time */
    pthread_mutex_t lock; /* guards all below; not held during calls */
    pthread_cond_t heard; /* of a worker */
    kept *kept, **kept_end;
    uint64_t pin;         /* number of the batch that is being sent again */
    uint64_t number;      /* of the last batch */
    uint64_t before;      /* of the last one of earlier epochs */
    uint64_t epoch;       /* of the next one, from 1 */
    uint64_t unsure;      /* numbers up to it an earlier process may have
                             sent */
    int broken;           /* the last one may have arrived or not */
    window done;
    uint64_t ring[ROLE_WINDOW / 64];
    sender_counts counts;
};

/* ---- what is kept ---- */

/* Batches up to the number need not be kept. */
static void forget(role_sender *s, uint64_t number)
{
    while (s->kept && s->kept->number <= number &&
           (!s->pin || s->kept->number < s->pin)) {
        kept *k = s->kept;
        s->kept = k->next;
        if (!s->kept)
            s->kept_end = &s->kept;
        free(k->bytes);
        free(k);
    }
}

static void note_done(role_sender *s, const wire_submit_reply *m)
{
    for (size_t i = 0; i < m->done_n; i++)
        (void)window_add(&s->done, m->done[i]);
    window_advance(&s->done);
    forget(s, s->done.watermark);
    pthread_cond_broadcast(&s->heard);
}

static int keep(role_sender *s, const wire_submit *m, size_t at)
{
    kept *k = calloc(1, sizeof *k);
    wire_out o;
    persia_wire_out_init(&o);
    int rc = persia_wire_put_submit(&o, m);
    if (k && !rc)
        k->bytes = aligned_alloc(64, (o.bytes + 64) & ~(size_t)63);
    if (!rc && (!k || !k->bytes))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for a batch");
    if (!rc) {
        persia_wire_out_copy(&o, k->bytes);
        k->bytes_n = o.bytes;
        k->number = m->number;
        k->at = at;
        *s->kept_end = k;
        s->kept_end = &k->next;
    } else {
        free(k);
    }
    persia_wire_out_free(&o);
    return rc;
}

/* ---- sending ---- */

static uint64_t settled_before(const role_sender *s, uint64_t number)
{
    return s->done.watermark < number ? s->done.watermark : number - 1;
}

/* *status: enum role_submit_status. */
static int send_once(role_sender *s, role_link *l, wire_submit *m,
                     uint32_t *status)
{
    wire_submit_reply reply;
    link_answer answer;
    wire_out o;
    m->caller = link_caller(&s->c, l);
    pthread_mutex_lock(&s->lock);
    m->settled = settled_before(s, m->number);
    pthread_mutex_unlock(&s->lock);
    persia_wire_out_init(&o);
    int rc = persia_wire_put_submit(&o, m);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    rc = link_call(&s->c, l, ROLE_SUBMIT, &o, 1, s->c.timeout_ns, &answer);
    if (!rc)
        rc = persia_wire_get_submit_reply(answer.bytes.data, answer.bytes.n,
                                          &answer.memory, &reply);
    if (!rc) {
        pthread_mutex_lock(&s->lock);
        note_done(s, &reply);
        pthread_mutex_unlock(&s->lock);
        *status = reply.status;
    }
    link_answer_free(&answer);
    return rc;
}

/* A worker that is there, from this one on; `first` if none is. */
static size_t pick(const role_sender *s, size_t first)
{
    for (size_t i = 0; i < s->c.links_n; i++)
        if (!link_is_away(&s->c.links[(first + i) % s->c.links_n]))
            return (first + i) % s->c.links_n;
    return first;
}

/* Until a worker has it: the one at *at, or another if that is away. */
static int place(role_sender *s, wire_submit *m, size_t *at)
{
    uint64_t until = persia_clock_ns() + s->c.timeout_ns;
    for (;;) {
        uint32_t status = SUBMIT_FULL;
        *at = pick(s, *at);
        role_link *l = &s->c.links[*at];
        int rc = send_once(s, l, m, &status);
        if (!rc && status == SUBMIT_QUEUED)
            return PERSIA_OK;
        if (!rc) { /* it is there, and has no room */
            until = persia_clock_ns() + s->c.timeout_ns;
        } else if (link_failed(&s->c, l, rc) &&
                   !link_is_away(&s->c.links[pick(s, *at)])) {
            m->attempt = 2; /* it may have arrived */
        } else if ((rc = link_retry(&s->c, l, rc, until))) {
            return rc;
        }
        if ((rc = persia_interrupt_poll()))
            return rc;
    }
}

/* Whether a call may go better later, or at another worker. */
static int may_pass(int rc)
{
    return rc == PERSIA_EUNAVAILABLE || rc == PERSIA_ETIMEOUT ||
           rc == PERSIA_ESTALE || rc == PERSIA_EINTR || rc == PERSIA_ENOMEM;
}

/* The pinned one, once more: to the worker at `to`, or another one.  Whether
 * it is placed, or refused for good; else the thread tries again later. */
static int place_again(role_sender *s, kept *k, size_t to)
{
    wire_memory memory;
    wire_submit m;
    uint32_t status = SUBMIT_FULL;
    to = pick(s, to);
    persia_wire_memory_init(&memory);
    int rc = persia_wire_get_submit(k->bytes, k->bytes_n, &memory, &m);
    m.attempt = 2;
    if (!rc)
        rc = send_once(s, &s->c.links[to], &m, &status);
    if (rc)
        (void)link_failed(&s->c, &s->c.links[to], rc);
    pthread_mutex_lock(&s->lock);
    if (!rc && status == SUBMIT_QUEUED) {
        k->at = to;
        s->counts.moved++;
    } else if (rc && !may_pass(rc)) {
        s->counts.refused++;
        (void)window_add(&s->done, k->number);
    }
    pthread_mutex_unlock(&s->lock);
    persia_wire_memory_free(&memory);
    return rc ? !may_pass(rc) : status == SUBMIT_QUEUED;
}

/* The next one that a link has and that is not done; *pin: its number. */
static kept *pin_next(role_sender *s, size_t at)
{
    pthread_mutex_lock(&s->lock);
    kept *k = s->kept;
    while (k && (k->number <= s->pin || k->at != at ||
                 window_has(&s->done, k->number)))
        k = k->next;
    s->pin = k ? k->number : 0;
    if (!k)
        forget(s, s->done.watermark);
    pthread_mutex_unlock(&s->lock);
    return k;
}

/* Whether the worker at a link has nothing of what is kept: it was started
 * again, or is away for long. */
static int has_lost(const role_sender *s, size_t at)
{
    const role_link *l = &s->c.links[at];
    const uint64_t away = atomic_load(&l->away);
    return away ? persia_clock_ns() - away >= s->c.move_ns
                : s->boots[at] != atomic_load(&l->boot);
}

/* What workers have lost, to those that are there. */
static void tend(role_sender *s)
{
    for (size_t i = 0; i < s->c.links_n; i++) {
        const uint64_t boot = atomic_load(&s->c.links[i].boot);
        size_t to = i;
        int placed = 1;
        if (!has_lost(s, i) || link_is_away(&s->c.links[pick(s, i)]))
            continue;
        for (kept *k; placed && (k = pin_next(s, i));) {
            placed = place_again(s, k, to);
            to = link_is_away(&s->c.links[i]) ? (to + 1) % s->c.links_n : i;
        }
        if (placed && !link_is_away(&s->c.links[i]))
            s->boots[i] = boot;
        pthread_mutex_lock(&s->lock);
        s->pin = 0;
        pthread_mutex_unlock(&s->lock);
    }
}

/* ---- signs of life ---- */

/* Whether a worker is to get batches first, which may be of an earlier epoch:
 * it counts epochs from the first that it hears of.  The lock is held. */
static int is_behind(const role_sender *s, const role_link *l)
{
    const size_t at = (size_t)(l - s->c.links);
    const kept *k = s->kept;
    while (k && (k->at != at || window_has(&s->done, k->number)))
        k = k->next;
    return k && atomic_load(&s->boots[at]) != atomic_load(&l->boot);
}

static int beat_once(role_sender *s, role_link *l, uint64_t epoch, int leaves)
{
    wire_submit_reply reply;
    link_answer answer;
    wire_out o;
    pthread_mutex_lock(&s->lock);
    const wire_heartbeat m = {.caller = link_caller(&s->c, l),
                              .stream = s->stream,
                              .settled = settled_before(s, s->number + 1),
                              .epoch = epoch ? epoch : s->epoch,
                              .leaves = (uint32_t)leaves};
    const int begun = (s->number || s->epoch > 1) && !is_behind(s, l);
    pthread_mutex_unlock(&s->lock);
    persia_wire_out_init(&o);
    int rc = begun ? persia_wire_put_heartbeat(&o, &m) : PERSIA_OK;
    if (rc || !begun) {
        persia_wire_out_free(&o);
        return rc;
    }
    rc = link_call(&s->c, l, ROLE_HEARTBEAT, &o, 0, BEAT_NS, &answer);
    if (!rc)
        rc = persia_wire_get_submit_reply(answer.bytes.data, answer.bytes.n,
                                          &answer.memory, &reply);
    if (!rc) {
        pthread_mutex_lock(&s->lock);
        note_done(s, &reply);
        pthread_mutex_unlock(&s->lock);
    }
    link_answer_free(&answer);
    if (rc == PERSIA_ESTALE)
        (void)link_hello(&s->c, l, BEAT_NS);
    else if (rc)
        (void)link_failed(&s->c, l, rc);
    return rc;
}

/* A worker takes a loader that it hears of for the first time to be in the
 * epoch that is open there.  So one that runs since this loader began, and had
 * no batch of its first epoch, hears of that epoch before the next. */
static int beat(role_sender *s, role_link *l, int leaves)
{
    const size_t i = (size_t)(l - s->c.links);
    pthread_mutex_lock(&s->lock);
    const int first = s->epoch > 1 && s->untold[i] == atomic_load(&l->boot);
    pthread_mutex_unlock(&s->lock);
    int rc = first ? beat_once(s, l, 1, 0) : PERSIA_OK;
    if (rc)
        return rc;
    pthread_mutex_lock(&s->lock);
    if (first)
        s->untold[i] = 0;
    pthread_mutex_unlock(&s->lock);
    return beat_once(s, l, 0, leaves);
}

static void tick(void *owner)
{
    role_sender *s = owner;
    for (size_t i = 0; i < s->c.links_n; i++)
        if (!link_is_away(&s->c.links[i]))
            (void)beat(s, &s->c.links[i], 0);
    tend(s);
}

/* ---- life ---- */

/* What an earlier process with this name has sent. */
static int learn(role_sender *s)
{
    wire_ledger ledger;
    int rc = link_ledger(&s->c, &s->c.links[pick(s, 0)], s->stream, &ledger);
    if (rc)
        return rc;
    window_settle(&s->done, ledger.watermark);
    for (uint64_t i = 0; i < 64 * (uint64_t)WIRE_WINDOW_MAX; i++)
        if (ledger.window[i / 64] >> i % 64 & 1)
            (void)window_add(&s->done, ledger.watermark + 1 + i);
    window_advance(&s->done);
    if (window_top(&s->done))
        s->unsure = window_top(&s->done) + WIRE_BATCHES_MAX;
    return PERSIA_OK;
}

int persia_sender_open(const role_client_config *config, role_sender **out)
{
    *out = NULL;
    role_sender *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a sender");
    int rc = role_client_open(config, &s->c);
    if (rc) {
        free(s);
        return rc;
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->sending, NULL);
    persia_cond_init(&s->heard);
    window_init(&s->done, s->ring, ROLE_WINDOW / 64);
    s->kept_end = &s->kept;
    s->epoch = 1;
    s->stream = config->stream ? config->stream : s->c.client;
    s->counts.stream = s->stream;
    s->boots = calloc(s->c.links_n, sizeof *s->boots);
    s->untold = calloc(s->c.links_n, sizeof *s->untold);
    if (!s->boots || !s->untold)
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for a sender");
    for (size_t i = 0; i < s->c.links_n && !rc; i++)
        s->boots[i] = s->untold[i] = atomic_load(&s->c.links[i].boot);
    if (!rc && config->stream)
        rc = learn(s);
    if (!rc)
        rc = role_client_start(&s->c, tick, s);
    if (rc) {
        persia_sender_close(s, 0);
        return rc;
    }
    *out = s;
    return PERSIA_OK;
}

void persia_sender_close(role_sender *s, int leaves)
{
    if (!s)
        return;
    role_client_stop(&s->c);
    for (size_t i = 0; i < s->c.links_n && leaves; i++)
        if (!link_is_away(&s->c.links[i]))
            (void)beat(s, &s->c.links[i], 1);
    role_client_close(&s->c);
    forget(s, UINT64_MAX);
    free(s->boots);
    free(s->untold);
    pthread_cond_destroy(&s->heard);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->sending);
    free(s);
}

/* ---- the caller's ---- */

/* Names the batch; whether all servers have it. */
static int name_batch(role_sender *s, wire_submit *m)
{
    pthread_mutex_lock(&s->lock);
    m->stream = s->stream;
    m->number = s->number + 1;
    m->place = m->number - s->before;
    m->epoch = s->epoch;
    m->attempt = m->number <= s->unsure ? 2 : 1;
    m->settled = 0;
    const int passed = window_has(&s->done, m->number);
    pthread_mutex_unlock(&s->lock);
    return passed;
}

static int send_next(role_sender *s, wire_submit *m)
{
    size_t at = (s->number - s->before) % s->c.links_n;
    if (s->broken)
        return persia_err_set(PERSIA_ECLOSED,
                              "it is not known whether the last batch was "
                              "sent: close this sender and open another");
    const int passed = name_batch(s, m);
    int rc = passed ? PERSIA_OK : place(s, m, &at);
    pthread_mutex_lock(&s->lock);
    if (!rc && !window_has(&s->done, m->number)) {
        m->settled = 0;
        rc = keep(s, m, at);
    }
    s->broken = rc == PERSIA_EINTR || rc == PERSIA_EUNAVAILABLE ||
                rc == PERSIA_ETIMEOUT;
    s->number += !rc || s->broken;
    s->counts.sent += !rc;
    s->counts.passed += !rc && passed;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int persia_sender_send(role_sender *s, wire_submit *m)
{
    pthread_mutex_lock(&s->sending);
    int rc = send_next(s, m);
    pthread_mutex_unlock(&s->sending);
    return rc;
}

int persia_sender_end(role_sender *s)
{
    const uint64_t until = persia_clock_ns() + s->c.timeout_ns;
    pthread_mutex_lock(&s->lock);
    s->epoch++;
    s->before = s->number;
    pthread_mutex_unlock(&s->lock);
    for (size_t i = 0, heard = 0; i < s->c.links_n || !heard; i++) {
        role_link *l = &s->c.links[i % s->c.links_n];
        int rc = link_is_away(l) && heard ? PERSIA_OK : beat(s, l, 0);
        while (rc && !link_is_away(l) &&
               !(rc = link_retry(&s->c, l, rc, until)))
            rc = beat(s, l, 0);
        heard += !rc && !link_is_away(l);
        if (rc && !link_is_away(l))
            return rc;
        /* The thread tells those that are away when they are back. */
        if (!heard && i + 1 >= s->c.links_n &&
            (rc = link_retry(&s->c, l, rc, until)))
            return rc;
    }
    return PERSIA_OK;
}

/* The first batch that is not done. */
static const kept *first_left(const role_sender *s)
{
    const kept *k = s->kept;
    while (k && window_has(&s->done, k->number))
        k = k->next;
    return k;
}

/* Whether there has been a worker within the timeout. */
static int check_away(const role_sender *s)
{
    const uint64_t now = persia_clock_ns();
    for (size_t i = 0; i < s->c.links_n; i++) {
        const uint64_t away = atomic_load(&s->c.links[i].away);
        if (!away || now - away < s->c.timeout_ns)
            return PERSIA_OK;
    }
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "no embedding worker can be reached, %s among them",
                          s->c.links[0].address);
}

static int flush_locked(role_sender *s, uint64_t until)
{
    int rc = PERSIA_OK;
    while (!rc && first_left(s)) {
        if (persia_clock_ns() >= until)
            return persia_err_set(PERSIA_ETIMEOUT,
                                  "batch %llu is not trained yet",
                                  (unsigned long long)first_left(s)->number);
        rc = check_away(s);
        if (!rc)
            rc = persia_cond_wait_poll(&s->heard, &s->lock, until);
    }
    return rc;
}

int persia_sender_flush(role_sender *s, uint64_t timeout_ns)
{
    atomic_store(&s->c.hurry, 1);
    role_client_wake(&s->c);
    pthread_mutex_lock(&s->lock);
    int rc = flush_locked(s, timeout_ns ? persia_clock_ns() + timeout_ns
                                        : UINT64_MAX);
    pthread_mutex_unlock(&s->lock);
    atomic_store(&s->c.hurry, 0);
    return rc;
}

void persia_sender_get_counts(role_sender *s, sender_counts *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->counts;
    out->done = s->done.watermark < s->number ? s->done.watermark : s->number;
    pthread_mutex_unlock(&s->lock);
    for (size_t i = 0; i < s->c.links_n; i++)
        out->away += (uint64_t)link_is_away(&s->c.links[i]);
}
