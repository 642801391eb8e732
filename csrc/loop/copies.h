/* copies.h (private): copies of gradients that wait, in blocks of a pool:
 * fresh memory costs more than the copy. */
#ifndef PERSIA_LOOP_COPIES_H
#define PERSIA_LOOP_COPIES_H

#include "loop/loop.h"
#include "mem/mem.h"
#include "sched/sched.h"

/* See persia_loop_copy_grad(). */
int copies_make(mem_pool *p, sched *s, loop_grad *g, size_t floats,
                size_t offsets);
/* Copies ids, offsets and weights alone, to g->ids. */
int copies_ids(mem_pool *p, sched *s, loop_grad *g, size_t offsets);
#endif
