/* lines.h: lines for operators: calls that were denied, and changes of rows
 * with the client that made them (private).
 *
 *   2026-11-24T10:53:23Z denied peer=ipv4:10.0.0.7:40112 method=... reason=...
 *   {"time": "2026-11-24T10:53:23Z", "level": "warning", "event": "denied"...
 *
 * Three lines of a kind are written in a minute.  Those beyond are counted,
 * and the count is written when the minute is over.  A line for which the file
 * has no room at once counts, too: no request waits for a log.
 *
 * A file for audits gets all changes as JSON, and the lines of denied calls
 * that the log gets.
 */
#ifndef PERSIA_SERVER_LINES_H
#define PERSIA_SERVER_LINES_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum line_kind {
    LINE_DENIED,
    LINE_RESTORED,
    LINE_CLEARED,
    LINE_ERASED,
    LINE_DROPPED,
    LINE_TAKEOVER,
    LINE_SET,   /* from here on for audits alone */
    LINE_SAVED,
    LINE_KINDS
};

/* Of a line: a text, or (NULL) a number. */
typedef struct line_field {
    const char *name;
    const char *text;
    uint64_t number;
    int hex; /* it is an id */
} line_field;

typedef struct lines_to {
    int fd;    /* 0: nothing is written */
    int json;  /* there */
    int audit; /* file descriptor; 0: none */
    uint32_t shard;
} lines_to;

typedef struct server_lines {
    lines_to to;
    pthread_mutex_t lock; /* guards: */
    struct {
        uint64_t until; /* its minute is over; 0: no line yet */
        uint32_t lines;
        uint64_t more; /* lines that were not written */
    } of[LINE_KINDS];
} server_lines;

void lines_init(server_lines *l, const lines_to *to);
/* Writes the counts that are left. */
void lines_free(server_lines *l);
/* One line of n fields.  The time at which lines_count() is wanted, or
 * UINT64_MAX. */
uint64_t lines_write(server_lines *l, enum line_kind kind,
                     const line_field *fields, size_t n);
/* Writes the counts of minutes that are over; returns as lines_write(). */
uint64_t lines_count(server_lines *l, uint64_t now);

#endif
