/* table.h: a hash table from 64-bit ids to rows of one width.
 *
 *   row   [ id u64 | clock u32 | vector | optimizer state fp32 | field ]
 *
 * A row stays in its slot for life.  `clock` is the number (mod 2^32, never 0)
 * of the push that touched the row last; 0 marks a free slot.  The field, 4
 * bytes, is there if the table's eviction needs one (evict.h).  Rows are
 * spread over stripes by their hash; a stripe has a lock, an index and an
 * arena of its own.
 *
 * Pull never changes the table: a missing id reads as its initial value.  Push
 * creates rows, sums the gradients of equal ids in the order of the ids, and
 * applies one optimizer step a row.  The same calls give the same bits for any
 * number of threads and stripes (eviction excepted).
 *
 * All functions may be called from any thread at any time, except that
 * persia_table_destroy() must be the last call.
 */
#ifndef PERSIA_TABLE_H
#define PERSIA_TABLE_H

#include "admit/admit.h"
#include "evict/evict.h"
#include "mem/mem.h"
#include "optim/optim.h"
#include "sched/sched.h"
#include "simd/simd.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct table table;

/* Options as they are declared, each also by its name alone; `capacity` is
 * this table's. */
typedef struct table_config {
    union {
        table_spec spec;
        struct {
            TABLE_SPEC_MEMBERS
        };
    };
    uint32_t stripes;      /* power of two up to 256; 0: chosen */
    uint32_t beside;       /* other tables that share its load, shards of one
                              name in a process: fewer stripes are chosen */
    mem_limit *limit;      /* NULL: none */
    evict_score_fn score;  /* of FULL_EVICT_SCORE without an expression */
    void *score_ctx;
    uint32_t first_slot, slots; /* of its ids; 0, 0: all */
    uint64_t hash_key; /* of places, odd; 0: a random one.  It is in no file */
} table_config;

/* Sets every field to its default: fp32, Adagrad, uniform [-0.01, 0.01). */
PERSIA_API void persia_table_config_init(table_config *config);
PERSIA_API int persia_table_create(const table_config *config, table **out);
PERSIA_API void persia_table_destroy(table *t);
PERSIA_API const table_config *persia_table_get_config(const table *t);

PERSIA_API void persia_table_get_stats(const table *t, table_stats *out);

/* A row number is a hint of where an id was found: ROW_NONE if it had no
 * row.  Push tries it first and looks up where it does not hold any more. */
#define ROW_NONE UINT32_MAX

/* One pull: out[i * stride .. + dim) = vector of ids[i], as fp32. */
typedef struct pull_job {
    table *t;
    size_t n;
    const uint64_t *ids; /* [n] */
    float *out;          /* [n] rows of dim, `stride` floats apart */
    size_t stride;
    uint32_t *rows;      /* [n] row numbers out, or NULL */
} pull_job;
/* Runs the jobs on all threads of `s`; one job of so many ids runs on the
 * caller's alone. */
enum { TABLE_PULL_CHUNK = 2048 };
PERSIA_API int persia_table_pull(sched *s, pull_job *jobs, size_t jobs_n);

/* Gradients of n ids: that of ids[i] is
 * scale[i] * grad[bag[i] * stride .. + dim). */
typedef struct push_part {
    size_t n;
    const uint64_t *ids;  /* [n] */
    const uint32_t *rows; /* [n] row numbers from pull, or NULL */
    const uint32_t *bag;  /* [n] row of grad, or NULL: bag[i] = i */
    const float *scale;   /* [n], or NULL: 1 */
    const float *grad;
    size_t stride;        /* floats */
    size_t bags;          /* rows of grad; with bag == NULL it equals n */
    int finite;           /* 1: the caller knows that grad and scale hold
                             no NaN and no Inf; 0: to be checked */
    /* For clients of shards elsewhere, or NULL: the index of the lookup of
     * these ids, where they are those of segment `job`. */
    struct batch_index *index;
    uint32_t job;
} push_part;

INLINE_HOT const float *push_part_grad(const push_part *part, size_t i)
{
    return part->grad + (part->bag ? part->bag[i] : i) * part->stride;
}

/* How the gradients of equal ids become one: each is multiplied by its scale
 * and added in fp32, one after the other, by parts and within a part in the
 * order of its ids.  `first` begins the sum.  So the bits are the same
 * wherever they are summed:
 *
 *   table/push_change.c  in the process: the first of an id stays where it
 *                        lies, the others are added in a second pass.  It is
 *                        written out there, which saves 2 % of the
 *                        instructions of an update
 *   client/sums.c        before they are sent, by the index of a batch
 *   batch/taken.c        of rows that an embedding worker has sent
 */
INLINE_HOT void push_part_sum(const push_part *part, size_t i, float *sum,
                              int first, uint32_t dim)
{
    floats_add(sum, push_part_grad(part, i), part->scale ? part->scale[i] : 1,
               first, dim);
}

/* One push to one table: the parts are summed per id in their order, then
 * applied once.  `draw` is the key of its draws: which ids are admitted, and
 * the rounding to bf16; the same one draws the same. */
typedef struct push_job {
    table *t;
    const push_part *parts;
    size_t parts_n;
    const optim_args *optim;
    uint64_t draw;
    int distinct; /* 1: no id occurs twice; one that does all the same gets
                     an optimizer step each time */
    /* out, set when all checks are passed: */
    uint64_t created, refused, evicted, nonfinite; /* of this push */
    uint64_t touched;                              /* distinct ids applied */
} push_job;
/* PERSIA_EARG for settings out of their range, PERSIA_EMISMATCH for those of
 * another optimizer than the table keeps the state of. */
PERSIA_API int persia_table_check_optim(const table_config *config,
                                        const optim_args *optim);
/* Runs the jobs (each of another table) on all threads of `s`.  Arguments,
 * non-finite gradients (policy raise) and capacity (policy raise) are
 * checked for all jobs, and their memory is taken, before the first row
 * changes. */
PERSIA_API int persia_table_push(sched *s, push_job *jobs, size_t jobs_n);
/* The same; ready(ctx) runs when nothing can fail any more and nothing has
 * changed yet.  Its error refuses the push. */
PERSIA_API int persia_table_push_ready(sched *s, push_job *jobs, size_t jobs_n,
                                       int (*ready)(void *ctx), void *ctx);
/* The time that policies which look at it see, in seconds; 0: that of the
 * machine. */
PERSIA_API void persia_table_set_now(table *t, uint32_t seconds);

/* Whole rows.  state is [n, state_floats] or NULL; found[i] is 1 if ids[i]
 * has a row (else its initial value is given), found may be NULL. */
PERSIA_API uint32_t persia_table_state_floats(const table *t);
PERSIA_API int persia_table_get(table *t, size_t n, const uint64_t *ids,
                                float *vectors, float *state, uint8_t *found);
/* Creates or replaces rows (fresh state if NULL).  Values must be finite.
 * Memory is taken before the first row changes. */
PERSIA_API int persia_table_set(table *t, size_t n, const uint64_t *ids,
                                const float *vectors, const float *state);
/* Removes the rows of these ids; *erased: how many there were. */
PERSIA_API int persia_table_erase(table *t, size_t n, const uint64_t *ids,
                                  uint64_t *erased);
/* The ids of up to `room` rows, in no order, from *cursor on (0: the first);
 * moves *cursor on, to TABLE_LIST_END after the last.  Rows that are made or
 * removed meanwhile may be among them or not. */
#define TABLE_LIST_END UINT64_MAX
PERSIA_API int persia_table_list(table *t, uint64_t *cursor, size_t room,
                                 uint64_t *ids, size_t *n);
/* Removes every row; counters and clock stay. */
PERSIA_API int persia_table_clear(table *t);

/* A watch: which rows changed, and which ids left, since its reader looked
 * last.  Several may watch a table.  Where there is no memory to note what
 * changed, all rows of a stripe count as changed; a push never fails. */
typedef struct table_watch table_watch;
/* all: every row counts as changed at first; its reader has nothing. */
PERSIA_API int persia_table_watch_open(table *t, int all, table_watch **out);
PERSIA_API void persia_table_watch_close(table_watch *w); /* or NULL */
/* Slots that changed and were not read since. */
PERSIA_API uint64_t persia_table_watch_rows(const table_watch *w);

/* A piece of what changed.  In its order: the reader forgets all ids of the
 * stripe (`reset`), then those gone, then it has these rows.  Rows are as they
 * are now; their ids are of the stripe hash_stripe(id_hash(id),
 * stripes - 1). */
typedef struct table_changes {
    size_t room; /* rows, and ids gone, and ids erased, at most */
    /* [room] as persia_table_cut_next() has them; floats: the vectors as
     * fp32.  NULL: left out. */
    uint64_t *ids;
    void *vectors;
    float *floats, *state;
    uint32_t *clocks, *fields;
    uint64_t *gone;   /* [room] ids that have no row any more */
    uint64_t *erased; /* [room] or NULL: ids that persia_table_erase() was
                         given before the round, with a row or without */
    /* out: */
    size_t n, gone_n, erased_n;
    uint32_t stripe, stripes;
    int reset;
    int end; /* it ends the round: one of all stripes */
} table_changes;
/* The next piece.  When no push has run since a round began, its reader has
 * the table at the end. */
PERSIA_API int persia_table_watch_next(table_watch *w, table_changes *c);

/* A cut: all rows as they were at one moment, read out while pushes run.
 * One cut a table at a time.  Vectors are in the table's dtype (raw bytes). */
typedef struct table_cut table_cut;
/* Takes the moment for several tables at once. */
PERSIA_API int persia_table_cut_begin(table *const *tables, size_t n,
                                      table_cut **out /* [n] */);
PERSIA_API uint64_t persia_table_cut_rows(const table_cut *cut);
PERSIA_API uint64_t persia_table_cut_clock(const table_cut *cut);
/* Hands out up to `room` rows; *n is 0 at the end.  An array that is NULL is
 * left out, as are the fields of rows without one.  PERSIA_ELIMIT or
 * PERSIA_ENOMEM when rows that changed meanwhile could not be put aside: then
 * the cut is lost, the table is not. */
PERSIA_API int persia_table_cut_next(table_cut *cut, size_t room,
                                     uint64_t *ids, void *vectors,
                                     float *state, uint32_t *clocks,
                                     uint32_t *fields, size_t *n);
/* Frees what the table keeps for it: later persia_table_cut_next() fail
 * (PERSIA_EINTR), one that runs ends first.  Any thread; more than once. */
PERSIA_API void persia_table_cut_stop(table_cut *cut);
/* The same, and frees it.  One that was stopped may outlive its table. */
PERSIA_API void persia_table_cut_end(table_cut *cut);
/* Of a table that only the caller knows: rows of these ids follow, by
 * persia_table_restore().  A table that evicts and has no room for all of them
 * then keeps the same part of each stripe's; they are given stripe by
 * stripe. */
PERSIA_API void persia_table_expect(table *t, size_t n, const uint64_t *ids);
PERSIA_API void persia_table_expect_none(table *t); /* they were given */
/* The reverse of a cut: adds rows as persia_table_cut_next() gave them (an id
 * that is there already is replaced).  `fields` NULL: as of rows that are
 * touched now for the first time. */
PERSIA_API int persia_table_restore(table *t, size_t n, const uint64_t *ids,
                                    const void *vectors, const float *state,
                                    const uint32_t *clocks,
                                    const uint32_t *fields);
/* Of a table that only the caller knows: while it is filled with the rows of
 * another one, in pieces, it takes all of them.  None is evicted, and its
 * capacity does not count. */
PERSIA_API void persia_table_set_filling(table *t, int filling);
/* Whether rows have a field of the eviction's. */
PERSIA_API int persia_table_has_field(const table *t);
/* What admission has seen, at the moment of the cut: persia_table_sightings()
 * words for each of n slots from `from` on, counted from config->first_slot;
 * of a table that keeps some.  Slots are read in their order, each once.
 * PERSIA_EINTR: the cut was stopped. */
PERSIA_API int persia_table_cut_sightings(table_cut *cut, uint32_t from,
                                          uint32_t n, uint32_t *words);
/* The same of a table that nothing changes meanwhile. */
PERSIA_API void persia_table_read_sightings(const table *t, uint32_t from,
                                            uint32_t n, uint32_t *words);
/* The reverse, of a table that only the caller knows; slots that are not the
 * table's are left out. */
PERSIA_API void persia_table_restore_sightings(table *t, uint32_t first,
                                               uint32_t slots,
                                               const uint32_t *words);
/* Words of a slot; 0: the table keeps none. */
PERSIA_API size_t persia_table_sightings(const table_config *config);
PERSIA_API void persia_table_set_clock(table *t, uint64_t pushes);
/* Bytes that persia_table_clear() would give back to the limit. */
PERSIA_API uint64_t persia_table_clear_bytes(const table *t);
/* Bytes that so many rows take at most in a table like it that is empty, with
 * what persia_table_restore() takes beside for a moment. */
PERSIA_API uint64_t persia_table_restore_bytes(const table *t, uint64_t rows);
/* Exchanges the rows of `t` with those of `other`, a table of the same
 * configuration, its hash_key included, that only the caller knows.  Pushes
 * see one or the other; a pull that runs meanwhile may see both.  Counters and
 * clocks stay.  PERSIA_EUNAVAILABLE while a cut of either is open. */
PERSIA_API int persia_table_exchange(table *t, table *other);

#ifdef __cplusplus
}
#endif
#endif
