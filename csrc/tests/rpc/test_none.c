/* rpc: what cannot be done: in a forked child, and without gRPC. */
#include "help.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- forks ---- */

static void child_calls(rpc_channel *c, rpc_server *s)
{
    deck d = {.lock = PTHREAD_MUTEX_INITIALIZER};
    rpc_channel_config to = {.address = "127.0.0.1:9",
                             .methods = &test_methods};
    rpc_server_config serving = server_config_of(&d);
    rpc_channel *other;
    rpc_server *server;
    int good = call_with(c, WIRE_HELLO, "x", 1, SECOND) == PERSIA_EFORK;
    good &= persia_rpc_channel_open(&to, &other) == PERSIA_EFORK;
    good &= persia_rpc_server_start(&serving, &server) == PERSIA_EFORK;
    persia_rpc_channel_close(c); /* returns */
    persia_rpc_server_stop(s, SECOND);
    _exit(good ? 42 : 1);
}

static void a_forked_child_is_refused(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    echo(c, WIRE_PULL, 1, 1000);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        child_calls(c, s);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 42);
    echo(c, WIRE_PULL, 1, 1000);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static void without_grpc_it_is_said(void **state)
{
    (void)state;
    assert_non_null(persia_rpc_version());
    if (persia_rpc_available())
        skip();
    deck d;
    deck_start(&d);
    rpc_channel_config to = {.address = "127.0.0.1:9",
                             .methods = &test_methods};
    rpc_server_config serving = server_config_of(&d);
    rpc_channel *c;
    rpc_server *s;
    assert_int_equal(persia_rpc_channel_open(&to, &c), PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(persia_err_text(), "libgrpc-dev"));
    assert_int_equal(persia_rpc_server_start(&serving, &s),
                     PERSIA_EUNAVAILABLE);
    assert_string_equal(persia_rpc_version(), "none");
    assert_string_equal(persia_rpc_holes(), "");
    deck_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_forked_child_is_refused),
        cmocka_unit_test(without_grpc_it_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
