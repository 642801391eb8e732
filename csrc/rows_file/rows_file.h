/* rows_file.h: the rows of a table that is served, in a file that is searched
 * where it lies.
 *
 * A file is mapped, never read into memory, so all processes of a machine
 * share its pages.  It is a complete safetensors file:
 *
 *   index  U8 [buckets, 64]   buckets as ids/bucket.h has them; the home of an
 *                             id is place_home(id_place(id, key), buckets)
 *   rows   U8 [n, stride]     id u64 | scale fp32 (integers) | values | zeros
 *
 * Data begins at a multiple of 4096 and the index stands first, so that
 * buckets are cache lines.  A row of integers has one scale: a value is the
 * scale times the integer.  Integers of four bits lie two a byte, the lower
 * half first; the lowest integer of each width is not used.
 *
 * A writer belongs to one thread.  A file may be searched by any number of
 * threads; nothing of it changes.  Newer rows lie beside it in memory, and
 * count before its own.  Bytes may come from anywhere: headers are checked
 * when a file is opened, and a search reads within the file whatever the index
 * says.
 */
#ifndef PERSIA_ROWS_FILE_H
#define PERSIA_ROWS_FILE_H

#include "table/table.h"

#ifdef __cplusplus
extern "C" {
#endif

enum rows_type { ROWS_FP32, ROWS_FP16, ROWS_INT8, ROWS_INT4, ROWS_TYPES };
enum { ROWS_DIM_MAX = 65536 };
/* Rows of a file: their numbers are 32 bits. */
#define ROWS_MAX ((uint64_t)UINT32_MAX)

typedef struct rows_config {
    uint32_t type; /* enum rows_type */
    uint32_t dim;
    uint64_t key;  /* of the places, odd; in the file's metadata */
} rows_config;

/* Bytes of a row; 0: there are no such rows. */
PERSIA_API uint32_t persia_rows_stride(const rows_config *c);

/* Rows [n, stride] of ids [n] and vectors [n, dim].  PERSIA_EARG as in
 * persia_rows_writer_add(). */
PERSIA_API int persia_rows_narrow(const rows_config *c, size_t n,
                                  const uint64_t *ids, const float *vectors,
                                  char *rows);

/* ---- writing: open, add until all rows are there, finish ---------------- */

typedef struct rows_writer rows_writer;
/* A new file for exactly `rows` rows.  `metadata`: a JSON object of texts. */
PERSIA_API int persia_rows_writer_open(int folder, const char *name,
                                       const rows_config *config,
                                       uint64_t rows, const char *metadata,
                                       rows_writer **out);
/* Rows [n] with their vectors [n, dim], no id of which the file has.
 * PERSIA_EARG for values that rows of this type cannot have: NaN and Inf. */
PERSIA_API int persia_rows_writer_add(rows_writer *w, size_t n,
                                      const uint64_t *ids,
                                      const float *vectors);
/* Writes the index and syncs.  The writer stays to be closed. */
PERSIA_API int persia_rows_writer_finish(rows_writer *w);
/* The file stays, whole or not; NULL is allowed. */
PERSIA_API void persia_rows_writer_close(rows_writer *w);

/* ---- reading ------------------------------------------------------------ */

typedef struct rows_file rows_file;
/* Maps a file of a folder.  Ids without a row have the vectors of a table of
 * this configuration without rows.  PERSIA_ECORRUPT, PERSIA_EMISMATCH (other
 * rows than `config` says), PERSIA_EIO. */
PERSIA_API int persia_rows_file_open(int folder, const char *name,
                                     const rows_config *config,
                                     const table_config *absent,
                                     rows_file **out);
PERSIA_API void persia_rows_file_close(rows_file *f); /* NULL is allowed */
PERSIA_API uint64_t persia_rows_file_rows(const rows_file *f);
PERSIA_API uint32_t persia_rows_file_dim(const rows_file *f);

/* The vectors of ids [n], `stride` floats apart; *absent: ids without row. */
PERSIA_API int persia_rows_file_look_up(const rows_file *f, size_t n,
                                        const uint64_t *ids, float *out,
                                        size_t stride, uint64_t *absent);
/* found[i] is 1 if ids[i] has a row. */
PERSIA_API int persia_rows_file_contains(const rows_file *f, size_t n,
                                         const uint64_t *ids, uint8_t *found);
/* From now on ids of gone [gone_n] have no row, and rows [n], as those of the
 * file, are there; one thread at a time.  A row is read whole, before or
 * after.  PERSIA_ELIMIT where they have no room, PERSIA_ENONFINITE where a
 * value is not finite: some of them may be there. */
PERSIA_API int persia_rows_file_apply(rows_file *f, size_t gone_n,
                                      const uint64_t *gone, size_t n,
                                      const void *rows);
/* Bytes that such rows may take, before the first; 0: any. */
PERSIA_API void persia_rows_file_limit(rows_file *f, uint64_t bytes);
/* How many ids there are beside the file. */
PERSIA_API uint64_t persia_rows_file_fresh(const rows_file *f);
/* Rows first..first + n in the order of the file: ids [n] and vectors
 * [n, dim], either may be NULL. */
PERSIA_API int persia_rows_file_read(const rows_file *f, uint64_t first,
                                     size_t n, uint64_t *ids, float *vectors);
/* Searches for each row: PERSIA_ECORRUPT if one is not found where it is, or
 * if the index has entries of no row.  Polls persia_interrupt_poll(). */
PERSIA_API int persia_rows_file_check(const rows_file *f);

/* One output of a batch: a feature, its table's file, the first column. */
typedef struct rows_part {
    const rows_file *file;
    size_t feature;
    uint32_t kind; /* enum pool_kind */
    size_t column;
} rows_part;

typedef struct rows_batch {
    size_t features, n;
    const uint64_t *ids;     /* [n] */
    const int64_t *offsets;  /* [features * bags + 1]; NULL: one id a bag */
    size_t bags;             /* of a feature */
    const float *weights;    /* [n] or NULL */
    float *out;              /* rows of `width` floats: one a bag; of parts
                                that do not pool, one an id */
    size_t width;
} rows_batch;
typedef struct rows_counts {
    uint64_t ids, absent; /* looked up, and those of them without a row */
} rows_counts;
/* Looks up and pools: bits are those of a lookup in a table of the same rows.
 * Equal bags that follow one another are looked up once, and so is an id that
 * is not pooled.  Columns of no part stay.  PERSIA_EOFFSETS for impossible
 * offsets, PERSIA_ELIMIT for 2^32 - 1 ids. */
PERSIA_API int persia_rows_file_batch(const rows_batch *b,
                                      const rows_part *parts, size_t parts_n,
                                      rows_counts *counts);

#ifdef __cplusplus
}
#endif
#endif
