/* logged.c: records of a shard's log; answers that wait for it. */
#include "shard/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- records of one message --------------------------------------------- */

typedef int (*message_put_fn)(wire_out *o, const void *m);

#define PUT(name)                                                             \
    static int put_##name(wire_out *o, const void *m)                         \
    {                                                                         \
        return persia_wire_put_##name(o, m);                                  \
    }
PUT(push)
PUT(rows)
PUT(declare)
PUT(hello)
PUT(restore)
PUT(move)
#undef PUT

/* A message in one piece, in `memory`. */
static int logged_encode(message_put_fn put, const void *m,
                         wire_memory *memory, wire_span *out)
{
    wire_out o;
    persia_wire_out_init(&o);
    int rc = put(&o, m);
    void *data = rc ? NULL : persia_wire_memory_take(memory, o.bytes + 1);
    if (!rc && !data)
        rc = PERSIA_ENOMEM;
    if (!rc) {
        persia_wire_out_copy(&o, data);
        *out = (wire_span){data, o.bytes};
    }
    persia_wire_out_free(&o);
    return rc;
}

static int append_message(shard *s, enum log_type type, message_put_fn put,
                          const void *m)
{
    wire_memory memory;
    wire_span part;
    uint64_t end;
    if (!s->log || s->replaying)
        return PERSIA_OK;
    persia_wire_memory_init(&memory);
    int rc = logged_encode(put, m, &memory, &part);
    if (!rc)
        rc = persia_log_append(s->log, type, &part, 1, &end);
    persia_wire_memory_free(&memory);
    return rc;
}

void logged_forget(shard *s, const wire_rows *m, uint64_t position)
{
    if (m->erase || m->clear || m->drop)
        persia_log_forget(s->log, position);
}

int logged_rows(shard *s, const wire_rows *m)
{
    int rc = append_message(s, LOG_ROWS, put_rows, m);
    if (!rc && s->log && !s->replaying)
        logged_forget(s, m, persia_log_end(s->log));
    return rc;
}

int logged_arrival(shard *s, const wire_move *m)
{
    wire_move own = *m;
    own.tables_n = 0;
    if (!s->log || s->replaying ||
        !(m->pieces_n + m->sightings_n + m->handover_n))
        return PERSIA_OK;
    int rc = append_message(s, LOG_ARRIVAL, put_move, &own);
    if (rc)
        return rc;
    const uint64_t end = persia_log_end(s->log);
    persia_log_discount(s->log, end);
    persia_log_forget(s->log, end); /* of rows that went meanwhile, too */
    return PERSIA_OK;
}

int logged_claim(shard *s, const wire_hello *m)
{
    return append_message(s, LOG_CLAIM, put_hello, m);
}

int logged_identity(shard *s)
{
    const wire_hello m = {
        .caller = {.lineage = atomic_load(&s->lineage)},
        .version = WIRE_VERSION,
        .restore = atomic_load(&s->restored)};
    return append_message(s, LOG_IDENTITY, put_hello, &m);
}

int logged_restore_keep(shard *s, const wire_restore *m, wire_memory *memory,
                        wire_span *out)
{
    *out = (wire_span){NULL, 0};
    return s->log && !s->replaying ? logged_encode(put_restore, m, memory, out)
                                   : PERSIA_OK;
}

int logged_restore(shard *s, const wire_span *request)
{
    uint64_t end;
    if (!request->data || s->replaying)
        return PERSIA_OK;
    int rc = persia_log_append(s->log, LOG_RESTORE, request, 1, &end);
    if (!rc) /* the files of the checkpoint may go */
        persia_log_want_cut(s->log, end);
    return rc;
}

int logged_wait(shard *s)
{
    if (!s->log || s->replaying || !persia_log_syncs(s->log))
        return PERSIA_OK;
    return persia_log_wait(s->log, persia_log_end(s->log));
}

int logged_tables(shard *s)
{
    int rc = PERSIA_OK;
    const uint32_t n = persia_tables_tables(s->p);
    while (s->log && !s->replaying && s->logged_tables < n && !rc) {
        const uint32_t no = s->logged_tables;
        wire_declare m = {.table = persia_table_get_config(
                                       persia_tables_table(s->p, no))->spec};
        m.table.capacity = atomic_load(&s->capacity[no]);
        rc = append_message(s, LOG_TABLE, put_declare, &m);
        s->logged_tables += !rc;
    }
    return rc;
}

/* ---- updates ------------------------------------------------------------ */

/* The request without ids and gradients: number, settings and clocks stay. */
static int logged_encode_bare(const wire_push *m, wire_memory *memory,
                              wire_span *out)
{
    wire_push bare = *m;
    const size_t bytes = m->tables_n * sizeof *bare.tables;
    bare.tables = persia_wire_memory_take(memory, bytes + 1);
    if (!bare.tables)
        return PERSIA_ENOMEM;
    for (size_t i = 0; i < m->tables_n; i++) {
        bare.tables[i] = m->tables[i];
        bare.tables[i].ids = NULL;
        bare.tables[i].grads = (wire_values){.no = m->tables[i].grads.no};
    }
    return logged_encode(put_push, &bare, memory, out);
}

/* The name of its code, 0, its text. */
static int logged_encode_why(const err_kept *why, wire_memory *memory,
                             wire_span *out)
{
    const char *name = persia_err_name(why->code);
    const size_t n = strlen(name) + 1, bytes = n + strlen(why->text);
    char *data = persia_wire_memory_take(memory, bytes);
    if (!data)
        return PERSIA_ENOMEM;
    memcpy(data, name, n);
    memcpy(data + n, why->text, bytes - n);
    *out = (wire_span){data, bytes};
    return PERSIA_OK;
}

int logged_refusal(const wire_span *raw, err_kept *out)
{
    const char *name = raw->data, *end = name ? memchr(name, 0, raw->n) : NULL;
    if (!end)
        return persia_err_set(PERSIA_ECORRUPT, "a refusal without its error");
    out->code = persia_err_code(name);
    snprintf(out->text, sizeof out->text, "%.*s",
             (int)(raw->n - (size_t)(end + 1 - name)), end + 1);
    return PERSIA_OK;
}

static int logged_encode_part(const push_call *c, int bare,
                              wire_memory *memory, wire_span *out)
{
    if (bare)
        return logged_encode_bare(c->m, memory, out);
    if (c->jobs)
        return persia_err_set(PERSIA_EARG, "a log takes updates that are "
                              "messages alone");
    if (!c->raw) /* of this process: as it would travel */
        return logged_encode(put_push, c->m, memory, out);
    *out = (wire_span){c->raw, c->raw_n};
    return PERSIA_OK;
}

int logged_push(shard *s, push_call *const *parts, uint32_t n,
                const err_kept *refused, uint64_t *end)
{
    wire_memory memory;
    int rc = PERSIA_OK;
    if (!s->log || s->replaying)
        return PERSIA_OK;
    persia_wire_memory_init(&memory);
    wire_span *spans = persia_wire_memory_take(&memory,
                                               (n + 1) * sizeof *spans);
    if (!spans)
        rc = PERSIA_ENOMEM;
    for (uint32_t i = 0; i < n && !rc; i++)
        rc = logged_encode_part(parts[i], refused != NULL, &memory, &spans[i]);
    if (!rc && refused)
        rc = logged_encode_why(refused, &memory, &spans[n]);
    if (!rc)
        rc = persia_log_append(s->log, refused ? LOG_REFUSAL : LOG_PUSH, spans,
                               n + (refused != NULL), end);
    persia_wire_memory_free(&memory);
    return rc;
}

static int logged_refusal_again(shard *s, const ledger_key *key,
                                const err_kept *why)
{
    const wire_push m = {.caller = {.client = key->owner.client,
                                    .incarnation = key->owner.incarnation},
                         .stream = key->stream, .number = key->number,
                         .parts = 1, .skips = 1};
    wire_memory memory;
    wire_span spans[2];
    uint64_t end;
    persia_wire_memory_init(&memory);
    int rc = logged_encode(put_push, &m, &memory, &spans[0]);
    if (!rc)
        rc = logged_encode_why(why, &memory, &spans[1]);
    if (!rc)
        rc = persia_log_append(s->log, LOG_REFUSAL, spans, 2, &end);
    persia_wire_memory_free(&memory);
    return rc;
}

void logged_refusals(shard *s)
{
    ledger_key key;
    err_kept why;
    int rc = PERSIA_OK, any = 0;
    for (uint32_t i = 0; i < LEDGER_REFUSALS && s->log && !rc; i++)
        if (ledger_refusal_at(s->ledger, i, &key, &why)) {
            rc = logged_refusal_again(s, &key, &why);
            any = 1;
        }
    if (any)
        (void)logged_wait(s);
}

/* ---- answers that wait -------------------------------------------------- */

int late_make(shard *s, push_call *const *parts, uint32_t n,
              late_answer **out)
{
    *out = NULL;
    if (!s->log || s->replaying || !persia_log_syncs(s->log))
        return PERSIA_OK;
    late_answer *a = malloc(sizeof *a + n * sizeof *a->parts);
    if (!a)
        return persia_err_set(PERSIA_ENOMEM, "no memory for an answer");
    memcpy(a->parts, parts, n * sizeof *a->parts);
    a->n = n;
    *out = a;
    return PERSIA_OK;
}

static void late_answer_now(shard *s, late_answer *a, int rc)
{
    if (rc)
        persia_err_keep(&a->why, rc);
    push_answer_all(s, a->parts, a->n, &a->why, &a->reply);
    free(a);
}

/* The first that need not wait; NULL: there is none. */
static late_answer *late_take(shard *s, int *rc)
{
    pthread_mutex_lock(&s->late_lock);
    late_answer **at = &s->late;
    while (*at && !persia_log_synced(s->log, (*at)->end, rc) && !*rc)
        at = &(*at)->next;
    late_answer *a = *at;
    if (a)
        *at = a->next;
    pthread_mutex_unlock(&s->late_lock);
    return a;
}

void late_synced(void *ctx)
{
    shard *s = ctx;
    int rc = PERSIA_OK;
    for (late_answer *a; (a = late_take(s, &rc));)
        late_answer_now(s, a, rc);
}

void late_keep(shard *s, late_answer *a)
{
    pthread_mutex_lock(&s->late_lock);
    a->next = s->late;
    s->late = a;
    pthread_mutex_unlock(&s->late_lock);
    /* It may have been synced, or the log have failed, before it was there. */
    late_synced(s);
}
