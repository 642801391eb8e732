/* strings.c: buffers of strings to ids. */
#include <string.h>

#include "data/data.h"

/* The bytes of one value. */
typedef struct value {
    const char *begin, *end;
} value;

static int strings_is_space(char c)
{
    return c == ' ' || c == '\t';
}

static value value_strip(value v)
{
    while (v.begin < v.end && strings_is_space(*v.begin))
        v.begin++;
    while (v.begin < v.end && strings_is_space(v.end[-1]))
        v.end--;
    return v;
}

/* Where string i begins; i == n is the end of the last one. */
static int64_t column_offset(const string_column *c, size_t i)
{
    if (c->wide)
        return ((const int64_t *)c->offsets)[i];
    return ((const int32_t *)c->offsets)[i];
}

/* String i, its offsets checked. */
static int column_value(const string_column *c, size_t i, value *out)
{
    int64_t begin = column_offset(c, i), end = column_offset(c, i + 1);
    if (begin < 0 || end < begin || (uint64_t)end > c->size) {
        persia_err_set(
            PERSIA_EOFFSETS,
            "string %zu of %zu: its bytes are said to be %lld to %lld of "
            "%zu; pass the offsets of an Arrow array with all its data",
            i, c->n, (long long)begin, (long long)end, c->size);
        return PERSIA_EOFFSETS;
    }
    /* No arithmetic on the NULL of an array without bytes. */
    const char *bytes = c->size ? c->bytes : "";
    *out = (value){bytes + begin, bytes + end};
    if (c->strip)
        *out = value_strip(*out);
    return PERSIA_OK;
}

int persia_strings_hash(const string_column *c, uint64_t salt, uint64_t *ids)
{
    for (size_t i = 0; i < c->n; i++) {
        value v;
        int rc = column_value(c, i, &v);
        if (rc)
            return rc;
        ids[i] = persia_value_hash(v.begin, (size_t)(v.end - v.begin), salt);
    }
    return PERSIA_OK;
}

int persia_strings_split(const string_column *c, char separator, uint64_t salt,
                         uint64_t *ids, size_t room, int64_t *lengths,
                         size_t *ids_n)
{
    size_t n = 0;
    for (size_t i = 0; i < c->n; i++) {
        value v;
        int rc = column_value(c, i, &v);
        if (rc)
            return rc;
        size_t first = n;
        while (v.begin < v.end) {
            size_t left = (size_t)(v.end - v.begin);
            const char *stop = memchr(v.begin, separator, left);
            value part = {v.begin, stop ? stop : v.end};
            v.begin = stop ? stop + 1 : v.end;
            if (c->strip)
                part = value_strip(part);
            if (part.begin == part.end)
                continue;
            if (n == room)
                return persia_err_set(
                    PERSIA_ELIMIT,
                    "string %zu of %zu: more than %zu values; "
                    "pass room for (bytes + strings) / 2",
                    i, c->n, room);
            ids[n++] = persia_value_hash(
                part.begin, (size_t)(part.end - part.begin), salt);
        }
        lengths[i] = (int64_t)(n - first);
    }
    *ids_n = n;
    return PERSIA_OK;
}
