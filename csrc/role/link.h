/* link.h: the way from a rank or a loader to one worker (private).
 *
 * A link is *away* from a call that fails, if the worker does not answer a
 * Hello either, until it answers one.  Others are used meanwhile; a thread of
 * the client asks once a second.
 */
#ifndef PERSIA_ROLE_LINK_H
#define PERSIA_ROLE_LINK_H

#include <stdatomic.h>

#include "role/role.h"

typedef struct role_link {
    rpc_channel *channel;
    char *address;
    _Atomic(uint64_t) boot; /* as its Hello said; 0: it never answered */
    _Atomic(uint64_t) lineage; /* the same, of the rows that it knows */
    _Atomic(uint64_t) away; /* since this clock; 0: it is there */
    _Atomic(uint64_t) message_limit;
} role_link;

/* Who is behind links: copied from the configuration. */
typedef struct role_client {
    role_link *links; /* [links_n] */
    size_t links_n;
    char name_space[WIRE_NAME];
    uint32_t rank, world;
    uint64_t client; /* random */
    uint64_t job;    /* see HelloRequest */
    uint64_t timeout_ns, move_ns;
    /* Called by the thread, about once a second, or 20 times if `hurry`. */
    void (*tick)(void *owner);
    /* What a rank holds, of malloc(); or NULL: it holds none. */
    wire_batch_name *(*held)(void *owner, size_t *n);
    /* Called for each Hello before its answer counts; or NULL.  An error: it
     * does not. */
    int (*meet)(void *owner, role_link *l, const wire_hello_reply *m);
    void *owner;
    _Atomic(int) hurry;
    interrupt_flag stop;  /* ends what the thread waits for */
    pthread_mutex_t lock; /* guards `ends` */
    pthread_cond_t wake;
    int ends;
    pthread_t thread;
    int runs;
} role_client;

/* Opens links to all, and says Hello.  Workers that do not answer within
 * move_ns are away; PERSIA_EUNAVAILABLE if all are until the timeout. */
int role_client_open(const role_client_config *config, role_client *out);
/* Starts the thread. */
int role_client_start(role_client *c, void (*tick)(void *owner),
                      int (*meet)(void *owner, role_link *l,
                                  const wire_hello_reply *m),
                      void *owner);
/* Wakes it. */
void role_client_wake(role_client *c);
/* Ends it; role_client_close() does so, too. */
void role_client_stop(role_client *c);
void role_client_close(role_client *c);
wire_caller link_caller(const role_client *c, const role_link *l);

/* An answer: free it after use, also after an error. */
typedef struct link_answer {
    rpc_reply bytes;
    wire_memory memory;
} link_answer;
void link_answer_free(link_answer *a);

/* One message and its answer; waits at most `timeout_ns`.  Takes o over.
 * copies: of its bulk data, so that the wait can be interrupted; without one a
 * message that refers to the caller's memory is waited for to its end. */
int link_call(const role_client *c, role_link *l, uint32_t method, wire_out *o,
              int copies, uint64_t timeout_ns, link_answer *out);
/* Says Hello (again); then it is not away. */
int link_hello(const role_client *c, role_link *l, uint64_t timeout_ns);
/* Says it once more: what it holds. */
int link_hello_again(const role_client *c, role_link *l, uint64_t timeout_ns);
/* What its Hello says of a stream of batches; 0: of none.  Only numbers and
 * the ledger are kept. */
int link_ask(const role_client *c, role_link *l, uint64_t stream,
             wire_hello_reply *out);
/* A call ended with rc: says Hello if the worker may be away.  Whether it
 * is. */
int link_failed(const role_client *c, role_link *l, int rc);
int link_is_away(const role_link *l);
int link_is_any_there(const role_client *c);
/* Sleeps; PERSIA_EINTR. */
int link_pause(uint64_t ns);
/* Sends, and does not wait. */
void link_send(role_link *l, uint32_t method, wire_out *o, uint64_t timeout_ns,
               void (*done)(void *ctx), void *ctx);

/* Whether a call that ended with rc is to be tried again until `until`: waits
 * a little, then says Hello if the worker was started again.  Else rc. */
int link_retry(const role_client *c, role_link *l, int rc, uint64_t until);

#endif
