/* private.h: what the parts of a rank share (private).
 *
 *   rank.c    its life; Take
 *   source.c  what is read of a batch, and Return
 *   passes.c  which worker a Take goes to, and when a pass is over
 *   order.c   which of the Takes that wait gets a batch
 */
#ifndef PERSIA_RANK_PRIVATE_H
#define PERSIA_RANK_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "batch/batch.h"
#include "rank/rank.h"
#include "trace/trace.h"

/* A worker. */
typedef struct at_link {
    uint64_t boot;  /* of the worker that has the plan */
    uint64_t ended; /* of the one that has ended the epoch; or 0 */
    uint64_t idle;  /* of the one that had nothing, and expects nothing */
    uint64_t failed, failed_boot; /* batches, as that one said */
    wire_loader_part *parts; /* [parts_n] what that one said of loaders */
    size_t parts_n;
} at_link;

/* What a loop wants of every batch; constant.  Its Takes read it after its
 * end, when the next one has a plan of its own. */
typedef struct rank_plan {
    wire_plan wire;
    wire_memory memory;
    _Atomic(unsigned) references; /* of the rank, Takes, requests */
} rank_plan;

/* A Take is in one state at a time: see order.c.  Its events, and the state
 * that each leads to (a blank: it cannot occur there):
 *
 *          ENTER   ASK   FIND   WANT   END   GIVE   LOSE  SETTLE  LEAVE
 *  MADE    QUEUED
 *  QUEUED          ASKS                                           LEFT
 *  ASKS            ASKS  HOLDS  WANTS  ENDS                       LEFT
 *  HOLDS                                            ASKS  SETTLED
 *  WANTS           ASKS                      HOLDS
 *  ENDS                                      HOLDS        SETTLED
 *  SETTLED                                                        LEFT
 *  LEFT    QUEUED                                                 LEFT
 */
enum taking_state {
    TAKING_MADE,    /* of the thread that made it */
    TAKING_QUEUED,  /* in rank_taker.takes, as until LEFT; nothing was sent */
    TAKING_ASKS,    /* a worker is asked, or will be again */
    TAKING_HOLDS,   /* a batch, but an earlier Take has none */
    TAKING_WANTS,   /* a batch that a later one holds: workers have none */
    TAKING_ENDS,    /* the same: the epoch is over */
    TAKING_SETTLED, /* it has a batch, or the pass is over or cancelled */
    TAKING_LEFT,    /* not in rank_taker.takes any more */
    TAKING_STATES
};

enum taking_event {
    TAKING_ENTER,  /* behind those that wait; its lookup is made again:
                      where it was */
    TAKING_ASK,    /* a worker is chosen; or none gave a batch away */
    TAKING_FIND,   /* a worker had a batch */
    TAKING_WANT,   /* it had none */
    TAKING_END,    /* it has ended the epoch */
    TAKING_GIVE,   /* it gets the batch of a later one */
    TAKING_LOSE,   /* it gives its batch to an earlier one */
    TAKING_SETTLE,
    TAKING_LEAVE, /* its loop waits for it no more */
    TAKING_EVENTS
};

/* The batch of a Take is in one state at a time:
 *
 *           HOLD  USE      SKIP     LEAVE    RETURN    DROP
 *  NONE     HERE  NONE     NONE              NONE      NONE
 *  HERE           USED     SKIPPED  UNUSED   RETURNED  NONE
 *  USED           USED     SKIPPED  UNDONE   RETURNED  NONE
 *  SKIPPED        SKIPPED  SKIPPED           RETURNED  NONE
 *  UNUSED         UNDONE   UNUSED            RETURNED  NONE
 *  UNDONE         UNDONE   UNDONE            RETURNED  NONE
 *  RETURNED       RETURNED RETURNED          RETURNED  NONE
 *
 * In all but NONE it is in rank_taker.held, which workers get to know.
 * In all but NONE and RETURNED it has a lease.
 */
enum held_state {
    HELD_NONE,     /* there is no batch; or none any more */
    HELD_HERE,     /* it has arrived */
    HELD_USED,     /* the loop has it */
    HELD_SKIPPED,  /* ... and wants no gradients of it */
    HELD_UNUSED,   /* the loop ended early, and never had it */
    HELD_UNDONE,   /* the loop ended early, and has not trained it */
    HELD_RETURNED, /* its gradients are on their way to a worker */
    HELD_STATES
};

enum held_event {
    HELD_HOLD,   /* it arrives; or a later Take gives it to this one */
    HELD_USE,    /* the loop has it */
    HELD_SKIP,   /* the loop wants no gradients of it */
    HELD_LEAVE,  /* the loop ends early */
    HELD_RETURN, /* its gradients leave */
    HELD_DROP,   /* it goes back, or to an earlier Take, or is done */
    HELD_EVENTS
};

struct rank_taker {
    worker_client c;
    uint32_t dtype;
    _Atomic(uint64_t) late_n, failed_n, given_up_n;
    _Atomic(uint64_t) servers; /* see TakeReply */
    _Atomic(unsigned) references; /* of the caller, batches, messages */
    persia_turn in_order;     /* one Take by place at a time */
    pthread_mutex_t lock;     /* guards all below */
    rank_plan *plan;          /* of the loop that began last */
    uint64_t number;          /* of the last Take */
    uint64_t generation;      /* that are not cancelled */
    uint64_t job;             /* whose batches it takes; 0: not known yet */
    uint64_t first;           /* epoch of its loaders; 0: not known yet */
    uint64_t epoch;           /* of the open pass; 0: it is not known */
    int over;                 /* the loop knows that it is */
    int again;                /* ... and is to get that once more */
    uint64_t begun;           /* the last one that had a batch */
    uint64_t silent;          /* loaders without which the last one ended */
    uint64_t silent_epoch;    /* that is of this one */
    wire_batch_name missing;  /* a batch of it that is at no worker */
    uint64_t missing_since;   /* ... since then; or 0 */
    unsigned backs;           /* batches on their way back */
    uint64_t backs_ended;     /* that arrived there */
    int ordered;              /* Takes are by place: see persia_rank_order() */
    uint64_t place;           /* of the next one, from 1 */
    uint64_t used;            /* ... behind the last that the loop has */
    size_t *homes;            /* [WORKER_LINKS_MAX] link of the places of a
                                 remainder */
    at_link *at;              /* [WORKER_LINKS_MAX] */
    rank_taken *held;         /* whose gradients workers wait for */
    rank_taken *takes;        /* that are not answered, in order */
    uint64_t turns;           /* that were given */
    pthread_cond_t turned;    /* one of them has another state */
};

struct rank_taken {
    batcher_source source; /* first */
    rank_taker *r;
    rank_plan *plan;
    worker_link *from;
    uint64_t boot, lineage; /* of the worker that gave it */
    _Atomic(unsigned) references;
    uint64_t number, generation;
    uint64_t job;         /* that it asked for */
    uint64_t backs_ended; /* when it asked */
    uint64_t place;       /* that it asks for; 0: any */
    size_t tries;         /* links that have none */
    int look;             /* it is not this link's turn */
    ps_client *c;         /* of the store that looks it up */
    uint64_t asked, used; /* when: of persia_trace_now() */
    batch_index *index;   /* of the store's lookup */
    wire_take_reply m;
    link_answer answer;
    /* The rank's lock guards these: */
    enum taking_state state;
    enum held_state held;
    uint64_t turn; /* its place among `takes`; 0: none yet */
    rank_taken *held_next, *takes_next;
};

/* ---- rank.c ---- */

/* Says what is wanted to a worker that does not know it. */
int rank_prepare(rank_taker *r, worker_link *l);
/* A call has ended with rc: whether the worker needs it again. */
void rank_unprepare(rank_taker *r, const worker_link *l, int rc);

/* ---- source.c ---- */

/* What a batch is to the store; samples are filled in. */
extern const batcher_source rank_source;
/* Whether the features of the plan before one whose rows travel have another
 * name. */
int rank_key_is_new(const wire_plan *p, size_t feature);
/* The rows of a table, or NULL: its features are pooled by the worker. */
const wire_values *rank_rows(const rank_taken *t, const char *table);
/* As link_retry().  Where servers differ to a worker, this rank's store may
 * know more of them, as it has loaded a checkpoint. */
int rank_retry(const rank_taken *t, worker_link *l, int rc, uint64_t until);
/* A Return of the batch, without gradients. */
wire_return rank_return(const rank_taken *t, uint32_t reason);

/* ---- passes.c ---- */

/* The link that had the last batch whose place has this remainder by the
 * number of links: loaders go by it, too. */
size_t *pass_home(const rank_taker *r, uint64_t place);
/* The worker for this Take.  NULL: the pass is over, or (not *over) all that
 * are there have ended the epoch. */
worker_link *pass_link(rank_taken *t, int *over);
/* Some of its batches are missing: all are asked again.
 * PERSIA_EUNAVAILABLE: they have been for too long. */
int pass_again(rank_taker *r);
/* The same, where a worker that has not ended the epoch has no batch for this
 * Take: one that is missing may have been sent again to a worker that has. */
int pass_look_again(rank_taken *t);
/* The loop has ended.  Whether it had the whole epoch: then the next pass is
 * of the next one.  The rank's lock is held. */
int pass_end(rank_taker *r);
/* The rank has the batch no more.  What it was; if it had a lease it goes
 * back, and until it has arrived (pass_gave_back()) workers may say that a
 * rank has it. */
enum held_state pass_give_back(rank_taken *t);
void pass_gave_back(rank_taker *r);
/* Takes in what an answer says of epochs.  Whether the answer is of this pass:
 * a batch of another one is to be given back. */
int pass_learn(rank_taken *t);
/* The batches that the rank holds: [*n], or NULL.  The caller frees them.  The
 * rank's lock is held. */
wire_batch_name *pass_held(const rank_taker *r, size_t *n);
/* The batch of a Take is here.  0: another Take, which was made at the same
 * time, has brought it from another worker before: this one is given back. */
int pass_hold(rank_taken *t);
/* An event of its batch, which says by the table above what follows. */
void pass_held_event(rank_taken *t, enum held_event event);
/* The only place that changes the state of a Take's batch, and with it the
 * list of those that are held.  The rank's lock is held. */
void pass_held_event_locked(rank_taken *t, enum held_event event);
/* Whether the lease of its batch is the rank's. */
int held_has_lease(enum held_state state);
/* The batch of t is that of u from now on.  The rank's lock is held. */
void pass_move(rank_taken *t, rank_taken *u);

/* ---- order.c ---- */

/* The only place that changes a Take's state, and with it the list of those
 * that wait.  The rank's lock is held. */
void taking_event(rank_taken *t, enum taking_event event);
/* It is behind those that wait; again: where it was. */
void order_enter(rank_taken *t);
void order_leave(rank_taken *t);
/* The smallest number of those that are in the list.  0: a batch is on its way
 * back, or more are held than the worker gets to know.  The rank's lock is
 * held. */
uint64_t order_oldest(const rank_taker *r, size_t listed);
/* A worker has answered; waits for the Takes before it.  Whether it is done:
 * it has a batch, or the pass is over, or cancelled; else it must ask again.
 */
int order_settle(rank_taken *t);

#endif
