/* echo.c: the baseline of benchmarks/rpc.py: bytes through bare gRPC C core.
 *
 *   echo serve THREADS    prints its port; serves until its input ends
 *   echo call PORT        reads lines "CALLS FLIGHT A B C D ..." and does,
 *                         CALLS times, a request of A bytes whose reply has
 *                         B, then one of C bytes whose reply has D, ...;
 *                         FLIGHT such sequences are under way at once.
 *                         Prints the seconds of each line; "-1 ..." failed.
 *
 * Nothing is encoded, copied out or looked at but the first 8 bytes of a
 * request, which say how long the reply is to be.  Messages are sent from
 * memory that stays, by reference.
 */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>

#define METHOD "/persia.benchmark.Echo/Call"

enum {
    MESSAGE_MAX = 1 << 28, /* bytes */
    THREADS_MAX = 16,
    SLOTS = 8,  /* calls that a queue of the server can take at once */
    CALLS = 16, /* kinds of calls of a sequence */
    FLIGHT_MAX = 64,
    LINE = 1024
};

static void die(const char *what)
{
    fprintf(stderr, "echo: %s\n", what);
    exit(1);
}

static void keep(void *p)
{
    (void)p; /* the memory of messages lives as long as the process */
}

/* A message of n bytes: its first 8 are `reply`, the rest is `memory`. */
static grpc_byte_buffer *message(uint64_t reply, char *memory, size_t n)
{
    grpc_slice s[2] = {
        grpc_slice_from_copied_buffer((const char *)&reply, sizeof(reply)),
        grpc_slice_new_with_user_data(memory, n - sizeof(reply), keep, NULL)};
    grpc_byte_buffer *b = grpc_raw_byte_buffer_create(s, 2);
    grpc_slice_unref(s[0]);
    grpc_slice_unref(s[1]);
    return b;
}

static uint64_t first_bytes(grpc_byte_buffer *b)
{
    uint64_t value = 0;
    size_t done = 0;
    grpc_byte_buffer_reader r;
    if (!grpc_byte_buffer_reader_init(&r, b))
        die("a message that cannot be read");
    grpc_slice s;
    while (done < sizeof(value) && grpc_byte_buffer_reader_next(&r, &s)) {
        size_t n = GRPC_SLICE_LENGTH(s);
        if (n > sizeof(value) - done)
            n = sizeof(value) - done;
        memcpy((char *)&value + done, GRPC_SLICE_START_PTR(s), n);
        done += n;
        grpc_slice_unref(s);
    }
    grpc_byte_buffer_reader_destroy(&r);
    return value;
}

static char *message_memory(void)
{
    char *p = malloc(MESSAGE_MAX);
    if (!p)
        die("no memory");
    memset(p, 1, 1 << 24); /* the rest is touched when it is needed */
    return p;
}

static grpc_arg integer(const char *key, int value)
{
    grpc_arg a = {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key};
    a.value.integer = value;
    return a;
}

/* ---- server ------------------------------------------------------------- */

typedef struct slot {
    int replied; /* 0: waits for a request, 1: for the reply to be sent */
    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_byte_buffer *request;
    int cancelled;
} slot;

typedef struct server {
    grpc_server *core;
    void *method;
    char *memory;
    grpc_completion_queue *queues[THREADS_MAX];
    unsigned threads;
} server;

typedef struct poller {
    server *owner;
    grpc_completion_queue *queue;
    pthread_t thread;
} poller;

static void slot_post(poller *p, slot *s)
{
    memset(s, 0, sizeof(*s));
    grpc_metadata_array_init(&s->metadata);
    if (grpc_server_request_registered_call(
            p->owner->core, p->owner->method, &s->call, &s->deadline,
            &s->metadata, &s->request, p->queue, p->queue, s) != GRPC_CALL_OK)
        die("a slot was refused");
}

static void slot_reply(poller *p, slot *s)
{
    uint64_t n = first_bytes(s->request);
    if (n < sizeof(n) || n > MESSAGE_MAX)
        die("a length out of range");
    grpc_byte_buffer *reply = message(n, p->owner->memory, n);
    grpc_op ops[4];
    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = reply;
    ops[2].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[2].data.send_status_from_server.status = GRPC_STATUS_OK;
    ops[3].op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    ops[3].data.recv_close_on_server.cancelled = &s->cancelled;
    s->replied = 1;
    if (grpc_call_start_batch(s->call, ops, 4, s, NULL) != GRPC_CALL_OK)
        die("a reply was refused");
    grpc_byte_buffer_destroy(reply);
}

static void *server_poll(void *arg)
{
    poller *p = arg;
    slot *slots = calloc(SLOTS, sizeof(*slots));
    if (!slots)
        die("no memory");
    for (unsigned i = 0; i < SLOTS; i++)
        slot_post(p, &slots[i]);
    for (;;) {
        grpc_event e = grpc_completion_queue_next(
            p->queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type != GRPC_OP_COMPLETE)
            die("the queue of a server ended");
        slot *s = e.tag;
        if (!s->replied) {
            if (!e.success)
                die("the server stopped");
            slot_reply(p, s);
            continue;
        }
        grpc_byte_buffer_destroy(s->request);
        grpc_metadata_array_destroy(&s->metadata);
        grpc_call_unref(s->call);
        slot_post(p, s);
    }
    return NULL;
}

static int serve(unsigned threads)
{
    server s = {.threads = threads, .memory = message_memory()};
    grpc_arg list[] = {
        integer(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, -1),
        integer(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1),
        integer(GRPC_ARG_ALLOW_REUSEPORT, 0)};
    grpc_channel_args args = {sizeof(list) / sizeof(*list), list};
    s.core = grpc_server_create(&args, NULL);
    for (unsigned i = 0; i < threads; i++) {
        s.queues[i] = grpc_completion_queue_create_for_next(NULL);
        grpc_server_register_completion_queue(s.core, s.queues[i], NULL);
    }
    s.method = grpc_server_register_method(
        s.core, METHOD, NULL, GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
    grpc_server_credentials *c = grpc_insecure_server_credentials_create();
    int port = grpc_server_add_http2_port(s.core, "127.0.0.1:0", c);
    grpc_server_credentials_release(c);
    if (!port)
        die("no port");
    grpc_server_start(s.core);
    static poller pollers[THREADS_MAX];
    for (unsigned i = 0; i < threads; i++) {
        pollers[i] = (poller){.owner = &s, .queue = s.queues[i]};
        if (pthread_create(&pollers[i].thread, NULL, server_poll,
                           &pollers[i]))
            die("no thread");
    }
    printf("%d\n", port);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    _exit(0); /* nobody waits for a reply: there is nothing to finish */
}

/* ---- client ------------------------------------------------------------- */

typedef struct lane {
    grpc_call *call;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *reply;
    grpc_status_code status;
    grpc_slice details;
    unsigned at; /* which call of the sequence is under way */
} lane;

typedef struct client {
    grpc_channel *channel;
    void *method;
    grpc_completion_queue *queue;
    char *memory;
    uint64_t request[CALLS], reply[CALLS];
    unsigned calls; /* of a sequence */
} client;

static void lane_start(client *c, lane *l)
{
    l->call = grpc_channel_create_registered_call(
        c->channel, NULL, GRPC_PROPAGATE_DEFAULTS, c->queue, c->method,
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                     gpr_time_from_seconds(60, GPR_TIMESPAN)),
        NULL);
    grpc_metadata_array_init(&l->initial);
    grpc_metadata_array_init(&l->trailing);
    l->reply = NULL;
    l->details = grpc_empty_slice();
    grpc_byte_buffer *b =
        message(c->reply[l->at], c->memory, c->request[l->at]);
    grpc_op ops[6];
    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = b;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &l->initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = &l->reply;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.trailing_metadata = &l->trailing;
    ops[5].data.recv_status_on_client.status = &l->status;
    ops[5].data.recv_status_on_client.status_details = &l->details;
    if (grpc_call_start_batch(l->call, ops, 6, l, NULL) != GRPC_CALL_OK)
        die("a call was refused");
    grpc_byte_buffer_destroy(b);
}

/* 0 if the call failed or its reply has another length. */
static int lane_end(const client *c, lane *l)
{
    int good = l->status == GRPC_STATUS_OK && l->reply &&
               grpc_byte_buffer_length(l->reply) == c->reply[l->at];
    grpc_byte_buffer_destroy(l->reply);
    grpc_slice_unref(l->details);
    grpc_metadata_array_destroy(&l->initial);
    grpc_metadata_array_destroy(&l->trailing);
    grpc_call_unref(l->call);
    return good;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of `n` sequences, `flight` at once; -1 if one failed. */
static double run(client *c, unsigned long n, unsigned flight)
{
    static lane lanes[FLIGHT_MAX];
    unsigned long begun = 0, under_way = 0;
    int good = 1;
    double start = now();
    for (; begun < n && begun < flight; begun++, under_way++) {
        lanes[begun].at = 0;
        lane_start(c, &lanes[begun]);
    }
    while (under_way) {
        grpc_event e = grpc_completion_queue_next(
            c->queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type != GRPC_OP_COMPLETE)
            die("the queue of the client ended");
        lane *l = e.tag;
        good &= lane_end(c, l);
        if (good && l->at + 1 < c->calls) {
            l->at++;
            lane_start(c, l);
        } else if (good && begun < n) {
            l->at = 0;
            begun++;
            lane_start(c, l);
        } else {
            under_way--;
        }
    }
    return good ? now() - start : -1;
}

/* Reads an unsigned number; 0 if there is none. */
static int number(char **at, uint64_t most, uint64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoull(*at, &end, 10);
    int good = end != *at && !errno && *out <= most;
    *at = end;
    return good;
}

static int call(const char *port)
{
    client c = {.memory = message_memory()};
    grpc_arg list[] = {
        integer(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, -1),
        integer(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1),
        integer(GRPC_ARG_ENABLE_RETRIES, 0)};
    grpc_channel_args args = {sizeof(list) / sizeof(*list), list};
    char target[64];
    snprintf(target, sizeof(target), "ipv4:127.0.0.1:%s", port);
    grpc_channel_credentials *k = grpc_insecure_credentials_create();
    c.channel = grpc_channel_create(target, k, &args);
    grpc_channel_credentials_release(k);
    c.method = grpc_channel_register_call(c.channel, METHOD, NULL, NULL);
    c.queue = grpc_completion_queue_create_for_next(NULL);
    char line[LINE];
    while (fgets(line, sizeof(line), stdin)) {
        char *at = line;
        uint64_t n, flight, a, b;
        if (!number(&at, UINT32_MAX, &n) ||
            !number(&at, FLIGHT_MAX, &flight) || !flight)
            die("a line is CALLS FLIGHT REQUEST REPLY ...");
        for (c.calls = 0; c.calls < CALLS && number(&at, MESSAGE_MAX, &a) &&
                          number(&at, MESSAGE_MAX, &b);
             c.calls++) {
            c.request[c.calls] = a < 8 ? 8 : a;
            c.reply[c.calls] = b < 8 ? 8 : b;
        }
        if (!c.calls)
            die("a line is CALLS FLIGHT REQUEST REPLY ...");
        printf("%.9f\n", run(&c, n, (unsigned)flight));
        fflush(stdout);
    }
    _exit(0);
}

int main(int argc, char **argv)
{
    grpc_init();
    if (argc == 3 && !strcmp(argv[1], "serve")) {
        unsigned long threads = strtoul(argv[2], NULL, 10);
        if (threads < 1 || threads > THREADS_MAX)
            die("THREADS is 1 to 16");
        return serve((unsigned)threads);
    }
    if (argc == 3 && !strcmp(argv[1], "call"))
        return call(argv[2]);
    die("usage: echo serve THREADS | echo call PORT");
}
