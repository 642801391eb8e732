/* moving.c: a shard that is about to be another server's.
 *
 * Its rows go as a snapshot that the other server restores.  From the cut on
 * nothing may change here: updates, and all else that changes what travels,
 * are refused with PERSIA_EUNAVAILABLE, so that clients send them again.
 * Lookups are answered until the shard is taken out of its host.
 */
#include "shard/private.h"

#include <stdlib.h>
#include <string.h>

int check_stays(const shard *s)
{
    return atomic_load(&s->hold) == SHARD_FREE ? PERSIA_OK : refuse_moving();
}

int refuse_moving(void)
{
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "the shard is moving to another server");
}

typedef struct holding {
    shard *s;
    enum shard_hold to;
} holding;

/* Between two updates. */
static int set_hold(void *ctx)
{
    const holding *h = ctx;
    pthread_mutex_lock(&h->s->wait_lock);
    atomic_store(&h->s->hold, h->to);
    pthread_mutex_unlock(&h->s->wait_lock);
    return PERSIA_OK;
}

int persia_shard_hold(shard *s, enum shard_hold to)
{
    if (to != SHARD_FREE && jobs_restores(s))
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "other rows are being restored in the shard");
    (void)persia_tables_between(s->p, set_hold, &(holding){s, to});
    if (to == SHARD_HELD)
        wait_drop(s, PERSIA_EUNAVAILABLE,
                  "the shard is moving to another server");
    return PERSIA_OK;
}

uint32_t persia_shard_begun(shard *s)
{
    pthread_mutex_lock(&s->wait_lock);
    const uint32_t n = s->groups_n;
    pthread_mutex_unlock(&s->wait_lock);
    return n;
}

int persia_shard_reborn(shard *s)
{
    return persia_random_id(&s->boot);
}

uint64_t persia_shard_boot(const shard *s)
{
    return s->boot;
}

/* ---- steps -------------------------------------------------------------- */

enum { HEAD = 3 }; /* world, the step that was missed, how many have left */

int persia_shard_steps(shard *s, uint64_t **out, size_t *n)
{
    *out = calloc(HEAD + SYNC_RANKS + GROUPS_ENDED, sizeof **out);
    if (!*out)
        return persia_err_set(PERSIA_ENOMEM, "no memory for the steps");
    pthread_mutex_lock(&s->wait_lock);
    uint64_t *at = *out;
    at[0] = s->world;
    at[1] = s->sync.missed;
    at[2] = sync_list_left(&s->sync, SYNC_RANKS, at + HEAD, SYNC_RANKS);
    *n = HEAD + at[2];
    for (uint32_t i = 0; i < GROUPS_ENDED; i++)
        if (s->ended_groups[i])
            at[(*n)++] = s->ended_groups[i];
    pthread_mutex_unlock(&s->wait_lock);
    return PERSIA_OK;
}

int persia_shard_set_steps(shard *s, const uint64_t *from, size_t n)
{
    if (n < HEAD || from[2] > SYNC_RANKS || n - HEAD < from[2] ||
        n - HEAD - from[2] > GROUPS_ENDED || from[0] > SYNC_RANKS)
        return persia_err_set(PERSIA_EARG,
                              "these are no steps of a shard that moves");
    pthread_mutex_lock(&s->wait_lock);
    s->world = (uint32_t)from[0];
    s->sync.missed = from[1];
    for (size_t i = 0; i < from[2]; i++)
        if (from[HEAD + i] < SYNC_RANKS)
            sync_hear(&s->sync, (uint32_t)from[HEAD + i]);
    s->ended_groups_n = 0;
    for (size_t i = HEAD + (size_t)from[2]; i < n; i++)
        s->ended_groups[s->ended_groups_n++ % GROUPS_ENDED] = from[i];
    pthread_mutex_unlock(&s->wait_lock);
    return PERSIA_OK;
}

/* ---- the call ----------------------------------------------------------- */

int move_answer(shard *s, const wire_move *m, wire_memory *memory,
                wire_move_reply *out)
{
    (void)s;
    (void)m;
    (void)memory;
    (void)out;
    return persia_err_set(PERSIA_EARG, "this shard cannot move: it is of a "
                          "process that is no parameter server");
}
