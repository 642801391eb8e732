/* The log: what was appended is read again, whatever a crash leaves; damage
 * is never taken for the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "log/log.h"
#include "log/private.h"
#include "tests/log/disk.h"

enum { MOST = 400, PARTS = 5 };

static uint64_t drawn = 1;
static uint64_t draw(uint64_t below)
{
    drawn = drawn * 6364136223846793005u + 1442695040888963407u;
    return (drawn >> 33) % below;
}

static void ok(int rc)
{
    if (rc)
        fail_msg("%s: %s", persia_err_name(rc), persia_err_text());
}

/* ---- a log and what was put into it ------------------------------------- */

typedef struct written {
    enum log_type type;
    size_t n, sizes[PARTS];
    uint64_t seed, position, end;
} written;

typedef struct world {
    memory_disk *disk;
    updates_log *log;
    log_config config;
    written all[MOST];
    size_t n;
} world;

static char byte_of(uint64_t seed, size_t part, size_t i)
{
    return (char)(seed * 31 + part * 7 + i * 13 + (i >> 8));
}

static void world_make(world *w, enum log_level level)
{
    memset(w, 0, sizeof *w);
    w->disk = memory_disk_make();
    w->config = (log_config){.owner = {"test", 1, 3},
                             .level = level,
                             .segment = 4096,
                             .limit = 1 << 20};
}

static void world_free(world *w)
{
    persia_log_close(w->log);
    memory_disk_free(w->disk);
}

static int append_type(world *w, enum log_type type)
{
    char *data[PARTS];
    wire_span parts[PARTS];
    written *x = &w->all[w->n];
    assert_true(w->n < MOST);
    *x = (written){.type = type, .n = draw(PARTS), .seed = drawn,
                   .position = persia_log_end(w->log)};
    for (size_t i = 0; i < x->n; i++) {
        x->sizes[i] = draw(draw(10) ? 200 : 3000);
        data[i] = malloc(x->sizes[i] + 1);
        for (size_t k = 0; k < x->sizes[i]; k++)
            data[i][k] = byte_of(x->seed, i, k);
        parts[i] = (wire_span){data[i], x->sizes[i]};
    }
    int rc = persia_log_append(w->log, x->type, parts, x->n, &x->end);
    for (size_t i = 0; i < x->n; i++)
        free(data[i]);
    w->n += !rc;
    return rc;
}

static int append(world *w)
{
    return append_type(w, (enum log_type)(1 + draw(LOG_TYPES - 1)));
}

/* What a reader sees, compared with what was written. */
typedef struct reader {
    const world *w;
    size_t next;
} reader;

static int see(void *ctx, const log_record *r)
{
    reader *e = ctx;
    assert_true(e->next < e->w->n);
    const written *x = &e->w->all[e->next++];
    assert_int_equal(r->type, x->type);
    assert_int_equal(r->position, x->position);
    assert_int_equal(r->end, x->end);
    assert_int_equal(r->n, x->n);
    for (size_t i = 0; i < x->n; i++) {
        const char *data = r->parts[i].data;
        assert_int_equal(r->parts[i].n, x->sizes[i]);
        assert_int_equal((uintptr_t)data % 64, 0);
        for (size_t k = 0; k < x->sizes[i]; k++)
            assert_int_equal(data[k], byte_of(x->seed, i, k));
    }
    return PERSIA_OK;
}

/* Opens the log again and reads from record `first` on; how many there
 * were. */
static int reopen(world *w, size_t first, size_t *n, log_found *found)
{
    reader e = {w, first};
    persia_log_close(w->log);
    w->log = NULL;
    int rc = persia_log_open(&w->disk->disk, &w->config, &w->log);
    const uint64_t from = first < w->n  ? w->all[first].position
                          : first       ? w->all[first - 1].end
                                        : 0;
    if (!rc)
        rc = persia_log_read(w->log, from, see, &e, NULL, found);
    *n = e.next - first;
    return rc;
}

/* The same, and appends from there on. */
static void resume(world *w, size_t first, size_t wanted)
{
    log_found found;
    size_t n;
    ok(reopen(w, first, &n, &found));
    assert_int_equal(n, wanted);
    ok(persia_log_begin(w->log, &found));
    w->n = first + n;
}

static void fresh(world *w, enum log_level level, size_t records)
{
    world_make(w, level);
    resume(w, 0, 0);
    while (w->n < records)
        ok(append(w));
}

/* ---- the same again ----------------------------------------------------- */

static void what_was_appended_is_read(void **state)
{
    (void)state;
    world w;
    fresh(&w, LOG_PROCESS, 0);
    for (int life = 0; life < 20; life++) {
        for (uint64_t i = draw(12); i; i--)
            ok(append(&w));
        resume(&w, 0, w.n);
    }
    world_free(&w);
}

static void reading_begins_anywhere(void **state)
{
    (void)state;
    world w;
    log_found found;
    size_t n;
    fresh(&w, LOG_PROCESS, 120);
    for (size_t first = 0; first <= 120; first++) {
        ok(reopen(&w, first, &n, &found));
        assert_int_equal(n, 120 - first);
        assert_int_equal(found.torn, 0);
    }
    world_free(&w);
}

/* ---- crashes ------------------------------------------------------------ */

/* The process dies within the last write: any part of it may be there. */
static void a_torn_tail_is_cut_off(void **state)
{
    (void)state;
    for (uint64_t gone = 1;; gone++) {
        world w;
        drawn = 7;
        fresh(&w, LOG_PROCESS, 40);
        const written last = w.all[w.n - 1];
        memory_file *f = memory_disk_file(w.disk,
                                          memory_disk_count(w.disk) - 1);
        const uint64_t bytes = last.end - last.position + RECORD_BYTES;
        if (gone >= bytes) {
            world_free(&w);
            return;
        }
        f->bytes -= gone;
        log_found found;
        size_t n;
        const size_t left = gone <= RECORD_BYTES ? 40 : 39;
        ok(reopen(&w, 0, &n, &found));
        assert_int_equal(n, left);
        assert_int_equal(found.torn, left == 39 ? bytes - gone
                                                : RECORD_BYTES - gone);
        ok(persia_log_begin(w.log, &found));
        w.n = left;
        for (int i = 0; i < 5; i++)
            ok(append(&w));
        resume(&w, 0, left + 5);
        world_free(&w);
    }
}

/* A byte that changes is damage, and is named, unless it lies in the last
 * record (as if torn), or where no record is. */
static void a_damaged_middle_is_refused(void **state)
{
    (void)state;
    for (int i = 0; i < 300; i++) {
        world w;
        drawn = 7;
        fresh(&w, LOG_PROCESS, 60);
        drawn = (uint64_t)i;
        const int rank = (int)draw((uint64_t)memory_disk_count(w.disk));
        memory_file *f = memory_disk_file(w.disk, rank);
        const memory_file *next = memory_disk_file(w.disk, rank + 1);
        const uint64_t at = draw(f->bytes);
        uint64_t first, end = w.all[59].end;
        assert_true(segment_parse(f->name, &first));
        assert_true(!next || segment_parse(next->name, &end));
        const uint64_t position = first + (at < HEAD_BYTES ? 0
                                                           : at - HEAD_BYTES);
        const int behind = position >= end;
        f->data[at] ^= (char)(1 << draw(8));
        log_found found;
        size_t n = 0;
        int rc = reopen(&w, 0, &n, &found);
        if (behind || (position >= w.all[59].position && at >= HEAD_BYTES))
            assert_int_equal(rc, PERSIA_OK);
        else
            assert_int_equal(rc, PERSIA_ECORRUPT);
        if (!rc)
            assert_int_equal(n, behind ? 60 : 59);
        world_free(&w);
    }
}

static void a_missing_segment_is_refused(void **state)
{
    (void)state;
    world w;
    log_found found;
    size_t n;
    fresh(&w, LOG_PROCESS, 100);
    assert_true(memory_disk_count(w.disk) > 4);
    memory_disk_file(w.disk, 2)->there = 0;
    assert_int_equal(reopen(&w, 0, &n, &found), PERSIA_ECORRUPT);
    world_free(&w);
}

/* The last one.  After another boot what was not synced may be gone. */
static void a_missing_last_segment_is_refused(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        const enum log_level level = i & 1 ? LOG_DISK : LOG_PROCESS;
        const int same_boot = i & 2;
        world w;
        log_found found;
        uint64_t end;
        fresh(&w, level, 100);
        memory_file *last = memory_disk_file(w.disk,
                                             memory_disk_count(w.disk) - 1);
        assert_true(segment_parse(last->name, &end));
        last->there = 0;
        persia_log_close(w.log);
        ok(persia_log_open(&w.disk->disk, &w.config, &w.log));
        if (!same_boot)
            snprintf(w.log->boot, sizeof w.log->boot, "another");
        reader e = {&w, 0};
        int rc = persia_log_read(w.log, 0, see, &e, NULL, &found);
        assert_int_equal(rc, same_boot || level == LOG_DISK ? PERSIA_ECORRUPT
                                                            : PERSIA_OK);
        assert_int_equal(found.end, end);
        if (!rc) {
            assert_int_equal(found.torn, 0);
            ok(persia_log_begin(w.log, &found));
            w.n = e.next;
            ok(append(&w));
            resume(&w, 0, w.n);
        }
        world_free(&w);
    }
}

static int remove_fails(log_disk *d, const char *name)
{
    (void)d;
    (void)name;
    return EIO;
}

/* A segment was made, and the disk took no record.  A log that continues
 * without it does not miss it, wherever a beginning ends. */
static void a_segment_without_a_record_is_not_missed(void **state)
{
    (void)state;
    world w;
    log_found found;
    size_t n;
    int rc;
    fresh(&w, LOG_PROCESS, 20);
    do {
        w.disk->room = EMPTY_BYTES + RECORD_BYTES;
        const int before = memory_disk_count(w.disk);
        rc = append(&w);
        if (memory_disk_count(w.disk) > before)
            break;
        w.disk->room = UINT64_MAX;
        if (rc)
            ok(append(&w));
    } while (1);
    assert_int_equal(rc, PERSIA_EUNAVAILABLE);
    w.disk->room = UINT64_MAX;
    ok(reopen(&w, 0, &n, &found));
    assert_int_equal(n, w.n);
    int (*const remove)(log_disk *, const char *) = w.disk->disk.remove;
    w.disk->disk.remove = remove_fails;
    assert_int_equal(persia_log_begin(w.log, &found), PERSIA_EIO);
    w.disk->disk.remove = remove;
    resume(&w, 0, w.n);
    ok(append(&w));
    resume(&w, 0, w.n);
    world_free(&w);
}

/* Power is lost: what was synced is there, all of it, and in order. */
static void what_was_synced_survives_power(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        world w;
        log_found found;
        size_t n, synced = 0;
        drawn = seed;
        fresh(&w, LOG_DISK, 0);
        for (uint64_t i = 20 + draw(60); i; i--) {
            ok(append(&w));
            if (!draw(8)) {
                ok(persia_log_wait(w.log, persia_log_end(w.log)));
                synced = w.n;
            }
        }
        persia_log_close(w.log);
        w.log = NULL;
        memory_disk_lose(w.disk, seed);
        /* The machine has started again. */
        ok(persia_log_open(&w.disk->disk, &w.config, &w.log));
        snprintf(w.log->boot, sizeof w.log->boot, "another");
        reader e = {&w, 0};
        ok(persia_log_read(w.log, 0, see, &e, NULL, &found));
        n = e.next;
        assert_true(n >= synced);
        ok(persia_log_begin(w.log, &found));
        w.n = n;
        ok(append(&w));
        ok(append(&w));
        resume(&w, 0, n + 2);
        world_free(&w);
    }
}

/* A segment was made, and not synced yet. */
static void power_is_lost_while_a_segment_is_made(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 50; seed++) {
        world w;
        fresh(&w, LOG_PROCESS, 0);
        persia_log_close(w.log);
        w.log = NULL;
        memory_disk_lose(w.disk, seed);
        resume(&w, 0, 0);
        ok(append(&w));
        resume(&w, 0, 1);
        world_free(&w);
    }
}

/* ---- a disk that refuses ------------------------------------------------ */

static void a_full_disk_changes_nothing(void **state)
{
    (void)state;
    world w;
    fresh(&w, LOG_PROCESS, 20);
    for (int i = 0; i < 60; i++) {
        w.disk->room = draw(600);
        const size_t had = w.n;
        const uint64_t end = persia_log_end(w.log);
        int rc = append(&w);
        if (rc) {
            assert_int_equal(rc, PERSIA_EUNAVAILABLE);
            assert_int_equal(persia_log_end(w.log), end);
            assert_int_equal(w.n, had);
        }
        w.disk->room = UINT64_MAX;
        if (!draw(3))
            ok(append(&w));
    }
    resume(&w, 0, w.n);
    world_free(&w);
}

static void a_failed_sync_heals_by_a_cut(void **state)
{
    (void)state;
    world w;
    int rc;
    fresh(&w, LOG_DISK, 20);
    ok(persia_log_wait(w.log, persia_log_end(w.log)));
    w.disk->sync_fails = EIO;
    ok(append(&w));
    const uint64_t end = persia_log_end(w.log);
    assert_int_equal(persia_log_wait(w.log, end), PERSIA_EUNAVAILABLE);
    w.disk->sync_fails = 0;
    assert_int_equal(append(&w), PERSIA_EUNAVAILABLE);
    assert_int_equal(persia_log_synced(w.log, end, &rc), 0);
    assert_int_equal(rc, PERSIA_EUNAVAILABLE);
    assert_int_equal(persia_log_check(w.log), PERSIA_EUNAVAILABLE);
    assert_true(persia_log_wants_cut(w.log));
    ok(persia_log_release(w.log, end - 64)); /* a cut of before */
    assert_int_equal(append(&w), PERSIA_EUNAVAILABLE);
    ok(persia_log_release(w.log, end));
    assert_false(persia_log_wants_cut(w.log));
    const size_t first = w.n;
    for (int i = 0; i < 5; i++)
        ok(append(&w));
    ok(persia_log_wait(w.log, persia_log_end(w.log)));
    resume(&w, first, 5);
    world_free(&w);
}

/* ---- a disk that hangs -------------------------------------------------- */

static struct {
    int (*write)(log_disk *d, int file, uint64_t at, const wire_span *spans,
                 size_t n);
    sem_t begun, over;
    _Atomic(int) hangs;
} hung;

static int hung_write(log_disk *d, int file, uint64_t at,
                      const wire_span *spans, size_t n)
{
    if (atomic_exchange(&hung.hangs, 0)) {
        sem_post(&hung.begun);
        while (sem_wait(&hung.over))
            ;
    }
    return hung.write(d, file, at, spans, n);
}

/* Every wait is over at once. */
static int wait_is_over(void *ctx, pthread_cond_t *c, pthread_mutex_t *lock,
                        uint64_t until)
{
    (void)ctx;
    (void)c;
    (void)lock;
    return until != PERSIA_FOREVER;
}

static void *append_hung(void *ctx)
{
    return append(ctx) ? ctx : NULL;
}

/* One thread waits for it; others do not, and nothing is lost. */
static void a_disk_that_hangs_has_one_thread(void **state)
{
    (void)state;
    world w;
    pthread_t thread;
    void *failed;
    uint64_t end;
    persia_system system = *persia_system_get();
    fresh(&w, LOG_PROCESS, 10);
    hung.write = w.disk->disk.write;
    w.disk->disk.write = hung_write;
    sem_init(&hung.begun, 0, 0);
    sem_init(&hung.over, 0, 0);
    atomic_store(&hung.hangs, 1);
    assert_int_equal(pthread_create(&thread, NULL, append_hung, &w), 0);
    while (sem_wait(&hung.begun))
        ;
    system.wait = wait_is_over;
    persia_system_install(&system);
    assert_int_equal(persia_log_append(w.log, LOG_ROWS, NULL, 0, &end),
                     PERSIA_EUNAVAILABLE);
    assert_int_equal(persia_log_count(w.log).refused, 1);
    persia_system_install(NULL);
    sem_post(&hung.over);
    pthread_join(thread, &failed);
    assert_null(failed);
    for (int i = 0; i < 5; i++)
        ok(append(&w));
    resume(&w, 0, 16);
    sem_destroy(&hung.begun);
    sem_destroy(&hung.over);
    world_free(&w);
}

static void beyond_twice_the_limit_it_waits(void **state)
{
    (void)state;
    world w;
    world_make(&w, LOG_PROCESS);
    w.config.limit = 8192;
    resume(&w, 0, 0);
    int rc = PERSIA_OK;
    while (!persia_log_wants_cut(w.log))
        ok(append(&w));
    assert_true(persia_log_end(w.log) > 8192);
    while (!rc)
        rc = append(&w);
    assert_int_equal(rc, PERSIA_EUNAVAILABLE);
    /* A server that begins, or restores, has to write that. */
    resume(&w, 0, w.n);
    ok(append_type(&w, LOG_IDENTITY));
    assert_int_equal(append_type(&w, LOG_PUSH), PERSIA_EUNAVAILABLE);
    assert_true(persia_log_wants_cut(w.log));
    const int files = memory_disk_count(w.disk);
    const size_t cut = w.n / 2;
    ok(persia_log_release(w.log, w.all[cut].position));
    assert_true(memory_disk_count(w.disk) <= files);
    ok(append(&w));
    resume(&w, cut, w.n - cut);
    world_free(&w);
}

static void what_does_not_count(void **state)
{
    (void)state;
    world w;
    world_make(&w, LOG_PROCESS);
    w.config.limit = 8192;
    resume(&w, 0, 0);
    for (int i = 0; i < 5; i++) {
        while (!persia_log_wants_cut(w.log))
            ok(append(&w));
        persia_log_discount(w.log, persia_log_end(w.log));
        assert_false(persia_log_wants_cut(w.log));
    }
    assert_true(persia_log_end(w.log) > 5 * 8192);
    world_free(&w);
}

static void a_cut_of_before_is_not_what_was_wanted(void **state)
{
    (void)state;
    world w;
    fresh(&w, LOG_PROCESS, 5);
    persia_log_want_cut(w.log, w.all[3].end);
    assert_true(persia_log_wants_cut(w.log));
    ok(persia_log_release(w.log, w.all[3].position));
    assert_true(persia_log_wants_cut(w.log));
    ok(persia_log_release(w.log, w.all[3].end));
    assert_false(persia_log_wants_cut(w.log));
    world_free(&w);
}

/* Segments behind a cut are used again; what they had is never taken for
 * records, wherever a crash stops their second life. */
static void segments_are_used_again(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        world w;
        size_t first = 0, n;
        log_found found;
        world_make(&w, seed % 2 ? LOG_PROCESS : LOG_DISK);
        w.config.limit = 16384;
        drawn = seed;
        resume(&w, 0, 0);
        while (w.n < 300) {
            ok(append(&w));
            if (!persia_log_wants_cut(w.log))
                continue;
            first = w.n - draw(4);
            ok(persia_log_release(w.log, first < w.n ? w.all[first].position
                                                     : w.all[w.n - 1].end));
            if (draw(3))
                continue;
            ok(reopen(&w, first, &n, &found));
            assert_int_equal(n, w.n - first);
            assert_int_equal(found.torn, 0);
            ok(persia_log_begin(w.log, &found));
        }
        /* 16 KiB in segments of 4, twice, and spare ones */
        assert_true(memory_disk_count(w.disk) <= 16);
        memory_file *f = memory_disk_file(w.disk, 0);
        for (int i = 0; memory_disk_file(w.disk, i); i++)
            if (!strncmp(memory_disk_file(w.disk, i)->name, "log-", 4))
                f = memory_disk_file(w.disk, i);
        persia_log_close(w.log);
        w.log = NULL;
        f->bytes -= f->bytes > HEAD_BYTES ? draw(f->bytes - HEAD_BYTES) : 0;
        ok(reopen(&w, first, &n, &found));
        assert_true(n <= w.n - first);
        world_free(&w);
    }
}

/* A spare file got the name of a segment, and no head yet. */
static void a_segment_without_its_head_is_empty(void **state)
{
    (void)state;
    world w;
    char name[SEGMENT_NAME];
    fresh(&w, LOG_PROCESS, 60);
    memory_file *spare = memory_disk_file(w.disk, 0);
    const size_t first = w.n;
    segment_name(w.all[w.n - 1].end, name);
    ok(persia_log_release(w.log, persia_log_end(w.log)));
    assert_int_equal(strncmp(spare->name, "spare-", 6), 0);
    snprintf(spare->name, sizeof spare->name, "%s", name);
    resume(&w, first, 0);
    ok(append(&w));
    resume(&w, first, 1);
    world_free(&w);
}

static int disk_has(memory_disk *d, const char *text)
{
    const memory_file *f;
    for (int i = 0; (f = memory_disk_file(d, i)); i++)
        if (memmem(f->data, f->bytes, text, strlen(text)))
            return 1;
    return 0;
}

/* Cuts all that there is, then appends a segment or more. */
static void cut_and_append(world *w)
{
    ok(persia_log_release(w->log, persia_log_end(w->log)));
    for (int i = 0; i < 20; i++)
        ok(append(w));
}

/* Neither a record nor a segment that was to be used again has it after two
 * cuts. */
static void what_is_forgotten_leaves_the_disk(void **state)
{
    (void)state;
    static const char secret[] = "an id that is to be forgotten";
    for (int in_spare = 0; in_spare < 2; in_spare++) {
        world w;
        uint64_t end;
        fresh(&w, LOG_PROCESS, 20);
        ok(persia_log_append(w.log, LOG_PUSH,
                             &(wire_span){secret, sizeof secret}, 1, &end));
        for (int i = 0; i < 20; i++)
            ok(append(&w));
        if (in_spare)
            ok(persia_log_release(w.log, persia_log_end(w.log)));
        assert_true(disk_has(w.disk, secret));
        persia_log_forget(w.log, persia_log_end(w.log));
        for (int i = 0; i < 2; i++)
            cut_and_append(&w);
        assert_false(disk_has(w.disk, secret));
        ok(persia_log_release(w.log, persia_log_end(w.log)));
        world_free(&w);
    }
}

/* ---- other logs --------------------------------------------------------- */

static void a_log_of_another_shard_is_refused(void **state)
{
    (void)state;
    world w;
    updates_log *other;
    fresh(&w, LOG_PROCESS, 3);
    log_config config = w.config;
    config.owner.shard = 2;
    assert_int_equal(persia_log_open(&w.disk->disk, &config, &other),
                     PERSIA_EMISMATCH);
    config = w.config;
    snprintf(config.owner.name_space, LOG_NAME, "other");
    assert_int_equal(persia_log_open(&w.disk->disk, &config, &other),
                     PERSIA_EMISMATCH);
    world_free(&w);
}

static void a_folder_has_one_log(void **state)
{
    (void)state;
    char path[] = "/tmp/persia-log-XXXXXX", file[64];
    log_disk *one, *two;
    assert_non_null(mkdtemp(path));
    ok(persia_log_disk_open(path, 1, &one));
    assert_int_equal(persia_log_disk_open(path, 1, &two),
                     PERSIA_EUNAVAILABLE);
    ok(persia_log_disk_open(path, 0, &two)); /* only to look */
    two->free(two);
    one->free(one);
    ok(persia_log_disk_open(path, 1, &one));
    one->free(one);
    snprintf(file, sizeof file, "%s/lock", path);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rmdir(path), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_appended_is_read),
        cmocka_unit_test(reading_begins_anywhere),
        cmocka_unit_test(a_torn_tail_is_cut_off),
        cmocka_unit_test(a_damaged_middle_is_refused),
        cmocka_unit_test(a_missing_segment_is_refused),
        cmocka_unit_test(a_missing_last_segment_is_refused),
        cmocka_unit_test(a_segment_without_a_record_is_not_missed),
        cmocka_unit_test(what_was_synced_survives_power),
        cmocka_unit_test(power_is_lost_while_a_segment_is_made),
        cmocka_unit_test(a_full_disk_changes_nothing),
        cmocka_unit_test(a_failed_sync_heals_by_a_cut),
        cmocka_unit_test(a_disk_that_hangs_has_one_thread),
        cmocka_unit_test(beyond_twice_the_limit_it_waits),
        cmocka_unit_test(what_does_not_count),
        cmocka_unit_test(a_cut_of_before_is_not_what_was_wanted),
        cmocka_unit_test(segments_are_used_again),
        cmocka_unit_test(a_segment_without_its_head_is_empty),
        cmocka_unit_test(what_is_forgotten_leaves_the_disk),
        cmocka_unit_test(a_log_of_another_shard_is_refused),
        cmocka_unit_test(a_folder_has_one_log),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
