/* prefetch.h: private to the store: the look-ahead as store.c sees it. */
#ifndef PERSIA_STORE_PREFETCH_H
#define PERSIA_STORE_PREFETCH_H

#include "store/store.h"

typedef struct ahead ahead;

/* threads: of lookups, at most. */
int prefetch_create(store *s, unsigned threads, ahead **out);
/* Ends every stream and waits for its lookups. */
void prefetch_destroy(ahead *a);

/* The gradient of a forward came back and waits for an update. */
void prefetch_pending(ahead *a, uint64_t ticket);
/* An update of these gradients begins; once more, with its number in the
 * stream of updates (else 0), when it is about to be sent. */
void prefetch_applying(ahead *a, const store_grad *held, size_t n,
                    uint64_t number);
/* Whether a bound lets the loop go on before they are applied: all are of
 * open batches, and no open stream is synchronous or `here`. */
int prefetch_allows(ahead *a, const store_grad *held, size_t n);
/* They are applied, or dropped; on any thread. */
void prefetch_ended(ahead *a, const store_grad *held, size_t n, int applied);
/* Gradients that are out are refused, and no lookup so far is taken. */
void prefetch_forget(ahead *a);
/* Frees what ended; on threads of the user. */
void prefetch_tidy(ahead *a);

/* One more empty part is owed to the other ranks. */
void prefetch_owe(ahead *a);
/* How many are owed; the caller sends them now. */
unsigned prefetch_owed(ahead *a);
/* One of them was applied, or failed. */
void prefetch_paid(ahead *a);

/* From store.c: */
ahead *store_prefetch(store *s);
/* Sends the empty parts that are owed. */
int store_pay(store *s);
/* Keeps this thread's error for the next call that trains. */
void store_keep_error(store *s, int code);
/* From now on the gradient of this forward is refused; 0 if it came
 * already. */
int store_refuse(store *s, uint64_t ticket);

#endif
