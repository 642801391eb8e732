/* witness.c: updates that embedding workers made for this client.
 *
 * A worker's death must not hide what a server has lost, so who returned the
 * gradients keeps the numbers that workers have acknowledged, by stream.
 * persia_client_look() compares them with the ledgers of all servers: what one
 * of them lacks is lost.  Each number is counted once.
 */
#include "client/private.h"

#include <stdlib.h>

#include "shard/acks.h"

/* The stream that was added first is forgotten beyond. */
enum { STREAMS_MAX = 4096 };

struct witness {
    witness *next;
    uint64_t stream;
    acks acked; /* and not known to be lost */
};

static void witness_free(witness *w)
{
    acks_free(&w->acked);
    free(w);
}

static witness *find_locked(const ps_client *r, uint64_t stream)
{
    witness *w = r->witnesses;
    while (w && w->stream != stream)
        w = w->next;
    return w;
}

/* NULL: no memory. */
static witness *add_locked(ps_client *r, uint64_t stream)
{
    witness *w = calloc(1, sizeof *w), **at = &r->witnesses;
    for (size_t n = 1; *at && n < STREAMS_MAX; n++)
        at = &(*at)->next;
    if (*at) {
        witness_free(*at);
        *at = NULL;
    }
    if (w) {
        w->stream = stream;
        w->next = r->witnesses;
        r->witnesses = w;
    }
    return w;
}

int persia_client_witness(ps_client *r, uint64_t stream, uint64_t number)
{
    pthread_mutex_lock(&r->lock);
    witness *w = find_locked(r, stream);
    if (!w)
        w = add_locked(r, stream);
    int rc = w ? acks_add(&w->acked, number)
               : persia_err_set(PERSIA_ENOMEM,
                                "no memory for the updates of a data loader");
    pthread_mutex_unlock(&r->lock);
    return rc;
}

void client_witnesses_end(ps_client *r)
{
    pthread_mutex_lock(&r->lock);
    witness *w = r->witnesses;
    r->witnesses = NULL;
    pthread_mutex_unlock(&r->lock);
    while (w) {
        witness *next = w->next;
        witness_free(w);
        w = next;
    }
}

/* ---- comparing ---- */

/* What is known of a stream before servers are asked.  *any: there is one. */
static int copy_of(ps_client *r, size_t index, witness *out, int *any)
{
    int rc = PERSIA_OK;
    pthread_mutex_lock(&r->lock);
    const witness *w = r->witnesses;
    while (w && index--)
        w = w->next;
    *any = w != NULL;
    if (w) {
        out->stream = w->stream;
        rc = acks_copy(&w->acked, &out->acked);
    }
    pthread_mutex_unlock(&r->lock);
    return rc;
}

/* How many of them no other thread has counted. */
static uint64_t count_lost(ps_client *r, uint64_t stream, const acks *lost)
{
    pthread_mutex_lock(&r->lock);
    witness *w = find_locked(r, stream);
    const uint64_t n = w ? acks_take(&w->acked, lost) : 0;
    pthread_mutex_unlock(&r->lock);
    return n;
}

static int compare(ps_client *r, const witness *w, uint64_t deadline,
                   uint64_t *n)
{
    acks lost;
    int rc = acks_like(&w->acked, &lost);
    for (uint32_t i = 0; i < r->servers_n && !rc; i++) {
        wire_hello_reply reply;
        rc = client_ask_ledger(r, r->servers[i], w->stream, deadline, &reply);
        if (!rc)
            acks_lacking(&w->acked, &reply.ledger, &lost);
    }
    if (!rc)
        *n += count_lost(r, w->stream, &lost);
    acks_free(&lost);
    return rc;
}

int client_compare_witnesses(ps_client *r, uint64_t deadline)
{
    uint64_t lost = 0;
    int rc = PERSIA_OK, any = 1;
    for (size_t i = 0; !rc && any; i++) {
        witness w = {0};
        rc = copy_of(r, i, &w, &any);
        if (!rc && any)
            rc = compare(r, &w, deadline, &lost);
        acks_free(&w.acked);
    }
    client_note_elsewhere(r, lost);
    return rc;
}
