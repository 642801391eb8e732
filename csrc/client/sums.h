/* sums.h: the gradients of a batch, summed per distinct id by its index
 * (private to the client). */
#ifndef PERSIA_CLIENT_SUMS_H
#define PERSIA_CLIENT_SUMS_H

#include "ids/ids.h"
#include "table/table.h"
#include "simd/simd.h"

/* Rows that a loop over rows anywhere in memory fetches before it needs them:
 * 32 lines, as another core may have written them. */
INLINE_HOT uint32_t rows_ahead(uint32_t dim)
{
    return dim < 512 ? 512 / dim : 1;
}

typedef struct sums {
    sched *s;
    uint32_t shards;
    const uint32_t *tables;             /* [jobs_n], each once */
    const table_config *const *configs; /* [jobs_n] */
    const push_job *jobs;
    uint32_t jobs_n;
    /* Made by sums_index(): */
    batch_index *index;
    int own;                /* it was made here: hints are to be filled in */
    const uint32_t *unit;   /* [jobs_n] of the index */
    const push_part **part_of; /* [segments] NULL: of no job */
    size_t *at;             /* [jobs_n + 1] floats before the job's sums */
    float *values;          /* [at[jobs_n]], of the caller */
} sums;

/* Takes the index of the forward that all parts are of, or makes one; the
 * caller gives its reference back.  lists: memory of the sums' arrays. */
int sums_index(sums *m, index_pool *pool, mem_buffer *lists);
/* Distinct ids of a job: [from, to) of the index. */
static inline size_t sums_from(const sums *m, uint32_t job)
{
    return index_from(m->index, m->unit[job], 0);
}
static inline size_t sums_to(const sums *m, uint32_t job)
{
    return index_to(m->index, m->unit[job], m->shards - 1);
}
/* Cell `item` of jobs * cells: its sums, in the order of the parts and of
 * their ids, and its hints.  PERSIA_ENONFINITE if the table wants that. */
int sums_cell(const sums *m, size_t item);

#endif
