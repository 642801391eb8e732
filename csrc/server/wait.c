/* wait.c: calls that wait: parts of steps for the other ranks, pulls
 * for an update.  No thread is held; one timer fails what has waited too long.
 */
#include "server/private.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATIENCE_NS = 1000000000 }; /* see wait_pull() */

int wait_room(ps_service *s, uint32_t most)
{
    if (atomic_fetch_add(&s->parked_n, 1) < most)
        return 1;
    atomic_fetch_sub(&s->parked_n, 1);
    return 0;
}

static void wake_locked(ps_service *s, uint64_t at)
{
    if (at >= s->wake_at)
        return;
    s->wake_at = at;
    pthread_cond_signal(&s->wake);
}

void wait_poke(ps_service *s)
{
    pthread_mutex_lock(&s->wait_lock);
    wake_locked(s, 0);
    pthread_mutex_unlock(&s->wait_lock);
}

uint64_t wait_step(ps_service *s)
{
    pthread_mutex_lock(&s->wait_lock);
    uint64_t step = s->sync.step;
    pthread_mutex_unlock(&s->wait_lock);
    return step;
}

uint64_t *wait_left(ps_service *s, uint32_t world, wire_memory *memory,
                    size_t *n)
{
    uint64_t *out = NULL;
    *n = 0;
    pthread_mutex_lock(&s->wait_lock);
    if (s->sync.left_n)
        out = wire_memory_take(memory, s->sync.left_n * sizeof *out);
    if (out)
        *n = sync_list_left(&s->sync, world, out, s->sync.left_n);
    pthread_mutex_unlock(&s->wait_lock);
    return *n ? out : NULL;
}

/* ---- parts of steps ----------------------------------------------------- */

/* Parts that were taken and will not be applied. */
static void fail_parts(ps_service *s, void **parts, uint32_t n, int code,
                       const char *text)
{
    for (uint32_t i = 0; i < n; i++) {
        atomic_fetch_sub(&s->parked_n, 1);
        if (code == PERSIA_ESTALE)
            push_reply_status(s, parts[i], PUSH_STALE_LINEAGE);
        else if (code == PERSIA_ELOST)
            push_reply_status(s, parts[i], PUSH_LOST);
        else
            push_fail(s, parts[i], code, text);
    }
    free(parts);
}

/* Marks the parts of a step as under way in the ledger: from now on copies
 * of them wait for their answers. */
static int begin_locked(ps_service *s, void **parts, uint32_t n)
{
    enum ledger_state state;
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < n && !rc; i++) {
        const push_call *c = parts[i];
        rc = ledger_begin(s->ledger, &c->key, NULL, &state);
        if (!rc && state != LEDGER_NEW)
            rc = err_set(PERSIA_EARG, "update %llu of the stream of rank %u "
                         "is under way twice: every rank needs a stream of "
                         "its own", (unsigned long long)c->key.number,
                         c->m.part);
        for (uint32_t k = 0; rc && k < i; k++)
            (void)ledger_end(s->ledger, &((push_call *)parts[k])->key);
    }
    return rc;
}

/* Takes the pending step if it is whole; NULL if it is not. */
static void **take_whole_locked(ps_service *s, uint32_t *n, int *rc)
{
    *rc = PERSIA_OK;
    if (!sync_complete(&s->sync))
        return NULL;
    void **parts = sync_take(&s->sync, 1, n);
    *rc = begin_locked(s, parts, *n);
    if (*rc)
        sync_failed(&s->sync);
    return parts;
}

static void apply_step(ps_service *s, void **parts, uint32_t n, int rc)
{
    if (rc) {
        char text[256];
        snprintf(text, sizeof text, "%s", err_text());
        fail_parts(s, parts, n, rc, text);
        return;
    }
    atomic_fetch_sub(&s->parked_n, n);
    push_apply(s, (push_call **)parts, n);
    free(parts);
}

void wait_part(ps_service *s, push_call *c)
{
    void *replaced = NULL, **whole = NULL;
    uint32_t n = 0;
    int stale = 0, missed = 0, again = 0;
    int rc = PERSIA_OK, whole_rc = PERSIA_OK;

    if (!wait_room(s, PARTS_MAX)) {
        push_fail(s, c, PERSIA_ELIMIT, "too many requests wait");
        return;
    }
    pthread_mutex_lock(&s->wait_lock);
    enum ledger_state state = ledger_look(s->ledger, &c->key, &c->waiter);
    if (state == LEDGER_NEW && atomic_load(&s->closed))
        rc = err_set(PERSIA_EUNAVAILABLE, "the server is stopping");
    else if (state == LEDGER_NEW && service_is_stale(s, &c->m.caller))
        stale = 1; /* a restore drops what was added before */
    else if (state == LEDGER_NEW && c->m.step <= s->sync.missed)
        missed = 1;
    else if (state == LEDGER_NEW)
        rc = sync_add(&s->sync, c->m.step, c->m.part, c->m.parts, c,
                      &replaced);
    if (replaced) { /* a copy that was late may be the later one */
        const ledger_key *key = &((push_call *)replaced)->key;
        again = key->stream == c->key.stream &&
                key->number == c->key.number &&
                key->owner.client == c->key.owner.client;
    }
    if (state == LEDGER_NEW && !rc && !stale && !missed) {
        wake_locked(s, c->call->deadline);
        whole = take_whole_locked(s, &n, &whole_rc);
    }
    pthread_mutex_unlock(&s->wait_lock);

    if (state == LEDGER_BUSY)
        return;
    if (state != LEDGER_NEW || rc || stale || missed) {
        atomic_fetch_sub(&s->parked_n, 1);
        if (stale)
            push_reply_status(s, c, PUSH_STALE_LINEAGE);
        else if (missed)
            push_reply_status(s, c, PUSH_LOST);
        else if (rc)
            push_fail(s, c, rc, err_text());
        else
            push_reply_state(s, c, state);
        return;
    }
    if (replaced) {
        atomic_fetch_sub(&s->parked_n, 1);
        push_fail(s, replaced, again ? PERSIA_EUNAVAILABLE : PERSIA_ECLOSED,
                  "this part of the step came once more; the later one waits "
                  "now");
    }
    if (whole) {
        apply_step(s, whole, n, whole_rc);
        wait_go_on(s);
    }
}

int wait_open(ps_service *s, const wire_hello *m, wire_ledger *out)
{
    void **dropped = NULL;
    uint32_t n = 0;
    int taken;
    pthread_mutex_lock(&s->wait_lock);
    int rc = ledger_open(s->ledger, m->stream, service_owner(&m->caller),
                         &taken, out);
    for (uint32_t i = 0; i < s->sync.parts && taken && !rc && !dropped; i++) {
        const push_call *c = s->sync.part[i];
        if (c && c->key.stream == m->stream &&
            c->key.owner.client != m->caller.client)
            dropped = sync_take_one(&s->sync, i, &n);
    }
    for (uint32_t i = 0; i < REFUSED_MAX && taken && !rc; i++)
        if (s->refused[i].stream == m->stream)
            s->refused[i] = (refusal){0}; /* nobody asks for it any more */
    pthread_mutex_unlock(&s->wait_lock);
    if (dropped)
        fail_parts(s, dropped, n, PERSIA_EUNAVAILABLE, "another client has "
                   "opened the stream of this part of a step");
    if (rc == PERSIA_ECLOSED) {
        char text[256];
        snprintf(text, sizeof text, "%s", err_text());
        return err_set(rc, "rank %u of namespace '%s': %s", m->rank,
                       m->name_space, text);
    }
    return rc;
}

void wait_applied(ps_service *s, uint64_t step)
{
    pthread_mutex_lock(&s->wait_lock);
    sync_applied(&s->sync, step);
    pthread_mutex_unlock(&s->wait_lock);
}

void wait_failed(ps_service *s)
{
    pthread_mutex_lock(&s->wait_lock);
    sync_failed(&s->sync);
    pthread_mutex_unlock(&s->wait_lock);
}

void wait_note_refused(ps_service *s, const ledger_key *key, int code,
                       const char *text)
{
    pthread_mutex_lock(&s->wait_lock);
    refusal *r = &s->refused[s->refused_n++ % REFUSED_MAX];
    *r = (refusal){.stream = key->stream, .number = key->number,
                   .code = code};
    snprintf(r->text, sizeof r->text, "%s", text);
    pthread_mutex_unlock(&s->wait_lock);
}

int wait_was_refused(ps_service *s, const ledger_key *key, char *text,
                     size_t room)
{
    int code = PERSIA_OK;
    pthread_mutex_lock(&s->wait_lock);
    for (uint32_t i = 0; i < REFUSED_MAX && !code; i++) {
        const refusal *r = &s->refused[i];
        if (r->stream != key->stream || r->number != key->number)
            continue;
        code = r->code;
        snprintf(text, room, "%s", r->text);
    }
    pthread_mutex_unlock(&s->wait_lock);
    return code;
}

void wait_set_step(ps_service *s, uint64_t step)
{
    pthread_mutex_lock(&s->wait_lock);
    s->sync.step = step;
    s->sync.missed = 0;
    memset(s->refused, 0, sizeof s->refused); /* numbers are used again */
    pthread_mutex_unlock(&s->wait_lock);
}

/* Whether all parts of a step but one can wait at once for the last. */
static int check_world(const ps_service *s, const wire_leave *m)
{
    const uint32_t calls = atomic_load(&s->calls);
    if (!m->joins || !calls || m->world <= calls)
        return PERSIA_OK;
    return err_set(PERSIA_ELIMIT, "%u ranks train in step, but the server "
                   "has at most %u requests in hand at once, of which the "
                   "part of each rank is one: start it with more (--calls)",
                   m->world, calls);
}

/* Hands out what is void then, as sync_move() does. */
static void **move_locked(ps_service *s, const wire_leave *m, uint32_t *n)
{
    if (m->joins)
        s->world = m->world;
    void **dropped = sync_move(&s->sync, m->rank, m->world, (int)m->joins,
                               m->step, n);
    for (size_t i = 0; i < m->left_n && m->joins; i++)
        if (m->left[i] < m->world && m->left[i] != m->rank)
            sync_hear(&s->sync, (uint32_t)m->left[i]);
    return dropped;
}

int handle_leave(ps_service *s, rpc_call *call, wire_memory *memory,
                 answer *a)
{
    wire_leave m;
    uint32_t n = 0;
    void **dropped = NULL;
    int rc = wire_get_leave(call->request, call->request_n, memory, &m);
    if (!rc)
        rc = service_check_boot(s, &m.caller);
    if (!rc && m.world > SYNC_RANKS)
        rc = err_set(PERSIA_ELIMIT, "a world of %u ranks, at most %d can "
                     "train in step", m.world, SYNC_RANKS);
    if (!rc)
        rc = check_world(s, &m);
    if (rc)
        return rc;
    pthread_mutex_lock(&s->wait_lock);
    if (ledger_is_older(s->ledger, m.stream, service_owner(&m.caller))) {
        pthread_mutex_unlock(&s->wait_lock);
        return err_set(PERSIA_ECLOSED, "another process is rank %u of the "
                       "steps now", m.rank);
    }
    const sync_mover by = {m.caller.client, m.stream, m.move,
                           (int)m.joins};
    if (!sync_late(&s->sync, m.rank, &by))
        dropped = move_locked(s, &m, &n);
    int missed = n && ((push_call *)dropped[0])->m.step <= s->sync.missed;
    pthread_mutex_unlock(&s->wait_lock);
    if (missed) {
        fail_parts(s, dropped, n, PERSIA_ELOST, "");
    } else if (dropped) {
        char text[128];
        snprintf(text, sizeof text, "rank %u %s the steps of the job before "
                 "this step was whole", m.rank,
                 m.joins ? "joined" : "left");
        fail_parts(s, dropped, n, PERSIA_ECLOSED, text);
    }
    wait_go_on(s);
    wire_leave_reply reply = {.step = wait_step(s)};
    return wire_put_leave_reply(&a->o, &reply);
}

/* ---- pulls -------------------------------------------------------------- */

/* Pulls that wait must not keep out the updates that they wait for. */
static int pulls_fill_locked(const ps_service *s)
{
    const uint32_t calls = atomic_load(&s->calls);
    const uint32_t updates = s->world > calls / 2 ? s->world : calls / 2;
    return calls && s->parked_pulls + updates >= calls;
}

int wait_pull(ps_service *s, rpc_call *call, wire_memory *memory,
              const wire_pull *m)
{
    parked *one;
    int waits = 0, rc = PERSIA_OK;
    if (ledger_has(s->ledger, m->stream, m->after))
        return PERSIA_OK;
    one = wire_memory_take(memory, sizeof *one);
    if (!one)
        return PERSIA_ENOMEM;
    if (!wait_room(s, PARKED_MAX))
        return err_set(PERSIA_EUNAVAILABLE, "too many requests wait");
    uint64_t until = clock_ns() + PATIENCE_NS;
    if (until > call->deadline)
        until = call->deadline;
    *one = (parked){.call = call, .until = until, .memory = *memory, .m = *m};
    pthread_mutex_lock(&s->wait_lock);
    if (atomic_load(&s->closed)) {
        rc = err_set(PERSIA_EUNAVAILABLE, "the server is stopping");
    } else if (!ledger_has(s->ledger, m->stream, m->after)) {
        waits = !pulls_fill_locked(s);
        if (!waits)
            rc = err_set(PERSIA_EUNAVAILABLE, "too many requests wait");
    }
    if (waits) {
        one->next = s->parked;
        s->parked = one;
        s->parked_pulls++;
        wake_locked(s, until);
    }
    pthread_mutex_unlock(&s->wait_lock);
    if (waits)
        return TAKEN;
    atomic_fetch_sub(&s->parked_n, 1);
    return rc;
}

/* Takes the pulls whose time is up or, with 0, whose updates are through. */
static parked *take_pulls_locked(ps_service *s, uint64_t now)
{
    parked *taken = NULL, **at = &s->parked;
    while (*at) {
        parked *one = *at;
        if (now ? one->until > now
                : !ledger_has(s->ledger, one->m.stream, one->m.after)) {
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

static void answer_pulls(ps_service *s, parked *list, int code,
                         const char *text)
{
    while (list) {
        parked *one = list;
        list = one->next;
        wire_memory memory = one->memory; /* it lies in it */
        answer a = {.bulk = NULL};
        wire_out_init(&a.o);
        atomic_fetch_sub(&s->parked_n, 1);
        int rc = code ? err_set(code, "%s", text)
                      : pull_answer(s, &one->m, &memory, &a);
        service_answer(s, one->call, rc, &a);
        wire_memory_free(&memory);
    }
}

/* ---- going on ----------------------------------------------------------- */

void wait_go_on(ps_service *s)
{
    void **whole;
    do {
        uint32_t n = 0;
        int rc;
        pthread_mutex_lock(&s->wait_lock);
        parked *pulls = take_pulls_locked(s, 0);
        whole = take_whole_locked(s, &n, &rc);
        pthread_mutex_unlock(&s->wait_lock);
        answer_pulls(s, pulls, PERSIA_OK, NULL);
        if (whole)
            apply_step(s, whole, n, rc);
    } while (whole);
}

void wait_drop(ps_service *s, int code, const char *text)
{
    uint32_t n;
    pthread_mutex_lock(&s->wait_lock);
    parked *pulls = take_pulls_locked(s, UINT64_MAX);
    void **parts = sync_take(&s->sync, 0, &n);
    pthread_mutex_unlock(&s->wait_lock);
    answer_pulls(s, pulls, code, text);
    fail_parts(s, parts, n, code, text);
}

/* ---- the timer ---------------------------------------------------------- */

/* The earliest deadline of what waits. */
static uint64_t next_deadline_locked(const ps_service *s)
{
    uint64_t next = UINT64_MAX;
    for (const parked *p = s->parked; p; p = p->next)
        if (p->until < next)
            next = p->until;
    for (uint32_t i = 0; i < s->sync.parts; i++) {
        const push_call *c = s->sync.part[i];
        if (c && c->call->deadline < next)
            next = c->call->deadline;
    }
    return next;
}

/* Fails what has waited too long; all parts of a step if one of them has. */
static void fail_late(ps_service *s, uint64_t now)
{
    char missing[160], text[320];
    void **parts = NULL;
    uint32_t n = 0;

    pthread_mutex_lock(&s->wait_lock);
    parked *pulls = take_pulls_locked(s, now);
    unsigned long long step = s->sync.pending;
    if (next_deadline_locked(s) <= now) { /* of a part */
        sync_missing(&s->sync, missing, sizeof missing);
        parts = sync_take(&s->sync, 0, &n);
    }
    pthread_mutex_unlock(&s->wait_lock);
    answer_pulls(s, pulls, PERSIA_EUNAVAILABLE, "the update whose rows were "
                 "asked for did not come in time");
    if (!parts)
        return;
    snprintf(text, sizeof text, "step %llu: the part of %s did not come in "
             "time; nothing of it was applied, its parts may be sent again",
             step, missing);
    fail_parts(s, parts, n, PERSIA_ETIMEOUT, text);
}

static void *timer_main(void *arg)
{
    ps_service *s = arg;
    for (;;) {
        uint64_t now = clock_ns();
        pthread_mutex_lock(&s->wait_lock);
        s->wake_at = UINT64_MAX; /* others may set it again meanwhile */
        pthread_mutex_unlock(&s->wait_lock);
        fail_late(s, now);
        uint64_t first = snapshot_expire(s, now);
        uint64_t second = restore_expire(s, now);
        pthread_mutex_lock(&s->wait_lock);
        wake_locked(s, next_deadline_locked(s));
        wake_locked(s, first);
        wake_locked(s, second);
        while (!s->stop && s->wake_at > clock_ns()) {
            if (s->wake_at == UINT64_MAX) {
                pthread_cond_wait(&s->wake, &s->wait_lock);
                continue;
            }
            cond_wait_until(&s->wake, &s->wait_lock, s->wake_at);
        }
        int stop = s->stop;
        pthread_mutex_unlock(&s->wait_lock);
        if (stop)
            return NULL;
    }
}

int wait_start(ps_service *s)
{
    int rc = thread_start(&s->timer, timer_main, s, "persia-timer");
    s->timer_runs = !rc;
    return rc;
}

void wait_end(ps_service *s)
{
    if (!s->timer_runs)
        return;
    pthread_mutex_lock(&s->wait_lock);
    s->stop = 1;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->wait_lock);
    pthread_join(s->timer, NULL);
    s->timer_runs = 0;
}
