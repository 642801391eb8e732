/* data.h: text to columns and 64-bit ids, and click logs made to order.
 *
 * Everything here is a function of its arguments: no threads, no locks, no
 * allocation outside persia_synth_create().  So any thread, and any forked
 * child, may call it.  No input can make it read outside the buffers it is
 * given.
 */
#ifndef PERSIA_DATA_H
#define PERSIA_DATA_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- ids ------------------------------------------------------------- */

/* The id of a categorical value: XXH64 of its n bytes with seed `salt`.
 * Columns use salt 0 (tables separate features) unless the vocabularies of
 * several columns share a table and must not meet. */
PERSIA_API uint64_t persia_value_hash(const void *bytes, size_t n,
                                      uint64_t salt);

/* Strings as Arrow keeps them: string i is
 * bytes[offsets[i] .. offsets[i + 1]). */
typedef struct string_column {
    size_t n;            /* strings */
    const void *offsets; /* [n + 1] of int32, or of int64 if wide */
    int wide;
    const char *bytes;
    size_t size; /* of bytes */
    int strip;   /* leave out ASCII spaces and tabs around each value */
} string_column;

/* ids[i] = hash of string i.  PERSIA_EOFFSETS when the offsets fall or point
 * outside of bytes. */
PERSIA_API int persia_strings_hash(const string_column *c, uint64_t salt,
                                   uint64_t *ids /* [n] */);
/* Splits each string at `separator`; empty parts are no values.  lengths[i]
 * is the number of values of string i, their ids follow each other in ids.
 * PERSIA_ELIMIT when there are more than `room`; (size + n) / 2 always
 * suffices. */
PERSIA_API int persia_strings_split(const string_column *c, char separator,
                                    uint64_t salt, uint64_t *ids, size_t room,
                                    int64_t *lengths /* [n] */, size_t *ids_n);

/* ---- lines ----------------------------------------------------------- */

enum { CRITEO_INTEGERS = 13, CRITEO_CATEGORIES = 26, CRITEO_COLUMNS = 40 };

enum line_fault_kind { FAULT_COLUMNS, FAULT_LABEL, FAULT_INTEGER };

/* A malformed line. */
typedef struct line_fault {
    uint64_t line;   /* from 1 */
    uint32_t kind;   /* enum line_fault_kind */
    uint32_t column; /* from 1; FAULT_COLUMNS: how many the line has */
} line_fault;

/* A reader of Criteo lines: [label] 13 integers 26 categories, separated by
 * tabs.  The label is 0 or 1; a missing integer is 0, a missing category is
 * the hash of no bytes.  Lines end in \n or \r\n, the last one may end with
 * the text.  A line that is not so is counted in `faults` and left out. */
typedef struct criteo_reader {
    int has_label; /* 0: lines have 39 columns */
    uint64_t salts[CRITEO_CATEGORIES];
    uint64_t line;      /* lines read so far, malformed ones included */
    uint64_t faults;    /* malformed lines so far */
    line_fault *fault;  /* [fault_room]: the first ones since the caller */
    size_t fault_n;     /* set fault_n to 0 */
    size_t fault_room;
} criteo_reader;

/* Where the rows go.  Columns are `room` apart, so that a batch is made in
 * several calls. */
typedef struct criteo_rows {
    size_t n;        /* rows so far */
    size_t room;
    float *label;    /* [room]; NULL if the reader has none */
    float *integers; /* [room, CRITEO_INTEGERS] */
    uint64_t *ids;   /* [CRITEO_CATEGORIES, room] */
} criteo_rows;

/* Reads lines until the text or the room ends.  Text after the last line
 * end is read only if `final`.  Returns the number of bytes that were read. */
PERSIA_API size_t persia_criteo_read(criteo_reader *r, const char *text,
                                     size_t size, int final,
                                     criteo_rows *rows);

/* Passes over up to *lines lines; sets *lines to their number, and returns
 * the number of bytes.  A last line without a line end counts if `final`. */
PERSIA_API size_t persia_lines_skip(const char *text, size_t size, int final,
                                    uint64_t *lines);

/* The number of lines of a text in JSON, whose last one may lack its end;
 * *deep of them have more than `most` brackets within each other, and *odd
 * of them do not begin and end as an object. */
PERSIA_API uint64_t persia_json_lines(const char *text, size_t size,
                                      size_t most, uint64_t *deep,
                                      uint64_t *odd);

/* ---- made click logs ------------------------------------------------- */

/* Rows with a planted model: the logit of a click is a sum of effects of
 * the ids, low-rank products of pairs of ids, and a function of the dense
 * features, each part centred and scaled exactly, so that the best possible
 * AUC is known and about the same for each seed. */
typedef struct synth_config {
    uint64_t seed;       /* decides rows, effects and ids */
    uint32_t singles;    /* features of one id a sample */
    uint32_t multis;     /* features of 0 .. max_length ids */
    uint32_t max_length;
    uint32_t dense;
    uint32_t vocabulary; /* ids of a single; a multi has a tenth */
    double zipf;         /* P(k-th most frequent id) ~ k^-zipf */
    double ctr;          /* about the share of clicks */
    double signal;       /* standard deviation of the logit */
} synth_config;

typedef struct synth synth;

/* The defaults: 26 singles of 10,000 ids and 2 multis of 1,000 by Zipf's law
 * with exponent 1.05, 13 dense; clicks 25 %, planted AUC 0.80. */
PERSIA_API void persia_synth_config_init(synth_config *config);
PERSIA_API int persia_synth_create(const synth_config *config, synth **out);
PERSIA_API void persia_synth_destroy(synth *s);

typedef struct synth_rows {
    float *label;     /* [n] */
    float *logit;     /* [n] of the planted model, or NULL */
    float *dense;     /* [n, dense], about normal */
    uint64_t *ids;    /* feature-major; room for persia_synth_ids_room() */
    int64_t *lengths; /* [singles + multis, n] */
} synth_rows;

/* The most ids that n rows can have. */
PERSIA_API size_t persia_synth_ids_room(const synth *s, size_t n);
/* Writes rows first .. first + n - 1; returns the number of ids.  Row r is a
 * function of the configuration and r. */
PERSIA_API size_t persia_synth_read(const synth *s, uint64_t first, size_t n,
                                    const synth_rows *out);

#ifdef __cplusplus
}
#endif
#endif
