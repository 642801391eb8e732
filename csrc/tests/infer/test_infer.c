/* Requests of the Open Inference Protocol: decoded, bound, copied, answered;
 * the queue.  That stock clients' messages are read is tested in
 * tests/serving/test_grpc.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "infer/infer.h"

#include <string.h>

/* ---- messages ----------------------------------------------------------- */

typedef struct message {
    uint8_t data[1024];
    size_t n;
} message;

static void put(message *m, const void *data, size_t n)
{
    assert_true(m->n + n <= sizeof m->data);
    memcpy(m->data + m->n, data, n);
    m->n += n;
}

static void put_byte(message *m, unsigned value)
{
    const uint8_t byte = (uint8_t)value;
    put(m, &byte, 1);
}

/* A field of fewer than 128 bytes. */
static void put_part(message *m, unsigned no, const void *data, size_t n)
{
    put_byte(m, no << 3 | 2);
    put_byte(m, (unsigned)n);
    put(m, data, n);
}

static void put_text(message *m, unsigned no, const char *text)
{
    put_part(m, no, text, strlen(text));
}

enum { NONE = -1 };

/* contents: of that field of InferTensorContents, or NONE. */
static void put_input(message *m, const char *name, const char *type,
                      unsigned rows, unsigned columns, int list,
                      const void *contents, size_t n)
{
    message t = {.n = 0}, inner = {.n = 0};
    const uint8_t shape[] = {(uint8_t)rows, (uint8_t)columns};
    put_text(&t, 1, name);
    put_text(&t, 2, type);
    put_part(&t, 3, shape, columns ? 2 : 1);
    if (list != NONE) {
        put_part(&inner, (unsigned)list, contents, n);
        put_part(&t, 5, inner.data, inner.n);
    }
    put_part(m, 5, t.data, t.n);
}

static const float DENSE[] = {1, 2, 3, 4, 5, 6};
static const int64_t IDS[] = {7, -8, 9}, USER[] = {77};

/* One user beside three candidates. */
static message raw_request(void)
{
    message m = {.n = 0};
    put_text(&m, 1, "m");
    put_text(&m, 3, "id-1");
    put_input(&m, "dense", "FP32", 3, 2, NONE, NULL, 0);
    put_input(&m, "user", "UINT64", 1, 0, NONE, NULL, 0);
    put_input(&m, "item", "INT64", 3, 1, NONE, NULL, 0);
    put_part(&m, 7, DENSE, sizeof DENSE);
    put_part(&m, 7, USER, sizeof USER);
    put_part(&m, 7, IDS, sizeof IDS);
    return m;
}

static int decode(const message *m, infer_request *out)
{
    return persia_infer_decode(m->data, m->n, out);
}

static void refuses(const message *m, int code)
{
    infer_request r;
    assert_int_equal(decode(m, &r), code);
}

static infer_text text_of(const char *text)
{
    return (infer_text){text, strlen(text)};
}

static infer_plan *plan_of(void)
{
    const infer_input inputs[] = {
        {.name = text_of("user"), .type = INFER_INT64, .dims = 1},
        {.name = text_of("item"), .type = INFER_INT64, .dims = 1},
        {.name = text_of("dense"),
         .type = INFER_FP32,
         .dims = 2,
         .shape = {-1, 2}},
    };
    infer_plan *p;
    assert_int_equal(persia_infer_plan(inputs, 3, &p), PERSIA_OK);
    return p;
}

/* ---- tests -------------------------------------------------------------- */

static void a_user_stands_beside_candidates(void **state)
{
    const message m = raw_request();
    infer_plan *p = plan_of();
    infer_request r;
    const infer_tensor *found[3];
    uint64_t samples;
    int64_t ids[3];
    float dense[6];
    (void)state;
    assert_int_equal(decode(&m, &r), PERSIA_OK);
    assert_memory_equal(r.id.data, "id-1", r.id.n);
    assert_int_equal(r.outputs_n, 0);
    assert_int_equal(persia_infer_bind(p, &r, 3, found, &samples), PERSIA_OK);
    assert_int_equal(samples, 3);
    persia_infer_copy(persia_infer_plan_input(p, 0), found[0], 3, ids);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ids[i], 77);
    persia_infer_copy(persia_infer_plan_input(p, 1), found[1], 3, ids);
    assert_memory_equal(ids, IDS, sizeof IDS);
    persia_infer_copy(persia_infer_plan_input(p, 2), found[2], 3, dense);
    assert_memory_equal(dense, DENSE, sizeof DENSE);
    assert_int_equal(persia_infer_bind(p, &r, 2, found, &samples),
                     PERSIA_ELIMIT);
    persia_infer_free(&r);
    persia_infer_plan_free(p);
}

static void typed_contents_are_raw_ones(void **state)
{
    /* INT8: 5, -1 as a varint of ten bytes. */
    static const uint8_t numbers[] = {5,    0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                      0xFF, 0xFF, 0xFF, 0xFF, 1};
    message m = {.n = 0};
    infer_request r;
    (void)state;
    put_input(&m, "a", "INT8", 2, 0, 2, numbers, sizeof numbers);
    put_input(&m, "b", "FP32", 3, 2, 6, DENSE, sizeof DENSE);
    put_input(&m, "c", "BYTES", 1, 0, 8, "text", 4);
    assert_int_equal(decode(&m, &r), PERSIA_OK);
    assert_int_equal(r.inputs[0].bytes, 2);
    assert_memory_equal(r.inputs[0].data, "\5\xFF", 2);
    assert_memory_equal(r.inputs[1].data, DENSE, sizeof DENSE);
    assert_int_equal(r.inputs[2].bytes, 8);
    assert_memory_equal(r.inputs[2].data, "\4\0\0\0text", 8);
    persia_infer_free(&r);
}

static void what_is_no_request_is_refused(void **state)
{
    static const uint8_t large[] = {0x80, 2}; /* 256 */
    message m = {.n = 0};
    (void)state;
    refuses(&m, PERSIA_EPROTOCOL); /* no inputs */
    infer_request none;
    assert_int_equal(persia_infer_decode(NULL, 0, &none), PERSIA_EPROTOCOL);
    put_byte(&m, 5 << 3); /* an input that is a number */
    put_byte(&m, 40);
    refuses(&m, PERSIA_EPROTOCOL);
    m = raw_request();
    put_part(&m, 7, DENSE, 4); /* four raw contents for three inputs */
    refuses(&m, PERSIA_EPROTOCOL);
    m = (message){.n = 0};
    put_input(&m, "a", "FP32", 1, 0, 6, DENSE, 4);
    put_part(&m, 7, DENSE, 4);
    refuses(&m, PERSIA_EPROTOCOL); /* typed and raw */
    m = (message){.n = 0};
    put_input(&m, "a", "FP32", 2, 0, 6, DENSE, 4);
    refuses(&m, PERSIA_ESHAPE);
    m = (message){.n = 0};
    put_input(&m, "a", "FP32", 1, 0, 7, DENSE, 8); /* of FP64 */
    refuses(&m, PERSIA_EDTYPE);
    m = (message){.n = 0};
    put_input(&m, "a", "UINT8", 1, 0, 4, large, sizeof large);
    refuses(&m, PERSIA_EDTYPE);
    m = (message){.n = 0};
    put_input(&m, "a", "FP31", 1, 0, 6, DENSE, 4);
    refuses(&m, PERSIA_EDTYPE);
    m = (message){.n = 0};
    put_input(&m, "\xFF", "FP32", 1, 0, 6, DENSE, 4);
    refuses(&m, PERSIA_EPROTOCOL);
}

/* An entry of a map of parameters, whose value is a number. */
static void put_parameter(message *m, unsigned no, const char *key,
                          unsigned field, unsigned number)
{
    message entry = {.n = 0};
    const uint8_t value[] = {(uint8_t)(field << 3), (uint8_t)number};
    put_text(&entry, 1, key);
    put_part(&entry, 2, value, sizeof value);
    put_part(m, no, entry.data, entry.n);
}

static void parameters_are_followed_or_refused(void **state)
{
    static const char *const refused[] = {"shared_memory_region",
                                          "classification"};
    infer_request r;
    (void)state;
    message m = raw_request();
    assert_int_equal(decode(&m, &r), PERSIA_OK);
    assert_int_equal(r.timeout_us, INFER_NO_TIMEOUT);
    persia_infer_free(&r);
    put_parameter(&m, 4, "priority", 5, 1);
    put_parameter(&m, 4, "timeout", 2, 9);
    assert_int_equal(decode(&m, &r), PERSIA_OK);
    assert_int_equal(r.timeout_us, 9);
    persia_infer_free(&r);
    put_parameter(&m, 4, "timeout", 1, 1); /* a BOOL */
    refuses(&m, PERSIA_EARG);
    for (size_t i = 0; i < 2; i++) {
        message output = {.n = 0}, input = {.n = 0};
        m = raw_request();
        put_text(&output, 1, "score");
        put_parameter(&output, 2, refused[i], 2, 1);
        put_part(&m, 6, output.data, output.n);
        refuses(&m, PERSIA_EARG);
        m = (message){.n = 0};
        put_text(&input, 1, "a");
        put_text(&input, 2, "INT8");
        put_parameter(&input, 4, refused[i], 2, 1);
        put_part(&m, 5, input.data, input.n);
        refuses(&m, PERSIA_EARG);
    }
}

static void shapes_do_not_overflow(void **state)
{
    infer_tensor t = {.name = text_of("a"),
                      .type = INFER_FP64,
                      .dims = 2,
                      .shape = {INT64_MAX, 2}};
    (void)state;
    assert_int_equal(persia_infer_check(&t), PERSIA_ELIMIT);
    t.shape[0] = -1;
    assert_int_equal(persia_infer_check(&t), PERSIA_ESHAPE);
    for (t.dims = 0; t.dims < INFER_DIMS_MAX; t.dims++)
        t.shape[t.dims] = 1 << 20;
    assert_int_equal(persia_infer_check(&t), PERSIA_ELIMIT);
    t.dims = INFER_DIMS_MAX + 1;
    assert_int_equal(persia_infer_check(&t), PERSIA_ESHAPE);
    t = (infer_tensor){.name = text_of("a"),
                       .type = INFER_BYTES,
                       .dims = 1,
                       .shape = {1},
                       .data = "\xFF\xFF\xFF\xFF",
                       .bytes = 4};
    assert_int_equal(persia_infer_check(&t), PERSIA_ESHAPE);
}

/* Wherever it ends, and whatever bit is another one. */
static void damaged_requests_are_refused_or_read(void **state)
{
    const message whole = raw_request();
    infer_request r;
    (void)state;
    for (size_t n = 0; n < whole.n; n++) {
        message m = whole;
        m.n = n;
        if (!decode(&m, &r))
            persia_infer_free(&r);
    }
    for (size_t bit = 0; bit < 8 * whole.n; bit++) {
        message m = whole;
        m.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (!decode(&m, &r))
            persia_infer_free(&r);
    }
}

static void bind_is(const infer_plan *p, const message *m, int code)
{
    infer_request r;
    const infer_tensor *found[3];
    uint64_t samples;
    assert_int_equal(decode(m, &r), PERSIA_OK);
    assert_int_equal(persia_infer_bind(p, &r, 100, found, &samples), code);
    persia_infer_free(&r);
}

static void what_is_no_input_is_refused(void **state)
{
    infer_plan *p = plan_of();
    message m = {.n = 0};
    (void)state;
    put_input(&m, "user", "INT64", 1, 0, 3, "\1", 1);
    bind_is(p, &m, PERSIA_EFEATURE);
    put_input(&m, "user", "INT64", 1, 0, 3, "\1", 1);
    bind_is(p, &m, PERSIA_EPROTOCOL); /* twice */
    m = (message){.n = 0};
    put_input(&m, "users", "INT64", 1, 0, 3, "\1", 1);
    bind_is(p, &m, PERSIA_EARG);
    m = (message){.n = 0};
    put_input(&m, "user", "FP32", 1, 0, 6, DENSE, 4);
    bind_is(p, &m, PERSIA_EDTYPE);
    m = (message){.n = 0};
    put_input(&m, "user", "INT64", 2, 0, 3, "\1\2", 2);
    put_input(&m, "item", "INT64", 3, 0, 3, "\1\2\3", 3);
    bind_is(p, &m, PERSIA_ESHAPE);
    m = (message){.n = 0};
    put_input(&m, "dense", "FP32", 2, 3, 6, DENSE, sizeof DENSE);
    bind_is(p, &m, PERSIA_ESHAPE);
    persia_infer_plan_free(p);
}

static void narrow_integers_are_widened(void **state)
{
    infer_plan *p = plan_of();
    static const int8_t given[] = {-3, 4};
    const infer_tensor t = {.type = INFER_INT8,
                            .dims = 1,
                            .shape = {2},
                            .data = given,
                            .bytes = 2};
    int64_t ids[2];
    (void)state;
    persia_infer_copy(persia_infer_plan_input(p, 0), &t, 2, ids);
    assert_int_equal(ids[0], -3);
    assert_int_equal(ids[1], 4);
    persia_infer_plan_free(p);
}

/* ---- the queue ---------------------------------------------------------- */

static infer_item *item_of(infer_tensor *t, int64_t samples)
{
    infer_item *item = test_calloc(1, sizeof *item);
    *t = (infer_tensor){.dims = 1, .shape = {samples}};
    item->request.inputs = t;
    item->request.inputs_n = 1;
    return item;
}

static void requests_wait_up_to_a_limit(void **state)
{
    infer_tensor t[4];
    infer_item *items[4];
    infer_queue *q;
    (void)state;
    assert_int_equal(persia_infer_queue_create(10, 1, &q), PERSIA_OK);
    for (int i = 0; i < 4; i++)
        items[i] = item_of(&t[i], i ? 4 : 20);
    /* One that is larger than the queue waits alone. */
    assert_int_equal(persia_infer_put(q, items[0]), PERSIA_OK);
    assert_int_equal(persia_infer_put(q, items[1]), PERSIA_ELIMIT);
    assert_int_equal(persia_infer_waiting(q), 20);
    assert_ptr_equal(persia_infer_take(q, 8), items[0]);
    for (int i = 1; i < 3; i++)
        assert_int_equal(persia_infer_put(q, items[i]), PERSIA_OK);
    assert_int_equal(persia_infer_put(q, items[3]), PERSIA_ELIMIT);
    persia_infer_close(q);
    assert_int_equal(persia_infer_put(q, items[3]), PERSIA_ECLOSED);
    /* As many as are one batch; what waits is taken after the end, too. */
    assert_ptr_equal(persia_infer_take(q, 7), items[1]);
    assert_null(items[1]->next);
    assert_ptr_equal(persia_infer_take(q, 7), items[2]);
    assert_null(persia_infer_take(q, 7));
    assert_null(persia_infer_take_other(q));
    for (int i = 0; i < 4; i++)
        test_free(items[i]);
    persia_infer_queue_free(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_user_stands_beside_candidates),
        cmocka_unit_test(typed_contents_are_raw_ones),
        cmocka_unit_test(what_is_no_request_is_refused),
        cmocka_unit_test(parameters_are_followed_or_refused),
        cmocka_unit_test(shapes_do_not_overflow),
        cmocka_unit_test(damaged_requests_are_refused_or_read),
        cmocka_unit_test(what_is_no_input_is_refused),
        cmocka_unit_test(narrow_integers_are_widened),
        cmocka_unit_test(requests_wait_up_to_a_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
