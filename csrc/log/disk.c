/* disk.c: a folder of the file system. */
#include "log/disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SPANS = 64 }; /* that one call of the system writes */

typedef struct folder_disk {
    log_disk disk; /* first */
    int folder;
    int lock; /* the file that is locked; -1: none */
} folder_disk;

/* ---- locks -------------------------------------------------------------- */

enum { LOCKS = 64 };

/* Descriptors of locked files, plus 1; 0: free.  A forked child has copies,
 * which would hold the locks beyond the end of this process. */
static atomic_int locks[LOCKS];

static void disk_locks_drop(void)
{
    for (int i = 0; i < LOCKS; i++)
        if (atomic_load(&locks[i]))
            close(atomic_load(&locks[i]) - 1);
}

__attribute__((constructor)) static void disk_locks_watch(void)
{
    pthread_atfork(NULL, NULL, disk_locks_drop);
}

/* The first that is `was` becomes `to`; without one a child keeps its copy. */
static void disk_locks_replace(int was, int to)
{
    for (int i = 0; i < LOCKS; i++) {
        int found = was;
        if (atomic_compare_exchange_strong(&locks[i], &found, to))
            return;
    }
}

/* ---- a folder ----------------------------------------------------------- */

static int folder_of(const log_disk *d)
{
    return ((const folder_disk *)d)->folder;
}

static int folder_open(log_disk *d, const char *name, int makes, int *file)
{
    const int flags = makes ? O_RDWR | O_CREAT | O_TRUNC : O_RDWR;
    *file = openat(folder_of(d), name, flags | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (*file < 0 && !makes && (errno == EACCES || errno == EROFS))
        *file = openat(folder_of(d), name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    return *file < 0 ? errno : 0;
}

static void folder_close(log_disk *d, int file)
{
    (void)d;
    if (file >= 0)
        (void)close(file);
}

/* Up to SPANS spans from byte `skip` of the first on; what is left of them. */
static size_t disk_fill_iov(struct iovec *iov, const wire_span *spans,
                            size_t n, size_t skip)
{
    const size_t count = n < SPANS ? n : SPANS;
    for (size_t i = 0; i < count; i++) {
        const size_t from = i ? 0 : skip;
        iov[i].iov_base = (char *)(uintptr_t)spans[i].data + from;
        iov[i].iov_len = spans[i].n - from;
    }
    return count;
}

static int folder_write(log_disk *d, int file, uint64_t at,
                        const wire_span *spans, size_t n)
{
    size_t skip = 0;
    (void)d;
    while (n) {
        struct iovec iov[SPANS];
        const size_t count = disk_fill_iov(iov, spans, n, skip);
        ssize_t wrote = pwritev(file, iov, (int)count, (off_t)at);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return errno;
        at += (uint64_t)wrote;
        size_t left = (size_t)wrote;
        while (n && left >= spans->n - skip) {
            left -= spans->n - skip;
            skip = 0;
            spans++;
            n--;
        }
        skip += left;
    }
    return 0;
}

static int folder_read(log_disk *d, int file, uint64_t at, void *to, size_t n,
                       size_t *got)
{
    (void)d;
    for (*got = 0; *got < n;) {
        ssize_t some = pread(file, (char *)to + *got, n - *got,
                             (off_t)(at + *got));
        if (some < 0 && errno == EINTR)
            continue;
        if (some < 0)
            return errno;
        if (!some)
            break;
        *got += (size_t)some;
    }
    return 0;
}

static int folder_size(log_disk *d, int file, uint64_t *bytes)
{
    struct stat st;
    (void)d;
    if (fstat(file, &st))
        return errno;
    *bytes = (uint64_t)st.st_size;
    return 0;
}

static int folder_cut(log_disk *d, int file, uint64_t bytes)
{
    (void)d;
    return ftruncate(file, (off_t)bytes) ? errno : 0;
}

static int folder_sync(log_disk *d, int file)
{
    (void)d;
    return fdatasync(file) ? errno : 0;
}

static int folder_sync_folder(log_disk *d)
{
    return fsync(folder_of(d)) ? errno : 0;
}

static int folder_remove(log_disk *d, const char *name)
{
    return unlinkat(folder_of(d), name, 0) ? errno : 0;
}

static int folder_rename(log_disk *d, const char *from, const char *to)
{
    return renameat(folder_of(d), from, folder_of(d), to) ? errno : 0;
}

static int folder_list(log_disk *d, int (*fn)(void *ctx, const char *name),
                       void *ctx)
{
    int copy = openat(folder_of(d), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = copy < 0 ? NULL : fdopendir(copy);
    int rc = 0;
    if (!dir) {
        rc = errno;
        folder_close(d, copy);
        return rc;
    }
    for (struct dirent *e; !rc;) {
        errno = 0;
        if (!(e = readdir(dir))) {
            rc = errno;
            break;
        }
        rc = fn(ctx, e->d_name);
    }
    closedir(dir);
    return rc;
}

static void folder_free(log_disk *d)
{
    folder_disk *f = (folder_disk *)d;
    if (f->lock >= 0)
        disk_locks_replace(f->lock + 1, 0);
    folder_close(d, f->lock);
    folder_close(d, f->folder);
    free(f);
}

static const log_disk folder_calls = {
    .open = folder_open,
    .close = folder_close,
    .write = folder_write,
    .read = folder_read,
    .size = folder_size,
    .cut = folder_cut,
    .sync = folder_sync,
    .sync_folder = folder_sync_folder,
    .remove = folder_remove,
    .rename = folder_rename,
    .list = folder_list,
    .free = folder_free,
};

/* Locks a file of the folder for as long as the process has it open. */
static int folder_claim(folder_disk *f, const char *path)
{
    f->lock = openat(f->folder, "lock", O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (f->lock < 0)
        return persia_err_set(PERSIA_EIO, "%s/lock cannot be opened: %s", path,
                              strerror(errno));
    if (!flock(f->lock, LOCK_EX | LOCK_NB)) {
        disk_locks_replace(0, f->lock + 1);
        return PERSIA_OK;
    }
    return persia_err_set(PERSIA_EUNAVAILABLE,
                          "another server has the log %s open: each server "
                          "needs a folder of its own",
                          path);
}

int persia_log_disk_open(const char *path, int claims, log_disk **out)
{
    *out = NULL;
    folder_disk *f = calloc(1, sizeof *f);
    if (!f)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a log");
    f->disk = folder_calls;
    f->lock = -1;
    if (claims && mkdir(path, 0777) && errno != EEXIST)
        goto fail;
    f->folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (f->folder < 0)
        goto fail;
    int rc = claims ? folder_claim(f, path) : PERSIA_OK;
    if (rc)
        folder_free(&f->disk);
    else
        *out = &f->disk;
    return rc;
fail:
    rc = persia_err_set(PERSIA_EIO, "the folder of the log %s: %s", path,
                        strerror(errno));
    free(f);
    return rc;
}
