/* rpc: messages, errors, deadlines, servers that stop and start. */
#include "help.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void echoes_of_all_sizes(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    static const size_t sizes[] = {0,     1,      7,       100,
                                   511,   1024,   65536,   1000003,
                                   20 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        echo(c, WIRE_HELLO, i, sizes[i]);
        echo(c, WIRE_PULL, i, sizes[i]);
    }
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* ---- many calls in flight ---- */

enum { FLYERS = 4, FLIGHTS = 150 };

typedef struct flight {
    uint64_t seed;
    size_t n;
    unsigned char *data;
    atomic_int *left;
} flight;

static void landed(void *ctx, int rc, rpc_reply *reply)
{
    flight *f = ctx;
    if (rc != PERSIA_OK || reply->n != f->n ||
        pattern_differs(f->seed, reply->data, f->n) != f->n) {
        fprintf(stderr, "flight %llu: %s\n", (unsigned long long)f->seed,
                rc ? persia_err_text() : "other bytes");
        abort();
    }
    persia_rpc_reply_free(reply);
    /* gRPC has no use for it any more: ASan judges. */
    memset(f->data, 0xdd, f->n);
    free(f->data);
    atomic_fetch_sub(f->left, 1);
    free(f);
}

typedef struct flyer {
    rpc_channel *c;
    uint64_t seed;
    pthread_t thread;
} flyer;

static void *fly(void *arg)
{
    flyer *y = arg;
    atomic_int left = FLIGHTS;
    for (unsigned i = 0; i < FLIGHTS; i++) {
        flight *f = malloc(sizeof *f);
        f->seed = y->seed + i;
        f->n = i % 50 == 0 ? 3000000 : (size_t)i * i * 7 % 90000;
        f->data = pattern_make(f->seed, f->n);
        f->left = &left;
        wire_out o = message_of(f->data, f->n, 1 + i % 40);
        if (persia_rpc_start(y->c, i % 2 ? WIRE_PULL : WIRE_HELLO, &o,
                             60 * SECOND, landed, f) != PERSIA_OK)
            abort();
    }
    while (atomic_load(&left))
        sleep_ms(1);
    return NULL;
}

static void many_calls_in_flight_from_several_threads(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    flyer y[FLYERS];
    for (unsigned i = 0; i < FLYERS; i++) {
        y[i] = (flyer){.c = c, .seed = 1000 * i};
        pthread_create(&y[i].thread, NULL, fly, &y[i]);
    }
    for (unsigned i = 0; i < FLYERS; i++)
        pthread_join(y[i].thread, NULL);
    assert_int_equal(d.requests, FLYERS * FLIGHTS);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* ---- errors ---- */

static void errors_keep_code_and_text(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    for (int code = PERSIA_OK + 1; code < PERSIA_ERROR_COUNT; code++) {
        char text[200];
        snprintf(text, sizeof text,
                 "table \"caf\xc3\xa9\": 100%% of %d rows\nline", code);
        assert_int_equal(call_leave_with(c, code, text), code);
        assert_non_null(strstr(persia_err_text(), text));
        assert_non_null(
            strstr(persia_err_text(), persia_rpc_channel_address(c)));
    }
    /* A text of any length, no text, and a code that is none. */
    char text[3001];
    memset(text, '%', sizeof text - 1);
    text[sizeof text - 1] = 0;
    assert_int_equal(call_leave_with(c, PERSIA_EARG, text), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "%%%%%%%%"));
    assert_int_equal(call_leave_with(c, PERSIA_EIO, ""), PERSIA_EIO);
    assert_non_null(strstr(persia_err_text(), persia_err_message(PERSIA_EIO)));
    assert_int_equal(call_leave_with(c, 12345, "x"), PERSIA_EINTERNAL);
    assert_int_equal(call_leave_with(c, PERSIA_OK, "x"), PERSIA_EINTERNAL);
    echo(c, WIRE_HELLO, 1, 100);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static void a_deadline_passes(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    assert_int_equal(call_with(c, WIRE_PUSH, "x", 1, SECOND / 5),
                     PERSIA_ETIMEOUT);
    assert_non_null(strstr(persia_err_text(), persia_rpc_channel_address(c)));
    assert_non_null(strstr(persia_err_text(), "Push"));
    assert_non_null(strstr(persia_err_text(), "0.2 s"));
    deck_wait_parked(&d, 1);
    deck_release(&d); /* into the void */
    assert_int_equal(call_with(c, WIRE_HELLO, "x", 1, 0), PERSIA_ETIMEOUT);

    /* The handler knows the deadline, a little early. */
    wire_out o = message_of("x", 1, 1);
    rpc_reply reply;
    assert_int_equal(rpc_wait(c, WIRE_RESTORE, &o, 100 * SECOND, &reply),
                     PERSIA_OK);
    uint64_t ms;
    assert_int_equal(reply.n, sizeof ms);
    memcpy(&ms, reply.data, sizeof ms);
    assert_in_range(ms, 50000, 99900);
    persia_rpc_reply_free(&reply);
    echo(c, WIRE_HELLO, 1, 100);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* ---- servers that stop and start ---- */

static void a_server_that_is_gone_is_named(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    int port = persia_rpc_server_port(s);
    rpc_channel *c = channel_to(port);
    echo(c, WIRE_HELLO, 1, 100);
    persia_rpc_server_stop(s, SECOND);
    assert_int_equal(call_with(c, WIRE_HELLO, "x", 1, 20 * SECOND),
                     PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(persia_err_text(), persia_rpc_channel_address(c)));

    /* It starts again at the same port and is found. */
    rpc_server_config config = server_config_of(&d);
    config.address = persia_rpc_channel_address(c);
    rpc_server *again, *taken;
    assert_int_equal(persia_rpc_server_start(&config, &again), PERSIA_OK);
    assert_int_equal(persia_rpc_server_port(again), port);
    int code, tries = 0;
    while ((code = call_with(c, WIRE_HELLO, "x", 1, 20 * SECOND)) ==
               PERSIA_EUNAVAILABLE &&
           tries++ < 2000)
        sleep_ms(10);
    assert_int_equal(code, PERSIA_OK);

    assert_int_equal(persia_rpc_server_start(&config, &taken),
                     PERSIA_EUNAVAILABLE);
    assert_null(taken);
    assert_non_null(strstr(persia_err_text(), persia_rpc_channel_address(c)));
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(again, SECOND);
    deck_stop(&d);
}

typedef struct outcome {
    atomic_int count;
    atomic_int code;
} outcome;

static void note_outcome(void *ctx, int rc, rpc_reply *reply)
{
    outcome *r = ctx;
    if (rc == PERSIA_OK && !reply->data)
        abort();
    persia_rpc_reply_free(reply);
    atomic_store(&r->code, rc);
    atomic_fetch_add(&r->count, 1);
}

typedef struct stopper {
    rpc_server *s;
    uint64_t grace;
    atomic_int stopped;
} stopper;

static void *stop_main(void *arg)
{
    stopper *p = arg;
    persia_rpc_server_stop(p->s, p->grace);
    atomic_store(&p->stopped, 1);
    return NULL;
}

static void what_a_call_waits_and_works_is_added_up(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    const rpc_times *t = persia_rpc_server_times(s);
    outcome r = {0};
    wire_out o = message_of("x", 1, 1);
    const uint64_t before = persia_clock_ns();
    assert_int_equal(
        persia_rpc_start(c, WIRE_PUSH, &o, 60 * SECOND, note_outcome, &r),
        PERSIA_OK);
    deck_wait_parked(&d, 1);
    sleep_ms(30);
    assert_int_equal(atomic_load(&t->worked), 0); /* it is not answered yet */
    deck_release(&d);
    while (!atomic_load(&r.count))
        sleep_ms(1);
    const uint64_t all = persia_clock_ns() - before;
    assert_in_range(atomic_load(&t->worked), 30000000, all);
    assert_in_range(atomic_load(&t->waited), 1, all - 30000000);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static void stop_cancels_parked_calls_and_waits_for_them(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    stopper p = {.s = server_of(&d), .grace = SECOND / 10};
    rpc_channel *c = channel_to(persia_rpc_server_port(p.s));
    outcome r = {0};
    for (int i = 0; i < 3; i++) {
        wire_out o = message_of("park", 4, 1);
        assert_int_equal(
            persia_rpc_start(c, WIRE_PUSH, &o, 60 * SECOND, note_outcome, &r),
            PERSIA_OK);
    }
    deck_wait_parked(&d, 3);
    pthread_t t;
    pthread_create(&t, NULL, stop_main, &p);
    while (atomic_load(&r.count) < 3)
        sleep_ms(1);
    assert_int_equal(atomic_load(&r.code), PERSIA_EUNAVAILABLE);
    sleep_ms(50);
    assert_int_equal(atomic_load(&p.stopped), 0); /* they were not answered */
    deck_release(&d);
    pthread_join(t, NULL);
    persia_rpc_channel_close(c);
    deck_stop(&d);
}

static void stop_lets_calls_end_within_the_grace(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    stopper p = {.s = server_of(&d), .grace = 60 * SECOND};
    rpc_channel *c = channel_to(persia_rpc_server_port(p.s));
    outcome r = {0};
    wire_out o = message_of("park", 4, 1);
    assert_int_equal(
        persia_rpc_start(c, WIRE_PUSH, &o, 60 * SECOND, note_outcome, &r),
        PERSIA_OK);
    deck_wait_parked(&d, 1);
    pthread_t t;
    pthread_create(&t, NULL, stop_main, &p);
    sleep_ms(50);
    deck_release(&d);
    pthread_join(t, NULL);
    while (!atomic_load(&r.count))
        sleep_ms(1);
    assert_int_equal(atomic_load(&r.code), PERSIA_OK);
    persia_rpc_channel_close(c);
    deck_stop(&d);
}

static void closing_cancels_what_is_under_way(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    stopper p = {.s = server_of(&d)};
    unsigned char *data = pattern_make(1, 5 << 20);
    for (int round = 0; round < 10; round++) {
        rpc_channel *c = channel_to(persia_rpc_server_port(p.s));
        if (round % 2) /* connected, or not yet */
            echo(c, WIRE_HELLO, 1, 1);
        outcome r = {0};
        for (int i = 0; i < 3; i++) {
            wire_out o = message_of(data, 5 << 20, 5);
            assert_int_equal(persia_rpc_start(c, WIRE_PUSH, &o, 60 * SECOND,
                                              note_outcome, &r),
                             PERSIA_OK);
        }
        persia_rpc_channel_close(c);
        assert_int_equal(atomic_load(&r.count), 3);
        assert_int_equal(atomic_load(&r.code), PERSIA_ECLOSED);
    }
    free(data); /* gRPC has let go of it */
    /* Those that arrived are answered into the void. */
    pthread_t t;
    pthread_create(&t, NULL, stop_main, &p);
    while (!atomic_load(&p.stopped)) {
        deck_release(&d);
        sleep_ms(1);
    }
    pthread_join(t, NULL);
    deck_stop(&d);
}

static void answers_to_those_who_left_hold_nothing(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    config.calls_max = 2;
    rpc_server *s;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    uint64_t n = 20 << 20;
    for (uint64_t ms = 1; ms < 20; ms++) {
        rpc_channel *c = channel_to(persia_rpc_server_port(s));
        echo(c, WIRE_HELLO, 1, 1);
        (void)call_with(c, WIRE_DECLARE, &n, sizeof n, ms * SECOND / 1000);
        persia_rpc_channel_close(c);
    }
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    echo(c, WIRE_HELLO, 1, 100);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* ---- limits ---- */

static void messages_have_limits_both_ways(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    config.message_limit = 100000;
    rpc_server *s;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    unsigned char *data = pattern_make(1, 8 << 20);
    echo(c, WIRE_HELLO, 1, 100000);
    assert_int_equal(
        call_with(c, WIRE_HELLO, data, 100001, 20 * SECOND), PERSIA_ELIMIT);
    assert_non_null(strstr(persia_err_text(), "100001"));
    assert_int_equal(call_with(c, WIRE_HELLO, data, 8 << 20, 20 * SECOND),
                     PERSIA_ELIMIT);
    uint64_t n = 100001;
    assert_int_equal(call_with(c, WIRE_DECLARE, &n, sizeof n, 20 * SECOND),
                     PERSIA_ELIMIT);
    assert_non_null(strstr(persia_err_text(), "100001"));
    n = 100000;
    assert_int_equal(call_with(c, WIRE_DECLARE, &n, sizeof n, 20 * SECOND),
                     PERSIA_OK);

    /* The client's own limit. */
    rpc_channel_config small = {.methods = &test_methods,
                                .address = persia_rpc_channel_address(c),
                                .message_limit = 1000};
    rpc_channel *e;
    assert_int_equal(persia_rpc_channel_open(&small, &e), PERSIA_OK);
    echo(e, WIRE_HELLO, 1, 1000);
    n = 1001;
    assert_int_equal(call_with(e, WIRE_DECLARE, &n, sizeof n, 20 * SECOND),
                     PERSIA_ELIMIT);
    assert_non_null(strstr(persia_err_text(), persia_rpc_channel_address(c)));
    free(data);
    persia_rpc_channel_close(e);
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* Until the server has counted so many open ones, and closed another since
 * `refused`; returns how many it has closed. */
static uint64_t wait_connections(const rpc_server *s, uint64_t open,
                                 uint64_t refused)
{
    rpc_counts n = {0};
    for (int i = 0; i < 3000; i++) {
        n = persia_rpc_server_counts(s);
        if (n.open == open && n.refused >= refused)
            return n.refused;
        sleep_ms(10);
    }
    fail_msg("%llu connections, %llu refused after half a minute",
             (unsigned long long)n.open, (unsigned long long)n.refused);
    return 0;
}

static void an_idle_connection_is_closed(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    config.idle_ms = 300;
    rpc_server *s;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    for (int i = 0; i < 2; i++) { /* a client connects again by itself */
        while (call_with(c, WIRE_HELLO, "again", 5, 30 * SECOND) != PERSIA_OK)
            sleep_ms(10); /* it may have met the end of the connection */
        wait_connections(s, 0, 0);
    }
    persia_rpc_channel_close(c);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static void who_comes_beyond_the_limit_is_closed(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    config.connections_max = 3;
    rpc_server *s;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    rpc_channel *c[4];
    for (int i = 0; i < 3; i++) {
        c[i] = channel_to(persia_rpc_server_port(s));
        echo(c[i], WIRE_HELLO, 1, 100);
    }
    wait_connections(s, 3, 0);
    c[3] = channel_to(persia_rpc_server_port(s));
    outcome r = {0};
    wire_out o = message_of("park", 4, 1);
    assert_int_equal(
        persia_rpc_start(c[3], WIRE_PUSH, &o, 30 * SECOND, note_outcome, &r),
        PERSIA_OK);
    uint64_t refused = wait_connections(s, 3, 1);
    while (!atomic_load(&r.count))
        sleep_ms(1);
    assert_int_equal(atomic_load(&r.code), PERSIA_EUNAVAILABLE);
    for (int i = 0; i < 3; i++) /* who was there before stays */
        echo(c[i], WIRE_HELLO, 1, 100000);

    persia_rpc_channel_close(c[0]);
    while (call_with(c[3], WIRE_HELLO, "again", 5, 30 * SECOND) !=
           PERSIA_OK)
        sleep_ms(10);
    wait_connections(s, 3, refused);
    for (int i = 1; i < 4; i++) {
        echo(c[i], WIRE_HELLO, 1, 100);
        persia_rpc_channel_close(c[i]);
    }
    deck_release(&d);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static void more_calls_than_slots_wait(void **state)
{
    NEED_GRPC();
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    config.calls_max = 2;
    rpc_server *s;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    rpc_channel *c[5];
    outcome r = {0};
    for (int i = 0; i < 5; i++) {
        c[i] = channel_to(persia_rpc_server_port(s));
        wire_out o = message_of("park", 4, 1);
        assert_int_equal(persia_rpc_start(c[i], WIRE_PUSH, &o, 60 * SECOND,
                                          note_outcome, &r),
                         PERSIA_OK);
    }
    deck_wait_parked(&d, 2);
    sleep_ms(50);
    assert_int_equal(d.requests, 2);
    while (atomic_load(&r.count) < 5) {
        deck_release(&d);
        sleep_ms(1);
    }
    assert_int_equal(atomic_load(&r.code), PERSIA_OK);
    for (int i = 0; i < 5; i++)
        persia_rpc_channel_close(c[i]);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(echoes_of_all_sizes),
        cmocka_unit_test(many_calls_in_flight_from_several_threads),
        cmocka_unit_test(errors_keep_code_and_text),
        cmocka_unit_test(what_a_call_waits_and_works_is_added_up),
        cmocka_unit_test(a_deadline_passes),
        cmocka_unit_test(a_server_that_is_gone_is_named),
        cmocka_unit_test(stop_cancels_parked_calls_and_waits_for_them),
        cmocka_unit_test(stop_lets_calls_end_within_the_grace),
        cmocka_unit_test(closing_cancels_what_is_under_way),
        cmocka_unit_test(answers_to_those_who_left_hold_nothing),
        cmocka_unit_test(messages_have_limits_both_ways),
        cmocka_unit_test(an_idle_connection_is_closed),
        cmocka_unit_test(who_comes_beyond_the_limit_is_closed),
        cmocka_unit_test(more_calls_than_slots_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
