/* roles.h: what roles.c and sender.c share. */
#ifndef PERSIA_PY_ROLES_H
#define PERSIA_PY_ROLES_H

#include "client/client.h"
#include "embedding_worker/embedding_worker.h"
#include "loader/loader.h"
#include "py/py.h"
#include "rank/rank.h"

/* A number of seconds, from 0.  Here and below -1 or NULL: an exception is
 * set. */
int py_seconds(double seconds, uint64_t *out);
int py_name(const char *text, char *to, size_t room);
void *py_new_object(PyTypeObject *type);
void py_free_object(PyObject *self);
PyObject *py_closed(const char *what);
/* The dict of persia.loop.stream; the array of addresses is the caller's to
 * free. */
int py_worker_client(PyObject *dict, worker_client_config *out);
/* Adds the type Sender. */
int py_add_sender(PyObject *module);

#endif
