/* log.c: the log of a server, for persia._core.Server, and a function that
 * reads one. */
#include <stdio.h>
#include <string.h>

#include "log/log.h"
#include "py/log.h"
#include "py/py.h"
#include "wire/wire.h"

int py_log_open(PyObject *options, const char *name_space, uint32_t shard,
                uint32_t shards, updates_log **out)
{
    log_config config = {.owner = {.shard = shard, .shards = shards}};
    const char *path;
    unsigned long long segment, limit;
    int level;
    log_disk *disk = NULL;
    *out = NULL;
    if (options == Py_None)
        return 0;
    if (!PyArg_ParseTuple(options, "siKK", &path, &level, &segment, &limit))
        return -1;
    memcpy(config.owner.name_space, name_space, strlen(name_space) + 1);
    config.level = (enum log_level)level;
    config.segment = segment;
    config.limit = limit;
    int rc = persia_log_disk_open(path, 1, &disk);
    if (!rc)
        rc = persia_log_open(disk, &config, out);
    if (!rc)
        return 0;
    if (disk)
        disk->free(disk);
    py_raise(rc);
    return -1;
}

PyObject *py_log_found(const log_found *f)
{
    static const spec_field fields[] = {
        PY_COUNT(log_found, first), PY_COUNT(log_found, end),
        PY_COUNT(log_found, records), PY_COUNT(log_found, segments),
        PY_COUNT(log_found, torn),
    };
    return py_of_counts(fields, sizeof fields / sizeof fields[0], f);
}

PyObject *py_log_counts(updates_log *l)
{
    static const spec_field fields[] = {
        PY_COUNT(log_counts, end), PY_COUNT(log_counts, synced),
        PY_COUNT(log_counts, cut), PY_COUNT(log_counts, records),
        PY_COUNT(log_counts, bytes), PY_COUNT(log_counts, refused),
    };
    log_counts n;
    int wants_cut;
    /* The log's lock is held while the disk writes. */
    Py_BEGIN_ALLOW_THREADS
    n = persia_log_count(l);
    wants_cut = persia_log_wants_cut(l);
    Py_END_ALLOW_THREADS
    PyObject *out =
        py_of_counts(fields, sizeof fields / sizeof fields[0], &n);
    if (out && (py_dict_add(out, "failed", PyBool_FromLong(n.failed)) ||
                py_dict_add(out, "wants_cut", PyBool_FromLong(wants_cut))))
        Py_CLEAR(out);
    return out;
}

/* ---- reading ------------------------------------------------------------ */

/* The checkpoint that a record restores, "root/folder"; "": it is no such
 * record. */
static int log_restore_name(const log_record *r, char *out, size_t room)
{
    wire_memory memory;
    wire_restore m;
    *out = 0;
    if (r->type != LOG_RESTORE || r->n != 1)
        return PERSIA_OK;
    persia_wire_memory_init(&memory);
    int rc = persia_wire_get_restore(r->parts->data, r->parts->n, &memory, &m);
    if (!rc)
        snprintf(out, room, "%s/%s", m.root, m.folder);
    persia_wire_memory_free(&memory);
    return rc;
}

/* A record for a callback. */
static int give_record(void *ctx, const log_record *r)
{
    uint64_t bytes = 0;
    char name[513];
    int rc = log_restore_name(r, name, sizeof name);
    if (rc)
        return rc;
    for (size_t i = 0; i < r->n; i++)
        bytes += r->parts[i].n;
    PyObject *answer = PyObject_CallFunction(
        ctx, "sKKKIsKs", persia_log_type_name(r->type),
        (unsigned long long)r->position, (unsigned long long)bytes,
        (unsigned long long)r->n, (unsigned)r->seconds, r->file,
        (unsigned long long)r->offset, name);
    if (!answer)
        return PERSIA_EINTR;
    Py_DECREF(answer);
    return PERSIA_OK;
}

static PyObject *log_read(PyObject *module, PyObject *args)
{
    const char *path;
    unsigned long long from;
    PyObject *fn;
    log_disk *disk = NULL;
    updates_log *l = NULL;
    log_owner owner;
    log_found found = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "sKO", &path, &from, &fn))
        return NULL;
    int rc = persia_log_disk_open(path, 0, &disk);
    if (!rc)
        rc = persia_log_look(disk, &l, &owner);
    if (rc && disk)
        disk->free(disk);
    if (!rc)
        rc = persia_log_read(l, from == UINT64_MAX ? persia_log_first(l)
                                                   : from,
                             give_record, fn, NULL, &found);
    persia_log_close(l);
    if (PyErr_Occurred())
        return NULL;
    if (rc)
        return py_raise(rc);
    return Py_BuildValue("N(sII)", py_log_found(&found), owner.name_space,
                         owner.shard, owner.shards);
}

static PyMethodDef functions[] = {
    {"log_read", log_read, METH_VARARGS,
     "log_read(path, position, fn)\n--\n\nReads the log of a server from a "
     "position on (2^64 - 1: from its first record), checks it, and calls "
     "fn(type, position, bytes, parts, seconds, file, offset, restored) for "
     "each record, restored: \"root/folder\" of a checkpoint, or \"\"; what "
     "was found, and (namespace, shard, shards)."},
    {NULL, NULL, 0, NULL},
};

int py_add_log(PyObject *module)
{
    return PyModule_AddFunctions(module, functions) ||
                   PyModule_AddIntConstant(module, "LOG_PROCESS",
                                           LOG_PROCESS) ||
                   PyModule_AddIntConstant(module, "LOG_DISK", LOG_DISK)
               ? -1
               : 0;
}
