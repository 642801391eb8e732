/* hanging.c: a library to load before all others (LD_PRELOAD). Once the file
 * $HANG_WHEN is there, the call $HANG_CALL of a path that has $HANG_PATH in it
 * never returns, as one of a mount whose server is gone: no signal but SIGKILL
 * ends it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static void hang_at(const char *call, const char *path)
{
    const char *when = getenv("HANG_WHEN"), *calls = getenv("HANG_CALL"),
               *part = getenv("HANG_PATH");
    if (!when || !calls || !part || strcmp(call, calls) ||
        !strstr(path, part) || access(when, F_OK))
        return;
    for (;;)
        pause();
}

static const char *path_of(int fd, char *link)
{
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(name, link, PATH_MAX - 1);
    link[n < 0 ? 0 : n] = 0;
    return link;
}

static void hang_in(const char *call, int folder, const char *path)
{
    char link[PATH_MAX];
    hang_at(call, path);
    if (folder >= 0)
        hang_at(call, path_of(folder, link));
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int fd)
{
    hang_in("fsync", fd, "");
    return NEXT(fsync)(fd);
}

int fdatasync(int fd)
{
    hang_in("fsync", fd, "");
    return NEXT(fdatasync)(fd);
}

ssize_t pwritev(int fd, const struct iovec *spans, int n, off_t at)
{
    hang_in("write", fd, "");
    return NEXT(pwritev)(fd, spans, n, at);
}

int rename(const char *from, const char *to)
{
    hang_in("rename", -1, to);
    return NEXT(rename)(from, to);
}

int renameat(int a, const char *from, int b, const char *to)
{
    hang_in("rename", b, to);
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
    hang_in("open", -1, path);
    return NEXT(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    const int mode = mode_of(flags, more);
    va_end(more);
    hang_in("open", -1, path);
    return NEXT(open64)(path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    const int mode = mode_of(flags, more);
    va_end(more);
    hang_in("open", folder, path);
    return NEXT(openat)(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    const int mode = mode_of(flags, more);
    va_end(more);
    hang_in("open", folder, path);
    return NEXT(openat64)(folder, path, flags, mode);
}
