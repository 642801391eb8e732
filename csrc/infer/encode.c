/* encode.c: ModelInferResponse. */
#include "infer/infer.h"

#include <string.h>

enum { LENGTH = 2 };
enum { RESPONSE_MODEL = 1, RESPONSE_VERSION, RESPONSE_ID,
       RESPONSE_OUTPUTS = 5, RESPONSE_RAW };
enum { OUTPUT_NAME = 1, OUTPUT_TYPE, OUTPUT_SHAPE };
enum { VARINT_MAX = 10, TAG = 1 /* all numbers are below 16 */ };

static size_t encode_varint(uint64_t value, uint8_t *to)
{
    size_t n = 0;
    for (; value >= 0x80; value >>= 7)
        to[n++] = (uint8_t)(value | 0x80);
    to[n++] = (uint8_t)value;
    return n;
}

static size_t encode_size(uint64_t value)
{
    uint8_t ignored[VARINT_MAX];
    return encode_varint(value, ignored);
}

/* Tag and length of a field. */
static int encode_head(unsigned no, size_t n, wire_out *out)
{
    uint8_t head[TAG + VARINT_MAX] = {(uint8_t)(no << 3 | LENGTH)};
    return persia_wire_out_add(out, head, TAG + encode_varint(n, head + 1));
}

static int encode_bytes(unsigned no, const void *data, size_t n, wire_out *out)
{
    const int code = encode_head(no, n, out);
    return code ? code : persia_wire_out_add(out, data, n);
}

static int encode_text(unsigned no, infer_text text, wire_out *out)
{
    return text.n ? encode_bytes(no, text.data, text.n, out) : PERSIA_OK;
}

static int encode_output(const infer_tensor *t, wire_out *out)
{
    uint8_t shape[INFER_DIMS_MAX * VARINT_MAX];
    const char *type = persia_infer_type_name(t->type);
    const infer_text kind = {type, strlen(type)};
    size_t n = 0;
    for (uint32_t i = 0; i < t->dims; i++)
        n += encode_varint((uint64_t)t->shape[i], shape + n);
    const size_t all = 3 * TAG + encode_size(t->name.n) + t->name.n +
                       encode_size(kind.n) + kind.n + encode_size(n) + n;
    int code = encode_head(RESPONSE_OUTPUTS, all, out);
    if (!code)
        code = encode_bytes(OUTPUT_NAME, t->name.data, t->name.n, out);
    if (!code)
        code = encode_bytes(OUTPUT_TYPE, kind.data, kind.n, out);
    return code ? code : encode_bytes(OUTPUT_SHAPE, shape, n, out);
}

int persia_infer_encode(const infer_request *asked, infer_text version,
                        const infer_tensor *outputs, size_t n, wire_out *out)
{
    persia_wire_out_init(out);
    int code = encode_text(RESPONSE_MODEL, asked->model, out);
    if (!code)
        code = encode_text(RESPONSE_VERSION, version, out);
    if (!code)
        code = encode_text(RESPONSE_ID, asked->id, out);
    for (size_t i = 0; !code && i < n; i++)
        code = encode_output(&outputs[i], out);
    for (size_t i = 0; !code && i < n; i++)
        code = encode_bytes(RESPONSE_RAW, outputs[i].data, outputs[i].bytes,
                            out);
    if (code)
        persia_wire_out_free(out);
    return code;
}
