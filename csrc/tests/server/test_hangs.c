/* Folders whose files hang: they cost the thread of one snapshot. */
#include "tests/server/folders.h"

#include "client/client.h"

#include <pthread.h>
#include <sys/syscall.h>

/* ---- files that hang ---------------------------------------------------- */

/* The tests' own openat() and fsync(), instead of libc's. */
static pthread_mutex_t hang_lock = PTHREAD_MUTEX_INITIALIZER; /* guards: */
static int hang_proof, hang_sync; /* .proof cannot be opened, no file synced */
static int hanging;               /* so many threads */
static pthread_cond_t hang_end = PTHREAD_COND_INITIALIZER;

static void hang_while(const int *flag)
{
    pthread_mutex_lock(&hang_lock);
    hanging += *flag;
    while (*flag)
        pthread_cond_wait(&hang_end, &hang_lock);
    pthread_mutex_unlock(&hang_lock);
}

static void hang_set(int *flag, int to)
{
    pthread_mutex_lock(&hang_lock);
    *flag = to;
    hanging = 0;
    pthread_cond_broadcast(&hang_end);
    pthread_mutex_unlock(&hang_lock);
}

static int hang_count(void)
{
    pthread_mutex_lock(&hang_lock);
    int n = hanging;
    pthread_mutex_unlock(&hang_lock);
    return n;
}

int openat(int at, const char *name, int flags, ...)
{
    unsigned mode = 0;
    if (flags & O_CREAT) {
        va_list args;
        va_start(args, flags);
        mode = va_arg(args, unsigned);
        va_end(args);
    }
    if (!strcmp(name, ".proof"))
        hang_while(&hang_proof);
    return (int)syscall(SYS_openat, at, name, flags, mode);
}

int fsync(int fd)
{
    hang_while(&hang_sync);
    return (int)syscall(SYS_fsync, fd);
}

/* Until so many threads hang. */
static void hang_wait(int n)
{
    while (hang_count() < n)
        nap();
}

/* Everything else is served; the snapshot fails at its patience. */
static void expect_served(server *v, const char *folder)
{
    const uint64_t now = persia_clock_ns();
    wire_snapshot m = snapshot_of(v, SNAPSHOT_STATUS, folder);
    push_some(v, 1, 0, stats_of(v).updates + 1);
    assert_true(persia_shard_tick(persia_service_shard(v->s),
                                  now + 25 * (uint64_t)SECOND) >
                now + 25 * (uint64_t)SECOND);
    (void)persia_shard_tick(persia_service_shard(v->s),
                            now + 120 * (uint64_t)SECOND);
    expect(CALL(v, SNAPSHOT, snapshot, &m), PERSIA_ETIMEOUT, folder);
    push_some(v, 1, 0, stats_of(v).updates + 1);
    /* no cut is left */
    table *t = persia_tables_table(v->p, 0);
    table_cut *cut;
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    persia_table_cut_end(cut);
}

static int snapshot_done(server *v, const wire_snapshot *m)
{
    wire_snapshot_reply reply;
    result r = CALL(v, SNAPSHOT, snapshot, m);
    assert_int_equal(r.code, PERSIA_OK);
    DECODE(&r, snapshot_reply, &reply);
    const int done = reply.done;
    result_free(&r);
    return done;
}

static int restore_done(server *v, wire_restore *m, uint32_t verb)
{
    wire_restore_reply reply;
    result r = restore_ask(v, m, verb);
    assert_int_equal(r.code, PERSIA_OK);
    DECODE(&r, restore_reply, &reply);
    const int done = reply.done;
    result_free(&r);
    return done;
}

static void a_folder_that_hangs_costs_its_snapshot_alone(void **state)
{
    (void)state;
    int *const flags[] = {&hang_proof, &hang_sync};
    for (int i = 0; i < 2; i++) {
        char folder[20], next[20];
        result r;
        server v = server_start(0, 1, base);
        declare_two(&v, 1);
        push_some(&v, 1, 0, 1);
        snprintf(folder, sizeof folder, ".tmp-hang%d", i);
        snprintf(next, sizeof next, ".tmp-free%d", i);
        make_folder(folder, "secret");
        make_folder(next, "secret");
        hang_set(flags[i], 1);
        wire_snapshot m = snapshot_of(&v, SNAPSHOT_BEGIN, folder);
        r = CALL(&v, SNAPSHOT, snapshot, &m);
        wire_snapshot_reply reply;
        DECODE(&r, snapshot_reply, &reply);
        assert_false(reply.done);
        result_free(&r);
        hang_wait(1);
        expect_served(&v, folder);
        /* it ends without its thread, which is left to the process */
        m.verb = SNAPSHOT_END;
        assert_false(snapshot_done(&v, &m));
        assert_false(snapshot_done(&v, &m));
        hang_set(flags[i], 0);
        while (!snapshot_done(&v, &m))
            nap();
        (void)snapshot_whole(&v, next, &r);
        result_free(&r);
        server_stop(&v);
    }
}

static void a_server_stops_while_its_files_hang(void **state)
{
    (void)state;
    server v = server_start(0, 1, base);
    wire_restore m = {.folder = ".tmp-stop", .lineage = 9,
                      .proof = "secret"};
    declare_two(&v, 1);
    push_some(&v, 1, 0, 1);
    make_folder(".tmp-stop", "secret");
    hang_set(&hang_proof, 1);
    wire_snapshot s = snapshot_of(&v, SNAPSHOT_BEGIN, ".tmp-stop");
    expect(CALL(&v, SNAPSHOT, snapshot, &s), PERSIA_OK, "");
    expect(restore_ask(&v, &m, RESTORE_PREPARE), PERSIA_OK, "");
    hang_wait(2);
    persia_service_end_snapshot(v.s);
    assert_int_equal(persia_service_destroy(v.s), 1);
    hang_set(&hang_proof, 0);
    while (persia_service_destroy(v.s))
        ;
    persia_tables_destroy(v.p);
    persia_ckpt_root_close(v.root);
}

/* A snapshot of a store without servers into the folder at `fd`. */
static int own_snapshot(ps_client *c, int fd, uint32_t verb)
{
    wire_snapshot m = {.caller = persia_client_caller(c, 0), .verb = verb,
                       .root = "any root", .folder = "any folder"};
    shard_reply reply;
    snprintf(m.proof, sizeof m.proof, "%d", fd);
    int rc = persia_client_call(c, 0, WIRE_SNAPSHOT, &m, &reply);
    persia_shard_release(&reply);
    return rc;
}

static void an_embedded_client_ends_with_its_jobs(void **state)
{
    (void)state;
    tables_config config = {.threads = 2};
    const int fd = open(base, O_RDONLY | O_DIRECTORY);
    for (int hangs = 0; hangs < 2; hangs++) {
        tables *p;
        ps_client *c;
        assert_int_equal(persia_tables_create(&config, &p), PERSIA_OK);
        assert_int_equal(persia_client_embedded(p, &c), PERSIA_OK);
        assert_int_equal(own_snapshot(c, 12345, SNAPSHOT_BEGIN), PERSIA_EARG);
        assert_int_equal(own_snapshot(c, -1, SNAPSHOT_BEGIN), PERSIA_EARG);
        hang_set(&hang_sync, hangs);
        assert_int_equal(own_snapshot(c, fd, SNAPSHOT_BEGIN), PERSIA_OK);
        if (hangs) {
            hang_wait(1);
            assert_int_equal(persia_client_destroy(c), 1);
            hang_set(&hang_sync, 0);
        }
        while (persia_client_destroy(c))
            ;
        persia_tables_destroy(p);
    }
    close(fd);
}

/* Each that hangs costs a thread: there is an end to that. */
static void at_most_eight_threads_hang(void **state)
{
    (void)state;
    server v = server_start(0, 1, base);
    wire_restore m = {.folder = ".tmp-eight", .proof = "secret"};
    make_folder(".tmp-eight", "secret");
    hang_set(&hang_proof, 1);
    for (uint64_t i = 1; i <= 8; i++) {
        m.lineage = i;
        expect(restore_ask(&v, &m, RESTORE_PREPARE), PERSIA_OK, "");
        assert_false(restore_done(&v, &m, RESTORE_ABORT));
    }
    hang_wait(8);
    expect(restore_ask(&v, &m, RESTORE_PREPARE), PERSIA_EUNAVAILABLE,
           "hangs");
    hang_set(&hang_proof, 0);
    m.lineage = 1;
    while (!restore_done(&v, &m, RESTORE_ABORT))
        nap();
    for (;;) {
        result r = restore_ask(&v, &m, RESTORE_PREPARE);
        if (!r.code) {
            result_free(&r);
            break;
        }
        expect(r, PERSIA_EUNAVAILABLE, "hangs");
        nap();
    }
    (void)restore_prepare(&v, &m);
    server_stop(&v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_folder_that_hangs_costs_its_snapshot_alone),
        cmocka_unit_test(a_server_stops_while_its_files_hang),
        cmocka_unit_test(an_embedded_client_ends_with_its_jobs),
        cmocka_unit_test(at_most_eight_threads_hang),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
