/* rows.c: tables whose distinct rows go to the ranks, which pool them. */
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"
#include "pool/pool.h"

/* ---- the plan ---- */

static int check_rows(const wire_plan *p)
{
    for (size_t i = 0; i < p->features_n; i++)
        for (size_t k = 0; k < i; k++)
            if (p->features[i].table == p->features[k].table &&
                p->features[i].rows != p->features[k].rows)
                return persia_err_set(
                    PERSIA_EARG,
                    "table %s: its feature %s travels pooled, and feature %s "
                    "as rows; all features of a table travel alike",
                    p->tables[p->features[i].table].name,
                    p->features[p->features[i].rows ? k : i].name,
                    p->features[p->features[i].rows ? i : k].name);
    return PERSIA_OK;
}

/* All of group `from` are of group `to`. */
static void rows_merge(row_plan *r, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < r->tables_n; i++)
        if (r->table_group[i] == from)
            r->table_group[i] = to;
}

/* The groups are numbered without gaps. */
static void rows_number_groups(row_plan *r)
{
    for (uint32_t i = 0; i < r->tables_n; i++) {
        uint32_t k = 0;
        while (r->table_group[k] != r->table_group[i])
            k++;
        if (k == i)
            rows_merge(r, r->table_group[i], r->tables_n + r->groups++);
    }
    for (uint32_t i = 0; i < r->tables_n; i++)
        r->table_group[i] -= r->tables_n;
}

static uint32_t place_of_table(const row_plan *r, uint32_t table)
{
    uint32_t i = 0;
    while (r->table[i] != table)
        i++;
    return i;
}

static void rows_list_tables(row_plan *r, const wire_plan *p)
{
    for (size_t t = 0; t < p->tables_n; t++) {
        int has = 0;
        for (size_t i = 0; i < p->features_n; i++)
            has |= p->features[i].table == t && p->features[i].rows;
        if (!has)
            continue;
        r->table_group[r->tables_n] = r->tables_n;
        r->table[r->tables_n++] = (uint32_t)t;
    }
}

static void list_keys(row_plan *r, const wire_plan *p)
{
    for (size_t i = 0; i < p->features_n; i++) {
        const wire_plan_feature *f = &p->features[i];
        uint32_t k = 0;
        if (!f->rows)
            continue;
        while (k < r->keys_n &&
               strcmp(p->features[r->feature[k]].name, f->name))
            k++;
        const uint32_t mine = r->table_group[place_of_table(r, f->table)];
        if (k == r->keys_n)
            r->feature[r->keys_n++] = (uint32_t)i;
        else
            rows_merge(r, mine,
                       r->table_group[place_of_table(
                           r, p->features[r->feature[k]].table)]);
    }
    rows_number_groups(r);
    for (uint32_t k = 0; k < r->keys_n; k++)
        r->group[k] = r->table_group[place_of_table(
            r, p->features[r->feature[k]].table)];
}

int row_plan_make(const wire_plan *p, wire_memory *memory, row_plan *r)
{
    int rc = check_rows(p);
    if (rc)
        return rc;
    *r = (row_plan){0};
    const size_t tables = p->tables_n * sizeof(uint32_t);
    const size_t features = p->features_n * sizeof(uint32_t);
    r->table = persia_wire_memory_take(memory, tables);
    r->table_group = persia_wire_memory_take(memory, tables);
    r->feature = persia_wire_memory_take(memory, features);
    r->group = persia_wire_memory_take(memory, features);
    if (!r->table || !r->table_group || !r->feature || !r->group)
        return PERSIA_ENOMEM;
    rows_list_tables(r, p);
    list_keys(r, p);
    return PERSIA_OK;
}

/* ---- the ids of a batch ---- */

/* Those of a key: ids [from, to) of the message; where its places begin. */
typedef struct key_ids {
    size_t from, to, at;
} key_ids;

typedef struct placing {
    const batch_index *x;
    const key_ids *keys;
    uint32_t *places;
} placing;

static void list_ids(const worker_plan *p, const offer *o, key_ids *keys)
{
    const size_t samples = o->m.samples;
    size_t at = 0;
    for (uint32_t k = 0; k < p->rows.keys_n; k++) {
        const char *name = p->plan.features[p->rows.feature[k]].name;
        const size_t bag = offer_feature(o, name) * samples;
        const uint64_t *offsets = o->m.offsets.offsets;
        keys[k] = o->m.offsets.n
                      ? (key_ids){offsets[bag], offsets[bag + samples], at}
                      : (key_ids){bag, bag + samples, at};
        at += keys[k].to - keys[k].from;
    }
}

/* The distinct ids of each group: a unit of the index. */
static int rows_find_distinct(const worker_plan *p, const offer *o,
                              const key_ids *keys, batch_index *x)
{
    const row_plan *r = &p->rows;
    index_segment *segments = calloc(r->keys_n, sizeof *segments);
    uint32_t *groups = calloc(r->groups, sizeof *groups);
    size_t n = 0;
    int rc = segments && groups
                 ? PERSIA_OK
                 : persia_err_set(PERSIA_ENOMEM, "no memory for ids");
    for (uint32_t g = 0; g < r->groups && !rc; g++) {
        groups[g] = g;
        for (uint32_t k = 0; k < r->keys_n; k++)
            if (r->group[k] == g)
                segments[n++] =
                    (index_segment){.unit = g,
                                    .job = k,
                                    .n = keys[k].to - keys[k].from,
                                    .ids = o->m.ids.ids + keys[k].from};
    }
    const index_batch b = {segments, n, groups, r->groups};
    if (!rc)
        rc = persia_batch_index_make(x, persia_client_sched(o->stream->c), 1,
                                     &b);
    free(segments);
    free(groups);
    return rc;
}

/* The places of the ids of one chunk. */
static int place_chunk(void *ctx, size_t i)
{
    const placing *p = ctx;
    const batch_index *x = p->x;
    const index_chunk *c = &x->chunks[i];
    const size_t *base = x->base + (size_t)c->unit * x->cells;
    const key_ids *key = &p->keys[x->segments[c->segment].job];
    uint32_t *to = p->places + key->at + c->first;
    for (uint32_t cell = 0; cell < x->cells; cell++)
        for (uint32_t k = c->start[cell]; k < c->start[cell + 1]; k++)
            to[c->order[k]] = (uint32_t)(base[cell] - base[0]) +
                              (c->place[k] & ~INDEX_FIRST);
    return PERSIA_OK;
}

/* Distinct ids of a table. */
static size_t rows_count_of(const row_plan *r, const batch_index *x,
                            uint32_t table)
{
    return index_to(x, r->table_group[table], 0) -
           index_from(x, r->table_group[table], 0);
}

/* Copies them, table after table: the index is of this thread alone. */
static int rows_copy_distinct(const worker_plan *p, const batch_index *x,
                              row_ids *out)
{
    const row_plan *r = &p->rows;
    size_t n = 0;
    for (uint32_t t = 0; t < r->tables_n; t++)
        n += rows_count_of(r, x, t);
    out->ids = malloc((n + 1) * sizeof *out->ids);
    out->offsets = malloc((r->tables_n + (size_t)1) * sizeof *out->offsets);
    if (!out->ids || !out->offsets)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu ids", n);
    out->offsets[0] = 0;
    for (uint32_t t = 0; t < r->tables_n; t++) {
        const size_t from = (size_t)out->offsets[t],
                     more = rows_count_of(r, x, t);
        if (more)
            memcpy(out->ids + from,
                   x->ids + index_from(x, r->table_group[t], 0),
                   more * sizeof *x->ids);
        out->offsets[t + 1] = (int64_t)(from + more);
    }
    return PERSIA_OK;
}

static int put_places(const worker_plan *plan, const offer *o,
                      const key_ids *keys, const batch_index *x,
                      row_places *out)
{
    const uint32_t keys_n = plan->rows.keys_n;
    const size_t n = keys[keys_n - 1].at + keys[keys_n - 1].to -
                     keys[keys_n - 1].from;
    out->n = n;
    out->places = malloc((n + 1) * sizeof *out->places);
    out->weights = o->m.weights.n ? malloc((n + 1) * sizeof *out->weights)
                                  : NULL;
    if (!out->places || (o->m.weights.n && !out->weights))
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu ids", n);
    placing p = {x, keys, out->places};
    for (uint32_t k = 0; k < keys_n && out->weights; k++)
        if (keys[k].to > keys[k].from)
            memcpy(out->weights + keys[k].at,
                   o->m.weights.weights + keys[k].from,
                   (keys[k].to - keys[k].from) * sizeof(float));
    return persia_sched_for_rows(persia_client_sched(o->stream->c),
                                 x->chunks_n, n, place_chunk, &p);
}

/* Nothing, if the batch has one id a bag. */
static int rows_put_offsets(const worker_plan *p, const offer *o,
                            const key_ids *keys, row_places *out)
{
    const size_t samples = o->m.samples, bags = p->rows.keys_n * samples;
    if (!o->m.offsets.n)
        return PERSIA_OK;
    out->offsets = malloc((bags + 1) * sizeof *out->offsets);
    if (!out->offsets)
        return persia_err_set(PERSIA_ENOMEM, "no memory for offsets");
    out->offsets_n = bags + 1;
    for (uint32_t k = 0; k < p->rows.keys_n; k++) {
        const char *name = p->plan.features[p->rows.feature[k]].name;
        const uint64_t *from =
            o->m.offsets.offsets + offer_feature(o, name) * samples;
        for (size_t i = 0; i <= samples; i++)
            out->offsets[k * samples + i] =
                (uint32_t)(from[i] - from[0] + keys[k].at);
    }
    return PERSIA_OK;
}

int row_ids_find(const worker_plan *p, const offer *o, row_ids *ids,
                 row_places *places)
{
    index_pool *pool = persia_client_indexes(o->stream->c);
    key_ids *keys = malloc(p->rows.keys_n * sizeof *keys);
    batch_index *x = keys ? persia_index_pool_new(pool) : NULL;
    int rc = x ? PERSIA_OK
               : persia_err_set(PERSIA_ENOMEM, "no memory for ids");
    if (!rc) {
        list_ids(p, o, keys);
        rc = rows_find_distinct(p, o, keys, x);
    }
    if (!rc)
        rc = rows_copy_distinct(p, x, ids);
    if (!rc)
        rc = put_places(p, o, keys, x, places);
    if (!rc)
        rc = rows_put_offsets(p, o, keys, places);
    persia_batch_index_put(x);
    free(keys);
    return rc;
}

void row_ids_free(row_ids *ids)
{
    persia_batch_index_put(ids->index);
    free(ids->ids);
    free(ids->offsets);
    *ids = (row_ids){0};
}

void row_places_free(row_places *places)
{
    free(places->places);
    free(places->weights);
    free(places->offsets);
    *places = (row_places){0};
}

int row_ids_plan(const worker_plan *p, const offer *o, uint32_t *out)
{
    const row_plan *r = &p->rows;
    plan_feature *features = calloc(r->tables_n, sizeof *features);
    if (!features)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a plan");
    for (uint32_t t = 0; t < r->tables_n; t++) {
        plan_feature *f = &features[t];
        memcpy(f->name, p->plan.tables[r->table[t]].name, sizeof f->name);
        f->key = t;
        f->table = o->stream->tables[r->table[t]];
        f->pooling = POOL_NONE;
        f->trainable = 1;
    }
    int rc = persia_batcher_plan(o->stream->w, PLAN_ROWS, r->tables_n,
                                 features, r->tables_n, out);
    free(features);
    return rc;
}

id_batch row_ids_batch(const worker_plan *p, const row_ids *ids)
{
    return (id_batch){.n = (size_t)ids->offsets[p->rows.tables_n],
                      .bags = 1,
                      .values = (const int64_t *)ids->ids,
                      .offsets = ids->offsets};
}

uint32_t row_plan_width(const worker_plan *p)
{
    uint32_t width = 0;
    for (uint32_t t = 0; t < p->rows.tables_n; t++) {
        const uint32_t dim = p->plan.tables[p->rows.table[t]].dim;
        width = dim > width ? dim : width;
    }
    return width;
}
