/* connections.h: a server's limit of connections (private to rpc).
 *
 * gRPC 1.51 has none, and its listener is lost for ever once the process has
 * no file descriptor left.  So a thread counts the connections of the server's
 * port ten times a second (less often where there are many), and closes the
 * latest beyond the limit; earlier ones stay.  Nothing reports a connection
 * that gRPC has accepted: epoll does not once it is.
 */
#ifndef PERSIA_RPC_CONNECTIONS_H
#define PERSIA_RPC_CONNECTIONS_H

#include <stdint.h>

typedef struct connections connections;

/* Of the port at which this process listens already; max >= 1. */
int connections_guard(int port, uint32_t max, connections **out);
/* Those open, and those closed for the limit since the beginning. */
void connections_count(const connections *c, uint64_t *open,
                       uint64_t *refused);
/* Ends the thread; before the server closes its listener. */
void connections_free(connections *c);

#endif
