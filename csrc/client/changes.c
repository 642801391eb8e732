/* changes.c: what changed in a table, of one shard. */
#include "client/private.h"

typedef struct asking {
    const wire_changes *m;
    int (*take)(void *ctx, const wire_changes_reply *reply);
    void *ctx;
} asking;

static void changes_fill(void *ctx, request *q)
{
    const asking *a = ctx;
    q->args.changes = *a->m;
    q->args.changes.caller = q->caller;
    q->args.changes.no = server_table(q->to, a->m->no);
}

static int changes_accept(void *ctx, request *q)
{
    const asking *a = ctx;
    const wire_changes_reply *m = q->reply.message;
    const table_config *t;
    int rc = client_find_table(q->call->r, a->m->no, &t);
    if (rc)
        return rc;
    if (m->n && (m->dim != t->dim || !m->vectors))
        return server_bad_reply(q->to, "not the changes that were asked for");
    return a->take(a->ctx, m);
}

int persia_client_changes(ps_client *r, uint32_t shard, const wire_changes *m,
                          int (*take)(void *ctx,
                                      const wire_changes_reply *reply),
                          void *ctx)
{
    asking a = {.m = m, .take = take, .ctx = ctx};
    fan f = {.method = WIRE_CHANGES,
             .fill = changes_fill,
             .accept = changes_accept,
             .ctx = &a};
    return client_ask_shard(r, "changes of a table", m->no, shard, &f);
}
