/* store, with tables behind a client: updates of threads, and steps that all
 * ranks take together.  As in test_prefetch.c every batch holds id 7, whose
 * row begins at 0 and grows by 1 with each gradient; so what a lookup gives
 * is the number of gradients that it saw. */
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
#include "pool/pool.h"
#include "server/server.h"

enum { DIM = 4, IDS = 3, RANKS = 3 };

/* Memory of lookups and gradients that is not released yet. */
static atomic_int alive;

typedef struct memory {
    int64_t ids[IDS];
    float out[IDS * DIM];
    uint32_t rows[IDS];
    struct batch_index *index;
} memory;

static memory *memory_new(void)
{
    memory *m = calloc(1, sizeof *m);
    if (!m)
        abort();
    for (int i = 0; i < IDS; i++)
        m->ids[i] = 7 + i;
    atomic_fetch_add(&alive, 1);
    return m;
}

static void memory_release(void *owner)
{
    memory *m = owner;
    persia_batch_index_put(m->index);
    atomic_fetch_sub(&alive, 1);
    free(m);
}

static id_batch batch_of(const memory *m)
{
    return (id_batch){.n = IDS, .bags = IDS, .values = m->ids};
}

/* ---- ranks that share one shard ---- */

typedef struct job {
    tables *p;
    ps_service *service;
    uint32_t world;
    struct rank {
        struct job *job;
        uint32_t number;
        uint64_t handle;
        loop *s;
        ps_client *c;
        uint32_t plan;
    } ranks[RANKS];
} job;

typedef struct rank rank;

static void rank_open(job *j, uint32_t number)
{
    static const char *const address[] = {"in this process"};
    rank *r = &j->ranks[number];
    *r = (rank){.job = j, .number = number};
    client_config config = {.threads = 1,
                            .addresses = address,
                            .addresses_n = 1,
                            .own = persia_service_shard(j->service),
                            .name_space = "test",
                            .rank = number,
                            .world = j->world,
                            .stream = 100 + number,
                            .timeout_ns = 20000000000u,
                            .message_limit = 1 << 20};
    assert_int_equal(persia_client_create(&config, &r->c), PERSIA_OK);
    assert_int_equal(persia_loop_open(r->c, &r->handle), PERSIA_OK);
    assert_int_equal(persia_loop_get(r->handle, "test", &r->s, NULL),
                     PERSIA_OK);
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
        persia_client_declare(r->c, &c, &no, &created),
        PERSIA_OK);
    plan_feature f = {.name = "f", .table = no, .pooling = POOL_SUM,
                      .trainable = 1};
    assert_int_equal(persia_loop_plan(r->s, PLAN_BAGS, 1, &f, 1, &r->plan),
                     PERSIA_OK);
    assert_false(persia_loop_is_embedded(r->s));
}

static void rank_close(rank *r)
{
    persia_loop_put(r->s);
    persia_loop_close(r->handle);
}

static void job_open(job *j, uint32_t world)
{
    tables_config shard = {.threads = 1};
    service_config config = {.name_space = "test", .shards = 1,
                             .message_limit = 1 << 20};
    *j = (job){.world = world};
    assert_int_equal(persia_tables_create(&shard, &j->p), PERSIA_OK);
    assert_int_equal(persia_service_create(j->p, &config, &j->service),
                     PERSIA_OK);
    for (uint32_t i = 0; i < world; i++)
        rank_open(j, i);
}

static void job_close(job *j)
{
    for (uint32_t i = 0; i < j->world; i++)
        rank_close(&j->ranks[i]);
    persia_service_destroy(j->service);
    persia_tables_destroy(j->p);
    assert_int_equal(atomic_load(&alive), 0);
}

/* ---- a loop ---- */

static uint64_t batch_add(rank *r, uint64_t stream)
{
    uint64_t batch = persia_loop_batch_number();
    if (persia_loop_batch_add(r->s, stream, batch))
        abort();
    memory *m = memory_new();
    loop_lookup l = {.plan = r->plan, .batch = batch_of(m), .out = m->out,
                     .stride = DIM, .hints = m->rows,
                     .index = &m->index, .owner = m,
                     .release = memory_release};
    if (persia_loop_batch_lookup(r->s, batch, &l))
        abort();
    persia_loop_batch_ready(r->s, batch);
    return batch;
}

/* The gradients seen; -1 where it fails. */
static int forward(rank *r, uint64_t batch, uint64_t *ticket)
{
    *ticket = persia_loop_ticket(r->s);
    persia_loop_batch_bind(r->s, batch, *ticket);
    void *owner;
    if (persia_loop_batch_take(r->s, batch, r->plan, &owner))
        return -1;
    memory *m = owner ? owner : memory_new();
    id_batch b = batch_of(m);
    if (owner)
        persia_loop_keep_index(r->s, *ticket, m->index);
    else if (persia_loop_forward(r->s, *ticket, r->plan, &b, m->out, DIM,
                                 m->rows))
        return -1;
    m->index = NULL;
    int seen = (int)m->out[0];
    memory_release(m);
    return seen;
}

static int hold(rank *r, uint64_t ticket)
{
    static const float grad[IDS * DIM] = {-1, -1, -1, -1};
    memory *m = memory_new();
    for (int i = 0; i < IDS; i++)
        m->rows[i] = ROW_NONE;
    loop_grad g = {.ticket = ticket,
                   .grad = {.plan = r->plan, .batch = batch_of(m),
                            .rows = m->rows, .grad = grad, .stride = DIM},
                   .owner = m,
                   .release = memory_release};
    int rc = persia_loop_add_grad(r->s, &g);
    if (rc)
        memory_release(m);
    return rc;
}

static int apply(rank *r, enum loop_whose whose)
{
    optim_args o = {.kind = OPTIM_SGD, .lr = 1, .grad_scale = 1};
    return persia_loop_apply(r->s, whose, &o, 1);
}

static int value(rank *r)
{
    const uint64_t id = 7;
    float vector[DIM], state[1];
    if (persia_client_get(r->c, 0, 1, &id, vector, state,
                          NULL))
        return -1;
    return (int)vector[0];
}

static uint32_t random_u32(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* ---- one rank ---- */

static void random_loop(rank *r, uint32_t seed)
{
    enum { N = 100 };
    uint64_t staleness = random_u32(&seed) % 4, stream;
    assert_int_equal(persia_loop_pass_open(r->s, staleness, 0, &stream),
                     PERSIA_OK);
    uint64_t batch[N], ticket[N] = {0};
    int seen[N], updated[N] = {0};
    int added = 0, base = value(r);
    for (int t = 0; t < N; t++) {
        seen[t] = -1;
        int depth = 1 + (int)(random_u32(&seed) % 4);
        while (added <= t + depth && added < N)
            batch[added++] = batch_add(r, stream);
        assert_int_equal(persia_loop_batch_next(r->s, batch[t], 0),
                         PERSIA_OK);
        if (random_u32(&seed) % 8 == 0)
            continue;
        seen[t] = forward(r, batch[t], &ticket[t]) - base;
        int back = t - (int)(random_u32(&seed) % 3);
        if (back >= 0 && ticket[back] && !hold(r, ticket[back])) {
            if (random_u32(&seed) % 10) {
                assert_int_equal(apply(r, LOOP_MINE), PERSIA_OK);
                updated[back] = 1;
            } else {
                persia_loop_discard(r->s, LOOP_ALL);
            }
        }
        if (random_u32(&seed) % 10 == 0)
            persia_loop_batch_skip(r->s, batch[t]);
    }
    int all = 0;
    for (int t = 0; t < N; t++) {
        if (seen[t] >= 0)
            assert_true(all - seen[t] <= (int)staleness);
        all += updated[t];
    }
    persia_loop_pass_close(r->s, stream);
    assert_int_equal(persia_loop_flush(r->s, 0), PERSIA_OK);
    assert_int_equal(value(r), base + all);
}

static void test_staleness_under_random_schedules(void **state)
{
    (void)state;
    job j;
    job_open(&j, 1);
    for (uint32_t seed = 1; seed <= 40; seed++)
        random_loop(&j.ranks[0], seed);
    loop_counts counts;
    persia_loop_get_counts(j.ranks[0].s, &counts);
    assert_int_equal(counts.pending, 0);
    assert_int_equal(counts.failed, 0);
    assert_int_equal(counts.applied, persia_tables_updates(j.p));
    job_close(&j);
}

/* Updates that are in flight when the store ends are applied. */
static void test_a_store_ends_with_its_updates(void **state)
{
    (void)state;
    job j;
    job_open(&j, 2);
    for (int round = 0; round < 20; round++) {
        rank *r = &j.ranks[0];
        for (int i = 0; i < 10; i++) {
            assert_int_equal(hold(r, 0), PERSIA_OK);
            assert_int_equal(apply(r, LOOP_MINE), PERSIA_OK);
        }
        rank_close(r);
        assert_int_equal(atomic_load(&alive), 0);
        assert_int_equal(value(&j.ranks[1]), 10 * (round + 1));
        rank_open(&j, 0); /* its numbers continue where they were */
    }
    job_close(&j);
}

/* ---- steps of all ranks ---- */

enum { STEPS = 120 };

static pthread_barrier_t meeting;

/* What the ranks of one job did. */
static struct {
    uint32_t world, seed;
    int by_batch;
    int batches[RANKS];
    uint64_t applied[RANKS]; /* as each rank learned when it joined */
    int seen[RANKS][STEPS];
    int gave[RANKS][STEPS];  /* gradients in the store */
    int failed[RANKS];
} told;

static int synchronous_loop(rank *r)
{
    uint32_t seed = told.seed * 31 + r->number;
    uint64_t stream, next = 0;
    pthread_barrier_wait(&meeting);
    if (persia_loop_join(r->s, &told.applied[r->number]))
        return 1;
    pthread_barrier_wait(&meeting); /* an all_reduce of the largest */
    uint64_t last = 0;
    for (uint32_t i = 0; i < told.world; i++)
        last = told.applied[i] > last ? told.applied[i] : last;
    if (persia_loop_sync(r->s, last, r->number, told.world) ||
        persia_loop_pass_open(r->s, 0, 0, &stream) ||
        persia_loop_pass_sync(r->s, stream, told.by_batch))
        return 2;
    int n = told.batches[r->number];
    for (int t = -1; t < n; t++) {
        uint64_t batch = next, ticket;
        next = t + 1 < n ? batch_add(r, stream) : 0;
        if (t < 0)
            continue;
        uint32_t dice = random_u32(&seed) % 12;
        if (persia_loop_batch_next(r->s, batch, dice == 0))
            return 3;
        told.seen[r->number][t] = -1;
        int give = dice > 4;
        if (dice > 1)
            told.seen[r->number][t] = forward(r, batch, &ticket);
        if (dice == 2)
            persia_loop_batch_skip(r->s, batch);
        if (dice == 3 &&
            (hold(r, ticket) || persia_loop_discard(r->s, LOOP_ALL) != 1))
            return 4;
        if (give && hold(r, ticket))
            return 5;
        told.gave[r->number][t] = give;
        if (!told.by_batch || give)
            if (apply(r, told.by_batch ? LOOP_MINE : LOOP_ALL))
                return 6;
    }
    persia_loop_pass_close(r->s, stream);
    return persia_loop_leave(r->s, 1) ? 7 : 0;
}

static void *synchronous_rank(void *arg)
{
    rank *r = arg;
    told.failed[r->number] = synchronous_loop(r);
    return NULL;
}

static void run_ranks(job *j)
{
    pthread_t threads[RANKS];
    pthread_barrier_init(&meeting, NULL, j->world);
    for (uint32_t i = 0; i < j->world; i++)
        pthread_create(&threads[i], NULL, synchronous_rank, &j->ranks[i]);
    for (uint32_t i = 0; i < j->world; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&meeting);
}

/* Ranks that leave out gradients in all ways, and end at different times:
 * every lookup sees all gradients of the steps before it. */
static void test_ranks_take_every_step_together(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= RANKS; world++) {
        job j;
        job_open(&j, world);
        for (uint32_t round = 0; round < 6; round++) {
            memset(&told, 0, sizeof told);
            told.world = world;
            told.seed = round * 7 + world;
            told.by_batch = round % 2 == 0;
            for (uint32_t i = 0; i < world; i++)
                told.batches[i] = STEPS - (int)(round * 17 * i % 90);
            int base = value(&j.ranks[0]), all = base;
            uint64_t steps = persia_tables_updates(j.p);
            run_ranks(&j);
            for (uint32_t i = 0; i < world; i++)
                assert_int_equal(told.failed[i], 0);
            for (int t = 0; t < STEPS; t++) {
                for (uint32_t i = 0; i < world; i++)
                    if (t < told.batches[i] && told.seen[i][t] >= 0)
                        assert_int_equal(told.seen[i][t], all);
                for (uint32_t i = 0; i < world; i++)
                    all += told.gave[i][t];
            }
            assert_int_equal(value(&j.ranks[0]), all);
            assert_int_equal(persia_tables_updates(j.p), steps + STEPS);
        }
        job_close(&j);
    }
}

static uint64_t begin_step(rank *r, uint64_t *stream)
{
    assert_int_equal(persia_loop_sync(r->s, 0, r->number, 2), PERSIA_OK);
    assert_int_equal(persia_loop_pass_open(r->s, 0, 0, stream), PERSIA_OK);
    assert_int_equal(persia_loop_pass_sync(r->s, *stream, 1), PERSIA_OK);
    return batch_add(r, *stream);
}

static void give_step(rank *r, uint64_t batch)
{
    uint64_t ticket;
    assert_int_equal(persia_loop_batch_next(r->s, batch, 0), PERSIA_OK);
    assert_int_equal(forward(r, batch, &ticket), 0);
    assert_int_equal(hold(r, ticket), PERSIA_OK);
    assert_int_equal(apply(r, LOOP_MINE), PERSIA_OK);
}

static uint64_t lookups_started(rank *r)
{
    loop_prefetch_stats stats;
    persia_loop_get_prefetch_stats(r->s, &stats);
    return stats.started;
}

/* No round trip between an update and the next lookup: that waits for it at
 * the shard. */
static void test_a_lookup_is_sent_behind_the_update(void **state)
{
    (void)state;
    job j;
    job_open(&j, 2);
    rank *one = &j.ranks[0], *other = &j.ranks[1];
    uint64_t stream, stream_1, applied, ticket;
    assert_int_equal(persia_loop_join(one->s, &applied), PERSIA_OK);
    assert_int_equal(persia_loop_join(other->s, &applied), PERSIA_OK);
    uint64_t first = begin_step(one, &stream);
    uint64_t second = batch_add(one, stream);
    uint64_t first_1 = begin_step(other, &stream_1);
    give_step(one, first);
    for (int i = 0; i < 1000 && lookups_started(one) < 2; i++)
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    assert_int_equal(lookups_started(one), 2);
    assert_int_equal(value(one), 0); /* the other part is missing */
    give_step(other, first_1);
    assert_int_equal(persia_loop_batch_next(one->s, second, 0), PERSIA_OK);
    assert_int_equal(forward(one, second, &ticket), 2);
    persia_loop_pass_close(one->s, stream);
    persia_loop_pass_close(other->s, stream_1);
    assert_int_equal(persia_loop_leave(one->s, 0), PERSIA_OK);
    assert_int_equal(persia_loop_leave(other->s, 0), PERSIA_OK);
    job_close(&j);
}

/* After a pass updates of one rank are whole again. */
static void test_updates_after_a_pass_are_no_parts(void **state)
{
    (void)state;
    job j;
    job_open(&j, 2);
    memset(&told, 0, sizeof told);
    told.world = 2;
    told.by_batch = 1;
    told.batches[0] = told.batches[1] = 10;
    run_ranks(&j);
    assert_int_equal(told.failed[0] + told.failed[1], 0);
    int before = value(&j.ranks[0]);
    assert_int_equal(hold(&j.ranks[1], 0), PERSIA_OK);
    assert_int_equal(apply(&j.ranks[1], LOOP_MINE), PERSIA_OK);
    assert_int_equal(persia_loop_flush(j.ranks[1].s, 0), PERSIA_OK);
    assert_int_equal(value(&j.ranks[0]), before + 1);
    job_close(&j);
}

/* Keeps all updates from being applied until `go`. */
typedef struct barrier {
    job *job;
    _Atomic(int) closed, go;
} barrier;

static int keep_closed(void *arg)
{
    barrier *b = arg;
    atomic_store(&b->closed, 1);
    while (!atomic_load(&b->go))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return PERSIA_OK;
}

static void *hold_gate(void *arg)
{
    barrier *b = arg;
    (void)persia_tables_between(b->job->p, keep_closed, b);
    return NULL;
}

/* A pass ends while a part is in flight and one waits behind it; the updates
 * that follow are no parts, and all of them are applied. */
static void test_updates_behind_parts_that_wait(void **state)
{
    enum { PARTS = 2, AFTER = 4 };
    (void)state;
    job j;
    uint64_t applied;
    pthread_t thread;
    job_open(&j, 2);
    rank *one = &j.ranks[0];
    barrier b = {.job = &j};
    assert_int_equal(persia_loop_leave(j.ranks[1].s, 0), PERSIA_OK);
    assert_int_equal(persia_loop_join(one->s, &applied), PERSIA_OK);
    assert_int_equal(persia_loop_sync(one->s, 0, 0, 2), PERSIA_OK);
    pthread_create(&thread, NULL, hold_gate, &b);
    while (!atomic_load(&b.closed))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    for (int i = 0; i < PARTS; i++) {
        assert_int_equal(hold(one, 0), PERSIA_OK);
        assert_int_equal(apply(one, LOOP_MINE), PERSIA_OK);
    }
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    assert_int_equal(persia_loop_leave(one->s, 0), PERSIA_OK);
    for (int i = 0; i < AFTER; i++) {
        assert_int_equal(hold(one, 0), PERSIA_OK);
        assert_int_equal(apply(one, LOOP_MINE), PERSIA_OK);
    }
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    atomic_store(&b.go, 1);
    pthread_join(thread, NULL);
    /* The part behind it is of a rank that has left. */
    assert_int_equal(persia_loop_flush(one->s, 5000000000u), PERSIA_EARG);
    assert_int_equal(persia_loop_flush(one->s, 5000000000u), PERSIA_OK);
    assert_int_equal(value(one), PARTS - 1 + AFTER);
    job_close(&j);
}

/* A backward ended half-way, and its store ends in the middle of the pass: the
 * empty part that the batch owes is sent by no thread. */
static void test_a_store_ends_with_gradients_held(void **state)
{
    (void)state;
    job j;
    uint64_t stream, applied, ticket;
    job_open(&j, 2);
    rank *one = &j.ranks[1];
    assert_int_equal(persia_loop_leave(j.ranks[0].s, 0), PERSIA_OK);
    assert_int_equal(persia_loop_join(one->s, &applied), PERSIA_OK);
    uint64_t batch = begin_step(one, &stream);
    assert_int_equal(persia_loop_batch_next(one->s, batch, 0), PERSIA_OK);
    assert_int_equal(forward(one, batch, &ticket), 0);
    assert_int_equal(hold(one, ticket), PERSIA_OK);
    rank_close(one);
    j.world = 1;
    assert_int_equal(persia_tables_updates(j.p), 0);
    job_close(&j);
}

static void test_an_index_ends_with_its_forward(void **state)
{
    (void)state;
    job j;
    uint64_t ticket, stream;
    job_open(&j, 1);
    rank *r = &j.ranks[0];
    const index_pool *indexes =
        persia_client_indexes(r->c);
    /* its update has it, once */
    assert_int_equal(forward(r, 0, &ticket), 0);
    assert_int_equal(indexes->live, 1);
    assert_int_equal(hold(r, ticket), PERSIA_OK);
    assert_int_equal(hold(r, ticket), PERSIA_ETICKET);
    assert_int_equal(indexes->live, 1);
    assert_int_equal(apply(r, LOOP_ALL), PERSIA_OK);
    assert_int_equal(persia_loop_flush(r->s, 0), PERSIA_OK);
    assert_int_equal(indexes->live, 0);
    /* its gradient is dropped, or its graph */
    assert_true(forward(r, 0, &ticket) >= 0);
    assert_int_equal(hold(r, ticket), PERSIA_OK);
    assert_int_equal(persia_loop_discard(r->s, LOOP_ALL), 1);
    assert_true(forward(r, 0, &ticket) >= 0);
    persia_loop_drop_index(r->s, ticket);
    persia_loop_drop_index(r->s, ticket);
    assert_int_equal(indexes->live, 0);
    /* other rows were loaded */
    assert_true(forward(r, 0, &ticket) >= 0);
    persia_loop_forget(r->s);
    assert_int_equal(indexes->live, 0);
    assert_int_equal(hold(r, ticket), PERSIA_ETICKET);
    /* looked up ahead, and not wanted */
    assert_int_equal(persia_loop_pass_open(r->s, 1, 0, &stream), PERSIA_OK);
    batch_add(r, stream);
    persia_loop_pass_close(r->s, stream);
    /* a forward that waits at the end of the store */
    assert_true(forward(r, 0, &ticket) >= 0);
    job_close(&j);
}

/* Taken by a job that ends last. */
typedef struct slow_take {
    atomic_int begun, may_end, released;
    struct batch_index *index;
} slow_take;

static void wait_until_set(atomic_int *flag)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    while (!atomic_load(flag))
        nanosleep(&pause, NULL);
}

static int take_slowly(void *owner)
{
    slow_take *t = owner;
    atomic_store(&t->begun, 1);
    wait_until_set(&t->may_end);
    return PERSIA_OK;
}

static void release_slow(void *owner)
{
    atomic_store(&((slow_take *)owner)->released, 1);
}

/* A worker waits for the batch; the loop may never call the store again. */
static void test_a_take_ends_behind_its_pass(void **state)
{
    (void)state;
    job j;
    uint64_t stream, batch = persia_loop_batch_number();
    slow_take t = {0};
    loop_lookup l = {.take = take_slowly, .index = &t.index, .owner = &t,
                     .release = release_slow};
    job_open(&j, 1);
    rank *r = &j.ranks[0];
    assert_int_equal(persia_loop_pass_open(r->s, 1, 0, &stream), PERSIA_OK);
    assert_int_equal(persia_loop_batch_add(r->s, stream, batch), PERSIA_OK);
    assert_int_equal(persia_loop_batch_lookup(r->s, batch, &l), PERSIA_OK);
    persia_loop_batch_ready(r->s, batch);
    wait_until_set(&t.begun);
    persia_loop_pass_close(r->s, stream);
    assert_int_equal(atomic_load(&t.released), 0);
    atomic_store(&t.may_end, 1);
    wait_until_set(&t.released);
    job_close(&j);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    job j;
    job_open(&j, 1);
    assert_int_equal(persia_loop_sync(j.ranks[0].s, 0, 0, 1), PERSIA_EARG);
    assert_int_equal(persia_loop_sync(j.ranks[0].s, 0, 2, 2), PERSIA_EARG);
    assert_int_equal(persia_loop_pass_sync(j.ranks[0].s, 99, 1),
                     PERSIA_ECLOSED);
    job_close(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_staleness_under_random_schedules),
        cmocka_unit_test(test_a_store_ends_with_its_updates),
        cmocka_unit_test(test_ranks_take_every_step_together),
        cmocka_unit_test(test_a_lookup_is_sent_behind_the_update),
        cmocka_unit_test(test_updates_after_a_pass_are_no_parts),
        cmocka_unit_test(test_updates_behind_parts_that_wait),
        cmocka_unit_test(test_a_store_ends_with_gradients_held),
        cmocka_unit_test(test_an_index_ends_with_its_forward),
        cmocka_unit_test(test_a_take_ends_behind_its_pass),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
