/* private.h: what the parts of a shard share (private).
 *
 *   shard.c    life, checks that several calls share, cuts and exchanges
 *   direct.c   the direct body: from shard_ops to the functions below
 *   hello.c    Hello, Declare, Stats
 *   lookup.c   pulls
 *   updates.c  pushes: from messages to jobs, exactly once
 *   waits.c    what waits: parts of steps, pulls; Leave; the tick
 *   groups.c   parts of updates of several batches
 *   rows.c     whole rows
 *   changes.c  what changed since a reader asked last
 *   logged.c   what goes into the log, answers that wait for it
 *   replay.c   records, applied again
 *   moving.c   a shard that is about to be another server's
 *   copy.c     its parts on the way there; arrive.c takes them
 *   job.c      snapshots and restores: states and requests; job_snapshot.c
 *              writes, job_restore.c reads and exchanges
 *   ends.c     waiting for the threads of snapshots and restores at the end
 *   ops.c      the methods
 *
 * Order of locks: that of the jobs, the tables' gate, wait_lock, the ledger's.
 */
#ifndef PERSIA_SHARD_PRIVATE_H
#define PERSIA_SHARD_PRIVATE_H

#include "shard/job.h"
#include "shard/logged.h"
#include "shard/shard.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    SLOTS_REV = 1, /* of all shards, as long as no slot moves */
    PARKED_MAX = 1024, /* pulls, and copies of updates */
    PARTS_MAX = PARKED_MAX + SYNC_RANKS, /* with parts of steps */
    GROUPS_ENDED = 1024 /* that are remembered */
};

_Static_assert((int)TABLES_MAX == (int)WIRE_TABLES_MAX,
               "a message names any table of a shard");

/* ---- calls -------------------------------------------------------------- */

/* The direct body. */
typedef struct direct {
    shard_ref ref; /* first */
    shard *s;
    _Atomic(uint32_t) users; /* the owner, and calls that are not answered */
    /* Calls that would wait fail so; guarded by the shard's wait_lock. */
    int refused;
    const char *refused_text;
    pthread_mutex_t lock; /* guards: */
    int ended;            /* users is 0 */
    pthread_cond_t end;
} direct;

typedef struct shard_call {
    direct *from;
    uint64_t deadline; /* of the shard's clock */
    shard_done done;
    void *ctx;
} shard_call;

/* Answers the call; nothing of it may be used afterwards. */
void call_end(const shard_call *c, int rc, shard_reply *reply);
void call_fail(const shard_call *c, int code, const char *text);
/* rc, whose text is persia_err_text(), or a message that ends with done(). */
void call_reply(const shard_call *c, int rc, const void *message);
/* rc, and then the reply is freed, or it. */
void call_own(const shard_call *c, int rc, shard_reply *reply);

/* An answer with bulk data.  It lies in its own memory. */
typedef struct answer {
    wire_memory memory;
    void *bulk;   /* what the message points to, or NULL */
    union {
        wire_pull_reply pull;
        wire_rows rows;
        wire_changes_reply changes;
    } m;
} answer;
int answer_make(answer **out);
/* Gives it to the caller, who frees it; or, with an error, frees it. */
void answer_give(const shard_call *c, int rc, answer *a);

/* A pull that waits for an update. */
typedef struct parked {
    struct parked *next;
    shard_call call;
    uint64_t until;
    const shard_pull *a;
} parked;

/* A push that runs: on the stack of the call, or, where it waits, kept. */
typedef struct push_call {
    ledger_waiter waiter; /* first: a copy that waits for another, or the
                             head of a part's copies: wait_begin_locked() */
    shard_call call;
    const wire_push *m;
    push_job *jobs; /* see shard_push, and: */
    const void *raw;
    size_t raw_n;
    ledger_key key;
    ledger_flight flight; /* the ledger's, unless it is FLIGHT_NONE */
    /* Why it is not applied, of this part alone: */
    enum ledger_state state; /* other than LEDGER_NEW */
    int stale;               /* its sender knows other rows */
    struct push_call *kept; /* itself, or NULL: it lies on the stack */
} push_call;

/* Of the parts of an update of several batches. */
typedef struct group group;
/* Of a shard that moves (copy.c). */
typedef struct shard_copy shard_copy;

/* Who reads the changes of tables (changes.c). */
typedef struct readers {
    pthread_mutex_t lock; /* guards: */
    struct changes_reader *of; /* [n] */
    size_t n;
} readers;
void readers_init(readers *r);
void readers_free(readers *r);
/* Forgets those that have not asked for ten minutes. */
void readers_drop_silent(readers *r);

/* ---- the shard ---------------------------------------------------------- */

/* Whether a shard has its rows.  A restore in place empties its tables before
 * it reads their rows.  The events, and the state that each leads to (a blank:
 * it cannot occur there):
 *
 *              EMPTY      FILL     LACK        STOP
 *  WHOLE       REPLACING  WHOLE
 *  REPLACING              WHOLE    INCOMPLETE  INCOMPLETE
 *  INCOMPLETE  REPLACING  WHOLE    INCOMPLETE
 */
enum rows_state {
    ROWS_WHOLE,
    ROWS_REPLACING,  /* a job is about to fill tables that are empty */
    ROWS_INCOMPLETE, /* there are such tables, and no job fills them */
    ROWS_STATES
};
enum rows_event {
    ROWS_EMPTY, /* a restore has emptied its tables */
    ROWS_FILL,  /* the rows of a restore are in use, and no table lacks its */
    ROWS_LACK,  /* they are, and another table lacks its rows still */
    ROWS_STOP,  /* a restore that has emptied tables fails, or is dropped */
    ROWS_EVENTS
};

struct shard {
    tables *p;
    shard_env env;
    char name_space[WIRE_NAME];
    uint32_t no, shards;
    uint64_t message_limit; /* bytes */
    uint64_t boot, born;    /* born: of the clock */
    _Atomic(uint64_t) lineage; /* changes under the gate, held exclusively */
    _Atomic(uint64_t) restored; /* the id of that restore; as lineage */
    ledger *ledger;
    mem_pool *blocks; /* of answers, and of widened gradients */
    _Atomic(uint32_t) calls; /* see persia_shard_set_calls() */
    pthread_mutex_t here_lock; /* guards: */
    uint64_t *here;            /* [here_n] see persia_shard_set_here() */
    size_t here_n;
    int beside;                /* another shard there says the memory */
    _Atomic(uint64_t) pulls, pushes, duplicates, failed;
    _Atomic(int) hold; /* enum shard_hold; changes under the gate, held
                          exclusively, and wait_lock */
    shard_copy *copy;  /* or NULL; of the thread that moves it */

    updates_log *log; /* or NULL */
    int replaying;    /* from the beginning of a shard with a log on, until
                         persia_shard_replay() is through */
    log_progress replayed;
    _Atomic(int) recovers; /* the same, until persia_shard_ready() */
    pthread_mutex_t late_lock; /* guards: */
    late_answer *late;         /* in no order */

    pthread_mutex_t declare_lock; /* one Declare at a time; guards writes: */
    uint32_t logged_tables; /* that the log has */
    /* of all shards, as declared; set before its table can be seen */
    _Atomic(uint64_t) capacity[TABLES_MAX];

    pthread_mutex_t wait_lock; /* guards: */
    sync_steps sync;           /* parts are push_calls */
    uint32_t world;            /* of the rank that joined last */
    parked *parked;            /* in no order */
    uint32_t parked_pulls;     /* how many these are */
    group *groups;
    uint32_t groups_n;
    uint64_t ended_groups[GROUPS_ENDED]; /* the last ones */
    uint64_t ended_groups_n;
    _Atomic(uint32_t) parked_n; /* those and copies of updates in flight */
    uint64_t wake_at;          /* when the tick is due; UINT64_MAX: never */

    /* Tables that a restore in place has emptied and not filled; written under
     * the gate, held exclusively. */
    uint8_t is_emptied[TABLES_MAX];
    _Atomic(int) rows; /* enum rows_state; changes with jobs.lock held */
    jobs jobs;
    readers readers;
};

/* A call of this process, which is answered through done(). */
shard_call direct_call_begin(shard_ref *to, uint64_t deadline,
                             shard_done done, void *ctx);

/* ---- shard.c ------------------------------------------------------------ */

/* PERSIA_EUNAVAILABLE while a restore replaces rows in place, and
 * PERSIA_EINCOMPLETE if it failed. */
int check_whole(const shard *s);
/* persia_shard_check_boot(), and the rows that the caller knows. */
int check_lineage(const shard *s, const wire_caller *caller);
/* Both. */
int check_rows(const shard *s, const wire_caller *caller);
int is_stale(const shard *s, const wire_caller *caller);
/* moving.c: PERSIA_EUNAVAILABLE while it moves; always that. */
int check_stays(const shard *s);
int refuse_moving(void);
ledger_owner owner_of(const wire_caller *caller);
/* hello.c: a table as it was declared.  One that was dropped has a name of its
 * own. */
void hello_spec(const shard *s, uint32_t no, table_spec *out);
/* The table of a number. */
int find_table(const shard *s, uint32_t no, table **out);
/* PERSIA_EARG if an id belongs to another shard; on all threads. */
int check_ids(const shard *s, const table *t, const uint64_t *ids, size_t n);
int check_ids_here(const shard *s, const table *t, const uint64_t *ids,
                   size_t n); /* on this thread */

/* ---- methods ------------------------------------------------------------ */

/* AT_ONCE: the answer is a message in *out and `memory`. */
#define ANSWERS_AT_ONCE(name, message, reply, args)                           \
    int name##_answer(shard *s, const wire_##message *m,                      \
                      wire_memory *memory, wire_##reply *out);
#define ANSWERS_BY_ITSELF(name, message, reply, args)                         \
    void name##_run(shard *s, const shard_call *c,                            \
                    const OP_ARGS(name, message, args) * a);
#define METHOD(upper, name, message, reply, args, answers, flags, who)        \
    ANSWERS_##answers(name, message, reply, args)
SHARD_OPS(METHOD)
#undef METHOD
/* A pull that need not wait, or has waited. */
void pull_answer(shard *s, const shard_call *c, const shard_pull *a);

/* ---- updates.c and waits.c ---------------------------------------------- */

/* Answers with an error, or with a reply, and frees. */
void push_fail(push_call *c, int code, const char *text);
void push_reply(shard *s, push_call *c, const wire_push_reply *reply);
void push_reply_status(shard *s, push_call *c, uint32_t status);
/* What the ledger says about an update that is not new. */
void push_reply_state(shard *s, push_call *c, enum ledger_state state);
/* Off the stack, unless it is; NULL: it was answered that there is no
 * memory. */
push_call *push_keep(const push_call *c);
/* Whether its tables, settings, ids and clocks are those of this shard. */
int push_check(const shard *s, const shard_push *a);
/* Answers the parts of an update, and the copies that wait; `reply`: to the
 * first part. */
void push_answer_all(shard *s, push_call **parts, uint32_t n,
                     const err_kept *why, const wire_push_reply *reply);
/* Applies n whole updates' parts as one (the parts of a step in the order of
 * their ranks; or one update), and answers.  Parts that were applied or
 * settled before are answered so, and the others are applied without them. */
void push_apply(shard *s, push_call **parts, uint32_t n);

/* Counts one more that is parked; 0 if there are `most` already. */
int wait_room(shard *s, uint32_t most);
/* Opens the stream of a Hello; a part of a step that waits and is of another
 * client in this stream is sent back. */
int wait_open(shard *s, const wire_hello *m, wire_hello_reply *out);
/* Whether an embedding worker sends a part for an earlier process of its rank.
 */
int wait_is_of_former_locked(const shard *s, const push_call *c);
/* A part of a step: waits, or applies the step. */
void wait_part(shard *s, const push_call *part);
/* A part of a group, likewise. */
void wait_group(shard *s, const push_call *part);
/* One that will not be sent. */
int wait_pass(shard *s, const wire_leave *m);
/* Whether calls of this ref may not wait any more.  Here and below, up to the
 * next comment that says otherwise, wait_lock is held. */
int wait_refuses_locked(const direct *from);
/* The tick is due at this time, or before. */
void wait_wake_locked(shard *s, uint64_t at);
/* Marks parts as in flight in the ledger: from now on copies of them wait for
 * their answers.  One that the ledger has meanwhile, or refuses, has its state
 * and is not in flight.  If it fails none is in flight, and the copies that
 * each part got meanwhile are chained to its waiter. */
int wait_begin_locked(shard *s, void **parts, uint32_t n);
/* When the first of the groups, or of their parts, is late. */
uint64_t groups_deadline_locked(const shard *s);
/* The parts of a group of which one is late, or (from) is of this ref; now of
 * UINT64_MAX: of any group, which is forgotten.  NULL: there is none. */
void **groups_take_locked(shard *s, uint64_t now, const direct *from,
                          uint32_t *n);
/* The parts of a group of which the rank of one has another process now; or
 * NULL. */
void **groups_take_former_locked(shard *s, uint32_t *n);
/* Without the lock: the update of a group was not applied, and its parts may
 * be sent again.  0: nothing. */
void groups_failed(shard *s, uint64_t id);
/* Frees the groups that are left, but not their parts. */
void groups_free(shard *s);
/* Applies parts that were begun, or fails them with rc.
 * The array is freed. */
void wait_apply(shard *s, void **parts, uint32_t n, int rc);
/* *waits: the pull is parked until its update is through.  An update may fail,
 * or never arrive, so a pull waits for a second, then its client asks
 * again. */
int wait_pull(shard *s, const shard_call *c, const shard_pull *a, int *waits);
/* The step was applied (with the gate held), or is not any more. */
void wait_applied(shard *s, uint64_t step);
void wait_failed(shard *s);
/* Answers pulls that need not wait any more, applies steps that are whole:
 * after the above and after ranks have moved, without locks. */
void wait_go_on(shard *s);
/* Fails all that waits: with PERSIA_ESTALE parts are answered
 * PUSH_STALE_LINEAGE. */
void wait_drop(shard *s, int code, const char *text);
/* Takes on a step and forgets groups, with the gate held exclusively. */
void wait_set_step(shard *s, uint64_t step);
uint64_t wait_step(shard *s);
/* Ranks of a world that take no part in steps: [*n], the caller's by free();
 * NULL and 0 if there are none (or no memory for them). */
uint64_t *wait_left(shard *s, uint32_t world, size_t *n);

#endif
