#include "mem/gather.h"

#include <stdlib.h>

/* Under a sanitizer each piece of a message has a block of its own, so that
 * a read beyond it is seen. */
#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
enum { PIECES_APART = 1 };
#else
enum { PIECES_APART = 0 };
#endif

enum { CHUNK_ALIGN = 64, CHUNK_BYTES = 4096 };

/* The newest chunk, the only one that has room, is first in the list. */
struct wire_chunk {
    struct wire_chunk *next;
    size_t size, used; /* of data, bytes */
    _Alignas(CHUNK_ALIGN) unsigned char data[];
};

static size_t region_round_up(size_t bytes, size_t align)
{
    return (bytes + align - 1) & ~(align - 1);
}

static struct wire_chunk *chunk_make(size_t size)
{
    struct wire_chunk *c = NULL;

    if (size < SIZE_MAX / 2)
        c = aligned_alloc(CHUNK_ALIGN,
                          region_round_up(sizeof *c + size, CHUNK_ALIGN));
    if (!c)
        (void)persia_err_set(PERSIA_ENOMEM,
                             "no memory for %zu bytes of a message", size);
    return c;
}

void *chunks_take(struct wire_chunk **chunks, size_t bytes, size_t align)
{
    const int apart = PIECES_APART && align == CHUNK_ALIGN;
    struct wire_chunk *c = *chunks;
    size_t at = c ? region_round_up(c->used, align) : 0;

    if (!c || apart || at > c->size || bytes > c->size - at) {
        const size_t least = apart ? 0 : CHUNK_BYTES - sizeof *c;
        const size_t size = bytes < least ? least : bytes;
        c = chunk_make(size);
        if (!c)
            return NULL;
        *c = (struct wire_chunk){ .next = *chunks, .size = size };
        *chunks = c;
        at = 0;
    }
    c->used = at + bytes;
    return c->data + at;
}

void chunks_free(struct wire_chunk **chunks)
{
    while (*chunks) {
        struct wire_chunk *c = *chunks;
        *chunks = c->next;
        free(c);
    }
}

void chunks_join(struct wire_chunk **chunks, struct wire_chunk **more)
{
    struct wire_chunk **end = chunks;
    while (*end)
        end = &(*end)->next;
    *end = *more;
    *more = NULL;
}

void persia_wire_memory_init(wire_memory *m)
{
    *m = (wire_memory){ 0 };
}

void persia_wire_memory_free(wire_memory *m)
{
    chunks_free(&m->chunks);
}

void *persia_wire_memory_take(wire_memory *m, size_t bytes)
{
    return chunks_take(&m->chunks, bytes, CHUNK_ALIGN);
}
