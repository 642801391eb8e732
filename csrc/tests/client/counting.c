#include "counting.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>

uint32_t declare_counting(ps_client *c)
{
    return declare_bounded(c, 0);
}

uint32_t declare_bounded(ps_client *c, uint64_t capacity)
{
    table_config t;
    uint32_t no;
    int created;
    persia_table_config_init(&t);
    snprintf(t.name, sizeof t.name, "counts");
    t.dim = DIM;
    t.optimizer = OPTIM_SGD;
    t.init = INIT_CONSTANT;
    t.init_a = 0;
    t.capacity = capacity;
    int rc = persia_client_declare(c, &t, &no, &created);
    if (rc)
        fail_msg("%s", persia_err_text());
    return no;
}

int add_one(ps_client *c, const client_update *name, uint32_t no,
                   uint64_t first, size_t n)
{
    uint64_t ids[IDS];
    float grad[IDS * DIM];
    for (size_t i = 0; i < n; i++)
        ids[i] = first + i;
    for (size_t i = 0; i < IDS * DIM; i++)
        grad[i] = -1;
    push_part part = {.n = n, .ids = ids, .grad = grad, .stride = DIM,
                      .bags = n};
    optim_args sgd = {.kind = OPTIM_SGD, .lr = 1, .step = 1,
                      .grad_scale = 1};
    push_job job = {.parts = &part, .parts_n = 1, .optim = &sgd};
    return persia_client_push(c, name, &no, &job, 1);
}

void read_counts(ps_client *c, uint32_t no, float *out)
{
    uint64_t ids[IDS];
    static float rows[IDS * DIM];
    for (uint64_t i = 0; i < IDS; i++)
        ids[i] = i;
    pull_job pull = {.n = IDS, .ids = ids, .out = rows, .stride = DIM};
    int rc = persia_client_pull(c, 0, &no, &pull, 1);
    if (rc)
        fail_msg("%s", persia_err_text());
    for (size_t i = 0; i < IDS; i++) {
        assert_true(rows[i * DIM] == rows[i * DIM + 1]);
        out[i] = rows[i * DIM];
    }
}

int shard_of(uint64_t id, uint32_t shards)
{
    return (int)hash_shard(id_hash(id), shards);
}

ps_client *open_one(cluster *c, uint32_t shards, uint64_t timeout_ns,
                           enum client_lost lost)
{
    cluster_make(c, shards);
    client_config config = cluster_config(c);
    config.timeout_ns = timeout_ns;
    config.lost = lost;
    return cluster_client(c, &config);
}

client_counts counts_of(const ps_client *c)
{
    client_counts n;
    persia_client_get_counts(c, &n);
    return n;
}

static void *push_many(void *arg)
{
    pusher *p = arg;
    for (uint64_t i = 0; i < UPDATES; i++)
        if (add_one(p->c, NULL, p->no, (p->first + i) % 8, IDS / 2))
            p->failed++;
    return NULL;
}

void pushers_start(ps_client *c, uint32_t no, pusher *pushers)
{
    for (uint64_t t = 0; t < THREADS; t++) {
        pusher *p = &pushers[t];
        *p = (pusher){.c = c, .no = no, .first = t};
        assert_int_equal(pthread_create(&p->thread, NULL, push_many, p), 0);
    }
}

void pushers_join(pusher *pushers)
{
    for (int t = 0; t < THREADS; t++) {
        pthread_join(pushers[t].thread, NULL);
        assert_int_equal(pushers[t].failed, 0);
    }
}
