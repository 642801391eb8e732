/* waits.c: calls that wait: parts of steps for the other ranks, pulls
 * for an update.  No thread is held; the tick fails what has waited too long.
 */
#include "shard/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATIENCE_NS = 1000000000 }; /* see wait_pull() */

int wait_room(shard *s, uint32_t most)
{
    if (atomic_fetch_add(&s->parked_n, 1) < most)
        return 1;
    atomic_fetch_sub(&s->parked_n, 1);
    return 0;
}

void wait_wake_locked(shard *s, uint64_t at)
{
    if (at >= s->wake_at)
        return;
    s->wake_at = at;
    if (s->env.wake)
        s->env.wake(s->env.ctx, at);
}

int wait_refuses_locked(const direct *from)
{
    return from->refused
               ? persia_err_set(from->refused, "%s", from->refused_text)
               : PERSIA_OK;
}

uint64_t wait_step(shard *s)
{
    pthread_mutex_lock(&s->wait_lock);
    uint64_t step = s->sync.step;
    pthread_mutex_unlock(&s->wait_lock);
    return step;
}

uint64_t *wait_left(shard *s, uint32_t world, size_t *n)
{
    uint64_t *out = NULL;
    *n = 0;
    pthread_mutex_lock(&s->wait_lock);
    if (s->sync.left_n)
        out = malloc(s->sync.left_n * sizeof *out);
    if (out)
        *n = sync_list_left(&s->sync, world, out, s->sync.left_n);
    pthread_mutex_unlock(&s->wait_lock);
    return out;
}

/* ---- parts of steps ----------------------------------------------------- */

/* Fails a part, and the copies of it that wait. */
static void waits_fail_part(shard *s, push_call *c, int code, const char *text)
{
    while (c) {
        push_call *copy = (push_call *)c->waiter.next;
        atomic_fetch_sub(&s->parked_n, 1);
        if (code == PERSIA_ESTALE)
            push_reply_status(s, c, PUSH_STALE_LINEAGE);
        else if (code == PERSIA_ELOST)
            push_reply_status(s, c, PUSH_LOST);
        else
            push_fail(c, code, text);
        c = copy;
    }
}

/* Parts that were taken and will not be applied. */
static void waits_fail_parts(shard *s, void **parts, uint32_t n, int code,
                             const char *text)
{
    for (uint32_t i = 0; i < n; i++)
        waits_fail_part(s, parts[i], code, text);
    free(parts);
}

int wait_begin_locked(shard *s, void **parts, uint32_t n)
{
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < n && !rc; i++) {
        push_call *c = parts[i];
        c->state = ledger_begin(s->ledger, &c->key, &c->flight, NULL);
        if (c->state == LEDGER_BUSY)
            rc = persia_err_set(
                PERSIA_EARG,
                "update %llu of the stream of rank %u "
                "is in flight twice: every rank needs a stream of "
                "its own",
                (unsigned long long)c->key.number, c->m->part);
        for (uint32_t k = 0; rc && k < i; k++) {
            c = parts[k];
            if (c->flight.state != FLIGHT_NONE)
                c->waiter.next = ledger_end(s->ledger, &c->key);
        }
    }
    return rc;
}

/* Takes the pending step if it is whole; NULL if it is not. */
static void **waits_take_whole_locked(shard *s, uint32_t *n, int *rc)
{
    *rc = PERSIA_OK;
    if (!sync_complete(&s->sync))
        return NULL;
    const uint64_t step = s->sync.pending;
    void **parts = sync_take(&s->sync, 1, n);
    if (!*n) { /* all were passed */
        sync_applied(&s->sync, step);
        free(parts);
        return NULL;
    }
    *rc = wait_begin_locked(s, parts, *n);
    if (*rc)
        sync_failed(&s->sync);
    return parts;
}

void wait_apply(shard *s, void **parts, uint32_t n, int rc)
{
    if (rc) {
        err_kept why;
        persia_err_keep(&why, rc);
        groups_failed(s, ((push_call *)parts[0])->m->group);
        waits_fail_parts(s, parts, n, why.code, why.text);
        return;
    }
    atomic_fetch_sub(&s->parked_n, n);
    push_apply(s, (push_call **)parts, n);
    free(parts);
}

int wait_is_of_former_locked(const shard *s, const push_call *c)
{
    const wire_maker *m = &c->m->maker;
    return m->stream &&
           ledger_is_older(s->ledger, m->stream,
                           (ledger_owner){m->incarnation, m->client});
}

/* What became of a part. */
typedef struct placed {
    enum ledger_state state;
    int rc;            /* in LEDGER_NEW: it was refused, or: */
    int stale, missed; /* it is not applied */
    push_call *replaced; /* by this one */
    int again;           /* which was the same */
    void **whole;        /* the step, if it is whole; [n] */
    uint32_t n;
    int whole_rc;
    void **dropped; /* [dropped_n], see sync_infer() */
    uint32_t dropped_n;
} placed;

/* Another process is the rank of this part. */
static int waits_is_replaced_locked(const shard *s, const push_call *c)
{
    return wait_is_of_former_locked(s, c) ||
           (!c->m->shared &&
            sync_is_other(&s->sync, c->m->part, c->m->stream));
}

/* An embedding worker has sent the part of a rank.  One that sends its parts
 * itself has joined before. */
static void waits_note_client_locked(shard *s, const push_call *c)
{
    if (c->m->maker.stream)
        sync_note_client(&s->sync, c->m->part, c->m->maker.client);
}

/* *why is set where out->rc is an error. */
static void waits_place_locked(shard *s, push_call *c, placed *out,
                               err_kept *why)
{
    void *replaced = NULL;
    *out = (placed){.state = ledger_look(s->ledger, &c->key, &c->waiter)};
    /* Another server lacked it: the ranks train the batch again. */
    if (out->state == LEDGER_DONE && !is_stale(s, &c->m->caller) &&
        !waits_is_replaced_locked(s, c)) {
        sync_pass(&s->sync, c->m->step, c->m->part, c->m->parts);
        waits_note_client_locked(s, c);
        out->whole = waits_take_whole_locked(s, &out->n, &out->whole_rc);
    }
    if (out->state != LEDGER_NEW)
        return;
    out->rc = wait_refuses_locked(c->call.from);
    if (out->rc) {
        persia_err_keep(why, out->rc);
        return;
    }
    /* Here: a restore drops what was added before. */
    out->stale = is_stale(s, &c->m->caller);
    if (waits_is_replaced_locked(s, c))
        out->rc = persia_err_set(PERSIA_ECLOSED,
                                 "another process is rank %u of the steps now",
                                 c->m->part);
    if (!out->stale && !out->rc)
        out->dropped = sync_infer(&s->sync, c->m->step, c->m->part,
                                  c->m->parts, &out->dropped_n);
    out->missed = !out->stale && c->m->step <= s->sync.missed;
    if (!out->stale && !out->missed && !out->rc)
        out->rc = sync_add(&s->sync, c->m->step, c->m->part, c->m->parts, c,
                           &replaced);
    if (out->rc) { /* it may have been the last part that was waited for */
        persia_err_keep(why, out->rc);
        out->whole = waits_take_whole_locked(s, &out->n, &out->whole_rc);
    }
    if (out->stale || out->missed || out->rc)
        return;
    waits_note_client_locked(s, c);
    if (replaced) { /* a copy that was late may be the later one */
        const ledger_key *key = &((push_call *)replaced)->key;
        out->replaced = replaced;
        out->again = key->stream == c->key.stream &&
                     key->number == c->key.number &&
                     key->owner.client == c->key.owner.client;
    }
    wait_wake_locked(s, c->call.deadline);
    out->whole = waits_take_whole_locked(s, &out->n, &out->whole_rc);
}

void wait_part(shard *s, const push_call *part)
{
    placed p;
    err_kept why;
    push_call *c = push_keep(part);
    if (!c)
        return;
    if (!wait_room(s, PARTS_MAX)) {
        push_fail(c, PERSIA_ELIMIT, "too many requests wait");
        return;
    }
    pthread_mutex_lock(&s->wait_lock);
    waits_place_locked(s, c, &p, &why);
    pthread_mutex_unlock(&s->wait_lock);

    if (p.state == LEDGER_BUSY)
        return;
    if (p.dropped)
        waits_fail_parts(s, p.dropped, p.dropped_n,
                         s->log ? PERSIA_EUNAVAILABLE : PERSIA_ELOST,
                         "an earlier step waits for other ranks yet");
    if (p.whole) /* first: other answers would replace the text of whole_rc */
        wait_apply(s, p.whole, p.n, p.whole_rc);
    if (p.state != LEDGER_NEW || p.rc || p.stale || p.missed) {
        atomic_fetch_sub(&s->parked_n, 1);
        if (p.stale)
            push_reply_status(s, c, PUSH_STALE_LINEAGE);
        else if (p.missed)
            push_reply_status(s, c, PUSH_LOST);
        else if (p.rc)
            push_fail(c, p.rc, why.text);
        else
            push_reply_state(s, c, p.state);
    }
    if (p.replaced) {
        atomic_fetch_sub(&s->parked_n, 1);
        push_fail(p.replaced, p.again ? PERSIA_EUNAVAILABLE : PERSIA_ECLOSED,
                  "this part of the step arrived again; the later one waits "
                  "now");
    }
    if (p.whole)
        wait_go_on(s);
}

/* Parts of steps and groups whose rank has another process now. */
static void waits_drop_former(shard *s)
{
    void **parts;
    do {
        uint32_t n = 0;
        pthread_mutex_lock(&s->wait_lock);
        parts = groups_take_former_locked(s, &n);
        for (uint32_t i = 0; i < s->sync.parts && !parts; i++)
            if (s->sync.part[i] &&
                wait_is_of_former_locked(s, s->sync.part[i]))
                parts = sync_take_one(&s->sync, i, &n);
        pthread_mutex_unlock(&s->wait_lock);
        if (parts)
            waits_fail_parts(s, parts, n, PERSIA_ECLOSED,
                             "another process is the rank of this part now");
    } while (parts);
}

int wait_open(shard *s, const wire_hello *m, wire_hello_reply *out)
{
    void **dropped = NULL;
    uint32_t n = 0;
    int taken;
    pthread_mutex_lock(&s->wait_lock);
    int rc = check_stays(s);
    if (rc) {
        pthread_mutex_unlock(&s->wait_lock);
        return rc;
    }
    rc = ledger_open(s->ledger, m->stream, owner_of(&m->caller), &taken,
                     &out->ledger);
    for (uint32_t i = 0; i < s->sync.parts && taken && !rc && !dropped; i++) {
        const push_call *c = s->sync.part[i];
        if (c && c->key.stream == m->stream &&
            c->key.owner.client != m->caller.client)
            dropped = sync_take_one(&s->sync, i, &n);
    }
    pthread_mutex_unlock(&s->wait_lock);
    out->taken = !rc && taken;
    if (!rc)
        rc = logged_claim(s, m);
    if (dropped)
        waits_fail_parts(s, dropped, n, PERSIA_EUNAVAILABLE,
                         "another client has "
                         "opened the stream of this part of a step");
    if (!rc)
        waits_drop_former(s);
    if (rc == PERSIA_ECLOSED)
        return persia_err_set(rc, "rank %u of namespace '%s': %s", m->rank,
                              m->name_space, persia_err_text());
    return rc;
}

void wait_applied(shard *s, uint64_t step)
{
    pthread_mutex_lock(&s->wait_lock);
    sync_applied(&s->sync, step);
    pthread_mutex_unlock(&s->wait_lock);
}

void wait_failed(shard *s)
{
    pthread_mutex_lock(&s->wait_lock);
    sync_failed(&s->sync);
    pthread_mutex_unlock(&s->wait_lock);
}

void wait_set_step(shard *s, uint64_t step)
{
    pthread_mutex_lock(&s->wait_lock);
    sync_set_step(&s->sync, step);
    memset(s->ended_groups, 0, sizeof s->ended_groups);
    pthread_mutex_unlock(&s->wait_lock);
}

/* Whether all parts of a step but one can wait at once for the last. */
static int check_world(const shard *s, const wire_leave *m)
{
    const uint32_t calls = atomic_load(&s->calls);
    if (!m->joins || !calls || m->world <= calls)
        return PERSIA_OK;
    return persia_err_set(
        PERSIA_ELIMIT,
        "%u ranks train in step, but the server "
        "has at most %u requests in flight at once, of which the "
        "part of each rank is one: start it with more (--calls)",
        m->world, calls);
}

/* Hands out what is void then, as sync_move() does. */
static void **waits_move_locked(shard *s, const wire_leave *m, int moves,
                                uint32_t *n)
{
    if (m->joins)
        s->world = m->world;
    void **dropped = moves ? sync_move(&s->sync, m->rank, m->world,
                                       (int)m->joins, m->step, n)
                           : NULL;
    for (size_t i = 0; i < m->left_n && m->joins; i++)
        if (m->left[i] < m->world && m->left[i] != m->rank)
            sync_hear(&s->sync, (uint32_t)m->left[i]);
    return dropped;
}

/* No later step begins with a number up to it. */
static uint64_t waits_last_step(shard *s)
{
    pthread_mutex_lock(&s->wait_lock);
    const uint64_t step = s->sync.applying > s->sync.step ? s->sync.applying
                                                          : s->sync.step;
    pthread_mutex_unlock(&s->wait_lock);
    return step;
}

int leave_answer(shard *s, const wire_leave *m, wire_memory *memory,
                 wire_leave_reply *out)
{
    uint32_t n = 0;
    void **dropped = NULL;
    (void)memory;
    int rc = persia_shard_check_boot(s, &m->caller);
    if (!rc && m->group) {
        *out = (wire_leave_reply){.step = wait_step(s)};
        return wait_pass(s, m);
    }
    if (!rc && m->world > SYNC_RANKS)
        rc = persia_err_set(PERSIA_ELIMIT,
                            "a world of %u ranks, at most %d can "
                            "train in step",
                            m->world, SYNC_RANKS);
    if (!rc && m->joins && wire_leaps(wait_step(s), m->step))
        rc = persia_err_set(PERSIA_EARG,
                            "rank %u joins after step %llu: no server misses "
                            "so many", m->rank, (unsigned long long)m->step);
    if (!rc)
        rc = check_world(s, m);
    if (rc)
        return rc;
    pthread_mutex_lock(&s->wait_lock);
    if ((rc = check_stays(s))) {
        pthread_mutex_unlock(&s->wait_lock);
        return rc;
    }
    if (ledger_is_older(s->ledger, m->stream, owner_of(&m->caller))) {
        pthread_mutex_unlock(&s->wait_lock);
        return persia_err_set(PERSIA_ECLOSED,
                              "another process is rank %u of the "
                              "steps now",
                              m->rank);
    }
    const sync_mover by = {m->caller.client, m->stream, m->move,
                           (int)m->joins};
    const enum sync_heed heed = sync_heed(&s->sync, m->rank, &by);
    if (heed != SYNC_LATE)
        dropped = waits_move_locked(s, m, heed == SYNC_MOVES, &n);
    int missed = n && ((push_call *)dropped[0])->m->step <= s->sync.missed;
    pthread_mutex_unlock(&s->wait_lock);
    if (missed) {
        waits_fail_parts(s, dropped, n, PERSIA_ELOST, "");
    } else if (dropped) {
        char text[128];
        snprintf(text, sizeof text, "rank %u %s the steps of the job before "
                 "this step was whole", m->rank,
                 m->joins ? "joined" : "left");
        waits_fail_parts(s, dropped, n, PERSIA_ECLOSED, text);
    }
    wait_go_on(s);
    *out = (wire_leave_reply){.step = waits_last_step(s)};
    if (out->step < persia_tables_t(s->p))
        out->step = persia_tables_t(s->p);
    return PERSIA_OK;
}

/* ---- pulls -------------------------------------------------------------- */

/* Pulls that wait must not keep out the updates that they wait for. */
static int pulls_fill_locked(const shard *s)
{
    const uint32_t calls = atomic_load(&s->calls);
    const uint32_t updates = s->world > calls / 2 ? s->world : calls / 2;
    return calls && s->parked_pulls + updates >= calls;
}

int wait_pull(shard *s, const shard_call *c, const shard_pull *a, int *waits)
{
    const wire_pull *m = a->m;
    int rc = PERSIA_OK;
    *waits = 0;
    if (ledger_has(s->ledger, m->stream, m->after))
        return PERSIA_OK;
    if (!s->env.wake) /* it could wait for ever */
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "this shard lets no call wait");
    parked *one = malloc(sizeof *one);
    if (!one)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for a pull that waits");
    if (!wait_room(s, PARKED_MAX)) {
        free(one);
        return persia_err_set(PERSIA_EUNAVAILABLE, "too many requests wait");
    }
    uint64_t until = persia_clock_ns() + PATIENCE_NS;
    if (until > c->deadline)
        until = c->deadline;
    *one = (parked){.call = *c, .until = until, .a = a};
    pthread_mutex_lock(&s->wait_lock);
    rc = wait_refuses_locked(c->from);
    if (!rc && !ledger_has(s->ledger, m->stream, m->after)) {
        *waits = !pulls_fill_locked(s);
        if (!*waits)
            rc = persia_err_set(PERSIA_EUNAVAILABLE, "too many requests wait");
    }
    if (*waits) {
        one->next = s->parked;
        s->parked = one;
        s->parked_pulls++;
        wait_wake_locked(s, until);
    }
    pthread_mutex_unlock(&s->wait_lock);
    if (*waits)
        return PERSIA_OK;
    free(one);
    atomic_fetch_sub(&s->parked_n, 1);
    return rc;
}

/* Which pulls: those whose update is through, or, where they are not 0 and
 * NULL, whose time is up at `now`, or of one ref. */
typedef struct which {
    uint64_t now;
    const direct *from;
} which;

static int waits_is_taken_locked(const shard *s, const parked *one,
                                 const which *w)
{
    if (w->from)
        return one->call.from == w->from;
    if (w->now)
        return one->until <= w->now;
    return ledger_has(s->ledger, one->a->m->stream, one->a->m->after);
}

static parked *waits_take_pulls_locked(shard *s, which w)
{
    parked *taken = NULL, **at = &s->parked;
    while (*at) {
        parked *one = *at;
        if (!waits_is_taken_locked(s, one, &w)) {
            at = &one->next;
            continue;
        }
        *at = one->next;
        s->parked_pulls--;
        one->next = taken;
        taken = one;
    }
    return taken;
}

static void answer_pulls(shard *s, parked *list, int code, const char *text)
{
    while (list) {
        parked one = *list;
        free(list);
        list = one.next;
        atomic_fetch_sub(&s->parked_n, 1);
        if (code)
            call_fail(&one.call, code, text);
        else
            pull_answer(s, &one.call, one.a);
    }
}

/* ---- what need not wait any more ---------------------------------------- */

void wait_go_on(shard *s)
{
    void **whole;
    do {
        uint32_t n = 0;
        int rc;
        pthread_mutex_lock(&s->wait_lock);
        parked *pulls = waits_take_pulls_locked(s, (which){0, NULL});
        whole = waits_take_whole_locked(s, &n, &rc);
        pthread_mutex_unlock(&s->wait_lock);
        answer_pulls(s, pulls, PERSIA_OK, NULL);
        if (whole)
            wait_apply(s, whole, n, rc);
    } while (whole);
}

/* Fails the parts of groups: see groups_take_locked(). */
static void waits_fail_groups(shard *s, uint64_t now, const direct *from,
                              int code, const char *text)
{
    void **parts;
    do {
        uint32_t n;
        pthread_mutex_lock(&s->wait_lock);
        parts = groups_take_locked(s, now, from, &n);
        pthread_mutex_unlock(&s->wait_lock);
        waits_fail_parts(s, parts, n, code, text);
    } while (parts);
}

void wait_drop(shard *s, int code, const char *text)
{
    uint32_t n;
    pthread_mutex_lock(&s->wait_lock);
    parked *pulls = waits_take_pulls_locked(s, (which){UINT64_MAX, NULL});
    void **parts = sync_take(&s->sync, 0, &n);
    pthread_mutex_unlock(&s->wait_lock);
    answer_pulls(s, pulls, code, text);
    waits_fail_parts(s, parts, n, code, text);
    waits_fail_groups(s, UINT64_MAX, NULL, code, text);
}

/* The next part that waits and is of this ref; NULL: none. */
static void **waits_take_part_locked(shard *s, const direct *from, uint32_t *n)
{
    for (uint32_t i = 0; i < s->sync.parts; i++) {
        const push_call *c = s->sync.part[i];
        if (c && c->call.from == from)
            return sync_take_one(&s->sync, i, n);
    }
    return NULL;
}

void persia_shard_refuse(shard_ref *ref, int code, const char *text)
{
    direct *from = (direct *)ref;
    shard *s = from->s;
    void **parts;
    pthread_mutex_lock(&s->wait_lock);
    from->refused = code;
    from->refused_text = text;
    parked *pulls = waits_take_pulls_locked(s, (which){0, from});
    pthread_mutex_unlock(&s->wait_lock);
    answer_pulls(s, pulls, code, text);
    do {
        uint32_t n = 0;
        pthread_mutex_lock(&s->wait_lock);
        parts = waits_take_part_locked(s, from, &n);
        pthread_mutex_unlock(&s->wait_lock);
        waits_fail_parts(s, parts, n, code, text);
    } while (parts);
    waits_fail_groups(s, 0, from, code, text);
}

/* ---- the tick ----------------------------------------------------------- */

/* Of the parts of a step. */
static uint64_t step_deadline_locked(const shard *s)
{
    uint64_t next = UINT64_MAX;
    for (uint32_t i = 0; i < s->sync.parts; i++) {
        const push_call *c = s->sync.part[i];
        if (c && c->call.deadline < next)
            next = c->call.deadline;
    }
    return next;
}

/* The earliest deadline of what waits. */
static uint64_t waits_next_deadline_locked(const shard *s)
{
    uint64_t next = groups_deadline_locked(s);
    for (const parked *p = s->parked; p; p = p->next)
        if (p->until < next)
            next = p->until;
    const uint64_t step = step_deadline_locked(s);
    return step < next ? step : next;
}

/* Fails what has waited too long; all parts of a step if one of them has. */
static void waits_fail_late(shard *s, uint64_t now)
{
    char missing[160], text[400];
    void **parts = NULL;
    uint32_t n = 0;

    pthread_mutex_lock(&s->wait_lock);
    parked *pulls = waits_take_pulls_locked(s, (which){now, NULL});
    unsigned long long step = s->sync.pending;
    if (step_deadline_locked(s) <= now) {
        sync_missing(&s->sync, missing, sizeof missing);
        parts = sync_take(&s->sync, 0, &n);
    }
    pthread_mutex_unlock(&s->wait_lock);
    answer_pulls(s, pulls, PERSIA_EUNAVAILABLE, "the update whose rows were "
                 "asked for did not arrive in time");
    waits_fail_groups(s, now, NULL, PERSIA_ETIMEOUT,
                      "other batches of this update "
                      "did not arrive in time; nothing of it was applied");
    if (!parts)
        return;
    snprintf(text, sizeof text,
             "step %llu: the part of %s did not arrive in time; nothing of it "
             "was applied. Every rank makes as many updates, or iterates "
             "persia.DataLoader, or closes its store where it ends",
             step, missing);
    waits_fail_parts(s, parts, n, PERSIA_ETIMEOUT, text);
}

uint64_t persia_shard_tick(shard *s, uint64_t now)
{
    pthread_mutex_lock(&s->wait_lock);
    s->wake_at = UINT64_MAX; /* others may set it again meanwhile */
    pthread_mutex_unlock(&s->wait_lock);
    waits_fail_late(s, now);
    pthread_mutex_lock(&s->wait_lock);
    uint64_t next = waits_next_deadline_locked(s);
    if (next < s->wake_at)
        s->wake_at = next;
    pthread_mutex_unlock(&s->wait_lock);
    const uint64_t job = jobs_tick(s, now);
    return job < next ? job : next;
}
