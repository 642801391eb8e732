/* trace: which batches are sampled, their spans, the ring. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "trace/trace.h"

enum { ROOM = 8 };

static size_t taken(trace_span *out, uint64_t *dropped)
{
    return persia_trace_take(out, ROOM, dropped);
}

static int stop(void **state)
{
    trace_span left[ROOM];
    uint64_t dropped;
    (void)state;
    assert_int_equal(persia_trace_start(0, 0), PERSIA_OK);
    while (taken(left, &dropped))
        ;
    return 0;
}

static void a_share_of_batches_is_sampled(void **state)
{
    enum { BATCHES = 100000 };
    trace_span t;
    unsigned n = 0;
    (void)state;
    assert_int_equal(persia_trace_start(0.01, ROOM), PERSIA_OK);
    for (uint64_t i = 1; i <= BATCHES; i++) {
        persia_trace_begin(&t, TRACE_SUBMIT, 77, i);
        n += t.began != 0;
    }
    assert_in_range(n, BATCHES / 100 - 150, BATCHES / 100 + 150);
    assert_int_equal(persia_trace_start(1, ROOM), PERSIA_OK);
    for (uint64_t i = 1; i <= 1000; i++) {
        persia_trace_begin(&t, TRACE_SUBMIT, i * i, i);
        assert_int_not_equal(t.began, 0);
    }
}

static void without_a_rate_nothing_is(void **state)
{
    trace_span t, out[ROOM];
    uint64_t dropped;
    const wire_trace parent = {1, 2, 3};
    (void)state;
    assert_int_equal(persia_trace_start(0, ROOM), PERSIA_OK);
    assert_int_equal(persia_trace_now(), 0);
    persia_trace_begin(&t, TRACE_BATCH, 1, 2);
    assert_int_equal(t.began, 0);
    assert_int_equal(t.at.span, 0); /* nothing travels */
    persia_trace_end(&t, PERSIA_OK);
    persia_trace_below(&t, TRACE_PULL, &parent, persia_trace_now());
    persia_trace_end(&t, PERSIA_OK);
    persia_trace_part(TRACE_TAKE, 1, 2, persia_trace_now(), 1, PERSIA_OK);
    assert_int_equal(taken(out, &dropped), 0);
    assert_int_equal(dropped, 0);
}

static void processes_agree(void **state)
{
    trace_span first, again, part, other;
    (void)state;
    assert_int_equal(persia_trace_start(1, ROOM), PERSIA_OK);
    persia_trace_begin(&first, TRACE_BATCH, 5, 6);
    assert_int_equal(persia_trace_start(0.999999, ROOM), PERSIA_OK);
    persia_trace_begin(&again, TRACE_BATCH, 5, 6);
    persia_trace_begin(&part, TRACE_LOOKUP, 5, 6);
    persia_trace_begin(&other, TRACE_BATCH, 6, 5);
    assert_memory_equal(&first.at, &again.at, sizeof first.at);
    assert_int_equal(first.parent, 0);
    assert_int_equal(part.parent, first.at.span);
    assert_int_equal(part.at.high, first.at.high);
    assert_int_equal(part.at.low, first.at.low);
    assert_int_not_equal(part.at.span, first.at.span);
    assert_int_not_equal(other.at.high, first.at.high);
}

static void a_server_is_below_its_caller(void **state)
{
    trace_span lookup, pull, more;
    (void)state;
    assert_int_equal(persia_trace_start(1, ROOM), PERSIA_OK);
    persia_trace_begin(&lookup, TRACE_LOOKUP, 5, 6);
    persia_trace_below(&pull, TRACE_PULL, &lookup.at, persia_trace_now());
    persia_trace_below(&more, TRACE_PULL, &lookup.at, persia_trace_now());
    assert_int_equal(pull.parent, lookup.at.span);
    assert_int_equal(pull.at.high, lookup.at.high);
    assert_int_not_equal(pull.at.span, more.at.span);
    const wire_trace none = {0};
    persia_trace_below(&pull, TRACE_PULL, &none, persia_trace_now());
    assert_int_equal(pull.began, 0);
}

static void the_newest_are_dropped(void **state)
{
    trace_span t, out[ROOM];
    uint64_t dropped;
    (void)state;
    assert_int_equal(persia_trace_start(1, ROOM), PERSIA_OK);
    for (uint64_t i = 1; i <= ROOM + 3; i++) {
        persia_trace_begin(&t, TRACE_PUSH, 1, i);
        persia_trace_end(&t, i == 2 ? PERSIA_ETIMEOUT : PERSIA_OK);
    }
    assert_int_equal(persia_trace_take(out, 2, &dropped), 2);
    assert_int_equal(dropped, 3);
    assert_int_equal(out[0].number, 1);
    assert_int_equal(out[1].code, PERSIA_ETIMEOUT);
    persia_trace_part(TRACE_QUEUE, 1, 99, persia_trace_now(), 4, PERSIA_OK);
    assert_int_equal(taken(out, &dropped), ROOM - 1);
    assert_int_equal(out[0].number, 3);
    assert_int_equal(out[ROOM - 2].number, 99);
    assert_int_equal(out[ROOM - 2].attempt, 4);
    assert_true(out[ROOM - 2].began <= out[ROOM - 2].ended);
    assert_int_equal(taken(out, &dropped), 0);
    assert_int_equal(dropped, 3);
}

static void what_is_no_rate_is_refused(void **state)
{
    (void)state;
    assert_int_equal(persia_trace_start(1.5, ROOM), PERSIA_EARG);
    assert_int_equal(persia_trace_start(-1, ROOM), PERSIA_EARG);
    assert_int_equal(persia_trace_start(0.0 / 0.0, ROOM), PERSIA_EARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_share_of_batches_is_sampled, stop),
        cmocka_unit_test_teardown(without_a_rate_nothing_is, stop),
        cmocka_unit_test_teardown(processes_agree, stop),
        cmocka_unit_test_teardown(a_server_is_below_its_caller, stop),
        cmocka_unit_test_teardown(the_newest_are_dropped, stop),
        cmocka_unit_test_teardown(what_is_no_rate_is_refused, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
