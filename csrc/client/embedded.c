/* embedded.c: the shard of a client without servers, and where the files of
 * its snapshots and restores are. */
#include "client/private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t now(void *ctx)
{
    (void)ctx;
    return persia_clock_ns();
}

static void job_ended(void *ctx)
{
    persia_job_ends_add(&((embedded *)ctx)->ends);
}

/* ---- files -------------------------------------------------------------- */

/* An opener of a descriptor, its own until it is opened. */
static int place_open(void *ctx, int *out)
{
    int *fd = ctx;
    *out = *fd;
    *fd = -1;
    return PERSIA_OK;
}

static void place_free(void *ctx)
{
    int *fd = ctx;
    if (*fd >= 0)
        close(*fd);
    free(fd);
}

/* The proof is the number of the folder's descriptor: names have less room
 * than paths, and no user of this process proves anything. */
static int folder_files(void *ctx, const char *root, const char *folder,
                        const char *proof, int writes, ckpt_io **out)
{
    char *end;
    const unsigned long number = strtoul(proof, &end, 10);
    (void)ctx;
    (void)writes;
    int *fd = malloc(sizeof *fd);
    if (!fd)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a folder");
    *fd = end == proof || *end || number > INT32_MAX
              ? -1
              : fcntl((int)number, F_DUPFD_CLOEXEC, 0);
    int rc = *fd >= 0 ? persia_ckpt_folder(&(ckpt_opener){place_open,
                                                          place_free, fd},
                                           CKPT_CHUNK, out)
                      : persia_err_set(PERSIA_EARG,
                                       "%s/%s: \"%s\" is no open folder", root,
                                       folder, proof);
    if (rc)
        place_free(fd);
    return rc;
}

/* ---- life --------------------------------------------------------------- */

int embedded_create(ps *tables, uint64_t boot, uint64_t lineage,
                    embedded **out)
{
    embedded *e = calloc(1, sizeof *e);
    *out = NULL;
    if (!e)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    persia_job_ends_init(&e->ends);
    const shard_config config = {.shards = 1,
                                 .boot = boot,
                                 .lineage = lineage,
                                 .message_limit = UINT64_MAX,
                                 .env = {.ctx = e,
                                         .now = now,
                                         .files = folder_files,
                                         .detach = persia_sched_detach,
                                         .ended = job_ended}};
    int rc = persia_shard_create(tables, &config, &e->shard);
    if (rc)
        embedded_destroy(e);
    else
        *out = e;
    return rc;
}

int embedded_end_jobs(embedded *e)
{
    return persia_job_ends_wait(&e->ends, e->shard);
}

void embedded_destroy(embedded *e)
{
    persia_shard_destroy(e->shard);
    persia_job_ends_free(&e->ends);
    free(e);
}
