/* store.c: persia._core.Store, a store with its tables.
 *
 * Checks of user input that need names and remedies are made in Python; here
 * only what keeps memory safe is checked again.  Buffers are passed by the
 * buffer protocol and must be C-contiguous.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "batch/batch.h"
#include "client/client.h"
#include "loop/loop.h"
#include "optim/optim.h"
#include "pool/pool.h"
#include "py/py.h"

enum { FIELDS_MAX = 32 };

typedef struct store_object {
    PyObject_HEAD
    uint64_t handle;
    /* Of persia_optim_hyper_list, interned: looked up at every step. */
    PyObject *names[FIELDS_MAX];
    PyObject *algorithm, *betas;
} store_object;

/* Begins a method: `s` is the store, with a reference that END gives back,
 * and `c` its client. */
#define BEGIN(self, what)                                                     \
    loop *s;                                                                  \
    ps_client *c;                                                             \
    int rc = persia_loop_get(((store_object *)(self))->handle, what, &s,      \
                             &c);                                             \
    (void)c;                                                                  \
    if (rc)                                                                   \
    return py_raise(rc)
#define END() persia_loop_put(s)

static int py_store_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"threads", "memory_limit", "remote", NULL};
    unsigned threads;
    unsigned long long limit;
    PyObject *remote = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IK|O", words, &threads,
                                     &limit, &remote))
        return -1;
    store_object *o = (store_object *)self;
    if (o->handle) {
        PyErr_SetString(PyExc_RuntimeError, "a Store is initialised once");
        return -1;
    }
    assert(persia_optim_hyper_list.n <= FIELDS_MAX);
    for (size_t i = 0; i < persia_optim_hyper_list.n; i++) {
        o->names[i] =
            PyUnicode_InternFromString(persia_optim_hyper_list.fields[i].name);
        if (!o->names[i])
            return -1;
    }
    o->algorithm = PyUnicode_InternFromString("algorithm");
    o->betas = PyUnicode_InternFromString("betas");
    if (!o->algorithm || !o->betas)
        return -1;
    ps_client *client;
    const tables_config embedded = {.threads = threads, .memory_limit = limit};
    int rc = PERSIA_OK;
    if (remote != Py_None) {
        if (py_open_client(threads, remote, &client))
            return -1;
    } else {
        rc = persia_client_create_embedded(&embedded, &client);
    }
    if (!rc)
        rc = persia_loop_open(client, &o->handle);
    if (!rc)
        return 0;
    py_raise(rc);
    return -1;
}

static PyObject *py_store_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    store_object *o = (store_object *)self;
    uint64_t handle = o->handle;
    if (handle) {
        Py_BEGIN_ALLOW_THREADS persia_loop_close(handle);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static void py_store_dealloc(PyObject *self)
{
    store_object *o = (store_object *)self;
    if (o->handle) {
        Py_BEGIN_ALLOW_THREADS /* updates may be on their way to servers */
            persia_loop_close(o->handle);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < FIELDS_MAX; i++)
        Py_XDECREF(o->names[i]);
    Py_XDECREF(o->algorithm);
    Py_XDECREF(o->betas);
    py_free_object(self);
}

static PyObject *store_handle(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((store_object *)self)->handle);
}

int py_table_config(PyObject *args, PyObject *kwargs, table_config *out)
{
    persia_table_config_init(out);
    return py_to_spec(&persia_table_spec_list, args, kwargs, &out->spec);
}

static PyObject *py_store_declare(PyObject *self, PyObject *args,
                               PyObject *kwargs)
{
    table_config config;
    if (py_table_config(args, kwargs, &config))
        return NULL;
    BEGIN(self, "Store.declare");
    uint32_t no = 0;
    int created = 0;
    Py_BEGIN_ALLOW_THREADS rc = persia_client_declare(c, &config, &no,
                                                      &created);
    Py_END_ALLOW_THREADS
    END();
    return rc ? py_raise(rc) : Py_BuildValue("(IO)", no,
                                             created ? Py_True : Py_False);
}

static int read_feature(PyObject *tuple, plan_feature *f)
{
    const char *name;
    if (!PyArg_ParseTuple(tuple, "sIIII", &name, &f->key, &f->table,
                          &f->pooling, &f->trainable))
        return -1;
    size_t length = strlen(name);
    if (length >= sizeof f->name)
        length = sizeof f->name - 1; /* for messages only */
    memcpy(f->name, name, length);
    return 0;
}

static PyObject *py_store_plan(PyObject *self, PyObject *args)
{
    unsigned kind, keys;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "IIO", &kind, &keys, &list))
        return NULL;
    Py_ssize_t n = PyList_Size(list);
    if (n < 0)
        return NULL;
    plan_feature *features = calloc((size_t)n + 1, sizeof *features);
    if (!features)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        if (read_feature(PyList_GetItem(list, i), &features[i])) {
            free(features);
            return NULL;
        }
    }
    loop *s;
    uint32_t plan = 0;
    int rc = persia_loop_get(((store_object *)self)->handle, "Store.plan",
                             &s, NULL);
    if (!rc) {
        rc = persia_loop_plan(s, kind, keys, features, (uint32_t)n, &plan);
        persia_loop_put(s);
    }
    free(features);
    return rc ? py_raise(rc) : PyLong_FromUnsignedLong(plan);
}

static PyObject *py_store_plan_shape(PyObject *self, PyObject *arg)
{
    unsigned long plan = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred())
        return NULL;
    BEGIN(self, "Store.plan_shape");
    uint32_t kind, keys, width;
    rc = persia_loop_plan_shape(s, (uint32_t)plan, &kind, &keys, &width);
    END();
    return rc ? py_raise(rc) : Py_BuildValue("(III)", kind, keys, width);
}

/* *out = group[key] as a float; left as it is where there is no such key. */
static int store_read_float(PyObject *group, PyObject *key, float *out)
{
    PyObject *value = PyDict_GetItemWithError(group, key);
    if (!value)
        return PyErr_Occurred() ? -1 : 0;
    *out = (float)PyFloat_AsDouble(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int store_read_group(const store_object *o, PyObject *group,
                            optim_args *a)
{
    *a = (optim_args){.grad_scale = 1, .momentum = 0};
    if (!PyDict_Check(group)) {
        PyErr_SetString(PyExc_TypeError, "a param group is a dict");
        return -1;
    }
    PyObject *kind = PyDict_GetItemWithError(group, o->algorithm);
    if (!kind) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_KeyError, "algorithm");
        return -1;
    }
    PyObject *text = PyUnicode_AsUTF8String(kind);
    if (!text)
        return -1;
    const char *name = PyBytes_AsString(text);
    uint32_t k = 0;
    while (name && k < OPTIM_KINDS && strcmp(persia_optim_name(k), name) != 0)
        k++;
    Py_DECREF(text);
    a->kind = k;
    for (size_t i = 0; i < persia_optim_hyper_list.n; i++) {
        const spec_field *f = &persia_optim_hyper_list.fields[i];
        float *member = (float *)((char *)&a->hyper + f->offset);
        if (f->kind == SPEC_FLOAT &&
            store_read_float(group, o->names[i], member))
            return -1;
    }
    PyObject *betas = PyDict_GetItemWithError(group, o->betas);
    if (!betas)
        return PyErr_Occurred() ? -1 : 0;
    double b1, b2;
    if (!PyArg_ParseTuple(betas, "dd", &b1, &b2))
        return -1;
    a->beta1 = (float)b1;
    a->beta2 = (float)b2;
    return 0;
}

static PyObject *py_store_apply(PyObject *self, PyObject *args)
{
    PyObject *groups, *scales;
    int all;
    if (!PyArg_ParseTuple(args, "OOp", &groups, &scales, &all))
        return NULL;
    Py_ssize_t n = PyList_Size(groups);
    if (n < 0)
        return NULL;
    if (scales != Py_None && PyList_Size(scales) != n) {
        PyErr_SetString(PyExc_ValueError, "one scale a group");
        return NULL;
    }
    optim_args *optim = calloc((size_t)n + 1, sizeof *optim);
    if (!optim)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        if (store_read_group((store_object *)self, PyList_GetItem(groups, i),
                             &optim[i]))
            goto fail;
        if (scales != Py_None) {
            double scale = PyFloat_AsDouble(PyList_GetItem(scales, i));
            if (PyErr_Occurred())
                goto fail;
            optim[i].grad_scale = (float)scale;
        }
    }
    loop *s;
    int rc = persia_loop_get(((store_object *)self)->handle, "update", &s,
                             NULL);
    if (!rc) {
        Py_BEGIN_ALLOW_THREADS rc = persia_loop_apply(
            s, all ? LOOP_ALL : LOOP_MINE, optim, (uint32_t)n);
        persia_loop_put(s);
        Py_END_ALLOW_THREADS
    }
    free(optim);
    if (rc)
        return py_raise(rc);
    Py_RETURN_NONE;
fail:
    free(optim);
    return NULL;
}

/* Seconds to nanoseconds; 0 (no limit) for None.  -1: an error is set. */
static int store_read_timeout(PyObject *arg, uint64_t *out)
{
    *out = 0;
    double seconds = arg == Py_None ? 0 : PyFloat_AsDouble(arg);
    if (PyErr_Occurred() || py_seconds(seconds, out))
        return -1;
    if (arg == Py_None || *out)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a timeout is a number of seconds above "
                    "0, or None");
    return -1;
}

static PyObject *py_store_flush(PyObject *self, PyObject *arg)
{
    uint64_t timeout;
    if (store_read_timeout(arg, &timeout))
        return NULL;
    BEGIN(self, "Store.flush");
    Py_BEGIN_ALLOW_THREADS rc = persia_loop_flush(s, timeout);
    END();
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(rc);
    Py_RETURN_NONE;
}

/* A method that is one call, without arguments, that may take long. */
#define WAITING_METHOD(name, what, call)                                      \
    static PyObject *py_store_##name(PyObject *self, PyObject *unused)        \
    {                                                                         \
        (void)unused;                                                         \
        BEGIN(self, what);                                                    \
        Py_BEGIN_ALLOW_THREADS                                                \
        rc = call;                                                            \
        END();                                                                \
        Py_END_ALLOW_THREADS                                                  \
        return rc ? py_raise(rc) : Py_NewRef(Py_None);                        \
    }
WAITING_METHOD(finish, "Store.close", persia_loop_finish(s))
WAITING_METHOD(settle, "Store", persia_loop_settle(s))
WAITING_METHOD(look, "Store.save", persia_client_look(c))
WAITING_METHOD(check_lost, "Store.flush", persia_client_check_lost(c))

static PyObject *py_store_counts(PyObject *self, PyObject *unused)
{
    (void)unused;
    BEGIN(self, "Store.counts");
    loop_counts counts;
    persia_loop_get_counts(s, &counts);
    END();
    return Py_BuildValue("(KKK)", (unsigned long long)counts.applied,
                         (unsigned long long)counts.failed,
                         (unsigned long long)counts.pending);
}

static PyObject *py_store_held(PyObject *self, PyObject *arg)
{
    int all = PyObject_IsTrue(arg);
    if (all < 0)
        return NULL;
    BEGIN(self, "Store");
    size_t n = persia_loop_pending_grads(s, all ? LOOP_ALL : LOOP_MINE);
    END();
    return PyLong_FromSize_t(n);
}

static PyObject *py_store_discard(PyObject *self, PyObject *arg)
{
    BEGIN(self, "Store.discard");
    Py_buffer of;
    size_t n = 0;
    int whose = PyBool_Check(arg);
    int bad = !whose && PyObject_GetBuffer(arg, &of, PyBUF_SIMPLE);
    if (whose) {
        n = persia_loop_discard(s, arg == Py_True ? LOOP_ALL : LOOP_MINE);
    } else if (!bad) {
        n = persia_loop_discard_of(s, of.buf, (size_t)of.len / 8);
        PyBuffer_Release(&of);
    }
    END();
    return bad ? NULL : PyLong_FromSize_t(n);
}

static PyObject *py_store_drop_error(PyObject *self, PyObject *unused)
{
    (void)unused;
    BEGIN(self, "Store.drop_error");
    persia_loop_drop_error(s);
    END();
    Py_RETURN_NONE;
}

static PyObject *py_store_forget(PyObject *self, PyObject *unused)
{
    (void)unused;
    BEGIN(self, "Store.forget");
    persia_loop_forget(s);
    END();
    Py_RETURN_NONE;
}

static PyObject *py_store_finite(PyObject *self, PyObject *unused)
{
    (void)unused;
    BEGIN(self, "Store.finite");
    uint32_t n = persia_client_tables(c);
    uint8_t *finite = malloc(n + 1);
    if (finite) {
        memset(finite, 1, n);
        Py_BEGIN_ALLOW_THREADS rc = persia_loop_finite(s, finite, n);
        Py_END_ALLOW_THREADS
    }
    END();
    PyObject *out =
        !finite ? PyErr_NoMemory()
        : rc    ? py_raise(rc)
                : PyBytes_FromStringAndSize((const char *)finite, n);
    free(finite);
    return out;
}

/* [(table, dim, ids, grads)], the arrays as bytes. */
static PyObject *sums_list(const batcher_sum *sums, size_t n)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < n && list; i++) {
        const batcher_sum *one = &sums[i];
        Py_ssize_t ids = (Py_ssize_t)(one->n * sizeof *one->ids);
        Py_ssize_t grads =
            (Py_ssize_t)(one->n * one->dim * sizeof *one->grads);
        PyObject *item = Py_BuildValue("(IIy#y#)", one->table, one->dim,
                                       (const char *)one->ids, ids,
                                       (const char *)one->grads, grads);
        if (!item || PyList_Append(list, item))
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *py_store_sums(PyObject *self, PyObject *unused)
{
    (void)unused;
    batcher_sum *sums = NULL;
    size_t n = 0;
    int finite = 1;
    BEGIN(self, "Store.sums");
    Py_BEGIN_ALLOW_THREADS rc = persia_loop_sums(s, &sums, &n, &finite);
    Py_END_ALLOW_THREADS
    END();
    if (rc)
        return py_raise(rc);
    PyObject *list = sums_list(sums, n);
    persia_batcher_sums_free(sums, n);
    return list ? Py_BuildValue("(ON)", finite ? Py_True : Py_False, list)
                : NULL;
}

static PyObject *py_store_updates(PyObject *self, PyObject *unused)
{
    (void)unused;
    BEGIN(self, "Store.updates");
    uint64_t n = persia_client_updates(c);
    END();
    return PyLong_FromUnsignedLongLong(n);
}

static PyObject *py_store_t(PyObject *self, PyObject *unused)
{
    (void)unused;
    BEGIN(self, "Store.t");
    uint64_t t = persia_client_t(c);
    END();
    return PyLong_FromUnsignedLongLong(t);
}

static PyObject *py_store_set_t(PyObject *self, PyObject *arg)
{
    unsigned long long base = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    BEGIN(self, "Store.set_t");
    persia_client_set_t(c, base);
    END();
    Py_RETURN_NONE;
}

static PyObject *py_store_stats(PyObject *self, PyObject *arg)
{
    unsigned long no = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred())
        return NULL;
    BEGIN(self, "Store.stats");
    table_stats t = {0};
    Py_BEGIN_ALLOW_THREADS rc = persia_client_stats(c, (uint32_t)no, &t);
    END();
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(rc);
    return py_of_spec(&persia_table_stats_list, &t, 0);
}

static PyObject *py_store_memory(PyObject *self, PyObject *unused)
{
    (void)unused;
    BEGIN(self, "Store.memory");
    uint64_t used = 0, maximum = 0;
    Py_BEGIN_ALLOW_THREADS rc = persia_client_memory(c, &used, &maximum);
    END();
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc)
              : Py_BuildValue("(KK)", (unsigned long long)used,
                              (unsigned long long)maximum);
}

static PyObject *py_store_state_floats(PyObject *self, PyObject *arg)
{
    unsigned long no = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred())
        return NULL;
    BEGIN(self, "Store");
    uint32_t floats = persia_client_state_floats(c, (uint32_t)no);
    END();
    return rc ? py_raise(rc) : PyLong_FromUnsignedLong(floats);
}

/* PERSIA_OK if the buffers of a get or set fit n rows of a table. */
static int store_check_buffers(const ps_client *c, uint32_t no, size_t n,
                               const Py_buffer *vectors,
                               const Py_buffer *state, const Py_buffer *found)
{
    const table_config *t = persia_client_table(c, no);
    if (!t)
        return persia_err_set(PERSIA_EARG, "the store has no table number %u",
                              no);
    size_t floats = persia_client_state_floats(c, no);
    int fit =
        (size_t)vectors->len == n * t->dim * sizeof(float) &&
        (!state->buf || (size_t)state->len == n * floats * sizeof(float)) &&
        (!found->buf || (size_t)found->len == n);
    return fit ? PERSIA_OK
               : persia_err_set(PERSIA_ESHAPE, "buffers do not fit %zu rows",
                                n);
}

/* The buffer of an argument that may be None (out->buf is NULL then). */
static int store_optional_buffer(PyObject *arg, int flags, Py_buffer *out)
{
    *out = (Py_buffer){0};
    return arg == Py_None ? 0 : PyObject_GetBuffer(arg, out, flags);
}

/* get and set differ in the direction of the copy alone. */
static PyObject *store_rows_call(PyObject *self, PyObject *args, int set)
{
    unsigned no;
    PyObject *state_arg = Py_None, *found_arg = Py_None;
    Py_buffer ids = {0}, vectors = {0}, state = {0}, found = {0};
    PyObject *ids_arg, *vectors_arg;
    int flags = set ? PyBUF_SIMPLE : PyBUF_WRITABLE;
    if (!PyArg_ParseTuple(args, "IOOO|O", &no, &ids_arg, &vectors_arg,
                          &state_arg, &found_arg))
        return NULL;
    PyObject *out = NULL;
    if (PyObject_GetBuffer(ids_arg, &ids, PyBUF_SIMPLE) ||
        PyObject_GetBuffer(vectors_arg, &vectors, flags) ||
        store_optional_buffer(state_arg, flags, &state) ||
        store_optional_buffer(found_arg, PyBUF_WRITABLE, &found))
        goto done;
    loop *s;
    ps_client *c;
    int rc = persia_loop_get(((store_object *)self)->handle,
                             set ? "Store.set_rows" : "Store.rows", &s, &c);
    if (!rc) {
        size_t n = (size_t)ids.len / sizeof(uint64_t);
        Py_BEGIN_ALLOW_THREADS
        rc = store_check_buffers(c, no, n, &vectors, &state, &found);
        if (!rc)
            rc = persia_loop_settle(s);
        if (!rc)
            rc = set ? persia_client_set(c, no, n, ids.buf, vectors.buf,
                                         state.buf)
                     : persia_client_get(c, no, n, ids.buf, vectors.buf,
                                         state.buf, found.buf);
        persia_loop_put(s);
        Py_END_ALLOW_THREADS
    }
    out = rc ? py_raise(rc) : Py_NewRef(Py_None);
done:
    PyBuffer_Release(&ids);
    PyBuffer_Release(&vectors);
    PyBuffer_Release(&state);
    PyBuffer_Release(&found);
    return out;
}

static PyObject *py_store_get(PyObject *self, PyObject *args)
{
    return store_rows_call(self, args, 0);
}

static PyObject *py_store_set(PyObject *self, PyObject *args)
{
    return store_rows_call(self, args, 1);
}

static PyObject *py_store_erase(PyObject *self, PyObject *args)
{
    unsigned no;
    PyObject *ids_arg;
    Py_buffer ids;
    uint64_t erased = 0;
    if (!PyArg_ParseTuple(args, "IO", &no, &ids_arg))
        return NULL;
    BEGIN(self, "Store.erase");
    if (PyObject_GetBuffer(ids_arg, &ids, PyBUF_SIMPLE)) {
        END();
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS rc = persia_loop_settle(s);
    if (!rc)
        rc = persia_client_erase(c, no, (size_t)ids.len / sizeof(uint64_t),
                                 ids.buf, &erased);
    END();
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&ids);
    return rc ? py_raise(rc) : PyLong_FromUnsignedLongLong(erased);
}

static PyObject *py_store_clear(PyObject *self, PyObject *arg)
{
    unsigned long no = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred())
        return NULL;
    BEGIN(self, "Store.clear");
    Py_BEGIN_ALLOW_THREADS rc = persia_loop_settle(s);
    if (!rc)
        rc = persia_client_clear(c, (uint32_t)no);
    END();
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(rc);
    Py_RETURN_NONE;
}

static PyObject *py_store_drop(PyObject *self, PyObject *arg)
{
    unsigned long no = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred())
        return NULL;
    BEGIN(self, "Store.drop");
    Py_BEGIN_ALLOW_THREADS rc = persia_loop_settle(s);
    if (!rc)
        rc = persia_client_drop(c, (uint32_t)no);
    END();
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

/* The ids of a table's rows, in memory that the caller frees. */
static int store_list_ids(loop *s, ps_client *c, uint32_t no, uint64_t **out,
                          size_t *n)
{
    enum { BLOCK = 1 << 20 };
    size_t room = 0;
    int rc = persia_loop_settle(s);
    for (uint32_t shard = 0; !rc && shard < persia_client_shards(c); shard++) {
        uint64_t cursor = 0;
        while (!rc && cursor != TABLE_LIST_END) {
            if (room - *n < BLOCK) {
                room = 2 * room + BLOCK;
                uint64_t *more = realloc(*out, room * sizeof *more);
                if (!more)
                    return persia_err_set(PERSIA_ENOMEM,
                                          "no memory for %zu ids", room);
                *out = more;
            }
            size_t got;
            rc = persia_client_list(c, no, shard, &cursor, room - *n,
                                    *out + *n, &got);
            *n += got;
        }
    }
    return rc;
}

/* Every id of a table, as the bytes of uint64. */
static PyObject *py_store_ids(PyObject *self, PyObject *arg)
{
    unsigned long no = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred())
        return NULL;
    BEGIN(self, "Store.ids");
    uint64_t *ids = NULL;
    size_t n = 0;
    Py_BEGIN_ALLOW_THREADS
    rc = store_list_ids(s, c, (uint32_t)no, &ids, &n);
    END();
    Py_END_ALLOW_THREADS
    PyObject *out =
        rc ? py_raise(rc)
           : PyBytes_FromStringAndSize((const char *)ids,
                                       (Py_ssize_t)(n * sizeof *ids));
    free(ids);
    return out;
}

#define METHOD(name, flags, text)                                             \
    {#name, (PyCFunction)(void (*)(void))py_store_##name, flags, text}

static PyMethodDef methods[] = {
    METHOD(close, METH_NOARGS, "close()"),
    METHOD(declare, METH_VARARGS | METH_KEYWORDS,
           "declare(**config) -> (number, created)"),
    METHOD(plan, METH_VARARGS,
           "plan(kind, keys, [(name, key, table, pooling, trainable)]) -> "
           "number"),
    METHOD(plan_shape, METH_O, "plan_shape(plan) -> (kind, keys, width)"),
    METHOD(apply, METH_VARARGS,
           "apply(groups, scales, all); all: not just this thread's"),
    METHOD(flush, METH_O, "flush(seconds or None): waits for all updates"),
    METHOD(finish, METH_NOARGS, "finish(): flushes, before close()"),
    METHOD(settle, METH_NOARGS, "settle(): waits, without their errors"),
    METHOD(drop_error, METH_NOARGS, "drop_error(): one that was not raised"),
    METHOD(counts, METH_NOARGS, "counts() -> (applied, failed, pending)"),
    METHOD(held, METH_O, "held(all) -> gradients that wait"),
    METHOD(discard, METH_O, "discard(all or tickets) -> gradients dropped"),
    METHOD(forget, METH_NOARGS,
           "forget(): forwards so far have no backward any more"),
    METHOD(finite, METH_NOARGS, "finite() -> bytes, 0 for tables with NaN"),
    METHOD(sums, METH_NOARGS,
           "sums() -> (finite, [(table, dim, ids, grads)])"),
    METHOD(updates, METH_NOARGS, "updates() -> updates applied"),
    METHOD(t, METH_NOARGS, "t() -> the t that updates have gone on from"),
    METHOD(set_t, METH_O, "set_t(base): updates have a higher t from now on"),
    METHOD(stats, METH_O, "stats(table) -> dict"),
    METHOD(look, METH_NOARGS, "look(): raises what servers have lost, once"),
    METHOD(check_lost, METH_NOARGS, "check_lost(): the same, of workers'"),
    METHOD(memory, METH_NOARGS, "memory() -> (used, maximum) bytes"),
    METHOD(state_floats, METH_O, "state_floats(table) -> floats a row"),
    METHOD(get, METH_VARARGS, "get(table, ids, vectors, state, found)"),
    METHOD(set, METH_VARARGS, "set(table, ids, vectors, state)"),
    METHOD(erase, METH_VARARGS, "erase(table, ids) -> rows that there were"),
    METHOD(clear, METH_O, "clear(table)"),
    METHOD(drop, METH_O, "drop(table)"),
    METHOD(ids, METH_O, "ids(table) -> bytes of uint64"),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"handle", store_handle, NULL, "the store's number for torch.ops", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Store(threads, memory_limit, remote=None)\n--\n\n"
                "Tables in this process, or behind the servers that the dict "
                "`remote` names."},
    {Py_tp_init, (void *)py_store_init},
    {Py_tp_dealloc, (void *)py_store_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "persia._core.Store",
    .basicsize = sizeof(store_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int py_add_store(PyObject *module)
{
    return py_add_type(module, &spec) ? 0 : -1;
}
