/* help.h: servers, clients and messages for the tests of rpc. */
#ifndef PERSIA_TESTS_RPC_HELP_H
#define PERSIA_TESTS_RPC_HELP_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "rpc/rpc.h"
#include "wire/wire.h"

#include <pthread.h>

#define SECOND ((uint64_t)1000000000)

/* A test that needs gRPC begins with this. */
#define NEED_GRPC()                                                           \
    do {                                                                      \
        (void)state;                                                          \
        if (!persia_rpc_available())                                          \
            skip();                                                           \
    } while (0)

void sleep_ms(long ms);

/* Bytes that tell their place. */
unsigned char pattern(uint64_t seed, size_t i);
unsigned char *pattern_make(uint64_t seed, size_t n);
/* The first difference, or n. */
size_t pattern_differs(uint64_t seed, const void *data, size_t n);

/* A message of the bytes, in `pieces` spans, which point to data. */
wire_out message_of(const void *data, size_t n, size_t pieces);

/* What a server of the tests does with a method:
 *   HELLO   replies with the request
 *   PULL    the same, later, from another thread
 *   PUSH    parks the call until deck_release()
 *   LEAVE   fails: the request is a code (u32) and a text
 *   STATS   replies with "admin" or "user"
 *   DECLARE replies with as many bytes as the request (u64) says
 *   RESTORE replies with the milliseconds (u64) until the deadline
 */
typedef struct deck {
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t changed;
    rpc_call *parked[64];
    unsigned parked_n;
    rpc_call *late[1024]; /* to be answered by the thread */
    unsigned late_n;
    int stop;
    unsigned requests, replies_freed;
    pthread_t thread;
    sched *s; /* joins requests */
} deck;
void deck_start(deck *d);
/* After its server. */
void deck_stop(deck *d);
/* Waits until n calls are parked. */
void deck_wait_parked(deck *d, unsigned n);
/* Answers the parked calls with their requests. */
void deck_release(deck *d);
void deck_handle(void *ctx, rpc_call *call);

extern const rpc_methods test_methods; /* those of wire */
rpc_server_config server_config_of(deck *d);
/* On loopback, without security. */
rpc_server *server_of(deck *d);
rpc_channel *channel_to(int port);
rpc_channel *channel_with(int port, const rpc_security *security);

/* persia_rpc_start(), and waits for its callback. */
int rpc_wait(rpc_channel *c, uint32_t method, wire_out *o,
             uint64_t timeout_ns, rpc_reply *reply);
/* The same with a message of n bytes; asserts that they are returned. */
void echo(rpc_channel *c, uint32_t method, uint64_t seed, size_t n);
/* The same with the bytes; the reply is freed. */
int call_with(rpc_channel *c, uint32_t method, const void *data, size_t n,
              uint64_t timeout_ns);
int call_leave_with(rpc_channel *c, int code, const char *text);

#endif
