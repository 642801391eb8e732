/* plan.h (private): a plan and a batch that was checked. */
#ifndef PERSIA_BATCH_PLAN_H
#define PERSIA_BATCH_PLAN_H

#include <pthread.h>
#include <stdatomic.h>

#include "batch/batch.h"
#include "client/client.h"
#include "mem/mem.h"

enum { BATCHER_PLANS_MAX = 65536 };

/* A feature of a plan with what follows from its table. */
typedef struct planned {
    plan_feature want;
    uint32_t dim;
    uint32_t column; /* its first column in the output of PLAN_BAGS */
} planned;

typedef struct plan {
    uint32_t kind, keys, width, n;
    uint32_t gaps; /* PLAN_ROWS: some columns or keys have no feature */
    planned features[];
} plan;

/* Buffers of one call; kept for the next one. */
typedef struct scratch {
    struct scratch *next;
    mem_buffer jobs, slices, rows, bags;
} scratch;

struct batcher {
    ps_client *c;
    pthread_mutex_t lock; /* guards plans beyond plans_n, and free */
    scratch *free;
    /* Slots below `plans_n` never change: readers need no lock. */
    _Atomic(uint32_t) plans_n;
    plan *plans[BATCHER_PLANS_MAX];
};

/* The ids of one feature in one batch. */
typedef struct slice {
    const planned *f;
    size_t first, n;        /* its ids */
    const int64_t *offsets; /* [bags + 1], or NULL: one id a bag */
    int weighted;           /* scales differ from 1 although one id a bag */
} slice;

/* Checks the batch against the plan and cuts it into one slice a feature. */
int batch_slice(batcher *w, const plan *p, const id_batch *b, slice *out);

/* The gradients as push jobs, one a table that has some; in memory of
 * `tmp`. */
int batcher_push_jobs(batcher *w, const batcher_grad *grads, size_t n,
                      scratch *tmp, push_job **jobs, uint32_t **tables,
                      size_t *jobs_n);
const plan *batcher_plan_get(const batcher *w, uint32_t no);
/* A scratch for this call, or NULL with the error set. */
scratch *scratch_take(batcher *w);
void scratch_give(batcher *w, scratch *s);

#endif
