/* lines.h: lines for operators: calls that were denied, and changes of rows
 * with the client that made them.
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
#ifndef PERSIA_BASE_LINES_H
#define PERSIA_BASE_LINES_H

#include "base/base.h"

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

enum line_kind {
    LINE_DENIED,
    LINE_RESTORED,
    LINE_CLEARED,
    LINE_ERASED,
    LINE_DROPPED,
    LINE_TAKEOVER,
    LINE_NOT_WRITTEN,
    LINE_SET,   /* from here on for audits alone */
    LINE_WRITTEN,
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
    const char *role; /* of the process; NULL: a server, of: */
    uint32_t shard;
} lines_to;

typedef struct process_lines {
    lines_to to;
    pthread_mutex_t lock; /* guards: */
    struct {
        uint64_t until; /* its minute is over; 0: no line yet */
        uint32_t lines;
        uint64_t more; /* lines that were not written */
    } of[LINE_KINDS];
} process_lines;

PERSIA_API void persia_lines_init(process_lines *l, const lines_to *to);
/* Writes the counts that are left. */
PERSIA_API void persia_lines_free(process_lines *l);
/* One line of n fields.  The time at which persia_lines_count() is wanted, or
 * UINT64_MAX. */
PERSIA_API uint64_t persia_lines_write(process_lines *l, enum line_kind kind,
                                       const line_field *fields, size_t n);
/* The same of a call that is denied: from where, whose (or ""), and why. */
PERSIA_API uint64_t persia_lines_denied(process_lines *l, const char *method,
                                        const char *peer, const char *name,
                                        const char *reason);
/* Writes the counts of minutes that are over, at UINT64_MAX all; returns as
 * persia_lines_write(). */
PERSIA_API uint64_t persia_lines_count(process_lines *l, uint64_t now);

#ifdef __cplusplus
}
#endif
#endif
