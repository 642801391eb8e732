/* groups.c: parts of an update of several batches, which wait for each other.
 * They come from embedding workers, each by the name of its batch.  wait_lock
 * is held in all that ends with _locked.
 */
#include "shard/private.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROUPS_MAX = 4096 };
#define FORGET_NS ((uint64_t)600 * 1000000000)

struct group {
    struct group *next;
    uint64_t id;
    uint64_t until;  /* when it is forgotten, unless a part waits */
    uint32_t parts;
    uint32_t n;      /* that wait */
    uint32_t passed; /* that are not waited for */
    push_call **part; /* [parts] NULL: it does not wait */
    void **taken;     /* [parts] for those that are taken; while n > 0 */
    uint8_t is_passed[]; /* [parts] */
};

static int groups_has_ended_locked(const shard *s, uint64_t id)
{
    for (uint32_t i = 0; i < GROUPS_ENDED; i++)
        if (s->ended_groups[i] == id)
            return 1;
    return 0;
}

static void groups_remove_locked(shard *s, group *g)
{
    group **at = &s->groups;
    while (*at != g)
        at = &(*at)->next;
    *at = g->next;
    s->groups_n--;
    free(g->part);
    free(g->taken);
    free(g);
}

/* Memory that a group needs to give its parts back. */
static int groups_take_room_locked(group *g)
{
    if (!g->taken)
        g->taken = malloc(g->parts * sizeof *g->taken);
    return g->taken ? PERSIA_OK
                    : persia_err_set(PERSIA_ENOMEM, "no memory for %u parts",
                                     g->parts);
}

static int groups_find_locked(shard *s, uint64_t id, uint32_t parts,
                              group **out)
{
    group *g = s->groups;
    while (g && g->id != id)
        g = g->next;
    *out = g;
    if (g)
        return g->parts == parts
                   ? PERSIA_OK
                   : persia_err_set(PERSIA_EARG,
                                    "a part of %u, the others are of %u",
                                    parts, g->parts);
    int rc = check_stays(s);
    if (rc)
        return rc;
    if (s->groups_n == GROUPS_MAX || parts > SYNC_RANKS)
        return persia_err_set(PERSIA_ELIMIT,
                              "an update of %u batches, one of %u that wait; "
                              "at most %d and %d",
                              parts, s->groups_n, SYNC_RANKS, GROUPS_MAX);
    if ((g = calloc(1, sizeof *g + parts)) &&
        !(g->part = calloc(parts, sizeof *g->part))) {
        free(g);
        g = NULL;
    }
    if (!g)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %u parts", parts);
    g->id = id;
    g->parts = parts;
    g->next = s->groups;
    s->groups = g;
    s->groups_n++;
    *out = g;
    return PERSIA_OK;
}

static void groups_touch_locked(shard *s, group *g)
{
    g->until = persia_clock_ns() + FORGET_NS;
    wait_wake_locked(s, g->until);
}

static void groups_pass_locked(shard *s, group *g, uint32_t part)
{
    groups_touch_locked(s, g);
    if (g->part[part] || g->is_passed[part])
        return;
    g->is_passed[part] = 1;
    g->passed++;
}

/* The parts that wait, in their order; NULL: there are none. */
static void **groups_take_parts_locked(group *g, uint32_t *n)
{
    *n = 0;
    if (!g->n)
        return NULL;
    void **out = g->taken;
    g->taken = NULL;
    assert(out);
    for (uint32_t i = 0; i < g->parts; i++) {
        if (!g->part[i])
            continue;
        out[(*n)++] = g->part[i];
        g->part[i] = NULL;
    }
    g->n -= *n;
    assert(g->n == 0);
    return out;
}

/* The update, if it is whole. */
static void **groups_take_whole_locked(shard *s, group *g, uint32_t *n,
                                       int *rc)
{
    *n = 0;
    *rc = PERSIA_OK;
    if (g->n + g->passed < g->parts)
        return NULL;
    void **parts = groups_take_parts_locked(g, n);
    s->ended_groups[s->ended_groups_n++ % GROUPS_ENDED] = g->id;
    groups_remove_locked(s, g);
    *rc = parts ? wait_begin_locked(s, parts, *n) : PERSIA_OK;
    return parts;
}

/* ---- a part ------------------------------------------------------------- */

typedef struct placed {
    enum ledger_state state;
    int rc, stale;
    push_call *replaced;
    void **whole; /* [n] */
    uint32_t n;
    int whole_rc;
} placed;

static void groups_place_locked(shard *s, push_call *c, placed *out)
{
    const wire_push *m = c->m;
    group *g;
    *out = (placed){.state = ledger_look(s->ledger, &c->key, &c->waiter)};
    const int is_new = out->state == LEDGER_NEW;
    if (!is_new && out->state != LEDGER_DONE)
        return;
    out->stale = is_stale(s, &m->caller);
    if (out->stale)
        return;
    const int ended = groups_has_ended_locked(s, m->group);
    if (atomic_load(&s->hold) == SHARD_HELD)
        out->rc = refuse_moving();
    else if (is_new)
        out->rc = ended ? persia_err_set(PERSIA_ECLOSED,
                                         "the update of several batches was "
                                         "applied without this one")
              : wait_is_of_former_locked(s, c)
                  ? persia_err_set(PERSIA_ECLOSED,
                                   "another process is the rank of this part "
                                   "now")
                  : wait_refuses_locked(c->call.from);
    if (out->rc || ended)
        return;
    out->rc = groups_find_locked(s, m->group, m->parts, &g);
    if (out->rc)
        return;
    if (is_new && (out->rc = groups_take_room_locked(g)))
        return;
    if (is_new) {
        out->replaced = g->part[m->part];
        g->part[m->part] = c;
        g->n += !out->replaced;
        g->passed -= g->is_passed[m->part];
        g->is_passed[m->part] = 0;
        groups_touch_locked(s, g);
        wait_wake_locked(s, c->call.deadline);
    } else {
        groups_pass_locked(s, g, m->part);
    }
    out->whole = groups_take_whole_locked(s, g, &out->n, &out->whole_rc);
}

void wait_group(shard *s, const push_call *part)
{
    placed p;
    push_call *c = push_keep(part);
    if (!c)
        return;
    if (!wait_room(s, PARTS_MAX)) {
        push_fail(c, PERSIA_ELIMIT, "too many requests wait");
        return;
    }
    err_kept why;
    pthread_mutex_lock(&s->wait_lock);
    groups_place_locked(s, c, &p);
    pthread_mutex_unlock(&s->wait_lock);
    if (p.state == LEDGER_BUSY)
        return;
    persia_err_keep(&why, p.rc);
    if (p.whole)
        wait_apply(s, p.whole, p.n, p.whole_rc);
    if (p.replaced) {
        atomic_fetch_sub(&s->parked_n, 1);
        push_fail(p.replaced, PERSIA_EUNAVAILABLE,
                  "this part arrived again; the later one waits now");
    }
    if (p.state != LEDGER_NEW || p.rc || p.stale) {
        atomic_fetch_sub(&s->parked_n, 1);
        if (p.stale)
            push_reply_status(s, c, PUSH_STALE_LINEAGE);
        else if (p.rc)
            push_fail(c, why.code, why.text);
        else
            push_reply_state(s, c, p.state);
    }
    if (p.whole)
        wait_go_on(s);
}

int wait_pass(shard *s, const wire_leave *m)
{
    group *g;
    void **whole = NULL;
    uint32_t n = 0;
    int rc = PERSIA_OK, whole_rc = PERSIA_OK;
    pthread_mutex_lock(&s->wait_lock);
    if (atomic_load(&s->hold) == SHARD_HELD) {
        rc = refuse_moving();
    } else if (!groups_has_ended_locked(s, m->group)) {
        rc = groups_find_locked(s, m->group, m->world, &g);
        if (!rc) {
            groups_pass_locked(s, g, m->rank);
            whole = groups_take_whole_locked(s, g, &n, &whole_rc);
        }
    }
    pthread_mutex_unlock(&s->wait_lock);
    if (whole) {
        wait_apply(s, whole, n, whole_rc);
        wait_go_on(s);
    }
    return rc;
}

/* ---- the end ------------------------------------------------------------ */

uint64_t groups_deadline_locked(const shard *s)
{
    uint64_t next = UINT64_MAX;
    for (const group *g = s->groups; g; g = g->next) {
        if (g->until < next)
            next = g->until;
        for (uint32_t i = 0; i < g->parts; i++)
            if (g->part[i] && g->part[i]->call.deadline < next)
                next = g->part[i]->call.deadline;
    }
    return next;
}

static int groups_is_late_locked(const group *g, uint64_t now)
{
    for (uint32_t i = 0; i < g->parts; i++)
        if (g->part[i] && g->part[i]->call.deadline <= now)
            return 1;
    return 0;
}

static int groups_is_from_locked(const group *g, const direct *from)
{
    for (uint32_t i = 0; i < g->parts; i++)
        if (g->part[i] && g->part[i]->call.from == from)
            return 1;
    return 0;
}

void **groups_take_locked(shard *s, uint64_t now, const direct *from,
                          uint32_t *n)
{
    *n = 0;
    for (group *g = s->groups, *next; g; g = next) {
        next = g->next;
        const int all = now == UINT64_MAX;
        void **parts = NULL;
        if (from ? groups_is_from_locked(g, from)
                 : all || groups_is_late_locked(g, now))
            parts = groups_take_parts_locked(g, n);
        if (!g->n && (all || (!from && g->until <= now)))
            groups_remove_locked(s, g);
        if (parts)
            return parts;
    }
    return NULL;
}

void **groups_take_former_locked(shard *s, uint32_t *n)
{
    for (group *g = s->groups; g; g = g->next)
        for (uint32_t i = 0; i < g->parts; i++)
            if (g->part[i] && wait_is_of_former_locked(s, g->part[i]))
                return groups_take_parts_locked(g, n);
    return NULL;
}

void groups_failed(shard *s, uint64_t id)
{
    pthread_mutex_lock(&s->wait_lock);
    for (uint32_t i = 0; i < GROUPS_ENDED && id; i++)
        if (s->ended_groups[i] == id)
            s->ended_groups[i] = 0;
    pthread_mutex_unlock(&s->wait_lock);
}

void groups_free(shard *s)
{
    while (s->groups)
        groups_remove_locked(s, s->groups);
}
