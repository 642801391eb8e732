/* private.h: what the parts of the service share (private).
 *
 *   service.c        life, requests to handlers, Hello, Declare, Stats
 *   service_pull.c   Pull
 *   service_push.c   Push: from messages to jobs, exactly once
 *   service_wait.c   what waits: parts of steps, pulls; Leave; the timer
 *   service_rows.c   GetRows, PutRows
 *   snapshot.c, restore.c   the requests of these names; admin.c: folders
 *                    and threads for them
 *
 * Order of locks: admin_lock, the shard's gate, wait_lock, the ledger's.
 */
#ifndef PERSIA_SERVER_PRIVATE_H
#define PERSIA_SERVER_PRIVATE_H

#include "server/buffers.h"
#include "shard/shard.h"
#include "server/server.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    PARKED_MAX = 1024, /* pulls, and copies of updates */
    PARTS_MAX = PARKED_MAX + SYNC_RANKS, /* with parts of steps */
    REFUSED_MAX = 64, /* that are remembered */
    TAKEN = -1         /* a handler's: it answers the call itself */
};

/* An answer that is being made. */
typedef struct answer {
    wire_out o;
    buffer *bulk; /* what o points into, or NULL */
} answer;

/* A pull that waits for an update. */
typedef struct parked {
    struct parked *next;
    rpc_call *call;
    uint64_t until; /* of clock_ns() */
    wire_memory memory; /* of m and of this */
    wire_pull m;
} parked;

/* An update that counts as applied, but failed here.  Who asks again, for the
 * answer was lost, must not be told that it was applied. */
typedef struct refusal {
    uint64_t stream, number; /* number 0: none */
    int code;
    char text[512];
} refusal;

struct ps_service {
    ps *p;
    char name_space[WIRE_NAME];
    uint32_t shard, shards;
    uint64_t message_limit; /* bytes */
    uint64_t boot, born;    /* born: of clock_ns() */
    _Atomic(uint64_t) lineage; /* changes under the gate, held exclusively */
    _Atomic(uint64_t) restored; /* the id of that restore; as lineage */
    ledger *ledger;
    buffers *buffers;
    _Atomic(int) closed;
    _Atomic(uint32_t) calls; /* see service_set_calls() */
    _Atomic(uint64_t) pulls, pushes, duplicates, failed;

    pthread_mutex_t declare_lock; /* one Declare at a time; guards writes: */
    /* of all shards, as declared; set before its table can be seen */
    _Atomic(uint64_t) capacity[PS_TABLES_MAX];

    pthread_mutex_t wait_lock; /* guards: */
    sync_steps sync;           /* parts are push_calls */
    uint32_t world;            /* of the rank that joined last */
    parked *parked;            /* in no order */
    uint32_t parked_pulls;     /* how many these are */
    refusal refused[REFUSED_MAX]; /* the last ones */
    uint64_t refused_n;        /* all that were put there */
    _Atomic(uint32_t) parked_n; /* those and copies of updates under way */
    uint64_t wake_at;          /* when the timer looks; UINT64_MAX: never */
    int stop;
    pthread_cond_t wake;
    pthread_t timer;
    int timer_runs;

    pthread_mutex_t admin_lock; /* guards: */
    int checkpoints;            /* the open folder, or -1 */
    struct snapshot *snapshot;  /* NULL: none */
    struct restore *restore;    /* NULL: none */
    uint32_t writers, readers;  /* threads of theirs that still run */
    pthread_cond_t ended;       /* one of them has */
};

/* ---- service.c ---------------------------------------------------------- */

/* A handler fills in the answer, fails, or returns TAKEN: then the call and
 * the memory are its own. */
typedef int (*handler)(ps_service *s, rpc_call *call, wire_memory *memory,
                       answer *a);
/* Answers a call: rc, or what is in `a` (which is empty afterwards). */
void service_answer(ps_service *s, rpc_call *call, int rc, answer *a);
void answer_free(answer *a);
/* PERSIA_ESTALE unless the caller means this life of the server, and
 * (service_check_rows) these rows. */
int service_check_boot(const ps_service *s, const wire_caller *caller);
int service_check_rows(const ps_service *s, const wire_caller *caller);
int service_is_stale(const ps_service *s, const wire_caller *caller);
ledger_owner service_owner(const wire_caller *caller);
/* The table of a number. */
int service_table(const ps_service *s, uint32_t no, table **out);
/* PERSIA_EARG if an id belongs to another shard. */
int service_check_ids(const ps_service *s, const table *t,
                      const uint64_t *ids, size_t n);
/* PERSIA_ELIMIT if a message of so many bytes would be too large. */
int service_check_bytes(const ps_service *s, const char *what,
                        uint64_t bytes);
/* PERSIA_EDENIED unless the call may do administration. */
int service_check_admin(const rpc_call *call, const char *what);
int service_random(uint64_t *out); /* not 0 */

/* ---- handlers ----------------------------------------------------------- */

int handle_pull(ps_service *s, rpc_call *call, wire_memory *memory,
                answer *a);
int handle_push(ps_service *s, rpc_call *call, wire_memory *memory,
                answer *a);
int handle_leave(ps_service *s, rpc_call *call, wire_memory *memory,
                 answer *a);
int handle_get_rows(ps_service *s, rpc_call *call, wire_memory *memory,
                    answer *a);
int handle_put_rows(ps_service *s, rpc_call *call, wire_memory *memory,
                    answer *a);
int handle_snapshot(ps_service *s, rpc_call *call, wire_memory *memory,
                    answer *a);
int handle_restore(ps_service *s, rpc_call *call, wire_memory *memory,
                   answer *a);

/* Reads what a pull asks for. */
int pull_answer(ps_service *s, const wire_pull *m, wire_memory *memory,
                answer *a);

/* ---- service_push.c and service_wait.c ---------------------------------- */

/* A push in hand.  It lies in its own memory. */
typedef struct push_call {
    ledger_waiter waiter; /* first: a copy that waits for another */
    rpc_call *call;
    wire_memory memory;
    wire_push m;
    ledger_key key;
} push_call;

/* Answers with an error, or with a reply, and frees. */
void push_fail(ps_service *s, push_call *c, int code, const char *text);
void push_reply(ps_service *s, push_call *c, const wire_push_reply *reply);
void push_reply_status(ps_service *s, push_call *c, uint32_t status);
/* What the ledger says about an update that is not new. */
void push_reply_state(ps_service *s, push_call *c, enum ledger_state state);
/* Applies n whole updates' parts as one (the parts of a step in the order of
 * their ranks; or one update), and answers. */
void push_apply(ps_service *s, push_call **parts, uint32_t n);

/* Counts one more that is parked; 0 if there are `most` already. */
int wait_room(ps_service *s, uint32_t most);
/* Opens the stream of a Hello; a part of a step that waits and is of another
 * client in this stream is sent back. */
int wait_open(ps_service *s, const wire_hello *m, wire_ledger *out);
/* A part of a step: waits, or applies the step. */
void wait_part(ps_service *s, push_call *c);
/* Parks a pull until its update is through: TAKEN; PERSIA_OK if it need not
 * wait.  An update may fail, or never come, so a pull waits for a second, then
 * its client asks again and knows better. */
int wait_pull(ps_service *s, rpc_call *call, wire_memory *memory,
              const wire_pull *m);
/* An update in the ledger that was not applied; then what is known of it: its
 * code and text ([room]), or PERSIA_OK. */
void wait_note_refused(ps_service *s, const ledger_key *key, int code,
                       const char *text);
int wait_was_refused(ps_service *s, const ledger_key *key, char *text,
                     size_t room);
/* The step was applied (with the gate held), or is not any more. */
void wait_applied(ps_service *s, uint64_t step);
void wait_failed(ps_service *s);
/* Answers pulls that need not wait any more, applies steps that are whole:
 * after the above and after ranks have moved, without locks. */
void wait_go_on(ps_service *s);
/* Fails all that waits. */
void wait_drop(ps_service *s, int code, const char *text);
/* Takes on a step and forgets refusals, with the gate held exclusively. */
void wait_set_step(ps_service *s, uint64_t step);
uint64_t wait_step(ps_service *s);
/* Ranks of a world that take no part in steps, in `memory`: [*n]; NULL and 0
 * if there are none (or no memory for them). */
uint64_t *wait_left(ps_service *s, uint32_t world, wire_memory *memory,
                    size_t *n);
/* The timer looks at everything at once. */
void wait_poke(ps_service *s);
int wait_start(ps_service *s);
void wait_end(ps_service *s);

/* ---- admin.c, snapshot.c, restore.c ------------------------------------- */

enum { PROOF = sizeof ((wire_snapshot *)0)->proof };

/* Opens <checkpoints>/<root>/<folder>, which must be plain names and no
 * links, and compares the content of .proof there. */
int folder_open(const ps_service *s, const char *root, const char *folder,
                const char *proof, int *out);

/* Drops what nobody has asked about for long; the time at which to look
 * again. */
uint64_t snapshot_expire(ps_service *s, uint64_t now);
uint64_t restore_expire(ps_service *s, uint64_t now);
/* Stops and forgets; the threads may run on for a while. */
void snapshot_drop_locked(ps_service *s);
/* The same, if its job is no more, as far as one who uses a root can know. */
void snapshot_drop_abandoned_locked(ps_service *s, const char *root);
void restore_drop_locked(ps_service *s);
/* Stops both and waits until they have stopped. */
void admin_end(ps_service *s);

#endif
