/* sender.c: a data loader sends batches to workers in turn, and keeps each
 * until it is done.  A worker that was started again, or has forgotten the
 * loader, gets its own once more; those of one that is away for long go to
 * the others.  A thread does that, and tells workers that the loader is alive.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader/private.h"

/* ---- what is kept ---- */

void sender_forget(loader_sender *s, uint64_t number)
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
    assert(s->kept || s->kept_end == &s->kept);
}

/* A batch ends without an update: the caller gets the error of the first. */
static void sender_note_failed(loader_sender *s, uint64_t number, int code,
                               const char *text)
{
    s->counts.failed++;
    if (s->failed)
        return;
    s->failed = code;
    snprintf(s->failed_text, sizeof s->failed_text, "batch %llu: %s",
             (unsigned long long)number, text);
}

static int sender_code_of(const char *error)
{
    int code = PERSIA_OK + 1;
    while (code < PERSIA_ERROR_COUNT && strcmp(persia_err_name(code), error))
        code++;
    return code < PERSIA_ERROR_COUNT ? code : PERSIA_EINTERNAL;
}

/* NULL: it has an update. */
static const wire_failed_batch *sender_failure_of(const wire_submit_reply *m,
                                                  uint64_t number)
{
    size_t i = 0;
    while (i < m->failed_n && m->failed[i].number != number)
        i++;
    return i < m->failed_n ? &m->failed[i] : NULL;
}

/* The end of a batch is known: of its trace, too. */
static void sender_trace_end(const loader_sender *s, uint64_t number, int code)
{
    kept *k = s->kept;
    while (k && k->number < number)
        k = k->next;
    if (k && k->number == number)
        persia_trace_end(&k->trace, code);
}

/* What a worker says, which has this boot and rows of this lineage. */
static void sender_note_reply(loader_sender *s, worker_link *l,
                              const wire_submit_reply *m,
                              const wire_caller *to)
{
    if (m->leaving)
        link_leaves(l, to->boot);
    for (size_t i = 0; i < m->done_n && to->lineage == s->lineage; i++) {
        if (window_add(&s->done, m->done[i]) != WINDOW_ADDED)
            continue;
        const wire_failed_batch *f = sender_failure_of(m, m->done[i]);
        const int code = f ? sender_code_of(f->error) : PERSIA_OK;
        sender_trace_end(s, m->done[i], code);
        if (f)
            sender_note_failed(s, f->number, code, f->text);
        else /* without memory it is not compared later */
            (void)acks_add(&s->acked, m->done[i]);
    }
    if (m->memory) /* the reply to a claim says none */
        atomic_store(&l->memory, m->memory);
    s->servers = m->servers ? m->servers : s->servers;
    s->first = s->first ? s->first : m->first;
    window_advance(&s->done);
    sender_forget(s, s->done.watermark);
    size_t n = 0;
    while (n < s->ends_n && s->ends[n] <= s->done.watermark)
        n++;
    s->ends_n -= n;
    memmove(s->ends, s->ends + n, s->ends_n * sizeof *s->ends);
    pthread_cond_broadcast(&s->heard);
}

static int sender_keep(loader_sender *s, const wire_submit *m,
                       const placed *at, const trace_span *trace)
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
        k->placed = *at;
        k->trace = *trace;
        *s->kept_end = k;
        s->kept_end = &k->next;
    } else {
        free(k);
    }
    persia_wire_out_free(&o);
    return rc;
}

/* ---- sending ---- */

static uint64_t sender_settled_before(const loader_sender *s, uint64_t number)
{
    return s->done.watermark < number ? s->done.watermark : number - 1;
}

/* To the worker at to->at.  *status: enum submit_status. */
static int sender_send_once(loader_sender *s, wire_submit *m, placed *to,
                            uint32_t *status)
{
    worker_link *l = &s->c.links[to->at];
    wire_submit_reply reply;
    link_answer answer;
    wire_out o;
    m->caller = link_caller(&s->c, l);
    pthread_mutex_lock(&s->lock);
    m->settled = sender_settled_before(s, m->number);
    m->first = s->first;
    m->job = s->c.job;
    int rc = sender_check_replaced(s);
    pthread_mutex_unlock(&s->lock);
    persia_wire_out_init(&o);
    if (!rc)
        rc = persia_wire_put_submit(&o, m);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    const uint64_t began = persia_trace_now();
    rc = link_call(&s->c, l, WORKER_SUBMIT, &o, 1, s->c.timeout_ns, &answer);
    persia_trace_part(TRACE_SUBMIT, m->stream, m->number, began, m->attempt,
                      rc);
    if (!rc)
        rc = persia_wire_get_submit_reply(answer.bytes.data, answer.bytes.n,
                                          &answer.memory, &reply);
    if (!rc) {
        pthread_mutex_lock(&s->lock);
        sender_note_reply(s, l, &reply, &m->caller);
        pthread_mutex_unlock(&s->lock);
        *status = reply.status;
        to->boot = m->caller.boot;
        to->memory = reply.memory;
    }
    link_answer_free(&answer);
    return rc;
}

/* A worker that is there and stays, from this one on, else one that is there;
 * `first` if none is. */
static size_t sender_pick(const loader_sender *s, size_t first)
{
    const size_t n = s->c.links_n;
    size_t there = n;
    for (size_t i = 0; i < n; i++) {
        const size_t at = (first + i) % n;
        if (link_is_away(&s->c.links[at]))
            continue;
        if (!link_is_leaving(&s->c.links[at]))
            return at;
        there = there < n ? there : at;
    }
    return there < n ? there : first;
}

/* Until a worker has it: the one at to->at, or another if that is away. */
static int sender_place(loader_sender *s, wire_submit *m, placed *to)
{
    uint64_t until = persia_deadline(s->c.timeout_ns);
    for (;;) {
        uint32_t status = SUBMIT_FULL;
        to->at = sender_pick(s, to->at);
        worker_link *l = &s->c.links[to->at];
        int rc = sender_send_once(s, m, to, &status);
        if (!rc && status == SUBMIT_QUEUED)
            return PERSIA_OK;
        if (!rc) { /* it is there, and has no room */
            until = persia_deadline(s->c.timeout_ns);
        } else if (link_failed(&s->c, l, rc) &&
                   !link_is_away(&s->c.links[sender_pick(s, to->at)])) {
            m->attempt = 2; /* it may have arrived */
        } else if ((rc = link_retry(&s->c, l, rc, until))) {
            return rc;
        }
        if ((rc = persia_interrupt_poll()))
            return rc;
    }
}

/* Whether a call may go better later, or at another worker. */
static int sender_may_pass(int rc)
{
    return persia_retry(RETRY_SUBMIT, rc) != RETRY_NEVER;
}

/* The pinned one, once more: to the worker at `first`, or another one.
 * Whether it is placed, or refused for good; else the thread tries again
 * later. */
static int sender_place_again(loader_sender *s, kept *k, size_t first)
{
    placed to = {.at = sender_pick(s, first)};
    wire_memory memory;
    wire_submit m;
    uint32_t status = SUBMIT_FULL;
    persia_wire_memory_init(&memory);
    int rc = persia_wire_get_submit(k->bytes, k->bytes_n, &memory, &m);
    m.attempt = 2;
    if (!rc)
        rc = sender_send_once(s, &m, &to, &status);
    if (rc)
        (void)link_failed(&s->c, &s->c.links[to.at], rc);
    pthread_mutex_lock(&s->lock);
    assert(s->pin == k->number);
    if (!rc && status == SUBMIT_QUEUED) {
        k->placed = to;
        s->counts.moved++;
    } else if (rc && !sender_may_pass(rc)) {
        sender_note_failed(s, k->number, rc, persia_err_text());
        (void)window_add(&s->done, k->number);
    }
    pthread_mutex_unlock(&s->lock);
    persia_wire_memory_free(&memory);
    return rc ? !sender_may_pass(rc) : status == SUBMIT_QUEUED;
}

/* Whether the worker that has it was started again, has forgotten the stream,
 * has left, or is away for long. */
static int sender_is_lost(const loader_sender *s, const kept *k)
{
    const worker_link *l = &s->c.links[k->placed.at];
    const uint64_t away = atomic_load(&l->away);
    return away ? link_is_leaving(l) ||
                      persia_clock_ns() - away >= s->c.move_ns
                : k->placed.boot != atomic_load(&l->boot) ||
                      k->placed.memory != atomic_load(&l->memory);
}

/* The next one that a link had, and has lost; s->pin: its number. */
static kept *sender_pin_next(loader_sender *s, size_t at)
{
    pthread_mutex_lock(&s->lock);
    kept *k = s->kept;
    while (k && (k->number <= s->pin || k->placed.at != at ||
                 !sender_is_lost(s, k) || window_has(&s->done, k->number)))
        k = k->next;
    s->pin = k ? k->number : 0;
    if (!k)
        sender_forget(s, s->done.watermark);
    pthread_mutex_unlock(&s->lock);
    return k;
}

/* What workers have lost, to those that are there. */
static void sender_tend(loader_sender *s)
{
    for (size_t i = 0; i < s->c.links_n; i++) {
        size_t to = i;
        int placed = 1;
        if (link_is_away(&s->c.links[sender_pick(s, i)]))
            continue;
        for (kept *k; placed && (k = sender_pin_next(s, i));) {
            placed = sender_place_again(s, k, to);
            to = link_is_away(&s->c.links[i]) ? (to + 1) % s->c.links_n : i;
        }
        pthread_mutex_lock(&s->lock);
        s->pin = 0;
        pthread_mutex_unlock(&s->lock);
    }
}

/* ---- signs of life ---- */

/* All that a worker is to know.  The lock is held. */
static wire_heartbeat sender_beat_of(loader_sender *s, const worker_link *l,
                                     int leaves)
{
    wire_heartbeat m = {.caller = link_caller(&s->c, l),
                        .stream = s->stream,
                        .settled = s->done.watermark,
                        .epoch = s->epoch,
                        .first = s->first,
                        .ends = s->ends,
                        .ends_n = s->ends_n,
                        .waits = (uint32_t)s->waits,
                        .shared = (uint32_t)s->claimed,
                        .job = s->c.job,
                        .leaves = (uint32_t)leaves};
    for (uint64_t i = 0; i < WIRE_BATCHES_MAX; i++)
        if (window_has(&s->done, m.settled + 1 + i))
            m.window[i / 64] |= (uint64_t)1 << i % 64;
    return m;
}

/* claims: see wire_heartbeat; *status is the answer to it. */
static int sender_beat_as(loader_sender *s, worker_link *l, int leaves,
                          uint64_t claims, uint32_t *status)
{
    wire_submit_reply reply;
    link_answer answer;
    wire_out o;
    persia_wire_out_init(&o);
    pthread_mutex_lock(&s->lock);
    wire_heartbeat m = sender_beat_of(s, l, leaves);
    m.claims = claims;
    int rc = sender_check_replaced(s);
    if (!rc)
        rc = persia_wire_put_heartbeat(&o, &m);
    pthread_mutex_unlock(&s->lock);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    rc = link_call(&s->c, l, WORKER_HEARTBEAT, &o, 1, SENDER_BEAT_NS, &answer);
    if (!rc)
        rc = persia_wire_get_submit_reply(answer.bytes.data, answer.bytes.n,
                                          &answer.memory, &reply);
    if (!rc) {
        *status = reply.status;
        pthread_mutex_lock(&s->lock);
        sender_note_reply(s, l, &reply, &m.caller);
        pthread_mutex_unlock(&s->lock);
    }
    link_answer_free(&answer);
    if (rc == PERSIA_ESTALE)
        (void)link_hello(&s->c, l);
    else if (rc)
        (void)link_failed(&s->c, l, rc);
    return rc;
}

static int sender_beat(loader_sender *s, worker_link *l, int leaves)
{
    uint32_t status;
    int rc = sender_beat_as(s, l, leaves, 0, &status);
    return rc == PERSIA_ESTALE ? sender_beat_as(s, l, leaves, 0, &status) : rc;
}

/* Whether workers are to know of it. */
static int sender_has_begun(loader_sender *s)
{
    pthread_mutex_lock(&s->lock);
    int has = s->number || s->epoch > 1 || s->claimed;
    pthread_mutex_unlock(&s->lock);
    return has;
}

static void sender_tick(void *owner)
{
    loader_sender *s = owner;
    const int begun = sender_has_begun(s);
    for (size_t i = 0; i < s->c.links_n; i++) {
        worker_link *l = &s->c.links[i];
        if (!link_is_away(l)) /* before it begins it only learns of a load */
            (void)(begun ? sender_beat(s, l, 0)
                         : link_hello(&s->c, l));
    }
    sender_tend(s);
    pthread_mutex_lock(&s->lock);
    const int changed = s->servers != s->compared;
    pthread_mutex_unlock(&s->lock);
    if (changed)
        sender_compare(s, SENDER_BEAT_NS);
}

/* ---- life ---- */

int persia_sender_open(const worker_client_config *config, loader_sender **out)
{
    *out = NULL;
    loader_sender *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a sender");
    int rc = worker_client_open(config, &s->c);
    if (rc) {
        free(s);
        return rc;
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->sending, NULL);
    persia_cond_init(&s->heard);
    window_init(&s->done, s->ring, WORKER_WINDOW / 64);
    s->kept_end = &s->kept;
    s->epoch = 1;
    s->named = config->stream != 0;
    s->stream = s->named ? config->stream : s->c.client;
    s->counts.stream = s->stream;
    rc = sender_learn(s, config->stream);
    if (!rc)
        rc = worker_client_start(&s->c, sender_tick, sender_meet, s);
    if (rc) {
        persia_sender_close(s, 0);
        return rc;
    }
    *out = s;
    return PERSIA_OK;
}

int persia_sender_list(loader_sender *s, const worker_client_config *config)
{
    return worker_client_list(&s->c, config);
}

void persia_sender_close(loader_sender *s, int leaves)
{
    if (!s)
        return;
    worker_client_stop(&s->c);
    for (size_t i = 0; i < s->c.links_n && leaves && sender_has_begun(s); i++)
        if (!link_is_away(&s->c.links[i]))
            (void)sender_beat(s, &s->c.links[i], 1);
    worker_client_close(&s->c);
    sender_forget(s, UINT64_MAX);
    acks_free(&s->acked);
    acks_free(&s->lost);
    pthread_cond_destroy(&s->heard);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->sending);
    free(s);
}

/* ---- the caller's ---- */

/* Names the batch.  *passed: all servers have it. */
static int sender_name_batch(loader_sender *s, wire_submit *m, int *passed)
{
    pthread_mutex_lock(&s->lock);
    m->stream = s->stream;
    m->number = s->number + 1;
    m->place = m->number - s->before;
    m->epoch = s->epoch;
    m->attempt = m->number <= s->unsure ? 2 : 1;
    m->settled = 0;
    *passed = window_has(&s->done, m->number);
    int rc = sender_check_replaced(s);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static int sender_send_next(loader_sender *s, wire_submit *m)
{
    placed to = {.at = (s->number - s->before) % s->c.links_n};
    if (s->broken)
        return persia_err_set(PERSIA_ECLOSED,
                              "it is not known whether the last batch was "
                              "sent: close this sender and open another");
    for (size_t i = 0; i < s->c.links_n && !sender_has_begun(s); i++)
        if (!link_is_away(&s->c.links[i]))
            (void)sender_beat(s, &s->c.links[i],
                              0); /* before any batch is done */
    int passed;
    trace_span trace = {0};
    int rc = sender_name_batch(s, m, &passed);
    if (!rc && !passed) {
        persia_trace_begin(&trace, TRACE_BATCH, m->stream, m->number);
        rc = sender_place(s, m, &to);
    }
    pthread_mutex_lock(&s->lock);
    if (!rc && !window_has(&s->done, m->number)) {
        m->settled = 0;
        rc = sender_keep(s, m, &to, &trace);
    } else {
        persia_trace_end(&trace, rc);
    }
    s->broken = rc == PERSIA_EINTR || rc == PERSIA_EUNAVAILABLE ||
                rc == PERSIA_ETIMEOUT;
    s->number += !rc || s->broken;
    s->counts.sent += !rc;
    s->counts.passed += !rc && passed;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int persia_sender_send(loader_sender *s, wire_submit *m)
{
    pthread_mutex_lock(&s->sending);
    const uint64_t since = persia_clock_ns();
    int rc = sender_send_next(s, m);
    pthread_mutex_lock(&s->lock);
    s->counts.sending_ns += persia_clock_ns() - since;
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_unlock(&s->sending);
    return rc;
}

/* Waits for a worker's word.  The lock is held. */
static int sender_hear(loader_sender *s, uint64_t until)
{
    int rc = persia_cond_wait_poll(&s->heard, &s->lock, until);
    return rc ? rc : sender_check_replaced(s);
}

/* Waits while batches of too many epochs are not trained. */
static int sender_end_epoch(loader_sender *s)
{
    pthread_mutex_lock(&s->lock);
    int rc = sender_check_replaced(s);
    while (!rc && s->ends_n == WIRE_EPOCHS_MAX)
        rc = sender_hear(s, UINT64_MAX);
    if (!rc) {
        s->epoch++;
        s->before = s->number;
        if (s->number > s->done.watermark)
            s->ends[s->ends_n++] = s->number;
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int persia_sender_end(loader_sender *s)
{
    const uint64_t until = persia_deadline(s->c.timeout_ns);
    int rc = sender_end_epoch(s);
    for (size_t i = 0, heard = 0; !rc && (i < s->c.links_n || !heard); i++) {
        worker_link *l = &s->c.links[i % s->c.links_n];
        rc = link_is_away(l) && heard ? PERSIA_OK : sender_beat(s, l, 0);
        while (rc && !link_is_away(l) &&
               !(rc = link_retry(&s->c, l, rc, until)))
            rc = sender_beat(s, l, 0);
        heard += !rc && !link_is_away(l);
        if (rc && !link_is_away(l))
            return rc;
        rc = PERSIA_OK; /* the thread tells it when it is back */
        if (!heard && i + 1 >= s->c.links_n)
            rc = link_retry(&s->c, l,
                            persia_err_set(PERSIA_EUNAVAILABLE,
                                           "%s cannot be reached", l->address),
                            until);
    }
    return rc;
}

/* The first batch that is not done. */
static const kept *sender_first_left(const loader_sender *s)
{
    const kept *k = s->kept;
    while (k && window_has(&s->done, k->number))
        k = k->next;
    return k;
}

/* Whether there has been a worker within the timeout. */
static int sender_check_away(const loader_sender *s)
{
    const uint64_t now = persia_clock_ns();
    for (size_t i = 0; i < s->c.links_n; i++) {
        const uint64_t away = atomic_load(&s->c.links[i].away);
        if (!away || now - away < s->c.timeout_ns)
            return PERSIA_OK;
    }
    return sender_all_away(s);
}

/* How many of those that are kept are not done. */
static size_t count_left(const loader_sender *s)
{
    size_t n = 0;
    for (const kept *k = s->kept; k; k = k->next)
        n += !window_has(&s->done, k->number);
    return n;
}

/* Once the error of a batch. */
static int sender_tell_failed(loader_sender *s)
{
    pthread_mutex_lock(&s->lock);
    const int rc = s->failed ? persia_err_set(s->failed, "%s", s->failed_text)
                             : PERSIA_OK;
    s->failed = 0;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static int sender_flush_locked(loader_sender *s, uint64_t timeout_ns)
{
    size_t before = count_left(s);
    uint64_t since = persia_clock_ns();
    int rc = sender_check_replaced(s);
    while (!rc && sender_first_left(s)) {
        const uint64_t now = persia_clock_ns();
        const size_t left = count_left(s);
        since = left < before ? now : since;
        before = left;
        if (timeout_ns && now - since >= timeout_ns)
            return persia_err_set(
                PERSIA_ETIMEOUT, "batch %llu is not trained yet",
                (unsigned long long)sender_first_left(s)->number);
        rc = sender_check_away(s);
        if (!rc)
            rc = sender_hear(
                s, timeout_ns ? persia_deadline_later(since, timeout_ns)
                              : PERSIA_FOREVER);
    }
    return rc;
}

int persia_sender_flush(loader_sender *s, uint64_t timeout_ns)
{
    atomic_store(&s->c.hurry, 1);
    pthread_mutex_lock(&s->lock);
    s->waits = 1;
    worker_client_wake(&s->c);
    int rc = sender_flush_locked(s, timeout_ns);
    s->waits = 0;
    pthread_mutex_unlock(&s->lock);
    atomic_store(&s->c.hurry, 0);
    worker_client_wake(&s->c); /* it tells workers */
    if (rc)
        return rc;
    sender_compare(s, s->c.timeout_ns);
    return sender_tell_failed(s);
}

/* Of the workers that are there.  *heard: one of them has answered. */
static int sender_claim_once(loader_sender *s, uint64_t epochs,
                             uint32_t *status, int *heard)
{
    int rc = PERSIA_OK;
    *status = SUBMIT_QUEUED;
    *heard = 0;
    for (size_t i = 0; i < s->c.links_n && *status == SUBMIT_QUEUED; i++) {
        worker_link *l = &s->c.links[i];
        if (link_is_away(l))
            continue;
        rc = sender_beat_as(s, l, 0, epochs, status);
        if (rc == PERSIA_ESTALE)
            rc = sender_beat_as(s, l, 0, epochs, status);
        *heard |= !rc;
    }
    return *heard ? PERSIA_OK : rc ? rc : sender_all_away(s);
}

int persia_sender_claim(loader_sender *s, uint64_t epochs, uint32_t *status)
{
    const uint64_t until = persia_deadline(s->c.timeout_ns);
    int heard, rc;
    do
        rc = sender_claim_once(s, epochs, status, &heard);
    while (rc && !(rc = link_retry(&s->c, &s->c.links[0], rc, until)));
    if (rc)
        return rc;
    pthread_mutex_lock(&s->lock);
    s->claimed = *status == SUBMIT_QUEUED;
    pthread_mutex_unlock(&s->lock);
    return PERSIA_OK;
}

int persia_sender_skip(loader_sender *s, uint64_t number)
{
    pthread_mutex_lock(&s->sending);
    pthread_mutex_lock(&s->lock);
    const int skips = number > s->number;
    int rc = sender_check_replaced(s);
    pthread_mutex_unlock(&s->lock);
    if (!rc && skips)
        rc = persia_sender_flush(s, 0);
    if (!rc && skips) {
        pthread_mutex_lock(&s->lock);
        if (number > s->done.watermark) {
            s->none_first = 1 + (s->done.watermark > s->number
                                     ? s->done.watermark
                                     : s->number);
            s->none = number;
        }
        window_settle(&s->done, number);
        s->number = number;
        pthread_mutex_unlock(&s->lock);
    }
    pthread_mutex_unlock(&s->sending);
    return rc;
}

void persia_sender_get_counts(loader_sender *s, sender_counts *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->counts;
    out->position = s->done.watermark;
    out->lineage = s->lineage;
    out->done = s->done.watermark < s->number ? s->done.watermark : s->number;
    pthread_mutex_unlock(&s->lock);
    out->away = link_count_away(&s->c);
}
