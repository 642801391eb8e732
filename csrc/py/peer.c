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

/* A name of WIRE_NAME bytes, or whatever the field has. */
static int peer_name_into(const char *what, const char *text, char *to,
                          size_t room)
{
    size_t n = strlen(text);
    if (n >= room)
        return persia_err_set(PERSIA_EARG, "%s has %zu bytes, it may have %zu",
                              what, n, room - 1);
    memcpy(to, text, n + 1);
    return PERSIA_OK;
}

static int peer_add(PyObject *dict, const char *key, PyObject *value)
{
    int rc = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return rc;
}

/* ---- ledgers and files -------------------------------------------------- */

static PyObject *ledger_to_tuple(const wire_ledger *l)
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
        PyObject *one = ledger_to_tuple(&ledgers[i]);
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

/* An array of a Python sequence's items, of `size` bytes each and zeroed, for
 * the caller to free; NULL with an exception set. */
static void *array_for(PyObject *sequence, size_t size, size_t *n)
{
    Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0)
        return NULL;
    *n = (size_t)length;
    void *array = calloc(*n + 1, size);
    return array ? array : PyErr_NoMemory();
}

uint64_t *py_numbers_from(PyObject *sequence, size_t *n)
{
    uint64_t *out = array_for(sequence, sizeof *out, n);
    for (size_t i = 0; out && i < *n; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        out[i] = item ? PyLong_AsUnsignedLongLong(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            free(out);
            return NULL;
        }
    }
    return out;
}

static int ledger_from(PyObject *item, wire_ledger *out)
{
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

static int file_from(PyObject *item, wire_file *out)
{
    const char *name;
    unsigned long long rows, bytes;
    if (!PyArg_ParseTuple(item, "IsKKI", &out->no, &name, &rows, &bytes,
                          &out->crc))
        return -1;
    out->rows = rows;
    out->bytes = bytes;
    int rc =
        peer_name_into("a file's name", name, out->name, sizeof out->name);
    if (rc)
        py_raise(rc);
    return rc ? -1 : 0;
}

static wire_ledger *ledgers_from(PyObject *sequence, size_t *n)
{
    wire_ledger *out = array_for(sequence, sizeof *out, n);
    for (size_t i = 0; out && i < *n; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        int bad = !item || ledger_from(item, &out[i]);
        Py_XDECREF(item);
        if (bad) {
            free(out);
            return NULL;
        }
    }
    return out;
}

static wire_file *files_from(PyObject *sequence, size_t *n)
{
    wire_file *out = array_for(sequence, sizeof *out, n);
    for (size_t i = 0; out && i < *n; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        int bad = !item || file_from(item, &out[i]);
        Py_XDECREF(item);
        if (bad) {
            free(out);
            return NULL;
        }
    }
    return out;
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
    int rc = peer_name_into("the namespace", name_space, hello.name_space,
                            sizeof hello.name_space);
    if (rc)
        return py_raise(rc);
    shard_reply reply;
    const wire_hello_reply *r = py_peer_ask(p, WIRE_HELLO, &hello, &reply);
    if (!r)
        return NULL;
    PyObject *out = Py_BuildValue(
        "{sI sI sI ss sK sK sK sK sK sK sN sN sN}", "version", r->version,
        "shard", r->shard, "shards", r->shards, "namespace", r->name_space,
        "boot", (unsigned long long)r->boot, "lineage",
        (unsigned long long)r->lineage, "restore",
        (unsigned long long)r->restore, "updates",
        (unsigned long long)r->updates, "t", (unsigned long long)r->t,
        "message_limit", (unsigned long long)r->message_limit, "ledger",
        ledger_to_tuple(&r->ledger), "tables",
        specs_to_list(r->tables, r->tables_n), "here", peer_here_to_list(r));
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
    if (!tables)
        return NULL;
    return Py_BuildValue(
        "{sO sO sK sK sK sK sK sK sK sK sK sK sK sK sK sK sK sN}", "beside",
        r->beside ? Py_True : Py_False, "recovers",
        r->recovers ? Py_True : Py_False, "done", (unsigned long long)r->done,
        "total", (unsigned long long)r->total, "boot",
        (unsigned long long)r->boot, "lineage",
        (unsigned long long)r->lineage, "restore",
        (unsigned long long)r->restore, "updates",
        (unsigned long long)r->updates, "step", (unsigned long long)r->step,
        "uptime_ns", (unsigned long long)r->uptime_ns, "memory_used",
        (unsigned long long)r->memory_used, "memory_limit",
        (unsigned long long)r->memory_limit, "pulls",
        (unsigned long long)r->pulls, "pushes",
        (unsigned long long)r->pushes, "duplicates",
        (unsigned long long)r->duplicates, "parked",
        (unsigned long long)r->parked, "failed",
        (unsigned long long)r->failed, "tables", tables);
}

PyObject *py_peer_stats(const py_peer *p)
{
    wire_stats stats = {.caller = p->caller};
    shard_reply reply;
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

PyObject *py_peer_move(const py_peer *p, PyObject *args)
{
    wire_move m = {.caller = p->caller};
    const char *name_space, *address, *by, *root;
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "IsIIKsss", &m.verb, &name_space, &m.shard,
                          &m.shards, &id, &address, &by, &root))
        return NULL;
    m.id = id;
    int rc = peer_name_into("the namespace", name_space, m.name_space,
                            sizeof m.name_space);
    if (!rc)
        rc = peer_name_into("the address", address, m.address,
                            sizeof m.address);
    if (!rc)
        rc = peer_name_into("who moves", by, m.by, sizeof m.by);
    if (!rc)
        rc = peer_name_into("the root", root, m.root, sizeof m.root);
    if (rc)
        return py_raise(rc);
    shard_reply reply;
    const wire_move_reply *r = py_peer_ask(p, WIRE_MOVE, &m, &reply);
    PyObject *out =
        r ? Py_BuildValue("{sI sI sK ss sK ss sI sN}", "state", r->state,
                          "shard", r->shard, "id", (unsigned long long)r->id,
                          "text", r->text, "rows",
                          (unsigned long long)r->rows, "by", r->by, "shards",
                          r->shards, "here",
                          py_numbers_to_list(r->here, r->here_n))
          : NULL;
    persia_shard_release(&reply);
    return out;
}

/* ---- snapshot and restore ----------------------------------------------- */

/* The three texts that both begin with. */
static int peer_place_into(const char *const texts[3], char *root,
                           char *folder, char *proof, size_t proof_room)
{
    int rc = peer_name_into("the root's name", texts[0], root, WIRE_NAME);
    if (!rc)
        rc = peer_name_into("the folder's name", texts[1], folder, WIRE_NAME);
    return rc ? rc : peer_name_into("the proof", texts[2], proof, proof_room);
}

static PyObject *snapshot_to_dict(const wire_snapshot_reply *r)
{
    PyObject *out = Py_BuildValue(
        "{sI sI sK sK sK sK sK sK}", "started", r->started, "done", r->done,
        "log", (unsigned long long)r->log, "restore",
        (unsigned long long)r->restore, "updates",
        (unsigned long long)r->updates, "step", (unsigned long long)r->step,
        "t", (unsigned long long)r->t,
        "rows_written", (unsigned long long)r->rows_written);
    PyObject *pushes = py_numbers_to_list(r->pushes, r->pushes_n);
    if (!out || peer_add(out, "pushes", pushes) ||
        peer_add(out, "ledgers", ledgers_to_list(r->ledgers, r->ledgers_n)) ||
        peer_add(out, "files", files_to_list(r->files, r->files_n)))
        Py_CLEAR(out);
    return out;
}

PyObject *py_peer_snapshot(const py_peer *p, PyObject *args)
{
    wire_snapshot s = {.caller = p->caller};
    const char *texts[3];
    if (!PyArg_ParseTuple(args, "Isss", &s.verb, &texts[0], &texts[1],
                          &texts[2]))
        return NULL;
    int rc = peer_place_into(texts, s.root, s.folder, s.proof, sizeof s.proof);
    if (rc)
        return py_raise(rc);
    shard_reply reply;
    const wire_snapshot_reply *r = py_peer_ask(p, WIRE_SNAPSHOT, &s, &reply);
    PyObject *out = r ? snapshot_to_dict(r) : NULL;
    persia_shard_release(&reply);
    return out;
}

PyObject *py_peer_restore(const py_peer *p, PyObject *args)
{
    wire_restore w = {.caller = p->caller};
    const char *texts[3];
    unsigned long long lineage, restore, updates, step, t;
    PyObject *pushes, *ledgers, *files, *out = NULL;
    if (!PyArg_ParseTuple(args, "IsssKKKKKOOO", &w.verb, &texts[0], &texts[1],
                          &texts[2], &lineage, &restore, &updates, &step, &t,
                          &pushes, &ledgers, &files))
        return NULL;
    w.lineage = lineage;
    w.restore = restore;
    w.updates = updates;
    w.step = step;
    w.t = t;
    int rc = peer_place_into(texts, w.root, w.folder, w.proof, sizeof w.proof);
    if (rc)
        return py_raise(rc);
    w.pushes = py_numbers_from(pushes, &w.pushes_n);
    w.ledgers = w.pushes ? ledgers_from(ledgers, &w.ledgers_n) : NULL;
    w.files = w.ledgers ? files_from(files, &w.files_n) : NULL;
    if (w.files) {
        shard_reply reply;
        const wire_restore_reply *r = py_peer_ask(p, WIRE_RESTORE, &w, &reply);
        out = r ? Py_BuildValue("{sI sK}", "done", r->done, "rows",
                                (unsigned long long)r->rows)
                : NULL;
        persia_shard_release(&reply);
    }
    free(w.files);
    free(w.ledgers);
    free(w.pushes);
    return out;
}
