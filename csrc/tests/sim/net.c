/* net.c: room rpc between nodes of a simulation; see net.h. */
#include "tests/sim/net.h"

#include "rpc/channel.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PING (10 * SIM_S) /* as channels have it, and so long for its answer */
enum { ADDRESS = 64, TEXT = 1024 };

typedef struct listener {
    struct listener *next;
    sim_node *node;
    char address[ADDRESS];
    rpc_handler handler;
    void *ctx;
    const char *(*name)(uint32_t method);
} listener;

struct rpc_channel {
    char address[ADDRESS];
    sim_node *node;
    unsigned open; /* calls whose callback has not returned */
};

/* A call, as its client has it. */
typedef struct exchange {
    struct exchange *next; /* of all that are not ended */
    uint64_t number;
    rpc_channel *by;
    sim_node *at;      /* where it arrived; NULL: it did not */
    uint32_t method;
    void *request;
    size_t request_n;
    uint64_t deadline;
    rpc_callback callback;
    void *ctx;
    int answered;      /* the server has sent its answer */
    int ended;
    int rc;            /* how */
    char text[TEXT];
    rpc_reply reply;
} exchange;

/* An arrival of it at a server. */
typedef struct arrival {
    rpc_call call; /* first */
    exchange *of;
    listener *to;
} arrival;

/* A reply on its way. */
typedef struct answer {
    exchange *of;
    sim_node *from;
    int rc;
    char text[TEXT];
    rpc_reply reply;
} answer;

static struct {
    net_faults faults;
    uint64_t slow, slow_until;
    uint64_t cut[NET_SLOTS][NET_SLOTS];
    listener *listeners;
    exchange *open;
    uint64_t made;
    sim_node *trap; /* see net_await_answer() */
    uint32_t trap_method;
} net;

/* ---- faults ---- */

void net_set_faults(const net_faults *f)
{
    net.faults = *f;
}

void net_slow(uint64_t delay, uint64_t until)
{
    net.slow = delay;
    net.slow_until = until;
}

void net_cut(int from, int to, uint64_t until)
{
    net.cut[from][to] = until;
}

void net_heal(void)
{
    memset(net.cut, 0, sizeof net.cut);
    net.faults = (net_faults){.delay = SIM_MS};
    net.slow_until = 0;
}

static int is_cut(const sim_node *from, const sim_node *to)
{
    return net.cut[sim_node_slot(from)][sim_node_slot(to)] > sim_now();
}

static uint64_t arrives(void)
{
    uint64_t most = net.slow_until > sim_now() ? net.slow : net.faults.delay;
    if (sim_chance(net.faults.late))
        most = 30 * SIM_S;
    return sim_now() + sim_between(20 * SIM_US, most);
}

/* ---- listeners ---- */

static listener *find(const char *address)
{
    for (listener *l = net.listeners; l; l = l->next)
        if (sim_node_alive(l->node) && strcmp(l->address, address) == 0)
            return l;
    return NULL;
}

void net_listen(sim_node *n, const char *address, rpc_handler handler,
                void *ctx, const char *(*name)(uint32_t method))
{
    listener *l = calloc(1, sizeof *l);
    assert(l);
    *l = (listener){net.listeners, n, {0}, handler, ctx, name};
    snprintf(l->address, sizeof l->address, "%s", address);
    net.listeners = l;
}

void net_close(sim_node *n)
{
    for (listener *l = net.listeners; l; l = l->next)
        if (l->node == n)
            l->address[0] = 0;
}

int net_refuses(const char *address)
{
    const sim_node *self = sim_node_self();
    for (listener *l = net.listeners; l; l = l->next)
        if (strcmp(l->address, address) == 0 &&
            (sim_node_alive(l->node) || is_cut(self, l->node) ||
             is_cut(l->node, self)))
            return 0;
    return 1;
}

/* ---- the client's end ---- */

static void run_callback(void *ctx)
{
    exchange *x = ctx;
    rpc_channel *c = x->by;
    if (x->rc)
        (void)persia_err_set(x->rc, "%s", x->text);
    x->callback(x->ctx, x->rc, &x->reply);
    c->open--;
    sim_wake(c);
}

static const char *method_name(const exchange *x)
{
    for (listener *l = net.listeners; l; l = l->next)
        if (l->name && (!x->at || l->node == x->at))
            return l->name(x->method);
    return "call";
}

/* text, reply: of rc, and taken over. */
static void exchange_end(exchange *x, int rc, const char *text,
                         rpc_reply *reply)
{
    if (x->ended) {
        if (reply)
            persia_rpc_reply_free(reply);
        return;
    }
    x->ended = 1;
    x->rc = rc;
    if (rc)
        snprintf(x->text, sizeof x->text, "%s", text);
    else
        x->reply = *reply;
    exchange **at = &net.open;
    while (*at != x)
        at = &(*at)->next;
    *at = x->next;
    sim_say("  %s <- %s: %s #%llu: %s", sim_node_name(x->by->node),
            x->by->address, method_name(x), (unsigned long long)x->number,
            rc ? x->text : "answered");
    if (sim_node_alive(x->by->node))
        sim_post(x->by->node, run_callback, x);
}

static void break_off(void *ctx)
{
    exchange *x = ctx;
    char text[TEXT];
    snprintf(text, sizeof text, "%s: the connection broke", x->by->address);
    exchange_end(x, PERSIA_EUNAVAILABLE, text, NULL);
}

static void expire(void *ctx)
{
    exchange *x = ctx;
    char text[TEXT];
    snprintf(text, sizeof text, "%s did not answer in time", x->by->address);
    exchange_end(x, PERSIA_ETIMEOUT, text, NULL);
}

/* ---- the server's end ---- */

static void answer_arrives(void *ctx)
{
    answer *a = ctx;
    if (is_cut(a->from, a->of->by->node))
        persia_rpc_reply_free(&a->reply);
    else
        exchange_end(a->of, a->rc, a->text, a->rc ? NULL : &a->reply);
    free(a);
}

static void send_answer(arrival *r, answer *a)
{
    exchange *x = r->of;
    a->of = x;
    a->from = r->to->node;
    x->answered = 1;
    if (net.trap == a->from && net.trap_method == x->method) {
        net.trap = NULL;
        sim_wake(&net.trap);
        sim_at(sim_now() + sim_between(SIM_MS, 4 * SIM_S), answer_arrives, a);
    } else if (sim_chance(net.faults.lose_reply)) {
        sim_at(arrives(), break_off, x);
        persia_rpc_reply_free(&a->reply);
        free(a);
    } else {
        sim_at(arrives(), answer_arrives, a);
    }
    free(r);
}

static void peer_of(rpc_call *call, char *out, size_t room)
{
    const arrival *r = (const arrival *)call;
    snprintf(out, room, "%s", sim_node_name(r->of->by->node));
}

static rpc_reply copy_out(wire_out *o)
{
    rpc_reply out = {.data = bytes_take(o->bytes ? o->bytes : 1),
                     .n = o->bytes};
    assert(out.data);
    out.memory = out.data;
    persia_wire_out_copy(o, out.data);
    persia_wire_out_free(o);
    return out;
}

static void reply(rpc_call *call, wire_out *o, void (*done)(void *owner),
                  void *owner)
{
    answer *a = calloc(1, sizeof *a);
    assert(a);
    a->reply = copy_out(o);
    if (done)
        done(owner);
    send_answer((arrival *)call, a);
}

static void fail(rpc_call *call, int code, const char *text)
{
    arrival *r = (arrival *)call;
    answer *a = calloc(1, sizeof *a);
    assert(a);
    a->rc = code;
    snprintf(a->text, sizeof a->text, "%s: %s", r->of->by->address, text);
    send_answer(r, a);
}

static void handle(void *ctx)
{
    arrival *r = ctx;
    if (r->to->address[0]) {
        r->to->handler(r->to->ctx, &r->call);
    } else {
        fail(&r->call, PERSIA_EUNAVAILABLE, "the server is stopping");
    }
}

static void request_arrives(void *ctx)
{
    exchange *x = ctx;
    listener *to = find(x->by->address);
    if (!to) {
        sim_at(sim_now() + SIM_MS, break_off, x);
        return;
    }
    if (is_cut(x->by->node, to->node))
        return;
    arrival *r = calloc(1, sizeof *r);
    assert(r);
    r->of = x;
    r->to = to;
    r->call = (rpc_call){.method = x->method,
                         .request = x->request,
                         .request_n = x->request_n,
                         .deadline = x->deadline,
                         .who = &persia_rpc_everyone,
                         .peer = peer_of,
                         .reply = reply,
                         .fail = fail};
    x->at = to->node;
    sim_say("  %s -> %s: %s #%llu", sim_node_name(x->by->node),
            sim_node_name(to->node), method_name(x),
            (unsigned long long)x->number);
    sim_post(to->node, handle, r);
}

int net_await_answer(sim_node *n, uint32_t method)
{
    const uint64_t until = sim_now() + 2 * SIM_S;
    net.trap = n;
    net.trap_method = method;
    while (net.trap && !sim_wait(&net.trap, until))
        ;
    const int sent = !net.trap;
    net.trap = NULL;
    return sent;
}

/* Bytes that have left may arrive.  Where no packet says that the process is
 * gone, the pings of a channel find out. */
void net_killed(sim_node *n)
{
    for (exchange *x = net.open; x; x = x->next) {
        if (x->at != n)
            continue;
        const uint64_t after = sim_chance(x->answered ? 300 : 700)
                                   ? sim_between(SIM_MS, 2 * SIM_S)
                                   : sim_between(PING, 2 * PING);
        sim_at(sim_now() + after, break_off, x);
    }
}

/* ---- room rpc ---- */

int persia_rpc_channel_open(const rpc_channel_config *config,
                            rpc_channel **out)
{
    rpc_channel *c = calloc(1, sizeof *c);
    assert(c);
    snprintf(c->address, sizeof c->address, "%s", config->address);
    c->node = sim_node_self();
    *out = c;
    return PERSIA_OK;
}

const char *persia_rpc_channel_address(const rpc_channel *c)
{
    return c->address;
}

void persia_rpc_channel_close(rpc_channel *c)
{
    char text[TEXT];
    snprintf(text, sizeof text, "%s: the channel was closed", c->address);
    for (exchange *x = net.open, *next; x; x = next) {
        next = x->next;
        if (x->by == c)
            exchange_end(x, PERSIA_ECLOSED, text, NULL);
    }
    while (c->open)
        (void)sim_wait(c, PERSIA_FOREVER);
    /* It stays: late arrivals name it. */
}

/* What becomes of a request. */
static void send_request(exchange *x)
{
    const net_faults *f = &net.faults;
    if (sim_chance(f->lose)) {
        sim_at(arrives(), break_off, x);
        return;
    }
    sim_at(arrives(), request_arrives, x);
    if (sim_chance(f->twice))
        sim_at(arrives(), request_arrives, x);
    if (sim_chance(f->break_early))
        sim_at(arrives(), break_off, x);
}

int persia_rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
                     uint64_t timeout_ns, rpc_callback callback, void *ctx)
{
    exchange *x = calloc(1, sizeof *x);
    assert(x);
    rpc_reply bytes = copy_out(o);
    *x = (exchange){.next = net.open,
                    .number = ++net.made,
                    .by = c,
                    .method = method,
                    .request = bytes.data,
                    .request_n = bytes.n,
                    .deadline = sim_now() + timeout_ns,
                    .callback = callback,
                    .ctx = ctx};
    net.open = x;
    c->open++;
    sim_at(x->deadline, expire, x);
    send_request(x);
    return PERSIA_OK;
}
