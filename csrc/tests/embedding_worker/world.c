/* world.c: see world.h. */
#include "tests/embedding_worker/world.h"

/* ---- calls ---- */

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
pending *start(embedding_worker *s, uint32_t method, wire_out *o)
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
                         .who = &persia_rpc_everyone,
                         .reply = on_reply,
                         .fail = on_fail};
    persia_wire_out_free(o);
    persia_embedding_worker_handle(s, &c->call);
    return c;
}

int wait_for(pending *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->done)
        pthread_cond_wait(&c->answered, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return c->code;
}

void end_call(pending *c)
{
    free((void *)(uintptr_t)c->call.request);
    free(c->data);
    persia_wire_memory_free(&c->memory);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->answered);
    free(c);
}

/* ---- a worker over one shard ---- */

static const char *const own = "own";

void begin_with(world *w, uint64_t queue_limit, uint64_t lease_ns)
{
    tables_config shared = {.threads = 2};
    service_config service = {.name_space = "test", .shards = 1,
                              .message_limit = 1 << 20};
    *w = (world){0};
    assert_int_equal(persia_tables_create(&shared, &w->tables), PERSIA_OK);
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
    embedding_worker_config config = {.servers = w->servers,
                                      .message_limit = 1 << 20,
                                      .queue_limit = queue_limit,
                                      .lease_ns = lease_ns,
                                      .silence_ns = 60 * SECOND,
                                      .loaders = 1,
                                      .jobs = 2};
    assert_int_equal(persia_embedding_worker_create(&config, &w->s),
                     PERSIA_OK);
}

int begin(void **state)
{
    static world w;
    *state = &w;
    begin_with(&w, 1 << 20, 60 * SECOND);
    return 0;
}

int finish_world(void **state)
{
    world *w = *state;
    persia_embedding_worker_destroy(w->s);
    persia_service_destroy(w->shard);
    persia_tables_destroy(w->tables);
    return 0;
}

table_spec spec(void)
{
    return (table_spec){.name = "t", .dim = DIM, .seed = 3,
                        .optimizer = OPTIM_ADAM, .init_a = -1, .init_b = 1,
                        .admission = 1};
}

wire_caller caller(const world *w, uint64_t client)
{
    return (wire_caller){.client = client, .boot = w->boot};
}

int hello(world *w, uint64_t client)
{
    const wire_hello m = {.caller = {.client = client},
                          .version = WIRE_VERSION,
                          .name_space = "test",
                          .world = 1};
    return hello_as(w, &m);
}

int hello_as(world *w, const wire_hello *m)
{
    wire_hello_reply reply;
    pending *c = START(w->s, HELLO, hello, m);
    int rc = wait_for(c);
    assert_int_equal(rc, PERSIA_OK);
    DECODE(c, hello_reply, &reply);
    w->boot = reply.boot;
    end_call(c);
    return rc;
}

int declare(world *w, const char *second)
{
    table_spec t = spec();
    wire_plan_feature features[2] = {
        {.name = "a", .pooling = WORKER_POOL_MEAN, .trainable = 1},
        {.pooling = WORKER_POOL_SUM, .trainable = 1}};
    snprintf(features[1].name, sizeof features[1].name, "%s", second);
    const wire_plan m = {caller(w, 1), &t, 1, features, 2};
    pending *c = START(w->s, DECLARE, plan, &m);
    int rc = wait_for(c);
    end_call(c);
    return rc;
}

const uint64_t ids[IDS] = {1, 2, 2, 5, 9, 9, 1};
const uint64_t offsets[KEYS * SAMPLES + 1] = {0, 2, 2, 3, 5, 5, 7};
static wire_batch_feature names[2] = {{"a"}, {"b"}};
const uint8_t bytes[BYTES] = {1, 2, 3, 4, 5};
static uint64_t shape[1] = {5};
wire_tensor tensor = {"dense", "uint8", shape, 1, 5, bytes};

wire_submit batch(const world *w, uint64_t number)
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
int submit(world *w, const wire_submit *m, uint32_t *status,
                  size_t *done)
{
    wire_submit_reply reply = {0};
    pending *c = START(w->s, SUBMIT, submit, m);
    int rc = wait_for(c);
    if (!rc)
        DECODE(c, submit_reply, &reply);
    *status = reply.status;
    *done = reply.done_n;
    end_call(c);
    return rc;
}

void send_as(world *w, const wire_submit *m)
{
    uint32_t status;
    size_t done;
    assert_int_equal(submit(w, m, &status, &done), PERSIA_OK);
    assert_int_equal(status, SUBMIT_QUEUED);
}

void send_batch(world *w, uint64_t number)
{
    const wire_submit m = batch(w, number);
    send_as(w, &m);
}

size_t beat_as(world *w, const wire_heartbeat *m)
{
    wire_submit_reply reply;
    pending *c = START(w->s, HEARTBEAT, heartbeat, m);
    assert_int_equal(wait_for(c), PERSIA_OK);
    DECODE(c, submit_reply, &reply);
    size_t done = reply.done_n;
    end_call(c);
    return done;
}

/* The loader's sign of life; how many are done. */
size_t beat(world *w, uint64_t epoch, int leaves)
{
    const wire_heartbeat m = {.caller = caller(w, 77), .stream = 5,
                              .settled = w->settled, .epoch = epoch,
                              .leaves = (uint32_t)leaves};
    return beat_as(w, &m);
}

pending *ask(world *w, uint64_t client, uint64_t epoch, uint64_t number)
{
    const wire_take m = {.caller = caller(w, client), .epoch = epoch,
                         .number = number};
    return START(w->s, TAKE, take, &m);
}

/* The answer to a Take; the message stays with *c. */
wire_take_reply take(world *w, uint64_t client, uint64_t number,
                            pending **c)
{
    wire_take_reply reply;
    *c = ask(w, client, 1, number);
    assert_int_equal(wait_for(*c), PERSIA_OK);
    DECODE(*c, take_reply, &reply);
    return reply;
}

uint64_t lease_of(world *w, uint64_t client, uint64_t number,
                         uint64_t *of)
{
    pending *c;
    const wire_take_reply m = take(w, client, number, &c);
    assert_int_equal(m.status, TAKE_BATCH);
    *of = m.number;
    end_call(c);
    return m.lease;
}

optim_hyper adam(void)
{
    return (optim_hyper){.kind = OPTIM_ADAM, .lr = 0.1f, .eps = 1e-8f,
                         .beta1 = 0.9f, .beta2 = 0.99f, .grad_scale = 1};
}

/* [feature][sample][DIM] */
void make_grads(float *out)
{
    for (size_t i = 0; i < (size_t)KEYS * SAMPLES * DIM; i++)
        out[i] = (float)i / 8 - 1;
}

/* Returns a lease; features: how many have gradients. */
int give_back(world *w, uint64_t client, uint64_t lease,
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
    end_call(c);
    return rc;
}

embedding_worker_stats stats_of(world *w)
{
    embedding_worker_stats out;
    persia_embedding_worker_get_stats(w->s, &out);
    return out;
}
