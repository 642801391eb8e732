/* far.c: the files of checkpoints on storage that Python reaches.  A job's
 * thread, which has no lock, takes the GIL for each file. */
#include "py/far.h"

/* The exception that is set, as an error of the core. */
static int far_failed(void)
{
    PyObject *type, *value, *trace, *name = NULL, *text = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (type)
        name = PyObject_GetAttrString(type, "__name__");
    if (value)
        text = PyObject_Str(value);
    PyObject *called = name ? PyUnicode_AsUTF8String(name) : NULL;
    PyObject *said = text ? PyUnicode_AsUTF8String(text) : NULL;
    int code = called ? persia_err_code(PyBytes_AsString(called))
                      : PERSIA_EINTERNAL;
    if (code == PERSIA_EINTERNAL)
        code = PERSIA_EIO; /* no name of ours */
    (void)persia_err_set(code, "%s",
                         said ? PyBytes_AsString(said) : "no text");
    PyErr_Clear();
    Py_XDECREF(said);
    Py_XDECREF(called);
    Py_XDECREF(text);
    Py_XDECREF(name);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return code;
}

/* The end of a call, with the GIL; what it returned, or NULL. */
static int far_returned(PyObject *answer, PyGILState_STATE gil)
{
    const int rc = answer ? PERSIA_OK : far_failed();
    Py_XDECREF(answer);
    PyGILState_Release(gil);
    return rc;
}

static int far_descriptor(PyObject *job, int *fd)
{
    PyObject *number = PyObject_GetAttrString(job, "descriptor");
    *fd = number ? (int)PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int far_open(void *ctx, const char *root, const char *folder,
                    const char *proof, int writes, int *fd, void **job)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *made = PyObject_CallFunction(ctx, "sssi", root, folder, proof,
                                           writes);
    int rc = PERSIA_OK;
    *fd = -1;
    if (!made || far_descriptor(made, fd)) {
        rc = far_failed();
        Py_CLEAR(made);
    }
    *job = made;
    PyGILState_Release(gil);
    return rc;
}

static int far_put(void *job, const char *name)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    return far_returned(PyObject_CallMethod(job, "put", "s", name), gil);
}

static int far_get(void *job, const ckpt_file *files, size_t n)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *names = PyList_New(0), *answer = NULL;
    int failed = !names;
    for (size_t i = 0; i < n && !failed; i++) {
        PyObject *name = PyUnicode_FromString(files[i].name);
        failed = !name || PyList_Append(names, name);
        Py_XDECREF(name);
    }
    if (!failed)
        answer = PyObject_CallMethod(job, "get", "O", names);
    Py_XDECREF(names);
    return far_returned(answer, gil);
}

static void far_close(void *job)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *answer = PyObject_CallMethod(job, "close", NULL);
    Py_DECREF((PyObject *)job);
    (void)far_returned(answer, gil);
}

static void far_release(void *ctx)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)ctx);
    PyGILState_Release(gil);
}

ckpt_far py_far(PyObject *open)
{
    return (ckpt_far){far_open,  far_put,     far_get,
                      far_close, far_release, Py_NewRef(open)};
}
