/* copy.c: a shard on its way to another server, while updates continue.
 *
 * It goes in parts, in rounds.  A round has the rows that have changed since
 * they were in a part, the first one all (persia_table_watch_open()).  Where
 * few are left the shard is held (moving.c): then the last round follows, and
 * what lies beside the rows.
 */
#include "shard/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PART_BYTES = 1 << 20 };

struct shard_copy {
    uint64_t lineage, restored; /* of the rows, when it began */
    uint32_t tables_n;          /* that were in a part */
    uint32_t at;                /* table of this round */
    uint32_t seen, slot;        /* table, and its slot, of the sightings */
    int ended;
    table_watch *watch[TABLES_MAX];
    uint8_t was_dropped[TABLES_MAX];
    /* The part that was made last, its rows, and what it points to: */
    wire_move part;
    uint64_t rows;
    void *room; /* [room_bytes] */
    size_t room_bytes;
    table_spec spec;
    wire_piece pieces[2];
    wire_sightings sightings;
    wire_handover handover;
    size_t ledgers_room;
};

int persia_shard_copy_begin(shard *s)
{
    shard_copy *c = calloc(1, sizeof *c);
    if (!PERSIA_HOLDS(!s->copy))
        persia_shard_copy_end(s);
    if (!c)
        return persia_err_set(PERSIA_ENOMEM, "no memory to move a shard");
    c->lineage = atomic_load(&s->lineage);
    c->restored = atomic_load(&s->restored);
    s->copy = c;
    return PERSIA_OK;
}

void persia_shard_copy_end(shard *s)
{
    shard_copy *c = s->copy;
    s->copy = NULL;
    if (!c)
        return;
    for (uint32_t i = 0; i < c->tables_n; i++)
        persia_table_watch_close(c->watch[i]);
    free(c->handover.pushes);
    free(c->handover.ledgers);
    free(c->handover.steps);
    free(c->room);
    free(c);
}

uint64_t persia_shard_copy_left(const shard *s)
{
    uint64_t rows = 0;
    for (uint32_t i = 0; i < s->copy->tables_n; i++)
        rows += persia_table_watch_rows(s->copy->watch[i]);
    return rows;
}

/* ---- parts -------------------------------------------------------------- */

/* Bytes of what admission has seen, of a slot. */
static size_t copy_slot_bytes(const table *t)
{
    return persia_table_sightings(persia_table_get_config(t)) *
           sizeof(uint32_t);
}

static int copy_room(shard_copy *c, size_t bytes)
{
    if (bytes <= c->room_bytes)
        return PERSIA_OK;
    free(c->room);
    c->room = malloc(bytes);
    c->room_bytes = c->room ? bytes : 0;
    return c->room ? PERSIA_OK
                   : persia_err_set(PERSIA_ENOMEM,
                                    "no memory to move a shard");
}

static int copy_table(shard *s, shard_copy *c)
{
    const uint32_t no = c->tables_n;
    table *t = persia_tables_table(s->p, no);
    const size_t slot = copy_slot_bytes(t);
    int rc = copy_room(c, slot > PART_BYTES ? slot : PART_BYTES);
    if (!rc)
        rc = persia_table_watch_open(t, 1, &c->watch[no]);
    if (rc)
        return rc;
    c->was_dropped[no] = (uint8_t)persia_tables_dropped(s->p, no);
    hello_spec(s, no, &c->spec);
    c->part.tables = &c->spec;
    c->part.tables_n = 1;
    c->tables_n++;
    return PERSIA_OK;
}

/* Arrays of as many rows as a part has room for. */
static table_changes copy_arrays(const shard_copy *c, const table *t,
                                 uint32_t vector)
{
    const uint32_t state = persia_table_state_floats(t);
    const size_t row = 2 * sizeof(uint64_t) + vector + 4 * (state + 2u);
    table_changes g = {.room = PART_BYTES / row};
    g.ids = c->room;
    g.gone = g.ids + g.room;
    g.state = (float *)(void *)(g.gone + g.room);
    g.clocks = (uint32_t *)(void *)(g.state + g.room * state);
    g.fields = g.clocks + g.room;
    g.vectors = g.fields + g.room;
    return g;
}

/* The next changes of a table, if there are some; *ended: they end the
 * round. */
static int copy_pieces(shard *s, shard_copy *c, int *ended)
{
    const table *t = persia_tables_table(s->p, c->at);
    const table_config *config = persia_table_get_config(t);
    const uint32_t vector = vector_size(config->dtype, config->dim);
    table_changes g = copy_arrays(c, t, vector);
    int rc = persia_table_watch_next(c->watch[c->at], &g);
    if (rc)
        return rc;
    *ended = g.end;
    wire_piece *p = c->pieces;
    if (g.reset || g.gone_n)
        *p++ = (wire_piece){.no = c->at,
                            .n = g.gone_n,
                            .ids = g.gone_n ? g.gone : NULL,
                            .gone = 1,
                            .reset = g.reset != 0,
                            .stripe = g.stripe,
                            .stripes = g.stripes};
    if (g.n) {
        const uint32_t state = persia_table_state_floats(t);
        *p++ = (wire_piece){
            .no = c->at,
            .n = g.n,
            .ids = g.ids,
            .vector_bytes = vector,
            .vectors = g.vectors,
            .state_floats = state,
            .state = state ? g.state : NULL,
            .clocks = g.clocks,
            .fields = persia_table_has_field(t) ? g.fields : NULL};
        c->rows = g.n;
    }
    c->part.pieces = c->pieces;
    c->part.pieces_n = (size_t)(p - c->pieces);
    return PERSIA_OK;
}

/* What admission has seen, of the next slots of a table that keeps that. */
static void copy_sightings(const shard *s, shard_copy *c)
{
    const table *t = persia_tables_table(s->p, c->seen);
    const table_config *config = persia_table_get_config(t);
    const size_t bytes = copy_slot_bytes(t);
    const uint32_t slots = config->slots ? config->slots : IDS_SLOTS;
    uint32_t n = slots - c->slot;
    if (bytes && n > c->room_bytes / bytes)
        n = (uint32_t)(c->room_bytes / bytes);
    if (bytes) {
        persia_table_read_sightings(t, c->slot, n, c->room);
        c->sightings = (wire_sightings){.no = c->seen,
                                        .first = config->first_slot + c->slot,
                                        .n = n * bytes / sizeof(uint32_t),
                                        .words = c->room};
        c->part.sightings = &c->sightings;
        c->part.sightings_n = 1;
    }
    c->slot += n;
    if (c->slot == slots) {
        c->slot = 0;
        c->seen++;
    }
}

static int copy_check_end(const shard *s, const shard_copy *c)
{
    int same = c->lineage == atomic_load(&s->lineage) &&
               c->restored == atomic_load(&s->restored);
    for (uint32_t i = 0; i < c->tables_n; i++)
        same &= c->was_dropped[i] == persia_tables_dropped(s->p, i);
    if (!same)
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "rows were restored, or a table was dropped, "
                              "while the shard was copied; try again");
    return atomic_load(&s->hold) == SHARD_HELD
               ? check_whole(s)
               : persia_err_set(PERSIA_EARG, "the shard is not held");
}

static int copy_handover(shard *s, shard_copy *c)
{
    wire_handover *h = &c->handover;
    int rc = copy_check_end(s, c);
    if (rc)
        return rc;
    h->pushes = calloc(c->tables_n + (size_t)1, sizeof *h->pushes);
    if (!h->pushes)
        return persia_err_set(PERSIA_ENOMEM, "no memory to move a shard");
    for (uint32_t i = 0; i < c->tables_n; i++) {
        table_stats stats;
        persia_table_get_stats(persia_tables_table(s->p, i), &stats);
        h->pushes[i] = stats.pushes;
    }
    h->pushes_n = c->tables_n;
    rc = ledger_copy(s->ledger, &h->ledgers, &c->ledgers_room,
                     &h->ledgers_n);
    if (!rc)
        rc = persia_shard_steps(s, &h->steps, &h->steps_n);
    h->lineage = c->lineage;
    h->restore = c->restored;
    h->updates = persia_tables_updates(s->p);
    h->t = persia_tables_t(s->p);
    h->step = wait_step(s);
    c->part.handover = h;
    c->part.handover_n = !rc;
    c->ended = 1;
    return rc;
}

/* ---- rounds ------------------------------------------------------------- */

static int copy_is_empty(const shard_copy *c)
{
    const wire_move *m = &c->part;
    return !m->tables_n && !m->pieces_n && !m->sightings_n && !m->handover_n;
}

static int copy_round(shard *s, shard_copy *c)
{
    int rc = PERSIA_OK;
    if (c->at == 0 && c->tables_n < persia_tables_tables(s->p))
        return copy_table(s, c);
    while (c->at < c->tables_n && copy_is_empty(c) && !rc) {
        int ended = 0;
        rc = copy_pieces(s, c, &ended);
        c->at += (uint32_t)ended;
    }
    return rc;
}

int persia_shard_copy_next(shard *s, int last, uint64_t *rows, int *ended)
{
    shard_copy *c = s->copy;
    c->part = (wire_move){.verb = MOVE_PREPARE};
    c->rows = 0;
    int rc = copy_round(s, c);
    while (last && c->seen < c->tables_n && copy_is_empty(c) && !rc)
        copy_sightings(s, c);
    if (last && !c->ended && copy_is_empty(c) && !rc)
        rc = copy_handover(s, c);
    *rows = c->rows;
    *ended = copy_is_empty(c);
    if (*ended)
        c->at = 0;
    return rc;
}

void persia_shard_copy_put(const shard *s, wire_move *out)
{
    const wire_move *m = &s->copy->part;
    out->tables = m->tables;
    out->tables_n = m->tables_n;
    out->pieces = m->pieces;
    out->pieces_n = m->pieces_n;
    out->sightings = m->sightings;
    out->sightings_n = m->sightings_n;
    out->handover = m->handover;
    out->handover_n = m->handover_n;
}
