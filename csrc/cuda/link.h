/* link.h: the way of batches between host and device: pinned buffers, and a
 * stream for each direction, so that copies run beside what the device
 * computes, and none to the device waits for one that a backward holds up.
 *
 * A link is made once for a device and lives as long as the process.  A
 * buffer is taken, sent or fetched, and given back; it is used again when its
 * copy is done.
 */
#ifndef PERSIA_CUDA_LINK_H
#define PERSIA_CUDA_LINK_H

#include "mem/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum cuda_dtype { CUDA_F32, CUDA_F16, CUDA_BF16, CUDA_DTYPES };
static inline size_t cuda_dtype_bytes(uint32_t dtype)
{
    return dtype == CUDA_F32 ? 4 : 2;
}

typedef struct device_link device_link;
struct cuda_device;

typedef struct link_buffer {
    struct link_buffer *next;
    device_link *link;
    void *data;  /* pinned */
    size_t room; /* bytes */
    void *event; /* its last copy */
    void *ready; /* what the copy from the device waits for */
    size_t n;    /* floats that were fetched */
    uint32_t dtype; /* theirs, until they are widened */
    uint64_t number; /* see persia_link_keep(); 0: it is not kept */
    uint64_t given;  /* takes of the link before it was given back */
} link_buffer;

/* The link of a device, made by the first call.  in, out: the streams of its
 * copies to and from the device; NULL: one is made. */
enum { LINKS_MAX = 64 };
PERSIA_API int persia_link_open(const char *device, int index, void *in,
                                void *out, uint32_t *number);
/* NULL with the error set: there is none of this number. */
PERSIA_API device_link *persia_link_get(uint32_t number);
PERSIA_API const struct cuda_device *persia_link_device(const device_link *l);

/* A buffer of at least so many bytes. */
PERSIA_API int persia_link_take(device_link *l, size_t bytes,
                                link_buffer **out);
/* NULL: nothing.  Its copy may still run.  The oldest is unpinned if so many
 * takes did not use it: to pin and unpin may wait for the device, so a loop
 * keeps as many of each size as it has in use at once. */
enum { LINK_IDLE_TAKES = 1 << 14 };
PERSIA_API void persia_link_give(link_buffer *b);

/* Sends the first n floats of the buffer in this dtype to memory of the device
 * that no other stream uses; narrows them in place. */
PERSIA_API int persia_link_send(link_buffer *b, void *to, size_t n,
                                uint32_t dtype);
/* This thread waits for the buffer's copy. */
PERSIA_API int persia_link_wait(link_buffer *b);
/* Later works of the stream wait for it. */
PERSIA_API int persia_link_await(link_buffer *b, void *stream);
/* Fetches n floats of this dtype, whole, when the works that the stream has
 * now are done.  from: valid until persia_link_floats() has returned. */
PERSIA_API int persia_link_fetch(link_buffer *b, const void *from, size_t n,
                                 uint32_t dtype, void *stream);
/* This thread waits until they are here, then widens them in place.  One
 * thread at a time. */
PERSIA_API int persia_link_floats(link_buffer *b, const float **out);

/* Keeps a buffer, by a number for those who may hold no pointer. */
PERSIA_API uint64_t persia_link_keep(link_buffer *b);
/* Hands it over, once; NULL: there is none of this number. */
PERSIA_API link_buffer *persia_link_kept(device_link *l, uint64_t number);

/* Buffers and bytes that a link has pinned. */
PERSIA_API void persia_link_pinned(device_link *l, size_t *buffers,
                                   size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
