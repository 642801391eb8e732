#include "tests/server/help.h"

#include "log/private.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- calls -------------------------------------------------------------- */

struct pending {
    rpc_call call; /* first */
    pthread_mutex_t lock;
    pthread_cond_t answered;
    int done;
    result r;
};

static void finish(pending *c)
{
    pthread_mutex_lock(&c->lock);
    if (c->done)
        abort(); /* answered twice */
    c->done = 1;
    pthread_cond_signal(&c->answered);
    pthread_mutex_unlock(&c->lock);
}

static void on_reply(rpc_call *call, wire_out *o, void (*done)(void *owner),
                     void *owner)
{
    pending *c = (pending *)call;
    c->r.n = o->bytes;
    c->r.data = aligned_alloc(64, (o->bytes + 64) / 64 * 64);
    if (!c->r.data)
        abort();
    persia_wire_out_copy(o, c->r.data);
    persia_wire_out_free(o);
    if (done)
        done(owner);
    finish(c);
}

static void on_fail(rpc_call *call, int code, const char *text)
{
    pending *c = (pending *)call;
    c->r.code = code;
    snprintf(c->r.text, sizeof c->r.text, "%s", text);
    finish(c);
}

pending *call_start(const server *v, uint32_t method, wire_out *o,
                    uint64_t timeout_ns)
{
    return call_start_as(v, method, o, timeout_ns, &persia_rpc_everyone);
}

pending *call_start_as(const server *v, uint32_t method, wire_out *o,
                       uint64_t timeout_ns, const rpc_who *who)
{
    pending *c = calloc(1, sizeof *c);
    void *request = aligned_alloc(64, (o->bytes + 64) / 64 * 64);
    if (!c || !request)
        abort();
    persia_wire_out_copy(o, request);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->answered, NULL);
    persia_wire_memory_init(&c->r.memory);
    c->call = (rpc_call){.method = method,
                         .request = request,
                         .request_n = o->bytes,
                         .deadline = persia_clock_ns() + timeout_ns,
                         .who = who,
                         .reply = on_reply,
                         .fail = on_fail};
    persia_wire_out_free(o);
    persia_service_handle(v->s, &c->call);
    return c;
}

int call_done(pending *c)
{
    pthread_mutex_lock(&c->lock);
    int done = c->done;
    pthread_mutex_unlock(&c->lock);
    return done;
}

result call_wait(pending *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->done)
        pthread_cond_wait(&c->answered, &c->lock);
    pthread_mutex_unlock(&c->lock);
    result r = c->r;
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->answered);
    free((void *)(uintptr_t)c->call.request);
    free(c);
    return r;
}

void result_free(result *r)
{
    free(r->data);
    persia_wire_memory_free(&r->memory);
}

result call(const server *v, uint32_t method, wire_out *o)
{
    return call_wait(call_start(v, method, o, 60 * (uint64_t)SECOND));
}

/* ---- a server ----------------------------------------------------------- */

server server_start(uint32_t shard, uint32_t shards, const char *folder)
{
    return server_limited(shard, shards, folder, 0);
}

server server_limited(uint32_t shard, uint32_t shards, const char *folder,
                      uint64_t limit)
{
    return server_with_lines(shard, shards, folder, limit, 0);
}

static server server_make(service_config *service, const char *folder,
                          uint64_t limit)
{
    server v = {.log = service->log};
    tables_config config = {.threads = 2, .memory_limit = limit};
    memcpy(service->name_space, "test", 5);
    service->message_limit = 64 << 20;
    if (persia_ckpt_root_open(&v.root) ||
        (folder && persia_ckpt_root_set(v.root, folder)))
        fail_msg("%s", persia_err_text());
    service->files = persia_ckpt_root_places(v.root);
    if (persia_tables_create(&config, &v.p) ||
        persia_service_create(v.p, service, &v.s))
        fail_msg("%s", persia_err_text());
    return v;
}

static void server_open_streams(server *s)
{
    const server v = *s;
    for (uint64_t i = 0; i < 8; i++) {
        wire_hello m = {.caller = {.client = 1, .incarnation = 1},
                        .version = WIRE_VERSION,
                        .name_space = "test",
                        .stream = STREAM + i};
        wire_hello_reply reply;
        result r = CALL(&v, HELLO, hello, &m);
        DECODE(&r, hello_reply, &reply);
        s->boot = reply.boot;
        s->lineage = reply.lineage;
        result_free(&r);
    }
}

server server_with_lines(uint32_t shard, uint32_t shards, const char *folder,
                         uint64_t limit, int lines)
{
    service_config service = {.shard = shard, .shards = shards,
                              .lines = lines};
    server v = server_make(&service, folder, limit);
    server_open_streams(&v);
    return v;
}

server server_durable(log_disk *disk, enum log_level level, const char *boot,
                      uint32_t shards, uint64_t from)
{
    log_found found;
    service_config service = {.shards = shards};
    const log_config config = {.owner = {"test", 0, shards},
                               .level = level,
                               .segment = 16384,
                               .limit = 64 << 20};
    if (persia_log_open(disk, &config, &service.log))
        fail_msg("%s", persia_err_text());
    if (boot)
        snprintf(service.log->boot, sizeof service.log->boot, "%s", boot);
    server v = server_make(&service, NULL, 0);
    if (persia_service_replay(v.s, from, &found))
        fail_msg("%s", persia_err_text());
    persia_shard_ready(persia_service_shard(v.s));
    server_open_streams(&v);
    return v;
}

void server_stop(server *v)
{
    persia_service_destroy(v->s);
    persia_log_close(v->log);
    persia_tables_destroy(v->p);
    persia_ckpt_root_close(v->root);
    v->s = NULL;
    v->p = NULL;
    v->root = NULL;
}

wire_caller caller_of(const server *v)
{
    return (wire_caller){.client = 1, .incarnation = 1, .boot = v->boot,
                         .lineage = v->lineage};
}

/* ---- requests ----------------------------------------------------------- */

table_spec spec_of(const char *name, uint32_t dim, uint32_t optimizer)
{
    table_spec spec = {.seed = 17,
                            .dim = dim,
                            .optimizer = optimizer,
                            .init_a = -0.5f,
                            .init_b = 0.5f,
                            .admission = 1};
    snprintf(spec.name, sizeof spec.name, "%s", name);
    return spec;
}

uint32_t declare(const server *v, const table_spec *spec)
{
    wire_declare m = {.caller = caller_of(v), .table = *spec};
    wire_declare_reply reply;
    result r = CALL(v, DECLARE, declare, &m);
    DECODE(&r, declare_reply, &reply);
    result_free(&r);
    return reply.no;
}

void pull(const server *v, uint32_t no, size_t n, const uint64_t *ids,
          float *out)
{
    wire_pull_table t = {no, n, ids};
    wire_pull m = {.caller = caller_of(v), .tables = &t, .tables_n = 1};
    wire_pull_reply reply;
    result r = CALL(v, PULL, pull, &m);
    DECODE(&r, pull_reply, &reply);
    assert_int_equal(reply.tables_n, 1);
    assert_int_equal(reply.tables[0].n, n);
    memcpy(out, reply.tables[0].values, n * reply.tables[0].dim * 4);
    result_free(&r);
}

optim_hyper sgd(float lr)
{
    return (optim_hyper){.kind = OPTIM_SGD, .lr = lr, .grad_scale = 1};
}

wire_push_table push_table(uint32_t no, uint32_t dim, size_t n,
                           const uint64_t *ids, const float *grads,
                           const optim_hyper *hyper)
{
    return (wire_push_table){
        .grads = {.no = no, .dim = dim, .n = n, .values = grads},
        .ids = ids,
        .hyper = *hyper};
}

wire_push push_of(const server *v, uint64_t stream, uint64_t number,
                  wire_push_table *tables, size_t n)
{
    return (wire_push){.caller = caller_of(v),
                       .stream = stream,
                       .number = number,
                       .t = number,
                       .parts = 1,
                       .tables = tables,
                       .tables_n = n};
}

pending *push_start(const server *v, const wire_push *m, uint64_t timeout_ns)
{
    wire_out o = ENCODED(push, m);
    return call_start(v, WIRE_PUSH, &o, timeout_ns);
}

wire_push_reply push_wait(pending *c)
{
    wire_push_reply reply;
    result r = call_wait(c);
    DECODE(&r, push_reply, &reply);
    result_free(&r);
    return reply;
}

wire_push_reply push(const server *v, const wire_push *m)
{
    return push_wait(push_start(v, m, 60 * (uint64_t)SECOND));
}

int push_code(const server *v, const wire_push *m)
{
    result r = CALL(v, PUSH, push, m);
    int code = r.code;
    (void)persia_err_set(code, "%s", r.text);
    result_free(&r);
    return code;
}

wire_ledger ledger_of(const server *v, uint64_t stream)
{
    wire_hello m = {.caller = {.client = 1, .incarnation = 1},
                    .version = WIRE_VERSION,
                    .name_space = "test",
                    .stream = stream};
    wire_hello_reply reply;
    result r = CALL(v, HELLO, hello, &m);
    DECODE(&r, hello_reply, &reply);
    result_free(&r);
    return reply.ledger;
}

wire_stats_reply stats_of(const server *v)
{
    wire_stats m = {.caller = caller_of(v)};
    wire_stats_reply reply;
    result r = CALL(v, STATS, stats, &m);
    DECODE(&r, stats_reply, &reply);
    result_free(&r);
    reply.tables = NULL;
    reply.stats = NULL;
    return reply;
}

uint64_t join(const server *v, uint32_t rank, uint32_t world, int joins,
              uint64_t step)
{
    wire_leave m = {.caller = caller_of(v), .rank = rank, .world = world,
                    .joins = (uint32_t)joins, .step = step};
    wire_leave_reply reply;
    result r = CALL(v, LEAVE, leave, &m);
    DECODE(&r, leave_reply, &reply);
    result_free(&r);
    return reply.step;
}

/* ---- all rows ----------------------------------------------------------- */

typedef struct numbered {
    uint64_t id;
    size_t at;
} numbered;

static int by_id(const void *a, const void *b)
{
    uint64_t x = ((const numbered *)a)->id, y = ((const numbered *)b)->id;
    return x < y ? -1 : x > y;
}

static rows_all rows_make(const rows_all *like, size_t n)
{
    rows_all r = *like;
    r.n = 0;
    r.ids = malloc((n + 1) * 8);
    r.vectors = malloc((n + 1) * r.vector_bytes);
    r.state = malloc((n + 1) * (r.state_floats + 1) * 4);
    r.clocks = malloc((n + 1) * 4);
    if (!r.ids || !r.vectors || !r.state || !r.clocks)
        abort();
    return r;
}

rows_all rows_of(table *const *shards, size_t shards_n)
{
    const table_config *c = persia_table_get_config(shards[0]);
    rows_all like = {.dim = c->dim,
                     .state_floats = persia_table_state_floats(shards[0]),
                     .vector_bytes = vector_size(c->dtype, c->dim)};
    uint64_t total = 0;
    for (size_t i = 0; i < shards_n; i++) {
        table_stats stats;
        persia_table_get_stats(shards[i], &stats);
        total += stats.rows;
    }
    rows_all all = rows_make(&like, total);
    for (size_t i = 0; i < shards_n; i++) {
        table_cut *cut;
        table *t = shards[i];
        size_t n = 1;
        assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
        for (; n; all.n += n)
            assert_int_equal(
                persia_table_cut_next(cut, total - all.n + 1, all.ids + all.n,
                                      all.vectors + all.n * all.vector_bytes,
                                      all.state + all.n * all.state_floats,
                                      all.clocks + all.n, NULL, &n),
                PERSIA_OK);
        persia_table_cut_end(cut);
    }
    numbered *order = malloc((all.n + 1) * sizeof *order);
    if (!order)
        abort();
    for (size_t i = 0; i < all.n; i++)
        order[i] = (numbered){all.ids[i], i};
    qsort(order, all.n, sizeof *order, by_id);
    rows_all sorted = rows_make(&like, all.n);
    for (size_t i = 0; i < all.n; i++) {
        size_t from = order[i].at;
        sorted.ids[i] = all.ids[from];
        sorted.clocks[i] = all.clocks[from];
        memcpy(sorted.vectors + i * all.vector_bytes,
               all.vectors + from * all.vector_bytes, all.vector_bytes);
        memcpy(sorted.state + i * all.state_floats,
               all.state + from * all.state_floats, all.state_floats * 4);
    }
    sorted.n = all.n;
    free(order);
    rows_free(&all);
    return sorted;
}

void rows_free(rows_all *r)
{
    free(r->ids);
    free(r->vectors);
    free(r->state);
    free(r->clocks);
}

void rows_equal(const rows_all *a, const rows_all *b)
{
    assert_int_equal(a->n, b->n);
    for (size_t i = 0; i < a->n; i++) {
        if (a->ids[i] != b->ids[i] || a->clocks[i] != b->clocks[i])
            fail_msg("id %llu, clock %u and id %llu, clock %u",
                     (unsigned long long)a->ids[i], a->clocks[i],
                     (unsigned long long)b->ids[i], b->clocks[i]);
        if (memcmp(a->vectors + i * a->vector_bytes,
                   b->vectors + i * b->vector_bytes, a->vector_bytes))
            fail_msg("vectors of id %llu differ",
                     (unsigned long long)a->ids[i]);
        if (memcmp(a->state + i * a->state_floats,
                   b->state + i * b->state_floats, a->state_floats * 4))
            fail_msg("states of id %llu differ",
                     (unsigned long long)a->ids[i]);
    }
}
