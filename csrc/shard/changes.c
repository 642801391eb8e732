/* changes.c: what changed in a table since a reader asked last. */
#include "shard/private.h"

#include <stdlib.h>
#include <string.h>

enum {
    READERS_MAX = 4096, /* of all tables */
    PIECE_ROWS = 8192   /* of a call of the table */
};
/* One that asks no more is forgotten. */
static const uint64_t SILENCE_NS = 600ull * 1000000000;

struct changes_reader {
    uint64_t name;
    uint32_t no;
    uint64_t pieces; /* that it was given */
    uint64_t asked;  /* when it asked last, of the clock */
    table_watch *watch;
};

void readers_init(readers *r)
{
    *r = (readers){ .n = 0 };
    pthread_mutex_init(&r->lock, NULL);
}

static void reader_drop_locked(readers *r, size_t i)
{
    persia_table_watch_close(r->of[i].watch);
    r->of[i] = r->of[--r->n];
}

void readers_free(readers *r)
{
    while (r->n)
        reader_drop_locked(r, r->n - 1);
    free(r->of);
    pthread_mutex_destroy(&r->lock);
}

void readers_drop_silent(readers *r)
{
    const uint64_t now = persia_clock_ns();

    pthread_mutex_lock(&r->lock);
    for (size_t i = r->n; i-- > 0;)
        if (now - r->of[i].asked > SILENCE_NS)
            reader_drop_locked(r, i);
    pthread_mutex_unlock(&r->lock);
}

static size_t reader_find_locked(const readers *r, const wire_changes *m)
{
    size_t i = 0;

    while (i < r->n &&
           (r->of[i].name != m->reader || r->of[i].no != m->no))
        i++;
    return i;
}

static int reader_begin_locked(readers *r, table *t, const wire_changes *m)
{
    if (r->n == READERS_MAX)
        return persia_err_set(PERSIA_ELIMIT,
                              "%d readers of changes are there already",
                              READERS_MAX);
    struct changes_reader *more = realloc(r->of, (r->n + 1) * sizeof *more);
    if (!more)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a reader");
    r->of = more;
    more[r->n] = (struct changes_reader){ .name = m->reader, .no = m->no,
                                          .asked = persia_clock_ns() };
    const int rc = persia_table_watch_open(t, 0, &more[r->n].watch);
    r->n += !rc;
    return rc;
}

/* Pieces of different stripes, whose ids differ, as many as there is room
 * for. */
static int changes_read(struct changes_reader *of, uint32_t dim, size_t room,
                        answer *a, uint64_t *left)
{
    wire_changes_reply *out = &a->m.changes;
    uint64_t *ids = a->bulk;
    float *vectors = (float *)(ids + room);
    uint32_t stripe = UINT32_MAX;

    out->ids = ids;
    out->vectors = vectors;
    out->gone = left;
    out->erased = left + room;
    while (!out->end && out->n < room && out->gone_n < room &&
           out->erased_n < room) {
        size_t some = room - out->n;
        some = room - out->gone_n < some ? room - out->gone_n : some;
        some = room - out->erased_n < some ? room - out->erased_n : some;
        table_changes c = { .room = some < PIECE_ROWS ? some : PIECE_ROWS,
                            .ids = ids + out->n,
                            .floats = vectors + out->n * dim,
                            .gone = out->gone + out->gone_n,
                            .erased = out->erased + out->erased_n };
        const int rc = persia_table_watch_next(of->watch, &c);
        if (rc)
            return rc;
        out->n += c.n;
        out->gone_n += c.gone_n;
        out->erased_n += c.erased_n;
        out->reset |= (uint32_t)c.reset;
        out->end = (uint32_t)c.end;
        if (c.stripe == stripe)
            break;
        stripe = c.stripe;
    }
    return PERSIA_OK;
}

static int changes_answer(shard *s, const wire_changes *m,
                          struct changes_reader *of, answer *a)
{
    const table *t = persia_tables_table(s->p, m->no);
    const uint32_t dim = persia_table_get_config(t)->dim;
    const uint64_t each = sizeof(uint64_t) * (1 + 2 * 10) +
                          sizeof(float) * dim; /* ids that left: varints */
    const uint64_t fit = persia_wire_fit(s->message_limit, each);
    size_t room = m->room && m->room < fit ? m->room : (size_t)fit;
    room = room < WIRE_CHANGES_MAX ? room : WIRE_CHANGES_MAX;
    a->m.changes = (wire_changes_reply){ .no = m->no, .dim = dim };
    uint64_t *left = persia_wire_memory_take(&a->memory,
                                             2 * room * sizeof *left);
    if (!left)
        return PERSIA_ENOMEM;
    int rc = persia_mem_pool_take(
        s->blocks, room * (sizeof(uint64_t) + dim * sizeof(float)), &a->bulk);
    return rc ? rc : changes_read(of, dim, room, a, left);
}

static int changes_locked(shard *s, const wire_changes *m, answer *a)
{
    readers *r = &s->readers;
    table *t;
    int rc = check_rows(s, &m->caller);
    if (rc || (rc = find_table(s, m->no, &t)))
        return rc;
    size_t i = reader_find_locked(r, m);
    if (i < r->n && (m->verb == CHANGES_BEGIN || m->verb == CHANGES_END))
        reader_drop_locked(r, i);
    a->m.changes = (wire_changes_reply){ .no = m->no };
    if (m->verb == CHANGES_BEGIN)
        return reader_begin_locked(r, t, m);
    if (m->verb == CHANGES_END)
        return PERSIA_OK;
    if (i < r->n)
        r->of[i].asked = persia_clock_ns();
    if (i < r->n && m->verb == CHANGES_COUNT) {
        a->m.changes.changed = persia_table_watch_rows(r->of[i].watch);
        return PERSIA_OK;
    }
    if (i < r->n && r->of[i].pieces != m->piece) {
        reader_drop_locked(r, i); /* an answer was lost, and what it had */
        i = r->n;
    }
    if (i >= r->n) {
        a->m.changes.unknown = 1;
        return PERSIA_OK;
    }
    r->of[i].pieces++;
    return changes_answer(s, m, &r->of[i], a);
}

void changes_run(shard *s, const shard_call *c, const wire_changes *m)
{
    answer *a;
    int rc = answer_make(&a);
    if (!rc) {
        readers_drop_silent(&s->readers);
        pthread_mutex_lock(&s->readers.lock);
        rc = changes_locked(s, m, a);
        pthread_mutex_unlock(&s->readers.lock);
    }
    answer_give(c, rc, a);
}
