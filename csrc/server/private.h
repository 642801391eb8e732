/* private.h: what the parts of a server share (private).
 *
 *   server.c    life, the timer
 *   calls.c     messages to calls of the shard, answers to messages
 *   snapshot.c, restore.c   the requests of these names
 *   folders.c   folders and threads for them
 *
 * Order of locks: admin_lock, the shard's, timer_lock.
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
    struct snapshot *snapshot;  /* NULL: none */
    struct restore *restore;    /* NULL: none */
    uint32_t writers, readers;  /* threads of theirs that still run */
    pthread_cond_t ended;       /* one of them has */
};

/* The timer looks at this time already: of the shard's environment.  0: at
 * once. */
void service_wake(void *service, uint64_t at);

/* ---- folders.c, snapshot.c, restore.c ----------------------------------- */

enum { PROOF = sizeof ((wire_snapshot *)0)->proof };

/* Opens <checkpoints>/<root>/<folder>, which must be plain names and no
 * links, and compares the content of .proof there. */
int folder_open(const ps_service *s, const char *root, const char *folder,
                const char *proof, int *out);

/* Of the shard's environment. */
void snapshot_run(void *service, const wire_snapshot *m, shard_done done,
                  void *ctx);
void restore_run(void *service, const wire_restore *m, shard_done done,
                 void *ctx);
/* Drops what nobody has asked about for long; the time at which to look
 * again. */
uint64_t snapshot_expire(ps_service *s, uint64_t now);
uint64_t restore_expire(ps_service *s, uint64_t now);
/* Stops and forgets; the threads may run on for a while. */
void snapshot_drop_locked(ps_service *s);
/* The same, if its job is no more, as far as one who uses a root can know. */
void snapshot_drop_abandoned_locked(ps_service *s, const char *root);
void restore_drop_locked(ps_service *s);
/* Stops both and waits until they have stopped. */
void admin_end(ps_service *s);

#endif
