/* changes.c: what changed in the tables of a store, as Python data. */
#include "py/py.h"

#include "client/client.h"
#include "loop/loop.h"
#include "rows_file/rows_file.h"

typedef struct changes_taken {
    uint32_t type;   /* of the rows, enum rows_type */
    PyObject *reply; /* NULL: there is none yet */
} changes_taken;

static PyObject *changes_bytes(const void *data, size_t n)
{
    return PyBytes_FromStringAndSize(n ? data : NULL, (Py_ssize_t)n);
}

static PyObject *changes_reply(PyObject *rows, const wire_changes_reply *m)
{
    return Py_BuildValue(
        "(ONNOOOK)", rows, changes_bytes(m->gone, m->gone_n * sizeof *m->gone),
        changes_bytes(m->erased, m->erased_n * sizeof *m->erased),
        m->reset ? Py_True : Py_False, m->end ? Py_True : Py_False,
        m->unknown ? Py_True : Py_False, (unsigned long long)m->changed);
}

/* Within the call, without the GIL. */
static int changes_take(void *ctx, const wire_changes_reply *m)
{
    changes_taken *out = ctx;
    const rows_config c = {.type = out->type, .dim = m->dim};
    if (m->n && !persia_rows_stride(&c))
        return persia_err_set(PERSIA_EARG, "no rows have type %u", c.type);
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *rows = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(m->n * persia_rows_stride(&c)));
    char *to = rows ? PyBytes_AsString(rows) : NULL;
    PyGILState_Release(gil);
    int rc = to ? persia_rows_narrow(&c, m->n, m->ids, m->vectors, to)
                : persia_err_set(PERSIA_ENOMEM, "no memory for changes");
    gil = PyGILState_Ensure();
    Py_CLEAR(out->reply);
    out->reply = rc ? NULL : changes_reply(rows, m);
    Py_XDECREF(rows);
    PyErr_Clear();
    PyGILState_Release(gil);
    return rc || out->reply
               ? rc
               : persia_err_set(PERSIA_ENOMEM, "no memory for changes");
}

static PyObject *changes_ask(PyObject *module, PyObject *args)
{
    wire_changes m = {0};
    changes_taken out = {0};
    unsigned shard;
    unsigned long long handle, reader, piece;
    loop *s;
    ps_client *c;
    (void)module;
    if (!PyArg_ParseTuple(args, "KIIIKKII", &handle, &m.no, &shard, &m.verb,
                          &reader, &piece, &m.room, &out.type))
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
        return out.reply;
    Py_XDECREF(out.reply);
    return py_raise(rc);
}

static PyMethodDef methods[] = {
    {"changes", changes_ask, METH_VARARGS,
     "changes(handle, table, shard, verb, reader, piece, room, type)\n--\n\n"
     "What changed in a table of a shard since the reader asked last: rows "
     "of a type as a file has them, ids gone, ids erased, reset, end, "
     "unknown, and how many changed."},
    {NULL, NULL, 0, NULL},
};

int py_add_changes(PyObject *module)
{
    return PyModule_AddFunctions(module, methods) ||
                   PyModule_AddIntConstant(module, "CHANGES_NEXT",
                                           CHANGES_NEXT) ||
                   PyModule_AddIntConstant(module, "CHANGES_BEGIN",
                                           CHANGES_BEGIN) ||
                   PyModule_AddIntConstant(module, "CHANGES_END",
                                           CHANGES_END) ||
                   PyModule_AddIntConstant(module, "CHANGES_COUNT",
                                           CHANGES_COUNT)
               ? -1
               : 0;
}
