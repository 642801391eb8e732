/* push.h: the parts of a push (private).
 *
 *   plan     chunks of all parts are hashed and ordered by stripe, gradients
 *            checked (push_plan.c)                    -- parallel over chunks
 *   reserve  take room for new rows (room.h); only near a limit they are
 *            counted (push_reserve.c)
 *   apply    sum equal ids, find or make rows, run the optimizer (push.c)
 *                                           -- parallel over (job, stripe)
 */
#ifndef PERSIA_TABLE_PUSH_H
#define PERSIA_TABLE_PUSH_H

#include "table/room.h"

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
    size_t chunks_n;
    size_t *first_chunk;  /* [jobs_n + 1] */
    size_t *first_stripe; /* [jobs_n + 1]: numbers (job, stripe) through */
    room room;            /* a claim a job, by the tables' addresses */
    uint64_t *clock;      /* [jobs_n] this push's number in each table */
    optim_plan *optim;    /* [jobs_n] */
} push_plan;

int push_plan_make(push_plan *plan, push_job *jobs, size_t jobs_n);
/* Hashes, orders and checks chunk i: a sched_loop_fn. */
int push_plan_chunk(void *plan, size_t i);

/* Counts the new rows of a claim's job. */
int push_reserve(const push_plan *plan, room_claim *claim);
size_t push_job_ids(const push_job *job);

/* Whether an id without a row gets one in this batch. */
int push_admits(const table *t, uint64_t hash, uint64_t batch);

#endif
