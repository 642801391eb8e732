/* job.c: snapshots and restores: states, progress, requests. */
#include "shard/private.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t SECOND = 1000000000;
/* A job may be without progress for as long as the call that began it could
 * wait, and for so long at least: a file may take a while to sync. */
#define PATIENCE_NS (30 * SECOND)
#define FORGET_NS (600 * SECOND)
/* The same where another one is wanted.  Clients ask every five seconds. */
#define ABANDONED_NS (30 * SECOND)

#define OTHER_ROWS "other rows were restored meanwhile"

static const char *const kinds[JOB_KINDS] = {"snapshot into",
                                             "restore from"};

/* ---- states ------------------------------------------------------------- */

/* The table of job.h: bit `to` of moves[from]. */
static const unsigned moves[JOB_STATES] = {
    [JOB_STARTING] = 1 << JOB_RUNNING | 1 << JOB_FAILED | 1 << JOB_DROPPED,
    [JOB_RUNNING] = 1 << JOB_DONE | 1 << JOB_FAILED | 1 << JOB_DROPPED,
    [JOB_DONE] = 1 << JOB_REPLACING | 1 << JOB_DROPPED,
    [JOB_REPLACING] = 1 << JOB_DONE | 1 << JOB_FAILED | 1 << JOB_DROPPED,
    [JOB_FAILED] = 1 << JOB_DROPPED,
};

static void job_move_locked(job *n, enum job_state to)
{
    assert(moves[n->state] >> to & 1);
    if (n->state == JOB_REPLACING && to != JOB_DONE)
        restore_stop(n->s);
    n->state = to;
    if (to != JOB_FAILED && to != JOB_DROPPED)
        return;
    __atomic_store_n(&n->flag.stop, 1, __ATOMIC_RELEASE);
    for (uint32_t i = 0; n->cuts && i < n->tables_n; i++)
        if (n->cuts[i])
            persia_table_cut_stop(n->cuts[i]);
}

static int job_is_working(const job *n)
{
    return n->state == JOB_STARTING || n->state == JOB_RUNNING ||
           n->state == JOB_REPLACING;
}

/* With the text of this thread's error. */
static void job_fail_locked(job *n, int code)
{
    n->code = code;
    snprintf(n->text, sizeof n->text, "%s", persia_err_text());
    job_move_locked(n, JOB_FAILED);
}

/* All that it has. */
static void job_clear(job *n)
{
    if (n->kind == JOB_SNAPSHOT)
        snapshot_free(n);
    else
        restore_free(n);
    if (n->io)
        n->io->close(n->io);
    free(n->pushes);
    free(n->files);
}

void job_put(job *n)
{
    if (!n)
        return;
    pthread_mutex_lock(&n->s->jobs.lock);
    int last = --n->refs == 0;
    pthread_mutex_unlock(&n->s->jobs.lock);
    if (!last)
        return;
    job_clear(n);
    free(n);
}

/* Drops the job of a slot; what the caller has to put, without the lock. */
static job *job_take_locked(jobs *j, int slot)
{
    job *n = j->of[slot];
    j->of[slot] = NULL;
    if (n)
        job_move_locked(n, JOB_DROPPED);
    return n;
}

static job *job_hold_locked(job *n)
{
    n->refs++;
    return n;
}

/* ---- the thread of a job ------------------------------------------------ */

/* Where a running job is (NULL: where one can be); NULL: nowhere. */
static job **job_place_locked(jobs *j, const job *n)
{
    for (int k = 0; k < JOB_THREADS; k++)
        if (j->running[k] == n)
            return &j->running[k];
    return NULL;
}

/* STARTING is over: takes the place of the job that is there (*old), and the
 * cut in the same moment. */
static int job_run_locked(job *n, job **old)
{
    jobs *j = &n->s->jobs;
    if (n->state != JOB_STARTING)
        return persia_interrupt_poll(); /* it was stopped */
    const int slot = (int)n->kind;
    assert(j->of[slot + JOB_KINDS] == n);
    *old = job_take_locked(j, slot);
    j->of[slot] = n;
    j->of[slot + JOB_KINDS] = NULL;
    int rc = n->kind == JOB_SNAPSHOT ? snapshot_cut(n) : PERSIA_OK;
    if (!rc)
        job_move_locked(n, JOB_RUNNING);
    return rc;
}

/* The thread of a commit in place.  Its caller holds the lock until the rows
 * are refused. */
static void job_replace_body(void *ctx, sched *threads)
{
    job *n = ctx;
    persia_interrupt_watch(&n->flag);
    pthread_mutex_lock(&n->s->jobs.lock);
    pthread_mutex_unlock(&n->s->jobs.lock);
    wait_drop(n->s, PERSIA_ESTALE, OTHER_ROWS);
    n->result = restore_replace(n, threads);
}

static void job_body(void *ctx, sched *threads)
{
    job *n = ctx, *old = NULL;
    persia_interrupt_watch(&n->flag);
    int rc = n->io->open(n->io);
    if (!rc) {
        pthread_mutex_lock(&n->s->jobs.lock);
        rc = job_run_locked(n, &old);
        pthread_mutex_unlock(&n->s->jobs.lock);
        job_put(old);
    }
    if (!rc)
        rc = n->kind == JOB_SNAPSHOT ? snapshot_write(n, threads)
                                     : restore_stage(n, threads);
    n->result = rc;
}

/* Its rows are staged after the tables were emptied: it cannot be given up any
 * more, unless it was. */
static void job_exchange_locked(job *n)
{
    int rc = restore_commit(n);
    n->exchanged = !rc;
    if (rc)
        job_fail_locked(n, rc);
}

/* It is done.  That of a log is no checkpoint. */
static void job_note_snapshot_locked(const job *n)
{
    jobs *j = &n->s->jobs;
    if (n->kind != JOB_SNAPSHOT || !strcmp(n->root, CKPT_LOG_ROOT))
        return;
    j->seconds = persia_clock_seconds();
    j->ns = persia_clock_ns() - n->began;
}

/* Nothing runs for it any more. */
static void job_end(void *ctx)
{
    job *n = ctx;
    shard *s = n->s;
    jobs *j = &s->jobs;
    pthread_mutex_lock(&j->lock);
    const int replaces = n->state == JOB_REPLACING;
    if (n->result && job_is_working(n))
        job_fail_locked(n, n->result);
    else if (replaces)
        job_exchange_locked(n);
    if (!n->result && job_is_working(n)) {
        job_move_locked(n, JOB_DONE);
        job_note_snapshot_locked(n);
    }
    if (n->exchanged) { /* what waits is of the rows that were */
        pthread_mutex_unlock(&j->lock);
        wait_drop(s, PERSIA_ESTALE, OTHER_ROWS);
        pthread_mutex_lock(&j->lock);
    }
    const int last = n->refs == 1; /* it was dropped */
    if (last) {
        pthread_mutex_unlock(&j->lock);
        job_clear(n);
        pthread_mutex_lock(&j->lock);
    }
    *job_place_locked(j, n) = NULL;
    n->refs--;
    if (last)
        free(n);
    if (s->env.ended)
        s->env.ended(s->env.ctx);
    pthread_mutex_unlock(&j->lock);
}

static int job_start_locked(job *n, void (*body)(void *ctx, sched *threads))
{
    jobs *j = &n->s->jobs;
    job **place = job_place_locked(j, NULL);
    const unsigned threads =
        n->kind == JOB_SNAPSHOT
            ? 2 /* one reads the cut, one writes */
            : persia_sched_threads(persia_tables_sched(n->s->p));
    n->refs++; /* the thread's */
    *place = n;
    int rc = persia_sched_detach(threads, body, job_end, n, "persia-job");
    if (!rc)
        return PERSIA_OK;
    n->refs--;
    *place = NULL;
    return rc;
}

/* ---- beginning ---------------------------------------------------------- */

int job_make(shard *s, enum job_kind kind, const char *root,
             const char *folder, const char *proof, uint64_t deadline,
             job **out)
{
    ckpt_io *io;
    *out = NULL;
    if (!s->env.files.find)
        return persia_err_set(PERSIA_EARG, "this shard has no snapshots");
    int rc = s->env.files.find(s->env.files.ctx, root, folder, proof,
                               kind == JOB_SNAPSHOT, &io);
    if (rc)
        return rc;
    job *n = calloc(1, sizeof *n);
    if (!n) {
        io->close(io);
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for a snapshot or restore");
    }
    *out = n;
    n->s = s;
    n->kind = kind;
    n->refs = 1;
    n->io = io;
    n->moved = n->began = n->asked = persia_clock_ns();
    n->patience = PATIENCE_NS;
    if (deadline > n->asked && deadline - n->asked > PATIENCE_NS)
        n->patience = deadline - n->asked;
    snprintf(n->root, sizeof n->root, "%s", root);
    snprintf(n->folder, sizeof n->folder, "%s", folder);
    snprintf(n->proof, sizeof n->proof, "%s", proof);
    return PERSIA_OK;
}

/* Whether the client of a job seems to be gone. */
static int job_is_abandoned(const job *n)
{
    return n->state == JOB_FAILED ||
           n->asked + ABANDONED_NS <= persia_clock_ns();
}

/* A cut that the server takes for its log gives way to those of clients. */
static int job_is_own(const job *n)
{
    return !strcmp(n->root, CKPT_LOG_ROOT);
}

static int job_busy(const job *n)
{
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "a %s %s/%s is there already; wait "
                          "for its end, or, if its client has died, for 30 s",
                          kinds[n->kind], n->root, n->folder);
}

static int job_too_many(void)
{
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "%d earlier snapshots and restores still wait for "
                          "their files: the folder of checkpoints hangs",
                          JOB_THREADS);
}

/* Starts it.  *old, for the caller to put: one that did not get so far. */
static int job_begin_locked(jobs *j, job *n, job **old)
{
    if (j->closed)
        return persia_err_set(PERSIA_EUNAVAILABLE, "the server is stopping");
    if (!job_place_locked(j, NULL))
        return job_too_many();
    const int slot = (int)n->kind + JOB_KINDS;
    if (j->of[slot] && job_is_working(j->of[slot]) &&
        !job_is_abandoned(j->of[slot]))
        return job_busy(j->of[slot]);
    *old = job_take_locked(j, slot);
    int rc = job_start_locked(n, job_body);
    if (!rc)
        j->of[slot] = job_hold_locked(n);
    return rc;
}

static int job_unknown(enum job_kind kind, const char *root,
                       const char *folder, const char *what)
{
    return persia_err_set(
        PERSIA_EARG,
        "no %s %s/%s is %s: it was ended, was not "
        "asked about for 10 minutes, or the server was started "
        "again",
        kinds[kind], root, folder, what);
}

static int job_failure(const job *n)
{
    return persia_err_set(n->code, "the %s %s/%s failed: %s", kinds[n->kind],
                          n->root, n->folder, n->text);
}

/* ---- progress ----------------------------------------------------------- */

static void job_watch_locked(job *n, uint64_t at)
{
    const uint64_t polls = __atomic_load_n(&n->flag.polls, __ATOMIC_RELAXED);
    if (polls != n->polls) {
        n->polls = polls;
        n->moved = at;
    } else if (at >= n->moved && at - n->moved >= n->patience) {
        persia_err_set(PERSIA_ETIMEOUT,
                       "no progress for %llu s: its files hang, or "
                       "are too slow",
                       (unsigned long long)(n->patience / SECOND));
        job_fail_locked(n, PERSIA_ETIMEOUT);
    }
}

static uint64_t job_later(uint64_t at, uint64_t by)
{
    return at > UINT64_MAX - by ? UINT64_MAX : at + by;
}

/* When to look again. */
static uint64_t job_tick_locked(jobs *j, int slot, uint64_t at, job **old)
{
    job *n = j->of[slot];
    if (n && n->state == JOB_REPLACING) {
        job_watch_locked(n, at);
        return n->state == JOB_REPLACING ? job_later(n->moved, n->patience)
                                         : n->asked + FORGET_NS;
    }
    if (n && n->asked + FORGET_NS <= at) {
        *old = job_take_locked(j, slot);
        n = NULL;
    }
    if (!n)
        return UINT64_MAX;
    if (job_is_working(n))
        job_watch_locked(n, at);
    const uint64_t forget = n->asked + FORGET_NS;
    const uint64_t stall = job_later(n->moved, n->patience);
    return job_is_working(n) && stall < forget ? stall : forget;
}

uint64_t jobs_tick(shard *s, uint64_t at)
{
    jobs *j = &s->jobs;
    uint64_t next = UINT64_MAX;
    job *old[JOB_SLOTS] = {NULL};
    pthread_mutex_lock(&j->lock);
    for (int k = 0; k < JOB_SLOTS; k++) {
        uint64_t one = job_tick_locked(j, k, at, &old[k]);
        if (one < next)
            next = one;
    }
    pthread_mutex_unlock(&j->lock);
    for (int k = 0; k < JOB_SLOTS; k++)
        job_put(old[k]);
    return next;
}

int jobs_restores(shard *s)
{
    pthread_mutex_lock(&s->jobs.lock);
    const int is = s->jobs.of[JOB_RESTORE] ||
                   s->jobs.of[JOB_RESTORE + JOB_KINDS];
    pthread_mutex_unlock(&s->jobs.lock);
    return is;
}

/* That of a client which is there: it lasts until the checkpoint is whole. */
static int job_is_save(const job *n)
{
    return n && !job_is_own(n) && !job_is_abandoned(n);
}

int jobs_saves(shard *s)
{
    pthread_mutex_lock(&s->jobs.lock);
    const int is = job_is_save(s->jobs.of[JOB_SNAPSHOT]) ||
                   job_is_save(s->jobs.of[JOB_SNAPSHOT + JOB_KINDS]);
    pthread_mutex_unlock(&s->jobs.lock);
    return is;
}

uint64_t jobs_restored(shard *s)
{
    uint64_t rows = 0;
    pthread_mutex_lock(&s->jobs.lock);
    for (int k = JOB_RESTORE; k < JOB_SLOTS; k += JOB_KINDS)
        if (s->jobs.of[k])
            rows += atomic_load(&s->jobs.of[k]->rows);
    pthread_mutex_unlock(&s->jobs.lock);
    return rows;
}

/* Someone asks. */
static void job_ask_locked(job *n)
{
    n->asked = persia_clock_ns();
    if (job_is_working(n))
        job_watch_locked(n, n->asked);
}

/* ---- requests: snapshots ------------------------------------------------ */

static int is_snapshot(const job *n, const wire_snapshot *m)
{
    return n && n->kind == JOB_SNAPSHOT && !strcmp(n->root, m->root) &&
           !strcmp(n->folder, m->folder) && !strcmp(n->proof, m->proof);
}

/* The slot of a message's job; -1: there is none. */
static int find_snapshot(const jobs *j, const wire_snapshot *m)
{
    for (int k = JOB_SNAPSHOT; k < JOB_SLOTS; k += JOB_KINDS)
        if (is_snapshot(j->of[k], m))
            return k;
    return -1;
}

/* Whether a thread runs for it. */
static int runs_snapshot(const jobs *j, const wire_snapshot *m)
{
    int runs = 0;
    for (int k = 0; k < JOB_THREADS; k++)
        runs |= is_snapshot(j->running[k], m);
    return runs;
}

static int begin_snapshot_locked(jobs *j, const wire_snapshot *m, job *fresh,
                                 job **old, job **failed)
{
    const int slot = find_snapshot(j, m);
    const job *n = j->of[JOB_SNAPSHOT];
    int rc;
    if (slot >= 0 && j->of[slot]->state != JOB_FAILED)
        return PERSIA_OK; /* the answer to the first was lost */
    if (!job_is_own(fresh) && (rc = check_stays(fresh->s)))
        return rc;
    /* One process saves into a root at a time: another one has died. */
    if (n && strcmp(n->root, m->root) != 0 && !job_is_abandoned(n) &&
        !job_is_own(n))
        return job_busy(n);
    if (slot == JOB_SNAPSHOT) /* it has failed, and begins again */
        *failed = job_take_locked(j, slot);
    return job_begin_locked(j, fresh, old);
}

static int answer_snapshot_locked(job *n, wire_snapshot_reply *reply,
                                  job **held)
{
    job_ask_locked(n);
    if (n->state == JOB_FAILED)
        return job_failure(n);
    reply->started = n->state != JOB_STARTING;
    reply->done = n->state == JOB_DONE;
    reply->rows_written = atomic_load(&n->rows);
    *held = job_hold_locked(n);
    if (!reply->started)
        return PERSIA_OK;
    reply->restore = n->moment.restore;
    reply->updates = n->moment.updates;
    reply->step = n->moment.step;
    reply->t = n->moment.t;
    reply->log = n->moment.log;
    reply->pushes = n->pushes;
    reply->pushes_n = n->tables_n;
    reply->ledgers = n->moment.ledgers;
    reply->ledgers_n = n->moment.ledgers_n;
    if (reply->done) {
        reply->files = n->files;
        reply->files_n = n->files_n;
    }
    return PERSIA_OK;
}

static int ask_snapshot(shard *s, const wire_snapshot *m, uint64_t deadline,
                        wire_snapshot_reply *reply, job **held)
{
    jobs *j = &s->jobs;
    job *fresh = NULL, *old = NULL, *failed = NULL;
    int rc = persia_shard_check_boot(s, &m->caller);
    if (!rc && m->verb == SNAPSHOT_BEGIN)
        rc = snapshot_make(s, m, deadline, &fresh);
    pthread_mutex_lock(&j->lock);
    if (!rc && m->verb == SNAPSHOT_BEGIN)
        rc = begin_snapshot_locked(j, m, fresh, &old, &failed);
    const int slot = find_snapshot(j, m);
    if (rc) {
        ;
    } else if (m->verb == SNAPSHOT_END) {
        const job *n = slot < 0 ? NULL : j->of[slot];
        reply->whole = n && n->state == JOB_DONE;
        reply->failed = n && n->state == JOB_FAILED;
        reply->rows_written = n ? atomic_load(&n->rows) : 0;
        old = n ? job_take_locked(j, slot) : NULL;
        reply->started = 1;
        reply->done = !runs_snapshot(j, m);
    } else if (slot >= 0) {
        rc = answer_snapshot_locked(j->of[slot], reply, held);
    } else {
        rc = job_unknown(JOB_SNAPSHOT, m->root, m->folder, "known");
    }
    pthread_mutex_unlock(&j->lock);
    job_put(fresh);
    job_put(old);
    job_put(failed);
    return rc;
}

/* A reply that points into its job. */
typedef struct snapshot_answer {
    wire_snapshot_reply m;
    job *held; /* or NULL */
} snapshot_answer;

static void snapshot_release(shard_reply *reply)
{
    snapshot_answer *t = reply->owner;
    job_put(t->held);
    free(t);
}

void snapshot_run(shard *s, const shard_call *c, const wire_snapshot *m)
{
    snapshot_answer *t = calloc(1, sizeof *t);
    shard_reply reply = {.message = NULL};
    int rc = t ? ask_snapshot(s, m, c->deadline, &t->m, &t->held)
               : persia_err_set(PERSIA_ENOMEM, "no memory for an answer");
    if (m->verb == SNAPSHOT_BEGIN && s->env.wake)
        s->env.wake(s->env.ctx, 0);
    if (rc)
        free(t); /* it holds nothing */
    else
        reply = (shard_reply){&t->m, snapshot_release, t};
    call_end(c, rc, &reply);
}

void persia_shard_drop_snapshot(shard *s)
{
    jobs *j = &s->jobs;
    pthread_mutex_lock(&j->lock);
    job *old = job_take_locked(j, JOB_SNAPSHOT);
    job *next = job_take_locked(j, JOB_SNAPSHOT + JOB_KINDS);
    pthread_mutex_unlock(&j->lock);
    job_put(old);
    job_put(next);
}

/* ---- requests: restores ------------------------------------------------- */

static int is_restore(const job *n, const wire_restore *m)
{
    return n && n->kind == JOB_RESTORE && !strcmp(n->root, m->root) &&
           !strcmp(n->folder, m->folder) &&
           (!m->lineage || m->lineage == n->lineage);
}

static int find_restore(const jobs *j, const wire_restore *m)
{
    for (int k = JOB_RESTORE; k < JOB_SLOTS; k += JOB_KINDS)
        if (is_restore(j->of[k], m))
            return k;
    return -1;
}

static int runs_restore(const jobs *j, const wire_restore *m)
{
    int runs = 0;
    for (int k = 0; k < JOB_THREADS; k++)
        runs |= is_restore(j->running[k], m);
    return runs;
}

static int job_abort_locked(jobs *j, const wire_restore *m,
                            wire_restore_reply *reply, job **old)
{
    const int slot = find_restore(j, m);
    if (slot >= 0 && j->of[slot]->state != JOB_REPLACING) /* too late */
        *old = job_take_locked(j, slot);
    reply->done = !runs_restore(j, m);
    return PERSIA_OK;
}

static int job_prepare_locked(jobs *j, const wire_restore *m, job *fresh,
                              wire_restore_reply *reply, job **old,
                              job **failed)
{
    job *n = j->of[JOB_RESTORE];
    int slot = find_restore(j, m), rc = PERSIA_OK;
    if (slot < 0) {
        if (n && job_is_working(n) && !job_is_abandoned(n))
            return job_busy(n);
        if ((rc = job_begin_locked(j, fresh, old)))
            return rc;
        slot = JOB_RESTORE + JOB_KINDS;
    }
    n = j->of[slot];
    job_ask_locked(n);
    reply->done = n->state == JOB_DONE;
    reply->rows = atomic_load(&n->rows);
    if (n->state != JOB_FAILED)
        return PERSIA_OK;
    rc = job_failure(n);
    *failed = job_take_locked(j, slot); /* asked for once more it begins */
    return rc;
}

/* Starts what restore_commit() would do at once. */
static int job_replace_locked(jobs *j, job *n)
{
    const job *writes = j->of[JOB_SNAPSHOT];
    if (writes && job_is_working(writes))
        return job_busy(writes);
    if (!job_place_locked(j, NULL))
        return job_too_many();
    n->moved = persia_clock_ns();
    int rc = job_start_locked(n, job_replace_body);
    if (rc)
        return rc;
    job_move_locked(n, JOB_REPLACING);
    return restore_refuse_rows(n);
}

/* *done: the rows are exchanged. */
static int job_exchange_rows_locked(jobs *j, job *n, const wire_restore *m,
                                    uint32_t *done, job **snapshot)
{
    const job *writes = j->of[JOB_SNAPSHOT];
    *done = 1;
    if (n->exchanged)
        return PERSIA_OK;
    /* No rows arrive while one is made. */
    if (writes && (!strcmp(writes->root, m->root) ||
                   job_is_abandoned(writes) || job_is_own(writes)))
        *snapshot = job_take_locked(j, JOB_SNAPSHOT);
    *done = !n->in_place;
    return n->in_place ? job_replace_locked(j, n) : restore_commit(n);
}

static int job_commit_locked(shard *s, const wire_restore *m,
                             wire_restore_reply *reply, job **old,
                             job **snapshot)
{
    jobs *j = &s->jobs;
    job *n = j->of[JOB_RESTORE];
    reply->done = 1;
    if (!n && m->lineage && m->lineage == atomic_load(&s->lineage))
        return PERSIA_OK; /* the answer to the first was lost */
    if (find_restore(j, m) != JOB_RESTORE)
        return job_unknown(JOB_RESTORE, m->root, m->folder, "prepared");
    job_ask_locked(n);
    reply->rows = atomic_load(&n->rows);
    if (n->state == JOB_FAILED)
        return job_failure(n);
    reply->done = n->state != JOB_REPLACING;
    if (!reply->done)
        return PERSIA_OK;
    if (n->state != JOB_DONE)
        return job_unknown(JOB_RESTORE, m->root, m->folder, "prepared");
    int rc = job_exchange_rows_locked(j, n, m, &reply->done, snapshot);
    if (!rc && reply->done)
        *old = job_take_locked(j, JOB_RESTORE); /* with the rows that were */
    return rc;
}

static int ask_restore(shard *s, const wire_restore *m, uint64_t deadline,
                       wire_restore_reply *reply, job **old)
{
    jobs *j = &s->jobs;
    job *fresh = NULL, *other = NULL;
    int rc = persia_shard_check_boot(s, &m->caller);
    if (!rc && m->verb == RESTORE_PREPARE)
        rc = restore_make(s, m, deadline, &fresh);
    pthread_mutex_lock(&j->lock);
    if (rc)
        ;
    else if (m->verb == RESTORE_PREPARE)
        rc = job_prepare_locked(j, m, fresh, reply, old, &other);
    else if (m->verb == RESTORE_COMMIT)
        rc = job_commit_locked(s, m, reply, old, &other);
    else
        rc = job_abort_locked(j, m, reply, old);
    pthread_mutex_unlock(&j->lock);
    job_put(fresh);
    job_put(other);
    return rc;
}

void restore_run(shard *s, const shard_call *c, const wire_restore *m)
{
    wire_restore_reply reply = {0};
    job *old = NULL;
    int rc = ask_restore(s, m, c->deadline, &reply, &old);
    if (!rc && old && m->verb == RESTORE_COMMIT)
        wait_drop(s, PERSIA_ESTALE, OTHER_ROWS);
    if (!rc && reply.done && m->verb == RESTORE_COMMIT)
        rc = logged_wait(s);
    if (m->verb == RESTORE_PREPARE && s->env.wake)
        s->env.wake(s->env.ctx, 0);
    call_reply(c, rc, &reply);
    job_put(old);
}

/* ---- life --------------------------------------------------------------- */

void jobs_init(jobs *j)
{
    pthread_mutex_init(&j->lock, NULL);
}

void jobs_free(jobs *j)
{
    pthread_mutex_destroy(&j->lock);
}

int persia_shard_snapshot(shard *s, uint64_t *seconds, uint64_t *ns)
{
    pthread_mutex_lock(&s->jobs.lock);
    *seconds = s->jobs.seconds;
    *ns = s->jobs.ns;
    pthread_mutex_unlock(&s->jobs.lock);
    return jobs_saves(s);
}

uint32_t persia_shard_end_jobs(shard *s)
{
    jobs *j = &s->jobs;
    job *old[JOB_SLOTS];
    pthread_mutex_lock(&j->lock);
    j->closed = 1;
    for (int k = 0; k < JOB_SLOTS; k++)
        old[k] = job_take_locked(j, k);
    pthread_mutex_unlock(&j->lock);
    for (int k = 0; k < JOB_SLOTS; k++)
        job_put(old[k]);
    uint32_t running = 0;
    pthread_mutex_lock(&j->lock);
    for (int k = 0; k < JOB_THREADS; k++)
        running += j->running[k] != NULL;
    pthread_mutex_unlock(&j->lock);
    return running;
}
