/* persia.h: the C interface of libpersia.so, all rooms in their order.  Needs
 * C11 and POSIX: -std=gnu11, or -std=c11 -D_POSIX_C_SOURCE=200809L. */
#ifndef PERSIA_H
#define PERSIA_H

#include "base/base.h"
#include "simd/simd.h"
#include "spec/spec.h"
#include "mem/mem.h"
#include "sched/sched.h"
#include "ids/ids.h"
#include "pool/pool.h"
#include "optim/optim.h"
#include "table/table.h"
#include "ckpt/ckpt.h"
#include "wire/wire.h"
#include "rpc/rpc.h"
#include "client/client.h"
#include "server/server.h"
#include "worker/worker.h"
#include "store/store.h"

#endif
