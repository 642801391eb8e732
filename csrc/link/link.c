/* link.c: see link.h. */
#include <stdlib.h>
#include <string.h>

#include "link/link.h"

#define KEEPALIVE_NS ((uint64_t)10 * 1000000000)
#define PAUSE_MAX_NS ((uint64_t)100000000)
#define HELLO_NS ((uint64_t)5 * 1000000000)
#define TICK_NS ((uint64_t)1000000000)
#define HURRY_NS ((uint64_t)50000000)

/* ---- a call ---- */

/* Who is interrupted leaves it to the callback. */
typedef struct calling {
    errand errand; /* its lock guards all below */
    err_kept error;
    rpc_reply reply;
    void *copy; /* of the message, or NULL */
    int refers; /* the message refers to the caller's memory */
} calling;

static void calling_free(calling *k)
{
    persia_rpc_reply_free(&k->reply);
    persia_errand_free(&k->errand);
    free(k->copy);
    free(k);
}

static void link_answered(void *ctx, int rc, rpc_reply *reply)
{
    calling *k = ctx;
    pthread_mutex_lock(&k->errand.lock);
    persia_err_keep(&k->error, rc);
    if (!rc)
        k->reply = *reply;
    if (persia_errand_land(&k->errand))
        calling_free(k);
}

/* The message in one piece of its own. */
static int link_make_copy(calling *k, wire_out *o)
{
    k->copy = malloc(o->bytes + 1);
    if (!k->copy)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a message");
    persia_wire_out_copy(o, k->copy);
    const size_t bytes = o->bytes;
    persia_wire_out_free(o);
    persia_wire_out_init(o);
    return persia_wire_out_refer(o, k->copy, bytes);
}

/* For its end, or, where the callback needs nothing of the caller, until it
 * is interrupted. */
static int link_wait_for(calling *k, link_answer *out)
{
    pthread_mutex_lock(&k->errand.lock);
    int rc = persia_errand_wait(&k->errand, PERSIA_FOREVER, !k->refers);
    if (!k->errand.flying && k->error.code)
        rc = persia_err_again(&k->error);
    if (!rc) {
        out->bytes = k->reply;
        k->reply = (rpc_reply){0};
    }
    pthread_mutex_unlock(&k->errand.lock);
    if (persia_errand_leave(&k->errand))
        calling_free(k);
    return rc;
}

/* *out: to be waited for with link_wait_for(), if there is no error. */
static int link_start(worker_link *l, uint32_t method, wire_out *o, int copies,
                      uint64_t timeout_ns, calling **out)
{
    calling *k = NULL;
    int rc = persia_fork_check("a connection to an embedding worker");
    if (!rc)
        rc = persia_wire_check_size(l->address, "a request", o->bytes,
                                    atomic_load(&l->message_limit));
    if (!rc && !(k = calloc(1, sizeof *k)))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for a request");
    if (k) {
        persia_errand_init(&k->errand);
        k->refers = !copies && o->referred;
        rc = copies ? link_make_copy(k, o) : PERSIA_OK;
    }
    if (rc) {
        persia_wire_out_free(o);
    } else {
        persia_errand_start(&k->errand);
        rc = persia_rpc_start(l->channel, method, o, timeout_ns, link_answered,
                              k);
        if (rc) {
            pthread_mutex_lock(&k->errand.lock);
            (void)persia_errand_land(&k->errand); /* there is no callback */
        }
    }
    if (rc && k)
        calling_free(k);
    *out = rc ? NULL : k;
    return rc;
}

/* Its callback needs nothing of the caller. */
static void calling_drop(calling *k)
{
    if (persia_errand_leave(&k->errand))
        calling_free(k);
}

int link_call(const worker_client *c, worker_link *l, uint32_t method,
              wire_out *o, int copies, uint64_t timeout_ns, link_answer *out)
{
    calling *k;
    (void)c;
    out->bytes = (rpc_reply){0};
    persia_wire_memory_init(&out->memory);
    int rc = link_start(l, method, o, copies, timeout_ns, &k);
    return rc ? rc : link_wait_for(k, out);
}

void link_answer_free(link_answer *a)
{
    persia_rpc_reply_free(&a->bytes);
    persia_wire_memory_free(&a->memory);
}

/* ---- without waiting ---- */

typedef struct sending {
    void (*done)(void *ctx);
    void *ctx;
} sending;

static void link_sent(void *ctx, int rc, rpc_reply *reply)
{
    sending *k = ctx;
    if (!rc)
        persia_rpc_reply_free(reply);
    k->done(k->ctx);
    free(k);
}

void link_send(worker_link *l, uint32_t method, wire_out *o,
               uint64_t timeout_ns, void (*done)(void *ctx), void *ctx)
{
    sending *k = malloc(sizeof *k);
    if (!k) {
        persia_wire_out_free(o);
        done(ctx);
        return;
    }
    *k = (sending){done, ctx};
    if (persia_rpc_start(l->channel, method, o, timeout_ns, link_sent, k)) {
        done(ctx);
        free(k);
    }
}

/* ---- life ---- */

wire_caller link_caller(const worker_client *c, const worker_link *l)
{
    /* In this order: of a later life one is refused by its boot. */
    const uint64_t boot = atomic_load(&l->boot);
    return (wire_caller){.client = c->client,
                         .boot = boot,
                         .lineage = atomic_load(&l->lineage)};
}

/* A rank that the worker has met says that it stays: its place may be another
 * process's now.  *out: for link_hello_end(), if there is no error. */
static int link_hello_begin(const worker_client *c, worker_link *l,
                            uint64_t stream, uint64_t timeout_ns,
                            calling **out)
{
    wire_hello m = {.caller = {.client = c->client,
                               .incarnation = c->opened},
                    .version = WIRE_VERSION,
                    .version_min = WIRE_VERSION_MIN,
                    .rank = c->rank,
                    .world = c->world,
                    .stream = stream,
                    .job = c->job,
                    .stays = atomic_load(&l->boot) != 0};
    wire_out o;
    memcpy(m.name_space, c->name_space, sizeof m.name_space);
    persia_wire_out_init(&o);
    if (c->introduce)
        c->introduce(c->owner, &m);
    int rc = persia_wire_put_hello(&o, &m);
    free(m.held);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    return link_start(l, WORKER_HELLO, &o, 0, timeout_ns, out);
}

static int link_hello_end(calling *k, link_answer *answer,
                          wire_hello_reply *reply)
{
    answer->bytes = (rpc_reply){0};
    persia_wire_memory_init(&answer->memory);
    int rc = link_wait_for(k, answer);
    if (!rc)
        rc = persia_wire_get_hello_reply(answer->bytes.data, answer->bytes.n,
                                         &answer->memory, reply);
    return rc;
}

static int link_greet_end(const worker_client *c, worker_link *l, calling *k)
{
    wire_hello_reply reply;
    link_answer answer;
    int rc = link_hello_end(k, &answer, &reply);
    if (!rc && c->meet)
        rc = c->meet(c->owner, l, &reply);
    if (!rc) {
        atomic_store(&l->lineage, reply.lineage);
        atomic_store(&l->boot, reply.boot);
        atomic_store(&l->message_limit, reply.message_limit);
        atomic_store(&l->away, 0);
        atomic_store(&l->tries, 0);
    }
    link_answer_free(&answer);
    return rc;
}

int link_hello(const worker_client *c, worker_link *l)
{
    calling *k;
    int rc = link_hello_begin(c, l, 0, HELLO_NS, &k);
    return rc ? rc : link_greet_end(c, l, k);
}

int link_ask(const worker_client *c, worker_link *l, uint64_t stream,
             uint64_t timeout_ns, wire_hello_reply *out)
{
    link_answer answer;
    calling *k;
    int rc = link_hello_begin(c, l, stream, timeout_ns, &k);
    if (rc)
        return rc;
    rc = link_hello_end(k, &answer, out);
    link_answer_free(&answer);
    return rc;
}

static int link_may_be_away(int rc)
{
    return persia_retry(RETRY_CALL, rc) == RETRY_LATER;
}

int link_is_away(const worker_link *l)
{
    return atomic_load(&l->away) != 0;
}

void link_leaves(worker_link *l, uint64_t boot)
{
    atomic_store(&l->leaving, boot);
}

int link_is_leaving(const worker_link *l)
{
    const uint64_t leaving = atomic_load(&l->leaving);
    return atomic_load(&l->unlisted) ||
           (leaving && leaving == atomic_load(&l->boot));
}

size_t link_count_away(const worker_client *c)
{
    size_t n = 0;
    for (size_t i = 0; i < c->links_n; i++)
        n += link_is_away(&c->links[i]) && !link_is_leaving(&c->links[i]);
    return n;
}

int link_is_any_there(const worker_client *c)
{
    size_t i = 0;
    while (i < c->links_n && link_is_away(&c->links[i]))
        i++;
    return i < c->links_n;
}

int link_failed(const worker_client *c, worker_link *l, int rc)
{
    err_kept error;
    if (!link_may_be_away(rc))
        return 0;
    persia_err_keep(&error, rc);
    const uint64_t now = persia_clock_ns();
    uint64_t there = 0;
    if (link_may_be_away(link_hello(c, l)))
        (void)atomic_compare_exchange_strong(&l->away, &there, now);
    (void)persia_err_again(&error);
    return link_is_away(l);
}

int link_retry(const worker_client *c, worker_link *l, int rc, uint64_t until)
{
    err_kept stale;
    const int late = persia_clock_ns() >= until;
    if (persia_retry(RETRY_CALL, rc) == RETRY_GREET) {
        persia_err_keep(&stale, rc);
        rc = link_hello(c, l);
        if (!rc)
            return late ? persia_err_again(&stale) : rc;
    }
    if (late || !link_may_be_away(rc))
        return rc;
    const unsigned tries = atomic_fetch_add(&l->tries, 1) + 1;
    return persia_pause_poll(persia_backoff_ns(tries, PAUSE_MAX_NS,
                                               c->client));
}

/* The answer of one of those that were greeted.  *fatal: the first error that
 * is none of a worker that is away. */
static void link_greet_judge(int rc, size_t *left, err_kept *away,
                             err_kept *fatal)
{
    if (link_may_be_away(rc)) {
        persia_err_keep(away, PERSIA_EUNAVAILABLE);
        ++*left;
    } else if (rc && !fatal->code) {
        persia_err_keep(fatal, rc);
    }
}

/* Says Hello to those that are away and in the list, side by side: several
 * that hang take no longer than one.  *left: how many have not answered, and
 * *away why. */
static int link_greet(worker_client *c, size_t *left, err_kept *away)
{
    const size_t n = c->links_n;
    calling **asked = calloc(n, sizeof *asked);
    err_kept fatal = {0};
    *left = 0;
    if (!asked)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu workers", n);
    for (size_t i = 0; i < n; i++) {
        worker_link *l = &c->links[i];
        int rc = PERSIA_OK;
        if (link_is_away(l) && !atomic_load(&l->unlisted))
            rc = link_hello_begin(c, l, 0, HELLO_NS, &asked[i]);
        link_greet_judge(rc, left, away, &fatal);
    }
    for (size_t i = 0; i < n; i++) {
        int rc = PERSIA_OK;
        if (asked[i] && fatal.code == PERSIA_EINTR)
            calling_drop(asked[i]);
        else if (asked[i])
            rc = link_greet_end(c, &c->links[i], asked[i]);
        link_greet_judge(rc, left, away, &fatal);
    }
    free(asked);
    return persia_err_again(&fatal);
}

/* ---- the thread ---- */

static uint64_t link_tick(void *client)
{
    worker_client *c = client;
    size_t left;
    err_kept error;
    persia_interrupt_watch(&c->stop);
    (void)link_greet(c, &left, &error);
    if (c->tick)
        c->tick(c->owner);
    persia_interrupt_watch(NULL);
    return persia_clock_ns() + (atomic_load(&c->hurry) ? HURRY_NS : TICK_NS);
}

int worker_client_start(worker_client *c, void (*on_tick)(void *owner),
                        int (*meet)(void *owner, worker_link *l,
                                    const wire_hello_reply *m),
                        void *owner)
{
    c->tick = on_tick;
    c->meet = meet;
    c->owner = owner;
    return persia_timer_start(&c->timer, link_tick, c, "persia-links");
}

void worker_client_wake(worker_client *c)
{
    persia_timer_wake(&c->timer, 0);
}

void worker_client_stop(worker_client *c)
{
    __atomic_store_n(&c->stop.stop, 1, __ATOMIC_RELEASE);
    persia_timer_stop(&c->timer);
}

/* ---- opening ---- */

static int link_open(const worker_client_config *config, size_t i,
                     worker_link *out)
{
    rpc_channel_config c = {.address = config->addresses[i],
                            .message_limit = config->message_limit,
                            .keepalive_ns = KEEPALIVE_NS,
                            .security = config->security,
                            .methods = &persia_worker_methods};
    atomic_store(&out->away, 1); /* until it answers */
    out->address = strdup(config->addresses[i]);
    return out->address ? persia_rpc_channel_open(&c, &out->channel)
                        : persia_err_set(PERSIA_ENOMEM, "no memory for %zu "
                                         "workers", config->addresses_n);
}

static void link_close(worker_link *l)
{
    if (l->channel)
        persia_rpc_channel_close(l->channel);
    free(l->address);
    *l = (worker_link){0};
}

/* Adds those that are new. */
static int link_open_all(worker_client *c, const worker_client_config *config)
{
    int rc = PERSIA_OK;
    for (size_t i = 0; i < config->addresses_n && !rc; i++) {
        const size_t n = c->links_n;
        size_t at = 0;
        while (at < n && strcmp(c->links[at].address, config->addresses[i]))
            at++;
        if (at < n)
            continue;
        rc = n < WORKER_LINKS_MAX
                 ? link_open(config, i, &c->links[n])
                 : persia_err_set(PERSIA_ELIMIT,
                                  "%s: there have been %d addresses of "
                                  "embedding workers, the most there may be",
                                  config->addresses[i], WORKER_LINKS_MAX);
        if (!rc)
            atomic_store(&c->links_n, n + 1); /* others see a whole one */
        else if (n < WORKER_LINKS_MAX)
            link_close(&c->links[n]);
    }
    return rc;
}

int worker_client_list(worker_client *c, const worker_client_config *config)
{
    pthread_mutex_lock(&c->listing);
    int rc = link_open_all(c, config);
    for (size_t at = 0; at < c->links_n; at++) {
        worker_link *l = &c->links[at];
        size_t i = 0;
        while (i < config->addresses_n &&
               strcmp(l->address, config->addresses[i]))
            i++;
        atomic_store(&l->unlisted, i == config->addresses_n);
    }
    pthread_mutex_unlock(&c->listing);
    worker_client_wake(c);
    return rc;
}

static int link_greet_all(worker_client *c)
{
    const uint64_t began = persia_clock_ns();
    for (unsigned tries = 1;; tries++) {
        err_kept error;
        size_t left;
        int rc = link_greet(c, &left, &error);
        const uint64_t spent = persia_clock_ns() - began;
        if (rc || !left || (left < c->links_n && spent >= c->move_ns))
            return rc;
        if (spent >= c->timeout_ns)
            return persia_err_again(&error);
        rc = persia_pause_poll(persia_backoff_ns(tries, PAUSE_MAX_NS,
                                                 c->client));
        if (rc)
            return rc;
    }
}

int worker_client_open(const worker_client_config *config, worker_client *out)
{
    int rc = persia_fork_check("a connection to an embedding worker");
    *out = (worker_client){.rank = config->rank, .world = config->world,
                           .job = config->job,
                           .opened = persia_clock_seconds(),
                           .timeout_ns = config->timeout_ns,
                           .move_ns = config->move_ns};
    persia_timer_init(&out->timer);
    pthread_mutex_init(&out->listing, NULL);
    memcpy(out->name_space, config->name_space, sizeof out->name_space);
    if (!rc && !config->addresses_n)
        rc = persia_err_set(PERSIA_EARG, "no address of an embedding worker");
    if (!rc)
        rc = persia_random_id(&out->client);
    if (!rc && !(out->links = calloc(WORKER_LINKS_MAX, sizeof *out->links)))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for workers");
    if (!rc)
        rc = link_open_all(out, config);
    if (!rc)
        rc = link_greet_all(out);
    if (rc)
        worker_client_close(out);
    return rc;
}

void worker_client_close(worker_client *c)
{
    worker_client_stop(c);
    persia_timer_free(&c->timer);
    for (size_t i = 0; i < c->links_n; i++)
        link_close(&c->links[i]);
    free(c->links);
    c->links = NULL;
    c->links_n = 0;
    pthread_mutex_destroy(&c->listing);
}

/* ---- counters ---- */

static int ask_stats(const worker_client *c, worker_link *l,
                     embedding_worker_stats *out)
{
    const wire_stats m = {.caller = link_caller(c, l)};
    wire_worker_stats_reply reply;
    link_answer answer;
    wire_out o;
    persia_wire_out_init(&o);
    int rc = persia_wire_put_stats(&o, &m);
    if (rc) {
        persia_wire_out_free(&o);
        return rc;
    }
    rc = link_call(c, l, WORKER_STATS, &o, 0, c->timeout_ns, &answer);
    if (!rc)
        rc = persia_wire_get_worker_stats_reply(
            answer.bytes.data, answer.bytes.n, &answer.memory, &reply);
    if (!rc)
        *out = reply.stats;
    link_answer_free(&answer);
    return rc;
}

int persia_worker_ask(const worker_client_config *config,
                      embedding_worker_stats *out)
{
    worker_client c;
    int rc = worker_client_open(config, &c);
    if (rc)
        return rc;
    rc = ask_stats(&c, &c.links[0], out);
    worker_client_close(&c);
    return rc;
}
