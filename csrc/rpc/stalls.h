/* stalls.h: the states of slots, and those whose clients keep them waiting
 * (private to rpc).
 *
 * A slot that reads a request, or sends an answer, depends on its client,
 * which may never send the rest, or never take it.  So a thread looks for such
 * slots while no other one of their kind is free.  Calls that are read are
 * refused, and tried again; calls that do not take their answer are cancelled.
 * With free slots a slow network may take its time.
 *
 * A slot is in one state at a time.  Its events, and the state that each
 * leads to (a blank: it cannot occur there):
 *
 *             READ     CAME       REFUSE   ANSWER     SEND       FREE
 *  IDLE       READING                      ANSWERING
 *  READING             HANDLED    REFUSED
 *  HANDLED                                 ANSWERING
 *  ANSWERING                                          SENT
 *  SENT                                                          IDLE
 *  REFUSED             REFUSED                        DISMISSED
 *  DISMISSED           DISMISSED                                 IDLE
 *
 *     call ──► READING ──request──► HANDLED ──answer──► ANSWERING ──► SENT
 *                 │                                                    │
 *                 └──no slot is free──► REFUSED ──► DISMISSED ──► IDLE ◄┘
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

enum slot_state {
    SLOT_IDLE,      /* it waits for a call; or the server is down */
    SLOT_READING,   /* the request of its call */
    SLOT_HANDLED,   /* the handler has the request, or will */
    SLOT_ANSWERING, /* gRPC sends the answer */
    SLOT_SENT,      /* ... and may yet have some of its memory */
    SLOT_REFUSED,   /* it sends the answer that the request took too long,
                       and may read yet */
    SLOT_DISMISSED, /* that is sent */
    SLOT_STATES
};

enum slot_event {
    SLOT_READ,   /* there is a call whose request is read */
    SLOT_CAME,   /* the reading has ended */
    SLOT_REFUSE, /* it has taken too long, and no slot is free */
    SLOT_ANSWER, /* also of a call whose request is not to be read */
    SLOT_SEND,   /* the answer is sent, or its client is gone */
    SLOT_FREE,   /* gRPC needs nothing of it any more */
    SLOT_EVENTS
};

typedef struct stalls stalls;

/* Of slots 0 to slots_n - 1, all free, of which the first health_n are
 * health's.  refuse(ctx, slot): answers its call while it reads; on the
 * thread, which holds no lock. */
int stalls_watch(size_t slots_n, size_t health_n,
                 void (*refuse)(void *ctx, size_t slot), void *ctx,
                 stalls **out);
/* The slot has a call, which it reads now. */
void stalls_reads(stalls *w, size_t slot, grpc_call *call);
/* It has read; 0: its call was refused before. */
int stalls_came(stalls *w, size_t slot);
/* It sends its answer.  Whether the handler had the request. */
int stalls_answers(stalls *w, size_t slot, grpc_call *call);
/* The answer is sent: gives its call back after this. */
void stalls_answered(stalls *w, size_t slot);
/* It waits for a call again. */
void stalls_freed(stalls *w, size_t slot);
/* Ends the thread. */
void stalls_stop(stalls *w);
void stalls_free(stalls *w);

#endif
