/* private.h: what the parts of a loader share (private).
 *
 *   sender.c  sends batches, and keeps those that are not done
 *   resume.c  which batches servers have
 */
#ifndef PERSIA_LOADER_PRIVATE_H
#define PERSIA_LOADER_PRIVATE_H

#include "client/client.h"
#include "loader/loader.h"
#include "trace/trace.h"

/* The thread tells all workers that the loader is alive: it waits no longer
 * for one of them. */
#define SENDER_BEAT_NS ((uint64_t)5 * 1000000000)

/* Who has a batch. */
typedef struct placed {
    size_t at;       /* link */
    uint64_t boot;   /* of the worker there */
    uint64_t memory; /* of the stream there: see SubmitReply */
} placed;

/* A batch that may have to be sent again: all before it are not done. */
typedef struct kept {
    struct kept *next;
    uint64_t number;
    placed placed;
    trace_span trace; /* until its end is known */
    void *bytes;
    size_t bytes_n;
} kept;

struct loader_sender {
    worker_client c;
    uint64_t stream;
    pthread_mutex_t sending; /* one batch of the caller's at a time */
    pthread_mutex_t lock; /* guards all below; not held during calls */
    pthread_cond_t heard; /* of a worker */
    kept *kept, **kept_end;
    uint64_t pin;         /* number of the batch that is being sent again */
    uint64_t number;      /* of the last batch */
    uint64_t before;      /* of the last one of earlier epochs */
    uint64_t first;       /* what ranks call its first epoch; 0: not known */
    uint64_t epoch;       /* of the next batch, from 1 */
    uint64_t ends[WIRE_EPOCHS_MAX]; /* [ends_n] last batches of the epochs
                             before: of the first some batch is not done */
    size_t ends_n;
    int waits;            /* the caller, until all are done */
    uint64_t unsure;      /* numbers up to it an earlier process may have
                             sent */
    int claimed;          /* workers know that it has the stream */
    int broken;           /* the last one may have arrived or not */
    int named;            /* another sender may send the same batches */
    int replaced;         /* a load undid some that are not kept: that one
                             is to, and this one says no more */
    uint64_t none_first, none; /* numbers that have no batch: the last ones
                             that were skipped */
    uint64_t lineage;     /* of the rows that have what is done */
    window done;
    uint64_t ring[WORKER_WINDOW / 64];
    acks acked;           /* those of done that servers have, as far as it
                             knows */
    acks lost;            /* of acked, those that were counted */
    uint64_t servers, compared; /* as workers say now; when the ledgers were
                                   compared last */
    int failed;           /* a batch's error that no flush has raised; or 0 */
    char failed_text[WIRE_TEXT_MAX + 64];
    sender_counts counts;
};

/* ---- sender.c ---- */

/* Batches up to the number need not be kept.  The lock is held. */
void sender_forget(loader_sender *s, uint64_t number);

/* ---- resume.c ---- */

/* What servers have of its stream, and its epoch.  Waits up to the timeout
 * while one of them is away. */
int sender_learn(loader_sender *s, uint64_t stream);
/* A worker's Hello: see worker_client.meet. */
int sender_meet(void *owner, worker_link *l, const wire_hello_reply *m);
/* Servers may have been started again without what they had.  Asks a worker
 * that is there, and waits so long for each; if it cannot tell, a later call
 * finds out. */
void sender_compare(loader_sender *s, uint64_t timeout_ns);
/* PERSIA_EUNAVAILABLE. */
int sender_all_away(const loader_sender *s);
/* PERSIA_EREPLACED: another sender is to send what a load undid.  The lock is
 * held. */
int sender_check_replaced(const loader_sender *s);

#endif
