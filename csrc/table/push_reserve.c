/* push_reserve.c: how many rows a push will make. */
#include "table/push.h"

#include <stdlib.h>
#include <string.h>

size_t push_job_ids(const push_job *job)
{
    size_t n = 0;

    for (size_t k = 0; k < job->parts_n; k++)
        n += job->parts[k].n;
    return n;
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
        uint8_t admitted;
        if (row_index_find(&s->index, stripe_rows(t, s), c->hash[k], id) !=
            SLOT_NONE)
            continue;
        const uint64_t hash = id_hash(id);
        t->admit.policy->admit(&t->admit, job->draw, 1, &hash, &admitted);
        if (admitted)
            missing[n++] = id;
    }
    pthread_rwlock_unlock(&s->lock);
    return n;
}

int push_count_new(reserve_claim *claim, void *ctx)
{
    const push_plan *plan = ctx;
    const size_t j = claim->job;
    const uint32_t mask = claim->t->stripes - 1;
    uint64_t *missing = malloc((claim->most + 1) * sizeof *missing);
    size_t n = 0;

    if (!missing)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: %zu bytes to count new "
                              "rows",
                              (claim->most + 1) * sizeof *missing);
    missing[0] = 0;
    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++)
        for (uint32_t i = 0; i < claim->t->stripes; i++)
            n += chunk_missing(plan, &plan->chunks[c], i, missing + n);
    qsort(missing, n, sizeof *missing, by_value);
    claim->an_id = missing[0];
    memset(claim->slots, 0, claim->t->stripes * sizeof *claim->slots);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || missing[i] != missing[i - 1]) {
            claim->slots[hash_stripe(id_hash(missing[i]), mask)]++;
            claim->rows++;
        }
    free(missing);
    return PERSIA_OK;
}
