/* client_keep: groups of lookups serve the updates with the same ids, and no
 * others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "client/remote.h"

enum { UNITS = 3, MOST = 9000, SHARDS = 3 };

typedef struct batch {
    group_segment segments[UNITS + 1];
    uint32_t tables[UNITS];
    uint64_t ids[UNITS + 1][MOST];
    group_batch b;
} batch;

/* Two features of the first table, one of the others. */
static void make(batch *x, uint64_t seed)
{
    static const size_t sizes[UNITS + 1] = {MOST, 5, 0, 4097};
    for (uint32_t i = 0; i <= UNITS; i++) {
        for (size_t k = 0; k < sizes[i]; k++)
            x->ids[i][k] = id_hash(seed + k) % 1000;
        x->segments[i] = (group_segment){i ? i - 1 : 0, sizes[i], x->ids[i]};
    }
    for (uint32_t u = 0; u < UNITS; u++)
        x->tables[u] = 10 + u;
    x->b = (group_batch){x->segments, UNITS + 1, x->tables, UNITS};
}

static void copy(batch *to, const batch *from)
{
    *to = *from;
    to->b.segments = to->segments;
    to->b.tables = to->tables;
    for (uint32_t i = 0; i <= UNITS; i++)
        to->segments[i].ids = to->ids[i];
}

static void open_remote(remote *r)
{
    memset(r, 0, sizeof *r);
    pthread_mutex_init(&r->lock, NULL);
    assert_int_equal(sched_create(2, &r->s), PERSIA_OK);
}

static void close_remote(remote *r)
{
    keep_free(r);
    assert_int_equal(r->kept_bytes, 0);
    sched_destroy(r->s);
    pthread_mutex_destroy(&r->lock);
}

static void look_up(remote *r, group *g, const batch *x)
{
    assert_int_equal(group_make(g, r->s, SHARDS, &x->b), PERSIA_OK);
    keep_group(r, g, &x->b);
}

/* What g says of x is what a group made of x says. */
static void check_group(remote *r, const group *g, const batch *x)
{
    group want = {0};
    assert_int_equal(group_make(&want, r->s, SHARDS, &x->b), PERSIA_OK);
    assert_int_equal(group_distinct(&want), group_distinct(g));
    assert_memory_equal(want.ids, g->ids,
                        group_distinct(g) * sizeof *g->ids);
    assert_int_equal(want.chunks_n, g->chunks_n);
    for (size_t i = 0; i < g->chunks_n; i++) {
        const group_chunk *c = &want.chunks[i], *d = &g->chunks[i];
        assert_memory_equal(c->order, d->order, c->n * sizeof *c->order);
        assert_memory_equal(c->place, d->place, c->n * sizeof *c->place);
    }
    for (size_t i = 0; i < g->segments_n; i++)
        assert_ptr_equal(g->segments[i].ids, x->segments[i].ids);
    group_free(&want);
}

static void same_ids_find_their_group(void **state)
{
    (void)state;
    static batch x, y, z;
    remote r;
    group g = {0};
    open_remote(&r);
    make(&x, 1);
    make(&y, 2);
    look_up(&r, &g, &x);
    look_up(&r, &g, &y);
    copy(&z, &x); /* the same ids elsewhere in memory */
    assert_true(keep_find(&r, &g, &z.b));
    check_group(&r, &g, &z);
    assert_false(keep_find(&r, &g, &z.b)); /* it serves once */
    assert_true(keep_find(&r, &g, &y.b));
    check_group(&r, &g, &y);
    group_free(&g);
    close_remote(&r);
}

static void other_ids_find_none(void **state)
{
    (void)state;
    static batch x, y;
    remote r;
    group g = {0};
    open_remote(&r);
    make(&x, 1);
    for (int what = 0; what < 5; what++) {
        look_up(&r, &g, &x);
        copy(&y, &x);
        if (what == 0)
            y.ids[0][1] = 1000; /* nobody's */
        else if (what == 1)
            y.ids[3][4095] = y.ids[3][1]; /* another one's */
        else if (what == 2)
            y.segments[1].n--;
        else if (what == 3)
            y.tables[2]++;
        else
            y.segments[1].unit++;
        assert_false(keep_find(&r, &g, &y.b));
        assert_int_equal(group_make(&g, r.s, SHARDS, &y.b), PERSIA_OK);
        check_group(&r, &g, &y);
    }
    group_free(&g);
    close_remote(&r);
}

static void the_oldest_go(void **state)
{
    (void)state;
    static batch x;
    remote r;
    group g = {0};
    open_remote(&r);
    for (uint64_t i = 0; i < KEPT_MAX + 3; i++) {
        make(&x, i << 32);
        look_up(&r, &g, &x);
    }
    for (uint64_t i = 0; i < KEPT_MAX + 3; i++) {
        make(&x, i << 32);
        assert_int_equal(keep_find(&r, &g, &x.b), i >= 3);
    }
    group_free(&g);
    close_remote(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_ids_find_their_group),
        cmocka_unit_test(other_ids_find_none),
        cmocka_unit_test(the_oldest_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
