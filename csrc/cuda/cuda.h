/* cuda.h: embeddings on a device: rows to pooled values, gradients of those to
 * sums per row, and the way of both from and to the host (link.h).
 *
 * A batch on a device: `features` features of `bags` bags each, feature-major.
 * Bag x is bag x % bags of feature x / bags.  Its ids are
 * offsets[x] .. offsets[x + 1); without offsets each bag has one id, x.  Id i
 * has the row inverse[i].
 *
 * Bag x is pooled as pool.h says, and in the same order: so are the bits.
 * Its gradients are summed per row in the order of ids, as a push sums them.
 * All pointers are of the device's memory.
 */
#ifndef PERSIA_CUDA_H
#define PERSIA_CUDA_H

#include "cuda/link.h"
#include "mem/device.h"
#include "pool/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_feature {
    int32_t pooling; /* enum pool_kind */
    int32_t dim;
    int32_t column; /* its first column in the pooled values */
} cuda_feature;

/* The ids of a batch, without their rows. */
typedef struct cuda_bags {
    const cuda_feature *features;
    size_t features_n;
    size_t bags;            /* a feature */
    const int32_t *offsets; /* [features_n * bags + 1], or NULL */
    const float *weights;   /* one an id, or NULL: all 1 */
} cuda_bags;

typedef struct cuda_pool {
    cuda_bags of;
    const void *rows; /* [.., dim], `row_stride` elements apart */
    uint32_t rows_dtype;
    size_t row_stride;
    const int32_t *inverse; /* one an id */
    void *out; /* [bags, columns], rows `out_stride` elements apart */
    uint32_t out_dtype;
    size_t out_stride;
    uint32_t width; /* the largest dim of a feature */
} cuda_pool;

typedef struct cuda_sum {
    cuda_bags of;
    const void *grad; /* of the pooled values */
    uint32_t grad_dtype;
    size_t grad_stride;
    /* The ids of row r: order[starts[r]] .. order[starts[r + 1]), rising. */
    const int64_t *order;
    const int32_t *starts; /* [rows + 1] */
    const int32_t *bag;    /* the bag x of each id; NULL without offsets */
    void *out; /* [rows, width]; columns beyond a row's dim become 0 */
    uint32_t out_dtype;
    size_t out_stride;
    size_t rows;
    uint32_t width;
} cuda_sum;

typedef struct cuda_convert {
    const void *from;
    void *to;
    uint32_t from_dtype, to_dtype;
    size_t n;
} cuda_convert;

/* A device and what it computes; both of libpersia_cuda.so, or of the host. */
typedef struct cuda_device {
    mem_device mem;
    int (*pool)(void *stream, const cuda_pool *args);
    int (*sum)(void *stream, const cuda_sum *args);
    int (*convert)(void *stream, const cuda_convert *args);
} cuda_device;

/* The symbol of libpersia_cuda.so; it is refused unless the version fits. */
enum { CUDA_LIBRARY_VERSION = 2 };
#define CUDA_LIBRARY_SYMBOL "persia_cuda_library"
typedef const cuda_device *(*cuda_library_fn)(int version);

/* "host", or "cuda": libpersia_cuda.so is opened beside this library.
 * PERSIA_EUNAVAILABLE: there is none, or no device that it can use. */
PERSIA_API int persia_cuda_open(const char *name, const cuda_device **out);

/* Whether fewer bytes travel, there and back, as distinct rows and their
 * places than as pooled values.
 *   values  elements of the pooled values
 *   rows    elements of the distinct rows
 *   ids     that have a row
 *   bags    of all features; 0: each id is one
 *   bytes   of an element of the pooled values; rows have 4 */
PERSIA_API int persia_cuda_rows_travel(uint64_t values, uint64_t rows,
                                       uint64_t ids, uint64_t bags,
                                       uint32_t bytes);

#ifdef __cplusplus
}
#endif
#endif
