/* fuzz_strings: any offsets over any bytes are refused or stay inside.
 *
 * Byte 0: flags and the separator; byte 1: how many bytes are offsets; then
 * offsets, then the strings' bytes. */
#include <stdlib.h>
#include <string.h>

#include "data/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int true_of_all_inputs)
{
    if (!true_of_all_inputs)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    string_column c = {.wide = data[0] & 1, .strip = data[0] >> 1 & 1};
    char separator = ",| a"[data[0] >> 2 & 3];
    size_t width = c.wide ? sizeof(int64_t) : sizeof(int32_t);
    size_t head = data[1];
    data += 2;
    size -= 2;
    if (head > size)
        head = size;
    if (head < width)
        return 0;
    /* Copies of exactly the size, so that ASan sees what is beyond. */
    char *offsets = malloc(head), *bytes = malloc(size - head + 1);
    require(offsets && bytes);
    memcpy(offsets, data, head);
    c.size = size - head;
    bytes = realloc(bytes, c.size ? c.size : 1);
    require(bytes != NULL);
    memcpy(bytes, data + head, c.size);
    c.n = head / width - 1;
    c.offsets = offsets;
    c.bytes = bytes;

    uint64_t *ids = malloc((c.n + 1) * sizeof *ids);
    int64_t *lengths = malloc((c.n + 1) * sizeof *lengths);
    size_t room = (c.size + c.n) / 2, ids_n = 0;
    uint64_t *parts = malloc((room + 1) * sizeof *parts);
    require(ids && lengths && parts);
    int hashed = persia_strings_hash(&c, 5, ids);
    int split = persia_strings_split(&c, separator, 5, parts, room, lengths,
                                     &ids_n);
    require(hashed == PERSIA_OK || hashed == PERSIA_EOFFSETS);
    require(split == hashed);
    if (!split) {
        size_t sum = 0;
        for (size_t i = 0; i < c.n; i++) {
            require(lengths[i] >= 0);
            sum += (size_t)lengths[i];
        }
        require(sum == ids_n && ids_n <= room);
    }
    free(parts);
    free(lengths);
    free(ids);
    free(bytes);
    free(offsets);
    return 0;
}
