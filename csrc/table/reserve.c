#include "table/reserve.h"

#include <stdio.h>

/* Bytes of index: of a row whose page has just grown or been split (64 bytes
 * for 12 entries at load 0.55), of a row before that (at load 0.70), and what
 * growing adds to the rows that are there. */
enum { INDEX_BYTES = 10, PAGE_BYTES = 8, GROWTH_BYTES = 3 };
/* Of a stripe: its arena ends in a whole page of memory, and a page of the
 * index has a header and a bucket that is not full. */
enum { STRIPE_BYTES = 4096 + 512 };
/* A page of the index takes no more than this, and a stripe has two of the
 * same rows while one grows. */
enum { PAGE_SHIFT = 19 };

static int has_capacity(const table *t)
{
    return t->config.capacity != 0;
}

static int passes_capacity(const table *t, uint64_t rows)
{
    const table_config *c = &t->config;

    return c->capacity && !t->evict.policy &&
           atomic_load(&t->rows) + rows > c->capacity;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Of pages that are there twice for a moment, one a stripe. */
static uint64_t moment_bytes(const table *t, uint64_t all)
{
    return least(PAGE_BYTES * all, (uint64_t)t->stripes << PAGE_SHIFT);
}

/* Bytes that new rows may take, with their index. */
static uint64_t bytes_of(const table *t, uint64_t rows)
{
    const uint64_t capacity = t->config.capacity, now = atomic_load(&t->rows);

    if (capacity && t->evict.policy) {
        /* new rows take the place of old ones */
        rows = least(rows, capacity > now ? capacity - now : 0);
    }
    return rows * (t->stride + INDEX_BYTES) +
           least(rows, t->stripes) * STRIPE_BYTES +
           (rows ? GROWTH_BYTES * now + moment_bytes(t, now + rows) : 0);
}

/* Rows arrive in pieces: what the last one asks for, beside those that are
 * there. */
uint64_t persia_table_restore_bytes(const table *t, uint64_t rows)
{
    const uint64_t capacity = t->config.capacity;
    const uint64_t all = capacity ? least(rows, capacity) : rows;

    return all * (t->stride + INDEX_BYTES + GROWTH_BYTES) +
           2 * least(all, t->stripes) * STRIPE_BYTES +
           moment_bytes(t, all) + admit_bytes(&t->admit);
}

static int passes_limit(const mem_limit *limit, uint64_t bytes)
{
    return atomic_load(&limit->used) + bytes > limit->maximum;
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
static void lock_all(const reservation *r, int (*lock)(pthread_rwlock_t *lock))
{
    for (size_t i = 0; i < r->n; i++)
        if (has_capacity(r->claims[i].t))
            lock(&r->claims[i].t->full_lock);
    if (r->limit)
        lock(&r->limit->lock);
}

/* Tells others how much this one may take; whether that is near a limit,
 * together with what they have told. */
static int announce(reservation *r)
{
    uint64_t bytes = 0;
    int near = 0;

    for (size_t i = 0; i < r->n; i++) {
        const reserve_claim *c = &r->claims[i];
        if (has_capacity(c->t))
            near |= passes_capacity(
                c->t, atomic_fetch_add(&c->t->pending, c->most) + c->most);
        if (r->limit)
            bytes += bytes_of(c->t, c->most);
    }
    r->announced = bytes;
    if (r->limit)
        near |= passes_limit(r->limit,
                             atomic_fetch_add(&r->limit->announced, bytes) +
                                 bytes);
    return near;
}

/* Whether the rows counted fit; then no more than these are announced. */
static int reservation_check(reservation *r)
{
    const reserve_claim *largest = r->claims;
    uint64_t bytes = 0;

    for (size_t i = 0; i < r->n; i++) {
        const reserve_claim *c = &r->claims[i];
        const table_config *config = &c->t->config;
        bytes += bytes_of(c->t, c->rows);
        if (c->rows > largest->rows)
            largest = c;
        if (c->rows && passes_capacity(c->t, c->rows))
            return persia_err_set(
                PERSIA_ECAPACITY,
                "table %s holds %llu rows of at most %llu and %zu "
                "new ids come (id %lld is one); nothing was "
                "applied. Raise capacity, or let old rows go: "
                "eviction=\"lru\"",
                config->name, (unsigned long long)atomic_load(&c->t->rows),
                (unsigned long long)config->capacity, c->rows,
                (long long)c->an_id);
    }
    if (r->limit && bytes && passes_limit(r->limit, bytes))
        return persia_err_set(
            PERSIA_ELIMIT,
            "table %s: %zu new rows, and those of the other tables "
            "of this update, would pass the memory limit of %llu "
            "bytes; nothing was applied. Raise memory_limit, or "
            "give the table a capacity with eviction=\"lru\"",
            largest->t->config.name, largest->rows,
            (unsigned long long)r->limit->maximum);
    if (r->limit && bytes < r->announced) {
        atomic_fetch_sub(&r->limit->announced, r->announced - bytes);
        r->announced = bytes;
    }
    return PERSIA_OK;
}

/* ---- memory ---- */

int reserve_no_memory(const table *t)
{
    char text[256];

    snprintf(text, sizeof text, "%s", persia_err_text());
    return persia_err_set(
        PERSIA_ENOMEM,
        "table %s: %s; nothing was applied. Give the process more "
        "memory, or bound its tables: capacity, memory_limit",
        t->config.name, text);
}

/* What it reserves before an error, claim_release() gives back. */
static int claim_reserve(reserve_claim *c)
{
    table *t = c->t;
    const uint64_t capacity = t->config.capacity, now = atomic_load(&t->rows);
    /* rows beyond the capacity take the slots of those that they evict */
    const uint64_t left = capacity > now ? capacity - now : 0;
    uint64_t all = 0;
    int rc = PERSIA_OK;

    c->reserved = 1;
    for (uint32_t i = 0; i < t->stripes; i++) {
        size_t rows = c->slots[i];
        c->slots[i] = 0;
        all += rows;
        if (capacity && rows > left)
            rows = (size_t)left;
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

    lock_all(r, pthread_rwlock_wrlock);
    (void)announce(r);
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
    lock_all(r, pthread_rwlock_rdlock);
    if (!announce(r) && !claims_reserve(r))
        return PERSIA_OK;
    reservation_leave(r);
    return reservation_take_exactly(r, count, ctx);
}

void reservation_leave(reservation *r)
{
    for (size_t i = 0; i < r->n; i++) {
        table *t = r->claims[i].t;
        claim_release(&r->claims[i]);
        if (!has_capacity(t))
            continue;
        atomic_fetch_sub(&t->pending, r->claims[i].most);
        pthread_rwlock_unlock(&t->full_lock);
    }
    if (r->limit) {
        atomic_fetch_sub(&r->limit->announced, r->announced);
        pthread_rwlock_unlock(&r->limit->lock);
    }
}
