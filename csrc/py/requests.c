/* requests.c: requests of the room `infer` for Python, and what they are bound
 * to. */
#include <stdlib.h>
#include <string.h>

#include "py/array.h"
#include "py/requests.h"

/* ---- tensors ------------------------------------------------------------ */

static int requests_text(PyObject *o, infer_text *out)
{
    Py_ssize_t n = 0;
    out->data = PyUnicode_AsUTF8AndSize(o, &n);
    out->n = (size_t)n;
    return out->data ? 0 : -1;
}

static PyObject *requests_str(infer_text text)
{
    return PyUnicode_DecodeUTF8(text.data, (Py_ssize_t)text.n, NULL);
}

/* Sizes from a sequence; -1 with an exception set. */
static int requests_shape(PyObject *shape, uint32_t *dims, int64_t *out)
{
    const Py_ssize_t n = PySequence_Size(shape);
    if (n < 0)
        return -1;
    if (n > INFER_DIMS_MAX) {
        py_raise(persia_err_set(PERSIA_ESHAPE,
                                "%zd sizes, a tensor has at most %d", n,
                                INFER_DIMS_MAX));
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *size = PySequence_GetItem(shape, i);
        out[i] = size ? PyLong_AsLongLong(size) : -1;
        Py_XDECREF(size);
        if (PyErr_Occurred())
            return -1;
    }
    *dims = (uint32_t)n;
    return 0;
}

/* Name, type and shape of (name, datatype, shape, ...). */
static int requests_tensor(PyObject *tuple, infer_tensor *out)
{
    PyObject *name, *type, *shape, *ignored;
    infer_text kind;
    if (!PyArg_ParseTuple(tuple, "UUO|O", &name, &type, &shape, &ignored) ||
        requests_text(name, &out->name) || requests_text(type, &kind) ||
        requests_shape(shape, &out->dims, out->shape))
        return -1;
    if (out->name.n > INFER_TEXT_MAX || kind.n > INFER_TEXT_MAX) {
        py_raise(persia_err_set(PERSIA_EPROTOCOL,
                                "a name of more than %d bytes",
                                INFER_TEXT_MAX));
        return -1;
    }
    out->type = persia_infer_type(kind);
    if (out->type < INFER_TYPES)
        return 0;
    py_raise(persia_err_set(PERSIA_EDTYPE, "%s: no datatype '%s'",
                            out->name.data, kind.data));
    return -1;
}

/* The memory of (name, datatype, shape, memory), which is checked. */
static int requests_filled(PyObject *tuple, infer_tensor *out,
                            Py_buffer *view)
{
    PyObject *memory;
    *out = (infer_tensor){0};
    if (requests_tensor(tuple, out) ||
        !(memory = PyTuple_GetItem(tuple, 3)) ||
        PyObject_GetBuffer(memory, view, PyBUF_SIMPLE))
        return -1;
    out->data = view->buf;
    out->bytes = (size_t)view->len;
    const int code = persia_infer_check(out);
    if (!code)
        return 0;
    PyBuffer_Release(view);
    py_raise(code);
    return -1;
}

/* Tensors of a list of tuples, and their memory. */
typedef struct filled {
    infer_tensor *tensors;
    Py_buffer *views;
    size_t n;
} filled;

static void filled_free(filled *f)
{
    for (size_t i = 0; i < f->n; i++)
        PyBuffer_Release(&f->views[i]);
    free(f->tensors);
    free(f->views);
    *f = (filled){0};
}

static int filled_make(PyObject *list, filled *out)
{
    const Py_ssize_t n = PyList_Size(list);
    *out = (filled){0};
    if (n < 0)
        return -1;
    out->tensors = calloc((size_t)n + 1, sizeof *out->tensors);
    out->views = calloc((size_t)n + 1, sizeof *out->views);
    if (!out->tensors || !out->views) {
        filled_free(out);
        PyErr_NoMemory();
        return -1;
    }
    for (; out->n < (size_t)n; out->n++)
        if (requests_filled(PyList_GetItem(list, (Py_ssize_t)out->n),
                             &out->tensors[out->n], &out->views[out->n])) {
            filled_free(out);
            return -1;
        }
    return 0;
}

/* ---- InferPlan ---------------------------------------------------------- */

typedef struct plan_object {
    PyObject_HEAD
    infer_plan *plan;
} plan_object;

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *list;
    infer_tensor t = {0};
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list))
        return NULL;
    const Py_ssize_t n = PyList_Size(list);
    infer_input *inputs = calloc((size_t)n + 1, sizeof *inputs);
    plan_object *p = inputs ? py_new_object(type) : PyErr_NoMemory();
    int failed = !p;
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        failed = requests_tensor(PyList_GetItem(list, i), &t);
        inputs[i] =
            (infer_input){.name = t.name, .type = t.type, .dims = t.dims};
        memcpy(inputs[i].shape, t.shape, sizeof t.shape);
    }
    const int code =
        failed ? 0 : persia_infer_plan(inputs, (size_t)n, &p->plan);
    if (code)
        py_raise(code);
    free(inputs);
    if (failed || code)
        Py_CLEAR(p);
    return (PyObject *)p;
}

static void plan_dealloc(PyObject *self)
{
    persia_infer_plan_free(((plan_object *)self)->plan);
    py_free_object(self);
}

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)"InferPlan(inputs)\n--\n\nInputs of a model: [(name, "
                        "datatype, shape)]; the first size is that of "
                        "samples, -1."},
    {Py_tp_new, (void *)plan_new},
    {Py_tp_dealloc, (void *)plan_dealloc},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "persia._core.InferPlan",
    .basicsize = (int)sizeof(plan_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = plan_slots,
};

/* ---- InferRequest ------------------------------------------------------- */

typedef struct request_object {
    PyObject_HEAD
    infer_item *item;    /* NULL: it was answered */
    PyObject *source;    /* what the tensors of a request from Python are in */
    filled memory;
    PyObject *owner;     /* of whom put it, or NULL */
    PyObject *plan;      /* that it is bound to, or NULL */
    const infer_tensor **found; /* by input of the plan */
    uint64_t samples;           /* of the bound request */
} request_object;

static PyObject *request_new(PyTypeObject *type, PyObject *args,
                             PyObject *kwargs)
{
    static char *words[] = {"model", "version", "tensors", "owner", NULL};
    PyObject *model, *version, *tensors, *owner;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUO!O", words, &model,
                                     &version, &PyList_Type, &tensors,
                                     &owner))
        return NULL;
    request_object *r = py_new_object(type);
    if (!r)
        return NULL;
    r->item = calloc(1, sizeof *r->item);
    if (!r->item)
        PyErr_NoMemory();
    if (!r->item || filled_make(tensors, &r->memory) ||
        requests_text(model, &r->item->request.model) ||
        requests_text(version, &r->item->request.version) ||
        !(r->source = Py_BuildValue("(OOO)", model, version, tensors))) {
        Py_DECREF(r);
        return NULL;
    }
    r->owner = Py_NewRef(owner);
    r->item->request.id = (infer_text){"", 0};
    r->item->request.inputs = r->memory.tensors;
    r->item->request.inputs_n = r->memory.n;
    return (PyObject *)r;
}

PyObject *py_request_of(PyTypeObject *type, infer_item *item)
{
    if (item->owner)
        return item->owner; /* the queue's reference */
    request_object *r = py_new_object(type);
    if (r) {
        r->item = item;
        return (PyObject *)r;
    }
    item->call->fail(item->call, PERSIA_ENOMEM, "");
    persia_infer_item_free(item);
    return NULL;
}

/* The answer is sent: its bytes are gone. */
static void request_end(request_object *r)
{
    free(r->found);
    r->found = NULL;
    if (r->item)
        persia_infer_item_free(r->item);
    r->item = NULL;
    filled_free(&r->memory);
    Py_CLEAR(r->source);
    Py_CLEAR(r->plan);
}

static void request_dealloc(PyObject *self)
{
    request_object *r = (request_object *)self;
    if (r->item && r->item->call)
        r->item->call->fail(r->item->call, PERSIA_EINTERNAL,
                            "the request was not answered");
    request_end(r);
    Py_CLEAR(r->owner);
    py_free_object(self);
}

infer_item *py_request_item(PyObject *self)
{
    infer_item *item = ((request_object *)self)->item;
    if (!item)
        py_closed("the request");
    return item;
}

static rpc_call *request_call(PyObject *self)
{
    const infer_item *item = py_request_item(self);
    if (item && item->call)
        return item->call;
    if (item)
        PyErr_SetString(PyExc_ValueError, "the request is of this process");
    return NULL;
}

static PyObject *request_bind(PyObject *self, PyObject *args)
{
    request_object *r = (request_object *)self;
    const infer_item *item = py_request_item(self);
    PyObject *object;
    unsigned long long limit;
    if (!item || !PyArg_ParseTuple(args, "OK", &object, &limit))
        return NULL;
    const infer_plan *plan = ((plan_object *)object)->plan;
    free(r->found);
    r->found =
        calloc(persia_infer_plan_inputs(plan) + 1, sizeof(infer_tensor *));
    if (!r->found)
        return PyErr_NoMemory();
    const int code = persia_infer_bind(plan, &item->request, limit, r->found,
                                       &r->samples);
    if (code) {
        free(r->found);
        r->found = NULL;
        return py_raise(code);
    }
    PyObject *before = r->plan;
    r->plan = Py_NewRef(object);
    Py_XDECREF(before);
    return PyLong_FromUnsignedLongLong(r->samples);
}

static PyObject *request_shape(const infer_tensor *t)
{
    PyObject *shape = PyTuple_New(t->dims);
    for (uint32_t i = 0; shape && i < t->dims; i++) {
        PyObject *size = PyLong_FromLongLong(t->shape[i]);
        if (!size || PyTuple_SetItem(shape, i, size))
            Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *request_tensors(PyObject *self, PyObject *unused)
{
    const infer_item *item = py_request_item(self);
    PyObject *list = item ? PyList_New(0) : NULL;
    (void)unused;
    for (size_t i = 0; list && i < item->request.inputs_n; i++) {
        const infer_tensor *t = &item->request.inputs[i];
        PyObject *shape = request_shape(t);
        PyObject *one =
            shape ? Py_BuildValue("(s#sNy#)", t->name.data,
                                  (Py_ssize_t)t->name.n,
                                  persia_infer_type_name(t->type), shape,
                                  t->data, (Py_ssize_t)t->bytes)
                  : NULL;
        if (!one || PyList_Append(list, one))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

static PyObject *request_outputs(PyObject *self, void *unused)
{
    const infer_item *item = py_request_item(self);
    (void)unused;
    if (item && !item->request.outputs_n)
        Py_RETURN_NONE;
    PyObject *list = item ? PyList_New(0) : NULL;
    for (size_t i = 0; list && i < item->request.outputs_n; i++) {
        PyObject *name = requests_str(item->request.outputs[i]);
        if (!name || PyList_Append(list, name))
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *request_message(PyObject *self, PyObject *unused)
{
    const rpc_call *call = request_call(self);
    (void)unused;
    return call ? PyBytes_FromStringAndSize(call->request,
                                            (Py_ssize_t)call->request_n)
                : NULL;
}

static void request_send(request_object *r, wire_out *out)
{
    rpc_call *call = r->item->call;
    r->item->call = NULL;
    Py_BEGIN_ALLOW_THREADS
    call->reply(call, out, NULL, NULL);
    Py_END_ALLOW_THREADS
    request_end(r);
}

static PyObject *request_reply(PyObject *self, PyObject *args)
{
    PyObject *version, *outputs;
    infer_text name;
    filled found;
    wire_out out;
    if (!request_call(self) ||
        !PyArg_ParseTuple(args, "UO!", &version, &PyList_Type, &outputs) ||
        requests_text(version, &name) || filled_make(outputs, &found))
        return NULL;
    request_object *r = (request_object *)self;
    const int code = persia_infer_encode(&r->item->request, name,
                                         found.tensors, found.n, &out);
    filled_free(&found);
    if (code)
        return py_raise(code);
    request_send(r, &out);
    Py_RETURN_NONE;
}

static PyObject *request_reply_message(PyObject *self, PyObject *arg)
{
    char *data;
    Py_ssize_t n;
    wire_out out;
    if (!request_call(self) || PyBytes_AsStringAndSize(arg, &data, &n))
        return NULL;
    persia_wire_out_init(&out);
    const int code = persia_wire_out_add(&out, data, (size_t)n);
    if (code)
        return py_raise(code);
    request_send((request_object *)self, &out);
    Py_RETURN_NONE;
}

static PyObject *request_fail(PyObject *self, PyObject *args)
{
    const char *name;
    PyObject *text;
    rpc_call *call = request_call(self);
    if (!call || !PyArg_ParseTuple(args, "sU", &name, &text))
        return NULL;
    /* Paths of files may be no UTF-8. */
    PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "replace");
    if (!bytes)
        return NULL;
    ((request_object *)self)->item->call = NULL;
    Py_BEGIN_ALLOW_THREADS
    call->fail(call, persia_err_code(name), PyBytes_AsString(bytes));
    Py_END_ALLOW_THREADS
    Py_DECREF(bytes);
    request_end((request_object *)self);
    Py_RETURN_NONE;
}

static PyObject *request_model(PyObject *self, void *unused)
{
    const infer_item *item = py_request_item(self);
    (void)unused;
    return item ? requests_str(item->request.model) : NULL;
}

static PyObject *request_version(PyObject *self, void *unused)
{
    const infer_item *item = py_request_item(self);
    (void)unused;
    return item ? requests_str(item->request.version) : NULL;
}

static PyObject *request_owner(PyObject *self, void *unused)
{
    PyObject *owner = ((request_object *)self)->owner;
    (void)unused;
    return Py_NewRef(owner ? owner : Py_None);
}

static PyObject *request_method(PyObject *self, void *unused)
{
    const rpc_call *call = request_call(self);
    (void)unused;
    return call ? PyUnicode_FromString(
                      strrchr(persia_infer_methods.paths[call->method], '/') +
                      1)
                : NULL;
}

static PyObject *request_traceparent(PyObject *self, void *unused)
{
    char text[128];
    rpc_call *call = request_call(self);
    (void)unused;
    if (!call)
        return NULL;
    *text = 0;
    if (call->header)
        call->header(call, "traceparent", text, sizeof text);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *request_waited(PyObject *self, void *unused)
{
    const infer_item *item = py_request_item(self);
    (void)unused;
    return item ? PyFloat_FromDouble(
                      (double)(persia_clock_ns() - item->began) / 1e9)
                : NULL;
}

static PyObject *request_late(PyObject *self, void *unused)
{
    const infer_item *item = py_request_item(self);
    (void)unused;
    return item ? PyBool_FromLong(item->until < persia_clock_ns()) : NULL;
}

static PyMethodDef request_methods[] = {
    {"bind", request_bind, METH_VARARGS,
     "bind(plan, limit)\n--\n\nChecks that its tensors are the inputs of an "
     "InferPlan, of at most so many samples; how many it has."},
    {"tensors", request_tensors, METH_NOARGS,
     "tensors()\n--\n\n[(name, datatype, shape, bytes)], copied."},
    {"message", request_message, METH_NOARGS,
     "message()\n--\n\nThe bytes of a call of another method."},
    {"reply", request_reply, METH_VARARGS,
     "reply(version, outputs)\n--\n\nAnswers a call: [(name, datatype, shape, "
     "memory)]."},
    {"reply_message", request_reply_message, METH_O,
     "reply_message(message)\n--\n\nAnswers a call of another method."},
    {"fail", request_fail, METH_VARARGS,
     "fail(code, text)\n--\n\nAnswers a call with an error; code: the name of "
     "its class."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef request_getset[] = {
    {"model", request_model, NULL, "The name of its model.", NULL},
    {"version", request_version, NULL, "Of the model; '': any.", NULL},
    {"outputs", request_outputs, NULL, "Names, or None: all.", NULL},
    {"owner", request_owner, NULL, "What was given; None: a call.", NULL},
    {"method", request_method, NULL, "The name of a call's method.", NULL},
    {"traceparent", request_traceparent, NULL,
     "The metadata of a call by that name, or ''.", NULL},
    {"waited", request_waited, NULL, "Seconds since it arrived.", NULL},
    {"late", request_late, NULL, "Whether its deadline has passed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot request_slots[] = {
    {Py_tp_doc, (void *)"InferRequest(model, version, tensors, owner)\n--\n\n"
                        "A request: [(name, datatype, shape, memory)]."},
    {Py_tp_new, (void *)request_new},
    {Py_tp_dealloc, (void *)request_dealloc},
    {Py_tp_methods, request_methods},
    {Py_tp_getset, request_getset},
    {0, NULL},
};

static PyType_Spec request_spec = {
    .name = "persia._core.InferRequest",
    .basicsize = (int)sizeof(request_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = request_slots,
};

/* ---- gather ------------------------------------------------------------- */

/* The bound requests of a list, all of one plan; the array is the caller's to
 * free. */
static const request_object **requests_bound(PyObject *list, size_t *n,
                                             uint64_t *samples)
{
    const Py_ssize_t count = PyList_Size(list);
    const request_object **out = calloc((size_t)count + 1, sizeof *out);
    *samples = 0;
    *n = (size_t)count;
    if (!out)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; out && i < count; i++) {
        out[i] = (request_object *)PyList_GetItem(list, i);
        if (!out[i]->found || out[i]->plan != out[0]->plan) {
            PyErr_SetString(PyExc_ValueError, "requests are not bound");
            free(out);
            return NULL;
        }
        *samples += out[i]->samples;
    }
    return out;
}

static void request_copy_inputs(const request_object *const *requests,
                                size_t n, const infer_plan *plan,
                                size_t first, size_t count, char *to)
{
    for (size_t at = first; at < first + count; at++) {
        const infer_input *in = persia_infer_plan_input(plan, at);
        for (size_t i = 0; i < n; i++) {
            persia_infer_copy(in, requests[i]->found[at],
                              requests[i]->samples, to);
            to += in->row * requests[i]->samples;
        }
    }
}

static PyObject *requests_gather(PyObject *module, PyObject *args)
{
    PyObject *list, *memory;
    Py_ssize_t first, count;
    size_t n, bytes = 0;
    uint64_t samples;
    array out;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!nnO", &PyList_Type, &list, &first, &count,
                          &memory))
        return NULL;
    const request_object **requests = requests_bound(list, &n, &samples);
    if (!requests || !n) {
        free(requests);
        return requests ? Py_NewRef(Py_None) : NULL;
    }
    const infer_plan *plan = ((plan_object *)requests[0]->plan)->plan;
    const size_t inputs = persia_infer_plan_inputs(plan);
    int failed = first < 0 || count < 0 || (size_t)first > inputs ||
                 (size_t)count > inputs - (size_t)first;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "the plan has no such inputs");
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        bytes += persia_infer_plan_input(plan, (size_t)(first + i))->row *
                 samples;
    failed = failed || array_take(memory, "out", 1, bytes, &out);
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        request_copy_inputs(requests, n, plan, (size_t)first, (size_t)count,
                            out.view.buf);
        Py_END_ALLOW_THREADS
        array_drop(&out);
    }
    free(requests);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *requests_thread_prompt(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    persia_thread_prompt();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"infer_gather", requests_gather, METH_VARARGS,
     "infer_gather(requests, first, count, out)\n--\n\nCopies some inputs of "
     "bound InferRequests, one input behind the other: [count, samples, "
     "...]."},
    {"thread_prompt", requests_thread_prompt, METH_NOARGS,
     "thread_prompt()\n--\n\nThis thread runs once it is woken, also while "
     "others compute, where the kernel can."},
    {NULL, NULL, 0, NULL},
};

int py_add_requests(PyObject *module)
{
    return PyModule_AddFunctions(module, functions) ||
                   !py_add_type(module, &plan_spec) ||
                   !py_add_type(module, &request_spec)
               ? -1
               : 0;
}
