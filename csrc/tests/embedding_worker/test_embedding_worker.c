/* The embedding worker behind calls that need no network, over a shard in
 * this process: what it looks up and applies is what a client of that shard
 * looks up and applies. */
#include "batch/batch.h"
#include "pool/pool.h"
#include "tests/embedding_worker/world.h"

/* ---- what a client of the shard does ---- */

typedef struct direct {
    ps_client *c;
    batcher *w;
    uint32_t plan;
} direct;

static direct direct_begin(const world *w, uint32_t features)
{
    direct d;
    client_config config = w->servers;
    table_config table;
    uint32_t no;
    int created;
    plan_feature f[2] = {{"a", 0, 0, POOL_MEAN, 1}, {"b", 1, 0, POOL_SUM, 1}};
    config.stream = 99;
    persia_table_config_init(&table);
    table.spec = spec();
    assert_int_equal(persia_client_create(&config, &d.c), PERSIA_OK);
    assert_int_equal(persia_batcher_create(d.c, &d.w), PERSIA_OK);
    assert_int_equal(persia_client_declare(d.c, &table, &no, &created),
                     PERSIA_OK);
    assert_int_equal(
        persia_batcher_plan(d.w, PLAN_BAGS, KEYS, f, features, &d.plan),
        PERSIA_OK);
    return d;
}

static void direct_end(direct *d)
{
    persia_batcher_destroy(d->w);
    persia_client_destroy(d->c);
}

static const id_batch direct_batch = {IDS, SAMPLES, (const int64_t *)ids,
                                      (const int64_t *)offsets, NULL, NULL};

static void direct_rows(const direct *d, float *out)
{
    const uint64_t all[] = {1, 2, 5, 9};
    uint8_t found[4];
    assert_int_equal(persia_client_get(d->c, 0, 4, all, out, NULL, found),
                     PERSIA_OK);
}

/* ---- tests ---- */

static void a_batch_comes_with_its_embeddings(void **state)
{
    world *w = *state;
    pending *c;
    float want[SAMPLES * WIDTH];
    hello(w, 1);
    pending *early = ask(w, 1, 1, 1); /* before there is a batch, or a plan */
    send_batch(w, 1);
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    assert_int_equal(wait_for(early), PERSIA_OK);
    wire_take_reply m;
    DECODE(early, take_reply, &m);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.stream, 5);
    assert_int_equal(m.number, 1);
    assert_int_equal(m.samples, SAMPLES);
    assert_int_equal(m.tensors_n, 1);
    assert_string_equal(m.tensors[0].name, "dense");
    assert_memory_equal(m.tensors[0].data, bytes, 5);
    direct d = direct_begin(w, 2);
    assert_int_equal(persia_batcher_forward(d.w, d.plan, &direct_batch, 0,
                                            want, WIDTH, NULL, NULL),
                     PERSIA_OK);
    for (size_t f = 0; f < KEYS; f++)
        for (size_t s = 0; s < SAMPLES; s++)
            assert_memory_equal((const float *)m.values[f].values + s * DIM,
                                want + s * WIDTH + f * DIM,
                                DIM * sizeof *want);
    direct_end(&d);
    uint64_t lease = m.lease;
    end_call(early);
    m = take(w, 1, 1, &c); /* the same request gives the same batch */
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.lease, lease);
    assert_int_equal(m.number, 1);
    end_call(c);
}

static void check_grads(world *w, uint32_t features)
{
    world other;
    float grads[KEYS * SAMPLES * DIM], rows[SAMPLES * WIDTH];
    float got[4 * DIM], want[4 * DIM];
    uint64_t of;
    uint32_t status;
    batcher_counts counts;
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1);
    const uint64_t lease = lease_of(w, 1, 1, &of);
    assert_int_equal(give_back(w, 1, lease, RETURN_TRAINED, features, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_DONE);
    begin_with(&other, 1 << 20, SECOND); /* a shard of its own */
    direct d = direct_begin(&other, features);
    make_grads(grads);
    for (size_t f = 0; f < features; f++)
        for (size_t s = 0; s < SAMPLES; s++)
            memcpy(rows + s * features * DIM + f * DIM,
                   grads + (f * SAMPLES + s) * DIM, DIM * sizeof *rows);
    const batcher_grad g = {.plan = d.plan, .batch = direct_batch,
                            .grad = rows, .stride = features * DIM};
    const client_update update = {.number = 1, .parts = 1, .t = 7};
    optim_args optim = {.hyper = adam(), .step = 1};
    assert_int_equal(persia_batcher_backward(d.w, &g, 1, &update, &optim, 1,
                                             &counts),
                     PERSIA_OK);
    direct_rows(&d, want);
    direct_end(&d);
    void *ended = &other;
    finish_world(&ended);
    d = direct_begin(w, 2);
    direct_rows(&d, got);
    direct_end(&d);
    assert_memory_equal(got, want, sizeof got);

    assert_int_equal(give_back(w, 1, lease, RETURN_TRAINED, features, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_BEFORE);
    assert_int_equal(persia_tables_updates(w->tables), 1);
    assert_int_equal(stats_of(w).trained, 1);
    assert_int_equal(stats_of(w).bytes, 0);
}

static void gradients_are_applied_once(void **state)
{
    check_grads(*state, 2);
}

static void some_features_may_have_gradients(void **state)
{
    check_grads(*state, 1);
}

static void one_that_leaves_takes_no_more(void **state)
{
    world *w = *state;
    wire_submit_reply reply;
    wire_submit m;
    uint64_t of;
    uint32_t status;
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1);
    assert_int_equal(persia_embedding_worker_leave(w->s), 1);
    for (uint64_t number = 1; number <= 2; number++) {
        m = batch(w, number);
        pending *c = START(w->s, SUBMIT, submit, &m);
        assert_int_equal(wait_for(c), PERSIA_OK);
        DECODE(c, submit_reply, &reply);
        assert_int_equal(reply.status,
                         number == 1 ? SUBMIT_QUEUED : SUBMIT_FULL);
        assert_true(reply.leaving);
        end_call(c);
    }
    const uint64_t lease = lease_of(w, 1, 1, &of);
    assert_int_equal(persia_embedding_worker_leave(w->s), 1);
    assert_int_equal(give_back(w, 1, lease, RETURN_TRAINED, KEYS, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_DONE);
    assert_int_equal(persia_embedding_worker_leave(w->s), 0);
}

static void a_loader_hears_what_is_done(void **state)
{
    world *w = *state;
    uint64_t of;
    uint32_t status;
    size_t done;
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1);
    send_batch(w, 1); /* sent again */
    send_batch(w, 2);
    assert_int_equal(stats_of(w).submitted, 2);
    uint64_t first = lease_of(w, 1, 1, &of), second = lease_of(w, 1, 2, &of);
    assert_int_equal(of, 2);
    give_back(w, 1, second, RETURN_SKIPPED, 0, &status);
    wire_submit m = batch(w, 3);
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(done, 1);
    give_back(w, 1, first, RETURN_TRAINED, 2, &status);
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(done, 2);
    w->settled = 2;
    m = batch(w, 4);
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(done, 0);
    assert_int_equal(stats_of(w).skipped, 1);
}

static void a_batch_is_offered_again(void **state)
{
    world *w = *state;
    uint64_t of;
    uint32_t status;
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1);
    send_batch(w, 2);
    uint64_t lease = lease_of(w, 1, 1, &of);
    give_back(w, 1, lease, RETURN_UNUSED, 0, &status);
    assert_int_equal(status, RETURNED_DONE);
    lease = lease_of(w, 1, 2, &of);
    assert_int_equal(of, 1); /* before those that arrived later */
    hello(w, 2);             /* another process of the rank */
    uint64_t again = lease_of(w, 2, 1, &of);
    assert_int_equal(of, 1);
    assert_int_equal(give_back(w, 1, lease, RETURN_TRAINED, 2, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_GONE);
    assert_int_equal(persia_tables_updates(w->tables), 0);
    pending *c = ask(w, 1, 1, 3); /* of the earlier process */
    assert_int_equal(wait_for(c), PERSIA_ECLOSED);
    end_call(c);
    assert_int_equal(give_back(w, 2, again, RETURN_TRAINED, 2, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_DONE);
    embedding_worker_stats s = stats_of(w);
    assert_int_equal(s.late, 1);
    assert_int_equal(s.again, 2);
    assert_int_equal(s.ranks, 1);
}

/* torchrun starts all ranks again with another number of them. */
static void a_rank_that_the_job_has_no_longer_gives_its_batch_back(
    void **state)
{
    world *w = *state;
    uint64_t of;
    wire_hello m = {.version = WIRE_VERSION, .name_space = "test"};
    hello(w, 1);
    declare(w, "b");
    m.caller.client = 2;
    m.rank = 1;
    m.world = 2;
    hello_as(w, &m);
    send_batch(w, 1);
    lease_of(w, 2, 1, &of);
    assert_int_equal(stats_of(w).ranks, 2);
    m.caller.client = 3;
    m.rank = 0;
    m.world = 1;
    hello_as(w, &m);
    const embedding_worker_stats s = stats_of(w);
    assert_int_equal(s.ranks, 1);
    assert_int_equal(s.leased, 0);
    assert_int_equal(s.queued, 1);
    for (uint64_t i = 0; i < 8; i++) { /* more often than a fault may be */
        lease_of(w, 3 + i, 1, &of);
        assert_int_equal(of, 1);
        m.caller.client = 4 + i;
        hello_as(w, &m);
    }
}

static void a_lease_ends_by_time(void **state)
{
    world w;
    void *ended = &w;
    uint64_t of;
    uint32_t status;
    (void)state;
    begin_with(&w, 1 << 20, SECOND / 100);
    hello(&w, 1);
    declare(&w, "b");
    send_batch(&w, 1);
    uint64_t lease = lease_of(&w, 1, 1, &of);
    while (stats_of(&w).again == 0)
        ;
    lease_of(&w, 1, 2, &of);
    assert_int_equal(of, 1);
    give_back(&w, 1, lease, RETURN_TRAINED, 2, &status);
    assert_int_equal(status, RETURNED_GONE);
    finish_world(&ended);
}

static void a_full_queue_makes_loaders_wait(void **state)
{
    world w = {0};
    void *ended = &w;
    uint64_t of;
    uint32_t status;
    size_t done;
    (void)state;
    wire_out o;
    persia_wire_out_init(&o);
    wire_submit m = batch(&w, 1);
    m.caller.boot = 0;
    assert_int_equal(persia_wire_put_submit(&o, &m), PERSIA_OK);
    begin_with(&w, 2 * o.bytes - 1, 60 * SECOND);
    persia_wire_out_free(&o);
    assert_int_equal(submit(&w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(status, SUBMIT_QUEUED);
    m.number = 2;
    assert_int_equal(submit(&w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(status, SUBMIT_FULL);
    const embedding_worker_stats before = stats_of(&w);
    pending *c = START(w.s, SUBMIT, submit, &m);
    hello(&w, 1);
    declare(&w, "b");
    give_back(&w, 1, lease_of(&w, 1, 1, &of), RETURN_TRAINED, 2, &status);
    assert_int_equal(wait_for(c), PERSIA_OK);
    end_call(c);
    const embedding_worker_stats after = stats_of(&w);
    assert_int_equal(after.queued, 1);
    assert_true(after.blocked_ns > before.blocked_ns);
    assert_int_equal(after.starved_ns, 0);
    assert_int_equal(stats_of(&w).blocked_ns, after.blocked_ns);
    uint8_t large[4096] = {0};
    tensor.n = sizeof large;
    tensor.data = large;
    m.number = 3;
    assert_int_equal(submit(&w, &m, &status, &done), PERSIA_ELIMIT);
    tensor.n = sizeof bytes;
    tensor.data = bytes;
    finish_world(&ended);
}

static void a_rank_that_waits_is_starved(void **state)
{
    world *w = *state;
    uint64_t of;
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1);
    lease_of(w, 1, 1, &of);
    assert_int_equal(stats_of(w).starved_ns, 0);
    pending *c = ask(w, 1, 1, 2);
    assert_true(stats_of(w).starved_ns > 0);
    send_batch(w, 2);
    assert_int_equal(wait_for(c), PERSIA_OK);
    end_call(c);
    const embedding_worker_stats after = stats_of(w);
    assert_int_equal(stats_of(w).starved_ns, after.starved_ns);
    assert_int_equal(after.blocked_ns, 0);
}

static void a_pass_ends_with_its_loaders(void **state)
{
    world *w = *state;
    uint64_t of;
    uint32_t status;
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1);
    beat(w, 2, 0);
    wire_submit m = batch(w, 2); /* of the next epoch */
    m.epoch = 2;
    send_as(w, &m);
    give_back(w, 1, lease_of(w, 1, 1, &of), RETURN_TRAINED, 2, &status);
    for (int i = 0; i < 2; i++) {
        pending *c;
        wire_take_reply reply = take(w, 1, 2, &c);
        assert_int_equal(reply.status, TAKE_END);
        end_call(c);
    }
    pending *c = ask(w, 1, 2, 3);
    wire_take_reply reply;
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, take_reply, &reply);
    assert_int_equal(reply.status, TAKE_BATCH);
    assert_int_equal(reply.number, 2);
    assert_int_equal(reply.epoch, 2);
    end_call(c);
    c = ask(w, 1, 2, 4); /* there may be more */
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, take_reply, &reply);
    assert_int_equal(reply.status, TAKE_EMPTY);
    end_call(c);
}

static void what_is_wrong_is_refused(void **state)
{
    world *w = *state;
    uint32_t status;
    size_t done;
    uint64_t of;
    pending *c = ask(w, 1, 1, 1);
    assert_int_equal(wait_for(c), PERSIA_ESTALE); /* no Hello */
    end_call(c);
    wire_hello other = {.version = WIRE_VERSION, .name_space = "other"};
    c = START(w->s, HELLO, hello, &other);
    assert_int_equal(wait_for(c), PERSIA_EMISMATCH);
    end_call(c);
    hello(w, 1);
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    assert_int_equal(declare(w, "c"), PERSIA_OK); /* it is the only rank */
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    wire_submit m = batch(w, 1);
    m.features_n = 1;
    m.offsets.n = SAMPLES + 1;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_EFEATURE);
    const uint64_t fall[KEYS * SAMPLES + 1] = {0, 2, 1, 3, 5, 5, 7};
    m = batch(w, 1);
    m.offsets.offsets = fall;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_EOFFSETS);
    m = batch(w, 1);
    m.ids.n = IDS - 1;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_EOFFSETS);
    m = batch(w, 1);
    m.caller.boot++;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_ESTALE);
    send_batch(w, 1); /* the number was not used */
    const uint64_t lease = lease_of(w, 1, 1, &of);
    wire_return wrong = {
        .caller = caller(w, 1), .lease = lease, .parts = 1};
    c = START(w->s, RETURN, return, &wrong);
    assert_int_equal(wait_for(c), PERSIA_EARG); /* no hyper-parameters */
    end_call(c);
    assert_int_equal(stats_of(w).failed, 0); /* it is offered again */
    assert_int_equal(stats_of(w).leased, 0);
    assert_int_equal(stats_of(w).queued, 1);
}

/* What the worker keeps of ranks is bounded by what a job can have. */
static void ranks_that_no_job_has_are_refused(void **state)
{
    world *w = *state;
    const uint32_t wrong[][2] = {{0, WIRE_PARTS_MAX + 1},
                                 {7, UINT32_MAX},
                                 {UINT32_MAX - 1, UINT32_MAX}};
    hello(w, 1);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const wire_hello m = {.caller = {.client = 2 + i},
                              .version = WIRE_VERSION,
                              .name_space = "test",
                              .rank = wrong[i][0],
                              .world = wrong[i][1]};
        pending *c = START(w->s, HELLO, hello, &m);
        assert_int_equal(wait_for(c), PERSIA_EARG);
        end_call(c);
    }
    assert_int_equal(stats_of(w).ranks, 1);
}

/* A later process has the rank's place, and keeps it: the earlier one may have
 * waited for a batch, or have lost its connection.  A worker that was started
 * again may get the Hello of the earlier one first. */
static void a_rank_is_of_its_last_process(void **state)
{
    world *w = *state;
    wire_hello m = {.version = WIRE_VERSION, .name_space = "test",
                    .world = 1, .stays = 1};
    hello(w, 1);
    declare(w, "b");
    pending *c = ask(w, 1, 1, 1);
    hello(w, 2);
    assert_int_equal(wait_for(c), PERSIA_ECLOSED);
    end_call(c);
    for (m.caller.client = 1; m.caller.client <= 3; m.caller.client += 2) {
        hello_as(w, &m);
        c = ask(w, m.caller.client, 1, 2);
        assert_int_equal(wait_for(c), PERSIA_ECLOSED);
        end_call(c);
    }
    send_batch(w, 1);
    assert_int_equal(take(w, 2, 1, &c).status, TAKE_BATCH);
    end_call(c);
    m.caller.client = 4;
    m.caller.incarnation = 1;
    hello_as(w, &m);
    assert_int_equal(take(w, 4, 1, &c).status, TAKE_BATCH);
    end_call(c);
    c = ask(w, 2, 1, 3);
    assert_int_equal(wait_for(c), PERSIA_ECLOSED);
    end_call(c);
}

static void what_servers_have_is_not_offered(void **state)
{
    world *w = *state;
    uint64_t of;
    uint32_t status;
    size_t done;
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1);
    give_back(w, 1, lease_of(w, 1, 1, &of), RETURN_TRAINED, 2, &status);
    persia_embedding_worker_destroy(w->s);
    embedding_worker_config config = {.servers = w->servers,
                                      .message_limit = 1 << 20,
                                      .queue_limit = 1 << 20,
                                      .lease_ns = 60 * SECOND,
                                      .silence_ns = 60 * SECOND, .loaders = 1,
                                      .jobs = 2};
    assert_int_equal(persia_embedding_worker_create(&config, &w->s),
                     PERSIA_OK);
    hello(w, 1);
    declare(w, "b");
    send_batch(w, 1); /* the loader does not know that it was done */
    send_batch(w, 2);
    pending *c;
    wire_take_reply m = take(w, 1, 1, &c);
    assert_int_equal(m.status, TAKE_EMPTY);
    end_call(c);
    m = take(w, 1, 1, &c);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.number, 2);
    end_call(c);
    wire_submit again = batch(w, 2);
    assert_int_equal(submit(w, &again, &status, &done), PERSIA_OK);
    assert_int_equal(done, 1);
}

static void the_end_fails_what_waits(void **state)
{
    world *w = *state;
    hello(w, 1);
    pending *c = ask(w, 1, 1, 1);
    persia_embedding_worker_close(w->s);
    assert_int_equal(wait_for(c), PERSIA_EUNAVAILABLE);
    end_call(c);
    wire_submit m = batch(w, 1);
    uint32_t status;
    size_t done;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_EUNAVAILABLE);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, finish_world)
    const struct CMUnitTest tests[] = {
        TEST(a_batch_comes_with_its_embeddings),
        TEST(gradients_are_applied_once),
        TEST(some_features_may_have_gradients),
        TEST(a_loader_hears_what_is_done),
        TEST(one_that_leaves_takes_no_more),
        TEST(a_batch_is_offered_again),
        TEST(a_rank_that_the_job_has_no_longer_gives_its_batch_back),
        cmocka_unit_test(a_lease_ends_by_time),
        cmocka_unit_test(a_full_queue_makes_loaders_wait),
        TEST(a_rank_that_waits_is_starved),
        TEST(a_pass_ends_with_its_loaders),
        TEST(what_is_wrong_is_refused),
        TEST(ranks_that_no_job_has_are_refused),
        TEST(a_rank_is_of_its_last_process),
        TEST(what_servers_have_is_not_offered),
        TEST(the_end_fails_what_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
