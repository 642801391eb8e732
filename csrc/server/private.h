/* private.h: what the parts of a server share (private).
 *
 *   server.c    life, the timer
 *   calls.c     messages to calls of the shard, answers to messages
 *   folders.c   where the files of snapshots and restores are
 *   ends.c      the threads of snapshots and restores at the end
 *
 * Order of locks: the shard's, then one of these.
 */
#ifndef PERSIA_SERVER_PRIVATE_H
#define PERSIA_SERVER_PRIVATE_H

#include "server/server.h"

#include <pthread.h>
#include <stdatomic.h>

struct ps_service {
    shard *shard;
    shard_ref *ref; /* direct */
    _Atomic(int) closed;

    pthread_mutex_t timer_lock; /* guards: */
    uint64_t wake_at;           /* when the timer looks; UINT64_MAX: never */
    int stop;
    pthread_cond_t wake;
    pthread_t timer;
    int timer_runs;

    pthread_mutex_t admin_lock; /* guards: */
    int checkpoints;            /* the open folder, or -1 */

    job_ends ends; /* has a lock of its own */
};

/* The timer looks at this time already: of the shard's environment.  0: at
 * once. */
void service_wake(void *service, uint64_t at);

/* ---- folders.c ---------------------------------------------------------- */

/* The files of <checkpoints>/<root>/<folder>, plain names and no links; its
 * open() compares the content of .proof there with a proof, which is needed
 * to write.  Of the shard's environment. */
int folder_files(void *service, const char *root, const char *folder,
                 const char *proof, int writes, ckpt_io **out);

#endif
