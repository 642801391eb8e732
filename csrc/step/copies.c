/* copies.c: see copies.h. */
#include "step/copies.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCKS_MAX = 8, PIECE = 1 << 20, ARRAYS = 5, ALIGNED = 64 };

/* Data begin ALIGNED bytes after the header. */
typedef struct copy_block {
    struct copy_block *next;
    copies *home;
    size_t room; /* bytes of data */
} copy_block;

void copies_init(copies *c)
{
    pthread_mutex_init(&c->lock, NULL);
    c->free = NULL;
    c->free_n = 0;
}

void copies_free(copies *c)
{
    while (c->free) {
        copy_block *b = c->free;
        c->free = b->next;
        free(b);
    }
    pthread_mutex_destroy(&c->lock);
}

/* A free block of at least this room and at most twice of it, or a new one;
 * NULL: no memory. */
static copy_block *block_take(copies *c, size_t room)
{
    pthread_mutex_lock(&c->lock);
    copy_block **at = &c->free, *b = NULL;
    while (*at && ((*at)->room < room || (*at)->room > 2 * room))
        at = &(*at)->next;
    if (*at) {
        b = *at;
        *at = b->next;
        c->free_n--;
    }
    pthread_mutex_unlock(&c->lock);
    if (b)
        return b;
    b = aligned_alloc(ALIGNED, ALIGNED + room);
    if (b)
        *b = (copy_block){.home = c, .room = room};
    return b;
}

/* Gives a block back; the oldest free one goes where there are many. */
static void block_give(void *owner)
{
    copy_block *b = owner, *last = NULL;
    copies *c = b->home;
    pthread_mutex_lock(&c->lock);
    b->next = c->free;
    c->free = b;
    if (++c->free_n > BLOCKS_MAX) {
        copy_block **at = &c->free;
        while ((*at)->next)
            at = &(*at)->next;
        last = *at;
        *at = NULL;
        c->free_n--;
    }
    pthread_mutex_unlock(&c->lock);
    free(last);
}

typedef struct copying {
    struct {
        const char *from;
        char *to;
        size_t bytes;
    } arrays[ARRAYS];
} copying;

/* Piece `index` of the arrays, counted through all of them. */
static int copy_piece(void *ctx, size_t index)
{
    const copying *c = ctx;
    for (int i = 0; i < ARRAYS; i++) {
        size_t pieces = (c->arrays[i].bytes + PIECE - 1) / PIECE;
        if (index >= pieces) {
            index -= pieces;
            continue;
        }
        size_t at = index * PIECE, left = c->arrays[i].bytes - at;
        memcpy(c->arrays[i].to + at, c->arrays[i].from + at,
               left < PIECE ? left : PIECE);
        break;
    }
    return PERSIA_OK;
}

int copies_make(copies *c, sched *s, step_grad *g, size_t floats,
                size_t offsets)
{
    worker_grad *w = &g->grad;
    size_t n = w->batch.n;
    const struct {
        const void *from;
        size_t bytes;
    } arrays[ARRAYS] = {
        {w->grad, floats * sizeof *w->grad},
        {w->rows, n * sizeof *w->rows},
        {w->batch.values, n * sizeof *w->batch.values},
        {w->batch.offsets, offsets * sizeof *w->batch.offsets},
        {w->batch.weights, n * sizeof *w->batch.weights},
    };
    copying job = {0};
    size_t room = 0, pieces = 0;
    for (int i = 0; i < ARRAYS; i++) {
        job.arrays[i].from = arrays[i].from;
        job.arrays[i].bytes = arrays[i].from ? arrays[i].bytes : 0;
        room += (job.arrays[i].bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
        pieces += (job.arrays[i].bytes + PIECE - 1) / PIECE;
    }
    copy_block *b = block_take(c, room);
    if (!b)
        return err_set(PERSIA_ENOMEM, "no memory to keep %zu bytes of "
                       "gradients", room);
    char *to = (char *)b + ALIGNED;
    for (int i = 0; i < ARRAYS; i++) {
        job.arrays[i].to = to;
        to += (job.arrays[i].bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
    }
    sched_for(s, pieces, copy_piece, &job); /* its pieces cannot fail */

    w->grad = (const float *)(const void *)job.arrays[0].to;
    w->rows = (const uint32_t *)(const void *)job.arrays[1].to;
    w->batch.values = (const int64_t *)(const void *)job.arrays[2].to;
    if (w->batch.offsets)
        w->batch.offsets = (const int64_t *)(const void *)job.arrays[3].to;
    if (w->batch.weights)
        w->batch.weights = (const float *)(const void *)job.arrays[4].to;
    g->owner = b;
    g->release = block_give;
    return PERSIA_OK;
}
