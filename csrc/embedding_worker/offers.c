/* offers.c: the states of a batch, and lists of batches. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"

enum { NEVER = OFFER_STATES };

static const unsigned char next[OFFER_STATES][OFFER_EVENTS] = {
    [OFFER_QUEUED] = {OFFER_LOOKING, NEVER, NEVER, OFFER_RETURNING,
                      OFFER_DONE},
    [OFFER_LOOKING] = {NEVER, OFFER_LEASED, OFFER_QUEUED, NEVER, OFFER_DONE},
    [OFFER_LEASED] = {OFFER_LOOKING, NEVER, OFFER_QUEUED, OFFER_RETURNING,
                      OFFER_DONE},
    [OFFER_RETURNING] = {NEVER, OFFER_LEASED, OFFER_QUEUED, NEVER,
                         OFFER_DONE},
    [OFFER_DONE] = {NEVER, NEVER, NEVER, NEVER, NEVER},
};

void offer_event(offer *o, enum offer_event event)
{
    const enum offer_state to = next[o->state][event];
    assert((int)to != NEVER);
    o->state = to;
}

void offers_insert(offer **list, offer *o)
{
    while (*list && (*list)->seq < o->seq)
        list = &(*list)->next;
    o->next = *list;
    *list = o;
}

void offers_remove(offer **list, offer *o)
{
    while (*list && *list != o)
        list = &(*list)->next;
    assert(*list == o);
    *list = o->next;
}

int offer_make(const void *data, size_t n, offer **out)
{
    *out = NULL;
    offer *o = calloc(1, sizeof *o);
    if (o) {
        persia_wire_memory_init(&o->memory);
        o->bytes = aligned_alloc(64, (n + 64) & ~(size_t)63);
    }
    if (!o || !o->bytes) {
        free(o);
        return persia_err_set(PERSIA_ENOMEM, "no memory for a batch");
    }
    memcpy(o->bytes, data, n);
    o->bytes_n = n;
    int rc = persia_wire_get_submit(o->bytes, n, &o->memory, &o->m);
    if (rc) {
        offer_free(NULL, o);
        return rc;
    }
    *out = o;
    return PERSIA_OK;
}

uint64_t offer_epoch(const offer *o)
{
    const uint64_t epoch = stream_epoch(o->stream, o->m.epoch);
    return epoch ? epoch : UINT64_MAX;
}

void offer_free(embedding_worker *s, offer *o)
{
    assert(!o->users);
    if (o->stream) {
        assert(o->stream->offers);
        (void)PERSIA_HOLDS(s->stats.bytes >= o->bytes_n);
        s->stats.bytes -= o->bytes_n;
        o->stream->offers--;
    }
    persia_wire_memory_free(&o->memory);
    free(o->bytes);
    free(o);
}

size_t offer_feature(const offer *o, const char *name)
{
    size_t at = 0;
    while (at < o->m.features_n && strcmp(o->m.features[at].name, name))
        at++;
    return at;
}

uint32_t offer_attempt(const offer *o)
{
    return o->takes + (o->m.attempt > 1 ? o->m.attempt - 1 : 0);
}

const worker_plan *offer_plan(const offer *o)
{
    return o->stream->job->plan;
}

int offer_check(const offer *o, const worker_plan *p)
{
    const wire_submit *m = &o->m;
    const wire_plan *plan = p ? &p->plan : NULL;
    for (size_t i = 0; plan && i < plan->features_n; i++)
        if (offer_feature(o, plan->features[i].name) == m->features_n)
            return persia_err_set(PERSIA_EFEATURE,
                                  "the batch has no feature %s, which the "
                                  "model looks up in table %s",
                                  plan->features[i].name,
                                  plan->tables[plan->features[i].table].name);
    if (m->weights.n && m->weights.n != m->ids.n)
        return persia_err_set(PERSIA_ESHAPE, "%zu weights for %zu ids",
                              m->weights.n, m->ids.n);
    const uint64_t *offsets = m->offsets.offsets;
    for (size_t i = 0; i + 1 < m->offsets.n; i++)
        if (offsets[i] > offsets[i + 1])
            return persia_err_set(PERSIA_EOFFSETS,
                                  "feature %s: offsets fall",
                                  m->features[i / m->samples].name);
    if (m->offsets.n && (offsets[0] || offsets[m->offsets.n - 1] != m->ids.n))
        return persia_err_set(PERSIA_EOFFSETS,
                              "offsets begin with %llu and end with %llu; "
                              "need 0 and the number of ids, %zu",
                              (unsigned long long)offsets[0],
                              (unsigned long long)offsets[m->offsets.n - 1],
                              m->ids.n);
    return PERSIA_OK;
}

/* What its lookup has left; its stream is open. */
static void offers_drop_index(offer *o)
{
    persia_batch_index_put(o->index);
    o->index = NULL;
    row_ids_free(&o->rows);
    o->planned = 0;
}

void offer_release(embedding_worker *s, offer *o)
{
    assert(o->users);
    o->users--;
    if (!o->users && o->state == OFFER_DONE)
        offer_free(s, o);
}

static void offers_end(embedding_worker *s, offer *o)
{
    const int queued = o->state == OFFER_QUEUED;
    offer_event(o, OFFER_END);
    (void)PERSIA_HOLDS(queued ? s->stats.queued : s->stats.leased);
    offers_remove(queued ? &s->queue : &s->leased, o);
    s->stats.queued -= (uint64_t)queued;
    s->stats.leased -= (uint64_t)!queued;
    (void)window_add(&o->stream->done, o->m.number);
    offers_drop_index(o);
    if (!o->users)
        offer_free(s, o);
}

void offer_end(embedding_worker *s, offer *o)
{
    if (o->state != OFFER_QUEUED)
        (void)window_add(&s->leases, o->lease);
    offers_end(s, o);
}

/* The loader learns of all that are kept: few fail without an error that ends
 * its run. */
static void offers_keep_failure(worker_stream *t, uint64_t number, int code,
                                const char *text)
{
    if (!t->failed)
        t->failed = calloc(WORKER_FAILED, sizeof *t->failed);
    if (!t->failed)
        return;
    worker_failure *f = &t->failed[t->failed_n++ % WORKER_FAILED];
    *f = (worker_failure){.number = number, .code = code};
    snprintf(f->text, sizeof f->text, "%s", text);
}

void offer_fail(embedding_worker *s, offer *o, int code, const char *text)
{
    s->stats.failed++;
    o->stream->job->failed++;
    offers_keep_failure(o->stream, o->m.number, code, text);
    offers_end(s, o);
}

int offer_found(embedding_worker *s, offer *o)
{
    if (o->stream->state == STREAM_OLD)
        offer_end(s, o);
    else
        offer_event(o, OFFER_FOUND);
    return o->state != OFFER_DONE;
}

void offer_again(embedding_worker *s, offer *o, int failed)
{
    if (o->stream->state == STREAM_OLD) {
        offer_end(s, o);
        return;
    }
    o->offers += failed != 0;
    if (o->offers >= WORKER_OFFERS) {
        s->stats.given_up++;
        offer_fail(s, o, PERSIA_ELOST,
                   "trainers took it four times and returned no gradients "
                   "that were applied: it is not trained");
        return;
    }
    offer_event(o, OFFER_AGAIN);
    (void)PERSIA_HOLDS(s->stats.leased);
    offers_remove(&s->leased, o);
    o->waits = persia_clock_ns();
    offers_insert(&s->queue, o);
    s->stats.leased--;
    s->stats.queued++;
    s->stats.again++;
    offers_drop_index(o);
}
