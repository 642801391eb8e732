/* snapshot.c: the rows of one moment, written while training goes on.
 *
 * The moment is between two updates: rows, clocks, ledgers, the counts of
 * updates and steps.  A thread of its own writes the files; the request that
 * began it, and each that asks how far it is, is answered at once.
 */
#include "server/private.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/ckpt.h"

enum { THREADS = 2 }; /* one reads the cut, one writes */
static const uint64_t FORGET_NS = 600 * (uint64_t)1000000000;
/* The same where another one is wanted.  Clients ask every five seconds. */
static const uint64_t ABANDONED_NS = 30 * (uint64_t)1000000000;

typedef struct snapshot {
    ps_service *s;
    char root[WIRE_NAME], folder[WIRE_NAME], proof[PROOF];
    int fd;
    int stop; /* set by __atomic_store_n: see interrupt_watch() */
    uint32_t tables_n;
    table_cut **cuts; /* [tables_n], the writer's once it runs */
    shard_moment moment;
    uint64_t *pushes; /* [tables_n] */
    /* Guarded by admin_lock: */
    int running;   /* the writer */
    int forgotten; /* the writer frees it at its end */
    int done, code;
    char text[512]; /* of code */
    wire_file *files;
    size_t files_n;
    uint64_t rows;
    uint64_t asked; /* when */
} snapshot;

static void snapshot_free(snapshot *n)
{
    if (!n)
        return;
    for (uint32_t i = 0; n->cuts && i < n->tables_n; i++)
        if (n->cuts[i])
            table_cut_end(n->cuts[i]);
    if (n->fd >= 0)
        close(n->fd);
    free(n->cuts);
    free(n->pushes);
    free(n->moment.ledgers);
    free(n->files);
    free(n);
}

/* ---- the moment --------------------------------------------------------- */

static int snapshot_make(ps_service *s, const wire_snapshot *m,
                         snapshot **out)
{
    snapshot *n = calloc(1, sizeof *n);
    *out = n;
    if (!n)
        return err_set(PERSIA_ENOMEM, "no memory for a snapshot");
    n->s = s;
    memcpy(n->root, m->root, sizeof n->root);
    memcpy(n->folder, m->folder, sizeof n->folder);
    memcpy(n->proof, m->proof, sizeof n->proof);
    n->tables_n = ps_tables(shard_tables(s->shard));
    n->cuts = calloc(n->tables_n + (size_t)1, sizeof *n->cuts);
    n->pushes = calloc(n->tables_n + (size_t)1, sizeof *n->pushes);
    n->fd = -1;
    if (!n->cuts || !n->pushes)
        return err_set(PERSIA_ENOMEM, "no memory for a snapshot");
    if (!*m->proof)
        return err_set(PERSIA_EARG, "a snapshot needs a proof: the content "
                       "of a file .proof in its folder");
    return folder_open(s, m->root, m->folder, m->proof, &n->fd);
}

/* ---- the writer --------------------------------------------------------- */

static int add_files(snapshot *n, uint32_t table, const ckpt_files *files,
                     uint64_t rows)
{
    pthread_mutex_lock(&n->s->admin_lock);
    wire_file *grown = realloc(n->files, (n->files_n + files->n + 1) *
                                             sizeof *grown);
    if (grown) {
        n->files = grown;
        for (size_t i = 0; i < files->n; i++) {
            wire_file *f = &grown[n->files_n++];
            *f = (wire_file){.no = table,
                             .rows = files->files[i].rows,
                             .bytes = files->files[i].bytes,
                             .crc = files->files[i].crc};
            memcpy(f->name, files->files[i].name, CKPT_NAME);
        }
        n->rows += rows;
    }
    pthread_mutex_unlock(&n->s->admin_lock);
    return grown ? PERSIA_OK
                 : err_set(PERSIA_ENOMEM, "no memory for a list of files");
}

static int write_table(snapshot *n, sched *threads, uint32_t i)
{
    const ps *tables = shard_tables(n->s->shard);
    const table_config *c = table_get_config(ps_table(tables, i));
    const uint64_t rows = table_cut_rows(n->cuts[i]);
    ckpt_files files = {0};
    char stem[64];
    uint32_t no, shards;
    shard_place(n->s->shard, &no, &shards);
    snprintf(stem, sizeof stem, "shard-%u-of-%u-table-%u", no, shards, i);
    int rc = ckpt_write(threads, n->cuts[i], c, n->fd, stem, CKPT_CHUNK,
                        &files);
    table_cut_end(n->cuts[i]); /* from now on pushes copy nothing aside */
    n->cuts[i] = NULL;
    if (!rc)
        rc = add_files(n, i, &files, rows);
    ckpt_files_free(&files);
    return rc;
}

static int write_all(snapshot *n)
{
    sched *threads;
    int rc = sched_create(THREADS, &threads);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < n->tables_n && !rc; i++) {
        rc = interrupt_poll();
        if (!rc)
            rc = write_table(n, threads, i);
    }
    sched_destroy(threads);
    if (!rc && fsync(n->fd))
        rc = err_set(PERSIA_EIO, "the folder %s cannot be synced: %s",
                     n->folder, strerror(errno));
    return rc;
}

static void *writer(void *arg)
{
    snapshot *n = arg;
    ps_service *s = n->s;
    interrupt_watch(&n->stop);
    int rc = write_all(n);
    for (uint32_t i = 0; i < n->tables_n; i++) {
        if (n->cuts[i])
            table_cut_end(n->cuts[i]);
        n->cuts[i] = NULL;
    }
    pthread_mutex_lock(&s->admin_lock);
    n->running = 0;
    n->done = !rc;
    n->code = rc;
    snprintf(n->text, sizeof n->text, "%s", rc ? err_text() : "");
    if (n->forgotten)
        snapshot_free(n);
    s->writers--;
    pthread_cond_broadcast(&s->ended);
    pthread_mutex_unlock(&s->admin_lock);
    return NULL;
}

static int snapshot_start(snapshot *n)
{
    int rc = shard_cut(n->s->shard, n->tables_n, n->cuts, &n->moment);
    for (uint32_t i = 0; i < n->tables_n && !rc; i++)
        n->pushes[i] = table_cut_clock(n->cuts[i]);
    return rc ? rc : thread_start(NULL, writer, n, "persia-snapshot");
}

/* ---- the requests ------------------------------------------------------- */

void snapshot_drop_locked(ps_service *s)
{
    snapshot *n = s->snapshot;
    s->snapshot = NULL;
    if (!n)
        return;
    __atomic_store_n(&n->stop, 1, __ATOMIC_RELEASE);
    n->forgotten = 1;
    if (!n->running)
        snapshot_free(n);
}

/* Whether its job is no more: nobody asks about it, or another one has the
 * root, in which one may save at a time. */
static int is_abandoned(const snapshot *n, const char *root)
{
    return n->code || !strcmp(n->root, root) ||
           n->asked + ABANDONED_NS <= clock_ns();
}

void snapshot_drop_abandoned_locked(ps_service *s, const char *root)
{
    if (s->snapshot && is_abandoned(s->snapshot, root))
        snapshot_drop_locked(s);
}

uint64_t snapshot_expire(ps_service *s, uint64_t now)
{
    uint64_t next = UINT64_MAX;
    pthread_mutex_lock(&s->admin_lock);
    if (s->snapshot && s->snapshot->asked + FORGET_NS <= now)
        snapshot_drop_locked(s);
    if (s->snapshot)
        next = s->snapshot->asked + FORGET_NS;
    pthread_mutex_unlock(&s->admin_lock);
    return next;
}

static int is_same(const snapshot *n, const wire_snapshot *m)
{
    return n && !strcmp(n->root, m->root) && !strcmp(n->folder, m->folder) &&
           !strcmp(n->proof, m->proof);
}

/* What is there already. */
static int look_locked(ps_service *s, const wire_snapshot *m, int *same)
{
    const snapshot *n = s->snapshot;
    *same = is_same(n, m) && !n->code; /* the answer to the first was lost */
    if (!*same && n && !is_abandoned(n, m->root))
        return err_set(PERSIA_EUNAVAILABLE, "a snapshot into %s/%s is under "
                       "way; wait for its end, or, if its job has died, for "
                       "30 s", n->root, n->folder);
    return PERSIA_OK;
}

static int begin_locked(ps_service *s, const wire_snapshot *m)
{
    snapshot *n;
    int same = 0;
    /* First: one that is wrong neither waits for a snapshot nor ends one. */
    int rc = snapshot_make(s, m, &n);
    if (!rc)
        rc = look_locked(s, m, &same);
    while (!rc && !same && (s->snapshot || s->writers)) {
        snapshot_drop_locked(s);
        while (s->writers) /* one that was stopped */
            pthread_cond_wait(&s->ended, &s->admin_lock);
        rc = look_locked(s, m, &same); /* another one was faster? */
    }
    if (!rc && !same)
        rc = snapshot_start(n);
    if (rc || same) {
        snapshot_free(n);
        return rc;
    }
    n->running = 1;
    s->writers++;
    s->snapshot = n;
    return PERSIA_OK;
}

/* Into `memory`; NULL: there is none. */
static void *copy(wire_memory *memory, const void *from, size_t bytes)
{
    void *to = wire_memory_take(memory, bytes);
    if (to && bytes)
        memcpy(to, from, bytes);
    return to;
}

/* What is known of the snapshot, in *out and `memory`. */
static int answer_locked(ps_service *s, wire_memory *memory,
                         wire_snapshot_reply *out)
{
    snapshot *n = s->snapshot;
    const shard_moment *at = &n->moment;
    n->asked = clock_ns();
    if (n->code)
        return err_set(n->code, "the snapshot into %s/%s failed: %s", n->root,
                       n->folder, n->text);
    *out = (wire_snapshot_reply){
        .done = (uint32_t)n->done,
        .restore = at->restore,
        .updates = at->updates,
        .step = at->step,
        .t = at->t,
        .pushes = copy(memory, n->pushes, n->tables_n * sizeof *n->pushes),
        .pushes_n = n->tables_n,
        .ledgers = copy(memory, at->ledgers,
                        at->ledgers_n * sizeof *at->ledgers),
        .ledgers_n = at->ledgers_n,
        .files_n = n->done ? n->files_n : 0,
        .rows_written = n->rows};
    out->files = copy(memory, n->files, out->files_n * sizeof *n->files);
    return out->pushes && out->ledgers && out->files ? PERSIA_OK
                                                     : PERSIA_ENOMEM;
}

static void end_locked(ps_service *s)
{
    snapshot_drop_locked(s);
    while (s->writers)
        pthread_cond_wait(&s->ended, &s->admin_lock);
}

void service_end_snapshot(ps_service *s)
{
    pthread_mutex_lock(&s->admin_lock);
    end_locked(s);
    pthread_mutex_unlock(&s->admin_lock);
}

static int run_locked(ps_service *s, const wire_snapshot *m,
                      wire_memory *memory, wire_snapshot_reply *out)
{
    int rc = PERSIA_OK;
    if (m->verb == SNAPSHOT_BEGIN)
        rc = begin_locked(s, m);
    else if (!is_same(s->snapshot, m) && m->verb == SNAPSHOT_STATUS)
        rc = err_set(PERSIA_EARG, "no snapshot into %s/%s is known: it was "
                     "ended, nobody asked about it for 10 minutes, or the "
                     "server was started anew", m->root, m->folder);
    if (rc || m->verb != SNAPSHOT_END)
        return rc ? rc : answer_locked(s, memory, out);
    if (is_same(s->snapshot, m))
        end_locked(s);
    *out = (wire_snapshot_reply){.done = 1};
    return PERSIA_OK;
}

void snapshot_run(void *service, const wire_snapshot *m, shard_done done,
                  void *ctx)
{
    ps_service *s = service;
    wire_memory *memory;
    shard_reply reply;
    int rc = shard_reply_make(sizeof(wire_snapshot_reply), &reply, &memory);
    if (!rc)
        rc = shard_check_boot(s->shard, &m->caller);
    if (!rc) {
        pthread_mutex_lock(&s->admin_lock);
        rc = run_locked(s, m, memory, (void *)(uintptr_t)reply.message);
        pthread_mutex_unlock(&s->admin_lock);
        if (m->verb == SNAPSHOT_BEGIN)
            service_wake(s, 0); /* the timer: to forget it some day */
    }
    if (rc && reply.release)
        reply.release(&reply);
    if (rc)
        reply = (shard_reply){.message = NULL};
    done(ctx, rc, &reply);
}
