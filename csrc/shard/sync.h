/* sync.h: the parts of one step, which wait for each other (private).
 *
 * A step of a synchronous job is one update whose parts come from its ranks.
 * Steps are numbered for the whole job; a shard may miss some (it was killed
 * and started again from a snapshot), never go back.  All ranks take part but
 * those that said that they leave.
 *
 * A part is whatever its owner makes of it: here it is a pointer.  Not
 * locked: the owner's lock is held around every call.
 */
#ifndef PERSIA_SHARD_SYNC_H
#define PERSIA_SHARD_SYNC_H

#include "base/base.h"

enum { SYNC_RANKS = 4096 };

/* What a shard does with the steps of a job.  The events, and the state that
 * each leads to (a blank: it cannot occur there):
 *
 *              COLLECT     TAKE      DROP      END
 *  IDLE        COLLECTING                      IDLE
 *  COLLECTING              APPLYING  IDLE
 *  APPLYING    AHEAD                           IDLE
 *  AHEAD                             APPLYING  COLLECTING
 */
enum sync_state {
    SYNC_IDLE,
    SYNC_COLLECTING, /* parts of the pending step */
    SYNC_APPLYING,   /* a step that was whole */
    SYNC_AHEAD,      /* ..., and parts of the next one are collected */
    SYNC_STATES
};
enum sync_event {
    SYNC_COLLECT, /* the first part of a step */
    SYNC_TAKE,    /* the step is whole */
    SYNC_DROP,    /* it will not be: it is late, or void */
    SYNC_END,     /* the step that was taken is applied, or failed; a log that
                     is replayed applies steps that nothing has collected */
    SYNC_EVENTS
};

typedef struct sync_steps {
    enum sync_state state;
    uint64_t step;     /* applied last */
    uint64_t missed;   /* the last one that other shards have applied, or this
                          one in an earlier life, and that this life will not:
                          ranks say so */
    int has_applied;   /* a step, in this life; not one of a log */
    int has_log;       /* of all steps that were applied in earlier lives */
    uint64_t applying; /* was taken to be applied; 0: none */
    uint64_t pending;  /* is being collected; 0: none */
    uint32_t parts;    /* of the pending step */
    uint32_t n;        /* of them that are there */
    void **part;       /* [parts], NULL: missing */
    uint64_t passed[SYNC_RANKS]; /* no step up to this one waits for a part
                                    of the rank */
    uint32_t left_n;   /* ranks that take no part: */
    uint8_t left[SYNC_RANKS]; /* 1 */
    uint8_t told[SYNC_RANKS]; /* 1: the rank has said itself whether it does */
    uint64_t stream[SYNC_RANKS]; /* of the rank's updates; */
    uint64_t client[SYNC_RANKS]; /* that is the rank: which moved it last, or,
                                    before one did, made its parts; and */
    uint32_t move[SYNC_RANKS];   /* which of its moves that was; 0: unknown */
} sync_steps;

void sync_init(sync_steps *s);
/* Parts that are there are their owner's. */
void sync_free(sync_steps *s);

/* Part `rank` of `parts` of a step.  A part that is there already is
 * replaced: *replaced, else NULL.  PERSIA_EARG when it does not belong to the
 * step that is being collected, or its rank has left; PERSIA_EUNAVAILABLE when
 * its rank was passed in an earlier step, which waits for others. */
int sync_add(sync_steps *s, uint64_t step, uint32_t rank, uint32_t parts,
             void *part, void **replaced);
/* Instead of sync_add(): the shard has the part's update from an earlier life
 * of its rank.  The step waits for the others alone, also where they send
 * their parts again because it failed: this rank does not.  A rank may be
 * passed in several steps while the first of them waits. */
void sync_pass(sync_steps *s, uint64_t step, uint32_t rank, uint32_t parts);
/* Before a part is added.  A rank sends the next step when it was answered the
 * one before.  So of two ranks that send different steps to a shard that has
 * applied none in this life, one had its answer to the earlier step from
 * another life: that step is missed now, and is not applied any more.  Parts
 * of it that are there are handed out as by sync_take().  With a log the other
 * life did not apply it: that rank was passed, and the parts of the later step
 * that are there are handed out. */
void **sync_infer(sync_steps *s, uint64_t step, uint32_t rank, uint32_t parts,
                  uint32_t *n);
/* A part of the rank is there, or was passed, that this client has made. */
void sync_note_client(sync_steps *s, uint32_t rank, uint64_t client);
/* The log of earlier lives is applied. */
void sync_begin(sync_steps *s);
/* Whether the pending step can be applied now. */
int sync_complete(const sync_steps *s);
/* Ends collecting: the parts that are there, in the order of their ranks, in
 * an array that the caller frees; *n may be 0.  `apply`:
 * sync_applied() or sync_failed() must follow. */
void **sync_take(sync_steps *s, int apply, uint32_t *n);
void sync_applied(sync_steps *s, uint64_t step);
void sync_failed(sync_steps *s);
/* Other rows are there, of this step. */
void sync_set_step(sync_steps *s, uint64_t step);

/* A rank of `world` joins (its first step is after `step`) or leaves.
 * What of the pending step is void then is handed out as by sync_take(): the
 * part of that rank, or all parts if the step cannot be any more (it was
 * missed, if it is not behind `missed`).  With a log none is missed: the rank
 * is passed up to `step`. */
void **sync_move(sync_steps *s, uint32_t rank, uint32_t world, int joins,
                 uint64_t step, uint32_t *n);
/* A rank joins or leaves: the client that says so, for which stream of
 * updates, and which of its moves it is. */
typedef struct sync_mover {
    uint64_t client, stream;
    uint32_t move;
    int joins;
} sync_mover;
enum sync_heed {
    SYNC_LATE,  /* not: the client has moved the rank since, as its message was
                   in flight for that long, or it leaves for a rank that is
                   another job's by now */
    SYNC_AGAIN, /* it joins as it had: what is there of it stays */
    SYNC_MOVES  /* sync_move() */
};
/* What a move is.  Unless it is late, it is noted as the rank's last. */
enum sync_heed sync_heed(sync_steps *s, uint32_t rank, const sync_mover *by);
/* Whether the rank has joined with another stream of updates; not, if it did
 * not say with which. */
int sync_is_other(const sync_steps *s, uint32_t rank, uint64_t stream);
/* Another rank says that this one has left, maybe in an earlier life of the
 * shard: true unless the rank itself has spoken in this one. */
void sync_hear(sync_steps *s, uint32_t rank);
/* The ranks below `world` that take no part: up to `room`, returns how many.
 */
uint32_t sync_list_left(const sync_steps *s, uint32_t world, uint64_t *out,
                        uint32_t room);
/* Takes the part of one rank of the pending step, as by sync_take(). */
void **sync_take_one(sync_steps *s, uint32_t rank, uint32_t *n);
/* "rank 3", "ranks 0, 1, 7 and 40 more": whose parts are missing. */
void sync_missing(const sync_steps *s, char *out, size_t room);

#endif
