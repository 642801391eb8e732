/* private.h: what the parts of the service share (private).
 *
 *   service.c  its life; requests and answers; the timer
 *   jobs.c     jobs, their ranks, and what these look up
 *   epochs.c   epochs of a job
 *   streams.c  loaders: the states of their streams
 *   queue.c    batches; what waits
 *   offers.c   the states of a batch
 *   work.c     lookups and updates
 *   ledgers.c  what servers have
 *   lineage.c  rows that were replaced
 *   load.c     how long ranks wait for loaders, and loaders for ranks
 *   rows.c     tables whose rows go to the ranks
 */
#ifndef PERSIA_EMBEDDING_WORKER_PRIVATE_H
#define PERSIA_EMBEDDING_WORKER_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "batch/batch.h"
#include "embedding_worker/embedding_worker.h"
#include "link/link.h"
#include "trace/trace.h"

enum {
    WORKER_STREAMS = 256, /* of loaders at once */
    WORKER_WAITING = 1024, /* threads, at most: one a part that waits */
    WORKER_LEASES = 65536, /* of which is known how they ended */
    WORKER_PLANS = 64,
    WORKER_FAILED = WIRE_BATCHES_MAX, /* those that loaders may not know */
    WORKER_OFFERS = 4 /* of a batch; then it is given up */
};
#define WORKER_WAIT_NS ((uint64_t)1000000000) /* of Submit and Take */
#define WORKER_SETTLE_NS ((uint64_t)10 * 1000000000) /* of a load */
#define WORKER_LOOK_NS ((uint64_t)1000000000) /* of looks at servers */

/* A batch is in one state at a time.  Its events, and the state that each
 * leads to (a blank: it cannot occur there):
 *
 *              TAKE     FOUND   AGAIN   RETURN     END
 *  QUEUED      LOOKING                  RETURNING  DONE
 *  LOOKING              LEASED  QUEUED             DONE
 *  LEASED      LOOKING          QUEUED  RETURNING  DONE
 *  RETURNING            LEASED  QUEUED             DONE
 *
 *     Submit ──► QUEUED ──Take──► LOOKING ──answer──► LEASED
 *                  │ ▲                                 │  │
 *                  │ ├──lease over, rank dead, UNUSED──┘  │
 *                  │ └──gradients refused──────────┐   Return
 *                  └─Return of a rank that has it──┼─►    ▼
 *                    from another worker           └─RETURNING ──► DONE
 *
 * QUEUED: a batch that its loader sent before, to this worker or another one,
 * is withheld until no rank has it: see is_withheld().
 */
enum offer_state {
    OFFER_QUEUED,    /* in the queue */
    OFFER_LOOKING,   /* a job looks it up for a rank */
    OFFER_LEASED,    /* a rank has it */
    OFFER_RETURNING, /* a job applies its gradients, or sums them */
    OFFER_DONE,      /* freed when nothing uses it */
    OFFER_STATES
};

enum offer_event {
    OFFER_TAKE,   /* a rank asks for it, once more */
    OFFER_FOUND,  /* it is looked up; or its gradients may arrive again */
    OFFER_AGAIN,  /* back to the queue */
    OFFER_RETURN, /* its gradients arrive */
    OFFER_END,    /* trained, skipped, or failed (queued: its epoch is over
                     for the one rank that may take it) */
    OFFER_EVENTS
};

/* A loader's stream is in one state at a time.  Its events, and the state that
 * each leads to (a blank: it cannot occur there):
 *
 *          HEAR   SILENT  LEAVE  REPLACE  END
 *  THERE   THERE  GONE    LEFT            OLD
 *  GONE    THERE                 LEFT     OLD
 *  LEFT    THERE                          OLD
 *
 * What else is known of it depends on no state: `waits` is what its last
 * heartbeat said, `shared` stays once it was said, `settling` is a job's.
 */
enum stream_state {
    STREAM_THERE, /* its loader was heard of a short time ago */
    STREAM_GONE,  /* ... was not: it is taken for dead */
    STREAM_LEFT,  /* it has no more epochs, or another took its place */
    STREAM_OLD,   /* of rows that were replaced: see lineage.c; for good */
    STREAM_STATES
};

enum stream_event {
    STREAM_HEAR,    /* of its loader */
    STREAM_SILENT,  /* for too long */
    STREAM_LEAVE,   /* its loader says that it has no more epochs */
    STREAM_REPLACE, /* a new loader takes its place */
    STREAM_END,
    STREAM_EVENTS
};

/* Tables whose distinct rows go to the ranks, and the features that want
 * them: each name once, a *key*.  Tables that share a feature are a group:
 * each has a row for all ids of the group, in one order. */
typedef struct row_plan {
    uint32_t keys_n, tables_n, groups;
    uint32_t *feature;     /* [keys_n] the first one of the key */
    uint32_t *group;       /* [keys_n] */
    uint32_t *table;       /* [tables_n] its place in the plan */
    uint32_t *table_group; /* [tables_n] */
} row_plan;

/* What ranks look up; constant. */
typedef struct worker_plan {
    struct worker_plan *next;
    wire_plan plan;
    row_plan rows;
    wire_memory memory;
} worker_plan;

/* Loaders and ranks that belong together.  An epoch is of the loaders of a
 * job. */
typedef struct worker_job {
    struct worker_job *next;
    uint64_t id;
    uint64_t began;        /* here, or when servers got other rows */
    uint64_t joined;       /* order in which a loader joined one last */
    uint32_t generation;   /* of loaders: when one joined, those before were
                              not there any more */
    uint32_t world;        /* of the ranks, as the last one said */
    uint32_t streams_ever;
    int counts;            /* epochs as others do: a rank has asked */
    uint64_t over;         /* epochs that ranks heard the end of here */
    uint64_t failed;       /* batches */
    const worker_plan *plan; /* of its ranks; NULL: none has asked */
} worker_job;

/* A batch that ended without an update. */
typedef struct worker_failure {
    uint64_t number;
    int code;
    char text[WIRE_TEXT_MAX + 1];
} worker_failure;

/* A loader. */
typedef struct worker_stream {
    struct worker_stream *next;
    uint64_t name;
    worker_job *job;
    uint32_t generation;   /* of its job, when it joined */
    enum stream_state state;
    /* As its last heartbeat said: */
    uint64_t client;   /* its process */
    uint64_t former;   /* the one before: what it still says is late */
    uint64_t beaten;   /* when its last heartbeat arrived */
    uint64_t first;    /* epoch, as ranks and workers count; 0: not known */
    uint64_t own;      /* epoch of its next batch, as it counts; 0: it has not
                          said */
    uint64_t ends[WIRE_EPOCHS_MAX]; /* [ends_n] last batches of those before */
    size_t ends_n;
    int waits;         /* for what it has sent */
    int shared;        /* claimed: when it is gone others may send it */
    uint64_t settled;  /* as the loader said */
    window came, done; /* numbers behind it */
    uint64_t rings[2][WORKER_WINDOW / 64];
    uint64_t memory;   /* number of these windows, at this worker */
    size_t offers;     /* that are not freed */
    int settling;      /* servers are asked which of them they have */
    uint64_t used;     /* when it was heard of last */
    worker_failure *failed; /* [failed_n] a ring of WORKER_FAILED, or NULL */
    size_t failed_n;      /* all that were put there */
    pthread_mutex_t opening; /* guards all below until it is open */
    int open;          /* there is all below, for the plan of its job */
    ps_client *c;      /* that pushes in this stream */
    batcher *w;
    uint32_t *tables;  /* [tables of the plan] their numbers */
} worker_stream;

/* The distinct ids that these tables are asked for. */
typedef struct row_ids {
    uint64_t *ids;    /* table after table, or NULL: none were asked for */
    int64_t *offsets; /* [tables + 1] */
    uint32_t plan;    /* of the stream's worker */
    batch_index *index;
} row_ids;

/* Where the ids of the keys are among them: see TakeReply. */
typedef struct row_places {
    uint32_t *places; /* [n] */
    float *weights;   /* [n], or NULL */
    size_t n;
    uint32_t *offsets; /* [offsets_n], or NULL */
    size_t offsets_n;
} row_places;

typedef struct offer {
    struct offer *next; /* in queue or leased, by seq */
    worker_stream *stream;
    enum offer_state state;
    unsigned users;     /* jobs and answers that need its memory */
    void *bytes;        /* the message */
    size_t bytes_n;
    wire_memory memory;
    wire_submit m;
    uint64_t seq;       /* order of arrival */
    uint64_t since;     /* of its arrival */
    uint64_t waits;     /* for a rank, since then */
    uint32_t takes;     /* of it by ranks */
    unsigned offers;    /* that ended without its gradients */
    uint64_t expired;   /* when its last lease did, whose rank may have it yet;
                           0: it has not */
    uint64_t doubted;   /* since when another worker may have had it; or 0 */
    int settled;        /* servers were asked since: they do not list it */
    uint64_t asked;     /* ... when; its update may have been on its way */
    int passed;         /* by place: its rank asks for a later one */
    /* Of its lease: */
    uint64_t lease;
    uint64_t client;    /* of the rank */
    uint64_t request;   /* number of the Take; 0: it was returned only */
    uint64_t expires;
    /* Of the lookup; jobs have it in the states LOOKING and RETURNING. */
    int planned;        /* there is the plan */
    uint32_t plan;      /* of the stream's worker */
    batch_index *index;
    row_ids rows;
} offer;

typedef struct worker_rank {
    struct worker_rank *next;
    uint64_t named;  /* the job that it named, or 0 */
    uint32_t rank, world;
    uint64_t client, former; /* its process; another that was its own, or
                                says so */
    uint64_t opened;         /* in seconds since 1970, as it says */
    const worker_plan *plan; /* what it looks up; NULL: it has not said */
    worker_job *job; /* that it takes batches of; NULL: of none yet */
    uint32_t generation; /* of the job, when it took the first one */
    uint64_t seen;  /* its Hello, or its last Take */
    uint64_t epoch; /* of that Take; 0: it did not know */
    uint64_t heard; /* its last Take or Hello */
    /* As that said, of the next batch that it takes: of those before it takes
     * none but what it holds.  0: not known, any. */
    uint64_t next_epoch, next_place;
    wire_batch_name *held; /* [held_n] batches that it had then, from other
                              workers or earlier processes of this one */
    size_t held_n;
} worker_rank;

/* A request without an answer yet.  It lies in its own memory. */
typedef struct asking {
    struct asking *next;
    embedding_worker *s;
    rpc_call *call;
    wire_memory memory;
    union {
        wire_hello hello;
        wire_heartbeat beat;
        wire_plan plan;
        wire_take take;
        wire_return back;
        wire_stats stats;
    } m;
    offer *o;
    uint64_t until;  /* of its wait */
    /* How it is answered: an error, or a status. */
    err_kept error;
    uint32_t status;
    void (*job)(void *asking); /* that answers it; or NULL */
    int waits;       /* the job waits for those of others */
    trace_span trace; /* of the job */
    uint64_t *done;  /* [done_n] of a Submit */
    size_t done_n;
    uint64_t first, epoch;  /* of a loader's Hello, and of a Take */
    uint64_t stream_memory; /* of a Submit */
    wire_loader_part *parts; /* [parts_n] of a Take */
    size_t parts_n;
    wire_ledger *ledger;    /* of a loader's Hello, or NULL */
    uint64_t lineage;       /* of the rows that it is of, or before */
    /* See TakeReply: */
    uint64_t loaders_first, loaders_silent, job_id, job_failed;
    wire_failed_batch *failed;      /* [failed_n] of a Submit */
    size_t failed_n;
    batcher_counts counts; /* of a Return */
    void *floats;    /* of a Take or Return */
    wire_take_reply taken;
    row_places places; /* of a Take */
    batcher_sum *sums; /* [sums_n] */
    size_t sums_n;
    wire_sums_reply summed;
} asking;

struct embedding_worker {
    embedding_worker_config config;
    uint64_t born;
    ps_client *look; /* to see the servers' tables; pushes nothing */
    sched *jobs;
    sched *waiting; /* of jobs that wait for each other */
    persia_timer timer;
    pthread_mutex_t declaring; /* one Declare at a time */
    pthread_mutex_t looking;   /* one look at the servers at a time */

    pthread_mutex_t lock;      /* guards all below */
    int closed, leaving;
    uint64_t boot, began;      /* random; when: see lineage.c */
    uint64_t lineage;          /* of the servers' rows: the restore that they
                                  stem from */
    uint64_t servers;          /* of their boots: changes with one */
    unsigned compares;         /* times that servers are to be asked whether
                                  they lost updates that were made here */
    int looks;                 /* a job asks servers for that */
    uint64_t looked;           /* when the last one did */
    worker_plan *plans;
    worker_job *job_list;
    uint64_t joins;            /* of loaders */
    uint64_t memories;         /* the last number of windows of a stream */
    worker_stream *streams, *old;
    worker_rank *ranks;
    offer *queue, *leased;     /* by seq */
    asking *takes, *submits;   /* that wait, oldest first */
    asking *ready;              /* to be answered without the lock */
    uint64_t seq;
    uint64_t lease;            /* the last one given */
    window leases;             /* that ended with gradients or a skip */
    uint64_t ring[WORKER_LEASES / 64];
    uint64_t starved, blocked; /* since when it is so; 0: it is not */
    embedding_worker_stats stats; /* bytes, counters */
};

/* ---- service.c ---- */

/* Answers a request: with an error and this thread's text, or (rc 0) with what
 * it holds. */
void asking_answer(asking *a, int rc);

/* ---- offers.c ---- */

/* The only place that changes a batch's state. */
void offer_event(offer *o, enum offer_event event);
/* The lock is held for all below. */
void offers_insert(offer **list, offer *o);
void offers_remove(offer **list, offer *o);
/* It is done, for good; it is freed when nothing uses it. */
void offer_end(embedding_worker *s, offer *o);
/* The same, without an update: its loader gets the error. */
void offer_fail(embedding_worker *s, offer *o, int code, const char *text);
/* Back to the queue; or given up, if too many offers `failed`. */
void offer_again(embedding_worker *s, offer *o, int failed);
/* One user less. */
void offer_release(embedding_worker *s, offer *o);
/* A job has ended, and the rank has it (again).  Whether it is to be had. */
int offer_found(embedding_worker *s, offer *o);
/* A new one of this message, without a stream; needs no lock. */
int offer_make(const void *data, size_t n, offer **out);
void offer_free(embedding_worker *s, offer *o);
uint64_t offer_epoch(const offer *o);
/* Whether its ids add up, and all features of the plan (NULL: none) are
 * there. */
int offer_check(const offer *o, const worker_plan *plan);
/* How often it was sent, and taken here. */
uint32_t offer_attempt(const offer *o);
/* What its ranks look up. */
const worker_plan *offer_plan(const offer *o);
/* The place of a feature in it, or features_n. */
size_t offer_feature(const offer *o, const char *name);

/* ---- queue.c ---- */

/* Enters and leaves the lock; leaving answers what is ready. */
void service_enter(embedding_worker *s);
void service_leave(embedding_worker *s);
/* Gives batches to Takes and room to Submits; ends waits.  The lock is
 * held. */
void service_match(embedding_worker *s);
/* Ends all waits: who waits is to say Hello again. */
void waits_end(embedding_worker *s);
/* Ends leases and waits by time. */
void service_tick(embedding_worker *s);
void service_declare(asking *a);
void service_submit(asking *a);
void service_heartbeat(asking *a);
void service_take(asking *a);
void service_return(asking *a);
void service_sums(asking *a);
void service_hello(asking *a);
/* Whether a rank may have it: until each rank of the job has said that it has
 * not, or the time of a lease is over. */
int is_withheld(const embedding_worker *s, const offer *o, uint64_t now);

/* ---- jobs.c ---- */

/* The job of this id, made if need be.  NULL: no memory. */
worker_job *job_find(embedding_worker *s, uint64_t id);
/* NULL: it is not known. */
worker_job *job_named(const embedding_worker *s, uint64_t id);
/* Whether one of its loaders is there. */
int job_is_fed(const embedding_worker *s, const worker_job *j);
/* A loader of it joins. */
void job_join(embedding_worker *s, worker_job *j, worker_stream *t);
/* The job whose batches a rank is to have; *j NULL: none has loaders.
 * PERSIA_ESTALE: it is to say Hello, and what it looks up.
 * PERSIA_EMISMATCH: other ranks look up otherwise. */
int job_of_rank(embedding_worker *s, worker_rank *r, uint64_t id, int begun,
                worker_job **j);
/* A batch has arrived: a job without a plan has that of ranks that wait. */
void job_expect(embedding_worker *s, worker_job *j);
/* Drops what jobs without loaders and ranks have left behind.  Whether that
 * gives room. */
int jobs_drop(embedding_worker *s);
/* Forgets jobs of which nothing is left. */
void worker_jobs_tick(embedding_worker *s, uint64_t now);
void worker_jobs_free(embedding_worker *s);
/* A rank's process says Hello. */
int rank_hello(embedding_worker *s, const wire_hello *m);
/* Its Hello, once more: what it holds, and takes next. */
void rank_continues(worker_rank *r, const wire_hello *m);
/* It asks for a batch: its leases last longer, and those that it does not know
 * of end. */
void rank_asks(embedding_worker *s, worker_rank *r, const wire_take *m);
/* Of this process; or NULL. */
worker_rank *rank_find(const embedding_worker *s, uint64_t client);
/* Whether a later process has its place. */
int rank_is_replaced(const embedding_worker *s, uint64_t client);
/* An error if it is of none. */
int rank_check(const embedding_worker *s, uint64_t client);
/* Whether it held the batch at its last Take. */
int rank_has(const worker_rank *r, const offer *o);
/* Whether a rank of the job has it, by what the ranks said after it arrived:
 * then its update is to be expected of that one, also without a lease.  asks:
 * the rank that asks. */
int job_has(const embedding_worker *s, const worker_rank *asks,
            const offer *o);
/* Whether the rank of the batch, which alone would take it, does not any more,
 * as it takes a later one next.  m: the Take that asks, of this epoch. */
int is_passed(const embedding_worker *s, const offer *o, const wire_take *m,
              uint64_t epoch);
/* The epoch that the others of its job are in; 0: there are none. */
uint64_t rank_epoch(const embedding_worker *s, const worker_rank *of);
/* A rank says what it looks up.  *created: it had not, or otherwise. */
int rank_declare(embedding_worker *s, const wire_plan *m, uint32_t *created);

/* ---- streams.c ---- */

/* The only place that changes a stream's state. */
void stream_event(worker_stream *t, enum stream_event event);
void stream_free(worker_stream *t);
/* The same, by a job: it may take long. */
void stream_drop(embedding_worker *s, worker_stream *t);
/* NULL: it is not known. */
worker_stream *stream_named(const embedding_worker *s, uint64_t name);
/* The same, made for a job if need be. */
int stream_find(embedding_worker *s, uint64_t name, uint64_t job,
                worker_stream **out);
/* It begins again, if its loader sends once more; its batches end. */
void stream_end(embedding_worker *s, worker_stream *t);
/* Its loader is alive; what it said is done. */
void stream_hear(worker_stream *t, uint64_t settled);
/* A message of this process: whether that has the stream (now). */
int stream_is_of(embedding_worker *s, worker_stream *t, uint64_t client,
                 uint64_t settled);
/* What its loader knows. */
void stream_learn(embedding_worker *s, worker_stream *t,
                  const wire_heartbeat *m);
/* A loader asks for a stream.  *status: SUBMIT_QUEUED: it is that loader's;
 * else see submit_status. */
int stream_claim(embedding_worker *s, const wire_heartbeat *m,
                 uint32_t *status);
/* Loaders that have been silent for too long are gone. */
void streams_tick(embedding_worker *s, uint64_t now);
/* Whether its loader is there, and has said which epoch it is in. */
int stream_is_there(const worker_stream *t);

/* ---- epochs.c: of a job ---- */

/* What ranks and workers call a loader's own epoch; 0: it is not known. */
uint64_t stream_epoch(const worker_stream *t, uint64_t own);
/* That of its next batch; 0: it is not known. */
uint64_t stream_epoch_now(const worker_stream *t);
/* A rank heard the end of these here. */
void epochs_count(embedding_worker *s, worker_job *j, uint64_t over);
/* So many loaders as there are have ended it.  begun: the rank that asks had
 * batches of it. */
int epoch_is_over(const embedding_worker *s, const worker_job *j,
                  uint64_t epoch, int begun);
/* Loaders that have not ended it, and are not waited for any more. */
uint64_t epoch_silent(const embedding_worker *s, const worker_job *j,
                      uint64_t epoch);
/* The first one of which new loaders may send. */
uint64_t epoch_first(const embedding_worker *s, const worker_job *j);
/* The first one of the loaders that are there; 0: it is not known. */
uint64_t epoch_of_loaders(const embedding_worker *s, const worker_job *j);
/* That of a rank without one; 0: it is not known.  *sure: it is that also if
 * nothing of it is in the queue. */
uint64_t epoch_next(const embedding_worker *s, const worker_job *j, int *sure);
/* Whether no batch arrives before ranks have returned some to other workers:
 * a loader waits until those that it sent are trained.  none: also where no
 * loader is there. */
int epoch_is_idle(const embedding_worker *s, const worker_job *j, int none);
/* What the rank of a Take is to know of an epoch that is over:
 * [WIRE_LOADERS_MAX].  Their number.  Batches that are by place another
 * rank's are as those that a rank has: this one can never have them. */
size_t epoch_parts(const embedding_worker *s, const worker_job *j,
                   uint64_t epoch, const wire_take *m,
                   wire_loader_part *out);

/* ---- rows.c ---- */

/* PERSIA_EARG: features of one table that do not travel alike. */
int row_plan_make(const wire_plan *p, wire_memory *memory, row_plan *out);
/* Elements of the widest row. */
uint32_t row_plan_width(const worker_plan *p);
/* The ids of a batch whose stream is open. */
int row_ids_find(const worker_plan *p, const offer *o, row_ids *ids,
                 row_places *places);
void row_ids_free(row_ids *ids);
void row_places_free(row_places *places);
/* As the worker takes them: a plan of PLAN_ROWS whose keys are the tables, and
 * its batch. */
int row_ids_plan(const worker_plan *p, const offer *o, uint32_t *plan);
id_batch row_ids_batch(const worker_plan *p, const row_ids *ids);

/* ---- lineage.c ---- */

/* Asks servers whether they have other rows, and begins again if so.  The lock
 * is not held. */
int lineage_look(embedding_worker *s);
/* The same, and waits while a checkpoint is being loaded: servers differ then.
 */
int lineage_settle(embedding_worker *s);
/* A look from time to time, by a job.  The lock is held. */
void lineage_tick(embedding_worker *s, uint64_t now);

/* ---- load.c ---- */

/* Takes note of who waits.  The lock is held; called whenever that ends. */
void load_note(embedding_worker *s);
/* Adds the times that have not ended. */
void load_count(const embedding_worker *s, uint64_t now,
                embedding_worker_stats *out);

/* ---- work.c: jobs ---- */

/* Its connection to servers; the lock is not held. */
int stream_open(embedding_worker *s, worker_stream *t);
void work_declare(void *asking_of_plan);
void work_take(void *asking_of_take);
void work_return(void *asking_of_return);
void work_sums(void *asking_of_return);

/* ---- ledgers.c ---- */

/* A job: a loader's Hello: what all servers have of its stream. */
void work_hello(void *asking_of_hello);
/* A job: a Return of a batch that is not here. */
void work_unknown(void *asking_of_return);
/* A job: a Return of a batch without gradients. */
void work_skip(void *asking_of_return);
/* Whether no rank needs a batch: a loader sends again what it does not know to
 * be trained. */
int ledger_has_offer(embedding_worker *s, const offer *o, int *have);
/* Asks about those of the queue that were sent again, and ends those that
 * servers have: no rank may ask for them any more.  The lock is held. */
void ledger_settle(embedding_worker *s);

#endif
