#include "ckpt/ckpt.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/crc32c.h"
#include "ckpt/rows.h"
#include "ckpt/sightings.h"
#include "ids/ids.h"
#include "mem/mem.h"

int persia_ckpt_files_add(ckpt_files *list, const ckpt_file *file)
{
    if (list->n == list->room) {
        size_t room = list->room ? 2 * list->room : 16;
        ckpt_file *grown = realloc(list->files, room * sizeof *grown);
        if (!grown)
            return persia_err_set(PERSIA_ENOMEM, "a list of %zu row files",
                                  room);
        list->files = grown;
        list->room = room;
    }
    list->files[list->n++] = *file;
    return PERSIA_OK;
}

void persia_ckpt_files_free(ckpt_files *list)
{
    free(list->files);
    memset(list, 0, sizeof *list);
}

/* Those that have been added since the last time. */
static int ckpt_files_take(ckpt_files *list)
{
    int code = PERSIA_OK;
    while (list->take && list->taken < list->n && !code)
        code = list->take(list->ctx, &list->files[list->taken++]);
    return code;
}

int persia_ckpt_name_check(const char *name)
{
    size_t n = strlen(name);
    if (n == 0 || n >= CKPT_NAME || *name == '.')
        return persia_err_set(
            PERSIA_EARG,
            "'%.40s' cannot name a file of a checkpoint: empty, "
            "too long or beginning with a dot",
            name);
    for (size_t i = 0; i < n; i++) {
        char c = name[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
              (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_'))
            return persia_err_set(
                PERSIA_EARG,
                "'%s' cannot name a file of a checkpoint: only "
                "letters, digits, '.', '-' and '_' can",
                name);
    }
    return PERSIA_OK;
}

/* ---- writing ------------------------------------------------------------ */

/* Two pieces take turns: while one is filled from the cut, the other is
 * written.  No field is shared: each half of a turn touches its own. */
typedef struct saver {
    /* filling */
    table_cut *cut;
    row_piece piece[2];
    unsigned filling; /* which piece is filled in this turn */
    /* writing */
    const table_config *config;
    row_shape shape;
    row_writer writer; /* fd -1: no file is open */
    int folder;
    const char *stem;
    uint64_t chunk_rows; /* rows of a full file */
    uint64_t total, written;
    ckpt_files *out;
} saver;

/* JSON text of the metadata of a row file. */
static int ckpt_format_metadata(const saver *s, uint64_t rows, char *out,
                                size_t room)
{
    size_t n = (size_t)snprintf(out, room,
                                "{\"format\":\"persia.rows.1\","
                                "\"optimizer\":\"%s\","
                                "\"rows\":\"%" PRIu64 "\",\"table\":\"",
                                persia_optim_name(s->config->optimizer), rows);
    for (const char *p = s->config->name; *p && n + 16 < room; p++) {
        unsigned char c = (unsigned char)*p;
        const char *format = c == '"' || c == '\\' ? "\\%c"
                             : c < 0x20            ? "\\u%04x"
                                                   : "%c";
        n += (size_t)snprintf(out + n, room - n, format, c);
    }
    if (n + 16 >= room)
        return persia_err_set(PERSIA_ELIMIT,
                              "table '%s': its name is too long",
                              s->config->name);
    snprintf(out + n, room - n, "\"}");
    return PERSIA_OK;
}

static int ckpt_next_file(saver *s)
{
    char name[CKPT_NAME + 32], metadata[2048];
    uint64_t rows = s->total - s->written;
    if (rows > s->chunk_rows)
        rows = s->chunk_rows;
    snprintf(name, sizeof name, "%s-%05zu.safetensors", s->stem, s->out->n);
    int code = ckpt_format_metadata(s, rows, metadata, sizeof metadata);
    if (!code)
        code = row_writer_create(&s->writer, s->folder, name, &s->shape,
                                 rows, metadata);
    return code;
}

static int write_piece(saver *s, const row_piece *p)
{
    for (size_t first = 0; first < p->n;) {
        int code;
        if (s->total == s->written)
            return persia_err_set(
                PERSIA_EINTERNAL,
                "table '%s': the cut gave more than its %" PRIu64 " rows",
                s->config->name, s->total);
        if (s->writer.fd < 0 && (code = ckpt_next_file(s)))
            return code;
        uint64_t room = s->writer.rows - s->writer.written;
        size_t n = p->n - first < room ? p->n - first : (size_t)room;
        if ((code = row_writer_append(&s->writer, p, first, n)))
            return code;
        first += n;
        s->written += n;
        if (s->writer.written < s->writer.rows)
            continue;
        if ((code = row_writer_finish(&s->writer)) ||
            (code = persia_ckpt_files_add(s->out, &s->writer.file)))
            return code;
    }
    return PERSIA_OK;
}

/* Half of a turn: 0 fills a piece, 1 writes the other. */
static int ckpt_save_turn(void *ctx, size_t half)
{
    saver *s = ctx;
    row_piece *p = &s->piece[half == 0 ? s->filling : 1 - s->filling];
    if (half == 1)
        return write_piece(s, p);
    return persia_table_cut_next(s->cut, p->room, p->col[COL_IDS],
                                 p->col[COL_VECTORS], p->col[COL_STATE],
                                 p->col[COL_CLOCK], p->col[COL_FIELD], &p->n);
}

int persia_ckpt_write(sched *sch, table_cut *cut, const table_config *config,
                      int folder, const char *stem, uint64_t chunk,
                      ckpt_files *out)
{
    saver s = {.cut = cut,
               .config = config,
               .folder = folder,
               .stem = stem,
               .total = persia_table_cut_rows(cut),
               .out = out,
               .writer = {.fd = -1}};
    int code = persia_ckpt_name_check(stem);
    if (code)
        return code;
    row_shape_of(config, &s.shape);
    s.chunk_rows = chunk > 4096 ? (chunk - 4096) / s.shape.row : 0;
    if (s.chunk_rows == 0)
        s.chunk_rows = 1;
    if ((code = row_piece_init(&s.piece[0], &s.shape)) ||
        (code = row_piece_init(&s.piece[1], &s.shape)))
        goto out;
    do {
        if ((code = persia_interrupt_poll()) ||
            (code = persia_sched_for(sch, 2, ckpt_save_turn, &s)) ||
            (code = ckpt_files_take(out)))
            goto out;
        s.filling = 1 - s.filling;
    } while (s.piece[1 - s.filling].n);
    if (s.written != s.total)
        code = persia_err_set(PERSIA_EINTERNAL,
                              "table '%s': the cut gave %" PRIu64
                              " of its %" PRIu64 " rows",
                              config->name, s.written, s.total);
    else
        code = sightings_write(cut, config, folder, stem, out);
    if (!code)
        code = ckpt_files_take(out);
out:
    row_writer_close(&s.writer);
    row_piece_free(&s.piece[0]);
    row_piece_free(&s.piece[1]);
    return code;
}

/* ---- reading ------------------------------------------------------------ */

typedef struct verifier {
    const table_config *config;
    int folder;
    const ckpt_file *files;
    _Atomic(uint64_t) here; /* rows */
} verifier;

static int ckpt_verify_file(void *ctx, size_t index)
{
    verifier *v = ctx;
    const ckpt_file *f = &v->files[index];
    row_reader r;
    uint32_t crc = 0;
    uint64_t here = 0;
    if (is_sightings(f))
        return sightings_read(v->folder, f, v->config, NULL);
    int code = row_reader_open(&r, v->folder, f->name, v->config);
    if (code)
        return code;
    if (r.header.bytes != f->bytes || r.rows != f->rows)
        code = persia_err_set(
            PERSIA_ECORRUPT,
            "%s: %" PRIu64 " bytes with %" PRIu64
            " rows; the manifest says %" PRIu64 " with %" PRIu64,
            f->name, r.header.bytes, r.rows, f->bytes, f->rows);
    if (!code)
        code = row_reader_verify(&r, &crc, &here);
    atomic_fetch_add(&v->here, here);
    if (!code && crc != f->crc)
        code =
            persia_err_set(PERSIA_ECORRUPT,
                           "%s: its checksum is %08x, the manifest says %08x: "
                           "the file was altered",
                           f->name, crc, f->crc);
    row_reader_close(&r);
    return code;
}

int persia_ckpt_verify(sched *s, const table_config *config, int folder,
                       const ckpt_file *files, size_t n, uint64_t *here)
{
    verifier v = {.config = config, .folder = folder, .files = files};
    int rc = persia_sched_for(s, n, ckpt_verify_file, &v);
    if (here)
        *here += v.here;
    return rc;
}

/* Each thread restores a share of all rows, one after the other in the order
 * of the files.  A cut gives rows stripe by stripe, so the threads are in
 * different stripes and rarely wait for each other's locks. */
typedef struct restorer {
    table *t;
    int folder;
    const ckpt_file *files;
    size_t n;
    uint32_t shard, shards;
    uint64_t total; /* rows of all files */
    size_t shares;
    _Atomic(uint64_t) kept; /* rows added */
    _Atomic(int) failed;    /* a share; the others end, too */
    _Atomic(uint32_t) *sums; /* [n] CRCs of what was read: row_reader_sum() */
} restorer;

/* Leaves the rows of one shard in a piece, in their order. */
static void ckpt_keep_shard(row_piece *p, const row_shape *shape,
                            uint32_t shard, uint32_t shards)
{
    const uint64_t *ids = p->col[COL_IDS];
    size_t kept = 0, run;
    for (size_t i = 0; i < p->n; i += run) {
        int mine = hash_shard(id_hash(ids[i]), shards) == shard;
        for (run = 1; i + run < p->n; run++) {
            uint64_t hash = id_hash(ids[i + run]);
            if ((hash_shard(hash, shards) == shard) != mine)
                break;
        }
        if (!mine)
            continue;
        for (int c = 0; c < COLS && kept < i; c++) {
            size_t bytes = shape->bytes[c];
            char *col = p->col[c];
            if (bytes)
                memmove(col + kept * bytes, col + i * bytes, run * bytes);
        }
        kept += run;
    }
    p->n = kept;
}

/* Rows begin..end of one file. */
static int restore_file(restorer *r, const ckpt_file *f, uint64_t begin,
                        uint64_t end, row_piece *p)
{
    row_reader reader;
    int code = row_reader_open(&reader, r->folder, f->name,
                               persia_table_get_config(r->t));
    if (code)
        return code;
    for (uint64_t at = begin; at < end && !code;) {
        size_t n = end - at < p->room ? (size_t)(end - at) : p->room;
        if (atomic_load(&r->failed)) /* another share, which says why */
            break;
        if ((code = persia_interrupt_poll()) ||
            (code = row_reader_read(&reader, at, n, p)))
            break;
        atomic_fetch_xor(&r->sums[f - r->files], row_reader_sum(&reader, at,
                                                                p));
        if (r->shards > 1)
            ckpt_keep_shard(p, &reader.shape, r->shard, r->shards);
        code = persia_table_restore(r->t, p->n, p->col[COL_IDS],
                                    p->col[COL_VECTORS], p->col[COL_STATE],
                                    p->col[COL_CLOCK],
                                    reader.col[COL_FIELD] ? p->col[COL_FIELD]
                                                          : NULL);
        atomic_fetch_add(&r->kept, p->n);
        at += n;
    }
    row_reader_close(&reader);
    return code;
}

static int ckpt_restore_share(void *ctx, size_t index)
{
    restorer *r = ctx;
    uint64_t begin = r->total / r->shares * index, first = 0;
    uint64_t end = index + 1 < r->shares ? begin + r->total / r->shares
                                         : r->total;
    row_shape shape;
    row_piece p;
    row_shape_of(persia_table_get_config(r->t), &shape);
    int code = row_piece_init(&p, &shape);
    for (size_t i = 0; i < r->n && !code; i++) {
        uint64_t last = first + r->files[i].rows;
        uint64_t from = begin > first ? begin : first;
        uint64_t to = end < last ? end : last;
        if (from < to)
            code = restore_file(r, &r->files[i], from - first, to - first,
                                &p);
        first = last;
    }
    if (code)
        atomic_store(&r->failed, 1);
    row_piece_free(&p);
    return code;
}

/* The bytes that were added to the table are those that were verified: the
 * file was read again since. */
static int ckpt_check_sum(const restorer *r, const ckpt_file *f)
{
    row_reader reader;
    uint32_t rest;
    if (is_sightings(f))
        return PERSIA_OK;
    int code = row_reader_open(&reader, r->folder, f->name,
                               persia_table_get_config(r->t));
    if (code)
        return code;
    code = row_reader_rest(&reader, &rest);
    if (!code && (atomic_load(&r->sums[f - r->files]) ^ rest) != f->crc)
        code = persia_err_set(PERSIA_ECORRUPT,
                              "%s: it was altered while it was read", f->name);
    row_reader_close(&reader);
    return code;
}

static int ckpt_restore_all(restorer *r, sched *s)
{
    int code;
    r->sums = calloc(r->n + 1, sizeof *r->sums);
    if (!r->sums)
        return persia_err_set(PERSIA_ENOMEM, "no memory to restore %zu files",
                              r->n);
    code = persia_sched_for(s, r->shares, ckpt_restore_share, r);
    for (size_t i = 0; i < r->n && !code; i++)
        code = ckpt_check_sum(r, &r->files[i]);
    free(r->sums);
    return code;
}

/* Tells the table which ids of a file follow. */
static int expect_file(const restorer *r, const ckpt_file *f, row_piece *p)
{
    row_reader reader;
    if (is_sightings(f))
        return PERSIA_OK;
    int code = row_reader_open(&reader, r->folder, f->name,
                               persia_table_get_config(r->t));
    if (code)
        return code;
    uint64_t *ids = p->col[COL_IDS];
    for (uint64_t at = 0; at < reader.rows && !code;) {
        size_t n = reader.rows - at < p->room ? (size_t)(reader.rows - at)
                                              : p->room, kept = 0;
        if ((code = persia_interrupt_poll()) ||
            (code = row_reader_ids(&reader, at, n, ids)))
            break;
        for (size_t i = 0; i < n; i++)
            if (hash_shard(id_hash(ids[i]), r->shards) == r->shard)
                ids[kept++] = ids[i];
        persia_table_expect(r->t, kept, ids);
        at += n;
    }
    row_reader_close(&reader);
    return code;
}

/* The same of all files, if not all rows may have room. */
static int ckpt_expect_all(const restorer *r)
{
    const table_config *config = persia_table_get_config(r->t);
    row_shape shape;
    row_piece p;
    if (!config->capacity || r->total <= config->capacity)
        return PERSIA_OK;
    row_shape_of(config, &shape);
    int code = row_piece_init(&p, &shape);
    for (size_t i = 0; i < r->n && !code; i++)
        code = expect_file(r, &r->files[i], &p);
    row_piece_free(&p);
    return code;
}

int persia_ckpt_restore(sched *s, table *t, int folder, const ckpt_file *files,
                        size_t n, uint32_t shard, uint32_t shards)
{
    const char *name = persia_table_get_config(t)->name;
    restorer r = {.t = t,
                  .folder = folder,
                  .files = files,
                  .n = n,
                  .shard = shard,
                  .shards = shards,
                  .shares = persia_sched_threads(s)};
    if (shards < 1 || shards > IDS_SHARDS_MAX || shard >= shards)
        return persia_err_set(PERSIA_EARG,
                              "table '%s': there is no shard %u of %u", name,
                              shard, shards);
    for (size_t i = 0; i < n; i++)
        r.total += files[i].rows;
    int code = ckpt_expect_all(&r);
    for (size_t i = 0; i < n && !code; i++)
        if (is_sightings(&files[i]))
            code = sightings_read(
                folder, &files[i], persia_table_get_config(t), t);
    if (!code)
        code = ckpt_restore_all(&r, s);
    persia_table_expect_none(t);
    if (code)
        return code;
    table_stats stats;
    persia_table_get_stats(t, &stats);
    if (stats.rows != r.kept && stats.evicted == 0)
        return persia_err_set(PERSIA_ECORRUPT,
                              "table '%s': its row files hold some ids twice",
                              name);
    return PERSIA_OK;
}

/* ---- plain files -------------------------------------------------------- */

int persia_ckpt_file_crc(int folder, const char *name, uint32_t *crc,
                         uint64_t *bytes)
{
    int fd, code = file_open(folder, name, &fd, bytes);
    void *buffer;
    if (code)
        return code;
    *crc = 0;
    code = persia_mem_pages_take(PIECE_BYTES, &buffer);
    for (uint64_t at = 0; at < *bytes && !code;) {
        uint64_t left = *bytes - at;
        size_t n = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;
        if ((code = persia_interrupt_poll()) ||
            (code = file_read(fd, name, buffer, n, at)))
            break;
        *crc = persia_crc32c(*crc, buffer, n);
        at += n;
    }
    persia_mem_pages_give(buffer, PIECE_BYTES);
    close(fd);
    return code;
}
