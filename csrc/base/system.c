/* system.c: see system.h. */
#include "base/base.h"

#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Between two calls of persia_interrupt_poll(). */
static const uint64_t POLL_NS = 50000000;

/* ---- the machine ---- */

static uint64_t system_machine_now(void *ctx)
{
    struct timespec t;
    (void)ctx;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t system_machine_seconds(void *ctx)
{
    (void)ctx;
    return (uint64_t)time(NULL);
}

static int system_machine_wait(void *ctx, pthread_cond_t *c,
                               pthread_mutex_t *lock, uint64_t until)
{
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000u),
                         .tv_nsec = (long)(until % 1000000000u)};
    (void)ctx;
    return until == PERSIA_FOREVER ? pthread_cond_wait(c, lock)
                                   : pthread_cond_timedwait(c, lock, &t);
}

static int system_machine_start(void *ctx, pthread_t *out,
                                void *(*run)(void *arg), void *arg,
                                const char *name, int detached)
{
    (void)ctx;
    int failed = pthread_create(out, NULL, run, arg);
    if (!failed)
        pthread_setname_np(*out, name);
    if (!failed && detached)
        pthread_detach(*out);
    return failed;
}

static void system_machine_join(void *ctx, pthread_t thread)
{
    (void)ctx;
    pthread_join(thread, NULL);
}

static int system_machine_random(void *ctx, void *out, size_t n)
{
    (void)ctx;
    return getrandom(out, n, 0) == (ssize_t)n ? 0 : errno;
}

static const persia_system machine = {.now = system_machine_now,
                                      .seconds = system_machine_seconds,
                                      .wait = system_machine_wait,
                                      .start = system_machine_start,
                                      .join = system_machine_join,
                                      .random = system_machine_random};

static _Atomic(const persia_system *) installed = &machine;

void persia_system_install(const persia_system *system)
{
    atomic_store(&installed, system ? system : &machine);
}

const persia_system *persia_system_get(void)
{
    return atomic_load_explicit(&installed, memory_order_relaxed);
}

/* ---- time ---- */

uint64_t persia_clock_ns(void)
{
    const persia_system *s = persia_system_get();
    return s->now(s->ctx);
}

uint64_t persia_clock_seconds(void)
{
    const persia_system *s = persia_system_get();
    return s->seconds(s->ctx);
}

void persia_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

void persia_cond_wait(pthread_cond_t *c, pthread_mutex_t *lock)
{
    persia_cond_wait_until(c, lock, PERSIA_FOREVER);
}

int persia_cond_wait_until(pthread_cond_t *c, pthread_mutex_t *lock,
                           uint64_t until)
{
    const persia_system *s = persia_system_get();
    return s->wait(s->ctx, c, lock, until);
}

int persia_cond_wait_poll(pthread_cond_t *c, pthread_mutex_t *lock,
                          uint64_t until)
{
    const uint64_t period = persia_clock_ns() / POLL_NS;
    const uint64_t wake = (period + 1) * POLL_NS;
    persia_cond_wait_until(c, lock, wake < until ? wake : until);
    if (persia_clock_ns() / POLL_NS == period)
        return PERSIA_OK;
    pthread_mutex_unlock(lock);
    int rc = persia_interrupt_poll();
    pthread_mutex_lock(lock);
    return rc;
}

/* ---- pauses ---- */

static int system_pause_until(uint64_t until, int polls)
{
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t never;
    int rc = PERSIA_OK;
    persia_cond_init(&never);
    pthread_mutex_lock(&lock);
    while (!rc && persia_clock_ns() < until)
        if (polls)
            rc = persia_cond_wait_poll(&never, &lock, until);
        else
            persia_cond_wait_until(&never, &lock, until);
    pthread_mutex_unlock(&lock);
    pthread_cond_destroy(&never);
    return rc;
}

void persia_pause(uint64_t ns)
{
    (void)system_pause_until(persia_clock_ns() + ns, 0);
}

int persia_pause_poll(uint64_t ns)
{
    return system_pause_until(persia_clock_ns() + ns, 1);
}

/* ---- threads ---- */

void persia_turn_init(persia_turn *t)
{
    t->taken = 0;
    pthread_mutex_init(&t->lock, NULL);
    persia_cond_init(&t->given);
}

void persia_turn_free(persia_turn *t)
{
    assert(!t->taken);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->given);
}

int persia_turn_take(persia_turn *t)
{
    int rc = PERSIA_OK;

    pthread_mutex_lock(&t->lock);
    while (t->taken && !rc)
        rc = persia_cond_wait_poll(&t->given, &t->lock, UINT64_MAX);
    if (!rc)
        t->taken = 1;
    pthread_mutex_unlock(&t->lock);
    return rc;
}

void persia_turn_give(persia_turn *t)
{
    pthread_mutex_lock(&t->lock);
    assert(t->taken);
    t->taken = 0;
    pthread_cond_signal(&t->given);
    pthread_mutex_unlock(&t->lock);
}

int persia_thread_start(pthread_t *out, void *(*run)(void *ctx), void *ctx,
                        const char *name)
{
    const persia_system *s = persia_system_get();
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = s->start(s->ctx, &thread, run, ctx, name, !out);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return persia_err_set(PERSIA_ENOMEM, "cannot start thread %s: %s",
                              name, strerror(failed));
    if (out)
        *out = thread;
    return PERSIA_OK;
}

void persia_thread_join(pthread_t thread)
{
    const persia_system *s = persia_system_get();
    s->join(s->ctx, thread);
}

/* As of sched_setattr(2), which not every C library has. */
typedef struct thread_attributes {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period; /* runtime: ns of a turn */
    uint32_t least, most;
} thread_attributes;

void persia_thread_prompt(void)
{
    enum { TURN_NS = 100000, NOT_INHERITED = 1 };
    thread_attributes a;
    if (syscall(SYS_sched_getattr, 0, &a, sizeof a, 0) || a.policy)
        return; /* somebody has decided otherwise */
    a.flags |= NOT_INHERITED;
    a.runtime = TURN_NS;
    (void)syscall(SYS_sched_setattr, 0, &a, 0); /* or as before */
}

/* ---- timers ---- */

void persia_timer_init(persia_timer *t)
{
    *t = (persia_timer){.at = PERSIA_FOREVER};
    pthread_mutex_init(&t->lock, NULL);
    persia_cond_init(&t->wake);
}

static void *timer_main(void *timer)
{
    persia_timer *t = timer;
    pthread_mutex_lock(&t->lock);
    while (!t->stops) {
        t->at = PERSIA_FOREVER; /* others may set it meanwhile */
        pthread_mutex_unlock(&t->lock);
        const uint64_t at = t->tick(t->ctx);
        pthread_mutex_lock(&t->lock);
        t->at = at < t->at ? at : t->at;
        while (!t->stops && t->at > persia_clock_ns())
            persia_cond_wait_until(&t->wake, &t->lock, t->at);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

int persia_timer_start(persia_timer *t, uint64_t (*tick)(void *ctx), void *ctx,
                       const char *name)
{
    assert(!t->runs && !t->stops);
    t->tick = tick;
    t->ctx = ctx;
    int rc = persia_thread_start(&t->thread, timer_main, t, name);
    t->runs = !rc;
    return rc;
}

void persia_timer_wake(persia_timer *t, uint64_t at)
{
    pthread_mutex_lock(&t->lock);
    if (at < t->at) {
        t->at = at;
        pthread_cond_signal(&t->wake);
    }
    pthread_mutex_unlock(&t->lock);
}

void persia_timer_stop(persia_timer *t)
{
    pthread_mutex_lock(&t->lock);
    t->stops = 1;
    pthread_cond_signal(&t->wake);
    pthread_mutex_unlock(&t->lock);
    if (t->runs)
        persia_thread_join(t->thread);
    t->runs = 0;
}

void persia_timer_free(persia_timer *t)
{
    persia_timer_stop(t);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->lock);
}

/* ---- random numbers ---- */

int persia_random_id(uint64_t *out)
{
    const persia_system *s = persia_system_get();
    do {
        int failed = s->random(s->ctx, out, sizeof *out);
        if (failed)
            return persia_err_set(PERSIA_EINTERNAL, "no random numbers: %s",
                                  strerror(failed));
    } while (!*out);
    return PERSIA_OK;
}
