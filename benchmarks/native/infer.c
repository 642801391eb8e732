/* infer.c: what benchmarks/calls.py calls: requests to a server of models over
 * gRPC, so many in flight, or at times set before.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "infer/infer.h"

#define BENCH __attribute__((visibility("default")))

static const uint64_t TIMEOUT_NS = UINT64_C(60000000000);

typedef struct bench_load {
    rpc_channel *channel;
    double *seconds; /* [room] of each request that was answered */
    size_t room;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t changed;
    size_t begun, answered, failed;
} bench_load;

typedef struct bench_request {
    bench_load *load;
    uint64_t due;
} bench_request;

BENCH void bench_load_close(bench_load *l)
{
    if (!l)
        return;
    persia_rpc_channel_close(l->channel);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    free(l->seconds);
    free(l);
}

/* This thread, and those that it starts, run once they are woken: what a
 * request takes is the server's time, not our own wait for a processor.
 * As persia_thread_prompt(), which is not inherited. */
static void load_prompt(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } a = {.size = sizeof a, .runtime = 100000};
    (void)syscall(SYS_sched_setattr, 0, &a, 0);
    (void)prctl(PR_SET_TIMERSLACK, 1);
}

BENCH int bench_load_open(const char *address, size_t room, bench_load **out)
{
    const rpc_channel_config config = {.address = address,
                                       .message_limit = 1 << 28,
                                       .methods = &persia_infer_methods};
    bench_load *l = calloc(1, sizeof *l);
    if (!l)
        return PERSIA_ENOMEM;
    load_prompt();
    pthread_mutex_init(&l->lock, NULL);
    persia_cond_init(&l->changed);
    l->room = room;
    l->seconds = malloc(room * sizeof *l->seconds);
    int code = l->seconds ? persia_rpc_channel_open(&config, &l->channel)
                          : PERSIA_ENOMEM;
    if (code)
        bench_load_close(l);
    else
        *out = l;
    return code;
}

static void load_answered(void *ctx, int rc, rpc_reply *reply)
{
    const bench_request *r = ctx;
    bench_load *l = r->load;
    const double seconds = (double)(persia_clock_ns() - r->due) / 1e9;
    if (!rc)
        persia_rpc_reply_free(reply);
    free(ctx);
    pthread_mutex_lock(&l->lock);
    if (rc)
        l->failed++;
    else
        l->seconds[l->answered++] = seconds;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

static int load_start(bench_load *l, const void *body, size_t n, uint64_t due)
{
    bench_request *r = malloc(sizeof *r);
    wire_out out;
    if (!r)
        return PERSIA_ENOMEM;
    *r = (bench_request){l, due};
    persia_wire_out_init(&out);
    int code = persia_wire_out_add(&out, body, n);
    if (code)
        persia_wire_out_free(&out);
    else
        code = persia_rpc_start(l->channel, INFER_MODEL_INFER, &out,
                                TIMEOUT_NS, load_answered, r);
    if (code)
        free(r);
    else
        l->begun++; /* this thread alone writes it */
    return code;
}

/* Waits until fewer than `flight` requests are in flight. */
static void load_wait(bench_load *l, size_t flight)
{
    pthread_mutex_lock(&l->lock);
    while (l->begun - l->answered - l->failed >= flight)
        persia_cond_wait(&l->changed, &l->lock);
    pthread_mutex_unlock(&l->lock);
}

static void sleep_until(uint64_t due)
{
    const uint64_t now = persia_clock_ns();
    if (now >= due)
        return;
    const struct timespec left = {(time_t)((due - now) / 1000000000),
                                  (long)((due - now) % 1000000000)};
    (void)nanosleep(&left, NULL);
}

/* Requests for so many seconds, with the bodies in turn; rate: so many begin a
 * second, and their time counts from when they were due; 0: `flight` are
 * always in flight.  Waits for the last answer. */
BENCH int bench_load_run(bench_load *l, const void *const *bodies,
                         const size_t *sizes, size_t n, double seconds,
                         double rate, size_t flight)
{
    const uint64_t begin = persia_clock_ns();
    const uint64_t end = begin + (uint64_t)(seconds * 1e9);
    int code = PERSIA_OK;
    for (size_t i = 0; !code && i < l->room; i++) {
        uint64_t due = begin + (uint64_t)(rate ? (double)i * 1e9 / rate : 0);
        if (rate)
            sleep_until(due);
        else
            load_wait(l, flight);
        if (!rate)
            due = persia_clock_ns();
        if (due > end)
            break;
        code = load_start(l, bodies[i % n], sizes[i % n], due);
    }
    load_wait(l, 1);
    return code;
}

BENCH const double *bench_load_seconds(const bench_load *l, size_t *answered,
                                       size_t *failed)
{
    *answered = l->answered;
    *failed = l->failed;
    return l->seconds;
}
