/* peer.h: administration of one server, as Python data: an object that can
 * send a request (a channel, a store's client) offers these calls to
 * Python. */
#ifndef PERSIA_PY_PEER_H
#define PERSIA_PY_PEER_H

#include "client/client.h"
#include "py/py.h"

typedef struct py_peer {
    /* See persia_client_call(); called without the GIL. */
    int (*call)(void *ctx, uint32_t method, const void *arguments,
                shard_reply *reply);
    void *ctx;
    wire_caller caller;
} py_peer;

/* hello(namespace, stream) -> dict */
PyObject *py_peer_hello(const py_peer *p, PyObject *args);
/* declare(**config) -> (number, created); the words of Store.declare */
PyObject *py_peer_declare(const py_peer *p, PyObject *args,
                          PyObject *kwargs);
/* stats() -> dict */
PyObject *py_peer_stats(const py_peer *p, PyObject *unused);
/* slow() -> list, see peer.c */
PyObject *py_peer_slow(const py_peer *p, PyObject *unused);
/* snapshot(verb, root, folder, proof) -> dict */
PyObject *py_peer_snapshot(const py_peer *p, PyObject *args);
/* restore(verb, root, folder, proof, lineage, updates, step, pushes,
 * ledgers, files) -> dict */
PyObject *py_peer_restore(const py_peer *p, PyObject *args);

/* move(verb, namespace, shard, shards, id, address, by) -> dict; and with a
 * part: ..., boot, lineage, durable, part, server) */
PyObject *py_peer_move(const py_peer *p, PyObject *args);

PyObject *py_numbers_to_list(const uint64_t *numbers, size_t n);
/* The caller's, by free(); NULL with an exception set. */
uint64_t *py_numbers_from(PyObject *sequence, size_t *n);

#endif
