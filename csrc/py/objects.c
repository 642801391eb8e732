/* objects.c: what all types of persia._core do to be made, read and freed. */
#include <stdlib.h>
#include <string.h>

#include "py/py.h"

void *py_new_object(PyTypeObject *type)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

void py_free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

PyObject *py_closed(const char *what)
{
    return py_raise(persia_err_set(PERSIA_ECLOSED, "%s was closed", what));
}

int py_seconds(double seconds, uint64_t *out)
{
    if (!(seconds >= 0 && seconds < 1e9)) {
        PyErr_SetString(PyExc_ValueError, "seconds: need 0 to 1e9");
        return -1;
    }
    *out = (uint64_t)(seconds * 1e9);
    return 0;
}

int py_seconds_of(PyObject *seconds, uint64_t *out)
{
    const double value = PyFloat_AsDouble(seconds);
    return PyErr_Occurred() ? -1 : py_seconds(value, out);
}

int py_name(const char *text, char *to, size_t room)
{
    const size_t n = strlen(text);
    if (n >= room) {
        py_raise(persia_err_set(PERSIA_EARG,
                                "the name '%.300s' has %zu bytes, it may have "
                                "%zu",
                                text, n, room - 1));
        return -1;
    }
    memcpy(to, text, n + 1);
    return 0;
}

const char **py_texts(PyObject *list, size_t *n)
{
    Py_ssize_t size = PyList_Size(list);
    const char **out = size < 0 ? NULL : calloc((size_t)size + 1, sizeof *out);
    if (!out) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        out[i] = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, i), NULL);
        if (!out[i]) {
            free(out);
            return NULL;
        }
    }
    *n = (size_t)size;
    return out;
}
