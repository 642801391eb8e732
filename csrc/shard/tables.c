/* tables.c: the shard that lives in this process. */
#include "shard/tables.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* What tables of several shards have in common. */
typedef struct common {
    _Atomic(uint32_t) users;
    sched *s;
    mem_limit limit;
    uint32_t beside; /* of a shard */
} common;

struct tables {
    common *of;
    pthread_mutex_t declaring; /* one declaration at a time */
    /* Slots below `tables_n` never change; so readers need no lock. */
    table *tables[TABLES_MAX];
    _Atomic(uint32_t) tables_n;
    _Atomic(uint8_t) dropped[TABLES_MAX]; /* set under `declaring` */
    pthread_rwlock_t gate; /* pushes hold it shared, a cut exclusively */
    _Atomic(uint64_t) updates; /* changes under the gate */
    _Atomic(uint64_t) t;       /* the highest of an update */
};

static int common_make(const tables_config *config, common **out)
{
    common *c = calloc(1, sizeof *c);
    if (!c)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    int rc = persia_sched_create(config->threads, &c->s);
    if (rc) {
        free(c);
        return rc;
    }
    persia_mem_limit_init(&c->limit, config->memory_limit);
    c->beside = config->beside;
    *out = c;
    return PERSIA_OK;
}

static void common_drop(common *c)
{
    if (atomic_fetch_sub(&c->users, 1) != 1)
        return;
    persia_sched_destroy(c->s);
    persia_mem_limit_free(&c->limit);
    free(c);
}

static int tables_make(common *of, tables **out)
{
    tables *p = calloc(1, sizeof *p);
    if (!p)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    atomic_fetch_add(&of->users, 1);
    p->of = of;
    pthread_mutex_init(&p->declaring, NULL);
    persia_fair_lock_init(&p->gate);
    *out = p;
    return PERSIA_OK;
}

int persia_tables_create(const tables_config *config, tables **out)
{
    common *of = NULL;
    *out = NULL;
    if (config->threads < 1 || config->threads > 1024)
        return persia_err_set(PERSIA_EARG, "threads is %u, need 1 .. 1024",
                              config->threads);
    int rc = common_make(config, &of);
    if (rc)
        return rc;
    atomic_init(&of->users, 1);
    rc = tables_make(of, out);
    common_drop(of);
    return rc;
}

int persia_tables_beside(tables *p, tables **out)
{
    *out = NULL;
    return tables_make(p->of, out);
}

void persia_tables_destroy(tables *p)
{
    if (!p)
        return;
    for (uint32_t i = 0; i < p->tables_n; i++)
        persia_table_destroy(p->tables[i]);
    pthread_mutex_destroy(&p->declaring);
    pthread_rwlock_destroy(&p->gate);
    common_drop(p->of);
    free(p);
}

static int tables_refuse_difference(const table_config *have,
                                    const table_config *wanted,
                                    const spec_field *field)
{
    char was[96], is[96];
    persia_spec_text(field, &have->spec, was, sizeof was);
    persia_spec_text(field, &wanted->spec, is, sizeof is);
    return persia_err_set(PERSIA_EMISMATCH,
                          "table %s: %s differs from the first declaration "
                          "of this table (%s there, %s here); give both the "
                          "same, or another name",
                          wanted->name, field->config, was, is);
}

static int tables_declare_locked(tables *p, const table_config *config,
                                 uint32_t *no, int *created)
{
    uint32_t n = p->tables_n;
    for (uint32_t i = 0; i < n; i++) {
        const table_config *have = persia_table_get_config(p->tables[i]);
        if (p->dropped[i] || strcmp(have->name, config->name) != 0)
            continue;
        const spec_field *field = persia_spec_difference(
            &persia_table_spec_list, &have->spec, &config->spec);
        if (field)
            return tables_refuse_difference(have, config, field);
        *no = i;
        *created = 0;
        return PERSIA_OK;
    }
    if (n == TABLES_MAX)
        return persia_err_set(PERSIA_ELIMIT,
                              "table %s: a store has at most %d "
                              "tables; let features share tables",
                              config->name, TABLES_MAX);
    table_config own = *config;
    own.limit = &p->of->limit;
    own.beside = p->of->beside;
    int rc = persia_table_create(&own, &p->tables[n]);
    if (rc)
        return rc;
    atomic_store_explicit(&p->tables_n, n + 1, memory_order_release);
    *no = n;
    *created = 1;
    return PERSIA_OK;
}

int persia_tables_declare(tables *p, const table_config *config, uint32_t *no,
                          int *created)
{
    pthread_mutex_lock(&p->declaring);
    int rc = tables_declare_locked(p, config, no, created);
    pthread_mutex_unlock(&p->declaring);
    return rc;
}

uint32_t persia_tables_tables(const tables *p)
{
    return atomic_load_explicit(&p->tables_n, memory_order_acquire);
}

table *persia_tables_table(const tables *p, uint32_t no)
{
    return no < persia_tables_tables(p) ? p->tables[no] : NULL;
}

int persia_tables_drop(tables *p, uint32_t no)
{
    table *t = persia_tables_table(p, no);
    if (!t)
        return PERSIA_OK;
    pthread_mutex_lock(&p->declaring);
    atomic_store(&p->dropped[no], 1);
    int rc = persia_table_clear(t);
    pthread_mutex_unlock(&p->declaring);
    return rc;
}

int persia_tables_dropped(const tables *p, uint32_t no)
{
    return no < persia_tables_tables(p) && atomic_load(&p->dropped[no]);
}

sched *persia_tables_sched(const tables *p)
{
    return p->of->s;
}

const mem_limit *persia_tables_limit(const tables *p)
{
    return &p->of->limit;
}

int persia_tables_pull(tables *p, pull_job *jobs, size_t jobs_n)
{
    return persia_table_pull(p->of->s, jobs, jobs_n);
}

/* Whether the push began to change rows before it failed. */
static int push_started(const push_job *jobs, size_t jobs_n)
{
    return jobs_n && jobs[0].touched != UINT64_MAX;
}

int persia_tables_push_noted(tables *p, push_job *jobs, size_t jobs_n,
                             const tables_note *note)
{
    if (jobs_n)
        jobs[0].touched = UINT64_MAX;
    pthread_rwlock_rdlock(&p->gate);
    int rc = note ? note->before(note->ctx) : PERSIA_OK;
    if (!rc)
        rc = persia_table_push_ready(p->of->s, jobs, jobs_n,
                                     note ? note->ready : NULL,
                                     note ? note->ctx : NULL);
    if (!rc || push_started(jobs, jobs_n)) {
        atomic_fetch_add(&p->updates, !note || !note->skips);
        if (note)
            note->after(note->ctx, rc);
    }
    pthread_rwlock_unlock(&p->gate);
    if (rc && jobs_n && !push_started(jobs, jobs_n))
        jobs[0].touched = 0;
    return rc;
}

int persia_tables_change(tables *p, int (*fn)(void *ctx), void *ctx)
{
    pthread_rwlock_rdlock(&p->gate);
    int rc = fn(ctx);
    pthread_rwlock_unlock(&p->gate);
    return rc;
}

int persia_tables_between(tables *p, int (*fn)(void *ctx), void *ctx)
{
    pthread_rwlock_wrlock(&p->gate);
    int rc = fn(ctx);
    pthread_rwlock_unlock(&p->gate);
    return rc;
}

uint64_t persia_tables_updates(const tables *p)
{
    return atomic_load(&p->updates);
}

void persia_tables_set_updates(tables *p, uint64_t updates)
{
    atomic_store(&p->updates, updates);
}

uint64_t persia_tables_t(const tables *p)
{
    return atomic_load(&p->t);
}

void persia_tables_note_t(tables *p, uint64_t t)
{
    uint64_t had = atomic_load(&p->t);
    while (had < t && !atomic_compare_exchange_weak(&p->t, &had, t))
        ;
}

void persia_tables_set_t(tables *p, uint64_t t)
{
    atomic_store(&p->t, t);
}

void persia_tables_set_now(tables *p, uint32_t seconds)
{
    const uint32_t n = persia_tables_tables(p);
    for (uint32_t i = 0; i < n; i++)
        persia_table_set_now(p->tables[i], seconds);
}
