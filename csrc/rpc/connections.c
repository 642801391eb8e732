#include "rpc/connections.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "rpc/core.h"

enum {
    COUNT_MS = 100,   /* between two counts, at least */
    COUNT_SHARE = 100 /* they take at most 1 / 100 of a core */
};

/* One connection, by the kernel's number of its socket: file descriptors are
 * used again. */
typedef struct connection {
    uint64_t cookie;
    int fd; /* gRPC's */
} connection;

struct connections {
    int port;
    uint32_t max;
    DIR *files; /* /proc/self/fd, open for when no descriptor is left */
    persia_timer timer;
    _Atomic(uint64_t) refused;
    /* The thread's own: those that may stay, by cookie, and what a count
     * finds. */
    uint64_t *known;
    size_t known_n;
    connection *found;
    size_t found_n, found_max;
};

/* ---- sockets of this process -------------------------------------------- */

/* Whether it is a TCP connection at this port that neither we nor gRPC have
 * closed. */
static int is_connection(int fd, int port)
{
    struct sockaddr_storage a;
    struct tcp_info info;
    socklen_t n = sizeof a, info_n = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &info_n) != 0 ||
        (info.tcpi_state != TCP_ESTABLISHED &&
         info.tcpi_state != TCP_CLOSE_WAIT) ||
        getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        return 0;
    uint16_t at = a.ss_family == AF_INET
                      ? ((const struct sockaddr_in *)&a)->sin_port
                  : a.ss_family == AF_INET6
                      ? ((const struct sockaddr_in6 *)&a)->sin6_port
                      : 0;
    return ntohs(at) == port;
}

static int connections_cookie_of(int fd, uint64_t *out)
{
    socklen_t n = sizeof *out;
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, out, &n) == 0;
}

/* The next of them, in the order of the folder; -1: no more. */
static int next_connection(DIR *files, int port)
{
    for (struct dirent *e; (e = readdir(files));) {
        char *end;
        long fd = strtol(e->d_name, &end, 10);
        if (!*end && end != e->d_name && is_connection((int)fd, port))
            return (int)fd;
    }
    return -1;
}

static int connections_note_found(connections *c, int fd)
{
    if (c->found_n == c->found_max) {
        size_t max = c->found_max ? 2 * c->found_max : 64;
        connection *more = realloc(c->found, max * sizeof *more);
        if (!more)
            return 0;
        c->found = more;
        c->found_max = max;
    }
    connection *f = &c->found[c->found_n];
    f->fd = fd;
    c->found_n += (size_t)connections_cookie_of(fd, &f->cookie);
    return 1;
}

/* ---- the count ---------------------------------------------------------- */

static int connections_by_number(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static int connections_is_known(const connections *c, uint64_t cookie)
{
    return bsearch(&cookie, c->known, c->known_n, sizeof cookie,
                   connections_by_number) != NULL;
}

/* gRPC may close its descriptor at any time, and another file may get its
 * number: so ours keeps the socket while we look which one it is. */
static void connections_refuse(connections *c, const connection *one)
{
    uint64_t cookie;
    int fd = fcntl(one->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return; /* the next count sees it again */
    if (connections_cookie_of(fd, &cookie) && cookie == one->cookie &&
        shutdown(fd, SHUT_RDWR) == 0)
        atomic_fetch_add(&c->refused, 1);
    close(fd);
}

/* Closes those beyond the limit; what was there before stays. */
static void rpc_connections_count(connections *c)
{
    size_t old = 0, room, stay = 0;
    c->found_n = 0;
    rewinddir(c->files);
    for (int fd; (fd = next_connection(c->files, c->port)) >= 0;)
        if (!connections_note_found(c, fd))
            return; /* no memory: the next time */
    for (size_t i = 0; i < c->found_n; i++)
        old += (size_t)connections_is_known(c, c->found[i].cookie);
    room = c->max - old;
    for (size_t i = 0; i < c->found_n; i++) {
        const connection *f = &c->found[i];
        if (!connections_is_known(c, f->cookie)) {
            if (!room) {
                connections_refuse(c, f);
                continue;
            }
            room--;
        }
        c->found[stay++] = *f;
    }
    for (size_t i = 0; i < stay; i++)
        c->known[i] = c->found[i].cookie;
    c->known_n = stay;
    qsort(c->known, stay, sizeof *c->known, connections_by_number);
}

static uint64_t connections_tick(void *ctx)
{
    connections *c = ctx;
    const uint64_t start = persia_clock_ns();
    rpc_connections_count(c);
    const uint64_t now = persia_clock_ns();
    const uint64_t ms = (now - start) * COUNT_SHARE / 1000000u;
    return now + (ms < COUNT_MS ? COUNT_MS : ms > 10000 ? 10000 : ms) *
                     1000000u;
}

/* ---- life --------------------------------------------------------------- */

int connections_guard(int port, uint32_t max, connections **out)
{
    connections *c = calloc(1, sizeof *c);
    int rc;
    *out = NULL;
    if (!c)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for a limit of connections");
    c->port = port;
    c->max = max;
    c->known = malloc(max * sizeof *c->known);
    persia_timer_init(&c->timer);
    if (!c->known) {
        rc = persia_err_set(PERSIA_ENOMEM,
                            "no memory to limit connections to %u", max);
        goto fail;
    }
    c->files = opendir("/proc/self/fd");
    if (!c->files) {
        rc = persia_err_set(PERSIA_EIO,
                            "limiting connections to %u: "
                            "/proc/self/fd: %s",
                            max, strerror(errno));
        goto fail;
    }
    rc = persia_timer_start(&c->timer, connections_tick, c, "persia-rpc-conn");
    if (rc)
        goto fail;
    *out = c;
    return PERSIA_OK;
fail:
    connections_free(c);
    return rc;
}

void connections_count(const connections *c, uint64_t *open,
                       uint64_t *refused)
{
    DIR *files = opendir("/proc/self/fd");
    *open = 0;
    while (files && next_connection(files, c->port) >= 0)
        ++*open;
    if (files)
        closedir(files);
    *refused = atomic_load(&c->refused);
}

void connections_free(connections *c)
{
    if (!c)
        return;
    persia_timer_free(&c->timer);
    if (c->files)
        closedir(c->files);
    free(c->known);
    free(c->found);
    free(c);
}
