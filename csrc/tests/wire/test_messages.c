/* Messages: written, read, cut short, altered.  That protobuf reads what we
 * write, and the reverse, is in tests/wire/. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fuzz/fuzz_wire.c"

/* ---- a sample of each message ------------------------------------------- */

#define CALLER { 0xFEDCBA9876543210u, 3, 0x1122334455667788u, 99, 7 }
#define SPEC                                                                  \
    {                                                                         \
        .name = "us\xC3\xA9r", .seed = UINT64_MAX, .dim = 16, .dtype = 1,     \
        .optimizer = 4, .momentum = 1, .init = 2, .init_a = -0.5f,            \
        .init_b = -0.0f, .state_init = 0.1f, .missing = 1, .nonfinite = 1,    \
        .capacity = 1000, .full = 1, .admission = 0.25f,                      \
        .evict_updates = 77, .evict_seconds = 88, .evict_score = "age",       \
        .admit = 1, .sightings = 99, .sightings_kept = 1u << 31               \
    }
#define LEDGER(n)                                                             \
    {                                                                         \
        .stream = 77 + (n), .watermark = 300 + (n), .window = { [n] = 5 },    \
        .skipped = 200 + (n), .client = 9 + (n),                              \
        .gaps = { 1, 2, [31] = UINT64_MAX }                                   \
    }

enum { N = 300, DIM = 5 };
static uint64_t ids[N];
static float floats[N * 2 * DIM];
static uint16_t halves[N * DIM];
static uint32_t rows[N];
static uint8_t found[N];

static wire_batch_name held[] = { { 5, 1 }, { UINT64_MAX, 1ull << 40 } };
static wire_hello hello = {
    CALLER, 1, "space", 2, 4, 5, 1, 6, 1, 3, 7, held, 2, 1, 8, 9
};
static table_spec specs[] = { SPEC, { .name = "item", .dim = 4096 } };
static wire_slot_run runs[] = { { 4095, 4096, 1 }, { 0, 5, 1u << 31 } };
static uint64_t here[] = { 1, 4095 };
static wire_hello_reply hello_reply = {
    1, "space", 1, 2, 3, 4, 5, 1 << 30, LEDGER(63), specs, 2,
    1ull << 40, 8, runs, 2, 2, UINT64_MAX, here, 2, 6, 1, 9, UINT64_MAX
};
static wire_declare declare = { CALLER, SPEC };
static wire_declare_reply declare_reply = { 4095, 1 };
static wire_pull_table pull_tables[] = {
    { 0, N, ids }, { 1, 0, NULL }, { 4095, 3, ids + 1 }
};
static wire_pull pull = {
    CALLER, WIRE_FP16, 1, 12345, pull_tables, 3, UINT64_MAX - 6, { 7, 8, 9 }
};
static wire_values values[] = {
    { 0, DIM, N, halves, floats, rows },
    { 1, 0, 0, NULL, NULL, NULL },
    { 2, 1, 7, halves + 1, floats + 3, NULL },
};
static wire_pull_reply pull_reply = { WIRE_FP16, values, 3 };
static wire_push_table push_tables[] = {
    { { 0, DIM, N, floats, NULL, rows }, ids,
      { 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 }, 1 },
    { { 1, 3, 0, NULL, NULL, NULL }, NULL, { .lr = 0.5f }, 1 },
    { { 7, 2, 9, floats + 1, NULL, NULL }, ids + 5, { .grad_scale = 1 }, 0 },
};
static wire_push push = {
    CALLER, 8, 9, 7, 10, 2, 3, WIRE_FP32, push_tables, 3, 11, 0, 1, 1,
    { 12, 13, 14 }, { 15, 16, UINT64_MAX }
};
static uint64_t left[] = { 0, 127, 4095 };
static wire_push_reply push_reply = {
    PUSH_DUPLICATE, 1, 2, 3, 4, 5, 6, left, 3
};
static wire_leave leave = { CALLER, 1, 2, 1, 55, left, 3, 4, 88, 99 };
static wire_leave_reply leave_reply = { 56 };
static wire_rows rows_all = {
    CALLER, 3, N, ids, DIM, 2 * DIM, floats, floats, found, 1, 1, 77, 1,
    99, 1234567
};
static uint64_t gone[] = { 1, UINT64_MAX };
static wire_changes changes = { CALLER, 3, CHANGES_END, 77, 5, 1000 };
static wire_changes_reply changes_reply = {
    3, DIM, N, ids, floats, gone, 2, left, 3, 1, 1, 1, 1ull << 40
};
static wire_snapshot snapshot = {
    CALLER, SNAPSHOT_END, "root", "step-7", "0123456789"
};
static uint64_t pushes[] = { 0, 127, 128, UINT64_MAX };
static wire_ledger ledgers[] = { LEDGER(0), LEDGER(31) };
static wire_file files[] = {
    { 0, "a-0.safetensors", 1, 2, UINT32_MAX }, { 1, "b", 3, 4, 5 }
};
static wire_snapshot_reply snapshot_reply = {
    1, 1, 2, 3, pushes, 4, ledgers, 2, files, 2, 9, 10, 11, 12, 1, 1
};
static wire_restore restore = {
    CALLER, RESTORE_COMMIT, "root", "step-7", "proof", 1, 5, 2, 3, 4,
    pushes, 4, ledgers, 2, files, 2
};
static wire_restore_reply restore_reply = { 1, 1000 };
static wire_stats stats = { CALLER, 1 };
static wire_slow_call slow[] = {
    { 30, 2, 3, 4, UINT64_MAX, "ipv4:1" }, { .ns = 1 }
};
static table_stats both_stats[] = {
    { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }, { .rows = 1 }
};
static wire_stats_reply stats_reply = {
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, specs, 2, both_stats, 13, 1, 14,
    15, 1, 16, slow, 2
};

static wire_plan_feature plan_features[] = {
    { "a", 1, WORKER_POOL_SQRTN, 1, 1 }, { .name = "b" }
};
static uint32_t places[8] = { 0, 3, UINT32_MAX };
static wire_plan plan = { CALLER, specs, 2, plan_features, 2 };
static wire_plan_reply plan_reply = { 1 };
static wire_batch_feature batch_features[] = { { "a" }, { "b" } };
static uint64_t shape[] = { 3, 0, UINT64_MAX };
static wire_tensor tensors[] = {
    { "dense", "float32", shape, 3, N, found }, { .name = "empty" }
};
static wire_submit submit = {
    CALLER, 5, 9, 8, 3, batch_features, 2, { N, ids }, { 7, ids }, tensors,
    2, { N, floats }, 4, UINT64_MAX >> 3, 9, 2, 6
};
static uint64_t ends[] = { 0, 9, 9, UINT64_MAX };
static wire_heartbeat heartbeat = {
    CALLER, 5, 9, 8, 1, 3, ends, 4, { 7, 0, UINT64_MAX }, 1, 3, 1, 2
};
static wire_failed_batch failed[] = {
    { 1, "LimitReached", "too long" }, { UINT64_MAX, "UpdatesLost", "" }
};
static wire_submit_reply submit_reply = {
    SUBMIT_FULL, left, 3, 4, failed, 2, 5, 1, 6
};
static wire_take take = { CALLER, 3, 1, 2, WIRE_BF16, held, 2, 1, 3, 1, 4, 6 };
static wire_loader_part parts[] = { { 5, 6, 7, { 1, [15] = 2 } },
                                    { .stream = 8 } };
static wire_take_reply take_reply = {
    TAKE_END, 1, 2, 3, 4, WIRE_FP16, values, 3, tensors, 2, values, 2,
    { 8, places, floats }, { 7, places }, 7, parts, 2, 8, 9, 10, 11, 12
};
static wire_values grads[] = { { 4095, DIM, N, floats, NULL, NULL } };
static optim_hyper hypers[] = {
    { .kind = 3, .beta2 = 0.5f, .grad_scale = 1 }, { .lr = 1 }
};
static wire_return give_back = {
    CALLER, 1, 2, RETURN_UNUSED, 3, WIRE_FP32, grads, 1, hypers, 2, grads, 1,
    0, 3, 4, 5, 6, 7, { 8, 9, 10 }
};
static wire_table_sum table_sums[] = { { 4095, DIM, N, ids, floats } };
static wire_sums_reply sums_reply = { 1, 1, table_sums, 1 };
static wire_return_reply return_reply = {
    RETURNED_GONE, 1, 2, 3, 4, 5, 6
};
static wire_worker_stats_reply worker_stats_reply = {
    1, { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
         20, 21, 22, 23, 24, 25, 26, 27 }
};

static wire_piece pieces[] = {
    { 4095, N, ids, DIM, 2, (const uint8_t *)floats, floats, rows, rows, 0, 0,
      0, 0 },
    { 0, 3, ids, 0, 0, NULL, NULL, NULL, NULL, 1, 1, 255, 256 }
};
static wire_sightings sightings[] = { { 3, 4095, N, rows } };
static wire_handover handover[] = {
    { 1, 2, 3, 4, 5, pushes, 4, ledgers, 2, left, 3 }
};
static wire_move move = {
    CALLER, MOVE_ABORT, "ns", 4095, 8, 9, "host:1", "who", 10, 11, 2, 12,
    specs, 2, pieces, 2, sightings, 1, handover, 1
};
static uint64_t moved[] = { 0, 4095 };
static wire_move_reply move_reply = {
    MOVED_FAILED, 3, 9, "text", 1000, moved, 2, "who", 8
};

static wire_part calls[] = {
    { 4095, 30, 5, (const uint8_t *)"12345" }, { 0, 0, 0, NULL }
};
static wire_many many = { calls, 2 };
static wire_result results[] = {
    { "", "", 9, (const uint8_t *)"123456789" }, { "Closed", "text", 0, NULL }
};
static wire_many_reply many_reply = { results, 2 };

static const void *const samples[MESSAGES_N] = {
    &hello, &hello_reply, &declare, &declare_reply, &pull, &pull_reply,
    &push, &push_reply, &leave, &leave_reply, &rows_all, &changes,
    &changes_reply, &snapshot,
    &snapshot_reply, &restore, &restore_reply, &stats, &stats_reply,
    &move, &move_reply, &many, &many_reply,
    &plan, &plan_reply, &submit, &heartbeat, &submit_reply, &take, &take_reply,
    &sums_reply, &give_back, &return_reply, &worker_stats_reply
};

static int fill_arrays(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < N * 2 * DIM; i++) {
        floats[i] = (float)i / 7 - 100;
        if (i < N * DIM)
            halves[i] = (uint16_t)(i * 77);
        if (i < N) {
            ids[i] = i * 0x9E3779B97F4A7C15u;
            rows[i] = ~i;
            found[i] = i % 3 == 0;
        }
    }
    return 0;
}

/* ---- helpers ------------------------------------------------------------ */

typedef struct bytes {
    unsigned char *data;
    size_t n;
} bytes;

static bytes encode(const message *type, const void *m)
{
    wire_out out;
    persia_wire_out_init(&out);
    assert_int_equal(type->put(&out, m), PERSIA_OK);
    bytes b = { aligned_alloc(64, (out.bytes + 64) & ~(size_t)63),
                out.bytes };
    assert_non_null(b.data);
    persia_wire_out_copy(&out, b.data);
    persia_wire_out_free(&out);
    return b;
}

/* What the bytes mean, in a block of exactly their size, `shift` behind an
 * aligned address; NULL if they are refused. */
static unsigned char *rewrite_at(const message *type, const void *data,
                                 size_t n, size_t shift, size_t *again_n)
{
    unsigned char *copy = aligned_alloc(64, (n + shift + 64) & ~(size_t)63);
    assert_non_null(copy);
    memcpy(copy + shift, data, n);
    unsigned char *again = rewrite(type, copy + shift, n, again_n);
    free(copy);
    return again;
}

static int inside(const void *pointer, bytes b)
{
    const unsigned char *p = pointer;
    return (uintptr_t)p % 8 == 0 && p >= b.data && p < b.data + b.n;
}

/* ---- tests -------------------------------------------------------------- */

static void every_message_comes_back(void **state)
{
    (void)state;
    for (size_t i = 0; i < MESSAGES_N; i++)
        for (size_t shift = 0; shift < 9; shift++) {
            bytes b = encode(&messages[i], samples[i]);
            size_t n;
            unsigned char *again = rewrite_at(&messages[i], b.data, b.n,
                                              shift, &n);
            assert_non_null(again);
            assert_int_equal(n, b.n);
            assert_memory_equal(again, b.data, n);
            free(again);
            free(b.data);
        }
}

static void a_push_is_read_as_it_was_written(void **state)
{
    (void)state;
    bytes b = encode(&messages[6], &push);
    wire_memory memory;
    wire_push got;
    persia_wire_memory_init(&memory);
    assert_int_equal(persia_wire_get_push(b.data, b.n, &memory, &got),
                     PERSIA_OK);
    assert_memory_equal(&got.caller, &push.caller, sizeof got.caller);
    assert_int_equal(got.stream, 8);
    assert_int_equal(got.number, 9);
    assert_int_equal(got.settled, 7);
    assert_int_equal(got.step, 10);
    assert_int_equal(got.part, 2);
    assert_int_equal(got.parts, 3);
    assert_int_equal(got.dtype, WIRE_FP32);
    assert_int_equal(got.tables_n, 3);
    for (size_t i = 0; i < 3; i++) {
        const wire_push_table *t = &got.tables[i], *s = &push_tables[i];
        const size_t n = s->grads.n, dim = s->grads.dim;
        assert_int_equal(t->grads.no, s->grads.no);
        assert_int_equal(t->grads.dim, dim);
        assert_int_equal(t->grads.n, n);
        assert_memory_equal(&t->hyper, &s->hyper, sizeof t->hyper);
        assert_int_equal(t->distinct, s->distinct);
        assert_null(t->grads.scales);
        if (!n) {
            assert_null(t->ids);
            assert_null(t->grads.values);
            continue;
        }
        assert_true(inside(t->ids, b) && inside(t->grads.values, b));
        assert_memory_equal(t->ids, s->ids, n * 8);
        assert_memory_equal(t->grads.values, s->grads.values, n * dim * 4);
        assert_int_equal(!t->grads.rows, !s->grads.rows);
        if (t->grads.rows) {
            assert_true(inside(t->grads.rows, b));
            assert_memory_equal(t->grads.rows, s->grads.rows, n * 4);
        }
    }
    persia_wire_memory_free(&memory);
    free(b.data);
}

static void a_pull_is_read_as_it_was_written(void **state)
{
    (void)state;
    bytes b = encode(&messages[4], &pull);
    wire_memory memory;
    wire_pull got;
    persia_wire_memory_init(&memory);
    assert_int_equal(persia_wire_get_pull(b.data, b.n, &memory, &got),
                     PERSIA_OK);
    assert_int_equal(got.dtype, WIRE_FP16);
    assert_int_equal(got.want_rows, 1);
    assert_int_equal(got.after, 12345);
    assert_true(got.stream == UINT64_MAX - 6);
    assert_int_equal(got.tables_n, 3);
    assert_int_equal(got.tables[2].no, 4095);
    assert_int_equal(got.tables[1].n, 0);
    assert_int_equal(got.tables[2].n, 3);
    assert_true(inside(got.tables[0].ids, b) && inside(got.tables[2].ids, b));
    assert_memory_equal(got.tables[0].ids, ids, sizeof ids);
    assert_memory_equal(got.tables[2].ids, ids + 1, 24);
    free(b.data);
    persia_wire_memory_free(&memory);

    wire_pull_reply reply;
    b = encode(&messages[5], &pull_reply);
    persia_wire_memory_init(&memory);
    assert_int_equal(persia_wire_get_pull_reply(b.data, b.n, &memory, &reply),
                     PERSIA_OK);
    assert_int_equal(reply.tables_n, 3);
    assert_int_equal(reply.tables[0].n, N);
    assert_int_equal(reply.tables[0].dim, DIM);
    assert_true(inside(reply.tables[0].values, b));
    assert_true(inside(reply.tables[0].scales, b));
    assert_true(inside(reply.tables[0].rows, b));
    assert_memory_equal(reply.tables[0].values, halves, sizeof halves);
    assert_memory_equal(reply.tables[0].scales, floats, N * 4);
    assert_memory_equal(reply.tables[0].rows, rows, sizeof rows);
    assert_memory_equal(reply.tables[2].values, halves + 1, 14);
    assert_null(reply.tables[2].rows);
    persia_wire_memory_free(&memory);
    free(b.data);
}

static void messages_are_appended(void **state)
{
    (void)state;
    wire_out out;
    bytes b = encode(&messages[4], &pull);
    persia_wire_out_init(&out);
    assert_int_equal(persia_wire_put_leave_reply(&out, &leave_reply),
                     PERSIA_OK);
    const size_t before = out.bytes;
    assert_int_equal(persia_wire_put_pull(&out, &pull), PERSIA_OK);
    assert_int_equal(out.bytes, before + b.n);
    unsigned char *all = test_malloc(out.bytes);
    persia_wire_out_copy(&out, all);
    assert_memory_equal(all + before, b.data, b.n);
    test_free(all);
    persia_wire_out_free(&out);
    free(b.data);
}

static void an_empty_message_has_its_defaults(void **state)
{
    (void)state;
    wire_memory memory;
    wire_pull got;
    persia_wire_memory_init(&memory);
    memset(&got, 1, sizeof got);
    assert_int_equal(persia_wire_get_pull(NULL, 0, &memory, &got), PERSIA_OK);
    assert_int_equal(got.tables_n, 0);
    assert_null(got.tables);
    assert_int_equal(got.caller.client, 0);

    /* fixed64 stream = 2: 8, number = 3: 1; `parts` is not there. */
    static const unsigned char least[] = "\x11\x08\0\0\0\0\0\0\0\x18\x01";
    wire_push p;
    assert_int_equal(
        persia_wire_get_push(least, sizeof least - 1, &memory, &p), PERSIA_OK);
    assert_int_equal(p.part, 0);
    assert_int_equal(p.parts, 1);
    persia_wire_memory_free(&memory);
}

static void numbers_come_packed_or_one_by_one(void **state)
{
    (void)state;
    /* SnapshotReply: pushes = 4, twice one number, then two packed. */
    static const unsigned char good[] = "\x20\x05\x20\x06\x22\x02\x07\x08";
    static const unsigned char cut[] = "\x22\x01\x80";
    wire_memory memory;
    wire_snapshot_reply got;
    persia_wire_memory_init(&memory);
    assert_int_equal(
        persia_wire_get_snapshot_reply(good, sizeof good - 1, &memory, &got),
        PERSIA_OK);
    assert_int_equal(got.pushes_n, 4);
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(got.pushes[i], 5 + i);
    assert_int_equal(
        persia_wire_get_snapshot_reply(cut, sizeof cut - 1, &memory, &got),
        PERSIA_EPROTOCOL);
    persia_wire_memory_free(&memory);
}

static void a_part_of_a_message_harms_nobody(void **state)
{
    (void)state;
    for (size_t i = 0; i < MESSAGES_N; i++) {
        bytes b = encode(&messages[i], samples[i]);
        for (size_t n = 0, again_n; n < b.n; n++) {
            if (n > 3000 && n < b.n - 3000)
                n += 100;
            free(rewrite_at(&messages[i], b.data, n, 64 - n % 64, &again_n));
        }
        free(b.data);
    }
}

static void an_altered_message_harms_nobody(void **state)
{
    (void)state;
    for (size_t i = 0; i < MESSAGES_N; i++) {
        bytes b = encode(&messages[i], samples[i]);
        unsigned char *input = test_malloc(b.n + 1);
        input[0] = (unsigned char)i;
        memcpy(input + 1, b.data, b.n);
        for (size_t bit = 0; bit < b.n * 8; bit++) {
            if (bit > 1600 && bit % 64)
                bit += 16; /* bulk, mostly */
            if (bit >= b.n * 8)
                break;
            input[1 + bit / 8] ^= (unsigned char)(1u << bit % 8);
            (void)LLVMFuzzerTestOneInput(input, b.n + 1);
            input[1 + bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
        test_free(input);
        free(b.data);
    }
}

/* Both messages as parts of one, as the fuzzer has them; the result is what
 * it accepts.  Each byte of the accepted ones was read. */
static bytes pair_of(size_t i, bytes a, bytes b)
{
    bytes both = { test_malloc(3 + a.n + b.n), 3 + a.n + b.n };
    assert_true(a.n < 65536);
    both.data[0] = (unsigned char)(PAIR + i);
    both.data[1] = (unsigned char)a.n;
    both.data[2] = (unsigned char)(a.n >> 8);
    memcpy(both.data + 3, a.data, a.n);
    memcpy(both.data + 3 + a.n, b.data, b.n);
    return both;
}

/* A sub-message given twice: what the later part leaves out does not stay
 * beside the later count. */
static void a_part_given_twice_promises_what_it_has(void **state)
{
    enum { TAKE_REPLY = 29 };
    wire_take_reply little = take_reply, much = take_reply, got;
    static uint32_t many[20000];
    (void)state;
    little.ids = (wire_row_ids){ 1, places, floats };
    much.ids = (wire_row_ids){ 20000, many, NULL };
    assert_string_equal(messages[TAKE_REPLY].name, "take_reply");
    for (size_t shift = 0; shift < 8; shift++) {
        bytes a = encode(&messages[TAKE_REPLY], &little);
        bytes b = encode(&messages[TAKE_REPLY], &much);
        bytes both = pair_of(TAKE_REPLY, a, b);
        (void)LLVMFuzzerTestOneInput(both.data, both.n);
        unsigned char *at = malloc(both.n + shift);
        wire_memory memory;
        assert_non_null(at);
        memcpy(at + shift, both.data + 3, both.n - 3);
        persia_wire_memory_init(&memory);
        assert_int_equal(persia_wire_get_take_reply(at + shift, both.n - 3,
                                                    &memory, &got),
                         PERSIA_OK);
        assert_int_equal(got.ids.n, 20000);
        assert_memory_equal(got.ids.places, many, sizeof many);
        assert_null(got.ids.weights);
        assert_int_equal(got.offsets.n, 7);
        assert_memory_equal(got.offsets.offsets, places, 28);
        persia_wire_memory_free(&memory);
        free(at);
        free(a.data);
        free(b.data);
        test_free(both.data);
    }
}

/* The same for each message, and each place where its first part may end. */
static void two_parts_of_a_message_harm_nobody(void **state)
{
    (void)state;
    for (size_t i = 0; i < MESSAGES_N; i++) {
        bytes b = encode(&messages[i], samples[i]);
        for (size_t n = 0; n <= b.n; n += n > 500 ? 37 : 1) {
            bytes both = pair_of(i, (bytes){ b.data, n }, b);
            (void)LLVMFuzzerTestOneInput(both.data, both.n);
            test_free(both.data);
            both = pair_of(i, b, (bytes){ b.data, n });
            (void)LLVMFuzzerTestOneInput(both.data, both.n);
            test_free(both.data);
        }
        free(b.data);
    }
}

static void refuse(const message *type, const void *m, const char *text)
{
    wire_out out;
    persia_wire_out_init(&out);
    assert_int_equal(type->put(&out, m), PERSIA_EARG);
    assert_string_equal(persia_err_text(), text);
    persia_wire_out_free(&out);
}

static void what_nobody_would_read_is_not_written(void **state)
{
    (void)state;
    wire_push p = push;
    p.tables_n = WIRE_TABLES_MAX + 1;
    refuse(&messages[6], &p, "message PushRequest.tables: has 4097 elements, "
           "at most 4096");
    p = push;
    p.part = 3;
    refuse(&messages[6], &p, "message PushRequest.part: is 3 of 3");
    p = push;
    p.number = 0;
    refuse(&messages[6], &p, "message PushRequest.number: is 0, numbers "
           "begin at 1");
    p = push;
    p.settled = 9;
    refuse(&messages[6], &p, "message PushRequest.settled: is 9, it must be "
           "below the number 9");
    p = push;
    p.dtype = WIRE_FP16;
    refuse(&messages[6], &p, "message PushRequest.tables[0].scales: fp16 "
           "needs a scale for each of 300 rows");
    wire_push_table t = push_tables[0];
    p = push;
    p.tables = &t;
    p.tables_n = 1;
    t.hyper.lr = NAN;
    refuse(&messages[6], &p, "message PushRequest.tables[0].hyper.lr: is not "
           "finite");
    t = push_tables[0];
    t.grads.dim = 4097;
    refuse(&messages[6], &p, "message PushRequest.tables[0].dim: is 4097, at "
           "most 4096");
    t = push_tables[0];
    t.ids = NULL;
    refuse(&messages[6], &p, "message PushRequest.tables[0].ids: is NULL, "
           "but there are 300");
    wire_declare d = declare;
    memset(d.table.name, 'x', sizeof d.table.name);
    refuse(&messages[2], &d, "message DeclareRequest.table.name: has 256 "
           "bytes, at most 255");
    d.table.name[0] = (char)0xFF;
    d.table.name[1] = 0;
    refuse(&messages[2], &d, "message DeclareRequest.table.name: is not "
           "UTF-8 at byte 0");
    d = declare;
    d.table.dim = 0;
    refuse(&messages[2], &d, "message DeclareRequest.table.dim: is 0, 1 to "
           "4096 allowed");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_message_comes_back),
        cmocka_unit_test(a_push_is_read_as_it_was_written),
        cmocka_unit_test(a_pull_is_read_as_it_was_written),
        cmocka_unit_test(messages_are_appended),
        cmocka_unit_test(an_empty_message_has_its_defaults),
        cmocka_unit_test(numbers_come_packed_or_one_by_one),
        cmocka_unit_test(a_part_of_a_message_harms_nobody),
        cmocka_unit_test(an_altered_message_harms_nobody),
        cmocka_unit_test(a_part_given_twice_promises_what_it_has),
        cmocka_unit_test(two_parts_of_a_message_harm_nobody),
        cmocka_unit_test(what_nobody_would_read_is_not_written),
    };
    return cmocka_run_group_tests(tests, fill_arrays, NULL);
}
