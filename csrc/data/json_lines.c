/* json_lines.c: how deep lines of JSON are, before a parser that recurses
 * sees them. */
#include <string.h>

#include "data/data.h"

/* '[' and '{' differ from each other in one bit, as do ']' and '}'. */
enum { CASE = 0x20, OPENING = '{', CLOSING = '}' };

static size_t json_lines_count_opening(const char *p, const char *end)
{
    size_t n = 0;
    for (; p < end; p++)
        n += (*p | CASE) == OPENING;
    return n;
}

/* Whether more than `most` brackets of a line are within each other. */
static int json_lines_is_deep(const char *p, const char *end, size_t most)
{
    size_t depth = 0;
    int quoted = 0;
    for (; p < end; p++) {
        if (*p == '"')
            quoted = !quoted;
        else if (quoted)
            p += *p == '\\' && p + 1 < end;
        else if ((*p | CASE) == OPENING && ++depth > most)
            return 1;
        else if ((*p | CASE) == CLOSING && depth)
            depth--;
    }
    return 0;
}

static int json_lines_is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* Whether a line begins and ends as an object does.  Between lines that do,
 * a parser is at depth 0 or has failed. */
static int json_lines_is_object(const char *p, const char *end)
{
    while (p < end && json_lines_is_blank(*p))
        p++;
    while (p < end && json_lines_is_blank(end[-1]))
        end--;
    return p < end && *p == OPENING && end[-1] == CLOSING;
}

uint64_t persia_json_lines(const char *text, size_t size, size_t most,
                           uint64_t *deep, uint64_t *odd)
{
    uint64_t lines = 0;
    *deep = *odd = 0;
    for (size_t at = 0; at < size; lines++) {
        const char *begin = text + at;
        const char *stop = memchr(begin, '\n', size - at);
        const char *end = stop ? stop : text + size;
        if ((size_t)(end - begin) > most &&
            json_lines_count_opening(begin, end) > most)
            *deep += (uint64_t)json_lines_is_deep(begin, end, most);
        *odd += (uint64_t)!json_lines_is_object(begin, end);
        at = (size_t)(end - text) + 1;
    }
    return lines;
}
