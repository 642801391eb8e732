/* push.c: applies gradients.  See push.h for the way of a push.
 *
 * Rows with a hint are fetched while gradients are summed.  Then a stripe's
 * distinct ids go through three stages in blocks, each a block behind the
 * one before: fetch the row at the hinted slot (or the bucket); match tags
 * and fetch the row; then check it, or search, or make it, and run the
 * optimizer's kernel over the block.
 *
 * Order of locks: gates by address, full locks by address, one stripe.
 */
#include "table/push.h"

#include <string.h>

enum {
    BLOCK = 32,
    STAGES = 4,
    /* Rows fetched ahead of their lock must still be in the cache then. */
    FETCH_BYTES = 256 << 10
};

/* The distinct ids of one stripe in one push, with summed gradients. */
typedef struct group {
    size_t n;
    uint64_t *id;   /* [n] */
    uint64_t *hash; /* [n] */
    uint32_t *hint; /* [n] */
    float *grad;    /* [n, dim] */
    const char *base; /* hinted rows to fetch: only an address, it may be */
    uint32_t used;    /* out of date */
    size_t stride;
} group;

INLINE_HOT void grad_first(float *restrict to, const float *restrict g,
                              float scale, uint32_t dim)
{
    for (uint32_t j = 0; j < dim; j++)
        to[j] = scale * g[j];
}

INLINE_HOT void grad_add(float *restrict to, const float *restrict g,
                            float scale, uint32_t dim)
{
    for (uint32_t j = 0; j < dim; j++)
        to[j] += scale * g[j];
}

/* Adds the run of one chunk to the group; `entry` is a hash table of
 * group positions + 1, 0: empty. */
INLINE_HOT void group_run(group *g, const push_part *part,
                             const push_chunk *c, uint32_t from, uint32_t to,
                             uint32_t *entry, uint32_t mask, uint32_t dim)
{
    enum { AHEAD = 8 };
    const uint64_t *ids = part->ids + c->first;

    for (uint32_t k = from; k < to; k++) {
        size_t i = c->first + c->order[k];
        uint64_t id = ids[c->order[k]], hash = c->hash[k];
        const float *grad =
            part->grad + (part->bag ? part->bag[i] : i) * part->stride;
        float scale = part->scale ? part->scale[i] : 1;
        uint32_t at = (uint32_t)(hash >> 32) & mask;

        if (k + AHEAD < to) {
            size_t next = c->first + c->order[k + AHEAD];
            const float *ahead =
                part->grad +
                (part->bag ? part->bag[next] : next) * part->stride;
            for (uint32_t j = 0; j < dim; j += 16)
                __builtin_prefetch(ahead + j);
        }
        while (entry[at] && g->id[entry[at] - 1] != id)
            at = (at + 1) & mask;
        if (entry[at]) {
            grad_add(g->grad + (entry[at] - 1) * (size_t)dim, grad, scale,
                     dim);
            continue;
        }
        grad_first(g->grad + g->n * (size_t)dim, grad, scale, dim);
        g->id[g->n] = id;
        g->hash[g->n] = hash;
        g->hint[g->n] = part->rows ? part->rows[i] : ROW_NONE;
        if (g->hint[g->n] < g->used)
            row_prefetch(g->base + g->hint[g->n] * g->stride, g->stride);
        entry[at] = (uint32_t)++g->n;
    }
}

#define GROUP_RUN(name, width)                                                \
    HOT static void name(group *g, const push_part *part,                     \
                         const push_chunk *c, uint32_t from, uint32_t to,     \
                         uint32_t *entry, uint32_t mask, uint32_t dim)        \
    {                                                                         \
        (void)dim;                                                            \
        group_run(g, part, c, from, to, entry, mask, width);                  \
    }
GROUP_RUN(group_run_16, 16)
GROUP_RUN(group_run_64, 64)
GROUP_RUN(group_run_any, dim)

static int group_make(const push_plan *plan, size_t j, uint32_t stripe,
                      group *g)
{
    const push_job *job = &plan->jobs[j];
    const uint32_t dim = job->t->config.dim;
    size_t n = 0, room = 16;
    uint32_t *entry;
    char *p;
    void *scratch;
    int rc;

    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++)
        n += (size_t)(plan->chunks[c].start[stripe + 1] -
                      plan->chunks[c].start[stripe]);
    if (!n)
        return PERSIA_OK;
    while (room < 2 * n)
        room *= 2;
    rc = scratch_need(SCRATCH_GROUP,
                      n * (2 * sizeof(uint64_t) + sizeof(uint32_t)) +
                          room * sizeof *entry, &scratch);
    if (rc)
        return rc;
    p = scratch;
    g->id = (void *)p;
    g->hash = (void *)(p + n * 8);
    g->hint = (void *)(p + n * 16);
    entry = (void *)(p + n * 20);
    rc = scratch_need(SCRATCH_SUM, n * dim * sizeof(float), &scratch);
    if (rc)
        return rc;
    g->grad = scratch;
    memset(entry, 0, room * sizeof *entry);
    if (n * g->stride > FETCH_BYTES)
        g->used = 0;
    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++) {
        const push_chunk *chunk = &plan->chunks[c];
        (dim == 16   ? group_run_16
         : dim == 64 ? group_run_64
                     : group_run_any)(
            g, &job->parts[chunk->part], chunk, chunk->start[stripe],
            chunk->start[stripe + 1], entry, (uint32_t)room - 1, dim);
    }
    return PERSIA_OK;
}

/* What happened in one stripe; added to the job's counters at its end. */
typedef struct apply_counts {
    uint64_t created, refused, evicted, nonfinite, touched;
} apply_counts;

/* The row of group entry d: found at `slot`, by a search, or made.  `slot`
 * becomes SLOT_NONE where the id gets no row. */
static int row_resolve(table *t, stripe *s, const group *g, size_t d,
                       uint64_t batch, uint32_t clock, int64_t *slot,
                       apply_counts *counts)
{
    uint32_t made, evicted;
    int rc;

    if (*slot >= 0) {
        const char *row = stripe_row(t, s, (uint32_t)*slot);
        if (row_id(row) == g->id[d] && row_clock(row))
            return PERSIA_OK;
    }
    *slot = row_index_find(&s->index, stripe_rows(t, s), g->hash[d], g->id[d]);
    if (*slot >= 0)
        return PERSIA_OK;
    if (!push_admits(t, g->hash[d], batch)) {
        counts->refused++;
        return PERSIA_OK;
    }
    rc = stripe_add_locked(t, s, g->hash[d], g->id[d], clock, &made,
                           &evicted);
    if (rc == PERSIA_ECAPACITY) { /* all rows are of this very push */
        counts->refused++;
        return PERSIA_OK;
    }
    if (rc)
        return rc;
    counts->created++;
    counts->evicted += evicted;
    *slot = made;
    return PERSIA_OK;
}

static int apply_block(table *t, stripe *s, const push_job *job,
                       const optim_plan *optim, const group *g, size_t at,
                       size_t n, int64_t *slots, uint32_t clock,
                       apply_counts *counts)
{
    const uint32_t dim = t->config.dim;
    float *grads = g->grad + at * (size_t)dim;
    char *rows[BLOCK];
    size_t live = 0;
    int rc;

    for (size_t i = 0; i < n; i++) {
        if (!floats_finite(grads + i * dim, dim)) {
            counts->nonfinite++;
            slots[i] = SLOT_NONE;
            continue;
        }
        rc = row_resolve(t, s, g, at + i, job->batch, clock, &slots[i],
                         counts);
        if (rc)
            return rc;
        if (slots[i] < 0)
            continue;
        rc = stripe_touch_locked(t, s, (uint32_t)slots[i]);
        if (rc)
            return rc;
        row_set_clock(stripe_row(t, s, (uint32_t)slots[i]), clock);
    }
    for (size_t i = 0; i < n; i++) { /* after the last growth of the arena */
        if (slots[i] < 0)
            continue;
        if (live != i)
            memmove(grads + live * dim, grads + i * dim, dim * sizeof *grads);
        rows[live++] = stripe_row(t, s, (uint32_t)slots[i]);
    }
    optim->kernel(optim, live, rows, grads);
    counts->touched += live;
    return PERSIA_OK;
}

static int apply_group(table *t, stripe *s, const push_job *job,
                       const optim_plan *optim, const group *g,
                       uint32_t clock, apply_counts *counts)
{
    const bucket *home[STAGES][BLOCK];
    int64_t slots[STAGES][BLOCK];
    const size_t blocks = (g->n + BLOCK - 1) / BLOCK;
    int rc;

    for (size_t b = 0; b < blocks + 2; b++) {
        if (b < blocks) {
            size_t at = b * BLOCK, n = g->n - at < BLOCK ? g->n - at : BLOCK;
            for (size_t i = 0; i < n; i++) {
                uint32_t hint = g->hint[at + i];
                if (hint < s->used) {
                    row_prefetch(stripe_row(t, s, hint), t->stride);
                    slots[b % STAGES][i] = hint;
                } else {
                    home[b % STAGES][i] =
                        row_index_home(&s->index, g->hash[at + i]);
                    __builtin_prefetch(home[b % STAGES][i]);
                    slots[b % STAGES][i] = SLOT_SEARCH;
                }
            }
        }
        if (b >= 2) { /* before stage 2: this may free a bucket */
            size_t k = b - 2, at = k * BLOCK;
            rc = apply_block(t, s, job, optim, g, at,
                             g->n - at < BLOCK ? g->n - at : BLOCK,
                             slots[k % STAGES], clock, counts);
            if (rc)
                return rc;
        }
        if (b >= 1 && b - 1 < blocks) {
            size_t k = b - 1, at = k * BLOCK;
            size_t n = g->n - at < BLOCK ? g->n - at : BLOCK;
            for (size_t i = 0; i < n; i++) {
                int64_t *slot = &slots[k % STAGES][i];
                if (*slot != SLOT_SEARCH)
                    continue;
                /* the bucket anew: a page may have grown since stage 1 */
                *slot = bucket_likely(
                    row_index_home(&s->index, g->hash[at + i]),
                    g->hash[at + i]);
                if (*slot >= 0)
                    row_prefetch(stripe_row(t, s, (uint32_t)*slot),
                                 t->stride);
            }
        }
    }
    return PERSIA_OK;
}

/* One (job, stripe) of a push: a sched_loop_fn. */
static int apply_stripe(void *ctx, size_t item)
{
    const push_plan *plan = ctx;
    apply_counts counts = { 0 };
    size_t low = 0, high = plan->jobs_n;
    group g;
    int rc;

    while (high - low > 1) { /* the job of this item */
        size_t mid = (low + high) / 2;
        if (plan->first_stripe[mid] <= item)
            low = mid;
        else
            high = mid;
    }
    push_job *job = &plan->jobs[low];
    table *t = job->t;
    uint32_t i = (uint32_t)(item - plan->first_stripe[low]);
    stripe *s = &t->stripe[i];

    pthread_rwlock_rdlock(&s->lock);
    g = (group){ .base = s->arena.base, .used = s->used,
                 .stride = t->stride };
    pthread_rwlock_unlock(&s->lock);
    rc = group_make(plan, low, i, &g);
    if (rc || !g.n)
        return rc;
    pthread_rwlock_wrlock(&s->lock);
    rc = apply_group(t, s, job, &plan->optim[low], &g,
                     clock_short(plan->clock[low]), &counts);
    pthread_rwlock_unlock(&s->lock);
    __atomic_fetch_add(&job->created, counts.created, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->refused, counts.refused, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->evicted, counts.evicted, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->nonfinite, counts.nonfinite, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->touched, counts.touched, __ATOMIC_RELAXED);
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
        .noise_clock = plan->clock[j]
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
    size_t full = 0;
    int rc = PERSIA_OK;

    for (size_t j = 0; j < plan->jobs_n; j++)
        full += (size_t)push_needs_reserve(&plan->jobs[j]);
    if (full) { /* one such push at a time, so that the count holds */
        for (size_t j = 0; j < plan->jobs_n; j++)
            pthread_mutex_lock(&plan->locked[j]->full_lock);
        for (size_t j = 0; j < plan->jobs_n && !rc; j++)
            rc = push_reserve(plan, j);
    }
    if (!rc) {
        for (size_t j = 0; j < plan->jobs_n; j++)
            job_start(plan, j);
        rc = sched_for(s, plan->first_stripe[plan->jobs_n], apply_stripe,
                       plan);
        for (size_t j = 0; j < plan->jobs_n; j++)
            job_finish(&plan->jobs[j]);
    }
    if (full)
        for (size_t j = 0; j < plan->jobs_n; j++)
            pthread_mutex_unlock(&plan->locked[j]->full_lock);
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
    if (rc)
        return rc;
    for (size_t j = 0; j < jobs_n; j++)
        pthread_rwlock_rdlock(&plan.locked[j]->gate);
    rc = push_gated(s, &plan);
    for (size_t j = 0; j < jobs_n; j++)
        pthread_rwlock_unlock(&plan.locked[j]->gate);
    return rc;
}
