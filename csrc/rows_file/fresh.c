/* fresh.c: rows that are newer than the file, in memory.
 *
 * They are a table: fp32 vectors, and one float of state, which is 1 where an
 * id has no row any more.  A lookup asks the table first.  Its stripes' locks
 * are held for a run of ids, so a row is read as one packet has written it.
 */
#include "rows_file/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fresh_make(rows_file *f)
{
    table_config c;
    table *t;

    persia_table_config_init(&c);
    snprintf(c.name, sizeof c.name, "fresh");
    c.dim = f->config.dim;
    c.optimizer = OPTIM_ROWWISE_ADAGRAD; /* of one float a row */
    c.init = INIT_CONSTANT;
    c.init_a = c.init_b = 0;
    c.limit = &f->limit;
    const int rc = persia_table_create(&c, &t);
    if (!rc)
        atomic_store(&f->fresh, t);
    return rc;
}

static int fresh_set(rows_file *f, size_t n, const uint64_t *ids,
                     const float *vectors, float is_gone)
{
    float *state = malloc((n + 1) * sizeof *state);

    if (!state)
        return persia_err_set(PERSIA_ENOMEM, "%s: no memory", f->name);
    for (size_t i = 0; i < n; i++)
        state[i] = is_gone;
    const int rc = persia_table_set(atomic_load(&f->fresh), n, ids, vectors,
                                    state);
    free(state);
    return rc;
}

enum { PIECE = 1024 };

/* Rows of the file's type. */
static int fresh_put_rows(rows_file *f, size_t n, const char *rows,
                          float *vectors)
{
    uint64_t ids[PIECE];
    int rc = PERSIA_OK;

    for (size_t at = 0, some; at < n && !rc; at += some) {
        some = n - at < PIECE ? n - at : PIECE;
        for (size_t i = 0; i < some; i++) {
            const char *row = rows + (at + i) * f->stride;
            ids[i] = rows_id(row);
            persia_rows_widen(&f->config, row, vectors + i * f->config.dim);
        }
        rc = fresh_set(f, some, ids, vectors, 0);
    }
    return rc;
}

static int fresh_put_gone(rows_file *f, size_t n, const uint64_t *ids,
                          float *vectors)
{
    int rc = PERSIA_OK;

    memset(vectors, 0, (size_t)PIECE * f->config.dim * sizeof *vectors);
    for (size_t at = 0, some; at < n && !rc; at += some) {
        some = n - at < PIECE ? n - at : PIECE;
        rc = fresh_set(f, some, ids + at, vectors, 1);
    }
    return rc;
}

int persia_rows_file_apply(rows_file *f, size_t gone_n, const uint64_t *gone,
                           size_t n, const void *rows)
{
    const size_t floats = (size_t)PIECE * f->config.dim;
    int rc = PERSIA_OK;

    if (!atomic_load(&f->fresh))
        rc = fresh_make(f);
    float *vectors = rc ? NULL : malloc(floats * sizeof *vectors);
    if (!rc && !vectors)
        rc = persia_err_set(PERSIA_ENOMEM, "%s: no memory", f->name);
    if (!rc)
        rc = fresh_put_gone(f, gone_n, gone, vectors);
    if (!rc)
        rc = fresh_put_rows(f, n, rows, vectors);
    free(vectors);
    return rc;
}

void persia_rows_file_limit(rows_file *f, uint64_t bytes)
{
    f->limit.maximum = bytes;
}

uint64_t persia_rows_file_fresh(const rows_file *f)
{
    table *t = atomic_load(&f->fresh);
    table_stats stats = { 0 };

    if (t)
        persia_table_get_stats(t, &stats);
    return stats.rows;
}

int rows_fresh_find(const rows_file *f, size_t n, const uint64_t *ids,
                    float *out, size_t stride, uint8_t *found)
{
    table *t = atomic_load_explicit(&f->fresh, memory_order_acquire);
    const uint32_t dim = f->config.dim;
    const int apart = stride != dim;

    if (!t || !n) {
        memset(found, FRESH_NONE, n);
        return PERSIA_OK;
    }
    const size_t floats = n * ((apart ? dim : 0) + (size_t)1);
    float *state = malloc(floats * sizeof *state), *vectors = state + n;
    if (!state)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu ids", n);
    if (!apart)
        vectors = out;
    const int rc = persia_table_get(t, n, ids, vectors, state, found);
    for (size_t i = 0; i < n && !rc; i++) {
        found[i] = !found[i]    ? FRESH_NONE
                   : state[i] > 0 ? FRESH_GONE
                                  : FRESH_ROW;
        if (apart && found[i] == FRESH_ROW)
            memcpy(out + i * stride, vectors + i * dim, dim * sizeof *out);
    }
    free(state);
    return rc;
}
