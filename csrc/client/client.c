/* client.c: small calls: what the client knows by itself. */
#include "client/private.h"

int persia_client_is_embedded(const ps_client *c)
{
    return c->embedded != NULL;
}

sched *persia_client_sched(const ps_client *c)
{
    return c->s;
}

uint32_t persia_client_shards(const ps_client *c)
{
    return c->servers_n;
}

uint32_t persia_client_tables(const ps_client *c)
{
    return atomic_load_explicit(&c->tables_n, memory_order_acquire);
}

const table_config *persia_client_table(const ps_client *c, uint32_t no)
{
    return no < persia_client_tables(c) ? c->tables[no] : NULL;
}

int client_find_table(const ps_client *c, uint32_t no,
                      const table_config **out)
{
    *out = persia_client_table(c, no);
    if (!*out)
        return persia_err_set(PERSIA_EARG,
                              "the store has no table number %u", no);
    return persia_client_dropped(c, no)
               ? persia_err_set(PERSIA_EARG,
                                "table %s was dropped: add it again, and "
                                "make new modules for it",
                                (*out)->name)
               : PERSIA_OK;
}

int persia_client_dropped(const ps_client *c, uint32_t no)
{
    return no < persia_client_tables(c) && atomic_load(&c->dropped[no]);
}

uint32_t persia_client_state_floats(const ps_client *c, uint32_t no)
{
    const table_config *t = persia_client_table(c, no);
    return t ? persia_optim_state_floats(t->optimizer, t->dim,
                                         (int)t->momentum)
             : 0;
}

index_pool *persia_client_indexes(ps_client *c)
{
    return &c->indexes;
}

uint64_t persia_client_updates(const ps_client *c)
{
    return atomic_load(&c->updates);
}

uint64_t persia_client_last_number(const ps_client *c)
{
    ps_client *locked = (ps_client *)(uintptr_t)c;
    pthread_mutex_lock(&locked->lock);
    uint64_t number = c->last_number;
    pthread_mutex_unlock(&locked->lock);
    return number;
}

void persia_client_end(ps_client *c, enum client_end what)
{
    atomic_fetch_or(&c->ends, (int)what);
}

void persia_client_set_loading(ps_client *c, int loading)
{
    atomic_store(&c->loading, loading);
    if (!loading)
        client_note_mixture(c);
}

uint64_t persia_client_restored_number(const ps_client *c)
{
    return atomic_load(&c->restored_number);
}

int persia_client_check_restores(ps_client *c)
{
    return client_check_mixture(c, 0);
}

int persia_client_pull(ps_client *c, uint64_t after, const uint32_t *tables,
                       pull_job *jobs, size_t jobs_n)
{
    return persia_client_pull_indexed(c, after, NULL, tables, jobs, jobs_n,
                                      NULL);
}

uint32_t persia_client_shard_table(const ps_client *c, uint32_t shard,
                                   uint32_t no)
{
    return shard < c->servers_n && no < persia_client_tables(c)
               ? server_table(c->servers[shard], no)
               : no;
}

const char *persia_client_address(const ps_client *c, uint32_t shard)
{
    return shard < c->servers_n ? c->servers[shard]->address : NULL;
}

uint64_t persia_client_held(ps_client *c)
{
    const uint64_t at = atomic_load(&c->held_at), now = persia_clock_ns();
    return atomic_load(&c->held) && now > at ? now - at : 0;
}

void persia_client_get_counts(const ps_client *c, client_counts *out)
{
    *out = (client_counts){.pulls = c->counts.pulls,
                           .pushes = c->counts.pushes,
                           .ids = c->counts.ids,
                           .distinct = c->counts.distinct,
                           .retries = c->counts.retries,
                           .duplicates = c->counts.duplicates,
                           .reconnects = c->counts.reconnects,
                           .lost = c->counts.lost,
                           .stale = c->counts.stale};
    for (uint32_t i = 0; i < c->servers_n; i++) {
        out->bytes_out += c->servers[i]->ref->bytes_out;
        out->bytes_in += c->servers[i]->ref->bytes_in;
    }
}
