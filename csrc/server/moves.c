/* moves.c: see moves.h. */
#include "server/moves.h"

#include <stdlib.h>
#include <string.h>

enum { WAITING = 64 };

struct host_move {
    host_move *next;
    rpc_call *call;
    wire_move m;
    wire_memory memory; /* of m, beside the request */
};

void host_moves_init(host_moves *m)
{
    *m = (host_moves){.first = NULL};
    m->last = &m->first;
    pthread_mutex_init(&m->lock, NULL);
    persia_cond_init(&m->more);
}

void host_moves_free(host_moves *m)
{
    pthread_cond_destroy(&m->more);
    pthread_mutex_destroy(&m->lock);
}

static void moves_fail(rpc_call *call, int rc)
{
    err_kept error;
    persia_err_keep(&error, rc);
    call->fail(call, rc, error.text);
}

static void moves_drop(host_move *one)
{
    persia_wire_memory_free(&one->memory);
    free(one);
}

static int moves_make(rpc_call *call, host_move **out)
{
    *out = NULL;
    int rc = persia_rpc_may(&persia_shard_methods, call);
    if (rc)
        return rc;
    host_move *one = calloc(1, sizeof *one);
    if (!one)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a request");
    persia_wire_memory_init(&one->memory);
    rc = persia_wire_get_move(call->request, call->request_n,
                                  &one->memory, &one->m);
    one->call = call;
    if (rc)
        moves_drop(one);
    else
        *out = one;
    return rc;
}

void host_moves_add(host_moves *m, rpc_call *call)
{
    host_move *one;
    int rc = moves_make(call, &one);
    if (!rc) {
        pthread_mutex_lock(&m->lock);
        if (m->closed || m->n == WAITING) {
            rc = persia_err_set(PERSIA_EUNAVAILABLE,
                                "the server takes no calls of Move now");
        } else {
            *m->last = one;
            m->last = &one->next;
            m->n++;
            pthread_cond_signal(&m->more);
        }
        pthread_mutex_unlock(&m->lock);
        if (rc)
            moves_drop(one);
    }
    if (rc)
        moves_fail(call, rc);
}

host_move *host_moves_take(host_moves *m, uint64_t wait_ns)
{
    const uint64_t until = persia_clock_ns() + wait_ns;
    pthread_mutex_lock(&m->lock);
    while (wait_ns && !m->first && !m->closed &&
           persia_cond_wait_until(&m->more, &m->lock, until) == 0)
        ;
    host_move *one = m->first;
    if (one) {
        m->first = one->next;
        if (!m->first)
            m->last = &m->first;
        m->n--;
    }
    pthread_mutex_unlock(&m->lock);
    return one;
}

const wire_move *persia_host_message(const host_move *one)
{
    return &one->m;
}

void persia_host_give(host_move *one, int rc, const wire_move_reply *reply)
{
    rpc_call *call = one->call;
    wire_out o;
    moves_drop(one);
    persia_wire_out_init(&o);
    if (!rc)
        rc = persia_wire_put_move_reply(&o, reply);
    if (!rc) {
        call->reply(call, &o, NULL, NULL);
        return;
    }
    err_kept error;
    persia_err_keep(&error, rc);
    persia_wire_out_free(&o);
    call->fail(call, rc, error.text);
}

void host_moves_close(host_moves *m)
{
    host_move *one;
    pthread_mutex_lock(&m->lock);
    m->closed = 1;
    pthread_cond_broadcast(&m->more);
    pthread_mutex_unlock(&m->lock);
    while ((one = host_moves_take(m, 0)))
        persia_host_give(one,
                         persia_err_set(PERSIA_EUNAVAILABLE,
                                        "the server is stopping"),
                         NULL);
}
