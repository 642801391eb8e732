/* private.h: one row of a file. */
#ifndef PERSIA_ROWS_FILE_PRIVATE_H
#define PERSIA_ROWS_FILE_PRIVATE_H

#include "rows_file/rows_file.h"

#include <stdatomic.h>

#include "ckpt/ckpt.h"
#include "ids/ids.h"

enum { ROWS_ID = 8, ROWS_ALIGN = 4096, ROWS_BUCKET = 64 };

struct rows_file {
    char name[CKPT_NAME];
    rows_config config;
    uint32_t stride;
    char *map;
    uint64_t bytes, rows, buckets;
    const bucket *index; /* [buckets], within the map, as are the rows */
    const char *row;     /* [rows] of `stride` bytes */
    table *absent;       /* without rows: the vectors of ids that have none */
    _Atomic(table *) fresh; /* fresh.c; NULL: no rows are newer */
    mem_limit limit;        /* of it */
};

/* What is newer than the file, of ids [n]: rows are written to out. */
enum { FRESH_NONE, FRESH_ROW, FRESH_GONE };
int rows_fresh_find(const rows_file *f, size_t n, const uint64_t *ids,
                    float *out, size_t stride, uint8_t *found);

/* A finite vector as a row, zeros at its end; 0: its values do not fit. */
int rows_narrow(const rows_config *c, uint32_t stride, uint64_t id,
                const float *vector, char *row);
/* The reverse. */
void persia_rows_widen(const rows_config *c, const char *row, float *out);

/* persia_rows_file_open() of a file that is open and has `bytes` bytes; the
 * descriptor stays the caller's. */
int rows_file_from(int fd, const char *name, uint64_t bytes,
                   const rows_config *config, const table_config *absent,
                   rows_file **out);

static inline uint64_t rows_id(const char *row)
{
    uint64_t id;
    __builtin_memcpy(&id, row, sizeof id);
    return id;
}

#endif
