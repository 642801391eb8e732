/* ckpt.c: what persia/checkpoint.py needs of the C core: tables as data,
 * cuts, row files, checksums, requests to a store's shards. */
#include "py/py.h"

#include <stdlib.h>
#include <string.h>

#include "ckpt/ckpt.h"
#include "client/client.h"
#include "py/peer.h"
#include "store/store.h"

/* ---- tables as data ----------------------------------------------------- */

static PyObject *describe(const table_config *c)
{
    uint32_t floats = persia_optim_state_floats(c->optimizer, c->dim,
                                                (int)c->momentum);
    PyObject *out = py_of_spec(&persia_table_spec_list, &c->spec, 1);
    PyObject *state = out ? PyLong_FromUnsignedLong(floats) : NULL;
    if (!state || PyDict_SetItemString(out, "state_floats", state))
        Py_CLEAR(out);
    Py_XDECREF(state);
    return out;
}

static PyObject *ckpt_describe(PyObject *module, PyObject *args,
                               PyObject *kwargs)
{
    table_config c;
    (void)module;
    if (py_table_config(args, kwargs, &c))
        return NULL;
    /* A server may have sent anything. */
    if (persia_spec_out_of_range(&persia_table_spec_list, &c.spec))
        return py_raise(
            persia_err_set(PERSIA_EPROTOCOL,
                           "table %s: an option is out of its range", c.name));
    return describe(&c);
}

static PyObject *ckpt_tables(PyObject *module, PyObject *args)
{
    unsigned long long handle;
    store *owner;
    (void)module;
    if (!PyArg_ParseTuple(args, "K", &handle))
        return NULL;
    int code = persia_store_get(handle, "checkpoint", &owner);
    if (code)
        return py_raise(code);
    const ps_client *c = persia_store_client(owner);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < persia_client_tables(c); i++) {
        PyObject *one = describe(persia_client_table(c, i));
        if (!one || PyList_Append(list, one))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    persia_store_put(owner);
    return list;
}

/* ---- a cut of all tables ------------------------------------------------ */

typedef struct cut_object {
    PyObject_HEAD
    store *owner; /* NULL: closed */
    table_cut **cuts;
    uint32_t n;
    uint64_t updates; /* of the shard at the cut */
    uint64_t t;       /* the highest then */
    int busy;         /* a thread is writing; guarded by the GIL */
} cut_object;

static void cut_release(cut_object *self)
{
    for (uint32_t i = 0; i < self->n; i++)
        persia_table_cut_end(self->cuts[i]);
    free(self->cuts);
    self->cuts = NULL;
    self->n = 0;
    if (self->owner)
        persia_store_put(self->owner);
    self->owner = NULL;
}

static void cut_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    cut_release((cut_object *)object);
    release(object);
    Py_DECREF(type);
}

static PyObject *cut_new(PyTypeObject *type, PyObject *args,
                         PyObject *keywords)
{
    static char *names[] = {"handle", NULL};
    unsigned long long handle;
    store *owner;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "K", names, &handle))
        return NULL;
    int code = persia_store_get(handle, "save", &owner);
    if (code)
        return py_raise(code);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    cut_object *self = (cut_object *)alloc(type, 0);
    if (!self) {
        persia_store_put(owner);
        return NULL;
    }
    self->owner = owner;
    ps *p = persia_store_ps(owner);
    uint32_t n = persia_ps_tables(p);
    self->cuts = calloc(n + 1, sizeof *self->cuts);
    if (!self->cuts)
        code = persia_err_set(PERSIA_ENOMEM, "a cut of %u tables", n);
    if (!code) {
        Py_BEGIN_ALLOW_THREADS code = persia_ps_cut_begin(p, n, self->cuts,
                                                          &self->updates);
        self->t = persia_ps_t(p);
        Py_END_ALLOW_THREADS
    }
    if (!code)
        self->n = n;
    if (code) {
        py_raise(code);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *cut_table(PyObject *object, PyObject *args)
{
    cut_object *self = (cut_object *)object;
    unsigned no;
    if (!PyArg_ParseTuple(args, "I", &no))
        return NULL;
    if (no >= self->n) {
        PyErr_Format(PyExc_IndexError, "table %u of a cut of %u", no,
                     self->n);
        return NULL;
    }
    return Py_BuildValue(
        "(KK)", (unsigned long long)persia_table_cut_rows(self->cuts[no]),
        (unsigned long long)persia_table_cut_clock(self->cuts[no]));
}

static PyObject *files_to_list(const ckpt_files *files)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < files->n; i++) {
        const ckpt_file *f = &files->files[i];
        PyObject *one = Py_BuildValue("(sKKI)", f->name,
                                      (unsigned long long)f->rows,
                                      (unsigned long long)f->bytes, f->crc);
        if (!one || PyList_Append(list, one))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

static PyObject *cut_write(PyObject *object, PyObject *args)
{
    cut_object *self = (cut_object *)object;
    unsigned no;
    int folder, code;
    const char *stem;
    unsigned long long chunk;
    ckpt_files files = {0};
    if (!PyArg_ParseTuple(args, "IisK", &no, &folder, &stem, &chunk))
        return NULL;
    if (no >= self->n || self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the cut is closed or in use, or has no such table");
        return NULL;
    }
    self->busy = 1;
    ps *p = persia_store_ps(self->owner);
    Py_BEGIN_ALLOW_THREADS code =
        persia_ckpt_write(persia_ps_sched(p), self->cuts[no],
                          persia_table_get_config(persia_ps_table(p, no)),
                          folder, stem, chunk, &files);
    Py_END_ALLOW_THREADS
    self->busy = 0;
    PyObject *list = code ? py_raise(code) : files_to_list(&files);
    persia_ckpt_files_free(&files);
    return list;
}

static PyObject *cut_close(PyObject *object, PyObject *unused)
{
    cut_object *self = (cut_object *)object;
    (void)unused;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the cut is in use");
        return NULL;
    }
    cut_release(self);
    Py_RETURN_NONE;
}

static PyObject *cut_updates(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((cut_object *)object)->updates);
}

static PyObject *cut_t(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((cut_object *)object)->t);
}

static PyObject *cut_tables(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((cut_object *)object)->n);
}

static PyMethodDef cut_methods[] = {
    {"table", cut_table, METH_VARARGS,
     "table(no)\n--\n\nRows and clock of a table at the cut."},
    {"write", cut_write, METH_VARARGS,
     "write(no, folder, stem, chunk)\n--\n\nWrites a table's rows into files "
     "of at most `chunk` bytes; [(name, rows, bytes, crc)]."},
    {"close", cut_close, METH_NOARGS, "close()\n--\n\nEnds the cut."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef cut_getset[] = {
    {"tables", cut_tables, NULL, "How many tables there were.", NULL},
    {"updates", cut_updates, NULL, "Updates of the store at the cut.", NULL},
    {"t", cut_t, NULL, "The highest t of an update then.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot cut_slots[] = {
    {Py_tp_new, (void *)cut_new},
    {Py_tp_dealloc, (void *)cut_dealloc},
    {Py_tp_methods, cut_methods},
    {Py_tp_getset, cut_getset},
    {Py_tp_doc, (void *)"The rows of all tables of a store at one moment."},
    {0, NULL},
};

static PyType_Spec cut_spec = {
    .name = "persia._core.Cut",
    .basicsize = (int)sizeof(cut_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = cut_slots,
};

/* ---- reading ------------------------------------------------------------ */

/* [(name, rows, bytes, crc)] to an array; -1 with an exception set. */
static int files_from_list(PyObject *list, ckpt_files *out)
{
    Py_ssize_t n = PySequence_Size(list);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        PyObject *tuple = item ? PySequence_Tuple(item) : NULL;
        const char *name;
        unsigned long long rows, bytes;
        unsigned crc;
        ckpt_file f;
        int code, ok = tuple && PyArg_ParseTuple(tuple, "sKKI", &name, &rows,
                                                 &bytes, &crc);
        Py_XDECREF(item);
        if (ok) {
            code = persia_ckpt_name_check(name);
            if (!code) {
                memset(&f, 0, sizeof f);
                memcpy(f.name, name, strlen(name) + 1);
                f.rows = rows;
                f.bytes = bytes;
                f.crc = crc;
                code = persia_ckpt_files_add(out, &f);
            }
            if (code)
                py_raise(code);
            ok = !code;
        }
        Py_XDECREF(tuple);
        if (!ok)
            return -1;
    }
    return n < 0 ? -1 : 0;
}

/* (handle, table, folder, files) of a call that reads row files. */
typedef struct reading {
    store *owner;
    table *t;
    int folder;
    ckpt_files files;
} reading;

static void reading_end(reading *r)
{
    persia_ckpt_files_free(&r->files);
    if (r->owner)
        persia_store_put(r->owner);
}

static int reading_begin(reading *r, PyObject *args, const char *what)
{
    unsigned long long handle;
    unsigned no;
    PyObject *list;
    memset(r, 0, sizeof *r);
    if (!PyArg_ParseTuple(args, "KIiO", &handle, &no, &r->folder, &list))
        return -1;
    int code = persia_store_get(handle, what, &r->owner);
    if (code) {
        r->owner = NULL;
        py_raise(code);
        return -1;
    }
    r->t = persia_ps_table(persia_store_ps(r->owner), no);
    if (!r->t)
        PyErr_Format(PyExc_IndexError, "there is no table %u", no);
    if (r->t && !files_from_list(list, &r->files))
        return 0;
    reading_end(r);
    return -1;
}

static PyObject *ckpt_verify_(PyObject *module, PyObject *args)
{
    reading r;
    int code;
    (void)module;
    if (reading_begin(&r, args, "load"))
        return NULL;
    sched *s = persia_ps_sched(persia_store_ps(r.owner));
    Py_BEGIN_ALLOW_THREADS code = persia_ckpt_verify(
        s, persia_table_get_config(r.t), r.folder, r.files.files, r.files.n);
    Py_END_ALLOW_THREADS
    PyObject *result = code ? py_raise(code) : Py_NewRef(Py_None);
    reading_end(&r);
    return result;
}

/* The rows of a checkpoint in a table of their own, until exchange() puts
 * them in the place of the store's, or back: a load that fails later can be
 * undone. */
typedef struct staged_object {
    PyObject_HEAD
    store *owner;    /* keeps `into` alive */
    table *into;    /* of the store */
    table *staging; /* at first with the checkpoint's rows */
    uint64_t pushes; /* the clock that belongs to staging */
} staged_object;

static void staged_dealloc(PyObject *object)
{
    staged_object *self = (staged_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    if (self->staging)
        persia_table_destroy(self->staging);
    if (self->owner)
        persia_store_put(self->owner);
    release(object);
    Py_DECREF(type);
}

static int stage(const reading *r, uint64_t pushes, table **out)
{
    int code = persia_table_create(persia_table_get_config(r->t), out);
    if (code)
        return code;
    /* Later than every row: all may be evicted if the capacity is smaller
     * than it was, the one touched longest ago first. */
    persia_table_set_clock(*out, pushes + 1);
    return persia_ckpt_restore(persia_ps_sched(persia_store_ps(r->owner)),
                               *out, r->folder, r->files.files, r->files.n, 0,
                               1);
}

static PyObject *staged_new(PyTypeObject *type, PyObject *args,
                            PyObject *keywords)
{
    reading r;
    int code;
    (void)keywords;
    PyObject *first = PyTuple_GetSlice(args, 0, 4);
    PyObject *last = PySequence_GetItem(args, 4);
    unsigned long long pushes =
        last ? PyLong_AsUnsignedLongLong(last) : (unsigned long long)-1;
    Py_XDECREF(last);
    if (!first || PyErr_Occurred() || reading_begin(&r, first, "load")) {
        Py_XDECREF(first);
        return NULL;
    }
    Py_DECREF(first);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    staged_object *self = (staged_object *)alloc(type, 0);
    if (!self) {
        reading_end(&r);
        return NULL;
    }
    self->into = r.t;
    self->pushes = pushes;
    Py_BEGIN_ALLOW_THREADS
    code = stage(&r, pushes, &self->staging);
    Py_END_ALLOW_THREADS
    self->owner = r.owner;
    r.owner = NULL;
    if (code)
        py_raise(code);
    reading_end(&r);
    if (code)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *staged_exchange(PyObject *object, PyObject *unused)
{
    staged_object *self = (staged_object *)object;
    table_stats stats;
    int code;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS persia_table_get_stats(self->into, &stats);
    code = persia_table_exchange(self->into, self->staging);
    if (!code) {
        persia_table_set_clock(self->into, self->pushes);
        self->pushes = stats.pushes;
    }
    Py_END_ALLOW_THREADS
    return code ? py_raise(code) : Py_NewRef(Py_None);
}

static PyMethodDef staged_methods[] = {
    {"exchange", staged_exchange, METH_NOARGS,
     "exchange()\n--\n\nExchanges rows and clock with the store's."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot staged_slots[] = {
    {Py_tp_new, (void *)staged_new},
    {Py_tp_dealloc, (void *)staged_dealloc},
    {Py_tp_methods, staged_methods},
    {Py_tp_doc,
     (void *)"Staged(handle, no, folder, files, pushes)\n--\n\nThe rows of "
             "a table, read from verified files, beside those of the store."},
    {0, NULL},
};

static PyType_Spec staged_spec = {
    .name = "persia._core.Staged",
    .basicsize = (int)sizeof(staged_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = staged_slots,
};

/* ---- shards behind messages --------------------------------------------- */

/* One shard of a remote store, while it is asked. */
typedef struct asked {
    store *owner;
    uint32_t shard;
    py_peer peer;
    PyObject *rest; /* of the arguments */
} asked;

static int ask(void *ctx, uint32_t method, const void *arguments,
               shard_reply *reply)
{
    const asked *a = ctx;
    return persia_client_call(persia_store_client(a->owner), a->shard, method,
                              arguments, reply);
}

static void asked_end(asked *a)
{
    Py_XDECREF(a->rest);
    persia_store_put(a->owner);
}

/* (handle, shard, ...); -1 with an exception set. */
static int asked_begin(asked *a, PyObject *args)
{
    unsigned long long handle;
    PyObject *head = PyTuple_GetSlice(args, 0, 2);
    int ok = head && PyArg_ParseTuple(head, "KI", &handle, &a->shard);
    Py_XDECREF(head);
    if (!ok)
        return -1;
    int code = persia_store_get(handle, "checkpoint", &a->owner);
    if (code) {
        py_raise(code);
        return -1;
    }
    a->peer = (py_peer){.call = ask,
                        .ctx = a,
                        .caller = persia_client_caller(
                            persia_store_client(a->owner), a->shard)};
    a->rest = PyTuple_GetSlice(args, 2, PyTuple_Size(args));
    if (a->rest &&
        a->shard < persia_client_shards(persia_store_client(a->owner)))
        return 0;
    if (a->rest)
        PyErr_Format(PyExc_IndexError, "there is no shard %u", a->shard);
    asked_end(a);
    return -1;
}

static PyObject *ckpt_hello(PyObject *module, PyObject *args)
{
    asked a;
    (void)module;
    if (asked_begin(&a, args))
        return NULL;
    PyObject *out = py_peer_hello(&a.peer, a.rest);
    asked_end(&a);
    return out;
}

static PyObject *ckpt_snapshot(PyObject *module, PyObject *args)
{
    asked a;
    (void)module;
    if (asked_begin(&a, args))
        return NULL;
    PyObject *out = py_peer_snapshot(&a.peer, a.rest);
    asked_end(&a);
    return out;
}

static PyObject *ckpt_restore_(PyObject *module, PyObject *args)
{
    asked a;
    (void)module;
    if (asked_begin(&a, args))
        return NULL;
    PyObject *out = py_peer_restore(&a.peer, a.rest);
    asked_end(&a);
    return out;
}

static PyObject *ckpt_shards(PyObject *module, PyObject *arg)
{
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    store *owner;
    (void)module;
    if (PyErr_Occurred())
        return NULL;
    int code = persia_store_get(handle, "checkpoint", &owner);
    if (code)
        return py_raise(code);
    const ps_client *c = persia_store_client(owner);
    PyObject *list = PyList_New(0);
    uint32_t n = !persia_client_is_embedded(c) ? persia_client_shards(c) : 0;
    for (uint32_t i = 0; list && i < n; i++) {
        PyObject *address = PyUnicode_FromString(persia_client_address(c, i));
        if (!address || PyList_Append(list, address))
            Py_CLEAR(list);
        Py_XDECREF(address);
    }
    persia_store_put(owner);
    return list;
}

static PyObject *ckpt_greet(PyObject *module, PyObject *args)
{
    unsigned long long handle;
    int restored;
    store *owner;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kp", &handle, &restored))
        return NULL;
    int code = persia_store_get(handle, "load", &owner);
    if (code)
        return py_raise(code);
    Py_BEGIN_ALLOW_THREADS code =
        persia_client_greet(persia_store_client(owner), restored);
    if (!code)
        persia_store_renumber(owner, 0);
    persia_store_put(owner);
    Py_END_ALLOW_THREADS
    return code ? py_raise(code) : Py_NewRef(Py_None);
}

static PyObject *ckpt_loading(PyObject *module, PyObject *args)
{
    unsigned long long handle;
    int loading;
    store *owner;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kp", &handle, &loading))
        return NULL;
    int code = persia_store_get(handle, "load", &owner);
    if (code)
        return py_raise(code);
    persia_client_set_loading(persia_store_client(owner), loading);
    persia_store_put(owner);
    Py_RETURN_NONE;
}

static PyObject *ckpt_go_on(PyObject *module, PyObject *args)
{
    unsigned long long handle, stream, number, lost;
    store *owner;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKK", &handle, &stream, &number, &lost))
        return NULL;
    int code = persia_store_get(handle, "load", &owner);
    if (code)
        return py_raise(code);
    Py_BEGIN_ALLOW_THREADS code =
        persia_client_go_on(persia_store_client(owner), stream, number, lost);
    if (!code)
        persia_store_renumber(owner, 1);
    persia_store_put(owner);
    Py_END_ALLOW_THREADS
    return code ? py_raise(code) : Py_NewRef(Py_None);
}

static PyObject *ckpt_place(PyObject *module, PyObject *arg)
{
    store *owner;
    uint64_t last;
    (void)module;
    unsigned long long handle = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    int code = persia_store_get(handle, "save", &owner);
    if (code)
        return py_raise(code);
    Py_BEGIN_ALLOW_THREADS code = persia_store_places(owner, &last);
    persia_store_put(owner);
    Py_END_ALLOW_THREADS
    return code ? PyLong_FromUnsignedLongLong(last) : Py_NewRef(Py_None);
}

/* ---- plain files -------------------------------------------------------- */

static PyObject *ckpt_crc(PyObject *module, PyObject *args)
{
    const char *data;
    Py_ssize_t n;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#", &data, &n))
        return NULL;
    return PyLong_FromUnsignedLong(persia_crc32c(0, data, (size_t)n));
}

static PyObject *ckpt_file_crc_(PyObject *module, PyObject *args)
{
    int folder, code;
    const char *name;
    uint32_t crc;
    uint64_t bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "is", &folder, &name))
        return NULL;
    Py_BEGIN_ALLOW_THREADS code = persia_ckpt_file_crc(folder, name, &crc,
                                                       &bytes);
    Py_END_ALLOW_THREADS
    return code ? py_raise(code)
                : Py_BuildValue("(KI)", (unsigned long long)bytes, crc);
}

static PyMethodDef methods[] = {
    {"ckpt_tables", ckpt_tables, METH_VARARGS,
     "ckpt_tables(handle)\n--\n\nName and options of each table of a store, "
     "in the order of declaration."},
    {"ckpt_describe", (PyCFunction)(void (*)(void))ckpt_describe,
     METH_VARARGS | METH_KEYWORDS,
     "ckpt_describe(**config)\n--\n\nThe words of Store.declare() as those of "
     "ckpt_tables()."},
    {"ckpt_shards", ckpt_shards, METH_O,
     "ckpt_shards(handle)\n--\n\nThe addresses of a store's shards; none if "
     "it is embedded."},
    {"ckpt_hello", ckpt_hello, METH_VARARGS,
     "ckpt_hello(handle, shard, namespace, stream)\n--\n\nAs "
     "Channel.hello()."},
    {"ckpt_snapshot", ckpt_snapshot, METH_VARARGS,
     "ckpt_snapshot(handle, shard, verb, root, folder, proof)\n--\n\nAs "
     "Channel.snapshot()."},
    {"ckpt_restore", ckpt_restore_, METH_VARARGS,
     "ckpt_restore(handle, shard, verb, root, folder, proof, lineage, "
     "restore, updates, step, t, pushes, ledgers, files)\n--\n\n"
     "As Channel.restore()."},
    {"ckpt_greet", ckpt_greet, METH_VARARGS,
     "ckpt_greet(handle, restored)\n--\n\nLearns what the shards have, now "
     "or because rows were restored."},
    {"ckpt_loading", ckpt_loading, METH_VARARGS,
     "ckpt_loading(handle, loading)\n--\n\nWhether the store loads rows: "
     "then they are not another client's."},
    {"ckpt_go_on", ckpt_go_on, METH_VARARGS,
     "ckpt_go_on(handle, stream, number, lost)\n--\n\nLearns what the shards "
     "have; the store's updates go on after this one of the stream, and so "
     "many are lost."},
    {"ckpt_place", ckpt_place, METH_O,
     "ckpt_place(handle)\n--\n\nThe place of the last batch; None if the "
     "numbers of updates are no places."},
    {"ckpt_verify", ckpt_verify_, METH_VARARGS,
     "ckpt_verify(handle, no, folder, files)\n--\n\nReads every byte of a "
     "table's row files and changes nothing."},
    {"ckpt_crc", ckpt_crc, METH_VARARGS,
     "ckpt_crc(data)\n--\n\nThe CRC-32C of bytes."},
    {"ckpt_file_crc", ckpt_file_crc_, METH_VARARGS,
     "ckpt_file_crc(folder, name)\n--\n\nBytes and CRC-32C of a file."},
    {NULL, NULL, 0, NULL},
};

int py_add_ckpt(PyObject *module)
{
    if (PyModule_AddFunctions(module, methods))
        return -1;
    if (!py_add_type(module, &cut_spec))
        return -1;
    return py_add_type(module, &staged_spec) ? 0 : -1;
}
