#include "tests/log/disk.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SECTOR = 512 };

static memory_disk *of(log_disk *d)
{
    return (memory_disk *)d;
}

/* One call at a time; a simulation runs one thread, and none waits here. */
static void enter(log_disk *d)
{
    while (__atomic_test_and_set(&of(d)->busy, __ATOMIC_ACQUIRE))
        sched_yield();
}

static int leave(log_disk *d, int rc)
{
    __atomic_clear(&of(d)->busy, __ATOMIC_RELEASE);
    return rc;
}

static memory_file *find(memory_disk *d, const char *name)
{
    for (int i = 0; i < d->files_n; i++)
        if (d->files[i].there && !strcmp(d->files[i].name, name))
            return &d->files[i];
    return NULL;
}

static int open_entered(log_disk *disk, const char *name, int makes, int *file)
{
    memory_disk *d = of(disk);
    memory_file *f = find(d, name);
    if (!f && !makes)
        return ENOENT;
    if (!f) {
        if (d->files_n == MEMORY_FILES)
            return EMFILE;
        f = &d->files[d->files_n++];
        *f = (memory_file){.there = 1};
        snprintf(f->name, sizeof f->name, "%s", name);
    }
    if (makes)
        f->bytes = 0;
    *file = (int)(f - d->files);
    return 0;
}

static void memory_close(log_disk *disk, int file)
{
    (void)disk;
    (void)file;
}

static void resize(memory_file *f, uint64_t bytes)
{
    if (bytes > f->bytes) {
        f->data = realloc(f->data, bytes);
        memset(f->data + f->bytes, 0, bytes - f->bytes);
    }
    f->bytes = bytes;
}

static int write_entered(log_disk *disk, int file, uint64_t at,
                        const wire_span *spans, size_t n)
{
    memory_disk *d = of(disk);
    memory_file *f = &d->files[file];
    for (size_t i = 0; i < n; i++) {
        const uint64_t some = spans[i].n < d->room ? spans[i].n : d->room;
        if (at + some > f->bytes)
            resize(f, at + some);
        if (some)
            memcpy(f->data + at, spans[i].data, some);
        at += some;
        if (d->room != UINT64_MAX)
            d->room -= some;
        if (some < spans[i].n)
            return ENOSPC;
    }
    return 0;
}

static int read_entered(log_disk *disk, int file, uint64_t at, void *to,
                       size_t n, size_t *got)
{
    const memory_file *f = &of(disk)->files[file];
    *got = at >= f->bytes ? 0 : f->bytes - at < n ? f->bytes - at : n;
    if (*got)
        memcpy(to, f->data + at, *got);
    return 0;
}

static int size_entered(log_disk *disk, int file, uint64_t *bytes)
{
    *bytes = of(disk)->files[file].bytes;
    return 0;
}

static int cut_entered(log_disk *disk, int file, uint64_t bytes)
{
    resize(&of(disk)->files[file], bytes);
    return 0;
}

static int sync_entered(log_disk *disk, int file)
{
    memory_disk *d = of(disk);
    memory_file *f = &d->files[file];
    d->syncs++;
    if (d->sync_fails)
        return d->sync_fails;
    f->synced = realloc(f->synced, f->bytes + 1);
    if (f->bytes)
        memcpy(f->synced, f->data, f->bytes);
    f->synced_n = f->bytes;
    return 0;
}

static int rename_entered(log_disk *disk, const char *from, const char *to)
{
    memory_file *f = find(of(disk), from), *there = find(of(disk), to);
    if (!f)
        return ENOENT;
    if (there)
        there->there = 0;
    snprintf(f->name, sizeof f->name, "%s", to);
    return 0;
}

static int memory_sync_folder(log_disk *disk)
{
    return of(disk)->sync_fails;
}

static int remove_entered(log_disk *disk, const char *name)
{
    memory_file *f = find(of(disk), name);
    if (!f)
        return ENOENT;
    f->there = 0;
    return 0;
}

static int memory_list(log_disk *disk, int (*fn)(void *ctx, const char *name),
                       void *ctx)
{
    memory_disk *d = of(disk);
    int rc = fn(ctx, "lock");
    for (int i = d->files_n - 1; i >= 0 && !rc; i--)
        if (d->files[i].there)
            rc = fn(ctx, d->files[i].name);
    return rc;
}

static void memory_free(log_disk *disk)
{
    (void)disk;
}

/* ---- the calls ---- */

#define ENTERED(name, parameters, ...)                                        \
    static int memory_##name parameters                                       \
    {                                                                         \
        enter(disk);                                                          \
        return leave(disk, name##_entered(__VA_ARGS__));                      \
    }
ENTERED(open, (log_disk *disk, const char *name, int makes, int *file), disk,
        name, makes, file)
ENTERED(write,
        (log_disk *disk, int file, uint64_t at, const wire_span *spans,
         size_t n),
        disk, file, at, spans, n)
ENTERED(read,
        (log_disk *disk, int file, uint64_t at, void *to, size_t n,
         size_t *got),
        disk, file, at, to, n, got)
ENTERED(size, (log_disk *disk, int file, uint64_t *bytes), disk, file, bytes)
ENTERED(cut, (log_disk *disk, int file, uint64_t bytes), disk, file, bytes)
ENTERED(sync, (log_disk *disk, int file), disk, file)
ENTERED(remove, (log_disk *disk, const char *name), disk, name)
ENTERED(rename, (log_disk *disk, const char *from, const char *to), disk,
        from, to)
#undef ENTERED

memory_disk *memory_disk_make(void)
{
    memory_disk *d = calloc(1, sizeof *d);
    d->room = UINT64_MAX;
    d->disk = (log_disk){.open = memory_open,
                         .close = memory_close,
                         .write = memory_write,
                         .read = memory_read,
                         .size = memory_size,
                         .cut = memory_cut,
                         .sync = memory_sync,
                         .sync_folder = memory_sync_folder,
                         .remove = memory_remove,
                         .rename = memory_rename,
                         .list = memory_list,
                         .free = memory_free};
    return d;
}

void memory_disk_free(memory_disk *d)
{
    for (int i = 0; i < d->files_n; i++) {
        free(d->files[i].data);
        free(d->files[i].synced);
    }
    free(d);
}

static uint64_t draw(uint64_t *state)
{
    *state += 0x9E3779B97F4A7C15u;
    uint64_t x = *state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static void lose(memory_file *f, uint64_t *state)
{
    const uint64_t least = f->synced_n < f->bytes ? f->synced_n : f->bytes;
    const uint64_t grown = f->bytes - least;
    for (uint64_t at = 0; at < f->bytes; at += SECTOR) {
        const uint64_t n = f->bytes - at < SECTOR ? f->bytes - at : SECTOR;
        const uint64_t old = at >= f->synced_n      ? 0
                             : f->synced_n - at < n ? f->synced_n - at
                                                    : n;
        if (draw(state) % 3)
            continue;
        if (old)
            memcpy(f->data + at, f->synced + at, old);
        memset(f->data + at + old, 0, n - old);
    }
    f->bytes = least + (grown ? draw(state) % (grown + 1) : 0);
}

void memory_disk_lose(memory_disk *d, uint64_t seed)
{
    for (int i = 0; i < d->files_n; i++)
        if (d->files[i].there)
            lose(&d->files[i], &seed);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(memory_file *const *)a)->name,
                  (*(memory_file *const *)b)->name);
}

int memory_disk_count(const memory_disk *d)
{
    int n = 0;
    for (int i = 0; i < d->files_n; i++)
        n += d->files[i].there;
    return n;
}

memory_file *memory_disk_file(memory_disk *d, int rank)
{
    memory_file *all[MEMORY_FILES];
    int n = 0;
    for (int i = 0; i < d->files_n; i++)
        if (d->files[i].there)
            all[n++] = &d->files[i];
    qsort(all, (size_t)n, sizeof all[0], by_name);
    return rank < n ? all[rank] : NULL;
}
