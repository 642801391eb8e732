/* batch_index.c: chunks are ordered by cell (parallel over chunks), then
 * each cell's distinct ids are found with a small hash table that stays in
 * the cache (parallel over cells), then they are put side by side. */
#include "ids/ids.h"

#include "simd/simd.h"

#include <string.h>

enum {
    CELLS = 16,            /* of a table, if there are fewer shards */
    TABLE_ON_STACK = 8192, /* entries: 32 KiB */
};

/* Memory for all but the hash tables, and the list of chunks. */
static int batch_index_make_chunks(batch_index *x, const index_batch *b)
{
    size_t cells = (size_t)x->units * x->cells, ids = 0, chunks = 0;
    for (size_t i = 0; i < b->segments_n; i++) {
        ids += b->segments[i].n;
        chunks += (b->segments[i].n + IDS_CHUNK - 1) / IDS_CHUNK;
    }
    if (ids >= INDEX_FIRST)
        return persia_err_set(PERSIA_ELIMIT,
                              "%zu ids in one batch, at most %u", ids,
                              INDEX_FIRST - 1);
    size_t starts = chunks * (x->cells + 1);
    int rc = persia_mem_buffer_need(
        &x->memory,
        chunks * sizeof(index_chunk) + b->segments_n * sizeof *x->segments +
            (x->units + 1) * (sizeof(size_t) + sizeof(uint32_t)) +
            (cells + 1) * 3 * sizeof(size_t) +
            ids *
                (2 * sizeof(uint64_t) + sizeof(uint32_t) + sizeof(uint16_t)) +
            starts * sizeof(uint16_t) + (size_t)64 * 12);
    if (rc)
        return rc;
    char *p = x->memory.data;
    x->ids_n = ids;
    x->chunks_n = chunks;
    x->segments_n = b->segments_n;
    x->segments = mem_carve(&p, b->segments_n * sizeof *x->segments);
    x->tables = mem_carve(&p, x->units * sizeof *x->tables);
    for (size_t i = 0; i < b->segments_n; i++)
        x->segments[i] = b->segments[i];
    for (uint32_t u = 0; u < x->units; u++)
        x->tables[u] = b->tables[u];
    x->chunks = mem_carve(&p, chunks * sizeof(index_chunk));
    x->first_chunk = mem_carve(&p, (x->units + 1) * sizeof(size_t));
    x->base = mem_carve(&p, (cells + 1) * sizeof(size_t));
    x->region = mem_carve(&p, (cells + 1) * sizeof(size_t));
    x->table_at = mem_carve(&p, (cells + 1) * sizeof(size_t));
    x->ids = mem_carve(&p, ids * sizeof(uint64_t));
    x->found = mem_carve(&p, ids * sizeof(uint64_t));
    uint32_t *place = mem_carve(&p, ids * sizeof(uint32_t));
    uint16_t *order = mem_carve(&p, ids * sizeof(uint16_t));
    uint16_t *start = mem_carve(&p, starts * sizeof(uint16_t));
    size_t at = 0, unit = 0;
    x->first_chunk[0] = 0;
    for (size_t i = 0; i < x->segments_n; i++) {
        const index_segment *s = &x->segments[i];
        while (unit < s->unit)
            x->first_chunk[++unit] = at;
        for (size_t first = 0; first < s->n; first += IDS_CHUNK) {
            size_t n = s->n - first < IDS_CHUNK ? s->n - first : IDS_CHUNK;
            x->chunks[at++] = (index_chunk){s->unit, i,     first, n,
                                            order,   start, place};
            order += n;
            place += n;
            start += x->cells + 1;
        }
    }
    while (unit < x->units)
        x->first_chunk[++unit] = at;
    return PERSIA_OK;
}

INLINE_HOT uint32_t batch_index_cell_of(uint64_t hash, uint32_t shards,
                                        uint32_t subs)
{
    return hash_shard(hash, shards) * subs +
           ((uint32_t)(hash >> 16) & (subs - 1));
}

/* Orders a chunk by cell. */
HOT static void batch_index_split(const uint64_t *ids, size_t n,
                                  uint32_t shards, uint32_t subs,
                                  uint16_t *order, uint16_t *start)
{
    uint16_t cell[IDS_CHUNK];
    uint32_t cells = shards * subs, before = 0;

    memset(start, 0, (cells + 1) * sizeof *start);
    for (size_t i = 0; i < n; i++)
        cell[i] = (uint16_t)batch_index_cell_of(id_hash(ids[i]), shards, subs);
    for (size_t i = 0; i < n; i++)
        start[cell[i]]++;
    for (uint32_t c = 0; c < cells; c++) {
        uint32_t here = start[c];
        start[c] = (uint16_t)before;
        before += here;
    }
    for (size_t i = 0; i < n; i++)
        order[start[cell[i]]++] = (uint16_t)i;
    memmove(start + 1, start, cells * sizeof *start);
    start[0] = 0;
}

static int batch_index_split_chunk(void *ctx, size_t i)
{
    batch_index *x = ctx;
    const index_chunk *c = &x->chunks[i];
    batch_index_split(x->segments[c->segment].ids + c->first, c->n, x->shards,
                      x->subs, c->order, c->start);
    return PERSIA_OK;
}

/* Entries of the hash table of a cell with n ids. */
static size_t batch_index_table_room(size_t n)
{
    size_t room = 16;
    while (room < 2 * n)
        room *= 2;
    return room;
}

/* How many ids each cell has, so where its distinct ones are put meanwhile;
 * and hash tables for the large cells. */
static int batch_index_make_regions(batch_index *x)
{
    size_t ids = 0, entries = 0;
    for (uint32_t u = 0; u < x->units; u++) {
        size_t *region = x->region + (size_t)u * x->cells;
        size_t *table_at = x->table_at + (size_t)u * x->cells;
        memset(region, 0, x->cells * sizeof *region);
        for (size_t k = x->first_chunk[u]; k < x->first_chunk[u + 1]; k++) {
            const uint16_t *start = x->chunks[k].start;
            for (uint32_t c = 0; c < x->cells; c++)
                region[c] += (size_t)(start[c + 1] - start[c]);
        }
        for (uint32_t c = 0; c < x->cells; c++) {
            size_t n = region[c], room = batch_index_table_room(n);
            region[c] = ids;
            table_at[c] = entries;
            ids += n;
            entries += room > TABLE_ON_STACK ? room : 0;
        }
    }
    x->region[(size_t)x->units * x->cells] = ids;
    int rc = persia_mem_buffer_need(&x->table_memory,
                                    entries * sizeof(uint32_t));
    x->entries = x->table_memory.data;
    return rc;
}

/* Finds the distinct ids of one cell: `found`, by the hash table `entry` of
 * places + 1 (0: empty).  Returns their number. */
HOT static uint32_t batch_index_find_distinct(const batch_index *x,
                                              uint32_t unit, uint32_t cell,
                                              uint32_t *entry, size_t mask,
                                              uint64_t *found)
{
    uint32_t n = 0;

    for (size_t k = x->first_chunk[unit]; k < x->first_chunk[unit + 1]; k++) {
        const index_chunk *c = &x->chunks[k];
        const uint64_t *ids = x->segments[c->segment].ids + c->first;
        for (uint32_t i = c->start[cell]; i < c->start[cell + 1]; i++) {
            uint64_t id = ids[c->order[i]];
            size_t at = place_home(id_place(id, x->key), mask + 1);
            while (entry[at] && found[entry[at] - 1] != id)
                at = (at + 1) & mask;
            if (entry[at]) {
                c->place[i] = entry[at] - 1;
                continue;
            }
            c->place[i] = n | INDEX_FIRST;
            found[n] = id;
            entry[at] = ++n;
        }
    }
    return n;
}

static int batch_index_distinct_cell(void *ctx, size_t index)
{
    batch_index *x = ctx;
    uint32_t unit = (uint32_t)(index / x->cells);
    uint32_t cell = (uint32_t)(index % x->cells);
    size_t n = x->region[index + 1] - x->region[index];
    size_t room = batch_index_table_room(n);
    uint32_t small[TABLE_ON_STACK];
    uint32_t *entry = small;

    x->base[index] = 0;
    if (n == 0)
        return PERSIA_OK;
    if (room > TABLE_ON_STACK)
        entry = x->entries + x->table_at[index];
    memset(entry, 0, room * sizeof *entry);
    x->base[index] = batch_index_find_distinct(x, unit, cell, entry, room - 1,
                                               x->found + x->region[index]);
    return PERSIA_OK;
}

static int batch_index_gather_cell(void *ctx, size_t i)
{
    batch_index *x = ctx;
    memcpy(x->ids + x->base[i], x->found + x->region[i],
           (x->base[i + 1] - x->base[i]) * sizeof *x->ids);
    return PERSIA_OK;
}

int persia_batch_index_make(batch_index *x, sched *s, uint32_t shards,
                            const index_batch *b)
{
    x->s = s;
    x->hints = NULL;
    x->shards = shards;
    x->subs = 1;
    while (2 * x->subs * shards <= CELLS)
        x->subs *= 2;
    x->cells = shards * x->subs;
    x->units = b->units;
    int rc = batch_index_make_chunks(x, b);
    if (!rc)
        rc = persia_sched_for_rows(s, x->chunks_n, x->ids_n,
                                   batch_index_split_chunk, x);
    if (!rc)
        rc = batch_index_make_regions(x);
    size_t cells = (size_t)x->units * x->cells, before = 0;
    if (!rc)
        rc = persia_sched_for_rows(s, cells, x->ids_n,
                                   batch_index_distinct_cell, x);
    if (rc)
        return rc;
    for (size_t i = 0; i < cells; i++) {
        size_t n = x->base[i];
        x->base[i] = before;
        before += n;
    }
    x->base[cells] = before;
    for (size_t i = 0; i < x->segments_n; i++)
        x->segments[i].ids = NULL; /* the index may outlive them */
    return persia_sched_for_rows(s, cells, x->ids_n, batch_index_gather_cell,
                                 x);
}

int persia_batch_index_hint(batch_index *x)
{
    size_t bytes = index_distinct(x) * sizeof *x->hints;
    int rc = persia_mem_buffer_need(&x->hint_memory, bytes);
    if (rc)
        return rc;
    x->hints = x->hint_memory.data;
    memset(x->hints, 0xFF, bytes);
    return PERSIA_OK;
}
