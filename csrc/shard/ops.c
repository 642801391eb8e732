/* ops.c: the methods of a shard. */
#include "shard/ops.h"

static const uint32_t roles[WIRE_METHODS_N] = {
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    [WIRE_##upper] = (who),
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    [WIRE_MANY] = RPC_ALL, /* each of its calls is looked at */
};

const rpc_methods persia_shard_methods = {
    WIRE_SERVICE, persia_wire_paths, WIRE_METHODS_N, 0
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    | ((who) & RPC_USER ? 0 : 1u << WIRE_##upper)
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    | 1u << WIRE_MANY, /* some of its calls may be */
    roles
};
_Static_assert(WIRE_METHODS_N <= 32, "a bit a method");
