/* Random schedules of all calls against a naive model: linear arrays, the
 * formulas in double precision.  A push is judged from the rows as they were
 * before it, so errors do not add up and bounds stay tight. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/optim/optim_model.h"
#include "tests/table/help.h"

/* A pull holds the locks of all stripes; ThreadSanitizer follows 64. */
enum { STRIPES_LOG = SANITIZED ? 6 : 9 };
enum { UNIVERSE = 150, DIM_MAX = 64, PART_MAX = 900, PARTS = 3 };

typedef struct model_row {
    int live;
    uint32_t clock;
    float vector[DIM_MAX], state[2 * DIM_MAX];
} model_row;

typedef struct world {
    table_config config;
    unsigned threads;
    sched *s;
    table *t;
    uint32_t state_floats;
    uint64_t pushes, rows, created, refused, nonfinite, pulled, missed;
    uint64_t ids[UNIVERSE];
    model_row row[UNIVERSE];
    float init[UNIVERSE][DIM_MAX];
    rng r;
    uint32_t hint[UNIVERSE]; /* of some earlier pull */
    uint64_t adam_step;
} world;

static uint64_t any_id(size_t i, rng *r)
{
    switch (i % 6) {
    case 0:
        return i / 6;
    case 1:
        return UINT64_MAX - i / 6;
    case 2:
        return (uint64_t)i << 32;
    case 3:
        return (uint64_t)i << 52 | 1;
    case 4: /* all of one bucket and one tag */
        return id_of_hash(0x123456780ABC0000u | i);
    default:
        return rng_next(r);
    }
}

static world *world_make(table_config config, unsigned threads, uint64_t seed)
{
    world *w = calloc(1, sizeof *w);
    table *fresh;

    assert_non_null(w);
    w->config = config;
    w->threads = threads;
    w->r.state = seed << 32;
    w->s = pool_of(threads);
    w->t = table_of(&config);
    w->state_floats = persia_table_state_floats(w->t);
    for (size_t i = 0; i < UNIVERSE; i++) {
        w->ids[i] = any_id(i, &w->r);
        w->hint[i] = ROW_NONE;
    }
    /* initial values: of a table that nothing ever happened to */
    config.missing = MISSING_INIT;
    config.stripes = 1;
    fresh = table_of(&config);
    for (size_t i = 0; i < UNIVERSE; i++)
        pull_one(w->s, fresh, 1, &w->ids[i], w->init[i]);
    persia_table_destroy(fresh);
    return w;
}

static void world_free(world *w)
{
    persia_table_destroy(w->t);
    persia_sched_destroy(w->s);
    free(w);
}

/* Accumulators of squares start at the option, all else at 0. */
static float state_start(const world *w, uint32_t j)
{
    switch (w->config.optimizer) {
    case OPTIM_ADAGRAD:
    case OPTIM_ROWWISE_ADAGRAD:
        return w->config.state_init;
    case OPTIM_FTRL:
        return j < w->config.dim ? 0 : w->config.state_init;
    default:
        return 0;
    }
}

static void row_start(world *w, size_t i)
{
    model_row *row = &w->row[i];

    memset(row, 0, sizeof *row);
    memcpy(row->vector, w->init[i], sizeof row->vector);
    for (uint32_t j = 0; j < w->state_floats; j++)
        row->state[j] = state_start(w, j);
}

/* ---- pull ---- */

static void do_pull(world *w)
{
    enum { N = 700 };
    static uint64_t ids[N];
    static size_t which[N];
    static uint32_t rows[N];
    static float out[N * (DIM_MAX + 3)];
    const uint32_t dim = w->config.dim;
    const size_t n = rng_below(&w->r, N), stride = dim + 3;
    pull_job job = { w->t, n, ids, out, stride, rows };

    for (size_t i = 0; i < n; i++) {
        which[i] = rng_below(&w->r, UNIVERSE);
        ids[i] = w->ids[which[i]];
    }
    assert_int_equal(persia_table_pull(w->s, &job, 1), PERSIA_OK);
    w->pulled += n;
    for (size_t i = 0; i < n; i++) {
        const model_row *row = &w->row[which[i]];
        static const float zeros[DIM_MAX];
        const float *want = row->live ? row->vector
                            : w->config.missing == MISSING_INIT
                                ? w->init[which[i]]
                                : zeros;
        if (memcmp(out + i * stride, want, dim * sizeof *want))
            fail_msg("pull: id %llu is not as it was",
                     (unsigned long long)ids[i]);
        if ((rows[i] == ROW_NONE) == row->live)
            fail_msg("pull: row number of id %llu is %u",
                     (unsigned long long)ids[i], rows[i]);
        w->missed += !row->live;
        if (rng_below(&w->r, 2))
            w->hint[which[i]] = rows[i];
    }
}

/* ---- push ---- */

typedef struct part_data {
    uint64_t ids[PART_MAX];
    uint32_t rows[PART_MAX], bag[PART_MAX];
    float scale[PART_MAX];
    float grad[PART_MAX * (DIM_MAX + 2)];
} part_data;

static uint32_t any_hint(world *w, size_t i)
{
    switch (rng_below(&w->r, 6)) {
    case 0:
        return ROW_NONE;
    case 1:
        return (uint32_t)rng_next(&w->r); /* far out */
    case 2:
        return (uint32_t)rng_below(&w->r, UNIVERSE); /* another's */
    default:
        return w->hint[i]; /* right, or right once */
    }
}

/* A part with its arrays; adds its gradients to sum. */
static push_part any_part(world *w, part_data *d, double *sum, double *size,
                          int *seen, size_t from, size_t range)
{
    const uint32_t dim = w->config.dim;
    const size_t n = rng_below(&w->r, 4) ? rng_below(&w->r, 60)
                                         : rng_below(&w->r, PART_MAX);
    const int bagged = (int)rng_below(&w->r, 2);
    const size_t bags = bagged ? 1 + rng_below(&w->r, 40) : n;
    const int scaled = (int)rng_below(&w->r, 2);
    const size_t stride = dim + rng_below(&w->r, 3);
    push_part part = { .n = n,
                       .ids = d->ids,
                       .rows = rng_below(&w->r, 3) ? d->rows : NULL,
                       .bag = bagged ? d->bag : NULL,
                       .scale = scaled ? d->scale : NULL,
                       .grad = d->grad,
                       .stride = stride,
                       .bags = bags };

    for (size_t i = 0; i < bags * stride; i++)
        d->grad[i] = rng_float(&w->r);
    for (size_t i = 0; i < n; i++) {
        size_t id = from + rng_below(&w->r, range);
        size_t bag = bagged ? rng_below(&w->r, bags) : i;
        float scale = rng_float(&w->r);
        d->ids[i] = w->ids[id];
        d->rows[i] = any_hint(w, id);
        d->bag[i] = (uint32_t)bag;
        d->scale[i] = scale;
        for (uint32_t j = 0; j < dim; j++) {
            double g = (double)d->grad[bag * stride + j] *
                       (scaled ? (double)scale : 1);
            sum[id * DIM_MAX + j] += g;
            size[id * DIM_MAX + j] += fabs(g);
        }
        seen[id] = 1;
    }
    return part;
}

static optim_args any_args(world *w)
{
    optim_args a = args_of(w->config.optimizer);

    a.lr = 0.05f * (float)(1 + rng_below(&w->r, 4));
    a.eps = 0.01f;
    a.momentum = w->config.momentum && rng_below(&w->r, 3) ? 0.8f : 0;
    a.step = ++w->adam_step;
    if (rng_below(&w->r, 3) == 0) {
        a.weight_decay = 0.1f;
        a.grad_scale = 0.5f;
        a.max_grad_norm = rng_below(&w->r, 2) ? 1.5f : 0;
        a.max_norm = rng_below(&w->r, 2) ? 1 : 0;
        a.weight_bound = rng_below(&w->r, 2) ? 0.3f : 0;
    }
    return a;
}

/* One row after a push, against a step of the model. */
static void check_row(world *w, size_t i, const optim_args *a,
                      const double *sum, const double *size,
                      const float *vector, const float *state)
{
    const uint32_t dim = w->config.dim;
    const model_row *was = &w->row[i];
    double v[DIM_MAX], s[2 * DIM_MAX], g[DIM_MAX], scale = 0.3;
    double most = 0;

    for (uint32_t j = 0; j < dim; j++) {
        v[j] = (double)was->vector[j];
        g[j] = sum[j];
        scale = fmax(scale, size[j]);
    }
    for (uint32_t j = 0; j < w->state_floats; j++)
        s[j] = (double)was->state[j];
    model_step(a, (int)w->config.momentum, dim, v, s, g);
    for (uint32_t j = 0; j < dim; j++)
        most = fmax(most, fabs(v[j]));
    for (uint32_t j = 0; j < dim; j++) {
        double got = (double)vector[j];
        double slack = w->config.dtype == VECTOR_BF16
                           ? ldexp(fmax(fabs(v[j]), 1e-3), -7)
                       : w->config.dtype == VECTOR_INT8 ? most / 126
                                                        : 0;
        /* sums of opposite gradients: small sums, large rounding */
        if (fabs(got - v[j]) > slack + 2e-5 * (fabs(v[j]) + scale))
            fail_msg("push %llu: id %llu, column %u is %.9g, not %.9g",
                     (unsigned long long)w->pushes,
                     (unsigned long long)w->ids[i], j, got, v[j]);
    }
    for (uint32_t j = 0; j < w->state_floats; j++)
        if (fabs((double)state[j] - s[j]) >
            2e-5 * (fabs(s[j]) + scale * scale))
            fail_msg("push %llu: id %llu, state %u is %.9g, not %.9g",
                     (unsigned long long)w->pushes,
                     (unsigned long long)w->ids[i], j, (double)state[j],
                     s[j]);
}

/* Compares all rows with the model; takes over those that a push touched. */
static void check_all(world *w, const optim_args *a, const double *sum,
                      const double *size, const int *seen)
{
    static float vector[UNIVERSE * DIM_MAX], state[UNIVERSE * 2 * DIM_MAX];
    static uint8_t found[UNIVERSE];
    const uint32_t dim = w->config.dim;

    assert_int_equal(
        persia_table_get(w->t, UNIVERSE, w->ids, vector, state, found),
        PERSIA_OK);
    for (size_t i = 0; i < UNIVERSE; i++) {
        model_row *row = &w->row[i];
        const float *v = vector + i * dim, *s = state + i * w->state_floats;
        if (seen && seen[i] && found[i]) {
            if (!row->live) {
                row_start(w, i);
                w->created++;
                w->rows++;
            }
            check_row(w, i, a, sum + i * DIM_MAX, size + i * DIM_MAX, v, s);
            row->live = 1;
            row->clock = (uint32_t)w->pushes;
            memcpy(row->vector, v, dim * sizeof *v);
            memcpy(row->state, s, w->state_floats * sizeof *s);
            continue;
        }
        if (seen && seen[i]) {
            assert_true(w->config.admission < 1 && !row->live);
            w->refused++;
        }
        if (found[i] != row->live)
            fail_msg("id %llu: found is %d", (unsigned long long)w->ids[i],
                     found[i]);
        if (memcmp(v, row->live ? row->vector : w->init[i], dim * sizeof *v))
            fail_msg("id %llu changed", (unsigned long long)w->ids[i]);
        if (row->live && memcmp(s, row->state, w->state_floats * sizeof *s))
            fail_msg("id %llu: its state changed",
                     (unsigned long long)w->ids[i]);
    }
}

static void do_push(world *w)
{
    static part_data data[PARTS];
    static double sum[UNIVERSE * DIM_MAX], size[UNIVERSE * DIM_MAX];
    static int seen[UNIVERSE];
    const size_t from = rng_below(&w->r, UNIVERSE / 2);
    const size_t range = 1 + rng_below(&w->r, UNIVERSE - from);
    const uint64_t created = w->created, refused = w->refused;
    optim_args a = any_args(w);
    push_part parts[PARTS];
    push_job job = { .t = w->t,
                     .parts = parts,
                     .parts_n = rng_below(&w->r, PARTS + 1),
                     .optim = &a,
                     .draw = rng_next(&w->r) };
    uint64_t touched = 0;

    memset(sum, 0, sizeof sum);
    memset(size, 0, sizeof size);
    memset(seen, 0, sizeof seen);
    for (size_t k = 0; k < job.parts_n; k++)
        parts[k] = any_part(w, &data[k], sum, size, seen, from, range);
    if (persia_table_push(w->s, &job, 1))
        fail_msg("%s", persia_err_text());
    w->pushes++;
    check_all(w, &a, sum, size, seen);
    for (size_t i = 0; i < UNIVERSE; i++)
        touched += seen[i] && w->row[i].live;
    assert_int_equal(job.touched, touched);
    assert_int_equal(job.created, w->created - created);
    assert_int_equal(job.refused, w->refused - refused);
    assert_int_equal(job.evicted, 0);
    assert_int_equal(job.nonfinite, 0);
}

/* ---- the rest ---- */

static void do_set(world *w)
{
    static float vector[40 * DIM_MAX], state[40 * 2 * DIM_MAX];
    const uint32_t dim = w->config.dim;
    const size_t n = rng_below(&w->r, 40);
    const int stateless = (int)rng_below(&w->r, 2);
    uint64_t ids[40];

    for (size_t k = 0; k < n; k++) {
        size_t i = rng_below(&w->r, UNIVERSE);
        model_row *row = &w->row[i];
        ids[k] = w->ids[i];
        if (!row->live) {
            w->created++;
            w->rows++;
        }
        row_start(w, i);
        row->live = 1;
        row->clock = w->pushes ? (uint32_t)w->pushes : UINT32_MAX;
        kept_vector(&w->r, w->config.dtype, dim, row->vector);
        memcpy(vector + k * dim, row->vector, dim * sizeof *vector);
        for (uint32_t j = 0; j < w->state_floats; j++) {
            state[k * w->state_floats + j] = rng_float(&w->r) + 1;
            if (!stateless)
                row->state[j] = state[k * w->state_floats + j];
        }
    }
    if (persia_table_set(w->t, n, ids, vector, stateless ? NULL : state))
        fail_msg("%s", persia_err_text());
    check_all(w, NULL, NULL, NULL, NULL);
}

static void do_erase(world *w)
{
    uint64_t ids[40], erased, live = 0;
    const size_t n = rng_below(&w->r, 40);

    for (size_t k = 0; k < n; k++) {
        size_t i = rng_below(&w->r, UNIVERSE);
        ids[k] = w->ids[i];
        live += (uint64_t)w->row[i].live;
        w->row[i].live = 0;
    }
    assert_int_equal(persia_table_erase(w->t, n, ids, &erased), PERSIA_OK);
    assert_int_equal(erased, live);
    w->rows -= live;
    check_all(w, NULL, NULL, NULL, NULL);
}

static void do_clear(world *w)
{
    assert_int_equal(persia_table_clear(w->t), PERSIA_OK);
    for (size_t i = 0; i < UNIVERSE; i++)
        w->row[i].live = 0;
    w->rows = 0;
    check_all(w, NULL, NULL, NULL, NULL);
}

/* Into another table of other stripes, which takes its place. */
static void do_restore(world *w)
{
    dump d = dump_table(w->t), e;
    table_config config = w->config;
    const table_stats was = stats_of(w->t);
    table *to;

    for (size_t i = 0; i < d.n; i++) {
        size_t k = 0;
        while (w->ids[k] != d.ids[i])
            k++;
        assert_int_equal(d.clocks[i], w->row[k].clock);
    }
    assert_int_equal(d.n, w->rows);
    assert_int_equal(d.clock, w->pushes);
    config.stripes = 1u << rng_below(&w->r, STRIPES_LOG);
    to = table_of(&config);
    if (persia_table_restore(to, d.n, d.ids, d.vectors, d.state, d.clocks,
                             d.fields))
        fail_msg("%s", persia_err_text());
    persia_table_set_clock(to, d.clock);
    e = dump_table(to);
    dump_equal(&d, &e, "restored");
    dump_free(&d);
    dump_free(&e);
    assert_int_equal(was.created, w->created);
    assert_int_equal(was.refused, w->refused);
    assert_int_equal(was.pulled, w->pulled);
    assert_int_equal(was.missed, w->missed);
    w->created = w->rows;
    w->refused = w->pulled = w->missed = 0;
    persia_table_destroy(w->t);
    w->t = to;
    check_all(w, NULL, NULL, NULL, NULL);
}

static void schedule(table_config config, unsigned threads, unsigned steps,
                     uint64_t seed)
{
    world *w = world_make(config, threads, seed);

    for (unsigned i = 0; i < steps; i++) {
        unsigned what = (unsigned)rng_below(&w->r, 32);
        if (what < 14)
            do_push(w);
        else if (what < 24)
            do_pull(w);
        else if (what < 28)
            do_set(w);
        else if (what < 29)
            do_erase(w);
        else if (what < 30)
            do_restore(w);
        else if (what == 30)
            do_clear(w);
        assert_int_equal(stats_of(w->t).rows, w->rows);
        assert_int_equal(stats_of(w->t).pushes, w->pushes);
    }
    do_restore(w);
    world_free(w);
}

static void test_schedules(void **state)
{
    static const uint32_t dims[] = { 1, 3, 8, 16, 17, 64 };
    static const uint32_t stripes[] = {
        0, 1, 4, 16, 32, 1u << (STRIPES_LOG - 1)
    };
    uint64_t seed = getenv("PERSIA_SEED")
                        ? strtoull(getenv("PERSIA_SEED"), NULL, 10)
                        : 1;
    const unsigned rounds = getenv("PERSIA_LONG") ? 20 : 1;
    (void)state;
    for (unsigned round = 0; round < rounds; round++)
        for (uint32_t kind = 0; kind < OPTIM_KINDS; kind++)
            for (uint32_t dtype = 0; dtype < VECTOR_DTYPES; dtype++)
                for (uint32_t i = 0; i < 6; i++, seed++) {
                    table_config c = config_of(dims[i], kind);
                    c.dtype = dtype;
                    c.momentum = kind == OPTIM_SGD && seed % 2;
                    c.missing = seed / 2 % 2;
                    c.stripes = stripes[seed % 6];
                    c.init = (uint32_t)(seed / 3 % 3);
                    c.init_a = -0.3f;
                    c.init_b = 0.4f;
                    c.state_init = seed % 5 ? 0 : 0.1f;
                    c.admission = seed % 4 ? 1 : 0.6f;
                    schedule(c, 1u << seed % 3, SANITIZED ? 40 : 200, seed);
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schedules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
