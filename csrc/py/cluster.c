/* cluster.c: clients of servers, and, as
 * functions of a store's handle, steps of all ranks and what the client
 * counts. */
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "ids/ids.h"
#include "loop/loop.h"
#include "py/peer.h"
#include "server/server.h"

/* ---- opening ---- */

static void cluster_drop_own(void *served)
{
    py_served_drop(served);
}

static int read_config(PyObject *dict, client_config *c, PyObject **own,
                       PyObject **addresses)
{
    static char *words[] = {
        "addresses", "own",         "own_at",  "namespace",     "rank",
        "world",     "stream",      "timeout", "dtype",
        "lost",      "security",    "message_limit", NULL};
    const char *name_space;
    double timeout;
    unsigned lost, own_at;
    unsigned long long stream, limit = WIRE_MESSAGE_LIMIT;
    PyObject *security, *none = PyTuple_New(0);
    if (!none)
        return -1;
    int ok = PyArg_ParseTupleAndKeywords(
        none, dict, "OOIsIIKdIIO|K", words, addresses, own, &own_at,
        &name_space, &c->rank, &c->world, &stream, &timeout, &c->dtype,
        &lost, &security, &limit);
    Py_DECREF(none);
    if (!ok || py_security(security, &c->security) ||
        py_name(name_space, c->name_space, sizeof c->name_space) ||
        py_seconds(timeout, &c->timeout_ns))
        return -1;
    c->own_at = own_at;
    c->stream = stream;
    c->message_limit = limit;
    c->lost = lost ? LOST_CONTINUE : LOST_RAISE;
    return 0;
}

int py_client_config(PyObject *dict, client_config *out, PyObject **own)
{
    PyObject *addresses;
    if (read_config(dict, out, own, &addresses))
        return -1;
    out->addresses = py_texts(addresses, &out->addresses_n);
    return out->addresses ? 0 : -1;
}

int py_open_client(unsigned threads, PyObject *dict, ps_client **out)
{
    client_config c = {.threads = threads};
    PyObject *own;
    if (py_client_config(dict, &c, &own))
        return -1;
    py_served *served = NULL;
    ps_service *service;
    if (own != Py_None) {
        served = py_server_served(own, &service);
        if (!served) {
            free((void *)(uintptr_t)c.addresses);
            return -1;
        }
        c.own = persia_service_shard(service);
        c.owner = served;
        c.release = cluster_drop_own;
    }
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = persia_client_create(&c, out);
    Py_END_ALLOW_THREADS
    free((void *)(uintptr_t)c.addresses);
    if (!rc)
        return 0;
    if (served)
        py_served_drop(served);
    py_raise(rc);
    return -1;
}

/* ---- functions of a handle ---- */

/* Runs `call` with a reference `s` to the store, whose client is `c`, without
 * the GIL. */
#define WITH_STORE(handle, call)                                              \
    loop *s;                                                                  \
    ps_client *c;                                                             \
    int rc = persia_loop_get((handle), "store", &s, &c);                      \
    (void)c;                                                                  \
    if (rc)                                                                   \
        return py_raise(rc);                                                  \
    Py_BEGIN_ALLOW_THREADS call;                                              \
    persia_loop_put(s);                                                       \
    Py_END_ALLOW_THREADS if (rc) return py_raise(rc)

static PyObject *py_join(PyObject *module, PyObject *arg)
{
    (void)module;
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    uint64_t applied = 0;
    if (PyErr_Occurred())
        return NULL;
    WITH_STORE(handle, rc = persia_loop_join(s, &applied));
    return PyLong_FromUnsignedLongLong(applied);
}

static PyObject *py_sync(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, last;
    unsigned rank, world;
    if (!PyArg_ParseTuple(args, "KKII", &handle, &last, &rank, &world))
        return NULL;
    WITH_STORE(handle, rc = persia_loop_sync(s, last, rank, world));
    Py_RETURN_NONE;
}

static PyObject *py_sync_stream(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, stream;
    int by_batch;
    if (!PyArg_ParseTuple(args, "KKp", &handle, &stream, &by_batch))
        return NULL;
    WITH_STORE(handle, rc = persia_loop_pass_sync(s, stream, by_batch));
    Py_RETURN_NONE;
}

static PyObject *py_leave(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle;
    int settle;
    if (!PyArg_ParseTuple(args, "Kp", &handle, &settle))
        return NULL;
    loop *s;
    /* A store that was closed is not in any step. */
    if (persia_loop_get(handle, "store", &s, NULL) != PERSIA_OK)
        Py_RETURN_NONE;
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = persia_loop_leave(s, settle);
    persia_loop_put(s);
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(rc);
    Py_RETURN_NONE;
}

static PyObject *py_take_plain(PyObject *module, PyObject *arg)
{
    (void)module;
    loop *s;
    uint64_t handle = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    int rc = persia_loop_get(handle, "store", &s, NULL);
    if (rc)
        return py_raise(rc);
    int plain = persia_loop_take_plain(s);
    Py_BEGIN_ALLOW_THREADS persia_loop_put(s);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(plain);
}

static PyObject *py_held(PyObject *module, PyObject *arg)
{
    (void)module;
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    uint64_t ns;
    if (PyErr_Occurred())
        return NULL;
    WITH_STORE(handle, ns = persia_client_held(c));
    return PyFloat_FromDouble((double)ns * 1e-9);
}

static PyObject *py_counts(PyObject *module, PyObject *arg)
{
    static const spec_field fields[] = {
        PY_COUNT(client_counts, pulls), PY_COUNT(client_counts, pushes),
        PY_COUNT(client_counts, ids), PY_COUNT(client_counts, distinct),
        PY_COUNT(client_counts, bytes_out), PY_COUNT(client_counts, bytes_in),
        PY_COUNT(client_counts, retries), PY_COUNT(client_counts, duplicates),
        PY_COUNT(client_counts, reconnects), PY_COUNT(client_counts, lost),
        PY_COUNT(client_counts, stale),
    };
    (void)module;
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    client_counts n;
    if (PyErr_Occurred())
        return NULL;
    WITH_STORE(handle, persia_client_get_counts(c, &n));
    return py_of_counts(fields, sizeof fields / sizeof fields[0], &n);
}

static PyObject *py_inherit(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, stream;
    unsigned rank;
    double seconds;
    uint64_t timeout;
    int known;
    if (!PyArg_ParseTuple(args, "KKId", &handle, &stream, &rank, &seconds) ||
        py_seconds(seconds, &timeout))
        return NULL;
    WITH_STORE(handle, rc = persia_client_inherit(c, stream, rank, timeout,
                                                  &known));
    return PyBool_FromLong(known);
}

static PyObject *py_tell_lost(PyObject *module, PyObject *arg)
{
    (void)module;
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    WITH_STORE(handle, rc = persia_client_tell_lost(c));
    Py_RETURN_NONE;
}

static PyObject *py_shard(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle;
    long long id;
    uint32_t shard;
    if (!PyArg_ParseTuple(args, "KL", &handle, &id))
        return NULL;
    WITH_STORE(handle, shard = hash_shard(id_hash((uint64_t)id),
                                          persia_client_shards(c)));
    return PyLong_FromUnsignedLong(shard);
}

/* One shard of a store, as peer.h asks it. */
typedef struct shard_of {
    loop *s;
    ps_client *c;
    uint32_t shard;
} shard_of;

static int ask_shard(void *ctx, uint32_t method, const void *arguments,
                     shard_reply *reply)
{
    const shard_of *of = ctx;
    return persia_client_call(of->c, of->shard, method, arguments, reply);
}

static PyObject *py_shard_stats(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle;
    shard_of of;
    if (!PyArg_ParseTuple(args, "KI", &handle, &of.shard))
        return NULL;
    int rc = persia_loop_get(handle, "Store.stats", &of.s, &of.c);
    if (rc)
        return py_raise(rc);
    const ps_client *c = of.c;
    PyObject *out = NULL;
    if (!persia_client_is_embedded(c) && of.shard < persia_client_shards(c)) {
        py_peer peer = {.call = ask_shard,
                        .ctx = &of,
                        .caller = persia_client_caller(c, of.shard)};
        out = py_peer_stats(&peer, NULL);
    } else {
        PyErr_Format(PyExc_IndexError, "there is no shard %u", of.shard);
    }
    persia_loop_put(of.s);
    return out;
}

static PyObject *py_repair(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle;
    unsigned shard;
    if (!PyArg_ParseTuple(args, "KI", &handle, &shard))
        return NULL;
    WITH_STORE(handle, rc = persia_client_repair(c, shard));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"cluster_join", py_join, METH_O,
     "cluster_join(handle)\n--\n\n"
     "Joins the steps of all ranks; the last step that was applied."},
    {"cluster_sync", py_sync, METH_VARARGS,
     "cluster_sync(handle, last, rank, world)\n--\n\n"
     "Updates are parts of the steps after `last`."},
    {"cluster_sync_stream", py_sync_stream, METH_VARARGS,
     "cluster_sync_stream(handle, stream, by_batch)\n--\n\n"
     "A data loader's stream takes part in them."},
    {"cluster_take_plain", py_take_plain, METH_O,
     "cluster_take_plain(handle)\n--\n\n"
     "Whether forwards with gradient were made outside of all passes since "
     "the last such call."},
    {"cluster_leave", py_leave, METH_VARARGS,
     "cluster_leave(handle, settle)\n--\n\nLeaves the steps of all ranks."},
    {"cluster_counts", py_counts, METH_O,
     "cluster_counts(handle)\n--\n\nWhat the client of a store counted."},
    {"cluster_held", py_held, METH_O,
     "cluster_held(handle)\n--\n\nFor how many seconds calls have been "
     "waiting for servers; 0.0: for less than one."},
    {"cluster_stats", py_shard_stats, METH_VARARGS,
     "cluster_stats(handle, shard)\n--\n\nAs Channel.stats()."},
    {"cluster_repair", py_repair, METH_VARARGS,
     "cluster_repair(handle, shard)\n--\n\n"
     "Says Hello to a server that was started again."},
    {"cluster_inherit", py_inherit, METH_VARARGS,
     "cluster_inherit(handle, stream, rank, timeout)\n--\n\nCompletes what "
     "a rank that the job has no longer left at some servers only; whether "
     "servers have updates of it.  0 s: the store's timeout."},
    {"cluster_tell_lost", py_tell_lost, METH_O,
     "cluster_tell_lost(handle)\n--\n\nRaises UpdatesLost if updates were "
     "lost and it was not raised for them yet."},
    {"cluster_shard", py_shard, METH_VARARGS,
     "cluster_shard(handle, id)\n--\n\nThe shard of an id."},
    {NULL, NULL, 0, NULL},
};

int py_add_cluster(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
