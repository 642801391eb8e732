/* deadline.c: the times at which a call's sides give up. */
#include "base/base.h"

static const uint64_t LEAVE_NS = 1000000000, ANSWER_NS = 250000000;

uint64_t persia_deadline_later(uint64_t deadline, uint64_t ns)
{
    return ns > PERSIA_FOREVER - deadline ? PERSIA_FOREVER : deadline + ns;
}

uint64_t persia_deadline(uint64_t timeout_ns)
{
    return persia_deadline_later(persia_clock_ns(), timeout_ns);
}

uint64_t persia_deadline_left(uint64_t deadline)
{
    const uint64_t now = persia_clock_ns();
    return deadline > now ? deadline - now : 1;
}

/* gRPC rounds the time left up, by at most a hundredth. */
uint64_t persia_deadline_answer(uint64_t left_ns)
{
    const uint64_t margin = left_ns / 50 + ANSWER_NS;
    const uint64_t most = left_ns / 10;
    return persia_deadline(left_ns - (margin < most ? margin : most));
}

uint64_t persia_deadline_leave(uint64_t deadline)
{
    return persia_deadline_later(deadline, LEAVE_NS);
}
