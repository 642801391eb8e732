/* sums.c: see sums.h. */
#include "client/sums.h"

#include "simd/simd.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"

/* ---- the index ---- */

/* The part of a job after its i-th one that has ids; parts_n: none. */
static size_t sums_next_part(const push_job *job, size_t i)
{
    while (i < job->parts_n && job->parts[i].n == 0)
        i++;
    return i;
}

/* Whether unit u of the index is made of exactly the job's parts. */
static int sums_fits_unit(const batch_index *x, uint32_t u,
                          const push_job *job)
{
    size_t k = sums_next_part(job, 0);
    for (size_t i = 0; i < x->segments_n; i++) {
        const index_segment *s = &x->segments[i];
        if (s->unit != u)
            continue;
        const push_part *part = &job->parts[k];
        if (k == job->parts_n || part->index != x || part->job != s->job ||
            part->n != s->n)
            return 0;
        k = sums_next_part(job, k + 1);
    }
    return k == job->parts_n;
}

static int sums_fits(const sums *m, const batch_index *x, uint32_t *unit)
{
    if (x->shards != m->shards)
        return 0;
    for (uint32_t j = 0; j < m->jobs_n; j++) {
        uint32_t u = 0;
        while (u < x->units && x->tables[u] != m->tables[j])
            u++;
        if (u == x->units || !sums_fits_unit(x, u, &m->jobs[j]))
            return 0;
        unit[j] = u;
    }
    return 1;
}

/* The index of the first part; NULL: it has none. */
static batch_index *first_index(const sums *m)
{
    for (uint32_t j = 0; j < m->jobs_n; j++) {
        size_t k = sums_next_part(&m->jobs[j], 0);
        if (k < m->jobs[j].parts_n)
            return m->jobs[j].parts[k].index;
    }
    return NULL;
}

static int make_index(sums *m, index_pool *pool, index_segment *segments,
                      uint32_t *unit)
{
    size_t at = 0;
    int hints = 0;
    for (uint32_t j = 0; j < m->jobs_n; j++) {
        const push_job *job = &m->jobs[j];
        unit[j] = j;
        for (size_t i = sums_next_part(job, 0); i < job->parts_n;
             i = sums_next_part(job, i + 1)) {
            segments[at++] = (index_segment){j, 0, job->parts[i].n,
                                             job->parts[i].ids};
            hints |= job->parts[i].rows != NULL;
        }
    }
    const index_batch b = {segments, at, m->tables, m->jobs_n};
    m->own = 1;
    m->index = persia_index_pool_new(pool);
    if (!m->index)
        return PERSIA_ENOMEM;
    int rc = persia_batch_index_make(m->index, m->s, m->shards, &b);
    return rc || !hints ? rc : persia_batch_index_hint(m->index);
}

/* The segments' parts, and where the sums of each job begin. */
static void sums_list_parts(sums *m)
{
    const batch_index *x = m->index;
    size_t floats = 0;
    for (size_t i = 0; i < x->segments_n; i++)
        m->part_of[i] = NULL;
    for (uint32_t j = 0; j < m->jobs_n; j++) {
        const push_job *job = &m->jobs[j];
        size_t k = sums_next_part(job, 0);
        for (size_t i = 0; i < x->segments_n; i++) {
            if (x->segments[i].unit != m->unit[j])
                continue;
            m->part_of[i] = &job->parts[k];
            k = sums_next_part(job, k + 1);
        }
        m->at[j] = floats;
        floats += (sums_to(m, j) - sums_from(m, j)) * m->configs[j]->dim;
    }
    m->at[m->jobs_n] = floats;
}

int sums_index(sums *m, index_pool *pool, mem_buffer *lists)
{
    batch_index *known = first_index(m);
    size_t parts = known ? known->segments_n : 0, n = 0;
    for (uint32_t j = 0; j < m->jobs_n; j++)
        n += m->jobs[j].parts_n;
    parts = n > parts ? n : parts;
    int rc = persia_mem_buffer_need(
        lists, parts * (sizeof(index_segment) + sizeof *m->part_of) +
                   m->jobs_n * sizeof(uint32_t) +
                   (m->jobs_n + 1) * sizeof *m->at + (size_t)64 * 4);
    if (rc)
        return rc;
    char *to = lists->data;
    index_segment *segments = mem_carve(&to, parts * sizeof *segments);
    uint32_t *unit = mem_carve(&to, m->jobs_n * sizeof *unit);
    m->part_of = mem_carve(&to, parts * sizeof *m->part_of);
    m->at = mem_carve(&to, (m->jobs_n + 1) * sizeof *m->at);
    m->unit = unit;
    m->own = 0;
    if (known && sums_fits(m, known, unit))
        m->index = persia_batch_index_get(known);
    else
        rc = make_index(m, pool, segments, unit);
    if (!rc)
        sums_list_parts(m);
    return rc;
}

/* ---- sums ---- */

INLINE_HOT void sums_grad_fetch(const push_part *part, size_t i, uint32_t dim)
{
    const float *grad = push_part_grad(part, i);
    for (uint32_t j = 0; j < dim; j += 16)
        __builtin_prefetch(grad + j);
}

/* The ids [from, to) of one chunk in its order, all of one cell, to the sums
 * of the cell.  Returns the first whose bag does not exist, or `to`. */
INLINE_HOT uint32_t sum_run(const push_part *part, const index_chunk *c,
                            uint32_t from, uint32_t to, float *out,
                            uint32_t dim)
{
    const uint32_t ahead = rows_ahead(dim);

    for (uint32_t k = from; k < to && k < from + ahead; k++)
        sums_grad_fetch(part, c->first + c->order[k], dim);
    for (uint32_t k = from; k < to; k++) {
        size_t i = c->first + c->order[k], row = part->bag ? part->bag[i] : i;
        uint32_t place = c->place[k] & ~INDEX_FIRST;
        if (k + ahead < to)
            sums_grad_fetch(part, c->first + c->order[k + ahead], dim);
        if (row >= part->bags)
            return k;
        push_part_sum(part, i, out + (size_t)place * dim,
                      (c->place[k] & INDEX_FIRST) != 0, dim);
    }
    return to;
}

#define SUM_RUN(name, width)                                                  \
    HOT static uint32_t name(const push_part *part, const index_chunk *c,     \
                             uint32_t from, uint32_t to, float *out,          \
                             uint32_t dim)                                    \
    {                                                                         \
        (void)dim;                                                            \
        return sum_run(part, c, from, to, out, width);                        \
    }
SUM_RUN(sum_run_16, 16)
SUM_RUN(sum_run_64, 64)
SUM_RUN(sum_run_any, dim)

/* A sum of the cell is NaN or Inf: whose? */
static int sums_refuse_nonfinite(const sums *m, uint32_t job, uint32_t cell,
                                 const float *out)
{
    const batch_index *x = m->index;
    const table_config *t = m->configs[job];
    const uint32_t unit = m->unit[job];
    const size_t *base = x->base + (size_t)unit * x->cells + cell;
    for (size_t i = x->first_chunk[unit]; i < x->first_chunk[unit + 1]; i++) {
        const index_chunk *c = &x->chunks[i];
        const push_part *part = m->part_of[c->segment];
        for (uint32_t k = c->start[cell]; k < c->start[cell + 1]; k++) {
            size_t at = c->first + c->order[k];
            size_t row = part->bag ? part->bag[at] : at;
            uint64_t id = x->ids[base[0] + (c->place[k] & ~INDEX_FIRST)];
            if (!persia_floats_finite(push_part_grad(part, at), t->dim) ||
                (part->scale && !isfinite(part->scale[at])))
                return persia_err_set(
                    PERSIA_ENONFINITE,
                    "table %s: the gradient of id %lld (row %zu of the "
                    "gradients) is NaN or Inf; nothing was applied. Find its "
                    "source, or let such rows be skipped and counted: "
                    "nonfinite=\"skip\"",
                    t->name, (long long)id, row);
        }
    }
    for (size_t i = 0; i < base[1] - base[0]; i++)
        if (!persia_floats_finite(out + i * t->dim, t->dim))
            return persia_err_set(
                PERSIA_ENONFINITE,
                "table %s: the gradients of id %lld have the sum "
                "Inf; nothing was applied. Lower the scale of the "
                "loss, or let such rows be skipped and counted: "
                "nonfinite=\"skip\"",
                t->name, (long long)x->ids[base[0] + i]);
    return PERSIA_OK;
}

/* The hints of the ids that occur here first. */
static void sums_fill_hints(const batch_index *x, size_t first,
                            const push_part *part, const index_chunk *c,
                            uint32_t from, uint32_t to)
{
    for (uint32_t k = from; k < to && part->rows; k++)
        if (c->place[k] & INDEX_FIRST)
            x->hints[first + (c->place[k] & ~INDEX_FIRST)] =
                part->rows[c->first + c->order[k]];
}

int sums_cell(const sums *m, size_t item)
{
    const batch_index *x = m->index;
    uint32_t job = (uint32_t)(item / x->cells);
    uint32_t cell = (uint32_t)(item % x->cells);
    const uint32_t unit = m->unit[job];
    const table_config *t = m->configs[job];
    size_t first = x->base[(size_t)unit * x->cells + cell];
    size_t n = x->base[(size_t)unit * x->cells + cell + 1] - first;
    float *out = m->values + m->at[job] +
                 (first - sums_from(m, job)) * t->dim;

    for (size_t i = x->first_chunk[unit];
         n && i < x->first_chunk[unit + 1]; i++) {
        const index_chunk *c = &x->chunks[i];
        const push_part *part = m->part_of[c->segment];
        uint32_t from = c->start[cell], to = c->start[cell + 1];
        uint32_t end = (t->dim == 16   ? sum_run_16
                        : t->dim == 64 ? sum_run_64
                                       : sum_run_any)(part, c, from, to, out,
                                                      t->dim);
        if (end < to)
            return persia_err_set(
                PERSIA_EARG,
                "table %s: an id has the gradient of "
                "row %u of %zu",
                t->name, part->bag ? part->bag[c->first + c->order[end]] : 0,
                part->bags);
        if (m->own && x->hints)
            sums_fill_hints(x, first, part, c, from, to);
    }
    if (t->nonfinite == NONFINITE_RAISE &&
        !persia_floats_finite(out, n * t->dim))
        return sums_refuse_nonfinite(m, job, cell, out);
    return PERSIA_OK;
}

/* ---- sums for the caller ---- */

static int sum_item(void *m, size_t item)
{
    return sums_cell(m, item);
}

/* The sums of one job but those with NaN or Inf. */
static int copy_sums(const sums *m, uint32_t j, client_sum *out, int *finite)
{
    const uint64_t *ids = m->index->ids + sums_from(m, j);
    const float *from = m->values + m->at[j];
    const uint32_t dim = m->configs[j]->dim;
    const size_t n = sums_to(m, j) - sums_from(m, j);
    *out = (client_sum){.table = m->tables[j], .dim = dim};
    out->ids = malloc((n + 1) * sizeof *out->ids);
    out->grads = malloc((n * dim + 1) * sizeof *out->grads);
    if (!out->ids || !out->grads)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for the gradients of %zu "
                              "ids",
                              n);
    for (size_t i = 0; i < n; i++, from += dim) {
        if (!persia_floats_finite(from, dim)) {
            *finite = 0;
            continue;
        }
        out->ids[out->n] = ids[i];
        memcpy(out->grads + out->n++ * dim, from, dim * sizeof *from);
    }
    return PERSIA_OK;
}

void persia_client_sums_free(client_sum *all, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        free(all[i].ids);
        free(all[i].grads);
    }
}

int persia_client_sums(ps_client *c, const uint32_t *tables,
                       const push_job *jobs, size_t jobs_n, client_sum *out,
                       int *finite)
{
    table_config *copies = malloc((jobs_n + 1) * sizeof *copies);
    const table_config **configs = malloc((jobs_n + 1) * sizeof *configs);
    mem_buffer lists = {0}, values = {0};
    sums m = {.s = persia_client_sched(c),
              .shards = persia_client_shards(c),
              .tables = tables,
              .configs = configs,
              .jobs = jobs,
              .jobs_n = (uint32_t)jobs_n};
    int rc = copies && configs ? PERSIA_OK
                               : persia_err_set(PERSIA_ENOMEM,
                                                "no memory for %zu "
                                                "tables",
                                                jobs_n);
    memset(out, 0, jobs_n * sizeof *out);
    for (size_t j = 0; j < jobs_n && !rc; j++) {
        copies[j] = *persia_client_table(c, tables[j]);
        copies[j].nonfinite = NONFINITE_SKIP; /* the caller looks for those */
        configs[j] = &copies[j];
    }
    if (!rc)
        rc = sums_index(&m, persia_client_indexes(c), &lists);
    if (!rc)
        rc = persia_mem_buffer_need(&values, m.at[jobs_n] * sizeof(float));
    m.values = values.data;
    if (!rc)
        rc = persia_sched_for_rows(m.s, jobs_n * m.index->cells,
                                   m.index->ids_n, sum_item, &m);
    for (uint32_t j = 0; j < jobs_n && !rc; j++)
        rc = copy_sums(&m, j, &out[j], finite);
    persia_batch_index_put(m.index);
    persia_mem_buffer_free(&values);
    persia_mem_buffer_free(&lists);
    free(copies);
    free(configs);
    return rc;
}
