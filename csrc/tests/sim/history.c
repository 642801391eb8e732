/* history.c: what a seed plans: the cluster, the faults, the verdict. */
#include "tests/sim/history.h"

#include "log/log.h"
#include "tests/sim/four.h"

#include "ids/ids.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    FAULTS_MAX = 10,
    QUIET_S = 75,  /* after the last fault: late messages, timeouts */
    END_S = 240    /* in which ranks end then */
};

/* ---- the plan ---- */

static void plan(void)
{
    w.servers_n = 1 + sim_random(SERVERS_MAX);
    w.ranks_n = 1 + sim_random(RANKS_MAX);
    w.staleness = sim_random(FLIGHT_MAX);
    w.timeout = 20 * SIM_S;
    w.think = sim_between(40 * SIM_MS, 800 * SIM_MS);
    w.replaces = sim_chance(300);
    w.four = sim_chance(300);
    w.policy = sim_chance(500) ? LOST_RAISE : LOST_CONTINUE;
    if (sim_chance(600))
        w.durable = sim_chance(500) ? LOG_PROCESS : LOG_DISK;
    w.each = sim_chance(300) ? 2 : 1;
    sim_say("%u servers, %u a process, %u ranks, staleness %llu, lost: %s, "
            "logs: %s",
            w.servers_n, w.each, w.ranks_n, (unsigned long long)w.staleness,
            w.policy == LOST_RAISE ? "raise" : "continue",
            w.durable == LOG_DISK ? "disk" : w.durable ? "process" : "none");
}

static net_faults weather(void)
{
    net_faults f = {.delay = sim_between(SIM_MS, 300 * SIM_MS)};
    if (sim_chance(300))
        return f;
    f.lose = sim_random(40);
    f.lose_reply = sim_random(40);
    f.break_early = sim_random(20);
    f.late = sim_random(4);
    f.twice = sim_random(40);
    sim_say("of 1,000 messages %u requests and %u replies are lost, %u "
            "connections break early, %u are late, %u requests arrive twice",
            f.lose, f.lose_reply, f.break_early, f.late, f.twice);
    return f;
}

/* ---- faults ---- */

static void restart_server(void *ctx)
{
    const uint32_t i = (uint32_t)(uintptr_t)ctx;
    if (!sim_node_alive(w.servers[i].node))
        server_start(i);
}

static void restart_rank(void *ctx)
{
    const int i = (int)(uintptr_t)ctx;
    if (!w.ranks[i].life)
        rank_start(i);
}

static void fault_kill_server(void)
{
    const uint32_t i = sim_random(w.servers_n);
    const int at_answer = sim_chance(500);
    if (!sim_node_alive(w.servers[i].node))
        return;
    if (at_answer && net_await_answer(w.servers[i].node, WIRE_PUSH))
        sim_say("the answer to an update is on its way");
    server_kill(i);
    sim_at(sim_now() + sim_between(SIM_MS, at_answer ? SIM_S : 40 * SIM_S),
           restart_server,
           (void *)(uintptr_t)i);
}

static void fault_kill_rank(void)
{
    const int i = (int)sim_random(w.ranks_n);
    if (!w.ranks[i].life)
        return;
    rank_kill(i);
    sim_at(sim_now() + sim_between(SIM_MS, 4 * SIM_S), restart_rank,
           (void *)(uintptr_t)i);
}

static sim_node *any_node(void)
{
    if (w.four && sim_chance(600))
        return four_any(sim_random(w.ranks_n + 3));
    uint32_t k = sim_random(w.servers_n + w.ranks_n);
    if (k < w.servers_n)
        return w.servers[k].node;
    if (w.four)
        return w.servers[0].node;
    rank_life *l = w.ranks[k - w.servers_n].life;
    return l ? l->node : w.servers[0].node;
}

static void fault_pause(void)
{
    sim_node *n = any_node();
    const uint64_t ns = sim_between(SIM_MS, 30 * SIM_S);
    sim_say("%s is stopped for %.3f s", sim_node_name(n), (double)ns / 1e9);
    sim_pause(n, sim_now() + ns);
}

static void fault_cut(void)
{
    const int s = SLOT_SERVERS + (int)sim_random(processes_n());
    const int r = w.four ? sim_node_slot(four_any(sim_random(w.ranks_n + 3)))
                         : SLOT_RANKS + (int)sim_random(w.ranks_n);
    const uint64_t until = sim_now() + sim_between(10 * SIM_MS, 30 * SIM_S);
    const uint32_t ways = 1 + sim_random(3);
    sim_say("nothing passes from %s%s%s until %.3f",
            ways & 1 ? "client to server" : "", ways == 3 ? ", and from " : "",
            ways & 2 ? "server to client" : "", (double)until / 1e9);
    sim_say("(client %d, server %d)", r, s);
    if (ways & 1)
        net_cut(r, s, until);
    if (ways & 2)
        net_cut(s, r, until);
}

static void fault_slow(void)
{
    const uint64_t delay = sim_between(100 * SIM_MS, 4 * SIM_S);
    const uint64_t until = sim_now() + sim_between(SIM_S, 20 * SIM_S);
    sim_say("until %.3f messages take up to %.3f s", (double)until / 1e9,
            (double)delay / 1e9);
    net_slow(delay, until);
}

/* A process is taken for dead, and another one is started. */
static void fault_replace(void)
{
    const int i = (int)sim_random(w.ranks_n);
    rank_life *l = w.ranks[i].life;
    if (!l)
        return;
    const uint64_t ns = sim_between(SIM_MS, 30 * SIM_S);
    sim_say("%s is replaced, and stopped for %.3f s", sim_node_name(l->node),
            (double)ns / 1e9);
    sim_pause(l->node, sim_now() + ns);
    rank_start(i);
}

/* A server that has forgotten its clients takes a replaced process for a new
 * one, and its updates for those of the successor: a hole that is known, so
 * both are not in one history. */
static void fault_forget(void)
{
    if (w.replaces)
        fault_replace();
    else
        fault_kill_server();
}

static void one_fault(void)
{
    static void (*const kinds[])(void) = {fault_forget, fault_forget,
                                          fault_kill_rank, fault_pause,
                                          fault_cut, fault_slow};
    static void (*const roles[])(void) = {
        fault_kill_server, four_kill_worker, four_kill_rank, four_kill_rank,
        four_kill_loader, fault_pause, fault_cut, fault_slow};
    if (w.four)
        roles[sim_random(sizeof roles / sizeof *roles)]();
    else
        kinds[sim_random(sizeof kinds / sizeof *kinds)]();
}

static void heal(void)
{
    sim_say("no more faults");
    net_heal();
    for (uint32_t i = 0; i < w.servers_n; i++)
        restart_server((void *)(uintptr_t)i);
    if (w.four)
        four_heal();
    for (uint32_t i = 0; i < w.ranks_n && !w.four; i++)
        restart_rank((void *)(uintptr_t)i);
}

/* ---- the verdict ---- */

/* The values of all rows: per rank and update that of each server, then the
 * shared ones.  To be freed. */
static float *read_all(void)
{
    ps_client *c;
    uint32_t table;
    size_t n = SHARED, at = 0;
    for (uint32_t i = 0; i < w.ranks_n; i++)
        n += (size_t)w.ranks[i].attempts_n * w.servers_n;
    uint64_t *ids = calloc(n, sizeof *ids);
    float *got = calloc(n, sizeof *got);
    assert(ids && got);
    for (uint32_t i = 0; i < w.ranks_n; i++)
        for (int k = 0; k < w.ranks[i].attempts_n; k++)
            for (uint32_t s = 0; s < w.servers_n; s++)
                ids[at++] = own_row((int)i, k, s);
    for (uint32_t i = 0; i < SHARED; i++)
        ids[at++] = i + 1;
    int rc = open_client(0, 0, &c, &table);
    if (!rc)
        rc = read_rows(c, table, 0, n, ids, got);
    if (rc)
        sim_fail("the verdict reads no rows: %s", persia_err_text());
    free(ids);
    return got;
}

/* Which updates each server has, by their own rows; what the shared rows must
 * be then.  Returns where these begin. */
static const float *check_own(const float *got, double *expected)
{
    for (uint32_t i = 0; i < w.ranks_n; i++) {
        rank_role *r = &w.ranks[i];
        for (int k = 0; k < r->attempts_n; k++) {
            attempt *a = &r->attempts[k];
            for (uint32_t s = 0; s < w.servers_n; s++, got++) {
                if (*got != 0 && *got != 1)
                    sim_fail("server %u has applied batch %d of rank %u %.0f "
                             "times", s, k, i, (double)*got);
                a->applied[s] = *got == 1;
            }
            for (uint64_t id = 1; id <= SHARED; id++)
                if (a->shared >> (id - 1) & 1)
                    expected[id] +=
                        a->applied[hash_shard(id_hash(id), w.servers_n)];
        }
    }
    return got;
}

static void check_shared(const float *got, const double *expected)
{
    for (uint32_t i = 0; i < SHARED; i++)
        if ((double)got[i] != expected[i + 1])
            sim_fail("row %u is %.0f, and the updates that its server has add "
                     "up to %.0f", i + 1, (double)got[i], expected[i + 1]);
}

/* What a rank must know as lost, and what it may: an update of this process,
 * or one that another server still has. */
static void check_told(const rank_role *r)
{
    uint64_t must = 0, may = 0;
    client_counts n;
    persia_client_get_counts(r->life->c, &n);
    const uint64_t told = r->told + n.lost;
    for (int k = 0; k < r->attempts_n; k++) {
        const attempt *a = &r->attempts[k];
        int somewhere = 0;
        for (uint32_t s = 0; s < w.servers_n; s++)
            somewhere |= a->applied[s];
        for (uint32_t s = 0; s < w.servers_n; s++) {
            may += !a->applied[s];
            must += !a->applied[s] && a->acked &&
                    (somewhere || a->life == r->life->number);
        }
    }
    sim_say("rank %d: %d updates, %llu are lost and must be told, %llu were",
            r->index, r->attempts_n, (unsigned long long)must,
            (unsigned long long)told);
    if (w.durable && must)
        sim_fail("%llu acknowledged updates of rank %d are lost, although "
                 "servers have logs", (unsigned long long)must, r->index);
    if (w.durable && told && r->lives == 1)
        sim_fail("rank %d counts %llu lost updates, although servers have "
                 "logs", r->index, (unsigned long long)told);
    if (told + r->hidden < must)
        sim_fail("rank %d was told of %llu lost updates, and %llu are",
                 r->index, (unsigned long long)told, (unsigned long long)must);
    if (r->lives == 1 && told > may)
        sim_fail("rank %d was told of %llu lost updates, and only %llu are",
                 r->index, (unsigned long long)told, (unsigned long long)may);
    if (w.policy == LOST_RAISE && n.lost && !r->life->raised)
        sim_fail("rank %d counts %llu lost updates without an error",
                 r->index, (unsigned long long)n.lost);
}

/* The loader's batches, as updates of a rank. */
static void list_batches(void)
{
    w.ranks_n = 1;
    w.ranks[0].attempts_n = four_batches();
    for (int k = 0; k < four_batches(); k++)
        w.ranks[0].attempts[k].shared = four_shared(k);
}

/* What is not in the rows the loader knows of. */
static void check_batches(void)
{
    uint64_t must = 0;
    int killed = 0;
    for (uint32_t s = 0; s < w.servers_n; s++)
        killed |= w.servers[s].life > 1 && !w.durable;
    const uint64_t told = four_told(killed);
    for (int k = 0; k < w.ranks[0].attempts_n; k++) {
        int missing = 0;
        for (uint32_t s = 0; s < w.servers_n; s++)
            missing |= !w.ranks[0].attempts[k].applied[s];
        must += (uint64_t)missing;
        if (missing)
            sim_say("batch %d is missing", k + 1);
    }
    if (told < must)
        sim_fail("%llu batches are not in the rows, and the loader counts "
                 "%llu", (unsigned long long)must, (unsigned long long)told);
}

static void verdict(void)
{
    double expected[SHARED + 1] = {0};
    if (w.four)
        list_batches();
    float *rows = read_all();
    check_shared(check_own(rows, expected), expected);
    free(rows);
    if (w.four)
        check_batches();
    for (uint32_t i = 0; i < w.ranks_n && !w.four; i++)
        check_told(&w.ranks[i]);
}

/* ---- a history ---- */

static void await_end(void)
{
    const uint64_t until = sim_now() + END_S * SIM_S;
    for (;;) {
        const rank_role *late = NULL;
        for (uint32_t i = 0; i < w.ranks_n; i++)
            if (!w.ranks[i].done)
                late = &w.ranks[i];
        if (!late)
            return;
        if (sim_wait(&w, until))
            sim_fail("rank %d does not end: %s since %.3f", late->index,
                     late->life ? late->life->doing : "is down",
                     late->life ? (double)late->life->since / 1e9 : 0);
    }
}

void history_run(void)
{
    plan();
    for (uint32_t i = 0; i < w.servers_n; i += w.each)
        server_start(i);
    if (w.four)
        four_begin();
    for (int i = 0; i < (int)w.ranks_n && !w.four; i++)
        rank_start(i);
    const net_faults f = weather();
    net_set_faults(&f);
    const int faults = (int)sim_random(FAULTS_MAX);
    for (int i = 0; i < faults; i++) {
        sim_sleep(sim_between(SIM_MS, 8 * SIM_S));
        one_fault();
    }
    sim_sleep(sim_between(SIM_MS, 8 * SIM_S));
    heal();
    w.think = 5 * SIM_S;
    sim_sleep(QUIET_S * SIM_S);
    sim_say("the last updates");
    w.finish = 1;
    if (!w.four)
        await_end();
    else if (!four_await_end(sim_now() + 2 * END_S * SIM_S))
        return;
    verdict();
}
