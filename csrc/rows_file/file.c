/* file.c: a file that is mapped and searched. */
#include "rows_file/private.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ckpt/ckpt.h"
#include "ckpt/files.h"
#include "ckpt/safetensors.h"

/* Ids whose cache lines are fetched together. */
enum { GROUP = 128 };

/* Finds index and rows in the header. */
static int file_place_tensors(rows_file *f, const st_header *h)
{
    const st_tensor *index = &h->tensors[0], *rows = &h->tensors[1];
    if (h->n != 2 || strcmp(index->name, "index") ||
        strcmp(rows->name, "rows") || index->dtype != ST_U8 ||
        rows->dtype != ST_U8 || index->rank != 2 || rows->rank != 2 ||
        index->shape[1] != ROWS_BUCKET || index->shape[0] < 1 ||
        index->shape[0] > UINT32_MAX || rows->shape[0] >= ROWS_MAX ||
        h->data % ROWS_BUCKET)
        return persia_err_set(PERSIA_ECORRUPT,
                              "%s: its tensors are not `index` U8 [n, 64] and "
                              "`rows` U8 [n, stride], at a multiple of 64",
                              f->name);
    if (rows->shape[1] != f->stride)
        return persia_err_set(PERSIA_EMISMATCH,
                              "%s: rows of %" PRIu64 " bytes, need %" PRIu32,
                              f->name, rows->shape[1], f->stride);
    f->buckets = index->shape[0];
    f->rows = rows->shape[0];
    f->index = (const void *)(f->map + h->data + index->begin);
    f->row = f->map + h->data + rows->begin;
    return PERSIA_OK;
}

static int map_file(rows_file *f, int fd)
{
    st_header h;
    size_t json;
    if (f->bytes < 8)
        return persia_err_set(PERSIA_ECORRUPT, "%s: it has %" PRIu64 " bytes",
                              f->name, f->bytes);
    void *map = mmap(NULL, f->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return persia_err_set(PERSIA_EIO, "%s: cannot be mapped: %s", f->name,
                              strerror(errno));
    f->map = map;
    int code = st_json_bytes(f->name, map, f->bytes, &json);
    if (!code)
        code = st_parse(f->name, f->map + 8, json, f->bytes, &h);
    if (!code)
        code = file_place_tensors(f, &h);
    if (!code) { /* advice: what it returns changes nothing */
        (void)madvise(map, f->bytes, MADV_RANDOM);
        (void)madvise(map, h.data + f->buckets * ROWS_BUCKET, MADV_WILLNEED);
    }
    return code;
}

int rows_file_from(int fd, const char *name, uint64_t bytes,
                   const rows_config *config, const table_config *absent,
                   rows_file **out)
{
    *out = NULL;
    rows_file *f = calloc(1, sizeof *f);
    if (!f)
        return persia_err_set(PERSIA_ENOMEM, "%s: no memory", name);
    snprintf(f->name, sizeof f->name, "%s", name);
    f->config = *config;
    f->stride = persia_rows_stride(config);
    f->bytes = bytes;
    persia_mem_limit_init(&f->limit, 0);
    int code = f->stride && absent->dim == config->dim
                   ? PERSIA_OK
                   : persia_err_set(PERSIA_EARG,
                                    "%s: no rows have type %" PRIu32
                                    " and dim %" PRIu32,
                                    name, config->type, config->dim);
    if (!code)
        code = persia_table_create(absent, &f->absent);
    if (!code)
        code = map_file(f, fd);
    if (code)
        persia_rows_file_close(f);
    else
        *out = f;
    return code;
}

int persia_rows_file_open(int folder, const char *name,
                          const rows_config *config,
                          const table_config *absent, rows_file **out)
{
    int fd;
    uint64_t bytes;
    *out = NULL;
    int code = file_open(folder, name, &fd, &bytes);
    if (code)
        return code;
    code = rows_file_from(fd, name, bytes, config, absent, out);
    close(fd);
    return code;
}

void persia_rows_file_close(rows_file *f)
{
    if (!f)
        return;
    if (f->map)
        munmap(f->map, f->bytes);
    persia_table_destroy(f->absent);
    persia_table_destroy(atomic_load(&f->fresh));
    persia_mem_limit_free(&f->limit);
    free(f);
}

uint64_t persia_rows_file_rows(const rows_file *f)
{
    return f->rows;
}

uint32_t persia_rows_file_dim(const rows_file *f)
{
    return f->config.dim;
}

/* ---- searching ---------------------------------------------------------- */

static const char *row_at(const rows_file *f, uint32_t row)
{
    return row < f->rows ? f->row + (uint64_t)row * f->stride : NULL;
}

/* The row of an id, or NULL. */
static const char *file_find(const rows_file *f, uint64_t id, uint64_t place)
{
    const uint8_t tag = hash_tag(place);
    uint64_t at = place_home(place, f->buckets);

    for (uint64_t tried = 0; tried < f->buckets; tried++) {
        const bucket *b = &f->index[at];
        for (uint32_t m = bucket_match(b, tag); m; m &= m - 1) {
            const char *row = row_at(f, b->slot[__builtin_ctz(m)]);
            if (row && rows_id(row) == id)
                return row;
        }
        if (!b->passed)
            return NULL;
        at = at + 1 == f->buckets ? 0 : at + 1;
    }
    return NULL;
}

/* Rows of n <= GROUP ids: first the buckets are fetched, then the rows that
 * they name, then all is compared. */
static void file_find_group(const rows_file *f, size_t n, const uint64_t *ids,
                            const char *rows[GROUP])
{
    uint64_t place[GROUP];

    for (size_t i = 0; i < n; i++) {
        place[i] = id_place(ids[i], f->config.key);
        __builtin_prefetch(&f->index[place_home(place[i], f->buckets)]);
    }
    for (size_t i = 0; i < n; i++) {
        const bucket *b = &f->index[place_home(place[i], f->buckets)];
        const uint32_t m = bucket_match(b, hash_tag(place[i]));
        rows[i] = m ? row_at(f, b->slot[__builtin_ctz(m)]) : NULL;
        if (rows[i]) {
            __builtin_prefetch(rows[i]);
            __builtin_prefetch(rows[i] + f->stride - 1);
        }
    }
    for (size_t i = 0; i < n; i++)
        if (!rows[i] || rows_id(rows[i]) != ids[i])
            rows[i] = file_find(f, ids[i], place[i]);
}

/* As a lookup in the table has it. */
static int file_absent_vector(const rows_file *f, const uint64_t *id,
                              float *to)
{
    if (persia_table_get_config(f->absent)->missing == MISSING_ZEROS) {
        memset(to, 0, f->config.dim * sizeof *to);
        return PERSIA_OK;
    }
    return persia_table_get(f->absent, 1, id, to, NULL, NULL);
}

/* fresh: [n] of rows_fresh_find(), or NULL. */
static int file_look_up(const rows_file *f, size_t n, const uint64_t *ids,
                        const uint8_t *fresh, float *out, size_t stride,
                        uint64_t *absent)
{
    const char *rows[GROUP];

    for (size_t at = 0; at < n; at += GROUP) {
        const size_t some = n - at < GROUP ? n - at : GROUP;
        file_find_group(f, some, ids + at, rows);
        for (size_t i = 0; i < some; i++) {
            const size_t k = at + i;
            const int is = fresh ? fresh[k] : FRESH_NONE;
            if (is == FRESH_ROW)
                continue;
            if (rows[i] && is == FRESH_NONE) {
                persia_rows_widen(&f->config, rows[i], out + k * stride);
                continue;
            }
            ++*absent;
            const int code = file_absent_vector(f, ids + k, out + k * stride);
            if (code)
                return code;
        }
    }
    return PERSIA_OK;
}

int persia_rows_file_look_up(const rows_file *f, size_t n, const uint64_t *ids,
                             float *out, size_t stride, uint64_t *absent)
{
    if (!atomic_load_explicit(&f->fresh, memory_order_acquire))
        return file_look_up(f, n, ids, NULL, out, stride, absent);
    uint8_t *fresh = malloc(n + 1);
    int code = fresh ? rows_fresh_find(f, n, ids, out, stride, fresh)
                     : persia_err_set(PERSIA_ENOMEM, "no memory for %zu ids",
                                      n);
    if (!code)
        code = file_look_up(f, n, ids, fresh, out, stride, absent);
    free(fresh);
    return code;
}

int persia_rows_file_contains(const rows_file *f, size_t n,
                              const uint64_t *ids, uint8_t *found)
{
    const uint32_t dim = f->config.dim;
    float *vectors = NULL;
    const char *rows[GROUP];
    int code = PERSIA_OK;

    if (atomic_load_explicit(&f->fresh, memory_order_acquire) &&
        !(vectors = malloc((n * dim + 1) * sizeof *vectors)))
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu ids", n);
    code = rows_fresh_find(f, vectors ? n : 0, ids, vectors, dim, found);
    for (size_t at = 0; at < n && !code; at += GROUP) {
        const size_t some = n - at < GROUP ? n - at : GROUP;
        file_find_group(f, some, ids + at, rows);
        for (size_t i = 0; i < some; i++)
            found[at + i] = vectors && found[at + i] != FRESH_NONE
                                ? found[at + i] == FRESH_ROW
                                : rows[i] != NULL;
    }
    free(vectors);
    return code;
}

/* ---- all rows ----------------------------------------------------------- */

int persia_rows_file_read(const rows_file *f, uint64_t first, size_t n,
                          uint64_t *ids, float *vectors)
{
    if (first > f->rows || n > f->rows - first)
        return persia_err_set(PERSIA_EARG,
                              "%s: %zu rows from %" PRIu64 " on of %" PRIu64,
                              f->name, n, first, f->rows);
    for (size_t i = 0; i < n; i++) {
        const char *row = f->row + (first + i) * f->stride;
        if (ids)
            ids[i] = rows_id(row);
        if (vectors)
            persia_rows_widen(&f->config, row, vectors + i * f->config.dim);
    }
    return PERSIA_OK;
}

int persia_rows_file_check(const rows_file *f)
{
    uint64_t entries = 0;
    int code = PERSIA_OK;

    for (uint64_t i = 0; !code && i < f->buckets; i++) {
        const uint32_t none = bucket_match(&f->index[i], 0);
        entries += BUCKET_ENTRIES - (unsigned)__builtin_popcount(none);
        code = i & 0xFFFF ? PERSIA_OK : persia_interrupt_poll();
    }
    if (!code && entries != f->rows)
        return persia_err_set(PERSIA_ECORRUPT,
                              "%s: %" PRIu64 " entries for %" PRIu64 " rows",
                              f->name, entries, f->rows);
    for (uint64_t i = 0; !code && i < f->rows; i++) {
        const char *row = f->row + i * f->stride;
        const uint64_t id = rows_id(row);
        if (file_find(f, id, id_place(id, f->config.key)) != row)
            return persia_err_set(PERSIA_ECORRUPT,
                                  "%s: row %" PRIu64 " of id %lld is not "
                                  "found: it is there twice, or the index "
                                  "is damaged",
                                  f->name, i, (long long)id);
        code = i & 0xFFFF ? PERSIA_OK : persia_interrupt_poll();
    }
    return code;
}
