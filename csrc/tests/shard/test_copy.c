/* A shard that goes to another server while it changes: at the end that one
 * has the same rows, and all that lies beside them. */
#include "tests/table/help.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shard/private.h"

enum { STREAMS = 3, IDS = 3000, MOST = 200, DIM = 6 };

typedef struct end {
    tables *p;
    shard *s;
    shard_ref *ref;
} end;

typedef struct move {
    end from, to;
    rng r;
    uint64_t draw;
} move;

static end end_make(uint64_t boot, uint64_t limit)
{
    const tables_config tables = {.threads = 2, .memory_limit = limit};
    const shard_config c = {.shards = 1,
                            .boot = boot,
                            .lineage = 5,
                            .message_limit = UINT64_MAX};
    end e;
    assert_int_equal(persia_tables_create(&tables, &e.p), PERSIA_OK);
    assert_int_equal(persia_shard_create(e.p, &c, &e.s), PERSIA_OK);
    assert_int_equal(persia_shard_direct(e.s, &e.ref), PERSIA_OK);
    return e;
}

static void end_free(end *e)
{
    e->ref->ops->close(e->ref);
    persia_shard_destroy(e->s);
    persia_tables_destroy(e->p);
}

/* ---- tables ------------------------------------------------------------- */

enum { PLAIN, LRU, LFU, TTL, SIGHTINGS, FULL, KINDS };

static table_spec spec_of(int kind)
{
    table_config c = config_of(DIM, OPTIM_ADAGRAD);
    snprintf(c.name, sizeof c.name, "t%d", kind);
    switch (kind) {
    case LRU:
        c.dtype = VECTOR_BF16;
        c.optimizer = OPTIM_ADAM;
        c.capacity = 500;
        c.full = FULL_EVICT_LRU;
        break;
    case LFU:
        c.dtype = VECTOR_INT8;
        c.optimizer = OPTIM_SGD;
        c.capacity = 300;
        c.full = FULL_EVICT_LFU;
        break;
    case TTL:
        c.optimizer = OPTIM_FTRL;
        c.full = FULL_EVICT_TTL;
        c.evict_updates = 30;
        c.capacity = 2000;
        break;
    case SIGHTINGS:
        c.admit = ADMIT_SIGHTINGS;
        c.sightings = 2;
        c.sightings_kept = 10000;
        break;
    case FULL:
        c.capacity = IDS;
        break;
    }
    return c.spec;
}

static void declare(end *e, int kind)
{
    const wire_declare m = {.table = spec_of(kind)};
    wire_declare_reply reply;
    assert_int_equal(declare_answer(e->s, &m, NULL, &reply), PERSIA_OK);
}

static table *table_no(const end *e, uint32_t no)
{
    return persia_tables_table(e->p, no);
}

/* ---- what changes a shard ----------------------------------------------- */

/* Few of them often. */
static size_t some_ids(rng *r, uint64_t *ids)
{
    const size_t n = 1 + rng_below(r, MOST);
    for (size_t i = 0; i < n; i++)
        ids[i] = rng_below(r, 1 + rng_below(r, IDS));
    return n;
}

static void change_push(move *m, table *t)
{
    uint64_t ids[MOST];
    float grads[MOST * DIM];
    const size_t n = some_ids(&m->r, ids);
    const optim_args args = args_of(persia_table_get_config(t)->optimizer);
    for (size_t i = 0; i < n * DIM; i++)
        grads[i] = rng_float(&m->r);
    (void)push_one(persia_tables_sched(m->from.p), t, &args, n, ids, grads,
                   ++m->draw);
}

static void change_set(move *m, table *t)
{
    uint64_t ids[MOST];
    float vectors[MOST * DIM];
    const size_t n = some_ids(&m->r, ids) / 4 + 1;
    for (size_t i = 0; i < n * DIM; i++)
        vectors[i] = rng_float(&m->r);
    assert_int_equal(persia_table_set(t, n, ids, vectors, NULL), PERSIA_OK);
}

static void change_erase(move *m, table *t)
{
    uint64_t ids[MOST], erased;
    const size_t n = some_ids(&m->r, ids) / 2 + 1;
    assert_int_equal(persia_table_erase(t, n, ids, &erased), PERSIA_OK);
}

static void change_ledger(move *m)
{
    const uint64_t stream = 1 + rng_below(&m->r, STREAMS);
    const ledger_owner owner = {1, stream};
    wire_ledger entry;
    int taken;
    assert_int_equal(
        ledger_open(m->from.s->ledger, stream, owner, &taken, &entry), 0);
    const ledger_key key = {.stream = stream,
                            .number = entry.watermark + 1 +
                                      rng_below(&m->r, 100),
                            .owner = owner};
    if (ledger_look(m->from.s->ledger, &key, NULL) == LEDGER_NEW)
        ledger_commit(m->from.s->ledger, &key);
}

static void change(move *m)
{
    const uint32_t n = persia_tables_tables(m->from.p);
    table *t = table_no(&m->from, (uint32_t)rng_below(&m->r, n));
    const uint64_t what = rng_below(&m->r, 100);
    if (what < 70)
        change_push(m, t);
    else if (what < 80)
        change_set(m, t);
    else if (what < 90)
        change_erase(m, t);
    else if (what < 98)
        change_ledger(m);
    else if (what == 98)
        assert_int_equal(persia_table_clear(t), PERSIA_OK);
    else if (n < KINDS)
        declare(&m->from, (int)n);
}

/* ---- moving ------------------------------------------------------------- */

/* As a message; 0: the round has ended. */
static int send_part(move *m, int last)
{
    uint64_t rows;
    int ended;
    wire_move part = {.verb = MOVE_PREPARE, .name_space = "n"}, got;
    wire_memory memory;
    wire_out o;
    if (persia_shard_copy_next(m->from.s, last, &rows, &ended))
        fail_msg("%s", persia_err_text());
    if (ended)
        return 0;
    persia_shard_copy_put(m->from.s, &part);
    persia_wire_out_init(&o);
    persia_wire_memory_init(&memory);
    assert_int_equal(persia_wire_put_move(&o, &part), PERSIA_OK);
    const size_t n = o.bytes;
    void *bytes = aligned_alloc(64, (n + 63) / 64 * 64);
    persia_wire_out_copy(&o, bytes);
    persia_wire_out_free(&o);
    assert_int_equal(persia_wire_get_move(bytes, n, &memory, &got), PERSIA_OK);
    if (persia_shard_arrive(m->to.s, &got))
        fail_msg("%s", persia_err_text());
    persia_wire_memory_free(&memory);
    free(bytes);
    return 1;
}

static void send_round(move *m, int last)
{
    while (send_part(m, last))
        ;
}

static void assert_same_table(move *m, uint32_t no)
{
    table *a = table_no(&m->from, no), *b = table_no(&m->to, no);
    const table_config *c = persia_table_get_config(a);
    const size_t words = persia_table_sightings(c) * IDS_SLOTS;
    dump x = dump_table(a), y = dump_table(b);
    dump_equal(&x, &y, c->name);
    assert_int_equal(stats_of(a).rows, stats_of(b).rows);
    assert_int_equal(stats_of(a).pushes, stats_of(b).pushes);
    dump_free(&x);
    dump_free(&y);
    if (!words)
        return;
    uint32_t *w = malloc(2 * words * sizeof *w);
    persia_table_read_sightings(a, 0, IDS_SLOTS, w);
    persia_table_read_sightings(b, 0, IDS_SLOTS, w + words);
    assert_memory_equal(w, w + words, words * sizeof *w);
    free(w);
}

static void assert_same(move *m)
{
    const uint32_t n = persia_tables_tables(m->from.p);
    assert_int_equal(persia_tables_tables(m->to.p), n);
    for (uint32_t i = 0; i < n; i++)
        assert_same_table(m, i);
    for (uint64_t stream = 1; stream <= STREAMS; stream++) {
        wire_ledger a, b;
        ledger_read(m->from.s->ledger, stream, &a);
        ledger_read(m->to.s->ledger, stream, &b);
        assert_memory_equal(&a, &b, sizeof a);
    }
    assert_int_equal(persia_tables_updates(m->from.p),
                     persia_tables_updates(m->to.p));
    assert_int_equal(persia_tables_t(m->from.p), persia_tables_t(m->to.p));
    assert_int_equal(atomic_load(&m->from.s->lineage),
                     atomic_load(&m->to.s->lineage));
}

static move move_make(uint64_t seed)
{
    move m = {.from = end_make(1, 0), .to = end_make(2, 0), .r = {seed}};
    return m;
}

static void move_free(move *m)
{
    persia_shard_copy_end(m->from.s);
    end_free(&m->from);
    end_free(&m->to);
}

/* Whatever happens between two parts. */
static void the_same_at_the_end(void **state)
{
    enum { SEEDS = SANITIZED ? 12 : 60 };
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        move m = move_make(seed);
        for (int i = 0; i < KINDS - 1; i++)
            declare(&m.from, i);
        for (uint64_t i = rng_below(&m.r, 200); i; i--)
            change(&m);
        assert_int_equal(persia_shard_copy_begin(m.from.s), PERSIA_OK);
        for (uint64_t i = 20 + rng_below(&m.r, 300); i; i--)
            if (rng_below(&m.r, 3))
                change(&m);
            else
                (void)send_part(&m, 0);
        persia_tables_set_t(m.from.p, 77);
        persia_tables_set_updates(m.from.p, 78);
        assert_int_equal(persia_shard_hold(m.from.s, SHARD_HELD), PERSIA_OK);
        send_round(&m, 0);
        send_round(&m, 1);
        assert_int_equal(persia_shard_copy_left(m.from.s), 0);
        assert_same(&m);
        /* It changes on as the first one would have. */
        table *t = table_no(&m.to, LRU);
        assert_true(stats_of(t).rows <= 500);
        change_push(&m, t);
        assert_true(stats_of(t).rows <= 500);
        move_free(&m);
    }
}

/* A table of several stripes: where one has sent its rows, and they are erased
 * and others are made in another stripe, more than the capacity arrive. */
static void at_the_capacity(void **state)
{
    enum { CAPACITY = 1 << 16, N = 4096, ROUNDS = 20 };
    static uint64_t ids[N];
    static float grads[N * DIM];
    const optim_args args = args_of(OPTIM_SGD);
    wire_declare d = {.table = spec_of(LRU)};
    wire_declare_reply reply;
    uint64_t erased;
    move m = move_make(7);
    (void)state;
    d.table.optimizer = OPTIM_SGD;
    d.table.capacity = CAPACITY;
    assert_int_equal(declare_answer(m.from.s, &d, NULL, &reply), PERSIA_OK);
    table *t = table_no(&m.from, 0);
    assert_int_equal(persia_shard_copy_begin(m.from.s), PERSIA_OK);
    for (int i = 0; i < 2 * CAPACITY / N + ROUNDS; i++) {
        ids_fill(ids, (uint64_t)i * N, N);
        (void)push_one(persia_tables_sched(m.from.p), t, &args, N, ids, grads,
                       ++m.draw);
        for (uint64_t k = rng_below(&m.r, 12); k; k--)
            (void)send_part(&m, 0);
        if (i % 2 == 0)
            continue;
        ids_fill(ids, (uint64_t)(i - 1) * N, N);
        assert_int_equal(persia_table_erase(t, N, ids, &erased), PERSIA_OK);
    }
    assert_true(stats_of(t).evicted > 0);
    send_round(&m, 0);
    assert_int_equal(persia_shard_hold(m.from.s, SHARD_HELD), PERSIA_OK);
    send_round(&m, 1);
    assert_same(&m);
    move_free(&m);
}

typedef struct pusher {
    move *m;
    atomic_int over;
} pusher;

static void *push_on(void *arg)
{
    pusher *p = arg;
    while (!atomic_load(&p->over))
        change_push(p->m, table_no(&p->m->from,
                                   (uint32_t)rng_below(&p->m->r, 4)));
    return NULL;
}

static void while_updates_run(void **state)
{
    move m = move_make(3);
    pusher p = {.m = &m};
    pthread_t thread;
    (void)state;
    for (int i = 0; i < KINDS; i++)
        declare(&m.from, i);
    assert_int_equal(persia_shard_copy_begin(m.from.s), PERSIA_OK);
    assert_int_equal(pthread_create(&thread, NULL, push_on, &p), 0);
    for (int i = 0; i < (SANITIZED ? 20 : 100); i++)
        send_round(&m, 0);
    atomic_store(&p.over, 1);
    pthread_join(thread, NULL);
    assert_int_equal(persia_shard_hold(m.from.s, SHARD_HELD), PERSIA_OK);
    send_round(&m, 1);
    assert_same(&m);
    move_free(&m);
}

/* ---- what goes wrong ---------------------------------------------------- */

static int drop_first(void *ctx)
{
    return persia_tables_drop(ctx, 0);
}

/* What the last round ends with. */
static int end_of_last(move *m)
{
    uint64_t rows;
    int rc, ended;
    do
        rc = persia_shard_copy_next(m->from.s, 1, &rows, &ended);
    while (!rc && !ended);
    return rc;
}

static void tables_that_were_dropped(void **state)
{
    (void)state;
    for (int before = 0; before < 2; before++) {
        move m = move_make(4);
        declare(&m.from, PLAIN);
        declare(&m.from, LRU);
        if (before)
            persia_tables_between(m.from.p, drop_first, m.from.p);
        assert_int_equal(persia_shard_copy_begin(m.from.s), PERSIA_OK);
        send_round(&m, 0);
        assert_int_equal(end_of_last(&m), PERSIA_EARG); /* it is not held */
        if (!before)
            persia_tables_between(m.from.p, drop_first, m.from.p);
        assert_int_equal(persia_shard_hold(m.from.s, SHARD_HELD), PERSIA_OK);
        if (before) {
            send_round(&m, 1);
            assert_same(&m);
        } else {
            assert_int_equal(end_of_last(&m), PERSIA_EUNAVAILABLE);
        }
        move_free(&m);
    }
}

static void parts_that_do_not_fit(void **state)
{
    enum { N = 2 };
    uint64_t ids[N] = {1, 2}, pushes[1] = {0};
    float vectors[N * DIM] = {0}, accumulators[N * DIM] = {0};
    uint32_t clocks[N] = {1, 1};
    move m = move_make(5);
    (void)state;
    declare(&m.to, PLAIN);
    const wire_piece good = {.n = N,
                             .ids = ids,
                             .vector_bytes = DIM * sizeof(float),
                             .vectors = (const uint8_t *)vectors,
                             .state_floats = persia_table_state_floats(
                                 table_no(&m.to, 0)),
                             .state = accumulators,
                             .clocks = clocks};
    wire_handover h = {.pushes = pushes, .pushes_n = 0};
    for (int i = 0; i < 8; i++) {
        wire_piece p = good;
        wire_move part = {.pieces = &p, .pieces_n = 1};
        wire_sightings s = {.n = 1, .words = clocks};
        switch (i) {
        case 0: p.no = 1; break;
        case 1: p.vector_bytes--; break;
        case 2: p.state_floats++; break;
        case 3: p.clocks = NULL; break;
        case 4: p.vectors = NULL; break;
        case 5: p.reset = 1; p.stripes = 3; break;
        case 6: part = (wire_move){.handover = &h, .handover_n = 1}; break;
        case 7: part = (wire_move){.sightings = &s, .sightings_n = 1}; break;
        }
        const int rc = persia_shard_arrive(m.to.s, &part);
        assert_true(rc == PERSIA_EARG || rc == PERSIA_EMISMATCH);
        assert_int_equal(stats_of(table_no(&m.to, 0)).rows, 0);
    }
    wire_piece p = good;
    const wire_move part = {.pieces = &p, .pieces_n = 1};
    assert_int_equal(persia_shard_arrive(m.to.s, &part), PERSIA_OK);
    assert_int_equal(stats_of(table_no(&m.to, 0)).rows, N);
    move_free(&m);
}

static void no_memory_at_the_other_server(void **state)
{
    move m = move_make(6);
    wire_move part = {.verb = MOVE_PREPARE};
    uint64_t rows;
    int ended, rc = PERSIA_OK;
    (void)state;
    end_free(&m.to);
    m.to = end_make(2, 64 << 10);
    declare(&m.from, PLAIN);
    for (int i = 0; i < 100; i++)
        change_push(&m, table_no(&m.from, 0));
    assert_int_equal(persia_shard_copy_begin(m.from.s), PERSIA_OK);
    for (;;) {
        assert_int_equal(persia_shard_copy_next(m.from.s, 0, &rows, &ended),
                         PERSIA_OK);
        if (ended || rc)
            break;
        persia_shard_copy_put(m.from.s, &part);
        rc = persia_shard_arrive(m.to.s, &part);
    }
    assert_int_equal(rc, PERSIA_ELIMIT);
    move_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_at_the_end),
        cmocka_unit_test(at_the_capacity),
        cmocka_unit_test(while_updates_run),
        cmocka_unit_test(tables_that_were_dropped),
        cmocka_unit_test(parts_that_do_not_fit),
        cmocka_unit_test(no_memory_at_the_other_server),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
