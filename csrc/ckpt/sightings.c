#include "ckpt/sightings.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/crc32c.h"
#include "ckpt/rows.h"

/* ---- writing ------------------------------------------------------------ */

/* Slots that are copied, and written, at a time. */
static uint32_t piece_of(size_t words)
{
    enum { WORDS = 1 << 18 };

    return words < WORDS ? (uint32_t)(WORDS / words) : 1;
}

/* The words of all slots, piece by piece. */
static int sightings_write_words(int fd, table_cut *cut, uint32_t slots,
                                 size_t words, uint64_t at, ckpt_file *file)
{
    const uint32_t most = piece_of(words);
    uint32_t *piece = malloc(most * words * sizeof *piece);
    int rc = PERSIA_OK;

    if (!piece)
        return persia_err_set(PERSIA_ENOMEM, "%s: %zu bytes of sightings",
                              file->name, most * words * sizeof *piece);
    for (uint32_t from = 0; from < slots && !rc; from += most) {
        const uint32_t n = slots - from < most ? slots - from : most;
        const size_t bytes = n * words * sizeof *piece;
        rc = persia_interrupt_poll();
        if (!rc)
            rc = persia_table_cut_sightings(cut, from, n, piece);
        if (!rc)
            rc = file_write(fd, file->name, piece, bytes, at);
        if (!rc)
            file->crc = persia_crc32c(file->crc, piece, bytes);
        at += bytes;
    }
    free(piece);
    return rc;
}

static int sightings_write_all(int fd, table_cut *cut, uint32_t first,
                               st_header *h, const char *head, size_t head_n,
                               ckpt_file *file)
{
    uint32_t numbers[IDS_SLOTS];
    const uint32_t slots = (uint32_t)h->tensors[0].shape[0];
    const size_t n = slots * sizeof *numbers;
    int rc;

    for (uint32_t i = 0; i < slots; i++)
        numbers[i] = first + i;
    if ((rc = file_write(fd, file->name, head, head_n, 0)) ||
        (rc = file_write(fd, file->name, numbers, n, h->data)))
        return rc;
    file->bytes = h->bytes;
    file->crc = persia_crc32c(0, head, head_n);
    file->crc = persia_crc32c(file->crc, numbers, n);
    rc = sightings_write_words(fd, cut, slots, (size_t)h->tensors[1].shape[1],
                               h->data + n, file);
    if (!rc && fsync(fd))
        rc = persia_err_set(PERSIA_EIO, "%s: fsync failed: %s", file->name,
                            strerror(errno));
    return rc;
}

int sightings_write(table_cut *cut, const table_config *config, int folder,
                    const char *stem, ckpt_files *out)
{
    const size_t words = persia_table_sightings(config);
    const uint32_t slots = config->slots ? config->slots : IDS_SLOTS;
    st_header h = { .n = 2,
                    .tensors = { { .name = "slots", .dtype = ST_U32,
                                   .rank = 1, .shape = { slots } },
                                 { .name = "sightings", .dtype = ST_U32,
                                   .rank = 2,
                                   .shape = { slots, words } } } };
    ckpt_file file = { 0 };
    char head[4096];
    size_t n;
    int rc;

    if (!words)
        return PERSIA_OK;
    snprintf(file.name, sizeof file.name, "%.150s-sightings.safetensors",
             stem);
    if ((rc = persia_ckpt_name_check(file.name)) ||
        (rc = st_format(&h, "{\"format\":\"persia.sightings.1\"}", head,
                        sizeof head, &n)))
        return rc;
    int fd = openat(folder, file.name,
                    O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return persia_err_set(PERSIA_EIO, "%s: cannot be made: %s", file.name,
                              strerror(errno));
    rc = sightings_write_all(fd, cut, config->first_slot, &h, head, n, &file);
    if (close(fd) && !rc)
        rc = persia_err_set(PERSIA_EIO, "%s: closing failed: %s", file.name,
                            strerror(errno));
    return rc ? rc : persia_ckpt_files_add(out, &file);
}

/* ---- reading ------------------------------------------------------------ */

typedef struct source {
    int fd;
    const char *name;
    st_header h;
    uint32_t crc;
} source;

static int ckpt_sightings_refuse(const source *s)
{
    return persia_err_set(PERSIA_ECORRUPT,
                          "%s: it is neither a row file nor one of sightings, "
                          "or was altered",
                          s->name);
}

/* Reads n bytes from `at` on, which follow those read before. */
static int source_read(source *s, void *out, size_t n, uint64_t at)
{
    int rc = file_read(s->fd, s->name, out, n, at);

    if (!rc)
        s->crc = persia_crc32c(s->crc, out, n);
    return rc;
}

static int sightings_read_head(source *s, uint64_t bytes)
{
    char head[4096];
    size_t json;
    int rc;

    if (bytes < 8)
        return ckpt_sightings_refuse(s);
    if ((rc = source_read(s, head, 8, 0)) ||
        (rc = st_json_bytes(s->name, (unsigned char *)head, bytes, &json)))
        return rc;
    if (json > sizeof head)
        return ckpt_sightings_refuse(s);
    if ((rc = source_read(s, head, json, 8)) ||
        (rc = st_parse(s->name, head, json, bytes, &s->h)))
        return rc;
    const st_tensor *a = &s->h.tensors[0], *b = &s->h.tensors[1];
    if (s->h.n != 2 || s->h.data != 8 + json || strcmp(a->name, "slots") ||
        strcmp(b->name, "sightings") || a->dtype != ST_U32 ||
        b->dtype != ST_U32 || a->rank != 1 || b->rank != 2 ||
        a->shape[0] > IDS_SLOTS || a->shape[0] != b->shape[0] ||
        b->shape[1] > ((uint64_t)1 << 36) / IDS_SLOTS)
        return ckpt_sightings_refuse(s);
    return PERSIA_OK;
}

static int sightings_read_slots(source *s, const table_config *config,
                                table *t)
{
    const st_tensor *b = &s->h.tensors[1];
    const size_t n = (size_t)s->h.tensors[0].shape[0];
    const size_t bytes = (size_t)b->shape[1] * sizeof(uint32_t);
    const int fits = b->shape[1] && b->shape[1] ==
                                        persia_table_sightings(config);
    uint32_t slots[IDS_SLOTS], *words = malloc(bytes + 1);
    int rc;

    if (!words)
        return persia_err_set(PERSIA_ENOMEM, "%s: %zu bytes of sightings",
                              s->name, bytes);
    rc = source_read(s, slots, n * sizeof *slots,
                     s->h.data + s->h.tensors[0].begin);
    for (size_t i = 0; i < n && !rc; i++) {
        rc = persia_interrupt_poll();
        if (!rc)
            rc = source_read(s, words, bytes,
                             s->h.data + b->begin + i * bytes);
        if (!rc && t && fits && slots[i] < IDS_SLOTS)
            persia_table_restore_sightings(t, slots[i], 1, words);
    }
    free(words);
    return rc;
}

int sightings_read(int folder, const ckpt_file *file,
                   const table_config *config, table *t)
{
    source s = { .name = file->name };
    uint64_t bytes;
    int rc = file_open(folder, file->name, &s.fd, &bytes);

    if (rc)
        return rc;
    rc = bytes == file->bytes ? sightings_read_head(&s, bytes)
                              : ckpt_sightings_refuse(&s);
    if (!rc)
        rc = sightings_read_slots(&s, config, t);
    if (!rc && s.crc != file->crc)
        rc = ckpt_sightings_refuse(&s);
    close(s.fd);
    return rc;
}
