/* access.h: the tokens that a server knows, and what each is for (private to
 * rpc).
 *
 * An access is made once and read by all threads; after the file of tokens
 * has changed another one takes its place.  A call keeps the one by which it
 * was admitted.
 */
#ifndef PERSIA_RPC_ACCESS_H
#define PERSIA_RPC_ACCESS_H

#include "rpc/rpc.h"

typedef struct access_list access_list;
typedef struct access_meter access_meter;

/* A line for each token in `s`, those of s->tokens included.  before: the list
 * whose meters it keeps, or NULL. */
int access_make(const rpc_security *s, access_list *before, access_list **out);
access_list *access_get(access_list *a);
void access_drop(access_list *a); /* NULL is fine */

/* The caller that a token admits now, or its certificate where it shows no
 * token; NULL: none, and *why.  token, peer: NULL: none was shown; seconds:
 * since 1970. */
const rpc_who *access_find(const access_list *a, const char *token, size_t n,
                           const rpc_peer *peer, int64_t seconds,
                           enum rpc_reason *why);
/* NULL: the caller has no limit. */
access_meter *access_meter_of(const rpc_who *who);
/* Counts a call.  0: it may be; else the milliseconds after which it may be
 * tried again, and it is not counted. */
uint32_t access_meter_enter(access_meter *m, const rpc_who *who, uint64_t now);
void access_meter_leave(access_meter *m);

#endif
