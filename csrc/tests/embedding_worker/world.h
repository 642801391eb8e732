/* world.h: an embedding worker over one shard in this process, and requests
 * to it that need no network. */
#ifndef PERSIA_TESTS_EMBEDDING_WORKER_WORLD_H
#define PERSIA_TESTS_EMBEDDING_WORKER_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/embedding_worker.h"
#include "loader/loader.h"
#include "rank/rank.h"
#include "server/server.h"

#define SECOND ((uint64_t)1000000000)
enum { DIM = 4, SAMPLES = 3, KEYS = 2, IDS = 7, WIDTH = 2 * DIM, BYTES = 5 };

typedef struct pending {
    rpc_call call; /* first */
    pthread_mutex_t lock;
    pthread_cond_t answered;
    int done, code;
    void *data;
    size_t n;
    wire_memory memory;
} pending;

#define START(s, method, message, m)                                          \
    __extension__({                                                           \
        wire_out o_;                                                          \
        persia_wire_out_init(&o_);                                            \
        assert_int_equal(persia_wire_put_##message(&o_, m), PERSIA_OK);       \
        start(s, WORKER_##method, &o_);                                       \
    })
#define DECODE(c, message, to)                                                \
    assert_int_equal(persia_wire_get_##message((c)->data, (c)->n,             \
                                               &(c)->memory, to),             \
                     PERSIA_OK)

typedef struct world {
    tables *tables;
    ps_service *shard;
    client_config servers;
    embedding_worker *s;
    uint64_t boot;
    uint64_t number;  /* of the last Take */
    uint64_t settled; /* by the loader */
} world;

/* A batch. */
extern const uint64_t ids[IDS];
extern const uint64_t offsets[KEYS * SAMPLES + 1];
extern const uint8_t bytes[BYTES]; /* of its tensor */
extern wire_tensor tensor;

/* Starts a request; o is taken over. */
pending *start(embedding_worker *s, uint32_t method, wire_out *o);
/* Its code. */
int wait_for(pending *c);
/* Frees it. */
void end_call(pending *c);
/* A worker over a shard of its own. */
void begin_with(world *w, uint64_t queue_limit, uint64_t lease_ns);
/* Set-up and teardown of a test: *state is a world. */
int begin(void **state);
int finish_world(void **state);
table_spec spec(void);
wire_caller caller(const world *w, uint64_t client);
int hello(world *w, uint64_t client);
int hello_as(world *w, const wire_hello *m);
int declare(world *w, const char *second);
wire_submit batch(const world *w, uint64_t number);
/* Its code; *status, *done: how many are done. */
int submit(world *w, const wire_submit *m, uint32_t *status, size_t *done);
void send_as(world *w, const wire_submit *m);
void send_batch(world *w, uint64_t number);
/* The loader's sign of life; how many are done. */
size_t beat_as(world *w, const wire_heartbeat *m);
size_t beat(world *w, uint64_t epoch, int leaves);
pending *ask(world *w, uint64_t client, uint64_t epoch, uint64_t number);
/* The answer to a Take of epoch 1; the message stays with *c. */
wire_take_reply take(world *w, uint64_t client, uint64_t number, pending **c);
uint64_t lease_of(world *w, uint64_t client, uint64_t number, uint64_t *of);
optim_hyper adam(void);
/* [feature][sample][DIM] */
void make_grads(float *out);
/* Returns a lease; features: how many have gradients. */
int give_back(world *w, uint64_t client, uint64_t lease, uint32_t reason,
              size_t features, uint32_t *status);
embedding_worker_stats stats_of(world *w);

#endif
