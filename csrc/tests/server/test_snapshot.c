/* Snapshots and restores: one moment, whatever happens; rows of N shards in
 * M; folders that are not ours. */
#include "tests/server/folders.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ckpt/ckpt.h"
#include "ids/ids.h"
#include "server/private.h"

/* ---- 3 shards into 2 ---------------------------------------------------- */

static rows_all rows_of_servers(const server *v, uint32_t shards, uint32_t t)
{
    table *tables[3];
    for (uint32_t i = 0; i < shards; i++)
        tables[i] = persia_tables_table(v[i].p, t);
    return rows_of(tables, shards);
}

static void same_rows(const server *a, uint32_t a_n, const server *b,
                      uint32_t b_n)
{
    for (uint32_t t = 0; t < 2; t++) {
        rows_all x = rows_of_servers(a, a_n, t);
        rows_all y = rows_of_servers(b, b_n, t);
        assert_true(x.n > IDS / 2);
        rows_equal(&x, &y);
        rows_free(&x);
        rows_free(&y);
    }
}

static void three_shards_restored_into_two(void **state)
{
    (void)state;
    server old[3], new[2];
    wire_file files[64];
    wire_ledger ledger = {0};
    size_t files_n = 0;
    make_folder(".tmp-abc", "secret");
    for (uint32_t i = 0; i < 3; i++)
        old[i] = server_start(i, 3, base);
    declare_two(old, 3);
    for (uint64_t k = 1; k <= 6; k++)
        push_some(old, 3, k % 2, k);
    for (uint32_t i = 0; i < 3; i++) {
        result r;
        wire_snapshot_reply s = snapshot_whole(&old[i], ".tmp-abc", &r);
        char name[100];
        assert_int_equal(s.updates, 6);
        assert_int_equal(s.step, 6);
        assert_int_equal(s.pushes_n, 2);
        assert_int_equal(s.pushes[0], 3);
        assert_int_equal(s.ledgers_n, 1);
        assert_int_equal(s.ledgers[0].stream, STREAM);
        assert_int_equal(s.ledgers[0].watermark, 6);
        assert_int_equal(s.files_n, 2);
        snprintf(name, sizeof name,
                 "shard-%u-of-3-table-1-00000.safetensors", i);
        assert_string_equal(s.files[1].name, name);
        assert_int_equal(s.files[1].no, 1);
        assert_int_equal(s.rows_written, s.files[0].rows + s.files[1].rows);
        memcpy(files + files_n, s.files, s.files_n * sizeof *files);
        files_n += s.files_n;
        ledger = s.ledgers[0];
        snapshot_end(&old[i], ".tmp-abc");
        result_free(&r);
    }
    /* into servers that have other rows by now */
    for (uint32_t i = 0; i < 2; i++)
        new[i] = server_start(i, 2, base);
    declare_two(new, 2);
    push_some(new, 2, 0, 8);
    push_some(new, 2, 1, 9);
    uint64_t pushes[] = {3, 3}, rows = 0;
    wire_restore m = {.folder = ".tmp-abc", .lineage = 77, .updates = 6,
                      .step = 6, .pushes = pushes, .pushes_n = 2,
                      .ledgers = &ledger, .ledgers_n = 1, .files = files,
                      .files_n = files_n};
    for (uint32_t i = 0; i < 2; i++)
        rows += restore_prepare(&new[i], &m);
    for (size_t i = 0; i < files_n; i++)
        rows -= files[i].rows;
    assert_int_equal(rows, 0);
    for (uint32_t i = 0; i < 2; i++) {
        expect(restore_ask(&new[i], &m, RESTORE_COMMIT), PERSIA_OK, "");
        expect(restore_ask(&new[i], &m, RESTORE_COMMIT), PERSIA_OK, "");
        wire_stats_reply stats = stats_of(&new[i]);
        assert_int_equal(stats.lineage, 77);
        assert_int_equal(stats.updates, 6);
        assert_int_equal(stats.step, 6);
        /* what was sent before knows the wrong rows */
        wire_push stale = push_of(&new[i], STREAM, 7, NULL, 0);
        assert_int_equal(push(&new[i], &stale).status, PUSH_STALE_LINEAGE);
        new[i].lineage = 77;
        assert_int_equal(ledger_of(&new[i], STREAM).watermark, 6);
        stale = push_of(&new[i], STREAM, 6, NULL, 0);
        assert_int_equal(push(&new[i], &stale).status, PUSH_DUPLICATE);
    }
    same_rows(old, 3, new, 2);
    /* both continue alike: clocks and state are what they were */
    push_some(old, 3, 1, 7);
    push_some(new, 2, 1, 7);
    same_rows(old, 3, new, 2);
    for (uint32_t i = 0; i < 3; i++)
        server_stop(&old[i]);
    for (uint32_t i = 0; i < 2; i++)
        server_stop(&new[i]);
}

/* ---- one moment --------------------------------------------------------- */

enum { PUSHERS = 3, COUNTED = 400, CUTS = SANITIZED ? 4 : 12 };

/* Pushers, each with a stream of its own; an update adds 1 to each row of
 * the first table or of both. */
typedef struct pushing {
    server v;
    atomic_int stop, next;
    uint64_t ids[COUNTED];
    float ones[COUNTED];
} pushing;

static void *push_on(void *arg)
{
    pushing *p = arg;
    const uint64_t stream = STREAM + (uint64_t)atomic_fetch_add(&p->next, 1);
    optim_hyper hyper = sgd(1);
    wire_push_table t[2] = {
        push_table(0, 1, COUNTED, p->ids, p->ones, &hyper),
        push_table(1, 1, COUNTED / 2, p->ids, p->ones, &hyper)};
    for (uint64_t i = 1; !atomic_load(&p->stop); i++) {
        wire_push m = push_of(&p->v, stream, i, t, 2);
        if (push(&p->v, &m).status != PUSH_APPLIED)
            return arg;
    }
    return NULL;
}

static void declare_counters(const server *v)
{
    for (uint32_t t = 0; t < 2; t++) {
        table_spec spec = spec_of(t ? "b" : "a", 1, OPTIM_SGD);
        spec.init = INIT_CONSTANT;
        spec.init_a = 0;
        assert_int_equal(declare(v, &spec), t);
    }
}

/* The value that all rows of a table have. */
static float counter(const server *v, uint32_t no, size_t n,
                     const uint64_t *ids)
{
    float out[COUNTED];
    pull(v, no, n, ids, out);
    for (size_t i = 1; i < n; i++)
        assert_true(out[i] == out[0]);
    return out[0];
}

static void a_snapshot_is_of_one_moment(void **state)
{
    (void)state;
    static pushing p;
    pthread_t threads[PUSHERS];
    p.v = server_start(0, 1, base);
    declare_counters(&p.v);
    for (uint64_t i = 0; i < COUNTED; i++) {
        p.ids[i] = i * 77;
        p.ones[i] = -1;
    }
    for (int i = 0; i < PUSHERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, push_on, &p), 0);
    while (stats_of(&p.v).updates < 10)
        nap();
    for (int k = 0; k < CUTS; k++) {
        char folder[20];
        result r;
        uint64_t sum = 0;
        server copy = server_start(0, 1, base);
        snprintf(folder, sizeof folder, ".tmp-cut%d", k);
        make_folder(folder, "secret");
        wire_snapshot_reply s = snapshot_whole(&p.v, folder, &r);
        for (size_t i = 0; i < s.ledgers_n; i++)
            sum += s.ledgers[i].watermark;
        assert_int_equal(sum, s.updates);
        assert_int_equal(s.pushes[0], s.updates);
        assert_int_equal(s.pushes[1], s.updates);
        declare_counters(&copy);
        wire_restore m = {.lineage = 1, .updates = s.updates,
                          .pushes = s.pushes, .pushes_n = 2,
                          .ledgers = s.ledgers, .ledgers_n = s.ledgers_n,
                          .files = s.files, .files_n = s.files_n};
        memcpy(m.folder, folder, sizeof folder);
        assert_int_equal(restore_prepare(&copy, &m),
                         COUNTED + COUNTED / 2);
        expect(restore_ask(&copy, &m, RESTORE_COMMIT), PERSIA_OK, "");
        copy.lineage = 1;
        assert_true(counter(&copy, 0, COUNTED, p.ids) == (float)sum);
        assert_true(counter(&copy, 1, COUNTED / 2, p.ids) == (float)sum);
        snapshot_end(&p.v, folder);
        result_free(&r);
        server_stop(&copy);
    }
    atomic_store(&p.stop, 1);
    for (int i = 0; i < PUSHERS; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    server_stop(&p.v);
}

/* A restore while pushers push: whatever was not applied to the new rows was
 * answered STALE_LINEAGE, and not one more. */
typedef struct racing {
    server v;
    uint64_t id;
    _Atomic(uint64_t) applied; /* with the new lineage */
    atomic_int stop, next;
} racing;

static void *push_race(void *arg)
{
    racing *p = arg;
    server v = p->v;
    const uint64_t stream = STREAM + (uint64_t)atomic_fetch_add(&p->next, 1);
    const float one = -1;
    optim_hyper hyper = sgd(1);
    wire_push_table t = push_table(0, 1, 1, &p->id, &one, &hyper);
    for (uint64_t i = 1; !atomic_load(&p->stop); i++) {
        wire_push m = push_of(&v, stream, i, &t, 1);
        wire_push_reply reply = push(&v, &m);
        if (reply.status == PUSH_STALE_LINEAGE) {
            v.lineage = 5;
            (void)ledger_of(&v, stream);
            i = 0;
        } else if (reply.status != PUSH_APPLIED) {
            return arg;
        } else if (v.lineage == 5) {
            atomic_fetch_add(&p->applied, 1);
        }
    }
    return NULL;
}

static void a_restore_while_others_push(void **state)
{
    (void)state;
    for (int round = 0; round < (SANITIZED ? 3 : 10); round++) {
        racing p = {.v = server_start(0, 1, base), .id = 9};
        pthread_t threads[2];
        uint64_t pushes[] = {0, UINT64_MAX};
        wire_restore m = {.folder = ".tmp-cut0", .lineage = 5,
                          .pushes = pushes, .pushes_n = 1};
        declare_counters(&p.v);
        for (int i = 0; i < 2; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, push_race,
                                            &p), 0);
        while (stats_of(&p.v).updates < 100)
            nap();
        assert_int_equal(restore_prepare(&p.v, &m), 0);
        expect(restore_ask(&p.v, &m, RESTORE_COMMIT), PERSIA_OK, "");
        while (stats_of(&p.v).updates < 100)
            nap();
        atomic_store(&p.stop, 1);
        for (int i = 0; i < 2; i++) {
            void *failed;
            pthread_join(threads[i], &failed);
            assert_null(failed);
        }
        p.v.lineage = 5;
        assert_true(counter(&p.v, 0, 1, &p.id) == (float)p.applied);
        assert_int_equal(stats_of(&p.v).updates, p.applied);
        server_stop(&p.v);
    }
}

/* ---- in place ----------------------------------------------------------- */

enum { FULL_ROWS = 20000, FULL_DIM = 64, FULL_PULLED = 5000 };

/* Sets all rows of table 0, that fill 0.7 of the limit, to a value. */
static void fill_all(const server *v, float value)
{
    static uint64_t ids[FULL_ROWS];
    static float vectors[FULL_ROWS * FULL_DIM];
    for (uint64_t i = 0; i < FULL_ROWS; i++)
        ids[i] = i;
    for (size_t i = 0; i < (size_t)FULL_ROWS * FULL_DIM; i++)
        vectors[i] = value;
    assert_int_equal(persia_table_set(persia_tables_table(v->p, 0), FULL_ROWS,
                                      ids, vectors, NULL),
                     PERSIA_OK);
}

typedef struct pulling {
    server v;
    atomic_int stop;
    _Atomic(uint64_t) seen[4]; /* pulls by their value; 0: refused */
} pulling;

/* All rows of a pull are those of one moment, and none is an initial one. */
static void *pull_whole(void *arg)
{
    pulling *p = arg;
    uint64_t ids[FULL_PULLED];
    for (uint64_t i = 0; i < FULL_PULLED; i++)
        ids[i] = i * 3;
    wire_pull_table t = {.no = 0, .n = FULL_PULLED, .ids = ids};
    wire_pull m = {.caller = caller_of(&p->v), .tables = &t, .tables_n = 1};
    while (!atomic_load(&p->stop)) {
        wire_pull_reply reply;
        result r = CALL(&p->v, PULL, pull, &m);
        if (r.code == PERSIA_ESTALE)
            m.caller.lineage = 5;
        if (r.code == PERSIA_EUNAVAILABLE || r.code == PERSIA_ESTALE) {
            atomic_fetch_add(&p->seen[0], 1);
            result_free(&r);
            continue;
        }
        DECODE(&r, pull_reply, &reply);
        const float *values = reply.tables[0].values;
        for (size_t i = 1; i < (size_t)FULL_PULLED * FULL_DIM; i++)
            if (values[i] != values[0])
                return arg;
        atomic_fetch_add(&p->seen[(int)values[0] & 3], 1);
        result_free(&r);
    }
    return NULL;
}

static void rows_replaced_in_place_are_never_mixed(void **state)
{
    (void)state;
    static pulling p;
    pthread_t threads[2];
    uint64_t pushes[] = {7};
    wire_restore m = {.folder = ".tmp-place", .lineage = 5, .pushes = pushes,
                      .pushes_n = 1};
    wire_restore_reply reply;
    result r;
    p.v = server_limited(0, 1, base, 8 << 20);
    table_spec spec = spec_of("full", FULL_DIM, OPTIM_SGD);
    assert_int_equal(declare(&p.v, &spec), 0);
    make_folder(".tmp-place", "secret");
    fill_all(&p.v, 2);
    wire_snapshot_reply s = snapshot_whole(&p.v, ".tmp-place", &r);
    wire_file file = s.files[0];
    assert_int_equal(s.files_n, 1);
    snapshot_end(&p.v, ".tmp-place");
    result_free(&r);
    fill_all(&p.v, 1);
    m.files = &file;
    m.files_n = 1;
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, pull_whole, &p),
                         0);
    while (atomic_load(&p.seen[1]) < 3)
        nap();
    assert_int_equal(restore_prepare(&p.v, &m), 0); /* none is read yet */
    int asked = 0;
    do {
        r = restore_ask(&p.v, &m, RESTORE_COMMIT);
        DECODE(&r, restore_reply, &reply);
        result_free(&r);
        asked++;
        if (!reply.done) /* it is too late for that */
            expect(restore_ask(&p.v, &m, RESTORE_ABORT), PERSIA_OK, "");
    } while (!reply.done);
    assert_true(asked > 1);
    table_stats stats;
    persia_table_get_stats(persia_tables_table(p.v.p, 0), &stats);
    assert_int_equal(stats.rows, FULL_ROWS);
    while (atomic_load(&p.seen[2]) < 3)
        nap();
    atomic_store(&p.stop, 1);
    for (int i = 0; i < 2; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    assert_int_equal(p.seen[3], 0);
    assert_int_equal(stats_of(&p.v).lineage, 5);
    expect(restore_ask(&p.v, &m, RESTORE_COMMIT), PERSIA_OK, "");
    server_stop(&p.v);
}

/* ---- requests ----------------------------------------------------------- */

/* Asks until the snapshot has started or failed. */
static result snapshot_try(const server *v, wire_snapshot *m)
{
    for (;;) {
        wire_snapshot_reply reply;
        result r = CALL(v, SNAPSHOT, snapshot, m);
        if (r.code)
            return r;
        DECODE(&r, snapshot_reply, &reply);
        if (reply.started)
            return r;
        result_free(&r);
        m->verb = SNAPSHOT_STATUS;
        nap();
    }
}

/* The same for a restore until it is done. */
static result restore_try(const server *v, wire_restore *m)
{
    for (;;) {
        wire_restore_reply reply;
        result r = restore_ask(v, m, RESTORE_PREPARE);
        if (r.code)
            return r;
        DECODE(&r, restore_reply, &reply);
        if (reply.done)
            return r;
        result_free(&r);
        nap();
    }
}

static void one_snapshot_at_a_time(void **state)
{
    (void)state;
    server v = server_start(0, 1, base);
    declare_two(&v, 1);
    push_some(&v, 1, 0, 1);
    make_folder(".tmp-one", "secret");
    make_folder(".tmp-two", "secret");
    wire_snapshot one = snapshot_of(&v, SNAPSHOT_STATUS, ".tmp-one"), two;
    expect(CALL(&v, SNAPSHOT, snapshot, &one), PERSIA_EARG,
           "no snapshot into root/.tmp-one is known");
    one.verb = SNAPSHOT_BEGIN;
    expect(CALL(&v, SNAPSHOT, snapshot, &one), PERSIA_OK, "");
    expect(CALL(&v, SNAPSHOT, snapshot, &one), PERSIA_OK, ""); /* again */
    two = snapshot_of(&v, SNAPSHOT_BEGIN, ".tmp-two");
    wire_snapshot other = two;
    memcpy(other.root, "else", 5);
    make_folder_in("else", ".tmp-two", "secret");
    expect(CALL(&v, SNAPSHOT, snapshot, &other), PERSIA_EUNAVAILABLE,
           "root/.tmp-one");
    snapshot_end(&v, ".tmp-two"); /* unknown: fine */
    result r;
    (void)snapshot_whole(&v, ".tmp-one", &r);
    result_free(&r);
    /* its client does not know that yet */
    expect(CALL(&v, SNAPSHOT, snapshot, &other), PERSIA_EUNAVAILABLE,
           "root/.tmp-one");
    /* the owner of the root knows that it has died */
    expect(snapshot_try(&v, &two), PERSIA_OK, "");
    one.verb = SNAPSHOT_STATUS;
    expect(CALL(&v, SNAPSHOT, snapshot, &one), PERSIA_EARG, "is known");
    snapshot_end(&v, ".tmp-two");
    /* its files are there already: it fails, and says so until it ends */
    one.verb = SNAPSHOT_BEGIN;
    for (int i = 0;; i++) {
        r = CALL(&v, SNAPSHOT, snapshot, &one);
        one.verb = SNAPSHOT_STATUS;
        if (r.code)
            break;
        wire_snapshot_reply reply;
        DECODE(&r, snapshot_reply, &reply);
        assert_false(reply.done);
        result_free(&r);
        nap();
    }
    expect(r, PERSIA_EIO, "the snapshot into root/.tmp-one failed: shard-0");
    expect(CALL(&v, SNAPSHOT, snapshot, &one), PERSIA_EIO, "File exists");
    /* the next one may begin without END */
    make_folder(".tmp-three", "secret");
    wire_snapshot_reply reply = snapshot_whole(&v, ".tmp-three", &r);
    assert_int_equal(reply.files_n, 1);
    result_free(&r);
    server_stop(&v);
}

static void folders_that_are_not_ours(void **state)
{
    static const struct {
        const char *root, *folder, *proof, *text;
        int code;
    } bad[] = {
        {"..", ".tmp-x", "secret", "cannot name", PERSIA_EARG},
        {"root/..", ".tmp-x", "secret", "cannot name", PERSIA_EARG},
        {"", ".tmp-x", "secret", "cannot name", PERSIA_EARG},
        {"root", "..", "secret", "cannot name", PERSIA_EARG},
        {"root", ".tmp-", "secret", "cannot name", PERSIA_EARG},
        {"root", ".tmp-../..", "secret", "cannot name", PERSIA_EARG},
        {"root", ".tmp-.x", "secret", "cannot name", PERSIA_EARG},
        {"root", ".hidden", "secret", "cannot name", PERSIA_EARG},
        {"root", ".tmp-nowhere", "secret", "shared storage", PERSIA_EIO},
        {"nowhere", ".tmp-x", "secret", "shared storage", PERSIA_EIO},
        {"root", ".tmp-x", "other", "is not the client's", PERSIA_EIO},
        {"root", ".tmp-x", "secre", "is not the client's", PERSIA_EIO},
        {"root", ".tmp-x", "secret2", "is not the client's", PERSIA_EIO},
        {"root", ".tmp-x", "", "needs a proof", PERSIA_EARG},
        {"root", ".tmp-link", "secret", "cannot be opened", PERSIA_EIO},
        {"link", ".tmp-x", "secret", "cannot be opened", PERSIA_EIO},
        {"root", ".tmp-bare", "secret", ".proof cannot be", PERSIA_EIO},
        {"root", ".tmp-fifo", "secret", ".proof cannot be", PERSIA_EIO},
        {"root", ".tmp-plink", "secret", ".proof cannot be", PERSIA_EIO},
    };
    char path[200], path2[200];
    (void)state;
    server v = server_start(0, 1, base), none = server_start(0, 1, NULL);
    make_folder(".tmp-x", "secret");
    snprintf(path, sizeof path, "%s/root/.tmp-link", base);
    assert_int_equal(symlink(".tmp-x", path), 0);
    snprintf(path, sizeof path, "%s/link", base);
    assert_int_equal(symlink("root", path), 0);
    snprintf(path, sizeof path, "%s/root/.tmp-bare", base);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof path, "%s/root/.tmp-fifo", base);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof path, "%s/root/.tmp-fifo/.proof", base);
    assert_int_equal(mkfifo(path, 0666), 0);
    snprintf(path, sizeof path, "%s/root/.tmp-plink", base);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof path, "%s/root/.tmp-plink/.proof", base);
    snprintf(path2, sizeof path2, "%s/root/.tmp-x/.proof", base);
    assert_int_equal(symlink(path2, path), 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        wire_snapshot m = {.caller = caller_of(&v), .verb = SNAPSHOT_BEGIN};
        snprintf(m.root, sizeof m.root, "%s", bad[i].root);
        snprintf(m.folder, sizeof m.folder, "%s", bad[i].folder);
        snprintf(m.proof, sizeof m.proof, "%s", bad[i].proof);
        expect(snapshot_try(&v, &m), bad[i].code, bad[i].text);
    }
    wire_snapshot m = snapshot_of(&none, SNAPSHOT_BEGIN, ".tmp-x");
    expect(CALL(&none, SNAPSHOT, snapshot, &m), PERSIA_EARG,
           "start it with --checkpoints");
    server_stop(&none);
    server_stop(&v);
}

static void what_restores_refuse(void **state)
{
    (void)state;
    server v = server_start(0, 1, base);
    wire_restore m = {.folder = ".tmp-r"}, other;
    uint64_t pushes[] = {1, UINT64_MAX, 0};
    result r;
    make_folder(".tmp-r", "secret");
    declare_two(&v, 1);
    push_some(&v, 1, 0, 1);
    wire_snapshot_reply s = snapshot_whole(&v, ".tmp-r", &r);
    wire_file file = s.files[0];
    result_free(&r);
    push_some(&v, 1, 1, 2);

    expect(restore_ask(&v, &m, RESTORE_PREPARE), PERSIA_EARG, "lineage");
    m.lineage = 9;
    m.pushes = pushes;
    m.pushes_n = 3;
    expect(restore_ask(&v, &m, RESTORE_PREPARE), PERSIA_EARG,
           "3 tables are to be restored, only 2");
    m.pushes_n = 2;
    m.files = &file;
    m.files_n = 1;
    file.no = 1;
    expect(restore_ask(&v, &m, RESTORE_PREPARE), PERSIA_EARG,
           "table number 1, which is not to be");
    file.no = 0;
    memcpy(file.name, "../x", 5);
    expect(restore_ask(&v, &m, RESTORE_PREPARE), PERSIA_EARG, "cannot name");
    snprintf(file.name, sizeof file.name, "%s",
             "shard-0-of-1-table-0-00000.safetensors");
    memcpy(m.proof, "wrong", 6);
    expect(restore_try(&v, &m), PERSIA_EIO, "differs");
    m.proof[0] = 0;
    expect(restore_ask(&v, &m, RESTORE_COMMIT), PERSIA_EARG,
           "is prepared");
    /* a file that was altered: found while it is read */
    file.crc++;
    expect(restore_try(&v, &m), PERSIA_ECORRUPT, "shard-0-of-1");
    file.crc--;
    /* another one while the first is not given up, or ready */
    assert_int_equal(restore_prepare(&v, &m), file.rows);
    other = m;
    other.lineage = 10;
    expect(restore_ask(&v, &other, RESTORE_COMMIT), PERSIA_EARG,
           "no restore");
    expect(restore_ask(&v, &m, RESTORE_ABORT), PERSIA_OK, "");
    expect(restore_ask(&v, &m, RESTORE_COMMIT), PERSIA_EARG, "no restore");
    /* a snapshot that is not ended does not hinder, an open cut would */
    assert_int_equal(restore_prepare(&v, &m), file.rows);
    table *t = persia_tables_table(v.p, 0);
    table_cut *cut;
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    expect(restore_ask(&v, &m, RESTORE_COMMIT), PERSIA_EUNAVAILABLE,
           "a snapshot has not ended");
    persia_table_cut_end(cut);
    assert_int_equal(stats_of(&v).lineage, v.lineage);

    /* what waits is answered; the second table stays as it is */
    table *second = persia_tables_table(v.p, 1);
    rows_all before = rows_of(&second, 1);
    wire_push part = push_of(&v, STREAM, 3, NULL, 0);
    part.step = 3;
    part.parts = 2;
    pending *waits = push_start(&v, &part, 60 * (uint64_t)SECOND);
    wire_pull pull = {.caller = caller_of(&v), .stream = STREAM,
                      .after = 3};
    wire_out o = ENCODED(pull, &pull);
    pending *pulls = call_start(&v, WIRE_PULL, &o, 60 * (uint64_t)SECOND);
    expect(restore_ask(&v, &m, RESTORE_COMMIT), PERSIA_OK, "");
    assert_int_equal(push_wait(waits).status, PUSH_STALE_LINEAGE);
    expect(call_wait(pulls), PERSIA_ESTALE, "other rows were restored");
    rows_all after = rows_of(&second, 1);
    rows_equal(&before, &after);
    rows_free(&before);
    rows_free(&after);
    table_stats stats;
    persia_table_get_stats(second, &stats);
    assert_int_equal(stats.pushes, 1);
    assert_int_equal(stats_of(&v).parked, 0);
    server_stop(&v);
}

static void what_nobody_asks_about_is_forgotten(void **state)
{
    (void)state;
    const uint64_t minute = 60 * (uint64_t)SECOND, now = persia_clock_ns();
    server v = server_start(0, 1, base);
    wire_restore m = {.folder = ".tmp-forget", .lineage = 9};
    result r;
    declare_two(&v, 1);
    push_some(&v, 1, 0, 1);
    make_folder(".tmp-forget", "secret");
    (void)snapshot_whole(&v, ".tmp-forget", &r);
    result_free(&r);
    (void)restore_prepare(&v, &m);
    uint64_t next = persia_shard_tick(persia_service_shard(v.s),
                                      now + 9 * minute);
    assert_true(next >= now + 10 * minute && next < now + 11 * minute);
    wire_snapshot s = snapshot_of(&v, SNAPSHOT_STATUS, ".tmp-forget");
    expect(CALL(&v, SNAPSHOT, snapshot, &s), PERSIA_OK, "");
    next = persia_shard_tick(persia_service_shard(v.s), now + 12 * minute);
    assert_true(next == UINT64_MAX);
    expect(CALL(&v, SNAPSHOT, snapshot, &s), PERSIA_EARG, "10 minutes");
    expect(restore_ask(&v, &m, RESTORE_COMMIT), PERSIA_EARG, "10 minutes");
    server_stop(&v);
}

/* A shard leaves its server after a snapshot, or one begins after it has
 * stayed. */
static void a_snapshot_or_a_move(void **state)
{
    (void)state;
    server v = server_start(0, 1, base);
    shard *s = persia_service_shard(v.s);
    uint64_t seconds, ns;
    declare_two(&v, 1);
    push_some(&v, 1, 0, 1);
    make_folder(".tmp-move", "secret");
    wire_snapshot one = snapshot_of(&v, SNAPSHOT_BEGIN, ".tmp-move");
    assert_int_equal(persia_shard_hold(s, SHARD_CLOSING), PERSIA_OK);
    expect(CALL(&v, SNAPSHOT, snapshot, &one), PERSIA_EUNAVAILABLE, "");
    assert_int_equal(persia_shard_hold(s, SHARD_FREE), PERSIA_OK);
    result r;
    assert_false(persia_shard_snapshot(s, &seconds, &ns));
    expect(CALL(&v, SNAPSHOT, snapshot, &one), PERSIA_OK, "");
    assert_int_equal(persia_shard_hold(s, SHARD_CLOSING), PERSIA_EUNAVAILABLE);
    (void)snapshot_whole(&v, ".tmp-move", &r);
    result_free(&r);
    assert_true(persia_shard_snapshot(s, &seconds, &ns));
    assert_int_equal(persia_shard_hold(s, SHARD_CLOSING), PERSIA_EUNAVAILABLE);
    push_some(&v, 1, 1, 2); /* nothing was closed */
    snapshot_end(&v, ".tmp-move");
    assert_false(persia_shard_snapshot(s, &seconds, &ns));
    assert_int_equal(persia_shard_hold(s, SHARD_CLOSING), PERSIA_OK);
    server_stop(&v);
}

/* Servers that end in the middle of things. */
static void stopped_in_the_middle(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        char folder[20];
        server v = server_start(0, 1, base);
        uint64_t pushes[] = {1, 0};
        wire_restore m = {.lineage = 9, .pushes = pushes, .pushes_n = 2};
        declare_two(&v, 1);
        push_some(&v, 1, 0, 1);
        snprintf(folder, sizeof folder, ".tmp-mid%d", i);
        memcpy(m.folder, folder, sizeof folder);
        make_folder(folder, "secret");
        wire_snapshot begin = snapshot_of(&v, SNAPSHOT_BEGIN, folder);
        if (i % 2)
            expect(CALL(&v, SNAPSHOT, snapshot, &begin), PERSIA_OK, "");
        expect(restore_ask(&v, &m, RESTORE_PREPARE), PERSIA_OK, "");
        if (i % 3 == 0)
            expect(restore_ask(&v, &m, RESTORE_ABORT), PERSIA_OK, "");
        server_stop(&v);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(three_shards_restored_into_two),
        cmocka_unit_test(a_snapshot_is_of_one_moment),
        cmocka_unit_test(a_restore_while_others_push),
        cmocka_unit_test(rows_replaced_in_place_are_never_mixed),
        cmocka_unit_test(one_snapshot_at_a_time),
        cmocka_unit_test(a_snapshot_or_a_move),
        cmocka_unit_test(folders_that_are_not_ours),
        cmocka_unit_test(what_restores_refuse),
        cmocka_unit_test(what_nobody_asks_about_is_forgotten),
        cmocka_unit_test(stopped_in_the_middle),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
