/* wire.h: the messages of persia.proto, encoded and decoded.
 *
 * Their structs are in messages.h, generated from persia.proto.
 *
 * Encoders make a gather list: small fields in a buffer of the message, bulk
 * data (ids, values, row numbers) as references to memory of the caller, so
 * that they leave from where they lie.  Bulk data are little-endian and
 * padded (field 15 of their message, bytes that readers skip) so that they
 * begin at a multiple of 8 bytes of the message.
 *
 * Decoders are given one contiguous message, aligned to 64 bytes.  They point
 * into it where data are aligned, as those of our own encoders are, and copy
 * into the wire_memory where a foreign client's are not.  Nothing in a
 * message is believed: PERSIA_EPROTOCOL names the field that is wrong; no
 * count is larger than the message could hold.  Unknown fields are skipped.
 */
#ifndef PERSIA_WIRE_H
#define PERSIA_WIRE_H

#include "mem/mem.h"
#include "spec/spec.h"
#include "wire/messages.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    WIRE_VERSION = 2,     /* the highest that this process speaks, and */
    WIRE_VERSION_MIN = 2, /* the lowest */
    WIRE_FEATURES = 0,    /* bits, see Hello */
    WIRE_NAME = WIRE_NAME_MAX + 1, /* bytes of a name, with its 0 */
    WIRE_WINDOW_WORDS = WIRE_WINDOW_MAX
};

/* By how much `settled`, `step`, `t` and an incarnation may exceed what the
 * server has: more than any job makes between two lives of a server, and so
 * little that the numbers do not run out. */
#define WIRE_LEAP ((uint64_t)1 << 40)

static inline int wire_leaps(uint64_t from, uint64_t to)
{
    return to > from && to - from > WIRE_LEAP;
}

enum wire_method {
#define WIRE_METHOD(upper, name) WIRE_##upper,
    WIRE_METHODS(WIRE_METHOD)
#undef WIRE_METHOD
    WIRE_METHODS_N
};

/* How the names of tables that were dropped begin in lists. */
#define WIRE_DROPPED "\x1f" "dropped "

/* Whether the other side speaks a version that we do; min 0: only `max`. */
static inline int wire_versions_meet(uint32_t min, uint32_t max)
{
    return (min ? min : max) <= WIRE_VERSION && max >= WIRE_VERSION_MIN;
}

static inline size_t wire_dtype_bytes(uint32_t dtype)
{
    return dtype == WIRE_FP32 ? 4 : 2;
}

/* ---- encode and decode -------------------------------------------------- */

/* wire_put_X appends the message to `o`; bulk data must stay in place until
 * the message was sent.  What no wire_get_X would read it refuses to write
 * (PERSIA_EARG, the same text).  wire_get_X fills in *out, whose pointers hold
 * as long as data and memory do; arrays without elements are NULL.  Whether
 * tables exist, and an answer has what was asked for, is not known here. */
#define WIRE_DECLARE(name)                                                    \
    PERSIA_API int persia_wire_put_##name(wire_out *o, const wire_##name *m); \
    PERSIA_API int persia_wire_get_##name(                                    \
        const void *data, size_t n, wire_memory *memory, wire_##name *out);
WIRE_MESSAGES(WIRE_DECLARE)
#undef WIRE_DECLARE

/* A `many` is written part by part, and its reply result by result: appends
 * the next one with its message, which is taken over unless that fails (then
 * `o` is of no use).  m->message and m->n are not read; of texts that are too
 * long the end is left out. */
PERSIA_API int persia_wire_put_part(wire_out *o, const wire_part *m,
                                    wire_out *message);
PERSIA_API int persia_wire_put_result(wire_out *o, const wire_result *m,
                                      wire_out *message);

/* Whether a text is UTF-8 without a 0. */
PERSIA_API int persia_wire_is_utf8(const char *text, size_t bytes);

/* ---- values ------------------------------------------------------------- */

/* Narrows n rows of dim floats, `stride` apart, to packed wire values; scales
 * [n] is written for FP16 only (NULL otherwise).  Ties to even. */
PERSIA_API void persia_wire_narrow(uint32_t dtype, size_t n, uint32_t dim,
                                   const float *from, size_t stride, void *to,
                                   float *scales);
/* The reverse. */
PERSIA_API void persia_wire_widen(uint32_t dtype, size_t n, uint32_t dim,
                                  const void *from, const float *scales,
                                  float *to, size_t stride);

#ifdef __cplusplus
}
#endif
#endif
