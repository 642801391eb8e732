/* base, windows: against a plain array of what happened to each number. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "base/base.h"

enum { LAST = 4096, WORDS_MAX = 8 };

/* What a window should hold. */
typedef struct naive {
    uint64_t watermark, size;
    uint8_t in[LAST]; /* also of numbers up to the watermark */
} naive;

static uint64_t seed;

static uint64_t below(uint64_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (seed >> 33) % n;
}

static int naive_has(const naive *s, uint64_t n)
{
    return n <= s->watermark || (n < LAST && s->in[n]);
}

static enum window_added naive_add(naive *s, uint64_t n)
{
    if (n > s->watermark + s->size)
        return WINDOW_BEYOND;
    if (naive_has(s, n))
        return WINDOW_HAD;
    s->in[n] = 1;
    return WINDOW_ADDED;
}

static void compare(const window *w, const naive *s)
{
    uint64_t skipped = 0, top = s->watermark, count = 0;
    for (uint64_t n = 1; n <= s->watermark; n++)
        skipped += !s->in[n];
    for (uint64_t n = s->watermark + 1; n < LAST; n++) {
        count += s->in[n];
        top = s->in[n] ? n : top;
    }
    assert_int_equal(w->watermark, s->watermark);
    assert_int_equal(w->skipped, skipped);
    assert_int_equal(window_top(w), top);
    assert_int_equal(window_count(w), count);
    for (uint64_t n = 0; n < s->watermark + 2 * s->size; n++)
        assert_int_equal(window_has(w, n), naive_has(s, n));
    uint64_t bits[WORDS_MAX], ring[WORDS_MAX];
    window_to_bits(w, bits);
    for (uint64_t i = 0; i < s->size; i++)
        assert_int_equal(bits[i / 64] >> (i % 64) & 1,
                         s->in[s->watermark + 1 + i]);
    window again = {.ring = ring, .words = w->words};
    window_from_bits(&again, w->watermark, w->skipped, bits);
    assert_memory_equal(again.ring, w->ring, w->words * sizeof *ring);
    window_init(&again, ring, w->words);
    window_copy(&again, w);
    assert_memory_equal(again.ring, w->ring, w->words * sizeof *ring);
    assert_int_equal(again.watermark, w->watermark);
    assert_int_equal(again.skipped, w->skipped);
}

static void change(window *w, naive *s)
{
    uint64_t near = s->watermark + below(s->size + 20), n;
    switch (below(8)) {
    case 0:
        n = below(4) ? near : s->watermark + below(3 * s->size);
        window_settle(w, n);
        s->watermark = n > s->watermark ? n : s->watermark;
        break;
    case 1:
        window_advance(w);
        while (s->in[s->watermark + 1])
            s->watermark++;
        break;
    default:
        n = below(2) ? s->watermark + 1 + below(6) : near;
        assert_int_equal(window_add(w, n), naive_add(s, n));
    }
}

static void random_calls_against_an_array(void **state)
{
    (void)state;
    static naive s;
    for (uint64_t round = 0; round < 60; round++) {
        uint64_t ring[WORDS_MAX];
        window w;
        memset(&s, 0, sizeof s);
        size_t words = (size_t)1 << round % 4;
        s.size = 64 * words;
        window_init(&w, ring, words);
        seed = round;
        while (s.watermark + 4 * s.size < LAST && below(2000)) {
            change(&w, &s);
            compare(&w, &s);
        }
    }
}

static void fill(window *w, naive *s, uint64_t by)
{
    seed = by;
    for (uint64_t i = 0; i < 10 + below(200); i++)
        if (s->watermark + 4 * s->size < LAST)
            change(w, s);
}

static void missing_numbers_are_counted(void **state)
{
    (void)state;
    static naive a, b;
    for (uint64_t round = 0; round < 400; round++) {
        uint64_t ring[2][2], missing = 0;
        window x, y;
        memset(&a, 0, sizeof a);
        memset(&b, 0, sizeof b);
        a.size = b.size = 128;
        window_init(&x, ring[0], 2);
        window_init(&y, ring[1], 2);
        fill(&x, &a, 2 * round);
        fill(&y, &b, 2 * round + 1);
        for (uint64_t n = 1; n < LAST; n++)
            missing += naive_has(&a, n) && !naive_has(&b, n);
        assert_int_equal(window_missing(&x, &y), missing);
        assert_int_equal(window_missing(&x, &x), 0);
    }
}

static void far_numbers_do_not_overflow(void **state)
{
    (void)state;
    uint64_t ring[2];
    window w;
    window_init(&w, ring, 2);
    assert_int_equal(window_add(&w, UINT64_MAX), WINDOW_BEYOND);
    assert_int_equal(window_has(&w, UINT64_MAX), 0);
    window_settle(&w, UINT64_MAX - 200);
    assert_int_equal(w.skipped, UINT64_MAX - 200);
    assert_int_equal(window_add(&w, UINT64_MAX - 72), WINDOW_ADDED);
    assert_int_equal(window_add(&w, UINT64_MAX - 71), WINDOW_BEYOND);
    assert_int_equal(window_top(&w), UINT64_MAX - 72);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_calls_against_an_array),
        cmocka_unit_test(missing_numbers_are_counted),
        cmocka_unit_test(far_numbers_do_not_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
