/* counts.c: rows that count updates; see roles.h. */
#include "ids/ids.h"
#include "tests/sim/roles.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void counts_config(table_config *out)
{
    persia_table_config_init(out);
    snprintf(out->name, sizeof out->name, "counts");
    out->dim = DIM;
    out->optimizer = OPTIM_SGD;
    out->init = INIT_CONSTANT;
    out->init_a = 0;
}

/* Ids are at servers by ranges of their hashes. */
uint32_t place_of(const attempt *a, uint64_t id)
{
    const uint64_t hash = id_hash(id);
    return w.four ? hash_shard(hash, 2) + hash_shard(hash, 3)
                  : hash_shard(hash, a->servers_n);
}

uint64_t own_row(int rank, int update, uint32_t server)
{
    const attempt *a = &w.ranks[rank].attempts[update];
    uint64_t id = (uint64_t)(rank + 1) << 40 | (uint64_t)update << 16;
    while (place_of(a, id) != server)
        id++;
    return id;
}

/* Own rows, then shared ones; how many. */
static size_t list_ids(const int *updates, uint64_t *ids)
{
    size_t n = 0;
    for (uint32_t i = 0; i < w.ranks_n; i++)
        for (int k = 0; k < updates[i]; k++)
            for (uint32_t s = 0; s < w.ranks[i].attempts[k].servers_n; s++)
                ids[n++] = own_row((int)i, k, s);
    for (uint32_t i = 0; i < SHARED; i++)
        ids[n++] = i + 1;
    return n;
}

/* Returns where the shared rows begin, which must be as expected then. */
static const float *check_own(const char *where, const int *updates,
                              const float *got, update_bits has,
                              double *expected)
{
    for (uint32_t i = 0; i < w.ranks_n; i++) {
        for (int k = 0; k < updates[i]; k++) {
            const attempt *a = &w.ranks[i].attempts[k];
            for (uint32_t s = 0; s < a->servers_n; s++, got++) {
                if (*got != 0 && *got != 1)
                    sim_fail("%s: server %u has applied batch %d of rank %u "
                             "%.0f times", where, s, k, i, (double)*got);
                has[i][k] |= (uint8_t)((*got == 1) << s);
            }
            for (uint64_t id = 1; id <= SHARED; id++)
                if (a->shared >> (id - 1) & 1)
                    expected[id] += has[i][k] >> place_of(a, id) & 1;
        }
    }
    return got;
}

int counts_read(const char *where, int whole, rows_reader read, void *ctx,
                update_bits has)
{
    double expected[SHARED + 1] = {0};
    const size_t room = RANKS_MAX * UPDATES_MAX * SERVERS_MAX + SHARED;
    uint64_t *ids = calloc(room, sizeof *ids);
    float *got = calloc(room, sizeof *got);
    assert(ids && got);
    memset(has, 0, sizeof(update_bits));
    int updates[RANKS_MAX]; /* others make more meanwhile */
    for (int i = 0; i < RANKS_MAX; i++)
        updates[i] = w.ranks[i].attempts_n;
    int rc = read(ctx, list_ids(updates, ids), ids, got);
    const float *shared = rc ? got : check_own(where, updates, got, has,
                                               expected);
    for (uint32_t i = 0; i < SHARED && whole && !rc; i++)
        if ((double)shared[i] != expected[i + 1])
            sim_fail("%s: row %u is %.0f, and the updates that its server has "
                     "add up to %.0f", where, i + 1, (double)shared[i],
                     expected[i + 1]);
    free(ids);
    free(got);
    return rc;
}
