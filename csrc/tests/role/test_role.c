/* The embedding worker behind calls that need no network, over a shard in
 * this process: what it looks up and applies is what a client of that shard
 * looks up and applies. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "role/role.h"
#include "server/server.h"
#include "pool/pool.h"
#include "worker/worker.h"

#define SECOND ((uint64_t)1000000000)
enum { DIM = 4, SAMPLES = 3, KEYS = 2, IDS = 7, WIDTH = 2 * DIM };

/* ---- calls ---- */

typedef struct pending {
    rpc_call call; /* first */
    pthread_mutex_t lock;
    pthread_cond_t answered;
    int done, code;
    void *data;
    size_t n;
    wire_memory memory;
} pending;

static void finish(pending *c)
{
    pthread_mutex_lock(&c->lock);
    assert_false(c->done);
    c->done = 1;
    pthread_cond_signal(&c->answered);
    pthread_mutex_unlock(&c->lock);
}

static void on_reply(rpc_call *call, wire_out *o, void (*done)(void *owner),
                     void *owner)
{
    pending *c = (pending *)call;
    c->n = o->bytes;
    c->data = aligned_alloc(64, (o->bytes + 64) & ~(size_t)63);
    persia_wire_out_copy(o, c->data);
    persia_wire_out_free(o);
    if (done)
        done(owner);
    finish(c);
}

static void on_fail(rpc_call *call, int code, const char *text)
{
    pending *c = (pending *)call;
    (void)text;
    c->code = code;
    finish(c);
}

/* o is taken over. */
static pending *start(role_service *s, uint32_t method, wire_out *o)
{
    pending *c = calloc(1, sizeof *c);
    void *request = aligned_alloc(64, (o->bytes + 64) & ~(size_t)63);
    assert_true(c && request);
    persia_wire_out_copy(o, request);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->answered, NULL);
    persia_wire_memory_init(&c->memory);
    c->call = (rpc_call){.method = method,
                         .request = request,
                         .request_n = o->bytes,
                         .deadline = persia_clock_ns() + 60 * SECOND,
                         .reply = on_reply,
                         .fail = on_fail};
    persia_wire_out_free(o);
    persia_role_handle(s, &c->call);
    return c;
}

static int wait_for(pending *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->done)
        pthread_cond_wait(&c->answered, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return c->code;
}

static void end(pending *c)
{
    free((void *)(uintptr_t)c->call.request);
    free(c->data);
    persia_wire_memory_free(&c->memory);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->answered);
    free(c);
}

#define START(s, method, message, m)                                          \
    __extension__({                                                           \
        wire_out o_;                                                          \
        persia_wire_out_init(&o_);                                            \
        assert_int_equal(persia_wire_put_##message(&o_, m), PERSIA_OK);       \
        start(s, ROLE_##method, &o_);                                         \
    })
#define DECODE(c, message, to)                                                \
    assert_int_equal(persia_wire_get_##message((c)->data, (c)->n,             \
                                               &(c)->memory, to),             \
                     PERSIA_OK)

/* ---- a worker over one shard ---- */

typedef struct world {
    ps *tables;
    ps_service *shard;
    client_config servers;
    role_service *s;
    uint64_t boot;
    uint64_t number;  /* of the last Take */
    uint64_t settled; /* by the loader */
} world;

static const char *const own = "own";

static void begin_with(world *w, uint64_t queue_limit, uint64_t lease_ns)
{
    ps_config config = {.threads = 2};
    service_config service = {.name_space = "test", .shards = 1,
                              .message_limit = 1 << 20};
    *w = (world){0};
    assert_int_equal(persia_ps_create(&config, &w->tables), PERSIA_OK);
    assert_int_equal(persia_service_create(w->tables, &service, &w->shard),
                     PERSIA_OK);
    w->servers = (client_config){.threads = 1,
                                 .addresses = &own,
                                 .addresses_n = 1,
                                 .own = persia_service_shard(w->shard),
                                 .name_space = "test",
                                 .world = 1,
                                 .timeout_ns = 10 * SECOND,
                                 .message_limit = 1 << 20};
    role_config role = {.servers = w->servers,
                        .message_limit = 1 << 20,
                        .queue_limit = queue_limit,
                        .lease_ns = lease_ns,
                        .silence_ns = 60 * SECOND,
                        .loaders = 1,
                        .jobs = 2};
    assert_int_equal(persia_role_create(&role, &w->s), PERSIA_OK);
}

static int begin(void **state)
{
    static world w;
    *state = &w;
    begin_with(&w, 1 << 20, 60 * SECOND);
    return 0;
}

static int finish_world(void **state)
{
    world *w = *state;
    persia_role_destroy(w->s);
    persia_service_destroy(w->shard);
    persia_ps_destroy(w->tables);
    return 0;
}

static table_spec spec(void)
{
    return (table_spec){.name = "t", .dim = DIM, .seed = 3,
                        .optimizer = OPTIM_ADAM, .init_a = -1, .init_b = 1,
                        .admission = 1};
}

static wire_caller caller(const world *w, uint64_t client)
{
    return (wire_caller){.client = client, .boot = w->boot};
}

static int hello(world *w, uint64_t client)
{
    const wire_hello m = {.caller = {.client = client},
                          .version = WIRE_VERSION,
                          .name_space = "test",
                          .world = 1};
    wire_hello_reply reply;
    pending *c = START(w->s, HELLO, hello, &m);
    int rc = wait_for(c);
    assert_int_equal(rc, PERSIA_OK);
    DECODE(c, hello_reply, &reply);
    w->boot = reply.boot;
    end(c);
    return rc;
}

static int declare(world *w, const char *second)
{
    table_spec t = spec();
    wire_plan_feature features[2] = {
        {.name = "a", .pooling = ROLE_POOL_MEAN, .trainable = 1},
        {.pooling = ROLE_POOL_SUM, .trainable = 1}};
    snprintf(features[1].name, sizeof features[1].name, "%s", second);
    const wire_plan m = {caller(w, 1), &t, 1, features, 2};
    pending *c = START(w->s, DECLARE, plan, &m);
    int rc = wait_for(c);
    end(c);
    return rc;
}

static const uint64_t ids[IDS] = {1, 2, 2, 5, 9, 9, 1};
static const uint64_t offsets[KEYS * SAMPLES + 1] = {0, 2, 2, 3, 5, 5, 7};
static wire_batch_feature names[2] = {{"a"}, {"b"}};
static const uint8_t bytes[5] = {1, 2, 3, 4, 5};
static uint64_t shape[1] = {5};
static wire_tensor tensor = {"dense", "uint8", shape, 1, 5, bytes};

static wire_submit batch(const world *w, uint64_t number)
{
    return (wire_submit){.caller = caller(w, 77),
                         .stream = 5,
                         .number = number,
                         .settled = w->settled,
                         .samples = SAMPLES,
                         .features = names,
                         .features_n = KEYS,
                         .ids = {IDS, ids},
                         .offsets = {KEYS * SAMPLES + 1, offsets},
                         .tensors = &tensor,
                         .tensors_n = 1};
}

/* Its code; *status, *done: how many are done. */
static int submit(world *w, const wire_submit *m, uint32_t *status,
                  size_t *done)
{
    wire_submit_reply reply = {0};
    pending *c = START(w->s, SUBMIT, submit, m);
    int rc = wait_for(c);
    if (!rc)
        DECODE(c, submit_reply, &reply);
    *status = reply.status;
    *done = reply.done_n;
    end(c);
    return rc;
}

static void send_as(world *w, const wire_submit *m)
{
    uint32_t status;
    size_t done;
    assert_int_equal(submit(w, m, &status, &done), PERSIA_OK);
    assert_int_equal(status, SUBMIT_QUEUED);
}

static void send(world *w, uint64_t number)
{
    const wire_submit m = batch(w, number);
    send_as(w, &m);
}

/* The loader's sign of life; how many are done. */
static size_t beat(world *w, uint64_t epoch, int leaves)
{
    const wire_heartbeat m = {.caller = caller(w, 77), .stream = 5,
                              .settled = w->settled, .epoch = epoch,
                              .leaves = (uint32_t)leaves};
    wire_submit_reply reply;
    pending *c = START(w->s, HEARTBEAT, heartbeat, &m);
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, submit_reply, &reply);
    size_t done = reply.done_n;
    end(c);
    return done;
}

static pending *ask(world *w, uint64_t client, uint64_t pass, uint64_t number)
{
    const wire_take m = {.caller = caller(w, client), .pass = pass,
                         .number = number};
    return START(w->s, TAKE, take, &m);
}

/* The answer to a Take; the message stays with *c. */
static wire_take_reply take(world *w, uint64_t client, uint64_t number,
                            pending **c)
{
    wire_take_reply reply;
    *c = ask(w, client, 1, number);
    assert_int_equal(wait_for(*c), PERSIA_OK);
    DECODE(*c, take_reply, &reply);
    return reply;
}

static uint64_t lease_of(world *w, uint64_t client, uint64_t number,
                         uint64_t *of)
{
    pending *c;
    const wire_take_reply m = take(w, client, number, &c);
    assert_int_equal(m.status, TAKE_BATCH);
    *of = m.number;
    end(c);
    return m.lease;
}

static optim_hyper adam(void)
{
    return (optim_hyper){.kind = OPTIM_ADAM, .lr = 0.1f, .eps = 1e-8f,
                         .beta1 = 0.9f, .beta2 = 0.99f, .grad_scale = 1};
}

/* [feature][sample][DIM] */
static void make_grads(float *out)
{
    for (size_t i = 0; i < (size_t)KEYS * SAMPLES * DIM; i++)
        out[i] = (float)i / 8 - 1;
}

/* Returns a lease; features: how many have gradients. */
static int give_back(world *w, uint64_t client, uint64_t lease,
                     uint32_t reason, size_t features, uint32_t *status)
{
    float grads[KEYS * SAMPLES * DIM];
    wire_values values[KEYS];
    optim_hyper hyper = adam();
    wire_return_reply reply = {0};
    make_grads(grads);
    for (uint32_t i = 0; i < KEYS; i++)
        values[i] = (wire_values){.no = i, .dim = DIM, .n = SAMPLES,
                                  .values = grads + i * SAMPLES * DIM};
    const wire_return m = {.caller = caller(w, client),
                           .lease = lease,
                           .parts = 1,
                           .reason = reason,
                           .t = 7,
                           .grads = values,
                           .grads_n = features,
                           .hypers = &hyper,
                           .hypers_n = 1};
    pending *c = START(w->s, RETURN, return, &m);
    int rc = wait_for(c);
    if (!rc)
        DECODE(c, return_reply, &reply);
    *status = reply.status;
    end(c);
    return rc;
}

static role_stats stats_of(world *w)
{
    role_stats out;
    persia_role_get_stats(w->s, &out);
    return out;
}

/* ---- what a client of the shard does ---- */

typedef struct direct {
    ps_client *c;
    worker *w;
    uint32_t plan;
} direct;

static direct direct_begin(const world *w, uint32_t features)
{
    direct d;
    client_config config = w->servers;
    table_config table;
    uint32_t no;
    int created;
    plan_feature f[2] = {{"a", 0, 0, POOL_MEAN, 1}, {"b", 1, 0, POOL_SUM, 1}};
    config.stream = 99;
    persia_table_config_init(&table);
    table.spec = spec();
    assert_int_equal(persia_client_create(&config, &d.c), PERSIA_OK);
    assert_int_equal(persia_worker_create(d.c, &d.w), PERSIA_OK);
    assert_int_equal(persia_client_declare(d.c, &table, &no, &created),
                     PERSIA_OK);
    assert_int_equal(
        persia_worker_plan(d.w, PLAN_BAGS, KEYS, f, features, &d.plan),
        PERSIA_OK);
    return d;
}

static void direct_end(direct *d)
{
    persia_worker_destroy(d->w);
    persia_client_destroy(d->c);
}

static const id_batch direct_batch = {IDS, SAMPLES, (const int64_t *)ids,
                                      (const int64_t *)offsets, NULL};

static void direct_rows(const direct *d, float *out)
{
    const uint64_t all[] = {1, 2, 5, 9};
    uint8_t found[4];
    assert_int_equal(persia_client_get(d->c, 0, 4, all, out, NULL, found),
                     PERSIA_OK);
}

/* ---- tests ---- */

static void a_batch_comes_with_its_embeddings(void **state)
{
    world *w = *state;
    pending *c;
    float want[SAMPLES * WIDTH];
    hello(w, 1);
    pending *early = ask(w, 1, 1, 1); /* before there is a batch, or a plan */
    send(w, 1);
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    assert_int_equal(wait_for(early), PERSIA_OK);
    wire_take_reply m;
    DECODE(early, take_reply, &m);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.stream, 5);
    assert_int_equal(m.number, 1);
    assert_int_equal(m.samples, SAMPLES);
    assert_int_equal(m.tensors_n, 1);
    assert_string_equal(m.tensors[0].name, "dense");
    assert_memory_equal(m.tensors[0].data, bytes, 5);
    direct d = direct_begin(w, 2);
    assert_int_equal(persia_worker_forward(d.w, d.plan, &direct_batch, 0, want,
                                           WIDTH, NULL, NULL),
                     PERSIA_OK);
    for (size_t f = 0; f < KEYS; f++)
        for (size_t s = 0; s < SAMPLES; s++)
            assert_memory_equal((const float *)m.values[f].values + s * DIM,
                                want + s * WIDTH + f * DIM,
                                DIM * sizeof *want);
    direct_end(&d);
    uint64_t lease = m.lease;
    end(early);
    m = take(w, 1, 1, &c); /* the same request gives the same batch */
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.lease, lease);
    assert_int_equal(m.number, 1);
    end(c);
}

static void check_grads(world *w, uint32_t features)
{
    world other;
    float grads[KEYS * SAMPLES * DIM], rows[SAMPLES * WIDTH];
    float got[4 * DIM], want[4 * DIM];
    uint64_t of;
    uint32_t status;
    worker_counts counts;
    hello(w, 1);
    declare(w, "b");
    send(w, 1);
    const uint64_t lease = lease_of(w, 1, 1, &of);
    assert_int_equal(give_back(w, 1, lease, RETURN_TRAINED, features, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_DONE);
    begin_with(&other, 1 << 20, SECOND); /* a shard of its own */
    direct d = direct_begin(&other, features);
    make_grads(grads);
    for (size_t f = 0; f < features; f++)
        for (size_t s = 0; s < SAMPLES; s++)
            memcpy(rows + s * features * DIM + f * DIM,
                   grads + (f * SAMPLES + s) * DIM, DIM * sizeof *rows);
    const worker_grad g = {.plan = d.plan, .batch = direct_batch,
                           .grad = rows, .stride = features * DIM};
    const client_update update = {.number = 1, .parts = 1, .t = 7};
    optim_args optim = {.hyper = adam(), .step = 1};
    assert_int_equal(persia_worker_backward(d.w, &g, 1, &update, &optim, 1,
                                            &counts),
                     PERSIA_OK);
    direct_rows(&d, want);
    direct_end(&d);
    void *ended = &other;
    finish_world(&ended);
    d = direct_begin(w, 2);
    direct_rows(&d, got);
    direct_end(&d);
    assert_memory_equal(got, want, sizeof got);

    assert_int_equal(give_back(w, 1, lease, RETURN_TRAINED, features, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_BEFORE);
    assert_int_equal(persia_ps_updates(w->tables), 1);
    assert_int_equal(stats_of(w).trained, 1);
    assert_int_equal(stats_of(w).bytes, 0);
}

static void gradients_are_applied_once(void **state)
{
    check_grads(*state, 2);
}

static void some_features_may_have_gradients(void **state)
{
    check_grads(*state, 1);
}

static void a_loader_hears_what_is_done(void **state)
{
    world *w = *state;
    uint64_t of;
    uint32_t status;
    size_t done;
    hello(w, 1);
    declare(w, "b");
    send(w, 1);
    send(w, 1); /* sent again */
    send(w, 2);
    assert_int_equal(stats_of(w).submitted, 2);
    uint64_t first = lease_of(w, 1, 1, &of), second = lease_of(w, 1, 2, &of);
    assert_int_equal(of, 2);
    give_back(w, 1, second, RETURN_SKIPPED, 0, &status);
    wire_submit m = batch(w, 3);
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(done, 1);
    give_back(w, 1, first, RETURN_TRAINED, 2, &status);
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(done, 2);
    w->settled = 2;
    m = batch(w, 4);
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(done, 0);
    assert_int_equal(stats_of(w).skipped, 1);
}

static void a_batch_is_offered_again(void **state)
{
    world *w = *state;
    uint64_t of;
    uint32_t status;
    hello(w, 1);
    declare(w, "b");
    send(w, 1);
    send(w, 2);
    uint64_t lease = lease_of(w, 1, 1, &of);
    give_back(w, 1, lease, RETURN_UNUSED, 0, &status);
    assert_int_equal(status, RETURNED_DONE);
    lease = lease_of(w, 1, 2, &of);
    assert_int_equal(of, 1); /* before those that came later */
    hello(w, 2);             /* another process of the rank */
    uint64_t again = lease_of(w, 2, 1, &of);
    assert_int_equal(of, 1);
    assert_int_equal(give_back(w, 1, lease, RETURN_TRAINED, 2, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_GONE);
    assert_int_equal(persia_ps_updates(w->tables), 0);
    pending *c = ask(w, 1, 1, 3); /* of the earlier process */
    assert_int_equal(wait_for(c), PERSIA_ECLOSED);
    end(c);
    assert_int_equal(give_back(w, 2, again, RETURN_TRAINED, 2, &status),
                     PERSIA_OK);
    assert_int_equal(status, RETURNED_DONE);
    role_stats s = stats_of(w);
    assert_int_equal(s.late, 1);
    assert_int_equal(s.again, 2);
    assert_int_equal(s.ranks, 1);
}

static void a_lease_ends_by_time(void **state)
{
    world w;
    void *ended = &w;
    uint64_t of;
    uint32_t status;
    (void)state;
    begin_with(&w, 1 << 20, SECOND / 100);
    hello(&w, 1);
    declare(&w, "b");
    send(&w, 1);
    uint64_t lease = lease_of(&w, 1, 1, &of);
    while (stats_of(&w).again == 0)
        ;
    lease_of(&w, 1, 2, &of);
    assert_int_equal(of, 1);
    give_back(&w, 1, lease, RETURN_TRAINED, 2, &status);
    assert_int_equal(status, RETURNED_GONE);
    finish_world(&ended);
}

static void a_full_queue_makes_loaders_wait(void **state)
{
    world w = {0};
    void *ended = &w;
    uint64_t of;
    uint32_t status;
    size_t done;
    (void)state;
    wire_out o;
    persia_wire_out_init(&o);
    wire_submit m = batch(&w, 1);
    m.caller.boot = 0;
    assert_int_equal(persia_wire_put_submit(&o, &m), PERSIA_OK);
    begin_with(&w, 2 * o.bytes - 1, 60 * SECOND);
    persia_wire_out_free(&o);
    assert_int_equal(submit(&w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(status, SUBMIT_QUEUED);
    m.number = 2;
    assert_int_equal(submit(&w, &m, &status, &done), PERSIA_OK);
    assert_int_equal(status, SUBMIT_FULL);
    pending *c = START(w.s, SUBMIT, submit, &m);
    hello(&w, 1);
    declare(&w, "b");
    give_back(&w, 1, lease_of(&w, 1, 1, &of), RETURN_TRAINED, 2, &status);
    assert_int_equal(wait_for(c), PERSIA_OK);
    end(c);
    assert_int_equal(stats_of(&w).queued, 1);
    uint8_t large[4096] = {0};
    tensor.n = sizeof large;
    tensor.data = large;
    m.number = 3;
    assert_int_equal(submit(&w, &m, &status, &done), PERSIA_ELIMIT);
    tensor.n = sizeof bytes;
    tensor.data = bytes;
    finish_world(&ended);
}

static void a_pass_ends_with_its_loaders(void **state)
{
    world *w = *state;
    uint64_t of;
    uint32_t status;
    hello(w, 1);
    declare(w, "b");
    send(w, 1);
    beat(w, 2, 0);
    wire_submit m = batch(w, 2); /* of the next epoch */
    m.epoch = 2;
    send_as(w, &m);
    give_back(w, 1, lease_of(w, 1, 1, &of), RETURN_TRAINED, 2, &status);
    for (int i = 0; i < 2; i++) {
        pending *c;
        wire_take_reply reply = take(w, 1, 2, &c);
        assert_int_equal(reply.status, TAKE_END);
        end(c);
    }
    pending *c = ask(w, 1, 2, 3);
    wire_take_reply reply;
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, take_reply, &reply);
    assert_int_equal(reply.status, TAKE_BATCH);
    assert_int_equal(reply.number, 2);
    assert_int_equal(reply.epoch, 2);
    end(c);
    c = ask(w, 1, 2, 4); /* there may be more */
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, take_reply, &reply);
    assert_int_equal(reply.status, TAKE_EMPTY);
    end(c);
}

static void what_is_wrong_is_refused(void **state)
{
    world *w = *state;
    uint32_t status;
    size_t done;
    uint64_t of;
    pending *c = ask(w, 1, 1, 1);
    assert_int_equal(wait_for(c), PERSIA_ESTALE); /* no Hello */
    end(c);
    wire_hello other = {.version = WIRE_VERSION, .name_space = "other"};
    c = START(w->s, HELLO, hello, &other);
    assert_int_equal(wait_for(c), PERSIA_EMISMATCH);
    end(c);
    hello(w, 1);
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    assert_int_equal(declare(w, "b"), PERSIA_OK);
    assert_int_equal(declare(w, "c"), PERSIA_EMISMATCH);
    wire_submit m = batch(w, 1);
    m.features_n = 1;
    m.offsets.n = SAMPLES + 1;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_EFEATURE);
    const uint64_t fall[KEYS * SAMPLES + 1] = {0, 2, 1, 3, 5, 5, 7};
    m = batch(w, 1);
    m.offsets.offsets = fall;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_EOFFSETS);
    m = batch(w, 1);
    m.ids.n = IDS - 1;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_EOFFSETS);
    m = batch(w, 1);
    m.caller.boot++;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_ESTALE);
    send(w, 1); /* the number was not used */
    const uint64_t lease = lease_of(w, 1, 1, &of);
    wire_return wrong = {
        .caller = caller(w, 1), .lease = lease, .parts = 1};
    c = START(w->s, RETURN, return, &wrong);
    assert_int_equal(wait_for(c), PERSIA_EARG); /* no hyper-parameters */
    end(c);
    assert_int_equal(stats_of(w).failed, 1);
    assert_int_equal(stats_of(w).leased, 0);
}

static void what_servers_have_is_not_offered(void **state)
{
    world *w = *state;
    uint64_t of;
    uint32_t status;
    size_t done;
    hello(w, 1);
    declare(w, "b");
    send(w, 1);
    give_back(w, 1, lease_of(w, 1, 1, &of), RETURN_TRAINED, 2, &status);
    persia_role_destroy(w->s);
    role_config role = {.servers = w->servers, .message_limit = 1 << 20,
                        .queue_limit = 1 << 20, .lease_ns = 60 * SECOND,
                        .silence_ns = 60 * SECOND, .loaders = 1, .jobs = 2};
    assert_int_equal(persia_role_create(&role, &w->s), PERSIA_OK);
    hello(w, 1);
    declare(w, "b");
    send(w, 1); /* the loader did not hear that it was done */
    send(w, 2);
    pending *c;
    wire_take_reply m = take(w, 1, 1, &c);
    assert_int_equal(m.status, TAKE_EMPTY);
    end(c);
    m = take(w, 1, 1, &c);
    assert_int_equal(m.status, TAKE_BATCH);
    assert_int_equal(m.number, 2);
    end(c);
    wire_submit again = batch(w, 2);
    assert_int_equal(submit(w, &again, &status, &done), PERSIA_OK);
    assert_int_equal(done, 1);
}

static void the_end_fails_what_waits(void **state)
{
    world *w = *state;
    hello(w, 1);
    pending *c = ask(w, 1, 1, 1);
    persia_role_close(w->s);
    assert_int_equal(wait_for(c), PERSIA_EUNAVAILABLE);
    end(c);
    wire_submit m = batch(w, 1);
    uint32_t status;
    size_t done;
    assert_int_equal(submit(w, &m, &status, &done), PERSIA_EUNAVAILABLE);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, finish_world)
    const struct CMUnitTest tests[] = {
        TEST(a_batch_comes_with_its_embeddings),
        TEST(gradients_are_applied_once),
        TEST(some_features_may_have_gradients),
        TEST(a_loader_hears_what_is_done),
        TEST(a_batch_is_offered_again),
        cmocka_unit_test(a_lease_ends_by_time),
        cmocka_unit_test(a_full_queue_makes_loaders_wait),
        TEST(a_pass_ends_with_its_loaders),
        TEST(what_is_wrong_is_refused),
        TEST(what_servers_have_is_not_offered),
        TEST(the_end_fails_what_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
