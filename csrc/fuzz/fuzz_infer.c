/* Requests of gRPC to models, made of arbitrary bytes: they are refused with
 * an error, or every tensor has the bytes of its shape. */
#include <stdlib.h>
#include <string.h>

#include "infer/infer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void copy_all(const infer_plan *p, const infer_request *r)
{
    const infer_tensor *found[2];
    uint64_t samples;
    if (persia_infer_bind(p, r, 64, found, &samples))
        return;
    for (size_t i = 0; i < 2; i++) {
        const infer_input *in = persia_infer_plan_input(p, i);
        char *to = malloc(samples * in->row + 1);
        if (!to)
            abort();
        persia_infer_copy(in, found[i], samples, to);
        free(to);
    }
}

static void encode(const infer_request *r)
{
    wire_out out;
    if (persia_infer_encode(r, r->id, r->inputs, r->inputs_n, &out))
        abort();
    persia_wire_out_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const infer_input inputs[] = {
        {.name = {"a", 1}, .type = INFER_INT64, .dims = 1},
        {.name = {"b", 1}, .type = INFER_FP32, .dims = 2, .shape = {-1, 2}},
    };
    infer_plan *p;
    infer_request r;
    if (persia_infer_plan(inputs, 2, &p))
        abort();
    if (!persia_infer_decode(data, size, &r)) {
        for (size_t i = 0; i < r.inputs_n; i++)
            if (persia_infer_check(&r.inputs[i]))
                abort();
        copy_all(p, &r);
        encode(&r);
        persia_infer_free(&r);
    }
    persia_infer_plan_free(p);
    return 0;
}
