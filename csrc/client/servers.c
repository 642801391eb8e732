/* servers.c: what a client knows of its servers; servers that start again. */
#include "client/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MS ((uint64_t)1000000)

/* ---- small things ---- */

uint64_t client_deadline(const ps_client *r)
{
    return persia_deadline(r->timeout_ns);
}

wire_caller server_caller(const ps_client *r, server *to)
{
    wire_caller who = {.client = r->client,
                       .incarnation = atomic_load(&r->incarnation)};
    pthread_mutex_lock(&to->lock);
    who.boot = to->boot;
    who.lineage = to->lineage;
    who.slots_rev = to->slots_rev;
    pthread_mutex_unlock(&to->lock);
    return who;
}

uint32_t server_table(server *to, uint32_t no)
{
    pthread_mutex_lock(&to->lock);
    uint32_t number = to->numbers[no];
    pthread_mutex_unlock(&to->lock);
    return number;
}

int server_bad_reply(const server *from, const char *what)
{
    return persia_err_set(PERSIA_EPROTOCOL, "%s: %s", from->address, what);
}

/* Of updates that embedding workers made. */
static void servers_add_elsewhere(char *text, size_t room, uint64_t lost,
                                  const server *never)
{
    const size_t n = strlen(text);
    const char *joint = n ? "; " : "";
    if (never)
        snprintf(text + n, room - n,
                 "%sembedding workers acknowledged %llu updates that servers "
                 "lack, and server %s was not started again since: those "
                 "workers have other servers than this store. Compare their "
                 "lists of servers (PERSIA_SERVERS)",
                 joint, (unsigned long long)lost, never->address);
    else if (lost)
        snprintf(text + n, room - n,
                 "%sservers have lost %llu updates that embedding workers had "
                 "acknowledged", joint, (unsigned long long)lost);
}

int persia_client_tell_lost(ps_client *r)
{
    char text[FAN_TEXT];
    pthread_mutex_lock(&r->lock);
    const int code = r->lost_code;
    const uint64_t elsewhere = r->lost_elsewhere;
    const server *never = r->never_had;
    memcpy(text, r->lost_text, sizeof text);
    r->lost_text[0] = 0;
    r->lost_code = PERSIA_ELOST;
    r->lost_elsewhere = 0;
    r->never_had = NULL;
    pthread_mutex_unlock(&r->lock);
    servers_add_elsewhere(text, sizeof text, elsewhere, never);
    return text[0] ? persia_err_set(code, "%s%s", text,
                                    never ? ""
                                          : "; load a checkpoint, or continue "
                                            "without them "
                                            "(`lost=continue`)")
                   : PERSIA_OK;
}

/* ---- Hello ---- */

wire_hello make_hello(const ps_client *r, enum claim claim)
{
    wire_hello m = {.caller = {.client = r->client},
                    .version = WIRE_VERSION,
                    .version_min = WIRE_VERSION_MIN,
                    .features = WIRE_FEATURES,
                    .rank = r->rank,
                    .world = r->world,
                    .stream = atomic_load(&r->stream)};
    if (claim == CLAIM_STREAM)
        m.caller.incarnation = atomic_load(&r->incarnation);
    memcpy(m.name_space, r->name_space, sizeof m.name_space);
    return m;
}

/* Ids are placed as if no slot had moved: each shard has its own. */
static int servers_check_slots(const server *from, const wire_hello_reply *m)
{
    const uint32_t first = shard_slot(m->shard, m->shards);
    const uint32_t end = shard_slot(m->shard + 1, m->shards);
    uint32_t next = first;
    for (size_t i = 0; i < m->slots_n && m->slots[i].first == next; i++)
        next += m->slots[i].count;
    if (next == end)
        return PERSIA_OK;
    return persia_err_set(
        PERSIA_EMISMATCH,
        "%s is shard %u of %u and has not slots %u to %u of %d, "
        "where this process looks for their ids; install the same "
        "release on both",
        from->address, m->shard, m->shards, first, end - 1, IDS_SLOTS);
}

/* Whether the reply is of a server that we may speak to. */
int check_hello(const ps_client *r, const server *from,
                       const wire_hello_reply *m)
{
    if (!wire_versions_meet(m->version_min, m->version))
        return persia_err_set(
            PERSIA_EMISMATCH,
            "%s speaks versions %u to %u of the protocol, this "
            "process %d to %d; install the same release on both",
            from->address, m->version_min ? m->version_min : m->version,
            m->version, WIRE_VERSION_MIN, WIRE_VERSION);
    if (strcmp(m->name_space, r->name_space) != 0)
        return persia_err_set(
            PERSIA_EMISMATCH,
            "%s serves the namespace \"%s\", this store is of "
            "\"%s\"; check the addresses",
            from->address, m->name_space, r->name_space);
    if (m->shards < 1 || m->shards > IDS_SHARDS_MAX || m->shard >= m->shards)
        return server_bad_reply(from, "its Hello names no shard");
    return servers_check_slots(from, m);
}

/* The training continues from these rows; the server's lock is held. */
static void server_begin(server *to, const wire_hello_reply *m)
{
    to->foreign = 0;
    to->first_boot = m->boot;
    to->first_lineage = m->lineage;
    numbers_from_wire(&to->first, &m->ledger);
}

void server_learn(server *to, const wire_hello_reply *m)
{
    /* In the same life with the same rows acknowledgements may have arrived
     * since it made this ledger. */
    if (to->boot != m->boot || to->lineage != m->lineage) {
        numbers_from_wire(&to->acked, &m->ledger);
        numbers_from_wire(&to->acked_late, &m->ledger);
        to->acked_gap = m->ledger.skipped ? m->ledger.watermark : 0;
    }
    if (!to->boot)
        server_begin(to, m);
    to->boot = m->boot;
    to->lineage = m->lineage;
    to->restore = m->restore;
    to->t = m->t;
    to->slots_rev = m->slots_rev;
}

/* How many of the updates that it had acknowledged are not in `there`; its
 * lock is held.  At least so many, if that ends before the last skipped
 * number. */
uint64_t server_acked_beyond(const server *to, const window *there)
{
    const window *had = &to->acked_late.w;
    uint64_t beyond = window_missing(had, there);
    if (there->watermark >= to->acked_gap)
        return beyond;
    uint64_t skipped =
        had->skipped > there->skipped ? had->skipped - there->skipped : 0;
    return beyond > skipped ? beyond - skipped : 0;
}

/* How many updates it had acknowledged and has no more; its lock is held.
 * other: its rows are of another training, so none of the updates since this
 * one began is in them, though their ledger may have the same numbers. */
static uint64_t server_lost(const server *to, const wire_hello_reply *m,
                            int other)
{
    if (m->boot == to->boot)
        return 0;
    numbers_set there;
    numbers_from_wire(&there, &m->ledger);
    uint64_t lost = server_acked_beyond(to, &there.w);
    uint64_t since = other ? server_acked_beyond(to, &to->first.w) : 0;
    return lost > since ? lost : since;
}

int server_has_lost_nothing(const server *to, const wire_hello_reply *m)
{
    return to->first_boot == m->boot && to->first_lineage == m->lineage;
}

static int server_knows(server *one, uint64_t lineage)
{
    pthread_mutex_lock(&one->lock);
    int knows = one->first_lineage == lineage ||
                (one->lineage == lineage && !one->foreign);
    pthread_mutex_unlock(&one->lock);
    return knows;
}

/* Rows of another training: a checkpoint has the lineage of shard 0. */
static int servers_is_other_training(const ps_client *r, server *to,
                                     uint64_t lineage)
{
    return !server_knows(to, lineage) &&
           !server_knows(r->servers[0], lineage);
}

/* Of updates in flight one whose number is in `there`; 0: none.  The client's
 * lock is held. */
static uint64_t servers_number_in_flight(const ps_client *r,
                                         const window *there)
{
    uint64_t n = r->settled.w.watermark;
    while (n < r->next_number)
        if (!window_has(&r->settled.w, ++n) && window_has(there, n))
            return n;
    return 0;
}

/* Rows with updates that this client has not made since it loaded others: its
 * next ones would be taken for these, and so would one in flight whose number
 * an earlier process had given.  In a stream that is shared others make
 * updates, too, and a number is of one batch. */
static int servers_check_history(ps_client *r, const server *to,
                                 const wire_hello_reply *m, int other)
{
    numbers_set there;
    numbers_from_wire(&there, &m->ledger);
    pthread_mutex_lock(&r->lock);
    const uint64_t last = r->next_number, top = window_top(&there.w);
    /* In the same life of a server it is dropped. */
    const uint64_t flies = other ? servers_number_in_flight(r, &there.w) : 0;
    pthread_mutex_unlock(&r->lock);
    if (r->shared || (top <= last && !flies))
        return PERSIA_OK;
    if (top <= last)
        return persia_err_set(
            PERSIA_EMISMATCH,
            "%s has other rows now, with an update %llu: it may be another "
            "one than that of this store, which was in flight and is given "
            "up",
            to->address, (unsigned long long)flies);
    return persia_err_set(
        PERSIA_EMISMATCH,
        "%s was started again with rows of another training: they "
        "have update %llu, this store has made %llu; load the "
        "checkpoint again that it continues from",
        to->address, (unsigned long long)top, (unsigned long long)last);
}

void client_learn(ps_client *r, const wire_hello_reply *m)
{
    uint64_t top = numbers_wire_top(&m->ledger);
    pthread_mutex_lock(&r->lock);
    if (top > r->last_number)
        r->last_number = top;
    pthread_mutex_unlock(&r->lock);
    if (m->shard == 0)
        atomic_store(&r->updates, m->updates);
}

void hello_copy(wire_hello_reply *to, const wire_hello_reply *from)
{
    *to = *from;
    to->tables = NULL;
    to->tables_n = 0;
    to->slots = NULL;
    to->slots_n = 0;
    to->here = NULL;
    to->here_n = 0;
}

static int send_hello(const ps_client *r, server *to, const wire_hello *m,
                      uint64_t deadline, wire_hello_reply *out)
{
    shard_reply reply;
    int rc = persia_shard_wait(to->ref, WIRE_HELLO, m, deadline, &reply);
    if (rc)
        return rc;
    rc = check_hello(r, to, reply.message);
    hello_copy(out, reply.message);
    persia_shard_release(&reply);
    return rc;
}

static int ask_hello(const ps_client *r, server *to, enum claim claim,
                     uint64_t deadline, wire_hello_reply *out)
{
    const wire_hello m = make_hello(r, claim);
    return send_hello(r, to, &m, deadline, out);
}

int client_ask_ledger(const ps_client *r, server *to, uint64_t stream,
                      uint64_t deadline, wire_hello_reply *out)
{
    wire_hello m = make_hello(r, CLAIM_LOOK);
    m.stream = stream;
    return send_hello(r, to, &m, deadline, out);
}

/* Declares all tables at a server of this boot; numbers: [tables]. */
static int servers_declare_again(ps_client *r, server *to, wire_caller who,
                                 uint64_t deadline, uint32_t *numbers)
{
    pthread_mutex_lock(&r->lock);
    uint32_t n = r->tables_declared;
    pthread_mutex_unlock(&r->lock);
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < n && !rc; i++) {
        if (persia_client_dropped(r, i)) {
            numbers[i] = UINT32_MAX; /* no table's */
            continue;
        }
        const wire_declare m = {.caller = who, .table = r->tables[i]->spec};
        shard_reply reply;
        rc = persia_shard_wait(to->ref, WIRE_DECLARE, &m, deadline, &reply);
        if (!rc)
            numbers[i] = ((const wire_declare_reply *)reply.message)->no;
        persia_shard_release(&reply);
    }
    return rc;
}

void client_note_text(ps_client *r, const char *text)
{
    if (r->policy != LOST_RAISE)
        return;
    pthread_mutex_lock(&r->lock);
    size_t n = strlen(r->lost_text);
    snprintf(r->lost_text + n, sizeof r->lost_text - n, "%s%s",
             n ? "; " : "", text);
    pthread_mutex_unlock(&r->lock);
}

void client_note_elsewhere(ps_client *r, uint64_t lost, const server *never)
{
    r->counts.lost += lost;
    if (r->policy != LOST_RAISE)
        return;
    pthread_mutex_lock(&r->lock);
    r->lost_elsewhere += lost;
    r->never_had = never ? never : r->never_had;
    pthread_mutex_unlock(&r->lock);
}

void client_note_lost(ps_client *r, const server *to, uint64_t lost)
{
    char text[FAN_TEXT];
    r->counts.lost += lost;
    if (lost == 0)
        return;
    pthread_mutex_lock(&r->lock);
    if (!r->shared) /* see servers_forget_settled() */
        r->told = r->next_number;
    pthread_mutex_unlock(&r->lock);
    snprintf(text, sizeof text, "%s was started again and has lost %llu "
             "updates that it had acknowledged", to->address,
             (unsigned long long)lost);
    client_note_text(r, text);
}

/* Whether another client has put other rows there: in one life of it, or
 * before it was started again with these. */
static int servers_is_replaced(ps_client *r, server *to,
                               const wire_hello_reply *m,
                               enum greet_reason reason)
{
    if (reason != GREET_REPAIR || atomic_load(&r->loading))
        return 0;
    pthread_mutex_lock(&to->lock);
    const int is = m->boot == to->boot ? m->lineage != to->lineage
                                       : m->restore > to->restore;
    pthread_mutex_unlock(&to->lock);
    return is;
}

/* A server that was started again has lost updates, which are counted, but
 * its rows are no other training's: it takes on the restore of the others. */
static int servers_take_restore(ps_client *r, server *to, uint64_t deadline,
                                wire_hello_reply *m)
{
    pthread_mutex_lock(&to->lock);
    const uint64_t restore = to->restore;
    pthread_mutex_unlock(&to->lock);
    if (m->restore >= restore || atomic_load(&r->restores) != RESTORES_ONE)
        return PERSIA_OK;
    wire_hello takes = make_hello(r, CLAIM_STREAM);
    takes.caller.boot = m->boot;
    takes.caller.lineage = m->lineage;
    takes.takes = 1;
    takes.restore = restore;
    return send_hello(r, to, &takes, deadline, m);
}

/* A server may lack what was settled with it before: data loaders may send
 * that again, so updates must not settle it there. */
static void servers_forget_settled(ps_client *r)
{
    pthread_mutex_lock(&r->lock);
    numbers_init(&r->settled, 0);
    pthread_mutex_unlock(&r->lock);
}

/* Hello, tables and membership; between greeting_begin() and its end.  *top:
 * the largest number that the server has. */
static int servers_greet(ps_client *r, server *to, uint64_t deadline,
                         enum greet_reason reason, uint64_t *top)
{
    wire_hello_reply m;
    uint32_t shard = to->shard;
    uint32_t *numbers = calloc(TABLES_MAX, sizeof *numbers);
    if (!numbers)
        return persia_err_set(PERSIA_ENOMEM,
                              "no memory for a server's tables");
    int rc = ask_hello(r, to, CLAIM_STREAM, deadline, &m);
    if (!rc && (m.shard != shard || m.shards != r->servers_n))
        rc = persia_err_set(
            PERSIA_EMISMATCH,
            "%s was shard %u of %u and is shard %u of %u now; open "
            "the store again",
            to->address, shard, r->servers_n, m.shard, m.shards);
    /* Another process has loaded them: maybe one of this job, whose lookups
     * continue meanwhile. */
    const int replaced = !rc && servers_is_replaced(r, to, &m, reason);
    const int other = !rc && !replaced && m.boot != to->boot &&
                      servers_is_other_training(r, to, m.lineage);
    if ((other || replaced) && reason == GREET_REPAIR)
        rc = servers_check_history(r, to, &m, other);
    wire_caller who = {.client = r->client,
                       .incarnation = atomic_load(&r->incarnation),
                       .boot = m.boot, .lineage = m.lineage,
                       .slots_rev = m.slots_rev};
    if (!rc)
        rc = servers_declare_again(r, to, who, deadline, numbers);
    if (!rc && m.boot != to->boot)
        rc = sync_join_again(r, to, who, deadline);
    if (!rc && m.boot != to->boot && reason == GREET_REPAIR)
        rc = servers_take_restore(r, to, deadline, &m);
    /* It was started, or restored, once more meanwhile: in a moment, then. */
    if (rc == PERSIA_ESTALE)
        rc = persia_err_set(PERSIA_EUNAVAILABLE,
                            "%s was started again, or was given other rows, "
                            "while this client said Hello", to->address);
    if (!rc) {
        *top = numbers_wire_top(&m.ledger);
        client_learn(r, &m);
        pthread_mutex_lock(&to->lock);
        const uint64_t lost = replaced ? 0 : server_lost(to, &m, other);
        numbers_set there;
        numbers_from_wire(&there, &m.ledger);
        const uint64_t gone = replaced ? server_acked_beyond(to, &there.w)
                                       : 0;
        const int changed = to->boot != m.boot || to->lineage != m.lineage;
        server_learn(to, &m);
        to->foreign |= other && *top;
        if (reason != GREET_REPAIR)
            server_begin(to, &m);
        memcpy(to->numbers, numbers, TABLES_MAX * sizeof *numbers);
        pthread_mutex_unlock(&to->lock);
        if (changed && r->shared)
            servers_forget_settled(r);
        client_note_lost(r, to, reason == GREET_LOADED ? 0 : lost);
        if (replaced)
            client_note_replaced(r, to, m.restore, gone);
    }
    free(numbers);
    return rc;
}

int greeting_begin(server *to, int poll)
{
    int rc = PERSIA_OK;
    pthread_mutex_lock(&to->lock);
    while (to->greeting && !rc) {
        if (poll)
            rc = persia_cond_wait_poll(&to->greeted, &to->lock, UINT64_MAX);
        else
            persia_cond_wait(&to->greeted, &to->lock);
    }
    if (!rc)
        to->greeting = 1;
    pthread_mutex_unlock(&to->lock);
    return rc ? persia_err_set(rc, "interrupted while waiting for servers")
              : PERSIA_OK;
}

void greeting_end(server *to)
{
    pthread_mutex_lock(&to->lock);
    to->greeting = 0;
    pthread_cond_broadcast(&to->greeted);
    pthread_mutex_unlock(&to->lock);
}

int server_repair(ps_client *r, server *to, uint64_t boot, uint64_t deadline)
{
    uint64_t top;
    int rc = greeting_begin(to, 1);
    if (rc)
        return rc;
    wire_caller now = server_caller(r, to);
    if (now.boot == boot) {
        rc = servers_greet(r, to, deadline, GREET_REPAIR, &top);
        if (!rc)
            r->counts.reconnects++;
    }
    greeting_end(to);
    return rc;
}

/* *last: the largest number that any server has. */
int client_greet_each(ps_client *r, enum greet_reason reason, uint64_t *last)
{
    uint64_t deadline = client_deadline(r), top = 0;
    int rc = PERSIA_OK;
    for (uint32_t i = 0; i < r->servers_n && !rc; i++) {
        server *to = r->servers[i];
        rc = greeting_begin(to, 1);
        if (rc)
            break;
        rc = servers_greet(r, to, deadline, reason, &top);
        greeting_end(to);
        *last = !rc && top > *last ? top : *last;
    }
    return rc;
}

/* The stream is this client's from now on: its incarnation is higher than
 * that of any server. */
static int servers_claim_again(ps_client *r)
{
    uint64_t deadline = client_deadline(r), highest = 0;
    int rc = PERSIA_OK;
    wire_hello_reply m;
    for (uint32_t i = 0; i < r->servers_n && !rc; i++) {
        rc = ask_hello(r, r->servers[i], CLAIM_LOOK, deadline, &m);
        if (!rc && m.ledger.incarnation > highest)
            highest = m.ledger.incarnation;
    }
    if (!rc)
        atomic_store(&r->incarnation, highest + 1);
    return rc;
}

int persia_client_greet(ps_client *r, int restored)
{
    uint64_t last = 0;
    int rc = restored ? servers_claim_again(r) : PERSIA_OK;
    if (!rc)
        rc = client_greet_each(r, GREET_NUMBERS, &last);
    if (rc)
        return rc;
    persia_client_set_last_number(r, last);
    if (restored) {
        client_witnesses_end(r);
        client_compare_restores(r);
        client_set_t_after(r, client_servers_t(r), last);
        (void)persia_client_tell_lost(r);
    }
    return PERSIA_OK;
}

int persia_client_go_on(ps_client *r, uint64_t stream, uint64_t number,
                        uint64_t lost)
{
    uint64_t last = 0;
    atomic_store(&r->stream, stream);
    int rc = servers_claim_again(r);
    if (!rc)
        rc = client_greet_each(r, GREET_LOADED, &last);
    if (rc)
        return rc;
    client_witnesses_end(r);
    atomic_store(&r->resumed, 1);
    persia_client_set_last_number(r, number == NUMBER_LAST ? last : number);
    atomic_store(&r->missing, lost);
    client_set_t_after(r, client_servers_t(r), last);
    (void)persia_client_tell_lost(r);
    return PERSIA_OK;
}

void persia_client_set_last_number(ps_client *r, uint64_t number)
{
    atomic_store(&r->missing, count_missing(r, number));
    atomic_store(&r->restored_number, 0);
    pthread_mutex_lock(&r->lock);
    r->last_number = r->next_number = number;
    numbers_init(&r->settled, number);
    pthread_mutex_unlock(&r->lock);
}

uint64_t client_servers_t(ps_client *r)
{
    uint64_t highest = 0;
    for (uint32_t i = 0; i < r->servers_n; i++) {
        server *to = r->servers[i];
        pthread_mutex_lock(&to->lock);
        if (to->t > highest)
            highest = to->t;
        pthread_mutex_unlock(&to->lock);
    }
    return highest;
}

uint64_t persia_client_t(ps_client *r)
{
    pthread_mutex_lock(&r->lock);
    uint64_t base = r->t_base;
    pthread_mutex_unlock(&r->lock);
    return base;
}

void client_set_t_after(ps_client *r, uint64_t base, uint64_t number)
{
    pthread_mutex_lock(&r->lock);
    r->t_base = base;
    r->t_number = number;
    pthread_mutex_unlock(&r->lock);
}

void persia_client_set_t(ps_client *r, uint64_t base)
{
    pthread_mutex_lock(&r->lock);
    r->t_base = base;
    r->t_number = r->next_number;
    pthread_mutex_unlock(&r->lock);
}

/* It took on the restore of the others meanwhile: maybe they have, too. */
static void servers_note_restore(ps_client *r, server *to,
                                 const wire_hello_reply *m)
{
    int one = RESTORES_ONE;
    pthread_mutex_lock(&to->lock);
    const int taken = m->boot == to->boot && m->lineage == to->lineage &&
                      m->restore != to->restore;
    if (taken)
        to->restore = m->restore;
    pthread_mutex_unlock(&to->lock);
    if (taken)
        (void)atomic_compare_exchange_strong(&r->restores, &one,
                                             RESTORES_UNSURE);
}

/* Greets the server if it was started again. */
static int servers_look_at(ps_client *r, server *to, uint64_t deadline)
{
    const wire_caller known = server_caller(r, to);
    const uint64_t boot = known.boot, lineage = known.lineage;
    wire_hello_reply m;
    int rc = ask_hello(r, to, CLAIM_STREAM, deadline, &m);
    if (!rc && (m.boot != boot || m.lineage != lineage))
        rc = server_repair(r, to, boot, deadline);
    else if (!rc)
        servers_note_restore(r, to, &m);
    return rc;
}

static int servers_look(ps_client *r, int ledgers, uint64_t deadline)
{
    int rc = client_check_mixture(r, 0);
    for (uint32_t i = 0; i < r->servers_n && !rc; i++)
        rc = servers_look_at(r, r->servers[i], deadline);
    if (!rc && ledgers)
        rc = client_compare_witnesses(r, deadline);
    if (!rc)
        rc = persia_client_tell_lost(r);
    return rc ? rc : client_check_mixture(r, 0);
}

/* recovered: [servers], see server_recovers(). */
static int servers_recover(const ps_client *r, uint64_t *recovered)
{
    int any = 0;
    for (uint32_t i = 0; i < r->servers_n; i++)
        any |= server_recovers(r, r->servers[i], &recovered[i]);
    return any;
}

int persia_client_look(ps_client *r)
{
    uint64_t deadline = client_deadline(r), recovered[IDS_SHARDS_MAX] = {0};
    for (unsigned tries = 1;; tries++) {
        err_kept why;
        int rc = servers_look(r, 1, deadline);
        if (persia_retry(RETRY_REQUEST, rc) != RETRY_LATER ||
            atomic_load(&r->ends))
            return rc;
        persia_err_keep(&why, rc);
        const uint64_t pause = persia_backoff_ns(tries, PAUSE_MAX_NS,
                                                 r->client);
        if (persia_clock_ns() + pause >= deadline) {
            if (!servers_recover(r, recovered))
                return persia_err_again(&why);
            deadline = client_deadline(r);
        }
        rc = persia_pause_poll(pause);
        if (rc)
            return persia_err_set(rc, "interrupted while waiting for servers");
    }
}

int persia_client_look_once(ps_client *r)
{
    return servers_look(r, 1, client_deadline(r));
}

int persia_client_look_at_boots(ps_client *r)
{
    return servers_look(r, 0, client_deadline(r));
}

int persia_client_check_lost(ps_client *r)
{
    pthread_mutex_lock(&r->lock);
    const int has = r->witnesses != NULL;
    pthread_mutex_unlock(&r->lock);
    return has ? persia_client_look(r) : persia_client_tell_lost(r);
}

/* ---- one request of the caller's ---- */

int persia_client_call(ps_client *r, uint32_t shard, uint32_t method,
                       const void *arguments, shard_reply *reply)
{
    *reply = (shard_reply){0};
    if (shard >= r->servers_n)
        return persia_err_set(PERSIA_EARG, "there is no shard %u of %u", shard,
                              r->servers_n);
    return persia_shard_wait(r->servers[shard]->ref, method, arguments,
                             client_deadline(r), reply);
}

int persia_client_repair(ps_client *r, uint32_t shard)
{
    if (shard >= r->servers_n)
        return persia_err_set(PERSIA_EARG, "there is no shard %u of %u", shard,
                              r->servers_n);
    server *to = r->servers[shard];
    return server_repair(r, to, server_caller(r, to).boot,
                         client_deadline(r));
}

wire_maker persia_client_maker(const ps_client *r)
{
    return (wire_maker){.stream = atomic_load(&r->stream),
                        .client = r->client,
                        .incarnation = atomic_load(&r->incarnation)};
}

wire_caller persia_client_caller(const ps_client *r, uint32_t shard)
{
    return shard < r->servers_n ? server_caller(r, r->servers[shard])
                                : (wire_caller){0};
}
