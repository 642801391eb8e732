/* private.h: one row of a file. */
#ifndef PERSIA_ROWS_FILE_PRIVATE_H
#define PERSIA_ROWS_FILE_PRIVATE_H

#include "rows_file/rows_file.h"

#include "ids/ids.h"

enum { ROWS_ID = 8, ROWS_ALIGN = 4096, ROWS_BUCKET = 64 };

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
