#include "table/filter.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Lines of a stripe in a slot. */
static uint32_t filter_lines_each(const table *t)
{
    return t->admit.lines / t->stripes;
}

int filter_cut_begin(const table *t, filter_cut *c)
{
    const admitter *a = &t->admit;
    void *aside;
    int rc;

    memset(c, 0, sizeof *c);
    if (!a->filter)
        return PERSIA_OK;
    c->words = ((size_t)a->slots * filter_lines_each(t) + 63) / 64;
    const size_t bits = t->stripes * c->words * sizeof *c->copied;
    const size_t bytes = admit_bytes(a) + bits;
    rc = persia_mem_charge(t->config.limit, bytes);
    if (rc)
        return rc;
    rc = persia_mem_pages_take(admit_bytes(a), &aside);
    c->copied = rc ? NULL : calloc(1, bits);
    if (!rc && !c->copied) {
        persia_mem_pages_give(aside, admit_bytes(a));
        rc = persia_err_set(PERSIA_ENOMEM,
                            "table %s: no memory for a snapshot",
                            t->config.name);
    }
    if (rc) {
        persia_mem_release(t->config.limit, bytes);
        return rc;
    }
    c->aside = aside;
    c->charged = bytes;
    return PERSIA_OK;
}

void filter_cut_end(const table *t, filter_cut *c)
{
    if (c->aside) {
        persia_mem_pages_give(c->aside, admit_bytes(&t->admit));
        persia_mem_release(t->config.limit, c->charged);
    }
    free(c->copied);
    memset(c, 0, sizeof *c);
}

/* The bit of a line: bits of a stripe share no word with those of others. */
static uint64_t *filter_line_word(const table *t, filter_cut *c, uint32_t slot,
                                  uint32_t line, uint64_t *bit)
{
    const uint32_t stripe = line & (t->stripes - 1);
    const size_t at = (size_t)slot * filter_lines_each(t) + line / t->stripes;

    assert(at / 64 < c->words);
    *bit = (uint64_t)1 << (at % 64);
    return &c->copied[stripe * c->words + at / 64];
}

static size_t filter_line_at(const table *t, uint32_t slot, uint32_t line)
{
    return slot * admit_words(&t->admit) + line * (size_t)ADMIT_LINE;
}

static void filter_line_touch(const table *t, filter_cut *c, uint32_t slot,
                              uint32_t line)
{
    const size_t at = filter_line_at(t, slot, line);
    uint64_t bit, *word = filter_line_word(t, c, slot, line, &bit);

    if (slot < c->read[line & (t->stripes - 1)] || *word & bit)
        return;
    *word |= bit;
    memcpy(c->aside + at, t->admit.filter + at,
           ADMIT_LINE * sizeof *c->aside);
}

void filter_touch_locked(const table *t, filter_cut *c, uint64_t hash)
{
    if (c->aside)
        filter_line_touch(t, c, admit_slot(&t->admit, hash),
                          admit_line(&t->admit, hash));
}

void filter_clear_locked(const table *t, filter_cut *c, uint32_t stripe)
{
    const admitter *a = &t->admit;

    for (uint32_t slot = 0; slot < a->slots && a->filter; slot++)
        for (uint32_t k = stripe; k < a->lines; k += t->stripes) {
            if (c && c->aside)
                filter_line_touch(t, c, slot, k);
            memset(a->filter + filter_line_at(t, slot, k), 0,
                   ADMIT_LINE * sizeof *a->filter);
        }
}

void filter_cut_read(table *t, filter_cut *c, uint32_t from, uint32_t n,
                     uint32_t *out)
{
    const size_t first = filter_line_at(t, from, 0);

    for (uint32_t i = 0; i < t->stripes; i++) {
        pthread_rwlock_wrlock(&t->stripe[i].lock);
        for (uint32_t slot = from; slot < from + n; slot++)
            for (uint32_t k = i; k < t->admit.lines; k += t->stripes) {
                const size_t at = filter_line_at(t, slot, k);
                uint64_t bit;
                const int aside =
                    (*filter_line_word(t, c, slot, k, &bit) & bit) != 0;
                memcpy(out + at - first,
                       (aside ? c->aside : t->admit.filter) + at,
                       ADMIT_LINE * sizeof *out);
            }
        assert(c->read[i] == from);
        c->read[i] = from + n;
        pthread_rwlock_unlock(&t->stripe[i].lock);
    }
}
