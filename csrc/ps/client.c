/* client.c: the tables of a store, where they are: the local body. */
#include "ps/client.h"

#include <stdlib.h>

struct ps_client {
    ps *p;
    _Atomic(uint64_t) pulls, pushes; /* calls */
};

int client_local(ps *p, ps_client **out)
{
    ps_client *c = calloc(1, sizeof *c);
    *out = c;
    if (!c)
        return err_set(PERSIA_ENOMEM, "no memory for a store");
    c->p = p;
    return PERSIA_OK;
}

void client_destroy(ps_client *c)
{
    free(c);
}

int client_is_remote(const ps_client *c)
{
    (void)c;
    return 0;
}

ps *client_ps(const ps_client *c)
{
    return c->p;
}

sched *client_sched(const ps_client *c)
{
    return ps_sched(c->p);
}

uint32_t client_shards(const ps_client *c)
{
    (void)c;
    return 1;
}

int client_declare(ps_client *c, const table_config *config, uint32_t *no,
                   int *created)
{
    return ps_declare(c->p, config, no, created);
}

uint32_t client_tables(const ps_client *c)
{
    return ps_tables(c->p);
}

const table_config *client_table(const ps_client *c, uint32_t no)
{
    const table *t = ps_table(c->p, no);
    return t ? table_get_config(t) : NULL;
}

static int find_table(const ps_client *c, uint32_t no, table **out)
{
    *out = ps_table(c->p, no);
    return *out ? PERSIA_OK
                : err_set(PERSIA_EARG, "the store has no table number %u",
                          no);
}

int client_pull(ps_client *c, const uint32_t *tables, pull_job *jobs,
                size_t jobs_n)
{
    for (size_t i = 0; i < jobs_n; i++) {
        int rc = find_table(c, tables[i], &jobs[i].t);
        if (rc)
            return rc;
    }
    c->pulls++;
    return ps_pull(c->p, jobs, jobs_n);
}

int client_push(ps_client *c, const client_update *update,
                const uint32_t *tables, push_job *jobs, size_t jobs_n)
{
    (void)update; /* the shard counts */
    for (size_t i = 0; i < jobs_n; i++) {
        int rc = find_table(c, tables[i], &jobs[i].t);
        if (rc)
            return rc;
    }
    c->pushes++;
    return ps_push(c->p, jobs, jobs_n);
}

uint64_t client_updates(const ps_client *c)
{
    return ps_updates(c->p);
}

uint64_t client_last_number(const ps_client *c)
{
    (void)c;
    return 0;
}

int client_join(ps_client *c, int joins, uint64_t step, uint64_t *applied)
{
    (void)joins;
    (void)step;
    *applied = ps_updates(c->p);
    return PERSIA_OK;
}

uint32_t client_state_floats(const ps_client *c, uint32_t no)
{
    const table *t = ps_table(c->p, no);
    return t ? table_state_floats(t) : 0;
}

int client_get(ps_client *c, uint32_t no, size_t n, const uint64_t *ids,
               float *vectors, float *state, uint8_t *found)
{
    table *t;
    int rc = find_table(c, no, &t);
    return rc ? rc : table_get(t, n, ids, vectors, state, found);
}

int client_set(ps_client *c, uint32_t no, size_t n, const uint64_t *ids,
               const float *vectors, const float *state)
{
    table *t;
    int rc = find_table(c, no, &t);
    return rc ? rc : table_set(t, n, ids, vectors, state);
}

int client_clear(ps_client *c, uint32_t no)
{
    table *t;
    int rc = find_table(c, no, &t);
    return rc ? rc : table_clear(t);
}

int client_stats(ps_client *c, uint32_t no, table_stats *out)
{
    table *t;
    int rc = find_table(c, no, &t);
    if (!rc)
        table_get_stats(t, out);
    return rc;
}

int client_memory(ps_client *c, uint64_t *used, uint64_t *limit)
{
    const mem_limit *m = ps_limit(c->p);
    *used = m->used;
    *limit = m->maximum;
    return PERSIA_OK;
}

void client_get_counts(const ps_client *c, client_counts *out)
{
    *out = (client_counts){.pulls = c->pulls, .pushes = c->pushes};
}

wire_caller client_caller(const ps_client *c, uint32_t shard)
{
    (void)c;
    (void)shard;
    return (wire_caller){0};
}
