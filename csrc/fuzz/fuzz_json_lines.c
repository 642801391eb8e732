/* fuzz_json_lines: any text has lines, and no more deep ones than those. */
#include <stdlib.h>
#include <string.h>

#include "data/data.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* A copy of exactly the size, so that ASan sees what is beyond. */
    char *text = malloc(size ? size : 1);
    if (!text)
        abort();
    if (size)
        memcpy(text, data, size);
    uint64_t deep, odd, none;
    uint64_t lines = persia_json_lines(text, size, 2, &deep, &odd);
    if (deep > lines || odd > lines ||
        persia_json_lines(text, size, size, &none, &odd) != lines || none)
        abort();
    free(text);
    return 0;
}
