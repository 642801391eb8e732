/* taken.h (private): batches whose ids are elsewhere. */
#ifndef PERSIA_BATCH_TAKEN_H
#define PERSIA_BATCH_TAKEN_H

#include "batch/plan.h"

/* No ids are left of features that are pooled elsewhere. */
void taken_cut(const batcher *w, const plan *p, const batcher_source *s,
               slice *slices);
/* The rows of jobs whose ids are places. */
int taken_pull(batcher *w, batcher_source *s, const uint32_t *tables,
               const pull_job *jobs, size_t jobs_n);
/* The columns of features that are pooled elsewhere. */
int taken_read(batcher *w, batcher_source *s, const plan *p, float *out,
               size_t stride);
/* Whether a gradient is of such a batch. */
int taken_is(const batcher_grad *g);
/* Whether some are: then all have to be, except for taken_finite(). */
int taken_any(const batcher_grad *grads, size_t n);
/* persia_batcher_backward() and persia_batcher_finite() of gradients of which
 * some are. */
int taken_backward(batcher *w, const batcher_grad *grads, size_t n,
                   const client_update *update, const optim_args *optim,
                   uint32_t optim_n, batcher_counts *counts);
int taken_finite(batcher *w, const batcher_grad *grads, size_t n,
                 uint8_t *finite, uint32_t finite_n);
/* persia_batcher_sums(): those of one table may be several. */
int taken_sums(batcher *w, const batcher_grad *grads, size_t n,
               batcher_sum **out, size_t *out_n, int *finite);

#endif
