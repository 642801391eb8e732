/* client.c: the tables of a store, wherever they are: the local body, and the
 * way to the remote one. */
#include <stdlib.h>

#include "client/remote.h"

struct ps_client {
    ps *p;     /* local; else NULL */
    remote *r; /* remote; else NULL */
    index_pool indexes; /* local */
    _Atomic(uint64_t) pulls, pushes; /* local: calls */
};

int client_local(ps *p, ps_client **out)
{
    ps_client *c = calloc(1, sizeof *c);
    *out = c;
    if (!c)
        return err_set(PERSIA_ENOMEM, "no memory for a store");
    c->p = p;
    index_pool_init(&c->indexes, INDEX_BYTES);
    return PERSIA_OK;
}

int client_over(const client_config *config, shard_ref *const *refs,
                ps_client **out)
{
    remote *r;
    *out = NULL;
    int rc = remote_create(config, refs, &r);
    ps_client *c = rc ? NULL : calloc(1, sizeof *c);
    if (rc)
        return rc;
    if (!c) {
        remote_destroy(r);
        return err_set(PERSIA_ENOMEM, "no memory for a store");
    }
    c->r = r;
    *out = c;
    return PERSIA_OK;
}

int client_remote(const client_config *config, ps_client **out)
{
    return client_over(config, NULL, out);
}

void client_destroy(ps_client *c)
{
    if (!c)
        return;
    if (c->r)
        remote_destroy(c->r);
    else
        index_pool_free(&c->indexes);
    free(c);
}

int client_is_remote(const ps_client *c)
{
    return c->r != NULL;
}

ps *client_ps(const ps_client *c)
{
    return c->p;
}

sched *client_sched(const ps_client *c)
{
    return c->r ? c->r->s : ps_sched(c->p);
}

uint32_t client_shards(const ps_client *c)
{
    return c->r ? c->r->servers_n : 1;
}

int client_declare(ps_client *c, const table_config *config, uint32_t *no,
                   int *created)
{
    return c->r ? remote_declare(c->r, config, no, created)
                : ps_declare(c->p, config, no, created);
}

uint32_t client_tables(const ps_client *c)
{
    if (c->r)
        return atomic_load_explicit(&c->r->tables_n, memory_order_acquire);
    return ps_tables(c->p);
}

const table_config *client_table(const ps_client *c, uint32_t no)
{
    if (c->r)
        return no < client_tables(c) ? c->r->tables[no] : NULL;
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

index_pool *client_indexes(ps_client *c)
{
    return c->r ? &c->r->indexes : &c->indexes;
}

int client_pull(ps_client *c, uint64_t after, const uint32_t *tables,
                pull_job *jobs, size_t jobs_n)
{
    return client_pull_indexed(c, after, tables, jobs, jobs_n, NULL);
}

int client_pull_indexed(ps_client *c, uint64_t after, const uint32_t *tables,
                        pull_job *jobs, size_t jobs_n, batch_index **index)
{
    if (index)
        *index = NULL;
    if (c->r)
        return remote_pull(c->r, after, tables, jobs, jobs_n, index);
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
    if (c->r)
        return remote_push(c->r, update, tables, jobs, jobs_n);
    for (size_t i = 0; i < jobs_n; i++) {
        int rc = find_table(c, tables[i], &jobs[i].t);
        if (rc)
            return rc;
    }
    c->pushes++;
    return ps_push(c->p, jobs, jobs_n);
}

int client_skip(ps_client *c, const client_update *update)
{
    return c->r ? remote_skip(c->r, update) : PERSIA_OK;
}

uint64_t client_updates(const ps_client *c)
{
    return c->r ? atomic_load(&c->r->updates) : ps_updates(c->p);
}

uint64_t client_take_t(ps_client *c)
{
    return c->r ? 1 : ps_take_t(c->p);
}

uint64_t client_t(ps_client *c)
{
    return c->r ? remote_t(c->r) : ps_t(c->p);
}

void client_set_t(ps_client *c, uint64_t base)
{
    if (c->r)
        remote_set_t(c->r, base, NUMBER_LAST);
    else
        ps_set_t(c->p, base);
}

uint64_t client_last_number(const ps_client *c)
{
    uint64_t number = 0;
    if (c->r) {
        pthread_mutex_lock(&c->r->lock);
        number = c->r->last_number;
        pthread_mutex_unlock(&c->r->lock);
    }
    return number;
}

void client_set_last_number(ps_client *c, uint64_t number)
{
    if (c->r)
        remote_set_last(c->r, number);
}

int client_greet(ps_client *c, int restored)
{
    return c->r ? remote_greet(c->r, restored) : PERSIA_OK;
}

int client_go_on(ps_client *c, uint64_t stream, uint64_t number)
{
    return c->r ? remote_go_on(c->r, stream, number) : PERSIA_OK;
}

void client_end(ps_client *c, enum client_end what)
{
    if (c->r)
        atomic_fetch_or(&c->r->ends, (int)what);
}

void client_set_loading(ps_client *c, int loading)
{
    if (c->r)
        atomic_store(&c->r->loading, loading);
}

uint64_t client_restored_number(const ps_client *c)
{
    return c->r ? atomic_load(&c->r->restored_number) : 0;
}

int client_check_restores(ps_client *c)
{
    return c->r ? remote_check_restores(c->r, 0) : PERSIA_OK;
}

int client_tell_lost(ps_client *c)
{
    return c->r ? remote_tell_lost(c->r) : PERSIA_OK;
}

int client_look(ps_client *c)
{
    return c->r ? remote_look(c->r) : PERSIA_OK;
}

int client_join(ps_client *c, uint64_t step, uint64_t *applied)
{
    if (c->r)
        return remote_join(c->r, step, applied);
    *applied = ps_updates(c->p);
    return PERSIA_OK;
}

int client_leave(ps_client *c, int hurry)
{
    return c->r ? remote_leave(c->r, hurry) : PERSIA_OK;
}

uint32_t client_state_floats(const ps_client *c, uint32_t no)
{
    const table_config *t = client_table(c, no);
    return t ? optim_state_floats(t->optimizer, t->dim, (int)t->momentum) : 0;
}

int client_get(ps_client *c, uint32_t no, size_t n, const uint64_t *ids,
               float *vectors, float *state, uint8_t *found)
{
    table *t;
    if (c->r)
        return remote_get(c->r, no, n, ids, vectors, state, found);
    int rc = find_table(c, no, &t);
    return rc ? rc : table_get(t, n, ids, vectors, state, found);
}

int client_set(ps_client *c, uint32_t no, size_t n, const uint64_t *ids,
               const float *vectors, const float *state)
{
    table *t;
    if (c->r)
        return remote_set(c->r, no, n, ids, vectors, state);
    int rc = find_table(c, no, &t);
    return rc ? rc : table_set(t, n, ids, vectors, state);
}

int client_list(ps_client *c, uint32_t no, uint32_t shard, uint64_t *cursor,
                size_t room, uint64_t *ids, size_t *n)
{
    table *t;
    *n = 0;
    if (shard >= client_shards(c))
        return err_set(PERSIA_EARG, "there is no shard %u", shard);
    if (c->r)
        return remote_list(c->r, no, shard, cursor, room, ids, n);
    int rc = find_table(c, no, &t);
    return rc ? rc : table_list(t, cursor, room, ids, n);
}

int client_clear(ps_client *c, uint32_t no)
{
    table *t;
    if (c->r)
        return remote_clear(c->r, no);
    int rc = find_table(c, no, &t);
    return rc ? rc : table_clear(t);
}

int client_stats(ps_client *c, uint32_t no, table_stats *out)
{
    table *t;
    if (c->r)
        return remote_stats(c->r, no, out);
    int rc = find_table(c, no, &t);
    if (!rc)
        table_get_stats(t, out);
    return rc;
}

int client_memory(ps_client *c, uint64_t *used, uint64_t *limit)
{
    if (c->r)
        return remote_memory(c->r, used, limit);
    const mem_limit *m = ps_limit(c->p);
    *used = m->used;
    *limit = m->maximum;
    return PERSIA_OK;
}

void client_get_counts(const ps_client *c, client_counts *out)
{
    *out = (client_counts){.pulls = c->pulls, .pushes = c->pushes};
    if (c->r)
        remote_get_counts(c->r, out);
}

uint32_t client_shard_table(const ps_client *c, uint32_t shard, uint32_t no)
{
    if (c->r && shard < c->r->servers_n && no < client_tables(c))
        return server_table(c->r->servers[shard], no);
    return no;
}

const char *client_address(const ps_client *c, uint32_t shard)
{
    return c->r && shard < c->r->servers_n ? c->r->servers[shard]->address
                                           : NULL;
}

int client_call(ps_client *c, uint32_t shard, uint32_t method,
                const void *arguments, shard_reply *reply)
{
    *reply = (shard_reply){0};
    return c->r ? remote_call(c->r, shard, method, arguments, reply)
                : err_set(PERSIA_EARG, "method %u: this store has no servers",
                          method);
}

int client_repair(ps_client *c, uint32_t shard)
{
    if (!c->r || shard >= c->r->servers_n)
        return err_set(PERSIA_EARG, "there is no shard %u", shard);
    server *to = c->r->servers[shard];
    return remote_repair(c->r, to, remote_caller(c->r, to).boot,
                         remote_deadline(c->r));
}

wire_caller client_caller(const ps_client *c, uint32_t shard)
{
    if (c->r && shard < c->r->servers_n)
        return remote_caller(c->r, c->r->servers[shard]);
    return (wire_caller){0};
}
