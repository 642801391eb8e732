/* infer.h: requests of the Open Inference Protocol v2, from their bytes to
 * the inputs of a model, and back.
 *
 * A request is a list of named tensors.  It is a message of gRPC
 * (inference.GRPCInferenceService), or the room that reads HTTP has made it;
 * from then on both are the same.  Requests wait in a queue until a
 * thread takes as many as make one batch.  A plan says which tensors a model
 * takes; a request is bound to it, which checks its tensors, and then copied
 * into the model's inputs beside others.
 *
 * Nothing here computes.  Bytes may come from anywhere: whatever they are,
 * they are a request, or refused with an error that names the tensor.
 */
#ifndef PERSIA_INFER_H
#define PERSIA_INFER_H

#include "rpc/rpc.h"

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- tensors ------------------------------------------------------------ */

/* X(name, bytes of an element); of BYTES each has four bytes of its length
 * before it. */
#define INFER_TYPES_EACH(X)                                                   \
    X(BOOL, 1)                                                                \
    X(UINT8, 1)                                                               \
    X(UINT16, 2)                                                              \
    X(UINT32, 4)                                                              \
    X(UINT64, 8)                                                              \
    X(INT8, 1)                                                                \
    X(INT16, 2)                                                               \
    X(INT32, 4)                                                               \
    X(INT64, 8)                                                               \
    X(FP16, 2)                                                                \
    X(BF16, 2)                                                                \
    X(FP32, 4)                                                                \
    X(FP64, 8)                                                                \
    X(BYTES, 0)
#define INFER_TYPE(name, bytes) INFER_##name,
enum infer_type { INFER_TYPES_EACH(INFER_TYPE) INFER_TYPES };
#undef INFER_TYPE

enum {
    INFER_DIMS_MAX = 8,
    INFER_TENSORS_MAX = 4096,
    INFER_ELEMENTS_MAX = 1 << 26, /* of a tensor */
    INFER_TEXT_MAX = 255          /* bytes of a name or an id */
};

/* Text that has no 0 at its end; UTF-8. */
typedef struct infer_text {
    const char *data;
    size_t n;
} infer_text;

typedef struct infer_tensor {
    infer_text name;
    uint32_t type; /* enum infer_type */
    uint32_t dims;
    int64_t shape[INFER_DIMS_MAX];
    const void *data; /* row after row, little-endian, of any alignment */
    size_t bytes;
} infer_tensor;

/* "FP32", ...; NULL for no type. */
PERSIA_API const char *persia_infer_type_name(uint32_t type);
/* The reverse; INFER_TYPES for another text. */
PERSIA_API uint32_t persia_infer_type(infer_text name);
/* Whether shape and type are possible, and the bytes are theirs:
 * PERSIA_ESHAPE, PERSIA_EDTYPE, PERSIA_ELIMIT. */
PERSIA_API int persia_infer_check(const infer_tensor *t);

/* ---- messages ----------------------------------------------------------- */

#define INFER_NO_TIMEOUT UINT64_MAX
typedef struct infer_request {
    infer_text model, version, id; /* empty: not said */
    infer_tensor *inputs;
    size_t inputs_n;
    infer_text *outputs; /* that are asked for */
    size_t outputs_n;    /* 0: all */
    uint64_t timeout_us; /* that it may take, or INFER_NO_TIMEOUT */
    wire_memory memory;
} infer_request;

/* A ModelInferRequest, which points into its bytes: they stay as they are
 * until the request is freed.  PERSIA_EPROTOCOL, PERSIA_EARG (a parameter that
 * is not supported), and as persia_infer_check(). */
PERSIA_API int persia_infer_decode(const void *data, size_t n,
                                   infer_request *out);
/* Frees what was decoded, or was put together; nothing after an error. */
PERSIA_API void persia_infer_free(infer_request *r);

/* A ModelInferResponse; copies all. */
PERSIA_API int persia_infer_encode(const infer_request *asked,
                                   infer_text version,
                                   const infer_tensor *outputs, size_t n,
                                   wire_out *out);

/* ---- inputs of a model -------------------------------------------------- */

typedef struct infer_input {
    infer_text name;
    uint32_t type;
    uint32_t dims; /* with that of samples */
    int64_t shape[INFER_DIMS_MAX]; /* from 1 on: what it must be */
    size_t row;    /* bytes of a sample; of persia_infer_plan() */
} infer_input;

typedef struct infer_plan infer_plan;
/* inputs [n]: copied, with their names. */
PERSIA_API int persia_infer_plan(const infer_input *inputs, size_t n,
                                 infer_plan **out);
PERSIA_API void persia_infer_plan_free(infer_plan *p); /* NULL is fine */
PERSIA_API size_t persia_infer_plan_inputs(const infer_plan *p);
PERSIA_API const infer_input *persia_infer_plan_input(const infer_plan *p,
                                                      size_t i);
/* The tensor of each input, found [inputs], and how many samples there are:
 * tensors of 1 stand beside those of n.  PERSIA_EARG (a tensor that is no
 * input), PERSIA_EFEATURE, PERSIA_EDTYPE, PERSIA_ESHAPE, PERSIA_ELIMIT (more
 * than `limit` samples). */
PERSIA_API int persia_infer_bind(const infer_plan *p, const infer_request *r,
                                 uint64_t limit, const infer_tensor **found,
                                 uint64_t *samples);
/* Copies a bound tensor, repeated if it has one sample.  to: [samples]. */
PERSIA_API void persia_infer_copy(const infer_input *input,
                                  const infer_tensor *t, uint64_t samples,
                                  void *to);

/* ---- requests that wait ------------------------------------------------- */

/* Methods of the service, in the order of its paths. */
enum infer_method {
    INFER_SERVER_LIVE,
    INFER_SERVER_READY,
    INFER_MODEL_READY,
    INFER_SERVER_METADATA,
    INFER_MODEL_METADATA,
    INFER_MODEL_CONFIG,
    INFER_MODEL_STATISTICS,
    INFER_MODEL_INFER,
    INFER_INDEX,
    INFER_LOAD,
    INFER_UNLOAD,
    INFER_METHODS
};
PERSIA_API extern const rpc_methods persia_infer_methods;

/* A call that waits, or was taken.  Who takes it answers its call, once, and
 * frees it. */
typedef struct infer_item {
    infer_request request; /* of ModelInfer */
    rpc_call *call;  /* NULL: of this process */
    void *owner;     /* of who put it; of a call NULL */
    uint64_t samples; /* the largest first size of a tensor */
    uint64_t began, until; /* of persia_clock_ns() */
    struct infer_item *next; /* guarded by the queue's lock, until taken */
} infer_item;
PERSIA_API void persia_infer_item_free(infer_item *item);

typedef struct infer_queue infer_queue;
/* room: samples that may wait; timeout_ns: of calls that say nothing. */
PERSIA_API int persia_infer_queue_create(uint64_t room, uint64_t timeout_ns,
                                         infer_queue **out);
/* No thread uses it any more; what waits must have been taken. */
PERSIA_API void persia_infer_queue_free(infer_queue *q); /* NULL is fine */
/* A handler of calls of persia_infer_methods; ctx: the queue. */
PERSIA_API void persia_infer_handle(void *ctx, rpc_call *call);
/* Puts a request, with its samples, behind the others; it is the caller's
 * after an error: PERSIA_ELIMIT (no room), PERSIA_ECLOSED. */
PERSIA_API int persia_infer_put(infer_queue *q, infer_item *item);
/* Waits for requests, and takes as many as have at most `samples` together,
 * at least one; NULL: the queue was closed, and none is left. */
PERSIA_API infer_item *persia_infer_take(infer_queue *q, uint64_t samples);
/* The same for one call of another method than ModelInfer. */
PERSIA_API infer_item *persia_infer_take_other(infer_queue *q);
PERSIA_API uint64_t persia_infer_waiting(infer_queue *q);
/* Calls that persia_infer_handle() has refused, by code: out
 * [PERSIA_ERROR_COUNT]. */
PERSIA_API void persia_infer_refused(infer_queue *q, uint64_t *out);
/* What arrives now is refused; who takes gets what is left, then NULL. */
PERSIA_API void persia_infer_close(infer_queue *q);

#ifdef __cplusplus
}
#endif
#endif
