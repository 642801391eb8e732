/* fuzz_criteo: any text, read in two different ways, gives the same rows,
 * the same faults and the same number of lines.
 *
 * Byte 0: has_label, and the room of the second reading; byte 1: how many
 * bytes it is given at a time. */
#include <stdlib.h>
#include <string.h>

#include "data/data.h"

enum { ROWS = 64 };

typedef struct sink {
    criteo_reader r;
    line_fault faults[ROWS];
    float label[ROWS], integers[ROWS * CRITEO_INTEGERS];
    uint64_t ids[CRITEO_CATEGORIES][ROWS];
    size_t n;
} sink;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int true_of_all_inputs)
{
    if (!true_of_all_inputs)
        abort();
}

/* Reads one piece from memory of exactly its size, into batches of `room`
 * rows that are appended to s. */
static size_t read_piece(sink *s, const char *text, size_t size, int final,
                         size_t room)
{
    float label[ROWS] = {0}; /* stays so without labels */
    float integers[ROWS * CRITEO_INTEGERS];
    uint64_t ids[CRITEO_CATEGORIES * ROWS];
    char *copy = malloc(size + !size);
    size_t used = 0;
    require(copy != NULL);
    memcpy(copy, text, size);
    while (s->n < ROWS) {
        if (room > ROWS - s->n)
            room = ROWS - s->n;
        criteo_rows rows = {.room = room, .label = label,
                            .integers = integers, .ids = ids};
        size_t now = persia_criteo_read(&s->r, copy + used, size - used, final,
                                        &rows);
        used += now;
        require(used <= size && rows.n <= room);
        memcpy(s->label + s->n, label, rows.n * sizeof *label);
        memcpy(s->integers + s->n * CRITEO_INTEGERS, integers,
               rows.n * CRITEO_INTEGERS * sizeof *integers);
        for (int c = 0; c < CRITEO_CATEGORIES; c++)
            memcpy(s->ids[c] + s->n, ids + (size_t)c * room,
                   rows.n * sizeof *ids);
        s->n += rows.n;
        if (rows.n < room || now == 0)
            break;
    }
    free(copy);
    return used;
}

static void sink_init(sink *s, int has_label)
{
    memset(s, 0, sizeof *s);
    s->r.has_label = has_label;
    s->r.fault = s->faults;
    s->r.fault_room = ROWS;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    static sink whole, parts;
    int has_label = data[0] & 1;
    size_t room = 1 + (data[0] >> 1) % ROWS, step = 1 + data[1];
    const char *text = (const char *)data + 2;
    size -= 2;

    sink_init(&whole, has_label);
    size_t end = read_piece(&whole, text, size, 1, ROWS);
    require(whole.n == ROWS || end == size);

    sink_init(&parts, has_label);
    size_t at = 0, given = 0;
    while (at < size && parts.n < ROWS) {
        given = given + step < size ? given + step : size;
        if (given < at)
            given = at;
        at += read_piece(&parts, text + at, given - at, given == size, room);
    }
    require(at == end && parts.n == whole.n);
    require(parts.r.line == whole.r.line);
    require(parts.r.faults == whole.r.faults);
    require(parts.r.faults + parts.n == parts.r.line);
    require(!memcmp(parts.faults, whole.faults, sizeof whole.faults));
    require(!memcmp(parts.label, whole.label, sizeof whole.label));
    require(!memcmp(parts.integers, whole.integers, sizeof whole.integers));
    require(!memcmp(parts.ids, whole.ids, sizeof whole.ids));
    uint64_t lines = parts.r.line;
    if (parts.n < ROWS)
        lines += 10; /* there are no more */
    require(persia_lines_skip(text, size, 1, &lines) == end);
    require(lines == parts.r.line);
    return 0;
}
