/* Changes: a reader of a server has what changed, or learns that it lacks
 * something. */
#include "tests/server/help.h"

#include <stdlib.h>
#include <string.h>

enum { DIM = 3, N = 200 };

/* Decoded; the caller frees *r. */
static wire_changes_reply changes(const server *v, uint32_t verb,
                                  uint64_t reader, uint64_t piece, result *r)
{
    const wire_changes m = {.caller = caller_of(v), .verb = verb,
                            .reader = reader, .piece = piece};
    wire_changes_reply reply;
    *r = CALL(v, CHANGES, changes, &m);
    DECODE(r, changes_reply, &reply);
    return reply;
}

static void put(const server *v, size_t n, const uint64_t *ids,
                const float *vectors)
{
    const wire_rows m = {.caller = caller_of(v), .n = n, .ids = ids,
                         .dim = DIM, .vectors = vectors};
    result r = CALL(v, PUT_ROWS, rows, &m);
    assert_int_equal(r.code, PERSIA_OK);
    result_free(&r);
}

static void a_reader_has_what_changed(void **state)
{
    static uint64_t ids[N];
    static float vectors[N * DIM];
    rng g = {7};
    result r;
    (void)state;
    server v = server_start(0, 1, NULL);
    table_spec spec = spec_of("a", DIM, OPTIM_ADAGRAD);
    declare(&v, &spec);
    for (size_t i = 0; i < N; i++)
        ids[i] = i;
    for (size_t i = 0; i < N * DIM; i++)
        vectors[i] = rng_float(&g);
    put(&v, N, ids, vectors);
    changes(&v, CHANGES_BEGIN, 5, 0, &r);
    result_free(&r);
    assert_true(changes(&v, CHANGES_NEXT, 5, 0, &r).end);
    result_free(&r);
    put(&v, 10, ids + 50, vectors);
    assert_int_equal(changes(&v, CHANGES_COUNT, 5, 0, &r).changed, 10);
    result_free(&r);
    assert_true(changes(&v, CHANGES_COUNT, 6, 0, &r).unknown);
    result_free(&r);
    const wire_rows erase = {.caller = caller_of(&v), .n = 2, .ids = ids + 58,
                             .erase = 1};
    r = CALL(&v, PUT_ROWS, rows, &erase);
    result_free(&r);
    wire_changes_reply m = changes(&v, CHANGES_NEXT, 5, 1, &r);
    assert_true(m.end && !m.reset && !m.unknown);
    assert_int_equal(m.n, 8);
    assert_int_equal(m.gone_n, 2);
    assert_int_equal(m.erased_n, 2);
    for (size_t i = 0; i < m.n; i++)
        assert_memory_equal(m.vectors + i * DIM,
                            vectors + (m.ids[i] - 50) * DIM,
                            DIM * sizeof(float));
    result_free(&r);
    server_stop(&v);
}

static void a_lost_answer_is_noticed(void **state)
{
    result r;
    (void)state;
    server v = server_start(0, 1, NULL);
    table_spec spec = spec_of("a", DIM, OPTIM_ADAGRAD);
    declare(&v, &spec);
    assert_true(changes(&v, CHANGES_NEXT, 6, 0, &r).unknown); /* no BEGIN */
    result_free(&r);
    changes(&v, CHANGES_BEGIN, 6, 0, &r);
    result_free(&r);
    assert_false(changes(&v, CHANGES_NEXT, 6, 0, &r).unknown);
    result_free(&r);
    assert_true(changes(&v, CHANGES_NEXT, 6, 0, &r).unknown); /* sent again */
    result_free(&r);
    assert_true(changes(&v, CHANGES_NEXT, 6, 1, &r).unknown); /* forgotten */
    result_free(&r);
    changes(&v, CHANGES_BEGIN, 6, 0, &r);
    result_free(&r);
    changes(&v, CHANGES_END, 6, 0, &r);
    result_free(&r);
    assert_true(changes(&v, CHANGES_NEXT, 6, 0, &r).unknown);
    result_free(&r);
    changes(&v, CHANGES_BEGIN, 6, 0, &r); /* it is left to the server */
    result_free(&r);
    server_stop(&v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_reader_has_what_changed),
        cmocka_unit_test(a_lost_answer_is_noticed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
