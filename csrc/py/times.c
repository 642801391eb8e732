/* times.c: how long the calls of a server took, and which peers a process is
 * connected with, as Python data. */
#include "py/py.h"

#include <stdlib.h>
#include <string.h>

#include "rpc/rpc.h"

static unsigned long long times_read(const _Atomic(uint64_t) *from)
{
    return atomic_load_explicit(from, memory_order_relaxed);
}

static PyObject *times_of_method(const struct rpc_method_times *m)
{
    PyObject *counts = PyTuple_New(RPC_BOUNDS + 1);
    for (Py_ssize_t i = 0; counts && i <= RPC_BOUNDS; i++) {
        PyObject *n = PyLong_FromUnsignedLongLong(times_read(&m->calls[i]));
        if (!n || PyTuple_SetItem(counts, i, n))
            Py_CLEAR(counts);
    }
    return counts ? Py_BuildValue("(NdKK)", counts,
                                  (double)times_read(&m->ns) / 1e9,
                                  times_read(&m->in), times_read(&m->out))
                  : NULL;
}

PyObject *py_rpc_times(const struct rpc_server *rpc,
                       const struct rpc_methods *methods)
{
    const rpc_times *t = rpc ? persia_rpc_server_times(rpc) : NULL;
    PyObject *out = PyDict_New();
    for (uint32_t i = 0; out && t && i < t->n; i++) {
        if (!methods->paths[i])
            continue;
        PyObject *one = times_of_method(&t->methods[i]);
        if (!one || PyDict_SetItemString(
                        out, strrchr(methods->paths[i], '/') + 1, one))
            Py_CLEAR(out);
        Py_XDECREF(one);
    }
    return out;
}

PyObject *py_rpc_waits(const struct rpc_server *rpc)
{
    const rpc_times *t = rpc ? persia_rpc_server_times(rpc) : NULL;
    return Py_BuildValue("(dd)", t ? (double)times_read(&t->waited) / 1e9 : 0.,
                         t ? (double)times_read(&t->worked) / 1e9 : 0.);
}

static PyObject *times_py_peers(PyObject *module, PyObject *unused)
{
    rpc_connection *peers;
    size_t n;
    (void)module;
    (void)unused;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_rpc_peers(&peers, &n);
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(rc);
    PyObject *out = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; out && i < n; i++) {
        PyObject *one =
            Py_BuildValue("(ssO)", peers[i].service, peers[i].address,
                          peers[i].connected ? Py_True : Py_False);
        if (!one || PyList_SetItem(out, (Py_ssize_t)i, one))
            Py_CLEAR(out);
    }
    free(peers);
    return out;
}

static PyMethodDef times_functions[] = {
    {"peers", times_py_peers, METH_NOARGS,
     "peers()\n--\n\nOf each channel that stays open its service, its address "
     "and whether it is connected."},
    {NULL, NULL, 0, NULL},
};

int py_add_times(PyObject *module)
{
    if (PyModule_AddFunctions(module, times_functions))
        return -1;
    PyObject *bounds = PyTuple_New(RPC_BOUNDS);
    for (Py_ssize_t i = 0; bounds && i < RPC_BOUNDS; i++) {
        PyObject *s =
            PyFloat_FromDouble((double)persia_rpc_bounds_ns[i] / 1e9);
        if (!s || PyTuple_SetItem(bounds, i, s))
            Py_CLEAR(bounds);
    }
    int rc =
        bounds ? PyModule_AddObjectRef(module, "CALL_BOUNDS", bounds) : -1;
    Py_XDECREF(bounds);
    return rc;
}
