/* client: servers with several shards each, over gRPC on loopback. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "client/client.h"
#include "ids/ids.h"
#include "server/server.h"

enum { SHARDS = 5, HOSTS = 2, FIRST = 2, IDS = 3000, DIM = 16, STEPS = 6 };
#define SECOND ((uint64_t)1000000000)

static const rpc_security security = {.token = "one-token",
                                      .admin_token = "another-token"};

/* The first one has shards 0 .. FIRST - 1. */
typedef struct process {
    uint32_t from, n;
    tables *tables[SHARDS];
    ps_service *services[SHARDS];
    _Atomic(ps_host *) host; /* calls may arrive meanwhile */
    rpc_server *server;
    char address[32];
    _Atomic(uint32_t) calls; /* requests */
} process;

static void count_and_handle(void *ctx, rpc_call *call)
{
    process *p = ctx;
    p->calls++;
    persia_host_handle(p->host, call);
}

static void process_start(process *p, uint32_t from, uint32_t n, int port)
{
    tables_config config = {.threads = 2};
    memset(p, 0, sizeof *p);
    p->from = from;
    p->n = n;
    for (uint32_t i = 0; i < n; i++) {
        service_config service = {.name_space = "hosted", .shard = from + i,
                                  .shards = SHARDS,
                                  .message_limit = 64 << 20};
        assert_int_equal(i ? persia_tables_beside(p->tables[0], &p->tables[i])
                           : persia_tables_create(&config, &p->tables[0]),
                         PERSIA_OK);
        assert_int_equal(persia_service_create(p->tables[i], &service,
                                               &p->services[i]), PERSIA_OK);
    }
    ps_host *host;
    assert_int_equal(persia_host_create(p->services, n, &host), PERSIA_OK);
    p->host = host;
    snprintf(p->address, sizeof p->address, "127.0.0.1:%d", port);
    rpc_server_config server = {.address = p->address,
                                .threads = 2,
                                .message_limit = 64 << 20,
                                .calls_max = 64,
                                .s = persia_tables_sched(p->tables[0]),
                                .methods = &persia_shard_methods,
                                .handler = count_and_handle,
                                .security = security,
                                .ctx = p};
    int rc = persia_rpc_server_start(&server, &p->server);
    if (rc)
        fail_msg("%s", persia_err_text());
    snprintf(p->address, sizeof p->address, "127.0.0.1:%d",
             persia_rpc_server_port(p->server));
}

static void process_stop(process *p)
{
    for (uint32_t i = 0; i < p->n; i++)
        persia_service_close(p->services[i]);
    persia_rpc_server_stop(p->server, SECOND);
    persia_host_destroy(p->host);
    for (uint32_t i = 0; i < p->n; i++) {
        persia_service_destroy(p->services[i]);
        persia_tables_destroy(p->tables[i]);
    }
}

static client_config far_config(const char *const *addresses, size_t n)
{
    return (client_config){.threads = 2, .addresses = addresses,
                           .addresses_n = n, .name_space = "hosted",
                           .world = 1, .stream = 3,
                           .timeout_ns = 30 * SECOND,
                           .message_limit = 64 << 20, .lost = LOST_RAISE,
                           .security = security};
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

static void some_values(void)
{
    for (size_t i = 0; i < IDS; i++)
        ids[i] = id_hash(i / 2 * 2 % (IDS / 2));
    for (size_t i = 0; i < IDS * DIM; i++)
        grads[i] = (float)(id_hash(i) >> 40) / (float)(1 << 23) - 1;
}

/* One pull and one push of the same ids, all of which occur twice. */
static int train(ps_client *c, uint32_t no, uint64_t t, float *out)
{
    pull_job pull = {.n = IDS, .ids = ids, .out = out, .stride = DIM};
    int rc = persia_client_pull(c, 0, &no, &pull, 1);
    if (rc)
        return rc;
    push_part part = {.n = IDS, .ids = ids, .grad = grads, .stride = DIM,
                      .bags = IDS};
    optim_args adam = {.kind = OPTIM_ADAM, .lr = 0.1f, .eps = 1e-8f,
                       .beta1 = 0.9f, .beta2 = 0.999f, .step = t,
                       .grad_scale = 1};
    push_job job = {.parts = &part, .parts_n = 1, .optim = &adam, .draw = t};
    return persia_client_push(c, NULL, &no, &job, 1);
}

/* The same bits as in one process; a request a server for each call. */
static void shards_of_two_servers(void **state)
{
    static float want[IDS * DIM], got[IDS * DIM];
    process p[HOSTS];
    tables_config config = {.threads = 2};
    ps_client *local, *remote;
    (void)state;
    if (!persia_rpc_available())
        skip();
    process_start(&p[0], 0, FIRST, 0);
    process_start(&p[1], FIRST, SHARDS - FIRST, 0);
    const char *addresses[HOSTS] = {p[1].address, p[0].address};
    client_config far = far_config(addresses, HOSTS);
    some_values();
    assert_int_equal(persia_client_create_embedded(&config, &local),
                     PERSIA_OK);
    int rc = persia_client_create(&far, &remote);
    if (rc)
        fail_msg("%s", persia_err_text());
    assert_int_equal(persia_client_shards(remote), SHARDS);
    uint32_t a = declare(local), b = declare(remote);
    for (uint64_t t = 1; t <= STEPS; t++) {
        const uint32_t before = p[0].calls + p[1].calls;
        assert_int_equal(train(local, a, t, want), PERSIA_OK);
        assert_int_equal(train(remote, b, t, got), PERSIA_OK);
        assert_memory_equal(want, got, sizeof want);
        assert_int_equal(p[0].calls + p[1].calls - before, 2 * HOSTS);
    }
    table_stats stats;
    assert_int_equal(persia_client_stats(remote, b, &stats), PERSIA_OK);
    assert_int_equal(stats.rows, IDS / 4);

    /* One is started again, without its rows. */
    int port = persia_rpc_server_port(p[1].server);
    process_stop(&p[1]);
    process_start(&p[1], FIRST, SHARDS - FIRST, port);
    assert_int_equal(train(remote, b, STEPS + 1, got), PERSIA_ELOST);
    assert_int_equal(train(remote, b, STEPS + 2, got), PERSIA_OK);

    assert_int_equal(persia_client_destroy(remote), 0);
    persia_client_destroy(local);
    process_stop(&p[0]);
    process_stop(&p[1]);
}

/* A server's shards must be all that are missing, each once. */
static void shards_that_are_missing(void **state)
{
    process p[HOSTS];
    ps_client *c;
    (void)state;
    if (!persia_rpc_available())
        skip();
    process_start(&p[0], 0, FIRST, 0);
    process_start(&p[1], 1, SHARDS - 1, 0);
    const char *addresses[HOSTS] = {p[0].address, p[1].address};
    client_config one = far_config(addresses, 1);
    client_config twice = far_config(addresses, HOSTS);
    assert_int_equal(persia_client_create(&one, &c), PERSIA_EMISMATCH);
    assert_int_equal(persia_client_create(&twice, &c), PERSIA_EMISMATCH);
    process_stop(&p[0]);
    process_stop(&p[1]);
}

/* What a shard has goes back to the limit when it ends. */
static void a_shard_gives_its_bytes_back(void **state)
{
    enum { ROWS = 20000 };
    static uint64_t many[ROWS];
    static float vectors[ROWS * DIM];
    process p;
    ps_client *c;
    (void)state;
    if (!persia_rpc_available())
        skip();
    process_start(&p, 0, SHARDS, 0);
    const char *address = p.address;
    client_config far = far_config(&address, 1);
    assert_int_equal(persia_client_create(&far, &c), PERSIA_OK);
    uint32_t no = declare(c);
    for (size_t i = 0; i < ROWS; i++)
        many[i] = i;
    assert_int_equal(persia_client_set(c, no, ROWS, many, vectors, NULL),
                     PERSIA_OK);
    const mem_limit *limit = persia_tables_limit(p.tables[0]);
    const uint64_t all = limit->used;
    table_stats last;
    persia_table_get_stats(persia_tables_table(p.tables[SHARDS - 1], 0),
                           &last);
    assert_true(last.rows > 0);
    assert_int_equal(persia_host_remove(p.host, SHARDS - 1, NULL, 1),
                     PERSIA_OK);
    assert_int_equal(persia_host_remove(p.host, SHARDS - 1, NULL, 1),
                     PERSIA_EARG);
    persia_service_close(p.services[SHARDS - 1]);
    persia_service_destroy(p.services[SHARDS - 1]);
    persia_tables_destroy(p.tables[SHARDS - 1]);
    p.n--;
    assert_true(limit->used + last.bytes <= all);
    assert_true(last.bytes * SHARDS > all / 2);
    assert_int_equal(persia_client_destroy(c), 0);
    process_stop(&p);
}

/* Which process a shard is at does not matter to a client, nor to one that
 * begins later: here the same service is put behind another address. */
static void a_shard_behind_another_address(void **state)
{
    static float want[IDS * DIM], got[IDS * DIM];
    process p[HOSTS];
    tables_config config = {.threads = 2};
    ps_client *local, *remote, *later;
    uint64_t t = 0;
    (void)state;
    if (!persia_rpc_available())
        skip();
    process_start(&p[0], 0, FIRST, 0);
    process_start(&p[1], FIRST, SHARDS - FIRST, 0);
    const char *addresses[HOSTS] = {p[1].address, p[0].address};
    client_config far = far_config(addresses, HOSTS);
    some_values();
    assert_int_equal(persia_client_create_embedded(&config, &local),
                     PERSIA_OK);
    assert_int_equal(persia_client_create(&far, &remote), PERSIA_OK);
    uint32_t a = declare(local), b = declare(remote);
    /* All of the first one's, forth and back; of two servers one is empty
     * then. */
    for (int round = 0; round < 4; round++) {
        const int from = round & 1;
        for (uint32_t k = 0; k < FIRST; k++) {
            ps_service *s = p[0].services[k];
            shard *of = persia_service_shard(s);
            assert_int_equal(persia_shard_hold(of, SHARD_HELD), PERSIA_OK);
            assert_int_equal(persia_host_remove(p[from].host, k,
                                                p[!from].address, t + 1),
                             PERSIA_OK);
            persia_service_close(s);
            assert_int_equal(persia_shard_hold(of, SHARD_FREE), PERSIA_OK);
            persia_service_open(s);
            assert_int_equal(persia_host_add(p[!from].host, s), PERSIA_OK);
            t++;
            assert_int_equal(train(local, a, t, want), PERSIA_OK);
            int rc = train(remote, b, t, got);
            if (rc)
                fail_msg("%s", persia_err_text());
            assert_memory_equal(want, got, sizeof want);
        }
        for (size_t n = 1; n <= HOSTS; n++) { /* one knows of both */
            client_config one = far_config(addresses, n);
            one.stream = 4 + n;
            int rc = persia_client_create(&one, &later);
            if (rc)
                fail_msg("%s", persia_err_text());
            assert_int_equal(persia_client_shards(later), SHARDS);
            assert_int_equal(persia_client_destroy(later), 0);
        }
    }
    assert_int_equal(persia_client_destroy(remote), 0);
    persia_client_destroy(local);
    process_stop(&p[0]);
    process_stop(&p[1]);
}

/* By a server whose only shard is at one that has not shard 0. */
static void a_client_that_opens_by_an_empty_server(void **state)
{
    enum { ONES = 3 };
    process p[ONES];
    ps_client *c;
    (void)state;
    if (!persia_rpc_available())
        skip();
    process_start(&p[0], 0, 2, 0);
    process_start(&p[1], 2, 1, 0);
    process_start(&p[2], 3, 2, 0);
    const char *addresses[] = {p[1].address, p[0].address};
    client_config far = far_config(addresses, 2);
    far.timeout_ns = 2 * SECOND;
    assert_int_equal(persia_host_remove(p[1].host, 2, p[2].address, 1),
                     PERSIA_OK);
    assert_int_equal(persia_host_add(p[2].host, p[1].services[0]), PERSIA_OK);
    int rc = persia_client_create(&far, &c);
    if (rc)
        fail_msg("%s", persia_err_text());
    assert_int_equal(persia_client_shards(c), SHARDS);
    assert_int_equal(persia_client_destroy(c), 0);
    for (int i = 0; i < ONES; i++)
        process_stop(&p[i]);
}

/* It had one shard, and is started again with another one. */
static void a_server_that_begins_with_another_shard(void **state)
{
    static float got[IDS * DIM];
    process p[HOSTS];
    ps_host *again, *before;
    ps_client *c;
    (void)state;
    if (!persia_rpc_available())
        skip();
    process_start(&p[0], 0, SHARDS - 1, 0);
    process_start(&p[1], SHARDS - 1, 1, 0);
    ps_service *other = p[0].services[SHARDS - 2];
    const char *addresses[HOSTS] = {p[0].address, p[1].address};
    client_config far = far_config(addresses, HOSTS);
    some_values();
    assert_int_equal(persia_client_create(&far, &c), PERSIA_OK);
    uint32_t no = declare(c);
    assert_int_equal(train(c, no, 1, got), PERSIA_OK);
    assert_int_equal(persia_host_remove(p[0].host, SHARDS - 2, p[1].address,
                                        1), PERSIA_OK);
    assert_int_equal(persia_host_add(p[0].host, p[1].services[0]), PERSIA_OK);
    assert_int_equal(persia_host_create(&other, 1, &again), PERSIA_OK);
    assert_int_equal(persia_host_place(again, SHARDS - 1, p[0].address, 1),
                     PERSIA_OK);
    before = p[1].host;
    p[1].host = again;
    int rc = train(c, no, 2, got);
    if (rc)
        fail_msg("%s", persia_err_text());
    assert_int_equal(persia_client_destroy(c), 0);
    process_stop(&p[1]);
    process_stop(&p[0]);
    persia_host_destroy(before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_of_two_servers),
        cmocka_unit_test(a_shard_behind_another_address),
        cmocka_unit_test(a_client_that_opens_by_an_empty_server),
        cmocka_unit_test(a_server_that_begins_with_another_shard),
        cmocka_unit_test(shards_that_are_missing),
        cmocka_unit_test(a_shard_gives_its_bytes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
