/* identity.h: the certificates and tokens of a server or a channel (private to
 * rpc).
 *
 * They are renewed while they are in use: those from files belong to a
 * *source*, and persia_rpc_renew() gives new texts to all of its servers and
 * channels.
 */
#ifndef PERSIA_RPC_IDENTITY_H
#define PERSIA_RPC_IDENTITY_H

#include <pthread.h>
#include <stdatomic.h>

#include "rpc/access.h"

typedef struct identity identity;
struct identity {
    uint64_t source; /* 0: it has one user, and no renewal */
    uint32_t users;  /* guarded by the lock of all of them */
    identity *next;  /* the same */
    _Atomic(uint64_t) version; /* grows with each renewal */
    pthread_rwlock_t lock;     /* guards what follows */
    rpc_security texts;        /* its own copies */
    access_list *access;
};

/* The identity of the source, as it is now, or a new one. */
int identity_open(const rpc_security *s, identity **out);
void identity_close(identity *i); /* NULL is fine */
/* The tokens as they are now, for the caller to drop. */
access_list *identity_access(identity *i);

#endif
