/* sender.c: persia._core.Sender, a data loader. */
#include <stdlib.h>
#include <string.h>

#include "py/roles.h"

/* ---- configuration of clients ---- */

int py_worker_client(PyObject *dict, worker_client_config *out)
{
    static char *words[] = {"addresses", "namespace",     "rank",
                            "world",     "timeout",       "dtype",
                            "security",  "move_after",    "stream",
                            "job",       "message_limit", NULL};
    PyObject *addresses, *security, *none = PyTuple_New(0);
    const char *name_space;
    double timeout, move;
    unsigned long long stream, job, limit = WIRE_MESSAGE_LIMIT;
    if (!none)
        return -1;
    int ok = PyArg_ParseTupleAndKeywords(
        none, dict, "OsIIdIOdKK|K", words, &addresses, &name_space, &out->rank,
        &out->world, &timeout, &out->dtype, &security, &move, &stream, &job,
        &limit);
    Py_DECREF(none);
    if (!ok || py_security(security, &out->security) ||
        py_name(name_space, out->name_space, sizeof out->name_space) ||
        py_seconds(timeout, &out->timeout_ns) ||
        py_seconds(move, &out->move_ns))
        return -1;
    out->stream = stream;
    out->message_limit = limit;
    out->job = job;
    out->addresses = py_texts(addresses, &out->addresses_n);
    return out->addresses ? 0 : -1;
}

/* ---- Sender ---- */

typedef struct sender_object {
    PyObject_HEAD
    loader_sender *sender; /* NULL: closed */
    unsigned busy;       /* calls that run; guarded by the GIL */
} sender_object;

static void sender_dealloc(PyObject *self)
{
    sender_object *s = (sender_object *)self;
    if (!persia_fork_check("a sender"))
        persia_sender_close(s->sender, 0);
    py_free_object(self);
}

static PyObject *sender_new(PyTypeObject *type, PyObject *args,
                            PyObject *kwargs)
{
    static char *words[] = {"config", NULL};
    worker_client_config config = {0};
    PyObject *dict;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", words, &dict) ||
        py_worker_client(dict, &config))
        return NULL;
    sender_object *self = py_new_object(type);
    int rc = 0;
    if (self) {
        Py_BEGIN_ALLOW_THREADS
        rc = persia_sender_open(&config, &self->sender);
        Py_END_ALLOW_THREADS
    }
    free((void *)(uintptr_t)config.addresses);
    if (rc) {
        py_raise(rc);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* What a message points to. */
typedef struct holding {
    Py_buffer *views;
    size_t n;
    uint64_t *shapes; /* [tensors * WIRE_SHAPE_MAX] */
    wire_submit m;
} holding;

static void holding_free(holding *h)
{
    for (size_t i = 0; i < h->n; i++)
        PyBuffer_Release(&h->views[i]);
    free(h->views);
    free(h->shapes);
    free(h->m.features);
    free(h->m.tensors);
}

/* NULL: an exception is set. */
static const Py_buffer *sender_hold(holding *h, PyObject *from)
{
    if (PyObject_GetBuffer(from, &h->views[h->n], PyBUF_SIMPLE))
        return NULL;
    return &h->views[h->n++];
}

static int sender_hold_names(holding *h, PyObject *names)
{
    const Py_ssize_t n = PyList_Size(names);
    h->m.features = n < 0 ? NULL : calloc((size_t)n + 1,
                                          sizeof *h->m.features);
    for (Py_ssize_t i = 0; h->m.features && i < n; i++) {
        const char *name =
            PyUnicode_AsUTF8AndSize(PyList_GetItem(names, i), NULL);
        wire_batch_feature *f = &h->m.features[h->m.features_n++];
        if (!name || py_name(name, f->name, sizeof f->name))
            return -1;
    }
    if (!h->m.features && !PyErr_Occurred())
        PyErr_NoMemory();
    return h->m.features ? 0 : -1;
}

static int sender_hold_tensor(holding *h, size_t i, PyObject *from)
{
    wire_tensor *w = &h->m.tensors[i];
    const char *name, *type;
    PyObject *shape, *data;
    if (!PyArg_ParseTuple(from, "ssOO", &name, &type, &shape, &data) ||
        py_name(name, w->name, sizeof w->name) ||
        py_name(type, w->type, sizeof w->type))
        return -1;
    const Py_ssize_t n = PyTuple_Size(shape);
    if (n < 0 || n > WIRE_SHAPE_MAX) {
        PyErr_Format(PyExc_ValueError, "tensor %s: %zd dimensions, at most %d",
                     name, n, WIRE_SHAPE_MAX);
        return -1;
    }
    w->shape = h->shapes + i * WIRE_SHAPE_MAX;
    w->shape_n = (size_t)n;
    for (Py_ssize_t k = 0; k < n; k++)
        w->shape[k] =
            PyLong_AsUnsignedLongLong(PyTuple_GetItem(shape, k));
    const Py_buffer *view = PyErr_Occurred() ? NULL : sender_hold(h, data);
    if (!view)
        return -1;
    w->data = view->buf;
    w->n = (size_t)view->len;
    return 0;
}

static int sender_hold_batch(holding *h, PyObject *names, PyObject *ids,
                             PyObject *offsets, PyObject *weights,
                             PyObject *tensors)
{
    const Py_ssize_t n = PyList_Size(tensors);
    const Py_buffer *view;
    if (n < 0 || sender_hold_names(h, names))
        return -1;
    h->views = calloc((size_t)n + 3, sizeof *h->views);
    h->shapes = calloc((size_t)n * WIRE_SHAPE_MAX + 1, sizeof *h->shapes);
    h->m.tensors = calloc((size_t)n + 1, sizeof *h->m.tensors);
    h->m.tensors_n = (size_t)n;
    if (!h->views || !h->shapes || !h->m.tensors) {
        PyErr_NoMemory();
        return -1;
    }
    if (!(view = sender_hold(h, ids)))
        return -1;
    h->m.ids = (wire_batch_ids){(size_t)view->len / 8, view->buf};
    if (offsets != Py_None) {
        if (!(view = sender_hold(h, offsets)))
            return -1;
        h->m.offsets = (wire_batch_offsets){(size_t)view->len / 8, view->buf};
    }
    if (weights != Py_None) {
        if (!(view = sender_hold(h, weights)))
            return -1;
        h->m.weights = (wire_batch_weights){(size_t)view->len / 4, view->buf};
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (sender_hold_tensor(h, (size_t)i, PyList_GetItem(tensors, i)))
            return -1;
    return 0;
}

static PyObject *sender_send_held(sender_object *s, holding *h, int bad)
{
    int rc = 0;
    if (!bad) {
        s->busy++;
        Py_BEGIN_ALLOW_THREADS
        rc = persia_sender_send(s->sender, &h->m);
        Py_END_ALLOW_THREADS
        s->busy--;
    }
    /* The error's text is of this thread: nothing may set another one. */
    PyObject *result = bad ? NULL : rc ? py_raise(rc) : Py_NewRef(Py_None);
    holding_free(h);
    return result;
}

static PyObject *sender_send(PyObject *self, PyObject *args)
{
    sender_object *s = (sender_object *)self;
    PyObject *names, *ids, *offsets, *weights, *tensors;
    holding h = {0};
    if (!s->sender)
        return py_closed("the sender");
    if (!PyArg_ParseTuple(args, "IOOOOO", &h.m.samples, &names, &ids, &offsets,
                          &weights, &tensors))
        return NULL;
    return sender_send_held(
        s, &h, sender_hold_batch(&h, names, ids, offsets, weights, tensors));
}

/* One that may wait. */
static PyObject *sender_call(PyObject *self,
                             int (*call)(loader_sender *, uint64_t),
                             uint64_t value)
{
    sender_object *s = (sender_object *)self;
    int rc;
    if (!s->sender)
        return py_closed("the sender");
    s->busy++;
    Py_BEGIN_ALLOW_THREADS
    rc = call(s->sender, value);
    Py_END_ALLOW_THREADS
    s->busy--;
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static int py_sender_end_epoch(loader_sender *s, uint64_t unused)
{
    (void)unused;
    return persia_sender_end(s);
}

static PyObject *sender_end(PyObject *self, PyObject *unused)
{
    (void)unused;
    return sender_call(self, py_sender_end_epoch, 0);
}

static PyObject *sender_flush(PyObject *self, PyObject *arg)
{
    uint64_t timeout;
    if (py_seconds_of(arg, &timeout))
        return NULL;
    return sender_call(self, persia_sender_flush, timeout);
}

static PyObject *sender_skip(PyObject *self, PyObject *arg)
{
    const uint64_t number = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    return sender_call(self, persia_sender_skip, number);
}

static PyObject *sender_claim(PyObject *self, PyObject *arg)
{
    sender_object *s = (sender_object *)self;
    uint32_t status;
    const uint64_t epochs = PyLong_AsUnsignedLongLong(arg);
    int rc;
    if (PyErr_Occurred())
        return NULL;
    if (!s->sender)
        return py_closed("the sender");
    s->busy++;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_sender_claim(s->sender, epochs, &status);
    Py_END_ALLOW_THREADS
    s->busy--;
    return rc ? py_raise(rc) : PyLong_FromUnsignedLong(status);
}

static PyObject *sender_counts_of(PyObject *self, PyObject *unused)
{
    static const spec_field fields[] = {
        PY_COUNT(sender_counts, stream), PY_COUNT(sender_counts, position),
        PY_COUNT(sender_counts, sent), PY_COUNT(sender_counts, done),
        PY_COUNT(sender_counts, passed), PY_COUNT(sender_counts, moved),
        PY_COUNT(sender_counts, failed), PY_COUNT(sender_counts, lost),
        PY_COUNT(sender_counts, away), PY_COUNT(sender_counts, sending_ns),
        PY_COUNT(sender_counts, lineage),
    };
    sender_object *s = (sender_object *)self;
    sender_counts c;
    (void)unused;
    if (!s->sender)
        return py_closed("the sender");
    s->busy++;
    Py_BEGIN_ALLOW_THREADS
    persia_sender_get_counts(s->sender, &c);
    Py_END_ALLOW_THREADS
    s->busy--;
    return py_of_counts(fields, sizeof fields / sizeof fields[0], &c);
}

static PyObject *sender_close(PyObject *self, PyObject *arg)
{
    sender_object *s = (sender_object *)self;
    const int leaves = PyObject_IsTrue(arg);
    if (leaves < 0)
        return NULL;
    if (s->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a batch is being sent");
        return NULL;
    }
    loader_sender *sender = s->sender;
    s->sender = NULL;
    Py_BEGIN_ALLOW_THREADS
    persia_sender_close(sender, leaves);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* It waits for nothing, so it is not counted as busy. */
static PyObject *sender_set_workers(PyObject *self, PyObject *dict)
{
    const sender_object *s = (sender_object *)self;
    worker_client_config config = {0};
    if (!s->sender)
        return py_closed("the sender");
    if (py_worker_client(dict, &config))
        return NULL;
    int rc = persia_sender_list(s->sender, &config);
    free((void *)(uintptr_t)config.addresses);
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyMethodDef sender_methods[] = {
    {"set_workers", sender_set_workers, METH_O,
     "set_workers(config)\n--\n\nThe workers are those of the configuration "
     "now."},
    {"send", sender_send, METH_VARARGS,
     "send(samples, names, ids, offsets, weights, tensors)\n--\n\nOne batch; "
     "tensors: [(name, type, shape, data)].  Waits for room."},
    {"end", sender_end, METH_NOARGS, "end()\n--\n\nEnds an epoch."},
    {"flush", sender_flush, METH_O,
     "flush(timeout)\n--\n\nWaits until all batches are done; 0: no "
     "limit."},
    {"claim", sender_claim, METH_O,
     "claim(epochs)\n--\n\nWhether the stream is this sender's (0), another "
     "one's (2), or has ended (3)."},
    {"skip", sender_skip, METH_O,
     "skip(number)\n--\n\nThere are no batches up to this number."},
    {"counts", sender_counts_of, METH_NOARGS,
     "counts()\n--\n\nThe stream's number; batches, see sender_counts."},
    {"close", sender_close, METH_O,
     "close(leaves)\n--\n\nEnds it; there are no more epochs, or workers "
     "wait for another like it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot sender_slots[] = {
    {Py_tp_new, (void *)sender_new},
    {Py_tp_dealloc, (void *)sender_dealloc},
    {Py_tp_methods, sender_methods},
    {Py_tp_doc, (void *)"Sender(config)\n--\n\nSends batches to workers."},
    {0, NULL},
};

static PyType_Spec sender_spec = {
    .name = "persia._core.Sender",
    .basicsize = (int)sizeof(sender_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = sender_slots,
};

int py_add_sender(PyObject *module)
{
    return py_add_type(module, &sender_spec) ? 0 : -1;
}
