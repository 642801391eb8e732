/* The direct body: what lies below messages lies below it, too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "shard/private.h"

enum { DIM = 4, STREAM = 7 };

typedef struct one_shard {
    tables *p;
    shard *s;
    shard_ref *ref;
    uint64_t now, wake_at;
    persia_system system;
} one_shard;

/* What a call was answered. */
typedef struct answered {
    int n, code;
    char text[256];
    wire_push_reply push;
    wire_hello_reply hello;
} answered;

static uint64_t now(void *ctx)
{
    return ((one_shard *)ctx)->now;
}

static void wake(void *ctx, uint64_t at)
{
    ((one_shard *)ctx)->wake_at = at;
}

static void on_push(void *ctx, int rc, shard_reply *reply)
{
    answered *a = ctx;
    a->n++;
    a->code = rc;
    snprintf(a->text, sizeof a->text, "%s", rc ? persia_err_text() : "");
    if (!rc)
        a->push = *(const wire_push_reply *)reply->message;
    assert_null(reply->release);
}

static void on_hello(void *ctx, int rc, shard_reply *reply)
{
    answered *a = ctx;
    a->n++;
    a->code = rc;
    if (!rc)
        a->hello = *(const wire_hello_reply *)reply->message;
    if (reply->release)
        reply->release(reply);
}

static void on_code(void *ctx, int rc, shard_reply *reply)
{
    answered *a = ctx;
    a->n++;
    a->code = rc;
    if (reply->release)
        reply->release(reply);
}

static wire_hello_reply hello(one_shard *e, uint64_t client, uint64_t stream)
{
    answered a = {0};
    wire_hello m = {.caller = {.client = client, .incarnation = client},
                    .version = WIRE_VERSION,
                    .stream = stream};
    e->ref->ops->hello(e->ref, &m, UINT64_MAX, on_hello, &a);
    assert_int_equal(a.n, 1);
    assert_int_equal(a.code, PERSIA_OK);
    return a.hello;
}

static void declare(one_shard *e, const char *name)
{
    answered a = {0};
    wire_declare m = {.table = {.seed = 1,
                                .dim = DIM,
                                .optimizer = OPTIM_SGD,
                                .init = INIT_CONSTANT,
                                .admission = 1}};
    snprintf(m.table.name, sizeof m.table.name, "%s", name);
    e->ref->ops->declare(e->ref, &m, UINT64_MAX, on_code, &a);
    assert_int_equal(a.code, PERSIA_OK);
}

static void one_open(one_shard *e, int waits)
{
    tables_config tables = {.threads = 2};
    *e = (one_shard){.now = 1000, .wake_at = UINT64_MAX};
    e->system = *persia_system_get();
    e->system.ctx = e;
    e->system.now = now;
    persia_system_install(&e->system);
    shard_config c = {.shards = 1,
                      .boot = 1,
                      .lineage = 2,
                      .message_limit = UINT64_MAX,
                      .env = {.ctx = e, .wake = waits ? wake : NULL}};
    assert_int_equal(persia_tables_create(&tables, &e->p), PERSIA_OK);
    assert_int_equal(persia_shard_create(e->p, &c, &e->s), PERSIA_OK);
    assert_int_equal(persia_shard_direct(e->s, &e->ref), PERSIA_OK);
    assert_true(e->ref->direct);
    (void)hello(e, 1, STREAM);
    declare(e, "a");
    declare(e, "b");
}

static void one_close(one_shard *e)
{
    e->ref->ops->close(e->ref);
    persia_shard_destroy(e->s);
    persia_tables_destroy(e->p);
    persia_system_install(NULL);
}

/* A push to both tables: gradient g for each of the ids. */
typedef struct given {
    uint64_t ids[3];
    float grads[3 * DIM];
    push_part parts[2];
    push_job jobs[2];
    wire_push_table tables[2];
    wire_push m;
    shard_push a;
} given;

static void give(given *g, uint64_t client, uint64_t number, float grad)
{
    const optim_hyper sgd = {.kind = OPTIM_SGD, .lr = 1, .grad_scale = 1};
    *g = (given){.ids = {1, 2, 2}};
    for (int i = 0; i < 3 * DIM; i++)
        g->grads[i] = grad;
    for (uint32_t t = 0; t < 2; t++) {
        g->parts[t] = (push_part){.n = 3, .ids = g->ids, .grad = g->grads,
                                  .stride = DIM, .bags = 3};
        g->jobs[t] = (push_job){.parts = &g->parts[t], .parts_n = 1};
        g->tables[t] = (wire_push_table){.grads = {.no = t}, .hyper = sgd};
    }
    g->m = (wire_push){.caller = {.client = client, .incarnation = client,
                                  .boot = 1, .lineage = 2},
                       .stream = STREAM,
                       .number = number,
                       .parts = 1,
                       .tables = g->tables,
                       .tables_n = 2};
    g->a = (shard_push){.m = &g->m, .jobs = g->jobs};
}

static void push(one_shard *e, const given *g, answered *out)
{
    *out = (answered){0};
    e->ref->ops->push(e->ref, &g->a, e->now + 100, on_push, out);
}

static void pull(one_shard *e, uint64_t after, float out[2 * DIM], answered *a)
{
    static const uint64_t ids[2] = {1, 2};
    pull_job job = {.n = 2, .ids = ids, .out = out, .stride = DIM};
    wire_pull_table table = {.no = 1};
    wire_pull m = {.after = after, .stream = STREAM, .tables = &table,
                   .tables_n = 1};
    shard_pull arguments = {&m, &job};
    *a = (answered){0};
    e->ref->ops->pull(e->ref, &arguments, e->now + 100, on_code, a);
}

/* ---- tests -------------------------------------------------------------- */

static void an_update_is_applied_once(void **state)
{
    one_shard e;
    given g;
    answered a;
    float rows[2 * DIM];
    (void)state;
    one_open(&e, 0);
    give(&g, 1, 1, -1);
    push(&e, &g, &a);
    assert_int_equal(a.code, PERSIA_OK);
    assert_int_equal(a.push.status, PUSH_APPLIED);
    assert_int_equal(a.push.created, 4);
    assert_int_equal(g.jobs[0].created, 2);
    assert_int_equal(g.jobs[1].touched, 2);
    push(&e, &g, &a);
    assert_int_equal(a.push.status, PUSH_DUPLICATE);
    pull(&e, 1, rows, &a);
    assert_int_equal(a.code, PERSIA_OK);
    assert_true(rows[0] == 1 && rows[DIM] == 2);
    assert_int_equal(hello(&e, 1, STREAM).ledger.watermark, 1);
    assert_int_equal(hello(&e, 1, STREAM).updates, 1);
    one_close(&e);
}

static void an_older_owner_and_other_rows_are_refused(void **state)
{
    one_shard e;
    given g;
    answered a;
    (void)state;
    one_open(&e, 0);
    (void)hello(&e, 2, STREAM);
    give(&g, 1, 1, -1);
    push(&e, &g, &a);
    assert_int_equal(a.code, PERSIA_ECLOSED);
    give(&g, 2, 1, -1);
    g.m.caller.lineage = 3;
    push(&e, &g, &a);
    assert_int_equal(a.push.status, PUSH_STALE_LINEAGE);
    g.m.caller.boot = 3;
    push(&e, &g, &a);
    assert_int_equal(a.code, PERSIA_ESTALE);
    g.m.caller = (wire_caller){.client = 2, .incarnation = 2};
    g.m.stream = STREAM + 1;
    push(&e, &g, &a);
    assert_int_equal(a.code, PERSIA_ESTALE);
    assert_int_equal(hello(&e, 2, STREAM).updates, 0);
    one_close(&e);
}

/* One part by jobs, one as a message has it. */
static void parts_of_a_step_are_added(void **state)
{
    one_shard e;
    given g, h;
    answered first, second, a;
    float rows[2 * DIM];
    (void)state;
    one_open(&e, 1);
    (void)hello(&e, 1, STREAM + 1);
    give(&g, 1, 1, -1);
    give(&h, 1, 1, -10);
    h.m.stream = STREAM + 1;
    h.a.jobs = NULL;
    for (uint32_t t = 0; t < 2; t++) {
        h.tables[t].ids = h.ids;
        h.tables[t].grads = (wire_values){.no = t, .dim = DIM, .n = 3,
                                          .values = h.grads};
    }
    g.m.step = h.m.step = 1;
    g.m.parts = h.m.parts = 2;
    g.m.part = 1;
    push(&e, &g, &first);
    assert_int_equal(first.n, 0);
    assert_int_equal(e.wake_at, e.now + 100);
    push(&e, &h, &second);
    assert_int_equal(first.push.status, PUSH_APPLIED);
    assert_int_equal(second.push.status, PUSH_APPLIED);
    assert_int_equal(second.push.touched, 4);
    assert_int_equal(first.push.touched, 0);
    pull(&e, 0, rows, &a);
    assert_true(rows[0] == 11 && rows[DIM] == 22);
    assert_int_equal(hello(&e, 1, STREAM).updates, 1);
    one_close(&e);
}

/* A step whose parts wait while the one before is applied. */
typedef struct follower {
    one_shard *e;
    given part[2], again;
    answered got[2], got_again;
    given before;
    answered applied;
    pthread_t thread;
} follower;

/* Of the step before: one of the parts arrives once more. */
static void on_applied(void *ctx, int rc, shard_reply *reply)
{
    follower *f = ctx;
    on_push(&f->applied, rc, reply);
    push(f->e, &f->again, &f->got_again);
}

static void *apply_before(void *ctx)
{
    follower *f = ctx;
    f->e->ref->ops->push(f->e->ref, &f->before.a, f->e->now + 100, on_applied,
                         f);
    return NULL;
}

/* With the gate held. */
static void begin_step(follower *f)
{
    uint64_t applying = 0;
    assert_int_equal(pthread_create(&f->thread, NULL, apply_before, f), 0);
    while (!applying) {
        pthread_mutex_lock(&f->e->s->wait_lock);
        applying = f->e->s->sync.applying;
        pthread_mutex_unlock(&f->e->s->wait_lock);
    }
}

/* With the gate held. */
static int add_parts(void *ctx)
{
    follower *f = ctx;
    begin_step(f);
    for (int i = 0; i < 2; i++) {
        push(f->e, &f->part[i], &f->got[i]);
        assert_int_equal(f->got[i].n, 0);
    }
    return PERSIA_OK;
}

static void on_leave(void *ctx, int rc, shard_reply *reply)
{
    assert_int_equal(rc, PERSIA_OK);
    *(uint64_t *)ctx = ((const wire_leave_reply *)reply->message)->step;
    reply->release(reply);
}

/* With the gate held. */
static int join_between(void *ctx)
{
    follower *f = ctx;
    const wire_leave m = {.caller = {2, 1, 1, 2, 0}, .world = 1, .joins = 1};
    uint64_t last = 0;
    begin_step(f);
    f->e->ref->ops->leave(f->e->ref, &m, UINT64_MAX, on_leave, &last);
    assert_int_equal(last, 1);
    return PERSIA_OK;
}

/* What joins begins behind a step of those before that is being applied. */
static void a_rank_joins_while_a_step_is_applied(void **state)
{
    one_shard e;
    follower f = {.e = &e};
    (void)state;
    one_open(&e, 1);
    give(&f.before, 1, 1, -1);
    f.before.m.step = 1;
    give(&f.again, 2, 1, -1); /* once that is answered */
    assert_int_equal(persia_tables_between(e.p, join_between, &f), PERSIA_OK);
    pthread_join(f.thread, NULL);
    one_close(&e);
}

/* Each part of a step that cannot begin is answered why, also where one of
 * them has taken the place of an earlier copy. */
static void a_step_that_cannot_begin_says_why(void **state)
{
    one_shard e;
    follower f = {.e = &e};
    (void)state;
    one_open(&e, 1);
    give(&f.before, 1, 1, -1);
    f.before.m.step = 1;
    for (uint32_t i = 0; i < 2; i++) { /* both have one stream: refused */
        give(&f.part[i], 1, 2, -1);
        f.part[i].m.step = 2;
        f.part[i].m.parts = 2;
        f.part[i].m.part = i;
    }
    give(&f.again, 1, 2, -1);
    f.again.m = f.part[0].m;
    assert_int_equal(persia_tables_between(e.p, add_parts, &f), PERSIA_OK);
    pthread_join(f.thread, NULL);
    assert_int_equal(f.applied.push.status, PUSH_APPLIED);
    assert_int_equal(f.got[0].code, PERSIA_EUNAVAILABLE);
    assert_int_equal(f.got[1].code, PERSIA_EARG);
    assert_int_equal(f.got_again.code, PERSIA_EARG);
    assert_string_equal(f.got[1].text, f.got_again.text);
    assert_string_not_equal(f.got[1].text, f.got[0].text);
    one_close(&e);
}

/* Two parts of an update; the first one's stream moves past it meanwhile. */
typedef struct meeting {
    one_shard *e;
    given part[2];
    answered got[2];
    _Atomic(int) sent;
    pthread_t thread;
} meeting;

static void meeting_make(meeting *x, one_shard *e, int group)
{
    *x = (meeting){.e = e};
    for (uint32_t i = 0; i < 2; i++) {
        give(&x->part[i], 1, 1, i ? -10 : -1);
        x->part[i].m.stream = STREAM + i;
        x->part[i].m.step = !group;
        x->part[i].m.group = group ? 77 : 0;
        x->part[i].m.parts = 2;
        x->part[i].m.part = i;
    }
}

static void *send_both(void *ctx)
{
    meeting *x = ctx;
    for (int i = 0; i < 2; i++) {
        atomic_store(&x->sent, i + 1);
        push(x->e, &x->part[i], &x->got[i]);
    }
    return NULL;
}

/* The stream says that this update is through, or will never be made. */
static void settle_first(const meeting *x)
{
    const ledger_key later = {STREAM, 2, 1, {1, 1}, 0};
    ledger_commit(x->e->s->ledger, &later);
}

/* With the gate held: once both parts are in flight. */
static int settle_in_flight(void *ctx)
{
    meeting *x = ctx;
    const wire_push *m = &x->part[1].m;
    const ledger_key second = {STREAM + 1, 1, 0, {1, 1},
                               m->group ? m->group : m->step};
    assert_int_equal(pthread_create(&x->thread, NULL, send_both, x), 0);
    while (atomic_load(&x->sent) < 2 ||
           ledger_look(x->e->s->ledger, &second, NULL) != LEDGER_BUSY)
        sched_yield();
    settle_first(x);
    return PERSIA_OK;
}

static void a_settled_part_does_not_answer_for_others(void **state)
{
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        const int group = kind & 1, in_flight = kind & 2;
        one_shard e;
        meeting x;
        answered a;
        float rows[2 * DIM];
        one_open(&e, 1);
        (void)hello(&e, 1, STREAM + 1);
        meeting_make(&x, &e, group);
        if (in_flight) {
            assert_int_equal(persia_tables_between(e.p, settle_in_flight, &x),
                             PERSIA_OK);
            pthread_join(x.thread, NULL);
        } else {
            push(&e, &x.part[0], &x.got[0]);
            assert_int_equal(x.got[0].n, 0);
            settle_first(&x);
            push(&e, &x.part[1], &x.got[1]);
        }
        for (int i = 0; i < 2; i++) {
            assert_int_equal(x.got[i].n, 1);
            assert_int_equal(x.got[i].code, PERSIA_OK);
        }
        assert_int_equal(x.got[0].push.status, PUSH_DUPLICATE);
        assert_int_equal(x.got[1].push.status, PUSH_APPLIED);
        pull(&e, 0, rows, &a);
        assert_true(rows[0] == 10 && rows[DIM] == 20);
        push(&e, &x.part[1], &a);
        assert_int_equal(a.push.status, PUSH_DUPLICATE);
        one_close(&e);
    }
}

/* A part of a process that was replaced: the others are sent back. */
static void a_part_of_an_older_owner_does_not_answer_for_others(void **state)
{
    one_shard e;
    meeting x;
    answered a;
    float rows[2 * DIM];
    (void)state;
    one_open(&e, 1);
    (void)hello(&e, 1, STREAM + 1);
    meeting_make(&x, &e, 1);
    push(&e, &x.part[0], &x.got[0]);
    (void)hello(&e, 2, STREAM);
    push(&e, &x.part[1], &x.got[1]);
    assert_int_equal(x.got[0].code, PERSIA_ECLOSED);
    assert_int_equal(x.got[1].code, PERSIA_EUNAVAILABLE);
    pull(&e, 0, rows, &a);
    assert_true(rows[0] == 0 && rows[DIM] == 0);
    assert_int_equal(hello(&e, 1, STREAM + 1).ledger.watermark, 0);
    one_close(&e);
}

/* A write of rows, or of tables, that meets a restore. */
typedef struct writer {
    one_shard *e;
    wire_rows m;
    answered a;
    _Atomic(int) done;
    pthread_t thread;
} writer;

static void *write_rows(void *ctx)
{
    writer *w = ctx;
    const wire_caller caller = {.client = 1, .boot = 1, .lineage = 2};
    const wire_declare d = {.caller = caller,
                            .table = {.name = "new", .dim = DIM,
                                      .admission = 1}};
    w->m.caller = caller;
    if (w->m.no)
        w->e->ref->ops->declare(w->e->ref, &d, UINT64_MAX, on_code, &w->a);
    else
        w->e->ref->ops->put_rows(w->e->ref, &w->m, UINT64_MAX, on_code,
                                 &w->a);
    atomic_store(&w->done, 1);
    return NULL;
}

/* Between two updates, as a restore is committed. */
static int restore_meanwhile(void *ctx)
{
    writer *w = ctx;
    const struct timespec moment = {.tv_nsec = 5000000};
    assert_int_equal(pthread_create(&w->thread, NULL, write_rows, w), 0);
    /* Enough for one that does not wait. */
    for (int i = 0; i < 20 && !atomic_load(&w->done); i++)
        nanosleep(&moment, NULL);
    atomic_store(&w->e->s->lineage, 3);
    return PERSIA_OK;
}

static void writes_do_not_pass_a_restore(void **state)
{
    static const uint64_t some[2] = {1, 5};
    static const float sevens[2 * DIM] = {7, 7, 7, 7, 7, 7, 7, 7};
    const wire_rows writes[] = {
        {.n = 2, .ids = some, .dim = DIM, .vectors = sevens},
        {.n = 2, .ids = some, .erase = 1},
        {.clear = 1},
        {.drop = 1},
        {.no = 1}, /* a Declare */
    };
    (void)state;
    for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
        one_shard e;
        given g;
        answered a;
        float rows[2 * DIM];
        table_stats stats;
        one_open(&e, 1);
        give(&g, 1, 1, -1);
        push(&e, &g, &a);
        assert_int_equal(a.push.status, PUSH_APPLIED);
        writer w = {.e = &e, .m = writes[i]};
        assert_int_equal(persia_tables_between(e.p, restore_meanwhile, &w),
                         PERSIA_OK);
        pthread_join(w.thread, NULL);
        assert_int_equal(w.a.n, 1);
        assert_int_equal(w.a.code, PERSIA_ESTALE);
        pull(&e, 0, rows, &a);
        persia_table_get_stats(persia_tables_table(e.p, 0), &stats);
        assert_int_equal(stats.rows, 2);
        assert_true(rows[0] == 1 && rows[DIM] == 2);
        assert_false(persia_tables_dropped(e.p, 0));
        assert_int_equal(persia_tables_tables(e.p), 2);
        one_close(&e);
    }
}

static void what_waits_ends(void **state)
{
    one_shard e;
    given g;
    answered part, lookup;
    float rows[2 * DIM];
    (void)state;
    one_open(&e, 0);
    pull(&e, 1, rows, &lookup); /* there is no tick */
    assert_int_equal(lookup.code, PERSIA_EUNAVAILABLE);
    one_close(&e);

    one_open(&e, 1);
    give(&g, 1, 1, -1);
    g.m.step = 1;
    g.m.parts = 2;
    push(&e, &g, &part);
    assert_int_equal(persia_shard_tick(e.s, e.now), e.now + 100);
    assert_int_equal(part.n, 0);
    assert_int_equal(persia_shard_tick(e.s, e.now + 100), UINT64_MAX);
    assert_int_equal(part.code, PERSIA_ETIMEOUT);
    push(&e, &g, &part);
    assert_int_equal(part.n, 0);

    shard_ref *other;
    assert_int_equal(persia_shard_direct(e.s, &other), PERSIA_OK);
    other->ops->close(other);
    assert_int_equal(part.n, 0);
    persia_shard_refuse(e.ref, PERSIA_EUNAVAILABLE, "it ends");
    assert_int_equal(part.code, PERSIA_EUNAVAILABLE);
    push(&e, &g, &part);
    assert_int_equal(part.code, PERSIA_EUNAVAILABLE);
    one_close(&e);
}

/* Without jobs the answer is packed, and the caller's until it is released. */
static void on_packed(void *ctx, int rc, shard_reply *reply)
{
    assert_int_equal(rc, PERSIA_OK);
    assert_non_null(reply->release);
    *(shard_reply *)ctx = *reply;
}

static void a_pull_waits_for_an_update(void **state)
{
    one_shard e;
    given g;
    answered a, lookup;
    float rows[2 * DIM];
    const uint64_t id = 2;
    shard_reply packed = {0};
    wire_pull_table table = {.no = 0, .n = 1, .ids = &id};
    wire_pull m = {.tables = &table, .tables_n = 1};
    (void)state;
    one_open(&e, 1);
    pull_job job = {.n = 1, .ids = &id, .out = rows, .stride = DIM};
    wire_pull behind = {.after = 1, .stream = STREAM, .tables = &table,
                        .tables_n = 1};
    const shard_pull arguments = {&behind, &job};
    lookup = (answered){0};
    e.ref->ops->pull(e.ref, &arguments, UINT64_MAX, on_code, &lookup);
    assert_int_equal(lookup.n, 0);
    give(&g, 1, 1, -1);
    push(&e, &g, &a);
    assert_int_equal(lookup.n, 1);
    assert_int_equal(lookup.code, PERSIA_OK);
    assert_true(rows[0] == 2);

    e.ref->ops->pull(e.ref, &(shard_pull){&m, NULL}, UINT64_MAX, on_packed,
                     &packed);
    const wire_pull_reply *reply = packed.message;
    assert_int_equal(reply->tables[0].n, 1);
    assert_true(((const float *)reply->tables[0].values)[0] == 2);
    packed.release(&packed);

    e.ref->ops->snapshot(e.ref, &(wire_snapshot){0}, UINT64_MAX, on_code,
                         &lookup);
    assert_int_equal(lookup.code, PERSIA_EARG);
    one_close(&e);
}

/* Threads that all send the same updates, through refs of their own. */
enum { SENDERS = 4, UPDATES = 300 };

typedef struct race {
    one_shard e;
    _Atomic(uint32_t) applied[UPDATES + 1];
    _Atomic(int) wrong;
} race;

typedef struct sent {
    race *r;
    uint64_t number;
    _Atomic(int) done;
} sent;

static void on_sent(void *ctx, int rc, shard_reply *reply)
{
    sent *one = ctx;
    const wire_push_reply *m = reply->message;
    if (rc || (m->status != PUSH_APPLIED && m->status != PUSH_DUPLICATE))
        atomic_store(&one->r->wrong, 1);
    else if (m->status == PUSH_APPLIED)
        atomic_fetch_add(&one->r->applied[one->number], 1);
    atomic_store(&one->done, 1); /* the last that is done with it */
}

static void *send_all(void *ctx)
{
    race *r = ctx;
    given g;
    shard_ref *ref;
    if (persia_shard_direct(r->e.s, &ref)) {
        atomic_store(&r->wrong, 1);
        return NULL;
    }
    for (uint64_t i = 1; i <= UPDATES; i++) {
        sent one = {.r = r, .number = i};
        give(&g, 1, i, -1);
        ref->ops->push(ref, &g.a, UINT64_MAX, on_sent, &one);
        while (!atomic_load(&one.done))
            sched_yield();
    }
    ref->ops->close(ref);
    return NULL;
}

static void copies_at_once_are_applied_once(void **state)
{
    static race r;
    pthread_t senders[SENDERS];
    answered a;
    float rows[2 * DIM];
    (void)state;
    one_open(&r.e, 0);
    for (int i = 0; i < SENDERS; i++)
        assert_int_equal(pthread_create(&senders[i], NULL, send_all, &r), 0);
    for (int i = 0; i < SENDERS; i++)
        pthread_join(senders[i], NULL);
    assert_false(r.wrong);
    for (int i = 1; i <= UPDATES; i++) /* copies have the first's answer */
        assert_true(r.applied[i] >= 1);
    assert_int_equal(hello(&r.e, 1, STREAM).updates, UPDATES);
    pull(&r.e, UPDATES, rows, &a);
    assert_true(rows[0] == UPDATES && rows[DIM] == 2 * UPDATES);
    one_close(&r.e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_update_is_applied_once),
        cmocka_unit_test(an_older_owner_and_other_rows_are_refused),
        cmocka_unit_test(parts_of_a_step_are_added),
        cmocka_unit_test(a_step_that_cannot_begin_says_why),
        cmocka_unit_test(a_rank_joins_while_a_step_is_applied),
        cmocka_unit_test(a_settled_part_does_not_answer_for_others),
        cmocka_unit_test(a_part_of_an_older_owner_does_not_answer_for_others),
        cmocka_unit_test(writes_do_not_pass_a_restore),
        cmocka_unit_test(what_waits_ends),
        cmocka_unit_test(a_pull_waits_for_an_update),
        cmocka_unit_test(copies_at_once_are_applied_once),
    };
    return cmocka_run_group_tests_name("shard_direct", tests, NULL, NULL);
}
