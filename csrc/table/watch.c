/* watch.c: rows that changed since a reader looked last.
 *
 * A push marks the slots that it changes (stripe_touch_locked).  A reader goes
 * through the stripes; of each it takes the marked slots and clears their
 * marks, under the stripe's lock, a piece at a time.  What changes behind it
 * is of its next round.
 */
#include "table/watch.h"

#include "table/emit.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    NO_SLOTS = UINT32_MAX,
    GONE_MIN = 65536, /* ids that a list may have in any stripe */
    PIECE = 8192      /* rows, or ids, for which a lock is held at most */
};

struct table_watch {
    table *t;
    table_watch *next;      /* of the table; guarded by its gate */
    pthread_mutex_t lock;   /* guards: */
    id_list erased;
    size_t erasing;         /* ids that have room in `erased`, of calls that
                               erase them now */
    uint32_t stripe;        /* that is read next */
    struct stripe_watch of[]; /* [stripes] */
};

/* Room for more ids, at most `most` in all. */
static int id_list_need(const table *t, id_list *l, size_t more, size_t most)
{
    if (l->n + more <= l->room)
        return PERSIA_OK;
    size_t room = 2 * l->room > 64 ? 2 * l->room : 64;
    room = room < l->n + more ? l->n + more : room;
    if (room > most)
        room = most;
    if (l->n + more > room)
        return PERSIA_ELIMIT;
    const uint64_t bytes = (room - l->room) * sizeof *l->ids;
    const int rc = persia_mem_charge(t->config.limit, bytes);
    uint64_t *ids = rc ? NULL : realloc(l->ids, room * sizeof *ids);
    if (!ids) {
        if (!rc)
            persia_mem_release(t->config.limit, bytes);
        return rc ? rc : PERSIA_ENOMEM;
    }
    l->ids = ids;
    l->room = room;
    return PERSIA_OK;
}

static void id_list_free(const table *t, id_list *l)
{
    persia_mem_release(t->config.limit, l->room * sizeof *l->ids);
    free(l->ids);
    *l = (id_list){ 0 };
}

/* Takes the last ids, at most so many. */
static size_t id_list_take(id_list *l, size_t most, uint64_t *out)
{
    const size_t n = l->n < most ? l->n : most;

    l->n -= n;
    if (n && out)
        memcpy(out, l->ids + l->n, n * sizeof *out);
    return n;
}

/* ---- marks -------------------------------------------------------------- */

static void stripe_watch_reset(stripe_watch *w)
{
    if (w->words)
        memset(w->changed, 0, w->words * sizeof *w->changed);
    w->marked = w->from = 0;
    w->reset = 1;
    w->gone.n = 0;
}

void watch_reset_locked(stripe *s)
{
    for (stripe_watch *w = s->watches; w; w = w->next)
        stripe_watch_reset(w);
}

/* Bits for all slots of the stripe, and as many again. */
static int stripe_watch_widen(const table *t, const stripe *s,
                              stripe_watch *w)
{
    const uint32_t words = (uint32_t)(((uint64_t)s->used * 2 + 63) / 64);
    const uint64_t bytes = (uint64_t)(words - w->words) * sizeof(uint64_t);

    if (persia_mem_charge(t->config.limit, bytes))
        return 0;
    uint64_t *changed = realloc(w->changed, words * sizeof *changed);
    if (!changed) {
        persia_mem_release(t->config.limit, bytes);
        return 0;
    }
    memset(changed + w->words, 0, (size_t)bytes);
    w->changed = changed;
    w->words = words;
    return 1;
}

void watch_mark_locked(const table *t, stripe *s, uint32_t slot)
{
    const uint64_t bit = (uint64_t)1 << (slot % 64);

    for (stripe_watch *w = s->watches; w; w = w->next) {
        if (slot >= w->from)
            continue;
        if (slot / 64 >= w->words && !stripe_watch_widen(t, s, w)) {
            stripe_watch_reset(w);
            continue;
        }
        w->marked += !(w->changed[slot / 64] & bit);
        w->changed[slot / 64] |= bit;
    }
}

void watch_gone_locked(const table *t, stripe *s, uint64_t id)
{
    const size_t most = s->rows > GONE_MIN ? s->rows : GONE_MIN;

    for (stripe_watch *w = s->watches; w; w = w->next)
        if (id_list_need(t, &w->gone, 1, most))
            stripe_watch_reset(w);
        else
            w->gone.ids[w->gone.n++] = id;
}

/* Room for n ids more than those that other calls erase now. */
static int watch_promise(const table *t, table_watch *w, size_t n)
{
    pthread_mutex_lock(&w->lock);
    const int rc = id_list_need(t, &w->erased, w->erasing + n,
                                SIZE_MAX / sizeof(uint64_t));
    if (!rc)
        w->erasing += n;
    pthread_mutex_unlock(&w->lock);
    return rc;
}

/* What was promised becomes these ids; NULL: none. */
static void watch_keep(table_watch *w, size_t n, const uint64_t *ids)
{
    pthread_mutex_lock(&w->lock);
    assert(w->erasing >= n && w->erased.n + n <= w->erased.room);
    w->erasing -= n;
    if (ids) {
        memcpy(w->erased.ids + w->erased.n, ids, n * sizeof *ids);
        w->erased.n += n;
    }
    pthread_mutex_unlock(&w->lock);
}

int watch_erase_begin(table *t, size_t n)
{
    for (table_watch *w = t->watches; w; w = w->next) {
        const int rc = watch_promise(t, w, n);
        if (!rc)
            continue;
        for (table_watch *had = t->watches; had != w; had = had->next)
            watch_keep(had, n, NULL);
        return persia_err_set(rc,
                              "table %s: no memory to note %zu erased ids "
                              "for a reader of its changes; nothing was "
                              "erased",
                              t->config.name, n);
    }
    return PERSIA_OK;
}

void watch_erase_end(table *t, size_t n, const uint64_t *ids)
{
    for (table_watch *w = t->watches; w && n; w = w->next)
        watch_keep(w, n, ids);
}

/* ---- life --------------------------------------------------------------- */

static void stripe_watch_begin(stripe *s, stripe_watch *w, int all)
{
    pthread_rwlock_wrlock(&s->lock);
    *w = (stripe_watch){ .from = all ? 0 : NO_SLOTS, .next = s->watches };
    s->watches = w;
    stripe_note_locked(s);
    pthread_rwlock_unlock(&s->lock);
}

static void stripe_watch_end(const table *t, stripe *s, stripe_watch *w)
{
    pthread_rwlock_wrlock(&s->lock);
    stripe_watch **at = &s->watches;
    while (*at != w)
        at = &(*at)->next;
    *at = w->next;
    stripe_note_locked(s);
    persia_mem_release(t->config.limit, w->words * sizeof *w->changed);
    free(w->changed);
    id_list_free(t, &w->gone);
    pthread_rwlock_unlock(&s->lock);
}

int persia_table_watch_open(table *t, int all, table_watch **out)
{
    int rc = persia_fork_check("table_watch_open");

    *out = NULL;
    if (rc)
        return rc;
    table_watch *w = calloc(1, sizeof *w + t->stripes * sizeof w->of[0]);
    if (!w)
        return persia_err_set(PERSIA_ENOMEM,
                              "table %s: no memory to watch it",
                              t->config.name);
    w->t = t;
    pthread_mutex_init(&w->lock, NULL);
    pthread_rwlock_wrlock(&t->gate);
    for (uint32_t i = 0; i < t->stripes; i++)
        stripe_watch_begin(&t->stripe[i], &w->of[i], all);
    w->next = t->watches;
    t->watches = w;
    pthread_rwlock_unlock(&t->gate);
    *out = w;
    return PERSIA_OK;
}

void persia_table_watch_close(table_watch *w)
{
    if (!w)
        return;
    table *t = w->t;
    pthread_rwlock_wrlock(&t->gate);
    table_watch **at = &t->watches;
    while (*at != w)
        at = &(*at)->next;
    *at = w->next;
    for (uint32_t i = 0; i < t->stripes; i++)
        stripe_watch_end(t, &t->stripe[i], &w->of[i]);
    pthread_rwlock_unlock(&t->gate);
    id_list_free(t, &w->erased);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

uint64_t persia_table_watch_rows(const table_watch *w)
{
    uint64_t rows = 0;

    for (uint32_t i = 0; i < w->t->stripes; i++) {
        stripe *s = &w->t->stripe[i];
        pthread_rwlock_rdlock(&s->lock);
        rows += w->of[i].marked;
        if (w->of[i].from < s->used)
            rows += s->used - w->of[i].from;
        pthread_rwlock_unlock(&s->lock);
    }
    return rows;
}

/* ---- reading ------------------------------------------------------------ */

/* The next slot that changed, whose mark is cleared; NO_SLOTS: none. */
static uint32_t watch_slot_next(const stripe *s, stripe_watch *w)
{
    if (w->from < s->used)
        return w->from++;
    w->from = NO_SLOTS;
    for (; w->at < w->words; w->at++) {
        uint64_t *word = &w->changed[w->at];
        if (!*word)
            continue;
        const uint32_t slot =
            w->at * 64 + (uint32_t)__builtin_ctzll(*word);
        *word &= *word - 1;
        w->marked--;
        return slot;
    }
    return NO_SLOTS;
}

/* Ids that left and have no row now. */
static void watch_read_gone(const table *t, stripe *s, stripe_watch *w,
                            size_t room, table_changes *c)
{
    c->gone_n = id_list_take(&w->gone, room, c->gone);
    size_t kept = 0;

    for (size_t i = 0; i < c->gone_n; i++) {
        const uint64_t id = c->gone[i];
        if (row_index_find(&s->index, stripe_rows(t, s),
                           id_place(id, t->config.hash_key), id) == SLOT_NONE)
            c->gone[kept++] = id;
    }
    c->gone_n = kept;
}

/* A piece of a stripe; whether it was the last one. */
static int watch_read_stripe(const table *t, stripe *s, stripe_watch *w,
                             size_t room, table_changes *c)
{
    rows_emit o = { .ids = c->ids, .vectors = c->vectors, .state = c->state,
                    .clocks = c->clocks, .fields = c->fields,
                    .floats = c->floats };
    uint32_t slot = 0;

    pthread_rwlock_wrlock(&s->lock);
    c->reset = w->reset;
    w->reset = 0;
    watch_read_gone(t, s, w, room, c);
    while (o.n < room) {
        slot = watch_slot_next(s, w);
        if (slot >= s->used)
            break;
        const char *row = stripe_row(t, s, slot);
        if (row_clock(row))
            row_emit(t, row, &o);
    }
    const int last = slot >= s->used && !w->gone.n;
    if (last)
        w->at = 0;
    pthread_rwlock_unlock(&s->lock);
    c->n = o.n;
    return last;
}

int persia_table_watch_next(table_watch *w, table_changes *c)
{
    table *t = w->t;
    const size_t room = c->room < PIECE ? c->room : PIECE;
    int rc = persia_fork_check("table_watch_next");

    c->n = c->gone_n = c->erased_n = 0;
    c->stripes = t->stripes;
    c->reset = c->end = 0;
    if (rc)
        return rc;
    if (!room)
        return persia_err_set(PERSIA_EARG, "a piece has room for no row");
    pthread_mutex_lock(&w->lock);
    c->stripe = w->stripe;
    /* Those of a round stand before its rows, which are newer. */
    if (!w->stripe)
        c->erased_n = id_list_take(&w->erased, room, c->erased);
    if (!w->stripe && w->erased.n) {
        pthread_mutex_unlock(&w->lock);
        return PERSIA_OK;
    }
    if (watch_read_stripe(t, &t->stripe[w->stripe], &w->of[w->stripe], room,
                          c)) {
        c->end = w->stripe + 1 == t->stripes;
        w->stripe = c->end ? 0 : w->stripe + 1;
    }
    pthread_mutex_unlock(&w->lock);
    return PERSIA_OK;
}
