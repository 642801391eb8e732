/* client: shards behind gRPC on loopback; one stops and starts again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "ids/ids.h"
#include "client/client.h"
#include "server/server.h"

enum { SHARDS = 2, IDS = 3000, DIM = 16 };
#define SECOND ((uint64_t)1000000000)

typedef struct shard {
    tables *p;
    ps_service *service;
    ps_host *host;
    rpc_server *server;
    char address[32];
} shard;

/* port 0: any. */
static void shard_start(shard *s, uint32_t i, int port)
{
    tables_config config = {.threads = 2};
    service_config service = {.name_space = "sockets", .shard = i,
                              .shards = SHARDS, .message_limit = 64 << 20};
    snprintf(s->address, sizeof s->address, "127.0.0.1:%d", port);
    rpc_server_config server = {.address = s->address,
                                .threads = 2,
                                .message_limit = 64 << 20,
                                .calls_max = 64,
                                .methods = &persia_shard_methods,
                                .handler = persia_host_handle};
    assert_int_equal(persia_tables_create(&config, &s->p), PERSIA_OK);
    assert_int_equal(persia_service_create(s->p, &service, &s->service),
                     PERSIA_OK);
    assert_int_equal(persia_host_create(&s->service, 1, &s->host), PERSIA_OK);
    server.s = persia_tables_sched(s->p);
    server.ctx = s->host;
    int rc = persia_rpc_server_start(&server, &s->server);
    if (rc)
        fail_msg("%s", persia_err_text());
    snprintf(s->address, sizeof s->address, "127.0.0.1:%d",
             persia_rpc_server_port(s->server));
}

static void shard_stop(shard *s)
{
    persia_service_close(s->service);
    persia_rpc_server_stop(s->server, SECOND);
    persia_host_destroy(s->host);
    persia_service_destroy(s->service);
    persia_tables_destroy(s->p);
}

static uint32_t declare(ps_client *c)
{
    table_config t;
    uint32_t no;
    int created;
    persia_table_config_init(&t);
    snprintf(t.name, sizeof t.name, "t");
    t.dim = DIM;
    t.optimizer = OPTIM_ADAM;
    int rc = persia_client_declare(c, &t, &no, &created);
    if (rc)
        fail_msg("%s", persia_err_text());
    return no;
}

static uint64_t ids[IDS];
static float grads[IDS * DIM];

/* One pull and one push of the same ids, all of which occur twice. */
static int train(ps_client *c, uint32_t no, float *out)
{
    pull_job pull = {.n = IDS, .ids = ids, .out = out, .stride = DIM};
    int rc = persia_client_pull(c, 0, &no, &pull, 1);
    if (rc)
        return rc;
    push_part part = {.n = IDS, .ids = ids, .grad = grads, .stride = DIM,
                      .bags = IDS};
    uint64_t t = persia_client_updates(c) + 1;
    optim_args adam = {.kind = OPTIM_ADAM, .lr = 0.1f, .eps = 1e-8f,
                       .beta1 = 0.9f, .beta2 = 0.999f, .step = t,
                       .grad_scale = 1};
    push_job job = {.parts = &part, .parts_n = 1, .optim = &adam,
                    .draw = t};
    return persia_client_push(c, NULL, &no, &job, 1);
}

typedef struct trainer {
    ps_client *c;
    uint32_t no;
    int rc;
} trainer;

static void *train_often(void *arg)
{
    static _Thread_local float out[IDS * DIM];
    trainer *t = arg;
    for (int i = 0; i < 10 && !t->rc; i++)
        t->rc = train(t->c, t->no, out);
    return NULL;
}

static void over_sockets(void **state)
{
    static float want[IDS * DIM], got[IDS * DIM];
    (void)state;
    if (!persia_rpc_available())
        skip();
    shard s[SHARDS];
    tables *p;
    tables_config config = {.threads = 2};
    ps_client *local, *remote;
    for (uint32_t i = 0; i < SHARDS; i++)
        shard_start(&s[i], i, 0);
    const char *addresses[SHARDS] = {s[1].address, s[0].address};
    client_config far = {.threads = 2, .addresses = addresses,
                         .addresses_n = SHARDS, .name_space = "sockets",
                         .world = 1, .stream = 3, .timeout_ns = 30 * SECOND,
                         .message_limit = 64 << 20, .lost = LOST_RAISE};
    assert_int_equal(persia_tables_create(&config, &p), PERSIA_OK);
    assert_int_equal(persia_client_embedded(p, &local), PERSIA_OK);
    int rc = persia_client_create(&far, &remote);
    if (rc)
        fail_msg("%s", persia_err_text());
    for (size_t i = 0; i < IDS; i++)
        ids[i] = id_hash(i / 2 * 2 % (IDS / 2));
    for (size_t i = 0; i < IDS * DIM; i++)
        grads[i] = (float)(id_hash(i) >> 40) / (float)(1 << 23) - 1;
    uint32_t a = declare(local), b = declare(remote);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(train(local, a, want), PERSIA_OK);
        assert_int_equal(train(remote, b, got), PERSIA_OK);
        assert_memory_equal(want, got, sizeof want);
    }

    trainer trainers[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        trainers[i] = (trainer){remote, b, PERSIA_OK};
        assert_int_equal(pthread_create(&threads[i], NULL, train_often,
                                        &trainers[i]), 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(trainers[i].rc, PERSIA_OK);
    }
    for (uint32_t i = 0; i < SHARDS; i++)
        assert_int_equal(persia_tables_updates(s[i].p), 35);

    /* A server that is gone, then back at its address without rows. */
    int port = persia_rpc_server_port(s[1].server);
    shard_stop(&s[1]);
    shard_start(&s[1], 1, port);
    assert_int_equal(train(remote, b, got), PERSIA_ELOST);
    assert_non_null(strstr(persia_err_text(), s[1].address));
    assert_non_null(strstr(persia_err_text(), "35 updates"));
    assert_int_equal(train(remote, b, got), PERSIA_OK);
    persia_client_destroy(remote);

    /* No server is there. */
    shard_stop(&s[1]);
    far.timeout_ns = SECOND / 2;
    assert_int_equal(persia_client_create(&far, &remote), PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(persia_err_text(), s[1].address));
    shard_stop(&s[0]);
    persia_client_destroy(local);
    persia_tables_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(over_sockets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
