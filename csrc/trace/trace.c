#include "trace/trace.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ids/ids.h"

enum { BITS = 53 }; /* of a hash, that decide */

/* Of the process. */
static struct trace_ring {
    /* A batch is sampled if the first bits of its hash are below; 0: none. */
    _Atomic(uint64_t) below;
    _Atomic(uint64_t) ids; /* that were given to spans */
    pthread_mutex_t lock;  /* guards: */
    trace_span *spans;     /* [room], or NULL */
    size_t room, first, n;
    uint64_t dropped;
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER};

const char *persia_trace_name(enum trace_kind kind)
{
    static const char *const names[TRACE_KINDS] = {
#define TRACE_KIND(upper, name, text) #name,
        TRACE_KINDS_EACH(TRACE_KIND)
#undef TRACE_KIND
    };
    return names[kind];
}

static uint64_t trace_below(void)
{
    return atomic_load_explicit(&ring.below, memory_order_relaxed);
}

uint64_t persia_trace_now(void)
{
    return trace_below() ? persia_clock_ns() : 0;
}

/* No other process gives the same: they begin at random. */
static uint64_t trace_new_id(void)
{
    return id_hash(atomic_fetch_add(&ring.ids, 1)) | 1;
}

void persia_trace_begin(trace_span *t, enum trace_kind kind, uint64_t stream,
                        uint64_t number)
{
    const uint64_t below = trace_below();
    *t = (trace_span){.kind = kind, .stream = stream, .number = number};
    if (!below)
        return;
    const uint64_t high = id_hash(stream ^ id_hash(number));
    if (high >> (64 - BITS) >= below)
        return;
    const uint64_t first = id_hash(high ^ number) | 1;
    t->at = (wire_trace){high, id_hash(high) | 1,
                        kind == TRACE_BATCH ? first : trace_new_id()};
    t->parent = kind == TRACE_BATCH ? 0 : first;
    t->began = persia_clock_ns();
}

void persia_trace_below(trace_span *t, enum trace_kind kind,
                        const wire_trace *parent, uint64_t began)
{
    *t = (trace_span){.kind = kind};
    if (!parent->span || !trace_below())
        return;
    t->at = (wire_trace){parent->high, parent->low, trace_new_id()};
    t->parent = parent->span;
    t->began = began;
}

void persia_trace_end(trace_span *t, int code)
{
    if (!t->began)
        return;
    t->code = code;
    t->ended = t->ended ? t->ended : persia_clock_ns();
    pthread_mutex_lock(&ring.lock);
    if (ring.n < ring.room)
        ring.spans[(ring.first + ring.n++) % ring.room] = *t;
    else
        ring.dropped++;
    pthread_mutex_unlock(&ring.lock);
}

void persia_trace_part(enum trace_kind kind, uint64_t stream, uint64_t number,
                       uint64_t began, uint32_t attempt, int code)
{
    trace_span t;
    if (!began)
        return;
    persia_trace_begin(&t, kind, stream, number);
    if (!t.began)
        return;
    t.began = began;
    t.attempt = attempt;
    persia_trace_end(&t, code);
}

int persia_trace_start(double rate, size_t room)
{
    uint64_t salt;
    int rc = persia_random_id(&salt);
    trace_span *spans = room ? calloc(room, sizeof *spans) : NULL;
    if (!rc && !(rate >= 0 && rate <= 1))
        rc = persia_err_set(PERSIA_EARG, "a rate of %g: need 0 to 1", rate);
    else if (!rc && room && !spans)
        rc = persia_err_set(PERSIA_ENOMEM, "no memory for %zu spans", room);
    if (rc) {
        free(spans);
        return rc;
    }
    pthread_mutex_lock(&ring.lock);
    if (room) {
        free(ring.spans);
        ring.spans = spans;
        ring.room = room;
        ring.first = ring.n = 0;
        ring.dropped = 0;
    }
    pthread_mutex_unlock(&ring.lock);
    atomic_store(&ring.ids, salt);
    atomic_store(&ring.below, (uint64_t)(rate * (double)(1ull << BITS)));
    return PERSIA_OK;
}

size_t persia_trace_take(trace_span *out, size_t room, uint64_t *dropped)
{
    size_t n = 0;
    pthread_mutex_lock(&ring.lock);
    *dropped = ring.dropped;
    for (; n < room && ring.n; n++, ring.n--) {
        out[n] = ring.spans[ring.first];
        ring.first = (ring.first + 1) % ring.room;
    }
    pthread_mutex_unlock(&ring.lock);
    return n;
}
