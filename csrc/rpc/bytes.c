/* bytes.c: memory of contiguous messages: each batch has some of some MiB. */
#include "mem/mem.h"
#include "rpc/channel.h"

static mem_pool pool = MEM_POOL((size_t)192 << 20, 32);

void *bytes_take(size_t n)
{
    void *data;
    return persia_mem_pool_take(&pool, n, &data) ? NULL : data;
}

void persia_rpc_reply_free(rpc_reply *r)
{
    persia_mem_pool_give(r->memory);
    *r = (rpc_reply){0};
}
