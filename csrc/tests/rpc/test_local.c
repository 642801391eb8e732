/* rpc: calls within the process, with and without gRPC. */
#include "help.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static rpc_channel *channel_of(deck *d)
{
    rpc_channel *c;
    assert_int_equal(rpc_channel_local(&test_methods, deck_handle, d, &c),
                     PERSIA_OK);
    assert_string_equal(rpc_channel_address(c), "this process");
    return c;
}

static void echoes_now_and_later(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_channel *c = channel_of(&d);
    for (size_t n = 0; n < 3000000; n = n * 3 + 1) {
        echo(c, WIRE_HELLO, n, n);
        echo(c, WIRE_PULL, n, n);
    }
    rpc_channel_close(c);
    deck_stop(&d);
}

static void errors_keep_code_and_text(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_channel *c = channel_of(&d);
    for (int code = PERSIA_OK + 1; code < PERSIA_ERROR_COUNT; code++) {
        assert_int_equal(call_leave_with(c, code, "100% of it"), code);
        assert_string_equal(err_text(), "100% of it");
    }
    assert_int_equal(call_leave_with(c, PERSIA_OK, "x"), PERSIA_EINTERNAL);
    assert_int_equal(call_with(c, WIRE_METHODS_N, "x", 1, SECOND),
                     PERSIA_EARG);
    assert_int_equal(call_with(c, WIRE_HELLO, "x", 1, 0), PERSIA_ETIMEOUT);
    /* Whoever is in the process may administrate. */
    wire_out o = message_of("x", 1, 1);
    rpc_reply reply;
    assert_int_equal(rpc_wait(c, WIRE_STATS, &o, SECOND, &reply), PERSIA_OK);
    assert_int_equal(reply.n, 5);
    assert_memory_equal(reply.data, "admin", 5);
    rpc_reply_free(&reply);
    assert_int_equal(d.replies_freed, 1);
    rpc_channel_close(c);
    deck_stop(&d);
}

typedef struct outcome {
    atomic_int count, code;
} outcome;

static void note_outcome(void *ctx, int rc, rpc_reply *reply)
{
    outcome *r = ctx;
    rpc_reply_free(reply);
    atomic_store(&r->code, rc);
    atomic_fetch_add(&r->count, 1);
}

static void closing_ends_parked_calls(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_channel *c = channel_of(&d);
    outcome r = {0};
    for (int i = 0; i < 5; i++) {
        wire_out o = message_of("park", 4, 1);
        assert_int_equal(
            rpc_start(c, WIRE_PUSH, &o, SECOND, note_outcome, &r), PERSIA_OK);
    }
    assert_int_equal(atomic_load(&r.count), 0);
    rpc_channel_close(c);
    assert_int_equal(atomic_load(&r.count), 5);
    assert_int_equal(atomic_load(&r.code), PERSIA_ECLOSED);
    deck_release(&d); /* the handler answers into the void, and frees */
    assert_int_equal(atomic_load(&r.count), 5);
    deck_stop(&d);
}

static void a_late_handler_is_not_waited_for(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_channel *c = channel_of(&d);
    assert_int_equal(call_with(c, WIRE_PUSH, "x", 1, SECOND / 100),
                     PERSIA_ETIMEOUT);
    deck_release(&d);
    rpc_channel_close(c);
    deck_stop(&d);
}

static atomic_int interrupts;

static int interrupt(void)
{
    return atomic_load(&interrupts) ? PERSIA_EINTR : PERSIA_OK;
}

static void an_interrupt_ends_the_wait(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_channel *c = channel_of(&d);
    interrupt_install(interrupt);
    atomic_store(&interrupts, 1);
    assert_int_equal(call_with(c, WIRE_PUSH, "x", 1, 1000 * SECOND),
                     PERSIA_EINTR);
    atomic_store(&interrupts, 0);
    interrupt_install(NULL);
    deck_release(&d);
    rpc_channel_close(c);
    deck_stop(&d);
}

enum { CALLERS = 4, CALLS = 500 };

typedef struct caller {
    rpc_channel *c;
    pthread_t thread;
} caller;

static void *call_often(void *arg)
{
    caller *y = arg;
    unsigned char *data = pattern_make(7, 100000);
    for (size_t i = 0; i < CALLS; i++) {
        size_t n = i * 173;
        wire_out o = message_of(data, n, 3);
        rpc_reply reply;
        if (rpc_wait(y->c, i % 2 ? WIRE_PULL : WIRE_HELLO, &o, 60 * SECOND,
                     &reply) != PERSIA_OK ||
            reply.n != n || pattern_differs(7, reply.data, n) != n)
            abort();
        rpc_reply_free(&reply);
    }
    free(data);
    return NULL;
}

static void several_threads_call(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_channel *c = channel_of(&d);
    caller y[CALLERS];
    for (unsigned i = 0; i < CALLERS; i++) {
        y[i].c = c;
        pthread_create(&y[i].thread, NULL, call_often, &y[i]);
    }
    for (unsigned i = 0; i < CALLERS; i++)
        pthread_join(y[i].thread, NULL);
    rpc_channel_close(c);
    deck_stop(&d);
}

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
    good &= rpc_channel_local(&test_methods, deck_handle, &d,
                                  &other) == PERSIA_EFORK;
    if (rpc_available()) {
        good &= rpc_channel_open(&to, &other) == PERSIA_EFORK;
        good &= rpc_server_start(&serving, &server) == PERSIA_EFORK;
    }
    rpc_channel_close(c); /* returns */
    rpc_server_stop(s, SECOND);
    _exit(good ? 42 : 1);
}

static void a_forked_child_is_told(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server *s = rpc_available() ? server_of(&d) : NULL;
    rpc_channel *local = channel_of(&d);
    rpc_channel *c[2] = {local, s ? channel_to(rpc_server_port(s)) : NULL};
    for (int i = 0; i < 2 && c[i]; i++) {
        echo(c[i], WIRE_PULL, 1, 1000);
        fflush(NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            child_calls(c[i], s);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 42);
        echo(c[i], WIRE_PULL, 1, 1000);
    }
    rpc_channel_close(c[0]);
    rpc_channel_close(c[1]);
    rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static void without_grpc_it_is_said(void **state)
{
    (void)state;
    assert_non_null(rpc_version());
    if (rpc_available())
        skip();
    deck d;
    deck_start(&d);
    rpc_channel_config to = {.address = "127.0.0.1:9",
                             .methods = &test_methods};
    rpc_server_config serving = server_config_of(&d);
    rpc_channel *c;
    rpc_server *s;
    assert_int_equal(rpc_channel_open(&to, &c), PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(err_text(), "libgrpc-dev"));
    assert_int_equal(rpc_server_start(&serving, &s), PERSIA_EUNAVAILABLE);
    assert_string_equal(rpc_version(), "none");
    deck_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(echoes_now_and_later),
        cmocka_unit_test(errors_keep_code_and_text),
        cmocka_unit_test(closing_ends_parked_calls),
        cmocka_unit_test(a_late_handler_is_not_waited_for),
        cmocka_unit_test(an_interrupt_ends_the_wait),
        cmocka_unit_test(several_threads_call),
        cmocka_unit_test(a_forked_child_is_told),
        cmocka_unit_test(without_grpc_it_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
