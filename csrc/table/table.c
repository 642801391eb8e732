#include "table/stripe.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    STRIPES_DEFAULT = 8,
    /* A table of a small capacity has one stripe: then "the row touched
     * longest ago" is that of the whole table. */
    ONE_STRIPE_CAPACITY = 65536,
    STRIPE_BYTES = 256 /* of an empty index, as it charges them at most */
};

void persia_table_config_init(table_config *c)
{
    memset(c, 0, sizeof *c);
    c->dim = 16;
    c->optimizer = OPTIM_ADAGRAD;
    c->init_a = -0.01f;
    c->init_b = 0.01f;
    c->admission = 1;
}

static int config_check(const table_config *c)
{
    if (!memchr(c->name, 0, sizeof c->name) || !c->name[0])
        return persia_err_set(PERSIA_EARG,
                              "a table's name has 1 to 255 bytes");
    if (c->dim < 1 || c->dim > 4096)
        return persia_err_set(PERSIA_EARG,
                              "table %s: dim is %u, it must be within "
                              "1 .. 4096",
                              c->name, c->dim);
    const spec_field *wrong = persia_spec_out_of_range(&persia_table_spec_list,
                                                       &c->spec);
    if (wrong)
        return persia_err_set(PERSIA_EARG, "table %s: %s has no such value",
                              c->name, wrong->config);
    /* six standard deviations are the most that INIT_NORMAL gives */
    if (!isfinite(c->init_a) || !isfinite(c->init_b) ||
        !isfinite(c->init_b - c->init_a) ||
        !isfinite(fabsf(c->init_a) + 6 * fabsf(c->init_b)))
        return persia_err_set(
            PERSIA_EARG, "table %s: initial values must be finite", c->name);
    if (!isfinite(c->state_init) || c->state_init < 0)
        return persia_err_set(PERSIA_EARG,
                              "table %s: the initial state is %g, it "
                              "must be finite and not negative",
                              c->name, (double)c->state_init);
    if (c->stripes & (c->stripes - 1) || c->stripes > IDS_STRIPES_MAX)
        return persia_err_set(PERSIA_EARG,
                              "table %s: stripes is %u, it must be a "
                              "power of two up to 256",
                              c->name, c->stripes);
    if (c->first_slot >= IDS_SLOTS || c->slots > IDS_SLOTS - c->first_slot)
        return persia_err_set(PERSIA_EARG, "table %s: it has no such slots",
                              c->name);
    return PERSIA_OK;
}

static uint32_t stripes_of(const table_config *c, const admitter *admit)
{
    uint32_t stripes = c->stripes ? c->stripes : STRIPES_DEFAULT;
    for (uint32_t n = 1; !c->stripes && stripes > 1 && n <= c->beside; n *= 2)
        stripes /= 2;

    if (!c->stripes && c->capacity && c->capacity < ONE_STRIPE_CAPACITY)
        stripes = 1;
    return admit->lines && admit->lines < stripes ? admit->lines : stripes;
}

int persia_table_check_optim(const table_config *c, const optim_args *optim)
{
    int rc;

    if (optim->kind < OPTIM_KINDS && optim->kind != c->optimizer)
        return persia_err_set(
            PERSIA_EMISMATCH,
            "table %s keeps the state of %s, the push is for %s", c->name,
            persia_optim_name(c->optimizer), persia_optim_name(optim->kind));
    rc = persia_optim_check(optim);
    if (rc)
        return persia_err_set(rc, "table %s: %s", c->name, persia_err_text());
    if (optim->kind == OPTIM_SGD && optim->momentum > 0 && !c->momentum)
        return persia_err_set(PERSIA_EMISMATCH,
                              "table %s was made for SGD without "
                              "momentum, the push has momentum %g",
                              c->name, (double)optim->momentum);
    return PERSIA_OK;
}

/* While updates are in flight what they have announced is theirs. */
static void limit_lock(mem_limit *limit)
{
    if (limit && limit->maximum)
        pthread_rwlock_wrlock(&limit->lock);
}

static void limit_unlock(mem_limit *limit)
{
    if (limit && limit->maximum)
        pthread_rwlock_unlock(&limit->lock);
}

static int table_with_name(const table_config *c, int rc)
{
    return rc ? persia_err_set(rc, "table %s: %s", c->name, persia_err_text())
              : PERSIA_OK;
}

static int table_policies_make(const table_config *c, evictor *evict,
                               admitter *admit)
{
    int rc = persia_evict_make(&c->spec, c->score, c->score_ctx, evict);

    if (!rc)
        rc = persia_admit_make(&c->spec, c->first_slot,
                               c->slots ? c->slots : IDS_SLOTS, admit);
    return table_with_name(c, rc);
}

/* Its filter, of zeros. */
static int filter_make(table *t)
{
    const uint64_t bytes = admit_bytes(&t->admit);
    void *filter;
    int rc;

    if (!bytes)
        return PERSIA_OK;
    rc = persia_mem_charge(t->config.limit, bytes);
    if (rc)
        return table_with_name(&t->config, rc);
    rc = persia_mem_pages_take(bytes, &filter);
    if (rc)
        persia_mem_release(t->config.limit, bytes);
    else
        t->admit.filter = filter;
    return rc;
}

static void filter_free(table *t)
{
    if (!t->admit.filter)
        return;
    persia_mem_pages_give(t->admit.filter, admit_bytes(&t->admit));
    persia_mem_release(t->config.limit, admit_bytes(&t->admit));
}

/* Its stripes and its filter, which must fit into the limit. */
static int stripes_make(table *t)
{
    mem_limit *limit = t->config.limit;
    const uint64_t bytes = (uint64_t)t->stripes * STRIPE_BYTES;
    int rc = PERSIA_OK;

    limit_lock(limit);
    if (limit && !persia_mem_announce_again(limit, 0, bytes))
        rc = persia_err_set(PERSIA_ELIMIT,
                            "table %s: an empty table takes %llu bytes, which "
                            "would pass the memory limit of %llu",
                            t->config.name, (unsigned long long)bytes,
                            (unsigned long long)limit->maximum);
    const int announced = limit && !rc;
    rc = rc ? rc : filter_make(t);
    for (uint32_t i = 0; i < t->stripes && !rc; i++)
        rc = stripe_init(t, &t->stripe[i]);
    if (announced)
        persia_mem_withdraw(limit, bytes);
    limit_unlock(limit);
    return rc;
}

int persia_table_create(const table_config *config, table **out)
{
    uint32_t stripes, floats;
    evictor evict;
    admitter admit;
    size_t size;
    table *t;
    int rc = config_check(config);

    *out = NULL;
    rc = rc ? rc : table_policies_make(config, &evict, &admit);
    if (rc)
        return rc;
    stripes = stripes_of(config, &admit);
    floats = persia_optim_state_floats(config->optimizer, config->dim,
                                       (int)config->momentum);
    size = sizeof *t + stripes * (sizeof t->stripe[0] + sizeof t->left[0]) +
           floats * sizeof(float);
    t = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!t)
        return persia_err_set(PERSIA_ENOMEM, "table %s: no memory",
                              config->name);
    memset(t, 0, size);
    t->config = *config;
    if (!t->config.hash_key)
        t->config.hash_key = persia_ids_key();
    t->stripes = stripes;
    t->left = (_Atomic(int64_t) *)(void *)&t->stripe[stripes];
    t->vector_bytes = vector_size(config->dtype, config->dim);
    t->state_offset = (ROW_VECTOR + t->vector_bytes + 3) / 4 * 4;
    t->state_floats = floats;
    t->state_start = (float *)(void *)&t->left[stripes];
    persia_optim_state_init(config->optimizer, config->dim,
                            (int)config->momentum, config->state_init,
                            t->state_start);
    t->stride = t->state_offset + floats * sizeof(float);
    t->evict = evict;
    t->admit = admit;
    if (evict.field) {
        t->field = (uint32_t)t->stride;
        t->stride += sizeof(uint32_t);
    }
    row_init_keys(t);
    t->admit.key = ((uint64_t)t->init_key[1] << 32) | t->init_key[0];
    persia_fair_lock_init(&t->gate);
    persia_fair_lock_init(&t->full_lock);
    pthread_mutex_init(&t->growth_lock, NULL);
    persia_mem_blocks_init(&t->blocks, config->limit);
    rc = stripes_make(t);
    if (rc) {
        persia_table_destroy(t);
        return rc;
    }
    *out = t;
    return PERSIA_OK;
}

void persia_table_destroy(table *t)
{
    if (!t)
        return;
    if (t->cut)
        persia_table_cut_end(t->cut);
    while (t->watches)
        persia_table_watch_close(t->watches);
    for (uint32_t i = 0; i < t->stripes; i++)
        stripe_free(&t->stripe[i]);
    pthread_rwlock_destroy(&t->gate);
    pthread_rwlock_destroy(&t->full_lock);
    pthread_mutex_destroy(&t->growth_lock);
    filter_free(t);
    persia_mem_blocks_free(&t->blocks);
    free(t);
}

const table_config *persia_table_get_config(const table *t)
{
    return &t->config;
}

uint32_t persia_table_state_floats(const table *t)
{
    return t->state_floats;
}

void persia_table_get_stats(const table *ct, table_stats *out)
{
    table *t = (table *)(uintptr_t)ct; /* its locks are not const */

    memset(out, 0, sizeof *out);
    out->rows = atomic_load(&t->rows);
    out->row_bytes = t->stride;
    out->pushes = atomic_load(&t->pushes);
    out->pulled = atomic_load(&t->pulled);
    out->missed = atomic_load(&t->missed);
    out->created = atomic_load(&t->created);
    out->evicted = atomic_load(&t->evicted);
    out->refused = atomic_load(&t->refused);
    out->nonfinite = atomic_load(&t->nonfinite);
    out->candidates = atomic_load(&t->candidates);
    out->bytes = persia_mem_blocks_bytes(&t->blocks) +
                 admit_bytes(&t->admit);
    for (uint32_t i = 0; i < t->stripes; i++) {
        stripe *s = &t->stripe[i];
        pthread_rwlock_rdlock(&s->lock);
        out->bytes += s->arena.size;
        pthread_rwlock_unlock(&s->lock);
    }
}

uint64_t persia_table_clear_bytes(const table *t)
{
    table_stats stats;

    persia_table_get_stats(t, &stats);
    return stats.bytes - admit_bytes(&t->admit);
}

void persia_table_set_clock(table *t, uint64_t pushes)
{
    atomic_store(&t->pushes, pushes);
}

int persia_table_clear(table *t)
{
    const uint64_t again = (uint64_t)t->stripes * STRIPE_BYTES;
    int rc = persia_fork_check("table_clear");

    if (rc)
        return rc;
    pthread_rwlock_wrlock(&t->gate); /* no thread holds what it gives up */
    limit_lock(t->config.limit);
    assert(!t->making && !t->growth);
    /* What it takes for empty indexes is less than each of them has given
     * back; nothing else gets it in between. */
    if (t->config.limit)
        (void)persia_mem_announce(t->config.limit, again);
    for (uint32_t i = 0; i < t->stripes; i++) {
        pthread_rwlock_wrlock(&t->stripe[i].lock);
        stripe_clear_locked(t, &t->stripe[i]);
        if (t->cut) /* it reads the filter, too */
            cut_clear_lines_locked(t, i);
        pthread_rwlock_unlock(&t->stripe[i].lock);
    }
    persia_mem_blocks_trim(&t->blocks);
    if (t->admit.filter && !t->cut)
        memset(t->admit.filter, 0, admit_bytes(&t->admit));
    if (t->config.limit)
        persia_mem_withdraw(t->config.limit, again);
    limit_unlock(t->config.limit);
    pthread_rwlock_unlock(&t->gate);
    return PERSIA_OK;
}

size_t persia_table_sightings(const table_config *c)
{
    admitter admit;

    return persia_admit_make(&c->spec, 0, 1, &admit) ? 0
                                                     : admit_words(&admit);
}

void persia_table_restore_sightings(table *t, uint32_t first, uint32_t slots,
                                    const uint32_t *words)
{
    const admitter *a = &t->admit;
    const size_t n = admit_words(a);

    assert(!t->cut); /* no other thread knows it */
    for (uint32_t i = 0; i < slots; i++)
        if (first + i >= a->first && first + i - a->first < a->slots)
            memcpy(a->filter + (first + i - a->first) * n, words + i * n,
                   n * sizeof *words);
}

void persia_table_read_sightings(const table *t, uint32_t from, uint32_t n,
                                 uint32_t *words)
{
    const size_t line = admit_words(&t->admit);

    assert(from <= t->admit.slots && n <= t->admit.slots - from);
    memcpy(words, t->admit.filter + from * line, n * line * sizeof *words);
}

void persia_table_set_filling(table *t, int filling)
{
    t->filling = filling;
}

int persia_table_has_field(const table *t)
{
    return t->field != 0;
}
