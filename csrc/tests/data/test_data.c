/* data: the hash against published values, lines at every cut of the text,
 * buffers of strings with bad offsets, rows that depend on nothing else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/data.h"

/* ---- persia_value_hash
 * ------------------------------------------------------ */

/* The values of the reference implementation's own self-test, and those in
 * the documentation of its Python package. */
static void test_hash_is_xxh64(void **state)
{
    (void)state;
    const uint32_t prime = 2654435761u;
    unsigned char buffer[101];
    uint32_t x = prime;
    for (size_t i = 0; i < sizeof buffer; i++) {
        buffer[i] = (unsigned char)(x >> 24);
        x *= x;
    }
    static const struct {
        size_t n;
        uint64_t plain, salted;
    } known[] = {
        {0, 0xEF46DB3751D8E999u, 0xAC75FDA2929B17EFu},
        {1, 0x4FCE394CC88952D8u, 0x739840CB819FA723u},
        {14, 0xCFFA8DB881BC3A3Du, 0x5B9611585EFCC9CBu},
        {101, 0x0EAB543384F878ADu, 0xCAA65939306F1E21u},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_true(persia_value_hash(buffer, known[i].n, 0) ==
                    known[i].plain);
        assert_true(persia_value_hash(buffer, known[i].n, prime) ==
                    known[i].salted);
    }
    assert_true(persia_value_hash("xxhash", 6, 20141025) ==
                13067679811253438005u);
    assert_true(persia_value_hash("Nobody inspects the spammish repetition",
                                  39, 0) == 0xFBCEA83C8A378BF1u);
}

/* ---- Criteo lines ---------------------------------------------------- */

enum { ROOM = 8 };

typedef struct sink {
    criteo_reader r;
    criteo_rows rows;
    line_fault faults[16];
    float label[ROOM], integers[ROOM * CRITEO_INTEGERS];
    uint64_t ids[ROOM * CRITEO_CATEGORIES];
} sink;

static void sink_init(sink *s)
{
    memset(s, 0, sizeof *s);
    s->r.has_label = 1;
    s->r.salts[2] = 7;
    s->r.fault = s->faults;
    s->r.fault_room = 16;
    s->rows = (criteo_rows){.room = ROOM,
                            .label = s->label,
                            .integers = s->integers,
                            .ids = s->ids};
}

/* Reads `text` from memory of exactly its size, so that ASan sees every
 * read beyond it. */
static size_t read_exact(sink *s, const char *text, size_t size, int final)
{
    char *copy = malloc(size ? size : 1);
    memcpy(copy, text, size);
    size_t used = persia_criteo_read(&s->r, copy, size, final, &s->rows);
    free(copy);
    return used;
}

/* Appends a line: label, integers, 26 categories "c<i>", ending. */
static void add_line(char *text, const char *label, const char *integers,
                     const char *ending)
{
    char *p = text + strlen(text);
    p += sprintf(p, "%s\t%s", label, integers);
    for (int i = 0; i < CRITEO_CATEGORIES; i++)
        p += sprintf(p, i == 4 ? "\t" : "\tc%d", i);
    strcpy(p, ending);
}

#define INTEGERS_A "1\t-2\t\t12345678\t123456789\t-99999999\t0\t7\t8\t9\t"   \
                   "999999999999999999\t-1\t65535"
#define INTEGERS_B "\t\t\t\t\t\t\t\t\t\t\t\t"

static const float integers_a[] = {1, -2, 0, 12345678, 123456789, -99999999,
                                   0, 7,  8, 9, 999999999999999999.0f, -1,
                                   65535};

static void make_text(char *text)
{
    text[0] = 0;
    add_line(text, "1", INTEGERS_A, "\n");
    add_line(text, "0", INTEGERS_B, "\r\n");
    strcat(text, "too\tfew\n");
    add_line(text, "2", INTEGERS_B, "\n");
    add_line(text, "1", "x" INTEGERS_B, "\n");
    strcat(text, "\n");
    add_line(text, "0", "1" INTEGERS_B, "");
}

static void check_rows(const sink *s)
{
    assert_int_equal(s->rows.n, 3);
    assert_int_equal(s->r.line, 7);
    assert_int_equal(s->r.faults, 4);
    const line_fault expected[] = {{3, FAULT_COLUMNS, 2},
                                   {4, FAULT_LABEL, 1},
                                   {5, FAULT_INTEGER, 2},
                                   {6, FAULT_COLUMNS, 1}};
    assert_int_equal(s->r.fault_n, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(s->faults[i].line, expected[i].line);
        assert_int_equal(s->faults[i].kind, expected[i].kind);
        assert_int_equal(s->faults[i].column, expected[i].column);
    }
    assert_true(s->label[0] == 1 && s->label[1] == 0 && s->label[2] == 0);
    for (int i = 0; i < CRITEO_INTEGERS; i++) {
        assert_true(s->integers[i] == integers_a[i]);
        assert_true(s->integers[CRITEO_INTEGERS + i] == 0);
        assert_true(s->integers[2 * CRITEO_INTEGERS + i] == (i == 0));
    }
    for (int i = 0; i < CRITEO_CATEGORIES; i++)
        for (int row = 0; row < 3; row++) {
            char name[16];
            size_t n = i == 4 ? 0 : (size_t)sprintf(name, "c%d", i);
            assert_true(s->ids[i * ROOM + row] ==
                        persia_value_hash(name, n, i == 2 ? 7 : 0));
        }
}

static void test_lines_at_every_cut(void **state)
{
    (void)state;
    char text[4096];
    make_text(text);
    size_t size = strlen(text);
    for (size_t cut = 0; cut <= size; cut++) {
        sink s;
        sink_init(&s);
        size_t used = read_exact(&s, text, cut, 0);
        assert_true(used <= cut);
        assert_true(used == 0 || text[used - 1] == '\n');
        used += read_exact(&s, text + used, size - used, 1);
        assert_int_equal(used, size);
        check_rows(&s);
    }
}

static void test_reading_stops_when_the_room_is_full(void **state)
{
    (void)state;
    char text[4096];
    make_text(text);
    sink s;
    sink_init(&s);
    s.rows.room = 1;
    size_t used = read_exact(&s, text, strlen(text), 1);
    assert_int_equal(s.rows.n, 1);
    assert_true(used == (size_t)(strchr(text, '\n') + 1 - text));
    assert_int_equal(read_exact(&s, text + used, 10, 1), 0);
}

static void test_lines_without_labels(void **state)
{
    (void)state;
    char text[1024] = "";
    add_line(text, "", INTEGERS_A, "\n");
    sink s;
    sink_init(&s);
    s.r.has_label = 0;
    s.rows.label = NULL;
    read_exact(&s, text + 1, strlen(text) - 1, 0);
    assert_int_equal(s.rows.n, 1);
    assert_true(s.integers[3] == 12345678);
}

static void test_integers(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int good;
        float value;
    } cases[] = {
        {"12", 1, 12}, {"-", 0, 0}, {"+1", 0, 0}, {"1.0", 0, 0},
        {"--1", 0, 0}, {"00000000", 1, 0}, {"1234567/", 0, 0},
        {"1234567:", 0, 0}, {"\x80", 0, 0}, {" 1", 0, 0}, {"1 ", 0, 0},
        {"1234567890123456789", 0, 0}, {"-12345678", 1, -12345678},
        {"-1234567890", 1, -1234567890.0f}, {"12\r", 0, 0}, {"\xB0", 0, 0},
        {"1-1", 0, 0}, {"87654321", 1, 87654321},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024] = "", integers[256];
        sprintf(integers, "%s\t\t\t\t\t\t\t\t\t\t\t\t%s", cases[i].text,
                cases[i].text);
        add_line(text, "0", integers, "\n");
        sink s;
        sink_init(&s);
        read_exact(&s, text, strlen(text), 0);
        assert_int_equal(s.rows.n, cases[i].good);
        if (cases[i].good) {
            assert_true(s.integers[0] == cases[i].value);
            assert_true(s.integers[12] == cases[i].value);
        }
    }
}

static void test_json_lines(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t lines, deep, odd;
    } cases[] = {
        {"", 0, 0, 0},
        {"{}\n{}", 2, 0, 0},
        {"{\"a\":[1]} \r\n\n", 2, 0, 1},
        {"{\"a\":[[]]}\n", 1, 1, 0},
        {"{\"a\":\"[[[\",\"b\":[]}\n", 1, 0, 0},
        {"{\"\\\"[[\":[]}\n", 1, 0, 0},
        {"[\n[\n[", 3, 0, 3},
        {"{},{},{}", 1, 0, 0},
        {"]]]][[[", 1, 1, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t deep, odd;
        const char *text = cases[i].text;
        assert_int_equal(
            persia_json_lines(text, strlen(text), 2, &deep, &odd),
            cases[i].lines);
        assert_int_equal(deep, cases[i].deep);
        assert_int_equal(odd, cases[i].odd);
    }
}

static void test_lines_skip(void **state)
{
    (void)state;
    /* Lines of 0, 1, ... 99 characters, the last one without an end. */
    char text[6000];
    size_t ends[100], size = 0;
    for (size_t i = 0; i < 100; i++) {
        memset(text + size, 'x', i);
        size += i;
        ends[i] = size + 1;
        if (i < 99)
            text[size++] = '\n';
    }
    ends[99] = size;
    for (uint64_t want = 0; want <= 101; want++) {
        uint64_t n = want;
        size_t used = persia_lines_skip(text, size, 1, &n);
        assert_int_equal(n, want < 100 ? want : 100);
        assert_int_equal(used, n ? ends[n - 1] : 0);
        n = want;
        used = persia_lines_skip(text, size, 0, &n);
        assert_int_equal(n, want < 99 ? want : 99);
        assert_int_equal(used, n ? ends[n - 1] : 0);
    }
}

/* ---- strings --------------------------------------------------------- */

static void test_strings(void **state)
{
    (void)state;
    const char bytes[] = " a,b ,,c \t,";
    int32_t narrow[] = {0, 11, 11, 2};
    int64_t wide[] = {0, 11, 11};
    string_column c = {.n = 2, .offsets = narrow, .bytes = bytes,
                       .size = 11};
    uint64_t ids[7];
    int64_t lengths[2];
    size_t n;
    assert_int_equal(persia_strings_hash(&c, 3, ids), PERSIA_OK);
    assert_true(ids[0] == persia_value_hash(bytes, 11, 3));
    assert_true(ids[1] == persia_value_hash("", 0, 3));
    for (int k = 0; k < 2; k++) {
        if (k) {
            c.offsets = wide;
            c.wide = 1;
        }
        c.strip = 1;
        assert_int_equal(persia_strings_split(&c, ',', 0, ids, 7, lengths, &n),
                         PERSIA_OK);
        assert_int_equal(n, 3);
        assert_int_equal(lengths[0], 3);
        assert_int_equal(lengths[1], 0);
        assert_true(ids[1] == persia_value_hash("b", 1, 0));
        assert_true(ids[2] == persia_value_hash("c", 1, 0));
        c.strip = 0;
        assert_int_equal(persia_strings_split(&c, ',', 0, ids, 7, lengths, &n),
                         PERSIA_OK);
        assert_true(ids[0] == persia_value_hash(" a", 2, 0));
        assert_int_equal(persia_strings_split(&c, ',', 0, ids, 2, lengths, &n),
                         PERSIA_ELIMIT);
    }
}

static void test_bad_offsets(void **state)
{
    (void)state;
    static const int32_t bad[][3] = {
        {0, 3, 2}, {-1, 0, 1}, {0, 0, 5}, {2, 1, 4}, {0, INT32_MAX, 4}};
    static const int64_t wide[3] = {0, INT64_MIN, INT64_MAX};
    uint64_t ids[8];
    int64_t lengths[2];
    size_t n;
    for (size_t i = 0; i <= sizeof bad / sizeof *bad; i++) {
        string_column c = {.n = 2, .bytes = "abcd", .size = 4};
        c.wide = i == sizeof bad / sizeof *bad;
        c.offsets = c.wide ? (const void *)wide : bad[i];
        assert_int_equal(persia_strings_hash(&c, 0, ids), PERSIA_EOFFSETS);
        assert_int_equal(persia_strings_split(&c, 'b', 0, ids, 8, lengths, &n),
                         PERSIA_EOFFSETS);
        assert_non_null(strstr(persia_err_text(), "of 4"));
    }
}

/* ---- SyntheticCTR ---------------------------------------------------- */

typedef struct made {
    synth_rows rows;
    size_t ids;
} made;

static made make(const synth *s, const synth_config *c, uint64_t first,
                 size_t n)
{
    size_t features = c->singles + c->multis;
    made m = {
        .rows = {
            .label = malloc(n * sizeof(float)),
            .logit = malloc(n * sizeof(float)),
            .dense = malloc(n * c->dense * sizeof(float)),
            .ids = malloc(persia_synth_ids_room(s, n) * sizeof(uint64_t)),
            .lengths = malloc(n * features * sizeof(int64_t)),
        }};
    m.ids = persia_synth_read(s, first, n, &m.rows);
    return m;
}

static void made_free(made *m)
{
    free(m->rows.label);
    free(m->rows.logit);
    free(m->rows.dense);
    free(m->rows.ids);
    free(m->rows.lengths);
}

/* The ids of feature f of row i. */
static const uint64_t *bag(const made *m, size_t n, size_t f, size_t i,
                           size_t *length)
{
    const uint64_t *ids = m->rows.ids;
    for (size_t b = 0; b < f * n + i; b++)
        ids += m->rows.lengths[b];
    *length = (size_t)m->rows.lengths[f * n + i];
    return ids;
}

static void test_a_row_depends_on_its_number_alone(void **state)
{
    (void)state;
    synth_config c;
    persia_synth_config_init(&c);
    c.vocabulary = 100;
    c.singles = 3;
    c.seed = 0xFFFFFFFFFFu;
    synth *s;
    assert_int_equal(persia_synth_create(&c, &s), PERSIA_OK);
    enum { N = 50 };
    uint64_t first = (1ull << 32) - 20; /* crosses a word of the counter */
    made all = make(s, &c, first, N);
    for (size_t i = 0; i < N; i++) {
        made one = make(s, &c, first + i, 1);
        assert_true(one.rows.label[0] == all.rows.label[i]);
        assert_true(one.rows.logit[0] == all.rows.logit[i]);
        assert_memory_equal(one.rows.dense, all.rows.dense + i * c.dense,
                            c.dense * sizeof(float));
        size_t total = 0;
        for (size_t f = 0; f < c.singles + c.multis; f++) {
            size_t n1, n2;
            const uint64_t *a = bag(&one, 1, f, 0, &n1);
            const uint64_t *b = bag(&all, N, f, i, &n2);
            assert_int_equal(n1, n2);
            if (n1)
                assert_memory_equal(a, b, n1 * sizeof *a);
            total += n1;
        }
        assert_int_equal(total, one.ids);
        made_free(&one);
    }
    made_free(&all);
    persia_synth_destroy(s);
}

static void test_extreme_configurations(void **state)
{
    (void)state;
    static const synth_config good[] = {
        {.seed = 0, .singles = 1, .vocabulary = 1, .ctr = 0.5, .signal = 1},
        {.singles = 512, .multis = 64, .max_length = 64, .dense = 512,
         .vocabulary = 3, .zipf = 10, .ctr = 0.01, .signal = 20},
        {.multis = 1, .max_length = 1, .vocabulary = 2, .ctr = 0.5},
        {.singles = 2, .dense = 1, .vocabulary = 7, .zipf = 0, .ctr = 0.99,
         .signal = 2},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        synth *s;
        assert_int_equal(persia_synth_create(&good[i], &s), PERSIA_OK);
        made m = make(s, &good[i], UINT64_MAX - 5, 5);
        assert_true(m.ids <= persia_synth_ids_room(s, 5));
        for (int k = 0; k < 5; k++)
            assert_true(isfinite(m.rows.logit[k]));
        made_free(&m);
        persia_synth_destroy(s);
    }
    synth_config base, bad;
    persia_synth_config_init(&base);
#define REFUSED(change)                                                       \
    do {                                                                      \
        synth *s = NULL;                                                      \
        bad = base;                                                           \
        bad.change;                                                           \
        assert_int_equal(persia_synth_create(&bad, &s), PERSIA_EARG);         \
        assert_null(s);                                                       \
    } while (0)
    REFUSED(singles = 513);
    REFUSED(multis = 65);
    REFUSED(max_length = 0);
    REFUSED(max_length = 65);
    REFUSED(dense = 513);
    REFUSED(vocabulary = 0);
    REFUSED(zipf = -1);
    REFUSED(zipf = NAN);
    REFUSED(ctr = 1);
    REFUSED(ctr = NAN);
    REFUSED(signal = INFINITY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash_is_xxh64),
        cmocka_unit_test(test_lines_at_every_cut),
        cmocka_unit_test(test_reading_stops_when_the_room_is_full),
        cmocka_unit_test(test_lines_without_labels),
        cmocka_unit_test(test_integers),
        cmocka_unit_test(test_json_lines),
        cmocka_unit_test(test_lines_skip),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_bad_offsets),
        cmocka_unit_test(test_a_row_depends_on_its_number_alone),
        cmocka_unit_test(test_extreme_configurations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
