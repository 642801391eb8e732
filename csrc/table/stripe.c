#include "table/watch.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Stripes fill alike: each begins elsewhere in a huge page, so that they do
 * not wait for the next one in the same push. */
#define STAGGER ((size_t)2 << 20)

/* Slots of a stripe: their numbers stay below ROW_NONE. */
#define SLOTS_MAX ((int64_t)UINT32_MAX - 1)

int stripe_init(table *t, stripe *s)
{
    int rc;

    persia_mem_arena_init(&s->arena, t->config.limit,
                          (size_t)(s - t->stripe) * STAGGER / t->stripes);
    s->free_head = ROW_NONE;
    rc = row_index_init(&s->index, &t->blocks, t->config.hash_key);
    if (rc)
        return rc;
    persia_fair_lock_init(&s->lock);
    return PERSIA_OK;
}

void stripe_free(stripe *s)
{
    if (!s->index.directory)
        return; /* was not made */
    row_index_free(&s->index);
    persia_mem_arena_free(&s->arena);
    pthread_rwlock_destroy(&s->lock);
}

static int cut_copied(stripe_cut *c, uint32_t slot)
{
    uint64_t bit = (uint64_t)1 << (slot % 64), *word = &c->copied[slot / 64];
    int was = (*word & bit) != 0;

    *word |= bit;
    return was;
}

/* Memory for more rows aside; their address space is there. */
static int cut_more(const table *t, stripe_cut *c)
{
    uint32_t rows = c->aside_charged ? 2 * c->aside_charged : 64;
    int rc;

    if (rows > c->mark)
        rows = c->mark;
    rc = persia_mem_charge(
        t->config.limit, (uint64_t)(rows - c->aside_charged) * t->stride);
    if (rc)
        return rc;
    persia_mem_arena_grow(&c->aside, rows * t->stride);
    c->aside_charged = rows;
    return PERSIA_OK;
}

void stripe_cut_end(const table *t, stripe *s)
{
    stripe_cut *c = &s->cut;

    persia_mem_release(t->config.limit,
                       (uint64_t)c->aside_charged * t->stride);
    free(c->copied);
    persia_mem_arena_free(&c->aside);
    memset(c, 0, sizeof *c);
    stripe_note_locked(s);
}

void stripe_touch_slow(const table *t, stripe *s, uint32_t slot)
{
    stripe_cut *c = &s->cut;
    const char *row = stripe_row(t, s, slot);

    watch_mark_locked(t, s, slot);
    if (slot >= c->mark || slot < c->cursor || cut_copied(c, slot) ||
        !row_clock(row))
        return;
    if (c->aside_n == c->aside_charged) {
        int rc = cut_more(t, c);
        if (rc) {
            stripe_cut_end(t, s);
            c->failed = rc;
            return;
        }
    }
    assert(c->aside_n < c->aside_charged && c->aside_charged <= c->mark);
    memcpy(c->aside.base + (size_t)c->aside_n++ * t->stride, row, t->stride);
}

void stripe_release_locked(const table *t, stripe *s, uint32_t slot)
{
    char *row = stripe_row(t, s, slot);

    assert(slot < s->used && s->rows > 0 && row_clock(row));
    stripe_touch_locked(t, s, slot);
    if (s->watches)
        watch_gone_locked(t, s, row_id(row));
    row_index_remove(&s->index, id_place(row_id(row), t->config.hash_key),
                     slot);
    row_set_clock(row, 0);
    memcpy(row, &s->free_head, sizeof s->free_head);
    s->free_head = slot;
    s->rows--;
}

/* ---- slots ----------------------------------------------------------- */

/* Slots that fit in the stripe's address space. */
static int64_t stripe_slots_fit(const table *t, const stripe *s)
{
    const size_t fit = persia_mem_arena_room(&s->arena) / t->stride;

    return fit < SLOTS_MAX ? (int64_t)fit : SLOTS_MAX;
}

static int stripe_slots_more(table *t, uint32_t i, uint64_t rows)
{
    stripe *s = &t->stripe[i];
    int rc;

    pthread_rwlock_wrlock(&s->lock);
    const int64_t fit = stripe_slots_fit(t, s);
    if (rows > (uint64_t)(SLOTS_MAX - fit))
        rc = persia_err_set(PERSIA_ELIMIT,
                            "table %s: a stripe holds 2^32 rows; use "
                            "more stripes",
                            t->config.name);
    else
        rc = persia_mem_arena_reserve(&s->arena,
                                      ((size_t)fit + rows) * t->stride);
    const int64_t now = stripe_slots_fit(t, s);
    if (!row_index_deepen(&s->index, (uint64_t)now))
        atomic_store(&t->shallow, 1);
    atomic_fetch_add(&t->left[i], now - fit);
    pthread_rwlock_unlock(&s->lock);
    return rc;
}

int stripe_reserve(table *t, uint32_t i, size_t rows)
{
    int64_t left = atomic_load_explicit(&t->left[i], memory_order_relaxed);
    int rc;

    for (;;) {
        while (left >= (int64_t)rows)
            if (atomic_compare_exchange_weak(&t->left[i], &left,
                                             left - (int64_t)rows))
                return PERSIA_OK;
        rc = stripe_slots_more(t, i, rows - (uint64_t)left);
        if (rc)
            return rc;
        left = atomic_load(&t->left[i]);
    }
}

/* A free slot, or one of those reserved. */
static uint32_t stripe_slot_take(const table *t, stripe *s,
                                 const stripe_room *room)
{
    const uint32_t slot = s->free_head;

    if (slot == ROW_NONE) {
        if (!PERSIA_HOLDS(*room->slots > 0)) /* the row is refused */
            return ROW_NONE;
        --*room->slots;
        persia_mem_arena_grow(&s->arena, ((size_t)s->used + 1) * t->stride);
        return s->used++;
    }
    stripe_touch_locked(t, s, slot);
    memcpy(&s->free_head, stripe_row(t, s, slot), sizeof s->free_head);
    return slot;
}

void stripe_count_locked(table *t, stripe *s)
{
    if (s->uncounted)
        atomic_fetch_add_explicit(&t->rows, s->uncounted,
                                  memory_order_relaxed);
    s->uncounted = 0;
}

int stripe_add_locked(table *t, stripe *s, uint64_t hash, uint64_t id,
                      uint32_t clock, uint32_t spare, const stripe_room *room,
                      uint32_t *slot, uint32_t *evicted)
{
    float vector[4096];
    char *row;
    int rc = PERSIA_OK;

    *evicted = 0;
    if (!table_capacity(t) && !t->evict.expires)
        s->uncounted++; /* what the hand would do, without a call of 18
                           instructions a row */
    else
        rc = hand_place_locked(t, s, clock, spare, room, evicted);
    if (rc)
        return rc;
    *slot =
        stripe_slot_take(t, s, room); /* the one just evicted, if one was */
    if (*slot == ROW_NONE) {
        hand_unplace_locked(t, s);
        return PERSIA_ECAPACITY;
    }
    row = stripe_row(t, s, *slot);
    memcpy(row, &id, sizeof id);
    row_set_clock(row, clock);
    row_init_vector(t, id, vector);
    row_store_vector(t, vector, row);
    row_init_state(t, row + t->state_offset);
    if (t->field)
        row_set_field(t, row, 0);
    row_index_insert(&s->index, stripe_rows(t, s), hash, *slot);
    s->rows++;
    stripe_touch_locked(t, s, *slot);
    return PERSIA_OK;
}

void stripe_fetch_candidates(const table *t, const stripe *s, uint64_t hash,
                             size_t bytes)
{
    const page_ref *ref = row_index_page(&s->index, hash);
    uint32_t home = page_home(hash, ref->depth, ref->buckets);

    for (uint32_t k = 0; k < 2 && home + k < ref->buckets; k++) {
        const bucket *b = &ref->page->bucket[home + k];
        uint32_t match = bucket_match(b, hash_tag(hash));
        for (; match; match &= match - 1)
            row_prefetch(stripe_row(t, s, b->slot[__builtin_ctz(match)]),
                         bytes);
    }
}

void stripe_clear_locked(table *t, stripe *s)
{
    atomic_fetch_sub_explicit(&t->rows, s->rows, memory_order_relaxed);
    memset(&s->hand, 0, sizeof s->hand);
    if (s->cut.mark) { /* a cut still reads the slots: free them one by one */
        for (uint32_t slot = 0; slot < s->used; slot++)
            if (row_clock(stripe_row(t, s, slot)))
                stripe_release_locked(t, s, slot);
        watch_reset_locked(s);
        return;
    }
    assert(!s->uncounted);
    row_index_clear(&s->index);
    persia_mem_arena_free(&s->arena);
    s->used = s->rows = 0;
    s->free_head = ROW_NONE;
    watch_reset_locked(s);
    atomic_store(&t->left[s - t->stripe], 0);
}
