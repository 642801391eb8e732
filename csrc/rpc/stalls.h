/* stalls.h: slots whose clients keep them waiting (private to rpc).
 *
 * A slot that reads a request, or sends an answer, depends on its client,
 * which may never send the rest, or never take it.  So a thread looks for such
 * slots while no other one of their kind is free.  Calls that are read are
 * refused, and tried again; calls that do not take their answer are cancelled.
 * With free slots a slow network may take its time.
 */
#ifndef PERSIA_RPC_STALLS_H
#define PERSIA_RPC_STALLS_H

#include <grpc/grpc.h>
#include <stddef.h>

enum {
    STALLS_MS = 5000, /* for a request to arrive, and for a refusal to leave */
    STALLS_ANSWER_MS = 10000, /* for a client to take its answer */
    STALLS_HEALTH_MS = 1000   /* for a request of health, and its answer */
};

typedef struct stalls stalls;

/* Of slots 0 to slots_n - 1, all free, of which the first health_n are
 * health's.  refuse(ctx, slot): answers its call while it reads; on the
 * thread, which holds no lock. */
int stalls_watch(size_t slots_n, size_t health_n,
                 void (*refuse)(void *ctx, size_t slot), void *ctx,
                 stalls **out);
/* The slot took a call, which it reads now. */
void stalls_begin(stalls *w, size_t slot, grpc_call *call);
/* It has read; 0: its call was refused before. */
int stalls_came(stalls *w, size_t slot);
/* It sends its answer. */
void stalls_answers(stalls *w, size_t slot, grpc_call *call);
/* The answer is sent: gives its call back after this. */
void stalls_answered(stalls *w, size_t slot);
/* It waits for a call again. */
void stalls_freed(stalls *w, size_t slot);
/* Ends the thread. */
void stalls_stop(stalls *w);
void stalls_free(stalls *w);

#endif
