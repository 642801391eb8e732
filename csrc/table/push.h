/* push.h: the parts of a push (private).
 *
 *   plan     chunks of all parts are hashed and ordered by stripe, gradients
 *            checked (push_plan.c)                    -- parallel over chunks
 *   reserve  only near a limit: count the rows to be made, refuse the push
 *            before anything changes (push_reserve.c)
 *   apply    sum equal ids, find or make rows, run the optimizer (push.c)
 *                                           -- parallel over (job, stripe)
 */
#ifndef PERSIA_TABLE_PUSH_H
#define PERSIA_TABLE_PUSH_H

#include "table/stripe.h"

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
    table **locked;       /* [jobs_n] the tables by address */
    uint64_t *clock;      /* [jobs_n] this push's number in each table */
    optim_plan *optim;    /* [jobs_n] */
} push_plan;

int push_plan_make(push_plan *plan, push_job *jobs, size_t jobs_n);
/* Hashes, orders and checks chunk i: a sched_loop_fn. */
int push_plan_chunk(void *plan, size_t i);

/* Rows are made in a table with a limit by holding its full_lock, between
 * room_announce() of at most `ids` new rows and room_retract(): shared, or,
 * if room_announce() says that they come near the limit, exclusively and
 * after counting them. */
int room_limited(const table *t);
int room_announce(table *t, size_t ids);
void room_retract(table *t, size_t ids);
/* PERSIA_ECAPACITY or PERSIA_ELIMIT if job's new rows would not fit. */
int push_reserve(const push_plan *plan, size_t job);
/* The same for n rows that are not there. */
int room_reserve(const table *t, size_t n, uint64_t an_id);
size_t push_job_ids(const push_job *job);

/* Whether an id without a row gets one in this batch. */
int push_admits(const table *t, uint64_t hash, uint64_t batch);

/* Whether all of x is finite. */
int floats_finite(const float *x, size_t n);

#endif
