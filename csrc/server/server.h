/* server.h: a shard behind messages: requests of wire.h in, replies out.
 *
 * Knows nothing of connections: the owner of a request makes an rpc_call of it
 * (rpc_server over gRPC, a local channel, a test).  Requests of many clients
 * run side by side on the threads that bring them.
 *
 * Requests that wait (see shard.h) hold no thread; one timer ends those that
 * have waited too long.
 */
#ifndef PERSIA_SERVER_H
#define PERSIA_SERVER_H

#include "shard/shard.h"
#include "rpc/rpc.h"
#include "wire/wire.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_service ps_service;

typedef struct service_config {
    char name_space[WIRE_NAME];
    uint32_t shard, shards;
    uint64_t lineage;         /* of the rows; 0: chosen */
    uint64_t boot;            /* of a shard that moves here; 0: chosen */
    uint64_t message_limit;   /* bytes, told to clients */
    ckpt_places files;        /* of snapshots and restores, or zeros: none */
    int lines; /* file descriptor for a line on each call that is denied, row
                  that is restored, cleared, erased or dropped, and stream that
                  is taken over; 0: none */
    int lines_json; /* they are objects of JSON */
    uint64_t slow_ns; /* calls that take longer are noted; 0: none */
    int audit; /* file descriptor for all of these, as JSON; 0: none */
    updates_log *log; /* see shard_config */
} service_config;

/* The shard must outlive the service. */
PERSIA_API int persia_service_create(tables *p, const service_config *config,
                                     ps_service **out);
/* So many requests run at once, and one that waits is one of them (0:
 * any number may be): see persia_shard_set_calls(). */
PERSIA_API void persia_service_set_calls(ps_service *s, uint32_t calls);
/* persia_shard_replay().  A service with a log answers clients from
 * persia_shard_ready() on; Stats before, too. */
PERSIA_API int persia_service_replay(ps_service *s, uint64_t from,
                                     log_found *found);
/* Fails what is parked, and every call from now on but Hello, Snapshot and
 * Stats, with PERSIA_EUNAVAILABLE: the server is about to stop. */
PERSIA_API void persia_service_close(ps_service *s);
/* It is not about to stop after all. */
PERSIA_API void persia_service_open(ps_service *s);
/* Drops a snapshot that a client has begun and may not end any more: after the
 * last call of others. */
PERSIA_API void persia_service_end_snapshot(ps_service *s);
/* Closes, too; no call may follow.  1 if the thread of a snapshot or restore
 * hangs in a file: service and shard must stay until the process ends. */
PERSIA_API int persia_service_destroy(ps_service *s);
/* The shard behind it, for a client of this process. */
PERSIA_API shard *persia_service_shard(ps_service *s);
/* Answers the call, now or later: an rpc_handler. */
PERSIA_API void persia_service_handle(void *service, rpc_call *call);
/* Logs a call that did not get through to it: of an rpc_server_config. */
PERSIA_API void persia_service_denied(void *service, const char *method,
                                      const char *peer, const char *name,
                                      const char *reason);

/* ---- several shards -----------------------------------------------------
 *
 * A host is the shards of a process behind one address: it finds the one that
 * a request is for.  `Many` names it for each of its calls: they are handed to
 * their shards one after the other, and answered together when the last one
 * is.  Any other call is for the shard that was first at the beginning, which
 * says in its Hello which others can be asked for.
 *
 * Shards may be put in and taken out at any time.  Of one that has gone to
 * another server the host says where it is (PERSIA_EMOVED, the address is the
 * last word of the text); calls of others that are not here fail
 * (PERSIA_EUNAVAILABLE).  What moves them is the process: it takes the calls
 * of Move. */

typedef struct ps_host ps_host;

/* The shards of these services, of one job, in the order of their numbers
 * (else PERSIA_EARG); there may be none. */
PERSIA_API int persia_host_create(ps_service *const *services, size_t n,
                                  ps_host **out);
/* After the last call. */
PERSIA_API void persia_host_destroy(ps_host *h);
/* Puts a shard in, which must outlive the host unless it is taken out. */
PERSIA_API int persia_host_add(ps_host *h, ps_service *service);
/* Takes a shard out; address: where it is since this move, or NULL.  Its calls
 * that are parked are its service's to end. */
PERSIA_API int persia_host_remove(ps_host *h, uint32_t shard,
                                  const char *address, uint64_t move);
/* A shard that is not here is there since this move, unless a later one is
 * known: later moves have higher numbers.  0: before all moves. */
PERSIA_API int persia_host_place(ps_host *h, uint32_t shard,
                                 const char *address, uint64_t move);
/* The next call of Move, to be answered by persia_host_give(); NULL: there was
 * none for so long. */
typedef struct host_move host_move;
PERSIA_API host_move *persia_host_take(ps_host *h, uint64_t wait_ns);
/* What it asks, until it is answered. */
PERSIA_API const wire_move *persia_host_message(const host_move *move);
/* rc: of persia_err_text(). */
PERSIA_API void persia_host_give(host_move *move, int rc,
                                 const wire_move_reply *reply);
/* Calls of Move fail from now on, and those that were not taken. */
PERSIA_API void persia_host_close(ps_host *h);
/* Answers the call, now or later: an rpc_handler. */
PERSIA_API void persia_host_handle(void *host, rpc_call *call);
/* persia_service_denied() */
PERSIA_API void persia_host_denied(void *host, const char *method,
                                   const char *peer, const char *name,
                                   const char *reason);

#ifdef __cplusplus
}
#endif
#endif
