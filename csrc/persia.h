/* persia.h: the public C interface: clients (a table's rows in this process or
 * on servers), loops on them (lookups, updates; a loop is what a persia.Store
 * owns), servers, codes of errors.
 *
 * Every function that libpersia.so exports begins with persia_.  Calls return
 * a code of base/base.h; persia_err_text() has the text of the last error of
 * this thread.  Needs C11 and POSIX: -std=gnu11, or -std=c11
 * -D_POSIX_C_SOURCE=200809L. */
#ifndef PERSIA_H
#define PERSIA_H

#include "base/base.h"
#include "client/client.h"
#include "loop/loop.h"
#include "server/server.h"

#endif
