/* open.c: a remote client begins and ends. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/remote.h"
#include "server/server.h"

#define KEEPALIVE_NS ((uint64_t)10 * 1000000000)

/* ---- Hello to all ---- */

typedef struct greeting {
    remote *r;
    enum claim claim;
    wire_hello_reply *replies; /* [servers] */
} greeting;

static void fill_hello(void *ctx, request *q)
{
    const greeting *g = ctx;
    q->args.hello = make_hello(g->r, g->claim);
}

static int accept_hello(void *ctx, request *q)
{
    greeting *g = ctx;
    wire_hello_reply *m = &g->replies[q->index];
    *m = *(const wire_hello_reply *)q->reply.message;
    m->tables = NULL; /* they end with the reply */
    m->tables_n = 0;
    return check_hello(g->r, q->to, m);
}

/* The numbers of shards that nobody is, as text. */
static void list_missing(const greeting *g, uint32_t shards, char *out,
                         size_t room)
{
    size_t n = 0;
    for (uint32_t s = 0; s < shards && n < room; s++) {
        uint32_t i = 0;
        while (i < g->r->servers_n && g->replies[i].shard != s)
            i++;
        if (i < g->r->servers_n)
            continue;
        int more = snprintf(out + n, room - n, "%s%u", n ? ", " : "", s);
        n += more > 0 ? (size_t)more : 0;
    }
}

/* The servers must be shards 0 .. N-1 of N. */
static int check_shards(const greeting *g)
{
    const remote *r = g->r;
    const wire_hello_reply *m = g->replies;
    for (uint32_t i = 1; i < r->servers_n; i++)
        if (m[i].shards != m[0].shards)
            return err_set(PERSIA_EMISMATCH,
                           "%s is shard %u of %u, but %s is shard %u of %u; "
                           "all servers of a store have the same number of "
                           "shards", r->servers[0]->address, m[0].shard,
                           m[0].shards, r->servers[i]->address, m[i].shard,
                           m[i].shards);
    for (uint32_t i = 0; i < r->servers_n; i++)
        for (uint32_t k = 0; k < i; k++)
            if (m[i].shard == m[k].shard)
                return err_set(PERSIA_EMISMATCH,
                               "%s and %s are both shard %u of %u; give each "
                               "server once", r->servers[k]->address,
                               r->servers[i]->address, m[i].shard,
                               m[i].shards);
    if (r->servers_n == m[0].shards)
        return PERSIA_OK;
    char list[256] = "";
    list_missing(g, m[0].shards, list, sizeof list);
    return err_set(PERSIA_EMISMATCH,
                   "shards %s of %u are missing: %u addresses were given; "
                   "add those of the others", list, m[0].shards,
                   r->servers_n);
}

/* Puts the servers in the order of their shards. */
static int arrange(const greeting *g)
{
    remote *r = g->r;
    server **by_shard = calloc(r->servers_n, sizeof(server *));
    if (!by_shard)
        return err_set(PERSIA_ENOMEM, "no memory for a store");
    for (uint32_t i = 0; i < r->servers_n; i++) {
        server *s = r->servers[i];
        const wire_hello_reply *m = &g->replies[i];
        pthread_mutex_lock(&s->lock);
        server_learn(s, m);
        pthread_mutex_unlock(&s->lock);
        remote_learn(r, m);
        s->shard = m->shard;
        by_shard[m->shard] = s;
    }
    free(r->servers);
    r->servers = by_shard;
    remote_set_last(r, r->last_number);
    remote_compare_restores(r);
    remote_set_t(r, remote_servers_t(r), r->last_number);
    return PERSIA_OK;
}

/* Says Hello to all, to look or to claim the stream. */
static int ask_all(greeting *g, call *k, enum claim claim)
{
    remote *r = g->r;
    fan f = {.method = WIRE_HELLO, .fill = fill_hello,
             .accept = accept_hello, .ctx = g, .fresh = 1};
    g->claim = claim;
    int rc = fan_prepare(k, NULL, r->servers_n);
    return rc ? rc : fan_run(k, &f, remote_deadline(r));
}

/* The incarnation is higher than that of any server, so that whoever had the
 * stream before has it at none any more. */
static int claim_all(greeting *g, call *k)
{
    remote *r = g->r;
    uint64_t highest = 0;
    for (uint32_t i = 0; i < r->servers_n; i++)
        if (g->replies[i].ledger.incarnation > highest)
            highest = g->replies[i].ledger.incarnation;
    atomic_store(&r->incarnation, highest + 1);
    return ask_all(g, k, CLAIM_STREAM);
}

static int greet_all(remote *r)
{
    greeting g = {.r = r,
                  .replies = calloc(r->servers_n, sizeof *g.replies)};
    call *k = call_take(r);
    int rc = !k           ? PERSIA_ENOMEM
             : !g.replies ? err_set(PERSIA_ENOMEM, "no memory for a store")
                          : ask_all(&g, k, CLAIM_LOOK);
    if (!rc)
        rc = check_shards(&g);
    if (!rc && atomic_load(&r->stream))
        rc = claim_all(&g, k);
    if (!rc)
        rc = arrange(&g);
    /* Callbacks of a Hello that was given up use the call alone. */
    call_give(k);
    free(g.replies);
    return rc;
}

static int open_ref(const client_config *config, size_t i, shard_ref **out)
{
    const char *address = config->addresses[i];
    rpc_channel *own;
    rpc_channel_config c = {.address = address,
                            .message_limit = config->message_limit,
                            .keepalive_ns = KEEPALIVE_NS,
                            .security = config->security,
                            .methods = &service_methods};
    if (!config->own || i != config->own_at)
        return shard_connect(&c, out);
    *out = NULL;
    int rc = rpc_channel_local(&service_methods, service_handle, config->own,
                               &own);
    return rc ? rc : shard_over(own, address, out);
}

static void close_ref(shard_ref *ref)
{
    if (ref)
        ref->ops->close(ref);
}

/* `ref` is taken over in any case; NULL: it is to be opened. */
static int open_server(remote *r, const client_config *config, size_t i,
                       shard_ref *ref)
{
    server *to = calloc(1, sizeof *to);
    if (!to) {
        close_ref(ref);
        return err_set(PERSIA_ENOMEM, "no memory for %zu servers",
                       config->addresses_n);
    }
    to->ref = ref;
    to->own = config->own && i == config->own_at;
    to->numbers = calloc(PS_TABLES_MAX, sizeof *to->numbers);
    pthread_mutex_init(&to->lock, NULL);
    cond_init(&to->greeted);
    numbers_init(&to->acked, 0);
    numbers_init(&to->acked_late, 0);
    numbers_init(&to->first, 0);
    r->servers[r->servers_n++] = to; /* from here on it is to be freed */
    int rc = to->numbers ? PERSIA_OK
                         : err_set(PERSIA_ENOMEM, "no memory for %zu servers",
                                   config->addresses_n);
    if (!rc && !ref)
        rc = open_ref(config, i, &to->ref);
    if (!rc)
        to->address = to->ref->address;
    return rc;
}

static int check_config(const client_config *config)
{
    size_t n = config->addresses_n;
    if (n < 1 || n > IDS_SHARDS_MAX)
        return err_set(PERSIA_EARG, "%zu addresses of servers, need 1 .. %d",
                       n, IDS_SHARDS_MAX);
    if (config->own && config->own_at >= n)
        return err_set(PERSIA_EARG, "the own shard is address %zu of %zu",
                       config->own_at, n);
    if (config->dtype >= WIRE_DTYPES)
        return err_set(PERSIA_EARG, "there is no wire dtype %u",
                       config->dtype);
    if (config->timeout_ns == 0 || config->rank >= config->world)
        return err_set(PERSIA_EARG,
                       "a store needs a timeout, and a rank below its world "
                       "(rank %u of %u)", config->rank, config->world);
    return memchr(config->name_space, 0, sizeof config->name_space)
               ? PERSIA_OK
               : err_set(PERSIA_EARG, "a namespace has at most %d bytes",
                         WIRE_NAME - 1);
}

/* All but the servers. */
static int make(const client_config *config, remote **out)
{
    *out = NULL;
    int rc = fork_check("a new store");
    if (!rc)
        rc = check_config(config);
    if (rc)
        return rc;
    remote *r = calloc(1, sizeof *r);
    if (!r)
        return err_set(PERSIA_ENOMEM, "no memory for a store");
    *out = r;
    memcpy(r->name_space, config->name_space, sizeof r->name_space);
    r->rank = config->rank;
    r->world = config->world;
    atomic_init(&r->incarnation, 0);
    atomic_init(&r->stream, config->stream);
    r->timeout_ns = config->timeout_ns;
    r->message_limit = config->message_limit;
    r->dtype = config->dtype;
    r->policy = config->lost;
    pthread_mutex_init(&r->declaring, NULL);
    pthread_mutex_init(&r->completing, NULL);
    pthread_mutex_init(&r->lock, NULL);
    index_pool_init(&r->indexes, INDEX_BYTES);
    numbers_init(&r->settled, 0);
    pthread_mutex_init(&r->restores_lock, NULL);
    r->lost_code = PERSIA_ELOST;
    if (getentropy(&r->client, sizeof r->client))
        r->client = id_hash(clock_ns());
    r->servers = calloc(config->addresses_n, sizeof *r->servers);
    if (!r->servers)
        rc = err_set(PERSIA_ENOMEM, "no memory for %zu servers",
                     config->addresses_n);
    return rc ? rc : sched_create(config->threads, &r->s);
}

int remote_create(const client_config *config, shard_ref *const *refs,
                  remote **out)
{
    remote *r;
    *out = NULL;
    int rc = make(config, &r);
    size_t n = rc ? 0 : config->addresses_n;
    for (size_t i = 0; i < n; i++) {
        int code = open_server(r, config, i, refs ? refs[i] : NULL);
        rc = rc ? rc : code;
    }
    if (rc && refs) /* those not taken over yet */
        for (size_t i = n; i < config->addresses_n; i++)
            close_ref(refs[i]);
    if (!rc)
        rc = greet_all(r);
    if (rc) {
        remote_destroy(r);
        return rc;
    }
    *out = r;
    return PERSIA_OK;
}

void remote_destroy(remote *r)
{
    if (!r || fork_check("a store"))
        return;
    /* First: after it no callback comes. */
    for (uint32_t i = 0; i < r->servers_n; i++)
        close_ref(r->servers[i]->ref);
    while (r->calls) {
        call *k = r->calls;
        r->calls = k->next;
        call_free(k);
    }
    index_pool_free(&r->indexes);
    for (uint32_t i = 0; i < r->servers_n; i++) {
        server *s = r->servers[i];
        pthread_mutex_destroy(&s->lock);
        pthread_cond_destroy(&s->greeted);
        free(s->numbers);
        free(s);
    }
    for (uint32_t i = 0; i < r->tables_declared; i++)
        free(r->tables[i]);
    sched_destroy(r->s);
    pthread_mutex_destroy(&r->declaring);
    pthread_mutex_destroy(&r->completing);
    pthread_mutex_destroy(&r->lock);
    pthread_mutex_destroy(&r->restores_lock);
    free(r->servers);
    free(r);
}
