#include "base/window.h"

#include <assert.h>
#include <string.h>

static uint64_t window_size_of(const window *w)
{
    return 64 * (uint64_t)w->words;
}

static uint64_t *window_word_of(const window *w, uint64_t number)
{
    return &w->ring[number / 64 & (w->words - 1)];
}

static uint64_t window_bit_of(uint64_t number)
{
    return (uint64_t)1 << (number % 64);
}

/* Of a number within the window. */
static int window_is_in(const window *w, uint64_t number)
{
    return (*window_word_of(w, number) & window_bit_of(number)) != 0;
}

static uint64_t window_ones(uint64_t bits)
{
    return (uint64_t)__builtin_popcountll(bits);
}

void window_init(window *w, uint64_t *ring, size_t words)
{
    assert(words && (words & (words - 1)) == 0);
    *w = (window){.ring = ring, .words = words};
    memset(ring, 0, words * sizeof *ring);
}

void window_copy(window *to, const window *from)
{
    assert(to->words == from->words);
    to->watermark = from->watermark;
    to->skipped = from->skipped;
    memcpy(to->ring, from->ring, to->words * sizeof *to->ring);
}

int window_has(const window *w, uint64_t number)
{
    if (number <= w->watermark)
        return 1;
    return number - w->watermark <= window_size_of(w) &&
           window_is_in(w, number);
}

enum window_added window_add(window *w, uint64_t number)
{
    if (number <= w->watermark)
        return WINDOW_HAD;
    if (number - w->watermark > window_size_of(w))
        return WINDOW_BEYOND;
    if (window_is_in(w, number))
        return WINDOW_HAD;
    *window_word_of(w, number) |= window_bit_of(number);
    return WINDOW_ADDED;
}

/* Clears the n <= size numbers behind the watermark, word by word; returns
 * how many were in. */
static uint64_t window_clear(window *w, uint64_t n)
{
    uint64_t in = 0, number = w->watermark + 1, end = number + n;
    assert(n <= window_size_of(w));
    while (number < end) {
        uint64_t run = 64 - number % 64;
        run = run < end - number ? run : end - number;
        uint64_t mask = ~(uint64_t)0 >> (64 - run) << (number % 64);
        in += window_ones(*window_word_of(w, number) & mask);
        *window_word_of(w, number) &= ~mask;
        number += run;
    }
    return in;
}

void window_settle(window *w, uint64_t number)
{
    if (number <= w->watermark)
        return;
    uint64_t n = number - w->watermark;
    uint64_t in =
        window_clear(w, n < window_size_of(w) ? n : window_size_of(w));
    assert(in <= n);
    w->skipped += n - in;
    w->watermark = number;
}

void window_advance(window *w)
{
    while (window_is_in(w, w->watermark + 1)) {
        w->watermark++;
        *window_word_of(w, w->watermark) &= ~window_bit_of(w->watermark);
    }
}

uint64_t window_top(const window *w)
{
    for (uint64_t i = window_size_of(w); i > 0;) {
        uint64_t number = w->watermark + i;
        uint64_t low = *window_word_of(w, number) << (63 - number % 64);
        uint64_t run = number % 64 + 1; /* numbers of this word, down */
        if (low && (uint64_t)__builtin_clzll(low) < i)
            return number - (uint64_t)__builtin_clzll(low);
        i -= run < i ? run : i;
    }
    return w->watermark;
}

uint64_t window_count(const window *w)
{
    uint64_t n = 0;
    for (size_t i = 0; i < w->words; i++)
        n += window_ones(w->ring[i]);
    return n;
}

uint64_t window_missing(const window *mine, const window *theirs)
{
    uint64_t missing = 0;
    if (mine->watermark > theirs->watermark) {
        missing = mine->watermark - theirs->watermark;
        uint64_t reach = missing < window_size_of(theirs)
                             ? missing
                             : window_size_of(theirs);
        for (uint64_t i = 1; i <= reach; i++)
            missing -= (uint64_t)window_is_in(theirs, theirs->watermark + i);
        assert(missing <= mine->watermark - theirs->watermark);
    }
    for (uint64_t i = 1; i <= window_size_of(mine); i++)
        missing += window_is_in(mine, mine->watermark + i) &&
                   !window_has(theirs, mine->watermark + i);
    return missing;
}

void window_to_bits(const window *w, uint64_t *bits)
{
    uint64_t first = w->watermark + 1, by = first % 64;
    for (size_t i = 0; i < w->words; i++) {
        uint64_t low = *window_word_of(w, first + 64 * i);
        uint64_t high = *window_word_of(w, first + 64 * i + 64);
        bits[i] = by ? low >> by | high << (64 - by) : low;
    }
}

void window_from_bits(window *w, uint64_t watermark, uint64_t skipped,
                      const uint64_t *bits)
{
    window_init(w, w->ring, w->words);
    w->watermark = watermark;
    w->skipped = skipped;
    for (size_t i = 0; i < w->words; i++)
        for (uint64_t left = bits[i]; left; left &= left - 1)
            (void)window_add(w, watermark + 1 + 64 * i +
                                    (uint64_t)__builtin_ctzll(left));
}
