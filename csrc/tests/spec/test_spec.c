/* The lists of spec: comparison, ranges, sums, field by field. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "spec/spec.h"

static const spec_list *const lists[] = {&persia_table_spec_list,
                                         &persia_optim_hyper_list,
                                         &persia_table_stats_list};
static const size_t sizes[] = {
    sizeof(table_spec), sizeof(optim_hyper), sizeof(table_stats)
};
enum { LISTS = 3, BYTES = 1024 };

static void every_field_is_compared(void **state)
{
    (void)state;
    for (size_t l = 0; l < LISTS; l++) {
        assert_true(sizes[l] <= BYTES);
        for (size_t i = 0; i < lists[l]->n; i++) {
            const spec_field *f = &lists[l]->fields[i];
            _Alignas(8) char a[BYTES] = { 0 }, b[BYTES] = { 0 };
            assert_null(persia_spec_difference(lists[l], a, b));
            b[f->offset] = 1;
            assert_ptr_equal(persia_spec_difference(lists[l], a, b), f);
        }
    }
}

static void ranges_are_those_of_the_proto(void **state)
{
    (void)state;
    table_spec t = { .name = "user", .dim = 4096, .dtype = VECTOR_BF16 };
    assert_null(persia_spec_out_of_range(&persia_table_spec_list, &t));
    t.dim = 4097;
    assert_string_equal(
        persia_spec_out_of_range(&persia_table_spec_list, &t)->name, "dim");
    t.dim = 1;
    t.full = FULL_KINDS;
    assert_string_equal(
        persia_spec_out_of_range(&persia_table_spec_list, &t)->name, "full");
    t.full = 0;
    memset(t.name, 'x', sizeof t.name);
    assert_string_equal(
        persia_spec_out_of_range(&persia_table_spec_list, &t)->name, "name");
}

static void counters_add_up(void **state)
{
    (void)state;
    table_stats sum = { .rows = 1, .row_bytes = 80, .pushes = 7 };
    const table_stats more = { .rows = 2, .row_bytes = 80, .pushes = 5 };
    persia_spec_add(&persia_table_stats_list, &sum, &more);
    assert_int_equal(sum.rows, 3);
    assert_int_equal(sum.row_bytes, 80);
    assert_int_equal(sum.pushes, 7);
}

static void values_are_texts(void **state)
{
    (void)state;
    table_spec spec = {.dim = 7, .full = FULL_EVICT_LRU, .init_a = -0.25f,
                       .capacity = UINT64_MAX, .name = "user"};
    static const char *const wanted[][2] = {
        {"dim", "7"}, {"full", "evict_lru"}, {"init_a", "-0.25"},
        {"capacity", "18446744073709551615"}, {"name", "'user'"}};
    size_t found = 0;
    for (size_t i = 0; i < persia_table_spec_list.n; i++) {
        const spec_field *f = &persia_table_spec_list.fields[i];
        char text[96];
        persia_spec_text(f, &spec, text, sizeof text);
        for (size_t k = 0; k < sizeof wanted / sizeof *wanted; k++)
            if (!strcmp(f->name, wanted[k][0])) {
                assert_string_equal(text, wanted[k][1]);
                found++;
            }
    }
    assert_int_equal(found, sizeof wanted / sizeof *wanted);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_is_compared),
        cmocka_unit_test(ranges_are_those_of_the_proto),
        cmocka_unit_test(counters_add_up),
        cmocka_unit_test(values_are_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
