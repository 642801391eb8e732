/* slow.h: the last calls that took long (private). */
#ifndef PERSIA_SERVER_SLOW_H
#define PERSIA_SERVER_SLOW_H

#include <pthread.h>

#include "wire/wire.h"

typedef struct slow_calls {
    uint64_t over_ns;     /* that is long; 0: none is noted */
    pthread_mutex_t lock; /* guards: */
    wire_slow_call of[WIRE_SLOW_MAX]; /* a ring */
    uint64_t n;           /* that were put there */
} slow_calls;

void slow_init(slow_calls *s, uint64_t over_ns);
void slow_free(slow_calls *s);
void slow_note(slow_calls *s, const wire_slow_call *call);
/* The last ones first: [*n], in the memory. */
int slow_list(slow_calls *s, wire_memory *memory, wire_slow_call **out,
              size_t *n);

#endif
