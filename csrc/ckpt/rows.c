#include "ckpt/rows.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/crc32c.h"
#include "ids/ids.h"
#include "mem/mem.h"

/* That of the field is the table's. */
static const char *const col_names[COLS] = {
    [COL_IDS] = "ids",
    [COL_STATE] = "state",
    [COL_CLOCK] = "clock",
    [COL_VECTORS] = "vectors",
};

static const char *rows_col_name(const row_shape *shape, int col)
{
    return col != COL_FIELD ? col_names[col]
           : shape->field   ? shape->field->name
                            : "";
}

static uint32_t rows_col_dtype(const row_shape *shape, int col)
{
    switch (col) {
    case COL_IDS:
        return ST_U64;
    case COL_CLOCK:
        return ST_U32;
    case COL_VECTORS:
        return shape->dtype == VECTOR_FP32   ? ST_F32
               : shape->dtype == VECTOR_BF16 ? ST_BF16
                                             : ST_U8;
    case COL_FIELD:
        return shape->field && !shape->field->is_float ? ST_U32 : ST_F32;
    default:
        return ST_F32;
    }
}

void row_shape_of(const table_config *config, row_shape *out)
{
    evictor evict;
    memset(out, 0, sizeof *out);
    if (!persia_evict_make(&config->spec, config->score, NULL, &evict))
        out->field = evict.field; /* else there is no such table */
    out->dtype = config->dtype;
    out->state = persia_optim_state_floats(config->optimizer, config->dim,
                                           (int)config->momentum);
    out->bytes[COL_IDS] = 8;
    out->bytes[COL_CLOCK] = 4;
    out->bytes[COL_FIELD] = out->field ? 4 : 0;
    out->bytes[COL_STATE] = 4 * out->state;
    out->bytes[COL_VECTORS] = vector_size(config->dtype, config->dim);
    out->width = out->bytes[COL_VECTORS] /
                 st_dtype_bytes(rows_col_dtype(out, COL_VECTORS));
    for (int c = 0; c < COLS; c++)
        out->row += out->bytes[c];
}

int row_piece_init(row_piece *p, const row_shape *shape)
{
    size_t at[COLS], size = 0;
    memset(p, 0, sizeof *p);
    p->room = PIECE_BYTES / shape->row;
    if (p->room == 0)
        p->room = 1;
    for (int c = 0; c < COLS; c++) {
        at[c] = size;
        size += (p->room * shape->bytes[c] + 63) / 64 * 64;
    }
    int rc = persia_mem_pages_take(size, &p->memory);
    if (rc)
        return rc;
    p->bytes = size;
    for (int c = 0; c < COLS; c++)
        p->col[c] = shape->bytes[c] ? (char *)p->memory + at[c] : NULL;
    return PERSIA_OK;
}

void row_piece_free(row_piece *p)
{
    persia_mem_pages_give(p->memory, p->bytes);
    memset(p, 0, sizeof *p);
}

/* ---- writing ------------------------------------------------------------ */

int file_write(int fd, const char *name, const void *data, size_t n,
                      uint64_t offset)
{
    const char *p = data;
    while (n) {
        ssize_t done = pwrite(fd, p, n, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return persia_err_set(PERSIA_EIO, "%s: writing failed: %s", name,
                                  strerror(errno));
        p += done;
        n -= (size_t)done;
        offset += (uint64_t)done;
    }
    return PERSIA_OK;
}

int row_writer_create(row_writer *w, int folder, const char *name,
                      const row_shape *shape, uint64_t rows,
                      const char *metadata)
{
    char head[4096];
    size_t n;
    int code = persia_ckpt_name_check(name);
    if (code)
        return code;
    memset(w, 0, sizeof *w);
    w->fd = -1;
    w->shape = *shape;
    w->rows = rows;
    for (int c = 0; c < COLS; c++) {
        if (!shape->bytes[c])
            continue;
        st_tensor *t = &w->header.tensors[w->header.n++];
        snprintf(t->name, sizeof t->name, "%s", rows_col_name(shape, c));
        t->dtype = rows_col_dtype(shape, c);
        t->shape[t->rank++] = rows;
        if (c == COL_VECTORS)
            t->shape[t->rank++] = shape->width;
        if (c == COL_STATE)
            t->shape[t->rank++] = shape->state;
    }
    if ((code = st_format(&w->header, metadata, head, sizeof head, &n)))
        return code;
    snprintf(w->file.name, sizeof w->file.name, "%s", name);
    w->file.rows = rows;
    w->file.bytes = w->header.bytes;
    w->header_crc = persia_crc32c(0, head, n);
    w->fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                   0666);
    if (w->fd < 0)
        return persia_err_set(PERSIA_EIO, "%s: cannot be made: %s", name,
                              strerror(errno));
    return file_write(w->fd, name, head, n, 0);
}

int row_writer_append(row_writer *w, const row_piece *p, size_t first,
                      size_t n)
{
    size_t tensor = 0;
    if (n > w->rows - w->written)
        return persia_err_set(PERSIA_EINTERNAL, "%s: more rows than announced",
                              w->file.name);
    for (int c = 0; c < COLS; c++) {
        size_t bytes = w->shape.bytes[c];
        if (!bytes)
            continue;
        const char *data = (const char *)p->col[c] + first * bytes;
        uint64_t offset = w->header.data +
                          w->header.tensors[tensor++].begin +
                          w->written * bytes;
        int code =
            file_write(w->fd, w->file.name, data, n * bytes, offset);
        if (code)
            return code;
        w->crc[c] = persia_crc32c(w->crc[c], data, n * bytes);
    }
    w->written += n;
    return PERSIA_OK;
}

int row_writer_finish(row_writer *w)
{
    int code = PERSIA_OK;
    if (w->written != w->rows)
        return persia_err_set(PERSIA_EINTERNAL,
                              "%s: %" PRIu64 " rows written, %" PRIu64
                              " announced",
                              w->file.name, w->written, w->rows);
    w->file.crc = w->header_crc;
    for (int c = 0; c < COLS; c++)
        w->file.crc = persia_crc32c_combine(w->file.crc, w->crc[c],
                                            w->rows * w->shape.bytes[c]);
    if (fsync(w->fd))
        code = persia_err_set(PERSIA_EIO, "%s: fsync failed: %s", w->file.name,
                              strerror(errno));
    if (close(w->fd) && !code)
        code = persia_err_set(PERSIA_EIO, "%s: closing failed: %s",
                              w->file.name, strerror(errno));
    w->fd = -1;
    return code;
}

void row_writer_close(row_writer *w)
{
    if (w->fd >= 0)
        close(w->fd);
    w->fd = -1;
}

/* ---- reading ------------------------------------------------------------ */

int file_open(int folder, const char *name, int *fd, uint64_t *bytes)
{
    struct stat st;
    int code = persia_ckpt_name_check(name);
    if (code)
        return code;
    /* O_NONBLOCK: a FIFO must not make us wait for its writer. */
    *fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0)
        return persia_err_set(PERSIA_EIO, "%s: cannot be opened: %s", name,
                              strerror(errno));
    if (fstat(*fd, &st))
        code = persia_err_set(PERSIA_EIO, "%s: cannot be examined: %s", name,
                              strerror(errno));
    else if (!S_ISREG(st.st_mode))
        code = persia_err_set(PERSIA_EIO, "%s: not a plain file", name);
    if (code) {
        close(*fd);
        *fd = -1;
        return code;
    }
    *bytes = (uint64_t)st.st_size;
    return PERSIA_OK;
}

int file_read(int fd, const char *name, void *out, size_t n, uint64_t offset)
{
    char *p = out;
    while (n) {
        ssize_t done = pread(fd, p, n, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return persia_err_set(PERSIA_EIO, "%s: reading failed: %s", name,
                                  strerror(errno));
        if (done == 0)
            return persia_err_set(PERSIA_ECORRUPT,
                                  "%s: the file ends at byte %" PRIu64
                                  ": it is truncated",
                                  name, offset);
        p += done;
        n -= (size_t)done;
        offset += (uint64_t)done;
    }
    return PERSIA_OK;
}

/* Whether this is the field of some eviction. */
static int rows_is_field(const st_tensor *t)
{
    for (int i = 0; i < EVICT_FIELDS; i++)
        if (!strcmp(t->name, persia_evict_fields[i].name))
            return 1;
    return 0;
}

/* Finds the columns among the tensors; their shapes must be a row file's. */
static int rows_find_columns(row_reader *r)
{
    const st_header *h = &r->header;
    for (size_t i = 0; i < h->n; i++) {
        const st_tensor *t = &h->tensors[i];
        int c = 0;
        while (c < COLS && strcmp(t->name, rows_col_name(&r->shape, c)))
            c++;
        if (c == COLS && rows_is_field(t))
            continue;
        if (c == COLS)
            return persia_err_set(
                PERSIA_ECORRUPT,
                "%s: tensor '%s' does not belong in a row file", r->name,
                t->name);
        uint32_t rank = c == COL_VECTORS || c == COL_STATE ? 2 : 1;
        if (t->rank != rank || (rank == 2 && t->shape[1] > UINT32_MAX))
            return persia_err_set(
                PERSIA_ECORRUPT,
                "%s: tensor '%s' has another shape than rows have", r->name,
                t->name);
        r->col[c] = t;
    }
    if (!r->col[COL_IDS] || !r->col[COL_VECTORS] || !r->col[COL_CLOCK])
        return persia_err_set(
            PERSIA_ECORRUPT, "%s: ids, vectors or clock are missing", r->name);
    r->rows = r->col[COL_IDS]->shape[0];
    for (int c = 0; c < COLS; c++)
        if (r->col[c] && r->col[c]->shape[0] != r->rows)
            return persia_err_set(PERSIA_ECORRUPT,
                                  "%s: tensor '%s' has %" PRIu64
                                  " rows, ids has %" PRIu64,
                                  r->name, rows_col_name(&r->shape, c),
                                  r->col[c]->shape[0], r->rows);
    return PERSIA_OK;
}

/* Whether the columns are what the table stores. */
static int rows_match_columns(const row_reader *r, const char *table)
{
    static const char *const dtype_names[ST_DTYPES] = {"U64", "F32", "U32",
                                                       "BF16", "U8"};
    const row_shape *s = &r->shape;
    const st_tensor *v = r->col[COL_VECTORS], *st = r->col[COL_STATE];
    uint64_t state = st ? st->shape[1] : 0;
    for (int c = 0; c < COLS; c++)
        if (r->col[c] && r->col[c]->dtype != rows_col_dtype(s, c))
            return persia_err_set(
                PERSIA_EMISMATCH,
                "table '%s': %s of %s in %s, but the table has %s", table,
                rows_col_name(s, c), dtype_names[r->col[c]->dtype], r->name,
                dtype_names[rows_col_dtype(s, c)]);
    if (v->shape[1] != s->width)
        return persia_err_set(PERSIA_EMISMATCH,
                              "table '%s': rows of width %" PRIu64
                              " in %s, but the table has width %u",
                              table, v->shape[1], r->name, s->width);
    if (state != s->state)
        return persia_err_set(
            PERSIA_EMISMATCH,
            "table '%s': %" PRIu64
            " floats of optimizer state a row in %s, but the "
            "table has %u",
            table, state, r->name, s->state);
    return PERSIA_OK;
}

/* Reads and checks the header of a reader whose fd, name and shape are
 * set. */
static int rows_read_header(row_reader *r, uint64_t bytes, const char *table)
{
    unsigned char first[8];
    size_t n;
    char *json;
    int code;
    if (bytes < sizeof first)
        return persia_err_set(PERSIA_ECORRUPT,
                              "%s: a file of %" PRIu64
                              " bytes: it is truncated",
                              r->name, bytes);
    if ((code = file_read(r->fd, r->name, first, sizeof first, 0)) ||
        (code = st_json_bytes(r->name, first, bytes, &n)))
        return code;
    json = malloc(n + 1);
    if (!json)
        return persia_err_set(PERSIA_ENOMEM, "%s: %zu bytes for its header",
                              r->name, n);
    code = file_read(r->fd, r->name, json, n, sizeof first);
    if (!code)
        code = st_parse(r->name, json, n, bytes, &r->header);
    if (!code)
        code = rows_find_columns(r);
    if (!code)
        code = rows_match_columns(r, table);
    free(json);
    return code;
}

int row_reader_from(row_reader *r, int fd, const char *name, uint64_t bytes,
                    const table_config *config)
{
    memset(r, 0, sizeof *r);
    r->fd = fd;
    row_shape_of(config, &r->shape);
    r->first_slot = config->first_slot;
    r->slots = config->slots ? config->slots : IDS_SLOTS;
    snprintf(r->name, sizeof r->name, "%s", name);
    int code = rows_read_header(r, bytes, config->name);
    if (code)
        row_reader_close(r);
    return code;
}

int row_reader_open(row_reader *r, int folder, const char *name,
                    const table_config *config)
{
    int fd;
    uint64_t bytes = 0;
    int code = file_open(folder, name, &fd, &bytes);
    return code ? code : row_reader_from(r, fd, name, bytes, config);
}

void row_reader_close(row_reader *r)
{
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
}

/* A clock of 0 marks a free slot in a table: no row may have it. */
static int rows_check_clocks(const row_reader *r, const uint32_t *clock,
                             size_t n, uint64_t first)
{
    size_t zero = 0;
    for (size_t i = 0; i < n; i++)
        zero += clock[i] == 0;
    if (zero == 0)
        return PERSIA_OK;
    return persia_err_set(
        PERSIA_ECORRUPT, "%s: a clock of 0 among rows %" PRIu64 " to %" PRIu64,
        r->name, first, first + n - 1);
}

static uint64_t rows_count_here(const row_reader *r, const uint64_t *ids,
                                size_t n)
{
    uint64_t here = 0;
    for (size_t i = 0; i < n; i++)
        here += hash_slot(id_hash(ids[i])) - r->first_slot < r->slots;
    return here;
}

int row_reader_verify(row_reader *r, uint32_t *crc, uint64_t *here)
{
    /* The header and then the tensors in the order of their extents are all
     * of the file: st_parse() has seen to it. */
    size_t room = PIECE_BYTES;
    void *pages;
    int code = persia_mem_pages_take(room, &pages);
    char *buffer = pages;
    uint32_t sum = 0;
    *here = 0;
    if (code)
        return code;
    for (uint64_t at = 0; at < r->header.data && !code;) {
        size_t n = r->header.data - at < room ? (size_t)(r->header.data - at)
                                              : room;
        if (!(code = file_read(r->fd, r->name, buffer, n, at)))
            sum = persia_crc32c(sum, buffer, n);
        at += n;
    }
    for (size_t i = 0; i < r->header.n && !code; i++) {
        const st_tensor *t = &r->header.tensors[i];
        for (uint64_t at = t->begin; at < t->end && !code;) {
            size_t n = t->end - at < room ? (size_t)(t->end - at) : room;
            if ((code = persia_interrupt_poll()) ||
                (code = file_read(r->fd, r->name, buffer, n,
                                  r->header.data + at)))
                break;
            sum = persia_crc32c(sum, buffer, n);
            if (t == r->col[COL_CLOCK])
                code = rows_check_clocks(r, (const uint32_t *)(void *)buffer,
                                         n / 4, (at - t->begin) / 4);
            if (t == r->col[COL_IDS])
                *here += rows_count_here(r, (const uint64_t *)(void *)buffer,
                                         n / 8);
            at += n;
        }
    }
    persia_mem_pages_give(pages, room);
    *crc = sum;
    return code;
}

int row_reader_ids(const row_reader *r, uint64_t first, size_t n,
                   uint64_t *ids)
{
    return file_read(r->fd, r->name, ids, n * sizeof *ids,
                     r->header.data + r->col[COL_IDS]->begin +
                         first * sizeof *ids);
}

int row_reader_read(const row_reader *r, uint64_t first, size_t n,
                    row_piece *p)
{
    if (n > p->room || first > r->rows || n > r->rows - first)
        return persia_err_set(PERSIA_EINTERNAL, "%s: rows outside of the file",
                              r->name);
    for (int c = 0; c < COLS; c++) {
        size_t bytes = r->shape.bytes[c];
        if (!bytes || !r->col[c])
            continue;
        int code = file_read(r->fd, r->name, p->col[c], n * bytes,
                             r->header.data + r->col[c]->begin +
                                 first * bytes);
        if (code)
            return code;
    }
    p->n = n;
    return rows_check_clocks(r, p->col[COL_CLOCK], n, first);
}

/* What a part of the file, which ends at `end`, adds to the CRC of all. */
static uint32_t rows_part_sum(const row_reader *r, uint32_t crc, uint64_t end)
{
    return persia_crc32c_combine(crc, 0, r->header.bytes - end);
}

/* Whether row_reader_read() reads the column. */
static int rows_is_read(const row_reader *r, int c)
{
    return r->shape.bytes[c] && r->col[c];
}

uint32_t row_reader_sum(const row_reader *r, uint64_t first,
                        const row_piece *p)
{
    uint32_t sum = 0;
    for (int c = 0; c < COLS; c++) {
        if (!rows_is_read(r, c))
            continue;
        const size_t bytes = p->n * r->shape.bytes[c];
        sum ^= rows_part_sum(r, persia_crc32c(0, p->col[c], bytes),
                             r->header.data + r->col[c]->begin +
                                 (first + p->n) * r->shape.bytes[c]);
    }
    return sum;
}

/* Of the bytes from `begin` to `end`. */
static int rows_range_sum(const row_reader *r, uint64_t begin, uint64_t end,
                          void *buffer, uint32_t *sum)
{
    uint32_t crc = 0;
    int code = PERSIA_OK;
    for (uint64_t at = begin; at < end && !code;) {
        const size_t n = end - at < PIECE_BYTES ? (size_t)(end - at)
                                                : PIECE_BYTES;
        if (!(code = persia_interrupt_poll()) &&
            !(code = file_read(r->fd, r->name, buffer, n, at)))
            crc = persia_crc32c(crc, buffer, n);
        at += n;
    }
    *sum ^= rows_part_sum(r, crc, end);
    return code;
}

int row_reader_rest(const row_reader *r, uint32_t *sum)
{
    void *buffer;
    int code = persia_mem_pages_take(PIECE_BYTES, &buffer);
    *sum = 0;
    if (code)
        return code;
    code = rows_range_sum(r, 0, r->header.data, buffer, sum);
    for (size_t i = 0; i < r->header.n && !code; i++) {
        const st_tensor *t = &r->header.tensors[i];
        int known = 0;
        for (int c = 0; c < COLS; c++)
            known |= r->col[c] == t && rows_is_read(r, c);
        if (!known)
            code = rows_range_sum(r, r->header.data + t->begin,
                                  r->header.data + t->end, buffer, sum);
    }
    persia_mem_pages_give(buffer, PIECE_BYTES);
    return code;
}
