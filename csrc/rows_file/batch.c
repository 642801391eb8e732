/* batch.c: whole batches: rows of several features, pooled. */
#include "rows_file/private.h"

#include <inttypes.h>
#include <stdlib.h>

#include "pool/pool.h"

/* One output; `one_each` [bags + 1] counts where the batch has no offsets. */
static int part_run(const rows_batch *b, const rows_part *p,
                    const int64_t *one_each, float *rows, uint64_t *absent)
{
    const int64_t *offsets =
        b->offsets ? b->offsets + p->feature * b->bags : one_each;
    const size_t first = b->offsets ? (size_t)offsets[0]
                                    : p->feature * b->bags;
    const size_t n = (size_t)(offsets[b->bags] - offsets[0]);
    const uint32_t dim = persia_rows_file_dim(p->file);
    const float *weights = b->weights ? b->weights + first : NULL;
    float *out = b->out + p->column;

    if (p->kind == POOL_NONE)
        out += first * b->width;
    if (!weights && (p->kind == POOL_NONE || !b->offsets))
        return persia_rows_file_look_up(p->file, n, b->ids + first, out,
                                        b->width, absent);
    const int code = persia_rows_file_look_up(p->file, n, b->ids + first, rows,
                                              dim, absent);
    if (!code)
        persia_pool_forward(p->kind, b->bags, offsets, weights, rows, dim, out,
                            b->width);
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
                           size_t parts_n, uint64_t *absent)
{
    uint32_t widest;
    int64_t *one_each = NULL;
    *absent = 0;
    int code = batch_check(b, parts, parts_n, &widest);
    if (code)
        return code;
    float *rows = malloc((b->n * widest + 1) * sizeof *rows);
    if (!b->offsets)
        one_each = malloc((b->bags + 1) * sizeof *one_each);
    if (!rows || (!b->offsets && !one_each))
        code = persia_err_set(PERSIA_ENOMEM,
                              "no memory for the rows of %zu ids", b->n);
    for (size_t i = 0; one_each && i <= b->bags; i++)
        one_each[i] = (int64_t)i;
    for (size_t i = 0; !code && i < parts_n; i++)
        code = part_run(b, &parts[i], one_each, rows, absent);
    free(rows);
    free(one_each);
    return code;
}
