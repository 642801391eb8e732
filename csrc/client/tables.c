/* tables.c: tables, at all shards. */
#include <stdlib.h>
#include <string.h>

#include "client/private.h"

typedef struct declaring {
    ps_client *r;
    const table_config *config;
    uint32_t no;
    uint32_t created;
} declaring;

static void tables_fill_declare(void *ctx, request *q)
{
    const declaring *d = ctx;
    q->args.declare = (wire_declare){.caller = q->caller,
                                     .table = d->config->spec};
}

static int tables_accept_declare(void *ctx, request *q)
{
    declaring *d = ctx;
    const wire_declare_reply *m = q->reply.message;
    d->created |= m->created;
    pthread_mutex_lock(&q->to->lock);
    /* A server started again meanwhile has got this table, too. */
    if (q->to->boot == q->caller.boot)
        q->to->numbers[d->no] = m->no;
    pthread_mutex_unlock(&q->to->lock);
    return PERSIA_OK;
}

/* Declares table `no` everywhere. */
static int tables_declare_all(ps_client *r, const table_config *config,
                              uint32_t no, int *created)
{
    declaring d = {.r = r, .config = config, .no = no};
    fan f = {.method = WIRE_DECLARE,
             .fill = tables_fill_declare,
             .accept = tables_accept_declare,
             .ctx = &d};
    call *k = call_take(r);
    if (!k)
        return PERSIA_ENOMEM;
    int rc = fan_prepare(k, NULL, r->servers_n);
    if (!rc)
        rc = fan_run(k, &f, client_deadline(r));
    call_give(k);
    *created = d.created != 0;
    return rc;
}

/* A name that is not known here yet: the slot is shown to server_repair()
 * first, so that a server that starts again meanwhile gets the table. */
static int tables_declare_new(ps_client *r, const table_config *config,
                              uint32_t no, int *created)
{
    if (no == TABLES_MAX)
        return persia_err_set(PERSIA_ELIMIT,
                              "table %s: a store has at most %d "
                              "tables; let features share tables",
                              config->name, TABLES_MAX);
    table_config *own = malloc(sizeof *own);
    if (!own)
        return persia_err_set(PERSIA_ENOMEM, "no memory for a table");
    *own = *config;
    own->limit = NULL;
    pthread_mutex_lock(&r->lock);
    r->tables[no] = own;
    r->tables_declared = no + 1;
    pthread_mutex_unlock(&r->lock);
    int rc = tables_declare_all(r, own, no, created);
    if (!rc) {
        atomic_store_explicit(&r->tables_n, no + 1, memory_order_release);
        return PERSIA_OK;
    }
    /* Greetings read it. */
    for (uint32_t i = 0; i < r->servers_n; i++)
        (void)greeting_begin(r->servers[i], 0);
    pthread_mutex_lock(&r->lock);
    r->tables[no] = NULL;
    r->tables_declared = no;
    pthread_mutex_unlock(&r->lock);
    for (uint32_t i = 0; i < r->servers_n; i++)
        greeting_end(r->servers[i]);
    free(own);
    return rc;
}

int persia_client_declare(ps_client *r, const table_config *config,
                          uint32_t *no, int *created)
{
    int rc = persia_fork_check("Store.declare");
    if (!rc)
        rc = persia_turn_take(&r->declaring);
    if (rc)
        return rc;
    uint32_t n = r->tables_n, i = 0;
    while (i < n && (r->dropped[i] ||
                     strcmp(r->tables[i]->name, config->name) != 0))
        i++;
    rc = i < n ? tables_declare_all(r, config, i, created)
               : tables_declare_new(r, config, i, created);
    persia_turn_give(&r->declaring);
    *no = i;
    return rc;
}

/* ---- and away again ----------------------------------------------------- */

static void tables_fill_drop(void *ctx, request *q)
{
    const uint32_t *no = ctx;
    q->args.rows = (wire_rows){.caller = q->caller,
                               .no = server_table(q->to, *no), .drop = 1};
}

static int tables_accept_drop(void *ctx, request *q)
{
    (void)ctx;
    (void)q;
    return PERSIA_OK;
}

static int tables_drop_all(ps_client *r, uint32_t no)
{
    fan f = {.method = WIRE_PUT_ROWS,
             .fill = tables_fill_drop,
             .accept = tables_accept_drop,
             .ctx = &no};
    call *k = call_take(r);
    if (!k)
        return PERSIA_ENOMEM;
    int rc = fan_prepare(k, NULL, r->servers_n);
    if (!rc)
        rc = fan_run(k, &f, client_deadline(r));
    call_give(k);
    return rc;
}

int persia_client_drop(ps_client *r, uint32_t no)
{
    const table_config *t;
    int rc = persia_fork_check("Store.drop");
    if (!rc)
        rc = client_check_mixture(r, 0);
    if (!rc)
        rc = client_find_table(r, no, &t);
    if (!rc)
        rc = persia_turn_take(&r->declaring);
    if (rc)
        return rc;
    rc = tables_drop_all(r, no);
    /* A server that starts from now on gets no Declare of it. */
    if (!rc)
        atomic_store(&r->dropped[no], 1);
    persia_turn_give(&r->declaring);
    return rc;
}
