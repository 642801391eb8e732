/* base.c: messages, interrupts, fork detection, clock. */
#include "base/base.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { TEXT_BYTES = 1024 };

/* Between two calls of persia_interrupt_poll(). */
static const uint64_t POLL_NS = 50000000;

static _Thread_local char thread_text[TEXT_BYTES];

int persia_err_set(int code, const char *format, ...)
{
    char text[TEXT_BYTES]; /* the arguments may point to thread_text */
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n < 0)
        text[0] = 0;
    memcpy(thread_text, text, strlen(text) + 1);
    return code;
}

const char *persia_err_text(void)
{
    return thread_text;
}

#define ERROR_NAME(code, name, message) [code] = name,
static const char *const error_names[] = {PERSIA_ERRORS(ERROR_NAME)};
#define ERROR_MESSAGE(code, name, message) [code] = message,
static const char *const error_messages[] = {PERSIA_ERRORS(ERROR_MESSAGE)};

static size_t error_index(int code)
{
    return code >= 0 && code < PERSIA_ERROR_COUNT ? (size_t)code
                                                  : PERSIA_EINTERNAL;
}

const char *persia_err_name(int code)
{
    return error_names[error_index(code)];
}

const char *persia_err_message(int code)
{
    return error_messages[error_index(code)];
}

static _Atomic(interrupt_fn) interrupt_callback;

void persia_interrupt_install(interrupt_fn fn)
{
    atomic_store(&interrupt_callback, fn);
}

static _Thread_local interrupt_flag *thread_flag;

void persia_interrupt_watch(interrupt_flag *flag)
{
    thread_flag = flag;
}

int persia_interrupt_poll(void)
{
    if (thread_flag) {
        __atomic_fetch_add(&thread_flag->polls, 1, __ATOMIC_RELAXED);
        if (__atomic_load_n(&thread_flag->stop, __ATOMIC_ACQUIRE))
            return persia_err_set(PERSIA_EINTR, "it was stopped");
    }
    interrupt_fn fn = atomic_load(&interrupt_callback);
    return fn ? fn() : PERSIA_OK;
}

/* Set in a child of the process in which the library was loaded. */
static atomic_int forked;

static void fork_in_child(void)
{
    atomic_store(&forked, 1);
}

__attribute__((constructor)) static void fork_watch(void)
{
    pthread_atfork(NULL, NULL, fork_in_child);
}

int persia_fork_check(const char *what)
{
    if (!atomic_load_explicit(&forked, memory_order_relaxed))
        return PERSIA_OK;
    return persia_err_set(
        PERSIA_EFORK,
        "%s cannot be used in a forked child process: its threads "
        "and locks stayed in the parent; create it in the child, "
        "in a process started with \"spawn\"",
        what);
}

uint64_t persia_clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void persia_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

int persia_cond_wait_until(pthread_cond_t *c, pthread_mutex_t *lock,
                           uint64_t until)
{
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000u),
                         .tv_nsec = (long)(until % 1000000000u)};
    return pthread_cond_timedwait(c, lock, &t);
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

int persia_thread_start(pthread_t *out, void *(*run)(void *ctx), void *ctx,
                        const char *name)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, run, ctx);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return persia_err_set(PERSIA_ENOMEM, "cannot start thread %s: %s",
                              name, strerror(failed));
    pthread_setname_np(thread, name);
    if (out)
        *out = thread;
    else
        pthread_detach(thread);
    return PERSIA_OK;
}

void persia_fair_lock_init(pthread_rwlock_t *lock)
{
    pthread_rwlockattr_t attr;

    pthread_rwlockattr_init(&attr);
    pthread_rwlockattr_setkind_np(
        &attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(lock, &attr);
    pthread_rwlockattr_destroy(&attr);
}
