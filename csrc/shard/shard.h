/* shard.h: a shard of the parameter server.
 *
 *   ops.h      one shard, wherever it is: the calls
 *   tables.h   named tables that share threads and a memory limit
 *   ledger.h   which updates of each stream were applied
 *   sync.h     the parts of one step of all ranks
 *   numbers.h  a window of numbers, of the size that travels
 */
#ifndef PERSIA_SHARD_H
#define PERSIA_SHARD_H

#include "shard/ledger.h"
#include "shard/numbers.h"
#include "shard/ops.h"
#include "shard/sync.h"
#include "shard/tables.h"

#endif
