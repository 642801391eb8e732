/* huge.c: the thread that makes huge pages; see huge.h. */
#include "mem/huge.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

enum { IDLE_SECONDS = 2, RANGES = 1024, TRIES = 4 };

/* One a process.  Invariants, under the lock: ranges [0, n) wait, in their
 * order; a thread runs if now is set, and if n > 0 and not `wanted`. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t more, done; /* a range was added; one was done */
    char *ranges[RANGES];
    size_t n;
    char *now; /* the range that is worked on */
    int running;
    atomic_int wanted; /* huge_start() is to start a thread */
} huge = { .lock = PTHREAD_MUTEX_INITIALIZER,
           .more = PTHREAD_COND_INITIALIZER,
           .done = PTHREAD_COND_INITIALIZER };

static int can; /* set once */

static void huge_can_find(void)
{
    can = !madvise(NULL, 0, MADV_COLLAPSE);
}

int huge_can(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, huge_can_find);
    return can;
}

/* Copying into a huge page happens with the process's mappings locked.  The
 * kernel takes the page that was freed last: one freed just now is backed by
 * the host, and copying takes 0.3 ms, not 5. */
static void huge_page_warm(char *spare)
{
    if (!spare)
        return;
    *(volatile char *)spare = 1;
    madvise(spare, HUGE, MADV_DONTNEED);
}

/* Address space for one huge page; NULL if there is none left. */
static char *huge_spare_map(char **map)
{
    char *p = mmap(NULL, 2 * HUGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    *map = p == MAP_FAILED ? NULL : p;
    if (!*map)
        return NULL;
    p += (HUGE - (uintptr_t)p % HUGE) % HUGE;
    madvise(p, HUGE, MADV_HUGEPAGE);
    return p;
}

/* Waits for a range, with the lock held; 0: none was added for a while. */
static int huge_range_await(void)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += IDLE_SECONDS;
    while (!huge.n)
        if (pthread_cond_timedwait(&huge.more, &huge.lock, &until))
            return huge.n > 0;
    return 1;
}

/* The kernel may be busy with one of the pages. */
static int huge_join(char *range)
{
    int rc = -1;

    for (int i = 0; rc && i < TRIES; i++) {
        rc = madvise(range, HUGE, MADV_COLLAPSE);
        if (rc && errno != EAGAIN)
            break;
    }
    return rc;
}

static void *huge_run(void *unused)
{
    char *map, *spare = huge_spare_map(&map);

    (void)unused;
    pthread_mutex_lock(&huge.lock);
    while (huge_range_await()) {
        huge.now = huge.ranges[0];
        memmove(huge.ranges, huge.ranges + 1,
                --huge.n * sizeof *huge.ranges);
        pthread_mutex_unlock(&huge.lock);
        huge_page_warm(spare);
        int rc = huge_join(huge.now);
        pthread_mutex_lock(&huge.lock);
        if (rc && errno == ENOMEM)
            huge.n = 0; /* no huge page is left, for them as little */
        huge.now = NULL;
        pthread_cond_broadcast(&huge.done);
    }
    huge.running = 0;
    pthread_mutex_unlock(&huge.lock);
    if (map)
        munmap(map, 2 * HUGE);
    return NULL;
}

int huge_later(char *range)
{
    if (!huge_can())
        return 1;
    pthread_mutex_lock(&huge.lock);
    const int fits = huge.n < RANGES;
    if (fits)
        huge.ranges[huge.n++] = range;
    if (huge.running)
        pthread_cond_signal(&huge.more);
    else
        atomic_store(&huge.wanted, 1);
    pthread_mutex_unlock(&huge.lock);
    return fits;
}

void huge_start(void)
{
    if (!atomic_load_explicit(&huge.wanted, memory_order_relaxed))
        return;
    pthread_mutex_lock(&huge.lock);
    if (!huge.running && huge.n)
        huge.running = !persia_thread_start(NULL, huge_run, NULL,
                                            "persia-huge");
    atomic_store(&huge.wanted, huge.n && !huge.running);
    pthread_mutex_unlock(&huge.lock);
}

char *huge_forget(const char *from, size_t bytes)
{
    char *lowest = NULL;
    size_t kept = 0;

    if (persia_fork_check("a table") != PERSIA_OK) /* nor is there a thread */
        return NULL;
    pthread_mutex_lock(&huge.lock);
    for (size_t i = 0; i < huge.n; i++) {
        char *range = huge.ranges[i];
        if (range < from || range >= from + bytes)
            huge.ranges[kept++] = range;
        else if (!lowest || range < lowest)
            lowest = range;
    }
    huge.n = kept;
    while (huge.now && huge.now >= from && huge.now < from + bytes)
        persia_cond_wait(&huge.done, &huge.lock);
    pthread_mutex_unlock(&huge.lock);
    return lowest;
}

void huge_wait(void)
{
    huge_start();
    pthread_mutex_lock(&huge.lock);
    while (huge.running && (huge.n || huge.now))
        persia_cond_wait(&huge.done, &huge.lock);
    pthread_mutex_unlock(&huge.lock);
}
