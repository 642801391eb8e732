/* moves.c: of persia._core.Server, what takes shards to other servers. */
#include "py/served.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "py/peer.h"

static const char CAPSULE[] = "persia.move";

/* ---- the calls of Move -------------------------------------------------- */

PyObject *py_host_next(ps_host *h)
{
    wire_move m;
    host_move *move = h ? persia_host_take(h, &m) : NULL;
    if (!move)
        Py_RETURN_NONE;
    PyObject *capsule = PyCapsule_New(move, CAPSULE, NULL);
    PyObject *asked = capsule ? py_of_spec(&persia_wire_move_list, &m, 1)
                              : NULL;
    PyObject *out = asked ? Py_BuildValue("(NN)", capsule, asked) : NULL;
    if (!asked)
        Py_XDECREF(capsule);
    if (!out)
        persia_host_give(move, persia_err_set(PERSIA_EINTERNAL,
                                              "a message cannot be read"),
                         NULL);
    return out;
}

PyObject *py_host_give(PyObject *args)
{
    PyObject *capsule, *here;
    const char *error, *text, *by;
    unsigned long long id, rows;
    wire_move_reply r = {0};
    if (!PyArg_ParseTuple(args, "OssIIKKsIO", &capsule, &error, &text,
                          &r.state, &r.shard, &id, &rows, &by, &r.shards,
                          &here))
        return NULL;
    host_move *move = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!move || PyCapsule_SetName(capsule, "given"))
        return NULL;
    r.id = id;
    r.rows = rows;
    snprintf(r.text, sizeof r.text, "%s", text);
    snprintf(r.by, sizeof r.by, "%s", by);
    r.here = py_numbers_from(here, &r.here_n);
    if (!r.here)
        PyErr_Clear();
    int rc = *error ? persia_err_set(persia_err_code(error), "%s", text)
                    : PERSIA_OK;
    Py_BEGIN_ALLOW_THREADS
    persia_host_give(move, rc, &r);
    Py_END_ALLOW_THREADS
    free(r.here);
    Py_RETURN_NONE;
}

/* ---- one shard ---------------------------------------------------------- */

PyObject *py_served_hold(const py_served *s, PyObject *arg)
{
    const long to = PyLong_AsLong(arg);
    int rc;
    if (PyErr_Occurred())
        return NULL;
    if (to < SHARD_FREE || to > SHARD_HELD) {
        PyErr_SetString(PyExc_ValueError, "there is no such hold");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = persia_shard_hold(persia_service_shard(s->service),
                           (enum shard_hold)to);
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

PyObject *py_served_steps(const py_served *s)
{
    uint64_t *steps;
    size_t n;
    int rc = persia_shard_steps(persia_service_shard(s->service), &steps, &n);
    if (rc)
        return py_raise(rc);
    PyObject *out = py_numbers_to_list(steps, n);
    free(steps);
    return out;
}

PyObject *py_served_set_steps(const py_served *s, PyObject *arg)
{
    size_t n;
    uint64_t *steps = py_numbers_from(arg, &n);
    if (!steps)
        return NULL;
    int rc = persia_shard_set_steps(persia_service_shard(s->service), steps,
                                    n);
    free(steps);
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}
