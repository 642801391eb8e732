/* served.h: a shard with its service, as a Server has it (private). */
#ifndef PERSIA_PY_SERVED_H
#define PERSIA_PY_SERVED_H

#include "py/py.h"

#include <stdatomic.h>

#include "server/server.h"

/* The Server has a reference, and each store in this process that calls the
 * shard directly. */
struct py_served {
    atomic_uint users;
    tables *p;
    ps_service *service;
    ckpt_root *root;
    updates_log *log; /* or NULL */
};

/* A Channel without a connection. */
PyObject *py_channel_to(py_served *served, uint64_t timeout_ns);

/* See the methods of Server. */
PyObject *py_host_next(ps_host *h, PyObject *seconds);
PyObject *py_host_give(PyObject *args);
PyObject *py_served_hold(const py_served *s, PyObject *arg);
PyObject *py_served_steps(const py_served *s);
PyObject *py_served_set_steps(const py_served *s, PyObject *arg);
PyObject *py_served_copy_begin(const py_served *s);
PyObject *py_served_copy_next(const py_served *s, PyObject *arg);
PyObject *py_served_copy_left(const py_served *s);
PyObject *py_served_copy_end(const py_served *s);
PyObject *py_served_arrive(const py_served *s, PyObject *capsule);

#endif
