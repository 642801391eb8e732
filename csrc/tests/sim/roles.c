/* roles.c: what the processes of a history do; see roles.h. */
#include "tests/sim/roles.h"

#include "client/private.h"
#include "ids/ids.h"
#include "log/private.h"
#include "server/server.h"
#include "tests/log/disk.h"
#include "tests/sim/moves.h"
#include "tests/sim/saves.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

world w;

static void must(int rc, const char *what)
{
    if (rc)
        sim_fail("%s: %s: %s", what, persia_err_name(rc), persia_err_text());
}

/* ---- servers ---- */

static const char *method_of_server(uint32_t method)
{
    static const char *const names[] = {
#define NAME(upper, name) #name,
        WIRE_METHODS(NAME)
#undef NAME
    };
    return method < WIRE_METHODS_N ? names[method] : "?";
}

/* A disk that takes its time. */
static int (*disk_sync)(log_disk *d, int file);
static int slow_sync(log_disk *d, int file)
{
    sim_sleep(sim_between(SIM_MS, 400 * SIM_MS));
    return disk_sync(d, file);
}

static updates_log *open_log(uint32_t no, uint32_t i)
{
    home *h = &w.processes[no].homes[i];
    updates_log *log;
    if (!w.durable)
        return NULL;
    if (!h->disk) {
        h->disk = memory_disk_make();
        disk_sync = h->disk->disk.sync;
        h->disk->disk.sync = slow_sync;
    }
    /* A server that cannot write its log does not start. */
    while (h->disk->room != UINT64_MAX || h->disk->sync_fails)
        sim_sleep(SIM_S);
    const log_config config = {.owner = {"sim", i, w.servers_n},
                               .level = (enum log_level)w.durable,
                               .segment = w.log_limit < 1 << 20 ? 2048 : 8192,
                               .limit = w.log_limit};
    must(persia_log_open(&h->disk->disk, &config, &log), "a log");
    snprintf(log->boot, sizeof log->boot, "boot %d", w.processes[no].boots);
    return log;
}

static void recover(ps_service *service, updates_log *log, uint32_t no,
                    uint32_t i)
{
    if (w.saves || log)
        storage_recover(service, log, no, i);
    if (!log)
        return;
    persia_shard_ready(persia_service_shard(service));
    if (w.log_limit < 1 << 20)
        storage_cuts(service, log, no, i);
}

uint32_t processes_given(void)
{
    return (w.servers_n + w.each - 1) / w.each;
}

uint32_t processes_n(void)
{
    return processes_given() + (uint32_t)w.moves;
}

home *home_of(uint32_t server)
{
    return &w.processes[w.servers[server].at].homes[server];
}

sim_node *node_of(uint32_t server)
{
    return w.processes[w.servers[server].at].node;
}

ps_service *make_service(uint32_t no, uint32_t shard, uint64_t boot,
                         uint64_t lineage, tables **p, updates_log **log)
{
    service_config config = {.name_space = "sim", .shard = shard,
                             .shards = w.servers_n,
                             .boot = boot,
                             .lineage = lineage,
                             .message_limit = 4 << 20,
                             .log = open_log(no, shard)};
    ps_service *service;
    *log = w.processes[no].homes[shard].log = config.log;
    must(persia_tables_beside(w.processes[no].base, p), "tables");
    if (w.saves || w.moves)
        config.files = storage_places(no, shard);
    must(persia_service_create(*p, &config, &service), "a server");
    persia_service_set_calls(service, 64);
    return service;
}

static void *process_main(void *arg)
{
    process_role *p = arg;
    const uint32_t no = (uint32_t)(p - w.processes);
    const tables_config made = {.threads = 1};
    ps_service *services[SERVERS_MAX];
    updates_log *logs[SERVERS_MAX];
    uint32_t shards[SERVERS_MAX], n = 0;
    ps_host *host;
    must(persia_tables_create(&made, &p->base), "tables");
    for (uint32_t i = 0; i < w.servers_n; i++)
        if (p->has >> i & 1)
            shards[n++] = i;
    for (uint32_t k = 0; k < n; k++) {
        server_role *s = &w.servers[shards[k]];
        services[k] = make_service(no, shards[k], 0, 0, &s->tables, &logs[k]);
        s->service = services[k];
        if (!logs[k])
            recover(services[k], NULL, no, shards[k]);
    }
    must(persia_host_create(services, n, &host), "a host");
    p->host = host;
    if (w.moves)
        moves_tell(no);
    net_listen(sim_node_self(), w.addresses[no], persia_host_handle, host,
               method_of_server);
    if (w.moves)
        moves_begin(no);
    for (uint32_t k = 0; k < n; k++) {
        if (logs[k])
            recover(services[k], logs[k], no, shards[k]);
        w.servers[shards[k]].running = 1;
    }
    sim_say("serves %u shards of %u", n, w.servers_n);
    return NULL;
}

void host_start(uint32_t no)
{
    process_role *p = &w.processes[no];
    char name[32], *address = w.addresses[no];
    p->has = 0;
    for (uint32_t i = 0; i < w.servers_n; i++)
        if (moves_begins_with(no, i)) {
            p->has |= (uint8_t)(1 << i);
            w.servers[i].at = no;
            w.servers[i].life++;
        }
    snprintf(name, sizeof name, "ps%u.%d", no, ++p->life);
    snprintf(address, sizeof w.addresses[0], "ps%u", no);
    p->node = sim_node_make(name, SLOT_SERVERS + (int)no);
    sim_say("start of %s", name);
    sim_spawn(p->node, process_main, p, "main");
}

void host_kill(uint32_t no)
{
    process_role *p = &w.processes[no];
    sim_say("kill -9 of %s", sim_node_name(p->node));
    sim_kill(p->node);
    net_killed(p->node);
    p->boots += w.durable == LOG_DISK;
    p->has = 0;
    w.emptied |= !w.durable;
    for (uint32_t i = 0; i < w.servers_n; i++) {
        p->homes[i].log = NULL;
        p->homes[i].cutter = NULL;
    }
    for (uint32_t i = 0; i < w.servers_n; i++) {
        server_role *s = &w.servers[i];
        if (w.durable == LOG_DISK && p->homes[i].disk)
            memory_disk_lose(p->homes[i].disk, sim_random(1u << 30));
        if (s->at != no)
            continue;
        s->running = 0;
        s->rows++; /* what it had is gone from now on */
        s->life++;
    }
}

/* ---- rows ---- */

int open_client(uint64_t stream, uint32_t rank, ps_client **out,
                uint32_t *table)
{
    const char *addresses[SERVERS_MAX];
    for (uint32_t i = 0; i < processes_given(); i++)
        addresses[i] = w.addresses[i];
    const client_config config = {.threads = 1,
                                  .addresses = addresses,
                                  .addresses_n = processes_given(),
                                  .name_space = "sim",
                                  .rank = rank,
                                  .world = stream ? w.ranks_n : 1,
                                  .stream = stream,
                                  .timeout_ns = w.timeout,
                                  .message_limit = 4 << 20,
                                  .dtype = WIRE_FP32,
                                  .lost = w.policy};
    int created;
    table_config t;
    counts_config(&t);
    int rc = persia_client_create(&config, out);
    if (rc)
        return rc;
    rc = persia_client_declare(*out, &t, table, &created);
    if (rc) {
        persia_client_destroy(*out);
        *out = NULL;
    }
    return rc;
}

int read_rows(ps_client *c, uint32_t table, uint64_t after, size_t n,
              const uint64_t *ids, float *out)
{
    float *rows = calloc(n * DIM, sizeof *rows);
    assert(rows);
    pull_job pull = {.n = n, .ids = ids, .out = rows, .stride = DIM};
    int rc = persia_client_pull(c, after, &table, &pull, 1);
    for (size_t i = 0; i < n && !rc; i++) {
        out[i] = rows[i * DIM];
        if (rows[i * DIM] != rows[i * DIM + 1])
            sim_fail("row %llx is half changed", (unsigned long long)ids[i]);
    }
    free(rows);
    return rc;
}

/* ---- ranks: calls ---- */

/* Errors that a user sees while servers are away. */
static int is_away(int rc)
{
    return rc == PERSIA_EUNAVAILABLE || rc == PERSIA_ETIMEOUT;
}

static uint64_t begin_call(rank_life *l, const char *what)
{
    l->doing = what;
    l->since = sim_now();
    return sim_now() - sim_paused(l->node);
}

/* Errors of a process that has a successor, or a predecessor: a late claim of
 * one may be as high as the other's where servers have forgotten them. */
static int is_of_another(const rank_life *l, int rc)
{
    return (rc == PERSIA_ECLOSED && (l->number > 1 || l->of->life != l)) ||
           (rc == PERSIA_EMISMATCH && l->of->life != l);
}

/* Rows of different restores; other rows than those of this process; files of
 * checkpoints that fail. */
static int is_of_saves(int rc)
{
    return w.saves && (rc == PERSIA_EINCOMPLETE || rc == PERSIA_EIO ||
                       (rc == PERSIA_EMISMATCH && w.newest));
}

/* Where a command was killed that would have said where a shard is. */
static int is_of_moves(const rank_life *l, int rc)
{
    return w.moves && !w.finish && !l->c && rc == PERSIA_EMISMATCH;
}

/* Within its timeout, and that of what it completes and greets before. */
static void end_call(rank_life *l, uint64_t began, const char *what, int rc)
{
    const uint64_t took = sim_now() - sim_paused(l->node) - began;
    if (took > 3 * w.timeout + 5 * SIM_S)
        sim_fail("%s took %.1f s, with a timeout of %.1f s", what,
                 (double)took / 1e9, (double)w.timeout / 1e9);
    l->doing = "nothing";
    if (client_is_loss(rc)) {
        l->raised++;
        sim_say("%s tells: %s", what, persia_err_text());
    } else if (rc) {
        sim_say("%s: %s: %s", what, persia_err_name(rc), persia_err_text());
        if (!is_away(rc) && !is_of_another(l, rc) && !is_of_saves(rc) &&
            !is_of_moves(l, rc))
            sim_fail("%s: %s, which no fault explains", what,
                     persia_err_name(rc));
        l->broken = 1;
        l->mixed |= rc == PERSIA_EINCOMPLETE;
        l->closed |= !is_away(rc) && rc != PERSIA_EINCOMPLETE &&
                     rc != PERSIA_EIO;
    }
}

static void check_blind(const rank_life *l, int k)
{
    const attempt *a = &l->of->attempts[k];
    for (uint32_t s = 0; s < w.servers_n; s++)
        if (a->acked && a->blind[s] && !a->blurred)
            sim_fail("a lookup behind update %llu (batch %d) has not seen it "
                     "on server %u", (unsigned long long)a->number, k, s);
}

static int push(rank_life *l, int k)
{
    attempt *a = &l->of->attempts[k];
    uint64_t ids[SERVERS_MAX + SHARED];
    float grad[(SERVERS_MAX + SHARED) * DIM];
    size_t n = 0;
    for (uint32_t s = 0; s < w.servers_n; s++)
        ids[n++] = own_row(l->of->index, k, s);
    for (uint32_t i = 0; i < SHARED; i++)
        if (a->shared >> i & 1)
            ids[n++] = i + 1;
    for (size_t i = 0; i < n * DIM; i++)
        grad[i] = -1;
    push_part part = {.n = n, .ids = ids, .grad = grad, .stride = DIM,
                      .bags = n};
    optim_args sgd = {.kind = OPTIM_SGD, .lr = 1, .step = 1, .grad_scale = 1};
    push_job job = {.parts = &part, .parts_n = 1, .optim = &sgd};
    const client_update name = {.number = a->number};
    return persia_client_push(l->c, &name, &l->table, &job, 1);
}

/* Updates that were made with rows which a load has replaced since. */
static uint64_t count_stale(const rank_life *l)
{
    client_counts n;
    persia_client_get_counts(l->c, &n);
    return n.stale;
}

static void *pusher_main(void *arg)
{
    rank_life *l = arg;
    for (;;) {
        while (!l->queue_n && !l->ends)
            (void)sim_wait(l->queue, UINT64_MAX);
        if (!l->queue_n)
            break;
        const int k = l->queue[0];
        memmove(l->queue, l->queue + 1, (size_t)--l->queue_n * sizeof(int));
        attempt *a = &l->of->attempts[k];
        for (uint32_t s = 0; s < w.servers_n; s++)
            a->server_rows[s] = w.servers[s].rows;
        sim_say("pushes batch %d as update %llu", k,
                (unsigned long long)a->number);
        uint64_t began = begin_call(l, "push");
        const uint64_t stale = count_stale(l);
        int rc = push(l, k);
        end_call(l, began, "push", rc);
        a->blurred |= count_stale(l) != stale;
        a->ended = 1;
        a->acked = !rc || client_is_loss(rc);
        sim_say("batch %d is %s", k, a->acked ? "applied" : "given up");
        check_blind(l, k);
        l->in_flight--;
        sim_wake(l);
    }
    l->pushers--;
    sim_wake(l);
    return NULL;
}

/* ---- ranks: the loop ---- */

/* Looks up what batch k needs: all updates but the last `staleness`. */
static void look_up(rank_life *l, int k)
{
    rank_role *r = l->of;
    int back = k - 1 - (int)w.staleness;
    uint64_t ids[SERVERS_MAX + SHARED];
    float got[SERVERS_MAX + SHARED];
    size_t n = 0;
    attempt *a = back < l->first || r->attempts[back].life != l->number
                     ? NULL /* it is not of this process */
                     : &r->attempts[back];
    for (uint32_t s = 0; s < w.servers_n && a; s++)
        ids[n++] = own_row(r->index, back, s);
    for (uint32_t i = 0; i < SHARED; i++)
        ids[n++] = i + 1;
    /* Behind one that was given up a loop waits for nothing. */
    const uint64_t after = !a || (a->ended && !a->acked) ? 0 : a->number;
    uint64_t began = begin_call(l, "lookup");
    int rc = read_rows(l->c, l->table, after, n, ids, got);
    end_call(l, began, "lookup", rc);
    if (!a)
        return;
    for (uint32_t s = 0; s < w.servers_n && !rc; s++) {
        if (got[s] > 1)
            sim_fail("server %u has applied batch %d %.0f times", s, back,
                     (double)got[s]);
        if (got[s] == 0 && a->server_rows[s] == w.servers[s].rows &&
            !w.unfinished)
            a->blind[s] = 1;
    }
    check_blind(l, back);
}

static void hand_out(rank_life *l)
{
    rank_role *r = l->of;
    const int k = r->attempts_n++;
    r->attempts[k] = (attempt){.life = l->number, .number = l->next++,
                               .shared = sim_random(1 << SHARED),
                               .servers_n = w.servers_n,
                               .epoch = w.epoch};
    l->in_flight++;
    l->queue[l->queue_n++] = k;
    sim_wake(l->queue);
}

static void drain(rank_life *l)
{
    while (l->in_flight)
        (void)sim_wait(l, UINT64_MAX);
}

static void one_batch(rank_life *l)
{
    look_up(l, l->of->attempts_n);
    while (l->in_flight > (int)w.staleness)
        (void)sim_wait(l, UINT64_MAX);
    hand_out(l);
}

static int connect_rank(rank_life *l)
{
    const int i = l->of->index;
    uint64_t began = begin_call(l, "open");
    int rc = open_client(STREAM + (uint64_t)i, (uint32_t)i, &l->c, &l->table);
    end_call(l, began, "open", rc);
    if (rc) {
        l->c = NULL;
        return rc;
    }
    l->next = persia_client_last_number(l->c) + 1;
    sim_say("is rank %d of %u, and continues with update %llu", i, w.ranks_n,
            (unsigned long long)l->next);
    for (int p = 0; p <= (int)w.staleness && p < FLIGHT_MAX; p++) {
        l->pushers++;
        sim_spawn(l->node, pusher_main, l, "pusher");
    }
    return PERSIA_OK;
}

static void count_told(rank_life *l)
{
    client_counts n = {0};
    if (!l->c)
        return;
    persia_client_get_counts(l->c, &n);
    l->of->told += n.lost + n.stale;
    l->of->hidden += atomic_load(&l->c->missing);
}

/* The process ends by itself. */
static void leave(rank_life *l)
{
    sim_say("ends");
    drain(l);
    l->ends = 1;
    sim_wake(l->queue);
    while (l->pushers)
        (void)sim_wait(l, UINT64_MAX);
    count_told(l);
    persia_client_destroy(l->c);
    l->c = NULL;
}

/* Saving and loading take as long as their files. */
static void end_saving(rank_life *l, const char *what, int rc)
{
    end_call(l, sim_now() - sim_paused(l->node), what, rc);
}

static void load_newest(rank_life *l)
{
    int loaded;
    drain(l);
    l->doing = "load";
    int rc = saves_load(&(saver){l->c, l->table}, &loaded);
    l->mixed = 0;
    end_saving(l, "load", rc);
    if (!loaded)
        return;
    l->next = persia_client_last_number(l->c) + 1;
    l->first = l->of->attempts_n;
}

/* All servers have rows of one restore again. */
static void make_one(rank_life *l)
{
    for (int i = 0; w.newest && (l->mixed || w.unfinished || i == 0); i++) {
        if (i == 8)
            sim_fail("loads fail, though nothing is in their way");
        l->broken = 0;
        if (l->mixed || w.unfinished)
            load_newest(l);
        one_batch(l);
        drain(l);
    }
}

/* Faults are over: updates are applied, and losses are counted. */
static void finish(rank_life *l)
{
    drain(l);
    if (!l->of->index)
        make_one(l);
    while (l->of->index && !w.ranks[0].done && w.saves)
        (void)sim_wait(&w, UINT64_MAX);
    l->broken = 0;
    for (int i = 0; i < 3; i++)
        one_batch(l);
    drain(l);
    if (l->broken)
        sim_fail("an update fails, though nothing is in its way");
    for (int rc = PERSIA_ELOST, i = 0; rc; i++) {
        uint64_t began = begin_call(l, "look");
        rc = persia_client_look(l->c);
        end_call(l, began, "look", rc);
        if (i == 8)
            sim_fail("losses are told again and again");
    }
    l->of->done = 1;
    sim_wake(&w);
}

/* What rank 0 does between two batches; the others are other jobs'. */
static void save_or_load(rank_life *l)
{
    if (!w.saves || l->of->index || l->broken)
        return;
    if (w.newest && (l->mixed || l->loads || sim_chance(15))) {
        l->loads = 0;
        load_newest(l);
    } else if (sim_chance(150)) {
        drain(l);
        l->doing = "save";
        end_saving(l, "save", saves_save(&(saver){l->c, l->table}));
    }
}

/* A process that another one follows has ended. */
static void *rank_end_replaced(rank_role *r)
{
    r->replaced--;
    sim_wake(&w);
    return NULL;
}

static void *rank_main(void *arg)
{
    rank_life *l = arg;
    rank_role *r = l->of;
    while (connect_rank(l)) {
        if (r->life != l)
            return rank_end_replaced(r);
        sim_sleep(SIM_S);
    }
    if (w.newest && !r->index && sim_chance(600))
        load_newest(l);
    while (!w.finish) {
        if (r->attempts_n < UPDATES_MAX - 8)
            one_batch(l);
        save_or_load(l);
        sim_sleep(sim_random((uint32_t)(w.think / SIM_US)) * SIM_US);
        if (l->broken && (l->closed || sim_chance(500)))
            break;
        l->broken = 0;
    }
    if (!l->broken && r->life == l) {
        finish(l);
        return NULL;
    }
    leave(l);
    if (r->life != l)
        return rank_end_replaced(r);
    rank_start(r->index);
    return NULL;
}

void rank_start(int i)
{
    rank_role *r = &w.ranks[i];
    rank_life *l = calloc(1, sizeof *l);
    char name[32];
    assert(l);
    *l = (rank_life){.of = r, .number = ++r->lives, .doing = "starts"};
    snprintf(name, sizeof name, "rank%d.%d", i, r->lives);
    r->index = i;
    l->node = sim_node_make(name, SLOT_RANKS + i);
    r->life = l;
    sim_spawn(l->node, rank_main, l, "main");
}

void rank_kill(int i)
{
    rank_role *r = &w.ranks[i];
    sim_say("kill -9 of %s", sim_node_name(r->life->node));
    sim_kill(r->life->node);
    count_told(r->life);
    r->life = NULL;
}
