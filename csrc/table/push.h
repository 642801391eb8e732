/* push.h: the parts of a push (private).
 *
 *   plan     chunks of all parts are hashed and ordered by stripe, gradients
 *            checked (push_plan.c)                    -- parallel over chunks
 *   reserve  take room and memory for new rows (room.h); only near a limit
 *            they are counted (push_reserve.c)
 *   apply    sum equal ids, find or make rows, run the optimizer (push.c)
 *                                           -- parallel over (job, stripe)
 *
 * Apply changes rows, so it must not fail.  Memory for rows and index is
 * reserved; a thread that finds none for its scratch leaves the stripe to the
 * caller, which has enough.
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
    size_t *held;         /* [(job, stripe)]: that of the claims; each written
                             by one thread, under its stripe's lock */
    uint8_t *late;        /* [(job, stripe)] it is left to the caller; written
                             by the thread that came to it first, read when
                             all have ended */
    room room;            /* a claim a job, by the tables' addresses */
    uint64_t *clock;      /* [jobs_n] this push's number in each table */
    optim_plan *optim;    /* [jobs_n] */
} push_plan;

int push_plan_make(push_plan *plan, push_job *jobs, size_t jobs_n);
/* Hashes, orders and checks chunk i: a sched_loop_fn. */
int push_plan_chunk(void *plan, size_t i);

/* When all chunks are ordered: the ids of each stripe, for the claims, and
 * the caller's scratch for the largest of them. */
int push_plan_end(push_plan *plan);

/* Counts the new rows of a claim's job: a room_count_fn. */
int push_reserve(room_claim *claim, void *plan);
/* Scratch for a stripe's n distinct ids: bytes, and the size of the hash
 * table that is a part of it. */
size_t push_group_bytes(size_t n, size_t *entries);
size_t push_job_ids(const push_job *job);

/* Whether an id without a row gets one in a push of this key. */
int push_admits(const table *t, uint64_t hash, uint64_t draw);

#endif
