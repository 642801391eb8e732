/* py.h: what the files of persia._core share.
 *
 * Limited API 3.11, multi-phase initialisation, heap types, all objects in
 * the module's state.  Each file adds its functions and types in a function
 * py_add_<file>(module), listed in PY_FILES below.
 */
#ifndef PERSIA_PY_H
#define PERSIA_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/base.h"
#include "spec/spec.h"

/* The files of csrc/py that add something to the module. */
#define PY_FILES(X)                                                           \
    X(lists)                                                                  \
    X(store)                                                                  \
    X(prefetch)                                                               \
    X(cluster)                                                                \
    X(roles)                                                                  \
    X(data)                                                                   \
    X(ckpt)                                                                   \
    X(changes)                                                                \
    X(log)                                                                    \
    X(rows_file)                                                              \
    X(channel)                                                                \
    X(requests)                                                               \
    X(inference)                                                              \
    X(times)                                                                  \
    X(traces)                                                                 \
    X(security)                                                               \
    X(server)

#define PY_DECLARE(file) int py_add_##file(PyObject *module);
PY_FILES(PY_DECLARE)
#undef PY_DECLARE

/* Raises the exception of persia.errors that belongs to `code`, with this
 * thread's persia_err_text().  PERSIA_EINTR keeps the exception that the
 * signal handler raised.  Returns NULL.  Call it with the GIL, on the thread
 * that got the code, before anything else calls persia_err_set(). */
PyObject *py_raise(int code);

/* Adds a heap type made from `spec` to the module under its short name;
 * returns a borrowed reference or NULL. */
PyTypeObject *py_add_type(PyObject *module, PyType_Spec *spec);

/* ---- objects and arguments (objects.c): -1 or NULL with an exception set */

void *py_new_object(PyTypeObject *type);
void py_free_object(PyObject *self);
/* Raises ClosedError; NULL. */
PyObject *py_closed(const char *what);
/* Seconds, from 0, as nanoseconds. */
int py_seconds(double seconds, uint64_t *out);
int py_seconds_of(PyObject *seconds, uint64_t *out);
/* to: [room], of a text and its 0. */
int py_name(const char *text, char *to, size_t room);
/* The texts of a list; they last as long as the list, the array is the
 * caller's to free. */
const char **py_texts(PyObject *list, size_t *n);

/* ---- structs with a list (lists.c) */

/* As a dict; with `named`, enums are names and flags are bools.  Returns NULL
 * with an exception set. */
PyObject *py_of_spec(const spec_list *list, const void *m, int named);
/* The same of counters, all uint64_t, of a struct without a generated list. */
#define PY_COUNT(type, member)                                                \
    { .name = #member, .kind = SPEC_U64, .offset = offsetof(type, member) }
PyObject *py_of_counts(const spec_field *fields, size_t n, const void *m);
/* Adds a new reference, which it takes over; -1 with an exception set, also of
 * a value that is NULL. */
int py_dict_add(PyObject *dict, const char *key, PyObject *value);
/* The reverse, of a tuple that begins with all fields in order and has `more`
 * items behind them.  Returns -1 with an exception set. */
int py_to_spec_in_order(const spec_list *list, PyObject *args, size_t more,
                        void *m);
/* The reverse, of keywords that are all there is; numbers alone.  Returns -1
 * with an exception set. */
int py_to_spec(const spec_list *list, PyObject *args, PyObject *kwargs,
               void *m);

/* The words of Store.declare as a table's configuration (store.c).  Returns
 * -1 with an exception set. */
struct table_config;
int py_table_config(PyObject *args, PyObject *kwargs,
                    struct table_config *out);

/* Makes a client of servers, from the dict of a store's connection
 * (cluster.c).  Returns -1 with an exception set. */
struct ps_client;
int py_open_client(unsigned threads, PyObject *dict, struct ps_client **out);
/* That dict; texts last as long as it does, the array of addresses is the
 * caller's to free.  Returns -1 with an exception set. */
struct client_config;
int py_client_config(PyObject *dict, struct client_config *out,
                     PyObject **own);

/* TLS and tokens from the dict of persia.distributed.Security.arguments(); the
 * texts last as long as the dict (security.c).  Returns -1 with an exception
 * set. */
struct rpc_security;
int py_security(PyObject *dict, struct rpc_security *out);
/* The arguments of start(): where to listen, and to whom.  `beside` and `room`
 * may be NULL: there are no such arguments. */
struct rpc_server_config;
int py_listen(PyObject *args, PyObject *kwargs, struct rpc_server_config *out,
              PyObject **beside, unsigned *room);
/* A callback of rpc_server_config for a process_lines, which writes a line
 * (security.c). */
void py_denied(void *lines, const char *method, const char *peer,
               const char *name, const char *reason);

/* Counts by (reason, role); empty for NULL (security.c). */
struct rpc_denied;
PyObject *py_rpc_denied(const struct rpc_denied *d);

/* Of each method by its name: calls by their time, seconds, bytes of requests
 * and of replies; empty where it does not listen (times.c). */
struct rpc_server;
struct rpc_methods;
PyObject *py_rpc_times(const struct rpc_server *rpc,
                       const struct rpc_methods *methods);

/* Seconds of all its calls: until a thread had them, and from then on. */
PyObject *py_rpc_waits(const struct rpc_server *rpc);

/* The service of a _core.Server, for a store in the same process that calls
 * it directly, with a reference that keeps it alive; NULL with an exception
 * set.  py_served_drop() gives the reference back, on any thread, with or
 * without the GIL; the last one frees the shard (server.c). */
typedef struct py_served py_served;
struct ps_service;
py_served *py_server_served(PyObject *server, struct ps_service **service);
void py_served_drop(py_served *s);

#endif
