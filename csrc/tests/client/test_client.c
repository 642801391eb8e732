/* client: a remote store gives the bits of a local one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster.h"

enum {
    TABLES = 6,
    IDS = 500,      /* known to the batches */
    MOST = 3000,    /* ids of a job */
    DIM_MOST = 70,
    FEATURES = 3    /* jobs of a table in one pull, parts in one push */
};

static const struct {
    uint32_t dim, dtype, optimizer, momentum, missing;
    float admission;
} kinds[TABLES] = {
    {16, VECTOR_FP32, OPTIM_ADAGRAD, 0, MISSING_INIT, 1},
    {64, VECTOR_FP32, OPTIM_ADAM, 0, MISSING_INIT, 1},
    {5, VECTOR_BF16, OPTIM_ADAMW, 0, MISSING_ZEROS, 1},
    {1, VECTOR_FP32, OPTIM_SGD, 1, MISSING_INIT, 1},
    {33, VECTOR_BF16, OPTIM_ROWWISE_ADAGRAD, 0, MISSING_INIT, 1},
    {16, VECTOR_FP32, OPTIM_SGD, 0, MISSING_INIT, 0.5f},
};

static table_config config_of(uint32_t i)
{
    table_config c;
    persia_table_config_init(&c);
    snprintf(c.name, sizeof c.name, "table %u", i);
    c.seed = 100 + i;
    c.dim = kinds[i].dim;
    c.dtype = kinds[i].dtype;
    c.optimizer = kinds[i].optimizer;
    c.momentum = kinds[i].momentum;
    c.missing = kinds[i].missing;
    c.admission = kinds[i].admission;
    c.init_a = -1;
    c.init_b = 1;
    return c;
}

static uint64_t turn;
static uint32_t random_below(uint32_t n)
{
    return (uint32_t)(id_hash(turn++) >> 33) % n;
}
static float random_float(void)
{
    return (float)random_below(1 << 20) / (float)(1 << 19) - 1;
}

/* Few ids occur often, some are large. */
static uint64_t random_id(void)
{
    uint32_t i = random_below(4) ? random_below(20) : random_below(IDS);
    return i % 3 ? i : (uint64_t)i << 50 | i;
}

/* ---- batches ---- */

static void declare_all(ps_client *c)
{
    for (uint32_t i = 0; i < TABLES; i++) {
        table_config t = config_of(i);
        uint32_t no;
        int created;
        assert_int_equal(persia_client_declare(c, &t, &no, &created),
                         PERSIA_OK);
        assert_int_equal(no, i);
        assert_true(created);
    }
    assert_int_equal(persia_client_tables(c), TABLES);
    assert_null(persia_client_table(c, TABLES));
    assert_string_equal(persia_client_table(c, 2)->name, "table 2");
}

/* The ids of one feature: as many as fit a few chunks, or none. */
static size_t random_ids(uint64_t *ids)
{
    size_t n = random_below(4) ? random_below(50) : random_below(MOST);
    for (size_t i = 0; i < n; i++)
        ids[i] = random_id();
    return n;
}

typedef struct batch {
    size_t jobs_n;
    uint32_t tables[TABLES * FEATURES];
    pull_job pulls[TABLES * FEATURES];
    uint64_t ids[TABLES * FEATURES][MOST];
    uint32_t bags[TABLES * FEATURES][MOST];
    float scales[TABLES * FEATURES][MOST];
} batch;

/* Features of random tables in random order, some twice. */
static void make_batch(batch *b)
{
    b->jobs_n = random_below(TABLES * FEATURES + 1);
    uint32_t used[TABLES] = {0};
    for (size_t i = 0; i < b->jobs_n; i++) {
        uint32_t t;
        do
            t = random_below(TABLES);
        while (used[t] == FEATURES);
        used[t]++;
        b->tables[i] = t;
        b->pulls[i] = (pull_job){.n = random_ids(b->ids[i]),
                                 .ids = b->ids[i]};
    }
}

/* What one store reads of a batch. */
typedef struct answer {
    float out[TABLES * FEATURES][MOST * (DIM_MOST + 3)];
    uint32_t rows[TABLES * FEATURES][MOST];
} answer;

static void read_batch(ps_client *c, batch *b, answer *a)
{
    memset(a->out, 0x77, sizeof a->out);
    for (size_t i = 0; i < b->jobs_n; i++) {
        b->pulls[i].out = a->out[i];
        b->pulls[i].stride = kinds[b->tables[i]].dim + i % 4;
        b->pulls[i].rows = a->rows[i];
    }
    int rc = persia_client_pull(c, 0, b->tables, b->pulls, b->jobs_n);
    if (rc)
        fail_msg("%s", persia_err_text());
}

static float grads[4096 * DIM_MOST];

typedef struct update {
    size_t jobs_n;
    uint32_t tables[TABLES];
    push_job jobs[TABLES];
    push_part parts[TABLES * FEATURES];
    optim_args optim[TABLES];
    size_t from[TABLES * FEATURES]; /* the part's job of the pull */
} update;

/* The gradients of a batch: bags, scales, all that parts can be. */
static void make_update(batch *b, update *u)
{
    size_t parts = 0;
    u->jobs_n = 0;
    for (uint32_t t = 0; t < TABLES; t++) {
        push_job *job = &u->jobs[u->jobs_n];
        *job = (push_job){.parts = &u->parts[parts]};
        for (size_t i = 0; i < b->jobs_n; i++) {
            size_t n = b->pulls[i].n;
            if (b->tables[i] != t)
                continue;
            push_part *p = &u->parts[parts];
            uint32_t dim = kinds[t].dim;
            *p = (push_part){.n = n,
                             .ids = b->ids[i],
                             .grad = grads + random_below(100),
                             .stride = dim + random_below(3),
                             .bags = n};
            if (random_below(2)) {
                p->bag = b->bags[i];
                p->bags = 1 + random_below(40);
                for (size_t k = 0; k < n; k++)
                    b->bags[i][k] = random_below((uint32_t)p->bags);
            }
            if (random_below(2)) {
                p->scale = b->scales[i];
                for (size_t k = 0; k < n; k++)
                    b->scales[i][k] = random_float();
            }
            u->from[parts++] = i;
            job->parts_n++;
        }
        if (job->parts_n) {
            u->optim[u->jobs_n] = (optim_args){
                .kind = kinds[t].optimizer, .lr = 0.1f, .eps = 1e-8f,
                .beta1 = 0.9f, .beta2 = 0.99f, .weight_decay = 0.01f,
                .momentum = kinds[t].momentum ? 0.9f : 0,
                .max_norm = t == 1 ? 3 : 0, .grad_scale = 0.5f};
            job->optim = &u->optim[u->jobs_n];
            u->tables[u->jobs_n++] = t;
        }
    }
}

/* Hints are of the store itself; sometimes there are none. */
static void apply(ps_client *c, update *u, const answer *a, int hints,
                  const client_update *name)
{
    size_t part = 0;
    for (size_t i = 0; i < u->jobs_n; i++) {
        uint64_t next = persia_client_updates(c) + 1;
        u->optim[i].step = next;
        u->jobs[i].draw = next;
        for (size_t k = 0; k < u->jobs[i].parts_n; k++, part++)
            u->parts[part].rows = hints ? a->rows[u->from[part]] : NULL;
    }
    int rc = persia_client_push(c, name, u->tables, u->jobs, u->jobs_n);
    if (rc)
        fail_msg("%s", persia_err_text());
}

static void check_answers(const batch *b, const answer *want,
                          const answer *got)
{
    for (size_t i = 0; i < b->jobs_n; i++) {
        uint32_t dim = kinds[b->tables[i]].dim;
        size_t stride = b->pulls[i].stride;
        assert_memory_equal(want->out[i], got->out[i],
                            b->pulls[i].n * stride * sizeof(float));
        /* also what lies between the rows, and behind them */
        uint32_t behind;
        memcpy(&behind, &got->out[i][b->pulls[i].n * stride + dim], 4);
        assert_int_equal(behind, 0x77777777);
        for (size_t k = 0; k < b->pulls[i].n; k++)
            assert_int_equal(want->rows[i][k] == ROW_NONE,
                             got->rows[i][k] == ROW_NONE);
    }
}

/* All rows that there can be, bit by bit. */
static void check_rows(ps_client *want, ps_client *got)
{
    static uint64_t ids[2 * IDS];
    static float x[2][2 * IDS * DIM_MOST], s[2][2 * IDS * 2 * DIM_MOST];
    static uint8_t found[2][2 * IDS];
    for (uint64_t i = 0; i < IDS; i++) {
        ids[2 * i] = i;
        ids[2 * i + 1] = i << 50 | i;
    }
    for (uint32_t t = 0; t < TABLES; t++) {
        uint32_t state = persia_client_state_floats(want, t);
        assert_int_equal(state, persia_client_state_floats(got, t));
        ps_client *c[2] = {want, got};
        for (int k = 0; k < 2; k++) {
            int rc = persia_client_get(c[k], t, 2 * IDS, ids, x[k],
                                       state ? s[k] : NULL, found[k]);
            if (rc)
                fail_msg("%s", persia_err_text());
        }
        assert_memory_equal(found[0], found[1], sizeof found[0]);
        assert_memory_equal(x[0], x[1],
                            2 * IDS * kinds[t].dim * sizeof(float));
        assert_memory_equal(s[0], s[1], 2 * IDS * state * sizeof(float));
        table_stats a, b;
        assert_int_equal(persia_client_stats(want, t, &a), PERSIA_OK);
        assert_int_equal(persia_client_stats(got, t, &b), PERSIA_OK);
        assert_int_equal(a.rows, b.rows);
        assert_int_equal(a.row_bytes, b.row_bytes);
        assert_int_equal(a.pushes, b.pushes);
        assert_int_equal(a.created, b.created);
        assert_int_equal(a.refused, b.refused);
    }
}

static void check_counts(const update *want, const update *got)
{
    uint64_t w[5] = {0}, g[5] = {0};
    for (size_t i = 0; i < want->jobs_n; i++) {
        w[0] += want->jobs[i].created;
        w[1] += want->jobs[i].refused;
        w[2] += want->jobs[i].touched;
        g[0] += got->jobs[i].created;
        g[1] += got->jobs[i].refused;
        g[2] += got->jobs[i].touched;
    }
    assert_memory_equal(w, g, sizeof w);
}

static ps_client *local_client(tables **p)
{
    tables_config config = {.threads = 3};
    ps_client *c;
    assert_int_equal(persia_tables_create(&config, p), PERSIA_OK);
    assert_int_equal(persia_client_embedded(*p, &c), PERSIA_OK);
    return c;
}

static void same_bits(uint32_t shards)
{
    static batch b;
    static answer wanted, got;
    static update u, v;
    cluster c;
    tables *p;
    ps_client *local = local_client(&p);
    cluster_make(&c, shards);
    client_config config = cluster_config(&c);
    config.threads = 1 + shards % 3;
    ps_client *remote = cluster_client(&c, &config);
    assert_true(!persia_client_is_embedded(remote) &&
                persia_client_is_embedded(local));
    assert_int_equal(persia_client_shards(remote), shards);
    turn = shards;
    for (size_t i = 0; i < sizeof grads / sizeof grads[0]; i++)
        grads[i] = random_float();
    declare_all(local);
    declare_all(remote);
    for (int i = 0; i < 12; i++) {
        make_batch(&b);
        read_batch(local, &b, &wanted);
        read_batch(remote, &b, &got);
        check_answers(&b, &wanted, &got);
        for (size_t k = 0; k < b.jobs_n && i % 4 == 3; k++)
            if (b.pulls[k].n > 3) /* nearly the batch that was read */
                b.ids[k][1] = random_id();
        make_update(&b, &u);
        v = u;
        for (size_t k = 0; k < u.jobs_n; k++) {
            v.jobs[k].parts = v.parts + (u.jobs[k].parts - u.parts);
            v.jobs[k].optim = &v.optim[k];
        }
        apply(local, &u, &wanted, i % 3 > 0, NULL);
        apply(remote, &v, &got, i % 3 > 0, NULL);
        check_counts(&u, &v);
        assert_int_equal(persia_client_updates(remote),
                         persia_client_updates(local));
    }
    check_rows(local, remote);
    client_counts counts;
    persia_client_get_counts(remote, &counts);
    assert_int_equal(counts.pulls, 12);
    assert_int_equal(counts.pushes, 12);
    assert_true(counts.distinct > 0 && counts.distinct < counts.ids);
    assert_int_equal(counts.retries + counts.duplicates + counts.lost, 0);
    persia_client_destroy(remote);
    persia_client_destroy(local);
    persia_tables_destroy(p);
    cluster_free(&c);
}

static void one_shard_has_the_bits_of_local(void **state)
{
    (void)state;
    same_bits(1);
}

static void some_shards_have_the_bits_of_local(void **state)
{
    (void)state;
    same_bits(2);
    same_bits(3);
    same_bits(7);
}

/* Many chunks, and hash tables that do not fit on the stack. */
static void large_batches_have_the_bits_of_local(void **state)
{
    enum { N = 150001, DIM = 16 };
    static uint64_t ids[N];
    static float grad[N * DIM], out[2][N * DIM];
    (void)state;
    for (uint32_t shards = 1; shards < 4; shards += 2) {
        cluster c;
        tables *p;
        ps_client *both[2] = {local_client(&p), NULL};
        cluster_make(&c, shards);
        client_config config = cluster_config(&c);
        both[1] = cluster_client(&c, &config);
        turn = 17;
        for (size_t i = 0; i < N; i++)
            ids[i] = random_below(N / 2 * 3);
        for (size_t i = 0; i < N * DIM; i++)
            grad[i] = random_float();
        optim_args adagrad = {.kind = OPTIM_ADAGRAD, .lr = 0.1f,
                              .eps = 1e-8f, .grad_scale = 1, .step = 1};
        push_part part = {.n = N, .ids = ids, .grad = grad, .stride = DIM,
                          .bags = N};
        push_job push = {.parts = &part, .parts_n = 1, .optim = &adagrad};
        uint32_t no = 0;
        for (int k = 0; k < 2; k++) {
            pull_job pull = {.n = N, .ids = ids, .out = out[k],
                             .stride = DIM};
            declare_all(both[k]);
            assert_int_equal(persia_client_push(both[k], NULL, &no, &push, 1),
                             PERSIA_OK);
            assert_int_equal(persia_client_pull(both[k], 0, &no, &pull, 1),
                             PERSIA_OK);
        }
        assert_memory_equal(out[0], out[1], sizeof out[0]);
        persia_client_destroy(both[1]);
        persia_client_destroy(both[0]);
        persia_tables_destroy(p);
        cluster_free(&c);
    }
}

static void large_lookups_come_in_pieces(void **state)
{
    enum { N = 20000, JOBS = 3, DIM = 64 };
    static const uint32_t numbers[JOBS] = {1, 0, 1};
    static uint64_t ids[JOBS][N];
    static float out[2][JOBS][N * DIM];
    static uint32_t rows[2][JOBS][N];
    (void)state;
    for (uint32_t dtype = 0; dtype < WIRE_DTYPES; dtype++) {
        cluster c;
        tables *p;
        ps_client *both[2] = {local_client(&p), NULL};
        cluster_make(&c, 2);
        client_config config = cluster_config(&c);
        config.dtype = dtype;
        both[1] = cluster_client(&c, &config);
        turn = dtype;
        for (size_t i = 0; i < (size_t)JOBS * N; i++)
            ids[i / N][i % N] = random_below(4 * N);
        for (int k = 0; k < 2; k++) {
            pull_job jobs[JOBS];
            for (size_t i = 0; i < JOBS; i++)
                jobs[i] = (pull_job){.n = N, .ids = ids[i],
                                     .out = out[k][i],
                                     .stride = kinds[numbers[i]].dim,
                                     .rows = rows[k][i]};
            declare_all(both[k]);
            if (k) /* some pieces have to be asked for again */
                atomic_store(&c.nodes[1].lose, 64);
            if (persia_client_pull(both[k], 0, numbers, jobs, JOBS))
                fail_msg("%s", persia_err_text());
        }
        for (size_t i = 0; i < JOBS; i++)
            for (size_t x = 0; x < N * kinds[numbers[i]].dim; x++) {
                float want = out[0][i][x], got = out[1][i][x];
                if (dtype == WIRE_FP32 ? want != got
                                       : fabsf(want - got) > 0.01f)
                    fail_msg("job %zu, float %zu: %g, not %g", i, x,
                             (double)got, (double)want);
            }
        assert_memory_equal(rows[0], rows[1], sizeof rows[0]);
        assert_true(cluster_calls(&c, WIRE_PULL) >= 4);
        persia_client_destroy(both[1]);
        persia_client_destroy(both[0]);
        persia_tables_destroy(p);
        cluster_free(&c);
    }
}

/* ---- narrow values ---- */

static void narrow_values_come_close(void **state)
{
    (void)state;
    enum { N = 1000, DIM = 24 };
    static uint64_t ids[N];
    static float want[N * DIM], got[N * DIM], grad[N * DIM];
    for (uint32_t dtype = WIRE_FP32; dtype < WIRE_DTYPES; dtype++) {
        cluster c;
        cluster_make(&c, 2);
        client_config config = cluster_config(&c);
        config.dtype = dtype;
        ps_client *remote = cluster_client(&c, &config);
        table_config t;
        persia_table_config_init(&t);
        snprintf(t.name, sizeof t.name, "t");
        t.dim = DIM;
        t.optimizer = OPTIM_SGD;
        t.init_a = -1;
        t.init_b = 1;
        uint32_t no;
        int created;
        assert_int_equal(persia_client_declare(remote, &t, &no, &created),
                         PERSIA_OK);
        for (uint64_t i = 0; i < N; i++)
            ids[i] = i;
        for (int i = 0; i < N * DIM; i++)
            grad[i] = random_float() * 1e-6f;
        float wire = dtype == WIRE_FP32   ? 0
                     : dtype == WIRE_FP16 ? 1.0f / 2048
                                          : 1.0f / 256;
        assert_int_equal(
            persia_client_get(remote, no, N, ids, want, NULL, NULL),
            PERSIA_OK);
        pull_job pull = {.n = N, .ids = ids, .out = got, .stride = DIM};
        assert_int_equal(persia_client_pull(remote, 0, &no, &pull, 1),
                         PERSIA_OK);
        for (int i = 0; i < N * DIM; i++)
            assert_true(fabsf(got[i] - want[i]) <=
                        wire * fabsf(want[i]) + wire * 1e-3f);
        push_part part = {.n = N, .ids = ids, .grad = grad, .stride = DIM,
                          .bags = N};
        optim_args sgd = {.kind = OPTIM_SGD, .lr = 1e6f, .step = 1,
                          .grad_scale = 1};
        push_job job = {.parts = &part, .parts_n = 1, .optim = &sgd};
        assert_int_equal(persia_client_push(remote, NULL, &no, &job, 1),
                         PERSIA_OK);
        assert_int_equal(
            persia_client_get(remote, no, N, ids, got, NULL, NULL), PERSIA_OK);
        for (int i = 0; i < N * DIM; i++)
            assert_true(fabsf(want[i] - 1e6f * grad[i] - got[i]) <=
                        wire * 1e6f * fabsf(grad[i]) + wire * 1e-3f + 1e-6f);
        persia_client_destroy(remote);
        cluster_free(&c);
    }
}

/* ---- whole rows ---- */

static void rows_are_set_and_cleared(void **state)
{
    (void)state;
    enum { N = 5000, DIM = 16 };
    static uint64_t ids[N];
    static float x[N * DIM], y[N * DIM], s[N * DIM], z[N * DIM];
    static uint8_t found[N];
    cluster c;
    cluster_make(&c, 3);
    client_config config = cluster_config(&c);
    config.message_limit = 40000; /* so rows travel in many blocks */
    ps_client *remote = cluster_client(&c, &config);
    declare_all(remote);
    for (uint64_t i = 0; i < N; i++)
        ids[i] = i * 7919;
    for (int i = 0; i < N * DIM; i++) {
        x[i] = random_float();
        s[i] = random_float() + 1;
    }
    assert_int_equal(persia_client_set(remote, 0, N, ids, x, s), PERSIA_OK);
    assert_int_equal(persia_client_get(remote, 0, N, ids, y, z, found),
                     PERSIA_OK);
    assert_memory_equal(x, y, sizeof x);
    assert_memory_equal(s, z, sizeof s);
    table_stats stats;
    assert_int_equal(persia_client_stats(remote, 0, &stats), PERSIA_OK);
    assert_int_equal(stats.rows, N);
    uint64_t used, limit;
    assert_int_equal(persia_client_memory(remote, &used, &limit), PERSIA_OK);
    assert_true(used > N * DIM * sizeof(float));
    assert_int_equal(limit, 0);
    assert_int_equal(persia_client_clear(remote, 0), PERSIA_OK);
    assert_int_equal(persia_client_get(remote, 0, N, ids, y, NULL, found),
                     PERSIA_OK);
    for (int i = 0; i < N; i++)
        assert_false(found[i]);
    assert_int_equal(persia_client_get(remote, 9, N, ids, y, NULL, found),
                     PERSIA_EARG);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* ---- tables ---- */

static void servers_may_number_tables_differently(void **state)
{
    (void)state;
    static batch b;
    static answer wanted, got;
    cluster c;
    tables *p;
    ps_client *local = local_client(&p);
    cluster_make(&c, 2);
    for (uint32_t i = TABLES; i-- > 0;) {
        table_config t = config_of(i);
        uint32_t no;
        int created;
        assert_int_equal(
            persia_tables_declare(c.nodes[1].p, &t, &no, &created), PERSIA_OK);
    }
    client_config config = cluster_config(&c);
    ps_client *remote = cluster_client(&c, &config);
    declare_all(local);
    declare_all(remote);
    assert_int_equal(persia_client_shard_table(remote, 0, 1), 1);
    assert_int_equal(persia_client_shard_table(remote, 1, 1), TABLES - 2);
    make_batch(&b);
    read_batch(local, &b, &wanted);
    read_batch(remote, &b, &got);
    check_answers(&b, &wanted, &got);
    table_config t = config_of(0);
    uint32_t no;
    int created;
    t.dim = 9;
    assert_int_equal(persia_client_declare(remote, &t, &no, &created),
                     PERSIA_EMISMATCH);
    assert_non_null(strstr(persia_err_text(), "embedding_dim"));
    assert_non_null(strstr(persia_err_text(), "ps0:8888"));
    snprintf(t.name, sizeof t.name, "new");
    assert_int_equal(persia_client_declare(remote, &t, &no, &created),
                     PERSIA_OK);
    assert_int_equal(no, TABLES);
    assert_true(created);
    persia_client_destroy(remote);
    persia_client_destroy(local);
    persia_tables_destroy(p);
    cluster_free(&c);
}

static void what_is_wrong_is_found_before_anything_is_sent(void **state)
{
    (void)state;
    uint64_t ids[2] = {1, 2};
    float grad[2 * 16] = {0};
    uint32_t bag[2] = {0, 7}, twice[2] = {0, 0};
    cluster c;
    cluster_make(&c, 2);
    client_config config = cluster_config(&c);
    ps_client *remote = cluster_client(&c, &config);
    declare_all(remote);
    push_part part = {.n = 2, .ids = ids, .grad = grad, .stride = 16,
                      .bags = 2};
    optim_args adagrad = {.kind = OPTIM_ADAGRAD, .lr = 1, .eps = 1e-8f,
                          .grad_scale = 1, .step = 1},
               adam = {.kind = OPTIM_ADAM, .lr = 1, .eps = 1e-8f,
                       .grad_scale = 1, .step = 1};
    push_job jobs[2] = {{.parts = &part, .parts_n = 1, .optim = &adagrad},
                        {.parts = &part, .parts_n = 1, .optim = &adagrad}};
    grad[17] = NAN;
    assert_int_equal(persia_client_push(remote, NULL, twice, jobs, 1),
                     PERSIA_ENONFINITE);
    assert_non_null(strstr(persia_err_text(), "id 2 (row 1"));
    grad[17] = 0;
    assert_int_equal(persia_client_push(remote, NULL, twice, jobs, 2),
                     PERSIA_EARG);
    part.bag = bag;
    assert_int_equal(persia_client_push(remote, NULL, twice, jobs, 1),
                     PERSIA_EARG);
    assert_non_null(strstr(persia_err_text(), "row 7 of 2"));
    part.bag = NULL;
    jobs[0].optim = &adam;
    assert_int_equal(persia_client_push(remote, NULL, twice, jobs, 1),
                     PERSIA_EMISMATCH);
    twice[0] = TABLES;
    assert_int_equal(persia_client_push(remote, NULL, twice, jobs, 1),
                     PERSIA_EARG);
    pull_job pull = {.n = 1, .ids = ids, .out = grad, .stride = 16};
    assert_int_equal(persia_client_pull(remote, 0, twice, &pull, 1),
                     PERSIA_EARG);
    assert_int_equal(cluster_calls(&c, WIRE_PUSH), 0);
    client_update far = {.number = 1000000};
    assert_int_equal(persia_client_push(remote, &far, twice, NULL, 0),
                     PERSIA_EARG);
    /* It leaves no gap before the next one. */
    assert_int_equal(persia_client_push(remote, NULL, twice, NULL, 0),
                     PERSIA_OK);
    assert_int_equal(persia_client_updates(remote), 1);
    persia_client_set_last_number(remote, far.number - 1);
    assert_int_equal(persia_client_push(remote, &far, twice, NULL, 0),
                     PERSIA_OK);
    assert_int_equal(persia_client_updates(remote), 2);
    persia_client_destroy(remote);
    cluster_free(&c);
}

/* ---- a store's own shard ---- */

static void own_shard_needs_no_connection(void **state)
{
    (void)state;
    static batch b;
    static answer wanted, got;
    static update u;
    tables *p, *q;
    tables_config config = {.threads = 2};
    ps_service *s;
    service_config service = {.name_space = "", .shards = 1,
                              .message_limit = 1 << 30};
    ps_client *local = local_client(&p), *remote;
    assert_int_equal(persia_tables_create(&config, &q), PERSIA_OK);
    assert_int_equal(persia_service_create(q, &service, &s), PERSIA_OK);
    const char *address = "rank0:1";
    client_config mine = {.threads = 2,
                          .addresses = &address,
                          .addresses_n = 1,
                          .own = persia_service_shard(s),
                          .world = 1,
                          .stream = 5,
                          .timeout_ns = 1000000000u};
    int rc = persia_client_create(&mine, &remote);
    if (rc)
        fail_msg("%s", persia_err_text());
    declare_all(local);
    declare_all(remote);
    make_batch(&b);
    read_batch(local, &b, &wanted);
    read_batch(remote, &b, &got);
    check_answers(&b, &wanted, &got);
    make_update(&b, &u);
    apply(local, &u, &wanted, 1, NULL);
    apply(remote, &u, &got, 1, NULL);
    check_rows(local, remote);
    persia_client_destroy(remote);
    persia_service_destroy(s);
    persia_tables_destroy(q);
    persia_client_destroy(local);
    persia_tables_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_shard_has_the_bits_of_local),
        cmocka_unit_test(some_shards_have_the_bits_of_local),
        cmocka_unit_test(large_batches_have_the_bits_of_local),
        cmocka_unit_test(large_lookups_come_in_pieces),
        cmocka_unit_test(narrow_values_come_close),
        cmocka_unit_test(rows_are_set_and_cleared),
        cmocka_unit_test(servers_may_number_tables_differently),
        cmocka_unit_test(what_is_wrong_is_found_before_anything_is_sent),
        cmocka_unit_test(own_shard_needs_no_connection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
