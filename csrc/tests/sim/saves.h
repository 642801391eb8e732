/* saves.h: checkpoints of a history.
 *
 * Rank 0 saves and loads as persia/checkpoint/saving.py does: nothing of its
 * own is in flight meanwhile.  The other ranks are other jobs at the same
 * servers, and stop for nothing.
 */
#ifndef PERSIA_TESTS_SIM_SAVES_H
#define PERSIA_TESTS_SIM_SAVES_H

#include "tests/sim/storage.h"

/* One that was published. */
struct checkpoint {
    uint32_t servers_n;
    part parts[SERVERS_MAX];
    /* Bit s: the own row of the update at server s is in it. */
    uint8_t has[RANKS_MAX][UPDATES_MAX];
};

/* 0, or an error of a call. */
int saves_save(rank_life *l);
/* The newest one, in the place of the rows that are there. */
int saves_load(rank_life *l);
/* What must be true of the updates that servers have at the end, or in a
 * checkpoint (`where`): has as in a checkpoint. */
void saves_check(const char *where, int rank, int k, uint8_t has);
/* Another number of servers begins with the newest checkpoint. */
void saves_reshard(uint32_t servers_n);

#endif
