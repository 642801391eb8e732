/* core.c: the module persia._core: initialisation, errors, Ctrl-C. */
#include "evict/evict.h"
#include "py/py.h"

static unsigned long main_thread; /* set once, before the callback is */
/* What a signal's handler raised last, until it is raised; of the main thread
 * alone, with the GIL. */
static PyObject *raised;

/* Keeps the exception that is set: on the way out of an operator, torch sets
 * its own in its place. */
static void core_keep_raised(void)
{
    PyObject *type, *value, *trace, *last = raised;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && trace)
        PyException_SetTraceback(value, trace);
    raised = Py_XNewRef(value);
    PyErr_Restore(type, value, trace);
    Py_XDECREF(last);
}

/* Runs Python's signal handlers; a no-op on other threads than the main
 * one.  Installed as the C core's interrupt callback. */
static int core_check_signals(void)
{
    if (PyThread_get_thread_ident() != main_thread)
        return PERSIA_OK; /* never waits for the GIL on a worker thread */
    PyGILState_STATE gil = PyGILState_Ensure();
    int stop = PyErr_CheckSignals();
    if (stop)
        core_keep_raised();
    PyGILState_Release(gil);
    return stop ? PERSIA_EINTR : PERSIA_OK;
}

PyObject *py_raise(int code)
{
    if (code == PERSIA_EINTR && PyErr_Occurred()) {
        Py_CLEAR(raised);
        return NULL;
    }
    PyObject *errors = PyImport_ImportModule("persia.errors");
    if (!errors)
        return NULL;
    PyObject *type = PyObject_GetAttrString(errors, persia_err_name(code));
    Py_DECREF(errors);
    if (!type)
        return NULL;
    const char *text = persia_err_text();
    PyErr_SetString(type, *text ? text : persia_err_message(code));
    Py_DECREF(type);
    return NULL;
}

PyTypeObject *py_add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (!type)
        return NULL;
    int rc = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return rc ? NULL : (PyTypeObject *)type;
}

static PyObject *core_error_names(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *names = PyTuple_New(PERSIA_ERROR_COUNT);
    for (int code = 0; names && code < PERSIA_ERROR_COUNT; code++) {
        PyObject *name = PyUnicode_FromString(persia_err_name(code));
        if (!name || PyTuple_SetItem(names, code, name))
            Py_CLEAR(names);
    }
    return names;
}

static PyObject *core_take_raised(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *taken = raised;
    raised = NULL;
    return taken ? taken : Py_NewRef(Py_None);
}

static PyObject *core_check_score(PyObject *module, PyObject *text)
{
    evictor out;
    const char *score = PyUnicode_AsUTF8AndSize(text, NULL);
    (void)module;
    if (!score || (persia_evict_compile(score, &out) &&
                   (py_raise(PERSIA_EARG), 1)))
        return NULL;
    return Py_NewRef(Py_None);
}

static PyObject *core_keep_memory(PyObject *module, PyObject *bytes)
{
    const int n = (int)PyLong_AsLong(bytes);
    (void)module;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(persia_keep_memory(n));
}

static PyObject *core_poll(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    const int rc = persia_interrupt_poll();
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"poll", core_poll, METH_NOARGS,
     "poll()\n--\n\nSays that what this thread does makes progress; raises "
     "if it is to end."},
    {"take_raised", core_take_raised, METH_NOARGS,
     "take_raised()\n--\n\nWhat a signal's handler raised while an operator "
     "waited, once; or None."},
    {"error_names", core_error_names, METH_NOARGS,
     "error_names()\n--\n\nThe names of all error codes, by number."},
    {"check_score", core_check_score, METH_O,
     "check_score(text)\n--\n\nRaises if it is no score of eviction."},
    {"keep_memory", core_keep_memory, METH_O,
     "keep_memory(bytes)\n--\n\nWhether glibc keeps freed blocks from now on, "
     "and so many bytes of each arena."},
    {NULL, NULL, 0, NULL},
};

static int core_find_main_thread(void)
{
    PyObject *threading = PyImport_ImportModule("threading");
    if (!threading)
        return -1;
    PyObject *main = PyObject_CallMethod(threading, "main_thread", NULL);
    Py_DECREF(threading);
    if (!main)
        return -1;
    PyObject *ident = PyObject_GetAttrString(main, "ident");
    Py_DECREF(main);
    if (!ident)
        return -1;
    main_thread = PyLong_AsUnsignedLong(ident);
    Py_DECREF(ident);
    return PyErr_Occurred() ? -1 : 0;
}

static int core_exec(PyObject *module)
{
#define PY_ADD(file)                                                          \
    if (py_add_##file(module))                                                \
        return -1;
    PY_FILES(PY_ADD)
#undef PY_ADD
    if (core_find_main_thread())
        return -1;
    persia_interrupt_install(core_check_signals);
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)core_exec},
    {0, NULL},
};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "persia._core",
    .m_doc = "The C core of Persia.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
