/* push.c: an update, summed per id here, to all shards. */
#include "client/private.h"

#include <string.h>

/* One push: its units are its jobs. */
typedef struct pushing {
    ps_client *r;
    call *k;
    client_update update;
    uint64_t t;                  /* see persia_client_t() */
    const uint32_t *table;       /* [units] */
    push_job *jobs;              /* [units] */
    uint32_t units, shards;
    sums sums;                   /* its values are all that leaves as fp32 */
    uint16_t *narrow;            /* as sums, if they do not leave as fp32 */
    float *scales;               /* [distinct], fp16 */
    wire_push_table *tables;     /* [shards * units] */
    const optim_args **optim;    /* embedded: [units] the jobs' */
    int empty;                   /* sent without its tables */
    int skips;                   /* it counts as no update */
    uint64_t deadline;
    uint32_t moves;              /* of the client, when it was named */
} pushing;

/* ---- sums ---- */

/* Sums and hints of one (job, cell), as they leave. */
static int sum_cell(void *ctx, size_t index)
{
    pushing *p = ctx;
    const sums *m = &p->sums;
    const batch_index *x = m->index;
    int rc = sums_cell(m, index);
    if (rc || p->r->dtype == WIRE_FP32)
        return rc;
    uint32_t u = (uint32_t)(index / x->cells);
    const size_t *base = x->base + (size_t)m->unit[u] * x->cells +
                         index % x->cells;
    const uint32_t dim = m->configs[u]->dim;
    size_t at = m->at[u] + (base[0] - sums_from(m, u)) * dim;
    persia_wire_narrow(p->r->dtype, base[1] - base[0], dim, m->values + at,
                       dim, p->narrow + at,
                       p->scales ? p->scales + base[0] : NULL);
    return PERSIA_OK;
}

static int push_make_sums(pushing *p)
{
    sums *m = &p->sums;
    call *k = p->k;
    int rc = sums_index(m, &p->r->indexes, &k->segments);
    k->index = m->index;
    if (rc)
        return rc;
    size_t floats = m->at[m->jobs_n], n = index_distinct(m->index);
    uint32_t dtype = p->r->dtype;
    rc = persia_mem_buffer_need(&k->rows, floats * sizeof(float));
    if (!rc && dtype != WIRE_FP32)
        rc = persia_mem_buffer_need(&k->narrow, floats * sizeof(uint16_t) +
                                                    n * sizeof(float) + 128);
    if (rc)
        return rc;
    m->values = k->rows.data;
    char *at = k->narrow.data;
    p->narrow = dtype != WIRE_FP32 ? mem_carve(&at, floats * sizeof(uint16_t))
                                   : NULL;
    p->scales = dtype == WIRE_FP16 ? mem_carve(&at, n * sizeof(float)) : NULL;
    return persia_sched_for_rows(p->r->s, (size_t)m->jobs_n * m->index->cells,
                                 m->index->ids_n, sum_cell, p);
}

/* ---- messages ---- */

/* What each shard is sent of each table; maybe nothing. */
static void push_list_tables(pushing *p)
{
    const sums *m = &p->sums;
    const batch_index *x = m->index;
    for (uint32_t s = 0; s < p->shards; s++) {
        for (uint32_t u = 0; u < p->units; u++) {
            uint32_t dim = m->configs[u]->dim;
            size_t from = index_from(x, m->unit[u], s);
            size_t n = index_to(x, m->unit[u], s) - from;
            size_t at = m->at[u] + (from - sums_from(m, u)) * (size_t)dim;
            const void *values = m->values + at;
            if (p->narrow)
                values = p->narrow + at;
            p->tables[(size_t)s * p->units + u] = (wire_push_table){
                .grads = {.dim = dim,
                          .n = n,
                          .values = values,
                          .scales = p->scales ? p->scales + from : NULL,
                          .rows = x->hints ? x->hints + from : NULL},
                .ids = x->ids + from,
                .distinct = 1,
                .hyper = p->jobs[u].optim->hyper};
        }
    }
}

static void fill_push(void *ctx, request *q)
{
    const pushing *p = ctx;
    ps_client *r = p->r;
    size_t shard = q->to->shard;
    wire_push *m = &q->args.push.m;
    *m = (wire_push){.caller = q->caller,
                     .stream = atomic_load(&r->stream),
                     .number = p->update.number,
                     .step = p->update.step,
                     .part = p->update.part,
                     .parts = p->update.parts,
                     .group = p->update.group,
                     .t = p->t,
                     .dtype = r->dtype,
                     .skips = (uint32_t)p->skips,
                     .shared = (uint32_t)r->shared,
                     .maker = p->update.maker,
                     .trace = p->update.trace};
    pthread_mutex_lock(&r->lock);
    m->settled = r->settled.w.watermark;
    pthread_mutex_unlock(&r->lock);
    if (m->settled >= m->number) /* one that is sent again */
        m->settled = m->number - 1;
    if (!p->empty) {
        m->tables = p->tables + shard * p->units;
        m->tables_n = p->units;
    }
    if (!p->empty && !r->embedded) {
        pthread_mutex_lock(&q->to->lock);
        for (uint32_t u = 0; u < p->units; u++)
            m->tables[u].grads.no = q->to->numbers[p->table[u]];
        pthread_mutex_unlock(&q->to->lock);
    }
    q->args.push.args =
        (shard_push){.m = m, .jobs = r->embedded ? p->jobs : NULL};
}

/* More bytes than the message to a shard has. */
static size_t push_message_most(const pushing *p, uint32_t shard)
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
static int push_check_sizes(pushing *p)
{
    int rc = PERSIA_OK;
    for (uint32_t s = 0; s < p->shards && !rc; s++) {
        server *to = p->r->servers[s];
        if (shard_check_size(to->ref, push_message_most(p, s)) == PERSIA_OK)
            continue;
        request q = {.to = to, .caller = server_caller(p->r, to)};
        wire_out o;
        persia_wire_out_init(&o);
        fill_push(p, &q);
        rc = persia_wire_put_push(&o, &q.args.push.m);
        if (!rc)
            rc = shard_check_size(to->ref, o.bytes);
        persia_wire_out_free(&o);
    }
    return rc;
}

/* With the server's lock held. */
static void push_note_step(server *from, uint64_t step)
{
    if (step > from->step)
        from->step = step;
}

/* With the server's lock held. */
static void push_note_number(server *from, uint64_t number, uint64_t settled)
{
    const uint64_t skipped = from->acked_late.w.skipped;
    if (number > NUMBERS_WINDOW)
        numbers_settle(&from->acked_late, number - NUMBERS_WINDOW);
    if (from->acked_late.w.skipped != skipped)
        from->acked_gap = number - NUMBERS_WINDOW;
    numbers_add(&from->acked_late, number);
    numbers_settle(&from->acked, settled);
    numbers_add(&from->acked, number);
}

/* PERSIA_ESTALE: the server was started again since it answered, and this
 * life of it has not the update.  PERSIA_EREPLACED: the rows that had it were
 * replaced since. */
static int push_note_acked(const request *q)
{
    ps_client *r = q->call->r;
    server *from = q->to;
    const uint64_t number = q->call->number;
    pthread_mutex_lock(&r->lock);
    uint64_t settled = r->settled.w.watermark;
    pthread_mutex_unlock(&r->lock);
    pthread_mutex_lock(&from->lock);
    const int same_life = from->boot == q->caller.boot;
    int there = same_life && from->lineage == q->caller.lineage;
    if (there) {
        push_note_number(from, number, settled);
        push_note_step(from, q->call->step);
    } else {
        there = window_has(&from->acked.w, number);
    }
    pthread_mutex_unlock(&from->lock);
    if (there)
        return PERSIA_OK;
    return same_life
               ? PERSIA_EREPLACED
               : persia_err_set(PERSIA_ESTALE,
                                "%s was started again and has lost update "
                                "%llu",
                                from->address, (unsigned long long)number);
}

/* Notes what a reply acknowledges; see push_note_acked(). */
static int push_read_reply(const request *q)
{
    const wire_push_reply *m = q->reply.message;
    return m->status == PUSH_APPLIED || m->status == PUSH_DUPLICATE
               ? push_note_acked(q)
               : PERSIA_OK;
}

static void push_note_updates(ps_client *r, uint64_t updates)
{
    uint64_t had = atomic_load(&r->updates);
    while (had < updates &&
           !atomic_compare_exchange_weak(&r->updates, &had, updates))
        ;
}

static int accept_push(void *ctx, request *q)
{
    pushing *p = ctx;
    ps_client *r = p->r;
    const wire_push_reply *m = q->reply.message;
    int rc = push_read_reply(q);
    if (rc == PERSIA_EREPLACED) { /* dropped, as where that was sooner */
        r->counts.stale++;
        return PERSIA_OK;
    }
    if (rc) /* PERSIA_ESTALE: it is sent again */
        return rc;
    sync_note_left(r, p->moves, m);
    switch (m->status) {
    case PUSH_RETRY_LATER:
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "%s: update %llu has to wait for earlier ones",
                              q->to->address,
                              (unsigned long long)p->update.number);
    case PUSH_STALE_LINEAGE:
        /* Made with rows that are there no longer: dropped. */
        r->counts.stale++;
        return server_repair(r, q->to, q->caller.boot, p->deadline);
    case PUSH_LOST:
        pthread_mutex_lock(&q->to->lock);
        push_note_step(q->to, p->update.step);
        pthread_mutex_unlock(&q->to->lock);
        client_note_lost(r, q->to, 1);
        return PERSIA_OK;
    case PUSH_DUPLICATE:
        r->counts.duplicates++;
        break;
    case PUSH_APPLIED:
        break;
    default:
        return server_bad_reply(q->to, "its answer to a push is none");
    }
    if (q->to == r->servers[0])
        push_note_updates(r, m->updates);
    if (p->units && !r->embedded) /* servers do not count by table */
        UPDATE_COUNTS_ADD(&p->jobs[0], m);
    return PERSIA_OK;
}

static void push_settle(ps_client *r, uint64_t number)
{
    pthread_mutex_lock(&r->lock);
    numbers_add(&r->settled, number);
    pthread_mutex_unlock(&r->lock);
}

/* The update is through or given up.  Answers that arrived when its caller had
 * gone are noted.  In a stream that is shared nothing is given up: a data
 * loader's batch is sent again under its number. */
static void push_ended(call *k)
{
    ps_client *r = k->r;
    for (size_t i = 0; i < k->requests_n; i++) {
        request *q = &k->requests[i];
        if (q->state != REQUEST_CAME || q->rc)
            continue;
        const int rc = push_read_reply(q);
        if (rc == PERSIA_ESTALE) /* no server has it any more */
            client_note_lost(r, q->to, 1);
        r->counts.stale += rc == PERSIA_EREPLACED;
    }
    if (!r->shared || persia_client_has(r, k->number))
        push_settle(r, k->number);
}

/* ---- the call ---- */

/* Checks the jobs, and lists their tables. */
static int push_check_jobs(pushing *p)
{
    uint64_t seen[TABLES_MAX / 64] = {0};
    int rc = persia_mem_buffer_need(
        &p->k->lists,
        p->units * (sizeof(table_config *) + p->shards * sizeof *p->tables) +
            (size_t)64 * 2);
    if (rc)
        return rc;
    char *to = p->k->lists.data;
    const table_config **configs =
        mem_carve(&to, p->units * sizeof *configs);
    p->tables = mem_carve(&to, p->shards * p->units * sizeof *p->tables);
    for (uint32_t u = 0; u < p->units; u++) {
        rc = client_find_table(p->r, p->table[u], &configs[u]);
        if (!rc)
            rc = persia_table_check_optim(configs[u], p->jobs[u].optim);
        if (rc)
            return rc;
        uint64_t *word = &seen[p->table[u] / 64];
        uint64_t bit = (uint64_t)1 << p->table[u] % 64;
        if (*word & bit)
            return persia_err_set(PERSIA_EARG,
                                  "table %s is twice in one push",
                                  configs[u]->name);
        *word |= bit;
    }
    p->sums = (sums){.s = p->r->s, .shards = p->shards, .tables = p->table,
                     .configs = configs, .jobs = p->jobs,
                     .jobs_n = p->units};
    return PERSIA_OK;
}

/* The shard of an embedded client is given the jobs as they are. */
static int push_prepare_jobs(pushing *p)
{
    const table_config *config;
    int rc = persia_mem_buffer_need(
        &p->k->lists,
        p->units * (sizeof *p->tables + sizeof *p->optim) + (size_t)64 * 2);
    char *at = p->k->lists.data;
    if (rc)
        return rc;
    p->tables = mem_carve(&at, p->units * sizeof *p->tables);
    p->optim = mem_carve(&at, p->units * sizeof *p->optim);
    for (uint32_t u = 0; u < p->units && !rc; u++) {
        p->optim[u] = p->jobs[u].optim;
        p->tables[u] = (wire_push_table){.grads = {.no = p->table[u]},
                                         .hyper = p->optim[u]->hyper};
        rc = client_find_table(p->r, p->table[u], &config);
    }
    return rc;
}

/* All that can fail before the update is sent. */
static int push_prepare(pushing *p)
{
    if (p->r->embedded)
        return push_prepare_jobs(p);
    int rc = push_check_jobs(p);
    if (!rc)
        rc = push_make_sums(p);
    if (rc)
        return rc;
    push_list_tables(p);
    return push_check_sizes(p);
}

static int push_send_all(pushing *p)
{
    fan f = {.method = WIRE_PUSH, .fill = fill_push,
             .accept = accept_push, .ctx = p};
    int rc = fan_prepare(p->k, NULL, p->shards);
    return rc ? rc : fan_run(p->k, &f, p->deadline);
}

/* An update that will not be made.  Other ranks may wait for its part of the
 * step: they are sent an empty one. */
static int push_send_empty(pushing *p)
{
    p->empty = 1;
    p->units = 0;
    return p->update.parts > 1 ? push_send_all(p) : PERSIA_OK;
}

/* The same because of an error. */
static int push_refuse(pushing *p, int rc)
{
    err_kept error;
    persia_err_keep(&error, rc);
    (void)push_send_empty(p);
    return persia_err_again(&error);
}

/* The t of an update; the lock is held.  Numbers that are sent again, before
 * the base, get those that they had. */
static uint64_t push_t_of(ps_client *r, const client_update *update)
{
    if (update->t)
        return update->t;
    if (update->step) { /* what follows the steps has a higher one */
        r->t_base = update->step;
        r->t_number = update->number;
        return update->step;
    }
    const int64_t ahead = (int64_t)(update->number - r->t_number) - 1;
    const int64_t t = (int64_t)r->t_base + ahead * (int64_t)r->world +
                      r->rank + 1;
    return t > 0 ? (uint64_t)t : 1;
}

uint64_t persia_client_t_of(ps_client *r, const client_update *update)
{
    pthread_mutex_lock(&r->lock);
    const uint64_t t = push_t_of(r, update);
    pthread_mutex_unlock(&r->lock);
    return t;
}

/* Numbers that were passed over so long ago, or before a loss that was
 * counted, are through; r->lock is held. */
static void push_pass_over(ps_client *r, const client_update *update)
{
    uint64_t to = update->number > CLIENT_LAG + 1
                      ? update->number - CLIENT_LAG - 1 : 0;
    if (to < r->told)
        to = r->told;
    numbers_settle(&r->settled, to < update->through ? to : update->through);
}

/* Gives the update its number, if the caller did not. */
static int name_update(pushing *p, const client_update *update)
{
    ps_client *r = p->r;
    client_update *out = &p->update;
    int rc = PERSIA_OK;
    *out = update ? *update : (client_update){0};
    if (!out->parts)
        out->parts = 1;
    if (r->embedded) /* there are no other ranks */
        *out = (client_update){.number = out->number, .parts = 1};
    pthread_mutex_lock(&r->lock);
    push_pass_over(r, out);
    uint64_t settled = r->settled.w.watermark;
    if (!out->number)
        out->number = r->next_number + 1;
    if (out->number > settled + NUMBERS_WINDOW)
        rc = persia_err_set(
            PERSIA_EARG,
            "update %llu, but update %llu was not sent yet; at most "
            "%d may be in flight",
            (unsigned long long)out->number, (unsigned long long)settled + 1,
            NUMBERS_WINDOW);
    else if (out->number > r->next_number) /* a refused one takes none */
        r->next_number = out->number;
    p->t = push_t_of(r, out);
    p->moves = r->moves;
    if (!rc && r->joined && out->step > r->joined_step + 1)
        r->joined_step = out->step - 1;
    pthread_mutex_unlock(&r->lock);
    return rc;
}

/* Before an update is sent.  One that has its number gives that up where it
 * cannot be: lookups behind it wait for nothing. */
static int push_ready(ps_client *r, const client_update *update)
{
    int rc = client_check_mixture(r, 1);
    if (!rc)
        rc = complete_own(r, client_deadline(r));
    if (rc && update && update->number && !r->shared)
        push_settle(r, update->number);
    return rc;
}

/* Begins the call of an update with a number. */
static int push_begin(pushing *p, const client_update *update)
{
    int rc = persia_fork_check("an update");
    if (!rc && !atomic_load(&p->r->stream))
        rc = persia_err_set(PERSIA_EARG, "the store is read-only: it makes no "
                                         "updates");
    if (!rc)
        rc = push_ready(p->r, update);
    if (!rc)
        rc = name_update(p, update);
    if (rc)
        return rc;
    p->shards = p->r->servers_n;
    p->deadline = client_deadline(p->r);
    p->k = call_take(p->r);
    if (!p->k) {
        if (!p->r->shared)
            push_settle(p->r, p->update.number);
        return PERSIA_ENOMEM;
    }
    p->k->number = p->update.number;
    p->k->step = p->update.step;
    p->k->ended = push_ended;
    return PERSIA_OK;
}

int persia_client_push(ps_client *r, const client_update *update,
                       const uint32_t *tables, push_job *jobs, size_t jobs_n)
{
    pushing p = {.r = r, .table = tables, .jobs = jobs,
                 .units = (uint32_t)jobs_n};
    for (size_t i = 0; i < jobs_n; i++)
        jobs[i].created = jobs[i].refused = jobs[i].evicted =
            jobs[i].nonfinite = jobs[i].touched = 0;
    int rc = push_begin(&p, update);
    if (rc)
        return rc;
    r->counts.pushes++;
    rc = jobs_n > TABLES_MAX
             ? persia_err_set(PERSIA_EARG, "%zu tables in one push", jobs_n)
             : push_prepare(&p);
    rc = rc ? push_refuse(&p, rc) : push_send_all(&p);
    for (uint32_t u = 0; u < p.units && p.optim; u++)
        jobs[u].optim = p.optim[u]; /* the shard had its own there */
    call_give(p.k);
    return rc ? rc : persia_client_tell_lost(r);
}

int persia_client_has(ps_client *r, uint64_t number)
{
    int all = 1;
    for (uint32_t i = 0; i < r->servers_n && all; i++) {
        server *to = r->servers[i];
        pthread_mutex_lock(&to->lock);
        all = window_has(&to->acked.w, number);
        pthread_mutex_unlock(&to->lock);
    }
    return all;
}

static int push_skip(ps_client *r, const client_update *update)
{
    pushing p = {.r = r};
    int rc = push_begin(&p, update);
    if (rc)
        return rc;
    rc = push_send_empty(&p);
    call_give(p.k);
    return rc;
}

int persia_client_skip(ps_client *r, const client_update *update)
{
    const uint64_t until = client_deadline(r);
    int rc;
    do /* a step fails where the part of another rank was late */
        rc = push_skip(r, update);
    while (rc == PERSIA_ETIMEOUT && persia_clock_ns() < until);
    return rc;
}

int persia_client_note(ps_client *r, const client_update *update)
{
    pushing p = {.r = r, .empty = 1, .skips = 1};
    int rc = push_begin(&p, update);
    if (rc)
        return rc;
    rc = push_send_all(&p);
    call_give(p.k);
    return rc;
}
