/* worker: whole batches against a plain loop over rows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "batch/batch.h"
#include "client/client.h"
#include "pool/pool.h"
#include "server/server.h"

enum { KEYS = 4, BAGS = 700, VOCABULARY = 50, DIM_A = 3, DIM_B = 5 };

static tables *p;
static ps_client *c;
static ps_service *service; /* NULL: the client is local */
static batcher *w;

static int setup_client(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        table_config t;
        persia_table_config_init(&t);
        snprintf(t.name, sizeof t.name, "%c", 'a' + i);
        t.dim = i ? DIM_B : DIM_A;
        t.optimizer = OPTIM_SGD;
        t.init_a = -1;
        t.init_b = 1;
        uint32_t no;
        int created;
        assert_int_equal(persia_client_declare(c, &t, &no, &created),
                         PERSIA_OK);
    }
    assert_int_equal(persia_batcher_create(c, &w), PERSIA_OK);
    return 0;
}

static int setup(void **state)
{
    tables_config config = {.threads = 3};
    assert_int_equal(persia_tables_create(&config, &p), PERSIA_OK);
    assert_int_equal(persia_client_embedded(p, &c), PERSIA_OK);
    return setup_client(state);
}

/* The same shard, but behind messages. */
static int setup_remote(void **state)
{
    tables_config config = {.threads = 3};
    service_config behind = {.shards = 1, .message_limit = 1 << 30};
    const char *address = "rank0:1";
    assert_int_equal(persia_tables_create(&config, &p), PERSIA_OK);
    assert_int_equal(persia_service_create(p, &behind, &service), PERSIA_OK);
    client_config remote = {.threads = 2,
                            .addresses = &address,
                            .addresses_n = 1,
                            .own = persia_service_shard(service),
                            .world = 1,
                            .stream = 1,
                            .timeout_ns = 60000000000u};
    assert_int_equal(persia_client_create(&remote, &c), PERSIA_OK);
    return setup_client(state);
}

static int teardown(void **state)
{
    (void)state;
    persia_batcher_destroy(w);
    persia_client_destroy(c);
    persia_service_destroy(service);
    service = NULL;
    persia_tables_destroy(p);
    return 0;
}

/* Key 2 to table a, keys 3 and 0 to table b; key 1 is of no table. */
static uint32_t plan_of(uint32_t kind, uint32_t pooling)
{
    plan_feature f[] = {
        {.name = "x", .key = 2, .table = 0, .pooling = pooling,
         .trainable = 1},
        {.name = "y", .key = 3, .table = 1, .pooling = pooling,
         .trainable = 1},
        {.name = "z", .key = 0, .table = 1, .pooling = pooling,
         .trainable = 1},
    };
    uint32_t plan;
    assert_int_equal(persia_batcher_plan(w, kind, KEYS, f, 3, &plan),
                     PERSIA_OK);
    return plan;
}

static int64_t values[KEYS * BAGS * 4], offsets[KEYS * BAGS + 1];
static float weights[KEYS * BAGS * 4];

/* Bags of 0 to 3 ids, or of exactly one. */
static id_batch random_batch(int single, int weighted)
{
    size_t n = 0;
    for (size_t i = 0; i < KEYS * BAGS; i++) {
        offsets[i] = (int64_t)n;
        size_t length = single ? 1 : (size_t)rand() % 4;
        for (size_t k = 0; k < length; k++, n++) {
            values[n] = rand() % VOCABULARY;
            weights[n] = (float)rand() / (float)RAND_MAX;
        }
    }
    offsets[KEYS * BAGS] = (int64_t)n;
    return (id_batch){.n = n, .bags = BAGS, .values = values,
                      .offsets = single == 2 ? NULL : offsets,
                      .weights = weighted ? weights : NULL};
}

static void rows_of(uint32_t table, float *out)
{
    uint64_t ids[VOCABULARY];
    for (uint64_t i = 0; i < VOCABULARY; i++)
        ids[i] = i;
    assert_int_equal(persia_table_get(persia_tables_table(p, table),
                                      VOCABULARY, ids, out, NULL, NULL),
                     PERSIA_OK);
}

static float scale_of(uint32_t pooling, size_t length)
{
    return pooling == POOL_MEAN    ? 1.0f / (float)length
           : pooling == POOL_SQRTN ? 1.0f / sqrtf((float)length)
                                   : 1.0f;
}

enum { WIDTH = DIM_A + 2 * DIM_B };
static const struct {
    uint32_t key, table, dim, column;
} features[] = {{2, 0, DIM_A, 0},
                {3, 1, DIM_B, DIM_A},
                {0, 1, DIM_B, DIM_A + DIM_B}};

static float out[BAGS * WIDTH], grad[BAGS * WIDTH];
static uint32_t rows[KEYS * BAGS * 4];

static void check(uint32_t pooling, int single, int weighted)
{
    static float table[2][VOCABULARY * DIM_B], after[VOCABULARY * DIM_B];
    static double want[2][VOCABULARY * DIM_B];
    uint32_t plan = plan_of(PLAN_BAGS, pooling);
    id_batch b = random_batch(single, weighted);
    rows_of(0, table[0]);
    rows_of(1, table[1]);
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < VOCABULARY * DIM_B; i++)
            want[t][i] = table[t][i];
    for (size_t i = 0; i < BAGS * WIDTH; i++)
        grad[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    memset(out, 0xFF, sizeof out);
    struct batch_index *index;
    assert_int_equal(
        persia_batcher_forward(w, plan, &b, 0, out, WIDTH, rows, &index),
        PERSIA_OK);
    assert_int_equal(index != NULL, service != NULL);

    for (size_t f = 0; f < 3; f++) {
        uint32_t dim = features[f].dim, t = features[f].table;
        for (size_t bag = 0; bag < BAGS; bag++) {
            const int64_t *o = offsets + features[f].key * BAGS + bag;
            const float *got = out + bag * WIDTH + features[f].column;
            const float *g = grad + bag * WIDTH + features[f].column;
            for (uint32_t d = 0; d < dim; d++) {
                double sum = 0;
                for (int64_t i = o[0]; i < o[1]; i++) {
                    double s = scale_of(pooling, (size_t)(o[1] - o[0])) *
                               (weighted ? weights[i] : 1.0f);
                    size_t at = (size_t)values[i] * dim + d;
                    sum += s * table[t][at];
                    want[t][at] -= 0.1 * s * g[d];
                }
                assert_true(fabs(sum - got[d]) < 1e-5);
            }
        }
    }

    batcher_grad g = {.plan = plan, .batch = b, .rows = rows, .index = index,
                      .grad = grad, .stride = WIDTH};
    optim_args optim[2] = {{.kind = OPTIM_SGD, .lr = 0.1f, .grad_scale = 1},
                           {.kind = OPTIM_SGD, .lr = 0.1f, .grad_scale = 1}};
    batcher_counts counts;
    assert_int_equal(
        persia_batcher_backward(w, &g, 1, NULL, optim, 2, &counts), PERSIA_OK);
    persia_batch_index_put(index);
    assert_int_equal(persia_client_indexes(c)->live, 0);
    for (int t = 0; t < 2; t++) {
        int dim = t ? DIM_B : DIM_A;
        rows_of((uint32_t)t, after);
        for (int i = 0; i < VOCABULARY * dim; i++)
            assert_true(fabs(after[i] - want[t][i]) < 1e-4);
    }
}

static void batches_as_a_plain_loop_has_them(void **state)
{
    (void)state;
    srand(1);
    for (uint32_t pooling = POOL_SUM; pooling <= POOL_SQRTN; pooling++)
        for (int single = 0; single < 3; single++)
            for (int weighted = 0; weighted < 2; weighted++)
                check(pooling, single, weighted);
}

static void rows_have_gaps_of_zeros(void **state)
{
    (void)state;
    uint32_t plan = plan_of(PLAN_ROWS, POOL_NONE);
    id_batch b = random_batch(0, 0);
    static float all[KEYS * BAGS * 4 * DIM_B], table[2][VOCABULARY * DIM_B];
    memset(all, 0xFF, sizeof all);
    rows_of(0, table[0]);
    rows_of(1, table[1]);
    assert_int_equal(
        persia_batcher_forward(w, plan, &b, 0, all, DIM_B, rows, NULL),
        PERSIA_OK);
    for (size_t key = 0; key < KEYS; key++) {
        const float *t = table[key == 2 ? 0 : 1];
        size_t dim = key == 1 ? 0 : key == 2 ? DIM_A : DIM_B;
        for (int64_t i = offsets[key * BAGS]; i < offsets[(key + 1) * BAGS];
             i++)
            for (size_t d = 0; d < DIM_B; d++) {
                float want = d < dim ? t[(size_t)values[i] * dim + d] : 0;
                assert_true(all[(size_t)i * DIM_B + d] == want);
            }
    }
}

static void equal_plans_are_one(void **state)
{
    (void)state;
    uint32_t a = plan_of(PLAN_BAGS, POOL_SUM);
    assert_int_equal(plan_of(PLAN_BAGS, POOL_SUM), a);
    assert_int_not_equal(plan_of(PLAN_BAGS, POOL_MEAN), a);
    uint32_t kind, keys, width;
    assert_int_equal(persia_batcher_plan_shape(w, a, &kind, &keys, &width),
                     PERSIA_OK);
    assert_int_equal(kind, PLAN_BAGS);
    assert_int_equal(keys, KEYS);
    assert_int_equal(width, WIDTH);
    assert_int_equal(persia_batcher_plan_shape(w, 999, &kind, &keys, &width),
                     PERSIA_EARG);
    plan_feature f = {.name = "x", .key = 9};
    assert_int_equal(persia_batcher_plan(w, PLAN_BAGS, KEYS, &f, 1, &a),
                     PERSIA_EARG);
}

static void bad_batches_write_nothing(void **state)
{
    (void)state;
    uint32_t plan = plan_of(PLAN_BAGS, POOL_SUM);
    id_batch good = random_batch(0, 0);
    struct {
        size_t at;
        int64_t value;
    } bad[] = {{0, 1},       {0, -1},
               {5, 1 << 30}, {KEYS * BAGS, (int64_t)good.n + 1},
               {BAGS * 3, -7}, {BAGS * 2, (int64_t)good.n + 9}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int64_t was = offsets[bad[i].at];
        offsets[bad[i].at] = bad[i].value;
        memset(out, 0x55, sizeof out);
        memset(rows, 0x55, sizeof rows);
        assert_int_equal(
            persia_batcher_forward(w, plan, &good, 0, out, WIDTH, rows, NULL),
            PERSIA_EOFFSETS);
        for (size_t k = 0; k < sizeof out; k++)
            assert_int_equal(((unsigned char *)out)[k], 0x55);
        batcher_grad g = {.plan = plan, .batch = good, .rows = rows,
                          .grad = grad, .stride = WIDTH};
        optim_args optim[2] = {{.kind = OPTIM_SGD, .grad_scale = 1},
                               {.kind = OPTIM_SGD, .grad_scale = 1}};
        batcher_counts counts;
        assert_int_equal(
            persia_batcher_backward(w, &g, 1, NULL, optim, 2, &counts),
            PERSIA_EOFFSETS);
        offsets[bad[i].at] = was;
    }
    id_batch b = {.n = 10, .bags = 3, .values = values};
    assert_int_equal(
        persia_batcher_forward(w, plan, &b, 0, out, WIDTH, rows, NULL),
        PERSIA_ESHAPE);
}

static void sums_and_finite(void **state)
{
    (void)state;
    uint32_t plan = plan_of(PLAN_BAGS, POOL_SUM);
    id_batch b = random_batch(2, 0);
    double sums[2][VOCABULARY * DIM_B] = {{0}};
    for (size_t i = 0; i < BAGS * WIDTH; i++)
        grad[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    for (size_t f = 0; f < 3; f++)
        for (size_t bag = 0; bag < BAGS; bag++)
            for (uint32_t d = 0; d < features[f].dim; d++)
                sums[features[f].table]
                    [(size_t)values[features[f].key * BAGS + bag] *
                         features[f].dim + d] +=
                    grad[bag * WIDTH + features[f].column + d];
    batcher_grad g = {.plan = plan, .batch = b, .rows = rows, .grad = grad,
                      .stride = WIDTH};
    assert_int_equal(
        persia_batcher_forward(w, plan, &b, 0, out, WIDTH, rows, NULL),
        PERSIA_OK);
    batcher_sum *got;
    size_t n;
    int all_finite;
    assert_int_equal(persia_batcher_sums(w, &g, 1, &got, &n, &all_finite),
                     PERSIA_OK);
    assert_true(all_finite);
    assert_int_equal(n, 2);
    for (size_t t = 0; t < n; t++) {
        const uint32_t dim = got[t].dim;
        double *of = sums[got[t].table];
        for (size_t i = 0; i < got[t].n; i++)
            for (uint32_t d = 0; d < dim; d++)
                of[got[t].ids[i] * dim + d] -= got[t].grads[i * dim + d];
        for (size_t i = 0; i < VOCABULARY * DIM_B; i++)
            assert_true(fabs(of[i]) < 1e-5);
    }
    persia_batcher_sums_free(got, n);

    uint8_t finite[2] = {1, 1};
    assert_int_equal(persia_batcher_finite(w, &g, 1, finite, 2), PERSIA_OK);
    assert_true(finite[0] && finite[1]);
    grad[123 * WIDTH + DIM_A + 2] = INFINITY;
    assert_int_equal(persia_batcher_finite(w, &g, 1, finite, 2), PERSIA_OK);
    assert_true(finite[0] && !finite[1]);
    assert_int_equal(persia_batcher_sums(w, &g, 1, &got, &n, &all_finite),
                     PERSIA_OK);
    assert_false(all_finite);
    persia_batcher_sums_free(got, n);
}

/* The sums of gradients, by table and id; ids without a sum are NaN. */
static void sums_of(const batcher_grad *g, size_t n, float *sums)
{
    batcher_sum *got;
    size_t tables;
    int finite;
    for (size_t i = 0; i < 2 * VOCABULARY * DIM_B; i++)
        sums[i] = NAN;
    assert_int_equal(persia_batcher_sums(w, g, n, &got, &tables, &finite),
                     PERSIA_OK);
    for (size_t t = 0; t < tables; t++)
        for (size_t i = 0; i < got[t].n; i++)
            memcpy(sums + (got[t].table * VOCABULARY + got[t].ids[i]) * DIM_B,
                   got[t].grads + i * got[t].dim,
                   got[t].dim * sizeof *sums);
    persia_batcher_sums_free(got, tables);
}

/* Features that are not trained have ids in the index, too; and gradients of
 * several forwards have several indexes. */
static void sums_are_the_same_with_an_index(void **state)
{
    (void)state;
    static float with[2 * VOCABULARY * DIM_B], without[2 * VOCABULARY * DIM_B];
    for (int trained = 1; trained < 8; trained++) {
        plan_feature f[3];
        uint32_t plan;
        memset(f, 0, sizeof f);
        for (uint32_t i = 0; i < 3; i++)
            f[i] = (plan_feature){.name = "f", .key = features[i].key,
                                  .table = features[i].table,
                                  .pooling = POOL_MEAN,
                                  .trainable = trained >> i & 1};
        assert_int_equal(persia_batcher_plan(w, PLAN_BAGS, KEYS, f, 3, &plan),
                         PERSIA_OK);
        id_batch b = random_batch(0, 0);
        struct batch_index *index;
        assert_int_equal(
            persia_batcher_forward(w, plan, &b, 0, out, WIDTH, rows, &index),
            PERSIA_OK);
        batcher_grad g = {.plan = plan, .batch = b, .grad = grad,
                          .stride = WIDTH};
        for (size_t i = 0; i < BAGS * WIDTH; i++)
            grad[i] = (float)rand() / (float)RAND_MAX - 0.5f;
        batcher_grad two[2] = {g, g};
        for (size_t n = 1; n <= 2; n++) {
            two[0].index = two[1].index = NULL;
            sums_of(two, n, without);
            two[0].index = index;
            sums_of(two, n, with);
            assert_memory_equal(with, without, sizeof with);
            two[1].index = index;
            sums_of(two, n, with);
            assert_memory_equal(with, without, sizeof with);
        }
        persia_batch_index_put(index);
    }
    assert_int_equal(persia_client_indexes(c)->live, 0);
}

static void an_index_of_other_ids_is_not_used(void **state)
{
    (void)state;
    static float with[2 * VOCABULARY * DIM_B], without[2 * VOCABULARY * DIM_B];
    uint32_t plan = plan_of(PLAN_BAGS, POOL_SUM);
    struct batch_index *index;
    id_batch b = random_batch(0, 0);
    assert_int_equal(
        persia_batcher_forward(w, plan, &b, 0, out, WIDTH, rows, &index),
        PERSIA_OK);
    b = random_batch(0, 0);
    batcher_grad g = {.plan = plan, .batch = b, .grad = grad, .stride = WIDTH};
    sums_of(&g, 1, without);
    g.index = index;
    sums_of(&g, 1, with);
    assert_memory_equal(with, without, sizeof with);
    persia_batch_index_put(index);
}

/* ---- t ---- */

enum { PUSHERS = 16, PUSHES = 30, OF_ALL = PUSHERS * PUSHES };

static uint32_t adam_plan; /* of one feature, "adam" */

/* An update of a row that no other has: its value tells t. */
static int update_row(int64_t id)
{
    const float one = 1;
    batcher_grad g = {.plan = adam_plan, .grad = &one, .stride = 1,
                      .batch = {.n = 1, .bags = 1, .values = &id}};
    optim_args adam = {.kind = OPTIM_ADAM, .lr = 1, .eps = 1e-8f,
                       .beta1 = 0.999f, .beta2 = 0.999f, .grad_scale = 1};
    optim_args optim[4] = {{.kind = OPTIM_SGD, .grad_scale = 1}};
    batcher_counts counts;
    for (int i = 1; i < 4; i++)
        optim[i] = adam;
    return persia_batcher_backward(w, &g, 1, NULL, optim,
                                   persia_client_tables(c), &counts);
}

static void *update_rows(void *first)
{
    int rc = PERSIA_OK;
    for (int i = 0; i < PUSHES && !rc; i++)
        rc = update_row((int64_t)(intptr_t)first + i);
    return (void *)(intptr_t)rc;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void sorted_rows(uint32_t no, uint64_t first, float *out)
{
    uint64_t of[OF_ALL];
    for (uint64_t i = 0; i < OF_ALL; i++)
        of[i] = first + i;
    assert_int_equal(persia_table_get(persia_tables_table(p, no), OF_ALL, of,
                                      out, NULL, NULL),
                     PERSIA_OK);
    qsort(out, OF_ALL, sizeof *out, by_value);
}

/* Those that are made at once, as those that are made one by one. */
static void every_update_has_a_t_of_its_own(void **state)
{
    (void)state;
    pthread_t threads[PUSHERS];
    static float at_once[OF_ALL], in_turn[OF_ALL];
    for (int turns = 0; turns < 2; turns++) {
        table_config t;
        uint32_t no;
        int created;
        persia_table_config_init(&t);
        snprintf(t.name, sizeof t.name, "adam %d", turns);
        t.dim = 1;
        t.optimizer = OPTIM_ADAM;
        t.init = INIT_CONSTANT;
        t.init_a = 0;
        assert_int_equal(persia_client_declare(c, &t, &no, &created),
                         PERSIA_OK);
        plan_feature f = {.name = "adam", .table = no, .trainable = 1};
        assert_int_equal(
            persia_batcher_plan(w, PLAN_BAGS, 1, &f, 1, &adam_plan),
            PERSIA_OK);
        persia_client_set_t(c, 0);
        for (int i = 0; i < PUSHERS; i++) {
            void *failed = (void *)(intptr_t)(i * PUSHES);
            if (turns)
                failed = update_rows(failed);
            else
                assert_int_equal(pthread_create(&threads[i], NULL,
                                                update_rows, failed), 0);
            if (turns)
                assert_null(failed);
        }
        for (int i = 0; i < PUSHERS && !turns; i++) {
            void *failed;
            pthread_join(threads[i], &failed);
            assert_null(failed);
        }
        sorted_rows(no, 0, turns ? in_turn : at_once);
    }
    for (int i = 1; i < OF_ALL; i++)
        assert_true(at_once[i] != at_once[i - 1]);
    assert_memory_equal(at_once, in_turn, sizeof in_turn);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(batches_as_a_plain_loop_has_them),
        cmocka_unit_test(rows_have_gaps_of_zeros),
        cmocka_unit_test(equal_plans_are_one),
        cmocka_unit_test(bad_batches_write_nothing),
        cmocka_unit_test(sums_and_finite),
        cmocka_unit_test(sums_are_the_same_with_an_index),
        cmocka_unit_test(an_index_of_other_ids_is_not_used),
        cmocka_unit_test(every_update_has_a_t_of_its_own),
    };
    int failed = cmocka_run_group_tests(tests, setup, teardown);
    return failed + cmocka_run_group_tests(tests, setup_remote, teardown);
}
