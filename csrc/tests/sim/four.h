/* four.h: histories with all four roles: servers, embedding workers, a data
 * loader, ranks.
 *
 * The loader sends batches 1 .. n.  As in roles.h each adds 1 to a row of its
 * own on each server and to shared rows.  A process that has an error dies and
 * is started again; the loader begins with batch 1 then, and servers know what
 * they have.
 *
 * With checkpoints ranks meet every few batches, and rank 0 saves while the
 * others wait.  Ranks that begin may load, as `persia train --resume` does.
 * Workers and the loader find out.
 */
#ifndef PERSIA_TESTS_SIM_FOUR_H
#define PERSIA_TESTS_SIM_FOUR_H

#include "tests/sim/roles.h"

enum {
    WORKERS_MAX = 2,
    BATCHES_MAX = 120,
    SLOT_WORKERS = 9,
    SLOT_LOADER = 12
};

/* Shared rows of a batch, as attempt.shared. */
uint32_t four_shared(int batch);
void four_begin(void);
/* Kinds of faults; they pick a process. */
void four_kill_worker(void);
void four_kill_rank(void);
void four_kill_loader(void);
/* A worker is stopped; ranks are to load meanwhile. */
void four_stop_worker(void);
/* Other servers begin: all are started again. */
void four_kill_all(void);
sim_node *four_any(uint32_t k);
/* Starts what is down. */
void four_heal(void);
/* Waits until the loader's batches are done. */
void four_await_end(uint64_t until);
/* How many batches the loader counts as lost or failed.  killed: a server
 * was. */
uint64_t four_told(int killed);

#endif
