/* group.c: chunks are ordered by cell (parallel over chunks), then
 * each cell's distinct ids are found with a small hash table that stays in
 * the cache (parallel over cells), then they are put side by side.  For the
 * same ids all of that is known: each has the id of its place, or not. */
#include "client/group.h"

#include <stdatomic.h>
#include <string.h>

enum {
    CELLS = 16,            /* of a table, if there are fewer shards */
    TABLE_ON_STACK = 8192, /* entries: 32 KiB */
};

void group_free(group *g)
{
    mem_buffer_free(&g->memory);
    mem_buffer_free(&g->table_memory);
}

/* Memory for all but the hash tables, and the list of chunks. */
static int make_chunks(group *g, const group_batch *b)
{
    size_t cells = (size_t)g->units * g->cells, ids = 0, chunks = 0;
    for (size_t i = 0; i < b->segments_n; i++) {
        ids += b->segments[i].n;
        chunks += (b->segments[i].n + IDS_CHUNK - 1) / IDS_CHUNK;
    }
    if (ids >= GROUP_FIRST)
        return err_set(PERSIA_ELIMIT, "%zu ids in one batch, at most %u", ids,
                       GROUP_FIRST - 1);
    size_t starts = chunks * (g->cells + 1);
    int rc = mem_buffer_need(
        &g->memory,
        chunks * sizeof(group_chunk) + b->segments_n * sizeof *g->segments +
            (g->units + 1) * (sizeof(size_t) + sizeof(uint32_t)) +
            (cells + 1) * 3 * sizeof(size_t) +
            ids * (2 * sizeof(uint64_t) + sizeof(uint32_t) +
                   sizeof(uint16_t)) +
            starts * sizeof(uint16_t) + (size_t)64 * 12);
    if (rc)
        return rc;
    char *p = g->memory.data;
    g->ids_n = ids;
    g->chunks_n = chunks;
    g->segments_n = b->segments_n;
    g->segments = mem_carve(&p, b->segments_n * sizeof *g->segments);
    g->tables = mem_carve(&p, g->units * sizeof *g->tables);
    for (size_t i = 0; i < b->segments_n; i++)
        g->segments[i] = b->segments[i];
    for (uint32_t u = 0; u < g->units; u++)
        g->tables[u] = b->tables[u];
    g->chunks = mem_carve(&p, chunks * sizeof(group_chunk));
    g->first_chunk = mem_carve(&p, (g->units + 1) * sizeof(size_t));
    g->base = mem_carve(&p, (cells + 1) * sizeof(size_t));
    g->region = mem_carve(&p, (cells + 1) * sizeof(size_t));
    g->table_at = mem_carve(&p, (cells + 1) * sizeof(size_t));
    g->ids = mem_carve(&p, ids * sizeof(uint64_t));
    g->found = mem_carve(&p, ids * sizeof(uint64_t));
    uint32_t *place = mem_carve(&p, ids * sizeof(uint32_t));
    uint16_t *order = mem_carve(&p, ids * sizeof(uint16_t));
    uint16_t *start = mem_carve(&p, starts * sizeof(uint16_t));
    size_t at = 0, unit = 0;
    g->first_chunk[0] = 0;
    for (size_t i = 0; i < g->segments_n; i++) {
        const group_segment *s = &g->segments[i];
        while (unit < s->unit)
            g->first_chunk[++unit] = at;
        for (size_t first = 0; first < s->n; first += IDS_CHUNK) {
            size_t n = s->n - first < IDS_CHUNK ? s->n - first : IDS_CHUNK;
            g->chunks[at++] = (group_chunk){s->unit, i,     first, n,
                                            order,   start, place};
            order += n;
            place += n;
            start += g->cells + 1;
        }
    }
    while (unit < g->units)
        g->first_chunk[++unit] = at;
    return PERSIA_OK;
}

INLINE_HOT uint32_t cell_of(uint64_t hash, uint32_t shards, uint32_t subs)
{
    return hash_shard(hash, shards) * subs +
           ((uint32_t)(hash >> 16) & (subs - 1));
}

/* Orders a chunk by cell. */
HOT static void split(const uint64_t *ids, size_t n, uint32_t shards,
                      uint32_t subs, uint16_t *order, uint16_t *start)
{
    uint16_t cell[IDS_CHUNK];
    uint32_t cells = shards * subs, before = 0;

    memset(start, 0, (cells + 1) * sizeof *start);
    for (size_t i = 0; i < n; i++)
        cell[i] = (uint16_t)cell_of(id_hash(ids[i]), shards, subs);
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

static int split_chunk(void *ctx, size_t i)
{
    group *g = ctx;
    const group_chunk *c = &g->chunks[i];
    split(g->segments[c->segment].ids + c->first, c->n, g->shards, g->subs,
          c->order, c->start);
    return PERSIA_OK;
}

/* Entries of the hash table of a cell with n ids. */
static size_t table_room(size_t n)
{
    size_t room = 16;
    while (room < 2 * n)
        room *= 2;
    return room;
}

/* How many ids each cell has, so where its distinct ones are put meanwhile;
 * and hash tables for the large cells. */
static int make_regions(group *g)
{
    size_t ids = 0, entries = 0;
    for (uint32_t u = 0; u < g->units; u++) {
        size_t *region = g->region + (size_t)u * g->cells;
        size_t *table_at = g->table_at + (size_t)u * g->cells;
        memset(region, 0, g->cells * sizeof *region);
        for (size_t k = g->first_chunk[u]; k < g->first_chunk[u + 1]; k++) {
            const uint16_t *start = g->chunks[k].start;
            for (uint32_t c = 0; c < g->cells; c++)
                region[c] += (size_t)(start[c + 1] - start[c]);
        }
        for (uint32_t c = 0; c < g->cells; c++) {
            size_t n = region[c], room = table_room(n);
            region[c] = ids;
            table_at[c] = entries;
            ids += n;
            entries += room > TABLE_ON_STACK ? room : 0;
        }
    }
    g->region[(size_t)g->units * g->cells] = ids;
    int rc = mem_buffer_need(&g->table_memory, entries * sizeof(uint32_t));
    g->entries = g->table_memory.data;
    return rc;
}

/* Finds the distinct ids of one cell: `found`, by the hash table `entry` of
 * places + 1 (0: empty).  Returns their number. */
HOT static uint32_t find_distinct(const group *g, uint32_t unit,
                                  uint32_t cell, uint32_t *entry,
                                  size_t mask, uint64_t *found)
{
    uint32_t n = 0;

    for (size_t k = g->first_chunk[unit]; k < g->first_chunk[unit + 1]; k++) {
        const group_chunk *c = &g->chunks[k];
        const uint64_t *ids = g->segments[c->segment].ids + c->first;
        for (uint32_t i = c->start[cell]; i < c->start[cell + 1]; i++) {
            uint64_t id = ids[c->order[i]];
            size_t at = (size_t)(id_hash(id) >> 32) & mask;
            while (entry[at] && found[entry[at] - 1] != id)
                at = (at + 1) & mask;
            if (entry[at]) {
                c->place[i] = entry[at] - 1;
                continue;
            }
            c->place[i] = n | GROUP_FIRST;
            found[n] = id;
            entry[at] = ++n;
        }
    }
    return n;
}

static int distinct_cell(void *ctx, size_t index)
{
    group *g = ctx;
    uint32_t unit = (uint32_t)(index / g->cells);
    uint32_t cell = (uint32_t)(index % g->cells);
    size_t n = g->region[index + 1] - g->region[index];
    size_t room = table_room(n);
    uint32_t small[TABLE_ON_STACK];
    uint32_t *entry = small;

    g->base[index] = 0;
    if (n == 0)
        return PERSIA_OK;
    if (room > TABLE_ON_STACK)
        entry = g->entries + g->table_at[index];
    memset(entry, 0, room * sizeof *entry);
    g->base[index] = find_distinct(g, unit, cell, entry, room - 1,
                                   g->found + g->region[index]);
    return PERSIA_OK;
}

static int gather_cell(void *ctx, size_t i)
{
    group *g = ctx;
    memcpy(g->ids + g->base[i], g->found + g->region[i],
           (g->base[i + 1] - g->base[i]) * sizeof *g->ids);
    return PERSIA_OK;
}

int group_make(group *g, sched *s, uint32_t shards, const group_batch *b)
{
    g->s = s;
    g->shards = shards;
    g->subs = 1;
    while (2 * g->subs * shards <= CELLS)
        g->subs *= 2;
    g->cells = shards * g->subs;
    g->units = b->units;
    int rc = make_chunks(g, b);
    if (!rc)
        rc = sched_for(s, g->chunks_n, split_chunk, g);
    if (!rc)
        rc = make_regions(g);
    size_t cells = (size_t)g->units * g->cells, before = 0;
    if (!rc)
        rc = sched_for(s, cells, distinct_cell, g);
    if (rc)
        return rc;
    for (size_t i = 0; i < cells; i++) {
        size_t n = g->base[i];
        g->base[i] = before;
        before += n;
    }
    g->base[cells] = before;
    return sched_for(s, cells, gather_cell, g);
}

/* ---- the same batch again ---- */

typedef struct fitting {
    const group *g;
    const group_segment *segments;
    atomic_int differs;
} fitting;

/* Whether the ids of one cell of a chunk are those of their places. */
HOT static uint64_t compare_run(const uint64_t *ids, const uint16_t *order,
                                const uint32_t *place, size_t n,
                                const uint64_t *distinct)
{
    uint64_t differs = 0;
    for (size_t i = 0; i < n; i++)
        differs |= ids[order[i]] ^ distinct[place[i] & ~GROUP_FIRST];
    return differs;
}

static int compare_chunk(void *ctx, size_t i)
{
    fitting *f = ctx;
    const group *g = f->g;
    const group_chunk *c = &g->chunks[i];
    const uint64_t *ids = f->segments[c->segment].ids + c->first;
    const size_t *base = g->base + (size_t)c->unit * g->cells;
    uint64_t differs = 0;
    for (uint32_t cell = 0; cell < g->cells; cell++) {
        uint32_t from = c->start[cell], to = c->start[cell + 1];
        differs |= compare_run(ids, c->order + from, c->place + from,
                               to - from, g->ids + base[cell]);
    }
    if (differs)
        atomic_store(&f->differs, 1);
    return PERSIA_OK;
}

int group_fits(group *g, const group_batch *b)
{
    if (g->units != b->units || g->segments_n != b->segments_n ||
        memcmp(g->tables, b->tables, b->units * sizeof *b->tables) != 0)
        return 0;
    for (size_t i = 0; i < b->segments_n; i++)
        if (g->segments[i].unit != b->segments[i].unit ||
            g->segments[i].n != b->segments[i].n)
            return 0;
    fitting f = {.g = g, .segments = b->segments};
    if (g->chunks_n)
        (void)compare_chunk(&f, 0); /* mostly the first tells */
    if (atomic_load(&f.differs) ||
        sched_for(g->s, g->chunks_n, compare_chunk, &f) ||
        atomic_load(&f.differs))
        return 0;
    for (size_t i = 0; i < b->segments_n; i++)
        g->segments[i].ids = b->segments[i].ids;
    return 1;
}
