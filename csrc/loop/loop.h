/* loop.h: the side of the training loop: numbered forwards, gradients that
 * wait for the end of the backward (or for the optimizer's step), one update.
 *
 * A loop is the object that a persia.Store owns; comments call both the store.
 * Other languages know a loop by a handle: a number with a generation, so that
 * a handle that outlives its store is an error and never a wild pointer.
 *
 * Life of a forward: persia_loop_ticket() gives it a number, its gradient is
 * given once to persia_loop_add_grad(), and persia_loop_apply() applies all
 * that is pending, summed per id in the order of the forwards.
 */
#ifndef PERSIA_LOOP_H
#define PERSIA_LOOP_H

#include "batch/batch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct loop loop;

enum {
    LOOP_PENDING_MAX = 16384,       /* gradients that may wait at once */
    LOOP_TICKET_WINDOW = 1 << 20 /* forwards that may await a backward */
};

/* A store on the tables of a client, which ends with the store, and at once
 * after an error. */
struct ps_client;
PERSIA_API int persia_loop_open(struct ps_client *client, uint64_t *handle);
/* Takes a reference, which keeps the client (NULL: not asked for), too.
 * PERSIA_ECLOSED, PERSIA_EFORK; `what` begins the text. */
PERSIA_API int persia_loop_get(uint64_t handle, const char *what, loop **out,
                               struct ps_client **client);
PERSIA_API void persia_loop_put(loop *s);
/* The handle ends now, the store with its last reference.  In a forked
 * child nothing is freed: its locks belong to threads that are not there. */
PERSIA_API void persia_loop_close(uint64_t handle);

PERSIA_API int persia_loop_is_embedded(const loop *s);

/* See persia_batcher_plan() and persia_batcher_plan_shape(). */
PERSIA_API int persia_loop_plan(loop *s, uint32_t kind, uint32_t keys,
                                const plan_feature *features,
                                uint32_t features_n, uint32_t *plan);
PERSIA_API int persia_loop_plan_shape(loop *s, uint32_t plan, uint32_t *kind,
                                      uint32_t *keys, uint32_t *width);

/* See persia_batcher_group(). */
PERSIA_API int persia_loop_group(loop *s, uint32_t plan,
                                 const id_batch *batch,
                                 struct batcher_group **out);

/* The number of a new forward, from 1. */
PERSIA_API uint64_t persia_loop_ticket(loop *s);
/* Whether one was given outside of all passes since the last such call. */
PERSIA_API int persia_loop_take_plain(loop *s);

/* Looks up a batch at once, see persia_batcher_forward(), and keeps its index.
 * ticket 0: no gradient will be given, and it sees all updates before it; so
 * does every forward outside of all passes, and raises their error. */
PERSIA_API int persia_loop_forward(loop *s, uint64_t ticket, uint32_t plan,
                                   const id_batch *batch, float *out,
                                   size_t stride, uint32_t *rows);
/* Keeps the index of a forward until its gradient is given (the reference is
 * taken over; NULL, or ticket 0: nothing is kept); persia_loop_drop_index():
 * none will be given. */
PERSIA_API void persia_loop_keep_index(loop *s, uint64_t ticket,
                                       struct batch_index *index);
PERSIA_API void persia_loop_drop_index(loop *s, uint64_t ticket);

typedef struct loop_grad {
    uint64_t ticket;          /* 0: of an unnumbered forward, not checked */
    batcher_grad grad; /* its index is filled in by persia_loop_add_grad() */
    void *owner;              /* keeps the memory of grad alive */
    void (*release)(void *owner);
    int (*arrive)(void *owner); /* waits until grad is there; NULL: it is */
    uint64_t thread;          /* that added it; by persia_loop_add_grad() */
    void *ids;                /* private: a copy of the ids */
    int copied;               /* private: by persia_loop_copy_grad() */
} loop_grad;

/* Which of the pending gradients: those that the calling thread added
 * (autograd runs a backward's pushes and its end on one thread), or all. */
enum loop_whose { LOOP_MINE, LOOP_ALL };

/* Takes the gradient of one forward (on success also its owner).
 * PERSIA_ETICKET if that forward's gradient was given before,
 * PERSIA_ELIMIT. */
PERSIA_API int persia_loop_add_grad(loop *s, const loop_grad *g);
/* For gradients in memory that will not last until the update: copies all
 * that g points at (`floats` of grad, `offsets` of the batch) and makes the
 * copy g's owner, to be released where persia_loop_add_grad() refuses it. */
PERSIA_API int persia_loop_copy_grad(loop *s, loop_grad *g, size_t floats,
                                     size_t offsets);
PERSIA_API size_t persia_loop_pending_grads(loop *s, enum loop_whose whose);
/* Applies what is pending.  Whatever the result, it is not pending after.
 *
 * Threads of the store do it while the caller runs (a) if the tables are
 * remote; (b) with LOOP_MINE, if all gradients are of batches that the
 * look-ahead counts, under a bound of at least 1 and on threads of the store.
 * Otherwise it is done on return.  Updates that are in flight may fail later:
 * the first error is kept, and returned once by the next persia_loop_apply(),
 * persia_loop_batch_next() or persia_loop_flush(), which did all the same
 * what they were asked for. PERSIA_EINTR: interrupted while it waited for
 * earlier updates; it is handed over. */
PERSIA_API int persia_loop_apply(loop *s, enum loop_whose whose,
                                 const optim_args *optim, uint32_t optim_n);
/* Waits until every update that was handed over is applied or has failed.
 * PERSIA_ETIMEOUT (timeout_ns; 0: no limit), PERSIA_EINTR, or the error that
 * was kept. */
PERSIA_API int persia_loop_flush(loop *s, uint64_t timeout_ns);
/* The same before the store is closed: once an update has failed, those that
 * have not begun are dropped; once it was interrupted, servers are not waited
 * for any more. */
PERSIA_API int persia_loop_finish(loop *s);
/* Waits, too, without telling that error: before a look at the rows. */
PERSIA_API int persia_loop_settle(loop *s);
/* The error that was kept, once. */
PERSIA_API int persia_loop_error(loop *s);
/* It is not told: the rows that it is about have been replaced. */
PERSIA_API void persia_loop_drop_error(loop *s);

/* persia_client_greet() and persia_client_go_on(); the numbers of updates then
 * continue after persia_client_last_number().  No update is in flight.
 * Remote: an update has the number of its batch's place, which counts the
 * batches that loops take in passes that train, trained or not.  From the
 * first update without one on they are counted, or, after
 * persia_loop_go_on(), such updates are refused: PERSIA_EARG. */
PERSIA_API int persia_loop_greet(loop *s, int restored);
PERSIA_API int persia_loop_go_on(loop *s, uint64_t stream, uint64_t number,
                                 uint64_t lost);
/* *last: the place of the last batch that a loop took.  Whether the numbers
 * of all updates are places. */
PERSIA_API int persia_loop_places(loop *s, uint64_t *last);

typedef struct loop_counts {
    uint64_t applied, failed; /* updates */
    uint64_t pending;         /* handed over and not applied yet */
} loop_counts;
PERSIA_API void persia_loop_get_counts(loop *s, loop_counts *out);
/* Drops what is pending; returns how many gradients that were. */
PERSIA_API size_t persia_loop_discard(loop *s, enum loop_whose whose);
/* Those of n forwards, by their tickets, alone. */
PERSIA_API size_t persia_loop_discard_of(loop *s, const uint64_t *tickets,
                                         size_t n);
/* Other rows were loaded: forwards so far have no backward any more
 * (PERSIA_ETICKET), and what was looked up ahead is looked up again.  Nothing
 * is pending or in flight. */
PERSIA_API void persia_loop_forget(loop *s);
/* persia_batcher_finite() and persia_batcher_sums() of all that is pending. */
PERSIA_API int persia_loop_finite(loop *s, uint8_t *finite,
                                  uint32_t finite_n);
PERSIA_API int persia_loop_sums(loop *s, batcher_sum **out, size_t *n,
                                int *finite);

/* ---- look-ahead ----
 *
 * A pass is one iteration of a data loader.  Its batches are looked up on
 * threads of the store before the training loop asks for them, in order, and
 * under a bound: the lookups of a batch start when at most `staleness`
 * batches before it are open.  Before it are those of its pass, and those
 * that loops have taken of other passes.  A batch is open from its birth
 * until its gradients are applied or dropped, it is skipped, or abandoned.
 *
 * - Batches whose gradients wait for store.optimizer.step() are not open; all
 *   of them count as one towards lookups that start by themselves (it may be
 *   the last of its step), and not for a batch that the loop waits for.
 * - Batches that the loop has out of other passes do not count for a batch
 *   that it waits for: no backward is between them, so they are one step.
 * - A forward takes a lookup only if it misses the updates of at most
 *   `staleness` batches.  Otherwise it looks up itself, when at most so many
 *   are in flight.
 *
 * Batch numbers are of the process, so that a batch has the same one in every
 * store it is looked up in; pass numbers are of the store.  Both begin at 1
 * and are never used again; calls with numbers that have ended do nothing.
 */
#define LOOP_ASYNC UINT64_MAX /* staleness without bound */
enum { LOOP_STALENESS_BUCKETS = 65 };

/* Waits for the updates before it: its first lookups see them.  `here`: no
 * core is free for threads of the store, so unless the tables are remote, a
 * lookup is done by the forward that wants it, and an update by the backward.
 * PERSIA_EINTR. */
PERSIA_API int persia_loop_pass_open(loop *s, uint64_t staleness, int here,
                                     uint64_t *pass);
/* Lookups that did not start are cancelled, results that were not taken are
 * dropped, and no batch of the pass is open any more, except updates in
 * flight; gradients of batches that were handed out are still welcome. */
PERSIA_API void persia_loop_pass_close(loop *s, uint64_t pass);

/* A number for a new batch. */
PERSIA_API uint64_t persia_loop_batch_number(void);
/* A new batch at the end of the pass, without lookups. */
PERSIA_API int persia_loop_batch_add(loop *s, uint64_t pass, uint64_t batch);

typedef struct loop_lookup {
    uint32_t plan;
    id_batch batch;
    float *out; /* see persia_batcher_forward() */
    size_t stride;
    uint32_t *hints;          /* row numbers, for the push */
    struct batch_index **index;
    /* Instead of a lookup: takes the batch from elsewhere and makes its index;
     * what is above is not used.  NULL: a lookup. */
    int (*take)(void *owner);
    int (*send)(void *owner); /* after a lookup, on its thread; or NULL */
    void *owner;              /* keeps all this memory alive */
    /* On a thread of the user; what is taken, on any. */
    void (*release)(void *owner);
} loop_lookup;

/* Adds a lookup (on success the batch owns l->owner). */
PERSIA_API int persia_loop_batch_lookup(loop *s, uint64_t batch,
                                        const loop_lookup *l);
/* All lookups are added: they start when the bound allows. */
PERSIA_API void persia_loop_batch_ready(loop *s, uint64_t batch);

/* The loop asks for this batch: returns when its lookups may start (not when
 * they are done).  While they may not, and no update is being applied, the
 * oldest open batch of the pass is abandoned: later gradients of its forwards
 * are refused (PERSIA_ETICKET).  `reading`: no gradients are expected.
 * Without staleness it waits for the updates of earlier batches, too; where
 * tables are remote, lookups are sent right behind such an update.
 * PERSIA_EINTR, PERSIA_ECLOSED, or the error of an update, see
 * persia_loop_apply(): the batch may be asked for again. */
PERSIA_API int persia_loop_batch_next(loop *s, uint64_t batch, int reading);
/* The loop gives up this batch; its forwards' gradients are refused. */
PERSIA_API void persia_loop_batch_skip(loop *s, uint64_t batch);

/* A forward of `ticket` (0: without gradient) uses this batch. */
PERSIA_API void persia_loop_batch_bind(loop *s, uint64_t batch,
                                       uint64_t ticket);
/* Hands over the owner of the looked-up result, once: waits for it, or looks
 * up on this thread what did not start.  *owner is NULL if there is none that
 * is fresh enough: the caller looks up now.
 * Its error is the lookup's, or PERSIA_EINTR. */
PERSIA_API int persia_loop_batch_take(loop *s, uint64_t batch, uint32_t plan,
                                      void **owner);

/* Returns when a batch that is taken from elsewhere is there.  Its error, or
 * PERSIA_EINTR; PERSIA_OK where the batch is none, or has ended. */
PERSIA_API int persia_loop_batch_wait(loop *s, uint64_t batch);
/* A forward of such a batch, see persia_batcher_read(); PERSIA_ETICKET if it
 * has ended. */
PERSIA_API int persia_loop_read(loop *s, uint64_t batch, uint64_t ticket,
                                uint32_t plan, const id_batch *ids,
                                float *out, size_t stride);

/* ---- steps of all ranks ----
 *
 * A synchronous pass over several ranks: all ranks join, agree on the number
 * of the last step, and then every update of this rank is its part of the
 * next step, which shards apply when all parts are there.  So every rank must
 * send a part for every step.  `by_batch`: a batch of the pass that ends
 * without an update sends an empty one; otherwise each persia_loop_apply()
 * with LOOP_ALL sends one, even if nothing is pending.  No lookup of such a
 * pass starts while an empty part is in flight. */

/* Joins at all shards; *applied: the largest step that was applied. */
PERSIA_API int persia_loop_join(loop *s, uint64_t *applied);
/* Updates are parts of the steps after `last` from now on. */
PERSIA_API int persia_loop_sync(loop *s, uint64_t last, uint32_t rank,
                                uint32_t world);
PERSIA_API int persia_loop_pass_sync(loop *s, uint64_t pass, int by_batch);
/* Updates are no parts any more, and the other ranks continue without this
 * one: after those that are in flight (`settle`; PERSIA_EINTR), or at once,
 * and then without long waits for servers that may not be there. */
PERSIA_API int persia_loop_leave(loop *s, int settle);

typedef struct loop_prefetch_stats {
    uint64_t batches;        /* that the loop asked for */
    uint64_t prefetched;     /* forwards that took a lookup of their batch */
    uint64_t not_prefetched; /* other forwards while a pass was open */
    uint64_t started;        /* batches whose lookups were allowed */
    uint64_t waited;         /* times the loop asked before it was allowed */
    uint64_t waited_ns;      /* ... and for lookups and updates */
    uint64_t abandoned, skipped, read, dropped; /* batches, by their end */
    /* staleness[k]: batches whose first forward missed the updates of k
     * others; the last bucket holds all above. */
    uint64_t staleness[LOOP_STALENESS_BUCKETS];
} loop_prefetch_stats;
PERSIA_API void persia_loop_get_prefetch_stats(loop *s,
                                               loop_prefetch_stats *out);

#ifdef __cplusplus
}
#endif
#endif
