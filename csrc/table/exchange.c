/* exchange.c: all rows of a table replaced in one step. */
#include "table/stripe.h"

/* Everything of a stripe that belongs to its rows. */
static void stripe_exchange_locked(stripe *a, stripe *b)
{
#define EXCHANGE(field)                                                       \
    do {                                                                      \
        __typeof__(a->field) was = a->field;                                  \
        a->field = b->field;                                                  \
        b->field = was;                                                       \
    } while (0)
    EXCHANGE(index);
    EXCHANGE(arena);
    EXCHANGE(used);
    EXCHANGE(free_head);
    EXCHANGE(rows);
    EXCHANGE(victims);
    EXCHANGE(victim_clocks);
    EXCHANGE(victims_n);
    EXCHANGE(victims_at);
    EXCHANGE(victims_room);
#undef EXCHANGE
}

int table_exchange(table *t, table *other)
{
    int rc = fork_check("table_exchange");
    uint64_t rows;

    if (rc)
        return rc;
    if (t->stripes != other->stripes || t->stride != other->stride ||
        t->state_offset != other->state_offset ||
        t->config.limit != other->config.limit)
        return err_set(PERSIA_EARG, "table %s: its rows differ in shape from "
                       "those of the other table", t->config.name);
    pthread_rwlock_wrlock(&t->gate);
    if (t->cut || other->cut)
        rc = err_set(PERSIA_EARG, "table %s: a snapshot is under way; wait "
                     "for its end", t->config.name);
    for (uint32_t i = 0; i < t->stripes && !rc; i++) {
        pthread_rwlock_wrlock(&t->stripe[i].lock);
        stripe_exchange_locked(&t->stripe[i], &other->stripe[i]);
        pthread_rwlock_unlock(&t->stripe[i].lock);
    }
    if (!rc) {
        rows = atomic_exchange(&t->rows, atomic_load(&other->rows));
        atomic_store(&other->rows, rows);
    }
    pthread_rwlock_unlock(&t->gate);
    return rc;
}
