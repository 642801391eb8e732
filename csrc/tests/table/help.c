#include "tests/table/help.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t rng_next(rng *r)
{
    const uint32_t counter[4] = { (uint32_t)r->state,
                                  (uint32_t)(r->state >> 32), 3, 3 };
    const uint32_t key[2] = { 4, 5 };
    uint32_t out[4];

    r->state++;
    philox4x32(counter, key, out);
    return ((uint64_t)out[1] << 32) | out[0];
}

uint64_t rng_below(rng *r, uint64_t n)
{
    return rng_next(r) % n;
}

float rng_float(rng *r)
{
    return (float)(int32_t)(uint32_t)rng_next(r) * 0x1p-31f;
}

static uint64_t unshift(uint64_t x, int by)
{
    uint64_t y = x;

    for (int done = by; done < 64; done += by)
        y = x ^ (y >> by);
    return y;
}

static uint64_t inverse(uint64_t odd)
{
    uint64_t x = odd;

    for (int i = 0; i < 6; i++)
        x *= 2 - odd * x;
    return x;
}

uint64_t id_of_hash(uint64_t hash)
{
    hash = unshift(hash, 31) * inverse(0x94D049BB133111EBu);
    hash = unshift(hash, 27) * inverse(0xBF58476D1CE4E5B9u);
    return unshift(hash, 30) - 0x9E3779B97F4A7C15u;
}

table_config config_of(uint32_t dim, uint32_t optimizer)
{
    table_config c;

    persia_table_config_init(&c);
    snprintf(c.name, sizeof c.name, "test");
    c.seed = 17;
    c.hash_key = persia_ids_key(); /* of all tables made with it */
    c.dim = dim;
    c.optimizer = optimizer;
    return c;
}

table *table_of(const table_config *config)
{
    table *t;

    if (persia_table_create(config, &t))
        fail_msg("%s", persia_err_text());
    return t;
}

sched *pool_of(unsigned threads)
{
    sched *s;

    if (persia_sched_create(threads, &s))
        fail_msg("%s", persia_err_text());
    return s;
}

void kept_vector(rng *r, uint32_t dtype, uint32_t dim, float *out)
{
    for (uint32_t j = 0; j < dim; j++) {
        const float x = rng_float(r);
        out[j] = dtype == VECTOR_INT8 ? (float)(int)(x * 127) * 0x1p-7f
                                      : bf16_widen(bf16_nearest(x));
    }
    if (dtype == VECTOR_INT8)
        out[rng_below(r, dim)] = 127 * 0x1p-7f;
}

optim_args args_of(uint32_t kind)
{
    return (optim_args){ .kind = kind,
                         .lr = 0.1f,
                         .eps = 1e-6f,
                         .beta1 = 0.9f,
                         .beta2 = 0.99f,
                         .beta = 0.5f,
                         .l1 = 0.01f,
                         .step = 1,
                         .grad_scale = 1 };
}

int push_try(sched *s, table *t, const optim_args *args, size_t n,
             const uint64_t *ids, const float *grad, uint64_t draw,
             push_job *out)
{
    const push_part part = {.n = n,
                            .ids = ids,
                            .grad = grad,
                            .stride = persia_table_get_config(t)->dim,
                            .bags = n};
    push_job job = {
        .t = t, .parts = &part, .parts_n = 1, .optim = args, .draw = draw
    };
    int rc = persia_table_push(s, &job, 1);

    job.parts = NULL;
    *out = job;
    return rc;
}

push_job push_one(sched *s, table *t, const optim_args *args, size_t n,
                  const uint64_t *ids, const float *grad, uint64_t draw)
{
    push_job job;

    if (push_try(s, t, args, n, ids, grad, draw, &job))
        fail_msg("%s", persia_err_text());
    return job;
}

void pull_one(sched *s, table *t, size_t n, const uint64_t *ids, float *out)
{
    pull_job job = {.t = t,
                    .n = n,
                    .ids = ids,
                    .out = out,
                    .stride = persia_table_get_config(t)->dim};

    if (persia_table_pull(s, &job, 1))
        fail_msg("%s", persia_err_text());
}

table_stats stats_of(const table *t)
{
    table_stats stats;

    persia_table_get_stats(t, &stats);
    return stats;
}

int has_row(table *t, uint64_t id)
{
    static float vector[4096];
    uint8_t found;

    if (persia_table_get(t, 1, &id, vector, NULL, &found))
        fail_msg("%s", persia_err_text());
    return found;
}

/* ---- dumps ---- */

static void dump_grow(dump *d, size_t room)
{
    d->room = room;
    d->ids = realloc(d->ids, room * sizeof *d->ids);
    d->vectors = realloc(d->vectors, room * d->vector_bytes);
    d->state = realloc(d->state, room * d->state_floats * sizeof(float) + 1);
    d->clocks = realloc(d->clocks, room * sizeof *d->clocks);
    d->fields = realloc(d->fields, room * sizeof *d->fields);
    if (!d->ids || !d->vectors || !d->state || !d->clocks || !d->fields)
        fail_msg("no memory for a dump");
}

typedef struct numbered {
    uint64_t id;
    size_t at;
} numbered;

static int by_id(const void *a, const void *b)
{
    uint64_t x = ((const numbered *)a)->id, y = ((const numbered *)b)->id;

    return x < y ? -1 : x > y;
}

static void dump_sort(dump *d)
{
    numbered *order = malloc((d->n + 1) * sizeof *order);
    const size_t state_bytes = d->state_floats * sizeof(float);
    dump to = *d;

    if (!order)
        fail_msg("no memory for a dump");
    to.ids = NULL;
    to.vectors = NULL;
    to.state = NULL;
    to.clocks = to.fields = NULL;
    dump_grow(&to, d->n + 1);
    for (size_t i = 0; i < d->n; i++)
        order[i] = (numbered){ d->ids[i], i };
    qsort(order, d->n, sizeof *order, by_id);
    for (size_t i = 0; i < d->n; i++) {
        size_t from = order[i].at;
        if (i && order[i].id == order[i - 1].id)
            fail_msg("id %llu comes twice in a cut",
                     (unsigned long long)order[i].id);
        to.ids[i] = order[i].id;
        to.clocks[i] = d->clocks[from];
        to.fields[i] = d->fields[from];
        memcpy(to.vectors + i * d->vector_bytes,
               d->vectors + from * d->vector_bytes, d->vector_bytes);
        memcpy(to.state + i * d->state_floats,
               d->state + from * d->state_floats, state_bytes);
    }
    free(order);
    dump_free(d);
    *d = to;
}

dump dump_cut(table *t, table_cut *cut, size_t room)
{
    const table_config *c = persia_table_get_config(t);
    dump d = {.dim = c->dim,
              .state_floats = persia_table_state_floats(t),
              .vector_bytes = vector_size(c->dtype, c->dim),
              .clock = persia_table_cut_clock(cut)};
    const uint64_t rows = persia_table_cut_rows(cut);
    size_t n = 1;

    dump_grow(&d, room);
    while (n) {
        if (d.n + room > d.room)
            dump_grow(&d, 2 * d.room + room);
        memset(d.fields + d.n, 0, room * sizeof *d.fields);
        if (persia_table_cut_next(
                cut, room, d.ids + d.n, d.vectors + d.n * d.vector_bytes,
                d.state + d.n * d.state_floats, d.clocks + d.n,
                d.fields + d.n, &n))
            fail_msg("%s", persia_err_text());
        if (n > room)
            fail_msg("a cut gives %zu rows where %zu fit", n, room);
        d.n += n;
    }
    persia_table_cut_end(cut);
    if (d.n != rows)
        fail_msg("a cut announces %llu rows and gives %zu",
                 (unsigned long long)rows, d.n);
    dump_sort(&d);
    return d;
}

dump dump_table(table *t)
{
    table_cut *cut;

    if (persia_table_cut_begin(&t, 1, &cut))
        fail_msg("%s", persia_err_text());
    return dump_cut(t, cut, 5000);
}

void dump_free(dump *d)
{
    free(d->ids);
    free(d->vectors);
    free(d->state);
    free(d->clocks);
    free(d->fields);
    memset(d, 0, sizeof *d);
}

void dump_equal(const dump *a, const dump *b, const char *what)
{
    if (a->n != b->n)
        fail_msg("%s: %zu rows and %zu rows", what, a->n, b->n);
    for (size_t i = 0; i < a->n; i++) {
        if (a->ids[i] != b->ids[i])
            fail_msg("%s: id %llu and id %llu", what,
                     (unsigned long long)a->ids[i],
                     (unsigned long long)b->ids[i]);
        if (memcmp(a->vectors + i * a->vector_bytes,
                   b->vectors + i * b->vector_bytes, a->vector_bytes))
            fail_msg("%s: vectors of id %llu differ", what,
                     (unsigned long long)a->ids[i]);
        if (memcmp(a->state + i * a->state_floats,
                   b->state + i * b->state_floats,
                   a->state_floats * sizeof(float)))
            fail_msg("%s: states of id %llu differ", what,
                     (unsigned long long)a->ids[i]);
        if (a->fields[i] != b->fields[i])
            fail_msg("%s: fields of id %llu are %x and %x", what,
                     (unsigned long long)a->ids[i], a->fields[i],
                     b->fields[i]);
        if (a->clocks[i] != b->clocks[i])
            fail_msg("%s: clocks of id %llu are %u and %u", what,
                     (unsigned long long)a->ids[i], a->clocks[i],
                     b->clocks[i]);
    }
}

void ids_fill(uint64_t *ids, uint64_t from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ids[i] = from + i;
}

picture picture_of(table *t)
{
    picture p = { .stats = stats_of(t) };

    p.rows = dump_table(t);
    return p;
}

void unchanged(table *t, picture *p)
{
    picture now = picture_of(t);

    dump_equal(&p->rows, &now.rows, "a refused push");
    assert_memory_equal(&p->stats, &now.stats, sizeof p->stats);
    dump_free(&p->rows);
    dump_free(&now.rows);
}
