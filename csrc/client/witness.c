/* witness.c: updates that embedding workers made for this client.
 *
 * A worker's death must not hide what a server has lost, so who returned the
 * gradients keeps the numbers that workers have acknowledged, by stream.
 * persia_client_look() compares them with the ledgers of all servers: what one
 * of them lacks is lost.  Each is counted once a server.
 */
#include "client/private.h"

#include <stdlib.h>

/* The stream that was added first is forgotten beyond. */
enum { STREAMS_MAX = 4096 };

struct witness {
    witness *next;
    uint64_t stream;
    acks acked;
    acks *lost; /* [servers] those that were counted; or NULL: none was */
    uint32_t servers_n;
};

static void witness_free(witness *w)
{
    for (uint32_t i = 0; i < w->servers_n; i++)
        acks_free(&w->lost[i]);
    free(w->lost);
    acks_free(&w->acked);
    free(w);
}

static witness *witness_find_locked(const ps_client *r, uint64_t stream)
{
    witness *w = r->witnesses;
    while (w && w->stream != stream)
        w = w->next;
    return w;
}

/* NULL: no memory. */
static witness *witness_add_locked(ps_client *r, uint64_t stream)
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
    witness *w = witness_find_locked(r, stream);
    if (!w)
        w = witness_add_locked(r, stream);
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
static int witness_copy_of(ps_client *r, size_t index, witness *out, int *any)
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

/* Those that were not counted before. */
static int count_locked(const ps_client *r, witness *w, uint32_t shard,
                        const acks *lost, uint64_t *n)
{
    if (!w->lost && !(w->lost = calloc(r->servers_n, sizeof *w->lost)))
        return persia_err_set(PERSIA_ENOMEM, "no memory to compare updates");
    w->servers_n = r->servers_n;
    return acks_count(&w->acked, lost, &w->lost[shard], n);
}

/* never: see client_note_elsewhere(). */
static int witness_compare_with(ps_client *r, const witness *w, uint32_t shard,
                                uint64_t deadline, uint64_t *n,
                                const server **never)
{
    server *to = r->servers[shard];
    const uint64_t before = *n;
    wire_hello_reply reply;
    acks lost;
    int rc = client_ask_ledger(r, to, w->stream, deadline, &reply);
    if (!rc)
        rc = acks_like(&w->acked, &lost);
    if (rc)
        return rc;
    acks_lacking(&w->acked, &reply.ledger, &lost);
    pthread_mutex_lock(&r->lock);
    witness *now = witness_find_locked(r, w->stream);
    if (now)
        rc = count_locked(r, now, shard, &lost, n);
    pthread_mutex_unlock(&r->lock);
    acks_free(&lost);
    pthread_mutex_lock(&to->lock);
    if (*n > before && server_has_lost_nothing(to, &reply))
        *never = to;
    pthread_mutex_unlock(&to->lock);
    return rc;
}

static int witness_compare(ps_client *r, const witness *w, uint64_t deadline,
                           uint64_t *n, const server **never)
{
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < r->servers_n && !rc; i++)
        rc = witness_compare_with(r, w, i, deadline, n, never);
    return rc;
}

int client_compare_witnesses(ps_client *r, uint64_t deadline)
{
    uint64_t lost = 0;
    const server *never = NULL;
    int rc = PERSIA_OK, any = 1;
    for (size_t i = 0; !rc && any; i++) {
        witness w = {0};
        rc = witness_copy_of(r, i, &w, &any);
        if (!rc && any)
            rc = witness_compare(r, &w, deadline, &lost, &never);
        acks_free(&w.acked);
    }
    client_note_elsewhere(r, lost, never);
    return rc;
}
