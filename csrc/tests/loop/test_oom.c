/* A store of this process, its worker and row files while memory runs out:
 * each attempt to get some fails in turn.  A call changes all or nothing and
 * can be repeated; under a sanitizer nothing leaks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/ckpt.h"
#include "client/client.h"
#include "ids/ids.h"
#include "loop/loop.h"
#include "pool/pool.h"
#include "tests/fault.h"

enum { KEYS = 2, BAGS = 40, N = 2 * KEYS * BAGS, DIM = 4, WIDTH = 2 * DIM };

static char base[64]; /* a folder */
static int folder;

typedef struct world {
    tables *p;
    ps_client *c;
    loop *s;
    uint64_t handle;
    uint32_t plan;
    int64_t values[N], offsets[KEYS * BAGS + 1];
    float out[BAGS * WIDTH], grad[BAGS * WIDTH];
    uint64_t ids[N];
} world;

static id_batch batch_of(world *w)
{
    for (int i = 0; i < N; i++)
        w->values[i] = i * i % 37;
    for (int i = 0; i <= KEYS * BAGS; i++)
        w->offsets[i] = 2 * i;
    return (id_batch){.n = N, .bags = BAGS, .values = w->values,
                      .offsets = w->offsets};
}

static int declare(world *w, const char *name)
{
    table_config t;
    uint32_t no;
    int created;
    persia_table_config_init(&t);
    snprintf(t.name, sizeof t.name, "%s", name);
    t.dim = DIM;
    t.seed = 3;
    t.state_init = 0.1f;
    return persia_client_declare(w->c, &t, &no, &created);
}

static int plan(world *w, uint32_t *out)
{
    const plan_feature f[] = {
        {.name = "x", .key = 0, .table = 0, .pooling = POOL_SUM,
         .trainable = 1},
        {.name = "y", .key = 1, .table = 1, .pooling = POOL_MEAN,
         .trainable = 1}};
    return persia_loop_plan(w->s, PLAN_BAGS, KEYS, f, 2, out);
}

/* ---- the calls ---------------------------------------------------------- */

static int run_open(world *w)
{
    const tables_config config = {.threads = 1};
    ps_client *c;
    uint64_t handle;
    (void)w;
    int rc = persia_client_create_embedded(&config, &c);
    if (!rc)
        rc = persia_loop_open(c, &handle);
    if (!rc)
        persia_loop_close(handle);
    return rc;
}

static int run_declare(world *w)
{
    return declare(w, "third");
}

static int run_plan(world *w)
{
    uint32_t more;
    return plan(w, &more);
}

static int run_forward(world *w)
{
    const id_batch b = batch_of(w);
    return persia_loop_forward(w->s, 0, w->plan, &b, w->out, WIDTH, NULL);
}

static void release(void *owner)
{
    (void)owner;
}

static int train(world *w)
{
    const id_batch b = batch_of(w);
    uint32_t rows[N];
    const uint64_t ticket = persia_loop_ticket(w->s);
    int finite = 1, rc = persia_loop_forward(w->s, ticket, w->plan, &b,
                                             w->out, WIDTH, rows);
    loop_grad g = {.ticket = ticket,
                   .grad = {.plan = w->plan, .batch = b, .rows = rows,
                            .grad = w->grad, .stride = WIDTH},
                   .release = release};
    const optim_args o = {.kind = OPTIM_ADAGRAD, .lr = 1, .eps = 1,
                          .grad_scale = 1, .step = 1};
    const optim_args optim[3] = {o, o, o};
    batcher_sum *sums = NULL;
    uint8_t all_finite[3] = {1, 1, 1};
    size_t n = 0;
    if (!rc)
        rc = persia_loop_add_grad(w->s, &g);
    if (!rc)
        rc = persia_loop_finite(w->s, all_finite, 3);
    if (!rc)
        rc = persia_loop_sums(w->s, &sums, &n, &finite);
    persia_batcher_sums_free(sums, n);
    if (rc)
        (void)persia_loop_discard(w->s, LOOP_ALL);
    return rc ? rc : persia_loop_apply(w->s, LOOP_ALL, optim, 3);
}

static int run_copied(world *w)
{
    const id_batch b = batch_of(w);
    loop_grad g = {.ticket = persia_loop_ticket(w->s),
                   .grad = {.plan = w->plan, .batch = b, .grad = w->grad,
                            .stride = WIDTH},
                   .release = release};
    const optim_args o = {.kind = OPTIM_ADAGRAD, .lr = 1, .eps = 1,
                          .grad_scale = 1, .step = 1};
    const optim_args optim[3] = {o, o, o};
    int rc = persia_loop_copy_grad(w->s, &g, BAGS * WIDTH, KEYS * BAGS + 1);
    if (rc)
        return rc;
    rc = persia_loop_add_grad(w->s, &g);
    if (rc)
        g.release(g.owner);
    return rc ? rc : persia_loop_apply(w->s, LOOP_MINE, optim, 3);
}

static int run_get(world *w)
{
    float vectors[8 * DIM], state[8 * DIM];
    uint8_t found[8];
    return persia_client_get(w->c, 0, 8, w->ids, vectors, state, found);
}

static int run_set(world *w)
{
    return persia_client_set(w->c, 0, 8, w->ids, w->grad, NULL);
}

static int run_erase(world *w)
{
    uint64_t erased;
    return persia_client_erase(w->c, 1, 8, w->ids, &erased);
}

static int run_list(world *w)
{
    uint64_t cursor = 0, ids[64];
    size_t n;
    return persia_client_list(w->c, 0, 0, &cursor, 64, ids, &n);
}

static int run_clear(world *w)
{
    return persia_client_clear(w->c, 0);
}

static int run_drop(world *w)
{
    return persia_client_drop(w->c, 1);
}

static void remove_files(void)
{
    char command[100];
    snprintf(command, sizeof command, "rm -f %s/*", base);
    assert_int_equal(system(command), 0);
}

/* Rows to files and back, into another table. */
static int run_files(world *w)
{
    table *t = persia_tables_table(w->p, 0), *to = NULL;
    const table_config *config = persia_table_get_config(t);
    table_config other = *config;
    sched *s = persia_tables_sched(w->p);
    ckpt_files files = {0};
    table_cut *cut;
    int rc = persia_table_cut_begin(&t, 1, &cut);
    if (rc)
        return rc;
    rc = persia_ckpt_write(s, cut, config, folder, "rows", 1 << 20, &files);
    persia_table_cut_end(cut);
    if (!rc)
        rc = persia_ckpt_verify(s, config, folder, files.files, files.n,
                                NULL);
    other.limit = NULL;
    if (!rc)
        rc = persia_table_create(&other, &to);
    if (!rc)
        rc = persia_ckpt_restore(s, to, folder, files.files, files.n, 0, 1);
    if (!rc) {
        table_stats a, b;
        persia_table_get_stats(t, &a);
        persia_table_get_stats(to, &b);
        assert_int_equal(a.rows, b.rows);
    }
    persia_table_destroy(to);
    persia_ckpt_files_free(&files);
    return rc;
}

static const struct {
    const char *name;
    int (*run)(world *w);
} kinds[] = {
    {"open", run_open},
    {"declare", run_declare},
    {"plan", run_plan},
    {"forward", run_forward},
    {"train", train},
    {"train with a copied gradient", run_copied},
    {"get", run_get},
    {"set", run_set},
    {"erase", run_erase},
    {"list", run_list},
    {"clear", run_clear},
    {"drop", run_drop},
    {"files", run_files},
};

/* ---- worlds ------------------------------------------------------------- */

static void world_make(world *w)
{
    const tables_config config = {.threads = 1, .memory_limit = 64 << 20};
    memset(w, 0, sizeof *w);
    for (int i = 0; i < BAGS * WIDTH; i++)
        w->grad[i] = (float)(i % 5) - 2;
    for (uint64_t i = 0; i < N; i++)
        w->ids[i] = i * 3;
    assert_int_equal(persia_tables_create(&config, &w->p), PERSIA_OK);
    assert_int_equal(persia_client_embedded(w->p, &w->c), PERSIA_OK);
    assert_int_equal(persia_loop_open(w->c, &w->handle), PERSIA_OK);
    assert_int_equal(persia_loop_get(w->handle, "test", &w->s, NULL),
                     PERSIA_OK);
    assert_int_equal(declare(w, "a"), PERSIA_OK);
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    assert_int_equal(plan(w, &w->plan), PERSIA_OK);
    assert_int_equal(train(w), PERSIA_OK);
    remove_files();
}

static void world_free(world *w)
{
    const mem_limit *limit = persia_tables_limit(w->p);
    assert_true(limit->used == limit->promised);
    assert_int_equal(persia_loop_pending_grads(w->s, LOOP_ALL), 0);
    persia_loop_put(w->s);
    persia_loop_close(w->handle);
    persia_tables_destroy(w->p);
}

/* The rows, and which tables there are, in a number. */
static uint64_t state_of(const world *w)
{
    uint64_t sum = 0;
    for (uint32_t no = 0; no < persia_tables_tables(w->p); no++) {
        table *t = persia_tables_table(w->p, no);
        uint64_t cursor = 0, ids[256];
        size_t n;
        sum += id_hash(no) + (uint64_t)persia_tables_dropped(w->p, no);
        while (cursor != TABLE_LIST_END) {
            float row[2 * DIM];
            assert_int_equal(persia_table_list(t, &cursor, 256, ids, &n),
                             PERSIA_OK);
            for (size_t i = 0; i < n; i++) {
                uint64_t h = id_hash(ids[i] + no);
                assert_int_equal(persia_table_get(t, 1, &ids[i], row,
                                                  row + DIM, NULL),
                                 PERSIA_OK);
                for (int k = 0; k < 2 * DIM; k++) {
                    uint32_t bits;
                    memcpy(&bits, &row[k], sizeof bits);
                    h = id_hash(h + bits);
                }
                sum += h;
            }
        }
    }
    return sum;
}

/* How many attempts were refused. */
static int try_each(size_t i, int good, uint64_t after)
{
    int refused = 0;
    for (unsigned at = 1, done = 0; !done; at++) {
        world w;
        world_make(&w);
        const uint64_t before = state_of(&w);
        fault_begin(at, good);
        int rc = kinds[i].run(&w);
        done = !fault_end();
        if (rc) {
            refused++;
            if (rc != PERSIA_ENOMEM)
                fail_msg("%s, attempt %u: %s: %s", kinds[i].name, at,
                         persia_err_name(rc), persia_err_text());
            if (state_of(&w) != before)
                fail_msg("%s, attempt %u: half of it was done",
                         kinds[i].name, at);
            remove_files();
            if ((rc = kinds[i].run(&w)))
                fail_msg("%s, attempt %u, again: %s: %s", kinds[i].name, at,
                         persia_err_name(rc), persia_err_text());
        }
        if (state_of(&w) != after)
            fail_msg("%s, attempt %u: another result", kinds[i].name, at);
        world_free(&w);
        assert_true(at < 3000);
    }
    return refused;
}

static void every_call_without_memory(void **state)
{
    int refused = 0;
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        world w;
        world_make(&w);
        if (kinds[i].run(&w))
            fail_msg("%s: %s", kinds[i].name, persia_err_text());
        const uint64_t after = state_of(&w);
        world_free(&w);
        for (int good = 0; good < 2; good++)
            refused += try_each(i, good, after);
    }
    assert_true(refused > 50);
}

static int setup(void **state)
{
    (void)state;
    memcpy(base, "/tmp/persia-oom-XXXXXX", 23);
    if (!mkdtemp(base))
        return 1;
    folder = open(base, O_RDONLY | O_DIRECTORY);
    return folder < 0;
}

static int teardown(void **state)
{
    (void)state;
    remove_files();
    close(folder);
    return rmdir(base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_without_memory),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
