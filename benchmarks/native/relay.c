/* relay.c: a TCP relay that delivers every byte a set time later, both ways:
 * the long link of benchmarks/hybrid.py.
 *
 *   relay HOST PORT    prints its own port on 127.0.0.1; ends with its input
 *
 * Each line of its input is a delay each way in microseconds (0 at first),
 * answered by "BYTES NANOSECONDS": bytes relayed and processor time so far.
 * Bandwidth is not limited; up to HELD_MAX bytes a direction are on the way,
 * then it stops reading, as a full link would.
 */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    CHUNK = 256 << 10, /* bytes read at once */
    HELD_MAX = 64 << 20,
    EVENTS = 64,
    TUNNELS_MAX = 64
};

typedef struct chunk {
    struct chunk *next;
    uint64_t due; /* ns */
    size_t from, to;
    char data[CHUNK];
} chunk;

/* One direction of a connection: what came from `in` and is due at `out`. */
typedef struct way {
    int in, out;
    int ended;   /* in has no more; out is told when all is delivered */
    int shut;
    int blocked; /* out takes no more for now */
    size_t held; /* bytes */
    chunk *head, *tail;
} way;

typedef struct tunnel {
    way ways[2];
    int used;
} tunnel;

/* What an event is about: fields, so that no pointer to freed memory is ever
 * followed. */
enum { LISTENER = TUNNELS_MAX * 2, TIMER, INPUT };

static tunnel tunnels[TUNNELS_MAX];
static chunk *spare;
static uint64_t delay, relayed;
static int poll_fd, timer_fd;

static void die(const char *what)
{
    fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t clock_of(clockid_t which)
{
    struct timespec t;
    clock_gettime(which, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void watch(int fd, uint32_t events, uint32_t what)
{
    struct epoll_event e = {.events = events, .data.u32 = what};
    if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &e))
        die("epoll_ctl");
}

static chunk *chunk_take(void)
{
    chunk *c = spare;
    if (c)
        spare = c->next;
    else if (!(c = malloc(sizeof(*c))))
        die("no memory");
    c->next = NULL;
    return c;
}

static void chunk_give(chunk *c)
{
    c->next = spare;
    spare = c;
}

static void tunnel_close(tunnel *l)
{
    for (int i = 0; i < 2; i++) {
        way *w = &l->ways[i];
        close(w->in);
        for (chunk *c = w->head, *next; c; c = next) {
            next = c->next;
            chunk_give(c);
        }
    }
    memset(l, 0, sizeof(*l));
}

/* Reads what there is, up to the limit.  -1: the connection broke. */
static int way_read(way *w)
{
    while (!w->ended && w->held < HELD_MAX) {
        chunk *c = chunk_take();
        ssize_t n = read(w->in, c->data, CHUNK);
        if (n <= 0) {
            chunk_give(c);
            if (n == 0)
                w->ended = 1;
            else if (errno != EAGAIN && errno != EINTR)
                return -1;
            if (errno != EINTR || n == 0)
                break;
            continue;
        }
        c->from = 0;
        c->to = (size_t)n;
        c->due = clock_of(CLOCK_MONOTONIC) + delay;
        if (w->tail && w->tail->due > c->due)
            c->due = w->tail->due; /* in order, also when the delay shrinks */
        if (w->tail)
            w->tail->next = c;
        else
            w->head = c;
        w->tail = c;
        w->held += c->to;
        if (n < CHUNK)
            break;
    }
    return 0;
}

/* Sends what is due.  -1: the connection broke. */
static int way_write(way *w, uint64_t now)
{
    while (w->head && !w->blocked && w->head->due <= now) {
        chunk *c = w->head;
        ssize_t n = send(w->out, c->data + c->from, c->to - c->from,
                         MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN)
                w->blocked = 1;
            else if (errno != EINTR)
                return -1;
            continue;
        }
        relayed += (uint64_t)n;
        w->held -= (size_t)n;
        c->from += (size_t)n;
        if (c->from == c->to) {
            w->head = c->next;
            if (!w->head)
                w->tail = NULL;
            chunk_give(c);
        }
    }
    if (w->ended && !w->head && !w->shut) {
        w->shut = 1;
        shutdown(w->out, SHUT_WR);
    }
    return 0;
}

static void tunnel_open(int listener, const struct addrinfo *to)
{
    int one = 1;
    int a = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (a < 0)
        return;
    int i = 0;
    while (i < TUNNELS_MAX && tunnels[i].used)
        i++;
    int b = i == TUNNELS_MAX
                ? -1
                : socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (b < 0 || connect(b, to->ai_addr, to->ai_addrlen)) {
        close(a);
        if (b >= 0)
            close(b);
        return; /* the client sees a closed connection, and tries again */
    }
    fcntl(b, F_SETFL, O_NONBLOCK);
    setsockopt(a, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(b, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    tunnels[i].used = 1;
    tunnels[i].ways[0] = (way){.in = a, .out = b};
    tunnels[i].ways[1] = (way){.in = b, .out = a};
    uint32_t events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    watch(a, events, (uint32_t)i * 2);
    watch(b, events, (uint32_t)i * 2 + 1);
}

/* One line of the input: the delay.  0 at its end. */
static int command(void)
{
    char line[64];
    if (!fgets(line, sizeof(line), stdin))
        return 0;
    delay = strtoull(line, NULL, 10) * 1000;
    printf("%llu %llu\n", (unsigned long long)relayed,
           (unsigned long long)clock_of(CLOCK_PROCESS_CPUTIME_ID));
    fflush(stdout);
    return 1;
}

/* Does what can be done, then sets the timer to what is due next. */
static void advance(void)
{
    uint64_t next = UINT64_MAX;
    for (int i = 0; i < TUNNELS_MAX; i++) {
        if (!tunnels[i].used)
            continue;
        int broken = 0, over = 1;
        for (int j = 0; j < 2 && !broken; j++) {
            way *w = &tunnels[i].ways[j];
            size_t before;
            do {
                before = relayed;
                broken = way_read(w) ||
                         way_write(w, clock_of(CLOCK_MONOTONIC));
            } while (!broken && relayed != before);
            if (w->head && !w->blocked && w->head->due < next)
                next = w->head->due;
            over &= w->shut;
        }
        if (broken || over)
            tunnel_close(&tunnels[i]);
    }
    struct itimerspec t = {0};
    if (next != UINT64_MAX) {
        t.it_value.tv_sec = (time_t)(next / 1000000000u);
        t.it_value.tv_nsec = (long)(next % 1000000000u);
    }
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &t, NULL);
}

int main(int argc, char **argv)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *to;
    if (argc != 3 || getaddrinfo(argv[1], argv[2], &hints, &to)) {
        fprintf(stderr, "usage: relay HOST PORT\n");
        return 2;
    }
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    int listener =
        socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in own = {.sin_family = AF_INET};
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t own_n = sizeof(own);
    if (listener < 0 ||
        bind(listener, (struct sockaddr *)&own, sizeof(own)) ||
        listen(listener, TUNNELS_MAX) ||
        getsockname(listener, (struct sockaddr *)&own, &own_n))
        die("no port");
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (poll_fd < 0 || timer_fd < 0)
        die("epoll or timer");
    watch(listener, EPOLLIN, LISTENER);
    watch(timer_fd, EPOLLIN, TIMER);
    watch(STDIN_FILENO, EPOLLIN, INPUT);
    setvbuf(stdin, NULL, _IONBF, 0); /* what epoll sees is all there is */
    printf("%d\n", ntohs(own.sin_port));
    fflush(stdout);
    struct epoll_event events[EVENTS];
    for (;;) {
        int n = epoll_wait(poll_fd, events, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            uint32_t what = events[i].data.u32;
            uint64_t expired;
            if (what == LISTENER) {
                tunnel_open(listener, to);
            } else if (what == TIMER) {
                if (read(timer_fd, &expired, sizeof(expired)) < 0)
                    continue;
            } else if (what == INPUT) {
                if (!command())
                    return 0;
            } else if (events[i].events & (EPOLLERR | EPOLLHUP)) {
                tunnel *l = &tunnels[what / 2];
                l->ways[0].blocked = l->ways[1].blocked = 0;
            } else if (events[i].events & EPOLLOUT) {
                /* Socket 0 of a link is the out of way 1, and 1 of 0. */
                tunnels[what / 2].ways[1 - what % 2].blocked = 0;
            }
        }
        advance();
    }
}
