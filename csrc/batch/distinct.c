/* distinct.c: the distinct ids of a batch, for those who pool themselves. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "batch/plan.h"

struct batcher_group {
    batch_index *index;
    batcher_group_sizes sizes;
    uint32_t features;
    slice *slices; /* [features] */
    size_t *first; /* [features + 1] where its ids begin in the output */
};

/* The tables of the plan, each once; unit[i]: that of feature i. */
static uint32_t distinct_list_tables(const plan *p, uint32_t *tables,
                                     uint32_t *unit)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n; i++) {
        uint32_t t = 0;
        while (t < n && tables[t] != p->features[i].want.table)
            t++;
        tables[t] = p->features[i].want.table;
        unit[i] = t;
        n += t == n;
    }
    return n;
}

static int distinct_make_index(batcher *w, const plan *p, const id_batch *b,
                               batcher_group *g)
{
    index_segment *segments = malloc(p->n * sizeof *segments);
    uint32_t *tables = malloc(2 * p->n * sizeof *tables);
    int rc = segments && tables ? PERSIA_OK
                                : persia_err_set(PERSIA_ENOMEM,
                                                 "no memory for %u features",
                                                 p->n);
    if (rc)
        goto done;
    uint32_t *unit = tables + p->n, n = 0;
    g->sizes.tables = distinct_list_tables(p, tables, unit);
    for (uint32_t t = 0; t < g->sizes.tables; t++)
        for (uint32_t i = 0; i < p->n; i++)
            if (unit[i] == t && g->slices[i].n)
                segments[n++] = (index_segment){
                    t, i, g->slices[i].n,
                    (const uint64_t *)b->values + g->slices[i].first};
    const index_batch all = {segments, n, tables, (uint32_t)g->sizes.tables};
    g->index = persia_index_pool_new(persia_client_indexes(w->c));
    rc = g->index ? persia_batch_index_make(
                        g->index, persia_client_sched(w->c), 1, &all)
                  : PERSIA_ENOMEM;
done:
    free(segments);
    free(tables);
    return rc;
}

int persia_batcher_group(batcher *w, uint32_t no, const id_batch *b,
                         batcher_group **out)
{
    const plan *p = batcher_plan_get(w, no);
    *out = NULL;
    if (!p)
        return PERSIA_EARG;
    batcher_group *g = calloc(1, sizeof *g);
    if (g) {
        g->features = p->n;
        g->slices = malloc(p->n * sizeof *g->slices);
        g->first = calloc(p->n + 1, sizeof *g->first);
    }
    int rc = g && g->slices && g->first
                 ? batch_slice(w, p, b, g->slices)
                 : persia_err_set(PERSIA_ENOMEM, "no memory for a batch");
    for (uint32_t i = 0; i < p->n && !rc; i++) {
        g->first[i + 1] = g->first[i] + g->slices[i].n;
        if (g->slices[i].offsets)
            g->sizes.bags = p->n * b->bags;
    }
    if (!rc && g->first[p->n] > INT32_MAX)
        rc = persia_err_set(PERSIA_ELIMIT, "%zu ids in one batch",
                            g->first[p->n]);
    if (!rc)
        rc = distinct_make_index(w, p, b, g);
    if (rc) {
        persia_batcher_group_free(g);
        return rc;
    }
    g->sizes.ids = g->first[p->n];
    g->sizes.rows = index_distinct(g->index);
    *out = g;
    return PERSIA_OK;
}

batcher_group_sizes persia_batcher_group_sizes(const batcher_group *g)
{
    return g->sizes;
}

static void distinct_fill_places(const batcher_group *g, int32_t *inverse)
{
    const batch_index *x = g->index;
    for (size_t i = 0; i < x->chunks_n; i++) {
        const index_chunk *c = &x->chunks[i];
        int32_t *to = inverse + g->first[x->segments[c->segment].job] +
                      c->first;
        for (uint32_t cell = 0; cell < x->cells; cell++) {
            size_t base = x->base[(size_t)c->unit * x->cells + cell];
            for (uint32_t k = c->start[cell]; k < c->start[cell + 1]; k++)
                to[c->order[k]] =
                    (int32_t)(base + (c->place[k] & ~INDEX_FIRST));
        }
    }
}

static void distinct_fill_offsets(const batcher_group *g, size_t bags,
                                  int32_t *offsets)
{
    for (uint32_t i = 0; i < g->features; i++) {
        const slice *s = &g->slices[i];
        for (size_t b = 0; b <= bags; b++)
            offsets[i * bags + b] =
                (int32_t)(g->first[i] +
                          (s->offsets
                               ? (size_t)(s->offsets[b] - s->offsets[0])
                               : b));
    }
}

void persia_batcher_group_fill(const batcher_group *g, const id_batch *b,
                               uint64_t *ids, int64_t *starts,
                               int32_t *inverse, int32_t *offsets,
                               float *weights)
{
    const batch_index *x = g->index;
    if (g->sizes.rows)
        memcpy(ids, x->ids, g->sizes.rows * sizeof *ids);
    for (uint32_t t = 0; t <= g->sizes.tables; t++)
        starts[t] = (int64_t)x->base[(size_t)t * x->cells];
    distinct_fill_places(g, inverse);
    if (offsets)
        distinct_fill_offsets(g, b->bags, offsets);
    for (uint32_t i = 0; i < g->features && weights; i++)
        if (g->slices[i].n)
            memcpy(weights + g->first[i], b->weights + g->slices[i].first,
                   g->slices[i].n * sizeof *weights);
}

void persia_batcher_group_free(batcher_group *g)
{
    if (!g)
        return;
    persia_batch_index_put(g->index);
    free(g->slices);
    free(g->first);
    free(g);
}
