/* four.c: embedding workers, a loader and ranks; see four.h. */
#include "tests/sim/four.h"

#include "embedding_worker/embedding_worker.h"
#include "ids/ids.h"
#include "loader/loader.h"
#include "loop/loop.h"
#include "pool/pool.h"
#include "rank/rank.h"
#include "tests/sim/saves.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#define CALM (90 * SIM_S) /* all leases and timeouts are over */
enum { AHEAD = 3, GROUP_MAX = 4, IDS_MAX = GROUPS + SHARED };

/* A process that is started again when it is down. */
typedef struct process {
    char name[24];
    int slot, lives;
    sim_node *node;
    void *(*run)(void *arg);
} process;

static struct {
    uint32_t workers_n;
    uint64_t staleness, lease;
    uint32_t leaves; /* of 1000 batches, before which a loop is left */
    int epochs; /* of the loader, at most */
    uint64_t timeout; /* of workers, for servers */
    int batches;
    char addresses[WORKERS_MAX][32];
    process workers[WORKERS_MAX], ranks[RANKS_MAX], loader;
    loader_sender *sender; /* of the loader that has ended */
    int rows;            /* ... travel: ranks pool them */
    int step;            /* the ranks train in step */
    int together;        /* ... or save together: they die together */
    int group;           /* batches of an update; its last one may have less */
    int every;           /* ... of a rank between two times that ranks meet */
    int loads;           /* ranks are to end, and to load when they begin */
    int loaded;          /* they have */
    int mixed;           /* one has seen rows of different restores */
    int over;            /* a pass has ended */
    uint64_t healed;     /* when the last fault was; or 0 */
    uint32_t met;        /* arrivals of ranks at meetings of this life */
    uint64_t last;       /* step that one of them knows */
    uint32_t ended;      /* ... that have ended their pass */
    int done;
} four;

/* ---- processes ---- */

static void process_start(process *p)
{
    char name[48];
    snprintf(name, sizeof name, "%s.%d", p->name, ++p->lives);
    p->node = sim_node_make(name, p->slot);
    sim_say("start of %s", name);
    sim_spawn(p->node, p->run, p, "main");
}

static void restart(void *ctx)
{
    process *p = ctx;
    if (!sim_node_alive(p->node))
        process_start(p);
}

static void process_kill(process *p, uint64_t least)
{
    sim_node *n = p->node;
    if (!sim_node_alive(n))
        return;
    sim_say("kill -9 of %s", sim_node_name(n));
    sim_kill(n);
    net_killed(n);
    sim_at(sim_now() + sim_between(least, 8 * SIM_S), restart, p);
}

static void restart_ranks(void *ctx)
{
    (void)ctx;
    for (uint32_t i = 0; i < w.ranks_n; i++)
        restart(&four.ranks[i]);
}

/* As torchrun does: when one dies, all are started again. */
static void ranks_kill(uint64_t least)
{
    int alive = 0;
    four.met = four.ended = 0;
    four.last = 0;
    for (uint32_t i = 0; i < w.ranks_n; i++) {
        sim_node *n = four.ranks[i].node;
        if (!sim_node_alive(n))
            continue;
        alive = 1;
        sim_say("kill -9 of %s", sim_node_name(n));
        sim_kill(n);
        net_killed(n);
    }
    if (alive)
        sim_at(sim_now() + sim_between(least, 8 * SIM_S), restart_ranks, NULL);
}

static void process_end(process *p, uint64_t least)
{
    if (four.together && p->slot < SLOT_WORKERS)
        ranks_kill(least);
    else
        process_kill(p, least);
}

/* This process ends by an error. */
static _Noreturn void die(process *p, const char *what, int rc)
{
    sim_say("%s: %s: %s", what, persia_err_name(rc), persia_err_text());
    if (rc != PERSIA_EUNAVAILABLE && rc != PERSIA_ETIMEOUT &&
        rc != PERSIA_EINCOMPLETE && !(rc == PERSIA_ECLOSED && p->lives > 1) &&
        !client_is_loss(rc) && !(w.saves && rc == PERSIA_EIO) &&
        !(four.step && w.emptied && rc == PERSIA_EARG) &&
        !(w.moves && !w.finish && rc == PERSIA_EMISMATCH))
        sim_fail("%s: %s, which no fault explains", what,
                 persia_err_name(rc));
    four.mixed |= rc == PERSIA_EINCOMPLETE;
    if (four.healed && sim_now() - four.healed > CALM)
        sim_fail("%s dies, and there was no fault for long", p->name);
    process_end(p, SIM_S);
    for (;;)
        (void)sim_wait(NULL, UINT64_MAX);
}

/* ---- embedding workers ---- */

static const char *method_of_worker(uint32_t method)
{
    static const char *const names[] = {
#define NAME(upper, name) #name,
        WORKER_METHODS(NAME)
#undef NAME
    };
    return method < WORKER_METHODS_N ? names[method] : "?";
}

static void *worker_main(void *arg)
{
    process *p = arg;
    const size_t i = (size_t)(p - four.workers);
    const char **addresses = calloc(SERVERS_MAX, sizeof *addresses);
    embedding_worker *s;
    assert(addresses);
    for (uint32_t k = 0; k < processes_given(); k++)
        addresses[k] = w.addresses[k];
    const embedding_worker_config config = {
        .servers = {.threads = 1, .addresses = addresses,
                    .addresses_n = processes_given(), .name_space = "sim",
                    .world = 1, .timeout_ns = four.timeout,
                    .message_limit = 4 << 20, .dtype = WIRE_FP32,
                    .lost = w.policy},
        .message_limit = 4 << 20, .queue_limit = 1 << 20,
        .lease_ns = four.lease, .silence_ns = 20 * SIM_S, .loaders = 1,
        .jobs = 2};
    int rc = persia_embedding_worker_create(&config, &s);
    if (rc)
        die(p, "a worker", rc);
    net_listen(sim_node_self(), four.addresses[i],
               persia_embedding_worker_handle, s, method_of_worker);
    return NULL;
}

/* Of loaders (rank -1) and ranks; lasts. */
static worker_client_config client_of_workers(int rank)
{
    const char **addresses = calloc(WORKERS_MAX, sizeof *addresses);
    assert(addresses);
    for (uint32_t k = 0; k < four.workers_n; k++)
        addresses[k] = four.addresses[k];
    return (worker_client_config){
        .addresses = addresses, .addresses_n = four.workers_n,
        .name_space = "sim", .rank = rank < 0 ? 0 : (uint32_t)rank,
        .world = rank < 0 ? 0 : w.ranks_n, .timeout_ns = 60 * SIM_S,
        .move_ns = 15 * SIM_S, .job = 9,
        .stream = rank < 0 ? STREAM_LOADER : 0,
        .message_limit = 4 << 20, .dtype = WIRE_FP32};
}

/* ---- the loader ---- */

uint32_t four_shared(int batch)
{
    return (uint32_t)id_hash((uint64_t)batch) & ((1u << SHARED) - 1);
}

static size_t ids_of(int batch, uint64_t *ids)
{
    size_t n = 0;
    for (uint32_t i = 0; i < GROUPS; i++)
        ids[n++] = own_row(0, batch, i);
    for (uint32_t i = 0; i < SHARED; i++)
        if (four_shared(batch) >> i & 1)
            ids[n++] = i + 1;
    return n;
}

static int send_batch(loader_sender *s, int batch)
{
    uint64_t ids[IDS_MAX];
    const size_t n = ids_of(batch, ids);
    const uint64_t offsets[] = {0, n};
    wire_batch_feature feature = {"f"};
    wire_submit m = {.samples = 1, .features = &feature, .features_n = 1,
                     .ids = {n, ids}, .offsets = {2, offsets}};
    sim_say("sends batch %d", batch + 1);
    return persia_sender_send(s, &m);
}

/* Raises all losses; then everything is done. */
static void flush_all(process *p, loader_sender *s)
{
    for (int i = 0;; i++) {
        int rc = persia_sender_flush(s, 0);
        if (!rc)
            return;
        sim_say("flush tells: %s", persia_err_text());
        if (rc == PERSIA_EREPLACED ||
            (rc != PERSIA_ELOST && i > four.batches))
            die(p, "flush", rc);
    }
}

static void *loader_main(void *arg)
{
    process *p = arg;
    const worker_client_config config = client_of_workers(-1);
    /* Ranks in step wait for each other's batches: one that is started again
     * is back with them in time. */
    const uint64_t most = four.timeout / (uint64_t)four.batches;
    const uint64_t think = four.step && w.think > most ? most : w.think;
    loader_sender *s;
    const int epoch = four.batches / four.epochs + 1; /* its batches */
    int rc = persia_sender_open(&config, &s);
    if (rc)
        die(p, "a loader", rc);
    for (int k = 0; k < four.batches; k++) {
        rc = send_batch(s, k);
        if (rc)
            die(p, "send", rc);
        sim_sleep(sim_random((uint32_t)(think / SIM_US)) * SIM_US);
        if (k + 1 == four.batches || (k + 1) % epoch == 0)
            rc = persia_sender_end(s);
        if (rc)
            die(p, "the end of an epoch", rc);
    }
    flush_all(p, s);
    while (!w.finish) /* a server may lose some yet */
        sim_sleep(SIM_S);
    flush_all(p, s);
    four.sender = s;
    four.done = 1;
    sim_wake(&four);
    return NULL;
}

/* ---- ranks ---- */

typedef struct trainer {
    process *p;
    ps_client *c;
    loop *s;
    uint64_t handle, pass;
    uint32_t plan, table;
    rank_taker *r;
    rank_taken *taken[AHEAD];
    uint64_t batch[AHEAD];
    int n, trained;
    int pending; /* batches of the next update */
    int late;    /* it began after a pass had ended */
} trainer;

static void open_rank(trainer *t, uint32_t i)
{
    const worker_client_config config = client_of_workers((int)i);
    int rc = open_client(100 + i, i, &t->c, &t->table);
    if (!rc)
        rc = persia_loop_open(t->c, &t->handle);
    if (!rc)
        rc = persia_loop_get(t->handle, "sim", &t->s, NULL);
    const plan_feature f = {.name = "f", .table = t->table,
                            .pooling = POOL_SUM, .trainable = 1};
    if (!rc)
        rc = persia_loop_plan(t->s, PLAN_BAGS, 1, &f, 1, &t->plan);
    if (!rc)
        rc = persia_rank_open(&config, &t->r);
    if (rc)
        die(t->p, "a rank", rc);
}

/* Waits for the other ranks of this life, as a barrier of theirs. */
static void meet(void)
{
    const uint32_t all = (four.met / w.ranks_n + 1) * w.ranks_n;
    four.met++;
    sim_wake(&four.met);
    while (four.met < all)
        (void)sim_wait(&four.met, UINT64_MAX);
}

/* Joins the steps, with the others of this life. */
static void join(trainer *t)
{
    uint64_t applied;
    int rc = persia_loop_join(t->s, &applied);
    if (rc)
        die(t->p, "a join", rc);
    if (applied > four.last)
        four.last = applied;
    meet(); /* an all-reduce */
    const uint32_t i = (uint32_t)(t->p - four.ranks);
    rc = persia_loop_sync(t->s, four.last, i, w.ranks_n);
    if (rc)
        die(t->p, "steps", rc);
    sim_say("is rank %u of %u of the steps after %llu", i, w.ranks_n,
            (unsigned long long)four.last);
}

/* A loss is an error of its own: the call is made again. */
#define TRAIN(t, what, call)                                                  \
    do {                                                                      \
        int rc_;                                                              \
        while (client_is_loss(rc_ = (call)))                                  \
            sim_say("%s tells: %s", what, persia_err_text());                 \
        if (rc_)                                                              \
            die((t)->p, what, rc_);                                           \
    } while (0)

static void declare(trainer *t)
{
    table_spec spec = persia_client_table(t->c, t->table)->spec;
    wire_plan_feature f = {.name = "f", .pooling = WORKER_POOL_SUM,
                           .trainable = 1, .rows = (uint32_t)four.rows};
    const wire_plan plan = {.tables = &spec, .tables_n = 1, .features = &f,
                            .features_n = 1};
    persia_rank_order(t->r, four.step);
    int rc = persia_rank_declare(t->r, &plan);
    if (!rc && four.step)
        join(t);
    if (rc)
        die(t->p, "a plan", rc);
    TRAIN(t, "a loop", persia_loop_pass_open(t->s, four.staleness, 0,
                                             &t->pass));
    if (four.step)
        TRAIN(t, "steps", persia_loop_pass_sync(t->s, t->pass, 1));
}

static void ask_ahead(trainer *t)
{
    while (t->n < AHEAD) {
        int rc = persia_rank_next(t->r, &t->taken[t->n]);
        const uint64_t batch = persia_loop_batch_number();
        if (!rc)
            rc = persia_loop_batch_add(t->s, t->pass, batch);
        if (!rc)
            rc = persia_taken_lookup(t->taken[t->n], t->s, t->c, batch);
        if (rc)
            die(t->p, "a batch", rc);
        persia_loop_batch_ready(t->s, batch);
        t->batch[t->n++] = batch;
    }
}

/* ---- checkpoints ---- */

static int is_first(const trainer *t)
{
    return t->p == four.ranks;
}

static void load_newest(trainer *t)
{
    const saver of = {t->c, t->table};
    const int chance = sim_chance(600);
    if (!w.newest || !(four.mixed || w.unfinished || four.loads ||
                       (chance && !four.healed)))
        return;
    four.loads = 0;
    int rc = saves_load(&of, &four.loaded);
    if (rc)
        die(t->p, "a load", rc);
    four.mixed = 0;
}

/* Before ranks train: rank 0 may load, for all. */
static void begin(trainer *t)
{
    persia_client_set_loading(t->c, 1);
    meet();
    four.loaded = 0;
    meet();
    if (is_first(t))
        load_newest(t);
    meet();
    int rc = four.loaded ? saves_greet(t->c, 1) : PERSIA_OK;
    if (rc)
        die(t->p, "a greeting", rc);
    persia_client_set_loading(t->c, 0);
}

/* At the same places of all ranks: rank 0 may save, or all end.  1: each is at
 * the end of its pass. */
static int agree(trainer *t)
{
    const saver of = {t->c, t->table};
    TRAIN(t, "flush", persia_loop_flush(t->s, 0));
    meet();
    const int over = four.ended == w.ranks_n;
    if (is_first(t) && w.newest && four.loads) {
        process_end(t->p, SIM_S);
        for (;;)
            (void)sim_wait(NULL, UINT64_MAX);
    }
    int rc = is_first(t) && sim_chance(500) ? saves_save(&of) : PERSIA_OK;
    if (rc)
        die(t->p, "a save", rc);
    meet();
    return over;
}

/* ---- the training loop of a rank ---- */

static void free_places(void *owner)
{
    free(owner);
}

static void update(trainer *t)
{
    const optim_args sgd = {.kind = OPTIM_SGD, .lr = 1, .grad_scale = 1};
    int rc = persia_loop_apply(t->s, four.group > 1 ? LOOP_ALL : LOOP_MINE,
                               &sgd, 1);
    if (client_is_loss(rc))
        sim_say("an update tells: %s", persia_err_text());
    else if (rc)
        die(t->p, "an update", rc);
    t->pending = 0;
    sim_wake(&four.step);
}

/* What Taking.close() and _Pass.close() do. */
static void end_loop(trainer *t, const rank_taken *in_hand)
{
    persia_rank_cancel(t->r);
    for (int i = 0; i < t->n; i++)
        if (t->taken[i] != in_hand)
            persia_taken_give_back(t->taken[i]);
    persia_loop_pass_close(t->s, t->pass);
    while (t->n)
        persia_taken_put(t->taken[--t->n]);
}

/* As break does; `in_hand`: the loop has had it, or NULL.  The next loop of
 * this rank has the rest of the epoch. */
static void leave_loop(trainer *t, const rank_taken *in_hand)
{
    sim_say("leaves the loop%s", in_hand ? " with a batch" : "");
    persia_rank_again(t->r);
    end_loop(t, in_hand);
    declare(t);
}

/* The pass has ended.  Whether there is another epoch: then it begins. */
static int begin_next(trainer *t)
{
    rank_counts n;
    sim_say("the pass has ended");
    if (t->pending)
        update(t);
    if (four.epochs == 1)
        return 0;
    four.over = 1;
    end_loop(t, NULL);
    persia_rank_get_counts(t->r, &n);
    if (n.epochs >= (uint64_t)four.epochs)
        return 0;
    declare(t);
    return 1;
}

static int is_left(const trainer *t)
{
    return !t->pending && sim_chance(four.leaves);
}

/* 0: the pass has ended. */
static int train_one(trainer *t)
{
    int64_t *places = calloc(IDS_MAX + 2, sizeof *places); /* of its rows */
    int64_t *ends = places + IDS_MAX;
    static const float minus[DIM] = {-1, -1};
    float out[DIM];
    rank_taken *taken = t->taken[0];
    const uint64_t batch = t->batch[0];
    TRAIN(t, "the loop", persia_loop_batch_next(t->s, batch, 0));
    TRAIN(t, "a batch", persia_loop_batch_wait(t->s, batch));
    const wire_take_reply *m = persia_taken_reply(taken);
    if (m->status == TAKE_END) {
        free(places);
        return 0;
    }
    persia_taken_use(taken);
    if (is_left(t)) {
        free(places);
        leave_loop(t, taken);
        return 1;
    }
    sim_say("trains batch %llu", (unsigned long long)m->number);
    const uint64_t ticket = persia_loop_ticket(t->s);
    assert(places);
    id_batch ids = {.bags = 1, .values = places, .offsets = ends};
    if (four.rows)
        ids.n = persia_taken_places(taken, places, ends);
    persia_loop_batch_bind(t->s, batch, ticket);
    TRAIN(t, "a forward", persia_loop_read(t->s, batch, ticket, t->plan, &ids,
                                           out, DIM));
    const loop_grad g = {.ticket = ticket,
                         .grad = {.plan = t->plan, .batch = ids,
                                  .grad = minus, .stride = DIM},
                         .owner = places, .release = free_places};
    TRAIN(t, "a gradient", persia_loop_add_grad(t->s, &g));
    /* One that begins after it waits in the next epoch, for which it gets
     * what is sent again of this one; it must not wait for more, nor for
     * other ranks, which wait there as well. */
    if (++t->pending == (t->late ? 1 : four.group))
        update(t);
    persia_taken_put(taken);
    for (int i = 1; i < t->n; i++) {
        t->taken[i - 1] = t->taken[i];
        t->batch[i - 1] = t->batch[i];
    }
    t->n--;
    if (w.saves && !t->late && ++t->trained % four.every == 0)
        (void)agree(t);
    return 1;
}

static void *rank_main(void *arg)
{
    trainer *t = calloc(1, sizeof *t);
    assert(t);
    t->p = arg;
    t->late = four.over;
    open_rank(t, (uint32_t)(t->p - four.ranks));
    if (w.saves)
        begin(t);
    declare(t);
    do {
        if (is_left(t))
            leave_loop(t, NULL);
        ask_ahead(t);
    } while (train_one(t) || begin_next(t));
    if (four.step)
        TRAIN(t, "leaving", persia_loop_leave(t->s, 1));
    TRAIN(t, "flush", persia_loop_flush(t->s, 0));
    four.over = 1;
    four.ended++;
    while (w.saves && !agree(t))
        ;
    if (four.together)
        meet();
    sim_sleep(2 * SIM_S);
    process_end(t->p, SIM_S); /* a loader that begins again needs ranks */
    for (;;)
        (void)sim_wait(NULL, UINT64_MAX);
}

/* ---- a history ---- */

static void process_make(process *p, const char *kind, int i, int slot,
                         void *(*run)(void *arg))
{
    snprintf(p->name, sizeof p->name, "%s%d", kind, i);
    p->slot = slot + i;
    p->run = run;
    process_start(p);
}

void four_begin(void)
{
    four.workers_n = 1 + sim_random(WORKERS_MAX);
    four.staleness = sim_random(4);
    four.rows = sim_chance(500);
    four.step = w.ranks_n > 1 && sim_chance(600);
    if (four.step)
        four.staleness = 0;
    four.group = 1;
    if (!four.step && sim_chance(400))
        four.group += 1 + (int)sim_random(GROUP_MAX - 1);
    four.leaves = !four.step && sim_chance(600) ? sim_random(300) : 0;
    four.epochs = four.step || w.saves ? 1 : 1 + (int)sim_random(4);
    four.lease = sim_between(SIM_S, 30 * SIM_S);
    four.timeout = sim_between(2 * SIM_S, 20 * SIM_S);
    four.batches = 20 + (int)sim_random(BATCHES_MAX - 20);
    four.every = four.group * (1 + (int)sim_random(8));
    four.together = four.step || w.saves;
    w.ranks[0].attempts_n = four.batches;
    for (int k = 0; k < four.batches; k++)
        w.ranks[0].attempts[k] = (attempt){.number = (uint64_t)k + 1,
                                           .shared = four_shared(k),
                                           .servers_n = GROUPS};
    sim_say("four roles: %u workers, %d batches, staleness %llu%s, updates of "
            "%d, leases of %.1f s%s", four.workers_n, four.batches,
            (unsigned long long)four.staleness, four.step ? " in step" : "",
            four.group, (double)four.lease / 1e9,
            four.rows ? ", rows travel" : "");
    for (int i = 0; i < (int)four.workers_n; i++) {
        snprintf(four.addresses[i], sizeof four.addresses[i], "worker%d", i);
        process_make(&four.workers[i], "worker", i, SLOT_WORKERS, worker_main);
    }
    for (int i = 0; i < (int)w.ranks_n; i++)
        process_make(&four.ranks[i], "rank", i, SLOT_RANKS, rank_main);
    process_make(&four.loader, "loader", 0, SLOT_LOADER, loader_main);
}

void four_kill_worker(void)
{
    process_kill(&four.workers[sim_random(four.workers_n)], SIM_MS);
}

void four_kill_rank(void)
{
    if (four.step && sim_chance(700)) { /* in the middle of one */
        (void)sim_wait(&four.step, sim_now() + 2 * SIM_S);
        sim_sleep(sim_between(0, SIM_MS));
    }
    process_end(&four.ranks[sim_random(w.ranks_n)], SIM_MS);
}

void four_kill_loader(void)
{
    if (!four.done)
        process_kill(&four.loader, SIM_MS);
}

void four_stop_worker(void)
{
    sim_node *n = four.workers[sim_random(four.workers_n)].node;
    sim_say("%s is stopped", sim_node_name(n));
    sim_pause(n, sim_now() + sim_between(5 * SIM_S, 40 * SIM_S));
    four.loads = 1;
}

void four_kill_all(void)
{
    process_kill(&four.loader, SIM_MS);
    for (uint32_t i = 0; i < four.workers_n; i++)
        process_kill(&four.workers[i], SIM_MS);
    process_end(&four.ranks[0], SIM_MS);
}

sim_node *four_any(uint32_t k)
{
    if (k < w.ranks_n)
        return four.ranks[k].node;
    k -= w.ranks_n;
    return k < four.workers_n ? four.workers[k].node : four.loader.node;
}

void four_heal(void)
{
    four.healed = sim_now();
    four.loads = 0;
    for (uint32_t i = 0; i < four.workers_n; i++)
        restart(&four.workers[i]);
    for (uint32_t i = 0; i < w.ranks_n; i++)
        restart(&four.ranks[i]);
    restart(&four.loader);
}

void four_await_end(uint64_t until)
{
    while (!four.done)
        if (sim_wait(&four, until) && !four.done)
            sim_fail("the loader's batches are not done");
}

uint64_t four_told(int killed)
{
    sender_counts n;
    persia_sender_get_counts(four.sender, &n);
    sim_say("loader: %llu sent, %llu passed over, %llu failed, %llu lost",
            (unsigned long long)n.sent, (unsigned long long)n.passed,
            (unsigned long long)n.failed, (unsigned long long)n.lost);
    if (!killed && n.lost)
        sim_fail("the loader counts %llu lost batches, and no server was "
                 "killed", (unsigned long long)n.lost);
    return n.failed + n.lost;
}
