/* role.h: the embedding worker as a process, and its two kinds of clients:
 * ranks that train, and data loaders.
 *
 * The service queues the batches of loaders.  A Take looks one up, and leases
 * it to a rank with its pooled embeddings; the Return of their gradients ends
 * the lease when all parameter servers have applied them.  A lease that ends
 * otherwise (time, a later process of the rank) puts the batch back.
 *
 * Updates are named by the loader's stream and the batch's number there, so
 * that servers apply a batch once, whichever worker or rank brings it.
 */
#ifndef PERSIA_ROLE_H
#define PERSIA_ROLE_H

#include "client/client.h"
#include "store/store.h"

#ifdef __cplusplus
extern "C" {
#endif

enum role_method {
#define ROLE_METHOD(upper, name) ROLE_##upper,
    ROLE_METHODS(ROLE_METHOD)
#undef ROLE_METHOD
    ROLE_METHODS_N
};
extern PERSIA_API const rpc_methods persia_role_methods;

/* ---- the service ---- */

typedef struct role_service role_service;

typedef struct role_config {
    /* Of the servers: stream and shared are not used.  What it points at must
     * outlive the service. */
    client_config servers;
    uint64_t message_limit; /* bytes of a request, told to clients */
    uint64_t queue_limit;   /* bytes of batches, leased ones included */
    uint64_t lease_ns;
    uint64_t silence_ns;    /* after which a loader is taken for dead */
    uint32_t loaders;       /* whose ends make the end of an epoch */
    unsigned jobs;          /* Takes and Returns that are worked on at once */
} role_config;

/* Says Hello to the servers: errors as persia_client_create(). */
PERSIA_API int persia_role_create(const role_config *config,
                                  role_service **out);
/* Fails what waits, and every call from now on but Stats, with
 * PERSIA_EUNAVAILABLE. */
PERSIA_API void persia_role_close(role_service *s);
/* See persia_client_held(). */
PERSIA_API uint64_t persia_role_held(role_service *s);
/* Nothing waits for servers any more: what does fails with PERSIA_EINTR. */
PERSIA_API void persia_role_interrupt(role_service *s);
/* Closes, too; no call may follow. */
PERSIA_API void persia_role_destroy(role_service *s);
/* Answers the call, now or later: an rpc_handler. */
PERSIA_API void persia_role_handle(void *service, rpc_call *call);
PERSIA_API void persia_role_get_stats(role_service *s, role_stats *out);

/* ---- clients ---- */

typedef struct role_client_config {
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
} role_client_config;

/* A rank: takes batches. */
typedef struct role_rank role_rank;
/* Says Hello to all workers: those that are away may join later. */
PERSIA_API int persia_rank_open(const role_client_config *config,
                                role_rank **out);
/* Batches that were taken may outlive this call. */
PERSIA_API void persia_rank_close(role_rank *r);
/* What is wanted of every batch, at all workers.  It is copied. */
PERSIA_API int persia_rank_declare(role_rank *r, const wire_plan *plan);
/* From now on each Take is of the next batch whose place in the epoch is rank,
 * rank + world, ...: for steps of all ranks. */
PERSIA_API void persia_rank_order(role_rank *r, int ordered);
/* Takes that wait end with PERSIA_ECLOSED, and their batches
 * are offered again.  Those that follow are of the next pass if this one has
 * ended. */
PERSIA_API void persia_rank_cancel(role_rank *r);

/* The end of this pass is an error of the loop: so the next one is of the same
 * epoch, and is over at once. */
PERSIA_API void persia_rank_again(role_rank *r);

typedef struct rank_counts {
    uint64_t late; /* batches whose gradients arrived after their lease, so
                      that they were not applied */
    uint64_t failed; /* batches of the job that ended without an update, as
                        workers have said */
    uint64_t given_up; /* of late: batches that no worker had within the
                          timeout, after theirs had died */
    uint64_t away; /* workers, now */
    uint64_t silent; /* loaders without which the last epoch ended */
    uint64_t epochs; /* of the loaders that are there, that are over for this
                        rank; those before its first pass among them */
} rank_counts;
PERSIA_API void persia_rank_get_counts(role_rank *r, rank_counts *out);

/* A batch of a rank. */
typedef struct role_taken role_taken;
/* The next one; nothing is sent yet. */
PERSIA_API int persia_rank_next(role_rank *r, role_taken **out);
/* Adds the Take to a batch of a store, as its lookup: see
 * persia_store_read().  c: the store's. */
PERSIA_API int persia_taken_lookup(role_taken *t, store *s, ps_client *c,
                                   uint64_t batch);
/* What the worker answered, TAKE_BATCH or TAKE_END, when it has. */
PERSIA_API const wire_take_reply *persia_taken_reply(const role_taken *t);
/* The ids that are pooled here: [n] places, and [features * samples + 1]
 * offsets of the features in the order of the plan; either may be NULL.
 * Returns n. */
PERSIA_API size_t persia_taken_places(const role_taken *t, int64_t *places,
                                      int64_t *offsets);
/* The bytes that the tensors of the reply lie in. */
PERSIA_API void *persia_taken_bytes(role_taken *t, size_t *n);
/* The loop has it: it is not offered again. */
PERSIA_API void persia_taken_use(role_taken *t);
/* Nor is it when the loop ends early: it is done without gradients. */
PERSIA_API void persia_taken_skip(role_taken *t);
/* The loop does not want it: it is offered again. */
PERSIA_API void persia_taken_give_back(role_taken *t);
/* The last reference ends the lease, if no gradients did. */
PERSIA_API void persia_taken_put(role_taken *t);

/* A data loader: sends batches. */
typedef struct role_sender role_sender;
PERSIA_API int persia_sender_open(const role_client_config *config,
                                  role_sender **out);
/* leaves: there are no more epochs; else workers take it for dead when it has
 * been silent for a while. */
PERSIA_API void persia_sender_close(role_sender *s, int leaves);
/* Sends a batch: caller, stream, number, settled, attempt and epoch are filled
 * in here.  Waits for room.  One that all servers have is passed over. */
PERSIA_API int persia_sender_send(role_sender *s, wire_submit *m);
/* Ends an epoch. */
PERSIA_API int persia_sender_end(role_sender *s);
/* Waits until all batches are done.  PERSIA_ETIMEOUT: none was for so long (0:
 * no limit).  PERSIA_EINTR.  Once the error of a batch that ended without an
 * update. */
PERSIA_API int persia_sender_flush(role_sender *s, uint64_t timeout_ns);
/* Asks workers for the stream, which has so many epochs, and keeps it from
 * other loaders that ask.  *status: SUBMIT_QUEUED: it is this sender's;
 * SUBMIT_HELD: another one's, which was heard of lately; SUBMIT_ENDED: it has
 * no more batches. */
PERSIA_API int persia_sender_claim(role_sender *s, uint64_t epochs,
                                   uint32_t *status);
/* Batches up to this number are not sent: there are none.  Waits until those
 * before them are done. */
PERSIA_API int persia_sender_skip(role_sender *s, uint64_t number);
typedef struct sender_counts {
    uint64_t stream;
    uint64_t position; /* batches, from the first on, that were done at the
                          start or are now */
    uint64_t sent; /* batches, those that were passed over included */
    uint64_t done; /* that need not be sent again, from the first on */
    uint64_t passed; /* over: an earlier process had sent them */
    uint64_t moved;  /* that another worker got, or one that had lost them */
    uint64_t failed; /* done, but without an update: refused, or given up */
    uint64_t lost;   /* done, but not in the rows of servers that were started
                        again, or of a checkpoint that was loaded, since */
    uint64_t away;   /* workers, now */
} sender_counts;
PERSIA_API void persia_sender_get_counts(role_sender *s, sender_counts *out);

/* The counters of the first worker of the configuration. */
PERSIA_API int persia_role_ask(const role_client_config *config,
                               role_stats *out);

#ifdef __cplusplus
}
#endif
#endif
