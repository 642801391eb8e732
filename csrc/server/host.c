/* host.c: the shards of a process behind one address. */
#include "server/private.h"
#include "server/moves.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A shard that has gone to another server. */
typedef struct gone {
    uint32_t shard;
    uint64_t move; /* the last one of it that is known, or 0 */
    char address[WIRE_NAME];
} gone;

struct ps_host {
    pthread_rwlock_t lock; /* guards what follows; shared while a call is
                              handed over */
    uint32_t first;        /* whose the calls are that name none; UINT32_MAX:
                              of any */
    int moves;             /* shards have moved */
    size_t n, gone_n;
    ps_service **services; /* [n] by the numbers of their shards */
    gone *gone;            /* [gone_n] by their numbers */
    size_t room, gone_room;
    host_moves asked; /* has a lock of its own */
};

/* ---- life --------------------------------------------------------------- */

static uint32_t host_number_of(const ps_service *s)
{
    return persia_shard_no(s->shard);
}

/* The place of a shard among those that are here, or have gone. */
static size_t host_place_locked(const ps_host *h, uint32_t shard)
{
    size_t i = 0;
    while (i < h->n && host_number_of(h->services[i]) < shard)
        i++;
    return i;
}

static size_t gone_place_locked(const ps_host *h, uint32_t shard)
{
    size_t i = 0;
    while (i < h->gone_n && h->gone[i].shard < shard)
        i++;
    return i;
}

/* What their Hello says: those that are here, and those that have gone, for
 * whom the answer is where they are.  One that is alone, and was so from the
 * beginning, says nothing: its clients need not name it. */
static int host_list_here_locked(ps_host *h)
{
    uint64_t here[IDS_SHARDS_MAX];
    size_t n = 0;
    int rc = PERSIA_OK;
    for (size_t i = 0, k = 0; i < h->n || k < h->gone_n;)
        if (k == h->gone_n ||
            (i < h->n && host_number_of(h->services[i]) < h->gone[k].shard))
            here[n++] = host_number_of(h->services[i++]);
        else
            here[n++] = h->gone[k++].shard;
    if (n == 1 && !h->moves)
        n = 0;
    for (size_t i = 0; i < h->n && !rc; i++)
        rc = persia_shard_set_here(h->services[i]->shard, here, n, i > 0);
    return rc;
}

static int host_check_order(ps_service *const *services, size_t n)
{
    for (size_t i = 1; i < n; i++)
        if (host_number_of(services[i - 1]) >= host_number_of(services[i]) ||
            persia_shard_count(services[i]->shard) !=
                persia_shard_count(services[0]->shard))
            return persia_err_set(PERSIA_EARG,
                                  "shards %u and %u of a server are not in "
                                  "order, or not of one job",
                                  host_number_of(services[i - 1]),
                                  host_number_of(services[i]));
    return PERSIA_OK;
}

int persia_host_create(ps_service *const *services, size_t n, ps_host **out)
{
    *out = NULL;
    int rc = host_check_order(services, n);
    ps_host *h = rc ? NULL : calloc(1, sizeof *h);
    if (!rc && (!h || !(h->services = calloc(n + 1, sizeof *h->services))))
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for %zu shards", n);
    if (rc) {
        free(h);
        return rc;
    }
    pthread_rwlock_init(&h->lock, NULL);
    host_moves_init(&h->asked);
    h->n = n;
    h->room = n + 1;
    h->moves = !n;
    h->first = n ? host_number_of(services[0]) : UINT32_MAX;
    if (n)
        memcpy(h->services, services, n * sizeof *services);
    if ((rc = host_list_here_locked(h)))
        persia_host_destroy(h);
    else
        *out = h;
    return rc;
}

void persia_host_destroy(ps_host *h)
{
    if (!h)
        return;
    persia_host_close(h);
    host_moves_free(&h->asked);
    pthread_rwlock_destroy(&h->lock);
    free(h->services);
    free(h->gone);
    free(h);
}

/* With the lock held: NULL: it is not here. */
static ps_service *host_find_locked(const ps_host *h, uint32_t shard)
{
    const size_t at = host_place_locked(h, shard);
    return at < h->n && host_number_of(h->services[at]) == shard
               ? h->services[at]
               : NULL;
}

static gone *find_gone_locked(const ps_host *h, uint32_t shard)
{
    const size_t at = gone_place_locked(h, shard);
    return at < h->gone_n && h->gone[at].shard == shard ? &h->gone[at] : NULL;
}

/* ---- in and out --------------------------------------------------------- */

static int host_add_locked(ps_host *h, ps_service *service)
{
    const uint32_t shard = host_number_of(service);
    const size_t at = host_place_locked(h, shard);
    if (host_find_locked(h, shard))
        return persia_err_set(PERSIA_EARG, "shard %u is here already", shard);
    if (h->n && persia_shard_count(h->services[0]->shard) !=
                    persia_shard_count(service->shard))
        return persia_err_set(PERSIA_EARG, "shard %u is of another job",
                              shard);
    if (h->n == h->room) {
        ps_service **more =
            realloc(h->services, 2 * h->room * sizeof(ps_service *));
        if (!more)
            return persia_err_set(PERSIA_ENOMEM, "no memory for shard %u",
                                  shard);
        h->services = more;
        h->room *= 2;
    }
    memmove(h->services + at + 1, h->services + at,
            (h->n - at) * sizeof *h->services);
    h->services[at] = service;
    h->n++;
    h->moves = 1;
    gone *was = find_gone_locked(h, shard);
    if (was)
        memmove(was, was + 1,
                (size_t)(h->gone + h->gone_n-- - (was + 1)) * sizeof *was);
    return host_list_here_locked(h);
}

int persia_host_add(ps_host *h, ps_service *service)
{
    pthread_rwlock_wrlock(&h->lock);
    int rc = host_add_locked(h, service);
    pthread_rwlock_unlock(&h->lock);
    return rc;
}

/* Notes where a shard is since a move. */
static int host_note_locked(ps_host *h, uint32_t shard, const char *address,
                            uint64_t move)
{
    gone *at = find_gone_locked(h, shard);
    if (strlen(address) >= sizeof at->address || !*address ||
        strpbrk(address, " \n"))
        return persia_err_set(PERSIA_EARG, "'%.80s' is no address", address);
    if (!at) {
        const size_t i = gone_place_locked(h, shard);
        if (h->gone_n == h->gone_room) {
            gone *more = realloc(h->gone, (h->gone_n + 16) * sizeof *more);
            if (!more)
                return persia_err_set(PERSIA_ENOMEM,
                                      "no memory for the place of shard %u",
                                      shard);
            h->gone = more;
            h->gone_room += 16;
        }
        at = h->gone + i;
        memmove(at + 1, at, (h->gone_n++ - i) * sizeof *at);
    }
    at->shard = shard;
    at->move = move;
    snprintf(at->address, sizeof at->address, "%s", address);
    h->moves = 1;
    return PERSIA_OK;
}

int persia_host_remove(ps_host *h, uint32_t shard, const char *address,
                       uint64_t move)
{
    int rc = PERSIA_OK;
    pthread_rwlock_wrlock(&h->lock);
    if (!host_find_locked(h, shard))
        rc = persia_err_set(PERSIA_EARG, "shard %u is not here", shard);
    else if (address)
        rc = host_note_locked(h, shard, address, move);
    if (!rc) {
        const size_t at = host_place_locked(h, shard);
        h->moves = 1;
        h->n--;
        memmove(h->services + at, h->services + at + 1,
                (h->n - at) * sizeof *h->services);
        rc = host_list_here_locked(h);
    }
    pthread_rwlock_unlock(&h->lock);
    return rc;
}

int persia_host_place(ps_host *h, uint32_t shard, const char *address,
                      uint64_t move)
{
    int rc = PERSIA_OK;
    pthread_rwlock_wrlock(&h->lock);
    const gone *known = find_gone_locked(h, shard);
    if (!host_find_locked(h, shard) && (!known || known->move < move))
        rc = host_note_locked(h, shard, address, move);
    if (!rc)
        rc = host_list_here_locked(h);
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
    persia_rpc_count(call, o->bytes);
    p->out = *o;
    persia_wire_out_init(o);
    p->done = done;
    p->owner = owner;
    many_drop(p->of);
}

static void part_fail(rpc_call *call, int code, const char *text)
{
    part *p = (part *)call;
    persia_rpc_count(call, 0);
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
                          .who = m->call->who,
                          .denied = m->call->denied,
                          .began = m->call->began,
                          .times = m->call->times,
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
    call->began = 0; /* its parts are counted, not it */
    *out = m;
    return PERSIA_OK;
}

/* Why a shard does not answer. */
static int host_why_not_locked(const ps_host *h, uint32_t shard)
{
    const gone *to = find_gone_locked(h, shard);
    if (to)
        return persia_err_set(PERSIA_EMOVED, "shard %u has moved to %s", shard,
                              to->address);
    return shard == UINT32_MAX
               ? persia_err_set(PERSIA_EUNAVAILABLE,
                                "this server has no shard yet")
               : persia_err_set(PERSIA_EUNAVAILABLE, "shard %u is not here",
                                shard);
}

static void host_fail(rpc_call *call, int rc)
{
    err_kept error;
    persia_err_keep(&error, rc);
    call->fail(call, rc, error.text);
}

/* Hands a call over to its shard.  A shard that is taken out must have been
 * handed none any more: so the lock is held. */
static void host_hand_over(ps_host *h, uint32_t shard, rpc_call *call)
{
    int rc = PERSIA_OK;
    if (call->method == WIRE_MANY) {
        call->fail(call, PERSIA_EPROTOCOL, "a Many within a Many");
        return;
    }
    if (call->method == WIRE_MOVE) {
        host_moves_add(&h->asked, call);
        return;
    }
    pthread_rwlock_rdlock(&h->lock);
    ps_service *to = host_find_locked(h, shard);
    if (to)
        persia_service_handle(to, call);
    else
        rc = host_why_not_locked(h, shard);
    pthread_rwlock_unlock(&h->lock);
    if (rc)
        host_fail(call, rc);
}

static void many_handle(ps_host *h, rpc_call *call)
{
    wire_many in;
    many *m;
    int rc = many_make(call, &in, &m);
    if (rc) {
        host_fail(call, rc);
        return;
    }
    for (size_t i = 0; i < m->n; i++)
        host_hand_over(h, in.parts[i].shard, &m->parts[i].call);
    many_drop(m);
}

/* ---- requests ----------------------------------------------------------- */

/* Whose a call is that names no shard.  A Hello looks for shards: where the
 * first one has gone, another one says which there are. */
static uint32_t host_unnamed(ps_host *h, uint32_t method)
{
    pthread_rwlock_rdlock(&h->lock);
    uint32_t shard = h->first;
    if (h->n && (shard == UINT32_MAX ||
                 (method == WIRE_HELLO && !host_find_locked(h, shard))))
        shard = host_number_of(h->services[0]);
    if (shard == UINT32_MAX && h->gone_n)
        shard = h->gone[0].shard;
    pthread_rwlock_unlock(&h->lock);
    return shard;
}

void persia_host_handle(void *host, rpc_call *call)
{
    ps_host *h = host;
    if (call->method == WIRE_MANY)
        many_handle(h, call);
    else
        host_hand_over(h, host_unnamed(h, call->method), call);
}

void persia_host_denied(void *host, const char *method, const char *peer,
                        const char *name, const char *reason)
{
    ps_host *h = host;
    pthread_rwlock_rdlock(&h->lock);
    if (h->n)
        persia_service_denied(h->services[0], method, peer, name, reason);
    pthread_rwlock_unlock(&h->lock);
}

/* ---- calls of Move ------------------------------------------------------ */

host_move *persia_host_take(ps_host *h, uint64_t wait_ns)
{
    return host_moves_take(&h->asked, wait_ns);
}

void persia_host_close(ps_host *h)
{
    host_moves_close(&h->asked);
}
