/* client: servers that fail, stop and start again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "counting.h"

/* ---- exactly once ---- */

static void what_is_lost_on_the_way_is_applied_once(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 3, 60 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    float want[IDS] = {0}, got[IDS];
    for (uint32_t i = 0; i < 3; i++)
        c.nodes[i].lose = 100;
    pusher pushers[THREADS];
    pushers_start(remote, no, pushers);
    for (uint64_t t = 0; t < THREADS; t++)
        for (uint64_t i = 0; i < UPDATES; i++)
            for (uint64_t k = 0; k < IDS / 2; k++)
                want[(t + i) % 8 + k]++;
    pushers_join(pushers);
    read_counts(remote, no, got);
    assert_memory_equal(want, got, sizeof want);
    client_counts n = counts_of(remote);
    assert_true(n.retries > 0 && n.duplicates > 0);
    assert_int_equal(n.lost, 0);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(persia_tables_updates(c.nodes[i].p),
                         THREADS * UPDATES);
    assert_int_equal(persia_client_updates(remote), THREADS * UPDATES);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void every_shard_hears_of_every_update(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 3, 10 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    assert_int_equal(add_one(remote, NULL, no, 5, 1), PERSIA_OK);
    assert_int_equal(add_one(remote, NULL, no, 5, 0), PERSIA_OK);
    assert_int_equal(persia_client_push(remote, NULL, NULL, NULL, 0),
                     PERSIA_OK);
    for (uint32_t i = 0; i < 3; i++) {
        table_stats stats;
        assert_int_equal(persia_tables_updates(c.nodes[i].p), 3);
        persia_table_get_stats(persia_tables_table(c.nodes[i].p, 0), &stats);
        assert_int_equal(stats.pushes, 2);
    }
    client_update again = {.number = 4}; /* no server gets it */
    assert_int_equal(persia_client_skip(remote, &again), PERSIA_OK);
    assert_int_equal(cluster_calls(&c, WIRE_PUSH), 9);
    again.number = 2;
    assert_int_equal(add_one(remote, &again, no, 5, 1), PERSIA_OK);
    assert_int_equal(counts_of(remote).duplicates, 3);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void a_stream_goes_on_in_a_new_process(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 2, 10 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    for (int i = 0; i < 5; i++)
        assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    persia_client_destroy(remote);
    client_config config = cluster_config(&c);
    remote = cluster_client(&c, &config);
    assert_int_equal(persia_client_last_number(remote), 5);
    assert_int_equal(persia_client_updates(remote), 5);
    no = declare_counting(remote);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    /* A job that resumes from an older checkpoint repeats updates. */
    persia_client_set_last_number(remote, 3);
    for (int i = 0; i < 4; i++)
        assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_int_equal(counts_of(remote).duplicates, 6);
    read_counts(remote, no, got);
    assert_true(got[0] == 7);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* ---- a server that is restored, gone, or late ---- */

static void updates_of_before_a_restore_are_dropped(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 2, 10 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    c.nodes[0].stale = 1;
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    assert_int_equal(counts_of(remote).stale, 1);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    read_counts(remote, no, got);
    for (uint64_t i = 0; i < IDS; i++)
        assert_true(got[i] == (shard_of(i, 2) ? 2 : 1));
    assert_int_equal(persia_client_greet(remote, 1), PERSIA_OK);
    assert_int_equal(persia_client_last_number(remote), 2);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* ---- servers that do not answer ---- */

static void an_unreachable_server_is_named_in_time(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 3, SECOND / 3, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    atomic_store(&c.nodes[2].down, 1);
    uint64_t start = persia_clock_ns();
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(persia_err_text(), "ps2:8888"));
    assert_null(strstr(persia_err_text(), "ps1:8888"));
    assert_true(persia_clock_ns() - start < 20 * SECOND);
    float rows[DIM];
    uint64_t id = 0;
    while (shard_of(id, 3) != 2)
        id++;
    pull_job pull = {.n = 1, .ids = &id, .out = rows, .stride = DIM};
    assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1),
                     PERSIA_EUNAVAILABLE);
    /* A batch without its rows does not need it. */
    while (shard_of(id, 3) == 2)
        id++;
    assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1), PERSIA_OK);
    atomic_store(&c.nodes[2].down, 0);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(persia_tables_updates(c.nodes[i].p), i == 2 ? 1 : 2);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static _Atomic(int) polls;
static int stop_at_third(void)
{
    return ++polls >= 3 ? PERSIA_EINTR : PERSIA_OK;
}

static void an_interrupt_ends_a_wait(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 2, 60 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    atomic_store(&c.nodes[1].held, UINT32_MAX);
    polls = 0;
    persia_interrupt_install(stop_at_third);
    uint64_t start = persia_clock_ns();
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_EINTR);
    assert_true(persia_clock_ns() - start < 30 * SECOND);
    polls = 0;
    float rows[IDS * DIM];
    uint64_t ids[IDS];
    for (uint64_t i = 0; i < IDS; i++)
        ids[i] = i;
    pull_job pull = {.n = IDS, .ids = ids, .out = rows, .stride = DIM};
    assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1),
                     PERSIA_EINTR);
    persia_interrupt_install(NULL);
    atomic_store(&c.nodes[1].held, 0);
    /* The update that was left behind is still on its way, and lands. */
    while (atomic_load(&c.nodes[1].active))
        sched_yield();
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
    read_counts(remote, no, got);
    for (uint64_t i = 0; i < IDS; i++)
        assert_true(got[i] == 2);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void *end_lookups(void *client)
{
    usleep(100000); /* most often it waits by then */
    persia_client_end(client, END_LOOKUPS);
    return NULL;
}

static void *end_all(void *client)
{
    usleep(100000);
    persia_client_end(client, END_ALL);
    return NULL;
}

static void a_store_that_ends_waits_for_no_lookup(void **state)
{
    (void)state;
    for (int down = 0; down < 2; down++) {
        cluster c;
        ps_client *remote = open_one(&c, 2, 60 * SECOND, LOST_RAISE);
        uint32_t no = declare_counting(remote);
        float row[DIM];
        uint64_t id = 0;
        pull_job pull = {.n = 1, .ids = &id, .out = row, .stride = DIM};
        pthread_t thread;
        while (!shard_of(id, 2))
            id++;
        atomic_store(&c.nodes[1].down, down);
        atomic_store(&c.nodes[1].held, down ? 0 : UINT32_MAX);
        assert_int_equal(pthread_create(&thread, NULL, end_lookups, remote),
                         0);
        uint64_t start = persia_clock_ns();
        assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1),
                         PERSIA_ECLOSED);
        assert_true(persia_clock_ns() - start < 30 * SECOND);
        pthread_join(thread, NULL);
        atomic_store(&c.nodes[1].held, 0);
        atomic_store(&c.nodes[1].down, 0);
        /* Updates continue, until they are to end, too. */
        assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_OK);
        atomic_store(&c.nodes[1].held, UINT32_MAX);
        assert_int_equal(pthread_create(&thread, NULL, end_all, remote), 0);
        assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_ECLOSED);
        pthread_join(thread, NULL);
        atomic_store(&c.nodes[1].held, 0);
        persia_client_destroy(remote);
        cluster_free(&c);
    }
}

static void a_store_may_end_while_a_call_is_left_behind(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, SECOND / 5, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    atomic_store(&c.nodes[1].held, UINT32_MAX);
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_ETIMEOUT);
    assert_non_null(strstr(persia_err_text(), "ps1:8888"));
    persia_client_destroy(remote);
    cluster_free(&c);
}

static void nonsense_is_an_error_with_a_name(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, 10 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    float rows[IDS * DIM];
    uint64_t ids[IDS];
    for (uint64_t i = 0; i < IDS; i++)
        ids[i] = i;
    pull_job pull = {.n = IDS, .ids = ids, .out = rows, .stride = DIM};
    c.nodes[1].garbage = 1;
    assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1),
                     PERSIA_EPROTOCOL);
    assert_non_null(strstr(persia_err_text(), "ps1:8888"));
    assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1), PERSIA_OK);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* ---- who the servers are ---- */

static void hello_fails(cluster *c, const uint32_t *order, size_t n,
                        const char *name_space, const char *a, const char *b)
{
    ps_client *remote;
    client_config config = cluster_config(c);
    snprintf(config.name_space, sizeof config.name_space, "%s", name_space);
    assert_int_equal(cluster_open(c, &config, order, n, &remote),
                     PERSIA_EMISMATCH);
    assert_null(remote);
    if (!strstr(persia_err_text(), a) || !strstr(persia_err_text(), b))
        fail_msg("%s", persia_err_text());
}

static void hello_finds_what_is_wrong(void **state)
{
    (void)state;
    cluster c;
    cluster_make(&c, 4);
    hello_fails(&c, (uint32_t[]){2, 0}, 2, "test", "shards 1, 3 of 4",
                "missing");
    hello_fails(&c, (uint32_t[]){2, 0, 1, 2}, 4, "test",
                "ps2:8888 and ps2:8888", "both shard 2 of 4");
    hello_fails(&c, (uint32_t[]){0, 1, 2, 3}, 4, "other", "other",
                "'test'");
    c.nodes[3].config.shards = 5;
    cluster_restart(&c, 3);
    hello_fails(&c, (uint32_t[]){0, 1, 2, 3}, 4, "test", "ps3:8888",
                "shard 3 of 5");
    cluster_free(&c);
}

static void the_order_of_addresses_means_nothing(void **state)
{
    (void)state;
    cluster c;
    float got[IDS], again[IDS];
    ps_client *a = open_one(&c, 5, 10 * SECOND, LOST_RAISE), *b;
    uint32_t no = declare_counting(a);
    assert_int_equal(add_one(a, NULL, no, 3, 20), PERSIA_OK);
    client_config config = cluster_config(&c);
    config.stream = 78;
    uint32_t order[5] = {3, 0, 4, 1, 2};
    assert_int_equal(cluster_open(&c, &config, order, 5, &b), PERSIA_OK);
    no = declare_counting(b);
    assert_int_equal(persia_client_last_number(b), 0);
    assert_int_equal(add_one(b, NULL, no, 3, 20), PERSIA_OK);
    read_counts(a, no, got);
    read_counts(b, no, again);
    assert_memory_equal(got, again, sizeof got);
    assert_true(got[3] == 2 && got[2] == 0);
    persia_client_destroy(a);
    persia_client_destroy(b);
    cluster_free(&c);
}

/* ---- synchronous steps ---- */

enum { RANKS = 3, STEPS = 8 };

typedef struct rank {
    ps_client *c;
    uint32_t no, rank;
    uint64_t from; /* the step before its first */
    int rc;
} rank;

static void *run_rank(void *arg)
{
    rank *r = arg;
    for (uint64_t s = 1; s <= STEPS && !r->rc; s++) {
        client_update name = {.number = r->from + s, .step = r->from + s,
                              .part = r->rank, .parts = RANKS};
        r->rc = add_one(r->c, &name, r->no, r->rank, IDS / 2);
    }
    return NULL;
}

/* All of them side by side, from the step behind `from` on. */
static void run_ranks(rank *ranks, uint64_t from)
{
    pthread_t threads[RANKS];
    for (int i = 0; i < RANKS; i++) {
        ranks[i].from = from;
        assert_int_equal(pthread_create(&threads[i], NULL, run_rank,
                                        &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(ranks[i].rc, PERSIA_OK);
}

static void ranks_apply_one_step_together(void **state)
{
    (void)state;
    cluster c;
    rank ranks[RANKS];
    float got[IDS];
    cluster_make(&c, 2);
    client_config config = cluster_config(&c);
    config.world = RANKS;
    config.lost = LOST_CONTINUE;
    for (uint32_t i = 0; i < RANKS; i++) {
        uint64_t applied = 9;
        config.rank = i;
        config.stream = 200 + i;
        ranks[i] = (rank){.c = cluster_client(&c, &config), .rank = i};
        ranks[i].no = declare_counting(ranks[i].c);
        assert_int_equal(persia_client_join(ranks[i].c, 0, &applied),
                         PERSIA_OK);
        assert_int_equal(applied, 0);
    }
    run_ranks(ranks, 0);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(persia_tables_updates(c.nodes[i].p), STEPS);
    read_counts(ranks[1].c, ranks[1].no, got);
    assert_true(got[0] == STEPS && got[1] == 2 * STEPS &&
                got[2] == RANKS * STEPS);
    /* A rank whose gradients are refused does not stop the others. */
    float bad = NAN;
    uint64_t id = 1, applied;
    push_part part = {.n = 1, .ids = &id, .grad = &bad, .stride = 1,
                      .bags = 1};
    optim_args sgd = {.kind = OPTIM_SGD, .lr = NAN, .step = 1,
                      .grad_scale = 1};
    push_job job = {.parts = &part, .parts_n = 1, .optim = &sgd};
    client_update name = {.number = STEPS + 1, .step = STEPS + 1,
                          .parts = RANKS};
    assert_int_equal(persia_client_leave(ranks[1].c, 0), PERSIA_OK);
    assert_int_equal(persia_client_leave(ranks[2].c, 1), PERSIA_OK);
    assert_int_equal(
        persia_client_push(ranks[0].c, &name, &ranks[0].no, &job, 1),
        PERSIA_EARG);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(persia_tables_updates(c.nodes[i].p), STEPS + 1);
    name.number++;
    name.step++;
    assert_int_equal(persia_client_skip(ranks[0].c, &name), PERSIA_OK);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(persia_tables_updates(c.nodes[i].p), STEPS + 2);
    /* A shard that starts again learns which ranks have left. */
    cluster_restart(&c, 0);
    read_counts(ranks[1].c, ranks[1].no, got);
    read_counts(ranks[2].c, ranks[2].no, got);
    name.number++;
    name.step++;
    assert_int_equal(add_one(ranks[0].c, &name, ranks[0].no, 0, 4),
                     PERSIA_OK);
    /* Also from one that trains on, if those that have left are silent. */
    cluster_restart(&c, 1);
    name.number++;
    name.step++;
    assert_int_equal(add_one(ranks[0].c, &name, ranks[0].no, 0, 4),
                     PERSIA_OK);
    assert_int_equal(persia_tables_updates(c.nodes[1].p), 1);
    /* In the next pass none of them is taken for one that has left. */
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(persia_client_join(ranks[i].c, name.step, &applied),
                         PERSIA_OK);
    cluster_restart(&c, 0);
    run_ranks(ranks, name.step);
    assert_int_equal(persia_tables_updates(c.nodes[0].p), STEPS);
    for (int i = 0; i < RANKS; i++)
        persia_client_destroy(ranks[i].c);
    cluster_free(&c);
}

static void *skip_first(void *arg)
{
    rank *r = arg;
    const client_update name = {.number = 1, .step = 1, .parts = RANKS};
    r->rc = persia_client_skip(r->c, &name);
    return NULL;
}

/* The part of rank 1 waits for less time than the empty one of rank 0, both in
 * vain; then it is sent again. */
static void an_empty_part_is_sent_again_with_the_others(void **state)
{
    (void)state;
    cluster c;
    rank ranks[RANKS];
    pthread_t thread;
    cluster_make(&c, 2);
    client_config config = cluster_config(&c);
    config.world = RANKS;
    for (uint32_t i = 0; i < RANKS; i++) {
        uint64_t applied;
        config.rank = i;
        config.stream = 200 + i;
        config.timeout_ns = i == 1 ? SECOND / 5 : 60 * SECOND;
        ranks[i] = (rank){.c = cluster_client(&c, &config), .rank = i};
        ranks[i].no = declare_counting(ranks[i].c);
        assert_int_equal(persia_client_join(ranks[i].c, 0, &applied),
                         PERSIA_OK);
    }
    assert_int_equal(pthread_create(&thread, NULL, skip_first, &ranks[0]), 0);
    while (cluster_calls(&c, WIRE_PUSH) < 2 || atomic_load(&cluster_answering))
        sched_yield();
    const client_update name = {.number = 1, .step = 1, .part = 1,
                                .parts = RANKS};
    assert_int_equal(add_one(ranks[1].c, &name, ranks[1].no, 1, 4),
                     PERSIA_ETIMEOUT);
    assert_int_equal(persia_client_leave(ranks[2].c, 0), PERSIA_OK);
    int rc = PERSIA_ETIMEOUT;
    for (int i = 0; i < 50 && rc == PERSIA_ETIMEOUT; i++)
        rc = add_one(ranks[1].c, &name, ranks[1].no, 1, 4);
    assert_int_equal(rc, PERSIA_OK);
    pthread_join(thread, NULL);
    assert_int_equal(ranks[0].rc, PERSIA_OK);
    for (int i = 0; i < RANKS; i++)
        persia_client_destroy(ranks[i].c);
    cluster_free(&c);
}

static uint64_t most_patience(cluster *c, uint32_t method)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < c->n; i++) {
        uint64_t one = atomic_exchange(&c->nodes[i].patience[method], 0);
        most = one > most ? one : most;
    }
    return most;
}

/* An error that is on its way must not wait for its cause once more. */
static void leaving_does_not_wait_for_servers_that_have_failed(void **state)
{
    (void)state;
    cluster c;
    uint64_t applied;
    float got[IDS];
    ps_client *remote = open_one(&c, 2, 3 * SECOND, LOST_RAISE);
    uint32_t no = declare_counting(remote);
    assert_int_equal(persia_client_join(remote, 0, &applied), PERSIA_OK);
    assert_int_equal(persia_client_leave(remote, 1), PERSIA_OK);
    (void)most_patience(&c, WIRE_LEAVE); /* that of the join, too */
    assert_int_equal(persia_client_leave(remote, 1), PERSIA_OK);
    assert_in_range(most_patience(&c, WIRE_LEAVE), 1, SECOND);
    assert_int_equal(persia_client_join(remote, 0, &applied), PERSIA_OK);
    (void)most_patience(&c, WIRE_LEAVE);
    c.nodes[1].down = 1;
    assert_int_equal(add_one(remote, NULL, no, 0, 4), PERSIA_EUNAVAILABLE);
    assert_int_equal(persia_client_leave(remote, 0), PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(persia_err_text(), " in 1 s)"));
    assert_in_range(most_patience(&c, WIRE_LEAVE), 1, SECOND);
    /* It is there again, and has all the time. */
    c.nodes[1].down = 0;
    read_counts(remote, no, got);
    c.nodes[1].down = 1;
    assert_int_equal(persia_client_leave(remote, 0), PERSIA_EUNAVAILABLE);
    assert_non_null(strstr(persia_err_text(), " in 3 s)"));
    c.nodes[1].down = 0;
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* It is an empty one there: counts and clocks of all shards move alike. */
static void an_update_that_one_shard_refuses_counts_at_all(void **state)
{
    (void)state;
    cluster c;
    float got[IDS];
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_RAISE);
    uint32_t no = declare_bounded(remote, 8); /* 4 a shard */
    uint64_t low = 0, n = 0, per[2] = {0, 0};
    while (per[0] < 5 && per[1] < 5) /* then one shard has too many ids */
        per[shard_of(n++, 2)]++;
    uint64_t full = per[0] == 5 ? 0 : 1;
    assert_int_equal(add_one(remote, NULL, no, low, n - 1), PERSIA_OK);
    assert_int_equal(add_one(remote, NULL, no, low, n), PERSIA_ECAPACITY);
    assert_non_null(strstr(persia_err_text(), "other shards may have"));
    assert_int_equal(add_one(remote, NULL, no, low, n - 1), PERSIA_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(persia_tables_updates(c.nodes[i].p), 3);
        table_stats stats;
        persia_table_get_stats(persia_tables_table(c.nodes[i].p, no), &stats);
        assert_int_equal(stats.pushes, 3);
    }
    read_counts(remote, no, got);
    for (uint64_t i = 0; i < IDS; i++) {
        float there = (uint64_t)shard_of(i, 2) == full ? 2 : 3;
        assert_true(got[i] == (i < n - 1 ? there : 0));
    }
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* A message that is too large for one of the servers: no other one applies
 * its part, and no rank waits for a part of a step. */
static void an_update_too_large_for_one_server_reaches_none(void **state)
{
    enum { LIMIT = 4096 };
    (void)state;
    cluster c;
    float got[IDS];
    cluster_make(&c, 2);
    for (uint32_t i = 0; i < 2; i++) {
        c.nodes[i].config.message_limit = LIMIT;
        cluster_restart(&c, i);
    }
    client_config config = cluster_config(&c);
    ps_client *remote = cluster_client(&c, &config);
    uint32_t no = declare_counting(remote);
    static uint64_t ids[LIMIT / 8];
    static float grad[LIMIT / 8 * DIM];
    size_t n = 0;
    for (uint64_t id = 0; n < LIMIT / 8; id++)
        if (shard_of(id, 2) == 1 || n == 0)
            ids[n++] = id;
    push_part part = {.n = n, .ids = ids, .grad = grad, .stride = DIM,
                      .bags = n};
    optim_args sgd = {.kind = OPTIM_SGD, .lr = 1, .step = 1,
                      .grad_scale = 1};
    push_job job = {.parts = &part, .parts_n = 1, .optim = &sgd};
    assert_int_equal(persia_client_push(remote, NULL, &no, &job, 1),
                     PERSIA_ELIMIT);
    assert_non_null(strstr(persia_err_text(), "ps1:8888"));
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(persia_tables_updates(c.nodes[i].p), 0);
    /* Ranks learn that nothing will be sent. */
    client_update name = {.number = 2, .step = 1, .part = 0, .parts = 2};
    uint64_t applied;
    config.rank = 1;
    config.world = 2;
    config.stream++;
    ps_client *other = cluster_client(&c, &config);
    assert_int_equal(persia_client_leave(other, 0), PERSIA_OK);
    assert_int_equal(persia_client_join(remote, 0, &applied), PERSIA_OK);
    assert_int_equal(persia_client_push(remote, &name, &no, &job, 1),
                     PERSIA_ELIMIT);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(persia_tables_updates(c.nodes[i].p), 1);
    read_counts(remote, no, got);
    assert_true(got[0] == 0);
    persia_client_destroy(other);
    persia_client_destroy(remote);
    cluster_free(&c);
}

typedef struct adder {
    ps_client *c;
    uint32_t no;
    size_t n;
    int rc;
    char text[FAN_TEXT];
} adder;

static void *add_aside(void *arg)
{
    adder *a = arg;
    a->rc = add_one(a->c, NULL, a->no, 0, a->n);
    snprintf(a->text, sizeof a->text, "%s", persia_err_text());
    return NULL;
}

/* A server refuses its part, and the answer is lost. */
static void a_refusal_that_is_lost_is_told_again(void **state)
{
    (void)state;
    cluster c;
    pthread_t thread;
    ps_client *remote = open_one(&c, 2, 20 * SECOND, LOST_RAISE);
    uint32_t no = declare_bounded(remote, 8); /* 4 a shard */
    uint64_t n = 0, per[2] = {0, 0};
    while (per[0] < 5 && per[1] < 5) /* then one shard has too many ids */
        per[shard_of(n++, 2)]++;
    node *full = &c.nodes[per[0] == 5 ? 0 : 1];
    adder a = {.c = remote, .no = no, .n = n};
    atomic_store(&full->mute, 1);
    assert_int_equal(pthread_create(&thread, NULL, add_aside, &a), 0);
    while (!atomic_load(&full->calls[WIRE_PUSH]))
        sched_yield();
    atomic_store(&full->mute, 0);
    pthread_join(thread, NULL);
    assert_int_equal(a.rc, PERSIA_ECAPACITY);
    persia_client_destroy(remote);
    cluster_free(&c);
}

static node *greeted;
static _Atomic(int) stopped;
static int stop_while_greeting(void)
{
    if (atomic_load(&stopped) || !greeted ||
        !atomic_load(&greeted->waiting))
        return PERSIA_OK;
    atomic_store(&stopped, 1);
    return PERSIA_EINTR;
}

/* Ctrl-C while one server that started again is greeted: the call does not
 * wait for another one until its deadline. */
static void an_interrupt_of_a_greeting_ends_the_call(void **state)
{
    (void)state;
    cluster c;
    ps_client *remote = open_one(&c, 2, 6 * SECOND, LOST_CONTINUE);
    uint32_t no = declare_counting(remote);
    cluster_restart(&c, 0);
    atomic_store(&c.nodes[0].held, 1u << WIRE_HELLO);
    atomic_store(&c.nodes[1].held, UINT32_MAX);
    greeted = &c.nodes[0];
    persia_interrupt_install(stop_while_greeting);
    uint64_t start = persia_clock_ns();
    assert_int_equal(add_one(remote, NULL, no, 0, IDS), PERSIA_EINTR);
    persia_interrupt_install(NULL);
    assert_true(persia_clock_ns() - start < 3 * SECOND);
    atomic_store(&c.nodes[0].held, 0);
    atomic_store(&c.nodes[1].held, 0);
    persia_client_destroy(remote);
    cluster_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_lost_on_the_way_is_applied_once),
        cmocka_unit_test(every_shard_hears_of_every_update),
        cmocka_unit_test(a_stream_goes_on_in_a_new_process),
        cmocka_unit_test(updates_of_before_a_restore_are_dropped),
        cmocka_unit_test(an_unreachable_server_is_named_in_time),
        cmocka_unit_test(an_interrupt_ends_a_wait),
        cmocka_unit_test(a_store_that_ends_waits_for_no_lookup),
        cmocka_unit_test(a_store_may_end_while_a_call_is_left_behind),
        cmocka_unit_test(nonsense_is_an_error_with_a_name),
        cmocka_unit_test(hello_finds_what_is_wrong),
        cmocka_unit_test(the_order_of_addresses_means_nothing),
        cmocka_unit_test(ranks_apply_one_step_together),
        cmocka_unit_test(an_empty_part_is_sent_again_with_the_others),
        cmocka_unit_test(leaving_does_not_wait_for_servers_that_have_failed),
        cmocka_unit_test(an_update_that_one_shard_refuses_counts_at_all),
        cmocka_unit_test(an_update_too_large_for_one_server_reaches_none),
        cmocka_unit_test(a_refusal_that_is_lost_is_told_again),
        cmocka_unit_test(an_interrupt_of_a_greeting_ends_the_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
