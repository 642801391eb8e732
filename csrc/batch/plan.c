/* plan.c: plans, and batches checked against them. */
#include "batch/plan.h"

#include "simd/simd.h"

#include <stdlib.h>
#include <string.h>

#include "pool/pool.h"

int persia_batcher_create(ps_client *c, batcher **out)
{
    batcher *w = calloc(1, sizeof *w);
    *out = w;
    if (!w)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    w->c = c;
    pthread_mutex_init(&w->lock, NULL);
    return PERSIA_OK;
}

void persia_batcher_destroy(batcher *w)
{
    if (!w)
        return;
    for (uint32_t i = 0; i < w->plans_n; i++)
        free(w->plans[i]);
    while (w->free) {
        scratch *s = w->free;
        w->free = s->next;
        persia_mem_buffer_free(&s->jobs);
        persia_mem_buffer_free(&s->slices);
        persia_mem_buffer_free(&s->rows);
        persia_mem_buffer_free(&s->bags);
        free(s);
    }
    pthread_mutex_destroy(&w->lock);
    free(w);
}

scratch *scratch_take(batcher *w)
{
    pthread_mutex_lock(&w->lock);
    scratch *s = w->free;
    if (s)
        w->free = s->next;
    pthread_mutex_unlock(&w->lock);
    if (!s && !(s = calloc(1, sizeof *s)))
        persia_err_set(PERSIA_ENOMEM, "no memory for a batch's buffers");
    return s;
}

void scratch_give(batcher *w, scratch *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&w->lock);
    s->next = w->free;
    w->free = s;
    pthread_mutex_unlock(&w->lock);
}

const plan *batcher_plan_get(const batcher *w, uint32_t no)
{
    if (no < atomic_load_explicit(&w->plans_n, memory_order_acquire))
        return w->plans[no];
    persia_err_set(PERSIA_EARG, "plan %u does not exist in this store", no);
    return NULL;
}

static int plan_build(batcher *w, uint32_t kind, uint32_t keys,
                      const plan_feature *features, uint32_t n, plan **out)
{
    *out = NULL;
    if (kind >= PLAN_KINDS || n == 0)
        return persia_err_set(PERSIA_EARG, "a plan needs a kind and features");
    plan *p = calloc(1, sizeof *p + n * sizeof p->features[0]);
    unsigned char *seen = calloc(keys ? keys : 1, 1);
    int rc = PERSIA_OK;
    if (!p || !seen) {
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for a plan");
        goto done;
    }
    *p = (plan){.kind = kind, .keys = keys, .n = n};
    for (uint32_t i = 0; i < n; i++) {
        planned *f = &p->features[i];
        f->want = features[i];
        const table_config *t = persia_client_table(w->c, f->want.table);
        if (!t || f->want.key >= keys || f->want.pooling >= POOL_KINDS) {
            rc = persia_err_set(PERSIA_EARG,
                                "feature %s: no such table, key or pooling",
                                f->want.name);
            goto done;
        }
        f->dim = t->dim;
        if (kind == PLAN_BAGS) {
            f->column = p->width;
            p->width += f->dim;
        } else {
            p->gaps |= seen[f->want.key]; /* the later one would win */
            p->width = f->dim > p->width ? f->dim : p->width;
        }
        seen[f->want.key] = 1;
    }
    if (kind == PLAN_ROWS) {
        if (p->gaps) {
            rc = persia_err_set(PERSIA_EARG, "a key is named by two features");
            goto done;
        }
        for (uint32_t k = 0; k < keys; k++)
            p->gaps |= !seen[k];
        for (uint32_t i = 0; i < n; i++)
            p->gaps |= p->features[i].dim < p->width;
    }
done:
    free(seen);
    if (rc) {
        free(p);
        p = NULL;
    }
    *out = p;
    return rc;
}

static int plan_equal(const plan *a, const plan *b)
{
    return a->kind == b->kind && a->keys == b->keys && a->n == b->n &&
           memcmp(a->features, b->features,
                  a->n * sizeof a->features[0]) == 0;
}

int persia_batcher_plan(batcher *w, uint32_t kind, uint32_t keys,
                        const plan_feature *features, uint32_t features_n,
                        uint32_t *out)
{
    plan *p;
    int rc = plan_build(w, kind, keys, features, features_n, &p);
    if (rc)
        return rc;
    pthread_mutex_lock(&w->lock);
    uint32_t n = w->plans_n, i = 0;
    while (i < n && !plan_equal(w->plans[i], p))
        i++;
    if (i == BATCHER_PLANS_MAX) {
        rc = persia_err_set(
            PERSIA_ELIMIT,
            "a store has at most %d different modules and orders of "
            "keys; keep the keys of the batches in one order",
            BATCHER_PLANS_MAX);
        free(p);
    } else if (i < n) {
        free(p);
    } else {
        w->plans[i] = p;
        atomic_store_explicit(&w->plans_n, n + 1, memory_order_release);
    }
    pthread_mutex_unlock(&w->lock);
    *out = i;
    return rc;
}

int persia_batcher_plan_shape(batcher *w, uint32_t no, uint32_t *kind,
                              uint32_t *keys, uint32_t *width)
{
    const plan *p = batcher_plan_get(w, no);
    if (!p)
        return PERSIA_EARG;
    *kind = p->kind;
    *keys = p->keys;
    *width = p->width;
    return PERSIA_OK;
}

typedef struct slicing {
    const plan *p;
    const id_batch *b;
    slice *out;
} slicing;

/* Whether offsets never fall; *single: every bag has exactly one id. */
HOT static int plan_monotone(const int64_t *offsets, size_t bags, int *single)
{
    int64_t falls = 0, others = 0;
    for (size_t i = 0; i < bags; i++) {
        falls |= offsets[i + 1] < offsets[i];
        others |= (offsets[i + 1] - offsets[i]) ^ 1;
    }
    *single = others == 0;
    return falls == 0;
}

static int slice_feature(void *ctx, size_t i)
{
    const slicing *c = ctx;
    const planned *f = &c->p->features[i];
    const id_batch *b = c->b;
    slice *s = &c->out[i];
    *s = (slice){.f = f, .weighted = b->weights != NULL};
    if (!b->offsets) {
        s->first = f->want.key * b->bags;
        s->n = b->bags;
        return PERSIA_OK;
    }
    const int64_t *offsets = b->offsets + f->want.key * b->bags;
    int64_t first = offsets[0], last = offsets[b->bags];
    int single;
    if (!plan_monotone(offsets, b->bags, &single)) {
        int rc = persia_pool_check(f->want.name, b->bags, offsets, first,
                                   last);
        return rc ? rc
                  : persia_err_set(PERSIA_EOFFSETS, "feature %s: offsets fall",
                                   f->want.name);
    }
    if (first < 0 || (uint64_t)last > b->n)
        return persia_err_set(
            PERSIA_EOFFSETS,
            "feature %s: offsets run from %lld to %lld, but there "
            "are %zu ids; offsets are 0 .. number of ids",
            f->want.name, (long long)first, (long long)last, b->n);
    s->first = (size_t)first;
    s->n = (size_t)(last - first);
    s->offsets = single ? NULL : offsets;
    return PERSIA_OK;
}

int batch_slice(batcher *w, const plan *p, const id_batch *b, slice *out)
{
    if (!b->offsets && b->n != p->keys * b->bags)
        return persia_err_set(PERSIA_ESHAPE,
                              "%zu ids for %u features of %zu samples and no "
                              "offsets; without offsets every bag has one id",
                              b->n, p->keys, b->bags);
    if (b->offsets) {
        int64_t first = b->offsets[0], last = b->offsets[p->keys * b->bags];
        if (first != 0 || last < 0 || (uint64_t)last != b->n)
            return persia_err_set(
                PERSIA_EOFFSETS,
                "offsets begin with %lld and end with %lld; need 0 "
                "and the number of ids, %zu",
                (long long)first, (long long)last, b->n);
    }
    slicing c = {p, b, out};
    /* Reading 26 features of 4096 offsets takes as long as waking a thread:
     * only large batches are shared out. */
    if (b->offsets && p->n * b->bags > 1u << 18)
        return persia_sched_for(persia_client_sched(w->c), p->n, slice_feature,
                                &c);
    for (uint32_t i = 0; i < p->n; i++) {
        int rc = slice_feature(&c, i);
        if (rc)
            return rc;
    }
    return PERSIA_OK;
}
