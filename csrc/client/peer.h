/* peer.h: the way to one server, for its shards (private to the client).
 *
 * A call of a server with one shard is sent at once, as the method that it is.
 * Calls of a server with several are queued: peer_flush() sends what waits as
 * one `Many`.  Any thread may queue and flush: what another one has queued
 * leaves only earlier.
 */
#ifndef PERSIA_CLIENT_PEER_H
#define PERSIA_CLIENT_PEER_H

#include "rpc/rpc.h"
#include "wire/wire.h"

typedef struct peer peer;

/* A reply, in memory that those of other calls may share. */
typedef struct peer_reply {
    const void *data;
    size_t n;
    struct peer_bytes *of; /* NULL: nothing to free */
} peer_reply;
void peer_reply_free(peer_reply *r);

/* A call, of the caller's memory until done(). */
typedef struct peer_call {
    struct peer_call *next;
    uint32_t shard, method;
    uint64_t deadline;
    wire_out out; /* taken over */
    /* Once, on any thread; the text of rc is persia_err_text(). *reply is the
     * callee's. */
    void (*done)(struct peer_call *c, int rc, peer_reply *reply);
} peer_call;

/* channel: taken over, also on failure; the address lasts. */
int peer_open(rpc_channel *channel, const char *address, peer **out);
const char *peer_address(const peer *p);
/* Calls end (PERSIA_ECLOSED); returns when all are done.  Others that have the
 * peer can send nothing from then on. */
void peer_close(peer *p);
/* It is closed, or was never used. */
void peer_drop(peer *p);

/* Sends a call by itself. */
void peer_send(peer *p, peer_call *c);
/* Sends it with others of the same deadline at the next peer_flush(), or
 * before, where they have `most` bytes together. */
void peer_queue(peer *p, peer_call *c, uint64_t most);
void peer_flush(peer *p);

#endif
