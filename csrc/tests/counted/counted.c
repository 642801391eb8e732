/* counted.c: tables and pooling, one call a case.  See counted.h. */
#include "tests/counted/counted.h"
#include "tests/ids/chosen.h"

#include "pool/pool.h"
#include "table/table.h"

#include <gnu/libc-version.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 20000, N = 8192, BAGS = 2048, DIM_MAX = 64 };

#define KEY 0xD1B54A32D192ED03u /* so that counts do not depend on chance */

static sched *one;
static uint64_t all[ROWS], known[N], fresh[N], chosen[N];
static uint32_t hints[N];
static float grad[N * DIM_MAX], out[N * DIM_MAX];

void check_ok(int code)
{
    if (!code)
        return;
    fprintf(stderr, "%s: %s\n", persia_err_name(code), persia_err_text());
    exit(1);
}

void some_ids(uint64_t *ids, size_t n, uint64_t most)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t x = id_hash(i), y = id_hash(x);
        ids[i] = x % 4 ? y % most : y % 64;
    }
}

static int pull(table *t, const uint64_t *ids)
{
    const uint32_t dim = persia_table_get_config(t)->dim;
    pull_job job = {.t = t, .n = N, .ids = ids, .out = out, .stride = dim,
                    .rows = hints};

    return persia_table_pull(one, &job, 1);
}

static int push(table *t, size_t n, const uint64_t *ids, const uint32_t *rows)
{
    const table_config *c = persia_table_get_config(t);
    const push_part part = {.n = n, .ids = ids, .rows = rows, .grad = grad,
                            .stride = c->dim, .bags = n};
    const optim_args optim = {.kind = c->optimizer, .lr = 0.01f,
                              .eps = 1e-8f, .beta1 = 0.9f, .beta2 = 0.999f,
                              .step = 1, .grad_scale = 1};
    push_job job = {.t = t, .parts = &part, .parts_n = 1, .optim = &optim};

    return persia_table_push(one, &job, 1);
}

/* ---- the cases ---------------------------------------------------------- */

#define TABLE_CASES(optimizer, dim)                                           \
    COUNTED int counted_push_known_##optimizer##_##dim(table *t);             \
    COUNTED int counted_push_known_##optimizer##_##dim(table *t)              \
    {                                                                         \
        return push(t, N, known, hints);                                      \
    }
#define PULL_CASES(dim)                                                       \
    COUNTED int counted_pull_##dim(table *t);                                 \
    COUNTED int counted_pull_##dim(table *t)                                  \
    {                                                                         \
        return pull(t, known);                                                \
    }                                                                         \
    COUNTED int counted_push_search_##dim(table *t);                          \
    COUNTED int counted_push_search_##dim(table *t)                           \
    {                                                                         \
        return push(t, N, known, NULL);                                       \
    }                                                                         \
    COUNTED int counted_push_new_##dim(table *t);                             \
    COUNTED int counted_push_new_##dim(table *t)                              \
    {                                                                         \
        return push(t, N, fresh, NULL);                                       \
    }                                                                         \
    COUNTED void counted_pool_##dim(const int64_t *offsets);                  \
    COUNTED void counted_pool_##dim(const int64_t *offsets)                   \
    {                                                                         \
        persia_pool_forward(POOL_MEAN, BAGS, offsets, NULL, grad, dim, out,   \
                            dim);                                             \
    }
/* Ids that were chosen to collide, by someone without the key. */
COUNTED int counted_push_chosen_16(table *t);
COUNTED int counted_push_chosen_16(table *t)
{
    return push(t, N, chosen, NULL);
}
TABLE_CASES(sgd, 16)
TABLE_CASES(sgd, 64)
TABLE_CASES(adagrad, 16)
TABLE_CASES(adagrad, 64)
TABLE_CASES(rowwise_adagrad, 16)
TABLE_CASES(rowwise_adagrad, 64)
TABLE_CASES(adam, 16)
TABLE_CASES(adam, 64)
PULL_CASES(16)
PULL_CASES(64)

/* What splits and groups the ids of a batch. */
COUNTED void counted_split(uint64_t *hash, uint16_t *order, uint16_t *start);
COUNTED void counted_split(uint64_t *hash, uint16_t *order, uint16_t *start)
{
    persia_ids_split_chunk(known, IDS_CHUNK, KEY, 16, hash, order, start);
}

COUNTED void counted_expand(const int64_t *offsets, uint32_t *bag,
                            float *scale);
COUNTED void counted_expand(const int64_t *offsets, uint32_t *bag,
                            float *scale)
{
    persia_pool_expand(POOL_MEAN, BAGS, offsets, NULL, bag, scale);
}

/* ---- their order -------------------------------------------------------- */

static table *table_of(uint32_t optimizer, uint32_t dim)
{
    table_config config;
    table *t;

    persia_table_config_init(&config);
    snprintf(config.name, sizeof config.name, "counted");
    config.dim = dim;
    config.optimizer = optimizer;
    config.stripes = 4;
    config.hash_key = KEY;
    check_ok(persia_table_create(&config, &t));
    for (size_t at = 0; at < ROWS; at += N)
        check_ok(push(t, ROWS - at < N ? ROWS - at : N, all + at, NULL));
    check_ok(pull(t, known));
    return t;
}

static void of_table(uint32_t optimizer, uint32_t dim, int (*fn)(table *t))
{
    table *t = table_of(optimizer, dim);

    check_ok(fn(t));
    persia_table_destroy(t);
}

static void tables_all(void)
{
    of_table(OPTIM_SGD, 16, counted_push_known_sgd_16);
    of_table(OPTIM_SGD, 64, counted_push_known_sgd_64);
    of_table(OPTIM_ADAGRAD, 16, counted_push_known_adagrad_16);
    of_table(OPTIM_ADAGRAD, 64, counted_push_known_adagrad_64);
    of_table(OPTIM_ROWWISE_ADAGRAD, 16, counted_push_known_rowwise_adagrad_16);
    of_table(OPTIM_ROWWISE_ADAGRAD, 64, counted_push_known_rowwise_adagrad_64);
    of_table(OPTIM_ADAM, 16, counted_push_known_adam_16);
    of_table(OPTIM_ADAM, 64, counted_push_known_adam_64);
    of_table(OPTIM_ADAGRAD, 16, counted_pull_16);
    of_table(OPTIM_ADAGRAD, 64, counted_pull_64);
    of_table(OPTIM_ADAGRAD, 16, counted_push_search_16);
    of_table(OPTIM_ADAGRAD, 64, counted_push_search_64);
    of_table(OPTIM_ADAGRAD, 16, counted_push_new_16);
    of_table(OPTIM_ADAGRAD, 64, counted_push_new_64);
    of_table(OPTIM_ADAGRAD, 16, counted_push_chosen_16);
}

static void pooling_all(void)
{
    static int64_t offsets[BAGS + 1];
    static uint64_t hash[IDS_CHUNK];
    static uint16_t order[IDS_CHUNK], start[IDS_STRIPES_MAX + 1];
    static uint32_t bag[N];
    static float scale[N];

    for (int64_t i = 0; i <= BAGS; i++)
        offsets[i] = i * N / BAGS;
    counted_split(hash, order, start);
    counted_expand(offsets, bag, scale);
    counted_pool_16(offsets);
    counted_pool_64(offsets);
}

/* What counts depend on; the name of the tool follows. */
static void machine_print(void)
{
    const char *set = "baseline";

#ifdef __x86_64__
    set = __builtin_cpu_supports("avx512f") ? "avx512"
          : __builtin_cpu_supports("avx2")  ? "avx2"
                                            : "x86-64";
#endif
    printf("gcc %s, glibc %s, %s\n", __VERSION__,
           gnu_get_libc_version(), set);
}

int main(void)
{
    machine_print();
    for (uint64_t i = 0; i < ROWS; i++)
        all[i] = i;
    some_ids(known, N, ROWS);
    for (uint64_t i = 0; i < N; i++)
        fresh[i] = ROWS + i, chosen[i] = chosen_id(CHOSEN_TOP, (uint32_t)i);
    for (size_t i = 0; i < sizeof grad / sizeof *grad; i++)
        grad[i] = (float)(i % 17) * 0.01f - 0.08f;
    check_ok(persia_sched_create(1, &one));
    pooling_all();
    tables_all();
    persia_sched_destroy(one);
    steps_all();
    return 0;
}
