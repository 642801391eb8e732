/* host.c: the shards of a process behind one address. */
#include "server/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ps_host {
    pthread_rwlock_t lock; /* guards what follows; shared while a call is
                              handed over */
    size_t n;
    ps_service *services[]; /* [n] by the numbers of their shards */
};

/* ---- life --------------------------------------------------------------- */

static uint32_t number_of(const ps_service *s)
{
    return persia_shard_no(s->shard);
}

/* What their Hello says. */
static int list_here(ps_service *const *services, size_t n)
{
    uint64_t here[IDS_SHARDS_MAX];
    int rc = PERSIA_OK;
    for (size_t i = 0; i < n; i++)
        here[i] = number_of(services[i]);
    for (size_t i = 0; i < n && !rc; i++)
        rc = persia_shard_set_here(services[i]->shard, here, n);
    return rc;
}

int persia_host_create(ps_service *const *services, size_t n, ps_host **out)
{
    *out = NULL;
    for (size_t i = 0; i < n; i++)
        if (i && (number_of(services[i - 1]) >= number_of(services[i]) ||
                  persia_shard_count(services[i]->shard) !=
                      persia_shard_count(services[0]->shard)))
            return persia_err_set(PERSIA_EARG,
                                  "shards %u and %u of a server are not in "
                                  "order, or not of one job",
                                  number_of(services[i - 1]),
                                  number_of(services[i]));
    if (!n)
        return persia_err_set(PERSIA_EARG, "a server needs a shard");
    int rc = list_here(services, n);
    ps_host *h = rc ? NULL : malloc(sizeof *h + n * sizeof *h->services);
    if (!h)
        return rc ? rc
                  : persia_err_set(PERSIA_ENOMEM, "no memory for %zu shards",
                                   n);
    pthread_rwlock_init(&h->lock, NULL);
    h->n = n;
    memcpy(h->services, services, n * sizeof *services);
    *out = h;
    return PERSIA_OK;
}

void persia_host_destroy(ps_host *h)
{
    if (!h)
        return;
    pthread_rwlock_destroy(&h->lock);
    free(h);
}

/* With the lock held. */
static ps_service *find_locked(const ps_host *h, uint32_t shard, size_t *at)
{
    for (size_t i = 0; i < h->n; i++)
        if (number_of(h->services[i]) == shard) {
            *at = i;
            return h->services[i];
        }
    return NULL;
}

int persia_host_remove(ps_host *h, uint32_t shard)
{
    size_t at = 0;
    int rc = PERSIA_OK;
    pthread_rwlock_wrlock(&h->lock);
    if (!find_locked(h, shard, &at) || !at) {
        rc = persia_err_set(PERSIA_EARG,
                            "shard %u is not here, or the first one", shard);
    } else {
        h->n--;
        memmove(h->services + at, h->services + at + 1,
                (h->n - at) * sizeof *h->services);
        rc = list_here(h->services, h->n);
    }
    pthread_rwlock_unlock(&h->lock);
    return rc;
}

/* ---- several calls ------------------------------------------------------ */

typedef struct many many;

/* A call of a `many`. */
typedef struct part {
    rpc_call call; /* first */
    many *of;
    wire_result result; /* without its message: */
    wire_out out;
    void (*done)(void *owner);
    void *owner;
} part;

struct many {
    rpc_call *call;
    wire_memory memory; /* of the requests, and of this */
    _Atomic(size_t) left; /* parts that are not answered, and those that are
                             being handed over as one */
    size_t n;
    part *parts; /* [n] */
};

static void many_free(void *owner)
{
    many *m = owner;
    for (size_t i = 0; i < m->n; i++) {
        part *p = &m->parts[i];
        persia_wire_out_free(&p->out);
        if (p->done)
            p->done(p->owner);
    }
    wire_memory memory = m->memory; /* it lies in it */
    persia_wire_memory_free(&memory);
}

/* All are answered. */
static void many_reply(many *m)
{
    rpc_call *call = m->call;
    wire_out o;
    int rc = PERSIA_OK;
    persia_wire_out_init(&o);
    for (size_t i = 0; i < m->n && !rc; i++)
        rc = persia_wire_put_result(&o, &m->parts[i].result,
                                    &m->parts[i].out);
    if (!rc) {
        call->reply(call, &o, many_free, m);
        return;
    }
    persia_wire_out_free(&o);
    many_free(m);
    call->fail(call, rc, persia_err_text());
}

static void many_drop(many *m)
{
    if (atomic_fetch_sub(&m->left, 1) == 1)
        many_reply(m);
}

static void part_reply(rpc_call *call, wire_out *o, void (*done)(void *owner),
                       void *owner)
{
    part *p = (part *)call;
    p->out = *o;
    persia_wire_out_init(o);
    p->done = done;
    p->owner = owner;
    many_drop(p->of);
}

static void part_fail(rpc_call *call, int code, const char *text)
{
    part *p = (part *)call;
    snprintf(p->result.error, sizeof p->result.error, "%s",
             persia_err_name(code));
    snprintf(p->result.text, sizeof p->result.text, "%s", text);
    many_drop(p->of);
}

static void part_peer(rpc_call *call, char *out, size_t room)
{
    rpc_call *all = ((part *)call)->of->call;
    all->peer(all, out, room);
}

static void part_make(many *m, part *to, const wire_part *from)
{
    *to = (part){.of = m,
                 .call = {.method = from->method,
                          .request = from->message,
                          .request_n = from->n,
                          .deadline = m->call->deadline,
                          .admin = m->call->admin,
                          .peer = m->call->peer ? part_peer : NULL,
                          .reply = part_reply,
                          .fail = part_fail}};
}

/* A message that is absent has no bytes; none is NULL. */
static const uint8_t NOTHING[1];

static int many_make(rpc_call *call, wire_many *in, many **out)
{
    wire_memory memory;
    many *m = NULL;
    persia_wire_memory_init(&memory);
    int rc = persia_wire_get_many(call->request, call->request_n, &memory, in);
    if (!rc && !(m = persia_wire_memory_take(&memory, sizeof *m)))
        rc = PERSIA_ENOMEM;
    if (!rc) {
        *m = (many){.call = call, .n = in->parts_n};
        m->parts = persia_wire_memory_take(&memory,
                                           (m->n + 1) * sizeof *m->parts);
        rc = m->parts ? PERSIA_OK : PERSIA_ENOMEM;
    }
    if (rc) {
        persia_wire_memory_free(&memory);
        return rc;
    }
    m->memory = memory;
    atomic_init(&m->left, m->n + 1);
    for (size_t i = 0; i < m->n; i++) {
        part_make(m, &m->parts[i], &in->parts[i]);
        if (!in->parts[i].n)
            m->parts[i].call.request = NOTHING;
    }
    *out = m;
    return PERSIA_OK;
}

/* Hands a call over to its shard.  A shard that is taken out must have been
 * handed none any more: so the lock is held. */
static void hand_over(ps_host *h, uint32_t shard, rpc_call *call)
{
    char text[80];
    size_t at;
    pthread_rwlock_rdlock(&h->lock);
    ps_service *to = find_locked(h, shard, &at);
    if (to && call->method != WIRE_MANY)
        persia_service_handle(to, call);
    pthread_rwlock_unlock(&h->lock);
    if (!to) {
        snprintf(text, sizeof text, "shard %u is not here", shard);
        call->fail(call, PERSIA_EUNAVAILABLE, text);
    } else if (call->method == WIRE_MANY) {
        call->fail(call, PERSIA_EPROTOCOL, "a Many within a Many");
    }
}

static void many_handle(ps_host *h, rpc_call *call)
{
    wire_many in;
    many *m;
    int rc = many_make(call, &in, &m);
    if (rc) {
        char text[256];
        snprintf(text, sizeof text, "%s", persia_err_text());
        call->fail(call, rc, text);
        return;
    }
    for (size_t i = 0; i < m->n; i++)
        hand_over(h, in.parts[i].shard, &m->parts[i].call);
    many_drop(m);
}

/* ---- requests ----------------------------------------------------------- */

void persia_host_handle(void *host, rpc_call *call)
{
    ps_host *h = host;
    if (call->method == WIRE_MANY)
        many_handle(h, call);
    else
        persia_service_handle(h->services[0], call);
}

void persia_host_denied(void *host, const char *method, const char *peer)
{
    const ps_host *h = host;
    persia_service_denied(h->services[0], method, peer);
}
