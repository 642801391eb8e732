/* gather.h: messages as gather lists, and memory of many pieces. */
#ifndef PERSIA_MEM_GATHER_H
#define PERSIA_MEM_GATHER_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- how large a message may be ----
 *
 * What serves has a limit of the messages that it takes, and Hello names it;
 * clients have WIRE_MESSAGE_LIMIT for answers.  gRPC refuses what arrives and
 * is larger.  All that is sent is checked before, here: 0 is a limit that is
 * not known yet. */
#define WIRE_MESSAGE_LIMIT ((uint64_t)256 << 20)

/* PERSIA_ELIMIT: `what` of so many bytes is too large for `whose` limit. */
PERSIA_API int persia_wire_check_size(const char *whose, const char *what,
                                      uint64_t bytes, uint64_t limit);
/* Entries of `each` bytes that one message has at most, at least 1: they take
 * half of it. */
PERSIA_API uint64_t persia_wire_fit(uint64_t limit, uint64_t each);

/* ---- gather lists ---- */

typedef struct wire_span {
    const void *data;
    size_t n; /* bytes */
} wire_span;

/* A message that is being encoded, as spans in order. */
typedef struct wire_out {
    wire_span *spans;
    size_t spans_n;
    size_t bytes; /* of all spans */
    size_t referred; /* of these, bytes that others must keep */
    struct wire_chunk *chunks; /* private: memory of small fields */
    size_t spans_room;
} wire_out;
PERSIA_API void persia_wire_out_init(wire_out *o);
PERSIA_API void persia_wire_out_free(wire_out *o);
/* The whole message in one piece, for tests and calls within a process.
 * to: [o->bytes]. */
PERSIA_API void persia_wire_out_copy(const wire_out *o, void *to);

/* Appends small fields, which are copied, and bulk data, which are only
 * pointed to (but copied where a span would cost more than that). */
PERSIA_API int persia_wire_out_add(wire_out *o, const void *data,
                                   size_t bytes);
PERSIA_API int persia_wire_out_refer(wire_out *o, const void *data,
                                     size_t bytes);

/* Appends a message and what it owns; `more` is empty then, and unchanged
 * after an error. */
PERSIA_API int persia_wire_out_append(wire_out *o, wire_out *more);

/* Memory of decoded messages: many pieces, freed at once. */
typedef struct wire_memory {
    struct wire_chunk *chunks;
} wire_memory;
PERSIA_API void persia_wire_memory_init(wire_memory *m);
PERSIA_API void persia_wire_memory_free(wire_memory *m);
/* Aligned to 64 bytes, not cleared; NULL with the error set. */
PERSIA_API void *persia_wire_memory_take(wire_memory *m, size_t bytes);

/* For gather.c: a piece of `bytes` aligned to `align` (a power of two up to
 * 64); pieces taken one after the other with align 1 lie side by side while
 * their chunk lasts.  NULL with the error set. */
void *chunks_take(struct wire_chunk **chunks, size_t bytes, size_t align);
void chunks_free(struct wire_chunk **chunks);
/* Those of `more` go behind the others. */
void chunks_join(struct wire_chunk **chunks, struct wire_chunk **more);

#ifdef __cplusplus
}
#endif
#endif
