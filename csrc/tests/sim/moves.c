/* moves.c: both sides of a move; see moves.h. */
#include "tests/sim/moves.h"

#include "shard/private.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ARRIVING_MAX = 8,
    STEPS_OF_MOVES = 128,
    ARRIVED_MAX = 64,
    DROPPED_MAX = 256,
    ROUNDS = 3 /* before the shard is held */
};

#define ASK (100 * SIM_MS)
#define ANSWER (5 * SIM_S)
#define SILENT (30 * SIM_S)
#define FORGET (60 * SIM_S)

typedef struct mover mover;


/* A shard that goes away. */
typedef struct leaving {
    mover *of;
    uint64_t id;
    uint32_t shard, to; /* to: a process */
    enum wire_move_state state;
    int cancelled;
    uint64_t part;  /* the next one */
    shard_ref *ref; /* to it */
} leaving;

/* A shard that arrives here. */
typedef struct arriving {
    mover *of; /* NULL: the entry is free */
    uint64_t id;
    uint32_t shard;
    uint64_t asked, parts;
    enum wire_move_state state;
    int dropped, again; /* again: of an earlier life */
    ps_service *service;
    tables *tables;
    updates_log *log;
} arriving;

struct mover {
    uint32_t process;
    process_role *p;
    sim_node *node;
    leaving *leaving; /* the last one; or NULL */
    arriving arriving[ARRIVING_MAX];
    uint64_t dropped[DROPPED_MAX]; /* moves whose parts may still arrive */
    uint32_t dropped_n;
};

/* ---- what lasts ---- */

/* Beside the log of a shard that can arrive. */
typedef struct kept_steps {
    uint64_t id;
    uint64_t *steps;
    size_t n;
} kept_steps;

static struct {
    kept_steps kept[STEPS_OF_MOVES];
    int kept_n;
    /* That have arrived at a process; without logs: in this life of it. */
    uint64_t arrived[PROCESSES_MAX][ARRIVED_MAX];
    mover *movers[PROCESSES_MAX];
} moves;

static const kept_steps *steps_of(uint64_t id)
{
    for (int i = 0; i < moves.kept_n; i++)
        if (moves.kept[i].id == id)
            return &moves.kept[i];
    return NULL;
}

static int has_arrived(uint32_t process, uint64_t id)
{
    for (int i = 0; i < ARRIVED_MAX; i++)
        if (moves.arrived[process][i] == id)
            return 1;
    return 0;
}

static void note_arrived(uint32_t process, uint64_t id)
{
    int i = 0;
    while (i < ARRIVED_MAX && moves.arrived[process][i])
        i++;
    assert(i < ARRIVED_MAX);
    moves.arrived[process][i] = id;
}

/* ---- the owner of a shard ---- */

static void next_step(const char *what, const leaving *l)
{
    sim_say("move %llu of shard %u to ps%u: %s", (unsigned long long)l->id,
            l->shard, l->to, what);
    sim_wake(&w.moves);
}

/* The process answers for the shard from now on. */
static void own(mover *m, uint32_t shard, ps_service *service, tables *p)
{
    for (uint32_t i = 0; i < processes_n(); i++)
        if (i != m->process && w.processes[i].has >> shard & 1 &&
            sim_node_alive(w.processes[i].node))
            sim_fail("ps%u and ps%u both have shard %u", i, m->process, shard);
    server_role *s = &w.servers[shard];
    s->at = m->process;
    s->service = service;
    s->tables = p;
    s->running = 1;
    m->p->has |= (uint8_t)(1 << shard);
    if (persia_host_add(m->p->host, service))
        sim_fail("a shard cannot be added: %s", persia_err_text());
}

void moves_check_end(void)
{
    for (uint32_t k = 0; k < w.servers_n; k++) {
        int n = 0;
        for (uint32_t i = 0; i < processes_n(); i++)
            n += sim_node_alive(w.processes[i].node) &&
                 w.processes[i].has >> k & 1;
        if (n != 1)
            sim_fail("%d processes have shard %u", n, k);
    }
}

int moves_begins_with(uint32_t process, uint32_t shard)
{
    if (w.moves && w.durable) {
        const int here = w.processes[process].homes[shard].state == HOME_HERE;
        for (uint32_t i = 0; here && i < processes_n(); i++)
            if (i != process && w.processes[i].has >> shard & 1)
                sim_fail("ps%u begins with shard %u, which ps%u has", process,
                         shard, i);
        return here;
    }
    return w.servers[shard].at == process;
}

int moves_may_start(uint32_t process)
{
    for (uint32_t k = 0; k < w.servers_n && !w.durable; k++) {
        server_role *s = &w.servers[k];
        if (!s->out)
            continue;
        if (s->at == process && s->out_of != process &&
            sim_node_alive(w.processes[s->out_of].node))
            return 0; /* that one is about to find out */
        if (s->out_of != process)
            continue;
        for (uint32_t i = 0; i < processes_n(); i++)
            for (int a = 0; a < ARRIVING_MAX && moves.movers[i]; a++)
                if (sim_node_alive(moves.movers[i]->node) &&
                    moves.movers[i]->arriving[a].of &&
                    moves.movers[i]->arriving[a].id == s->out)
                    return 0;
        s->out = 0;
    }
    return 1;
}

void moves_tell(uint32_t process)
{
    process_role *p = &w.processes[process];
    for (uint32_t k = 0; k < w.servers_n; k++) {
        const home *h = &p->homes[k];
        const uint32_t at = w.durable ? h->other : w.servers[k].at;
        if (w.durable ? h->state == HOME_GONE || h->state == HOME_OUT
                      : at != process && k / w.each != at)
            (void)persia_host_place(p->host, k, w.addresses[at], h->move);
    }
}

/* ---- asking the other side ---- */

int moves_call(shard_ref *ref, const wire_move *m, wire_move_reply *out)
{
    shard_reply reply;
    int rc = persia_shard_wait(ref, WIRE_MOVE, m, persia_clock_ns() + ANSWER,
                               &reply);
    if (rc)
        return rc;
    *out = *(const wire_move_reply *)reply.message;
    out->here = NULL;
    persia_shard_release(&reply);
    return PERSIA_OK;
}

int moves_connect(uint32_t process, shard_ref **out)
{
    const rpc_channel_config c = {.address = w.addresses[process],
                                  .message_limit = 4 << 20,
                                  .methods = &persia_shard_methods};
    return persia_shard_connect(&c, NULL, out);
}

wire_move moves_message(enum wire_move_verb verb, uint64_t id, uint32_t shard,
                        uint32_t to)
{
    wire_move m = {.verb = verb, .name_space = "sim", .shard = shard,
                   .shards = w.servers_n, .id = id, .by = "command"};
    snprintf(m.address, sizeof m.address, "ps%u", to);
    return m;
}

static wire_move message_of(const leaving *l, enum wire_move_verb verb)
{
    return moves_message(verb, l->id, l->shard, l->to);
}

static int is_away(int rc)
{
    return rc == PERSIA_EUNAVAILABLE || rc == PERSIA_ETIMEOUT;
}

/* Until there is an answer, before the shard was taken out. */
static int leave_ask(leaving *l, const wire_move *m, wire_move_reply *out)
{
    const uint64_t until = sim_now() + SILENT;
    for (;;) {
        if (l->cancelled)
            return persia_err_set(PERSIA_ECLOSED, "cancelled");
        int rc = moves_call(l->ref, m, out);
        if (!is_away(rc) || sim_now() > until)
            return rc;
        sim_sleep(ASK);
    }
}

/* ---- a shard leaves ---- */

/* One round of parts. */
static int leave_round(leaving *l, shard *of, int last)
{
    wire_move_reply r;
    for (;;) {
        wire_move m = message_of(l, MOVE_PREPARE);
        uint64_t rows;
        int ended;
        int rc = persia_shard_copy_next(of, last, &rows, &ended);
        if (rc || ended)
            return rc;
        m.boot = persia_shard_boot(of);
        m.lineage = atomic_load(&of->lineage);
        m.durable = w.durable;
        m.part = l->part;
        persia_shard_copy_put(of, &m);
        rc = leave_ask(l, &m, &r);
        if (!rc && r.state == MOVED_FAILED)
            rc = persia_err_set(PERSIA_EUNAVAILABLE, "%s", r.text);
        if (rc)
            return rc;
        l->part++;
    }
}

static int leave_copy(leaving *l, shard *of)
{
    int rc = PERSIA_OK;
    for (int i = 0; i < ROUNDS && !rc; i++) {
        rc = leave_round(l, of, 0);
        sim_sleep(ASK); /* rows change meanwhile */
    }
    return rc;
}

static int leave_prepare(leaving *l, shard *of)
{
    const wire_move m = message_of(l, MOVE_STATUS);
    wire_move_reply r;
    next_step("asks the other process", l);
    int rc = leave_ask(l, &m, &r);
    if (!rc)
        rc = persia_shard_copy_begin(of);
    if (!rc)
        rc = leave_copy(l, of);
    next_step("is copied", l);
    if (!rc)
        rc = persia_shard_hold(of, SHARD_CLOSING);
    if (!rc)
        rc = persia_shard_hold(of, SHARD_HELD);
    next_step("is held", l);
    if (!rc)
        rc = leave_round(l, of, 1);
    persia_shard_copy_end(of);
    return rc;
}

/* COMMIT until it is known whether the other process has the shard: 0, or
 * that it never will. */
static int leave_commit(leaving *l)
{
    const wire_move m = message_of(l, MOVE_COMMIT);
    wire_move_reply r;
    for (;;) {
        int rc = moves_call(l->ref, &m, &r);
        if (!is_away(rc))
            return rc;
        if (!w.durable && net_refuses(w.addresses[l->to]))
            return rc;
        sim_sleep(ASK);
    }
}

/* One that hangs in a file stays. */
static void moves_free(ps_service *service, tables *p, updates_log *log)
{
    if (persia_service_destroy(service))
        return;
    persia_tables_destroy(p);
    if (log)
        persia_log_close(log);
}

static void moves_cut(const mover *m, uint32_t shard, ps_service *service)
{
    updates_log *log = m->p->homes[shard].log;
    if (log)
        storage_cuts(service, log, m->process, shard);
}

static void leave_done(leaving *l)
{
    server_role *s = &w.servers[l->shard];
    home *h = &l->of->p->homes[l->shard];
    if (s->out == l->id)
        s->out = 0;
    if (w.durable)
        *h = (home){.state = HOME_GONE, .other = l->to, .move = l->id};
    l->state = MOVED_DONE;
    next_step("is there", l);
}

static void leave_take_back(leaving *l, ps_service *service, tables *p)
{
    home *h = &l->of->p->homes[l->shard];
    sim_say("takes shard %u back", l->shard);
    w.servers[l->shard].out = 0;
    h->state = HOME_HERE;
    if (persia_shard_reborn(persia_service_shard(service)))
        sim_fail("no boot");
    (void)persia_shard_hold(persia_service_shard(service), SHARD_FREE);
    persia_service_open(service);
    own(l->of, l->shard, service, p);
    moves_cut(l->of, l->shard, service);
    l->state = MOVED_FAILED;
    next_step("is back", l);
}

static void leave_hand_over(leaving *l)
{
    server_role *s = &w.servers[l->shard];
    process_role *p = l->of->p;
    home *h = &p->homes[l->shard];
    server_role was = *s;
    updates_log *log = h->log;
    if (!sim_bug("out_is_not_noted"))
        h->state = HOME_OUT;
    h->move = l->id;
    h->other = l->to;
    s->out = l->id;
    s->out_of = l->of->process;
    if (persia_host_remove(p->host, l->shard, w.addresses[l->to], l->id))
        sim_fail("a shard cannot be taken out: %s", persia_err_text());
    p->has &= (uint8_t)~(1 << l->shard);
    persia_service_close(was.service);
    next_step("is out", l);
    const int rc = leave_commit(l);
    storage_end_cuts(h);
    if (rc) {
        leave_take_back(l, was.service, was.tables);
        return;
    }
    leave_done(l);
    moves_free(was.service, was.tables, log);
}

static void *leave_main(void *arg)
{
    leaving *l = arg;
    const server_role *s = &w.servers[l->shard];
    shard *of = persia_service_shard(s->service);
    if (moves_connect(l->to, &l->ref))
        sim_fail("no way to ps%u", l->to);
    int rc = leave_prepare(l, of);
    if (!rc && l->cancelled)
        rc = persia_err_set(PERSIA_ECLOSED, "cancelled");
    if (!rc) {
        leave_hand_over(l);
    } else {
        wire_move_reply r;
        const wire_move m = message_of(l, MOVE_ABORT);
        sim_say("move %llu fails: %s", (unsigned long long)l->id,
                persia_err_text());
        (void)moves_call(l->ref, &m, &r);
        (void)persia_shard_hold(of, SHARD_FREE);
        l->state = MOVED_FAILED;
        next_step("stays", l);
    }
    l->ref->ops->close(l->ref);
    return NULL;
}

/* What an earlier life has taken out. */
static void *leave_again_main(void *arg)
{
    leaving *l = arg;
    const uint32_t no = l->of->process;
    tables *p;
    updates_log *log;
    if (moves_connect(l->to, &l->ref))
        sim_fail("no way to ps%u", l->to);
    next_step("is out still", l);
    if (!leave_commit(l)) {
        leave_done(l);
    } else {
        ps_service *service = make_service(no, l->shard, 0, 0, &p, &log);
        storage_recover(service, log, no, l->shard);
        persia_shard_ready(persia_service_shard(service));
        leave_take_back(l, service, p);
    }
    l->ref->ops->close(l->ref);
    return NULL;
}

/* ---- a shard arrives ---- */

static arriving *find_arriving(mover *m, uint64_t id)
{
    for (int i = 0; i < ARRIVING_MAX; i++)
        if (m->arriving[i].of && m->arriving[i].id == id &&
            !m->arriving[i].dropped)
            return &m->arriving[i];
    return NULL;
}

/* Of a shard that is not here. */
static void home_clear(home *h)
{
    *h = (home){.state = h->state, .move = h->move, .other = h->other};
}

static void arrive_end(arriving *a)
{
    home *h = &a->of->p->homes[a->shard];
    if (a->service)
        moves_free(a->service, a->tables, a->log);
    if (w.durable)
        home_clear(h);
    *a = (arriving){0};
}

static int is_dropped(const mover *m, uint64_t id)
{
    for (uint32_t i = 0; i < m->dropped_n; i++)
        if (m->dropped[i] == id)
            return 1;
    return 0;
}

static void note_dropped(mover *m, uint64_t id)
{
    assert(m->dropped_n < DROPPED_MAX);
    if (!is_dropped(m, id))
        m->dropped[m->dropped_n++] = id;
}

static void arrive_drop(arriving *a)
{
    sim_say("forgets move %llu", (unsigned long long)a->id);
    note_dropped(a->of, a->id);
    a->dropped = 1;
    if (!a->again || a->state != MOVED_RUNNING)
        arrive_end(a);
}

/* Of an earlier life. */
static void *arrive_main(void *arg)
{
    arriving *a = arg;
    const uint32_t no = a->of->process;
    const kept_steps *kept = steps_of(a->id);
    a->service = make_service(no, a->shard, 0, 0, &a->tables, &a->log);
    storage_recover(a->service, a->log, no, a->shard);
    if (persia_shard_set_steps(persia_service_shard(a->service), kept->steps,
                               kept->n))
        sim_fail("steps of a shard: %s", persia_err_text());
    a->state = MOVED_DONE;
    if (a->dropped)
        arrive_end(a);
    sim_wake(&w.moves);
    return NULL;
}

/* All is there. */
static int arrive_prepared(arriving *a)
{
    home *h = &a->of->p->homes[a->shard];
    kept_steps *kept = &moves.kept[moves.kept_n++];
    assert(moves.kept_n <= STEPS_OF_MOVES);
    kept->id = a->id;
    int rc = persia_shard_steps(persia_service_shard(a->service),
                                &kept->steps, &kept->n);
    if (!rc && w.durable)
        h->prepared = a->id;
    return rc;
}

static void arrive_part(arriving *a, const wire_move *in)
{
    int rc = persia_shard_arrive(persia_service_shard(a->service), in);
    if (!rc && in->handover_n)
        rc = arrive_prepared(a);
    if (rc) {
        sim_say("move %llu cannot be taken: %s", (unsigned long long)a->id,
                persia_err_text());
        a->state = MOVED_FAILED;
        return;
    }
    a->parts++;
    if (in->handover_n)
        a->state = MOVED_DONE;
    sim_wake(&w.moves);
}

static int arrive_begin(mover *m, const wire_move *in, arriving **out)
{
    home *h = &m->p->homes[in->shard];
    arriving *a = NULL;
    log_found found;
    if (in->part || is_dropped(m, in->id))
        return persia_err_set(PERSIA_EARG, "no such move is prepared");
    if (has_arrived(m->process, in->id) || m->p->has >> in->shard & 1)
        return persia_err_set(PERSIA_EARG, "the shard is here already");
    if (h->state == HOME_OUT)
        return persia_err_set(PERSIA_EUNAVAILABLE, "the shard leaves");
    for (int i = 0; i < ARRIVING_MAX; i++) {
        arriving *other = &m->arriving[i];
        if (other->of && other->shard == in->shard && !other->dropped)
            arrive_drop(other);
        if (other->of && other->shard == in->shard)
            return persia_err_set(PERSIA_EUNAVAILABLE,
                                  "an earlier move of it ends");
        if (!other->of)
            a = other;
    }
    assert(a);
    *a = (arriving){.of = m, .id = in->id, .shard = in->shard,
                    .state = MOVED_RUNNING};
    if (w.durable)
        home_clear(h);
    a->service = make_service(m->process, in->shard, in->boot, in->lineage,
                              &a->tables, &a->log);
    *out = a;
    return a->log ? persia_service_replay(a->service, 0, &found) : PERSIA_OK;
}

/* The state of a PREPARE. */
static int arrive(mover *m, const wire_move *in, wire_move_reply *out)
{
    arriving *a = find_arriving(m, in->id);
    int rc = a ? PERSIA_OK : arrive_begin(m, in, &a);
    if (rc)
        return rc;
    a->asked = sim_now();
    if (a->state == MOVED_RUNNING && in->part == a->parts)
        arrive_part(a, in);
    else if (a->state != MOVED_FAILED && in->part + 1 != a->parts)
        return persia_err_set(PERSIA_EARG, "this is not the next part");
    out->state = a->state;
    out->id = a->id;
    return PERSIA_OK;
}

static int commit(mover *m, uint64_t id)
{
    arriving *a = find_arriving(m, id);
    if (has_arrived(m->process, id))
        return PERSIA_OK; /* the answer to the first call was lost */
    if (a && a->again && a->state == MOVED_RUNNING) {
        a->asked = sim_now();
        return persia_err_set(PERSIA_EUNAVAILABLE, "it is being read");
    }
    if (!a || a->state != MOVED_DONE) {
        note_dropped(m, id);
        if (a)
            arrive_drop(a);
        return persia_err_set(PERSIA_EARG, "no such move is prepared");
    }
    if (w.durable) {
        m->p->homes[a->shard].state = HOME_HERE;
        m->p->homes[a->shard].prepared = 0;
        persia_shard_ready(persia_service_shard(a->service));
    }
    note_arrived(m->process, id);
    m->p->homes[a->shard].log = a->log;
    own(m, a->shard, a->service, a->tables);
    sim_say("shard %u is here", a->shard);
    moves_cut(m, a->shard, a->service);
    *a = (arriving){0};
    sim_wake(&w.moves);
    return PERSIA_OK;
}

static void forget(mover *m)
{
    for (int i = 0; i < ARRIVING_MAX; i++) {
        arriving *a = &m->arriving[i];
        if (a->of && !a->dropped && a->asked + FORGET < sim_now())
            arrive_drop(a);
    }
}

/* ---- calls ---- */

static int begin(mover *m, const wire_move *in)
{
    const leaving *old = m->leaving;
    if (old && old->id == in->id)
        return PERSIA_OK;
    if (old && old->state == MOVED_RUNNING)
        return persia_err_set(PERSIA_EUNAVAILABLE, "another one moves");
    if (!(m->p->has >> in->shard & 1) || !w.servers[in->shard].running)
        return persia_err_set(PERSIA_EARG, "the shard is not here");
    leaving *l = calloc(1, sizeof *l);
    assert(l);
    *l = (leaving){.of = m, .id = in->id, .shard = in->shard,
                   .to = (uint32_t)atoi(in->address + 2),
                   .state = MOVED_RUNNING};
    m->leaving = l;
    sim_spawn(m->node, leave_main, l, "mover");
    return PERSIA_OK;
}

static void place(mover *m, const wire_move *in)
{
    home *h = &m->p->homes[in->shard];
    (void)persia_host_place(m->p->host, in->shard, in->address, in->id);
    if (h->state == HOME_HERE || h->state == HOME_OUT || h->move >= in->id)
        return;
    h->state = HOME_GONE;
    h->move = in->id;
    h->other = (uint32_t)atoi(in->address + 2);
}

static int take(mover *m, const wire_move *in, wire_move_reply *out)
{
    const leaving *l = m->leaving;
    int rc = PERSIA_OK;
    arriving *a;
    switch (in->verb) {
    case MOVE_BEGIN:
        rc = begin(m, in);
        l = m->leaving;
        break;
    case MOVE_CANCEL:
        if (l && l->id == in->id)
            m->leaving->cancelled = 1;
        break;
    case MOVE_PLACE:
        place(m, in);
        break;
    case MOVE_PREPARE:
        return arrive(m, in, out);
    case MOVE_COMMIT:
        rc = commit(m, in->id);
        break;
    case MOVE_ABORT:
        if ((a = find_arriving(m, in->id)))
            arrive_drop(a);
        break;
    default:
        break;
    }
    out->state = l ? l->state : MOVED_NONE;
    out->id = l ? l->id : 0;
    return rc;
}

static void *mover_main(void *arg)
{
    mover *m = arg;
    for (;;) {
        wire_move_reply out = {.shards = w.servers_n};
        host_move *call = persia_host_take(m->p->host, ASK);
        if (!call) {
            forget(m);
            continue;
        }
        int rc = take(m, persia_host_message(call), &out);
        persia_host_give(call, rc, &out);
    }
    return NULL;
}

void moves_begin(uint32_t process)
{
    mover *m = calloc(1, sizeof *m);
    assert(m);
    m->process = process;
    m->p = &w.processes[process];
    m->node = sim_node_self();
    moves.movers[process] = m;
    if (!w.durable)
        memset(moves.arrived[process], 0, sizeof moves.arrived[process]);
    for (uint32_t k = 0, n = 0; k < w.servers_n && w.durable; k++) {
        const home *h = &m->p->homes[k];
        if (h->prepared) {
            arriving *a = &m->arriving[n++];
            *a = (arriving){.of = m, .id = h->prepared, .shard = k, .again = 1,
                            .asked = sim_now(), .state = MOVED_RUNNING};
            sim_spawn(m->node, arrive_main, a, "reader");
        } else if (h->state == HOME_OUT) {
            leaving *l = calloc(1, sizeof *l);
            assert(l);
            *l = (leaving){.of = m, .id = h->move, .shard = k, .to = h->other,
                           .state = MOVED_RUNNING};
            m->leaving = l;
            sim_spawn(m->node, leave_again_main, l, "mover");
        }
    }
    sim_spawn(m->node, mover_main, m, "moves");
}
