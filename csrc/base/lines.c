#include "base/lines.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINES = 3, TEXT = 4096 };
#define MINUTE_NS ((uint64_t)60 * 1000000000)

static const char *const names[LINE_KINDS] = {
    [LINE_DENIED] = "denied",   [LINE_RESTORED] = "restored",
    [LINE_CLEARED] = "cleared", [LINE_ERASED] = "erased",
    [LINE_DROPPED] = "dropped", [LINE_TAKEOVER] = "takeover",
    [LINE_SET] = "set",         [LINE_WRITTEN] = "written",
    [LINE_NOT_WRITTEN] = "not written"};

void persia_lines_init(process_lines *l, const lines_to *to)
{
    *l = (process_lines){.to = *to};
    pthread_mutex_init(&l->lock, NULL);
}

/* ---- one line ----------------------------------------------------------- */

typedef struct line {
    char text[TEXT];
    size_t n;
    int json;
} line;

static void line_put(line *t, char c)
{
    if (t->n + 1 < sizeof t->text) /* its end fits */
        t->text[t->n++] = c;
}

static void line_add(line *t, const char *text)
{
    while (*text)
        line_put(t, *text++);
}

/* Names in messages are of any bytes: one line stays one line. */
static void line_add_value(line *t, const char *text)
{
    for (; *text; text++) {
        if (t->json && (*text == '"' || *text == '\\'))
            line_put(t, '\\');
        line_put(t, (unsigned char)*text < ' ' || *text == 0x7f ? '?' : *text);
    }
}

static void line_field_add(line *t, const line_field *f)
{
    char number[32];
    snprintf(number, sizeof number, f->hex ? "%016llx" : "%llu",
             (unsigned long long)f->number);
    const int quotes = t->json && (f->text || f->hex);
    line_add(t, t->json ? ", \"" : " ");
    line_add(t, f->name);
    line_add(t, t->json ? "\": " : "=");
    line_add(t, quotes ? "\"" : "");
    line_add_value(t, f->text ? f->text : number);
    line_add(t, quotes ? "\"" : "");
}

static void line_make(line *t, int json, const lines_to *to,
                      enum line_kind kind, const line_field *fields, size_t n)
{
    const time_t now = (time_t)persia_clock_seconds();
    struct tm utc;
    char at[32];
    strftime(at, sizeof at, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    t->n = 0;
    t->json = json;
    line_add(t, json ? "{\"time\": \"" : "");
    line_add(t, at);
    const int warns = kind == LINE_DENIED || kind == LINE_NOT_WRITTEN;
    line_add(t, !json   ? " "
                : warns ? "\", \"level\": \"warning\", \"event\": \""
                        : "\", \"level\": \"info\", \"event\": \"");
    line_add(t, names[kind]);
    if (json) {
        const line_field shard = {.name = "shard", .number = to->shard};
        line_add(t, "\", \"role\": \"");
        line_add(t, to->role ? to->role : "server");
        line_add(t, "\"");
        if (!to->role)
            line_field_add(t, &shard);
    }
    for (size_t i = 0; i < n; i++)
        line_field_add(t, &fields[i]);
    line_add(t, json ? "}" : "");
    t->text[t->n++] = '\n';
}

static int line_write(const line *t, int fd)
{
    struct pollfd room = {.fd = fd, .events = POLLOUT};
    return poll(&room, 1, 0) == 1 && (room.revents & POLLOUT) &&
           write(fd, t->text, t->n) == (ssize_t)t->n;
}

/* To the files that are to have it; whether they took it. */
static int lines_put(const process_lines *l, enum line_kind kind,
                     const line_field *fields, size_t n, int text, int audits)
{
    const lines_to *to = &l->to;
    line t;
    int done = 1;
    if (to->fd && text && kind < LINE_SET) {
        line_make(&t, to->json, to, kind, fields, n);
        done = line_write(&t, to->fd);
    }
    if (to->audit && audits) {
        line_make(&t, 1, to, kind, fields, n);
        done &= line_write(&t, to->audit);
    }
    return done;
}

/* ---- of a minute -------------------------------------------------------- */

static void lines_write_count_locked(process_lines *l, enum line_kind kind)
{
    const line_field more = {.name = "more", .number = l->of[kind].more};
    if (more.number && lines_put(l, kind, &more, 1, 1, kind == LINE_DENIED))
        l->of[kind].more = 0;
}

uint64_t persia_lines_count(process_lines *l, uint64_t now)
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

void persia_lines_free(process_lines *l)
{
    for (enum line_kind kind = 0; kind < LINE_KINDS; kind++)
        lines_write_count_locked(l, kind);
    pthread_mutex_destroy(&l->lock);
}

uint64_t persia_lines_write(process_lines *l, enum line_kind kind,
                     const line_field *fields, size_t n)
{
    if (!l->to.fd && !l->to.audit)
        return UINT64_MAX;
    const uint64_t now = persia_clock_ns();
    (void)persia_lines_count(l, now);
    pthread_mutex_lock(&l->lock);
    if (!l->of[kind].until)
        l->of[kind].until = now + MINUTE_NS;
    const int few = l->of[kind].lines++ < LINES;
    if (!lines_put(l, kind, fields, n, few, few || kind != LINE_DENIED) ||
        !few)
        l->of[kind].more++;
    const uint64_t next =
        l->of[kind].more ? l->of[kind].until : UINT64_MAX;
    pthread_mutex_unlock(&l->lock);
    return next;
}

uint64_t persia_lines_denied(process_lines *l, const char *method,
                             const char *peer, const char *name,
                             const char *reason)
{
    const line_field fields[] = {{.name = "peer", .text = peer},
                                 {.name = "name", .text = name},
                                 {.name = "method", .text = method},
                                 {.name = "reason", .text = reason}};
    return persia_lines_write(l, LINE_DENIED, fields, 4);
}
