/* push.c: plans, reserves and applies a push.  See push.h.
 *
 * Order of locks: gates by address, full locks by address, the memory limit,
 * one stripe, its blocks.
 */
#include "table/push.h"

static void job_start(push_plan *plan, size_t j)
{
    push_job *job = &plan->jobs[j];
    table *t = job->t;
    optim_plan *optim = &plan->optim[j];

    job->created = job->refused = job->evicted = 0;
    job->nonfinite = job->touched = 0;
    plan->clock[j] = atomic_fetch_add(&t->pushes, 1) + 1;
    *optim = (optim_plan){
        .dim = t->config.dim,
        .vector = ROW_VECTOR,
        .state = t->state_offset,
        .noise_key = { t->noise_key[0], t->noise_key[1] },
        .noise_draw = job->draw
    };
    persia_optim_prepare(optim, job->optim, t->config.dtype,
                         (int)t->config.momentum);
}

static void job_finish(push_job *job)
{
    table *t = job->t;

    atomic_fetch_add(&t->created, job->created);
    atomic_fetch_add(&t->refused, job->refused);
    atomic_fetch_add(&t->evicted, job->evicted);
    atomic_fetch_add(&t->nonfinite, job->nonfinite);
}

/* All jobs, with their tables' gates held shared. */
static int push_gated(sched *s, push_plan *plan, int (*ready)(void *ctx),
                      void *ctx)
{
    reservation *r = &plan->reservation;
    int rc = reservation_take(r, push_count_new, plan);

    if (rc)
        return rc;
    if (ready && (rc = ready(ctx))) {
        reservation_leave(r);
        return rc;
    }
    for (size_t j = 0; j < plan->jobs_n; j++)
        job_start(plan, j);
    rc = persia_sched_for_rows(s, plan->first_stripe[plan->jobs_n],
                               plan->ids_n, push_change, plan);
    for (size_t j = 0; j < plan->jobs_n; j++)
        job_finish(&plan->jobs[j]);
    reservation_leave(r);
    return rc;
}

int persia_table_push(sched *s, push_job *jobs, size_t jobs_n)
{
    return persia_table_push_ready(s, jobs, jobs_n, NULL, NULL);
}

int persia_table_push_ready(sched *s, push_job *jobs, size_t jobs_n,
                            int (*ready)(void *ctx), void *ctx)
{
    push_plan plan;
    int rc = persia_fork_check("table_push");

    if (rc)
        return rc;
    rc = push_plan_make(&plan, jobs, jobs_n);
    if (rc)
        return rc;
    rc = persia_sched_for_rows(s, plan.chunks_n, plan.ids_n, push_plan_chunk,
                               &plan);
    if (!rc && jobs_n)
        rc = push_plan_end(&plan, persia_sched_threads(s));
    if (rc)
        return rc;
    for (size_t j = 0; j < jobs_n; j++)
        pthread_rwlock_rdlock(&plan.reservation.claims[j].t->gate);
    rc = push_gated(s, &plan, ready, ctx);
    for (size_t j = 0; j < jobs_n; j++)
        pthread_rwlock_unlock(&plan.reservation.claims[j].t->gate);
    return rc;
}
