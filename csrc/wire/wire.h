/* wire.h: the messages of persia.proto, encoded and decoded by hand.
 *
 * Encoders make a gather list: small fields in a buffer of the message, bulk
 * data (ids, values, row numbers) as references to memory of the caller, so
 * that they leave from where they lie.  Bulk data are little-endian and
 * padded (field 15 of their message, bytes that readers skip) so that they
 * begin at a multiple of 8 bytes of the message.
 *
 * Decoders are given one contiguous message, aligned to 64 bytes.  They point
 * into it where data are aligned, as those of our own encoders are, and copy
 * into the wire_memory where a foreign client's are not.  Nothing in a
 * message is believed: PERSIA_EPROTOCOL names the field that is wrong; no
 * count is larger than the message could hold.  Unknown fields are skipped.
 */
#ifndef PERSIA_WIRE_H
#define PERSIA_WIRE_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    WIRE_VERSION = 1,
    WIRE_NAME = 256,       /* bytes of a name, with its 0 */
    WIRE_TABLES_MAX = 4096 /* tables of one message */
};

/* Numbers of the methods, in the order of persia.proto; X(METHOD, Name). */
#define WIRE_METHODS(X)                                                       \
    X(HELLO, Hello) X(DECLARE, Declare) X(PULL, Pull) X(PUSH, Push)           \
    X(LEAVE, Leave) X(GET_ROWS, GetRows) X(PUT_ROWS, PutRows)                 \
    X(SNAPSHOT, Snapshot) X(RESTORE, Restore) X(STATS, Stats)
enum wire_method {
#define WIRE_METHOD(upper, name) WIRE_##upper,
    WIRE_METHODS(WIRE_METHOD)
#undef WIRE_METHOD
    WIRE_METHODS_N
};

/* Values of a row on the wire.  FP16 and BF16 travel with one fp32 scale a
 * vector: value = scale * wire value (paper, section 4.2), the scale is
 * max |v| / 32768 for FP16 (so that nothing overflows) and absent for BF16. */
enum wire_dtype { WIRE_FP32, WIRE_FP16, WIRE_BF16, WIRE_DTYPES };
static inline size_t wire_dtype_bytes(uint32_t dtype)
{
    return dtype == WIRE_FP32 ? 4 : 2;
}

/* ---- gather lists and memory -------------------------------------------- */

typedef struct wire_span {
    const void *data;
    size_t n; /* bytes */
} wire_span;

/* A message that is being encoded, as spans in order. */
typedef struct wire_out {
    wire_span *spans;
    size_t spans_n;
    size_t bytes; /* of all spans */
    struct wire_chunk *chunks; /* private: memory of small fields */
    size_t spans_room;
} wire_out;
PERSIA_API void wire_out_init(wire_out *o);
PERSIA_API void wire_out_free(wire_out *o);
/* The whole message in one piece, for tests and calls within a process.
 * to: [o->bytes]. */
PERSIA_API void wire_out_copy(const wire_out *o, void *to);

/* Memory of decoded messages: many pieces, freed at once. */
typedef struct wire_memory {
    struct wire_chunk *chunks;
} wire_memory;
PERSIA_API void wire_memory_init(wire_memory *m);
PERSIA_API void wire_memory_free(wire_memory *m);
/* Aligned to 64 bytes, not cleared; NULL with the error set. */
PERSIA_API void *wire_memory_take(wire_memory *m, size_t bytes);

/* ---- messages ----------------------------------------------------------- */

/* Who asks: every request begins with it. */
typedef struct wire_caller {
    uint64_t client;      /* random, of a process */
    uint64_t incarnation; /* of the rank: counts its restarts */
    uint64_t boot;        /* of the server, as its Hello said; 0: any */
    uint64_t lineage;     /* of the rows, as Hello or Restore said; 0: any */
} wire_caller;

typedef struct wire_hello {
    wire_caller caller;
    uint32_t version;
    char name_space[WIRE_NAME];
    char role[32];        /* "nn_worker", "embedding_worker", "admin", ... */
    uint32_t rank, world;
    uint64_t stream;      /* whose ledger is wanted; 0: none */
} wire_hello;

/* A stream of updates: all numbers up to `watermark` came, but for `skipped`
 * of them, and those of window: bit i is watermark + 1 + i. */
enum { WIRE_WINDOW_WORDS = 64 };
typedef struct wire_ledger {
    uint64_t stream, watermark;
    uint64_t window[WIRE_WINDOW_WORDS];
    uint64_t skipped;
} wire_ledger;

/* A table as it was declared; fields as in table_config and in that order. */
typedef struct wire_table_spec {
    char name[WIRE_NAME];
    uint64_t seed;
    uint32_t dim, dtype, optimizer, momentum, init;
    float init_a, init_b, state_init;
    uint32_t missing, nonfinite;
    uint64_t capacity; /* of all shards together */
    uint32_t full;
    float admission;
} wire_table_spec;

typedef struct wire_hello_reply {
    uint32_t version;
    char name_space[WIRE_NAME];
    uint32_t shard, shards;
    uint64_t boot, lineage, updates;
    uint64_t message_limit; /* bytes of a request */
    wire_ledger ledger;     /* of the stream asked for */
    wire_table_spec *tables;
    size_t tables_n; /* numbered from 0 */
} wire_hello_reply;

typedef struct wire_declare {
    wire_caller caller;
    wire_table_spec table;
} wire_declare;

typedef struct wire_declare_reply {
    uint32_t no, created;
} wire_declare_reply;

typedef struct wire_pull_table {
    uint32_t no;
    size_t n;
    const uint64_t *ids; /* [n] */
} wire_pull_table;

typedef struct wire_pull {
    wire_caller caller;
    uint32_t dtype;      /* enum wire_dtype: of the reply */
    uint32_t want_rows;
    uint64_t stream, after; /* wait until this update of this stream was
                               applied, or is settled; 0: do not wait */
    wire_pull_table *tables;
    size_t tables_n;
} wire_pull;

/* Vectors of n rows.  In requests and replies alike. */
typedef struct wire_values {
    uint32_t no;
    uint32_t dim;
    size_t n;
    const void *values;   /* [n, dim] in the message's dtype */
    const float *scales;  /* [n], FP16 only, else NULL */
    const uint32_t *rows; /* [n] row numbers, or NULL */
} wire_values;

typedef struct wire_pull_reply {
    uint32_t dtype;
    wire_values *tables; /* as they were asked for */
    size_t tables_n;
} wire_pull_reply;

/* Hyper-parameters of one table's update; names as in optim_args. */
typedef struct wire_hyper {
    uint32_t kind;
    float lr, eps, beta1, beta2, momentum, weight_decay, max_grad_norm,
        max_norm, weight_bound, grad_scale;
} wire_hyper;

typedef struct wire_push_table {
    wire_values grads; /* rows: hints from a pull, or NULL */
    const uint64_t *ids; /* [grads.n], distinct */
    wire_hyper hyper;
} wire_push_table;

typedef struct wire_push {
    wire_caller caller;
    uint64_t stream, number; /* the update's name; numbers begin at 1 */
    uint64_t settled;        /* all numbers up to it are through: applied by
                                every shard, or given up; the ledger's
                                watermark follows, so that an update that
                                failed or was lost leaves no gap for ever */
    uint64_t step;           /* sync: of the job, from 1; else 0 */
    uint32_t part, parts;    /* sync: part of parts; else 0 of 1 */
    uint32_t dtype;
    wire_push_table *tables; /* those with n = 0 were in the batch, but have
                                no id on this shard: their clock moves */
    size_t tables_n;
} wire_push;

enum wire_push_status {
    PUSH_APPLIED,
    PUSH_DUPLICATE,     /* applied before; nothing changed */
    PUSH_STALE_LINEAGE, /* other rows were restored meanwhile */
    PUSH_RETRY_LATER,   /* beyond the ledger's window */
    PUSH_LOST,          /* the step was applied before the server started */
    PUSH_STATUSES
};
typedef struct wire_push_reply {
    uint32_t status;
    uint64_t created, refused, evicted, nonfinite, touched;
    uint64_t updates; /* of this shard, this one included */
    uint64_t *left;   /* [left_n] ranks that take no part in steps any more */
    size_t left_n;
} wire_push_reply;

/* The rank takes part in the sync steps from now on, or no more. */
typedef struct wire_leave {
    wire_caller caller;
    uint32_t rank, world;
    uint32_t joins; /* 1: joins, 0: leaves */
    uint64_t step;  /* joins: the step before its first */
    uint64_t *left; /* [left_n] joins: ranks that have left, it was told */
    size_t left_n;
    uint32_t move;  /* the client's first, second, ...; 0: in no order */
} wire_leave;
typedef struct wire_leave_reply {
    uint64_t step; /* sync steps applied */
} wire_leave_reply;

/* Whole rows, fp32.  GetRows is asked with ids alone; or for ids: of up to
 * `list` rows from `cursor` on (0: the first), which come with the cursor of
 * the next (UINT64_MAX: there are no more). */
typedef struct wire_rows {
    wire_caller caller; /* requests */
    uint32_t no;
    size_t n;
    const uint64_t *ids;
    uint32_t dim, state_floats;
    const float *vectors; /* [n, dim] or NULL */
    const float *state;   /* [n, state_floats] or NULL */
    const uint8_t *found; /* [n], replies, or NULL */
    uint32_t clear;       /* PutRows: first remove all rows of the table */
    uint32_t list;
    uint64_t cursor;
} wire_rows;

/* A file of rows, as ckpt_file has it. */
typedef struct wire_file {
    uint32_t no; /* table */
    char name[WIRE_NAME];
    uint64_t rows, bytes;
    uint32_t crc;
} wire_file;

enum wire_snapshot_verb { SNAPSHOT_BEGIN, SNAPSHOT_STATUS, SNAPSHOT_END };
/* BEGIN takes the cut and starts to write row files <stem>-<table>-... into
 * the existing folder <server's checkpoint folder>/<root>/<folder>; `proof`
 * is the content of a file .proof there: that client and server see one
 * folder.  STATUS tells how far it is, END forgets (and stops) it. */
typedef struct wire_snapshot {
    wire_caller caller;
    uint32_t verb;
    char root[WIRE_NAME], folder[WIRE_NAME], proof[64];
} wire_snapshot;
typedef struct wire_snapshot_reply {
    uint32_t done;           /* 0: still writing */
    uint64_t updates, step;  /* at the cut */
    uint64_t *pushes;        /* [pushes_n] clock of each table at the cut */
    size_t pushes_n;
    wire_ledger *ledgers;    /* at the cut */
    size_t ledgers_n;
    wire_file *files;        /* when done */
    size_t files_n;
    uint64_t rows_written;
} wire_snapshot_reply;

enum wire_restore_verb { RESTORE_PREPARE, RESTORE_COMMIT, RESTORE_ABORT };
/* PREPARE reads and checks the files and keeps, beside the rows in use, those
 * of this shard's range; COMMIT puts them in their place with the new lineage;
 * ABORT forgets them. */
typedef struct wire_restore {
    wire_caller caller;
    uint32_t verb;
    char root[WIRE_NAME], folder[WIRE_NAME], proof[64];
    uint64_t lineage, updates, step; /* to be taken on */
    /* [pushes_n] clock of each table; UINT64_MAX, and tables from pushes_n
     * on: the table keeps what it has. */
    uint64_t *pushes;
    size_t pushes_n;
    wire_ledger *ledgers;
    size_t ledgers_n;
    wire_file *files;
    size_t files_n;
} wire_restore;
typedef struct wire_restore_reply {
    uint32_t done;  /* PREPARE: 0: still reading, ask again */
    uint64_t rows;
} wire_restore_reply;

typedef struct wire_stats {
    wire_caller caller;
} wire_stats;
typedef struct wire_table_stats {
    uint64_t rows, bytes, row_bytes, pushes, pulled, missed, created, evicted,
        refused, nonfinite;
} wire_table_stats;
typedef struct wire_stats_reply {
    uint64_t boot, lineage, updates, step, uptime_ns;
    uint64_t memory_used, memory_limit;
    uint64_t pulls, pushes, duplicates, parked, failed; /* requests */
    wire_table_spec *tables;
    size_t tables_n;
    wire_table_stats *stats; /* [tables_n] */
} wire_stats_reply;

/* ---- encode and decode -------------------------------------------------- */

/* wire_put_X appends the message to `o`; bulk data must stay in place until
 * the message was sent.  What no wire_get_X would read it refuses to write
 * (PERSIA_EARG, the same text).  wire_get_X fills in *out, whose pointers hold
 * as long as data and memory do; arrays without elements are NULL.  Whether
 * tables exist, and an answer has what was asked for, is not known here. */
#define WIRE_MESSAGES(X)                                                     \
    X(hello) X(hello_reply) X(declare) X(declare_reply) X(pull)               \
    X(pull_reply) X(push) X(push_reply) X(leave) X(leave_reply) X(rows)       \
    X(snapshot) X(snapshot_reply) X(restore) X(restore_reply) X(stats)        \
    X(stats_reply)
#define WIRE_DECLARE(name)                                                    \
    PERSIA_API int wire_put_##name(wire_out *o, const wire_##name *m);        \
    PERSIA_API int wire_get_##name(const void *data, size_t n,                \
                                   wire_memory *memory, wire_##name *out);
WIRE_MESSAGES(WIRE_DECLARE)
#undef WIRE_DECLARE

/* ---- values ------------------------------------------------------------- */

/* Narrows n rows of dim floats, `stride` apart, to packed wire values; scales
 * [n] is written for FP16 only (NULL otherwise).  Ties to even. */
PERSIA_API void wire_narrow(uint32_t dtype, size_t n, uint32_t dim,
                            const float *from, size_t stride, void *to,
                            float *scales);
/* The reverse. */
PERSIA_API void wire_widen(uint32_t dtype, size_t n, uint32_t dim,
                           const void *from, const float *scales, float *to,
                           size_t stride);

#ifdef __cplusplus
}
#endif
#endif
