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
    if (to == SHARD_CLOSING && jobs_saves(s)) { /* none begins any more */
        (void)persia_tables_between(s->p, set_hold, &(holding){s, SHARD_FREE});
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "a checkpoint of the shard is being written");
    }
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

/* The world, the step that was missed, how many ranks have left, and how many
 * were passed.  These ranks follow, those that were passed each with the step;
 * then groups. */
enum { WORLD, MISSED, LEFT, PASSED, HEAD };

int persia_shard_steps(shard *s, uint64_t **out, size_t *n)
{
    *out = calloc(HEAD + 3 * SYNC_RANKS + GROUPS_ENDED, sizeof **out);
    if (!*out)
        return persia_err_set(PERSIA_ENOMEM, "no memory for the steps");
    pthread_mutex_lock(&s->wait_lock);
    uint64_t *at = *out;
    at[WORLD] = s->world;
    at[MISSED] = s->sync.missed;
    at[LEFT] = sync_list_left(&s->sync, SYNC_RANKS, at + HEAD, SYNC_RANKS);
    *n = HEAD + at[LEFT];
    for (uint32_t i = 0; i < SYNC_RANKS; i++) {
        if (s->sync.passed[i] <= s->sync.step)
            continue;
        at[(*n)++] = i;
        at[(*n)++] = s->sync.passed[i];
        at[PASSED]++;
    }
    for (uint32_t i = 0; i < GROUPS_ENDED; i++)
        if (s->ended_groups[i])
            at[(*n)++] = s->ended_groups[i];
    pthread_mutex_unlock(&s->wait_lock);
    return PERSIA_OK;
}

static int moving_steps_are_sound(const uint64_t *from, size_t n)
{
    if (n < HEAD || from[WORLD] > SYNC_RANKS || from[LEFT] > SYNC_RANKS ||
        from[PASSED] > SYNC_RANKS)
        return 0;
    const size_t ranks = (size_t)(from[LEFT] + 2 * from[PASSED]);
    if (n - HEAD < ranks || n - HEAD - ranks > GROUPS_ENDED)
        return 0;
    for (size_t i = 0; i < ranks; i += i < from[LEFT] ? 1 : 2)
        if (from[HEAD + i] >= SYNC_RANKS)
            return 0;
    return 1;
}

int persia_shard_set_steps(shard *s, const uint64_t *from, size_t n)
{
    if (!moving_steps_are_sound(from, n))
        return persia_err_set(PERSIA_EARG,
                              "these are no steps of a shard that moves");
    const uint64_t *at = from + HEAD;
    pthread_mutex_lock(&s->wait_lock);
    s->world = (uint32_t)from[WORLD];
    s->sync.missed = from[MISSED];
    for (uint64_t i = 0; i < from[LEFT]; i++)
        sync_hear(&s->sync, (uint32_t)*at++);
    for (uint64_t i = 0; i < from[PASSED]; i++, at += 2)
        s->sync.passed[at[0]] = at[1];
    s->ended_groups_n = 0;
    while (at < from + n)
        s->ended_groups[s->ended_groups_n++ % GROUPS_ENDED] = *at++;
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
