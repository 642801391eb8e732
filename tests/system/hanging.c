/* hanging.c: a library to load before all others (LD_PRELOAD). While the file
 * $HANG_WHEN is there, the call $HANG_CALL of a path that has $HANG_PATH in it
 * does not return, as one of a mount whose server is gone: no signal but
 * SIGKILL ends it.  The folder $HANG_WHEN.hangs says that one does. With
 * $HANG_ERROR, an errno, it fails at once instead. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* 1: the call fails. */
static int hang_at(const char *call, const char *path)
{
    const char *when = getenv("HANG_WHEN"), *calls = getenv("HANG_CALL"),
               *part = getenv("HANG_PATH"), *error = getenv("HANG_ERROR");
    if (!when || !calls || !part || strcmp(call, calls) ||
        !strstr(path, part) || access(when, F_OK))
        return 0;
    if (error) {
        errno = atoi(error);
        return 1;
    }
    char there[PATH_MAX];
    snprintf(there, sizeof there, "%s.hangs", when);
    mkdir(there, 0700);
    while (!access(when, F_OK))
        usleep(10000);
    return 0;
}

static const char *path_of(int fd, char *link)
{
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(name, link, PATH_MAX - 1);
    link[n < 0 ? 0 : n] = 0;
    return link;
}

static int hang_in(const char *call, int folder, const char *path)
{
    char link[PATH_MAX];
    return hang_at(call, path) ||
           (folder >= 0 && hang_at(call, path_of(folder, link)));
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int fd)
{
    if (hang_in("fsync", fd, ""))
        return -1;
    return NEXT(fsync)(fd);
}

int fdatasync(int fd)
{
    if (hang_in("fsync", fd, ""))
        return -1;
    return NEXT(fdatasync)(fd);
}

ssize_t pwritev(int fd, const struct iovec *spans, int n, off_t at)
{
    if (hang_in("write", fd, ""))
        return -1;
    return NEXT(pwritev)(fd, spans, n, at);
}

int rename(const char *from, const char *to)
{
    if (hang_in("rename", -1, to))
        return -1;
    return NEXT(rename)(from, to);
}

int renameat(int a, const char *from, int b, const char *to)
{
    if (hang_in("rename", b, to))
        return -1;
    return NEXT(renameat)(a, from, b, to);
}

static int mode_of(int flags, va_list more)
{
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
}

int open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    const int mode = mode_of(flags, more);
    va_end(more);
    if (hang_in("open", -1, path))
        return -1;
    return NEXT(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    const int mode = mode_of(flags, more);
    va_end(more);
    if (hang_in("open", -1, path))
        return -1;
    return NEXT(open64)(path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    const int mode = mode_of(flags, more);
    va_end(more);
    if (hang_in("open", folder, path))
        return -1;
    return NEXT(openat)(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    const int mode = mode_of(flags, more);
    va_end(more);
    if (hang_in("open", folder, path))
        return -1;
    return NEXT(openat64)(folder, path, flags, mode);
}
