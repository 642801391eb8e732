/* steps.c: whole steps of an embedded store: three features of two tables,
 * forward and backward.  The only file here that knows more than tables. */
#include "tests/counted/counted.h"

#include "batch/batch.h"
#include "client/client.h"

#include <stdio.h>

enum { KEYS = 3, SAMPLES = 1024, EACH = 2, N = KEYS * SAMPLES * EACH,
       DIM = 16, VOCABULARY = 20000, WIDTH = KEYS * DIM };

typedef struct steps {
    tables *p;
    ps_client *c;
    batcher *w;
    uint32_t plan;
    id_batch batch;
    int64_t values[N], offsets[KEYS * SAMPLES + 1];
    uint32_t rows[N];
    struct batch_index *index; /* from a forward to its backward */
    float out[SAMPLES * WIDTH];
} steps;

COUNTED int counted_step_forward(steps *s);
COUNTED int counted_step_forward(steps *s)
{
    return persia_batcher_forward(s->w, s->plan, &s->batch, 0, s->out, WIDTH,
                                  s->rows, &s->index);
}

COUNTED int counted_step_backward(steps *s);
COUNTED int counted_step_backward(steps *s)
{
    const optim_args adam = {.kind = OPTIM_ADAM, .lr = 0.01f, .eps = 1e-8f,
                             .beta1 = 0.9f, .beta2 = 0.999f, .step = 1,
                             .grad_scale = 1};
    const optim_args optim[2] = {adam, adam};
    const batcher_grad grad = {.plan = s->plan, .batch = s->batch,
                               .rows = s->rows, .index = s->index,
                               .grad = s->out, .stride = WIDTH};
    batcher_counts counts;
    int rc = persia_batcher_backward(s->w, &grad, 1, NULL, optim, 2, &counts);

    if (s->index)
        persia_batch_index_put(s->index);
    return rc;
}

static void steps_open(steps *s)
{
    const tables_config config = {.threads = 1};
    plan_feature features[KEYS];

    check_ok(persia_tables_create(&config, &s->p));
    check_ok(persia_client_embedded(s->p, &s->c));
    for (int i = 0; i < 2; i++) {
        table_config t;
        uint32_t no;
        int created;
        persia_table_config_init(&t);
        snprintf(t.name, sizeof t.name, "%c", 'a' + i);
        t.dim = DIM;
        t.optimizer = OPTIM_ADAM;
        check_ok(persia_client_declare(s->c, &t, &no, &created));
    }
    check_ok(persia_batcher_create(s->c, &s->w));
    for (uint32_t k = 0; k < KEYS; k++) {
        features[k] = (plan_feature){.key = k, .table = k / 2, .trainable = 1};
        snprintf(features[k].name, sizeof features[k].name, "f%u", k);
    }
    check_ok(
        persia_batcher_plan(s->w, PLAN_BAGS, KEYS, features, KEYS, &s->plan));
}

static void steps_close(steps *s)
{
    persia_batcher_destroy(s->w);
    persia_client_destroy(s->c);
    persia_tables_destroy(s->p);
}

void steps_all(void)
{
    static steps s;

    some_ids((uint64_t *)s.values, N, VOCABULARY);
    for (int64_t i = 0; i <= KEYS * SAMPLES; i++)
        s.offsets[i] = i * EACH;
    s.batch = (id_batch){.n = N, .bags = SAMPLES, .values = s.values,
                         .offsets = s.offsets};
    steps_open(&s);
    for (int i = 0; i < 3; i++) { /* new rows, then known ones */
        check_ok(counted_step_forward(&s));
        check_ok(counted_step_backward(&s));
    }
    steps_close(&s);
}
