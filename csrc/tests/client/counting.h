/* counting.h: a client whose rows count their updates. */
#ifndef PERSIA_TESTS_CLIENT_COUNTING_H
#define PERSIA_TESTS_CLIENT_COUNTING_H

#include "tests/client/cluster.h"

enum { IDS = 64, DIM = 2, THREADS = 4, UPDATES = 60 };
#define SECOND ((uint64_t)1000000000)

/* Rows begin with 0. */
uint32_t declare_counting(ps_client *c);
/* The same, for so many rows (of all shards; 0: any). */
uint32_t declare_bounded(ps_client *c, uint64_t capacity);
/* An update adds 1 to the rows of ids first .. first + n - 1. */
int add_one(ps_client *c, const client_update *name, uint32_t no,
            uint64_t first, size_t n);
/* Of ids 0 .. IDS - 1. */
void read_counts(ps_client *c, uint32_t no, float *out);
int shard_of(uint64_t id, uint32_t shards);
/* A cluster and a client of it. */
ps_client *open_one(cluster *c, uint32_t shards, uint64_t timeout_ns,
                    enum client_lost lost);
client_counts counts_of(const ps_client *c);

/* THREADS threads, each of which pushes UPDATES updates of IDS / 2 rows. */
typedef struct pusher {
    ps_client *c;
    uint32_t no;
    uint64_t first;
    int failed;
    pthread_t thread;
} pusher;
void pushers_start(ps_client *c, uint32_t no, pusher *pushers);
/* All of them went well. */
void pushers_join(pusher *pushers);

#endif
