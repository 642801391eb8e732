/* retry.h: which calls that have failed are made again, and after which pause.
 * Part of base.h.
 *
 * For how long is the caller's: until its deadline (client/fan.c), its timeout
 * (link/link.c), or for a number of offers (embedding_worker/offers.c).
 */
#ifndef PERSIA_BASE_RETRY_H
#define PERSIA_BASE_RETRY_H

#include <stdint.h>

#include "base/system.h"

#ifdef __cplusplus
extern "C" {
#endif

enum persia_retried {
    RETRY_REQUEST, /* of a client to a server */
    RETRY_CALL,    /* of a rank or a loader to an embedding worker: here, or at
                      another one */
    RETRY_SUBMIT,  /* of a batch that a loader has kept */
    RETRY_OFFER,   /* of a batch whose lookup or update failed */
    RETRY_KINDS
};
enum persia_remedy {
    RETRY_NEVER,
    RETRY_LATER, /* after a pause */
    RETRY_GREET  /* after a Hello */
};
PERSIA_API enum persia_remedy persia_retry(enum persia_retried what, int rc);

/* How long to wait before a request is sent again that has been sent `tries`
 * times, from 1 on: 10 ms, doubled each time, at most `most` ns.  Half of it
 * is chance, by this number of the client and the time, so that many clients
 * do not ask at once. */
PERSIA_API uint64_t persia_backoff_ns(unsigned tries, uint64_t most,
                                      uint64_t client);

#ifdef __cplusplus
}
#endif
#endif
