/* stalls.h: slots whose clients keep them waiting (private to rpc).
 *
 * A slot that reads a request depends on its client, which may never send the
 * rest.  So a thread looks for such slots while no other one of their kind is
 * free: their calls are asked to come again.  With free slots a slow network
 * may take its time.  A call that does not take this answer is cancelled.
 */
#ifndef PERSIA_RPC_STALLS_H
#define PERSIA_RPC_STALLS_H

#include <grpc/grpc.h>
#include <stddef.h>

enum {
    STALLS_MS = 5000,       /* for a request to come */
    STALLS_HEALTH_MS = 1000 /* for one of health, and to take its answer */
};

typedef struct stalls stalls;

/* Of slots 0 to slots_n - 1, all free, of which the first health_n are
 * health's.  refuse(ctx, slot): answers its call while it reads; on the
 * thread, which holds no lock. */
int stalls_watch(size_t slots_n, size_t health_n,
                 void (*refuse)(void *ctx, size_t slot), void *ctx,
                 stalls **out);
/* The slot took a call, which it reads now, or (reads 0) answers at once. */
void stalls_begin(stalls *w, size_t slot, grpc_call *call, int reads);
/* It has read; 0: its call was refused before.  Its answer is watched no more
 * unless `answers`: the answer is so small that its client is to take it at
 * once. */
int stalls_came(stalls *w, size_t slot, grpc_call *call, int answers);
/* It was answered: gives its call back after this. */
void stalls_answered(stalls *w, size_t slot);
/* It waits for a call again. */
void stalls_freed(stalls *w, size_t slot);
/* Ends the thread. */
void stalls_stop(stalls *w);
void stalls_free(stalls *w);

#endif
