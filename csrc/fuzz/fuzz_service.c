/* Requests made of arbitrary bytes, one after the other to one server, or to
 * an embedding worker over it: each is answered once, and nothing crashes.
 *
 * An input is a row of [ method | flags | length, 2 bytes | request ]; bit 0
 * of flags: unused, bit 1: the deadline is over, bit 2: it is to the worker,
 * bits 3 and 4: who calls. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "embedding_worker/embedding_worker.h"
#include "link/link.h"
#include "server/server.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { CALLS = 64, HEAD = 4 };

typedef struct fuzz_call {
    rpc_call call; /* first */
    int to_worker;
    _Atomic(int) answers;
} fuzz_call;

static void on_reply(rpc_call *call, wire_out *o, void (*done)(void *owner),
                     void *owner)
{
    unsigned char *all = malloc(o->bytes + 1);
    if (!all)
        abort();
    persia_wire_out_copy(o, all);
    free(all);
    persia_wire_out_free(o);
    if (done)
        done(owner);
    ((fuzz_call *)call)->answers++;
}

static void on_fail(rpc_call *call, int code, const char *text)
{
    if (code <= PERSIA_OK || code >= PERSIA_ERROR_COUNT || !*text ||
        code == PERSIA_EINTERNAL)
        abort();
    ((fuzz_call *)call)->answers++;
}

static const rpc_who callers[] = {
    {.roles = RPC_ALL},
    {.roles = RPC_TRAIN},
    {.roles = RPC_READ | RPC_PUBLISH, .tables = "a*,t?"},
    {.roles = 0},
};

/* The next request of the input; its memory is the caller's. */
static int next_call(const uint8_t **data, size_t *size, fuzz_call *c,
                     void **memory)
{
    if (*size < HEAD)
        return 0;
    const uint8_t *head = *data;
    size_t n = (size_t)head[2] | (size_t)head[3] << 8;
    n = n < *size - HEAD ? n : *size - HEAD;
    *memory = aligned_alloc(64, (n + 64) & ~(size_t)63);
    if (!*memory)
        abort();
    memcpy(*memory, head + HEAD, n);
    *data += HEAD + n;
    *size -= HEAD + n;
    c->answers = 0;
    c->to_worker = head[1] >> 2 & 1;
    c->call = (rpc_call){
        .method = head[0] % ((c->to_worker ? (int)WORKER_METHODS_N
                                           : (int)WIRE_METHODS_N) + 1),
        .request = *memory,
        .request_n = n,
        .deadline = head[1] & 2 ? 1 : persia_clock_ns() + 60000000000u,
        .who = &callers[head[1] >> 3 & 3],
        .reply = on_reply,
        .fail = on_fail};
    return 1;
}

static embedding_worker *start_worker(ps_service *s)
{
    static const char *const own = "own";
    embedding_worker *out;
    const embedding_worker_config config = {
        .servers = {.threads = 1, .addresses = &own, .addresses_n = 1,
                    .own = persia_service_shard(s), .name_space = "fuzz",
                    .world = 1, .timeout_ns = 1000000000,
                    .message_limit = 1 << 20},
        .message_limit = 1 << 20, .queue_limit = 1 << 20,
        .lease_ns = 1000000, .loaders = 1, .jobs = 1};
    if (persia_embedding_worker_create(&config, &out))
        abort();
    return out;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static fuzz_call calls[CALLS];
    void *memory[CALLS];
    size_t n = 0;
    tables *p;
    ps_service *s;
    ps_host *h;
    tables_config config = {.threads = 1, .memory_limit = 64 << 20};
    service_config service = {.name_space = "fuzz", .shards = 1,
                              .message_limit = 1 << 20};
    if (persia_tables_create(&config, &p) ||
        persia_service_create(p, &service, &s) ||
        persia_host_create(&s, 1, &h))
        abort();
    embedding_worker *w = start_worker(s);
    while (n < CALLS && next_call(&data, &size, &calls[n], &memory[n])) {
        fuzz_call *c = &calls[n++];
        if (c->to_worker)
            persia_embedding_worker_handle(w, &c->call);
        else
            persia_host_handle(h, &c->call);
    }
    persia_embedding_worker_destroy(w);
    persia_host_close(h);
    persia_service_destroy(s);
    persia_host_destroy(h);
    persia_tables_destroy(p);
    for (size_t i = 0; i < n; i++) {
        if (calls[i].answers != 1)
            abort();
        free(memory[i]);
    }
    return 0;
}
