/* complete.c: updates that a process left at some servers only.  The servers
 * that lack one get an empty update in its place, so that the counts and
 * clocks of all servers stay alike.
 *
 * A process does so for the stream that it has from an earlier life of its
 * rank, before its first update: later ones settle the numbers before them.
 * For ranks that the job has no longer persia_client_inherit() does it. */
#include "client/private.h"

#include <stdio.h>
#include <stdlib.h>

/* What one server has of a stream that is not the client's own. */
typedef struct heritage {
    wire_caller who; /* this client, as the owner of the stream */
    numbers_set has;
} heritage;

typedef struct completing {
    ps_client *r;
    call *k;
    uint64_t stream, incarnation;
    heritage *at;         /* [servers] by shard; NULL: the client's own */
    uint64_t first, last; /* numbers behind `first` are completed */
    uint64_t number;      /* now */
    uint64_t deadline;
    int sent;             /* a server lacked one */
} completing;

/* What a server has; used with its lock held. */
static numbers_set *numbers_of(heritage *at, server *to)
{
    return at ? &at[to->shard].has : &to->acked;
}

/* ---- counting ----------------------------------------------------------- */

static uint64_t complete_smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Adds what a server has, up to `last`, to what any has.  So far before its
 * last update nothing was in flight: what it lacks there was passed over. */
static void add_numbers(numbers_set *has, uint64_t last, numbers_set *any)
{
    const uint64_t top = window_top(&has->w);
    if (top > CLIENT_SPAN)
        numbers_settle(has, top - CLIENT_SPAN - 1);
    numbers_settle(any, complete_smaller(has->w.watermark, last));
    const uint64_t from = any->w.watermark, end = complete_smaller(top, last);
    for (uint64_t n = from + 1; n <= end; n++)
        if (window_has(&has->w, n))
            (void)window_add(&any->w, n);
    window_advance(&any->w);
}

static uint64_t complete_count(ps_client *r, heritage *at, uint64_t last)
{
    numbers_set any;
    uint64_t missing = 0;
    numbers_init(&any, 0);
    for (uint32_t i = 0; i < r->servers_n; i++) {
        server *to = r->servers[i];
        pthread_mutex_lock(&to->lock);
        add_numbers(numbers_of(at, to), last, &any);
        pthread_mutex_unlock(&to->lock);
    }
    for (uint32_t i = 0; i < r->servers_n; i++) {
        server *to = r->servers[i];
        pthread_mutex_lock(&to->lock);
        missing += window_missing(&any.w, &numbers_of(at, to)->w);
        pthread_mutex_unlock(&to->lock);
    }
    return missing;
}

uint64_t count_missing(ps_client *r, uint64_t last)
{
    return complete_count(r, NULL, last);
}

/* ---- completing --------------------------------------------------------- */

static int server_has(const completing *c, server *to)
{
    pthread_mutex_lock(&to->lock);
    int has = window_has(&numbers_of(c->at, to)->w, c->number);
    pthread_mutex_unlock(&to->lock);
    return has;
}

static void complete_fill_empty(void *ctx, request *q)
{
    const completing *c = ctx;
    wire_push *m = &q->args.push.m;
    *m = (wire_push){.caller = c->at ? c->at[q->to->shard].who : q->caller,
                     .stream = c->stream,
                     .number = c->number,
                     .settled = c->first,
                     .parts = 1,
                     .dtype = c->r->dtype};
    q->args.push.args = (shard_push){.m = m};
}

/* It does not go to acked_late: what is counted as missing a server cannot
 * lose once more. */
static int complete_accept_empty(void *ctx, request *q)
{
    const completing *c = ctx;
    const wire_push_reply *m = q->reply.message;
    if (m->status == PUSH_RETRY_LATER)
        return persia_err_set(PERSIA_EUNAVAILABLE,
                              "%s: update %llu has to wait for "
                              "earlier ones",
                              q->to->address, (unsigned long long)c->number);
    if (c->at && m->status == PUSH_STALE_LINEAGE)
        return persia_err_set(PERSIA_ESTALE, "%s has other rows now",
                              q->to->address);
    pthread_mutex_lock(&q->to->lock);
    numbers_settle(numbers_of(c->at, q->to), c->first);
    numbers_add(numbers_of(c->at, q->to), c->number);
    pthread_mutex_unlock(&q->to->lock);
    return PERSIA_OK;
}

/* An empty update of this number to the servers that do not have it. */
static int complete_one(completing *c)
{
    const ps_client *r = c->r;
    fan f = {.method = WIRE_PUSH,
             .fill = complete_fill_empty,
             .accept = complete_accept_empty,
             .ctx = c,
             .fresh = c->at != NULL};
    server *lack[IDS_SHARDS_MAX];
    size_t n = 0;
    for (uint32_t i = 0; i < r->servers_n; i++)
        if (!server_has(c, r->servers[i]))
            lack[n++] = r->servers[i];
    if (n == 0 || n == r->servers_n)
        return PERSIA_OK;
    int rc = fan_prepare(c->k, lack, n);
    c->sent = 1;
    return rc ? rc : fan_run(c->k, &f, c->deadline);
}

/* The last numbers; those before them each server settles. */
static int complete_all(completing *c)
{
    int rc = PERSIA_OK;
    c->first = c->last > NUMBERS_WINDOW ? c->last - NUMBERS_WINDOW : 0;
    for (c->number = c->first + 1; c->number <= c->last && !rc; c->number++)
        rc = complete_one(c);
    return rc;
}

/* Counts updates that servers lack; `told`: the user gets an error.  whose:
 * a text. */
static void complete_note_missing(ps_client *r, const char *whose,
                                  uint64_t missing, int told)
{
    char text[FAN_TEXT];
    r->counts.lost += missing;
    snprintf(text, sizeof text, "%llu updates that %s made in an earlier "
             "process are not at all servers: it ended before they were, or "
             "a server has lost them", (unsigned long long)missing, whose);
    if (told)
        client_note_text(r, text);
}

int complete_own(ps_client *r, uint64_t deadline)
{
    int rc = PERSIA_OK;
    if (!atomic_load(&r->missing))
        return rc;
    rc = persia_turn_take(&r->completing);
    if (rc)
        return rc;
    const uint64_t missing = atomic_load(&r->missing);
    if (missing) {
        completing c = {.r = r, .k = call_take(r), .deadline = deadline,
                        .stream = atomic_load(&r->stream)};
        pthread_mutex_lock(&r->lock);
        c.last = r->last_number;
        pthread_mutex_unlock(&r->lock);
        rc = c.k ? complete_all(&c) : PERSIA_ENOMEM;
        call_give(c.k);
        if (!rc) { /* a checkpoint that was loaded has told of them */
            complete_note_missing(r, "this rank", missing,
                                  c.sent && !atomic_load(&r->resumed));
            atomic_store(&r->missing, 0);
        }
    }
    persia_turn_give(&r->completing);
    return rc;
}

/* ---- ranks that the job has no longer ----------------------------------- */

typedef struct inheriting {
    completing c;
    uint64_t highest; /* incarnation that a server knows of */
} inheriting;

static void complete_fill_hello(void *ctx, request *q)
{
    const inheriting *h = ctx;
    q->args.hello = make_hello(h->c.r, CLAIM_LOOK);
    q->args.hello.stream = h->c.stream;
    q->args.hello.caller.incarnation = h->c.incarnation;
}

static int complete_accept_hello(void *ctx, request *q)
{
    inheriting *h = ctx;
    const wire_hello_reply *m = q->reply.message;
    heritage *at = &h->c.at[q->to->shard];
    int rc = check_hello(h->c.r, q->to, m);
    if (rc)
        return rc;
    at->who = (wire_caller){.client = h->c.r->client,
                            .incarnation = h->c.incarnation,
                            .boot = m->boot, .lineage = m->lineage,
                            .slots_rev = m->slots_rev};
    numbers_from_wire(&at->has, &m->ledger);
    const uint64_t top = window_top(&at->has.w);
    if (top > h->c.last)
        h->c.last = top;
    if (m->ledger.incarnation > h->highest)
        h->highest = m->ledger.incarnation;
    return PERSIA_OK;
}

/* Says Hello to all servers with the stream: to look (incarnation 0), or to
 * claim it. */
static int complete_greet_with(inheriting *h, uint64_t incarnation)
{
    fan f = {.method = WIRE_HELLO,
             .fill = complete_fill_hello,
             .accept = complete_accept_hello,
             .ctx = h,
             .fresh = 1};
    h->c.incarnation = incarnation;
    h->c.last = 0;
    int rc = fan_prepare(h->c.k, NULL, h->c.r->servers_n);
    return rc ? rc : fan_run(h->c.k, &f, h->c.deadline);
}

/* PERSIA_ESTALE: a server was started again, or has other rows, since. */
static int complete_inherit(inheriting *h, uint32_t rank)
{
    ps_client *r = h->c.r;
    int rc = complete_greet_with(h, 0);
    if (rc || !h->c.last)
        return rc;
    rc = complete_greet_with(h, h->highest + 1);
    const uint64_t missing = rc ? 0 : complete_count(r, h->c.at, h->c.last);
    if (!missing)
        return rc;
    rc = complete_all(&h->c);
    if (!rc) {
        char whose[64];
        snprintf(whose, sizeof whose, "rank %u, which this job has no longer,",
                 rank);
        complete_note_missing(r, whose, missing, h->c.sent);
    }
    return rc;
}

int persia_client_inherit(ps_client *r, uint64_t stream, uint32_t rank,
                          uint64_t timeout_ns, int *known)
{
    inheriting h = {.c = {.r = r, .stream = stream,
                          .deadline = client_deadline(r)}};
    const uint64_t end = persia_deadline(timeout_ns);
    *known = 0;
    if (timeout_ns && end < h.c.deadline)
        h.c.deadline = end;
    int rc = client_check_mixture(r, 0);
    if (!rc)
        rc = persia_turn_take(&r->completing);
    if (rc)
        return rc;
    h.c.k = call_take(r);
    h.c.at = calloc(r->servers_n, sizeof *h.c.at);
    rc = h.c.at ? PERSIA_OK
                : persia_err_set(PERSIA_ENOMEM,
                                 "no memory for the "
                                 "updates of rank %u",
                                 rank);
    if (!h.c.k)
        rc = PERSIA_ENOMEM;
    if (!rc)
        do
            rc = complete_inherit(&h, rank);
        while (rc == PERSIA_ESTALE && persia_clock_ns() < h.c.deadline);
    *known = !rc && h.c.last > 0;
    /* The requests of a call that was given up are not filled again. */
    call_give(h.c.k);
    free(h.c.at);
    persia_turn_give(&r->completing);
    return rc;
}
