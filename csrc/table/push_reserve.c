/* push_reserve.c: how many rows a push will make. */
#include "table/push.h"

#include <stdlib.h>

size_t push_job_ids(const push_job *job)
{
    size_t n = 0;

    for (size_t k = 0; k < job->parts_n; k++)
        n += job->parts[k].n;
    return n;
}

/* Appends the places of the ids of stripe `i` in a chunk that have no row and
 * would get one. */
static size_t chunk_missing(const push_plan *plan, const push_chunk *c,
                            uint32_t i, reserve_claim *claim,
                            uint64_t *missing)
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
        if (!admitted)
            continue;
        missing[n++] = c->hash[k];
        claim->an_id = id;
    }
    pthread_rwlock_unlock(&s->lock);
    return n;
}

int push_count_new(reserve_claim *claim, void *ctx)
{
    const push_plan *plan = ctx;
    const size_t j = claim->job;
    uint64_t *missing = malloc((claim->most + 1) * sizeof *missing);
    size_t n = 0;

    if (!missing)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: %zu bytes to count new "
                              "rows",
                              (claim->most + 1) * sizeof *missing);
    for (size_t c = plan->first_chunk[j]; c < plan->first_chunk[j + 1]; c++)
        for (uint32_t i = 0; i < claim->t->stripes; i++)
            n += chunk_missing(plan, &plan->chunks[c], i, claim, missing + n);
    reserve_count(claim, missing, n);
    free(missing);
    return PERSIA_OK;
}
