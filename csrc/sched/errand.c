/* errand.c: calls that may outlive their caller. */
#include <assert.h>

#include "sched/sched.h"

void persia_errand_init(errand *e)
{
    *e = (errand){.flying = 0};
    pthread_mutex_init(&e->lock, NULL);
    persia_cond_init(&e->landed);
}

void persia_errand_free(errand *e)
{
    assert(!e->flying);
    pthread_cond_destroy(&e->landed);
    pthread_mutex_destroy(&e->lock);
}

void persia_errand_start(errand *e)
{
    assert(!e->left);
    e->flying++;
}

int persia_errand_land(errand *e)
{
    assert(e->flying);
    e->flying--;
    const int last = e->left && !e->flying;
    if (last)
        e->left = 0;
    else if (!e->left)
        pthread_cond_signal(&e->landed);
    pthread_mutex_unlock(&e->lock);
    return last;
}

int persia_errand_wait(errand *e, uint64_t until, int polls)
{
    int rc = PERSIA_OK;
    while (e->flying && !rc) {
        if (polls)
            rc = persia_cond_wait_poll(&e->landed, &e->lock, until);
        else
            persia_cond_wait_until(&e->landed, &e->lock, until);
        if (!rc && e->flying && persia_clock_ns() > until)
            rc = PERSIA_ETIMEOUT;
    }
    return rc;
}

int persia_errand_leave(errand *e)
{
    pthread_mutex_lock(&e->lock);
    assert(!e->left);
    e->left = e->flying > 0;
    const int own = !e->left;
    pthread_mutex_unlock(&e->lock);
    return own;
}
