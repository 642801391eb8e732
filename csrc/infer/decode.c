/* decode.c: ModelInferRequest.
 *
 * Not of the generator in csrc/spec: the message has maps, a tensor whose type
 * says which of eight lists holds it, and arrays of bytes.  Fields of scalars
 * may occur again, then the last one counts; unknown ones are skipped. */
#include "infer/infer.h"
#include "wire/wire.h"

#include <string.h>

/* How protobuf codes a field. */
enum { VARINT, FIXED64, LENGTH, FIXED32 = 5 };

/* Numbers of fields. */
enum { REQUEST_MODEL = 1, REQUEST_VERSION, REQUEST_ID, REQUEST_PARAMETERS,
       REQUEST_INPUTS, REQUEST_OUTPUTS, REQUEST_RAW };
enum { TENSOR_NAME = 1, TENSOR_TYPE, TENSOR_SHAPE, TENSOR_PARAMETERS,
       TENSOR_CONTENTS };
enum { OUTPUT_NAME = 1, OUTPUT_PARAMETERS };
enum { ENTRY_KEY = 1, ENTRY_VALUE };
enum { PARAMETER_INT64 = 2, PARAMETER_UINT64 = 5 };
enum { CONTENTS_BOOL = 1, CONTENTS_INT, CONTENTS_INT64, CONTENTS_UINT,
       CONTENTS_UINT64, CONTENTS_FP32, CONTENTS_FP64, CONTENTS_BYTES };

typedef struct reader {
    const uint8_t *at, *end;
} reader;

typedef struct field {
    uint64_t no; /* 0: the end */
    uint32_t coding;
    uint64_t number;
    const uint8_t *data; /* of all but VARINT; never NULL */
    size_t n;
} field;

static int decode_varint(reader *r, uint64_t *out)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && r->at < r->end; shift += 7) {
        const uint8_t byte = *r->at++;
        if (shift == 63 && byte > 1)
            break;
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            *out = value;
            return PERSIA_OK;
        }
    }
    return persia_err_set(PERSIA_EPROTOCOL,
                          "the request is no message: a number is cut off");
}

static int decode_fixed(reader *r, size_t bytes, field *f)
{
    if ((size_t)(r->end - r->at) < bytes)
        return persia_err_set(PERSIA_EPROTOCOL,
                              "the request is no message: it ends in a "
                              "number");
    f->data = r->at;
    f->n = bytes;
    r->at += bytes;
    return PERSIA_OK;
}

static int decode_field(reader *r, field *f)
{
    uint64_t tag = 0;
    *f = (field){.data = r->at};
    if (r->at == r->end)
        return PERSIA_OK;
    int code = decode_varint(r, &tag);
    if (code)
        return code;
    f->no = tag >> 3;
    f->coding = tag & 7;
    if (!f->no || tag > UINT32_MAX)
        return persia_err_set(PERSIA_EPROTOCOL,
                              "the request is no message: a field has the "
                              "number %llu",
                              (unsigned long long)f->no);
    switch (f->coding) {
    case VARINT:
        return decode_varint(r, &f->number);
    case FIXED64:
        return decode_fixed(r, 8, f);
    case FIXED32:
        return decode_fixed(r, 4, f);
    case LENGTH:
        code = decode_varint(r, &f->number);
        if (!code && f->number > (size_t)(r->end - r->at))
            code = persia_err_set(PERSIA_EPROTOCOL,
                                  "the request is no message: field %llu is "
                                  "cut off",
                                  (unsigned long long)f->no);
        return code ? code : decode_fixed(r, (size_t)f->number, f);
    default:
        return persia_err_set(PERSIA_EPROTOCOL,
                              "the request is no message: field %llu has "
                              "coding %u",
                              (unsigned long long)f->no, f->coding);
    }
}

static int decode_expect(const field *f, uint32_t coding, const char *what)
{
    return f->coding == coding
               ? PERSIA_OK
               : persia_err_set(PERSIA_EPROTOCOL,
                                "the request is no message: %s has coding %u",
                                what, f->coding);
}

static int decode_text(const field *f, const char *what, infer_text *out)
{
    const int code = decode_expect(f, LENGTH, what);
    if (code)
        return code;
    *out = (infer_text){(const char *)f->data, f->n};
    return f->n <= INFER_TEXT_MAX && persia_wire_is_utf8(out->data, out->n)
               ? PERSIA_OK
               : persia_err_set(PERSIA_EPROTOCOL,
                                "the request is no message: %s is no UTF-8 "
                                "of at most %d bytes",
                                what, INFER_TEXT_MAX);
}

/* ---- parameters --------------------------------------------------------- */

/* An entry of a map: its key, and the message that is its value. */
static int decode_entry(const field *whole, infer_text *key, reader *value)
{
    reader r = {whole->data, whole->data + whole->n};
    field f;
    int code = decode_expect(whole, LENGTH, "parameters");
    *key = (infer_text){"", 0};
    *value = (reader){whole->data, whole->data};
    while (!code && !(code = decode_field(&r, &f)) && f.no)
        if (f.no == ENTRY_KEY)
            code = decode_text(&f, "the name of a parameter", key);
        else if (f.no == ENTRY_VALUE &&
                 !(code = decode_expect(&f, LENGTH, "a parameter")))
            *value = (reader){f.data, f.data + f.n};
    return code;
}

/* Of an input or output.  These would be another answer than one that is
 * ignored; they have the same names over HTTP. */
static int decode_of_tensor(const field *whole)
{
    static const char *const refused[] = {"shared_memory_region",
                                          "classification"};
    infer_text key;
    reader value;
    const int code = decode_entry(whole, &key, &value);
    for (size_t i = 0; !code && i < sizeof refused / sizeof *refused; i++)
        if (strlen(refused[i]) == key.n && !memcmp(refused[i], key.data,
                                                   key.n))
            return persia_err_set(PERSIA_EARG,
                                  "the parameter %s of a tensor is not "
                                  "supported", refused[i]);
    return code;
}

/* Of a request: timeout, in microseconds; others are not for us. */
static int decode_of_request(const field *whole, uint64_t *timeout_us)
{
    infer_text key;
    reader value;
    field f;
    int code = decode_entry(whole, &key, &value);
    if (code || key.n != strlen("timeout") ||
        memcmp(key.data, "timeout", key.n) != 0)
        return code;
    while (!(code = decode_field(&value, &f)) && f.no) {
        if (f.coding != VARINT || f.number > INT64_MAX ||
            (f.no != PARAMETER_INT64 && f.no != PARAMETER_UINT64))
            return persia_err_set(PERSIA_EARG, "the parameter timeout is no "
                                               "number of microseconds");
        *timeout_us = f.number;
    }
    return code;
}

/* ---- lists of numbers --------------------------------------------------- */

/* Elements that a field holds: packed, or one. */
static int decode_count(const field *f, uint32_t coding, size_t *n)
{
    reader r = {f->data, f->data + f->n};
    uint64_t ignored;
    if (f->coding == coding) {
        ++*n;
        return PERSIA_OK;
    }
    int code = decode_expect(f, LENGTH, "a list");
    if (code)
        return code;
    if (coding != VARINT) {
        const size_t bytes = coding == FIXED32 ? 4 : 8;
        *n += f->n / bytes;
        return f->n % bytes ? persia_err_set(PERSIA_EPROTOCOL,
                                             "the request is no message: a "
                                             "list is cut off")
                            : PERSIA_OK;
    }
    while (!code && r.at < r.end) {
        code = decode_varint(&r, &ignored);
        ++*n;
    }
    return code;
}

/* The low `bytes` of each number, which must be all of it. */
static int decode_narrow(infer_text name, uint32_t type, uint64_t value,
                         size_t bytes, char *to)
{
    const int is_signed = type >= INFER_INT8 && type <= INFER_INT64;
    const unsigned shift = (unsigned)(64 - 8 * bytes);
    const uint64_t same = is_signed
                              ? (uint64_t)((int64_t)(value << shift) >> shift)
                              : value << shift >> shift;
    if (same != value || (type == INFER_BOOL && value > 1))
        return persia_err_set(PERSIA_EDTYPE,
                              "%.*s: a value is no %s: %lld", (int)name.n,
                              name.data, persia_infer_type_name(type),
                              (long long)value);
    memcpy(to, &value, bytes);
    return PERSIA_OK;
}

static int decode_numbers(const infer_tensor *t, const field *f,
                          uint32_t coding, size_t bytes, char **to)
{
    reader r = {f->data, f->data + f->n};
    int code = PERSIA_OK;
    if (coding != VARINT) {
        memcpy(*to, f->data, f->n);
        *to += f->n;
        return PERSIA_OK;
    }
    uint64_t value = f->number;
    if (f->coding == VARINT) {
        code = decode_narrow(t->name, t->type, value, bytes, *to);
        *to += bytes;
        return code;
    }
    while (!code && r.at < r.end) {
        code = decode_varint(&r, &value);
        if (!code)
            code = decode_narrow(t->name, t->type, value, bytes, *to);
        *to += bytes;
    }
    return code;
}

static int decode_shape(infer_tensor *t, const field *f)
{
    reader r = {f->data, f->data + f->n};
    uint64_t size = f->number;
    int code = PERSIA_OK;
    if (f->coding != VARINT && (code = decode_expect(f, LENGTH, "a shape")))
        return code;
    while (!code && (f->coding == VARINT || r.at < r.end)) {
        if (f->coding == LENGTH)
            code = decode_varint(&r, &size);
        if (!code && t->dims == INFER_DIMS_MAX)
            return persia_err_set(PERSIA_ESHAPE,
                                  "a tensor has more than %d sizes",
                                  INFER_DIMS_MAX);
        if (!code)
            t->shape[t->dims++] = (int64_t)size;
        if (f->coding == VARINT)
            break;
    }
    return code;
}

/* ---- contents ----------------------------------------------------------- */

/* The list that has elements of a type, and the coding of one; 0: none. */
static uint64_t decode_list(uint32_t type, uint32_t *coding)
{
    *coding = VARINT;
    switch (type) {
    case INFER_BOOL:
        return CONTENTS_BOOL;
    case INFER_INT8:
    case INFER_INT16:
    case INFER_INT32:
        return CONTENTS_INT;
    case INFER_INT64:
        return CONTENTS_INT64;
    case INFER_UINT8:
    case INFER_UINT16:
    case INFER_UINT32:
        return CONTENTS_UINT;
    case INFER_UINT64:
        return CONTENTS_UINT64;
    case INFER_FP32:
        *coding = FIXED32;
        return CONTENTS_FP32;
    case INFER_FP64:
        *coding = FIXED64;
        return CONTENTS_FP64;
    case INFER_BYTES:
        *coding = LENGTH;
        return CONTENTS_BYTES;
    default:
        return 0;
    }
}

/* Bytes that the elements of a field take. */
static int decode_contents_size(const field *f, uint32_t coding,
                                size_t element, size_t *bytes)
{
    size_t n = 0;
    if (coding == LENGTH) {
        *bytes += sizeof(uint32_t) + f->n;
        return decode_expect(f, LENGTH, "an element of BYTES");
    }
    const int code = decode_count(f, coding, &n);
    *bytes += n * element;
    return code;
}

static int decode_contents_take(const infer_tensor *t, const field *f,
                         uint32_t coding, size_t element, char **to)
{
    if (coding != LENGTH)
        return decode_numbers(t, f, coding, element, to);
    const uint32_t n = (uint32_t)f->n;
    if (f->n > UINT32_MAX)
        return persia_err_set(PERSIA_ELIMIT, "an element has 4 GiB");
    memcpy(*to, &n, sizeof n);
    memcpy(*to + sizeof n, f->data, f->n);
    *to += sizeof n + f->n;
    return PERSIA_OK;
}

/* A tensor that is typed as one that is raw. */
static int decode_contents(infer_tensor *t, const field *contents,
                           size_t element, wire_memory *memory)
{
    uint32_t coding;
    const uint64_t list = decode_list(t->type, &coding);
    const reader all = {contents->data, contents->data + contents->n};
    field f;
    size_t bytes = 0;
    int code;
    for (reader r = all; !(code = decode_field(&r, &f)) && f.no;)
        if (f.no != list)
            return persia_err_set(PERSIA_EDTYPE,
                                  "%.*s: its contents are not of %s, or "
                                  "must be raw",
                                  (int)t->name.n, t->name.data,
                                  persia_infer_type_name(t->type));
        else if ((code = decode_contents_size(&f, coding, element, &bytes)))
            return code;
    if (code)
        return code;
    char *to = persia_wire_memory_take(memory, bytes + 1);
    if (!to)
        return PERSIA_ENOMEM;
    t->data = to;
    t->bytes = bytes;
    for (reader r = all; !(code = decode_field(&r, &f)) && f.no;)
        if ((code = decode_contents_take(t, &f, coding, element, &to)))
            return code;
    return code;
}

/* ---- the message -------------------------------------------------------- */

/* raw: what stands for the contents, or NULL. */
static int decode_tensor(const field *whole, const field *raw,
                         wire_memory *memory, infer_tensor *t)
{
    static const uint8_t sizes[] = {
#define DECODE_SIZE(name, bytes) bytes,
        INFER_TYPES_EACH(DECODE_SIZE)
#undef DECODE_SIZE
    };
    reader r = {whole->data, whole->data + whole->n};
    infer_text type = {"", 0};
    field f, contents = {0};
    int code = decode_expect(whole, LENGTH, "an input");
    *t = (infer_tensor){.name = {"", 0}, .data = ""};
    while (!code && !(code = decode_field(&r, &f)) && f.no) {
        if (f.no == TENSOR_NAME)
            code = decode_text(&f, "a name", &t->name);
        else if (f.no == TENSOR_TYPE)
            code = decode_text(&f, "a datatype", &type);
        else if (f.no == TENSOR_SHAPE)
            code = decode_shape(t, &f);
        else if (f.no == TENSOR_PARAMETERS)
            code = decode_of_tensor(&f);
        else if (f.no == TENSOR_CONTENTS &&
                 !(code = decode_expect(&f, LENGTH, "contents")))
            contents = f;
    }
    if (code)
        return code;
    if (!t->name.n || !type.n)
        return persia_err_set(PERSIA_EPROTOCOL, "a tensor has no %s",
                              t->name.n ? "datatype" : "name");
    t->type = persia_infer_type(type);
    if (t->type == INFER_TYPES)
        return persia_err_set(PERSIA_EDTYPE, "%.*s: no datatype '%.*s'",
                              (int)t->name.n, t->name.data, (int)type.n,
                              type.data);
    if (raw && contents.n)
        return persia_err_set(PERSIA_EPROTOCOL,
                              "%.*s: has contents, and the request has raw "
                              "ones: give one or the other",
                              (int)t->name.n, t->name.data);
    if (raw) {
        t->data = raw->data;
        t->bytes = raw->n;
    } else if (contents.n) {
        code = decode_contents(t, &contents, sizes[t->type], memory);
    }
    return code ? code : persia_infer_check(t);
}

/* The error; an input in shared memory, which has no contents, is named. */
static int decode_mismatch(reader r, size_t inputs, size_t raw)
{
    field f, part;
    int code = PERSIA_OK;
    while (!decode_field(&r, &f) && f.no) {
        reader input = {f.data, f.data + f.n};
        while (f.no == REQUEST_INPUTS && !code &&
               !decode_field(&input, &part) && part.no)
            if (part.no == TENSOR_PARAMETERS)
                code = decode_of_tensor(&part);
    }
    return code ? code
                : persia_err_set(PERSIA_EPROTOCOL,
                                 "%zu inputs, and %zu raw contents", inputs,
                                 raw);
}

/* How many there are of what occurs several times. */
static int decode_counts(const reader all, size_t *inputs, size_t *outputs,
                         size_t *raw)
{
    reader r = all;
    field f;
    int code;
    *inputs = *outputs = *raw = 0;
    while (!(code = decode_field(&r, &f)) && f.no) {
        *inputs += f.no == REQUEST_INPUTS;
        *outputs += f.no == REQUEST_OUTPUTS;
        *raw += f.no == REQUEST_RAW;
    }
    if (code)
        return code;
    if (!*inputs || *inputs > INFER_TENSORS_MAX ||
        *outputs > INFER_TENSORS_MAX)
        return persia_err_set(PERSIA_EPROTOCOL,
                              "%zu inputs, %zu outputs: a request has 1 to "
                              "%d",
                              *inputs, *outputs, INFER_TENSORS_MAX);
    return *raw && *raw != *inputs ? decode_mismatch(all, *inputs, *raw)
                                   : PERSIA_OK;
}

static int decode_output(const field *whole, infer_text *out)
{
    reader r = {whole->data, whole->data + whole->n};
    field f;
    int code = decode_expect(whole, LENGTH, "an output");
    *out = (infer_text){"", 0};
    while (!code && !(code = decode_field(&r, &f)) && f.no)
        if (f.no == OUTPUT_NAME)
            code = decode_text(&f, "the name of an output", out);
        else if (f.no == OUTPUT_PARAMETERS)
            code = decode_of_tensor(&f);
    return code;
}

/* The next raw contents. */
static int decode_raw(reader *r, field *f)
{
    int code;
    while (!(code = decode_field(r, f)) && f->no != REQUEST_RAW && f->no)
        ;
    return code ? code : decode_expect(f, LENGTH, "raw contents");
}

static int decode_fields(const reader all, int has_raw, infer_request *out)
{
    reader r = all, raws = all;
    field f, raw;
    int code;
    while (!(code = decode_field(&r, &f)) && f.no) {
        if (f.no == REQUEST_MODEL)
            code = decode_text(&f, "the model's name", &out->model);
        else if (f.no == REQUEST_VERSION)
            code = decode_text(&f, "the model's version", &out->version);
        else if (f.no == REQUEST_ID)
            code = decode_text(&f, "the id", &out->id);
        else if (f.no == REQUEST_PARAMETERS)
            code = decode_of_request(&f, &out->timeout_us);
        else if (f.no == REQUEST_OUTPUTS)
            code = decode_output(&f, &out->outputs[out->outputs_n++]);
        else if (f.no == REQUEST_INPUTS &&
                 !(has_raw && (code = decode_raw(&raws, &raw))))
            code = decode_tensor(&f, has_raw ? &raw : NULL, &out->memory,
                                 &out->inputs[out->inputs_n++]);
        if (code)
            break;
    }
    return code;
}

int persia_infer_decode(const void *data, size_t n, infer_request *out)
{
    const uint8_t *bytes = n ? data : (const void *)"";
    const reader all = {bytes, bytes + n};
    const infer_text none = {"", 0};
    size_t inputs, outputs, raw;
    *out = (infer_request){.model = none, .version = none, .id = none,
                           .timeout_us = INFER_NO_TIMEOUT};
    int code = decode_counts(all, &inputs, &outputs, &raw);
    if (code)
        return code;
    persia_wire_memory_init(&out->memory);
    out->inputs =
        persia_wire_memory_take(&out->memory, inputs * sizeof *out->inputs);
    out->outputs = persia_wire_memory_take(
        &out->memory, (outputs + 1) * sizeof *out->outputs);
    code = out->inputs && out->outputs
               ? decode_fields(all, raw != 0, out)
               : PERSIA_ENOMEM;
    if (code)
        persia_infer_free(out);
    return code;
}

void persia_infer_free(infer_request *r)
{
    persia_wire_memory_free(&r->memory);
    *r = (infer_request){0};
}
