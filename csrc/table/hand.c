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

int hand_evict_locked(table *t, stripe *s, uint32_t clock, uint32_t spare)
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

uint32_t hand_expire_locked(table *t, stripe *s, uint32_t clock,
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
