/* writer.c: a new file: rows in the order in which they are given, then the
 * index and the header before them. */
#include "rows_file/private.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/ckpt.h"
#include "ckpt/files.h"

enum { BUFFER = 4 << 20, HEADER_MAX = 60 * 1024 };

struct rows_writer {
    int fd;
    char name[CKPT_NAME];
    rows_config config;
    uint32_t stride;
    uint64_t rows, written, buckets;
    bucket *index; /* [buckets], aligned to 64 bytes */
    char *header;  /* [data] */
    uint64_t data; /* where the index begins */
    char *buffer;  /* rows that are not in the file yet */
    size_t held;   /* bytes of them */
};

/* The header for an index and rows, with spaces up to where data begins. */
static int writer_make_header(rows_writer *w, const char *metadata)
{
    const uint64_t index = w->buckets * ROWS_BUCKET;
    const uint64_t rows = w->rows * w->stride;
    w->header = malloc(HEADER_MAX + ROWS_ALIGN);
    if (!w->header)
        return persia_err_set(PERSIA_ENOMEM, "%s: no memory for its header",
                              w->name);
    const int n = snprintf(
        w->header + 8, HEADER_MAX,
        "{\"__metadata__\":%s,\"index\":{\"dtype\":\"U8\",\"shape\":[%" PRIu64
        ",%d],\"data_offsets\":[0,%" PRIu64 "]},\"rows\":{\"dtype\":\"U8\","
        "\"shape\":[%" PRIu64 ",%" PRIu32 "],\"data_offsets\":[%" PRIu64
        ",%" PRIu64 "]}}",
        metadata, w->buckets, ROWS_BUCKET, index, w->rows, w->stride, index,
        index + rows);
    if (n < 0 || n >= HEADER_MAX)
        return persia_err_set(PERSIA_ELIMIT, "%s: metadata of %zu bytes",
                              w->name, strlen(metadata));
    w->data = ((uint64_t)n + 8 + ROWS_ALIGN - 1) / ROWS_ALIGN * ROWS_ALIGN;
    const uint64_t json = w->data - 8;
    memset(w->header + 8 + n, ' ', json - (uint64_t)n);
    for (int i = 0; i < 8; i++)
        w->header[i] = (char)(json >> (8 * i));
    return PERSIA_OK;
}

static int writer_memory(rows_writer *w, const char *metadata)
{
    const size_t index = w->buckets * sizeof(bucket);
    w->index = aligned_alloc(sizeof(bucket), index);
    w->buffer = malloc(BUFFER + (size_t)w->stride);
    if (!w->index || !w->buffer)
        return persia_err_set(PERSIA_ENOMEM,
                              "%s: no memory for an index of %zu bytes",
                              w->name, index);
    memset(w->index, 0, index);
    return writer_make_header(w, metadata);
}

int persia_rows_writer_open(int folder, const char *name,
                            const rows_config *config, uint64_t rows,
                            const char *metadata, rows_writer **out)
{
    const uint32_t stride = persia_rows_stride(config);
    int code = persia_ckpt_name_check(name);
    *out = NULL;
    if (!code && (!stride || !(config->key & 1)))
        code = persia_err_set(PERSIA_EARG,
                              "%s: no rows have type %" PRIu32 ", dim %" PRIu32
                              " and an even key",
                              name, config->type, config->dim);
    if (!code && rows >= ROWS_MAX)
        code = persia_err_set(PERSIA_ELIMIT,
                              "%s: %" PRIu64 " rows, and a file has at most %"
                              PRIu64 ": publish fewer of them",
                              name, rows, ROWS_MAX - 1);
    if (code)
        return code;
    rows_writer *w = calloc(1, sizeof *w);
    if (!w)
        return persia_err_set(PERSIA_ENOMEM, "%s: no memory", name);
    snprintf(w->name, sizeof w->name, "%s", name);
    w->config = *config;
    w->stride = stride;
    w->rows = rows;
    w->buckets = rows * 10 / 8 / BUCKET_ENTRIES + 1; /* load 0.8 */
    w->fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                   0666);
    if (w->fd < 0)
        code = persia_err_set(PERSIA_EIO, "%s: cannot be made: %s", name,
                              strerror(errno));
    if (!code)
        code = writer_memory(w, metadata);
    if (code)
        persia_rows_writer_close(w);
    else
        *out = w;
    return code;
}

static void writer_index_add(rows_writer *w, uint64_t id, uint32_t row)
{
    const uint64_t place = id_place(id, w->config.key);
    uint64_t at = place_home(place, w->buckets);
    uint32_t room;

    while (!(room = bucket_match(&w->index[at], 0))) {
        w->index[at].passed = 1;
        at = at + 1 == w->buckets ? 0 : at + 1;
    }
    const int entry = __builtin_ctz(room);
    w->index[at].tag[entry] = hash_tag(place);
    w->index[at].slot[entry] = row;
}

static int writer_flush(rows_writer *w)
{
    const uint64_t begin = w->data + w->buckets * ROWS_BUCKET;
    const uint64_t before = w->written * w->stride - w->held;
    const int code =
        file_write(w->fd, w->name, w->buffer, w->held, begin + before);
    w->held = 0;
    return code;
}

int persia_rows_writer_add(rows_writer *w, size_t n, const uint64_t *ids,
                           const float *vectors)
{
    if (n > w->rows - w->written)
        return persia_err_set(PERSIA_EARG,
                              "%s: more than the %" PRIu64 " rows that it "
                              "was made for",
                              w->name, w->rows);
    for (size_t i = 0; i < n; i++) {
        const float *vector = vectors + i * w->config.dim;
        if (!rows_narrow(&w->config, w->stride, ids[i], vector,
                         w->buffer + w->held))
            return persia_err_set(
                PERSIA_EARG,
                "%s: the row of id %lld has a value that is not finite, or "
                "too large for its type",
                w->name, (long long)ids[i]);
        w->held += w->stride;
        writer_index_add(w, ids[i], (uint32_t)w->written++);
        const int code = w->held >= BUFFER ? writer_flush(w) : PERSIA_OK;
        if (code)
            return code;
    }
    return PERSIA_OK;
}

int persia_rows_writer_finish(rows_writer *w)
{
    if (w->written != w->rows)
        return persia_err_set(PERSIA_EARG,
                              "%s: %" PRIu64 " of %" PRIu64 " rows were added",
                              w->name, w->written, w->rows);
    int code = writer_flush(w);
    if (!code)
        code = file_write(w->fd, w->name, w->index,
                          w->buckets * sizeof(bucket), w->data);
    if (!code)
        code = file_write(w->fd, w->name, w->header, w->data, 0);
    if (!code && fsync(w->fd))
        code = persia_err_set(PERSIA_EIO, "%s: cannot be synced: %s", w->name,
                              strerror(errno));
    return code;
}

void persia_rows_writer_close(rows_writer *w)
{
    if (!w)
        return;
    if (w->fd >= 0)
        close(w->fd);
    free(w->index);
    free(w->header);
    free(w->buffer);
    free(w);
}
