/* storage.c: folders, slow files, and jobs of shards; see storage.h. */
#include "tests/sim/saves.h"

#include "shard/numbers.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct {
    char path[64];
    int healed;
} storage;

/* ---- folders ---- */

static void storage_path(uint64_t pid, char out[64])
{
    static const char shm[] = "/dev/shm";
    snprintf(out, 64, "%s/persia-sim-%llu", access(shm, W_OK) ? "/tmp" : shm,
             (unsigned long long)pid);
}

static void folder_make(const char *path)
{
    if (mkdir(path, 0700) && errno != EEXIST)
        sim_fail("a folder cannot be made: %s", strerror(errno));
}

static int remove_one(const char *path, const struct stat *st, int type,
                      struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    return remove(path);
}

void storage_remove(uint64_t pid)
{
    char path[64];
    storage_path(pid, path);
    if (!access(path, F_OK))
        (void)nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

void storage_begin(void)
{
    storage_remove((uint64_t)getpid()); /* of one that was killed */
    storage_path((uint64_t)getpid(), storage.path);
    folder_make(storage.path);
}

void storage_heal(void)
{
    storage.healed = 1;
}

static void path_of(const char *root, const char *folder, char *out,
                    size_t room)
{
    snprintf(out, room, "%s/%s%s%s", storage.path, root, *folder ? "/" : "",
             folder);
}

void storage_make(const char *root, const char *folder, const char *proof)
{
    char path[256], file[300];
    path_of(root, "", path, sizeof path);
    folder_make(path);
    path_of(root, folder, path, sizeof path);
    folder_make(path);
    snprintf(file, sizeof file, "%s/.proof", path);
    FILE *f = fopen(file, "w");
    if (!f || fputs(proof, f) < 0 || fclose(f))
        sim_fail("a proof cannot be written");
}

void storage_unprove(const char *root, const char *folder)
{
    char path[256], file[300];
    path_of(root, folder, path, sizeof path);
    snprintf(file, sizeof file, "%s/.proof", path);
    (void)unlink(file);
}

void storage_rename(const char *root, const char *from, const char *to)
{
    char old[256], new[256];
    path_of(root, from, old, sizeof old);
    path_of(root, to, new, sizeof new);
    if (rename(old, new))
        sim_fail("a folder cannot be renamed: %s", strerror(errno));
}

int storage_open(const char *root, const char *folder)
{
    char path[256];
    path_of(root, folder, path, sizeof path);
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        sim_fail("a checkpoint is not there: %s", strerror(errno));
    return fd;
}

/* ---- files that take their time ---- */

typedef struct slow_io {
    ckpt_io io; /* first */
    ckpt_io *real;
} slow_io;

/* Before files are read: it may take a while. */
static void slow_down(uint64_t most)
{
    uint64_t left = sim_between(SIM_US, most);
    while (left && !(storage.healed && left > SIM_S)) {
        const uint64_t some = left < SIM_S ? left : SIM_S;
        sim_sleep(some);
        left -= some;
    }
}

static void before_reading(void)
{
    slow_down(sim_chance(100) ? 8 * SIM_S : 200 * SIM_MS);
}

/* Before files are written: it may hang, or fail. */
static int before_writing(void)
{
    slow_down(sim_chance(30) ? 100 * SIM_S
                             : sim_chance(100) ? 8 * SIM_S : 200 * SIM_MS);
    return !storage.healed && sim_chance(8)
               ? persia_err_set(PERSIA_EIO, "the disk of checkpoints fails")
               : PERSIA_OK;
}

static ckpt_io *real_io(ckpt_io *io)
{
    return ((slow_io *)io)->real;
}

static int slow_open(ckpt_io *io)
{
    before_reading();
    return real_io(io)->open(real_io(io));
}

static int slow_write(ckpt_io *io, sched *s, table_cut *cut,
                      const table_config *config, const char *stem,
                      ckpt_files *out)
{
    int rc = before_writing();
    return rc ? rc : real_io(io)->write(real_io(io), s, cut, config, stem,
                                        out);
}

static int slow_flush(ckpt_io *io)
{
    int rc = before_writing();
    return rc ? rc : real_io(io)->sync(real_io(io));
}

static int slow_verify(ckpt_io *io, sched *s, const table_config *config,
                       const ckpt_file *files, size_t n, uint64_t *here)
{
    before_reading();
    return real_io(io)->verify(real_io(io), s, config, files, n, here);
}

static int slow_read(ckpt_io *io, sched *s, table *t, const ckpt_file *files,
                     size_t n, uint32_t shard, uint32_t shards)
{
    before_reading();
    return real_io(io)->read(real_io(io), s, t, files, n, shard, shards);
}

static void slow_close(ckpt_io *io)
{
    real_io(io)->close(real_io(io));
    free(io);
}

static int slow_find(void *root, const char *name, const char *folder,
                     const char *proof, int writes, ckpt_io **out)
{
    const ckpt_places real = persia_ckpt_root_places(root);
    slow_io *s = calloc(1, sizeof *s);
    assert(s);
    *s = (slow_io){.io = {slow_open, slow_write, slow_flush, slow_verify,
                          slow_read, slow_close}};
    int rc = real.find(real.ctx, name, folder, proof, writes, &s->real);
    *out = &s->io;
    if (rc)
        free(s);
    return rc;
}

static void log_name(uint32_t process, uint32_t server, char out[FOLDER])
{
    snprintf(out, FOLDER, "log-%u-of-%u-%u-at-%u", server, w.servers_n,
             w.epoch, process);
}

ckpt_places storage_places(uint32_t process, uint32_t server)
{
    char name[FOLDER], path[256];
    ckpt_root *root;
    log_name(process, server, name);
    path_of(name, "", path, sizeof path);
    folder_make(path);
    if (persia_ckpt_root_open(&root) ||
        persia_ckpt_root_set(root, storage.path) ||
        persia_ckpt_root_set_log(root, path))
        sim_fail("folders: %s", persia_err_text());
    return (ckpt_places){slow_find, root};
}

/* ---- calls of a shard ---- */

static int ask_once(const peer *p, uint32_t method, void *message,
                    shard_reply *reply)
{
    if (p->own)
        return persia_shard_wait(p->own, method, message,
                                 persia_clock_ns() + 3600 * SIM_S, reply);
    *(wire_caller *)message = persia_client_caller(p->c, p->shard);
    int rc = persia_client_call(p->c, p->shard, method, message, reply);
    if (rc != PERSIA_ESTALE)
        return rc;
    rc = persia_client_repair(p->c, p->shard);
    if (rc)
        return rc;
    *(wire_caller *)message = persia_client_caller(p->c, p->shard);
    return persia_client_call(p->c, p->shard, method, message, reply);
}

int peer_ask(const peer *p, uint32_t method, void *message, shard_reply *reply)
{
    const uint64_t until = sim_now() + w.timeout;
    uint64_t pause = 20 * SIM_MS;
    for (;;) {
        int rc = ask_once(p, method, message, reply);
        if (rc != PERSIA_EUNAVAILABLE || p->own || sim_now() + pause > until)
            return rc;
        sim_sleep(pause);
        pause = pause < SIM_S ? 2 * pause : pause;
    }
}

static void part_take(part *to, const wire_snapshot_reply *m)
{
    to->restore = m->restore;
    to->updates = m->updates;
    to->step = m->step;
    to->t = m->t;
    to->log = m->log;
    to->clock = m->pushes_n ? m->pushes[0] : 0;
    assert(m->ledgers_n <= STREAMS_MAX && m->files_n <= FILES_MAX);
    to->ledgers_n = m->ledgers_n;
    for (size_t i = 0; i < m->ledgers_n; i++) {
        to->ledgers[i] = m->ledgers[i];
        memset(to->ledgers[i].gaps, 0, sizeof to->ledgers[i].gaps);
    }
    to->files_n = m->files_n;
    for (size_t i = 0; i < m->files_n; i++)
        to->files[i] = m->files[i];
}

int peer_snapshot(const peer *p, uint32_t verb, const char *root,
                  const char *folder, const char *proof, part *out,
                  int *started, int *done)
{
    wire_snapshot m = {.verb = verb};
    shard_reply reply;
    snprintf(m.root, sizeof m.root, "%s", root);
    snprintf(m.folder, sizeof m.folder, "%s", folder);
    snprintf(m.proof, sizeof m.proof, "%s", proof);
    int rc = peer_ask(p, WIRE_SNAPSHOT, &m, &reply);
    if (rc)
        return rc;
    const wire_snapshot_reply *r = reply.message;
    *started = (int)r->started;
    *done = (int)r->done;
    if (r->started && verb != SNAPSHOT_END)
        part_take(out, r);
    persia_shard_release(&reply);
    return PERSIA_OK;
}

int peer_restore(const peer *p, uint32_t verb, const char *root,
                 const part *from, int *done)
{
    uint64_t clock = from->clock;
    wire_restore m = {.verb = verb,
                      .lineage = from->lineage,
                      .restore = from->restore,
                      .updates = from->updates,
                      .step = from->step,
                      .t = from->t,
                      .pushes = &clock,
                      .pushes_n = 1,
                      .ledgers = (wire_ledger *)from->ledgers,
                      .ledgers_n = from->ledgers_n,
                      .files = (wire_file *)from->files,
                      .files_n = from->files_n};
    shard_reply reply;
    snprintf(m.root, sizeof m.root, "%s", root);
    snprintf(m.folder, sizeof m.folder, "%s", from->folder);
    int rc = peer_ask(p, WIRE_RESTORE, &m, &reply);
    if (rc)
        return rc;
    *done = (int)((const wire_restore_reply *)reply.message)->done;
    persia_shard_release(&reply);
    return PERSIA_OK;
}

int peer_hello(const peer *p, uint64_t *lineage, uint64_t *restore)
{
    wire_hello m = {.version = WIRE_VERSION, .version_min = WIRE_VERSION_MIN,
                    .world = 1, .name_space = "sim"};
    shard_reply reply;
    int rc = peer_ask(p, WIRE_HELLO, &m, &reply);
    if (rc)
        return rc;
    const wire_hello_reply *r = reply.message;
    *lineage = r->lineage;
    *restore = r->restore;
    persia_shard_release(&reply);
    return PERSIA_OK;
}

/* ---- another number of shards ---- */

enum { NUMBERS = 4096 };

static const wire_ledger *ledger_of(const part *p, uint64_t stream)
{
    for (size_t i = 0; i < p->ledgers_n; i++)
        if (p->ledgers[i].stream == stream)
            return &p->ledgers[i];
    return NULL;
}

/* persia/checkpoint/ledgers.py: merge() and in_part(). */
static uint64_t merge(const checkpoint *c, uint64_t stream, wire_ledger *out)
{
    numbers_set of[SERVERS_MAX], all;
    uint64_t in_part = 0, skipped = 0, incarnation = 0;
    for (uint32_t s = 0; s < c->servers_n; s++) {
        const wire_ledger *l = ledger_of(&c->parts[s], stream);
        numbers_init(&of[s], 0);
        if (!l)
            continue;
        numbers_from_wire(&of[s], l);
        if (l->skipped > skipped)
            skipped = l->skipped;
        if (l->incarnation > incarnation)
            incarnation = l->incarnation;
    }
    numbers_init(&all, 0);
    for (uint64_t n = 1; n < NUMBERS; n++) {
        uint32_t have = 0;
        for (uint32_t s = 0; s < c->servers_n; s++)
            have += (uint32_t)window_has(&of[s].w, n);
        if (have)
            numbers_add(&all, n);
        in_part += have && have < c->servers_n;
    }
    if (sim_bug("union_of_ledgers"))
        in_part = 0;
    if (!out)
        return in_part;
    *out = (wire_ledger){.stream = stream, .incarnation = incarnation};
    numbers_to_wire(&all, out);
    out->skipped = skipped + in_part;
    return in_part;
}

int part_has(const part *p, uint64_t stream, uint64_t number)
{
    numbers_set has;
    const wire_ledger *l = ledger_of(p, stream);
    if (!l)
        return 0;
    numbers_from_wire(&has, l);
    return window_has(&has.w, number);
}

uint64_t part_skipped(const part *p, uint64_t stream)
{
    const wire_ledger *l = ledger_of(p, stream);
    return l ? l->skipped : 0;
}

uint64_t checkpoint_in_part(const checkpoint *c, uint64_t stream)
{
    return merge(c, stream, NULL);
}

static void add_part(const checkpoint *c, const part *from, part *out)
{
    out->updates = from->updates > out->updates ? from->updates : out->updates;
    out->step = from->step > out->step ? from->step : out->step;
    out->t = from->t > out->t ? from->t : out->t;
    out->clock = from->clock > out->clock ? from->clock : out->clock;
    for (size_t i = 0; i < from->files_n; i++) {
        assert(out->files_n < FILES_MAX);
        out->files[out->files_n++] = from->files[i];
    }
    for (size_t i = 0; i < from->ledgers_n; i++) {
        const uint64_t stream = from->ledgers[i].stream;
        if (ledger_of(out, stream))
            continue;
        assert(out->ledgers_n < STREAMS_MAX);
        merge(c, stream, &out->ledgers[out->ledgers_n++]);
    }
}

void part_of(const checkpoint *c, uint32_t shard, uint32_t shards, part *out)
{
    *out = c->parts[0];
    if (shards == c->servers_n) {
        const uint64_t lineage = out->lineage;
        *out = c->parts[shard];
        out->lineage = lineage;
        return;
    }
    out->updates = out->step = out->t = out->clock = 0;
    out->ledgers_n = out->files_n = 0;
    for (uint32_t s = 0; s < c->servers_n; s++)
        add_part(c, &c->parts[s], out);
}

/* ---- a server's own ---- */

int storage_read(const peer *own, const char *root, const part *from)
{
    table_config config;
    counts_config(&config);
    wire_declare m = {.table = config.spec};
    shard_reply reply;
    int done = 0;
    int rc = peer_ask(own, WIRE_DECLARE, &m, &reply);
    if (rc)
        return rc;
    persia_shard_release(&reply);
    for (uint32_t verb = RESTORE_PREPARE; verb <= RESTORE_COMMIT; verb++)
        while (!(rc = peer_restore(own, verb, root, from, &done)) && !done)
            sim_sleep(20 * SIM_MS);
    return rc;
}

static void begin_with(const peer *own, const char *root, const part *from)
{
    sim_say("begins with %s", from->folder);
    if (storage_read(own, root, from))
        sim_fail("a server cannot begin: %s", persia_err_text());
}

/* Tables alone may be those of a restore that was interrupted. */
static int has_rows(ps_service *service)
{
    tables *p = persia_shard_tables(persia_service_shard(service));
    table_stats stats = {0};
    if (persia_tables_tables(p))
        persia_table_get_stats(persia_tables_table(p, 0), &stats);
    return persia_tables_updates(p) || stats.rows;
}

void storage_recover(ps_service *service, updates_log *log, uint32_t process,
                     uint32_t server)
{
    peer own = {0};
    log_found found = {0};
    const part *cut = w.processes[process].homes[server].cut;
    const uint64_t from = cut ? cut->log : 0;
    if (persia_shard_direct(persia_service_shard(service), &own.own))
        sim_fail("no direct way to a shard");
    if (log && cut)
        begin_with(&own, CKPT_LOG_ROOT, cut);
    if (log && persia_service_replay(service, from, &found))
        sim_fail("the log: %s", persia_err_text());
    if (log)
        sim_say("has %llu records behind %llu",
                (unsigned long long)found.records, (unsigned long long)from);
    if (w.restores && w.newest && !found.first && !has_rows(service)) {
        part p;
        part_of(w.newest, server, w.servers_n, &p);
        begin_with(&own, CHECKPOINTS, &p);
    }
    own.own->ops->close(own.own);
}

/* ---- cuts ---- */

struct cutter {
    ps_service *service;
    updates_log *log;
    uint32_t process, server;
    int ends, ended;
};
typedef struct cutter cutter;

int storage_write(const peer *own, const char *root, const char *folder,
                  part *out)
{
    int started = 0, done = 0;
    uint64_t lineage, after, restore;
    int rc = peer_hello(own, &lineage, &restore);
    if (!rc)
        rc = peer_snapshot(own, SNAPSHOT_BEGIN, root, folder, "p", out,
                           &started, &done);
    while (!rc && !done) {
        sim_sleep(20 * SIM_MS);
        rc = peer_snapshot(own, SNAPSHOT_STATUS, root, folder, "p", out,
                           &started, &done);
    }
    if (!rc)
        rc = peer_snapshot(own, SNAPSHOT_END, root, folder, "p", out, &started,
                           &done);
    if (!rc)
        rc = peer_hello(own, &after, &restore);
    if (!rc && after != lineage)
        rc = persia_err_set(PERSIA_EUNAVAILABLE, "other rows were restored "
                            "while these were written");
    out->lineage = lineage;
    return rc;
}

int storage_cut(ps_service *service, updates_log *log, uint32_t process,
                uint32_t server)
{
    static unsigned cuts;
    char root[FOLDER];
    peer own = {0};
    part *p = calloc(1, sizeof *p);
    assert(p);
    if (persia_shard_direct(persia_service_shard(service), &own.own))
        sim_fail("no direct way to a shard");
    log_name(process, server, root);
    snprintf(p->folder, FOLDER, "rows-%u", ++cuts);
    storage_make(root, p->folder, "p");
    int rc = storage_write(&own, CKPT_LOG_ROOT, p->folder, p);
    own.own->ops->close(own.own);
    if (rc) {
        free(p);
        return rc;
    }
    storage_unprove(root, p->folder);
    sim_say("has cut its rows at %llu", (unsigned long long)p->log);
    if (sim_bug("cut_of_a_later_moment"))
        p->log = persia_log_end(log);
    w.processes[process].homes[server].cut = p;
    return persia_log_release(log, p->log);
}

static void *cuts_main(void *arg)
{
    cutter *c = arg;
    while (!c->ends) {
        int rc = PERSIA_OK;
        sim_sleep(500 * SIM_MS);
        if (persia_log_wants_cut(c->log) && !c->ends)
            rc = storage_cut(c->service, c->log, c->process, c->server);
        if (!rc)
            continue;
        sim_say("cannot cut its rows: %s: %s", persia_err_name(rc),
                persia_err_text());
        sim_sleep(SIM_S);
    }
    c->ended = 1;
    sim_wake(c);
    return NULL;
}

void storage_cuts(ps_service *service, updates_log *log, uint32_t process,
                  uint32_t server)
{
    cutter *c = calloc(1, sizeof *c);
    assert(c);
    *c = (cutter){.service = service, .log = log, .process = process,
                  .server = server};
    w.processes[process].homes[server].cutter = c;
    sim_spawn(sim_node_self(), cuts_main, c, "cuts");
}

void storage_end_cuts(home *h)
{
    cutter *c = h->cutter;
    h->cutter = NULL;
    if (c)
        c->ends = 1;
    while (c && !c->ended)
        (void)sim_wait(c, UINT64_MAX);
}
