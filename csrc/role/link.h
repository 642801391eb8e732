/* link.h: the way from a rank or a loader to one worker (private). */
#ifndef PERSIA_ROLE_LINK_H
#define PERSIA_ROLE_LINK_H

#include <stdatomic.h>

#include "role/role.h"

typedef struct role_link {
    rpc_channel *channel;
    char *address;
    _Atomic(uint64_t) boot; /* as its Hello said */
    _Atomic(uint64_t) message_limit;
} role_link;

/* Who is behind links: copied from the configuration. */
typedef struct role_client {
    role_link *links; /* [links_n] */
    size_t links_n;
    char name_space[WIRE_NAME];
    uint32_t rank, world;
    uint64_t client; /* random */
    uint64_t timeout_ns;
} role_client;

/* Opens links to all, and says Hello. */
int role_client_open(const role_client_config *config, role_client *out);
void role_client_close(role_client *c);
wire_caller link_caller(const role_client *c, const role_link *l);

/* An answer: free it after use, also after an error. */
typedef struct link_answer {
    rpc_reply bytes;
    wire_memory memory;
} link_answer;
void link_answer_free(link_answer *a);

/* One message and its answer; waits at most `timeout_ns`.  Takes o over.
 * copies: its bulk data may go before the answer comes, for the wait may be
 * interrupted; else it must not be. */
int link_call(const role_client *c, role_link *l, uint32_t method, wire_out *o,
              int copies, uint64_t timeout_ns, link_answer *out);
/* Says Hello (again). */
int link_hello(const role_client *c, role_link *l);
/* Sends, and does not wait. */
void link_send(role_link *l, uint32_t method, wire_out *o, uint64_t timeout_ns,
               void (*done)(void *ctx), void *ctx);

/* Whether a call that ended with rc is to be tried again until `until`: waits
 * a little, then says Hello if the worker was started again.  Else rc. */
int link_retry(const role_client *c, role_link *l, int rc, uint64_t until);

#endif
