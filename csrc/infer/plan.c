/* plan.c: tensors of a request as the inputs of a model. */
#include "infer/infer.h"

#include <stdlib.h>
#include <string.h>

struct infer_plan {
    size_t n;
    wire_memory names;
    infer_input inputs[];
};

static const uint8_t sizes[] = {
#define PLAN_SIZE(name, bytes) bytes,
    INFER_TYPES_EACH(PLAN_SIZE)
#undef PLAN_SIZE
};

int persia_infer_plan(const infer_input *inputs, size_t n, infer_plan **out)
{
    infer_plan *p = calloc(1, sizeof *p + n * sizeof *inputs);
    *out = NULL;
    if (!p)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a model's inputs");
    persia_wire_memory_init(&p->names);
    for (; p->n < n; p->n++) {
        infer_input *to = &p->inputs[p->n];
        *to = inputs[p->n];
        char *name = persia_wire_memory_take(&p->names, to->name.n + 1);
        if (!name || to->type >= INFER_BYTES || !to->dims ||
            to->dims > INFER_DIMS_MAX)
            goto fail;
        memcpy(name, to->name.data, to->name.n);
        to->name.data = name;
        to->row = sizes[to->type];
        for (uint32_t i = 1; i < to->dims; i++)
            if (to->shape[i] < 0 ||
                __builtin_mul_overflow(to->row, (size_t)to->shape[i],
                                       &to->row))
                goto fail;
    }
    *out = p;
    return PERSIA_OK;
fail:
    persia_infer_plan_free(p);
    return persia_err_set(PERSIA_EARG, "input %zu of the model cannot be", n);
}

void persia_infer_plan_free(infer_plan *p)
{
    if (p)
        persia_wire_memory_free(&p->names);
    free(p);
}

size_t persia_infer_plan_inputs(const infer_plan *p)
{
    return p->n;
}

const infer_input *persia_infer_plan_input(const infer_plan *p, size_t i)
{
    return &p->inputs[i];
}

/* ---- a request ---------------------------------------------------------- */

static int plan_same_text(infer_text a, infer_text b)
{
    return a.n == b.n && memcmp(a.data, b.data, a.n) == 0;
}

/* The input of a name, or p->n.  Requests mostly have one order: `first` is
 * where it is then. */
static size_t plan_find(const infer_plan *p, infer_text name, size_t first)
{
    for (size_t i = 0; i < p->n; i++) {
        const size_t at = first + i < p->n ? first + i : first + i - p->n;
        if (plan_same_text(p->inputs[at].name, name))
            return at;
    }
    return p->n;
}

static int plan_is_integer(uint32_t type)
{
    return type >= INFER_UINT8 && type <= INFER_INT64;
}

/* INT64 takes all integers: ids of UINT64 have the same bits. */
static int plan_check_tensor(const infer_input *in, const infer_tensor *t)
{
    int same = t->dims == in->dims;
    if (t->type != in->type &&
        !(in->type == INFER_INT64 && plan_is_integer(t->type)))
        return persia_err_set(PERSIA_EDTYPE, "%.*s is of %s, need %s",
                              (int)t->name.n, t->name.data,
                              persia_infer_type_name(t->type),
                              persia_infer_type_name(in->type));
    for (uint32_t i = 1; same && i < in->dims; i++)
        same = t->shape[i] == in->shape[i];
    if (!same && in->dims == 1) /* or [n, 1] */
        same = t->dims == 2 && t->shape[1] == 1;
    return same ? PERSIA_OK
                : persia_err_set(PERSIA_ESHAPE,
                                 "%.*s has %u sizes that are not those of "
                                 "the model: need %u, [samples, ...]",
                                 (int)t->name.n, t->name.data, t->dims,
                                 in->dims);
}

static int plan_check_samples(const infer_tensor *t, uint64_t limit,
                              uint64_t *samples)
{
    const uint64_t n = (uint64_t)t->shape[0];
    if (n == 1 || n == *samples)
        return PERSIA_OK;
    if (*samples != 1 || !n)
        return persia_err_set(PERSIA_ESHAPE,
                              "%.*s has %llu samples, another input %llu: "
                              "need 1 or the same",
                              (int)t->name.n, t->name.data,
                              (unsigned long long)n,
                              (unsigned long long)*samples);
    if (n > limit)
        return persia_err_set(PERSIA_ELIMIT,
                              "%llu samples, and a request has at most %llu",
                              (unsigned long long)n,
                              (unsigned long long)limit);
    *samples = n;
    return PERSIA_OK;
}

int persia_infer_bind(const infer_plan *p, const infer_request *r,
                      uint64_t limit, const infer_tensor **found,
                      uint64_t *samples)
{
    size_t at = 0;
    *samples = 1;
    memset(found, 0, p->n * sizeof *found);
    for (size_t i = 0; i < r->inputs_n; i++) {
        const infer_tensor *t = &r->inputs[i];
        at = plan_find(p, t->name, at);
        if (at == p->n)
            return persia_err_set(PERSIA_EARG,
                                  "the model has no input '%.*s'",
                                  (int)t->name.n, t->name.data);
        if (found[at])
            return persia_err_set(PERSIA_EPROTOCOL, "input '%.*s' occurs "
                                  "twice",
                                  (int)t->name.n, t->name.data);
        int code = plan_check_tensor(&p->inputs[at], t);
        if (!code)
            code = plan_check_samples(t, limit, samples);
        if (code)
            return code;
        found[at] = t;
        at = at + 1 < p->n ? at + 1 : 0;
    }
    for (size_t i = 0; i < p->n; i++)
        if (!found[i])
            return persia_err_set(PERSIA_EFEATURE,
                                  "the request has no input '%.*s'",
                                  (int)p->inputs[i].name.n,
                                  p->inputs[i].name.data);
    return PERSIA_OK;
}

/* ---- copies ------------------------------------------------------------- */

static int64_t plan_widen(uint32_t type, const char *from)
{
    uint64_t bits = 0;
    const size_t bytes = sizes[type];
    memcpy(&bits, from, bytes);
    if (type < INFER_INT8)
        return (int64_t)bits;
    const unsigned shift = (unsigned)(64 - 8 * bytes);
    return (int64_t)(bits << shift) >> shift;
}

void persia_infer_copy(const infer_input *input, const infer_tensor *t,
                       uint64_t samples, void *to)
{
    const uint64_t n = (uint64_t)t->shape[0];
    char *out = to;
    if (sizes[t->type] == sizes[input->type])
        memcpy(out, t->data, n * input->row);
    else
        for (uint64_t i = 0; i < n * (input->row / sizeof(int64_t)); i++) {
            const int64_t value = plan_widen(
                t->type, (const char *)t->data + i * sizes[t->type]);
            memcpy(out + i * sizeof value, &value, sizeof value);
        }
    for (uint64_t i = n; i < samples; i++)
        memcpy(out + i * input->row, out, input->row);
}
