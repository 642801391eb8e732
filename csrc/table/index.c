#include "table/index.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    LOAD_LOW = 55,  /* percent: after growing */
    LOAD_HALF = 67, /* percent: at most, after a split */
    LOAD_HIGH = 70, /* percent: grows at */
    SPLIT_ROWS = 12288,
    DEPTH_MAX = 24
};

/* 0..255, spread evenly over pages: staggers when they grow and split. */
static uint32_t page_phase(uint64_t prefix, uint32_t depth)
{
    return (uint32_t)(((prefix + depth) * 0x9E3779B97F4A7C15u) >> 56);
}

/* Rows of a page at a load in percent. */
static uint32_t page_rows_at(const page *p, uint32_t load)
{
    return (uint32_t)((uint64_t)p->buckets * BUCKET_ENTRIES * load / 100);
}

static page *page_create(row_index *ix, uint64_t buckets, uint32_t depth,
                         uint32_t phase)
{
    const size_t bytes = sizeof(page) + buckets * sizeof(bucket);
    page *p = persia_mem_blocks_take(ix->blocks, bytes);

    memset(p, 0, bytes);
    p->buckets = (uint32_t)buckets;
    p->depth = depth;
    p->grow_at = page_rows_at(p, LOAD_HIGH);
    p->split_at = SPLIT_ROWS + SPLIT_ROWS * phase / 256;
    return p;
}

static void page_destroy(row_index *ix, page *p)
{
    persia_mem_blocks_give(ix->blocks, p);
}

/* Counts passed buckets as full ones; the page is not full. */
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

static void index_start(row_index *ix)
{
    page *p = page_create(ix, 1, 0, 0);

    ix->depth = 0;
    ix->directory[0] = (page_ref){ p, p->buckets, 0 };
}

int row_index_init(row_index *ix, mem_blocks *blocks, uint64_t key)
{
    const uint64_t bytes = row_index_bytes(2); /* a page, and its header */
    int rc;

    memset(ix, 0, sizeof *ix);
    ix->blocks = blocks;
    ix->key = key;
    rc = persia_mem_blocks_reserve(blocks, bytes);
    if (rc)
        return rc;
    ix->directory = malloc(sizeof *ix->directory);
    if (ix->directory)
        index_start(ix);
    else
        rc = persia_err_set(PERSIA_ENOMEM, "table index: no directory");
    persia_mem_blocks_unreserve(blocks, bytes);
    return rc;
}

static void pages_destroy(row_index *ix)
{
    for (size_t i = 0; i < (size_t)1 << ix->depth;) {
        page *p = ix->directory[i].page;
        i += (size_t)1 << (ix->depth - p->depth);
        page_destroy(ix, p);
    }
}

void row_index_free(row_index *ix)
{
    if (!ix->directory)
        return;
    pages_destroy(ix);
    free(ix->directory);
    ix->directory = NULL;
}

void row_index_clear(row_index *ix)
{
    page *only = ix->directory[0].page;

    if (only->depth == 0 && only->buckets == 1) { /* as at the start */
        only->rows = 0;
        memset(only->bucket, 0, sizeof only->bucket[0]);
        return;
    }
    pages_destroy(ix);
    index_start(ix); /* in a block just given back */
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

static void index_directory_set(row_index *ix, size_t first, size_t n, page *p)
{
    for (size_t i = first; i < first + n; i++)
        ix->directory[i] = (page_ref){ p, p->buckets, p->depth };
}

/* Pages split at SPLIT_ROWS or more, evenly, as the hash is a good one. */
int row_index_deepen(row_index *ix, uint64_t rows)
{
    uint32_t depth = ix->depth;
    page_ref *wide;

    while (depth < DEPTH_MAX && rows >> depth >= SPLIT_ROWS / 2)
        depth++;
    if (depth == ix->depth)
        return 1;
    wide = malloc(sizeof *wide << depth);
    if (!wide)
        return 0;
    for (size_t i = 0; i < (size_t)1 << depth; i++)
        wide[i] = ix->directory[i >> (depth - ix->depth)];
    free(ix->directory);
    ix->directory = wide;
    ix->depth = depth;
    return 1;
}

uint64_t row_index_growth(const row_index *ix, const uint64_t *places,
                          size_t n)
{
    /* Of a row at the lowest load, and at the highest, rounded up; of a page
     * and its block, with buckets that are not full. */
    enum { LOW = 10, HIGH = 8, PAGE = 256 };
    uint64_t bytes = 0, moment = 0;

    for (size_t i = 0, k; i < n; i = k) {
        const page *p = row_index_page(ix, places[i])->page;
        const uint32_t shift = 63 - p->depth; /* and one more */
        for (k = i + 1; k < n && (places[k] >> 1) >> shift ==
                                     (places[i] >> 1) >> shift; k++)
            ;
        const uint64_t rows = p->rows + (k - i);
        if (rows <= p->grow_at)
            continue;
        /* halves have thousands of rows each */
        const uint64_t most = rows * LOW + PAGE * (1 + rows / 4096);
        const uint64_t now = p->buckets * sizeof(bucket);
        const uint64_t old = rows * HIGH + PAGE;
        bytes += most > now ? most - now : 0;
        moment = old > moment ? old : moment;
    }
    return bytes + moment;
}

/* Entries of a page on their way: their rows, whose ids are to be rehashed,
 * are fetched AHEAD entries before they are read. */
enum { AHEAD = 32 };
typedef struct page_walk {
    const page *from;
    row_store rows;
    uint64_t key;
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

static inline void walk_start(page_walk *w, const page *from, row_store rows,
                              uint64_t key)
{
    *w = (page_walk){ .from = from, .rows = rows, .key = key };
    while (w->made < AHEAD && walk_fetch(w))
        ;
}

/* 0 at the end. */
static inline int walk_next(page_walk *w, uint32_t *slot, uint64_t *hash)
{
    if (w->read == w->made)
        return 0;
    *slot = w->slots[w->read++ % AHEAD];
    *hash = id_place(row_id(w->rows.base + *slot * w->rows.stride), w->key);
    walk_fetch(w);
    return 1;
}

/* Entries whose next bit of the hash is set. */
static uint32_t page_count_ones(const page *from, row_store rows, uint64_t key)
{
    page_walk w;
    uint32_t slot, ones = 0;
    uint64_t hash;

    for (walk_start(&w, from, rows, key); walk_next(&w, &slot, &hash);)
        ones += (uint32_t)((hash << from->depth) >> 63);
    return ones;
}

/* Moves all entries to to[0], or to to[next bit of the hash] when there are
 * two; 0 when one of the two became too full. */
static int page_move(const page *from, row_store rows, uint64_t key,
                     page *to[2])
{
    uint32_t most[2] = { to[0]->grow_at, 0 };
    page_walk w;
    uint32_t slot;
    uint64_t hash;

    for (int half = 0; to[1] && half < 2; half++)
        most[half] = page_rows_at(to[half], LOAD_HALF);
    for (walk_start(&w, from, rows, key); walk_next(&w, &slot, &hash);) {
        const int half = to[1] && (hash << from->depth) >> 63;
        if (to[half]->rows > most[half])
            return 0;
        page_insert(to[half], hash, slot);
    }
    return 1;
}

static void page_grow(row_index *ix, row_store rows, uint64_t hash, page *old)
{
    uint64_t buckets =
        old->buckets + (uint64_t)old->buckets * 27 / 100 + 1;
    page *to[2] = { page_create(ix, buckets, old->depth, 0), NULL };
    size_t first, n;

    to[0]->split_at = old->split_at;
    const int whole = page_move(old, rows, ix->key, to);
    assert(whole); /* it is larger */
    (void)whole;
    n = page_entries(ix, old, hash, &first);
    index_directory_set(ix, first, n, to[0]);
    page_destroy(ix, old);
}

/* Pages for the two halves of `old`, of which `ones` rows are expected in
 * the second. */
static void index_halves_create(row_index *ix, uint64_t prefix,
                                const page *old, uint32_t ones, page *to[2])
{
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t phase = page_phase(prefix * 2 + half, old->depth + 1);
        uint64_t load = LOAD_LOW + (LOAD_HIGH - 5 - LOAD_LOW) * phase / 256;
        uint64_t share = half ? ones : old->rows - ones;
        uint64_t buckets = share * 100 / load / BUCKET_ENTRIES + 1;
        to[half] = page_create(ix, buckets, old->depth + 1, phase);
    }
}

static void page_split(row_index *ix, row_store rows, uint64_t hash, page *old)
{
    const uint64_t prefix = old->depth ? hash >> (64 - old->depth) : 0;
    page *to[2];
    size_t first, n;

    /* halves are nearly equal: the hash is a good one */
    index_halves_create(ix, prefix, old, old->rows / 2, to);
    if (!page_move(old, rows, ix->key, to)) { /* but a key may be unlucky */
        page_destroy(ix, to[0]);
        page_destroy(ix, to[1]);
        index_halves_create(ix, prefix, old,
                            page_count_ones(old, rows, ix->key), to);
        const int whole = page_move(old, rows, ix->key, to);
        assert(whole); /* each has been made for what it gets */
        (void)whole;
    }
    n = page_entries(ix, old, hash, &first);
    index_directory_set(ix, first, n / 2, to[0]);
    index_directory_set(ix, first + n / 2, n / 2, to[1]);
    page_destroy(ix, old);
}

/* Makes room for an entry of this hash in its page. */
static page *page_widen(row_index *ix, row_store rows, uint64_t hash, page *p)
{
    if (p->rows >= p->split_at && p->depth < ix->depth)
        page_split(ix, rows, hash, p);
    else
        page_grow(ix, rows, hash, p);
    return row_index_page(ix, hash)->page;
}

void row_index_insert(row_index *ix, row_store rows, uint64_t hash,
                      uint32_t slot)
{
    page *p = row_index_page(ix, hash)->page;

    if (p->rows >= p->grow_at)
        p = page_widen(ix, rows, hash, p);
    page_insert(p, hash, slot);
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
