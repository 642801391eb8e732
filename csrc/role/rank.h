/* rank.h: what the parts of a rank share (private).
 *
 *   rank.c    its life; Take
 *   source.c  what is read of a batch, and Return
 *   passes.c  which worker a Take goes to, and when a pass is over
 */
#ifndef PERSIA_ROLE_RANK_H
#define PERSIA_ROLE_RANK_H

#include <pthread.h>
#include <stdatomic.h>

#include "role/link.h"
#include "worker/worker.h"

/* A worker, as this rank counts passes. */
typedef struct at_link {
    uint64_t boot;    /* of the worker that has the plan */
    int64_t first;    /* own pass that is its pass 1 */
    uint64_t ended;   /* the last own pass that ended there */
    uint64_t checked; /* boot for which `first` is known to be right */
    uint64_t asked;   /* boot of its last answer to a Take */
} at_link;

/* A loader: its epoch is own pass + offset. */
typedef struct rank_stream {
    struct rank_stream *next;
    uint64_t name;
    int64_t offset;
} rank_stream;

struct role_rank {
    role_client c;
    uint32_t dtype;
    enum client_lost lost;
    _Atomic(uint64_t) late_n, lost_n, given_up_n;
    _Atomic(unsigned) references; /* of the caller, batches, messages */
    wire_plan plan;           /* constant once declared */
    wire_memory plan_memory;
    pthread_mutex_t in_order; /* one Take by place at a time */
    pthread_mutex_t lock;     /* guards all below */
    uint64_t number;          /* of the last Take */
    uint64_t generation;      /* that are not cancelled */
    uint64_t pass;            /* that is open, from 1 */
    uint64_t begun;           /* the last pass that had a batch */
    int ordered;              /* Takes are by place: see persia_rank_order() */
    uint64_t place;           /* of the next one, from 1 */
    uint64_t used;            /* ... behind the last that the loop has */
    size_t *homes;            /* [links] link of the places of a remainder */
    at_link *at;              /* [links] */
    rank_stream *streams;
    role_taken *held;         /* whose gradients workers wait for */
};

struct role_taken {
    worker_source source; /* first */
    role_rank *r;
    role_link *from;
    uint64_t boot;        /* of the worker that gave it */
    _Atomic(unsigned) references;
    uint64_t number, generation, pass;
    uint64_t place;       /* that it asks for; 0: any */
    size_t tries;         /* links that do not have that one */
    index_pool *pool;     /* of the store that looks it up */
    batch_index *index;   /* of the store's lookup */
    wire_take_reply m;
    link_answer answer;
    _Atomic(int) has_lease, used;
    int is_held;          /* it is in `held`; the rank's lock guards it */
    role_taken *held_next;
};

/* ---- rank.c ---- */

/* Says what is wanted to a worker that does not know it, and how it calls an
 * own pass. */
int rank_prepare(role_rank *r, role_link *l, uint64_t own_pass,
                 uint64_t *pass);

/* ---- source.c ---- */

/* What a batch is to the store; samples are filled in. */
extern const worker_source rank_source;
/* Whether the features of the plan before one whose rows travel have another
 * name. */
int rank_key_is_new(const wire_plan *p, size_t feature);
/* The rows of a table, or NULL: its features are pooled by the worker. */
const wire_values *rank_rows(const role_taken *t, const char *table);
/* A Return of the batch, without gradients. */
wire_return rank_return(const role_taken *t, uint32_t reason);

/* ---- passes.c ---- */

/* Whether a pass has ended at all workers but those that have been away for
 * long.  The rank's lock is held. */
int pass_is_over(const role_rank *r, uint64_t pass);
/* The link that had the last batch whose place has this remainder by the
 * number of links: loaders go by it, too. */
size_t *pass_home(const role_rank *r, uint64_t place);
/* The worker for this Take.  NULL, and not *over: the pass has ended at all
 * that are there, but may begin again there with what loaders move. */
role_link *pass_link(const role_taken *t, int *over);
/* The pass is asked for again where it has ended. */
void pass_again(const role_taken *t);
/* Takes in what an answer says of passes.  Whether the answer is of this pass:
 * a batch of a later one is to be given back. */
int pass_learn(role_taken *t);
/* The batches in hand that others than this worker gave: [*n], or NULL.  The
 * caller frees them. */
wire_batch_name *pass_held(role_rank *r, const role_link *l, size_t *n);
void pass_hold(role_taken *t);
void pass_drop(role_taken *t);

#endif
