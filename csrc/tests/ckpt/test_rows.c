/* Checksums, safetensors headers and row files. */
#include <fcntl.h>
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

#include "ckpt/crc32c.h"
#include "ckpt/rows.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
#include "fuzz/fuzz_safetensors.c"

/* ---- helpers ------------------------------------------------------------ */

static uint32_t random_state = 1;
static uint32_t random_u32(void)
{
    uint32_t counter[4] = {random_state++, 0, 0, 0}, key[2] = {7, 7}, out[4];
    philox4x32(counter, key, out);
    return out[0];
}

static char folder_path[64];
static int folder = -1;

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

static table_config some_config(uint32_t dim, uint32_t dtype, uint32_t kind)
{
    table_config c;
    memset(&c, 0, sizeof c);
    strcpy(c.name, "user");
    c.dim = dim;
    c.dtype = dtype;
    c.optimizer = kind;
    return c;
}

static void fill(void *data, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ((unsigned char *)data)[i] = (unsigned char)(random_u32() | 1);
}

/* A row file of n random rows, appended in portions of `portion`. */
static ckpt_file make_file(const char *name, const table_config *config,
                           size_t n, size_t portion, row_piece *p)
{
    row_writer w;
    row_shape shape;
    row_shape_of(config, &shape);
    assert_int_equal(row_piece_init(p, &shape), PERSIA_OK);
    assert_true(p->room >= n);
    p->n = n;
    for (int c = 0; c < COLS; c++)
        if (p->col[c])
            fill(p->col[c], n * shape.bytes[c]);
    assert_int_equal(row_writer_create(&w, folder, name, &shape, n,
                                       "{\"table\":\"\\u00e9\"}"),
                     PERSIA_OK);
    for (size_t i = 0; i < n; i += portion)
        assert_int_equal(
            row_writer_append(&w, p, i, n - i < portion ? n - i : portion),
            PERSIA_OK);
    assert_int_equal(row_writer_finish(&w), PERSIA_OK);
    return w.file;
}

static size_t slurp(const char *name, unsigned char *out, size_t room)
{
    int fd = openat(folder, name, O_RDONLY);
    assert_true(fd >= 0);
    ssize_t n = read(fd, out, room);
    assert_true(n >= 0 && (size_t)n < room);
    close(fd);
    return (size_t)n;
}

static void spill(const char *name, const void *data, size_t n)
{
    int fd = openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, n), n);
    close(fd);
}

/* ---- checksums ---------------------------------------------------------- */

static void crc_known_values(void **state)
{
    unsigned char zeros[32] = {0}, ones[32], rising[32];
    (void)state;
    memset(ones, 0xff, sizeof ones);
    for (int i = 0; i < 32; i++)
        rising[i] = (unsigned char)i;
    assert_int_equal(persia_crc32c(0, "", 0), 0);
    assert_int_equal(persia_crc32c(0, "123456789", 9), 0xE3069283u);
    /* RFC 3720, B.4 */
    assert_int_equal(persia_crc32c(0, zeros, 32), 0x8A9136AAu);
    assert_int_equal(persia_crc32c(0, ones, 32), 0x62A8AB43u);
    assert_int_equal(persia_crc32c(0, rising, 32), 0x46DD794Eu);
}

static void crc_of_parts(void **state)
{
    unsigned char data[1000];
    (void)state;
    fill(data, sizeof data);
    for (int i = 0; i < 300; i++) {
        size_t n = random_u32() % 1000, cut = n ? random_u32() % n : 0;
        uint32_t whole = persia_crc32c(0, data, n);
        assert_int_equal(crc32c_tables(0, data, n), whole);
        assert_int_equal(
            persia_crc32c(persia_crc32c(0, data, cut), data + cut, n - cut),
            whole);
        assert_int_equal(persia_crc32c_combine(
                             persia_crc32c(0, data, cut),
                             persia_crc32c(0, data + cut, n - cut), n - cut),
                         whole);
    }
}

/* ---- headers ------------------------------------------------------------ */

static int parse(const char *json, uint64_t data_bytes, st_header *h)
{
    return st_parse("f", json, strlen(json), 8 + strlen(json) + data_bytes,
                    h);
}

#define TENSOR(dtype, shape, offsets)                                         \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets  \
    "}"

static void header_good(void **state)
{
    st_header h;
    (void)state;
    assert_int_equal(parse("{}", 0, &h), PERSIA_OK);
    assert_int_equal(h.n, 0);
    assert_int_equal(
        parse("{ \"b\" :" TENSOR("F32", "[2, 3]", "[16 ,40]") " ,\n"
              "\"__metadata__\": {\"k\\n\\u00e9\": \"v\", \"a\":\"\"},"
              "\"a\":" TENSOR("U64", "[2]", "[0,16]") "}  ",
              40, &h),
        PERSIA_OK);
    assert_int_equal(h.n, 2);
    assert_string_equal(h.tensors[0].name, "a");
    assert_int_equal(h.tensors[0].dtype, ST_U64);
    assert_string_equal(h.tensors[1].name, "b");
    assert_int_equal(h.tensors[1].rank, 2);
    assert_int_equal(h.tensors[1].shape[1], 3);
    assert_int_equal(h.tensors[1].begin, 16);
    assert_int_equal(h.tensors[1].end, 40);
    /* Scalars and empty tensors. */
    assert_int_equal(parse("{\"z\":" TENSOR("F32", "[0]", "[4,4]") ",\"s\":"
                           TENSOR("F32", "[]", "[0,4]") "}",
                           4, &h),
                     PERSIA_OK);
}

static void header_bad(void **state)
{
    static const struct {
        const char *json;
        uint64_t data;
        const char *says;
    } cases[] = {
        {"", 0, "'{' expected"},
        {" {}", 0, "'{' expected"},
        {"[]", 0, "'{' expected"},
        {"{", 0, "'\"' expected"},
        {"{}x", 0, "more text"},
        {"{\"a\":1}", 0, "'{' expected"},
        {"{\"a\":{}}", 0, "'\"' expected"},
        {"{\"a\":{\"dtype\":\"F32\"}}", 0, "without"},
        {"{\"a\":" TENSOR("F64", "[1]", "[0,8]") "}", 8, "dtype other"},
        {"{\"a\":" TENSOR("F32", "[-1]", "[0,8]") "}", 8, "number expected"},
        {"{\"a\":" TENSOR("F32", "[1.0]", "[0,4]") "}", 4, "',' expected"},
        {"{\"a\":" TENSOR("F32", "[1e0]", "[0,4]") "}", 4, "',' expected"},
        {"{\"a\":" TENSOR("F32", "[01]", "[0,4]") "}", 4, "leading 0"},
        {"{\"a\":" TENSOR("F32", "[1,]", "[0,4]") "}", 4, "number expected"},
        {"{\"a\":" TENSOR("F32", "[1,1,1,1,1]", "[0,4]") "}", 4, "too many"},
        {"{\"a\":" TENSOR("F32", "[18446744073709551616]", "[0,4]") "}", 4,
         "too large"},
        {"{\"a\":" TENSOR("F32", "[4611686018427387904]", "[0,0]") "}", 0,
         "extent"},
        {"{\"a\":" TENSOR("F32", "[4294967296,4294967296]", "[0,0]") "}", 0,
         "extent"},
        {"{\"a\":" TENSOR("F32", "[2]", "[0,4]") "}", 4, "extent"},
        {"{\"a\":" TENSOR("F32", "[1]", "[4,0]") "}", 4, "extent"},
        {"{\"a\":" TENSOR("F32", "[1]", "[0]") "}", 4, "two data_offsets"},
        {"{\"a\":" TENSOR("F32", "[1]", "[4,8]") "}", 8, "begins at byte 4"},
        {"{\"a\":" TENSOR("F32", "[1]", "[0,4]") "}", 3, "truncated"},
        {"{\"a\":" TENSOR("F32", "[1]", "[0,4]") "}", 5, "too long"},
        {"{\"a\":" TENSOR("F32", "[2]", "[0,8]") ",\"b\":"
         TENSOR("F32", "[1]", "[4,8]") "}", 8, "overlap"},
        {"{\"a\":" TENSOR("F32", "[1]", "[0,4]") ",\"a\":"
         TENSOR("F32", "[1]", "[4,8]") "}", 8, "given twice"},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 0, "given twice"},
        {"{\"a\":{\"x\":\"F32\"}}", 0, "unknown key"},
        {"{\"\\u0061\":{}}", 0, "escape in a name"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "'\"' expected"},
        {"{\"__metadata__\":{\"a\":\"\\x\"}}", 0, "unknown escape"},
        {"{\"__metadata__\":{\"a\":\"\\u12g4\"}}", 0, "hexadecimal"},
        {"{\"__metadata__\":{\"a\":\"\n\"}}", 0, "control character"},
        {"{\"__metadata__\":{\"a\":\"", 0, "without end"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "given twice"},
        {"{\"a-name-that-is-longer-than-thirty-two-bytes\":{}}", 0,
         "too long"},
    };
    st_header h;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int code = parse(cases[i].json, cases[i].data, &h);
        if (code != PERSIA_ECORRUPT ||
            !strstr(persia_err_text(), cases[i].says))
            fail_msg("%s\ngave %d: %s\nnot: %s", cases[i].json, code,
                     persia_err_text(), cases[i].says);
        assert_memory_equal(persia_err_text(), "f: ", 3);
    }
}

static void header_length(void **state)
{
    static const unsigned char two[8] = {2};
    unsigned char huge[8];
    size_t n;
    (void)state;
    memset(huge, 0xff, sizeof huge);
    assert_int_equal(st_json_bytes("f", two, 10, &n), PERSIA_OK);
    assert_int_equal(n, 2);
    assert_int_equal(st_json_bytes("f", two, 9, &n), PERSIA_ECORRUPT);
    assert_int_equal(st_json_bytes("f", huge, 9, &n), PERSIA_ECORRUPT);
}

/* ---- row files ---------------------------------------------------------- */

static void rows_round_trip(void **state)
{
    static const uint32_t kinds[] = {OPTIM_SGD, OPTIM_ADAGRAD,
                                     OPTIM_ROWWISE_ADAGRAD, OPTIM_ADAM};
    (void)state;
    for (uint32_t dtype = 0; dtype < VECTOR_DTYPES; dtype++)
        for (size_t k = 0; k < 4; k++)
            for (uint32_t dim = 1; dim < 20; dim += 6) {
                table_config config = some_config(dim, dtype, kinds[k]);
                row_piece in, out;
                row_reader r;
                uint32_t crc, crc_of_file;
                uint64_t bytes;
                size_t n = 1 + random_u32() % 200;
                ckpt_file f = make_file("r.safetensors", &config, n,
                                        1 + random_u32() % 50, &in);
                assert_int_equal(row_reader_open(&r, folder, f.name, &config),
                                 PERSIA_OK);
                assert_int_equal(r.rows, n);
                uint64_t here;
                assert_int_equal(row_reader_verify(&r, &crc, &here),
                                 PERSIA_OK);
                assert_int_equal(here, n);
                assert_int_equal(crc, f.crc);
                assert_int_equal(
                    persia_ckpt_file_crc(folder, f.name, &crc_of_file, &bytes),
                    PERSIA_OK);
                assert_int_equal(crc_of_file, f.crc);
                assert_int_equal(bytes, f.bytes);
                size_t first = random_u32() % n;
                assert_int_equal(row_piece_init(&out, &r.shape), PERSIA_OK);
                assert_int_equal(row_reader_read(&r, first, n - first, &out),
                                 PERSIA_OK);
                for (int c = 0; c < COLS; c++)
                    if (in.col[c])
                        assert_memory_equal(
                            out.col[c],
                            (char *)in.col[c] + first * r.shape.bytes[c],
                            (n - first) * r.shape.bytes[c]);
                row_piece_free(&in);
                row_piece_free(&out);
                row_reader_close(&r);
                unlinkat(folder, f.name, 0);
            }
}

/* A row file of `config`'s table that is whole and has this crc? */
static int whole(const char *name, const table_config *config, uint32_t crc)
{
    row_reader r;
    uint32_t seen;
    uint64_t here;
    if (row_reader_open(&r, folder, name, config))
        return 0;
    int code = row_reader_verify(&r, &seen, &here);
    row_reader_close(&r);
    return code == PERSIA_OK && seen == crc;
}

static void rows_altered(void **state)
{
    unsigned char bytes[8192];
    table_config config = some_config(3, VECTOR_BF16, OPTIM_ADAGRAD);
    row_piece p;
    (void)state;
    ckpt_file f = make_file("a.safetensors", &config, 20, 20, &p);
    size_t n = slurp(f.name, bytes, sizeof bytes);
    assert_int_equal(n, f.bytes);
    assert_true(whole(f.name, &config, f.crc));
    for (size_t i = 0; i < n; i++) {
        unsigned char was = bytes[i];
        bytes[i] ^= (unsigned char)(1u << random_u32() % 8);
        spill(f.name, bytes, n);
        if (whole(f.name, &config, f.crc))
            fail_msg("an altered byte %zu was not seen", i);
        bytes[i] = was;
    }
    for (size_t i = 0; i < n; i++) {
        spill(f.name, bytes, i);
        if (whole(f.name, &config, f.crc))
            fail_msg("a file cut at byte %zu was not seen", i);
    }
    bytes[n] = 0;
    spill(f.name, bytes, n + 1);
    assert_false(whole(f.name, &config, f.crc));
    row_piece_free(&p);
    unlinkat(folder, f.name, 0);
}

static void rows_of_another_table(void **state)
{
    table_config config = some_config(4, VECTOR_FP32, OPTIM_ADAGRAD), other;
    row_piece p;
    row_reader r;
    (void)state;
    ckpt_file f = make_file("o.safetensors", &config, 5, 5, &p);
    other = some_config(5, VECTOR_FP32, OPTIM_ADAGRAD);
    assert_int_equal(row_reader_open(&r, folder, f.name, &other),
                     PERSIA_EMISMATCH);
    assert_non_null(strstr(persia_err_text(), "width 4"));
    assert_non_null(strstr(persia_err_text(), "'user'"));
    other = some_config(4, VECTOR_BF16, OPTIM_ADAGRAD);
    assert_int_equal(row_reader_open(&r, folder, f.name, &other),
                     PERSIA_EMISMATCH);
    assert_non_null(strstr(persia_err_text(), "BF16"));
    other = some_config(4, VECTOR_FP32, OPTIM_SGD);
    assert_int_equal(row_reader_open(&r, folder, f.name, &other),
                     PERSIA_EMISMATCH);
    assert_non_null(strstr(persia_err_text(), "state"));
    row_piece_free(&p);
    unlinkat(folder, f.name, 0);
}

static void rows_clock_of_zero(void **state)
{
    table_config config = some_config(2, VECTOR_FP32, OPTIM_SGD);
    row_shape shape;
    row_writer w;
    row_reader r;
    row_piece p;
    uint32_t crc;
    (void)state;
    row_shape_of(&config, &shape);
    assert_int_equal(row_piece_init(&p, &shape), PERSIA_OK);
    memset(p.memory, 0, 100);
    p.n = 3;
    for (size_t i = 0; i < p.n; i++)
        ((uint32_t *)p.col[COL_CLOCK])[i] = (uint32_t)i; /* the first is 0 */
    assert_int_equal(
        row_writer_create(&w, folder, "z.safetensors", &shape, 3, "{}"),
        PERSIA_OK);
    assert_int_equal(row_writer_append(&w, &p, 0, 3), PERSIA_OK);
    assert_int_equal(row_writer_append(&w, &p, 0, 1), PERSIA_EINTERNAL);
    assert_int_equal(row_writer_finish(&w), PERSIA_OK);
    assert_int_equal(row_reader_open(&r, folder, "z.safetensors", &config),
                     PERSIA_OK);
    uint64_t here;
    assert_int_equal(row_reader_verify(&r, &crc, &here), PERSIA_ECORRUPT);
    assert_int_equal(row_reader_read(&r, 0, 3, &p), PERSIA_ECORRUPT);
    assert_int_equal(row_reader_read(&r, 1, 2, &p), PERSIA_OK);
    row_reader_close(&r);
    row_piece_free(&p);
    unlinkat(folder, "z.safetensors", 0);
}

static void file_names(void **state)
{
    row_reader r;
    table_config config = some_config(2, VECTOR_FP32, OPTIM_SGD);
    char name[300];
    (void)state;
    static const char *const bad[] = {
        "",    ".",    "..", "a/b",      "/etc", "a b",
        "..x", "a\\b", "\n", "\xc3\xa9", "a:b"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(persia_ckpt_name_check(bad[i]), PERSIA_EARG);
        assert_int_equal(row_reader_open(&r, folder, bad[i], &config),
                         PERSIA_EARG);
    }
    memset(name, 'a', sizeof name);
    name[CKPT_NAME] = 0;
    assert_int_equal(persia_ckpt_name_check(name), PERSIA_EARG);
    name[CKPT_NAME - 1] = 0;
    assert_int_equal(persia_ckpt_name_check(name), PERSIA_OK);
    assert_int_equal(persia_ckpt_name_check("000-user_1-00000.safetensors"),
                     PERSIA_OK);
}

static void not_plain_files(void **state)
{
    row_reader r;
    table_config config = some_config(2, VECTOR_FP32, OPTIM_SGD);
    (void)state;
    assert_int_equal(row_reader_open(&r, folder, "none", &config),
                     PERSIA_EIO);
    assert_int_equal(mkfifoat(folder, "fifo", 0600), 0);
    assert_int_equal(row_reader_open(&r, folder, "fifo", &config),
                     PERSIA_EIO);
    assert_int_equal(mkdirat(folder, "dir", 0700), 0);
    assert_int_equal(row_reader_open(&r, folder, "dir", &config), PERSIA_EIO);
    unlinkat(folder, "fifo", 0);
    unlinkat(folder, "dir", AT_REMOVEDIR);
}

/* The fuzz target on altered row files, the same ones in every run.  With
 * PERSIA_FUZZ_CORPUS=folder the unaltered ones are written there: seeds. */
static void fuzz_deterministic(void **state)
{
    const char *corpus = getenv("PERSIA_FUZZ_CORPUS");
    (void)state;
    for (int seed = 0; seed < 6; seed++) {
        unsigned char bytes[16384], altered[16384];
        row_piece p;
        table_config config =
            seed % 2 ? some_config(2, VECTOR_FP32, OPTIM_ROWWISE_ADAGRAD)
                     : some_config(3, VECTOR_BF16, OPTIM_SGD);
        size_t rows = (size_t)seed * 7;
        ckpt_file f =
            make_file("f.safetensors", &config, rows, rows + 1, &p);
        size_t n = slurp(f.name, bytes, sizeof bytes);
        row_piece_free(&p);
        unlinkat(folder, f.name, 0);
        if (corpus) {
            char path[1024];
            snprintf(path, sizeof path, "%s/rows-%d", corpus, seed);
            FILE *out = fopen(path, "w");
            assert_non_null(out);
            assert_int_equal(fwrite(bytes, 1, n, out), n);
            assert_int_equal(fclose(out), 0);
        }
        for (int round = 0; round < 1500; round++) {
            size_t m = round % 3 ? n : random_u32() % (n + 1);
            memcpy(altered, bytes, n);
            /* Mostly in the header, where the decisions are. */
            for (uint32_t k = random_u32() % 4; k < 4; k++)
                altered[random_u32() % (round % 2 ? n : 400)] =
                    (unsigned char)(round % 5 ? "0123456789{}[]:,\" "
                                                [random_u32() % 18]
                                              : (char)random_u32());
            assert_int_equal(LLVMFuzzerTestOneInput(altered, m), 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crc_known_values),
        cmocka_unit_test(crc_of_parts),
        cmocka_unit_test(header_good),
        cmocka_unit_test(header_bad),
        cmocka_unit_test(header_length),
        cmocka_unit_test(rows_round_trip),
        cmocka_unit_test(rows_altered),
        cmocka_unit_test(rows_of_another_table),
        cmocka_unit_test(rows_clock_of_zero),
        cmocka_unit_test(file_names),
        cmocka_unit_test(not_plain_files),
        cmocka_unit_test(fuzz_deterministic),
    };
    return cmocka_run_group_tests_name("ckpt_rows", tests, folder_open,
                                       folder_close);
}
