/* memory.h: pieces of memory that are freed together; private to wire. */
#ifndef PERSIA_WIRE_MEMORY_H
#define PERSIA_WIRE_MEMORY_H

#include "wire/wire.h"

/* A piece of `bytes` aligned to `align` (a power of two up to 64); pieces
 * taken one after the other with align 1 lie side by side while their chunk
 * lasts.  NULL with the error set. */
void *chunks_take(struct wire_chunk **chunks, size_t bytes, size_t align);
void chunks_free(struct wire_chunk **chunks);

/* Appends small fields, which are copied, and bulk data, which are only
 * pointed to (but copied where a span would cost more than that). */
int out_copy(wire_out *o, const void *data, size_t bytes);
int out_point(wire_out *o, const void *data, size_t bytes);

#endif
