/* rows.c: whole rows out and in. */
#include "server/private.h"

#include <string.h>

/* Ids of rows, as many as were asked for and fit in an answer. */
static int list_rows(ps_service *s, table *t, const wire_rows *m, answer *a)
{
    enum { MOST = 1 << 20 };
    size_t room = m->list < MOST ? m->list : MOST;
    if (s->message_limit / 16 < room)
        room = (size_t)(s->message_limit / 16);
    wire_rows reply = {.no = m->no, .cursor = m->cursor};
    int rc = buffers_take(s->buffers, room * sizeof *m->ids, &a->bulk);
    if (!rc)
        rc = table_list(t, &reply.cursor, room, a->bulk->data, &reply.n);
    reply.ids = rc ? NULL : a->bulk->data;
    return rc ? rc : wire_put_rows(&a->o, &reply);
}

int handle_get_rows(ps_service *s, rpc_call *call, wire_memory *memory,
                    answer *a)
{
    wire_rows m;
    table *t;
    int rc = service_check_admin(call, "GetRows");
    if (rc)
        return rc;
    rc = wire_get_rows(call->request, call->request_n, memory, &m);
    if (rc || (rc = service_check_rows(s, &m.caller)) ||
        (rc = service_table(s, m.no, &t)) ||
        (rc = service_check_ids(s, t, m.ids, m.n)))
        return rc;
    if (m.list)
        return list_rows(s, t, &m, a);
    const uint32_t dim = table_get_config(t)->dim;
    const uint32_t state = table_state_floats(t);
    const uint64_t row = 8 + ((uint64_t)dim + state) * sizeof(float) + 1;
    if ((rc = service_check_bytes(s, "the rows would be an answer",
                                  m.n * row)) ||
        (rc = buffers_take(s->buffers, m.n * row, &a->bulk)))
        return rc;
    uint64_t *ids = a->bulk->data; /* those of the request do not last */
    float *vectors = (float *)(ids + m.n), *states = vectors + m.n * dim;
    uint8_t *found = (uint8_t *)(states + m.n * state);
    if (m.n)
        memcpy(ids, m.ids, m.n * sizeof *ids);
    rc = table_get(t, m.n, ids, vectors, states, found);
    wire_rows reply = {.no = m.no,
                       .n = m.n,
                       .ids = ids,
                       .dim = dim,
                       .state_floats = state,
                       .vectors = vectors,
                       .state = state ? states : NULL,
                       .found = found};
    return rc ? rc : wire_put_rows(&a->o, &reply);
}

int handle_put_rows(ps_service *s, rpc_call *call, wire_memory *memory,
                    answer *a)
{
    wire_rows m;
    table *t;
    int rc = service_check_admin(call, "PutRows");
    if (rc)
        return rc;
    rc = wire_get_rows(call->request, call->request_n, memory, &m);
    if (rc || (rc = service_check_rows(s, &m.caller)) ||
        (rc = service_table(s, m.no, &t)) ||
        (rc = service_check_ids(s, t, m.ids, m.n)))
        return rc;
    const table_config *c = table_get_config(t);
    if (m.n && (m.dim != c->dim || !m.vectors))
        return err_set(PERSIA_ESHAPE, "table %s: rows of dim %u come, the "
                       "table has dim %u", c->name, m.vectors ? m.dim : 0,
                       c->dim);
    if (m.state && m.state_floats != table_state_floats(t))
        return err_set(PERSIA_ESHAPE, "table %s: %u floats of state a row "
                       "come, the table has %u", c->name, m.state_floats,
                       table_state_floats(t));
    if (m.clear && m.n) /* rows that are refused would be too late */
        return err_set(PERSIA_EARG, "table %s: PutRows with clear has no "
                       "rows; put them afterwards", c->name);
    rc = m.clear ? table_clear(t)
                 : table_set(t, m.n, m.ids, m.vectors, m.state);
    wire_rows reply = {.no = m.no};
    return rc ? rc : wire_put_rows(&a->o, &reply);
}
