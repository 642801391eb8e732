/* rank.h: the trainer's side of embedding workers: a rank takes batches with
 * their embeddings, and returns gradients.
 *
 * A rank owns links to all workers, the pass that is open, and the Takes that
 * wait; a batch that was taken is owned by its references.
 */
#ifndef PERSIA_RANK_H
#define PERSIA_RANK_H

#include "client/client.h"
#include "link/link.h"
#include "loop/loop.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A rank: takes batches. */
typedef struct rank_taker rank_taker;
/* Says Hello to all workers: those that are away may join later. */
PERSIA_API int persia_rank_open(const worker_client_config *config,
                                rank_taker **out);
/* Batches that were taken may outlive this call. */
PERSIA_API void persia_rank_close(rank_taker *r);
/* The workers are those of the configuration now: see worker_client_list(). */
PERSIA_API int persia_rank_list(rank_taker *r,
                                const worker_client_config *config);
/* What is wanted of every batch, at all workers.  It is copied. */
PERSIA_API int persia_rank_declare(rank_taker *r, const wire_plan *plan);
/* From now on each Take is of the next batch whose place in the epoch is rank,
 * rank + world, ...: for steps of all ranks. */
PERSIA_API void persia_rank_order(rank_taker *r, int ordered);
/* Takes that wait end with PERSIA_ECLOSED, and their batches
 * are offered again.  Those that follow are of the next pass if this one has
 * ended. */
PERSIA_API void persia_rank_cancel(rank_taker *r);

/* The end of this pass is an error of the loop: so the next one is of the same
 * epoch, and is over at once. */
PERSIA_API void persia_rank_again(rank_taker *r);

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
PERSIA_API void persia_rank_get_counts(rank_taker *r, rank_counts *out);

/* A batch of a rank. */
typedef struct rank_taken rank_taken;
/* The next one; nothing is sent yet. */
PERSIA_API int persia_rank_next(rank_taker *r, rank_taken **out);
/* Adds the Take to a batch of a store, as its lookup: see
 * persia_loop_read().  c: the store's. */
PERSIA_API int persia_taken_lookup(rank_taken *t, loop *s, ps_client *c,
                                   uint64_t batch);
/* What the worker answered, TAKE_BATCH or TAKE_END, when it has. */
PERSIA_API const wire_take_reply *persia_taken_reply(const rank_taken *t);
/* The ids that are pooled here: [n] places, and [features * samples + 1]
 * offsets of the features in the order of the plan; either may be NULL.
 * Returns n. */
PERSIA_API size_t persia_taken_places(const rank_taken *t, int64_t *places,
                                      int64_t *offsets);
/* The bytes that the tensors of the reply lie in. */
PERSIA_API void *persia_taken_bytes(rank_taken *t, size_t *n);
/* The loop has it: it is not offered again. */
PERSIA_API void persia_taken_use(rank_taken *t);
/* Nor is it when the loop ends early: it is done without gradients. */
PERSIA_API void persia_taken_skip(rank_taken *t);
/* The loop does not want it: it is offered again. */
PERSIA_API void persia_taken_give_back(rank_taken *t);
/* The last reference ends the lease, if no gradients did. */
PERSIA_API void persia_taken_put(rank_taken *t);

#ifdef __cplusplus
}
#endif
#endif
