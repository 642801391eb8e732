/* server.c: persia._core.Server, a shard behind messages. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "server/server.h"
#include "py/far.h"
#include "py/log.h"
#include "py/peer.h"
#include "py/served.h"

/* ---- what is served ----------------------------------------------------- */

void py_served_drop(py_served *s)
{
    if (atomic_fetch_sub(&s->users, 1) != 1)
        return;
    /* In a forked child its locks belong to threads that are not there. */
    if (persia_fork_check("a server") != PERSIA_OK)
        return;
    if (persia_service_destroy(s->service))
        return; /* a thread hangs in a file, and needs them */
    persia_log_close(s->log);
    persia_tables_destroy(s->p);
    persia_ckpt_root_close(s->root);
    free(s);
}

typedef struct server_object {
    PyObject_HEAD
    py_served *served;  /* NULL: closed */
    rpc_server *rpc;    /* NULL: not listening */
    ps_host *host;      /* while it listens */
    py_served **all;    /* [all_n] it has references to what it serves */
    size_t all_n;
    uint32_t calls;     /* of a shard */
    int busy;           /* a thread is in stop(); guarded by the GIL */
} server_object;

/* A reference to what a Server serves, or NULL with an exception set. */
static py_served *served_of(PyObject *server)
{
    PyObject *core = PyImport_ImportModule("persia._core");
    PyObject *type = core ? PyObject_GetAttrString(core, "Server") : NULL;
    Py_XDECREF(core);
    if (!type)
        return NULL;
    int is = PyObject_IsInstance(server, type);
    Py_DECREF(type);
    if (is < 0)
        return NULL;
    py_served *s = is ? ((server_object *)server)->served : NULL;
    if (!s) {
        PyErr_SetString(PyExc_TypeError, "need a Server that is not closed");
        return NULL;
    }
    atomic_fetch_add(&s->users, 1);
    return s;
}

py_served *py_server_served(PyObject *server, struct ps_service **service)
{
    py_served *s = served_of(server);
    if (s)
        *service = s->service;
    return s;
}

/* config->log is its own, unless it fails. */
static int served_create(const tables_config *shard, const py_served *beside,
                         service_config *config, const char *checkpoints,
                         PyObject *far, const char *log, py_served **out)
{
    py_served *s = calloc(1, sizeof *s);
    if (!s)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a server");
    int rc = persia_ckpt_root_open(&s->root);
    if (!rc && checkpoints)
        rc = persia_ckpt_root_set(s->root, checkpoints);
    if (!rc && far != Py_None) {
        const ckpt_far storage = py_far(far);
        persia_ckpt_root_set_far(s->root, &storage);
    }
    if (!rc && log)
        rc = persia_ckpt_root_set_log(s->root, log);
    if (!rc)
        rc = beside ? persia_tables_beside(beside->p, &s->p)
                    : persia_tables_create(shard, &s->p);
    if (rc)
        goto fail;
    config->files = persia_ckpt_root_places(s->root);
    rc = persia_service_create(s->p, config, &s->service);
    if (rc)
        goto fail;
    s->log = config->log;
    atomic_init(&s->users, 1);
    *out = s;
    return PERSIA_OK;
fail:
    persia_tables_destroy(s->p);
    persia_ckpt_root_close(s->root);
    free(s);
    return rc;
}

/* ---- a server ----------------------------------------------------------- */

static PyObject *server_new(PyTypeObject *type, PyObject *args,
                            PyObject *kwargs)
{
    static char *words[] = {"namespace",     "shard",       "shards",
                            "threads",       "memory_limit", "lineage",
                            "message_limit", "checkpoints", "lines",
                            "log",           "beside",      "others",
                            "boot",          "far",         "lines_json",
                            "audit",         "slow",        NULL};
    const char *name_space, *checkpoints, *path = NULL;
    PyObject *log = Py_None, *beside = Py_None, *far = Py_None;
    tables_config shard = {0};
    service_config config = {0};
    unsigned long long memory, lineage, message, boot = 0;
    double slow = 0;
    int ignored;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "sIIIKKKz|iOOIKOpid", words, &name_space,
            &config.shard, &config.shards, &shard.threads, &memory, &lineage,
            &message, &checkpoints, &config.lines, &log, &beside,
            &shard.beside, &boot, &far, &config.lines_json, &config.audit,
            &slow))
        return NULL;
    if (py_seconds(slow, &config.slow_ns))
        return NULL;
    if (py_name(name_space, config.name_space, sizeof config.name_space))
        return NULL;
    shard.memory_limit = memory;
    config.lineage = lineage;
    config.boot = boot;
    config.message_limit = message;
    if (py_log_open(log, name_space, config.shard, config.shards,
                    &config.log) ||
        (log != Py_None && !PyArg_ParseTuple(log, "s|iKK", &path, &ignored,
                                             &memory, &message)))
        return NULL;
    py_served *first = NULL;
    if (beside != Py_None && !(first = served_of(beside))) {
        persia_log_close(config.log);
        return NULL;
    }
    server_object *self = py_new_object(type);
    if (!self) {
        if (first)
            py_served_drop(first);
        return NULL;
    }
    int rc = served_create(&shard, first, &config, checkpoints, far, path,
                           &self->served);
    if (first)
        py_served_drop(first);
    if (rc) {
        self->served = NULL;
        persia_log_close(config.log);
        py_raise(rc);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* The server, or NULL with an exception set where it was closed. */
static server_object *server_open(PyObject *self)
{
    server_object *s = (server_object *)self;
    if (s->served && !s->busy)
        return s;
    py_closed("the server");
    return NULL;
}

/* Takes references to what is served: of the server (not of a bare one), and
 * of those in `beside`, a list of Server objects. -1 with an exception set. */
static int server_gather(server_object *s, PyObject *beside, int bare)
{
    const Py_ssize_t more = PyList_Check(beside) ? PyList_Size(beside) : 0;
    s->all = calloc((size_t)more + 1, sizeof(py_served *));
    if (!s->all) {
        PyErr_NoMemory();
        return -1;
    }
    if (!bare) {
        atomic_fetch_add(&s->served->users, 1);
        s->all[s->all_n++] = s->served;
    }
    for (Py_ssize_t i = 0; i < more; i++) {
        py_served *one = served_of(PyList_GetItem(beside, i));
        if (!one)
            return -1;
        s->all[s->all_n++] = one;
    }
    return 0;
}

/* Gives them back; nothing is listening. */
static void server_scatter(server_object *s)
{
    persia_host_destroy(s->host);
    s->host = NULL;
    for (size_t i = 0; i < s->all_n; i++)
        py_served_drop(s->all[i]);
    free(s->all);
    s->all = NULL;
    s->all_n = 0;
}

static int server_host(server_object *s, uint32_t calls)
{
    ps_service **services = calloc(s->all_n + 1, sizeof(ps_service *));
    if (!services)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %zu shards",
                              s->all_n);
    for (size_t i = 0; i < s->all_n; i++) {
        services[i] = s->all[i]->service;
        persia_service_set_calls(services[i], calls);
    }
    int rc = persia_host_create(services, s->all_n, &s->host);
    free(services);
    return rc;
}

static PyObject *server_start(PyObject *self, PyObject *args,
                              PyObject *kwargs)
{
    server_object *s = server_open(self);
    rpc_server_config config = {.methods = &persia_shard_methods,
                                .handler = persia_host_handle,
                                .denied = persia_host_denied};
    PyObject *beside = Py_None;
    unsigned room = 0;
    if (!s || py_listen(args, kwargs, &config, &beside, &room))
        return NULL;
    if (s->rpc) {
        PyErr_SetString(PyExc_RuntimeError, "the server listens already");
        return NULL;
    }
    if (server_gather(s, beside, room > 0)) {
        server_scatter(s);
        return NULL;
    }
    /* Each shard has so many of its own. */
    int rc = server_host(s, config.calls_max);
    s->calls = config.calls_max;
    config.calls_max *= room > s->all_n ? room : (uint32_t)s->all_n;
    config.ctx = config.denied_ctx = s->host;
    config.s = persia_tables_sched(s->served->p);
    if (!rc)
        rc = persia_rpc_server_start(&config, &s->rpc);
    if (rc) {
        s->rpc = NULL;
        server_scatter(s);
        return py_raise(rc);
    }
    return PyLong_FromLong(persia_rpc_server_port(s->rpc));
}

static PyObject *server_health(PyObject *self, PyObject *arg)
{
    server_object *s = server_open(self);
    int serving = PyObject_IsTrue(arg);
    if (!s || serving < 0)
        return NULL;
    if (s->rpc)
        persia_rpc_server_health(s->rpc, serving);
    Py_RETURN_NONE;
}

static PyObject *server_connections(PyObject *self, PyObject *unused)
{
    server_object *s = server_open(self);
    rpc_counts n = {0};
    (void)unused;
    if (!s)
        return NULL;
    if (s->rpc)
        n = persia_rpc_server_counts(s->rpc);
    return Py_BuildValue("KK", (unsigned long long)n.open,
                         (unsigned long long)n.refused);
}

static PyObject *server_denied(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    return s ? py_rpc_denied(s->rpc ? persia_rpc_server_denied(s->rpc) : NULL)
             : NULL;
}

static PyObject *server_waits(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    return s ? py_rpc_waits(s->rpc) : NULL;
}

static PyObject *server_calls(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    return s ? py_rpc_times(s->rpc, &persia_shard_methods) : NULL;
}

static PyObject *server_snapshot(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    uint64_t seconds, ns;
    (void)unused;
    if (!s)
        return NULL;
    PyObject *is = PyBool_FromLong(persia_shard_snapshot(
        persia_service_shard(s->served->service), &seconds, &ns));
    return Py_BuildValue("KKN", (unsigned long long)seconds,
                         (unsigned long long)ns, is);
}

static void service_end(ps_service *s)
{
    persia_service_close(s);
    persia_service_end_snapshot(s);
}

/* It listens no more. */
static void server_end(server_object *s, rpc_server *rpc, uint64_t grace)
{
    persia_host_close(s->host);
    /* Calls that wait for other ranks would outlast any grace. */
    for (size_t i = 0; i < s->all_n; i++)
        persia_service_close(s->all[i]->service);
    persia_rpc_server_stop(rpc, grace);
    for (size_t i = 0; i < s->all_n; i++)
        persia_service_end_snapshot(s->all[i]->service);
    server_scatter(s);
}

static PyObject *server_stop(PyObject *self, PyObject *arg)
{
    server_object *s = server_open(self);
    uint64_t grace;
    if (!s || py_seconds_of(arg, &grace))
        return NULL;
    rpc_server *rpc = s->rpc;
    s->rpc = NULL;
    s->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    if (rpc)
        server_end(s, rpc, grace);
    else
        service_end(s->served->service);
    Py_END_ALLOW_THREADS
    s->busy = 0;
    Py_RETURN_NONE;
}

/* Ends what it has. */
static void server_free(server_object *s)
{
    py_served *served = s->served;
    rpc_server *rpc = s->rpc;
    if (!served)
        return;
    s->served = NULL;
    s->rpc = NULL;
    Py_BEGIN_ALLOW_THREADS
    if (rpc && persia_fork_check("a server") == PERSIA_OK)
        server_end(s, rpc, 0);
    py_served_drop(served);
    Py_END_ALLOW_THREADS
}

static PyObject *server_close(PyObject *self, PyObject *unused)
{
    server_object *s = (server_object *)self;
    (void)unused;
    if (s->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the server is being stopped");
        return NULL;
    }
    server_free(s);
    Py_RETURN_NONE;
}

static void server_dealloc(PyObject *self)
{
    server_object *s = (server_object *)self;
    server_free(s);
    py_free_object(self);
}

/* ---- its log ------------------------------------------------------------ */

/* The server, if it has a log; or NULL with an exception set. */
static py_served *server_log(PyObject *self)
{
    server_object *s = server_open(self);
    if (!s || s->served->log)
        return s ? s->served : NULL;
    py_raise(persia_err_set(PERSIA_EARG, "this server has no log"));
    return NULL;
}

static PyObject *server_replay(PyObject *self, PyObject *arg)
{
    py_served *s = server_log(self);
    const unsigned long long from = PyLong_AsUnsignedLongLong(arg);
    log_found found;
    int rc;
    if (!s || PyErr_Occurred())
        return NULL;
    atomic_fetch_add(&s->users, 1);
    Py_BEGIN_ALLOW_THREADS
    rc = persia_service_replay(s->service, from, &found);
    py_served_drop(s);
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc) : py_log_found(&found);
}

static PyObject *server_ready(PyObject *self, PyObject *unused)
{
    const py_served *s = server_log(self);
    (void)unused;
    if (!s)
        return NULL;
    persia_shard_ready(persia_service_shard(s->service));
    Py_RETURN_NONE;
}

static PyObject *server_log_counts(PyObject *self, PyObject *unused)
{
    py_served *s = server_log(self);
    (void)unused;
    if (!s)
        return NULL;
    atomic_fetch_add(&s->users, 1);
    PyObject *counts = py_log_counts(s->log);
    py_served_drop(s);
    return counts;
}

static PyObject *server_log_release(PyObject *self, PyObject *arg)
{
    py_served *s = server_log(self);
    const unsigned long long position = PyLong_AsUnsignedLongLong(arg);
    int rc;
    if (!s || PyErr_Occurred())
        return NULL;
    atomic_fetch_add(&s->users, 1);
    Py_BEGIN_ALLOW_THREADS
    rc = persia_log_release(s->log, position);
    py_served_drop(s);
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

/* A Channel to this server without a connection. */
static PyObject *server_checkpoints(PyObject *self, PyObject *arg)
{
    server_object *s = server_open(self);
    PyObject *path = s ? PyUnicode_AsUTF8String(arg) : NULL;
    const char *text = path ? PyBytes_AsString(path) : NULL;
    if (!text) {
        Py_XDECREF(path);
        return NULL;
    }
    py_served *served = s->served;
    int rc;
    atomic_fetch_add(&served->users, 1);
    Py_BEGIN_ALLOW_THREADS rc = persia_ckpt_root_set(served->root, text);
    py_served_drop(served);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyObject *server_channel(PyObject *self, PyObject *arg)
{
    server_object *s = server_open(self);
    uint64_t timeout;
    if (!s || py_seconds_of(arg, &timeout))
        return NULL;
    return py_channel_to(s->served, timeout);
}

/* ---- moves -------------------------------------------------------------- */

static PyObject *server_next(PyObject *self, PyObject *arg)
{
    server_object *s = server_open(self);
    return s ? py_host_next(s->host, arg) : NULL;
}

static PyObject *server_give(PyObject *self, PyObject *args)
{
    (void)self;
    return py_host_give(args);
}

/* The server, if it listens; or NULL with an exception set. */
static server_object *server_listening(PyObject *self)
{
    server_object *s = server_open(self);
    if (!s || s->host)
        return s;
    py_raise(persia_err_set(PERSIA_ECLOSED, "the server does not listen"));
    return NULL;
}

static PyObject *server_add(PyObject *self, PyObject *arg)
{
    server_object *s = server_listening(self);
    py_served *one = s ? served_of(arg) : NULL;
    if (!one)
        return NULL;
    py_served **all = realloc(s->all, (s->all_n + 1) * sizeof(py_served *));
    if (!all) {
        py_served_drop(one);
        return PyErr_NoMemory();
    }
    s->all = all;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    persia_service_set_calls(one->service, s->calls);
    persia_service_open(one->service);
    rc = persia_host_add(s->host, one->service);
    Py_END_ALLOW_THREADS
    if (rc) {
        py_served_drop(one);
        return py_raise(rc);
    }
    s->all[s->all_n++] = one;
    Py_RETURN_NONE;
}

static PyObject *server_remove(PyObject *self, PyObject *args)
{
    server_object *s = server_listening(self);
    PyObject *core;
    const char *address;
    unsigned long long move;
    if (!s || !PyArg_ParseTuple(args, "OzK", &core, &address, &move))
        return NULL;
    py_served *one = served_of(core);
    if (!one)
        return NULL;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_host_remove(
        s->host, persia_shard_no(persia_service_shard(one->service)), address,
        move);
    if (!rc)
        persia_service_close(one->service);
    Py_END_ALLOW_THREADS
    size_t i = 0;
    while (!rc && i < s->all_n && s->all[i] != one)
        i++;
    if (!rc && i < s->all_n) {
        s->all[i] = s->all[--s->all_n];
        py_served_drop(one);
    }
    py_served_drop(one);
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyObject *server_place(PyObject *self, PyObject *args)
{
    server_object *s = server_listening(self);
    unsigned shard;
    const char *address;
    unsigned long long move;
    int rc;
    if (!s || !PyArg_ParseTuple(args, "IsK", &shard, &address, &move))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_host_place(s->host, shard, address, move);
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyObject *server_hold(PyObject *self, PyObject *arg)
{
    const server_object *s = server_open(self);
    return s ? py_served_hold(s->served, arg) : NULL;
}

static PyObject *server_begun(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    return s ? PyLong_FromUnsignedLong(persia_shard_begun(
                   persia_service_shard(s->served->service)))
             : NULL;
}

static PyObject *server_steps(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    return s ? py_served_steps(s->served) : NULL;
}

static PyObject *server_set_steps(PyObject *self, PyObject *arg)
{
    const server_object *s = server_open(self);
    return s ? py_served_set_steps(s->served, arg) : NULL;
}

static PyObject *server_copy_begin(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    return s ? py_served_copy_begin(s->served) : NULL;
}

static PyObject *server_copy_next(PyObject *self, PyObject *arg)
{
    const server_object *s = server_open(self);
    return s ? py_served_copy_next(s->served, arg) : NULL;
}

static PyObject *server_copy_left(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    return s ? py_served_copy_left(s->served) : NULL;
}

static PyObject *server_copy_end(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    return s ? py_served_copy_end(s->served) : NULL;
}

static PyObject *server_arrive(PyObject *self, PyObject *arg)
{
    const server_object *s = server_open(self);
    return s ? py_served_arrive(s->served, arg) : NULL;
}

static PyObject *server_reborn(PyObject *self, PyObject *unused)
{
    const server_object *s = server_open(self);
    (void)unused;
    if (!s)
        return NULL;
    int rc = persia_shard_reborn(persia_service_shard(s->served->service));
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyObject *server_port(PyObject *self, void *unused)
{
    server_object *s = (server_object *)self;
    (void)unused;
    return PyLong_FromLong(s->rpc ? persia_rpc_server_port(s->rpc) : 0);
}

static PyMethodDef server_methods[] = {
    {"start", (PyCFunction)(void (*)(void))server_start,
     METH_VARARGS | METH_KEYWORDS,
     "start(address, threads, calls, connections, message_limit, security, "
     "beside=None, room=0) -> port; beside: a list of Servers with further "
     "shards; room: there may be so many, and this one itself is none"},
    {"connections", server_connections, METH_NOARGS,
     "connections()\n--\n\nHow many are open, and how many were closed for "
     "the limit."},
    {"denied", server_denied, METH_NOARGS,
     "denied()\n--\n\nCalls that were denied, by reason and role; empty "
     "where it does not listen."},
    {"waits", server_waits, METH_NOARGS,
     "waits()\n--\n\nSeconds of all calls: until a thread had them, and from "
     "then until they were answered."},
    {"calls", server_calls, METH_NOARGS,
     "calls()\n--\n\nBy method: calls by their time (CALL_BOUNDS), seconds, "
     "bytes of requests and of replies."},
    {"snapshot", server_snapshot, METH_NOARGS,
     "snapshot()\n--\n\nOf its rows for a checkpoint of the job, the last "
     "one: when they were written, in seconds since 1970 (0: never), and how "
     "long that took, in ns."},
    {"health", server_health, METH_O,
     "health(serving)\n--\n\nWhat the health service says."},
    {"stop", server_stop, METH_O,
     "stop(grace)\n--\n\nNo more requests; waits `grace` seconds for those "
     "that have begun."},
    {"checkpoints", server_checkpoints, METH_O,
     "checkpoints(path)\n--\n\nAnother folder of checkpoints."},
    {"replay", server_replay, METH_O,
     "replay(position)\n--\n\nApplies the records of the log from there on, "
     "then appends to it; what was found."},
    {"ready", server_ready, METH_NOARGS,
     "ready()\n--\n\nWhat has recovered answers clients from now on."},
    {"log_counts", server_log_counts, METH_NOARGS,
     "log_counts()\n--\n\nPositions and counts of the log."},
    {"log_release", server_log_release, METH_O,
     "log_release(position)\n--\n\nA cut of the rows there is on disk."},
    {"channel", server_channel, METH_O,
     "channel(timeout)\n--\n\nA Channel to it without a connection."},
    {"move_next", server_next, METH_O,
     "move_next(seconds)\n--\n\nThe next call of Move within so long: (call, "
     "its message), or None."},
    {"move_give", server_give, METH_VARARGS,
     "move_give(call, error, text, state, shard, id, rows, by, shards, "
     "here)\n--\n\nAnswers it; error: the name of a class, or ''."},
    {"add", server_add, METH_O,
     "add(server)\n--\n\nOne more shard behind the address of this one."},
    {"remove", server_remove, METH_VARARGS,
     "remove(server, address)\n--\n\nTakes a shard out; address: where it is "
     "now, or None."},
    {"place", server_place, METH_VARARGS,
     "place(shard, address)\n--\n\nSays so to whom asks for it here."},
    {"hold", server_hold, METH_O,
     "hold(how)\n--\n\n0: it changes as ever; 1: updates that have begun are "
     "ended; 2: nothing changes."},
    {"begun", server_begun, METH_NOARGS,
     "begun()\n--\n\nHow many updates of several batches have begun."},
    {"steps", server_steps, METH_NOARGS,
     "steps()\n--\n\nWhat travels with a shard beside its rows."},
    {"set_steps", server_set_steps, METH_O,
     "set_steps(numbers)\n--\n\nThe reverse."},
    {"copy_begin", server_copy_begin, METH_NOARGS,
     "copy_begin()\n--\n\nThe shard is about to move."},
    {"copy_next", server_copy_next, METH_O,
     "copy_next(last)\n--\n\nMakes the next part for Channel.move(): how many "
     "rows, or None at the end of the round."},
    {"copy_left", server_copy_left, METH_NOARGS,
     "copy_left()\n--\n\nRows that changed since they were in a part."},
    {"copy_end", server_copy_end, METH_NOARGS,
     "copy_end()\n--\n\nIt moves no more."},
    {"arrive", server_arrive, METH_O,
     "arrive(call)\n--\n\nTakes the part of a call; whether it was the last "
     "one."},
    {"reborn", server_reborn, METH_NOARGS,
     "reborn()\n--\n\nClients take it for one that was started again."},
    {"close", server_close, METH_NOARGS, "close()\n--\n\nFrees its tables."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef server_getset[] = {
    {"port", server_port, NULL, "0 while it does not listen.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot server_slots[] = {
    {Py_tp_new, (void *)server_new},
    {Py_tp_dealloc, (void *)server_dealloc},
    {Py_tp_methods, server_methods},
    {Py_tp_getset, server_getset},
    {Py_tp_doc, (void *)"One shard of a parameter server."},
    {0, NULL},
};

static PyType_Spec server_spec = {
    .name = "persia._core.Server",
    .basicsize = (int)sizeof(server_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = server_slots,
};

int py_add_server(PyObject *module)
{
    if (!py_add_type(module, &server_spec) ||
        PyModule_AddStringConstant(module, "GRPC", persia_rpc_version()) ||
        PyModule_AddStringConstant(module, "GRPC_HOLES", persia_rpc_holes()) ||
        PyModule_AddIntConstant(module, "MESSAGE_LIMIT",
                                (long)WIRE_MESSAGE_LIMIT))
        return -1;
    static const struct {
        const char *name;
        long value;
    } verbs[] = {
        {"SNAPSHOT_BEGIN", SNAPSHOT_BEGIN},
        {"SNAPSHOT_STATUS", SNAPSHOT_STATUS},
        {"SNAPSHOT_END", SNAPSHOT_END},
        {"RESTORE_PREPARE", RESTORE_PREPARE},
        {"RESTORE_COMMIT", RESTORE_COMMIT},
        {"RESTORE_ABORT", RESTORE_ABORT},
        {"MOVE_BEGIN", MOVE_BEGIN},
        {"MOVE_STATUS", MOVE_STATUS},
        {"MOVE_CANCEL", MOVE_CANCEL},
        {"MOVE_PLACE", MOVE_PLACE},
        {"MOVE_PREPARE", MOVE_PREPARE},
        {"MOVE_COMMIT", MOVE_COMMIT},
        {"MOVE_ABORT", MOVE_ABORT},
        {"MOVE_REVIVE", MOVE_REVIVE},
        {"MOVED_NONE", MOVED_NONE},
        {"MOVED_RUNNING", MOVED_RUNNING},
        {"MOVED_DONE", MOVED_DONE},
        {"MOVED_FAILED", MOVED_FAILED},
    };
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++)
        if (PyModule_AddIntConstant(module, verbs[i].name, verbs[i].value))
            return -1;
    return 0;
}
