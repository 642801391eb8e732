#include "mem/gather.h"

#include <stdlib.h>
#include <string.h>

/* Up to here a copy costs less than a span of its own, bytes. */
enum { POINT_FROM = 512 };

void persia_wire_out_init(wire_out *o)
{
    *o = (wire_out){ 0 };
}

void persia_wire_out_free(wire_out *o)
{
    free(o->spans);
    chunks_free(&o->chunks);
    *o = (wire_out){ 0 };
}

void persia_wire_out_copy(const wire_out *o, void *to)
{
    char *at = to;
    for (size_t i = 0; i < o->spans_n; i++) {
        memcpy(at, o->spans[i].data, o->spans[i].n);
        at += o->spans[i].n;
    }
}

/* Room for n spans more. */
static int spans_need(wire_out *o, size_t n)
{
    size_t room = o->spans_room;
    if (o->spans_n + n <= room)
        return PERSIA_OK;
    while (room < o->spans_n + n)
        room = room ? 2 * room : 16;
    wire_span *spans = realloc(o->spans, room * sizeof *spans);
    if (!spans)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for %zu spans of a message", room);
    o->spans = spans;
    o->spans_room = room;
    return PERSIA_OK;
}

/* Adds a span, or makes the last one longer where the new one continues it.
 * `bytes` is not 0. */
static int gather_add_span(wire_out *o, const void *data, size_t bytes)
{
    wire_span *last = o->spans_n ? &o->spans[o->spans_n - 1] : NULL;
    if (last && (const char *)last->data + last->n == data) {
        last->n += bytes;
    } else {
        int rc = spans_need(o, 1);
        if (rc)
            return rc;
        o->spans[o->spans_n++] = (wire_span){ data, bytes };
    }
    o->bytes += bytes;
    return PERSIA_OK;
}

int persia_wire_out_add(wire_out *o, const void *data, size_t bytes)
{
    if (!bytes)
        return PERSIA_OK;
    void *to = chunks_take(&o->chunks, bytes, 1);
    if (!to)
        return PERSIA_ENOMEM;
    memcpy(to, data, bytes);
    return gather_add_span(o, to, bytes);
}

int persia_wire_out_refer(wire_out *o, const void *data, size_t bytes)
{
    if (bytes < POINT_FROM)
        return persia_wire_out_add(o, data, bytes);
    o->referred += bytes;
    return gather_add_span(o, data, bytes);
}

int persia_wire_out_append(wire_out *o, wire_out *more)
{
    int rc = spans_need(o, more->spans_n);
    if (rc)
        return rc;
    if (more->spans_n)
        memcpy(o->spans + o->spans_n, more->spans,
               more->spans_n * sizeof *more->spans);
    o->spans_n += more->spans_n;
    o->bytes += more->bytes;
    o->referred += more->referred;
    chunks_join(&o->chunks, &more->chunks);
    persia_wire_out_free(more);
    return PERSIA_OK;
}

/* ---- how large a message may be ---- */

int persia_wire_check_size(const char *whose, const char *what,
                           uint64_t bytes, uint64_t limit)
{
    if (!limit || bytes <= limit)
        return PERSIA_OK;
    return persia_err_set(PERSIA_ELIMIT,
                          "%s: %s of %llu bytes; a message there has at most "
                          "%llu: make the batch smaller, ask for less at "
                          "once, or raise `message_limit`",
                          whose, what, (unsigned long long)bytes,
                          (unsigned long long)limit);
}

uint64_t persia_wire_fit(uint64_t limit, uint64_t each)
{
    const uint64_t n = limit ? limit / 2 / each : UINT64_MAX;
    return n ? n : 1;
}
