/* get.c: reads messages by their types and believes nothing.
 *
 * Fields may stand in any order, unknown ones are skipped, of a field that
 * occurs more than once the last one counts.  A message is gone through twice
 * if it has repeated fields: first these are counted, so that arrays have the
 * right size and the dtype of the message is known before its tables.
 */
#include "wire/types.h"

#include <math.h>
#include <string.h>

enum { ALIGN = 8, GROUPS_MAX = 16 };

typedef struct cursor {
    const uint8_t *at, *end;
} cursor;

/* What a field holds, whatever its meaning. */
typedef struct payload {
    uint64_t no;
    enum wire_coding coding;
    uint64_t number;     /* VARINT, 64, 32 */
    const uint8_t *data; /* BYTES */
    size_t n;
} payload;

static const char *const coding_names[] = {
    "varint", "64-bit", "length-delimited", "group", "end of group", "32-bit"
};

static int get_varint(const wire_at *at, uint64_t no, cursor *c,
                      uint64_t *out)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (c->at == c->end)
            return at_refuse(at, no, "the message ends in a varint");
        uint8_t byte = *c->at++;
        if (shift == 63 && byte > 1)
            break;
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            *out = value;
            return PERSIA_OK;
        }
    }
    return at_refuse(at, no, "a varint has more than 64 bits");
}

static int get_fixed(const wire_at *at, uint64_t no, cursor *c, size_t bytes,
                     uint64_t *out)
{
    if ((size_t)(c->end - c->at) < bytes)
        return at_refuse(at, no, "%zu bytes are needed, %zu are left", bytes,
                         (size_t)(c->end - c->at));
    *out = 0;
    memcpy(out, c->at, bytes);
    c->at += bytes;
    return PERSIA_OK;
}

static int get_payload(const wire_at *at, cursor *c, payload *p,
                       unsigned depth);

/* What lies between the tags of a group, which no field of ours is. */
static int get_skip_group(const wire_at *at, cursor *c, uint64_t no,
                          unsigned depth)
{
    payload p;
    int rc;
    if (depth == GROUPS_MAX)
        return at_refuse(at, no, "more than %u groups in groups", depth);
    do {
        if (c->at == c->end)
            return at_refuse(at, no, "the message ends in a group");
        if ((rc = get_payload(at, c, &p, depth + 1)))
            return rc;
    } while (p.coding != CODING_GROUP_END);
    if (p.no != no)
        return at_refuse(at, no, "ends as group %llu",
                         (unsigned long long)p.no);
    return PERSIA_OK;
}

/* The next field.  depth: of groups; the end of one is a payload there. */
static int get_payload(const wire_at *at, cursor *c, payload *p,
                       unsigned depth)
{
    uint64_t tag = 0;
    int rc = get_varint(at, 0, c, &tag);
    if (rc)
        return rc;
    *p = (payload){ .no = tag >> 3, .coding = tag & 7 };
    if (!p->no || tag > UINT32_MAX)
        return at_refuse(at, 0, "there is no field %llu",
                         (unsigned long long)p->no);
    switch (p->coding) {
    case CODING_VARINT:
        return get_varint(at, p->no, c, &p->number);
    case CODING_64:
        return get_fixed(at, p->no, c, 8, &p->number);
    case CODING_32:
        return get_fixed(at, p->no, c, 4, &p->number);
    case CODING_BYTES:
        if ((rc = get_varint(at, p->no, c, &p->number)))
            return rc;
        if (p->number > (size_t)(c->end - c->at))
            return at_refuse(at, p->no, "its length is %llu, %zu are left",
                             (unsigned long long)p->number,
                             (size_t)(c->end - c->at));
        p->data = c->at;
        p->n = (size_t)p->number;
        c->at += p->n;
        return PERSIA_OK;
    case CODING_GROUP:
        return get_skip_group(at, c, p->no, depth);
    case CODING_GROUP_END:
        if (depth)
            return PERSIA_OK;
        break;
    }
    return at_refuse(at, p->no, "has coding %u, which cannot be here",
                     (unsigned)p->coding);
}

static int get_expect(const wire_at *at, const payload *p,
                      enum wire_coding coding)
{
    return p->coding == coding
               ? PERSIA_OK
               : at_refuse(at, p->no, "is %s instead of %s",
                           coding_names[p->coding], coding_names[coding]);
}

/* How many numbers a payload of a repeated field holds: packed or one. */
static int get_count_numbers(const wire_at *at, const payload *p, size_t *n)
{
    if (p->coding != CODING_BYTES) {
        *n += 1;
        return get_expect(at, p, CODING_VARINT);
    }
    for (size_t i = 0; i < p->n; i++)
        *n += p->data[i] < 0x80;
    if (p->n && p->data[p->n - 1] >= 0x80)
        return at_refuse(at, p->no, "ends in a varint");
    return PERSIA_OK;
}

static int get_numbers(const wire_at *at, const payload *p, uint64_t *out,
                       size_t *n)
{
    if (p->coding == CODING_VARINT) {
        out[(*n)++] = p->number;
        return PERSIA_OK;
    }
    cursor c = { p->data, p->data + p->n };
    while (c.at < c.end) {
        uint64_t value = 0;
        int rc = get_varint(at, p->no, &c, &value);
        if (rc)
            return rc;
        out[(*n)++] = value;
    }
    return PERSIA_OK;
}

static int get_number(const wire_at *at, const wire_field *f,
                      const payload *p, char *member)
{
    static const enum wire_coding codings[] = {
        [KIND_U32] = CODING_VARINT,
        [KIND_U64] = CODING_VARINT,
        [KIND_FIXED64] = CODING_64,
        [KIND_FLOAT] = CODING_32,
    };
    int rc = get_expect(at, p, codings[f->kind]);
    if (rc)
        return rc;
    const uint32_t small = (uint32_t)p->number;
    float value;
    switch (f->kind) {
    case KIND_U32:
        if (p->number > f->limit)
            return at_refuse(at, p->no, "is %llu, at most %u",
                             (unsigned long long)p->number, f->limit);
        memcpy(member, &small, sizeof small);
        break;
    case KIND_FLOAT:
        memcpy(&value, &small, sizeof value);
        if (!isfinite(value))
            return at_refuse(at, p->no, "is not finite");
        memcpy(member, &value, sizeof value);
        break;
    default:
        memcpy(member, &p->number, sizeof p->number);
    }
    return PERSIA_OK;
}

static int get_words(const wire_at *at, const wire_field *f, const payload *p,
                     char *member)
{
    if (p->n % 8 || p->n > f->limit * (size_t)8)
        return at_refuse(at, p->no, "has %zu bytes, a multiple of 8 up to "
                         "%u allowed", p->n, f->limit * 8);
    memset(member, 0, f->limit * (size_t)8);
    memcpy(member, p->data, p->n);
    return PERSIA_OK;
}

/* The message being read: its struct, and what the struct cannot hold. */
typedef struct target {
    char *m;
    uint32_t dtype;
    wire_memory *memory;
    payload bulk[WIRE_FIELDS_MAX + 1];  /* the last of each */
    size_t counts[WIRE_FIELDS_MAX + 1]; /* of repeated fields */
} target;

static int get_type(const wire_at *at, cursor c, wire_memory *memory, void *m,
                    uint32_t dtype);

static int run_check(const wire_at *at, const void *m, uint32_t dtype)
{
    return at->type->check ? at->type->check(at, m, dtype) : PERSIA_OK;
}

/* First time through: everything but the elements of repeated fields. */
static int get_field(const wire_at *at, const wire_field *f, const payload *p,
                     target *t)
{
    char *member = t->m + f->offset;
    int rc;
    switch (f->kind) {
    case KIND_NONE:
        return PERSIA_OK;
    case KIND_U32:
    case KIND_U64:
    case KIND_FIXED64:
    case KIND_FLOAT:
        return get_number(at, f, p, member);
    case KIND_NUMBERS:
        return get_count_numbers(at, p, &t->counts[p->no]);
    case KIND_NAME:
    case KIND_WORDS:
    case KIND_BULK:
    case KIND_MESSAGE:
    case KIND_MESSAGES:
        break;
    }
    if ((rc = get_expect(at, p, CODING_BYTES)))
        return rc;
    if (f->kind == KIND_WORDS)
        return get_words(at, f, p, member);
    if (f->kind == KIND_NAME) {
        if ((rc = at_check_name(at, (uint32_t)p->no, (const char *)p->data,
                                p->n)))
            return rc;
        memcpy(member, p->data, p->n);
        member[p->n] = 0;
    } else if (f->kind == KIND_BULK) {
        t->bulk[p->no] = *p;
    } else if (f->kind == KIND_MESSAGES) {
        t->counts[p->no]++;
    } else {
        return get_type(&(wire_at){ at, f->type, (uint32_t)p->no, 0,
                                    at->code },
                        (cursor){ p->data, p->data + p->n }, t->memory,
                        member, t->dtype);
    }
    return PERSIA_OK;
}

/* Between the two: arrays for the repeated fields. */
static int get_make_arrays(const wire_at *at, target *t, int *repeated)
{
    const wire_type *type = at->type;
    for (uint32_t no = 1; no <= type->fields_n; no++) {
        const wire_field *f = &type->fields[no];
        const size_t n = t->counts[no];
        if (f->kind != KIND_NUMBERS && f->kind != KIND_MESSAGES)
            continue;
        if (n > f->limit)
            return at_refuse(at, no, "has %zu elements, at most %u", n,
                             f->limit);
        for (uint32_t twin = 1; twin < no; twin++)
            if (type->fields[twin].count == f->count && f->count &&
                t->counts[twin] != n)
                return at_refuse(at, no, "has %zu elements, %s has %zu", n,
                                 type->fields[twin].name, t->counts[twin]);
        memcpy(t->m + f->count, &n, sizeof n);
        memset(t->m + f->offset, 0, sizeof(void *));
        if (!n)
            continue;
        size_t size = f->kind == KIND_NUMBERS ? sizeof(uint64_t)
                                              : f->type->size;
        void *array = persia_wire_memory_take(t->memory, n * size);
        if (!array)
            return PERSIA_ENOMEM;
        memset(array, 0, n * size);
        memcpy(t->m + f->offset, &array, sizeof array);
        *repeated = 1;
    }
    return PERSIA_OK;
}

/* Second time: the elements of repeated fields. */
static int get_element(const wire_at *at, const wire_field *f,
                       const payload *p, target *t)
{
    if (f->kind != KIND_NUMBERS && f->kind != KIND_MESSAGES)
        return PERSIA_OK;
    char *array;
    memcpy(&array, t->m + f->offset, sizeof array);
    size_t *n = &t->counts[p->no];
    if (f->kind == KIND_NUMBERS)
        return get_numbers(at, p, (void *)array, n);
    wire_at below = { at, f->type, (uint32_t)p->no, (*n)++, at->code };
    void *m = array + below.index * f->type->size;
    int rc = get_type(&below, (cursor){ p->data, p->data + p->n }, t->memory,
                      m, t->dtype);
    return rc ? rc : run_check(&below, m, t->dtype);
}

/* Bulk data: their lengths must agree; they stay where they lie, if that is
 * aligned.  The count is that of this part of the message, so a field that it
 * leaves out is absent, even if an earlier part had it. */
static int get_bulk(const wire_at *at, target *t)
{
    const wire_type *type = at->type;
    const payload *leader = &t->bulk[type->leader];
    const wire_field *f = &type->fields[type->leader];
    size_t item = bulk_item(f, t->m, t->dtype);
    if (leader->n && (!item || leader->n % item))
        return at_refuse(at, type->leader, "has %zu bytes, no multiple of "
                         "%zu", leader->n, item);
    const size_t n = leader->n ? leader->n / item : 0;
    memcpy(t->m + f->count, &n, sizeof n);
    for (uint32_t no = 1; no <= type->fields_n; no++) {
        f = &type->fields[no];
        const payload *p = &t->bulk[no];
        const void *data = p->data;
        if (f->kind != KIND_BULK)
            continue;
        memset(t->m + f->offset, 0, sizeof(void *));
        if (!p->n)
            continue;
        item = bulk_item(f, t->m, t->dtype);
        if (p->n != n * item)
            return at_refuse(at, no, "has %zu bytes, %zu rows of %zu bytes "
                             "need %zu", p->n, n, item, n * item);
        if ((uintptr_t)data % ALIGN) {
            void *copy = persia_wire_memory_take(t->memory, p->n);
            if (!copy)
                return PERSIA_ENOMEM;
            data = memcpy(copy, p->data, p->n);
        }
        memcpy(t->m + f->offset, &data, sizeof data);
    }
    return PERSIA_OK;
}

/* What an absent field, or one of 0, stands for; and the checks of
 * embedded messages, whether they are there or not. */
static int get_missing(const wire_at *at, target *t)
{
    for (uint32_t no = 1; no <= at->type->fields_n; no++) {
        const wire_field *f = &at->type->fields[no];
        char *member = t->m + f->offset;
        if (f->kind == KIND_U32 && f->unset) {
            uint32_t value;
            memcpy(&value, member, sizeof value);
            if (!value)
                memcpy(member, &f->unset, sizeof f->unset);
        } else if (f->kind == KIND_MESSAGE) {
            int rc = run_check(&(wire_at){ at, f->type, no, 0, at->code },
                               member, t->dtype);
            if (rc)
                return rc;
        }
    }
    return PERSIA_OK;
}

typedef int (*field_fn)(const wire_at *at, const wire_field *f,
                        const payload *p, target *t);

static int each_field(const wire_at *at, cursor c, field_fn fn, target *t)
{
    payload p;
    int rc = PERSIA_OK;
    while (c.at < c.end && !rc) {
        rc = get_payload(at, &c, &p, 0);
        if (rc) /* p was not read */
            break;
        const wire_field *f = type_field(at->type, p.no);
        if (f)
            rc = fn(at, f, &p, t);
    }
    return rc;
}

/* Reads into m, which is 0 or holds an earlier part of the message. */
static int get_type(const wire_at *at, cursor c, wire_memory *memory, void *m,
                    uint32_t dtype)
{
    const wire_type *type = at->type;
    target t = { .m = m, .dtype = dtype, .memory = memory };
    int repeated = 0, rc = each_field(at, c, get_field, &t);
    if (!rc && type->leader)
        rc = get_bulk(at, &t);
    if (!rc)
        rc = get_missing(at, &t);
    if (!rc)
        rc = get_make_arrays(at, &t, &repeated);
    if (rc || !repeated)
        return rc;
    if (type->dtype)
        memcpy(&t.dtype, t.m + type->fields[type->dtype].offset,
               sizeof t.dtype);
    memset(t.counts, 0, sizeof t.counts);
    return each_field(at, c, get_element, &t);
}

int message_get(const void *data, size_t n, wire_memory *memory,
                const wire_type *type, void *out)
{
    const wire_at at = { .type = type, .code = PERSIA_EPROTOCOL };
    const uint8_t *begin = n ? data : (const uint8_t *)"";
    memset(out, 0, type->size);
    int rc = get_type(&at, (cursor){ begin, begin + n }, memory, out, 0);
    return rc ? rc : run_check(&at, out, 0);
}
