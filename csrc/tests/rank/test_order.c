/* The order of Takes: one that is made again is where it was. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "rank/private.h"

static void a_take_that_is_made_again_is_where_it_was(void **state)
{
    (void)state;
    rank_taker r = {.ordered = 0};
    rank_taken t[3] = {{.r = &r}, {.r = &r}, {.r = &r}};
    pthread_mutex_init(&r.lock, NULL);
    persia_cond_init(&r.turned);
    order_enter(&t[0]);
    order_enter(&t[1]);
    order_leave(&t[0]);
    assert_ptr_equal(r.takes, &t[1]);
    order_enter(&t[2]);
    order_enter(&t[0]);
    order_enter(&t[0]);
    assert_ptr_equal(r.takes, &t[0]);
    assert_ptr_equal(t[0].takes_next, &t[1]);
    assert_ptr_equal(t[1].takes_next, &t[2]);
    assert_null(t[2].takes_next);
    pthread_mutex_lock(&r.lock);
    taking_event(&t[0], TAKING_ASK);
    pthread_mutex_unlock(&r.lock);
    t[0].m.status = TAKE_BATCH;
    assert_int_equal(order_settle(&t[0]), 1);
    for (int i = 0; i < 3; i++)
        order_leave(&t[i]);
    assert_null(r.takes);
    pthread_cond_destroy(&r.turned);
    pthread_mutex_destroy(&r.lock);
}

static void a_batch_that_two_workers_give_is_held_once(void **state)
{
    (void)state;
    rank_taker r = {.ordered = 0};
    rank_taken t[3] = {{.r = &r, .m = {.stream = 7, .number = 40}},
                       {.r = &r, .m = {.stream = 7, .number = 40}},
                       {.r = &r, .m = {.stream = 8, .number = 40}}};
    pthread_mutex_init(&r.lock, NULL);
    assert_int_equal(pass_hold(&t[0]), 1);
    assert_int_equal(pass_hold(&t[1]), 0);
    assert_int_equal(pass_hold(&t[2]), 1);
    for (int i = 0; i < 3; i++)
        pass_held_event(&t[i], HELD_DROP);
    assert_null(r.held);
    assert_int_equal(pass_hold(&t[1]), 1);
    pass_held_event(&t[1], HELD_DROP);
    pthread_mutex_destroy(&r.lock);
}

/* Workers know which Takes have ended, but not while a batch that is on its
 * way back would seem forgotten. */
static void the_oldest_take_is_known_when_all_is_listed(void **state)
{
    (void)state;
    rank_taker r = {.number = 9};
    rank_taken t[2] = {{.r = &r, .number = 7}, {.r = &r, .number = 8}};
    pthread_mutex_init(&r.lock, NULL);
    persia_cond_init(&r.turned);
    assert_int_equal(order_oldest(&r, 0), 10);
    order_enter(&t[0]);
    order_enter(&t[1]);
    assert_int_equal(order_oldest(&r, 0), 7);
    order_leave(&t[0]);
    assert_int_equal(order_oldest(&r, 0), 8);
    order_enter(&t[0]);
    assert_int_equal(t[0].number, 10);
    pass_hold(&t[1]);
    assert_int_equal(order_oldest(&r, 0), 0);
    assert_int_equal(order_oldest(&r, 1), 8);
    pass_give_back(&t[1]);
    assert_int_equal(order_oldest(&r, 0), 0);
    pass_gave_back(&r);
    assert_int_equal(order_oldest(&r, 0), 8);
    order_leave(&t[0]);
    order_leave(&t[1]);
    pthread_cond_destroy(&r.turned);
    pthread_mutex_destroy(&r.lock);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_take_that_is_made_again_is_where_it_was),
        cmocka_unit_test(a_batch_that_two_workers_give_is_held_once),
        cmocka_unit_test(the_oldest_take_is_known_when_all_is_listed),
    };
    return cmocka_run_group_tests_name("rank: order", tests, NULL, NULL);
}
