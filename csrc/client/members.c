/* members.c: this rank, and what it knows of others, in the steps of all
 * ranks.
 *
 * A server does not write down which ranks have left: its snapshot may be
 * older, of another pass.  A rank that has left may be silent for long, or be
 * gone.  So each answer to a part names those that have left, and the ranks
 * that train on name them to a server that was started again.
 */
#include <string.h>

#include "client/private.h"

static const uint64_t HURRY_NS = 1000000000;

typedef struct joining {
    ps_client *r;
    int joins;
    uint32_t move;
    uint64_t step, applied;
} joining;

static void members_fill_join(void *ctx, request *q)
{
    const joining *j = ctx;
    q->args.leave = (wire_leave){.caller = q->caller, .rank = j->r->rank,
                                 .world = j->r->world,
                                 .joins = (uint32_t)j->joins,
                                 .step = j->step, .move = j->move,
                                 .stream = atomic_load(&j->r->stream)};
}

static int members_accept_join(void *ctx, request *q)
{
    joining *j = ctx;
    const wire_leave_reply *m = q->reply.message;
    if (m->step > j->applied)
        j->applied = m->step;
    return PERSIA_OK;
}

static int members_tell_all(joining *j, uint64_t limit_ns)
{
    ps_client *r = j->r;
    fan f = {.method = WIRE_LEAVE,
             .fill = members_fill_join,
             .accept = members_accept_join,
             .ctx = j,
             .limit_ns = limit_ns};
    uint64_t deadline = limit_ns ? persia_deadline(limit_ns)
                                 : client_deadline(r);
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

static void members_fill_pass(void *ctx, request *q)
{
    const client_update *u = ctx;
    q->args.leave = (wire_leave){.caller = q->caller, .rank = u->part,
                                 .world = u->parts, .group = u->group};
}

static int members_accept_pass(void *ctx, request *q)
{
    (void)ctx;
    (void)q;
    return PERSIA_OK;
}

int persia_client_pass(ps_client *r, const client_update *update)
{
    client_update u = *update;
    fan f = {.method = WIRE_LEAVE,
             .fill = members_fill_pass,
             .accept = members_accept_pass,
             .ctx = &u};
    call *k = call_take(r);
    if (!k)
        return PERSIA_ENOMEM;
    int rc = fan_prepare(k, NULL, r->servers_n);
    if (!rc)
        rc = fan_run(k, &f, client_deadline(r));
    call_give(k);
    return rc;
}

int persia_client_join(ps_client *r, uint64_t step, uint64_t *applied)
{
    joining j = {.r = r, .joins = 1, .step = step};
    int rc = client_check_mixture(r, 0);
    if (!rc)
        rc = members_tell_all(&j, 0);
    *applied = j.applied;
    return rc;
}

int persia_client_leave(ps_client *r, int hurry)
{
    joining j = {.r = r};
    hurry |= atomic_load(&r->ends) == END_ALL;
    for (uint32_t i = 0; i < r->servers_n; i++) {
        server *to = r->servers[i];
        pthread_mutex_lock(&to->lock);
        hurry |= to->failed;
        pthread_mutex_unlock(&to->lock);
    }
    return members_tell_all(&j,
                            hurry && r->timeout_ns > HURRY_NS ? HURRY_NS : 0);
}

void sync_note_left(ps_client *r, uint32_t moves, const wire_push_reply *m)
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

int sync_join_again(ps_client *r, server *to, wire_caller who,
                    uint64_t deadline)
{
    wire_leave m = {.caller = who, .rank = r->rank, .world = r->world,
                    .stream = atomic_load(&r->stream)};
    uint64_t left[SYNC_RANKS];
    shard_reply reply;
    m.left = left;
    pthread_mutex_lock(&r->lock);
    m.move = r->moves;
    m.joins = r->joined != 0;
    m.step = r->joined_step;
    for (uint32_t i = 0; i < SYNC_RANKS; i++)
        if (r->left[i])
            left[m.left_n++] = i;
    pthread_mutex_unlock(&r->lock);
    /* What it had answered this rank does not send again, so the parts of
     * others are lost there, too. */
    pthread_mutex_lock(&to->lock);
    if (to->step > m.step)
        m.step = to->step;
    pthread_mutex_unlock(&to->lock);
    if (!m.move)
        return PERSIA_OK;
    int rc = persia_shard_wait(to->ref, WIRE_LEAVE, &m, deadline, &reply);
    persia_shard_release(&reply);
    return rc;
}
