/* pull.c: rows of a batch from all shards. */
#include "client/private.h"

#include "simd/simd.h"

#include <string.h>

/* Bytes of values in one reply, about.  A large pull is cut into pieces: while
 * one is on its way the server reads the next and the one before is put in
 * its place here. */
enum { PIECE_BYTES = 2 << 20 };

/* What one request asks of one table: its ids of neighbouring cells. */
typedef struct wanted {
    uint32_t unit;
    uint32_t from, to; /* cells */
    size_t chunk_at;   /* chunks of the wanted before, in this piece */
    wire_values got;
} wanted;

/* What one request asks: wanted [from, to) of one shard. */
typedef struct piece {
    size_t from, to;
    uint64_t bytes; /* of the values */
} piece;

/* One pull: its units are the tables that it reads. */
typedef struct pulling {
    ps_client *r;
    call *k;
    uint64_t after; /* waits for this update; 0: for none */
    const wire_trace *trace; /* or NULL */
    pull_job *jobs;
    const size_t *job_of;    /* [segments] */
    uint32_t units, shards;
    const uint32_t *table;   /* [units] its number here */
    const uint32_t *dim;     /* [units] */
    piece *pieces;           /* [pieces_n] a request each */
    size_t pieces_n;
    server **to;             /* [pieces_n] */
    wanted *wanted;          /* [wanted_n] */
    wire_pull_table *asked;  /* [wanted_n] */
    size_t wanted_n;
    float *wide;             /* vectors that are not fp32, packed */
    size_t *wide_at;         /* [units] floats */
    uint32_t want_rows;
} pulling;

/* ---- pieces ---- */

static uint64_t pull_row_bytes(const pulling *p, uint32_t unit)
{
    return p->dim[unit] * wire_dtype_bytes(p->r->dtype) +
           2 * sizeof(uint32_t);
}

/* Bytes of the values that a shard is asked for. */
static uint64_t shard_bytes(const pulling *p, uint32_t shard)
{
    const batch_index *x = p->k->index;
    uint64_t bytes = 0;
    for (uint32_t u = 0; u < p->units; u++)
        bytes += (index_to(x, u, shard) - index_from(x, u, shard)) *
                 pull_row_bytes(p, u);
    return bytes;
}

/* Adds the ids of a cell to the last piece. */
static void pull_ask_cell(pulling *p, uint32_t unit, uint32_t cell)
{
    const batch_index *x = p->k->index;
    piece *last = &p->pieces[p->pieces_n - 1];
    size_t first = x->base[(size_t)unit * x->cells + cell];
    size_t n = x->base[(size_t)unit * x->cells + cell + 1] - first;
    if (last->from == last->to || p->wanted[last->to - 1].unit != unit) {
        p->asked[last->to] = (wire_pull_table){.ids = x->ids + first};
        p->wanted[last->to] = (wanted){.unit = unit, .from = cell};
        p->wanted_n = ++last->to;
    }
    p->asked[last->to - 1].n += n;
    p->wanted[last->to - 1].to = cell + 1;
    last->bytes += n * pull_row_bytes(p, unit);
}

/* Cuts what a shard is asked for into pieces of about one size. */
static int pull_ask_shard(pulling *p, uint32_t shard)
{
    const batch_index *x = p->k->index;
    const uint64_t bytes = shard_bytes(p, shard);
    const uint64_t pieces = (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    uint64_t done = 0, cuts = 0;
    for (uint32_t u = 0; u < p->units; u++)
        for (uint32_t c = shard * x->subs; c < (shard + 1) * x->subs; c++) {
            const size_t *base = x->base + (size_t)u * x->cells + c;
            if (base[1] == base[0])
                continue;
            if (done * pieces >= cuts * bytes) {
                p->to[p->pieces_n] = p->r->servers[shard];
                p->pieces[p->pieces_n++] = (piece){p->wanted_n, p->wanted_n,
                                                   0};
                cuts++;
            }
            pull_ask_cell(p, u, c);
            done += (base[1] - base[0]) * pull_row_bytes(p, u);
            int rc = persia_wire_check_size(
                p->r->servers[shard]->address, "an answer",
                p->pieces[p->pieces_n - 1].bytes, p->r->message_limit);
            if (rc)
                return rc;
        }
    return PERSIA_OK;
}

/* What is asked of whom. */
static int pull_ask_shards(pulling *p)
{
    size_t pieces = 0;
    for (uint32_t s = 0; s < p->shards; s++)
        pieces += shard_bytes(p, s) / PIECE_BYTES + 1;
    size_t most = pieces + (size_t)p->shards * p->units;
    int rc = persia_mem_buffer_need(
        &p->k->messages,
        pieces * (sizeof(piece) + sizeof(server *)) +
            most * (sizeof(wanted) + sizeof(wire_pull_table)) +
            (size_t)64 * 4);
    if (rc)
        return rc;
    char *at = p->k->messages.data;
    p->pieces = mem_carve(&at, pieces * sizeof *p->pieces);
    p->to = mem_carve(&at, pieces * sizeof *p->to);
    p->wanted = mem_carve(&at, most * sizeof *p->wanted);
    p->asked = mem_carve(&at, most * sizeof *p->asked);
    for (uint32_t s = 0; s < p->shards && !rc; s++)
        rc = pull_ask_shard(p, s);
    return rc;
}

/* ---- messages ---- */

/* Whether the update is in flight: it may have failed meanwhile. */
static int pull_waits(const pulling *p)
{
    ps_client *r = p->r;
    if (!p->after)
        return 0;
    pthread_mutex_lock(&r->lock);
    int through = window_has(&r->settled.w, p->after);
    pthread_mutex_unlock(&r->lock);
    return !through;
}

static void fill_pull(void *ctx, request *q)
{
    const pulling *p = ctx;
    const piece *one = &p->pieces[q->index];
    pthread_mutex_lock(&q->to->lock);
    for (size_t i = one->from; i < one->to; i++)
        p->asked[i].no = q->to->numbers[p->table[p->wanted[i].unit]];
    pthread_mutex_unlock(&q->to->lock);
    wire_pull *m = &q->args.pull.m;
    *m = (wire_pull){.caller = q->caller, .dtype = p->r->dtype,
                     .want_rows = p->want_rows, .tables = p->asked + one->from,
                     .tables_n = one->to - one->from};
    if (pull_waits(p)) {
        m->stream = atomic_load(&p->r->stream);
        m->after = p->after;
    }
    if (p->trace)
        m->trace = *p->trace;
    q->args.pull.args = (shard_pull){.m = m};
    q->expects = one->bytes;
}

static int put_piece(pulling *p, const piece *one);

static int accept_pull(void *ctx, request *q)
{
    pulling *p = ctx;
    const piece *one = &p->pieces[q->index];
    const wire_pull_reply *m = q->reply.message;
    if (m->tables_n != one->to - one->from || m->dtype != p->r->dtype)
        return server_bad_reply(q->to, "not the tables that were asked for");
    for (size_t i = 0; i < m->tables_n; i++) {
        const wire_values *v = &m->tables[i];
        wanted *w = &p->wanted[one->from + i];
        if (v->n != p->asked[one->from + i].n ||
            v->dim != p->dim[w->unit] || (p->want_rows && !v->rows))
            return server_bad_reply(q->to, "not the rows that were asked "
                                    "for");
        w->got = *v;
    }
    int rc = put_piece(p, one);
    persia_shard_release(&q->reply); /* its memory is the next piece's */
    return rc;
}

/* ---- answers to their places ---- */

typedef struct putting {
    pulling *p;
    const piece *piece;
} putting;

static int pull_widen_values(void *ctx, size_t i)
{
    const putting *c = ctx;
    pulling *p = c->p;
    wanted *w = &p->wanted[c->piece->from + i];
    wire_values *v = &w->got;
    const size_t *base = p->k->index->base +
                         (size_t)w->unit * p->k->index->cells;
    float *to = p->wide + p->wide_at[w->unit] +
                (base[w->from] - base[0]) * v->dim;
    persia_wire_widen(p->r->dtype, v->n, v->dim, v->values, v->scales, to,
                      v->dim);
    v->values = to;
    return PERSIA_OK;
}

INLINE_HOT void pull_row_fetch(const float *from, const float *to,
                               uint32_t dim)
{
    for (uint32_t j = 0; j < dim; j += 16) {
        __builtin_prefetch(from + j);
        __builtin_prefetch(to + j, 1);
    }
}

/* Vectors of one cell of a chunk to the rows of the job. */
INLINE_HOT void pull_scatter(const float *restrict from, const uint32_t *place,
                             const uint16_t *order, uint32_t n,
                             float *restrict out, size_t stride, uint32_t dim)
{
    const uint32_t ahead = rows_ahead(dim);

    for (uint32_t i = 0; i < n && i < ahead; i++)
        pull_row_fetch(from + (size_t)(place[i] & ~INDEX_FIRST) * dim,
                       out + order[i] * stride, dim);
    for (uint32_t i = 0; i < n; i++) {
        if (i + ahead < n)
            pull_row_fetch(from +
                               (size_t)(place[i + ahead] & ~INDEX_FIRST) * dim,
                           out + order[i + ahead] * stride, dim);
        memcpy(out + order[i] * stride,
               from + (size_t)(place[i] & ~INDEX_FIRST) * dim,
               dim * sizeof *out);
    }
}

#define SCATTER(name, width)                                                  \
    HOT static void name(const float *from, const uint32_t *place,            \
                         const uint16_t *order, uint32_t n, float *out,       \
                         size_t stride, uint32_t dim)                         \
    {                                                                         \
        (void)dim;                                                            \
        pull_scatter(from, place, order, n, out, stride, width);              \
    }
SCATTER(scatter_16, 16)
SCATTER(scatter_64, 64)
SCATTER(scatter_any, dim)

static void pull_scatter_rows(const uint32_t *from, const uint32_t *place,
                              const uint16_t *order, uint32_t n,
                              uint32_t *rows)
{
    for (uint32_t i = 0; i < n; i++)
        rows[order[i]] = from[place[i] & ~INDEX_FIRST];
}

static int pull_scatter_chunk(void *ctx, size_t index)
{
    const putting *t = ctx;
    const pulling *p = t->p;
    const batch_index *x = p->k->index;
    size_t low = t->piece->from, high = t->piece->to;
    while (high - low > 1) { /* the table of this chunk */
        size_t mid = (low + high) / 2;
        if (p->wanted[mid].chunk_at <= index)
            low = mid;
        else
            high = mid;
    }
    const wanted *w = &p->wanted[low];
    const index_chunk *c =
        &x->chunks[x->first_chunk[w->unit] + index - w->chunk_at];
    const pull_job *job = &p->jobs[p->job_of[c->segment]];
    const uint32_t dim = p->dim[c->unit];
    const size_t *base = x->base + (size_t)c->unit * x->cells;
    float *out = job->out + c->first * job->stride;

    for (uint32_t cell = w->from; cell < w->to; cell++) {
        uint32_t from = c->start[cell], n = c->start[cell + 1] - from;
        if (n == 0)
            continue;
        size_t first = base[cell] - base[w->from];
        (dim == 16   ? scatter_16
         : dim == 64 ? scatter_64
                     : scatter_any)((const float *)w->got.values +
                                        first * dim,
                                    c->place + from, c->order + from, n, out,
                                    job->stride, dim);
        if (job->rows)
            pull_scatter_rows(w->got.rows + first, c->place + from,
                              c->order + from, n, job->rows + c->first);
    }
    return PERSIA_OK;
}

static int put_piece(pulling *p, const piece *one)
{
    const batch_index *x = p->k->index;
    putting t = {p, one};
    size_t chunks = 0;
    for (size_t i = one->from; i < one->to; i++) {
        wanted *w = &p->wanted[i];
        w->chunk_at = chunks;
        chunks += x->first_chunk[w->unit + 1] - x->first_chunk[w->unit];
    }
    for (size_t i = one->from; x->hints && i < one->to; i++) {
        const wanted *w = &p->wanted[i];
        memcpy(x->hints + x->base[(size_t)w->unit * x->cells + w->from],
               w->got.rows, w->got.n * sizeof *x->hints);
    }
    int rc = PERSIA_OK;
    if (p->r->dtype != WIRE_FP32)
        rc = persia_sched_for_rows(p->r->s, one->to - one->from, x->ids_n,
                                   pull_widen_values, &t);
    return rc ? rc
              : persia_sched_for_rows(p->r->s, chunks, x->ids_n,
                                      pull_scatter_chunk, &t);
}

/* Room for vectors that are narrower than fp32. */
static int pull_make_wide(pulling *p)
{
    const batch_index *x = p->k->index;
    size_t floats = 0;
    if (p->r->dtype == WIRE_FP32)
        return PERSIA_OK;
    for (uint32_t u = 0; u < p->units; u++) {
        p->wide_at[u] = floats;
        floats += (index_to(x, u, p->shards - 1) - index_from(x, u, 0)) *
                  p->dim[u];
    }
    int rc = persia_mem_buffer_need(&p->k->rows, floats * sizeof(float));
    p->wide = p->k->rows.data;
    return rc;
}

/* ---- the call ---- */

/* Tables in the order of their numbers (as in updates) and jobs as units and
 * segments; a table may have many jobs. */
static int pull_make_units(pulling *p, const uint32_t *tables, size_t jobs_n,
                           index_batch *out)
{
    ps_client *r = p->r;
    uint32_t known = r->tables_n;
    size_t units = jobs_n < known ? jobs_n : known;
    int rc = persia_mem_buffer_need(
        &p->k->lists, jobs_n * (sizeof(index_segment) + sizeof(size_t)) +
                          known * sizeof(uint32_t) +
                          units * (sizeof(size_t) + 2 * sizeof(uint32_t)) +
                          (size_t)64 * 8);
    if (rc)
        return rc;
    char *at = p->k->lists.data;
    index_segment *segments = mem_carve(&at, jobs_n * sizeof *segments);
    size_t *job_of = mem_carve(&at, jobs_n * sizeof(size_t));
    uint32_t *unit_of = mem_carve(&at, known * sizeof(uint32_t));
    uint32_t *table = mem_carve(&at, units * sizeof(uint32_t));
    uint32_t *dim = mem_carve(&at, units * sizeof(uint32_t));
    size_t *next = mem_carve(&at, (units + 1) * sizeof(size_t));
    p->wide_at = next; /* not used any more then */
    p->job_of = job_of;
    p->table = table;
    p->dim = dim;
    memset(unit_of, 0, known * sizeof *unit_of);
    memset(next, 0, (units + 1) * sizeof *next);
    for (size_t i = 0; i < jobs_n; i++) {
        if (tables[i] >= known)
            return persia_err_set(
                PERSIA_EARG, "the store has no table number %u", tables[i]);
        unit_of[tables[i]] = 1; /* it is one */
        p->want_rows |= p->jobs[i].rows != NULL;
    }
    for (uint32_t t = 0; t < known; t++) {
        if (!unit_of[t])
            continue;
        table[p->units] = t;
        dim[p->units] = r->tables[t]->dim;
        unit_of[t] = p->units++;
    }
    for (size_t i = 0; i < jobs_n; i++) /* of units 0 .. before */
        next[unit_of[tables[i]] + 1] += p->jobs[i].n > 0;
    for (uint32_t u = 0; u < p->units; u++)
        next[u + 1] += next[u];
    *out = (index_batch){segments, next[p->units], table, p->units};
    for (size_t i = 0; i < jobs_n; i++) {
        uint32_t unit = unit_of[tables[i]];
        if (p->jobs[i].n == 0)
            continue;
        segments[next[unit]] = (index_segment){unit, (uint32_t)i,
                                               p->jobs[i].n,
                                               p->jobs[i].ids};
        job_of[next[unit]++] = i;
    }
    return PERSIA_OK;
}

static int pull_pull(pulling *p, const uint32_t *tables, size_t jobs_n,
                     uint64_t deadline, batch_index **index)
{
    ps_client *r = p->r;
    call *k = p->k;
    index_batch batch;
    int rc = pull_make_units(p, tables, jobs_n, &batch);
    if (rc || batch.segments_n == 0)
        return rc;
    k->index = persia_index_pool_new(&r->indexes);
    if (!k->index)
        return PERSIA_ENOMEM;
    rc = persia_batch_index_make(k->index, r->s, p->shards, &batch);
    if (!rc && index)
        rc = persia_batch_index_hint(k->index);
    p->want_rows |= index != NULL;
    if (!rc)
        rc = pull_ask_shards(p);
    if (!rc)
        rc = pull_make_wide(p);
    if (!rc)
        rc = fan_prepare(k, p->to, p->pieces_n);
    fan f = {.method = WIRE_PULL, .fill = fill_pull,
             .accept = accept_pull, .ctx = p};
    if (!rc)
        rc = fan_run(k, &f, deadline);
    if (rc)
        return rc;
    r->counts.ids += k->index->ids_n;
    r->counts.distinct += index_distinct(k->index);
    if (index)
        *index = persia_batch_index_get(k->index);
    return PERSIA_OK;
}

/* ---- embedded ---- */

/* The shard is given the jobs as they are: to find the distinct ids would
 * cost more than to read some rows twice. */
static void pull_fill_jobs(void *ctx, request *q)
{
    const pulling *p = ctx;
    wire_pull *m = &q->args.pull.m;
    *m = (wire_pull){.caller = q->caller, .dtype = WIRE_FP32,
                     .tables = p->asked, .tables_n = p->wanted_n};
    q->args.pull.args = (shard_pull){.m = m, .jobs = p->jobs};
}

static int pull_accept_jobs(void *ctx, request *q)
{
    (void)ctx;
    (void)q;
    return PERSIA_OK;
}

static int pull_jobs(pulling *p, const uint32_t *tables, size_t jobs_n,
                     uint64_t deadline)
{
    const table_config *config;
    fan f = {.method = WIRE_PULL,
             .fill = pull_fill_jobs,
             .accept = pull_accept_jobs,
             .ctx = p};
    int rc = persia_mem_buffer_need(&p->k->messages,
                                    jobs_n * sizeof *p->asked);
    p->asked = p->k->messages.data;
    p->wanted_n = jobs_n;
    for (size_t i = 0; i < jobs_n && !rc; i++) {
        p->asked[i] = (wire_pull_table){.no = tables[i]}; /* there, too */
        rc = client_find_table(p->r, tables[i], &config);
    }
    if (!rc)
        rc = fan_prepare(p->k, NULL, 1);
    return rc ? rc : fan_run(p->k, &f, deadline);
}

int persia_client_pull_indexed(ps_client *r, uint64_t after,
                               const wire_trace *trace, const uint32_t *tables,
                               pull_job *jobs, size_t jobs_n,
                               batch_index **index)
{
    if (index)
        *index = NULL;
    int rc = persia_fork_check("a lookup");
    if (!rc)
        rc = client_check_mixture(r, 0);
    if (rc)
        return rc;
    call *k = call_take(r);
    if (!k)
        return PERSIA_ENOMEM;
    pulling p = {.r = r, .k = k, .after = after, .trace = trace, .jobs = jobs,
                 .shards = r->servers_n};
    r->counts.pulls++;
    uint64_t deadline = client_deadline(r);
    if (after)
        deadline = persia_deadline_later(deadline, r->timeout_ns);
    rc = r->embedded ? pull_jobs(&p, tables, jobs_n, deadline)
                     : pull_pull(&p, tables, jobs_n, deadline, index);
    call_give(k);
    return rc ? rc : persia_client_tell_lost(r);
}
