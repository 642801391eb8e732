/* folder.c: row files in a folder, behind ckpt_io. */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct folder {
    ckpt_io io; /* first */
    int fd;     /* -1 until it is opened */
    ckpt_opener opener;
    uint64_t chunk;
} folder;

static int folder_open(ckpt_io *io)
{
    folder *f = (folder *)io;
    return f->opener.open(f->opener.ctx, &f->fd);
}

static int folder_take(void *ctx, const ckpt_file *file)
{
    const folder *f = ctx;
    return f->opener.put(f->opener.ctx, file->name);
}

static int folder_write(ckpt_io *io, sched *s, table_cut *cut,
                        const table_config *config, const char *stem,
                        ckpt_files *out)
{
    folder *f = (folder *)io;
    out->take = f->opener.put ? folder_take : NULL;
    out->ctx = f;
    return persia_ckpt_write(s, cut, config, f->fd, stem, f->chunk, out);
}

static int folder_sync(ckpt_io *io)
{
    const folder *f = (folder *)io;
    if (!fsync(f->fd))
        return PERSIA_OK;
    return persia_err_set(PERSIA_EIO, "the folder cannot be synced: %s",
                          strerror(errno));
}

static int folder_verify(ckpt_io *io, sched *s, const table_config *config,
                         const ckpt_file *files, size_t n, uint64_t *here)
{
    const folder *f = (folder *)io;
    int rc = f->opener.get ? f->opener.get(f->opener.ctx, files, n)
                           : PERSIA_OK;
    return rc ? rc : persia_ckpt_verify(s, config, f->fd, files, n, here);
}

static int folder_read(ckpt_io *io, sched *s, table *t,
                       const ckpt_file *files, size_t n, uint32_t shard,
                       uint32_t shards)
{
    return persia_ckpt_restore(s, t, ((folder *)io)->fd, files, n, shard,
                               shards);
}

static void folder_close(ckpt_io *io)
{
    folder *f = (folder *)io;
    if (f->fd >= 0)
        close(f->fd);
    f->opener.free(f->opener.ctx);
    free(f);
}

int persia_ckpt_folder(const ckpt_opener *opener, uint64_t chunk,
                       ckpt_io **out)
{
    folder *f = calloc(1, sizeof *f);
    *out = NULL;
    if (!f)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a folder");
    *f = (folder){.io = {folder_open, folder_write, folder_sync,
                         folder_verify, folder_read, folder_close},
                  .fd = -1,
                  .opener = *opener,
                  .chunk = chunk};
    *out = &f->io;
    return PERSIA_OK;
}
