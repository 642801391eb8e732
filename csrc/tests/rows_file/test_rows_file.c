/* Files of rows that are served: each row is found, others are not, values
 * are within half a scale, pooled batches have the bits of
 * persia_pool_forward(), and damaged files are refused, or searched within
 * their bounds. */
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "pool/pool.h"
#include "rows_file/private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
#include "fuzz/fuzz_rows_file.c"

enum { KEY = 5, DIM_MAX = 40 };

static char folder_path[64];
static int folder = -1;
static uint32_t random_state = 1;

static uint32_t random_u32(void)
{
    uint32_t counter[4] = {random_state++, 0, 0, 0}, key[2] = {7, 7}, out[4];
    philox4x32(counter, key, out);
    return out[0];
}

static float random_value(void)
{
    return (float)(random_u32() % 20001) / 1000.0f - 10.0f;
}

static int folder_open(void **state)
{
    (void)state;
    strcpy(folder_path, "/tmp/persia-rows-XXXXXX");
    assert_non_null(mkdtemp(folder_path));
    folder = open(folder_path, O_RDONLY | O_DIRECTORY);
    return folder < 0;
}

static int folder_close(void **state)
{
    char command[100];
    (void)state;
    close(folder);
    snprintf(command, sizeof command, "rm -r %s", folder_path);
    return system(command);
}

static table_config absent_of(uint32_t dim)
{
    table_config c;
    persia_table_config_init(&c);
    strcpy(c.name, "user");
    c.dim = dim;
    return c;
}

/* Writes n rows with ids that spread, or follow each other. */
static void make_file(const rows_config *c, size_t n, int spread,
                      uint64_t *ids, float *vectors)
{
    rows_writer *w;
    for (size_t i = 0; i < n; i++) {
        ids[i] = spread ? id_hash(i) : i;
        for (uint32_t j = 0; j < c->dim; j++)
            vectors[i * c->dim + j] = random_value();
    }
    (void)unlinkat(folder, "rows", 0);
    assert_int_equal(persia_rows_writer_open(folder, "rows", c, n,
                                             "{\"table\":\"user\"}", &w),
                     PERSIA_OK);
    for (size_t at = 0; at < n;) {
        const size_t some = n - at < 777 ? n - at : 777;
        assert_int_equal(persia_rows_writer_add(w, some, ids + at,
                                                vectors + at * c->dim),
                         PERSIA_OK);
        at += some;
    }
    assert_int_equal(persia_rows_writer_finish(w), PERSIA_OK);
    persia_rows_writer_close(w);
}

static rows_file *open_file(const rows_config *c)
{
    const table_config absent = absent_of(c->dim);
    rows_file *f;
    assert_int_equal(persia_rows_file_open(folder, "rows", c, &absent, &f),
                     PERSIA_OK);
    return f;
}

/* How far a value may be from the one that was written. */
static float bound(const rows_config *c, const float *vector)
{
    float most = 0;
    for (uint32_t j = 0; j < c->dim; j++)
        most = fabsf(vector[j]) > most ? fabsf(vector[j]) : most;
    const float bounds[] = {0, most / 2048, most / 127 * 0.5001f,
                            most / 7 * 0.5001f};
    return bounds[c->type];
}

static void check_rows(const rows_config *c, size_t n, int spread)
{
    uint64_t *ids = malloc((n + 1) * sizeof *ids), absent = 0;
    float *vectors = malloc((n + 1) * c->dim * sizeof *vectors);
    float *found = malloc((n + 1) * c->dim * sizeof *found);
    make_file(c, n, spread, ids, vectors);
    rows_file *f = open_file(c);
    assert_int_equal(persia_rows_file_rows(f), n);
    assert_int_equal(persia_rows_file_check(f), PERSIA_OK);
    assert_int_equal(
        persia_rows_file_look_up(f, n, ids, found, c->dim, &absent),
        PERSIA_OK);
    assert_int_equal(absent, 0);
    for (size_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < c->dim; j++)
            assert_true(fabsf(found[i * c->dim + j] -
                              vectors[i * c->dim + j]) <=
                        bound(c, vectors + i * c->dim));
    persia_rows_file_close(f);
    free(ids);
    free(vectors);
    free(found);
}

static void test_every_row_is_found(void **state)
{
    static const size_t counts[] = {0, 1, 11, 12, 13, 1000, 20000};
    static const uint32_t dims[] = {1, 2, 7, 16, DIM_MAX};
    (void)state;
    for (uint32_t type = 0; type < ROWS_TYPES; type++)
        for (size_t n = 0; n < 7; n++)
            for (size_t d = 0; d < 5; d++) {
                const rows_config c = {type, dims[d], KEY};
                check_rows(&c, counts[n], (n + d) % 2 == 0);
            }
}

/* As a table without rows gives them. */
static void test_absent_ids_have_initial_vectors(void **state)
{
    const rows_config c = {ROWS_INT8, 16, KEY};
    table_config config = absent_of(16);
    uint64_t ids[100], others[300], absent = 0;
    float vectors[100 * 16], found[300 * 16], wanted[300 * 16];
    table *t;
    (void)state;
    make_file(&c, 100, 1, ids, vectors);
    rows_file *f = open_file(&c);
    for (size_t i = 0; i < 300; i++)
        others[i] = id_hash(1000 + i);
    assert_int_equal(persia_table_create(&config, &t), PERSIA_OK);
    assert_int_equal(persia_table_get(t, 300, others, wanted, NULL, NULL),
                     PERSIA_OK);
    assert_int_equal(
        persia_rows_file_look_up(f, 300, others, found, 16, &absent),
        PERSIA_OK);
    assert_int_equal(absent, 300);
    uint8_t has[400];
    assert_int_equal(persia_rows_file_contains(f, 300, others, has), 0);
    assert_int_equal(persia_rows_file_contains(f, 100, ids, has + 300), 0);
    for (size_t i = 0; i < 400; i++)
        assert_int_equal(has[i], i >= 300);
    assert_memory_equal(found, wanted, sizeof found);
    persia_table_destroy(t);
    persia_rows_file_close(f);
    config.missing = MISSING_ZEROS;
    assert_int_equal(persia_rows_file_open(folder, "rows", &c, &config, &f),
                     PERSIA_OK);
    assert_int_equal(
        persia_rows_file_look_up(f, 1, others, found, 16, &absent), PERSIA_OK);
    for (size_t j = 0; j < 16; j++)
        assert_true(found[j] == 0);
    persia_rows_file_close(f);
}

/* Newer rows count before those of the file. */
static void test_newer_rows(void **state)
{
    enum { ROWS = 500, DIM = 12 };
    static uint64_t ids[ROWS];
    static float vectors[ROWS * DIM], wanted[ROWS * DIM];
    static float found[ROWS * (DIM + 3)];
    static char rows[ROWS * (8 + 4 * DIM)];
    (void)state;
    for (uint32_t type = 0; type < ROWS_TYPES; type++) {
        const rows_config c = {type, DIM, KEY};
        uint64_t absent = 0;
        uint8_t has[ROWS];
        make_file(&c, ROWS, 1, ids, vectors);
        rows_file *f = open_file(&c);
        /* the second half gets the vectors of the first; ten are gone, and
         * one of these is back */
        assert_int_equal(persia_rows_narrow(&c, 250, ids + 250, vectors,
                                            rows),
                         PERSIA_OK);
        assert_int_equal(persia_rows_file_look_up(f, 250, ids, wanted, DIM,
                                                  &absent),
                         PERSIA_OK);
        memcpy(wanted + 250 * DIM, wanted, sizeof wanted / 2);
        assert_int_equal(persia_rows_file_apply(f, 10, ids + 240, 250, rows),
                         PERSIA_OK);
        assert_int_equal(persia_rows_file_apply(f, 10, ids + 245, 0, NULL),
                         PERSIA_OK);
        assert_int_equal(persia_rows_file_apply(f, 0, NULL, 1, rows),
                         PERSIA_OK);
        assert_int_equal(persia_rows_file_fresh(f), 260);
        for (size_t stride = DIM; stride <= DIM + 3; stride += 3) {
            absent = 0;
            assert_int_equal(persia_rows_file_look_up(f, ROWS, ids, found,
                                                      stride, &absent),
                             PERSIA_OK);
            assert_int_equal(absent, 14);
            for (size_t i = 0; i < ROWS; i++)
                if (i < 240 || i == 250 || i > 254)
                    assert_memory_equal(found + i * stride, wanted + i * DIM,
                                        DIM * sizeof(float));
        }
        assert_int_equal(persia_rows_file_contains(f, ROWS, ids, has), 0);
        for (size_t i = 0; i < ROWS; i++)
            assert_int_equal(has[i], i < 240 || i == 250 || i > 254);
        persia_rows_file_close(f);
        f = open_file(&c);
        persia_rows_file_limit(f, 1000);
        assert_int_equal(persia_rows_file_apply(f, 0, NULL, 250, rows),
                         PERSIA_ELIMIT);
        persia_rows_file_close(f);
    }
}

/* A batch of one feature: bags repeat those before them. */
typedef struct repeated {
    uint64_t ids[2000];
    float weights[2000];
    int64_t offsets[101];
    size_t once; /* ids of bags that differ from the one before */
} repeated;

static void make_repeated(repeated *x, size_t bags, int one_each,
                          const uint64_t *ids, size_t ids_n)
{
    size_t n = 0, before = 0;
    x->once = 0;
    x->offsets[0] = 0;
    for (size_t i = 0; i < bags; i++) {
        const int same = i && random_u32() % 6;
        const size_t some = same ? n - before
                            : one_each ? 1 : random_u32() % 20;
        for (size_t k = 0; k < some; k++) {
            const size_t at = n + k;
            x->ids[at] = same                   ? x->ids[before + k]
                         : at && random_u32() % 5 ? ids[random_u32() % ids_n]
                                                : id_hash(5000 + at);
            x->weights[at] = same ? x->weights[before + k] : random_value();
        }
        x->once += same ? 0 : some;
        before = n;
        n += some;
        x->offsets[i + 1] = (int64_t)n;
    }
}

/* Each bag of a batch has what it has alone. */
static void check_repeated(const rows_file *f, const rows_batch *b,
                           const rows_part *part, const repeated *x)
{
    const size_t dim = persia_rows_file_dim(f), width = b->width;
    const int rows = part->kind == POOL_NONE;
    float alone[20 * 8];
    rows_counts all, one;
    for (size_t i = 0; i < 2000 * width; i++)
        b->out[i] = -7;
    assert_int_equal(persia_rows_file_batch(b, part, 1, &all), PERSIA_OK);
    if (!rows && 2 * x->once < b->n)
        assert_true(all.ids <= x->once);
    for (size_t i = 0; i < b->bags; i++) {
        const size_t first = (size_t)x->offsets[i];
        const size_t n = (size_t)x->offsets[i + 1] - first;
        const int64_t offsets[] = {0, (int64_t)n};
        const rows_part own = {f, 0, part->kind, 0};
        const rows_batch bag = {
            .features = 1, .n = n, .ids = x->ids + first,
            .offsets = b->offsets ? offsets : NULL, .bags = 1,
            .weights = b->weights ? x->weights + first : NULL, .out = alone,
            .width = dim};
        assert_int_equal(persia_rows_file_batch(&bag, &own, 1, &one),
                         PERSIA_OK);
        for (size_t k = 0; k < (rows ? n : 1); k++) {
            const float *row = b->out + (rows ? first + k : i) * width;
            assert_memory_equal(row + part->column, alone + k * dim,
                                dim * sizeof *alone);
            for (size_t j = 0; j < part->column; j++)
                assert_true(row[j] == -7);
        }
    }
}

/* Equal bags in a row have what each has alone, of newer or absent ids, too;
 * they are looked up once. */
static void test_equal_bags_are_looked_up_once(void **state)
{
    enum { ROWS = 60, BAGS = 100, DIM = 3 };
    const rows_config c = {ROWS_FP32, DIM, KEY};
    static repeated x;
    static float out[2000 * (DIM + 2)];
    uint64_t ids[ROWS];
    float vectors[ROWS * DIM];
    char rows[10 * (8 + 4 * DIM + 4)];
    (void)state;
    make_file(&c, ROWS, 1, ids, vectors);
    rows_file *f = open_file(&c);
    for (uint32_t turn = 0; turn < 400; turn++) {
        const size_t column = turn % 2 * 2;
        const int one_each = turn / 2 % 2;
        const rows_part part = {f, 0, turn / 4 % POOL_KINDS, column};
        const size_t bags = 1 + random_u32() % BAGS;
        make_repeated(&x, bags, one_each, ids, ROWS);
        const rows_batch b = {.features = 1,
                              .n = (size_t)x.offsets[bags],
                              .ids = x.ids,
                              .offsets = one_each ? NULL : x.offsets,
                              .bags = bags,
                              .weights = turn % 3 ? NULL : x.weights,
                              .out = out,
                              .width = DIM + column};
        check_repeated(f, &b, &part, &x);
        if (turn % 100)
            continue; /* now and then some are newer, and some are gone */
        assert_int_equal(persia_rows_narrow(&c, 10, ids + turn / 100 * 10,
                                            vectors, rows),
                         PERSIA_OK);
        assert_int_equal(persia_rows_file_apply(f, 5, ids + 50, 10, rows),
                         PERSIA_OK);
    }
    persia_rows_file_close(f);
}

/* A user with a history beside candidates, in two requests. */
static void test_a_history_is_looked_up_once_a_request(void **state)
{
    enum { ROWS = 60, N = 40, DIM = 8 };
    const rows_config c = {ROWS_INT8, DIM, KEY};
    uint64_t ids[ROWS], asked[4 * N];
    float vectors[ROWS * DIM], out[4 * N * DIM];
    int64_t offsets[N + 1];
    rows_counts counts;
    (void)state;
    make_file(&c, ROWS, 0, ids, vectors);
    rows_file *f = open_file(&c);
    for (size_t i = 0; i <= N; i++)
        offsets[i] = (int64_t)(4 * i);
    for (size_t i = 0; i < 4 * N; i++)
        asked[i] = i < 2 * N ? i % 4 : i % 4 == 3 ? ROWS : i % 4 + 2;
    rows_batch b = {.features = 1, .n = 4 * N, .ids = asked,
                    .offsets = offsets, .bags = N, .out = out, .width = DIM};
    rows_part part = {f, 0, POOL_MEAN, 0};
    assert_int_equal(persia_rows_file_batch(&b, &part, 1, &counts),
                     PERSIA_OK);
    assert_int_equal(counts.ids, 8);
    assert_int_equal(counts.absent, 1);
    part.kind = POOL_NONE; /* two ids are in both */
    assert_int_equal(persia_rows_file_batch(&b, &part, 1, &counts),
                     PERSIA_OK);
    assert_int_equal(counts.ids, 6);
    assert_int_equal(counts.absent, 1);
    persia_rows_file_close(f);
}

static void test_batches_pool(void **state)
{
    enum { BAGS = 50, N = 400, DIM = 12 };
    const rows_config c = {ROWS_FP16, DIM, KEY};
    uint64_t ids[1000], batch[N], absent = 0;
    rows_counts counts;
    float vectors[1000 * DIM], rows[N * DIM], weights[N];
    float wanted[BAGS * DIM], out[BAGS * 2 * DIM];
    int64_t offsets[2 * BAGS + 1] = {0};
    (void)state;
    make_file(&c, 1000, 1, ids, vectors);
    rows_file *f = open_file(&c);
    for (size_t i = 0; i < 2 * BAGS; i++)
        offsets[i + 1] = offsets[i] + random_u32() % 8;
    const size_t n = (size_t)offsets[2 * BAGS];
    assert_true(n <= 2 * BAGS * 7 && n <= N * 2);
    for (size_t i = 0; i < N; i++) {
        batch[i] = i % 9 ? ids[random_u32() % 1000] : id_hash(5000 + i);
        weights[i] = random_value();
    }
    const size_t used = n < N ? n : N;
    for (size_t i = 0; i <= 2 * BAGS; i++)
        offsets[i] = offsets[i] > (int64_t)used ? (int64_t)used : offsets[i];
    const rows_part parts[] = {{f, 0, POOL_MEAN, 0}, {f, 1, POOL_SUM, DIM}};
    const rows_batch b = {.features = 2, .n = used, .ids = batch,
                          .offsets = offsets, .bags = BAGS,
                          .weights = weights, .out = out, .width = 2 * DIM};
    assert_int_equal(persia_rows_file_batch(&b, parts, 2, &counts),
                     PERSIA_OK);
    assert_int_equal(
        persia_rows_file_look_up(f, used, batch, rows, DIM, &absent),
        PERSIA_OK);
    for (size_t p = 0; p < 2; p++) {
        const int64_t *own = offsets + p * BAGS;
        persia_pool_forward(parts[p].kind, BAGS, own, weights + own[0],
                            rows + own[0] * DIM, DIM, wanted, DIM);
        for (size_t i = 0; i < BAGS; i++)
            assert_memory_equal(out + i * 2 * DIM + p * DIM, wanted + i * DIM,
                                DIM * sizeof(float));
    }
    offsets[3] = offsets[5] + 1; /* it falls after that */
    assert_int_equal(persia_rows_file_batch(&b, parts, 2, &counts),
                     PERSIA_EOFFSETS);
    persia_rows_file_close(f);
}

static void test_values_that_do_not_fit_are_refused(void **state)
{
    static const float wrong[] = {NAN, INFINITY, -INFINITY, 65520.0f};
    const uint64_t id = 3;
    (void)state;
    for (uint32_t type = 0; type < ROWS_TYPES; type++)
        for (size_t i = 0; i < 4; i++) {
            const rows_config c = {type, 1, KEY};
            rows_writer *w;
            (void)unlinkat(folder, "rows", 0);
            assert_int_equal(
                persia_rows_writer_open(folder, "rows", &c, 1, "{}", &w),
                PERSIA_OK);
            assert_int_equal(persia_rows_writer_add(w, 1, &id, &wrong[i]),
                             i < 3 || type == ROWS_FP16 ? PERSIA_EARG
                                                        : PERSIA_OK);
            persia_rows_writer_close(w);
        }
}

static void test_writer_takes_as_many_rows_as_it_was_made_for(void **state)
{
    const rows_config c = {ROWS_FP32, 1, KEY}, even = {ROWS_FP32, 1, 4};
    const uint64_t ids[] = {1, 2};
    const float values[] = {1, 2};
    rows_writer *w;
    (void)state;
    (void)unlinkat(folder, "rows", 0);
    assert_int_equal(
        persia_rows_writer_open(folder, "rows", &even, 1, "{}", &w),
        PERSIA_EARG);
    assert_int_equal(
        persia_rows_writer_open(folder, "rows", &c, ROWS_MAX, "{}", &w),
        PERSIA_ELIMIT);
    assert_int_equal(persia_rows_writer_open(folder, "rows", &c, 1, "{}", &w),
                     PERSIA_OK);
    assert_int_equal(persia_rows_writer_finish(w), PERSIA_EARG);
    assert_int_equal(persia_rows_writer_add(w, 2, ids, values), PERSIA_EARG);
    persia_rows_writer_close(w);
}

/* Every 97th byte of a file, changed, and every prefix of its header. */
static void test_damaged_files_stay_within_bounds(void **state)
{
    const rows_config c = {ROWS_INT4, 2, KEY};
    uint64_t ids[300];
    float vectors[600];
    struct stat st;
    (void)state;
    make_file(&c, 300, 1, ids, vectors);
    const int fd = openat(folder, "rows", O_RDONLY);
    assert_int_equal(fstat(fd, &st), 0);
    const size_t size = (size_t)st.st_size;
    uint8_t *data = malloc(size);
    assert_int_equal(read(fd, data, size), size);
    close(fd);
    for (size_t at = 0; at < size; at += at < 300 ? 1 : 97) {
        data[at] ^= 0x41;
        LLVMFuzzerTestOneInput(data, size);
        data[at] ^= 0x41;
    }
    for (size_t n = 0; n < size; n += 1 + n / 8)
        LLVMFuzzerTestOneInput(data, n);
    free(data);
}

static void test_damage_is_found(void **state)
{
    const rows_config c = {ROWS_FP32, 1, KEY}, wider = {ROWS_FP32, 4, KEY};
    const table_config absent = absent_of(4);
    uint64_t ids[100];
    float vectors[100];
    rows_file *f;
    (void)state;
    make_file(&c, 100, 0, ids, vectors);
    assert_int_equal(
        persia_rows_file_open(folder, "rows", &wider, &absent, &f),
        PERSIA_EMISMATCH);
    const int fd = openat(folder, "rows", O_RDWR);
    assert_int_equal(pwrite(fd, &(uint64_t){77777}, 8, lseek(fd, 0, SEEK_END) -
                                                           16 * 40),
                     8);
    close(fd);
    f = open_file(&c);
    assert_int_equal(persia_rows_file_check(f), PERSIA_ECORRUPT);
    persia_rows_file_close(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_row_is_found),
        cmocka_unit_test(test_absent_ids_have_initial_vectors),
        cmocka_unit_test(test_newer_rows),
        cmocka_unit_test(test_equal_bags_are_looked_up_once),
        cmocka_unit_test(test_a_history_is_looked_up_once_a_request),
        cmocka_unit_test(test_batches_pool),
        cmocka_unit_test(test_values_that_do_not_fit_are_refused),
        cmocka_unit_test(test_writer_takes_as_many_rows_as_it_was_made_for),
        cmocka_unit_test(test_damaged_files_stay_within_bounds),
        cmocka_unit_test(test_damage_is_found),
    };
    return cmocka_run_group_tests(tests, folder_open, folder_close);
}
