/* roles.h: what roles.c and sender.c share. */
#ifndef PERSIA_PY_ROLES_H
#define PERSIA_PY_ROLES_H

#include "client/client.h"
#include "embedding_worker/embedding_worker.h"
#include "loader/loader.h"
#include "py/py.h"
#include "rank/rank.h"

/* The dict of persia.loop.stream; the array of addresses is the caller's to
 * free.  Returns -1 with an exception set. */
int py_worker_client(PyObject *dict, worker_client_config *out);
/* Adds the type Sender. */
int py_add_sender(PyObject *module);

#endif
