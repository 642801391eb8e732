/* loop.c: numbered forwards, pending gradients, one update; and the registry
 * of handles. */
#include "loop/loop.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "client/client.h"
#include "loop/copies.h"
#include "loop/prefetch.h"
#include "loop/updates.h"

enum { STORES_MAX = 4096 };

/* Updates that may be pending.  In this process more would only be older: a
 * loop that is faster than its updates waits for them in the end. */
enum { PENDING_LOCAL = 2, PENDING_REMOTE = 64 };

/* Lookups, and updates, that may be in flight to servers at once. */
enum { IN_FLIGHT = 16 };

/* Blocks of copies that are kept: about those of two batches. */
enum { COPIES = 8 };

struct loop {
    ps_client *c;
    batcher *w;
    prefetch *p;
    updates *u;
    mem_pool *copies; /* of gradients that wait */
    _Atomic(uint64_t) tickets; /* the last number given */
    atomic_int plain; /* one was, to a forward outside of all passes */
    pthread_mutex_t lock;      /* guards all below */
    /* Of a thread that reads what is pending, or takes it; before `lock`. */
    persia_turn reading;
    loop_grad *pending; /* that wait for an update, by ticket */
    size_t pending_n, pending_room;
    uint64_t forgotten; /* tickets up to it: see persia_loop_forget() */
    window came;    /* tickets whose gradient was given, or ... */
    window refused; /* ... will not be taken */
    uint64_t rings[2][LOOP_TICKET_WINDOW / 64]; /* theirs */
    unsigned references;           /* guarded by registry.lock */
};

/* All stores of the process. */
static struct {
    pthread_mutex_t lock; /* guards all below and store.references */
    struct {
        loop *s;
        uint32_t generation;
    } slots[STORES_MAX];
} registry = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void loop_destroy(loop *s)
{
    if (!s)
        return;
    updates_destroy(s->u);
    /* Not persia_loop_discard(): no empty part could be sent any more. */
    loop_release_grads(s->pending, s->pending_n);
    prefetch_destroy(s->p);
    persia_batcher_destroy(s->w);
    persia_client_destroy(s->c);
    persia_mem_pool_destroy(s->copies);
    pthread_mutex_destroy(&s->lock);
    persia_turn_free(&s->reading);
    free(s);
}

static loop *loop_new(void)
{
    loop *s = calloc(1, sizeof *s);
    if (!s || persia_mem_pool_create(SIZE_MAX, COPIES, &s->copies)) {
        persia_err_set(PERSIA_ENOMEM, "no memory for a store");
        free(s);
        return NULL;
    }
    pthread_mutex_init(&s->lock, NULL);
    persia_turn_init(&s->reading);
    window_init(&s->came, s->rings[0], LOOP_TICKET_WINDOW / 64);
    window_init(&s->refused, s->rings[1], LOOP_TICKET_WINDOW / 64);
    s->references = 1;
    return s;
}

static void loop_renumber(loop *s, int strict)
{
    const uint64_t last = persia_client_last_number(s->c);
    prefetch_renumber(s->p, last);
    updates_renumber(s->u, last, strict);
}

/* Gives a store with a client the rest, and a handle. */
static int loop_start(loop *s, uint64_t *handle)
{
    int remote = !persia_loop_is_embedded(s);
    int rc = persia_batcher_create(s->c, &s->w);
    if (!rc)
        rc = prefetch_create(s, remote ? IN_FLIGHT : 1, &s->p);
    if (!rc)
        rc = updates_create(s, s->c, remote ? IN_FLIGHT : 1,
                            remote ? PENDING_REMOTE : PENDING_LOCAL, &s->u);
    if (rc)
        goto fail;
    loop_renumber(s, 0);
    pthread_mutex_lock(&registry.lock);
    uint32_t slot = 0;
    while (slot < STORES_MAX && registry.slots[slot].s)
        slot++;
    if (slot < STORES_MAX) {
        registry.slots[slot].s = s;
        uint64_t generation = ++registry.slots[slot].generation;
        *handle = (generation & 0x7FFFFFFF) << 32 | slot;
    }
    pthread_mutex_unlock(&registry.lock);
    if (slot < STORES_MAX)
        return PERSIA_OK;
    rc = persia_err_set(PERSIA_ELIMIT,
                        "%d stores are open in this process; close "
                        "some",
                        STORES_MAX);
fail:
    loop_destroy(s);
    return rc;
}

int persia_loop_open(ps_client *client, uint64_t *handle)
{
    int rc = persia_fork_check("a new store");
    loop *s = rc ? NULL : loop_new();
    if (!s) {
        persia_client_destroy(client);
        return rc ? rc : PERSIA_ENOMEM;
    }
    s->c = client;
    return loop_start(s, handle);
}

/* The store of a handle, or NULL; registry.lock is held. */
static loop *loop_find(uint64_t handle)
{
    uint32_t slot = (uint32_t)handle;
    if (slot >= STORES_MAX ||
        (registry.slots[slot].generation & 0x7FFFFFFF) != handle >> 32)
        return NULL;
    return registry.slots[slot].s;
}

int persia_loop_get(uint64_t handle, const char *what, loop **out,
                    ps_client **client)
{
    int rc = persia_fork_check(what);
    if (rc)
        return rc;
    pthread_mutex_lock(&registry.lock);
    loop *s = loop_find(handle);
    if (s)
        s->references++;
    pthread_mutex_unlock(&registry.lock);
    *out = s;
    if (client)
        *client = s ? s->c : NULL;
    return s ? PERSIA_OK
             : persia_err_set(PERSIA_ECLOSED,
                              "%s: the store was closed; make a new "
                              "persia.Store",
                              what);
}

void persia_loop_put(loop *s)
{
    pthread_mutex_lock(&registry.lock);
    int last = --s->references == 0;
    pthread_mutex_unlock(&registry.lock);
    if (last)
        loop_destroy(s);
}

void persia_loop_close(uint64_t handle)
{
    if (persia_fork_check("Store.close"))
        return;
    pthread_mutex_lock(&registry.lock);
    loop *s = loop_find(handle);
    if (s)
        registry.slots[(uint32_t)handle].s = NULL;
    pthread_mutex_unlock(&registry.lock);
    if (!s)
        return;
    persia_client_end(s->c, END_LOOKUPS); /* no caller wants later ones */
    persia_loop_put(s);
}

int persia_loop_is_embedded(const loop *s)
{
    return persia_client_is_embedded(s->c);
}

int persia_loop_plan(loop *s, uint32_t kind, uint32_t keys,
                     const plan_feature *features, uint32_t features_n,
                     uint32_t *plan)
{
    return persia_batcher_plan(s->w, kind, keys, features, features_n, plan);
}

int persia_loop_plan_shape(loop *s, uint32_t plan, uint32_t *kind,
                           uint32_t *keys, uint32_t *width)
{
    return persia_batcher_plan_shape(s->w, plan, kind, keys, width);
}

prefetch *loop_prefetch(loop *s)
{
    return s->p;
}

uint64_t persia_loop_ticket(loop *s)
{
    if (prefetch_is_idle(s->p))
        atomic_store_explicit(&s->plain, 1, memory_order_relaxed);
    return atomic_fetch_add(&s->tickets, 1) + 1;
}

uint64_t loop_last_ticket(loop *s)
{
    return atomic_load(&s->tickets);
}

int persia_loop_take_plain(loop *s)
{
    return atomic_exchange(&s->plain, 0);
}

void persia_loop_keep_index(loop *s, uint64_t ticket, batch_index *index)
{
    if (index && ticket)
        persia_index_pool_wait(persia_client_indexes(s->c), ticket, index);
    else
        persia_batch_index_put(index);
}

int persia_loop_forward(loop *s, uint64_t ticket, uint32_t plan,
                        const id_batch *batch, float *out, size_t stride,
                        uint32_t *rows)
{
    batch_index *index = NULL;
    int plain = prefetch_is_idle(s->p), rc = PERSIA_OK;
    if (!ticket || plain) /* else the bound of its pass holds */
        rc = persia_loop_settle(s);
    if (!rc && ticket && plain)
        rc = persia_loop_error(s); /* of an update that it waited for */
    if (!rc)
        rc = persia_batcher_forward(s->w, plan, batch, 0, out, stride, rows,
                                    ticket ? &index : NULL);
    if (!rc)
        persia_loop_keep_index(s, ticket, index);
    return rc;
}

int persia_loop_read(loop *s, uint64_t batch, uint64_t ticket, uint32_t plan,
                     const id_batch *ids, float *out, size_t stride)
{
    batch_index *index;
    int rc = prefetch_taken(s->p, batch, 1, &index);
    if (!rc && !index)
        rc = persia_err_set(PERSIA_ETICKET,
                            "a forward of a batch that was trained, skipped "
                            "or abandoned: its embeddings are here no longer, "
                            "and its ids are at the embedding workers");
    if (!rc)
        rc = persia_batcher_read(s->w, plan, index, ids, out, stride);
    if (rc)
        persia_batch_index_put(index);
    else
        persia_loop_keep_index(s, ticket, index);
    return rc;
}

int persia_loop_group(loop *s, uint32_t plan, const id_batch *batch,
                      batcher_group **out)
{
    return persia_batcher_group(s->w, plan, batch, out);
}

int loop_look_up(loop *s, const loop_lookup *l, uint64_t after)
{
    if (l->take)
        return l->take(l->owner);
    int rc = persia_batcher_forward(s->w, l->plan, &l->batch, after, l->out,
                                    l->stride, l->hints, l->index);
    return rc || !l->send ? rc : l->send(l->owner);
}

void persia_loop_drop_index(loop *s, uint64_t ticket)
{
    if (ticket)
        persia_batch_index_put(
            persia_index_pool_take(persia_client_indexes(s->c), ticket));
}

int persia_loop_copy_grad(loop *s, loop_grad *g, size_t floats,
                          size_t offsets)
{
    int rc = copies_make(s->copies, persia_client_sched(s->c), g, floats,
                         offsets);
    g->copied = !rc;
    return rc;
}

int loop_copy_ids(loop *s, loop_grad *g)
{
    if (g->copied || g->ids)
        return PERSIA_OK;
    uint32_t kind, keys, width;
    int rc = persia_batcher_plan_shape(s->w, g->grad.plan, &kind, &keys,
                                       &width);
    size_t offsets = g->grad.batch.bags * keys + 1;
    return rc ? rc
              : copies_ids(s->copies, persia_client_sched(s->c), g, offsets);
}

/* Why the gradient of a ticket is refused; PERSIA_OK if it is not.  The lock
 * is held. */
static int loop_check_ticket(const loop *s, uint64_t ticket)
{
    if (ticket > atomic_load(&s->tickets))
        return persia_err_set(PERSIA_ETICKET,
                              "backward of a forward that made no "
                              "ticket (number %llu)",
                              (unsigned long long)ticket);
    if (ticket <= s->forgotten)
        return persia_err_set(
            PERSIA_ETICKET,
            "backward of a forward from before a "
            "checkpoint was loaded: its rows are others now; run "
            "the forward again");
    if (ticket <= s->came.watermark)
        return persia_err_set(
            PERSIA_ETICKET,
            "backward of a forward of %llu forwards ago; the "
            "store remembers %d",
            (unsigned long long)(window_top(&s->came) - ticket),
            LOOP_TICKET_WINDOW);
    if (window_has(&s->refused, ticket))
        return persia_err_set(
            PERSIA_ETICKET,
            "backward of a batch that was skipped, or abandoned "
            "because the data loader had to continue without its "
            "gradients; with a larger staleness more batches may "
            "await their backward, with update=\"step\" any number "
            "of backwards is summed");
    if (window_has(&s->came, ticket))
        return persia_err_set(
            PERSIA_ETICKET,
            "second backward through one forward: its gradients "
            "were pushed already; run the forward again (or sum "
            "the losses and call backward once)");
    return PERSIA_OK;
}

/* Notes that the gradient of a ticket was given; the lock is held. */
static int loop_mark(loop *s, uint64_t ticket)
{
    if (ticket == 0) /* a forward without a number may repeat */
        return PERSIA_OK;
    int rc = loop_check_ticket(s, ticket);
    if (rc)
        return rc;
    if (ticket > LOOP_TICKET_WINDOW) { /* older ones are forgotten */
        window_settle(&s->came, ticket - LOOP_TICKET_WINDOW);
        window_settle(&s->refused, ticket - LOOP_TICKET_WINDOW);
    }
    enum window_added added = window_add(&s->came, ticket);
    assert(added == WINDOW_ADDED);
    (void)added;
    return PERSIA_OK;
}

int loop_refuse(loop *s, uint64_t ticket)
{
    pthread_mutex_lock(&s->lock);
    int rc = loop_mark(s, ticket);
    if (rc == PERSIA_OK && ticket)
        (void)window_add(&s->refused, ticket);
    pthread_mutex_unlock(&s->lock);
    return rc == PERSIA_OK;
}

static int add_grad_locked(loop *s, const loop_grad *g)
{
    if (s->pending_n == LOOP_PENDING_MAX)
        return persia_err_set(PERSIA_ELIMIT,
                              "%d gradients wait for an update; call "
                              "store.optimizer.step() more often",
                              LOOP_PENDING_MAX);
    if (s->pending_n == s->pending_room) {
        size_t room = s->pending_room ? 2 * s->pending_room : 16;
        loop_grad *more = realloc(s->pending, room * sizeof *more);
        if (!more)
            return persia_err_set(PERSIA_ENOMEM, "no memory for gradients");
        s->pending = more;
        s->pending_room = room;
    }
    int rc = loop_mark(s, g->ticket);
    if (rc)
        return rc;
    /* Kept in the order of the forwards, whatever order the backward has. */
    size_t at = s->pending_n++;
    for (; at > 0 && s->pending[at - 1].ticket > g->ticket; at--)
        s->pending[at] = s->pending[at - 1];
    s->pending[at] = *g;
    s->pending[at].grad.index =
        g->ticket
            ? persia_index_pool_take(persia_client_indexes(s->c), g->ticket)
            : NULL;
    s->pending[at].thread = (uint64_t)pthread_self();
    return PERSIA_OK;
}

int persia_loop_add_grad(loop *s, const loop_grad *g)
{
    pthread_mutex_lock(&s->lock);
    int rc = add_grad_locked(s, g);
    pthread_mutex_unlock(&s->lock);
    if (!rc)
        prefetch_pending(s->p, g->ticket);
    return rc;
}

size_t persia_loop_pending_grads(loop *s, enum loop_whose whose)
{
    uint64_t me = (uint64_t)pthread_self();
    pthread_mutex_lock(&s->lock);
    size_t n = whose == LOOP_ALL ? s->pending_n : 0;
    for (size_t i = 0; i < s->pending_n && whose == LOOP_MINE; i++)
        n += s->pending[i].thread == me;
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* Which of the pending gradients: those of n forwards; without tickets, of
 * this thread or all. */
typedef struct choice {
    enum loop_whose whose;
    const uint64_t *tickets;
    size_t n;
} choice;

static int loop_is_chosen(const choice *c, const loop_grad *g)
{
    if (!c->tickets)
        return c->whose == LOOP_ALL || g->thread == (uint64_t)pthread_self();
    for (size_t i = 0; i < c->n; i++)
        if (c->tickets[i] == g->ticket)
            return 1;
    return 0;
}

/* Takes what is pending out of the store, as an array to be freed; NULL (and
 * *n == 0) if there is nothing.  The order of the forwards is kept. */
static int loop_take_chosen(loop *s, const choice *c, loop_grad **out,
                            size_t *n)
{
    *n = 0;
    *out = NULL;
    int rc = persia_turn_take(&s->reading);
    if (rc)
        return rc;
    pthread_mutex_lock(&s->lock);
    size_t chosen = 0;
    for (size_t i = 0; i < s->pending_n; i++)
        chosen += (size_t)loop_is_chosen(c, &s->pending[i]);
    *n = chosen;
    if (chosen && chosen == s->pending_n) { /* as nearly always */
        *out = s->pending;
        s->pending = NULL;
        s->pending_n = s->pending_room = 0;
    } else if (chosen) {
        loop_grad *taken = malloc(chosen * sizeof *taken);
        size_t kept = 0, at = 0;
        for (size_t i = 0; i < s->pending_n && taken; i++) {
            if (loop_is_chosen(c, &s->pending[i]))
                taken[at++] = s->pending[i];
            else
                s->pending[kept++] = s->pending[i];
        }
        if (taken)
            s->pending_n = kept;
        else
            rc = persia_err_set(PERSIA_ENOMEM, "no memory for %zu gradients",
                                chosen);
        *out = taken;
    }
    pthread_mutex_unlock(&s->lock);
    persia_turn_give(&s->reading);
    return rc;
}

static int loop_take_pending(loop *s, enum loop_whose whose, loop_grad **out,
                             size_t *n)
{
    return loop_take_chosen(s, &(choice){.whose = whose}, out, n);
}

void loop_release_grads(loop_grad *grads, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        persia_batch_index_put(grads[i].grad.index);
        persia_mem_pool_give(grads[i].ids);
        grads[i].release(grads[i].owner);
    }
    free(grads);
}

/* The gradients alone, as the worker takes them, once they are there; an
 * array that the caller frees, NULL on an error. */
static int grads_of(const loop_grad *pending, size_t n, batcher_grad **out)
{
    batcher_grad *grads = malloc((n ? n : 1) * sizeof *grads);
    int rc = grads ? PERSIA_OK
                   : persia_err_set(PERSIA_ENOMEM,
                                    "no memory for %zu gradients", n);
    for (size_t i = 0; i < n && !rc; i++) {
        grads[i] = pending[i].grad;
        if (pending[i].arrive)
            rc = pending[i].arrive(pending[i].owner);
    }
    if (rc) {
        free(grads);
        grads = NULL;
    }
    *out = grads;
    return rc;
}

int loop_run(loop *s, const update *one)
{
    batcher_counts counts = {0};
    if (one->n == 0)
        return persia_client_push(s->c, &one->name, NULL, NULL, 0);
    batcher_grad *grads;
    int rc = grads_of(one->grads, one->n, &grads);
    if (rc)
        persia_client_skip(s->c, &one->name);
    else
        rc = persia_batcher_backward(s->w, grads, one->n, &one->name,
                                     one->optim, one->optim_n, &counts);
    free(grads);
    return rc;
}

/* On threads of the store.  Owns `grads`.  tell: see updates_add(). */
static int loop_apply_later(loop *s, loop_grad *grads, size_t n,
                            const optim_args *optim, uint32_t optim_n,
                            int tell)
{
    const uint64_t place = prefetch_place(s->p, grads, n);
    update *one;
    int rc = updates_make(s->u, grads, n, optim, optim_n, &one);
    if (rc) {
        prefetch_discarded(s->p, grads, n);
        loop_release_grads(grads, n);
        return rc;
    }
    one->place = place;
    return updates_add(s->u, one, tell);
}

/* On this thread, after those that were handed over.  Owns `grads`. */
static int loop_apply_now(loop *s, loop_grad *grads, size_t n,
                          const optim_args *optim, uint32_t optim_n)
{
    int rc = updates_wait(s->u, 0, 0);
    if (rc) {
        loop_apply_later(s, grads, n, optim, optim_n, 0);
        return rc;
    }
    update one = {.grads = grads, .n = n, .optim = optim, .optim_n = optim_n};
    rc = updates_now(s->u, &one);
    prefetch_tidy(s->p);
    loop_release_grads(grads, n);
    return rc;
}

int loop_pay(loop *s)
{
    int rc = PERSIA_OK;
    for (unsigned n = prefetch_owed(s->p); n; n--) {
        update *one;
        int failed = updates_make(s->u, NULL, 0, NULL, 0, &one);
        if (failed) {
            prefetch_paid(s->p);
        } else {
            one->place = prefetch_place(s->p, NULL, 0);
            failed = updates_add(s->u, one, 0);
        }
        rc = rc ? rc : failed;
    }
    return rc;
}

int persia_loop_apply(loop *s, enum loop_whose whose,
                      const optim_args *optim, uint32_t optim_n)
{
    size_t n;
    loop_grad *grads;
    int rc = loop_take_pending(s, whose, &grads, &n);
    if (rc)
        return rc;
    if (n == 0 && whose == LOOP_ALL && updates_are_parts(s->u)) {
        prefetch_owe(s->p);
        rc = loop_pay(s);
    }
    if (n == 0)
        return rc ? rc : updates_error(s->u);
    prefetch_updating(s->p, grads, n, whose == LOOP_ALL);
    if (!persia_loop_is_embedded(s) ||
        (whose == LOOP_MINE && prefetch_allows(s->p, grads, n)))
        return loop_apply_later(s, grads, n, optim, optim_n, 1);
    rc = loop_apply_now(s, grads, n, optim, optim_n);
    return rc ? rc : updates_error(s->u);
}

int persia_loop_settle(loop *s)
{
    return updates_wait(s->u, 0, 0);
}

static int loop_flush(loop *s, uint64_t timeout_ns)
{
    int rc = updates_wait(s->u, 0, timeout_ns);
    rc = rc ? rc : updates_error(s->u);
    return rc ? rc : persia_client_tell_lost(s->c);
}

int persia_loop_finish(loop *s)
{
    updates_close(s->u);
    int rc = loop_flush(s, 0);
    if (rc == PERSIA_EINTR) /* the end of the store waits for no server */
        persia_client_end(s->c, END_ALL);
    return rc;
}

int persia_loop_flush(loop *s, uint64_t timeout_ns)
{
    int rc = loop_flush(s, timeout_ns);
    return rc ? rc : persia_client_check_restores(s->c);
}

void loop_keep_error(loop *s, int code)
{
    updates_keep(s->u, code);
}

int persia_loop_error(loop *s)
{
    updates_tidy(s->u);
    return updates_error(s->u);
}

void persia_loop_drop_error(loop *s)
{
    updates_drop_errors(s->u);
}

int persia_loop_greet(loop *s, int restored)
{
    int rc = persia_client_greet(s->c, restored);
    if (!rc)
        loop_renumber(s, 0);
    return rc;
}

int persia_loop_go_on(loop *s, uint64_t stream, uint64_t number,
                      uint64_t lost)
{
    int rc = persia_client_go_on(s->c, stream, number, lost);
    if (!rc)
        loop_renumber(s, 1);
    return rc;
}

int persia_loop_places(loop *s, uint64_t *last)
{
    *last = prefetch_place(s->p, NULL, 0);
    return updates_have_places(s->u);
}

int persia_loop_join(loop *s, uint64_t *applied)
{
    int rc = updates_wait(s->u, 0, 0);
    return rc ? rc : persia_client_join(s->c, 0, applied);
}

int persia_loop_sync(loop *s, uint64_t last, uint32_t rank, uint32_t world)
{
    if (world < 2 || rank >= world)
        return persia_err_set(PERSIA_EARG, "rank %u of %u ranks", rank, world);
    updates_sync(s->u, last, rank, world);
    return PERSIA_OK;
}

int persia_loop_leave(loop *s, int settle)
{
    int rc = settle ? updates_wait(s->u, 0, 0) : PERSIA_OK;
    updates_sync(s->u, 0, 0, 0);
    int left = persia_client_leave(s->c, !settle || rc);
    return rc ? rc : left;
}

void persia_loop_get_counts(loop *s, loop_counts *out)
{
    updates_get_counts(s->u, out);
}

static size_t loop_discard(loop *s, const choice *c)
{
    size_t n;
    loop_grad *grads;
    if (loop_take_chosen(s, c, &grads, &n) || n == 0)
        return 0;
    prefetch_discarded(s->p, grads, n);
    loop_pay(s);
    prefetch_tidy(s->p);
    loop_release_grads(grads, n);
    return n;
}

size_t persia_loop_discard(loop *s, enum loop_whose whose)
{
    return loop_discard(s, &(choice){.whose = whose});
}

size_t persia_loop_discard_of(loop *s, const uint64_t *tickets, size_t n)
{
    return n ? loop_discard(s, &(choice){.tickets = tickets, .n = n}) : 0;
}

void persia_loop_forget(loop *s)
{
    prefetch_forget(s->p);
    loop_pay(s);
    persia_index_pool_forget(persia_client_indexes(s->c));
    pthread_mutex_lock(&s->lock);
    s->forgotten = atomic_load(&s->tickets);
    pthread_mutex_unlock(&s->lock);
}

/* What is pending, as the worker takes it, on this thread's turn: gradients
 * stay, and others may become pending, without the lock. */
static int pending_grads(loop *s, batcher_grad **out, size_t *n)
{
    pthread_mutex_lock(&s->lock);
    const size_t bytes = s->pending_n * sizeof *s->pending;
    loop_grad *pending = malloc(bytes + 1);
    *n = s->pending_n;
    if (pending && bytes)
        memcpy(pending, s->pending, bytes);
    pthread_mutex_unlock(&s->lock);
    *out = NULL;
    int rc = pending ? grads_of(pending, *n, out)
                     : persia_err_set(PERSIA_ENOMEM,
                                      "no memory for %zu gradients", *n);
    free(pending);
    return rc;
}

int persia_loop_finite(loop *s, uint8_t *finite, uint32_t finite_n)
{
    batcher_grad *grads;
    size_t n;
    int rc = persia_turn_take(&s->reading);
    if (rc)
        return rc;
    rc = pending_grads(s, &grads, &n);
    if (!rc)
        rc = persia_batcher_finite(s->w, grads, n, finite, finite_n);
    persia_turn_give(&s->reading);
    free(grads);
    return rc;
}

int persia_loop_sums(loop *s, batcher_sum **out, size_t *n, int *finite)
{
    batcher_grad *grads;
    size_t pending_n;
    *out = NULL;
    int rc = persia_turn_take(&s->reading);
    if (rc)
        return rc;
    rc = pending_grads(s, &grads, &pending_n);
    if (!rc)
        rc = persia_batcher_sums(s->w, grads, pending_n, out, n, finite);
    persia_turn_give(&s->reading);
    free(grads);
    return rc;
}
