/* prefetch_private.h: what prefetch.c and forwards.c share. */
#ifndef PERSIA_LOOP_PREFETCH_PRIVATE_H
#define PERSIA_LOOP_PREFETCH_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "loop/batches.h"
#include "loop/prefetch.h"

struct prefetch {
    loop *s;
    sched *jobs;
    _Atomic(unsigned) passes; /* that are not freed; written under the lock */
    pthread_mutex_t lock;     /* guards all below, passes and batches */
    pthread_cond_t moved;     /* a lookup or an update ended */
    batches all;
    uint64_t numbers;         /* the last one given to a pass */
    lookup *garbage;          /* owners to be released without the lock */
    loop_prefetch_stats stats;
};

/* A batch that has not ended, or NULL.  Here and below the lock is held. */
batch *prefetch_find(prefetch *p, uint64_t number);
/* Runs a lookup that waits; the lock is left meanwhile. */
void prefetch_run(prefetch *p, batch *b, lookup *l);
/* Ends a call: leaves the lock and releases what it threw away. */
void prefetch_leave(prefetch *p);
/* The same on threads of the user: frees what ended, too. */
void prefetch_end(prefetch *p);

#endif
