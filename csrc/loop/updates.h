/* updates.h (private): updates that threads of the store apply while the
 * training loop runs.
 *
 * They begin in the order in which they were added; with one thread they end
 * so.  The memory of their gradients may be Python's: it is released by
 * threads of the user alone, in updates_tidy() and updates_wait().
 *
 * An update is in one state at a time.  Its events, and the state that each
 * leads to (a blank: it cannot occur there):
 *
 *           ADD     BEGIN    APPLY    FAIL
 *  NEW      QUEUED  RUNNING
 *  QUEUED           RUNNING           FAILED
 *  RUNNING                   APPLIED  FAILED
 */
#ifndef PERSIA_LOOP_UPDATES_H
#define PERSIA_LOOP_UPDATES_H

#include "client/client.h"
#include "loop/copies.h"
#include "loop/loop.h"

typedef struct updates updates;

enum update_state {
    UPDATE_NEW,     /* of the thread that made it */
    UPDATE_QUEUED,  /* waits for a thread of the store */
    UPDATE_RUNNING, /* the shards have it, or will */
    UPDATE_APPLIED, /* at all shards; freed by a thread of the user */
    UPDATE_FAILED,  /* or it was dropped, as the store closes; freed so */
    UPDATE_STATES
};

enum update_event {
    UPDATE_ADD,   /* it is added to the queue */
    UPDATE_BEGIN, /* a thread takes it */
    UPDATE_APPLY, /* all shards have applied it */
    UPDATE_FAIL,  /* some have not, or it will not be sent */
    UPDATE_EVENTS
};

typedef struct update {
    struct update *next;
    enum update_state state;
    client_update name; /* number 0: the shard counts */
    uint64_t place;      /* of its batch; 0: not known, or of several */
    int refused;         /* it needs a place, and has none */
    loop_grad *grads;    /* [n] */
    size_t n;           /* 0: an empty part of a store */
    const optim_args *optim; /* [optim_n] */
    uint32_t optim_n;
    optim_args *own; /* memory of optim, or NULL */
} update;

/* threads: that apply them.  most: that may wait or be in flight when an
 * update is added; more make the loop wait. */
int updates_create(loop *s, ps_client *c, unsigned threads, size_t most,
                   updates **out);
/* No more will be added: once one has failed, those that wait are dropped. */
void updates_close(updates *u);
/* Closes, and waits for them. */
void updates_destroy(updates *u);

/* A new update of these gradients, which it owns on success; the settings
 * and the ids of gradients that may still change are copied.  n may be 0. */
int updates_make(updates *u, loop_grad *grads, size_t n,
                 const optim_args *optim, uint32_t optim_n, update **out);
/* Takes over the update, then waits until there is room for the next.
 * PERSIA_EINTR, or (`tell`) the error that was kept before. */
int updates_add(updates *u, update *one, int tell);

/* One on this thread, of gradients that the caller keeps. */
int updates_now(updates *u, update *one);

/* Numbers continue after this one.  An update has the number of its place,
 * until one has no place, or one that another update has or has passed: then
 * they are counted.  strict: such an update is refused. */
void updates_renumber(updates *u, uint64_t last, int strict);
/* Whether all numbers since then are places. */
int updates_have_places(updates *u);
/* Updates that are added are parts of steps; parts of 0: no more. */
void updates_sync(updates *u, uint64_t last, uint32_t part, uint32_t parts);
int updates_are_parts(updates *u);

/* Waits until at most `most` are left.  PERSIA_EINTR, PERSIA_ETIMEOUT. */
int updates_wait(updates *u, size_t most, uint64_t timeout_ns);
/* Keeps this thread's error, unless there is one; PERSIA_ELOST has a place of
 * its own. */
void updates_keep(updates *u, int code);
/* The first error since it was last told, with its text; then the other. */
int updates_error(updates *u);
void updates_drop_errors(updates *u);
/* Releases the memory of those that ended; on threads of the user. */
void updates_tidy(updates *u);
void updates_get_counts(updates *u, loop_counts *out);

/* From loop.c: applies the gradients. */
int loop_run(loop *s, const update *one);
/* Copies the ids of a gradient that may change. */
int loop_copy_ids(loop *s, loop_grad *g);
/* Frees gradients and their array; on threads of the user. */
void loop_release_grads(loop_grad *grads, size_t n);

#endif
