/* replay.c: the records of a log, applied again.
 *
 * An update is decoded and applied by the same functions as when it arrived:
 * the ledger refuses what the rows have already.  No client is there yet.
 */
#include "shard/private.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static const uint64_t POLL_NS = 20000000;

typedef struct replaying {
    shard *s;
    shard_ref *ref;
    err_kept end; /* of the call that was answered last */
    int done;     /* of a restore */
} replaying;

/* ---- updates ------------------------------------------------------------ */

static void replay_answered(void *ctx, int rc, shard_reply *reply)
{
    replaying *p = ctx;
    persia_err_keep(&p->end, rc);
    if (reply->release)
        reply->release(reply);
}

/* Opens the stream of an update that was applied: a cut has none without
 * numbers, and a later owner may have it. */
static int replay_stream(replaying *p, const ledger_key *key)
{
    wire_ledger ledger;
    int taken, rc;
    if (!key->stream || !key->owner.incarnation)
        return persia_err_set(PERSIA_ECORRUPT, "a stream without an owner");
    rc = ledger_open(p->s->ledger, key->stream, key->owner, &taken, &ledger);
    return rc == PERSIA_ECLOSED ? PERSIA_OK : rc;
}

/* A part as push_run() makes it, kept. */
static int replay_part(replaying *p, const wire_span *raw, wire_memory *memory,
                       push_call **out)
{
    push_call *c = NULL;
    wire_push *m = persia_wire_memory_take(memory, sizeof *m);
    int rc = m ? persia_wire_get_push(raw->data, raw->n, memory, m)
               : PERSIA_ENOMEM;
    if (!rc && !(c = calloc(1, sizeof *c)))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for an update");
    if (rc)
        return rc;
    m->caller.boot = 0; /* of an earlier life */
    *c = (push_call){.call = direct_call_begin(p->ref, PERSIA_FOREVER,
                                               replay_answered, p),
                     .m = m,
                     .key = {.stream = m->stream,
                             .number = m->number,
                             .settled = m->settled,
                             .owner = owner_of(&m->caller)},
                     .kept = c};
    *out = c;
    rc = replay_stream(p, &c->key);
    return rc ? rc : push_check(p->s, &(shard_push){.m = m});
}

/* Whether what could not be applied now was not applied then, either: part of
 * it was refused, and the ledger has it. */
static int replay_is_in(const shard *s, const ledger_key *keys, size_t n)
{
    int in = 1;
    for (size_t i = 0; i < n; i++)
        in &= ledger_has(s->ledger, keys[i].stream, keys[i].number);
    return in;
}

/* The parts of an update; refused: why it was by this shard alone, or NULL. */
static int replay_parts(replaying *p, const wire_span *raw, size_t all,
                        const err_kept *refused, wire_memory *memory)
{
    size_t n = 0;
    int rc = PERSIA_OK;
    push_call **parts = persia_wire_memory_take(memory,
                                                (all + 1) * sizeof(void *));
    ledger_key *keys = persia_wire_memory_take(memory,
                                               (all + 1) * sizeof *keys);
    if (!parts || !keys)
        return PERSIA_ENOMEM;
    for (; n < all && !rc; n++) {
        parts[n] = NULL;
        rc = replay_part(p, &raw[n], memory, &parts[n]);
        if (parts[n])
            keys[n] = parts[n]->key;
    }
    if (rc || !n) {
        for (size_t i = 0; i < n; i++)
            if (parts[i])
                push_fail(parts[i], rc, "");
        return rc;
    }
    persia_err_keep(&p->end, PERSIA_OK);
    push_apply(p->s, parts, (uint32_t)n);
    if (p->end.code && !replay_is_in(p->s, keys, n))
        return persia_err_again(&p->end);
    ledger *l = p->s->ledger;
    for (size_t i = 0; refused && i < n; i++)
        if (!ledger_is_older(l, keys[i].stream, keys[i].owner))
            ledger_refuse(l, &keys[i], refused->code, refused->text);
    return PERSIA_OK;
}

static int replay_push(replaying *p, const log_record *r, wire_memory *memory)
{
    err_kept why;
    if (r->type == LOG_PUSH)
        return replay_parts(p, r->parts, r->n, NULL, memory);
    int rc = r->n ? logged_refusal(&r->parts[r->n - 1], &why)
                  : persia_err_set(PERSIA_ECORRUPT, "a refusal of no parts");
    return rc ? rc : replay_parts(p, r->parts, r->n - 1, &why, memory);
}

/* ---- the other types ---------------------------------------------------- */

static void replay_restored(void *ctx, int rc, shard_reply *reply)
{
    replaying *p = ctx;
    const wire_restore_reply *m = rc ? NULL : reply->message;
    p->done = m && m->done;
    replay_answered(ctx, rc, reply);
}

static int replay_restore_step(replaying *p, wire_restore *m,
                               enum wire_restore_verb verb)
{
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t never;
    persia_cond_init(&never);
    pthread_mutex_lock(&lock);
    m->verb = verb;
    do {
        const uint64_t until = persia_clock_ns() + POLL_NS;
        p->ref->ops->restore(p->ref, m, PERSIA_FOREVER, replay_restored, p);
        while (!p->end.code && !p->done &&
               persia_cond_wait_until(&never, &lock, until) == 0)
            ;
    } while (!p->end.code && !p->done);
    pthread_mutex_unlock(&lock);
    pthread_cond_destroy(&never);
    return persia_err_again(&p->end);
}

/* The rows of a checkpoint, which must still be there: the server's own cut
 * follows a restore. */
static int replay_restore(replaying *p, const log_record *r,
                          wire_memory *memory)
{
    wire_restore m;
    int rc = persia_wire_get_restore(r->parts->data, r->parts->n, memory, &m);
    if (rc)
        return rc;
    persia_log_want_cut(p->s->log, r->end);
    m.caller.boot = 0;
    m.proof[0] = 0;
    rc = replay_restore_step(p, &m, RESTORE_PREPARE);
    return rc ? rc : replay_restore_step(p, &m, RESTORE_COMMIT);
}

static int replay_rows(replaying *p, const log_record *r, wire_memory *memory)
{
    wire_rows m;
    int rc = persia_wire_get_rows(r->parts->data, r->parts->n, memory, &m);
    if (rc)
        return rc;
    logged_forget(p->s, &m, r->end);
    m.caller.boot = 0;
    p->ref->ops->put_rows(p->ref, &m, PERSIA_FOREVER, replay_answered, p);
    /* What is refused now was refused then. */
    return p->end.code == PERSIA_ELIMIT || p->end.code == PERSIA_ENOMEM
               ? persia_err_again(&p->end)
               : PERSIA_OK;
}

static int replay_arrival(replaying *p, const log_record *r,
                          wire_memory *memory)
{
    wire_move m;
    int rc = persia_wire_get_move(r->parts->data, r->parts->n, memory, &m);
    if (rc)
        return rc;
    persia_log_discount(p->s->log, r->end);
    persia_log_forget(p->s->log, r->end);
    return persia_shard_arrive(p->s, &m);
}

static int replay_table(replaying *p, const wire_span *raw,
                        wire_memory *memory)
{
    wire_declare m;
    int rc = persia_wire_get_declare(raw->data, raw->n, memory, &m);
    if (rc)
        return rc;
    p->ref->ops->declare(p->ref, &m, PERSIA_FOREVER, replay_answered, p);
    return persia_err_again(&p->end);
}

/* A claim, or the identity of the rows. */
static int replay_hello(replaying *p, const log_record *r, wire_memory *memory)
{
    wire_hello m;
    int rc = persia_wire_get_hello(r->parts[0].data, r->parts[0].n, memory,
                                   &m);
    if (rc)
        return rc;
    if (r->type == LOG_IDENTITY) {
        atomic_store(&p->s->lineage, m.caller.lineage);
        atomic_store(&p->s->restored, m.restore);
        return PERSIA_OK;
    }
    return replay_stream(p, &(ledger_key){.stream = m.stream,
                                          .owner = owner_of(&m.caller)});
}

/* ---- all ---------------------------------------------------------------- */

static int replay_type(replaying *p, const log_record *r, wire_memory *memory)
{
    if (r->type == LOG_PUSH || r->type == LOG_REFUSAL)
        return replay_push(p, r, memory);
    if (r->n != 1)
        return persia_err_set(PERSIA_ECORRUPT, "a record of %zu parts", r->n);
    switch (r->type) {
    case LOG_ROWS:
        return replay_rows(p, r, memory);
    case LOG_TABLE:
        return replay_table(p, r->parts, memory);
    case LOG_RESTORE:
        return replay_restore(p, r, memory);
    case LOG_ARRIVAL:
        return replay_arrival(p, r, memory);
    case LOG_CLAIM:
    case LOG_IDENTITY:
        return replay_hello(p, r, memory);
    default:
        return persia_err_set(PERSIA_EMISMATCH, "a record of type %u, which "
                              "this version of persia does not know",
                              (unsigned)r->type);
    }
}

static int replay_record(void *ctx, const log_record *r)
{
    replaying *p = ctx;
    wire_memory memory;
    persia_wire_memory_init(&memory);
    persia_tables_set_now(p->s->p, r->seconds);
    persia_err_keep(&p->end, PERSIA_OK);
    int rc = replay_type(p, r, &memory);
    persia_wire_memory_free(&memory);
    if (!rc)
        return PERSIA_OK;
    return persia_err_set(rc, "%s, offset %" PRIu64 ": the record of type %s "
                          "cannot be applied: %s",
                          r->file, r->offset, persia_log_type_name(r->type),
                          persia_err_text());
}

int persia_shard_replay(shard *s, shard_ref *direct, uint64_t from,
                        log_found *found)
{
    replaying p = {.s = s, .ref = direct};
    assert(s->log && s->replaying);
    int rc = persia_log_read(s->log, from, replay_record, &p, &s->replayed,
                             found);
    persia_tables_set_now(s->p, 0);
    if (rc)
        return rc;
    pthread_mutex_lock(&s->declare_lock);
    s->logged_tables = persia_tables_tables(s->p);
    pthread_mutex_unlock(&s->declare_lock);
    persia_log_on_sync(s->log, late_synced, s);
    rc = persia_log_begin(s->log, found);
    if (rc)
        return rc;
    pthread_mutex_lock(&s->wait_lock);
    sync_begin(&s->sync);
    pthread_mutex_unlock(&s->wait_lock);
    s->replaying = 0;
    return logged_identity(s);
}
