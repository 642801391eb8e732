/* peers.c: see peers.h. */
#include "client/peers.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* The texts of a config. */
enum { TEXTS = 6 };

typedef struct known {
    struct known *next;
    peer *peer;
    char address[];
} known;

struct peers {
    _Atomic(uint32_t) users;
    rpc_channel_config config;
    char *texts[TEXTS];
    pthread_mutex_t lock; /* guards: */
    known *first;         /* they stay until the end */
    int closed;
};

/* ---- its life ---- */

static void peers_destroy(peers *p)
{
    while (p->first) {
        known *one = p->first;
        p->first = one->next;
        peer_drop(one->peer);
        free(one);
    }
    for (int i = 0; i < TEXTS; i++)
        free(p->texts[i]);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

int peers_open(const rpc_channel_config *config, peers **out)
{
    peers *p = calloc(1, sizeof *p);
    *out = NULL;
    if (!p)
        return persia_err_set(PERSIA_ENOMEM, "no memory for servers");
    atomic_init(&p->users, 1);
    pthread_mutex_init(&p->lock, NULL);
    p->config = *config;
    rpc_security *s = &p->config.security;
    const char **texts[TEXTS] = {&s->ca,    &s->cert,        &s->key,
                                 &s->token, &s->admin_token, &s->server_name};
    for (int i = 0; i < TEXTS; i++) {
        if (*texts[i] && !(p->texts[i] = strdup(*texts[i]))) {
            peers_destroy(p);
            return persia_err_set(PERSIA_ENOMEM, "no memory for servers");
        }
        *texts[i] = p->texts[i];
    }
    *out = p;
    return PERSIA_OK;
}

peers *peers_get(peers *p)
{
    atomic_fetch_add(&p->users, 1);
    return p;
}

void peers_drop(peers *p)
{
    if (atomic_fetch_sub(&p->users, 1) == 1)
        peers_destroy(p);
}

/* ---- servers ---- */

static int peers_add_locked(peers *p, const char *address, peer **out)
{
    const size_t n = strlen(address) + 1;
    rpc_channel *channel;
    known *one = malloc(sizeof *one + n);
    if (!one)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a server");
    memcpy(one->address, address, n);
    p->config.address = one->address;
    int rc = persia_rpc_channel_open(&p->config, &channel);
    if (!rc)
        rc = peer_open(channel, one->address, &one->peer);
    if (rc) {
        free(one);
        return rc;
    }
    one->next = p->first;
    p->first = one;
    *out = one->peer;
    return PERSIA_OK;
}

int peers_find(peers *p, const char *address, peer **out)
{
    int rc = PERSIA_OK;
    *out = NULL;
    pthread_mutex_lock(&p->lock);
    for (known *one = p->first; one && !*out; one = one->next)
        if (!strcmp(one->address, address))
            *out = one->peer;
    if (p->closed)
        rc = persia_err_set(PERSIA_ECLOSED, "the channel was closed");
    else if (!*out)
        rc = peers_add_locked(p, address, out);
    pthread_mutex_unlock(&p->lock);
    return rc;
}

/* From this one on they do not change. */
static known *peers_first_of(peers *p, int close)
{
    pthread_mutex_lock(&p->lock);
    known *first = p->first;
    p->closed |= close;
    pthread_mutex_unlock(&p->lock);
    return first;
}

peer *peers_behind(peers *p, const peer *one)
{
    const known *first = peers_first_of(p, 0), *k = first;
    while (k && k->peer != one)
        k = k->next;
    k = k && k->next ? k->next : first;
    return k->peer;
}

void peers_flush(peers *p)
{
    for (const known *one = peers_first_of(p, 0); one; one = one->next)
        peer_flush(one->peer);
}

void peers_close(peers *p)
{
    for (const known *one = peers_first_of(p, 1); one; one = one->next)
        peer_close(one->peer);
}
