/* batches.h: private to the store: batches of a data loader that are looked up
 * ahead, and what of them hinders later ones.  Not locked: prefetch.c holds its
 * lock around every call. */
#ifndef PERSIA_STORE_BATCHES_H
#define PERSIA_STORE_BATCHES_H

#include "sched/sched.h"
#include "store/store.h"

typedef enum progress { WAITING, STARTED, TAKEN } progress;

typedef struct lookup {
    struct lookup *next;
    store_lookup want; /* its owner is NULL when handed over */
    progress at;
    future *done;
} lookup;

/* A forward of a batch, by what became of its gradient. */
typedef enum course { OUT, HELD, APPLYING, ENDED } course;

typedef struct forward {
    uint64_t ticket;
    course at;
    uint64_t update; /* APPLYING: its number; 0: it is not sent */
} forward;

typedef struct batch {
    struct batch *next;
    uint64_t number;
    lookup *lookups;
    unsigned users;  /* threads that use a lookup; not freed meanwhile */
    int ready;       /* all lookups are added */
    int started;     /* they may run */
    int handed;      /* the loop has asked for it */
    int reading;     /* no gradients are expected */
    int read;        /* there was a forward without gradient */
    int dropped;     /* some gradients were */
    int updated;     /* an update has some, so it needs no empty part */
    uint64_t after;  /* its lookups wait for this update at the shards */
    int closed;      /* not open any more; freed when `users` is 0 */
    forward *forwards;
    size_t forwards_n, forwards_room;
} batch;

typedef struct stream {
    struct stream *next;
    uint64_t number; /* 0: closed */
    uint64_t staleness;
    int here;     /* nothing is done on threads of the store */
    int sync;     /* steps of all ranks: 1, and 2 if by batch */
    batch *batches; /* oldest first */
    unsigned waiters; /* threads that close it */
} stream;

/* What earlier batches that are open mean for the lookups of one. */
typedef struct earlier {
    uint64_t open;
    int held;       /* others wait for a store */
    uint64_t after; /* the last one is in this update: lookups can wait for
                       it at the shards; 0: no */
} earlier;

/* Whether all gradients that came wait for an update, and none is out. */
int batch_is_held(const batch *b);
/* Whether some are in an update that is not through. */
int batch_is_applying(const batch *b);
/* A forward makes gradients; noted once. */
void batch_add_forward(batch *b, uint64_t ticket);

earlier stream_look_before(const stream *t, const batch *last);
/* Whether the loop must wait, though lookups of `last` may have started. */
int stream_is_behind(const stream *t, const batch *last);

#endif
