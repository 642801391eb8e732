/* Parts of steps: when a step is whole, which ranks are missing, what is
 * void. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "shard/sync.h"

static int part[SYNC_RANKS + 1];

static int add(sync_steps *s, uint64_t step, uint32_t rank, uint32_t parts)
{
    void *replaced;
    int rc = sync_add(s, step, rank, parts, &part[rank], &replaced);
    assert_null(replaced);
    return rc;
}

static void take(sync_steps *s, int apply, const char *ranks)
{
    uint32_t n;
    void **all = sync_take(s, apply, &n);
    assert_int_equal(n, strlen(ranks));
    for (uint32_t i = 0; i < n; i++)
        assert_ptr_equal(all[i], &part[ranks[i] - '0']);
    free(all);
}

static void move(sync_steps *s, uint32_t rank, uint32_t world, int joins,
                 uint64_t step, const char *ranks)
{
    uint32_t n;
    void **all = sync_move(s, rank, world, joins, step, &n);
    assert_int_equal(n, strlen(ranks));
    for (uint32_t i = 0; i < n; i++)
        assert_ptr_equal(all[i], &part[ranks[i] - '0']);
    free(all);
}

static void a_step_waits_for_all_ranks(void **state)
{
    (void)state;
    sync_steps s;
    sync_init(&s);
    for (uint64_t step = 1; step <= 3; step++) {
        assert_int_equal(add(&s, step, 2, 3), PERSIA_OK);
        assert_int_equal(add(&s, step, 0, 3), PERSIA_OK);
        assert_false(sync_complete(&s));
        assert_int_equal(add(&s, step, 1, 3), PERSIA_OK);
        assert_true(sync_complete(&s));
        take(&s, 1, "012");
        assert_int_equal(s.applying, step);
        assert_false(sync_complete(&s));
        sync_applied(&s, step);
        assert_int_equal(s.step, step);
    }
    sync_free(&s);
}

static void a_part_that_comes_again_replaces(void **state)
{
    (void)state;
    sync_steps s;
    void *replaced;
    sync_init(&s);
    assert_int_equal(add(&s, 1, 1, 2), PERSIA_OK);
    assert_int_equal(sync_add(&s, 1, 1, 2, &part[5], &replaced), PERSIA_OK);
    assert_ptr_equal(replaced, &part[1]);
    assert_false(sync_complete(&s));
    assert_int_equal(add(&s, 1, 0, 2), PERSIA_OK);
    assert_true(sync_complete(&s));
    take(&s, 0, "05");
    sync_free(&s);
}

static void what_is_refused(void **state)
{
    (void)state;
    sync_steps s;
    sync_init(&s);
    assert_int_equal(add(&s, 1, 2, 2), PERSIA_EARG);
    assert_int_equal(add(&s, 1, 0, 0), PERSIA_EARG);
    assert_int_equal(add(&s, 1, 0, SYNC_RANKS + 1), PERSIA_EARG);
    s.step = 9;
    assert_int_equal(add(&s, 9, 0, 2), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "step 9 was applied"));
    assert_int_equal(add(&s, 12, 0, 2), PERSIA_OK); /* it missed some */
    assert_int_equal(add(&s, 11, 1, 2), PERSIA_EARG);
    assert_int_equal(add(&s, 13, 1, 2), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "send step 12"));
    assert_int_equal(add(&s, 12, 1, 3), PERSIA_EARG);
    assert_int_equal(add(&s, 12, 1, 2), PERSIA_OK);
    take(&s, 1, "01");
    assert_int_equal(add(&s, 12, 1, 2), PERSIA_EARG); /* is being applied */
    assert_int_equal(add(&s, 13, 1, 2), PERSIA_OK);
    assert_int_equal(add(&s, 13, 0, 2), PERSIA_OK);
    assert_false(sync_complete(&s)); /* not before 12 is through */
    sync_failed(&s);
    assert_true(sync_complete(&s));
    take(&s, 0, "01");
    assert_int_equal(add(&s, 12, 1, 2), PERSIA_OK); /* it failed: again */
    take(&s, 0, "1");
    sync_free(&s);
}

static void infer(sync_steps *s, uint64_t step, uint32_t rank,
                  const char *want)
{
    uint32_t n;
    void **all = sync_infer(s, step, rank, 3, &n);
    assert_int_equal(n, strlen(want));
    for (uint32_t i = 0; i < n; i++)
        assert_ptr_equal(all[i], &part[want[i] - '0']);
    free(all);
}

static void another_life_had_answered_a_rank(void **state)
{
    (void)state;
    sync_steps s;
    sync_init(&s);
    s.step = 5; /* of a checkpoint */
    infer(&s, 8, 0, "");
    assert_int_equal(add(&s, 8, 0, 3), PERSIA_OK);
    assert_int_equal(add(&s, 8, 2, 3), PERSIA_OK);
    infer(&s, 8, 1, "");
    infer(&s, 9, 0, ""); /* which has had no answer to 8 */
    infer(&s, UINT64_MAX, 1, "");
    assert_int_equal(s.missed, 0);
    infer(&s, 7, 1, ""); /* the others had theirs, so they send 8 */
    assert_int_equal(s.missed, 7);
    infer(&s, 9, 1, "02"); /* and this one had its answer to 8 */
    assert_int_equal(s.missed, 8);
    assert_int_equal(s.pending, 0);
    for (uint32_t r = 0; r < 3; r++)
        assert_int_equal(add(&s, 9, r, 3), PERSIA_OK);
    take(&s, 1, "012");
    sync_applied(&s, 9);
    /* This life knows what it has answered. */
    assert_int_equal(add(&s, 10, 0, 3), PERSIA_OK);
    infer(&s, 11, 1, "");
    assert_int_equal(add(&s, 11, 1, 3), PERSIA_EARG);
    take(&s, 0, "0");
    sync_free(&s);
}

/* It has all steps that were applied: a rank that is ahead was passed. */
static void a_log_misses_no_step(void **state)
{
    (void)state;
    enum { BEHIND_FIRST, AHEAD_FIRST, AHEAD_JOINS, WAYS };
    for (int way = 0; way < WAYS; way++) {
        sync_steps s;
        sync_init(&s);
        sync_applied(&s, 5); /* as the log is read */
        sync_begin(&s);
        if (way == AHEAD_FIRST) {
            assert_int_equal(add(&s, 7, 0, 3), PERSIA_OK);
            infer(&s, 6, 1, "0");
        } else if (way == AHEAD_JOINS) {
            move(&s, 0, 3, 1, 6, "");
        }
        assert_int_equal(add(&s, 6, 1, 3), PERSIA_OK);
        if (way == BEHIND_FIRST)
            infer(&s, 7, 0, "");
        assert_int_equal(add(&s, 7, 0, 3), PERSIA_EUNAVAILABLE);
        assert_int_equal(s.missed, 0);
        assert_int_equal(add(&s, 6, 2, 3), PERSIA_OK);
        assert_true(sync_complete(&s));
        take(&s, 1, "12");
        sync_applied(&s, 6);
        for (uint32_t r = 0; r < 3; r++)
            assert_int_equal(add(&s, 7, r, 3), PERSIA_OK);
        take(&s, 1, "012");
        sync_applied(&s, 7);
        assert_int_equal(add(&s, 8, 0, 3), PERSIA_OK);
        infer(&s, 9, 1, ""); /* this life knows whom it has passed */
        take(&s, 0, "0");
        sync_free(&s);
    }
}

/* Where all were passed in a step, none sends it. */
static void a_step_in_which_all_were_passed(void **state)
{
    (void)state;
    sync_steps s;
    sync_init(&s);
    sync_begin(&s);
    for (uint32_t r = 0; r < 2; r++)
        move(&s, r, 2, 1, r == 0, "");
    assert_int_equal(add(&s, 2, 1, 2), PERSIA_OK);
    assert_int_equal(add(&s, 2, 0, 2), PERSIA_OK);
    take(&s, 0, "01");
    sync_free(&s);
}

/* A worker sends the parts of a rank, which says itself that it joins: also to
 * a server that was started again, and has some of them by then. */
static void a_rank_joins_again_in_another_life(void **state)
{
    (void)state;
    enum { MINE = 7, MOVE = 3 };
    sync_mover by = {.client = MINE, .stream = 9, .move = MOVE, .joins = 1};
    sync_steps s;
    sync_init(&s);
    sync_note_client(&s, 0, MINE);
    assert_int_equal(sync_heed(&s, 0, &by), SYNC_AGAIN);
    assert_true(s.told[0]);
    assert_int_equal(sync_heed(&s, 0, &by), SYNC_AGAIN); /* a copy */
    by.move--;
    assert_int_equal(sync_heed(&s, 0, &by), SYNC_LATE);
    by.move += 2;
    assert_int_equal(sync_heed(&s, 0, &by), SYNC_MOVES);
    by.client++; /* its successor */
    assert_int_equal(sync_heed(&s, 0, &by), SYNC_MOVES);
    sync_note_client(&s, 1, MINE);
    assert_int_equal(sync_heed(&s, 1, &by), SYNC_MOVES);
    sync_free(&s);
}

static void a_part_that_is_there_is_not_waited_for(void **state)
{
    (void)state;
    sync_steps s;
    sync_init(&s);
    sync_pass(&s, 1, 0, 3);
    assert_int_equal(s.pending, 1);
    assert_int_equal(add(&s, 1, 2, 3), PERSIA_OK);
    assert_false(sync_complete(&s));
    assert_int_equal(add(&s, 2, 0, 3), PERSIA_EUNAVAILABLE);
    sync_pass(&s, 1, 2, 3); /* it waits */
    sync_pass(&s, 1, 1, 3);
    assert_true(sync_complete(&s));
    take(&s, 1, "2");
    sync_applied(&s, 1);
    sync_pass(&s, 1, 0, 3); /* a copy of what was applied */
    assert_int_equal(s.pending, 0);
    for (uint32_t r = 0; r < 3; r++)
        assert_int_equal(add(&s, 2, r, 3), PERSIA_OK);
    take(&s, 1, "012");
    sync_free(&s);
}

/* Where the parts that had to be sent fail, the ranks that were passed send
 * the next step, and the others this one again. */
static void a_rank_stays_passed_where_the_step_fails(void **state)
{
    (void)state;
    for (int fails = 0; fails < 2; fails++) {
        sync_steps s;
        sync_init(&s);
        sync_pass(&s, 1, 0, 3);
        assert_int_equal(add(&s, 1, 1, 3), PERSIA_OK);
        if (fails)
            sync_pass(&s, 1, 2, 3);
        assert_int_equal(sync_complete(&s), fails);
        take(&s, fails, "1");
        assert_int_equal(add(&s, 2, 0, 3), PERSIA_EUNAVAILABLE);
        if (fails)
            sync_failed(&s);
        assert_int_equal(add(&s, 2, 0, 3), PERSIA_EUNAVAILABLE);
        sync_pass(&s, 1, 2, 3);
        assert_int_equal(add(&s, 1, 1, 3), PERSIA_OK);
        assert_int_equal(add(&s, 2, 0, 3), PERSIA_EUNAVAILABLE);
        assert_true(sync_complete(&s));
        take(&s, 1, "1");
        sync_applied(&s, 1);
        assert_int_equal(add(&s, 2, 0, 3), PERSIA_OK);
        take(&s, 0, "0");
        sync_free(&s);
    }
}

/* A rank that was passed continues: its next parts are there, too, while the
 * first step waits for another rank. */
static void a_rank_is_passed_in_several_steps(void **state)
{
    (void)state;
    sync_steps s;
    sync_init(&s);
    for (uint64_t step = 1; step <= 3; step++)
        sync_pass(&s, step, 1, 3);
    sync_pass(&s, 1, 0, 3);
    assert_int_equal(s.pending, 1);
    assert_int_equal(add(&s, 4, 1, 3), PERSIA_EUNAVAILABLE);
    assert_int_equal(add(&s, 2, 0, 3), PERSIA_EUNAVAILABLE);
    assert_int_equal(add(&s, 1, 2, 3), PERSIA_OK);
    for (uint64_t step = 1; step <= 3; step++) {
        assert_true(sync_complete(&s));
        take(&s, 1, step == 1 ? "2" : "02");
        sync_applied(&s, step);
        assert_int_equal(add(&s, step + 1, 0, 3), PERSIA_OK);
        assert_int_equal(add(&s, step + 1, 2, 3), PERSIA_OK);
    }
    assert_false(sync_complete(&s)); /* step 4 */
    assert_int_equal(add(&s, 4, 1, 3), PERSIA_OK);
    take(&s, 0, "012");
    sync_free(&s);
}

/* Nothing is passed of a rank that begins again, nor of other rows; and it
 * waits for no rank that has left. */
static void a_rank_is_passed_no_longer(void **state)
{
    (void)state;
    sync_steps s;
    sync_init(&s);
    sync_pass(&s, 1, 0, 2);
    assert_int_equal(add(&s, 1, 1, 2), PERSIA_OK);
    assert_true(sync_complete(&s));
    take(&s, 0, "1");
    move(&s, 0, 2, 1, 0, "");
    assert_int_equal(add(&s, 1, 1, 2), PERSIA_OK);
    assert_false(sync_complete(&s));
    sync_pass(&s, 1, 0, 2);
    take(&s, 0, "1");
    sync_set_step(&s, 0);
    assert_int_equal(add(&s, 1, 1, 2), PERSIA_OK);
    assert_false(sync_complete(&s));
    sync_pass(&s, 1, 0, 2);
    take(&s, 0, "1");
    assert_int_equal(add(&s, 2, 0, 2), PERSIA_EUNAVAILABLE);
    move(&s, 1, 2, 0, 0, "");
    assert_int_equal(add(&s, 2, 0, 2), PERSIA_OK);
    take(&s, 0, "0");
    sync_free(&s);
}

static void ranks_leave_and_join(void **state)
{
    (void)state;
    sync_steps s;
    char text[100];
    sync_init(&s);
    assert_int_equal(add(&s, 1, 0, 3), PERSIA_OK);
    sync_missing(&s, text, sizeof text);
    assert_string_equal(text, "ranks 1, 2");
    move(&s, 2, 3, 0, 0, "");
    sync_missing(&s, text, sizeof text);
    assert_string_equal(text, "rank 1");
    assert_false(sync_complete(&s));
    assert_int_equal(add(&s, 1, 2, 3), PERSIA_EARG);
    move(&s, 1, 3, 0, 0, "");
    assert_true(sync_complete(&s));
    take(&s, 1, "0");
    sync_applied(&s, 1);
    /* its waiting part is void when a rank leaves or joins */
    assert_int_equal(add(&s, 2, 0, 3), PERSIA_OK);
    move(&s, 1, 3, 1, 1, "");
    assert_false(sync_complete(&s));
    move(&s, 0, 3, 1, 1, "0");
    assert_int_equal(s.pending, 0);
    assert_int_equal(add(&s, 2, 1, 3), PERSIA_OK);
    assert_int_equal(add(&s, 2, 0, 3), PERSIA_OK);
    move(&s, 0, 3, 0, 1, "0");
    assert_int_equal(s.n, 1);
    move(&s, 0, 3, 1, 0, "");
    assert_int_equal(add(&s, 2, 0, 3), PERSIA_OK);
    /* a rank with a later step, or another world, voids all */
    move(&s, 2, 3, 1, 2, "01");
    assert_int_equal(s.step, 2);
    assert_int_equal(add(&s, 3, 0, 3), PERSIA_OK);
    move(&s, 1, 2, 1, 2, "0");
    assert_int_equal(add(&s, 3, 0, 2), PERSIA_OK);
    assert_int_equal(add(&s, 3, 1, 2), PERSIA_OK);
    assert_true(sync_complete(&s));
    take(&s, 0, "01");
    sync_free(&s);
}

/* What others say of a rank counts until it speaks itself. */
static void ranks_hear_of_others(void **state)
{
    (void)state;
    sync_steps s;
    uint64_t left[3];
    sync_init(&s);
    assert_int_equal(sync_list_left(&s, 3, left, 3), 0);
    assert_int_equal(add(&s, 1, 0, 3), PERSIA_OK);
    sync_hear(&s, 0); /* its part is there */
    sync_hear(&s, 1);
    sync_hear(&s, 2);
    assert_true(sync_complete(&s));
    assert_int_equal(sync_list_left(&s, 3, left, 3), 2);
    assert_true(left[0] == 1 && left[1] == 2);
    assert_int_equal(sync_list_left(&s, 2, left, 3), 1);
    assert_int_equal(sync_list_left(&s, 3, left, 1), 1);
    move(&s, 2, 3, 1, 0, "");
    sync_hear(&s, 2);
    assert_false(sync_complete(&s));
    assert_int_equal(s.left_n, 1);
    move(&s, 2, 3, 0, 0, "");
    move(&s, 2, 3, 0, 0, "");
    assert_int_equal(s.left_n, 2);
    take(&s, 1, "0");
    sync_free(&s);
}

static void many_are_missing(void **state)
{
    (void)state;
    sync_steps s;
    char text[100], small[9];
    sync_init(&s);
    assert_int_equal(add(&s, 1, 3, 50), PERSIA_OK);
    sync_missing(&s, text, sizeof text);
    assert_string_equal(text, "ranks 0, 1, 2, 4, 5, 6, 7, 8 and 41 more");
    sync_missing(&s, small, sizeof small);
    assert_string_equal(small, "ranks 0,");
    take(&s, 0, "3");
    sync_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_waits_for_all_ranks),
        cmocka_unit_test(a_part_that_comes_again_replaces),
        cmocka_unit_test(what_is_refused),
        cmocka_unit_test(another_life_had_answered_a_rank),
        cmocka_unit_test(a_log_misses_no_step),
        cmocka_unit_test(a_step_in_which_all_were_passed),
        cmocka_unit_test(a_rank_joins_again_in_another_life),
        cmocka_unit_test(a_part_that_is_there_is_not_waited_for),
        cmocka_unit_test(a_rank_stays_passed_where_the_step_fails),
        cmocka_unit_test(a_rank_is_passed_in_several_steps),
        cmocka_unit_test(a_rank_is_passed_no_longer),
        cmocka_unit_test(ranks_leave_and_join),
        cmocka_unit_test(ranks_hear_of_others),
        cmocka_unit_test(many_are_missing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
