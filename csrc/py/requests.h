/* requests.h: requests to models as objects of Python (private). */
#ifndef PERSIA_PY_REQUESTS_H
#define PERSIA_PY_REQUESTS_H

#include "infer/infer.h"
#include "py/py.h"

/* An item that was taken from the queue, as an InferRequest, whose type is
 * given; takes it over.  NULL with an exception set: it was refused. */
PyObject *py_request_of(PyTypeObject *type, infer_item *item);
/* The item of an InferRequest; NULL with an exception set where it was
 * answered. */
infer_item *py_request_item(PyObject *self);

#endif
