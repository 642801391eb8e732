/* changes.c: what changed in the tables of a store, as Python data. */
#include "py/py.h"

#include "client/client.h"
#include "loop/loop.h"

static PyObject *changes_bytes(const void *data, size_t n)
{
    return PyBytes_FromStringAndSize(n ? data : "", (Py_ssize_t)n);
}

/* Within the call, without the GIL. */
static int changes_take(void *ctx, const wire_changes_reply *m)
{
    PyObject **out = ctx;
    const PyGILState_STATE gil = PyGILState_Ensure();
    Py_XDECREF(*out);
    *out = Py_BuildValue(
        "(NNNNOOO)", changes_bytes(m->ids, m->n * sizeof *m->ids),
        changes_bytes(m->vectors, m->n * m->dim * sizeof *m->vectors),
        changes_bytes(m->gone, m->gone_n * sizeof *m->gone),
        changes_bytes(m->erased, m->erased_n * sizeof *m->erased),
        m->reset ? Py_True : Py_False, m->end ? Py_True : Py_False,
        m->unknown ? Py_True : Py_False);
    if (!*out)
        PyErr_Clear();
    PyGILState_Release(gil);
    return *out ? PERSIA_OK
                : persia_err_set(PERSIA_ENOMEM, "no memory for changes");
}

static PyObject *changes_ask(PyObject *module, PyObject *args)
{
    wire_changes m = {0};
    unsigned shard;
    unsigned long long handle, reader, piece;
    PyObject *out = NULL;
    loop *s;
    ps_client *c;
    (void)module;
    if (!PyArg_ParseTuple(args, "KIIIKKI", &handle, &m.no, &shard, &m.verb,
                          &reader, &piece, &m.room))
        return NULL;
    m.reader = reader;
    m.piece = piece;
    int rc = persia_loop_get(handle, "changes", &s, &c);
    if (rc)
        return py_raise(rc);
    Py_BEGIN_ALLOW_THREADS
    rc = persia_loop_settle(s);
    if (!rc)
        rc = persia_client_changes(c, shard, &m, changes_take, &out);
    persia_loop_put(s);
    Py_END_ALLOW_THREADS
    if (!rc)
        return out;
    Py_XDECREF(out);
    return py_raise(rc);
}

static PyMethodDef methods[] = {
    {"changes", changes_ask, METH_VARARGS,
     "changes(handle, table, shard, verb, reader, piece, room)\n--\n\nWhat "
     "changed in a table of a shard since the reader asked last: ids, "
     "vectors, ids gone, ids erased, reset, end, unknown."},
    {NULL, NULL, 0, NULL},
};

int py_add_changes(PyObject *module)
{
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddIntConstant(module, "CHANGES_NEXT",
                                           CHANGES_NEXT) ||
                   PyModule_AddIntConstant(module, "CHANGES_BEGIN",
                                           CHANGES_BEGIN) ||
                   PyModule_AddIntConstant(module, "CHANGES_END", CHANGES_END)
               ? -1
               : 0;
}
