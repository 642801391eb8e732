/* ckpt.c: what persia/checkpoint needs of the C core: tables as data,
 * checksums, requests to a store's shards. */
#include "py/py.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/ckpt.h"
#include "client/client.h"
#include "loop/loop.h"
#include "py/array.h"
#include "py/peer.h"

/* ---- tables as data ----------------------------------------------------- */

static PyObject *py_ckpt_describe(const table_config *c)
{
    uint32_t floats = persia_optim_state_floats(c->optimizer, c->dim,
                                                (int)c->momentum);
    PyObject *out = py_of_spec(&persia_table_spec_list, &c->spec, 1);
    PyObject *state = out ? PyLong_FromUnsignedLong(floats) : NULL;
    if (!state || PyDict_SetItemString(out, "state_floats", state))
        Py_CLEAR(out);
    Py_XDECREF(state);
    return out;
}

static PyObject *ckpt_describe(PyObject *module, PyObject *args,
                               PyObject *kwargs)
{
    table_config c;
    (void)module;
    if (py_table_config(args, kwargs, &c))
        return NULL;
    /* A server may have sent anything. */
    if (persia_spec_out_of_range(&persia_table_spec_list, &c.spec))
        return py_raise(
            persia_err_set(PERSIA_EPROTOCOL,
                           "table %s: an option is out of its range", c.name));
    return py_ckpt_describe(&c);
}

static PyObject *ckpt_tables(PyObject *module, PyObject *args)
{
    unsigned long long handle;
    loop *owner;
    ps_client *c;
    (void)module;
    if (!PyArg_ParseTuple(args, "K", &handle))
        return NULL;
    int code = persia_loop_get(handle, "checkpoint", &owner, &c);
    if (code)
        return py_raise(code);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < persia_client_tables(c); i++) {
        table_config config = *persia_client_table(c, i);
        if (persia_client_dropped(c, i))
            snprintf(config.name, sizeof config.name, "%s%u", WIRE_DROPPED, i);
        PyObject *one = py_ckpt_describe(&config);
        if (!one || PyList_Append(list, one))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    persia_loop_put(owner);
    return list;
}

/* ---- shards ------------------------------------------------------------- */

/* One shard of a store, while it is asked. */
typedef struct asked {
    loop *owner;
    ps_client *client;
    uint32_t shard;
    py_peer peer;
    PyObject *rest; /* of the arguments */
} asked;

static int ckpt_ask(void *ctx, uint32_t method, const void *arguments,
                    shard_reply *reply)
{
    const asked *a = ctx;
    return persia_client_call(a->client, a->shard, method, arguments, reply);
}

static void asked_end(asked *a)
{
    Py_XDECREF(a->rest);
    persia_loop_put(a->owner);
}

/* (handle, shard, ...); -1 with an exception set. */
static int asked_begin(asked *a, PyObject *args)
{
    unsigned long long handle;
    PyObject *head = PyTuple_GetSlice(args, 0, 2);
    int ok = head && PyArg_ParseTuple(head, "KI", &handle, &a->shard);
    Py_XDECREF(head);
    if (!ok)
        return -1;
    int code = persia_loop_get(handle, "checkpoint", &a->owner, &a->client);
    if (code) {
        py_raise(code);
        return -1;
    }
    a->peer = (py_peer){.call = ckpt_ask,
                        .ctx = a,
                        .caller = persia_client_caller(a->client, a->shard)};
    a->rest = PyTuple_GetSlice(args, 2, PyTuple_Size(args));
    if (a->rest && a->shard < persia_client_shards(a->client))
        return 0;
    if (a->rest)
        PyErr_Format(PyExc_IndexError, "there is no shard %u", a->shard);
    asked_end(a);
    return -1;
}

static PyObject *ckpt_hello(PyObject *module, PyObject *args)
{
    asked a;
    (void)module;
    if (asked_begin(&a, args))
        return NULL;
    PyObject *out = py_peer_hello(&a.peer, a.rest);
    asked_end(&a);
    return out;
}

static PyObject *ckpt_snapshot(PyObject *module, PyObject *args)
{
    asked a;
    (void)module;
    if (asked_begin(&a, args))
        return NULL;
    PyObject *out = py_peer_snapshot(&a.peer, a.rest);
    asked_end(&a);
    return out;
}

static PyObject *ckpt_restore_(PyObject *module, PyObject *args)
{
    asked a;
    (void)module;
    if (asked_begin(&a, args))
        return NULL;
    PyObject *out = py_peer_restore(&a.peer, a.rest);
    asked_end(&a);
    return out;
}

static PyObject *ckpt_shards(PyObject *module, PyObject *arg)
{
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    loop *owner;
    ps_client *c;
    (void)module;
    if (PyErr_Occurred())
        return NULL;
    int code = persia_loop_get(handle, "checkpoint", &owner, &c);
    if (code)
        return py_raise(code);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < persia_client_shards(c); i++) {
        PyObject *address = PyUnicode_FromString(persia_client_address(c, i));
        if (!address || PyList_Append(list, address))
            Py_CLEAR(list);
        Py_XDECREF(address);
    }
    persia_loop_put(owner);
    return list;
}

static PyObject *ckpt_greet(PyObject *module, PyObject *args)
{
    unsigned long long handle;
    int restored;
    loop *owner;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kp", &handle, &restored))
        return NULL;
    int code = persia_loop_get(handle, "load", &owner, NULL);
    if (code)
        return py_raise(code);
    Py_BEGIN_ALLOW_THREADS code =
        persia_loop_greet(owner, restored);
    persia_loop_put(owner);
    Py_END_ALLOW_THREADS
    return code ? py_raise(code) : Py_NewRef(Py_None);
}

static PyObject *ckpt_loading(PyObject *module, PyObject *args)
{
    unsigned long long handle;
    int loading;
    loop *owner;
    ps_client *c;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kp", &handle, &loading))
        return NULL;
    int code = persia_loop_get(handle, "load", &owner, &c);
    if (code)
        return py_raise(code);
    persia_client_set_loading(c, loading);
    persia_loop_put(owner);
    Py_RETURN_NONE;
}

static PyObject *ckpt_go_on(PyObject *module, PyObject *args)
{
    unsigned long long handle, stream, number, lost;
    loop *owner;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKK", &handle, &stream, &number, &lost))
        return NULL;
    int code = persia_loop_get(handle, "load", &owner, NULL);
    if (code)
        return py_raise(code);
    Py_BEGIN_ALLOW_THREADS code =
        persia_loop_go_on(owner, stream, number, lost);
    persia_loop_put(owner);
    Py_END_ALLOW_THREADS
    return code ? py_raise(code) : Py_NewRef(Py_None);
}

static PyObject *ckpt_place(PyObject *module, PyObject *arg)
{
    loop *owner;
    uint64_t last;
    (void)module;
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    int code = persia_loop_get(handle, "save", &owner, NULL);
    if (code)
        return py_raise(code);
    Py_BEGIN_ALLOW_THREADS code = persia_loop_places(owner, &last);
    persia_loop_put(owner);
    Py_END_ALLOW_THREADS
    return code ? PyLong_FromUnsignedLongLong(last) : Py_NewRef(Py_None);
}

/* ---- plain files -------------------------------------------------------- */

static PyObject *ckpt_crc(PyObject *module, PyObject *args)
{
    PyObject *object;
    array data;
    unsigned crc = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "O|I", &object, &crc) ||
        array_take(object, "data", 0, 0, &data))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = persia_crc32c(crc, data.view.buf, (size_t)data.view.len);
    Py_END_ALLOW_THREADS
    array_drop(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *ckpt_file_crc_(PyObject *module, PyObject *args)
{
    int folder, code;
    const char *name;
    uint32_t crc;
    uint64_t bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "is", &folder, &name))
        return NULL;
    Py_BEGIN_ALLOW_THREADS code = persia_ckpt_file_crc(folder, name, &crc,
                                                       &bytes);
    Py_END_ALLOW_THREADS
    return code ? py_raise(code)
                : Py_BuildValue("(KI)", (unsigned long long)bytes, crc);
}

static PyMethodDef methods[] = {
    {"ckpt_tables", ckpt_tables, METH_VARARGS,
     "ckpt_tables(handle)\n--\n\nName and options of each table of a store, "
     "in the order of declaration."},
    {"ckpt_describe", (PyCFunction)(void (*)(void))ckpt_describe,
     METH_VARARGS | METH_KEYWORDS,
     "ckpt_describe(**config)\n--\n\nThe words of Store.declare() as those of "
     "ckpt_tables()."},
    {"ckpt_shards", ckpt_shards, METH_O,
     "ckpt_shards(handle)\n--\n\nThe addresses of a store's shards, for "
     "texts."},
    {"ckpt_hello", ckpt_hello, METH_VARARGS,
     "ckpt_hello(handle, shard, namespace, stream)\n--\n\nAs "
     "Channel.hello()."},
    {"ckpt_snapshot", ckpt_snapshot, METH_VARARGS,
     "ckpt_snapshot(handle, shard, verb, root, folder, proof)\n--\n\nAs "
     "Channel.snapshot()."},
    {"ckpt_restore", ckpt_restore_, METH_VARARGS,
     "ckpt_restore(handle, shard, verb, root, folder, proof, lineage, "
     "restore, updates, step, t, pushes, ledgers, files)\n--\n\n"
     "As Channel.restore()."},
    {"ckpt_greet", ckpt_greet, METH_VARARGS,
     "ckpt_greet(handle, restored)\n--\n\nLearns what the shards have, now "
     "or because rows were restored."},
    {"ckpt_loading", ckpt_loading, METH_VARARGS,
     "ckpt_loading(handle, loading)\n--\n\nWhether the store loads rows: "
     "then they are not another client's."},
    {"ckpt_go_on", ckpt_go_on, METH_VARARGS,
     "ckpt_go_on(handle, stream, number, lost)\n--\n\nLearns what the shards "
     "have; the store's updates continue after this one of the stream, and "
     "so many are lost."},
    {"ckpt_place", ckpt_place, METH_O,
     "ckpt_place(handle)\n--\n\nThe place of the last batch; None if the "
     "numbers of updates are no places."},
    {"ckpt_crc", ckpt_crc, METH_VARARGS,
     "ckpt_crc(data, crc=0)\n--\n\nThe CRC-32C of bytes, after others that "
     "have `crc`."},
    {"ckpt_file_crc", ckpt_file_crc_, METH_VARARGS,
     "ckpt_file_crc(folder, name)\n--\n\nBytes and CRC-32C of a file."},
    {NULL, NULL, 0, NULL},
};

int py_add_ckpt(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
