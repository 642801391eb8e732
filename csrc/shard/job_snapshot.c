/* job_snapshot.c: the rows of one moment, written while others change them.
 *
 * The moment is between two updates: rows, clocks, ledgers, the counts of
 * updates and steps.
 */
#include "shard/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int snapshot_make(shard *s, const wire_snapshot *m, uint64_t deadline,
                  job **out)
{
    return job_make(s, JOB_SNAPSHOT, m->root, m->folder, m->proof, deadline,
                    out);
}

void snapshot_free(job *n)
{
    for (uint32_t i = 0; n->cuts && i < n->tables_n; i++)
        if (n->cuts[i])
            persia_table_cut_end(n->cuts[i]);
    free(n->cuts);
    free(n->configs);
    free(n->moment.ledgers);
}

/* Between two updates. */
static int job_snapshot_take_cut(void *ctx)
{
    job *n = ctx;
    shard *s = n->s;
    int rc = check_whole(s);
    if (rc)
        return rc;
    table **tables = malloc((n->tables_n + (size_t)1) * sizeof(table *));
    if (!tables)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a snapshot");
    for (uint32_t i = 0; i < n->tables_n; i++)
        tables[i] = persia_tables_table(s->p, i);
    if (n->tables_n)
        rc = persia_table_cut_begin(tables, n->tables_n, n->cuts);
    free(tables);
    if (!rc)
        rc = ledger_copy(s->ledger, &n->moment.ledgers,
                         &n->moment.ledgers_room, &n->moment.ledgers_n);
    n->moment.restore = atomic_load(&s->restored);
    n->moment.updates = persia_tables_updates(s->p);
    n->moment.t = persia_tables_t(s->p);
    n->moment.step = wait_step(s);
    n->moment.log = s->log ? persia_log_end(s->log) : 0;
    return rc;
}

int snapshot_cut(job *n)
{
    const uint32_t tables = persia_tables_tables(n->s->p);
    n->pushes = calloc(tables + (size_t)1, sizeof *n->pushes);
    n->configs = calloc(tables + (size_t)1, sizeof *n->configs);
    n->cuts = calloc(tables + (size_t)1, sizeof(table_cut *));
    if (!n->pushes || !n->configs || !n->cuts)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a snapshot");
    n->tables_n = tables;
    int rc = ledger_room(n->s->ledger, &n->moment.ledgers,
                         &n->moment.ledgers_room);
    if (!rc)
        rc = persia_tables_between(n->s->p, job_snapshot_take_cut, n);
    for (uint32_t i = 0; i < tables && !rc; i++) {
        n->pushes[i] = persia_table_cut_clock(n->cuts[i]);
        n->configs[i] =
            *persia_table_get_config(persia_tables_table(n->s->p, i));
    }
    return rc;
}

static int add_files(job *n, uint32_t no, const ckpt_files *files)
{
    wire_file *grown = realloc(n->files, (n->files_n + files->n + 1) *
                                             sizeof *grown);
    if (!grown)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a list of files");
    n->files = grown;
    for (size_t i = 0; i < files->n; i++) {
        wire_file *f = &grown[n->files_n++];
        *f = (wire_file){.no = no,
                         .rows = files->files[i].rows,
                         .bytes = files->files[i].bytes,
                         .crc = files->files[i].crc};
        memcpy(f->name, files->files[i].name, CKPT_NAME);
        atomic_fetch_add(&n->rows, f->rows);
    }
    return PERSIA_OK;
}

static int job_snapshot_write_table(job *n, sched *threads, uint32_t no)
{
    ckpt_files files = {0};
    char stem[64];
    snprintf(stem, sizeof stem, "shard-%u-of-%u-table-%u", n->s->no,
             n->s->shards, no);
    int rc = n->io->write(n->io, threads, n->cuts[no], &n->configs[no], stem,
                          &files);
    persia_table_cut_stop(
        n->cuts[no]); /* from now on pushes copy nothing aside */
    if (!rc)
        rc = add_files(n, no, &files);
    persia_ckpt_files_free(&files);
    return rc;
}

int snapshot_write(job *n, sched *threads)
{
    int rc = PERSIA_OK;
    if (!strcmp(n->root, CKPT_LOG_ROOT))
        logged_refusals(n->s);
    for (uint32_t i = 0; i < n->tables_n && !rc; i++) {
        rc = persia_interrupt_poll();
        if (!rc)
            rc = job_snapshot_write_table(n, threads, i);
    }
    return rc ? rc : n->io->sync(n->io);
}
