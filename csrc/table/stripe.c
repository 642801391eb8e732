#include "table/stripe.h"

#include <stdlib.h>
#include <string.h>

int stripe_init(table *t, stripe *s)
{
    pthread_rwlockattr_t attr;
    int rc;

    mem_arena_init(&s->arena, t->config.limit);
    s->free_head = ROW_NONE;
    rc = row_index_init(&s->index, &t->blocks);
    if (rc)
        return rc;
    pthread_rwlockattr_init(&attr);
    pthread_rwlockattr_setkind_np(
        &attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&s->lock, &attr);
    pthread_rwlockattr_destroy(&attr);
    return PERSIA_OK;
}

static void victims_free(stripe *s)
{
    free(s->victims);
    free(s->victim_clocks);
    s->victims = s->victim_clocks = NULL;
    s->victims_n = s->victims_at = s->victims_room = 0;
}

void stripe_free(stripe *s)
{
    if (!s->index.directory)
        return; /* was not made */
    row_index_free(&s->index);
    mem_arena_free(&s->arena);
    victims_free(s);
    pthread_rwlock_destroy(&s->lock);
}

static int cut_copied(stripe_cut *c, uint32_t slot)
{
    uint64_t bit = (uint64_t)1 << (slot % 64), *word = &c->copied[slot / 64];
    int was = (*word & bit) != 0;

    *word |= bit;
    return was;
}

static int cut_room(const table *t, stripe_cut *c)
{
    uint32_t room = c->aside_room ? 2 * c->aside_room : 64;
    char *wide;
    int rc = mem_charge(t->config.limit,
                        (uint64_t)(room - c->aside_room) * t->stride);

    if (rc)
        return rc;
    wide = realloc(c->aside, room * t->stride);
    if (!wide) {
        mem_release(t->config.limit,
                    (uint64_t)(room - c->aside_room) * t->stride);
        return err_set(PERSIA_ENOMEM, "table %s: no memory to put rows "
                       "aside for a snapshot", t->config.name);
    }
    c->aside = wide;
    c->aside_room = room;
    return PERSIA_OK;
}

int stripe_touch_slow(const table *t, stripe *s, uint32_t slot)
{
    stripe_cut *c = &s->cut;
    const char *row = stripe_row(t, s, slot);
    int rc;

    if (slot < c->cursor)
        return PERSIA_OK;
    if (row_clock(row) && c->aside_n == c->aside_room &&
        !(c->copied[slot / 64] >> (slot % 64) & 1)) {
        rc = cut_room(t, c);
        if (rc)
            return rc;
    }
    if (!cut_copied(c, slot) && row_clock(row))
        memcpy(c->aside + (size_t)c->aside_n++ * t->stride, row, t->stride);
    return PERSIA_OK;
}

/* ---- eviction: the rows touched longest ago ------------------------- */

typedef struct aged {
    uint32_t age, slot;
} aged;

static int aged_older(const void *a, const void *b)
{
    const aged *x = a, *y = b;

    if (x->age != y->age)
        return x->age < y->age ? 1 : -1;
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

/* Brings the `want` oldest of all[0 .. n) to the front (Hoare's FIND). */
static void aged_select(aged *all, size_t n, size_t want)
{
    ptrdiff_t low = 0, high = (ptrdiff_t)n - 1, k = (ptrdiff_t)want - 1;

    while (k >= 0 && low < high) {
        const aged pivot = all[k];
        ptrdiff_t i = low, j = high;
        while (i <= j) {
            while (aged_older(&all[i], &pivot) < 0)
                i++;
            while (aged_older(&all[j], &pivot) > 0)
                j--;
            if (i > j)
                break;
            aged swap = all[i];
            all[i++] = all[j];
            all[j--] = swap;
        }
        if (j < k)
            low = i;
        if (k < i)
            high = j;
    }
}

/* Fills the list of victims with the oldest 1/16 of the rows (at least 32),
 * exactly: ages are compared among all live rows of the stripe. */
static int victims_find(const table *t, stripe *s, uint32_t clock)
{
    uint32_t want = s->rows / 16 > 32 ? s->rows / 16 : 32;
    size_t n = 0;
    aged *all = malloc(((size_t)s->rows + 1) * sizeof *all);

    if (!all)
        return err_set(PERSIA_ENOMEM, "table %s: no memory to choose rows to "
                       "evict", t->config.name);
    for (uint32_t slot = 0; slot < s->used; slot++) {
        uint32_t touched = row_clock(stripe_row(t, s, slot));
        if (touched && touched != clock)
            all[n++] = (aged){ clock - touched, slot };
    }
    if (want > n)
        want = (uint32_t)n;
    aged_select(all, n, want);
    qsort(all, want, sizeof *all, aged_older);
    if (want > s->victims_room) {
        victims_free(s);
        s->victims = malloc(want * sizeof *s->victims);
        s->victim_clocks = malloc(want * sizeof *s->victim_clocks);
        if (!s->victims || !s->victim_clocks) {
            victims_free(s);
            free(all);
            return err_set(PERSIA_ENOMEM, "table %s: no memory to choose rows "
                           "to evict", t->config.name);
        }
        s->victims_room = want;
    }
    for (uint32_t i = 0; i < want; i++) {
        s->victims[i] = all[i].slot;
        s->victim_clocks[i] = clock - all[i].age;
    }
    s->victims_n = want;
    s->victims_at = 0;
    free(all);
    return PERSIA_OK;
}

static int slot_release(table *t, stripe *s, uint32_t slot)
{
    char *row = stripe_row(t, s, slot);
    int rc = stripe_touch_locked(t, s, slot);

    if (rc)
        return rc;
    row_index_remove(&s->index, id_hash(row_id(row)), slot);
    row_set_clock(row, 0);
    memcpy(row, &s->free_head, sizeof s->free_head);
    s->free_head = slot;
    s->rows--;
    atomic_fetch_sub_explicit(&t->rows, 1, memory_order_relaxed);
    return PERSIA_OK;
}

/* A victim that was touched since it was listed is passed over. */
static int evict_one(table *t, stripe *s, uint32_t clock)
{
    for (int fresh = 0; fresh < 2; fresh++) {
        while (s->victims_at < s->victims_n) {
            uint32_t slot = s->victims[s->victims_at];
            uint32_t listed = s->victim_clocks[s->victims_at++];
            if (row_clock(stripe_row(t, s, slot)) == listed)
                return slot_release(t, s, slot);
        }
        if (!fresh) {
            int rc = victims_find(t, s, clock);
            if (rc)
                return rc;
        }
    }
    return PERSIA_ECAPACITY;
}

/* ---- slots ----------------------------------------------------------- */

static int slot_take(const table *t, stripe *s, uint32_t *slot)
{
    int rc;

    if (s->free_head != ROW_NONE) {
        *slot = s->free_head;
        rc = stripe_touch_locked(t, s, *slot);
        if (rc)
            return rc;
        memcpy(&s->free_head, stripe_row(t, s, *slot), sizeof s->free_head);
        return PERSIA_OK;
    }
    if (s->used >= ROW_NONE - 1)
        return err_set(PERSIA_ELIMIT, "table %s: a stripe holds 2^32 rows; "
                       "use more stripes", t->config.name);
    if (((size_t)s->used + 1) * t->stride > s->arena.size) {
        rc = mem_arena_grow(&s->arena, ((size_t)s->used + 1) * t->stride);
        if (rc)
            return rc;
    }
    *slot = s->used++;
    return PERSIA_OK;
}

int stripe_add_locked(table *t, stripe *s, uint64_t hash, uint64_t id,
                      uint32_t clock, uint32_t *slot, uint32_t *evicted)
{
    const uint64_t capacity = t->config.capacity;
    float vector[4096];
    char *row;
    int rc;

    *evicted = 0;
    if (capacity && atomic_load_explicit(&t->rows, memory_order_relaxed) >=
                        capacity) {
        if (t->config.full == FULL_RAISE)
            return PERSIA_ECAPACITY;
        rc = evict_one(t, s, clock);
        if (rc)
            return rc;
        *evicted = 1;
    }
    rc = row_index_reserve(&s->index, stripe_rows(t, s), hash);
    if (rc)
        return rc;
    rc = slot_take(t, s, slot);
    if (rc)
        return rc;
    row = stripe_row(t, s, *slot);
    memcpy(row, &id, sizeof id);
    row_set_clock(row, clock);
    row_init_vector(t, id, vector);
    row_store_vector(t, vector, row);
    row_init_state(t, row);
    row_index_insert(&s->index, hash, *slot);
    s->rows++;
    atomic_fetch_add_explicit(&t->rows, 1, memory_order_relaxed);
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

int stripe_clear_locked(table *t, stripe *s)
{
    row_index fresh;
    int rc = PERSIA_OK;

    if (s->cut.mark) { /* a cut still reads the slots: free them one by one */
        for (uint32_t slot = 0; slot < s->used && !rc; slot++)
            if (row_clock(stripe_row(t, s, slot)))
                rc = slot_release(t, s, slot);
        return rc;
    }
    rc = row_index_init(&fresh, &t->blocks);
    if (rc)
        return rc;
    row_index_free(&s->index);
    mem_arena_free(&s->arena);
    mem_arena_init(&s->arena, t->config.limit);
    s->index = fresh;
    atomic_fetch_sub_explicit(&t->rows, s->rows, memory_order_relaxed);
    s->used = s->rows = 0;
    s->free_head = ROW_NONE;
    s->victims_n = s->victims_at = 0;
    return PERSIA_OK;
}
