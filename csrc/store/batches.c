#include "store/batches.h"

#include <stdlib.h>

void batch_add_forward(batch *b, uint64_t ticket)
{
    for (size_t i = 0; i < b->forwards_n; i++)
        if (b->forwards[i].ticket == ticket)
            return; /* computed again by a checkpoint */
    if (b->forwards_n == b->forwards_room) {
        size_t room = b->forwards_room ? 2 * b->forwards_room : 4;
        forward *more = realloc(b->forwards, room * sizeof *more);
        if (!more)
            return; /* then it does not count: as ids that were not ours */
        b->forwards = more;
        b->forwards_room = room;
    }
    b->forwards[b->forwards_n++] = (forward){ticket, OUT, 0};
    b->reading = 0;
}

int batch_is_held(const batch *b)
{
    int held = 0;
    for (size_t i = 0; i < b->forwards_n; i++) {
        if (b->forwards[i].at == OUT || b->forwards[i].at == APPLYING)
            return 0;
        held |= b->forwards[i].at == HELD;
    }
    return held;
}

int batch_is_applying(const batch *b)
{
    for (size_t i = 0; i < b->forwards_n; i++)
        if (b->forwards[i].at == APPLYING)
            return 1;
    return 0;
}

/* The one update that was sent with all gradients that are not ended; 0 if
 * there is none. */
static uint64_t sent_in(const batch *b)
{
    uint64_t update = 0;
    for (size_t i = 0; i < b->forwards_n; i++) {
        const forward *f = &b->forwards[i];
        if (f->at == ENDED)
            continue;
        if (f->at != APPLYING || !f->update ||
            (update && f->update != update))
            return 0;
        update = f->update;
    }
    return update;
}

earlier stream_look_before(const stream *t, const batch *last)
{
    earlier e = {0};
    for (const batch *b = t->batches; b != last; b = b->next) {
        /* Other ranks wait for a part even of a batch that is only read. */
        if (b->closed || (b->reading && !t->sync))
            continue;
        int waits = batch_is_held(b);
        uint64_t update = t->staleness ? 0 : sent_in(b);
        e.held |= waits;
        if (update && (!e.after || e.after == update))
            e.after = update;
        else
            e.open += !waits;
    }
    return e;
}

int stream_is_behind(const stream *t, const batch *last)
{
    for (const batch *b = t->batches; b != last && !t->staleness; b = b->next)
        if (!b->closed && batch_is_applying(b))
            return 1;
    return 0;
}
