/* Tables to row files and back: every row, of one moment. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "ckpt/ckpt.h"
#include "ckpt/rows.h"
#include "ids/ids.h"

static char folder_path[64];
static int folder = -1;
static sched *threads;

static int setup(void **state)
{
    (void)state;
    strcpy(folder_path, "/tmp/persia-ckpt-XXXXXX");
    assert_non_null(mkdtemp(folder_path));
    folder = open(folder_path, O_RDONLY | O_DIRECTORY);
    return folder < 0 || persia_sched_create(2, &threads);
}

static int teardown(void **state)
{
    char command[100];
    (void)state;
    persia_sched_destroy(threads);
    close(folder);
    snprintf(command, sizeof command, "rm -r %s", folder_path);
    return system(command);
}

static table *make_table(uint32_t dim, uint32_t dtype, uint32_t kind)
{
    table_config config;
    table *t;
    persia_table_config_init(&config);
    strcpy(config.name, "user \"\\\n");
    config.dim = dim;
    config.dtype = dtype;
    config.optimizer = kind;
    config.hash_key = 0x9E3779B97F4A7C15u; /* tables that are exchanged */
    assert_int_equal(persia_table_create(&config, &t), PERSIA_OK);
    return t;
}

static optim_args some_optim(uint32_t kind)
{
    optim_args a;
    memset(&a, 0, sizeof a);
    a.kind = kind;
    a.lr = 0.1f;
    a.eps = 1e-8f;
    a.beta1 = 0.9f;
    a.beta2 = 0.999f;
    a.beta = 0.5f;
    a.step = 1;
    a.grad_scale = 1;
    return a;
}

static void push(table *t, const optim_args *optim, size_t n,
                 const uint64_t *ids, const float *grad)
{
    size_t dim = persia_table_get_config(t)->dim;
    push_part part = {.n = n, .ids = ids, .grad = grad, .stride = dim,
                      .bags = n};
    push_job job = {.t = t, .parts = &part, .parts_n = 1, .optim = optim};
    assert_int_equal(persia_table_push(threads, &job, 1), PERSIA_OK);
}

static uint64_t mix(uint64_t i)
{
    return i * 0x9E3779B97F4A7C15u ^ i >> 7;
}

/* n rows from pushes of 1,000 ids with gradients of their own. */
static void fill_table(table *t, size_t n)
{
    enum { BATCH = 1000 };
    size_t dim = persia_table_get_config(t)->dim;
    optim_args optim = some_optim(persia_table_get_config(t)->optimizer);
    float *grad = malloc(BATCH * dim * sizeof *grad);
    uint64_t ids[BATCH];
    for (size_t first = 0; first < n; first += BATCH) {
        size_t m = n - first < BATCH ? n - first : BATCH;
        for (size_t i = 0; i < m; i++)
            ids[i] = mix(first + i);
        for (size_t i = 0; i < m * dim; i++)
            grad[i] = (float)((first + i) % 97) - 48;
        push(t, &optim, m, ids, grad);
    }
    free(grad);
}

static ckpt_files save(table *t, const char *stem, uint64_t chunk)
{
    ckpt_files files = {0};
    table_cut *cut;
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    assert_int_equal(persia_ckpt_write(threads, cut,
                                       persia_table_get_config(t), folder,
                                       stem, chunk, &files),
                     PERSIA_OK);
    persia_table_cut_end(cut);
    return files;
}

static void remove_files(ckpt_files *files)
{
    for (size_t i = 0; i < files->n; i++)
        assert_int_equal(unlinkat(folder, files->files[i].name, 0), 0);
    persia_ckpt_files_free(files);
}

/* All of a table in the order of ids: id, vector, state, clock of a row. */
typedef struct dump {
    size_t n, row;
    char *rows;
} dump;

static int by_id(const void *a, const void *b)
{
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return x < y ? -1 : x > y;
}

static dump dump_table(table *t)
{
    row_shape shape;
    row_piece p;
    table_cut *cut;
    row_shape_of(persia_table_get_config(t), &shape);
    assert_int_equal(row_piece_init(&p, &shape), PERSIA_OK);
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    dump d = {0, shape.row,
              malloc(persia_table_cut_rows(cut) * shape.row + 1)};
    do {
        assert_int_equal(persia_table_cut_next(
                             cut, p.room, p.col[COL_IDS], p.col[COL_VECTORS],
                             p.col[COL_STATE], p.col[COL_CLOCK],
                             p.col[COL_FIELD], &p.n),
                         PERSIA_OK);
        for (size_t i = 0; i < p.n; i++, d.n++) {
            char *at = d.rows + d.n * d.row;
            for (int c = 0; c < COLS; c++) {
                if (shape.bytes[c])
                    memcpy(at, (char *)p.col[c] + i * shape.bytes[c],
                           shape.bytes[c]);
                at += shape.bytes[c];
            }
        }
    } while (p.n);
    assert_int_equal(d.n, persia_table_cut_rows(cut));
    persia_table_cut_end(cut);
    row_piece_free(&p);
    qsort(d.rows, d.n, d.row, by_id);
    return d;
}

static void assert_same_rows(table *a, table *b)
{
    dump x = dump_table(a), y = dump_table(b);
    assert_int_equal(x.n, y.n);
    assert_int_equal(x.row, y.row);
    assert_memory_equal(x.rows, y.rows, x.n * x.row);
    free(x.rows);
    free(y.rows);
}

static void round_trip(void **state)
{
    static const size_t sizes[] = {0, 1, 100, 9000};
    (void)state;
    for (uint32_t dtype = 0; dtype < VECTOR_DTYPES; dtype++)
        for (uint32_t kind = 0; kind < OPTIM_KINDS; kind++)
            for (size_t k = 0; k < 4; k++) {
                table *from = make_table(5, dtype, kind);
                table *to = make_table(5, dtype, kind);
                fill_table(from, sizes[k]);
                ckpt_files files = save(from, "000-user", 64 << 10);
                uint64_t rows = 0;
                for (size_t i = 0; i < files.n; i++) {
                    assert_true(files.files[i].bytes <= 64 << 10);
                    rows += files.files[i].rows;
                }
                assert_int_equal(rows, sizes[k]);
                assert_true(sizes[k] < 9000 ? files.n <= 1 : files.n > 1);
                uint64_t here = 0;
                assert_int_equal(
                    persia_ckpt_verify(threads, persia_table_get_config(to),
                                       folder, files.files, files.n, &here),
                    PERSIA_OK);
                assert_int_equal(here, sizes[k]);
                assert_int_equal(persia_ckpt_restore(threads, to, folder,
                                                     files.files, files.n, 0,
                                                     1),
                                 PERSIA_OK);
                assert_same_rows(from, to);
                remove_files(&files);
                persia_table_destroy(from);
                persia_table_destroy(to);
            }
}

static int restore(table *t, const ckpt_files *files, uint32_t shard,
                   uint32_t shards)
{
    return persia_ckpt_restore(threads, t, folder, files->files, files->n,
                               shard, shards);
}

/* One table to N shards, those to M, and all of them to one again. */
static void other_numbers_of_shards(void **state)
{
    enum { ROWS = 9000, N = 3, M = 5 };
    static const uint32_t counts[] = {N, M, 1};
    table *whole = make_table(5, VECTOR_BF16, OPTIM_ADAM);
    (void)state;
    fill_table(whole, ROWS);
    ckpt_files all = save(whole, "whole", 64 << 10);
    for (int k = 0; k < 3; k++) {
        ckpt_files next = {0};
        uint64_t rows = 0;
        for (uint32_t i = 0; i < counts[k]; i++) {
            table *t = make_table(5, VECTOR_BF16, OPTIM_ADAM);
            assert_int_equal(restore(t, &all, i, counts[k]), PERSIA_OK);
            dump d = dump_table(t);
            for (size_t row = 0; row < d.n; row++) {
                uint64_t id;
                memcpy(&id, d.rows + row * d.row, sizeof id);
                assert_int_equal(hash_shard(id_hash(id), counts[k]), i);
            }
            assert_true(d.n > ROWS / counts[k] / 2);
            rows += d.n;
            free(d.rows);
            char stem[32];
            snprintf(stem, sizeof stem, "k%d-s%u", k, i);
            ckpt_files files = save(t, stem, 64 << 10);
            for (size_t f = 0; f < files.n; f++)
                assert_int_equal(persia_ckpt_files_add(&next, &files.files[f]),
                                 PERSIA_OK);
            persia_ckpt_files_free(&files);
            if (counts[k] == 1)
                assert_same_rows(t, whole);
            persia_table_destroy(t);
        }
        assert_int_equal(rows, ROWS);
        remove_files(&all);
        all = next;
    }
    table *t = make_table(5, VECTOR_BF16, OPTIM_ADAM);
    assert_int_equal(restore(t, &all, 2, 2), PERSIA_EARG);
    assert_int_equal(restore(t, &all, 0, 0), PERSIA_EARG);
    assert_int_equal(persia_ckpt_files_add(&all, &all.files[0]), PERSIA_OK);
    assert_int_equal(restore(t, &all, 0, 2), PERSIA_ECORRUPT);
    assert_non_null(strstr(persia_err_text(), "twice"));
    all.n--;
    remove_files(&all);
    persia_table_destroy(t);
    persia_table_destroy(whole);
}

/* Every push adds 1 to every row, so a row tells how many pushes it saw. */
typedef struct counting {
    table *t;
    const uint64_t *ids;
    size_t n;
    const float *grad;
    atomic_int stop;
} counting;

static void count_once(counting *c)
{
    optim_args optim = some_optim(OPTIM_SGD);
    optim.lr = 1;
    push(c->t, &optim, c->n, c->ids, c->grad);
}

static void *count_on(void *ctx)
{
    counting *c = ctx;
    while (!atomic_load(&c->stop))
        count_once(c);
    return NULL;
}

static void rows_of_one_moment(void **state)
{
    enum { N = 20000 };
    table_config config;
    uint64_t *ids = malloc(N * sizeof *ids);
    float *grad = malloc(N * sizeof *grad);
    pthread_t thread;
    counting c = {.ids = ids, .n = N, .grad = grad};
    int moved = 0;
    (void)state;
    persia_table_config_init(&config);
    strcpy(config.name, "count");
    config.dim = 1;
    config.optimizer = OPTIM_SGD;
    config.init = INIT_CONSTANT;
    config.init_a = 0;
    assert_int_equal(persia_table_create(&config, &c.t), PERSIA_OK);
    for (size_t i = 0; i < N; i++) {
        ids[i] = mix(i);
        grad[i] = -1;
    }
    count_once(&c);
    assert_int_equal(pthread_create(&thread, NULL, count_on, &c), 0);
    for (int round = 0; round < 10; round++) {
        ckpt_files files = {0};
        table_cut *cut;
        table_stats stats;
        assert_int_equal(persia_table_cut_begin(&c.t, 1, &cut), PERSIA_OK);
        uint64_t clock = persia_table_cut_clock(cut);
        assert_int_equal(persia_ckpt_write(threads, cut, &config, folder,
                                           "count", 32 << 10, &files),
                         PERSIA_OK);
        persia_table_get_stats(c.t, &stats);
        moved += stats.pushes > clock;
        persia_table_cut_end(cut);
        uint64_t rows = 0;
        for (size_t i = 0; i < files.n; i++) {
            row_reader r;
            row_piece p;
            assert_int_equal(row_reader_open(&r, folder, files.files[i].name,
                                             &config),
                             PERSIA_OK);
            assert_int_equal(row_piece_init(&p, &r.shape), PERSIA_OK);
            assert_int_equal(row_reader_read(&r, 0, (size_t)r.rows, &p),
                             PERSIA_OK);
            for (size_t k = 0; k < p.n; k++) {
                assert_int_equal(((float *)p.col[COL_VECTORS])[k], clock);
                assert_int_equal(((uint32_t *)p.col[COL_CLOCK])[k], clock);
            }
            rows += p.n;
            row_piece_free(&p);
            row_reader_close(&r);
        }
        assert_int_equal(rows, N);
        remove_files(&files);
    }
    atomic_store(&c.stop, 1);
    pthread_join(thread, NULL);
    assert_true(moved > 0); /* pushes did run while files were written */
    persia_table_destroy(c.t);
    free(ids);
    free(grad);
}

static int verify(table *t, const ckpt_files *files)
{
    return persia_ckpt_verify(threads, persia_table_get_config(t), folder,
                              files->files, files->n, NULL);
}

static void bad_files(void **state)
{
    table *t = make_table(4, VECTOR_FP32, OPTIM_ADAM), *other;
    (void)state;
    fill_table(t, 3000);
    ckpt_files files = save(t, "bad", 40 << 10);
    assert_true(files.n >= 3);
    ckpt_file *f = &files.files[1];

    f->crc ^= 1;
    assert_int_equal(verify(t, &files), PERSIA_ECORRUPT);
    assert_non_null(strstr(persia_err_text(), f->name));
    f->crc ^= 1;
    f->rows++;
    assert_int_equal(verify(t, &files), PERSIA_ECORRUPT);
    f->rows--;
    f->bytes--;
    assert_int_equal(verify(t, &files), PERSIA_ECORRUPT);
    f->bytes++;
    f->name[0] = '/';
    assert_int_equal(verify(t, &files), PERSIA_EARG);
    f->name[0] = 'x';
    assert_int_equal(verify(t, &files), PERSIA_EIO);
    assert_int_equal(
        persia_ckpt_restore(threads, t, folder, files.files, files.n, 0, 1),
        PERSIA_EIO);
    f->name[0] = 'b';
    assert_int_equal(verify(t, &files), PERSIA_OK);

    other = make_table(4, VECTOR_FP32, OPTIM_ADAGRAD);
    assert_int_equal(verify(other, &files), PERSIA_EMISMATCH);
    persia_table_destroy(other);
    int fd = openat(folder, f->name, O_WRONLY);
    assert_int_equal(pwrite(fd, "\377", 1, (off_t)f->bytes - 1), 1);
    close(fd);
    assert_int_equal(verify(t, &files), PERSIA_ECORRUPT);
    remove_files(&files);
    persia_table_destroy(t);
}

/* Files are verified, then read again: what was altered in between is found,
 * wherever it lies. */
static void files_altered_between_two_reads(void **state)
{
    (void)state;
    for (int evicts = 0; evicts < 2; evicts++) { /* a column is not read */
        table_config c;
        table *t, *to;
        persia_table_config_init(&c);
        memcpy(c.name, "alter", 6);
        c.dim = 4;
        c.optimizer = OPTIM_ADAM;
        const table_config plain = c;
        c.capacity = 10000;
        c.full = evicts ? FULL_EVICT_LFU : FULL_RAISE;
        assert_int_equal(persia_table_create(&c, &t), PERSIA_OK);
        fill_table(t, 3000);
        ckpt_files files = save(t, "alter", 40 << 10);
        const ckpt_file *f = &files.files[1];
        int fd = openat(folder, f->name, O_RDWR), found = 0;
        for (uint64_t at = 0; at < f->bytes; at += at < 300 ? 17 : 911) {
            unsigned char was, is;
            const off_t place = (off_t)at;
            assert_int_equal(persia_table_create(&plain, &to), PERSIA_OK);
            assert_int_equal(pread(fd, &was, 1, place), 1);
            is = was ^ 1;
            assert_int_equal(pwrite(fd, &is, 1, place), 1);
            const int rc = persia_ckpt_restore(threads, to, folder,
                                               files.files, files.n, 0, 1);
            assert_int_equal(pwrite(fd, &was, 1, place), 1);
            assert_true(rc == PERSIA_ECORRUPT || rc == PERSIA_EMISMATCH);
            found++;
            persia_table_destroy(to);
        }
        assert_true(found > 40);
        assert_int_equal(persia_table_create(&plain, &to), PERSIA_OK);
        assert_int_equal(persia_ckpt_restore(threads, to, folder, files.files,
                                             files.n, 0, 1),
                         PERSIA_OK); /* as they were */
        persia_table_destroy(to);
        close(fd);
        remove_files(&files);
        persia_table_destroy(t);
    }
}

static void write_fails(void **state)
{
    table *t = make_table(4, VECTOR_FP32, OPTIM_ADAM);
    ckpt_files files = {0};
    table_cut *cut;
    (void)state;
    fill_table(t, 100);
    ckpt_files first = save(t, "twice", CKPT_CHUNK);
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    const table_config *config = persia_table_get_config(t);
    assert_int_equal(persia_ckpt_write(threads, cut, config, folder, "../x",
                                       CKPT_CHUNK, &files),
                     PERSIA_EARG);
    /* A file of that name is there: it is not overwritten. */
    assert_int_equal(persia_ckpt_write(threads, cut, config, folder, "twice",
                                       CKPT_CHUNK, &files),
                     PERSIA_EIO);
    assert_int_equal(files.n, 0);
    persia_table_cut_end(cut);
    assert_int_equal(verify(t, &first), PERSIA_OK);
    remove_files(&first);
    persia_table_destroy(t);
}

/* The rows touched longest ago are left out, alike in all stripes. */
static void smaller_capacity(void **state)
{
    enum { ROWS = 9000, ROOM = 2000, STRIPES = 8 };
    table *whole = make_table(5, VECTOR_FP32, OPTIM_ADAGRAD);
    row_shape shape;
    (void)state;
    row_shape_of(persia_table_get_config(whole), &shape);
    const size_t before = shape.bytes[COL_IDS] + shape.bytes[COL_STATE];
    fill_table(whole, ROWS); /* clocks 1 to 9 */
    ckpt_files files = save(whole, "full", 64 << 10);
    for (uint32_t shards = 1; shards <= 2; shards++) {
        table_config config = *persia_table_get_config(whole);
        table_stats stats;
        table *t;
        config.stripes = STRIPES;
        config.capacity = ROOM / shards;
        config.full = FULL_EVICT_LRU;
        assert_int_equal(persia_table_create(&config, &t), PERSIA_OK);
        persia_table_set_clock(t, 10);
        assert_int_equal(restore(t, &files, shards - 1, shards), PERSIA_OK);
        persia_table_get_stats(t, &stats);
        assert_in_range(stats.rows, config.capacity - STRIPES,
                        config.capacity);
        dump d = dump_table(t);
        assert_int_equal(d.n, stats.rows);
        for (size_t row = 0; row < d.n; row++) {
            uint32_t clock;
            memcpy(&clock, d.rows + row * d.row + before, sizeof clock);
            assert_in_range(clock, 7, 9);
        }
        free(d.rows);
        persia_table_destroy(t);
    }
    remove_files(&files);
    persia_table_destroy(whole);
}

static void exchange(void **state)
{
    table *a = make_table(3, VECTOR_BF16, OPTIM_ADAGRAD);
    table *b = make_table(3, VECTOR_BF16, OPTIM_ADAGRAD);
    table *like_a = make_table(3, VECTOR_BF16, OPTIM_ADAGRAD);
    table *wide = make_table(4, VECTOR_BF16, OPTIM_ADAGRAD);
    table *empty = make_table(3, VECTOR_BF16, OPTIM_ADAGRAD);
    table_cut *cut;
    table_stats stats;
    (void)state;
    fill_table(a, 5000);
    fill_table(like_a, 5000);
    assert_int_equal(persia_table_exchange(a, b), PERSIA_OK);
    assert_same_rows(a, empty);
    assert_same_rows(b, like_a);
    persia_table_get_stats(a, &stats);
    assert_int_equal(stats.rows, 0);
    fill_table(a, 10); /* a table lives on */
    assert_int_equal(persia_table_exchange(b, a), PERSIA_OK);
    assert_same_rows(a, like_a);
    persia_table_get_stats(b, &stats);
    assert_int_equal(stats.rows, 10);
    assert_int_equal(persia_table_exchange(a, wide), PERSIA_EARG);
    assert_int_equal(persia_table_cut_begin(&a, 1, &cut), PERSIA_OK);
    assert_int_equal(persia_table_exchange(a, b), PERSIA_EUNAVAILABLE);
    assert_int_equal(persia_table_exchange(b, a), PERSIA_EUNAVAILABLE);
    persia_table_cut_end(cut);
    assert_same_rows(a, like_a);
    persia_table_destroy(a);
    persia_table_destroy(b);
    persia_table_destroy(like_a);
    persia_table_destroy(wide);
    persia_table_destroy(empty);
}

/* ---- files that belong elsewhere ---- */

/* A folder through which they pass, and one that they belong to. */
typedef struct passing {
    int through, there;
    size_t put, get, fail_at; /* counted from 1 */
} passing;

static int passing_open(void *ctx, int *fd)
{
    const passing *p = ctx;
    *fd = dup(p->through);
    return PERSIA_OK;
}

static void passing_free(void *ctx)
{
    (void)ctx;
}

static int passing_put(void *ctx, const char *name)
{
    passing *p = ctx;
    if (++p->put == p->fail_at)
        return persia_err_set(PERSIA_EIO, "%s: the storage is full", name);
    return renameat(p->through, name, p->there, name) ? PERSIA_EIO : PERSIA_OK;
}

static int passing_get(void *ctx, const ckpt_file *files, size_t n)
{
    passing *p = ctx;
    int rc = PERSIA_OK;
    for (size_t i = 0; i < n && !rc; i++, p->get++)
        rc = linkat(p->there, files[i].name, p->through, files[i].name, 0)
                 ? PERSIA_ECORRUPT
                 : PERSIA_OK;
    return rc;
}

static size_t folder_entries(int at)
{
    size_t n = 0;
    DIR *d = fdopendir(openat(at, ".", O_RDONLY | O_DIRECTORY));
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d));)
        n += *e->d_name != '.';
    closedir(d);
    return n;
}

static int pass_written(passing *p, table *t, ckpt_files *files)
{
    const ckpt_opener opener = {passing_open, passing_free, p, passing_put,
                                passing_get};
    table_cut *cut;
    ckpt_io *io;
    assert_int_equal(persia_ckpt_folder(&opener, 64 << 10, &io), PERSIA_OK);
    assert_int_equal(io->open(io), PERSIA_OK);
    assert_int_equal(persia_table_cut_begin(&t, 1, &cut), PERSIA_OK);
    int rc = io->write(io, threads, cut, persia_table_get_config(t), "far",
                       files);
    persia_table_cut_end(cut);
    io->close(io);
    return rc;
}

/* Each leaves the folder when it is whole, in order; back again they are the
 * same rows. */
static void files_that_pass_through(void **state)
{
    table *a = make_table(8, VECTOR_FP32, OPTIM_ADAM), *b;
    passing p = {.fail_at = 0};
    const ckpt_opener opener = {passing_open, passing_free, &p, passing_put,
                                passing_get};
    ckpt_files files = {0};
    ckpt_io *io;
    (void)state;
    assert_int_equal(mkdirat(folder, "through", 0700), 0);
    assert_int_equal(mkdirat(folder, "there", 0700), 0);
    p.through = openat(folder, "through", O_RDONLY | O_DIRECTORY);
    p.there = openat(folder, "there", O_RDONLY | O_DIRECTORY);
    fill_table(a, 5000);
    assert_int_equal(pass_written(&p, a, &files), PERSIA_OK);
    assert_true(files.n > 4);
    assert_int_equal(p.put, files.n);
    assert_int_equal(folder_entries(p.through), 0);
    assert_int_equal(folder_entries(p.there), files.n);

    b = make_table(8, VECTOR_FP32, OPTIM_ADAM);
    const table_config *config = persia_table_get_config(b);
    assert_int_equal(persia_ckpt_folder(&opener, 64 << 10, &io), PERSIA_OK);
    assert_int_equal(io->open(io), PERSIA_OK);
    assert_int_equal(io->verify(io, threads, config, files.files, files.n,
                                NULL),
                     PERSIA_OK);
    persia_table_set_clock(b, 6);
    assert_int_equal(io->read(io, threads, b, files.files, files.n, 0, 1),
                     PERSIA_OK);
    assert_int_equal(p.get, files.n);
    assert_same_rows(a, b);
    io->close(io);
    persia_table_destroy(b);
    persia_ckpt_files_free(&files);

    /* The first that cannot be put ends it. */
    p.put = 0;
    p.fail_at = 2;
    assert_int_equal(unlinkat(p.through, "far-00000.safetensors", 0), 0);
    for (size_t i = 1; i < p.get; i++) {
        char name[64];
        snprintf(name, sizeof name, "far-%05zu.safetensors", i);
        assert_int_equal(unlinkat(p.through, name, 0), 0);
    }
    assert_int_equal(pass_written(&p, a, &files), PERSIA_EIO);
    assert_non_null(strstr(persia_err_text(), "the storage is full"));
    assert_int_equal(p.put, 2);
    persia_ckpt_files_free(&files);
    close(p.through);
    close(p.there);
    persia_table_destroy(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(other_numbers_of_shards),
        cmocka_unit_test(rows_of_one_moment),
        cmocka_unit_test(bad_files),
        cmocka_unit_test(files_altered_between_two_reads),
        cmocka_unit_test(write_fails),
        cmocka_unit_test(smaller_capacity),
        cmocka_unit_test(exchange),
        cmocka_unit_test(files_that_pass_through),
    };
    return cmocka_run_group_tests_name("ckpt", tests, setup, teardown);
}
