/* remote.c: what benchmarks/rpc.py calls: the object through which a trainer
 * reaches its tables (ps/client.h), with connections to real servers, or with
 * tables of this process.
 *
 * It includes the library's headers, so the structs are the library's own.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"

#define BENCH __attribute__((visibility("default")))

enum { BENCH_TABLES_MAX = 64 };

typedef struct bench_remote {
    ps_client *client;
    uint32_t tables, dim;
    uint32_t numbers[BENCH_TABLES_MAX];
    optim_args optim;
} bench_remote;

BENCH void bench_remote_close(bench_remote *r)
{
    if (!r)
        return;
    persia_client_destroy(r->client);
    free(r);
}

/* Tables of this process. */
static int open_local(bench_remote *r, unsigned threads)
{
    const tables_config config = {.threads = threads};
    return persia_client_create_embedded(&config, &r->client);
}

/* Connects to one server (NULL: to none) and declares tables `<name>0`, ...
 * with Adagrad. */
BENCH int bench_remote_open(const char *address, const char *name,
                            uint32_t tables, uint32_t dim, uint32_t dtype,
                            unsigned threads, uint64_t stream,
                            bench_remote **out)
{
    if (tables > BENCH_TABLES_MAX)
        return persia_err_set(PERSIA_EARG, "at most %d tables", BENCH_TABLES_MAX);
    bench_remote *r = calloc(1, sizeof(*r));
    if (!r)
        return PERSIA_ENOMEM;
    r->tables = tables;
    r->dim = dim;
    r->optim = (optim_args){.kind = OPTIM_ADAGRAD,
                            .lr = 0.01f,
                            .eps = 1e-8f,
                            .beta1 = 0.9f,
                            .beta2 = 0.999f,
                            .grad_scale = 1};
    client_config config = {.threads = threads,
                            .addresses = &address,
                            .addresses_n = 1,
                            .world = 1,
                            .stream = stream,
                            .timeout_ns = 60000000000u,
                            .message_limit = UINT64_C(1) << 30,
                            .dtype = dtype,
                            .lost = LOST_RAISE};
    snprintf(config.name_space, sizeof(config.name_space), "default");
    int rc = address ? persia_client_create(&config, &r->client)
                     : open_local(r, threads);
    for (uint32_t i = 0; i < tables && rc == PERSIA_OK; i++) {
        table_config t;
        int created;
        persia_table_config_init(&t);
        snprintf(t.name, sizeof(t.name), "%s%u", name, i);
        t.seed = 1;
        t.dim = dim;
        rc = persia_client_declare(r->client, &t, &r->numbers[i], &created);
    }
    if (rc == PERSIA_OK)
        *out = r;
    else
        bench_remote_close(r);
    return rc;
}

/* Ids [tables, n], out [tables, n, dim], rows [tables, n]: of the first
 * `tables` tables. */
BENCH int bench_remote_pull(bench_remote *r, uint32_t tables, size_t n,
                            const uint64_t *ids, float *out, uint32_t *rows)
{
    pull_job jobs[BENCH_TABLES_MAX];
    for (uint32_t i = 0; i < tables; i++)
        jobs[i] = (pull_job){.n = n,
                             .ids = ids + i * n,
                             .out = out + i * n * r->dim,
                             .stride = r->dim,
                             .rows = rows + i * n};
    return persia_client_pull(r->client, 0, r->numbers, jobs, tables);
}

/* Gradients [tables, n, dim] of the rows of a pull. */
BENCH int bench_remote_push(bench_remote *r, uint64_t number, uint32_t tables,
                            size_t n, const uint64_t *ids,
                            const uint32_t *rows, const float *grad)
{
    push_job jobs[BENCH_TABLES_MAX];
    push_part parts[BENCH_TABLES_MAX];
    for (uint32_t i = 0; i < tables; i++) {
        parts[i] = (push_part){.n = n,
                               .ids = ids + i * n,
                               .rows = rows ? rows + i * n : NULL,
                               .grad = grad + i * n * r->dim,
                               .stride = r->dim,
                               .bags = n};
        jobs[i] = (push_job){
            .parts = &parts[i], .parts_n = 1, .optim = &r->optim};
    }
    const int named = !persia_client_is_embedded(r->client);
    client_update update = {.number = named ? number : 0, .parts = 1};
    return persia_client_push(r->client, &update, r->numbers, jobs, tables);
}

BENCH uint64_t bench_remote_rows(bench_remote *r)
{
    uint64_t rows = 0;
    for (uint32_t i = 0; i < r->tables; i++) {
        table_stats stats;
        if (persia_client_stats(r->client, r->numbers[i], &stats) == PERSIA_OK)
            rows += stats.rows;
    }
    return rows;
}

/* Bytes of all requests and replies so far. */
BENCH void bench_remote_bytes(const bench_remote *r, uint64_t *sent,
                              uint64_t *received)
{
    client_counts counts;
    persia_client_get_counts(r->client, &counts);
    *sent = counts.bytes_out;
    *received = counts.bytes_in;
}
