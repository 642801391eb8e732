/* watch: who applies the changes of a table has the table, whatever happens
 * to it.  The oracle is the table itself, read by a cut. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"
#include "tests/table/help.h"

enum { BATCH = 150, DIM_MAX = 8, IDS = 1200 };

/* ---- a reader ----------------------------------------------------------- */

/* A copy of a table, kept by what its watch gives out. */
typedef struct reader {
    table *t, *copy;
    table_watch *watch;
    size_t room;
    uint8_t erased[IDS]; /* ids that were given out as erased */
    unsigned resets, rounds;
    size_t rows; /* given out */
} reader;

static reader reader_of(table *t, int all, size_t room)
{
    table_config c = *persia_table_get_config(t);
    reader r = { .t = t, .room = room };

    c.capacity = 0;
    c.limit = NULL;
    r.copy = table_of(&c);
    assert_int_equal(persia_table_watch_open(t, all, &r.watch), PERSIA_OK);
    return r;
}

static void reader_end(reader *r)
{
    persia_table_watch_close(r->watch);
    persia_table_destroy(r->copy);
}

static void copy_forget(reader *r, uint32_t stripe, uint32_t stripes)
{
    dump d = dump_table(r->copy);
    uint64_t n;

    for (size_t i = 0; i < d.n; i++)
        if (hash_stripe(id_hash(d.ids[i]), stripes - 1) == stripe)
            assert_int_equal(persia_table_erase(r->copy, 1, &d.ids[i], &n),
                             PERSIA_OK);
    dump_free(&d);
}

/* One piece; whether it ends the round. */
static int reader_step(reader *r)
{
    const uint32_t dim = persia_table_get_config(r->t)->dim;
    const uint32_t state = persia_table_state_floats(r->t);
    uint64_t *ids = malloc(r->room * 8 + 1), n;
    uint64_t *gone = malloc(r->room * 8 + 1);
    uint64_t *erased = malloc(r->room * 8 + 1);
    char *vectors = malloc(r->room * 4 * dim + 1);
    float *states = malloc(r->room * 4 * state + 1);
    uint32_t *clocks = malloc(r->room * 4 + 1);
    uint32_t *fields = calloc(r->room + 1, 4);
    table_changes c = { .room = r->room, .ids = ids, .vectors = vectors,
                        .state = states, .clocks = clocks, .fields = fields,
                        .gone = gone, .erased = erased };

    assert_int_equal(persia_table_watch_next(r->watch, &c), PERSIA_OK);
    assert_true(c.n <= r->room && c.gone_n <= r->room);
    if (c.reset)
        copy_forget(r, c.stripe, c.stripes);
    r->resets += (unsigned)c.reset;
    for (size_t i = 0; i < c.erased_n; i++)
        r->erased[erased[i] % IDS] = 1;
    assert_int_equal(persia_table_erase(r->copy, c.gone_n, gone, &n),
                     PERSIA_OK);
    if (c.n)
        assert_int_equal(persia_table_restore(r->copy, c.n, ids, vectors,
                                              states, clocks, fields),
                         PERSIA_OK);
    for (size_t i = 0; i < c.n; i++)
        assert_int_equal(hash_stripe(id_hash(ids[i]), c.stripes - 1),
                         c.stripe);
    r->rows += c.n;
    r->rounds += (unsigned)c.end;
    free(ids);
    free(gone);
    free(erased);
    free(vectors);
    free(states);
    free(clocks);
    free(fields);
    return c.end;
}

/* What is left of this round, and the next one: nothing runs meanwhile. */
static void reader_equals(reader *r, const char *what)
{
    for (int k = 0; k < 2; k++)
        while (!reader_step(r))
            ;
    assert_int_equal(persia_table_watch_rows(r->watch), 0);
    dump got = dump_table(r->copy), want = dump_table(r->t);
    dump_equal(&got, &want, what);
    dump_free(&got);
    dump_free(&want);
}

/* ---- one thread --------------------------------------------------------- */

/* A random operation; `erased` has a 1 for each id that was. */
static void operate(sched *s, table *t, rng *r, uint64_t op, uint8_t *erased)
{
    const table_config *c = persia_table_get_config(t);
    const size_t n = rng_below(r, BATCH);
    const uint64_t kind = rng_below(r, 24);
    optim_args a = args_of(c->optimizer);
    uint64_t ids[BATCH], count;
    float grad[BATCH * DIM_MAX];

    a.step = op + 1;
    for (size_t i = 0; i < n; i++)
        ids[i] = rng_below(r, IDS);
    for (size_t i = 0; i < n * c->dim; i++)
        grad[i] = rng_float(r);
    if (kind == 0) {
        assert_int_equal(persia_table_clear(t), PERSIA_OK);
    } else if (kind == 1) {
        assert_int_equal(persia_table_set(t, n, ids, grad, NULL), PERSIA_OK);
    } else if (kind == 2) {
        assert_int_equal(persia_table_erase(t, n, ids, &count), PERSIA_OK);
        for (size_t i = 0; i < n; i++)
            erased[ids[i]] = 1;
    } else if (kind == 3) {
        table_config other = *c;
        table *u = table_of(&other);
        push_one(s, u, &a, n, ids, grad, op);
        assert_int_equal(persia_table_exchange(t, u), PERSIA_OK);
        persia_table_destroy(u);
    } else {
        push_one(s, t, &a, n, ids, grad, op);
    }
}

static table_config config_for(uint64_t seed)
{
    table_config c = config_of(1 + (uint32_t)seed % DIM_MAX,
                               (uint32_t)seed % OPTIM_KINDS);

    c.dtype = (uint32_t)seed / 2 % VECTOR_DTYPES;
    c.stripes = seed % 3 == 0 ? 1 : 8;
    if (seed % 3 == 0) {
        c.capacity = 300;
        c.full = seed % 2 ? FULL_EVICT_LRU : FULL_EVICT_LFU;
    }
    return c;
}

static void test_a_reader_has_the_table(void **state)
{
    const unsigned rounds = getenv("PERSIA_LONG") ? 200 : SANITIZED ? 6 : 24;
    (void)state;
    for (uint64_t seed = 1; seed <= rounds; seed++) {
        const table_config c = config_for(seed);
        table *t = table_of(&c);
        sched *s = pool_of(1);
        rng r = { seed };
        uint8_t erased[IDS] = { 0 };
        reader two[2];

        for (uint64_t op = 0; op < 5; op++)
            operate(s, t, &r, op, erased);
        memset(erased, 0, sizeof erased);
        two[0] = reader_of(t, 1, 1 + rng_below(&r, 200));
        two[1] = reader_of(t, 1, 7);
        for (uint64_t op = 5; op < 120; op++) {
            operate(s, t, &r, op, erased);
            for (uint64_t k = rng_below(&r, 4); k; k--)
                (void)reader_step(&two[0]);
            if (op % 37 == 0)
                reader_equals(&two[0], "the quick reader");
        }
        reader_equals(&two[0], "the quick reader at the end");
        reader_equals(&two[1], "the slow reader");
        assert_memory_equal(two[0].erased, erased, sizeof erased);
        assert_memory_equal(two[1].erased, erased, sizeof erased);
        reader_end(&two[0]);
        reader_end(&two[1]);
        persia_sched_destroy(s);
        persia_table_destroy(t);
    }
}

static void test_only_what_changed_is_given_out(void **state)
{
    (void)state;
    table_config c = config_of(4, OPTIM_ADAGRAD);
    table *t = table_of(&c);
    sched *s = pool_of(1);
    optim_args a = args_of(OPTIM_ADAGRAD);
    static uint64_t ids[20000];
    static float grad[20000 * 4];
    uint64_t n;

    ids_fill(ids, 0, 20000);
    push_one(s, t, &a, 20000, ids, grad, 1);
    reader r = reader_of(t, 0, 100);
    while (!reader_step(&r))
        ;
    assert_int_equal(r.rows, 0);
    push_one(s, t, &a, 30, ids + 777, grad, 2);
    push_one(s, t, &a, 30, ids + 790, grad, 3);
    assert_int_equal(persia_table_watch_rows(r.watch), 43);
    while (!reader_step(&r))
        ;
    assert_int_equal(r.rows, 43); /* each once */
    assert_int_equal(persia_table_erase(t, 5, ids + 777, &n), PERSIA_OK);
    push_one(s, t, &a, 1, ids + 777, grad, 4); /* made again at once */
    while (!reader_step(&r))
        ;
    assert_int_equal(r.rows, 44);
    assert_int_equal(r.resets, 0);
    assert_false(has_row(r.copy, 778));
    assert_true(has_row(r.copy, 777));
    reader_end(&r);
    persia_sched_destroy(s);
    persia_table_destroy(t);
}

/* More ids leave than a list has room for. */
static void test_a_slow_reader_reads_all(void **state)
{
    enum { MANY = 90000, PART = 10000 };
    (void)state;
    table_config c = config_of(1, OPTIM_SGD);
    c.stripes = 1;
    c.capacity = 2000;
    c.full = FULL_EVICT_LRU;
    table *t = table_of(&c);
    sched *s = pool_of(1);
    optim_args a = args_of(OPTIM_SGD);
    static uint64_t ids[PART];
    static float grad[PART];
    reader r = reader_of(t, 0, 500);

    for (uint64_t at = 0; at < MANY; at += PART / 10) {
        ids_fill(ids, at, PART / 10);
        push_one(s, t, &a, PART / 10, ids, grad, at);
    }
    reader_equals(&r, "a slow reader");
    assert_true(r.resets > 0);
    reader_end(&r);
    persia_sched_destroy(s);
    persia_table_destroy(t);
}

/* No memory for what changed: pushes continue, and the reader has it all. */
static void test_without_memory_all_counts_as_changed(void **state)
{
    (void)state;
    mem_limit limit;
    persia_mem_limit_init(&limit, 64 << 20);
    table_config c = config_of(4, OPTIM_ADAGRAD);
    c.limit = &limit;
    c.stripes = 1;
    table *t = table_of(&c);
    sched *s = pool_of(1);
    optim_args a = args_of(OPTIM_ADAGRAD);
    static uint64_t ids[50000];
    static float grad[50000 * 4];
    uint64_t n;

    ids_fill(ids, 0, 50000);
    push_one(s, t, &a, 50000, ids, grad, 1);
    reader r = reader_of(t, 1, 1000);
    while (!reader_step(&r))
        ;
    const uint64_t all = (64 << 20) - atomic_load(&limit.used);
    assert_int_equal(persia_mem_charge(&limit, all - 1000), PERSIA_OK);
    push_one(s, t, &a, 50000, ids, grad, 2);
    assert_int_equal(persia_table_watch_rows(r.watch), 50000);
    /* but ids that are erased for ever are not forgotten */
    assert_int_equal(persia_table_erase(t, 5000, ids, &n), PERSIA_ELIMIT);
    assert_true(has_row(t, 1));
    persia_mem_release(&limit, all - 1000);
    assert_int_equal(persia_table_erase(t, 5000, ids, &n), PERSIA_OK);
    reader_equals(&r, "a reader without memory");
    assert_int_equal(r.resets, 1);
    reader_end(&r);
    persia_sched_destroy(s);
    persia_table_destroy(t);
    assert_int_equal(atomic_load(&limit.used), 0);
    persia_mem_limit_free(&limit);
}

/* ---- threads ------------------------------------------------------------ */

typedef struct pusher {
    table *t;
    uint64_t seed;
    _Atomic int *stop;
} pusher;

static void *push_on(void *arg)
{
    const pusher *p = arg;
    sched *s = pool_of(1);
    rng r = { p->seed << 32 };
    optim_args a = args_of(OPTIM_ADAGRAD);
    uint64_t ids[BATCH], n;
    float grad[BATCH * 4];

    for (uint64_t op = 0; !atomic_load(p->stop); op++) {
        for (size_t i = 0; i < BATCH; i++)
            ids[i] = rng_below(&r, 5000);
        for (size_t i = 0; i < BATCH * 4; i++)
            grad[i] = rng_float(&r);
        if (op % 50 == 49)
            (void)persia_table_erase(p->t, 20, ids, &n);
        else if (op % 400 == 399)
            (void)persia_table_clear(p->t);
        else
            push_one(s, p->t, &a, BATCH, ids, grad, op);
    }
    persia_sched_destroy(s);
    return NULL;
}

static void test_readers_beside_pushes(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        table_config c = config_of(4, OPTIM_ADAGRAD);
        _Atomic int stop = 0;
        pthread_t threads[3];
        pusher p[3];
        if (seed % 2) {
            c.capacity = 2000;
            c.full = FULL_EVICT_LRU;
        }
        table *t = table_of(&c);
        reader r = reader_of(t, 1, 64);
        for (uint64_t i = 0; i < 3; i++) {
            p[i] = (pusher){ t, seed * 10 + i, &stop };
            pthread_create(&threads[i], NULL, push_on, &p[i]);
        }
        for (int k = 0; k < (SANITIZED ? 300 : 3000); k++)
            (void)reader_step(&r);
        atomic_store(&stop, 1);
        for (int i = 0; i < 3; i++)
            pthread_join(threads[i], NULL);
        reader_equals(&r, "a reader beside pushes");
        reader_end(&r);
        persia_table_destroy(t);
    }
}

/* Erasures of several threads note their ids at once. */
enum { ERASERS = 4, ERASED = 20000, TURNS = 10 };

typedef struct eraser {
    table *t;
    pthread_barrier_t *together;
    uint64_t ids[ERASED];
} eraser;

static void *erase_together(void *of)
{
    const eraser *e = of;
    uint64_t n;

    pthread_barrier_wait(e->together);
    if (persia_table_erase(e->t, ERASED, e->ids, &n))
        abort();
    return NULL;
}

/* How many of the ids below ERASERS * ERASED a watch has, once each. */
static size_t erased_once(table_watch *w)
{
    uint64_t ids[256], gone[256], erased[256];
    table_changes c = {
        .room = 256, .ids = ids, .gone = gone, .erased = erased
    };
    uint8_t *found = calloc(ERASERS, ERASED);
    size_t n = 0;

    do {
        assert_int_equal(persia_table_watch_next(w, &c), PERSIA_OK);
        for (size_t i = 0; i < c.erased_n; i++)
            n += !found[erased[i]]++;
    } while (!c.end);
    free(found);
    return n;
}

static void test_several_threads_erase(void **state)
{
    (void)state;
    const table_config config = config_of(4, OPTIM_ADAGRAD);
    table *t = table_of(&config);
    eraser *of = calloc(ERASERS, sizeof *of);
    pthread_t thread[ERASERS];
    pthread_barrier_t together;
    table_watch *w;

    pthread_barrier_init(&together, NULL, ERASERS);
    for (uint64_t i = 0; i < ERASERS; i++) {
        of[i].t = t;
        of[i].together = &together;
        for (uint64_t k = 0; k < ERASED; k++)
            of[i].ids[k] = i * ERASED + k;
    }
    for (int turn = 0; turn < TURNS; turn++) {
        assert_int_equal(persia_table_watch_open(t, 0, &w), PERSIA_OK);
        for (int i = 0; i < ERASERS; i++)
            pthread_create(&thread[i], NULL, erase_together, &of[i]);
        for (int i = 0; i < ERASERS; i++)
            pthread_join(thread[i], NULL);
        assert_int_equal(erased_once(w), ERASERS * ERASED);
        persia_table_watch_close(w);
    }
    pthread_barrier_destroy(&together);
    persia_table_destroy(t);
    free(of);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_reader_has_the_table),
        cmocka_unit_test(test_only_what_changed_is_given_out),
        cmocka_unit_test(test_a_slow_reader_reads_all),
        cmocka_unit_test(test_without_memory_all_counts_as_changed),
        cmocka_unit_test(test_readers_beside_pushes),
        cmocka_unit_test(test_several_threads_erase),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
