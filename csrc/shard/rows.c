/* rows.c: whole rows out and in. */
#include "shard/private.h"

#include <string.h>

/* Ids of rows, as many as were asked for and fit in an answer. */
static int list_rows(shard *s, table *t, const wire_rows *m, answer *a)
{
    enum { MOST = 1 << 20 };
    size_t room = m->list < MOST ? m->list : MOST;
    const uint64_t fit = persia_wire_fit(s->message_limit, sizeof *m->ids);
    if (fit < room)
        room = (size_t)fit;
    wire_rows *reply = &a->m.rows;
    *reply = (wire_rows){.no = m->no, .cursor = m->cursor};
    int rc = persia_mem_pool_take(s->blocks, room * sizeof *m->ids, &a->bulk);
    if (!rc)
        rc = persia_table_list(t, &reply->cursor, room, a->bulk,
                               &reply->n);
    reply->ids = rc ? NULL : a->bulk;
    return rc;
}

static int get_rows(shard *s, const wire_rows *m, answer *a)
{
    table *t;
    int rc = check_rows(s, &m->caller);
    if (rc || (rc = find_table(s, m->no, &t)) ||
        (rc = check_ids_here(s, t, m->ids, m->n)))
        return rc;
    if (m->list)
        return list_rows(s, t, m, a);
    const uint32_t dim = persia_table_get_config(t)->dim;
    const uint32_t state = persia_table_state_floats(t);
    const uint64_t row = 8 + ((uint64_t)dim + state) * sizeof(float) + 1;
    if ((rc = persia_shard_check_bytes(s, "the rows would be an answer",
                                m->n * row)) ||
        (rc = persia_mem_pool_take(s->blocks, m->n * row, &a->bulk)))
        return rc;
    uint64_t *ids = a->bulk; /* those of the request do not last */
    float *vectors = (float *)(ids + m->n), *states = vectors + m->n * dim;
    uint8_t *found = (uint8_t *)(states + m->n * state);
    if (m->n)
        memcpy(ids, m->ids, m->n * sizeof *ids);
    a->m.rows = (wire_rows){.no = m->no,
                            .n = m->n,
                            .ids = ids,
                            .dim = dim,
                            .state_floats = state,
                            .vectors = vectors,
                            .state = state ? states : NULL,
                            .found = found};
    return persia_table_get(t, m->n, ids, vectors, states, found);
}

void get_rows_run(shard *s, const shard_call *c, const wire_rows *m)
{
    answer *a;
    int rc = answer_make(&a);
    if (!rc)
        rc = get_rows(s, m, a);
    if (!rc) /* and not of tables that were emptied or replaced meanwhile */
        rc = check_rows(s, &m->caller);
    answer_give(c, rc, a);
}

typedef struct putting {
    shard *s;
    const wire_rows *m;
    uint64_t erased;
} putting;

/* What is written has the table's shape; *out: the table, unless
 * it is dropped. */
static int check_put(const shard *s, const wire_rows *m, table **out)
{
    table *t;
    int rc = check_rows(s, &m->caller);
    if (!rc)
        rc = check_stays(s);
    if (rc || m->drop)
        return rc;
    if ((rc = find_table(s, m->no, &t)) ||
        (rc = check_ids_here(s, t, m->ids, m->n)))
        return rc;
    *out = t;
    if (m->erase)
        return PERSIA_OK;
    const table_config *c = persia_table_get_config(t);
    if (m->n && (m->dim != c->dim || !m->vectors))
        return persia_err_set(PERSIA_ESHAPE,
                              "table %s: rows of dim %u arrive, the "
                              "table has dim %u",
                              c->name, m->vectors ? m->dim : 0, c->dim);
    if (m->state && m->state_floats != persia_table_state_floats(t))
        return persia_err_set(PERSIA_ESHAPE,
                              "table %s: %u floats of state a row "
                              "arrive, the table has %u",
                              c->name, m->state_floats,
                              persia_table_state_floats(t));
    if (m->clear && m->n) /* rows that are refused would be too late */
        return persia_err_set(PERSIA_EARG,
                              "table %s: PutRows with clear has no "
                              "rows; put them afterwards",
                              c->name);
    return PERSIA_OK;
}

/* With the gate held: no restore has replaced the rows, nor will before they
 * are changed. */
static int put_rows(void *ctx)
{
    putting *p = ctx;
    const wire_rows *m = p->m;
    table *t = NULL;
    int rc = check_put(p->s, m, &t);
    if (!rc)
        rc = logged_rows(p->s, m);
    if (rc)
        return rc;
    if (m->drop)
        return persia_tables_drop(p->s->p, m->no);
    if (m->erase)
        return persia_table_erase(t, m->n, m->ids, &p->erased);
    return m->clear ? persia_table_clear(t)
                    : persia_table_set(t, m->n, m->ids, m->vectors, m->state);
}

void put_rows_run(shard *s, const shard_call *c, const wire_rows *m)
{
    putting p = {.s = s, .m = m};
    int rc = m->drop || s->log
                 ? persia_tables_between(s->p, put_rows, &p)
                 : persia_tables_change(s->p, put_rows, &p);
    if (!rc)
        rc = logged_wait(s);
    const wire_rows reply = {.no = m->no, .erased = p.erased};
    call_reply(c, rc, &reply);
}
