/* sched.c: loops over indices on several threads, and background jobs.
 *
 * A loop lives on its caller's stack and is linked into the pool while it
 * has indices to claim.  Indices are claimed with an atomic counter; joining
 * and leaving a loop goes through the pool's lock, so the caller knows that
 * no thread touches the loop any more when its `users` is 0.
 */
#include "sched/sched.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS_MAX = 1024 };

/* How long the caller of a loop watches for stragglers before it sleeps. */
enum { LINGER_NS = 4000 };

typedef struct loop {
    sched_loop_fn fn;
    void *ctx;
    size_t n;
    _Atomic(size_t) next;    /* first index not claimed yet */
    _Atomic(unsigned) users; /* workers inside; written under the lock */
    /* The rest is guarded by the pool's lock. */
    struct loop *link;
    int asleep; /* the caller sleeps on `left` */
    pthread_cond_t left;
    err_kept error; /* of the lowest failing index */
    size_t failed;
} loop;

typedef struct job {
    sched_job_fn fn;
    void *ctx;
    struct job *link;
} job;

struct sched {
    unsigned threads;  /* constant */
    pthread_t *worker; /* [workers], constant */
    unsigned workers;
    unsigned background_max; /* constant */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work;  /* a loop was linked, or stop */
    loop *loops;          /* oldest first */
    unsigned idle;        /* workers that sleep on `work` */
    int stop;

    pthread_mutex_t job_lock; /* guards what follows */
    pthread_cond_t job_added; /* a job was queued, or job_stop */
    job *first, **last;
    unsigned queued;     /* jobs that no thread has taken */
    unsigned idle_jobs;  /* threads that sleep on `job_added` */
    pthread_t *background; /* [background_max] */
    unsigned background_n;
    int job_stop;

    interrupt_flag flag; /* of what jobs wait for */
};

/* Whether this thread is one of a pool's. */
static _Thread_local int of_a_pool;

static _Atomic(const sched_team *) installed_team;

void persia_sched_team_install(const sched_team *team)
{
    atomic_store(&installed_team, team);
}

/* ---- loops ---- */

static void loop_fail(pthread_mutex_t *lock, loop *l, size_t index, int code)
{
    pthread_mutex_lock(lock);
    if (l->error.code == PERSIA_OK || index < l->failed) {
        persia_err_keep(&l->error, code);
        l->failed = index;
    }
    pthread_mutex_unlock(lock);
}

static void loop_run(pthread_mutex_t *lock, loop *l)
{
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&l->next, 1,
                                             memory_order_relaxed);
        if (i >= l->n)
            return;
        int code = l->fn(l->ctx, i);
        if (code != PERSIA_OK)
            loop_fail(lock, l, i, code);
    }
}

static loop *find_loop(sched *s)
{
    for (loop *l = s->loops; l; l = l->link)
        if (atomic_load_explicit(&l->next, memory_order_relaxed) < l->n)
            return l;
    return NULL;
}

static void *sched_worker_main(void *arg)
{
    sched *s = arg;
    of_a_pool = 1;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        loop *l = find_loop(s);
        if (!l) {
            if (s->stop)
                break;
            s->idle++;
            persia_cond_wait(&s->work, &s->lock);
            s->idle--;
            continue;
        }
        atomic_fetch_add_explicit(&l->users, 1, memory_order_relaxed);
        pthread_mutex_unlock(&s->lock);

        loop_run(&s->lock, l);

        pthread_mutex_lock(&s->lock);
        /* A caller that is awake may free the loop once users is 0. */
        int asleep = l->asleep;
        if (atomic_fetch_sub_explicit(&l->users, 1, memory_order_release) == 1
            && asleep)
            pthread_cond_signal(&l->left);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void sched_wake_workers(sched *s, size_t wanted, unsigned idle)
{
    if (wanted >= idle) {
        if (idle)
            pthread_cond_broadcast(&s->work);
        return;
    }
    while (wanted--)
        pthread_cond_signal(&s->work);
}

static void sched_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits until no worker is inside the loop, which is unlinked already. */
static void loop_wait(sched *s, loop *l)
{
    uint64_t until = 0;
    for (unsigned i = 0;; i++) {
        if (!atomic_load_explicit(&l->users, memory_order_acquire))
            return;
        sched_relax();
        if (i % 16 == 0) {
            uint64_t now = persia_clock_ns();
            if (!until)
                until = now + LINGER_NS;
            else if (now > until)
                break;
        }
    }
    pthread_mutex_lock(&s->lock);
    l->asleep = 1;
    while (atomic_load_explicit(&l->users, memory_order_acquire))
        persia_cond_wait(&l->left, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

/* Runs a loop on the pool's workers and this thread. */
static void sched_run_on_pool(sched *s, loop *l)
{
    persia_cond_init(&l->left);
    pthread_mutex_lock(&s->lock);
    loop **end = &s->loops;
    while (*end)
        end = &(*end)->link;
    *end = l;
    unsigned idle = s->idle;
    pthread_mutex_unlock(&s->lock);
    sched_wake_workers(s, l->n - 1, idle);

    loop_run(&s->lock, l);

    pthread_mutex_lock(&s->lock);
    loop **at = &s->loops;
    while (*at && *at != l)
        at = &(*at)->link;
    assert(*at == l);
    *at = l->link;
    pthread_mutex_unlock(&s->lock);
    loop_wait(s, l);
    pthread_cond_destroy(&l->left);
}

typedef struct team_loop {
    sched *s;
    loop *l;
} team_loop;

static void team_body(void *ctx)
{
    team_loop *t = ctx;
    loop_run(&t->s->lock, t->l);
}

/* 1 if a team that serves this thread ran the loop. */
static int run_on_team(sched *s, loop *l)
{
    const sched_team *team = of_a_pool ? NULL : atomic_load(&installed_team);
    if (!team || team->size() < s->threads)
        return 0;
    team_loop t = {s, l};
    team->run(l->n < s->threads ? (unsigned)l->n : s->threads, team_body, &t);
    return 1;
}

static int loop_for(sched *s, size_t n, int alone, sched_loop_fn fn, void *ctx)
{
    int code = persia_fork_check("a thread pool");
    if (code != PERSIA_OK)
        return code;
    if (n == 0)
        return PERSIA_OK;
    if (n == 1)
        return fn(ctx, 0);

    loop l;
    l.fn = fn;
    l.ctx = ctx;
    l.n = n;
    atomic_init(&l.next, 0);
    atomic_init(&l.users, 0);
    l.link = NULL;
    l.asleep = 0;
    l.error.code = PERSIA_OK;
    l.failed = 0;
    if (alone || !s->workers)
        loop_run(&s->lock, &l);
    else if (!run_on_team(s, &l))
        sched_run_on_pool(s, &l);
    if (l.error.code == PERSIA_OK)
        return PERSIA_OK;
    return persia_err_again(&l.error);
}

int persia_sched_for(sched *s, size_t n, sched_loop_fn fn, void *ctx)
{
    return loop_for(s, n, 0, fn, ctx);
}

int persia_sched_for_rows(sched *s, size_t n, uint64_t rows, sched_loop_fn fn,
                          void *ctx)
{
    return loop_for(s, n, rows < SCHED_ROWS_ALONE, fn, ctx);
}

/* ---- background jobs ---- */

static void *sched_background_main(void *arg)
{
    sched *s = arg;
    of_a_pool = 1;
    persia_interrupt_watch(&s->flag);
    pthread_mutex_lock(&s->job_lock);
    for (;;) {
        job *j = s->first;
        if (!j) {
            if (s->job_stop)
                break;
            s->idle_jobs++;
            persia_cond_wait(&s->job_added, &s->job_lock);
            s->idle_jobs--;
            continue;
        }
        assert(s->queued);
        s->first = j->link;
        s->queued--;
        if (!s->first)
            s->last = &s->first;
        pthread_mutex_unlock(&s->job_lock);
        j->fn(j->ctx);
        free(j);
        pthread_mutex_lock(&s->job_lock);
    }
    pthread_mutex_unlock(&s->job_lock);
    return NULL;
}

/* ---- life of a pool ---- */

/* Sees to a background thread for one more job; job_lock is held.  Jobs that
 * are added while the pool stops are of jobs, whose own threads continue. */
static int sched_need_background(sched *s)
{
    if (s->queued < s->idle_jobs || s->background_n == s->background_max ||
        s->job_stop)
        return PERSIA_OK;
    int code = persia_thread_start(&s->background[s->background_n],
                                   sched_background_main, s, "persia-jobs");
    if (code == PERSIA_OK)
        s->background_n++;
    return s->background_n ? PERSIA_OK : code;
}

int persia_sched_submit(sched *s, sched_job_fn fn, void *ctx)
{
    int code = persia_fork_check("a thread pool");
    if (code != PERSIA_OK)
        return code;
    job *j = malloc(sizeof *j);
    if (!j)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: a background job");
    *j = (job){.fn = fn, .ctx = ctx};
    pthread_mutex_lock(&s->job_lock);
    code = sched_need_background(s);
    if (code == PERSIA_OK) {
        *s->last = j;
        s->last = &j->link;
        s->queued++;
    }
    pthread_mutex_unlock(&s->job_lock);
    if (code == PERSIA_OK)
        pthread_cond_signal(&s->job_added);
    else
        free(j);
    return code;
}

void persia_sched_interrupt(sched *s)
{
    __atomic_store_n(&s->flag.stop, 1, __ATOMIC_RELEASE);
}

int persia_sched_create(unsigned threads, sched **out)
{
    return persia_sched_create_background(threads, 1, out);
}

int persia_sched_create_background(unsigned threads, unsigned background,
                                   sched **out)
{
    *out = NULL;
    if (threads == 0 || threads > THREADS_MAX)
        return persia_err_set(PERSIA_EARG,
                              "a thread pool of %u threads: give 1 to %d",
                              threads, (int)THREADS_MAX);
    if (background == 0 || background > THREADS_MAX)
        return persia_err_set(PERSIA_EARG,
                              "%u background threads: give 1 to %d",
                              background, (int)THREADS_MAX);
    int code = PERSIA_ENOMEM;
    sched *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(code, "out of memory: a thread pool");
    s->threads = threads;
    s->last = &s->first;
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->job_lock, NULL);
    persia_cond_init(&s->work);
    persia_cond_init(&s->job_added);
    s->worker = calloc(threads, sizeof *s->worker);
    s->background = calloc(background, sizeof *s->background);
    s->background_max = background;
    if (!s->worker || !s->background) {
        code = persia_err_set(code, "out of memory: a pool of %u threads",
                              threads);
        goto fail;
    }
    /* `workers` counts threads to join; persia_sched_for reads it only later.
     */
    for (unsigned i = 0; i + 1 < threads; i++) {
        code = persia_thread_start(&s->worker[i], sched_worker_main, s,
                                   "persia-loop");
        if (code != PERSIA_OK)
            goto fail;
        s->workers++;
    }
    *out = s;
    return PERSIA_OK;
fail:
    persia_sched_destroy(s);
    return code;
}

void persia_sched_destroy(sched *s)
{
    /* In a forked child there is no thread to join: leave everything. */
    if (!s || persia_fork_check("a thread pool") != PERSIA_OK)
        return;
    pthread_mutex_lock(&s->job_lock);
    s->job_stop = 1;
    unsigned background = s->background_n;
    pthread_mutex_unlock(&s->job_lock);
    pthread_cond_broadcast(&s->job_added);
    for (unsigned i = 0; i < background; i++)
        persia_thread_join(s->background[i]);
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    pthread_mutex_unlock(&s->lock);
    pthread_cond_broadcast(&s->work);
    for (unsigned i = 0; i < s->workers; i++)
        persia_thread_join(s->worker[i]);
    assert(!s->first && !s->loops);
    pthread_cond_destroy(&s->job_added);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->job_lock);
    pthread_mutex_destroy(&s->lock);
    free(s->background);
    free(s->worker);
    free(s);
}

unsigned persia_sched_threads(const sched *s)
{
    return s->threads;
}

/* ---- threads of no pool ---- */

typedef struct detached {
    sched *s;
    void (*body)(void *ctx, sched *s);
    void (*end)(void *ctx);
    void *ctx;
} detached;

static void *detached_main(void *arg)
{
    detached d = *(detached *)arg;
    of_a_pool = 1;
    free(arg);
    d.body(d.ctx, d.s);
    persia_sched_destroy(d.s);
    d.end(d.ctx);
    return NULL;
}

int persia_sched_detach(unsigned threads, void (*body)(void *ctx, sched *s),
                        void (*end)(void *ctx), void *ctx, const char *name)
{
    detached *d = malloc(sizeof *d);
    if (!d)
        return persia_err_set(PERSIA_ENOMEM, "out of memory: a thread");
    *d = (detached){.body = body, .end = end, .ctx = ctx};
    int code = persia_sched_create(threads, &d->s);
    if (!code)
        code = persia_thread_start(NULL, detached_main, d, name);
    if (code) {
        persia_sched_destroy(d->s);
        free(d);
    }
    return code;
}

/* ---- futures ---- */

struct future {
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t completed;
    atomic_int done; /* set last, under the lock; read anywhere */
    int result;
    char *text; /* of an error; NULL: none kept */
};

int persia_future_create(future **out)
{
    *out = NULL;
    future *f = calloc(1, sizeof *f);
    if (!f)
        return persia_err_set(PERSIA_ENOMEM, "out of memory: a future");
    pthread_mutex_init(&f->lock, NULL);
    persia_cond_init(&f->completed);
    *out = f;
    return PERSIA_OK;
}

void persia_future_destroy(future *f)
{
    if (!f)
        return;
    /* The completing thread may be about to release the lock. */
    pthread_mutex_lock(&f->lock);
    pthread_mutex_unlock(&f->lock);
    pthread_cond_destroy(&f->completed);
    pthread_mutex_destroy(&f->lock);
    free(f->text);
    free(f);
}

void persia_future_complete(future *f, int result)
{
    pthread_mutex_lock(&f->lock);
    assert(!persia_future_done(f));
    f->result = result;
    if (result != PERSIA_OK)
        f->text = strdup(persia_err_text());
    atomic_store_explicit(&f->done, 1, memory_order_release);
    pthread_cond_broadcast(&f->completed);
    pthread_mutex_unlock(&f->lock);
}

int persia_future_done(const future *f)
{
    return atomic_load_explicit(&f->done, memory_order_acquire);
}

static int future_result(const future *f)
{
    if (f->result == PERSIA_OK)
        return PERSIA_OK;
    return persia_err_set(f->result, "%s",
                          f->text ? f->text : persia_err_message(f->result));
}

int persia_future_wait(future *f, uint64_t timeout_ns)
{
    if (persia_future_done(f))
        return future_result(f);
    int code = persia_fork_check("a pending operation");
    if (code != PERSIA_OK)
        return code;
    const uint64_t until = timeout_ns ? persia_deadline(timeout_ns)
                                      : PERSIA_FOREVER;
    pthread_mutex_lock(&f->lock);
    while (!persia_future_done(f) && !code) {
        if (persia_clock_ns() >= until)
            code = PERSIA_ETIMEOUT;
        else
            code = persia_cond_wait_poll(&f->completed, &f->lock, until);
    }
    if (persia_future_done(f))
        code = PERSIA_OK;
    pthread_mutex_unlock(&f->lock);
    if (code == PERSIA_OK)
        return future_result(f);
    return persia_err_set(code, code == PERSIA_ETIMEOUT
                                    ? "no answer within the deadline"
                                    : "interrupted while waiting");
}
