/* step.h: the side of the training loop: numbered forwards, gradients that
 * wait for the end of the backward (or for the optimizer's step), one update.
 *
 * A step object is what a persia.Store owns.  Other languages know it by a
 * handle: a number with a generation, so that a handle that outlives its
 * store is an error and never a wild pointer.
 *
 * Life of a forward: step_ticket() gives it a number, its gradient comes
 * back once through step_hold(), and step_apply() applies all that is held,
 * summed per id in the order of the forwards.
 */
#ifndef PERSIA_STEP_H
#define PERSIA_STEP_H

#include "worker/worker.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct step step;

enum {
    STEP_HELD_MAX = 16384,      /* gradients that may wait at once */
    STEP_TICKET_WINDOW = 1 << 20 /* forwards that may await a backward */
};

/* A store: a shard in this process, its worker, and this object. */
PERSIA_API int step_open(unsigned threads, uint64_t memory_limit,
                         uint64_t *handle);
/* Takes a reference.  PERSIA_ECLOSED, PERSIA_EFORK; `what` begins the text. */
PERSIA_API int step_get(uint64_t handle, const char *what, step **out);
PERSIA_API void step_put(step *s);
/* The handle ends now, the store with its last reference.  In a forked
 * child nothing is freed: its locks belong to threads that are not there. */
PERSIA_API void step_close(uint64_t handle);

PERSIA_API struct ps *step_ps(const step *s);
PERSIA_API worker *step_worker(const step *s);

/* The number of a new forward, from 1. */
PERSIA_API uint64_t step_ticket(step *s);

typedef struct step_grad {
    uint64_t ticket;
    worker_grad grad;
    void *owner;              /* keeps the memory of grad alive */
    void (*release)(void *owner);
} step_grad;

/* Takes the gradient of one forward (on success also its owner).
 * PERSIA_ETICKET if that forward's gradient came before, PERSIA_ELIMIT. */
PERSIA_API int step_hold(step *s, const step_grad *g);
PERSIA_API size_t step_held(step *s);
/* Applies everything held.  Whatever the result, nothing is held after. */
PERSIA_API int step_apply(step *s, const optim_args *optim, uint32_t optim_n,
                          worker_counts *counts);
/* Drops everything held; returns how many gradients that were. */
PERSIA_API size_t step_discard(step *s);
/* worker_finite() and worker_norm() of everything held. */
PERSIA_API int step_finite(step *s, uint8_t *finite, uint32_t finite_n);
PERSIA_API int step_norm(step *s, const float *scale, uint32_t scale_n,
                         double *sum);

#ifdef __cplusplus
}
#endif
#endif
