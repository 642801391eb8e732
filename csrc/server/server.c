/* server.c: the life of a server, and its timer. */
#include "server/private.h"

#include <stdlib.h>
#include <string.h>

void persia_service_set_calls(ps_service *s, uint32_t calls)
{
    persia_shard_set_calls(s->shard, calls);
}

shard *persia_service_shard(ps_service *s)
{
    return s->shard;
}

/* ---- the timer ---------------------------------------------------------- */

void service_wake(void *service, uint64_t at)
{
    persia_timer_wake(&((ps_service *)service)->timer, at);
}

static uint64_t server_tick(void *service)
{
    ps_service *s = service;
    const uint64_t now = persia_clock_ns();
    const uint64_t shard = persia_shard_tick(s->shard, now);
    const uint64_t lines = persia_lines_count(&s->lines, now);
    return shard < lines ? shard : lines;
}

/* ---- life --------------------------------------------------------------- */

static void server_job_ended(void *service)
{
    persia_job_ends_add(&((ps_service *)service)->ends);
}

void persia_service_end_snapshot(ps_service *s)
{
    persia_shard_drop_snapshot(s->shard);
}

static int server_make_shard(ps_service *s, tables *tables,
                             const service_config *config)
{
    shard_config c = {.shard = config->shard,
                      .shards = config->shards,
                      .lineage = config->lineage,
                      .message_limit = config->message_limit,
                      .log = config->log,
                      .env = {.ctx = s,
                              .wake = service_wake,
                              .files = config->files,
                              .ended = server_job_ended}};
    memcpy(c.name_space, config->name_space, sizeof c.name_space);
    int rc = PERSIA_OK;
    if (!(c.boot = config->boot))
        rc = persia_random_id(&c.boot);
    if (!rc && !c.lineage)
        rc = persia_random_id(&c.lineage);
    if (!rc)
        rc = persia_shard_create(tables, &c, &s->shard);
    return rc ? rc : persia_shard_direct(s->shard, &s->ref);
}

int persia_service_create(tables *p, const service_config *config,
                          ps_service **out)
{
    *out = NULL;
    ps_service *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a service");
    persia_timer_init(&s->timer);
    persia_job_ends_init(&s->ends);
    persia_lines_init(&s->lines, &(lines_to){.fd = config->lines,
                                      .json = config->lines_json,
                                      .audit = config->audit,
                                      .shard = config->shard});
    slow_init(&s->slow, config->slow_ns);
    int rc = server_make_shard(s, p, config);
    if (!rc)
        rc = persia_timer_start(&s->timer, server_tick, s, "persia-timer");
    if (rc)
        (void)persia_service_destroy(s);
    else
        *out = s;
    return rc;
}

int persia_service_replay(ps_service *s, uint64_t from, log_found *found)
{
    return persia_shard_replay(s->shard, s->ref, from, found);
}

void persia_service_close(ps_service *s)
{
    atomic_store(&s->closed, 1);
    if (s->ref)
        persia_shard_refuse(s->ref, PERSIA_EUNAVAILABLE,
                            "the server is stopping");
}

void persia_service_open(ps_service *s)
{
    persia_shard_refuse(s->ref, PERSIA_OK, "");
    atomic_store(&s->closed, 0);
}

int persia_service_destroy(ps_service *s)
{
    if (!s)
        return 0;
    persia_service_close(s);
    persia_timer_stop(&s->timer);
    if (s->shard && persia_job_ends_wait(&s->ends, s->shard))
        return 1;
    if (s->ref)
        s->ref->ops->close(s->ref);
    persia_shard_destroy(s->shard);
    persia_job_ends_free(&s->ends);
    persia_lines_free(&s->lines);
    slow_free(&s->slow);
    persia_timer_free(&s->timer);
    free(s);
    return 0;
}
