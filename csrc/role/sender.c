/* sender.c: a data loader sends batches to workers in turn. */
#include <stdlib.h>
#include <string.h>

#include "role/link.h"
#include "role/private.h"

struct role_sender {
    role_client c;
    uint64_t stream;
    pthread_mutex_t lock; /* guards all below: one message at a time */
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
    int rc = role_client_open(config, &s->c);
    if (rc) {
        persia_sender_close(s);
        return rc;
    }
    s->stream = s->c.client;
    s->counts.stream = s->stream;
    *out = s;
    return PERSIA_OK;
}

void persia_sender_close(role_sender *s)
{
    if (!s)
        return;
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

/* Until the worker has it. */
static int send_to(role_sender *s, role_link *l, wire_submit *m)
{
    uint64_t until = persia_clock_ns() + s->c.timeout_ns;
    for (;;) {
        uint32_t status = SUBMIT_FULL;
        int rc = send_once(s, l, m, &status);
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
    int rc = PERSIA_OK;
    if (s->broken && !m->end)
        return persia_err_set(PERSIA_ECLOSED,
                              "it is not known whether the last batch was "
                              "sent: close this sender and open another");
    m->stream = s->stream;
    m->number = s->number + 1;
    if (!m->end) {
        rc = send_to(s, &s->c.links[s->number % s->c.links_n], m);
    } else {
        for (size_t i = 0; i < s->c.links_n && !rc; i++)
            rc = send_to(s, &s->c.links[i], m);
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

void persia_sender_get_counts(role_sender *s, sender_counts *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->counts;
    pthread_mutex_unlock(&s->lock);
}
