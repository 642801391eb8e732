/* rows_file.c: the room `rows_file` for Python: files of rows that are served.
 *
 * Arguments are checked for size here; what files hold is the business of
 * persia.serving, the only caller. */
#include "rows_file/rows_file.h"

#include <stdlib.h>

#include "pool/pool.h"
#include "py/array.h"
#include "py/py.h"

/* ---- RowsWriter --------------------------------------------------------- */

typedef struct writer_object {
    PyObject_HEAD
    rows_writer *writer;
    uint32_t dim;
} writer_object;

static PyObject *writer_new(PyTypeObject *type, PyObject *args,
                            PyObject *kwargs)
{
    int folder;
    const char *name, *metadata;
    rows_config c;
    unsigned long long key, rows;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "isIIKKs", &folder, &name, &c.type, &c.dim,
                          &key, &rows, &metadata))
        return NULL;
    c.key = key;
    writer_object *w = py_new_object(type);
    if (!w)
        return NULL;
    w->dim = c.dim;
    const int rc = persia_rows_writer_open(folder, name, &c, rows, metadata,
                                           &w->writer);
    if (!rc)
        return (PyObject *)w;
    Py_DECREF(w);
    return py_raise(rc);
}

static void writer_dealloc(PyObject *self)
{
    persia_rows_writer_close(((writer_object *)self)->writer);
    py_free_object(self);
}

static PyObject *writer_add(PyObject *self, PyObject *args)
{
    writer_object *w = (writer_object *)self;
    PyObject *ids_object, *vectors_object;
    array ids, vectors;
    int rc = 0;
    if (!PyArg_ParseTuple(args, "OO", &ids_object, &vectors_object) ||
        array_take(ids_object, "ids", 0, 0, &ids))
        return NULL;
    const size_t n = (size_t)ids.view.len / sizeof(uint64_t);
    const int took = array_take(vectors_object, "vectors", 0,
                                n * w->dim * sizeof(float), &vectors);
    if (!took) {
        Py_BEGIN_ALLOW_THREADS
        rc = persia_rows_writer_add(w->writer, n, ids.view.buf,
                                    vectors.view.buf);
        Py_END_ALLOW_THREADS
        array_drop(&vectors);
    }
    array_drop(&ids);
    if (took)
        return NULL;
    if (rc)
        return py_raise(rc);
    Py_RETURN_NONE;
}

static PyObject *writer_finish(PyObject *self, PyObject *unused)
{
    writer_object *w = (writer_object *)self;
    int rc;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_rows_writer_finish(w->writer);
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(rc);
    Py_RETURN_NONE;
}

static PyMethodDef writer_methods[] = {
    {"add", writer_add, METH_VARARGS,
     "add(ids, vectors)\n--\n\nRows: uint64 [n] and float32 [n, dim]."},
    {"finish", writer_finish, METH_NOARGS,
     "finish()\n--\n\nAll rows were added: makes the file whole."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, (void *)"RowsWriter(folder, name, type, dim, key, rows, "
                        "metadata)\n--\n\nA new file of rows to be served."},
    {Py_tp_new, (void *)writer_new},
    {Py_tp_dealloc, (void *)writer_dealloc},
    {Py_tp_methods, writer_methods},
    {0, NULL},
};

static PyType_Spec writer_spec = {
    .name = "persia._core.RowsWriter",
    .basicsize = (int)sizeof(writer_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = writer_slots,
};

/* ---- RowsFile ----------------------------------------------------------- */

typedef struct file_object {
    PyObject_HEAD
    rows_file *file;
    uint32_t stride;
} file_object;

static PyObject *file_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int folder;
    const char *name;
    rows_config c;
    unsigned long long key;
    PyObject *options;
    table_config absent;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "isIIKO!", &folder, &name, &c.type, &c.dim,
                          &key, &PyDict_Type, &options))
        return NULL;
    c.key = key;
    PyObject *none = PyTuple_New(0);
    if (!none || py_table_config(none, options, &absent)) {
        Py_XDECREF(none);
        return NULL;
    }
    Py_DECREF(none);
    file_object *f = py_new_object(type);
    if (!f)
        return NULL;
    f->stride = persia_rows_stride(&c);
    const int rc = persia_rows_file_open(folder, name, &c, &absent, &f->file);
    if (!rc)
        return (PyObject *)f;
    Py_DECREF(f);
    return py_raise(rc);
}

static void file_dealloc(PyObject *self)
{
    persia_rows_file_close(((file_object *)self)->file);
    py_free_object(self);
}

static PyObject *file_look_up(PyObject *self, PyObject *args)
{
    const rows_file *f = ((file_object *)self)->file;
    PyObject *ids_object, *out_object;
    array ids, out;
    uint64_t absent = 0;
    int rc = 0;
    if (!PyArg_ParseTuple(args, "OO", &ids_object, &out_object) ||
        array_take(ids_object, "ids", 0, 0, &ids))
        return NULL;
    const size_t n = (size_t)ids.view.len / sizeof(uint64_t);
    const uint32_t dim = persia_rows_file_dim(f);
    const int took = array_take(out_object, "out", 1, n * dim * sizeof(float),
                                &out);
    if (!took) {
        Py_BEGIN_ALLOW_THREADS
        rc = persia_rows_file_look_up(f, n, ids.view.buf, out.view.buf, dim,
                                      &absent);
        Py_END_ALLOW_THREADS
        array_drop(&out);
    }
    array_drop(&ids);
    if (took)
        return NULL;
    return rc ? py_raise(rc) : PyLong_FromUnsignedLongLong(absent);
}

static PyObject *file_contains(PyObject *self, PyObject *args)
{
    const rows_file *f = ((file_object *)self)->file;
    PyObject *ids_object, *out_object;
    array ids, out;
    if (!PyArg_ParseTuple(args, "OO", &ids_object, &out_object) ||
        array_take(ids_object, "ids", 0, 0, &ids))
        return NULL;
    const size_t n = (size_t)ids.view.len / sizeof(uint64_t);
    int rc = 0;
    const int took = array_take(out_object, "out", 1, n, &out);
    if (!took) {
        Py_BEGIN_ALLOW_THREADS
        rc = persia_rows_file_contains(f, n, ids.view.buf, out.view.buf);
        Py_END_ALLOW_THREADS
        array_drop(&out);
    }
    array_drop(&ids);
    if (took)
        return NULL;
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyObject *file_apply(PyObject *self, PyObject *args)
{
    file_object *o = (file_object *)self;
    PyObject *gone_object, *rows_object;
    array gone, rows;
    int rc = 0;
    if (!PyArg_ParseTuple(args, "OO", &gone_object, &rows_object) ||
        array_take(gone_object, "gone", 0, 0, &gone))
        return NULL;
    const int took = array_take(rows_object, "rows", 0, 0, &rows);
    if (!took) {
        const size_t n = (size_t)rows.view.len / o->stride;
        Py_BEGIN_ALLOW_THREADS
        rc = persia_rows_file_apply(
            o->file, (size_t)gone.view.len / sizeof(uint64_t), gone.view.buf,
            n, rows.view.buf);
        Py_END_ALLOW_THREADS
        array_drop(&rows);
    }
    array_drop(&gone);
    if (took)
        return NULL;
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyObject *file_limit(PyObject *self, PyObject *arg)
{
    const unsigned long long bytes = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    persia_rows_file_limit(((file_object *)self)->file, bytes);
    Py_RETURN_NONE;
}

static PyObject *file_fresh(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(
        persia_rows_file_fresh(((file_object *)self)->file));
}

static PyObject *file_read(PyObject *self, PyObject *args)
{
    const rows_file *f = ((file_object *)self)->file;
    unsigned long long first;
    PyObject *ids_object, *out_object;
    array ids, out;
    int rc = 0;
    if (!PyArg_ParseTuple(args, "KOO", &first, &ids_object, &out_object) ||
        array_take(ids_object, "ids", 1, 0, &ids))
        return NULL;
    const size_t n = (size_t)ids.view.len / sizeof(uint64_t);
    const size_t dim = persia_rows_file_dim(f);
    const int took = array_take(out_object, "vectors", 1,
                                n * dim * sizeof(float), &out);
    if (!took) {
        Py_BEGIN_ALLOW_THREADS
        rc = persia_rows_file_read(f, first, n, ids.view.buf, out.view.buf);
        Py_END_ALLOW_THREADS
        array_drop(&out);
    }
    array_drop(&ids);
    if (took)
        return NULL;
    if (rc)
        return py_raise(rc);
    Py_RETURN_NONE;
}

static PyObject *file_check(PyObject *self, PyObject *unused)
{
    int rc;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_rows_file_check(((file_object *)self)->file);
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(rc);
    Py_RETURN_NONE;
}

static PyObject *file_rows(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(
        persia_rows_file_rows(((file_object *)self)->file));
}

static PyMethodDef file_methods[] = {
    {"look_up", file_look_up, METH_VARARGS,
     "look_up(ids, out)\n--\n\nThe vectors of ids, uint64 [n], into float32 "
     "[n, dim]; how many of the ids have no row."},
    {"contains", file_contains, METH_VARARGS,
     "contains(ids, out)\n--\n\nWhich of ids, uint64 [n], have a row, into "
     "uint8 [n]."},
    {"read", file_read, METH_VARARGS,
     "read(first, ids, vectors)\n--\n\nRows from a number on, in the order "
     "of the file, into uint64 [n] and float32 [n, dim]."},
    {"apply", file_apply, METH_VARARGS,
     "apply(gone, rows)\n--\n\nFrom now on these ids, uint64 [n], have no "
     "row, and these rows, uint8 [n, stride], are there."},
    {"limit", file_limit, METH_O,
     "limit(bytes)\n--\n\nBytes that such rows may take; 0: any."},
    {"check", file_check, METH_NOARGS,
     "check()\n--\n\nSearches for every row."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef file_getset[] = {
    {"rows", file_rows, NULL, "How many there are.", NULL},
    {"fresh", file_fresh, NULL, "Ids that were applied.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot file_slots[] = {
    {Py_tp_doc,
     (void *)"RowsFile(folder, name, type, dim, key, absent)\n--\n\nA file of "
             "rows, mapped; absent: options of the table whose initial "
             "vectors ids without a row have, as for Store.declare()."},
    {Py_tp_new, (void *)file_new},
    {Py_tp_dealloc, (void *)file_dealloc},
    {Py_tp_methods, file_methods},
    {Py_tp_getset, file_getset},
    {0, NULL},
};

static PyType_Spec file_spec = {
    .name = "persia._core.RowsFile",
    .basicsize = (int)sizeof(file_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = file_slots,
};

/* ---- batches ------------------------------------------------------------ */

/* [(file, feature, kind, column)]; the caller's to free, NULL with an
 * exception set. */
static rows_part *read_parts(PyObject *list, size_t *n)
{
    const Py_ssize_t count = PyList_Size(list);
    if (count < 0)
        return NULL;
    rows_part *parts = calloc((size_t)count + 1, sizeof *parts);
    if (!parts) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *file;
        unsigned feature, column;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "OIII", &file, &feature,
                              &parts[i].kind, &column)) {
            free(parts);
            return NULL;
        }
        parts[i].file = ((file_object *)file)->file;
        parts[i].feature = feature;
        parts[i].column = column;
    }
    *n = (size_t)count;
    return parts;
}

/* Bags of a feature, and whether the output has as many rows as it needs. */
static int batch_shape(rows_batch *b, const array *offsets, const array *out,
                       const rows_part *parts, size_t parts_n)
{
    const size_t all = offsets->held
                           ? (size_t)offsets->view.len / sizeof(int64_t) - 1
                           : b->n;
    size_t rows;
    if (!b->features || !b->width || all % b->features ||
        (offsets->held && !offsets->view.len)) {
        PyErr_Format(PyExc_ValueError, "%zu bags of %zu features", all,
                     b->features);
        return -1;
    }
    b->bags = rows = all / b->features;
    for (size_t i = 0; i < parts_n; i++)
        if (parts[i].kind == POOL_NONE)
            rows = b->n > rows ? b->n : rows;
    if ((size_t)out->view.len >= rows * b->width * sizeof(float))
        return 0;
    PyErr_Format(PyExc_ValueError, "out has %zd bytes for %zu rows",
                 out->view.len, rows);
    return -1;
}

static PyObject *run_batch(rows_batch *b, const rows_part *parts,
                           size_t parts_n)
{
    rows_counts counts;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_rows_file_batch(b, parts, parts_n, &counts);
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc)
              : Py_BuildValue("(KK)", (unsigned long long)counts.ids,
                              (unsigned long long)counts.absent);
}

static PyObject *rows_batch_(PyObject *module, PyObject *args)
{
    PyObject *list, *objects[4], *answer = NULL;
    array ids = {.held = 0}, offsets = ids, weights = ids, out = ids;
    unsigned features, width;
    size_t parts_n = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!IOOOOI", &PyList_Type, &list, &features,
                          &objects[0], &objects[1], &objects[2], &objects[3],
                          &width))
        return NULL;
    rows_part *parts = read_parts(list, &parts_n);
    if (!parts || array_take(objects[0], "ids", 0, 0, &ids))
        goto end;
    rows_batch b = {.features = features,
                    .n = (size_t)ids.view.len / sizeof(uint64_t),
                    .ids = ids.view.buf,
                    .width = width};
    if ((objects[1] != Py_None &&
         array_take(objects[1], "offsets", 0, 0, &offsets)) ||
        (objects[2] != Py_None &&
         array_take(objects[2], "weights", 0, b.n * sizeof(float),
                    &weights)) ||
        array_take(objects[3], "out", 1, 0, &out) ||
        batch_shape(&b, &offsets, &out, parts, parts_n))
        goto end;
    b.offsets = offsets.held ? offsets.view.buf : NULL;
    b.weights = weights.held ? weights.view.buf : NULL;
    b.out = out.view.buf;
    answer = run_batch(&b, parts, parts_n);
end:
    array_drop(&ids);
    array_drop(&offsets);
    array_drop(&weights);
    array_drop(&out);
    free(parts);
    return answer;
}

static PyObject *rows_stride_(PyObject *module, PyObject *args)
{
    rows_config c = {.key = 1};
    (void)module;
    if (!PyArg_ParseTuple(args, "II", &c.type, &c.dim))
        return NULL;
    return PyLong_FromUnsignedLong(persia_rows_stride(&c));
}

static PyMethodDef functions[] = {
    {"rows_stride", rows_stride_, METH_VARARGS,
     "rows_stride(type, dim)\n--\n\nBytes of a row; 0: there are none."},
    {"rows_batch", rows_batch_, METH_VARARGS,
     "rows_batch(parts, features, ids, offsets, weights, out, width)\n--\n\n"
     "Looks up a batch, and pools it.  parts: [(RowsFile, feature, "
     "pooling, first column)]; offsets and weights may be None; out: float32 "
     "[bags or ids, width]; how many ids were looked up, each of equal bags "
     "once, and how many of these have no row."},
    {NULL, NULL, 0, NULL},
};

int py_add_rows_file(PyObject *module)
{
    return PyModule_AddFunctions(module, functions) ||
                   PyModule_AddIntConstant(module, "ROWS_FP32", ROWS_FP32) ||
                   PyModule_AddIntConstant(module, "ROWS_FP16", ROWS_FP16) ||
                   PyModule_AddIntConstant(module, "ROWS_INT8", ROWS_INT8) ||
                   PyModule_AddIntConstant(module, "ROWS_INT4", ROWS_INT4) ||
                   !py_add_type(module, &writer_spec) ||
                   !py_add_type(module, &file_spec)
               ? -1
               : 0;
}
