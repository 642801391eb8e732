/* private.h: what the parts of a client share (private).
 *
 *   client.c    small calls
 *   open.c      its beginning and end
 *   embedded.c  the shard of a client without servers
 *   servers.c   what it knows of its servers; servers that start again
 *   complete.c  updates that a process left at some servers only
 *   restores.c  rows that others replaced; mixtures
 *   fan.c       requests to several shards at once, tried again
 *   wait.c      a call of one shard
 *   rpc_shard.c   a shard behind messages
 *   peer.c      the way to one server, for its shards
 *   sums.c      gradients of a batch, summed by its index
 *   members.c   which ranks take part in the steps
 *   tables.c, pull.c, push.c, rows.c
 *
 * Every request names the boot of the server that it is meant for.  A server
 * that was started again refuses it (PERSIA_ESTALE): then the client says
 * Hello, declares its tables, and counts the updates that were acknowledged
 * and are not in the server's ledger: they are lost.
 */
#ifndef PERSIA_CLIENT_PRIVATE_H
#define PERSIA_CLIENT_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "client/client.h"
#include "client/sums.h"
#include "shard/shard.h"

/* ---- a server ---- */

typedef struct server {
    shard_ref *ref;
    char *address;          /* for texts */
    uint32_t shard;         /* its place in the list */
    pthread_mutex_t lock;   /* guards all below */
    pthread_cond_t greeted; /* greeting became 0 */
    int greeting;           /* one Hello at a time */
    uint64_t boot, lineage;
    uint64_t restore;       /* that its rows stem from; 0: of none */
    uint64_t t;             /* the highest, as its Hello said */
    uint64_t slots_rev;
    int failed;             /* the last fan_run() had not what it asked for
                               by its deadline */
    /* Updates that it said it has applied; what is settled without is
     * skipped. */
    numbers_set acked;
    /* The same, but a number that lacks counts as skipped only when it is
     * NUMBERS_WINDOW old; none above acked_gap was. */
    numbers_set acked_late;
    uint64_t acked_gap;
    /* Of its rows when the store was opened, or rows were loaded. */
    uint64_t first_boot, first_lineage;
    int foreign;            /* its rows are of another training since then */
    numbers_set first;
    uint64_t step;          /* the last sync step that it has answered, since
                               this rank joined; 0: none */
    uint32_t *numbers;      /* [TABLES_MAX] its number of each table */
} server;

/* ---- a call ---- */

enum { FAN_TEXT = 640 };

/* A call's request to one server is in one state at a time.  Its events, and
 * the state that each leads to (a blank: it cannot occur there):
 *
 *          SEND    ANSWER  PAUSE   GREET  END
 *  READY   FLYING                         DONE
 *  FLYING          CAME
 *  CAME                    PAUSED  READY  DONE
 *  PAUSED  FLYING                         DONE
 *
 * A deadline, or a caller that is interrupted, leaves the states as they are.
 */
enum request_state {
    REQUEST_READY,
    REQUEST_FLYING, /* until its callback; changes under the errand's lock */
    REQUEST_CAME,
    REQUEST_PAUSED, /* to be tried again at `at` */
    REQUEST_DONE,
    REQUEST_STATES
};

enum request_event {
    REQUEST_SEND,
    REQUEST_ANSWER,
    REQUEST_PAUSE, /* the server cannot be reached: it is sent again */
    REQUEST_GREET, /* the server is in another life: it was greeted */
    REQUEST_END,   /* accepted, refused, or another one has failed */
    REQUEST_EVENTS
};

/* The arguments of its call, at the address of the union. */
typedef union request_args {
    wire_hello hello;
    wire_declare declare;
    struct {
        shard_pull args;
        wire_pull m;
    } pull;
    struct {
        shard_push args;
        wire_push m;
    } push;
    wire_leave leave;
    wire_rows rows;
    wire_changes changes;
    wire_stats stats;
} request_args;

/* Replies that end with done(). */
typedef union request_reply {
    wire_pull_reply pull;
    wire_push_reply push;
    wire_rows rows;
    wire_changes_reply changes;
} request_reply;

typedef struct request {
    struct call *call;
    server *to;
    size_t index;
    uint64_t expects; /* bytes of its reply, about; 0: few */
    enum request_state state;
    uint32_t method;
    int rc;
    unsigned tries, repairs;
    uint64_t at;
    uint64_t recovered; /* what the server had done of its recovery when it
                           was asked last, and 1; 0: it was not asked */
    wire_caller caller; /* as it was sent */
    request_args args;
    shard_reply reply;
    request_reply kept; /* its message, or nothing */
    char text[FAN_TEXT]; /* of rc */
} request;

/* All that one call of the user needs; kept for the next one.  The memory
 * that requests point to is in here, so a caller that gives up leaves it
 * behind to the callbacks; the last one ends the call. */
typedef struct call {
    struct call *next;
    ps_client *r;
    errand errand; /* its lock guards the states FLYING and CAME, too */
    /* Called once at the end of the call, by the caller or, if it has gone,
     * by the last callback; NULL: nothing. */
    void (*ended)(struct call *k);
    uint64_t number, step; /* push: of its update, for ended() */
    request *requests;
    size_t requests_n, requests_room;
    batch_index *index; /* its reference, or NULL */
    mem_buffer lists, messages, segments, rows, narrow;
} call;

call *call_take(ps_client *r);
/* The end of the call; its results are not used any more. */
void call_give(call *k);
void call_free(call *k);

/* What all requests of a fan-out have in common. */
typedef struct fan {
    uint32_t method;
    /* Fills in q->args.  It may be asked again. */
    void (*fill)(void *ctx, request *q);
    /* Its reply, on the caller's thread.  PERSIA_EUNAVAILABLE: try again. */
    int (*accept)(void *ctx, request *q);
    void *ctx;
    int fresh; /* no boot is known yet (Hello): refusals are final */
    uint64_t limit_ns; /* for texts: its deadline; 0: the client's timeout */
} fan;

/* Requests for the servers to[0..n); NULL: all. */
int fan_prepare(call *k, server *const *to, size_t n);
/* Sends the requests all at once and waits for all.  Servers that cannot be
 * reached are tried again until the deadline; one that was started again is
 * greeted first.  Once a request has failed for good no other is tried
 * again; the result is that of the first one that failed. */
int fan_run(call *k, const fan *f, uint64_t deadline);

/* ---- rows.c ---- */

/* A request about a table to one shard; what: names it in an error. */
int client_ask_shard(ps_client *r, const char *what, uint32_t no,
                     uint32_t shard, fan *f);

/* ---- embedded.c ---- */

typedef struct embedded {
    shard *shard;
    job_ends ends;
} embedded;

int embedded_create(tables *tables, embedded **out);
/* See persia_job_ends_wait(). */
int embedded_end_jobs(embedded *e);
/* When its refs are closed and its jobs have ended. */
void embedded_destroy(embedded *e);

/* ---- the client ---- */

/* Bytes of the indexes of batches, see index_pool. */
#define INDEX_BYTES ((size_t)128 << 20)

/* What is known of the servers' restores. */
enum restores {
    RESTORES_ONE,    /* all rows stem from one */
    RESTORES_UNSURE, /* another client restores, or has done so */
    RESTORES_MIXED   /* a restore has reached some servers: nothing of this
                        store has begun */
};

typedef struct witness witness;

struct ps_client {
    sched *s; /* the client's */
    embedded *embedded; /* its own shard, which has the threads s; or NULL */
    void *owner;        /* of what it uses; release(owner) ends that */
    void (*release)(void *owner);
    index_pool indexes; /* has a lock of its own */
    server **servers; /* [servers_n] by shard */
    uint32_t servers_n;
    server **twice; /* [twice_n] not used: see open_drop_twice() */
    uint32_t twice_n;
    char name_space[WIRE_NAME];
    uint32_t rank, world;
    uint64_t client;
    int shared; /* see client_config */
    _Atomic(uint64_t) stream;      /* of its updates; 0: it makes none */
    _Atomic(uint64_t) incarnation; /* that it has claimed the stream with */
    uint64_t timeout_ns, message_limit;
    uint32_t dtype;
    enum client_lost policy;

    persia_turn declaring; /* one new table at a time */
    /* Slots below tables_n never change: readers need no lock. */
    table_config *tables[TABLES_MAX];
    _Atomic(uint32_t) tables_n;
    _Atomic(uint8_t) dropped[TABLES_MAX]; /* set under `declaring` */

    pthread_mutex_t lock;      /* guards all below */
    uint32_t tables_declared;  /* tables_n, or one more */
    numbers_set settled;       /* updates of this stream that are through */
    uint64_t last_number;      /* that any server had at its Hello */
    uint64_t next_number;      /* for updates without one: the last given */
    uint64_t t_base, t_number; /* the t, and the number, before the first */
    uint64_t told;             /* the last number when losses were counted:
                                  servers pass over what they lack up to it */
    uint32_t moves;            /* times it has joined or left the sync steps */
    int joined;                /* it takes part in them */
    uint64_t joined_step;      /* the one before its next */
    uint8_t left[SYNC_RANKS];  /* 1: a server told that this rank has left */
    char lost_text[FAN_TEXT];  /* not told yet; "": none */
    int lost_code;             /* of lost_text */
    uint64_t lost_elsewhere;   /* not raised yet: see witness.c */
    const server *never_had;   /* of them: it has lost nothing; or NULL */
    witness *witnesses;        /* a stream each */
    uint64_t replaced_by;      /* the restore that was counted last */
    uint64_t replaced_lost;    /* updates that went with it */
    call *calls;               /* free */

    persia_turn comparing;     /* one thread looks at all servers */
    _Atomic(int) restores;     /* enum restores */
    _Atomic(uint64_t)
        restored_number;       /* see persia_client_restored_number() */
    _Atomic(int) loading;      /* see persia_client_set_loading() */
    _Atomic(int) ends;         /* enum client_end; 0: it does not */
    _Atomic(uint64_t) updates; /* of shard 0 */
    _Atomic(unsigned) held;    /* calls that have waited for HELD_NS */
    _Atomic(uint64_t) held_at; /* when the first of them began */
    /* Updates of an earlier life of the rank that servers do not have, nor
     * will have: the next update sends empty ones in the place of those that
     * others have, then they count as lost. */
    _Atomic(uint64_t) missing;
    _Atomic(int) resumed; /* a checkpoint was loaded, which reports them */
    persia_turn completing; /* one does that at a time */
    struct {
        _Atomic(uint64_t) pulls, pushes, ids, distinct, retries, duplicates,
            reconnects, lost, stale;
    } counts;
};

/* The longest between two tries. */
#define PAUSE_MAX_NS ((uint64_t)1000000000)

uint64_t client_deadline(const ps_client *r);
/* The client, as this server knows it. */
wire_caller server_caller(const ps_client *r, server *to);
/* Says Hello again to a server whose boot is `boot` no longer. */
int server_repair(ps_client *r, server *to, uint64_t boot, uint64_t deadline);
/* Whether the server applies its log, and has made progress since it was asked
 * last; *recovered is what it said then, or 0. */
int server_recovers(const ps_client *r, const server *to, uint64_t *recovered);
/* The server's number of a table. */
uint32_t server_table(server *to, uint32_t no);
/* Counts updates that a restarted server does not have. */
void client_note_lost(ps_client *r, const server *to, uint64_t lost);
/* The same, of updates that embedding workers made; never: a server that lacks
 * some and has lost nothing, or NULL. */
void client_note_elsewhere(ps_client *r, uint64_t lost, const server *never);
/* Whether it has all that it had since the store was opened, or rows were
 * loaded; its lock is held. */
int server_has_lost_nothing(const server *to, const wire_hello_reply *m);
/* Adds what persia_client_tell_lost() tells. */
void client_note_text(ps_client *r, const char *text);
/* How many updates it had acknowledged and that are not in `there`; its lock
 * is held. */
uint64_t server_acked_beyond(const server *to, const window *there);

/* A server's Hello of a stream; without tables and slots. */
int client_ask_ledger(const ps_client *r, server *to, uint64_t stream,
                      uint64_t deadline, wire_hello_reply *out);

/* ---- witness.c ---- */

/* Counts the updates of persia_client_witness() that a server lacks. */
int client_compare_witnesses(ps_client *r, uint64_t deadline);
/* Forgets all of them. */
void client_witnesses_end(ps_client *r);

/* ---- complete.c ---- */

/* How many updates of this stream up to `last` servers lack that others have
 * (those that several lack count as often). */
uint64_t count_missing(ps_client *r, uint64_t last);
/* Sends empty updates in the place of those, see `missing`. */
int complete_own(ps_client *r, uint64_t deadline);

/* ---- restores.c ---- */

/* Another client put rows of `restore` in the place of those of a server, and
 * with them so many updates went. */
void client_note_replaced(ps_client *r, const server *to, uint64_t restore,
                          uint64_t lost);
/* Notes whether all servers have rows of one restore. */
void client_compare_restores(ps_client *r);
/* A load has ended, maybe cut short: where the rows that this client has seen
 * meanwhile stem from different restores, the next call looks again. */
void client_note_mixture(ps_client *r);
/* PERSIA_EINCOMPLETE unless they have.  Servers are asked only if they had
 * not before.  named: for an update, whose number is that of a store which
 * found a mixture when it opened: it is refused without a look. */
int client_check_mixture(ps_client *r, int named);
/* What a greeting is for. */
enum greet_reason {
    GREET_REPAIR,  /* the stream stays as it is */
    GREET_NUMBERS, /* it continues after what servers have */
    GREET_LOADED   /* rows were loaded: what was lost before does not count */
};
/* *last: the largest number that any server has. */
int client_greet_each(ps_client *r, enum greet_reason reason, uint64_t *last);
/* PERSIA_EPROTOCOL, naming the server. */
int server_bad_reply(const server *from, const char *what);
int client_find_table(const ps_client *r, uint32_t no,
                      const table_config **out);

/* Hello and Declare, for a fan-out and for one server. */
enum claim { CLAIM_LOOK, CLAIM_STREAM };
wire_hello make_hello(const ps_client *r, enum claim claim);
int check_hello(const ps_client *r, const server *from,
                const wire_hello_reply *m);
/* Without what ends with the reply: tables, slots and shards. */
void hello_copy(wire_hello_reply *to, const wire_hello_reply *from);
/* Takes on what a Hello said; the server's lock is held. */
void server_learn(server *to, const wire_hello_reply *m);
void client_learn(ps_client *r, const wire_hello_reply *m);
/* One server is greeted by one thread at a time.  poll: the wait may be
 * interrupted (PERSIA_EINTR; then it has not begun). */
int greeting_begin(server *to, int poll);
void greeting_end(server *to);

/* ---- shards ---- */

/* Calls a method by its number, see persia_shard_wait(): once shard_flush()
 * follows, with others that were queued; or at once. */
void shard_queue(shard_ref *to, uint32_t method, const void *arguments,
                 uint64_t deadline, shard_done done, void *ctx);
void shard_flush(shard_ref *to);
void shard_begin(shard_ref *to, uint32_t method, const void *arguments,
                 uint64_t deadline, shard_done done, void *ctx);
/* Of the struct of a method's reply. */
size_t shard_reply_bytes(uint32_t method);
/* PERSIA_ELIMIT if a request is over the server's limit. */
int shard_check_size(const shard_ref *to, size_t bytes);
/* persia_client_create() over given shards, for tests.  refs: [addresses],
 * taken over, also on failure. */
int client_over(const client_config *config, shard_ref *const *refs,
                ps_client **out);

/* See persia_client_set_t(); number: the update before the first. */
void client_set_t_after(ps_client *r, uint64_t base, uint64_t number);
/* The highest t that a Hello said. */
uint64_t client_servers_t(ps_client *r);

/* ---- members.c ---- */

/* What the answer to a part says of other ranks; moves: when it was named. */
void sync_note_left(ps_client *r, uint32_t moves, const wire_push_reply *m);
/* Says to a server that was started again which ranks take part in sync steps:
 * this rank, and not those that have left. */
int sync_join_again(ps_client *r, server *to, wire_caller who,
                    uint64_t deadline);

#endif
