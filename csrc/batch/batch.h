/* batch.h: whole batches of ids in, pooled embeddings out, gradients of the
 * output back to the tables.  A batcher does this on the tables of a client.
 *
 * A plan describes once what a module wants of the batches it is given: for
 * each feature its place among the keys of the batch, its table, its pooling
 * and its columns of the output.  Plans are immutable and live as long as
 * the batcher; equal plans are one.
 *
 *   PLAN_BAGS  output [bags, width]: feature f fills its `dim` columns
 *   PLAN_ROWS  output [n, width]: row i is the vector of id i (columns
 *              beyond the table's dim, and ids of other keys, are zero)
 */
#ifndef PERSIA_BATCH_H
#define PERSIA_BATCH_H

#include "optim/optim.h"

#ifdef __cplusplus
extern "C" {
#endif

struct batch_index;
struct ps_client;
struct client_sum;
struct client_update;
struct wire_trace;
typedef struct batcher batcher;

enum plan_kind { PLAN_BAGS, PLAN_ROWS, PLAN_KINDS };

typedef struct plan_feature {
    char name[256];
    uint32_t key;       /* its place among the keys of the batch */
    uint32_t table;     /* number in the store */
    uint32_t pooling;   /* enum pool_kind; PLAN_BAGS only */
    uint32_t trainable; /* 0: its gradients are not used */
} plan_feature;

/* The ids of one batch, feature-major: those of key k and sample b are
 * values[offsets[k * bags + b] .. offsets[k * bags + b + 1]). */
typedef struct id_batch {
    size_t n;
    size_t bags;            /* samples */
    const int64_t *values;  /* [n] */
    const int64_t *offsets; /* [keys * bags + 1], or NULL: one id a bag */
    const float *weights;   /* [n], or NULL: all 1 */
    const struct wire_trace *trace; /* of a lookup that is traced, or NULL */
} id_batch;

/* The client must outlive the batcher. */
PERSIA_API int persia_batcher_create(struct ps_client *c, batcher **out);
PERSIA_API void persia_batcher_destroy(batcher *w);

/* Columns of the output follow the order of the features. */
PERSIA_API int persia_batcher_plan(batcher *w, uint32_t kind, uint32_t keys,
                                   const plan_feature *features,
                                   uint32_t features_n, uint32_t *plan);
/* Columns of the output, keys of a batch and kind of a plan. */
PERSIA_API int persia_batcher_plan_shape(batcher *w, uint32_t plan,
                                         uint32_t *kind, uint32_t *keys,
                                         uint32_t *width);

/* Looks up a batch.  after: see persia_client_pull().  out: [bags, width] or
 * [n, width], rows `stride` floats apart.  For the backward: `rows`, [n] row
 * numbers; or, if the tables are remote and index is not NULL, *index, a
 * reference of the caller's (else it is set to NULL), and rows are not
 * written.  In this process to group the ids costs more than it saves.
 * Nothing is written unless the batch is in order (PERSIA_EOFFSETS,
 * PERSIA_ESHAPE). */
PERSIA_API int persia_batcher_forward(batcher *w, uint32_t plan,
                                      const id_batch *batch, uint64_t after,
                                      float *out, size_t stride,
                                      uint32_t *rows,
                                      struct batch_index **index);

/* ---- distinct rows ----
 *
 * For those who pool themselves: the distinct ids of a batch by table (in the
 * order of the plan, each table once), and the place of each id among them.
 * The ids are those of the plan's features, one feature after the other. */
typedef struct batcher_group batcher_group;
PERSIA_API int persia_batcher_group(batcher *w, uint32_t plan,
                                    const id_batch *batch,
                                    batcher_group **out);
typedef struct batcher_group_sizes {
    size_t rows, tables, ids;
    size_t bags; /* of all features; 0: each bag has one id */
} batcher_group_sizes;
PERSIA_API batcher_group_sizes
persia_batcher_group_sizes(const batcher_group *g);
/* batch: as before.  ids: [rows]; starts: [tables + 1]; inverse: [ids];
 * offsets: [bags + 1], weights: [ids], or NULL. */
PERSIA_API void persia_batcher_group_fill(const batcher_group *g,
                                          const id_batch *batch, uint64_t *ids,
                                          int64_t *starts, int32_t *inverse,
                                          int32_t *offsets, float *weights);
PERSIA_API void persia_batcher_group_free(batcher_group *g);

/* Gives back a reference, see ids.h; NULL: nothing. */
PERSIA_API void persia_batch_index_put(struct batch_index *index);

/* The gradient of one forward's output. */
typedef struct batcher_grad {
    uint32_t plan;
    id_batch batch;
    const uint32_t *rows;      /* [n] from persia_batcher_forward(), or NULL */
    struct batch_index *index; /* from persia_batcher_forward(), or NULL */
    const float *grad;    /* shaped as the output */
    size_t stride;        /* floats from row to row of grad */
} batcher_grad;

typedef struct batcher_counts {
    uint64_t created, refused, evicted, nonfinite, touched;
} batcher_counts;

/* ---- batches whose ids are elsewhere ----
 *
 * An embedding worker in another process has the ids of a batch, and has
 * looked it up.  What stands for them here is an index with this source.  A
 * table's features are all pooled there, or all here.  What is pooled here has
 * ids all the same: each is its place among the distinct rows of its table,
 * which are of the source, too.  A forward reads from it, and the backward
 * gives it gradients of pooled values and of rows. */

/* A feature of a plan, as both sides know it. */
typedef struct taken_feature {
    const char *name, *table;
    uint32_t pooling; /* enum pool_kind */
    uint32_t dim;
} taken_feature;

/* The gradient of one feature that is pooled there: [samples, dim], packed. */
typedef struct taken_grad {
    taken_feature feature;
    const float *grad;
} taken_grad;

/* The gradients of distinct rows of a table. */
typedef struct taken_rows {
    const char *table;
    uint32_t dim;
    size_t n;
    uint32_t *places; /* [n] of the rows */
    float *grads;     /* [n, dim] */
} taken_rows;

typedef struct taken_update {
    const taken_grad *grads; /* [n] each feature once */
    size_t n;
    const taken_rows *rows;  /* [rows_n] each table once */
    size_t rows_n;
    struct client_update *name; /* number: of this process's; its t */
    const optim_args *optim; /* [optim_n] by table of the client */
    uint32_t optim_n;
    struct ps_client *c;
} taken_update;

typedef struct batcher_source batcher_source;
struct batcher_source {
    size_t samples;
    /* Whether the features of a table are pooled here: *n distinct rows. */
    int (*rows)(const batcher_source *s, const char *table, size_t *n);
    /* Pooled values: [samples, dim], rows `stride` floats apart. */
    int (*read)(batcher_source *s, const taken_feature *f, float *out,
                size_t stride);
    /* Rows of a table, each below their number: [n, dim] likewise. */
    int (*gather)(batcher_source *s, const char *table, const int64_t *places,
                  size_t n, float *out, size_t stride);
    /* Returns when every shard has applied the gradients.  *passed: others of
     * the update need not wait for them: another has the batch, or servers
     * have had it. */
    int (*push)(batcher_source *s, const taken_update *update,
                batcher_counts *counts, int *passed);
    /* What such an update sums up to: appended to *out, to be freed by
     * persia_batcher_sums_free(). */
    int (*sums)(batcher_source *s, const taken_update *update,
                struct client_sum **out, size_t *n, int *finite);
};

/* The output of a plan for such a batch. */
PERSIA_API int persia_batcher_read(batcher *w, uint32_t plan,
                                   struct batch_index *index,
                                   const id_batch *batch, float *out,
                                   size_t stride);

/* Sums the gradients per table and id in the order given, and applies them
 * as one update.  optim: [tables of the store]; the step of Adam's bias
 * correction is filled in here.  update: its name, NULL (or number 0): the
 * client counts.  It is sent to remote shards also if it is empty; if it
 * fails before it is sent, its name is given up (persia_client_skip()). */
PERSIA_API int persia_batcher_backward(batcher *w, const batcher_grad *grads,
                                       size_t n,
                                       const struct client_update *update,
                                       const optim_args *optim,
                                       uint32_t optim_n,
                                       batcher_counts *counts);

/* finite[t] = 0 for each table t with a NaN or Inf among its gradients; the
 * others are left as they are. */
PERSIA_API int persia_batcher_finite(batcher *w, const batcher_grad *grads,
                                     size_t n, uint8_t *finite,
                                     uint32_t finite_n);

/* The sums of all tables that have some, see persia_client_sums().  Of batches
 * whose ids are elsewhere a table may have several, one a batch. */
typedef struct client_sum batcher_sum;
PERSIA_API int persia_batcher_sums(batcher *w, const batcher_grad *grads,
                                   size_t n, batcher_sum **out, size_t *out_n,
                                   int *finite);
PERSIA_API void persia_batcher_sums_free(batcher_sum *sums, size_t n);

#ifdef __cplusplus
}
#endif
#endif
