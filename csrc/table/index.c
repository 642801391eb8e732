#include "table/index.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    LOAD_LOW = 55,  /* percent: after growing */
    LOAD_HIGH = 70, /* percent: grows at */
    LOAD_FULL = 88, /* percent: at most, when it cannot; grown by 27 % it is
                       below LOAD_HIGH again */
    SPLIT_ROWS = 12288,
    DEPTH_MAX = 24
};

/* 0..255, spread evenly over pages: staggers when they grow and split. */
static uint32_t page_phase(uint64_t prefix, uint32_t depth)
{
    return (uint32_t)(((prefix + depth) * 0x9E3779B97F4A7C15u) >> 56);
}

/* Makes an empty page of a block of memory. */
static void page_start(page *p, uint64_t buckets, uint32_t depth,
                       uint32_t phase)
{
    memset(p, 0, sizeof *p + buckets * sizeof(bucket));
    p->buckets = (uint32_t)buckets;
    p->depth = depth;
    p->grow_at = (uint32_t)(buckets * BUCKET_ENTRIES * LOAD_HIGH / 100);
    p->full_at = (uint32_t)(buckets * BUCKET_ENTRIES * LOAD_FULL / 100);
    p->split_at = SPLIT_ROWS + SPLIT_ROWS * phase / 256;
}

/* `take`: mem_blocks_take or mem_blocks_take_held. */
typedef int (*take_fn)(mem_blocks *b, size_t bytes, void **out);

static int page_create(row_index *ix, take_fn take, uint64_t buckets,
                       uint32_t depth, uint32_t phase, page **out)
{
    void *block;
    int rc = take(ix->blocks, sizeof(page) + buckets * sizeof(bucket),
                  &block);

    if (rc)
        return rc;
    *out = block;
    page_start(*out, buckets, depth, phase);
    return PERSIA_OK;
}

static void page_destroy(row_index *ix, page *p)
{
    mem_blocks_give(ix->blocks, p);
}

/* Counts passed buckets as full ones: the caller made sure of room. */
static void page_insert(page *p, uint64_t hash, uint32_t slot)
{
    uint32_t at = page_home(hash, p->depth, p->buckets);

    for (;;) {
        bucket *b = &p->bucket[at];
        uint32_t empty = bucket_match(b, 0);
        if (empty) {
            uint32_t i = (uint32_t)__builtin_ctz(empty);
            b->tag[i] = hash_tag(hash);
            b->slot[i] = slot;
            p->rows++;
            return;
        }
        if (b->passed < 255)
            b->passed++;
        if (++at == p->buckets)
            at = 0;
    }
}

int row_index_init(row_index *ix, mem_blocks *blocks)
{
    int rc;
    page *p = NULL;

    memset(ix, 0, sizeof *ix);
    ix->blocks = blocks;
    ix->directory = malloc(sizeof *ix->directory);
    if (!ix->directory)
        return err_set(PERSIA_ENOMEM, "table index: no directory");
    rc = page_create(ix, mem_blocks_take, 1, 0, 0, &p);
    if (rc) {
        free(ix->directory);
        ix->directory = NULL;
        return rc;
    }
    ix->directory[0] = (page_ref){ p, p->buckets, 0 };
    return PERSIA_OK;
}

void row_index_free(row_index *ix)
{
    if (!ix->directory)
        return;
    for (size_t i = 0; i < (size_t)1 << ix->depth;) {
        page *p = ix->directory[i].page;
        i += (size_t)1 << (ix->depth - p->depth);
        page_destroy(ix, p);
    }
    free(ix->directory);
    ix->directory = NULL;
}

void row_index_clear(row_index *ix)
{
    row_index fresh;
    page *first = ix->directory[0].page;

    if (row_index_init(&fresh, ix->blocks) == PERSIA_OK) {
        row_index_free(ix);
        *ix = fresh;
        return;
    }
    /* at the limit of memory: go on with the first page, made small */
    for (size_t i = (size_t)1 << (ix->depth - first->depth);
         i < (size_t)1 << ix->depth;) {
        page *p = ix->directory[i].page;
        i += (size_t)1 << (ix->depth - p->depth);
        page_destroy(ix, p);
    }
    page_start(first, 1, 0, 0);
    ix->depth = 0;
    ix->directory[0] = (page_ref){ first, 1, 0 };
}

/* First directory entry of the page of this hash, and how many it has. */
static size_t page_entries(const row_index *ix, const page *p, uint64_t hash,
                           size_t *first)
{
    uint64_t prefix = p->depth ? hash >> (64 - p->depth) : 0;
    size_t n = (size_t)1 << (ix->depth - p->depth);

    *first = (size_t)prefix << (ix->depth - p->depth);
    return n;
}

static void directory_set(row_index *ix, size_t first, size_t n, page *p)
{
    for (size_t i = first; i < first + n; i++)
        ix->directory[i] = (page_ref){ p, p->buckets, p->depth };
}

static int directory_double(row_index *ix)
{
    size_t n = (size_t)1 << ix->depth;
    page_ref *wide;

    if (ix->depth == DEPTH_MAX)
        return err_set(PERSIA_ELIMIT, "table index: directory is full");
    wide = malloc(2 * n * sizeof *wide);
    if (!wide)
        return err_set(PERSIA_ENOMEM, "table index: no directory of %zu",
                       2 * n);
    for (size_t i = 0; i < n; i++)
        wide[2 * i] = wide[2 * i + 1] = ix->directory[i];
    free(ix->directory);
    ix->directory = wide;
    ix->depth++;
    return PERSIA_OK;
}

/* Entries of a page on their way: their rows, whose ids are to be rehashed,
 * are fetched AHEAD entries before they are read. */
enum { AHEAD = 32 };
typedef struct page_walk {
    const page *from;
    row_store rows;
    uint32_t bucket, mask; /* of the next entry */
    uint32_t slots[AHEAD];
    size_t made, read;
} page_walk;

static inline int walk_fetch(page_walk *w)
{
    uint32_t slot;

    while (!w->mask) {
        if (w->bucket == w->from->buckets)
            return 0;
        w->mask = ~bucket_match(&w->from->bucket[w->bucket++], 0) & 0xFFFu;
    }
    slot = w->from->bucket[w->bucket - 1].slot[__builtin_ctz(w->mask)];
    w->mask &= w->mask - 1;
    __builtin_prefetch(w->rows.base + slot * w->rows.stride);
    w->slots[w->made++ % AHEAD] = slot;
    return 1;
}

static inline void walk_start(page_walk *w, const page *from, row_store rows)
{
    *w = (page_walk){ .from = from, .rows = rows };
    while (w->made < AHEAD && walk_fetch(w))
        ;
}

/* 0 at the end. */
static inline int walk_next(page_walk *w, uint32_t *slot, uint64_t *hash)
{
    if (w->read == w->made)
        return 0;
    *slot = w->slots[w->read++ % AHEAD];
    *hash = id_hash(row_id(w->rows.base + *slot * w->rows.stride));
    walk_fetch(w);
    return 1;
}

/* Entries whose next bit of the hash is set. */
static uint32_t page_count_ones(const page *from, row_store rows)
{
    page_walk w;
    uint32_t slot, ones = 0;
    uint64_t hash;

    for (walk_start(&w, from, rows); walk_next(&w, &slot, &hash);)
        ones += (uint32_t)((hash << from->depth) >> 63);
    return ones;
}

/* Moves all entries to to[0], or to to[next bit of the hash] when there are
 * two; 0 when one became too full. */
static int page_move(const page *from, row_store rows, page *to[2])
{
    page_walk w;
    uint32_t slot;
    uint64_t hash;

    for (walk_start(&w, from, rows); walk_next(&w, &slot, &hash);) {
        page *p = to[1] && (hash << from->depth) >> 63 ? to[1] : to[0];
        if (p->rows > p->grow_at)
            return 0;
        page_insert(p, hash, slot);
    }
    return 1;
}

static int page_grow(row_index *ix, row_store rows, uint64_t hash, page *old,
                     take_fn take)
{
    page *to[2] = { NULL, NULL };
    size_t first, n;
    uint64_t buckets =
        old->buckets + (uint64_t)old->buckets * 27 / 100 + 1;
    int rc = page_create(ix, take, buckets, old->depth, 0, &to[0]);

    if (rc)
        return rc;
    to[0]->split_at = old->split_at;
    const int whole = page_move(old, rows, to);
    assert(whole); /* or entries were lost: LOAD_FULL / 1.27 < LOAD_HIGH */
    (void)whole;
    n = page_entries(ix, old, hash, &first);
    directory_set(ix, first, n, to[0]);
    page_destroy(ix, old);
    return PERSIA_OK;
}

/* Pages for the two halves of `old`, of which `ones` rows are expected in
 * the second. */
static int halves_create(row_index *ix, uint64_t prefix, const page *old,
                         uint32_t ones, page *to[2])
{
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t phase = page_phase(prefix * 2 + half, old->depth + 1);
        uint64_t load = LOAD_LOW + (LOAD_HIGH - 5 - LOAD_LOW) * phase / 256;
        uint64_t share = half ? ones : old->rows - ones;
        uint64_t buckets = share * 100 / load / BUCKET_ENTRIES + 1;
        int rc = page_create(ix, mem_blocks_take, buckets, old->depth + 1,
                             phase, &to[half]);
        if (rc) {
            if (half)
                page_destroy(ix, to[0]);
            return rc;
        }
    }
    return PERSIA_OK;
}

static int page_split(row_index *ix, row_store rows, uint64_t hash, page *old)
{
    page *to[2] = { NULL, NULL };
    size_t first, n;
    uint64_t prefix = old->depth ? hash >> (64 - old->depth) : 0;
    int rc = PERSIA_OK;

    if (ix->depth == old->depth)
        rc = directory_double(ix);
    if (!rc) /* halves are nearly equal: the hash is a good one */
        rc = halves_create(ix, prefix, old, old->rows / 2, to);
    if (rc)
        return rc;
    if (!page_move(old, rows, to)) { /* unless a shard has one half only */
        page_destroy(ix, to[0]);
        page_destroy(ix, to[1]);
        rc = halves_create(ix, prefix, old, page_count_ones(old, rows), to);
        if (rc)
            return rc;
        const int whole = page_move(old, rows, to);
        assert(whole); /* each has been made for what it gets */
        (void)whole;
    }
    n = page_entries(ix, old, hash, &first);
    directory_set(ix, first, n / 2, to[0]);
    directory_set(ix, first + n / 2, n / 2, to[1]);
    page_destroy(ix, old);
    return PERSIA_OK;
}

static int page_widen(row_index *ix, row_store rows, uint64_t hash, page *p)
{
    if (p->rows >= p->split_at && p->depth < DEPTH_MAX)
        return page_split(ix, rows, hash, p);
    return page_grow(ix, rows, hash, p, mem_blocks_take);
}

int row_index_reserve(row_index *ix, row_store rows, uint64_t hash)
{
    page *p = row_index_page(ix, hash)->page;
    int rc;

    while (p->rows >= p->grow_at) {
        rc = page_widen(ix, rows, hash, p);
        if (rc == PERSIA_ENOMEM && p->rows < p->full_at) {
            mem_blocks_starve(ix->blocks);
            return PERSIA_OK;
        }
        if (rc == PERSIA_ENOMEM)
            rc = page_grow(ix, rows, hash, p, mem_blocks_take_held);
        if (rc)
            return rc;
        p = row_index_page(ix, hash)->page;
    }
    return PERSIA_OK;
}

int row_index_settle(row_index *ix, row_store rows)
{
    uint64_t hash = 0, step;
    int rc;

    do {
        page *p = row_index_page(ix, hash)->page;
        while (p->rows > p->grow_at) {
            rc = page_widen(ix, rows, hash, p);
            if (rc)
                return rc;
            p = row_index_page(ix, hash)->page;
        }
        step = p->depth ? (uint64_t)1 << (64 - p->depth) : 0;
        hash += step;
    } while (hash); /* until it has gone round */
    return PERSIA_OK;
}

void row_index_insert(row_index *ix, uint64_t hash, uint32_t slot)
{
    page_insert(row_index_page(ix, hash)->page, hash, slot);
}

void row_index_remove(row_index *ix, uint64_t hash, uint32_t slot)
{
    page *p = row_index_page(ix, hash)->page;
    const uint8_t tag = hash_tag(hash);
    uint32_t home = page_home(hash, p->depth, p->buckets), at = home;

    for (;;) {
        bucket *b = &p->bucket[at];
        for (uint32_t mask = bucket_match(b, tag); mask; mask &= mask - 1) {
            uint32_t i = (uint32_t)__builtin_ctz(mask);
            if (b->slot[i] != slot)
                continue;
            b->tag[i] = 0;
            p->rows--;
            for (; home != at; home = home + 1 == p->buckets ? 0 : home + 1)
                if (p->bucket[home].passed < 255)
                    p->bucket[home].passed--;
            return;
        }
        if (++at == p->buckets)
            at = 0;
    }
}
