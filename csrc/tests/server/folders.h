/* folders.h: what the tests of snapshots and restores share: a folder of
 * checkpoints, requests, two tables with rows. */
#ifndef PERSIA_TESTS_SERVER_FOLDERS_H
#define PERSIA_TESTS_SERVER_FOLDERS_H

#include "tests/server/help.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ids/ids.h"

static char base[64]; /* the servers' folder of checkpoints */

static inline int setup(void **state)
{
    (void)state;
    memcpy(base, "/tmp/persia-service-XXXXXX", 27);
    return mkdtemp(base) == NULL;
}

static inline int teardown(void **state)
{
    char command[100];
    (void)state;
    snprintf(command, sizeof command, "rm -r %s", base);
    return system(command);
}

static inline void make_folder_in(const char *root, const char *name,
                           const char *proof)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", base, root);
    (void)mkdir(path, 0777);
    snprintf(path, sizeof path, "%s/%s/%s", base, root, name);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof path, "%s/%s/%s/.proof", base, root, name);
    int fd = open(path, O_WRONLY | O_CREAT, 0666);
    assert_int_equal(write(fd, proof, strlen(proof)), strlen(proof));
    close(fd);
}

static inline void make_folder(const char *name, const char *proof)
{
    make_folder_in("root", name, proof);
}

static inline void expect(result r, int code, const char *text)
{
    if (r.code != code || !strstr(r.text, text))
        fail_msg("%s: %s", persia_err_name(r.code), r.text);
    result_free(&r);
}

static inline wire_snapshot snapshot_of(const server *v, uint32_t verb,
                                 const char *folder)
{
    wire_snapshot m = {.caller = caller_of(v), .verb = verb, .root = "root",
                       .proof = "secret"};
    snprintf(m.folder, sizeof m.folder, "%s", folder);
    return m;
}

static inline void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
}

/* BEGIN, then STATUS until it is done; *r owns what the reply points to. */
static inline wire_snapshot_reply snapshot_whole(const server *v,
                                                 const char *folder,
                                                 result *r)
{
    wire_snapshot m = snapshot_of(v, SNAPSHOT_BEGIN, folder);
    wire_snapshot_reply reply;
    for (;;) {
        *r = CALL(v, SNAPSHOT, snapshot, &m);
        DECODE(r, snapshot_reply, &reply);
        if (reply.done)
            return reply;
        result_free(r);
        m.verb = SNAPSHOT_STATUS;
        nap();
    }
}

static inline void snapshot_end(const server *v, const char *folder)
{
    wire_snapshot m = snapshot_of(v, SNAPSHOT_END, folder);
    expect(CALL(v, SNAPSHOT, snapshot, &m), PERSIA_OK, "");
}

static inline result restore_ask(const server *v, wire_restore *m,
                                 uint32_t verb)
{
    m->caller = caller_of(v);
    m->verb = verb;
    memcpy(m->root, "root", 5);
    return CALL(v, RESTORE, restore, m);
}

/* PREPARE until it is done; the rows of this shard. */
static inline uint64_t restore_prepare(const server *v, wire_restore *m)
{
    for (;;) {
        wire_restore_reply reply;
        result r = restore_ask(v, m, RESTORE_PREPARE);
        DECODE(&r, restore_reply, &reply);
        result_free(&r);
        if (reply.done)
            return reply.rows;
        nap();
    }
}

enum { IDS = 3000, DIM = 5 };

/* Update `number` of a table: half of the ids, gradients that depend on id
 * and number alone. */
static inline void push_some(server *v, uint32_t shards, uint32_t table,
                      uint64_t number)
{
    static uint64_t ids[IDS];
    static float grads[IDS * DIM];
    optim_hyper hyper = {.kind = OPTIM_ADAGRAD, .lr = 0.1f, .eps = 1e-8f,
                        .grad_scale = 1};
    for (uint32_t i = 0; i < shards; i++) {
        size_t n = 0;
        for (uint64_t id = 0; id < IDS; id++) {
            rng g = {id * 1000000 + number * 1000};
            if (hash_shard(id_hash(id), shards) != i || rng_below(&g, 2))
                continue;
            for (size_t k = 0; k < DIM; k++)
                grads[n * DIM + k] = rng_float(&g);
            ids[n++] = id;
        }
        wire_push_table t = push_table(table, DIM, n, ids, grads, &hyper);
        wire_push m = push_of(&v[i], STREAM, number, &t, 1);
        m.step = number;
        assert_int_equal(push(&v[i], &m).status, PUSH_APPLIED);
    }
}

static inline void declare_two(server *v, uint32_t shards)
{
    for (uint32_t i = 0; i < shards; i++)
        for (uint32_t t = 0; t < 2; t++) {
            table_spec spec = spec_of(t ? "b" : "a", DIM,
                                           OPTIM_ADAGRAD);
            spec.dtype = t;
            assert_int_equal(declare(&v[i], &spec), t);
        }
}

#endif
