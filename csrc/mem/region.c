#include "mem/gather.h"

#include <stdlib.h>

enum { CHUNK_ALIGN = 64, CHUNK_BYTES = 4096 };

/* The newest chunk, the only one that has room, is first in the list. */
struct wire_chunk {
    struct wire_chunk *next;
    size_t size, used; /* of data, bytes */
    _Alignas(CHUNK_ALIGN) unsigned char data[];
};

static size_t round_up(size_t bytes, size_t align)
{
    return (bytes + align - 1) & ~(align - 1);
}

void *chunks_take(struct wire_chunk **chunks, size_t bytes, size_t align)
{
    struct wire_chunk *c = *chunks;
    size_t at = c ? round_up(c->used, align) : 0;

    if (!c || at > c->size || bytes > c->size - at) {
        size_t size = bytes < CHUNK_BYTES - sizeof *c
                          ? CHUNK_BYTES - sizeof *c
                          : bytes;
        if (size > SIZE_MAX / 2 ||
            !(c = aligned_alloc(CHUNK_ALIGN,
                                round_up(sizeof *c + size, CHUNK_ALIGN)))) {
            (void)persia_err_set(PERSIA_ENOMEM,
                                 "no memory for %zu bytes of a "
                                 "message",
                                 bytes);
            return NULL;
        }
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
