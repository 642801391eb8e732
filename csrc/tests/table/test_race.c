/* Calls from several threads at once, for ThreadSanitizer to judge; and what
 * must hold meanwhile. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <string.h>

#include "ids/ids.h"
#include "tests/table/help.h"

enum { IDS = 3000, DIM = 8 };

typedef struct stage {
    table *t;
    _Atomic int stop, failed;
    _Atomic uint64_t turns[6];
} stage;

/* Rows are always constant over their columns: every gradient is, and SGD
 * keeps them so.  A row read half old, half new is seen. */
static int whole(const float *row)
{
    for (int j = 1; j < DIM; j++)
        if (row[j] != row[0])
            return 0;
    return 1;
}

static void *pulls(void *arg)
{
    stage *st = arg;
    uint64_t *ids = malloc(IDS * sizeof *ids);
    float *out = malloc(IDS * DIM * sizeof *out);
    rng r = { 77 };
    sched *s;

    if (persia_sched_create(2, &s))
        abort();
    while (!atomic_load(&st->stop)) {
        pull_job job = { st->t, IDS, ids, out, DIM, NULL };
        for (int i = 0; i < IDS; i++)
            ids[i] = rng_below(&r, 2 * IDS);
        st->failed |= persia_table_pull(s, &job, 1) != PERSIA_OK;
        for (int i = 0; i < IDS; i++)
            if (!whole(out + i * DIM))
                st->failed |= 2;
        atomic_fetch_add(&st->turns[0], 1);
    }
    persia_sched_destroy(s);
    free(ids);
    free(out);
    return NULL;
}

static void *pushes(void *arg)
{
    stage *st = arg;
    uint64_t *ids = malloc(IDS * sizeof *ids);
    float *grad = malloc(IDS * DIM * sizeof *grad);
    uint32_t *rows = malloc(IDS * sizeof *rows);
    optim_args a = args_of(OPTIM_SGD);
    rng r = { (uint64_t)(uintptr_t)ids };
    sched *s;

    if (persia_sched_create(2, &s))
        abort();
    while (!atomic_load(&st->stop)) {
        push_part part = { .n = IDS, .ids = ids, .rows = rows, .grad = grad,
                           .stride = DIM, .bags = IDS };
        push_job job = { .t = st->t, .parts = &part, .parts_n = 1,
                         .optim = &a };
        for (int i = 0; i < IDS; i++) {
            ids[i] = rng_below(&r, 2 * IDS);
            rows[i] = (uint32_t)rng_below(&r, IDS);
            for (int j = 0; j < DIM; j++)
                grad[i * DIM + j] = (float)i;
        }
        st->failed |= persia_table_push(s, &job, 1) != PERSIA_OK;
        atomic_fetch_add(&st->turns[1], 1);
    }
    persia_sched_destroy(s);
    free(ids);
    free(grad);
    free(rows);
    return NULL;
}

static void *cuts(void *arg)
{
    stage *st = arg;
    enum { ROOM = 300 };
    uint64_t ids[ROOM];
    float vectors[ROOM * DIM];
    uint32_t clocks[ROOM];

    while (!atomic_load(&st->stop)) {
        table_cut *cut;
        uint64_t rows, total = 0;
        size_t n = 1;
        if (persia_table_cut_begin(&st->t, 1, &cut)) {
            st->failed |= 4;
            break;
        }
        rows = persia_table_cut_rows(cut);
        while (n) {
            if (persia_table_cut_next(cut, ROOM, ids, vectors, NULL, clocks,
                                      NULL, &n))
                st->failed |= 8;
            total += n;
            for (size_t i = 0; i < n; i++)
                if (!whole(vectors + i * DIM) || !clocks[i])
                    st->failed |= 16;
        }
        st->failed |= rows == total ? 0 : 32;
        persia_table_cut_end(cut);
        atomic_fetch_add(&st->turns[2], 1);
    }
    return NULL;
}

static void *looks(void *arg)
{
    stage *st = arg;
    uint64_t pushed = 0;

    while (!atomic_load(&st->stop)) {
        table_stats stats;
        uint64_t id = pushed % IDS;
        float v[DIM];
        uint8_t found;
        persia_table_get_stats(st->t, &stats);
        if (stats.pushes < pushed)
            st->failed |= 64;
        pushed = stats.pushes;
        if (persia_table_get(st->t, 1, &id, v, NULL, &found) || !whole(v))
            st->failed |= 128;
        atomic_fetch_add(&st->turns[3], 1);
    }
    return NULL;
}

static void *sets_and_clears(void *arg)
{
    stage *st = arg;
    uint64_t ids[100];
    float vectors[100 * DIM];
    rng r = { 5 };

    while (!atomic_load(&st->stop)) {
        for (int i = 0; i < 100; i++) {
            ids[i] = rng_below(&r, 2 * IDS);
            for (int j = 0; j < DIM; j++)
                vectors[i * DIM + j] = (float)i;
        }
        st->failed |= persia_table_set(st->t, 100, ids, vectors, NULL) ? 256
                                                                       : 0;
        if (rng_below(&r, 8) == 0)
            st->failed |= persia_table_clear(st->t) ? 512 : 0;
        atomic_fetch_add(&st->turns[4], 1);
    }
    return NULL;
}

static void *exchanges(void *arg)
{
    stage *st = arg;
    const table_config *c = persia_table_get_config(st->t);

    while (!atomic_load(&st->stop)) {
        uint64_t ids[50];
        float vectors[50 * DIM] = { 0 };
        table *other = table_of(c);
        for (uint64_t i = 0; i < 50; i++)
            ids[i] = i;
        st->failed |= persia_table_set(other, 50, ids, vectors, NULL) ? 1024
                                                                      : 0;
        (void)persia_table_exchange(st->t,
                                    other); /* not while a cut is open */
        persia_table_destroy(other);
        atomic_fetch_add(&st->turns[5], 1);
    }
    return NULL;
}

/* All of them for some turns each, or until the time is up. */
static void act(table_config config, int with_sets)
{
    void *(*const acts[])(void *) = { pulls, pushes,  pushes,          cuts,
                                      looks, exchanges, sets_and_clears };
    const uint64_t want = SANITIZED ? 5 : 15;
    const size_t n = with_sets ? 7 : 5;
    const uint64_t start = persia_clock_ns();
    pthread_t thread[7];
    stage st = { .t = NULL };

    config.init = INIT_CONSTANT;
    config.init_a = 0.5f;
    st.t = table_of(&config);
    for (size_t i = 0; i < n; i++)
        pthread_create(&thread[i], NULL, acts[i], &st);
    for (int all = 0; !all;) {
        struct timespec nap = { 0, 5000000 };
        nanosleep(&nap, NULL);
        all = 1;
        for (int i = 0; i < (with_sets ? 6 : 4); i++)
            all &= st.turns[i] >= want;
        if (!all && persia_clock_ns() - start > 200000000000u)
            fail_msg("after 200 s: %llu pulls, %llu pushes, %llu cuts",
                     (unsigned long long)st.turns[0],
                     (unsigned long long)st.turns[1],
                     (unsigned long long)st.turns[2]);
    }
    atomic_store(&st.stop, 1);
    for (size_t i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
    if (st.failed)
        fail_msg("failures: %#x", (unsigned)st.failed);
    dump d = dump_table(st.t);
    assert_int_equal(d.n, stats_of(st.t).rows);
    dump_free(&d);
    persia_table_destroy(st.t);
}

static void test_pulls_pushes_cuts_and_stats(void **state)
{
    table_config c = config_of(DIM, OPTIM_SGD);
    (void)state;
    act(c, 0);
    c.capacity = 2000;
    c.full = FULL_EVICT_LRU;
    act(c, 0);
    c.stripes = 8;
    act(c, 0);
}

static void test_all_calls(void **state)
{
    mem_limit limit;
    persia_mem_limit_init(&limit, (uint64_t)1 << 40);
    table_config c = config_of(DIM, OPTIM_SGD);
    (void)state;
    c.limit = &limit;
    act(c, 1);
    c.capacity = 100000;
    act(c, 1);
    assert_int_equal(limit.used, 0);
}

/* Several threads that push without a pause do not keep a cut waiting. */
static void test_a_cut_does_not_starve(void **state)
{
    table_config c = config_of(DIM, OPTIM_SGD);
    pthread_t thread[3];
    stage st = { .t = NULL };
    uint64_t worst = 0;
    (void)state;
    st.t = table_of(&c);
    for (int i = 0; i < 3; i++)
        pthread_create(&thread[i], NULL, pushes, &st);
    while (st.turns[1] < 5)
        ;
    for (int i = 0; i < 10; i++) {
        uint64_t start = persia_clock_ns(), took;
        table_cut *cut;
        assert_int_equal(persia_table_cut_begin(&st.t, 1, &cut), PERSIA_OK);
        took = persia_clock_ns() - start;
        worst = took > worst ? took : worst;
        persia_table_cut_end(cut);
    }
    atomic_store(&st.stop, 1);
    for (int i = 0; i < 3; i++)
        pthread_join(thread[i], NULL);
    if (worst > 10000000000u)
        fail_msg("a cut waited for %g s", (double)worst / 1e9);
    persia_table_destroy(st.t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pulls_pushes_cuts_and_stats),
        cmocka_unit_test(test_all_calls),
        cmocka_unit_test(test_a_cut_does_not_starve),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
