/* tensors.c: types of elements; what a tensor may be. */
#include "infer/infer.h"

#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} types[INFER_TYPES] = {
#define TENSORS_TYPE(name, bytes) {#name, bytes},
    INFER_TYPES_EACH(TENSORS_TYPE)
#undef TENSORS_TYPE
};

const char *persia_infer_type_name(uint32_t type)
{
    return type < INFER_TYPES ? types[type].name : NULL;
}

uint32_t persia_infer_type(infer_text name)
{
    uint32_t i = 0;
    while (i < INFER_TYPES && (strlen(types[i].name) != name.n ||
                               memcmp(types[i].name, name.data, name.n) != 0))
        i++;
    return i;
}

/* The bytes are `count` elements, each behind its length. */
static int tensors_check_elements(const infer_tensor *t, uint64_t count)
{
    const char *at = t->data, *end = at + t->bytes;
    uint32_t n;
    for (uint64_t i = 0; i < count; i++) {
        if ((size_t)(end - at) < sizeof n)
            return persia_err_set(PERSIA_ESHAPE,
                                  "%.*s: %zu bytes are not %llu elements",
                                  (int)t->name.n, t->name.data, t->bytes,
                                  (unsigned long long)count);
        memcpy(&n, at, sizeof n);
        at += sizeof n;
        if (n > (size_t)(end - at))
            return persia_err_set(PERSIA_ESHAPE, "%.*s: element %llu is cut "
                                  "off",
                                  (int)t->name.n, t->name.data,
                                  (unsigned long long)i);
        at += n;
    }
    return at == end ? PERSIA_OK
                     : persia_err_set(PERSIA_ESHAPE,
                                      "%.*s: %zu bytes follow the last "
                                      "element",
                                      (int)t->name.n, t->name.data,
                                      (size_t)(end - at));
}

int persia_infer_check(const infer_tensor *t)
{
    uint64_t count = 1;
    if (!t->dims || t->dims > INFER_DIMS_MAX)
        return persia_err_set(PERSIA_ESHAPE,
                              "%.*s: the shape has %u sizes, need 1 to %d",
                              (int)t->name.n, t->name.data, t->dims,
                              INFER_DIMS_MAX);
    for (uint32_t i = 0; i < t->dims; i++) {
        if (t->shape[i] < 0)
            return persia_err_set(PERSIA_ESHAPE, "%.*s: a size is %lld",
                                  (int)t->name.n, t->name.data,
                                  (long long)t->shape[i]);
        if (t->shape[i] > INFER_ELEMENTS_MAX ||
            (count *= (uint64_t)t->shape[i]) > INFER_ELEMENTS_MAX)
            return persia_err_set(PERSIA_ELIMIT,
                                  "%.*s: more than %d elements",
                                  (int)t->name.n, t->name.data,
                                  INFER_ELEMENTS_MAX);
    }
    if (t->type == INFER_BYTES)
        return tensors_check_elements(t, count);
    if (t->bytes == count * types[t->type].bytes)
        return PERSIA_OK;
    return persia_err_set(PERSIA_ESHAPE,
                          "%.*s: %zu bytes for %llu elements of %s",
                          (int)t->name.n, t->name.data, t->bytes,
                          (unsigned long long)count, types[t->type].name);
}
