/* job_restore.c: other rows in the place of those that are there. */
#include "shard/private.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void restore_free(job *n)
{
    persia_wire_memory_free(&n->memory);
    for (uint32_t i = 0; n->staged && i < n->tables_n; i++)
        persia_table_destroy(n->staged[i]);
    free(n->staged);
    ledger_destroy(n->ledger);
    free(n->sources);
    free(n->first);
    free(n->here);
}

/* ---- what was asked for ------------------------------------------------- */

/* Sorts the files by table, keeping their order within each. */
static int job_restore_take_files(job *n, const wire_restore *m)
{
    for (size_t i = 0; i < m->files_n; i++) {
        const wire_file *f = &m->files[i];
        int rc = persia_ckpt_name_check(f->name);
        if (rc)
            return rc;
        if (f->no >= n->tables_n || n->pushes[f->no] == UINT64_MAX)
            return persia_err_set(PERSIA_EARG,
                                  "file %s is of table number %u, "
                                  "which is not to be restored",
                                  f->name, f->no);
        n->first[f->no + 1]++;
    }
    for (uint32_t i = 0; i < n->tables_n; i++)
        n->first[i + 1] += n->first[i];
    for (size_t i = 0; i < m->files_n; i++) {
        const wire_file *f = &m->files[i];
        ckpt_file *to = &n->sources[n->first[f->no]++];
        memcpy(to->name, f->name, CKPT_NAME);
        to->rows = f->rows;
        to->bytes = f->bytes;
        to->crc = f->crc;
    }
    for (uint32_t i = n->tables_n; i > 0; i--) /* each is one too far */
        n->first[i] = n->first[i - 1];
    n->first[0] = 0;
    return PERSIA_OK;
}

int restore_make(shard *s, const wire_restore *m, uint64_t deadline,
                 job **out)
{
    int rc = job_make(s, JOB_RESTORE, m->root, m->folder, m->proof, deadline,
                      out);
    job *n = *out;
    if (rc)
        return rc;
    n->lineage = m->lineage;
    n->moment.restore = m->restore;
    n->moment.updates = m->updates;
    n->moment.step = m->step;
    n->moment.t = m->t;
    if (!m->lineage)
        return persia_err_set(PERSIA_EARG,
                              "the rows of a restore need a lineage");
    if (m->pushes_n > persia_tables_tables(s->p))
        return persia_err_set(PERSIA_EARG,
                              "%zu tables are to be restored, only %u "
                              "were declared",
                              m->pushes_n, persia_tables_tables(s->p));
    n->tables_n = (uint32_t)m->pushes_n;
    n->pushes = calloc(m->pushes_n + 1, sizeof *n->pushes);
    n->staged = calloc(m->pushes_n + 1, sizeof(table *));
    n->here = calloc(m->pushes_n + 1, sizeof *n->here);
    n->first = calloc(m->pushes_n + 2, sizeof *n->first);
    n->sources = calloc(m->files_n + 1, sizeof *n->sources);
    if (!n->pushes || !n->staged || !n->here || !n->first || !n->sources)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a restore");
    if (m->pushes_n)
        memcpy(n->pushes, m->pushes, m->pushes_n * sizeof *n->pushes);
    persia_wire_memory_init(&n->memory);
    rc = logged_restore_keep(s, m, &n->memory, &n->request);
    if (!rc)
        rc = job_restore_take_files(n, m);
    if (!rc)
        rc = ledger_create(LEDGER_STREAMS, &n->ledger);
    return rc ? rc : ledger_fill(n->ledger, m->ledgers, m->ledgers_n);
}

/* ---- reading ------------------------------------------------------------ */

static int verify_table(job *n, sched *threads, uint32_t no,
                        const table_config *config)
{
    const size_t group = persia_sched_threads(threads);
    int rc = PERSIA_OK;
    for (size_t at = n->first[no]; at < n->first[no + 1] && !rc;
         at += group) {
        const size_t left = n->first[no + 1] - at;
        rc = persia_interrupt_poll();
        if (!rc)
            rc = n->io->verify(n->io, threads, config, n->sources + at,
                               left < group ? left : group, &n->here[no]);
    }
    return rc;
}

static int read_table(job *n, sched *threads, uint32_t no,
                      const table_config *config)
{
    table_stats stats;
    int rc = persia_table_create(config, &n->staged[no]);
    if (rc)
        return rc;
    /* Beyond the clocks of all rows: whichever is older is evicted first,
     * should the capacity be smaller than it was. */
    persia_table_set_clock(n->staged[no], n->pushes[no] + 1);
    rc = n->io->read(n->io, threads, n->staged[no],
                     n->sources + n->first[no],
                     n->first[no + 1] - n->first[no], n->s->no,
                     n->s->shards);
    persia_table_get_stats(n->staged[no], &stats);
    atomic_fetch_add(&n->rows, stats.rows);
    return rc;
}

/* Table i, if it is to be restored. */
static table *table_of(const job *n, uint32_t i)
{
    return n->pushes[i] == UINT64_MAX ? NULL : persia_tables_table(n->s->p, i);
}

typedef int (*table_step)(job *n, sched *threads, uint32_t no,
                          const table_config *config);

static int each_table(job *n, sched *threads, table_step step)
{
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < n->tables_n && !rc; i++) {
        const table *t = table_of(n, i);
        if (t)
            rc = step(n, threads, i, persia_table_get_config(t));
    }
    return rc;
}

static void job_restore_drop_staged(job *n)
{
    for (uint32_t i = 0; i < n->tables_n; i++) {
        persia_table_destroy(n->staged[i]);
        n->staged[i] = NULL;
    }
}

/* Whether the limit has room for the rows once those in use are gone. */
static int job_restore_fits_in_place(const job *n)
{
    const mem_limit *limit = persia_tables_limit(n->s->p);
    uint64_t given = 0, needed = 0;
    for (uint32_t i = 0; i < n->tables_n; i++) {
        const table *t = table_of(n, i);
        given += t ? persia_table_clear_bytes(t) : 0;
        needed += t ? persia_table_restore_bytes(t, n->here[i]) : 0;
    }
    return atomic_load(&limit->used) + needed <= limit->maximum + given;
}

/* After an error: whether the restore can do without memory beside. */
static int job_restore_stage_later(job *n, int rc)
{
    err_kept why;
    persia_err_keep(&why, rc);
    job_restore_drop_staged(n);
    atomic_store(&n->rows, 0);
    if (rc == PERSIA_ELIMIT && job_restore_fits_in_place(n)) {
        n->in_place = 1;
        return PERSIA_OK;
    }
    return persia_err_again(&why);
}

int restore_stage(job *n, sched *threads)
{
    int rc = each_table(n, threads, verify_table);
    if (rc)
        return rc;
    rc = each_table(n, threads, read_table);
    return rc ? job_restore_stage_later(n, rc) : PERSIA_OK;
}

/* ---- in place ----------------------------------------------------------- */

enum { NEVER = ROWS_STATES };

static const unsigned char next[ROWS_STATES][ROWS_EVENTS] = {
    [ROWS_WHOLE] = {ROWS_REPLACING, ROWS_WHOLE, NEVER, NEVER},
    [ROWS_REPLACING] = {NEVER, ROWS_WHOLE, ROWS_INCOMPLETE, ROWS_INCOMPLETE},
    [ROWS_INCOMPLETE] = {ROWS_REPLACING, ROWS_WHOLE, ROWS_INCOMPLETE, NEVER},
};

/* The only place that changes the state of a shard's rows. */
static void job_restore_rows_event(shard *s, enum rows_event event)
{
    const enum rows_state to = next[atomic_load(&s->rows)][event];
    assert((int)to != NEVER);
    atomic_store(&s->rows, (int)to);
}

void restore_stop(shard *s)
{
    job_restore_rows_event(s, ROWS_STOP);
}

/* Between two updates. */
static int job_restore_refuse_rows(void *ctx)
{
    const job *n = ctx;
    shard *s = n->s;
    for (uint32_t i = 0; i < n->tables_n; i++)
        if (table_of(n, i))
            s->is_emptied[i] = 1;
    job_restore_rows_event(s, ROWS_EMPTY);
    return PERSIA_OK;
}

int restore_refuse_rows(job *n)
{
    return persia_tables_between(n->s->p, job_restore_refuse_rows, n);
}

/* Of the tables that have been exchanged.  Between two updates. */
static void job_restore_rows_are_there(const job *n)
{
    shard *s = n->s;
    int lacks = 0;
    for (uint32_t i = 0; i < n->tables_n; i++)
        if (n->staged[i])
            s->is_emptied[i] = 0;
    for (uint32_t i = 0; i < TABLES_MAX; i++)
        lacks |= s->is_emptied[i];
    job_restore_rows_event(s, lacks ? ROWS_LACK : ROWS_FILL);
}

int restore_replace(job *n, sched *threads)
{
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < n->tables_n && !rc; i++) {
        table *t = table_of(n, i);
        if (t)
            rc = persia_table_clear(t);
    }
    return rc ? rc : each_table(n, threads, read_table);
}

/* ---- putting the rows in their place ------------------------------------ */

static int job_restore_exchange_tables(job *n, uint32_t tables_n)
{
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < tables_n && !rc; i++) {
        if (!n->staged[i])
            continue;
        rc = persia_table_exchange(persia_tables_table(n->s->p, i),
                                   n->staged[i]);
        if (rc && i) /* back again */
            (void)job_restore_exchange_tables(n, i);
    }
    return rc;
}

/* Between two updates. */
static int job_restore_exchange(void *ctx)
{
    job *n = ctx;
    shard *s = n->s;
    int rc = check_stays(s);
    if (!rc)
        rc = job_restore_exchange_tables(n, n->tables_n);
    if (rc)
        return rc;
    if ((rc = logged_restore(s, &n->request))) {
        err_kept why;
        persia_err_keep(&why, rc);
        (void)job_restore_exchange_tables(n, n->tables_n); /* back again */
        return persia_err_again(&why);
    }
    job_restore_rows_are_there(n);
    ledger_exchange(s->ledger, n->ledger, &s->lineage, n->lineage);
    atomic_store(&s->restored, n->moment.restore);
    for (uint32_t i = 0; i < n->tables_n; i++)
        if (n->staged[i])
            persia_table_set_clock(persia_tables_table(s->p, i), n->pushes[i]);
    persia_tables_set_updates(s->p, n->moment.updates);
    persia_tables_set_t(s->p, n->moment.t);
    wait_set_step(s, n->moment.step);
    return PERSIA_OK;
}

int restore_commit(job *n)
{
    return persia_tables_between(n->s->p, job_restore_exchange, n);
}
