/* bits: prints one line with a checksum for each kernel, on fixed inputs.
 *
 * It is built once with the rooms as they are (clones for several
 * instruction sets) and once with the rooms compiled for each -march alone.
 * compare.cmake runs all and wants the same lines.  This file itself is
 * always compiled for the plain processor, so it can say "skipped" (exit
 * status 77) on one that lacks BITS_MARCH.
 */
#include <stdio.h>
#include <stdlib.h>

#include "pool/pool.h"
#include "table/table.h"
#include "wire/wire.h"

enum { IDS = 700, BAGS = 90, DISTINCT = 230, PUSHES = 4, DIM_MAX = 100 };

static const uint32_t dims[] = {1, 3, 4, 8, 13, 16, 24, 64, 100};
enum { DIMS = sizeof dims / sizeof *dims };

static void check(int code, const char *what)
{
    if (code) {
        fprintf(stderr, "%s: %s\n", what, persia_err_text());
        exit(1);
    }
}

/* ---- inputs and checksums ---- */

static uint32_t counter;

static uint32_t random_u32(void)
{
    uint32_t at[4] = {counter++, 0, 0, 0}, key[2] = {7, 11}, out[4];
    philox4x32(at, key, out);
    return out[0];
}

/* In (-2, 2), of very different magnitudes, so that any other order of a sum
 * shows. */
static float random_float(void)
{
    float x = (float)(int32_t)random_u32() * 0x1p-30f;
    return x * (random_u32() % 3 ? 1.0f : 0x1p-9f);
}

static void random_fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = random_float();
}

/* FNV-1a. */
static uint64_t checksum(uint64_t sum, const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    for (size_t i = 0; i < n; i++)
        sum = (sum ^ p[i]) * 0x100000001B3u;
    return sum;
}

static const uint64_t CHECKSUM_START = 0xCBF29CE484222325u;

/* ---- pool ---- */

static float rows[IDS * DIM_MAX], grad[IDS * DIM_MAX], out[IDS * DIM_MAX];
static float weights[IDS];
static int64_t offsets[BAGS + 1];

static void pool_case(uint32_t kind, uint32_t dim, int weighted)
{
    const float *w = weighted ? weights : NULL;
    size_t out_rows = kind == POOL_NONE ? IDS : BAGS;

    random_fill(rows, (size_t)IDS * dim);
    random_fill(weights, IDS);
    persia_pool_forward(kind, BAGS, offsets, w, rows, dim, out, dim);
    uint64_t sum = checksum(CHECKSUM_START, out,
                            out_rows * dim * sizeof *out);
    printf("pool %u dim %u weights %d: %016llx\n", kind, dim, weighted,
           (unsigned long long)sum);
}

/* ---- table and optimizers ---- */

typedef struct table_case {
    uint32_t kind, dtype, dim;
    int extras; /* momentum, weight decay, clipping, bounds */
} table_case;

static table *make_table(const table_case *c)
{
    table_config config;
    table *t;

    persia_table_config_init(&config);
    snprintf(config.name, sizeof config.name, "bits");
    config.seed = 5;
    config.dim = c->dim;
    config.dtype = c->dtype;
    config.optimizer = c->kind;
    config.momentum = c->kind == OPTIM_SGD && c->extras;
    config.init = c->extras ? INIT_NORMAL : INIT_UNIFORM;
    config.init_a = c->extras ? 0.0f : -0.1f;
    config.init_b = 0.1f;
    check(persia_table_create(&config, &t), "table_create");
    return t;
}

static optim_args make_args(const table_case *c, uint64_t step)
{
    optim_args args = {.kind = c->kind,
                       .lr = 0.05f,
                       .eps = 1e-8f,
                       .beta1 = 0.9f,
                       .beta2 = 0.999f,
                       .beta = 0.5f,
                       .step = step,
                       .grad_scale = 1.0f};
    if (c->extras) {
        args.momentum = c->kind == OPTIM_SGD ? 0.9f : 0.0f;
        args.weight_decay = 0.01f;
        args.max_grad_norm = 1.5f;
        args.max_norm = 0.9f;
        args.weight_bound = 0.3f;
        args.grad_scale = 0.7f;
    }
    return args;
}

static void run_case(sched *s, const table_case *c)
{
    static uint64_t ids[IDS];
    static uint32_t bag[IDS], hints[IDS];
    static float scale[IDS], state[IDS * DIM_MAX * 2];
    table *t = make_table(c);
    uint64_t sum = CHECKSUM_START;

    for (uint64_t step = 1; step <= PUSHES; step++) {
        for (size_t i = 0; i < IDS; i++) {
            ids[i] = (uint64_t)(random_u32() % DISTINCT) << 40;
            bag[i] = random_u32() % BAGS;
            scale[i] = random_float();
        }
        random_fill(grad, (size_t)BAGS * c->dim);
        pull_job pull = {.t = t, .n = IDS, .ids = ids, .out = out,
                         .stride = c->dim, .rows = hints};
        check(persia_table_pull(s, &pull, 1), "table_pull");
        sum = checksum(sum, out, (size_t)IDS * c->dim * sizeof *out);
        push_part part = {.n = IDS, .ids = ids, .rows = hints, .bag = bag,
                          .scale = scale, .grad = grad, .stride = c->dim,
                          .bags = BAGS};
        optim_args args = make_args(c, step);
        push_job push = {.t = t, .parts = &part, .parts_n = 1,
                         .optim = &args, .draw = step};
        check(persia_table_push(s, &push, 1), "table_push");
    }
    check(persia_table_get(t, IDS, ids, out, state, NULL), "table_get");
    sum = checksum(sum, out, (size_t)IDS * c->dim * sizeof *out);
    sum = checksum(sum, state,
                   (size_t)IDS * persia_table_state_floats(t) * sizeof *state);
    printf("%s dtype %u dim %u extras %d: %016llx\n",
           persia_optim_name(c->kind), c->dtype, c->dim, c->extras,
           (unsigned long long)sum);
    persia_table_destroy(t);
}

/* ---- wire ---- */

/* Floats of any bits: subnormal, Inf and NaN too; every third row is tame. */
static void wire_case(uint32_t dtype, uint32_t dim)
{
    static float values[IDS * DIM_MAX], scales[IDS];
    static uint16_t narrow[IDS * DIM_MAX];

    for (size_t i = 0; i < (size_t)IDS * dim; i++) {
        union { uint32_t u; float f; } x = { random_u32() };
        values[i] = i / dim % 3 ? x.f : random_float();
    }
    persia_wire_narrow(dtype, IDS, dim, values, dim, narrow, scales);
    uint64_t sum = checksum(CHECKSUM_START, narrow,
                            sizeof *narrow * IDS * dim);
    if (dtype == WIRE_FP16)
        sum = checksum(sum, scales, sizeof scales);
    persia_wire_widen(dtype, IDS, dim, narrow, scales, values, dim);
    sum = checksum(sum, values, sizeof *values * IDS * dim);
    printf("wire %u dim %u: %016llx\n", dtype, dim,
           (unsigned long long)sum);
}

/* ---- all ---- */

static int processor_has(void)
{
#ifdef BITS_MARCH
    return __builtin_cpu_supports(BITS_MARCH);
#else
    return 1;
#endif
}

int main(void)
{
    sched *s;

    if (!processor_has())
        return 77;
    for (size_t b = 1; b < BAGS; b++) /* lengths 0 .. 14, some empty */
        offsets[b] = offsets[b - 1] + (int64_t)(b % 15);
    for (size_t b = 0; b < BAGS; b++)
        offsets[b] = offsets[b] < IDS ? offsets[b] : IDS;
    offsets[BAGS] = IDS;
    check(persia_sched_create(2, &s), "sched_create");
    for (size_t d = 0; d < DIMS; d++) {
        wire_case(WIRE_FP16, dims[d]);
        wire_case(WIRE_BF16, dims[d]);
        for (uint32_t kind = 0; kind < POOL_NONE; kind++) {
            pool_case(kind, dims[d], 0);
            pool_case(kind, dims[d], 1);
        }
        for (uint32_t i = 0; i < OPTIM_KINDS * VECTOR_DTYPES * 2; i++) {
            table_case c = {.kind = i % OPTIM_KINDS,
                            .dtype = i / OPTIM_KINDS % VECTOR_DTYPES,
                            .dim = dims[d],
                            .extras = (int)(i / OPTIM_KINDS / VECTOR_DTYPES)};
            run_case(s, &c);
        }
    }
    persia_sched_destroy(s);
    return 0;
}
