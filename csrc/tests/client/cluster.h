/* cluster.h: shards of this process behind references whose calls are answered
 * on other threads, and go wrong as the tests want it. */
#ifndef PERSIA_TESTS_CLIENT_CLUSTER_H
#define PERSIA_TESTS_CLIENT_CLUSTER_H

#include <pthread.h>
#include <stdatomic.h>

#include "client/private.h"
#include "server/server.h"

enum { NODES_MAX = 8 };

typedef struct node {
    pthread_rwlock_t lock; /* shared: a call is in the service */
    tables *p;
    ps_service *service;
    service_config config;
    struct way *ways;     /* to it; guarded by lock */
    _Atomic(int) active;  /* calls that a thread works on */
    _Atomic(int) down;    /* no connection */
    _Atomic(int) recovers; /* it refuses all but Stats */
    _Atomic(int) full;    /* the next so many Hellos: its log is full */
    _Atomic(int) lose;    /* of 256 requests: not served, or served but the
                             answer is lost */
    _Atomic(uint32_t) held; /* requests of these methods (bits) wait */
    _Atomic(int) waiting; /* those that do */
    _Atomic(int) garbage; /* the next so many answers are no messages */
    _Atomic(int) mute;    /* answers to pushes from now on are lost */
    _Atomic(int) stale;   /* the next so many pushes: STALE_LINEAGE */
    _Atomic(uint64_t) calls[WIRE_METHODS_N];
    /* Until the deadline of a request that arrived, at most. */
    _Atomic(uint64_t) patience[WIRE_METHODS_N];
    _Atomic(uint64_t) turn;
} node;

typedef struct cluster {
    uint32_t n;
    node nodes[NODES_MAX];
    char names[NODES_MAX][32];
    const char *addresses[NODES_MAX];
} cluster;

/* Calls that a thread works on. */
extern _Atomic(int) cluster_answering;

void cluster_make(cluster *c, uint32_t shards);
void cluster_free(cluster *c);
/* The shard starts again, without rows. */
void cluster_restart(cluster *c, uint32_t shard);
/* A client of rank 0 of 1; `addresses` of the shards in order[0..n). */
client_config cluster_config(cluster *c);
int cluster_open(cluster *c, const client_config *config,
                 const uint32_t *order, size_t n, ps_client **out);
/* Opens with all shards, in order; fails the test if that fails. */
ps_client *cluster_client(cluster *c, const client_config *config);
uint64_t cluster_calls(const cluster *c, uint32_t method);

#endif
