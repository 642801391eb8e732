/* fan.c: requests to several servers at once, tried again where that
 * may help; and the calls that own their memory. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/private.h"

#define MS ((uint64_t)1000000)
#define LOOK_NS (1000 * MS) /* at how far a server has recovered */

/* Then a call waits for long. */
#define HELD_NS (1000 * MS)

enum {
    REPAIRS = 8, /* of one request at once: then it pauses */
    TOGETHER_BYTES = 2 << 20 /* of replies that arrive together, about */
};

/* ---- calls ---- */

static call *call_make(ps_client *r)
{
    call *k = calloc(1, sizeof *k);
    if (!k) {
        persia_err_set(PERSIA_ENOMEM, "no memory for a batch's buffers");
        return NULL;
    }
    k->r = r;
    persia_errand_init(&k->errand);
    return k;
}

call *call_take(ps_client *r)
{
    pthread_mutex_lock(&r->lock);
    call *k = r->calls;
    if (k)
        r->calls = k->next;
    pthread_mutex_unlock(&r->lock);
    assert(!k || (!k->errand.flying && !k->errand.left && !k->ended));
    return k ? k : call_make(r);
}

/* Forgets the replies. */
static void call_clear(call *k)
{
    for (size_t i = 0; i < k->requests_n; i++)
        persia_shard_release(&k->requests[i].reply);
    k->requests_n = 0;
}

void call_free(call *k)
{
    call_clear(k);
    free(k->requests);
    persia_mem_buffer_free(&k->lists);
    persia_mem_buffer_free(&k->messages);
    persia_mem_buffer_free(&k->segments);
    persia_mem_buffer_free(&k->rows);
    persia_mem_buffer_free(&k->narrow);
    persia_errand_free(&k->errand);
    free(k);
}

/* Nothing of the call is in flight. */
static void call_end(call *k)
{
    ps_client *r = k->r;
    assert(!k->errand.flying && !k->errand.left);
    if (k->ended)
        k->ended(k);
    k->ended = NULL;
    call_clear(k);
    persia_batch_index_put(k->index);
    k->index = NULL;
    pthread_mutex_lock(&r->lock);
    k->next = r->calls;
    r->calls = k;
    pthread_mutex_unlock(&r->lock);
}

void call_give(call *k)
{
    if (k && persia_errand_leave(&k->errand))
        call_end(k);
}

/* ---- one request ---- */

enum { NEVER = REQUEST_STATES };

static const unsigned char next[REQUEST_STATES][REQUEST_EVENTS] = {
    [REQUEST_READY] = {REQUEST_FLYING, NEVER, NEVER, NEVER, REQUEST_DONE},
    [REQUEST_FLYING] = {NEVER, REQUEST_CAME, NEVER, NEVER, NEVER},
    [REQUEST_CAME] = {NEVER, NEVER, REQUEST_PAUSED, REQUEST_READY,
                      REQUEST_DONE},
    [REQUEST_PAUSED] = {REQUEST_FLYING, NEVER, NEVER, NEVER, REQUEST_DONE},
    [REQUEST_DONE] = {NEVER, NEVER, NEVER, NEVER, NEVER},
};

/* The only place that changes a request's state. */
static void request_event(request *q, enum request_event event)
{
    const enum request_state to = next[q->state][event];
    assert((int)to != NEVER);
    q->state = to;
}

int fan_prepare(call *k, server *const *to, size_t n)
{
    assert(!k->errand.flying);
    call_clear(k);
    if (n > k->requests_room) {
        request *more = realloc(k->requests, n * sizeof *more);
        if (!more)
            return persia_err_set(PERSIA_ENOMEM, "no memory for %zu requests",
                                  n);
        k->requests = more;
        k->requests_room = n;
    }
    for (size_t i = 0; i < n; i++) {
        request *q = &k->requests[i];
        q->call = k;
        q->to = to ? to[i] : k->r->servers[i];
        q->index = i;
        q->expects = 0;
        q->state = REQUEST_READY;
        q->rc = PERSIA_OK;
        q->tries = q->repairs = 0;
        q->at = q->recovered = 0;
        q->caller = (wire_caller){0};
        q->reply = (shard_reply){0};
        q->text[0] = 0;
    }
    k->requests_n = n;
    return PERSIA_OK;
}

/* Keeps the error of this thread, with the server's name in it. */
static void request_fail(request *q, int rc)
{
    const char *text = persia_err_text(), *name = q->to->address;
    q->rc = rc;
    if (q->call->r->embedded || strstr(text, name))
        snprintf(q->text, sizeof q->text, "%s", text);
    else
        snprintf(q->text, sizeof q->text, "%s: %s", name, text);
}

static void request_keep(request *q, const shard_reply *reply)
{
    q->reply = *reply;
    if (reply->release)
        return;
    const size_t bytes = shard_reply_bytes(q->method);
    assert(bytes <= sizeof q->kept);
    memcpy(&q->kept, reply->message, bytes);
    q->reply.message = &q->kept;
}

/* The shard calls this once a request. */
static void request_came(void *ctx, int rc, shard_reply *reply)
{
    request *q = ctx;
    call *k = q->call;
    pthread_mutex_lock(&k->errand.lock);
    q->rc = rc;
    if (rc)
        request_fail(q, rc);
    else
        request_keep(q, reply);
    request_event(q, REQUEST_ANSWER);
    if (persia_errand_land(&k->errand))
        call_end(k);
}

/* Bytes of its reply, about.  It may end at any time, once it has begun. */
static uint64_t request_start(const fan *f, request *q, uint64_t deadline)
{
    call *k = q->call;
    if (q->tries == 0)
        q->caller = f->fresh ? (wire_caller){.client = k->r->client}
                             : server_caller(k->r, q->to);
    q->tries++;
    q->method = f->method;
    f->fill(f->ctx, q);
    const uint64_t expects = q->expects;
    pthread_mutex_lock(&k->errand.lock);
    request_event(q, REQUEST_SEND);
    persia_errand_start(&k->errand);
    pthread_mutex_unlock(&k->errand.lock);
    shard_queue(q->to->ref, f->method, &q->args, deadline, request_came, q);
    return expects;
}

/* Seconds that a request has. */
static double fan_limit_of(const fan *f, const ps_client *r)
{
    return (double)(f->limit_ns ? f->limit_ns : r->timeout_ns) * 1e-9;
}

/* What its server says of itself: it does so whatever else it waits for. */
static int fan_ask_stats(const ps_client *r, const server *to,
                         uint64_t deadline, shard_reply *reply)
{
    const wire_stats m = {.caller = {.client = r->client}};
    return persia_shard_wait(to->ref, WIRE_STATS, &m, deadline, reply);
}

int server_recovers(const ps_client *r, const server *to, uint64_t *recovered)
{
    shard_reply reply;
    int moves = 0;
    if (fan_ask_stats(r, to, persia_deadline(LOOK_NS), &reply))
        return 0;
    const wire_stats_reply *s = reply.message;
    if (s->recovers) {
        moves = s->done + 1 != *recovered;
        *recovered = s->done + 1;
    }
    persia_shard_release(&reply);
    return moves;
}

/* Whether the request is sent again, and when.  A server that recovers may
 * take longer than any deadline: it is waited for while it makes progress. */
static int request_pause(const fan *f, request *q, uint64_t *deadline)
{
    ps_client *r = q->call->r;
    uint64_t now = persia_clock_ns();
    uint64_t pause = persia_backoff_ns(q->tries, PAUSE_MAX_NS, r->client);
    if (now + pause >= *deadline && !f->limit_ns &&
        server_recovers(r, q->to, &q->recovered))
        *deadline = client_deadline(r);
    if (now + pause < *deadline) {
        q->at = now + pause;
        r->counts.retries++;
        return 1;
    }
    char text[FAN_TEXT];
    snprintf(text, sizeof text, "%s", q->text);
    snprintf(q->text, sizeof q->text, "%.500s (tried %u times in %.3g s)",
             text, q->tries, fan_limit_of(f, r));
    return 0;
}

/* Adds why there was no answer: the server waits for the disk of its log. */
static void request_explain(request *q, uint64_t deadline)
{
    char text[FAN_TEXT];
    shard_reply reply;
    deadline = persia_deadline_leave(deadline); /* of all requests together */
    if (q->to->ref->direct || persia_clock_ns() >= deadline ||
        fan_ask_stats(q->call->r, q->to, deadline, &reply))
        return;
    const wire_stats_reply *s = reply.message;
    snprintf(text, sizeof text, "%s", q->text);
    if (s->log_waits_ns)
        snprintf(q->text, sizeof q->text,
                 "%.500s: the disk has not taken its log for %.1f s", text,
                 (double)s->log_waits_ns * 1e-9);
    persia_shard_release(&reply);
}

/* What to do about a request that was answered. */
static enum request_event request_judge(const fan *f, request *q,
                                        uint64_t *deadline)
{
    ps_client *r = q->call->r;
    int rc = q->rc;
    if (!rc) {
        rc = f->accept(f->ctx, q);
        q->rc = rc;
        if (!rc)
            return REQUEST_END;
        request_fail(q, rc);
        persia_shard_release(&q->reply);
    }
    if (persia_retry(RETRY_REQUEST, rc) == RETRY_GREET && !f->fresh) {
        rc = server_repair(r, q->to, q->caller.boot, *deadline);
        if (!rc && q->repairs++ < REPAIRS) {
            q->rc = PERSIA_OK;
            q->tries = 0;
            return REQUEST_GREET;
        }
        if (!rc) {
            q->caller = server_caller(r, q->to);
            rc = persia_err_set(PERSIA_EUNAVAILABLE,
                                "%s is started, or other rows are loaded into "
                                "it, again and again", q->to->address);
        }
        request_fail(q, rc);
    }
    if (rc == PERSIA_ETIMEOUT)
        request_explain(q, *deadline);
    return persia_retry(RETRY_REQUEST, rc) == RETRY_LATER &&
                   request_pause(f, q, deadline)
               ? REQUEST_PAUSE
               : REQUEST_END;
}

/* ---- all of them ---- */

/* The answer is the caller's until the request is sent again. */
static void fan_judge_all(call *k, const fan *f, uint64_t *deadline)
{
    for (size_t i = 0; i < k->requests_n; i++) {
        pthread_mutex_lock(&k->errand.lock);
        int came = k->requests[i].state == REQUEST_CAME;
        pthread_mutex_unlock(&k->errand.lock);
        if (came)
            request_event(&k->requests[i],
                          request_judge(f, &k->requests[i], deadline));
    }
}

/* Sends what is due.  The shard of this process is the last: it works on this
 * very thread.  Requests to shards of one server leave together, up to
 * TOGETHER_BYTES of replies: the first of them are put in their places while
 * others are on their way. */
static void fan_start_due(call *k, const fan *f, uint64_t deadline)
{
    uint64_t now = persia_clock_ns(), expected = 0;
    for (int direct = 0; direct < 2; direct++) {
        for (size_t i = 0; i < k->requests_n; i++) {
            request *q = &k->requests[i];
            if (q->to->ref->direct != direct)
                continue;
            pthread_mutex_lock(&k->errand.lock);
            enum request_state state = q->state;
            pthread_mutex_unlock(&k->errand.lock);
            if (state == REQUEST_READY ||
                (state == REQUEST_PAUSED && q->at <= now))
                expected += request_start(f, q, deadline);
            if (expected >= TOGETHER_BYTES) {
                shard_flush(q->to->ref);
                expected = 0;
            }
        }
        for (size_t i = 0; i < k->requests_n; i++)
            shard_flush(k->requests[i].to->ref);
    }
}

typedef struct fan_state {
    size_t flying, came;
    uint64_t next; /* when a paused one is due; UINT64_MAX: none is */
    const request *failed; /* for good; the first, or one interrupted */
} fan_state;

static fan_state fan_look(call *k)
{
    fan_state s = {.next = UINT64_MAX};
    for (size_t i = 0; i < k->requests_n; i++) {
        const request *q = &k->requests[i];
        s.flying += q->state == REQUEST_FLYING;
        s.came += q->state == REQUEST_CAME;
        if (q->state == REQUEST_READY)
            s.next = 0;
        if (q->state == REQUEST_PAUSED && q->at < s.next)
            s.next = q->at;
        if (q->state == REQUEST_DONE && q->rc &&
            (!s.failed || q->rc == PERSIA_EINTR))
            s.failed = q;
    }
    return s;
}

/* Those that wait for another try have failed, too; those that were about to
 * be sent again have no error of their own. */
static void fan_stop_paused(call *k)
{
    for (size_t i = 0; i < k->requests_n; i++) {
        request *q = &k->requests[i];
        if (q->state == REQUEST_PAUSED || q->state == REQUEST_READY)
            request_event(q, REQUEST_END);
    }
}

static int fan_late(call *k, const fan *f)
{
    const char *name = "";
    size_t n = 0;
    pthread_mutex_lock(&k->errand.lock);
    for (size_t i = k->requests_n; i-- > 0;)
        if (k->requests[i].state == REQUEST_FLYING) {
            name = k->requests[i].to->address;
            n++;
        }
    pthread_mutex_unlock(&k->errand.lock);
    if (!n) /* the last one was answered just now */
        return PERSIA_OK;
    return persia_err_set(PERSIA_ETIMEOUT, "no answer from %s%s within %.3g s",
                          name, n > 1 ? " and others" : "",
                          fan_limit_of(f, k->r));
}

/* The first error, and who else has the same. */
static int fan_result(const call *k, const request *failed)
{
    char others[FAN_TEXT] = "";
    size_t n = 0;
    if (!failed)
        return PERSIA_OK;
    for (size_t i = 0; i < k->requests_n; i++) {
        const request *q = &k->requests[i];
        if (q == failed || q->rc != failed->rc || q->to == failed->to)
            continue;
        int more = snprintf(others + n, sizeof others - n, "%s%s",
                            n ? ", " : "; the same: ", q->to->address);
        n += more > 0 ? (size_t)more : 0;
        if (n >= sizeof others)
            break;
    }
    return persia_err_set(failed->rc, "%s%s", failed->text, others);
}

/* Whether a server had not done it by the deadline. */
static int fan_has_failed(request *q)
{
    pthread_mutex_lock(&q->call->errand.lock);
    int failed = q->state == REQUEST_FLYING || q->rc == PERSIA_EUNAVAILABLE ||
                 q->rc == PERSIA_ETIMEOUT;
    pthread_mutex_unlock(&q->call->errand.lock);
    return failed;
}

/* At the end.  Where some have failed, those that have not keep what they
 * had: several requests may be of one server. */
static void fan_note_failed(call *k)
{
    size_t failed = 0;
    for (size_t i = 0; i < k->requests_n; i++)
        failed += (size_t)fan_has_failed(&k->requests[i]);
    for (size_t i = 0; i < k->requests_n; i++) {
        server *to = k->requests[i].to;
        if (failed && !fan_has_failed(&k->requests[i]))
            continue;
        pthread_mutex_lock(&to->lock);
        to->failed = failed > 0;
        pthread_mutex_unlock(&to->lock);
    }
}

/* A call that began at `at` waits for long; returns 1. */
static int fan_hold(ps_client *r, uint64_t at)
{
    if (!atomic_fetch_add(&r->held, 1))
        atomic_store(&r->held_at, at);
    return 1;
}

static int client_fan_run(call *k, const fan *f, uint64_t deadline, int *held)
{
    const uint64_t began = persia_clock_ns();
    for (;;) {
        int rc = PERSIA_OK;
        if (!*held && persia_clock_ns() > began + HELD_NS)
            *held = fan_hold(k->r, began);
        fan_start_due(k, f, deadline);
        pthread_mutex_lock(&k->errand.lock);
        fan_state s = fan_look(k);
        if (!s.came && s.next > persia_clock_ns() &&
            (s.flying || s.next != UINT64_MAX))
            rc = persia_cond_wait_poll(&k->errand.landed, &k->errand.lock,
                                       s.next);
        pthread_mutex_unlock(&k->errand.lock);
        if (rc)
            return persia_err_set(rc, "interrupted while waiting for servers");
        fan_judge_all(k, f, &deadline);
        pthread_mutex_lock(&k->errand.lock);
        s = fan_look(k);
        if (s.failed) {
            fan_stop_paused(k);
            s = fan_look(k);
        }
        pthread_mutex_unlock(&k->errand.lock);
        /* The interrupt was taken, in a greeting: it is not raised again. */
        if (s.failed && s.failed->rc == PERSIA_EINTR)
            return persia_err_set(PERSIA_EINTR, "%s", s.failed->text);
        if (!s.flying && !s.came && s.next == UINT64_MAX) {
            fan_note_failed(k);
            return fan_result(k, s.failed);
        }
        int ends = atomic_load(&k->r->ends);
        if (ends && (f->method == WIRE_PULL ||
                     (ends == END_ALL && f->method != WIRE_LEAVE)))
            return persia_err_set(PERSIA_ECLOSED, "the store was closed");
        if (persia_clock_ns() > persia_deadline_leave(deadline) &&
            (rc = fan_late(k, f))) {
            fan_note_failed(k);
            return rc;
        }
    }
}

int fan_run(call *k, const fan *f, uint64_t deadline)
{
    int held = 0;
    const int rc = client_fan_run(k, f, deadline, &held);
    if (held) {
        (void)PERSIA_HOLDS(atomic_load(&k->r->held));
        atomic_fetch_sub(&k->r->held, 1);
    }
    return rc;
}
