/* rows.h: one row file: its shape, writing it, reading it. */
#ifndef PERSIA_CKPT_ROWS_H
#define PERSIA_CKPT_ROWS_H

#include "ckpt/ckpt.h"
#include "ckpt/files.h"
#include "ckpt/safetensors.h"

/* The columns in the order in which they lie in files that we write: by
 * falling size of an element, so that each is aligned. */
enum { COL_IDS, COL_STATE, COL_CLOCK, COL_FIELD, COL_VECTORS, COLS };

/* What a row of a table looks like in a file. */
typedef struct row_shape {
    uint32_t dtype, state;      /* dtype: enum vector_dtype */
    uint32_t width;             /* elements of a vector, as it is kept */
    const evict_field *field;   /* NULL: rows have none */
    uint32_t bytes[COLS];       /* of one row; 0: there is no such column */
    uint32_t row;               /* bytes of one row, all columns */
} row_shape;
void row_shape_of(const table_config *config, row_shape *out);

/* Rows in memory, column by column, at most `room`. */
typedef struct row_piece {
    void *col[COLS]; /* aligned to 64 bytes; NULL if there is no column */
    size_t n, room;
    void *memory; /* mem_pages */
    size_t bytes;
} row_piece;
/* Room for about PIECE_BYTES. */
enum { PIECE_BYTES = 4 << 20 };
int row_piece_init(row_piece *p, const row_shape *shape);
void row_piece_free(row_piece *p);

/* ---- writing: create, append until all rows are there, finish ----------- */

typedef struct row_writer {
    int fd; /* -1: none is open */
    row_shape shape;
    st_header header;
    uint64_t rows, written;
    uint32_t header_crc, crc[COLS];
    ckpt_file file;
} row_writer;

/* A new file for exactly `rows` rows; `metadata`: see st_format(). */
int row_writer_create(row_writer *w, int folder, const char *name,
                      const row_shape *shape, uint64_t rows,
                      const char *metadata);
/* Rows first..first + n of the piece. */
int row_writer_append(row_writer *w, const row_piece *p, size_t first,
                      size_t n);
/* Syncs and closes; w->file is then complete. */
int row_writer_finish(row_writer *w);
/* Closes without finishing; for the way out after an error. */
void row_writer_close(row_writer *w);

/* ---- reading ------------------------------------------------------------ */

typedef struct row_reader {
    int fd;
    row_shape shape;
    st_header header;
    const st_tensor *col[COLS]; /* NULL if there is no column */
    uint64_t rows;
    uint32_t first_slot, slots; /* of the table's ids */
    char name[CKPT_NAME];
} row_reader;

/* Opens a file and checks its header: PERSIA_ECORRUPT unless it has the
 * columns of rows, PERSIA_EMISMATCH unless they are those of `config`'s table.
 * The field of another eviction than the table's is left out, and one may be
 * missing. */
int row_reader_open(row_reader *r, int folder, const char *name,
                    const table_config *config);
/* The same for a file that is open and has `bytes` bytes; the reader owns
 * and closes fd, also after an error. */
int row_reader_from(row_reader *r, int fd, const char *name, uint64_t bytes,
                    const table_config *config);
void row_reader_close(row_reader *r);
/* Reads the whole file: its CRC, and whether every clock is possible.
 * *here: rows whose ids are the table's. */
int row_reader_verify(row_reader *r, uint32_t *crc, uint64_t *here);
/* The ids of rows first..first + n. */
int row_reader_ids(const row_reader *r, uint64_t first, size_t n,
                   uint64_t *ids);
/* Rows first..first + n (n <= p->room) into the piece. */
int row_reader_read(const row_reader *r, uint64_t first, size_t n,
                    row_piece *p);

/* CRCs of parts of the file that sum up, by exclusive or and in any order, to
 * that of the whole: of rows that row_reader_read() has just left in the
 * piece, and of all bytes that it reads of no row. */
uint32_t row_reader_sum(const row_reader *r, uint64_t first,
                        const row_piece *p);
int row_reader_rest(const row_reader *r, uint32_t *sum);

#endif
