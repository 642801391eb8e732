/* index.h: from a hash to the slot of a row, for one stripe (private).
 *
 * Hashes are places by a key (ids.h), so a client cannot choose ids that share
 * a page or a bucket.  A directory (by the top bits of the hash) of pages; a
 * page is an array of buckets of one cache line:
 *
 *   byte  0..11  tag of each entry, 0: empty
 *        12      entries that wanted this bucket and are in a later one
 *                (saturates at 255 and then stays)
 *        16..63  slot of each entry, u32
 *
 * The index holds no keys: they are in the rows.  A bucket is chosen by
 * multiplication, so bucket counts need not be powers of two; load stays
 * within 0.55 .. 0.70.  The index grows a page at a time (by 27 %, or by a
 * split of a page that has become large), which takes well under a
 * millisecond; pages grow at different moments, so that the mean load hardly
 * changes with size.  Pages are blocks of mem.h, shared by the stripes of a
 * table.  An insertion has reserved row_index_bytes() there, so that a page
 * always can grow.
 *
 * Guarded by the stripe's lock: reads shared, changes exclusive.
 */
#ifndef PERSIA_TABLE_INDEX_H
#define PERSIA_TABLE_INDEX_H

#include "ids/ids.h"
#include "mem/mem.h"

/* SLOT_NONE: surely absent; SLOT_SEARCH: it takes row_index_find(). */
enum { SLOT_NONE = -1, SLOT_SEARCH = -2 };

/* One cache line before the buckets. */
typedef struct page {
    uint32_t rows;      /* entries in use */
    uint32_t buckets;
    uint32_t depth;     /* top bits that all its hashes share */
    uint32_t grow_at;   /* rows at which it grows */
    uint32_t split_at;  /* rows at which it splits instead */
    uint32_t unused[11];
    bucket bucket[];
} page;

/* What a lookup needs of a page without touching it. */
typedef struct page_ref {
    page *page;
    uint32_t buckets;
    uint32_t depth;
} page_ref;

typedef struct row_index {
    page_ref *directory; /* [1 << depth] */
    uint32_t depth;
    uint64_t key; /* of the hashes */
    mem_blocks *blocks;
} row_index;

/* Where the rows are: rows_at(slot) starts with the id. */
typedef struct row_store {
    const char *base;
    size_t stride;
} row_store;

int row_index_init(row_index *ix, mem_blocks *blocks, uint64_t key);
void row_index_free(row_index *ix);
/* Takes out all entries and gives the memory back; cannot fail.  No other
 * thread may change an index of these blocks meanwhile. */
void row_index_clear(row_index *ix);
/* Makes the directory deep enough for this many rows.  Without memory (0)
 * pages grow where they would split. */
int row_index_deepen(row_index *ix, uint64_t rows);
/* Bytes that the pages take at most more, with one page that is there twice
 * for a moment, when rows of these places are added, which have none: [n] in
 * ascending order, each once. */
uint64_t row_index_growth(const row_index *ix, const uint64_t *places,
                          size_t n);
/* What to reserve (persia_mem_blocks_reserve) for n more entries.  A page that
 * is there may widen at the first of them: it is replaced by 1.28 times its
 * buckets, of one page or of two, for which it may take two attempts; for
 * these the blocks reserve three times what is there.  Then it has load 0.67
 * at most, so that it takes 0.36 entries a bucket before it widens again, into
 * at most 2.56 times 64 bytes for each: 456 bytes an entry.  Small pages only
 * grow, after 8 entries or more, by 512 bytes or less with all headers. */
static inline uint64_t row_index_bytes(uint64_t n)
{
    return 512 * n;
}
/* The id must not be in it; the row's id must be in place.  `rows`: of all
 * entries, to be hashed where a page widens. */
void row_index_insert(row_index *ix, row_store rows, uint64_t hash,
                      uint32_t slot);
void row_index_remove(row_index *ix, uint64_t hash, uint32_t slot);

static inline uint64_t row_id(const char *row)
{
    uint64_t id;
    __builtin_memcpy(&id, row, sizeof id);
    return id;
}

static inline const page_ref *row_index_page(const row_index *ix,
                                             uint64_t hash)
{
    /* two shifts: depth may be 0 */
    return &ix->directory[(hash >> 1) >> (63 - ix->depth)];
}

static inline uint32_t page_home(uint64_t hash, uint32_t depth,
                                 uint32_t buckets)
{
    return (uint32_t)((((hash << depth) >> 32) * buckets) >> 32);
}

static inline const bucket *row_index_home(const row_index *ix, uint64_t hash)
{
    const page_ref *ref = row_index_page(ix, hash);
    return &ref->page->bucket[page_home(hash, ref->depth, ref->buckets)];
}

/* A guess from the home bucket alone: the slot that the id has if it is
 * there (its row must be checked), SLOT_NONE or SLOT_SEARCH. */
static inline int64_t bucket_likely(const bucket *b, uint64_t hash)
{
    uint32_t mask = bucket_match(b, hash_tag(hash));

    if (mask)
        return b->slot[__builtin_ctz(mask)];
    return b->passed ? SLOT_SEARCH : SLOT_NONE;
}

/* The slot of `id`, or SLOT_NONE. */
static inline int64_t row_index_find(const row_index *ix, row_store rows,
                                     uint64_t hash, uint64_t id)
{
    const page_ref *ref = row_index_page(ix, hash);
    const uint8_t tag = hash_tag(hash);
    uint32_t at = page_home(hash, ref->depth, ref->buckets);

    for (uint32_t tried = 0; tried < ref->buckets; tried++) {
        const bucket *b = &ref->page->bucket[at];
        uint32_t mask = bucket_match(b, tag);
        for (; mask; mask &= mask - 1) {
            uint32_t slot = b->slot[__builtin_ctz(mask)];
            if (row_id(rows.base + slot * rows.stride) == id)
                return slot;
        }
        if (!b->passed)
            return SLOT_NONE;
        if (++at == ref->buckets)
            at = 0;
    }
    return SLOT_NONE;
}

#endif
