/* system.h: what the library uses of the machine besides memory, files and
 * sockets: time, waits, threads, random numbers.  Part of base.h.
 *
 * All rooms but `rpc`, which serves gRPC's own threads, take these from here.
 * A simulation installs its own before the first other call: then time is its
 * own, and the threads run one at a time in an order that it chooses, for each
 * of them gives up the processor in wait() and join() alone.
 */
#ifndef PERSIA_BASE_SYSTEM_H
#define PERSIA_BASE_SYSTEM_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PERSIA_API __attribute__((visibility("default")))
#define PERSIA_FOREVER UINT64_MAX /* a time that is never reached */

typedef struct persia_system {
    void *ctx;
    uint64_t (*now)(void *ctx);     /* monotonic, ns */
    uint64_t (*seconds)(void *ctx); /* since 1970 */
    /* Returns after a signal, or by chance, with 0; else when now() is
     * `until`.  The lock is held before and after, and free meanwhile. */
    int (*wait)(void *ctx, pthread_cond_t *c, pthread_mutex_t *lock,
                uint64_t until);
    /* The errno of a failure.  detached: join() is not called. */
    int (*start)(void *ctx, pthread_t *out, void *(*run)(void *arg), void *arg,
                 const char *name, int detached);
    void (*join)(void *ctx, pthread_t thread);
    /* n random bytes; the errno of a failure. */
    int (*random)(void *ctx, void *out, size_t n);
} persia_system;
/* NULL: the machine.  No other thread of the library may run; *system must
 * stay. */
PERSIA_API void persia_system_install(const persia_system *system);
/* What is installed: for one that replaces a part of it. */
PERSIA_API const persia_system *persia_system_get(void);

PERSIA_API uint64_t persia_clock_ns(void);
PERSIA_API uint64_t persia_clock_seconds(void);

/* A condition variable for the waits below. */
PERSIA_API void persia_cond_init(pthread_cond_t *c);
PERSIA_API void persia_cond_wait(pthread_cond_t *c, pthread_mutex_t *lock);
/* Returns 0 after a signal (or by chance), else when persia_clock_ns() is
 * `until`. */
PERSIA_API int persia_cond_wait_until(pthread_cond_t *c, pthread_mutex_t *lock,
                                      uint64_t until);
/* The same for a thread of the user: sleeps for at most 50 ms, and every
 * 50 ms calls persia_interrupt_poll(), without the lock: the callback may run
 * any code of the user.  Its result is returned. */
PERSIA_API int persia_cond_wait_poll(pthread_cond_t *c, pthread_mutex_t *lock,
                                     uint64_t until);

/* Sleeps for so long; the second as persia_cond_wait_poll(): PERSIA_EINTR. */
PERSIA_API void persia_pause(uint64_t ns);
PERSIA_API int persia_pause_poll(uint64_t ns);

/* One thread at a time, as with a mutex; but one that waits for its turn polls
 * as above.  For what is held over the network, on threads of the user. */
typedef struct persia_turn {
    pthread_mutex_t lock; /* guards: */
    int taken;
    pthread_cond_t given;
} persia_turn;
PERSIA_API void persia_turn_init(persia_turn *t);
PERSIA_API void persia_turn_free(persia_turn *t);
/* PERSIA_EINTR: it is not this thread's. */
PERSIA_API int persia_turn_take(persia_turn *t);
PERSIA_API void persia_turn_give(persia_turn *t);

/* Starts a thread of the library.  It receives no signals: they are for the
 * user's threads (Ctrl-C).  out NULL: it is detached.  At most 15 bytes of
 * the name are kept. */
PERSIA_API int persia_thread_start(pthread_t *out, void *(*run)(void *ctx),
                                   void *ctx, const char *name);
PERSIA_API void persia_thread_join(pthread_t thread);
/* This thread needs little time, and others wait for it: where the kernel can
 * (Linux 6.12), it runs once it is woken, also while others compute. */
PERSIA_API void persia_thread_prompt(void);

/* A thread that calls a function again and again. */
typedef struct persia_timer {
    uint64_t (*tick)(void *ctx); /* constant from its start on */
    void *ctx;
    pthread_t thread;
    pthread_mutex_t lock; /* guards: */
    pthread_cond_t wake;
    uint64_t at; /* of the next call */
    int runs, stops;
} persia_timer;
PERSIA_API void persia_timer_init(persia_timer *t);
/* Calls tick(ctx) now, and then each time when it is what the last call
 * returned (PERSIA_FOREVER: never). */
PERSIA_API int persia_timer_start(persia_timer *t, uint64_t (*tick)(void *ctx),
                                  void *ctx, const char *name);
/* ... or at this time, if that is earlier.  From any thread, at any time. */
PERSIA_API void persia_timer_wake(persia_timer *t, uint64_t at);
/* Waits for a call that runs; there are no more of them.  Once more: nothing
 * happens. */
PERSIA_API void persia_timer_stop(persia_timer *t);
/* The same, before its memory is freed. */
PERSIA_API void persia_timer_free(persia_timer *t);

/* A random number that is not 0. */
PERSIA_API int persia_random_id(uint64_t *out);

#ifdef __cplusplus
}
#endif
#endif
