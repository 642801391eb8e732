/* members.c: this rank, and what it hears of others, in the steps of all
 * ranks.
 *
 * Who has left, a server does not write down: its snapshot may be older, of
 * another pass.  A rank that has left may be silent for long, or be gone.  So
 * each answer to a part names those that have left, and the ranks that go on
 * tell them to a server that comes back.
 */
#include <string.h>

#include "client/remote.h"

static const uint64_t HURRY_NS = 1000000000;

typedef struct joining {
    remote *r;
    int joins;
    uint32_t move;
    uint64_t step, applied;
} joining;

static int encode_join(void *ctx, const request *q, wire_out *o)
{
    const joining *j = ctx;
    wire_leave m = {.caller = q->caller, .rank = j->r->rank,
                    .world = j->r->world, .joins = (uint32_t)j->joins,
                    .step = j->step, .move = j->move,
                    .stream = atomic_load(&j->r->stream)};
    return wire_put_leave(o, &m);
}

static int accept_join(void *ctx, request *q)
{
    joining *j = ctx;
    wire_leave_reply m;
    int rc = wire_get_leave_reply(q->reply.data, q->reply.n,
                                  &q->call->memory, &m);
    if (rc)
        return remote_bad_reply(q->to, err_text());
    if (m.step > j->applied)
        j->applied = m.step;
    return PERSIA_OK;
}

static int tell_all(joining *j, uint64_t limit_ns)
{
    remote *r = j->r;
    fan f = {.method = WIRE_LEAVE, .encode = encode_join,
             .accept = accept_join, .ctx = j, .limit_ns = limit_ns};
    uint64_t deadline = limit_ns ? clock_ns() + limit_ns : remote_deadline(r);
    call *k = call_take(r);
    if (!k)
        return PERSIA_ENOMEM;
    pthread_mutex_lock(&r->lock);
    j->move = ++r->moves;
    r->joined = j->joins;
    r->joined_step = j->step;
    memset(r->left, 0, sizeof r->left); /* of the steps until now */
    pthread_mutex_unlock(&r->lock);
    for (uint32_t i = 0; i < r->servers_n; i++) {
        pthread_mutex_lock(&r->servers[i]->lock);
        r->servers[i]->step = 0;
        pthread_mutex_unlock(&r->servers[i]->lock);
    }
    int rc = fan_prepare(k, NULL, r->servers_n);
    if (!rc)
        rc = fan_run(k, &f, deadline);
    call_give(k);
    return rc;
}

int remote_join(remote *r, uint64_t step, uint64_t *applied)
{
    joining j = {.r = r, .joins = 1, .step = step};
    int rc = remote_check_restores(r, 0);
    if (!rc)
        rc = tell_all(&j, 0);
    *applied = j.applied;
    return rc;
}

int remote_leave(remote *r, int hurry)
{
    joining j = {.r = r};
    hurry |= atomic_load(&r->ends) == END_ALL;
    for (uint32_t i = 0; i < r->servers_n; i++) {
        server *to = r->servers[i];
        pthread_mutex_lock(&to->lock);
        hurry |= to->failed;
        pthread_mutex_unlock(&to->lock);
    }
    return tell_all(&j, hurry && r->timeout_ns > HURRY_NS ? HURRY_NS : 0);
}

void sync_note_left(remote *r, uint32_t moves, const wire_push_reply *m)
{
    if (!m->left_n)
        return;
    pthread_mutex_lock(&r->lock);
    /* Else it is of another pass: they may have joined again. */
    for (size_t i = 0; i < m->left_n && r->moves == moves && r->joined; i++)
        if (m->left[i] < SYNC_RANKS)
            r->left[m->left[i]] = 1;
    pthread_mutex_unlock(&r->lock);
}

/* A list of those who have left; the lock is held. */
static int list_left(const remote *r, wire_memory *memory, wire_leave *m)
{
    for (uint32_t i = 0; i < SYNC_RANKS; i++)
        m->left_n += r->left[i];
    if (!m->left_n)
        return PERSIA_OK;
    m->left = wire_memory_take(memory, m->left_n * sizeof *m->left);
    if (!m->left)
        return PERSIA_ENOMEM;
    for (uint32_t i = 0, n = 0; i < SYNC_RANKS; i++)
        if (r->left[i])
            m->left[n++] = i;
    return PERSIA_OK;
}

int sync_join_again(remote *r, server *to, wire_caller who,
                    uint64_t deadline)
{
    wire_leave m = {.caller = who, .rank = r->rank, .world = r->world,
                    .stream = atomic_load(&r->stream)};
    wire_memory memory;
    wire_out o;
    rpc_reply reply;
    wire_memory_init(&memory);
    pthread_mutex_lock(&r->lock);
    m.move = r->moves;
    m.joins = r->joined != 0;
    m.step = r->joined_step;
    int rc = list_left(r, &memory, &m);
    pthread_mutex_unlock(&r->lock);
    /* What it had answered this rank does not send again, so the parts of
     * others are lost there, too. */
    pthread_mutex_lock(&to->lock);
    if (to->step > m.step)
        m.step = to->step;
    pthread_mutex_unlock(&to->lock);
    wire_out_init(&o);
    if (!rc && m.move)
        rc = wire_put_leave(&o, &m);
    wire_memory_free(&memory);
    if (rc || !m.move) {
        wire_out_free(&o);
        return rc;
    }
    rc = remote_ask(to, WIRE_LEAVE, &o, deadline, &reply);
    if (!rc)
        rpc_reply_free(&reply);
    return rc;
}
