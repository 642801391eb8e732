/* push_reserve.c: near a limit, a push that cannot be applied as a whole is
 * refused before the first row changes. */
#include "table/push.h"

#include <stdlib.h>

/* Bytes of index a row takes when its page has just grown, generously. */
enum { INDEX_BYTES = 32 };

int push_admits(const table *t, uint64_t hash, uint64_t batch)
{
    uint64_t key = ((uint64_t)t->init_key[1] << 32) | t->init_key[0];
    uint64_t bits;

    if (t->config.admission >= 1)
        return 1;
    bits = id_hash(hash ^ id_hash(key ^ id_hash(batch)));
    return (double)(bits >> 11) * 0x1p-53 < (double)t->config.admission;
}

static size_t job_ids(const push_job *job)
{
    size_t n = 0;

    for (size_t k = 0; k < job->parts_n; k++)
        n += job->parts[k].n;
    return n;
}

static int near_capacity(const push_job *job, size_t rows)
{
    const table_config *c = &job->t->config;

    return c->capacity && c->full == FULL_RAISE &&
           atomic_load(&job->t->rows) + rows > c->capacity;
}

static int near_memory(const push_job *job, size_t rows)
{
    const mem_limit *limit = job->t->config.limit;
    /* an arena grows by steps: leave room for one a stripe */
    uint64_t slack = (uint64_t)job->t->stripes << 21;

    return limit && limit->maximum &&
           atomic_load(&limit->used) +
                   rows * (job->t->stride + INDEX_BYTES) + slack >
               limit->maximum;
}

int push_needs_reserve(const push_job *job)
{
    size_t rows = job_ids(job);

    return near_capacity(job, rows) || near_memory(job, rows);
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* Appends the ids of stripe `i` in a chunk that have no row and would get
 * one. */
static size_t chunk_missing(const push_plan *plan, const push_chunk *c,
                            uint32_t i, uint64_t *missing)
{
    const push_job *job = &plan->jobs[c->job];
    const uint64_t *ids = job->parts[c->part].ids + c->first;
    table *t = job->t;
    stripe *s = &t->stripe[i];
    size_t n = 0;

    pthread_rwlock_rdlock(&s->lock);
    for (uint32_t k = c->start[i]; k < c->start[i + 1]; k++) {
        uint64_t id = ids[c->order[k]];
        if (row_index_find(&s->index, stripe_rows(t, s), c->hash[k], id) ==
                SLOT_NONE &&
            push_admits(t, c->hash[k], job->batch))
            missing[n++] = id;
    }
    pthread_rwlock_unlock(&s->lock);
    return n;
}

int push_reserve(const push_plan *plan, size_t j)
{
    const push_job *job = &plan->jobs[j];
    const table_config *config = &job->t->config;
    uint64_t *missing = malloc((job_ids(job) + 1) * sizeof *missing);
    size_t n = 0, distinct = 0;
    int rc = PERSIA_OK;

    if (!missing)
        return err_set(PERSIA_ENOMEM, "table %s: no memory to count new rows",
                       config->name);
    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++)
        for (uint32_t i = 0; i < job->t->stripes; i++)
            n += chunk_missing(plan, &plan->chunks[c], i, missing + n);
    qsort(missing, n, sizeof *missing, by_value);
    for (size_t i = 0; i < n; i++)
        distinct += i == 0 || missing[i] != missing[i - 1];
    if (near_capacity(job, distinct))
        rc = err_set(PERSIA_ECAPACITY,
                     "table %s holds %llu rows of at most %llu and the batch "
                     "has %zu new ids (id %llu is one); nothing was applied. "
                     "Raise capacity, or let old rows go: eviction=\"lru\"",
                     config->name,
                     (unsigned long long)atomic_load(&job->t->rows),
                     (unsigned long long)config->capacity, distinct,
                     (unsigned long long)missing[0]);
    else if (distinct && near_memory(job, distinct))
        rc = err_set(PERSIA_ELIMIT,
                     "table %s: %zu new rows would pass the memory limit of "
                     "%llu bytes; nothing was applied. Raise memory_limit, "
                     "or give the table a capacity with eviction=\"lru\"",
                     config->name, distinct,
                     (unsigned long long)config->limit->maximum);
    free(missing);
    return rc;
}
