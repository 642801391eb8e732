/* batch.c: whole batches: rows of several features, pooled.
 *
 * What occurs several times is looked up once, and then copied: bags that are
 * pooled where equal ones follow one another, as a user's beside candidates,
 * and of bags that are not pooled each id.
 */
#include "rows_file/private.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "pool/pool.h"

/* The bags of a part. */
typedef struct part_bags {
    size_t bags;
    const int64_t *offsets; /* [bags + 1]; the first id is at offsets[0] */
    const uint64_t *ids;
    const float *weights; /* or NULL */
    int one_each;         /* id */
} part_bags;

static size_t bags_ids(const part_bags *x)
{
    return (size_t)(x->offsets[x->bags] - x->offsets[0]);
}

/* For one part after another. */
typedef struct batch_memory {
    int64_t *one_each;   /* [bags + 1] they count */
    size_t *at;          /* [ids or bags] the place of each among those once */
    uint64_t *ids;       /* [ids] once, */
    int64_t *offsets;    /* [bags + 2] their bags, */
    float *weights;      /* [ids] and weights */
    uint32_t *index;     /* [a power of two, 2 * ids or more] */
    float *rows;         /* [ids, widest] */
    void *block;
} batch_memory;

static size_t batch_index_size(size_t ids)
{
    size_t size = 16;
    while (size < 2 * ids)
        size *= 2;
    return size;
}

static int memory_take(batch_memory *m, const rows_batch *b, uint32_t widest)
{
    const size_t index = batch_index_size(b->n);
    const size_t bags = b->bags + 2, most = bags > b->n ? bags : b->n;
    m->block = malloc(8 * (b->n + 2 * bags + most) + 4 * index +
                      4 * b->n * ((size_t)widest + 1));
    if (!m->block)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for the rows of %zu ids", b->n);
    m->one_each = m->block;
    m->offsets = m->one_each + bags;
    m->ids = (uint64_t *)(m->offsets + bags);
    m->at = (size_t *)(m->ids + b->n);
    m->index = (uint32_t *)(m->at + most);
    m->weights = (float *)(m->index + index);
    m->rows = m->weights + b->n;
    for (size_t i = 0; !b->offsets && i <= b->bags; i++)
        m->one_each[i] = (int64_t)i;
    return PERSIA_OK;
}

/* ---- what is looked up once --------------------------------------------- */

/* Whether bag i, not the first, is equal to the one before. */
static int bags_repeat(const part_bags *x, size_t i)
{
    const size_t first = (size_t)(x->offsets[i] - x->offsets[0]);
    const size_t n = (size_t)(x->offsets[i + 1] - x->offsets[i]);
    const uint64_t *ids = x->ids + first;

    if ((size_t)(x->offsets[i] - x->offsets[i - 1]) != n)
        return 0;
    if (!n)
        return 1;
    if (ids[0] != *(ids - n))
        return 0;
    if (n > 1 && memcmp(ids, ids - n, n * sizeof *ids))
        return 0;
    return !x->weights || !memcmp(x->weights + first, x->weights + first - n,
                                  n * sizeof *x->weights);
}

/* Bags of which no two that follow one another are equal; those of x, if that
 * saves less than half of its ids. */
static part_bags bags_once(const part_bags *x, batch_memory *m)
{
    part_bags once = { .offsets = m->offsets, .ids = m->ids,
                       .one_each = x->one_each };
    size_t n = 0;

    m->offsets[0] = 0;
    for (size_t i = 0; i < x->bags; i++) {
        if (!i || !bags_repeat(x, i)) {
            n += (size_t)(x->offsets[i + 1] - x->offsets[i]);
            m->offsets[++once.bags] = (int64_t)n;
        }
        m->at[i] = once.bags - 1;
    }
    if (2 * n >= bags_ids(x))
        return *x;
    once.weights = x->weights ? m->weights : NULL;
    for (size_t i = 0; i < x->bags; i++) {
        const size_t from = (size_t)(x->offsets[i] - x->offsets[0]);
        const size_t to = (size_t)m->offsets[m->at[i]];
        const size_t some = (size_t)m->offsets[m->at[i] + 1] - to;
        if (i && m->at[i] == m->at[i - 1])
            continue;
        memcpy(m->ids + to, x->ids + from, some * sizeof *m->ids);
        if (x->weights)
            memcpy(m->weights + to, x->weights + from,
                   some * sizeof *m->weights);
    }
    return once;
}

/* The distinct ids in the order of their first occurrence, as one bag; those
 * of x, if these are not less than half. */
static part_bags bags_distinct(const part_bags *x, uint64_t key,
                               batch_memory *m)
{
    const size_t n = bags_ids(x), mask = batch_index_size(n) - 1;
    size_t k = 0;

    memset(m->index, 0, (mask + 1) * sizeof *m->index);
    for (size_t i = 0; i < n; i++) {
        size_t slot = place_home(id_place(x->ids[i], key), mask + 1);
        while (m->index[slot] && m->ids[m->index[slot] - 1] != x->ids[i])
            slot = (slot + 1) & mask;
        if (!m->index[slot]) {
            m->ids[k] = x->ids[i];
            m->index[slot] = (uint32_t)++k;
        }
        m->at[i] = m->index[slot] - 1;
    }
    if (2 * k >= n)
        return *x;
    m->offsets[0] = 0;
    m->offsets[1] = (int64_t)k;
    return (part_bags){ .bags = 1, .offsets = m->offsets, .ids = m->ids };
}

/* Vectors of what is there once to all [n], from the last one on: none has
 * its place before that from which it is copied. */
static void batch_spread(size_t n, const size_t *at, uint32_t dim, float *out,
                         size_t width)
{
    while (n-- > 0)
        if (at[n] != n)
            memcpy(out + n * width, out + at[n] * width, dim * sizeof *out);
}

/* ---- parts -------------------------------------------------------------- */

static int part_pool(const rows_part *p, const part_bags *x, float *rows,
                     float *out, size_t width, rows_counts *counts)
{
    const uint32_t dim = persia_rows_file_dim(p->file);
    const size_t n = bags_ids(x);
    const int as_they_are = !x->weights && (p->kind == POOL_NONE ||
                                            x->one_each);

    counts->ids += n;
    if (as_they_are)
        return persia_rows_file_look_up(p->file, n, x->ids, out, width,
                                        &counts->absent);
    const int code = persia_rows_file_look_up(p->file, n, x->ids, rows, dim,
                                              &counts->absent);
    if (!code)
        persia_pool_forward(p->kind, x->bags, x->offsets, x->weights, rows,
                            dim, out, width);
    return code;
}

static int part_run(const rows_batch *b, const rows_part *p, batch_memory *m,
                    rows_counts *counts)
{
    const int64_t *offsets = b->offsets ? b->offsets + p->feature * b->bags
                                        : m->one_each;
    const size_t first = b->offsets ? (size_t)offsets[0]
                                    : p->feature * b->bags;
    const part_bags all = { .bags = b->bags,
                            .offsets = offsets,
                            .ids = b->ids + first,
                            .weights = b->weights ? b->weights + first : NULL,
                            .one_each = !b->offsets };
    const int rows = p->kind == POOL_NONE;
    float *out = b->out + p->column + (rows ? first * b->width : 0);
    part_bags once = all;

    if (!rows)
        once = bags_once(&all, m);
    else if (!b->weights)
        once = bags_distinct(&all, p->file->config.key, m);
    const int code = part_pool(p, &once, m->rows, out, b->width, counts);
    if (!code && once.ids != all.ids)
        batch_spread(rows ? bags_ids(&all) : all.bags, m->at,
                     persia_rows_file_dim(p->file), out, b->width);
    return code;
}

static int batch_check(const rows_batch *b, const rows_part *parts, size_t n,
                       uint32_t *widest)
{
    *widest = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t dim = persia_rows_file_dim(parts[i].file);
        if (parts[i].kind >= POOL_KINDS || parts[i].feature >= b->features ||
            parts[i].column + dim > b->width)
            return persia_err_set(PERSIA_EARG,
                                  "part %zu of a batch of %zu features and "
                                  "width %zu cannot be",
                                  i, b->features, b->width);
        *widest = dim > *widest ? dim : *widest;
    }
    if (b->n >= UINT32_MAX)
        return persia_err_set(PERSIA_ELIMIT, "a batch of %zu ids", b->n);
    if (b->offsets)
        return persia_pool_check("the batch", b->features * b->bags,
                                 b->offsets, 0, (int64_t)b->n);
    if (b->features * b->bags != b->n)
        return persia_err_set(PERSIA_EOFFSETS,
                              "%zu ids for %zu features of %zu samples: "
                              "without offsets each has one id a sample",
                              b->n, b->features, b->bags);
    return PERSIA_OK;
}

int persia_rows_file_batch(const rows_batch *b, const rows_part *parts,
                           size_t parts_n, rows_counts *counts)
{
    batch_memory m = { .block = NULL };
    uint32_t widest;
    *counts = (rows_counts){ 0 };
    int code = batch_check(b, parts, parts_n, &widest);
    if (!code)
        code = memory_take(&m, b, widest);
    for (size_t i = 0; i < parts_n && !code; i++)
        code = part_run(b, &parts[i], &m, counts);
    free(m.block);
    return code;
}
