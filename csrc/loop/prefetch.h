/* prefetch.h (private): lookups of the next batches, as loop.c and updates.c
 * see them. */
#ifndef PERSIA_LOOP_PREFETCH_H
#define PERSIA_LOOP_PREFETCH_H

#include "loop/loop.h"

typedef struct prefetch prefetch;

/* threads: of lookups, at most. */
int prefetch_create(loop *s, unsigned threads, prefetch **out);
/* Ends every pass and waits for its lookups. */
void prefetch_destroy(prefetch *p);

/* The gradient of a forward is there and waits for an update. */
void prefetch_pending(prefetch *p, uint64_t ticket);
/* The place of the one batch that these gradients are of (n of 0: the last
 * one that was taken); 0: it is not known, or there are several. */
uint64_t prefetch_place(prefetch *p, const loop_grad *grads, size_t n);
/* Places are counted on from this one. */
void prefetch_renumber(prefetch *p, uint64_t last);
/* An update of these gradients begins.  step: of several backwards. */
void prefetch_updating(prefetch *p, const loop_grad *grads, size_t n,
                       int step);
/* It is about to be sent, with its number in the stream of updates.  *times:
 * those of its batch.  Whether an embedding worker had that. */
struct batch_times;
int prefetch_sending(prefetch *p, const loop_grad *grads, size_t n,
                     uint64_t number, struct batch_times *times);
/* Whether a bound lets the loop continue before they are applied: all are of
 * batches that count, and no open pass is synchronous or `here`. */
int prefetch_allows(prefetch *p, const loop_grad *grads, size_t n);
/* They are applied, or their update failed; on any thread. */
void prefetch_updated(prefetch *p, const loop_grad *grads, size_t n,
                      int applied);
/* They were dropped before an update. */
void prefetch_discarded(prefetch *p, const loop_grad *grads, size_t n);
/* Gradients that are out are refused, and no lookup so far is taken. */
void prefetch_forget(prefetch *p);
/* Frees what ended; on threads of the user. */
void prefetch_tidy(prefetch *p);

/* Whether there is no pass; without the lock. */
int prefetch_is_idle(prefetch *p);

/* One more empty part is owed to the other ranks. */
void prefetch_owe(prefetch *p);
/* How many are owed; the caller sends them now. */
unsigned prefetch_owed(prefetch *p);
/* One of them was applied, or failed. */
void prefetch_paid(prefetch *p);

/* The index of a batch that is taken from elsewhere, when it is there: a
 * reference of the caller's; NULL: the batch is none, or has ended.  reads:
 * for a forward. */
int prefetch_taken(prefetch *p, uint64_t batch, int reads,
                   struct batch_index **index);

/* From loop.c: */
prefetch *loop_prefetch(loop *s);
/* The number of the last forward. */
uint64_t loop_last_ticket(loop *s);
/* persia_batcher_forward() of a lookup. */
int loop_look_up(loop *s, const loop_lookup *l, uint64_t after);
/* Sends the empty parts that are owed. */
int loop_pay(loop *s);
/* Keeps this thread's error for the next call that trains. */
void loop_keep_error(loop *s, int code);
/* From now on the gradient of this forward is refused; 0 if it is there
 * already. */
int loop_refuse(loop *s, uint64_t ticket);

#endif
