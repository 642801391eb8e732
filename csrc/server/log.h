/* log.h: lines for those who run a server: who was denied, who changed what
 * (private).
 *
 *   2026-11-24T10:53:23Z denied peer=ipv4:10.0.0.7:40112 method=... reason=...
 *
 * Three lines of a kind are written in a minute.  Those beyond are counted,
 * and the count is written when the minute is over.  A line for which the file
 * has no room at once counts, too: no request waits for a log.
 */
#ifndef PERSIA_SERVER_LOG_H
#define PERSIA_SERVER_LOG_H

#include <pthread.h>
#include <stdint.h>

enum log_kind {
    LOG_DENIED,
    LOG_RESTORED,
    LOG_CLEARED,
    LOG_ERASED,
    LOG_DROPPED,
    LOG_TAKEOVER,
    LOG_KINDS
};

typedef struct server_log {
    int fd;               /* 0: nothing is written */
    pthread_mutex_t lock; /* guards: */
    struct {
        uint64_t until; /* its minute is over; 0: no line yet */
        uint32_t lines;
        uint64_t more; /* lines that were not written */
    } of[LOG_KINDS];
} server_log;

void log_init(server_log *l, int fd);
/* Writes the counts that are left. */
void log_free(server_log *l);
/* One line.  The time at which log_counts() is wanted, or UINT64_MAX. */
uint64_t log_line(server_log *l, enum log_kind kind, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Writes the counts of minutes that are over; returns as log_line(). */
uint64_t log_counts(server_log *l, uint64_t now);

#endif
