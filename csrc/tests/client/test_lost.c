/* client: servers that were killed and start again, and what they had
 * acknowledged. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sched.h>
#include <string.h>

#include "counting.h"

/* So many updates of all rows. */
static void add_all(ps_client *c, uint32_t no, int times)
{
    for (int i = 0; i < times; i++)
        assert_int_equal(add_one(c, NULL, no, 0, IDS), PERSIA_OK);
}

static void lost_updates_are_counted_and_told(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    add_all(remote, no, 7);
    cluster_restart(&c, 1);
    /* Applied everywhere, and told once. */
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_ELOST);
    assert_non_null(strstr(persia_err_text(), "ps1:8888"));
    assert_non_null(strstr(persia_err_text(), "7 updates"));
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    read_counts(remote, no, got);
    for (uint64_t i = 0; i < IDS; i++)
        assert_true(got[i] == (shard_of(i, 2) ? 2 : 9));
    assert_int_equal(counts_of(remote).lost, 7);
    assert_int_equal(counts_of(remote).reconnects, 1);
    cluster_restart(&c, 0);
    uint64_t id = 0;
    float row[DIM];
    while (shard_of(id, 2))
        id++;
    pull_job pull = {.n = 1, .ids = &id, .out = row, .stride = DIM};
    assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1),
                     PERSIA_ELOST);
    assert_non_null(strstr(persia_err_text(), "9 updates"));
    assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1), PERSIA_OK);
    assert_true(row[0] == 0);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* Those that were refused were never there, however long ago. */
static void refused_updates_are_not_lost(void **state)
{
    (void)state;
    for (int more = 100; more <= 5000; more += 4900) {
        cluster c;
        ps_client *remote = open_one(&c, 1, 20 * SECOND, LOST_CONTINUE);
        uint32_t no = declare_bounded(remote, 8);
        assert_int_equal(add_one(remote, NULL, no, 0, 8), PERSIA_OK);
        for (int i = 0; i < 3; i++)
            assert_int_equal(add_one(remote, NULL, no, 0, 9),
                             PERSIA_ECAPACITY);
        for (int i = 0; i < more; i++)
            assert_int_equal(add_one(remote, NULL, no, 0, 8), PERSIA_OK);
        cluster_restart(&c, 0);
        assert_int_equal(add_one(remote, NULL, no, 0, 8), PERSIA_OK);
        assert_int_equal(counts_of(remote).lost, more + 1);
        persia_client_destroy(remote);
        cluster_free(&c);
    }
}

/* What an earlier process of the rank has counted. */
static void a_new_process_counts_its_own_losses(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_CONTINUE);
    uint32_t no = declare_counting(remote);
    add_all(remote, no, 7);
    cluster_restart(&c, 1);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_int_equal(counts_of(remote).lost, 7);
    persia_client_destroy(remote);
    client_config config = cluster_config(&c);
    config.lost = LOST_CONTINUE;
    remote = cluster_client(&c, &config);
    no = declare_counting(remote);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    cluster_restart(&c, 1); /* it had the last two of nine */
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_int_equal(counts_of(remote).lost, 2);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* Rank and server were killed; another server still knows. */
static void what_only_some_servers_have_is_counted(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_RAISE);
    client_config config = cluster_config(&c);
    uint32_t no = declare_counting(remote);
    add_all(remote, no, 7);
    persia_client_destroy(remote);
    cluster_restart(&c, 1);
    remote = cluster_client(&c, &config);
    no = declare_counting(remote);
    assert_int_equal(persia_client_last_number(remote), 7);
    assert_int_equal(counts_of(remote).lost, 0); /* it may only look */
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_ELOST);
    assert_int_equal(counts_of(remote).lost, 7);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    /* the other counts them as empty ones */
    assert_int_equal(persia_tables_updates(c.nodes[0].p), 9);
    assert_int_equal(persia_tables_updates(c.nodes[1].p), 9);
    persia_client_destroy(remote);
    remote = cluster_client(&c, &config); /* counted, and passed over */
    no = declare_counting(remote);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_int_equal(counts_of(remote).lost, 0);
    persia_client_destroy(remote);
    cluster_restart(&c, 1);
    config.lost = LOST_CONTINUE;
    remote = cluster_client(&c, &config);
    no = declare_counting(remote);
    persia_client_set_last_number(remote, 5); /* four are sent again */
    add_all(remote, no, 4);
    assert_int_equal(counts_of(remote).lost, 5);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* An empty update in the place of a missing one is no update that a server
 * may lose. */
/* An update whose call failed before it was sent has given its number up:
 * lookups behind it do not wait. */
static void an_update_that_was_not_sent_is_given_up(void **state)
{
    (void)state;
    cluster c;
    ps_client *first = open_one(&c, 2, SECOND / 3, LOST_RAISE);
    uint32_t no = declare_counting(first);
    c.nodes[1].down = 1;
    assert_int_equal(add_one(first, NULL, no, 0, IDS), PERSIA_EUNAVAILABLE);
    persia_client_destroy(first);
    c.nodes[1].down = 0;
    client_config config = cluster_config(&c);
    config.timeout_ns = SECOND / 3;
    ps_client *next = cluster_client(&c, &config);
    no = declare_counting(next);
    assert_int_equal(atomic_load(&next->missing), 1);
    c.nodes[1].down = 1; /* what the first has left is not completed */
    const client_update named = {.number = 2};
    assert_int_equal(add_one(next, &named, no, 0, IDS), PERSIA_EUNAVAILABLE);
    c.nodes[1].down = 0;
    assert_true(window_has(&next->settled.w, named.number));
    persia_client_destroy(next);
    cluster_free(&c);
}

static void a_completed_update_is_lost_once(void **state)
{
    (void)state;
    for (int more = 1; more <= 5000; more += 4999) {
        cluster c;
        client_config config;
        ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_CONTINUE);
        uint32_t no = declare_counting(remote);
        add_all(remote, no, 7);
        persia_client_destroy(remote);
        cluster_restart(&c, 1);
        config = cluster_config(&c);
        config.lost = LOST_CONTINUE;
        remote = cluster_client(&c, &config);
        no = declare_counting(remote);
        add_all(remote, no, more);
        assert_int_equal(counts_of(remote).lost, 7);
        cluster_restart(&c, 1);
        add_all(remote, no, 1);
        assert_int_equal(counts_of(remote).lost, 7 + more);
        persia_client_destroy(remote);
        cluster_free(&c);
    }
}

/* What each shard has of a stream. */
static void assert_ledgers(ps_client *remote, uint64_t stream, uint64_t last)
{
    for (uint32_t i = 0; i < 2; i++) {
        wire_hello m = make_hello(remote, CLAIM_LOOK);
        shard_reply reply;
        m.stream = stream;
        assert_int_equal(persia_client_call(remote, i, WIRE_HELLO, &m, &reply),
                         PERSIA_OK);
        const wire_hello_reply *got = reply.message;
        assert_int_equal(got->ledger.watermark, last);
        assert_int_equal(numbers_wire_top(&got->ledger), last);
        assert_int_equal(got->ledger.skipped, 0);
        persia_shard_release(&reply);
    }
}

/* Rank 1 was killed when one of two servers had its last update, and the job
 * starts again without it. */
static void what_a_rank_left_that_the_job_has_no_longer(void **state)
{
    (void)state;
    cluster c;
    int known;
    float got[IDS];
    cluster_make(&c, 2);
    client_config config = cluster_config(&c);
    config.rank = 1;
    config.world = 2;
    config.stream = 78;
    config.timeout_ns = SECOND / 5;
    ps_client *gone = cluster_client(&c, &config);
    uint32_t no = declare_counting(gone);
    add_all(gone, no, 3);
    atomic_store(&c.nodes[1].down, 1);
    assert_int_not_equal(add_one(gone, NULL, no, 0, IDS), PERSIA_OK);
    atomic_store(&c.nodes[1].down, 0);
    persia_client_destroy(gone);
    config = cluster_config(&c);
    ps_client *remote = cluster_client(&c, &config);
    no = declare_counting(remote);
    /* One server restores rows the moment that it is sent the update. */
    atomic_store(&c.nodes[1].stale, 1);
    assert_int_equal(persia_client_inherit(remote, 78, 1, 0, &known),
                     PERSIA_OK);
    assert_true(known);
    assert_int_equal(persia_client_tell_lost(remote), PERSIA_ELOST);
    assert_non_null(strstr(persia_err_text(), "1 updates that rank 1"));
    assert_ledgers(remote, 78, 4);
    for (int i = 0; i < 2; i++) { /* once, and another one is not known */
        assert_int_equal(
            persia_client_inherit(remote, 78 + (uint64_t)i, 1, 0, &known),
            PERSIA_OK);
        assert_int_equal(known, !i);
        assert_int_equal(persia_client_tell_lost(remote), PERSIA_OK);
    }
    assert_int_equal(counts_of(remote).lost, 1);
    add_all(remote, no, 2); /* its own stream is as it was */
    assert_ledgers(remote, config.stream, 2);
    read_counts(remote, no, got);
    for (uint64_t i = 0; i < IDS; i++)
        assert_true(got[i] == (shard_of(i, 2) ? 5 : 6));
    assert_int_equal(persia_tables_updates(c.nodes[0].p), 6);
    assert_int_equal(persia_tables_updates(c.nodes[1].p), 6);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* A process of that rank that still runs may not send any more. */
static void a_rank_that_was_inherited_is_closed(void **state)
{
    (void)state;
    cluster c;
    int known;
    ps_client *old = open_one(&c, 2, 20 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(old);
    add_all(old, no, 1);
    client_config config = cluster_config(&c);
    const uint64_t stream = config.stream;
    config.stream = 78;
    ps_client *remote = cluster_client(&c, &config);
    (void)declare_counting(remote);
    assert_int_equal(persia_client_inherit(remote, stream, 1, SECOND, &known),
                     PERSIA_OK);
    assert_true(known);
    assert_int_equal(persia_client_tell_lost(remote),
                     PERSIA_OK); /* all is there */
    assert_int_equal(add_one(old, NULL, no, 0, IDS), PERSIA_ECLOSED);
    persia_client_destroy(old);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* One server was started again and takes it for new; the other knows better,
 * and its word is the result, whichever answers first. */
static void a_replaced_rank_is_closed_by_one_server_of_two(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        cluster c;
        ps_client *old = open_one(&c, 2, 20 * SECOND, LOST_CONTINUE);
        uint32_t no = declare_counting(old);
        client_config config = cluster_config(&c);
        ps_client *live = cluster_client(&c, &config);
        cluster_restart(&c, 0);
        assert_int_equal(add_one(old, NULL, no, 0, IDS), PERSIA_ECLOSED);
        persia_client_destroy(live);
        persia_client_destroy(old);
        cluster_free(&c);
    }
}

/* A data loader's batch is sent again under its number, so an update that
 * failed is not through. */
static void a_batch_that_failed_is_applied_when_it_is_sent_again(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    cluster_make(&c, 1);
    client_config config = cluster_config(&c);
    config.shared = 1;
    config.timeout_ns = SECOND / 5;
    ps_client *worker = cluster_client(&c, &config);
    uint32_t no = declare_counting(worker);
    const uint64_t numbers[] = {1, 2, 3, 2};
    for (int i = 0; i < 4; i++) {
        const client_update name = {.number = numbers[i]};
        atomic_store(&c.nodes[0].down, i == 1);
        assert_int_equal(add_one(worker, &name, no, 0, IDS),
                         i == 1 ? PERSIA_EUNAVAILABLE : PERSIA_OK);
    }
    read_counts(worker, no, got);
    assert_true(got[0] == 3);
    persia_client_destroy(worker);
    cluster_free(&c);
}

/* More than a ledger's window of them: the last ones are completed. */
static void the_last_of_many_missing_ones_are_completed(void **state)
{
    (void)state;
    cluster c;
    client_config config;
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_CONTINUE);
    uint32_t no = declare_counting(remote);
    add_all(remote, no, NUMBERS_WINDOW + 900);
    persia_client_destroy(remote);
    cluster_restart(&c, 1);
    config = cluster_config(&c);
    config.lost = LOST_CONTINUE;
    remote = cluster_client(&c, &config);
    no = declare_counting(remote);
    add_all(remote, no, 1);
    assert_int_equal(counts_of(remote).lost, NUMBERS_WINDOW + 900);
    assert_int_equal(persia_tables_updates(c.nodes[1].p), NUMBERS_WINDOW + 1);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* No process trains on: one that looks finds out, too. */
static void a_look_tells_of_lost_updates(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    add_all(remote, no, 3);
    assert_int_equal(persia_client_look(remote), PERSIA_OK);
    cluster_restart(&c, 1);
    assert_int_equal(persia_client_tell_lost(remote),
                     PERSIA_OK); /* not known yet */
    assert_int_equal(persia_client_look(remote), PERSIA_ELOST);
    assert_non_null(strstr(persia_err_text(), "3 updates"));
    assert_int_equal(persia_client_look(remote), PERSIA_OK);
    cluster_restart(&c, 0);
    uint64_t id = 0;
    float row[DIM];
    while (shard_of(id, 2))
        id++;
    assert_int_equal(persia_client_get(remote, no, 1, &id, row, NULL, NULL),
                     PERSIA_OK);
    assert_int_equal(persia_client_tell_lost(remote), PERSIA_ELOST);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* A job that resumes sends again what followed its checkpoint. */
static void what_is_sent_again_is_not_lost(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    add_all(remote, no, 7);
    cluster_restart(&c, 1);
    assert_int_equal(persia_client_go_on(remote, 77, 0, 0), PERSIA_OK);
    add_all(remote, no, 7);
    assert_int_equal(counts_of(remote).lost, 0);
    assert_int_equal(counts_of(remote).duplicates, 7);
    read_counts(remote, no, got);
    for (uint64_t i = 0; i < IDS; i++)
        assert_true(got[i] == 7);
    cluster_restart(&c, 0);
    assert_int_equal(persia_client_go_on(remote, 77, 5, 5), PERSIA_OK);
    add_all(remote, no, 2);
    assert_int_equal(counts_of(remote).lost, 5);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void *add_one_aside(void *arg)
{
    pusher *p = arg;
    p->failed = add_one(p->c, NULL, p->no, 0, IDS);
    return NULL;
}

/* While the answer of one server waits for the greeting of another, its
 * server starts again: the update is not in this life, and is sent again. */
static void an_answer_of_an_earlier_life_is_none(void **state)
{
    (void)state;
    cluster c;
    float got[IDS], row[DIM];
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_CONTINUE);
    uint32_t no = declare_counting(remote);
    add_all(remote, no, 5);
    cluster_restart(&c, 0);
    atomic_store(&c.nodes[0].held, 1u << WIRE_HELLO);
    atomic_store(&c.nodes[1].held, 1u << WIRE_PUSH);
    pusher sixth = {.c = remote, .no = no};
    assert_int_equal(
        pthread_create(&sixth.thread, NULL, add_one_aside, &sixth), 0);
    while (atomic_load(&c.nodes[0].calls[WIRE_PUSH]) < 6 ||
           !atomic_load(&c.nodes[0].waiting))
        sched_yield(); /* its push was refused, and it is greeted */
    atomic_store(&c.nodes[1].held, 0);
    while (atomic_load(&c.nodes[1].calls[WIRE_PUSH]) < 6 ||
           atomic_load(&c.nodes[1].active))
        sched_yield();
    cluster_restart(&c, 1);
    uint64_t id = 0;
    while (!shard_of(id, 2))
        id++;
    pull_job pull = {.n = 1, .ids = &id, .out = row, .stride = DIM};
    assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1), PERSIA_OK);
    assert_true(row[0] == 0);
    atomic_store(&c.nodes[0].held, 0);
    pthread_join(sixth.thread, NULL);
    assert_int_equal(sixth.failed, PERSIA_OK);
    read_counts(remote, no, got);
    for (uint64_t i = 0; i < IDS; i++)
        assert_true(got[i] == 1);
    assert_int_equal(counts_of(remote).lost, 10);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* A notebook: it has no stream, and no update of its own. */
static void who_looks_at_rows_disturbs_nobody(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, 60 * SECOND, LOST_CONTINUE);
    client_config config = cluster_config(&c);
    uint32_t no = declare_counting(remote);
    pusher pushers[THREADS];
    pushers_start(remote, no, pushers);
    for (int i = 0; i < 20; i++) {
        config.stream = 0;
        ps_client *other = cluster_client(&c, &config);
        float got[IDS];
        uint32_t at = declare_counting(other);
        read_counts(other, at, got);
        assert_int_equal(add_one(other, NULL, at, 0, IDS), PERSIA_EARG);
        persia_client_destroy(other);
    }
    pushers_join(pushers);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(persia_tables_updates(c.nodes[i].p),
                         THREADS * UPDATES);
    assert_int_equal(counts_of(remote).lost, 0);
    cluster_restart(&c, 1);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_int_equal(counts_of(remote).lost, THREADS * UPDATES);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* A process that was replaced, and one that this one had replaced. */
static void a_zombie_does_not_take_its_stream_back(void **state)
{
    (void)state;
    cluster c;
    ps_client *before[2];
    before[0] = open_one(&c, 2, 20 * SECOND, LOST_CONTINUE);
    uint32_t no = declare_counting(before[0]);
    client_config config = cluster_config(&c);
    config.lost = LOST_CONTINUE;
    add_all(before[0], no, 3);
    before[1] = cluster_client(&c, &config);
    (void)declare_counting(before[1]);
    add_all(before[1], no, 3);
    ps_client *live = cluster_client(&c, &config);
    (void)declare_counting(live);
    for (uint32_t i = 0; i < 6; i++) {
        for (uint32_t k = 0; k < 2; k++) {
            assert_int_equal(add_one(before[k], NULL, no, 0, IDS),
                             PERSIA_ECLOSED);
            uint64_t step;
            assert_int_equal(persia_client_join(before[k], 0, &step),
                             PERSIA_ECLOSED);
            assert_int_equal(persia_client_leave(before[k], 0),
                             PERSIA_ECLOSED);
        }
        if (i == 3)
            cluster_restart(&c, 1);
        assert_int_equal(add_one(live, NULL, no, 0, IDS), PERSIA_OK);
    }
    assert_int_equal(counts_of(live).duplicates, 0);
    assert_int_equal(persia_tables_updates(c.nodes[0].p), 12);
    persia_client_destroy(before[0]);
    persia_client_destroy(before[1]);
    persia_client_destroy(live);
    cluster_free(&c);
}

typedef struct stepper {
    ps_client *c;
    uint32_t no, rank;
    uint64_t step;
} stepper;

static void *take_step(void *arg)
{
    const stepper *p = arg;
    client_update name = {.number = p->step, .step = p->step,
                          .part = p->rank, .parts = 2};
    assert_int_equal(add_one(p->c, &name, p->no, 0, IDS), PERSIA_OK);
    return NULL;
}

/* Two ranks of one server, before step 1. */
static void open_ranks(cluster *c, stepper *ranks)
{
    cluster_make(c, 1);
    for (uint32_t r = 0; r < 2; r++) {
        client_config config = cluster_config(c);
        config.rank = r;
        config.world = 2;
        config.stream += r;
        config.lost = LOST_CONTINUE;
        ps_client *one = cluster_client(c, &config);
        ranks[r] = (stepper){one, declare_counting(one), r, 1};
    }
}

static void close_ranks(cluster *c, const stepper *ranks)
{
    for (int r = 0; r < 2; r++)
        persia_client_destroy(ranks[r].c);
    cluster_free(c);
}

/* The server was killed after one rank had its answer. */
static void a_step_that_one_rank_knows_of_is_lost_for_all(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    stepper ranks[2];
    uint64_t applied;
    open_ranks(&c, ranks);
    assert_int_equal(persia_client_join(ranks[0].c, 0, &applied), PERSIA_OK);
    assert_int_equal(persia_client_leave(ranks[1].c, 0), PERSIA_OK);
    take_step(&ranks[0]);
    /* They begin the next pass together. */
    assert_int_equal(persia_client_join(ranks[0].c, 1, &applied), PERSIA_OK);
    assert_int_equal(persia_client_join(ranks[1].c, 0, &applied), PERSIA_OK);
    cluster_restart(&c, 0);
    pthread_t other;
    ranks[0].step = 2;
    assert_int_equal(pthread_create(&other, NULL, take_step, &ranks[0]), 0);
    take_step(&ranks[1]);
    assert_int_equal(counts_of(ranks[1].c).lost, 1);
    ranks[1].step = 2;
    take_step(&ranks[1]);
    pthread_join(other, NULL);
    assert_int_equal(counts_of(ranks[0].c).lost, 1);
    read_counts(ranks[0].c, ranks[0].no, got);
    assert_true(got[0] == 2);
    close_ranks(&c, ranks);
}

/* The same in the middle of a pass, and the rank that had its answer finds the
 * server by a lookup. */
static void a_lookup_may_tell_a_server_which_step_it_lost(void **state)
{
    (void)state;
    cluster c;
    node *ps = &c.nodes[0];
    float got[IDS];
    stepper ranks[2];
    pthread_t threads[2];
    uint64_t applied;
    open_ranks(&c, ranks);
    for (int r = 0; r < 2; r++)
        assert_int_equal(persia_client_join(ranks[r].c, 0, &applied),
                         PERSIA_OK);
    assert_int_equal(
        pthread_create(&threads[0], NULL, take_step, &ranks[0]), 0);
    while (!atomic_load(&ps->calls[WIRE_PUSH]) || atomic_load(&ps->active))
        sched_yield(); /* until it waits there */
    atomic_store(&ps->mute, 1);
    assert_int_equal(
        pthread_create(&threads[1], NULL, take_step, &ranks[1]), 0);
    pthread_join(threads[0], NULL);
    cluster_restart(&c, 0);
    read_counts(ranks[0].c, ranks[0].no, got);
    atomic_store(&ps->mute, 0);
    ranks[0].step = 2;
    assert_int_equal(
        pthread_create(&threads[0], NULL, take_step, &ranks[0]), 0);
    pthread_join(threads[1], NULL);
    assert_int_equal(counts_of(ranks[1].c).lost, 1);
    ranks[1].step = 2;
    take_step(&ranks[1]);
    pthread_join(threads[0], NULL);
    assert_int_equal(counts_of(ranks[0].c).lost, 1);
    read_counts(ranks[0].c, ranks[0].no, got);
    assert_true(got[0] == 2);
    close_ranks(&c, ranks);
}

static void training_may_go_on_without_them(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_CONTINUE);
    uint32_t no = declare_counting(remote);
    /* More than the window of a ledger. */
    for (int i = 0; i < NUMBERS_WINDOW + 100; i++)
        assert_int_equal(add_one(remote, NULL, no, 0, 1), PERSIA_OK);
    cluster_restart(&c, 0);
    cluster_restart(&c, 1);
    add_all(remote, no, 3);
    read_counts(remote, no, got);
    for (uint64_t i = 0; i < IDS; i++)
        assert_true(got[i] == 3);
    assert_int_equal(counts_of(remote).lost, 2 * (NUMBERS_WINDOW + 100));
    cluster_restart(&c, 1); /* what was lost before is not counted again */
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_int_equal(counts_of(remote).lost, 2 * NUMBERS_WINDOW + 203);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void *restart_often(void *arg)
{
    cluster *c = arg;
    for (uint32_t i = 0; i < 6; i++) {
        for (int k = 0; k < 20000; k++)
            sched_yield();
        cluster_restart(c, i % c->n);
    }
    return NULL;
}

static void many_threads_while_servers_come_and_go(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 3, 60 * SECOND, LOST_CONTINUE);
    uint32_t no = declare_counting(remote);
    pthread_t restarts;
    pusher pushers[THREADS];
    assert_int_equal(pthread_create(&restarts, NULL, restart_often, &c), 0);
    pushers_start(remote, no, pushers);
    pushers_join(pushers);
    pthread_join(restarts, NULL);
    /* A shard's updates and those lost there are all that there were. */
    client_update last = {.number = THREADS * UPDATES + 1};
    assert_int_equal(add_one(remote, &last, no, 0, IDS), PERSIA_OK);
    uint64_t updates = 0;
    for (uint32_t i = 0; i < 3; i++)
        updates += persia_tables_updates(c.nodes[i].p);
    client_counts n = counts_of(remote);
    /* An update may have been applied by a server that stopped before its
     * answer arrived: it was sent again, and is counted by neither. */
    assert_int_equal(updates + n.lost, 3 * (THREADS * UPDATES + 1));
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void a_server_may_still_be_starting(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote;
    uint32_t order[2] = {1, 0};
    cluster_make(&c, 2);
    client_config config = cluster_config(&c);
    config.timeout_ns = SECOND / 4;
    atomic_store(&c.nodes[0].down, 1);
    assert_int_equal(cluster_open(&c, &config, order, 2, &remote),
                     PERSIA_EUNAVAILABLE);
    assert_null(remote);
    assert_non_null(strstr(persia_err_text(), "ps0:8888"));
    atomic_store(&c.nodes[1].down, 1);
    assert_int_equal(cluster_open(&c, &config, order, 2, &remote),
                     PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(persia_err_text(), "ps0:8888"));
    assert_non_null(strstr(persia_err_text(), "ps1:8888"));
    pthread_t restarts; /* after a while they are there */
    config.timeout_ns = 60 * SECOND;
    assert_int_equal(pthread_create(&restarts, NULL, restart_often, &c), 0);
    assert_int_equal(cluster_open(&c, &config, order, 2, &remote),
                     PERSIA_OK);
    pthread_join(restarts, NULL);
    persia_client_destroy(remote);
    cluster_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lost_updates_are_counted_and_told),
        cmocka_unit_test(refused_updates_are_not_lost),
        cmocka_unit_test(a_new_process_counts_its_own_losses),
        cmocka_unit_test(what_only_some_servers_have_is_counted),
        cmocka_unit_test(an_update_that_was_not_sent_is_given_up),
        cmocka_unit_test(a_completed_update_is_lost_once),
        cmocka_unit_test(the_last_of_many_missing_ones_are_completed),
        cmocka_unit_test(what_a_rank_left_that_the_job_has_no_longer),
        cmocka_unit_test(a_rank_that_was_inherited_is_closed),
        cmocka_unit_test(a_replaced_rank_is_closed_by_one_server_of_two),
        cmocka_unit_test(
            a_batch_that_failed_is_applied_when_it_is_sent_again),
        cmocka_unit_test(a_look_tells_of_lost_updates),
        cmocka_unit_test(what_is_sent_again_is_not_lost),
        cmocka_unit_test(an_answer_of_an_earlier_life_is_none),
        cmocka_unit_test(who_looks_at_rows_disturbs_nobody),
        cmocka_unit_test(a_zombie_does_not_take_its_stream_back),
        cmocka_unit_test(a_step_that_one_rank_knows_of_is_lost_for_all),
        cmocka_unit_test(a_lookup_may_tell_a_server_which_step_it_lost),
        cmocka_unit_test(training_may_go_on_without_them),
        cmocka_unit_test(many_threads_while_servers_come_and_go),
        cmocka_unit_test(a_server_may_still_be_starting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
