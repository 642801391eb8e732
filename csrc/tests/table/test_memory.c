/* The process's memory runs out: a call is applied as a whole or not at all.
 * Each attempt to get memory fails in turn, alone or with all later ones
 * (tests.cmake lets the linker wrap the functions); tables are compared bit
 * for bit with those that never lacked any.  And what changes rows makes no
 * attempt: one is trapped. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "table/stripe.h"
#include "tests/table/help.h"

/* ---- the fault ---- */

static atomic_uint attempts; /* since fault_begin() */
static atomic_uint fail_at;  /* the attempt that fails; 0: none does */
static atomic_int for_good;  /* and all later ones */

static void fault_begin(unsigned at, int good)
{
    atomic_store(&attempts, 0);
    atomic_store(&for_good, good);
    atomic_store(&fail_at, at);
}

/* Whether an attempt failed. */
static int fault_end(void)
{
    return atomic_exchange(&fail_at, 0) <= atomic_load(&attempts);
}

static _Thread_local int changing; /* this thread changes rows */
static atomic_uint changes, trapped;

static int fails(void)
{
    if (changing)
        atomic_fetch_add(&trapped, 1);
    unsigned at = atomic_load(&fail_at);
    unsigned n = at ? atomic_fetch_add(&attempts, 1) + 1 : 0;

    if (!at || !(n == at || (n > at && atomic_load(&for_good))))
        return 0;
    errno = ENOMEM;
    return 1;
}

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__real_aligned_alloc(size_t unit, size_t bytes);
void *__real_mmap(void *at, size_t bytes, int prot, int flags, int fd,
                  off_t from);
void *__real_mremap(void *at, size_t was, size_t bytes, int flags, void *to);

void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes)
{
    return fails() ? NULL : __real_calloc(n, bytes);
}

void *__wrap_realloc(void *p, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes)
{
    return fails() ? NULL : __real_realloc(p, bytes);
}

void *__wrap_aligned_alloc(size_t unit, size_t bytes);
void *__wrap_aligned_alloc(size_t unit, size_t bytes)
{
    return fails() ? NULL : __real_aligned_alloc(unit, bytes);
}

void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd,
                  off_t from);
void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd,
                  off_t from)
{
    return fails() ? MAP_FAILED
                   : __real_mmap(at, bytes, prot, flags, fd, from);
}

/* As those of table rows call it. */
void *__wrap_mremap(void *at, size_t was, size_t bytes, int flags, void *to);
void *__wrap_mremap(void *at, size_t was, size_t bytes, int flags, void *to)
{
    return fails() ? MAP_FAILED : __real_mremap(at, was, bytes, flags, to);
}

/* ---- the trap: what changes rows ---- */

int __real_push_change(void *plan, size_t item);
int __wrap_push_change(void *plan, size_t item);
int __wrap_push_change(void *plan, size_t item)
{
    changing++;
    const int rc = __real_push_change(plan, item);
    changing--;
    atomic_fetch_add(&changes, 1);
    return rc;
}

int __real_stripe_add_locked(table *t, stripe *s, uint64_t hash, uint64_t id,
                             uint32_t clock, uint32_t spare,
                             const stripe_room *room, uint32_t *slot,
                             uint32_t *evicted);
int __wrap_stripe_add_locked(table *t, stripe *s, uint64_t hash, uint64_t id,
                             uint32_t clock, uint32_t spare,
                             const stripe_room *room, uint32_t *slot,
                             uint32_t *evicted);
int __wrap_stripe_add_locked(table *t, stripe *s, uint64_t hash, uint64_t id,
                             uint32_t clock, uint32_t spare,
                             const stripe_room *room, uint32_t *slot,
                             uint32_t *evicted)
{
    changing++;
    const int rc = __real_stripe_add_locked(t, s, hash, id, clock, spare,
                                            room, slot, evicted);
    changing--;
    atomic_fetch_add(&changes, 1);
    return rc;
}

void __real_stripe_touch_slow(const table *t, stripe *s, uint32_t slot);
void __wrap_stripe_touch_slow(const table *t, stripe *s, uint32_t slot);
void __wrap_stripe_touch_slow(const table *t, stripe *s, uint32_t slot)
{
    changing++;
    __real_stripe_touch_slow(t, s, slot);
    changing--;
}

/* Starting a thread would get memory, too. */
int __real_persia_thread_start(pthread_t *out, void *(*run)(void *), void *arg,
                               const char *name);
int __wrap_persia_thread_start(pthread_t *out, void *(*run)(void *), void *arg,
                               const char *name);
int __wrap_persia_thread_start(pthread_t *out, void *(*run)(void *), void *arg,
                               const char *name)
{
    if (changing)
        atomic_fetch_add(&trapped, 1);
    return __real_persia_thread_start(out, run, arg, name);
}

static void trap_check(void)
{
    assert_true(atomic_exchange(&changes, 0) > 0);
    assert_int_equal(atomic_load(&trapped), 0);
}

/* ---- two tables, and one update of both ---- */

enum {
    T = 2,
    DIM = 256,
    OLD = 2200, /* rows before the update */
    N = 7000    /* ids of the update: old ones, new ones, both again */
};

typedef struct world {
    table_config config;
    unsigned threads;
    sched *s;
    table *t[T];
    size_t from;     /* the update leaves out the first ids */
    int set;         /* the update is a persia_table_set() of the first */
    int snapshot;    /* ... is made while a cut is read */
    table_cut *cut;
    picture before[T];
} world;

static uint64_t ids[N];
static float grad[N * DIM];

/* On a thread of its own: its scratch is new, too. */
typedef struct update {
    world *w;
    int rc;
    char text[512];
} update;

static void *update_run(void *arg)
{
    update *u = arg;
    world *w = u->w;
    optim_args a = args_of(w->config.optimizer);
    const push_part part = { .n = N - w->from, .ids = ids + w->from,
                             .grad = grad, .stride = DIM,
                             .bags = N - w->from };
    push_job jobs[T];

    for (int i = 0; i < T; i++)
        jobs[i] = (push_job){ .t = w->t[i], .parts = &part, .parts_n = 1,
                              .optim = &a };
    u->rc = w->set ? persia_table_set(w->t[0], N, ids, grad, NULL)
                   : persia_table_push(w->s, jobs, T);
    snprintf(u->text, sizeof u->text, "%s", persia_err_text());
    return NULL;
}

static update update_try(world *w)
{
    update u = { .w = w };
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, update_run, &u), 0);
    pthread_join(thread, NULL);
    return u;
}

static void world_make(world *w)
{
    optim_args a = args_of(w->config.optimizer);

    w->s = pool_of(w->threads);
    for (int i = 0; i < T; i++) {
        table_config c = w->config;
        c.name[0] = (char)('A' + i);
        w->t[i] = table_of(&c);
        for (int k = 0; k < 2; k++) /* rows of two ages */
            push_one(w->s, w->t[i], &a, OLD / 2, ids + k * OLD / 2, grad, 0);
        w->before[i] = picture_of(w->t[i]);
    }
    if (w->snapshot)
        assert_int_equal(persia_table_cut_begin(&w->t[0], 1, &w->cut),
                         PERSIA_OK);
}

static void world_free(world *w)
{
    for (int i = 0; i < T; i++)
        persia_table_destroy(w->t[i]);
    persia_sched_destroy(w->s);
}

/* What a cut gives after an update that was applied without memory: all, or
 * an error. */
static void cut_check(world *w)
{
    uint64_t rows = 0;
    size_t n = 1;
    int rc = PERSIA_OK;

    while (n && !rc) {
        static uint64_t some[500];
        rc = persia_table_cut_next(w->cut, 500, some, NULL, NULL, NULL, NULL,
                                   &n);
        rows += n;
    }
    if (rc)
        assert_int_equal(rc, PERSIA_ENOMEM);
    else
        assert_int_equal(rows, persia_table_cut_rows(w->cut));
    persia_table_cut_end(w->cut);
}

/* A refused update: nothing changed, and it can be repeated. */
static void refused_check(world *w, const update *u)
{
    if (u->rc != PERSIA_ENOMEM)
        fail_msg("error %d: %s", u->rc, u->text);
    if (!strstr(u->text, "table ") || !strstr(u->text, "out of memory") ||
        !strstr(u->text, "nothing was applied") ||
        !strstr(u->text, "memory_limit"))
        fail_msg("names not what is needed: %s", u->text);
    if (w->snapshot) {
        dump d = dump_cut(w->t[0], w->cut, 700);
        dump_equal(&d, &w->before[0].rows, "a snapshot of a refused update");
        dump_free(&d);
    }
    for (int i = 0; i < T; i++)
        unchanged(w->t[i], &w->before[i]);
    if (w->snapshot)
        assert_int_equal(persia_table_cut_begin(&w->t[0], 1, &w->cut),
                         PERSIA_OK);
    update again = update_try(w);
    if (again.rc)
        fail_msg("with memory again: %s", again.text);
}

/* Every attempt of the update fails in turn. */
static void every_attempt(world *w)
{
    dump want[T];
    int refused = 0, applied = 0;

    world_make(w);
    assert_int_equal(update_try(w).rc, PERSIA_OK);
    if (w->snapshot)
        cut_check(w);
    for (int i = 0; i < T; i++) {
        dump_free(&w->before[i].rows);
        want[i] = dump_table(w->t[i]);
    }
    world_free(w);
    for (int good = 0; good < 2; good++)
        for (unsigned at = 1, done = 0; !done; at++) {
            world_make(w);
            fault_begin(at, good);
            update u = update_try(w);
            done = !fault_end();
            if (u.rc)
                refused_check(w, &u);
            if (!u.rc)
                for (int i = 0; i < T; i++)
                    dump_free(&w->before[i].rows);
            if (w->snapshot)
                cut_check(w);
            for (int i = 0; i < T; i++) {
                dump now = dump_table(w->t[i]);
                dump_equal(&now, &want[i], "an update without memory");
                dump_free(&now);
            }
            refused += u.rc != 0;
            applied += u.rc == 0 && !done;
            assert_true(!done || !u.rc);
            world_free(w);
        }
    trap_check();
    assert_true(refused > 0);
    assert_true(applied > 0 || w->set); /* there is a second way, too */
    for (int i = 0; i < T; i++)
        dump_free(&want[i]);
}

static world world_of(unsigned threads)
{
    world w = { .config = config_of(DIM, OPTIM_SGD), .threads = threads };

    w.config.stripes = 2;
    return w;
}

static void test_push(void **state)
{
    (void)state;
    for (unsigned threads = 1; threads <= 3; threads++) {
        world w = world_of(threads);
        every_attempt(&w);
    }
}

static void test_push_during_a_snapshot(void **state)
{
    world w = world_of(2);
    (void)state;
    w.snapshot = 1;
    every_attempt(&w);
}

/* Rows go in the same order, whether there is memory to list them or not. */
static void test_push_that_evicts(void **state)
{
    (void)state;
    for (unsigned threads = 1; threads <= 2; threads++) {
        world w = world_of(threads);
        w.config.stripes = 1; /* more: who evicts depends on the schedule */
        w.config.capacity = 5500;
        w.from = OLD; /* some of these go */
        w.config.full = FULL_EVICT_LRU;
        every_attempt(&w);
    }
}

static void test_set(void **state)
{
    world w = world_of(1);
    (void)state;
    w.set = 1;
    every_attempt(&w);
}

/* ---- for long without memory ---- */

/* Old rows learn on without memory.  New ones are made as long as there is
 * room: pages of the index fill up.  With memory again all is as ever. */
static void test_index_goes_on_full(void **state)
{
    enum { PIECE = 100, ROWS = 40000, LITTLE = 1 };
    static uint64_t many[ROWS];
    static float ones[ROWS * LITTLE];
    const uint32_t stripes[] = { 1, 8 };
    table_config c = config_of(LITTLE, OPTIM_SGD);
    optim_args a = args_of(OPTIM_SGD);
    (void)state;
    ids_fill(many, 0, ROWS);
    for (size_t i = 0; i < ROWS; i++)
        ones[i] = 1;
    for (size_t k = 0; k < 2; k++)
        for (size_t start = 10; start < ROWS; start *= 4) {
            sched *s = pool_of(2);
            c.stripes = stripes[k];
            table *t = table_of(&c), *u = table_of(&c);
            size_t n = start;
            int refused = 0;
            push_job job;
            push_one(s, t, &a, n, many, ones, 0);
            push_one(s, u, &a, n, many, ones, 0);
            fault_begin(1, 1);
            for (; n + PIECE <= ROWS; n += PIECE) {
                refused = push_try(s, t, &a, PIECE, many + n, ones, 0, &job);
                if (refused)
                    break;
                fault_end();
                push_one(s, u, &a, PIECE, many + n, ones, 0);
                fault_begin(1, 1);
            }
            fault_end();
            if (refused)
                assert_int_equal(refused, PERSIA_ENOMEM);
            for (int turn = 0; turn < 3; turn++) { /* with memory again */
                push_one(s, t, &a, ROWS, many, ones, 0);
                push_one(s, u, &a, ROWS, many, ones, 0);
            }
            dump x = dump_table(t), y = dump_table(u);
            dump_equal(&x, &y, "after a time without memory");
            dump_free(&x);
            dump_free(&y);
            persia_table_destroy(t);
            persia_table_destroy(u);
            persia_sched_destroy(s);
        }
}

/* A push of known ids needs none, however many it could have made. */
static void test_known_rows_learn_on(void **state)
{
    world w = world_of(2);
    optim_args a = args_of(OPTIM_SGD);
    push_job job;
    (void)state;
    world_make(&w);
    for (int i = 0; i < T; i++)
        dump_free(&w.before[i].rows);
    fault_begin(1, 1);
    const int rc = push_try(w.s, w.t[0], &a, OLD / 2, ids, grad, 0, &job);
    fault_end();
    assert_int_equal(rc, PERSIA_OK);
    assert_int_equal(job.touched, OLD / 2);
    world_free(&w);
}

/* ---- what changes rows allocates nothing ---- */

/* Four tables: one stripe, whose index splits; many stripes; two that evict,
 * of one stripe and of many.  Threads push to all of them at once. */
enum {
    TABLES = 4,
    PUSHERS = 2,
    BATCH = 4000, /* ids of a push: half of them new */
    TURNS = 16
};

typedef struct pusher {
    table **t;
    uint64_t from;
    uint32_t dim;
} pusher;

static void *pusher_run(void *arg)
{
    const pusher *p = arg;
    optim_args a = args_of(OPTIM_ADAGRAD);
    sched *s = pool_of(3);
    uint64_t *some = malloc(BATCH * sizeof *some);
    float *scale = malloc(BATCH * sizeof *scale);

    assert_true(some && scale);
    for (size_t turn = 0; turn < TURNS; turn++) {
        const push_part parts[2] = {
            { .n = BATCH, .ids = some, .scale = turn % 2 ? scale : NULL,
              .grad = grad, .stride = p->dim, .bags = BATCH },
            { .n = BATCH / 4, .ids = some, .grad = grad, .stride = p->dim,
              .bags = BATCH / 4 } /* these are given again */
        };
        push_job jobs[TABLES];
        for (size_t i = 0; i < BATCH; i++) {
            some[i] = p->from + turn * (BATCH / 2) + i;
            scale[i] = 0.5f;
        }
        for (int i = 0; i < TABLES; i++)
            jobs[i] = (push_job){ .t = p->t[i], .parts = parts,
                                  .parts_n = 2, .optim = &a };
        if (persia_table_push(s, jobs, TABLES))
            fail_msg("%s", persia_err_text());
        if (turn % 4 == 3 && persia_table_set(p->t[turn / 4], BATCH / 4,
                                              some + BATCH / 2, grad, NULL))
            fail_msg("%s", persia_err_text());
    }
    free(some);
    free(scale);
    persia_sched_destroy(s);
    return NULL;
}

static void pushers_run(table **t, uint64_t from, uint32_t dim)
{
    pthread_t thread[PUSHERS];
    pusher p[PUSHERS];

    for (uint64_t i = 0; i < PUSHERS; i++) {
        p[i] = (pusher){ t, from + i * 1000000, dim };
        assert_int_equal(pthread_create(&thread[i], NULL, pusher_run, &p[i]),
                         0);
    }
    for (size_t i = 0; i < PUSHERS; i++)
        pthread_join(thread[i], NULL);
}

static void test_a_change_allocates_nothing(void **state)
{
    const uint32_t stripes[TABLES] = { 1, 16, 1, 8 };
    const uint64_t capacity[TABLES] = { 0, 0, 5000, 30000 };
    (void)state;
    for (uint64_t maximum = 0; maximum < 2; maximum++) {
        table *t[TABLES];
        table_cut *cut[TABLES];
        mem_limit limit;
        persia_mem_limit_init(&limit, maximum << 30);
        for (int i = 0; i < TABLES; i++) {
            table_config c = config_of(8, OPTIM_ADAGRAD);
            c.name[0] = (char)('A' + i);
            c.stripes = stripes[i];
            c.capacity = capacity[i];
            c.full = FULL_EVICT_LRU;
            c.limit = &limit;
            t[i] = table_of(&c);
        }
        pushers_run(t, 0, 8);
        assert_int_equal(persia_table_cut_begin(t, TABLES, cut), PERSIA_OK);
        pushers_run(t, BATCH, 8); /* half of it again */
        for (int i = 0; i < TABLES; i++) {
            dump d = dump_cut(t[i], cut[i], 3000);
            dump_free(&d);
        }
        assert_true(t[0]->stripe[0].index.depth > 1);
        assert_true(stats_of(t[0]).rows > 60000);
        for (int i = 2; i < TABLES; i++)
            assert_true(stats_of(t[i]).evicted > 0);
        for (int i = 0; i < TABLES; i++)
            persia_table_destroy(t[i]);
        assert_int_equal(limit.used, 0);
        persia_mem_limit_free(&limit);
    }
    trap_check();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_push),
        cmocka_unit_test(test_push_during_a_snapshot),
        cmocka_unit_test(test_push_that_evicts),
        cmocka_unit_test(test_set),
        cmocka_unit_test(test_index_goes_on_full),
        cmocka_unit_test(test_known_rows_learn_on),
        cmocka_unit_test(test_a_change_allocates_nothing),
    };
    rng r = { 9 };

    ids_fill(ids, 0, N);
    for (size_t i = N - 500; i < N; i++) /* the last ones are given again */
        ids[i] = i % 2 ? i - 1000 : i - (N - 500);
    for (size_t i = 0; i < sizeof grad / sizeof *grad; i++)
        grad[i] = rng_float(&r);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
