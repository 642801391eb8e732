/* net.h: room rpc between nodes of a simulation.
 *
 * A request leaves as bytes, arrives at the server that listens at its address
 * then, is handled by a thread of its node, and the reply returns likewise.
 * What happens to each message is drawn from `net_faults`.
 */
#ifndef PERSIA_TESTS_SIM_NET_H
#define PERSIA_TESTS_SIM_NET_H

#include "rpc/rpc.h"
#include "tests/sim/sim.h"

enum { NET_SLOTS = 16 };

/* Of 1,000 messages each. */
typedef struct net_faults {
    uint64_t delay;      /* ns that a message takes at most */
    uint32_t lose;       /* the connection breaks before a request arrives */
    uint32_t lose_reply; /* ... before its reply arrives: it was served */
    uint32_t break_early; /* ... and the request arrives later */
    uint32_t late;       /* takes up to 30 s */
    uint32_t twice;      /* requests arrive twice */
} net_faults;
void net_set_faults(const net_faults *f);

/* Until then a message takes up to so long. */
void net_slow(uint64_t delay, uint64_t until);
/* Nothing from one slot reaches the other until then. */
void net_cut(int from, int to, uint64_t until);
/* No cuts, no faults. */
void net_heal(void);

/* Requests to the address are given to handler(ctx), by threads of this node.
 * It stays so until the node is killed, or net_close(). */
void net_listen(sim_node *n, const char *address, rpc_handler handler,
                void *ctx, const char *(*name)(uint32_t method));
void net_close(sim_node *n);
/* Whether it is certain, for the caller, that nothing listens at an address.
 */
int net_refuses(const char *address);
/* Waits until the node sends an answer to a request of this kind, for a moment
 * at most; that answer takes up to 4 s.  0: it sent none. */
int net_await_answer(sim_node *n, uint32_t method);
/* The node was killed: its clients find out, soon or by their deadlines. */
void net_killed(sim_node *n);

#endif
