/* ledgers.c: what servers have of the batches of a loader. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"

/* The ledger of a stream at one server. */
static int ledgers_ask_server(embedding_worker *s, uint32_t shard,
                              uint64_t stream, wire_ledger *out)
{
    wire_hello m = {.caller = {.client = s->boot},
                    .version = WIRE_VERSION,
                    .version_min = WIRE_VERSION_MIN,
                    .world = 1,
                    .stream = stream};
    shard_reply reply;
    memcpy(m.name_space, s->config.servers.name_space, sizeof m.name_space);
    int rc = persia_client_call(s->look, shard, WIRE_HELLO, &m, &reply);
    if (rc)
        return rc;
    *out = ((const wire_hello_reply *)reply.message)->ledger;
    persia_shard_release(&reply);
    return PERSIA_OK;
}

/* What all servers have of a stream. */
static int ledgers_ask_servers(embedding_worker *s, uint64_t stream,
                               wire_ledger *out)
{
    int rc = ledgers_ask_server(s, 0, stream, out);
    for (uint32_t i = 1; i < persia_client_shards(s->look) && !rc; i++) {
        wire_ledger own, both = {.stream = stream};
        rc = ledgers_ask_server(s, i, stream, &own);
        if (rc)
            break;
        both.watermark = own.watermark < out->watermark ? own.watermark
                                                        : out->watermark;
        for (uint64_t bit = 0; bit < 64 * WIRE_WINDOW_MAX; bit++) {
            const uint64_t number = both.watermark + 1 + bit;
            if (ledger_lists(&own, number) && ledger_lists(out, number))
                both.window[bit / 64] |= (uint64_t)1 << bit % 64;
        }
        memcpy(both.gaps, out->gaps, sizeof both.gaps);
        gaps_join(both.gaps, own.gaps);
        *out = both;
    }
    return rc;
}

/* If a look fails, a later one may tell it of other rows. */
void work_hello(void *ctx)
{
    asking *a = ctx;
    (void)lineage_settle(a->s);
    service_enter(a->s);
    a->lineage = a->s->lineage;
    service_leave(a->s);
    a->ledger = persia_wire_memory_take(&a->memory, sizeof *a->ledger);
    asking_answer(
        a, a->ledger ? ledgers_ask_servers(a->s, a->m.hello.stream, a->ledger)
                     : PERSIA_ENOMEM);
}

void work_unknown(void *ctx)
{
    asking *a = ctx;
    const wire_return *m = &a->m.back;
    wire_ledger ledger;
    int rc = ledgers_ask_servers(a->s, m->stream, &ledger);
    a->status = !rc && ledger_lists(&ledger, m->number) ? RETURNED_BEFORE
                                                      : RETURNED_WAIT;
    asking_answer(a, rc);
}

int ledger_has_offer(embedding_worker *s, const offer *o, int *have)
{
    wire_ledger ledger;
    service_enter(s);
    *have = window_has(&o->stream->done, o->m.number);
    const int doubted = o->doubted != 0;
    service_leave(s);
    *have |= persia_client_has(o->stream->c, o->m.number);
    int rc = PERSIA_OK;
    if (!*have && doubted &&
        !(rc = ledgers_ask_servers(s, o->m.stream, &ledger)))
        *have = ledger_lists(&ledger, o->m.number);
    return rc;
}

/* Servers note its number, so that it is not offered again when loader and
 * workers have died.  If they cannot, the loader still learns that it is done.
 */
void work_skip(void *ctx)
{
    asking *a = ctx;
    embedding_worker *s = a->s;
    offer *o = a->o;
    const client_update update = {.number = o->m.number,
                                  .parts = 1,
                                  .through = o->m.settled,
                                  .t = 1};
    if (offer_plan(o) && !stream_open(s, o->stream))
        (void)persia_client_note(o->stream->c, &update);
    service_enter(s);
    s->stats.skipped++;
    offer_end(s, o);
    a->o = NULL;
    offer_release(s, o);
    service_match(s);
    service_leave(s);
    a->status = RETURNED_DONE;
    asking_answer(a, PERSIA_OK);
}

/* ---- batches that were sent again ---- */

#define ASK_AGAIN_NS ((uint64_t)2000000000)

/* Servers are asked about those of a stream. */
typedef struct settling {
    embedding_worker *s;
    worker_stream *stream;
} settling;

static void ledgers_work_settle(void *ctx)
{
    const settling k = *(settling *)ctx;
    embedding_worker *s = k.s;
    const uint64_t began = persia_clock_ns();
    wire_ledger ledger;
    free(ctx);
    int rc = ledgers_ask_servers(s, k.stream->name, &ledger);
    service_enter(s);
    for (offer *o = s->queue, *next; o && !rc; o = next) {
        next = o->next;
        if (o->stream != k.stream || !o->doubted || o->doubted >= began)
            continue;
        o->settled = 1;
        o->asked = began;
        if (!ledger_lists(&ledger, o->m.number))
            continue;
        s->stats.had++;
        offer_end(s, o);
    }
    assert(k.stream->settling && k.stream->offers);
    k.stream->settling = 0;
    k.stream->offers--;
    service_match(s);
    service_leave(s);
}

/* Where its rank has ended its pass meanwhile, none asks for it any more. */
void ledger_settle(embedding_worker *s)
{
    const uint64_t now = persia_clock_ns();
    for (const offer *o = s->queue; o; o = o->next) {
        worker_stream *t = o->stream;
        if (!o->doubted || t->settling ||
            (o->settled && now - o->asked < ASK_AGAIN_NS))
            continue;
        settling *k = malloc(sizeof *k);
        if (!k)
            return;
        *k = (settling){s, t};
        t->settling = 1;
        t->offers++; /* it is not freed meanwhile */
        if (persia_sched_submit(s->jobs, ledgers_work_settle, k)) {
            t->settling = 0;
            t->offers--;
            free(k);
        }
    }
}
