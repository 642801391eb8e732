/* cut: every cut is the table as it was at one moment, whatever happens.  The
 * oracle is a replay of the operations up to that moment. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"
#include "tests/table/help.h"

enum { BATCH = 150 };

/* Operation number `op` of a history: a function of its arguments alone.
 * Returns whether it was a push (moves the clock). */
static int apply(sched *s, table *t, uint64_t seed, uint64_t op)
{
    const table_config *c = persia_table_get_config(t);
    const uint32_t dim = c->dim;
    optim_args a = args_of(c->optimizer);
    uint64_t ids[BATCH];
    float grad[BATCH * 8];
    rng r = { seed << 40 | op << 16 };
    size_t n = rng_below(&r, BATCH);
    uint64_t kind = rng_below(&r, 20);

    a.step = op + 1;
    for (size_t i = 0; i < n; i++)
        ids[i] = rng_below(&r, 1200); /* created, hit and hit again */
    for (size_t i = 0; i < n * dim; i++)
        grad[i] = rng_float(&r);
    /* after a clear under a cut rows lie in other slots, so others go */
    if (kind == 0 && !c->capacity) {
        assert_int_equal(persia_table_clear(t), PERSIA_OK);
        return 0;
    }
    if (kind == 1) {
        assert_int_equal(persia_table_set(t, n, ids, grad, NULL), PERSIA_OK);
        return 0;
    }
    if (kind == 2) {
        uint64_t erased;
        assert_int_equal(persia_table_erase(t, n, ids, &erased), PERSIA_OK);
        return 0;
    }
    push_one(s, t, &a, n, ids, grad, op);
    return 1;
}

typedef struct history {
    table_config config;
    uint64_t seed;
    sched *s;
} history;

static dump replay(const history *h, uint64_t ops)
{
    table *t = table_of(&h->config);
    dump d;

    for (uint64_t op = 0; op < ops; op++)
        apply(h->s, t, h->seed, op);
    d = dump_table(t);
    persia_table_destroy(t);
    return d;
}

/* Operations and pieces of a cut in turn, in one thread. */
static void interleaved(const history *h, rng *r)
{
    table *t = table_of(&h->config);
    uint64_t op = 0;

    for (int cuts = 0; cuts < 6; cuts++) {
        const size_t room = 1 + rng_below(r, 400);
        const uint32_t dim = h->config.dim;
        table_cut *cut;
        size_t n = 1, at = 0;
        for (uint64_t until = op + rng_below(r, 25); op < until; op++)
            apply(h->s, t, h->seed, op);
        const uint64_t moment = op;
        assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
        dump want = replay(h, moment);
        assert_int_equal(persia_table_cut_rows(cut), want.n);
        assert_int_equal(persia_table_cut_clock(cut), want.clock);
        dump got = {.dim = dim,
                    .state_floats = persia_table_state_floats(t),
                    .vector_bytes = want.vector_bytes};
        got.ids = malloc((want.n + room) * sizeof *got.ids);
        got.clocks = malloc((want.n + room) * sizeof *got.clocks);
        got.vectors = malloc((want.n + room) * got.vector_bytes);
        got.state = malloc((want.n + room) * (got.state_floats * 4u + 1));
        while (n) {
            assert_int_equal(
                persia_table_cut_next(cut, room, got.ids + at,
                                      got.vectors + at * got.vector_bytes,
                                      got.state + at * got.state_floats,
                                      got.clocks + at, NULL, &n),
                PERSIA_OK);
            at += n;
            assert_true(at <= want.n);
            for (uint64_t k = rng_below(r, 3); n && k; k--)
                apply(h->s, t, h->seed, op++);
            if (cuts == 4 && at > want.n / 2)
                break; /* given up half way */
        }
        persia_table_cut_end(cut);
        if (cuts != 4) {
            table_config c = h->config;
            got.n = at;
            assert_int_equal(at, want.n);
            /* equal as sets: through another table, of other stripes */
            c.capacity = 0;
            table *u = table_of(&c);
            assert_int_equal(persia_table_restore(u, at, got.ids, got.vectors,
                                                  got.state, got.clocks, NULL),
                             0);
            dump now = dump_table(u);
            dump_equal(&now, &want, "a cut");
            dump_free(&now);
            persia_table_destroy(u);
        }
        dump_free(&got);
        dump_free(&want);
    }
    dump now = dump_table(t), want = replay(h, op);
    dump_equal(&now, &want, "the table after its cuts");
    dump_free(&now);
    dump_free(&want);
    persia_table_destroy(t);
}

static void test_cuts_between_operations(void **state)
{
    const unsigned rounds = getenv("PERSIA_LONG") ? 100 : SANITIZED ? 4 : 12;
    (void)state;
    for (uint64_t seed = 1; seed <= rounds; seed++) {
        history h = { .config = config_of(1 + (uint32_t)seed % 8,
                                          (uint32_t)seed % OPTIM_KINDS),
                      .seed = seed,
                      .s = pool_of(1) };
        rng r = { seed };
        h.config.dtype = (uint32_t)seed / 2 % VECTOR_DTYPES;
        h.config.stripes = seed % 3 == 0 ? 1 : 8;
        if (seed % 3 == 0) { /* slots of evicted rows are used again */
            h.config.capacity = 300;
            h.config.full = FULL_EVICT_LRU;
        }
        interleaved(&h, &r);
        persia_sched_destroy(h.s);
    }
}

/* ---- threads ---- */

/* Every push adds 1 to the same ids of both tables, so all rows of a cut of
 * both have one value: the number of pushes before it.  Other ids are there
 * for a while: the id 1000 + k is made by push k alone. */
enum { TABLES = 2, COMMON = 400 };

typedef struct counting {
    table *t[TABLES];
    unsigned threads;
    _Atomic int stop;
    _Atomic uint64_t pushes;
    _Atomic int failed;
} counting;

static void *count_up(void *arg)
{
    counting *c = arg;
    optim_args a = args_of(OPTIM_SGD);
    uint64_t ids[COMMON + 1];
    float grad[COMMON + 1];
    sched *s;

    if (persia_sched_create(c->threads, &s)) {
        c->failed = 1;
        return NULL;
    }
    a.lr = 1;
    for (uint64_t i = 0; i <= COMMON; i++) {
        ids[i] = i;
        grad[i] = -1;
    }
    while (!atomic_load(&c->stop)) {
        push_part part = { .n = COMMON + 1, .ids = ids, .grad = grad,
                           .stride = 1, .bags = COMMON + 1 };
        push_job jobs[TABLES];
        ids[COMMON] = 1000 + atomic_fetch_add(&c->pushes, 1);
        for (int i = 0; i < TABLES; i++)
            jobs[i] = (push_job){ .t = c->t[i], .parts = &part,
                                  .parts_n = 1, .optim = &a };
        if (persia_table_push(s, jobs, TABLES))
            c->failed = 1;
    }
    persia_sched_destroy(s);
    return NULL;
}

static void check_moment(const dump *d, uint64_t *moment)
{
    uint64_t others = 0;

    for (size_t i = 0; i < d->n; i++) {
        float x;
        memcpy(&x, d->vectors + 4 * i, 4);
        if (d->ids[i] >= 1000) {
            others++;
            assert_true(x == 1);
            continue;
        }
        if (*moment == UINT64_MAX)
            *moment = (uint64_t)x;
        if (x != (float)*moment)
            fail_msg("a cut has rows of pushes %g and %llu", (double)x,
                     (unsigned long long)*moment);
    }
    if (*moment != d->clock || others != d->clock)
        fail_msg("clock %llu, counted %llu, %llu single rows",
                 (unsigned long long)d->clock,
                 (unsigned long long)*moment, (unsigned long long)others);
    assert_int_equal(d->n, others + (others ? COMMON : 0));
}

static void test_a_cut_of_tables_is_one_moment(void **state)
{
    const int cuts = SANITIZED ? 10 : 30;
    (void)state;
    for (unsigned threads = 1; threads <= 2; threads++) {
        counting c = { .threads = threads };
        pthread_t pusher[3];
        for (int i = 0; i < TABLES; i++) {
            table_config config = config_of(1, OPTIM_SGD);
            config.init = INIT_CONSTANT;
            config.init_a = 0;
            config.stripes = i ? 1 : 16;
            c.t[i] = table_of(&config);
        }
        for (int i = 0; i < 3; i++)
            pthread_create(&pusher[i], NULL, count_up, &c);
        for (int k = 0; k < cuts; k++) {
            table *order[TABLES] = { c.t[k % 2], c.t[1 - k % 2] };
            table_cut *cut[TABLES];
            uint64_t moment = UINT64_MAX, before = atomic_load(&c.pushes);
            while (atomic_load(&c.pushes) < before + 2)
                sched_yield();
            if (persia_table_cut_begin(order, TABLES, cut))
                fail_msg("%s", persia_err_text());
            for (int i = 0; i < TABLES; i++) {
                dump d = dump_cut(order[i], cut[i], 64);
                if (d.n)
                    check_moment(&d, &moment);
                dump_free(&d);
            }
        }
        atomic_store(&c.stop, 1);
        for (int i = 0; i < 3; i++)
            pthread_join(pusher[i], NULL);
        assert_int_equal(c.failed, 0);
        for (int i = 0; i < TABLES; i++) {
            uint64_t moment = UINT64_MAX;
            dump d = dump_table(c.t[i]);
            assert_int_equal(d.clock, c.pushes);
            check_moment(&d, &moment);
            dump_free(&d);
            persia_table_destroy(c.t[i]);
        }
    }
}

/* One thread makes history, another cuts; each cut is some moment of it. */
typedef struct writer {
    history *h;
    table *t;
    uint64_t ops;
    _Atomic uint64_t done;
} writer;

static void *write_history(void *arg)
{
    writer *w = arg;

    for (uint64_t op = 0; op < w->ops; op++) {
        apply(w->h->s, w->t, w->h->seed, op);
        atomic_store(&w->done, op + 1);
    }
    return NULL;
}

static void test_each_cut_is_a_moment_of_history(void **state)
{
    (void)state;
    for (uint64_t seed = 100; seed < 104; seed++) {
        history h = { .config = config_of(4, OPTIM_ADAGRAD),
                      .seed = seed,
                      .s = pool_of(1) };
        writer w = { .h = &h, .ops = SANITIZED ? 150 : 400 };
        int cuts = 0;
        pthread_t thread;
        if (seed % 2) {
            h.config.capacity = 300;
            h.config.full = FULL_EVICT_LRU;
        }
        w.t = table_of(&h.config);
        pthread_create(&thread, NULL, write_history, &w);
        for (uint64_t before = 0; before < w.ops; cuts++) {
            table_cut *cut;
            before = atomic_load(&w.done);
            assert_int_equal(persia_table_cut_begin(&w.t, 1, &cut), PERSIA_OK);
            uint64_t after = atomic_load(&w.done) + 1;
            dump got = dump_cut(w.t, cut, 50), want = { 0 };
            int found = 0;
            for (uint64_t ops = before; ops <= after && !found; ops++) {
                dump_free(&want);
                if (ops > w.ops)
                    break;
                want = replay(&h, ops);
                found = want.n == got.n && want.clock == got.clock &&
                        !memcmp(want.ids, got.ids, want.n * 8) &&
                        !memcmp(want.clocks, got.clocks, want.n * 4) &&
                        !memcmp(want.vectors, got.vectors,
                                want.n * want.vector_bytes) &&
                        !memcmp(want.state, got.state,
                                want.n * want.state_floats * 4);
            }
            if (!found)
                fail_msg("a cut between operations %llu and %llu is none",
                         (unsigned long long)before,
                         (unsigned long long)after);
            dump_free(&got);
            dump_free(&want);
        }
        assert_true(cuts > 1);
        pthread_join(thread, NULL);
        persia_table_destroy(w.t);
        persia_sched_destroy(h.s);
    }
}

/* ---- errors ---- */

static void test_one_cut_a_table(void **state)
{
    table_config c = config_of(2, OPTIM_SGD);
    table *t = table_of(&c), *u, *both[2], *same[2];
    table_cut *cut, *more[2], *last;
    (void)state;
    u = table_of(&c);
    both[0] = u;
    both[1] = t;
    same[0] = same[1] = u;
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    assert_int_equal(persia_table_cut_begin(both, 2, more), PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "test"));
    assert_true(!more[0] && !more[1]);
    assert_int_equal(persia_table_exchange(t, u), PERSIA_EUNAVAILABLE);
    /* u was let go again */
    assert_int_equal(persia_table_cut_begin(same, 2, more), PERSIA_EARG);
    assert_int_equal(persia_table_cut_begin(&u, 1, &last), PERSIA_OK);
    persia_table_cut_end(last);
    persia_table_cut_end(cut);
    assert_int_equal(persia_table_cut_begin(both, 2, more), PERSIA_OK);
    persia_table_cut_end(more[1]);
    persia_table_cut_end(more[0]);
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    persia_table_destroy(t); /* with its cut */
    persia_table_destroy(u);
}

/* A slot that is free keeps the upper half of its id, and the lower half is
 * the next free slot: a hint must not find the dead row. */
static void test_a_hint_of_a_freed_slot(void **state)
{
    const uint64_t id = UINT64_MAX; /* reads the same at a list's end */
    const float grad[2] = { 1, 1 };
    sched *s = pool_of(1);
    table_config c = config_of(2, OPTIM_ADAGRAD);
    optim_args a = args_of(OPTIM_ADAGRAD);
    float v[2], accumulators[2];
    uint32_t row;
    table_cut *cut;
    (void)state;
    c.stripes = 1;
    table *t = table_of(&c);
    push_one(s, t, &a, 1, &id, grad, 0);
    pull_job pull = { t, 1, &id, v, 2, &row };
    assert_int_equal(persia_table_pull(s, &pull, 1), PERSIA_OK);
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    assert_int_equal(persia_table_clear(t), PERSIA_OK); /* keeps the slots */
    push_part part = { .n = 1, .ids = &id, .rows = &row, .grad = grad,
                       .stride = 2, .bags = 1 };
    push_job job = { .t = t, .parts = &part, .parts_n = 1, .optim = &a };
    assert_int_equal(persia_table_push(s, &job, 1), PERSIA_OK);
    assert_int_equal(job.created, 1);
    assert_int_equal(stats_of(t).rows, 1);
    assert_int_equal(persia_table_get(t, 1, &id, v, accumulators, NULL), 0);
    assert_true(accumulators[0] == 1);
    dump d = dump_cut(t, cut, 10);
    assert_int_equal(d.n, 1);
    assert_true(d.state[0] == 1 && d.clocks[0] == 1);
    dump_free(&d);
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

static void test_ids_alone(void **state)
{
    enum { N = 1000 };
    table_config c = config_of(2, OPTIM_ADAGRAD);
    static uint64_t ids[N], got[N];
    static float zeros[2 * N];
    table *t = table_of(&c);
    table_cut *cut;
    size_t n;
    (void)state;
    for (uint64_t i = 0; i < N; i++)
        ids[i] = i * i;
    assert_int_equal(persia_table_set(t, N, ids, zeros, NULL), PERSIA_OK);
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    assert_int_equal(persia_table_cut_next(cut, N, got, NULL, NULL, NULL,
                                           NULL, &n),
                     0);
    assert_int_equal(n, N);
    assert_int_equal(persia_table_cut_next(cut, N, NULL, NULL, NULL, NULL,
                                           NULL, &n),
                     0);
    assert_int_equal(n, 0);
    persia_table_cut_end(cut);
    persia_table_destroy(t);
}

/* No memory to put rows aside: the push is whole, the cut is lost. */
static void test_a_cut_gives_way_to_a_push(void **state)
{
    enum { N = 20000 };
    static uint64_t ids[N];
    static float grad[N * 4];
    sched *s = pool_of(2);
    mem_limit limit;
    persia_mem_limit_init(&limit, 0);
    table_config c = config_of(4, OPTIM_ADAM);
    optim_args a = args_of(OPTIM_ADAM);
    table_cut *cut;
    size_t got;
    (void)state;
    for (uint64_t i = 0; i < N; i++)
        ids[i] = i;
    for (size_t i = 0; i < N * 4; i++)
        grad[i] = 1;
    table *u = table_of(&c);
    c.limit = &limit;
    table *t = table_of(&c);
    push_one(s, t, &a, N, ids, grad, 0);
    push_one(s, u, &a, N, ids, grad, 0);
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    limit.maximum = limit.used + 50000;
    a.step = 2;
    push_job job = push_one(s, t, &a, N, ids, grad, 0);
    assert_int_equal(job.touched, N);
    push_one(s, u, &a, N, ids, grad, 0);
    assert_true(limit.used <= limit.maximum);
    int rc;
    do
        rc = persia_table_cut_next(cut, 100, NULL, NULL, NULL, NULL, NULL,
                                   &got);
    while (!rc && got);
    assert_int_equal(rc, PERSIA_ELIMIT);
    assert_non_null(strstr(persia_err_text(), "test"));
    persia_table_cut_end(cut);
    limit.maximum = 0;
    dump x = dump_table(t), y = dump_table(u); /* and the next one is well */
    dump_equal(&x, &y, "after a lost cut");
    dump_free(&x);
    dump_free(&y);
    persia_table_destroy(t);
    persia_table_destroy(u);
    assert_int_equal(limit.used, 0);
    persia_sched_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cuts_between_operations),
        cmocka_unit_test(test_a_cut_of_tables_is_one_moment),
        cmocka_unit_test(test_each_cut_is_a_moment_of_history),
        cmocka_unit_test(test_one_cut_a_table),
        cmocka_unit_test(test_a_hint_of_a_freed_slot),
        cmocka_unit_test(test_ids_alone),
        cmocka_unit_test(test_a_cut_gives_way_to_a_push),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
