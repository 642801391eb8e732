/* rpc: calls by their time. */
#include "help.h"

#include "rpc/rpc.h"

#include <string.h>

enum { NOW = 2000000000 };

static uint64_t still(void *ctx)
{
    (void)ctx;
    return NOW;
}

static void a_call_is_in_the_first_class_that_has_it(void **state)
{
    static const struct {
        uint64_t ns;
        size_t class;
    } cases[] = {{0, 0},       {100000, 0},      {100001, 1},
                 {3000000, 5}, {1000000000, 12}, {NOW - 1, 13}};
    struct rpc_method_times methods[2];
    rpc_times times = {.n = 2, .methods = methods};
    const persia_system *machine = persia_system_get();
    persia_system fixed = *machine;
    (void)state;
    fixed.now = still;
    persia_system_install(&fixed);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memset(methods, 0, sizeof methods);
        rpc_call call = {.method = 1, .request_n = 5, .times = &times};
        call.began = NOW - cases[i].ns;
        persia_rpc_count(&call, 7);
        for (size_t k = 0; k <= RPC_BOUNDS; k++)
            assert_int_equal(methods[1].calls[k], k == cases[i].class);
        assert_int_equal(methods[1].ns, cases[i].ns);
        assert_int_equal(methods[1].in, 5);
        assert_int_equal(methods[1].out, 7);
        assert_int_equal(methods[0].ns, 0);
    }
    persia_system_install(NULL);
}

static void calls_of_no_method_are_left_out(void **state)
{
    struct rpc_method_times methods[2];
    rpc_times times = {.n = 1, .methods = methods};
    (void)state;
    memset(methods, 0, sizeof methods);
    persia_rpc_count(&(rpc_call){.method = 1, .began = 1, .times = &times}, 1);
    persia_rpc_count(&(rpc_call){.method = 0, .times = &times}, 1);
    persia_rpc_count(&(rpc_call){.method = 0, .began = 1}, 1);
    for (size_t i = 0; i < 2; i++)
        assert_int_equal(methods[i].out, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_is_in_the_first_class_that_has_it),
        cmocka_unit_test(calls_of_no_method_are_left_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
