/* Pushes: the same bits as a push in one process, applied once whatever is
 * sent again, refused as a whole. */
#include "tests/server/help.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"

static void expect(int code, int wanted, const char *text)
{
    if (code != wanted || !strstr(persia_err_text(), text))
        fail_msg("%s: %s", persia_err_name(code), persia_err_text());
}

/* ---- the same bits ------------------------------------------------------ */

enum { TABLES = 5, BATCH = 300, IDS = 200, STEPS = 12, DIM_MOST = 24 };

static const struct {
    uint32_t dim, dtype, optimizer;
} shapes[TABLES] = {
    {16, VECTOR_BF16, OPTIM_ADAGRAD},
    {3, VECTOR_FP32, OPTIM_ADAM},
    {24, VECTOR_INT8, OPTIM_ROWWISE_ADAGRAD},
    {1, VECTOR_FP32, OPTIM_SGD},
    {8, VECTOR_BF16, OPTIM_ADAMW},
};

static table_spec shape_spec(int i)
{
    char name[16];
    snprintf(name, sizeof name, "t%d", i);
    table_spec spec = spec_of(name, shapes[i].dim, shapes[i].optimizer);
    spec.dtype = shapes[i].dtype;
    spec.momentum = shapes[i].optimizer == OPTIM_SGD;
    /* Admission asks for the number of the update. */
    spec.admission = i == 2 ? 0.5f : 1;
    return spec;
}

static optim_hyper shape_hyper(int i)
{
    return (optim_hyper){.kind = shapes[i].optimizer,
                        .lr = 0.05f,
                        .eps = 1e-6f,
                        .beta1 = 0.9f,
                        .beta2 = 0.99f,
                        .momentum = shapes[i].optimizer == OPTIM_SGD ? 0.9f
                                                                     : 0,
                        .weight_decay = 0.01f,
                        .grad_scale = 0.5f};
}

/* The distinct ids of a batch for one table, with a gradient each. */
typedef struct part {
    size_t n;
    uint64_t ids[BATCH];
    float grads[BATCH * DIM_MOST];
} part;

static void part_make(rng *g, int table, size_t n, part *out)
{
    out->n = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t id = rng_below(g, IDS) * 0x9E3779B97F4A7C15u;
        size_t k = 0;
        while (k < out->n && out->ids[k] != id)
            k++;
        if (k < out->n)
            continue;
        for (uint32_t j = 0; j < shapes[table].dim; j++)
            out->grads[out->n * shapes[table].dim + j] = rng_float(g);
        out->ids[out->n++] = id;
    }
}

/* What of a part belongs to a shard, in the same order. */
static void part_split(const part *p, int table, uint32_t shard,
                       uint32_t shards, part *out)
{
    const uint32_t dim = shapes[table].dim;
    out->n = 0;
    for (size_t i = 0; i < p->n; i++) {
        if (hash_shard(id_hash(p->ids[i]), shards) != shard)
            continue;
        memcpy(out->grads + out->n * dim, p->grads + i * dim, dim * 4);
        out->ids[out->n++] = p->ids[i];
    }
}

/* One update in this process, as the embedded path makes it. */
static void push_embedded(tables *p, part parts[][TABLES], size_t parts_n)
{
    push_job jobs[TABLES];
    push_part all[TABLES][4];
    optim_args optim[TABLES];
    size_t jobs_n = 0;
    for (int t = 0; t < TABLES; t++) {
        size_t n = 0;
        for (size_t r = 0; r < parts_n; r++)
            if (parts[r][t].n)
                all[t][n++] = (push_part){.n = parts[r][t].n,
                                          .ids = parts[r][t].ids,
                                          .grad = parts[r][t].grads,
                                          .stride = shapes[t].dim,
                                          .bags = parts[r][t].n};
        if (!n)
            continue;
        optim_hyper h = shape_hyper(t);
        optim[t] = (optim_args){.kind = h.kind,
                                .lr = h.lr,
                                .eps = h.eps,
                                .beta1 = h.beta1,
                                .beta2 = h.beta2,
                                .momentum = h.momentum,
                                .weight_decay = h.weight_decay,
                                .grad_scale = h.grad_scale,
                                .step = persia_tables_updates(p) + 1};
        jobs[jobs_n++] = (push_job){.t = persia_tables_table(p, (uint32_t)t),
                                    .parts = all[t],
                                    .parts_n = n,
                                    .optim = &optim[t],
                                    .draw = persia_tables_updates(p) + 1};
    }
    assert_int_equal(persia_tables_push_noted(p, jobs, jobs_n, NULL),
                     PERSIA_OK);
}

/* The message of one part to one shard: every table that is in any part of
 * the update, for its clock. */
typedef struct message {
    part split[TABLES];
    wire_push_table tables[TABLES];
    wire_push m;
} message;

static void message_make(const server *v, part *p, part parts[][TABLES],
                         size_t parts_n, uint32_t shard, uint32_t shards,
                         uint64_t stream, uint64_t number, message *out)
{
    size_t n = 0;
    for (int t = 0; t < TABLES; t++) {
        int there = 0;
        for (size_t r = 0; r < parts_n; r++)
            there |= parts[r][t].n > 0;
        if (!there || (parts_n > 1 && !p[t].n && t % 2))
            continue; /* another part's message may move the clock */
        optim_hyper hyper = shape_hyper(t);
        part_split(&p[t], t, shard, shards, &out->split[t]);
        out->tables[n++] =
            push_table((uint32_t)t, shapes[t].dim, out->split[t].n,
                       out->split[t].ids, out->split[t].grads, &hyper);
    }
    out->m = push_of(v, stream, number, out->tables, n);
}

static server *servers_start(uint32_t n)
{
    static server v[3];
    for (uint32_t i = 0; i < n; i++) {
        v[i] = server_start(i, n, NULL);
        for (int t = 0; t < TABLES; t++) {
            table_spec spec = shape_spec(t);
            assert_int_equal(declare(&v[i], &spec), t);
        }
    }
    return v;
}

static tables *embedded_start(void)
{
    server v = server_start(0, 1, NULL);
    for (int t = 0; t < TABLES; t++) {
        table_spec spec = shape_spec(t);
        declare(&v, &spec);
    }
    persia_service_destroy(v.s);
    persia_ckpt_root_close(v.root);
    return v.p;
}

static void all_equal(tables *reference, const server *v, uint32_t n)
{
    for (uint32_t t = 0; t < TABLES; t++) {
        table *shards[3], *one = persia_tables_table(reference, t);
        for (uint32_t i = 0; i < n; i++)
            shards[i] = persia_tables_table(v[i].p, t);
        rows_all a = rows_of(&one, 1), b = rows_of(shards, n);
        assert_true(a.n > 0);
        rows_equal(&a, &b);
        rows_free(&a);
        rows_free(&b);
    }
}

static void shards_have_the_bits_of_one_process(void **state)
{
    static part batch[1][TABLES];
    static message msg;
    (void)state;
    for (uint32_t n = 1; n <= 3; n++) {
        server *v = servers_start(n);
        tables *reference = embedded_start();
        rng g = {n};
        for (uint64_t step = 1; step <= STEPS; step++) {
            for (int t = 0; t < TABLES; t++) /* few ids: none on a shard */
                part_make(&g, t, rng_below(&g, 3) ? rng_below(&g, BATCH)
                                                  : rng_below(&g, 3),
                          &batch[0][t]);
            batch[0][0].n = batch[0][0].n ? batch[0][0].n : 1;
            push_embedded(reference, batch, 1);
            for (uint32_t i = 0; i < n; i++) {
                message_make(&v[i], batch[0], batch, 1, i, n, STREAM, step,
                             &msg);
                wire_push_reply reply = push(&v[i], &msg.m);
                assert_int_equal(reply.status, PUSH_APPLIED);
                assert_int_equal(reply.updates, step);
            }
        }
        all_equal(reference, v, n);
        for (uint32_t i = 0; i < n; i++)
            server_stop(&v[i]);
        persia_tables_destroy(reference);
    }
}

/* Three ranks, parts in any order, some sent again, some steps that fail
 * first; against one process that sums the parts in the order of ranks. */
static void steps_have_the_bits_of_one_process(void **state)
{
    enum { RANKS = 3 };
    static part parts[RANKS][TABLES];
    static message msg[RANKS];
    (void)state;
    for (uint32_t n = 1; n <= 3; n++) {
        server *v = servers_start(n);
        tables *reference = embedded_start();
        rng g = {100 + n};
        for (uint64_t step = 1; step <= STEPS; step++) {
            for (int r = 0; r < RANKS; r++)
                for (int t = 0; t < TABLES; t++)
                    part_make(&g, t, rng_below(&g, BATCH), &parts[r][t]);
            push_embedded(reference, parts, RANKS);
            for (uint32_t i = 0; i < n; i++) {
                pending *waiting[RANKS] = {NULL};
                uint32_t missing = RANKS;
                for (uint32_t r = 0; r < RANKS; r++) {
                    message_make(&v[i], parts[r], parts, RANKS, i, n,
                                 STREAM + r, step, &msg[r]);
                    msg[r].m.step = step;
                    msg[r].m.part = r;
                    msg[r].m.parts = RANKS;
                }
                while (missing) {
                    uint32_t r = (uint32_t)rng_below(&g, RANKS);
                    pending *again = waiting[r];
                    if (!again)
                        missing--;
                    if (again && rng_below(&g, 2))
                        continue;
                    waiting[r] = push_start(&v[i], &msg[r].m,
                                            60 * (uint64_t)SECOND);
                    assert_int_equal(call_done(waiting[r]), missing == 0);
                    if (again) { /* the one before was replaced */
                        result old = call_wait(again);
                        assert_int_equal(old.code, PERSIA_EUNAVAILABLE);
                        result_free(&old);
                    }
                }
                uint64_t touched = 0;
                for (uint32_t r = 0; r < RANKS; r++) {
                    wire_push_reply reply = push_wait(waiting[r]);
                    assert_int_equal(reply.status, PUSH_APPLIED);
                    assert_int_equal(reply.updates, step);
                    assert_true(r == 0 || reply.touched == 0);
                    touched += reply.touched;
                    assert_int_equal(push(&v[i], &msg[r].m).status,
                                     PUSH_DUPLICATE);
                }
                assert_true(touched > 0);
                assert_int_equal(stats_of(&v[i]).step, step);
            }
        }
        all_equal(reference, v, n);
        for (uint32_t i = 0; i < n; i++)
            server_stop(&v[i]);
        persia_tables_destroy(reference);
    }
}

/* ---- what is narrower, has hints, or is refused ------------------------- */

typedef struct small {
    server v;
    uint64_t ids[100];
    float grads[400];
    optim_hyper hyper;
    wire_push_table table;
} small;

static small *small_start(uint32_t nonfinite, uint64_t capacity)
{
    small *f = calloc(1, sizeof *f);
    table_spec spec = spec_of("a", 4, OPTIM_SGD);
    f->v = server_start(0, 1, NULL);
    spec.nonfinite = nonfinite;
    spec.capacity = capacity;
    spec.init = INIT_CONSTANT;
    spec.init_a = 0;
    declare(&f->v, &spec);
    for (uint64_t i = 0; i < 100; i++)
        f->ids[i] = i + 1;
    for (int i = 0; i < 400; i++)
        f->grads[i] = -1;
    f->hyper = sgd(1);
    f->table = push_table(0, 4, 100, f->ids, f->grads, &f->hyper);
    return f;
}

static void small_stop(small *f)
{
    server_stop(&f->v);
    free(f);
}

/* The value that every element of rows [first, first + n) has. */
static float small_value(small *f, size_t first, size_t n)
{
    float out[400];
    pull(&f->v, 0, n, f->ids + first, out);
    for (size_t i = 1; i < n * 4; i++)
        assert_true(out[i] == out[0]);
    return out[0];
}

static void narrow_gradients_and_hints(void **state)
{
    (void)state;
    small *f = small_start(NONFINITE_RAISE, 0);
    uint16_t narrow[400];
    float scales[100], out[400];
    uint32_t hints[100];
    rng g = {3};
    for (int i = 0; i < 400; i++)
        f->grads[i] = rng_float(&g) * (i < 200 ? 1e-3f : 1e6f);
    float want[400] = {0};
    for (uint32_t dtype = 0; dtype < WIRE_DTYPES; dtype++) {
        float wide[400];
        if (dtype == WIRE_FP32) {
            memcpy(wide, f->grads, sizeof wide);
        } else {
            persia_wire_narrow(dtype, 100, 4, f->grads, 4, narrow, scales);
            persia_wire_widen(dtype, 100, 4, narrow, scales, wide, 4);
        }
        for (int i = 0; i < 400; i++)
            want[i] -= wide[i];
        wire_push_table t = f->table;
        if (dtype != WIRE_FP32)
            t.grads.values = narrow;
        if (dtype == WIRE_FP16)
            t.grads.scales = scales;
        for (uint32_t i = 0; i < 100; i++)
            hints[i] = dtype == WIRE_FP16 ? (uint32_t)rng_next(&g) : i;
        t.grads.rows = dtype == WIRE_FP32 ? NULL : hints;
        wire_push m = push_of(&f->v, STREAM, dtype + 1, &t, 1);
        m.dtype = dtype;
        wire_push_reply reply = push(&f->v, &m);
        assert_int_equal(reply.status, PUSH_APPLIED);
        assert_int_equal(reply.touched, 100);
        assert_int_equal(reply.created, dtype == WIRE_FP32 ? 100 : 0);
    }
    pull(&f->v, 0, 100, f->ids, out);
    assert_memory_equal(out, want, sizeof want);
    small_stop(f);
}

/* By policy (state: an enum table_nonfinite) an update with one row of NaN or
 * Inf is refused, or the row is left out; wherever it is in the message. */
static void nonfinite_narrow_gradients(void **state)
{
    enum { N = 5000, DIM = 4, BAD = 4321 };
    const uint32_t policy = (uint32_t)(uintptr_t)*state;
    small *f = small_start(policy, 0);
    uint64_t *ids = calloc(N, sizeof *ids);
    uint16_t *narrow = calloc(N * DIM, sizeof *narrow);
    float *scales = calloc(N, sizeof *scales);
    for (uint32_t i = 0; i < N; i++) {
        ids[i] = i + 1;
        scales[i] = 1;
    }
    wire_push_table t = push_table(0, DIM, N, ids, NULL, &f->hyper);
    t.grads.values = narrow;
    for (uint64_t number = 1; number <= 3; number++) {
        const int by_scale = number == 3;
        wire_push m = push_of(&f->v, STREAM, number, &t, 1);
        m.dtype = number == 1 ? WIRE_BF16 : WIRE_FP16;
        t.grads.scales = m.dtype == WIRE_FP16 ? scales : NULL;
        scales[BAD] = by_scale ? (float)INFINITY : 1;
        narrow[BAD * DIM + 2] = number == 1 ? 0x7f80 : by_scale ? 1 : 0x7e00;
        if (policy == NONFINITE_RAISE) {
            expect(push_code(&f->v, &m), PERSIA_ENONFINITE, "id 4322 ");
            continue;
        }
        wire_push_reply reply = push(&f->v, &m);
        assert_int_equal(reply.nonfinite, 1);
        assert_int_equal(reply.touched, N - 1);
    }
    table_stats stats;
    persia_table_get_stats(persia_tables_table(f->v.p, 0), &stats);
    assert_int_equal(stats.rows, policy == NONFINITE_RAISE ? 0 : N - 1);
    free(scales);
    free(narrow);
    free(ids);
    small_stop(f);
}

static void what_is_refused_changes_nothing(void **state)
{
    (void)state;
    small *f = small_start(NONFINITE_RAISE, 50);
    wire_push m = push_of(&f->v, STREAM, 1, &f->table, 1);
    expect(push_code(&f->v, &m), PERSIA_ECAPACITY, "table a holds 0 rows");
    f->table.grads.n = 40;
    f->grads[7] = (float)NAN;
    expect(push_code(&f->v, &m), PERSIA_ENONFINITE, "id 2 ");
    f->grads[7] = -1;
    f->table.hyper.lr = -1;
    expect(push_code(&f->v, &m), PERSIA_EARG, "table a: optimizer: lr is -1");
    f->table.hyper = sgd(1);
    f->table.hyper.kind = OPTIM_ADAM;
    f->table.hyper.eps = 1e-8f;
    f->table.hyper.beta1 = f->table.hyper.beta2 = 0.5f;
    expect(push_code(&f->v, &m), PERSIA_EMISMATCH, "table a keeps the state");
    f->table.hyper = sgd(1);
    f->table.hyper.momentum = 0.5f;
    expect(push_code(&f->v, &m), PERSIA_EMISMATCH, "without momentum");
    f->table.hyper = sgd(1);
    f->table.grads.dim = 3;
    expect(push_code(&f->v, &m), PERSIA_ESHAPE, "gradients of dim 3");
    f->table.grads.dim = 4;
    f->table.grads.no = 1;
    expect(push_code(&f->v, &m), PERSIA_EARG, "no table number 1");
    f->table.grads.no = 0;
    wire_push_table twice[2] = {f->table, f->table};
    m.tables = twice;
    m.tables_n = 2;
    expect(push_code(&f->v, &m), PERSIA_EARG, "table a is twice");
    m = push_of(&f->v, STREAM + 8, 1, &f->table, 1);
    expect(push_code(&f->v, &m), PERSIA_ESTALE, "not open here");
    m = push_of(&f->v, STREAM, 1, &f->table, 1);
    m.caller.boot++;
    expect(push_code(&f->v, &m), PERSIA_ESTALE, "started again");
    m = push_of(&f->v, STREAM, 1, &f->table, 1);
    m.caller.lineage++;
    assert_int_equal(push(&f->v, &m).status, PUSH_STALE_LINEAGE);
    m.caller.lineage--;
    m.number = 4097;
    assert_int_equal(push(&f->v, &m).status, PUSH_RETRY_LATER);
    /* nothing of all this has left a trace */
    wire_stats_reply stats = stats_of(&f->v);
    assert_int_equal(stats.updates, 0);
    assert_int_equal(stats.pushes, 0);
    assert_int_equal(stats.parked, 0);
    assert_int_equal(ledger_of(&f->v, STREAM).watermark, 0);
    table_stats rows;
    persia_table_get_stats(persia_tables_table(f->v.p, 0), &rows);
    assert_int_equal(rows.rows, 0);
    assert_int_equal(rows.pushes, 0);
    m.number = 1;
    assert_int_equal(push(&f->v, &m).status, PUSH_APPLIED);
    assert_true(small_value(f, 0, 40) == 1);
    small_stop(f);
}

static void ids_of_other_shards_are_refused(void **state)
{
    (void)state;
    server v = server_start(1, 3, NULL);
    table_spec spec = spec_of("a", 1, OPTIM_SGD);
    uint64_t ids[20000];
    static float grads[20000];
    optim_hyper hyper = sgd(1);
    size_t n = 0;
    declare(&v, &spec);
    for (uint64_t id = 0; n < 20000; id++)
        if (hash_shard(id_hash(id), 3) == 1)
            ids[n++] = id;
    uint64_t mine = ids[19999];
    while (hash_shard(id_hash(ids[19999]), 3) == 1)
        ids[19999]++;
    wire_push_table t = push_table(0, 1, n, ids, grads, &hyper);
    wire_push m = push_of(&v, STREAM, 1, &t, 1);
    expect(push_code(&v, &m), PERSIA_EARG, "this is shard 1");
    ids[19999] = mine;
    assert_int_equal(push(&v, &m).touched, n);
    server_stop(&v);
}

static void skipped_gradients_are_counted(void **state)
{
    (void)state;
    small *f = small_start(NONFINITE_SKIP, 0);
    wire_push m = push_of(&f->v, STREAM, 1, &f->table, 1);
    f->grads[5] = (float)INFINITY;
    wire_push_reply reply = push(&f->v, &m);
    assert_int_equal(reply.nonfinite, 1);
    assert_int_equal(reply.touched, 99);
    small_stop(f);
}

static void gaps_are_closed_by_settled_numbers(void **state)
{
    (void)state;
    small *f = small_start(NONFINITE_RAISE, 0);
    wire_push m = push_of(&f->v, STREAM, 1, &f->table, 1);
    f->grads[0] = (float)NAN;
    assert_int_equal(push_code(&f->v, &m), PERSIA_ENONFINITE);
    f->grads[0] = -1;
    m.number = 2; /* the first one was given up */
    assert_int_equal(push(&f->v, &m).status, PUSH_APPLIED);
    assert_int_equal(ledger_of(&f->v, STREAM).watermark, 0);
    m.number = 3;
    m.settled = 1;
    assert_int_equal(push(&f->v, &m).status, PUSH_APPLIED);
    assert_int_equal(ledger_of(&f->v, STREAM).watermark, 3);
    m.number = 100000; /* after a server lost what was before */
    m.settled = 99999;
    assert_int_equal(push(&f->v, &m).status, PUSH_APPLIED);
    assert_int_equal(ledger_of(&f->v, STREAM).watermark, 100000);
    /* an update without tables is one, too */
    m = push_of(&f->v, STREAM, 100001, NULL, 0);
    assert_int_equal(push(&f->v, &m).updates, 4);
    assert_int_equal(push(&f->v, &m).status, PUSH_DUPLICATE);
    assert_true(small_value(f, 0, 100) == 3);
    small_stop(f);
}

/* ---- many at once ------------------------------------------------------- */

enum { SENDERS = 4, NUMBERS = SANITIZED ? 150 : 600 };

typedef struct storm {
    small *f;
    _Atomic(uint64_t) applied, duplicates;
    atomic_int seed;
} storm;

/* Sends all numbers of two streams, each several times, near the order. */
static void *storm_send(void *arg)
{
    storm *s = arg;
    rng g = {(uint64_t)atomic_fetch_add(&s->seed, 1) * 1000000};
    for (uint64_t i = 1; i <= NUMBERS; i++)
        for (uint64_t stream = STREAM; stream < STREAM + 2; stream++) {
            uint64_t back = rng_below(&g, 10);
            wire_push m = push_of(&s->f->v, stream,
                                  i > back && rng_below(&g, 2) ? i - back : i,
                                  &s->f->table, 1);
            for (int k = 0; k < 2; k++) {
                wire_push_reply reply = push(&s->f->v, &m);
                if (reply.status == PUSH_APPLIED)
                    atomic_fetch_add(&s->applied, 1);
                else if (reply.status == PUSH_DUPLICATE)
                    atomic_fetch_add(&s->duplicates, 1);
                else
                    return arg;
                m.number = i;
            }
        }
    return NULL;
}

static void copies_from_many_threads_are_applied_once(void **state)
{
    (void)state;
    storm s = {.f = small_start(NONFINITE_RAISE, 0)};
    pthread_t threads[SENDERS];
    s.f->table.grads.n = 10;
    for (int i = 0; i < SENDERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, storm_send, &s),
                         0);
    for (int i = 0; i < SENDERS; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    assert_true(small_value(s.f, 0, 10) == 2 * NUMBERS);
    wire_stats_reply stats = stats_of(&s.f->v);
    assert_int_equal(stats.updates, 2 * NUMBERS);
    assert_int_equal(stats.pushes, 2 * NUMBERS);
    assert_int_equal(stats.duplicates, s.duplicates);
    assert_int_equal(stats.parked, 0);
    /* a copy that waited for the first has its answer: APPLIED, too */
    assert_true(s.applied >= 2 * NUMBERS);
    assert_int_equal(s.applied + s.duplicates, 4 * SENDERS * NUMBERS);
    assert_int_equal(ledger_of(&s.f->v, STREAM).watermark, NUMBERS);
    assert_int_equal(ledger_of(&s.f->v, STREAM + 1).watermark, NUMBERS);
    small_stop(s.f);
}

/* What a shard refused counts there as an update without ids.  Sent again, it
 * was refused, or, long after, that is not known any more: never applied. */
static void no_refused_update_is_said_to_be_applied(void **state)
{
    enum { REFUSED = 200, REMEMBERED = 64 };
    (void)state;
    server v = server_start(0, 2, NULL);
    const table_spec spec = spec_of("a", 1, OPTIM_SGD);
    declare(&v, &spec);
    uint64_t id = 0;
    while (hash_shard(id_hash(id), 2) != 0)
        id++;
    const float bad = (float)NAN, good = 1;
    const optim_hyper hyper = sgd(1);
    wire_push_table table = push_table(0, 1, 1, &id, &bad, &hyper);
    for (uint64_t n = 1; n <= REFUSED; n++) {
        wire_push m = push_of(&v, STREAM, n, &table, 1);
        assert_int_equal(push_code(&v, &m), PERSIA_ENONFINITE);
    }
    table.grads.values = &good;
    wire_push after = push_of(&v, STREAM, REFUSED + 1, &table, 1);
    wire_push other = push_of(&v, STREAM + 1, 1, &table, 1);
    assert_int_equal(push(&v, &after).status, PUSH_APPLIED);
    assert_int_equal(push(&v, &other).status, PUSH_APPLIED);
    for (uint64_t n = 1; n <= REFUSED; n++) {
        wire_push m = push_of(&v, STREAM, n, &table, 1);
        assert_int_equal(push_code(&v, &m), n <= REFUSED - REMEMBERED
                                                ? PERSIA_ETIMEOUT
                                                : PERSIA_ENONFINITE);
    }
    assert_int_equal(push(&v, &after).status, PUSH_DUPLICATE);
    assert_int_equal(push(&v, &other).status, PUSH_DUPLICATE);
    server_stop(&v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_have_the_bits_of_one_process),
        cmocka_unit_test(steps_have_the_bits_of_one_process),
        cmocka_unit_test(narrow_gradients_and_hints),
        cmocka_unit_test_prestate(nonfinite_narrow_gradients,
                                  (void *)(uintptr_t)NONFINITE_RAISE),
        cmocka_unit_test_prestate(nonfinite_narrow_gradients,
                                  (void *)(uintptr_t)NONFINITE_SKIP),
        cmocka_unit_test(what_is_refused_changes_nothing),
        cmocka_unit_test(ids_of_other_shards_are_refused),
        cmocka_unit_test(no_refused_update_is_said_to_be_applied),
        cmocka_unit_test(skipped_gradients_are_counted),
        cmocka_unit_test(gaps_are_closed_by_settled_numbers),
        cmocka_unit_test(copies_from_many_threads_are_applied_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
