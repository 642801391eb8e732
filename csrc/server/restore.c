/* restore.c: other rows in the place of those that are there, in two steps:
 * PREPARE reads and checks beside them, COMMIT puts them in their place
 * between two updates, with clocks, ledgers, counts and a new lineage.
 */
#include "server/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/ckpt.h"

static const uint64_t FORGET_NS = 600 * (uint64_t)1000000000;

typedef struct restore {
    ps_service *s;
    char root[WIRE_NAME], folder[WIRE_NAME];
    int fd;
    int stop; /* set by __atomic_store_n: see interrupt_watch() */
    uint64_t lineage, id, updates, step, t;
    uint32_t tables_n;
    uint64_t *pushes; /* [tables_n]; UINT64_MAX: the table stays */
    table **staged;   /* [tables_n]; the reader's until it is done */
    ledger *ledger;
    ckpt_file *files; /* table by table */
    size_t *first;    /* [tables_n + 1] files of each */
    /* Guarded by admin_lock: */
    int running;   /* the reader */
    int forgotten; /* the reader frees it at its end */
    int done, code;
    char text[512]; /* of code */
    uint64_t rows;
    uint64_t asked; /* when */
} restore;

static void restore_free(restore *r)
{
    if (!r)
        return;
    for (uint32_t i = 0; r->staged && i < r->tables_n; i++)
        table_destroy(r->staged[i]);
    if (r->fd >= 0)
        close(r->fd);
    free(r->pushes);
    free(r->staged);
    ledger_destroy(r->ledger);
    free(r->files);
    free(r->first);
    free(r);
}

static ps *tables_of(const ps_service *s)
{
    return shard_tables(s->shard);
}

/* ---- what was asked for ------------------------------------------------- */

/* Sorts the files by table, keeping their order within each. */
static int take_files(restore *r, const wire_restore *m)
{
    for (size_t i = 0; i < m->files_n; i++) {
        const wire_file *f = &m->files[i];
        int rc = ckpt_name_check(f->name);
        if (rc)
            return rc;
        if (f->no >= r->tables_n || r->pushes[f->no] == UINT64_MAX)
            return err_set(PERSIA_EARG, "file %s is of table number %u, "
                           "which is not to be restored", f->name, f->no);
        r->first[f->no + 1]++;
    }
    for (uint32_t i = 0; i < r->tables_n; i++)
        r->first[i + 1] += r->first[i];
    for (size_t i = 0; i < m->files_n; i++) {
        const wire_file *f = &m->files[i];
        ckpt_file *to = &r->files[r->first[f->no]++];
        memcpy(to->name, f->name, CKPT_NAME);
        to->rows = f->rows;
        to->bytes = f->bytes;
        to->crc = f->crc;
    }
    for (uint32_t i = r->tables_n; i > 0; i--) /* each is one too far */
        r->first[i] = r->first[i - 1];
    r->first[0] = 0;
    return PERSIA_OK;
}

static int restore_make(ps_service *s, const wire_restore *m, restore **out)
{
    restore *r = calloc(1, sizeof *r);
    *out = r;
    if (!r)
        return err_set(PERSIA_ENOMEM, "no memory for a restore");
    r->s = s;
    r->fd = -1;
    memcpy(r->root, m->root, sizeof r->root);
    memcpy(r->folder, m->folder, sizeof r->folder);
    r->lineage = m->lineage;
    r->id = m->restore;
    r->updates = m->updates;
    r->t = m->t;
    r->step = m->step;
    if (!m->lineage)
        return err_set(PERSIA_EARG, "the rows of a restore need a lineage");
    if (m->pushes_n > ps_tables(tables_of(s)))
        return err_set(PERSIA_EARG, "%zu tables are to be restored, only %u "
                       "were declared", m->pushes_n, ps_tables(tables_of(s)));
    r->tables_n = (uint32_t)m->pushes_n;
    r->pushes = calloc(m->pushes_n + 1, sizeof *r->pushes);
    r->staged = calloc(m->pushes_n + 1, sizeof *r->staged);
    r->first = calloc(m->pushes_n + 2, sizeof *r->first);
    r->files = calloc(m->files_n + 1, sizeof *r->files);
    if (!r->pushes || !r->staged || !r->first || !r->files)
        return err_set(PERSIA_ENOMEM, "no memory for a restore");
    if (m->pushes_n)
        memcpy(r->pushes, m->pushes, m->pushes_n * sizeof *r->pushes);
    int rc = take_files(r, m);
    if (!rc)
        rc = ledger_create(LEDGER_STREAMS, &r->ledger);
    if (!rc)
        rc = ledger_fill(r->ledger, m->ledgers, m->ledgers_n);
    return rc ? rc
              : folder_open(s, m->root, m->folder, m->proof, &r->fd);
}

/* ---- the reader --------------------------------------------------------- */

static int stage(restore *r, sched *threads, uint32_t i)
{
    const ckpt_file *files = r->files + r->first[i];
    const size_t n = r->first[i + 1] - r->first[i];
    ps *tables = tables_of(r->s);
    const table_config *config = table_get_config(ps_table(tables, i));
    const unsigned group = sched_threads(threads);
    table_stats stats;
    uint32_t no, shards;
    int rc = PERSIA_OK;
    for (size_t at = 0; at < n && !rc; at += group) {
        rc = interrupt_poll();
        if (!rc)
            rc = ckpt_verify(threads, config, r->fd, files + at,
                             n - at < group ? n - at : group);
    }
    if (!rc)
        rc = table_create(config, &r->staged[i]);
    if (rc)
        return rc;
    /* Beyond the clocks of all rows: whichever is older is evicted first,
     * should the capacity be smaller than it was. */
    table_set_clock(r->staged[i], r->pushes[i] + 1);
    shard_place(r->s->shard, &no, &shards);
    rc = ckpt_restore(threads, r->staged[i], r->fd, files, n, no, shards);
    table_get_stats(r->staged[i], &stats);
    pthread_mutex_lock(&r->s->admin_lock);
    r->rows += stats.rows;
    pthread_mutex_unlock(&r->s->admin_lock);
    return rc;
}

static void *reader(void *arg)
{
    restore *r = arg;
    ps_service *s = r->s;
    sched *threads = NULL;
    interrupt_watch(&r->stop);
    int rc = sched_create(sched_threads(ps_sched(tables_of(s))), &threads);
    for (uint32_t i = 0; i < r->tables_n && !rc; i++)
        if (r->pushes[i] != UINT64_MAX)
            rc = stage(r, threads, i);
    sched_destroy(threads);
    pthread_mutex_lock(&s->admin_lock);
    r->running = 0;
    r->done = !rc;
    r->code = rc;
    snprintf(r->text, sizeof r->text, "%s", rc ? err_text() : "");
    if (r->forgotten)
        restore_free(r);
    s->readers--;
    pthread_cond_broadcast(&s->ended);
    pthread_mutex_unlock(&s->admin_lock);
    return NULL;
}

/* ---- putting the rows in their place ------------------------------------ */

static int commit(restore *r)
{
    const shard_rows rows = {.tables_n = r->tables_n,
                             .tables = r->staged,
                             .pushes = r->pushes,
                             .ledger = r->ledger,
                             .lineage = r->lineage,
                             .restore = r->id,
                             .updates = r->updates,
                             .step = r->step,
                             .t = r->t};
    return shard_exchange(r->s->shard, &rows);
}

/* ---- the requests ------------------------------------------------------- */

/* Takes it out; what is to be freed, which may take a while. */
static restore *take_locked(ps_service *s)
{
    restore *r = s->restore;
    s->restore = NULL;
    if (!r)
        return NULL;
    __atomic_store_n(&r->stop, 1, __ATOMIC_RELEASE);
    r->forgotten = 1;
    return r->running ? NULL : r;
}

void restore_drop_locked(ps_service *s)
{
    restore_free(take_locked(s));
}

uint64_t restore_expire(ps_service *s, uint64_t now)
{
    uint64_t next = UINT64_MAX;
    restore *old = NULL;
    pthread_mutex_lock(&s->admin_lock);
    if (s->restore && s->restore->asked + FORGET_NS <= now)
        old = take_locked(s);
    if (s->restore)
        next = s->restore->asked + FORGET_NS;
    pthread_mutex_unlock(&s->admin_lock);
    restore_free(old);
    return next;
}

static int is_same(const restore *r, const wire_restore *m)
{
    return r && !strcmp(r->root, m->root) && !strcmp(r->folder, m->folder) &&
           (!m->lineage || m->lineage == r->lineage);
}

/* *old: to be freed without the lock, here and below. */
static int prepare_locked(ps_service *s, const wire_restore *m,
                          wire_restore_reply *reply, restore **old)
{
    restore *r = s->restore;
    if (!is_same(r, m)) {
        if (r && r->running)
            return err_set(PERSIA_EARG, "a restore of %s/%s is under way; "
                           "wait for its end", r->root, r->folder);
        int rc = restore_make(s, m, &r);
        if (!rc)
            rc = thread_start(NULL, reader, r, "persia-restore");
        if (rc) {
            restore_free(r);
            return rc;
        }
        *old = take_locked(s);
        r->running = 1;
        s->readers++;
        s->restore = r;
    }
    r->asked = clock_ns();
    reply->done = (uint32_t)r->done;
    reply->rows = r->rows;
    if (!r->code)
        return PERSIA_OK;
    int rc = err_set(r->code, "%s/%s: %s", r->root, r->folder, r->text);
    *old = take_locked(s); /* asked for once more it begins anew */
    return rc;
}

static int commit_locked(ps_service *s, const wire_restore *m,
                         wire_restore_reply *reply, restore **old)
{
    restore *r = s->restore;
    reply->done = 1;
    if (!r && m->lineage && m->lineage == shard_lineage(s->shard))
        return PERSIA_OK; /* the answer to the first was lost */
    if (!is_same(r, m) || !r->done)
        return err_set(PERSIA_EARG, "no restore of %s/%s is prepared: it was "
                       "given up, nobody asked about it for 10 minutes, or "
                       "the server was started anew", m->root, m->folder);
    /* No rows come while one is made. */
    snapshot_drop_abandoned_locked(s, m->root);
    int rc = commit(r);
    if (rc)
        return rc;
    reply->rows = r->rows;
    *old = take_locked(s); /* with the rows that were there before */
    return PERSIA_OK;
}

static int run_locked(ps_service *s, const wire_restore *m,
                      wire_restore_reply *reply, restore **old)
{
    if (m->verb == RESTORE_PREPARE && atomic_load(&s->closed))
        return err_set(PERSIA_EUNAVAILABLE, "the server is stopping");
    if (m->verb == RESTORE_PREPARE)
        return prepare_locked(s, m, reply, old);
    if (m->verb == RESTORE_COMMIT)
        return commit_locked(s, m, reply, old);
    if (is_same(s->restore, m))
        *old = take_locked(s);
    return PERSIA_OK;
}

void restore_run(void *service, const wire_restore *m, shard_done done,
                 void *ctx)
{
    ps_service *s = service;
    wire_restore_reply message = {0};
    restore *old = NULL;
    int rc = shard_check_boot(s->shard, &m->caller);
    if (!rc) {
        pthread_mutex_lock(&s->admin_lock);
        rc = run_locked(s, m, &message, &old);
        pthread_mutex_unlock(&s->admin_lock);
        if (m->verb == RESTORE_PREPARE)
            service_wake(s, 0); /* the timer: to forget it some day */
    }
    if (old && m->verb == RESTORE_COMMIT)
        shard_drop(s->shard, PERSIA_ESTALE, "other rows were restored "
                   "meanwhile");
    restore_free(old);
    shard_reply reply = {.message = rc ? NULL : &message};
    done(ctx, rc, &reply);
}
