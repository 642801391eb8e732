/* Row files to be served, made of arbitrary bytes: whatever they are, they
 * are refused with an error, or a search reads within the file. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rows_file/private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void search(const rows_file *f)
{
    uint64_t ids[64], absent = 0;
    float out[64 * 2];
    const uint64_t n = persia_rows_file_rows(f);
    const size_t some = n < 64 ? (size_t)n : 64;

    (void)persia_rows_file_check(f);
    if (persia_rows_file_read(f, 0, some, ids, out))
        abort();
    for (size_t i = some; i < 64; i++)
        ids[i] = i;
    if (persia_rows_file_look_up(f, 64, ids, out, 2, &absent) || absent > 64)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    table_config absent;
    persia_table_config_init(&absent);
    strcpy(absent.name, "fuzz");
    absent.dim = 2;
    for (uint32_t type = 0; type < ROWS_TYPES; type++) {
        const rows_config c = {.type = type, .dim = 2, .key = 5};
        rows_file *f;
        const int fd = memfd_create("fuzz", 0);
        if (fd < 0 || write(fd, data, size) != (ssize_t)size)
            abort();
        if (!rows_file_from(fd, "fuzz", size, &c, &absent, &f)) {
            search(f);
            persia_rows_file_close(f);
        }
        close(fd);
    }
    return 0;
}
