/* moves.c: of persia._core.Server, what takes shards to other servers. */
#include "py/served.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "py/peer.h"

static const char CAPSULE[] = "persia.move";

/* ---- the calls of Move -------------------------------------------------- */

PyObject *py_host_next(ps_host *h, PyObject *seconds)
{
    uint64_t ns;
    host_move *move = NULL;
    const double wait = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred() || py_seconds(wait, &ns))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (h)
        move = persia_host_take(h, ns);
    Py_END_ALLOW_THREADS
    if (!move)
        Py_RETURN_NONE;
    PyObject *capsule = PyCapsule_New(move, CAPSULE, NULL);
    PyObject *asked = capsule ? py_of_spec(&persia_wire_move_list,
                                           persia_host_message(move), 1)
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

/* ---- on its way --------------------------------------------------------- */

PyObject *py_served_copy_begin(const py_served *s)
{
    int rc = persia_shard_copy_begin(persia_service_shard(s->service));
    return rc ? py_raise(rc) : Py_NewRef(Py_None);
}

PyObject *py_served_copy_next(const py_served *s, PyObject *arg)
{
    const int last = PyObject_IsTrue(arg);
    uint64_t rows;
    int ended, rc;
    if (last < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = persia_shard_copy_next(persia_service_shard(s->service), last, &rows,
                                &ended);
    Py_END_ALLOW_THREADS
    if (rc)
        return py_raise(rc);
    return ended ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(rows);
}

PyObject *py_served_copy_left(const py_served *s)
{
    return PyLong_FromUnsignedLongLong(
        persia_shard_copy_left(persia_service_shard(s->service)));
}

PyObject *py_served_copy_end(const py_served *s)
{
    Py_BEGIN_ALLOW_THREADS
    persia_shard_copy_end(persia_service_shard(s->service));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_served_arrive(const py_served *s, PyObject *capsule)
{
    const host_move *move = PyCapsule_GetPointer(capsule, CAPSULE);
    int rc;
    if (!move)
        return NULL;
    const wire_move *m = persia_host_message(move);
    Py_BEGIN_ALLOW_THREADS
    rc = persia_shard_arrive(persia_service_shard(s->service), m);
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc) : PyBool_FromLong(m->handover_n != 0);
}
