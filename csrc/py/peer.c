/* peer.c: administration of one server, as Python data. */
#include "py/peer.h"

#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "server/server.h"

/* ---- sending ------------------------------------------------------------ */

/* NULL with an exception set; else the reply's struct. */
static const void *py_peer_ask(const py_peer *p, uint32_t method,
                               const void *arguments, shard_reply *reply)
{
    int rc;
    *reply = (shard_reply){0};
    Py_BEGIN_ALLOW_THREADS
    rc = p->call(p->ctx, method, arguments, reply);
    Py_END_ALLOW_THREADS
    return rc ? py_raise(rc) : reply->message;
}

/* ---- ledgers and files -------------------------------------------------- */

static PyObject *peer_ledger_to_tuple(const wire_ledger *l)
{
    return Py_BuildValue("(KKy#KK)", (unsigned long long)l->stream,
                         (unsigned long long)l->watermark,
                         (const char *)l->window,
                         (Py_ssize_t)sizeof l->window,
                         (unsigned long long)l->skipped,
                         (unsigned long long)l->incarnation);
}

/* [(stream, watermark, window, skipped, incarnation)]; the window is bytes,
 * little-endian. */
static PyObject *ledgers_to_list(const wire_ledger *ledgers, size_t n)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *one = peer_ledger_to_tuple(&ledgers[i]);
        if (!one || PyList_SetItem(list, (Py_ssize_t)i, one))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *files_to_list(const wire_file *files, size_t n)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        const wire_file *f = &files[i];
        PyObject *one = Py_BuildValue(
            "(IsKKI)", f->no, f->name, (unsigned long long)f->rows,
            (unsigned long long)f->bytes, f->crc);
        if (!one || PyList_SetItem(list, (Py_ssize_t)i, one))
            Py_CLEAR(list);
    }
    return list;
}

/* An array of a Python sequence's items, of `size` bytes each, for the caller
 * to free; NULL with an exception set. */
static void *peer_items_from(PyObject *sequence, size_t size,
                             int (*read)(PyObject *item, void *out), size_t *n)
{
    const Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0)
        return NULL;
    *n = (size_t)length;
    char *array = calloc(*n + 1, size);
    if (!array)
        return PyErr_NoMemory();
    for (size_t i = 0; i < *n; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        const int bad = !item || read(item, array + i * size);
        Py_XDECREF(item);
        if (bad) {
            free(array);
            return NULL;
        }
    }
    return array;
}

static int peer_number_from(PyObject *item, void *out)
{
    *(uint64_t *)out = PyLong_AsUnsignedLongLong(item);
    return PyErr_Occurred() ? -1 : 0;
}

uint64_t *py_numbers_from(PyObject *sequence, size_t *n)
{
    return peer_items_from(sequence, sizeof(uint64_t), peer_number_from, n);
}

static int peer_ledger_from(PyObject *item, void *to)
{
    wire_ledger *out = to;
    unsigned long long stream, watermark, skipped, incarnation;
    const char *window;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(item, "KKy#KK", &stream, &watermark, &window,
                          &bytes, &skipped, &incarnation))
        return -1;
    if ((size_t)bytes != sizeof out->window) {
        PyErr_Format(PyExc_ValueError, "a ledger's window has %zu bytes",
                     sizeof out->window);
        return -1;
    }
    out->stream = stream;
    out->skipped = skipped;
    out->incarnation = incarnation;
    out->watermark = watermark;
    memcpy(out->window, window, sizeof out->window);
    return 0;
}

static int peer_file_from(PyObject *item, void *out)
{
    return py_to_spec_in_order(&persia_wire_file_list, item, 0, out);
}

/* ---- hello, declare, stats ---------------------------------------------- */

static PyObject *specs_to_list(const table_spec *tables, size_t n)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *one = py_of_spec(&persia_table_spec_list, &tables[i], 0);
        if (!one || PyList_SetItem(list, (Py_ssize_t)i, one))
            Py_CLEAR(list);
    }
    return list;
}

/* Of a server that says none: its own. */
static PyObject *peer_here_to_list(const wire_hello_reply *r)
{
    const uint64_t own = r->shard;
    const uint64_t *here = r->here_n ? r->here : &own;
    const size_t n = r->here_n ? r->here_n : 1;
    return py_numbers_to_list(here, n);
}

PyObject *py_peer_hello(const py_peer *p, PyObject *args)
{
    const char *name_space;
    unsigned long long stream;
    wire_hello hello = {.caller = p->caller,
                        .version = WIRE_VERSION,
                        .version_min = WIRE_VERSION_MIN,
                        .world = 1};
    if (!PyArg_ParseTuple(args, "sK", &name_space, &stream))
        return NULL;
    hello.stream = stream;
    hello.caller.incarnation = 0; /* it looks, and claims nothing */
    if (py_name(name_space, hello.name_space, sizeof hello.name_space))
        return NULL;
    shard_reply reply;
    const wire_hello_reply *r = py_peer_ask(p, WIRE_HELLO, &hello, &reply);
    if (!r)
        return NULL;
    PyObject *out = py_of_spec(&persia_wire_hello_reply_list, r, 1);
    if (out && (py_dict_add(out, "ledger", peer_ledger_to_tuple(&r->ledger)) ||
                py_dict_add(out, "tables",
                         specs_to_list(r->tables, r->tables_n)) ||
                py_dict_add(out, "here", peer_here_to_list(r))))
        Py_CLEAR(out);
    persia_shard_release(&reply);
    return out;
}

PyObject *py_peer_declare(const py_peer *p, PyObject *args, PyObject *kwargs)
{
    wire_declare declare = {.caller = p->caller};
    if (py_to_spec(&persia_table_spec_list, args, kwargs, &declare.table))
        return NULL;
    shard_reply reply;
    const wire_declare_reply *r =
        py_peer_ask(p, WIRE_DECLARE, &declare, &reply);
    PyObject *out =
        r ? Py_BuildValue("(IO)", r->no, r->created ? Py_True : Py_False)
          : NULL;
    persia_shard_release(&reply);
    return out;
}

static PyObject *table_to_dict(const table_spec *t, const table_stats *s)
{
    PyObject *out = py_of_spec(&persia_table_stats_list, s, 0);
    PyObject *more = out ? Py_BuildValue("{ss sI sI}", "name", t->name, "dim",
                                         t->dim, "dtype", t->dtype)
                         : NULL;
    if (!more || PyDict_Update(out, more))
        Py_CLEAR(out);
    Py_XDECREF(more);
    return out;
}

static PyObject *stats_to_dict(const wire_stats_reply *r)
{
    PyObject *tables = PyList_New(0);
    for (size_t i = 0; tables && i < r->tables_n; i++) {
        if (!strncmp(r->tables[i].name, WIRE_DROPPED, strlen(WIRE_DROPPED)))
            continue;
        PyObject *one = table_to_dict(&r->tables[i], &r->stats[i]);
        if (!one || PyList_Append(tables, one))
            Py_CLEAR(tables);
        Py_XDECREF(one);
    }
    PyObject *out = py_of_spec(&persia_wire_stats_reply_list, r, 1);
    if (!out)
        Py_XDECREF(tables);
    else if (py_dict_add(out, "tables", tables))
        Py_CLEAR(out);
    return out;
}

/* [(call, seconds, when, bytes, client, peer)], the last one first. */
static PyObject *peer_slow_to_list(const wire_stats_reply *r)
{
    PyObject *list = PyList_New((Py_ssize_t)r->slow_n);
    for (size_t i = 0; list && i < r->slow_n; i++) {
        const wire_slow_call *c = &r->slow[i];
        const char *path =
            c->method < WIRE_METHODS_N ? persia_wire_paths[c->method] : NULL;
        PyObject *one = Py_BuildValue(
            "(sdKKKs)", path ? strrchr(path, '/') + 1 : "?",
            (double)c->ns / 1e9, (unsigned long long)c->at,
            (unsigned long long)c->bytes, (unsigned long long)c->client,
            c->peer);
        if (!one || PyList_SetItem(list, (Py_ssize_t)i, one))
            Py_CLEAR(list);
    }
    return list;
}

PyObject *py_peer_slow(const py_peer *p, PyObject *unused)
{
    wire_stats stats = {.caller = p->caller, .slow = 1};
    shard_reply reply;
    (void)unused;
    const wire_stats_reply *r = py_peer_ask(p, WIRE_STATS, &stats, &reply);
    PyObject *out = r ? peer_slow_to_list(r) : NULL;
    persia_shard_release(&reply);
    return out;
}

PyObject *py_peer_stats(const py_peer *p, PyObject *unused)
{
    wire_stats stats = {.caller = p->caller};
    shard_reply reply;
    (void)unused;
    const wire_stats_reply *r = py_peer_ask(p, WIRE_STATS, &stats, &reply);
    PyObject *out = r ? stats_to_dict(r) : NULL;
    persia_shard_release(&reply);
    return out;
}

/* ---- moves -------------------------------------------------------------- */

PyObject *py_numbers_to_list(const uint64_t *numbers, size_t n)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *one = PyLong_FromUnsignedLongLong(numbers[i]);
        if (!one || PyList_SetItem(list, (Py_ssize_t)i, one))
            Py_CLEAR(list);
    }
    return list;
}

/* A part of the shard of a Server, after the numbers. */
static py_served *peer_move_part(PyObject *args, wire_move *m)
{
    PyObject *server = PyTuple_GetItem(args, PyTuple_Size(args) - 1);
    ps_service *service;
    py_served *served = server ? py_server_served(server, &service) : NULL;
    if (served)
        persia_shard_copy_put(persia_service_shard(service), m);
    return served;
}

PyObject *py_peer_move(const py_peer *p, PyObject *args)
{
    enum { ALONE = 7 }; /* without a part */
    spec_list list = persia_wire_move_list;
    wire_move m = {.caller = p->caller};
    py_served *served = NULL;
    const int alone = PyTuple_Size(args) == ALONE;
    if (alone)
        list.n = ALONE;
    if (py_to_spec_in_order(&list, args, !alone, &m) ||
        (!alone && !(served = peer_move_part(args, &m))))
        return NULL;
    shard_reply reply;
    const wire_move_reply *r = py_peer_ask(p, WIRE_MOVE, &m, &reply);
    PyObject *out = r ? py_of_spec(&persia_wire_move_reply_list, r, 1) : NULL;
    if (out &&
        py_dict_add(out, "here", py_numbers_to_list(r->here, r->here_n)))
        Py_CLEAR(out);
    persia_shard_release(&reply);
    if (served)
        py_served_drop(served);
    return out;
}

/* ---- snapshot and restore ----------------------------------------------- */

static PyObject *snapshot_to_dict(const wire_snapshot_reply *r)
{
    PyObject *out = py_of_spec(&persia_wire_snapshot_reply_list, r, 1);
    if (!out ||
        py_dict_add(out, "pushes",
                    py_numbers_to_list(r->pushes, r->pushes_n)) ||
        py_dict_add(out, "ledgers",
                    ledgers_to_list(r->ledgers, r->ledgers_n)) ||
        py_dict_add(out, "files", files_to_list(r->files, r->files_n)))
        Py_CLEAR(out);
    return out;
}

PyObject *py_peer_snapshot(const py_peer *p, PyObject *args)
{
    wire_snapshot s = {.caller = p->caller};
    if (py_to_spec_in_order(&persia_wire_snapshot_list, args, 0, &s))
        return NULL;
    shard_reply reply;
    const wire_snapshot_reply *r = py_peer_ask(p, WIRE_SNAPSHOT, &s, &reply);
    PyObject *out = r ? snapshot_to_dict(r) : NULL;
    persia_shard_release(&reply);
    return out;
}

PyObject *py_peer_restore(const py_peer *p, PyObject *args)
{
    const spec_list *list = &persia_wire_restore_list;
    const Py_ssize_t more = (Py_ssize_t)list->n;
    wire_restore w = {.caller = p->caller};
    PyObject *out = NULL;
    if (py_to_spec_in_order(list, args, 3, &w))
        return NULL;
    w.pushes = py_numbers_from(PyTuple_GetItem(args, more), &w.pushes_n);
    if (w.pushes)
        w.ledgers = peer_items_from(PyTuple_GetItem(args, more + 1),
                                    sizeof *w.ledgers, peer_ledger_from,
                                    &w.ledgers_n);
    if (w.ledgers)
        w.files = peer_items_from(PyTuple_GetItem(args, more + 2),
                                  sizeof *w.files, peer_file_from, &w.files_n);
    if (w.files) {
        shard_reply reply;
        const wire_restore_reply *r = py_peer_ask(p, WIRE_RESTORE, &w, &reply);
        out = r ? py_of_spec(&persia_wire_restore_reply_list, r, 1) : NULL;
        persia_shard_release(&reply);
    }
    free(w.files);
    free(w.ledgers);
    free(w.pushes);
    return out;
}
