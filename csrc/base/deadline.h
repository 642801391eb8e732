/* deadline.h: how long a call may take.  Part of base.h.
 *
 * A caller has a timeout; its calls have a deadline, a time of
 * persia_clock_ns().  Three sides keep it, each at its own time:
 *
 *     before it     a server answers, and says what it waited for
 *     at it         the request ends
 *     a second late the caller leaves the call behind
 *
 * so that of two answers the better informed one arrives first.
 */
#ifndef PERSIA_BASE_DEADLINE_H
#define PERSIA_BASE_DEADLINE_H

#include <stdint.h>

#include "base/system.h"

#ifdef __cplusplus
extern "C" {
#endif

/* So long from now on, or from `deadline` on; at most PERSIA_FOREVER. */
PERSIA_API uint64_t persia_deadline(uint64_t timeout_ns);
PERSIA_API uint64_t persia_deadline_later(uint64_t deadline, uint64_t ns);

/* The timeout of a request that begins now; at least 1 ns. */
PERSIA_API uint64_t persia_deadline_left(uint64_t deadline);
/* When a server answers whose caller waits for so long. */
PERSIA_API uint64_t persia_deadline_answer(uint64_t left_ns);
/* When a caller waits no longer. */
PERSIA_API uint64_t persia_deadline_leave(uint64_t deadline);

#ifdef __cplusplus
}
#endif
#endif
