/* copies.c: see copies.h. */
#include "loop/copies.h"

#include <string.h>

enum { PIECE = 1 << 20, ARRAYS = 5, ALIGNED = 64 };

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
static int copy_arrays(mem_pool *p, sched *s, copying *job, void **out)
{
    size_t room = 0, pieces = 0;
    for (int i = 0; i < ARRAYS; i++) {
        if (!job->arrays[i].from)
            job->arrays[i].bytes = 0;
        room += (job->arrays[i].bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
        pieces += (job->arrays[i].bytes + PIECE - 1) / PIECE;
    }
    int rc = persia_mem_pool_take(p, room, out);
    if (rc)
        return rc;
    char *to = *out;
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

int copies_make(mem_pool *p, sched *s, loop_grad *g, size_t floats,
                size_t offsets)
{
    batcher_grad *w = &g->grad;
    copying job = {0};
    add_batch(&job, &w->batch, offsets);
    job.arrays[GRAD].from = (const char *)w->grad;
    job.arrays[GRAD].bytes = floats * sizeof *w->grad;
    job.arrays[ROWS].from = (const char *)w->rows;
    job.arrays[ROWS].bytes = w->batch.n * sizeof *w->rows;
    void *block;
    int rc = copy_arrays(p, s, &job, &block);
    if (rc)
        return rc;
    use_batch(&job, &w->batch);
    w->grad = (const float *)(const void *)job.arrays[GRAD].to;
    if (w->rows)
        w->rows = (const uint32_t *)(const void *)job.arrays[ROWS].to;
    g->owner = block;
    g->release = persia_mem_pool_give;
    return PERSIA_OK;
}

int copies_ids(mem_pool *p, sched *s, loop_grad *g, size_t offsets)
{
    copying job = {0};
    add_batch(&job, &g->grad.batch, offsets);
    int rc = copy_arrays(p, s, &job, &g->ids);
    if (!rc)
        use_batch(&job, &g->grad.batch);
    return rc;
}
