/* traces.c: spans of sampled batches, for their exporter. */
#include "py/py.h"

#include <stdlib.h>

#include "trace/trace.h"

enum { AT_ONCE = 4096 }; /* spans of a call */

static PyObject *traces_start(PyObject *module, PyObject *args)
{
    double rate;
    Py_ssize_t room;
    (void)module;
    if (!PyArg_ParseTuple(args, "dn", &rate, &room))
        return NULL;
    if (room < 0)
        return PyErr_Format(PyExc_ValueError, "no room for spans");
    const int rc = persia_trace_start(rate, (size_t)room);
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyObject *traces_of(const trace_span *t)
{
    return Py_BuildValue(
        "(sKKKKsKKKKIIKK)", persia_trace_name(t->kind),
        (unsigned long long)t->at.high, (unsigned long long)t->at.low,
        (unsigned long long)t->at.span, (unsigned long long)t->parent,
        t->code ? persia_err_name(t->code) : NULL,
        (unsigned long long)t->began, (unsigned long long)t->ended,
        (unsigned long long)t->stream, (unsigned long long)t->number,
        t->attempt, t->shard, (unsigned long long)t->rows,
        (unsigned long long)t->bytes);
}

static PyObject *traces_take(PyObject *module, PyObject *unused)
{
    uint64_t dropped;
    (void)module;
    (void)unused;
    trace_span *spans = malloc(AT_ONCE * sizeof *spans);
    if (!spans)
        return PyErr_NoMemory();
    const size_t n = persia_trace_take(spans, AT_ONCE, &dropped);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *one = traces_of(&spans[i]);
        if (!one || PyList_SetItem(list, (Py_ssize_t)i, one))
            Py_CLEAR(list);
    }
    free(spans);
    return list ? Py_BuildValue("(NK)", list, (unsigned long long)dropped)
                : NULL;
}

static PyMethodDef methods[] = {
    {"trace_start", traces_start, METH_VARARGS,
     "trace_start(rate, room)\n--\n\nFrom now on this share of batches is "
     "traced, and up to `room` spans are kept; 0: none any more."},
    {"trace_take", traces_take, METH_NOARGS,
     "trace_take()\n--\n\nSpans that were kept, the oldest first, and how "
     "many there was no room for since the start."},
    {NULL, NULL, 0, NULL},
};

int py_add_traces(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
