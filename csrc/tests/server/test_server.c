/* The service without a network: Hello, Declare, Pull, rows, Stats. */
#include "tests/server/help.h"

#include "ids/ids.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The error of a request; its text is persia_err_text(). */
static int code_of(result r)
{
    int code = r.code;
    (void)persia_err_set(code, "%s", r.text);
    result_free(&r);
    return code;
}

static void expect(int code, int wanted, const char *text)
{
    if (code != wanted || !strstr(persia_err_text(), text))
        fail_msg("%s: %s", persia_err_name(code), persia_err_text());
}

static void hello_tells_who_it_is(void **state)
{
    (void)state;
    server v = server_start(1, 3, NULL);
    wire_hello m = {.version = WIRE_VERSION, .name_space = "test",
                    .rank = 1, .world = 2};
    wire_hello_reply reply;
    result r = CALL(&v, HELLO, hello, &m);
    DECODE(&r, hello_reply, &reply);
    assert_int_equal(reply.version, WIRE_VERSION);
    assert_string_equal(reply.name_space, "test");
    assert_int_equal(reply.shard, 1);
    assert_int_equal(reply.shards, 3);
    assert_int_not_equal(reply.boot, 0);
    assert_int_not_equal(reply.lineage, 0);
    assert_int_equal(reply.updates, 0);
    assert_int_equal(reply.message_limit, 64 << 20);
    assert_int_equal(reply.ledger.stream, 0);
    assert_int_equal(reply.tables_n, 0);
    assert_int_equal(reply.slots_rev, 1);
    assert_int_equal(reply.slots_n, 1);
    assert_int_equal(reply.slots[0].first, 1366); /* 4096 / 3, up */
    assert_int_equal(reply.slots[0].count, 1365);
    assert_int_equal(reply.slots[0].version, 1);
    result_free(&r);
    assert_int_equal(reply.version_min, WIRE_VERSION_MIN);
    m.version = WIRE_VERSION + 7; /* and it speaks ours, too */
    m.version_min = WIRE_VERSION;
    m.features = UINT64_MAX;
    assert_int_equal(code_of(CALL(&v, HELLO, hello, &m)), PERSIA_OK);
    m.version = WIRE_VERSION;
    m.version_min = 0;
    assert_int_equal(code_of(CALL(&v, HELLO, hello, &m)), PERSIA_OK);
    m.version = WIRE_VERSION_MIN - 1;
    expect(code_of(CALL(&v, HELLO, hello, &m)), PERSIA_EMISMATCH, "1 to 1");
    m.version = WIRE_VERSION + 1;
    expect(code_of(CALL(&v, HELLO, hello, &m)), PERSIA_EMISMATCH,
           "3 to 3");
    m.version = WIRE_VERSION;
    memcpy(m.name_space, "other", 6);
    expect(code_of(CALL(&v, HELLO, hello, &m)), PERSIA_EMISMATCH,
           "namespace 'other', the server holds namespace 'test'");
    server second = server_start(0, 1, NULL);
    assert_int_not_equal(second.boot, v.boot);
    assert_int_not_equal(second.lineage, v.lineage);
    server_stop(&second);
    server_stop(&v);
}

static void tables_are_declared_once(void **state)
{
    (void)state;
    server v = server_start(1, 3, NULL);
    table_spec a = spec_of("a", 8, OPTIM_ADAM), b = a;
    a.capacity = 10;
    memcpy(b.name, "b", 2);
    assert_int_equal(declare(&v, &a), 0);
    assert_int_equal(declare(&v, &b), 1);
    assert_int_equal(declare(&v, &a), 0);
    /* ten rows of all three shards */
    assert_int_equal(
        persia_table_get_config(persia_tables_table(v.p, 0))->capacity, 4);
    assert_int_equal(
        persia_table_get_config(persia_tables_table(v.p, 1))->capacity, 0);
    wire_declare m = {.caller = caller_of(&v), .table = a};
    m.table.capacity = 11; /* also four a shard */
    expect(code_of(CALL(&v, DECLARE, declare, &m)), PERSIA_EMISMATCH,
           "table a: capacity");
    m.table.capacity = 10;
    m.table.dim = 4;
    expect(code_of(CALL(&v, DECLARE, declare, &m)), PERSIA_EMISMATCH,
           "table a: embedding_dim");
    m.table = a;
    m.table.admission = 2;
    memcpy(m.table.name, "c", 2);
    expect(code_of(CALL(&v, DECLARE, declare, &m)), PERSIA_EARG,
           "admission");
    wire_hello h = {.version = WIRE_VERSION, .name_space = "test"};
    wire_hello_reply reply;
    result r = CALL(&v, HELLO, hello, &h);
    DECODE(&r, hello_reply, &reply);
    assert_int_equal(reply.tables_n, 2);
    assert_memory_equal(&reply.tables[0], &a, sizeof a);
    assert_memory_equal(&reply.tables[1], &b, sizeof b);
    result_free(&r);
    server_stop(&v);
}

/* A Declare that waits for pushes to be alone with the memory limit keeps
 * neither Hello nor Stats waiting. */
static void *declares(void *arg)
{
    const table_spec b = spec_of("b", 8, OPTIM_ADAM);
    assert_int_equal(declare(arg, &b), 1);
    return NULL;
}

static void a_declare_that_waits_is_alone(void **state)
{
    (void)state;
    server v = server_start(0, 1, NULL);
    const table_spec a = spec_of("a", 8, OPTIM_ADAM);
    mem_limit *limit = (mem_limit *)(uintptr_t)persia_tables_limit(v.p);
    const uint64_t until = persia_clock_ns() + 60 * (uint64_t)SECOND;
    wire_hello m = {.version = WIRE_VERSION, .name_space = "test"};
    wire_hello_reply reply;
    pthread_t thread;
    assert_int_equal(declare(&v, &a), 0);
    limit->maximum = 1 << 30;
    pthread_rwlock_rdlock(&limit->lock); /* as a push holds it */
    pthread_create(&thread, NULL, declares, &v);
    while (!pthread_rwlock_tryrdlock(&limit->lock)) {
        pthread_rwlock_unlock(&limit->lock);
        assert_true(persia_clock_ns() < until);
    }
    result r = CALL(&v, HELLO, hello, &m);
    DECODE(&r, hello_reply, &reply);
    assert_int_equal(reply.tables_n, 1);
    result_free(&r);
    assert_int_equal(stats_of(&v).tables_n, 1);
    pthread_rwlock_unlock(&limit->lock);
    pthread_join(thread, NULL);
    assert_int_equal(persia_tables_tables(v.p), 2);
    server_stop(&v);
}

/* Ids of one shard. */
static size_t ids_of(uint32_t shard, uint32_t shards, size_t n, uint64_t *ids)
{
    size_t at = 0;
    for (uint64_t id = 0; at < n; id++)
        if ((uint32_t)(id_hash(id) >> 4 & 4095) * shards / 4096 == shard)
            ids[at++] = id;
    return n;
}

static void pulls_give_what_the_table_gives(void **state)
{
    enum { N = 5000, SOME = 700 };
    static uint64_t ids[N];
    static float grads[N * 8], want[N * 8], wide[N * 8];
    static uint32_t rows[N];
    static const uint32_t dims[] = {1, 3, 8};
    (void)state;
    server v = server_start(0, 2, NULL);
    ids_of(0, 2, N, ids);
    rng g = {1};
    for (uint32_t i = 0; i < 3; i++) {
        char name[2] = {(char)('a' + i), 0};
        table_spec spec = spec_of(name, dims[i], OPTIM_SGD);
        spec.dtype = i == 2 ? VECTOR_BF16 : VECTOR_FP32;
        assert_int_equal(declare(&v, &spec), i);
        for (size_t k = 0; k < N * dims[i]; k++)
            grads[k] = rng_float(&g);
        optim_hyper hyper = sgd(0.1f);
        wire_push_table t = push_table(i, dims[i], N / 2, ids, grads, &hyper);
        wire_push m = push_of(&v, STREAM, i + 1, &t, 1);
        assert_int_equal(push(&v, &m).status, PUSH_APPLIED);
    }
    wire_pull_table all[] = {
        {2, SOME, ids + N / 2 - 300}, {0, N, ids}, {1, 0, NULL},
        {1, 1, ids}, {2, N, ids}};
    for (uint32_t dtype = 0; dtype < WIRE_DTYPES; dtype++) {
        wire_pull m = {.caller = caller_of(&v), .dtype = dtype,
                       .want_rows = dtype != WIRE_BF16, .tables = all,
                       .tables_n = 5};
        wire_pull_reply reply;
        result r = CALL(&v, PULL, pull, &m);
        DECODE(&r, pull_reply, &reply);
        assert_int_equal(reply.dtype, dtype);
        assert_int_equal(reply.tables_n, 5);
        for (int i = 0; i < 5; i++) {
            const wire_values *got = &reply.tables[i];
            const uint32_t dim = dims[all[i].no];
            assert_int_equal(got->no, all[i].no);
            assert_int_equal(got->n, all[i].n);
            if (!got->n)
                continue;
            assert_int_equal(got->dim, dim);
            pull_job job = {.t = persia_tables_table(v.p, got->no),
                            .n = got->n,
                            .ids = all[i].ids,
                            .out = want,
                            .stride = dim,
                            .rows = rows};
            assert_int_equal(persia_tables_pull(v.p, &job, 1), PERSIA_OK);
            if (m.want_rows)
                assert_memory_equal(got->rows, rows, got->n * 4);
            else
                assert_null(got->rows);
            persia_wire_widen(dtype, got->n, dim, got->values, got->scales,
                              wide, dim);
            for (size_t k = 0; k < got->n * dim; k++) {
                float off = wide[k] > want[k] ? wide[k] - want[k]
                                              : want[k] - wide[k];
                int exact = dtype == WIRE_FP32 ||
                            (dtype == WIRE_BF16 && all[i].no == 2);
                assert_true(exact ? off == 0 : off < 4e-3f);
            }
        }
        result_free(&r);
    }
    assert_int_equal(stats_of(&v).pulls, 3);
    server_stop(&v);
}

static void what_pulls_refuse(void **state)
{
    (void)state;
    server v = server_start(1, 2, NULL);
    table_spec spec = spec_of("a", 4096, OPTIM_SGD);
    uint64_t ids[5000];
    declare(&v, &spec);
    ids_of(1, 2, 5000, ids);
    wire_pull_table t = {.no = 0, .n = 5000, .ids = ids};
    wire_pull m = {.caller = caller_of(&v), .tables = &t, .tables_n = 1};
    expect(code_of(CALL(&v, PULL, pull, &m)), PERSIA_ELIMIT,
           "of 81920000 bytes");
    t.n = 3000;
    (void)ids_of(0, 2, 1, ids + 2999);
    expect(code_of(CALL(&v, PULL, pull, &m)), PERSIA_EARG,
           "belongs to shard 0 of 2, this is shard 1");
    t.n = 2999;
    assert_int_equal(code_of(CALL(&v, PULL, pull, &m)), PERSIA_OK);
    t.no = 1;
    expect(code_of(CALL(&v, PULL, pull, &m)), PERSIA_EARG,
           "no table number 1, only 1 were declared");
    t.no = 0;
    m.caller.boot++;
    expect(code_of(CALL(&v, PULL, pull, &m)), PERSIA_ESTALE,
           "started again");
    m.caller.boot--;
    m.caller.lineage++;
    expect(code_of(CALL(&v, PULL, pull, &m)), PERSIA_ESTALE,
           "other rows were restored");
    m.caller.boot = m.caller.lineage = 0; /* any */
    assert_int_equal(code_of(CALL(&v, PULL, pull, &m)), PERSIA_OK);
    assert_int_equal(stats_of(&v).failed, 5);
    server_stop(&v);
}

static uint64_t restore_after(const server *v, wire_caller who, uint64_t takes)
{
    wire_hello m = {.caller = who,
                    .version = WIRE_VERSION,
                    .version_min = WIRE_VERSION_MIN,
                    .name_space = "test",
                    .world = 1,
                    .takes = 1,
                    .restore = takes};
    wire_hello_reply reply;
    result r = CALL(v, HELLO, hello, &m);
    DECODE(&r, hello_reply, &reply);
    const uint64_t restore = reply.restore;
    result_free(&r);
    return restore;
}

/* No client that knows an earlier one, or other rows, takes it back. */
static void restores_are_taken_on_in_order(void **state)
{
    static const uint64_t steps[][2] = {{0, 0}, {5, 5}, {3, 5}, {0, 5},
                                        {5, 5}, {9, 9}, {8, 9}};
    (void)state;
    server v = server_start(0, 1, NULL);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        assert_int_equal(restore_after(&v, caller_of(&v), steps[i][0]),
                         steps[i][1]);
    wire_caller other = caller_of(&v);
    other.lineage++;
    assert_int_equal(restore_after(&v, other, 11), 9);
    other = caller_of(&v);
    other.boot++;
    assert_int_equal(restore_after(&v, other, 11), 9);
    server_stop(&v);
}

/* Exactly the ids of a shard are taken, however many shards there are. */
static void each_shard_takes_its_own_ids(void **state)
{
    static const uint32_t counts[] = {1, 2, 3, 7, 100, IDS_SHARDS_MAX};
    (void)state;
    rng g = {8};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (uint32_t k = 0; k < 3; k++) {
            const uint32_t n = counts[c], shard = k * (n - 1) / 2;
            server v = server_start(shard, n, NULL);
            table_spec spec = spec_of("a", 1, OPTIM_SGD);
            uint64_t id = 0;
            wire_pull_table t = {.no = 0, .n = 1, .ids = &id};
            wire_pull m = {.tables = &t, .tables_n = 1};
            declare(&v, &spec);
            for (int i = 0; i < 200; i++) {
                id = rng_next(&g);
                if (i % 2) /* near the edges of the range */
                    while (hash_shard(id_hash(id), n) + 1 - shard > 2)
                        id++;
                int mine = hash_shard(id_hash(id), n) == shard;
                int code = code_of(CALL(&v, PULL, pull, &m));
                assert_int_equal(code, mine ? PERSIA_OK : PERSIA_EARG);
            }
            server_stop(&v);
        }
}

/* A client that means other slots is refused, and nothing changes. */
static void requests_name_the_slots_that_they_mean(void **state)
{
    (void)state;
    server v = server_start(0, 1, NULL);
    const table_spec spec = spec_of("a", 1, OPTIM_SGD);
    uint64_t id = 7;
    float one = 1;
    optim_hyper hyper = {.kind = OPTIM_SGD, .lr = 1, .grad_scale = 1};
    wire_push_table t = push_table(declare(&v, &spec), 1, 1, &id, &one,
                                   &hyper);
    for (uint64_t rev = 2; rev <= 2; rev--) { /* another, this one, any */
        const int code = rev == 2 ? PERSIA_ESTALE : PERSIA_OK;
        wire_caller caller = caller_of(&v);
        caller.slots_rev = rev;
        wire_pull_table ids = {.no = t.grads.no, .n = 1, .ids = &id};
        wire_pull p = {.caller = caller, .tables = &ids, .tables_n = 1};
        wire_rows rows = {.caller = caller, .no = t.grads.no, .n = 1,
                          .ids = &id};
        wire_push m = push_of(&v, STREAM, 3 - rev, &t, 1);
        m.caller = caller;
        assert_int_equal(code_of(CALL(&v, PULL, pull, &p)), code);
        assert_int_equal(code_of(CALL(&v, GET_ROWS, rows, &rows)), code);
        assert_int_equal(code_of(CALL(&v, PUSH, push, &m)), code);
    }
    assert_int_equal(persia_tables_updates(v.p), 2);
    server_stop(&v);
}

static void whole_rows_out_and_in(void **state)
{
    enum { N = 300, DIM = 3 };
    static uint64_t ids[N];
    static float vectors[N * DIM], states[N * 2 * DIM];
    (void)state;
    server v = server_start(1, 2, NULL);
    table_spec spec = spec_of("a", DIM, OPTIM_ADAM);
    rng g = {5};
    declare(&v, &spec);
    ids_of(1, 2, N, ids);
    for (int i = 0; i < N * DIM; i++)
        vectors[i] = rng_float(&g);
    for (int i = 0; i < N * 2 * DIM; i++)
        states[i] = fabsf(rng_float(&g));
    wire_rows put = {.caller = caller_of(&v), .n = N - 1, .ids = ids,
                     .dim = DIM, .state_floats = 2 * DIM,
                     .vectors = vectors, .state = states};
    wire_rows get = {.caller = caller_of(&v), .n = N, .ids = ids}, reply;
    assert_int_equal(code_of(CALL(&v, PUT_ROWS, rows, &put)), PERSIA_OK);
    result r = CALL(&v, GET_ROWS, rows, &get);
    DECODE(&r, rows, &reply);
    assert_int_equal(reply.n, N);
    assert_int_equal(reply.dim, DIM);
    assert_int_equal(reply.state_floats, 2 * DIM);
    assert_memory_equal(reply.ids, ids, sizeof ids);
    assert_memory_equal(reply.vectors, vectors, (N - 1) * DIM * 4);
    assert_memory_equal(reply.state, states, (N - 1) * 2 * DIM * 4);
    for (int i = 0; i < N; i++)
        assert_int_equal(reply.found[i], i < N - 1);
    result_free(&r);
    /* what is refused */
    put.dim = 2;
    put.state = NULL;
    expect(code_of(CALL(&v, PUT_ROWS, rows, &put)), PERSIA_ESHAPE,
           "rows of dim 2 arrive, the table has dim 3");
    put.dim = DIM;
    put.state = states;
    put.state_floats = 5;
    expect(code_of(CALL(&v, PUT_ROWS, rows, &put)), PERSIA_ESHAPE,
           "5 floats of state");
    put.state_floats = 2 * DIM;
    (void)ids_of(0, 2, 1, ids);
    expect(code_of(CALL(&v, PUT_ROWS, rows, &put)), PERSIA_EARG,
           "belongs to shard 0");
    expect(code_of(CALL(&v, GET_ROWS, rows, &get)), PERSIA_EARG,
           "belongs to shard 0");
    /* clear has no rows: those that are refused would be found too late */
    table_stats stats;
    uint64_t had;
    persia_table_get_stats(persia_tables_table(v.p, 0), &stats);
    had = stats.rows;
    assert_int_not_equal(had, 0);
    put.clear = 1;
    put.n = 2;
    put.ids = ids + 1;
    put.state = NULL;
    expect(code_of(CALL(&v, PUT_ROWS, rows, &put)), PERSIA_EARG,
           "put them afterwards");
    persia_table_get_stats(persia_tables_table(v.p, 0), &stats);
    assert_int_equal(stats.rows, had);
    put.n = 0;
    assert_int_equal(code_of(CALL(&v, PUT_ROWS, rows, &put)), PERSIA_OK);
    persia_table_get_stats(persia_tables_table(v.p, 0), &stats);
    assert_int_equal(stats.rows, 0);
    get.n = 0;
    assert_int_equal(code_of(CALL(&v, GET_ROWS, rows, &get)), PERSIA_OK);
    server_stop(&v);
}

typedef struct plain_call {
    rpc_call call;
    int code;
    int replied;
} plain_call;

static void plain_reply(rpc_call *call, wire_out *o, void (*done)(void *),
                        void *owner)
{
    ((plain_call *)call)->replied = 1;
    persia_wire_out_free(o);
    if (done)
        done(owner);
}

static void plain_fail(rpc_call *call, int code, const char *text)
{
    ((plain_call *)call)->code = persia_err_set(code, "%s", text);
}

static int plain_at(ps_service *s, rpc_call call)
{
    plain_call c = {.call = call};
    c.call.deadline = UINT64_MAX;
    c.call.reply = plain_reply;
    c.call.fail = plain_fail;
    persia_service_handle(s, &c.call);
    assert_int_equal(c.replied, c.code == PERSIA_OK);
    return c.code;
}

static int plain(const server *v, uint32_t method, const void *data, size_t n)
{
    static const rpc_who user = {.roles = RPC_USER};
    return plain_at(v->s, (rpc_call){.method = method, .request = data,
                                     .request_n = n, .who = &user});
}

static void administration_and_malformed_requests(void **state)
{
    static const uint32_t admin[] = {WIRE_PUT_ROWS, WIRE_SNAPSHOT,
                                     WIRE_RESTORE};
    (void)state;
    server v = server_start(0, 1, NULL);
    for (int i = 0; i < 3; i++)
        expect(plain(&v, admin[i], NULL, 0), PERSIA_EDENIED,
               "is administration");
    expect(plain(&v, WIRE_METHODS_N, NULL, 0), PERSIA_EPROTOCOL,
           "no method");
    for (uint32_t i = 0; i < WIRE_METHODS_N; i++)
        assert_int_not_equal(plain(&v, i, "\377\377\377", 3), PERSIA_OK);
    assert_int_equal(plain(&v, WIRE_STATS, NULL, 0), PERSIA_OK);
    assert_int_equal(plain(&v, WIRE_PULL, NULL, 0), PERSIA_OK);
    persia_service_close(v.s);
    expect(plain(&v, WIRE_PULL, NULL, 0), PERSIA_EUNAVAILABLE, "stopping");
    assert_int_equal(plain(&v, WIRE_STATS, NULL, 0), PERSIA_OK);
    server_stop(&v);
}

static void what_does_not_travel_has_no_limit(void **state)
{
    (void)state;
    server v = server_start(0, 1, NULL);
    ps_service *s;
    service_config c = {.shards = 1, .message_limit = 4096};
    for (int i = 0; i < 200; i++) {
        char name[32];
        snprintf(name, sizeof name, "a table of many: %d", i);
        table_spec spec = spec_of(name, 4, OPTIM_SGD);
        declare(&v, &spec);
    }
    assert_int_equal(persia_service_create(v.p, &c, &s), PERSIA_OK);
    expect(plain_at(s, (rpc_call){.method = WIRE_STATS,
                                  .who = &persia_rpc_everyone}),
           PERSIA_ELIMIT, "an answer of");
    persia_service_destroy(s);
    server_stop(&v);
}

static void stats_count(void **state)
{
    (void)state;
    server v = server_start(0, 1, NULL);
    table_spec spec = spec_of("a", 4, OPTIM_SGD);
    const uint64_t ids[] = {1, 2, 3};
    const float grads[12] = {1};
    optim_hyper hyper = sgd(1);
    declare(&v, &spec);
    wire_push_table t = push_table(0, 4, 3, ids, grads, &hyper);
    for (uint64_t i = 1; i <= 3; i++) {
        wire_push m = push_of(&v, STREAM, i, &t, 1);
        assert_int_equal(push(&v, &m).updates, i);
        assert_int_equal(push(&v, &m).status, PUSH_DUPLICATE);
    }
    wire_stats m = {.caller = caller_of(&v)};
    wire_stats_reply s;
    result r = CALL(&v, STATS, stats, &m);
    DECODE(&r, stats_reply, &s);
    assert_int_equal(s.boot, v.boot);
    assert_int_equal(s.lineage, v.lineage);
    assert_int_equal(s.updates, 3);
    assert_int_equal(s.pushes, 3);
    assert_int_equal(s.duplicates, 3);
    assert_int_equal(s.parked, 0);
    assert_int_equal(s.tables_n, 1);
    assert_string_equal(s.tables[0].name, "a");
    assert_int_equal(s.stats[0].rows, 3);
    assert_int_equal(s.stats[0].created, 3);
    assert_int_equal(s.stats[0].pushes, 3);
    assert_true(s.memory_used > 0);
    assert_true(s.uptime_ns > 0);
    result_free(&r);
    server_stop(&v);
}

static void bad_configurations(void **state)
{
    (void)state;
    server v = server_start(0, 1, NULL);
    ps_service *s;
    service_config c = {.shard = 2, .shards = 2, .message_limit = 1 << 20};
    expect(persia_service_create(v.p, &c, &s), PERSIA_EARG, "shard 2 of 2");
    expect(persia_ckpt_root_set(v.root, "/nowhere/at/all"), PERSIA_EIO,
           "/nowhere/at/all");
    c.shard = 0;
    c.message_limit = 0;
    expect(persia_service_create(v.p, &c, &s), PERSIA_EARG, "message_limit");
    assert_null(s);
    server_stop(&v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_tells_who_it_is),
        cmocka_unit_test(tables_are_declared_once),
        cmocka_unit_test(a_declare_that_waits_is_alone),
        cmocka_unit_test(pulls_give_what_the_table_gives),
        cmocka_unit_test(what_pulls_refuse),
        cmocka_unit_test(restores_are_taken_on_in_order),
        cmocka_unit_test(each_shard_takes_its_own_ids),
        cmocka_unit_test(requests_name_the_slots_that_they_mean),
        cmocka_unit_test(whole_rows_out_and_in),
        cmocka_unit_test(administration_and_malformed_requests),
        cmocka_unit_test(what_does_not_travel_has_no_limit),
        cmocka_unit_test(stats_count),
        cmocka_unit_test(bad_configurations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
