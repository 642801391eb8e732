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
    ps_service *s = service;
    pthread_mutex_lock(&s->timer_lock);
    if (at < s->wake_at) {
        s->wake_at = at;
        pthread_cond_signal(&s->wake);
    }
    pthread_mutex_unlock(&s->timer_lock);
}

static void *timer_main(void *arg)
{
    ps_service *s = arg;
    for (;;) {
        uint64_t now = persia_clock_ns();
        pthread_mutex_lock(&s->timer_lock);
        s->wake_at = UINT64_MAX; /* others may set it again meanwhile */
        pthread_mutex_unlock(&s->timer_lock);
        service_wake(s, persia_shard_tick(s->shard, now));
        service_wake(s, lines_count(&s->lines, now));
        pthread_mutex_lock(&s->timer_lock);
        while (!s->stop && s->wake_at > persia_clock_ns())
            persia_cond_wait_until(&s->wake, &s->timer_lock, s->wake_at);
        int stop = s->stop;
        pthread_mutex_unlock(&s->timer_lock);
        if (stop)
            return NULL;
    }
}

static int timer_start(ps_service *s)
{
    int rc = persia_thread_start(&s->timer, timer_main, s, "persia-timer");
    s->timer_runs = !rc;
    return rc;
}

static void timer_end(ps_service *s)
{
    if (!s->timer_runs)
        return;
    pthread_mutex_lock(&s->timer_lock);
    s->stop = 1;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->timer_lock);
    persia_thread_join(s->timer);
    s->timer_runs = 0;
}

/* ---- life --------------------------------------------------------------- */

static void job_ended(void *service)
{
    persia_job_ends_add(&((ps_service *)service)->ends);
}

void persia_service_end_snapshot(ps_service *s)
{
    persia_shard_drop_snapshot(s->shard);
}

static int make_shard(ps_service *s, tables *tables,
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
                              .ended = job_ended}};
    memcpy(c.name_space, config->name_space, sizeof c.name_space);
    int rc = persia_random_id(&c.boot);
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
    s->wake_at = UINT64_MAX;
    pthread_mutex_init(&s->timer_lock, NULL);
    persia_job_ends_init(&s->ends);
    persia_cond_init(&s->wake);
    lines_init(&s->lines, config->lines);
    int rc = make_shard(s, p, config);
    if (!rc)
        rc = timer_start(s);
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

int persia_service_destroy(ps_service *s)
{
    if (!s)
        return 0;
    persia_service_close(s);
    timer_end(s);
    if (s->shard && persia_job_ends_wait(&s->ends, s->shard))
        return 1;
    if (s->ref)
        s->ref->ops->close(s->ref);
    persia_shard_destroy(s->shard);
    pthread_cond_destroy(&s->wake);
    persia_job_ends_free(&s->ends);
    lines_free(&s->lines);
    pthread_mutex_destroy(&s->timer_lock);
    free(s);
    return 0;
}
