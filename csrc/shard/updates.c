/* updates.c: gradients in, each update applied once. */
#include "shard/private.h"

#include "simd/simd.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 2048 }; /* rows that are widened, ids that are checked */

/* ---- answers ------------------------------------------------------------ */

push_call *push_keep(const push_call *c)
{
    if (c->kept)
        return c->kept;
    push_call *kept = malloc(sizeof *kept);
    if (!kept) {
        call_fail(&c->call, PERSIA_ENOMEM, "no memory for an update that "
                  "waits");
        return NULL;
    }
    *kept = *c;
    kept->kept = kept;
    return kept;
}

/* Before it is answered: then the next one may be in its place. */
static shard_call push_free(push_call *c)
{
    const shard_call call = c->call;
    free(c->kept);
    return call;
}

void push_fail(push_call *c, int code, const char *text)
{
    const shard_call call = push_free(c);
    call_fail(&call, code, text);
}

/* A reply with the list of ranks that have left. */
static int reply_with(const wire_push_reply *m, shard_reply *out)
{
    wire_memory *memory;
    int rc = persia_shard_reply_make(sizeof *m, out, &memory);
    if (rc)
        return rc;
    wire_push_reply *copy = (wire_push_reply *)(uintptr_t)out->message;
    const size_t bytes = m->left_n * sizeof *m->left;
    *copy = *m;
    copy->left = persia_wire_memory_take(memory, bytes);
    if (copy->left)
        memcpy(copy->left, m->left, bytes);
    else
        copy->left_n = 0;
    return PERSIA_OK;
}

void push_reply(shard *s, push_call *c, const wire_push_reply *reply)
{
    wire_push_reply m = *reply;
    shard_reply out = {.message = &m};
    uint64_t *left = NULL;
    if (m.status == PUSH_DUPLICATE)
        atomic_fetch_add(&s->duplicates, 1);
    if (c->m->step)
        m.left = left = wait_left(s, c->m->parts, &m.left_n);
    const shard_call call = push_free(c);
    int rc = m.left_n ? reply_with(&m, &out) : PERSIA_OK;
    free(left);
    call_own(&call, rc, &out);
}

void push_reply_status(shard *s, push_call *c, uint32_t status)
{
    wire_push_reply reply = {.status = status,
                             .updates = persia_tables_updates(s->p)};
    push_reply(s, c, &reply);
}

void push_reply_state(shard *s, push_call *c, enum ledger_state state)
{
    char text[512];
    int code = PERSIA_OK;
    if (state == LEDGER_DONE)
        code = ledger_refusal(s->ledger, &c->key, text, sizeof text);
    if (state == LEDGER_DONE && !code && s->log && !s->replaying &&
        (code = persia_log_check(s->log))) /* it may not last */
        snprintf(text, sizeof text, "%s", persia_err_text());
    if (is_stale(s, &c->m->caller)) /* it is another ledger's */
        push_reply_status(s, c, PUSH_STALE_LINEAGE);
    else if (code)
        push_fail(c, code, text);
    else if (state == LEDGER_DONE)
        push_reply_status(s, c, PUSH_DUPLICATE);
    else if (state == LEDGER_ELSEWHERE)
        push_fail(c, PERSIA_EUNAVAILABLE, "this update is in flight as a part "
                  "of another step: send it again");
    else if (state == LEDGER_BEYOND)
        push_reply_status(s, c, PUSH_RETRY_LATER);
    else if (state == LEDGER_ABSURD)
        push_fail(c, PERSIA_EARG, "`settled` of this update is so far ahead "
                  "that no server can have missed so many");
    else if (state == LEDGER_TAKEN)
        push_fail(c, PERSIA_ECLOSED, "another process sends the updates "
                  "of this rank now, those of this one are not applied any "
                  "more");
    else
        push_fail(c, PERSIA_ESTALE, "the stream of this update is not "
                  "open here: say Hello with it and see what the server "
                  "still has of it");
}

/* ---- checks of one call ------------------------------------------------- */

static optim_args args_of(const optim_hyper *h, uint64_t t)
{
    return (optim_args){.hyper = *h, .step = t};
}

/* job: see shard_push, or NULL. */
static int check_table(const shard *s, const wire_push_table *m,
                       const push_job *job, uint64_t t_of_push)
{
    table *t;
    int rc = find_table(s, m->grads.no, &t);
    if (rc)
        return rc;
    const table_config *c = persia_table_get_config(t);
    const optim_args args = args_of(&m->hyper, t_of_push);
    rc = persia_table_check_optim(c, &args);
    for (size_t i = 0; job && i < job->parts_n && !rc; i++)
        rc = check_ids(s, t, job->parts[i].ids, job->parts[i].n);
    if (rc || job)
        return rc;
    if (m->grads.n && m->grads.dim != c->dim)
        return persia_err_set(PERSIA_ESHAPE,
                              "table %s: gradients of dim %u arrive, "
                              "the table has dim %u",
                              c->name, m->grads.dim, c->dim);
    return check_ids(s, t, m->ids, m->grads.n);
}

int push_check(const shard *s, const shard_push *a)
{
    const wire_push *m = a->m;
    uint8_t seen[WIRE_TABLES_MAX] = {0};
    int rc = persia_shard_check_boot(s, &m->caller);
    if (!rc && wire_leaps(persia_tables_t(s->p), m->t))
        rc = persia_err_set(PERSIA_EARG,
                            "t is %llu, the highest so far is %llu: no server "
                            "misses so many updates",
                            (unsigned long long)m->t,
                            (unsigned long long)persia_tables_t(s->p));
    for (size_t i = 0; i < m->tables_n && !rc; i++) {
        const wire_push_table *t = &m->tables[i];
        rc = check_table(s, t, a->jobs ? &a->jobs[i] : NULL, m->t);
        if (!rc && seen[t->grads.no]++)
            rc = persia_err_set(
                PERSIA_EARG, "table %s is twice in one push",
                persia_table_get_config(persia_tables_table(s->p, t->grads.no))
                    ->name);
    }
    return rc;
}

/* ---- one update of n parts ---------------------------------------------- */

enum { FEW = 32 }; /* tables whose settings lie on the stack */

typedef struct update {
    shard *s;
    push_call **calls; /* [n] */
    uint32_t n;
    push_job *jobs; /* a table each */
    size_t jobs_n;
    push_part *parts;  /* of all jobs, in the order of these */
    optim_args *optim; /* [jobs_n] */
    optim_args *few;   /* [FEW] */
    wire_memory memory;
    void *wide;        /* gradients that were sent narrower than fp32 */
    int some_are_out;  /* updates_is_out() */
    uint64_t step;     /* 0: none */
    uint64_t t;        /* of its parts with tables; 0: it has none */
    int applied;       /* as a whole or in part */
    const err_kept *refused; /* why: updates_apply_empty(); or NULL */
    uint64_t logged;   /* behind its record */
    late_answer *late; /* or NULL */
    uint64_t updates;  /* of the shard, when it was */
} update;

/* One table of one part. */
typedef struct entry {
    const wire_push_table *m;
    const push_job *job; /* where the gradients are; NULL: in m */
    uint32_t part;
    const float *grad;
    atomic_int finite; /* it was widened, and holds no NaN and no Inf */
} entry;

static int updates_by_table(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->m->grads.no != y->m->grads.no)
        return x->m->grads.no < y->m->grads.no ? -1 : 1;
    return x->part < y->part ? -1 : x->part > y->part;
}

/* Gradients to widen, in pieces numbered through: a sched_loop_fn. */
typedef struct widening {
    entry *entries;
    push_call *const *calls;
    const size_t *first_piece; /* [n + 1] */
    size_t n;
} widening;

static int updates_widen_piece(void *ctx, size_t piece)
{
    const widening *w = ctx;
    const size_t k = sched_range(w->first_piece, w->n, piece);
    entry *e = &w->entries[k];
    const wire_values *v = &e->m->grads;
    const uint32_t dtype = w->calls[e->part]->m->dtype;
    size_t first = (piece - w->first_piece[k]) * PIECE;
    size_t n = v->n - first < PIECE ? v->n - first : PIECE;
    float *to = (float *)(uintptr_t)e->grad + first * v->dim;
    persia_wire_widen(dtype, n, v->dim,
                      (const char *)v->values +
                          first * v->dim * wire_dtype_bytes(dtype),
                      v->scales ? v->scales + first : NULL, to, v->dim);
    if (!persia_floats_finite(to, n * v->dim)) /* while it is in the cache */
        atomic_store(&e->finite, 0);
    return PERSIA_OK;
}

static int updates_is_narrow(const update *u, const entry *e)
{
    return !e->job && u->calls[e->part]->m->dtype != WIRE_FP32;
}

/* Finds gradients that are fp32 where they lie, makes the others so. */
static int updates_widen(update *u, entry *entries, size_t n)
{
    size_t floats = 0;
    size_t *first_piece = persia_wire_memory_take(&u->memory,
                                                  (n + 1) * sizeof(size_t));
    if (!first_piece)
        return PERSIA_ENOMEM;
    first_piece[0] = 0;
    for (size_t i = 0; i < n; i++) {
        const wire_values *v = &entries[i].m->grads;
        int narrow = updates_is_narrow(u, &entries[i]);
        if (narrow)
            floats += v->n * v->dim;
        first_piece[i + 1] =
            first_piece[i] + (narrow ? (v->n + PIECE - 1) / PIECE : 0);
    }
    if (floats) {
        int rc = persia_mem_pool_take(u->s->blocks, floats * sizeof(float),
                                      &u->wide);
        if (rc)
            return rc;
    }
    float *at = u->wide;
    for (size_t i = 0; i < n; i++) {
        const wire_values *v = &entries[i].m->grads;
        if (!updates_is_narrow(u, &entries[i])) {
            entries[i].grad = v->values;
        } else if (v->n) {
            entries[i].grad = at;
            atomic_init(&entries[i].finite, 1);
            at += v->n * v->dim;
        }
    }
    widening w = {entries, u->calls, first_piece, n};
    return persia_sched_for(persia_tables_sched(u->s->p), first_piece[n],
                            updates_widen_piece, &w);
}

/* Appends the parts of an entry to those of the job before. */
static void add_parts(push_job *job, push_part *to, const entry *e)
{
    const wire_values *v = &e->m->grads;
    if (e->job) {
        if (e->job->parts_n)
            memcpy(to, e->job->parts, e->job->parts_n * sizeof *to);
        job->parts_n += e->job->parts_n;
        return;
    }
    *to = (push_part){.n = v->n,
                      .ids = e->m->ids,
                      .rows = v->rows,
                      .grad = e->grad,
                      .finite = atomic_load(&e->finite),
                      .stride = v->dim,
                      .bags = v->n};
    job->parts_n++;
}

static int updates_refuse_hyper(const update *u, const table *t,
                                const entry *a, const entry *b)
{
    return persia_err_set(
        PERSIA_EARG,
        "table %s: ranks %u and %u of step %llu "
        "send different settings of the optimizer (lr %g and "
        "%g, factor of gradients %g and %g, ...); their "
        "schedulers, GradScaler, grad_division and norms for "
        "clipping must agree",
        persia_table_get_config(t)->name, u->calls[a->part]->m->part,
        u->calls[b->part]->m->part, (unsigned long long)u->step,
        (double)a->m->hyper.lr, (double)b->m->hyper.lr,
        (double)a->m->hyper.grad_scale, (double)b->m->hyper.grad_scale);
}

/* One job a table, its parts in the order of the ranks. */
static int updates_build_jobs(update *u, const entry *entries, size_t n)
{
    push_part *next = u->parts;
    for (size_t i = 0; i < n; i++) {
        const entry *e = &entries[i], *before = i ? e - 1 : NULL;
        table *t = persia_tables_table(u->s->p, e->m->grads.no);
        if (before && before->m->grads.no == e->m->grads.no) {
            if (persia_spec_difference(&persia_optim_hyper_list,
                                       &before->m->hyper, &e->m->hyper))
                return updates_refuse_hyper(u, t, before, e);
            u->jobs[u->jobs_n - 1].distinct = 0;
        } else {
            u->optim[u->jobs_n] = args_of(&e->m->hyper, u->t);
            u->jobs[u->jobs_n] = (push_job){
                .t = t,
                .parts = next,
                .distinct = e->job ? e->job->distinct : e->m->distinct != 0,
                .draw = u->t,
                .optim = &u->optim[u->jobs_n]};
            u->jobs_n++;
        }
        push_job *job = &u->jobs[u->jobs_n - 1];
        add_parts(job, next, e);
        next = (push_part *)(uintptr_t)job->parts + job->parts_n;
    }
    return PERSIA_OK;
}

/* Memory for the settings of so many tables. */
static int updates_take_optim(update *u, size_t n)
{
    u->optim = n <= FEW
                   ? u->few
                   : persia_wire_memory_take(&u->memory, n * sizeof *u->optim);
    return u->optim ? PERSIA_OK : PERSIA_ENOMEM;
}

/* The jobs of one caller, as they lie. */
static int updates_build_direct(update *u)
{
    const push_call *c = u->calls[0];
    int rc = updates_take_optim(u, c->m->tables_n);
    if (rc)
        return rc;
    u->jobs = c->jobs;
    u->jobs_n = c->m->tables_n;
    for (size_t i = 0; i < u->jobs_n; i++) {
        u->optim[i] = args_of(&c->m->tables[i].hyper, u->t);
        u->jobs[i].optim = &u->optim[i];
        u->jobs[i].draw = u->t;
        u->jobs[i].t = persia_tables_table(u->s->p, c->m->tables[i].grads.no);
    }
    return PERSIA_OK;
}

/* The t that all parts with tables agree on. */
static int updates_find_t(update *u)
{
    for (uint32_t i = 0; i < u->n; i++) {
        const wire_push *m = u->calls[i]->m;
        if (!m->tables_n)
            continue;
        if (u->t && u->t != m->t)
            return persia_err_set(PERSIA_EARG,
                                  "the parts of step %llu have "
                                  "different t: %llu and %llu",
                                  (unsigned long long)u->step,
                                  (unsigned long long)u->t,
                                  (unsigned long long)m->t);
        u->t = m->t;
    }
    return PERSIA_OK;
}

static int updates_build(update *u)
{
    size_t n = 0, parts = 0;
    int rc = updates_find_t(u);
    if (rc || (u->n == 1 && u->calls[0]->jobs))
        return rc ? rc : updates_build_direct(u);
    for (uint32_t i = 0; i < u->n; i++) {
        const push_call *c = u->calls[i];
        n += c->m->tables_n;
        for (size_t k = 0; k < c->m->tables_n; k++)
            parts += c->jobs ? c->jobs[k].parts_n : 1;
    }
    entry *entries = persia_wire_memory_take(&u->memory, n * sizeof *entries);
    u->jobs = persia_wire_memory_take(&u->memory, n * sizeof *u->jobs);
    u->parts = persia_wire_memory_take(&u->memory, parts * sizeof *u->parts);
    if (!entries || !u->jobs || !u->parts || updates_take_optim(u, n))
        return PERSIA_ENOMEM;
    n = 0;
    for (uint32_t i = 0; i < u->n; i++) {
        const push_call *c = u->calls[i];
        for (size_t k = 0; k < c->m->tables_n; k++)
            entries[n++] = (entry){.m = &c->m->tables[k],
                                   .job = c->jobs ? &c->jobs[k] : NULL,
                                   .part = i};
    }
    if (n)
        qsort(entries, n, sizeof *entries, updates_by_table);
    rc = updates_widen(u, entries, n);
    return rc ? rc : updates_build_jobs(u, entries, n);
}

/* None was dropped since its number was checked. */
static int check_tables(const update *u, const wire_push *m)
{
    int rc = PERSIA_OK;
    table *t;
    for (size_t i = 0; i < m->tables_n && !rc; i++)
        rc = find_table(u->s, m->tables[i].grads.no, &t);
    return rc;
}

/* Whether a part is not applied, for a reason of its own. */
static int updates_is_out(const push_call *c)
{
    return c->stale || c->state != LEDGER_NEW;
}

/* With the gate held: the last look before rows change. */
static int update_before(void *ctx)
{
    update *u = ctx;
    int rc = check_whole(u->s);
    if (!rc && (u->calls[0]->m->group == 0 ||
                atomic_load(&u->s->hold) == SHARD_HELD))
        rc = check_stays(u->s);
    for (uint32_t i = 0; i < u->n && !rc; i++) {
        push_call *c = u->calls[i];
        c->stale = is_stale(u->s, &c->m->caller);
        if (!c->stale)
            c->state = ledger_check(u->s->ledger, &c->key);
        if (updates_is_out(c))
            u->some_are_out = 1;
        else
            rc = check_tables(u, c->m);
    }
    if (!rc && u->some_are_out)
        rc = persia_err_set(PERSIA_ESTALE, "a part is not to be applied");
    return rc;
}

/* The last that may fail. */
static int update_ready(void *ctx)
{
    update *u = ctx;
    return logged_push(u->s, u->calls, u->n, u->refused, &u->logged);
}

static void update_after(void *ctx, int rc)
{
    update *u = ctx;
    err_kept failed;
    const err_kept *why = u->refused ? u->refused : &failed;
    persia_err_keep(&failed, rc);
    u->applied = 1; /* also if a part of it was not: it never is again */
    u->updates = persia_tables_updates(u->s->p);
    persia_tables_note_t(u->s->p, u->t);
    for (uint32_t i = 0; i < u->n; i++) {
        ledger_commit(u->s->ledger, &u->calls[i]->key);
        if (why->code)
            ledger_refuse(u->s->ledger, &u->calls[i]->key, why->code,
                          why->text);
    }
    if (u->step)
        wait_applied(u->s, u->step);
}

/* The same answer for a call and for its copies that arrived meanwhile. */
static void updates_part_answer(shard *s, push_call *c, int rc,
                                const char *text, const wire_push_reply *reply)
{
    const int stale = c->stale;
    const enum ledger_state state = c->state;
    ledger_waiter *copies = c->flight.state == FLIGHT_NONE
                                ? NULL
                                : ledger_end(s->ledger, &c->key);
    for (push_call *one = c; one;) {
        if (stale)
            push_reply_status(s, one, PUSH_STALE_LINEAGE);
        else if (state != LEDGER_NEW)
            push_reply_state(s, one, state);
        else if (rc)
            push_fail(one, rc, text);
        else
            push_reply(s, one, reply);
        one = (push_call *)copies;
        if (one) {
            copies = copies->next;
            atomic_fetch_sub(&s->parked_n, 1);
        }
    }
}

/* Answers the parts that are out, each for itself; how many are left in
 * `calls`.  A part that the ledger has is through, and the others are applied
 * without it.  Any other may be sent again, so they are sent back, too. */
static uint32_t updates_parts_out(shard *s, push_call **calls, uint32_t n)
{
    uint32_t left = 0;
    int open = 0;
    for (uint32_t i = 0; i < n; i++)
        open |= calls[i]->stale || (calls[i]->state != LEDGER_NEW &&
                                    calls[i]->state != LEDGER_DONE);
    for (uint32_t i = 0; i < n; i++)
        if (open || updates_is_out(calls[i]))
            updates_part_answer(s, calls[i], PERSIA_EUNAVAILABLE,
                                "another part of "
                                "this update was not applied: send it again",
                                NULL);
        else
            calls[left++] = calls[i];
    return left;
}

/* Whether this shard may be the only one that refuses the update: for its
 * rows or its memory. */
static int updates_is_refused_here(const update *u, int rc)
{
    return u->s->shards > 1 && !u->applied &&
           (rc == PERSIA_ECAPACITY || rc == PERSIA_ELIMIT ||
            rc == PERSIA_ENOMEM || rc == PERSIA_ENONFINITE);
}

/* What a shard refuses others may apply.  It counts here as an update without
 * ids, so that counts and clocks, and Adam's t with them, move alike. */
static void updates_apply_empty(update *u, const tables_note *note,
                                const err_kept *why)
{
    u->refused = why;
    for (size_t j = 0; j < u->jobs_n; j++)
        u->jobs[j].parts_n = 0;
    (void)persia_tables_push_noted(u->s->p, u->jobs, u->jobs_n, note);
}

void push_answer_all(shard *s, push_call **parts, uint32_t n,
                     const err_kept *why, const wire_push_reply *reply)
{
    const wire_push_reply applied = {.status = PUSH_APPLIED,
                                     .updates = reply->updates};
    for (uint32_t i = 0; i < n; i++)
        updates_part_answer(s, parts[i], why->code, why->text,
                            i ? &applied : reply);
}

/* The counts of a step are in the answer to its first part, so that ranks may
 * add theirs up.  Where the log syncs the answer waits for it. */
static void update_answer_all(update *u, const err_kept *why)
{
    wire_push_reply reply = {.status = PUSH_APPLIED, .updates = u->updates};
    for (size_t j = 0; j < u->jobs_n && !why->code; j++)
        UPDATE_COUNTS_ADD(&reply, &u->jobs[j]);
    late_answer *late = u->late;
    u->late = NULL;
    if (!late || !u->applied) {
        free(late);
        push_answer_all(u->s, u->calls, u->n, why, &reply);
        return;
    }
    late->end = u->logged;
    late->why = *why;
    late->reply = reply;
    late_keep(u->s, late);
}

/* None of an update was applied. */
static void updates_parts_failed(shard *s, uint64_t step, uint64_t group)
{
    if (step)
        wait_failed(s);
    groups_failed(s, group);
}

/* 0: nothing was done, for some parts are out. */
static int updates_apply_parts(shard *s, push_call **calls, uint32_t n)
{
    optim_args few[FEW];
    update u = {.s = s, .calls = calls, .n = n, .step = calls[0]->m->step,
                .few = few};
    tables_note note = {.before = update_before, .ready = update_ready,
                        .after = update_after, .ctx = &u,
                        .skips = n == 1 && calls[0]->m->skips};
    err_kept why;
    int rc = late_make(s, calls, n, &u.late);
    if (!rc)
        rc = updates_build(&u);
    if (!rc)
        rc = persia_tables_push_noted(s->p, u.jobs, u.jobs_n, &note);
    const int whole = !u.some_are_out;
    const int here = rc && whole && updates_is_refused_here(&u, rc);
    if (here)
        (void)persia_err_set(
            rc, "%.900s (other shards may have applied their part)",
            persia_err_text());
    persia_err_keep(&why, rc);
    if (here)
        updates_apply_empty(&u, &note, &why);
    persia_mem_pool_give(u.wide);
    if (!whole) {
        free(u.late);
        persia_wire_memory_free(&u.memory);
        return 0;
    }
    if (!u.applied)
        updates_parts_failed(s, u.step, calls[0]->m->group);
    if (!rc)
        atomic_fetch_add(&s->pushes, n);
    update_answer_all(&u, &why);
    persia_wire_memory_free(&u.memory);
    return 1;
}

void push_apply(shard *s, push_call **calls, uint32_t n)
{
    const uint64_t step = calls[0]->m->step, group = calls[0]->m->group;
    do
        n = updates_parts_out(s, calls, n);
    while (n && !updates_apply_parts(s, calls, n));
    if (!n)
        updates_parts_failed(s, step, group);
}

/* ---- the call ----------------------------------------------------------- */

static void updates_apply_and_go_on(shard *s, push_call *c)
{
    push_apply(s, &c, 1);
    if (atomic_load(&s->parked_n)) /* pulls may wait for it */
        wait_go_on(s);
}

/* Applies an update that is in flight, or says why it is not. */
static void updates_apply_or_answer(shard *s, push_call *c,
                                    enum ledger_state state)
{
    if (state == LEDGER_NEW)
        updates_apply_and_go_on(s, c);
    else
        push_reply_state(s, c, state);
}

/* Another copy is in flight: others may answer and free this one as soon as
 * it is parked. */
static void updates_park_copy(shard *s, const push_call *copy)
{
    push_call *c = push_keep(copy);
    if (!c)
        return;
    if (!wait_room(s, PARKED_MAX)) {
        push_fail(c, PERSIA_ELIMIT, "too many requests wait");
        return;
    }
    enum ledger_state state = ledger_begin(s->ledger, &c->key, &c->flight,
                                           &c->waiter);
    if (state == LEDGER_BUSY)
        return;
    atomic_fetch_sub(&s->parked_n, 1);
    updates_apply_or_answer(s, c, state);
}

static void updates_apply_alone(shard *s, push_call *c)
{
    /* Its answer may wait. */
    if (s->log && persia_log_syncs(s->log) && !(c = push_keep(c)))
        return;
    enum ledger_state state = ledger_begin(s->ledger, &c->key, &c->flight,
                                           NULL);
    if (state == LEDGER_BUSY)
        updates_park_copy(s, c);
    else
        updates_apply_or_answer(s, c, state);
}

void push_run(shard *s, const shard_call *call, const shard_push *a)
{
    const wire_push *m = a->m;
    push_call c = {.call = *call, .m = m, .jobs = a->jobs, .raw = a->raw,
                   .raw_n = a->raw_n};
    int rc = push_check(s, a);
    if (!rc && !m->group)
        rc = check_stays(s);
    c.key = (ledger_key){m->stream, m->number, m->settled,
                         owner_of(&m->caller), m->group ? m->group : m->step};
    if (rc)
        push_fail(&c, rc, persia_err_text());
    else if (is_stale(s, &m->caller))
        push_reply_status(s, &c, PUSH_STALE_LINEAGE);
    else if (m->group)
        wait_group(s, &c);
    else if (m->step)
        wait_part(s, &c);
    else
        updates_apply_alone(s, &c);
}
