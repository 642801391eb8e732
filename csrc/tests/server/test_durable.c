/* A server with a log: killed at any time, it has the same rows, ledgers and
 * counts afterwards, bit by bit. */
#include "tests/server/help.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ckpt/ckpt.h"
#include "tests/log/disk.h"

enum { TABLES = 3, DIM = 4, IDS = 60, BATCH = 20 };

/* ---- work --------------------------------------------------------------- */

typedef struct world {
    memory_disk *disk;
    enum log_level level;
    int boots;
    uint32_t shards;
    server v;
    rng g;
    uint32_t no[TABLES];
    uint64_t number[4]; /* of each stream */
    uint64_t step, t, groups;
    uint64_t from; /* a cut was taken there; 0: none */
} world;

static const uint32_t optimizers[TABLES] = {OPTIM_ADAGRAD, OPTIM_ADAM,
                                            OPTIM_SGD};

static optim_hyper hyper_of(int table)
{
    return (optim_hyper){.kind = optimizers[table], .lr = 0.1f, .eps = 1e-6f,
                         .beta1 = 0.9f, .beta2 = 0.99f, .grad_scale = 1};
}

static void tables_declare(world *w)
{
    for (int i = 0; i < TABLES; i++) {
        char name[8];
        snprintf(name, sizeof name, "t%d", i);
        table_spec spec = spec_of(name, DIM, optimizers[i]);
        spec.admission = i == 1 ? 0.5f : 1;
        w->no[i] = declare(&w->v, &spec);
    }
}

static void start(world *w)
{
    char boot[16];
    w->boots += w->level == LOG_DISK;
    snprintf(boot, sizeof boot, "boot %d", w->boots);
    w->v = server_durable(&w->disk->disk, w->level, boot, w->shards,
                          w->from);
    tables_declare(w);
}

static void world_make(world *w, enum log_level level, uint64_t seed)
{
    *w = (world){.disk = memory_disk_make(), .level = level, .shards = 1,
                  .g = {seed}};
    start(w);
}

static void world_free(world *w)
{
    server_stop(&w->v);
    memory_disk_free(w->disk);
}

typedef struct batch {
    uint64_t ids[BATCH];
    float grads[BATCH * DIM];
    optim_hyper hyper;
    wire_push_table table;
} batch;

static void batch_make(world *w, int table, batch *b)
{
    const size_t n = 1 + rng_below(&w->g, BATCH);
    const uint64_t first = rng_below(&w->g, IDS);
    for (size_t i = 0; i < n; i++)
        b->ids[i] = first + i;
    for (size_t i = 0; i < n * DIM; i++)
        b->grads[i] = rng_float(&w->g);
    b->hyper = hyper_of(table);
    b->table = push_table(w->no[table], DIM, n, b->ids, b->grads, &b->hyper);
}

static void push_alone(world *w)
{
    batch b;
    batch_make(w, (int)rng_below(&w->g, TABLES), &b);
    wire_push m = push_of(&w->v, STREAM, ++w->number[0], &b.table, 1);
    m.t = ++w->t;
    assert_int_equal(push(&w->v, &m).status, PUSH_APPLIED);
}

/* The parts of one update of ranks 1 and 2. */
static void push_parts(world *w, int table, int is_step)
{
    batch b[2];
    pending *calls[2];
    w->t++;
    w->step += (uint64_t)is_step;
    w->groups++;
    for (uint32_t i = 0; i < 2; i++) {
        batch_make(w, table, &b[i]);
        wire_push m = push_of(&w->v, STREAM + 1 + i, ++w->number[1 + i],
                              &b[i].table, 1);
        m.t = w->t;
        m.step = is_step ? w->step : 0;
        m.group = is_step ? 0 : w->groups;
        m.part = i;
        m.parts = 2;
        calls[i] = push_start(&w->v, &m, 60 * (uint64_t)SECOND);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(push_wait(calls[i]).status, PUSH_APPLIED);
}

/* A table whose gradient is not finite: refused, and forgotten. */
static void push_refused(world *w)
{
    batch b;
    batch_make(w, 0, &b);
    b.grads[0] = NAN;
    b.table.hyper.grad_scale = 1;
    wire_push m = push_of(&w->v, STREAM, w->number[0] + 1, &b.table, 1);
    m.t = w->t + 1;
    (void)push_code(&w->v, &m);
}

static void write_rows(world *w)
{
    uint64_t ids[5];
    float vectors[5 * DIM];
    wire_rows reply;
    const uint64_t what = rng_below(&w->g, 10);
    wire_rows m = {.caller = caller_of(&w->v),
                   .no = w->no[rng_below(&w->g, TABLES)], .n = 5, .ids = ids,
                   .erase = what < 6, .clear = what == 9, .dim = DIM};
    for (int i = 0; i < 5; i++)
        ids[i] = rng_below(&w->g, IDS) * 10 + (uint64_t)i;
    for (int i = 0; i < 5 * DIM; i++)
        vectors[i] = rng_float(&w->g);
    if (m.clear)
        m.n = 0;
    else if (!m.erase)
        m.vectors = vectors;
    result r = CALL(&w->v, PUT_ROWS, rows, &m);
    DECODE(&r, rows, &reply);
    result_free(&r);
}

static void work(world *w)
{
    switch (rng_below(&w->g, 8)) {
    case 0:
        push_parts(w, (int)rng_below(&w->g, TABLES), 1);
        break;
    case 1:
        push_parts(w, (int)rng_below(&w->g, TABLES), 0);
        break;
    case 2:
        write_rows(w);
        break;
    case 3:
        push_refused(w);
        break;
    default:
        push_alone(w);
    }
}

/* ---- all that there is -------------------------------------------------- */

typedef struct state_of {
    rows_all rows[TABLES];
    wire_ledger ledgers[4];
    wire_stats_reply stats;
} state_of;

static void look(const world *w, state_of *s)
{
    for (int i = 0; i < TABLES; i++) {
        table *t = persia_tables_table(w->v.p, w->no[i]);
        s->rows[i] = rows_of(&t, 1);
    }
    for (uint64_t i = 0; i < 4; i++)
        s->ledgers[i] = ledger_of(&w->v, STREAM + i);
    s->stats = stats_of(&w->v);
}

static void same(const state_of *a, const state_of *b)
{
    for (int i = 0; i < TABLES; i++)
        rows_equal(&a->rows[i], &b->rows[i]);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(a->ledgers[i].watermark, b->ledgers[i].watermark);
        assert_memory_equal(a->ledgers[i].window, b->ledgers[i].window,
                            sizeof a->ledgers[i].window);
        assert_int_equal(a->ledgers[i].incarnation,
                         b->ledgers[i].incarnation);
    }
    assert_int_equal(a->stats.updates, b->stats.updates);
    assert_int_equal(a->stats.step, b->stats.step);
    assert_int_equal(a->stats.lineage, b->stats.lineage);
    assert_int_equal(a->stats.restore, b->stats.restore);
    assert_int_not_equal(a->stats.boot, b->stats.boot);
}

static void state_free(state_of *s)
{
    for (int i = 0; i < TABLES; i++)
        rows_free(&s->rows[i]);
}

/* ---- tests -------------------------------------------------------------- */

/* Kills the server, or cuts its power by `seed` (0: not), and compares. */
static void again_the_same(world *w, uint64_t seed)
{
    state_of before, after;
    look(w, &before);
    server_stop(&w->v);
    if (seed)
        memory_disk_lose(w->disk, seed);
    start(w);
    look(w, &after);
    same(&before, &after);
    state_free(&before);
    state_free(&after);
}

static void killed_at_any_time(enum log_level level)
{
    for (uint64_t seed = 1; seed <= (SANITIZED ? 5 : 20); seed++) {
        world w;
        world_make(&w, level, seed * 1000);
        for (int life = 0; life < 4; life++) {
            for (uint64_t i = rng_below(&w.g, 40); i; i--)
                work(&w);
            again_the_same(&w, level == LOG_DISK ? seed : 0);
        }
        world_free(&w);
    }
}

static void a_killed_process_has_its_rows_again(void **state)
{
    (void)state;
    killed_at_any_time(LOG_PROCESS);
}

static void a_machine_without_power_has_its_rows_again(void **state)
{
    (void)state;
    killed_at_any_time(LOG_DISK);
}

/* What was not acknowledged may be sent again: once. */
static void an_update_is_never_applied_twice(void **state)
{
    (void)state;
    world w;
    batch b;
    world_make(&w, LOG_PROCESS, 3);
    batch_make(&w, 0, &b);
    wire_push m = push_of(&w.v, STREAM, 1, &b.table, 1);
    assert_int_equal(push(&w.v, &m).status, PUSH_APPLIED);
    server_stop(&w.v);
    start(&w);
    m.caller = caller_of(&w.v);
    assert_int_equal(push(&w.v, &m).status, PUSH_DUPLICATE);
    assert_int_equal(stats_of(&w.v).updates, 1);
    world_free(&w);
}

/* Other shards may have applied it: sent again after a crash, it is still said
 * to be refused. */
static void a_refusal_outlives_the_process(void **state)
{
    (void)state;
    world w = {.disk = memory_disk_make(), .level = LOG_PROCESS, .shards = 2};
    const float bad[DIM] = {NAN};
    const optim_hyper hyper = hyper_of(0);
    uint64_t id = 0;
    while (hash_shard(id_hash(id), 2) != 0)
        id++;
    start(&w);
    wire_push_table table = push_table(w.no[0], DIM, 1, &id, bad, &hyper);
    wire_push m = push_of(&w.v, STREAM, 1, &table, 1);
    m.t = 1;
    assert_int_equal(push_code(&w.v, &m), PERSIA_ENONFINITE);
    for (int i = 0; i < 2; i++) {
        server_stop(&w.v);
        start(&w);
        m.caller = caller_of(&w.v);
        assert_int_equal(push_code(&w.v, &m), PERSIA_ENONFINITE);
        assert_int_equal(stats_of(&w.v).updates, 1);
    }
    world_free(&w);
}

/* Its rows are written beside its log; where that continues them. */
static uint64_t cut_of(const server *v, const char *folder)
{
    wire_snapshot m = {.caller = caller_of(v), .verb = SNAPSHOT_BEGIN,
                       .root = CKPT_LOG_ROOT, .folder = "rows",
                       .proof = "secret"};
    wire_snapshot_reply reply;
    char path[64];
    snprintf(path, sizeof path, "%s/rows", folder);
    assert_int_equal(persia_ckpt_root_set_log(v->root, folder), PERSIA_OK);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/rows/.proof", folder);
    FILE *f = fopen(path, "w");
    assert_true(f && fputs(m.proof, f) >= 0 && fclose(f) == 0);
    do {
        result r = CALL(v, SNAPSHOT, snapshot, &m);
        DECODE(&r, snapshot_reply, &reply);
        result_free(&r);
        m.verb = SNAPSHOT_STATUS;
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    } while (!reply.done);
    return reply.log;
}

/* The same, if a cut of the rows lies between. */
static void a_refusal_outlives_a_cut(void **state)
{
    (void)state;
    world w = {.disk = memory_disk_make(), .level = LOG_PROCESS, .shards = 2};
    char folder[] = "/tmp/persia-cut-XXXXXX", command[64];
    float grads[DIM] = {NAN};
    const optim_hyper hyper = hyper_of(0);
    uint64_t id = 0;
    while (hash_shard(id_hash(id), 2) != 0)
        id++;
    assert_non_null(mkdtemp(folder));
    start(&w);
    wire_push_table table = push_table(w.no[0], DIM, 1, &id, grads, &hyper);
    wire_push m = push_of(&w.v, STREAM, 1, &table, 1);
    m.t = 1;
    assert_int_equal(push_code(&w.v, &m), PERSIA_ENONFINITE);
    w.from = cut_of(&w.v, folder);
    grads[0] = 1; /* it is not looked at again */
    for (int i = 0; i < 2; i++) {
        server_stop(&w.v);
        start(&w);
        m.caller = caller_of(&w.v);
        assert_int_equal(push_code(&w.v, &m), PERSIA_ENONFINITE);
    }
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    world_free(&w);
}

/* Updates and row writes are refused, nothing changes, lookups work; then it
 * is as if they had never been sent. */
static void a_full_disk_refuses_and_changes_nothing(void **state)
{
    (void)state;
    world w;
    batch b;
    state_of before, after;
    float out[DIM];
    const uint64_t id = 1;
    world_make(&w, LOG_PROCESS, 4);
    for (int i = 0; i < 10; i++)
        push_alone(&w);
    look(&w, &before);
    w.disk->room = 10;
    batch_make(&w, 0, &b);
    wire_push m = push_of(&w.v, STREAM, ++w.number[0], &b.table, 1);
    m.t = ++w.t;
    assert_int_equal(push_code(&w.v, &m), PERSIA_EUNAVAILABLE);
    wire_rows erase = {.caller = caller_of(&w.v), .no = w.no[0], .n = 1,
                       .ids = &id, .erase = 1};
    result r = CALL(&w.v, PUT_ROWS, rows, &erase);
    assert_int_equal(r.code, PERSIA_EUNAVAILABLE);
    result_free(&r);
    table_spec spec = spec_of("more", DIM, OPTIM_SGD);
    wire_declare d = {.caller = caller_of(&w.v), .table = spec};
    r = CALL(&w.v, DECLARE, declare, &d);
    assert_int_equal(r.code, PERSIA_EUNAVAILABLE);
    result_free(&r);
    pull(&w.v, w.no[0], 1, &id, out);
    w.disk->room = UINT64_MAX;
    look(&w, &after);
    for (int i = 0; i < TABLES; i++)
        rows_equal(&before.rows[i], &after.rows[i]);
    assert_int_equal(before.stats.updates, after.stats.updates);
    state_free(&before);
    state_free(&after);
    /* The same is accepted now, and what follows is found again. */
    assert_int_equal(push(&w.v, &m).status, PUSH_APPLIED);
    assert_int_equal(declare(&w.v, &spec), TABLES);
    batch_make(&w, 2, &b);
    b.table.grads.no = TABLES;
    m = push_of(&w.v, STREAM, ++w.number[0], &b.table, 1);
    m.t = ++w.t;
    assert_int_equal(push(&w.v, &m).status, PUSH_APPLIED);
    again_the_same(&w, 0);
    world_free(&w);
}

/* What the server says that it has of a stream. */
static int list_stream(server *v, wire_ledger *out)
{
    const wire_hello m = {.version = WIRE_VERSION, .name_space = "test",
                          .stream = STREAM};
    wire_hello_reply reply;
    result r = CALL(v, HELLO, hello, &m);
    const int code = r.code;
    if (!code) {
        DECODE(&r, hello_reply, &reply);
        *out = reply.ledger;
    }
    result_free(&r);
    return code;
}

/* What was not synced is not acknowledged, nor listed, and sent again it
 * waits, too. */
static void a_failed_sync_acknowledges_nothing(void **state)
{
    (void)state;
    world w;
    batch b;
    wire_ledger ledger;
    world_make(&w, LOG_DISK, 5);
    push_alone(&w);
    w.disk->sync_fails = EIO;
    batch_make(&w, 0, &b);
    wire_push m = push_of(&w.v, STREAM, ++w.number[0], &b.table, 1);
    m.t = ++w.t;
    assert_int_equal(push_code(&w.v, &m), PERSIA_EUNAVAILABLE);
    w.disk->sync_fails = 0;
    assert_int_equal(push_code(&w.v, &m), PERSIA_EUNAVAILABLE);
    assert_int_equal(list_stream(&w.v, &ledger), PERSIA_EUNAVAILABLE);
    /* A cut of the rows is on disk: it has the update. */
    assert_int_equal(persia_log_release(w.v.log, persia_log_end(w.v.log)), 0);
    assert_int_equal(list_stream(&w.v, &ledger), PERSIA_OK);
    assert_int_equal(ledger.watermark, w.number[0]);
    assert_int_equal(push(&w.v, &m).status, PUSH_DUPLICATE);
    push_alone(&w);
    world_free(&w);
}

/* An id that was erased stays erased, whatever was pushed before. */
static void erased_stays_erased(void **state)
{
    (void)state;
    world w;
    batch b;
    wire_rows reply;
    world_make(&w, LOG_PROCESS, 6);
    batch_make(&w, 2, &b);
    wire_push m = push_of(&w.v, STREAM, 1, &b.table, 1);
    assert_int_equal(push(&w.v, &m).status, PUSH_APPLIED);
    wire_rows erase = {.caller = caller_of(&w.v), .no = w.no[2],
                       .n = b.table.grads.n, .ids = b.ids, .erase = 1};
    result r = CALL(&w.v, PUT_ROWS, rows, &erase);
    DECODE(&r, rows, &reply);
    assert_int_equal(reply.erased, b.table.grads.n);
    result_free(&r);
    server_stop(&w.v);
    start(&w);
    wire_rows get = {.caller = caller_of(&w.v), .no = w.no[2],
                     .n = b.table.grads.n, .ids = b.ids};
    r = CALL(&w.v, GET_ROWS, rows, &get);
    DECODE(&r, rows, &reply);
    for (size_t i = 0; i < reply.n; i++)
        assert_int_equal(reply.found[i], 0);
    result_free(&r);
    world_free(&w);
}

static pending *part_start(world *w, batch *b, uint32_t part, uint64_t number,
                           uint64_t step)
{
    batch_make(w, 2, b);
    wire_push m = push_of(&w->v, STREAM + part, number, &b->table, 1);
    m.step = m.t = step;
    m.part = part;
    m.parts = 2;
    return push_start(&w->v, &m, 60 * (uint64_t)SECOND);
}

/* Rank 0 was answered at once, as its update was there; it is killed before
 * the part of the other one is. */
static void a_rank_that_was_passed_before_a_kill(void **state)
{
    (void)state;
    for (int ahead_first = 0; ahead_first < 2; ahead_first++) {
        world w;
        batch b[4];
        world_make(&w, LOG_PROCESS, 7);
        push_alone(&w);
        assert_int_equal(push_wait(part_start(&w, &b[0], 0, 1, 1)).status,
                         PUSH_DUPLICATE);
        server_stop(&w.v);
        start(&w);
        pending *ahead = NULL;
        if (ahead_first) {
            ahead = part_start(&w, &b[1], 0, 2, 2);
            while (!stats_of(&w.v).parked)
                sched_yield();
        }
        pending *behind = part_start(&w, &b[2], 1, 1, 1);
        if (!ahead)
            ahead = part_start(&w, &b[1], 0, 2, 2);
        result r = call_wait(ahead); /* it is sent again */
        assert_int_equal(r.code, PERSIA_EUNAVAILABLE);
        result_free(&r);
        assert_int_equal(push_wait(behind).status, PUSH_APPLIED);
        ahead = part_start(&w, &b[1], 0, 2, 2);
        behind = part_start(&w, &b[3], 1, 2, 2);
        assert_int_equal(push_wait(ahead).status, PUSH_APPLIED);
        assert_int_equal(push_wait(behind).status, PUSH_APPLIED);
        world_free(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_process_has_its_rows_again),
        cmocka_unit_test(a_machine_without_power_has_its_rows_again),
        cmocka_unit_test(an_update_is_never_applied_twice),
        cmocka_unit_test(a_refusal_outlives_the_process),
        cmocka_unit_test(a_refusal_outlives_a_cut),
        cmocka_unit_test(a_full_disk_refuses_and_changes_nothing),
        cmocka_unit_test(a_failed_sync_acknowledges_nothing),
        cmocka_unit_test(erased_stays_erased),
        cmocka_unit_test(a_rank_that_was_passed_before_a_kill),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
