/* Every call of shard_ops while memory runs out: each attempt to get some
 * fails in turn.  A call answers once, changes all or nothing, and can be
 * repeated; under a sanitizer nothing leaks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shard/private.h"
#include "tests/fault.h"

enum { DIM = 4, STREAM = 7, OLD = 40, N = 60, CALLS = 16 };

static char base[64]; /* a folder */
static int with_log;  /* worlds have one, in a folder of it */

typedef struct answered {
    int n, code;
    uint32_t status, done, no;
    uint64_t number; /* of what a message says */
} answered;

typedef struct world {
    tables *p;
    shard *s;
    updates_log *log; /* or NULL */
    shard_ref *ref;
    uint64_t ids[N];
    float grads[N * DIM];
    wire_push_table table[2];
    push_part part;
    push_job job;
    optim_args optim;
    wire_push m[2];
    shard_push push[2];
    answered a[CALLS]; /* they may be given later */
    int calls;
    char text[512]; /* of the first error */
} world;

static void note(void *ctx, int rc)
{
    answered *a = ctx;
    a->n++;
    a->code = rc;
}

static void on_done(void *ctx, int rc, shard_reply *reply)
{
    note(ctx, rc);
    if (reply->release)
        reply->release(reply);
}

static void on_push(void *ctx, int rc, shard_reply *reply)
{
    if (!rc)
        ((answered *)ctx)->status =
            ((const wire_push_reply *)reply->message)->status;
    on_done(ctx, rc, reply);
}

static void on_job(void *ctx, int rc, shard_reply *reply)
{
    if (!rc)
        ((answered *)ctx)->done =
            ((const wire_snapshot_reply *)reply->message)->done;
    on_done(ctx, rc, reply);
}

/* What setup() has saved. */
static wire_file files[16];
static uint64_t pushes[4];
static wire_ledger ledgers[4];
static wire_snapshot_reply moment;

static void on_saved(void *ctx, int rc, shard_reply *reply)
{
    const wire_snapshot_reply *m = reply->message;
    if (!rc && m->done && m->files_n) {
        moment = *m;
        assert_true(m->files_n <= 16 && m->pushes_n <= 4 &&
                    m->ledgers_n <= 4);
        memcpy(files, m->files, m->files_n * sizeof *files);
        memcpy(pushes, m->pushes, m->pushes_n * sizeof *pushes);
        memcpy(ledgers, m->ledgers, m->ledgers_n * sizeof *ledgers);
    }
    on_job(ctx, rc, reply);
}

static void on_restore(void *ctx, int rc, shard_reply *reply)
{
    if (!rc)
        ((answered *)ctx)->done =
            ((const wire_restore_reply *)reply->message)->done;
    on_done(ctx, rc, reply);
}

static answered *next(world *w)
{
    answered *a = &w->a[w->calls++ % CALLS];
    *a = (answered){0};
    return a;
}

static wire_caller caller(void)
{
    return (wire_caller){.client = 1, .incarnation = 1, .boot = 1,
                         .lineage = 2};
}

/* Files lie in folders of `base`: those of a snapshot to be restored, and
 * those of others. */
static const char saved[] = "saved", other[] = "other";
static int open_folder(void *ctx, int *fd)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", base, (const char *)ctx);
    *fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *fd < 0 ? persia_err_set(PERSIA_EIO, "no folder") : PERSIA_OK;
}

static void free_nothing(void *ctx)
{
    (void)ctx;
}

static int find(void *ctx, const char *root, const char *folder,
                const char *proof, int writes, ckpt_io **out)
{
    const ckpt_opener opener = {
        .open = open_folder,
        .free = free_nothing,
        .ctx = (void *)(uintptr_t)(strcmp(folder, saved) ? other : saved)};
    (void)ctx;
    (void)root;
    (void)proof;
    (void)writes;
    return persia_ckpt_folder(&opener, 1 << 20, out);
}

static void wake(void *ctx, uint64_t at)
{
    (void)ctx;
    (void)at;
}

static int hello(world *w, uint64_t stream)
{
    answered *a = next(w);
    const wire_hello m = {.caller = caller(), .version = WIRE_VERSION,
                          .stream = stream};
    wire_hello same = m;
    same.caller.boot = same.caller.lineage = 0;
    w->ref->ops->hello(w->ref, &same, UINT64_MAX, on_done, a);
    assert_int_equal(a->n, 1);
    return a->code;
}

static int declare(world *w, const char *name)
{
    answered *a = next(w);
    wire_declare m = {.caller = caller(),
                      .table = {.seed = 1, .dim = DIM,
                                .optimizer = OPTIM_ADAGRAD,
                                .state_init = 0.1f, .admission = 1}};
    snprintf(m.table.name, sizeof m.table.name, "%s", name);
    w->ref->ops->declare(w->ref, &m, UINT64_MAX, on_done, a);
    assert_int_equal(a->n, 1);
    return a->code;
}

/* An update of both tables; direct: the first part has a job. */
static void push_make(world *w, int direct)
{
    const optim_hyper h = {.kind = OPTIM_ADAGRAD, .lr = 1, .eps = 1,
                           .grad_scale = 1};
    for (uint32_t i = 0; i < 2; i++) {
        w->table[i] = (wire_push_table){
            .grads = {.no = i, .dim = DIM, .n = N, .values = w->grads},
            .ids = w->ids, .hyper = h};
        w->m[i] = (wire_push){.caller = caller(), .stream = STREAM + i,
                              .number = 2, .settled = 0, .parts = 1,
                              .tables = w->table, .tables_n = 2};
        w->push[i] = (shard_push){.m = &w->m[i]};
    }
    if (!direct)
        return;
    w->part = (push_part){.n = N, .ids = w->ids, .grad = w->grads,
                          .stride = DIM, .bags = N};
    w->job = (push_job){.parts = &w->part, .parts_n = 1};
    w->table[0] = (wire_push_table){.grads = {.no = 0}, .hyper = h};
    w->m[0].tables_n = 1;
    w->push[0].jobs = &w->job;
}

static answered *push_send(world *w, int i)
{
    answered *a = next(w);
    w->ref->ops->push(w->ref, &w->push[i], UINT64_MAX, on_push, a);
    return a;
}

static int push_one(world *w, int direct)
{
    push_make(w, direct);
    const answered *a = push_send(w, 0);
    assert_int_equal(a->n, 1);
    if (!a->code)
        assert_true(a->status == PUSH_APPLIED);
    return a->code;
}

/* Two parts, of a step or of a group. */
static int push_both(world *w, int group)
{
    push_make(w, 0);
    for (uint32_t i = 0; i < 2; i++) {
        w->m[i].parts = 2;
        w->m[i].part = i;
        w->m[i].step = w->m[i].t = group ? 0 : 1;
        w->m[i].group = group ? 5 : 0;
    }
    const answered *a = push_send(w, 0);
    if (a->n)
        return a->code;
    const answered *b = push_send(w, 1);
    if (!b->n) { /* its group is kept until it is late; nothing is lost */
        assert_int_equal(a->n, 0);
        persia_shard_refuse(w->ref, PERSIA_ENOMEM, "it ends");
        pthread_mutex_lock(&w->s->wait_lock);
        ((direct *)w->ref)->refused = 0;
        pthread_mutex_unlock(&w->s->wait_lock);
    }
    assert_int_equal(b->n, 1);
    if (!b->code) {
        assert_int_equal(a->n, 1);
        assert_int_equal(a->code, PERSIA_OK);
        assert_true(a->status == PUSH_APPLIED && b->status == PUSH_APPLIED);
    }
    return b->code;
}

/* ---- the calls ---------------------------------------------------------- */

static int run_hello(world *w)
{
    return hello(w, 1000);
}
static int run_declare(world *w)
{
    return declare(w, "third");
}
static int run_push(world *w)
{
    return push_one(w, 0);
}
static int run_push_direct(world *w)
{
    return push_one(w, 1);
}
static int run_step(world *w)
{
    return push_both(w, 0);
}
static int run_group(world *w)
{
    return push_both(w, 1);
}

static int pull(world *w, int packed, uint64_t after)
{
    static float out[N * DIM];
    wire_pull_table tables[] = {{0, N, w->ids}, {1, N, w->ids}};
    const wire_pull m = {.caller = caller(), .dtype = WIRE_FP32,
                         .want_rows = 1, .tables = tables, .after = after,
                         .stream = STREAM, .tables_n = packed ? 2 : 1};
    pull_job job = {.n = N, .ids = w->ids, .out = out, .stride = DIM};
    const shard_pull a = {&m, packed ? NULL : &job};
    answered *to = next(w);
    w->ref->ops->pull(w->ref, &a, UINT64_MAX, on_done, to);
    if (!to->n) /* it waits */
        persia_shard_tick(w->s, UINT64_MAX - 1);
    assert_int_equal(to->n, 1);
    return to->code == PERSIA_EUNAVAILABLE && after ? PERSIA_OK : to->code;
}
static int run_pull(world *w)
{
    return pull(w, 1, 0);
}
static int run_pull_direct(world *w)
{
    return pull(w, 0, 0);
}
static int run_pull_waits(world *w)
{
    return pull(w, 1, 77);
}

static int rows(world *w, const wire_rows *m, int put)
{
    answered *a = next(w);
    wire_rows own = *m;
    own.caller = caller();
    if (put)
        w->ref->ops->put_rows(w->ref, &own, UINT64_MAX, on_done, a);
    else
        w->ref->ops->get_rows(w->ref, &own, UINT64_MAX, on_done, a);
    assert_int_equal(a->n, 1);
    return a->code;
}
static int run_get(world *w)
{
    return rows(w, &(wire_rows){.n = N, .ids = w->ids}, 0);
}
static int run_list(world *w)
{
    return rows(w, &(wire_rows){.list = 1000}, 0);
}
static int run_set(world *w)
{
    return rows(w, &(wire_rows){.n = N, .ids = w->ids, .dim = DIM,
                                .vectors = w->grads}, 1);
}
static int run_erase(world *w)
{
    return rows(w, &(wire_rows){.n = N / 2, .ids = w->ids, .erase = 1}, 1);
}
static int run_clear(world *w)
{
    return rows(w, &(wire_rows){.clear = 1}, 1);
}
static int run_drop(world *w)
{
    return rows(w, &(wire_rows){.no = 1, .drop = 1}, 1);
}

static int run_leave(world *w)
{
    answered *a = next(w);
    uint64_t left[] = {2, 3};
    const wire_leave m = {.caller = caller(), .rank = 1, .world = 4,
                          .joins = 1, .step = 0, .left = left, .left_n = 2,
                          .move = 1, .stream = STREAM};
    w->ref->ops->leave(w->ref, &m, UINT64_MAX, on_done, a);
    assert_int_equal(a->n, 1);
    return a->code;
}

static int run_stats(world *w)
{
    answered *a = next(w);
    w->ref->ops->stats(w->ref, &(wire_stats){.caller = caller()}, UINT64_MAX,
                       on_done, a);
    assert_int_equal(a->n, 1);
    return a->code;
}

static void empty_folder(void)
{
    char command[100];
    snprintf(command, sizeof command, "rm -f %s/%s/*", base, other);
    assert_int_equal(system(command), 0);
}

static void remove_log(void)
{
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s/log", base);
    assert_int_equal(system(command), 0);
}

static int snapshot(world *w, uint32_t verb, const char *folder,
                    answered **out)
{
    wire_snapshot m = {.caller = caller(), .verb = verb, .root = "r"};
    snprintf(m.folder, sizeof m.folder, "%s", folder);
    *out = next(w);
    w->ref->ops->snapshot(w->ref, &m, UINT64_MAX,
                          folder == saved ? on_saved : on_job, *out);
    assert_int_equal((*out)->n, 1);
    return (*out)->code;
}

static int snapshot_into(world *w, const char *folder)
{
    answered *a;
    int rc = snapshot(w, SNAPSHOT_BEGIN, folder, &a), ended;
    while (!rc && !a->done) {
        sched_yield();
        rc = snapshot(w, SNAPSHOT_STATUS, folder, &a);
    }
    for (int i = 0; (ended = snapshot(w, SNAPSHOT_END, folder, &a)); i++)
        if (i == 3) /* for good */
            break;
    return rc ? rc : ended;
}

static int run_snapshot(world *w)
{
    return snapshot_into(w, other);
}

static int restore(world *w, uint32_t verb, answered **out)
{
    wire_restore m = {.caller = {.client = 1, .incarnation = 1, .boot = 1},
                      .verb = verb, .root = "r", .lineage = 9,
                      .updates = moment.updates, .step = moment.step,
                      .pushes = pushes, .pushes_n = moment.pushes_n,
                      .ledgers = ledgers, .ledgers_n = moment.ledgers_n,
                      .files = files, .files_n = moment.files_n,
                      .restore = 4, .t = moment.t};
    memcpy(m.folder, saved, sizeof saved);
    *out = next(w);
    w->ref->ops->restore(w->ref, &m, UINT64_MAX, on_restore, *out);
    assert_int_equal((*out)->n, 1);
    return (*out)->code;
}

static int run_restore(world *w)
{
    answered *a;
    int rc = restore(w, RESTORE_PREPARE, &a);
    while (!rc && !a->done) {
        sched_yield();
        rc = restore(w, RESTORE_PREPARE, &a);
    }
    if (!rc)
        rc = restore(w, RESTORE_COMMIT, &a);
    if (rc)
        for (int i = 0; restore(w, RESTORE_ABORT, &a) && i < 3; i++)
            ;
    return rc;
}

typedef struct call_kind {
    const char *name;
    int (*run)(world *w);
} call_kind;

static const call_kind kinds[] = {
    {"hello", run_hello},
    {"declare", run_declare},
    {"push", run_push},
    {"push, direct", run_push_direct},
    {"parts of a step", run_step},
    {"parts of a group", run_group},
    {"pull", run_pull},
    {"pull, direct", run_pull_direct},
    {"pull that waits", run_pull_waits},
    {"get rows", run_get},
    {"list rows", run_list},
    {"set rows", run_set},
    {"erase rows", run_erase},
    {"clear", run_clear},
    {"drop", run_drop},
    {"leave", run_leave},
    {"stats", run_stats},
    {"snapshot", run_snapshot},
    {"restore", run_restore},
};

/* ---- worlds ------------------------------------------------------------- */

static updates_log *log_make(void)
{
    const log_config config = {.owner = {.shards = 1}, .level = LOG_PROCESS,
                               .segment = 1 << 20, .limit = 1 << 24};
    char path[100];
    log_disk *disk;
    updates_log *l;
    snprintf(path, sizeof path, "%s/log", base);
    assert_int_equal(persia_log_disk_open(path, 1, &disk), PERSIA_OK);
    assert_int_equal(persia_log_open(disk, &config, &l), PERSIA_OK);
    return l;
}

static void world_make(world *w)
{
    const tables_config tables = {.threads = 1, .memory_limit = 64 << 20};
    updates_log *log = with_log ? log_make() : NULL;
    log_found found;
    const shard_config c = {.log = log,
                            .shards = 1, .boot = 1, .lineage = 2,
                            .message_limit = 1 << 20,
                            .env = {.wake = wake, .files = {.find = find}}};
    memset(w, 0, sizeof *w);
    w->log = log;
    assert_int_equal(persia_tables_create(&tables, &w->p), PERSIA_OK);
    assert_int_equal(persia_shard_create(w->p, &c, &w->s), PERSIA_OK);
    assert_int_equal(persia_shard_direct(w->s, &w->ref), PERSIA_OK);
    if (log) {
        assert_int_equal(persia_shard_replay(w->s, w->ref, 0, &found),
                         PERSIA_OK);
        persia_shard_ready(w->s);
    }
    for (uint64_t i = 0; i < N; i++)
        w->ids[i] = i < OLD ? i : i * 1000;
    for (int i = 0; i < N * DIM; i++)
        w->grads[i] = (float)(i % 7) - 3;
    assert_int_equal(hello(w, STREAM), PERSIA_OK);
    assert_int_equal(hello(w, STREAM + 1), PERSIA_OK);
    assert_int_equal(declare(w, "a"), PERSIA_OK);
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    push_make(w, 0);
    for (int i = 0; i < 2; i++) {
        w->table[i].grads.n = OLD;
        w->m[0].number = 1;
    }
    assert_int_equal(push_send(w, 0)->status, PUSH_APPLIED);
    empty_folder();
}

static void world_free(world *w)
{
    assert_int_equal(w->s->parked_n, 0);
    assert_true(persia_tables_limit(w->p)->used ==
                persia_tables_limit(w->p)->promised);
    w->ref->ops->close(w->ref);
    while (persia_shard_end_jobs(w->s))
        sched_yield();
    persia_shard_destroy(w->s);
    persia_log_close(w->log);
    persia_tables_destroy(w->p);
    if (w->log)
        remove_log();
}

/* Everything that a call may change, in a number. */
static uint64_t state_of(world *w)
{
    uint64_t sum = 0;
    for (uint32_t no = 0; no < persia_tables_tables(w->p); no++) {
        table *t = persia_tables_table(w->p, no);
        uint64_t cursor = 0, ids[256];
        size_t n = 1;
        sum += id_hash(no) + (uint64_t)persia_tables_dropped(w->p, no);
        while (cursor != TABLE_LIST_END) {
            float row[2 * DIM];
            assert_int_equal(persia_table_list(t, &cursor, 256, ids, &n),
                             PERSIA_OK);
            for (size_t i = 0; i < n; i++) {
                assert_int_equal(persia_table_get(t, 1, &ids[i], row,
                                                  row + DIM, NULL),
                                 PERSIA_OK);
                uint64_t h = id_hash(ids[i] + no);
                for (int k = 0; k < 2 * DIM; k++) {
                    uint32_t bits;
                    memcpy(&bits, &row[k], sizeof bits);
                    h = id_hash(h + bits);
                }
                sum += h;
            }
        }
    }
    for (uint64_t s = 0; s < 2; s++) {
        wire_ledger l;
        ledger_read(w->s->ledger, STREAM + s, &l);
        sum += id_hash(l.watermark + 77 * s) + l.window[0];
    }
    return sum + id_hash(wait_step(w->s)) +
           id_hash(persia_tables_updates(w->p));
}

/* How many attempts were refused. */
static int try_each(const call_kind *k, int good, uint64_t after)
{
    int refused = 0;
    for (unsigned at = 1, done = 0; !done; at++) {
        world w;
        world_make(&w);
        const uint64_t before = state_of(&w);
        fault_begin(at, good);
        int rc = k->run(&w);
        done = !fault_end();
        if (rc) {
            if (rc != PERSIA_ENOMEM)
                fail_msg("%s, attempt %u: %s: %s", k->name, at,
                         persia_err_name(rc), persia_err_text());
            /* A table that the log does not take is there: who declares it
             * once more lets it be logged. */
            if (state_of(&w) != before && !(with_log && k->run == run_declare))
                fail_msg("%s, attempt %u: half of it was done", k->name, at);
            refused++;
            empty_folder();
            for (int i = 0; (rc = k->run(&w)) && i < 3; i++)
                empty_folder();
            if (rc)
                fail_msg("%s, attempt %u, again: %s: %s", k->name, at,
                         persia_err_name(rc), persia_err_text());
        }
        if (state_of(&w) != after)
            fail_msg("%s, attempt %u: another result", k->name, at);
        world_free(&w);
        assert_true(at < 3000);
    }
    return refused;
}

static void each_call_without_memory(int log)
{
    int refused = 0;
    with_log = log;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        world w;
        if (log && kinds[i].run == run_push_direct)
            continue; /* logs take messages alone */
        world_make(&w);
        if (kinds[i].run(&w))
            fail_msg("%s: %s", kinds[i].name, persia_err_text());
        const uint64_t after = state_of(&w);
        world_free(&w);
        for (int good = 0; good < 2; good++)
            refused += try_each(&kinds[i], good, after);
    }
    with_log = 0;
    assert_true(refused > 50);
}

static void every_call_without_memory(void **state)
{
    (void)state;
    each_call_without_memory(0);
}

static void every_call_of_a_shard_with_a_log(void **state)
{
    (void)state;
    each_call_without_memory(1);
}

static int setup(void **state)
{
    (void)state;
    memcpy(base, "/tmp/persia-oom-XXXXXX", 23);
    if (!mkdtemp(base))
        return 1;
    char path[200];
    snprintf(path, sizeof path, "%s/%s", base, saved);
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%s/%s", base, other);
    mkdir(path, 0777);
    world w;
    world_make(&w);
    assert_int_equal(snapshot_into(&w, saved), PERSIA_OK);
    world_free(&w);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", base);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_without_memory),
        cmocka_unit_test(every_call_of_a_shard_with_a_log),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
