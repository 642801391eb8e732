/* copies.h (private): copies of gradients that wait, in blocks that are used
 * again: fresh memory costs more than the copy. */
#ifndef PERSIA_LOOP_COPIES_H
#define PERSIA_LOOP_COPIES_H

#include <pthread.h>

#include "loop/loop.h"
#include "sched/sched.h"

typedef struct copies {
    pthread_mutex_t lock; /* guards all below */
    struct copy_block *free;
    unsigned free_n;
} copies;

void copies_init(copies *c);
void copies_free(copies *c);
/* See persia_loop_copy_grad(). */
int copies_make(copies *c, sched *s, loop_grad *g, size_t floats,
                size_t offsets);
/* Copies ids, offsets and weights alone, to g->ids. */
int copies_ids(copies *c, sched *s, loop_grad *g, size_t offsets);
/* Gives back a copy, on any thread. */
void copies_give(void *copy);

#endif
