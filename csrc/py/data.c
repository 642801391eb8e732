/* data.c: the room `data` for Python: arrays in and out as buffers, the GIL
 * released while lines are read or rows are made.
 *
 * Arguments are checked for size here; the shapes and dtypes of the arrays
 * are the business of persia.datasets, the only caller. */
#include "data/data.h"

#include <string.h>

#include "py/array.h"
#include "py/py.h"

static PyObject *py_value_hash(PyObject *module, PyObject *args)
{
    (void)module;
    const char *bytes;
    Py_ssize_t n;
    unsigned long long salt = 0;
    if (!PyArg_ParseTuple(args, "y#|K", &bytes, &n, &salt))
        return NULL;
    return PyLong_FromLongLong(
        (long long)persia_value_hash(bytes, (size_t)n, salt));
}

/* The common arguments of persia_strings_hash and persia_strings_split. */
typedef struct strings_args {
    array offsets, bytes, ids;
    string_column column;
    unsigned long long salt;
} strings_args;

static void strings_drop(strings_args *a)
{
    array_drop(&a->offsets);
    array_drop(&a->bytes);
    array_drop(&a->ids);
}

static int strings_take(PyObject *offsets, PyObject *bytes, PyObject *ids,
                        Py_ssize_t first, Py_ssize_t n, size_t ids_bytes,
                        strings_args *a)
{
    if (first < 0 || n < 0) {
        PyErr_Format(PyExc_ValueError, "first is %zd and n %zd", first, n);
        return -1;
    }
    size_t width = a->column.wide ? sizeof(int64_t) : sizeof(int32_t);
    size_t end = (size_t)first + (size_t)n + 1;
    if (array_take(offsets, "offsets", 0, end * width, &a->offsets))
        return -1;
    a->column.n = (size_t)n;
    a->column.offsets = (const char *)a->offsets.view.buf +
                        (size_t)first * width;
    if (bytes != Py_None) {
        if (array_take(bytes, "bytes", 0, 0, &a->bytes))
            return -1;
        a->column.bytes = a->bytes.view.buf;
        a->column.size = (size_t)a->bytes.view.len;
    }
    return array_take(ids, "ids", 1, ids_bytes, &a->ids);
}

static PyObject *py_strings_hash(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *offsets, *bytes, *ids;
    Py_ssize_t first, n;
    strings_args a = {0};
    if (!PyArg_ParseTuple(args, "OOnnppKO", &offsets, &bytes, &first, &n,
                          &a.column.wide, &a.column.strip, &a.salt, &ids))
        return NULL;
    PyObject *result = NULL;
    if (strings_take(offsets, bytes, ids, first, n,
                     (size_t)(n < 0 ? 0 : n) * sizeof(uint64_t), &a))
        goto done;
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = persia_strings_hash(&a.column, a.salt,
                                                    a.ids.view.buf);
    Py_END_ALLOW_THREADS
    result = rc ? py_raise(rc) : Py_NewRef(Py_None);
done:
    strings_drop(&a);
    return result;
}

static PyObject *py_strings_split(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *offsets, *bytes, *ids, *lengths;
    Py_ssize_t first, n, separator_n;
    const char *separator;
    strings_args a = {0};
    array out = {0};
    if (!PyArg_ParseTuple(args, "OOnnppy#KOO", &offsets, &bytes, &first, &n,
                          &a.column.wide, &a.column.strip, &separator,
                          &separator_n, &a.salt, &ids, &lengths))
        return NULL;
    if (separator_n != 1)
        return PyErr_Format(PyExc_ValueError,
                            "the separator has %zd bytes, need one",
                            separator_n);
    PyObject *result = NULL;
    if (strings_take(offsets, bytes, ids, first, n, 0, &a) ||
        array_take(lengths, "lengths", 1, (size_t)n * sizeof(int64_t), &out))
        goto done;
    int rc;
    size_t ids_n = 0;
    Py_BEGIN_ALLOW_THREADS rc = persia_strings_split(
        &a.column, *separator, a.salt, a.ids.view.buf,
        (size_t)a.ids.view.len / sizeof(uint64_t), out.view.buf, &ids_n);
    Py_END_ALLOW_THREADS
    result = rc ? py_raise(rc) : PyLong_FromSize_t(ids_n);
done:
    strings_drop(&a);
    array_drop(&out);
    return result;
}

static PyObject *py_lines_skip(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *text;
    int final;
    unsigned long long lines;
    array a = {0};
    if (!PyArg_ParseTuple(args, "OpK", &text, &final, &lines))
        return NULL;
    if (array_take(text, "text", 0, 0, &a))
        return NULL;
    size_t used;
    uint64_t n = lines;
    Py_BEGIN_ALLOW_THREADS used =
        persia_lines_skip(a.view.buf, (size_t)a.view.len, final, &n);
    Py_END_ALLOW_THREADS
    array_drop(&a);
    return Py_BuildValue("nK", (Py_ssize_t)used, (unsigned long long)n);
}

static PyObject *py_json_lines(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *text;
    Py_ssize_t most;
    array a = {0};
    if (!PyArg_ParseTuple(args, "On", &text, &most))
        return NULL;
    if (most < 0)
        return PyErr_Format(PyExc_ValueError, "most is %zd", most);
    if (array_take(text, "text", 0, 0, &a))
        return NULL;
    uint64_t deep, odd, lines;
    Py_BEGIN_ALLOW_THREADS lines = persia_json_lines(
        a.view.buf, (size_t)a.view.len, (size_t)most, &deep, &odd);
    Py_END_ALLOW_THREADS
    array_drop(&a);
    return Py_BuildValue("KKK", (unsigned long long)lines,
                         (unsigned long long)deep, (unsigned long long)odd);
}

/* ---- CriteoReader ---------------------------------------------------- */

enum { FAULTS_KEPT = 64 };

/* Used by one thread at a time. */
typedef struct reader_object {
    PyObject_HEAD
    criteo_reader reader;
    line_fault faults[FAULTS_KEPT];
} reader_object;

static int reader_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    reader_object *r = (reader_object *)self;
    PyObject *salts;
    if (kwargs || !PyArg_ParseTuple(args, "pO!", &r->reader.has_label,
                                    &PyTuple_Type, &salts))
        return -1;
    if (PyTuple_Size(salts) != CRITEO_CATEGORIES) {
        PyErr_SetString(PyExc_ValueError, "need a salt for each category");
        return -1;
    }
    for (Py_ssize_t i = 0; i < CRITEO_CATEGORIES; i++) {
        r->reader.salts[i] =
            PyLong_AsUnsignedLongLong(PyTuple_GetItem(salts, i));
        if (PyErr_Occurred())
            return -1;
    }
    r->reader.fault = r->faults;
    r->reader.fault_room = FAULTS_KEPT;
    return 0;
}

static void reader_dealloc(PyObject *self)
{
    py_free_object(self);
}

static PyObject *reader_read(PyObject *self, PyObject *args)
{
    criteo_reader *r = &((reader_object *)self)->reader;
    PyObject *text, *label, *integers, *ids;
    int final;
    Py_ssize_t n, room;
    array a[4] = {{.held = 0}};
    if (!PyArg_ParseTuple(args, "OpnnOOO", &text, &final, &n, &room, &label,
                          &integers, &ids))
        return NULL;
    if (n < 0 || room < n)
        return PyErr_Format(PyExc_ValueError, "n is %zd and room %zd", n,
                            room);
    PyObject *result = NULL;
    size_t size = (size_t)room;
    if (array_take(text, "text", 0, 0, &a[0]) ||
        (r->has_label &&
         array_take(label, "label", 1, size * sizeof(float), &a[1])) ||
        array_take(integers, "integers", 1,
                   size * CRITEO_INTEGERS * sizeof(float), &a[2]) ||
        array_take(ids, "ids", 1, size * CRITEO_CATEGORIES * sizeof(uint64_t),
                   &a[3]))
        goto done;
    criteo_rows rows = {
        .n = (size_t)n,
        .room = size,
        .label = r->has_label ? a[1].view.buf : NULL,
        .integers = a[2].view.buf,
        .ids = a[3].view.buf,
    };
    size_t used;
    Py_BEGIN_ALLOW_THREADS used = persia_criteo_read(
        r, a[0].view.buf, (size_t)a[0].view.len, final, &rows);
    Py_END_ALLOW_THREADS
    result =
        Py_BuildValue("nn", (Py_ssize_t)used, (Py_ssize_t)rows.n);
done:
    for (int i = 0; i < 4; i++)
        array_drop(&a[i]);
    return result;
}

static PyObject *reader_take_faults(PyObject *self, PyObject *unused)
{
    (void)unused;
    reader_object *r = (reader_object *)self;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < r->reader.fault_n; i++) {
        const line_fault *f = &r->faults[i];
        PyObject *item =
            Py_BuildValue("KII", (unsigned long long)f->line,
                          (unsigned)f->kind, (unsigned)f->column);
        if (!item || PyList_Append(list, item))
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    if (list)
        r->reader.fault_n = 0;
    return list;
}

static PyObject *reader_pass(PyObject *self, PyObject *args)
{
    unsigned long long lines;
    if (!PyArg_ParseTuple(args, "K", &lines))
        return NULL;
    ((reader_object *)self)->reader.line += lines;
    return Py_NewRef(Py_None);
}

static PyObject *reader_get(PyObject *self, void *which)
{
    const criteo_reader *r = &((reader_object *)self)->reader;
    return PyLong_FromUnsignedLongLong(which ? r->faults : r->line);
}

static PyMethodDef reader_methods[] = {
    {"read", reader_read, METH_VARARGS,
     "read(text, final, n, room, label, integers, ids)\n--\n\n"
     "Reads lines into rows n .. room - 1; returns (bytes read, rows now)."},
    {"take_faults", reader_take_faults, METH_NOARGS,
     "take_faults()\n--\n\n[(line, kind, column)] of the first malformed "
     "lines since the last call."},
    {"pass_lines", reader_pass, METH_VARARGS,
     "pass_lines(n)\n--\n\nCounts n lines that were skipped."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reader_getset[] = {
    {"lines", reader_get, NULL, "Lines read or passed so far.", NULL},
    {"faults", reader_get, NULL, "Malformed lines so far.", (void *)1},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, (void *)"CriteoReader(has_label, salts)\n--\n\n"
                        "The state of reading one file."},
    {Py_tp_init, (void *)reader_init},
    {Py_tp_dealloc, (void *)reader_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_getset, reader_getset},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "persia._core.CriteoReader",
    .basicsize = sizeof(reader_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reader_slots,
};

/* ---- Synth ----------------------------------------------------------- */

/* Constant once made: any number of threads may read from it. */
typedef struct synth_object {
    PyObject_HEAD
    synth *s;
    synth_config config;
} synth_object;

static int synth_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"seed", "singles", "multis", "max_length",
                            "dense", "vocabulary", "zipf", "ctr", "signal",
                            NULL};
    synth_object *o = (synth_object *)self;
    synth_config c;
    persia_synth_config_init(&c);
    unsigned long long seed = c.seed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$KIIIIIddd", names,
                                     &seed, &c.singles, &c.multis,
                                     &c.max_length, &c.dense, &c.vocabulary,
                                     &c.zipf, &c.ctr, &c.signal))
        return -1;
    c.seed = seed;
    synth *s;
    int rc = persia_synth_create(&c, &s);
    if (rc) {
        py_raise(rc);
        return -1;
    }
    persia_synth_destroy(o->s);
    o->s = s;
    o->config = c;
    return 0;
}

static void synth_dealloc(PyObject *self)
{
    persia_synth_destroy(((synth_object *)self)->s);
    py_free_object(self);
}

/* Whether the object was initialised (__new__ alone does not). */
static int synth_made(const synth_object *o)
{
    if (!o->s)
        PyErr_SetString(PyExc_ValueError, "Synth.__init__ was not called");
    return o->s != NULL;
}

static PyObject *py_ids_room(PyObject *self, PyObject *args)
{
    synth_object *o = (synth_object *)self;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "n", &n) || !synth_made(o))
        return NULL;
    return PyLong_FromSize_t(
        persia_synth_ids_room(o->s, (size_t)(n < 0 ? 0 : n)));
}

static PyObject *py_synth_read(PyObject *self, PyObject *args)
{
    synth_object *o = (synth_object *)self;
    unsigned long long first;
    Py_ssize_t n;
    PyObject *label, *logit, *dense, *ids, *lengths;
    array a[5] = {{.held = 0}};
    if (!PyArg_ParseTuple(args, "KnOOOOO", &first, &n, &label, &logit, &dense,
                          &ids, &lengths) ||
        !synth_made(o))
        return NULL;
    if (n < 0)
        return PyErr_Format(PyExc_ValueError, "n is %zd", n);
    PyObject *result = NULL;
    size_t size = (size_t)n,
           features = (size_t)o->config.singles + o->config.multis;
    if (array_take(label, "label", 1, size * sizeof(float), &a[0]) ||
        (logit != Py_None &&
         array_take(logit, "logit", 1, size * sizeof(float), &a[1])) ||
        array_take(dense, "dense", 1, size * o->config.dense * sizeof(float),
                   &a[2]) ||
        array_take(ids, "ids", 1,
                   persia_synth_ids_room(o->s, size) * sizeof(uint64_t),
                   &a[3]) ||
        array_take(lengths, "lengths", 1, size * features * sizeof(int64_t),
                   &a[4]))
        goto done;
    synth_rows rows = {
        .label = a[0].view.buf,
        .logit = a[1].held ? a[1].view.buf : NULL,
        .dense = a[2].view.buf,
        .ids = a[3].view.buf,
        .lengths = a[4].view.buf,
    };
    size_t total;
    Py_BEGIN_ALLOW_THREADS total = persia_synth_read(o->s, first, size, &rows);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSize_t(total);
done:
    for (int i = 0; i < 5; i++)
        array_drop(&a[i]);
    return result;
}

static PyMethodDef synth_methods[] = {
    {"ids_room", py_ids_room, METH_VARARGS,
     "ids_room(n)\n--\n\nThe most ids that n rows can have."},
    {"read", py_synth_read, METH_VARARGS,
     "read(first, n, label, logit, dense, ids, lengths)\n--\n\n"
     "Writes n rows; returns the number of ids.  logit may be None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot synth_slots[] = {
    {Py_tp_doc,
     (void *)"Synth(*, seed, singles, multis, max_length, dense, vocabulary, "
             "zipf, ctr, signal)\n--\n\nA made click log."},
    {Py_tp_init, (void *)synth_init},
    {Py_tp_dealloc, (void *)synth_dealloc},
    {Py_tp_methods, synth_methods},
    {0, NULL},
};

static PyType_Spec synth_spec = {
    .name = "persia._core.Synth",
    .basicsize = sizeof(synth_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = synth_slots,
};

static PyMethodDef functions[] = {
    {"value_hash", py_value_hash, METH_VARARGS,
     "value_hash(value, salt=0)\n--\n\n"
     "The id of the bytes of a value: XXH64 with seed salt, as int64."},
    {"strings_hash", py_strings_hash, METH_VARARGS,
     "strings_hash(offsets, bytes, first, n, wide, strip, salt, ids)\n--\n\n"
     "Ids of the strings first .. first + n - 1 of an Arrow array."},
    {"strings_split", py_strings_split, METH_VARARGS,
     "strings_split(offsets, bytes, first, n, wide, strip, separator, salt, "
     "ids, lengths)\n--\n\nAs persia_strings_hash, of the parts of each "
     "string; "
     "returns the number of ids."},
    {"lines_skip", py_lines_skip, METH_VARARGS,
     "lines_skip(text, final, lines)\n--\n\n"
     "Passes over lines; returns (bytes, lines)."},
    {"json_lines", py_json_lines, METH_VARARGS,
     "json_lines(text, most)\n--\n\n"
     "(lines, those with more than most brackets within each other, those "
     "that are no object by their ends)."},
    {NULL, NULL, 0, NULL},
};

int py_add_data(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) ||
        !py_add_type(module, &reader_spec) ||
        !py_add_type(module, &synth_spec))
        return -1;
    return 0;
}
