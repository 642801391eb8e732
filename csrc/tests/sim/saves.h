/* saves.h: checkpoints of a history.
 *
 * Rank 0 saves and loads as persia/checkpoint/saving.py does: nothing of its
 * own is in flight meanwhile.  The other ranks are other jobs at the same
 * servers, and stop for nothing; with four roles they are of the same job, and
 * wait.
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

/* The store of who saves or loads. */
typedef struct saver {
    ps_client *c;
    uint32_t table;
} saver;

/* 0, or an error of a call. */
int saves_save(const saver *of);
/* The newest one, in the place of the rows that are there.  *loaded: they
 * are, also where a later call fails. */
int saves_load(const saver *of, int *loaded);
/* Says Hello again to servers; restored: they have loaded rows. */
int saves_greet(ps_client *c, int restored);
/* What must be true of the updates that servers have at the end, or in a
 * checkpoint (`where`): has as in a checkpoint. */
void saves_check(const char *where, int rank, int k, uint8_t has);
/* Another number of servers begins with the newest checkpoint. */
void saves_reshard(uint32_t servers_n);

#endif
