#include "shard/numbers.h"

static int bit_of(const wire_ledger *l, uint64_t i)
{
    return (int)(l->window[i / 64] >> (i % 64) & 1);
}

int numbers_has(const wire_ledger *l, uint64_t number)
{
    if (number <= l->watermark)
        return 1;
    uint64_t i = number - l->watermark - 1;
    return i < NUMBERS_WINDOW && bit_of(l, i);
}

/* Moves the watermark on by n <= 64 numbers. */
static void shift(wire_ledger *l, uint64_t n)
{
    uint64_t in = n < 64 ? l->window[0] & (((uint64_t)1 << n) - 1)
                         : l->window[0];
    l->watermark += n;
    l->skipped += n - (uint64_t)__builtin_popcountll(in);
    for (uint32_t i = 0; i < WIRE_WINDOW_WORDS; i++) {
        uint64_t low = n < 64 ? l->window[i] >> n : 0;
        uint64_t next = i + 1 < WIRE_WINDOW_WORDS ? l->window[i + 1] : 0;
        l->window[i] = low | (n < 64 ? next << (64 - n) : next);
    }
}

/* Moves the watermark over the numbers that have come. */
static void advance(wire_ledger *l)
{
    while (l->window[0] & 1)
        shift(l, ~l->window[0] ? (uint64_t)__builtin_ctzll(~l->window[0])
                               : 64);
}

int numbers_add(wire_ledger *l, uint64_t number)
{
    if (number <= l->watermark)
        return 1;
    uint64_t i = number - l->watermark - 1;
    if (i >= NUMBERS_WINDOW)
        return 0;
    l->window[i / 64] |= (uint64_t)1 << (i % 64);
    advance(l);
    return 1;
}

void numbers_settle(wire_ledger *l, uint64_t number)
{
    while (l->watermark < number) {
        uint64_t n = number - l->watermark;
        if (n > NUMBERS_WINDOW) { /* nothing is in beyond the window */
            for (uint32_t i = 0; i < WIRE_WINDOW_WORDS; i++)
                shift(l, 64);
            l->skipped += number - l->watermark;
            l->watermark = number;
            break;
        }
        shift(l, n > 64 ? 64 : n);
    }
    advance(l);
}

uint64_t numbers_top(const wire_ledger *l)
{
    for (uint32_t i = WIRE_WINDOW_WORDS; i-- > 0;)
        if (l->window[i])
            return l->watermark + 64 * (uint64_t)i + 64 -
                   (uint64_t)__builtin_clzll(l->window[i]);
    return l->watermark;
}

uint64_t numbers_missing(const wire_ledger *mine, const wire_ledger *theirs)
{
    uint64_t missing = 0;
    if (mine->watermark > theirs->watermark) {
        missing = mine->watermark - theirs->watermark;
        for (uint64_t i = 0; i < NUMBERS_WINDOW; i++)
            missing -= bit_of(theirs, i) &&
                       theirs->watermark + 1 + i <= mine->watermark;
    }
    for (uint64_t i = 0; i < NUMBERS_WINDOW; i++)
        missing += bit_of(mine, i) &&
                   !numbers_has(theirs, mine->watermark + 1 + i);
    return missing;
}
