/* ps.h: the parameter server.
 *
 *   shard.h    a shard in this process: named tables
 *   service.h  a shard behind messages
 *   client.h   all shards of a store, here or elsewhere
 */
#ifndef PERSIA_PS_H
#define PERSIA_PS_H

#include "ps/client.h"
#include "ps/service.h"
#include "ps/shard.h"

#endif
