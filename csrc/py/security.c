/* security.c: TLS and tokens from Python, and where a server listens. */
#include "py/py.h"
#include "rpc/rpc.h"

static int security_text(PyObject *dict, const char *key, const char **out)
{
    PyObject *value = PyDict_GetItemString(dict, key);
    if (!value || value == Py_None)
        return 0;
    *out = PyUnicode_AsUTF8AndSize(value, NULL);
    return *out ? 0 : -1;
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
                   security_text(dict, "server_name", &out->server_name) ||
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
