/* log.h: the log of a server, for server.c. */
#ifndef PERSIA_PY_LOG_H
#define PERSIA_PY_LOG_H

#include "py/py.h"

#include "log/log.h"

/* Opens the log of (path, level, bytes of a segment, limit in bytes); None:
 * there is none, and *out is NULL.  -1 with an exception set. */
int py_log_open(PyObject *options, const char *name_space, uint32_t shard,
                uint32_t shards, updates_log **out);
PyObject *py_log_found(const log_found *f);
PyObject *py_log_counts(updates_log *l);

#endif
