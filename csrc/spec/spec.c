#include "spec/spec.h"

#include <stdio.h>
#include <string.h>

static uint32_t u32_of(const void *m, const spec_field *f)
{
    uint32_t value;
    memcpy(&value, (const char *)m + f->offset, sizeof value);
    return value;
}

static uint64_t u64_of(const void *m, const spec_field *f)
{
    uint64_t value;
    memcpy(&value, (const char *)m + f->offset, sizeof value);
    return value;
}

static float float_of(const void *m, const spec_field *f)
{
    float value;
    memcpy(&value, (const char *)m + f->offset, sizeof value);
    return value;
}

static int same(const void *a, const void *b, const spec_field *f)
{
    switch (f->kind) {
    case SPEC_U64:
        return u64_of(a, f) == u64_of(b, f);
    case SPEC_FLOAT:
        return float_of(a, f) == float_of(b, f);
    case SPEC_NAME:
        return !strncmp((const char *)a + f->offset,
                        (const char *)b + f->offset, f->limit);
    case SPEC_U32:
    case SPEC_BOOL:
    case SPEC_ENUM:
        break;
    }
    return u32_of(a, f) == u32_of(b, f);
}

const spec_field *persia_spec_difference(const spec_list *list, const void *a,
                                         const void *b)
{
    for (size_t i = 0; i < list->n; i++)
        if (!same(a, b, &list->fields[i]))
            return &list->fields[i];
    return NULL;
}

void persia_spec_text(const spec_field *f, const void *m, char *out,
                      size_t room)
{
    switch (f->kind) {
    case SPEC_U64:
        snprintf(out, room, "%llu", (unsigned long long)u64_of(m, f));
        return;
    case SPEC_FLOAT:
        snprintf(out, room, "%.9g", (double)float_of(m, f));
        return;
    case SPEC_NAME:
        snprintf(out, room, "'%.*s'", (int)f->limit,
                 (const char *)m + f->offset);
        return;
    case SPEC_ENUM:
        if (u32_of(m, f) <= f->limit) {
            snprintf(out, room, "%s", f->names[u32_of(m, f)]);
            return;
        }
        break;
    case SPEC_U32:
    case SPEC_BOOL:
        break;
    }
    snprintf(out, room, "%u", u32_of(m, f));
}

static int out_of_range(const void *m, const spec_field *f)
{
    const char *name = (const char *)m + f->offset;
    if (f->kind == SPEC_NAME)
        return (!name[0] && !f->empty) || !memchr(name, 0, f->limit);
    return f->kind <= SPEC_ENUM && u32_of(m, f) > f->limit;
}

const spec_field *persia_spec_out_of_range(const spec_list *list,
                                           const void *m)
{
    for (size_t i = 0; i < list->n; i++)
        if (out_of_range(m, &list->fields[i]))
            return &list->fields[i];
    return NULL;
}

void persia_spec_add(const spec_list *list, void *sum, const void *more)
{
    for (size_t i = 0; i < list->n; i++) {
        const spec_field *f = &list->fields[i];
        uint64_t a = u64_of(sum, f), b = u64_of(more, f);
        uint64_t both = !f->largest ? a + b : a > b ? a : b;
        memcpy((char *)sum + f->offset, &both, sizeof both);
    }
}
