/* copies.c: see copies.h. */
#include "loop/copies.h"

#include <assert.h>
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
        c->free_n--;
        free(b);
    }
    assert(!c->free_n);
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
        assert(c->free_n && b->home == c);
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
void copies_give(void *owner)
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

/* Copies all arrays into one block; to[i] is where the i-th begins. */
static int copy_arrays(copies *c, sched *s, copying *job, copy_block **out)
{
    size_t room = 0, pieces = 0;
    for (int i = 0; i < ARRAYS; i++) {
        if (!job->arrays[i].from)
            job->arrays[i].bytes = 0;
        room += (job->arrays[i].bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
        pieces += (job->arrays[i].bytes + PIECE - 1) / PIECE;
    }
    copy_block *b = block_take(c, room);
    *out = b;
    if (!b)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory to keep %zu bytes of "
                              "gradients",
                              room);
    char *to = (char *)b + ALIGNED;
    for (int i = 0; i < ARRAYS; i++) {
        job->arrays[i].to = to;
        to += (job->arrays[i].bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
    }
    persia_sched_for(s, pieces, copy_piece, job); /* its pieces cannot fail */
    return PERSIA_OK;
}

/* The places of the arrays in a job. */
enum { VALUES, OFFSETS, WEIGHTS, GRAD, ROWS };

static void add_batch(copying *job, const id_batch *b, size_t offsets)
{
    job->arrays[VALUES].from = (const char *)b->values;
    job->arrays[VALUES].bytes = b->n * sizeof *b->values;
    job->arrays[OFFSETS].from = (const char *)b->offsets;
    job->arrays[OFFSETS].bytes = offsets * sizeof *b->offsets;
    job->arrays[WEIGHTS].from = (const char *)b->weights;
    job->arrays[WEIGHTS].bytes = b->n * sizeof *b->weights;
}

static void use_batch(const copying *job, id_batch *b)
{
    b->values = (const int64_t *)(const void *)job->arrays[VALUES].to;
    if (b->offsets)
        b->offsets = (const int64_t *)(const void *)job->arrays[OFFSETS].to;
    if (b->weights)
        b->weights = (const float *)(const void *)job->arrays[WEIGHTS].to;
}

int copies_make(copies *c, sched *s, loop_grad *g, size_t floats,
                size_t offsets)
{
    batcher_grad *w = &g->grad;
    copying job = {0};
    add_batch(&job, &w->batch, offsets);
    job.arrays[GRAD].from = (const char *)w->grad;
    job.arrays[GRAD].bytes = floats * sizeof *w->grad;
    job.arrays[ROWS].from = (const char *)w->rows;
    job.arrays[ROWS].bytes = w->batch.n * sizeof *w->rows;
    copy_block *b;
    int rc = copy_arrays(c, s, &job, &b);
    if (rc)
        return rc;
    use_batch(&job, &w->batch);
    w->grad = (const float *)(const void *)job.arrays[GRAD].to;
    if (w->rows)
        w->rows = (const uint32_t *)(const void *)job.arrays[ROWS].to;
    g->owner = b;
    g->release = copies_give;
    return PERSIA_OK;
}

int copies_ids(copies *c, sched *s, loop_grad *g, size_t offsets)
{
    copying job = {0};
    add_batch(&job, &g->grad.batch, offsets);
    copy_block *b;
    int rc = copy_arrays(c, s, &job, &b);
    if (rc)
        return rc;
    use_batch(&job, &g->grad.batch);
    g->ids = b;
    return PERSIA_OK;
}
