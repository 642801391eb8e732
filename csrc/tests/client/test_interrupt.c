/* Ctrl-C while another thread of the user waits for a server. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sched.h>
#include <string.h>

#include "cluster.h"

/* Threads of the user, of which the second one is interrupted. */
static _Thread_local int interrupted;
static int interrupt(void)
{
    return interrupted ? PERSIA_EINTR : PERSIA_OK;
}

typedef struct caller {
    ps_client *c;
    int (*call)(ps_client *c);
    int rc;
} caller;

static int declare(ps_client *c)
{
    table_config t;
    uint32_t no;
    int created;
    persia_table_config_init(&t);
    memcpy(t.name, "new", 4);
    return persia_client_declare(c, &t, &no, &created);
}

static int drop(ps_client *c)
{
    return persia_client_drop(c, 0);
}

static int look(ps_client *c)
{
    return persia_client_check_restores(c);
}

static int inherit(ps_client *c)
{
    int known;
    return persia_client_inherit(c, 77, 1, 0, &known);
}

static int push(ps_client *c)
{
    return persia_client_push(c, NULL, NULL, NULL, 0);
}

static void *call_run(void *arg)
{
    caller *k = arg;
    k->rc = k->call(k->c);
    return NULL;
}

/* `first` waits for a server; then `second` can be interrupted. */
static void meet(uint32_t method, int (*first)(ps_client *c),
                 int (*second)(ps_client *c), int missing, int unsure)
{
    cluster c;
    cluster_make(&c, 2);
    client_config config = cluster_config(&c);
    config.timeout_ns = 5000000000u;
    ps_client *client = cluster_client(&c, &config);
    table_config t;
    uint32_t no;
    int created;
    pthread_t thread;
    persia_table_config_init(&t);
    memcpy(t.name, "a", 2);
    assert_int_equal(persia_client_declare(client, &t, &no, &created),
                     PERSIA_OK);
    assert_int_equal(push(client), PERSIA_OK);
    atomic_store(&c.nodes[1].held, 1u << method);
    atomic_store(&client->restores, unsure ? RESTORES_UNSURE : RESTORES_ONE);
    atomic_store(&client->missing, (uint64_t)missing);
    caller k = {client, first, 0};
    assert_int_equal(pthread_create(&thread, NULL, call_run, &k), 0);
    while (!atomic_load(&c.nodes[1].waiting))
        sched_yield();
    interrupted = 1;
    assert_int_equal(second(client), PERSIA_EINTR);
    interrupted = 0;
    atomic_store(&c.nodes[1].held, 0);
    pthread_join(thread, NULL);
    assert_int_equal(k.rc, PERSIA_OK);
    persia_client_destroy(client);
    cluster_free(&c);
}

static void tables_are_declared(void **state)
{
    (void)state;
    meet(WIRE_DECLARE, declare, declare, 0, 0);
    meet(WIRE_DECLARE, declare, drop, 0, 0);
}

static void restores_are_compared(void **state)
{
    (void)state;
    meet(WIRE_HELLO, look, push, 0, 1);
    meet(WIRE_HELLO, push, look, 0, 1);
}

static void updates_are_completed(void **state)
{
    (void)state;
    meet(WIRE_HELLO, inherit, inherit, 0, 0);
    meet(WIRE_HELLO, inherit, push, 1, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_are_declared),
        cmocka_unit_test(restores_are_compared),
        cmocka_unit_test(updates_are_completed),
    };
    persia_interrupt_install(interrupt);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
