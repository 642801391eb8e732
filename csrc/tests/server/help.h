/* help.h: what the tests of the service share: a shard behind calls
 * that need no network, and requests as functions. */
#ifndef PERSIA_TESTS_SERVER_HELP_H
#define PERSIA_TESTS_SERVER_HELP_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "client/client.h"
#include "server/server.h"

/* Sizes shrink where a sanitizer makes everything ten times slower. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t rng_next(rng *r)
{
    const uint32_t counter[4] = {(uint32_t)r->state,
                                 (uint32_t)(r->state >> 32), 3, 3};
    const uint32_t key[2] = {4, 5};
    uint32_t out[4];
    r->state++;
    philox4x32(counter, key, out);
    return ((uint64_t)out[1] << 32) | out[0];
}

static inline uint64_t rng_below(rng *r, uint64_t n)
{
    return rng_next(r) % n;
}

static inline float rng_float(rng *r) /* [-1, 1) */
{
    return (float)(int32_t)(uint32_t)rng_next(r) * 0x1p-31f;
}

/* ---- a server ----------------------------------------------------------- */

typedef struct server {
    tables *p;
    ps_service *s;
    ckpt_root *root;
    updates_log *log; /* or NULL */
    uint64_t boot, lineage; /* as Hello said */
} server;

enum { STREAM = 100 }; /* the first one that server_start() opens */
/* Shard `shard` of `shards`, namespace "test", 2 threads.  Opens the streams
 * STREAM .. STREAM + 7. */
server server_start(uint32_t shard, uint32_t shards, const char *folder);
/* The same with a memory limit, in bytes. */
server server_limited(uint32_t shard, uint32_t shards, const char *folder,
                      uint64_t limit);
/* The same with a file descriptor of its lines. */
server server_with_lines(uint32_t shard, uint32_t shards, const char *folder,
                         uint64_t limit, int lines);
/* Shard 0 with a log on this disk, which is replayed first, from a position
 * on.  boot: of the machine; NULL: this one's. */
server server_durable(log_disk *disk, enum log_level level, const char *boot,
                      uint32_t shards, uint64_t from);
void server_stop(server *v);
wire_caller caller_of(const server *v);

/* ---- calls -------------------------------------------------------------- */

/* A call that waits for its answer. */
typedef struct pending pending;
enum { SECOND = 1000000000 };
/* o is taken over. */
pending *call_start(const server *v, uint32_t method, wire_out *o,
                    uint64_t timeout_ns);
pending *call_start_as(const server *v, uint32_t method, wire_out *o,
                       uint64_t timeout_ns, const rpc_who *who);
int call_done(pending *c);
/* An answer that was waited for; freed by result_free(). */
typedef struct result {
    int code;
    char text[1024];
    void *data;
    size_t n;
    wire_memory memory; /* of what is decoded from it */
} result;
result call_wait(pending *c);
void result_free(result *r);
/* Start and wait; admin. */
result call(const server *v, uint32_t method, wire_out *o);

/* Encoding into a fresh wire_out. */
#define ENCODED(name, m)                                                      \
    __extension__({                                                           \
        wire_out encoded_;                                                    \
        persia_wire_out_init(&encoded_);                                      \
        if (persia_wire_put_##name(&encoded_, m))                             \
            fail_msg("%s", persia_err_text());                                \
        encoded_;                                                             \
    })
/* Decodes a result into `out`; fails the test if it is an error. */
#define DECODE(r, name, out)                                                  \
    do {                                                                      \
        if ((r)->code)                                                        \
            fail_msg("%s: %s", persia_err_name((r)->code), (r)->text);        \
        if (persia_wire_get_##name((r)->data, (r)->n, &(r)->memory, out))     \
            fail_msg("%s", persia_err_text());                                \
    } while (0)
#define CALL(v, METHOD, name, m)                                              \
    __extension__({                                                           \
        wire_out o_ = ENCODED(name, m);                                       \
        call(v, WIRE_##METHOD, &o_);                                          \
    })

/* ---- requests ----------------------------------------------------------- */

table_spec spec_of(const char *name, uint32_t dim, uint32_t optimizer);
uint32_t declare(const server *v, const table_spec *spec);
/* Vectors of n ids, fp32. */
void pull(const server *v, uint32_t no, size_t n, const uint64_t *ids,
          float *out);
/* SGD with rate `lr`. */
optim_hyper sgd(float lr);
/* One table of a push. */
wire_push_table push_table(uint32_t no, uint32_t dim, size_t n,
                           const uint64_t *ids, const float *grads,
                           const optim_hyper *hyper);
wire_push push_of(const server *v, uint64_t stream, uint64_t number,
                  wire_push_table *tables, size_t n);
/* Sends it and waits. */
wire_push_reply push(const server *v, const wire_push *m);
int push_code(const server *v, const wire_push *m); /* expecting an error */
pending *push_start(const server *v, const wire_push *m, uint64_t timeout_ns);
wire_push_reply push_wait(pending *c);
wire_ledger ledger_of(const server *v, uint64_t stream);
wire_stats_reply stats_of(const server *v);
uint64_t join(const server *v, uint32_t rank, uint32_t world, int joins,
              uint64_t step);

/* All rows of a table, sorted by id; the caller frees what is in it. */
typedef struct rows_all {
    size_t n, dim, state_floats, vector_bytes;
    uint64_t *ids;
    char *vectors;
    float *state;
    uint32_t *clocks;
} rows_all;
rows_all rows_of(table *const *shards, size_t shards_n);
void rows_free(rows_all *r);
/* Fails the test unless they are the same, bit by bit. */
void rows_equal(const rows_all *a, const rows_all *b);

#endif
