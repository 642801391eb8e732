/* jobs.c: jobs, their ranks, and what these look up.  The lock is held in all
 * of it.
 *
 * Loaders and ranks say which job they are of.  A rank that names none takes
 * the job that has loaders, the one whose loader joined last if there are
 * several; before a pass has begun it may change to another one.
 */
#include <stdlib.h>
#include <string.h>

#include "embedding_worker/private.h"

enum { JOB_UNNAMED = 1 }; /* of loaders that name none */

/* ---- jobs ---- */

worker_job *job_named(const embedding_worker *s, uint64_t id)
{
    worker_job *j = s->job_list;
    id = id ? id : JOB_UNNAMED;
    while (j && j->id != id)
        j = j->next;
    return j;
}

worker_job *job_find(embedding_worker *s, uint64_t id)
{
    worker_job *j = job_named(s, id);
    if (j)
        return j;
    if (!(j = calloc(1, sizeof *j))) {
        (void)persia_err_set(PERSIA_ENOMEM, "no memory for a job");
        return NULL;
    }
    j->id = id ? id : JOB_UNNAMED;
    j->began = persia_clock_ns();
    j->next = s->job_list;
    s->job_list = j;
    return j;
}

int job_is_fed(const embedding_worker *s, const worker_job *j)
{
    const worker_stream *t = s->streams;
    while (t && (t->job != j || t->state != STREAM_THERE))
        t = t->next;
    return t != NULL;
}

static int jobs_has_queued(const embedding_worker *s, const worker_job *j)
{
    const offer *o = s->queue;
    while (o && o->stream->job != j)
        o = o->next;
    return o != NULL;
}

/* Those of streams that have ended are looked up with its plan, too. */
static int jobs_has_leased(const embedding_worker *s, const worker_job *j)
{
    const offer *o = s->leased;
    while (o && o->stream->job != j)
        o = o->next;
    return o != NULL;
}

/* What loaders left behind that were there before the others, where the ranks
 * of that time are not there any more either: it is of a job before. */
static void jobs_drop_generations(embedding_worker *s, const worker_job *j)
{
    for (const worker_rank *r = s->ranks; r; r = r->next)
        if (r->job == j && r->generation != j->generation)
            return;
    for (worker_stream *t = s->streams, *next; t; t = next) {
        next = t->next;
        if (t->job == j && t->generation != j->generation && !t->shared &&
            t->state != STREAM_THERE)
            stream_end(s, t);
    }
}

void job_join(embedding_worker *s, worker_job *j, worker_stream *t)
{
    if (!job_is_fed(s, j)) { /* those that begin now are others */
        j->generation++;
        j->streams_ever = 0;
        if (!jobs_has_queued(s, j) && !jobs_has_leased(s, j))
            j->plan = NULL; /* there may be another model */
        jobs_drop_generations(s, j);
    }
    t->job = j;
    t->generation = j->generation;
    j->streams_ever++;
    j->joined = ++s->joins;
}

/* That a loader joined last.  NULL: none has loaders, nor batches. */
static worker_job *jobs_newest(const embedding_worker *s)
{
    worker_job *fed = NULL, *left = NULL;
    for (worker_job *j = s->job_list; j; j = j->next) {
        if (job_is_fed(s, j) && (!fed || j->joined > fed->joined))
            fed = j;
        if (jobs_has_queued(s, j) && (!left || j->joined > left->joined))
            left = j;
    }
    return fed ? fed : left;
}

/* Whether a rank has asked for its batches within that time. */
static int jobs_has_ranks(const embedding_worker *s, const worker_job *j,
                          uint64_t ns)
{
    const uint64_t now = persia_clock_ns();
    const worker_rank *r = s->ranks;
    while (r && (r->job != j || now - r->seen > ns))
        r = r->next;
    return r != NULL;
}

int jobs_drop(embedding_worker *s)
{
    int dropped = 0;
    for (const worker_job *j = s->job_list; j; j = j->next) {
        if (job_is_fed(s, j) || jobs_has_ranks(s, j, s->config.silence_ns))
            continue;
        for (worker_stream *t = s->streams, *next; t; t = next) {
            next = t->next;
            if (t->job != j || !t->offers)
                continue;
            stream_end(s, t);
            dropped = 1;
        }
    }
    return dropped;
}

/* ---- the end of a job ---- */

static void rank_drop(embedding_worker *s, worker_rank **at)
{
    worker_rank *r = *at;
    *at = r->next;
    free(r->held);
    free(r);
    s->stats.ranks--;
}

static void jobs_forget_ranks(embedding_worker *s, const worker_job *j)
{
    for (worker_rank **at = &s->ranks; *at;) {
        if ((*at)->job == j)
            rank_drop(s, at);
        else
            at = &(*at)->next;
    }
}

/* Its streams are dropped first.  Whether there is one left. */
static int jobs_drop_streams(embedding_worker *s, const worker_job *j)
{
    int left = 0;
    for (worker_stream **at = &s->streams, *t; (t = *at);) {
        if (t->job != j || t->offers) {
            left |= t->job == j;
            at = &t->next;
            continue;
        }
        *at = t->next;
        s->stats.streams--;
        stream_drop(s, t);
    }
    for (const worker_stream *t = s->old; t; t = t->next)
        left |= t->job == j;
    return left;
}

void worker_jobs_tick(embedding_worker *s, uint64_t now)
{
    /* A lease may be shorter than a Take that waits. */
    const uint64_t silence = s->config.silence_ns > s->config.lease_ns
                                 ? s->config.silence_ns
                                 : s->config.lease_ns;
    s->stats.jobs = 0;
    for (worker_job **at = &s->job_list, *j; (j = *at);) {
        const int fed = job_is_fed(s, j);
        s->stats.jobs += (uint64_t)fed;
        if (fed || now - j->began < s->config.lease_ns ||
            jobs_has_ranks(s, j, silence) || jobs_drop_streams(s, j)) {
            at = &j->next;
            continue;
        }
        jobs_forget_ranks(s, j);
        *at = j->next;
        free(j);
    }
}

void worker_jobs_free(embedding_worker *s)
{
    while (s->job_list) {
        worker_job *j = s->job_list;
        s->job_list = j->next;
        free(j);
    }
    while (s->plans) {
        worker_plan *p = s->plans;
        s->plans = p->next;
        persia_wire_memory_free(&p->memory);
        free(p);
    }
}

/* ---- plans ---- */

static int same_plan(const wire_plan *a, const wire_plan *b)
{
    if (a->features_n != b->features_n || a->tables_n != b->tables_n ||
        memcmp(a->features, b->features, a->features_n * sizeof *a->features))
        return 0;
    size_t i = 0;
    while (i < a->tables_n &&
           !memcmp(&a->tables[i], &b->tables[i], sizeof *a->tables))
        i++;
    return i == a->tables_n;
}

static int copy_plan(worker_plan *to, const wire_plan *m)
{
    wire_plan *p = &to->plan;
    const size_t tables = m->tables_n * sizeof *m->tables;
    const size_t features = m->features_n * sizeof *m->features;
    persia_wire_memory_init(&to->memory);
    p->tables = persia_wire_memory_take(&to->memory, tables);
    p->features = persia_wire_memory_take(&to->memory, features);
    if (!p->tables || !p->features)
        return PERSIA_ENOMEM;
    memcpy(p->tables, m->tables, tables);
    memcpy(p->features, m->features, features);
    p->tables_n = m->tables_n;
    p->features_n = m->features_n;
    return row_plan_make(p, &to->memory, &to->rows);
}

static int jobs_is_used(const embedding_worker *s, const worker_plan *p)
{
    int used = 0;
    for (const worker_job *j = s->job_list; j; j = j->next)
        used |= j->plan == p;
    for (const worker_rank *r = s->ranks; r; r = r->next)
        used |= r->plan == p;
    return used;
}

/* Whether there is room for one more; plans of no rank end otherwise. */
static int plans_have_room(embedding_worker *s)
{
    size_t n = 0;
    for (const worker_plan *p = s->plans; p; p = p->next)
        n++;
    for (worker_plan **at = &s->plans, *p; n >= WORKER_PLANS && (p = *at);) {
        if (jobs_is_used(s, p)) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        persia_wire_memory_free(&p->memory);
        free(p);
        n--;
    }
    return n < WORKER_PLANS;
}

static int plan_keep(embedding_worker *s, const wire_plan *m,
                     worker_plan **out)
{
    worker_plan *p = s->plans;
    while (p && !same_plan(&p->plan, m))
        p = p->next;
    *out = p;
    if (p)
        return PERSIA_OK;
    if (!plans_have_room(s))
        return persia_err_set(PERSIA_ELIMIT,
                              "ranks of this worker have %d models that look "
                              "up other features; no more are taken",
                              WORKER_PLANS);
    if (!(p = calloc(1, sizeof *p)))
        return persia_err_set(PERSIA_ENOMEM, "no memory for a plan");
    int rc = copy_plan(p, m);
    if (rc) {
        persia_wire_memory_free(&p->memory);
        free(p);
        return rc;
    }
    p->next = s->plans;
    s->plans = p;
    *out = p;
    return PERSIA_OK;
}

/* What other models looked up for is not looked up again. */
static void jobs_reopen_streams(embedding_worker *s, const worker_job *j)
{
    for (worker_stream *t = s->streams; t; t = t->next) {
        if (t->job != j)
            continue;
        pthread_mutex_lock(&t->opening);
        free(t->tables);
        t->tables = NULL;
        t->open = 0;
        pthread_mutex_unlock(&t->opening);
    }
}

/* Batches that arrived before the plan. */
static void jobs_check_queued(embedding_worker *s, const worker_job *j)
{
    for (offer *o = s->queue, *next; o; o = next) {
        next = o->next;
        const int rc = o->stream->job == j ? offer_check(o, j->plan)
                                           : PERSIA_OK;
        if (rc)
            offer_fail(s, o, rc, persia_err_text());
    }
}

/* The job's batches are looked up as this rank wants it. */
static int jobs_adopt(embedding_worker *s, const worker_rank *by,
                      worker_job *j)
{
    if (j->plan == by->plan)
        return PERSIA_OK;
    const uint64_t now = persia_clock_ns();
    int used = j->plan && jobs_has_leased(s, j);
    for (const worker_rank *r = s->ranks; j->plan && r; r = r->next)
        used |= r != by && r->job == j && r->plan == j->plan &&
                now - r->seen <= s->config.silence_ns;
    if (used)
        return persia_err_set(PERSIA_EMISMATCH,
                              "the ranks of this job look up other features "
                              "or tables; give each model a job of its own "
                              "(job=)");
    jobs_reopen_streams(s, j);
    j->plan = by->plan;
    jobs_check_queued(s, j);
    return PERSIA_OK;
}

void job_expect(embedding_worker *s, worker_job *j)
{
    const worker_rank *r = s->ranks;
    while (r && (!r->plan || (r->named ? r->named != j->id : r->job != NULL)))
        r = r->next;
    if (!j->plan && r)
        (void)jobs_adopt(s, r, j);
}

/* ---- ranks ---- */

worker_rank *rank_find(const embedding_worker *s, uint64_t client)
{
    worker_rank *r = s->ranks;
    while (r && r->client != client)
        r = r->next;
    return r;
}

int rank_is_replaced(const embedding_worker *s, uint64_t client)
{
    const worker_rank *r = s->ranks;
    while (r && r->former != client)
        r = r->next;
    return r != NULL;
}

int rank_check(const embedding_worker *s, uint64_t client)
{
    if (rank_find(s, client))
        return PERSIA_OK;
    if (rank_is_replaced(s, client))
        return persia_err_set(PERSIA_ECLOSED,
                              "another process takes the batches of this rank "
                              "now; give jobs at once a name each (job=)");
    return persia_err_set(PERSIA_ESTALE, "a rank has not said Hello");
}

/* What an earlier process of a rank had is offered again. */
static void jobs_give_back(embedding_worker *s, uint64_t client)
{
    for (offer *o = s->leased, *next; o; o = next) {
        next = o->next;
        if (o->client != client)
            continue;
        if (o->state == OFFER_LEASED) /* its end is not the batch's fault */
            offer_again(s, o, 0);
        else
            o->expires = 0;
    }
}

/* The job has fewer ranks now. */
static void jobs_drop_beyond(embedding_worker *s, const wire_hello *m)
{
    for (worker_rank **at = &s->ranks; *at;) {
        worker_rank *r = *at;
        if (r->named != m->job || r->rank < m->world) {
            at = &r->next;
            continue;
        }
        jobs_give_back(s, r->client);
        rank_drop(s, at);
    }
}

int rank_hello(embedding_worker *s, const wire_hello *m)
{
    if (m->world > WIRE_PARTS_MAX) /* the rank is below the world */
        return persia_err_set(PERSIA_EARG, "rank %u of %u: a job has at most "
                              "%d ranks", m->rank, m->world, WIRE_PARTS_MAX);
    worker_rank *r = s->ranks;
    while (r && (r->named != m->job || r->rank != m->rank))
        r = r->next;
    if (r && r->client == m->caller.client)
        return PERSIA_OK;
    if (r && m->stays && m->caller.incarnation <= r->opened) {
        r->former = m->caller.client;
        return PERSIA_OK;
    }
    jobs_drop_beyond(s, m);
    if (r) {
        jobs_give_back(s, r->client);
        r->former = r->client;
    } else {
        if (!(r = calloc(1, sizeof *r)))
            return persia_err_set(PERSIA_ENOMEM, "no memory for a rank");
        r->next = s->ranks;
        s->ranks = r;
        s->stats.ranks++;
    }
    r->named = m->job;
    r->rank = m->rank;
    r->world = m->world;
    r->client = m->caller.client;
    r->opened = m->caller.incarnation;
    r->plan = NULL;
    r->seen = persia_clock_ns();
    r->heard = r->held_n = r->epoch = r->next_epoch = r->next_place = 0;
    const worker_job *before = r->job;
    r->job = NULL;
    if (before)
        jobs_drop_generations(s, before);
    return PERSIA_OK;
}

int rank_has(const worker_rank *r, const offer *o)
{
    size_t i = 0;
    while (i < r->held_n && (r->held[i].stream != o->m.stream ||
                             r->held[i].number != o->m.number))
        i++;
    return i < r->held_n;
}

static void rank_hear(worker_rank *r, const wire_batch_name *names, size_t n,
                      uint64_t epoch, uint64_t place)
{
    wire_batch_name *held = n ? malloc(n * sizeof *held) : NULL;
    if (n && !held)
        return; /* the time of a lease must do */
    if (n)
        memcpy(held, names, n * sizeof *held);
    free(r->held);
    r->held = held;
    r->held_n = n;
    r->next_epoch = epoch;
    r->next_place = place;
    r->heard = persia_clock_ns();
}

void rank_continues(worker_rank *r, const wire_hello *m)
{
    rank_hear(r, m->held, m->held_n, m->epoch, m->place);
}

void rank_asks(embedding_worker *s, worker_rank *r, const wire_take *m)
{
    rank_hear(r, m->held, m->held_n, m->epoch, m->place);
    r->seen = persia_clock_ns();
    for (offer *o = s->leased, *next; o; o = next) {
        next = o->next;
        if (o->client != r->client)
            continue;
        if (rank_has(r, o))
            o->expires = r->seen + s->config.lease_ns;
        else if (o->state == OFFER_LEASED && o->request &&
                 o->request < m->oldest) /* an answer, or a Return, was lost */
            offer_again(s, o, 0);
    }
}

/* Also one that has not asked for a batch yet. */
static int rank_may_be_of(const worker_rank *r, const worker_job *j)
{
    return r->job ? r->job == j : !r->named || r->named == j->id;
}

int is_withheld(const embedding_worker *s, const offer *o, uint64_t now)
{
    const worker_job *j = o->stream->job;
    uint32_t without = 0;
    if (o->m.attempt < 2 || now - o->since >= s->config.lease_ns)
        return 0;
    for (const worker_rank *r = s->ranks; r; r = r->next)
        without += rank_may_be_of(r, j) && r->rank < j->world &&
                   r->heard > o->since && !rank_has(r, o);
    return without < j->world;
}

int job_has(const embedding_worker *s, const worker_rank *asks, const offer *o)
{
    const worker_rank *r = s->ranks;
    if (rank_has(asks, o))
        return 1;
    while (r && !(rank_may_be_of(r, o->stream->job) && r->heard > o->since &&
                  rank_has(r, o)))
        r = r->next;
    return r != NULL;
}

/* Whether it may take the batch (again). */
static int rank_may_take(const worker_rank *r, const offer *o, uint64_t epoch,
                         uint64_t place)
{
    const uint64_t own = offer_epoch(o);
    return own > epoch || (own == epoch && o->m.place >= place) ||
           rank_has(r, o);
}

int is_passed(const embedding_worker *s, const offer *o, const wire_take *m,
              uint64_t epoch)
{
    const worker_job *j = o->stream->job;
    int known = 0;
    if (!j->world || !o->m.place || offer_epoch(o) > epoch)
        return 0;
    for (const worker_rank *r = s->ranks; r; r = r->next) {
        if (r->rank != (o->m.place - 1) % j->world || !rank_may_be_of(r, j))
            continue;
        const int asks = r->client == m->caller.client;
        if (rank_may_take(r, o, asks ? epoch : r->next_epoch,
                          asks ? m->place : r->next_place))
            return 0;
        known = 1;
    }
    return known;
}

/* Another rank of the same world, which is there. */
static const worker_rank *jobs_fellow(const embedding_worker *s,
                                      const worker_rank *of)
{
    const uint64_t now = persia_clock_ns();
    const worker_rank *r = s->ranks;
    while (r && (r == of || r->named != of->named || !r->plan ||
                 now - r->seen > s->config.silence_ns))
        r = r->next;
    return r;
}

int rank_declare(embedding_worker *s, const wire_plan *m, uint32_t *created)
{
    worker_plan *plan;
    worker_rank *r = rank_find(s, m->caller.client);
    const worker_rank *other = r ? jobs_fellow(s, r) : NULL;
    if (!r)
        return rank_check(s, m->caller.client);
    if (other && !same_plan(&other->plan->plan, m))
        return persia_err_set(PERSIA_EMISMATCH,
                              "rank %u looks up other features or tables; "
                              "jobs with other models need another name "
                              "(job=) or other workers",
                              other->rank);
    int rc = plan_keep(s, m, &plan);
    *created = !rc && r->plan != plan;
    if (!rc)
        r->plan = plan;
    return rc;
}

/* Stock clients let one rank say it for all.  NULL: none has. */
static const worker_plan *plan_of_rank(const embedding_worker *s,
                                       const worker_rank *r)
{
    const worker_rank *other = r->plan ? r : jobs_fellow(s, r);
    return other ? other->plan : s->plans && !s->plans->next ? s->plans : NULL;
}

uint64_t rank_epoch(const embedding_worker *s, const worker_rank *of)
{
    const uint64_t now = persia_clock_ns();
    uint64_t epoch = 0;
    for (const worker_rank *r = s->ranks; r; r = r->next)
        if (r != of && r->job == of->job && r->generation == of->generation &&
            now - r->seen <= s->config.lease_ns && r->epoch > epoch)
            epoch = r->epoch;
    return epoch;
}

/* The job that a rank without a name takes batches of. */
static uint64_t jobs_choose(const embedding_worker *s, uint64_t id, int begun)
{
    const worker_job *j = id ? job_named(s, id) : NULL, *other;
    const int over = !j || (!job_is_fed(s, j) && !jobs_has_queued(s, j) &&
                            !jobs_has_leased(s, j));
    if (begun || !over)
        return id;
    other = jobs_newest(s);
    return other ? other->id : id;
}

int job_of_rank(embedding_worker *s, worker_rank *r, uint64_t id, int begun,
                worker_job **out)
{
    *out = NULL;
    if (!s->plans)
        return PERSIA_OK;
    if (!(r->plan = plan_of_rank(s, r)))
        return persia_err_set(PERSIA_ESTALE,
                              "rank %u has not said what it looks up",
                              r->rank);
    if (!id && r->job) /* a stock client need not say it */
        id = r->job->id;
    id = r->named ? r->named : jobs_choose(s, id, begun);
    if (!id)
        return PERSIA_OK;
    worker_job *j = job_find(s, id);
    if (!j)
        return PERSIA_ENOMEM;
    int rc = jobs_adopt(s, r, j);
    if (rc)
        return rc;
    j->world = r->world;
    if (r->job != j)
        r->generation = j->generation;
    r->job = j;
    *out = j;
    return PERSIA_OK;
}
