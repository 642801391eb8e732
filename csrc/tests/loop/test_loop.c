/* step: handles, tickets, held gradients. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/client.h"
#include "client/client.h"
#include "loop/loop.h"

static int open_store(unsigned threads, uint64_t *handle)
{
    const tables_config config = {.threads = threads};
    ps_client *client;
    int rc = persia_client_create_embedded(&config, &client);
    return rc ? rc : persia_loop_open(client, handle);
}

static void handles_have_generations(void **state)
{
    (void)state;
    uint64_t a, b;
    loop *s;
    assert_int_equal(open_store(1, &a), PERSIA_OK);
    assert_int_equal(persia_loop_get(a, "test", &s, NULL), PERSIA_OK);
    persia_loop_close(a);
    loop *again;
    assert_int_equal(persia_loop_get(a, "test", &again, NULL),
                     PERSIA_ECLOSED);
    /* alive: referenced */
    assert_int_equal(persia_loop_pending_grads(s, LOOP_ALL), 0);
    persia_loop_put(s);
    assert_int_equal(open_store(1, &b), PERSIA_OK);
    assert_int_not_equal(a, b);
    assert_int_equal(persia_loop_get(a, "test", &again, NULL),
                     PERSIA_ECLOSED);
    persia_loop_close(a); /* of the past: no one is closed */
    assert_int_equal(persia_loop_get(b, "test", &s, NULL), PERSIA_OK);
    persia_loop_put(s);
    persia_loop_close(b);
    assert_int_equal(persia_loop_get(12345678901234, "test", &s, NULL),
                     PERSIA_ECLOSED);
    assert_int_equal(persia_loop_get(UINT64_MAX, "test", &s, NULL),
                     PERSIA_ECLOSED);
}

static int released;

static void count_release(void *owner)
{
    (void)owner;
    released++;
}

static loop_grad grad_of(uint64_t ticket)
{
    return (loop_grad){.ticket = ticket, .release = count_release};
}

static void tickets_come_back_once(void **state)
{
    (void)state;
    uint64_t handle;
    loop *s;
    assert_int_equal(open_store(1, &handle), PERSIA_OK);
    assert_int_equal(persia_loop_get(handle, "test", &s, NULL), PERSIA_OK);
    uint64_t first = persia_loop_ticket(s), second = persia_loop_ticket(s);
    assert_int_equal(first, 1);
    assert_int_equal(second, 2);
    released = 0;
    loop_grad g = grad_of(second);
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_OK);
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_ETICKET);
    assert_non_null(strstr(persia_err_text(), "second backward"));
    g = grad_of(first);
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_OK);
    g = grad_of(99);
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_ETICKET);
    assert_int_equal(persia_loop_pending_grads(s, LOOP_ALL), 2);
    assert_int_equal(persia_loop_discard(s, LOOP_ALL), 2);
    assert_int_equal(released, 2);
    g = grad_of(first); /* dropping does not give the ticket back */
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_ETICKET);

    /* Far apart, the window forgets; it never takes one for another. */
    uint64_t last = 0;
    for (uint64_t i = 0; i < 2 * (uint64_t)LOOP_TICKET_WINDOW + 100; i++)
        last = persia_loop_ticket(s);
    g = grad_of(last);
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_OK);
    for (uint64_t back = 1; back < LOOP_TICKET_WINDOW - 64; back += 4099) {
        g = grad_of(last - back);
        assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_OK);
        assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_ETICKET);
    }
    g = grad_of(last - LOOP_TICKET_WINDOW - 64);
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_ETICKET);
    persia_loop_put(s);
    persia_loop_close(handle);
}

static void *hold_elsewhere(void *arg)
{
    loop *s = arg;
    loop_grad g = grad_of(persia_loop_ticket(s));
    return persia_loop_add_grad(s, &g) ? arg : NULL;
}

static void threads_hold_for_themselves(void **state)
{
    (void)state;
    uint64_t handle;
    loop *s;
    assert_int_equal(open_store(1, &handle), PERSIA_OK);
    assert_int_equal(persia_loop_get(handle, "test", &s, NULL), PERSIA_OK);
    released = 0;
    for (int i = 0; i < 3; i++) {
        loop_grad g = grad_of(persia_loop_ticket(s));
        assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_OK);
        pthread_t thread;
        void *failed;
        assert_int_equal(
            pthread_create(&thread, NULL, hold_elsewhere, s), 0);
        pthread_join(thread, &failed);
        assert_null(failed);
    }
    assert_int_equal(persia_loop_pending_grads(s, LOOP_ALL), 6);
    assert_int_equal(persia_loop_pending_grads(s, LOOP_MINE), 3);
    assert_int_equal(persia_loop_discard(s, LOOP_MINE), 3);
    assert_int_equal(persia_loop_pending_grads(s, LOOP_MINE), 0);
    assert_int_equal(persia_loop_pending_grads(s, LOOP_ALL), 3);
    persia_loop_put(s);
    persia_loop_close(handle); /* drops the rest */
    assert_int_equal(released, 6);
}

static void gradients_of_forwards_are_dropped(void **state)
{
    (void)state;
    uint64_t handle;
    loop *s;
    assert_int_equal(open_store(1, &handle), PERSIA_OK);
    assert_int_equal(persia_loop_get(handle, "test", &s, NULL), PERSIA_OK);
    released = 0;
    uint64_t tickets[4];
    for (int i = 0; i < 4; i++) {
        tickets[i] = persia_loop_ticket(s);
        loop_grad g = grad_of(tickets[i]);
        assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_OK);
    }
    assert_int_equal(persia_loop_discard_of(s, tickets, 0), 0);
    assert_int_equal(persia_loop_discard_of(s, tickets + 1, 2), 2);
    assert_int_equal(released, 2);
    assert_int_equal(persia_loop_discard_of(s, tickets + 1, 2), 0);
    assert_int_equal(persia_loop_discard_of(s, tickets, 4), 2);
    assert_int_equal(persia_loop_pending_grads(s, LOOP_ALL), 0);
    persia_loop_put(s);
    persia_loop_close(handle);
    assert_int_equal(released, 4);
}

static void held_gradients_are_bounded(void **state)
{
    (void)state;
    uint64_t handle;
    loop *s;
    assert_int_equal(open_store(1, &handle), PERSIA_OK);
    assert_int_equal(persia_loop_get(handle, "test", &s, NULL), PERSIA_OK);
    for (int i = 0; i < LOOP_PENDING_MAX; i++) {
        loop_grad g = grad_of(persia_loop_ticket(s));
        assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_OK);
    }
    loop_grad g = grad_of(persia_loop_ticket(s));
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_ELIMIT);
    persia_loop_discard(s, LOOP_ALL);
    assert_int_equal(persia_loop_add_grad(s, &g), PERSIA_OK);
    persia_loop_put(s);
    persia_loop_close(handle);
}

/* Copies hold what was there, whatever becomes of the original. */
static void copies_are_whole(void **state)
{
    (void)state;
    enum { N = 300000, FLOATS = 700000, OFFSETS = 1001 };
    uint64_t handle;
    loop *s;
    assert_int_equal(open_store(3, &handle), PERSIA_OK);
    assert_int_equal(persia_loop_get(handle, "test", &s, NULL), PERSIA_OK);
    float *grad = malloc(FLOATS * sizeof *grad);
    uint32_t *rows = malloc(N * sizeof *rows);
    int64_t *values = malloc(N * sizeof *values);
    int64_t *offsets = malloc(OFFSETS * sizeof *offsets);
    assert_true(grad && rows && values && offsets);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < FLOATS; i++)
            grad[i] = (float)(i + round);
        for (int i = 0; i < N; i++) {
            rows[i] = (uint32_t)(i * 7 + round);
            values[i] = (int64_t)i * 11 + round;
        }
        for (int i = 0; i < OFFSETS; i++)
            offsets[i] = i * 13 + round;
        loop_grad g = {.grad = {.batch = {.n = N, .values = values,
                                          .offsets = offsets},
                                .rows = rows, .grad = grad}};
        assert_int_equal(persia_loop_copy_grad(s, &g, FLOATS, OFFSETS),
                         PERSIA_OK);
        memset(grad, 0, FLOATS * sizeof *grad);
        memset(rows, 0, N * sizeof *rows);
        memset(values, 0, N * sizeof *values);
        memset(offsets, 0, OFFSETS * sizeof *offsets);
        assert_null(g.grad.batch.weights);
        for (int i = 0; i < FLOATS; i++)
            assert_true(g.grad.grad[i] == (float)(i + round));
        for (int i = 0; i < N; i++) {
            assert_true(g.grad.rows[i] == (uint32_t)(i * 7 + round));
            assert_true(g.grad.batch.values[i] == (int64_t)i * 11 + round);
        }
        for (int i = 0; i < OFFSETS; i++)
            assert_true(g.grad.batch.offsets[i] == i * 13 + round);
        g.release(g.owner);
    }
    loop_grad held[12];
    for (int i = 0; i < 12; i++) {
        held[i] = (loop_grad){.grad = {.grad = grad}};
        assert_int_equal(persia_loop_copy_grad(s, &held[i], 100, 0),
                         PERSIA_OK);
    }
    for (int i = 0; i < 12; i++)
        held[i].release(held[i].owner);
    free(grad);
    free(rows);
    free(values);
    free(offsets);
    persia_loop_put(s);
    persia_loop_close(handle);
}

static void a_forked_child_is_refused(void **state)
{
    (void)state;
    uint64_t handle;
    assert_int_equal(open_store(2, &handle), PERSIA_OK);
    pid_t child = fork();
    if (child == 0) {
        loop *s;
        persia_loop_close(handle); /* must not touch locks or threads */
        _exit(persia_loop_get(handle, "lookup", &s, NULL) == PERSIA_EFORK &&
                      strstr(persia_err_text(), "lookup")
                  ? 0
                  : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    persia_loop_close(handle);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(handles_have_generations),
        cmocka_unit_test(tickets_come_back_once),
        cmocka_unit_test(threads_hold_for_themselves),
        cmocka_unit_test(gradients_of_forwards_are_dropped),
        cmocka_unit_test(held_gradients_are_bounded),
        cmocka_unit_test(copies_are_whole),
        cmocka_unit_test(a_forked_child_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
