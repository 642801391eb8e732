/* prefetch.c: the look-ahead of persia.DataLoader, as functions of a store's
 * handle.  All but the counting ones leave the GIL: they may wait, or free
 * tensors. */
#include "loop/loop.h"
#include "py/py.h"

/* Runs `call` with a reference `s` to the store, without the GIL. */
#define WITH_STORE(handle, call)                                              \
    loop *s;                                                                  \
    int rc = persia_loop_get((handle), "data loader", &s, NULL);              \
    if (rc)                                                                   \
        return py_raise(rc);                                                  \
    Py_BEGIN_ALLOW_THREADS call;                                              \
    persia_loop_put(s);                                                       \
    Py_END_ALLOW_THREADS if (rc) return py_raise(rc)

static PyObject *py_open(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle;
    long long staleness;
    int here;
    if (!PyArg_ParseTuple(args, "KLp", &handle, &staleness, &here))
        return NULL;
    uint64_t stream = 0;
    uint64_t bound = staleness < 0 ? LOOP_ASYNC : (uint64_t)staleness;
    WITH_STORE(handle, rc = persia_loop_pass_open(s, bound, here, &stream));
    return PyLong_FromUnsignedLongLong(stream);
}

static PyObject *py_close(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, stream;
    if (!PyArg_ParseTuple(args, "KK", &handle, &stream))
        return NULL;
    loop *s;
    /* A store that was closed has closed its streams; a forked child has
     * none. */
    if (persia_loop_get(handle, "data loader", &s, NULL) == PERSIA_OK) {
        Py_BEGIN_ALLOW_THREADS persia_loop_pass_close(s, stream);
        persia_loop_put(s);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *py_number(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromUnsignedLongLong(persia_loop_batch_number());
}

static PyObject *py_batch(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, stream, number;
    if (!PyArg_ParseTuple(args, "KKK", &handle, &stream, &number))
        return NULL;
    WITH_STORE(handle, rc = persia_loop_batch_add(s, stream, number));
    Py_RETURN_NONE;
}

static PyObject *py_ready(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, number;
    if (!PyArg_ParseTuple(args, "KK", &handle, &number))
        return NULL;
    WITH_STORE(handle, persia_loop_batch_ready(s, number));
    Py_RETURN_NONE;
}

static PyObject *py_next(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, number;
    int reading;
    if (!PyArg_ParseTuple(args, "KKp", &handle, &number, &reading))
        return NULL;
    WITH_STORE(handle, rc = persia_loop_batch_next(s, number, reading));
    Py_RETURN_NONE;
}

static PyObject *py_skip(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, number;
    if (!PyArg_ParseTuple(args, "KK", &handle, &number))
        return NULL;
    WITH_STORE(handle, persia_loop_batch_skip(s, number));
    Py_RETURN_NONE;
}

/* {k: batches} of the buckets that are not empty. */
static PyObject *prefetch_histogram(const uint64_t *count)
{
    PyObject *out = PyDict_New();
    for (long k = 0; out && k < LOOP_STALENESS_BUCKETS; k++) {
        if (!count[k])
            continue;
        PyObject *key = PyLong_FromLong(k);
        PyObject *value = PyLong_FromUnsignedLongLong(count[k]);
        if (!key || !value || PyDict_SetItem(out, key, value))
            Py_CLEAR(out);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return out;
}

static PyObject *py_stats(PyObject *module, PyObject *arg)
{
    static const spec_field fields[] = {
        PY_COUNT(loop_prefetch_stats, batches),
        PY_COUNT(loop_prefetch_stats, prefetched),
        PY_COUNT(loop_prefetch_stats, not_prefetched),
        PY_COUNT(loop_prefetch_stats, waited),
        PY_COUNT(loop_prefetch_stats, waited_ns),
        PY_COUNT(loop_prefetch_stats, abandoned),
        PY_COUNT(loop_prefetch_stats, skipped),
        PY_COUNT(loop_prefetch_stats, read),
        PY_COUNT(loop_prefetch_stats, dropped),
    };
    (void)module;
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    loop_prefetch_stats t;
    WITH_STORE(handle, persia_loop_get_prefetch_stats(s, &t));
    PyObject *out =
        py_of_counts(fields, sizeof fields / sizeof fields[0], &t);
    if (out &&
        py_dict_add(out, "staleness", prefetch_histogram(t.staleness)))
        Py_CLEAR(out);
    return out;
}

static PyObject *py_flush(PyObject *module, PyObject *arg)
{
    (void)module;
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    WITH_STORE(handle, rc = persia_loop_flush(s, 0));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"prefetch_open", py_open, METH_VARARGS,
     "prefetch_open(handle, staleness, here)\n--\n\n"
     "A new stream; a staleness below 0 is none.  here: lookups and updates\n"
     "are done by the threads that want them."},
    {"prefetch_close", py_close, METH_VARARGS,
     "prefetch_close(handle, stream)\n--\n\nEnds a stream."},
    {"prefetch_number", py_number, METH_NOARGS,
     "prefetch_number()\n--\n\nA number for a new batch."},
    {"prefetch_batch", py_batch, METH_VARARGS,
     "prefetch_batch(handle, stream, number)\n--\n\nAdds a batch."},
    {"prefetch_ready", py_ready, METH_VARARGS,
     "prefetch_ready(handle, number)\n--\n\nAll its lookups are added."},
    {"prefetch_next", py_next, METH_VARARGS,
     "prefetch_next(handle, number, reading)\n--\n\n"
     "Returns when the batch may be handed out."},
    {"prefetch_skip", py_skip, METH_VARARGS,
     "prefetch_skip(handle, number)\n--\n\nGives up a batch."},
    {"prefetch_flush", py_flush, METH_O,
     "prefetch_flush(handle)\n--\n\n"
     "Waits until all updates of a store are applied."},
    {"prefetch_stats", py_stats, METH_O,
     "prefetch_stats(handle)\n--\n\nCounters of all streams of a store."},
    {NULL, NULL, 0, NULL},
};

int py_add_prefetch(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
