/* put.c: writes messages by their types.
 *
 * A message within a message is written twice: first it is counted, for its
 * length stands before it.  Padding goes before a message that has bulk data,
 * so that it begins at a multiple of 8 bytes of its parent, and before the
 * bulk data in it: so its length does not depend on where it lies.
 */
#include "wire/types.h"

#include <math.h>
#include <string.h>

enum { ALIGN = 8 };

typedef struct put {
    wire_out *out; /* NULL: only counts */
    size_t bytes;  /* of this message so far */
    int rc;        /* the first error; then nothing more is done */
} put;

static void put_bytes(put *p, const void *data, size_t n)
{
    if (!p->rc && p->out)
        p->rc = persia_wire_out_add(p->out, data, n);
    p->bytes += n;
}

static size_t put_varint_encode(uint64_t value, unsigned char to[10])
{
    size_t n = 0;
    for (; value >= 0x80; value >>= 7)
        to[n++] = (unsigned char)(value | 0x80);
    to[n++] = (unsigned char)value;
    return n;
}

static void put_varint(put *p, uint64_t value)
{
    unsigned char bytes[10];
    put_bytes(p, bytes, put_varint_encode(value, bytes));
}

static size_t put_varint_bytes(uint64_t value)
{
    unsigned char bytes[10];
    return put_varint_encode(value, bytes);
}

static void put_tag(put *p, uint32_t no, enum wire_coding coding)
{
    put_varint(p, (uint64_t)no << 3 | coding);
}

static void put_string(put *p, uint32_t no, const void *data, size_t n)
{
    put_tag(p, no, CODING_BYTES);
    put_varint(p, n);
    put_bytes(p, data, n);
}

/* So many bytes of padding that what lies behind the tag of field `no` and
 * the length `n` is aligned. */
static void put_pad(put *p, uint32_t no, size_t n)
{
    static const unsigned char zeros[ALIGN];
    size_t head = put_varint_bytes((uint64_t)no << 3) + put_varint_bytes(n);
    size_t pad = -(p->bytes + head) % ALIGN;
    if (pad == 1) /* a field has two bytes at least */
        pad += ALIGN;
    if (pad)
        put_string(p, FIELD_PAD, zeros, pad - 2);
}

static void put_type(put *p, const wire_at *at, const void *m,
                     uint32_t dtype);

static void put_message(put *p, const wire_at *at, const void *m,
                        uint32_t dtype)
{
    put count = { 0 }, body = { .out = p->out };
    put_type(&count, at, m, dtype);
    p->rc = count.rc;
    const wire_field *f = &at->up->type->fields[at->field];
    if (p->rc || (!count.bytes && f->kind == KIND_MESSAGE))
        return;
    if (at->type->leader)
        put_pad(p, at->field, count.bytes);
    put_tag(p, at->field, CODING_BYTES);
    put_varint(p, count.bytes);
    if (p->out && !p->rc) {
        put_type(&body, at, m, dtype);
        p->rc = body.rc;
    }
    p->bytes += count.bytes;
}

static void put_bulk(put *p, uint32_t no, const void *data, size_t bytes)
{
    if (!data || !bytes)
        return;
    put_pad(p, no, bytes);
    put_tag(p, no, CODING_BYTES);
    put_varint(p, bytes);
    if (!p->rc && p->out)
        p->rc = persia_wire_out_refer(p->out, data, bytes);
    p->bytes += bytes;
}

static void put_numbers(put *p, uint32_t no, const uint64_t *numbers,
                        size_t n)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += put_varint_bytes(numbers[i]);
    put_tag(p, no, CODING_BYTES);
    put_varint(p, bytes);
    for (size_t i = 0; i < n; i++)
        put_varint(p, numbers[i]);
}

static void put_u32(put *p, const wire_at *at, uint32_t no, uint32_t value)
{
    const wire_field *f = &at->type->fields[no];
    if (value > f->limit) {
        p->rc = at_refuse(at, no, "is %u, at most %u", value, f->limit);
    } else if (value != f->unset) {
        put_tag(p, no, CODING_VARINT);
        put_varint(p, value);
    }
}

static void put_float(put *p, const wire_at *at, uint32_t no,
                      const void *member)
{
    float value;
    uint32_t bits;
    memcpy(&value, member, sizeof value);
    memcpy(&bits, member, sizeof bits);
    if (!isfinite(value)) {
        p->rc = at_refuse(at, no, "is not finite");
    } else if (bits) {
        put_tag(p, no, CODING_32);
        put_bytes(p, &bits, sizeof bits);
    }
}

static void put_name(put *p, const wire_at *at, uint32_t no, const char *name)
{
    size_t n = strnlen(name, at->type->fields[no].limit);
    p->rc = at_check_name(at, no, name, n);
    if (n && !p->rc)
        put_string(p, no, name, n);
}

/* The pointer of a repeated or bulk field and its count. */
static const void *put_array(put *p, const wire_at *at, uint32_t no,
                             const char *m, size_t *n)
{
    const wire_field *f = &at->type->fields[no];
    const void *array;
    memcpy(&array, m + f->offset, sizeof array);
    memcpy(n, m + f->count, sizeof *n);
    if (*n && !array && (f->kind != KIND_BULK || no == at->type->leader))
        p->rc = at_refuse(at, no, "is NULL, but there are %zu", *n);
    else if (*n > f->limit && f->kind != KIND_BULK)
        p->rc = at_refuse(at, no, "has %zu elements, at most %u", *n,
                          f->limit);
    return array;
}

/* Up to the last word that is not 0. */
static void put_words(put *p, const wire_at *at, uint32_t no,
                      const char *member)
{
    uint64_t value = 0;
    size_t n = at->type->fields[no].limit;
    for (; n; n--) {
        memcpy(&value, member + (n - 1) * sizeof value, sizeof value);
        if (value)
            break;
    }
    if (n)
        put_string(p, no, member, n * sizeof value);
}

static void put_field(put *p, const wire_at *at, uint32_t no, const char *m,
                      uint32_t dtype)
{
    const wire_field *f = &at->type->fields[no];
    const char *member = m + f->offset;
    const void *array;
    uint64_t value;
    uint32_t small;
    size_t n;

    switch (f->kind) {
    case KIND_NONE:
        break;
    case KIND_U32:
        memcpy(&small, member, sizeof small);
        put_u32(p, at, no, small);
        break;
    case KIND_U64:
    case KIND_FIXED64:
        memcpy(&value, member, sizeof value);
        if (!value)
            break;
        put_tag(p, no, f->kind == KIND_U64 ? CODING_VARINT : CODING_64);
        if (f->kind == KIND_U64)
            put_varint(p, value);
        else
            put_bytes(p, &value, sizeof value);
        break;
    case KIND_FLOAT:
        put_float(p, at, no, member);
        break;
    case KIND_NAME:
        put_name(p, at, no, member);
        break;
    case KIND_WORDS:
        put_words(p, at, no, member);
        break;
    case KIND_BULK:
        array = put_array(p, at, no, m, &n);
        if (!p->rc)
            put_bulk(p, no, array, n * bulk_item(f, m, dtype));
        break;
    case KIND_NUMBERS:
        array = put_array(p, at, no, m, &n);
        if (n && !p->rc)
            put_numbers(p, no, array, n);
        break;
    case KIND_MESSAGE:
        put_message(p, &(wire_at){ at, f->type, no, 0, at->code }, member,
                    dtype);
        break;
    case KIND_MESSAGES:
        array = put_array(p, at, no, m, &n);
        for (size_t i = 0; i < n && !p->rc; i++)
            put_message(p, &(wire_at){ at, f->type, no, i, at->code },
                        (const char *)array + i * f->type->size, dtype);
        break;
    }
}

static void put_type(put *p, const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_type *t = at->type;
    if (t->dtype)
        memcpy(&dtype, (const char *)m + t->fields[t->dtype].offset,
               sizeof dtype);
    if (t->check)
        p->rc = t->check(at, m, dtype);
    for (uint32_t no = 1; no <= t->fields_n && !p->rc; no++)
        put_field(p, at, no, m, dtype);
}

int message_put(wire_out *o, const wire_type *t, const void *m)
{
    put p = { .out = o };
    put_type(&p, &(wire_at){ .type = t, .code = PERSIA_EARG }, m, 0);
    return p.rc;
}

/* ---- calls within a call ------------------------------------------------ */

enum { MESSAGE_FIELD = 3, PARTS_FIELD = 1 };

static void put_part_fields(put *p, const wire_part *m)
{
    const uint32_t values[] = { m->shard, m->method };
    for (uint32_t no = 1; no <= 2; no++) {
        put_tag(p, no, CODING_VARINT);
        put_varint(p, values[no - 1]);
    }
}

/* Bytes of a text without what does not fit, whole characters. */
static size_t put_text_bytes(const char *text, size_t most)
{
    size_t n = strnlen(text, most + 1);
    if (n <= most)
        return n;
    for (n = most; n && ((unsigned char)text[n] & 0xC0) == 0x80;)
        n--;
    return n;
}

static void put_result_fields(put *p, const wire_result *m)
{
    if (m->error[0])
        put_string(p, 1, m->error, put_text_bytes(m->error, WIRE_NAME_MAX));
    if (m->text[0])
        put_string(p, 2, m->text, put_text_bytes(m->text, WIRE_TEXT_MAX));
}

/* One of the two. */
static void put_enclosing(put *p, const wire_part *part,
                          const wire_result *result, size_t n)
{
    if (part)
        put_part_fields(p, part);
    else
        put_result_fields(p, result);
    put_pad(p, MESSAGE_FIELD, n);
    put_tag(p, MESSAGE_FIELD, CODING_BYTES);
    put_varint(p, n);
}

static int put_enclosed(wire_out *o, const wire_part *part,
                        const wire_result *result, wire_out *message)
{
    put count = { 0 }, outer = { .out = o, .bytes = o->bytes },
        body = { .out = o };
    put_enclosing(&count, part, result, message->bytes);
    const size_t bytes = count.bytes + message->bytes;
    put_pad(&outer, PARTS_FIELD, bytes);
    put_tag(&outer, PARTS_FIELD, CODING_BYTES);
    put_varint(&outer, bytes);
    if (outer.rc)
        return outer.rc;
    put_enclosing(&body, part, result, message->bytes);
    return body.rc ? body.rc : persia_wire_out_append(o, message);
}

int persia_wire_put_part(wire_out *o, const wire_part *m, wire_out *message)
{
    return put_enclosed(o, m, NULL, message);
}

int persia_wire_put_result(wire_out *o, const wire_result *m,
                           wire_out *message)
{
    return put_enclosed(o, NULL, m, message);
}
