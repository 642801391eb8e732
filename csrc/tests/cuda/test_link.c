/* Links: what arrives, in which order, and which buffers are used again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/cuda.h"

static device_link *open_link(void)
{
    uint32_t number, again;
    assert_int_equal(persia_link_open("host", 0, NULL, NULL, &number),
                     PERSIA_OK);
    assert_int_equal(persia_link_open("host", 0, NULL, NULL, &again),
                     PERSIA_OK);
    assert_int_equal(number, again);
    device_link *l = persia_link_get(number);
    assert_non_null(l);
    assert_null(persia_link_get(LINKS_MAX));
    return l;
}

static link_buffer *taken(device_link *l, size_t bytes)
{
    link_buffer *b;
    assert_int_equal(persia_link_take(l, bytes, &b), PERSIA_OK);
    return b;
}

/* A work of a stream that ends when the test says so. */
typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int open;
} gate;

static void run_gate(const void *args)
{
    gate *g = *(gate *const *)args;
    pthread_mutex_lock(&g->lock);
    while (!g->open)
        pthread_cond_wait(&g->moved, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void close_gate(gate *g, void *stream)
{
    *g = (gate){.lock = PTHREAD_MUTEX_INITIALIZER,
                .moved = PTHREAD_COND_INITIALIZER};
    assert_int_equal(persia_mem_host_run(stream, run_gate, &g, sizeof g), 0);
}

static void open_gate(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = 1;
    pthread_cond_signal(&g->moved);
    pthread_mutex_unlock(&g->lock);
}

static void test_floats_go_there_and_back(void **state)
{
    (void)state;
    enum { N = 1001 };
    device_link *l = open_link();
    for (uint32_t dtype = CUDA_F32; dtype < CUDA_DTYPES; dtype++) {
        float there[N];
        link_buffer *b = taken(l, N * sizeof(float)), *back;
        float *data = b->data;
        for (int i = 0; i < N; i++)
            data[i] = (float)(i % 200) - 100; /* exact in each dtype */
        assert_int_equal(persia_link_send(b, there, N, dtype), PERSIA_OK);
        assert_int_equal(persia_link_await(b, NULL), PERSIA_OK);
        back = taken(l, N * sizeof(float));
        assert_int_equal(persia_link_fetch(back, there, N, dtype, NULL),
                         PERSIA_OK);
        for (int twice = 0; twice < 2; twice++) {
            const float *got;
            assert_int_equal(persia_link_floats(back, &got), PERSIA_OK);
            for (int i = 0; i < N; i++)
                assert_true(got[i] == (float)(i % 200) - 100);
        }
        persia_link_give(b);
        persia_link_give(back);
    }
}

/* The copy waits for what the consumer's stream computes. */
static void test_a_fetch_waits_for_its_stream(void **state)
{
    (void)state;
    device_link *l = open_link();
    const mem_device *m = &persia_link_device(l)->mem;
    void *consumer;
    gate g;
    float there = 1, computed = 2;
    const float *got;
    assert_int_equal(m->enter(NULL), 0);
    assert_int_equal(m->stream_make(&consumer), 0);
    close_gate(&g, consumer);
    assert_int_equal(m->copy(consumer, &there, &computed, sizeof there), 0);
    link_buffer *b = taken(l, sizeof there);
    assert_int_equal(persia_link_fetch(b, &there, 1, CUDA_F32, consumer),
                     PERSIA_OK);
    open_gate(&g);
    assert_int_equal(persia_link_floats(b, &got), PERSIA_OK);
    assert_true(*got == 2);
    persia_link_give(b);
    m->stream_free(consumer);
    m->leave(0);
}

/* While a gradient is computed, the next batch's values arrive.  Where they
 * queue behind it the wait does not end, until the alarm ends the test. */
static void test_a_send_passes_a_fetch_that_waits(void **state)
{
    (void)state;
    device_link *l = open_link();
    const mem_device *m = &persia_link_device(l)->mem;
    void *consumer;
    gate g;
    float grad = 4, there = 0;
    const float *got;
    int done;
    assert_int_equal(m->enter(NULL), 0);
    assert_int_equal(m->stream_make(&consumer), 0);
    close_gate(&g, consumer);
    link_buffer *out = taken(l, sizeof grad), *in = taken(l, sizeof there);
    assert_int_equal(persia_link_fetch(out, &grad, 1, CUDA_F32, consumer),
                     PERSIA_OK);
    *(float *)in->data = 5;
    assert_int_equal(persia_link_send(in, &there, 1, CUDA_F32), PERSIA_OK);
    alarm(60);
    assert_int_equal(persia_link_wait(in), PERSIA_OK);
    alarm(0);
    assert_true(there == 5);
    assert_int_equal(m->event_done(out->event, &done), 0);
    assert_int_equal(done, 0); /* the gate is closed */
    open_gate(&g);
    assert_int_equal(persia_link_floats(out, &got), PERSIA_OK);
    assert_true(*got == 4);
    persia_link_give(in);
    persia_link_give(out);
    m->stream_free(consumer);
    m->leave(0);
}

/* And the consumer's stream for the copy. */
static void test_a_stream_awaits_a_copy(void **state)
{
    (void)state;
    uint32_t number;
    const cuda_device *d;
    void *side, *consumer;
    gate g;
    float there = 0, seen = 0;
    assert_int_equal(persia_cuda_open("host", &d), PERSIA_OK);
    assert_int_equal(d->mem.enter(NULL), 0);
    assert_int_equal(d->mem.stream_make(&side), 0);
    assert_int_equal(d->mem.stream_make(&consumer), 0);
    assert_int_equal(persia_link_open("host", 1, side, NULL, &number),
                     PERSIA_OK);
    device_link *l = persia_link_get(number);
    close_gate(&g, side);
    link_buffer *b = taken(l, sizeof there);
    *(float *)b->data = 3;
    assert_int_equal(persia_link_send(b, &there, 1, CUDA_F32), PERSIA_OK);
    assert_int_equal(persia_link_await(b, consumer), PERSIA_OK);
    assert_int_equal(d->mem.copy(consumer, &seen, &there, sizeof seen), 0);
    int done;
    assert_int_equal(d->mem.event_done(b->event, &done), 0);
    assert_int_equal(done, 0);

    /* A buffer whose copy runs is not used for another batch. */
    persia_link_give(b);
    link_buffer *other = taken(l, sizeof there);
    assert_ptr_not_equal(other, b);
    open_gate(&g);
    d->mem.stream_free(consumer); /* after its works */
    assert_true(seen == 3);
    assert_int_equal(d->mem.event_wait(b->event), 0);
    link_buffer *same = taken(l, sizeof there);
    assert_ptr_equal(same, b);
    persia_link_give(other);
    persia_link_give(same);
    d->mem.leave(0);
}

static void test_a_loop_pins_nothing_after_its_first_round(void **state)
{
    (void)state;
    enum { MANY = 40, MARK = 99 };
    device_link *l = open_link();
    link_buffer *all[MANY];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < MANY; i++) {
            all[i] = taken(l, (size_t)5000 * (size_t)(i % 3 + 1));
            if (round == 0)
                all[i]->n = MARK; /* a new one has 0 */
            assert_int_equal(all[i]->n, MARK);
        }
        for (int i = 0; i < MANY; i++)
            persia_link_give(all[i]);
    }
    link_buffer *b = taken(l, 4999);
    assert_true(b->room >= 4999 && b->room < 2 * 4999);
    persia_link_give(b);
    persia_link_give(NULL);
}

static void test_buffers_that_no_take_uses_are_unpinned(void **state)
{
    (void)state;
    enum { MANY = 40 };
    device_link *l = open_link();
    link_buffer *all[MANY];
    size_t buffers, bytes;
    for (int i = 0; i < MANY; i++)
        all[i] = taken(l, 5000);
    for (int i = 0; i < MANY; i++)
        persia_link_give(all[i]);
    persia_link_pinned(l, &buffers, &bytes);
    assert_true(buffers >= MANY && bytes >= MANY * 5000);
    for (size_t i = 0; i < LINK_IDLE_TAKES + buffers + 1; i++)
        persia_link_give(taken(l, 100000));
    persia_link_pinned(l, &buffers, &bytes);
    assert_int_equal(buffers, 1);
    assert_true(bytes >= 100000 && bytes < 2 * 100000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_floats_go_there_and_back),
        cmocka_unit_test(test_a_fetch_waits_for_its_stream),
        cmocka_unit_test(test_a_send_passes_a_fetch_that_waits),
        cmocka_unit_test(test_a_stream_awaits_a_copy),
        cmocka_unit_test(test_a_loop_pins_nothing_after_its_first_round),
        cmocka_unit_test(test_buffers_that_no_take_uses_are_unpinned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
