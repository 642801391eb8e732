/* push.h: the parts of a push (private).
 *
 *   plan     chunks of all parts are hashed and ordered by stripe, gradients
 *            checked (push_plan.c)                    -- parallel over chunks
 *   reserve  take what new rows need (reserve.h), and scratch; only near a
 *            limit new rows are counted (push_reserve.c)
 *   change   sum equal ids, find or make rows, run the optimizer
 *            (push_change.c)                 -- parallel over (job, stripe)
 *
 * The change allocates nothing, so nothing fails half-way.
 */
#ifndef PERSIA_TABLE_PUSH_H
#define PERSIA_TABLE_PUSH_H

#include "table/reserve.h"

/* A chunk of a part's ids, ordered by stripe. */
typedef struct push_chunk {
    uint32_t job, part;
    size_t first, n; /* in the part */
    uint64_t *hash;  /* [n] */
    uint16_t *order; /* [n] */
    uint16_t *start; /* [stripes + 1] */
} push_chunk;

typedef struct push_plan {
    push_job *jobs;
    size_t jobs_n;
    push_chunk *chunks;
    size_t chunks_n, ids_n;
    size_t *first_chunk;  /* [jobs_n + 1] */
    size_t *first_stripe; /* [jobs_n + 1]: numbers (job, stripe) through */
    size_t *slots;        /* [(job, stripe)]: those of the claims; each written
                             by one thread, under its stripe's lock */
    reservation reservation; /* a claim a job, by the tables' addresses */
    char *groups;         /* [groups_n] scratch of group_bytes, each for a
                             stripe at a time; as many as threads */
    size_t groups_n, group_bytes;
    atomic_uchar *taken;  /* [groups_n] */
    _Atomic(size_t) *opens; /* [jobs_n] those of the claims */
    uint64_t *clock;      /* [jobs_n] this push's number in each table */
    optim_plan *optim;    /* [jobs_n] */
} push_plan;

int push_plan_make(push_plan *plan, push_job *jobs, size_t jobs_n);
/* Hashes, orders and checks chunk i: a sched_loop_fn. */
int push_plan_chunk(void *plan, size_t i);

/* When all chunks are ordered: the ids of each stripe, for the claims, and
 * scratch for as many threads, each for the largest of them. */
int push_plan_end(push_plan *plan, size_t threads);

/* Counts the new rows of a claim's job: a reserve_count_fn. */
int push_count_new(reserve_claim *claim, void *plan);
/* Applies one (job, stripe): a sched_loop_fn, whose result is PERSIA_OK.
 * Allocates nothing. */
int push_change(void *plan, size_t item);
/* Scratch for a stripe's n ids. */
size_t push_group_bytes(size_t n, uint32_t dim);
size_t push_job_ids(const push_job *job);

#endif
