/* roles.h: servers and ranks of a history, and what the director knows.
 *
 * The workload counts.  Each update adds 1 to a row of its own on each server,
 * and to some rows that all updates share.  So the rows say which updates each
 * server has, and how often.
 *
 * A batch of four roles is sent again, also to another number of servers.  It
 * has an own row in each group of ids that are at one server whatever their
 * number is: here, each group counts as a server.
 */
#ifndef PERSIA_TESTS_SIM_ROLES_H
#define PERSIA_TESTS_SIM_ROLES_H

#include "client/client.h"
#include "server/server.h"
#include "tests/sim/net.h"

typedef struct part part; /* storage.h */
typedef struct checkpoint checkpoint; /* saves.h */

enum {
    SERVERS_MAX = 3,
    PROCESSES_MAX = SERVERS_MAX + 1, /* one joins without a shard */
    RANKS_MAX = 3,
    UPDATES_MAX = 400, /* of a rank */
    SHARED = 8,        /* rows of all: ids 1 .. SHARED */
    GROUPS = 4,
    FLIGHT_MAX = 5,    /* updates of a rank at once */
    DIM = 2,
    SLOT_SERVERS = 1,
    SLOT_RANKS = 5,
    SLOT_COMMAND = 13,
    STREAM = 100, /* of rank 0; the next ones follow */
    STREAM_LOADER = 200
};

/* What became of one update, as its rank knows. */
typedef struct attempt {
    int life;            /* of the rank */
    uint64_t number;
    uint32_t shared;     /* bit k: it adds to row k + 1 */
    int ended, acked;    /* acked: the rank knows that it is applied */
    uint32_t servers_n, epoch; /* when it began (GROUPS, 0 of four roles), and:
                                */
    int server_rows[SERVERS_MAX];
    int blind[SERVERS_MAX]; /* a lookup that had to see it did not */
    uint8_t gone;        /* bit s: rows of server s without it were loaded,
                            after it was acknowledged */
    int blurred;         /* ... or it was in flight then: of some servers */
} attempt;

/* Bit s: its own row at server s is there. */
typedef uint8_t update_bits[RANKS_MAX][UPDATES_MAX];

/* A shard. */
typedef struct server_role {
    uint32_t at; /* the process that has it, or had it last */
    ps_service *service;
    tables *tables;
    int life;    /* 0: never started */
    int rows;    /* counts: other rows are there, or begin to be */
    int running;
    uint64_t out;     /* the move that has taken it out; 0: none */
    uint32_t out_of;  /* ... from that process */
} server_role;

/* What a process keeps of a shard on its disk. */
typedef struct home {
    struct memory_disk *disk; /* of its log; NULL: it has none */
    part *cut;                /* beside it; or NULL */
    updates_log *log;         /* open, in the process that runs; or NULL */
    struct cutter *cutter;    /* likewise */
    enum home_state {
        HOME_NONE,
        HOME_HERE,
        HOME_OUT, /* taken out, and not known to be at the other one */
        HOME_GONE
    } state;
    uint64_t move;     /* OUT and GONE: which, */
    uint32_t other;    /* ... and to that process */
    uint64_t prepared; /* by this move it arrives: all rows are there */
} home;

typedef struct process_role {
    sim_node *node;
    ps_host *host;  /* NULL: it does not listen yet */
    tables *base;   /* those of its shards are beside it */
    int life;
    int boots;      /* of its machine */
    uint8_t has;    /* bit k: it answers for shard k */
    home homes[SERVERS_MAX];
} process_role;

/* One process of a rank. */
typedef struct rank_life {
    struct rank_role *of;
    int number;
    sim_node *node;
    ps_client *c;        /* NULL: it has not connected */
    uint32_t table;
    uint64_t next;       /* number of the next update */
    int first;           /* attempt since it has loaded rows */
    int queue[FLIGHT_MAX]; /* attempts that no pusher has */
    int queue_n, in_flight;
    int pushers, ends;   /* ends: pushers return */
    int broken;          /* a call failed: the user would stop */
    int closed;          /* ... must: another process has its stream */
    int mixed;           /* servers have rows of different restores */
    int loads;           /* it is to load when it can */
    const char *doing;
    uint64_t since;
    uint64_t raised;     /* errors that told of a loss */
} rank_life;

typedef struct rank_role {
    int index;
    rank_life *life;     /* the present one; NULL: the process is down */
    int lives;
    attempt attempts[UPDATES_MAX];
    int attempts_n;
    uint64_t told;       /* lost updates that earlier lives counted */
    uint64_t hidden;     /* ... and those that one had begun to complete when
                            it ended: what follows takes them for applied */
    int replaced;        /* processes that live yet, though one follows them */
    int done;
} rank_role;

/* A history. */
typedef struct world {
    uint32_t servers_n, ranks_n;
    uint32_t each;       /* shards of a process in the beginning: each is a
                            server by itself here, but they start and are
                            killed together */
    int moves;           /* shards go to other processes: see moves.h */
    uint64_t staleness, timeout, think;
    enum client_lost policy;
    int replaces;        /* processes that live are replaced; no server is
                            killed */
    int four;            /* all four roles: see four.h */
    int saves;           /* rank 0 saves and loads: see saves.h */
    int restores;        /* servers that have no rows begin with: */
    checkpoint *newest;  /* or NULL */
    int unfinished;      /* a load may have reached some servers alone */
    int emptied;         /* a server without a log was killed */
    uint32_t epoch;      /* counts numbers of servers */
    uint64_t log_limit;
    int durable;         /* enum log_level of the servers' logs; 0: none.  With
                            LOG_DISK a kill is a power cut */
    int finish;          /* ranks make their last updates */
    server_role servers[SERVERS_MAX];
    process_role processes[PROCESSES_MAX];
    rank_role ranks[RANKS_MAX];
    char addresses[PROCESSES_MAX][16];
} world;
extern world w;

/* So many processes there are, and so many of them clients know from the
 * beginning. */
uint32_t processes_n(void);
uint32_t processes_given(void);
/* What the process of a server keeps of it; its node. */
home *home_of(uint32_t server);
sim_node *node_of(uint32_t server);
/* The server of its time that an id is at; of four roles: its group. */
uint32_t place_of(const attempt *a, uint64_t id);
/* The id of an update's own row at a server of its time. */
uint64_t own_row(int rank, int update, uint32_t server);
/* Reads the first value of rows: 0, or an error. */
typedef int (*rows_reader)(void *ctx, size_t n, const uint64_t *ids,
                           float *out);
/* Which updates are in all rows; `where` for texts.  whole: nothing changes
 * meanwhile.  Fails the history if one is in them twice, or in part. */
int counts_read(const char *where, int whole, rows_reader read, void *ctx,
                update_bits has);
/* What every history's table is. */
void counts_config(struct table_config *out);
/* Starts a process of servers without rows; it is up when its node listens.
 */
void host_start(uint32_t no);
void host_kill(uint32_t no);
/* A service of a shard in tables beside those of a process.  boot and lineage
 * as in service_config.  *log: its log, or NULL. */
ps_service *make_service(uint32_t no, uint32_t shard, uint64_t boot,
                         uint64_t lineage, tables **p, updates_log **log);
void rank_start(int i);
void rank_kill(int i);
/* A client of all servers that makes no updates, or of a rank. */
int open_client(uint64_t stream, uint32_t rank, ps_client **out,
                uint32_t *table);
/* Looks up rows; out: [n] the first value of each. */
int read_rows(ps_client *c, uint32_t table, uint64_t after, size_t n,
              const uint64_t *ids, float *out);

#endif
