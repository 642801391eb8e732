/* rpc: what others send to our port: health checks, other methods, bytes. */
#include "help.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifdef PERSIA_TESTS_GRPC

#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#if __has_include(<grpc/credentials.h>) /* not in 1.51 */
#include <grpc/credentials.h>
#endif

/* ---- a client that is not ours ---- */

typedef struct foreign {
    grpc_channel *channel;
    grpc_completion_queue *queue;
} foreign;

typedef struct answer {
    grpc_status_code status;
    char text[256], error[64];
    char bytes[64];
    size_t n; /* of the message; SIZE_MAX: none */
} answer;

static void foreign_open(foreign *f, int port, int compress)
{
    grpc_init();
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%d", port);
    grpc_arg arg = {.type = GRPC_ARG_INTEGER,
                    .key = (char *)GRPC_COMPRESSION_CHANNEL_DEFAULT_ALGORITHM,
                    .value.integer = compress ? GRPC_COMPRESS_GZIP
                                              : GRPC_COMPRESS_NONE};
    grpc_channel_args args = {1, &arg};
    grpc_channel_credentials *credentials =
        grpc_insecure_credentials_create();
    f->channel = grpc_channel_create(target, credentials, &args);
    grpc_channel_credentials_release(credentials);
    f->queue = grpc_completion_queue_create_for_pluck(NULL);
}

static void foreign_close(foreign *f)
{
    grpc_channel_destroy(f->channel);
    grpc_completion_queue_shutdown(f->queue);
    grpc_completion_queue_destroy(f->queue);
    grpc_shutdown();
}

static void keep_text(grpc_slice s, char *to, size_t room)
{
    snprintf(to, room, "%.*s", (int)GRPC_SLICE_LENGTH(s),
             (const char *)GRPC_SLICE_START_PTR(s));
}

/* n SIZE_MAX: no message. */
static answer foreign_call(foreign *f, const char *path, const void *data,
                           size_t n)
{
    answer a = {.n = SIZE_MAX};
    grpc_metadata_array initial, trailing;
    grpc_metadata_array_init(&initial);
    grpc_metadata_array_init(&trailing);
    grpc_slice details, message = grpc_empty_slice();
    grpc_byte_buffer *request = NULL, *reply = NULL;
    if (n != SIZE_MAX) {
        message = grpc_slice_from_copied_buffer(data, n);
        request = grpc_raw_byte_buffer_create(&message, 1);
    }
    grpc_op ops[6];
    memset(ops, 0, sizeof ops);
    size_t k = 0;
    ops[k++].op = GRPC_OP_SEND_INITIAL_METADATA;
    if (request) {
        ops[k].op = GRPC_OP_SEND_MESSAGE;
        ops[k++].data.send_message.send_message = request;
    }
    ops[k++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[k].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[k++].data.recv_initial_metadata.recv_initial_metadata = &initial;
    ops[k].op = GRPC_OP_RECV_MESSAGE;
    ops[k++].data.recv_message.recv_message = &reply;
    ops[k].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[k].data.recv_status_on_client.trailing_metadata = &trailing;
    ops[k].data.recv_status_on_client.status = &a.status;
    ops[k++].data.recv_status_on_client.status_details = &details;
    gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    gpr_timespec late = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                     gpr_time_from_seconds(30, GPR_TIMESPAN));
    grpc_call *call = grpc_channel_create_call(
        f->channel, NULL, GRPC_PROPAGATE_DEFAULTS, f->queue,
        grpc_slice_from_static_string(path), NULL, late, NULL);
    assert_int_equal(grpc_call_start_batch(call, ops, k, &a, NULL),
                     GRPC_CALL_OK);
    (void)grpc_completion_queue_pluck(f->queue, &a, never, NULL);
    keep_text(details, a.text, sizeof a.text);
    for (size_t i = 0; i < trailing.count; i++)
        if (grpc_slice_str_cmp(trailing.metadata[i].key, "persia-error") == 0)
            keep_text(trailing.metadata[i].value, a.error, sizeof a.error);
    if (reply) {
        grpc_byte_buffer_reader reader;
        assert_true(grpc_byte_buffer_reader_init(&reader, reply));
        grpc_slice all = grpc_byte_buffer_reader_readall(&reader);
        a.n = GRPC_SLICE_LENGTH(all);
        memcpy(a.bytes, GRPC_SLICE_START_PTR(all), a.n < 64 ? a.n : 64);
        grpc_slice_unref(all);
        grpc_byte_buffer_reader_destroy(&reader);
    }
    grpc_slice_unref(details);
    grpc_slice_unref(message);
    grpc_byte_buffer_destroy(request);
    grpc_byte_buffer_destroy(reply);
    grpc_metadata_array_destroy(&initial);
    grpc_metadata_array_destroy(&trailing);
    grpc_call_unref(call);
    return a;
}

static void *park_main(void *arg)
{
    (void)call_with(arg, WIRE_PUSH, "x", 1, 60 * SECOND);
    return NULL;
}

static const char CHECK[] = "/grpc.health.v1.Health/Check";

static void health_is_told_also_without_a_token(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    config.security.token = "tok";
    config.calls_max = 1;
    rpc_server *s;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    foreign f;
    foreign_open(&f, persia_rpc_server_port(s), 0);
    static const char ours[] = "\x0a\x19persia.v1.ParameterServer";
    static const char other[] = "\x0a\x19persia.v1.ParameterServes";
    answer a = foreign_call(&f, CHECK, "", 0);
    assert_int_equal(a.status, GRPC_STATUS_OK);
    assert_int_equal(a.n, 2);
    assert_memory_equal(a.bytes, "\x08\x02", 2);
    persia_rpc_server_health(s, 1);
    a = foreign_call(&f, CHECK, "", 0);
    assert_memory_equal(a.bytes, "\x08\x01", 2);
    a = foreign_call(&f, CHECK, "\x0a", 2); /* an empty name, spelt out */
    assert_int_equal(a.status, GRPC_STATUS_OK);
    a = foreign_call(&f, CHECK, ours, sizeof ours - 1);
    assert_int_equal(a.status, GRPC_STATUS_OK);
    assert_memory_equal(a.bytes, "\x08\x01", 2);
    a = foreign_call(&f, CHECK, other, sizeof other - 1);
    assert_int_equal(a.status, GRPC_STATUS_NOT_FOUND);
    a = foreign_call(&f, CHECK, "\x0a\x7fx", 3);
    assert_int_equal(a.status, GRPC_STATUS_NOT_FOUND);
    char *large = calloc(1, 1 << 20);
    a = foreign_call(&f, CHECK, large, 1 << 20);
    assert_int_equal(a.status, GRPC_STATUS_RESOURCE_EXHAUSTED);
    free(large);

    /* All slots are taken; health still answers. */
    rpc_security token = {.token = "tok"};
    rpc_channel *c = channel_with(persia_rpc_server_port(s), &token);
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, park_main, c), 0);
    deck_wait_parked(&d, 1);
    a = foreign_call(&f, CHECK, "", 0);
    assert_int_equal(a.status, GRPC_STATUS_OK);
    deck_release(&d);
    pthread_join(t, NULL);
    persia_rpc_channel_close(c);
    foreign_close(&f);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

#define PS "/persia.v1.ParameterServer/"

static void foreign_clients_read_the_errors(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    foreign f;
    foreign_open(&f, persia_rpc_server_port(s), 0);
    static const char *const paths[] = {
        PS "Nothing", PS, PS "PullX", "/persia.v2.ParameterServer/Pull",
        "/grpc.health.v1.Health/Watch", "/x", "/"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        answer a = foreign_call(&f, paths[i], "x", 1);
        assert_int_equal(a.status, GRPC_STATUS_UNIMPLEMENTED);
        assert_non_null(strstr(a.text, "persia.v1.ParameterServer"));
    }
    uint32_t code = PERSIA_ECAPACITY;
    char message[32];
    memcpy(message, &code, 4);
    memcpy(message + 4, "table t is full", 15);
    answer a = foreign_call(&f, PS "Leave", message, 19);
    assert_int_equal(a.status, GRPC_STATUS_RESOURCE_EXHAUSTED);
    assert_string_equal(a.text, "table t is full");
    assert_string_equal(a.error, "CapacityReached");
    a = foreign_call(&f, PS "Hello", "abc", 3);
    assert_int_equal(a.status, GRPC_STATUS_OK);
    assert_memory_equal(a.bytes, "abc", 3);
    a = foreign_call(&f, PS "Hello", NULL, SIZE_MAX); /* no message at all */
    assert_int_equal(a.status, GRPC_STATUS_INVALID_ARGUMENT);
    foreign_close(&f);

    /* 1 MiB of zeros in a few bytes. */
    foreign_open(&f, persia_rpc_server_port(s), 1);
    char *zeros = calloc(1, 1 << 20);
    unsigned before = d.requests;
    a = foreign_call(&f, PS "Hello", zeros, 1 << 20);
    assert_int_not_equal(a.status, GRPC_STATUS_OK);
    assert_int_equal(d.requests, before);
    free(zeros);
    foreign_close(&f);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* ---- bytes ---- */

static int connect_to(int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static void send_bytes(int fd, const void *data, size_t n)
{
    const char *at = data;
    while (n) {
        ssize_t sent = send(fd, at, n, MSG_NOSIGNAL);
        if (sent <= 0)
            return; /* it hung up: its right */
        at += sent;
        n -= (size_t)sent;
    }
}

static const unsigned char PREFACE[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                                       "\0\0\0\4\0\0\0\0\0"; /* SETTINGS */

/* A frame of HTTP/2. */
static size_t frame(unsigned char *to, unsigned n, unsigned type,
                    unsigned flags, unsigned stream)
{
    unsigned char head[9] = {
        (unsigned char)(n >> 16),      (unsigned char)(n >> 8),
        (unsigned char)n,              (unsigned char)type,
        (unsigned char)flags,          (unsigned char)(stream >> 24),
        (unsigned char)(stream >> 16), (unsigned char)(stream >> 8),
        (unsigned char)stream};
    memcpy(to, head, sizeof head);
    return sizeof head;
}

static void any_bytes_do_no_harm(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    int port = persia_rpc_server_port(s);
    rpc_channel *c = channel_to(port);
    enum { OPEN = 40 };
    int fds[OPEN];
    unsigned char data[4096];
    for (unsigned round = 0; round < 400; round++) {
        int fd = connect_to(port);
        uint32_t random[4], key[2] = {round, 1};
        for (unsigned i = 0; i < sizeof data; i += 16) {
            philox4x32((uint32_t[4]){i, 0, 0, 0}, key, random);
            memcpy(data + i, random, 16);
        }
        size_t n = data[0] % 64 ? data[1] * 16u : 0;
        size_t head = 0;
        switch (round % 4) {
        case 0: /* noise */
            break;
        case 1: /* the preface of HTTP/2, then noise */
            send_bytes(fd, PREFACE, sizeof PREFACE - 1);
            break;
        case 2: /* and frames of any type with noise inside */
            send_bytes(fd, PREFACE, sizeof PREFACE - 1);
            head = frame(data, (unsigned)n, data[20] % 11, data[21],
                         round / 4 % 3);
            n += head;
            break;
        default: /* half a preface, half a frame */
            send_bytes(fd, PREFACE, sizeof PREFACE - 1 - round / 4 % 20);
            n = round / 4 % 9;
        }
        send_bytes(fd, data, n);
        if (round < OPEN)
            fds[round] = fd; /* stays open, says no more */
        else
            close(fd);
        if (round % 50 == 0)
            echo(c, WIRE_PULL, round, 10000);
    }
    echo(c, WIRE_HELLO, 5, 3 << 20);
    rpc_channel *fresh = channel_to(port);
    echo(fresh, WIRE_HELLO, 5, 1000);
    persia_rpc_channel_close(fresh);
    persia_rpc_channel_close(c);
    for (unsigned i = 0; i < OPEN; i++)
        close(fds[i]);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* A client may ask whether the server lives, but not all the time. */
static void who_pings_without_end_is_closed(void **state)
{
    enum { PINGS = 300, BYTES = 9 + 8 };
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    int fd = connect_to(persia_rpc_server_port(s));
    const struct timeval patience = {.tv_sec = 20};
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience,
                                sizeof patience), 0);
    send_bytes(fd, PREFACE, sizeof PREFACE - 1);
    for (int i = 0; i < PINGS; i++) {
        unsigned char ping[BYTES] = {0};
        (void)frame(ping, 8, 6, 0, 0);
        send_bytes(fd, ping, sizeof ping);
        sleep_ms(2);
    }
    char bytes[4096];
    ssize_t n;
    while ((n = recv(fd, bytes, sizeof bytes, 0)) > 0)
        ;
    assert_true(n == 0 || errno == ECONNRESET);
    close(fd);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* ---- clients that keep the server waiting ---- */

/* A call whose message does not arrive. */
typedef struct stalled {
    grpc_call *call;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *reply;
    grpc_status_code status;
    grpc_slice details;
    int sent; /* a tag */
} stalled;

static gpr_timespec in_ms(int64_t ms)
{
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_millis(ms, GPR_TIMESPAN));
}

/* Connects and sends: no other thread waits on the queue. */
static void stalled_settle(foreign *f, stalled *l)
{
    grpc_event e =
        grpc_completion_queue_pluck(f->queue, l, in_ms(300), NULL);
    assert_int_equal(e.type, GRPC_QUEUE_TIMEOUT);
}

static void stalled_start(foreign *f, stalled *l, const char *path)
{
    memset(l, 0, sizeof *l);
    grpc_metadata_array_init(&l->initial);
    grpc_metadata_array_init(&l->trailing);
    l->call = grpc_channel_create_call(
        f->channel, NULL, GRPC_PROPAGATE_DEFAULTS, f->queue,
        grpc_slice_from_static_string(path), NULL,
        gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    grpc_op ops[4];
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[1].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &l->initial;
    ops[2].op = GRPC_OP_RECV_MESSAGE;
    ops[2].data.recv_message.recv_message = &l->reply;
    ops[3].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[3].data.recv_status_on_client.trailing_metadata = &l->trailing;
    ops[3].data.recv_status_on_client.status = &l->status;
    ops[3].data.recv_status_on_client.status_details = &l->details;
    assert_int_equal(grpc_call_start_batch(l->call, ops, 4, l, NULL),
                     GRPC_CALL_OK);
}

/* The message arrives after all. */
static void stalled_send(foreign *f, stalled *l)
{
    grpc_slice message = grpc_slice_from_static_string("late");
    grpc_byte_buffer *request = grpc_raw_byte_buffer_create(&message, 1);
    grpc_op ops[2];
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_SEND_MESSAGE;
    ops[0].data.send_message.send_message = request;
    ops[1].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    assert_int_equal(grpc_call_start_batch(l->call, ops, 2, &l->sent, NULL),
                     GRPC_CALL_OK);
    grpc_event e =
        grpc_completion_queue_pluck(f->queue, &l->sent, in_ms(30000), NULL);
    assert_int_equal(e.type, GRPC_OP_COMPLETE);
    grpc_byte_buffer_destroy(request);
}

/* Its status is there. */
static void stalled_wait(foreign *f, stalled *l, answer *a)
{
    grpc_event e =
        grpc_completion_queue_pluck(f->queue, l, in_ms(30000), NULL);
    assert_int_equal(e.type, GRPC_OP_COMPLETE);
    *a = (answer){.status = l->status,
                  .n = l->reply ? grpc_byte_buffer_length(l->reply)
                                : SIZE_MAX};
    keep_text(l->details, a->text, sizeof a->text);
    for (size_t i = 0; i < l->trailing.count; i++)
        if (grpc_slice_str_cmp(l->trailing.metadata[i].key,
                               "persia-error") == 0)
            keep_text(l->trailing.metadata[i].value, a->error,
                      sizeof a->error);
    grpc_slice_unref(l->details);
    grpc_byte_buffer_destroy(l->reply);
    grpc_metadata_array_destroy(&l->initial);
    grpc_metadata_array_destroy(&l->trailing);
    grpc_call_unref(l->call);
}

/* A call's headers by hand, `more` among them, and `n` bytes of its message.
 */
static void send_call_with(int fd, unsigned stream, const char *path,
                           const char *more, unsigned more_n,
                           const void *data, unsigned n, int last)
{
    static const char before[] = "\x83\x86\x04";
    static const char after[] = "\x01\x09localhost\x0f\x10\x10"
                                "application/grpc\x00\x02te\x08trailers";
    unsigned char block[256], head[9];
    unsigned length = (unsigned)strlen(path), size = sizeof before - 1;
    memcpy(block, before, size);
    block[size++] = (unsigned char)length;
    memcpy(block + size, path, length);
    size += length;
    memcpy(block + size, after, sizeof after - 1);
    size += sizeof after - 1;
    memcpy(block + size, more, more_n);
    size += more_n;
    send_bytes(fd, head, frame(head, size, 1, 4, stream));
    send_bytes(fd, block, size);
    send_bytes(fd, head, frame(head, n, 0, last ? 1 : 0, stream));
    send_bytes(fd, data, n);
}

static void send_call(int fd, unsigned stream, const char *path,
                      const void *data, unsigned n, int last)
{
    send_call_with(fd, stream, path, "", 0, data, n, last);
}

/* An empty message, and one of which 100 bytes were to follow. */
static const unsigned char EMPTY[] = "\0\0\0\0";
/* A connection that takes no bytes of answers. */
static const unsigned char NO_WINDOW[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                                         "\0\0\6\4\0\0\0\0\0"
                                         "\0\4\0\0\0\0";
static const unsigned char HALF[] = "\0\0\0\0\x64half";

/* Hundreds of years, too, are a deadline that is not over. */
static void a_deadline_that_is_far_away(void **state)
{
    static const char times[][25] = {
        "\x00\x0cgrpc-timeout\x09" "02562047H",
        "\x00\x0cgrpc-timeout\x09" "02562048H",
        "\x00\x0cgrpc-timeout\x09" "99999999H"};
    enum { TIMES = sizeof times / sizeof times[0] };
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    int fd = connect_to(persia_rpc_server_port(s));
    send_bytes(fd, PREFACE, sizeof PREFACE - 1);
    for (unsigned i = 0; i < TIMES; i++)
        send_call_with(fd, 2 * i + 1, PS "Push", times[i], 24, EMPTY,
                       sizeof EMPTY, 1);
    deck_wait_parked(&d, TIMES);
    pthread_mutex_lock(&d.lock);
    for (unsigned i = 0; i < TIMES; i++)
        assert_true(d.parked[i]->deadline > INT64_MAX / 2);
    pthread_mutex_unlock(&d.lock);
    deck_release(&d);
    close(fd);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* No client can call while all slots read, but not for ever; and our clients'
 * calls go through within their time. */
static void a_full_server_does_not_wait_for_requests(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    rpc_server *full, *other;
    config.calls_max = 2;
    assert_int_equal(persia_rpc_server_start(&config, &full), PERSIA_OK);
    config.calls_max = 3;
    assert_int_equal(persia_rpc_server_start(&config, &other), PERSIA_OK);
    foreign f, g;
    stalled refused, slow[2];
    answer a;
    foreign_open(&f, persia_rpc_server_port(full), 0);
    foreign_open(&g, persia_rpc_server_port(other), 0);
    stalled_start(&g, &slow[0], PS "Hello");
    stalled_start(&g, &slow[1], PS "Hello");
    stalled_start(&f, &refused, PS "Hello");
    stalled_settle(&g, &slow[0]);
    stalled_settle(&f, &refused);
    int fd = connect_to(persia_rpc_server_port(full));
    send_bytes(fd, PREFACE, sizeof PREFACE - 1);
    for (unsigned stream = 1; stream < 4; stream += 2)
        send_call(fd, stream, PS "Hello", HALF, sizeof HALF - 1, 0);
    sleep_ms(300);
    rpc_channel *c = channel_to(persia_rpc_server_port(full));
    assert_int_equal(call_with(c, WIRE_HELLO, "x", 1, SECOND / 5),
                     PERSIA_ETIMEOUT);
    stalled_wait(&f, &refused, &a);
    assert_int_equal(a.status, GRPC_STATUS_UNAVAILABLE);
    assert_string_equal(a.error, persia_err_name(PERSIA_EUNAVAILABLE));
    echo(c, WIRE_HELLO, 5, 3 << 20);
    close(fd);

    /* Where a slot is free, the slow may be as slow as they like. */
    for (size_t i = 0; i < 2; i++) {
        stalled_send(&g, &slow[i]);
        stalled_wait(&g, &slow[i], &a);
        assert_int_equal(a.status, GRPC_STATUS_OK);
        assert_int_equal(a.n, 4);
    }
    persia_rpc_channel_close(c);
    foreign_close(&f);
    foreign_close(&g);
    persia_rpc_server_stop(full, SECOND);
    persia_rpc_server_stop(other, SECOND);
    deck_stop(&d);
}

/* Neither for requests of health nor for those who do not take the answer,
 * whose windows are 0. */
static void health_does_not_wait_for_anybody(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server *s = server_of(&d);
    int fds[2];
    for (unsigned i = 0; i < 2; i++) {
        fds[i] = connect_to(persia_rpc_server_port(s));
        if (i)
            send_bytes(fds[i], PREFACE, sizeof PREFACE - 1);
        else
            send_bytes(fds[i], NO_WINDOW, sizeof NO_WINDOW - 1);
        for (unsigned k = 0; k < 20; k++)
            send_call(fds[i], 2 * k + 1, CHECK, i ? HALF : EMPTY,
                      i ? sizeof HALF - 1 : sizeof EMPTY, !i);
    }
    foreign f;
    foreign_open(&f, persia_rpc_server_port(s), 0);
    answer a = foreign_call(&f, CHECK, "", 0);
    assert_int_equal(a.status, GRPC_STATUS_OK);
    assert_int_equal(a.n, 2);
    foreign_close(&f);
    close(fds[0]);
    close(fds[1]);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

/* Nor for those who do not take their answers: all slots would be theirs. */
static void a_full_server_does_not_wait_for_readers(void **state)
{
    (void)state;
    deck d;
    deck_start(&d);
    rpc_server_config config = server_config_of(&d);
    rpc_server *s;
    config.calls_max = 2;
    assert_int_equal(persia_rpc_server_start(&config, &s), PERSIA_OK);
    int fd = connect_to(persia_rpc_server_port(s));
    send_bytes(fd, NO_WINDOW, sizeof NO_WINDOW - 1);
    for (unsigned k = 0; k < 2; k++)
        send_call(fd, 2 * k + 1, PS "Stats", EMPTY, sizeof EMPTY, 1);
    sleep_ms(300);
    rpc_channel *c = channel_to(persia_rpc_server_port(s));
    assert_int_equal(call_with(c, WIRE_STATS, "x", 1, SECOND / 5),
                     PERSIA_ETIMEOUT);
    assert_int_equal(call_with(c, WIRE_STATS, "x", 1, 30 * SECOND),
                     PERSIA_OK);
    persia_rpc_channel_close(c);
    close(fd);
    persia_rpc_server_stop(s, SECOND);
    deck_stop(&d);
}

static void a_server_of_another_kind_is_an_error(void **state)
{
    (void)state;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    assert_int_equal(bind(listener, (struct sockaddr *)&a, n), 0);
    assert_int_equal(listen(listener, 8), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&a, &n), 0);
    rpc_channel *c = channel_to(ntohs(a.sin_port));
    /* It accepts and says nothing. */
    assert_int_equal(call_with(c, WIRE_HELLO, "x", 1, SECOND / 5),
                     PERSIA_ETIMEOUT);
    assert_non_null(strstr(persia_err_text(), persia_rpc_channel_address(c)));
    persia_rpc_channel_close(c);
    close(listener);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(health_is_told_also_without_a_token),
        cmocka_unit_test(foreign_clients_read_the_errors),
        cmocka_unit_test(any_bytes_do_no_harm),
        cmocka_unit_test(who_pings_without_end_is_closed),
        cmocka_unit_test(a_deadline_that_is_far_away),
        cmocka_unit_test(a_full_server_does_not_wait_for_requests),
        cmocka_unit_test(health_does_not_wait_for_anybody),
        cmocka_unit_test(a_full_server_does_not_wait_for_readers),
        cmocka_unit_test(a_server_of_another_kind_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    print_message("built without gRPC: nothing to test\n");
    return 0;
}

#endif
