/* ops.c: the methods of a shard. */
#include "shard/ops.h"

const rpc_methods persia_shard_methods = {
    WIRE_SERVICE, persia_wire_paths, WIRE_METHODS_N, 0
#define SHARD_OP(upper, name, message, reply, args, answers, flags)           \
    | ((flags) & OP_ADMIN ? 1u << WIRE_##upper : 0)
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    | 1u << WIRE_MANY /* some of its calls may be */
};
_Static_assert(WIRE_METHODS_N <= 32, "a bit a method");
