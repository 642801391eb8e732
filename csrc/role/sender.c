/* sender.c: a data loader sends batches to workers in turn, and keeps each
 * until it is done: a worker that was started again gets them once more. */
#include <stdlib.h>
#include <string.h>

#include "role/link.h"
#include "role/private.h"

#define PAUSE_NS ((uint64_t)50000000)

/* A message that may have to be sent again: all before it are not done. */
typedef struct kept {
    struct kept *next;
    uint64_t number;
    role_link *to; /* NULL: to all, the end of an epoch */
    void *bytes;
    size_t bytes_n;
} kept;

struct role_sender {
    role_client c;
    uint64_t stream;
    pthread_mutex_t lock; /* guards all below: one message at a time */
    kept *kept, **kept_end;
    uint64_t *boots;      /* [links] of the worker that has what is kept */
    uint64_t number;      /* of the last message */
    int broken;           /* it may have come or not */
    window done;
    uint64_t ring[ROLE_WINDOW / 64];
    sender_counts counts;
};

int persia_sender_open(const role_client_config *config, role_sender **out)
{
    *out = NULL;
    role_sender *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a sender");
    pthread_mutex_init(&s->lock, NULL);
    window_init(&s->done, s->ring, ROLE_WINDOW / 64);
    s->kept_end = &s->kept;
    int rc = role_client_open(config, &s->c);
    if (!rc && !(s->boots = calloc(s->c.links_n, sizeof *s->boots)))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for a sender");
    if (rc) {
        persia_sender_close(s);
        return rc;
    }
    for (size_t i = 0; i < s->c.links_n; i++)
        s->boots[i] = atomic_load(&s->c.links[i].boot);
    s->stream = s->c.client;
    s->counts.stream = s->stream;
    *out = s;
    return PERSIA_OK;
}

/* Messages up to the number need not be kept. */
static void forget(role_sender *s, uint64_t number)
{
    while (s->kept && s->kept->number <= number) {
        kept *k = s->kept;
        s->kept = k->next;
        if (!s->kept)
            s->kept_end = &s->kept;
        free(k->bytes);
        free(k);
    }
}

void persia_sender_close(role_sender *s)
{
    if (!s)
        return;
    forget(s, UINT64_MAX);
    free(s->boots);
    role_client_close(&s->c);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static void note_done(role_sender *s, const wire_submit_reply *m)
{
    for (size_t i = 0; i < m->done_n; i++)
        if (m->done[i] <= s->number)
            (void)window_add(&s->done, m->done[i]);
    window_advance(&s->done);
    s->counts.done = s->done.watermark;
    forget(s, s->done.watermark);
}

static int keep(role_sender *s, const wire_submit *m, role_link *to)
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
        k->to = to;
        *s->kept_end = k;
        s->kept_end = &k->next;
    } else {
        free(k);
    }
    persia_wire_out_free(&o);
    return rc;
}

/* *status: enum role_submit_status. */
static int send_once(role_sender *s, role_link *l, wire_submit *m,
                     uint32_t *status)
{
    wire_submit_reply reply;
    link_answer answer;
    wire_out o;
    m->caller = link_caller(&s->c, l);
    m->settled = s->done.watermark < m->number ? s->done.watermark
                                               : m->number - 1;
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
        note_done(s, &reply);
        *status = reply.status;
    }
    link_answer_free(&answer);
    return rc;
}

static int send_to(role_sender *s, role_link *l, wire_submit *m);

/* Sends one that is kept to the link once more. */
static int send_kept(role_sender *s, role_link *l, const kept *k)
{
    wire_memory memory;
    wire_submit m;
    persia_wire_memory_init(&memory);
    int rc = persia_wire_get_submit(k->bytes, k->bytes_n, &memory, &m);
    if (!rc)
        rc = send_to(s, l, &m);
    persia_wire_memory_free(&memory);
    return rc;
}

/* A worker that was started again has nothing of what is kept. */
static int catch_up(role_sender *s, role_link *l)
{
    uint64_t *boot = &s->boots[l - s->c.links], last = 0;
    if (*boot == atomic_load(&l->boot))
        return PERSIA_OK;
    *boot = atomic_load(&l->boot);
    int rc = PERSIA_OK;
    for (;;) {
        kept *k = s->kept; /* what is done goes meanwhile */
        while (k && (k->number <= last || (k->to && k->to != l) ||
                     (k->to && window_has(&s->done, k->number))))
            k = k->next;
        if (!k || rc)
            return rc;
        last = k->number;
        rc = send_kept(s, l, k);
    }
}

/* Until the worker has it. */
static int send_to(role_sender *s, role_link *l, wire_submit *m)
{
    uint64_t until = persia_clock_ns() + s->c.timeout_ns;
    for (;;) {
        uint32_t status = SUBMIT_FULL;
        int rc = catch_up(s, l);
        if (rc)
            return rc;
        rc = send_once(s, l, m, &status);
        if (!rc && status == SUBMIT_QUEUED)
            return PERSIA_OK;
        if (!rc) /* it is there, and has no room */
            until = persia_clock_ns() + s->c.timeout_ns;
        else if ((rc = link_retry(&s->c, l, rc, until)))
            return rc;
        if ((rc = persia_interrupt_poll()))
            return rc;
    }
}

static int send_locked(role_sender *s, wire_submit *m)
{
    role_link *to =
        m->end ? NULL : &s->c.links[s->number % s->c.links_n];
    if (s->broken && !m->end)
        return persia_err_set(PERSIA_ECLOSED,
                              "it is not known whether the last batch was "
                              "sent: close this sender and open another");
    m->stream = s->stream;
    m->number = s->number + 1;
    m->settled = 0;
    int rc = to ? send_to(s, to, m) : PERSIA_OK;
    for (size_t i = 0; i < s->c.links_n && !to && !rc; i++)
        rc = send_to(s, &s->c.links[i], m);
    if (!rc && m->number > s->done.watermark) {
        m->settled = 0;
        rc = keep(s, m, to);
    }
    s->broken = rc == PERSIA_EINTR || rc == PERSIA_EUNAVAILABLE ||
                rc == PERSIA_ETIMEOUT;
    s->number += !rc || s->broken;
    s->counts.sent += !rc && !m->end;
    return rc;
}

int persia_sender_send(role_sender *s, wire_submit *m)
{
    pthread_mutex_lock(&s->lock);
    int rc = send_locked(s, m);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* The first batch that is not done. */
static const kept *first_left(const role_sender *s)
{
    const kept *k = s->kept;
    while (k && (!k->to || window_has(&s->done, k->number)))
        k = k->next;
    return k;
}

/* Asks the worker of the first batch that is left, by sending it again. */
static int flush_locked(role_sender *s, uint64_t until)
{
    int rc = PERSIA_OK;
    pthread_cond_t never;
    persia_cond_init(&never);
    for (const kept *k; !rc && (k = first_left(s));) {
        rc = send_kept(s, k->to, k);
        const uint64_t now = persia_clock_ns();
        if (!rc && now >= until)
            rc = persia_err_set(PERSIA_ETIMEOUT,
                                "batch %llu is not trained yet",
                                (unsigned long long)s->done.watermark + 1);
        if (!rc && first_left(s))
            rc = persia_cond_wait_poll(&never, &s->lock, now + PAUSE_NS);
    }
    pthread_cond_destroy(&never);
    return rc;
}

int persia_sender_flush(role_sender *s, uint64_t timeout_ns)
{
    pthread_mutex_lock(&s->lock);
    int rc = flush_locked(s, timeout_ns ? persia_clock_ns() + timeout_ns
                                        : UINT64_MAX);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

void persia_sender_get_counts(role_sender *s, sender_counts *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->counts;
    pthread_mutex_unlock(&s->lock);
}
