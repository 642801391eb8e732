/* A rank whose embedding worker is started again while it trains two batches,
 * and whose next Take reports a loss: the loop makes that Take once more, and
 * it is where it was.  A loader whose worker has forgotten what it sent.
 * (tests.cmake lets the linker wrap the calls below: the requests of rank and
 * loader go to the worker of this process.) */
#include "embedding_worker/private.h"
#include "loader/private.h"
#include "rank/private.h"
#include "rpc/channel.h"
#include "tests/embedding_worker/world.h"

enum { TAKES = 4 };

/* ---- the way to the worker ---- */

static struct {
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t moved;
    world *w;
    unsigned inside; /* requests that the worker has */
    int incomplete;  /* the next Take is answered: servers differ */
    int silent;      /* no heartbeat arrives */
    int deaf;        /* no Return arrives */
    uint64_t hello_ns; /* the longest that a Hello was waited for */
} way = {.lock = PTHREAD_MUTEX_INITIALIZER,
         .moved = PTHREAD_COND_INITIALIZER};
static atomic_int losses; /* that the store is still to report */

typedef struct request {
    rpc_call call; /* first */
    rpc_callback done;
    void *ctx;
} request;

static void request_end(request *q, int rc, rpc_reply *reply)
{
    rpc_reply none = {0};
    q->done(q->ctx, rc, rc ? &none : reply);
    free((void *)(uintptr_t)q->call.request);
    free(q);
    pthread_mutex_lock(&way.lock);
    way.inside--;
    pthread_cond_broadcast(&way.moved);
    pthread_mutex_unlock(&way.lock);
}

static void request_reply(rpc_call *call, wire_out *o,
                          void (*done)(void *owner), void *owner)
{
    rpc_reply reply = {.data = bytes_take(o->bytes ? o->bytes : 1),
                       .n = o->bytes};
    assert_non_null(reply.data);
    reply.memory = reply.data;
    persia_wire_out_copy(o, reply.data);
    persia_wire_out_free(o);
    if (done)
        done(owner);
    request_end((request *)call, PERSIA_OK, &reply);
}

static void request_fail(rpc_call *call, int code, const char *text)
{
    request_end((request *)call, persia_err_set(code, "w: %s", text), NULL);
}

int __wrap_persia_rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
                            uint64_t timeout_ns, rpc_callback done, void *ctx);
int __wrap_persia_rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
                            uint64_t timeout_ns, rpc_callback done, void *ctx)
{
    request *q = calloc(1, sizeof *q);
    void *copy = aligned_alloc(64, (o->bytes + 64) & ~(size_t)63);
    (void)c;
    assert_true(q && copy);
    persia_wire_out_copy(o, copy);
    *q = (request){{.method = method,
                    .request = copy,
                    .request_n = o->bytes,
                    .deadline = persia_deadline(timeout_ns),
                    .who = &persia_rpc_everyone,
                    .reply = request_reply,
                    .fail = request_fail},
                   done,
                   ctx};
    persia_wire_out_free(o);
    pthread_mutex_lock(&way.lock);
    embedding_worker *s = way.w ? way.w->s : NULL;
    const int incomplete = method == WORKER_TAKE && way.incomplete;
    if (incomplete)
        way.incomplete = 0;
    if (method == WORKER_HELLO && timeout_ns > way.hello_ns)
        way.hello_ns = timeout_ns;
    if ((method == WORKER_HEARTBEAT && way.silent) ||
        (method == WORKER_RETURN && way.deaf))
        s = NULL;
    way.inside++;
    pthread_mutex_unlock(&way.lock);
    if (!s)
        request_fail(&q->call, PERSIA_EUNAVAILABLE, "it ended");
    else if (incomplete)
        request_fail(&q->call, PERSIA_EINCOMPLETE, "servers differ");
    else
        persia_embedding_worker_handle(s, &q->call);
    return PERSIA_OK;
}

/* Another worker, which knows nothing. */
static void worker_replace(world *w, uint64_t silence_ns)
{
    embedding_worker_config config = {.servers = w->servers,
                                      .message_limit = 1 << 20,
                                      .queue_limit = 1 << 20,
                                      .lease_ns = silence_ns,
                                      .silence_ns = silence_ns,
                                      .loaders = 1,
                                      .jobs = 2};
    persia_embedding_worker_destroy(w->s);
    assert_int_equal(persia_embedding_worker_create(&config, &w->s),
                     PERSIA_OK);
}

/* A loader's: it takes the place of no rank. */
static void hello_of_loader(world *w)
{
    const wire_hello m = {.caller = {.client = 77},
                          .version = WIRE_VERSION,
                          .name_space = "test"};
    hello_as(w, &m);
}

/* The worker ends, and another one begins. */
static void worker_restart(world *w)
{
    pthread_mutex_lock(&way.lock);
    way.w = NULL;
    while (way.inside)
        pthread_cond_wait(&way.moved, &way.lock);
    pthread_mutex_unlock(&way.lock);
    worker_replace(w, 60 * SECOND);
    hello_of_loader(w);
    pthread_mutex_lock(&way.lock);
    way.w = w;
    pthread_mutex_unlock(&way.lock);
}

/* ---- the store ---- */

int __wrap_persia_client_look(ps_client *c);
int __wrap_persia_client_look(ps_client *c)
{
    (void)c;
    return atomic_exchange(&losses, 0)
               ? persia_err_set(PERSIA_ELOST, "updates were lost")
               : PERSIA_OK;
}

static loop_lookup lookups[TAKES];

/* A store that runs a lookup when the test does; the handle is a number. */
int __wrap_persia_loop_batch_lookup(loop *s, uint64_t batch,
                                    const loop_lookup *l);
int __wrap_persia_loop_batch_lookup(loop *s, uint64_t batch,
                                    const loop_lookup *l)
{
    (void)s;
    lookups[batch] = *l;
    return PERSIA_OK;
}

static void *lookup_run(void *of)
{
    const loop_lookup *l = of;
    return (void *)(intptr_t)l->take(l->owner);
}

static void lookup_begin(int i, pthread_t *thread)
{
    assert_int_equal(pthread_create(thread, NULL, lookup_run, &lookups[i]), 0);
}

static int lookup_result(pthread_t thread)
{
    void *rc;
    assert_int_equal(pthread_join(thread, &rc), 0);
    return (int)(intptr_t)rc;
}

/* Until one of the two Takes has this state; the first that has it. */
static const rank_taken *wait_for_state(rank_taker *r, const rank_taken *t,
                                        const rank_taken *u,
                                        enum taking_state state)
{
    pthread_mutex_lock(&r->lock);
    while (t->state != state && u->state != state)
        persia_cond_wait(&r->turned, &r->lock);
    const rank_taken *found = t->state == state ? t : u;
    pthread_mutex_unlock(&r->lock);
    return found;
}

/* ---- a rank ---- */

static const wire_plan_feature first = {.name = "a",
                                        .pooling = WORKER_POOL_MEAN,
                                        .trainable = 1},
                               second = {.name = "b",
                                         .pooling = WORKER_POOL_SUM,
                                         .trainable = 1};

/* What a loop of the rank looks up. */
static void rank_wants(rank_taker *r, size_t n, const wire_plan_feature *f)
{
    table_spec table = spec();
    wire_plan_feature features[KEYS];
    memcpy(features, f, n * sizeof *f);
    const wire_plan plan = {.tables = &table, .tables_n = 1,
                            .features = features, .features_n = n};
    assert_int_equal(persia_rank_declare(r, &plan), PERSIA_OK);
}

static rank_taker *rank_begin(void)
{
    static const char *const address = "127.0.0.1:1";
    const worker_client_config config = {
        .addresses = &address, .addresses_n = 1, .name_space = "test",
        .world = 1, .timeout_ns = 20 * SECOND, .move_ns = 20 * SECOND,
        .message_limit = 1 << 20};
    rank_taker *r;
    assert_int_equal(persia_rank_open(&config, &r), PERSIA_OK);
    rank_wants(r, KEYS, (wire_plan_feature[]){first, second});
    return r;
}

static void wait_until_quiet(void)
{
    pthread_mutex_lock(&way.lock);
    while (way.inside)
        pthread_cond_wait(&way.moved, &way.lock);
    pthread_mutex_unlock(&way.lock);
}

/* A thread closes the rank: what that asks does not arrive any more. */
static void rank_done(rank_taker *r)
{
    persia_rank_close(r);
    pthread_mutex_lock(&way.lock);
    way.w = NULL;
    pthread_mutex_unlock(&way.lock);
    wait_until_quiet();
}

/* A rank, and a loader that has said Hello. */
static rank_taker *job_begin(world *w, ps_client **c)
{
    way.w = w;
    assert_int_equal(persia_client_create(&w->servers, c), PERSIA_OK);
    rank_taker *r = rank_begin();
    hello_of_loader(w);
    return r;
}

static rank_taken *take_begin(rank_taker *r, ps_client *c, uint64_t i)
{
    rank_taken *t;
    assert_int_equal(persia_rank_next(r, &t), PERSIA_OK);
    assert_int_equal(persia_taken_lookup(t, NULL, c, i), PERSIA_OK);
    return t;
}

static void take_end(rank_taken *t, uint64_t i)
{
    lookups[i].release(t);
    persia_taken_put(t);
}

static void read_first(rank_taken *t, float *out)
{
    const taken_feature f = {.name = first.name, .table = spec().name,
                             .dim = DIM, .pooling = first.pooling};
    assert_int_equal(t->source.read(&t->source, &f, out, DIM), PERSIA_OK);
}

/* The loop that had it has ended, and the next one looks up otherwise. */
static void a_batch_is_of_the_plan_of_its_loop(void **state)
{
    world *w = *state;
    ps_client *c;
    float before[SAMPLES * DIM], after[SAMPLES * DIM];
    rank_taker *r = job_begin(w, &c);
    send_batch(w, 1);
    rank_taken *t = take_begin(r, c, 0);
    assert_int_equal(lookups[0].take(t), PERSIA_OK);
    persia_taken_use(t);
    read_first(t, before);
    persia_rank_cancel(r);
    rank_wants(r, KEYS, (wire_plan_feature[]){second, first});
    read_first(t, after);
    assert_memory_equal(before, after, sizeof before);
    take_end(t, 0);
    rank_done(r);
    persia_client_destroy(c);
}

/* The worker looks up for a Take that waits there what the next loop wants. */
static void an_answer_of_another_plan_is_given_back(void **state)
{
    world *w = *state;
    ps_client *c;
    pthread_t thread;
    rank_taker *r = job_begin(w, &c);
    rank_taken *t = take_begin(r, c, 0);
    lookup_begin(0, &thread);
    for (int waits = 0; !waits;) {
        pthread_mutex_lock(&w->s->lock);
        waits = w->s->takes != NULL;
        pthread_mutex_unlock(&w->s->lock);
        sched_yield();
    }
    persia_rank_cancel(r);
    rank_wants(r, 1, &first);
    send_batch(w, 1);
    assert_int_not_equal(lookup_result(thread), PERSIA_OK);
    take_end(t, 0);
    wait_until_quiet();
    assert_int_equal(stats_of(w).taken, 1);
    assert_int_equal(stats_of(w).queued, 1);
    rank_done(r);
    persia_client_destroy(c);
}

/* A loop is left, and what gives its batch back is lost. */
static void a_lease_that_the_rank_forgot_is_over(void **state)
{
    world *w = *state;
    ps_client *c;
    rank_taker *r = job_begin(w, &c);
    send_batch(w, 1);
    rank_taken *t = take_begin(r, c, 0);
    assert_int_equal(lookups[0].take(t), PERSIA_OK);
    pthread_mutex_lock(&way.lock);
    way.deaf = 1;
    pthread_mutex_unlock(&way.lock);
    persia_rank_cancel(r);
    persia_taken_give_back(t);
    take_end(t, 0);
    wait_until_quiet();
    pthread_mutex_lock(&way.lock);
    way.deaf = 0;
    pthread_mutex_unlock(&way.lock);
    assert_int_equal(stats_of(w).leased, 1);
    t = take_begin(r, c, 0);
    assert_int_equal(lookups[0].take(t), PERSIA_OK);
    assert_int_equal(persia_taken_reply(t)->number, 1);
    pthread_mutex_lock(&w->s->lock);
    assert_int_equal(w->s->leased->offers, 0); /* no lease ended by time */
    pthread_mutex_unlock(&w->s->lock);
    take_end(t, 0);
    rank_done(r);
    persia_client_destroy(c);
}

static void send_again(world *w)
{
    for (uint64_t number = 1; number <= 2; number++)
        send_batch(w, number);
}

static void a_take_that_reports_a_loss_is_made_again(void **state)
{
    world *w = *state;
    ps_client *c;
    rank_taken *t[TAKES];
    pthread_t early, late;
    rank_taker *r = job_begin(w, &c);
    send_again(w);
    for (uint64_t i = 0; i < TAKES; i++) {
        assert_int_equal(persia_rank_next(r, &t[i]), PERSIA_OK);
        assert_int_equal(persia_taken_lookup(t[i], NULL, c, i), PERSIA_OK);
    }
    /* The loop has two batches; their updates are not sent. */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(lookups[i].take(t[i]), PERSIA_OK);
        assert_int_equal(persia_taken_reply(t[i])->number, i + 1);
        persia_taken_use(t[i]);
    }
    worker_restart(w);
    send_again(w); /* its loader does not know that they are done */
    way.incomplete = 1;
    atomic_store(&losses, 1);
    assert_int_equal(lookups[2].take(t[2]), PERSIA_ELOST);
    assert_int_equal(way.incomplete || losses, 0);
    /* The later Take asks first, so the worker may answer that. */
    lookup_begin(3, &late);
    wait_for_state(r, t[3], t[3], TAKING_ASKS);
    lookup_begin(2, &early);
    wait_for_state(r, t[2], t[2], TAKING_ASKS);
    send_batch(w, 3);
    assert_ptr_equal(wait_for_state(r, t[2], t[3], TAKING_LEFT), t[2]);
    assert_int_equal(lookup_result(early), PERSIA_OK);
    assert_int_equal(persia_taken_reply(t[2])->number, 3);
    send_batch(w, 4);
    assert_int_equal(lookup_result(late), PERSIA_OK);
    assert_int_equal(persia_taken_reply(t[3])->number, 4);
    assert_null(r->takes);
    for (int i = 0; i < TAKES; i++) {
        lookups[i].release(t[i]);
        persia_taken_put(t[i]);
    }
    rank_done(r);
    persia_client_destroy(c);
}

/* The worker knows other rows than those of the servers, and does not look
 * again until `looks` is 0.  It looks as soon as it is there: that has ended
 * before. */
static void worker_of_other_rows(embedding_worker *s)
{
    pthread_mutex_lock(&s->lock);
    while (!s->looked || s->looks) {
        pthread_mutex_unlock(&s->lock);
        sched_yield();
        pthread_mutex_lock(&s->lock);
    }
    s->lineage = 5;
    s->looks = 1;
    pthread_mutex_unlock(&s->lock);
}

/* A checkpoint was loaded, and the worker has not seen it yet: its loader
 * sends again what was done. */
static void an_end_of_other_rows_is_none(void **state)
{
    world *w = *state;
    ps_client *c;
    rank_taken *t;
    pthread_t thread;
    uint64_t restores = 0;
    way.w = w;
    assert_int_equal(persia_client_create(&w->servers, &c), PERSIA_OK);
    worker_of_other_rows(w->s);
    rank_taker *r = rank_begin();
    hello_of_loader(w);
    beat(w, 2, 0);
    assert_int_equal(persia_rank_next(r, &t), PERSIA_OK);
    assert_int_equal(persia_taken_lookup(t, NULL, c, 0), PERSIA_OK);
    lookup_begin(0, &thread);
    wait_for_state(r, t, t, TAKING_ASKS);
    pthread_mutex_lock(&w->s->lock);
    w->s->looks = 0;
    pthread_mutex_unlock(&w->s->lock);
    while (!restores) {
        pthread_mutex_lock(&w->s->lock);
        restores = w->s->stats.restores;
        pthread_mutex_unlock(&w->s->lock);
        sched_yield();
    }
    hello_of_loader(w);
    send_batch(w, 1);
    assert_int_equal(lookup_result(thread), PERSIA_OK);
    assert_int_equal(persia_taken_reply(t)->status, TAKE_BATCH);
    lookups[0].release(t);
    persia_taken_put(t);
    rank_done(r);
    persia_client_destroy(c);
}

/* ---- a loader ---- */

static loader_sender *loader_begin(world *w)
{
    static const char *const address = "127.0.0.1:1";
    const worker_client_config config = {
        .addresses = &address, .addresses_n = 1, .name_space = "test",
        .timeout_ns = 60 * SECOND, .move_ns = 60 * SECOND,
        .message_limit = 1 << 20};
    loader_sender *s;
    pthread_mutex_lock(&way.lock);
    way.w = w;
    pthread_mutex_unlock(&way.lock);
    assert_int_equal(persia_sender_open(&config, &s), PERSIA_OK);
    return s;
}

static void way_silent(int silent)
{
    pthread_mutex_lock(&way.lock);
    way.silent = silent;
    pthread_mutex_unlock(&way.lock);
}

static int begin_forgetful(void **state)
{
    int rc = begin(state);
    worker_replace(*state, SECOND);
    return rc;
}

/* The worker takes the loader for dead, and its job ends with what was done,
 * which the loader never heard. */
static void a_loader_that_is_forgotten_sends_again(void **state)
{
    world *w = *state;
    uint32_t status;
    uint64_t of;
    wire_submit m = batch(w, 1);
    loader_sender *s = loader_begin(w);
    way_silent(1);
    hello(w, 1);
    declare(w, "b");
    assert_int_equal(persia_sender_send(s, &m), PERSIA_OK);
    give_back(w, 1, lease_of(w, 1, 1, &of), RETURN_TRAINED, KEYS, &status);
    assert_int_equal(status, RETURNED_DONE);
    while (stats_of(w).streams)
        persia_pause(SECOND / 50);
    way_silent(0);
    assert_int_equal(persia_sender_flush(s, 20 * SECOND), PERSIA_OK);
    assert_int_equal(stats_of(w).had, 1);
    persia_sender_close(s, 1);
}

/* The thread that asks sends the heartbeats to all workers, too. */
static void no_thread_waits_long_for_what_servers_have(void **state)
{
    world *w = *state;
    loader_sender *s = loader_begin(w);
    wire_submit m = batch(w, 1);
    pthread_mutex_lock(&way.lock);
    way.hello_ns = 0;
    pthread_mutex_unlock(&way.lock);
    const wire_hello_reply loaded = {.lineage = s->lineage + 1};
    assert_int_equal(sender_meet(s, &s->c.links[0], &loaded), PERSIA_OK);
    assert_int_equal(persia_sender_send(s, &m), PERSIA_OK);
    pthread_mutex_lock(&s->lock);
    while (!s->compared || s->compared != s->servers) {
        pthread_mutex_unlock(&s->lock);
        persia_pause(SECOND / 50);
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_lock(&way.lock);
    assert_true(way.hello_ns && way.hello_ns <= SENDER_BEAT_NS);
    pthread_mutex_unlock(&way.lock);
    persia_sender_close(s, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(
            a_batch_is_of_the_plan_of_its_loop, begin, finish_world),
        cmocka_unit_test_setup_teardown(
            an_answer_of_another_plan_is_given_back, begin, finish_world),
        cmocka_unit_test_setup_teardown(
            a_lease_that_the_rank_forgot_is_over, begin, finish_world),
        cmocka_unit_test_setup_teardown(
            a_loader_that_is_forgotten_sends_again, begin_forgetful,
            finish_world),
        cmocka_unit_test_setup_teardown(
            no_thread_waits_long_for_what_servers_have, begin, finish_world),
        cmocka_unit_test_setup_teardown(
            an_end_of_other_rows_is_none, begin, finish_world),
        cmocka_unit_test_setup_teardown(
            a_take_that_reports_a_loss_is_made_again, begin, finish_world),
    };
    return cmocka_run_group_tests_name("embedding worker: again", tests, NULL,
                                       NULL);
}
