/* retry.c: see retry.h. */
#include "base/base.h"

#include <assert.h>

/* The error is RETRY_NEVER for what is not here. */
static const unsigned char remedies[PERSIA_ERROR_COUNT][RETRY_KINDS] = {
    [PERSIA_EUNAVAILABLE] = {RETRY_LATER, RETRY_LATER, RETRY_LATER,
                             RETRY_LATER},
    /* A request has taken all the time that its caller has. */
    [PERSIA_ETIMEOUT] = {RETRY_NEVER, RETRY_LATER, RETRY_LATER, RETRY_LATER},
    [PERSIA_ESTALE] = {RETRY_GREET, RETRY_GREET, RETRY_LATER, RETRY_NEVER},
    [PERSIA_ENOMEM] = {[RETRY_SUBMIT] = RETRY_LATER,
                       [RETRY_OFFER] = RETRY_LATER},
    [PERSIA_EINCOMPLETE] = {[RETRY_OFFER] = RETRY_LATER},
    [PERSIA_EINTR] = {[RETRY_SUBMIT] = RETRY_LATER},
    [PERSIA_EREPLACED] = {[RETRY_SUBMIT] = RETRY_LATER},
};

enum persia_remedy persia_retry(enum persia_retried what, int rc)
{
    return rc > 0 && rc < PERSIA_ERROR_COUNT ? remedies[rc][what]
                                             : RETRY_NEVER;
}

uint64_t persia_backoff_ns(unsigned tries, uint64_t most, uint64_t client)
{
    const uint64_t first = 10000000;
    assert(tries && most >= 2);
    const unsigned doubled = tries - 1 < 16 ? tries - 1 : 16;
    const uint64_t pause = first << doubled < most ? first << doubled : most;
    const uint64_t chance = (persia_clock_ns() ^ client) * 0x9E3779B97F4A7C15u;
    return pause / 2 + (chance >> 24) % (pause / 2);
}
