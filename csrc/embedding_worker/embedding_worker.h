/* embedding_worker.h: the embedding worker as a process: the service between
 * data loaders and ranks.
 *
 * It queues the batches of loaders.  A Take looks one up, and leases
 * it to a rank with its pooled embeddings; the Return of their gradients ends
 * the lease when all parameter servers have applied them.  A lease that ends
 * otherwise (time, a later process of the rank) puts the batch back.
 *
 * Updates are named by the loader's stream and the batch's number there, so
 * that servers apply a batch once, whichever worker or rank brings it.
 */
#ifndef PERSIA_EMBEDDING_WORKER_H
#define PERSIA_EMBEDDING_WORKER_H

#include "client/client.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct embedding_worker embedding_worker;

typedef struct embedding_worker_config {
    /* Of the servers: stream and shared are not used.  What it points at must
     * outlive the service. */
    client_config servers;
    uint64_t message_limit; /* bytes of a request, told to clients */
    uint64_t queue_limit;   /* bytes of batches, leased ones included */
    uint64_t lease_ns;
    uint64_t silence_ns;    /* after which a loader is taken for dead */
    uint32_t loaders;       /* whose ends make the end of an epoch */
    unsigned jobs;          /* Takes and Returns that are worked on at once */
} embedding_worker_config;

/* Says Hello to the servers: errors as persia_client_create(). */
PERSIA_API int
persia_embedding_worker_create(const embedding_worker_config *config,
                               embedding_worker **out);
/* Fails what waits, and every call from now on but Stats, with
 * PERSIA_EUNAVAILABLE. */
PERSIA_API void persia_embedding_worker_close(embedding_worker *s);
/* From now on no batch of a loader is taken; ranks may ask for those that are
 * here.  Returns how many these are; 0 where no rank was heard of lately. */
PERSIA_API uint64_t persia_embedding_worker_leave(embedding_worker *s);
/* Nothing waits for servers any more: what does fails with PERSIA_EINTR. */
PERSIA_API void persia_embedding_worker_interrupt(embedding_worker *s);
/* Closes, too; no call may follow. */
PERSIA_API void persia_embedding_worker_destroy(embedding_worker *s);
/* Answers the call, now or later: an rpc_handler. */
PERSIA_API void persia_embedding_worker_handle(void *service, rpc_call *call);
PERSIA_API void persia_embedding_worker_get_stats(embedding_worker *s,
                                                  embedding_worker_stats *out);

#ifdef __cplusplus
}
#endif
#endif
