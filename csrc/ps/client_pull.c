/* client_pull.c: rows of a batch from all shards. */
#include "ps/client_remote.h"

#include <string.h>

/* One pull: its units are the tables that it reads. */
typedef struct pulling {
    remote *r;
    call *k;
    pull_job *jobs;
    const size_t *job_of;    /* [segments] */
    uint32_t units, shards;
    const uint32_t *table;   /* [units] its number here */
    const uint32_t *dim;     /* [units] */
    /* What each shard is asked for: units with ids there. */
    wire_pull_table *asked;  /* [shards * units] */
    uint32_t *asked_unit;    /* [shards * units] */
    uint32_t *asked_n;       /* [shards] */
    wire_values *got;        /* [units * shards] */
    float *wide;             /* vectors that did not come as fp32, packed */
    size_t *wide_at;         /* [units] floats */
    uint32_t want_rows;
} pulling;

static void *carve(char **at, size_t bytes)
{
    void *p = *at;
    *at += (bytes + 63) / 64 * 64;
    return p;
}

/* ---- messages ---- */

static int encode_pull(void *ctx, const request *q, wire_out *o)
{
    const pulling *p = ctx;
    size_t shard = q->to->shard;
    wire_pull_table *tables = p->asked + shard * p->units;
    uint32_t n = p->asked_n[shard];
    pthread_mutex_lock(&q->to->lock);
    for (uint32_t i = 0; i < n; i++)
        tables[i].no =
            q->to->numbers[p->table[p->asked_unit[shard * p->units + i]]];
    pthread_mutex_unlock(&q->to->lock);
    wire_pull m = {.caller = q->caller, .dtype = p->r->dtype,
                   .want_rows = p->want_rows, .tables = tables,
                   .tables_n = n};
    return wire_put_pull(o, &m);
}

static int accept_pull(void *ctx, request *q)
{
    pulling *p = ctx;
    size_t shard = q->to->shard;
    wire_pull_reply m;
    int rc = wire_get_pull_reply(q->reply.data, q->reply.n, &p->k->memory,
                                 &m);
    if (rc)
        return remote_bad_reply(q->to, err_text());
    if (m.tables_n != p->asked_n[shard] || m.dtype != p->r->dtype)
        return remote_bad_reply(q->to, "not the tables that were asked for");
    for (uint32_t i = 0; i < m.tables_n; i++) {
        uint32_t unit = p->asked_unit[shard * p->units + i];
        const wire_values *v = &m.tables[i];
        if (v->n != p->asked[shard * p->units + i].n ||
            v->dim != p->dim[unit] || (p->want_rows && !v->rows))
            return remote_bad_reply(q->to, "not the rows that were asked "
                                    "for");
        p->got[unit * p->shards + shard] = *v;
    }
    return PERSIA_OK;
}

/* Lists what each shard is asked for, and the shards that are asked. */
static int ask_shards(pulling *p, server **to, size_t *to_n)
{
    const group *g = &p->k->group;
    size_t item = wire_dtype_bytes(p->r->dtype);
    *to_n = 0;
    for (uint32_t s = 0; s < p->shards; s++) {
        uint32_t n = 0;
        uint64_t bytes = 0;
        for (uint32_t u = 0; u < p->units; u++) {
            size_t from = group_from(g, u, s), rows = group_to(g, u, s) - from;
            if (rows == 0)
                continue;
            size_t at = (size_t)s * p->units + n++;
            p->asked_unit[at] = u;
            p->asked[at] = (wire_pull_table){.n = rows,
                                             .ids = g->ids + from};
            bytes += rows * (p->dim[u] * item + 2 * sizeof(uint32_t));
        }
        p->asked_n[s] = n;
        if (n)
            to[(*to_n)++] = p->r->servers[s];
        if (p->r->message_limit && bytes > p->r->message_limit)
            return err_set(PERSIA_ELIMIT,
                           "the reply of %s would have %llu bytes, the limit "
                           "is %llu; make the batch smaller or the limit "
                           "larger", p->r->servers[s]->address,
                           (unsigned long long)bytes,
                           (unsigned long long)p->r->message_limit);
    }
    return PERSIA_OK;
}

/* ---- answers to their places ---- */

static int widen_values(void *ctx, size_t i)
{
    pulling *p = ctx;
    wire_values *v = &p->got[i];
    uint32_t unit = (uint32_t)(i / p->shards);
    uint32_t shard = (uint32_t)(i % p->shards);
    const group *g = &p->k->group;
    if (v->n == 0)
        return PERSIA_OK;
    size_t first = group_from(g, unit, shard) - group_from(g, unit, 0);
    float *to = p->wide + p->wide_at[unit] + first * v->dim;
    wire_widen(p->r->dtype, v->n, v->dim, v->values, v->scales, to, v->dim);
    v->values = to;
    return PERSIA_OK;
}

/* Vectors of one cell of a chunk to the rows of the job. */
INLINE_HOT void scatter(const float *restrict from, const uint32_t *place,
                        const uint16_t *order, uint32_t n,
                        float *restrict out, size_t stride, uint32_t dim)
{
    enum { AHEAD = 8 };

    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) {
            const float *next =
                from + (size_t)(place[i + AHEAD] & ~GROUP_FIRST) * dim;
            for (uint32_t j = 0; j < dim; j += 16)
                __builtin_prefetch(next + j);
        }
        memcpy(out + order[i] * stride,
               from + (size_t)(place[i] & ~GROUP_FIRST) * dim,
               dim * sizeof *out);
    }
}

#define SCATTER(name, width)                                                  \
    HOT static void name(const float *from, const uint32_t *place,            \
                         const uint16_t *order, uint32_t n, float *out,       \
                         size_t stride, uint32_t dim)                         \
    {                                                                         \
        (void)dim;                                                            \
        scatter(from, place, order, n, out, stride, width);                   \
    }
SCATTER(scatter_16, 16)
SCATTER(scatter_64, 64)
SCATTER(scatter_any, dim)

static void scatter_rows(const uint32_t *from, const uint32_t *place,
                         const uint16_t *order, uint32_t n, uint32_t *rows)
{
    for (uint32_t i = 0; i < n; i++)
        rows[order[i]] = from[place[i] & ~GROUP_FIRST];
}

static int scatter_chunk(void *ctx, size_t index)
{
    const pulling *p = ctx;
    const group *g = &p->k->group;
    const group_chunk *c = &g->chunks[index];
    const pull_job *job = &p->jobs[p->job_of[c->segment]];
    const uint32_t dim = p->dim[c->unit];
    const size_t *base = g->base + (size_t)c->unit * g->cells;
    float *out = job->out + c->first * job->stride;

    for (uint32_t cell = 0; cell < g->cells; cell++) {
        uint32_t from = c->start[cell], n = c->start[cell + 1] - from;
        uint32_t shard = cell / g->subs;
        if (n == 0)
            continue;
        const wire_values *v = &p->got[c->unit * p->shards + shard];
        size_t first = base[cell] - base[shard * g->subs];
        (dim == 16   ? scatter_16
         : dim == 64 ? scatter_64
                     : scatter_any)((const float *)v->values + first * dim,
                                    c->place + from, c->order + from, n, out,
                                    job->stride, dim);
        if (job->rows)
            scatter_rows(v->rows + first, c->place + from, c->order + from, n,
                         job->rows + c->first);
    }
    return PERSIA_OK;
}

static int put_answers(pulling *p)
{
    const group *g = &p->k->group;
    if (p->r->dtype != WIRE_FP32) {
        size_t floats = 0;
        for (uint32_t u = 0; u < p->units; u++) {
            p->wide_at[u] = floats;
            floats += (group_to(g, u, p->shards - 1) - group_from(g, u, 0)) *
                      p->dim[u];
        }
        int rc = mem_buffer_need(&p->k->rows, floats * sizeof(float));
        p->wide = p->k->rows.data;
        if (!rc)
            rc = sched_for(p->r->s, (size_t)p->units * p->shards,
                           widen_values, p);
        if (rc)
            return rc;
    }
    return sched_for(p->r->s, g->chunks_n, scatter_chunk, p);
}

/* ---- the call ---- */

/* Tables in the order of their numbers (as in updates) and jobs as units and
 * segments; a table may have many jobs. */
static int make_units(pulling *p, const uint32_t *tables, size_t jobs_n,
                      group_batch *out)
{
    remote *r = p->r;
    uint32_t known = r->tables_n;
    size_t units = jobs_n < known ? jobs_n : known;
    int rc = mem_buffer_need(
        &p->k->lists,
        jobs_n * (sizeof(group_segment) + sizeof(size_t)) +
            known * sizeof(uint32_t) + units * 3 * sizeof(size_t) +
            p->shards * (units * (sizeof(wire_pull_table) +
                                  sizeof(uint32_t) + sizeof(wire_values)) +
                         sizeof(uint32_t) + sizeof(server *)) +
            (size_t)64 * 12);
    if (rc)
        return rc;
    char *at = p->k->lists.data;
    group_segment *segments = carve(&at, jobs_n * sizeof *segments);
    size_t *job_of = carve(&at, jobs_n * sizeof(size_t));
    uint32_t *unit_of = carve(&at, known * sizeof(uint32_t));
    uint32_t *table = carve(&at, units * sizeof(uint32_t));
    uint32_t *dim = carve(&at, units * sizeof(uint32_t));
    size_t *next = carve(&at, (units + 1) * sizeof(size_t));
    p->asked = carve(&at, p->shards * units * sizeof *p->asked);
    p->asked_unit = carve(&at, p->shards * units * sizeof(uint32_t));
    p->asked_n = carve(&at, p->shards * sizeof(uint32_t));
    p->got = carve(&at, p->shards * units * sizeof *p->got);
    p->wide_at = next; /* not used any more then */
    p->job_of = job_of;
    p->table = table;
    p->dim = dim;
    memset(unit_of, 0, known * sizeof *unit_of);
    memset(next, 0, (units + 1) * sizeof *next);
    for (size_t i = 0; i < jobs_n; i++) {
        if (tables[i] >= known)
            return err_set(PERSIA_EARG, "the store has no table number %u",
                           tables[i]);
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
    *out = (group_batch){segments, next[p->units], table, p->units};
    for (size_t i = 0; i < jobs_n; i++) {
        uint32_t unit = unit_of[tables[i]];
        if (p->jobs[i].n == 0)
            continue;
        segments[next[unit]] = (group_segment){unit, p->jobs[i].n,
                                               p->jobs[i].ids};
        job_of[next[unit]++] = i;
    }
    memset(p->got, 0, p->units * p->shards * sizeof *p->got);
    return PERSIA_OK;
}

static int pull(pulling *p, const uint32_t *tables, size_t jobs_n,
                uint64_t deadline)
{
    remote *r = p->r;
    call *k = p->k;
    group_batch batch;
    size_t to_n = 0;
    int rc = make_units(p, tables, jobs_n, &batch);
    if (rc || batch.segments_n == 0)
        return rc;
    rc = group_make(&k->group, r->s, p->shards, &batch);
    if (!rc)
        rc = mem_buffer_need(&k->messages, p->shards * sizeof(server *));
    if (rc)
        return rc;
    rc = ask_shards(p, k->messages.data, &to_n);
    if (!rc)
        rc = fan_prepare(k, k->messages.data, to_n);
    fan f = {.method = WIRE_PULL, .encode = encode_pull,
             .accept = accept_pull, .ctx = p};
    if (!rc)
        rc = fan_run(k, &f, deadline);
    if (rc)
        return rc;
    r->counts.ids += k->group.ids_n;
    r->counts.distinct += group_distinct(&k->group);
    rc = put_answers(p);
    if (!rc && p->want_rows) /* for the update */
        keep_group(r, &k->group, &batch);
    return rc;
}

int remote_pull(remote *r, const uint32_t *tables, pull_job *jobs,
                size_t jobs_n)
{
    int rc = fork_check("a lookup");
    if (rc)
        return rc;
    call *k = call_take(r);
    if (!k)
        return PERSIA_ENOMEM;
    pulling p = {.r = r, .k = k, .jobs = jobs, .shards = r->servers_n};
    r->counts.pulls++;
    rc = pull(&p, tables, jobs_n, remote_deadline(r));
    call_give(k);
    return rc ? rc : remote_tell_lost(r);
}
