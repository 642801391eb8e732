/* ckpt.h: the rows of a table in files, and back.
 *
 * A table's rows are written as files of a bounded size.  Each is a complete
 * safetensors file
 *
 *   ids      U64  [n]
 *   vectors  F32 or BF16 [n, dim]     in the table's dtype; of int8:
 *            U8 [n, 4 + dim]          fp32 scale, then dim int8 times it
 *   state    F32  [n, state floats]   absent if the optimizer keeps none
 *   clock    U32  [n]                 number of the push that touched last
 *   count    F32  [n]                 or another field of the eviction's, see
 *                                     evict.h; absent if it has none
 *
 * with a CRC-32C over all its bytes.  What admission has seen is in a file of
 * its own (sightings.h), whose number of rows is 0.  The folder, the manifest
 * and the order in which files become visible belong to persia/checkpoint/;
 * here are the parts that touch every row, with buffers of a bounded size.
 *
 * Bytes that are read may come from anywhere: nothing in a file is believed
 * before it is checked.
 */
#ifndef PERSIA_CKPT_H
#define PERSIA_CKPT_H

#include "table/table.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CKPT_NAME = 200 };                /* bytes of a file's name, with 0 */
#define CKPT_CHUNK ((uint64_t)256 << 20) /* bytes of a row file at most */

/* One row file, as the manifest has it. */
typedef struct ckpt_file {
    char name[CKPT_NAME];
    uint64_t rows;
    uint64_t bytes;
    uint32_t crc; /* CRC-32C of the whole file */
} ckpt_file;

/* A list that grows; `files` is freed by persia_ckpt_files_free(). */
typedef struct ckpt_files {
    ckpt_file *files;
    size_t n, room;
    /* Takes each file that persia_ckpt_write() has finished, on the thread of
     * its caller; NULL: they stay in the folder. */
    int (*take)(void *ctx, const ckpt_file *file);
    void *ctx;
    size_t taken;
} ckpt_files;
PERSIA_API int persia_ckpt_files_add(ckpt_files *list, const ckpt_file *file);
PERSIA_API void persia_ckpt_files_free(ckpt_files *list);

/* PERSIA_EARG unless `name` is the plain name of a file: letters, digits,
 * '.', '-' and '_', not empty, not beginning with '.', below CKPT_NAME. */
PERSIA_API int persia_ckpt_name_check(const char *name);

/* Writes what `cut` still has to give into new files
 * <stem>-00000.safetensors, ... of at most `chunk` bytes in the folder that
 * `folder` is open on, syncs each, and appends them to `out`.  `config` is
 * the table's.  An empty table makes no row file.  Reading the cut and writing
 * overlap on the threads of `s`.  Polls persia_interrupt_poll().  After an
 * error the files that were made are left to the owner of the folder. */
PERSIA_API int persia_ckpt_write(sched *s, table_cut *cut,
                                 const table_config *config, int folder,
                                 const char *stem, uint64_t chunk,
                                 ckpt_files *out);

/* Reads every byte of the files and changes nothing: size, checksum, header,
 * shapes and clocks.  PERSIA_ECORRUPT names the file that is not as `files`
 * says, PERSIA_EMISMATCH the table whose dim, dtype or state differs,
 * PERSIA_EIO a file that cannot be read.  Polls persia_interrupt_poll().
 * Adds to *here the rows whose ids are the table's (NULL: not wanted). */
PERSIA_API int persia_ckpt_verify(sched *s, const table_config *config,
                                  int folder, const ckpt_file *files,
                                  size_t n, uint64_t *here);

/* Adds the rows of verified files to an empty table, on all threads of `s`:
 * those of shard `shard` of `shards` (see hash_shard(); 0 of 1: all).
 * PERSIA_ECORRUPT if an id occurs twice, or if what was read is not what was
 * verified.  Polls persia_interrupt_poll().  After an error some
 * rows may have been added.
 *
 * A table with a capacity evicts by clock, so its own must be set beyond
 * those of the rows (persia_table_set_clock()) before. */
PERSIA_API int persia_ckpt_restore(sched *s, table *t, int folder,
                                   const ckpt_file *files, size_t n,
                                   uint32_t shard, uint32_t shards);

/* Where row files are, for rooms that open no file themselves.  Every call
 * but close() may wait for as long as the files do. */
typedef struct ckpt_io {
    int (*open)(struct ckpt_io *io); /* first, and once */
    /* persia_ckpt_write(), persia_ckpt_verify() and persia_ckpt_restore(). */
    int (*write)(struct ckpt_io *io, sched *s, table_cut *cut,
                 const table_config *config, const char *stem,
                 ckpt_files *out);
    int (*sync)(struct ckpt_io *io); /* what was written will last */
    int (*verify)(struct ckpt_io *io, sched *s, const table_config *config,
                  const ckpt_file *files, size_t n, uint64_t *here);
    int (*read)(struct ckpt_io *io, sched *s, table *t,
                const ckpt_file *files, size_t n, uint32_t shard,
                uint32_t shards);
    void (*close)(struct ckpt_io *io); /* frees it */
} ckpt_io;

/* How a folder is found: a descriptor for the caller to close. */
typedef struct ckpt_opener {
    int (*open)(void *ctx, int *fd);
    void (*free)(void *ctx);
    void *ctx;
    /* NULL, or the files belong elsewhere: takes away one that was written,
     * and brings those that are to be read. */
    int (*put)(void *ctx, const char *name);
    int (*get)(void *ctx, const ckpt_file *files, size_t n);
} ckpt_opener;
/* Files of at most `chunk` bytes in a folder.  The opener is copied; it is
 * the caller's after an error. */
PERSIA_API int persia_ckpt_folder(const ckpt_opener *opener, uint64_t chunk,
                                  ckpt_io **out);

/* How a shard finds the files of a job: the folder `folder` of a checkpoint
 * root, for a snapshot (`writes`) or a restore.  It waits for no file: the
 * job opens what it returns. */
typedef struct ckpt_places {
    int (*find)(void *ctx, const char *root, const char *folder,
                const char *proof, int writes, ckpt_io **out);
    void *ctx;
} ckpt_places;

enum { CKPT_PROOF = 128 }; /* bytes of a proof, with 0 */
/* The root whose folders lie in the folder of the server's log: no name of a
 * user's. */
#define CKPT_LOG_ROOT "@log"

/* Folders below one that an operator names, <path>/<root>/<folder>: plain
 * names and no links.  The content of .proof there must be the proof, which
 * is needed to write: so server and client see the same folder. */
typedef struct ckpt_root ckpt_root;
PERSIA_API int persia_ckpt_root_open(ckpt_root **out); /* without a path */
/* Another path; jobs that have begun are not disturbed. */
PERSIA_API int persia_ckpt_root_set(ckpt_root *r, const char *path);
/* The path of CKPT_LOG_ROOT. */
PERSIA_API int persia_ckpt_root_set_log(ckpt_root *r, const char *path);
PERSIA_API ckpt_places persia_ckpt_root_places(ckpt_root *r);

/* Storage that is no folder.  A job has a folder of this machine, through
 * which its files pass: each that is written leaves it at once; those that are
 * read stay until the end.  All but `release` may wait for the storage. */
typedef struct ckpt_far {
    /* Begins a job; *fd: its folder, a descriptor for the caller to close. */
    int (*open)(void *ctx, const char *root, const char *folder,
                const char *proof, int writes, int *fd, void **job);
    int (*put)(void *job, const char *name);
    int (*get)(void *job, const ckpt_file *files, size_t n);
    void (*close)(void *job);
    void (*release)(void *ctx); /* with the root */
    void *ctx;
} ckpt_far;
#define CKPT_FAR_CHUNK ((uint64_t)64 << 20) /* bytes of a row file there */
/* In place of a path, before the root is used; it is copied.  CKPT_LOG_ROOT
 * stays a folder. */
PERSIA_API void persia_ckpt_root_set_far(ckpt_root *r, const ckpt_far *far);
/* When no shard uses its places. */
PERSIA_API void persia_ckpt_root_close(ckpt_root *r);

/* Open folders of this process: the proof is the number of a descriptor. */
extern PERSIA_API const ckpt_places persia_ckpt_descriptors;

/* The CRC-32C of a message whose first part has `crc` and that continues with
 * data[0..n).  Start with 0. */
PERSIA_API uint32_t persia_crc32c(uint32_t crc, const void *data, size_t n);

/* The CRC-32C and the size of a file in a folder. */
PERSIA_API int persia_ckpt_file_crc(int folder, const char *name,
                                    uint32_t *crc, uint64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
