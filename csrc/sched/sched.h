/* sched.h: a thread pool for loops and background jobs.
 *
 * The caller of persia_sched_for() takes part, so a pool of n threads starts n
 * - 1 workers.  Idle workers sleep; none spins.  Several threads may call
 * persia_sched_for() and persia_sched_submit() at once.  A loop body must not
 * block on another loop of the same pool.
 *
 * A host whose own threads spin between its loops (OpenMP's do) would keep
 * the cores from our workers: such a host lends its threads, see sched_team.
 */
#ifndef PERSIA_SCHED_H
#define PERSIA_SCHED_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sched sched;

/* One index of a loop.  Returns PERSIA_OK or an error (set by persia_err_set()
 * on the thread that runs it); persia_sched_for() hands the error of the
 * lowest failing index and its text to its caller, after all indices ran. */
typedef int (*sched_loop_fn)(void *ctx, size_t index);
/* A background job; it reports through ctx (see future below). */
typedef void (*sched_job_fn)(void *ctx);

PERSIA_API int persia_sched_create(unsigned threads, sched **out);
/* The same with at most `background` threads for jobs (persia_sched_create():
 * 1). One more is started when a job finds none idle. */
PERSIA_API int persia_sched_create_background(unsigned threads,
                                              unsigned background,
                                              sched **out);
/* Waits for every job that was submitted, then joins the workers. */
PERSIA_API void persia_sched_destroy(sched *s);
PERSIA_API unsigned persia_sched_threads(const sched *s);

/* Runs fn(ctx, 0..n-1), each index once, on any threads; returns when all
 * have run.  n of 0 or 1, or a pool of one, runs on the caller alone. */
PERSIA_API int persia_sched_for(sched *s, size_t n, sched_loop_fn fn,
                                void *ctx);

/* The same for indices that work on `rows` rows together: a few are done by
 * the caller alone, because to wake another thread costs more, and where
 * other processes have the cores a thousand times more. */
enum { SCHED_ROWS_ALONE = 2048 };
PERSIA_API int persia_sched_for_rows(sched *s, size_t n, uint64_t rows,
                                     sched_loop_fn fn, void *ctx);

/* Of n ranges of indices, the k-th from first[k] on, the one that has `index`:
 * for a loop over pieces of several things. */
static inline size_t sched_range(const size_t *first, size_t n, size_t index)
{
    size_t low = 0, high = n;
    while (high - low > 1) {
        size_t mid = (low + high) / 2;
        if (first[mid] <= index)
            low = mid;
        else
            high = mid;
    }
    return low;
}

/* Threads of the host that it lends to loops of its own threads. */
typedef struct sched_team {
    /* Threads that a loop of the calling thread would get, itself included. */
    unsigned (*size)(void);
    /* Runs body(ctx) on up to n threads at once, the caller among them;
     * returns when all have returned. */
    void (*run)(unsigned n, void (*body)(void *ctx), void *ctx);
} sched_team;
/* From now on loops use the team where it is no smaller than the pool; loops
 * of background jobs use the pool's workers.  NULL: no team.  `team` must
 * live as long as the process. */
PERSIA_API void persia_sched_team_install(const sched_team *team);

/* Runs fn(ctx) once on a thread of its own kind (background threads are
 * separate from loop workers, so a job may call persia_sched_for()).  Jobs
 * start in the order of submission; with one background thread they also end
 * so. */
PERSIA_API int persia_sched_submit(sched *s, sched_job_fn fn, void *ctx);
/* From now on persia_interrupt_poll() interrupts what jobs wait for. */
PERSIA_API void persia_sched_interrupt(sched *s);

/* Runs body(ctx, s) on a thread that belongs to no pool, with a pool of
 * `threads` for its loops; then end(ctx), when the pool has gone. */
PERSIA_API int persia_sched_detach(unsigned threads,
                                   void (*body)(void *ctx, sched *s),
                                   void (*end)(void *ctx), void *ctx,
                                   const char *name);

/* Parts of a call that are in flight, and may land after their caller has
 * left: a callback writes where the caller would read, and the last one of
 * both frees that memory. */
typedef struct errand {
    pthread_mutex_t lock; /* guards what parts write, and all below */
    pthread_cond_t landed;
    size_t flying;
    int left; /* the caller has */
} errand;
PERSIA_API void persia_errand_init(errand *e);
/* No part is in flight. */
PERSIA_API void persia_errand_free(errand *e);
/* One part more; the lock is held, or only the caller knows f yet. */
PERSIA_API void persia_errand_start(errand *e);
/* A part ends.  The lock is held before, and not after.  Whether the memory is
 * this callback's now, as it was the last part, and its caller has left. */
PERSIA_API int persia_errand_land(errand *e);
/* Waits until nothing flies; the lock is held.  polls: on a thread of the
 * user.  PERSIA_EINTR, or PERSIA_ETIMEOUT after `until`, both without a
 * text. */
PERSIA_API int persia_errand_wait(errand *e, uint64_t until, int polls);
/* The caller's last use.  Whether the memory is its own, as nothing flies. */
PERSIA_API int persia_errand_leave(errand *e);

/* A value that one thread completes and others wait for. */
typedef struct future future;
PERSIA_API int persia_future_create(future **out);
/* Only after completion or when no thread will complete it. */
PERSIA_API void persia_future_destroy(future *f);
/* Completes with a result and, if it is an error, this thread's
 * persia_err_text(). */
PERSIA_API void persia_future_complete(future *f, int result);
PERSIA_API int persia_future_done(const future *f);
/* Waits; polls persia_interrupt_poll() every 50 ms.  Returns the result (its
 * text becomes this thread's persia_err_text()), PERSIA_EINTR, or
 * PERSIA_ETIMEOUT after timeout_ns (0: no limit). */
PERSIA_API int persia_future_wait(future *f, uint64_t timeout_ns);

#ifdef __cplusplus
}
#endif
#endif
