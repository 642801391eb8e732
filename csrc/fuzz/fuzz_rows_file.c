/* Row files to be served, made of arbitrary bytes: whatever they are, they
 * are refused with an error, or a search reads within the file.  The same
 * bytes are the rows of a packet, which are found then. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rows_file/private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { IDS = 64, DIM = 2 };

static void search(const rows_file *f)
{
    uint64_t ids[IDS], absent = 0;
    float out[IDS * DIM];
    const uint64_t n = persia_rows_file_rows(f);
    const size_t some = n < IDS ? (size_t)n : IDS;

    (void)persia_rows_file_check(f);
    if (persia_rows_file_read(f, 0, some, ids, out))
        abort();
    for (size_t i = some; i < IDS; i++)
        ids[i] = i;
    if (persia_rows_file_look_up(f, IDS, ids, out, DIM, &absent) ||
        absent > IDS)
        abort();
}

/* Some ids have no row any more, then the bytes are rows. */
static void apply(rows_file *f, const rows_config *c, const uint8_t *data,
                  size_t size)
{
    const size_t stride = persia_rows_stride(c), n = size / stride;
    const size_t gone_n = n < IDS ? n : IDS;
    uint64_t ids[IDS];
    uint8_t found[IDS];

    memcpy(ids, data, gone_n * sizeof *ids);
    const int rc = persia_rows_file_apply(f, gone_n, ids, n, data);
    if ((rc && rc != PERSIA_ENONFINITE) ||
        persia_rows_file_fresh(f) > gone_n + n)
        abort();
    if (rc)
        return;
    for (size_t i = 0; i < gone_n; i++)
        memcpy(&ids[i], data + i * stride, sizeof *ids);
    if (persia_rows_file_contains(f, gone_n, ids, found))
        abort();
    for (size_t i = 0; i < gone_n; i++)
        if (found[i] != 1)
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    table_config absent;
    persia_table_config_init(&absent);
    strcpy(absent.name, "fuzz");
    absent.dim = DIM;
    for (uint32_t type = 0; type < ROWS_TYPES; type++) {
        const rows_config c = {.type = type, .dim = DIM, .key = 5};
        rows_file *f;
        const int fd = memfd_create("fuzz", 0);
        if (fd < 0 || write(fd, data, size) != (ssize_t)size)
            abort();
        if (!rows_file_from(fd, "fuzz", size, &c, &absent, &f)) {
            search(f);
            apply(f, &c, data, size);
            search(f);
            persia_rows_file_close(f);
        }
        close(fd);
    }
    return 0;
}
