/* resume.c: what a data loader learns of the servers' ledgers: at its start,
 * and when servers were started again or have loaded a checkpoint. */
#include <string.h>

#include "loader/private.h"

/* ---- what servers have ---- */

static int resume_compare_with(loader_sender *s, const acks *before,
                               uint64_t servers, const wire_hello_reply *m)
{
    acks lost;
    int rc = acks_like(before, &lost);
    if (rc)
        return rc;
    acks_lacking(before, &m->ledger, &lost);
    pthread_mutex_lock(&s->lock);
    if (m->lineage == s->lineage) { /* else: see resume_fall_back() */
        (void)acks_count(&s->acked, &lost, &s->lost, &s->counts.lost);
        s->compared = servers;
    }
    pthread_mutex_unlock(&s->lock);
    acks_free(&lost);
    return PERSIA_OK;
}

void sender_compare(loader_sender *s, uint64_t timeout_ns)
{
    wire_hello_reply reply;
    acks before;
    pthread_mutex_lock(&s->lock);
    const uint64_t servers = s->servers;
    int rc = acks_copy(&s->acked, &before);
    pthread_mutex_unlock(&s->lock);
    int asked = 0;
    for (size_t i = 0; i < s->c.links_n && !rc && !asked; i++) {
        worker_link *l = &s->c.links[i];
        asked = !link_is_away(l) &&
                !link_ask(&s->c, l, s->stream, timeout_ns, &reply);
    }
    if (asked)
        (void)resume_compare_with(s, &before, servers, &reply);
    acks_free(&before);
}

/* Batches up to this number, which are not kept, that it lacks. */
static uint64_t count_lost(const loader_sender *s, const wire_ledger *l,
                           uint64_t last)
{
    uint64_t lost = 0;
    for (uint64_t n = l->watermark + 1; n <= last; n++)
        lost += !ledger_lists(l, n) && (n < s->none_first || n > s->none);
    return lost;
}

/* Servers had batches that were passed over, and lack them now: they are not
 * kept, as those that were sent are.  Behind the watermark. */
static void resume_lose_passed(loader_sender *s)
{
    const kept *k = s->kept;
    for (uint64_t n = s->done.watermark + 1; n <= s->number; n++) {
        while (k && k->number < n)
            k = k->next;
        if ((k && k->number == n) || window_add(&s->done, n) != WINDOW_ADDED)
            continue;
        s->counts.lost += n < s->none_first || n > s->none;
    }
    window_advance(&s->done);
}

/* A checkpoint was loaded into the servers: batches that were done are not, or
 * those are lost that it need not keep any more.  Such a sender says no more
 * of what is done if another one may send them.  The lock is held. */
static void resume_fall_back(loader_sender *s, const wire_hello_reply *m)
{
    const uint64_t settled = s->done.watermark < s->number ? s->done.watermark
                                                           : s->number;
    if (m->lineage == s->lineage)
        return;
    s->lineage = m->lineage;
    s->counts.lost = count_lost(s, &m->ledger, settled);
    memset(s->ring, 0, sizeof s->ring);
    window_init(&s->done, s->ring, WORKER_WINDOW / 64);
    window_settle(&s->done, settled);
    ledger_add_to(&s->done, &m->ledger);
    (void)acks_read(&s->acked, &m->ledger);
    acks_free(&s->lost);
    resume_lose_passed(s);
    sender_forget(s, s->done.watermark);
    s->replaced |= s->named && s->counts.lost;
    pthread_cond_broadcast(&s->heard);
}

int sender_meet(void *owner, worker_link *l, const wire_hello_reply *m)
{
    loader_sender *s = owner;
    wire_hello_reply reply;
    pthread_mutex_lock(&s->lock);
    const int same = m->lineage == s->lineage;
    pthread_mutex_unlock(&s->lock);
    int rc = same ? PERSIA_OK
                  : link_ask(&s->c, l, s->stream, SENDER_BEAT_NS, &reply);
    if (same || rc)
        return rc;
    pthread_mutex_lock(&s->lock);
    resume_fall_back(s, &reply);
    pthread_mutex_unlock(&s->lock);
    return PERSIA_OK;
}

int sender_check_replaced(const loader_sender *s)
{
    return s->replaced
               ? persia_err_set(PERSIA_EREPLACED,
                                "a checkpoint was loaded into the servers "
                                "that lacks %llu batches of this data loader: "
                                "close it, open another with its name, and "
                                "send again from the first batch on",
                                (unsigned long long)s->counts.lost)
               : PERSIA_OK;
}

int sender_all_away(const loader_sender *s)
{
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "no embedding worker can be reached, %s among them",
                          s->c.links[0].address);
}

/* ---- the start ---- */

/* What an earlier process with this name has sent. */
static void resume_learn_done(loader_sender *s, const wire_ledger *l)
{
    ledger_add_to(&s->done, l);
    if (window_top(&s->done))
        s->unsure = window_top(&s->done) + WIRE_BATCHES_MAX;
}

/* The same, and its epoch: as an earlier process began, or the one that is
 * open.  If no worker knows when that process began, it was with the others.
 * *known: one of them has answered; an error: one that is there has not. */
static int resume_learn_once(loader_sender *s, uint64_t stream, int *known)
{
    uint64_t first = 0, open = 0;
    int left = PERSIA_OK;
    memset(s->ring, 0, sizeof s->ring);
    window_init(&s->done, s->ring, WORKER_WINDOW / 64);
    s->unsure = 0;
    *known = 0;
    for (size_t i = 0; i < s->c.links_n; i++) {
        wire_hello_reply reply;
        worker_link *l = &s->c.links[i];
        if (link_is_away(l) && (link_is_any_there(&s->c) ||
                                link_hello(&s->c, l)))
            continue;
        const int rc = link_ask(&s->c, l, stream, s->c.timeout_ns, &reply);
        if (rc && !link_failed(&s->c, l, rc))
            left = rc;
        if (rc)
            continue;
        if (stream && !*known) {
            resume_learn_done(s, &reply.ledger);
            (void)acks_read(&s->acked, &reply.ledger);
        }
        if (!*known)
            s->lineage = reply.lineage;
        *known = 1;
        first = reply.first > first ? reply.first : first;
        open = reply.epoch > open ? reply.epoch : open;
    }
    s->first = first ? first : window_top(&s->done) ? 1 : open;
    return left || *known ? left : sender_all_away(s);
}

int sender_learn(loader_sender *s, uint64_t stream)
{
    const uint64_t until = persia_deadline(s->c.timeout_ns);
    int known, rc;
    do
        rc = resume_learn_once(s, stream, &known);
    while (rc && !(rc = link_retry(&s->c, &s->c.links[0], rc, until)));
    return known && rc != PERSIA_EINTR ? PERSIA_OK : rc;
}
