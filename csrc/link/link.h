/* link.h: the way from a rank or a loader to one embedding worker, and what
 * both clients are configured with.
 *
 * A link is *away* from a call that fails, if the worker does not answer a
 * Hello either, until it answers one.  Others are used meanwhile; a thread of
 * the client asks once a second.
 *
 * The list of workers may change while a client is open: see
 * worker_client_list().  A link stays, as others have its place in the list.
 * A worker that *leaves*, as it said or the list does, gets no new batches; it
 * is asked for what it has until it is away.
 */
#ifndef PERSIA_LINK_H
#define PERSIA_LINK_H

#include <pthread.h>
#include <stdatomic.h>

#include "rpc/rpc.h"
#include "sched/sched.h"
#include "wire/wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- of all clients ---- */

enum worker_method {
#define WORKER_METHOD(upper, name) WORKER_##upper,
    WORKER_METHODS(WORKER_METHOD)
#undef WORKER_METHOD
    WORKER_METHODS_N
};
extern PERSIA_API const rpc_methods persia_worker_methods;

enum {
    /* Batches of a stream that may be open at once. */
    WORKER_WINDOW = 4 * WIRE_BATCHES_MAX,
    /* Addresses of workers in the life of a client, at most. */
    WORKER_LINKS_MAX = 1024
};

typedef struct worker_client_config {
    const char *const *addresses; /* of workers */
    size_t addresses_n;
    char name_space[WIRE_NAME];
    uint32_t rank, world; /* of ranks; loaders: 0 of 0 */
    uint64_t timeout_ns;  /* after which it is an error that all workers are
                             away, or one does not answer, or (ranks) a batch
                             that was lost with its worker is not sent again */
    uint64_t move_ns;     /* for which opening waits for all.  Loaders: after
                             which the batches of one that is away are sent to
                             others */
    uint64_t stream;      /* loaders: the name of what they send, see
                             SubmitRequest; 0: a random one */
    uint64_t job;         /* loaders and ranks that belong together; 0: see
                             HelloRequest */
    uint64_t message_limit;
    uint32_t dtype;       /* enum wire_dtype of embeddings and gradients */
    rpc_security security;
} worker_client_config;

/* The counters of the first worker of the configuration. */
PERSIA_API int persia_worker_ask(const worker_client_config *config,
                               embedding_worker_stats *out);

/* ---- links ---- */

typedef struct worker_link {
    rpc_channel *channel;
    char *address;
    _Atomic(uint64_t) boot; /* as its Hello said; 0: it never answered */
    _Atomic(uint64_t) lineage; /* the same, of the rows that it knows */
    _Atomic(uint64_t) away; /* since this clock; 0: it is there */
    _Atomic(uint64_t) leaving; /* the boot of the worker that said so; or 0 */
    _Atomic(int) unlisted;     /* it is in the list no more */
    _Atomic(uint64_t) message_limit;
    _Atomic(unsigned) tries; /* calls that failed since its last Hello */
    _Atomic(uint64_t) memory; /* of a loader's stream: see SubmitReply */
} worker_link;

/* Who is behind links: copied from the configuration. */
typedef struct worker_client {
    worker_link *links; /* [links_n] of WORKER_LINKS_MAX */
    _Atomic(size_t) links_n; /* rises */
    pthread_mutex_t listing; /* one change of the list at a time */
    char name_space[WIRE_NAME];
    uint32_t rank, world;
    uint64_t client; /* random */
    uint64_t opened; /* in seconds since 1970 */
    uint64_t job;    /* see HelloRequest */
    uint64_t timeout_ns, move_ns;
    /* Called by the thread, about once a second, or 20 times if `hurry`. */
    void (*tick)(void *owner);
    /* Puts what a rank says of itself into its Hello; or NULL.  `held` is of
     * malloc(). */
    void (*introduce)(void *owner, wire_hello *m);
    /* Called for each Hello before its answer counts; or NULL.  An error: it
     * does not. */
    int (*meet)(void *owner, worker_link *l, const wire_hello_reply *m);
    void *owner;
    _Atomic(int) hurry;
    interrupt_flag stop;  /* ends what the thread waits for */
    persia_timer timer;
} worker_client;

/* Opens links to all, and says Hello.  Workers that do not answer within
 * move_ns are away; PERSIA_EUNAVAILABLE if all are until the timeout. */
int worker_client_open(const worker_client_config *config, worker_client *out);
/* Starts the thread. */
int worker_client_start(worker_client *c, void (*tick)(void *owner),
                        int (*meet)(void *owner, worker_link *l,
                                    const wire_hello_reply *m),
                        void *owner);
/* The workers are those of the configuration now: there are links to new ones,
 * which the thread greets.  PERSIA_ELIMIT: some are too many. */
int worker_client_list(worker_client *c, const worker_client_config *config);
/* Wakes it. */
void worker_client_wake(worker_client *c);
/* Ends it; worker_client_close() does so, too. */
void worker_client_stop(worker_client *c);
void worker_client_close(worker_client *c);
wire_caller link_caller(const worker_client *c, const worker_link *l);

/* An answer: free it after use, also after an error. */
typedef struct link_answer {
    rpc_reply bytes;
    wire_memory memory;
} link_answer;
void link_answer_free(link_answer *a);

/* One message and its answer; waits at most `timeout_ns`.  Takes o over.
 * copies: of its bulk data, so that the wait can be interrupted; without one a
 * message that refers to the caller's memory is waited for to its end. */
int link_call(const worker_client *c, worker_link *l, uint32_t method,
              wire_out *o, int copies, uint64_t timeout_ns, link_answer *out);
/* Says Hello (again), for 5 s at most; then it is not away. */
int link_hello(const worker_client *c, worker_link *l);
/* What its Hello says of a stream of batches; 0: of none.  Waits at most
 * `timeout_ns`.  Only numbers and the ledger are kept. */
int link_ask(const worker_client *c, worker_link *l, uint64_t stream,
             uint64_t timeout_ns, wire_hello_reply *out);
/* A call ended with rc: says Hello if the worker may be away.  Whether it
 * is. */
int link_failed(const worker_client *c, worker_link *l, int rc);
int link_is_away(const worker_link *l);
/* A worker with this boot said that it leaves. */
void link_leaves(worker_link *l, uint64_t boot);
int link_is_leaving(const worker_link *l);
/* How many are away, and should not be. */
size_t link_count_away(const worker_client *c);
int link_is_any_there(const worker_client *c);
/* Sends, and does not wait. */
void link_send(worker_link *l, uint32_t method, wire_out *o,
               uint64_t timeout_ns, void (*done)(void *ctx), void *ctx);

/* Whether a call that ended with rc is to be tried again until `until`: waits
 * a little, then says Hello if the worker was started again.  Else rc. */
int link_retry(const worker_client *c, worker_link *l, int rc, uint64_t until);

#ifdef __cplusplus
}
#endif
#endif
