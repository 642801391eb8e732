/* safetensors.h: the header of a safetensors file, written and read.
 *
 * A file is [ u64 little-endian: bytes of JSON | JSON | data ].  The JSON
 * names each tensor's dtype, shape and extent in the data.  The reader takes
 * bytes from anywhere: it accepts the subset of JSON that the format needs,
 * and only extents that are what dtype and shape say, in the data, without
 * gap or overlap.
 */
#ifndef PERSIA_CKPT_SAFETENSORS_H
#define PERSIA_CKPT_SAFETENSORS_H

#include "base/base.h"

enum {
    ST_TENSORS = 8,         /* a file with more is refused */
    ST_RANK = 4,            /* a tensor of more is refused */
    ST_NAME = 32,           /* bytes of a tensor's name, with the 0 */
    ST_JSON_MAX = 64 * 1024 /* bytes of a header that is read */
};

enum st_dtype { ST_U64, ST_F32, ST_U32, ST_BF16, ST_U8, ST_DTYPES };

typedef struct st_tensor {
    char name[ST_NAME];
    uint32_t dtype; /* enum st_dtype */
    uint32_t rank;
    uint64_t shape[ST_RANK];
    uint64_t begin, end; /* bytes of the data, end excluded */
} st_tensor;

typedef struct st_header {
    size_t n;
    st_tensor tensors[ST_TENSORS]; /* in the order of their extents */
    uint64_t data;                 /* where the data begins in the file */
    uint64_t bytes;                /* of the whole file */
} st_header;

/* Bytes of an element. */
uint32_t st_dtype_bytes(uint32_t dtype);

/* Reads the first 8 bytes of a file of `bytes` bytes: how many bytes of
 * JSON follow.  `file` names it in messages, here and below. */
int st_json_bytes(const char *file, const unsigned char first[8],
                  uint64_t bytes, size_t *json_bytes);
/* Reads the JSON; out->data and out->bytes are set too.  PERSIA_ECORRUPT
 * names the file, the place and what is wrong there. */
int st_parse(const char *file, const char *json, size_t json_bytes,
             uint64_t bytes, st_header *out);

/* Writes length and JSON for the tensors of `h` (names, dtypes, shapes are
 * given; extents, data and bytes are set here) into out[0..room), padded so
 * that the data is aligned to 64 bytes.  `metadata` is a JSON object of
 * strings.  PERSIA_ELIMIT if there is no room; *n: bytes written. */
int st_format(st_header *h, const char *metadata, char *out, size_t room,
              size_t *n);

#endif
