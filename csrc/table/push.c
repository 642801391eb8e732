/* push.c: applies gradients.  See push.h for the way of a push.
 *
 * Rows with a hint are fetched while gradients are summed.  Then a stripe's
 * distinct ids go through three stages in blocks, each a block behind the
 * one before: fetch the row at the hinted slot (or the bucket); match tags
 * and fetch the row; then check it, or make it, and run the optimizer's
 * kernel over the block.  Ids that their home bucket does not settle come
 * last.
 *
 * Order of locks: gates by address, full locks by address, the memory limit,
 * one stripe, its blocks.
 */
#include "table/push.h"

#include "simd/simd.h"

#include <string.h>

enum {
    BLOCK = 32,
    STAGES = 4,
    /* Rows fetched ahead of their lock must still be in the cache then. */
    FETCH_BYTES = 256 << 10
};

/* A gradient of an id that came before. */
typedef struct again {
    const float *grad;
    uint32_t entry;
    float scale;
} again;

/* The distinct ids of one stripe in one push, with summed gradients. */
typedef struct group {
    size_t n;
    uint64_t *id;   /* [n] */
    uint64_t *hash; /* [n] */
    uint32_t *hint; /* [n] */
    uint32_t *late; /* [n] entries that take a search */
    size_t late_n;
    const float **grad; /* [n] where its gradient lies: with the caller, */
    float *sums;        /* or here, where it is a sum or scaled */
    size_t sums_n;
    again *again; /* [again_n], in the order in which they came */
    size_t again_n;
    const char *base; /* hinted rows to fetch: only an address, it may be */
    uint32_t used;    /* out of date */
    size_t stride;
} group;

/* Whether a gradient lies with the caller, as it came. */
static inline int group_is_callers(const group *g, const float *grad,
                                   uint32_t dim)
{
    return grad < g->sums || grad >= g->sums + g->sums_n * dim;
}

/* Adds the ids of one chunk's run to the group; `entry` is a hash table of
 * group positions + 1, 0: empty.  What is read in the loop is copied before:
 * for the compiler each write might change it. */
INLINE_HOT void group_run(group *g, const push_part *part,
                          const push_chunk *c, uint32_t from, uint32_t to,
                          uint32_t *entry, uint32_t mask, uint32_t dim)
{
    const group own = *g;
    const push_part of = *part;
    const uint64_t *const hashes = c->hash;
    const uint16_t *const order = c->order;
    const size_t first = c->first;
    size_t n = own.n, again_n = own.again_n, sums_n = own.sums_n;

    for (uint32_t k = from; k < to; k++) {
        size_t i = first + order[k];
        uint64_t id = of.ids[i], hash = hashes[k];
        const float *grad = of.grad + (of.bag ? of.bag[i] : i) * of.stride;
        float scale = of.scale ? of.scale[i] : 1;
        uint32_t hint = of.rows ? of.rows[i] : ROW_NONE;
        uint32_t at = (uint32_t)(hash >> 32) & mask;

        if (hint < own.used)
            row_prefetch(own.base + hint * own.stride, own.stride);
        while (entry[at] && own.id[entry[at] - 1] != id)
            at = (at + 1) & mask;
        if (entry[at]) {
            own.again[again_n++] = (again){ grad, entry[at] - 1, scale };
            continue;
        }
        if (of.scale) {
            float *scaled = own.sums + sums_n++ * dim;
            floats_add(scaled, grad, scale, 1, dim);
            grad = scaled;
        }
        own.grad[n] = grad;
        own.id[n] = id;
        own.hash[n] = hash;
        own.hint[n] = hint;
        entry[at] = (uint32_t)++n;
    }
    g->n = n;
    g->again_n = again_n;
    g->sums_n = sums_n;
}

/* The same for ids that are known to be distinct: no hash table. */
HOT static void group_run_distinct(group *g, const push_part *part,
                                   const push_chunk *c, uint32_t from,
                                   uint32_t to, uint32_t dim)
{
    const group own = *g;
    const push_part of = *part;
    const uint64_t *const hashes = c->hash;
    const uint16_t *const order = c->order;
    size_t n = own.n;

    for (uint32_t k = from; k < to; k++, n++) {
        size_t i = c->first + order[k];
        uint32_t hint = of.rows ? of.rows[i] : ROW_NONE;
        if (hint < own.used)
            row_prefetch(own.base + hint * own.stride, own.stride);
        own.grad[n] = of.grad + (of.bag ? of.bag[i] : i) * of.stride;
        own.id[n] = of.ids[i];
        own.hash[n] = hashes[k];
        own.hint[n] = hint;
        if (of.scale) {
            float *scaled = own.sums + g->sums_n++ * dim;
            floats_add(scaled, own.grad[n], of.scale[i], 1, dim);
            own.grad[n] = scaled;
        }
    }
    g->n = n;
}

INLINE_HOT void grad_prefetch(const float *grad, uint32_t dim)
{
    for (uint32_t j = 0; j < dim; j += 16)
        __builtin_prefetch(grad + j);
}

/* Adds the gradients of ids that came again, in their order. */
INLINE_HOT void group_sum_again(group *g, uint32_t dim)
{
    enum { AHEAD = 12 };

    for (size_t k = 0; k < g->again_n; k++) {
        const again *a = &g->again[k];
        const float **sum = &g->grad[a->entry];
        if (k + AHEAD < g->again_n) {
            grad_prefetch(a[AHEAD].grad, dim);
            grad_prefetch(g->grad[a[AHEAD].entry], dim);
        }
        if (group_is_callers(g, *sum, dim)) {
            float *own = g->sums + g->sums_n++ * dim;
            floats_add(own, *sum, 1, 1, dim);
            *sum = own;
        }
        floats_add(g->sums + (*sum - g->sums), a->grad, a->scale, 0, dim);
    }
}

#define GROUP_RUN(name, width)                                                \
    HOT static void name(group *g, const push_part *part,                     \
                         const push_chunk *c, uint32_t from, uint32_t to,     \
                         uint32_t *entry, uint32_t mask, uint32_t dim)        \
    {                                                                         \
        (void)dim;                                                            \
        group_run(g, part, c, from, to, entry, mask, width);                  \
    }                                                                         \
    HOT static void name##_again(group *g, uint32_t dim)                      \
    {                                                                         \
        (void)dim;                                                            \
        group_sum_again(g, width);                                            \
    }
GROUP_RUN(group_run_16, 16)
GROUP_RUN(group_run_64, 64)
GROUP_RUN(group_run_any, dim)

size_t push_group_bytes(size_t n, size_t *entries)
{
    *entries = 16;
    while (*entries < 2 * n)
        *entries *= 2;
    return n * (2 * sizeof(uint64_t) + sizeof(float *) +
                2 * sizeof(uint32_t) + sizeof(again)) +
           *entries * sizeof(uint32_t);
}

static int group_make(const push_plan *plan, size_t j, uint32_t stripe,
                      group *g)
{
    const push_job *job = &plan->jobs[j];
    const uint32_t dim = job->t->config.dim;
    size_t n = 0, room;
    uint32_t *entry;
    char *p;
    void *scratch;
    int rc;

    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++)
        n += (size_t)(plan->chunks[c].start[stripe + 1] -
                      plan->chunks[c].start[stripe]);
    if (!n)
        return PERSIA_OK;
    rc = scratch_need(SCRATCH_GROUP, push_group_bytes(n, &room), &scratch);
    if (rc)
        return rc;
    p = scratch;
    g->id = (void *)p;
    g->hash = (void *)(p + n * 8);
    g->grad = (void *)(p + n * 16);
    g->hint = (void *)(p + n * 24);
    g->late = (void *)(p + n * 28);
    g->again = (void *)(p + n * 32);
    entry = (void *)(p + n * 48);
    rc = scratch_need(SCRATCH_SUM, n * dim * sizeof(float), &scratch);
    if (rc)
        return rc;
    g->sums = scratch;
    if (!job->distinct)
        memset(entry, 0, room * sizeof *entry);
    if (n * g->stride > FETCH_BYTES)
        g->used = 0;
    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++) {
        const push_chunk *chunk = &plan->chunks[c];
        if (job->distinct) {
            group_run_distinct(g, &job->parts[chunk->part], chunk,
                               chunk->start[stripe],
                               chunk->start[stripe + 1], dim);
            continue;
        }
        (dim == 16   ? group_run_16
         : dim == 64 ? group_run_64
                     : group_run_any)(
            g, &job->parts[chunk->part], chunk, chunk->start[stripe],
            chunk->start[stripe + 1], entry, (uint32_t)room - 1, dim);
    }
    (dim == 16   ? group_run_16_again
     : dim == 64 ? group_run_64_again
                 : group_run_any_again)(g, dim);
    return PERSIA_OK;
}

/* What happened in one stripe; added to the job's counters at its end. */
typedef struct apply_counts {
    uint64_t created, refused, evicted, nonfinite, touched;
} apply_counts;

/* What the stages of a stripe share. */
typedef struct apply {
    table *t;
    stripe *s;
    const push_job *job;
    const optim_plan *optim;
    group *g;
    uint32_t clock;
    int swept;     /* no gradient as it came holds NaN or Inf */
    int make_last; /* near eviction: first claim the rows that are there */
    apply_counts counts;
} apply;

/* A row for entry d, which has none; `slot` stays SLOT_NONE where it gets
 * none. */
static int row_make(apply *a, size_t d, int64_t *slot)
{
    uint32_t made, evicted;
    int rc;

    *slot = SLOT_NONE;
    if (a->job->distinct) { /* so the caller says; a row is made once */
        *slot = row_index_find(&a->s->index, stripe_rows(a->t, a->s),
                               a->g->hash[d], a->g->id[d]);
        if (*slot >= 0)
            return PERSIA_OK;
        *slot = SLOT_NONE;
    }
    if (!push_admits(a->t, a->g->hash[d], a->job->draw)) {
        a->counts.refused++;
        return PERSIA_OK;
    }
    rc = stripe_add_locked(a->t, a->s, a->g->hash[d], a->g->id[d], a->clock,
                           a->clock, &made, &evicted);
    if (rc == PERSIA_ECAPACITY) { /* all rows are of this very push */
        a->counts.refused++;
        return PERSIA_OK;
    }
    if (rc)
        return rc;
    a->counts.created++;
    a->counts.evicted += evicted;
    *slot = made;
    return PERSIA_OK;
}

/* Whether the gradient of an entry is known to be finite. */
static inline int entry_checked(const apply *a, const float *grad)
{
    return a->swept && group_is_callers(a->g, grad, a->t->config.dim);
}

/* Entries [at, at + n); slots as guessed by stages 1 and 2. */
static int apply_block(apply *a, size_t at, size_t n, const int64_t *slots)
{
    const uint64_t *const id = a->g->id + at;
    const float *const *const grad = a->g->grad + at;
    const size_t stride = a->t->stride;
    const uint32_t clock = a->clock;
    const int make_last = a->make_last;
    char *base = a->s->arena.base;
    const float *grads[BLOCK];
    char *rows[BLOCK];
    size_t live = 0;

    for (size_t i = 0; i < n; i++) {
        int64_t slot = slots[i];
        char *row = slot >= 0 ? base + (size_t)slot * stride : NULL;
        if (row ? row_id(row) != id[i] || !row_clock(row)
                : slot == SLOT_SEARCH || make_last) {
            a->g->late[a->g->late_n++] = (uint32_t)(at + i);
            continue;
        }
        if (!entry_checked(a, grad[i]) &&
            !floats_finite(grad[i], a->t->config.dim)) {
            a->counts.nonfinite++;
            continue;
        }
        if (!row) {
            int rc = row_make(a, at + i, &slot);
            if (rc)
                return rc;
            char *const moved = a->s->arena.base; /* it may have */
            for (size_t k = 0; k < live && moved != base; k++)
                rows[k] = moved + (rows[k] - base);
            base = moved;
            if (slot < 0)
                continue;
            row = base + (size_t)slot * stride;
        }
        stripe_touch_locked(a->t, a->s, (uint32_t)slot);
        row_set_clock(row, clock);
        grads[live] = grad[i];
        rows[live++] = row;
    }
    a->optim->kernel(a->optim, live, rows, grads);
    a->counts.touched += live;
    return PERSIA_OK;
}

/* Stage 1 of a block: fetches the gradient and the row at the hint, if it was
 * not fetched before, or the home bucket. */
static void stage_fetch(const apply *a, size_t at, size_t n, int64_t *slots)
{
    const stripe *s = a->s;

    for (size_t i = 0; i < n; i++) {
        uint32_t hint = a->g->hint[at + i];
        grad_prefetch(a->g->grad[at + i], a->t->config.dim);
        if (hint < s->used) {
            if (hint >= a->g->used)
                row_prefetch(stripe_row(a->t, s, hint), a->t->stride);
            slots[i] = hint;
        } else {
            __builtin_prefetch(row_index_home(&s->index, a->g->hash[at + i]));
            slots[i] = SLOT_SEARCH;
        }
    }
}

/* Stage 2: what the bucket says; it is computed anew, for a page may have
 * grown since stage 1. */
static void stage_match(const apply *a, size_t at, size_t n, int64_t *slots)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t hash = a->g->hash[at + i];
        if (slots[i] != SLOT_SEARCH)
            continue;
        slots[i] = bucket_likely(row_index_home(&a->s->index, hash), hash);
        if (slots[i] >= 0)
            row_prefetch(stripe_row(a->t, a->s, (uint32_t)slots[i]),
                         a->t->stride);
    }
}

/* The entries that take a search; then those without a row. */
static int apply_late(apply *a)
{
    group *g = a->g;
    size_t n = g->late_n, absent = 0;
    int64_t slot;
    int rc = PERSIA_OK;

    for (size_t k = 0; k < n; k++)
        stripe_fetch_candidates(a->t, a->s, g->hash[g->late[k]],
                                a->t->stride);
    for (size_t k = 0; k < n && !rc; k++) {
        const size_t d = g->late[k];
        slot = row_index_find(&a->s->index, stripe_rows(a->t, a->s),
                              g->hash[d], g->id[d]);
        if (slot >= 0)
            rc = apply_block(a, d, 1, &slot);
        else
            g->late[absent++] = (uint32_t)d;
    }
    a->make_last = 0;
    for (size_t k = 0; k < absent && !rc; k++) {
        slot = SLOT_NONE;
        rc = apply_block(a, g->late[k], 1, &slot);
    }
    return rc;
}

/* Entries a block: what two blocks fetch ahead must fit the first cache. */
static size_t block_size(const apply *a)
{
    size_t bytes = a->t->stride + a->t->config.dim * sizeof(float);

    return bytes <= 320 ? BLOCK : bytes <= 1280 ? BLOCK / 2 : BLOCK / 8;
}

static int apply_group(apply *a)
{
    int64_t slots[STAGES][BLOCK];
    const size_t n = a->g->n, block = block_size(a);
    int rc;

    for (size_t at = 0, turn = 0; at < n + 2 * block; at += block, turn++) {
        size_t before = at - block;
        if (at < n)
            stage_fetch(a, at, n - at < block ? n - at : block,
                        slots[turn % STAGES]);
        if (turn >= 2) { /* before stage 2: it may change the index */
            size_t k = at - 2 * block;
            rc = apply_block(a, k, n - k < block ? n - k : block,
                             slots[(turn - 2) % STAGES]);
            if (rc)
                return rc;
        }
        if (turn >= 1 && before < n)
            stage_match(a, before, n - before < block ? n - before : block,
                        slots[(turn - 1) % STAGES]);
    }
    return apply_late(a);
}

/* Whether the plan or its caller has looked at every gradient. */
static int job_swept(const push_job *job)
{
    if (job->t->config.nonfinite == NONFINITE_RAISE)
        return 1;
    for (size_t k = 0; k < job->parts_n; k++)
        if (!job->parts[k].finite)
            return 0;
    return 1;
}

/* One (job, stripe) of a push: a sched_loop_fn. */
static int apply_stripe(void *ctx, size_t item)
{
    const push_plan *plan = ctx;
    const size_t j = sched_range(plan->first_stripe, plan->jobs_n, item);
    uint32_t used;
    group g;
    int rc;

    push_job *job = &plan->jobs[j];
    table *t = job->t;
    uint32_t i = (uint32_t)(item - plan->first_stripe[j]);
    stripe *s = &t->stripe[i];

    pthread_rwlock_rdlock(&s->lock);
    g = (group){ .base = s->arena.base, .used = s->used,
                 .stride = t->stride };
    pthread_rwlock_unlock(&s->lock);
    rc = group_make(plan, j, i, &g);
    if (rc)
        plan->late[item] = 1;
    if (rc || !g.n)
        return PERSIA_OK;
    apply a = { t, s, job, &plan->optim[j], &g,
                clock_short(plan->clock[j]), job_swept(job), 0, { 0 } };
    pthread_rwlock_wrlock(&s->lock);
    /* with all that other stripes and pushes may make meanwhile */
    a.make_last = t->config.capacity &&
                  atomic_load(&t->rows) + atomic_load(&t->pending) + g.n >
                      t->config.capacity;
    used = s->used;
    rc = apply_group(&a);
    plan->held[item] -= s->used - used;
    stripe_count_locked(t, s);
    pthread_rwlock_unlock(&s->lock);
    __atomic_fetch_add(&job->created, a.counts.created, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->refused, a.counts.refused, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->evicted, a.counts.evicted, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->nonfinite, a.counts.nonfinite, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->touched, a.counts.touched, __ATOMIC_RELAXED);
    return rc;
}

static void job_start(push_plan *plan, size_t j)
{
    push_job *job = &plan->jobs[j];
    table *t = job->t;
    optim_plan *optim = &plan->optim[j];

    job->created = job->refused = job->evicted = 0;
    job->nonfinite = job->touched = 0;
    plan->clock[j] = atomic_fetch_add(&t->pushes, 1) + 1;
    *optim = (optim_plan){
        .dim = t->config.dim,
        .vector = ROW_VECTOR,
        .state = t->state_offset,
        .noise_key = { t->noise_key[0], t->noise_key[1] },
        .noise_draw = job->draw
    };
    optim_prepare(optim, job->optim, t->config.dtype, (int)t->config.momentum);
}

static void job_finish(push_job *job)
{
    table *t = job->t;

    atomic_fetch_add(&t->created, job->created);
    atomic_fetch_add(&t->refused, job->refused);
    atomic_fetch_add(&t->evicted, job->evicted);
    atomic_fetch_add(&t->nonfinite, job->nonfinite);
}

/* All jobs, with their tables' gates held shared. */
static int push_gated(sched *s, push_plan *plan)
{
    const size_t items = plan->first_stripe[plan->jobs_n];
    room *r = &plan->room;
    int rc = room_take(r, push_reserve, plan);

    if (rc)
        return rc;
    for (size_t j = 0; j < plan->jobs_n; j++)
        job_start(plan, j);
    rc = sched_for(s, items, apply_stripe, plan);
    for (size_t i = 0; i < items; i++)
        if (plan->late[i] && !rc)
            rc = apply_stripe(plan, i);
    for (size_t j = 0; j < plan->jobs_n; j++)
        job_finish(&plan->jobs[j]);
    room_leave(r);
    return rc;
}

int table_push(sched *s, push_job *jobs, size_t jobs_n)
{
    push_plan plan;
    int rc = fork_check("table_push");

    if (rc)
        return rc;
    rc = push_plan_make(&plan, jobs, jobs_n);
    if (rc)
        return rc;
    rc = sched_for(s, plan.chunks_n, push_plan_chunk, &plan);
    if (!rc && jobs_n)
        rc = push_plan_end(&plan);
    if (rc)
        return rc;
    for (size_t j = 0; j < jobs_n; j++)
        pthread_rwlock_rdlock(&plan.room.claims[j].t->gate);
    rc = push_gated(s, &plan);
    for (size_t j = 0; j < jobs_n; j++)
        pthread_rwlock_unlock(&plan.room.claims[j].t->gate);
    return rc;
}
