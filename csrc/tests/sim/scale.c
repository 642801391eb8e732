/* scale.c: persia scale; see moves.h. */
#include "tests/sim/moves.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#define ASK (100 * SIM_MS)

typedef struct command {
    uint64_t id;
    uint32_t shard, source, target;
    uint64_t cancels; /* at that time */
} command;

static struct {
    sim_node *last;
    int n;
    uint64_t ids;
} commands;

/* Within 10 s. */
static int ask_patiently(uint32_t process, const wire_move *m,
                         wire_move_reply *out)
{
    const uint64_t until = sim_now() + 10 * SIM_S;
    shard_ref *ref;
    int rc = moves_connect(process, &ref);
    if (rc)
        return rc;
    do {
        rc = moves_call(ref, m, out);
        if (rc)
            sim_sleep(ASK);
    } while ((rc == PERSIA_EUNAVAILABLE || rc == PERSIA_ETIMEOUT) &&
             sim_now() < until);
    ref->ops->close(ref);
    return rc;
}

/* ... places(): each shard is at a server that answers. */
static int command_places(uint32_t *at)
{
    for (uint32_t k = 0; k < w.servers_n; k++) {
        const process_role *p = &w.processes[at[k] = w.servers[k].at];
        if (!sim_node_alive(p->node) || !(p->has >> k & 1))
            return PERSIA_EUNAVAILABLE;
    }
    return PERSIA_OK;
}

/* ... tell(), of places that may change meanwhile. */
static int command_tell(void)
{
    uint32_t at[SERVERS_MAX];
    wire_move_reply r;
    int rc = command_places(at);
    for (uint32_t i = 0; i < processes_n(); i++)
        for (uint32_t k = 0; k < w.servers_n && !rc; k++) {
            const wire_move m = moves_message(MOVE_PLACE, 0, k, at[k]);
            if (at[k] != i)
                rc = ask_patiently(i, &m, &r);
        }
    return rc;
}

/* persia/distributed/scaling.py: _run(). */
static int command_run(const command *c)
{
    wire_move m = moves_message(MOVE_BEGIN, c->id, c->shard, c->target);
    wire_move_reply r;
    int rc = command_tell();
    if (!rc)
        rc = ask_patiently(c->source, &m, &r);
    m.verb = MOVE_STATUS;
    while (!rc) {
        if (sim_now() > c->cancels)
            return PERSIA_ECLOSED;
        rc = ask_patiently(c->source, &m, &r);
        if (!rc && (r.id != c->id || r.state == MOVED_FAILED))
            return PERSIA_EUNAVAILABLE;
        if (!rc && r.state == MOVED_DONE)
            return PERSIA_OK;
        sim_sleep(ASK);
    }
    return rc;
}

static void *command_main(void *arg)
{
    const command *c = arg;
    wire_move m = moves_message(MOVE_CANCEL, c->id, c->shard, c->target);
    wire_move_reply r;
    int rc = command_run(c);
    sim_say("move %llu of shard %u: %s", (unsigned long long)c->id,
            c->shard, rc ? persia_err_name(rc) : "done");
    if (rc)
        (void)ask_patiently(c->source, &m, &r);
    m.verb = MOVE_PLACE;
    for (uint32_t i = 0; i < processes_n() && !rc; i++)
        if (i != c->source && i != c->target)
            (void)ask_patiently(i, &m, &r);
    return NULL;
}

void moves_ask(uint32_t *source, uint32_t *target)
{
    command *c = calloc(1, sizeof *c);
    char name[32];
    assert(c);
    c->id = ++commands.ids;
    c->shard = sim_random(w.servers_n);
    c->source = w.servers[c->shard].at;
    c->target = sim_random(processes_n() - 1);
    c->target += c->target >= c->source;
    c->cancels = sim_chance(150) ? sim_now() + sim_between(SIM_MS, 4 * SIM_S)
                                 : UINT64_MAX;
    *source = c->source;
    *target = c->target;
    snprintf(name, sizeof name, "scale.%d", ++commands.n);
    commands.last = sim_node_make(name, SLOT_COMMAND);
    sim_say("shard %u is to go from ps%u to ps%u", c->shard, c->source,
            c->target);
    sim_spawn(commands.last, command_main, c, "main");
}

void moves_kill_command(void)
{
    sim_say("kill -9 of %s", sim_node_name(commands.last));
    sim_kill(commands.last);
}

static void *tell_main(void *arg)
{
    (void)arg;
    while (command_tell())
        sim_sleep(SIM_S);
    return NULL;
}

void moves_heal(void)
{
    sim_spawn(sim_node_make("scale", SLOT_COMMAND), tell_main, NULL, "main");
}
