/* storage.h: row files of servers, and the calls that make and read them.
 *
 * Real here: the jobs of a shard (shard/job.h), room ckpt, and files, which
 * lie in a folder of the history.  Modelled: what persia/checkpoint and
 * persia/distributed do around them, as the calls that they make.
 */
#ifndef PERSIA_TESTS_SIM_STORAGE_H
#define PERSIA_TESTS_SIM_STORAGE_H

#include "server/server.h"
#include "tests/sim/roles.h"

#define CHECKPOINTS "checkpoints" /* the root of rank 0 */
enum { FILES_MAX = 16, STREAMS_MAX = 8, FOLDER = 48 };

/* What one shard wrote, or is to read: persia/checkpoint/manifest.py, Part. */
struct part {
    char folder[FOLDER];
    uint64_t lineage, restore, updates, step, t, log, clock;
    wire_ledger ledgers[STREAMS_MAX];
    size_t ledgers_n;
    wire_file files[FILES_MAX];
    size_t files_n;
};

/* A shard that is asked: of a client, or the server's own. */
typedef struct peer {
    ps_client *c;
    uint32_t shard;
    shard_ref *own; /* or NULL: c's */
} peer;

/* Makes the folder that all servers and ranks share. */
void storage_begin(void);
/* Of a process that has ended. */
void storage_remove(uint64_t pid);
/* Faults of files end. */
void storage_heal(void);
/* How a server of this number finds its files in a process. */
ckpt_places storage_places(uint32_t process, uint32_t server);

/* A folder with a proof in it, to write into; then without. */
void storage_make(const char *root, const char *folder, const char *proof);
void storage_unprove(const char *root, const char *folder);
void storage_rename(const char *root, const char *from, const char *to);
int storage_open(const char *root, const char *folder);

/* Asks again while the server cannot be reached, and where it was started
 * again; the message's first field is its caller. */
int peer_ask(const peer *p, uint32_t method, void *message,
             shard_reply *reply);
/* A step of a snapshot; *out is filled as far as it is known. */
int peer_snapshot(const peer *p, uint32_t verb, const char *root,
                  const char *folder, const char *proof, part *out,
                  int *started, int *done);
int peer_restore(const peer *p, uint32_t verb, const char *root,
                 const part *from, int *done);
int peer_hello(const peer *p, uint64_t *lineage, uint64_t *restore);

int part_has(const part *p, uint64_t stream, uint64_t number);
uint64_t part_skipped(const part *p, uint64_t stream);
/* persia/checkpoint/manifest.py: part_of(); what updates are only in some of
 * the shards' rows, for another number of shards. */
void part_of(const checkpoint *c, uint32_t shard, uint32_t shards, part *out);
uint64_t checkpoint_in_part(const checkpoint *c, uint64_t stream);

/* persia/distributed/server.py: _write_rows() and _read_rows(), of the server
 * itself. */
int storage_write(const peer *own, const char *root, const char *folder,
                  part *out);
int storage_read(const peer *own, const char *root, const part *from);

/* A server's beginning: its last cut, its log, or a checkpoint; then it cuts
 * whenever its log wants one. */
void storage_recover(ps_service *service, updates_log *log, uint32_t process,
                     uint32_t server);
void storage_cuts(ps_service *service, updates_log *log, uint32_t process,
                  uint32_t server);
/* A cut now; no other runs. */
int storage_cut(ps_service *service, updates_log *log, uint32_t process,
                uint32_t server);
/* No more cuts, and none runs. */
void storage_end_cuts(home *h);

#endif
