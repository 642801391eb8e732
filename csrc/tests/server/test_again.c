/* Parts of steps and groups of ranks and servers that were started again. */
#include "tests/server/job.h"

#include <math.h>
#include <sched.h>

/* An embedding worker sends a part again to a server that was started again;
 * the other rank had its answer before. */
static void a_part_whose_step_an_earlier_life_has_applied(void **state)
{
    (void)state;
    job *j = job_start();
    pending *a = send_part(j, 1, 7, LONG), *b = send_part(j, 2, 7, LONG);
    pending *c = send_part(j, 0, 8, LONG);
    assert_int_equal(push_wait(a).status, PUSH_LOST);
    assert_int_equal(push_wait(b).status, PUSH_LOST);
    a = send_part(j, 1, 8, LONG);
    wire_push late = part_of(j, 2, 7);
    assert_int_equal(push(&j->v, &late).status, PUSH_LOST);
    b = send_part(j, 2, 8, LONG);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    assert_int_equal(push_wait(c).status, PUSH_APPLIED);
    assert_true(value(j) == RANKS);
    assert_int_equal(stats_of(&j->v).parked, 0);
    job_stop(j);
}

/* Another server had lost the updates of two batches, so their ranks train
 * them once more, beside a new one of the third. */
static void a_step_with_batches_that_are_there(void **state)
{
    (void)state;
    job *j = job_start();
    pending *c[RANKS];
    for (uint32_t r = 0; r < RANKS; r++)
        c[r] = send_part(j, r, 1, LONG);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(push_wait(c[r]).status, PUSH_APPLIED);
    for (uint64_t step = 2; step < 4; step++) {
        pending *a = step == 2 ? send_part(j, 1, step, LONG) : NULL;
        for (uint32_t r = 0; r < RANKS; r++) {
            wire_push m = part_of(j, r, 1);
            m.step = m.t = step;
            if (r != 1 || !a)
                assert_int_equal(push(&j->v, &m).status, PUSH_DUPLICATE);
        }
        if (a)
            assert_int_equal(push_wait(a).status, PUSH_APPLIED);
        assert_int_equal(stats_of(&j->v).step, step);
    }
    assert_true(value(j) == RANKS + 1);
    job_stop(j);
}

/* The part of the third fails; the ranks of the others are a step ahead, then.
 */
static void a_step_with_batches_that_are_there_fails(void **state)
{
    (void)state;
    job *j = job_start();
    wire_push bad = part_of(j, 1, 1), ahead = part_of(j, 0, 2);
    float grads[N];
    memcpy(grads, j->grads, sizeof grads);
    grads[0] = NAN;
    for (uint32_t r = 0; r < RANKS; r += 2) {
        wire_push m = part_of(j, r, 1);
        m.step = 0; /* of a time before */
        m.parts = 1;
        m.part = 0;
        assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
        m = part_of(j, r, 1);
        assert_int_equal(push(&j->v, &m).status, PUSH_DUPLICATE);
    }
    wire_push_table t = j->table;
    t.grads.values = grads;
    bad.tables = &t;
    assert_int_equal(push_code(&j->v, &bad), PERSIA_ENONFINITE);
    assert_int_equal(push_code(&j->v, &ahead), PERSIA_EUNAVAILABLE);
    bad.tables = &j->table;
    assert_int_equal(push(&j->v, &bad).status, PUSH_APPLIED);
    pending *c[RANKS];
    for (uint32_t r = 0; r < RANKS; r++)
        c[r] = send_part(j, r, 2, LONG);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(push_wait(c[r]).status, PUSH_APPLIED);
    assert_true(value(j) == 2 * RANKS);
    job_stop(j);
}

/* A rank is two batches ahead of others. */
static void a_rank_with_several_batches_that_are_there(void **state)
{
    (void)state;
    job *j = job_start();
    enum { FAR = 1 };
    for (uint64_t step = 1; step <= 2; step++) {
        wire_push m = part_of(j, FAR, step);
        m.step = m.part = 0; /* of a time before */
        m.parts = 1;
        assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    }
    for (uint64_t step = 1; step <= 2; step++) {
        wire_push m = part_of(j, FAR, step);
        assert_int_equal(push(&j->v, &m).status, PUSH_DUPLICATE);
    }
    for (uint64_t step = 1; step <= 2; step++) {
        pending *a = send_part(j, 0, step, LONG);
        pending *b = send_part(j, 2, step, LONG);
        assert_int_equal(push_wait(a).status, PUSH_APPLIED);
        assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    }
    assert_true(value(j) == 6);
    job_stop(j);
}

/* It moves before the part of the third is there. */
static void a_step_with_a_batch_that_is_there_moves(void **state)
{
    (void)state;
    job *j = job_start(), *k = job_start();
    wire_push m = part_of(j, 0, 1), ahead = part_of(k, 0, 2);
    uint64_t *steps;
    size_t n;
    m.step = m.part = 0;
    m.parts = 1;
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    m = part_of(j, 0, 1);
    assert_int_equal(push(&j->v, &m).status, PUSH_DUPLICATE);
    assert_int_equal(persia_shard_steps(persia_service_shard(j->v.s), &steps,
                                        &n), PERSIA_OK);
    shard *to = persia_service_shard(k->v.s);
    for (size_t less = 0; less < n; less++)
        assert_int_equal(persia_shard_set_steps(to, steps, less), PERSIA_EARG);
    assert_int_equal(persia_shard_set_steps(to, steps, n), PERSIA_OK);
    free(steps);
    assert_int_equal(push_code(&k->v, &ahead), PERSIA_EUNAVAILABLE);
    pending *a = send_part(k, 1, 1, LONG), *b = send_part(k, 2, 1, LONG);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    job_stop(j);
    job_stop(k);
}

/* A process claims the stream of a rank. */
static void claim(const job *j, uint64_t stream, uint64_t client,
                  uint64_t incarnation)
{
    wire_hello m = {.caller = {.client = client, .incarnation = incarnation},
                    .version = WIRE_VERSION,
                    .name_space = "test",
                    .stream = stream};
    result r = CALL(&j->v, HELLO, hello, &m);
    assert_int_equal(r.code, PERSIA_OK);
    result_free(&r);
}

/* Embedding workers had sent some parts of its update. */
static void a_rank_is_replaced_within_an_update(void **state)
{
    (void)state;
    job *j = job_start();
    for (uint64_t turn = 0; turn < 2; turn++) {
        const uint64_t life = 1 + 2 * turn;
        wire_push m = part_of(j, 1, 7);
        m.shared = 1;
        m.maker = (wire_maker){77, 5, life};
        if (turn) {
            m.step = 0;
            m.group = 9;
        }
        claim(j, 77, 5, life);
        pending *a = push_start(&j->v, &m, LONG);
        while (!stats_of(&j->v).parked)
            sched_yield();
        claim(j, 77, 6, life + 1);
        expect_error(a, PERSIA_ECLOSED, "another process");
        assert_int_equal(push_code(&j->v, &m), PERSIA_ECLOSED); /* a retry */
        m.maker = (wire_maker){77, 6, life + 1};
        a = push_start(&j->v, &m, SECOND / 50);
        expect_error(a, PERSIA_ETIMEOUT, "");
    }
    assert_true(value(j) == 0);
    job_stop(j);
}

/* A server that was started again has the part of a rank, from its worker,
 * when the rank itself greets it. */
static void a_rank_greets_after_its_part(void **state)
{
    (void)state;
    job *j = job_start();
    enum { MINE = 5, ITS_STREAM = 77 };
    wire_push m = part_of(j, 1, 1);
    m.shared = 1;
    m.maker = (wire_maker){ITS_STREAM, MINE, 1};
    claim(j, ITS_STREAM, MINE, 1);
    pending *a = push_start(&j->v, &m, LONG);
    while (!stats_of(&j->v).parked)
        sched_yield();
    wire_leave joins = {.caller = caller_of(&j->v), .rank = 1, .world = RANKS,
                        .joins = 1, .move = 1, .stream = ITS_STREAM};
    joins.caller.client = MINE;
    joins.caller.incarnation = 1;
    result r = CALL(&j->v, LEAVE, leave, &joins);
    assert_int_equal(r.code, PERSIA_OK);
    result_free(&r);
    pending *b = send_part(j, 0, 1, LONG), *c = send_part(j, 2, 1, LONG);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    assert_int_equal(push_wait(c).status, PUSH_APPLIED);
    assert_true(value(j) == RANKS);
    job_stop(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_part_whose_step_an_earlier_life_has_applied),
        cmocka_unit_test(a_step_with_batches_that_are_there),
        cmocka_unit_test(a_step_with_batches_that_are_there_fails),
        cmocka_unit_test(a_rank_with_several_batches_that_are_there),
        cmocka_unit_test(a_step_with_a_batch_that_is_there_moves),
        cmocka_unit_test(a_rank_is_replaced_within_an_update),
        cmocka_unit_test(a_rank_greets_after_its_part),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
