/* buffers.h: memory of replies, used again (private).
 *
 * A reply of megabytes in fresh memory costs a page fault for every 4 KiB;
 * so buffers that are given back are kept, up to a limit.  Any thread may take
 * and give.
 */
#ifndef PERSIA_SHARD_BUFFERS_H
#define PERSIA_SHARD_BUFFERS_H

#include "base/base.h"

typedef struct buffers buffers;
typedef struct buffer {
    void *data;  /* aligned to 64 bytes, not cleared */
    size_t size; /* bytes, at least those asked for */
    buffers *owner;
    struct buffer *next;
} buffer;

/* Keeps at most `keep` bytes of unused buffers. */
int buffers_create(uint64_t keep, buffers **out);
/* Buffers in use are freed when they are given back. */
void buffers_destroy(buffers *b);
int buffers_take(buffers *b, size_t bytes, buffer **out);
/* NULL is fine. */
void buffer_give(buffer *one);
/* Bytes of buffers, in use and kept. */
uint64_t buffers_bytes(buffers *b);

#endif
