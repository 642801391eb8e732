/* rpc.h: requests and replies as bytes, over gRPC.
 *
 * The only room that includes gRPC.  Without gRPC it is built from none.c:
 * persia_rpc_available() is 0, and servers and channels fail with
 * PERSIA_EUNAVAILABLE.
 *
 * A client's channel stands for one server.  A call takes a gather list,
 * gives one callback and, if all went well, one contiguous reply.  A server
 * gives each request to a handler as an rpc_call, which is answered exactly
 * once, by any thread, now or later.
 */
#ifndef PERSIA_RPC_H
#define PERSIA_RPC_H

#include "mem/mem.h"
#include "sched/sched.h"

#include <stdatomic.h>

#ifdef __cplusplus
extern "C" {
#endif

PERSIA_API int persia_rpc_available(void);
/* Of the core that is loaded, which counts on its own ("29.0.0" is of gRPC
 * 1.51); "none". */
PERSIA_API const char *persia_rpc_version(void);
/* Published holes of that core by which anybody who reaches a port can stop a
 * server: numbers of CVE; "": none is known. */
PERSIA_API const char *persia_rpc_holes(void);

/* ---- who may call what -------------------------------------------------- */

/* What tokens are for; X(ROLE, name).  The role admin includes all others. */
#define RPC_ROLES_EACH(X)                                                     \
    X(TRAIN, train)                                                           \
    X(FEED, feed)                                                             \
    X(READ, read)                                                             \
    X(PUBLISH, publish)                                                       \
    X(SERVE, serve)                                                           \
    X(SCRAPE, scrape)                                                         \
    X(ADMIN, admin)
#define RPC_ROLE(upper, lower) RPC_AT_##upper,
enum { RPC_ROLES_EACH(RPC_ROLE) RPC_ROLES };
#undef RPC_ROLE
#define RPC_ROLE(upper, lower) RPC_##upper = 1 << RPC_AT_##upper,
enum {
    RPC_ROLES_EACH(RPC_ROLE)
    RPC_ALL = (1 << RPC_ROLES) - 1,
    /* What a single token is for, beside one of administration. */
    RPC_USER = RPC_TRAIN | RPC_FEED | RPC_SERVE | RPC_SCRAPE
};
#undef RPC_ROLE
PERSIA_API extern const char *const persia_rpc_roles[RPC_ROLES];

/* What servers serve: a service, its methods by number, and who may call
 * them. */
typedef struct rpc_methods {
    const char *service;      /* "package.Service" */
    const char *const *paths; /* [n] "/package.Service/Method" */
    uint32_t n;
    uint32_t admin; /* bit m: clients show the token of administration */
    const uint32_t *roles; /* [n] bits of the roles that may call it */
} rpc_methods;

enum { RPC_NAME_MAX = 63, RPC_TABLES_MAX = 1024 }; /* bytes */

/* Who calls: a line of the tokens. */
typedef struct rpc_who {
    char name[RPC_NAME_MAX + 1];
    uint32_t roles;
    uint32_t rate, calls; /* a second, and at once, of all of this name; 0: no
                             limit */
    const char *tables;   /* patterns with commas between; NULL: all */
} rpc_who;
/* The callers of a server that asks for no token. */
PERSIA_API extern const rpc_who persia_rpc_everyone;
/* Whether it may use a table of this name. */
PERSIA_API int persia_rpc_tables(const rpc_who *who, const char *table);

/* Why calls are denied; X(REASON, name). */
#define RPC_REASONS_EACH(X)                                                   \
    X(MISSING, missing) /* no token */                                        \
    X(WRONG, wrong)     /* one that is not known */                           \
    X(EXPIRED, expired)                                                       \
    X(ROLE, role)       /* the method is not for it */                        \
    X(TABLE, table)     /* nor the table */                                   \
    X(LIMIT, limit)     /* its name has too many calls */
#define RPC_REASON(upper, lower) RPC_##upper,
enum rpc_reason { RPC_REASONS_EACH(RPC_REASON) RPC_REASONS };
#undef RPC_REASON
PERSIA_API extern const char *const persia_rpc_reasons[RPC_REASONS];
/* How many; [][RPC_ROLES]: callers without a role. */
typedef struct rpc_denied {
    _Atomic(uint64_t) n[RPC_REASONS][RPC_ROLES + 1];
} rpc_denied;
PERSIA_API uint64_t persia_rpc_denied_sum(const rpc_denied *d);

/* ---- how long calls take ------------------------------------------------ */

/* Of each method: calls by their time, from their arrival until they are
 * answered; any thread may count and read. */
enum { RPC_BOUNDS = 16 };
PERSIA_API extern const uint64_t persia_rpc_bounds_ns[RPC_BOUNDS];
typedef struct rpc_times {
    uint32_t n;
    struct rpc_method_times {
        /* [k]: of at most bounds_ns[k], and more than those before; the last
         * one: longer. */
        _Atomic(uint64_t) calls[RPC_BOUNDS + 1];
        _Atomic(uint64_t) ns, in, out; /* sums; bytes of messages */
    } *methods; /* [n] */
    /* Of all calls, ns: until the handler had them, and from then until they
     * were answered. */
    _Atomic(uint64_t) waited, worked;
} rpc_times;

/* ---- a request at the server -------------------------------------------- */

/* Made by the room that takes requests; the handler answers through the two
 * functions, which end its life. */
typedef struct rpc_call rpc_call;
struct rpc_call {
    uint32_t method;      /* its number in the server's rpc_methods */
    const void *request;  /* contiguous, aligned to 64 bytes; valid until the
                             call is answered */
    size_t request_n;     /* bytes */
    uint64_t deadline; /* of persia_clock_ns(); the caller waits no longer */
    const rpc_who *who;   /* the caller; NULL: one that may call nothing */
    rpc_denied *denied;   /* of the server, or NULL */
    uint64_t began;       /* it arrived; 0: it is not counted */
    rpc_times *times;     /* or NULL: nor then */
    /* Writes the address of its client; NULL: from this process. */
    void (*peer)(rpc_call *call, char *out, size_t room);
    /* Writes a value of its metadata, "" where there is none; NULL: it has
     * none at all. */
    void (*header)(rpc_call *call, const char *key, char *out, size_t room);
    /* Sends the reply.  `done(owner)` is called once the memory of o's bulk
     * data is not needed any more (maybe on another thread); o itself is
     * taken over and freed.  done may be NULL. */
    void (*reply)(rpc_call *call, wire_out *o, void (*done)(void *owner),
                  void *owner);
    /* Answers with an error: a code of base.h and its text, which the client
     * finds again. */
    void (*fail)(rpc_call *call, int code, const char *text);
};

typedef void (*rpc_handler)(void *ctx, rpc_call *call);

/* PERSIA_EDENIED, and counted: the caller may not call the method. */
PERSIA_API int persia_rpc_may(const rpc_methods *methods,
                              const rpc_call *call);
/* Counts a call that is denied for what it asks for; returns
 * PERSIA_EDENIED. */
PERSIA_API int persia_rpc_deny(const rpc_call *call, enum rpc_reason why,
                               const char *what);

/* Before it is answered: with a message of so many bytes. */
PERSIA_API void persia_rpc_count(const rpc_call *call, size_t bytes);

/* ---- identity ----------------------------------------------------------- */

/* TLS and tokens; files in PEM.  All NULL: neither. */
typedef struct rpc_security {
    const char *ca;    /* text of the certificates that are trusted */
    const char *cert;  /* own chain: servers always, clients for mutual TLS */
    const char *key;   /* of cert */
    int mutual;        /* servers: clients must show a certificate of `ca` */
    const char *token; /* servers: asked for; clients: shown */
    const char *admin_token; /* the same for administration; a client without
                                a token shows it on all calls */
    const char *tokens; /* servers: lines of further tokens, each with what it
                           is for (access.c), or NULL */
    const char *server_name; /* clients: name in the server's certificate, or
                                NULL: the host of the address */
    int insecure;      /* allow an address that is not loopback without TLS
                          and token */
    uint64_t source; /* where the texts are from, for persia_rpc_renew(); 0:
                        they are never renewed */
} rpc_security;
/* New texts of s->source: its servers take them from the next handshake and
 * call on; its channels connect again for their next call.  *users: how many
 * there are.  PERSIA_EARG: they are wrong, and nothing has changed. */
PERSIA_API int persia_rpc_renew(const rpc_security *s, uint32_t *users);
/* How many servers and channels a source has. */
PERSIA_API uint32_t persia_rpc_users(uint64_t source);

/* Lets callers of a service in, or not. */
typedef struct rpc_gate rpc_gate;
PERSIA_API int persia_rpc_gate_open(const rpc_security *s,
                                    const rpc_methods *methods,
                                    rpc_gate **out);
PERSIA_API void persia_rpc_gate_close(rpc_gate *g); /* NULL is fine */
PERSIA_API rpc_denied *persia_rpc_gate_denied(rpc_gate *g);
typedef struct rpc_pass {
    const rpc_who *who;  /* until it has left; NULL: no one */
    enum rpc_reason why; /* it is refused */
    uint32_t wait_ms;    /* RPC_LIMIT: before it is tried again */
    struct access_list *access; /* private */
    struct access_meter *meter; /* private */
} rpc_pass;
/* A caller's certificate, which was verified. */
typedef struct rpc_peer {
    /* Whether it is for this name: a URI, or "dns:" and a host. */
    int (*has)(void *ctx, const char *name);
    void *ctx;
} rpc_peer;
/* header: "Bearer TOKEN", n bytes, or NULL: then it is the certificate that
 * counts; peer: NULL: there is none.  PERSIA_EDENIED, PERSIA_ELIMIT.  The
 * caller leaves in each case. */
PERSIA_API int persia_rpc_gate_enter(rpc_gate *g, uint32_t method,
                                     const char *header, size_t n,
                                     const rpc_peer *peer, rpc_pass *out);
PERSIA_API void persia_rpc_gate_leave(rpc_pass *p);

/* ---- server ------------------------------------------------------------- */

typedef struct rpc_server rpc_server;
typedef struct rpc_server_config {
    const char *address;    /* "0.0.0.0:8888", "[::]:0", "127.0.0.1:0" */
    unsigned threads;       /* that take and handle requests; at least 1 */
    uint64_t message_limit; /* bytes of a request, and of a reply */
    uint32_t calls_max;     /* requests at once; more wait */
    uint32_t connections_max; /* more are closed at once; 0: as many as the
                                 process may have files */
    int prompt; /* the handler gives requests to other threads, which may
                   take all processors */
    int shared; /* other processes with this set may serve the same port */
    uint32_t idle_ms; /* a connection without calls is closed after this; 0:
                         after ten minutes */
    sched *s;               /* joins the pieces of large requests; outlives
                               the server; NULL: its own threads do */
    rpc_security security;
    const rpc_methods *methods; /* outlives the server */
    rpc_handler handler;
    /* NULL, or receives each call that is denied: its method, its client's
     * address, the name of its token (or ""), and why. */
    void (*denied)(void *ctx, const char *method, const char *peer,
                   const char *name, const char *reason);
    void *denied_ctx;
    void *ctx; /* of the handler */
} rpc_server_config;
/* PERSIA_EARG when the address may not be served without TLS and token,
 * PERSIA_EUNAVAILABLE when the port is taken. */
PERSIA_API int persia_rpc_server_start(const rpc_server_config *config,
                                       rpc_server **out);
PERSIA_API int persia_rpc_server_port(const rpc_server *s);
typedef struct rpc_counts {
    uint64_t open;    /* connections */
    uint64_t refused; /* connections closed for the limit, since the start */
} rpc_counts;
PERSIA_API rpc_counts persia_rpc_server_counts(const rpc_server *s);
/* As long as the server. */
PERSIA_API const rpc_denied *persia_rpc_server_denied(const rpc_server *s);
/* As long as the server; by the numbers of its methods.  A call that hands
 * others on may leave itself out. */
PERSIA_API const rpc_times *persia_rpc_server_times(const rpc_server *s);
/* What grpc.health.v1.Health/Check says (0 at first). */
PERSIA_API void persia_rpc_server_health(rpc_server *s, int serving);
/* Health to not serving, no new calls.  Waits `grace_ns` for the requests
 * that the handler has, and of it at most a second for clients that take
 * their answers or send the rest of a request; then cancels what is left
 * (handlers still answer, into the void).  Returns when every call was
 * answered; frees. */
PERSIA_API void persia_rpc_server_stop(rpc_server *s, uint64_t grace_ns);

/* ---- client ------------------------------------------------------------- */

enum { RPC_ADDRESS = 320 }; /* bytes of an address and its end */
typedef struct rpc_channel rpc_channel;
typedef struct rpc_channel_config {
    const char *address;    /* "host:8888" */
    uint64_t message_limit; /* bytes of a reply */
    uint64_t keepalive_ns;  /* 0: none */
    rpc_security security;
    const rpc_methods *methods; /* outlives the channel */
} rpc_channel_config;
/* Connects when the first call needs it. */
PERSIA_API int persia_rpc_channel_open(const rpc_channel_config *config,
                                       rpc_channel **out);
/* Cancels what is in flight and waits for its callbacks; not for callbacks
 * and handlers to call. */
PERSIA_API void persia_rpc_channel_close(rpc_channel *c);
PERSIA_API const char *persia_rpc_channel_address(const rpc_channel *c);

/* One that stays open (it has a keepalive): whether it is connected now. */
typedef struct rpc_connection {
    char address[RPC_ADDRESS];
    const char *service; /* "package.Service" */
    int connected;
} rpc_connection;
/* Those of this process; *out is of malloc().  One that was connected at an
 * earlier look connects again without a call, for a few looks: servers close
 * connections that are idle. */
PERSIA_API int persia_rpc_peers(rpc_connection **out, size_t *n);

/* A reply, contiguous and aligned to 64 bytes. */
typedef struct rpc_reply {
    void *data;
    size_t n;
    void *memory; /* private */
} rpc_reply;
PERSIA_API void persia_rpc_reply_free(rpc_reply *r);

/* Called once, on a thread of the room: keep it short.  rc is PERSIA_OK, the
 * server's code, PERSIA_EUNAVAILABLE (no connection: the request may or may
 * not have been served), PERSIA_ETIMEOUT, PERSIA_EDENIED or PERSIA_ECLOSED;
 * the text is persia_err_text() of the thread and names the address.  The
 * callback owns *reply. */
typedef void (*rpc_callback)(void *ctx, int rc, rpc_reply *reply);
/* Sends o (taken over and freed, also on failure, when there is no callback).
 * Its bulk memory must stay until the callback: that is called when the reply
 * is there and gRPC is done with the request's memory. */
PERSIA_API int persia_rpc_start(rpc_channel *c, uint32_t method, wire_out *o,
                                uint64_t timeout_ns, rpc_callback callback,
                                void *ctx);

#ifdef __cplusplus
}
#endif
#endif
