/* none.c: instead of the files that drive gRPC, where it was not there when
 * persia was built.
 */
#include "rpc/channel.h"

static int none_without(const char *what, const char *address)
{
    return persia_err_set(
        PERSIA_EUNAVAILABLE,
        "%s %s: this build of persia has no gRPC; build it again "
        "where libgrpc-dev is installed",
        what, address ? address : "");
}

int persia_rpc_available(void)
{
    return 0;
}

const char *persia_rpc_version(void)
{
    return "none";
}

const char *persia_rpc_holes(void)
{
    return "";
}

int persia_rpc_server_start(const rpc_server_config *config, rpc_server **out)
{
    *out = NULL;
    return none_without("serving at", config->address);
}

int persia_rpc_server_port(const rpc_server *s)
{
    (void)s;
    return 0;
}

rpc_counts persia_rpc_server_counts(const rpc_server *s)
{
    (void)s;
    return (rpc_counts){0};
}

const rpc_denied *persia_rpc_server_denied(const rpc_server *s)
{
    (void)s;
    return NULL;
}

const rpc_times *persia_rpc_server_times(const rpc_server *s)
{
    (void)s;
    return NULL;
}

void persia_rpc_server_health(rpc_server *s, int serving)
{
    (void)s;
    (void)serving;
}

void persia_rpc_server_stop(rpc_server *s, uint64_t grace_ns)
{
    (void)s;
    (void)grace_ns;
}

int persia_rpc_channel_open(const rpc_channel_config *config,
                            rpc_channel **out)
{
    *out = NULL;
    return none_without("connecting to", config->address);
}

/* There are no channels. */

int persia_rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
                     uint64_t timeout_ns, rpc_callback callback, void *ctx)
{
    (void)c;
    (void)method;
    (void)timeout_ns;
    (void)callback;
    (void)ctx;
    persia_wire_out_free(o);
    return none_without("calling", NULL);
}

void persia_rpc_channel_close(rpc_channel *c)
{
    (void)c;
}

const char *persia_rpc_channel_address(const rpc_channel *c)
{
    (void)c;
    return "";
}

int persia_rpc_peers(rpc_connection **out, size_t *n)
{
    *out = NULL;
    *n = 0;
    return PERSIA_OK;
}
