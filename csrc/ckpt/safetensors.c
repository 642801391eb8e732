#include "ckpt/safetensors.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    uint32_t bytes;
} dtypes[ST_DTYPES] = {
    [ST_U64] = {"U64", 8},
    [ST_F32] = {"F32", 4},
    [ST_U32] = {"U32", 4},
    [ST_BF16] = {"BF16", 2},
    [ST_U8] = {"U8", 1},
};

uint32_t st_dtype_bytes(uint32_t dtype)
{
    return dtypes[dtype].bytes;
}

/* ---- reading ------------------------------------------------------------ */

typedef struct reader {
    const char *file;
    const char *json, *at, *end;
} reader;

static int safetensors_corrupt(const reader *r, const char *what)
{
    return persia_err_set(
        PERSIA_ECORRUPT,
        "%s: its safetensors header is malformed at byte %zu: %s", r->file,
        (size_t)(r->at - r->json) + 8, what);
}

static void safetensors_skip_space(reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' ||
                              *r->at == '\n' || *r->at == '\r'))
        r->at++;
}

/* The next character that is not white space, 0 at the end. */
static char safetensors_peek(reader *r)
{
    safetensors_skip_space(r);
    return r->at < r->end ? *r->at : 0;
}

static int safetensors_expect(reader *r, char c)
{
    char what[] = "'?' expected";
    if (safetensors_peek(r) != c) {
        what[1] = c;
        return safetensors_corrupt(r, what);
    }
    r->at++;
    return PERSIA_OK;
}

/* A string.  If `out` is given it must be plain (no escapes) and fit. */
static int safetensors_read_string(reader *r, char *out, size_t room)
{
    int code = safetensors_expect(r, '"');
    if (code)
        return code;
    const char *begin = r->at;
    for (; r->at < r->end && *r->at != '"'; r->at++) {
        if ((unsigned char)*r->at < 0x20)
            return safetensors_corrupt(r, "control character in a string");
        if (*r->at != '\\')
            continue;
        if (out)
            return safetensors_corrupt(r, "escape in a name");
        r->at++;
        if (r->at >= r->end || !strchr("\"\\/bfnrtu", *r->at) || !*r->at)
            return safetensors_corrupt(r, "unknown escape");
        if (*r->at == 'u')
            for (int i = 0; i < 4; i++) {
                r->at++;
                if (r->at >= r->end || !*r->at ||
                    !strchr("0123456789abcdefABCDEF", *r->at))
                    return safetensors_corrupt(
                        r, "four hexadecimal digits expected");
            }
    }
    if (r->at >= r->end)
        return safetensors_corrupt(r, "string without end");
    size_t n = (size_t)(r->at - begin);
    r->at++;
    if (!out)
        return PERSIA_OK;
    if (n >= room)
        return safetensors_corrupt(r, "name too long");
    memcpy(out, begin, n);
    out[n] = 0;
    return PERSIA_OK;
}

/* A non-negative integer below 2^64 without sign, fraction or exponent. */
static int safetensors_read_number(reader *r, uint64_t *out)
{
    uint64_t value = 0;
    if (safetensors_peek(r) < '0' || *r->at > '9')
        return safetensors_corrupt(r, "number expected");
    if (*r->at == '0' && r->at + 1 < r->end && r->at[1] >= '0' &&
        r->at[1] <= '9')
        return safetensors_corrupt(r, "number with a leading 0");
    for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++)
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*r->at - '0'), &value))
            return safetensors_corrupt(r, "number too large");
    *out = value;
    return PERSIA_OK;
}

/* Up to `room` numbers in brackets. */
static int safetensors_read_numbers(reader *r, uint64_t *out, uint32_t room,
                                    uint32_t *n)
{
    int code = safetensors_expect(r, '[');
    *n = 0;
    if (!code && safetensors_peek(r) == ']') {
        r->at++;
        return PERSIA_OK;
    }
    while (!code) {
        if (*n == room)
            return safetensors_corrupt(r, "too many numbers");
        if ((code = safetensors_read_number(r, &out[(*n)++])))
            return code;
        if (safetensors_peek(r) == ']') {
            r->at++;
            return PERSIA_OK;
        }
        code = safetensors_expect(r, ',');
    }
    return code;
}

/* {"key": "value", ...}, of which only the syntax matters. */
static int safetensors_read_metadata(reader *r)
{
    int code = safetensors_expect(r, '{');
    if (!code && safetensors_peek(r) == '}') {
        r->at++;
        return PERSIA_OK;
    }
    while (!code) {
        if ((code = safetensors_read_string(r, NULL, 0)) ||
            (code = safetensors_expect(r, ':')) ||
            (code = safetensors_read_string(r, NULL, 0)))
            return code;
        if (safetensors_peek(r) == '}') {
            r->at++;
            return PERSIA_OK;
        }
        code = safetensors_expect(r, ',');
    }
    return code;
}

static int safetensors_read_dtype(reader *r, uint32_t *dtype)
{
    char name[8];
    int code = safetensors_read_string(r, name, sizeof name);
    if (code)
        return code;
    for (uint32_t i = 0; i < ST_DTYPES; i++)
        if (!strcmp(name, dtypes[i].name)) {
            *dtype = i;
            return PERSIA_OK;
        }
    return safetensors_corrupt(
        r, "a dtype other than U64, F32, U32, BF16 and U8");
}

/* {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, in any
 * order, each once. */
static int read_tensor(reader *r, st_tensor *t)
{
    enum { DTYPE = 1, SHAPE = 2, EXTENT = 4, ALL = 7 };
    unsigned seen = 0;
    char key[16];
    int code = safetensors_expect(r, '{');
    while (!code) {
        unsigned field;
        if ((code = safetensors_read_string(r, key, sizeof key)) ||
            (code = safetensors_expect(r, ':')))
            return code;
        if (!strcmp(key, "dtype")) {
            field = DTYPE;
            code = safetensors_read_dtype(r, &t->dtype);
        } else if (!strcmp(key, "shape")) {
            field = SHAPE;
            code = safetensors_read_numbers(r, t->shape, ST_RANK, &t->rank);
        } else if (!strcmp(key, "data_offsets")) {
            uint64_t extent[2];
            uint32_t n;
            field = EXTENT;
            code = safetensors_read_numbers(r, extent, 2, &n);
            if (!code && n != 2)
                code = safetensors_corrupt(r, "two data_offsets expected");
            if (!code) {
                t->begin = extent[0];
                t->end = extent[1];
            }
        } else {
            return safetensors_corrupt(r, "unknown key of a tensor");
        }
        if (code)
            return code;
        if (seen & field)
            return safetensors_corrupt(r, "key given twice");
        seen |= field;
        if (safetensors_peek(r) == '}') {
            r->at++;
            return seen == ALL
                       ? PERSIA_OK
                       : safetensors_corrupt(r,
                                             "tensor without dtype, shape or "
                                             "data_offsets");
        }
        code = safetensors_expect(r, ',');
    }
    return code;
}

static int safetensors_read_object(reader *r, st_header *h)
{
    char key[ST_NAME];
    int code, metadata = 0;
    if (r->at == r->end || *r->at != '{')
        return safetensors_corrupt(r, "'{' expected");
    r->at++;
    if (safetensors_peek(r) == '}') {
        r->at++;
        return PERSIA_OK;
    }
    for (;;) {
        if ((code = safetensors_read_string(r, key, sizeof key)) ||
            (code = safetensors_expect(r, ':')))
            return code;
        if (!strcmp(key, "__metadata__")) {
            if (metadata++)
                return safetensors_corrupt(r, "__metadata__ given twice");
            code = safetensors_read_metadata(r);
        } else {
            for (size_t i = 0; i < h->n; i++)
                if (!strcmp(h->tensors[i].name, key))
                    return safetensors_corrupt(r, "tensor given twice");
            if (h->n == ST_TENSORS)
                return safetensors_corrupt(r, "too many tensors");
            st_tensor *t = &h->tensors[h->n++];
            snprintf(t->name, sizeof t->name, "%s", key);
            code = read_tensor(r, t);
        }
        if (code)
            return code;
        if (safetensors_peek(r) == '}') {
            r->at++;
            return PERSIA_OK;
        }
        if ((code = safetensors_expect(r, ',')))
            return code;
    }
}

int st_json_bytes(const char *file, const unsigned char first[8],
                  uint64_t bytes, size_t *json_bytes)
{
    uint64_t n = 0;
    for (int i = 0; i < 8; i++)
        n |= (uint64_t)first[i] << (8 * i);
    if (n > ST_JSON_MAX)
        return persia_err_set(PERSIA_ECORRUPT,
                              "%s: a safetensors header of %" PRIu64
                              " bytes; at most %d are read",
                              file, n, ST_JSON_MAX);
    if (bytes < 8 || n > bytes - 8)
        return persia_err_set(PERSIA_ECORRUPT,
                              "%s: the file has %" PRIu64
                              " bytes, fewer than its "
                              "safetensors header says: it is truncated",
                              file, bytes);
    *json_bytes = (size_t)n;
    return PERSIA_OK;
}

/* By extent; empty tensors at a place stand before what begins there. */
static int safetensors_before(const st_tensor *a, const st_tensor *b)
{
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
}

/* Sorts the tensors by extent and checks that these fill the data. */
static int safetensors_check_extents(const char *file, st_header *h)
{
    uint64_t at = 0;
    for (size_t i = 1; i < h->n; i++)
        for (size_t k = i;
             k && safetensors_before(&h->tensors[k], &h->tensors[k - 1]);
             k--) {
            st_tensor t = h->tensors[k];
            h->tensors[k] = h->tensors[k - 1];
            h->tensors[k - 1] = t;
        }
    for (size_t i = 0; i < h->n; i++) {
        const st_tensor *t = &h->tensors[i];
        uint64_t size = dtypes[t->dtype].bytes;
        int overflow = 0;
        for (uint32_t k = 0; k < t->rank; k++)
            overflow |= __builtin_mul_overflow(size, t->shape[k], &size);
        if (overflow || t->begin > t->end || t->end - t->begin != size)
            return persia_err_set(
                PERSIA_ECORRUPT,
                "%s: the extent of tensor '%s' is not what its "
                "dtype and shape need",
                file, t->name);
        if (t->begin != at)
            return persia_err_set(PERSIA_ECORRUPT,
                                  "%s: tensor '%s' begins at byte %" PRIu64
                                  " of the data, %" PRIu64
                                  " expected: extents "
                                  "overlap or leave a gap",
                                  file, t->name, t->begin, at);
        at = t->end;
    }
    if (at != h->bytes - h->data)
        return persia_err_set(PERSIA_ECORRUPT,
                              "%s: %" PRIu64 " bytes of data, %" PRIu64
                              " expected: the file is truncated or too long",
                              file, h->bytes - h->data, at);
    return PERSIA_OK;
}

int st_parse(const char *file, const char *json, size_t json_bytes,
             uint64_t bytes, st_header *out)
{
    reader r = {file, json, json, json + json_bytes};
    memset(out, 0, sizeof *out);
    out->data = 8 + (uint64_t)json_bytes;
    out->bytes = bytes;
    int code = safetensors_read_object(&r, out);
    if (code)
        return code;
    safetensors_skip_space(&r);
    if (r.at != r.end)
        return safetensors_corrupt(
            &r, "the header has more text after its object");
    return safetensors_check_extents(file, out);
}

/* ---- writing ------------------------------------------------------------ */

typedef struct writer {
    char *out;
    size_t n, room; /* n > room: did not fit */
} writer;

__attribute__((format(printf, 2, 3))) static void
safetensors_put(writer *w, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(w->n < w->room ? w->out + w->n : NULL,
                      w->n < w->room ? w->room - w->n : 0, format, args);
    va_end(args);
    w->n += (size_t)n;
}

int st_format(st_header *h, const char *metadata, char *out, size_t room,
              size_t *n)
{
    writer w = {out, 8, room};
    uint64_t at = 0;
    safetensors_put(&w, "{\"__metadata__\":%s", metadata);
    for (size_t i = 0; i < h->n; i++) {
        st_tensor *t = &h->tensors[i];
        uint64_t size = dtypes[t->dtype].bytes;
        safetensors_put(&w, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name,
                        dtypes[t->dtype].name);
        for (uint32_t k = 0; k < t->rank; k++) {
            safetensors_put(&w, "%s%" PRIu64, k ? "," : "", t->shape[k]);
            size *= t->shape[k];
        }
        t->begin = at;
        t->end = at += size;
        safetensors_put(&w, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                        t->begin, t->end);
    }
    safetensors_put(&w, "}");
    size_t padded = (w.n + 63) / 64 * 64;
    if (padded >= room || padded - 8 > ST_JSON_MAX)
        return persia_err_set(
            PERSIA_ELIMIT,
            "a safetensors header of %zu bytes; there is room "
            "for %zu",
            padded, room);
    memset(out + w.n, ' ', padded - w.n);
    for (int i = 0; i < 8; i++)
        out[i] = (char)((padded - 8) >> (8 * i) & 255);
    h->data = padded;
    h->bytes = padded + at;
    *n = padded;
    return PERSIA_OK;
}
