/* base.c: messages, interrupts, fork detection, malloc's settings. */
#include "base/base.h"

#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char thread_text[PERSIA_TEXT];

int persia_err_set(int code, const char *format, ...)
{
    char text[PERSIA_TEXT]; /* the arguments may point to thread_text */
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

void persia_err_keep(err_kept *out, int code)
{
    const char *text = code ? thread_text : "";
    out->code = code;
    memcpy(out->text, text, strlen(text) + 1);
}

int persia_err_again(const err_kept *k)
{
    return k->code ? persia_err_set(k->code, "%s", k->text) : PERSIA_OK;
}

#define ERROR_NAME(code, name, message) [code] = name,
static const char *const error_names[] = {PERSIA_ERRORS(ERROR_NAME)};
#define ERROR_MESSAGE(code, name, message) [code] = message,
static const char *const error_messages[] = {PERSIA_ERRORS(ERROR_MESSAGE)};

static size_t base_error_index(int code)
{
    return code >= 0 && code < PERSIA_ERROR_COUNT ? (size_t)code
                                                  : PERSIA_EINTERNAL;
}

const char *persia_err_name(int code)
{
    return error_names[base_error_index(code)];
}

int persia_err_code(const char *name)
{
    int code = PERSIA_OK + 1;
    while (code < PERSIA_ERROR_COUNT && strcmp(error_names[code], name) != 0)
        code++;
    return code < PERSIA_ERROR_COUNT ? code : PERSIA_EINTERNAL;
}

const char *persia_err_message(int code)
{
    return error_messages[base_error_index(code)];
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

void persia_broken(const char *condition, const char *file, int line,
                   int report)
{
    (void)persia_err_set(PERSIA_EINTERNAL,
                         "a bug in persia, please report it: not %s, in "
                         "%s:%d", condition, file, line);
    if (report)
        fprintf(stderr, "persia: %s\n", persia_err_text());
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

static void base_fork_in_child(void)
{
    atomic_store(&forked, 1);
}

__attribute__((constructor)) static void base_fork_watch(void)
{
    pthread_atfork(NULL, NULL, base_fork_in_child);
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

void persia_fair_lock_init(pthread_rwlock_t *lock)
{
    pthread_rwlockattr_t attr;

    pthread_rwlockattr_init(&attr);
    pthread_rwlockattr_setkind_np(
        &attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(lock, &attr);
    pthread_rwlockattr_destroy(&attr);
}

#define MAP_FROM (32 << 20) /* bytes; glibc takes at most these */

int persia_keep_memory(int bytes)
{
#ifdef __GLIBC__
    const char *tunables = getenv("GLIBC_TUNABLES");
    if (getenv("MALLOC_TRIM_THRESHOLD_") || getenv("MALLOC_MMAP_THRESHOLD_") ||
        (tunables && strstr(tunables, "glibc.malloc.")))
        return 0;
    return mallopt(M_MMAP_THRESHOLD, MAP_FROM) &&
           mallopt(M_TRIM_THRESHOLD, bytes);
#else
    (void)bytes;
    return 0;
#endif
}
