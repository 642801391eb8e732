/* lookup.c: rows out, where the caller wants them, or packed.
 *
 * A pull is cut into pieces of one table; a piece is checked, read and, if
 * the reply is narrower than fp32, narrowed while it is in the cache.
 */
#include "shard/private.h"

enum {
    PIECE = 2048, /* ids: a table holds its locks for as many */
    PIECE_FLOATS = 32768 /* of a piece that is narrowed, on the stack */
};

_Static_assert((int)PIECE <= (int)TABLE_PULL_CHUNK,
               "a piece is read by the thread that has it");

typedef struct pull_plan {
    const shard *s;
    const wire_pull *m;
    wire_values *out;    /* [m->tables_n], where each table's rows go */
    table **tables;      /* [m->tables_n] */
    size_t *first_piece; /* [m->tables_n + 1] */
} pull_plan;

static size_t lookup_piece_ids(const pull_plan *p, size_t i)
{
    size_t dim = p->out[i].dim;
    if (p->m->dtype == WIRE_FP32 || PIECE * dim <= PIECE_FLOATS)
        return PIECE;
    return PIECE_FLOATS / dim;
}

static int pull_piece(void *ctx, size_t piece)
{
    const pull_plan *p = ctx;
    const size_t t = sched_range(p->first_piece, p->m->tables_n, piece);
    float wide[PIECE_FLOATS];

    const wire_pull_table *want = &p->m->tables[t];
    const wire_values *out = &p->out[t];
    const size_t first = (piece - p->first_piece[t]) * lookup_piece_ids(p, t);
    const size_t left = want->n - first, most = lookup_piece_ids(p, t);
    const uint32_t dtype = p->m->dtype;
    char *values = (char *)(uintptr_t)out->values +
                   first * out->dim * wire_dtype_bytes(dtype);
    uint32_t *rows = (uint32_t *)(uintptr_t)out->rows;
    float *scales = (float *)(uintptr_t)out->scales;
    pull_job job = {.t = p->tables[t],
                    .n = left < most ? left : most,
                    .ids = want->ids + first,
                    .out = dtype == WIRE_FP32 ? (float *)(void *)values
                                              : wide,
                    .stride = out->dim,
                    .rows = rows ? rows + first : NULL};

    int rc = check_ids_here(p->s, job.t, job.ids, job.n);
    if (!rc) /* on this thread alone: it is one chunk */
        rc = persia_table_pull(persia_tables_sched(p->s->p), &job, 1);
    if (!rc && dtype != WIRE_FP32)
        persia_wire_narrow(dtype, job.n, out->dim, wide, out->dim, values,
                           scales ? scales + first : NULL);
    return rc;
}

static size_t lookup_round_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* How the rows lie in one buffer: *bytes in all. */
static int lookup_lay_out(pull_plan *p, uint64_t *bytes)
{
    const uint32_t dtype = p->m->dtype;
    *bytes = 0;
    p->first_piece[0] = 0;
    for (size_t i = 0; i < p->m->tables_n; i++) {
        const wire_pull_table *want = &p->m->tables[i];
        int rc = find_table(p->s, want->no, &p->tables[i]);
        if (rc)
            return rc;
        const uint32_t dim = persia_table_get_config(p->tables[i])->dim;
        p->out[i] = (wire_values){.no = want->no, .dim = dim, .n = want->n};
        *bytes += lookup_round_up(want->n * dim * wire_dtype_bytes(dtype)) +
                  lookup_round_up(dtype == WIRE_FP16 ? want->n * 4 : 0) +
                  lookup_round_up(p->m->want_rows ? want->n * 4 : 0);
        p->first_piece[i + 1] =
            p->first_piece[i] +
            (want->n + lookup_piece_ids(p, i) - 1) / lookup_piece_ids(p, i);
    }
    return persia_shard_check_bytes(p->s, "the rows would be an answer",
                                    *bytes);
}

static void lookup_place(pull_plan *p, char *at)
{
    const uint32_t dtype = p->m->dtype;
    for (size_t i = 0; i < p->m->tables_n; i++) {
        wire_values *v = &p->out[i];
        if (!v->n)
            continue;
        v->values = at;
        at += lookup_round_up(v->n * v->dim * wire_dtype_bytes(dtype));
        if (dtype == WIRE_FP16) {
            v->scales = (float *)(void *)at;
            at += lookup_round_up(v->n * 4);
        }
        if (p->m->want_rows) {
            v->rows = (uint32_t *)(void *)at;
            at += lookup_round_up(v->n * 4);
        }
    }
}

static int pull_packed(shard *s, const wire_pull *m, answer *a)
{
    uint64_t bytes;
    pull_plan p = {.s = s, .m = m};
    const size_t n = m->tables_n;
    p.out = persia_wire_memory_take(&a->memory, n * sizeof *p.out);
    p.tables = persia_wire_memory_take(&a->memory, n * sizeof *p.tables);
    p.first_piece = persia_wire_memory_take(&a->memory,
                                            (n + 1) * sizeof(size_t));
    if (!p.out || !p.tables || !p.first_piece)
        return PERSIA_ENOMEM;
    uint64_t ids = 0;
    for (size_t i = 0; i < n; i++)
        ids += m->tables[i].n;
    int rc = lookup_lay_out(&p, &bytes);
    if (rc || (rc = persia_mem_pool_take(s->blocks, (size_t)bytes, &a->bulk)))
        return rc;
    lookup_place(&p, a->bulk);
    rc = persia_sched_for_rows(persia_tables_sched(s->p), p.first_piece[n],
                               ids, pull_piece, &p);
    a->m.pull = (wire_pull_reply){.dtype = m->dtype, .tables = p.out,
                                  .tables_n = n};
    return rc;
}

static int pull_in_place(shard *s, const wire_pull *m, pull_job *jobs)
{
    for (size_t i = 0; i < m->tables_n; i++) {
        pull_job *job = &jobs[i];
        int rc = find_table(s, m->tables[i].no, &job->t);
        if (!rc)
            rc = check_ids(s, job->t, job->ids, job->n);
        if (rc)
            return rc;
    }
    return persia_tables_pull(s->p, jobs, m->tables_n);
}

void pull_answer(shard *s, const shard_call *c, const shard_pull *a)
{
    wire_pull_reply empty = {.dtype = WIRE_FP32};
    answer *packed = NULL;
    int rc = check_rows(s, &a->m->caller);
    if (!rc && a->jobs)
        rc = pull_in_place(s, a->m, a->jobs);
    else if (!rc && !(rc = answer_make(&packed)))
        rc = pull_packed(s, a->m, packed);
    if (!rc) /* and not of tables that were emptied or replaced meanwhile */
        rc = check_rows(s, &a->m->caller);
    if (!rc)
        atomic_fetch_add(&s->pulls, 1);
    if (a->jobs)
        call_reply(c, rc, &empty);
    else
        answer_give(c, rc, packed);
}

void pull_run(shard *s, const shard_call *c, const shard_pull *a)
{
    int waits = 0, rc = PERSIA_OK;
    if (a->m->after && !(rc = check_rows(s, &a->m->caller)))
        rc = wait_pull(s, c, a, &waits);
    if (rc)
        call_reply(c, rc, NULL);
    else if (!waits)
        pull_answer(s, c, a);
}
