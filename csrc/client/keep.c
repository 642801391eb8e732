/* keep.c: how the ids of lookups were grouped, for their updates.
 *
 * An update mostly brings the ids of an earlier lookup.  To see that they are
 * the same takes a fraction of the time that it takes to group them, so
 * lookups that asked for row numbers leave their groups here.  The oldest
 * ones go. */
#include "client/remote.h"

static const size_t KEPT_BYTES = (size_t)64 << 20;

static size_t bytes_of(const group *g)
{
    return g->memory.size + g->table_memory.size;
}

/* Equal for equal batches, and hardly for others. */
static uint64_t print_of(const group_batch *b)
{
    uint64_t h = b->units;
    for (size_t i = 0; i < b->segments_n; i++) {
        const group_segment *s = &b->segments[i];
        h = id_hash(h ^ s->n) + b->tables[s->unit];
        if (s->n) {
            h = id_hash(h ^ s->ids[0]);
            h = id_hash(h ^ s->ids[s->n / 2]);
            h = id_hash(h ^ s->ids[s->n - 1]);
        }
    }
    return h;
}

static void exchange(group *a, group *b)
{
    group was = *a;
    *a = *b;
    *b = was;
}

/* The one that waits longest; those without a batch have turn 0. */
static kept *oldest(remote *r)
{
    kept *best = &r->kept[0];
    for (size_t i = 1; i < KEPT_MAX; i++)
        if (r->kept[i].turn < best->turn)
            best = &r->kept[i];
    return best;
}

static void free_one(remote *r, kept *one)
{
    r->kept_bytes -= bytes_of(&one->group);
    group_free(&one->group);
    *one = (kept){.turn = 0};
}

/* Makes room, at first of memory without a batch. */
static void keep_few(remote *r)
{
    while (r->kept_bytes > KEPT_BYTES) {
        kept *victim = NULL;
        for (size_t i = 0; i < KEPT_MAX; i++)
            if (bytes_of(&r->kept[i].group) &&
                (!victim || r->kept[i].turn < victim->turn))
                victim = &r->kept[i];
        free_one(r, victim);
    }
}

void keep_group(remote *r, group *g, const group_batch *b)
{
    uint64_t print = print_of(b);
    pthread_mutex_lock(&r->lock);
    kept *one = oldest(r);
    r->kept_bytes += bytes_of(g) - bytes_of(&one->group);
    exchange(g, &one->group);
    one->print = print;
    one->turn = ++r->kept_turn;
    keep_few(r);
    pthread_mutex_unlock(&r->lock);
}

int keep_find(remote *r, group *g, const group_batch *b)
{
    uint64_t print = print_of(b);
    int found = 0;
    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < KEPT_MAX && !found; i++) {
        kept *one = &r->kept[i];
        if (!one->turn || one->print != print)
            continue;
        /* Its place keeps the memory of g for the next lookup. */
        r->kept_bytes += bytes_of(g) - bytes_of(&one->group);
        exchange(g, &one->group);
        one->turn = 0;
        keep_few(r);
        found = 1;
    }
    pthread_mutex_unlock(&r->lock);
    return found && group_fits(g, b);
}

void keep_free(remote *r)
{
    for (size_t i = 0; i < KEPT_MAX; i++)
        free_one(r, &r->kept[i]);
}
