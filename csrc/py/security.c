/* security.c: TLS and tokens from Python, and where a server listens. */
#include <string.h>

#include "base/lines.h"
#include "infer/infer.h"
#include "link/link.h"
#include "py/py.h"
#include "server/server.h"

static const rpc_methods *const services[] = {
    &persia_shard_methods, &persia_worker_methods, &persia_infer_methods};

static int security_text(PyObject *dict, const char *key, const char **out)
{
    PyObject *value = PyDict_GetItemString(dict, key);
    if (!value || value == Py_None)
        return 0;
    *out = PyUnicode_AsUTF8AndSize(value, NULL);
    return *out ? 0 : -1;
}

static int security_number(PyObject *dict, const char *key, uint64_t *out)
{
    PyObject *value = PyDict_GetItemString(dict, key);
    if (value)
        *out = PyLong_AsUnsignedLongLong(value);
    return value && PyErr_Occurred() ? -1 : 0;
}

static int security_flag(PyObject *dict, const char *key, int *out)
{
    PyObject *value = PyDict_GetItemString(dict, key);
    if (value)
        *out = PyObject_IsTrue(value);
    return *out < 0 ? -1 : 0;
}

int py_security(PyObject *dict, struct rpc_security *out)
{
    *out = (rpc_security){0};
    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "security is a dict");
        return -1;
    }
    return security_text(dict, "ca", &out->ca) ||
                   security_text(dict, "cert", &out->cert) ||
                   security_text(dict, "key", &out->key) ||
                   security_text(dict, "token", &out->token) ||
                   security_text(dict, "admin_token", &out->admin_token) ||
                   security_text(dict, "tokens", &out->tokens) ||
                   security_text(dict, "server_name", &out->server_name) ||
                   security_number(dict, "source", &out->source) ||
                   security_flag(dict, "mutual", &out->mutual) ||
                   security_flag(dict, "insecure", &out->insecure)
               ? -1
               : 0;
}

int py_listen(PyObject *args, PyObject *kwargs, struct rpc_server_config *out,
              PyObject **beside, unsigned *room)
{
    static char *words[] = {"address",     "threads",       "calls",
                            "connections", "message_limit", "security",
                            "beside",      "room",          NULL};
    static char *few[] = {"address",     "threads",       "calls",
                          "connections", "message_limit", "security",
                          NULL};
    unsigned long long message;
    PyObject *security;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, beside ? "sIIIKO|OI" : "sIIIKO",
            beside ? words : few, &out->address, &out->threads,
            &out->calls_max, &out->connections_max, &message, &security,
            beside, room) ||
        py_security(security, &out->security))
        return -1;
    out->message_limit = message;
    return 0;
}

/* ---- what is denied ----------------------------------------------------- */

void py_denied(void *lines, const char *method, const char *peer,
               const char *name, const char *reason)
{
    (void)persia_lines_denied(lines, method, peer, name, reason);
}

/* Whether calls of a role are ever denied so: who shows no good token has
 * none. */
static int security_counts(size_t why, size_t role)
{
    return (why <= RPC_EXPIRED) == (role == RPC_ROLES);
}

PyObject *py_rpc_denied(const struct rpc_denied *d)
{
    PyObject *out = PyDict_New();
    for (size_t i = 0; out && d && i < RPC_REASONS * (RPC_ROLES + 1); i++) {
        const size_t why = i / (RPC_ROLES + 1), role = i % (RPC_ROLES + 1);
        if (!security_counts(why, role))
            continue;
        PyObject *key = Py_BuildValue(
            "ss", persia_rpc_reasons[why],
            role < RPC_ROLES ? persia_rpc_roles[role] : "");
        PyObject *n = PyLong_FromUnsignedLongLong(
            atomic_load(&d->n[why][role]));
        if (!key || !n || PyDict_SetItem(out, key, n))
            Py_CLEAR(out);
        Py_XDECREF(key);
        Py_XDECREF(n);
    }
    return out;
}

/* ---- a gate ------------------------------------------------------------- */

typedef struct gate_object {
    PyObject_HEAD
    rpc_gate *gate;
    process_lines lines;
    const rpc_methods *methods;
    PyObject *pass_type;
} gate_object;

typedef struct pass_object {
    PyObject_HEAD
    rpc_pass pass;
    PyObject *gate; /* its counts are used to the end */
} pass_object;

static void pass_dealloc(PyObject *self)
{
    pass_object *p = (pass_object *)self;
    persia_rpc_gate_leave(&p->pass);
    Py_CLEAR(p->gate);
    py_free_object(self);
}

static const rpc_methods *gate_service(const char *name)
{
    for (size_t i = 0; i < sizeof services / sizeof *services; i++)
        if (strcmp(services[i]->service, name) == 0)
            return services[i];
    PyErr_Format(PyExc_ValueError, "there is no service %s", name);
    return NULL;
}

static PyObject *gate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"security", "service", "lines",
                            "lines_json", "audit", NULL};
    PyObject *dict;
    const char *service = persia_infer_methods.service;
    rpc_security security;
    lines_to to = {.role = "serving"};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|sipi", words, &dict,
                                     &service, &to.fd, &to.json, &to.audit) ||
        py_security(dict, &security))
        return NULL;
    const rpc_methods *methods = gate_service(service);
    gate_object *self = methods ? py_new_object(type) : NULL;
    if (!self)
        return NULL;
    persia_lines_init(&self->lines, &to);
    self->methods = methods;
    PyObject *core = PyImport_ImportModule("persia._core");
    self->pass_type = core ? PyObject_GetAttrString(core, "Pass") : NULL;
    Py_XDECREF(core);
    int rc = self->pass_type ? persia_rpc_gate_open(
                                   &security, methods, &self->gate)
                             : PERSIA_OK;
    if (self->gate)
        return (PyObject *)self;
    if (rc)
        py_raise(rc);
    Py_DECREF(self);
    return NULL;
}

static void gate_dealloc(PyObject *self)
{
    gate_object *g = (gate_object *)self;
    persia_rpc_gate_close(g->gate);
    persia_lines_free(&g->lines);
    Py_CLEAR(g->pass_type);
    py_free_object(self);
}

/* Says in the exception that the caller's token is known. */
static void gate_raise_known(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value)
        (void)PyObject_SetAttrString(value, "is_known", Py_True);
    PyErr_Restore(type, value, trace);
}

static PyObject *gate_enter(PyObject *self, PyObject *args)
{
    gate_object *g = (gate_object *)self;
    const char *name, *header, *peer;
    Py_ssize_t n;
    uint32_t method = 0;
    if (!PyArg_ParseTuple(args, "sz#s", &name, &header, &n, &peer))
        return NULL;
    const rpc_methods *m = g->methods;
    while (method < m->n &&
           strcmp(strrchr(m->paths[method], '/') + 1, name) != 0)
        method++;
    pass_object *p = py_new_object((PyTypeObject *)g->pass_type);
    if (!p)
        return NULL;
    p->gate = Py_NewRef(self);
    const int rc = persia_rpc_gate_enter(g->gate, method, header, (size_t)n,
                                         NULL, &p->pass);
    if (!rc)
        return (PyObject *)p;
    py_raise(rc);
    if (rc == PERSIA_EDENIED && p->pass.who)
        gate_raise_known();
    py_denied(&g->lines, method < m->n ? m->paths[method] : name, peer,
              p->pass.who ? p->pass.who->name : "",
              persia_rpc_reasons[p->pass.why]);
    Py_DECREF(p);
    return NULL;
}

static PyObject *gate_denied(PyObject *self, PyObject *unused)
{
    (void)unused;
    return py_rpc_denied(
        persia_rpc_gate_denied(((gate_object *)self)->gate));
}

static PyObject *gate_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    (void)persia_lines_count(&((gate_object *)self)->lines, UINT64_MAX);
    Py_RETURN_NONE;
}

static PyMethodDef gate_methods[] = {
    {"enter", gate_enter, METH_VARARGS,
     "enter(method, header, peer)\n--\n\nLets a call in, or raises, and "
     "writes a line; it ends with the object."},
    {"denied", gate_denied, METH_NOARGS,
     "denied()\n--\n\nSee Server.denied()."},
    {"close", gate_close, METH_NOARGS,
     "close()\n--\n\nWrites how many lines were left out so far."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot gate_slots[] = {
    {Py_tp_doc, (void *)"Gate(security, service, lines, lines_json, audit)\n"
                        "--\n\nWho may call the methods of a service, such as "
                        "inference.GRPCInferenceService, over another "
                        "protocol."},
    {Py_tp_new, (void *)gate_new},
    {Py_tp_dealloc, (void *)gate_dealloc},
    {Py_tp_methods, gate_methods},
    {0, NULL},
};

static PyType_Spec gate_spec = {
    .name = "persia._core.Gate",
    .basicsize = (int)sizeof(gate_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = gate_slots,
};

static PyType_Slot pass_slots[] = {
    {Py_tp_doc, (void *)"A call that a Gate has let in."},
    {Py_tp_dealloc, (void *)pass_dealloc},
    {0, NULL},
};

static PyType_Spec pass_spec = {
    .name = "persia._core.Pass",
    .basicsize = (int)sizeof(pass_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = pass_slots,
};

/* ---- renewal ------------------------------------------------------------ */

static PyObject *security_renew(PyObject *module, PyObject *dict)
{
    rpc_security security;
    uint32_t users;
    (void)module;
    if (py_security(dict, &security))
        return NULL;
    const int rc = persia_rpc_renew(&security, &users);
    return rc ? py_raise(rc) : PyLong_FromUnsignedLong(users);
}

static PyObject *security_users(PyObject *module, PyObject *arg)
{
    const unsigned long long source = PyLong_AsUnsignedLongLong(arg);
    (void)module;
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLong(persia_rpc_users(source));
}

static PyObject *security_check_tokens(PyObject *module, PyObject *text)
{
    uint32_t users;
    const rpc_security security = {
        .tokens = PyUnicode_AsUTF8AndSize(text, NULL)};
    (void)module;
    if (!security.tokens)
        return NULL;
    const int rc = persia_rpc_renew(&security, &users); /* of no source */
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"check_tokens", security_check_tokens, METH_O,
     "check_tokens(text)\n--\n\nRaises if a line of tokens is malformed."},
    {"renew_security", security_renew, METH_O,
     "renew_security(security)\n--\n\nGives new texts to all servers and "
     "channels of a source; how many these are."},
    {"security_users", security_users, METH_O,
     "security_users(source)\n--\n\nHow many servers and channels it has."},
    {NULL, NULL, 0, NULL},
};

/* ---- the table ---------------------------------------------------------- */

static PyObject *security_names(uint32_t roles)
{
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out && i < RPC_ROLES; i++) {
        PyObject *name = roles >> i & 1
                             ? PyUnicode_FromString(persia_rpc_roles[i])
                             : NULL;
        if (roles >> i & 1 && (!name || PyList_Append(out, name)))
            Py_CLEAR(out);
        Py_XDECREF(name);
    }
    return out;
}

/* Of each method, by its path, the roles that may call it. */
static PyObject *security_table(void)
{
    PyObject *out = PyDict_New();
    for (size_t k = 0; out && k < sizeof services / sizeof *services; k++)
        for (uint32_t i = 0; out && i < services[k]->n; i++) {
            const uint32_t roles = services[k]->roles[i] | RPC_ADMIN;
            PyObject *names = security_names(roles);
            if (!names ||
                PyDict_SetItemString(out, services[k]->paths[i], names))
                Py_CLEAR(out);
            Py_XDECREF(names);
        }
    return out;
}

int py_add_security(PyObject *module)
{
    PyObject *table = security_table(), *roles = security_names(RPC_ALL);
    int rc = table && roles &&
                     !PyModule_AddObjectRef(module, "METHODS", table) &&
                     !PyModule_AddObjectRef(module, "ROLES", roles) &&
                     !PyModule_AddFunctions(module, functions) &&
                     py_add_type(module, &gate_spec) &&
                     py_add_type(module, &pass_spec)
                 ? 0
                 : -1;
    Py_XDECREF(table);
    Py_XDECREF(roles);
    return rc;
}
