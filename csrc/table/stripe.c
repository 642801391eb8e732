#include "table/stripe.h"

#include <stdlib.h>
#include <string.h>

/* Stripes fill alike: each begins elsewhere in a huge page, so that they do
 * not wait for the next one in the same push. */
#define STAGGER ((size_t)2 << 20)

/* Rows to evict that a list has room for. */
enum { VICTIMS_LEAST = 32 };
/* Slots of a stripe: their numbers stay below ROW_NONE. */
#define SLOTS_MAX ((int64_t)UINT32_MAX - 1)

static uint32_t victims_room(stripe *s, uint32_t room);

int stripe_init(table *t, stripe *s)
{
    int rc;

    mem_arena_init(&s->arena, t->config.limit,
                   (size_t)(s - t->stripe) * STAGGER / t->stripes);
    s->free_head = ROW_NONE;
    rc = row_index_init(&s->index, &t->blocks);
    if (rc)
        return rc;
    if (t->config.capacity && t->config.full == FULL_EVICT_LRU &&
        !victims_room(s, VICTIMS_LEAST)) {
        row_index_free(&s->index);
        return err_set(PERSIA_ENOMEM, "table %s: no memory", t->config.name);
    }
    fair_lock_init(&s->lock);
    return PERSIA_OK;
}

static void victims_free(stripe *s)
{
    free(s->victims);
    free(s->victim_clocks);
    s->victims = s->victim_clocks = NULL;
    s->victims_n = s->victims_at = s->victims_room = 0;
}

/* How many victims the stripe can list: `room`, or fewer without memory. */
static uint32_t victims_room(stripe *s, uint32_t room)
{
    uint32_t *slots, *clocks;

    if (room <= s->victims_room)
        return s->victims_room;
    slots = malloc(room * sizeof *slots);
    clocks = malloc(room * sizeof *clocks);
    if (!slots || !clocks) {
        free(slots);
        free(clocks);
        return s->victims_room;
    }
    victims_free(s);
    s->victims = slots;
    s->victim_clocks = clocks;
    s->victims_room = room;
    return room;
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
    int rc = mem_charge_beside(t->config.limit,
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

void stripe_cut_end(const table *t, stripe *s)
{
    stripe_cut *c = &s->cut;

    mem_release(t->config.limit, (uint64_t)c->aside_room * t->stride);
    free(c->copied);
    free(c->aside);
    memset(c, 0, sizeof *c);
}

void stripe_touch_slow(const table *t, stripe *s, uint32_t slot)
{
    stripe_cut *c = &s->cut;
    const char *row = stripe_row(t, s, slot);

    if (slot < c->cursor || cut_copied(c, slot) || !row_clock(row))
        return;
    if (c->aside_n == c->aside_room) {
        int rc = cut_room(t, c);
        if (rc) {
            stripe_cut_end(t, s);
            c->failed = rc;
            return;
        }
    }
    memcpy(c->aside + (size_t)c->aside_n++ * t->stride, row, t->stride);
}

/* ---- eviction: the rows touched longest ago ------------------------- */

/* Ages are pushes, negative for rows of a push that began after this one.
 * Among equals the hash decides, not the slot: a table that was restored
 * evicts the same rows. */
typedef struct aged {
    int32_t age;
    uint32_t slot;
    uint64_t hash;
} aged;

static int aged_older(const void *a, const void *b)
{
    const aged *x = a, *y = b;

    if (x->age != y->age)
        return x->age < y->age ? 1 : -1;
    return x->hash < y->hash ? -1 : x->hash > y->hash;
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

/* Inserts into the oldest `room` seen so far, in their order. */
static void aged_insert(aged *oldest, size_t *n, size_t room, const aged *a)
{
    size_t at = *n;

    if (at == room && aged_older(a, &oldest[at - 1]) > 0)
        return;
    at -= at == room;
    for (; at && aged_older(a, &oldest[at - 1]) < 0; at--)
        oldest[at] = oldest[at - 1];
    oldest[at] = *a;
    *n += *n < room;
}

/* Fills the list of victims with the oldest 1/16 of the rows (at least
 * VICTIMS_LEAST), exactly: ages are compared among all live rows of the
 * stripe.  Without memory the list is as short as that: it is made more
 * often, its rows go in the same order. */
static void victims_find(const table *t, stripe *s, uint32_t clock,
                         uint32_t spare)
{
    uint32_t want = s->rows / 16 > VICTIMS_LEAST ? s->rows / 16
                                                 : VICTIMS_LEAST;
    size_t n = 0;
    aged few[VICTIMS_LEAST];
    aged *many = malloc(((size_t)s->rows + 1) * sizeof *many);
    aged *all = many ? many : few;

    for (uint32_t slot = 0; slot < s->used; slot++) {
        const char *row = stripe_row(t, s, slot);
        uint32_t touched = row_clock(row);
        if (!touched || touched == spare)
            continue;
        const aged a = { (int32_t)(clock - touched), slot,
                         id_hash(row_id(row)) };
        if (many)
            many[n++] = a;
        else
            aged_insert(few, &n, VICTIMS_LEAST, &a);
    }
    if (want > n)
        want = (uint32_t)n;
    if (want > victims_room(s, want))
        want = s->victims_room;
    if (many) {
        aged_select(many, n, want);
        qsort(many, want, sizeof *many, aged_older);
    }
    for (uint32_t i = 0; i < want; i++) {
        s->victims[i] = all[i].slot;
        s->victim_clocks[i] = clock - (uint32_t)all[i].age;
    }
    s->victims_n = want;
    s->victims_at = 0;
    free(many);
}

/* Leaves t->rows to the caller. */
static void slot_release(const table *t, stripe *s, uint32_t slot)
{
    char *row = stripe_row(t, s, slot);

    stripe_touch_locked(t, s, slot);
    row_index_remove(&s->index, id_hash(row_id(row)), slot);
    row_set_clock(row, 0);
    memcpy(row, &s->free_head, sizeof s->free_head);
    s->free_head = slot;
    s->rows--;
}

/* A victim that was touched since it was listed is passed over. */
static int evict_one(const table *t, stripe *s, uint32_t clock,
                     uint32_t spare)
{
    for (int fresh = 0; fresh < 2; fresh++) {
        while (s->victims_at < s->victims_n) {
            uint32_t slot = s->victims[s->victims_at];
            uint32_t listed = s->victim_clocks[s->victims_at++];
            if (listed == spare ||
                row_clock(stripe_row(t, s, slot)) != listed)
                continue;
            slot_release(t, s, slot);
            return PERSIA_OK;
        }
        if (!fresh)
            victims_find(t, s, clock, spare);
    }
    return PERSIA_ECAPACITY;
}

/* ---- slots ----------------------------------------------------------- */

/* Slots that fit in the stripe's address space. */
static int64_t slots_fit(const table *t, const stripe *s)
{
    const size_t fit = mem_arena_room(&s->arena) / t->stride;

    return fit < SLOTS_MAX ? (int64_t)fit : SLOTS_MAX;
}

static int slots_more(table *t, uint32_t i, uint64_t rows)
{
    stripe *s = &t->stripe[i];
    int rc;

    pthread_rwlock_wrlock(&s->lock);
    const int64_t fit = slots_fit(t, s);
    if (rows > (uint64_t)(SLOTS_MAX - fit))
        rc = err_set(PERSIA_ELIMIT, "table %s: a stripe holds 2^32 rows; use "
                     "more stripes", t->config.name);
    else
        rc = mem_arena_reserve(&s->arena, ((size_t)fit + rows) * t->stride);
    atomic_fetch_add(&t->left[i], slots_fit(t, s) - fit);
    pthread_rwlock_unlock(&s->lock);
    return rc;
}

int stripe_hold(table *t, uint32_t i, size_t rows)
{
    int64_t left = atomic_load_explicit(&t->left[i], memory_order_relaxed);
    int rc;

    for (;;) {
        while (left >= (int64_t)rows)
            if (atomic_compare_exchange_weak(&t->left[i], &left,
                                             left - (int64_t)rows))
                return PERSIA_OK;
        rc = slots_more(t, i, rows - (uint64_t)left);
        if (rc)
            return rc;
        left = atomic_load(&t->left[i]);
    }
}

static int slot_take(const table *t, stripe *s, uint32_t *slot)
{
    int rc;

    if (s->free_head != ROW_NONE) {
        *slot = s->free_head;
        stripe_touch_locked(t, s, *slot);
        memcpy(&s->free_head, stripe_row(t, s, *slot), sizeof s->free_head);
        return PERSIA_OK;
    }
    if (((size_t)s->used + 1) * t->stride > s->arena.size) {
        rc = mem_arena_grow(&s->arena, ((size_t)s->used + 1) * t->stride);
        if (rc)
            return rc;
    }
    *slot = s->used++;
    return PERSIA_OK;
}

/* Whether a stripe has its part of the capacity, of more rows than that. */
static int has_its_part(const table *t, const stripe *s)
{
    const uint64_t capacity = t->config.capacity;

    if (t->expected <= capacity || t->config.full == FULL_RAISE)
        return 0;
    return s->rows >= (uint64_t)((double)capacity * (double)s->expected /
                                 (double)t->expected);
}

/* Counts one row more, at capacity in the place of an evicted one. */
static int row_count(table *t, stripe *s, uint32_t clock, uint32_t spare,
                     uint32_t *evicted)
{
    const uint64_t capacity = t->config.capacity;
    uint64_t rows;
    int rc;

    if (!capacity) {
        s->uncounted++;
        return PERSIA_OK;
    }
    rows = atomic_load_explicit(&t->rows, memory_order_relaxed);
    while (rows < capacity && !has_its_part(t, s))
        if (atomic_compare_exchange_weak_explicit(&t->rows, &rows, rows + 1,
                                                  memory_order_relaxed,
                                                  memory_order_relaxed))
            return PERSIA_OK;
    if (t->config.full == FULL_RAISE)
        return PERSIA_ECAPACITY;
    rc = evict_one(t, s, clock, spare);
    *evicted = !rc;
    return rc;
}

/* Takes back what row_count() counted. */
static void row_uncount(table *t, stripe *s)
{
    if (t->config.capacity)
        atomic_fetch_sub_explicit(&t->rows, 1, memory_order_relaxed);
    else
        s->uncounted--;
}

void stripe_count_locked(table *t, stripe *s)
{
    if (s->uncounted)
        atomic_fetch_add_explicit(&t->rows, s->uncounted,
                                  memory_order_relaxed);
    s->uncounted = 0;
}

int stripe_add_locked(table *t, stripe *s, uint64_t hash, uint64_t id,
                      uint32_t clock, uint32_t spare, uint32_t *slot,
                      uint32_t *evicted)
{
    float vector[4096];
    char *row;
    int rc;

    *evicted = 0;
    rc = row_index_reserve(&s->index, stripe_rows(t, s), hash);
    if (rc)
        return rc;
    rc = row_count(t, s, clock, spare, evicted);
    if (rc)
        return rc;
    rc = slot_take(t, s, slot); /* the one just evicted, if one was */
    if (rc) {
        row_uncount(t, s);
        return rc;
    }
    row = stripe_row(t, s, *slot);
    memcpy(row, &id, sizeof id);
    row_set_clock(row, clock);
    row_init_vector(t, id, vector);
    row_store_vector(t, vector, row);
    row_init_state(t, row);
    row_index_insert(&s->index, hash, *slot);
    s->rows++;
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
    s->victims_n = s->victims_at = 0;
    if (s->cut.mark) { /* a cut still reads the slots: free them one by one */
        for (uint32_t slot = 0; slot < s->used; slot++)
            if (row_clock(stripe_row(t, s, slot)))
                slot_release(t, s, slot);
        return;
    }
    row_index_clear(&s->index);
    mem_arena_free(&s->arena);
    s->used = s->rows = 0;
    s->free_head = ROW_NONE;
    atomic_store(&t->left[s - t->stripe], 0);
}
