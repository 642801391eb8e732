/* array.h: arguments that are memory of Python's. */
#ifndef PERSIA_PY_ARRAY_H
#define PERSIA_PY_ARRAY_H

#include "py/py.h"

/* An argument that exposes memory; None leaves p NULL. */
typedef struct array {
    Py_buffer view;
    int held;
} array;

static inline void array_drop(array *a)
{
    if (a->held)
        PyBuffer_Release(&a->view);
    a->held = 0;
}

/* Takes the memory of o, which must be of at least `bytes` bytes. */
static inline int array_take(PyObject *o, const char *name, int writable,
                      size_t bytes, array *out)
{
    out->held = 0;
    if (PyObject_GetBuffer(o, &out->view,
                           writable ? PyBUF_WRITABLE : PyBUF_SIMPLE))
        return -1;
    out->held = 1;
    if ((size_t)out->view.len >= bytes)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, need %zu", name,
                 out->view.len, bytes);
    array_drop(out);
    return -1;
}

#endif
