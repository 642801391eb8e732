/* trace.h: spans of sampled batches, until they are exported.
 *
 * All processes know a batch by its stream and number.  These two decide
 * whether it is sampled, and the id of its trace, so loaders, embedding
 * workers and ranks agree without a message.  A server does not know the batch
 * of a pull: the request of a sampled batch carries the span of its caller.
 *
 * The first span of a batch is its loader's.  Spans of embedding workers and
 * ranks are below it, and spans of servers below that of their caller.
 *
 * Spans lie in one ring of the process, as lines of its log do: an exporter
 * takes them.  Where none keeps up, the newest are dropped and counted.
 */
#ifndef PERSIA_TRACE_H
#define PERSIA_TRACE_H

#include "wire/wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(upper, name, who makes it) */
#define TRACE_KINDS_EACH(X)                                                   \
    X(BATCH, batch, "from its first Submit until its loader has its end")     \
    X(SUBMIT, submit, "its loader sends it")                                  \
    X(QUEUE, queue, "at an embedding worker, until a rank gets it")           \
    X(LOOKUP, lookup, "an embedding worker looks it up")                      \
    X(PULL, pull, "a server reads rows")                                      \
    X(TAKE, take, "a rank asks for it")                                       \
    X(TRAIN, train, "a rank has it: forward and backward")                    \
    X(RETURN, return, "a rank returns its gradients")                         \
    X(APPLY, apply, "an embedding worker applies them")                       \
    X(PUSH, push, "a server applies them")

enum trace_kind {
#define TRACE_KIND(upper, name, text) TRACE_##upper,
    TRACE_KINDS_EACH(TRACE_KIND)
#undef TRACE_KIND
        TRACE_KINDS
};
/* "batch", ... */
PERSIA_API const char *persia_trace_name(enum trace_kind kind);

typedef struct trace_span {
    wire_trace at;    /* its trace, and its own id */
    uint64_t parent;  /* id; 0: it is the first of its batch */
    enum trace_kind kind;
    int code;              /* how it ended: PERSIA_OK or an error */
    uint64_t began, ended; /* of persia_clock_ns(); began 0: not sampled */
    uint64_t stream, number; /* of the batch; 0: not known */
    uint64_t rows, bytes;    /* 0: not counted */
    uint32_t attempt;        /* from 1; 0: not known */
    uint32_t shard;          /* of a server's */
} trace_span;

/* ---- for the rooms that work on a batch --------------------------------- */

/* The time; 0: nothing is sampled. */
PERSIA_API uint64_t persia_trace_now(void);
/* A span of a batch begins now, if the batch is sampled; TRACE_BATCH: the
 * first one. */
PERSIA_API void persia_trace_begin(trace_span *t, enum trace_kind kind,
                                   uint64_t stream, uint64_t number);
/* A span below that of a request, if the request carries one. */
PERSIA_API void persia_trace_below(trace_span *t, enum trace_kind kind,
                                   const wire_trace *parent, uint64_t began);
/* Keeps the span if it is sampled.  It ended at `ended`, or (0) now. */
PERSIA_API void persia_trace_end(trace_span *t, int code);
/* A whole span that ends now.  began: of persia_trace_now(). */
PERSIA_API void persia_trace_part(enum trace_kind kind, uint64_t stream,
                                  uint64_t number, uint64_t began,
                                  uint32_t attempt, int code);

/* ---- for the exporter --------------------------------------------------- */

/* From now on this share of batches is sampled, and up to `room` spans are
 * kept; 0: none any more, and those that are kept can still be taken. */
PERSIA_API int persia_trace_start(double rate, size_t room);
/* Up to `room` spans, the oldest first; how many.  *dropped: since the
 * start, for which there was no room. */
PERSIA_API size_t persia_trace_take(trace_span *out, size_t room,
                                    uint64_t *dropped);

#ifdef __cplusplus
}
#endif
#endif
