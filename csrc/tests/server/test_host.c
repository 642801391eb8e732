/* server: several shards of a process, without a network. */
#include "tests/server/help.h"

#include <stdlib.h>
#include <string.h>

enum { SHARDS = 4, HERE = 3 }; /* shards 1 .. HERE are here */

typedef struct world {
    server shards[HERE];
    ps_host *host;
    rpc_times times;
} world;

static void world_start(world *w)
{
    ps_service *services[HERE];
    w->times.n = WIRE_METHODS_N;
    w->times.methods = calloc(WIRE_METHODS_N, sizeof *w->times.methods);
    assert_non_null(w->times.methods);
    for (uint32_t i = 0; i < HERE; i++) {
        w->shards[i] = server_start(i + 1, SHARDS, NULL);
        services[i] = w->shards[i].s;
    }
    assert_int_equal(persia_host_create(services, HERE, &w->host), PERSIA_OK);
}

static void world_stop(world *w)
{
    persia_host_destroy(w->host);
    for (uint32_t i = 0; i < HERE; i++)
        server_stop(&w->shards[i]);
    free(w->times.methods);
}

/* Calls that were counted. */
static uint64_t counted(const world *w, uint32_t method)
{
    uint64_t n = 0;
    for (size_t i = 0; i <= RPC_BOUNDS; i++)
        n += w->times.methods[method].calls[i];
    return n;
}

/* A request. */
typedef struct asked {
    rpc_call call; /* first */
    int answers, code;
    void *data;
    size_t n;
} asked;

static void on_reply(rpc_call *call, wire_out *o, void (*done)(void *owner),
                     void *owner)
{
    asked *a = (asked *)call;
    a->answers++;
    a->n = o->bytes;
    a->data = aligned_alloc(64, (o->bytes + 64) / 64 * 64);
    assert_non_null(a->data);
    persia_wire_out_copy(o, a->data);
    persia_wire_out_free(o);
    if (done)
        done(owner);
}

static void on_fail(rpc_call *call, int code, const char *text)
{
    asked *a = (asked *)call;
    a->answers++;
    a->code = persia_err_set(code, "%s", text);
}

static const rpc_who user = {.roles = RPC_USER};

/* One that may be answered later. */
static void ask_later(world *w, uint32_t method, const void *data, size_t n,
                      asked *out)
{
    void *request = aligned_alloc(64, (n + 64) / 64 * 64);
    *out = (asked){.call = {.began = 1, .times = &w->times,
                            .method = method, .request = request,
                            .request_n = n, .deadline = UINT64_MAX,
                            .who = method == WIRE_MOVE ? &persia_rpc_everyone
                                                       : &user,
                            .reply = on_reply,
                            .fail = on_fail}};
    assert_non_null(request);
    if (n)
        memcpy(request, data, n);
    persia_host_handle(w->host, &out->call);
    free(request);
}

static asked ask(world *w, uint32_t method, const void *data, size_t n)
{
    asked a;
    ask_later(w, method, data, n, &a);
    assert_int_equal(a.answers, 1);
    return a;
}

/* Several calls at once, each with the same message; their results. */
static size_t ask_many(world *w, const wire_part *parts, size_t n,
                       const wire_stats *m, wire_memory *memory,
                       wire_result **out, void **data)
{
    wire_out all, one;
    wire_many_reply reply;
    persia_wire_out_init(&all);
    for (size_t i = 0; i < n; i++) {
        persia_wire_out_init(&one);
        if (m)
            assert_int_equal(persia_wire_put_stats(&one, m), PERSIA_OK);
        assert_int_equal(persia_wire_put_part(&all, &parts[i], &one),
                         PERSIA_OK);
    }
    char *bytes = malloc(all.bytes + 1);
    assert_non_null(bytes);
    persia_wire_out_copy(&all, bytes);
    asked a = ask(w, WIRE_MANY, bytes, all.bytes);
    persia_wire_out_free(&all);
    free(bytes);
    assert_int_equal(a.code, PERSIA_OK);
    assert_int_equal(persia_wire_get_many_reply(a.data, a.n, memory, &reply),
                     PERSIA_OK);
    *out = reply.results;
    *data = a.data;
    return reply.results_n;
}

/* Each call is of its shard, answered or refused by itself. */
static void calls_of_several_shards(void **state)
{
    static const wire_part parts[] = {
        {.shard = 3, .method = WIRE_STATS}, {.shard = 1, .method = WIRE_STATS},
        {.shard = 0, .method = WIRE_STATS}, {.shard = 2, .method = WIRE_MANY},
        {.shard = 2, .method = 30}, {.shard = 2, .method = WIRE_SNAPSHOT},
        {.shard = 3, .method = WIRE_STATS}};
    enum { N = sizeof parts / sizeof *parts };
    static const int codes[N] = {PERSIA_OK, PERSIA_OK, PERSIA_EUNAVAILABLE,
                                 PERSIA_EPROTOCOL, PERSIA_EPROTOCOL,
                                 PERSIA_EDENIED, PERSIA_OK};
    const wire_stats m = {.caller = {.client = 7}};
    world w;
    wire_memory memory;
    wire_result *results;
    void *data;
    (void)state;
    world_start(&w);
    persia_wire_memory_init(&memory);
    assert_int_equal(ask_many(&w, parts, N, &m, &memory, &results, &data), N);
    for (size_t i = 0; i < N; i++) {
        wire_stats_reply reply;
        if (codes[i]) {
            assert_int_equal(persia_err_code(results[i].error), codes[i]);
            continue;
        }
        assert_string_equal(results[i].error, "");
        assert_int_equal((uintptr_t)results[i].message % 8, 0);
        assert_int_equal(persia_wire_get_stats_reply(results[i].message,
                                                     results[i].n, &memory,
                                                     &reply),
                         PERSIA_OK);
        assert_int_equal(reply.boot, w.shards[parts[i].shard - 1].boot);
        assert_int_equal(reply.beside, parts[i].shard != 1);
    }
    assert_int_equal(counted(&w, WIRE_STATS), 4); /* refused or not */
    assert_int_equal(counted(&w, WIRE_SNAPSHOT), 1);
    assert_int_equal(counted(&w, WIRE_MANY), 1); /* within a Many */
    free(data);
    persia_wire_memory_free(&memory);
    world_stop(&w);
}

/* Another call is of the first shard, which names the others. */
static void other_calls_are_of_the_first_shard(void **state)
{
    const wire_hello m = {.version = WIRE_VERSION, .name_space = "test"};
    wire_hello_reply reply;
    wire_memory memory;
    wire_out o;
    world w;
    (void)state;
    world_start(&w);
    for (uint32_t here = HERE; here > 0; here--) {
        char bytes[64];
        persia_wire_out_init(&o);
        assert_int_equal(persia_wire_put_hello(&o, &m), PERSIA_OK);
        persia_wire_out_copy(&o, bytes);
        asked a = ask(&w, WIRE_HELLO, bytes, o.bytes);
        persia_wire_out_free(&o);
        persia_wire_memory_init(&memory);
        assert_int_equal(persia_wire_get_hello_reply(a.data, a.n, &memory,
                                                     &reply),
                         PERSIA_OK);
        assert_int_equal(reply.shard, 1);
        assert_int_equal(reply.shards, SHARDS);
        assert_int_equal(reply.here_n, here);
        for (uint32_t i = 0; i < here; i++)
            assert_int_equal(reply.here[i], i + 1);
        free(a.data);
        persia_wire_memory_free(&memory);
        assert_int_equal(persia_host_remove(w.host, here, NULL, 1), PERSIA_OK);
    }
    assert_int_equal(ask(&w, WIRE_HELLO, "", 0).code, PERSIA_EUNAVAILABLE);
    world_stop(&w);
}

/* A Hello for no shard finds those that are here, also where the first one
 * has gone; another call learns where that is. */
static void a_hello_behind_the_first_shard(void **state)
{
    const wire_hello m = {.version = WIRE_VERSION, .name_space = "test"};
    char bytes[64];
    wire_out o;
    world w;
    (void)state;
    world_start(&w);
    assert_int_equal(persia_host_remove(w.host, 1, "a:1", 1), PERSIA_OK);
    persia_wire_out_init(&o);
    assert_int_equal(persia_wire_put_hello(&o, &m), PERSIA_OK);
    persia_wire_out_copy(&o, bytes);
    asked a = ask(&w, WIRE_HELLO, bytes, o.bytes);
    assert_int_equal(a.code, PERSIA_OK);
    free(a.data);
    assert_int_equal(ask(&w, WIRE_STATS, "", 0).code, PERSIA_EMOVED);
    persia_wire_out_free(&o);
    world_stop(&w);
}

/* The answer is where it is, until it is here again. */
static void a_shard_that_has_gone(void **state)
{
    const wire_part part = {.shard = 2, .method = WIRE_STATS};
    wire_memory memory;
    wire_result *results;
    void *data;
    world w;
    (void)state;
    world_start(&w);
    static const char *const wrong[] = {"", "two words", "line\n"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_int_equal(persia_host_remove(w.host, 2, wrong[i], 1),
                         PERSIA_EARG);
    assert_int_equal(persia_host_remove(w.host, 2, "a:1", 1), PERSIA_OK);
    assert_int_equal(persia_host_remove(w.host, 2, "a:1", 1), PERSIA_EARG);
    assert_int_equal(persia_host_place(w.host, 2, "b:2", 2), PERSIA_OK);
    /* Of an earlier move, and of one whose number is not known. */
    assert_int_equal(persia_host_place(w.host, 2, "c:3", 1), PERSIA_OK);
    assert_int_equal(persia_host_place(w.host, 2, "c:3", 0), PERSIA_OK);
    assert_int_equal(persia_host_place(w.host, 1, "b:2", 2), PERSIA_OK);
    for (int here = 0; here < 2; here++) {
        persia_wire_memory_init(&memory);
        assert_int_equal(ask_many(&w, &part, 1, NULL, &memory, &results,
                                  &data), 1);
        assert_string_equal(results[0].error, here ? "" : "Moved");
        if (!here) {
            assert_string_equal(strrchr(results[0].text, ' '), " b:2");
            assert_int_equal(persia_host_add(w.host, w.shards[1].s),
                             PERSIA_OK);
            assert_int_equal(persia_host_add(w.host, w.shards[1].s),
                             PERSIA_EARG);
        }
        free(data);
        persia_wire_memory_free(&memory);
    }
    world_stop(&w);
}

/* They are the process's to take; at the end they fail. */
static void calls_of_move(void **state)
{
    const wire_move m = {.verb = MOVE_BEGIN, .name_space = "test",
                         .shard = 2, .address = "a:1", .by = "me"};
    char bytes[256];
    wire_out o;
    world w;
    (void)state;
    world_start(&w);
    persia_wire_out_init(&o);
    assert_int_equal(persia_wire_put_move(&o, &m), PERSIA_OK);
    const size_t n = o.bytes;
    persia_wire_out_copy(&o, bytes);
    persia_wire_out_free(&o);
    assert_null(persia_host_take(w.host, 0));
    assert_null(persia_host_take(w.host, 1));
    for (int i = 0; i < 3; i++) {
        asked a;
        ask_later(&w, WIRE_MOVE, bytes, n, &a);
        assert_int_equal(a.answers, 0);
        if (i == 2) {
            persia_host_close(w.host);
            assert_int_equal(a.code, PERSIA_EUNAVAILABLE);
            continue;
        }
        host_move *one = persia_host_take(w.host, i ? 0 : UINT64_MAX / 4);
        assert_non_null(one);
        assert_int_equal(persia_host_message(one)->shard, 2);
        assert_string_equal(persia_host_message(one)->address, "a:1");
        const wire_move_reply reply = {.text = "done"};
        persia_host_give(one, i ? persia_err_set(PERSIA_EARG, "no") : 0,
                         &reply);
        assert_int_equal(a.code, i ? PERSIA_EARG : PERSIA_OK);
        free(a.data);
    }
    world_stop(&w);
}

/* No call, and bytes that are none. */
static void bytes_that_are_no_calls(void **state)
{
    world w;
    wire_memory memory;
    wire_result *results;
    void *data;
    const wire_part none = {.shard = 1, .method = WIRE_PULL};
    rng r = {.state = 5};
    (void)state;
    world_start(&w);
    persia_wire_memory_init(&memory);
    assert_int_equal(ask_many(&w, NULL, 0, NULL, &memory, &results, &data), 0);
    free(data);
    assert_int_equal(ask_many(&w, &none, 1, NULL, &memory, &results, &data),
                     1);
    free(data);
    persia_wire_memory_free(&memory);
    assert_int_equal(ask(&w, WIRE_MANY, "\377\377\377", 3).code,
                     PERSIA_EPROTOCOL);
    assert_int_equal(ask(&w, 1000, NULL, 0).code, PERSIA_EPROTOCOL);
    for (int i = 0; i < 2000; i++) {
        unsigned char bytes[40];
        size_t n = 2 + rng_below(&r, sizeof bytes - 2);
        for (size_t k = 0; k < n; k++)
            bytes[k] = (unsigned char)rng_below(&r, k % 3 ? 24 : 256);
        bytes[0] = 10; /* a part, of most of what follows */
        bytes[1] = (unsigned char)(n - 2);
        free(ask(&w, WIRE_MANY, bytes, n).data);
    }
    world_stop(&w);
}

static void shards_of_one_job_in_order(void **state)
{
    server a = server_start(0, 2, NULL), b = server_start(1, 2, NULL),
           c = server_start(1, 3, NULL);
    ps_service *const wrong[][2] = {{b.s, a.s}, {a.s, a.s}, {a.s, c.s}};
    ps_host *host;
    (void)state;
    for (int i = 0; i < 3; i++)
        assert_int_equal(persia_host_create(wrong[i], 2, &host), PERSIA_EARG);
    assert_int_equal(persia_host_create(NULL, 0, &host), PERSIA_OK);
    assert_int_equal(persia_host_add(host, b.s), PERSIA_OK);
    assert_int_equal(persia_host_add(host, c.s), PERSIA_EARG);
    assert_int_equal(persia_host_add(host, a.s), PERSIA_OK);
    persia_host_destroy(host);
    server_stop(&a);
    server_stop(&b);
    server_stop(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_of_several_shards),
        cmocka_unit_test(other_calls_are_of_the_first_shard),
        cmocka_unit_test(a_hello_behind_the_first_shard),
        cmocka_unit_test(a_shard_that_has_gone),
        cmocka_unit_test(calls_of_move),
        cmocka_unit_test(bytes_that_are_no_calls),
        cmocka_unit_test(shards_of_one_job_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
