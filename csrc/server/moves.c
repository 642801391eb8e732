/* moves.c: see moves.h. */
#include "server/moves.h"

#include <stdlib.h>
#include <string.h>

enum { WAITING = 64 };

struct host_move {
    host_move *next;
    rpc_call *call;
    wire_move m;
};

void host_moves_init(host_moves *m)
{
    *m = (host_moves){.first = NULL};
    m->last = &m->first;
    pthread_mutex_init(&m->lock, NULL);
}

void host_moves_free(host_moves *m)
{
    pthread_mutex_destroy(&m->lock);
}

static void moves_fail(rpc_call *call, int rc)
{
    err_kept error;
    persia_err_keep(&error, rc);
    call->fail(call, rc, error.text);
}

static int moves_make(rpc_call *call, host_move **out)
{
    wire_memory memory;
    *out = NULL;
    if (!call->admin)
        return persia_err_set(PERSIA_EDENIED, "Move is administration: it "
                              "needs the administration token");
    host_move *one = calloc(1, sizeof *one);
    if (!one)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a request");
    persia_wire_memory_init(&memory);
    int rc = persia_wire_get_move(call->request, call->request_n, &memory,
                                  &one->m);
    persia_wire_memory_free(&memory);
    one->call = call;
    if (rc)
        free(one);
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
        }
        pthread_mutex_unlock(&m->lock);
        if (rc)
            free(one);
    }
    if (rc)
        moves_fail(call, rc);
}

host_move *host_moves_take(host_moves *m, wire_move *out)
{
    pthread_mutex_lock(&m->lock);
    host_move *one = m->first;
    if (one) {
        m->first = one->next;
        if (!m->first)
            m->last = &m->first;
        m->n--;
        *out = one->m;
    }
    pthread_mutex_unlock(&m->lock);
    return one;
}

void persia_host_give(host_move *one, int rc, const wire_move_reply *reply)
{
    rpc_call *call = one->call;
    wire_out o;
    free(one);
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
    wire_move ignored;
    pthread_mutex_lock(&m->lock);
    m->closed = 1;
    pthread_mutex_unlock(&m->lock);
    while ((one = host_moves_take(m, &ignored)))
        persia_host_give(one,
                         persia_err_set(PERSIA_EUNAVAILABLE,
                                        "the server is stopping"),
                         NULL);
}
