/* history.c: what a seed plans: the cluster, the faults, the verdict. */
#include "tests/sim/history.h"

#include "log/log.h"
#include "tests/log/disk.h"
#include "tests/sim/four.h"
#include "tests/sim/moves.h"
#include "tests/sim/saves.h"

#include "ids/ids.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    FAULTS_MAX = 10,
    QUIET_S = 75,  /* after the last fault: late messages, timeouts */
    END_S = 240    /* in which ranks end then */
};

/* ---- the plan ---- */

/* A planted bug is looked for in histories that may show it. */
static uint32_t saves_of_1000(void)
{
    static const char *const bugs[] = {
        "union_of_ledgers",       "cut_of_a_later_moment",
        "restore_is_taken_back",  "ledger_of_a_later_moment",
        "ledger_is_not_restored", "restore_is_not_logged",
        "loader_sends_no_more_after_a_load",
        "worker_goes_on_after_a_load"};
    for (size_t i = 0; i < sizeof bugs / sizeof *bugs; i++)
        if (sim_bug(bugs[i]))
            return 1000;
    return sim_bug("") ? 450 : 0;
}

static uint32_t moves_of_1000(void)
{
    static const char *const bugs[] = {
        "rows_that_are_not_held",   "moved_shard_answers",
        "out_is_not_noted",         "prepared_without_its_rows",
        "taken_back_with_its_boot", "last_rows_are_not_sent"};
    for (size_t i = 0; i < sizeof bugs / sizeof *bugs; i++)
        if (sim_bug(bugs[i]))
            return 1000;
    return sim_bug("") ? 400 : 0;
}

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
    w.saves = sim_chance(saves_of_1000());
    w.moves = !w.saves && sim_chance(moves_of_1000());
    w.log_limit = w.saves || w.moves ? sim_between(4096, 1 << 16) : 1 << 30;
    if (w.saves) {
        w.replaces = 0;
        w.restores = sim_chance(400);
        if (sim_chance(700)) { /* others at servers of a job that loads */
            w.servers_n = 2 + sim_random(SERVERS_MAX - 1);
            w.ranks_n = 2 + sim_random(RANKS_MAX - 1);
        }
    }
    if (w.saves || w.moves)
        storage_begin();
    w.each = sim_chance(300) ? 2 : 1;
    for (uint32_t i = 0; i < w.servers_n; i++) {
        w.servers[i].at = i / w.each;
        home_of(i)->state = HOME_HERE;
    }
    sim_say("%u servers, %u a process, %u ranks, staleness %llu, lost: %s, "
            "logs: %s%s%s%s",
            w.servers_n, w.each, w.ranks_n, (unsigned long long)w.staleness,
            w.policy == LOST_RAISE ? "raise" : "continue",
            w.durable == LOG_DISK ? "disk" : w.durable ? "process" : "none",
            w.saves ? ", checkpoints" : "",
            w.restores ? ", servers begin with them" : "",
            w.moves ? ", shards move" : "");
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
    const uint32_t no = (uint32_t)(uintptr_t)ctx;
    if (no >= processes_n() || sim_node_alive(w.processes[no].node))
        return;
    if (w.moves && !moves_may_start(no))
        sim_at(sim_now() + SIM_S, restart_server, ctx);
    else
        host_start(no);
}

static void restart_rank(void *ctx)
{
    const int i = (int)(uintptr_t)ctx;
    if (!w.ranks[i].life)
        rank_start(i);
}

static void kill_server(uint32_t no, uint64_t most)
{
    if (no >= processes_n() || !sim_node_alive(w.processes[no].node))
        return;
    if (w.moves && w.replaces && !w.four && !w.durable)
        return; /* see fault_forget() */
    host_kill(no);
    sim_at(sim_now() + sim_between(SIM_MS, most), restart_server,
           (void *)(uintptr_t)no);
}

static void fault_kill_server(void)
{
    const uint32_t no = sim_random(processes_n());
    const int at_answer = sim_chance(500);
    static const uint32_t answers[] = {WIRE_PUSH, WIRE_SNAPSHOT, WIRE_RESTORE};
    if (!sim_node_alive(w.processes[no].node))
        return;
    if (at_answer && net_await_answer(w.processes[no].node,
                                      answers[w.saves ? sim_random(3) : 0]))
        sim_say("an answer is on its way");
    kill_server(no, at_answer ? SIM_S : 40 * SIM_S);
}

/* Nothing passes between two for a while, in one direction or both. */
static void cut_off(int r, int s)
{
    const uint64_t until = sim_now() + sim_between(10 * SIM_MS, 30 * SIM_S);
    const uint32_t ways = 1 + sim_random(3);
    sim_say("until %.3f nothing passes from slot %d to %d%s",
            (double)until / 1e9, ways & 1 ? r : s, ways & 1 ? s : r,
            ways == 3 ? ", or back" : "");
    if (ways & 1)
        net_cut(r, s, until);
    if (ways & 2)
        net_cut(s, r, until);
}

/* Whether the process takes a shard out. */
static int await_out(uint32_t source)
{
    for (;;) {
        for (uint32_t i = 0; i < w.servers_n; i++)
            if (w.servers[i].out && w.servers[i].out_of == source)
                return 1;
        if (sim_wait(&w.moves, sim_now() + 8 * SIM_S))
            return 0;
    }
}

/* The target has the shard, and dies before it can say so. */
static void fault_commit(uint32_t source, uint32_t target)
{
    if (!await_out(source))
        return;
    net_cut(SLOT_SERVERS + (int)target, SLOT_SERVERS + (int)source,
            sim_now() + sim_between(SIM_S, 8 * SIM_S));
    sim_sleep(sim_between(100 * SIM_MS, 4 * SIM_S));
    kill_server(target, 40 * SIM_S);
}

/* A shard goes to another process; often one of those who take part in it is
 * killed, or nothing reaches it from the other one. */
static void fault_move(void)
{
    uint32_t source, target;
    moves_ask(&source, &target);
    if (sim_chance(300))
        return;
    const uint32_t kind = sim_random(6);
    if (kind == 4) {
        fault_commit(source, target);
        return;
    }
    for (int steps = (int)sim_random(9); steps >= 0; steps--)
        if (sim_wait(&w.moves, sim_now() + 8 * SIM_S))
            return;
    if (sim_chance(300))
        sim_sleep(sim_between(SIM_US, SIM_S));
    switch (kind) {
    case 0:
        kill_server(source, 40 * SIM_S);
        if (!sim_chance(200))
            break;
        /* fall through */
    case 1:
        kill_server(target, 40 * SIM_S);
        break;
    case 2:
        moves_kill_command();
        break;
    case 3:
        cut_off(SLOT_SERVERS + (int)source, SLOT_SERVERS + (int)target);
        break;
    default:
        break;
    }
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
    const uint32_t n = processes_n();
    uint32_t k = sim_random(n + w.ranks_n);
    if (k < n)
        return w.processes[k].node;
    if (w.four)
        return w.processes[0].node;
    rank_life *l = w.ranks[k - n].life;
    return l ? l->node : w.processes[0].node;
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
    cut_off(r, s);
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
    w.ranks[i].replaced++;
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

/* The disk of a log is full; or (where the server cuts its rows) a sync fails.
 */
static void mend_disk(void *disk)
{
    memory_disk *d = disk;
    d->room = UINT64_MAX;
    d->sync_fails = 0;
}

static void fault_disk(void)
{
    const uint32_t i = sim_random(w.servers_n);
    memory_disk *d = home_of(i)->disk;
    if (!d || !w.servers[i].running)
        return;
    const uint64_t until = sim_now() + sim_between(10 * SIM_MS, 30 * SIM_S);
    if ((w.saves || w.moves) && sim_chance(300))
        d->sync_fails = EIO;
    else
        d->room = sim_random(2000);
    sim_say("until %.3f a disk %s", (double)until / 1e9,
            d->sync_fails ? "cannot sync" : "is full");
    sim_at(until, mend_disk, d);
}

/* In the middle of a save or load. */
static void fault_in_save(void)
{
    if (sim_wait(&w.newest, sim_now() + 8 * SIM_S))
        return;
    sim_sleep(sim_between(SIM_US, SIM_S));
    if (sim_chance(700)) {
        fault_kill_server();
    } else if (w.four) {
        four_kill_rank();
    } else if (w.ranks[0].life) {
        rank_kill(0);
        sim_at(sim_now() + sim_between(SIM_MS, 4 * SIM_S), restart_rank, NULL);
    }
}

/* Another job is stopped while a server is started again and rank 0 loads. */
static void fault_stale_client(void)
{
    rank_life *l = w.ranks[w.ranks_n - 1].life;
    if (w.ranks_n < 2 || !l)
        return;
    sim_say("%s is stopped", sim_node_name(l->node));
    sim_pause(l->node, sim_now() + sim_between(5 * SIM_S, 40 * SIM_S));
    fault_kill_server();
    if (w.ranks[0].life)
        w.ranks[0].life->loads = 1;
}

static void fault_stale_worker(void)
{
    four_stop_worker();
    fault_kill_server();
}

static void fault_reshard(void)
{
    if (!w.newest)
        return;
    const uint32_t n = 1 + sim_random(SERVERS_MAX);
    sim_say("%u servers begin in the place of %u", n, w.servers_n);
    saves_reshard(n);
    for (uint32_t i = 0; i < w.ranks_n && !w.four; i++)
        sim_at(sim_now() + sim_between(SIM_MS, 4 * SIM_S), restart_rank,
               (void *)(uintptr_t)i);
}

static void one_fault(void)
{
    static void (*const kinds[])(void) = {fault_forget, fault_forget,
                                          fault_kill_rank, fault_pause,
                                          fault_cut, fault_slow};
    static void (*const roles[])(void) = {
        fault_kill_server, four_kill_worker, four_kill_rank, four_kill_rank,
        four_kill_loader, fault_pause, fault_cut, fault_slow};
    static void (*const saves[])(void) = {
        fault_kill_server, fault_kill_rank, fault_pause,   fault_cut,
        fault_slow,        fault_disk,      fault_reshard, fault_reshard,
        fault_in_save,     fault_in_save,   fault_stale_client,
        fault_stale_client};
    static void (*const both[])(void) = {
        fault_kill_server, four_kill_worker,   four_kill_rank,
        four_kill_loader,  fault_pause,        fault_cut,
        fault_slow,        fault_disk,         fault_reshard,
        fault_in_save,     fault_stale_worker, fault_stale_worker};
    if (w.saves && w.four)
        both[sim_random(sizeof both / sizeof *both)]();
    else if (w.saves)
        saves[sim_random(sizeof saves / sizeof *saves)]();
    else if (w.moves && sim_chance(600))
        fault_move();
    else if (w.moves && !w.four && sim_chance(100))
        fault_disk();
    else if (w.four)
        roles[sim_random(sizeof roles / sizeof *roles)]();
    else
        kinds[sim_random(sizeof kinds / sizeof *kinds)]();
}

static void heal(void)
{
    sim_say("no more faults");
    net_heal();
    storage_heal();
    for (uint32_t p = 0; p < processes_n(); p++)
        for (uint32_t i = 0; i < w.servers_n; i++)
            if (w.processes[p].homes[i].disk)
                mend_disk(w.processes[p].homes[i].disk);
    for (uint32_t p = 0; p < processes_n(); p++)
        restart_server((void *)(uintptr_t)p);
    if (w.moves)
        moves_heal();
    if (w.four)
        four_heal();
    for (uint32_t i = 0; i < w.ranks_n && !w.four; i++)
        restart_rank((void *)(uintptr_t)i);
}

/* ---- the verdict ---- */

/* Whether an update of an earlier process had its number: a checkpoint that
 * has that one counts for both. */
static int is_numbered_again(const rank_role *r, const attempt *a)
{
    int k = 0;
    while (r->attempts[k].number != a->number)
        k++;
    return r->attempts[k].life != a->life;
}

/* What a rank must know as lost at a server, and what it may: an update of
 * this process, or one that another server still has; not what it has itself
 * given up, by a load. */
static void count_lost(const rank_role *r, const update_bits has, uint32_t s,
                       uint64_t *must, uint64_t *may)
{
    for (int k = 0; k < r->attempts_n; k++) {
        const attempt *a = &r->attempts[k];
        const uint8_t there = has[r->index][k];
        if (s >= a->servers_n || there >> s & 1)
            continue;
        *may += 1;
        *must += a->acked && (there || a->life == r->life->number) &&
                 !is_numbered_again(r, a) &&
                 (r->index || !(a->gone >> s & 1));
    }
}

/* So many updates of this process a server lacks. */
static uint64_t count_own(const rank_role *r, const update_bits has)
{
    uint64_t most = 0;
    for (uint32_t s = 0; s < SERVERS_MAX; s++) {
        uint64_t one = 0;
        for (int k = 0; k < r->attempts_n; k++) {
            const attempt *a = &r->attempts[k];
            one += a->life == r->life->number && a->acked &&
                   !is_numbered_again(r, a) && s < a->servers_n &&
                   !(has[r->index][k] >> s & 1);
        }
        most = one > most ? one : most;
    }
    return most;
}

static void check_told(const rank_role *r, const update_bits has)
{
    uint64_t must = 0, may = 0;
    client_counts n;
    persia_client_get_counts(r->life->c, &n);
    const uint64_t told = r->told + n.lost + n.stale;
    for (uint32_t s = 0; s < SERVERS_MAX; s++) {
        uint64_t one = 0;
        count_lost(r, has, s, &one, &may);
        if (!w.saves)
            must += one;
        else if (one > must) /* of a load the server that lacks most */
            must = one;
    }
    sim_say("rank %d: %d updates, %llu are lost and must be told, %llu were",
            r->index, r->attempts_n, (unsigned long long)must,
            (unsigned long long)told);
    if (w.durable && must && !w.saves)
        sim_fail("%llu acknowledged updates of rank %d are lost, although "
                 "servers have logs", (unsigned long long)must, r->index);
    if (w.durable && told && r->lives == 1 && !w.newest)
        sim_fail("rank %d counts %llu lost updates, although servers have "
                 "logs", r->index, (unsigned long long)told);
    if (told + r->hidden < must)
        sim_fail("rank %d was told of %llu lost updates, and %llu are",
                 r->index, (unsigned long long)told, (unsigned long long)must);
    if (r->lives == 1 && told > may && !w.newest)
        sim_fail("rank %d was told of %llu lost updates, and only %llu are",
                 r->index, (unsigned long long)told, (unsigned long long)may);
    const uint64_t own = count_own(r, has);
    if (r->index && n.lost + n.stale < own)
        sim_fail("rank %d has lost %llu of its own updates, and counts %llu",
                 r->index, (unsigned long long)own,
                 (unsigned long long)(n.lost + n.stale));
    /* A load reports nothing of what it gives up. */
    if (w.policy == LOST_RAISE && n.lost && !r->life->raised &&
        (r->index || !w.newest))
        sim_fail("rank %d counts %llu lost updates without an error",
                 r->index, (unsigned long long)n.lost);
}

/* What is not in the rows the loader knows of. */
static void check_batches(const update_bits has)
{
    uint64_t must = 0;
    int killed = 0;
    for (uint32_t s = 0; s < w.servers_n; s++)
        killed |= w.servers[s].life > 1 && !w.durable;
    /* What was in part of a checkpoint's rows servers have reported. */
    const uint64_t told = four_told(killed || w.epoch) + w.ranks[0].told;
    for (int k = 0; k < w.ranks[0].attempts_n; k++) {
        const int missing = has[0][k] != (1 << GROUPS) - 1;
        must += (uint64_t)missing;
        if (missing)
            sim_say("batch %d is missing", k + 1);
    }
    /* A worker passes over what a server has lost.  Its count of that is gone
     * with it; in a checkpoint the ledger has these batches. */
    if (told < must && !(w.saves && w.emptied))
        sim_fail("%llu batches are not in the rows, and the loader counts "
                 "%llu", (unsigned long long)must, (unsigned long long)told);
}

/* A new client of all servers. */
static int read_new(void *ctx, size_t n, const uint64_t *ids, float *out)
{
    ps_client *c;
    uint32_t table;
    (void)ctx;
    int rc = open_client(0, 0, &c, &table);
    return rc ? rc : read_rows(c, table, 0, n, ids, out);
}

static void verdict(void)
{
    update_bits has;
    if (w.moves)
        moves_check_end();
    int rc = counts_read("at the end", 1, read_new, NULL, has);
    if (rc == PERSIA_EINCOMPLETE && w.four && w.emptied)
        return; /* a user would load again */
    if (rc)
        sim_fail("the verdict reads no rows: %s", persia_err_text());
    if (w.four)
        check_batches(has);
    for (uint32_t i = 0; i < w.ranks_n && !w.four; i++)
        check_told(&w.ranks[i], has);
    for (uint32_t i = 0; i < w.ranks_n && w.saves; i++)
        for (int k = 0; k < w.ranks[i].attempts_n; k++)
            saves_check("at the end", (int)i, k, has[i][k]);
}

/* ---- a history ---- */

static void await_end(void)
{
    const uint64_t until = sim_now() + END_S * SIM_S;
    for (;;) {
        const rank_role *late = NULL;
        for (uint32_t i = 0; i < w.ranks_n; i++)
            if (!w.ranks[i].done || w.ranks[i].replaced)
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
    for (uint32_t p = 0; p < processes_n(); p++)
        host_start(p);
    if (w.four)
        four_begin();
    for (int i = 0; i < (int)w.ranks_n && !w.four; i++)
        rank_start(i);
    const net_faults f = weather();
    net_set_faults(&f);
    const int both = w.four && w.saves;
    const int faults = (int)sim_random(FAULTS_MAX) + (both ? FAULTS_MAX : 0);
    for (int i = both ? (int)sim_random(150) : 0; i && !w.newest; i--)
        sim_sleep(100 * SIM_MS); /* there is something to load */
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
    else
        four_await_end(sim_now() + 2 * END_S * SIM_S);
    verdict();
}
