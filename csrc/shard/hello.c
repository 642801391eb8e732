/* hello.c: Hello, Declare, Stats. */
#include "shard/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"

/* ---- tables ------------------------------------------------------------- */

static void config_of_spec(const shard *s, const table_spec *spec,
                           table_config *out)
{
    persia_table_config_init(out);
    out->spec = *spec;
    out->capacity = spec->capacity / s->shards +
                    (spec->capacity % s->shards != 0);
    out->first_slot = shard_slot(s->no, s->shards);
    out->slots = shard_slot(s->no + 1, s->shards) - out->first_slot;
}

void hello_spec(const shard *s, uint32_t no, table_spec *out)
{
    const table_config *c =
        persia_table_get_config(persia_tables_table(s->p, no));
    const uint64_t capacity = atomic_load(&s->capacity[no]);
    *out = c->spec;
    out->capacity = capacity ? capacity : c->capacity * s->shards;
    if (persia_tables_dropped(s->p, no))
        snprintf(out->name, sizeof out->name, "%s%u", WIRE_DROPPED, no);
}

/* The specs of the first n tables, in `memory`.  One that was dropped keeps
 * its place, without rows. */
static int hello_specs(const shard *s, uint32_t n, wire_memory *memory,
                       table_spec **out)
{
    *out = persia_wire_memory_take(memory, n * sizeof **out);
    for (uint32_t i = 0; *out && i < n; i++)
        hello_spec(s, i, &(*out)[i]);
    return *out ? PERSIA_OK : PERSIA_ENOMEM;
}

static int declare_locked(shard *s, const table_spec *spec,
                          wire_declare_reply *out)
{
    table_config config;
    int created;
    const uint32_t next = persia_tables_tables(s->p);
    config_of_spec(s, spec, &config);
    if (next < TABLES_MAX) /* the number that a new table will have */
        atomic_store(&s->capacity[next], spec->capacity);
    int rc = persia_tables_declare(s->p, &config, &out->no, &created);
    if (rc)
        return rc;
    out->created = (uint32_t)created;
    uint64_t capacity = atomic_load(&s->capacity[out->no]);
    if (!capacity)
        atomic_store(&s->capacity[out->no], capacity = spec->capacity);
    if (capacity != spec->capacity)
        return persia_err_set(
            PERSIA_EMISMATCH,
            "table %s: capacity is %llu, it was "
            "declared with %llu before; give both the same, or "
            "another name",
            spec->name, (unsigned long long)spec->capacity,
            (unsigned long long)capacity);
    return logged_tables(s);
}

typedef struct declaring {
    shard *s;
    const wire_declare *m;
    wire_declare_reply *out;
} declaring;

/* With the gate held.  A shard whose rows are not whole takes tables: those
 * that the next restore fills. */
static int hello_declare_gated(void *ctx)
{
    const declaring *d = ctx;
    int rc = check_lineage(d->s, &d->m->caller);
    if (!rc)
        rc = check_stays(d->s);
    if (rc)
        return rc;
    pthread_mutex_lock(&d->s->declare_lock);
    rc = declare_locked(d->s, &d->m->table, d->out);
    pthread_mutex_unlock(&d->s->declare_lock);
    return rc;
}

int declare_answer(shard *s, const wire_declare *m, wire_memory *memory,
                   wire_declare_reply *out)
{
    (void)memory;
    *out = (wire_declare_reply){0};
    return persia_tables_change(s->p, hello_declare_gated,
                                &(declaring){s, m, out});
}

/* ---- Hello and Stats ---------------------------------------------------- */

typedef struct taken {
    shard *s;
    const wire_hello *m;
} taken;

/* Between two updates: no restore changes it meanwhile.  One that it has is
 * kept from clients that know an earlier one. */
static int hello_take_restore(void *ctx)
{
    const taken *t = ctx;
    const uint64_t had = atomic_load(&t->s->restored);
    if (t->m->caller.boot != t->s->boot ||
        t->m->caller.lineage != atomic_load(&t->s->lineage) ||
        t->m->restore <= had)
        return PERSIA_OK;
    int rc = check_stays(t->s);
    if (rc)
        return rc;
    atomic_store(&t->s->restored, t->m->restore);
    rc = logged_identity(t->s);
    if (rc)
        atomic_store(&t->s->restored, had);
    return rc;
}

/* Its slots: one run, none has moved. */
static int hello_list_slots(const shard *s, wire_memory *memory,
                            wire_hello_reply *out)
{
    const uint32_t first = shard_slot(s->no, s->shards);
    wire_slot_run *run = persia_wire_memory_take(memory, sizeof *run);
    if (!run)
        return PERSIA_ENOMEM;
    *run = (wire_slot_run){.first = first,
                           .count = shard_slot(s->no + 1, s->shards) - first,
                           .version = 1};
    out->slots_rev = SLOTS_REV;
    out->slots = run;
    out->slots_n = 1;
    return PERSIA_OK;
}

uint32_t persia_shard_no(const shard *s)
{
    return s->no;
}

uint32_t persia_shard_count(const shard *s)
{
    return s->shards;
}

int persia_shard_set_here(shard *s, const uint64_t *here, size_t n, int beside)
{
    uint64_t *copy = malloc((n + 1) * sizeof *copy);
    if (!copy)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu shards", n);
    memcpy(copy, here, n * sizeof *copy);
    pthread_mutex_lock(&s->here_lock);
    uint64_t *old = s->here;
    s->here = copy;
    s->here_n = n;
    s->beside = beside;
    pthread_mutex_unlock(&s->here_lock);
    free(old);
    return PERSIA_OK;
}

/* The shards at its address. */
static int hello_list_here(shard *s, wire_memory *memory,
                           wire_hello_reply *out)
{
    int rc = PERSIA_OK;
    pthread_mutex_lock(&s->here_lock);
    const size_t n = s->here_n;
    out->here = n ? persia_wire_memory_take(memory, n * sizeof *out->here)
                  : NULL;
    if (out->here)
        memcpy(out->here, s->here, (out->here_n = n) * sizeof *out->here);
    else if (n)
        rc = PERSIA_ENOMEM;
    pthread_mutex_unlock(&s->here_lock);
    return rc;
}

static uint32_t hello_is_beside(shard *s)
{
    pthread_mutex_lock(&s->here_lock);
    const uint32_t beside = (uint32_t)s->beside;
    pthread_mutex_unlock(&s->here_lock);
    return beside;
}

int hello_answer(shard *s, const wire_hello *m, wire_memory *memory,
                 wire_hello_reply *out)
{
    readers_drop_silent(&s->readers);
    if (!wire_versions_meet(m->version_min, m->version))
        return persia_err_set(
            PERSIA_EMISMATCH,
            "the client speaks versions %u to "
            "%u of the protocol, the server %d to %d: install "
            "the same persia on both",
            m->version_min ? m->version_min : m->version, m->version,
            WIRE_VERSION_MIN, WIRE_VERSION);
    if (strcmp(m->name_space, s->name_space) != 0)
        return persia_err_set(PERSIA_EMISMATCH,
                              "the client asks for namespace "
                              "'%s', the server holds namespace '%s'",
                              m->name_space, s->name_space);
    int rc = PERSIA_OK;
    if (m->takes)
        rc = persia_tables_between(s->p, hello_take_restore, &(taken){s, m});
    if (rc)
        return rc;
    *out = (wire_hello_reply){.version = WIRE_VERSION,
                              .version_min = WIRE_VERSION_MIN,
                              .features = WIRE_FEATURES,
                              .shard = s->no,
                              .shards = s->shards,
                              .boot = s->boot,
                              .lineage = atomic_load(&s->lineage),
                              .restore = atomic_load(&s->restored),
                              .updates = persia_tables_updates(s->p),
                              .t = persia_tables_t(s->p),
                              .message_limit = s->message_limit,
                              .tables_n = persia_tables_tables(s->p)};
    memcpy(out->name_space, s->name_space, sizeof out->name_space);
    if (m->stream && !m->caller.incarnation) {
        ledger_read(s->ledger, m->stream, &out->ledger);
        rc = logged_wait(s); /* what is there lasts */
    } else if (m->stream)
        rc = wait_open(s, m, out);
    if (!rc)
        rc = hello_list_slots(s, memory, out);
    if (!rc)
        rc = hello_list_here(s, memory, out);
    return rc ? rc
              : hello_specs(s, (uint32_t)out->tables_n, memory, &out->tables);
}

int stats_answer(shard *s, const wire_stats *m, wire_memory *memory,
                 wire_stats_reply *out)
{
    (void)m;
    const mem_limit *limit = persia_tables_limit(s->p);
    const uint32_t n = persia_tables_tables(s->p);
    *out = (wire_stats_reply){
        .boot = s->boot,
        .lineage = atomic_load(&s->lineage),
        .restore = atomic_load(&s->restored),
        .updates = persia_tables_updates(s->p),
        .step = wait_step(s),
        .uptime_ns = persia_clock_ns() - s->born,
        .memory_used = limit->used,
        .memory_limit = limit->maximum,
        .pulls = s->pulls,
        .pushes = s->pushes,
        .duplicates = s->duplicates,
        .parked = s->parked_n,
        .failed = s->failed,
        .recovers = atomic_load(&s->recovers) != 0,
        .done = jobs_restored(s) +
                __atomic_load_n(&s->replayed.done, __ATOMIC_RELAXED),
        .total = __atomic_load_n(&s->replayed.total, __ATOMIC_RELAXED),
        .beside = hello_is_beside(s),
        .log_waits_ns = s->log ? persia_log_waits(s->log) : 0,
        .tables_n = n};
    int rc = hello_specs(s, n, memory, &out->tables);
    if (rc)
        return rc;
    out->stats = persia_wire_memory_take(memory, n * sizeof *out->stats);
    if (!out->stats)
        return PERSIA_ENOMEM;
    for (uint32_t i = 0; i < n; i++)
        persia_table_get_stats(persia_tables_table(s->p, i), &out->stats[i]);
    return PERSIA_OK;
}
