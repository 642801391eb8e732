/* core.h: gRPC's threads and its slices; private to the files of rpc that
 * drive gRPC.
 */
#ifndef PERSIA_RPC_CORE_H
#define PERSIA_RPC_CORE_H

#include "rpc/channel.h"
#include "rpc/identity.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#if __has_include(<grpc/credentials.h>) /* not in 1.51 */
#include <grpc/credentials.h>
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* ---- versions ----------------------------------------------------------- */

/* Before grpc_init(). */
void core_quiet(void);
/* Connections that a server may have for the files of this process; raises
 * their limit. */
uint32_t core_connections_max(void);

/* Of the text of a status UNAVAILABLE that gRPC itself has made: whether the
 * other side's certificate, or ours, did not fit; and what else it may mean,
 * for a reader ("": nothing). */
int core_refuses_certificate(const char *details);
const char *core_hint(const char *details);

/* ---- threads ------------------------------------------------------------ */

/* What a completion queue gives back: the struct of an operation begins with
 * it. */
typedef struct rpc_tag rpc_tag;
struct rpc_tag {
    void (*done)(rpc_tag *tag, int ok);
    atomic_int given; /* see tag_give() */
};
/* Before the tag goes to gRPC.  The thread that gets it back sees what was
 * written before: gRPC takes care of that.  ThreadSanitizer cannot look inside
 * gRPC and must see it here. */
static inline void tag_give(rpc_tag *tag, void (*done)(rpc_tag *tag, int ok))
{
    tag->done = done;
    atomic_store_explicit(&tag->given, 1, memory_order_release);
}

/* Threads that wait on one completion queue.  Whichever is free takes the
 * next event: a short call does not wait behind a long one while a thread
 * idles. */
typedef struct rpc_pollers {
    grpc_completion_queue *queue;
    pthread_t *threads;
    unsigned threads_n;
    int prompt; /* see persia_thread_prompt() */
} rpc_pollers;
int pollers_start(rpc_pollers *p, unsigned threads, int prompt,
                  const char *name);
/* Nothing may be in flight on the queue any more. */
void pollers_stop(rpc_pollers *p);

/* A server's use of gRPC: it is initialised with the first and shut down with
 * the last user.  Sets how malloc keeps memory, for the whole process. */
int runtime_enter(void);
void runtime_leave(void);
/* The same for clients, whose threads are shared by all channels; changes no
 * setting of the process. */
int runtime_enter_client(grpc_completion_queue **out);
void runtime_leave_client(void);

/* ---- messages ----------------------------------------------------------- */

/* A message that gRPC sends from where it lies.  It has users: each span that
 * gRPC holds, and the call.  The last one ends it; spans are released on
 * threads that are deep inside gRPC, so a thread of the runtime takes over
 * then. */
typedef struct rpc_sent rpc_sent;
struct rpc_sent {
    wire_out out;
    _Atomic(size_t) users;
    void (*ended)(rpc_sent *sent); /* may do anything */
    rpc_sent *next;                /* of the runtime's queue */
};
/* Takes *o over, also on failure.  *out is to be destroyed by the caller when
 * the operation is done. */
int sent_start(rpc_sent *s, wire_out *o, void (*ended)(rpc_sent *sent),
               grpc_byte_buffer **out);
/* The call needs it no more: calls `ended` now if gRPC does neither. */
void sent_drop(rpc_sent *s);
/* For slices_span_released() of slices.c: `ended` is called on the runtime's
 * thread. */
void runtime_end_sent(rpc_sent *s);

/* Copies what gRPC received.  ThreadSanitizer does not see how the bytes came
 * from gRPC's thread to this one, see tag_give(). */
#if defined(__SANITIZE_THREAD__)
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
#endif
static inline void slice_copy(void *to, grpc_slice s)
{
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
#endif
    memcpy(to, GRPC_SLICE_START_PTR(s), GRPC_SLICE_LENGTH(s));
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}
/* One piece of memory of the pool with the whole message.  s: joins a
 * large one, or NULL. */
int received_join(grpc_byte_buffer *b, sched *s, void **data, size_t *n);

/* Arguments of a channel or server.  Keys and strings are not copied. */
typedef struct rpc_args {
    grpc_arg list[24];
    size_t n;
} rpc_args;
void args_integer(rpc_args *a, const char *key, int value);
void args_string(rpc_args *a, const char *key, const char *value);
/* What both sides say of messages; limit: bytes of one that is received. */
void args_messages(rpc_args *a, uint64_t limit);
/* What servers say of the core's own limits; of versions.c. */
void core_server_args(rpc_args *a);

/* ---- certificates ------------------------------------------------------- */

/* Whether the certificate of a call's client has this name: see rpc_peer; ctx
 * is its grpc_call.  gRPC has no name of one that it did not verify. */
int core_has_name(void *ctx, const char *name);

/* ---- errors ------------------------------------------------------------- */

/* Trailing metadata with the name of a code of base.h. */
#define ERROR_KEY "persia-error"
/* And with the milliseconds after which a call may be tried again. */
#define WAIT_KEY "retry-after-ms"
grpc_status_code status_of_code(int code);
/* The code that the server sent, or what the status means if it sent none
 * (then *sent is 0). */
int status_to_code(grpc_status_code status,
                   const grpc_metadata_array *trailing, int *sent);

/* ---- security ----------------------------------------------------------- */

/* The text of a slice as a new string; NULL: no memory. */
char *slice_text(grpc_slice s);
grpc_channel_credentials *client_credentials(const rpc_security *s);
/* *renewed: what they use as long as the server is there, or NULL.  *out: NULL
 * where the certificates cannot be used. */
typedef struct rpc_renewed rpc_renewed;
int server_credentials(const rpc_security *s, rpc_renewed **renewed,
                       grpc_server_credentials **out);
void renewed_free(rpc_renewed *r); /* NULL is fine */
/* "Bearer TOKEN"; empty for NULL. */
grpc_slice token_header(const char *token);

#endif
