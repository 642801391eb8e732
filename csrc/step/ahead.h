/* ahead.h: private to the step: the look-ahead as step.c sees it. */
#ifndef PERSIA_STEP_AHEAD_H
#define PERSIA_STEP_AHEAD_H

#include "step/step.h"

typedef struct ahead ahead;

int ahead_create(step *s, ahead **out);
/* Ends every stream and waits for its lookups. */
void ahead_destroy(ahead *a);

/* The gradient of a forward came back and waits for an update. */
void ahead_held(ahead *a, uint64_t ticket);
/* An update of these gradients begins. */
void ahead_applying(ahead *a, const step_grad *held, size_t n);
/* They are applied, or dropped. */
void ahead_ended(ahead *a, const step_grad *held, size_t n, int applied);

/* From step.c: */
ahead *step_ahead(step *s);
/* From now on the gradient of this forward is refused; 0 if it came
 * already. */
int step_refuse(step *s, uint64_t ticket);

#endif
