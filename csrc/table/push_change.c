/* push_change.c: applies gradients.  See push.h for the way of a push.
 *
 * Rows with a hint are fetched while gradients are summed.  Then a stripe's
 * distinct ids go through three stages in blocks, each a block behind the one
 * before: fetch the row at the hinted slot (or the bucket); match tags and
 * fetch the row; then check it, or make it, and run the optimizer's kernel
 * over the block.  Ids that their home bucket does not settle are done last.
 *
 * All that this takes was reserved: it calls no allocator and cannot fail.
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

/* A gradient of an id that has one already. */
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
    uint32_t *late; /* [n] entries that take a search, and from the end on */
    size_t late_n, absent_n; /* those without a row */
    const float **grad; /* [n] where its gradient lies: with the caller, */
    float *sums;        /* or here, where it is a sum or scaled */
    size_t sums_n;
    again *again; /* [again_n], in the order of the gradients */
    size_t again_n;
    const char *base; /* hinted rows to fetch: only an address, it may be */
    uint32_t used;    /* out of date */
    size_t stride;
} group;

/* Whether a gradient lies with the caller, as it was given. */
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
        uint32_t at = place_home(hash, mask + 1);

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

INLINE_HOT void push_change_grad_prefetch(const float *grad, uint32_t dim)
{
    for (uint32_t j = 0; j < dim; j += 16)
        __builtin_prefetch(grad + j);
}

/* Adds the gradients of repeated ids, in their order. */
INLINE_HOT void group_sum_again(group *g, uint32_t dim)
{
    enum { AHEAD = 12 };

    for (size_t k = 0; k < g->again_n; k++) {
        const again *a = &g->again[k];
        const float **sum = &g->grad[a->entry];
        if (k + AHEAD < g->again_n) {
            push_change_grad_prefetch(a[AHEAD].grad, dim);
            push_change_grad_prefetch(g->grad[a[AHEAD].entry], dim);
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

/* Of the hash table of n ids. */
static size_t group_entries(size_t n)
{
    size_t entries = 16;

    while (entries < 2 * n)
        entries *= 2;
    return entries;
}

/* Lays out a group of n ids and its hash table at `p`; returns its end.  With
 * p NULL that is its size. */
static char *group_lay_out(group *g, uint32_t **entry, size_t n, uint32_t dim,
                           char *p)
{
    uintptr_t at = (uintptr_t)p;
#define LAY_OUT(to, count)                                                    \
    do {                                                                      \
        (to) = (void *)at;                                                    \
        at += ((count) * sizeof *(to) + 63) / 64 * 64;                        \
    } while (0)
    LAY_OUT(g->id, n);
    LAY_OUT(g->hash, n);
    LAY_OUT(g->grad, n);
    LAY_OUT(g->hint, n);
    LAY_OUT(g->late, n);
    LAY_OUT(g->again, n);
    LAY_OUT(*entry, group_entries(n));
    LAY_OUT(g->sums, n * dim);
#undef LAY_OUT
    return (char *)at;
}

size_t push_group_bytes(size_t n, uint32_t dim)
{
    group g;
    uint32_t *entry;

    return (uintptr_t)group_lay_out(&g, &entry, n, dim, NULL);
}

static void group_make(const push_plan *plan, size_t j, uint32_t stripe,
                       size_t n, char *scratch, group *g)
{
    const push_job *job = &plan->jobs[j];
    const uint32_t dim = job->t->config.dim;
    const size_t entries = group_entries(n);
    uint32_t *entry;

    group_lay_out(g, &entry, n, dim, scratch);
    if (!job->distinct)
        memset(entry, 0, entries * sizeof *entry);
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
            chunk->start[stripe + 1], entry, (uint32_t)entries - 1, dim);
    }
    (dim == 16   ? group_run_16_again
     : dim == 64 ? group_run_64_again
                 : group_run_any_again)(g, dim);
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
    stripe_room room;
    uint32_t clock;
    int swept;     /* no gradient as it was given holds NaN or Inf */
    int make_last; /* rows may go, or not be made */
    apply_counts counts;
} apply;

/* The slot of a new row for entry d, which has none; SLOT_NONE where it gets
 * none. */
static int64_t row_make(apply *a, size_t d)
{
    const uint64_t hash = a->g->hash[d], id = a->g->id[d];
    uint32_t made, evicted;

    if (a->job->distinct) { /* so the caller says; a row is made once */
        int64_t slot = row_index_find(&a->s->index, stripe_rows(a->t, a->s),
                                      hash, id);
        if (slot >= 0)
            return slot;
    }
    /* all rows may be of this very push */
    if (stripe_add_locked(a->t, a->s, hash, id, a->clock, a->clock, &a->room,
                          &made, &evicted)) {
        a->counts.refused++;
        return SLOT_NONE;
    }
    a->counts.created++;
    a->counts.evicted += evicted;
    return made;
}

/* Whether the gradient of an entry is finite: as it was given, it may be
 * known. */
static inline int push_change_entry_finite(const apply *a, const float *grad)
{
    const uint32_t dim = a->t->config.dim;

    return (a->swept && group_is_callers(a->g, grad, dim)) ||
           persia_floats_finite(grad, dim);
}

static void group_absent(group *g, size_t d)
{
    g->late[g->n - ++g->absent_n] = (uint32_t)d;
}

/* Entries [at, at + n); slots as guessed by stages 1 and 2. */
static void apply_block(apply *a, size_t at, size_t n, const int64_t *slots)
{
    const uint64_t *const id = a->g->id + at;
    const float *const *const grad = a->g->grad + at;
    const size_t stride = a->t->stride;
    const uint32_t clock = a->clock;
    const int make_last = a->make_last, keeps = a->t->field != 0;
    char *const base = a->s->arena.base;
    const float *grads[BLOCK];
    float ages[BLOCK];
    char *rows[BLOCK];
    size_t live = 0;

    for (size_t i = 0; i < n; i++) {
        int64_t slot = slots[i];
        char *row = slot >= 0 ? base + (size_t)slot * stride : NULL;
        if (row ? row_id(row) != id[i] || !row_clock(row)
                : slot == SLOT_SEARCH) {
            a->g->late[a->g->late_n++] = (uint32_t)(at + i);
            continue;
        }
        if (!row && make_last) {
            group_absent(a->g, at + i);
            continue;
        }
        if (!push_change_entry_finite(a, grad[i])) {
            a->counts.nonfinite++;
            continue;
        }
        if (!row) {
            slot = row_make(a, at + i);
            if (slot < 0)
                continue;
            row = base + (size_t)slot * stride;
        }
        stripe_touch_locked(a->t, a->s, (uint32_t)slot);
        if (keeps)
            ages[live] = row_age(clock, row_clock(row));
        row_set_clock(row, clock);
        grads[live] = grad[i];
        rows[live++] = row;
    }
    if (keeps)
        hand_touch_locked(a->t, a->s, live, ages, rows);
    a->optim->kernel(a->optim, live, rows, grads);
    a->counts.touched += live;
}

/* Stage 1 of a block: fetches the gradient and the row at the hint, if it was
 * not fetched before, or the home bucket. */
static void push_change_stage_fetch(const apply *a, size_t at, size_t n,
                                    int64_t *slots)
{
    const stripe *s = a->s;

    for (size_t i = 0; i < n; i++) {
        uint32_t hint = a->g->hint[at + i];
        push_change_grad_prefetch(a->g->grad[at + i], a->t->config.dim);
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

/* Stage 2: what the bucket says; it is computed again, for a page may have
 * grown since stage 1. */
static void push_change_stage_match(const apply *a, size_t at, size_t n,
                                    int64_t *slots)
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

/* Puts what apply_late() has appended to the entries without a row, the last
 * `n` in falling order, between those before: which ids take a search is
 * decided by the table's key, which row is made first must not be.  Hints are
 * not needed any more. */
static void absent_sort(group *g, size_t n)
{
    uint32_t *const late = g->hint, *const all = g->late;
    size_t to = g->n - g->absent_n, from = to + n;

    memcpy(late, all + to, n * sizeof *late);
    for (size_t k = n; k > 0;) /* the largest first */
        if (from < g->n && all[from] > late[k - 1])
            all[to++] = all[from++];
        else
            all[to++] = late[--k];
}

/* The entries that take a search, the last one first: what it appends to
 * those without a row lies behind. */
static void apply_late(apply *a)
{
    group *g = a->g;
    const size_t absent_n = g->absent_n;
    int64_t slot;

    for (size_t k = 0; k < g->late_n; k++)
        stripe_fetch_candidates(a->t, a->s, g->hash[g->late[k]],
                                a->t->stride);
    while (g->late_n) {
        const size_t d = g->late[--g->late_n];
        slot = row_index_find(&a->s->index, stripe_rows(a->t, a->s),
                              g->hash[d], g->id[d]);
        if (slot >= 0)
            apply_block(a, d, 1, &slot);
        else
            group_absent(g, d);
    }
    absent_sort(g, g->absent_n - absent_n);
}

static void absent_refuse(const apply *a, const uint32_t *entries, size_t n)
{
    uint64_t hash[BLOCK];

    for (size_t k = 0, here; k < n; k += here) {
        here = n - k < BLOCK ? n - k : BLOCK;
        for (size_t i = 0; i < here; i++)
            hash[i] = id_hash(a->g->id[entries[k + i]]);
        cut_touch_lines_locked(a->t, here, hash);
        a->t->admit.policy->refuse(&a->t->admit, here, hash);
    }
}

/* Takes out of the entries without a row those that get none.  The policy
 * decides on all of them before it notes one: so it decides as it did when
 * they were counted.  Hints are not needed any more. */
static void absent_admit(apply *a)
{
    const admitter *admit = &a->t->admit;
    group *g = a->g;
    uint32_t *const refused = g->hint, entry[BLOCK];
    uint64_t hash[BLOCK];
    uint8_t mask[BLOCK];
    size_t admitted_n = 0, refused_n = 0, k = 0;

    while (k < g->absent_n) {
        size_t n = 0;
        while (n < BLOCK && k < g->absent_n) {
            const uint32_t d = g->late[g->n - ++k];
            entry[n] = d;
            hash[n] = id_hash(g->id[d]);
            if (push_change_entry_finite(a, g->grad[d]))
                n++;
            else
                a->counts.nonfinite++;
        }
        admit->policy->admit(admit, a->job->draw, n, hash, mask);
        for (size_t i = 0; i < n; i++)
            if (mask[i])
                g->late[g->n - ++admitted_n] = entry[i];
            else
                refused[refused_n++] = entry[i];
    }
    g->absent_n = admitted_n;
    a->counts.refused += refused_n;
    if (admit->policy->refuse)
        absent_refuse(a, refused, refused_n);
}

/* The entries without a row. */
static void apply_absent(apply *a)
{
    enum { AHEAD = 8 };
    const group *g = a->g;
    const int64_t slot = SLOT_NONE;

    if (!a->t->admit.all)
        absent_admit(a);
    a->make_last = 0;
    for (size_t k = 1; k <= g->absent_n; k++) {
        if (k + AHEAD <= g->absent_n) {
            const size_t next = g->late[g->n - k - AHEAD];
            push_change_grad_prefetch(g->grad[next], a->t->config.dim);
            __builtin_prefetch(row_index_home(&a->s->index, g->hash[next]), 1);
        }
        apply_block(a, g->late[g->n - k], 1, &slot);
    }
}

/* Entries a block: what two blocks fetch ahead must fit the first cache. */
static size_t block_size(const apply *a)
{
    size_t bytes = a->t->stride + a->t->config.dim * sizeof(float);

    return bytes <= 320 ? BLOCK : bytes <= 1280 ? BLOCK / 2 : BLOCK / 8;
}

static void apply_group(apply *a)
{
    int64_t slots[STAGES][BLOCK];
    const size_t n = a->g->n, block = block_size(a);

    for (size_t at = 0, turn = 0; at < n + 2 * block; at += block, turn++) {
        size_t before = at - block;
        if (at < n)
            push_change_stage_fetch(a, at, n - at < block ? n - at : block,
                                    slots[turn % STAGES]);
        if (turn >= 2) { /* before stage 2: it may change the index */
            size_t k = at - 2 * block;
            apply_block(a, k, n - k < block ? n - k : block,
                        slots[(turn - 2) % STAGES]);
        }
        if (turn >= 1 && before < n)
            push_change_stage_match(a, before,
                                    n - before < block ? n - before : block,
                                    slots[(turn - 1) % STAGES]);
    }
    apply_late(a);
    apply_absent(a);
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

/* One stripe of a job, with its group's scratch. */
static void apply_stripe(push_plan *plan, size_t j, uint32_t i, size_t n,
                         char *scratch)
{
    push_job *job = &plan->jobs[j];
    table *t = job->t;
    stripe *s = &t->stripe[i];
    group g;

    pthread_rwlock_rdlock(&s->lock);
    g = (group){ .base = s->arena.base, .used = s->used,
                 .stride = t->stride };
    pthread_rwlock_unlock(&s->lock);
    group_make(plan, j, i, n, scratch, &g);
    apply a = { .t = t, .s = s, .job = job, .optim = &plan->optim[j],
                .g = &g,
                .room = { &plan->slots[plan->first_stripe[j] + i],
                          &plan->opens[j] },
                .clock = clock_short(plan->clock[j]),
                .swept = job_swept(job) };
    pthread_rwlock_wrlock(&s->lock);
    hand_look_locked(t, s);
    /* with all that other stripes and pushes may make meanwhile; the order of
     * slots, which this one decides, is that of eviction */
    a.make_last = t->evict.expires || t->evict.policy || !t->admit.all ||
                  (t->config.capacity &&
                   atomic_load(&t->rows) + atomic_load(&t->pending) + g.n >
                       t->config.capacity);
    apply_group(&a);
    stripe_count_locked(t, s);
    pthread_rwlock_unlock(&s->lock);
    __atomic_fetch_add(&job->created, a.counts.created, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->refused, a.counts.refused, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->evicted, a.counts.evicted, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->nonfinite, a.counts.nonfinite, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->touched, a.counts.touched, __ATOMIC_RELAXED);
}

/* No more threads than there are scratches run a loop, so one is free. */
static size_t scratch_take(const push_plan *plan)
{
    size_t k = 0;

    while (atomic_exchange_explicit(&plan->taken[k], 1, memory_order_acquire))
        k = k + 1 == plan->groups_n ? 0 : k + 1;
    return k;
}

int push_change(void *ctx, size_t item)
{
    push_plan *plan = ctx;
    const size_t j = sched_range(plan->first_stripe, plan->jobs_n, item);
    const uint32_t i = (uint32_t)(item - plan->first_stripe[j]);
    size_t n = 0;

    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++)
        n += (size_t)(plan->chunks[c].start[i + 1] -
                      plan->chunks[c].start[i]);
    if (!n)
        return PERSIA_OK;
    const size_t k = scratch_take(plan);
    apply_stripe(plan, j, i, n, plan->groups + k * plan->group_bytes);
    atomic_store_explicit(&plan->taken[k], 0, memory_order_release);
    return PERSIA_OK;
}
