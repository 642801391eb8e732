#include "table/stripe.h"

#include <math.h>
#include <time.h>

/* The rows of a window that may go. */
typedef struct sweep {
    evict_rows rows;
    victim at[EVICT_WINDOW];
} sweep;

/* Slots between two of a window: rows that were made together lie side by
 * side, and a window shall have some of all ages. */
static uint32_t sweep_step(const stripe *s)
{
    return (s->used + EVICT_WINDOW - 1) / EVICT_WINDOW;
}

static float row_norm(const table *t, const char *row)
{
    float vector[4096], sum = 0;

    row_load_vector(t, row, vector);
    for (uint32_t j = 0; j < t->config.dim; j++)
        sum += vector[j] * vector[j];
    return sqrtf(sum);
}

/* The hand moves on by one slot, in each part of the stripe. */
static void sweep_read(table *t, stripe *s, uint32_t clock, uint32_t spare,
                       sweep *w)
{
    const uint32_t step = sweep_step(s);
    uint32_t n = 0, seen = 0;

    for (uint64_t slot = s->hand.at; slot < s->used; slot += step, seen++) {
        const uint32_t at = (uint32_t)slot;
        const char *row = stripe_row(t, s, at);
        const uint32_t touched = row_clock(row);
        if (!touched || touched == spare)
            continue;
        w->rows.age[n] = row_age(clock, touched);
        if (t->field)
            w->rows.field[n] = row_field(t, row);
        if (t->evict.reads_norm)
            w->rows.norm[n] = row_norm(t, row);
        w->at[n++] = (victim){ touched, at };
    }
    w->rows.n = n;
    s->hand.at = s->hand.at + 1 < step ? s->hand.at + 1 : 0;
    atomic_fetch_add_explicit(&t->candidates, seen, memory_order_relaxed);
}

/* Lists the rows of the highest scores, the highest first; of equal ones those
 * that the hand met first. */
static void sweep_list(const sweep *w, const float *score, hand *h)
{
    const uint32_t most = (uint32_t)(w->rows.n + HAND_PART - 1) / HAND_PART;
    float best[HAND_LIST];
    uint32_t n = 0;

    for (uint32_t i = 0; i < w->rows.n; i++) {
        uint32_t k = n < most ? n++ : most;
        if (k == most && score[i] <= best[--k])
            continue;
        for (; k && score[i] > best[k - 1]; k--) {
            best[k] = best[k - 1];
            h->list[k] = h->list[k - 1];
        }
        best[k] = score[i];
        h->list[k] = w->at[i];
    }
    h->n = n;
    h->next = 0;
}

static void sweep_score(table *t, stripe *s, uint32_t clock, uint32_t spare,
                        sweep *w, float *score)
{
    sweep_read(t, s, clock, spare, w);
    t->evict.policy->score(&t->evict, s->hand.now, &w->rows, score);
    for (size_t i = 0; i < w->rows.n; i++)
        score[i] = isnan(score[i]) ? -INFINITY : score[i];
}

static void hand_fill(table *t, stripe *s, uint32_t clock, uint32_t spare)
{
    sweep w;
    float score[EVICT_WINDOW];
    hand *h = &s->hand;

    sweep_score(t, s, clock, spare, &w, score);
    sweep_list(&w, score, h);
    for (uint32_t i = 0; i < h->n; i++) {
        const char *row = stripe_row(t, s, h->list[i].slot);
        row_prefetch(row, t->stride);
        __builtin_prefetch(row_index_home(
            &s->index, id_place(row_id(row), t->config.hash_key)));
    }
}

/* The part of the next window that this victim stands for. */
static void hand_fetch(const table *t, const stripe *s, uint32_t turn)
{
    const uint64_t step = sweep_step(s);
    uint64_t slot = s->hand.at + turn * HAND_PART * step;

    for (uint32_t i = 0; i < HAND_PART && slot < s->used; i++, slot += step)
        __builtin_prefetch(stripe_row(t, s, (uint32_t)slot) + ROW_CLOCK);
}

/* Takes the next victim out, which frees its slot; none that was touched at
 * `spare`.  Looks at EVICT_WINDOW slots for each call of a push at most, where
 * earlier calls may have left some.  PERSIA_ECAPACITY: there was none. */
static int hand_evict_locked(table *t, stripe *s, uint32_t clock,
                             uint32_t spare)
{
    hand *h = &s->hand;

    h->credit = (h->clock == clock ? h->credit : 0) + EVICT_WINDOW;
    h->clock = clock;
    for (;;) {
        while (h->next < h->n) {
            const victim v = h->list[h->next++];
            hand_fetch(t, s, h->next - 1);
            if (v.clock != spare &&
                row_clock(stripe_row(t, s, v.slot)) == v.clock) {
                stripe_release_locked(t, s, v.slot);
                return PERSIA_OK;
            }
        }
        if (h->credit < EVICT_WINDOW || !s->used)
            return PERSIA_ECAPACITY;
        h->credit -= EVICT_WINDOW;
        hand_fill(t, s, clock, spare);
    }
}

/* Takes out the expired rows of a window at every HAND_EXPIRE-th call; how
 * many. */
static uint32_t hand_expire_locked(table *t, stripe *s, uint32_t clock,
                                   uint32_t spare)
{
    sweep w;
    float score[EVICT_WINDOW];
    uint32_t gone = 0;

    if (++s->hand.made % HAND_EXPIRE)
        return 0;
    sweep_score(t, s, clock, spare, &w, score);
    for (uint32_t i = 0; i < w.rows.n; i++) {
        if (score[i] < 1)
            continue;
        stripe_release_locked(t, s, w.at[i].slot);
        gone++;
    }
    return gone;
}

/* Whether a stripe has its part of the capacity, of more rows than that. */
static int hand_has_its_part(const table *t, const stripe *s)
{
    const uint64_t capacity = t->config.capacity;

    if (t->expected <= capacity || !t->evict.policy)
        return 0;
    return s->rows >= (uint64_t)((double)capacity * (double)s->expected /
                                 (double)t->expected);
}

/* Whether a slot is free, or one more may be opened: then it is counted. */
static int hand_opens_slot(const stripe *s, const stripe_room *room)
{
    size_t opens = atomic_load_explicit(room->opens, memory_order_relaxed);

    if (s->free_head != ROW_NONE)
        return 1;
    while (opens && *room->slots)
        if (atomic_compare_exchange_weak_explicit(room->opens, &opens,
                                                  opens - 1,
                                                  memory_order_relaxed,
                                                  memory_order_relaxed))
            return 1;
    return 0;
}

/* Counts one row more below the capacity; 0 where there is no place. */
static int hand_counts_below(table *t, stripe *s, const stripe_room *room)
{
    const uint64_t capacity = t->config.capacity;
    uint64_t rows = atomic_load_explicit(&t->rows, memory_order_relaxed);

    if (rows >= capacity || hand_has_its_part(t, s) ||
        (t->evict.policy && !hand_opens_slot(s, room)))
        return 0;
    while (rows < capacity)
        if (atomic_compare_exchange_weak_explicit(&t->rows, &rows, rows + 1,
                                                  memory_order_relaxed,
                                                  memory_order_relaxed))
            return 1;
    if (t->evict.policy && s->free_head == ROW_NONE)
        atomic_fetch_add_explicit(room->opens, 1, memory_order_relaxed);
    return 0;
}

int hand_place_locked(table *t, stripe *s, uint32_t clock, uint32_t spare,
                      const stripe_room *room, uint32_t *evicted)
{
    int rc;

    *evicted = 0;
    if (t->evict.expires && !t->filling) {
        *evicted = hand_expire_locked(t, s, clock, spare);
        atomic_fetch_sub_explicit(&t->rows, *evicted, memory_order_relaxed);
    }
    if (!table_capacity(t)) {
        s->uncounted++;
        return PERSIA_OK;
    }
    if (hand_counts_below(t, s, room))
        return PERSIA_OK;
    if (!t->evict.policy)
        return PERSIA_ECAPACITY;
    rc = hand_evict_locked(t, s, clock, spare);
    *evicted += !rc;
    return rc;
}

void hand_unplace_locked(table *t, stripe *s)
{
    if (table_capacity(t))
        atomic_fetch_sub_explicit(&t->rows, 1, memory_order_relaxed);
    else
        s->uncounted--;
}

void hand_touch_locked(const table *t, const stripe *s, size_t n,
                       const float *age, char *const *rows)
{
    uint32_t field[EVICT_WINDOW];

    for (size_t i = 0; i < n; i++)
        field[i] = row_field(t, rows[i]);
    t->evict.policy->touch(&t->evict, s->hand.now, n, age, field);
    for (size_t i = 0; i < n; i++)
        row_set_field(t, rows[i], field[i]);
}

void hand_look_locked(const table *t, stripe *s)
{
    if (t->evict.reads_time)
        s->hand.now = t->now ? t->now : (uint32_t)persia_clock_seconds();
}

void persia_table_set_now(table *t, uint32_t seconds)
{
    t->now = seconds;
}
