#include "table/room.h"

/* Bytes of index a row takes when its page has just grown, generously. */
enum { INDEX_BYTES = 32 };

static int has_capacity(const table *t)
{
    return t->config.capacity != 0;
}

static int passes_capacity(const table *t, uint64_t rows)
{
    const table_config *c = &t->config;

    return c->capacity && c->full == FULL_RAISE &&
           atomic_load(&t->rows) + rows > c->capacity;
}

/* Bytes that new rows may take, and their index on top: pages that grow by
 * 27 % are there twice for a moment, one a stripe, of at most half a MiB;
 * arenas end in whole pages. */
static uint64_t bytes_of(const table *t, uint64_t rows)
{
    const uint64_t capacity = t->config.capacity, now = atomic_load(&t->rows);

    if (capacity && t->config.full == FULL_EVICT_LRU) {
        /* new rows take the place of old ones */
        uint64_t left = capacity > now ? capacity - now : 0;
        rows = rows < left ? rows : left;
    }
    if (rows == 0)
        return 0;

    const uint64_t all = now + rows;
    const uint64_t moment = (uint64_t)t->stripes << 19;

    return rows * (t->stride + INDEX_BYTES) +
           t->stripes * (uint64_t)(4096 + 512) + 4 * all +
           (16 * all < moment ? 16 * all : moment);
}

static int passes_limit(const mem_limit *limit, uint64_t bytes)
{
    return atomic_load(&limit->used) + bytes > limit->maximum;
}

int room_make(room *r, room_claim *claims, size_t n)
{
    *r = (room){.claims = claims, .n = n};
    for (size_t i = 0; i < n; i++) {
        mem_limit *limit = claims[i].t->config.limit;
        if (limit != claims[0].t->config.limit)
            return err_set(PERSIA_EARG, "tables %s and %s have different "
                           "memory limits, which one call cannot keep",
                           claims[0].t->config.name, claims[i].t->config.name);
        if (limit && limit->maximum)
            r->limit = limit;
    }
    return PERSIA_OK;
}

/* All locks, in the same order by everybody. */
static void lock_all(const room *r, int (*lock)(pthread_rwlock_t *lock))
{
    for (size_t i = 0; i < r->n; i++)
        if (has_capacity(r->claims[i].t))
            lock(&r->claims[i].t->full_lock);
    if (r->limit)
        lock(&r->limit->lock);
}

/* Tells others how much this one may take; whether that is near a limit,
 * together with what they have told. */
static int announce(room *r)
{
    uint64_t bytes = 0;
    int near = 0;

    for (size_t i = 0; i < r->n; i++) {
        const room_claim *c = &r->claims[i];
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

int room_take(room *r)
{
    lock_all(r, pthread_rwlock_rdlock);
    if (!announce(r))
        return 0;
    room_leave(r);
    lock_all(r, pthread_rwlock_wrlock);
    (void)announce(r);
    return 1;
}

int room_check(const room *r)
{
    const room_claim *largest = r->claims;
    uint64_t bytes = 0;

    for (size_t i = 0; i < r->n; i++) {
        const room_claim *c = &r->claims[i];
        const table_config *config = &c->t->config;
        bytes += bytes_of(c->t, c->rows);
        if (c->rows > largest->rows)
            largest = c;
        if (c->rows && passes_capacity(c->t, c->rows))
            return err_set(PERSIA_ECAPACITY,
                           "table %s holds %llu rows of at most %llu and %zu "
                           "new ids come (id %llu is one); nothing was "
                           "applied. Raise capacity, or let old rows go: "
                           "eviction=\"lru\"", config->name,
                           (unsigned long long)atomic_load(&c->t->rows),
                           (unsigned long long)config->capacity, c->rows,
                           (unsigned long long)c->an_id);
    }
    if (r->limit && bytes && passes_limit(r->limit, bytes))
        return err_set(PERSIA_ELIMIT,
                       "table %s: %zu new rows, and those of the other tables "
                       "of this update, would pass the memory limit of %llu "
                       "bytes; nothing was applied. Raise memory_limit, or "
                       "give the table a capacity with eviction=\"lru\"",
                       largest->t->config.name, largest->rows,
                       (unsigned long long)r->limit->maximum);
    return PERSIA_OK;
}

void room_leave(room *r)
{
    for (size_t i = 0; i < r->n; i++) {
        table *t = r->claims[i].t;
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
