/* ends.c: waiting for the threads of a shard's jobs. */
#include "shard/shard.h"

/* How long the end of a shard waits for threads that were stopped. */
static const uint64_t END_NS = 2000000000;

void persia_job_ends_init(job_ends *e)
{
    *e = (job_ends){.n = 0};
    pthread_mutex_init(&e->lock, NULL);
    persia_cond_init(&e->more);
}

void persia_job_ends_free(job_ends *e)
{
    pthread_cond_destroy(&e->more);
    pthread_mutex_destroy(&e->lock);
}

void persia_job_ends_add(job_ends *e)
{
    pthread_mutex_lock(&e->lock);
    e->n++;
    pthread_cond_broadcast(&e->more);
    pthread_mutex_unlock(&e->lock);
}

int persia_job_ends_wait(job_ends *e, shard *s)
{
    const uint64_t until = persia_clock_ns() + END_NS;
    uint64_t seen = 0;
    while (persia_shard_end_jobs(s)) {
        if (persia_clock_ns() >= until)
            return 1;
        pthread_mutex_lock(&e->lock);
        while (e->n == seen && persia_clock_ns() < until)
            persia_cond_wait_until(&e->more, &e->lock, until);
        seen = e->n;
        pthread_mutex_unlock(&e->lock);
    }
    return 0;
}
