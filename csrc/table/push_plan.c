#include "table/push.h"

#include "simd/simd.h"

#include <string.h>

static void claims_sort(reserve_claim *claims, size_t n)
{
    for (size_t i = 1; i < n; i++)
        for (size_t j = i; j && claims[j].t < claims[j - 1].t; j--) {
            reserve_claim swap = claims[j];
            claims[j] = claims[j - 1];
            claims[j - 1] = swap;
        }
}

/* How much a plan holds. */
typedef struct plan_size {
    size_t chunks, ids, starts, items;
} plan_size;

static int plan_measure(const push_job *jobs, size_t jobs_n, plan_size *out)
{
    *out = (plan_size){0};
    for (size_t j = 0; j < jobs_n; j++) {
        int rc = persia_table_check_optim(&jobs[j].t->config, jobs[j].optim);
        if (rc)
            return rc;
        out->items += jobs[j].t->stripes;
        for (size_t k = 0; k < jobs[j].parts_n; k++) {
            size_t n = (jobs[j].parts[k].n + IDS_CHUNK - 1) / IDS_CHUNK;
            out->chunks += n;
            out->ids += n * IDS_CHUNK;
            out->starts += n * (jobs[j].t->stripes + 1);
        }
    }
    return PERSIA_OK;
}

/* Where the chunks of a plan split their ids: the next free places. */
typedef struct plan_space {
    uint64_t *hash;
    uint16_t *order, *start;
    reserve_claim *claims; /* [jobs_n] */
} plan_space;

static int plan_carve(push_plan *plan, push_job *jobs, size_t jobs_n,
                      const plan_size *size, plan_space *space)
{
    void *scratch;
    int rc = scratch_need(SCRATCH_SPLIT,
                          size->ids * (sizeof(uint64_t) + sizeof(uint16_t)) +
                              size->starts * sizeof(uint16_t) +
                              size->chunks * sizeof(push_chunk) +
                              (jobs_n + 1) *
                                  (2 * sizeof(size_t) + sizeof(reserve_claim) +
                                   sizeof(*plan->opens) + sizeof(uint64_t) +
                                   sizeof(optim_plan)) +
                              size->items * sizeof(size_t) + 64 * 10,
                          &scratch);
    if (rc)
        return jobs_n ? reserve_no_memory(jobs[0].t) : rc;
    char *p = scratch;
    plan->jobs = jobs;
    plan->jobs_n = jobs_n;
    plan->chunks = mem_carve(&p, size->chunks * sizeof(push_chunk));
    plan->chunks_n = size->chunks;
    plan->ids_n = 0;
    plan->first_chunk = mem_carve(&p, (jobs_n + 1) * sizeof(size_t));
    plan->first_stripe = mem_carve(&p, (jobs_n + 1) * sizeof(size_t));
    space->claims = mem_carve(&p, jobs_n * sizeof(reserve_claim));
    plan->opens = mem_carve(&p, jobs_n * sizeof *plan->opens);
    plan->clock = mem_carve(&p, jobs_n * sizeof(uint64_t));
    plan->optim = mem_carve(&p, jobs_n * sizeof(optim_plan));
    plan->slots = mem_carve(&p, size->items * sizeof(size_t));
    memset(plan->slots, 0, size->items * sizeof(size_t));
    space->hash = mem_carve(&p, size->ids * sizeof(uint64_t));
    space->order = mem_carve(&p, size->ids * sizeof(uint16_t));
    space->start = mem_carve(&p, size->starts * sizeof(uint16_t));
    return PERSIA_OK;
}

/* The chunks of a job, the first of them at *at. */
static void plan_cut(push_plan *plan, size_t j, plan_space *space, size_t *at)
{
    const push_job *job = &plan->jobs[j];
    for (size_t k = 0; k < job->parts_n; k++) {
        const push_part *part = &job->parts[k];
        for (size_t i = 0; i < part->n; i += IDS_CHUNK) {
            size_t n = part->n - i < IDS_CHUNK ? part->n - i : IDS_CHUNK;
            plan->chunks[(*at)++] =
                (push_chunk){(uint32_t)j, (uint32_t)k,  i,           n,
                             space->hash, space->order, space->start};
            space->hash += IDS_CHUNK;
            space->order += IDS_CHUNK;
            space->start += job->t->stripes + 1;
        }
    }
}

int push_plan_make(push_plan *plan, push_job *jobs, size_t jobs_n)
{
    plan_size size;
    plan_space space = {0};
    size_t at = 0, stripes = 0;
    int rc = plan_measure(jobs, jobs_n, &size);
    if (!rc)
        rc = plan_carve(plan, jobs, jobs_n, &size, &space);
    if (rc)
        return rc;
    reserve_claim *claims = space.claims;
    for (size_t j = 0; j < jobs_n; j++) {
        plan->first_chunk[j] = at;
        plan->first_stripe[j] = stripes;
        plan->ids_n += push_job_ids(&jobs[j]);
        claims[j] = (reserve_claim){.t = jobs[j].t, .job = j,
                                 .most = push_job_ids(&jobs[j]),
                                 .slots = plan->slots + stripes,
                                 .opens = &plan->opens[j]};
        stripes += jobs[j].t->stripes;
        plan_cut(plan, j, &space, &at);
    }
    plan->first_chunk[jobs_n] = at;
    plan->first_stripe[jobs_n] = stripes;
    claims_sort(claims, jobs_n);
    for (size_t j = 1; j < jobs_n; j++)
        if (claims[j].t == claims[j - 1].t)
            return persia_err_set(PERSIA_EARG,
                                  "table %s is twice in one push",
                                  claims[j].t->config.name);
    return reservation_make(&plan->reservation, claims, jobs_n);
}

static int push_plan_refuse_nonfinite(const table *t, uint64_t id,
                                      size_t sample)
{
    return persia_err_set(
        PERSIA_ENONFINITE,
        "table %s: the gradient of id %lld (row %zu of the "
        "gradients) is NaN or Inf; nothing was applied. Find its "
        "source, or let such rows be skipped and counted: "
        "nonfinite=\"skip\"",
        t->config.name, (long long)id, sample);
}

/* The rows of gradients that a chunk names lie in [*low, *high]. */
HOT static void chunk_rows(const push_part *part, size_t first, size_t n,
                           size_t *low, size_t *high)
{
    *low = first;
    *high = first + n - 1;
    if (!part->bag)
        return;
    uint32_t least = UINT32_MAX, most = 0;
    for (size_t i = first; i < first + n; i++) {
        least = part->bag[i] < least ? part->bag[i] : least;
        most = part->bag[i] > most ? part->bag[i] : most;
    }
    *low = least;
    *high = most;
}

/* The gradients of the chunk's ids.  First all rows between the least and
 * the largest one named, in one sweep; only if that finds something (maybe
 * in a row that no id names) each id's own. */
static int chunk_check_finite(const table *t, const push_part *part,
                              size_t first, size_t n, size_t low,
                              size_t high)
{
    const uint32_t dim = t->config.dim;

    if (high - low < 2 * n &&
        persia_rows_finite(part->grad + low * part->stride, high - low + 1,
                           dim, part->stride) &&
        (!part->scale || persia_floats_finite(part->scale + first, n)))
        return PERSIA_OK;
    for (size_t i = first; i < first + n; i++) {
        size_t row = part->bag ? part->bag[i] : i;
        if (!persia_floats_finite(part->grad + row * part->stride, dim) ||
            (part->scale && !persia_floats_finite(part->scale + i, 1)))
            return push_plan_refuse_nonfinite(t, part->ids[i], row);
    }
    return PERSIA_OK;
}

int push_plan_chunk(void *ctx, size_t i)
{
    push_plan *plan = ctx;
    push_chunk *c = &plan->chunks[i];
    const push_job *job = &plan->jobs[c->job];
    const push_part *part = &job->parts[c->part];
    size_t low, high;

    chunk_rows(part, c->first, c->n, &low, &high);
    if (high >= part->bags)
        return persia_err_set(PERSIA_EARG,
                              "table %s: an id has the gradient of row "
                              "%zu of %zu",
                              job->t->config.name, high, part->bags);
    persia_ids_split_chunk(part->ids + c->first, c->n,
                           job->t->config.hash_key, job->t->stripes, c->hash,
                           c->order, c->start);
    if (job->t->config.nonfinite == NONFINITE_RAISE && !part->finite)
        return chunk_check_finite(job->t, part, c->first, c->n, low, high);
    return PERSIA_OK;
}

int push_plan_end(push_plan *plan, size_t threads)
{
    const size_t items = plan->first_stripe[plan->jobs_n];
    reservation *r = &plan->reservation;
    size_t bytes = 0;
    void *scratch;

    for (size_t k = 0; k < r->n; k++) {
        const reserve_claim *claim = &r->claims[k];
        const uint32_t stripes = claim->t->stripes;
        size_t most = 0, last = plan->first_chunk[claim->job + 1];
        for (size_t c = plan->first_chunk[claim->job]; c < last; c++)
            for (uint32_t i = 0; i < stripes; i++)
                claim->slots[i] += (size_t)(plan->chunks[c].start[i + 1] -
                                            plan->chunks[c].start[i]);
        for (uint32_t i = 0; i < stripes; i++)
            most = claim->slots[i] > most ? claim->slots[i] : most;
        most = push_group_bytes(most, claim->t->config.dim);
        bytes = most > bytes ? most : bytes;
    }
    plan->groups_n = threads < items ? threads : items;
    plan->group_bytes = (bytes + 63) / 64 * 64;
    bytes = plan->groups_n * plan->group_bytes;
    if (scratch_need(SCRATCH_GROUPS, bytes + plan->groups_n, &scratch))
        return reserve_no_memory(r->claims[0].t);
    plan->groups = scratch;
    plan->taken = (void *)(plan->groups + bytes);
    memset(plan->taken, 0, plan->groups_n);
    return PERSIA_OK;
}
