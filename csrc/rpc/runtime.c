/* runtime.c: gRPC's life in this process and the threads that drive it. */
#include "rpc/core.h"

#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum {
    CLIENT_THREADS_MAX = 4,
    MALLOC_KEEP = 64 << 20, /* bytes */
    TRIM_SECONDS = 30
};

/* All that is shared by channels and servers. */
static struct {
    pthread_mutex_t lock; /* guards users, clients and what they start */
    unsigned users;
    _Atomic(unsigned) clients; /* among the users; read without the lock */
    rpc_pollers pollers; /* of all clients */
    pthread_t reaper;

    pthread_mutex_t sent_lock; /* guards what follows */
    pthread_cond_t sent_added; /* `sent` has one, or stop */
    rpc_sent *sent;            /* whose last span was released */
    int stop;
} runtime = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .sent_lock = PTHREAD_MUTEX_INITIALIZER,
};

int persia_rpc_available(void)
{
    return 1;
}

/* ---- pollers ---- */

static void *poller_main(void *arg)
{
    rpc_pollers *p = arg;
    gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    if (p->prompt)
        persia_thread_prompt();
    for (;;) {
        grpc_event e = grpc_completion_queue_next(p->queue, never, NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (e.type != GRPC_OP_COMPLETE)
            continue;
        rpc_tag *tag = e.tag;
        (void)atomic_load_explicit(&tag->given, memory_order_acquire);
        tag->done(tag, e.success);
    }
}

int pollers_start(rpc_pollers *p, unsigned threads, int prompt,
                  const char *name)
{
    *p = (rpc_pollers){.prompt = prompt};
    p->threads = calloc(threads, sizeof *p->threads);
    if (!p->threads)
        return persia_err_set(PERSIA_ENOMEM, "out of memory: %u threads",
                              threads);
    p->queue = grpc_completion_queue_create_for_next(NULL);
    for (unsigned i = 0; i < threads; i++) {
        int code = persia_thread_start(&p->threads[i], poller_main, p, name);
        if (code != PERSIA_OK) {
            pollers_stop(p);
            return code;
        }
        p->threads_n++;
    }
    return PERSIA_OK;
}

void pollers_stop(rpc_pollers *p)
{
    if (!p->queue)
        return;
    grpc_completion_queue_shutdown(p->queue);
    for (unsigned i = 0; i < p->threads_n; i++)
        pthread_join(p->threads[i], NULL);
    if (!p->threads_n)
        while (grpc_completion_queue_next(
                   p->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL)
                   .type != GRPC_QUEUE_SHUTDOWN)
            ;
    grpc_completion_queue_destroy(p->queue);
    free(p->threads);
    *p = (rpc_pollers){0};
}

/* ---- memory ---- */

/* gRPC takes buffers of megabytes for each message: that glibc returns them
 * takes a quarter of a server's time.  A process that only calls servers is
 * the user's, and stays as it is. */
static void runtime_keep_memory(void)
{
    (void)persia_keep_memory(MALLOC_KEEP);
}

/* A parameter server lives long, and what its busiest moment took would be
 * kept for ever: now and then, what is not in use goes back.  A process that
 * trains, too, has a use for it in its next step. */
static void runtime_trim_memory(void)
{
#ifdef __GLIBC__
    if (!atomic_load(&runtime.clients))
        malloc_trim(0);
#endif
}

/* ---- messages that were sent ---- */

static uint64_t runtime_trim_time(void)
{
    return persia_clock_ns() + (uint64_t)TRIM_SECONDS * 1000000000u;
}

static void *runtime_reaper_main(void *arg)
{
    uint64_t trim_at = runtime_trim_time();
    (void)arg;
    pthread_mutex_lock(&runtime.sent_lock);
    while (runtime.sent || !runtime.stop) {
        rpc_sent *s = runtime.sent;
        if (!s && persia_clock_ns() < trim_at) {
            persia_cond_wait_until(&runtime.sent_added, &runtime.sent_lock,
                                   trim_at);
            continue;
        }
        if (s)
            runtime.sent = s->next;
        pthread_mutex_unlock(&runtime.sent_lock);
        if (s)
            s->ended(s);
        if (persia_clock_ns() >= trim_at) {
            runtime_trim_memory();
            trim_at = runtime_trim_time();
        }
        pthread_mutex_lock(&runtime.sent_lock);
    }
    pthread_mutex_unlock(&runtime.sent_lock);
    return NULL;
}

void runtime_end_sent(rpc_sent *s)
{
    pthread_mutex_lock(&runtime.sent_lock);
    s->next = runtime.sent;
    runtime.sent = s;
    pthread_mutex_unlock(&runtime.sent_lock);
    pthread_cond_signal(&runtime.sent_added);
}

/* ---- life ---- */

/* gRPC stays until the process ends.  grpc_shutdown() waits for a thread of
 * gRPC that looks after connections whose buffers were full, which it does for
 * 10 s at a time: so long no signal would be seen, and no new server could
 * start. */
static void runtime_start_grpc(void)
{
    sigset_t all, before; /* gRPC's threads inherit the mask */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    core_quiet();
    grpc_init();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    persia_cond_init(&runtime.sent_added);
}

static int runtime_start(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, runtime_start_grpc);
    runtime.stop = 0;
    return persia_thread_start(&runtime.reaper, runtime_reaper_main, NULL,
                               "persia-rpc-sent");
}

static void runtime_stop(void)
{
    pthread_mutex_lock(&runtime.sent_lock);
    runtime.stop = 1;
    pthread_mutex_unlock(&runtime.sent_lock);
    pthread_cond_signal(&runtime.sent_added);
    pthread_join(runtime.reaper, NULL);
}

/* Both under the lock. */
static int rpc_runtime_enter(void)
{
    int code = runtime.users ? PERSIA_OK : runtime_start();
    if (code == PERSIA_OK)
        runtime.users++;
    return code;
}

static void rpc_runtime_leave(void)
{
    if (--runtime.users == 0)
        runtime_stop();
}

int runtime_enter(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, runtime_keep_memory);
    pthread_mutex_lock(&runtime.lock);
    int code = rpc_runtime_enter();
    pthread_mutex_unlock(&runtime.lock);
    return code;
}

void runtime_leave(void)
{
    pthread_mutex_lock(&runtime.lock);
    rpc_runtime_leave();
    pthread_mutex_unlock(&runtime.lock);
}

static unsigned client_threads(void)
{
    cpu_set_t cpus;
    int n = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus)
                                                          : 1;
    return n > CLIENT_THREADS_MAX ? CLIENT_THREADS_MAX
           : n < 1                ? 1
                                  : (unsigned)n;
}

int runtime_enter_client(grpc_completion_queue **out)
{
    pthread_mutex_lock(&runtime.lock);
    int code = rpc_runtime_enter();
    if (code == PERSIA_OK && !runtime.clients) {
        code = pollers_start(&runtime.pollers, client_threads(), 0,
                             "persia-rpc-cli");
        if (code != PERSIA_OK)
            rpc_runtime_leave();
    }
    if (code == PERSIA_OK) {
        runtime.clients++;
        *out = runtime.pollers.queue;
    }
    pthread_mutex_unlock(&runtime.lock);
    return code;
}

void runtime_leave_client(void)
{
    pthread_mutex_lock(&runtime.lock);
    if (--runtime.clients == 0)
        pollers_stop(&runtime.pollers);
    rpc_runtime_leave();
    pthread_mutex_unlock(&runtime.lock);
}
