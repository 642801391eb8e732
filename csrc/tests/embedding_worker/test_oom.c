/* An embedding worker while memory runs out: each attempt to get some fails in
 * turn, while a batch goes from its loader through a rank into the tables.  A
 * request fails by name and can be repeated, and the batch is trained once;
 * under a sanitizer nothing leaks. */
#include "tests/embedding_worker/world.h"
#include "tests/fault.h"

enum { ROOM = 8192, TRIES = 4, BATCHES = 2 };

/* A request and its answer, without memory of the heap. */
typedef struct asked {
    rpc_call call; /* first */
    pthread_mutex_t lock;
    pthread_cond_t answered;
    int done, code;
    size_t n;
    _Alignas(64) char request[ROOM];
    _Alignas(64) char data[ROOM];
} asked;

static void asked_end(asked *c)
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
    asked *c = (asked *)call;
    assert_true(o->bytes <= ROOM);
    c->n = o->bytes;
    persia_wire_out_copy(o, c->data);
    persia_wire_out_free(o);
    if (done)
        done(owner);
    asked_end(c);
}

static void on_fail(rpc_call *call, int code, const char *text)
{
    asked *c = (asked *)call;
    (void)text;
    c->code = code;
    asked_end(c);
}

/* o is taken over; its code.  Nothing of this thread fails but what the worker
 * does. */
static int ask_once(embedding_worker *s, uint32_t method, wire_out *o,
                    asked *c)
{
    assert_true(o->bytes <= ROOM);
    *c = (asked){.call = {.method = method,
                          .who = &persia_rpc_everyone,
                          .request = c->request,
                          .request_n = o->bytes,
                          .deadline = persia_clock_ns() + 60 * SECOND,
                          .reply = on_reply,
                          .fail = on_fail},
                 .lock = PTHREAD_MUTEX_INITIALIZER,
                 .answered = PTHREAD_COND_INITIALIZER};
    persia_wire_out_copy(o, c->request);
    persia_wire_out_free(o);
    fault_spares = 0;
    persia_embedding_worker_handle(s, &c->call);
    fault_spares = 1;
    pthread_mutex_lock(&c->lock);
    while (!c->done)
        pthread_cond_wait(&c->answered, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return c->code;
}

static int refused; /* requests */

/* Until it is answered: memory is there again after some tries. */
#define ASK(w, method, message, m, c)                                         \
    for (int try_ = 1;; try_++) {                                             \
        wire_out o_;                                                          \
        persia_wire_out_init(&o_);                                            \
        assert_int_equal(persia_wire_put_##message(&o_, m), PERSIA_OK);       \
        const int rc_ = ask_once((w)->s, WORKER_##method, &o_, c);            \
        if (!rc_)                                                             \
            break;                                                            \
        refused++;                                                            \
        if (rc_ != PERSIA_ENOMEM)                                             \
            fail_msg("%s: %s", #method, persia_err_name(rc_));                \
        if (try_ >= TRIES)                                                    \
            (void)fault_end();                                                \
    }
#define ANSWER(c, message, memory, to)                                        \
    assert_int_equal(                                                         \
        persia_wire_get_##message((c)->data, (c)->n, memory, to), PERSIA_OK)

static void say_hello(world *w, asked *c)
{
    const wire_hello m = {.caller = {.client = 1}, .version = WIRE_VERSION,
                          .name_space = "test", .world = 1};
    wire_hello_reply reply;
    wire_memory memory;
    persia_wire_memory_init(&memory);
    ASK(w, HELLO, hello, &m, c)
    ANSWER(c, hello_reply, &memory, &reply);
    w->boot = reply.boot;
    persia_wire_memory_free(&memory);
}

static void say_plan(world *w, asked *c)
{
    table_spec t = spec();
    wire_plan_feature features[2] = {
        {.name = "a", .pooling = WORKER_POOL_MEAN, .trainable = 1},
        {.name = "b", .pooling = WORKER_POOL_SUM, .trainable = 1}};
    const wire_plan m = {caller(w, 1), &t, 1, features, 2};
    ASK(w, DECLARE, plan, &m, c)
}

static void send_one(world *w, uint64_t number, asked *c)
{
    const wire_submit m = batch(w, number);
    wire_submit_reply reply = {0};
    wire_memory memory;
    persia_wire_memory_init(&memory);
    ASK(w, SUBMIT, submit, &m, c)
    ANSWER(c, submit_reply, &memory, &reply);
    assert_int_equal(reply.status, SUBMIT_QUEUED);
    persia_wire_memory_free(&memory);
}

/* The lease of the next batch. */
static uint64_t take_one(world *w, uint64_t number, asked *c)
{
    const wire_take m = {.caller = caller(w, 1), .epoch = 1,
                         .number = number};
    uint64_t lease = 0;
    while (!lease) {
        wire_take_reply reply = {0};
        wire_memory memory;
        persia_wire_memory_init(&memory);
        ASK(w, TAKE, take, &m, c)
        ANSWER(c, take_reply, &memory, &reply);
        if (reply.status == TAKE_BATCH)
            lease = reply.lease;
        persia_wire_memory_free(&memory);
    }
    return lease;
}

/* What the gradients sum up to, then they are applied. */
static void return_one(world *w, uint64_t lease, asked *c)
{
    float grads[KEYS * SAMPLES * DIM];
    wire_values values[KEYS];
    optim_hyper hyper = adam();
    wire_return_reply reply = {0};
    wire_memory memory;
    make_grads(grads);
    for (uint32_t i = 0; i < KEYS; i++)
        values[i] = (wire_values){.no = i, .dim = DIM, .n = SAMPLES,
                                  .values = grads + i * SAMPLES * DIM};
    const wire_return m = {.caller = caller(w, 1), .lease = lease, .parts = 1,
                           .reason = RETURN_TRAINED, .t = 7, .grads = values,
                           .grads_n = KEYS, .hypers = &hyper, .hypers_n = 1};
    ASK(w, SUMS, return, &m, c)
    ASK(w, RETURN, return, &m, c)
    persia_wire_memory_init(&memory);
    ANSWER(c, return_reply, &memory, &reply);
    /* Its answer may have been lost. */
    assert_true(reply.status == RETURNED_DONE ||
                reply.status == RETURNED_BEFORE);
    persia_wire_memory_free(&memory);
}

/* All that a batch meets. */
static void live(world *w)
{
    static asked c;
    const wire_heartbeat beats = {.stream = 5, .epoch = 1};
    const wire_stats stats = {0};
    say_hello(w, &c);
    say_plan(w, &c);
    for (uint64_t number = 1; number <= BATCHES; number++) {
        send_one(w, number, &c);
        return_one(w, take_one(w, number, &c), &c);
    }
    wire_heartbeat beating = beats;
    beating.caller = caller(w, 77);
    ASK(w, HEARTBEAT, heartbeat, &beating, &c)
    wire_stats asks = stats;
    asks.caller = caller(w, 1);
    ASK(w, STATS, stats, &asks, &c)
}

static void rows_of(const world *w, float *out)
{
    const uint64_t all[] = {1, 2, 5, 9};
    uint8_t found[4];
    assert_int_equal(persia_table_get(persia_tables_table(w->tables, 0), 4,
                                      all, out, NULL, found),
                     PERSIA_OK);
    for (int i = 0; i < 4; i++)
        assert_int_equal(found[i], 1);
}

static void check(world *w, const float *want)
{
    float got[4 * DIM];
    const embedding_worker_stats s = stats_of(w);
    assert_int_equal(s.trained, BATCHES);
    assert_int_equal(s.failed + s.queued + s.leased, 0);
    rows_of(w, got);
    assert_memory_equal(got, want, sizeof got);
}

static void a_batch_is_trained_once_without_memory(void **state)
{
    world *w = *state;
    void *again = w;
    float want[4 * DIM];
    fault_spares = 1;
    live(w);
    rows_of(w, want);
    assert_int_equal(refused, 0);
    for (int good = 0; good < 2; good++)
        for (unsigned at = 1, done = 0; !done; at++) {
            finish_world(&again);
            begin_with(w, 1 << 20, 60 * SECOND);
            fault_begin(at, good);
            live(w);
            done = !fault_end();
            check(w, want);
            assert_true(at < 3000);
        }
    assert_true(refused > 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_batch_is_trained_once_without_memory,
                                        begin, finish_world),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
