/* batches.h (private): batches of the look-ahead, the state of each, and which
 * of them makes the lookups of another wait.
 *
 * Nothing here locks: prefetch.c holds its lock around every call.
 *
 * A batch is in one state at a time.  Its events, and the state that each
 * leads to (a blank: it cannot occur there):
 *
 *            FILL    ALLOW  ASK    READ  OUT   PENDING  UPDATE    END
 *  FILLING   QUEUED                                               DONE
 *  QUEUED            AHEAD  ASKED                                 DONE
 *  AHEAD                    OUT                                   DONE
 *  ASKED             OUT                                          DONE
 *  OUT                             READ  OUT   PENDING  UPDATING  DONE
 *  READ                            READ  OUT                      DONE
 *  PENDING                               OUT   PENDING  UPDATING  DONE
 *  UPDATING                              OUT   PENDING  UPDATING  DONE
 */
#ifndef PERSIA_LOOP_BATCHES_H
#define PERSIA_LOOP_BATCHES_H

#include "loop/loop.h"
#include "sched/sched.h"

enum batch_state {
    BATCH_FILLING,  /* lookups are being added */
    BATCH_QUEUED,   /* its lookups wait; the loop has not asked for it */
    BATCH_AHEAD,    /* its lookups may run; the loop has not asked for it */
    BATCH_ASKED,    /* the loop waits for it: its lookups may not run yet */
    BATCH_OUT,      /* the loop has it; gradients are expected */
    BATCH_READ,     /* the loop has it, and reads it alone */
    BATCH_PENDING,  /* all gradients that are there wait for an update */
    BATCH_UPDATING, /* some gradients are in an update that is not through */
    BATCH_DONE,     /* freed when nothing uses it */
    BATCH_STATES
};

enum batch_event {
    BATCH_FILL,       /* all lookups are added */
    BATCH_ALLOW,      /* its lookups may run */
    BATCH_ASK,        /* the loop asks for it */
    BATCH_TO_READ,    /* no gradients are expected */
    BATCH_TO_OUT,     /* a forward awaits its gradient, none is in an update */
    BATCH_TO_PENDING, /* none awaits its gradient, none is in an update */
    BATCH_TO_UPDATE,  /* gradients are in an update */
    BATCH_END,        /* trained, read, given up, or its pass has ended */
    BATCH_EVENTS
};

/* A lookup of a batch is in one state at a time:
 *
 *         RUN   TAKE   DROP
 *  WAITS  RUNS         TAKEN
 *  RUNS         TAKEN  TAKEN
 */
enum lookup_state {
    LOOKUP_WAITS, /* for a thread, as soon as its batch may run */
    LOOKUP_RUNS,  /* a thread has it, or its values wait for a forward */
    LOOKUP_TAKEN, /* a forward has its values, or none will */
    LOOKUP_STATES
};

enum lookup_event {
    LOOKUP_RUN,  /* a thread begins it */
    LOOKUP_TAKE, /* a forward gets its values */
    LOOKUP_DROP, /* its values are too old, or its rows were replaced */
    LOOKUP_EVENTS
};

typedef struct lookup {
    struct lookup *next;
    loop_lookup want; /* its owner is NULL when handed over */
    enum lookup_state state;
    future *done;
} lookup;

/* What became of the gradient of a forward.  It is in one state at a time:
 *
 *            PEND     UPDATE    APPLY    FAIL    DISCARD    REFUSE
 *  OUT       PENDING  UPDATING  APPLIED  FAILED  DISCARDED  REFUSED
 *  PENDING            UPDATING  APPLIED  FAILED  DISCARDED
 *  UPDATING                     APPLIED  FAILED  DISCARDED
 *
 * Where a thread takes gradients for an update while another one is about to
 * say that they are there, or which batch they are of, states are passed over.
 */
enum grad_state {
    GRAD_OUT,       /* it is not there */
    GRAD_PENDING,   /* it waits for an update */
    GRAD_UPDATING,  /* it is in an update that is not through */
    GRAD_APPLIED,   /* from here on it does not change */
    GRAD_FAILED,    /* its update failed */
    GRAD_DISCARDED, /* it was dropped before an update */
    GRAD_REFUSED,   /* it is not taken any more */
    GRAD_STATES
};

enum grad_event {
    GRAD_PEND,    /* a backward has given it */
    GRAD_UPDATE,  /* it is taken for an update */
    GRAD_APPLY,   /* its update is through */
    GRAD_FAIL,    /* its update failed */
    GRAD_DISCARD, /* it is dropped */
    GRAD_REFUSE,  /* the loop waits for it no more */
    GRAD_EVENTS
};

typedef struct forward {
    uint64_t ticket;
    enum grad_state state;
    uint64_t update; /* GRAD_UPDATING: its number; 0: it is not sent */
} forward;

typedef struct pass {
    struct pass *next;
    uint64_t number;    /* 0: closed */
    uint64_t staleness;
    int here;           /* nothing is done on threads of the store */
    int takes;          /* its batches are taken from elsewhere */
    int sync;           /* steps of all ranks: 1, and 2 if by batch */
    int trains;         /* a batch was taken to be trained */
    struct batch *queue; /* that the loop has not asked for, oldest first */
    size_t batches;     /* of this pass that are not freed */
    unsigned waiters;   /* threads that close it */
} pass;

/* When the first lookup of a batch began, and the last one ended; 0: not
 * known, as nothing is traced. */
typedef struct batch_times {
    uint64_t asked, found;
} batch_times;

typedef struct batch {
    struct batch *next; /* in pass->queue or batches.taken */
    pass *pass;
    uint64_t number;
    uint64_t place;    /* see batches.places; 0: it has none */
    uint64_t tickets;  /* the last one given before the loop had it */
    enum batch_state state;
    lookup *lookups;
    int is_end;        /* there is none: the source has ended */
    unsigned users;    /* threads that use a lookup; not freed meanwhile */
    uint64_t after;    /* its lookups wait for this update at the shards */
    uint64_t seen;     /* batches.trained that its lookups see */
    uint64_t began;    /* batches.clock when they were allowed */
    uint64_t strays;   /* batches.strays at that time */
    uint64_t trained;  /* batches.clock at its last update; 0: none */
    batch_times times; /* of its lookups */
    uint64_t step;     /* the update of several backwards that it is in; 0 */
    int64_t staleness; /* at its first forward; -1: there was none */
    forward *forwards;
    size_t forwards_n, forwards_room;
} batch;

/* All of a store. */
typedef struct batches {
    pass *passes;
    batch *taken;     /* that a loop has asked for, in that order */
    uint64_t trained; /* batches that ended with an update; those of one
                         step of several backwards count as one */
    uint64_t clock;   /* updates that ended */
    uint64_t strays;  /* gradients in updates, of no batch, or of one that had
                         ended before */
    uint64_t steps;   /* updates of several backwards that began */
    uint64_t places;  /* batches that loops have taken in passes that train,
                         counted on from the last number of the stream */
    unsigned owed;    /* empty parts of steps that are not sent */
    unsigned paying;  /* ... that are in flight */
} batches;

/* The only places that change the state of a batch, of a lookup, and of a
 * forward's gradient. */
void batch_event(batch *b, enum batch_event event);
void lookup_event(lookup *l, enum lookup_event event);
void forward_event(forward *f, enum grad_event event);

/* Whether the loop has it; whether its lookups may run. */
int batch_is_taken(const batch *b);
int batch_may_run(const batch *b);

/* A forward makes gradients; noted once. */
void batch_add_forward(batch *b, uint64_t ticket);
/* The gradients of some forwards have changed: the state follows.  Ends the
 * batch when nothing more becomes of them. */
void batch_follow(batches *all, batch *b);
/* Ends it, unless it has ended. */
void batch_end(batches *all, batch *b);

/* Some of its gradients were dropped. */
int batch_was_dropped(const batch *b);

/* A forward that still counts, by its ticket, and its batch; or NULL. */
forward *batches_find(const batches *all, uint64_t ticket, batch **of);
/* A forward that did not find its batch is of the one that the loop took last,
 * if one loop alone trains: notes it there.  NULL where there is none. */
forward *batches_adopt(const batches *all, uint64_t ticket, batch **of);
/* See prefetch_place(). */
uint64_t batches_place(const batches *all, const loop_grad *grads, size_t n);

void batch_append(batch **list, batch *b);
void batch_remove(batch **list, batch *b);

/* Why the lookups of a batch must wait. */
enum batch_wait {
    BATCH_MAY_START,
    BATCH_IS_FILLED,   /* not all of its lookups are added */
    BATCH_NOT_ASKED,   /* this pass starts none before the loop asks */
    BATCH_AWAITS_PART, /* an empty part of a step is not applied */
    BATCH_BOUND        /* too many batches before it are not applied */
};
enum batch_wait batches_why_wait(const batches *all, const batch *b);
/* They may: notes what they will see. */
void batches_start(const batches *all, batch *b);

/* How many batches that were taken have updates which the lookups of b miss,
 * if they began when they were allowed; if they begin now. */
uint64_t batches_missed(const batches *all, const batch *b);
uint64_t batches_missed_now(const batches *all, const batch *b);
/* Whether the lookups of b, in a pass without staleness, may miss updates that
 * nothing waits for: further backwards of a batch, or of other ids. */
int batches_missed_strays(const batches *all, const batch *b);

/* Whether an update of a batch that was taken before b is not through. */
int batches_update_before(const batches *all, const batch *b);

#endif
