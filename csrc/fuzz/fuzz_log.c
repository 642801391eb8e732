/* A log of arbitrary records, with some of its bytes changed: a server
 * that reads it has recovered or says why not, and nothing crashes.
 *
 * An input is a row of [ type | flags | length, 2 bytes | message ]; bit 0 of
 * flags: the message is one more part of the record before; bit 1: the first
 * `length` bytes of the message are positions, of 4 bytes, and a byte each, of
 * the first segment, which is changed there after all was written. */
#include <stdlib.h>
#include <string.h>

#include "log/log.h"
#include "server/server.h"
#include "tests/log/disk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { HEAD = 4, PARTS = 4, CHANGE = 5 };

static const log_config config = {.owner = {"fuzz", 0, 1},
                                  .level = LOG_PROCESS,
                                  .segment = 4096,
                                  .limit = 1 << 30};

typedef struct item {
    uint8_t type, flags;
    wire_span message;
} item;

static int item_next(const uint8_t **data, size_t *size, item *out)
{
    if (*size < HEAD)
        return 0;
    const uint8_t *head = *data;
    size_t n = (size_t)head[2] | (size_t)head[3] << 8;
    n = n < *size - HEAD ? n : *size - HEAD;
    *out = (item){head[0], head[1], {head + HEAD, n}};
    *data += HEAD + n;
    *size -= HEAD + n;
    return 1;
}

static void change(memory_disk *d, const wire_span *changes)
{
    memory_file *f = memory_disk_file(d, 0);
    const uint8_t *c = changes->data;
    for (size_t at = 0; f && at + CHANGE <= changes->n; at += CHANGE) {
        uint32_t place;
        memcpy(&place, c + at, sizeof place);
        if (f->bytes)
            f->data[place % f->bytes] ^= (char)c[at + 4];
    }
}

static void flush_record(updates_log *l, uint8_t type, const wire_span *parts,
                         size_t n)
{
    uint64_t end;
    if (n && persia_log_append(l, (enum log_type)(type % (LOG_TYPES + 1)),
                               parts, n, &end))
        abort();
}

/* Writes the records; the changes are the caller's. */
static void fill(memory_disk *d, const uint8_t *data, size_t size)
{
    updates_log *l;
    log_found found = {0};
    wire_span parts[PARTS];
    size_t n = 0;
    uint8_t type = 0;
    item one;
    if (persia_log_open(&d->disk, &config, &l) ||
        persia_log_begin(l, &found))
        abort();
    while (item_next(&data, &size, &one)) {
        if (one.flags & 2)
            continue;
        if (!(one.flags & 1) || n == PARTS) {
            flush_record(l, type, parts, n);
            n = 0;
            type = one.type;
        }
        parts[n++] = one.message;
    }
    flush_record(l, type, parts, n);
    persia_log_close(l);
}

static void recover(memory_disk *d)
{
    tables *p;
    ps_service *s;
    log_found found;
    service_config c = {.name_space = "fuzz", .shards = 1,
                        .message_limit = 1 << 20};
    if (persia_log_open(&d->disk, &config, &c.log))
        return; /* its first segment has no head */
    const tables_config t = {.threads = 1, .memory_limit = 8 << 20};
    if (persia_tables_create(&t, &p) || persia_service_create(p, &c, &s))
        abort();
    const int rc = persia_service_replay(s, 0, &found);
    if (rc == PERSIA_EINTERNAL)
        abort();
    if (persia_service_destroy(s))
        abort();
    persia_log_close(c.log);
    persia_tables_destroy(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    memory_disk *d = memory_disk_make();
    const uint8_t *at = data;
    size_t left = size;
    item one;
    fill(d, data, size);
    while (item_next(&at, &left, &one))
        if (one.flags & 2)
            change(d, &one.message);
    recover(d);
    memory_disk_free(d);
    return 0;
}
