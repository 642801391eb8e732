/* push.c: an update, summed per id here, to all shards. */
#include "client/remote.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* One push: its units are its jobs. */
typedef struct pushing {
    remote *r;
    call *k;
    client_update update;
    const uint32_t *table;       /* [units] */
    push_job *jobs;              /* [units] */
    uint32_t units, shards;
    const push_part **part_of;   /* [segments] */
    size_t *sum_at;              /* [units] floats before the unit's sums */
    float *sums;                 /* [distinct] rows of the unit's dim */
    uint32_t *rows;              /* [distinct] hints; NULL: none came */
    uint16_t *narrow;            /* as sums, if they do not leave as fp32 */
    float *scales;               /* [distinct], fp16 */
    wire_push_table *tables;     /* [shards * units] */
    int empty;                   /* sent without its tables */
    uint64_t deadline;
    uint32_t moves;              /* of the client, when it was named */
} pushing;

static const table_config *config_of(const pushing *p, uint32_t unit)
{
    return p->r->tables[p->table[unit]];
}

/* ---- sums ---- */

INLINE_HOT void grad_fetch(const push_part *part, size_t i, uint32_t dim)
{
    const float *grad =
        part->grad + (part->bag ? part->bag[i] : i) * part->stride;
    for (uint32_t j = 0; j < dim; j += 16)
        __builtin_prefetch(grad + j);
}

/* The ids [from, to) of one chunk in its order, all of one cell, to the sums
 * of the cell.  Returns the first whose bag does not exist, or `to`. */
INLINE_HOT uint32_t sum_run(const push_part *part, const group_chunk *c,
                            uint32_t from, uint32_t to, float *sums,
                            uint32_t dim)
{
    const uint32_t ahead = rows_ahead(dim);

    for (uint32_t k = from; k < to && k < from + ahead; k++)
        grad_fetch(part, c->first + c->order[k], dim);
    for (uint32_t k = from; k < to; k++) {
        size_t i = c->first + c->order[k], row = part->bag ? part->bag[i] : i;
        uint32_t place = c->place[k] & ~GROUP_FIRST;
        if (k + ahead < to)
            grad_fetch(part, c->first + c->order[k + ahead], dim);
        if (row >= part->bags)
            return k;
        floats_add(sums + (size_t)place * dim,
                   part->grad + row * part->stride,
                   part->scale ? part->scale[i] : 1,
                   (c->place[k] & GROUP_FIRST) != 0, dim);
    }
    return to;
}

#define SUM_RUN(name, width)                                                  \
    HOT static uint32_t name(const push_part *part, const group_chunk *c,     \
                             uint32_t from, uint32_t to, float *sums,         \
                             uint32_t dim)                                    \
    {                                                                         \
        (void)dim;                                                            \
        return sum_run(part, c, from, to, sums, width);                       \
    }
SUM_RUN(sum_run_16, 16)
SUM_RUN(sum_run_64, 64)
SUM_RUN(sum_run_any, dim)

/* A sum of the cell is NaN or Inf: whose? */
static int refuse_nonfinite(const pushing *p, uint32_t unit, uint32_t cell,
                            size_t first, size_t n, const float *sums)
{
    const group *g = &p->k->group;
    const table_config *t = config_of(p, unit);
    for (size_t i = g->first_chunk[unit]; i < g->first_chunk[unit + 1]; i++) {
        const group_chunk *c = &g->chunks[i];
        const push_part *part = p->part_of[c->segment];
        for (uint32_t k = c->start[cell]; k < c->start[cell + 1]; k++) {
            size_t id = c->first + c->order[k];
            size_t row = part->bag ? part->bag[id] : id;
            if (!floats_finite(part->grad + row * part->stride, t->dim) ||
                (part->scale && !isfinite(part->scale[id])))
                return err_set(
                    PERSIA_ENONFINITE,
                    "table %s: the gradient of id %llu (row %zu of the "
                    "gradients) is NaN or Inf; nothing was applied. Find its "
                    "source, or let such rows be skipped and counted: "
                    "nonfinite=\"skip\"",
                    t->name, (unsigned long long)part->ids[id], row);
        }
    }
    for (size_t i = 0; i < n; i++)
        if (!floats_finite(sums + i * t->dim, t->dim))
            return err_set(PERSIA_ENONFINITE,
                           "table %s: the gradients of id %llu have the sum "
                           "Inf; nothing was applied. Lower the scale of the "
                           "loss, or let such rows be skipped and counted: "
                           "nonfinite=\"skip\"",
                           t->name, (unsigned long long)g->ids[first + i]);
    return PERSIA_OK;
}

/* Sums and hints of one (unit, cell). */
static int sum_cell(void *ctx, size_t index)
{
    pushing *p = ctx;
    const group *g = &p->k->group;
    uint32_t unit = (uint32_t)(index / g->cells);
    uint32_t cell = (uint32_t)(index % g->cells);
    const table_config *t = config_of(p, unit);
    size_t first = g->base[index], n = g->base[index + 1] - first;
    size_t at = p->sum_at[unit] +
                (first - g->base[(size_t)unit * g->cells]) * t->dim;
    float *sums = p->sums + at;

    for (size_t i = g->first_chunk[unit];
         n && i < g->first_chunk[unit + 1]; i++) {
        const group_chunk *c = &g->chunks[i];
        const push_part *part = p->part_of[c->segment];
        uint32_t from = c->start[cell], to = c->start[cell + 1];
        uint32_t end = (t->dim == 16   ? sum_run_16
                        : t->dim == 64 ? sum_run_64
                                       : sum_run_any)(part, c, from, to, sums,
                                                      t->dim);
        if (end < to)
            return err_set(PERSIA_EARG, "table %s: an id has the gradient of "
                           "row %u of %zu", t->name,
                           part->bag ? part->bag[c->first + c->order[end]]
                                     : 0, part->bags);
        for (uint32_t k = from; k < to && p->rows; k++)
            if (c->place[k] & GROUP_FIRST)
                p->rows[first + (c->place[k] & ~GROUP_FIRST)] =
                    part->rows ? part->rows[c->first + c->order[k]]
                               : ROW_NONE;
    }
    if (t->nonfinite == NONFINITE_RAISE && !floats_finite(sums, n * t->dim))
        return refuse_nonfinite(p, unit, cell, first, n, sums);
    if (p->r->dtype != WIRE_FP32)
        wire_narrow(p->r->dtype, n, t->dim, sums, t->dim, p->narrow + at,
                    p->scales ? p->scales + first : NULL);
    return PERSIA_OK;
}

static int make_sums(pushing *p)
{
    const group *g = &p->k->group;
    call *k = p->k;
    size_t floats = 0, n = group_distinct(g);
    uint32_t dtype = p->r->dtype;
    int hints = 0;
    for (uint32_t u = 0; u < p->units; u++) {
        p->sum_at[u] = floats;
        floats += (group_to(g, u, p->shards - 1) - group_from(g, u, 0)) *
                  config_of(p, u)->dim;
    }
    for (size_t i = 0; i < g->segments_n; i++)
        hints |= p->part_of[i]->rows != NULL;
    int rc = mem_buffer_need(&k->rows, floats * sizeof(float) +
                                           n * sizeof(uint32_t) + 128);
    if (!rc && dtype != WIRE_FP32)
        rc = mem_buffer_need(&k->narrow, floats * sizeof(uint16_t) +
                                             n * sizeof(float) + 128);
    if (rc)
        return rc;
    char *at = k->rows.data;
    p->sums = mem_carve(&at, floats * sizeof(float));
    p->rows = hints ? mem_carve(&at, n * sizeof(uint32_t)) : NULL;
    at = k->narrow.data;
    p->narrow = dtype != WIRE_FP32 ? mem_carve(&at, floats * sizeof(uint16_t))
                                   : NULL;
    p->scales = dtype == WIRE_FP16 ? mem_carve(&at, n * sizeof(float)) : NULL;
    return sched_for(p->r->s, (size_t)p->units * g->cells, sum_cell, p);
}

/* ---- messages ---- */

static wire_hyper hyper_of(const optim_args *a)
{
    return (wire_hyper){.kind = a->kind,
                        .lr = a->lr,
                        .eps = a->eps,
                        .beta1 = a->beta1,
                        .beta2 = a->beta2,
                        .momentum = a->momentum,
                        .weight_decay = a->weight_decay,
                        .max_grad_norm = a->max_grad_norm,
                        .max_norm = a->max_norm,
                        .weight_bound = a->weight_bound,
                        .grad_scale = a->grad_scale};
}

/* What each shard is sent of each table; maybe nothing. */
static void list_tables(pushing *p)
{
    const group *g = &p->k->group;
    for (uint32_t s = 0; s < p->shards; s++) {
        for (uint32_t u = 0; u < p->units; u++) {
            uint32_t dim = config_of(p, u)->dim;
            size_t from = group_from(g, u, s), n = group_to(g, u, s) - from;
            size_t at = p->sum_at[u] +
                        (from - group_from(g, u, 0)) * (size_t)dim;
            const void *values = p->sums + at;
            if (p->narrow)
                values = p->narrow + at;
            p->tables[(size_t)s * p->units + u] = (wire_push_table){
                .grads = {.dim = dim,
                          .n = n,
                          .values = values,
                          .scales = p->scales ? p->scales + from : NULL,
                          .rows = p->rows ? p->rows + from : NULL},
                .ids = g->ids + from,
                .hyper = hyper_of(p->jobs[u].optim)};
        }
    }
}

static int encode_push(void *ctx, const request *q, wire_out *o)
{
    const pushing *p = ctx;
    remote *r = p->r;
    size_t shard = q->to->shard;
    wire_push m = {.caller = q->caller,
                   .stream = r->stream,
                   .number = p->update.number,
                   .step = p->update.step,
                   .part = p->update.part,
                   .parts = p->update.parts,
                   .dtype = r->dtype};
    pthread_mutex_lock(&r->lock);
    m.settled = r->settled.watermark;
    pthread_mutex_unlock(&r->lock);
    if (m.settled >= m.number) /* one that is sent again */
        m.settled = m.number - 1;
    if (!p->empty) {
        m.tables = p->tables + shard * p->units;
        m.tables_n = p->units;
        pthread_mutex_lock(&q->to->lock);
        for (uint32_t u = 0; u < p->units; u++)
            m.tables[u].grads.no = q->to->numbers[p->table[u]];
        pthread_mutex_unlock(&q->to->lock);
    }
    return wire_put_push(o, &m);
}

/* More bytes than the message to a shard has. */
static size_t message_most(const pushing *p, uint32_t shard)
{
    enum { FIXED = 1024, A_TABLE = 512, AN_ID = 8 + 4 + 4 };
    const wire_push_table *m = p->tables + (size_t)shard * p->units;
    size_t bytes = FIXED;
    for (uint32_t u = 0; u < p->units; u++)
        bytes += A_TABLE + m[u].grads.n * (AN_ID + sizeof(float) *
                                                       m[u].grads.dim);
    return bytes;
}

/* Whether all servers take their messages.  It is tried only where the limit
 * is near. */
static int check_sizes(pushing *p)
{
    int rc = PERSIA_OK;
    for (uint32_t s = 0; s < p->shards && !rc; s++) {
        server *to = p->r->servers[s];
        if (server_check_size(to, message_most(p, s)) == PERSIA_OK)
            continue;
        const request q = {.to = to, .caller = remote_caller(p->r, to)};
        wire_out o;
        wire_out_init(&o);
        rc = encode_push(p, &q, &o);
        if (!rc)
            rc = server_check_size(to, o.bytes);
        wire_out_free(&o);
    }
    return rc;
}

/* With the server's lock held. */
static void note_step(server *from, uint64_t step)
{
    if (step > from->step)
        from->step = step;
}

/* With the server's lock held. */
static void note_number(server *from, uint64_t number, uint64_t settled)
{
    const uint64_t skipped = from->acked_late.skipped;
    if (number > NUMBERS_WINDOW)
        numbers_settle(&from->acked_late, number - NUMBERS_WINDOW);
    if (from->acked_late.skipped != skipped)
        from->acked_gap = number - NUMBERS_WINDOW;
    (void)numbers_add(&from->acked_late, number);
    numbers_settle(&from->acked, settled);
    (void)numbers_add(&from->acked, number);
}

/* PERSIA_ESTALE: the server was started again since it answered, and this
 * life of it has not the update. */
static int note_acked(const request *q)
{
    remote *r = q->call->r;
    server *from = q->to;
    const uint64_t number = q->call->number;
    pthread_mutex_lock(&r->lock);
    uint64_t settled = r->settled.watermark;
    pthread_mutex_unlock(&r->lock);
    pthread_mutex_lock(&from->lock);
    int there = from->boot == q->caller.boot;
    if (there) {
        note_number(from, number, settled);
        note_step(from, q->call->step);
    } else {
        there = numbers_has(&from->acked, number);
    }
    pthread_mutex_unlock(&from->lock);
    return there ? PERSIA_OK
                 : err_set(PERSIA_ESTALE, "%s was started again and has lost "
                           "update %llu", from->address,
                           (unsigned long long)number);
}

/* Decodes a reply and notes what it acknowledges; see note_acked(). */
static int read_reply(request *q, wire_push_reply *m)
{
    int rc = wire_get_push_reply(q->reply.data, q->reply.n, &q->call->memory,
                                 m);
    if (rc)
        return remote_bad_reply(q->to, err_text());
    if (m->status == PUSH_APPLIED || m->status == PUSH_DUPLICATE)
        return note_acked(q);
    return PERSIA_OK;
}

static void note_updates(remote *r, uint64_t updates)
{
    uint64_t had = atomic_load(&r->updates);
    while (had < updates &&
           !atomic_compare_exchange_weak(&r->updates, &had, updates))
        ;
}

static int accept_push(void *ctx, request *q)
{
    pushing *p = ctx;
    remote *r = p->r;
    wire_push_reply m;
    int rc = read_reply(q, &m);
    if (rc) /* PERSIA_ESTALE: it is sent again */
        return rc;
    sync_note_left(r, p->moves, &m);
    switch (m.status) {
    case PUSH_RETRY_LATER:
        return err_set(PERSIA_EUNAVAILABLE,
                       "%s: update %llu has to wait for earlier ones",
                       q->to->address, (unsigned long long)p->update.number);
    case PUSH_STALE_LINEAGE:
        /* Made with rows that are there no longer: dropped. */
        r->counts.stale++;
        return remote_repair(r, q->to, q->caller.boot, p->deadline);
    case PUSH_LOST:
        pthread_mutex_lock(&q->to->lock);
        note_step(q->to, p->update.step);
        pthread_mutex_unlock(&q->to->lock);
        remote_note_lost(r, q->to, 1);
        return PERSIA_OK;
    case PUSH_DUPLICATE:
        r->counts.duplicates++;
        break;
    case PUSH_APPLIED:
        break;
    default:
        return remote_bad_reply(q->to, "its answer to a push is none");
    }
    if (q->to == r->servers[0])
        note_updates(r, m.updates);
    if (p->units) { /* the shards do not count by table */
        push_job *all = &p->jobs[0];
        all->created += m.created;
        all->refused += m.refused;
        all->evicted += m.evicted;
        all->nonfinite += m.nonfinite;
        all->touched += m.touched;
    }
    return PERSIA_OK;
}

static void settle(remote *r, uint64_t number)
{
    pthread_mutex_lock(&r->lock);
    (void)numbers_add(&r->settled, number);
    pthread_mutex_unlock(&r->lock);
}

/* The update is through or given up.  Answers that came when its caller had
 * gone are noted. */
static void push_ended(call *k)
{
    remote *r = k->r;
    wire_push_reply m;
    for (size_t i = 0; i < k->requests_n; i++) {
        request *q = &k->requests[i];
        if (q->state == REQUEST_CAME && !q->rc &&
            read_reply(q, &m) == PERSIA_ESTALE)
            remote_note_lost(r, q->to, 1); /* nobody has it any more */
    }
    settle(r, k->number);
}

/* ---- the call ---- */

/* Checks the jobs; their parts become segments. */
static int make_segments(pushing *p, group_batch *out)
{
    uint64_t seen[PS_TABLES_MAX / 64] = {0};
    size_t parts = 0, at = 0;
    for (uint32_t u = 0; u < p->units; u++) {
        const table_config *t;
        int rc = remote_find_table(p->r, p->table[u], &t);
        if (!rc)
            rc = table_check_optim(t, p->jobs[u].optim);
        if (rc)
            return rc;
        uint64_t *word = &seen[p->table[u] / 64];
        uint64_t bit = (uint64_t)1 << p->table[u] % 64;
        if (*word & bit)
            return err_set(PERSIA_EARG, "table %s comes twice in one push",
                           t->name);
        *word |= bit;
        parts += p->jobs[u].parts_n;
    }
    int rc = mem_buffer_need(
        &p->k->lists,
        parts * (sizeof(group_segment) + sizeof(push_part *)) +
            p->units * (sizeof(size_t) + p->shards * sizeof *p->tables) +
            (size_t)64 * 4);
    if (rc)
        return rc;
    char *to = p->k->lists.data;
    group_segment *segments = mem_carve(&to, parts * sizeof *segments);
    p->part_of = mem_carve(&to, parts * sizeof *p->part_of);
    p->sum_at = mem_carve(&to, p->units * sizeof *p->sum_at);
    p->tables = mem_carve(&to, p->shards * p->units * sizeof *p->tables);
    for (uint32_t u = 0; u < p->units; u++) {
        const push_job *job = &p->jobs[u];
        for (size_t i = 0; i < job->parts_n; i++) {
            if (job->parts[i].n == 0)
                continue;
            segments[at] = (group_segment){u, job->parts[i].n,
                                           job->parts[i].ids};
            p->part_of[at++] = &job->parts[i];
        }
    }
    *out = (group_batch){segments, at, p->table, p->units};
    return PERSIA_OK;
}

/* All that can fail before a shard hears of the update. */
static int prepare(pushing *p)
{
    group_batch batch;
    group *g = &p->k->group;
    int rc = make_segments(p, &batch);
    if (!rc && !keep_find(p->r, g, &batch))
        rc = group_make(g, p->r->s, p->shards, &batch);
    if (!rc)
        rc = make_sums(p);
    if (rc)
        return rc;
    list_tables(p);
    return check_sizes(p);
}

static int send_all(pushing *p)
{
    fan f = {.method = WIRE_PUSH, .encode = encode_push,
             .accept = accept_push, .ctx = p};
    int rc = fan_prepare(p->k, NULL, p->shards);
    return rc ? rc : fan_run(p->k, &f, p->deadline);
}

/* An update that will not come.  Other ranks may wait for its part of the
 * step: they are sent an empty one. */
static int send_empty(pushing *p)
{
    p->empty = 1;
    p->units = 0;
    return p->update.parts > 1 ? send_all(p) : PERSIA_OK;
}

/* The same because of an error. */
static int refuse(pushing *p, int rc)
{
    char text[FAN_TEXT];
    snprintf(text, sizeof text, "%s", err_text());
    (void)send_empty(p);
    return err_set(rc, "%s", text);
}

/* Gives the update its number, if the caller did not. */
static int name_update(pushing *p, const client_update *update)
{
    remote *r = p->r;
    client_update *out = &p->update;
    int rc = PERSIA_OK;
    *out = update ? *update : (client_update){0};
    if (!out->parts)
        out->parts = 1;
    pthread_mutex_lock(&r->lock);
    uint64_t settled = r->settled.watermark;
    if (!out->number)
        out->number = r->next_number + 1;
    if (out->number > r->next_number)
        r->next_number = out->number;
    if (out->number > settled + NUMBERS_WINDOW)
        rc = err_set(PERSIA_EARG,
                     "update %llu, but update %llu was not sent yet; at most "
                     "%d may be under way",
                     (unsigned long long)out->number,
                     (unsigned long long)settled + 1, NUMBERS_WINDOW);
    p->moves = r->moves;
    if (r->joined && out->step > r->joined_step + 1)
        r->joined_step = out->step - 1;
    pthread_mutex_unlock(&r->lock);
    return rc;
}

/* Begins the call of an update with a number. */
static int begin(pushing *p, const client_update *update)
{
    int rc = fork_check("an update");
    if (!rc)
        rc = name_update(p, update);
    if (rc)
        return rc;
    p->shards = p->r->servers_n;
    p->deadline = remote_deadline(p->r);
    p->k = call_take(p->r);
    if (!p->k) {
        settle(p->r, p->update.number);
        return PERSIA_ENOMEM;
    }
    p->k->number = p->update.number;
    p->k->step = p->update.step;
    p->k->ended = push_ended;
    p->r->counts.lost += atomic_exchange(&p->r->missing, 0);
    return PERSIA_OK;
}

int remote_push(remote *r, const client_update *update,
                const uint32_t *tables, push_job *jobs, size_t jobs_n)
{
    pushing p = {.r = r, .table = tables, .jobs = jobs,
                 .units = (uint32_t)jobs_n};
    for (size_t i = 0; i < jobs_n; i++)
        jobs[i].created = jobs[i].refused = jobs[i].evicted =
            jobs[i].nonfinite = jobs[i].touched = 0;
    int rc = begin(&p, update);
    if (rc)
        return rc;
    r->counts.pushes++;
    rc = jobs_n > PS_TABLES_MAX
             ? err_set(PERSIA_EARG, "%zu tables in one push", jobs_n)
             : prepare(&p);
    rc = rc ? refuse(&p, rc) : send_all(&p);
    call_give(p.k);
    return rc ? rc : remote_tell_lost(r);
}

int remote_skip(remote *r, const client_update *update)
{
    pushing p = {.r = r};
    int rc = begin(&p, update);
    if (rc)
        return rc;
    rc = send_empty(&p);
    call_give(p.k);
    return rc;
}
