/* far.h: storage that is no folder, as Python reaches it, for server.c. */
#ifndef PERSIA_PY_FAR_H
#define PERSIA_PY_FAR_H

#include "py/py.h"

#include "ckpt/ckpt.h"

/* The storage behind open(root, folder, proof, writes), which returns an
 * object with descriptor, put(name), get(names) and close(); the callable is
 * kept until persia_ckpt_root_close(). */
ckpt_far py_far(PyObject *open);

#endif
