/* types.c: errors that name a field, and what messages.c cannot tell: the
 * checks of several fields of a message. */
#include "wire/types.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- errors and names --------------------------------------------------- */

const wire_field *type_field(const wire_type *t, uint64_t no)
{
    return no && no <= t->fields_n && t->fields[no].kind ? &t->fields[no]
                                                         : NULL;
}

uint32_t type_number(const wire_type *t, const char *name)
{
    for (uint32_t no = 1; no <= t->fields_n; no++)
        if (t->fields[no].name && !strcmp(t->fields[no].name, name))
            return no;
    assert(0 && "a field of this name");
    return 0;
}

/* "PushRequest.tables[3]"; returns its length, which may pass `room`. */
static size_t types_describe(const wire_at *at, char *out, size_t room)
{
    if (!at->up)
        return (size_t)snprintf(out, room, "%s", at->type->name);
    const wire_field *f = &at->up->type->fields[at->field];
    size_t n = types_describe(at->up, out, room);
    char index[32] = "";
    if (f->kind == KIND_MESSAGES)
        snprintf(index, sizeof index, "[%zu]", at->index);
    if (n < room)
        n += (size_t)snprintf(out + n, room - n, ".%s%s", f->name, index);
    return n;
}

int at_refuse(const wire_at *at, uint64_t no, const char *format, ...)
{
    char place[256], what[256];
    const wire_field *f = type_field(at->type, no);
    va_list args;

    size_t n = types_describe(at, place, sizeof place);
    if (no && n < sizeof place) {
        if (f)
            snprintf(place + n, sizeof place - n, ".%s", f->name);
        else
            snprintf(place + n, sizeof place - n, ", field %llu",
                     (unsigned long long)no);
    }
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return persia_err_set(at->code, "message %s: %s", place, what);
}

/* Bytes of the UTF-8 character at s, which has n > 0 bytes; 0 if malformed. */
static size_t types_utf8_length(const unsigned char *s, size_t n)
{
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    size_t length = s[0] < 0x80   ? 1
                    : s[0] < 0xC0 ? 0
                    : s[0] < 0xE0 ? 2
                    : s[0] < 0xF0 ? 3
                    : s[0] < 0xF8 ? 4
                                  : 0;
    if (length < 2 || length > n)
        return length <= n ? length : 0;
    uint32_t c = s[0] & (0xFFu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
        c = c << 6 | (s[i] & 0x3F);
    }
    return c < least[length] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)
               ? 0
               : length;
}

int persia_wire_is_utf8(const char *text, size_t bytes)
{
    for (size_t i = 0, n; i < bytes; i += n) {
        n = types_utf8_length((const unsigned char *)text + i, bytes - i);
        if (!n || !text[i])
            return 0;
    }
    return 1;
}

int at_check_name(const wire_at *at, uint32_t no, const char *text,
                  size_t bytes)
{
    const uint32_t room = at->type->fields[no].limit;
    if (bytes >= room)
        return at_refuse(at, no, "has %zu bytes, at most %u", bytes,
                         room - 1);
    for (size_t i = 0, n; i < bytes; i += n) {
        if (!text[i])
            return at_refuse(at, no, "has a 0 at byte %zu", i);
        n = types_utf8_length((const unsigned char *)text + i, bytes - i);
        if (!n)
            return at_refuse(at, no, "is not UTF-8 at byte %zu", i);
    }
    return PERSIA_OK;
}

size_t bulk_item(const wire_field *f, const void *m, uint32_t dtype)
{
    uint32_t width = 1;
    if (f->width)
        memcpy(&width, (const char *)m + f->width, sizeof width);
    return (size_t)width * (f->item ? f->item : wire_dtype_bytes(dtype));
}

/* ---- checks ------------------------------------------------------------- */

#define REFUSE(field, ...)                                                    \
    return at_refuse(at, type_number(at->type, field), __VA_ARGS__)

int at_check_table_spec(const wire_at *at, const void *m, uint32_t dtype)
{
    const table_spec *spec = m;
    (void)dtype;
    if (!spec->name[0])
        REFUSE("name", "is empty");
    if (!spec->dim)
        REFUSE("dim", "is 0, 1 to %u allowed", WIRE_DIM_MAX);
    return PERSIA_OK;
}

/* FP16 has scales, the others have none. */
int at_check_values(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_values *v = m;
    if (v->scales && dtype != WIRE_FP16)
        REFUSE("scales", "only fp16 has scales");
    if (!v->scales && dtype == WIRE_FP16 && v->n)
        REFUSE("scales", "fp16 needs a scale for each of %zu rows", v->n);
    return PERSIA_OK;
}

int at_check_push_table(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_values *v = &((const wire_push_table *)m)->grads;
    if (v->n && !v->values)
        REFUSE("values", "no gradients for %zu ids", v->n);
    return at_check_values(at, v, dtype);
}

int at_check_hello(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_hello *h = m;
    (void)dtype;
    if (h->rank && h->rank >= h->world)
        REFUSE("rank", "is %u of a world of %u", h->rank, h->world);
    return PERSIA_OK;
}

int at_check_hello_reply(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_hello_reply *h = m;
    (void)dtype;
    if (h->shard >= h->shards)
        REFUSE("shard", "is %u of %u", h->shard, h->shards);
    return PERSIA_OK;
}

int at_check_push(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_push *p = m;
    (void)dtype;
    if (!p->stream)
        REFUSE("stream", "is 0, which is no stream");
    if (!p->number)
        REFUSE("number", "is 0, numbers begin at 1");
    if (p->settled >= p->number)
        REFUSE("settled", "is %llu, it must be below the number %llu",
               (unsigned long long)p->settled, (unsigned long long)p->number);
    if (p->part >= p->parts)
        REFUSE("part", "is %u of %u", p->part, p->parts);
    if (p->parts > 1 && !p->step && !p->group)
        REFUSE("step", "is 0, but %u parts belong to a step, from 1",
               p->parts);
    if (p->step && p->group)
        REFUSE("group", "is of an update without a step");
    return PERSIA_OK;
}

int at_check_leave(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_leave *l = m;
    (void)dtype;
    if (l->rank >= l->world)
        REFUSE("rank", "is %u of a world of %u", l->rank, l->world);
    return PERSIA_OK;
}

int at_check_plan(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_plan *p = m;
    (void)dtype;
    if (!p->features_n)
        REFUSE("features", "is empty");
    for (size_t i = 0; i < p->features_n; i++)
        if (p->features[i].table >= p->tables_n)
            REFUSE("features", "%s is of table %u, but there are %zu",
                   p->features[i].name, p->features[i].table, p->tables_n);
    return PERSIA_OK;
}

int at_check_submit(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_submit *s = m;
    const size_t bags = s->features_n * s->samples;
    (void)dtype;
    if (!s->stream)
        REFUSE("stream", "is 0, which is no stream");
    if (!s->number)
        REFUSE("number", "is 0, numbers begin at 1");
    if (s->settled >= s->number)
        REFUSE("settled", "is %llu, it must be below the number %llu",
               (unsigned long long)s->settled, (unsigned long long)s->number);
    if (s->epoch > INT64_MAX / 2 || s->first > INT64_MAX / 2)
        REFUSE("epoch", "is %llu, and the first one %llu",
               (unsigned long long)s->epoch, (unsigned long long)s->first);
    if (s->place > s->number)
        REFUSE("place", "is %llu, it must not be above the number %llu",
               (unsigned long long)s->place, (unsigned long long)s->number);
    if (!bags)
        REFUSE("samples", "%u samples of %zu features are no batch",
               s->samples, s->features_n);
    if (s->offsets.n ? s->offsets.n != bags + 1 : s->ids.n != bags)
        REFUSE("offsets", "%zu ids and %zu offsets for %zu features of %u "
               "samples", s->ids.n, s->offsets.n, s->features_n, s->samples);
    return PERSIA_OK;
}

int at_check_heartbeat(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_heartbeat *h = m;
    (void)dtype;
    if (!h->stream)
        REFUSE("stream", "is 0, which is no stream");
    if (h->epoch > INT64_MAX / 2 || h->first > INT64_MAX / 2)
        REFUSE("epoch", "is %llu, and the first one %llu",
               (unsigned long long)h->epoch, (unsigned long long)h->first);
    if (h->ends_n && h->ends_n >= h->epoch)
        REFUSE("ends", "are of %zu epochs before epoch %llu", h->ends_n,
               (unsigned long long)h->epoch);
    for (size_t i = 1; i < h->ends_n; i++)
        if (h->ends[i] < h->ends[i - 1])
            REFUSE("ends", "fall: %llu after %llu",
                   (unsigned long long)h->ends[i],
                   (unsigned long long)h->ends[i - 1]);
    return PERSIA_OK;
}

int at_check_return(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_return *r = m;
    (void)dtype;
    if (r->part >= r->parts)
        REFUSE("part", "is %u of %u", r->part, r->parts);
    if (r->parts > 1 && !r->step == !r->group)
        REFUSE("parts", "are of a step, or of a group");
    return PERSIA_OK;
}

int at_check_take(const wire_at *at, const void *m, uint32_t dtype)
{
    const wire_take *t = m;
    (void)dtype;
    if (t->epoch > INT64_MAX)
        REFUSE("epoch", "is %llu", (unsigned long long)t->epoch);
    if (!t->number)
        REFUSE("number", "is 0, numbers begin at 1");
    return PERSIA_OK;
}
