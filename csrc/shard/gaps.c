#include "shard/gaps.h"

#include <string.h>

enum { RANGES = WIRE_GAPS_MAX / 2 };

typedef struct range {
    uint64_t first, last;
} range;

/* One more than there is room for. */
typedef struct ranges {
    range at[RANGES + 1];
    size_t n;
} ranges;

static void read_ranges(ranges *out, const uint64_t *gaps)
{
    out->n = 0;
    while (out->n < RANGES && gaps[2 * out->n]) {
        const uint64_t *g = &gaps[2 * out->n];
        out->at[out->n++] = (range){g[0], g[1]};
    }
}

static void write_ranges(uint64_t *gaps, const ranges *from)
{
    memset(gaps, 0, WIRE_GAPS_MAX * sizeof *gaps);
    for (size_t i = 0; i < from->n; i++) {
        gaps[2 * i] = from->at[i].first;
        gaps[2 * i + 1] = from->at[i].last;
    }
}

/* Joins range i and the one behind it. */
static void shard_gaps_join(ranges *r, size_t i)
{
    if (r->at[i + 1].last > r->at[i].last)
        r->at[i].last = r->at[i + 1].last;
    memmove(&r->at[i + 1], &r->at[i + 2],
            (r->n - i - 2) * sizeof *r->at);
    r->n--;
}

static void gaps_join_closest(ranges *r)
{
    size_t best = 0;
    for (size_t i = 1; i + 1 < r->n; i++)
        if (r->at[i + 1].first - r->at[i].last <
            r->at[best + 1].first - r->at[best].last)
            best = i;
    shard_gaps_join(r, best);
}

static void gaps_add(uint64_t *gaps, range new)
{
    ranges r;
    size_t at = 0;
    read_ranges(&r, gaps);
    while (at < r.n && r.at[at].first < new.first)
        at++;
    memmove(&r.at[at + 1], &r.at[at], (r.n - at) * sizeof *r.at);
    r.at[at] = new;
    r.n++;
    for (size_t i = at ? at - 1 : 0; i + 1 < r.n;)
        if (r.at[i + 1].first <= r.at[i].last + 1)
            shard_gaps_join(&r, i);
        else
            i++;
    if (r.n > RANGES)
        gaps_join_closest(&r);
    write_ranges(gaps, &r);
}

void gaps_settle(uint64_t *gaps, const window *w, uint64_t number)
{
    const uint64_t size = 64 * (uint64_t)w->words;
    for (uint64_t n = w->watermark + 1; n <= number; n++) {
        if (window_has(w, n))
            continue;
        range r = {n, n};
        while (r.last < number && r.last - w->watermark <= size &&
               !window_has(w, r.last + 1))
            r.last++;
        if (r.last - w->watermark > size)
            r.last = number;
        gaps_add(gaps, r);
        n = r.last;
    }
}

void gaps_fill(uint64_t *gaps, uint64_t number)
{
    ranges r;
    read_ranges(&r, gaps);
    for (size_t i = 0; i < r.n; i++) {
        range *g = &r.at[i];
        if (number < g->first || number > g->last)
            continue;
        const range behind = {number + 1, g->last};
        g->last = number - 1;
        if (g->first > g->last) {
            memmove(g, g + 1, (r.n - i - 1) * sizeof *g);
            r.n--;
        }
        write_ranges(gaps, &r);
        if (behind.first <= behind.last)
            gaps_add(gaps, behind);
        return;
    }
}

void gaps_join(uint64_t *gaps, const uint64_t *more)
{
    ranges r;
    read_ranges(&r, more);
    for (size_t i = 0; i < r.n; i++)
        gaps_add(gaps, r.at[i]);
}

int gaps_have(const uint64_t *gaps, uint64_t number)
{
    for (size_t i = 0; i < WIRE_GAPS_MAX && gaps[i]; i += 2)
        if (number >= gaps[i] && number <= gaps[i + 1])
            return 1;
    return 0;
}

int ledger_lacks(const wire_ledger *l, uint64_t number)
{
    const uint64_t bit = number - l->watermark - 1;
    if (number <= l->watermark)
        return gaps_have(l->gaps, number);
    return bit >= 64 * WIRE_WINDOW_MAX ||
           !(l->window[bit / 64] >> bit % 64 & 1);
}

int ledger_lists(const wire_ledger *l, uint64_t number)
{
    return number <= l->watermark || !ledger_lacks(l, number);
}

void ledger_add_to(window *w, const wire_ledger *l)
{
    window_settle(w, l->watermark);
    for (uint64_t i = 0; i < 64 * (uint64_t)WIRE_WINDOW_MAX; i++)
        if (l->window[i / 64] >> i % 64 & 1)
            (void)window_add(w, l->watermark + 1 + i);
    window_advance(w);
}
