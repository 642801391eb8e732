/* channel.h: what channels and servers share, with gRPC or without; private to
 * rpc.
 */
#ifndef PERSIA_RPC_CHANNEL_H
#define PERSIA_RPC_CHANNEL_H

#include "rpc/rpc.h"

/* A call that is answered now.  began, started: of persia_clock_ns(); 0: it is
 * not counted. */
void times_count_call(rpc_times *t, uint64_t began, uint64_t started);

/* ---- contiguous messages ------------------------------------------------ */

/* A block of the pool of messages; NULL with the error set. */
void *bytes_take(size_t n);

/* ---- addresses ---------------------------------------------------------- */

/* The parts of "host:port", "1.2.3.4:port", "[v6]:port". */
typedef struct rpc_address {
    char host[256]; /* without brackets */
    unsigned port;
    int loopback; /* only processes of this machine can be meant */
} rpc_address;
int address_parse(const char *text, rpc_address *out);

/* PERSIA_EARG where a text of `s` is not what it should be. */
int security_check_texts(const rpc_security *s);
/* PERSIA_EARG where `s` does not make sense, or where peers at `a` would be
 * talked to in the clear without `insecure`. */
int security_check(const rpc_security *s, const rpc_address *a,
                   const char *address, int server);

#endif
