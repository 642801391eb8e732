/* channel.c: persia._core.Channel, the way to one server for
 * administration. */
#include <stdlib.h>

#include "client/client.h"
#include "py/peer.h"
#include "py/served.h"

typedef struct channel_object {
    PyObject_HEAD
    shard_ref *shard;     /* NULL: freed */
    unsigned busy;        /* calls that run; guarded by the GIL */
    int closed;           /* the last call frees */
    uint64_t timeout_ns;
    py_served *served;    /* what a local channel leads to, or NULL */
} channel_object;

static int channel_call(void *ctx, uint32_t method, const void *arguments,
                        shard_reply *reply)
{
    const channel_object *c = ctx;
    return persia_shard_wait(c->shard, method, arguments,
                             persia_deadline(c->timeout_ns), reply);
}

/* Begins a call; -1 with an exception set. */
static int channel_begin(PyObject *self, py_peer *p)
{
    channel_object *c = (channel_object *)self;
    if (c->closed) {
        py_closed("the channel");
        return -1;
    }
    *p = (py_peer){.call = channel_call, .ctx = c};
    c->busy++;
    return 0;
}

/* Frees what a closed channel has, once no call uses it. */
static void channel_free(channel_object *c)
{
    shard_ref *shard = c->shard;
    py_served *served = c->served;
    if (!c->closed || c->busy)
        return;
    c->shard = NULL;
    c->served = NULL;
    Py_BEGIN_ALLOW_THREADS
    if (shard)
        shard->ops->close(shard);
    if (served)
        py_served_drop(served);
    Py_END_ALLOW_THREADS
}

static PyObject *channel_end(PyObject *self, PyObject *result)
{
    channel_object *c = (channel_object *)self;
    c->busy--;
    channel_free(c);
    return result;
}

static PyObject *channel_ask(PyObject *self, PyObject *args,
                             PyObject *(*ask)(const py_peer *, PyObject *))
{
    py_peer p;
    return channel_begin(self, &p) ? NULL : channel_end(self, ask(&p, args));
}

static PyObject *channel_hello(PyObject *self, PyObject *args)
{
    return channel_ask(self, args, py_peer_hello);
}

static PyObject *channel_declare(PyObject *self, PyObject *args,
                                 PyObject *kwargs)
{
    py_peer p;
    return channel_begin(self, &p)
               ? NULL
               : channel_end(self, py_peer_declare(&p, args, kwargs));
}

static PyObject *channel_slow(PyObject *self, PyObject *unused)
{
    return channel_ask(self, unused, py_peer_slow);
}

static PyObject *channel_stats(PyObject *self, PyObject *unused)
{
    return channel_ask(self, unused, py_peer_stats);
}

static PyObject *channel_snapshot(PyObject *self, PyObject *args)
{
    return channel_ask(self, args, py_peer_snapshot);
}

static PyObject *channel_restore(PyObject *self, PyObject *args)
{
    return channel_ask(self, args, py_peer_restore);
}

static PyObject *channel_move(PyObject *self, PyObject *args)
{
    return channel_ask(self, args, py_peer_move);
}

static PyObject *channel_address(PyObject *self, void *unused)
{
    channel_object *c = (channel_object *)self;
    (void)unused;
    return PyUnicode_FromString(
        c->closed ? "closed" : persia_shard_address(c->shard));
}

static PyObject *channel_close(PyObject *self, PyObject *unused)
{
    channel_object *c = (channel_object *)self;
    (void)unused;
    c->closed = 1;
    channel_free(c);
    Py_RETURN_NONE;
}

static void channel_dealloc(PyObject *self)
{
    channel_object *c = (channel_object *)self;
    c->closed = 1;
    channel_free(c);
    py_free_object(self);
}

static PyObject *channel_new(PyTypeObject *type, PyObject *args,
                             PyObject *kwargs)
{
    static char *words[] = {"address", "security", "timeout", "shard", NULL};
    rpc_channel_config config = {.methods = &persia_shard_methods,
                                 .message_limit = WIRE_MESSAGE_LIMIT};
    int shard = -1;
    double timeout;
    uint64_t timeout_ns;
    PyObject *security;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOd|i", words,
                                     &config.address, &security, &timeout,
                                     &shard) ||
        py_security(security, &config.security) ||
        py_seconds(timeout, &timeout_ns))
        return NULL;
    channel_object *self = py_new_object(type);
    if (!self)
        return NULL;
    self->timeout_ns = timeout_ns;
    int rc = persia_shard_connect(&config, NULL, &self->shard);
    if (!rc && shard >= 0)
        rc = persia_shard_name(self->shard, (uint32_t)shard);
    if (rc) {
        self->shard = NULL;
        self->closed = 1;
        py_raise(rc);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef channel_methods[] = {
    {"hello", channel_hello, METH_VARARGS,
     "hello(namespace, stream)\n--\n\nWho the server is."},
    {"declare", (PyCFunction)(void (*)(void))channel_declare,
     METH_VARARGS | METH_KEYWORDS,
     "declare(**config) -> (number, created); words as Store.declare"},
    {"stats", channel_stats, METH_NOARGS, "stats()\n--\n\nIts counters."},
    {"slow", channel_slow, METH_NOARGS,
     "slow()\n--\n\nIts last calls that took long."},
    {"snapshot", channel_snapshot, METH_VARARGS,
     "snapshot(verb, root, folder, proof)\n--\n\nSee wire.h."},
    {"restore", channel_restore, METH_VARARGS,
     "restore(verb, root, folder, proof, lineage, restore, updates, step, t, "
     "pushes, "
     "ledgers, files)\n--\n\nSee wire.h."},
    {"move", channel_move, METH_VARARGS,
     "move(verb, namespace, shard, shards, id, address, by, boot, lineage, "
     "durable, part, server)\n--\n\nSee persia.proto; from boot on for a "
     "PREPARE alone, with the part that the Server has made."},
    {"close", channel_close, METH_NOARGS, "close()\n--\n\nEnds it."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef channel_getset[] = {
    {"address", channel_address, NULL, "Of the server.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot channel_slots[] = {
    {Py_tp_new, (void *)channel_new},
    {Py_tp_dealloc, (void *)channel_dealloc},
    {Py_tp_methods, channel_methods},
    {Py_tp_getset, channel_getset},
    {Py_tp_doc, (void *)"Channel(address, security, timeout, shard=-1)\n"
                        "--\n\nThe way to one server, or to one of its "
                        "several shards; seconds."},
    {0, NULL},
};

static PyType_Spec channel_spec = {
    .name = "persia._core.Channel",
    .basicsize = (int)sizeof(channel_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = channel_slots,
};

PyObject *py_channel_to(py_served *served, uint64_t timeout_ns)
{
    PyObject *core = PyImport_ImportModule("persia._core");
    PyObject *type = core ? PyObject_GetAttrString(core, "Channel") : NULL;
    Py_XDECREF(core);
    if (!type)
        return NULL;
    channel_object *c = py_new_object((PyTypeObject *)type);
    Py_DECREF(type);
    if (!c)
        return NULL;
    c->timeout_ns = timeout_ns;
    int rc = persia_shard_direct(persia_service_shard(served->service),
                                 &c->shard);
    if (rc) {
        c->shard = NULL;
        c->closed = 1;
        py_raise(rc);
        Py_DECREF(c);
        return NULL;
    }
    c->served = served;
    atomic_fetch_add(&served->users, 1);
    return (PyObject *)c;
}

int py_add_channel(PyObject *module)
{
    return py_add_type(module, &channel_spec) ? 0 : -1;
}
