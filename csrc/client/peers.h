/* peers.h: the servers that a client knows, by address (private to the
 * client).  A peer is there until the last user of them is gone; so is its
 * address.  Any thread may call. */
#ifndef PERSIA_CLIENT_PEERS_H
#define PERSIA_CLIENT_PEERS_H

#include "client/peer.h"

typedef struct peers peers;

/* Channels are opened as this one, which is copied, is. */
int peers_open(const rpc_channel_config *config, peers **out);
peers *peers_get(peers *p);
/* The peer of an address, which need not be there yet.  PERSIA_ECLOSED after
 * peers_close(). */
int peers_find(peers *p, const char *address, peer **out);
/* The one behind this one, of all in turn: itself if there is no other. */
peer *peers_behind(peers *p, const peer *one);
/* peer_flush() of all. */
void peers_flush(peers *p);
/* peer_close() of all. */
void peers_close(peers *p);
/* Gives back what peers_open() or peers_get() gave; they are closed. */
void peers_drop(peers *p);

#endif
