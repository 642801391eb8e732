/* format.c: heads of segments and records. */
#include "log/private.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/ckpt.h"

#define RECORD_MAGIC 0x4c525550u /* "PURL" */
enum { VERSION = 1, DIGITS = 20 };

static const char segment_magic[8] = "PERSLOG";
static const char prefix[] = "log-", spare[] = "spare-";

static const char *const type_names[LOG_TYPES] = {
    [LOG_IDENTITY] = "identity", [LOG_TABLE] = "table",
    [LOG_CLAIM] = "claim",       [LOG_PUSH] = "update",
    [LOG_ROWS] = "rows",         [LOG_RESTORE] = "restore",
    [LOG_REFUSAL] = "refusal",   [LOG_ARRIVAL] = "arrival"};

const char *persia_log_type_name(uint32_t type)
{
    return type && type < LOG_TYPES ? type_names[type] : "unknown";
}

void segment_name(uint64_t first, char out[SEGMENT_NAME])
{
    snprintf(out, SEGMENT_NAME, "%s%0*" PRIu64, prefix, DIGITS, first);
}

void spare_name(uint64_t first, char out[SEGMENT_NAME])
{
    snprintf(out, SEGMENT_NAME, "%s%0*" PRIu64, spare, DIGITS, first);
}

static int format_name_parse(const char *name, const char *before,
                             uint64_t *first)
{
    const size_t n = strlen(before);
    if (strncmp(name, before, n) || strlen(name + n) != DIGITS)
        return 0;
    *first = 0;
    for (const char *c = name + n; *c; c++) {
        const unsigned digit = (unsigned)(*c - '0');
        if (digit > 9 || *first > (UINT64_MAX - digit) / 10)
            return 0;
        *first = *first * 10 + digit;
    }
    return 1;
}

int segment_parse(const char *name, uint64_t *first)
{
    return format_name_parse(name, prefix, first);
}

int spare_parse(const char *name, uint64_t *first)
{
    return format_name_parse(name, spare, first);
}

static uint32_t segment_crc(const segment_head *h)
{
    segment_head copy = *h;
    copy.crc = 0;
    return persia_crc32c(0, &copy, sizeof copy);
}

void segment_head_make(const updates_log *l, uint64_t first, segment_head *out)
{
    *out = (segment_head){.version = VERSION,
                          .id = l->id,
                          .first = first,
                          .shard = l->config.owner.shard,
                          .shards = l->config.owner.shards};
    memcpy(out->magic, segment_magic, sizeof out->magic);
    memcpy(out->boot, l->boot, sizeof out->boot);
    memcpy(out->name_space, l->config.owner.name_space,
           sizeof out->name_space);
    out->crc = segment_crc(out);
}

int segment_head_is_old(const segment_head *h, uint64_t first)
{
    return h->first != first && segment_head_holds(h, h->first);
}

int segment_head_holds(const segment_head *h, uint64_t first)
{
    return !memcmp(h->magic, segment_magic, sizeof h->magic) &&
           h->version == VERSION && h->crc == segment_crc(h) &&
           h->first == first && !h->boot[BOOT_BYTES - 1] &&
           !h->name_space[LOG_NAME - 1];
}

static uint32_t record_crc(const record_head *h)
{
    record_head copy = *h;
    copy.crc = 0;
    return persia_crc32c(0, &copy, sizeof copy);
}

void record_head_seal(record_head *h)
{
    h->magic = RECORD_MAGIC;
    h->crc = record_crc(h);
}

int record_head_holds(const record_head *h, uint64_t id, uint64_t position)
{
    return h->magic == RECORD_MAGIC && h->id == id &&
           h->position == position && h->bytes % UNIT == 0 &&
           h->crc == record_crc(h);
}

record_head record_head_next(const updates_log *l)
{
    record_head h = {.id = l->id, .position = l->end, .synced = l->synced};
    record_head_seal(&h);
    return h;
}

void boot_of_machine(char out[BOOT_BYTES])
{
    memset(out, 0, BOOT_BYTES);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    const ssize_t n = read(fd, out, BOOT_BYTES - 1);
    (void)close(fd);
    if (n < 0)
        out[0] = 0;
    out[strcspn(out, "\n")] = 0;
}
