/* open.c: a client begins and ends. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/private.h"

enum { LOOKS = 3 }; /* that follow one with two answers of a shard */

#define KEEPALIVE_NS ((uint64_t)10 * 1000000000)

/* Of two processes of a rank that claim its stream at once servers take the
 * greater: on one machine that is the later one, also where a message of one
 * that is dead arrives last. */
static int open_choose_client(uint64_t *out)
{
    enum { RANDOM_BITS = 22, TICK_BITS = 16 };
    int rc = persia_random_id(out);
    if (!rc)
        *out = persia_clock_ns() >> TICK_BITS << RANDOM_BITS |
               *out >> (64 - RANDOM_BITS);
    return rc;
}

/* ---- Hello to all ---- */

typedef struct greeting {
    ps_client *r;
    enum claim claim;
    wire_hello_reply *replies; /* [servers]; `here` is of its own memory */
    size_t room;               /* of them */
} greeting;

static void replies_free(wire_hello_reply *replies, size_t n)
{
    for (size_t i = 0; replies && i < n; i++)
        free(replies[i].here);
    free(replies);
}

static void open_fill_hello(void *ctx, request *q)
{
    const greeting *g = ctx;
    q->args.hello = make_hello(g->r, g->claim);
}

static int open_accept_hello(void *ctx, request *q)
{
    greeting *g = ctx;
    const wire_hello_reply *from = q->reply.message;
    wire_hello_reply *to = &g->replies[q->index];
    uint64_t *here = malloc((from->here_n + 1) * sizeof *here);
    if (!here)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu shards",
                              from->here_n);
    if (from->here_n)
        memcpy(here, from->here, from->here_n * sizeof *here);
    free(to->here);
    hello_copy(to, from);
    to->here = here;
    to->here_n = from->here_n;
    return check_hello(g->r, q->to, from);
}

/* The numbers of shards that no server has, as text. */
static void open_list_missing(const greeting *g, uint32_t shards, char *out,
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

static int open_has_moved(const server *s)
{
    return strcmp(persia_shard_address(s->ref), s->ref->address) != 0;
}

static int open_refuse_twice(const greeting *g, uint32_t i, uint32_t k)
{
    const wire_hello_reply *m = &g->replies[i];
    return persia_err_set(
        PERSIA_EMISMATCH,
        "%s and %s are both shard %u of %u; give each server once",
        g->r->servers[k]->address, g->r->servers[i]->address, m->shard,
        m->shards);
}

/* Addresses that were given, as long as nothing has moved between them. */
static int open_check_given(const greeting *g)
{
    const ps_client *r = g->r;
    const wire_hello_reply *m = g->replies;
    for (uint32_t i = 0; i < r->servers_n; i++)
        for (uint32_t k = 0; k < i; k++)
            if (m[i].shard == m[k].shard && !open_has_moved(r->servers[i]) &&
                !open_has_moved(r->servers[k]))
                return open_refuse_twice(g, i, k);
    return PERSIA_OK;
}

/* A shard that has moved was asked for where it was, and where it is: one of
 * both is enough. */
static int open_drop_twice(greeting *g)
{
    ps_client *r = g->r;
    uint32_t n = 0;
    r->twice = calloc(r->servers_n, sizeof(server *));
    if (!r->twice)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    for (uint32_t i = 0; i < r->servers_n; i++) {
        uint32_t k = 0;
        while (k < n && (g->replies[k].shard != g->replies[i].shard ||
                         g->replies[k].boot != g->replies[i].boot))
            k++;
        if (k < n) {
            r->twice[r->twice_n++] = r->servers[i];
            free(g->replies[i].here);
            g->replies[i].here = NULL;
            continue;
        }
        r->servers[n] = r->servers[i];
        if (n != i) {
            g->replies[n] = g->replies[i];
            g->replies[i].here = NULL;
        }
        n++;
    }
    r->servers_n = n;
    return PERSIA_OK;
}

/* The servers must have shards 0 .. N-1 of N. */
static int open_check_shards(const greeting *g)
{
    const ps_client *r = g->r;
    const wire_hello_reply *m = g->replies;
    for (uint32_t i = 1; i < r->servers_n; i++)
        if (m[i].shards != m[0].shards)
            return persia_err_set(
                PERSIA_EMISMATCH,
                "%s is shard %u of %u, but %s is shard %u of %u; "
                "all servers of a store have the same number of "
                "shards",
                r->servers[0]->address, m[0].shard, m[0].shards,
                r->servers[i]->address, m[i].shard, m[i].shards);
    for (uint32_t i = 0; i < r->servers_n; i++)
        for (uint32_t k = 0; k < i; k++)
            if (m[i].shard == m[k].shard)
                return open_refuse_twice(g, i, k);
    if (r->servers_n == m[0].shards)
        return PERSIA_OK;
    char list[256] = "";
    open_list_missing(g, m[0].shards, list, sizeof list);
    return persia_err_set(
        PERSIA_EMISMATCH,
        "shards %s of %u are missing: %u addresses were given; "
        "add those of the others",
        list, m[0].shards, r->servers_n);
}

/* Puts the servers in the order of their shards. */
static int open_arrange(const greeting *g)
{
    ps_client *r = g->r;
    server **by_shard = calloc(r->servers_n, sizeof(server *));
    if (!by_shard)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    for (uint32_t i = 0; i < r->servers_n; i++) {
        server *s = r->servers[i];
        const wire_hello_reply *m = &g->replies[i];
        pthread_mutex_lock(&s->lock);
        server_learn(s, m);
        pthread_mutex_unlock(&s->lock);
        client_learn(r, m);
        s->shard = m->shard;
        by_shard[m->shard] = s;
    }
    free(r->servers);
    r->servers = by_shard;
    /* What others have in flight in a shared stream is theirs to end. */
    persia_client_set_last_number(r, r->shared ? 0 : r->last_number);
    client_compare_restores(r);
    client_set_t_after(r, client_servers_t(r), r->last_number);
    return PERSIA_OK;
}

/* Says Hello to all, to look or to claim the stream. */
static int open_ask_all(greeting *g, call *k, enum claim claim)
{
    ps_client *r = g->r;
    fan f = {.method = WIRE_HELLO,
             .fill = open_fill_hello,
             .accept = open_accept_hello,
             .ctx = g,
             .fresh = 1};
    g->claim = claim;
    int rc = fan_prepare(k, NULL, r->servers_n);
    return rc ? rc : fan_run(k, &f, client_deadline(r));
}

/* Whether two replies of one shard are of two of its lives. */
static int open_differs(const greeting *g)
{
    const wire_hello_reply *m = g->replies;
    for (uint32_t i = 0; i < g->r->servers_n; i++)
        for (uint32_t k = 0; k < i; k++)
            if (m[i].shard == m[k].shard && m[i].boot != m[k].boot)
                return 1;
    return 0;
}

/* Looks at all, again where a server was started again meanwhile. */
static int open_look(greeting *g, call *k)
{
    int rc = open_ask_all(g, k, CLAIM_LOOK);
    for (int i = 0; i < LOOKS && !rc && open_differs(g); i++)
        rc = open_ask_all(g, k, CLAIM_LOOK);
    return rc;
}

/* The incarnation is higher than that of any server, so that the owner before
 * has it at none any more. */
static int open_claim_all(greeting *g, call *k)
{
    ps_client *r = g->r;
    uint64_t highest = 0;
    for (uint32_t i = 0; i < r->servers_n; i++)
        if (g->replies[i].ledger.incarnation > highest)
            highest = g->replies[i].ledger.incarnation;
    /* All who share a stream are one owner. */
    atomic_store(&r->incarnation, r->shared ? 1 : highest + 1);
    return open_ask_all(g, k, CLAIM_STREAM);
}

/* `ref` is taken over in any case. */
static int open_server(ps_client *r, const char *address, shard_ref *ref);

/* Shards that addresses have beside the one that has answered. */
static int open_more_shards(const greeting *g, size_t *out)
{
    *out = 0;
    for (uint32_t i = 0; i < g->r->servers_n; i++) {
        const wire_hello_reply *m = &g->replies[i];
        int there = !m->here_n;
        for (size_t k = 0; k < m->here_n; k++)
            there |= m->here[k] == m->shard;
        if (!there)
            return server_bad_reply(g->r->servers[i],
                                    "its Hello leaves out its own shard");
        *out += m->here_n ? m->here_n - 1 : 0;
    }
    return g->r->servers_n + *out <= IDS_SHARDS_MAX
               ? PERSIA_OK
               : persia_err_set(PERSIA_EMISMATCH,
                                "the servers have more than %d shards",
                                IDS_SHARDS_MAX);
}

/* Opens the other shards of one address. */
static int open_beside(const greeting *g, uint32_t i)
{
    ps_client *r = g->r;
    const wire_hello_reply *m = &g->replies[i];
    server *first = r->servers[i];
    int rc = m->here_n ? persia_shard_name(first->ref, m->shard) : PERSIA_OK;
    for (size_t k = 0; k < m->here_n && !rc; k++) {
        shard_ref *ref;
        if (m->here[k] == m->shard)
            continue;
        rc = persia_shard_beside(first->ref, (uint32_t)m->here[k], &ref);
        if (!rc)
            rc = open_server(r, first->address, ref);
    }
    return rc;
}

static int open_beside_each(const greeting *g)
{
    const uint32_t n = g->r->servers_n; /* before it grows */
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < n && !rc; i++)
        rc = open_beside(g, i);
    return rc;
}

/* Where servers have several shards, opens and asks all of them. */
static int open_greet_beside(greeting *g, call *k)
{
    ps_client *r = g->r;
    const uint32_t n = r->servers_n;
    size_t more;
    int rc = open_more_shards(g, &more);
    if (rc || !more)
        return rc ? rc : open_beside_each(g);
    server **servers = realloc(r->servers, (n + more) * sizeof(server *));
    if (servers)
        r->servers = servers;
    wire_hello_reply *replies = calloc(n + more, sizeof *replies);
    if (!servers || !replies) {
        free(replies);
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu shards", more);
    }
    rc = open_beside_each(g);
    replies_free(g->replies, n);
    g->replies = replies;
    g->room = n + more;
    return rc ? rc : open_look(g, k);
}

static int open_greet_all(ps_client *r)
{
    greeting g = {.r = r, .room = r->servers_n,
                  .replies = calloc(r->servers_n, sizeof *g.replies)};
    call *k = call_take(r);
    int rc = !k ? PERSIA_ENOMEM
             : !g.replies
                 ? persia_err_set(PERSIA_ENOMEM, "no memory for a store")
                 : open_look(&g, k);
    if (!rc && open_check_given(&g)) { /* or it moves just now: once more */
        rc = open_look(&g, k);
        if (!rc)
            rc = open_check_given(&g);
    }
    if (!rc)
        rc = open_greet_beside(&g, k);
    if (!rc)
        rc = open_drop_twice(&g);
    if (!rc)
        rc = open_check_shards(&g);
    if (!rc && atomic_load(&r->stream))
        rc = open_claim_all(&g, k);
    if (!rc)
        rc = open_arrange(&g);
    /* Callbacks of a Hello that was given up use the call alone. */
    call_give(k);
    replies_free(g.replies, g.room);
    return rc;
}

/* with: the server that was opened first, or NULL. */
static int open_ref(const client_config *config, size_t i,
                    const shard_ref *with, shard_ref **out)
{
    rpc_channel_config c = {.address = config->addresses[i],
                            .message_limit = config->message_limit,
                            .keepalive_ns = KEEPALIVE_NS,
                            .security = config->security,
                            .methods = &persia_shard_methods};
    return config->own && i == config->own_at
               ? persia_shard_direct(config->own, out)
               : persia_shard_connect(&c, with, out);
}

static void close_ref(shard_ref *ref)
{
    if (ref)
        ref->ops->close(ref);
}

static int open_server(ps_client *r, const char *address, shard_ref *ref)
{
    server *to = calloc(1, sizeof *to);
    if (!to) {
        close_ref(ref);
        return persia_err_set(PERSIA_ENOMEM, "no memory for a server");
    }
    to->ref = ref;
    to->address = strdup(address);
    to->numbers = calloc(TABLES_MAX, sizeof *to->numbers);
    pthread_mutex_init(&to->lock, NULL);
    persia_cond_init(&to->greeted);
    numbers_init(&to->acked, 0);
    numbers_init(&to->acked_late, 0);
    numbers_init(&to->first, 0);
    r->servers[r->servers_n++] = to; /* from here on it is to be freed */
    if (!to->address || !to->numbers)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a server");
    return PERSIA_OK;
}

static int check_config(const client_config *config)
{
    size_t n = config->addresses_n;
    if (n < 1 || n > IDS_SHARDS_MAX)
        return persia_err_set(PERSIA_EARG,
                              "%zu addresses of servers, need 1 .. %d", n,
                              IDS_SHARDS_MAX);
    if (config->own && config->own_at >= n)
        return persia_err_set(PERSIA_EARG,
                              "the own shard is address %zu of %zu",
                              config->own_at, n);
    if (config->dtype >= WIRE_DTYPES)
        return persia_err_set(PERSIA_EARG, "there is no wire dtype %u",
                              config->dtype);
    if (config->timeout_ns == 0 || config->rank >= config->world)
        return persia_err_set(
            PERSIA_EARG,
            "a store needs a timeout, and a rank below its world "
            "(rank %u of %u)",
            config->rank, config->world);
    return memchr(config->name_space, 0, sizeof config->name_space)
               ? PERSIA_OK
               : persia_err_set(PERSIA_EARG,
                                "a namespace has at most %d bytes",
                                WIRE_NAME - 1);
}

/* All but the servers.  own: see ps_client.embedded; taken over with *out. */
static int open_make(const client_config *config, embedded *own,
                     ps_client **out)
{
    *out = NULL;
    int rc = persia_fork_check("a new store");
    if (!rc)
        rc = check_config(config);
    if (rc)
        return rc;
    ps_client *r = calloc(1, sizeof *r);
    if (!r)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
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
    persia_turn_init(&r->declaring);
    persia_turn_init(&r->completing);
    persia_turn_init(&r->comparing);
    pthread_mutex_init(&r->lock, NULL);
    persia_index_pool_init(&r->indexes, INDEX_BYTES);
    numbers_init(&r->settled, 0);
    r->lost_code = PERSIA_ELOST;
    r->shared = config->shared;
    r->client = config->stream;
    if (!r->shared)
        rc = open_choose_client(&r->client);
    r->owner = config->owner;
    r->embedded = own;
    if (own)
        r->s = persia_tables_sched(persia_shard_tables(own->shard));
    r->servers = calloc(config->addresses_n, sizeof *r->servers);
    if (!rc && !r->servers)
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for %zu servers",
                            config->addresses_n);
    return rc || own ? rc : persia_sched_create(config->threads, &r->s);
}

/* own: taken over, also on failure. */
static int open_create(const client_config *config, embedded *own,
                       shard_ref *const *refs, ps_client **out)
{
    ps_client *r;
    *out = NULL;
    int rc = open_make(config, own, &r);
    if (!r && own)
        embedded_destroy(own);
    size_t n = rc ? 0 : config->addresses_n;
    for (size_t i = 0; i < n; i++) {
        shard_ref *ref = refs ? refs[i] : NULL;
        const shard_ref *with = r->servers_n ? r->servers[0]->ref : NULL;
        int code = ref ? PERSIA_OK : open_ref(config, i, with, &ref);
        if (!code)
            code = open_server(r, config->addresses[i], ref);
        rc = rc ? rc : code;
    }
    if (rc && refs) /* those not taken over yet */
        for (size_t i = n; i < config->addresses_n; i++)
            close_ref(refs[i]);
    if (!rc)
        rc = open_greet_all(r);
    if (rc) {
        persia_client_destroy(r);
        return rc;
    }
    r->release = config->release;
    *out = r;
    return PERSIA_OK;
}

int client_over(const client_config *config, shard_ref *const *refs,
                ps_client **out)
{
    return open_create(config, NULL, refs, out);
}

int persia_client_create(const client_config *config, ps_client **out)
{
    return open_create(config, NULL, NULL, out);
}

int persia_client_embedded(tables *tables, ps_client **out)
{
    embedded *e;
    const char *address = "this process";
    *out = NULL;
    uint64_t stream;
    int rc = persia_random_id(&stream);
    if (!rc)
        rc = embedded_create(tables, &e);
    if (rc)
        return rc;
    const client_config config = {.addresses = &address,
                                  .addresses_n = 1,
                                  .own = e->shard,
                                  .world = 1,
                                  .stream = stream,
                                  .timeout_ns = UINT64_MAX / 4,
                                  .dtype = WIRE_FP32};
    return open_create(&config, e, NULL, out);
}

static void open_release_tables(void *tables)
{
    persia_tables_destroy(tables);
}

int persia_client_create_embedded(const tables_config *config, ps_client **out)
{
    tables *tables;
    *out = NULL;
    int rc = persia_fork_check("a new store");
    if (!rc)
        rc = persia_tables_create(config, &tables);
    if (rc)
        return rc;
    rc = persia_client_embedded(tables, out);
    if (rc) {
        persia_tables_destroy(tables);
        return rc;
    }
    (*out)->owner = tables;
    (*out)->release = open_release_tables;
    return PERSIA_OK;
}

static void server_free(server *s)
{
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->greeted);
    free(s->numbers);
    free(s->address);
    free(s);
}

int persia_client_destroy(ps_client *r)
{
    if (!r || persia_fork_check("a store"))
        return 0;
    if (r->embedded && embedded_end_jobs(r->embedded))
        return 1;
    /* First: after it no callback is called. */
    for (uint32_t i = 0; i < r->servers_n; i++)
        close_ref(r->servers[i]->ref);
    for (uint32_t i = 0; i < r->twice_n; i++)
        close_ref(r->twice[i]->ref);
    while (r->calls) {
        call *k = r->calls;
        r->calls = k->next;
        call_free(k);
    }
    client_witnesses_end(r);
    persia_index_pool_free(&r->indexes);
    for (uint32_t i = 0; i < r->servers_n; i++)
        server_free(r->servers[i]);
    for (uint32_t i = 0; i < r->twice_n; i++)
        server_free(r->twice[i]);
    free(r->twice);
    for (uint32_t i = 0; i < r->tables_declared; i++)
        free(r->tables[i]);
    if (r->embedded)
        embedded_destroy(r->embedded);
    else
        persia_sched_destroy(r->s);
    persia_turn_free(&r->declaring);
    persia_turn_free(&r->completing);
    persia_turn_free(&r->comparing);
    pthread_mutex_destroy(&r->lock);
    if (r->release)
        r->release(r->owner);
    free(r->servers);
    free(r);
    return 0;
}
