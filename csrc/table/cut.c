/* cut.c: all rows as they were at one moment.
 *
 * Taking the cut holds the gates exclusively for as long as it takes to note
 * each stripe's number of slots.  Then slots are handed out in order; a push
 * that is about to change a slot not yet handed out first puts the old row
 * aside (stripe_touch_locked), and marks it, so that it is handed out once,
 * as it was.  A stripe is through when its slots and its rows put aside are
 * handed out; only then does the next one begin.
 */
#include "table/emit.h"
#include "table/filter.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct table_cut {
    table *t;
    uint64_t rows;
    uint64_t clock;
    filter_cut filter;    /* of admission; until the cut is stopped */
    pthread_mutex_t lock; /* guards: */
    uint32_t at;          /* stripe */
    int stopped;          /* the table has nothing of it */
};

/* Also takes address space for all rows, which pushes may put aside. */
static int stripe_cut_begin(const table *t, stripe *s)
{
    stripe_cut *c = &s->cut;

    persia_mem_arena_init(&c->aside, NULL, 0); /* charged by cut_more() */
    c->copied = calloc((size_t)s->used / 64 + 1, sizeof(uint64_t));
    if (!c->copied ||
        (s->used && persia_mem_arena_reserve(&c->aside, s->used * t->stride)))
        return persia_err_set(PERSIA_ENOMEM,
                              "table %s: no memory for a snapshot",
                              t->config.name);
    assert(!c->mark && !c->cursor && !c->aside_n);
    c->mark = s->used;
    stripe_note_locked(s);
    return PERSIA_OK;
}

static int cut_make(table *t, table_cut **out)
{
    table_cut *cut;
    int rc = PERSIA_OK;

    if (t->cut)
        return persia_err_set(PERSIA_EARG,
                              "table %s: a snapshot has not ended; wait "
                              "for its end",
                              t->config.name);
    cut = calloc(1, sizeof *cut);
    if (!cut)
        return persia_err_set(PERSIA_ENOMEM,
                              "table %s: no memory for a snapshot",
                              t->config.name);
    pthread_mutex_init(&cut->lock, NULL);
    cut->t = t;
    cut->clock = atomic_load(&t->pushes);
    for (uint32_t i = 0; i < t->stripes && !rc; i++) {
        stripe *s = &t->stripe[i];
        pthread_rwlock_wrlock(&s->lock);
        rc = stripe_cut_begin(t, s);
        cut->rows += s->rows;
        pthread_rwlock_unlock(&s->lock);
    }
    rc = rc ? rc : filter_cut_begin(t, &cut->filter);
    t->cut = cut; /* so that persia_table_cut_end() undoes a part of it */
    *out = cut;
    return rc;
}

static int cut_by_address(const void *a, const void *b)
{
    table *const *x = a, *const *y = b;

    return *x < *y ? -1 : *x > *y;
}

int persia_table_cut_begin(table *const *tables, size_t n, table_cut **out)
{
    table **locked;
    int rc = persia_fork_check("table_cut_begin");

    if (rc)
        return rc;
    locked = malloc((n + 1) * sizeof *locked);
    if (!locked)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a snapshot");
    for (size_t i = 0; i < n; i++) {
        locked[i] = tables[i];
        out[i] = NULL;
    }
    qsort(locked, n, sizeof *locked, cut_by_address);
    for (size_t i = 1; i < n && !rc; i++)
        if (locked[i] == locked[i - 1])
            rc = persia_err_set(PERSIA_EARG,
                                "table %s is twice in one snapshot",
                                locked[i]->config.name);
    if (rc) {
        free(locked);
        return rc;
    }
    for (size_t i = 0; i < n; i++)
        pthread_rwlock_wrlock(&locked[i]->gate);
    for (size_t i = 0; i < n && !rc; i++)
        rc = cut_make(tables[i], &out[i]);
    for (size_t i = 0; i < n; i++)
        pthread_rwlock_unlock(&locked[i]->gate);
    free(locked);
    for (size_t i = 0; rc && i < n; i++) {
        if (out[i])
            persia_table_cut_end(out[i]);
        out[i] = NULL;
    }
    return rc;
}

void cut_touch_lines_locked(const table *t, size_t n, const uint64_t *hash)
{
    for (size_t i = 0; t->cut && i < n; i++)
        filter_touch_locked(t, &t->cut->filter, hash[i]);
}

void cut_clear_lines_locked(const table *t, uint32_t stripe)
{
    filter_clear_locked(t, t->cut ? &t->cut->filter : NULL, stripe);
}

uint64_t persia_table_cut_rows(const table_cut *cut)
{
    return cut->rows;
}

uint64_t persia_table_cut_clock(const table_cut *cut)
{
    return cut->clock;
}

static void stripe_emit_locked(const table *t, stripe *s, size_t room,
                               rows_emit *o)
{
    stripe_cut *c = &s->cut;

    assert(c->mark <= s->used && c->aside_done <= c->aside_n);
    for (; c->cursor < c->mark && o->n < room; c->cursor++) {
        const char *row = stripe_row(t, s, c->cursor);
        uint64_t bit = c->copied[c->cursor / 64] >> (c->cursor % 64) & 1;
        if (!bit && row_clock(row))
            row_emit(t, row, o);
    }
    for (; c->aside_done < c->aside_n && o->n < room; c->aside_done++)
        row_emit(t, c->aside.base + (size_t)c->aside_done * t->stride, o);
}

static int cut_next_locked(table_cut *cut, size_t room, rows_emit *o)
{
    enum { PIECE = 8192 }; /* rows for which a lock is held at most */
    table *t = cut->t;
    int rc = PERSIA_OK;

    if (cut->stopped)
        return persia_err_set(PERSIA_EINTR, "the snapshot was stopped");
    while (o->n < room && cut->at < t->stripes && !rc) {
        stripe *s = &t->stripe[cut->at];
        size_t piece = room - o->n < PIECE ? room : o->n + PIECE;
        pthread_rwlock_wrlock(&s->lock);
        rc = s->cut.failed;
        stripe_emit_locked(t, s, piece, o);
        if (!rc && s->cut.cursor == s->cut.mark &&
            s->cut.aside_done == s->cut.aside_n) {
            stripe_cut_end(t, s);
            cut->at++;
        }
        pthread_rwlock_unlock(&s->lock);
    }
    if (rc)
        return persia_err_set(
            rc,
            "table %s: the snapshot failed: no memory to put "
            "aside rows that changed meanwhile. Raise "
            "memory_limit, or train less while it is written",
            t->config.name);
    return PERSIA_OK;
}

int persia_table_cut_next(table_cut *cut, size_t room, uint64_t *ids,
                          void *vectors, float *state, uint32_t *clocks,
                          uint32_t *fields, size_t *n)
{
    rows_emit o = { .ids = ids, .vectors = vectors, .state = state,
                    .clocks = clocks, .fields = fields };

    pthread_mutex_lock(&cut->lock);
    int rc = cut_next_locked(cut, room, &o);
    pthread_mutex_unlock(&cut->lock);
    *n = rc ? 0 : o.n;
    return rc;
}

int persia_table_cut_sightings(table_cut *cut, uint32_t from, uint32_t n,
                               uint32_t *words)
{
    int rc = PERSIA_OK;

    pthread_mutex_lock(&cut->lock);
    if (cut->stopped)
        rc = persia_err_set(PERSIA_EINTR, "the snapshot was stopped");
    else
        filter_cut_read(cut->t, &cut->filter, from, n, words);
    pthread_mutex_unlock(&cut->lock);
    return rc;
}

static void cut_stop_locked(table_cut *cut)
{
    table *t = cut->t;

    pthread_rwlock_wrlock(&t->gate);
    assert(t->cut == cut);
    for (uint32_t i = cut->at; i < t->stripes; i++) {
        pthread_rwlock_wrlock(&t->stripe[i].lock);
        stripe_cut_end(t, &t->stripe[i]);
        pthread_rwlock_unlock(&t->stripe[i].lock);
    }
    filter_cut_end(t, &cut->filter);
    t->cut = NULL;
    pthread_rwlock_unlock(&t->gate);
    cut->stopped = 1;
}

void persia_table_cut_stop(table_cut *cut)
{
    pthread_mutex_lock(&cut->lock);
    if (!cut->stopped)
        cut_stop_locked(cut);
    pthread_mutex_unlock(&cut->lock);
}

void persia_table_cut_end(table_cut *cut)
{
    persia_table_cut_stop(cut);
    pthread_mutex_destroy(&cut->lock);
    free(cut);
}
