#include "shard/acks.h"

#include <stdlib.h>
#include <string.h>

#include "shard/gaps.h"

enum { WORDS_MAX = 1 << 21, READ_MAX = 1 << 20 };

void acks_free(acks *a)
{
    free(a->bits);
    *a = (acks){0};
}

/* The oldest half ends where there would be too many. */
static void acks_drop_old(acks *a, uint64_t words)
{
    const size_t kept = words < a->words ? a->words - (size_t)words : 0;
    if (kept)
        memmove(a->bits, a->bits + words, kept * sizeof *a->bits);
    if (a->words)
        memset(a->bits + kept, 0, (a->words - kept) * sizeof *a->bits);
    a->base += 64 * words;
}

/* Room for the word of a number that is not before the base. */
static int acks_reach(acks *a, uint64_t number)
{
    uint64_t word = (number - a->base) / 64;
    if (word >= WORDS_MAX) {
        acks_drop_old(a, word - WORDS_MAX / 2);
        word = WORDS_MAX / 2;
    }
    if (word < a->words)
        return PERSIA_OK;
    const size_t words = (size_t)word + 1 + a->words / 2;
    uint64_t *more = realloc(a->bits, words * sizeof *more);
    if (!more)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for the updates of a data loader");
    memset(more + a->words, 0, (words - a->words) * sizeof *more);
    a->bits = more;
    a->words = words;
    return PERSIA_OK;
}

int acks_add(acks *a, uint64_t number)
{
    if (number < a->base)
        return PERSIA_OK;
    int rc = acks_reach(a, number);
    if (!rc)
        a->bits[(number - a->base) / 64] |= (uint64_t)1 << number % 64;
    return rc;
}

int acks_read(acks *a, const wire_ledger *from)
{
    const uint64_t last = from->watermark + 64 * (uint64_t)WIRE_WINDOW_MAX;
    const uint64_t first =
        from->watermark > READ_MAX ? from->watermark - READ_MAX : 1;
    int rc = PERSIA_OK;
    acks_free(a);
    a->base = first / 64 * 64;
    for (uint64_t n = first; n <= last && !rc; n++)
        if (!ledger_lacks(from, n))
            rc = acks_add(a, n);
    return rc;
}

int acks_like(const acks *from, acks *out)
{
    *out = (acks){.base = from->base, .words = from->words};
    out->bits = calloc(from->words + 1, sizeof *out->bits);
    return out->bits ? PERSIA_OK
                     : persia_err_set(PERSIA_ENOMEM,
                                      "no memory to compare updates");
}

int acks_copy(const acks *from, acks *out)
{
    int rc = acks_like(from, out);
    if (!rc && from->words)
        memcpy(out->bits, from->bits, from->words * sizeof *from->bits);
    return rc;
}

void acks_lacking(const acks *a, const wire_ledger *l, acks *lost)
{
    for (size_t i = 0; i < a->words; i++)
        for (uint64_t left = a->bits[i]; left; left &= left - 1) {
            const unsigned bit = (unsigned)__builtin_ctzll(left);
            if (ledger_lacks(l, a->base + 64 * i + bit))
                lost->bits[i] |= (uint64_t)1 << bit;
        }
}

int acks_have(const acks *a, uint64_t number)
{
    return number >= a->base && (number - a->base) / 64 < a->words &&
           (a->bits[(number - a->base) / 64] >> number % 64 & 1);
}

int acks_count(const acks *a, const acks *lost, acks *counted, uint64_t *n)
{
    int rc = PERSIA_OK;
    for (size_t i = 0; i < lost->words; i++)
        for (uint64_t left = lost->bits[i]; left && !rc; left &= left - 1) {
            const uint64_t number = lost->base + 64 * i +
                                    (uint64_t)__builtin_ctzll(left);
            if (!acks_have(a, number) || acks_have(counted, number))
                continue;
            rc = acks_add(counted, number);
            *n += !rc;
        }
    return rc;
}
