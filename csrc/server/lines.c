#include "server/lines.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

enum { LINES = 3, TEXT = 1024 };
#define MINUTE_NS ((uint64_t)60 * 1000000000)

static const char *const names[LINE_KINDS] = {
    [LINE_DENIED] = "denied",   [LINE_RESTORED] = "restored",
    [LINE_CLEARED] = "cleared", [LINE_ERASED] = "erased",
    [LINE_DROPPED] = "dropped", [LINE_TAKEOVER] = "takeover"};

void lines_init(server_lines *l, int fd)
{
    *l = (server_lines){.fd = fd};
    pthread_mutex_init(&l->lock, NULL);
}

/* Names in messages are of any bytes: one line stays one line. */
static size_t lines_make_printable(char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 0x7f)
            text[i] = '?';
    text[n] = '\n';
    return n + 1;
}

static size_t lines_smaller(size_t n, size_t most)
{
    return n < most ? n : most;
}

/* Whether the file took it. */
static int write_line(const server_lines *l, enum line_kind kind,
                      const char *fields)
{
    char text[TEXT];
    struct pollfd room = {.fd = l->fd, .events = POLLOUT};
    const time_t now = (time_t)persia_clock_seconds();
    struct tm utc;
    size_t n = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ ",
                        gmtime_r(&now, &utc));
    n += (size_t)snprintf(text + n, sizeof text - n, "%s %s", names[kind],
                          fields);
    n = lines_make_printable(text, lines_smaller(n, sizeof text - 2));
    return poll(&room, 1, 0) == 1 && (room.revents & POLLOUT) &&
           write(l->fd, text, n) == (ssize_t)n;
}

static void lines_write_count_locked(server_lines *l, enum line_kind kind)
{
    char text[64];
    if (!l->of[kind].more)
        return;
    snprintf(text, sizeof text, "more=%llu",
             (unsigned long long)l->of[kind].more);
    if (write_line(l, kind, text))
        l->of[kind].more = 0;
}

uint64_t lines_count(server_lines *l, uint64_t now)
{
    uint64_t next = UINT64_MAX;
    pthread_mutex_lock(&l->lock);
    for (enum line_kind kind = 0; kind < LINE_KINDS; kind++) {
        if (l->of[kind].until > now || !l->of[kind].until) {
            if (l->of[kind].more && l->of[kind].until < next)
                next = l->of[kind].until;
            continue;
        }
        lines_write_count_locked(l, kind);
        l->of[kind].until = l->of[kind].more ? now + MINUTE_NS : 0;
        l->of[kind].lines = 0;
    }
    pthread_mutex_unlock(&l->lock);
    return next;
}

void lines_free(server_lines *l)
{
    for (enum line_kind kind = 0; kind < LINE_KINDS; kind++)
        lines_write_count_locked(l, kind);
    pthread_mutex_destroy(&l->lock);
}

uint64_t lines_write(server_lines *l, enum line_kind kind,
                     const char *format, ...)
{
    char fields[TEXT];
    va_list list;
    if (!l->fd)
        return UINT64_MAX;
    const uint64_t now = persia_clock_ns();
    (void)lines_count(l, now);
    va_start(list, format);
    vsnprintf(fields, sizeof fields, format, list);
    va_end(list);
    pthread_mutex_lock(&l->lock);
    if (!l->of[kind].until)
        l->of[kind].until = now + MINUTE_NS;
    if (l->of[kind].lines++ >= LINES || !write_line(l, kind, fields))
        l->of[kind].more++;
    const uint64_t next =
        l->of[kind].more ? l->of[kind].until : UINT64_MAX;
    pthread_mutex_unlock(&l->lock);
    return next;
}
