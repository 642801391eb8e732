/* versions.c: what differs between gRPC cores, and what 1.51 needs. */
#include "rpc/core.h"

#include <grpc/support/log.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

/* Of the process, if it may. */
enum { FILES = 65536 };

/* The core of gRPC 1.57; patches of earlier ones do not show in it. */
enum { CORE_PATCHED = 34 };

const char *persia_rpc_version(void)
{
    return grpc_version_string();
}

/* Of 1.51.  Distributions may have patched theirs. */
const char *persia_rpc_holes(void)
{
    return strtol(grpc_version_string(), NULL, 10) < CORE_PATCHED
               ? "CVE-2023-1428, CVE-2023-4785, CVE-2023-32731, "
                 "CVE-2023-33953"
               : "";
}

/* gRPC tells on stderr what we report as errors; it does so only for those
 * who asked for it.  Cores from 1.66 on have Abseil's log instead of this
 * function: csrc/grpc builds the one of wheels silent. */
#ifdef PERSIA_GRPC_LOGS
static void log_nothing(gpr_log_func_args *args)
{
    (void)args;
}
#endif

void core_quiet(void)
{
#ifdef PERSIA_GRPC_LOGS
    if (!getenv("GRPC_VERBOSITY") && !getenv("GRPC_TRACE"))
        gpr_set_log_function(log_nothing);
#endif
}

/* Later cores refuse calls that arrive while earlier ones still lie in their
 * memory, and at random once 1000 wait for a slot.  Here they wait: --calls
 * and --connections are the limits.  For 1.51 these keys mean nothing. */
void core_server_args(rpc_args *a)
{
    args_integer(a, "grpc.http.overload_protection", 0);
    args_integer(a, "grpc.server.max_pending_requests", INT_MAX);
    args_integer(a, "grpc.server.max_pending_requests_hard_limit", INT_MAX);
}

/* A listener of gRPC 1.51 that once finds no file descriptor free takes no
 * connection ever again: raise the limit as far as we may.  Connections may
 * take half of it: others arrive before those beyond the limit are closed. */
uint32_t core_connections_max(void)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) != 0)
        return UINT32_MAX;
    rlim_t wanted = l.rlim_max < FILES ? l.rlim_max : FILES;
    if (l.rlim_cur < wanted) {
        rlim_t before = l.rlim_cur;
        l.rlim_cur = wanted;
        if (setrlimit(RLIMIT_NOFILE, &l) != 0)
            l.rlim_cur = before;
    }
    return l.rlim_cur / 2 < UINT32_MAX ? (uint32_t)(l.rlim_cur / 2) + 1
                                       : UINT32_MAX;
}

/* A handshake that fails is UNAVAILABLE in all cores (1.51 to 1.85), as is a
 * server that is down, and only the text says which.  If a core words it in
 * another way a wrong certificate is tried again until the call's deadline:
 * csrc/tests/rpc/test_security.c fails then. */
int core_refuses_certificate(const char *details)
{
    return strstr(details, "certificate") != NULL;
}

/* A connection that ends in the handshake; of 1.51 on.  For texts alone. */
const char *core_hint(const char *details)
{
    return strstr(details, "connect") && strstr(details, "closed")
               ? " (maybe it asks for TLS, or for a certificate)"
               : "";
}
