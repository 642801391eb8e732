/* roles.c: persia._core.EmbeddingWorker, a process's service; and ranks, whose
 * batches are Taken. */
#include <stdlib.h>
#include <string.h>

#include "base/lines.h"
#include "py/roles.h"

/* ---- EmbeddingWorker ---- */

typedef struct service_object {
    PyObject_HEAD
    embedding_worker *service; /* NULL: closed */
    rpc_server *rpc;       /* NULL: it does not listen */
    process_lines lines;
    PyObject *servers;     /* keeps the texts of its configuration */
    const char **addresses;
} service_object;

static void service_close(service_object *s)
{
    embedding_worker *service = s->service;
    rpc_server *rpc = s->rpc;
    s->service = NULL;
    s->rpc = NULL;
    if (!service || persia_fork_check("an embedding worker"))
        return;
    Py_BEGIN_ALLOW_THREADS
    persia_embedding_worker_close(service);
    if (rpc)
        persia_rpc_server_stop(rpc, 0);
    persia_embedding_worker_destroy(service);
    Py_END_ALLOW_THREADS
}

static void service_dealloc(PyObject *self)
{
    service_object *s = (service_object *)self;
    service_close(s);
    persia_lines_free(&s->lines);
    free((void *)(uintptr_t)s->addresses);
    Py_XDECREF(s->servers);
    py_free_object(self);
}

static PyObject *service_new(PyTypeObject *type, PyObject *args,
                             PyObject *kwargs)
{
    static char *words[] = {"servers", "threads", "message_limit",
                            "queue_limit", "lease", "silence",
                            "loaders", "lines", "lines_json", "audit", NULL};
    embedding_worker_config config = {0};
    lines_to to = {.role = "embedding-worker"};
    PyObject *servers, *own;
    unsigned threads;
    unsigned long long message, queue;
    double lease, silence;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OIKKddI|ipi", words,
                                     &servers, &threads, &message, &queue,
                                     &lease, &silence, &config.loaders,
                                     &to.fd, &to.json, &to.audit) ||
        py_seconds(lease, &config.lease_ns) ||
        py_seconds(silence, &config.silence_ns) ||
        py_client_config(servers, &config.servers, &own))
        return NULL;
    config.servers.threads = threads;
    config.message_limit = message;
    config.queue_limit = queue;
    config.jobs = threads < 4 ? 8 : 2 * threads; /* they wait for servers */
    service_object *self = py_new_object(type);
    if (!self) {
        free((void *)(uintptr_t)config.servers.addresses);
        return NULL;
    }
    self->addresses = (const char **)(uintptr_t)config.servers.addresses;
    self->servers = Py_NewRef(servers);
    persia_lines_init(&self->lines, &to);
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_embedding_worker_create(&config, &self->service);
    Py_END_ALLOW_THREADS
    if (!rc)
        return (PyObject *)self;
    py_raise(rc);
    Py_DECREF(self);
    return NULL;
}

static PyObject *service_start(PyObject *self, PyObject *args,
                               PyObject *kwargs)
{
    service_object *s = (service_object *)self;
    rpc_server_config config = {.methods = &persia_worker_methods,
                                .handler = persia_embedding_worker_handle,
                                .denied = py_denied,
                                .denied_ctx = &s->lines,
                                .ctx = s->service};
    if (!s->service || s->rpc)
        return py_closed("the worker");
    if (py_listen(args, kwargs, &config, NULL, NULL))
        return NULL;
    int rc = persia_rpc_server_start(&config, &s->rpc);
    if (rc) {
        s->rpc = NULL;
        return py_raise(rc);
    }
    persia_rpc_server_health(s->rpc, 1);
    return PyLong_FromLong(persia_rpc_server_port(s->rpc));
}

static PyObject *service_stop(PyObject *self, PyObject *arg)
{
    service_object *s = (service_object *)self;
    uint64_t grace;
    if (py_seconds_of(arg, &grace))
        return NULL;
    rpc_server *rpc = s->rpc;
    s->rpc = NULL;
    if (s->service) {
        Py_BEGIN_ALLOW_THREADS
        persia_embedding_worker_close(s->service);
        if (rpc)
            persia_rpc_server_stop(rpc, grace);
        (void)persia_lines_count(&s->lines, UINT64_MAX);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *service_py_leave(PyObject *self, PyObject *unused)
{
    service_object *s = (service_object *)self;
    (void)unused;
    if (!s->service)
        return py_closed("the worker");
    return PyLong_FromUnsignedLongLong(
        persia_embedding_worker_leave(s->service));
}

static PyObject *service_interrupt(PyObject *self, PyObject *unused)
{
    service_object *s = (service_object *)self;
    (void)unused;
    if (s->service)
        persia_embedding_worker_interrupt(s->service);
    Py_RETURN_NONE;
}

static PyObject *service_stats(PyObject *self, PyObject *unused)
{
    service_object *s = (service_object *)self;
    embedding_worker_stats stats;
    (void)unused;
    if (!s->service)
        return py_closed("the worker");
    persia_embedding_worker_get_stats(s->service, &stats);
    return py_of_spec(&persia_embedding_worker_stats_list, &stats, 0);
}

static PyObject *service_calls(PyObject *self, PyObject *unused)
{
    const service_object *s = (service_object *)self;
    (void)unused;
    return py_rpc_times(s->rpc, &persia_worker_methods);
}

static PyObject *service_denied(PyObject *self, PyObject *unused)
{
    const service_object *s = (service_object *)self;
    (void)unused;
    return py_rpc_denied(s->rpc ? persia_rpc_server_denied(s->rpc) : NULL);
}

static PyObject *service_py_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    service_close((service_object *)self);
    Py_RETURN_NONE;
}

static PyMethodDef service_methods[] = {
    {"start", (PyCFunction)(void (*)(void))service_start,
     METH_VARARGS | METH_KEYWORDS,
     "start(address, threads, calls, connections, message_limit, security) "
     "-> port; healthy from then on"},
    {"stop", service_stop, METH_O,
     "stop(grace)\n--\n\nNo more requests; waits `grace` seconds for those "
     "that have begun."},
    {"leave", service_py_leave, METH_NOARGS,
     "leave()\n--\n\nNo more batches of loaders; how many ranks may still "
     "ask for."},
    {"interrupt", service_interrupt, METH_NOARGS,
     "interrupt()\n--\n\nNothing waits for servers any more."},
    {"calls", service_calls, METH_NOARGS,
     "calls()\n--\n\nSee Server.calls()."},
    {"denied", service_denied, METH_NOARGS,
     "denied()\n--\n\nSee Server.denied()."},
    {"stats", service_stats, METH_NOARGS,
     "stats()\n--\n\nSee WorkerStats in persia.proto."},
    {"close", service_py_close, METH_NOARGS, "close()\n--\n\nEnds it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot service_slots[] = {
    {Py_tp_new, (void *)service_new},
    {Py_tp_dealloc, (void *)service_dealloc},
    {Py_tp_methods, service_methods},
    {Py_tp_doc, (void *)"An embedding worker: batches in, pooled embeddings "
                        "out."},
    {0, NULL},
};

static PyType_Spec service_spec = {
    .name = "persia._core.EmbeddingWorker",
    .basicsize = (int)sizeof(service_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = service_slots,
};

/* ---- Taken ---- */

typedef struct taken_object {
    PyObject_HEAD
    rank_taken *taken;
} taken_object;

static void taken_dealloc(PyObject *self)
{
    taken_object *t = (taken_object *)self;
    if (t->taken && !persia_fork_check("a batch"))
        persia_taken_put(t->taken);
    py_free_object(self);
}

static PyObject *taken_lookup(PyObject *self, PyObject *args)
{
    const taken_object *t = (taken_object *)self;
    unsigned long long handle, batch;
    loop *s;
    ps_client *c;
    if (!PyArg_ParseTuple(args, "KK", &handle, &batch))
        return NULL;
    int rc = persia_loop_get(handle, "data loader", &s, &c);
    if (rc)
        return py_raise(rc);
    rc = persia_taken_lookup(t->taken, s, c, batch);
    persia_loop_put(s);
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

/* (name, type, shape, offset, bytes) of a tensor. */
static PyObject *tensor_tuple(const wire_tensor *w, const char *bytes,
                              size_t bytes_n)
{
    PyObject *shape = PyTuple_New((Py_ssize_t)w->shape_n);
    for (size_t i = 0; shape && i < w->shape_n; i++) {
        PyObject *n = PyLong_FromUnsignedLongLong(w->shape[i]);
        if (!n || PyTuple_SetItem(shape, (Py_ssize_t)i, n))
            Py_CLEAR(shape);
    }
    if (!shape)
        return NULL;
    const Py_ssize_t at = w->n ? (const char *)w->data - bytes : 0;
    if (at < 0 || (size_t)at > bytes_n || w->n > bytes_n - (size_t)at) {
        Py_DECREF(shape); /* it was copied, for it was not aligned */
        return py_raise(persia_err_set(PERSIA_EPROTOCOL,
                                       "tensor %s is not aligned to 8 bytes",
                                       w->name));
    }
    return Py_BuildValue("(ssNnn)", w->name, w->type, shape, at,
                         (Py_ssize_t)w->n);
}

static PyObject *taken_tensors(PyObject *self, PyObject *unused)
{
    const taken_object *t = (taken_object *)self;
    const wire_take_reply *m = persia_taken_reply(t->taken);
    size_t n;
    const char *bytes = persia_taken_bytes(t->taken, &n);
    PyObject *list = PyList_New((Py_ssize_t)m->tensors_n);
    (void)unused;
    for (size_t i = 0; list && i < m->tensors_n; i++) {
        PyObject *one = tensor_tuple(&m->tensors[i], bytes, n);
        if (!one || PyList_SetItem(list, (Py_ssize_t)i, one))
            Py_CLEAR(list);
    }
    return list;
}

/* Without bytes: None. */
static PyObject *roles_bytes_of(const void *from, size_t n)
{
    return from ? PyByteArray_FromStringAndSize(from, (Py_ssize_t)n)
                : Py_NewRef(Py_None);
}

static PyObject *taken_places(PyObject *self, PyObject *arg)
{
    const rank_taken *t = ((taken_object *)self)->taken;
    const wire_take_reply *m = persia_taken_reply(t);
    const size_t keys = PyLong_AsSize_t(arg);
    if (PyErr_Occurred())
        return NULL;
    const size_t n = persia_taken_places(t, NULL, NULL);
    const size_t bags = keys * m->samples;
    PyObject *places = PyByteArray_FromStringAndSize(
        NULL, (Py_ssize_t)(n * sizeof(int64_t)));
    PyObject *offsets = PyByteArray_FromStringAndSize(
        NULL, (Py_ssize_t)((bags + 1) * sizeof(int64_t)));
    PyObject *weights = roles_bytes_of(m->ids.weights, n * sizeof(float));
    if (!places || !offsets || !weights ||
        (m->offsets.n ? m->offsets.n != bags + 1 : n != bags)) {
        Py_XDECREF(places);
        Py_XDECREF(offsets);
        Py_XDECREF(weights);
        return PyErr_Occurred()
                   ? NULL
                   : py_raise(persia_err_set(PERSIA_EPROTOCOL,
                                             "offsets of other features"));
    }
    persia_taken_places(t, (int64_t *)PyByteArray_AsString(places),
                        (int64_t *)PyByteArray_AsString(offsets));
    return Py_BuildValue("(NNN)", places, offsets, weights);
}

static PyObject *taken_use(PyObject *self, PyObject *unused)
{
    (void)unused;
    persia_taken_use(((taken_object *)self)->taken);
    Py_RETURN_NONE;
}

static PyObject *taken_skip(PyObject *self, PyObject *unused)
{
    (void)unused;
    persia_taken_skip(((taken_object *)self)->taken);
    Py_RETURN_NONE;
}

static PyObject *taken_give_back(PyObject *self, PyObject *unused)
{
    (void)unused;
    persia_taken_give_back(((taken_object *)self)->taken);
    Py_RETURN_NONE;
}

static PyObject *taken_samples(PyObject *self, void *unused)
{
    const taken_object *t = (taken_object *)self;
    (void)unused;
    return PyLong_FromUnsignedLong(persia_taken_reply(t->taken)->samples);
}

static PyObject *taken_end(PyObject *self, void *unused)
{
    const taken_object *t = (taken_object *)self;
    (void)unused;
    return PyBool_FromLong(persia_taken_reply(t->taken)->status == TAKE_END);
}

/* The bytes of the answer: they are of no one else. */
static int taken_buffer(PyObject *self, Py_buffer *view, int flags)
{
    size_t n;
    void *bytes = persia_taken_bytes(((taken_object *)self)->taken, &n);
    return PyBuffer_FillInfo(view, self, bytes, (Py_ssize_t)n, 0, flags);
}

static PyMethodDef taken_methods[] = {
    {"lookup", taken_lookup, METH_VARARGS,
     "lookup(handle, batch)\n--\n\nIs the lookup of a store's batch."},
    {"tensors", taken_tensors, METH_NOARGS,
     "tensors()\n--\n\n[(name, type, shape, offset, bytes)] of its buffer."},
    {"places", taken_places, METH_O,
     "places(features)\n--\n\n(places, offsets, weights or None) of the ids "
     "of so many features: int64, int64, float32."},
    {"use", taken_use, METH_NOARGS,
     "use()\n--\n\nThe loop has it: it is not offered again."},
    {"skip", taken_skip, METH_NOARGS,
     "skip()\n--\n\nNor is it where the loop ends early: it is done."},
    {"give_back", taken_give_back, METH_NOARGS,
     "give_back()\n--\n\nThe loop does not want it: it is offered again."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef taken_getset[] = {
    {"samples", taken_samples, NULL, "Of the batch.", NULL},
    {"end", taken_end, NULL, "It is none: the pass has ended.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot taken_slots[] = {
    {Py_tp_dealloc, (void *)taken_dealloc},
    {Py_tp_methods, taken_methods},
    {Py_tp_getset, taken_getset},
    {Py_bf_getbuffer, (void *)taken_buffer},
    {Py_tp_doc, (void *)"A batch that a rank takes."},
    {0, NULL},
};

static PyType_Spec taken_spec = {
    .name = "persia._core.Taken",
    .basicsize = (int)sizeof(taken_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = taken_slots,
};

/* ---- Rank ---- */

typedef struct rank_object {
    PyObject_HEAD
    rank_taker *rank;
    PyObject *taken; /* the type of its batches */
} rank_object;

static void rank_dealloc(PyObject *self)
{
    rank_object *r = (rank_object *)self;
    if (r->rank && !persia_fork_check("a stream"))
        persia_rank_close(r->rank);
    Py_XDECREF(r->taken);
    py_free_object(self);
}

static PyObject *rank_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"config", NULL};
    worker_client_config config = {0};
    PyObject *dict;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", words, &dict) ||
        py_worker_client(dict, &config))
        return NULL;
    rank_object *self = py_new_object(type);
    PyObject *core = self ? PyImport_ImportModule("persia._core") : NULL;
    int rc = 0;
    if (core) {
        self->taken = PyObject_GetAttrString(core, "Taken");
        Py_DECREF(core);
    }
    if (self && self->taken) {
        Py_BEGIN_ALLOW_THREADS
        rc = persia_rank_open(&config, &self->rank);
        Py_END_ALLOW_THREADS
    }
    free((void *)(uintptr_t)config.addresses);
    if (rc)
        py_raise(rc);
    if (self && (rc || !self->taken))
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* The words of Store.declare, a dict a table. */
static int roles_read_tables(PyObject *list, wire_plan *out)
{
    const Py_ssize_t n = PyList_Size(list);
    PyObject *none = n < 0 ? NULL : PyTuple_New(0);
    out->tables = none ? calloc((size_t)n + 1, sizeof *out->tables) : NULL;
    for (Py_ssize_t i = 0; out->tables && i < n; i++) {
        table_config config;
        if (py_table_config(none, PyList_GetItem(list, i), &config)) {
            Py_DECREF(none);
            return -1;
        }
        out->tables[i] = config.spec;
        out->tables_n++;
    }
    Py_XDECREF(none);
    if (!out->tables && !PyErr_Occurred())
        PyErr_NoMemory();
    return out->tables ? 0 : -1;
}

/* (name, table, pooling, trainable, rows) a feature. */
static int roles_read_features(PyObject *list, wire_plan *out)
{
    const Py_ssize_t n = PyList_Size(list);
    out->features = n < 0 ? NULL : calloc((size_t)n + 1,
                                          sizeof *out->features);
    for (Py_ssize_t i = 0; out->features && i < n; i++) {
        wire_plan_feature *f = &out->features[i];
        const char *name;
        int trainable, rows;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "sIIpp", &name,
                              &f->table, &f->pooling, &trainable, &rows) ||
            py_name(name, f->name, sizeof f->name))
            return -1;
        f->trainable = (uint32_t)trainable;
        f->rows = (uint32_t)rows;
        out->features_n++;
    }
    if (!out->features && !PyErr_Occurred())
        PyErr_NoMemory();
    return out->features ? 0 : -1;
}

static PyObject *rank_declare(PyObject *self, PyObject *args)
{
    const rank_object *r = (rank_object *)self;
    PyObject *tables, *features;
    wire_plan plan = {0};
    int rc = 0;
    int ordered;
    if (!PyArg_ParseTuple(args, "OOp", &tables, &features, &ordered))
        return NULL;
    persia_rank_order(r->rank, ordered);
    int bad = roles_read_tables(tables, &plan) ||
              roles_read_features(features, &plan);
    if (!bad) {
        Py_BEGIN_ALLOW_THREADS
        rc = persia_rank_declare(r->rank, &plan);
        Py_END_ALLOW_THREADS
    }
    free(plan.tables);
    free(plan.features);
    if (bad)
        return NULL;
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyObject *rank_next(PyObject *self, PyObject *unused)
{
    const rank_object *r = (rank_object *)self;
    (void)unused;
    taken_object *t = py_new_object((PyTypeObject *)r->taken);
    if (!t)
        return NULL;
    int rc = persia_rank_next(r->rank, &t->taken);
    if (!rc)
        return (PyObject *)t;
    Py_DECREF(t);
    return py_raise(rc);
}

static PyObject *rank_counts_of(PyObject *self, PyObject *unused)
{
    static const spec_field fields[] = {
        PY_COUNT(rank_counts, late), PY_COUNT(rank_counts, failed),
        PY_COUNT(rank_counts, given_up), PY_COUNT(rank_counts, away),
        PY_COUNT(rank_counts, silent), PY_COUNT(rank_counts, epochs),
    };
    rank_counts c;
    (void)unused;
    persia_rank_get_counts(((rank_object *)self)->rank, &c);
    return py_of_counts(fields, sizeof fields / sizeof fields[0], &c);
}

static PyObject *rank_cancel(PyObject *self, PyObject *unused)
{
    (void)unused;
    persia_rank_cancel(((rank_object *)self)->rank);
    Py_RETURN_NONE;
}

static PyObject *rank_again(PyObject *self, PyObject *unused)
{
    (void)unused;
    persia_rank_again(((rank_object *)self)->rank);
    Py_RETURN_NONE;
}

static PyObject *rank_set_workers(PyObject *self, PyObject *dict)
{
    worker_client_config config = {0};
    if (py_worker_client(dict, &config))
        return NULL;
    int rc = persia_rank_list(((rank_object *)self)->rank, &config);
    free((void *)(uintptr_t)config.addresses);
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyMethodDef rank_methods[] = {
    {"set_workers", rank_set_workers, METH_O,
     "set_workers(config)\n--\n\nThe workers are those of the configuration "
     "now."},
    {"declare", rank_declare, METH_VARARGS,
     "declare(tables, features, ordered)\n--\n\nWhat is wanted of every "
     "batch; ordered: for steps of all ranks."},
    {"next", rank_next, METH_NOARGS,
     "next() -> Taken\n--\n\nThe next batch; nothing is sent yet."},
    {"counts", rank_counts_of, METH_NOARGS,
     "counts()\n--\n\nBatches that were late, and losses of servers."},
    {"cancel", rank_cancel, METH_NOARGS,
     "cancel()\n--\n\nBatches so far are not wanted any more."},
    {"again", rank_again, METH_NOARGS,
     "again()\n--\n\nThe end of this pass is an error: the next one ends, "
     "too."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot rank_slots[] = {
    {Py_tp_new, (void *)rank_new},
    {Py_tp_dealloc, (void *)rank_dealloc},
    {Py_tp_methods, rank_methods},
    {Py_tp_doc, (void *)"Rank(config)\n--\n\nTakes batches from workers."},
    {0, NULL},
};

static PyType_Spec rank_spec = {
    .name = "persia._core.Rank",
    .basicsize = (int)sizeof(rank_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = rank_slots,
};

/* The batch is there, or its pass has ended; its error. */
static PyObject *py_taken_wait(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long handle, batch;
    loop *s;
    if (!PyArg_ParseTuple(args, "KK", &handle, &batch))
        return NULL;
    int rc = persia_loop_get(handle, "data loader", &s, NULL);
    if (rc)
        return py_raise(rc);
    Py_BEGIN_ALLOW_THREADS
    rc = persia_loop_batch_wait(s, batch);
    persia_loop_put(s);
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

/* The counters of a worker elsewhere. */
static PyObject *py_worker_stats(PyObject *module, PyObject *dict)
{
    worker_client_config config = {0};
    embedding_worker_stats stats;
    int rc;
    (void)module;
    if (py_worker_client(dict, &config))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_worker_ask(&config, &stats);
    Py_END_ALLOW_THREADS
    free((void *)(uintptr_t)config.addresses);
    return rc ? py_raise(rc)
              : py_of_spec(&persia_embedding_worker_stats_list, &stats, 0);
}

static PyMethodDef functions[] = {
    {"worker_stats", py_worker_stats, METH_O,
     "worker_stats(config)\n--\n\nSee WorkerStats in persia.proto."},
    {"taken_wait", py_taken_wait, METH_VARARGS,
     "taken_wait(handle, batch)\n--\n\nWaits for a batch that is taken."},
    {NULL, NULL, 0, NULL},
};

int py_add_roles(PyObject *module)
{
    if (!py_add_type(module, &service_spec) ||
        !py_add_type(module, &taken_spec) ||
        !py_add_type(module, &rank_spec) ||
        py_add_sender(module))
        return -1;
    return PyModule_AddFunctions(module, functions);
}
