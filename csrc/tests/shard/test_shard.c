/* ps: declarations, contradictions, updates, the memory limit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "client/client.h"

static table_config config_of(const char *name)
{
    table_config c;
    persia_table_config_init(&c);
    snprintf(c.name, sizeof c.name, "%s", name);
    c.dim = 4;
    return c;
}

static tables *make(uint64_t limit)
{
    tables_config config = {.threads = 2, .memory_limit = limit};
    tables *p;
    assert_int_equal(persia_tables_create(&config, &p), PERSIA_OK);
    return p;
}

static void same_name_is_the_same_table(void **state)
{
    (void)state;
    tables *p = make(0);
    table_config a = config_of("a"), b = config_of("b");
    uint32_t no;
    int created;
    assert_int_equal(persia_tables_declare(p, &a, &no, &created), PERSIA_OK);
    assert_int_equal(no, 0);
    assert_true(created);
    assert_int_equal(persia_tables_declare(p, &b, &no, &created), PERSIA_OK);
    assert_int_equal(no, 1);
    assert_int_equal(persia_tables_declare(p, &a, &no, &created), PERSIA_OK);
    assert_int_equal(no, 0);
    assert_false(created);
    assert_int_equal(persia_tables_tables(p), 2);
    assert_string_equal(
        persia_table_get_config(persia_tables_table(p, 1))->name, "b");
    assert_null(persia_tables_table(p, 2));
    persia_tables_destroy(p);
}

static void contradictions_name_the_field(void **state)
{
    (void)state;
    tables *p = make(0);
    table_config first = config_of("a");
    uint32_t no;
    int created;
    assert_int_equal(persia_tables_declare(p, &first, &no, &created),
                     PERSIA_OK);
    for (int i = 0; i < 7; i++) {
        table_config c = first;
        const char *field = NULL;
        switch (i) {
        case 0: c.dim = 8; field = "embedding_dim"; break;
        case 1: c.dtype = VECTOR_BF16; field = "data_type"; break;
        case 2: c.optimizer = OPTIM_ADAM; field = "optimizer"; break;
        case 3: c.init_b = 3; field = "init"; break;
        case 4: c.capacity = 5; field = "capacity"; break;
        case 5: c.seed = 5; field = "seed"; break;
        case 6: c.admission = 0.5f; field = "admission"; break;
        }
        assert_int_equal(persia_tables_declare(p, &c, &no, &created),
                         PERSIA_EMISMATCH);
        assert_non_null(strstr(persia_err_text(), field));
        assert_non_null(strstr(persia_err_text(), "table a"));
    }
    assert_int_equal(persia_tables_tables(p), 1);
    persia_tables_destroy(p);
}

static int push_one(tables *p, uint64_t first, size_t n)
{
    static uint64_t ids[4096];
    static float grad[4096 * 4];
    for (size_t i = 0; i < n; i++)
        ids[i] = first + i;
    push_part part = {.n = n, .ids = ids, .grad = grad, .stride = 4,
                      .bags = n};
    optim_args optim = {.kind = OPTIM_ADAGRAD,
                        .lr = 1,
                        .eps = 1e-8f,
                        .grad_scale = 1,
                        .step = persia_tables_updates(p) + 1};
    push_job job = {.t = persia_tables_table(p, 0),
                    .parts = &part,
                    .parts_n = 1,
                    .optim = &optim};
    return persia_tables_push_noted(p, &job, 1, NULL);
}

static void updates_count_pushes_that_succeed(void **state)
{
    (void)state;
    tables *p = make(40 << 20);
    table_config c = config_of("a");
    uint32_t no;
    int created, rc = PERSIA_OK;
    assert_int_equal(persia_tables_declare(p, &c, &no, &created), PERSIA_OK);
    uint64_t pushes = 0;
    while (pushes < 1000 && !(rc = push_one(p, pushes * 4096, 4096)))
        pushes++;
    assert_int_equal(rc, PERSIA_ELIMIT);
    assert_int_equal(persia_tables_updates(p), pushes);
    assert_true(persia_tables_limit(p)->used <=
                persia_tables_limit(p)->maximum);
    table_stats stats;
    persia_table_get_stats(persia_tables_table(p, 0), &stats);
    assert_int_equal(stats.rows, pushes * 4096);
    persia_tables_set_updates(p, 7);
    assert_int_equal(push_one(p, 0, 8), PERSIA_OK);
    assert_int_equal(persia_tables_updates(p), 8);
    persia_tables_destroy(p);
}

/* A note counts the pushes of row 5; each adds 1 to it. */
typedef struct noted {
    tables *p;
    int refuse, refuse_ready, before, ready, after, code;
    table_cut *cut;
    int after_at_cut;
} noted;

static int note_before(void *ctx)
{
    noted *n = ctx;
    n->before++;
    return n->refuse ? persia_err_set(PERSIA_ESTALE, "no") : PERSIA_OK;
}

static int note_ready(void *ctx)
{
    noted *n = ctx;
    n->ready++;
    return n->refuse_ready ? persia_err_set(PERSIA_EIO, "no") : PERSIA_OK;
}

static void note_after(void *ctx, int rc)
{
    noted *n = ctx;
    n->after++;
    n->code = rc;
}

static int push_noted(noted *n, float gradient)
{
    const uint64_t id = 5;
    const float grad[4] = {gradient, -1, -1, -1};
    push_part part = {.n = 1, .ids = &id, .grad = grad, .stride = 4,
                      .bags = 1};
    optim_args optim = {.kind = OPTIM_SGD, .lr = 1, .grad_scale = 1};
    push_job job = {.t = persia_tables_table(n->p, 0),
                    .parts = &part,
                    .parts_n = 1,
                    .optim = &optim};
    tables_note note = {.before = note_before, .ready = note_ready,
                        .after = note_after, .ctx = n};
    int rc = persia_tables_push_noted(n->p, &job, 1, &note);
    assert_true(rc == PERSIA_OK ? job.touched == 1 : job.touched == 0);
    return rc;
}

static void a_note_belongs_to_its_update(void **state)
{
    (void)state;
    noted n = {.p = make(0)};
    table_config c = config_of("a");
    uint32_t no;
    int created;
    c.optimizer = OPTIM_SGD;
    assert_int_equal(persia_tables_declare(n.p, &c, &no, &created), PERSIA_OK);
    assert_int_equal(push_noted(&n, 1), PERSIA_OK);
    assert_int_equal(n.before, 1);
    assert_int_equal(n.after, 1);
    assert_int_equal(n.code, PERSIA_OK);
    assert_int_equal(push_noted(&n, (float)NAN), PERSIA_ENONFINITE);
    assert_int_equal(n.before, 2);
    assert_int_equal(n.ready, 1); /* it was refused before */
    assert_int_equal(n.after, 1);
    n.refuse = 1;
    assert_int_equal(push_noted(&n, 1), PERSIA_ESTALE);
    assert_int_equal(n.ready, 1);
    assert_int_equal(n.after, 1);
    n.refuse = 0;
    n.refuse_ready = 1;
    float had[4], has[4];
    const uint64_t id = 5;
    uint8_t found;
    table *t = persia_tables_table(n.p, 0);
    assert_int_equal(persia_table_get(t, 1, &id, had, NULL, &found), 0);
    assert_int_equal(push_noted(&n, 1), PERSIA_EIO);
    assert_int_equal(persia_table_get(t, 1, &id, has, NULL, &found), 0);
    assert_memory_equal(had, has, sizeof had);
    n.refuse_ready = 0;
    assert_int_equal(n.ready, 2);
    assert_int_equal(n.after, 1);
    assert_int_equal(persia_tables_updates(n.p), 1);
    /* an update without any table */
    tables_note note = {.before = note_before, .ready = note_ready,
                        .after = note_after, .ctx = &n};
    n.refuse = 0;
    assert_int_equal(persia_tables_push_noted(n.p, NULL, 0, &note), PERSIA_OK);
    assert_int_equal(n.after, 2);
    assert_int_equal(persia_tables_updates(n.p), 2);
    persia_tables_destroy(n.p);
}

static void *push_many(void *arg)
{
    for (int i = 0; i < 2000; i++)
        if (push_noted(arg, -1))
            return arg;
    return NULL;
}

static int cut_now(void *ctx)
{
    noted *n = ctx;
    table *t = persia_tables_table(n->p, 0);
    n->after_at_cut = n->after;
    return persia_table_cut_begin(&t, 1, &n->cut);
}

/* One thread pushes; cuts find as many gradients in the row as notes. */
static void between_two_updates(void **state)
{
    (void)state;
    noted n = {.p = make(0)};
    table_config c = config_of("a");
    uint32_t no;
    int created;
    c.optimizer = OPTIM_SGD;
    c.init = INIT_CONSTANT;
    pthread_t thread;
    assert_int_equal(persia_tables_declare(n.p, &c, &no, &created), PERSIA_OK);
    assert_int_equal(push_noted(&n, -1), PERSIA_OK);
    assert_int_equal(pthread_create(&thread, NULL, push_many, &n), 0);
    for (int i = 0; i < 50; i++) {
        uint64_t id;
        float vector[4], none[1];
        uint32_t clock;
        size_t rows;
        assert_int_equal(persia_tables_between(n.p, cut_now, &n), PERSIA_OK);
        assert_int_equal(
            persia_table_cut_next(n.cut, 1, &id, vector, none, &clock, NULL,
                                  &rows),
            PERSIA_OK);
        assert_int_equal(rows, 1);
        assert_int_equal((int)(vector[0] + 0.5f), n.after_at_cut);
        persia_table_cut_end(n.cut);
    }
    void *failed;
    pthread_join(thread, &failed);
    assert_null(failed);
    persia_tables_destroy(n.p);
}

static void *declare_all(void *arg)
{
    tables *p = arg;
    for (int i = 0; i < 64; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        table_config c = config_of(name);
        uint32_t no;
        int created;
        if (persia_tables_declare(p, &c, &no, &created) ||
            strcmp(persia_table_get_config(persia_tables_table(p, no))->name,
                   name) != 0)
            return arg;
    }
    return NULL;
}

static void threads_declare_at_once(void **state)
{
    (void)state;
    tables *p = make(0);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, declare_all, p),
                         0);
    for (int i = 0; i < 4; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    assert_int_equal(persia_tables_tables(p), 64);
    persia_tables_destroy(p);
}

static void bad_threads(void **state)
{
    (void)state;
    tables_config config = {.threads = 0};
    tables *p;
    assert_int_equal(persia_tables_create(&config, &p), PERSIA_EARG);
    assert_null(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_name_is_the_same_table),
        cmocka_unit_test(contradictions_name_the_field),
        cmocka_unit_test(updates_count_pushes_that_succeed),
        cmocka_unit_test(a_note_belongs_to_its_update),
        cmocka_unit_test(between_two_updates),
        cmocka_unit_test(threads_declare_at_once),
        cmocka_unit_test(bad_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
