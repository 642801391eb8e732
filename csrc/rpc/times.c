/* times.c: how long calls take. */
#include "rpc/channel.h"

const uint64_t persia_rpc_bounds_ns[RPC_BOUNDS] = {
    100000,    250000,    500000,     1000000,    2500000,   5000000,
    10000000,  25000000,  50000000,   100000000,  250000000, 500000000,
    1000000000, 2500000000, 5000000000, 10000000000};

static void times_add(_Atomic(uint64_t) *to, uint64_t n)
{
    atomic_fetch_add_explicit(to, n, memory_order_relaxed);
}

void times_count_call(rpc_times *t, uint64_t began, uint64_t started)
{
    if (!began || !started)
        return;
    times_add(&t->waited, started - began);
    times_add(&t->worked, persia_clock_ns() - started);
}

void persia_rpc_count(const rpc_call *call, size_t bytes)
{
    const rpc_times *t = call->times;
    if (!t || !call->began || call->method >= t->n)
        return;
    struct rpc_method_times *m = &t->methods[call->method];
    const uint64_t ns = persia_clock_ns() - call->began;
    size_t i = 0;
    while (i < RPC_BOUNDS && ns > persia_rpc_bounds_ns[i])
        i++;
    times_add(&m->calls[i], 1);
    times_add(&m->ns, ns);
    times_add(&m->in, call->request_n);
    times_add(&m->out, bytes);
}
