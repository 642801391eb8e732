#include "table/reserve.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of index: of a row whose page has just grown or been split (64 bytes
 * for 12 entries at load 0.55), of a row before that (at load 0.70), and what
 * growing adds to the rows that are there. */
enum { INDEX_BYTES = 10, PAGE_BYTES = 8, GROWTH_BYTES = 3 };
/* Of a stripe: its arena ends in a whole page of memory, and a page of the
 * index has a header and a bucket that is not full. */
enum { STRIPE_ARENA = 4096, STRIPE_INDEX = 512 };
/* A page of the index takes no more than this, and a stripe has two of the
 * same rows while one grows. */
enum { PAGE_SHIFT = 19 };

static int reserve_has_capacity(const table *t)
{
    return table_capacity(t) != 0;
}

static int reserve_passes_capacity(const table *t, uint64_t rows)
{
    const uint64_t capacity = table_capacity(t);

    return capacity && !t->evict.policy &&
           atomic_load(&t->rows) + rows > capacity;
}

static uint64_t reserve_least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Of pages that are there twice for a moment, one a stripe. */
static uint64_t reserve_moment_bytes(const table *t, uint64_t all)
{
    const uint64_t most = PAGE_BYTES * all;

    return atomic_load(&t->shallow)
               ? most
               : reserve_least(most, (uint64_t)t->stripes << PAGE_SHIFT);
}

/* Slots that so many new rows may open: the rows of a table that evicts take
 * those of old ones at its capacity. */
static size_t reserve_opens_of(const table *t, size_t rows)
{
    const uint64_t capacity = table_capacity(t), now = atomic_load(&t->rows);

    if (!capacity || !t->evict.policy)
        return rows;
    return (size_t)reserve_least(rows, capacity > now ? capacity - now : 0);
}

static uint64_t reserve_slot_bytes(const table *t, uint64_t opens)
{
    return opens * t->stride + reserve_least(opens, t->stripes) * STRIPE_ARENA;
}

/* Bytes that new rows may take in pages of the index, apart from what they
 * make those grow that are there: reserve_growth_bytes(). */
static uint64_t index_bytes(const table *t, uint64_t rows)
{
    return rows * INDEX_BYTES + reserve_least(rows, t->stripes) * STRIPE_INDEX;
}

/* Of pages with `all` rows in the end, each of which may widen, whichever row
 * makes it. */
static uint64_t reserve_growth_bytes(const table *t, uint64_t all)
{
    return GROWTH_BYTES * all + reserve_moment_bytes(t, all);
}

/* Rows arrive in pieces: what the last one asks for, beside those that are
 * there. */
uint64_t persia_table_restore_bytes(const table *t, uint64_t rows)
{
    const uint64_t capacity = t->config.capacity;
    const uint64_t all = capacity ? reserve_least(rows, capacity) : rows;

    return all * (t->stride + INDEX_BYTES + GROWTH_BYTES) +
           2 * reserve_least(all, t->stripes) * (STRIPE_ARENA + STRIPE_INDEX) +
           reserve_moment_bytes(t, all) + admit_bytes(&t->admit);
}

int reservation_make(reservation *r, reserve_claim *claims, size_t n)
{
    *r = (reservation){.claims = claims, .n = n};
    for (size_t i = 0; i < n; i++) {
        mem_limit *limit = claims[i].t->config.limit;
        if (limit != claims[0].t->config.limit)
            return persia_err_set(PERSIA_EARG,
                                  "tables %s and %s have different "
                                  "memory limits, which one call cannot keep",
                                  claims[0].t->config.name,
                                  claims[i].t->config.name);
        if (limit && limit->maximum)
            r->limit = limit;
    }
    return PERSIA_OK;
}

/* All locks, in the same order by everybody. */
static void reserve_lock_all(const reservation *r,
                             int (*lock)(pthread_rwlock_t *lock))
{
    for (size_t i = 0; i < r->n; i++)
        if (reserve_has_capacity(r->claims[i].t))
            lock(&r->claims[i].t->full_lock);
    if (r->limit)
        lock(&r->limit->lock);
}

/* ---- what claims announce ---- */

/* Of the table, for all its claims in flight; with its growth_lock. */
static int reserve_growth_change(table *t, mem_limit *limit)
{
    const uint64_t all = atomic_load(&t->rows) + t->making, was = t->growth;

    t->growth = t->making ? reserve_growth_bytes(t, all) : 0;
    if (t->growth > was)
        return persia_mem_announce(limit, t->growth - was);
    persia_mem_withdraw(limit, was - t->growth);
    return 1;
}

/* Its own bytes are in *bytes; whether the table's fit. */
static int reserve_growth_join(const reserve_claim *c, mem_limit *limit,
                               uint64_t *bytes)
{
    int fits;

    *bytes += reserve_slot_bytes(c->t, atomic_load(c->opens)) +
              index_bytes(c->t, c->most);
    pthread_mutex_lock(&c->t->growth_lock);
    c->t->making += c->most;
    fits = reserve_growth_change(c->t, limit);
    pthread_mutex_unlock(&c->t->growth_lock);
    return fits;
}

/* The rows that it made are counted, so that what is announced for others
 * covers them. */
static void reserve_growth_leave(const reserve_claim *c, mem_limit *limit)
{
    pthread_mutex_lock(&c->t->growth_lock);
    (void)PERSIA_HOLDS(c->t->making >= c->most);
    c->t->making -= c->most;
    (void)reserve_growth_change(c->t, limit);
    pthread_mutex_unlock(&c->t->growth_lock);
}

/* Tells others how much this one may take; whether that is near a limit,
 * together with what they have told. */
static int reserve_announce(reservation *r)
{
    uint64_t bytes = 0;
    int near = 0;

    for (size_t i = 0; i < r->n; i++) {
        const reserve_claim *c = &r->claims[i];
        if (reserve_has_capacity(c->t))
            near |= reserve_passes_capacity(
                c->t, atomic_fetch_add(&c->t->pending, c->most) + c->most);
        if (r->alone)
            continue; /* it counts, then announces */
        atomic_store(c->opens, reserve_opens_of(c->t, c->most));
        if (r->limit)
            near |= !reserve_growth_join(c, r->limit, &bytes);
    }
    r->announced = bytes;
    if (r->limit)
        near |= !persia_mem_announce(r->limit, bytes);
    return near;
}

/* Whether the rows counted fit; then these are announced. */
static int reservation_check(reservation *r)
{
    const reserve_claim *largest = r->claims;
    uint64_t bytes = 0;

    for (size_t i = 0; i < r->n; i++) {
        const reserve_claim *c = &r->claims[i];
        const table_config *config = &c->t->config;
        atomic_store(c->opens, reserve_opens_of(c->t, c->rows));
        bytes += reserve_slot_bytes(c->t, atomic_load(c->opens)) + c->growth;
        if (c->rows > largest->rows)
            largest = c;
        if (c->rows && reserve_passes_capacity(c->t, c->rows))
            return persia_err_set(
                PERSIA_ECAPACITY,
                "table %s holds %llu rows of at most %llu and %zu "
                "new ids arrive (id %lld is one); nothing was "
                "applied. Raise capacity, or let old rows go: "
                "eviction=\"lru\"",
                config->name, (unsigned long long)atomic_load(&c->t->rows),
                (unsigned long long)config->capacity, c->rows,
                (long long)c->an_id);
    }
    if (!r->limit || !bytes)
        return PERSIA_OK;
    if (!persia_mem_announce_again(r->limit, 0, bytes))
        return persia_err_set(
            PERSIA_ELIMIT,
            "table %s: %zu new rows, and those of the other tables "
            "of this update, would pass the memory limit of %llu "
            "bytes; nothing was applied. Raise memory_limit, or "
            "give the table a capacity with eviction=\"lru\"",
            largest->t->config.name, largest->rows,
            (unsigned long long)r->limit->maximum);
    assert(r->alone && !r->announced);
    r->announced = bytes;
    return PERSIA_OK;
}

/* ---- counting ---- */

static int reserve_by_stripe(const void *a, const void *b, void *ctx)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    const table *t = ctx;
    const uint32_t i = hash_stripe(x, t->stripes - 1);
    const uint32_t k = hash_stripe(y, t->stripes - 1);

    return i != k ? (i < k ? -1 : 1) : x < y ? -1 : x > y;
}

void reserve_count(reserve_claim *c, uint64_t *places, size_t n)
{
    table *t = c->t;
    size_t k = 0;

    assert(n <= c->most);
    memset(c->slots, 0, t->stripes * sizeof *c->slots);
    c->rows = 0;
    c->growth = 0;
    qsort_r(places, n, sizeof *places, reserve_by_stripe, t);
    for (size_t i = 0; i < n; i++) /* a place is of one id */
        if (i == 0 || places[i] != places[i - 1])
            places[k++] = places[i];
    c->rows = k;
    for (size_t i = 0; i < k; i += c->slots[hash_stripe(places[i],
                                                        t->stripes - 1)]) {
        const uint32_t at = hash_stripe(places[i], t->stripes - 1);
        size_t end = i;
        while (end < k && hash_stripe(places[end], t->stripes - 1) == at)
            end++;
        c->slots[at] = end - i;
        pthread_rwlock_rdlock(&t->stripe[at].lock);
        c->growth += row_index_growth(&t->stripe[at].index, places + i,
                                      end - i);
        pthread_rwlock_unlock(&t->stripe[at].lock);
    }
}

/* ---- memory ---- */

int reserve_no_memory(const table *t)
{
    return persia_err_set(
        PERSIA_ENOMEM,
        "table %s: %s; nothing was applied. Give the process more "
        "memory, or bound its tables: capacity, memory_limit",
        t->config.name, persia_err_text());
}

/* What it reserves before an error, claim_release() gives back. */
static int claim_reserve(reserve_claim *c)
{
    table *t = c->t;
    const size_t opens = atomic_load(c->opens);
    uint64_t all = 0;
    int rc = PERSIA_OK;

    c->reserved = 1;
    for (uint32_t i = 0; i < t->stripes; i++) {
        size_t rows = c->slots[i];
        c->slots[i] = 0;
        all += rows;
        if (rows > opens)
            rows = opens;
        if (!rows || rc)
            continue;
        rc = stripe_reserve(t, i, rows);
        if (!rc)
            c->slots[i] = rows;
    }
    if (rc || !all)
        return rc;
    rc = persia_mem_blocks_reserve(&t->blocks, row_index_bytes(all));
    if (!rc)
        c->index = row_index_bytes(all);
    return rc;
}

static void claim_release(reserve_claim *c)
{
    assert(!c->index || c->reserved);
    for (uint32_t i = 0; c->reserved && i < c->t->stripes; i++)
        if (c->slots[i])
            atomic_fetch_add(&c->t->left[i], (int64_t)c->slots[i]);
    if (c->index)
        persia_mem_blocks_unreserve(&c->t->blocks, c->index);
    c->index = 0;
    c->reserved = 0;
}

static int claims_reserve(reservation *r)
{
    for (size_t i = 0; i < r->n; i++) {
        int rc = claim_reserve(&r->claims[i]);
        if (rc)
            return rc == PERSIA_ENOMEM ? reserve_no_memory(r->claims[i].t)
                                       : rc;
    }
    return PERSIA_OK;
}

/* ---- both ---- */

/* Alone with the tables. */
static int reservation_take_exactly(reservation *r, reserve_count_fn count,
                                    void *ctx)
{
    int rc = PERSIA_OK;

    r->alone = 1;
    reserve_lock_all(r, pthread_rwlock_wrlock);
    (void)reserve_announce(r);
    for (size_t i = 0; i < r->n && !rc; i++) {
        r->claims[i].rows = 0;
        rc = count(&r->claims[i], ctx);
        if (rc == PERSIA_ENOMEM)
            rc = reserve_no_memory(r->claims[i].t);
    }
    rc = rc ? rc : reservation_check(r);
    rc = rc ? rc : claims_reserve(r);
    if (rc)
        reservation_leave(r);
    return rc;
}

int reservation_take(reservation *r, reserve_count_fn count, void *ctx)
{
    reserve_lock_all(r, pthread_rwlock_rdlock);
    if (!reserve_announce(r) && !claims_reserve(r))
        return PERSIA_OK;
    reservation_leave(r);
    return reservation_take_exactly(r, count, ctx);
}

void reservation_leave(reservation *r)
{
    for (size_t i = 0; i < r->n; i++) {
        table *t = r->claims[i].t;
        claim_release(&r->claims[i]);
        if (r->limit && !r->alone)
            reserve_growth_leave(&r->claims[i], r->limit);
        if (!reserve_has_capacity(t))
            continue;
        atomic_fetch_sub(&t->pending, r->claims[i].most);
        pthread_rwlock_unlock(&t->full_lock);
    }
    if (r->limit) {
        persia_mem_withdraw(r->limit, r->announced);
        pthread_rwlock_unlock(&r->limit->lock);
    }
}
