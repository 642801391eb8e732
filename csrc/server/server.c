/* server.c: the life of the service, requests to their handlers; Hello,
 * Declare, Stats. */
#include "server/private.h"

#include "simd/simd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "ids/ids.h"

enum { KEEP_BYTES = 256 << 20 }; /* of buffers that nobody uses */

/* ---- life --------------------------------------------------------------- */

int service_random(uint64_t *out)
{
    do {
        if (getrandom(out, sizeof *out, 0) != (ssize_t)sizeof *out)
            return err_set(PERSIA_EINTERNAL, "no random numbers: %s",
                           strerror(errno));
    } while (!*out);
    return PERSIA_OK;
}

static int config_check(const service_config *c)
{
    if (c->shards < 1 || c->shards > IDS_SHARDS_MAX || c->shard >= c->shards)
        return err_set(PERSIA_EARG, "shard %u of %u: there are 1 to %d "
                       "shards, numbered from 0", c->shard, c->shards,
                       IDS_SHARDS_MAX);
    if (!memchr(c->name_space, 0, sizeof c->name_space))
        return err_set(PERSIA_EARG, "a namespace has at most %d bytes",
                       WIRE_NAME - 1);
    if (c->message_limit < 4096)
        return err_set(PERSIA_EARG, "message_limit is %llu bytes, need at "
                       "least 4096", (unsigned long long)c->message_limit);
    return PERSIA_OK;
}

int service_set_checkpoints(ps_service *s, const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), before;
    if (fd < 0)
        return err_set(PERSIA_EIO, "the folder of checkpoints %s cannot be "
                       "opened: %s", path, strerror(errno));
    pthread_mutex_lock(&s->admin_lock);
    before = s->checkpoints;
    s->checkpoints = fd;
    pthread_mutex_unlock(&s->admin_lock);
    if (before >= 0)
        close(before);
    return PERSIA_OK;
}

void service_set_calls(ps_service *s, uint32_t calls)
{
    atomic_store(&s->calls, calls);
}

int service_create(ps *p, const service_config *config, ps_service **out)
{
    uint64_t lineage = config->lineage;
    *out = NULL;
    int rc = config_check(config);
    if (rc)
        return rc;
    ps_service *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(PERSIA_ENOMEM, "no memory for a service");
    s->p = p;
    memcpy(s->name_space, config->name_space, sizeof s->name_space);
    s->shard = config->shard;
    s->shards = config->shards;
    s->message_limit = config->message_limit;
    s->checkpoints = -1;
    s->born = clock_ns();
    s->wake_at = UINT64_MAX;
    sync_init(&s->sync);
    pthread_mutex_init(&s->declare_lock, NULL);
    pthread_mutex_init(&s->wait_lock, NULL);
    pthread_mutex_init(&s->admin_lock, NULL);
    pthread_cond_init(&s->ended, NULL);
    cond_init(&s->wake);
    if ((rc = service_random(&s->boot)) ||
        (!lineage && (rc = service_random(&lineage))) ||
        (rc = ledger_create(LEDGER_STREAMS, &s->ledger)) ||
        (rc = buffers_create(KEEP_BYTES, &s->buffers)) ||
        (config->checkpoints &&
         (rc = service_set_checkpoints(s, config->checkpoints))) ||
        (rc = wait_start(s))) {
        service_destroy(s);
        return rc;
    }
    atomic_store(&s->lineage, lineage);
    *out = s;
    return PERSIA_OK;
}

void service_close(ps_service *s)
{
    atomic_store(&s->closed, 1);
    wait_drop(s, PERSIA_EUNAVAILABLE, "the server is stopping");
}

void service_destroy(ps_service *s)
{
    if (!s)
        return;
    service_close(s);
    wait_end(s);
    admin_end(s);
    ledger_destroy(s->ledger);
    buffers_destroy(s->buffers);
    if (s->checkpoints >= 0)
        close(s->checkpoints);
    sync_free(&s->sync);
    pthread_cond_destroy(&s->wake);
    pthread_cond_destroy(&s->ended);
    pthread_mutex_destroy(&s->declare_lock);
    pthread_mutex_destroy(&s->wait_lock);
    pthread_mutex_destroy(&s->admin_lock);
    free(s);
}

/* ---- checks that several requests share --------------------------------- */

int service_check_boot(const ps_service *s, const wire_caller *caller)
{
    if (!caller->boot || caller->boot == s->boot)
        return PERSIA_OK;
    return err_set(PERSIA_ESTALE, "the server was started anew: say Hello, "
                   "declare the tables and see what it still has");
}

int service_is_stale(const ps_service *s, const wire_caller *caller)
{
    return caller->lineage && caller->lineage != atomic_load(&s->lineage);
}

int service_check_rows(const ps_service *s, const wire_caller *caller)
{
    int rc = service_check_boot(s, caller);
    if (!rc && service_is_stale(s, caller))
        rc = err_set(PERSIA_ESTALE, "other rows were restored in the server "
                     "meanwhile: say Hello and see which");
    return rc;
}

ledger_owner service_owner(const wire_caller *caller)
{
    return (ledger_owner){caller->incarnation, caller->client};
}

int service_table(const ps_service *s, uint32_t no, table **out)
{
    *out = ps_table(s->p, no);
    if (*out)
        return PERSIA_OK;
    return err_set(PERSIA_EARG, "there is no table number %u, only %u were "
                   "declared", no, ps_tables(s->p));
}

/* Whether hashes have their low 16 bits within [low, high): 1.5 % of the
 * time of a pull where 64-bit products are vectorised. */
HOT static int all_within(const uint64_t *ids, size_t n, uint32_t low,
                          uint32_t high)
{
    uint32_t out = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t place = (uint32_t)id_hash(ids[i]) & 0xFFFF;
        out |= place - low >= high - low;
    }
    return !out;
}

int service_check_ids(const ps_service *s, const table *t,
                      const uint64_t *ids, size_t n)
{
    /* The least hash of a shard: see hash_shard(). */
    uint32_t low = ((s->shard << 16) + s->shards - 1) / s->shards;
    uint32_t high = (((s->shard + 1) << 16) + s->shards - 1) / s->shards;
    if (all_within(ids, n, low, high))
        return PERSIA_OK;
    size_t i = 0;
    while (hash_shard(id_hash(ids[i]), s->shards) == s->shard)
        i++;
    return err_set(PERSIA_EARG, "table %s: id %llu belongs to shard %u of "
                   "%u, this is shard %u", table_get_config(t)->name,
                   (unsigned long long)ids[i],
                   hash_shard(id_hash(ids[i]), s->shards), s->shards,
                   s->shard);
}

int service_check_bytes(const ps_service *s, const char *what, uint64_t bytes)
{
    if (bytes <= s->message_limit)
        return PERSIA_OK;
    return err_set(PERSIA_ELIMIT, "%s of %llu bytes; messages have at most "
                   "%llu: ask for less at once, or raise message_limit",
                   what, (unsigned long long)bytes,
                   (unsigned long long)s->message_limit);
}

int service_check_admin(const rpc_call *call, const char *what)
{
    if (call->admin)
        return PERSIA_OK;
    return err_set(PERSIA_EDENIED, "%s is administration: it needs the "
                   "administration token", what);
}

/* ---- tables ------------------------------------------------------------- */

static void config_of_spec(const ps_service *s, const table_spec *spec,
                           table_config *out)
{
    table_config_init(out);
    out->spec = *spec;
    out->capacity = spec->capacity / s->shards +
                    (spec->capacity % s->shards != 0);
}

/* The specs of the first n tables, in `memory`. */
static int specs(ps_service *s, uint32_t n, wire_memory *memory,
                 table_spec **out)
{
    *out = wire_memory_take(memory, n * sizeof **out);
    if (!*out)
        return PERSIA_ENOMEM;
    for (uint32_t i = 0; i < n; i++) {
        const table_config *c = table_get_config(ps_table(s->p, i));
        uint64_t capacity = atomic_load(&s->capacity[i]);
        (*out)[i] = c->spec;
        (*out)[i].capacity = capacity ? capacity : c->capacity * s->shards;
    }
    return PERSIA_OK;
}

static int declare_locked(ps_service *s, const table_spec *spec,
                          wire_declare_reply *out)
{
    table_config config;
    int created;
    const uint32_t next = ps_tables(s->p);
    config_of_spec(s, spec, &config);
    if (next < PS_TABLES_MAX) /* the number that a new table will have */
        atomic_store(&s->capacity[next], spec->capacity);
    int rc = ps_declare(s->p, &config, &out->no, &created);
    if (rc)
        return rc;
    out->created = (uint32_t)created;
    uint64_t capacity = atomic_load(&s->capacity[out->no]);
    if (!capacity)
        atomic_store(&s->capacity[out->no], capacity = spec->capacity);
    if (capacity != spec->capacity)
        return err_set(PERSIA_EMISMATCH, "table %s: capacity is %llu, it was "
                       "declared with %llu before; give both the same, or "
                       "another name", spec->name,
                       (unsigned long long)spec->capacity,
                       (unsigned long long)capacity);
    return PERSIA_OK;
}

static int handle_declare(ps_service *s, rpc_call *call, wire_memory *memory,
                          answer *a)
{
    wire_declare m;
    wire_declare_reply reply = {0};
    int rc = wire_get_declare(call->request, call->request_n, memory, &m);
    if (!rc)
        rc = service_check_boot(s, &m.caller);
    if (rc)
        return rc;
    pthread_mutex_lock(&s->declare_lock);
    rc = declare_locked(s, &m.table, &reply);
    pthread_mutex_unlock(&s->declare_lock);
    return rc ? rc : wire_put_declare_reply(&a->o, &reply);
}

/* ---- Hello and Stats ---------------------------------------------------- */

typedef struct taken {
    ps_service *s;
    const wire_hello *m;
} taken;

/* Between two updates: no restore changes it meanwhile. */
static int take_restore(void *ctx)
{
    const taken *t = ctx;
    if (t->m->caller.boot == t->s->boot &&
        t->m->caller.lineage == atomic_load(&t->s->lineage))
        atomic_store(&t->s->restored, t->m->restore);
    return PERSIA_OK;
}

static int handle_hello(ps_service *s, rpc_call *call, wire_memory *memory,
                        answer *a)
{
    wire_hello m;
    int rc = wire_get_hello(call->request, call->request_n, memory, &m);
    if (rc)
        return rc;
    if (m.version != WIRE_VERSION)
        return err_set(PERSIA_EMISMATCH, "the client speaks version %u of "
                       "the protocol, the server version %d: install the "
                       "same persia on both", m.version, WIRE_VERSION);
    if (strcmp(m.name_space, s->name_space) != 0)
        return err_set(PERSIA_EMISMATCH, "the client asks for namespace "
                       "'%s', the server holds namespace '%s'",
                       m.name_space, s->name_space);
    if (m.takes && (rc = ps_between(s->p, take_restore, &(taken){s, &m})))
        return rc;
    wire_hello_reply reply = {.version = WIRE_VERSION,
                              .shard = s->shard,
                              .shards = s->shards,
                              .boot = s->boot,
                              .lineage = atomic_load(&s->lineage),
                              .restore = atomic_load(&s->restored),
                              .updates = ps_updates(s->p),
                              .message_limit = s->message_limit,
                              .tables_n = ps_tables(s->p)};
    memcpy(reply.name_space, s->name_space, sizeof reply.name_space);
    if (m.stream && !m.caller.incarnation)
        ledger_read(s->ledger, m.stream, &reply.ledger);
    else if (m.stream && (rc = wait_open(s, &m, &reply.ledger)))
        return rc;
    rc = specs(s, (uint32_t)reply.tables_n, memory, &reply.tables);
    return rc ? rc : wire_put_hello_reply(&a->o, &reply);
}

static int handle_stats(ps_service *s, rpc_call *call, wire_memory *memory,
                        answer *a)
{
    wire_stats m;
    int rc = wire_get_stats(call->request, call->request_n, memory, &m);
    if (rc)
        return rc;
    const mem_limit *limit = ps_limit(s->p);
    const uint32_t n = ps_tables(s->p);
    wire_stats_reply reply = {.boot = s->boot,
                              .lineage = atomic_load(&s->lineage),
                              .restore = atomic_load(&s->restored),
                              .updates = ps_updates(s->p),
                              .step = wait_step(s),
                              .uptime_ns = clock_ns() - s->born,
                              .memory_used = limit->used,
                              .memory_limit = limit->maximum,
                              .pulls = s->pulls,
                              .pushes = s->pushes,
                              .duplicates = s->duplicates,
                              .parked = s->parked_n,
                              .failed = s->failed,
                              .tables_n = n};
    if ((rc = specs(s, n, memory, &reply.tables)))
        return rc;
    reply.stats = wire_memory_take(memory, n * sizeof *reply.stats);
    if (!reply.stats)
        return PERSIA_ENOMEM;
    for (uint32_t i = 0; i < n; i++)
        table_get_stats(ps_table(s->p, i), &reply.stats[i]);
    return wire_put_stats_reply(&a->o, &reply);
}

/* ---- requests to handlers ----------------------------------------------- */

void answer_free(answer *a)
{
    wire_out_free(&a->o);
    buffer_give(a->bulk);
    a->bulk = NULL;
}

static void bulk_done(void *owner)
{
    buffer_give(owner);
}

void service_answer(ps_service *s, rpc_call *call, int rc, answer *a)
{
    if (!rc && !call->local)
        rc = service_check_bytes(s, "an answer", a->o.bytes);
    if (rc) {
        char text[1024];
        snprintf(text, sizeof text, "%s", err_text());
        answer_free(a);
        atomic_fetch_add(&s->failed, 1);
        call->fail(call, rc, text);
        return;
    }
    if (a->bulk)
        call->reply(call, &a->o, bulk_done, a->bulk);
    else
        call->reply(call, &a->o, NULL, NULL);
}

/* A server that stops may still write its rows. */
static int outlives_close(uint32_t method)
{
    return method == WIRE_HELLO || method == WIRE_SNAPSHOT ||
           method == WIRE_STATS;
}

const rpc_methods service_methods = {WIRE_SERVICE, wire_paths,
                                     WIRE_METHODS_N};

void service_handle(void *service, rpc_call *call)
{
    static const handler handlers[WIRE_METHODS_N] = {
        [WIRE_HELLO] = handle_hello,
        [WIRE_DECLARE] = handle_declare,
        [WIRE_PULL] = handle_pull,
        [WIRE_PUSH] = handle_push,
        [WIRE_LEAVE] = handle_leave,
        [WIRE_GET_ROWS] = handle_get_rows,
        [WIRE_PUT_ROWS] = handle_put_rows,
        [WIRE_SNAPSHOT] = handle_snapshot,
        [WIRE_RESTORE] = handle_restore,
        [WIRE_STATS] = handle_stats,
    };
    ps_service *s = service;
    wire_memory memory;
    answer a = {.bulk = NULL};
    int rc;

    wire_memory_init(&memory);
    wire_out_init(&a.o);
    if (atomic_load(&s->closed) && !outlives_close(call->method))
        rc = err_set(PERSIA_EUNAVAILABLE, "the server is stopping");
    else if (call->method >= WIRE_METHODS_N)
        rc = err_set(PERSIA_EPROTOCOL, "there is no method %u",
                     call->method);
    else
        rc = handlers[call->method](s, call, &memory, &a);
    if (rc == TAKEN)
        return;
    service_answer(s, call, rc, &a);
    wire_memory_free(&memory);
}
