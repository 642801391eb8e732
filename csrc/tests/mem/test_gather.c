/* Gather lists and the memory of messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "mem/gather.h"

static void small_fields_are_copied_side_by_side(void **state)
{
    (void)state;
    wire_out o;
    persia_wire_out_init(&o);
    for (uint32_t i = 0; i < 100; i++)
        assert_int_equal(persia_wire_out_add(&o, &i, sizeof i), PERSIA_OK);
    assert_int_equal(o.bytes, 400);
    assert_int_equal(o.spans_n, 1);
    uint32_t copy[100];
    persia_wire_out_copy(&o, copy);
    for (uint32_t i = 0; i < 100; i++)
        assert_int_equal(copy[i], i);
    persia_wire_out_free(&o);
    assert_int_equal(o.bytes, 0);
    persia_wire_out_free(&o);
}

static void bulk_is_pointed_to_and_keeps_its_place(void **state)
{
    (void)state;
    enum { N = 300, BYTES = 1000 };
    static unsigned char bulk[N][BYTES];
    wire_out o;
    persia_wire_out_init(&o);
    for (int i = 0; i < N; i++) {
        memset(bulk[i], i, BYTES);
        unsigned char head[20];
        memset(head, 255 - i % 200, sizeof head);
        assert_int_equal(persia_wire_out_add(&o, head, sizeof head),
                         PERSIA_OK);
        assert_int_equal(persia_wire_out_refer(&o, bulk[i], i % 2 ? BYTES : 7),
                         PERSIA_OK);
        assert_int_equal(persia_wire_out_add(&o, NULL, 0), PERSIA_OK);
    }
    /* Those that were short went into the copies, the others are pointed
     * to: they follow a change. */
    assert_int_equal(o.bytes, N * 20 + N / 2 * (BYTES + 7));
    bulk[1][0] = 77;
    bulk[0][0] = 99;
    unsigned char *copy = test_malloc(o.bytes), *at = copy;
    persia_wire_out_copy(&o, copy);
    for (int i = 0; i < N; i++) {
        assert_int_equal(at[0], 255 - i % 200);
        at += 20;
        assert_int_equal(at[0], i == 1 ? 77 : i % 256);
        assert_int_equal(at[1], i % 256);
        at += i % 2 ? BYTES : 7;
    }
    assert_ptr_equal(at, copy + o.bytes);
    test_free(copy);
    persia_wire_out_free(&o);
}

static void memory_is_aligned_and_distinct(void **state)
{
    (void)state;
    wire_memory m;
    persia_wire_memory_init(&m);
    unsigned char *piece[200];
    for (size_t i = 0; i < 200; i++) {
        size_t bytes = i * i;
        piece[i] = persia_wire_memory_take(&m, bytes);
        assert_non_null(piece[i]);
        assert_int_equal((uintptr_t)piece[i] % 64, 0);
        memset(piece[i], (int)i, bytes);
    }
    for (size_t i = 0; i < 200; i++)
        for (size_t j = 0; j < i * i; j++)
            assert_int_equal(piece[i][j], i);
    assert_null(persia_wire_memory_take(&m, SIZE_MAX - 10));
    assert_non_null(strstr(persia_err_text(), "bytes of a message"));
    persia_wire_memory_free(&m);
    persia_wire_memory_free(&m);
}

static void a_message_has_a_limit(void **state)
{
    (void)state;
    assert_int_equal(persia_wire_check_size("a", "b", UINT64_MAX, 0),
                     PERSIA_OK); /* not known yet */
    assert_int_equal(persia_wire_check_size("a", "b", 100, 100), PERSIA_OK);
    assert_int_equal(persia_wire_check_size("a", "b", 101, 100),
                     PERSIA_ELIMIT);
    assert_true(persia_wire_fit(4096, 8) * 8 <= 4096);
    assert_true(persia_wire_fit(4096, 1 << 20) == 1);
    assert_true(persia_wire_fit(0, 8) == UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_message_has_a_limit),
        cmocka_unit_test(small_fields_are_copied_side_by_side),
        cmocka_unit_test(bulk_is_pointed_to_and_keeps_its_place),
        cmocka_unit_test(memory_is_aligned_and_distinct),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
