/* moves.h: calls of Move, which wait for the process to take them
 * (private). */
#ifndef PERSIA_SERVER_MOVES_H
#define PERSIA_SERVER_MOVES_H

#include "server/server.h"

#include <pthread.h>

typedef struct host_moves {
    pthread_mutex_t lock; /* guards: */
    host_move *first, **last;
    uint32_t n;
    int closed;
    pthread_cond_t more;
} host_moves;

void host_moves_init(host_moves *m);
/* It is closed. */
void host_moves_free(host_moves *m);
void host_moves_add(host_moves *m, rpc_call *call);
/* Waits for one so long at most. */
host_move *host_moves_take(host_moves *m, uint64_t wait_ns);
void host_moves_close(host_moves *m);

#endif
