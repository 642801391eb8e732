/* saves.c: what rank 0 does about checkpoints; see saves.h. */
#include "tests/sim/saves.h"

#include "ids/ids.h"
#include "sched/sched.h"
#include "tests/sim/four.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- what is true of updates ---- */

/* The server that has an update's own row of server s of its time. */
static uint32_t server_of(int rank, int k, uint32_t s)
{
    return hash_shard(id_hash(own_row(rank, k, s)), w.servers_n);
}

void saves_check(const char *where, int rank, int k, uint8_t has)
{
    const attempt *a = &w.ranks[rank].attempts[k];
    const uint8_t every = (uint8_t)((1 << a->servers_n) - 1);
    if (has & a->gone)
        sim_fail("%s: batch %d of rank %d is there, but rows without it were "
                 "loaded", where, k, rank);
    if (w.durable && a->acked && !a->blurred && (has | a->gone) != every)
        sim_fail("%s: batch %d of rank %d is missing, although servers have "
                 "logs", where, k, rank);
}

/* Rows with these updates are loaded; acked: before that began. */
static void note_loaded(update_bits has, update_bits acked)
{
    for (uint32_t i = 0; i < w.ranks_n; i++)
        for (int k = 0; k < w.ranks[i].attempts_n; k++) {
            attempt *a = &w.ranks[i].attempts[k];
            const uint8_t every = (uint8_t)((1 << a->servers_n) - 1);
            if (acked[i][k])
                a->gone = every & (uint8_t)~has[i][k];
            else
                a->blurred = 1;
        }
}

/* It is not known which servers have loaded them. */
static void note_unsure(void)
{
    for (uint32_t i = 0; i < w.ranks_n; i++)
        for (int k = 0; k < w.ranks[i].attempts_n; k++)
            w.ranks[i].attempts[k].blurred = 1;
}

static void note_acked(update_bits acked)
{
    memset(acked, 0, sizeof(update_bits));
    for (uint32_t i = 0; i < w.ranks_n; i++)
        for (int k = 0; k < w.ranks[i].attempts_n; k++)
            acked[i][k] = (uint8_t)w.ranks[i].attempts[k].acked;
}

static void other_rows(void)
{
    for (uint32_t s = 0; s < w.servers_n; s++)
        w.servers[s].rows++;
}

/* ---- rows of a checkpoint ---- */

static int read_table(void *ctx, size_t n, const uint64_t *ids, float *out)
{
    float *rows = calloc(n * DIM, sizeof *rows);
    uint8_t *found = calloc(n, 1);
    assert(rows && found);
    int rc = persia_table_get(ctx, n, ids, rows, NULL, found);
    for (size_t i = 0; i < n; i++)
        out[i] = found[i] ? rows[i * DIM] : 0;
    free(rows);
    free(found);
    return rc;
}

/* Row files of all servers, into an empty table. */
static int read_files(sched *s, table *t, const checkpoint *c)
{
    ckpt_file files[SERVERS_MAX * FILES_MAX];
    size_t n = 0;
    memset(files, 0, sizeof files);
    for (uint32_t i = 0; i < c->servers_n; i++)
        for (size_t k = 0; k < c->parts[i].files_n; k++) {
            const wire_file *f = &c->parts[i].files[k];
            memcpy(files[n].name, f->name, CKPT_NAME);
            files[n].rows = f->rows;
            files[n].bytes = f->bytes;
            files[n++].crc = f->crc;
        }
    const int fd = storage_open(CHECKPOINTS, c->parts[0].folder);
    const table_config *config = persia_table_get_config(t);
    int rc = persia_ckpt_verify(s, config, fd, files, n, NULL);
    if (!rc)
        rc = persia_ckpt_restore(s, t, fd, files, n, 0, 1);
    close(fd);
    return rc;
}

static void read_checkpoint(const checkpoint *c, update_bits has)
{
    table_config config;
    table *t;
    sched *s;
    counts_config(&config);
    int rc = persia_sched_create(1, &s);
    if (!rc)
        rc = persia_table_create(&config, &t);
    if (!rc)
        rc = read_files(s, t, c);
    if (!rc)
        rc = counts_read("the checkpoint", 1, read_table, t, has);
    if (rc)
        sim_fail("a checkpoint cannot be read: %s", persia_err_text());
    persia_table_destroy(t);
    persia_sched_destroy(s);
}

/* ---- rows of servers ---- */

static int read_live(void *ctx, size_t n, const uint64_t *ids, float *out)
{
    const saver *of = ctx;
    return read_rows(of->c, of->table, 0, n, ids, out);
}

/* What a look at all rows has seen, and whether they are the same still. */
typedef struct view {
    update_bits has;
    int updates[RANKS_MAX], rows[SERVERS_MAX];
} view;

static int view_take(const saver *of, view *v)
{
    for (uint32_t i = 0; i < w.ranks_n; i++)
        v->updates[i] = w.ranks[i].attempts_n;
    for (uint32_t s = 0; s < w.servers_n; s++)
        v->rows[s] = w.servers[s].rows;
    saver at = *of;
    return counts_read("a look", 0, read_live, &at, v->has);
}

/* The rows of `later` have what was seen; same: and of rank 0 nothing else.
 * With four roles workers may still bring what a rank left that died. */
static void view_compare(const view *v, const char *where, update_bits later,
                         int same)
{
    for (uint32_t i = 0; i < w.ranks_n; i++)
        for (int k = 0; k < v->updates[i]; k++)
            for (uint32_t s = 0; s < w.ranks[i].attempts[k].servers_n; s++) {
                const uint32_t at = server_of((int)i, k, s);
                const int had = v->has[i][k] >> s & 1;
                const int has = later[i][k] >> s & 1;
                if (v->rows[at] == w.servers[at].rows &&
                    (had > has || (i == 0 && same && had != has)))
                    sim_fail("%s: batch %d of rank %u is %sthere", where, k, i,
                             has ? "" : "not ");
            }
}

/* ---- saving ---- */

/* All servers, until they have started, or are done. */
static int snapshot_all(ps_client *client, uint32_t verb, const char *folder,
                        checkpoint *c, int until_done)
{
    for (;;) {
        int all = 1;
        for (uint32_t i = 0; i < w.servers_n; i++) {
            int started = 0, done = 0;
            const peer p = {.c = client, .shard = i};
            int rc = peer_snapshot(&p, verb, CHECKPOINTS, folder, "proof",
                                   &c->parts[i], &started, &done);
            if (rc)
                return rc;
            all &= until_done ? done : started;
        }
        if (all || verb == SNAPSHOT_BEGIN)
            return PERSIA_OK;
        sim_sleep(sim_between(SIM_MS, 500 * SIM_MS));
    }
}

/* They are asked to end what they write; a server that does not answer forgets
 * it. */
static void end_all(ps_client *client, const char *folder, checkpoint *c)
{
    for (uint32_t i = 0; i < w.servers_n; i++) {
        const peer p = {.c = client, .shard = i};
        int started, done = 0;
        const uint64_t until = sim_now() + 10 * SIM_S;
        while (!peer_snapshot(&p, SNAPSHOT_END, CHECKPOINTS, folder, "proof",
                              &c->parts[i], &started, &done) &&
               !done && sim_now() < until)
            sim_sleep(100 * SIM_MS);
    }
}

/* persia/checkpoint/shards.py: ShardRows.write(). */
static int write_all(ps_client *client, const char *folder, checkpoint *c)
{
    storage_make(CHECKPOINTS, folder, "proof");
    int rc = snapshot_all(client, SNAPSHOT_BEGIN, folder, c, 0);
    if (!rc)
        rc = snapshot_all(client, SNAPSHOT_STATUS, folder, c, 0);
    if (!rc)
        rc = snapshot_all(client, SNAPSHOT_STATUS, folder, c, 1);
    end_all(client, folder, c);
    storage_unprove(CHECKPOINTS, folder);
    /* Of a server that was started again, or for another save. */
    return rc == PERSIA_EARG ? persia_err_set(PERSIA_EUNAVAILABLE,
                                              "the save has failed")
                             : rc;
}

/* Updates of four roles have the names of their batches. */
static uint64_t stream_of(int rank)
{
    return w.four ? STREAM_LOADER : STREAM + (uint64_t)rank;
}

/* Rows and ledger of a server are of one moment. */
static void check_ledger(const checkpoint *c, int rank, int k)
{
    const attempt *a = &w.ranks[rank].attempts[k];
    for (uint32_t i = 0; w.four && i < GROUPS; i++)
        if (c->has[rank][k] >> i & 1 &&
            !part_has(&c->parts[server_of(rank, k, i)], STREAM_LOADER,
                      a->number))
            sim_fail("the checkpoint: a ledger has not batch %d", k + 1);
    if (a->servers_n != c->servers_n || a->epoch != w.epoch)
        return;
    for (uint32_t s = 0; s < c->servers_n; s++) {
        const int row = c->has[rank][k] >> s & 1;
        const int there = part_has(&c->parts[s], stream_of(rank), a->number);
        if (row && !there)
            sim_fail("the checkpoint: the ledger of server %u has not update "
                     "%llu of rank %d", s, (unsigned long long)a->number,
                     rank);
        /* Of a killed server what was lost is passed over; numbers are used
         * again after a load. */
        if (!row && there && w.durable && !a->blurred && !a->gone &&
            (a->acked || !a->ended) && w.ranks[rank].life &&
            a->life == w.ranks[rank].life->number)
            sim_fail("the checkpoint: the ledger of server %u has update %llu "
                     "of rank %d, its rows have not", s,
                     (unsigned long long)a->number, rank);
    }
}

/* Batches that the ledger of a server has, and its rows have not, are those
 * that it says to have passed over.  To one without a log clients may say that
 * what it has lost is through. */
static void check_skipped(const checkpoint *c, uint32_t s)
{
    uint64_t missing = 0;
    uint32_t group = 0; /* one of the server's */
    while (server_of(0, 0, group) != s)
        group++;
    for (int k = 0; k < w.ranks[0].attempts_n; k++)
        missing += !(c->has[0][k] >> group & 1) &&
                   part_has(&c->parts[s], STREAM_LOADER,
                            w.ranks[0].attempts[k].number);
    const uint64_t skipped = part_skipped(&c->parts[s], STREAM_LOADER);
    if (missing != skipped)
        sim_fail("the checkpoint: server %u has passed over %llu batches, and "
                 "its rows lack %llu of its ledger", s,
                 (unsigned long long)skipped, (unsigned long long)missing);
}

/* persia/checkpoint/shards.py: ShardRows.check_one(). */
static int check_restores(const checkpoint *c)
{
    for (uint32_t s = 1; s < w.servers_n; s++)
        if (c->parts[s].restore != c->parts[0].restore)
            return persia_err_set(PERSIA_EINCOMPLETE,
                                  "the rows stem from different restores");
    return PERSIA_OK;
}

static void publish(checkpoint *c, const char *folder, const view *before,
                    update_bits acked)
{
    static unsigned step;
    char name[FOLDER];
    for (uint32_t s = 0; s < w.servers_n; s++)
        snprintf(c->parts[s].folder, FOLDER, "%s", folder);
    read_checkpoint(c, c->has);
    view_compare(before, "the checkpoint", c->has, !w.four);
    for (uint32_t i = 0; i < w.ranks_n; i++)
        for (int k = 0; k < before->updates[i]; k++) {
            if (acked[i][k])
                saves_check("the checkpoint", (int)i, k, c->has[i][k]);
            check_ledger(c, (int)i, k);
        }
    for (uint32_t s = 0; s < c->servers_n && w.four && w.durable && !w.epoch;
         s++)
        check_skipped(c, s);
    snprintf(name, sizeof name, "step-%u", ++step);
    storage_rename(CHECKPOINTS, folder, name);
    for (uint32_t s = 0; s < w.servers_n; s++)
        snprintf(c->parts[s].folder, FOLDER, "%s", name);
    w.newest = c;
    sim_say("has saved %s", name);
}

int saves_save(const saver *of)
{
    static unsigned folders;
    char folder[FOLDER];
    uint64_t restore;
    view before;
    update_bits acked;
    checkpoint *c = calloc(1, sizeof *c);
    assert(c);
    c->servers_n = w.servers_n;
    snprintf(folder, sizeof folder, ".tmp-%u", ++folders);
    sim_say("saves into %s", folder);
    sim_wake(&w.newest);
    int rc = persia_client_look(of->c);
    if (!rc)
        rc = view_take(of, &before);
    note_acked(acked);
    const peer first = {.c = of->c};
    uint64_t lineage = 0;
    if (!rc)
        rc = peer_hello(&first, &lineage, &restore);
    if (!rc)
        rc = write_all(of->c, folder, c);
    if (!rc)
        rc = check_restores(c);
    for (uint32_t i = 0; i < w.servers_n; i++)
        c->parts[i].lineage = lineage;
    if (!rc)
        publish(c, folder, &before, acked);
    else
        free(c);
    return rc;
}

/* ---- loading ---- */

/* persia/checkpoint/manifest.py: next_restore(). */
static int next_restore(ps_client *client, uint64_t *out)
{
    uint64_t highest = 0;
    for (uint32_t i = 0; i < w.newest->servers_n; i++)
        if (w.newest->parts[i].restore > highest)
            highest = w.newest->parts[i].restore;
    for (uint32_t i = 0; i < w.servers_n; i++) {
        uint64_t lineage, restore;
        const peer p = {.c = client, .shard = i};
        int rc = peer_hello(&p, &lineage, &restore);
        if (rc)
            return rc;
        if (restore > highest)
            highest = restore;
    }
    highest = (highest >> 22) + 1;
    if (highest < sim_now() / SIM_MS)
        highest = sim_now() / SIM_MS;
    *out = highest << 22 | sim_random(1 << 22);
    return PERSIA_OK;
}

/* One step of all servers; until_done: until each has done it. */
static int restore_all(ps_client *client, uint32_t verb, const part *parts,
                       int until_done)
{
    int first = PERSIA_OK;
    for (uint32_t i = 0; i < w.servers_n; i++) {
        const peer p = {.c = client, .shard = i};
        int rc, done = 0;
        do
            rc = peer_restore(&p, verb, CHECKPOINTS, &parts[i], &done);
        while (!rc && !done && until_done &&
               (sim_sleep(sim_between(SIM_MS, 100 * SIM_MS)), 1));
        if (rc && verb != RESTORE_ABORT)
            return rc;
        first = first ? first : rc;
    }
    return PERSIA_OK;
}

int saves_greet(ps_client *c, int restored)
{
    const uint64_t until = sim_now() + w.timeout;
    int rc;
    while ((rc = persia_client_greet(c, restored)) == PERSIA_EUNAVAILABLE &&
           sim_now() < until)
        sim_sleep(100 * SIM_MS);
    return rc;
}

/* persia/checkpoint/saving.py: _stage(). */
static int stage(ps_client *client, const checkpoint *c, part *parts)
{
    uint64_t restore = 0, lineage = 0;
    int rc = saves_greet(client, 0);
    if (!rc)
        rc = next_restore(client, &restore);
    if (!rc)
        rc = persia_random_id(&lineage);
    for (uint32_t i = 0; i < w.servers_n; i++) {
        part_of(c, i, w.servers_n, &parts[i]);
        parts[i].restore = restore;
        parts[i].lineage = lineage | 1;
    }
    if (!rc)
        rc = restore_all(client, RESTORE_PREPARE, parts, 1);
    return rc;
}

/* ... _apply() and _go_on().  rows: of servers that have what was loaded. */
static int commit(ps_client *client, const checkpoint *c, part *parts,
                  int *rows)
{
    update_bits acked, has;
    memcpy(has, c->has, sizeof has);
    note_acked(acked);
    w.unfinished = 1;
    other_rows();
    for (uint32_t s = 0; s < w.servers_n; s++)
        rows[s] = w.servers[s].rows + 1;
    int rc = restore_all(client, RESTORE_COMMIT, parts, 0);
    if (!rc)
        rc = restore_all(client, RESTORE_COMMIT, parts, 1);
    other_rows();
    if (rc) {
        note_unsure();
        return rc;
    }
    w.unfinished = 0;
    note_loaded(has, acked);
    sim_say("has loaded %s", parts[0].folder);
    rc = saves_greet(client, 1);
    if (!rc)
        persia_client_set_t(client, parts[0].t);
    return rc;
}

int saves_load(const saver *of, int *loaded)
{
    const checkpoint *c = w.newest;
    part *parts = calloc(SERVERS_MAX, sizeof *parts);
    int rows[SERVERS_MAX]; /* a server may be killed before the look */
    view after;
    assert(parts);
    sim_say("loads %s", c->parts[0].folder);
    sim_wake(&w.newest);
    int rc = stage(of->c, c, parts);
    persia_client_set_loading(of->c, 1);
    if (!rc)
        rc = commit(of->c, c, parts, rows);
    if (rc) {
        char text[256];
        snprintf(text, sizeof text, "%s", persia_err_text());
        (void)restore_all(of->c, RESTORE_ABORT, parts, 0);
        /* Of a server that was started again. */
        rc = persia_err_set(rc == PERSIA_EARG ? PERSIA_EUNAVAILABLE : rc, "%s",
                            text);
    }
    persia_client_set_loading(of->c, 0);
    free(parts);
    *loaded = !rc;
    if (rc)
        return rc;
    rc = view_take(of, &after);
    if (!rc) {
        update_bits has;
        memcpy(has, c->has, sizeof has);
        memcpy(after.rows, rows, sizeof rows);
        for (uint32_t i = 1; i < w.ranks_n; i++)
            after.updates[i] = 0; /* they continue */
        view_compare(&after, "what was loaded", has, 1);
    }
    return rc;
}

/* ---- another number of servers ---- */

/* Updates that only some rows have stay so, and count as lost. */
static void note_in_part(const checkpoint *c, int rank, uint32_t servers_n)
{
    rank_role *r = &w.ranks[rank];
    uint64_t must = 0, told = checkpoint_in_part(c, stream_of(rank));
    if (c->servers_n == servers_n)
        return;
    for (int k = 0; k < r->attempts_n; k++) {
        const attempt *a = &r->attempts[k];
        const uint8_t every = (uint8_t)((1 << a->servers_n) - 1);
        const uint8_t has = c->has[rank][k];
        must += has && (has | a->gone) != every && a->acked && !a->blurred &&
                a->epoch == w.epoch;
    }
    if (w.durable && told < must)
        sim_fail("%llu updates of rank %d are in part of the rows, and %llu "
                 "are reported", (unsigned long long)must, rank,
                 (unsigned long long)told);
    r->told += told;
}

void saves_reshard(uint32_t servers_n)
{
    update_bits acked, has;
    const checkpoint *c = w.newest;
    for (uint32_t i = 0; i < w.ranks_n; i++)
        if (w.ranks[i].life)
            rank_kill((int)i);
    if (w.four)
        four_kill_all();
    const int emptied = w.emptied;
    for (uint32_t p = 0; p < processes_n(); p++)
        if (sim_node_alive(w.processes[p].node))
            host_kill(p);
    w.emptied = emptied; /* these have rows when they begin */
    memcpy(has, c->has, sizeof has);
    note_acked(acked);
    for (uint32_t i = 0; i < w.ranks_n; i++)
        note_in_part(c, (int)i, servers_n);
    note_loaded(has, acked);
    w.servers_n = servers_n;
    w.unfinished = 0;
    w.restores = 1;
    w.epoch++;
    for (uint32_t p = 0; p < PROCESSES_MAX; p++)
        memset(w.processes[p].homes, 0, sizeof w.processes[p].homes);
    for (uint32_t s = 0; s < servers_n; s++)
        w.servers[s].at = s / w.each;
    for (uint32_t p = 0; p < processes_n(); p++)
        host_start(p);
}
