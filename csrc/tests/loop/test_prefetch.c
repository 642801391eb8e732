/* step, look-ahead.  The oracle is the table itself: every batch holds id 7,
 * whose row begins at 0, and every gradient adds 1 to it.  So a looked-up
 * value is the number of updates that the lookup saw. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/client.h"
#include "loop/loop.h"
#include "loop/prefetch.h"
#include "pool/pool.h"

enum { DIM = 4, IDS = 3 };

static uint64_t handle;
static ps_client *client;
static loop *s;
static int here; /* of streams that are opened */
static uint32_t plan;

/* Memory of lookups and gradients that is not released yet. */
static atomic_int alive;

typedef struct memory {
    int64_t ids[IDS];
    float out[IDS * DIM];
    uint32_t rows[IDS];
} memory;

static memory *memory_new(void)
{
    memory *m = calloc(1, sizeof *m);
    assert_non_null(m);
    for (int i = 0; i < IDS; i++)
        m->ids[i] = 7 + i;
    atomic_fetch_add(&alive, 1);
    return m;
}

static void memory_release(void *m)
{
    atomic_fetch_sub(&alive, 1);
    free(m);
}

static id_batch batch_of(const memory *m)
{
    return (id_batch){.n = IDS, .bags = IDS, .values = m->ids};
}

static int setup(void **state)
{
    (void)state;
    const tables_config config = {.threads = 2};
    assert_int_equal(persia_client_create_embedded(&config, &client),
                     PERSIA_OK);
    assert_int_equal(persia_loop_open(client, &handle), PERSIA_OK);
    assert_int_equal(persia_loop_get(handle, "test", &s, NULL), PERSIA_OK);
    table_config c;
    persia_table_config_init(&c);
    strcpy(c.name, "t");
    c.dim = DIM;
    c.optimizer = OPTIM_SGD;
    c.init = INIT_CONSTANT;
    c.init_a = 0;
    uint32_t no;
    int created;
    assert_int_equal(
        persia_client_declare(client, &c, &no, &created),
        PERSIA_OK);
    plan_feature f = {.name = "f", .table = no, .pooling = POOL_SUM,
                      .trainable = 1};
    assert_int_equal(
        persia_loop_plan(s, PLAN_BAGS, 1, &f, 1, &plan),
        PERSIA_OK);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    persia_loop_put(s);
    persia_loop_close(handle);
    assert_int_equal(atomic_load(&alive), 0);
    return 0;
}

static uint64_t stream_open(uint64_t staleness)
{
    uint64_t stream;
    assert_int_equal(persia_loop_pass_open(s, staleness, here, &stream),
                     PERSIA_OK);
    return stream;
}

/* A batch that is looked up ahead. */
static uint64_t batch_add(uint64_t stream)
{
    uint64_t batch = persia_loop_batch_number();
    assert_int_equal(persia_loop_batch_add(s, stream, batch), PERSIA_OK);
    memory *m = memory_new();
    loop_lookup l = {.plan = plan, .batch = batch_of(m), .out = m->out,
                     .stride = DIM, .hints = m->rows, .owner = m,
                     .release = memory_release};
    assert_int_equal(persia_loop_batch_lookup(s, batch, &l), PERSIA_OK);
    persia_loop_batch_ready(s, batch);
    return batch;
}

/* Forward of a batch with a ticket (or NULL); the number of updates seen. */
static int forward(uint64_t batch, uint64_t *ticket)
{
    if (ticket)
        *ticket = persia_loop_ticket(s);
    persia_loop_batch_bind(s, batch, ticket ? *ticket : 0);
    void *owner;
    assert_int_equal(persia_loop_batch_take(s, batch, plan, &owner),
                     PERSIA_OK);
    memory *m = owner;
    if (!m) {
        m = memory_new();
        id_batch b = batch_of(m);
        assert_int_equal(persia_loop_forward(s, ticket ? *ticket : 0, plan,
                                             &b, m->out, DIM, m->rows),
                         PERSIA_OK);
    }
    int seen = (int)m->out[0];
    for (int i = 0; i < DIM; i++)
        assert_true(m->out[i] == m->out[0]);
    memory_release(m);
    return seen;
}

static int hold(uint64_t ticket)
{
    static const float grad[IDS * DIM] = {-1, -1, -1, -1};
    memory *m = memory_new();
    for (int i = 0; i < IDS; i++)
        m->rows[i] = ROW_NONE;
    loop_grad g = {.ticket = ticket,
                   .grad = {.plan = plan, .batch = batch_of(m),
                            .rows = m->rows, .grad = grad, .stride = DIM},
                   .owner = m,
                   .release = memory_release};
    int rc = persia_loop_add_grad(s, &g);
    if (rc)
        memory_release(m);
    return rc;
}

/* Where the bound allows it, threads of the store apply them. */
static int apply(void)
{
    optim_args o = {.kind = OPTIM_SGD, .lr = 1, .grad_scale = 1};
    return persia_loop_apply(s, LOOP_MINE, &o, 1);
}

static void backward(uint64_t ticket)
{
    assert_int_equal(hold(ticket), PERSIA_OK);
    assert_int_equal(apply(), PERSIA_OK);
}

static loop_prefetch_stats stats(void)
{
    loop_prefetch_stats out;
    persia_loop_get_prefetch_stats(s, &out);
    return out;
}

static uint64_t stalest(void)
{
    loop_prefetch_stats st = stats();
    uint64_t most = 0;
    for (uint64_t k = 0; k < LOOP_STALENESS_BUCKETS; k++)
        if (st.staleness[k])
            most = k;
    return most;
}

/* ---- the plain loop ---- */

enum { BATCHES = 200 };

static void plain_loop(uint64_t staleness, uint64_t depth)
{
    uint64_t stream = stream_open(staleness);
    uint64_t batch[BATCHES + 16];
    uint64_t added = 0;
    for (uint64_t t = 0; t < BATCHES; t++) {
        while (added <= t + depth && added < BATCHES)
            batch[added++] = batch_add(stream);
        assert_int_equal(persia_loop_batch_next(s, batch[t], 0), PERSIA_OK);
        uint64_t ticket;
        int seen = forward(batch[t], &ticket);
        assert_true(seen <= (int)t);
        if (staleness != LOOP_ASYNC)
            assert_true(seen >= (int)t - (int)staleness);
        backward(ticket);
    }
    loop_prefetch_stats st = stats();
    assert_int_equal(st.batches, BATCHES);
    assert_int_equal(st.prefetched, BATCHES);
    assert_int_equal(st.not_prefetched, 0);
    assert_int_equal(st.abandoned + st.skipped + st.read + st.dropped, 0);
    uint64_t all = 0;
    for (int k = 0; k < LOOP_STALENESS_BUCKETS; k++)
        all += st.staleness[k];
    assert_int_equal(all, BATCHES);
    assert_true(stalest() <= staleness);
    assert_true(stalest() <= depth + 2); /* 2 updates may be pending */
    persia_loop_pass_close(s, stream);
}

static void test_without_an_idle_core(void **state)
{
    (void)state;
    here = 1;
    plain_loop(3, 5);
    here = 0;
    assert_int_equal(stalest(), 0);
    assert_int_equal(stats().staleness[0], BATCHES);
}

static void test_synchronous_sees_every_update(void **state)
{
    (void)state;
    plain_loop(0, 1);
    assert_int_equal(stats().waited, 0);
}

static void test_bounds(void **state)
{
    (void)state;
    plain_loop(1, 1);
    assert_int_equal(stalest(), 1);
    teardown(NULL);
    setup(NULL);
    plain_loop(3, 5);
    assert_int_equal(stalest(), 3);
    teardown(NULL);
    setup(NULL);
    plain_loop(LOOP_ASYNC, 8);
}

/* ---- loops that leave the path ---- */

static void test_loop_without_backward_goes_on(void **state)
{
    (void)state;
    for (uint64_t staleness = 0; staleness < 3; staleness++) {
        uint64_t stream = stream_open(staleness);
        uint64_t first = 0, before = stats().abandoned;
        for (int t = 0; t < 50; t++) {
            uint64_t batch = batch_add(stream), ticket;
            assert_int_equal(persia_loop_batch_next(s, batch, 0), PERSIA_OK);
            if (t % 3 == 1)
                continue; /* not even a forward */
            assert_int_equal(forward(batch, &ticket), 0);
            if (t == 0)
                first = ticket;
        }
        assert_int_equal(stats().abandoned - before, 49 - staleness);
        assert_int_equal(hold(first), PERSIA_ETICKET);
        assert_non_null(strstr(persia_err_text(), "abandoned"));
        persia_loop_pass_close(s, stream);
    }
    assert_int_equal(persia_client_updates(client), 0);
}

/* A forward that did not find its batch is of the one that the loop took last:
 * its update ends that one, and not a later one. */
static void test_forwards_without_a_batch(void **state)
{
    (void)state;
    for (uint64_t staleness = 0; staleness < 3; staleness++) {
        uint64_t stream = stream_open(staleness), early, ticket;
        uint64_t batch = batch_add(stream);
        assert_int_equal(persia_loop_batch_next(s, batch, 0), PERSIA_OK);
        (void)forward(0, &early);
        for (int t = 0; t < 50; t++) {
            batch = batch_add(stream);
            assert_int_equal(persia_loop_batch_next(s, batch, 0), PERSIA_OK);
            if (t == 10) {
                assert_int_equal(stats().abandoned, staleness == 0);
                backward(early);
            }
            (void)forward(0, &ticket);
            assert_int_equal(hold(ticket), PERSIA_OK);
            assert_int_equal(apply(), PERSIA_OK);
        }
        assert_int_equal(stats().abandoned, staleness == 0);
        persia_loop_pass_close(s, stream);
        teardown(NULL);
        setup(NULL);
    }
}

static void test_skip_makes_room(void **state)
{
    (void)state;
    uint64_t stream = stream_open(0), ticket;
    for (int t = 0; t < 20; t++) {
        uint64_t batch = batch_add(stream);
        assert_int_equal(persia_loop_batch_next(s, batch, 0), PERSIA_OK);
        forward(batch, &ticket);
        persia_loop_batch_skip(s, batch);
        persia_loop_batch_skip(s, batch); /* does nothing */
        assert_int_equal(hold(ticket), PERSIA_ETICKET);
    }
    assert_int_equal(stats().skipped, 20);
    assert_int_equal(stats().abandoned, 0);
    persia_loop_pass_close(s, stream);
}

static void test_accumulation_holds_no_permit(void **state)
{
    (void)state;
    uint64_t stream = stream_open(0), ticket;
    uint64_t next = batch_add(stream);
    for (int t = 0; t < 60; t++) {
        uint64_t batch = next;
        next = batch_add(stream);
        assert_int_equal(persia_loop_batch_next(s, batch, 0), PERSIA_OK);
        /* As in a plain loop: sees the steps before it, all of them. */
        assert_int_equal(forward(batch, &ticket), t / 3 * 3);
        assert_int_equal(hold(ticket), PERSIA_OK);
        if (t % 3 == 2)
            assert_int_equal(apply(), PERSIA_OK);
    }
    assert_int_equal(stats().abandoned, 0);
    assert_int_equal(stalest(), 0);
    persia_loop_pass_close(s, stream);
}

static void test_reading_takes_no_permit(void **state)
{
    (void)state;
    for (int known = 0; known < 2; known++) {
        uint64_t stream = stream_open(0);
        for (int t = 0; t < 20; t++) {
            uint64_t batch = batch_add(stream);
            assert_int_equal(persia_loop_batch_next(s, batch, known),
                             PERSIA_OK);
            forward(batch, NULL);
        }
        persia_loop_pass_close(s, stream);
    }
    assert_int_equal(stats().abandoned, 0);
    assert_int_equal(stats().read, 2 * 19);
    assert_int_equal(stats().prefetched, 40);
}

static void test_forwards_of_a_batch_share_its_permit(void **state)
{
    (void)state;
    uint64_t stream = stream_open(0), a, b;
    uint64_t first = batch_add(stream), second = batch_add(stream);
    assert_int_equal(persia_loop_batch_next(s, first, 0), PERSIA_OK);
    forward(first, &a);
    forward(first, &b); /* looked up again */
    forward(first, NULL);
    backward(a); /* b is still out: the next lookup must wait */
    assert_int_equal(stats().started, 1);
    backward(b);
    assert_int_equal(stats().started, 2);
    assert_int_equal(persia_loop_batch_next(s, second, 0), PERSIA_OK);
    assert_int_equal(forward(second, &a), 2);
    loop_prefetch_stats st = stats();
    assert_int_equal(st.prefetched, 2);
    assert_int_equal(st.not_prefetched, 2);
    assert_int_equal(st.abandoned, 0);
    persia_loop_pass_close(s, stream);
}

static void test_dropped_gradients_free_the_permit(void **state)
{
    (void)state;
    uint64_t stream = stream_open(0), ticket;
    for (int t = 0; t < 5; t++) {
        uint64_t batch = batch_add(stream);
        assert_int_equal(persia_loop_batch_next(s, batch, 0), PERSIA_OK);
        forward(batch, &ticket);
        assert_int_equal(hold(ticket), PERSIA_OK);
        if (t % 2) {
            assert_int_equal(persia_loop_discard(s, LOOP_ALL), 1);
        } else { /* an update that fails */
            assert_int_not_equal(persia_loop_apply(s, LOOP_ALL, NULL, 0),
                                 PERSIA_OK);
        }
    }
    assert_int_equal(stats().dropped, 5);
    assert_int_equal(stats().abandoned, 0);
    persia_loop_pass_close(s, stream);
}

static void test_close_frees_and_welcomes_late_gradients(void **state)
{
    (void)state;
    uint64_t stream = stream_open(2), batch[8], ticket[2];
    for (int t = 0; t < 8; t++)
        batch[t] = batch_add(stream);
    for (int t = 0; t < 2; t++) {
        assert_int_equal(persia_loop_batch_next(s, batch[t], 0), PERSIA_OK);
        forward(batch[t], &ticket[t]);
    }
    persia_loop_pass_close(s, stream);
    persia_loop_pass_close(s, stream);
    assert_int_equal(atomic_load(&alive), 0);
    backward(ticket[0]);
    backward(ticket[1]);
    assert_int_equal(persia_client_updates(client), 2);
    assert_int_equal(forward(batch[5], &ticket[0]), 2); /* the plain path */
    backward(ticket[0]);
    assert_int_equal(persia_loop_batch_next(s, batch[6], 0), PERSIA_ECLOSED);
    assert_int_equal(
        persia_loop_batch_add(s, stream, persia_loop_batch_number()),
        PERSIA_ECLOSED);
    persia_loop_batch_skip(s, batch[6]);
}

static void test_loop_closes_with_lookups_under_way(void **state)
{
    (void)state;
    for (int round = 0; round < 50; round++) {
        uint64_t stream = stream_open(LOOP_ASYNC);
        for (int t = 0; t < 5; t++)
            batch_add(stream);
        teardown(NULL);
        setup(NULL);
    }
}

static void test_a_bad_batch_fails_its_forward(void **state)
{
    (void)state;
    static const int64_t offsets[IDS + 1] = {0, 2, 1, 3};
    uint64_t stream = stream_open(1), batch = persia_loop_batch_number();
    assert_int_equal(persia_loop_batch_add(s, stream, batch), PERSIA_OK);
    memory *m = memory_new();
    loop_lookup l = {.plan = plan, .batch = batch_of(m), .out = m->out,
                     .stride = DIM, .hints = m->rows, .owner = m,
                     .release = memory_release};
    l.batch.offsets = offsets;
    assert_int_equal(persia_loop_batch_lookup(s, batch, &l), PERSIA_OK);
    persia_loop_batch_ready(s, batch);
    assert_int_equal(persia_loop_batch_lookup(s, batch, &l), PERSIA_ECLOSED);
    assert_int_equal(persia_loop_batch_next(s, batch, 0), PERSIA_OK);
    void *owner;
    for (int again = 0; again < 2; again++) {
        assert_int_equal(persia_loop_batch_take(s, batch, plan, &owner),
                         PERSIA_EOFFSETS);
        assert_non_null(strstr(persia_err_text(), "feature f"));
        assert_null(owner);
    }
    persia_loop_pass_close(s, stream);
}

/* ---- waits ---- */

static int interrupted(void)
{
    return PERSIA_EINTR;
}

static void *end_update(void *ticket)
{
    nanosleep(&(struct timespec){.tv_nsec = 120000000}, NULL);
    loop_grad g = {.ticket = *(uint64_t *)ticket};
    prefetch_updated(loop_prefetch(s), &g, 1, 1);
    return NULL;
}

static void test_waits_for_an_update_and_can_be_interrupted(void **state)
{
    (void)state;
    uint64_t stream = stream_open(0), ticket;
    uint64_t first = batch_add(stream), second = batch_add(stream);
    assert_int_equal(persia_loop_batch_next(s, first, 0), PERSIA_OK);
    forward(first, &ticket);
    loop_grad g = {.ticket = ticket};
    prefetch_updating(loop_prefetch(s), &g, 1, 0);
    persia_interrupt_install(interrupted);
    assert_int_equal(persia_loop_batch_next(s, second, 0), PERSIA_EINTR);
    persia_interrupt_install(NULL);
    pthread_t thread;
    pthread_create(&thread, NULL, end_update, &ticket);
    uint64_t before = persia_clock_ns();
    assert_int_equal(persia_loop_batch_next(s, second, 0), PERSIA_OK);
    assert_true(persia_clock_ns() - before > 50000000u);
    pthread_join(thread, NULL);
    assert_int_equal(stats().abandoned, 0);
    assert_int_equal(stats().waited, 1);
    persia_loop_pass_close(s, stream);
}

/* Once the loop need not wait for a failed update any more, it gets the
 * error. */
static void test_an_update_that_failed_is_told_at_once(void **state)
{
    (void)state;
    optim_args bad = {.kind = OPTIM_SGD, .lr = -1, .grad_scale = 1};
    for (int round = 0; round < 20000; round++) {
        uint64_t stream = stream_open(1), batch[3], ticket;
        for (int t = 0; t < 3; t++)
            batch[t] = batch_add(stream);
        assert_int_equal(persia_loop_batch_next(s, batch[0], 0), PERSIA_OK);
        forward(batch[0], &ticket);
        assert_int_equal(hold(ticket), PERSIA_OK);
        assert_int_equal(persia_loop_apply(s, LOOP_MINE, &bad, 1),
                         PERSIA_OK);
        int first = persia_loop_batch_next(s, batch[1], 0);
        forward(batch[1], &ticket); /* takes the permit of batch 1 */
        int second = persia_loop_batch_next(s, batch[2], 0);
        if (!first)
            assert_int_equal(second, PERSIA_EARG);
        persia_loop_pass_close(s, stream);
    }
}

/* A gradient of so many ids that its update takes a while. */
static int hold_many(uint64_t ticket)
{
    enum { MANY = 1 << 21 };
    struct many {
        int64_t ids[MANY];
        float grad[MANY * DIM];
        uint32_t rows[MANY];
    } *m = calloc(1, sizeof *m);
    assert_non_null(m);
    for (int i = 0; i < MANY; i++) {
        m->ids[i] = 1000 + i;
        m->rows[i] = ROW_NONE;
    }
    loop_grad g = {.ticket = ticket,
                   .grad = {.plan = plan,
                            .batch = {.n = MANY, .bags = MANY,
                                      .values = m->ids},
                            .rows = m->rows, .grad = m->grad,
                            .stride = DIM},
                   .owner = m,
                   .release = free};
    return persia_loop_add_grad(s, &g);
}

/* An update that is interrupted while it waits for those before it leaves
 * their error to the next call. */
static void test_an_interrupted_update_keeps_an_earlier_error(void **state)
{
    (void)state;
    optim_args o = {.kind = OPTIM_SGD, .lr = 1, .grad_scale = 1};
    uint64_t stream = stream_open(3), ticket[2];
    uint64_t batch[2] = {batch_add(stream), batch_add(stream)};
    for (int t = 0; t < 2; t++) {
        assert_int_equal(persia_loop_batch_next(s, batch[t], 0), PERSIA_OK);
        forward(batch[t], &ticket[t]);
    }
    assert_int_equal(hold_many(ticket[0]), PERSIA_OK);
    assert_int_equal(apply(), PERSIA_OK);
    loop_keep_error(s, persia_err_set(PERSIA_ENONFINITE, "earlier"));
    assert_int_equal(hold(ticket[1]), PERSIA_OK);
    persia_interrupt_install(interrupted);
    assert_int_equal(persia_loop_apply(s, LOOP_ALL, &o, 1), PERSIA_EINTR);
    persia_interrupt_install(NULL);
    assert_int_equal(persia_loop_flush(s, 0), PERSIA_ENONFINITE);
    assert_string_equal(persia_err_text(), "earlier");
    assert_int_equal(persia_loop_flush(s, 0), PERSIA_OK);
    persia_loop_pass_close(s, stream);
}

/* ---- several passes ---- */

/* Takes a batch of each pass in turn; `joint`: both backwards follow both
 * forwards and are one update.  Each lookup misses at most the staleness of
 * its pass, counted from the last step of the loop. */
static void loop_over_two(uint64_t staleness[2], int joint)
{
    enum { N = 80 };
    uint64_t base = persia_client_updates(client);
    uint64_t batch[2], ticket[2];
    uint64_t in[2] = {stream_open(staleness[0]), stream_open(staleness[1])};
    uint64_t next[2] = {batch_add(in[0]), batch_add(in[1])};
    int seen, done = 0, start = (int)base;
    for (int t = 0; t < N; t++) {
        for (int i = 0; i < 2; i++) {
            batch[i] = next[i];
            next[i] = batch_add(in[i]);
            assert_int_equal(persia_loop_batch_next(s, batch[i], 0),
                             PERSIA_OK);
        }
        for (int i = 0; i < 2; i++) {
            seen = forward(batch[i], &ticket[i]) - start;
            assert_true(done - seen <= (int)staleness[i]);
            assert_true(seen <= done);
            if (!joint) {
                backward(ticket[i]);
                done++;
            }
        }
        if (joint) {
            assert_int_equal(hold(ticket[0]), PERSIA_OK);
            backward(ticket[1]);
            done += 2;
        }
    }
    persia_loop_pass_close(s, in[0]);
    persia_loop_pass_close(s, in[1]);
    assert_int_equal(persia_loop_flush(s, 0), PERSIA_OK);
}

static void test_the_bound_holds_over_passes(void **state)
{
    (void)state;
    static const uint64_t pairs[][2] = {{0, 0}, {1, 1}, {0, 3}, {2, 1}};
    for (int joint = 0; joint < 2; joint++)
        for (int i = 0; i < 4; i++) {
            loop_over_two((uint64_t[]){pairs[i][0], pairs[i][1]}, joint);
            uint64_t most = pairs[i][0] > pairs[i][1] ? pairs[i][0]
                                                      : pairs[i][1];
            assert_true(stalest() <= most);
            assert_int_equal(stats().abandoned, 0);
            teardown(NULL);
            setup(NULL);
        }
}

/* The end of one pass frees what its batches held. */
static void test_a_closed_pass_makes_nothing_wait(void **state)
{
    (void)state;
    uint64_t first = stream_open(0), second = stream_open(0), ticket;
    uint64_t out = batch_add(first), next = batch_add(second);
    assert_int_equal(persia_loop_batch_next(s, out, 0), PERSIA_OK);
    assert_int_equal(stats().started, 2); /* both were, before that */
    uint64_t waits = batch_add(second);
    assert_int_equal(persia_loop_batch_next(s, next, 0), PERSIA_OK);
    forward(next, &ticket);
    backward(ticket);
    assert_int_equal(stats().started, 2); /* the other pass has one out */
    persia_loop_pass_close(s, first);
    assert_int_equal(stats().started, 3);
    assert_int_equal(persia_loop_batch_next(s, waits, 0), PERSIA_OK);
    assert_int_equal(forward(waits, &ticket), 1);
    persia_loop_pass_close(s, second);
}

/* ---- any schedule ---- */

static uint32_t random_u32(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* A loop that forwards, forgets, skips, delays and drops at random; then
 * for each lookup: updates of earlier batches that it did not see <= bound. */
static void random_loop(uint32_t seed)
{
    enum { N = 120 };
    uint64_t staleness = random_u32(&seed) % 4;
    uint64_t stream = stream_open(staleness);
    uint64_t batch[N], ticket[N] = {0};
    int seen[N], updated[N] = {0};
    int added = 0, base = (int)persia_client_updates(client);
    for (int t = 0; t < N; t++) {
        seen[t] = -1;
        int depth = 1 + (int)(random_u32(&seed) % 4);
        while (added <= t + depth && added < N)
            batch[added++] = batch_add(stream);
        assert_int_equal(persia_loop_batch_next(s, batch[t], 0), PERSIA_OK);
        if (random_u32(&seed) % 8 == 0)
            continue;
        seen[t] = forward(batch[t], &ticket[t]) - base;
        /* One of the last batches gets its backward, maybe another time. */
        int back = t - (int)(random_u32(&seed) % 3);
        if (back >= 0 && ticket[back]) {
            int rc = hold(ticket[back]);
            assert_true(rc == PERSIA_OK || rc == PERSIA_ETICKET);
            if (!rc && random_u32(&seed) % 10 == 0) {
                persia_loop_discard(s, LOOP_ALL);
            } else if (!rc) {
                assert_int_equal(apply(), PERSIA_OK);
                updated[back] = 1;
            }
        }
        if (random_u32(&seed) % 10 == 0)
            persia_loop_batch_skip(s, batch[t]);
    }
    int all = 0; /* updates of earlier batches, whenever they were */
    for (int t = 0; t < N; t++) {
        if (seen[t] >= 0)
            assert_true(all - seen[t] <= (int)staleness);
        all += updated[t];
    }
    persia_loop_pass_close(s, stream);
}

static void test_staleness_under_random_schedules(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= 60; seed++)
        random_loop(seed);
}

static void *other_loop(void *arg)
{
    uint64_t stream, staleness = (uint64_t)(uintptr_t)arg;
    if (persia_loop_pass_open(s, staleness, 0, &stream))
        return (void *)1;
    uint64_t next = 0;
    for (int t = 0; t < 150; t++) {
        uint64_t batch = next, ticket;
        next = batch_add(stream);
        if (!batch)
            continue;
        if (persia_loop_batch_next(s, batch, 0))
            return (void *)2;
        forward(batch, &ticket);
        if (t % 7 && (hold(ticket) || apply()))
            return (void *)3;
    }
    persia_loop_pass_close(s, stream);
    return NULL;
}

static void test_loops_on_several_threads(void **state)
{
    (void)state;
    pthread_t threads[3];
    for (uintptr_t i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, other_loop, (void *)i);
    for (int i = 0; i < 3; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        assert_null(bad);
    }
    assert_true(stalest() <= 2);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_synchronous_sees_every_update),
        TEST(test_without_an_idle_core),
        TEST(test_bounds),
        TEST(test_loop_without_backward_goes_on),
        TEST(test_forwards_without_a_batch),
        TEST(test_skip_makes_room),
        TEST(test_accumulation_holds_no_permit),
        TEST(test_reading_takes_no_permit),
        TEST(test_forwards_of_a_batch_share_its_permit),
        TEST(test_dropped_gradients_free_the_permit),
        TEST(test_close_frees_and_welcomes_late_gradients),
        TEST(test_loop_closes_with_lookups_under_way),
        TEST(test_a_bad_batch_fails_its_forward),
        TEST(test_waits_for_an_update_and_can_be_interrupted),
        TEST(test_an_update_that_failed_is_told_at_once),
        TEST(test_an_interrupted_update_keeps_an_earlier_error),
        TEST(test_the_bound_holds_over_passes),
        TEST(test_a_closed_pass_makes_nothing_wait),
        TEST(test_staleness_under_random_schedules),
        TEST(test_loops_on_several_threads),
    };
#undef TEST
    return cmocka_run_group_tests(tests, NULL, NULL);
}
