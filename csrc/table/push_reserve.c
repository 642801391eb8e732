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

size_t push_job_ids(const push_job *job)
{
    size_t n = 0;

    for (size_t k = 0; k < job->parts_n; k++)
        n += job->parts[k].n;
    return n;
}

static int near_capacity(const table *t, uint64_t rows)
{
    const table_config *c = &t->config;

    return c->capacity && c->full == FULL_RAISE &&
           atomic_load(&t->rows) + rows > c->capacity;
}

/* Rows, and what their index may take on top: pages that grow by 27 % are
 * there twice for a moment, one a stripe, of at most half a MiB; arenas end
 * in whole pages. */
static int near_memory(const table *t, uint64_t rows)
{
    const mem_limit *limit = t->config.limit;
    const uint64_t capacity = t->config.capacity, now = atomic_load(&t->rows);

    if (!limit || !limit->maximum)
        return 0;
    if (capacity && t->config.full == FULL_EVICT_LRU) {
        if (now >= capacity)
            return 0; /* new rows take the place of old ones */
        rows = rows < capacity - now ? rows : capacity - now;
    }

    const uint64_t all = now + rows;
    const uint64_t moment = (uint64_t)t->stripes << 19;
    const uint64_t slack = t->stripes * (uint64_t)(4096 + 512) + 4 * all +
                           (16 * all < moment ? 16 * all : moment);

    return atomic_load(&limit->used) + rows * (t->stride + INDEX_BYTES) +
               slack > limit->maximum;
}

int room_limited(const table *t)
{
    return t->config.capacity ||
           (t->config.limit && t->config.limit->maximum);
}

int room_announce(table *t, size_t ids)
{
    uint64_t pending = atomic_fetch_add(&t->pending, ids) + ids;

    return near_capacity(t, pending) || near_memory(t, pending);
}

void room_retract(table *t, size_t ids)
{
    atomic_fetch_sub(&t->pending, ids);
}

int room_reserve(const table *t, size_t n, uint64_t an_id)
{
    const table_config *c = &t->config;

    if (n && near_capacity(t, n))
        return err_set(PERSIA_ECAPACITY,
                       "table %s holds %llu rows of at most %llu and %zu new "
                       "ids come (id %llu is one); nothing was applied. Raise "
                       "capacity, or let old rows go: eviction=\"lru\"",
                       c->name, (unsigned long long)atomic_load(&t->rows),
                       (unsigned long long)c->capacity, n,
                       (unsigned long long)an_id);
    if (n && near_memory(t, n))
        return err_set(PERSIA_ELIMIT,
                       "table %s: %zu new rows would pass the memory limit "
                       "of %llu bytes; nothing was applied. Raise "
                       "memory_limit, or give the table a capacity with "
                       "eviction=\"lru\"", c->name, n,
                       (unsigned long long)c->limit->maximum);
    return PERSIA_OK;
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
    uint64_t *missing = malloc((push_job_ids(job) + 1) * sizeof *missing);
    size_t n = 0, distinct = 0;
    int rc;

    if (!missing)
        return err_set(PERSIA_ENOMEM, "table %s: no memory to count new rows",
                       job->t->config.name);
    missing[0] = 0;
    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++)
        for (uint32_t i = 0; i < job->t->stripes; i++)
            n += chunk_missing(plan, &plan->chunks[c], i, missing + n);
    qsort(missing, n, sizeof *missing, by_value);
    for (size_t i = 0; i < n; i++)
        distinct += i == 0 || missing[i] != missing[i - 1];
    rc = room_reserve(job->t, distinct, missing[0]);
    free(missing);
    return rc;
}
