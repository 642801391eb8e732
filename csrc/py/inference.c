/* inference.c: the queue of the room `infer` for Python, and its server. */
#include "base/lines.h"
#include "py/requests.h"

typedef struct queue_object {
    PyObject_HEAD
    infer_queue *queue;
    rpc_server *rpc; /* NULL: it does not listen */
    process_lines lines;
    PyObject *request; /* the type InferRequest */
} queue_object;

static PyObject *queue_new(PyTypeObject *type, PyObject *args,
                           PyObject *kwargs)
{
    unsigned long long room;
    double seconds;
    uint64_t timeout;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "Kd", &room, &seconds) ||
        py_seconds(seconds, &timeout))
        return NULL;
    queue_object *q = py_new_object(type);
    if (q)
        persia_lines_init(&q->lines, &(lines_to){0});
    PyObject *core = q ? PyImport_ImportModule("persia._core") : NULL;
    if (core)
        q->request = PyObject_GetAttrString(core, "InferRequest");
    Py_XDECREF(core);
    const int code =
        q && q->request ? persia_infer_queue_create(room, timeout, &q->queue)
                        : 0;
    if (code)
        py_raise(code);
    if (q && !q->queue)
        Py_CLEAR(q);
    return (PyObject *)q;
}

/* Refuses what waits; nothing more arrives. */
static void queue_refuse(queue_object *q)
{
    infer_item *item;
    persia_infer_close(q->queue);
    while ((item = persia_infer_take(q->queue, 1)) ||
           (item = persia_infer_take_other(q->queue))) {
        while (item) {
            infer_item *next = item->next;
            if (item->owner) {
                Py_DECREF((PyObject *)item->owner);
            } else {
                item->call->fail(item->call, PERSIA_ECLOSED, "");
                persia_infer_item_free(item);
            }
            item = next;
        }
    }
}

static void queue_dealloc(PyObject *self)
{
    queue_object *q = (queue_object *)self;
    if (q->queue)
        queue_refuse(q);
    Py_BEGIN_ALLOW_THREADS
    persia_rpc_server_stop(q->rpc, 0);
    Py_END_ALLOW_THREADS
    persia_infer_queue_free(q->queue);
    persia_lines_free(&q->lines);
    Py_CLEAR(q->request);
    py_free_object(self);
}

static PyObject *queue_listen(PyObject *self, PyObject *args,
                              PyObject *kwargs)
{
    static char *words[] = {"address",     "threads",       "calls",
                            "connections", "message_limit", "shared",
                            "security",    "lines",         "lines_json",
                            "audit",       NULL};
    queue_object *q = (queue_object *)self;
    lines_to to = {.role = "serving"};
    rpc_server_config config = {.methods = &persia_infer_methods,
                                .handler = persia_infer_handle,
                                .denied = py_denied,
                                .denied_ctx = &q->lines,
                                .prompt = 1,
                                .ctx = q->queue};
    unsigned long long message;
    PyObject *security;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sIIIKpO|ipi", words,
                                     &config.address, &config.threads,
                                     &config.calls_max,
                                     &config.connections_max, &message,
                                     &config.shared, &security, &to.fd,
                                     &to.json, &to.audit) ||
        py_security(security, &config.security))
        return NULL;
    if (q->rpc) {
        PyErr_SetString(PyExc_RuntimeError, "it listens already");
        return NULL;
    }
    config.message_limit = message;
    q->lines.to = to;
    const int code = persia_rpc_server_start(&config, &q->rpc);
    if (code) {
        q->rpc = NULL;
        return py_raise(code);
    }
    return PyLong_FromLong(persia_rpc_server_port(q->rpc));
}

static PyObject *queue_denied(PyObject *self, PyObject *unused)
{
    const queue_object *q = (queue_object *)self;
    (void)unused;
    return py_rpc_denied(q->rpc ? persia_rpc_server_denied(q->rpc) : NULL);
}

static PyObject *queue_health(PyObject *self, PyObject *arg)
{
    const queue_object *q = (queue_object *)self;
    const int serving = PyObject_IsTrue(arg);
    if (serving < 0)
        return NULL;
    if (q->rpc)
        persia_rpc_server_health(q->rpc, serving);
    Py_RETURN_NONE;
}

static PyObject *queue_put(PyObject *self, PyObject *args)
{
    queue_object *q = (queue_object *)self;
    PyObject *object;
    double seconds;
    uint64_t timeout;
    if (!PyArg_ParseTuple(args, "O!d", q->request, &object, &seconds) ||
        py_seconds(seconds, &timeout))
        return NULL;
    infer_item *item = py_request_item(object);
    if (!item)
        return NULL;
    item->began = persia_clock_ns();
    item->until = item->began + timeout;
    item->owner = Py_NewRef(object);
    const int code = persia_infer_put(q->queue, item);
    if (!code)
        Py_RETURN_NONE;
    item->owner = NULL;
    Py_DECREF(object);
    return py_raise(code);
}

static PyObject *queue_take(PyObject *self, PyObject *arg)
{
    queue_object *q = (queue_object *)self;
    const unsigned long long samples = PyLong_AsUnsignedLongLong(arg);
    infer_item *item;
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    item = persia_infer_take(q->queue, samples);
    Py_END_ALLOW_THREADS
    PyObject *list = PyList_New(0);
    while (item) { /* also without a list: those are refused */
        infer_item *next = item->next;
        PyObject *one = py_request_of((PyTypeObject *)q->request, item);
        if (list && (!one || PyList_Append(list, one)))
            Py_CLEAR(list);
        Py_XDECREF(one);
        item = next;
    }
    return list;
}

static PyObject *queue_take_other(PyObject *self, PyObject *unused)
{
    queue_object *q = (queue_object *)self;
    infer_item *item;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    item = persia_infer_take_other(q->queue);
    Py_END_ALLOW_THREADS
    if (!item)
        Py_RETURN_NONE;
    return py_request_of((PyTypeObject *)q->request, item);
}

static PyObject *queue_stop(PyObject *self, PyObject *arg)
{
    queue_object *q = (queue_object *)self;
    uint64_t grace;
    if (py_seconds(PyFloat_AsDouble(arg), &grace) || PyErr_Occurred())
        return NULL;
    rpc_server *rpc = q->rpc;
    q->rpc = NULL;
    Py_BEGIN_ALLOW_THREADS
    persia_rpc_server_stop(rpc, grace);
    (void)persia_lines_count(&q->lines, UINT64_MAX);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *queue_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    persia_infer_close(((queue_object *)self)->queue);
    Py_RETURN_NONE;
}

static PyObject *queue_waiting(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(
        persia_infer_waiting(((queue_object *)self)->queue));
}

static PyMethodDef queue_methods[] = {
    {"listen", (PyCFunction)(void (*)(void))queue_listen,
     METH_VARARGS | METH_KEYWORDS,
     "listen(address, threads, calls, connections, message_limit, shared, "
     "security, lines, lines_json, audit)\n--\n\nTakes calls of "
     "inference.GRPCInferenceService; its port."},
    {"health", queue_health, METH_O,
     "health(serving)\n--\n\nWhat grpc.health.v1.Health says."},
    {"denied", queue_denied, METH_NOARGS,
     "denied()\n--\n\nSee Server.denied()."},
    {"put", queue_put, METH_VARARGS,
     "put(request, timeout)\n--\n\nPuts an InferRequest behind the others."},
    {"take", queue_take, METH_O,
     "take(samples)\n--\n\nWaits for requests, and takes so many samples of "
     "them; []: it was closed."},
    {"take_other", queue_take_other, METH_NOARGS,
     "take_other()\n--\n\nWaits for a call of another method; None: it was "
     "closed."},
    {"stop", queue_stop, METH_O,
     "stop(grace)\n--\n\nNo more calls; those that arrived are answered "
     "first, in so many seconds."},
    {"close", queue_close, METH_NOARGS,
     "close()\n--\n\nNo more requests; those that wait can still be taken."},
    {NULL, NULL, 0, NULL},
};

static PyObject *queue_refused(PyObject *self, void *unused)
{
    uint64_t n[PERSIA_ERROR_COUNT];
    PyObject *out = PyDict_New();
    (void)unused;
    persia_infer_refused(((queue_object *)self)->queue, n);
    for (int code = 0; out && code < PERSIA_ERROR_COUNT; code++) {
        PyObject *one = n[code] ? PyLong_FromUnsignedLongLong(n[code]) : NULL;
        if (n[code] && (!one || PyDict_SetItemString(
                                    out, persia_err_name(code), one)))
            Py_CLEAR(out);
        Py_XDECREF(one);
    }
    return out;
}

static PyGetSetDef queue_getset[] = {
    {"refused", queue_refused, NULL,
     "Calls of ModelInfer that were refused on arrival, by error.", NULL},
    {"waiting", queue_waiting, NULL, "Samples that wait.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_doc, (void *)"InferQueue(room, timeout)\n--\n\nRequests that wait: "
                        "so many samples; calls that say nothing have so many "
                        "seconds."},
    {Py_tp_new, (void *)queue_new},
    {Py_tp_dealloc, (void *)queue_dealloc},
    {Py_tp_methods, queue_methods},
    {Py_tp_getset, queue_getset},
    {0, NULL},
};

static PyType_Spec queue_spec = {
    .name = "persia._core.InferQueue",
    .basicsize = (int)sizeof(queue_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = queue_slots,
};

int py_add_inference(PyObject *module)
{
    return py_add_type(module, &queue_spec) ? 0 : -1;
}
