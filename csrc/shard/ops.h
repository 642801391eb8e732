/* ops.h: one shard, wherever it is.
 *
 * Two bodies: *direct*, the shard of this process, called without encoding
 * and without copies; *RPC*, a server's shard behind messages.  The checks of
 * an update (ledger, steps, owner of the stream, boot, lineage, ids of this
 * shard) lie below both.
 *
 * A call takes its arguments as a struct, those of the messages, and answers
 * once through done(), which may run before the call returns and on any
 * thread.  Arguments, and the memory that they point at, are borrowed until
 * then; callers hold no lock.  A call that cannot begin calls done(), too.
 */
#ifndef PERSIA_SHARD_OPS_H
#define PERSIA_SHARD_OPS_H

#include "rpc/rpc.h"
#include "table/table.h"
#include "wire/wire.h"

#include <stdatomic.h>

typedef struct shard_ref shard_ref;

typedef struct shard_reply {
    const void *message; /* the reply's struct; NULL after an error */
    /* Ends the life of the message, on any thread; NULL: done()'s return
     * does, and it points to nothing. */
    void (*release)(struct shard_reply *reply);
    void *owner;
} shard_reply;

/* The text of rc is persia_err_text() of this thread.  *reply is the callee's
 * from now on. */
typedef void (*shard_done)(void *ctx, int rc, shard_reply *reply);

/* jobs: [m->tables_n] or NULL.  The direct body writes vectors and hints
 * where they want them (ids may occur twice, and m->tables give no ids); the
 * RPC body does not know them: the reply has packed values. */
typedef struct shard_pull {
    const wire_pull *m;
    pull_job *jobs;
} shard_pull;

/* jobs: [m->tables_n] or NULL.  The direct body takes gradients as parts from
 * where they lie (m->tables give number and settings alone; of a job parts
 * and distinct are read).  Jobs are the callee's until done(); of an update
 * that is no part of a step the counts are in them, too. */
typedef struct shard_push {
    const wire_push *m;
    push_job *jobs;
    const void *raw; /* [raw_n] the message as it arrived; NULL: it did not */
    size_t raw_n;
} shard_push;

/* All that is known of a method: X(as in WIRE_METHODS, name, its request's
 * message, its reply's, its arguments, how it answers, flags, who may call
 * it).
 *
 * Arguments: PLAIN (its request's message is all) or JOBS (a struct
 * shard_<name> of the message and jobs).  It answers AT_ONCE, by a function
 * <name>_answer, or BY_ITSELF, now or later, by <name>_run (shard/private.h).
 * Who: rows of csrc/rpc/rpc.h; docs/howto/security.md shows them.
 */
#define SHARD_OPS(X)                                                          \
    X(HELLO, hello, hello, hello_reply, PLAIN, AT_ONCE, OP_STAYS, RPC_ALL)    \
    X(DECLARE, declare, declare, declare_reply, PLAIN, AT_ONCE, 0,            \
      RPC_TRAIN | RPC_READ)                                                   \
    X(PULL, pull, pull, pull_reply, JOBS, BY_ITSELF, 0, RPC_TRAIN | RPC_READ) \
    X(PUSH, push, push, push_reply, JOBS, BY_ITSELF, 0, RPC_TRAIN)            \
    X(LEAVE, leave, leave, leave_reply, PLAIN, AT_ONCE, 0, RPC_TRAIN)         \
    X(GET_ROWS, get_rows, rows, rows, PLAIN, BY_ITSELF, 0,                    \
      RPC_READ | RPC_PUBLISH)                                                 \
    X(PUT_ROWS, put_rows, rows, rows, PLAIN, BY_ITSELF, 0, RPC_ADMIN)         \
    X(SNAPSHOT, snapshot, snapshot, snapshot_reply, PLAIN, BY_ITSELF,         \
      OP_STAYS, RPC_ADMIN)                                                    \
    X(RESTORE, restore, restore, restore_reply, PLAIN, BY_ITSELF, 0,          \
      RPC_ADMIN)                                                              \
    X(STATS, stats, stats, stats_reply, PLAIN, AT_ONCE, OP_STAYS, RPC_ALL)    \
    X(CHANGES, changes, changes, changes_reply, PLAIN, BY_ITSELF, 0,          \
      RPC_PUBLISH)                                                            \
    X(MOVE, move, move, move_reply, PLAIN, AT_ONCE, OP_STAYS, RPC_ADMIN)

enum {
    OP_STAYS = 1 /* a server that stops still answers it */
};

/* The methods as a server serves them, and as a channel calls them. */
extern PERSIA_API const rpc_methods persia_shard_methods;

/* The type of a method's arguments, and its request's message among them. */
#define OP_ARGS(name, message, args) OP_ARGS_##args(name, message)
#define OP_ARGS_PLAIN(name, message) wire_##message
#define OP_ARGS_JOBS(name, message) shard_##name
#define OP_MESSAGE(name, args, a) OP_MESSAGE_##args(name, a)
#define OP_MESSAGE_PLAIN(name, a) (a)
#define OP_MESSAGE_JOBS(name, a) (((const shard_##name *)(a))->m)

typedef struct shard_ops {
#define SHARD_OP(upper, name, message, reply, args, answers, flags, who)      \
    void (*name)(shard_ref *to, const OP_ARGS(name, message, args) * a,       \
                 uint64_t deadline, shard_done done, void *ctx);
    SHARD_OPS(SHARD_OP)
#undef SHARD_OP
    /* Sends calls that were begun and wait for others, to leave together;
     * NULL: none does. */
    void (*flush)(shard_ref *to);
    /* Calls that wait end (PERSIA_ECLOSED); returns when all are done, and
     * frees the body.  The last call. */
    void (*close)(shard_ref *to);
} shard_ops;

/* The first field of a body. */
struct shard_ref {
    const shard_ops *ops;
    const char *address; /* for texts */
    int direct;
    /* RPC; 0 of the direct body: */
    _Atomic(uint64_t) message_limit; /* bytes of a request, since its Hello;
                                        0: not known */
    _Atomic(uint64_t) bytes_out, bytes_in;
};

#endif
