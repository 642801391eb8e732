/* criteo.c: lines of the Criteo click logs.
 *
 * The ends of fields are found 64 bytes at a time, as bits of a word; the
 * fields themselves are then read without a branch on their length.
 */
#include <string.h>

#include "data/data.h"
#include "data/hash.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { BLOCK = 64 };

#ifdef __SSE2__

/* Bit i tells whether p[i] is `a` or `b`. */
static inline uint64_t criteo_block_bits(const char *p, char a, char b)
{
    __m128i va = _mm_set1_epi8(a), vb = _mm_set1_epi8(b);
    uint64_t bits = 0;
    for (int i = 0; i < BLOCK / 16; i++) {
        const void *at = p + 16 * i;
        __m128i x = _mm_loadu_si128((const __m128i *)at);
        __m128i is = _mm_or_si128(_mm_cmpeq_epi8(x, va),
                                  _mm_cmpeq_epi8(x, vb));
        bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(is) << (16 * i);
    }
    return bits;
}

#else

/* The top bit of each byte tells whether the byte of x is 0. */
static inline uint64_t criteo_zero_bytes(uint64_t x)
{
    const uint64_t low = 0x7F7F7F7F7F7F7F7Fu;
    return ~(((x & low) + low) | x | low);
}

static inline uint64_t criteo_block_bits(const char *p, char a, char b)
{
    const uint64_t ones = 0x0101010101010101u;
    uint64_t bits = 0;
    for (int i = 0; i < BLOCK / 8; i++) {
        uint64_t x = load64((const unsigned char *)p + 8 * i);
        uint64_t is = criteo_zero_bytes(x ^ ones * (unsigned char)a) |
                      criteo_zero_bytes(x ^ ones * (unsigned char)b);
        /* Gathers the eight top bits into one byte. */
        bits |= ((is >> 7) * 0x0102040810204080u >> 56) << (8 * i);
    }
    return bits;
}

#endif

/* As criteo_block_bits(), of a block that may be cut off by the end of the
 * text. */
static inline uint64_t criteo_edge_bits(const char *p, const char *end, char a,
                                        char b)
{
    if (end - p >= BLOCK)
        return criteo_block_bits(p, a, b);
    char copy[BLOCK] = {0};
    size_t n = (size_t)(end - p);
    memcpy(copy, p, n);
    /* The bits beyond the text: zeros are neither \t nor \n. */
    return criteo_block_bits(copy, a, b);
}

/* A walk over the ends of fields. */
typedef struct scan {
    const char *block; /* the block whose bits these are */
    const char *end;   /* of the text */
    uint64_t bits;     /* ends of fields not visited yet */
} scan;

static inline scan scan_begin(const char *text, size_t size)
{
    scan s = {text, text + size, 0};
    if (size)
        s.bits = criteo_edge_bits(text, s.end, '\t', '\n');
    return s;
}

/* The next tab or line end, or NULL at the end of the text. */
static inline const char *scan_next(scan *s)
{
    while (!s->bits) {
        if (s->end - s->block <= BLOCK)
            return NULL;
        s->block += BLOCK;
        s->bits = criteo_edge_bits(s->block, s->end, '\t', '\n');
    }
    const char *at = s->block + __builtin_ctzll(s->bits);
    s->bits &= s->bits - 1;
    return at;
}

/* A number of more than 8 digits, or near the begin of the text: digit by
 * digit. */
static int criteo_integer_slow(const char *p, const char *stop, float *out)
{
    int negative = p < stop && *p == '-';
    p += negative;
    size_t digits = (size_t)(stop - p);
    if (digits == 0 || digits > 18)
        return 0;
    int64_t x = 0;
    for (; p < stop; p++) {
        unsigned digit = (unsigned)(unsigned char)*p - '0';
        if (digit > 9)
            return 0;
        x = 10 * x + digit;
    }
    *out = (float)(negative ? -x : x);
    return 1;
}

/* Reads [p, stop) as an integer, 0 if it is empty; the text begins at
 * `text`.  Returns 0 if it is none. */
static inline int criteo_integer_read(const char *text, const char *p,
                                      const char *stop, float *out)
{
    size_t n = (size_t)(stop - p);
    if (n == 0) {
        *out = 0;
        return 1;
    }
    int negative = *p == '-';
    size_t digits = n - (size_t)negative;
    if (digits - 1 > 7 || stop - text < 8)
        return criteo_integer_slow(p, stop, out);
    /* The 8 bytes up to `stop`, those before the number turned to '0'. */
    uint64_t x = load64((const unsigned char *)stop - 8);
    uint64_t before = digits == 8 ? 0 : UINT64_MAX >> (8 * digits);
    x = (x & ~before) | (0x3030303030303030u & before);
    x -= 0x3030303030303030u;
    /* A byte above 9 sets a top bit, now or after adding 0x76. */
    if (((x + 0x7676767676767676u) | x) & 0x8080808080808080u)
        return 0;
    x = x * 10 + (x >> 8); /* pairs, in every second byte */
    const uint64_t mask = 0x000000FF000000FFu;
    x = ((x & mask) * 0x000F424000000064u +
         ((x >> 16) & mask) * 0x0000271000000001u) >> 32;
    *out = (float)(negative ? -(int32_t)x : (int32_t)x);
    return 1;
}

static void fault_add(criteo_reader *r, uint32_t kind, uint32_t column)
{
    r->faults++;
    if (r->fault_n < r->fault_room)
        r->fault[r->fault_n++] =
            (line_fault){.line = r->line, .kind = kind, .column = column};
}

static inline uint64_t criteo_category_id(const char *p, const char *stop,
                                          uint64_t salt)
{
    size_t n = (size_t)(stop - p);
    if (n < 32)
        return xxh_short((const unsigned char *)p, n, salt);
    return persia_value_hash(p, n, salt);
}

/* Reads the fields of a line of the right number of columns into row
 * rows->n; field i ends at stop[i].  Returns 0 after a fault. */
static inline int row_read(criteo_reader *r, const char *text,
                           const char *line, const char *const *stop,
                           criteo_rows *rows)
{
    size_t row = rows->n;
    const char *p = line;
    uint32_t column = 0;
    if (r->has_label) {
        if (*stop - p != 1 || (*p | 1) != '1') {
            fault_add(r, FAULT_LABEL, 1);
            return 0;
        }
        rows->label[row] = (float)(*p - '0');
        p = stop[column++] + 1;
    }
    float *integers = rows->integers + row * CRITEO_INTEGERS;
    for (int i = 0; i < CRITEO_INTEGERS; i++) {
        const char *end = stop[column++];
        if (!criteo_integer_read(text, p, end, integers + i)) {
            fault_add(r, FAULT_INTEGER, column);
            return 0;
        }
        p = end + 1;
    }
    uint64_t *id = rows->ids + row;
    for (int i = 0; i < CRITEO_CATEGORIES; i++) {
        const char *end = stop[column++];
        *id = criteo_category_id(p, end, r->salts[i]);
        id += rows->room;
        p = end + 1;
    }
    return 1;
}

size_t persia_criteo_read(criteo_reader *r, const char *text, size_t size,
                          int final, criteo_rows *rows)
{
    const uint32_t columns =
        r->has_label ? CRITEO_COLUMNS : CRITEO_COLUMNS - 1;
    const char *stop[CRITEO_COLUMNS + 1];
    const char *line = text;
    scan s = scan_begin(text, size);
    while (rows->n < rows->room && line < s.end) {
        uint32_t n = 0;
        const char *at;
        do {
            at = scan_next(&s);
            if (!at) {
                if (!final)
                    return (size_t)(line - text);
                at = s.end;
            }
            stop[n < CRITEO_COLUMNS ? n : CRITEO_COLUMNS] = at;
            n += n < UINT32_MAX;
        } while (at < s.end && *at == '\t');
        const char *next = at < s.end ? at + 1 : at;
        r->line++;
        if (n != columns) {
            fault_add(r, FAULT_COLUMNS, n);
        } else {
            /* \r of \r\n, but not of an empty text before it. */
            if (at > line && at[-1] == '\r')
                stop[n - 1]--;
            rows->n += (size_t)row_read(r, text, line, stop, rows);
        }
        line = next;
    }
    return (size_t)(line - text);
}

size_t persia_lines_skip(const char *text, size_t size, int final,
                         uint64_t *lines)
{
    const char *p = text, *end = text + size;
    uint64_t n = 0;
    while (n < *lines && end - p >= BLOCK) {
        uint64_t bits = criteo_block_bits(p, '\n', '\n');
        uint64_t here = (uint64_t)__builtin_popcountll(bits);
        if (n + here >= *lines)
            break; /* the last line ends in this block */
        n += here;
        p += BLOCK;
    }
    /* p may be inside of a line: `n` lines ended before it. */
    while (n < *lines) {
        const char *at =
            p < end ? memchr(p, '\n', (size_t)(end - p)) : NULL;
        if (!at)
            break;
        p = at + 1;
        n++;
    }
    if (n < *lines) {
        /* All line ends were passed: what is left is an unfinished line. */
        const char *last = size ? memrchr(text, '\n', size) : NULL;
        const char *rest = last ? last + 1 : text;
        p = rest;
        if (final && rest < end) {
            p = end;
            n++;
        }
    }
    *lines = n;
    return (size_t)(p - text);
}
