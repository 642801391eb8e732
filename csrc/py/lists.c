/* lists.c: the lists of spec as Python data, and structs of them as dicts. */
#include <string.h>

#include "batch/batch.h"
#include "pool/pool.h"
#include "py/py.h"
#include "wire/wire.h"

/* ---- a struct as a dict ------------------------------------------------- */

static PyObject *lists_value_of(const spec_field *f, const char *member,
                                int named)
{
    uint32_t small;
    uint64_t large;
    float real;
    switch (f->kind) {
    case SPEC_NAME:
        return PyUnicode_FromString(member);
    case SPEC_U64:
        memcpy(&large, member, sizeof large);
        return PyLong_FromUnsignedLongLong(large);
    case SPEC_FLOAT:
        memcpy(&real, member, sizeof real);
        return PyFloat_FromDouble((double)real);
    case SPEC_U32:
    case SPEC_BOOL:
    case SPEC_ENUM:
        break;
    }
    memcpy(&small, member, sizeof small);
    if (named && f->kind == SPEC_BOOL)
        return PyBool_FromLong((long)small);
    if (named && f->kind == SPEC_ENUM && small <= f->limit)
        return PyUnicode_FromString(f->names[small]);
    return PyLong_FromUnsignedLong(small);
}

PyObject *py_of_spec(const spec_list *list, const void *m, int named)
{
    PyObject *out = PyDict_New();
    for (size_t i = 0; out && i < list->n; i++) {
        const spec_field *f = &list->fields[i];
        PyObject *value =
            lists_value_of(f, (const char *)m + f->offset, named);
        if (!value || PyDict_SetItemString(out, f->name, value))
            Py_CLEAR(out);
        Py_XDECREF(value);
    }
    return out;
}

PyObject *py_of_counts(const spec_field *fields, size_t n, const void *m)
{
    return py_of_spec(&(spec_list){fields, n}, m, 0);
}

int py_dict_add(PyObject *dict, const char *key, PyObject *value)
{
    int rc = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return rc;
}

/* ---- and back ----------------------------------------------------------- */

static int lists_read_name(const spec_field *f, PyObject *value, char *member)
{
    Py_ssize_t n;
    const char *text = PyUnicode_AsUTF8AndSize(value, &n);
    if (!text)
        return -1;
    if ((!n && !f->empty) || n >= (Py_ssize_t)f->limit ||
        strlen(text) != (size_t)n) {
        py_raise(persia_err_set(PERSIA_EARG,
                                "%s has %zd bytes: it may have %d .. %u "
                                "without a 0",
                                f->name, n, !f->empty, f->limit - 1));
        return -1;
    }
    memcpy(member, text, (size_t)n + 1);
    return 0;
}

static int read_field(const spec_field *f, PyObject *value, char *member)
{
    uint32_t small;
    uint64_t large;
    float real;
    switch (f->kind) {
    case SPEC_NAME:
        return lists_read_name(f, value, member);
    case SPEC_FLOAT:
        real = (float)PyFloat_AsDouble(value);
        memcpy(member, &real, sizeof real);
        return PyErr_Occurred() ? -1 : 0;
    case SPEC_U64:
    case SPEC_U32:
    case SPEC_BOOL:
    case SPEC_ENUM:
        break;
    }
    large = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred())
        return -1;
    if (f->kind == SPEC_U64) {
        memcpy(member, &large, sizeof large);
        return 0;
    }
    if (large > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%s is out of range", f->name);
        return -1;
    }
    small = (uint32_t)large; /* its range is checked where it is used */
    memcpy(member, &small, sizeof small);
    return 0;
}

int py_to_spec(const spec_list *list, PyObject *args, PyObject *kwargs,
               void *m)
{
    if (PyTuple_Size(args) || !kwargs ||
        PyDict_Size(kwargs) != (Py_ssize_t)list->n) {
        PyErr_Format(PyExc_TypeError, "%zd keywords are needed, and nothing "
                     "else", (Py_ssize_t)list->n);
        return -1;
    }
    for (size_t i = 0; i < list->n; i++) {
        const spec_field *f = &list->fields[i];
        PyObject *value = PyDict_GetItemString(kwargs, f->name);
        if (!value) {
            PyErr_Format(PyExc_TypeError, "keyword %s is missing", f->name);
            return -1;
        }
        if (read_field(f, value, (char *)m + f->offset))
            return -1;
    }
    return 0;
}

int py_to_spec_in_order(const spec_list *list, PyObject *args, size_t more,
                        void *m)
{
    if (PyTuple_Size(args) != (Py_ssize_t)(list->n + more)) {
        PyErr_Format(PyExc_TypeError, "%zd arguments are needed",
                     (Py_ssize_t)(list->n + more));
        return -1;
    }
    for (size_t i = 0; i < list->n; i++) {
        const spec_field *f = &list->fields[i];
        if (read_field(f, PyTuple_GetItem(args, (Py_ssize_t)i),
                       (char *)m + f->offset))
            return -1;
    }
    return 0;
}

/* ---- the lists themselves ----------------------------------------------- */

static PyObject *lists_names_of(const spec_field *f)
{
    size_t n = f->names ? (size_t)f->limit + 1 : 0;
    PyObject *out = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; out && i < n; i++) {
        PyObject *name = PyUnicode_FromString(f->names[i]);
        if (!name || PyTuple_SetItem(out, (Py_ssize_t)i, name))
            Py_CLEAR(out);
    }
    return out;
}

/* {field: names of its values, or ()}. */
static int add_list(PyObject *module, const char *as, const spec_list *list)
{
    PyObject *out = PyDict_New();
    for (size_t i = 0; out && i < list->n; i++) {
        PyObject *names = lists_names_of(&list->fields[i]);
        if (!names || PyDict_SetItemString(out, list->fields[i].name, names))
            Py_CLEAR(out);
        Py_XDECREF(names);
    }
    int rc = out ? PyModule_AddObjectRef(module, as, out) : -1;
    Py_XDECREF(out);
    return rc;
}

static int lists_add_numbers(PyObject *module)
{
    static const struct {
        const char *name;
        long value;
    } numbers[] = {
        {"FP32", VECTOR_FP32},
        {"BF16", VECTOR_BF16},
        {"INT8", VECTOR_INT8},
        {"INIT_UNIFORM", INIT_UNIFORM},
        {"INIT_NORMAL", INIT_NORMAL},
        {"INIT_CONSTANT", INIT_CONSTANT},
        {"FULL_RAISE", FULL_RAISE},
        {"MISSING_INIT", MISSING_INIT},
        {"MISSING_ZEROS", MISSING_ZEROS},
        {"NONFINITE_RAISE", NONFINITE_RAISE},
        {"NONFINITE_SKIP", NONFINITE_SKIP},
        {"POOL_SUM", POOL_SUM},
        {"POOL_MEAN", POOL_MEAN},
        {"POOL_SQRTN", POOL_SQRTN},
        {"POOL_NONE", POOL_NONE},
        {"PLAN_BAGS", PLAN_BAGS},
        {"PLAN_ROWS", PLAN_ROWS},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (PyModule_AddIntConstant(module, numbers[i].name,
                                    numbers[i].value))
            return -1;
    return 0;
}

int py_add_lists(PyObject *module)
{
    return add_list(module, "TABLE_OPTIONS", &persia_table_spec_list) ||
                   add_list(module, "HYPER_PARAMETERS",
                            &persia_optim_hyper_list) ||
                   add_list(module, "TABLE_COUNTERS",
                            &persia_table_stats_list) ||
                   PyModule_AddStringConstant(module, "DROPPED",
                                              WIRE_DROPPED) ||
                   lists_add_numbers(module)
               ? -1
               : 0;
}
