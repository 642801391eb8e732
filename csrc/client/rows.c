/* rows.c: whole rows and statistics of all shards. */
#include "client/private.h"

#include <string.h>

enum { BLOCK_BYTES = 32 << 20, BLOCK_ROWS = 1 << 18 };

enum direction { GET, PUT, ERASE };

/* Rows that go to or come from the shards, or are erased there, a block at a
 * time. */
typedef struct moving {
    ps_client *r;
    call *k;
    uint32_t no, dim, state_floats;
    enum direction to;
    size_t n;             /* of this block */
    const uint64_t *ids;
    const float *from_vectors, *from_state; /* put; state may be NULL */
    float *vectors, *state;                 /* get; state may be NULL */
    uint8_t *found;                         /* may be NULL */
    uint64_t erased;      /* of all blocks */
    /* The block, by shard: */
    size_t *start;        /* [shards + 1] */
    uint32_t *order;      /* [n] places in the block */
    uint64_t *sorted;     /* [n] */
    float *sorted_vectors, *sorted_state;   /* put */
} moving;

/* So many rows fit in a message. */
static size_t block_rows(const moving *m)
{
    const uint64_t each = sizeof(uint64_t) + 1 +
                          sizeof(float) * (m->dim + m->state_floats);
    uint64_t limit = 2 * BLOCK_BYTES;
    if (m->r->message_limit && m->r->message_limit < limit)
        limit = m->r->message_limit;
    for (uint32_t i = 0; i < m->r->servers_n; i++) {
        const uint64_t of = m->r->servers[i]->ref->message_limit;
        if (of && of < limit)
            limit = of;
    }
    const uint64_t rows = persia_wire_fit(limit, each);
    return rows > BLOCK_ROWS ? BLOCK_ROWS : (size_t)rows;
}

/* Orders the block by shard; equal shards keep the order of the ids. */
static int rows_split(moving *m)
{
    uint32_t shards = m->r->servers_n;
    size_t floats = m->to == PUT ? m->n * m->dim : 0;
    size_t states = m->from_state ? m->n * m->state_floats : 0;
    int rc = persia_mem_buffer_need(
        &m->k->lists, (shards + 1) * sizeof(size_t) +
                          m->n * (sizeof(uint32_t) + sizeof(uint64_t)) +
                          (floats + states) * sizeof(float) +
                          shards * sizeof(server *) + (size_t)64 * 6);
    if (rc)
        return rc;
    char *at = m->k->lists.data;
    (void)mem_carve(&at, shards * sizeof(server *)); /* whom to ask */
    m->start = mem_carve(&at, (shards + 1) * sizeof(size_t));
    m->order = mem_carve(&at, m->n * sizeof(uint32_t));
    m->sorted = mem_carve(&at, m->n * sizeof(uint64_t));
    m->sorted_vectors = mem_carve(&at, floats * sizeof(float));
    m->sorted_state = states ? mem_carve(&at, states * sizeof(float)) : NULL;
    memset(m->start, 0, (shards + 1) * sizeof(size_t));
    for (size_t i = 0; i < m->n; i++)
        m->start[hash_shard(id_hash(m->ids[i]), shards) + 1]++;
    for (uint32_t s = 0; s < shards; s++)
        m->start[s + 1] += m->start[s];
    for (size_t i = 0; i < m->n; i++) {
        size_t to = m->start[hash_shard(id_hash(m->ids[i]), shards)]++;
        m->order[to] = (uint32_t)i;
        m->sorted[to] = m->ids[i];
        if (floats)
            memcpy(m->sorted_vectors + to * m->dim,
                   m->from_vectors + i * m->dim, m->dim * sizeof(float));
        if (states)
            memcpy(m->sorted_state + to * m->state_floats,
                   m->from_state + i * m->state_floats,
                   m->state_floats * sizeof(float));
    }
    memmove(m->start + 1, m->start, shards * sizeof(size_t));
    m->start[0] = 0;
    return PERSIA_OK;
}

static void fill_rows(void *ctx, request *q)
{
    const moving *m = ctx;
    size_t shard = q->to->shard, at = m->start[shard];
    wire_rows *rows = &q->args.rows;
    *rows = (wire_rows){.caller = q->caller,
                        .no = server_table(q->to, m->no),
                        .n = m->start[shard + 1] - at,
                        .ids = m->sorted + at,
                        .dim = m->dim,
                        .state_floats = m->state_floats,
                        .erase = m->to == ERASE};
    if (m->to == PUT) {
        rows->vectors = m->sorted_vectors + at * m->dim;
        if (m->sorted_state)
            rows->state = m->sorted_state + at * m->state_floats;
    }
}

static int rows_accept_get(void *ctx, request *q)
{
    const moving *m = ctx;
    size_t shard = q->to->shard, at = m->start[shard];
    const wire_rows *rows = q->reply.message;
    if (rows->n != m->start[shard + 1] - at || rows->dim != m->dim ||
        !rows->vectors || (m->found && !rows->found) ||
        (m->state && m->state_floats &&
         (!rows->state || rows->state_floats != m->state_floats)))
        return server_bad_reply(q->to, "not the rows that were asked for");
    for (size_t i = 0; i < rows->n; i++) {
        size_t to = m->order[at + i];
        memcpy(m->vectors + to * m->dim, rows->vectors + i * m->dim,
               m->dim * sizeof(float));
        if (m->state && m->state_floats)
            memcpy(m->state + to * m->state_floats,
                   rows->state + i * m->state_floats,
                   m->state_floats * sizeof(float));
        if (m->found)
            m->found[to] = rows->found[i];
    }
    return PERSIA_OK;
}

static int rows_accept_any(void *ctx, request *q)
{
    (void)ctx;
    (void)q;
    return PERSIA_OK;
}

static int rows_accept_erase(void *ctx, request *q)
{
    moving *m = ctx;
    const wire_rows *rows = q->reply.message;
    m->erased += rows->erased;
    return PERSIA_OK;
}

static int rows_move_block(moving *m, uint64_t deadline)
{
    fan f = {.method = m->to == GET ? WIRE_GET_ROWS : WIRE_PUT_ROWS,
             .fill = fill_rows,
             .accept = m->to == GET   ? rows_accept_get
                       : m->to == PUT ? rows_accept_any
                                      : rows_accept_erase,
             .ctx = m};
    size_t n = 0;
    int rc = rows_split(m);
    if (rc)
        return rc;
    server **to = m->k->lists.data;
    for (uint32_t s = 0; s < m->r->servers_n; s++)
        if (m->start[s] < m->start[s + 1])
            to[n++] = m->r->servers[s];
    rc = fan_prepare(m->k, to, n);
    return rc ? rc : fan_run(m->k, &f, deadline);
}

static int rows_move(moving *m, size_t n, const uint64_t *ids)
{
    ps_client *r = m->r;
    const table_config *t;
    int rc = persia_fork_check("rows of a table");
    if (!rc)
        rc = client_find_table(r, m->no, &t);
    if (rc)
        return rc;
    m->dim = t->dim;
    m->state_floats = persia_optim_state_floats(t->optimizer, t->dim,
                                                (int)t->momentum);
    m->k = call_take(r);
    if (!m->k)
        return PERSIA_ENOMEM;
    size_t block = block_rows(m);
    for (size_t i = 0; i < n && !rc; i += m->n) {
        m->n = n - i < block ? n - i : block;
        m->ids = ids + i;
        /* Each block has the whole time: a table may be large. */
        rc = rows_move_block(m, client_deadline(r));
        size_t floats = m->n * m->dim, states = m->n * m->state_floats;
        if (m->to == PUT) {
            m->from_vectors += floats;
            m->from_state = m->from_state ? m->from_state + states : NULL;
        } else if (m->to == GET) {
            m->vectors += floats;
            m->state = m->state ? m->state + states : NULL;
            m->found = m->found ? m->found + m->n : NULL;
        }
    }
    call_give(m->k);
    return rc;
}

int persia_client_get(ps_client *r, uint32_t no, size_t n, const uint64_t *ids,
                      float *vectors, float *state, uint8_t *found)
{
    moving m = {.r = r, .no = no, .vectors = vectors, .state = state,
                .found = found};
    int rc = client_check_mixture(r, 0);
    return rc ? rc : rows_move(&m, n, ids);
}

int persia_client_set(ps_client *r, uint32_t no, size_t n, const uint64_t *ids,
                      const float *vectors, const float *state)
{
    moving m = {.r = r, .no = no, .to = PUT, .from_vectors = vectors,
                .from_state = state};
    int rc = client_check_mixture(r, 0);
    return rc ? rc : rows_move(&m, n, ids);
}

int persia_client_erase(ps_client *r, uint32_t no, size_t n,
                        const uint64_t *ids, uint64_t *erased)
{
    moving m = {.r = r, .no = no, .to = ERASE};
    int rc = client_check_mixture(r, 0);
    if (!rc)
        rc = rows_move(&m, n, ids);
    *erased = m.erased;
    return rc;
}

/* ---- the ids of rows ---- */

typedef struct listing {
    uint32_t no;
    size_t room;
    uint64_t cursor, *ids;
    size_t n;
} listing;

static void rows_fill_list(void *ctx, request *q)
{
    const listing *l = ctx;
    q->args.rows = (wire_rows){
        .caller = q->caller,
        .no = server_table(q->to, l->no),
        .list = l->room < UINT32_MAX ? (uint32_t)l->room : UINT32_MAX,
        .cursor = l->cursor};
}

static int rows_accept_list(void *ctx, request *q)
{
    listing *l = ctx;
    const wire_rows *m = q->reply.message;
    if (m->n > l->room || (m->n == 0 && m->cursor != UINT64_MAX))
        return server_bad_reply(q->to, "not the ids that were asked for");
    if (m->n)
        memcpy(l->ids, m->ids, m->n * sizeof *m->ids);
    l->n = m->n;
    l->cursor = m->cursor;
    return PERSIA_OK;
}

int client_ask_shard(ps_client *r, const char *what, uint32_t no,
                     uint32_t shard, fan *f)
{
    const table_config *t;
    int rc = persia_fork_check(what);
    if (!rc)
        rc = client_check_mixture(r, 0);
    if (!rc)
        rc = client_find_table(r, no, &t);
    if (!rc && shard >= r->servers_n)
        rc = persia_err_set(PERSIA_EARG, "there is no shard %u", shard);
    call *k = rc ? NULL : call_take(r);
    if (!k)
        return rc ? rc : PERSIA_ENOMEM;
    server *to = r->servers[shard];
    rc = fan_prepare(k, &to, 1);
    if (!rc)
        rc = fan_run(k, f, client_deadline(r));
    call_give(k);
    return rc;
}

int persia_client_list(ps_client *r, uint32_t no, uint32_t shard,
                       uint64_t *cursor, size_t room, uint64_t *ids, size_t *n)
{
    listing l = {.no = no, .room = room, .cursor = *cursor, .ids = ids};
    fan f = {.method = WIRE_GET_ROWS,
             .fill = rows_fill_list,
             .accept = rows_accept_list,
             .ctx = &l};
    int rc = client_ask_shard(r, "ids of a table", no, shard, &f);
    *n = l.n;
    *cursor = l.cursor;
    return rc;
}

/* ---- requests without rows, to all shards ---- */

static int rows_ask_all(ps_client *r, fan *f)
{
    int rc = persia_fork_check("a store");
    call *k = rc ? NULL : call_take(r);
    if (!k)
        return rc ? rc : PERSIA_ENOMEM;
    rc = fan_prepare(k, NULL, r->servers_n);
    if (!rc)
        rc = fan_run(k, f, client_deadline(r));
    call_give(k);
    return rc;
}

static void rows_fill_clear(void *ctx, request *q)
{
    const uint32_t *no = ctx;
    q->args.rows = (wire_rows){.caller = q->caller,
                               .no = server_table(q->to, *no), .clear = 1};
}

int persia_client_clear(ps_client *r, uint32_t no)
{
    const table_config *t;
    fan f = {.method = WIRE_PUT_ROWS,
             .fill = rows_fill_clear,
             .accept = rows_accept_any,
             .ctx = &no};
    int rc = client_check_mixture(r, 0);
    if (!rc)
        rc = client_find_table(r, no, &t);
    return rc ? rc : rows_ask_all(r, &f);
}

typedef struct adding {
    const char *name; /* of the table; NULL: none is asked for */
    table_stats sum;
    uint64_t used, limit;
    int unlimited;    /* a shard has no limit */
} adding;

static void rows_fill_stats(void *ctx, request *q)
{
    (void)ctx;
    q->args.stats = (wire_stats){.caller = q->caller};
}

static int rows_accept_stats(void *ctx, request *q)
{
    adding *a = ctx;
    const wire_stats_reply *m = q->reply.message;
    if (!m->beside) {
        a->used += m->memory_used;
        a->limit += m->memory_limit;
    }
    a->unlimited |= m->memory_limit == 0;
    for (size_t i = 0; a->name && i < m->tables_n; i++)
        if (strcmp(m->tables[i].name, a->name) == 0)
            persia_spec_add(&persia_table_stats_list, &a->sum, &m->stats[i]);
    return PERSIA_OK;
}

static int rows_ask_stats(ps_client *r, adding *a)
{
    fan f = {.method = WIRE_STATS,
             .fill = rows_fill_stats,
             .accept = rows_accept_stats,
             .ctx = a};
    return rows_ask_all(r, &f);
}

int persia_client_stats(ps_client *r, uint32_t no, table_stats *out)
{
    const table_config *t;
    adding a = {0};
    int rc = client_find_table(r, no, &t);
    if (!rc) {
        a.name = t->name;
        rc = rows_ask_stats(r, &a);
    }
    if (!rc)
        *out = a.sum;
    return rc;
}

int persia_client_memory(ps_client *r, uint64_t *used, uint64_t *limit)
{
    adding a = {0};
    int rc = rows_ask_stats(r, &a);
    *used = a.used;
    *limit = a.unlimited ? 0 : a.limit;
    return rc;
}
