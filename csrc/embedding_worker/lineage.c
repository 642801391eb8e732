/* lineage.c: a checkpoint was loaded into servers that run.
 *
 * What the worker knows of batches is of the rows before.  So it begins again,
 * as if it had been started then: with another boot, and without any stream or
 * batch.  Loaders and ranks treat it as they treat a worker that was started
 * again.  They also see another lineage: a loader compares what it knows with
 * the servers' ledgers then, and gradients of the rows before are refused.
 */
#include <stdlib.h>

#include "embedding_worker/private.h"

/* A server's answer to an update may be read after its next life was seen. */
enum { COMPARES = 2 };

static void lineage_begin_again(embedding_worker *s, uint64_t lineage,
                                uint64_t boot)
{
    while (s->streams)
        stream_end(s, s->streams);
    s->began = persia_clock_ns();
    for (worker_job *j = s->job_list; j; j = j->next) {
        j->counts = 0;
        j->over = 0;
        j->streams_ever = 0;
        j->began = s->began;
    }
    for (worker_rank *r = s->ranks; r; r = r->next)
        r->epoch = 0;
    s->stats.restores++;
    s->lineage = lineage;
    s->boot = boot;
    waits_end(s);
}

/* Of the lives of all servers, as they last said. */
static uint64_t lineage_servers_now(const embedding_worker *s)
{
    uint64_t all = 1;
    for (uint32_t i = 0; i < persia_client_shards(s->look); i++)
        all = all * 31 + persia_client_caller(s->look, i).boot;
    return all ? all : 1;
}

static int embedding_worker_lineage_look(embedding_worker *s)
{
    uint64_t boot;
    int rc = persia_client_look_at_boots(s->look);
    if (!rc)
        rc = persia_random_id(&boot);
    if (rc)
        return rc;
    const uint64_t lineage = persia_client_restore(s->look);
    const uint64_t servers = lineage_servers_now(s);
    service_enter(s);
    if (s->servers != servers)
        s->compares = COMPARES;
    s->servers = servers;
    if (lineage != s->lineage)
        lineage_begin_again(s, lineage, boot);
    service_leave(s);
    return PERSIA_OK;
}

/* Ranks and loaders find out what servers have lost as well.  This is for
 * updates of those that are not there any more. */
static void lineage_compare(embedding_worker *s)
{
    client_counts counts;
    service_enter(s);
    const int due = s->compares != 0;
    service_leave(s);
    if (!due)
        return;
    pthread_mutex_lock(&s->looking);
    const int rc = persia_client_look_once(s->look);
    pthread_mutex_unlock(&s->looking);
    if (rc)
        return;
    persia_client_get_counts(s->look, &counts);
    service_enter(s);
    s->compares -= s->compares != 0;
    s->stats.lost = counts.lost;
    service_leave(s);
}

int lineage_look(embedding_worker *s)
{
    pthread_mutex_lock(&s->looking);
    int rc = embedding_worker_lineage_look(s);
    pthread_mutex_unlock(&s->looking);
    return rc;
}

int lineage_settle(embedding_worker *s)
{
    const uint64_t until = persia_clock_ns() + WORKER_SETTLE_NS;
    int rc;
    while ((rc = lineage_look(s)) == PERSIA_EINCOMPLETE &&
           persia_clock_ns() < until)
        persia_pause(10000000);
    return rc;
}

static void lineage_work_look(void *service)
{
    embedding_worker *s = service;
    if (!lineage_look(s)) /* or a later one */
        lineage_compare(s);
    service_enter(s);
    s->looks = 0;
    s->looked = persia_clock_ns();
    service_leave(s);
}

void lineage_tick(embedding_worker *s, uint64_t now)
{
    for (worker_stream **at = &s->old, *t; (t = *at);) {
        if (t->offers) {
            at = &t->next;
            continue;
        }
        *at = t->next;
        stream_drop(s, t);
    }
    if (s->looks || now - s->looked < WORKER_LOOK_NS)
        return;
    s->looks = !persia_sched_submit(s->jobs, lineage_work_look, s);
}
