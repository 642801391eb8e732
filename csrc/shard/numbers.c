#include "shard/numbers.h"

void numbers_init(numbers_set *n, uint64_t watermark)
{
    window_init(&n->w, n->ring, WIRE_WINDOW_WORDS);
    n->w.watermark = watermark;
}

void numbers_add(numbers_set *n, uint64_t number)
{
    (void)window_add(&n->w, number);
    window_advance(&n->w);
}

void numbers_settle(numbers_set *n, uint64_t number)
{
    window_settle(&n->w, number);
    window_advance(&n->w);
}

void numbers_from_wire(numbers_set *n, const wire_ledger *from)
{
    numbers_init(n, 0);
    window_from_bits(&n->w, from->watermark, from->skipped, from->window);
    window_advance(&n->w);
}

void numbers_to_wire(const numbers_set *n, wire_ledger *to)
{
    to->watermark = n->w.watermark;
    to->skipped = n->w.skipped;
    window_to_bits(&n->w, to->window);
}

uint64_t numbers_wire_top(const wire_ledger *from)
{
    numbers_set n;
    numbers_from_wire(&n, from);
    return window_top(&n.w);
}
