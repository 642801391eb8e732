/* embedded.c: the shard of a client without servers. */
#include "client/private.h"

#include <stdlib.h>

static void embedded_job_ended(void *ctx)
{
    persia_job_ends_add(&((embedded *)ctx)->ends);
}

int embedded_create(tables *tables, embedded **out)
{
    embedded *e = calloc(1, sizeof *e);
    *out = NULL;
    if (!e)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a store");
    persia_job_ends_init(&e->ends);
    shard_config config = {.shards = 1,
                           .message_limit = UINT64_MAX,
                           .env = {.ctx = e,
                                   .files = persia_ckpt_descriptors,
                                   .ended = embedded_job_ended}};
    int rc = persia_random_id(&config.boot);
    if (!rc)
        rc = persia_random_id(&config.lineage);
    if (!rc)
        rc = persia_shard_create(tables, &config, &e->shard);
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
