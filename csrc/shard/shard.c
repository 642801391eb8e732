/* shard.c: the life of a shard, checks that several calls share. */
#include "shard/private.h"

#include "simd/simd.h"

#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"

enum {
    KEEP_BYTES = 256 << 20, /* of unused blocks, and */
    KEEP_BLOCKS = 256,      /* how many */
    PIECE = 2048            /* ids that are checked at once */
};

/* ---- life --------------------------------------------------------------- */

static int config_check(const shard_config *c)
{
    if (c->shards < 1 || c->shards > IDS_SHARDS_MAX || c->shard >= c->shards)
        return persia_err_set(PERSIA_EARG,
                              "shard %u of %u: there are 1 to %d "
                              "shards, numbered from 0",
                              c->shard, c->shards, IDS_SHARDS_MAX);
    if (!memchr(c->name_space, 0, sizeof c->name_space))
        return persia_err_set(PERSIA_EARG, "a namespace has at most %d bytes",
                              WIRE_NAME - 1);
    if (c->message_limit < 4096)
        return persia_err_set(PERSIA_EARG,
                              "message_limit is %llu bytes, need at "
                              "least 4096",
                              (unsigned long long)c->message_limit);
    if (!c->boot || !c->lineage)
        return persia_err_set(PERSIA_EARG,
                              "a shard needs a boot id and a lineage "
                              "that are not 0");
    return PERSIA_OK;
}

int persia_shard_create(tables *tables, const shard_config *config,
                        shard **out)
{
    *out = NULL;
    int rc = config_check(config);
    if (rc)
        return rc;
    shard *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a shard");
    s->p = tables;
    s->env = config->env;
    memcpy(s->name_space, config->name_space, sizeof s->name_space);
    s->no = config->shard;
    s->shards = config->shards;
    s->message_limit = config->message_limit;
    s->log = config->log;
    s->replaying = config->log != NULL;
    atomic_init(&s->recovers, config->log != NULL);
    s->boot = config->boot;
    atomic_init(&s->lineage, config->lineage);
    s->born = persia_clock_ns();
    s->wake_at = UINT64_MAX;
    sync_init(&s->sync);
    pthread_mutex_init(&s->declare_lock, NULL);
    pthread_mutex_init(&s->here_lock, NULL);
    pthread_mutex_init(&s->late_lock, NULL);
    pthread_mutex_init(&s->wait_lock, NULL);
    jobs_init(&s->jobs);
    readers_init(&s->readers);
    if ((rc = ledger_create(LEDGER_STREAMS, &s->ledger)) ||
        (rc = persia_mem_pool_create(KEEP_BYTES, KEEP_BLOCKS, &s->blocks))) {
        persia_shard_destroy(s);
        return rc;
    }
    *out = s;
    return PERSIA_OK;
}

void persia_shard_destroy(shard *s)
{
    if (!s)
        return;
    persia_shard_copy_end(s);
    if (s->log)
        persia_log_stop(s->log); /* it calls late_synced() */
    ledger_destroy(s->ledger);
    persia_mem_pool_destroy(s->blocks);
    sync_free(&s->sync);
    groups_free(s);
    pthread_mutex_destroy(&s->declare_lock);
    pthread_mutex_destroy(&s->here_lock);
    free(s->here);
    pthread_mutex_destroy(&s->late_lock);
    pthread_mutex_destroy(&s->wait_lock);
    jobs_free(&s->jobs);
    readers_free(&s->readers);
    free(s);
}

int persia_shard_check_ready(const shard *s)
{
    if (!atomic_load(&s->recovers))
        return PERSIA_OK;
    return persia_err_set(
        PERSIA_EUNAVAILABLE,
        "the server recovers: it has applied %.1f of %.1f MB of its log",
        (double)__atomic_load_n(&s->replayed.done, __ATOMIC_RELAXED) * 1e-6,
        (double)__atomic_load_n(&s->replayed.total, __ATOMIC_RELAXED) * 1e-6);
}

void persia_shard_ready(shard *s)
{
    atomic_store(&s->recovers, 0);
}

tables *persia_shard_tables(const shard *s)
{
    return s->p;
}

void persia_shard_set_calls(shard *s, uint32_t calls)
{
    atomic_store(&s->calls, calls);
}

void persia_shard_count_failed(shard *s)
{
    atomic_fetch_add(&s->failed, 1);
}

/* ---- checks that several calls share ------------------------------------ */

int persia_shard_check_boot(const shard *s, const wire_caller *caller)
{
    if (caller->boot && caller->boot != s->boot)
        return persia_err_set(
            PERSIA_ESTALE,
            "the server was started again: say "
            "Hello, declare the tables and see what it still has");
    if (caller->slots_rev && caller->slots_rev != SLOTS_REV)
        return persia_err_set(PERSIA_ESTALE,
                              "the server has other slots now: say "
                              "Hello and see which");
    return PERSIA_OK;
}

int is_stale(const shard *s, const wire_caller *caller)
{
    return caller->lineage && caller->lineage != atomic_load(&s->lineage);
}

int check_whole(const shard *s)
{
    const enum rows_state rows = (enum rows_state)atomic_load(&s->rows);
    if (rows == ROWS_WHOLE)
        return PERSIA_OK;
    if (rows == ROWS_REPLACING)
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "the rows of the server are being replaced by "
                              "those of a checkpoint");
    return persia_err_set(PERSIA_EINCOMPLETE,
                          "the server has no rows: a load had no memory to "
                          "read them beside those that were there, and failed "
                          "while it read them; load a checkpoint");
}

int check_lineage(const shard *s, const wire_caller *caller)
{
    int rc = persia_shard_check_boot(s, caller);
    if (!rc && is_stale(s, caller))
        rc = persia_err_set(PERSIA_ESTALE,
                            "other rows were restored in the server "
                            "meanwhile: say Hello and see which");
    return rc;
}

int check_rows(const shard *s, const wire_caller *caller)
{
    int rc = persia_shard_check_boot(s, caller);
    if (!rc)
        rc = check_whole(s);
    return rc ? rc : check_lineage(s, caller);
}

ledger_owner owner_of(const wire_caller *caller)
{
    return (ledger_owner){caller->incarnation, caller->client};
}

int find_table(const shard *s, uint32_t no, table **out)
{
    *out = persia_tables_table(s->p, no);
    if (persia_tables_dropped(s->p, no))
        return persia_err_set(PERSIA_EARG,
                              "table %s was dropped: declare it again",
                              persia_table_get_config(*out)->name);
    if (*out)
        return PERSIA_OK;
    return persia_err_set(PERSIA_EARG,
                          "there is no table number %u, only %u were "
                          "declared",
                          no, persia_tables_tables(s->p));
}

/* Whether hashes have their low 16 bits within [low, high): 1.5 % of the
 * time of a pull where 64-bit products are vectorised. */
HOT static int shard_all_within(const uint64_t *ids, size_t n, uint32_t low,
                                uint32_t high)
{
    uint32_t out = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t place = hash_slot(id_hash(ids[i]));
        out |= place - low >= high - low;
    }
    return !out;
}

int check_ids_here(const shard *s, const table *t, const uint64_t *ids,
                   size_t n)
{
    if (s->shards == 1) /* it has them all */
        return PERSIA_OK;
    const uint32_t low = shard_slot(s->no, s->shards);
    const uint32_t high = shard_slot(s->no + 1, s->shards);
    if (shard_all_within(ids, n, low, high))
        return PERSIA_OK;
    size_t i = 0;
    while (hash_shard(id_hash(ids[i]), s->shards) == s->no)
        i++;
    return persia_err_set(
        PERSIA_EARG,
        "table %s: id %lld belongs to shard %u of "
        "%u, this is shard %u",
        persia_table_get_config(t)->name, (long long)ids[i],
        hash_shard(id_hash(ids[i]), s->shards), s->shards, s->no);
}

/* Ids in pieces: a sched_loop_fn. */
typedef struct ids_check {
    const shard *s;
    const table *t;
    const uint64_t *ids;
    size_t n;
} ids_check;

static int check_piece(void *ctx, size_t i)
{
    const ids_check *c = ctx;
    size_t first = i * PIECE, left = c->n - first;
    return check_ids_here(c->s, c->t, c->ids + first,
                          left < PIECE ? left : PIECE);
}

int check_ids(const shard *s, const table *t, const uint64_t *ids, size_t n)
{
    ids_check check = {s, t, ids, n};
    if (s->shards == 1)
        return PERSIA_OK;
    return persia_sched_for(persia_tables_sched(s->p), (n + PIECE - 1) / PIECE,
                            check_piece, &check);
}

int persia_shard_check_bytes(const shard *s, const char *what, uint64_t bytes)
{
    return persia_wire_check_size("this server", what, bytes,
                                  s->message_limit);
}
