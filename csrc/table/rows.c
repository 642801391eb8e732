/* rows.c: whole rows in and out, by id: chunks ordered by stripe, a lock
 * taken once for a run. */
#include "table/push.h"
#include "table/watch.h"

#include <stdlib.h>
#include <string.h>

/* One id of a run, with the stripe's lock held: `at` is its position. */
typedef int (*row_fn)(table *t, stripe *s, uint64_t hash, uint64_t id,
                      size_t at, void *ctx);

/* changes: locks are held exclusively, for callers that change rows. */
static int rows_visit(table *t, size_t n, const uint64_t *ids, int changes,
                      row_fn fn, void *ctx)
{
    enum { AHEAD = 12 }; /* ids whose bucket is fetched meanwhile */
    uint64_t hash[IDS_CHUNK];
    uint16_t order[IDS_CHUNK], start[IDS_STRIPES_MAX + 1];
    int rc = PERSIA_OK;

    for (size_t first = 0; first < n; first += IDS_CHUNK) {
        size_t here = n - first < IDS_CHUNK ? n - first : IDS_CHUNK;
        persia_ids_split_chunk(ids + first, here, t->config.hash_key,
                               t->stripes, hash, order, start);
        for (uint32_t i = 0; i < t->stripes; i++) {
            stripe *s = &t->stripe[i];
            if (start[i] == start[i + 1])
                continue;
            if (changes)
                pthread_rwlock_wrlock(&s->lock), hand_look_locked(t, s);
            else
                pthread_rwlock_rdlock(&s->lock);
            for (uint32_t k = start[i]; k < start[i + 1] && !rc; k++) {
                if (k + AHEAD < start[i + 1])
                    __builtin_prefetch(
                        row_index_home(&s->index, hash[k + AHEAD]), 1);
                rc = fn(t, s, hash[k], ids[first + order[k]],
                        first + order[k], ctx);
            }
            if (changes)
                stripe_count_locked(t, s);
            pthread_rwlock_unlock(&s->lock);
            if (rc)
                return rc;
        }
    }
    return PERSIA_OK;
}

typedef struct rows_out {
    float *vectors, *state;
    uint8_t *found;
} rows_out;

static int row_get(table *t, stripe *s, uint64_t hash, uint64_t id, size_t at,
                   void *ctx)
{
    rows_out *o = ctx;
    float *vector = o->vectors + at * t->config.dim;
    float *state = o->state ? o->state + at * t->state_floats : NULL;
    int64_t slot = row_index_find(&s->index, stripe_rows(t, s), hash, id);

    if (o->found)
        o->found[at] = slot >= 0;
    if (slot >= 0) {
        const char *row = stripe_row(t, s, (uint32_t)slot);
        row_load_vector(t, row, vector);
        if (state)
            memcpy(state, row + t->state_offset,
                   t->state_floats * sizeof *state);
        return PERSIA_OK;
    }
    row_init_vector(t, id, vector);
    if (state)
        row_init_state(t, state);
    return PERSIA_OK;
}

int persia_table_get(table *t, size_t n, const uint64_t *ids, float *vectors,
                     float *state, uint8_t *found)
{
    rows_out out = { vectors, state, found };
    int rc = persia_fork_check("table_get");

    return rc ? rc : rows_visit(t, n, ids, 0, row_get, &out);
}

/* Rows to write: fp32 vectors or raw ones (the table's dtype). */
typedef struct rows_in {
    const float *vectors;
    const char *raw;
    const float *state;
    const uint32_t *clocks, *fields;
    uint32_t clock;
    reserve_claim *claim;
} rows_in;

static int row_put(table *t, stripe *s, uint64_t hash, uint64_t id, size_t at,
                   void *ctx)
{
    const rows_in *in = ctx;
    uint32_t clock = in->clocks ? in->clocks[at] : in->clock, slot, evicted;
    int64_t found = row_index_find(&s->index, stripe_rows(t, s), hash, id);
    char *row;
    int rc;

    if (!clock)
        clock = in->clock;
    if (found >= 0) {
        slot = (uint32_t)found;
        stripe_touch_locked(t, s, slot);
    } else {
        const stripe_room room = { &in->claim->slots[s - t->stripe],
                                   in->claim->opens };
        rc = stripe_add_locked(t, s, hash, id, in->clock, 0, &room, &slot,
                               &evicted);
        if (rc == PERSIA_ECAPACITY && t->expected > t->config.capacity &&
            t->evict.policy) { /* its stripe's part is 0 */
            atomic_fetch_add(&t->evicted, 1);
            return PERSIA_OK;
        }
        if (rc == PERSIA_ECAPACITY)
            return persia_err_set(rc,
                                  "table %s: no room for id %lld at capacity "
                                  "%llu: declare a larger one",
                                  t->config.name, (long long)id,
                                  (unsigned long long)t->config.capacity);
        if (!rc) {
            atomic_fetch_add(&t->created, 1);
            atomic_fetch_add(&t->evicted, evicted);
        }
        if (rc)
            return rc;
    }
    row = stripe_row(t, s, slot);
    row_set_clock(row, clock);
    if (in->raw)
        memcpy(row + ROW_VECTOR, in->raw + at * t->vector_bytes,
               t->vector_bytes);
    else
        row_store_vector(t, in->vectors + at * t->config.dim, row);
    if (in->state)
        memcpy(row + t->state_offset, in->state + at * t->state_floats,
               t->state_floats * sizeof(float));
    else
        row_init_state(t, row + t->state_offset);
    if (t->field) {
        row_set_field(t, row, in->fields ? in->fields[at] : 0);
        if (!in->fields)
            hand_touch_locked(t, s, 1, &(float){ 0 }, &row);
    }
    return PERSIA_OK;
}

/* Places of rows that are not there. */
typedef struct rows_absent {
    uint64_t *places;
    size_t n;
    uint64_t an_id;
} rows_absent;

static int row_absent(table *t, stripe *s, uint64_t hash, uint64_t id,
                      size_t at, void *ctx)
{
    rows_absent *a = ctx;

    (void)at;
    if (row_index_find(&s->index, stripe_rows(t, s), hash, id) == SLOT_NONE) {
        a->places[a->n++] = hash;
        a->an_id = id;
    }
    return PERSIA_OK;
}

/* A reserve_count_fn: ctx is the ids. */
static int rows_count(reserve_claim *c, void *ctx)
{
    rows_absent a = { .places = malloc((c->most + 1) * sizeof *a.places) };

    if (!a.places)
        return persia_err_set(PERSIA_ENOMEM,
                              "out of memory: %zu bytes to count new "
                              "rows",
                              (c->most + 1) * sizeof *a.places);
    (void)rows_visit(c->t, c->most, ctx, 0, row_absent, &a);
    reserve_count(c, a.places, a.n);
    c->an_id = a.an_id;
    free(a.places);
    return PERSIA_OK;
}

static int rows_put(table *t, size_t n, const uint64_t *ids, rows_in *in)
{
    size_t slots[IDS_STRIPES_MAX] = { 0 };
    _Atomic(size_t) opens = 0;
    reserve_claim claim = { .t = t, .most = n, .slots = slots,
                            .opens = &opens };
    reservation r;
    int rc;

    if (!n)
        return PERSIA_OK;
    rc = reservation_make(&r, &claim, 1);
    if (rc)
        return rc;
    for (size_t i = 0; i < n; i++)
        slots[hash_stripe(id_hash(ids[i]), t->stripes - 1)]++;
    pthread_rwlock_rdlock(&t->gate);
    in->clock = clock_short(atomic_load(&t->pushes));
    in->claim = &claim;
    rc = reservation_take(&r, rows_count, (void *)(uintptr_t)ids);
    if (!rc) {
        rc = rows_visit(t, n, ids, 1, row_put, in);
        reservation_leave(&r);
    }
    pthread_rwlock_unlock(&t->gate);
    return rc;
}

static int row_erase(table *t, stripe *s, uint64_t hash, uint64_t id,
                     size_t at, void *ctx)
{
    uint64_t *erased = ctx;
    int64_t slot = row_index_find(&s->index, stripe_rows(t, s), hash, id);

    (void)at;
    if (slot >= 0) {
        stripe_release_locked(t, s, (uint32_t)slot);
        ++*erased;
    }
    return PERSIA_OK;
}

int persia_table_erase(table *t, size_t n, const uint64_t *ids,
                       uint64_t *erased)
{
    int rc = persia_fork_check("table_erase");

    *erased = 0;
    if (rc)
        return rc;
    pthread_rwlock_rdlock(&t->gate);
    rc = watch_erase_begin(t, n);
    if (!rc) {
        (void)rows_visit(t, n, ids, 1, row_erase, erased);
        atomic_fetch_sub(&t->rows, *erased);
        watch_erase_end(t, n, ids);
    }
    pthread_rwlock_unlock(&t->gate);
    return rc;
}

/* Whether all of x is finite as the table keeps it. */
static int rows_vector_fits(const table *t, const float *x)
{
    const float most = t->config.dtype == VECTOR_BF16 ? 0x1.FEFFFEp127f
                                                      : 0x1.FFFFFEp127f;

    for (uint32_t j = 0; j < t->config.dim; j++)
        if (!(x[j] >= -most && x[j] <= most))
            return 0;
    return 1;
}

static const char *rows_state_misfit(const table *t, const float *state)
{
    const table_config *c = &t->config;

    return persia_optim_state_misfit(c->optimizer, c->dim, (int)c->momentum,
                                     state);
}

int persia_table_set(table *t, size_t n, const uint64_t *ids,
                     const float *vectors, const float *state)
{
    rows_in in = { .vectors = vectors, .state = state };
    int rc = persia_fork_check("table_set");

    if (rc)
        return rc;
    for (size_t i = 0; i < n; i++)
        if (!rows_vector_fits(t, vectors + i * t->config.dim))
            return persia_err_set(
                PERSIA_ENONFINITE,
                "table %s: the values for id %lld (row %zu) are "
                "not finite; nothing was written",
                t->config.name, (long long)ids[i], i);
    for (size_t i = 0; i < n && state; i++) {
        const char *field = rows_state_misfit(t, state + i * t->state_floats);
        if (field)
            return persia_err_set(
                PERSIA_ENONFINITE,
                "table %s: %s of the state for id %lld (row %zu) is not "
                "finite, or negative where %s takes a root of it; "
                "nothing was written",
                t->config.name, field, (long long)ids[i], i,
                persia_optim_name(t->config.optimizer));
    }
    return rows_put(t, n, ids, &in);
}

void persia_table_expect(table *t, size_t n, const uint64_t *ids)
{
    for (size_t i = 0; i < n; i++)
        t->stripe[hash_stripe(id_hash(ids[i]), t->stripes - 1)].expected++;
    t->expected += n;
}

void persia_table_expect_none(table *t)
{
    for (size_t i = 0; i < t->stripes; i++)
        t->stripe[i].expected = 0;
    t->expected = 0;
}

int persia_table_restore(table *t, size_t n, const uint64_t *ids,
                         const void *vectors, const float *state,
                         const uint32_t *clocks, const uint32_t *fields)
{
    rows_in in = { .raw = vectors, .state = state, .clocks = clocks,
                   .fields = fields };
    int rc = persia_fork_check("table_restore");

    return rc ? rc : rows_put(t, n, ids, &in);
}

/* Ids of a stripe from slot `*at` on; *at moves on. */
static size_t list_stripe(const table *t, stripe *s, uint32_t *at,
                          size_t room, uint64_t *ids)
{
    enum { SLOTS = 65536 }; /* that are looked at while the lock is slots */
    size_t n = 0;
    pthread_rwlock_rdlock(&s->lock);
    for (uint32_t i = 0; i < SLOTS && *at < s->used && n < room; i++) {
        const char *row = stripe_row(t, s, (*at)++);
        if (row_clock(row))
            memcpy(&ids[n++], row, sizeof *ids);
    }
    if (*at >= s->used)
        *at = UINT32_MAX;
    pthread_rwlock_unlock(&s->lock);
    return n;
}

int persia_table_list(table *t, uint64_t *cursor, size_t room, uint64_t *ids,
                      size_t *n)
{
    uint64_t stripe_no = *cursor >> 32;
    uint32_t slot = (uint32_t)*cursor;
    int rc = persia_fork_check("table_list");
    *n = 0;
    if (rc)
        return rc;
    while (stripe_no < t->stripes && *n < room) {
        *n += list_stripe(t, &t->stripe[stripe_no], &slot, room - *n,
                          ids + *n);
        if (slot == UINT32_MAX) {
            slot = 0;
            stripe_no++;
        }
    }
    *cursor = stripe_no < t->stripes ? stripe_no << 32 | slot
                                     : TABLE_LIST_END;
    return PERSIA_OK;
}
