/* bench.c: what benchmarks/table.py calls.
 *
 * Two halves.  The first drives a table through the public C API of
 * libpersia; it includes the library's header, so the structs are always
 * the library's own.  The second is the baseline: the same work on rows
 * whose addresses are known, written as well as we can (prefetched,
 * specialised by dim, compiled for this very processor).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "table/table.h"

#define BENCH __attribute__((visibility("default")))

enum { AHEAD = 64 }; /* rows; the best of 24, 48, 64, 96, 128 */

/* --- the table ---------------------------------------------------------- */

/* A table with a capacity (0: none) evicts by `full`. */
BENCH int bench_create(uint32_t dim, uint32_t dtype, uint32_t optimizer,
                       uint64_t capacity, uint32_t full, table **out)
{
    table_config config;
    persia_table_config_init(&config);
    strcpy(config.name, "benchmark");
    config.seed = 1;
    config.dim = dim;
    config.dtype = dtype;
    config.optimizer = optimizer;
    config.capacity = capacity;
    config.full = full;
    return persia_table_create(&config, out);
}

BENCH int bench_pull(sched *s, table *t, size_t n, const uint64_t *ids,
                     float *out, uint32_t *rows)
{
    pull_job job = {.t = t,
                    .n = n,
                    .ids = ids,
                    .out = out,
                    .stride = persia_table_get_config(t)->dim,
                    .rows = rows};
    return persia_table_pull(s, &job, 1);
}

BENCH int bench_push(sched *s, table *t, size_t n, const uint64_t *ids,
                     const uint32_t *rows, const float *grad)
{
    uint32_t dim = persia_table_get_config(t)->dim;
    push_part part = {.n = n,
                      .ids = ids,
                      .rows = rows,
                      .grad = grad,
                      .stride = dim,
                      .bags = n};
    optim_args optim = {.kind = persia_table_get_config(t)->optimizer,
                        .lr = 0.01f,
                        .eps = 1e-8f,
                        .beta1 = 0.9f,
                        .beta2 = 0.999f,
                        .step = 1,
                        .grad_scale = 1};
    push_job job = {.t = t, .parts = &part, .parts_n = 1, .optim = &optim};
    return persia_table_push(s, &job, 1);
}

BENCH void bench_stats(const table *t, uint64_t *rows, uint64_t *bytes,
                       uint64_t *row_bytes, uint64_t *evicted,
                       uint64_t *candidates)
{
    table_stats stats;
    persia_table_get_stats(t, &stats);
    *rows = stats.rows;
    *bytes = stats.bytes;
    *row_bytes = stats.row_bytes;
    *evicted = stats.evicted;
    *candidates = stats.candidates;
}

/* --- the baseline: rows at known numbers -------------------------------- */

/* Zeroed memory in 2 MiB pages where the system has them; NULL if none. */
BENCH char *bench_rows_new(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

BENCH void bench_rows_free(char *rows, size_t bytes)
{
    munmap(rows, bytes);
}

/* Touches every page and gives every row small values. */
BENCH void bench_rows_fill(char *base, size_t stride, size_t offset,
                           size_t from, size_t to, uint32_t floats)
{
    for (size_t i = from; i < to; i++) {
        float *row = (float *)(void *)(base + i * stride + offset);
        for (uint32_t j = 0; j < floats; j++)
            row[j] = 0.01f;
    }
}

static inline void prefetch(const char *p, size_t bytes, int write)
{
    for (size_t b = 0; b < bytes; b += 64)
        if (write)
            __builtin_prefetch(p + b, 1, 3);
        else
            __builtin_prefetch(p + b, 0, 3);
    if (write)
        __builtin_prefetch(p + bytes - 1, 1, 3);
    else
        __builtin_prefetch(p + bytes - 1, 0, 3);
}

static inline __attribute__((always_inline)) void
gather(const char *base, size_t stride, const uint32_t *rows, size_t n,
       uint32_t dim, float *out)
{
    size_t bytes = dim * sizeof(float);
    for (size_t i = 0; i < n; i++) {
        if (i + AHEAD < n)
            prefetch(base + rows[i + AHEAD] * stride, bytes, 0);
        memcpy(out + i * dim, base + rows[i] * stride, bytes);
    }
}

/* out[i] = vector of row rows[i], which begins `offset` bytes in the row. */
BENCH void bench_gather(const char *base, size_t stride, size_t offset,
                        const uint32_t *rows, size_t n, uint32_t dim,
                        float *out)
{
    base += offset;
    switch (dim) {
    case 16: gather(base, stride, rows, n, 16, out); break;
    case 64: gather(base, stride, rows, n, 64, out); break;
    default: gather(base, stride, rows, n, dim, out);
    }
}

static inline __attribute__((always_inline)) void
adagrad(char *base, size_t stride, const uint32_t *rows, size_t n,
        uint32_t dim, const float *grad, float lr, float eps)
{
    for (size_t i = 0; i < n; i++) {
        if (i + AHEAD < n)
            prefetch(base + rows[i + AHEAD] * stride,
                     2 * dim * sizeof(float), 1);
        float *restrict w = (float *)(void *)(base + rows[i] * stride);
        float *restrict sum = w + dim;
        const float *restrict g = grad + i * dim;
        for (uint32_t j = 0; j < dim; j++) {
            sum[j] += g[j] * g[j];
            w[j] -= lr * g[j] / (sqrtf(sum[j]) + eps);
        }
    }
}

/* One Adagrad step of each row rows[i]: vector, then accumulator. */
BENCH void bench_adagrad(char *base, size_t stride, size_t offset,
                         const uint32_t *rows, size_t n, uint32_t dim,
                         const float *grad)
{
    base += offset;
    switch (dim) {
    case 16: adagrad(base, stride, rows, n, 16, grad, 0.01f, 1e-8f); break;
    case 64: adagrad(base, stride, rows, n, 64, grad, 0.01f, 1e-8f); break;
    default: adagrad(base, stride, rows, n, dim, grad, 0.01f, 1e-8f);
    }
}
