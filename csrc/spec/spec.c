#include "spec/spec.h"

#include <stdio.h>
#include <string.h>

static uint32_t spec_u32_of(const void *m, const spec_field *f)
{
    uint32_t value;
    memcpy(&value, (const char *)m + f->offset, sizeof value);
    return value;
}

static uint64_t spec_u64_of(const void *m, const spec_field *f)
{
    uint64_t value;
    memcpy(&value, (const char *)m + f->offset, sizeof value);
    return value;
}

static float spec_float_of(const void *m, const spec_field *f)
{
    float value;
    memcpy(&value, (const char *)m + f->offset, sizeof value);
    return value;
}

static int spec_same(const void *a, const void *b, const spec_field *f)
{
    switch (f->kind) {
    case SPEC_U64:
        return spec_u64_of(a, f) == spec_u64_of(b, f);
    case SPEC_FLOAT:
        return spec_float_of(a, f) == spec_float_of(b, f);
    case SPEC_NAME:
        return !strncmp((const char *)a + f->offset,
                        (const char *)b + f->offset, f->limit);
    case SPEC_U32:
    case SPEC_BOOL:
    case SPEC_ENUM:
        break;
    }
    return spec_u32_of(a, f) == spec_u32_of(b, f);
}

const spec_field *persia_spec_difference(const spec_list *list, const void *a,
                                         const void *b)
{
    for (size_t i = 0; i < list->n; i++)
        if (!spec_same(a, b, &list->fields[i]))
            return &list->fields[i];
    return NULL;
}

void persia_spec_text(const spec_field *f, const void *m, char *out,
                      size_t room)
{
    switch (f->kind) {
    case SPEC_U64:
        snprintf(out, room, "%llu", (unsigned long long)spec_u64_of(m, f));
        return;
    case SPEC_FLOAT:
        snprintf(out, room, "%.9g", (double)spec_float_of(m, f));
        return;
    case SPEC_NAME:
        snprintf(out, room, "'%.*s'", (int)f->limit,
                 (const char *)m + f->offset);
        return;
    case SPEC_ENUM:
        if (spec_u32_of(m, f) <= f->limit) {
            snprintf(out, room, "%s", f->names[spec_u32_of(m, f)]);
            return;
        }
        break;
    case SPEC_U32:
    case SPEC_BOOL:
        break;
    }
    snprintf(out, room, "%u", spec_u32_of(m, f));
}

static int spec_out_of_range(const void *m, const spec_field *f)
{
    const char *name = (const char *)m + f->offset;
    if (f->kind == SPEC_NAME)
        return (!name[0] && !f->empty) || !memchr(name, 0, f->limit);
    return f->kind <= SPEC_ENUM && spec_u32_of(m, f) > f->limit;
}

const spec_field *persia_spec_out_of_range(const spec_list *list,
                                           const void *m)
{
    for (size_t i = 0; i < list->n; i++)
        if (spec_out_of_range(m, &list->fields[i]))
            return &list->fields[i];
    return NULL;
}

void persia_spec_add(const spec_list *list, void *sum, const void *more)
{
    for (size_t i = 0; i < list->n; i++) {
        const spec_field *f = &list->fields[i];
        uint64_t a = spec_u64_of(sum, f), b = spec_u64_of(more, f);
        uint64_t both = !f->largest ? a + b : a > b ? a : b;
        memcpy((char *)sum + f->offset, &both, sizeof both);
    }
}
