/* A call to an embedding worker that is interrupted: no message in flight
 * refers to memory that its caller has back.  (tests.cmake lets the linker
 * wrap persia_rpc_start().) */
#include "rank/private.h"
#include "tests/embedding_worker/world.h"

/* The message in flight. */
static struct {
    wire_out o;
    rpc_callback done;
    void *ctx;
    char was[1 << 16]; /* its bytes when it was sent */
} sent;
static atomic_int started, polls, interrupts, answered;

int __wrap_persia_rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
                            uint64_t timeout_ns, rpc_callback callback,
                            void *ctx);
int __wrap_persia_rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
                            uint64_t timeout_ns, rpc_callback callback,
                            void *ctx)
{
    (void)c;
    (void)method;
    (void)timeout_ns;
    assert_true(o->bytes <= sizeof sent.was);
    persia_wire_out_copy(o, sent.was);
    sent.o = *o;
    sent.done = callback;
    sent.ctx = ctx;
    persia_wire_out_init(o);
    atomic_store(&started, 1);
    return PERSIA_OK;
}

static int interrupt(void)
{
    atomic_fetch_add(&polls, 1);
    return atomic_load(&interrupts) ? PERSIA_EINTR : PERSIA_OK;
}

/* gRPC reads the message, and the worker answers. */
static void answer(void)
{
    char *now = malloc(sent.o.bytes);
    assert_non_null(now);
    persia_wire_out_copy(&sent.o, now);
    assert_memory_equal(now, sent.was, sent.o.bytes);
    free(now);
    persia_wire_out_free(&sent.o);
    atomic_store(&answered, 1);
    persia_err_set(PERSIA_EUNAVAILABLE, "the worker ended");
    sent.done(sent.ctx, PERSIA_EUNAVAILABLE, NULL);
}

/* What was just freed has other contents. */
static void overwrite(size_t bytes)
{
    void *some[8];
    for (int i = 0; i < 8; i++) {
        some[i] = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        assert_non_null(some[i]);
        memset(some[i], 0xAB, bytes);
    }
    for (int i = 0; i < 8; i++)
        free(some[i]);
}

enum { WIDE = 256, ROWS = 8 };
static float grads[WIDE * ROWS];

/* Sums of gradients are asked for on the user's thread. */
static void sums_can_be_interrupted(void **state)
{
    (void)state;
    table_spec tables[] = {{.name = "a", .dim = WIDE}};
    wire_plan_feature features[] = {{.name = "f"}};
    worker_link link = {.address = (char[]){"w"}};
    rank_taker r = {.c = {.links = &link, .links_n = 1, .timeout_ns = SECOND},
                    .dtype = WIRE_FP32};
    rank_plan plan = {.wire = {.tables = tables, .tables_n = 1,
                               .features = features, .features_n = 1}};
    rank_taken t = {.source = rank_source, .r = &r, .plan = &plan,
                    .from = &link};
    const taken_grad g = {{.name = "f", .table = "a", .dim = WIDE}, grads};
    const taken_update u = {.grads = &g, .n = 1};
    client_sum *out = NULL;
    size_t n = 0;
    int finite = 1;
    t.m.samples = ROWS;
    persia_interrupt_install(interrupt);
    atomic_store(&interrupts, 1);
    assert_int_equal(rank_source.sums(&t.source, &u, &out, &n, &finite),
                     PERSIA_EINTR);
    atomic_store(&interrupts, 0);
    overwrite(sizeof grads + 4096);
    assert_true(sent.o.bytes > sizeof grads);
    answer();
    assert_int_equal(n, 0);
    free(out);
    persia_interrupt_install(NULL);
}

static void *answer_later(void *unused)
{
    const uint64_t until = persia_clock_ns() + SECOND / 2;
    while (!atomic_load(&started))
        ;
    while (!atomic_load(&polls) && persia_clock_ns() < until)
        ;
    answer();
    return unused;
}

/* A message that refers to the caller's memory is waited for to its end. */
static void a_message_without_a_copy_is_not_left(void **state)
{
    (void)state;
    worker_link link = {.address = (char[]){"w"}};
    worker_client c = {.links = &link, .links_n = 1, .timeout_ns = SECOND};
    float *own = malloc(sizeof grads);
    pthread_t thread;
    link_answer a;
    wire_out o;
    assert_non_null(own);
    memset(own, 1, sizeof grads);
    persia_wire_out_init(&o);
    assert_int_equal(persia_wire_out_refer(&o, own, sizeof grads), PERSIA_OK);
    persia_interrupt_install(interrupt);
    atomic_store(&answered, 0);
    atomic_store(&polls, 0);
    atomic_store(&interrupts, 1);
    atomic_store(&started, 0);
    assert_int_equal(pthread_create(&thread, NULL, answer_later, NULL), 0);
    assert_int_not_equal(
        link_call(&c, &link, WORKER_RETURN, &o, 0, SECOND, &a), PERSIA_OK);
    const int was = atomic_load(&answered);
    pthread_join(thread, NULL);
    persia_interrupt_install(NULL);
    assert_true(was);
    link_answer_free(&a);
    free(own);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_can_be_interrupted),
        cmocka_unit_test(a_message_without_a_copy_is_not_left),
    };
    for (size_t i = 0; i < sizeof grads / sizeof *grads; i++)
        grads[i] = (float)i;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
