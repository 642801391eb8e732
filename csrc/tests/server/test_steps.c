/* Calls that wait: parts of steps for each other, pulls for an
 * update. */
#include "tests/server/job.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void who_is_missing_is_named(void **state)
{
    (void)state;
    job *j = job_start();
    pending *a = send_part(j, 1, 1, LONG);
    pending *b = send_part(j, 0, 1, SECOND / 50);
    expect_error(b, PERSIA_ETIMEOUT, "step 1: the part of rank 2 did not");
    expect_error(a, PERSIA_ETIMEOUT, "rank 2");
    assert_true(value(j) == 0);
    assert_int_equal(ledger_of(&j->v, STREAM).watermark, 0);
    /* they may be sent again */
    pending *c[RANKS];
    for (uint32_t r = 0; r < RANKS; r++)
        c[r] = send_part(j, r, 1, LONG);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(push_wait(c[r]).status, PUSH_APPLIED);
    assert_true(value(j) == RANKS);
    wire_stats_reply stats = stats_of(&j->v);
    assert_int_equal(stats.step, 1);
    assert_int_equal(stats.updates, 1);
    assert_int_equal(stats.parked, 0);
    job_stop(j);
}

static void one_bad_part_fails_the_step(void **state)
{
    (void)state;
    job *j = job_start();
    float bad[N];
    memcpy(bad, j->grads, sizeof bad);
    bad[3] = (float)NAN;
    pending *a = send_part(j, 0, 1, LONG), *b = send_part(j, 2, 1, LONG);
    wire_push m = part_of(j, 1, 1);
    wire_push_table t = j->table;
    m.tables = &t;
    t.grads.values = bad;
    assert_int_equal(push_code(&j->v, &m), PERSIA_ENONFINITE);
    expect_error(a, PERSIA_ENONFINITE, "id 3 ");
    expect_error(b, PERSIA_ENONFINITE, "id 3 ");
    assert_int_equal(stats_of(&j->v).step, 0);
    /* settings that contradict each other */
    t = j->table;
    t.hyper.lr = 0.5f;
    a = send_part(j, 0, 1, LONG);
    b = send_part(j, 2, 1, LONG);
    assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
    expect_error(a, PERSIA_EARG, "table a: ranks 0 and 1 of step 1");
    expect_error(b, PERSIA_EARG, "(lr 1 and 0.5, factor");
    /* two ranks with one stream */
    m = part_of(j, 1, 1);
    m.stream = STREAM;
    a = send_part(j, 0, 1, LONG);
    b = send_part(j, 2, 1, LONG);
    assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
    expect_error(a, PERSIA_EARG, "needs a stream of its own");
    expect_error(b, PERSIA_EARG, "needs a stream of its own");
    assert_true(value(j) == 0);
    /* and after all that: a step */
    a = send_part(j, 0, 1, LONG);
    b = send_part(j, 2, 1, LONG);
    pending *c = send_part(j, 1, 1, LONG);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    assert_int_equal(push_wait(c).status, PUSH_APPLIED);
    assert_true(value(j) == RANKS);
    job_stop(j);
}

/* Its sender waits for the one before, and sends it again. */
static void a_copy_of_a_part_comes_late(void **state)
{
    (void)state;
    job *j = job_start();
    pending *a = send_part(j, 0, 1, LONG), *late = send_part(j, 0, 1, LONG);
    expect_error(a, PERSIA_EUNAVAILABLE, "arrived again");
    a = send_part(j, 0, 1, LONG);
    expect_error(late, PERSIA_EUNAVAILABLE, "arrived again");
    pending *b = send_part(j, 1, 1, LONG), *c = send_part(j, 2, 1, LONG);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    assert_int_equal(push_wait(c).status, PUSH_APPLIED);
    assert_true(value(j) == RANKS);
    /* but one of another stream is of another process */
    a = send_part(j, 0, 2, LONG);
    wire_push m = part_of(j, 0, 2);
    m.stream = STREAM + RANKS;
    b = push_start(&j->v, &m, SECOND / 50);
    expect_error(a, PERSIA_ECLOSED, "arrived again");
    expect_error(b, PERSIA_ETIMEOUT, "ranks 1, 2");
    job_stop(j);
}

static void ranks_come_and_go(void **state)
{
    (void)state;
    job *j = job_start();
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(join(&j->v, r, RANKS, 1, 0), 0);
    pending *a = send_part(j, 0, 1, LONG), *b = send_part(j, 2, 1, LONG);
    assert_int_equal(join(&j->v, 1, RANKS, 0, 0), 1); /* it ends early */
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    assert_true(value(j) == 2);
    wire_push m = part_of(j, 1, 2);
    assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "rank 1 has left"));
    /* rank 0 begins again: what it sent before is void */
    a = send_part(j, 0, 2, LONG);
    assert_int_equal(join(&j->v, 0, RANKS, 1, 1), 1);
    expect_error(a, PERSIA_ECLOSED, "rank 0 joined");
    /* another world: everything is */
    a = send_part(j, 2, 2, LONG);
    assert_int_equal(join(&j->v, 0, 2, 1, 1), 1);
    expect_error(a, PERSIA_ECLOSED, "rank 0 joined");
    /* this shard missed steps that others had */
    assert_int_equal(join(&j->v, 1, 2, 1, 7), 7);
    wire_push gone = part_of(j, 0, 7);
    gone.parts = 2;
    assert_int_equal(push(&j->v, &gone).status, PUSH_LOST);
    wire_push p = part_of(j, 0, 8), q = part_of(j, 1, 8);
    p.parts = q.parts = 2;
    a = push_start(&j->v, &p, LONG);
    assert_int_equal(push(&j->v, &q).status, PUSH_APPLIED);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_true(value(j) == 4);
    assert_int_equal(stats_of(&j->v).step, 8);
    /* and one learns so while another waits with its part */
    gone = part_of(j, 0, 9);
    gone.parts = 2;
    a = push_start(&j->v, &gone, LONG);
    assert_int_equal(join(&j->v, 1, 2, 1, 9), 9);
    assert_int_equal(push_wait(a).status, PUSH_LOST);
    assert_true(value(j) == 4);
    job_stop(j);
}

static void say_move(const job *j, uint64_t client, uint32_t joins,
                     uint32_t move)
{
    wire_leave m = {.caller = caller_of(&j->v), .rank = 1, .world = RANKS,
                    .joins = joins, .move = move};
    m.caller.client = client;
    result r = CALL(&j->v, LEAVE, leave, &m);
    assert_int_equal(r.code, PERSIA_OK);
    result_free(&r);
}

/* Rank 1 gave up saying that it leaves, and joined; then the server got round
 * to what it had said. */
static void what_a_rank_said_before_does_not_count(void **state)
{
    enum { LATER = 2 };
    (void)state;
    job *j = job_start();
    say_move(j, 1, 1, LATER);
    say_move(j, 1, 0, 1);
    pending *a = send_part(j, 0, 1, LONG), *b = send_part(j, 2, 1, LONG);
    wire_push m = part_of(j, 1, 1);
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    pending *c = send_part(j, 1, 2, LONG);
    say_move(j, 1, 1, LATER); /* it arrives twice: the part stays */
    a = send_part(j, 0, 2, LONG);
    b = send_part(j, 2, 2, LONG);
    assert_int_equal(push_wait(c).status, PUSH_APPLIED);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    say_move(j, 1, 0, LATER); /* the same, once more: it is heeded */
    m = part_of(j, 1, 3);
    assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
    say_move(j, 1, 1, LATER + 1);
    say_move(j, 2, 0, 1); /* another client counts on its own */
    assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
    job_stop(j);
}

/* A shard that was started again: ranks 1 and 2 have left, says rank 0. */
static void who_has_left_is_told_by_who_goes_on(void **state)
{
    (void)state;
    job *j = job_start();
    uint64_t left[] = {0, 1, 2, RANKS, 1 << 20, UINT64_MAX};
    wire_leave m = {.caller = caller_of(&j->v), .world = RANKS, .joins = 1,
                    .step = 4, .left = left, .left_n = 6};
    pending *a = send_part(j, 0, 5, LONG);
    result r = CALL(&j->v, LEAVE, leave, &m);
    result_free(&r);
    expect_error(a, PERSIA_ECLOSED, "rank 0 joined");
    wire_push p = part_of(j, 0, 5);
    a = push_start(&j->v, &p, LONG);
    result one = call_wait(a);
    wire_push_reply reply;
    wire_memory memory;
    persia_wire_memory_init(&memory);
    assert_int_equal(
        persia_wire_get_push_reply(one.data, one.n, &memory, &reply),
        PERSIA_OK);
    assert_int_equal(reply.status, PUSH_APPLIED);
    assert_int_equal(reply.left_n, 2);
    assert_true(reply.left[0] == 1 && reply.left[1] == 2);
    persia_wire_memory_free(&memory);
    result_free(&one);
    /* One of them says something else. */
    assert_int_equal(join(&j->v, 2, RANKS, 1, 5), 5);
    r = CALL(&j->v, LEAVE, leave, &m);
    result_free(&r);
    a = send_part(j, 0, 6, LONG);
    assert_int_equal(stats_of(&j->v).step, 5);
    wire_push q = part_of(j, 2, 6);
    assert_int_equal(push(&j->v, &q).status, PUSH_APPLIED);
    assert_int_equal(push_wait(a).status, PUSH_APPLIED);
    job_stop(j);
}

/* Rank 0 was killed and is there again. */
static void parts_of_a_process_before_are_not_applied(void **state)
{
    (void)state;
    job *j = job_start();
    pending *a = send_part(j, 0, 1, LONG), *b = send_part(j, 1, 1, LONG);
    wire_hello hello = {.caller = {.client = 2, .incarnation = 1},
                        .version = WIRE_VERSION,
                        .name_space = "test", .stream = STREAM};
    result r = CALL(&j->v, HELLO, hello, &hello);
    assert_int_equal(r.code, PERSIA_OK);
    result_free(&r);
    expect_error(a, PERSIA_EUNAVAILABLE, "another client");
    wire_push m = part_of(j, 0, 1);
    assert_int_equal(push_code(&j->v, &m), PERSIA_ECLOSED);
    pending *c = send_part(j, 2, 1, LONG);
    assert_false(call_done(b) || call_done(c));
    m.caller.client = 2;
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    assert_int_equal(push_wait(c).status, PUSH_APPLIED);
    assert_true(value(j) == RANKS);
    /* the one before does not return */
    hello.caller.client = 1;
    hello.rank = 0;
    wire_out o = ENCODED(hello, &hello);
    expect_error(call_start(&j->v, WIRE_HELLO, &o, LONG), PERSIA_ECLOSED,
                 "rank 0 of namespace 'test'");
    job_stop(j);
}

static int say_of_stream(const job *j, uint64_t client, uint64_t stream,
                         uint32_t joins)
{
    wire_leave m = {.caller = caller_of(&j->v), .rank = 0, .world = RANKS,
                    .joins = joins, .stream = stream};
    m.caller.client = client;
    result r = CALL(&j->v, LEAVE, leave, &m);
    int code = r.code;
    result_free(&r);
    return code;
}

/* Rank 0 has a successor, in its stream or as another job's: what it says then
 * moves no rank. */
static void a_late_leave_does_not_remove_the_successor(void **state)
{
    (void)state;
    job *j = job_start();
    wire_hello hello = {.caller = {.client = 2, .incarnation = 2},
                        .version = WIRE_VERSION,
                        .name_space = "test", .stream = STREAM};
    assert_int_equal(say_of_stream(j, 1, STREAM, 1), PERSIA_OK);
    result r = CALL(&j->v, HELLO, hello, &hello);
    result_free(&r);
    assert_int_equal(say_of_stream(j, 1, STREAM, 0), PERSIA_ECLOSED);
    assert_int_equal(say_of_stream(j, 1, STREAM, 1), PERSIA_ECLOSED);
    pending *b = send_part(j, 1, 1, LONG), *c = send_part(j, 2, 1, LONG);
    assert_false(call_done(b) || call_done(c));
    wire_push m = part_of(j, 0, 1);
    m.caller.client = m.caller.incarnation = 2;
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    assert_int_equal(push_wait(c).status, PUSH_APPLIED);
    /* the rank of another job */
    assert_int_equal(say_of_stream(j, 3, STREAM + RANKS, 1), PERSIA_OK);
    m.number = m.step = m.t = 2;
    m.stream = STREAM + RANKS;
    m.caller = caller_of(&j->v);
    b = send_part(j, 1, 2, LONG);
    c = send_part(j, 2, 2, LONG);
    assert_int_equal(say_of_stream(j, 1, STREAM + 7, 0), PERSIA_OK);
    assert_false(call_done(b) || call_done(c));
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    assert_int_equal(push_wait(b).status, PUSH_APPLIED);
    assert_int_equal(push_wait(c).status, PUSH_APPLIED);
    assert_true(value(j) == 2 * RANKS);
    job_stop(j);
}

static void one_rank_alone(void **state)
{
    (void)state;
    job *j = job_start();
    for (uint64_t step = 1; step <= 3; step++) {
        wire_push m = part_of(j, 0, step);
        m.parts = 1;
        assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
        assert_int_equal(push(&j->v, &m).status, PUSH_DUPLICATE);
    }
    assert_int_equal(stats_of(&j->v).step, 3);
    assert_true(value(j) == 3);
    job_stop(j);
}

/* A pull behind an update of rank 0. */
static pending *pull_after(job *j, uint64_t number, uint64_t timeout)
{
    wire_pull_table t = {0, N, j->ids};
    wire_pull m = {.caller = caller_of(&j->v), .stream = STREAM,
                   .after = number, .tables = &t, .tables_n = 1};
    wire_out o = ENCODED(pull, &m);
    return call_start(&j->v, WIRE_PULL, &o, timeout);
}

static void expect_row(pending *c, float value)
{
    wire_pull_reply reply;
    result r = call_wait(c);
    DECODE(&r, pull_reply, &reply);
    assert_true(((const float *)reply.tables[0].values)[0] == value);
    result_free(&r);
}

static void pulls_wait_for_a_step(void **state)
{
    (void)state;
    job *j = job_start();
    pending *first = pull_after(j, 1, LONG), *second = pull_after(j, 2, LONG);
    pending *parts[RANKS];
    assert_int_equal(stats_of(&j->v).parked, 2);
    for (uint64_t step = 1; step <= 2; step++) {
        pending *waiting = step == 1 ? first : second;
        for (uint32_t r = 0; r < RANKS; r++) {
            assert_false(call_done(waiting));
            parts[r] = send_part(j, r, step, LONG);
        }
        for (uint32_t r = 0; r < RANKS; r++)
            assert_int_equal(push_wait(parts[r]).status, PUSH_APPLIED);
        assert_true(step == 2 || !call_done(second));
        expect_row(waiting, (float)(step * RANKS));
    }
    pending *now = pull_after(j, 2, LONG);
    assert_true(call_done(now));
    expect_row(now, 2 * RANKS);
    job_stop(j);
}

static void pulls_wait_for_an_update(void **state)
{
    (void)state;
    job *j = job_start();
    pending *first = pull_after(j, 1, LONG), *third = pull_after(j, 3, LONG);
    wire_push m = push_of(&j->v, STREAM, 3, &j->table, 1);
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    expect_row(third, 1);
    assert_false(call_done(first));
    m = push_of(&j->v, STREAM, 1, &j->table, 1);
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    expect_row(first, 2);
    /* what is settled is not sent any more */
    m = push_of(&j->v, STREAM, 6, &j->table, 1);
    m.settled = 5;
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    expect_row(pull_after(j, 5, LONG), 3);
    job_stop(j);
}

static void pulls_do_not_wait_for_ever(void **state)
{
    (void)state;
    job *j = job_start();
    const char *text = "the update whose rows were asked for";
    expect_error(pull_after(j, 1, SECOND / 50), PERSIA_EUNAVAILABLE, text);
    j->grads[3] = (float)NAN;
    wire_push bad = push_of(&j->v, STREAM, 1, &j->table, 1);
    pending *one = pull_after(j, 1, LONG);
    assert_int_equal(push_code(&j->v, &bad), PERSIA_ENONFINITE);
    expect_error(one, PERSIA_EUNAVAILABLE, text);
    expect_error(pull_after(j, 1, LONG), PERSIA_EUNAVAILABLE, text);
    assert_int_equal(stats_of(&j->v).parked, 0);
    job_stop(j);
}

static void what_waits_is_bounded_and_closed(void **state)
{
    enum { MOST = 1024 };
    static pending *waiting[MOST];
    (void)state;
    job *j = job_start();
    waiting[0] = send_part(j, 2, 1, LONG);
    for (int i = 1; i < MOST; i++)
        waiting[i] = pull_after(j, 1, LONG);
    assert_int_equal(stats_of(&j->v).parked, MOST);
    expect_error(pull_after(j, 1, LONG), PERSIA_EUNAVAILABLE, "too many");
    pending *part = send_part(j, 1, 1, LONG); /* bounded by the ranks */
    assert_int_equal(stats_of(&j->v).parked, MOST + 1);
    persia_service_close(j->v.s);
    for (int i = 0; i < MOST; i++)
        expect_error(waiting[i], PERSIA_EUNAVAILABLE, "stopping");
    expect_error(part, PERSIA_EUNAVAILABLE, "stopping");
    expect_error(pull_after(j, 1, LONG), PERSIA_EUNAVAILABLE, "stopping");
    job_stop(j);
}

/* A server has so many requests, those that wait included. */
static void what_waits_leaves_room_for_updates(void **state)
{
    enum { CALLS = 8 };
    (void)state;
    job *j = job_start();
    pending *waiting[CALLS / 2];
    persia_service_set_calls(j->v.s, CALLS);
    for (int i = 0; i < CALLS / 2; i++)
        waiting[i] = pull_after(j, 1, LONG);
    expect_error(pull_after(j, 1, LONG), PERSIA_EUNAVAILABLE, "too many");
    persia_service_set_calls(j->v.s, 0);
    pending *more = pull_after(j, 1, LONG);
    wire_push m = push_of(&j->v, STREAM, 1, &j->table, 1);
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    for (int i = 0; i < CALLS / 2; i++)
        expect_row(waiting[i], 1);
    expect_row(more, 1);
    /* With many ranks all but one wait for the last. */
    persia_service_set_calls(j->v.s, CALLS);
    (void)join(&j->v, 0, CALLS - 1, 1, 0);
    more = pull_after(j, 2, LONG);
    expect_error(pull_after(j, 2, LONG), PERSIA_EUNAVAILABLE, "too many");
    m.number = 2;
    assert_int_equal(push(&j->v, &m).status, PUSH_APPLIED);
    expect_row(more, 2);
    wire_leave all = {.caller = caller_of(&j->v), .world = CALLS + 1,
                      .joins = 1};
    result r = CALL(&j->v, LEAVE, leave, &all);
    assert_int_equal(r.code, PERSIA_ELIMIT);
    assert_non_null(strstr(r.text, "--calls"));
    result_free(&r);
    job_stop(j);
}

/* A copy of a part, sent as an update of its own again and again. */
typedef struct copies {
    job *j;
    atomic_int stop;
    int lost; /* one was not answered */
} copies;

static void *copies_run(void *arg)
{
    copies *c = arg;
    const float bad = (float)NAN; /* so it is never applied */
    const optim_hyper hyper = sgd(1);
    wire_push_table table = push_table(0, 1, 1, c->j->ids, &bad, &hyper);
    const wire_push m = push_of(&c->j->v, STREAM, 1, &table, 1);
    while (!atomic_load(&c->stop) && !c->lost) {
        pending *one = push_start(&c->j->v, &m, LONG);
        const uint64_t end = persia_clock_ns() + 20 * (uint64_t)SECOND;
        while (!call_done(one) && !c->lost) {
            sched_yield();
            c->lost = persia_clock_ns() > end;
        }
        if (!c->lost) {
            result r = call_wait(one);
            result_free(&r);
        }
    }
    return NULL;
}

/* A step whose last part is the same update as the second one fails.  Copies
 * of the first one, which had begun, are answered with it. */
static void copies_of_a_step_that_fails_are_answered(void **state)
{
    enum { PARTS = 900, ROUNDS = SANITIZED ? 3 : 10 };
    (void)state;
    job *j = job_start();
    pending *waiting[PARTS];
    pthread_t thread;
    for (uint64_t step = 1; step <= ROUNDS; step++) {
        copies c = {.j = j};
        wire_push m = part_of(j, 0, step);
        m.parts = PARTS;
        for (m.part = 0; m.part < PARTS - 1; m.part++) {
            m.number = m.part + 1;
            waiting[m.part] = push_start(&j->v, &m, LONG);
        }
        assert_int_equal(pthread_create(&thread, NULL, copies_run, &c), 0);
        m.number = 2;
        assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
        for (int i = 0; i < PARTS - 1; i++)
            expect_error(waiting[i], PERSIA_EARG, "a stream of its own");
        atomic_store(&c.stop, 1);
        pthread_join(thread, NULL);
        assert_false(c.lost);
    }
    assert_int_equal(stats_of(&j->v).parked, 0);
    assert_int_equal(stats_of(&j->v).updates, 0);
    job_stop(j);
}

static int hello_code(job *j, uint64_t stream, uint64_t incarnation)
{
    wire_hello m = {.caller = {.client = 1, .incarnation = incarnation},
                    .version = WIRE_VERSION,
                    .name_space = "test",
                    .stream = stream};
    result r = CALL(&j->v, HELLO, hello, &m);
    const int code = r.code;
    result_free(&r);
    return code;
}

static int join_code(job *j, uint64_t step)
{
    wire_leave m = {.caller = caller_of(&j->v), .world = RANKS, .joins = 1,
                    .step = step};
    result r = CALL(&j->v, LEAVE, leave, &m);
    const int code = r.code;
    result_free(&r);
    return code;
}

/* Numbers that no job reaches would leave none for later clients. */
static void absurd_numbers_are_refused(void **state)
{
    const uint64_t absurd = UINT64_MAX - 1;
    (void)state;
    job *j = job_start();
    wire_push m = part_of(j, 0, absurd); /* a step of one rank */
    m.number = m.t = 1;
    m.parts = 1;
    assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
    assert_int_equal(join_code(j, absurd), PERSIA_EARG);
    m = push_of(&j->v, STREAM, absurd, &j->table, 1);
    m.settled = absurd - 1;
    assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
    m = push_of(&j->v, STREAM, 1, &j->table, 1);
    m.t = absurd;
    assert_int_equal(push_code(&j->v, &m), PERSIA_EARG);
    assert_int_equal(hello_code(j, STREAM, absurd), PERSIA_EARG);
    assert_int_equal(hello_code(j, STREAM + 100, absurd), PERSIA_EARG);
    assert_int_equal(stats_of(&j->v).updates, 0);
    assert_int_equal(ledger_of(&j->v, STREAM).watermark, 0);
    /* As many as a server may have lost are fine. */
    const uint64_t far = WIRE_LEAP / 2;
    assert_int_equal(join(&j->v, 0, RANKS, 1, far), far);
    pending *c[RANKS];
    for (uint32_t r = 0; r < RANKS; r++) {
        m = part_of(j, r, far + 1);
        m.settled = far;
        c[r] = push_start(&j->v, &m, LONG);
    }
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(push_wait(c[r]).status, PUSH_APPLIED);
    assert_int_equal(stats_of(&j->v).step, far + 1);
    assert_int_equal(ledger_of(&j->v, STREAM).watermark, far + 1);
    assert_int_equal(hello_code(j, STREAM, far), PERSIA_OK);
    job_stop(j);
}

/* Ranks as threads: random pauses, resends and time-outs that are too short;
 * every step is applied once. */
enum { STEPS = SANITIZED ? 60 : 250 };

typedef struct rank_thread {
    job *j;
    uint32_t rank;
    pthread_barrier_t *round;
} rank_thread;

static void *rank_run(void *arg)
{
    rank_thread *t = arg;
    rng g = {t->rank * 1000000};
    for (uint64_t step = 1; step <= STEPS; step++) {
        int through = 0;
        while (!through) {
            pending *calls[3];
            int n = 1 + (int)rng_below(&g, 3);
            for (int i = 0; i < n; i++)
                calls[i] = send_part(t->j, t->rank, step,
                                     rng_below(&g, 10) ? LONG
                                                       : SECOND / 2000);
            for (int i = 0; i < n; i++) {
                result r = call_wait(calls[i]);
                wire_push_reply reply;
                if (r.code == PERSIA_OK) {
                    DECODE(&r, push_reply, &reply);
                    through = 1;
                    if (reply.status > PUSH_DUPLICATE)
                        return arg;
                } else if (r.code != PERSIA_EUNAVAILABLE &&
                           r.code != PERSIA_ETIMEOUT) {
                    fprintf(stderr, "%s\n", r.text);
                    return arg;
                }
                result_free(&r);
            }
        }
        pthread_barrier_wait(t->round); /* all ranks are through */
    }
    return NULL;
}

static void ranks_as_threads(void **state)
{
    (void)state;
    job *j = job_start();
    pthread_t threads[RANKS];
    rank_thread ranks[RANKS];
    pthread_barrier_t round;
    pthread_barrier_init(&round, NULL, RANKS);
    for (uint32_t r = 0; r < RANKS; r++) {
        ranks[r] = (rank_thread){j, r, &round};
        assert_int_equal(
            pthread_create(&threads[r], NULL, rank_run, &ranks[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) {
        void *failed;
        pthread_join(threads[r], &failed);
        assert_null(failed);
    }
    pthread_barrier_destroy(&round);
    assert_true(value(j) == RANKS * STEPS);
    const wire_stats_reply stats = stats_of(&j->v);
    assert_true(stats.step == STEPS && stats.updates == STEPS);
    assert_int_equal(stats.parked, 0);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(ledger_of(&j->v, STREAM + r).watermark, STEPS);
    job_stop(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_is_missing_is_named),
        cmocka_unit_test(one_bad_part_fails_the_step),
        cmocka_unit_test(a_copy_of_a_part_comes_late),
        cmocka_unit_test(ranks_come_and_go),
        cmocka_unit_test(what_a_rank_said_before_does_not_count),
        cmocka_unit_test(who_has_left_is_told_by_who_goes_on),
        cmocka_unit_test(parts_of_a_process_before_are_not_applied),
        cmocka_unit_test(a_late_leave_does_not_remove_the_successor),
        cmocka_unit_test(one_rank_alone),
        cmocka_unit_test(pulls_wait_for_a_step),
        cmocka_unit_test(pulls_wait_for_an_update),
        cmocka_unit_test(pulls_do_not_wait_for_ever),
        cmocka_unit_test(what_waits_is_bounded_and_closed),
        cmocka_unit_test(what_waits_leaves_room_for_updates),
        cmocka_unit_test(copies_of_a_step_that_fails_are_answered),
        cmocka_unit_test(absurd_numbers_are_refused),
        cmocka_unit_test(ranks_as_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
