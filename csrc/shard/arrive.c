/* arrive.c: a shard that arrives from another server, part by part (copy.c).
 *
 * No other thread knows it yet.  One with a log has each part there, so a
 * server that starts again has what it said it has.
 */
#include "shard/private.h"

#include <stdlib.h>
#include <string.h>

/* ---- rows --------------------------------------------------------------- */

static int arrive_shape_differs(const table *t, const wire_piece *p)
{
    const table_config *c = persia_table_get_config(t);
    const uint32_t state = persia_table_state_floats(t);
    return p->vector_bytes != vector_size(c->dtype, c->dim) || !p->vectors ||
           p->state_floats != state || (state && !p->state) || !p->clocks ||
           (persia_table_has_field(t) && !p->fields);
}

static int arrive_check_piece(const shard *s, const wire_piece *p)
{
    table *t;
    int rc = find_table(s, p->no, &t);
    if (!rc)
        rc = check_ids_here(s, t, p->ids, p->n);
    if (rc)
        return rc;
    if (p->reset && (!p->stripes || p->stripes & (p->stripes - 1)))
        return persia_err_set(PERSIA_EARG, "there are no %u stripes",
                              p->stripes);
    if (!p->gone && p->n && arrive_shape_differs(t, p))
        return persia_err_set(PERSIA_EMISMATCH,
                              "table %s: rows of another shape arrive",
                              persia_table_get_config(t)->name);
    return PERSIA_OK;
}

/* Takes away all rows of a stripe of the sender's. */
static int arrive_reset(table *t, const wire_piece *p)
{
    enum { ROOM = 1 << 16 };
    uint64_t cursor = 0, erased, *ids = malloc(ROOM * sizeof *ids);
    size_t n, k;
    int rc = ids ? PERSIA_OK
                 : persia_err_set(PERSIA_ENOMEM, "no memory for a list of "
                                  "rows");
    while (cursor != TABLE_LIST_END && !rc) {
        rc = persia_table_list(t, &cursor, ROOM, ids, &n);
        k = 0;
        for (size_t i = 0; i < n && !rc; i++)
            if (hash_stripe(id_hash(ids[i]), p->stripes - 1) == p->stripe)
                ids[k++] = ids[i];
        if (!rc)
            rc = persia_table_erase(t, k, ids, &erased);
    }
    free(ids);
    return rc;
}

static int arrive_piece(shard *s, const wire_piece *p)
{
    table *t = persia_tables_table(s->p, p->no);
    uint64_t erased;
    int rc = PERSIA_OK;
    persia_table_set_filling(t, 1);
    if (p->reset)
        rc = arrive_reset(t, p);
    if (rc || !p->n)
        return rc;
    return p->gone ? persia_table_erase(t, p->n, p->ids, &erased)
                   : persia_table_restore(t, p->n, p->ids, p->vectors,
                                          p->state, p->clocks, p->fields);
}

/* ---- what lies beside them ---------------------------------------------- */

static int arrive_check_sightings(const shard *s, const wire_sightings *p)
{
    table *t;
    int rc = find_table(s, p->no, &t);
    const size_t words =
        rc ? 0 : persia_table_sightings(persia_table_get_config(t));
    if (!rc && (!words || p->n % words || p->first > IDS_SLOTS ||
                p->n / words > IDS_SLOTS - p->first))
        rc = persia_err_set(PERSIA_EMISMATCH, "table %s keeps no such "
                            "sightings", persia_table_get_config(t)->name);
    return rc;
}

static void arrive_sightings(const shard *s, const wire_sightings *p)
{
    table *t = persia_tables_table(s->p, p->no);
    const size_t words = persia_table_sightings(persia_table_get_config(t));
    persia_table_restore_sightings(t, p->first, (uint32_t)(p->n / words),
                                   p->words);
}

typedef struct arriving {
    shard *s;
    const wire_handover *h;
    ledger *ledger;
} arriving;

/* Between two updates. */
static int arrive_take_over(void *ctx)
{
    arriving *a = ctx;
    shard *s = a->s;
    const wire_handover *h = a->h;
    ledger_exchange(s->ledger, a->ledger, &s->lineage, h->lineage);
    atomic_store(&s->restored, h->restore);
    for (uint32_t i = 0; i < h->pushes_n; i++) {
        table *t = persia_tables_table(s->p, i);
        persia_table_set_clock(t, h->pushes[i]);
        persia_table_set_filling(t, 0);
    }
    persia_tables_set_updates(s->p, h->updates);
    persia_tables_set_t(s->p, h->t);
    wait_set_step(s, h->step);
    return s->replaying ? PERSIA_OK
                        : persia_shard_set_steps(s, h->steps, h->steps_n);
}

static int arrive_handover(shard *s, const wire_handover *h)
{
    arriving a = {.s = s, .h = h};
    int rc = ledger_create(LEDGER_STREAMS, &a.ledger);
    if (!rc)
        rc = ledger_fill(a.ledger, h->ledgers, h->ledgers_n);
    if (!rc)
        rc = persia_tables_between(s->p, arrive_take_over, &a);
    ledger_destroy(a.ledger);
    return rc ? rc : logged_wait(s);
}

/* ---- a part ------------------------------------------------------------- */

static int arrive_tables(shard *s, const wire_move *m, wire_memory *memory)
{
    int rc = PERSIA_OK;
    for (size_t i = 0; i < m->tables_n && !rc; i++) {
        const wire_declare declare = {.table = m->tables[i]};
        wire_declare_reply reply;
        rc = declare_answer(s, &declare, memory, &reply);
    }
    return rc;
}

static int arrive_check(const shard *s, const wire_move *m)
{
    int rc = PERSIA_OK;
    for (size_t i = 0; i < m->pieces_n && !rc; i++)
        rc = arrive_check_piece(s, &m->pieces[i]);
    for (size_t i = 0; i < m->sightings_n && !rc; i++)
        rc = arrive_check_sightings(s, &m->sightings[i]);
    if (!rc && m->handover_n &&
        m->handover->pushes_n != persia_tables_tables(s->p))
        rc = persia_err_set(PERSIA_EMISMATCH,
                            "a shard of %zu tables arrives, %u were in its "
                            "parts",
                            m->handover->pushes_n,
                            persia_tables_tables(s->p));
    return rc;
}

int persia_shard_arrive(shard *s, const wire_move *m)
{
    wire_memory memory;
    persia_wire_memory_init(&memory);
    int rc = arrive_tables(s, m, &memory);
    persia_wire_memory_free(&memory);
    if (!rc)
        rc = arrive_check(s, m);
    if (!rc)
        rc = logged_arrival(s, m);
    for (size_t i = 0; i < m->pieces_n && !rc; i++)
        rc = arrive_piece(s, &m->pieces[i]);
    for (size_t i = 0; i < m->sightings_n && !rc; i++)
        arrive_sightings(s, &m->sightings[i]);
    return rc || !m->handover_n ? rc : arrive_handover(s, m->handover);
}
