/* Epochs of loaders, as a worker that may be new to them tells ranks. */
#include "tests/embedding_worker/world.h"

/* The answer to a Take of this epoch. */
static wire_take_reply answer_as(world *w, uint64_t client, uint64_t epoch,
                                 uint64_t number, wire_loader_part *part)
{
    wire_take_reply reply;
    pending *c = ask(w, client, epoch, number);
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, take_reply, &reply);
    *part = reply.loaders_n ? reply.loaders[0] : (wire_loader_part){0};
    end_call(c);
    return reply;
}

static wire_take_reply answer_to(world *w, uint64_t epoch, uint64_t number,
                                 wire_loader_part *part)
{
    return answer_as(w, 1, epoch, number, part);
}

/* What a worker that was started again learns of a loader that is in its
 * second epoch, of which batches 1 and 3 are done. */
static void beat_late(world *w, const wire_submit *more)
{
    uint64_t ends[1] = {3};
    const wire_heartbeat m = {.caller = caller(w, 77), .stream = 5,
                              .settled = 1, .epoch = 2, .first = 4,
                              .ends = ends, .ends_n = 1, .window = {2}};
    w->settled = 1;
    beat_as(w, &m);
    if (more)
        send_as(w, more);
}

static void a_new_worker_knows_what_is_missing(void **state)
{
    world *w = *state;
    wire_loader_part part;
    hello(w, 1);
    declare(w, "b");
    beat_late(w, NULL);
    wire_take_reply m = answer_to(w, 4, 1, &part);
    assert_int_equal(m.status, TAKE_END);
    assert_int_equal(part.stream, 5);
    assert_int_equal(part.settled, 1);
    assert_int_equal(part.last, 3);
    assert_int_equal(part.window[0] & 3, 2); /* 3, and not 2 */
    wire_submit moved = batch(w, 2);
    moved.epoch = 1;
    send_as(w, &moved);
    m = answer_to(w, 4, 2, &part);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.number, 2);
    assert_int_equal(m.epoch, 4);
    m = answer_to(w, 4, 3, &part);
    assert_int_equal(m.status, TAKE_END);
    assert_int_equal(part.window[0] & 3, 2); /* nor does the rank say it */
}

static void a_new_rank_begins_where_batches_are_left(void **state)
{
    world *w = *state;
    wire_loader_part part;
    hello(w, 1);
    declare(w, "b");
    wire_submit left = batch(w, 2);
    left.epoch = 1;
    left.settled = 1;
    beat_late(w, &left);
    wire_take_reply m = answer_to(w, 0, 1, &part);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.epoch, 4);
}

static void a_new_rank_gets_no_epoch_that_is_done(void **state)
{
    world *w = *state;
    wire_loader_part part;
    hello(w, 1);
    declare(w, "b");
    beat_late(w, NULL);
    wire_take_reply m = answer_to(w, 0, 1, &part); /* its loader sends 2 yet */
    assert_int_equal(m.status, TAKE_EMPTY);
    assert_int_equal(m.epoch, 0);
    w->settled = 3;
    beat(w, 2, 0);
    m = answer_to(w, 0, 2, &part);
    assert_int_equal(m.status, TAKE_EMPTY);
    assert_int_equal(m.epoch, 5);
}

/* Where no process is left of those that were in the epoch that follows. */
static void a_new_rank_has_no_epoch_of_a_process_before(void **state)
{
    world *w = *state;
    wire_loader_part part;
    hello(w, 1);
    declare(w, "b");
    beat_late(w, NULL);
    wire_take look = {.caller = caller(w, 1), .epoch = 5, .number = 1,
                      .look = 1};
    pending *c = START(w->s, TAKE, take, &look);
    assert_int_equal(wait_for(c), PERSIA_OK);
    end_call(c);
    hello(w, 2);
    wire_submit left = batch(w, 2);
    left.epoch = 1;
    wire_take_reply m = answer_as(w, 2, 0, 1, &part);
    assert_int_equal(m.epoch, 0);
    send_as(w, &left);
    m = answer_as(w, 2, 0, 2, &part);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.epoch, 4);
}

static void a_new_loader_has_the_epoch_of_the_ranks(void **state)
{
    world *w = *state;
    wire_loader_part part;
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1);
    beat(w, 2, 1); /* it has left before a rank asked */
    wire_take_reply m = answer_to(w, 7, 1, &part);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.epoch, 7);
    m = answer_to(w, 7, 2, &part);
    assert_int_equal(m.status, TAKE_END);
}

static void a_loader_that_waits_makes_ranks_look_elsewhere(void **state)
{
    world *w = *state;
    wire_loader_part part;
    const wire_heartbeat waits = {.caller = caller(w, 77), .stream = 5,
                                  .waits = 1};
    hello(w, 1);
    declare(w, "b");
    beat(w, 1, 0);
    wire_take_reply m = answer_to(w, 1, 1, &part);
    assert_int_equal(m.status, TAKE_EMPTY);
    beat_as(w, &waits);
    m = answer_to(w, 1, 2, &part);
    assert_int_equal(m.status, TAKE_IDLE);
    send_batch(w, 1); /* so it no longer waits */
    wire_take look = {.caller = caller(w, 1), .epoch = 1, .number = 3,
                      .look = 1};
    for (int i = 0; i < 2; i++) {
        pending *c = START(w->s, TAKE, take, &look);
        assert_int_equal(wait_for(c), PERSIA_OK);
        DECODE(c, take_reply, &m);
        assert_int_equal(m.status, i ? TAKE_BATCH : TAKE_EMPTY);
        end_call(c);
        beat_as(w, &waits);
    }
}

static void what_the_rank_has_in_hand_does_not_hold_it_up(void **state)
{
    world *w = *state;
    wire_batch_name held[1] = {{5, 1}};
    wire_take take = {.caller = caller(w, 1), .epoch = 1, .number = 1,
                      .held = held, .held_n = 1};
    wire_submit again = batch(w, 1);
    wire_take_reply m;
    again.attempt = 2; /* another worker had it, and died */
    hello(w, 1);
    declare(w, "b");
    send_as(w, &again);
    beat(w, 2, 0);
    pending *c = START(w->s, TAKE, take, &take);
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, take_reply, &m);
    assert_int_equal(m.status, TAKE_END);
    end_call(c);
    assert_int_equal(stats_of(w).withheld, 1);
}

/* They wait for each other's batch, to make one update of several. */
static void what_another_rank_has_in_hand_does_not_hold_it_up(void **state)
{
    world *w = *state;
    wire_loader_part part;
    wire_batch_name held[1] = {{5, 1}};
    wire_hello two = {.caller = {.client = 1},
                      .version = WIRE_VERSION,
                      .name_space = "test",
                      .world = 2};
    uint64_t ends[1] = {1};
    const wire_heartbeat over = {.caller = caller(w, 77), .stream = 5,
                                 .epoch = 2, .first = 1, .ends = ends,
                                 .ends_n = 1};
    wire_submit again = batch(w, 1);
    again.attempt = 2;
    for (uint32_t i = 0; i < 2; i++) {
        two.caller.client = i + 1;
        two.rank = i;
        hello_as(w, &two);
    }
    declare(w, "b");
    send_as(w, &again);
    beat_as(w, &over);
    wire_take_reply m = answer_to(w, 1, 1, &part);
    assert_int_equal(m.status, TAKE_EMPTY); /* nor that it has none */
    two.held = held;
    two.held_n = 1;
    hello_as(w, &two);
    m = answer_to(w, 1, 2, &part);
    assert_int_equal(m.status, TAKE_END);
    assert_int_equal(part.last, 1);
    assert_int_equal(part.window[0] & 1, 1);
}

/* What a Take by place of one of two ranks gets. */
static wire_take_reply take_place(world *w, uint32_t rank, uint64_t place)
{
    static uint64_t number;
    const wire_take take = {.caller = caller(w, rank + 1), .rank = rank,
                            .epoch = 1, .number = ++number, .place = place};
    wire_take_reply m;
    pending *c = START(w->s, TAKE, take, &take);
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, take_reply, &m);
    end_call(c);
    return m;
}

/* Servers are asked meanwhile about batches that were sent again. */
static uint64_t given_up_after_a_take(world *w)
{
    const struct timespec pause = {.tv_nsec = 500000000};
    (void)take_place(w, 0, 3);
    nanosleep(&pause, NULL);
    (void)take_place(w, 0, 3);
    return stats_of(w).given_up;
}

/* A rank that takes a later one next takes none before, but what it holds,
 * and the others wait until all of them are done.  Its Hello says so also to a
 * worker that was started again. */
static void a_batch_that_its_rank_has_passed_is_given_up(void **state)
{
    world *w = *state;
    uint32_t status;
    wire_batch_name held = {5, 2};
    wire_hello two = {.version = WIRE_VERSION, .name_space = "test",
                      .world = 2};
    wire_submit first = batch(w, 1), again = batch(w, 2);
    first.place = first.first = first.epoch = 1;
    again.place = again.attempt = 2;
    again.first = again.epoch = 1;
    for (uint32_t i = 0; i < 2; i++) {
        two.caller.client = i + 1;
        two.rank = i;
        hello_as(w, &two);
    }
    declare(w, "b");
    first.caller.boot = again.caller.boot = w->boot;
    send_as(w, &first);
    wire_take_reply m = take_place(w, 0, 1);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(give_back(w, 1, m.lease, RETURN_TRAINED, 2, &status),
                     PERSIA_OK);
    beat(w, 2, 0);
    assert_int_equal(take_place(w, 0, 3).status, TAKE_END);
    send_as(w, &again);
    assert_int_equal(given_up_after_a_take(w), 0);
    two.stays = 1;
    two.epoch = 1;
    two.place = 4;
    two.held = &held;
    two.held_n = 1;
    hello_as(w, &two);
    assert_int_equal(given_up_after_a_take(w), 0);
    two.held_n = 0;
    hello_as(w, &two);
    assert_int_equal(given_up_after_a_take(w), 1);
}

/* It was started when one of two loaders had left, and never sees the end of
 * the epoch: its batches are at ranks, and others are to know that. */
static void an_idle_worker_says_what_ranks_have(void **state)
{
    world w = {0};
    void *ended = &w;
    wire_loader_part part;
    (void)state;
    begin_with(&w, 1 << 20, 60 * SECOND);
    persia_embedding_worker_destroy(w.s);
    const embedding_worker_config config = {
        .servers = w.servers, .message_limit = 1 << 20, .queue_limit = 1 << 20,
        .lease_ns = 60 * SECOND, .silence_ns = 60 * SECOND, .loaders = 2,
        .jobs = 2};
    assert_int_equal(persia_embedding_worker_create(&config, &w.s), PERSIA_OK);
    uint64_t ends[1] = {1};
    wire_hello two = {.version = WIRE_VERSION, .name_space = "test",
                      .world = 2};
    for (uint32_t i = 0; i < 2; i++) {
        two.caller.client = i + 1;
        two.rank = i;
        hello_as(&w, &two);
    }
    declare(&w, "b");
    send_batch(&w, 1);
    const wire_heartbeat over = {.caller = caller(&w, 77), .stream = 5,
                                 .epoch = 2, .first = 1, .ends = ends,
                                 .ends_n = 1, .waits = 1};
    assert_int_equal(answer_as(&w, 2, 1, 1, &part).status, TAKE_BATCH);
    beat_as(&w, &over);
    assert_int_equal(answer_as(&w, 1, 1, 1, &part).status, TAKE_IDLE);
    assert_int_equal(part.stream, 5);
    assert_int_equal(part.last, 1);
    assert_int_equal(part.window[0] & 1, 1);
    finish_world(&ended);
}

/* Of two loaders one has ended and left.  Ranks that were started again begin
 * with an epoch of which the other one has nothing any more. */
static void a_loader_that_has_left_is_not_waited_for(void **state)
{
    world w = {0};
    void *ended = &w;
    wire_loader_part part;
    (void)state;
    begin_with(&w, 1 << 20, 60 * SECOND);
    persia_embedding_worker_destroy(w.s);
    const embedding_worker_config config = {
        .servers = w.servers, .message_limit = 1 << 20, .queue_limit = 1 << 20,
        .lease_ns = 60 * SECOND, .silence_ns = SECOND / 10, .loaders = 2,
        .jobs = 2};
    assert_int_equal(persia_embedding_worker_create(&config, &w.s), PERSIA_OK);
    uint64_t ends[1] = {1};
    hello(&w, 1);
    declare(&w, "b");
    wire_submit left = batch(&w, 2);
    left.epoch = 2;
    left.settled = 1;
    send_as(&w, &left);
    wire_take_reply m = {.status = TAKE_IDLE};
    for (uint64_t n = 1; n < 100 && m.status != TAKE_END; n++) {
        const struct timespec tick = {.tv_nsec = 20000000};
        const wire_heartbeat over = {.caller = caller(&w, 77), .stream = 5,
                                     .epoch = 2, .first = 1, .settled = 1,
                                     .ends = ends, .ends_n = 1, .waits = 1};
        beat_as(&w, &over);
        m = answer_to(&w, 1, n, &part);
        nanosleep(&tick, NULL);
    }
    assert_int_equal(m.status, TAKE_END);
    m = answer_to(&w, 2, 100, &part);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.number, 2);
    finish_world(&ended);
}

/* Its update was on its way when servers were asked, and no rank takes it any
 * more. */
static void a_batch_that_another_worker_trains_late_is_done(void **state)
{
    world *w = *state, other = *w;
    wire_submit again = batch(w, 1);
    uint32_t status;
    const embedding_worker_config config = {
        .servers = w->servers, .message_limit = 1 << 20,
        .queue_limit = 1 << 20, .lease_ns = 60 * SECOND,
        .silence_ns = 60 * SECOND, .loaders = 1, .jobs = 2};
    assert_int_equal(persia_embedding_worker_create(&config, &other.s),
                     PERSIA_OK);
    hello(&other, 1);
    declare(&other, "b");
    send_batch(&other, 1);
    uint64_t number;
    const uint64_t lease = lease_of(&other, 1, 1, &number);
    again.attempt = 2;
    send_as(w, &again);
    const struct timespec pause = {.tv_sec = 1};
    nanosleep(&pause, NULL);
    assert_int_equal(stats_of(w).queued, 1);
    assert_int_equal(give_back(&other, 1, lease, RETURN_TRAINED, 2, &status),
                     PERSIA_OK);
    for (int i = 0; i < 100 && stats_of(w).queued; i++) {
        const struct timespec tick = {.tv_nsec = 100000000};
        nanosleep(&tick, NULL);
    }
    assert_int_equal(stats_of(w).had, 1);
    persia_embedding_worker_destroy(other.s);
}

static void a_full_queue_has_room_for_an_earlier_epoch(void **state)
{
    world w = {0};
    void *ended = &w;
    uint32_t status;
    size_t done;
    (void)state;
    begin_with(&w, 1, 60 * SECOND);
    persia_embedding_worker_destroy(w.s);
    wire_out o;
    persia_wire_out_init(&o);
    wire_submit m = batch(&w, 2);
    m.caller.boot = 0;
    m.epoch = 2;
    m.first = 1;
    assert_int_equal(persia_wire_put_submit(&o, &m), PERSIA_OK);
    embedding_worker_config config = {.servers = w.servers,
                                      .message_limit = 1 << 20,
                                      .queue_limit = o.bytes + 8,
                                      .lease_ns = SECOND,
                                      .silence_ns = 60 * SECOND, .loaders = 1,
                                      .jobs = 2};
    persia_wire_out_free(&o);
    assert_int_equal(persia_embedding_worker_create(&config, &w.s), PERSIA_OK);
    send_as(&w, &m);
    m.number = 1;
    m.epoch = 1;
    send_as(&w, &m);
    m.number = 3;
    assert_int_equal(submit(&w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(status, SUBMIT_FULL);
    finish_world(&ended);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, finish_world)
    const struct CMUnitTest tests[] = {
        TEST(a_new_worker_knows_what_is_missing),
        TEST(a_new_rank_begins_where_batches_are_left),
        TEST(a_new_rank_gets_no_epoch_that_is_done),
        TEST(a_new_rank_has_no_epoch_of_a_process_before),
        TEST(a_new_loader_has_the_epoch_of_the_ranks),
        TEST(a_loader_that_waits_makes_ranks_look_elsewhere),
        TEST(what_the_rank_has_in_hand_does_not_hold_it_up),
        TEST(what_another_rank_has_in_hand_does_not_hold_it_up),
        TEST(a_batch_that_another_worker_trains_late_is_done),
        TEST(a_batch_that_its_rank_has_passed_is_given_up),
        cmocka_unit_test(an_idle_worker_says_what_ranks_have),
        cmocka_unit_test(a_loader_that_has_left_is_not_waited_for),
        cmocka_unit_test(a_full_queue_has_room_for_an_earlier_epoch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
