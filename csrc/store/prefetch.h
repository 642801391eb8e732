/* prefetch.h: private to the step: the look-ahead as step.c sees it. */
#ifndef PERSIA_STORE_PREFETCH_H
#define PERSIA_STORE_PREFETCH_H

#include "store/store.h"

typedef struct ahead ahead;

/* threads: of lookups, at most. */
int ahead_create(step *s, unsigned threads, ahead **out);
/* Ends every stream and waits for its lookups. */
void ahead_destroy(ahead *a);

/* The gradient of a forward came back and waits for an update. */
void ahead_held(ahead *a, uint64_t ticket);
/* An update of these gradients begins; once more, with its number in the
 * stream of updates (else 0), when it is about to be sent. */
void ahead_applying(ahead *a, const step_grad *held, size_t n,
                    uint64_t number);
/* Whether a bound lets the loop go on before they are applied: all are of
 * open batches, and no open stream is synchronous or `here`. */
int ahead_allows(ahead *a, const step_grad *held, size_t n);
/* They are applied, or dropped; on any thread. */
void ahead_ended(ahead *a, const step_grad *held, size_t n, int applied);
/* Gradients that are out are refused, and no lookup so far is taken. */
void ahead_forget(ahead *a);
/* Frees what ended; on threads of the user. */
void ahead_tidy(ahead *a);

/* One more empty part is owed to the other ranks. */
void ahead_owe(ahead *a);
/* How many are owed; the caller sends them now. */
unsigned ahead_owed(ahead *a);
/* One of them was applied, or failed. */
void ahead_paid(ahead *a);

/* From step.c: */
ahead *step_ahead(step *s);
/* Sends the empty parts that are owed. */
int step_pay(step *s);
/* Keeps this thread's error for the next call that trains. */
void step_keep_error(step *s, int code);
/* From now on the gradient of this forward is refused; 0 if it came
 * already. */
int step_refuse(step *s, uint64_t ticket);

#endif
