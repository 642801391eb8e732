/* client.h: the tables of a store, wherever their shards are.
 *
 * The batcher, the loop and py know tables by number through this object
 * alone.  It knows shards by references (see ops.h): of a server, of this
 * process, or both.  A call finds the distinct ids of each table in the batch,
 * sends every shard its own in one message for all tables (lookups of
 * megabytes: in a few), and puts the answers where the jobs want them.  An
 * *embedded* client has the one shard of its store, which is given the jobs as
 * they are.  Same jobs, same bits.
 *
 * All functions may be called from any thread; persia_client_destroy() must be
 * last. Calls wait at most `timeout_ns` in all, retries included, poll
 * persia_interrupt_poll(), and name the server in their errors.  An embedded
 * client does not wait.
 */
#ifndef PERSIA_CLIENT_H
#define PERSIA_CLIENT_H

#include "ids/ids.h"
#include "shard/shard.h"
#include "rpc/rpc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_client ps_client;

/* An embedded client, with a shard of its own over these tables, which must
 * outlive it. */
PERSIA_API int persia_client_embedded(tables *tables, ps_client **out);
/* The same with tables of its own. */
PERSIA_API int persia_client_create_embedded(const tables_config *config,
                                             ps_client **out);

/* What to do about updates that a server had acknowledged and then lost (it
 * was killed and started again from its last snapshot). */
enum client_lost { LOST_RAISE, LOST_CONTINUE };

typedef struct client_config {
    unsigned threads;         /* of loops in this process */
    const char *const *addresses;
    size_t addresses_n;
    shard *own;               /* a shard in this process, or NULL: called
                                 without messages; addresses[own_at] */
    size_t own_at;
    void *owner;              /* keeps `own` alive; once the client is made,
                                 its end calls release(owner) */
    void (*release)(void *owner);
    char name_space[WIRE_NAME];
    uint32_t rank, world;
    uint64_t stream;          /* of this rank's updates; the same after a
                                 restart of the rank.  0: it makes none */
    int shared;               /* the stream is of a data loader: others push
                                 in it, too, and updates have their numbers
                                 from the caller */
    uint64_t timeout_ns;
    uint64_t message_limit;
    uint32_t dtype;           /* enum wire_dtype of vectors and gradients */
    enum client_lost lost;
    rpc_security security;
} client_config;
/* Says Hello to all: PERSIA_EMISMATCH unless they have shards 0..N-1 of N of
 * one namespace, naming those that are missing or twice. */
PERSIA_API int persia_client_create(const client_config *config,
                                    ps_client **out);
/* 1 if the thread of an embedded client's snapshot or restore hangs in a file:
 * client and tables must stay until the process ends. */
PERSIA_API int persia_client_destroy(ps_client *c);

PERSIA_API int persia_client_is_embedded(const ps_client *c);
PERSIA_API sched *persia_client_sched(const ps_client *c);
PERSIA_API uint32_t persia_client_shards(const ps_client *c);

/* See persia_tables_declare(). */
PERSIA_API int persia_client_declare(ps_client *c, const table_config *config,
                                     uint32_t *no, int *created);
PERSIA_API uint32_t persia_client_tables(const ps_client *c);
/* NULL if there is no such table. */
PERSIA_API const table_config *persia_client_table(const ps_client *c,
                                                   uint32_t no);

/* Job i reads table tables[i]; jobs[i].t is not the caller's.  Row numbers
 * are of the id's own shard.  Shards answer when update `after` of this
 * client, which may be in flight, is through (0, embedded: do not wait). */
PERSIA_API int persia_client_pull(ps_client *c, uint64_t after,
                                  const uint32_t *tables, pull_job *jobs,
                                  size_t jobs_n);

/* The same, and, unless embedded, the index of the batch with its hints, for
 * the update of these ids: a reference of the caller's, or NULL.  Its segments
 * are the jobs that have ids; then the jobs' `rows` may be NULL.  trace: of
 * what is traced, or NULL. */
PERSIA_API int persia_client_pull_indexed(ps_client *c, uint64_t after,
                                          const wire_trace *trace,
                                          const uint32_t *tables,
                                          pull_job *jobs, size_t jobs_n,
                                          batch_index **index);
/* Of all indexes of this client; to outlive it none may be held. */
PERSIA_API index_pool *persia_client_indexes(ps_client *c);

/* The gradients of one table, summed per id. */
typedef struct client_sum {
    uint32_t table, dim;
    size_t n;
    uint64_t *ids; /* [n] each once, in no order */
    float *grads;  /* [n, dim] */
} client_sum;
/* What persia_client_push() would sum, of each job; optim is not read.
 * *finite: 0 if there are NaN or Inf, which are left out.  out: [jobs_n], to
 * be freed by persia_client_sums_free(). */
PERSIA_API int persia_client_sums(ps_client *c, const uint32_t *tables,
                                  const push_job *jobs, size_t jobs_n,
                                  client_sum *out, int *finite);
PERSIA_API void persia_client_sums_free(client_sum *sums, size_t n);

/* The name and place of an update. */
typedef struct client_update {
    uint64_t number;      /* in this client's stream, from 1 */
    uint64_t step;        /* sync: of the job, from 1; else 0 */
    uint32_t part, parts; /* sync: rank of world; else 0 of 1 */
    uint64_t through;     /* all numbers up to it have ended, or were passed
                             over; 0: those that were given */
    uint64_t t;           /* see persia_client_t(); 0: by its name */
    uint64_t group;       /* of an update of several batches, each a part; or
                             0: then parts are of a step */
    wire_maker maker;     /* the rank that an embedding worker sends it for */
    wire_trace trace;     /* of what is traced */
} client_update;
/* A number is at most so far behind `through`, or as many before it are in
 * flight.  Numbers that were passed over may still be sent by a later life of
 * the rank, and applied, until updates are CLIENT_LAG beyond them. */
enum { CLIENT_SPAN = 1024, CLIENT_LAG = 3 * CLIENT_SPAN };
/* Sums equal ids and applies: sends, retries, waits until every shard has
 * applied, or answered that it had.  Every update is sent to every shard.  In
 * one call each table occurs once.  jobs_n may be 0.
 *
 * Numbers follow one another, at most 4,096 are in flight; update NULL or
 * number 0: the client counts.  Embedded: there are no steps.  What is wrong
 * with the jobs, NaN and Inf (policy raise) and messages over a server's limit
 * included, is found before it is sent to any shard; then an empty part of the
 * sync step is sent, for which other ranks wait.  After any other error the
 * update may be applied at some shards.  It is given up: its number is not
 * used again.  Servers do not count by table, so the sums are in jobs[0].
 * PERSIA_ELOST tells once of updates that were lost before; this one was
 * applied.
 */
PERSIA_API int persia_client_push(ps_client *c, const client_update *update,
                                  const uint32_t *tables, push_job *jobs,
                                  size_t jobs_n);
/* Whether every server has applied the update of this number, as far as it is
 * known here; or has passed over it. */
PERSIA_API int persia_client_has(ps_client *c, uint64_t number);
/* The update of this name will not be made: its number is given up; other
 * ranks that wait for its part of a sync step are sent an empty one; again,
 * where the step fails because the part of one of them was late. */
PERSIA_API int persia_client_skip(ps_client *c, const client_update *update);
/* The same, and all servers have the number in their ledgers from then on. */
PERSIA_API int persia_client_note(ps_client *c, const client_update *update);
/* A part of the update of a group will not be made: the others do not wait for
 * it any more. */
PERSIA_API int persia_client_pass(ps_client *c, const client_update *update);
/* Updates applied so far, of shard 0. */
PERSIA_API uint64_t persia_client_updates(const ps_client *c);
/* Updates have their t (Adam's step, and the key of their draws) from their
 * names: that of part of a step is the step, that of number n is base + world
 * * (n - the last number then) + rank - world + 1.
 * The base: updates from now on have a higher t.  Without
 * persia_client_set_t() the highest that any shard had when the store was
 * opened or rows were loaded; ranks that push to the same shards agree on one.
 */
PERSIA_API uint64_t persia_client_t(ps_client *c);
PERSIA_API void persia_client_set_t(ps_client *c, uint64_t base);
/* That of an update with a number, which another client sends. */
PERSIA_API uint64_t persia_client_t_of(ps_client *c,
                                       const client_update *update);
/* The highest number of this stream that any shard had at the last Hello. */
PERSIA_API uint64_t persia_client_last_number(const ps_client *c);
/* The stream continues after `number`: a job that resumes from a checkpoint
 * sends again what followed it, and shards answer that they had it.  No
 * update is in flight meanwhile. */
PERSIA_API void persia_client_set_last_number(ps_client *c, uint64_t number);
/* Says Hello to all shards again, for their lineage and ledgers, and declares
 * the tables to those that were started again; the stream continues after
 * persia_client_last_number().  `restored`: rows were restored, so
 * PERSIA_ELOST does not report what was lost before.  No update is in flight
 * meanwhile. */
PERSIA_API int persia_client_greet(ps_client *c, int restored);
/* Says Hello likewise, and the updates are those of `stream` after `number`.
 * What servers had beyond it is sent again: of those that were started again
 * only updates up to it are lost: the caller says how many, and PERSIA_ELOST
 * does not report them.  NUMBER_LAST: after the last that any server has.
 */
#define NUMBER_LAST UINT64_MAX
PERSIA_API int persia_client_go_on(ps_client *c, uint64_t stream,
                                   uint64_t number, uint64_t lost);
/* The store ends: lookups wait for no server any longer (PERSIA_ECLOSED);
 * END_ALL: nothing does, and updates in flight may be applied or not. */
enum client_end { END_LOOKUPS = 1, END_ALL = 3 }; /* bits */
PERSIA_API void persia_client_end(ps_client *c, enum client_end what);
/* While this store loads rows, other rows at the servers are its own doing. */
PERSIA_API void persia_client_set_loading(ps_client *c, int loading);
/* The last number that servers had when another client's restore ended the
 * mixture which this store had found; else 0.  Updates continue after it. */
PERSIA_API uint64_t persia_client_restored_number(const ps_client *c);
/* The stream of a rank that the job has no longer is this client's from now
 * on.  Updates that only some servers have of it are completed by empty ones,
 * count as lost, and persia_client_tell_lost() reports them.  *known: servers
 * have updates of it; else nothing is done.  0 ns: the client's timeout. */
PERSIA_API int persia_client_inherit(ps_client *c, uint64_t stream,
                                     uint32_t rank, uint64_t timeout_ns,
                                     int *known);
/* PERSIA_EINCOMPLETE if servers have rows of different restores. */
PERSIA_API int persia_client_check_restores(ps_client *c);
/* Whether an error reports earlier updates: what raised it was done. */
static inline int client_is_loss(int rc)
{
    return rc == PERSIA_ELOST || rc == PERSIA_EREPLACED;
}
/* An embedding worker has made this update of another stream, and all servers
 * have it.  persia_client_look() finds out whether they still do. */
PERSIA_API int persia_client_witness(ps_client *c, uint64_t stream,
                                     uint64_t number);

/* PERSIA_ELOST once if updates were lost, as persia_client_push() reports it.
 */
PERSIA_API int persia_client_tell_lost(ps_client *c);
/* The same, after asking all shards whether they were started again. One that
 * cannot be reached is waited for. */
PERSIA_API int persia_client_look(ps_client *c);
/* The same, without waiting. */
PERSIA_API int persia_client_look_once(ps_client *c);
/* The same, without comparing the ledgers of streams of workers, either. */
PERSIA_API int persia_client_look_at_boots(ps_client *c);
/* persia_client_look(), if embedding workers made updates for this client: its
 * own calls find out what became of its own. */
PERSIA_API int persia_client_check_lost(ps_client *c);

/* The restore that the rows of shard 0 stem from, as it last said; 0: none. */
PERSIA_API uint64_t persia_client_restore(ps_client *c);

/* Joins the sync steps at all shards, with its first one after `step`;
 * *applied: the largest number of steps applied. */
PERSIA_API int persia_client_join(ps_client *c, uint64_t step,
                                  uint64_t *applied);
/* Leaves them.  `hurry`: an error is on its way to the user and must not wait
 * for servers that may be the cause: they have a second.  So they have if
 * one of them did not do what it was asked last within the timeout. */
PERSIA_API int persia_client_leave(ps_client *c, int hurry);

/* Whole rows, see persia_table_get(), persia_table_set(),
 * persia_table_clear(). */
PERSIA_API uint32_t persia_client_state_floats(const ps_client *c,
                                               uint32_t no);
PERSIA_API int persia_client_get(ps_client *c, uint32_t no, size_t n,
                                 const uint64_t *ids, float *vectors,
                                 float *state, uint8_t *found);
PERSIA_API int persia_client_set(ps_client *c, uint32_t no, size_t n,
                                 const uint64_t *ids, const float *vectors,
                                 const float *state);
/* The ids of up to `room` rows of a shard, see persia_table_list(). */
PERSIA_API int persia_client_list(ps_client *c, uint32_t no, uint32_t shard,
                                  uint64_t *cursor, size_t room, uint64_t *ids,
                                  size_t *n);
/* A call of a reader of changes, to one shard; m: without a caller.  The reply
 * lasts as long as take(). */
PERSIA_API int persia_client_changes(
    ps_client *c, uint32_t shard, const wire_changes *m,
    int (*take)(void *ctx, const wire_changes_reply *reply), void *ctx);
/* Removes the rows of these ids; *erased: how many there were.  A request
 * whose answer was lost is sent again and then finds none. */
PERSIA_API int persia_client_erase(ps_client *c, uint32_t no, size_t n,
                                   const uint64_t *ids, uint64_t *erased);
PERSIA_API int persia_client_clear(ps_client *c, uint32_t no);
/* Removes the table: its number is not used again, its name is free. */
PERSIA_API int persia_client_drop(ps_client *c, uint32_t no);
PERSIA_API int persia_client_dropped(const ps_client *c, uint32_t no);
/* Sums over the shards (row_bytes: of a row). */
PERSIA_API int persia_client_stats(ps_client *c, uint32_t no,
                                   table_stats *out);
PERSIA_API int persia_client_memory(ps_client *c, uint64_t *used,
                                    uint64_t *limit);

typedef struct client_counts {
    uint64_t pulls, pushes;      /* calls */
    uint64_t ids, distinct;      /* pulled */
    uint64_t bytes_out, bytes_in;
    uint64_t retries, duplicates, reconnects;
    uint64_t lost;  /* updates that servers had acknowledged, or that only
                       some of them have of an earlier life of the rank (of
                       rank 0: or of a rank that the job has no longer), or
                       that went with rows which another client replaced */
    uint64_t stale; /* updates of before a restore, dropped by shards */
} client_counts;
PERSIA_API void persia_client_get_counts(const ps_client *c,
                                         client_counts *out);

/* For how long calls have been waiting for servers, in ns, without a moment in
 * which none was; 0: none waits for as much as a second. */
PERSIA_API uint64_t persia_client_held(ps_client *c);

/* The number that a shard has for a table, for requests of the caller's. */
PERSIA_API uint32_t persia_client_shard_table(const ps_client *c,
                                              uint32_t shard, uint32_t no);
/* Where a shard is. */
PERSIA_API const char *persia_client_address(const ps_client *c,
                                             uint32_t shard);
/* A call of one shard for administration, see persia_shard_wait(); without
 * retries. `arguments` name the caller that persia_client_caller() gives.  The
 * proof of an embedded client's snapshot or restore is the number of the
 * folder's descriptor, which is duplicated; root and folder are for texts. */
PERSIA_API int persia_client_call(ps_client *c, uint32_t shard,
                                  uint32_t method, const void *arguments,
                                  shard_reply *reply);
/* After PERSIA_ESTALE: says Hello to a server that was started again. */
PERSIA_API int persia_client_repair(ps_client *c, uint32_t shard);
PERSIA_API wire_caller persia_client_caller(const ps_client *c,
                                            uint32_t shard);
/* This client, as a worker names it to servers. */
PERSIA_API wire_maker persia_client_maker(const ps_client *c);

/* ---- one shard ---- */

/* The shard of a server, without a client.  It connects when the first call
 * needs it.  with: another one, of a server of the same job, whose connections
 * it shares, or NULL; the first of them that is closed ends the calls of
 * all. */
PERSIA_API int persia_shard_connect(const rpc_channel_config *config,
                                    const shard_ref *with, shard_ref **out);
/* Of the server that has it, as far as is known; as long as the ref. */
PERSIA_API const char *persia_shard_address(const shard_ref *ref);
/* Of a server with several shards: the ref is that of this one from now on.
 * PERSIA_EARG for a ref without messages. */
PERSIA_API int persia_shard_name(shard_ref *ref, uint32_t shard);
/* Another one of the same server, over the same connection.  The first of them
 * that is closed ends the calls of all. */
PERSIA_API int persia_shard_beside(shard_ref *ref, uint32_t shard,
                                   shard_ref **out);
/* Calls a method (enum wire_method; arguments: its struct of ops.h) and waits
 * for the answer: polls persia_interrupt_poll().  *reply: its struct, until
 * persia_shard_release().  A thread that is interrupted, or not answered for a
 * second after the deadline, leaves the call behind, so what the arguments
 * point at is read only before the shard's function returns.
 */
PERSIA_API int persia_shard_wait(shard_ref *to, uint32_t method,
                                 const void *arguments, uint64_t deadline,
                                 shard_reply *reply);
PERSIA_API void persia_shard_release(shard_reply *reply);

#ifdef __cplusplus
}
#endif
#endif
