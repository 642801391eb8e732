/* What a release does where an invariant does not hold: see PERSIA_HOLDS. */
#undef PERSIA_STRICT

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "mem/mem.c"

static void a_breach_is_an_error(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        (void)persia_err_set(PERSIA_EARG, "%s", "");
        assert_int_equal(PERSIA_HOLDS(i == 1), i == 1);
        assert_int_equal(persia_err_text()[0] != 0, i != 1);
    }
}

/* A limit that was passed by mistake refuses what follows. */
static void a_passed_limit_refuses(void **state)
{
    mem_limit limit;
    (void)state;
    persia_mem_limit_init(&limit, 100);
    persia_mem_charge_announced(&limit, 150);
    assert_true(limit.used == 150);
    assert_int_equal(persia_mem_charge(&limit, 1), PERSIA_ELIMIT);
    assert_false(persia_mem_announce(&limit, 1));
    persia_mem_withdraw(&limit, 1);
    persia_mem_release(&limit, 150);
    assert_int_equal(persia_mem_charge(&limit, 100), PERSIA_OK);
    persia_mem_limit_free(&limit);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_breach_is_an_error),
        cmocka_unit_test(a_passed_limit_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
