/* private.h: what the parts of a server share (private).
 *
 *   server.c    life, the timer
 *   calls.c     messages to calls of the shard, answers to messages
 *   slow.c      the last calls that took long
 *
 * Order of locks: the shard's, then one of these.
 */
#ifndef PERSIA_SERVER_PRIVATE_H
#define PERSIA_SERVER_PRIVATE_H

#include "base/lines.h"
#include "server/server.h"
#include "server/slow.h"

#include <pthread.h>
#include <stdatomic.h>

struct ps_service {
    shard *shard;
    shard_ref *ref; /* direct */
    _Atomic(int) closed;

    persia_timer timer;
    job_ends ends;  /* has a lock of its own; so has: */
    process_lines lines;
    slow_calls slow;
};

/* The timer looks at this time already: of the shard's environment.  0: at
 * once. */
void service_wake(void *service, uint64_t at);

#endif
