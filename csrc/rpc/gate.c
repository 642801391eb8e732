/* gate.c: who may call which method of a service. */
#include <stdlib.h>
#include <string.h>

#include "rpc/identity.h"

struct rpc_gate {
    const rpc_methods *methods;
    identity *identity;
    rpc_denied denied;
};

static const char SCHEME[] = "Bearer ";

/* The name of its method for texts. */
static const char *gate_path(const rpc_methods *m, uint32_t method)
{
    return method < m->n ? m->paths[method] : "?";
}

/* ---- what is denied ---- */

/* Under the first role of the caller, or as one without a role. */
static void gate_count(rpc_denied *d, enum rpc_reason why, const rpc_who *who)
{
    uint32_t role = 0;
    while (role < RPC_ROLES && !(who && who->roles >> role & 1))
        role++;
    if (who && who->roles == RPC_ALL)
        role = RPC_ROLES - 1; /* admin */
    if (d)
        atomic_fetch_add(&d->n[why][role], 1);
}

int persia_rpc_deny(const rpc_call *call, enum rpc_reason why,
                    const char *what)
{
    gate_count(call->denied, why, call->who);
    return persia_err_set(PERSIA_EDENIED, "%s: this token is not for it",
                          what);
}

static int gate_check(const rpc_methods *m, uint32_t method,
                      const rpc_who *who, rpc_denied *denied)
{
    if (who && method < m->n && who->roles & m->roles[method])
        return PERSIA_OK;
    gate_count(denied, RPC_ROLE, who);
    return persia_err_set(PERSIA_EDENIED, "%s%s", gate_path(m, method),
                          method < m->n && m->admin >> method & 1
                              ? " is administration: it needs a token for that"
                              : ": the role of this token may not call it");
}

int persia_rpc_may(const rpc_methods *m, const rpc_call *call)
{
    return gate_check(m, call->method, call->who, call->denied);
}

/* ---- the gate ---- */

int persia_rpc_gate_open(const rpc_security *s, const rpc_methods *methods,
                         rpc_gate **out)
{
    rpc_gate *g = calloc(1, sizeof *g);
    *out = NULL;
    if (!g)
        return persia_err_set(PERSIA_ENOMEM, "no memory for tokens");
    g->methods = methods;
    int rc = identity_open(s, &g->identity);
    if (rc)
        free(g);
    else
        *out = g;
    return rc;
}

void persia_rpc_gate_close(rpc_gate *g)
{
    if (!g)
        return;
    identity_close(g->identity);
    free(g);
}

rpc_denied *persia_rpc_gate_denied(rpc_gate *g)
{
    return &g->denied;
}

uint64_t persia_rpc_denied_sum(const rpc_denied *d)
{
    uint64_t sum = 0;
    for (size_t why = 0; why < RPC_REASONS; why++)
        for (size_t role = 0; role <= RPC_ROLES; role++)
            sum += atomic_load(&d->n[why][role]);
    return sum;
}

/* The token of a header; NULL: it has none. */
static const char *gate_token(const char *header, size_t *n)
{
    const size_t scheme = sizeof SCHEME - 1;
    if (!header || *n < scheme || memcmp(header, SCHEME, scheme) != 0)
        return NULL;
    *n -= scheme;
    return header + scheme;
}

static int gate_refuse(rpc_gate *g, rpc_pass *p)
{
    static const char *const texts[RPC_REASONS] = {
        [RPC_MISSING] = "no token was shown",
        [RPC_WRONG] = "the token is wrong",
        [RPC_EXPIRED] = "the token has expired",
    };
    gate_count(&g->denied, p->why, p->who);
    return persia_err_set(PERSIA_EDENIED, "%s", texts[p->why]);
}

/* Counts a call that the role allows, or refuses one too many. */
static int gate_meter(rpc_gate *g, rpc_pass *p)
{
    access_meter *m = access_meter_of(p->who);
    if (!m)
        return PERSIA_OK;
    p->wait_ms = access_meter_enter(m, p->who, persia_clock_ns());
    if (!p->wait_ms) {
        p->meter = m;
        return PERSIA_OK;
    }
    p->why = RPC_LIMIT;
    gate_count(&g->denied, p->why, p->who);
    return persia_err_set(PERSIA_ELIMIT,
                          "%s makes more calls than its tokens are for",
                          p->who->name);
}

int persia_rpc_gate_enter(rpc_gate *g, uint32_t method, const char *header,
                          size_t n, const rpc_peer *peer, rpc_pass *out)
{
    *out = (rpc_pass){.access = identity_access(g->identity)};
    const char *token = gate_token(header, &n);
    out->who = access_find(out->access, token, n, peer,
                           (int64_t)persia_clock_seconds(), &out->why);
    int rc = out->who ? gate_check(g->methods, method, out->who, &g->denied)
                      : gate_refuse(g, out);
    if (!rc)
        rc = gate_meter(g, out);
    else if (out->who)
        out->why = RPC_ROLE;
    return rc;
}

void persia_rpc_gate_leave(rpc_pass *p)
{
    if (p->meter)
        access_meter_leave(p->meter);
    access_drop(p->access);
    *p = (rpc_pass){.access = NULL};
}
